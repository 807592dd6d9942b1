"""Rows that an example looks up in a table, such as an embedding: the Gram form of their gradient's norm.

The gradient of the table has in row v the sum of the cotangents ȳ_t of those results t that looked up v = i_t.  Its squared norm is

    Σ_v |Σ_t [i_t = v] ȳ_t|²  =  Σ_tu [i_t = i_u] ȳ_t ȳ_u

which does not make a gradient with all rows of the table.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True)
class Lookup:
    """`mode` says what becomes of indices beyond the `table` rows that there are."""

    table: int
    mode: lax.GatherScatterMode
    rows: int
    dtype: Any

    @property
    def temporary(self) -> int:
        return 2 * self.rows**2

    def __call__(self, indices: jax.Array, cotangent: jax.Array) -> jax.Array:
        """The squared norm of the gradient."""
        indices, y = indices.reshape(-1), cotangent.reshape(self.rows, -1)
        if self.mode == lax.GatherScatterMode.CLIP:
            indices = jnp.clip(indices, 0, self.table - 1)
        inside = (indices >= 0) & (indices < self.table)  # jax's gradient leaves out the others, in every mode
        same = (indices[:, None] == indices[None]) & inside[:, None]
        products = jnp.einsum("td,ud->tu", y, y, precision="highest", preferred_element_type=self.dtype)
        return jnp.sum(jnp.where(same, products, 0))


MODES = (lax.GatherScatterMode.CLIP, lax.GatherScatterMode.FILL_OR_DROP, lax.GatherScatterMode.PROMISE_IN_BOUNDS)


def lookup_of(eqn: Any, made: tuple[bool, ...], dtype: Any) -> Lookup | None:
    """Return how a gather of whole rows of a parameter is computed.  None if it is none, or the gradient is cheaper."""
    if eqn is None or eqn.primitive.name != "gather" or made != (True, False):
        return None
    (table, *row), result = eqn.invars[0].aval.shape, eqn.outvars[0].aval
    numbers, indices = eqn.params["dimension_numbers"], eqn.invars[1].aval
    whole = tuple(eqn.params["slice_sizes"]) == (1, *row) and tuple(numbers.offset_dims) == tuple(
        range(result.ndim - len(row), result.ndim)
    )
    first = numbers.collapsed_slice_dims == numbers.start_index_map == (0,) and not numbers.operand_batching_dims
    rows = indices.size
    floats = jnp.issubdtype(result.dtype, jnp.floating)
    if not (whole and first and floats and indices.shape[-1] == 1 and eqn.params["mode"] in MODES and 1 <= rows and rows**2 <= table):
        return None
    return Lookup(table, eqn.params["mode"], rows, dtype)
