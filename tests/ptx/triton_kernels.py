"""Our Triton kernels' PTX, as Triton's compiler makes it for devices that are not here, launched on the interpreter."""

import dataclasses
import functools
import importlib
from typing import Any

import epilogues
import numpy as np
import pytest
import test_causal_kernel
import test_conv
import test_depthwise
import test_epilogues
import test_gram_kernel
import test_matmul
import test_ragged_kernel
import test_scaled_dot
from harness import check
from interpreter import EARLY, LATE, Input, Module, Output

from jaxext.backends.triton.interpreter import DTYPES
from jaxext.benchmarks import compiled
from jaxext.kernels.ragged.problem import visits

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
        return Module(self.ptx)

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

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of the results."""
        return (DEFINITIONS[self.kernel][0](self.problem, self.open_slot),)

    def execute(self, operands, late: bool, module: Module | None = None) -> np.ndarray:
        """The result; its partial results added up."""
        (result,) = self.execute_all(operands, late, module)
        return result

    def execute_all(self, operands, late: bool, module: Module | None = None) -> list[np.ndarray]:
        """All results.  Each element is written once, the operands stay as they were."""
        module = module or self.module
        dtype, splits = DTYPES[self.problem.dtypes[2]], self.launch.splits
        parts = [splits > 1 and i not in self.launch.whole for i in range(len(self.shapes))]
        made = np.dtype(np.int32 if dtype.kind == "i" else np.float32)
        results = [
            Output(np.zeros((splits, *shape), made) if partial else np.zeros(shape, dtype))
            for shape, partial in zip(self.shapes, parts, strict=True)
        ]
        inputs = {slot: Input(operands[slot]) for slot in self.launch.operands}
        arguments: list[Any] = [*(inputs[slot] for slot in self.launch.operands), *results]
        (name,) = module.kernels
        more = [0] * (len(module.kernels[name].parameters) - len(arguments))  # memory that Triton may ask for, and these kernels do not
        block = (32 * self.launch.num_warps,)
        module.run(name, self.launch.grid, block, [*arguments, *more], shared=self.compiled.metadata.shared, late=late)
        for result in results:
            assert (result.written == 1).all(), f"each element is written once: {np.bincount(result.written)}"
        return [
            result.values.sum(axis=0, dtype=made).astype(dtype) if partial else result.values
            for result, partial in zip(results, parts, strict=True)
        ]

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


@dataclasses.dataclass(frozen=True)
class RaggedCall(Call):
    """Of a ragged product, and of the ranges of its groups."""

    ranges: tuple[np.ndarray, np.ndarray] = dataclasses.field(kw_only=True)

    @property
    def shapes(self):
        return (self.problem.shapes[self.open_slot],)

    def operands(self, integers: bool):
        begin, end = self.ranges
        found = visits(np, begin, end, self.problem.M, self.config.tile_m)
        return test_ragged_kernel.some_operands(self.problem, begin, end, integers) | dict(begin=begin, end=end, visits=found)

    def check(self, got, operands, integers: bool) -> None:
        factors = {slot: operands[slot].astype(np.float64) for slot in operands.keys() & {*"xwy"}}
        truth, scale = (
            test_ragged_kernel.true(self.problem, each, *self.ranges)
            for each in (factors, {slot: np.abs(x) for slot, x in factors.items()})
        )
        check(got, truth, None if integers else self.product_error * scale)


class FusedCall(Call):
    """Of a problem with an epilogue."""

    @property
    def shapes(self):
        return epilogues.results(self.problem)

    def operands(self, integers: bool):
        return epilogues.some_operands(self.problem, integers)

    def execute_and_check(self, module: Module | None = None) -> None:
        """As a plain call; small integers exactly where the activation keeps them."""
        for integers in (True, False):
            operands = self.operands(integers)
            late, early = (self.execute_all(operands, when, module) for when in (LATE, EARLY))
            for one, other in zip(late, early, strict=True):
                np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8))
            exact = integers and self.problem.epilogue.activation in (None, "relu", "relu6")
            test_epilogues.check_results(self.kernel, self.problem, operands, late, exact, self.product_error)


class FusedRaggedCall(RaggedCall):
    """Of both."""

    @property
    def shapes(self):
        return test_ragged_kernel.fused_results(self.problem)

    def operands(self, integers: bool):
        begin, end = self.ranges
        found = visits(np, begin, end, self.problem.M, self.config.tile_m)
        return test_ragged_kernel.some_fused_operands(self.problem, begin, end, integers) | dict(visits=found)

    def execute_and_check(self, module: Module | None = None) -> None:
        for integers in (True, False):
            operands = self.operands(integers)
            late, early = (self.execute_all(operands, when, module) for when in (LATE, EARLY))
            exact = integers and self.problem.epilogue.activation in (None, "relu")
            for one, other, want, scale in zip(late, early, *test_ragged_kernel.fused(self.problem, operands, *self.ranges), strict=False):
                np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8))
                check(one, want, None if exact else self.product_error * scale)


class CausalCall(Call):
    """Of a causal convolution or its derivative."""

    @property
    def shapes(self):
        return tuple(of.shape for of in test_causal_kernel.true(self.problem, self.operands(False)))

    def operands(self, integers: bool):
        return test_causal_kernel.operands_of(self.problem)

    def execute_and_check(self, module: Module | None = None) -> None:
        operands = self.operands(False)
        late, early = (self.execute_all(operands, when, module) for when in (LATE, EARLY))
        for one, other in zip(late, early, strict=True):
            np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8))
        test_causal_kernel.near(self.problem, late, operands)


class ScaledCall(Call):
    """Of a product of scaled numbers."""

    @property
    def shapes(self):
        return (test_scaled_dot.shape(self.problem, test_scaled_dot.ROLES[self.problem.role]),)

    @property
    def product_error(self) -> float:
        """Factors that are scaled in registers are rounded."""
        wide = PRODUCT_ERRORS["tf32"] if self.problem.common is not None and self.problem.bits == 32 else 1
        return wide if not self.problem.fine or self.problem.bits == 32 else 2**13

    def operands(self, integers: bool):
        return test_scaled_dot.some_operands(self.problem, integers)

    def check(self, got, operands, integers: bool) -> None:
        scale = None if integers else self.product_error * test_scaled_dot.magnitude(self.problem, operands)
        check(got, test_scaled_dot.true(self.problem, operands), scale)

    def execute_and_check(self, module: Module | None = None) -> None:
        for integers in (True, False):
            operands = self.operands(integers)
            late, early = (self.execute(operands, when, module) for when in (LATE, EARLY))
            np.testing.assert_array_equal(late.view(np.uint8), early.view(np.uint8))
            self.check(late, operands, integers)


class GramCall(Call):
    """Of a product with its own transpose."""

    @property
    def shapes(self):
        return (test_gram_kernel.shape(self.problem),)

    def operands(self, integers: bool):
        return test_gram_kernel.some_operands(self.problem, integers)

    def check(self, got, operands, integers: bool) -> None:
        np.testing.assert_array_equal(got, got.swapaxes(1, 2))
        scale = None if integers else self.product_error * test_gram_kernel.magnitude(self.problem, operands)
        check(got, test_gram_kernel.true(self.problem, operands), scale)


def call(kernel: str, problem: Any) -> Call:
    """With the configuration that the kernel picks for the problem."""
    return (FusedCall if problem.epilogue else Call)(kernel, problem, kernel_module(kernel).candidates(problem)[0])


def skip_without_compiler() -> None:
    if reason := compiled.missing():
        pytest.skip(reason)
