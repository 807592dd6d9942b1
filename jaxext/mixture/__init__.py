"""The public layer of a mixture of experts: rows are sorted by expert, multiplied by ragged products, and added up where they came from.

    choices (row, j)  ->  places by expert  ->  gate and up  ->  down, times the weight of the choice  ->  the sum over j

The first and the last arrow are gathers, and so are their transposes (`routed_rows`).  If the experts are split over devices, rows go to
their experts between them (`jaxext.parallel.expert_parallel`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import min_dim
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from jaxext._messages import format_value
from jaxext.core import activation as _activation
from jaxext.core import partition
from jaxext.core.checks import checked, given, refuse_kinds, refuse_shape
from jaxext.core.epilogue import accumulated, applied
from jaxext.lax.dispatch import compiled, named
from jaxext.mixture.routed_rows import combine, dispatch
from jaxext.ops.ragged import form, ragged_gated_linear_unit, ragged_linear
from jaxext.ops.ragged_gather import ragged_gather_linear
from jaxext.ops.ragged_scaled import ragged_scaled_dot
from jaxext.ops.scaled.blocks import spread
from jaxext.ops.scaled.form import refuse_blocks, refuse_dtype

__all__ = ["moe"]

# The rows go in halves if each has as many for an expert as fill a kernel's tile.  Fewer would read every matrix twice, for products that
# take as long.
MIN_ROWS_PER_HALF = 128


@overload
def moe(
    x: ArrayLike,
    indices: ArrayLike,
    weights: ArrayLike,
    w_gate: Any,
    w_up: Any,
    w_down: Any,
    *,
    activation: str | Callable[[jax.Array], jax.Array] | None = "silu",
    capacity: int | None = None,
    axis_name: Hashable | None = None,
    return_dropped: Literal[False] = False,
    precision=None,
    implementation: str | None = None,
) -> jax.Array: ...


@overload
def moe(
    x: ArrayLike,
    indices: ArrayLike,
    weights: ArrayLike,
    w_gate: Any,
    w_up: Any,
    w_down: Any,
    *,
    activation: str | Callable[[jax.Array], jax.Array] | None = "silu",
    capacity: int | None = None,
    axis_name: Hashable | None = None,
    return_dropped: Literal[True],
    precision=None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]: ...


def moe(
    x, indices, weights, w_gate, w_up, w_down, *, activation: Any = "silu", capacity=None, axis_name=None, return_dropped=False,
    precision=None, implementation=None,
) -> Any:  # fmt: skip
    """Mixture of experts: y = Σ_j weights[j] (activation(x w_gate[e]) (x w_up[e])) w_down[e], e = indices[j], for each row x.

    The router is yours: `weights, indices = jax.lax.top_k(scores, k)`.  Each row is multiplied by the matrices of its own experts only.

    An index outside 0 to E - 1 chooses no expert and contributes zero.  Its weight is not read, and its row only if another of the row's
    indices chooses an expert.  So a NaN there reaches no other result and no gradient.

    Args:
      x: shape (..., D), floating-point.
      indices: shape (..., k), integers: the experts of each row.
      weights: shape (..., k): their weights.
      w_gate: shape (E, D, F).  None: w_up includes the gate, or there is none, and an expert is activation(x w_up[e]) w_down[e].
      w_up: shape (E, D, F), or (E, D, 2, F) with the gate first, as in `ragged_gated_linear_unit`, whose kernel computes both at once.
      w_down: shape (E, F, D).  Each of the three matrices may be a `Quantized` with three axes and no zero point, such as
        `quantization.quantize(w_down)`.  `ragged_scaled_dot` then multiplies by it.
      activation: as in `linear`.
      capacity: the largest number of choices that an expert takes: the first ones, in the order of the rows, then of j.  The others
        contribute zero.  None drops nothing.
      axis_name: inside `jax.shard_map` or `jax.pmap`, the axis over which the experts are split, or a tuple of axes in mesh order.  Device
        i of n has the matrices of experts i E/n up to (i + 1) E/n, and `indices` count all E experts.  Each row is sent to the devices of
        its experts once, and back once.  Many rows are sent in two halves, so that one half is computed while the other is sent.
        `capacity` counts the choices of each device for each expert, so an expert takes up to n times as many.
      return_dropped: whether to return (y, dropped).  `dropped` has the shape of `indices`, and is True for choices that
        contribute nothing, because they exceed the capacity or choose no expert.
      precision: as in `jax.lax.dot_general`.
      implementation: as in `ragged_linear`.

    Returns:
      the shape of x, with the promoted dtype of x and the matrices that are not quantised, or bfloat16 if that has 8 bits and a matrix is
      quantised.  For 16-bit dtypes the sum over j is in float32.

    Examples:
      >>> x, w = jnp.ones((3, 2)), jnp.stack([jnp.eye(2), 2 * jnp.eye(2)])
      >>> indices, weights = jnp.array([[0, 1], [1, 0], [0, 5]]), jnp.full((3, 2), 0.5)
      >>> moe(x, indices, weights, None, w, w, activation="relu").tolist()
      [[2.5, 2.5], [2.5, 2.5], [0.5, 0.5]]
      >>> moe(x, indices, weights, None, w, w, activation="relu", capacity=1, return_dropped=True)[1].tolist()
      [[False, False], [True, True], [True, True]]

    Raises:
      TypeError: an argument has the wrong type, shape or dtype.
      ValueError: `activation` or `implementation` is unknown; the capacity is negative; `axis_name` lists axes in another order than the
        mesh.
      NameError: no `shard_map` or `pmap` around the call binds the axis.
      NotImplementedError: `implementation` does not support the call.
    """
    arrays = checked("moe", {"x": x, "indices": indices, "weights": weights})
    for argument, w in (given(w_gate=w_gate) | {"w_up": w_up, "w_down": w_down}).items():
        arrays |= checked("moe", _parts(argument, w))
    _refuse(arrays, capacity)
    name, function = _activation.named("moe", activation)
    n = 1
    if axis_name is not None:
        from jaxext.parallel.axes import devices_along  # the package of several devices is loaded on first use

        n = devices_along(axis_name, "moe: axis_name")
    most = None if capacity is None else min(int(capacity), np.iinfo(np.int32).max)
    key, static = (tuple(arrays), most, axis_name, n), dict(precision=precision)
    if function is None:
        results: Any = compiled(_sharded_layer, (*key, name), form.FAMILY, implementation, tuple(arrays.values()), static, name="moe")
    else:  # it may close over traced values
        resolved = named(implementation, "moe", form.FAMILY)
        results = _sharded_layer(*key, function, *arrays.values(), **static, implementation=resolved)
    return results if return_dropped else results[0]


def _parts(argument: str, w: Any) -> dict[str, Any]:
    """A matrix, or the numbers and the scales of a quantised one, by name."""
    if not (hasattr(w, "qvalue") and hasattr(w, "scale")):
        return {argument: w}
    if getattr(w, "zero_point", None) is not None:
        raise TypeError(f"moe: {argument} has a zero_point, want None: numbers quantised with symmetric=True")
    return {argument: w.qvalue, _scale_of(argument): w.scale}


def _scale_of(argument: str) -> str:
    return f"{argument}.scale"


def _refuse(arrays: Mapping[str, jax.Array], capacity: Any) -> None:
    """Raise for arguments that do not fit each other."""
    x, indices, up = arrays["x"], arrays["indices"], arrays["w_up"]
    others = {"indices", "weights", *(_scale_of(argument) for argument in arrays)}
    for argument, of in arrays.items():
        if (scale := _scale_of(argument)) in arrays:
            refuse_dtype("moe", f"{argument}.qvalue", of.dtype, integers=True)
            refuse_blocks("moe", scale, arrays[scale].shape, f"{argument}.qvalue", of.shape)
        elif argument not in ("indices", "weights") and not jnp.issubdtype(of.dtype, jnp.floating):
            hint = ", or a Quantized of them" if argument != "x" else ""
            raise TypeError(f"moe: {argument} is {of.dtype}, want floating-point numbers{hint}")
        elif argument not in (*others, "x") and of.dtype != x.dtype and 1 in (of.dtype.itemsize, x.dtype.itemsize):
            raise TypeError(
                f"moe: {argument} is {of.dtype} and x is {x.dtype}, want the same dtype, dtypes of 16 bits or more, or a Quantized with its"
                " scales"
            )
    if x.ndim == 0:
        raise TypeError("moe: x has the shape (), want (..., D)")
    if not jnp.issubdtype(indices.dtype, jnp.integer) or indices.ndim != x.ndim or indices.shape[:-1] != x.shape[:-1]:
        wanted = ", ".join([*map(str, x.shape[:-1]), "k"])
        raise TypeError(
            f"moe: indices is {indices.dtype}{list(indices.shape)}, want integers of the shape ({wanted}), since x is {x.shape}"
        )
    refuse_shape("moe", "weights", arrays["weights"], indices.shape, "an element for each of the indices")
    refuse_kinds("moe", {"weights": arrays["weights"]}, x.dtype)
    may_be_beside = "w_gate" not in arrays and _scale_of("w_up") not in arrays
    beside = may_be_beside and up.ndim == 4
    if up.ndim != (4 if beside else 3) or up.shape[1] != x.shape[-1] or beside and up.shape[2] != 2:
        width = x.shape[-1]
        wanted = f"(E, {width}, F)" + (f", or (E, {width}, 2, F): gate and up" if may_be_beside else "")
        raise TypeError(f"moe: w_up has the shape {up.shape}, want {wanted}, since x has the shape {x.shape}")
    if "w_gate" in arrays:
        refuse_shape("moe", "w_gate", arrays["w_gate"], up.shape, "that of w_up")
    down = arrays["w_down"]
    if may_be_beside and up.ndim == down.ndim == 3 and up.shape[2] == 2 * down.shape[1] > 0:
        wanted = f"(E, {up.shape[1]}, 2, F) for gate and up: w_up.reshape({up.shape[0]}, {up.shape[1]}, 2, {down.shape[1]})"
        raise TypeError(f"moe: w_up has the shape {up.shape}, w_down {down.shape}, want {wanted}")
    refuse_shape("moe", "w_down", down, (up.shape[0], up.shape[-1], x.shape[-1]), "(E, F, D)")
    if not isinstance(capacity, int | np.integer | None) or isinstance(capacity, bool):
        raise TypeError(f"moe: capacity is {format_value(capacity)}, want an int or None")
    if capacity is not None and capacity < 0:
        raise ValueError(f"moe: capacity is {capacity}, want 0 or more")


def _sharded_layer(arguments, capacity, axis_name, n, activation, *given, **static) -> tuple[jax.Array, jax.Array]:
    """The layer on any mesh.  On an explicit one XLA's partitioner places the rows: sorted by expert they have no sharding in types."""
    arrays = dict(zip(arguments, given, strict=True))
    layer = functools.partial(_layer, capacity=capacity, axis_name=axis_name, n=n, fused=dict(activation=activation, **static))
    shardings = {argument: partition.explicit(jax.typeof(of)) for argument, of in arrays.items()}
    mesh: Any = next((of.mesh for of in shardings.values() if of is not None), jax.sharding.get_abstract_mesh())
    if AxisType.Explicit not in mesh.axis_types:
        return layer(arrays)
    result_shardings = [NamedSharding(mesh, P()) if (of := shardings[argument]) is None else of for argument in ("x", "indices")]
    axes = tuple(name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind is AxisType.Explicit)
    with jax.sharding.use_abstract_mesh(mesh):
        automatic: Any = jax.sharding.auto_axes(layer, axes=axes, out_sharding=tuple(result_shardings))
        return automatic(arrays)


def _layer(arrays: dict[str, jax.Array], *, capacity, axis_name, n, fused) -> tuple[jax.Array, jax.Array]:
    """Return y, and the choices that contribute nothing."""
    x, indices, weights = arrays["x"], arrays["indices"], arrays["weights"]
    experts, k = n * arrays["w_down"].shape[0], indices.shape[-1]
    chosen = _expert_ids(indices.reshape(-1), experts)
    if capacity is not None:
        chosen = _within_capacity(chosen, experts, capacity)
    dropped = (chosen == experts).reshape(indices.shape)
    matrices = {argument: _matrix(arrays, argument) for argument in ("w_gate", "w_up", "w_down") if argument in arrays}
    dtype = jnp.result_type(x, *(w for w in matrices.values() if not isinstance(w, tuple)))
    if dtype.itemsize == 1 and any(isinstance(w, tuple) for w in matrices.values()):
        dtype = jnp.dtype(jnp.bfloat16)
    if 0 in (k, experts, capacity) or 0 in x.shape:
        return jnp.zeros(x.shape, dtype), dropped
    rows, choices = x.reshape(-1, x.shape[-1]), (chosen.reshape(-1, k), weights.reshape(-1, k))
    if axis_name is None:
        y = _routed(rows, *choices, experts, capacity, lambda rows, sizes, scale: _experts(fused, rows, matrices, sizes, scale))
    else:
        y = _exchanged(rows, *choices, matrices, experts, capacity, axis_name, n, fused)
    return y.astype(dtype).reshape(x.shape), dropped


def _expert_ids(indices: jax.Array, experts: int) -> jax.Array:
    """The expert of each choice as int32, or the number of experts for a choice of none."""
    indices = indices.astype(jnp.int32) if indices.dtype.itemsize < 4 else indices
    return jnp.where((indices >= 0) & (indices < experts), indices, experts).astype(jnp.int32)


def _sorted(chosen: jax.Array, experts: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The choices by expert, the expert of each of these, the position of each choice among them, and how many each expert has."""
    count = jnp.arange(chosen.size, dtype=jnp.int32)
    by_expert, order = lax.sort((chosen, count), num_keys=1, is_stable=True)
    position = jnp.zeros_like(chosen).at[order].set(count, unique_indices=True)
    sizes = (chosen[:, None] == jnp.arange(experts, dtype=jnp.int32)[None]).sum(0, dtype=jnp.int32)
    return order, by_expert, position, sizes


def _within_capacity(chosen: jax.Array, experts: int, capacity: int) -> jax.Array:
    """The choices of each expert up to its capacity; the others choose none."""
    *_, position, sizes = _sorted(chosen, experts)
    begin = jnp.cumsum(jnp.pad(sizes, (1, 0)), dtype=jnp.int32)  # of no expert too
    return jnp.where(position - begin[chosen] < capacity, chosen, experts)


class Gathered(NamedTuple):
    """Rows by expert: those of x at places (`routed_rows`)."""

    x: jax.Array
    row: jax.Array
    place: jax.Array

    def dispatched(self) -> jax.Array:
        return dispatch(*self)


def _routed(x, chosen, weights, experts: int, capacity: int | None, apply: Callable) -> jax.Array:
    """`apply(rows, sizes, weights)` of the rows (T, D) by expert, added up where they came from.  `chosen`, `weights`: (T, k)."""
    choices = chosen.size
    places = choices if capacity is None else min_dim(choices, experts * capacity)
    order, by_expert, position, sizes = _sorted(chosen.ravel(), experts)
    choice = jnp.where(by_expert[:places] < experts, order[:places], choices)
    place = jnp.where(chosen < experts, position.reshape(chosen.shape), places)
    row = choice // chosen.shape[1]  # choice k T, which does not exist, is of row T
    scale = dispatch(weights.ravel(), choice, place.reshape(-1, 1))
    return combine(apply(Gathered(x, row, place), sizes, scale), row, place)


def _matrix(arrays: dict[str, jax.Array], argument: str) -> Any:
    """A matrix for each expert, or the numbers and the scales of a quantised one, as a tuple."""
    w, scale = arrays[argument], arrays.get(_scale_of(argument))
    if scale is None:
        return w
    scale = scale.reshape(scale.shape or (1, 1, 1))
    return w, spread(scale, (w.shape[0], *scale.shape[1:]))


def _experts(fused: dict[str, Any], x: jax.Array | Gathered, matrices: dict[str, Any], sizes, scale=None) -> jax.Array:
    """The layer of the expert of each row."""
    plain = {name: value for name, value in fused.items() if name != "activation"}
    gate, up, down = (matrices.get(argument) for argument in ("w_gate", "w_up", "w_down"))
    if isinstance(x, Gathered) and (isinstance(gate, tuple) or isinstance(up, tuple)):
        x = x.dispatched()  # once: the gradients of both products are added up before they are gathered
    if gate is not None:
        hidden = _product(x, gate, sizes, **fused) * _product(x, up, sizes, **plain)
    else:
        hidden = _product(x, up, sizes, **fused)
    return _product(hidden, down, sizes, row_scale=scale, **plain)


def _product(x: jax.Array | Gathered, w: Any, sizes, *, activation=None, row_scale=None, **plain) -> jax.Array:
    """The rows times the matrices of their experts, with an activation or a scale of each row, which gathered rows do not have."""
    if isinstance(x, Gathered):
        return ragged_gather_linear(x.x, w, sizes, x.row, x.place, name="moe", activation=activation, **plain)
    if isinstance(w, tuple):
        values, scale = w
        return _quantized_product(x, values, scale, sizes, activation, row_scale, **plain)
    unit: Callable[..., jax.Array] = ragged_linear if w.ndim == 3 else ragged_gated_linear_unit
    return unit(x, w, sizes, activation=activation, row_scale=row_scale, **plain)


def _quantized_product(x, values, scale, sizes, activation, row_scale, **plain) -> jax.Array:
    y = ragged_scaled_dot(x, values, sizes, rhs_scale=scale, **plain)
    if activation is not None:
        y = applied("moe", _activation.FUNCTIONS.get(activation, activation), y, {})
    if row_scale is not None:
        wide = accumulated(y.dtype)
        y = (y.astype(wide) * row_scale.astype(wide)[:, None]).astype(y.dtype)
    return y


def _exchanged(x, chosen, weights, matrices, experts, capacity, axis_name, n, fused) -> jax.Array:
    """Return the result of the layer, with the experts split over n devices.

    Weights stay where they are, and multiply the rows that come back.
    """
    from jaxext.parallel.expert_parallel import expert_parallel

    most = None if capacity is None else capacity * (experts // n)  # from one device to another, of which none is dropped

    def apply(rows, sizes, scale):
        y = expert_parallel(functools.partial(_experts, fused), rows.dispatched(), matrices, sizes, axis_name=axis_name, capacity=most)
        wide = accumulated(y.dtype)
        return y.astype(wide) * scale.astype(wide)[:, None]

    parts = 2 if x.shape[0] > 1 and chosen.size * n >= 2 * MIN_ROWS_PER_HALF * experts else 1
    cuts = [x.shape[0] * i // parts for i in range(1, parts)]
    halves = zip(jnp.split(x, cuts), jnp.split(chosen, cuts), jnp.split(weights, cuts), strict=True)
    return jnp.concatenate([_routed(x, chosen, weights, experts, capacity, apply) for x, chosen, weights in halves])
