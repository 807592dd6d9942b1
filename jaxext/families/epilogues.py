"""Products with a fused epilogue: `linear`, `gated_linear_unit` and `conv_bias_act` as operations.

    z = product + bias
    y = activation(z) + residual, rounded once
    gated:  y = activation(z[gate]) z[up]

z is computed in float32 for results of 16 bits.  If the derivative of the activation needs it, it is saved as the result "preactivation",
with the dtype of y.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxext.backends.cuda.cuda_binding import CudaConv, CudaMatmul
from jaxext.backends.triton.triton_binding import TritonConv, TritonMatmul
from jaxext.families import activation as _activation
from jaxext.families.conv import FAMILY as CONV
from jaxext.families.conv import conv_form
from jaxext.families.matmul import MATMUL
from jaxext.forms import partition
from jaxext.forms.family import Family, declare
from jaxext.forms.form import Form
from jaxext.forms.operation import Composition, Operation

PREACTIVATION = "preactivation"
GATES = "T"  # the label of gate and up, in this order


@dataclasses.dataclass(frozen=True)
class Static:
    """What determines the epilogue besides its operands."""

    activation: _activation.Activation

    def __str__(self) -> str:
        named = self.activation is None or isinstance(self.activation, str)
        return f"activation={self.activation if named else getattr(self.activation, '__name__', 'a function')}"


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


def _along(operation: Operation, name: str, x: jax.Array, ranks: Sequence[int]) -> jax.Array:
    """An operand with an axis of size 1 for each axis of z that it lacks."""
    axes = operation.axes(name, ranks)
    return lax.expand_dims(x, [i for i, axis in enumerate(operation.axes(PREACTIVATION, ranks)) if axis not in axes])


def _activated(operation: Operation, z: jax.Array, ranks: Sequence[int], static: Static) -> jax.Array:
    if GATES not in operation.free:
        return _activation.apply(static.activation, z)
    axis = operation.position(PREACTIVATION, GATES, ranks)
    gate, up = (lax.squeeze(half, [axis]) for half in lax.split(z, (1, 1), axis))
    return _activation.apply(static.activation, gate) * up


def composition(
    operation, product, operands, *, ranks, window, dtypes, precision, static, implementation, out_sharding, narrow=False
) -> dict[str, jax.Array]:
    """All results, by the product of the form and jnp; if `narrow`, as plain jnp, with the dtype of the result throughout."""
    of_product = dict(ranks=ranks, window=window, precision=precision, implementation=implementation, out_sharding=out_sharding)
    wide = dtypes[0] if narrow else accumulated(dtypes[0])
    z = _product(operation, product, operands, dtype=wide, **of_product)
    if "bias" in operands:
        z = z + _along(operation, "bias", operands["bias"].astype(wide), ranks)
    y = _activated(operation, z, ranks, static)
    if "residual" in operands:
        y = y + operands["residual"].astype(wide)
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
        bias = _along(operation, "bias", dots["bias"].astype(wide), ranks)
        parts.append(jnp.broadcast_to(bias, results.get(PREACTIVATION, y).shape).astype(dtypes[0]))
    of_y, moved = [], {}
    if parts:
        moved[PREACTIVATION] = functools.reduce(jnp.add, parts)
        if len(parts) > 1:  # else XLA would keep the cotangent in float32 for the sum, and write it twice
            moved[PREACTIVATION] = lax.optimization_barrier(moved[PREACTIVATION])
        dot = moved[PREACTIVATION].astype(wide)
        if PREACTIVATION in results:
            activated = functools.partial(_activated, operation, ranks=ranks, static=static)
            of_y.append(_activation.tangent(activated, results[PREACTIVATION], dot))
        else:
            of_y.append(_activation.tangent_by_result(static.activation, y, dot))
    if "residual" in dots:
        of_y.append(dots["residual"].astype(wide))
    if of_y:
        moved[operation.open] = functools.reduce(jnp.add, of_y)
    return {name: dot.astype(dtypes[0]) for name, dot in moved.items()}


_LINEAR = declare(Family("linear", twin=lax.dot_general_p, names="linear"), CudaMatmul(), TritonMatmul(), Composition())
_GATED = declare(
    Family("gated_linear_unit", twin=lax.dot_general_p, names="gated_linear_unit"), CudaMatmul(), TritonMatmul(), Composition()
)
CONV_BIAS_ACT = declare(
    Family(
        "conv_bias_act",
        twin=lax.conv_general_dilated_p,
        names=r"conv\d+d_bias_act",
        letters={**CONV.letters, "residual": CONV.letters["y"], PREACTIVATION: CONV.letters["y"]},
        groups=CONV.groups,
    ),
    CudaConv(),
    TritonConv(),
    Composition(),
)


def _operation(name: str, family: Family, form: Form, open: str, bias: tuple[str, ...] | None, residual: bool) -> Operation:
    def saved(static: Static) -> Sequence[str]:
        return () if static.activation is None or _activation.by_result(static.activation) and not residual else (PREACTIVATION,)

    of_sum = form.slots[open]
    return Operation(
        name=name,
        inputs={slot: form.slots[slot] for slot in form.factors(open)}
        | ({} if bias is None else {"bias": bias})
        | ({"residual": of_sum} if residual else {}),
        results={open: of_sum, PREACTIVATION: of_sum},
        composition=composition,
        tangents=tangents,
        family=family,
        saved=saved,
        window=form.window,
        product=(form, open),
    )


@functools.cache
def linear(bias: bool, residual: bool) -> Operation:
    """y[b,m,n] = activation(Σ_k x[b,m,k] w[b,k,n] + bias[b,n]) + residual[b,m,n], with the names of matmul's slots."""
    return _operation("linear", _LINEAR, MATMUL, "c", ("B", "N") if bias else None, residual)


@functools.cache
def gated_linear_unit() -> Operation:
    """y[b,m,n] = activation(Σ_k x[b,m,k] w[b,k,0,n]) Σ_k x[b,m,k] w[b,k,1,n]."""
    return Operation(
        name="gated_linear_unit",
        inputs={"a": ("B", "M", "K"), "b": ("B", "K", GATES, "N")},
        results={"c": ("B", "M", "N"), PREACTIVATION: ("B", "M", GATES, "N")},
        composition=composition,
        tangents=tangents,
        family=_GATED,
        saved=lambda static: (PREACTIVATION,),
        whole=(GATES,),
        product=(MATMUL, "c"),
    )


@functools.cache
def conv_bias_act(rank: int, bias: bool, residual: bool) -> Operation:
    """A convolution with `rank` spatial axes."""
    return _operation(f"conv{rank}d_bias_act", CONV_BIAS_ACT, conv_form(rank), "y", ("B", "G", "K") if bias else None, residual)
