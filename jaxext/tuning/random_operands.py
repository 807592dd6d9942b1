"""Inputs for programs that are compared: random operands, and freed memory without leftover results."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxext.core.call import Call
from jaxext.core.form import form_of


def normal(shapes: Sequence[Sequence[int]], dtypes: Any, *, integers: bool = False) -> list[jax.Array]:
    """Arrays of normal random numbers, or of small integers, the same each time.  Zeros would draw less power and run faster.

    `dtypes` is one dtype for all arrays, or a sequence with one for each.  `integers` asks for small integers in every dtype, whose sums of
    products are exact.
    """
    each = dtypes if isinstance(dtypes, list | tuple) else [dtypes] * len(shapes)
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [_draw(key, tuple(shape), jnp.dtype(dtype), integers) for key, shape, dtype in zip(keys, shapes, each, strict=True)]


def of(call: Call, *, integers: bool = False) -> list[jax.Array]:
    """Return random operands of a call, except those that must be valid."""
    operands = normal([call.shape_of(slot) for slot in call.dtypes], list(call.dtypes.values()), integers=integers)
    fixed = valid(call)
    return [fixed.get(slot, x) for slot, x in zip(call.dtypes, operands, strict=True)]


def valid(call: Call) -> dict[str, jax.Array]:
    """The operands for which random numbers would have no meaning, such as ranges of rows."""
    found = {}
    for of in (call.operation, form_of(call)):
        if of is not None and of.examples is not None:
            found |= of.examples(call)
    return found


def _draw(key, shape, dtype, integers) -> jax.Array:
    size = math.prod(shape)
    narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    drawn = jnp.dtype(jnp.int32) if integers and dtype != jnp.bool_ else jnp.dtype(jnp.float32) if narrow else dtype
    numbers = _numbers(key, 1 << max(size - 1, 0).bit_length(), drawn)
    return _array(numbers, shape, dtype)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _array(numbers, shape, dtype) -> jax.Array:
    if dtype == jnp.float8_e8m0fnu:  # which has positive powers of two alone
        numbers = jnp.exp2(numbers % 3) if numbers.dtype == jnp.int32 else jnp.abs(numbers)
    if jnp.issubdtype(dtype, jnp.unsignedinteger):
        numbers = jnp.abs(numbers)
    return numbers[: math.prod(shape)].astype(dtype).reshape(shape)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _numbers(key, size, dtype) -> jax.Array:
    """`size` is a power of two, so that few programs are compiled: compiling takes longer than running."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return jax.random.normal(key, (size,), dtype)
    return jax.random.randint(key, (size,), -3 if jnp.issubdtype(dtype, jnp.signedinteger) else 0, 4, jnp.int32).astype(dtype)


def poison(results: Any) -> None:
    """Fill freed memory with large numbers, so that a kernel that leaves results of these shapes and dtypes partly unwritten cannot pass by
    reusing another program's correct result."""

    def largest(dtype):
        if jnp.issubdtype(dtype, jnp.inexact):
            return jnp.finfo(dtype).max
        return jnp.iinfo(dtype).max if jnp.issubdtype(dtype, jnp.integer) else True

    jax.block_until_ready([jnp.full(x.shape, largest(x.dtype), x.dtype) for x in jax.tree.leaves(results)])
