"""Ragged products of scaled numbers: labels, roles, implementations, and the arguments of the public function.

    y[b,p,r,m,j,n] = Σ_g,s,k [begin[b,p,g] <= m < end[b,p,g]] (x_scale[b,p,r,m,s] x[b,p,r,m,s,k]) (w_scale[b,g,s,j] w[b,g,s,k,j,n])

A ragged product (`ops/ragged`) whose axes of matrices are cut into blocks, as those of a product of scaled numbers (`ops/scaled`): what is
contracted into S of K, columns into J of N.  Each row has scales of its own, and so has each group.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxext._messages import format_value
from jaxext.backends.xla_products import summed
from jaxext.core.checks import checked
from jaxext.core.family import Family, declare
from jaxext.core.form import Companion, define
from jaxext.core.static import Static
from jaxext.lax.dispatch import compiled, lax_params, sharding_in_types
from jaxext.ops.ragged import form as ragged
from jaxext.ops.ragged.form import RAGGED, RANGES, TiedForm
from jaxext.ops.ragged_scaled.cuda import CudaRaggedScaled
from jaxext.ops.ragged_scaled.triton import TritonRaggedScaled
from jaxext.ops.ragged_scaled.xla import XlaRaggedScaled
from jaxext.ops.scaled import form as scaled
from jaxext.ops.scaled.blocks import Cut, divided, divided_sharding, joined, placed, spread

SLOTS = {"x": ("B", "P", "R", "M", "S", "K"), "w": ("B", "G", "S", "K", "J", "N"), "y": ("B", "P", "R", "M", "J", "N")}
SCALES = {"x": ("B", "P", "R", "M", "S"), "w": ("B", "G", "S", "J"), "y": ("B", "P", "R", "M", "J")}


@functools.cache
def form(slots: tuple[str, ...]) -> TiedForm:
    """The form in which these slots have scales."""
    scales = {f"{slot}_scale": Companion(SCALES[slot], functools.partial(scaled.tangent, bind, slot)) for slot in slots}
    return define(
        TiedForm(
            name=f"ragged_scaled_{''.join(slots)}",
            slots=SLOTS,
            roles=RAGGED.roles,
            window=(),
            family=FAMILY,
            companions=scales | RANGES,
            tied=RAGGED.tied,
            ties=RAGGED.ties,
            cut=RAGGED.cut,
            examples=RAGGED.examples,
        )
    )


def bind(open: str, operands: Mapping[str, jax.Array], ranks: Mapping[str, int], **params: Any) -> jax.Array:
    """The product of two slots, with the scales `x_scale`, `w_scale` and `y_scale` that there are.  `params`: fields of `Static`."""
    slots = tuple(slot for slot in SLOTS if f"{slot}_scale" in operands)
    if slots:
        return form(slots).bind(open, operands, Static(ranks=form(slots).pack(ranks), **params))
    plain = {label: ranks[label] for label in "BPRMG"} | {"K": ranks["S"] + ranks["K"], "N": ranks["J"] + ranks["N"]}
    return RAGGED.bind(open, operands, Static(ranks=RAGGED.pack(plain), **params))


def product(name: str, arrays: Mapping[str, Any], dtype, *, transpose_rhs: bool, implementation: str | None, **static) -> jax.Array:
    """`arrays`: lhs, rhs and group_sizes, and lhs_scale and rhs_scale if they are given."""
    for side in ("lhs", "rhs"):
        if hasattr(arrays[side], "qvalue"):
            raise TypeError(f"{name}: {side} is {format_value(arrays[side])}, want its qvalue, with its scale as {side}_scale")
    if not isinstance(transpose_rhs, bool | np.bool_):
        raise TypeError(f"{name}: transpose_rhs is {format_value(transpose_rhs)}, want True or False")
    given = checked(name, arrays)
    lhs, rhs, sizes = given["lhs"], given["rhs"], given["group_sizes"]
    for side, rank, wanted in (("lhs", 2, "(M, K)"), ("rhs", 3, "(G, N, K)" if transpose_rhs else "(G, K, N)")):
        scaled.refuse_dtype(name, side, given[side].dtype, integers=True)
        if given[side].ndim != rank:
            raise TypeError(f"{name}: {side} has the shape {given[side].shape}, want {wanted}")
    if (got := rhs.shape[2 if transpose_rhs else 1]) != lhs.shape[1]:
        raise TypeError(
            f"{name}: rhs has the shape {rhs.shape}, with {got} elements along the contracted axis, want {lhs.shape[1]}, as in lhs"
        )
    if not isinstance(rhs.shape[0], int):
        raise TypeError(f"{name}: rhs has the shape {rhs.shape}, want a number of groups that is not symbolic")
    if sizes.shape != rhs.shape[:1] or not jnp.issubdtype(sizes.dtype, jnp.integer):
        raise TypeError(f"{name}: group_sizes is {sizes.dtype}{list(sizes.shape)}, want an integer for each of the {rhs.shape[0]} groups")
    for side in ("lhs", "rhs"):
        if (scale := f"{side}_scale") in given:
            scaled.refuse_dtype(name, scale, given[scale].dtype)
            scaled.refuse_blocks(name, scale, given[scale].shape, side, given[side].shape)
    wide = lhs.dtype if lhs.dtype.itemsize > 1 else jnp.bfloat16
    dtype = scaled.dtype_of_result(name, wide if dtype is None else dtype)
    key = name, tuple(given), bool(transpose_rhs), dtype
    return compiled(_product, key, FAMILY, implementation, tuple(given.values()), static, name=name)


def _product(name, names, transpose_rhs, dtype, *arrays, out_sharding, implementation, precision) -> jax.Array:
    given = {argument: scaled.constant_e8m0(name, argument, x) for argument, x in zip(names, arrays, strict=True)}
    lhs, rhs = given["lhs"], given["rhs"]
    if transpose_rhs:  # a gradient of rows: of y by the transposed matrices
        open, first, axis = "x", "y", 1
    else:
        open, first, axis = "y", "x", 2
    summed_axis = 3 - axis
    counts = {side: _counts(given.get(f"{side}_scale"), given[side]) for side in ("lhs", "rhs")}
    sums = Cut.of(lhs.shape[1:], counts["lhs"][1:], counts["rhs"][summed_axis : summed_axis + 1])
    columns = Cut.of(rhs.shape[axis : axis + 1], counts["rhs"][axis : axis + 1])
    axes = {"lhs": [sums], "rhs": [columns, sums] if transpose_rhs else [sums, columns]}
    begin, end = ragged.ranges(given["group_sizes"], lhs.shape[0], rhs.shape[0])
    operands = {"begin": begin, "end": end}
    for side, slot in (("lhs", first), ("rhs", "w")):
        x, cuts = given[side], axes[side]
        operands[slot] = divided(x, [[x.shape[0]], *(part for cut in cuts for part in cut.parts)])
        if (scale := given.get(f"{side}_scale")) is not None:
            # the gradient of a scale of several rows or blocks is a sum
            wide = scale.astype(summed(scale.dtype)).reshape(counts[side])
            whole = spread(wide, (x.shape[0], *(count for cut in cuts for count in cut.counts)))
            operands[f"{slot}_scale"] = lax.squeeze(whole, [i for i, cut in enumerate(cuts, 1) if not cut.scaled[0]])
    if (of_rows := operands.get(f"{first}_scale")) is not None:
        # The scale of a row of no group is not read.
        inside = ragged.group_mask(begin, end, of_rows.astype(jnp.float32).sum(tuple(range(1, of_rows.ndim))), 0)
        operands[f"{first}_scale"] = jnp.where(lax.expand_dims(inside, range(1, of_rows.ndim)), of_rows, jnp.ones((), of_rows.dtype))
    params, _ = lax_params(functools.partial(lax.dot, precision=precision), *[jax.ShapeDtypeStruct((1, 1), jnp.float32)] * 2)
    parts = [[lhs.shape[0]], *columns.parts]
    sharding = sharding_in_types(name, out_sharding, 2)
    (s, k), (j, n) = (sums.ranks, columns.ranks) if open == "y" else (columns.ranks, sums.ranks)
    y = bind(
        open,
        operands,
        dict(B=0, P=0, R=0, M=1, G=1, S=s, K=k, J=j, N=n),
        dtypes=(dtype,),
        precision=params["precision"],
        implementation=implementation,
        out_sharding=sharding and divided_sharding(sharding, parts),
    )
    return placed(joined(y, parts), sharding)


def _counts(scale: jax.Array | None, x: jax.Array) -> tuple[int, ...]:
    """The number of blocks along each axis."""
    return (1,) * x.ndim if scale is None else scale.shape or (1,) * x.ndim


FAMILY = declare(
    Family("ragged_scaled_dot", lax_primitive=ragged.FAMILY.lax_primitive, names=r"ragged_scaled_[wxy]+", lax_call=ragged.FAMILY.lax_call),
    CudaRaggedScaled(),
    TritonRaggedScaled(),
    XlaRaggedScaled(),
)
