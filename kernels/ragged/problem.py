"""The problem that kernels of ragged products solve, one role: rows in groups, and a matrix for each group.

    role  result              product                        row  column  contracted
    nn    y[B,P,R,M,N]        x[M,K] w[g,K,N] of row m's g   m    n       k
    nt    x[B,P,R,M,K]        y[M,N] w[g,K,N]ᵀ               m    k       n
    tn    w[B,G,K,N]          xᵀ y over the rows of g        k    n       p, r, m in g

A group's rows are those from begin[B,P,G] up to end[B,P,G].  The first group may begin anywhere, each other one that has rows at the end of
the group before it.  A row outside of all ranges is never read, and its result is zero.

In nn and nt each program computes a *visit*: a tile of rows, for one of the groups that have rows in it.  There are at most
⌈M / tile⌉ + min(G, M) - 1 visits for any ranges, so the host knows the grid.  `visits` lists them, in small kernels of XLA before, or each
program finds its own (`Config.finds_visit`).  In tn the programs of a group go through its rows, always in the same order; or, with
`Config.chunk`, programs compute the partial sum of each visit's rows, partial[B,P,visit,K,N], and others add those of a group up, by p
and then by visit.  Groups without rows have no visits, and their sums are zeros.

Of a *gathered* product x has S rows, of which row[B,P,M] names the one at each place; the number of no row stands for zeros.  In nn and tn
a kernel loads rows from where they are.
"""

import dataclasses
from typing import Any, ClassVar

from ..launch import cdiv
from ..matmul.problem import MatmulProblem
from ..matmul.problem import Problem as MatmulTiles

SLOTS = {"nn": ("x", "w"), "nt": ("y", "w"), "tn": ("x", "y")}  # left, right
NUMBERS_OF_VISIT = 5  # group; the rows that are multiplied, first and last; those that are written


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedProblem(MatmulProblem):
    """The sizes of a product with one of the matrices, and the number of groups."""

    P: int
    R: int
    G: int
    ragged: ClassVar[bool] = True
    gathered: ClassVar[bool] = False

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Slot -> shape."""
        rows = (self.B, self.P, self.R, self.M)
        ranges = (self.B, self.P, self.G)
        columns = (2, self.N) if self.gated else (self.N,)
        return {"x": (*rows, self.K), "w": (self.B, self.G, self.K, *columns), "y": (*rows, self.N), "begin": ranges, "end": ranges}

    @property
    def batches(self) -> int:
        """The number of matrices of rows, or of groups."""
        return self.B * (self.G if self.role == "tn" else self.P * self.R)

    def tiles_down(self, tile_m: int) -> int:
        """The most visits of one matrix, or in tn the tiles of its rows."""
        return cdiv(self.rows, tile_m) if self.role == "tn" else most_visits(self.M, self.G, tile_m)

    @property
    def expected_depth(self) -> int:
        """The depth of a sum if all groups have the same size."""
        return self.P * self.R * cdiv(self.M, max(1, self.G)) if self.role == "tn" else self.depth

    def expected_tiles_down(self, tile_m: int) -> int:
        """The number of visits if half of the groups end within a tile of rows."""
        return cdiv(self.rows, tile_m) + (0 if self.role == "tn" else min(self.G, self.M) // 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem(RaggedProblem, MatmulTiles):
    """A ragged product, with the facts that tiles depend on besides its sizes.  S: the rows of x of a gathered one, or None."""

    S: int | None = None

    @property
    def gathered(self) -> bool:  # type: ignore[override]
        return self.S is not None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Slot -> shape."""
        if self.S is None:
            return super().shapes
        return super().shapes | {"x": (self.B, self.P, self.R, self.S, self.K), "row": (self.B, self.P, self.M)}

    @property
    def index(self) -> str:
        return "int64" if self.S is not None and self.S * self.K >= 2**31 else super().index


def most_visits(rows: int, groups: int, tile: int) -> int:
    """The most visits of one matrix: one of each tile, and one more where a group that has rows begins within a tile."""
    return cdiv(rows, tile) + max(1, min(groups, rows)) - 1


def visits(numpy: Any, begin: Any, end: Any, rows: int, tile: int) -> Any:
    """The visits, int32 [B,P,visits,5], from ranges [B,P,G], by numpy or a module like it.  `NUMBERS_OF_VISIT` names the five numbers.

    A row is written by the visit of its group; a row without a group, by the last visit of its tile, or by the first one.  A tile
    without a group has a visit that writes zeros.  Surplus visits write nothing.  Each names a group that there is, since its bias is read.
    """
    groups = begin.shape[-1]
    count = most_visits(rows, groups, tile)
    exists, number = end > begin, numpy.arange(groups, dtype=begin.dtype)
    before = numpy.where(begin > begin[..., :1], begin, 0)  # the end of the group before it, or the first row
    first_tile, last_tile = begin // tile, (end - 1) // tile
    shares = exists & (before > first_tile * tile)  # its first tile with the group before it
    more = numpy.cumsum(shares, -1).astype(begin.dtype)  # visits than tiles, up to this group
    visit = numpy.arange(count, dtype=begin.dtype)[None, None]
    here = exists[..., None, :] & ((first_tile + more)[..., None, :] <= visit[..., None])  # [B,P,visits,G]
    group = numpy.max(numpy.where(here, number[None, None, None], -1), -1)

    def gathered(values, otherwise=0):
        found = numpy.take_along_axis(values, numpy.maximum(group, 0), -1)
        return numpy.where(group >= 0, found, otherwise)

    at = numpy.minimum(visit - gathered(more), cdiv(rows, tile))  # the tile; the product of a surplus one may not fit 32 bits
    inside, start, stop = at * tile < rows, at * tile, numpy.minimum((at + 1) * tile, rows)
    multiplies = inside & (at <= gathered(last_tile, -1))
    first = numpy.where(multiplies, numpy.maximum(gathered(begin), start), start)
    last = numpy.where(multiplies, numpy.minimum(gathered(end), stop), start)
    shared = multiplies & gathered(shares, False) & (at == gathered(first_tile))
    following = numpy.concatenate([at[..., 1:], numpy.full_like(at[..., :1], count)], -1)
    low = numpy.where(shared, gathered(before), start)
    high = numpy.where(following == at, last, stop)
    low, high = numpy.where(inside, low, 0), numpy.where(inside, high, 0)
    return numpy.stack([numpy.maximum(group, 0), first, last, low, high], -1).astype("int32")
