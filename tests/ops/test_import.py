"""`import jaxext` is silent, touches no device and no environment, and tells an unsupported jax in one sentence."""

import inspect
import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import pytest

import jaxext

ROOT = pathlib.Path(jaxext.__file__).parent.parent


def python(code, *path, **environment):
    """A fresh interpreter that runs `code`, with the package on its path and warnings as errors."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([*map(str, path), str(ROOT)]), "PYTHONWARNINGS": "error"} | environment
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)


def test_silent():
    """Nothing is written, the environment and jax's settings are as before, and no optional package is loaded; every public name is there.

    A platform that does not exist is noticed at the first use of a device: not at import.
    """
    code = """
import json, os, sys, threading
before = dict(os.environ)
import jax
settings = jax.config.values.copy()
modules = set(sys.modules)
threads = threading.active_count()
import jaxext
assert dict(os.environ) == before
assert jax.config.values == settings
assert threading.active_count() == threads
new = {name.partition(".")[0] for name in set(sys.modules) - modules}
assert not new & {"triton", "jax_triton", "rich", "filelock", "platformdirs", "flax", "equinox", "matplotlib", "torch", "scipy"}, new
print(json.dumps([jaxext.__version__, [name for name in jaxext.__all__ if not hasattr(jaxext, name)]]))
print("imported", file=sys.stderr)
jax.devices()
"""
    done = python(code, JAX_PLATFORMS="nonsense")
    while_importing, _, afterwards = done.stderr.partition("imported\n")
    assert while_importing == "" and "nonsense" in afterwards, done.stderr  # the check can fail: asking for devices did
    assert json.loads(done.stdout) == [jaxext.__version__, []], done.stdout


def test_public_names():
    """The package exports few names, and none is the class of a result."""
    assert sorted(jaxext.__all__) == list(jaxext.__all__) and len(jaxext.__all__) <= 40
    assert [name for name in jaxext.__all__ if inspect.isclass(getattr(jaxext, name))] == []


@pytest.mark.parametrize("module", [jaxext, *(module for name in jaxext.__all__ if inspect.ismodule(module := getattr(jaxext, name)))])
def test_completion_shows_public_names_alone(module):
    assert {*dir(module)} - {"__version__"} == {*module.__all__}


def test_an_old_jax_is_told_in_one_sentence(tmp_path):
    """The error comes before anything is touched that an old jax may lack."""
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax/__init__.py").write_text('__version__ = "0.4.30"\n__version_info__ = (0, 4, 30)\n')
    done = python("import jaxext", tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ImportError: jaxext needs jax 0.10.2 or newer, this is jax 0.4.30: pip install -U jax"
    assert "During handling" not in done.stderr and "direct cause" not in done.stderr


def test_the_sources_tell_in_one_sentence_that_they_hide_the_installed_package(tmp_path):
    """The root of the repository is such a folder, unless an editable installation goes before it: -S leaves that out."""
    shutil.copytree(ROOT / "jaxext", tmp_path / "jaxext", ignore=shutil.ignore_patterns("kernels", "__pycache__"))
    done = subprocess.run([sys.executable, "-S", "-c", "import jaxext"], cwd=tmp_path, capture_output=True, text=True, env={})
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: jaxext was imported from its sources in {tmp_path / 'jaxext'}, which hide the installed package and cannot run"
        " themselves: start Python in another folder, or run `pip install --editable .` in the repository"
    )
    assert "During handling" not in done.stderr and "direct cause" not in done.stderr


def test_this_jax_is_supported():
    assert jax.__version_info__ >= (0, 10, 2)
