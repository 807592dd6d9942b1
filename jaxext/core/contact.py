"""Named calls of public functions with the shapes of their arguments.

`cases.py` of an operation in jaxext/ops lists them.  `contacts()` gives those by which its kernels meet a GPU for the first time: their
products and those of their gradients become the cases of `python -m jaxext verify`, by each implementation that takes them.  Sizes are
chosen so that large tiles run and no dimension is a multiple of one, and that the truth takes a CPU less than a second.  `PAGES` has, for
pages of docs/operations, the calls whose refusals are shown there: large ones, since small calls are XLA's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

BF16, FP16, FP32, INT8 = "bfloat16", "float16", "float32", "int8"
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
TILES = (1037, 528), (528, 784)  # several tiles along each axis, with an edge; rows are multiples of 16 bytes, which TMA wants
SQUARE = (4096, 4096), (4096, 4096)


@dataclasses.dataclass(frozen=True)
class Contact:
    """A function of arrays with these shapes and dtypes."""

    name: str
    function: Callable[..., Any]
    operands: tuple[jax.ShapeDtypeStruct, ...]
    splits: tuple[int, ...] = ()  # if given, the cases have configs with so many parts of the sum, in place of two tiles


def arrays(*shapes: tuple[int, ...], dtype: str = BF16) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)


def typed(*each: tuple[tuple[int, ...], str]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Arrays with a dtype each."""
    return tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in each)


def step(name: str, function: Callable[..., Any], *operands: jax.ShapeDtypeStruct, splits: tuple[int, ...] = ()) -> Contact:
    """The function with its gradients in all floating-point operands."""
    real = [i for i, x in enumerate(operands) if jnp.issubdtype(x.dtype, jnp.inexact)]

    def both(*args):
        def called(*some):
            return function(*[some[real.index(i)] if i in real else x for i, x in enumerate(args)])

        y, pullback = jax.vjp(called, *[args[i] for i in real])
        return y, pullback(y)

    return Contact(name, both, operands, splits)


def both(name: str, function: Callable[..., Any], *operands: jax.ShapeDtypeStruct) -> Iterator[Contact]:
    """The function with its gradients, for which it saves more, and by itself."""
    yield step(name, function, *operands)
    yield Contact(f"{name}, inference", function, operands)
