"""The `xla` implementation of matmul, and of every form without a window: `lax.dot_general`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxext.backends.xla_products import XlaDefinition, convert, is_complex, preferred_dtype, unfused
from jaxext.core.call import Call, symbolic_size
from jaxext.core.form import dimension_numbers
from jaxext.core.implementation import Algorithm

# Rows and columns from which XLA's CPU backend multiplies the real and imaginary parts of two matrices faster than complex numbers.
_COMPLEX = 128


class XlaMatmul(XlaDefinition):
    """The definition of matmul, and of every form without a window: `lax.dot_general`.  It supports every call."""

    def candidates(self, call: Call) -> Sequence[Algorithm]:
        algorithms = ("real_products", "dot_general") if _large_and_complex(call) else ("dot_general",)
        return tuple(map(Algorithm, algorithms))

    def run(self, call: Call, config: Algorithm, operands: Mapping[str, jax.Array]) -> jax.Array:
        # The left operand has the first pair label of the result, so that dot_general gives the axis order of a matmul's result.
        first = next(label for label in call.labels[call.open] if not all(label in call.labels[slot] for slot in operands))
        lhs, rhs = sorted(operands, key=lambda slot: first not in call.labels[slot])
        left, right, result = call.axes[lhs], call.axes[rhs], call.axes[call.open]
        if call.platform == "cpu" and _faster_swapped(operands[lhs], operands[rhs], left, right, result):
            lhs, rhs, left, right = rhs, lhs, right, left
        x, w, dims = operands[lhs], operands[rhs], dimension_numbers(left, right, result)
        free = [axis for axis in (*left, *right) if axis in result and not (axis in left and axis in right)]
        order = [*(axis for axis in left if axis in right and axis in result), *free]
        if order != [*result] and call.platform == "cpu" and x.dtype == w.dtype == jnp.bfloat16 and call.dtype == jnp.float32:
            # XLA converts other factors itself, but compiles some such products, transposed, to a kernel that it does not have.
            x, w = x.astype(jnp.float32), w.astype(jnp.float32)
        if config.algorithm == "real_products":
            y = real_products(x, w, dims, call.precision, call.dtype)
        else:
            preferred = preferred_dtype(x, w, dims, call.precision, call.dtype)
            y = convert(lax.dot_general(x, w, dims, precision=call.precision, preferred_element_type=preferred), call.dtype)
        y = unfused(y, x, w, dims, call.platform)
        return lax.transpose(y, [order.index(axis) for axis in result])


def _large_and_complex(call: Call) -> bool:
    """Return whether two large matrices of complex numbers are multiplied on a CPU, into numbers as wide, or into their real part."""
    left, right = ({*call.labels[slot]} for slot in call.labels if slot != call.open)
    dtypes = {dtype for slot, dtype in call.dtypes.items() if slot != call.open}
    if call.platform != "cpu" or len(dtypes) > 1 or not is_complex(dtype := dtypes.pop()):
        return False
    if call.dtype not in (dtype, np.finfo(dtype).dtype) or symbolic_size(call):
        return False
    batch, *free = (
        math.prod(call.sizes[label] for label in labels)
        for labels in (left & right & {*call.labels[call.open]}, left - right, right - left)
    )
    return batch == 1 and min(free) >= _COMPLEX


def _faster_swapped(lhs, rhs, left, right, result) -> bool:
    """Return whether both operands have 16 bits, their contracted axes come first, and the right one is smaller.

    XLA's CPU backend multiplies such operands twice as fast with the smaller one on the left.
    """
    static = all(isinstance(n, int) for n in (*lhs.shape, *rhs.shape))
    if not static or not lhs.dtype.itemsize == rhs.dtype.itemsize == 2 or lhs.size <= rhs.size:
        return False
    batch = {axis for axis in left if axis in right and axis in result}
    kept = [[axis in result for axis in axes if axis not in batch] for axes in (left, right)]
    return all(flags == sorted(flags) for flags in kept)  # False, which is contracted, comes before True


def real_products(lhs, rhs, dims, precision, dtype) -> jax.Array:
    """The product of two complex arrays by four of their parts, or the real part of it by two."""

    def dot(left, right):
        return lax.dot_general(left, right, dims, precision=precision)

    (a, b), (c, d) = ((lax.real(x), lax.imag(x)) for x in (lhs, rhs))
    real = dot(a, c) - dot(b, d)
    return lax.complex(real, dot(a, d) + dot(b, c)) if is_complex(dtype) else real
