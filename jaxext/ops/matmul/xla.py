"""The `xla` implementation of matmul, and of every form without a window: `lax.dot_general`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxext.core.call import Call, symbolic_size
from jaxext.core.form import dimension_numbers, rows_columns_depth
from jaxext.core.implementation import Algorithm, Definition, files_of, hash_of


class XlaDefinition(Definition):
    """A definition of jaxext's, whose version is a hash of its files."""

    name = "xla"
    version = "of its files"

    def code(self, platform: str) -> str:
        return hash_of(files_of(self))


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
        if config.algorithm == "real_products":
            y = real_products(x, w, dims, call.precision, call.dtype)
        else:
            preferred = _preferred(x, w, dims, call.precision, call.dtype)
            y = convert(lax.dot_general(x, w, dims, precision=call.precision, preferred_element_type=preferred), call.dtype)
        y = unfused(y, x, w, dims, call.platform)
        free = [axis for axis in (*left, *right) if axis in result and not (axis in left and axis in right)]
        order = [*(axis for axis in left if axis in right and axis in result), *free]
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


def product(lhs, rhs, dims, precision, dtype) -> jax.Array:
    """`lax.dot_general` with a result of any dtype."""
    preferred = _preferred(lhs, rhs, dims, precision, dtype)
    return convert(lax.dot_general(lhs, rhs, dims, precision=precision, preferred_element_type=preferred), dtype)


def _preferred(lhs, rhs, dims, precision, dtype) -> jnp.dtype:
    """The dtype that lax returns for this one: it cannot return a narrower or a real dtype, so that its result has to be converted."""
    natural = jax.eval_shape(lambda a, b: lax.dot_general(a, b, dims, precision=precision), lhs, rhs).dtype
    return dtype if dtype.itemsize >= natural.itemsize and is_complex(natural) <= is_complex(dtype) else natural


def unfused(y: jax.Array, lhs, rhs, dims, platform: str) -> jax.Array:
    """The same product y, which XLA's CPU compiler cannot fuse with a reduction behind it where it does so wrongly (jax #39103)."""
    if platform != "cpu" or jax.__version_info__ >= (0, 11) or not jnp.issubdtype(y.dtype, jnp.floating) or y.dtype.itemsize == 1:
        return y  # nothing is fused with numbers of 8 bits, to which `lax.reduce_precision` would not be the identity
    if not all(isinstance(n, int) for n in (*lhs.shape, *rhs.shape)):
        return y
    # It is wrong for 3 <= depth and 2**17 bytes < rows * itemsize, rows * depth <= 2**17.  The factors of 2 are for other CPUs.
    rows, columns, depth = rows_columns_depth(lhs.shape, rhs.shape, dims)
    if min(columns, depth - 1) > 1 and rows > 2**13 and rows * max(columns, depth) <= 2**18:
        return lax.reduce_precision(y, jnp.finfo(y.dtype).nexp, jnp.finfo(y.dtype).nmant)  # changes no bit, and is in no such kernel
    return y


def real_products(lhs, rhs, dims, precision, dtype) -> jax.Array:
    """The product of two complex arrays by four of their parts, or the real part of it by two."""

    def dot(left, right):
        return lax.dot_general(left, right, dims, precision=precision)

    (a, b), (c, d) = ((lax.real(x), lax.imag(x)) for x in (lhs, rhs))
    real = dot(a, c) - dot(b, d)
    return lax.complex(real, dot(a, d) + dot(b, c)) if is_complex(dtype) else real


def convert(y: jax.Array, dtype) -> jax.Array:
    """Convert y to another dtype.  From complex to real this takes the real part, as the gradient of a real operand must."""
    return (lax.real(y) if is_complex(y.dtype) and not is_complex(dtype) else y).astype(dtype)


def is_complex(dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.complexfloating)
