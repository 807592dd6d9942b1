"""The `xla` implementation of ragged products: plain XLA ops, in the way that is expected to be fastest."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from jaxext import _compat
from jaxext.core.call import Call, symbolic_size
from jaxext.ops.matmul.xla import XlaDefinition
from jaxext.ops.ragged import xla_at_once as ragged_at_once
from jaxext.ops.ragged import xla_loops as ragged_loops


@dataclasses.dataclass(frozen=True)
class Ways:
    """The way in which a ragged product is computed.

    Attributes:
      algorithm: "groups", a loop over the groups and one over the blocks of each; "listed", a loop over the blocks of all groups;
        "gathered", which takes a filter for each row, where a sum has one term; "dense", which multiplies all rows by each filter and
        selects; or "expanded", in which the sum runs over the groups too, as in lax.
      rows: of a block.
      more: of a block that a group fills, for "groups"; 0 if there are none.
    """

    algorithm: str
    rows: int = 0
    more: int = 0


class XlaRagged(XlaDefinition):
    """The definition of ragged products.  It supports every call."""

    def candidates(self, call: Call) -> Sequence[Ways]:
        # XLA's partitioner would gather what a loop slices, and splits a sum well.
        if symbolic_size(call) or call.partitioner is _compat.Partitioner.XLA:
            return (Ways("expanded"),)
        if call.empty:
            return (Ways("dense"),)
        if call.open != "w" and call.sizes["K" if call.open == "y" else "N"] == 1:
            return (Ways("gathered"),)
        if call.platform == "cpu":
            # Smaller blocks multiply more slowly, and larger ones have more rows that do not count: in a sum those cost less.
            of_group = _power_of_two(call.sizes["M"] / call.sizes["G"])
            rows = min(max(of_group, 8) if call.open == "w" else max(of_group // 2, 4), 32, call.sizes["M"])
            more = 256 if call.open == "w" and call.sizes["M"] >= 256 else 128  # a sum is read and written for each block
            blocks = Ways("groups", rows, more if call.sizes["M"] >= more else 0)
        else:
            rows = min(max(_power_of_two(call.sizes["M"] / call.sizes["G"]), 64), 512, call.sizes["M"])
            blocks = Ways("listed", rows)
        return (Ways("dense"), blocks) if _small(call) else (blocks,)

    def describe(self, call: Call, config: Ways) -> str:
        return config.algorithm + "".join(f" {rows}" for rows in (config.more, config.rows) if rows)

    def run(self, call: Call, config: Ways, operands: Mapping[str, jax.Array]) -> jax.Array:
        if call.empty:
            return jnp.zeros(call.shape, call.dtype)
        ways = {
            "groups": functools.partial(
                ragged_loops.sum_by_group if call.open == "w" else ragged_loops.rows_by_group, rows=config.rows, more=config.more
            ),
            "listed": functools.partial(ragged_loops.listed_sum if call.open == "w" else ragged_loops.listed_rows, rows=config.rows),
            "gathered": ragged_at_once.gathered,
            "dense": ragged_at_once.dense,
            "expanded": ragged_at_once.expanded,
        }
        y = ways[config.algorithm](call, call.flatten(operands))
        return y.reshape(call.shape)


def _power_of_two(size: float) -> int:
    """The largest that is not more, at least 1."""
    return 1 << int(math.log2(max(size, 1)))


def _small(call: Call) -> bool:
    """Return whether the dense way is as fast: one group, a block of all rows, or a loop that takes longer than what it computes."""
    groups, rows, columns, summed = (call.sizes[label] for label in "GMNK")
    halves = call.dtype.itemsize == 2  # of which a loop converts each slice to float32
    if call.open == "w":
        return groups == 1 or rows * groups <= 256 and min(columns, summed) > 1  # the dense way writes no filter twice
    products = math.prod(call.sizes[label] for label in "BPRMGNK")
    return groups == 1 or products <= 1 << 17 or halves and max(rows, groups) <= 16
