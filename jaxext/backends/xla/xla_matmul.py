"""The `xla` implementation of matmul, and of every form without a window: `lax.dot_general`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxext.forms.call import Call
from jaxext.forms.form import dimension_numbers
from jaxext.forms.implementation import Algorithm, Definition, folder_of, hash_of


class XlaDefinition(Definition):
    """A definition in this folder, of whose files its version is a hash."""

    name = "xla"
    version = "of its files"

    def code(self, platform: str) -> str:
        return hash_of(folder_of(type(self)))


class XlaMatmul(XlaDefinition):
    """The definition of matmul, and of every form without a window: `lax.dot_general`.  It supports every call."""

    def candidates(self, call: Call) -> Sequence[Algorithm]:
        return (Algorithm("dot_general"),)

    def run(self, call: Call, config: Algorithm, operands: Mapping[str, jax.Array]) -> jax.Array:
        # The left operand has the first pair label of the result, so that dot_general gives the axis order of a matmul's result.
        first = next(label for label in call.labels[call.open] if not all(label in call.labels[slot] for slot in operands))
        lhs, rhs = sorted(operands, key=lambda slot: first not in call.labels[slot])
        left, right, result = call.axes[lhs], call.axes[rhs], call.axes[call.open]
        if call.platform == "cpu" and _faster_swapped(operands[lhs], operands[rhs], left, right, result):
            lhs, rhs, left, right = rhs, lhs, right, left
        y = product(operands[lhs], operands[rhs], dimension_numbers(left, right, result), call.precision, call.dtype)
        free = [axis for axis in (*left, *right) if axis in result and not (axis in left and axis in right)]
        order = [*(axis for axis in left if axis in right and axis in result), *free]
        return lax.transpose(y, [order.index(axis) for axis in result])


def _faster_swapped(lhs, rhs, left, right, result) -> bool:
    """Whether both operands have 16 bits, their contracted axes come first, and the right one is smaller.

    XLA's CPU backend multiplies such operands twice as fast with the smaller one on the left.
    """
    static = all(isinstance(n, int) for n in (*lhs.shape, *rhs.shape))
    if not static or not lhs.dtype.itemsize == rhs.dtype.itemsize == 2 or lhs.size <= rhs.size:
        return False
    batch = {axis for axis in left if axis in right and axis in result}
    kept = [[axis in result for axis in axes if axis not in batch] for axes in (left, right)]
    return all(flags == sorted(flags) for flags in kept)  # False, which is contracted, comes before True


def product(lhs, rhs, dims, precision, dtype) -> jax.Array:
    """`lax.dot_general` with a result of any dtype.  lax cannot return a narrower or a real dtype; its result is converted then."""

    def dot(preferred, lhs, rhs):
        return lax.dot_general(lhs, rhs, dims, precision=precision, preferred_element_type=preferred)

    natural = jax.eval_shape(lambda a, b: dot(None, a, b), lhs, rhs).dtype
    lax_can = dtype.itemsize >= natural.itemsize and is_complex(natural) <= is_complex(dtype)
    return convert(dot(dtype if lax_can else natural, lhs, rhs), dtype)


def convert(y: jax.Array, dtype) -> jax.Array:
    """Convert y to another dtype.  From complex to real this takes the real part, as the gradient of a real operand must."""
    return (lax.real(y) if is_complex(y.dtype) and not is_complex(dtype) else y).astype(dtype)


def is_complex(dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.complexfloating)
