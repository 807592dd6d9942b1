"""Products by XLA, of which the implementations `xla` are made: `lax.dot_general` with a result of any dtype."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxext.core.form import rows_columns_depth
from jaxext.core.implementation import Definition, files_of, hash_of


class XlaDefinition(Definition):
    """A definition of jaxext's, whose version is a hash of its files."""

    name = "xla"
    version = "of its files"

    def code(self, platform: str) -> str:
        return hash_of(files_of(self))


def product(lhs, rhs, dims, precision, dtype) -> jax.Array:
    """`lax.dot_general` with a result of any dtype."""
    preferred = preferred_dtype(lhs, rhs, dims, precision, dtype)
    return convert(lax.dot_general(lhs, rhs, dims, precision=precision, preferred_element_type=preferred), dtype)


def preferred_dtype(lhs, rhs, dims, precision, dtype) -> jnp.dtype:
    """The dtype, or lax's own for a product, where lax cannot return this one, which is narrower or real: then its result is converted."""
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


def summed(*dtypes) -> jnp.dtype:
    """The dtype of sums of numbers of these dtypes, which are no wider than float64."""
    return jnp.dtype(jnp.float64 if jnp.float64 in dtypes else jnp.float32)


def convert(y: jax.Array, dtype) -> jax.Array:
    """Convert y to another dtype.  From complex to real this takes the real part, as the gradient of a real operand must."""
    return (lax.real(y) if is_complex(y.dtype) and not is_complex(dtype) else y).astype(dtype)


def is_complex(dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.complexfloating)
