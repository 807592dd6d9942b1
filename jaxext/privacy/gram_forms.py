"""Gram forms: the squared norm of a parameter's gradient in an operation with the example, without the gradient.

A parameter that is multiplied by the example, in a matrix product or a convolution:

    y = Σ x w has the gradient g = xᵀ ȳ,   |g|² = Σ_kn (Σ_t x[t,k] ȳ[t,n])² = Σ_tu (Σ_k x[t,k] x[u,k]) (Σ_n ȳ[t,n] ȳ[u,n])

The right side is the cheaper one if there are few rows t.  The rows of a convolution are the positions of its output, and hold what the
filter sees there.

A table in which the example looks up rows, such as an embedding: its gradient has in row v the sum of the cotangents ȳ_t of those results t
that looked up v = i_t, so its squared norm is

    Σ_v |Σ_t [i_t = v] ȳ_t|²  =  Σ_tu [i_t = i_u] ȳ_t ȳ_u
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from jaxext.core import partition
from jaxext.core.form import Form, owner
from jaxext.core.window import Window


def squared(x: jax.Array, dtype: Any) -> jax.Array:
    """The sum of squares, in a wide dtype."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return squared(x.real, dtype) + squared(x.imag, dtype)
    return jnp.sum(x.astype(dtype) ** 2)


@dataclasses.dataclass(frozen=True)
class Gram:
    """The Gram form of one example.

    Attributes:
      rows: how many.
      temporary: how many numbers it makes.
      square: the squared norm of the gradient, from the other operand and the cotangent.
    """

    rows: int
    temporary: int
    square: Callable[[jax.Array, jax.Array], jax.Array]


def is_product(eqn: Any) -> bool:
    return eqn is not None and isinstance(owner.get(eqn.primitive, (None, ""))[0], Form)


def gram_of(eqn: Any, derived: Sequence[bool], arrays: Sequence[Any], dtype: Any) -> Gram | None:
    """The Gram form of a product of real numbers or of a lookup.  None if it has none, or the gradient is cheaper, or zeros."""
    if is_product(eqn):
        return _product(eqn, derived, arrays, dtype)
    return _lookup(eqn, dtype) if eqn is not None and eqn.primitive.name == "gather" and tuple(derived) == (True, False) else None


def _product(eqn: Any, derived: Sequence[bool], arrays: Sequence[Any], dtype: Any) -> Gram | None:
    form, open = owner[eqn.primitive]
    if form.companions or len(arrays) != 2 or not all(jnp.issubdtype(x.dtype, jnp.floating) for x in arrays):
        return None
    other, slot = form.factors(open) if derived[1] else form.factors(open)[::-1]
    ranks, window, at = eqn.params["static"].ranks, eqn.params["static"].window, 0
    axes = {name: form.axes(name, ranks) for name in (slot, other, open)}
    sizes = form.sizes(open, [atom.aval.shape for atom in eqn.invars], ranks, window)
    if window is not None:
        if slot != "w":
            return None
        inputs, filters, outputs = (form.window[i * window.rank : (i + 1) * window.rank] for i in range(3))
        at = axes["x"].index(inputs[0]) if inputs else 0
        axes["x"] = (*axes["x"][:at], *outputs, *filters, *axes["x"][at + len(inputs) :])

    def common(*names: str) -> list[str]:
        """The axes that these arrays have, and no other."""
        return [axis for axis in axes[names[0]] if all((axis in axes[name]) == (name in names) for name in axes)]

    shared, row = common(slot, other, open), common(other, open)
    E, T, K, N = (math.prod(sizes[axis] for axis in some) for some in (shared, row, common(slot, other), common(slot, open)))
    if T == 0 or T * (K + N) > K * N:
        return None
    unfolds = int(other != "x")  # which array is the input of the convolution: the other factor or the cotangent

    def square(*arrays: jax.Array) -> jax.Array:
        both = list(zip(arrays, (axes[other], axes[open]), strict=True))
        if window is not None:
            both[unfolds] = unfolded(arrays[unfolds], window, at), both[unfolds][1]
        einsum: Any = functools.partial(jnp.einsum, precision="highest", preferred_element_type=dtype)
        if T == 1:
            kept = shared
            found = (einsum(x.astype(dtype) ** 2, names, kept) for x, names in both)
        else:
            again = {axis: f"{axis}'" for axis in row}
            kept = [*shared, *row, *again.values()]
            found = (
                einsum(x, names, x, [again.get(axis, axis) for axis in names], kept, out_sharding=split_as(x, names, kept))
                for x, names in both
            )
        first, second = partition.aligned((kept, kept), list(found))
        return jnp.sum(first * second)

    return Gram(T, E * ((2 * T * T if T > 1 else 0) + (0 if window is None else T * (N if unfolds else K))), square)


def split_as(x: jax.Array, axes: Sequence[str], others: Sequence[str]) -> NamedSharding | None:
    """Return the sharding, on an explicit mesh, of an array with the axes `others`, each split as in x, which has the axes `axes`."""
    sharding = partition.explicit(jax.typeof(x))
    return None if sharding is None else partition.renamed(sharding, axes, others)


def unfolded(x: jax.Array, window: Window, first: int) -> jax.Array:
    """Return what the filter sees at each output: the window's axes of x, from `first` on, become those of the output and then of the
    filter."""
    padding = [(0, 0, 0)] * x.ndim
    for i, (low, high) in enumerate(window.padding):
        padding[first + i] = (low, high, window.input_dilation[i] - 1)
    x = lax.pad(x, jnp.zeros((), x.dtype), padding)
    for i in range(window.rank):
        axis, size = first + i, window.output[i]
        taps = [
            lax.slice_in_dim(x, start, start + (size - 1) * window.stride[i] + 1, window.stride[i], axis)
            for start in (r * window.filter_dilation[i] for r in range(window.filter[i]))
        ]
        x = jnp.stack(taps, axis=first + window.rank + i)
    return x


_MODES = (lax.GatherScatterMode.CLIP, lax.GatherScatterMode.FILL_OR_DROP, lax.GatherScatterMode.PROMISE_IN_BOUNDS)


def _lookup(eqn: Any, dtype: Any) -> Gram | None:
    """A gather of whole rows of a parameter."""
    (table, *row), indices, result = eqn.invars[0].aval.shape, eqn.invars[1].aval, eqn.outvars[0].aval
    numbers, mode, rows = eqn.params["dimension_numbers"], eqn.params["mode"], indices.size
    offsets = tuple(range(result.ndim - len(row), result.ndim))
    is_of_rows = tuple(eqn.params["slice_sizes"]) == (1, *row) and tuple(numbers.offset_dims) == offsets and indices.shape[-1] == 1
    is_first = numbers.collapsed_slice_dims == numbers.start_index_map == (0,) and not numbers.operand_batching_dims
    if not (is_of_rows and is_first and mode in _MODES and jnp.issubdtype(result.dtype, jnp.floating) and 1 <= rows and rows**2 <= table):
        return None

    def square(indices: jax.Array, cotangent: jax.Array) -> jax.Array:
        indices, y = indices.reshape(-1), cotangent.reshape(rows, -1)
        if mode == lax.GatherScatterMode.CLIP:
            indices = jnp.clip(indices, 0, table - 1)
        inside = (indices >= 0) & (indices < table)  # jax's gradient leaves out the others, in every mode
        same = (indices[:, None] == indices[None]) & inside[:, None]
        static: Any = dict(precision="highest", preferred_element_type=dtype, out_sharding=split_as(y, "td", "tu"))
        products = jnp.einsum("td,ud->tu", y, y, **static)
        return jnp.sum(jnp.where(same, products, 0))

    return Gram(rows, 2 * rows**2, square)
