"""The squared norm of the gradient of a parameter that is multiplied by the example, in a matrix product or a convolution: its Gram form.

    y = Σ x w has the gradient g = xᵀ ȳ,   |g|² = Σ_kn (Σ_t x[t,k] ȳ[t,n])² = Σ_tu (Σ_k x[t,k] x[u,k]) (Σ_n ȳ[t,n] ȳ[u,n])

The right side is the cheaper one if there are few rows t.  The rows of a convolution are the positions of its output, and hold what the
filter sees there.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import string
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxext.core.form import Form, owner
from jaxext.core.window import Window


def squared(x: jax.Array, dtype: Any) -> jax.Array:
    """The sum of squares, in a wide dtype."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return squared(x.real, dtype) + squared(x.imag, dtype)
    return jnp.sum(x.astype(dtype) ** 2)


@dataclasses.dataclass(frozen=True)
class Gram:
    """The Gram form of a product, as sums over axes that have one letter each.

    Attributes:
      factor, result: the axes of the other factor, and of the result and so of its cotangent.
      shared, row: the axes of both arrays and of the gradient, and of both arrays alone.
      window: of a convolution.  The axes of its input are those of the output, and then of the filter (`unfolded`).
      unfolds: which array is its input: 0 is the factor, 1 the cotangent.
      at: its first axis of the window.
      rows: how many.
      temporary: how many numbers it makes of an example.
    """

    factor: str
    result: str
    shared: str
    row: str
    window: Window | None
    unfolds: int
    at: int
    rows: int
    temporary: int
    dtype: Any

    def __call__(self, factor: jax.Array, cotangent: jax.Array) -> jax.Array:
        """The squared norm of the gradient."""
        arrays = [factor, cotangent]
        if self.window is not None:
            arrays[self.unfolds] = unfolded(arrays[self.unfolds], self.window, self.at)
        both = list(zip(arrays, (self.factor, self.result), strict=True))
        einsum = functools.partial(jnp.einsum, precision="highest", preferred_element_type=self.dtype)
        if self.rows == 1:
            first, second = (einsum(f"{axes}->{self.shared}", x.astype(self.dtype) ** 2) for x, axes in both)
        else:
            twice = str.maketrans(self.row, self.row.upper())
            pairs = self.shared + self.row + self.row.upper()
            first, second = (einsum(f"{axes},{axes.translate(twice)}->{pairs}", x, x) for x, axes in both)
        return jnp.sum(first * second)


def is_product(eqn: Any) -> bool:
    """Return whether this is a product of jaxext."""
    return eqn is not None and isinstance(owner.get(eqn.primitive, (None, ""))[0], Form)


def gram_of(eqn: Any, made: Sequence[bool], arrays: Sequence[Any], dtype: Any) -> Gram | None:
    """The Gram form of a product of real numbers.  None if it has none, or the gradient is cheaper, or zeros."""
    if not is_product(eqn):
        return None
    form, open = owner[eqn.primitive]
    if form.companions or len(arrays) != 2:
        return None
    if not all(jnp.issubdtype(x.dtype, jnp.floating) for x in arrays):
        return None
    factors = dict(zip(form.factors(open), made, strict=True))
    (other,), (slot,) = ([name for name, made in factors.items() if made is which] for which in (False, True))
    ranks, window, at = eqn.params["static"].ranks, eqn.params["static"].window, 0
    axes = {name: form.axes(name, ranks) for name in (slot, other, open)}
    sizes = form.sizes(open, [atom.aval.shape for atom in eqn.invars], ranks, window)
    if window is not None:
        if slot != "w":
            return None
        inputs, filters, outputs = (form.window[i * window.rank : (i + 1) * window.rank] for i in range(3))
        at = axes["x"].index(inputs[0]) if inputs else 0
        axes["x"] = (*axes["x"][:at], *outputs, *filters, *axes["x"][at + len(inputs) :])
    everything = list(dict.fromkeys(axis for name in axes for axis in axes[name]))
    if len(everything) > len(string.ascii_lowercase):
        return None
    letter = dict(zip(everything, string.ascii_lowercase, strict=False))
    kinds = {"shared": (slot, other, open), "row": (other, open), "left": (slot, other), "right": (slot, open)}
    of = {kind: [axis for axis in everything if {name for name in axes if axis in axes[name]} == {*names}] for kind, names in kinds.items()}
    E, T, K, N = (math.prod(sizes[axis] for axis in some) for some in of.values())
    if T == 0 or T * (K + N) > K * N:
        return None
    unfolds = int(other != "x")
    return Gram(
        *("".join(letter[axis] for axis in axes[name]) for name in (other, open)),
        *("".join(letter[axis] for axis in of[kind]) for kind in ("shared", "row")),
        window=window,
        unfolds=unfolds,
        at=at,
        rows=T,
        temporary=E * ((2 * T * T if T > 1 else 0) + (0 if window is None else T * (N if unfolds else K))),
        dtype=dtype,
    )


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
