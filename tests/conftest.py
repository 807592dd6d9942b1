"""The world that every test runs in: 8 simulated devices, strict promotion of dtypes and ranks, no silent conversion, an empty cache."""

import collections
import contextlib
import gc
import itertools
import os
import pathlib
import re
import sys
import tempfile
from importlib.metadata import version

# For benchmarks/; at the end, so that no sources of jaxext hide the package that is installed.
sys.path.append(str(pathlib.Path(__file__).parents[1]))
# No table of this machine's user decides here.
_cache = tempfile.TemporaryDirectory(prefix="jaxext-tests-")
os.environ["XDG_CACHE_HOME"] = _cache.name
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
if os.environ.setdefault("JAX_PLATFORMS", "cpu") == "cpu":
    # The tests spend most of their time compiling, and half of that in LLVM's optimisation, which comes after everything that they check.
    os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"
    if version("jaxlib").startswith("0.10."):  # later ones have only the emitters that are slow to compile
        os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"

# ruff: noqa: E402
import broken_device
import jax
import pytest
import registrations

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_enable_x64", True)
gc.freeze()  # imported modules stay, and the collector, which tracing calls often, need not look at them each time


@pytest.fixture
def verified(monkeypatch):
    """Kernels are preferred as where `python -m jaxext verify` found all of them right, and however small the call."""
    from jaxext.backends import kernel
    from jaxext.tables import record

    monkeypatch.setattr(record, "unverified", lambda *_: None)
    monkeypatch.setattr(kernel, "SMALL_SECONDS", 0)


@pytest.fixture(autouse=True, scope="module")
def nothing_outlives_the_module():
    """Drop a module's registrations after it, and its compiled programs, which would fill the memory."""
    with registrations.undone():
        yield
    jax.clear_caches()


def pytest_configure(config):
    if os.environ["JAX_PLATFORMS"].startswith("cuda"):
        config.pluginmanager.register(broken_device)


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items):
    """Tests of kernels run on a GPU or, with Triton's switch, in its interpreter, where nothing else of Triton works."""
    gpu = any(d.platform == "gpu" for d in jax.devices())
    interpreting = os.environ.get("TRITON_INTERPRET") == "1"
    for item in items:
        of_kernels = item.path.parent.name == "kernels"
        if of_kernels and not interpreting:
            item.add_marker("gpu")
        if item.get_closest_marker("gpu") and not gpu:  # its keywords hold the names of folders too
            how = " and TRITON_INTERPRET is not 1" if of_kernels else ""
            item.add_marker(pytest.mark.skip(reason="no GPU here" + how))
        elif interpreting and not of_kernels:
            item.add_marker(pytest.mark.skip(reason="TRITON_INTERPRET is 1: only tests/kernels"))
    here = [item for item in items if not item.get_closest_marker("skip")]
    quick = [item for item in here if item.get_closest_marker("sampled") and not is_slow(item)]
    for item in {*quick} - sampled(quick, lambda item: item.get_closest_marker("sampled").args[0]):
        if not any(word in item.name for word in item.get_closest_marker("sampled").args[1:]):
            item.add_marker("slow")
    if limit := int(os.environ.get("JAXEXT_TESTS_PER_FUNCTION", "0")):
        kept = sampled(here, lambda item: limit)
        items[:] = [item for item in items if item in kept]


def is_slow(item):
    return item.get_closest_marker("slow") is not None


def sampled(items, limit):
    """Return at most `limit(test)` tests of each function, those of the long tail last."""
    functions = collections.defaultdict(list)
    for item in items:
        functions[item.nodeid.partition("[")[0]].append(item)
    return {item for each in functions.values() for item in covering(each, limit(each[0]))}


def covering(items, count):
    """Return so many tests of a function: each has the most values that those before it have not, then pairs of values, then words."""
    if len(items) <= count:
        return items
    places = sorted(range(len(items)), key=lambda at: f"{at:016b}"[::-1])  # spread evenly, however many are taken
    rest = {items[at]: parameters(items[at]) for at in places}
    chosen, seen = [], (set(), set(), set())
    for _ in range(count):
        best = max(rest, key=lambda item: (not is_slow(item), *(len(found - known) for found, known in zip(rest[item], seen, strict=True))))
        for found, known in zip(rest.pop(best), seen, strict=True):
            known |= found
        chosen.append(best)
    return chosen


def parameters(item):
    """Return the values of a test's parameters, the pairs of them, and the words in them."""
    values = list(enumerate(item.nodeid.partition("[")[2].split("-")))
    return set(values), set(itertools.combinations(values, 2)), {(at, word) for at, value in values for word in re.findall(r"\w+", value)}


@contextlib.contextmanager
def _long_runs():
    """Plans for programs that run so often that compilation costs nothing, by the least time: small convolutions are rewritten."""
    from jaxext.ops.conv import xla, xla_plan

    def forget():
        xla.plans.cache_clear()
        jax.clear_caches()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xla_plan, "CALLS", 1e9)
        patch.setattr(xla, "MARGIN", 1.0)
        forget()
        yield
    forget()


@pytest.fixture(scope="module")
def long_runs():
    """Plans for long runs in all tests of a module."""
    with _long_runs():
        yield


@pytest.fixture
def long_run():
    """Plans for long runs in one test."""
    with _long_runs():
        yield
