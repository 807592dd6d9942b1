"""Ragged products of gathered rows: labels, roles, implementations.

    y[b,p,r,m,n] = Σ_g,k [begin[b,p,g] <= m < end[b,p,g]] x[b,p,r,row[b,p,m],k] w[b,g,k,n]

A ragged product (`ops/ragged`) whose rows M are those of x at the places that `row` says, of S.  A number of no row, below 0 or S and more,
stands for zeros.  `place[b,p,s,j]` says the same the other way round: the places of each row, and for none another number.  So with x open
a row is a sum over its places, and nothing is scattered.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxext.core import epilogue
from jaxext.core.call import Call
from jaxext.core.family import Family, declare
from jaxext.core.form import Companion, define
from jaxext.core.labelled import Labelled
from jaxext.core.operation import Operation
from jaxext.ops.ragged import form as ragged
from jaxext.ops.ragged.form import GROUPS, RAGGED, RANGES, TiedForm
from jaxext.ops.ragged_gather.dispatched import Dispatched
from jaxext.ops.ragged_gather.triton import TritonRaggedGather


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class GatheredForm(TiedForm):
    """A device that has a part of the places may need any row: the rows S of x are not split, nor the list J of the places of each."""

    @property
    def chosen(self) -> tuple[str, ...]:
        return "G", "S", "J"  # each place has one group and one row

    @property
    def unmapped(self) -> tuple[str, ...]:
        return *self.tied, "S", "J"

    def unsplit_axes(self, ranks):
        return *self.window, "S0", "J0"


def cut(ties: dict[str, jax.Array], label: str, first: jax.Array, size: int) -> dict[str, jax.Array]:
    """The ranges of `size` groups or places from `first` on, and the rows of these places, and the places as these are counted."""
    ranges = ragged.cut({name: ties[name] for name in RANGES}, label, first, size)
    if label == "G":
        return ties | ranges
    return ranges | {"row": lax.dynamic_slice_in_dim(ties["row"], first, size, -1), "place": ties["place"] - first}


def examples(call: Call) -> dict[str, jax.Array]:
    """Ranges as of a ragged product, and each row at the next places in turn."""
    rows, places = call.sizes["S"], call.sizes["M"]
    row = jnp.arange(places, dtype=jnp.int32) % rows
    place = jnp.arange(rows, dtype=jnp.int32)[:, None] + rows * jnp.arange(call.sizes["J"], dtype=jnp.int32)[None]
    indices = {"row": row, "place": jnp.minimum(place, places)}
    return ragged.examples(call) | {name: jnp.broadcast_to(of, call.shape_of(name)) for name, of in indices.items()}


def lax_call(form: Labelled, open: str, ranks: Sequence[int]):
    """The call of lax that computes it from rows by group."""
    return ragged.lax_call(RAGGED, open, RAGGED.pack(form.unpack(ranks)))


def _family(name: str) -> Family:
    declared = Family(name, lax_primitive=ragged.FAMILY.lax_primitive, names=name, lax_call=lax_call)
    return declare(declared, TritonRaggedGather(), Dispatched())


RAGGED_GATHER = define(
    GatheredForm(
        name="ragged_gather",
        slots={**RAGGED.slots, "x": ("B", "P", "R", "S", "K")},
        roles=RAGGED.roles,
        window=(),
        family=_family("ragged_gather"),
        companions=RANGES | {"row": Companion(("B", "P", "M")), "place": Companion(("B", "P", "S", "J"))},
        tied=RAGGED.tied,
        ties=(*RANGES, "row", "place"),
        cut=cut,
        examples=examples,
    )
)

_LINEAR, _GATED = _family("ragged_gather_linear"), _family("ragged_gather_gated_linear_unit")


@functools.cache
def linear() -> Operation:
    """y[b,p,r,m,n] = activation(Σ_k x[b,p,r,row[b,p,m],k] w[b,g,k,n]), where g is the group of m."""
    return epilogue.operation("ragged_gather_linear", _LINEAR, RAGGED_GATHER, "y", groups=GROUPS)


@functools.cache
def gated_linear_unit() -> Operation:
    """y[b,p,r,m,n] = activation(Σ_k x[b,p,r,row[b,p,m],k] w[b,g,k,0,n]) Σ_k x[b,p,r,row[b,p,m],k] w[b,g,k,1,n]."""
    return epilogue.operation("ragged_gather_gated_linear_unit", _GATED, RAGGED_GATHER, "y", gated=True, groups=GROUPS)
