"""The innermost axis of a depthwise convolution, cut into strips of targets and pieces of filter rows."""

import dataclasses
import math

from ..geometry import Axis
from ..launch import cdiv

MOST_COLUMNS = 8  # taps of a filter row that a thread holds at once; longer rows are cut
FARTHEST = 1 << 30  # no target or source that a kernel considers lies as far from 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line(Axis):
    """The innermost axis, with its targets cut into strips and its taps into pieces of COLUMNS.

    The targets of a strip are `spacing` apart (within their phase), so that dilated taps meet the same sources again: the target u and
    the tap s of a piece meet the source number  hop·u + s  of a row of sources that are `tap_stride` apart.
    """

    strip: int

    @property
    def taps(self) -> int:
        """The most taps of a phase."""
        return max(1, cdiv(self.R, self.step))

    @property
    def pieces(self) -> int:
        return cdiv(self.taps, MOST_COLUMNS)

    @property
    def COLUMNS(self) -> int:
        return cdiv(self.taps, self.pieces)

    @property
    def uneven(self) -> bool:
        """Return whether the last piece of a phase is not full."""
        return self.pieces > 1 and self.R % (self.step * self.COLUMNS) != 0

    @property
    def levels(self) -> int:
        """The number of binary digits of a column's number."""
        return (self.COLUMNS - 1).bit_length()

    @property
    def tap_stride(self) -> int:
        """The axis's own; for a single tap the target's stride, which leaves no gaps in the row."""
        return super().tap_stride if self.taps > 1 else self.target_stride

    @property
    def spacing(self) -> int:
        return abs(self.tap_stride) // math.gcd(self.target_stride, self.tap_stride)

    @property
    def hop(self) -> int:
        return self.target_stride * self.spacing // self.tap_stride

    @property
    def lowest(self) -> int:
        """The smallest hop·u + s."""
        return min(0, self.hop * (self.strip - 1))

    @property
    def sources(self) -> int:
        """The number of sources of a row."""
        return abs(self.hop) * (self.strip - 1) + self.COLUMNS

    @property
    def reach(self) -> int:
        """The largest distance between source number 0 and a source of its row."""
        return self.sources * abs(self.tap_stride)

    @property
    def strips(self) -> int:
        """The number of strips of a line of targets of one phase."""
        return self.spacing * cdiv(self.targets, self.strip * self.spacing)
