"""Quantised arrays, and products with them: a matrix of small numbers with a scale, and perhaps a zero point, for each block.

    value = (qvalue - zero_point) scale

The product with such a matrix is one of scaled numbers (`scaled`).  What zero points contribute is subtracted afterwards: for each block of
the sum, the sum of the other factor over it, times zero point and scale.
"""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxext._messages import dtype_named, format_value, refuse_traced
from jaxext.backends.xla_products import summed
from jaxext.core.checks import checked, given
from jaxext.lax.dispatch import compiled, sharding_in_types
from jaxext.ops.scaled import form as scaled
from jaxext.ops.scaled.blocks import blocks_fit, divided, joined, placed, spread

_DTYPES = {8: jnp.int8, 4: jnp.int4}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """An array of small numbers with scales, whose values are (qvalue - zero_point) scale.  It is a pytree of its arrays.

    Attributes:
      qvalue: integers of 4 or 8 bits, or 8-bit floats.  `unpack_int4` gives int4 from bytes that hold two each.
      scale: floating-point, with as many axes as `qvalue`.  Each size divides that of `qvalue`, whose axis is cut into that many equal
        blocks.
      zero_point: numbers with the shape of `scale`, or None.
    """

    qvalue: jax.Array
    scale: jax.Array
    zero_point: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.qvalue.shape

    def dequantize(self) -> jax.Array:
        """Return the values, with the dtype of the scale, or float32 if that has fewer bits."""
        checked("dequantize", {"qvalue": self.qvalue, "scale": self.scale} | given(zero_point=self.zero_point))
        wide = summed(self.scale.dtype)
        _refuse_scale("dequantize", "", self.scale.shape, self.qvalue)

        def of_each(blocks):
            return spread(blocks.astype(wide).reshape(blocks.shape or (1,) * self.qvalue.ndim), self.qvalue.shape)

        value = lax.stop_gradient(self.qvalue).astype(wide)
        value = value if self.zero_point is None else value - of_each(lax.stop_gradient(self.zero_point))
        return value * of_each(self.scale)


def quantized(name: str, w: Any, dtype, group: int | None, axis: int | None, symmetric: bool) -> Quantized:
    """`w` in numbers of this dtype, which lie in blocks of `group` along an axis."""
    (w,) = checked(name, {"w": w}).values()
    refuse_traced(name, symmetric=symmetric)
    if not jnp.issubdtype(w.dtype, jnp.floating):
        raise TypeError(f"{name}: w is {w.dtype}, want floating-point numbers")
    if not (symmetric or jnp.issubdtype(dtype, jnp.integer)):
        raise ValueError(f"{name}: symmetric is {symmetric} and dtype is {dtype}, want symmetric=True, or an integer dtype")
    if symmetric and jnp.issubdtype(dtype, jnp.unsignedinteger):
        raise ValueError(f"{name}: symmetric is {symmetric} and dtype is {dtype}, which has no negative numbers, want symmetric=False")
    parts, over = _blocks(name, w.shape, group, axis)
    blocks = divided(w.astype(summed(w.dtype)), parts)
    low, high = limits(dtype)
    if symmetric:
        most = jnp.max(jnp.abs(blocks), over, keepdims=True, initial=0)
        scale, zero = positive(most / high, most), None
        q = _rounded(blocks / scale, dtype, max(low, -high))
    else:
        least, most = (of(blocks, over, keepdims=True, initial=0) for of in (jnp.min, jnp.max))
        scale = positive((most / 2 - least / 2) / ((high - low) / 2), most - least)
        zero = jnp.clip(jnp.round(low - least / scale), low, high)
        q = _rounded(blocks / scale + zero, dtype, low)
    dropped = () if axis is None else over
    zero_point = None if zero is None else lax.squeeze(zero.astype(dtype), dropped)
    return Quantized(joined(q, parts), lax.squeeze(scale, dropped), zero_point)


def _blocks(name: str, shape: tuple[int, ...], group: int | None, axis: int | None) -> tuple[list[list[int]], tuple[int, ...]]:
    """Return what becomes of each axis, and the axes over which numbers share a scale then."""
    parts = [[n] for n in shape]
    for argument, value in {"axis": axis, "group": group}.items():
        if not isinstance(value, numbers.Integral | None) or isinstance(value, bool):
            raise TypeError(f"{name}: {argument} is {format_value(value)}, want an int or None")
    if axis is None:
        if group is not None:
            raise ValueError(f"{name}: group is {group} and axis is None, want group=None: there is one scale for all of w")
        return parts, tuple(range(len(shape)))
    if not -len(shape) <= axis < len(shape):
        want = "0, the axis of a vector, or None" if len(shape) == 1 else f"one of the {len(shape)} axes of w, or None"
        raise ValueError(f"{name}: axis is {axis}, want {want}")
    axis %= len(shape)
    length = shape[axis]
    size = length if group is None else group
    if group is not None and (group < 1 or length % group):
        raise ValueError(f"{name}: group is {group}, want a divisor of {length}, the size of axis {axis} of w")
    parts[axis] = [length // size if size else 1, size]
    return parts, (axis + 1,)


def limits(dtype) -> tuple[float, float]:
    """The least and the largest finite number of a dtype of at most 8 bits."""
    info: Any = jnp.finfo(dtype) if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype)
    return float(info.min), float(info.max)


def positive(scale: jax.Array, largest: jax.Array) -> jax.Array:
    """One where the largest number of a block is zero, and else no subnormal number: XLA takes that for zero on CPUs."""
    return jnp.where(largest > 0, jnp.maximum(scale, jnp.finfo(scale.dtype).tiny), jnp.ones((), scale.dtype))


def _rounded(x: jax.Array, dtype, low: float) -> jax.Array:
    """The nearest numbers of a dtype: saturated, ties to even.  They are constants."""
    x = jnp.clip(lax.stop_gradient(x), low, limits(dtype)[1])
    return (x if jnp.issubdtype(dtype, jnp.floating) else jnp.round(x)).astype(dtype)


def dtype_of(name: str, bits: int, dtype) -> np.dtype:
    """Return the dtype that `quantize` makes."""
    if dtype is None:
        if not isinstance(bits, int) or bits not in _DTYPES:
            raise ValueError(f"{name}: bits is {format_value(bits)}, want one of {sorted(_DTYPES)}")
        return jnp.dtype(_DTYPES[bits])
    dtype = dtype_named(name, "dtype", dtype)
    if dtype.itemsize > 1 or not jnp.issubdtype(dtype, jnp.number) or dtype == jnp.float8_e8m0fnu:
        raise TypeError(f"{name}: dtype is {dtype}, want one of at most 8 bits that has a zero")
    return dtype


def matmul(name: str, x: Any, w: Any, *, precision, preferred_element_type, out_sharding, implementation) -> jax.Array:
    """`w` has the attributes of `Quantized`."""
    missing = [field for field in ("qvalue", "scale") if not hasattr(w, field)]
    if missing:
        what = f"{name}: w is {format_value(w)}"
        raise TypeError(
            f"{what}, want a Quantized, such as jaxext.quantization.quantize(w), or an object with its attributes, such as {missing[0]}"
        )
    arrays = {"x": x, "w.qvalue": w.qvalue, "w.scale": w.scale}
    if (zero := getattr(w, "zero_point", None)) is not None:
        arrays["w.zero_point"] = zero
    x, q, scale, *zeros = checked(name, arrays).values()
    if x.ndim < 1 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name}: x is {x.dtype}{list(x.shape)}, want floating-point numbers of the shape (..., K)")
    if q.ndim != 2 or q.shape[0] != x.shape[-1]:
        raise TypeError(f"{name}: w.qvalue has the shape {q.shape}, want ({x.shape[-1]}, N), since x has the shape {x.shape}")
    scaled.refuse_dtype(name, "w.qvalue", q.dtype, integers=True)
    scaled.refuse_dtype(name, "w.scale", scale.dtype)
    _refuse_scale(name, "w.", scale.shape, q)
    if zeros:
        _refuse_zeros(name, zeros[0], scale.shape, q.dtype)
    dtype = scaled.dtype_of_result(name, x.dtype if preferred_element_type is None else preferred_element_type)
    static = dict(precision=precision, preferred_element_type=dtype, out_sharding=out_sharding)
    return compiled(_matmul, (name,), scaled.FAMILY, implementation, (x, q, scale, *zeros), static, name=name)


def _refuse_scale(name: str, where: str, scale: tuple[int, ...], q: jax.Array) -> None:
    bytes_of_two = q.ndim and q.dtype in (jnp.int8, jnp.uint8)
    if bytes_of_two and not blocks_fit(scale, q.shape) and blocks_fit(scale, (*q.shape[:-1], 2 * q.shape[-1])):
        got = f"{where}qvalue is {q.dtype} of the shape {q.shape}, and {where}scale has the shape {scale}"
        raise TypeError(f"{name}: {got}, as if each byte held two int4: want unpack_int4({where}qvalue)")
    scaled.refuse_blocks(name, f"{where}scale", scale, f"{where}qvalue", q.shape)


def _refuse_zeros(name: str, zero: jax.Array, wanted: tuple[int, ...], dtype) -> None:
    if zero.shape != wanted:
        raise TypeError(f"{name}: w.zero_point has the shape {zero.shape}, want {wanted}, the shape of w.scale")
    if not (jnp.issubdtype(zero.dtype, jnp.integer) or jnp.issubdtype(zero.dtype, jnp.floating)):
        raise TypeError(f"{name}: w.zero_point is {zero.dtype}, want real numbers")
    if jnp.issubdtype(dtype, jnp.integer) and not isinstance(zero, Tracer) and zero.dtype != dtype and zero.size:
        (low, high), values = limits(dtype), np.asarray(zero, np.float64)
        if not (low <= values.min() and values.max() <= high):
            got = f"{values.min():g} to {values.max():g}"
            raise ValueError(f"{name}: w.zero_point has values from {got}, want {low:g} to {high:g}, the range of {dtype}")


def _matmul(name, x, q, scale, *zeros, precision, preferred_element_type, out_sharding, implementation) -> jax.Array:
    dtype, scale = preferred_element_type, scaled.constant_e8m0(name, "w.scale", scale)
    q, *zeros = map(lax.stop_gradient, (q, *zeros))
    sums = summed(dtype) if zeros else dtype
    dims = (((x.ndim - 1,), (0,)), ((), ()))

    def product(names, *arrays, out_sharding):
        static = dict(precision=precision, out_sharding=out_sharding, implementation=implementation)
        return scaled.computed(name, names, dims, sums, *arrays, **static)

    y = product(("lhs", "rhs", "rhs_scale"), x, q, scale, out_sharding=out_sharding)
    if not zeros:
        return y
    scale = scale.reshape(scale.shape or (1, 1))
    per_block = divided(x, [*([n] for n in x.shape[:-1]), [scale.shape[0], x.shape[-1] // max(1, scale.shape[0])]])
    added = zeros[0].reshape(scale.shape).astype(sums) * scale.astype(sums)
    sharding = sharding_in_types(name, out_sharding, x.ndim)
    of_rows = sharding and NamedSharding(sharding.mesh, P(*sharding.spec[:-1], None))  # there are fewer columns, of blocks
    y_of_zeros = spread(product(("lhs", "rhs"), per_block.astype(sums).sum(-1), added, out_sharding=of_rows), y.shape)
    return (y - placed(y_of_zeros, sharding)).astype(dtype)


def packed(name: str, q: Any) -> jax.Array:
    """int4 (..., N) as bytes (..., N / 2), the first of two numbers in the low half."""
    (q,) = checked(name, {"q": q}).values()
    if q.dtype not in (jnp.int4, jnp.uint4):
        raise TypeError(f"{name}: q is {q.dtype}, want int4 or uint4")
    if q.ndim < 1 or q.shape[-1] % 2:
        raise ValueError(f"{name}: q has the shape {q.shape}, want an even size of the last axis")
    pairs = divided(q, [*([n] for n in q.shape[:-1]), [q.shape[-1] // 2, 2]])
    return lax.bitcast_convert_type(pairs, jnp.uint8)


def unpacked(name: str, packed: Any, dtype) -> jax.Array:
    """The inverse of `packed`."""
    (packed,) = checked(name, {"packed": packed}).values()
    if packed.dtype not in (jnp.int8, jnp.uint8) or packed.ndim < 1:
        raise TypeError(f"{name}: packed is {packed.dtype}{list(packed.shape)}, want int8 or uint8 with at least one axis")
    if (dtype := dtype_named(name, "dtype", dtype)) not in (jnp.int4, jnp.uint4):
        raise TypeError(f"{name}: dtype is {dtype}, want int4 or uint4")
    pairs = lax.bitcast_convert_type(packed, dtype)
    return joined(pairs, [*([n] for n in packed.shape[:-1]), [packed.shape[-1], 2]])
