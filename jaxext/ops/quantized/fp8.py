"""A matrix product for training in 8-bit floats: factors in float8_e4m3fn, cotangents in float8_e5m2, each with one scale.

    y = x8 w8        dx = g8 w8ᵀ        dw = x8ᵀ g8

Rounding counts as the identity, whose derivative is one (a straight-through estimator).  So this is a product with another derivative than
its own.  In forward mode that is linear in the tangents, which are not rounded.  In reverse mode the cotangent is rounded where it enters,
so all three products have two factors of 8 bits.  The derivative of rounded numbers would be zero, so a derivative of the derivative is
refused.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxext import _compat
from jaxext.backends.xla_products import summed
from jaxext.core import partition
from jaxext.core.checks import checked, refuse_shape
from jaxext.core.static import slices_in_place
from jaxext.lax.dispatch import compiled, sharding_in_types
from jaxext.lax.substitute import transpose
from jaxext.ops.quantized.quantization import Quantized, limits, positive
from jaxext.ops.scaled import form as scaled

FORWARD, BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2


def matmul(name: str, x: Any, w: Any, scales: dict[str, Any], *, preferred_element_type, out_sharding, implementation) -> jax.Array:
    """`scales`: x_scale, w_scale and gradient_scale, those that are given."""
    scales = {argument: np.float32(scale) if isinstance(scale, float | int) else scale for argument, scale in scales.items()}
    arrays = checked(name, {"x": x, "w": w} | scales)
    x, w = arrays["x"], arrays["w"]
    scales = {argument: arrays[argument] for argument in scales}
    for argument, array in arrays.items():
        scaled.refuse_dtype(name, argument, array.dtype)
    for argument, scale in scales.items():
        refuse_shape(name, argument, scale, (), "a scale for all of the array")
    if x.ndim < 1 or w.ndim != 2 or w.shape[0] != x.shape[-1]:
        raise TypeError(f"{name}: x and w have the shapes {x.shape} and {w.shape}, want (..., K) and (K, N)")
    dtype = scaled.dtype_of_result(name, x.dtype if preferred_element_type is None else preferred_element_type)
    arrays, static = (x, w, *scales.values()), dict(preferred_element_type=dtype, out_sharding=out_sharding)
    return compiled(_matmul, (name, tuple(scales)), scaled.FAMILY, implementation, arrays, static, name=name)


def _matmul(name, given, x, w, *scales, preferred_element_type, out_sharding, implementation):
    sharding = sharding_in_types(name, out_sharding, x.ndim)
    static = dict(name=name, dtype=preferred_element_type, implementation=implementation, in_place=slices_in_place.value)

    def rounded_factors(x, w, scales):
        scale = dict(zip(given, scales, strict=True))
        return _rounded(x, FORWARD, scale.get("x_scale")), _rounded(w, FORWARD, scale.get("w_scale")), scale.get("gradient_scale")

    def product(left, right, gradient_scale):
        y = _product({"x": left, "w": right}, _labels(x.ndim - 1), "y", out_sharding=sharding, **static)
        # vmap may map this scale alone.  The tangent has its axis, and jax wants it in y too.  XLA removes the selection.
        return y if gradient_scale is None else jnp.where(gradient_scale > 0, y, y)

    @jax.custom_jvp
    def rounded(x, w, *scales):
        return product(*rounded_factors(x, w, scales))

    @functools.partial(rounded.defjvp, symbolic_zeros=True)
    def _(primals, tangents):
        (x, w, *scales), (dx, dw, *_) = primals, tangents
        left, right, gradient_scale = rounded_factors(x, w, scales)
        y = product(left, right, gradient_scale)

        def tangent(slot, dot, other):
            scale = f"{slot}_scale"
            if scale in given:  # vmap may map it alone.  Then each example has a cotangent of its own, by a factor that XLA removes
                dot = dot * jnp.where(scales[given.index(scale)] > 0, jnp.ones((), dot.dtype), jnp.ones((), dot.dtype))
            operands = dot, other.qvalue, other.scale, *([] if gradient_scale is None else [gradient_scale])
            params = dict(slot=slot, rows=x.ndim - 1, levels=(), out_sharding=sharding, **static)
            return tangent_p.bind(*_compat.align_varying(*operands), **params)

        moved = [("x", dx, right), ("w", dw, left)]
        dots = [tangent(slot, dot, other) for slot, dot, other in moved if not isinstance(dot, SymbolicZero)]
        return y, functools.reduce(jnp.add, dots) if dots else jnp.zeros_like(y)

    return rounded(x, w, *scales)


def _rounded(x: jax.Array, dtype, scale: jax.Array | None, mapped: int = 0) -> Quantized:
    """x in 8 bits, saturated, by a scale for each element of the first axes.  If none is given, the largest number becomes the dtype's."""
    x = _constant(x).astype(summed(x.dtype))
    low, high = limits(dtype)
    if scale is None:
        largest = jnp.max(jnp.abs(x), range(mapped, x.ndim), keepdims=True, initial=0)
        scale = positive(largest / high, largest)
    else:
        scale = lax.stop_gradient(scale).astype(x.dtype).reshape(*scale.shape, *(1,) * (x.ndim - mapped))
        scale = jnp.where(scale > 0, scale, 1)
    return Quantized(jnp.clip(x / scale, low, high).astype(dtype), scale)


@jax.custom_jvp
def _constant(x: jax.Array) -> jax.Array:
    return x


@_constant.defjvp
def _(primals, tangents):
    raise TypeError("fp8_matmul: a derivative of its derivative is taken, want first derivatives only, since rounding has no others")


def _labels(rows: int, slot: str = "x", levels: Sequence[tuple[bool, bool]] = ()) -> dict[str, list]:
    """A label for each axis of x, w and y.  Axes of vmap are in front, the outermost first: `slot` has it, and the other factor."""
    free = [f"m{i}" for i in range(rows)]
    of_slot, of_other = ([i for i, level in enumerate(levels) if level[j]] for j in (0, 1))
    of_x, of_w = (of_slot, of_other) if slot == "x" else (of_other, of_slot)
    return {"x": [*of_x, *free, "k"], "w": [*of_w, "k", "n"], "y": [*range(len(levels)), *free, "n"]}


def _product(
    arrays: dict[str, Any], labels: dict[str, list], open: str, *, name, dtype, out_sharding, implementation, in_place
) -> jax.Array:
    """The sum over the labels that the open slot lacks of the product of two slots, arrays or Quantized."""
    (left, right), kept = (labels[slot] for slot in arrays), labels[open]
    both = [label for label in left if label in right]
    batch, contracted = ([label for label in both if (label in kept) == is_kept] for is_kept in (True, False))
    dims = tuple(tuple(tuple(of.index(label) for label in group) for of in (left, right)) for group in (contracted, batch))
    order = batch + [label for of in (left, right) for label in of if label not in both]
    given = {}
    for side, of in zip(("lhs", "rhs"), arrays.values(), strict=True):
        given |= {side: of.qvalue, f"{side}_scale": of.scale} if isinstance(of, Quantized) else {side: of}
    if out_sharding is not None:
        out_sharding = NamedSharding(out_sharding.mesh, P(*(out_sharding.spec[kept.index(label)] for label in order)))
    static = dict(out_sharding=out_sharding, implementation=implementation)
    with slices_in_place(in_place):
        y = scaled.computed(name, tuple(given), dims, dtype, *given.values(), **static)
    return transpose(y, [order.index(label) for label in kept])


def _tangent(dot, qvalue, scale, *gradient_scale, slot, rows, levels, **static):
    """Return what a tangent of a factor contributes to that of the result, by its definition."""
    del gradient_scale
    other = Quantized(qvalue, scale)
    arrays = {"x": dot, "w": other} if slot == "x" else {"x": other, "w": dot}
    return _product(arrays, _labels(rows, slot, levels), "y", **static)


def _transpose_rule(ct, dot, qvalue, scale, *gradient_scale, slot, rows, levels, name, implementation, in_place, **_):
    rest = [None] * (2 + len(gradient_scale))
    if type(ct) is ad.Zero:
        return [ad.Zero(dot.aval), *rest]
    g, other = _rounded(ct, BACKWARD, *(gradient_scale or [None]), mapped=len(levels)), Quantized(qvalue, scale)
    arrays = {"y": g, "w": other} if slot == "x" else {"x": other, "y": g}
    static = dict(dtype=dot.aval.dtype, out_sharding=partition.cotangent_sharding(dot.aval, ct, qvalue), implementation=implementation)
    return [_product(arrays, _labels(rows, slot, levels), slot, name=name, in_place=in_place, **static), *rest]


def _batch_rule(args, dims, *, levels, out_sharding, **params):
    """Each example is rounded by itself."""
    dot, qvalue, scale, *gradient_scale = args
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    has_other = dims[1] is not None or dims[2] is not None
    has_dot = dims[0] is not None or not has_other
    mapped = [has_dot, has_other, has_other, *(True for _ in gradient_scale)]

    def first(x, d, is_mapped):
        return x if not is_mapped else jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)

    args = [first(*each) for each in zip(args, dims, mapped, strict=True)]
    if out_sharding is not None:
        specs = [s.spec[0] for x, is_mapped in zip(args, mapped, strict=True) if is_mapped and (s := partition.explicit(jax.typeof(x)))]
        out_sharding = partition.insert(out_sharding, 0, next((spec for spec in specs if spec is not None), None))
    return tangent_p.bind(*args, levels=((has_dot, has_other), *levels), out_sharding=out_sharding, **params), 0


def _jvp_rule(primals, tangents, **params):
    moved = tangents[0]  # the others are of rounded numbers, which have none
    return tangent_p.bind(*primals, **params), moved if type(moved) is ad.Zero else tangent_p.bind(moved, *primals[1:], **params)


def _type(*avals, **params):
    return jax.eval_shape(functools.partial(_tangent, **params), *avals)


# What a factor's tangent contributes, linear in it.  Its transpose takes the cotangent in 8 bits, with its scale if one is given.
tangent_p = _compat.product_primitive(
    "fp8_tangent",
    lambda *avals, **params: _type(*avals, **params).shape,
    lambda *avals, dtype, **_: dtype,
    lambda *avals, **params: _type(*avals, **params).sharding,
)
ad.primitive_jvps[tangent_p] = _jvp_rule
ad.primitive_transposes[tangent_p] = _transpose_rule
batching.primitive_batchers[tangent_p] = _batch_rule
mlir.register_lowering(tangent_p, mlir.lower_fun(_tangent, multiple_results=False))
