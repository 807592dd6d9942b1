"""Our Triton kernels' PTX, as Triton's compiler makes it for devices that are not here, launched on the interpreter."""

import dataclasses
import functools
import importlib
from typing import Any

import numpy as np
import pytest
import test_conv
import test_depthwise
import test_matmul
import triton
from harness import check
from interpreter import EARLY, LATE, Input, Module, Output

from jaxext.backends.triton.interpreter import DTYPES
from jaxext.benchmarks import compiled

# kernel -> the shape of a slot, random operands, and the result by definition
DEFINITIONS = {
    "matmul": (test_matmul.shape, test_matmul.some_operands, test_matmul.true),
    "conv": (test_conv.shape, test_conv.some_operands, test_conv.true),
    "depthwise": (test_depthwise.shape_of, test_depthwise.operands_of, test_conv.true),
}
# How far a product of float32 numbers may be from the exact one, in units of float32's own error: TF32 drops 13 bits of each factor,
# and the others the products of the least parts.
PRODUCT_ERRORS = {"tf32": 2**12, "bf16x3": 2**7, "bf16x6": 2, "tf32x3": 4, "ieee": 1}


def kernel_module(kernel: str) -> Any:
    return importlib.import_module(f"jaxext.kernels.{kernel}")


@dataclasses.dataclass(frozen=True)
class Call:
    """A kernel's problem with one of its configurations."""

    kernel: str
    problem: Any
    config: Any

    @functools.cached_property
    def launch(self):
        return kernel_module(self.kernel).launch(self.problem, self.config)

    @functools.cached_property
    def compiled(self):
        """Not out of Triton's cache, which does not see when a method of a `Problem` changes."""
        from triton import knobs

        with knobs.compilation.scope():
            knobs.compilation.always_compile = True
            return compiled.compile_launch(self.launch, self.problem)

    @property
    def ptx(self) -> str:
        return self.compiled.asm["ptx"]

    @functools.cached_property
    def module(self) -> Module:
        return Module(with_fences(self.ptx))

    @property
    def open_slot(self) -> str:
        (slot,) = set("abc" if self.kernel == "matmul" else "xwy") - {*self.launch.operands}
        return slot

    @property
    def product_error(self) -> float:
        floats = "fp32" in self.problem.dtypes[:2] and self.kernel != "depthwise"
        return PRODUCT_ERRORS[self.problem.precision] if floats else 1

    def operands(self, integers: bool) -> dict[str, np.ndarray]:
        return DEFINITIONS[self.kernel][1](self.problem, integers)

    def execute(self, operands, late: bool, module: Module | None = None) -> np.ndarray:
        """The result; its partial results added up.  Each element is written once, the operands stay as they were."""
        module = module or self.module
        shape = DEFINITIONS[self.kernel][0](self.problem, self.open_slot)
        partial, dtype = self.launch.splits > 1, DTYPES[self.problem.dtypes[2]]
        made = np.dtype((np.int32 if dtype.kind == "i" else np.float32) if partial else dtype)
        result = Output(np.zeros((self.launch.splits, *shape) if partial else shape, made))
        (name,) = module.kernels
        more = [0] * (len(module.kernels[name].parameters) - 3)  # memory that Triton may ask for, and these kernels do not
        arguments = [*(Input(operands[slot]) for slot in self.launch.operands), result, *more]
        block = (32 * self.launch.num_warps,)
        module.run(name, self.launch.grid, block, arguments, shared=self.compiled.metadata.shared, late=late)
        assert (result.written == 1).all(), f"each element is written once: {np.bincount(result.written)}"
        return result.values.sum(axis=0, dtype=made).astype(dtype) if partial else result.values

    def check(self, got, operands, integers: bool) -> None:
        truth = DEFINITIONS[self.kernel][2]
        magnitudes = {slot: np.abs(values.astype(np.float64)) for slot, values in operands.items()}
        check(got, truth(self.problem, operands), None if integers else self.product_error * truth(self.problem, magnitudes))

    def execute_and_check(self, module: Module | None = None) -> None:
        """Small integers exactly, with the same bits late and early; and other numbers up to rounding."""
        operands = self.operands(integers=True)
        late, early = (self.execute(operands, when, module) for when in (LATE, EARLY))
        np.testing.assert_array_equal(late.view(np.uint8), early.view(np.uint8))
        self.check(late, operands, integers=True)
        if "i8" not in self.problem.dtypes:
            operands = self.operands(integers=False)
            self.check(self.execute(operands, LATE, module), operands, integers=False)


def call(kernel: str, problem: Any) -> Call:
    """With the configuration that the kernel picks for the problem."""
    return Call(kernel, problem, kernel_module(kernel).pick(problem))


OLD = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)  # with faults that docs/versions.md tells


def with_fences(ptx: str) -> str:
    """The PTX with the fences that an old Triton forgets, between copies into shared memory and the wgmma that read them."""
    if not OLD or "wgmma.mma_async" not in ptx or "fence.proxy.async" in ptx:
        return ptx
    return ptx.replace("wgmma.fence.sync.aligned;", "fence.proxy.async.shared::cta; wgmma.fence.sync.aligned;")


def skip_without_compiler() -> None:
    if reason := compiled.missing():
        pytest.skip(reason)
