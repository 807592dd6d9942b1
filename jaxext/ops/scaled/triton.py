"""The Triton kernels of products with scales."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxext.backends.kernel import KernelCall, kernel_result
from jaxext.backends.triton.triton_binding import TritonKernels
from jaxext.kernels import scaled
from jaxext.ops.scaled.problem import ScaledKernels

FEW_ROWS = 128  # of a product whose time is that of reading its other factor


class TritonScaled(ScaledKernels, TritonKernels):
    module = scaled

    def multiplied(self, problem):
        """Factors that are scaled in registers are rounded to 16 bits there, if the result has so many."""
        if problem.fine:
            return problem.precision if problem.bits == 32 else "bf16"
        return super().multiplied(problem)

    def slower(self, call):
        problem = self.problem(call)
        assert not isinstance(problem, str)  # it is asked of calls that it supports
        if problem.scales_steps and min(problem.rows, problem.cols) <= FEW_ROWS:
            return None  # XLA writes the scaled factor to memory, in 16 bits, and reads it again
        if problem.scales_steps:
            return "what XLA writes to memory is little beside so many products, and they are expected to be as fast"
        if problem.fine:
            return "the kernel scales factors as XLA does, and has not been timed"
        return "XLA converts factors inside of its products, which are expected to be as fast"

    def launch(self, call, problem, config):
        plain = super().launch(call, problem, config)
        return dataclasses.replace(plain, call=functools.partial(_converted, plain))


def _converted(plain: KernelCall, result: Any, *operands: jax.Array) -> jax.Array:
    """Call the kernel, to which scales are float32, two int4 a byte, and a result of 8 bits float32."""
    given = [
        x.astype(jnp.float32)
        if name.endswith("_scale")
        else lax.bitcast_convert_type(x.reshape(-1, 2), jnp.int8)
        if x.dtype == jnp.int4
        else x
        for name, x in zip(plain.slots, operands, strict=True)
    ]
    return plain.call(kernel_result(result), *given).astype(result.dtype)
