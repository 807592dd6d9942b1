"""Matrix products and convolutions with a fused epilogue: the operations `linear`, `gated_linear_unit` and `conv_bias_act`."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax
from jax import lax

from jaxext.core import epilogue, partition
from jaxext.core.checks import promoted, refuse_dtypes
from jaxext.core.composition import Composition
from jaxext.core.family import Family, declare
from jaxext.core.operation import Operation
from jaxext.core.static import Static
from jaxext.lax.dispatch import dot_general_params, sharding_in_types
from jaxext.ops.conv.form import FAMILY as CONV
from jaxext.ops.conv.form import KERNELS, conv_form
from jaxext.ops.matmul.form import MATMUL

# The kernels are those of the products, without their definitions.
_LINEAR, _GATED = (
    declare(Family(name, lax_primitive=lax.dot_general_p, names=name, weights="b"), *MATMUL.family.implementations[:-1], Composition())
    for name in ("linear", "gated_linear_unit")
)
CONV_BIAS_ACT = declare(
    Family(
        "conv_bias_act",
        lax_primitive=lax.conv_general_dilated_p,
        names=r"conv\d+d_bias_act",
        weights="w",
        axis_names={**CONV.axis_names, "residual": CONV.axis_names["y"], epilogue.PREACTIVATION: CONV.axis_names["y"]},
        groups=CONV.groups,
    ),
    *KERNELS,
    Composition(),
)


@functools.cache
def linear(bias: bool, residual: bool) -> Operation:
    """y[b,m,n] = activation(Σ_k a[b,m,k] b[b,k,n] + bias[b,n]) + residual[b,m,n], with the names of matmul's slots."""
    labels = ("B", "N") if bias else None
    return epilogue.operation("linear", _LINEAR, MATMUL, "c", bias=labels, residual=MATMUL.slots["c"] if residual else None)


@functools.cache
def gated_linear_unit() -> Operation:
    """y[b,m,n] = activation(Σ_k a[b,m,k] b[b,k,0,n]) Σ_k a[b,m,k] b[b,k,1,n]."""
    return epilogue.operation("gated_linear_unit", _GATED, MATMUL, "c", gated=True)


@functools.cache
def conv_bias_act(rank: int, bias: bool, residual: bool) -> Operation:
    """A convolution with `rank` spatial axes."""
    form = conv_form(rank)
    labels = ("B", "G", "K") if bias else None
    return epilogue.operation(
        f"conv{rank}d_bias_act", CONV_BIAS_ACT, form, "y", bias=labels, residual=form.slots["y"] if residual else None
    )


def parameters(
    operation: Operation,
    name: str,
    activation,
    operands: dict[str, jax.Array],
    factors: str,
    contracted,
    ranks: Mapping[str, int],
    added: Mapping[str, str],
    *,
    precision,
    preferred_element_type,
    out_sharding,
    implementation,
) -> tuple[dict[str, jax.Array], Static]:
    """The operands with promoted dtypes, and the parameters that `epilogue.bind` takes.

    `factors`: the slots of x and w, which are multiplied by lax's rules; `added`: slot -> argument, of what the epilogue adds.
    """
    if preferred_element_type is None:
        operands = operands | promoted(operands, factors)
    said = dot_general_params([operands[slot] for slot in factors], contracted, precision, preferred_element_type)
    sharding = sharding_in_types(name, out_sharding, operands[factors[0]].ndim)
    if sharding is not None and ranks["N"] == 2:  # gate and up
        sharding = partition.insert(sharding, len(sharding.spec) - 1, None)
    static = Static(ranks=operation.pack(ranks), implementation=implementation, out_sharding=sharding, **said)
    refuse_dtypes(name, activation, static.dtype, {argument: operands[slot] for slot, argument in added.items()})
    return operands, static
