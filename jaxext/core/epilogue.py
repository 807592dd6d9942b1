"""The epilogue of a product: bias, activation, gate, scale and residual, as an operation whose meaning is a composition.

    z = product + bias
    y = activation(z) scale + residual, rounded once
    gated:  y = activation(z[gate]) z[up]

z is computed in float32 for results of 16 bits.  If the derivative of the activation needs it, it is saved as the result "preactivation",
with the dtype of y.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer

from jaxext._messages import format_value
from jaxext.core import activation as _activation
from jaxext.core import partition
from jaxext.core.checks import refuse_kinds
from jaxext.core.family import Family
from jaxext.core.form import Form
from jaxext.core.operation import Operation, sharded_as
from jaxext.core.static import Static

PREACTIVATION = "preactivation"
GATES = "T"  # the label of gate and up, in this order


@dataclasses.dataclass(frozen=True)
class Options:
    """The options that determine the epilogue besides its operands."""

    activation: _activation.Activation

    def __str__(self) -> str:
        return f"activation={self.activation}"


@dataclasses.dataclass(frozen=True)
class Groups:
    """Rows in groups, as those of a ragged product.

    Attributes:
      spread: `spread(operation, product, operands, values, like, result, static)` gives each row the values of its group.
      masked: `masked(operation, product, operands, y, static)` gives y with zeros in the rows of no group.
    """

    spread: Callable[..., jax.Array]
    masked: Callable[..., jax.Array]


def accumulated(dtype) -> jnp.dtype:
    """The dtype of z for results of this dtype."""
    small = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4
    return jnp.dtype(jnp.float32) if small else jnp.dtype(dtype)


def _sum(operation: Operation, static: Static, dtype) -> Static:
    """The parameters of the product of the operation's factors, with the axes of the sum z."""
    assert operation.product is not None
    form, _ = operation.product
    rank, sharding = operation.unpack(static.ranks), static.out_sharding
    if GATES in rank:
        rank["N"] += rank[GATES]
        if sharding is not None:
            axes = (operation.axes(name, static.ranks) for name in (operation.open, PREACTIVATION))
            sharding = partition.renamed(sharding, *axes)
    return static.replace(ranks=form.pack(rank), dtypes=(dtype,), out_sharding=sharding, options=None)


def _expanded(operation: Operation, name: str, x: jax.Array, result: str, ranks: Sequence[int]) -> jax.Array:
    """An operand with an axis of size 1 for each axis of a result that it lacks."""
    axes = operation.axes(name, ranks)
    return lax.expand_dims(x, [i for i, axis in enumerate(operation.axes(result, ranks)) if axis not in axes])


def _bias(operation: Operation, groups: Groups | None, product, operands, z: jax.Array, static: Static) -> jax.Array:
    """Return the term that is added to the product, with the dtype of z."""
    if groups is not None:
        return groups.spread(operation, product, operands, operands["bias"], z, PREACTIVATION, static)
    return _expanded(operation, "bias", operands["bias"].astype(z.dtype), PREACTIVATION, static.ranks)


def _activated(operation: Operation, z: jax.Array, static: Static) -> jax.Array:
    activation = static.options.activation
    if GATES not in operation.free:
        return _activation.apply(activation, z)
    axis = operation.position(PREACTIVATION, GATES, static.ranks)
    gate, up = (lax.squeeze(half, [axis]) for half in lax.split(z, (1, 1), axis))
    return _activation.apply(activation, gate) * up


def _scaled(operation: Operation, y: jax.Array, scale: jax.Array | None, ranks: Sequence[int]) -> jax.Array:
    return y if scale is None else y * _expanded(operation, "scale", scale.astype(y.dtype), operation.open, ranks)


def composition(groups: Groups | None, operation, product, operands, static: Static, *, narrow: bool = False) -> dict[str, jax.Array]:
    """All results, by the product of the form and jnp; if `narrow`, as plain jnp, with the dtype of the result throughout."""
    wide = static.dtype if narrow else accumulated(static.dtype)
    z = product(*operation.product, operands, _sum(operation, static, wide))
    if "bias" in operands:
        z = z + _bias(operation, groups, product, operands, z, static)
    y = _scaled(operation, _activated(operation, z, static), operands.get("scale"), static.ranks)
    if "residual" in operands:
        y = y + operands["residual"].astype(wide)
    if groups is not None:
        y = groups.masked(operation, product, operands, y, static)
    return {operation.open: y.astype(static.dtype), PREACTIVATION: z.astype(static.dtype)}


def tangents(groups: Groups | None, operation, operands, results, dots, static: Static) -> dict[str, jax.Array]:
    """The tangents of all results.

    The tangent of z has the dtype of the result, so that its transpose is rounded to that once, and all passes over it read that.  The
    gradient of the bias is a sum in float32.
    """
    dtype, wide, y = static.dtype, accumulated(static.dtype), results[operation.open]
    form, open = operation.product
    parts = [
        form.bind(open, operands | {name: dots[name]}, _sum(operation, static, dtype))
        for name in operation.factors(operation.open)
        if name in dots
    ]
    if "bias" in dots:
        z = results.get(PREACTIVATION, y).astype(wide)
        bias = _bias(operation, groups, Form.bind, operands | {"bias": dots["bias"]}, z, static)
        parts.append(partition.broadcast_like(bias, z).astype(dtype))
    of_y, moved = [], {}
    if parts:
        # Written once.  Else XLA would keep the cotangent in float32 for the sum, write it twice, or compute it anew for each tap.
        moved[PREACTIVATION] = lax.optimization_barrier(functools.reduce(jnp.add, parts))
        dot = moved[PREACTIVATION].astype(wide)
        if PREACTIVATION in results:
            activated = functools.partial(_activated, operation, static=static)
            of_y.append(
                _scaled(operation, _activation.tangent(activated, results[PREACTIVATION], dot), operands.get("scale"), static.ranks)
            )
        else:
            of_y.append(_activation.tangent_by_result(static.options.activation, y, dot))
    if "scale" in dots:
        of_y.append(_scaled(operation, _activated(operation, results[PREACTIVATION].astype(wide), static), dots["scale"], static.ranks))
    if "residual" in dots:
        of_y.append(dots["residual"].astype(wide))
    if of_y:
        dot = functools.reduce(jnp.add, of_y)
        moved[operation.open] = dot if groups is None else groups.masked(operation, Form.bind, operands, dot, static)
    return {name: dot.astype(dtype) for name, dot in moved.items()}


def operation(
    name: str,
    family: Family,
    form: Form,
    open: str,
    *,
    gated: bool = False,
    groups: Groups | None = None,
    bias: tuple[str, ...] | None = None,
    residual: tuple[str, ...] | None = None,
    scale: tuple[str, ...] | None = None,
) -> Operation:
    """Declare a product of a form with an epilogue, by the labels of what is added and multiplied."""
    added = {name: labels for name, labels in dict(bias=bias, residual=residual, scale=scale).items() if labels is not None}

    def saved(options: Options) -> Sequence[str]:
        if "scale" in added or gated:
            return (PREACTIVATION,)
        return (
            ()
            if options.activation is None or _activation.follows_from_result(options.activation) and "residual" not in added
            else (PREACTIVATION,)
        )

    def add_gates(labels):
        return tuple(label for each in labels for label in ((GATES, each) if each == "N" and gated else (each,)))

    first, second = form.factors(open)
    return Operation(
        name=name,
        inputs={first: form.slots[first], second: add_gates(form.slots[second])}
        | added
        | {name: companion.labels for name, companion in form.companions.items()},
        results={open: form.slots[open], PREACTIVATION: add_gates(form.slots[open])},
        composition=functools.partial(composition, groups),
        tangents=functools.partial(tangents, groups),
        family=family,
        saved=saved,
        window=form.window,
        unsharded=(GATES,) if gated else (),
        product=(form, open),
    )


def applied(
    name: str, function: Callable | None, z: jax.Array, added: Mapping[str, jax.Array], then: Callable = lambda y: y, gated: bool = False
) -> jax.Array:
    """`then(function(z), **added)`, or `function(gate) up` of both along axis -2, with the dtype of z, and in float32 for one of 16 bits.

    `function` is the user's: it may close over traced values, and any transformation follows it.  z alone is saved for the derivative.
    If it is None, z is the result.
    """
    if function is None:
        return z
    if not jnp.issubdtype(z.dtype, jnp.inexact):
        raise TypeError(f"{name}: the result is {z.dtype} and activation is {format_value(function)}, want None for a result of integers")
    refuse_kinds(name, added, z.dtype)

    def epilogue(z):
        wide = _cast(accumulated(z.dtype), z)
        into, up = (lax.index_in_dim(wide, i, -2, keepdims=False) for i in (0, 1)) if gated else (wide, None)
        y = function(into)
        if not isinstance(y, jax.Array) or y.shape != into.shape or y.dtype not in (into.dtype, z.dtype):
            of_numpy = " of numpy" if isinstance(y, np.ndarray) else ""
            wanted = f"want {format_value(into)}: an elementwise function of jax"
            raise TypeError(f"{name}: activation is {format_value(function)}, which returns {format_value(y)}{of_numpy}, {wanted}")
        y = _cast(wide.dtype, y)
        return _cast(z.dtype, then(y if up is None else y * up, **added))

    if not isinstance(z, Tracer):
        return epilogue(z)
    return jax.checkpoint(epilogue, prevent_cse=False)(checkpoint_name(z, PREACTIVATION))


def _cast(dtype, x: jax.Array) -> jax.Array:
    return x if x.dtype == dtype else x.astype(dtype)  # an eager call that changes nothing takes a sixth of this one


def plus(y: jax.Array, residual: jax.Array | None = None) -> jax.Array:
    return y if residual is None else y + sharded_as(residual.astype(y.dtype), jax.typeof(y))


def taken_out(function: Callable | None, arrays: dict[str, jax.Array], argument: str) -> dict[str, jax.Array]:
    """Remove from the operands of the product the one that follows the user's function, if there is one, and return it by name."""
    return {argument: arrays.pop(argument)} if function is not None and argument in arrays else {}


def bind(operation: Operation, operands: Mapping[str, jax.Array], activation: _activation.Activation, static: Static) -> jax.Array:
    """Bind the operation, or the form of its product if there is nothing to fuse.  `static` has the dtype of the result alone."""
    assert operation.product is not None
    form, open = operation.product
    if activation is None and operation.inputs.keys() == {*form.operands(open)} and not operation.unsharded:  # nothing to fuse
        return form.bind(open, operands, static)
    static = static.replace(dtypes=static.dtypes * len(operation.results), options=Options(activation))
    return operation.bind(operands, static, wanted=(open,))[open]
