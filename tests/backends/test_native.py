"""The source of the compiled parts, with folders in place of what is installed: nothing is compiled or loaded."""

import importlib.machinery
import sys
import types

import pytest

from jaxext.backends import launcher, native
from jaxext.backends.cuda import cuda_binding

OWN, OTHER = ("a" * 64, "b" * 64), ("c" * 64, "b" * 64)  # digests of the kernels' sources and of the launcher's
CACHED = (native.kernels, native._package, cuda_binding.missing, launcher.missing)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Install distributions: series -> version and digests, or None for a package that does not load; with the version of the driver."""
    monkeypatch.setitem(sys.modules, "jaxext._cuda_build", _build("JAXEXT_CUDA=OFF", *OWN))
    monkeypatch.setattr("jaxext._cuda_build", sys.modules["jaxext._cuda_build"], raising=False)
    monkeypatch.setitem(sys.modules, "jaxext._cuda_module", None)  # as if there were no such file
    monkeypatch.delattr("jaxext._cuda_module", raising=False)
    monkeypatch.setitem(sys.modules, "jaxext._launcher", None)
    for name in [name for name in sys.modules if name.startswith("jaxext_kernels")]:  # one that is installed is found behind these
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def install(driver=None, **series):
        for name, (version, digests) in series.items():
            info, package = tmp_path / f"jaxext_kernels_{name}-{version}.dist-info", tmp_path / f"jaxext_kernels_{name}"
            info.mkdir()
            package.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: jaxext-kernels-{name}\nVersion: {version}\n")
            (package / "__init__.py").touch()
            (package / "_cuda_module.py").write_text(f"cuda_version = '{name[2:]}.0'\nffi_version = lambda: (0, 1)\n")
            (package / "_launcher.abi3.so").write_text("none\n")
            if digests:
                (package / "_cuda_build.py").write_text("SOURCES, LAUNCHER = {!r}, {!r}".format(*digests))
        monkeypatch.setattr(native, "driver", lambda: driver)
        for cached in CACHED:
            cached.cache_clear()
        return native.kernels()

    yield install
    for cached in CACHED:
        cached.cache_clear()
    for name in set(sys.modules) - before:
        if name.startswith("jaxext_kernels"):
            del sys.modules[name]


def _build(reason, sources, launcher):
    return types.SimpleNamespace(REASON=reason, NO_LAUNCHER=reason, SOURCES=sources, LAUNCHER=launcher)


def test_none_is_installed(installed):
    assert installed().taken is None
    assert cuda_binding.missing() == "built without CUDA (JAXEXT_CUDA=OFF)" and native.find("_launcher") is None
    with pytest.raises(ImportError):
        native.cuda_module()


def test_one_that_fits(installed, tmp_path):
    assert installed(cu13=("0.2.0", OWN)).taken == "jaxext_kernels_cu13"
    assert native.cuda_module().cuda_version == "13.0" and cuda_binding.missing() is None
    assert launcher.find() == tmp_path / "jaxext_kernels_cu13/_launcher.abi3.so"
    assert native.origin("_cuda_module") == f"jaxext-kernels-cu13 0.2.0: {tmp_path}/jaxext_kernels_cu13/_cuda_module.py"


@pytest.mark.parametrize(
    ("driver", "taken", "why"),
    [
        (None, 13, "jaxext-kernels-cu13 0.2.0 is used"),
        ((13, 1), 13, "jaxext-kernels-cu13 0.2.0 is used"),
        ((12, 8), 12, "the driver is of CUDA 12.8"),
        ((11, 8), 13, "the driver is of CUDA 11.8"),  # which none runs; those of cu13 are compiled into programs for other machines
    ],
)
def test_the_series_is_that_of_the_driver(installed, driver, taken, why):
    found = installed(driver, cu12=("0.2.0", OWN), cu13=("0.2.0", OWN))
    assert (found.taken, found.refused) == (f"jaxext_kernels_cu{taken}", {f"jaxext-kernels-cu{25 - taken} 0.2.0": why})


@pytest.mark.parametrize("digests", [OTHER, OWN[::-1], None], ids=["kernels", "launcher", "none"])
def test_one_of_other_sources_is_refused(installed, digests):
    """The reason says what is installed, what is wanted, and the command; another that fits is taken."""
    found = installed(cu13=("0.1.0", digests))
    assert found.taken is None and native.find("_launcher") is None
    for reason in (cuda_binding.missing(), launcher.missing()):
        assert reason and "(JAXEXT_CUDA=OFF); jaxext-kernels-cu13 0.1.0 is installed, but " in reason
        assert ("pip install --find-links wheels --force-reinstall --no-deps jaxext-kernels-cu13" in reason) == (digests is not None)
    assert installed(cu12=("0.2.0", OWN)).taken == "jaxext_kernels_cu12"


def test_an_older_jaxext_knows_no_digest_of_its_launcher(installed, monkeypatch):
    monkeypatch.delattr(sys.modules["jaxext._cuda_build"], "LAUNCHER")
    assert installed(cu13=("0.2.0", OWN)).taken is None and f"wants {'a' * 16}/: make" in (cuda_binding.missing() or "")


def test_a_build_from_sources_comes_first(installed, monkeypatch):
    own = types.SimpleNamespace(ffi_version=lambda: (0, 1), __spec__=importlib.machinery.ModuleSpec("jaxext._cuda_module", None))
    monkeypatch.setitem(sys.modules, "jaxext._cuda_module", own)
    monkeypatch.setattr("jaxext._cuda_module", own, raising=False)
    installed(cu13=("0.2.0", OWN))
    assert native.cuda_module() is own and cuda_binding.missing() is None
