"""Products of scaled numbers: labels, roles, implementations, and the translation of `lax.scaled_dot`'s arguments.

    y[b,i,m,j,n] = Σ_s,k (x_scale[b,i,s] x[b,i,m,s,k]) (w_scale[b,s,j] w[b,s,k,j,n])

The axes of matrices are cut into blocks: rows into I blocks of M, columns into J of N, what is contracted into S of K.  A scale has an
element for each block of its array.  Where an axis has one scale for all of it, the label of its blocks has no axis.  Where each element
has its own, the label inside has none.  So one form serves a scale for a tensor, for each row or column, for blocks along K, for squares.

Scales are companions: for any fixed scales the form is trilinear, and the roles are those of a matrix product.  The form is linear in each
scale as well.  So the tangent for that of a scale is a product again, in which the array is multiplied by it instead.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxext import _compat
from jaxext._messages import dtype_named, format_value
from jaxext.backends.xla_products import summed
from jaxext.core import partition
from jaxext.core.checks import checked
from jaxext.core.family import Family, declare
from jaxext.core.form import Companion, Form, define
from jaxext.core.static import Static
from jaxext.lax.dispatch import compiled, lax_params, sharding_in_types
from jaxext.lax.substitute import transpose
from jaxext.ops.matmul.form import MATMUL, arrangement
from jaxext.ops.scaled.blocks import Cut, blocks_fit, divided, divided_sharding, joined, placed, spread
from jaxext.ops.scaled.cuda import CudaScaled
from jaxext.ops.scaled.triton import TritonScaled
from jaxext.ops.scaled.xla import XlaScaled, balanced

SLOTS = {"x": ("B", "I", "M", "S", "K"), "w": ("B", "S", "K", "J", "N"), "y": ("B", "I", "M", "J", "N")}
SCALES = {"x": ("B", "I", "S"), "w": ("B", "S", "J"), "y": ("B", "I", "J")}
_OF_MATMUL = {"x": "a", "w": "b", "y": "c"}


@functools.cache
def form(scaled: tuple[str, ...]) -> Form:
    """The form in which these slots have scales."""
    return define(
        Form(
            name=f"scaled_dot_{''.join(scaled)}",
            slots=SLOTS,
            roles={"y": "nn", "x": "nt", "w": "tn"},
            window=(),
            family=FAMILY,
            companions={f"{slot}_scale": Companion(SCALES[slot], functools.partial(tangent, bind, slot)) for slot in scaled},
        )
    )


def bind(open: str, operands: Mapping[str, jax.Array], ranks: Mapping[str, int], **params: Any) -> jax.Array:
    """The product of two slots, with the scales `x_scale`, `w_scale` and `y_scale` that there are.  `params`: fields of `Static`."""
    scaled = tuple(slot for slot in SLOTS if f"{slot}_scale" in operands)
    if scaled:
        return form(scaled).bind(open, operands, Static(ranks=form(scaled).pack(ranks), **params))
    plain = dict(B=ranks["B"], M=ranks["I"] + ranks["M"], K=ranks["S"] + ranks["K"], N=ranks["J"] + ranks["N"])
    operands = {_OF_MATMUL[slot]: x for slot, x in operands.items()}
    return MATMUL.bind(_OF_MATMUL[open], operands, Static(ranks=MATMUL.pack(plain), **params))


def tangent(
    bind: Callable[..., jax.Array], slot: str, form: Form, open: str, operands: Mapping[str, jax.Array], dot: jax.Array, static: Static
) -> jax.Array:
    """Return the tangent of the result for the tangent `dot` of a slot's scale; `bind` computes the product without this scale."""
    scale = f"{slot}_scale"
    rest = {name: x for name, x in operands.items() if name != scale}
    axes = form.axes(slot, static.ranks)
    lacking = [at for at, axis in enumerate(axes) if axis not in form.axes(scale, static.ranks)]
    wide = summed(dot.dtype)
    dot = lax.expand_dims(dot.astype(wide), lacking)
    ranks = form.unpack(static.ranks)
    kept = "precision", "implementation", "out_sharding", "in_place"
    params = {name: getattr(static, name) for name in kept}
    if slot != open:
        dot, x = partition.broadcast_together(dot, operands[slot].astype(wide))
        return bind(open, rest | {slot: x * dot}, ranks, dtypes=static.dtypes, **params)
    y = bind(open, rest, ranks, dtypes=(summed(static.dtype),), **params).astype(wide)
    return (y * partition.broadcast_like(dot, y)).astype(static.dtype)


def product(name: str, arrays: Mapping[str, Any], dimension_numbers, dtype, *, implementation: str | None, **static) -> jax.Array:
    """`arrays`: lhs and rhs, and lhs_scale and rhs_scale if they are given."""
    given = checked(name, arrays)
    dims = _dimension_numbers(name, given["lhs"], given["rhs"], dimension_numbers)
    dtype = dtype_of_result(name, jnp.bfloat16 if dtype is None else dtype)
    for side in ("lhs", "rhs"):
        refuse_dtype(name, side, given[side].dtype, integers=True)
        if (scale := f"{side}_scale") in given:
            refuse_dtype(name, scale, given[scale].dtype)
            refuse_blocks(name, scale, given[scale].shape, side, given[side].shape)
    return compiled(computed, (name, tuple(given), dims, dtype), FAMILY, implementation, tuple(given.values()), static, name=name)


def bind_lax(*arrays: jax.Array, **static) -> jax.Array:
    """A call of lax's primitive, inside `in_place_of_lax`.  It has scales of ones where its caller gave none."""
    return compiled(_as_lax, (), FAMILY, None, arrays, static, name="scaled_dot")


def _as_lax(*arrays, dimension_numbers, preferred_element_type, implementation) -> jax.Array:
    static = dict(dimension_numbers=dimension_numbers, preferred_element_type=preferred_element_type)
    lax_params(functools.partial(_compat.scaled_dot_p.bind, **static), *arrays)  # raises what lax raises
    names = ("lhs", "rhs", "lhs_scale", "rhs_scale")
    # lax rounds all numbers to bfloat16, also those that `product` refuses.
    given = [x if _is_number(x.dtype, name in names[:2]) else x.astype(jnp.bfloat16) for name, x in zip(names, arrays, strict=True)]
    dims = _dimension_numbers("scaled_dot", given[0], given[1], dimension_numbers)
    dtype = dtype_of_result("scaled_dot", preferred_element_type)
    return computed("scaled_dot", names, dims, dtype, *given, out_sharding=None, implementation=implementation)


def dtype_of_result(name: str, dtype) -> jnp.dtype:
    dtype = jnp.dtype(jax.dtypes.canonicalize_dtype(dtype_named(name, "preferred_element_type", dtype)))
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"{name}: preferred_element_type is {dtype}, want a floating-point dtype")
    return dtype


def refuse_dtype(name: str, argument: str, dtype, *, integers: bool = False) -> None:
    if not _is_number(dtype, integers):
        want = "floating-point numbers" + (", or integers of at most 8 bits" if integers else "")
        raise TypeError(f"{name}: {argument} is {dtype}, want {want}")


def constant_e8m0(name: str, argument: str, scale: jax.Array) -> jax.Array:
    """The scale, in which no derivative can be taken if it has no negative tangents."""

    @jax.custom_jvp
    def same(scale):
        return scale

    @same.defjvp
    def _(primals, tangents):
        got = f"{argument} is {format_value(primals[0])}, whose derivative is taken, but its dtype has no negative numbers"
        raise TypeError(f"{name}: {got}: want it constant, by jax.lax.stop_gradient")

    return same(scale) if scale.dtype == jnp.float8_e8m0fnu else scale


def _is_number(dtype, integers: bool) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) or integers and jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize == 1


def refuse_blocks(name: str, argument: str, counts: Sequence[int], of: str, shape: Sequence[int]) -> None:
    if not blocks_fit(counts, shape):
        want = f"as many axes as {of}, of the shape {tuple(shape)}, and sizes that divide its sizes"
        raise TypeError(f"{name}: {argument} has the shape {tuple(counts)}, want {want}")


def _dimension_numbers(name: str, lhs, rhs, numbers) -> Any:
    """Return the numbers as `lax.scaled_dot` takes them: by default the last axis of lhs with the one before the last of rhs, and equal
    axes in front."""
    if numbers is None:
        if min(lhs.ndim, rhs.ndim) < 2 or lhs.ndim != rhs.ndim:
            raise TypeError(f"{name}: lhs and rhs have the shapes {lhs.shape} and {rhs.shape}, want equally many axes, at least two")
        batch = tuple(range(lhs.ndim - 2))
        numbers = (((lhs.ndim - 1,), (rhs.ndim - 2,)), (batch, batch))
    try:
        (lc, rc), (lb, rb) = numbers
        numbers = ((tuple(map(int, lc)), tuple(map(int, rc))), (tuple(map(int, lb)), tuple(map(int, rb))))
    except (TypeError, ValueError) as error:
        want = "((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch)), four sequences of axes, or None"
        raise TypeError(f"{name}: dimension_numbers is {format_value(numbers)}, want {want}") from error
    bare = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (lhs, rhs)]
    jax.eval_shape(lambda lhs, rhs: lax.dot_general(lhs, rhs, numbers), *bare)  # raises what lax raises
    return numbers


@dataclasses.dataclass
class _Side:
    """An operand with its scale, whose axes are batch, free and contracted."""

    x: jax.Array
    scale: jax.Array | None
    batch: Sequence[int]
    contract: Sequence[int]

    def __post_init__(self):
        self.counts = (1,) * self.x.ndim if self.scale is None else self.scale.shape or (1,) * self.x.ndim
        self.free = [axis for axis in range(self.x.ndim) if axis not in (*self.batch, *self.contract)]
        _, self.contract_first = arrangement(self.x.ndim, self.batch, self.contract)

    def sizes(self, axes: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.x.shape[axis] for axis in axes)

    def scales(self, axes: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.counts[axis] for axis in axes)

    def arrays(self, slot: str, free: Cut, cut: Cut) -> dict[str, jax.Array]:
        """The operand with its axes in blocks, and its scale with an element for each."""
        groups = [(self.contract, cut), (self.free, free)] if self.contract_first else [(self.free, free), (self.contract, cut)]
        order = [*self.batch, *(axis for axes, _ in groups for axis in axes)]
        batch = self.sizes(self.batch)
        x = divided(transpose(self.x, order), [*([n] for n in batch), *(part for _, of in groups for part in of.parts)])
        if self.scale is None:
            return {slot: x}
        wanted = [*batch, *(size for _, of in groups for size in of.counts)]
        scale = spread(transpose(self.scale.reshape(self.counts), order), wanted)
        dropped = [len(batch) + i for i, kept in enumerate(kept for _, of in groups for kept in of.scaled) if not kept]
        return {slot: x, f"{slot}_scale": lax.squeeze(scale, dropped)}


def computed(name, names, dims, dtype, *arrays, out_sharding, implementation, precision=None) -> jax.Array:
    given = {argument: constant_e8m0(name, argument, x) for argument, x in zip(names, arrays, strict=True)}
    (lc, rc), (lb, rb) = dims
    pairs = sorted(zip(lc, rc, strict=True))  # in the order of the axes of lhs
    left = _Side(given["lhs"], given.get("lhs_scale"), lb, [axis for axis, _ in pairs])
    right = _Side(given["rhs"], given.get("rhs_scale"), rb, [axis for _, axis in pairs])
    n_last = right.contract_first or not right.free
    right.contract_first = n_last
    left.contract_first &= n_last
    sums = Cut.of(left.sizes(left.contract), left.scales(left.contract), right.scales(right.contract))
    rows, cols = (Cut.of(side.sizes(side.free), side.scales(side.free)) for side in (left, right))
    if left.contract_first:
        open, first, second, m, k, n = "w", "x", "y", sums, rows, cols
    elif n_last:
        open, first, second, m, k, n = "y", "x", "w", rows, sums, cols
    else:
        open, first, second, m, k, n = "x", "y", "w", rows, cols, sums
    (i, m), (s, k), (j, n) = m.ranks, k.ranks, n.ranks
    parts = [*([size] for size in left.sizes(lb)), *rows.parts, *cols.parts]
    wide = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (left.x, right.x)]
    said, _ = lax_params(functools.partial(lax.dot_general, dimension_numbers=dims, precision=precision), *wide)
    sharding = sharding_in_types(name, out_sharding, len(parts))
    operands = left.arrays(first, rows, sums) | right.arrays(second, cols, sums)
    scales = [scale for slot in (first, second) if (scale := f"{slot}_scale") in operands]
    if len(scales) == 2 and all(operands[scale].ndim == len(lb) for scale in scales):  # of all of a matrix
        dtype_of_sums = summed(dtype, *(x.dtype for x in operands.values()))
        operands |= zip(scales, balanced(*(operands[scale].astype(dtype_of_sums) for scale in scales)), strict=True)
    y = bind(
        open,
        operands,
        dict(B=len(lb), I=i, M=m, S=s, K=k, J=j, N=n),
        dtypes=(dtype,),
        precision=said["precision"],
        implementation=implementation,
        out_sharding=sharding and divided_sharding(sharding, parts),
    )
    return placed(joined(y, parts), sharding)


FAMILY = declare(
    Family("scaled_dot", lax_primitive=lax.dot_general_p, names=r"scaled_dot_[wxy]+", namesake=_compat.scaled_dot_p, bind=bind_lax),
    CudaScaled(),
    TritonScaled(),
    XlaScaled(),
)
