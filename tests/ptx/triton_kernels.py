"""Our Triton kernels' PTX, as Triton's compiler makes it for devices that are not here, launched on the interpreter."""

import dataclasses
import functools
import importlib
from typing import Any

import numpy as np
import pytest
from ptxsim import EARLY, LATE, Input, Module, Output
from test_causal_kernel import CausalCall
from test_conv import ConvCall
from test_depthwise import DepthwiseCall
from test_gram_kernel import GramCall
from test_matmul import MatmulCall
from test_ragged_kernel import RaggedCall
from test_ragged_scaled_kernel import RaggedScaledCall
from test_scaled_dot import ScaledCall

from jaxext.backends.triton.interpreter import DTYPES
from jaxext.bench import triton_ptx

# Operands and results by definition are those of the tests in tests/kernels.
_CALLS = (MatmulCall, ConvCall, DepthwiseCall, RaggedCall, CausalCall, ScaledCall, RaggedScaledCall, GramCall)
CALLS: dict[str, Any] = {of.kernel: of for of in _CALLS}
# How far a product of float32 numbers may be from the exact one, in units of float32's own error: TF32 drops 13 bits of each factor,
# and the others the products of the least parts.
PRODUCT_ERRORS = {"tf32": 2**12, "bf16x3": 2**7, "bf16x6": 2, "tf32x3": 4, "ieee": 1}
EXACT = (None, "relu", "relu6")  # activations that keep small integers


def kernel_module(kernel: str) -> Any:
    return importlib.import_module(f"jaxext.kernels.{kernel}")


@dataclasses.dataclass(frozen=True)
class Call:
    """A kernel's problem with one of its configurations; `more` is what else a call of tests/kernels has."""

    kernel: str
    problem: Any
    config: Any
    more: Any = ()

    @functools.cached_property
    def defined(self) -> Any:
        return CALLS[self.kernel](self.problem, self.config, *self.more)

    @functools.cached_property
    def compiled(self):
        return _compiled(self.launch, self.problem)

    @functools.cached_property
    def next_compiled(self):
        return _compiled(self.launch.then, self.problem)

    @property
    def launch(self):
        return self.defined.launch

    @property
    def ptx(self) -> str:
        return self.compiled.asm["ptx"]

    @functools.cached_property
    def module(self) -> Module:
        return Module(self.ptx)

    @functools.cached_property
    def next_module(self) -> Module:
        return Module(self.next_compiled.asm["ptx"])

    @property
    def product_error(self) -> float:
        """Factors that are scaled in registers are rounded."""
        problem, scaled = self.problem, self.kernel in ("scaled", "ragged_scaled")
        if scaled and problem.fine and problem.bits < 32:
            return 2**14  # as the laws of verify have it
        floats = problem.common is not None and problem.bits == 32 if scaled else "fp32" in problem.dtypes[:2]
        return PRODUCT_ERRORS[problem.precision] if floats and self.kernel not in ("depthwise", "causal") else 1

    def operands(self, integers: bool) -> dict[str, np.ndarray]:
        return self.defined.operands(integers)

    def execute(self, operands, late: bool, module: Module | None = None) -> list[np.ndarray]:
        """All results; partial ones added up.  Each element is written once, the operands stay as they were."""
        module, shapes = module or self.module, self.defined.shapes
        dtype, splits = DTYPES[self.problem.dtypes[2]], self.launch.splits
        parts = [splits > 1 and i not in self.launch.whole for i in range(len(shapes))]
        made = np.dtype(np.int32 if dtype.kind == "i" else np.float32)
        results = [
            Output(np.zeros((splits, *shape), made) if partial else np.zeros(shape, dtype))
            for shape, partial in zip(shapes, parts, strict=True)
        ]
        inputs = {slot: Input(operands[slot]) for slot in self.launch.operands}
        if self.launch.then:  # it may not read what the first launch has not written
            inputs["partial"] = Output(np.zeros(self.launch.partial, np.float32))
            _run(module, self.launch, self.compiled, inputs, [inputs["partial"]], late)
            assert (inputs["partial"].written <= 1).all()
            _run(self.next_module, self.launch.then, self.next_compiled, inputs, results, late)
        else:
            _run(module, self.launch, self.compiled, inputs, results, late)
        for result in results:
            assert (result.written == 1).all(), f"each element is written once: {np.bincount(result.written)}"
        return [
            result.values.sum(axis=0, dtype=made).astype(dtype) if partial else result.values
            for result, partial in zip(results, parts, strict=True)
        ]

    def check(self, got, operands, integers: bool) -> None:
        """Small integers are exact where the activation keeps them."""
        exact = integers and (self.problem.epilogue is None or self.problem.epilogue.activation in EXACT)
        self.defined.judge(got, operands, exact, self.product_error)

    def execute_and_check(self, module: Module | None = None) -> None:
        """Small integers and other numbers, with the same bits late and early."""
        for integers in self.defined.kinds:
            operands = self.operands(integers)
            late, early = (self.execute(operands, when, module) for when in (LATE, EARLY))
            for one, other in zip(late, early, strict=True):
                np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8))
            self.check(late, operands, integers)


def _compiled(launch, problem):
    """Compile without Triton's cache, which does not see when a method of a `Problem` changes."""
    from triton import knobs

    with knobs.compilation.scope():
        knobs.compilation.always_compile = True
        return triton_ptx.compile_launch(launch, problem)


def _run(module: Module, launch, compiled, inputs, results, late: bool) -> None:
    (name,) = module.kernels
    arguments = [*(inputs[slot] for slot in launch.operands), *results]
    module.run(name, launch.grid, (32 * launch.num_warps,), arguments, shared=compiled.metadata.shared, late=late)


def call(kernel: str, problem: Any, *more: Any, splits: int | None = None, **changes: Any) -> Call:
    """Return the call with the configuration that the kernel picks, of so many splits at most, or with changes of it."""
    config = kernel_module(kernel).candidates(problem)[0]
    changes |= {"splits": min(config.splits, splits)} if splits else {}
    return Call(kernel, problem, dataclasses.replace(config, **changes), more)


def skip_without_compiler() -> None:
    if reason := triton_ptx.missing():
        pytest.skip(reason)
