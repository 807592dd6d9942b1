"""Counts of the operations by which an algorithm computes a convolution on a CPU.  `conv_rates` has the time that each of them takes.

An algorithm's `work` is None where it does not compute the convolution, or where its program would be far too large.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from jaxext.core.window import Window


@dataclasses.dataclass(frozen=True)
class Conv:
    """A convolution with y or w open, of arrays of one dtype that are not cropped: dgrad is fprop with y as the input.

    Attributes:
      open: "y" or "w".
      B, N, G, C, K: the sizes of its labels.
      window: without negative padding.
      dtype: holds both operands exactly.
      dgrad: True for the gradient of the input, whose filter is reversed first.
    """

    open: str
    B: int
    N: int
    G: int
    C: int
    K: int
    window: Window
    dtype: np.dtype
    dgrad: bool = False

    @property
    def groups(self) -> int:
        return self.B * self.G

    @property
    def taps(self) -> int:
        return math.prod(self.window.filter)

    @property
    def outputs(self) -> int:
        return math.prod(self.window.output)

    @property
    def products(self) -> int:
        """Multiply-adds, with those of zeros."""
        return self.groups * self.N * self.outputs * self.taps * self.C * self.K

    @property
    def x(self) -> int:
        """The number of elements of x, as `y` and `w` are of these."""
        return self.groups * self.N * math.prod(self.window.input) * self.C

    @property
    def y(self) -> int:
        return self.groups * self.N * self.outputs * self.K

    @property
    def w(self) -> int:
        return self.groups * self.K * self.taps * self.C

    @property
    def short(self) -> bool:
        """True for floats of 16 bits, which XLA's CPU backend converts."""
        return self.dtype.itemsize == 2

    @property
    def dilated(self) -> bool:
        """True if there are zeros between the elements of x."""
        return math.prod(self.window.input_dilation) > 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """Counts of what a program does when it runs, of what is compiled for it, and the memory that it takes beside operands and result.

    Attributes:
      matrix: multiply-adds of matrix products, with the columns of the result rounded up to LANES.
      gathered: elements that Eigen copies into the rows of a matrix.
      gathered_uneven: those of them that do not fill registers, along one axis or two.
      gathered_in_space: those of them along three axes.
      gathered_in_loop: the uneven ones that a loop over groups gathers, on one core.
      runs: pieces of contiguous memory that are gathered, or that the innermost loop of a copy has; `runs_in_space` along three axes.
      packed: elements of the filter, which Eigen copies too.
      results: elements of the product; `rows_in_loop` those that a loop over groups computes.
      rows_in_groups: rows of the product, if the convolution has groups.
      spread: terms that Eigen's transposed convolution adds to its result.
      generic: multiply-adds of XLA's own loop, which computes what Eigen has no convolution for.
      generic_rows: these, divided by the output channels, along which XLA vectorises.
      elementwise: multiply-adds of sums of shifts.
      repeated: those whose input is repeated for the channels of a group.
      rows, lines: multiply-adds of loops over blocks of rows, or of positions on a line.
      few: lanes that are left empty in these.
      reduced: multiply-adds of dots without channels.
      copied, transposed: bytes.
      calls, steps: calls of a library, and steps of a loop.
      programs, fusions, terms: programs, kernels in them that are compiled, and terms of sums in these.
      bytes: of memory.
    """

    matrix: float = 0
    gathered: float = 0
    gathered_uneven: float = 0
    gathered_in_space: float = 0
    runs_in_space: float = 0
    runs: float = 0
    gathered_in_loop: float = 0
    rows_in_loop: float = 0
    packed: float = 0
    results: float = 0
    rows_in_groups: float = 0
    spread: float = 0
    generic: float = 0
    generic_rows: float = 0
    elementwise: float = 0
    repeated: float = 0
    rows: float = 0
    lines: float = 0
    few: float = 0
    reduced: float = 0
    copied: float = 0
    transposed: float = 0
    calls: float = 0
    steps: float = 0
    programs: float = 0
    fusions: float = 0
    terms: float = 0
    bytes: float = 0

    def __add__(self, other: Work) -> Work:
        return Work(**{name: n + getattr(other, name) for name, n in vars(self).items()})

    def times(self, n: float) -> Work:
        return Work(**{name: n * count for name, count in vars(self).items()})


LANES = 16  # of a vector register of float32, with 512 bits


def matrix_product(rows: float, inner: float, columns: int) -> float:
    """Multiply-adds of (rows, inner) times (inner, columns), with the columns rounded up."""
    return rows * inner * -(-columns // LANES) * LANES
