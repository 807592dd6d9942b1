"""Products with a fused epilogue, as operations: `linear`, `gated_linear_unit`, `conv_bias_act`, and the first two of ragged rows.

    z = product + bias
    y = activation(z) + residual, rounded once
    gated:  y = activation(z[gate]) z[up]
    ragged: y = scale activation(z), or scale activation(z[gate]) z[up]; each group has a bias, each row a scale

A row of no group is zero, and not read: what is chosen for each row, which is the bias, and whether it has a group at all, is a ragged
product itself.  So it is zero there, is split over devices as that is, and its transpose is a sum over the rows of each group.

z is computed in float32 for results of 16 bits.  If the derivative of the activation needs it, it is saved as the result "preactivation",
with the dtype of y.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxext.backends.cuda.cuda_convolutions import CudaConv
from jaxext.backends.cuda.cuda_matmul import CudaMatmul
from jaxext.backends.cuda.cuda_ragged import CudaRagged
from jaxext.backends.triton.triton_conv import TritonConv
from jaxext.backends.triton.triton_matmul import TritonMatmul
from jaxext.backends.triton.triton_ragged import TritonRagged
from jaxext.families import activation as _activation
from jaxext.families.conv import FAMILY as CONV
from jaxext.families.conv import conv_form
from jaxext.families.matmul import MATMUL
from jaxext.families.ragged import FAMILY as RAGGED_FAMILY
from jaxext.families.ragged import RAGGED, in_groups
from jaxext.forms import partition
from jaxext.forms.composition import Composition
from jaxext.forms.family import Family, declare
from jaxext.forms.form import Form
from jaxext.forms.operation import Operation

PREACTIVATION = "preactivation"
GATES = "T"  # the label of gate and up, in this order


@dataclasses.dataclass(frozen=True)
class Static:
    """What determines the epilogue besides its operands."""

    activation: _activation.Activation

    def __str__(self) -> str:
        return f"activation={self.activation}"


def accumulated(dtype) -> jnp.dtype:
    """The dtype of z for results of this dtype."""
    small = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4
    return jnp.dtype(jnp.float32) if small else jnp.dtype(dtype)


def _product(operation: Operation, product, operands: Mapping[str, jax.Array], *, ranks, out_sharding, **params) -> jax.Array:
    """The product of the operation's factors, with the axes of the sum z."""
    assert operation.product is not None
    form, open = operation.product
    rank = dict(zip(operation.free, ranks, strict=True))
    if GATES in rank:
        rank["N"] += rank[GATES]
        if out_sharding is not None:
            out_sharding = partition.renamed(out_sharding, operation.axes(operation.open, ranks), operation.axes(PREACTIVATION, ranks))
    return product(
        form,
        open,
        operands,
        ranks=tuple(rank[label] for label in form.free),
        out_sharding=out_sharding,
        **params,
    )


def _along(operation: Operation, name: str, x: jax.Array, result: str, ranks: Sequence[int]) -> jax.Array:
    """An operand with an axis of size 1 for each axis of a result that it lacks."""
    axes = operation.axes(name, ranks)
    return lax.expand_dims(x, [i for i, axis in enumerate(operation.axes(result, ranks)) if axis not in axes])


def _bias(operation: Operation, product, operands, z: jax.Array, ranks: Sequence[int], **params) -> jax.Array:
    """What is added to the product, with the dtype of z."""
    if _ragged(operation):
        return _of_groups(operation, product, operands, operands["bias"], z, PREACTIVATION, ranks, **params)
    return _along(operation, "bias", operands["bias"].astype(z.dtype), PREACTIVATION, ranks)


def _ragged(operation: Operation) -> bool:
    return operation.form is not None and bool(operation.form.tied)


def _of_groups(operation, product, operands, values: jax.Array, like: jax.Array, result: str, ranks, **params) -> jax.Array:
    """For each row the values of its group, (B, G) or (B, G, N); `like` is the result of this name.  Ones, times the values."""
    form, open = operation.product
    rank = dict(zip(operation.free, ranks, strict=True))
    rows = operation.position(result, "M", ranks) + 1
    inner = rank | {"K": 0, "N": values.ndim - rank["B"] - 1}
    return product(
        form,
        open,
        operands | {"x": lax.full_like(like.sum(tuple(range(rows, like.ndim))), 1, values.dtype), "w": values},
        ranks=tuple(inner[label] for label in form.free),
        dtype=like.dtype,
        **params | {"precision": (lax.Precision.HIGHEST,) * 2, "out_sharding": None},
    )


def _in_groups(operation: Operation, product, operands, y: jax.Array, static: Static, ranks: Sequence[int], **params) -> jax.Array:
    """The result, or its tangent, with zeros in the rows of no group."""
    if not _ragged(operation) or "scale" not in operands and static.activation != "sigmoid":
        return y  # zero there already
    lead = operation.position(operation.open, "M", ranks) + 1
    rank = dict(zip(operation.free, ranks, strict=True))
    if product is Form.bind:
        inside = in_groups(operands["begin"], operands["end"], y.sum(tuple(range(lead, y.ndim))), rank["R"])
    else:  # a device may have a part of the groups, and the product is a sum over devices
        ones = jnp.ones(operands["w"].shape[: rank["B"] + 1], y.dtype)
        inside = _of_groups(operation, product, operands, ones, y, operation.open, ranks, **params) != 0
    return jnp.where(lax.expand_dims(inside, range(lead, y.ndim)), y, jnp.zeros((), y.dtype))


def _activated(operation: Operation, z: jax.Array, ranks: Sequence[int], static: Static) -> jax.Array:
    if GATES not in operation.free:
        return _activation.apply(static.activation, z)
    axis = operation.position(PREACTIVATION, GATES, ranks)
    gate, up = (lax.squeeze(half, [axis]) for half in lax.split(z, (1, 1), axis))
    return _activation.apply(static.activation, gate) * up


def _scaled(operation: Operation, y: jax.Array, scale: jax.Array | None, ranks: Sequence[int]) -> jax.Array:
    return y if scale is None else y * _along(operation, "scale", scale.astype(y.dtype), operation.open, ranks)


def composition(
    operation, product, operands, *, ranks, window, dtypes, precision, static, implementation, out_sharding, narrow=False
) -> dict[str, jax.Array]:
    """All results, by the product of the form and jnp; if `narrow`, as plain jnp, with the dtype of the result throughout."""
    of_product = dict(ranks=ranks, window=window, precision=precision, implementation=implementation, out_sharding=out_sharding)
    wide = dtypes[0] if narrow else accumulated(dtypes[0])
    z = _product(operation, product, operands, dtype=wide, **of_product)
    if "bias" in operands:
        z = z + _bias(operation, product, operands, z, **of_product)
    y = _scaled(operation, _activated(operation, z, ranks, static), operands.get("scale"), ranks)
    if "residual" in operands:
        y = y + operands["residual"].astype(wide)
    y = _in_groups(operation, product, operands, y, static, **of_product)
    return {operation.open: y.astype(dtypes[0]), PREACTIVATION: z.astype(dtypes[0])}


def tangents(operation, operands, results, dots, *, ranks, window, dtypes, precision, static, implementation, out_sharding):
    """The tangents of all results.

    The tangent of z has the dtype of the result, so that its transpose is rounded to that once, and all passes over it read that.  The
    gradient of the bias is a sum in float32.
    """
    of_product = dict(ranks=ranks, window=window, precision=precision, implementation=implementation, out_sharding=out_sharding)
    wide, y = accumulated(dtypes[0]), results[operation.open]
    parts = [
        _product(operation, Form.bind, operands | {name: dots[name]}, dtype=dtypes[0], **of_product)
        for name in operation.factors(operation.open)
        if name in dots
    ]
    if "bias" in dots:
        z = results.get(PREACTIVATION, y).astype(wide)
        bias = _bias(operation, Form.bind, operands | {"bias": dots["bias"]}, z, **of_product)
        parts.append(partition.broadcast_like(bias, z).astype(dtypes[0]))
    of_y, moved = [], {}
    if parts:
        # Written once.  Else XLA would keep the cotangent in float32 for the sum, write it twice, or compute it anew for each tap.
        moved[PREACTIVATION] = lax.optimization_barrier(functools.reduce(jnp.add, parts))
        dot = moved[PREACTIVATION].astype(wide)
        if PREACTIVATION in results:
            activated = functools.partial(_activated, operation, ranks=ranks, static=static)
            of_y.append(_scaled(operation, _activation.tangent(activated, results[PREACTIVATION], dot), operands.get("scale"), ranks))
        else:
            of_y.append(_activation.tangent_by_result(static.activation, y, dot))
    if "scale" in dots:
        of_y.append(_scaled(operation, _activated(operation, results[PREACTIVATION].astype(wide), ranks, static), dots["scale"], ranks))
    if "residual" in dots:
        of_y.append(dots["residual"].astype(wide))
    if of_y:
        moved[operation.open] = _in_groups(operation, Form.bind, operands, functools.reduce(jnp.add, of_y), static, **of_product)
    return {name: dot.astype(dtypes[0]) for name, dot in moved.items()}


_LINEAR = declare(Family("linear", twin=lax.dot_general_p, names="linear", weights="b"), CudaMatmul(), TritonMatmul(), Composition())
_GATED = declare(
    Family("gated_linear_unit", twin=lax.dot_general_p, names="gated_linear_unit", weights="b"),
    CudaMatmul(),
    TritonMatmul(),
    Composition(),
)
_RAGGED_LINEAR = declare(
    Family("ragged_linear", twin=RAGGED_FAMILY.twin, names="ragged_linear"), CudaRagged(), TritonRagged(), Composition()
)
_RAGGED_GATED = declare(
    Family("ragged_gated_linear_unit", twin=RAGGED_FAMILY.twin, names="ragged_gated_linear_unit"),
    CudaRagged(),
    TritonRagged(),
    Composition(),
)
CONV_BIAS_ACT = declare(
    Family(
        "conv_bias_act",
        twin=lax.conv_general_dilated_p,
        names=r"conv\d+d_bias_act",
        weights="w",
        letters={**CONV.letters, "residual": CONV.letters["y"], PREACTIVATION: CONV.letters["y"]},
        groups=CONV.groups,
    ),
    CudaConv(),
    TritonConv(),
    Composition(),
)


def _operation(name: str, family: Family, form: Form, open: str, added: Mapping[str, tuple[str, ...]], gated: bool = False) -> Operation:
    """`added`: the labels of bias, residual and scale, those that there are."""

    def saved(static: Static) -> Sequence[str]:
        if "scale" in added or gated:
            return (PREACTIVATION,)
        return () if static.activation is None or _activation.by_result(static.activation) and "residual" not in added else (PREACTIVATION,)

    def with_gates(labels):
        return tuple(label for each in labels for label in ((GATES, each) if each == "N" and gated else (each,)))

    first, second = form.factors(open)
    return Operation(
        name=name,
        inputs={first: form.slots[first], second: with_gates(form.slots[second])}
        | dict(added)
        | {name: companion.labels for name, companion in form.companions.items()},
        results={open: form.slots[open], PREACTIVATION: with_gates(form.slots[open])},
        composition=composition,
        tangents=tangents,
        family=family,
        saved=saved,
        window=form.window,
        whole=(GATES,) if gated else (),
        product=(form, open),
    )


@functools.cache
def linear(bias: bool, residual: bool) -> Operation:
    """y[b,m,n] = activation(Σ_k x[b,m,k] w[b,k,n] + bias[b,n]) + residual[b,m,n], with the names of matmul's slots."""
    return _operation("linear", _LINEAR, MATMUL, "c", _given(bias=bias and ("B", "N"), residual=residual and MATMUL.slots["c"]))


@functools.cache
def gated_linear_unit() -> Operation:
    """y[b,m,n] = activation(Σ_k x[b,m,k] w[b,k,0,n]) Σ_k x[b,m,k] w[b,k,1,n]."""
    return _operation("gated_linear_unit", _GATED, MATMUL, "c", {}, gated=True)


@functools.cache
def conv_bias_act(rank: int, bias: bool, residual: bool) -> Operation:
    """A convolution with `rank` spatial axes."""
    form = conv_form(rank)
    added = _given(bias=bias and ("B", "G", "K"), residual=residual and form.slots["y"])
    return _operation(f"conv{rank}d_bias_act", CONV_BIAS_ACT, form, "y", added)


@functools.cache
def ragged_linear(bias: bool, scale: bool) -> Operation:
    """y[b,p,r,m,n] = scale[b,p,r,m] activation(Σ_k x[b,p,r,m,k] w[b,g,k,n] + bias[b,g,n]), where g is the group of the row."""
    added = _given(bias=bias and ("B", "G", "N"), scale=scale and RAGGED.slots["y"][:-1])
    return _operation("ragged_linear", _RAGGED_LINEAR, RAGGED, "y", added)


@functools.cache
def ragged_gated_linear_unit(scale: bool) -> Operation:
    """y[b,p,r,m,n] = scale[b,p,r,m] activation(Σ_k x[b,p,r,m,k] w[b,g,k,0,n]) Σ_k x[b,p,r,m,k] w[b,g,k,1,n]."""
    added = _given(scale=scale and RAGGED.slots["y"][:-1])
    return _operation("ragged_gated_linear_unit", _RAGGED_GATED, RAGGED, "y", added, gated=True)


def _given(**labels: Any) -> dict[str, tuple[str, ...]]:
    return {name: of for name, of in labels.items() if of}
