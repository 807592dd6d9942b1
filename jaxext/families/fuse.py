"""Arrays and keywords of the public operations with an epilogue, checked and arranged as `epilogues` takes them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer

from jaxext._told import told
from jaxext.families import activation as _activation
from jaxext.families import epilogues
from jaxext.families.conv import Arrangement, arranged
from jaxext.families.dispatch import as_dot_general_says, as_lax_says, compiled, sharding_in_types
from jaxext.families.ragged import in_groups, ranges
from jaxext.forms import partition
from jaxext.forms.operation import Operation, sharded_as


def given(**optional: Any) -> dict[str, Any]:
    """The arguments that are not None."""
    return {argument: x for argument, x in optional.items() if x is not None}


def checked(name: str, arrays: Mapping[str, Any]) -> dict[str, jax.Array]:
    """These arguments as arrays of jax.  TypeError for one that is no array."""
    for argument, x in arrays.items():
        if not isinstance(x, jax.Array | np.ndarray | np.generic) and not hasattr(x, "__jax_array__"):
            raise TypeError(f"{name}: {argument} is {told(x)}, want an array")
    return {argument: x if isinstance(x, jax.Array) else jnp.asarray(x) for argument, x in arrays.items()}


def refuse_shape(name: str, argument: str, x, wanted: tuple, labels: str) -> None:
    if x.shape != wanted:
        raise TypeError(f"{name}: {argument} has the shape {x.shape}, want {wanted}: {labels}")


def _refuse_dtypes(name: str, activation, dtype, added: Mapping[str, Any]) -> None:
    """Raise TypeError for an activation of integers, and for an operand that the result's kind of numbers cannot hold."""
    if activation is not None and not jnp.issubdtype(dtype, jnp.inexact):
        raise TypeError(f"{name}: the result is {dtype} and activation is {activation!r}, want None for a result of integers")
    refuse_kinds(name, added, dtype)


def refuse_kinds(name: str, arrays: Mapping[str, Any], dtype) -> None:
    """Raise TypeError for an array that a result of this dtype cannot hold, such as a complex one beside real numbers."""
    for argument, x in arrays.items():
        if _kind(x.dtype) > _kind(dtype):
            raise TypeError(f"{name}: {argument} is {x.dtype}, want a dtype that converts to {dtype}, the dtype of the result")


def _kind(dtype) -> int:
    return next(i for i, kind in enumerate((jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)) if jnp.issubdtype(dtype, kind))


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
        raise TypeError(f"{name}: the result is {z.dtype} and activation is {told(function)}, want None for a result of integers")
    refuse_kinds(name, added, z.dtype)

    def epilogue(z):
        wide = _cast(epilogues.accumulated(z.dtype), z)
        into, up = (lax.index_in_dim(wide, i, -2, keepdims=False) for i in (0, 1)) if gated else (wide, None)
        y = function(into)
        if not isinstance(y, jax.Array) or y.shape != into.shape or y.dtype not in (into.dtype, z.dtype):
            of_numpy = " of numpy" if isinstance(y, np.ndarray) else ""
            wanted = f"want {told(into)}: an elementwise function of jax"
            raise TypeError(f"{name}: activation is {told(function)}, which gives {told(y)}{of_numpy}, {wanted}")
        y = _cast(wide.dtype, y)
        return _cast(z.dtype, then(y if up is None else y * up, **added))

    if not isinstance(z, Tracer):
        return epilogue(z)
    return jax.checkpoint(epilogue, prevent_cse=False)(checkpoint_name(z, epilogues.PREACTIVATION))


def _cast(dtype, x: jax.Array) -> jax.Array:
    return x if x.dtype == dtype else x.astype(dtype)  # an eager call that changes nothing takes a sixth of this one


def _plus(y: jax.Array, residual: jax.Array | None = None) -> jax.Array:
    return y if residual is None else y + sharded_as(residual.astype(y.dtype), jax.typeof(y))


def _taken_out(function: Callable | None, arrays: dict[str, jax.Array], argument: str) -> dict[str, jax.Array]:
    """Remove from the operands of the product the one that follows the user's function, if there is one, and return it by name."""
    return {argument: arrays.pop(argument)} if function is not None and argument in arrays else {}


def linear(name: str, arrays: Mapping[str, Any], activation, *, gated: bool, preferred_element_type, implementation, **static) -> jax.Array:
    """`arrays`: x, w or weights, and bias and residual if they are given."""
    arrays = checked(name, arrays)
    x, w = list(arrays.values())[:2]
    second = list(arrays)[1]
    if x.ndim == 0:
        raise TypeError(f"{name}: x has the shape (), want (..., K)")
    if w.ndim != (3 if gated else 2) or w.shape[0] != x.shape[-1] or gated and w.shape[1] != 2:
        wanted = f"({x.shape[-1]}, 2, N): gate and up" if gated else f"({x.shape[-1]}, N)"
        raise TypeError(f"{name}: {second} has the shape {w.shape}, want {wanted}, since x has the shape {x.shape}")
    columns = w.shape[-1]
    if "bias" in arrays:
        refuse_shape(name, "bias", arrays["bias"], (columns,), "an element for each column of w")
    if "residual" in arrays:
        refuse_shape(name, "residual", arrays["residual"], (*x.shape[:-1], columns), "that of the result")
    keywords = dict(static, preferred_element_type=preferred_element_type)
    activation, function = _activation.named(name, activation)
    added = _taken_out(function, arrays, "residual")
    fused = gated and function is None
    operation = epilogues.gated_linear_unit() if fused else epilogues.linear("bias" in arrays, "residual" in arrays)
    key = (operation, name, activation)
    z = compiled(_linear, key, operation.family, implementation, tuple(arrays.values()), keywords, name=name)
    return applied(name, function, z, added, _plus, gated)


def _linear(operation: Operation, name, activation, *arrays, **keywords) -> jax.Array:
    operands = dict(zip(operation.inputs, arrays, strict=True))
    added = {argument: argument for argument in list(operands)[2:]}
    ndim = operands["a"].ndim
    ranks = dict(B=0, M=ndim - 1, K=1, N=1 if operation.whole else operands["b"].ndim - 1, T=1)
    return _product(operation, name, activation, operands, "ab", (((ndim - 1,), (0,)), ((), ())), ranks, added, **keywords)


def ragged(name: str, arrays: Mapping[str, Any], activation, *, gated: bool, preferred_element_type, implementation, **static) -> jax.Array:
    """`arrays`: x, w or weights, and group_sizes, and bias and row_scale if they are given."""
    arrays = checked(name, arrays)
    x, w, sizes = list(arrays.values())[:3]
    second = list(arrays)[1]
    if x.ndim != 2:
        raise TypeError(f"{name}: x has the shape {x.shape}, want (M, K)")
    if w.ndim != (4 if gated else 3) or w.shape[1] != x.shape[1] or gated and w.shape[2] != 2:
        wanted = f"(G, {x.shape[1]}, 2, N): gate and up" if gated else f"(G, {x.shape[1]}, N)"
        raise TypeError(f"{name}: {second} has the shape {w.shape}, want {wanted}, since x has the shape {x.shape}")
    if sizes.shape != w.shape[:1] or not jnp.issubdtype(sizes.dtype, jnp.integer):
        raise TypeError(f"{name}: group_sizes is {sizes.dtype}{list(sizes.shape)}, want an integer for each of the {w.shape[0]} groups")
    if "bias" in arrays:
        refuse_shape(name, "bias", arrays["bias"], (w.shape[0], w.shape[-1]), "an element for each group and column of w")
    if "row_scale" in arrays:
        refuse_shape(name, "row_scale", arrays["row_scale"], x.shape[:1], "an element for each row of x")
    keywords = dict(static, preferred_element_type=preferred_element_type)
    activation, function = _activation.named(name, activation)
    added = _taken_out(function, arrays, "row_scale")
    with_scale, fused = "row_scale" in arrays, gated and function is None
    operation = epilogues.ragged_gated_linear_unit(with_scale) if fused else epilogues.ragged_linear("bias" in arrays, with_scale)
    key = (operation, name, activation)
    z = compiled(_ragged, key, operation.family, implementation, tuple(arrays.values()), keywords, name=name)
    return applied(name, function, z, added, functools.partial(_masked_rows, sizes), gated)


def _masked_rows(sizes: jax.Array, y: jax.Array, row_scale: jax.Array | None = None) -> jax.Array:
    """y times the scale of each row, and zeros in rows of no group, where neither is read."""
    inside = in_groups(*ranges(sizes, y.shape[0], sizes.shape[0]), y.sum(1), 0)[:, None]
    y = jnp.where(inside, y, 0)
    return y if row_scale is None else jnp.where(inside, y * row_scale.astype(y.dtype)[:, None], 0)


def _ragged(operation: Operation, name, activation, x, w, sizes, *added, **keywords) -> jax.Array:
    begin, end = ranges(sizes, x.shape[0], w.shape[0])
    operands = dict(zip(operation.inputs, (x, w, *added, begin, end), strict=True))
    public = {slot: argument for slot, argument in (("bias", "bias"), ("scale", "row_scale")) if slot in operands}
    ranks = dict(B=0, P=0, R=0, M=1, K=1, G=1, N=1 if operation.whole else w.ndim - 2, T=1)
    return _product(operation, name, activation, operands, "xw", (((1,), (1,)), ((), ())), ranks, public, **keywords)


def _product(
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
) -> jax.Array:
    """`factors`: the slots of x and w, which are multiplied by lax's rules; `added`: slot -> argument, of what the epilogue adds."""
    if preferred_element_type is None:
        operands = operands | promoted(operands, factors)
    said = as_dot_general_says([operands[slot] for slot in factors], contracted, precision, preferred_element_type)
    dtype = said.pop("dtype")
    sharding = sharding_in_types(name, out_sharding, operands[factors[0]].ndim)
    if sharding is not None and ranks["N"] == 2:  # gate and up
        sharding = partition.insert(sharding, len(sharding.spec) - 1, None)
    _refuse_dtypes(name, activation, dtype, {argument: operands[slot] for slot, argument in added.items()})
    return _bound(
        operation,
        operands,
        ranks=tuple(ranks[label] for label in operation.free),
        window=None,
        dtype=dtype,
        activation=activation,
        implementation=implementation,
        out_sharding=sharding,
        **said,
    )


def promoted(operands: Mapping[str, jax.Array], slots: Iterable[str]) -> dict[str, jax.Array]:
    """These operands with the dtype that jnp gives to both."""
    dtype = jnp.result_type(*(operands[slot] for slot in slots))
    return {slot: operands[slot].astype(dtype) for slot in slots}


def _bound(operation: Operation, operands, *, dtype, activation, **params) -> jax.Array:
    assert operation.product is not None
    form, open = operation.product
    if activation is None and operation.inputs.keys() == {*form.operands(open)} and not operation.whole:  # nothing to fuse
        return form.bind(open, operands, dtype=dtype, **params)
    dtypes, static = (dtype,) * len(operation.results), epilogues.Static(activation)
    return operation.bind(operands, wanted=(open,), dtypes=dtypes, static=static, **params)[open]


def conv_bias_act(arrays: Mapping[str, Any], activation, *, implementation, **static) -> jax.Array:
    """`arrays`: lhs, rhs, and bias and residual if they are given; `static`: the keywords of lax's convolution."""
    name = "conv_bias_act"
    arrays = checked(name, arrays)
    activation, function = _activation.named(name, activation)
    added = _taken_out(function, arrays, "residual")
    z = compiled(_conv, (tuple(arrays), activation), epilogues.CONV_BIAS_ACT, implementation, tuple(arrays.values()), static, name=name)
    if added:
        refuse_shape(name, "residual", added["residual"], z.shape, "that of the result")
    return applied(name, function, z, added, _plus)


def _conv(names: tuple[str, ...], activation, *arrays, implementation, out_sharding, **static) -> jax.Array:
    name = "conv_bias_act"
    added = dict(zip(names, arrays, strict=True))
    lhs, rhs = added.pop("lhs"), added.pop("rhs")
    convolution = functools.partial(lax.conv_general_dilated, **static)
    params, result = as_lax_says(convolution, lhs, rhs)
    features = rhs.shape[params["dimension_numbers"].rhs_spec[0]]
    if "bias" in added:
        refuse_shape(name, "bias", added["bias"], (features,), "an element for each output channel")
    if "residual" in added:
        refuse_shape(name, "residual", added["residual"], result.shape, "that of the result")
    _refuse_dtypes(name, activation, result.dtype, added)
    params["out_sharding"] = sharding_in_types(name, out_sharding, lhs.ndim)
    form, operands, params, arrangement = arranged(lhs, rhs, implementation=implementation, **params)
    operation = epilogues.conv_bias_act(len(form.window) // 3, "bias" in added, "residual" in added)
    arrange = {"bias": Arrangement.bias_from_lax, "residual": Arrangement.from_lax}
    operands |= {argument: arrange[argument](arrangement, x) for argument, x in added.items()}
    y = arrangement.to_lax(_bound(operation, operands, dtype=result.dtype, activation=activation, **params))
    return y if out_sharding is None else jax.sharding.reshard(y, out_sharding)
