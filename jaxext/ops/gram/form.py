"""Products of a matrix with its own transpose, and what is made of them: `gram` and `newton_schulz`.

    y[b,m,k] = scale Σ_n x[b,m,n] x[b,k,n] + of_addend addend[b,m,k]

As an operation it is a product with two operands, both of which are x, so that its labels say all that those of a product do.  That they
are one array makes the result symmetric, so half of it is enough.  Devices that have different rows of the two compute a plain product.
The addend is symmetric.  The tangent is a single product and its transpose.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxext.core import partition
from jaxext.core.call import Call
from jaxext.core.checks import checked
from jaxext.core.epilogue import accumulated
from jaxext.core.family import Family, declare
from jaxext.core.form import Form
from jaxext.core.operation import Operation, sharded_as
from jaxext.core.static import Static
from jaxext.lax.dispatch import dot_general_params, sharding_in_types
from jaxext.ops.gram.cuda import CudaGram
from jaxext.ops.gram.triton import TritonGram
from jaxext.ops.gram.xla import XlaGram, symmetric
from jaxext.ops.matmul.form import MATMUL

ADDEND = "addend"


@dataclasses.dataclass(frozen=True)
class Options:
    """The options that determine the result besides the operands.

    Attributes:
      sum: whether the product is scaled, or something is added to it.
      whole: whether the two operands are the same rows.  False only in the program of one device.
      partial: whether devices add up the product.  True only there.
    """

    sum: bool = False
    scale: float = 1.0
    of_addend: float = 0.0
    whole: bool = True
    partial: bool = False

    def __str__(self) -> str:
        return f"scale={self.scale:g} of_addend={self.of_addend:g}"


def _unfuse(options: Options, split: set[str]) -> Options | None:
    if split & {"M", "K"}:
        return dataclasses.replace(options, whole=False)
    return dataclasses.replace(options, partial=True) if "N" in split else None


def _multiplied(product, operands, static: Static, dtype) -> jax.Array:
    """The product alone, by half of it where the operands are the same rows."""
    options, static = static.options, static.replace(dtypes=(dtype,), options=None)
    if product is Form.bind or not options.whole:
        return product(MATMUL, "a", operands, static)
    c, b = (operands[slot] for slot in "cb")
    if 0 in c.shape:
        return jnp.zeros((*c.shape[:-1], b.shape[-2]), dtype)
    y = product(operation(False), "a", operands, static.replace(options=Options(), out_sharding=None))
    return symmetric(y) if options.partial else y  # devices may add up the parts of (i, j) and of (j, i) in different orders


def composition(operation, product, operands, static: Static, *, narrow: bool = False) -> dict[str, jax.Array]:
    options, dtype = static.options, static.dtype
    wide = accumulated(dtype) if options.sum and not narrow else dtype
    y = _multiplied(product, operands, static, wide)
    if options.sum:
        y = y * options.scale
    if ADDEND in operands:
        y = y + operands[ADDEND].astype(wide) * options.of_addend
    return {"a": y.astype(dtype)}


def tangents(operation, operands, results, dots, static: Static) -> dict[str, jax.Array]:
    options, of_y = static.options, []
    if moved := {slot: dots[slot] for slot in "cb" if slot in dots}:  # both, and equal
        slot, dot = next(iter(moved.items()))
        half = MATMUL.bind("a", {"c": dot, "b": operands["b" if slot == "c" else "c"]}, static.replace(options=None))
        both = half + sharded_as(jnp.swapaxes(half, -1, -2), jax.typeof(half))
        of_y.append(both * options.scale if options.sum else both)
    if ADDEND in dots:
        of_y.append(dots[ADDEND].astype(static.dtype) * options.of_addend)
    return {"a": functools.reduce(jnp.add, of_y)} if of_y else {}


FAMILY = declare(Family("gram", lax_primitive=lax.dot_general_p, names="gram"), CudaGram(), TritonGram(), XlaGram())


def _examples(call: Call) -> dict[str, jax.Array]:
    """A symmetric addend of small integers."""
    shape = call.shape_of(ADDEND)
    row, column = (lax.broadcasted_iota(jnp.int32, shape, len(shape) - axis) for axis in (2, 1))
    return {ADDEND: ((row + column) % 7 - 3).astype(call.dtypes[ADDEND])}


@functools.cache
def operation(addend: bool) -> Operation:
    """Return the operation, with the names of matmul's slots: of the NT product, whose result is a."""
    slots = MATMUL.slots
    return Operation(
        name="gram",
        inputs={slot: slots[slot] for slot in "cb"} | ({ADDEND: slots["a"]} if addend else {}),
        results={"a": slots["a"]},
        composition=composition,
        tangents=tangents,
        family=FAMILY,
        product=(MATMUL, "a"),
        unfuse=_unfuse,
        examples=_examples if addend else None,
    )


# --- calls


def matrices(name: str, x: Any) -> jax.Array:
    (x,) = checked(name, {"x": x}).values()
    if x.ndim < 2:
        raise TypeError(f"{name}: x has the shape {x.shape}, want (..., M, K)")
    return x


def product(name: str, x: jax.Array, *, precision, preferred_element_type, out_sharding, implementation) -> jax.Array:
    said = gram_params(x, precision, preferred_element_type)
    return bound(x, None, Options(), out_sharding=sharding_in_types(name, out_sharding, x.ndim), implementation=implementation, **said)


def gram_params(x: jax.Array, precision: Any, dtype: Any) -> dict[str, Any]:
    """The dtype and precision of x xᵀ."""
    last, batch = (x.ndim - 1,), tuple(range(x.ndim - 2))
    return dot_general_params((x, x), ((last, last), (batch, batch)), precision, dtype)


def bound(x: jax.Array, addend: jax.Array | None, options: Options, **params: Any) -> jax.Array:
    """The operation of x, and of an addend that is symmetric.  `params`: fields of `Static`."""
    of = operation(addend is not None)
    operands = {"c": x, "b": _other_factor(x)} | ({} if addend is None else {ADDEND: addend})
    static = Static(ranks=of.pack({"B": x.ndim - 2}), options=options, **params)
    return of.bind(operands, static, wanted=("a",))["a"]


def _other_factor(x: jax.Array) -> jax.Array:
    """x, gathered on explicit meshes that split its rows, which only one axis of the result can be split like."""
    sharding = partition.explicit(jax.typeof(x))
    if sharding is None:
        return x
    *batch, rows, last = tuple(sharding.spec)
    if rows is None:
        return x
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, P(*batch, None, last)))
