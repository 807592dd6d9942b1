"""A matrix product for training in 8-bit floats: factors in float8_e4m3fn, cotangents in float8_e5m2, each with one scale.

    y = x8 w8        dx = g8 w8ᵀ        dw = x8ᵀ g8

Rounding counts as the identity, whose derivative is one (a straight-through estimator).  So this is a product with another derivative than
its own.  In forward mode that is linear in the tangents, which are not rounded.  In reverse mode the cotangent is rounded where it enters.
The derivative of rounded numbers would be zero, so a derivative of the derivative is refused.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from jaxext import _compat
from jaxext.backends.xla.xla_scaled import summed
from jaxext.families import fuse, scaled
from jaxext.families.dispatch import compiled
from jaxext.families.quantize import Quantized, limits, positive

FORWARD, BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2


def matmul(name: str, x: Any, w: Any, scales: dict[str, Any], *, out_sharding, implementation) -> jax.Array:
    """`scales`: x_scale, w_scale and gradient_scale, those that are given."""
    fuse.refuse(name, {"x": x, "w": w} | scales)
    x, w = jnp.asarray(x), jnp.asarray(w)
    scales = {argument: jnp.asarray(scale) for argument, scale in scales.items()}
    for argument, array in dict(x=x, w=w, **scales).items():
        scaled.refuse_dtype(name, argument, array.dtype)
    for argument, scale in scales.items():
        fuse.refuse_shape(name, argument, scale, (), "a scale for all of the array")
    if x.ndim < 1 or w.ndim != 2 or w.shape[0] != x.shape[-1]:
        raise TypeError(f"{name}: x and w have the shapes {x.shape} and {w.shape}, want (..., K) and (K, N)")
    arrays, static = (x, w, *scales.values()), dict(out_sharding=out_sharding)
    return compiled(_matmul, (name, tuple(scales)), scaled.FAMILY, implementation, arrays, static, name=name)


def _matmul(name, given, x, w, *scales, out_sharding, implementation):
    dims = (((x.ndim - 1,), (0,)), ((), ()))

    def product(left, right):
        arrays = {}
        for side, of in (("lhs", left), ("rhs", right)):
            arrays |= {side: of.qvalue, f"{side}_scale": of.scale} if isinstance(of, Quantized) else {side: of}
        common = dict(out_sharding=out_sharding, implementation=implementation)
        return scaled.computed(name, tuple(arrays), dims, x.dtype, *arrays.values(), **common)

    def factors(x, w, scales):
        scale = dict(zip(given, scales, strict=True))
        return _rounded(x, FORWARD, scale.get("x_scale")), _rounded(w, FORWARD, scale.get("w_scale")), scale.get("gradient_scale")

    @jax.custom_jvp
    def rounded(x, w, *scales):
        return product(*factors(x, w, scales)[:2])

    @functools.partial(rounded.defjvp, symbolic_zeros=True)
    def _(primals, tangents):
        (x, w, *scales), (dx, dw, *_) = primals, tangents
        left, right, scale = factors(x, w, scales)
        moved = [(dx, right), (left, dw)]
        dots = [product(*pair) for dot, pair in zip((dx, dw), moved, strict=True) if not isinstance(dot, SymbolicZero)]
        y = product(left, right)
        dot = functools.reduce(jnp.add, dots) if dots else jnp.zeros_like(y)
        _, *entering = _compat.align_varying(y, dot, *([] if scale is None else [scale]))
        return y, cotangent_p.bind(*entering, mapped=0)

    return rounded(x, w, *scales)


def _rounded(x: jax.Array, dtype, scale: jax.Array | None, mapped: int = 0) -> Quantized:
    """x in 8 bits, saturated, by a scale for each element of the first axes.  If none is given, the largest number becomes the dtype's."""
    x = _constant(x).astype(summed(x.dtype))
    low, high = limits(dtype)
    if scale is None:
        scale = jnp.max(jnp.abs(x), range(mapped, x.ndim), keepdims=True, initial=0) / high
    else:
        scale = lax.stop_gradient(scale).astype(x.dtype).reshape(*scale.shape, *(1,) * (x.ndim - mapped))
    scale = positive(scale)
    return Quantized(jnp.clip(x / scale, low, high).astype(dtype), scale)


@jax.custom_jvp
def _constant(x: jax.Array) -> jax.Array:
    return x


@_constant.defjvp
def _(primals, tangents):
    raise TypeError("fp8_matmul: a derivative of its derivative is asked for, want one of first order: rounded numbers have no other")


# The identity, whose cotangent is rounded: of `dot`, and of its scale if one is given.  The first `mapped` axes are those of vmap.
cotangent_p = Primitive("fp8_cotangent")


def _transpose_rule(ct, dot, *scale, mapped):
    rest = [None] * len(scale)
    if type(ct) is ad.Zero:
        return [ad.Zero(dot.aval), *rest]
    return [_rounded(ct, BACKWARD, scale[0] if scale else None, mapped).dequantize().astype(ct.dtype), *rest]


def _batch_rule(args, dims, *, mapped):
    """Each example is rounded by itself."""
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    first = [jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True)]
    return cotangent_p.bind(*first, mapped=mapped + 1), 0


def _jvp_rule(primals, tangents, *, mapped):
    (dot, *scale), (moved, *_) = primals, tangents
    moved = moved if type(moved) is ad.Zero else cotangent_p.bind(moved, *scale, mapped=mapped)
    return cotangent_p.bind(dot, *scale, mapped=mapped), moved


cotangent_p.def_impl(functools.partial(xla.apply_primitive, cotangent_p))
cotangent_p.def_abstract_eval(lambda dot, *scale, mapped: dot)
ad.primitive_jvps[cotangent_p] = _jvp_rule
ad.primitive_transposes[cotangent_p] = _transpose_rule
batching.primitive_batchers[cotangent_p] = _batch_rule
mlir.register_lowering(cotangent_p, mlir.lower_fun(lambda dot, *scale, mapped: dot, multiple_results=False))
