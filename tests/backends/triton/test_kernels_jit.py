"""The Triton kernels as the tests in tests/kernels launch them on a GPU, on PyTorch's tensors: they are those that JAX programs call."""

import collections
import dataclasses
import functools
import importlib
import pathlib
import types

import pytest

pytest.importorskip("triton", reason="no Triton here")

# ruff: noqa: E402
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from jaxext.backends.triton.interpreter import DTYPES
from jaxext.bench import triton_ptx
from jaxext.bench.problems import PRODUCTS
from jaxext.kernels.epilogue import Epilogue


@functools.cache
class Dtype:
    """Triton knows PyTorch's by how they are printed, and remembers them by their hashes: there must be one of each, which lives on."""

    def __init__(self, name: str):
        self._name = f"torch.{DTYPES[name].name}"

    def __repr__(self):
        return self._name


@pytest.fixture
def asked(monkeypatch):
    """Return the sources that Triton is asked to compile, and the launches on a Hopper GPU that is not there."""
    sources, launched = [], []

    def compile(source, target=None, options=None, **_):
        sources.append((source, options, knobs.compilation.always_compile))
        run = lambda *args: launched.append(args)
        return types.SimpleNamespace(run=run, launch_metadata=lambda *_: None, function=None, packed_metadata=None, asm={"ptx": ""})

    monkeypatch.setattr(triton, "compile", compile)
    monkeypatch.setattr(triton.compiler, "compile", compile)
    gpu = dict(get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0, get_current_stream=lambda _: 0)
    monkeypatch.setattr(driver, "_active", types.SimpleNamespace(**gpu))
    return sources, launched


EPILOGUES = (Epilogue(bias="fp32", residual="bf16", saves=True), Epilogue(activation="relu"))


@pytest.mark.parametrize("epilogue", [None, *EPILOGUES], ids=["plain", "saves", "alone"])
@pytest.mark.parametrize("case", {case.kernel: case for case in PRODUCTS}.values(), ids=lambda case: case.kernel)
def test_what_is_tested_is_what_is_called(case, epilogue, asked, monkeypatch):
    """The same source, signature, alignment and options; and not a kernel of before, which Triton's cache has under the same key."""
    sources, launched = asked
    monkeypatch.syspath_prepend(str(pathlib.Path(__file__).parents[2] / "kernels"))
    harness = importlib.import_module("harness")
    module = importlib.import_module(f"jaxext.kernels.{case.kernel}")
    for role in case.products:
        for numbers in case.numbers:
            problem = dataclasses.replace(case.problem(role, numbers, 90), epilogue=epilogue)
            if epilogue and module.refuses(problem):
                assert role not in ("nn", "fprop") or "i8" in problem.dtypes or case.kernel == "ragged" and epilogue.residual
                continue
            launch = module.launch(problem, module.candidates(problem)[0])
            monkeypatch.setattr(launch.kernel, "device_caches", collections.defaultdict(launch.kernel.create_binder))
            tensors = [
                types.SimpleNamespace(dtype=Dtype(dtype), data_ptr=lambda: 1 << 14, ptr_range=lambda: 0)
                for dtype in triton_ptx.dtypes_of(problem, launch)
            ]
            triton_ptx.compile_launch(launch, problem)
            harness.launch_on_gpu(launch, *tensors)
            (called, wanted, _), (tested, options, afresh) = sources[-2:]
            assert (tested.fn, tested.signature, tested.constants) == (called.fn, called.signature, called.constants)
            assert {place: told for place, told in tested.attrs.items() if told} == called.attrs
            assert {name: options[name] for name in wanted} == wanted
            assert afresh and not knobs.compilation.always_compile
            assert launched.pop()[:3] == (*launch.grid, *(1,) * (3 - len(launch.grid)))
