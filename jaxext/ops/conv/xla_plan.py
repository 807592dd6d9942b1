"""The plan of a convolution: a tree of algorithms, each of which states its work on a CPU, and so its cost.

    y[b,n,p,g,k] = Σ_{r,c} x̃[b,n,stride·p + filter_dilation·r,g,c] · w[b,g,k,r,c]

dgrad is fprop with y as the input and the filter reversed (`Window.transposed`), so only two roles remain: fprop and wgrad.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxext.core.call import Call, Partitioner
from jaxext.core.window import Window


@dataclasses.dataclass(frozen=True)
class Conv:
    """A convolution with y or w open, of arrays of one dtype that are not cropped.

    Attributes:
      open: "y" or "w".
      B, N, G, C, K: the sizes of its labels.
      window: without negative padding.
      dtype: holds both operands exactly.
      result: the dtype of the result.
      dgrad: True for the gradient of the input, whose filter is reversed first.
      precision, splitter, platform: those of the call.
    """

    open: str
    B: int
    N: int
    G: int
    C: int
    K: int
    window: Window
    dtype: np.dtype
    result: np.dtype
    dgrad: bool = False
    precision: Any = None
    partitioner: Partitioner = Partitioner.NOBODY
    platform: str = "cpu"

    @classmethod
    def of(cls, call: Call) -> tuple[Conv, Window]:
        """The convolution of a call, and the window of its input before it is cropped.  dgrad is fprop of y by the reversed filter."""
        assert call.window is not None
        dgrad, (B, N, G, C, K) = call.open == "x", (call.sizes[label] for label in "BNGCK")
        window = call.window.transposed if dgrad else call.window
        sizes = B, N, G, *((K, C) if dgrad else (C, K))
        dtypes, how = (promote(*call.dtypes.values()), call.dtype), (call.precision, call.partitioner, call.platform)
        return cls("w" if call.open == "w" else "y", *sizes, window.cropped[1], *dtypes, dgrad, *how), window

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

    @property
    def local(self) -> bool:
        """True on CPUs where XLA does not split the program."""
        return self.platform == "cpu" and self.partitioner.by_labels

    @property
    def shape(self) -> tuple[int, ...]:
        if self.open == "y":
            return (self.B, self.N, *self.window.output, self.G, self.K)
        return (self.B, self.G, self.K, *self.window.filter, self.C)

    @property
    def sums(self) -> np.dtype:
        """The dtype of sums: at least float32 for floats."""
        wide = promote(self.dtype, self.result)
        return np.dtype(np.float32) if jnp.issubdtype(wide, jnp.floating) and wide.itemsize < 4 else wide

    def widened(self, *operands: jax.Array) -> list[jax.Array]:
        """The operands in the dtype of sums, if they are floats on a CPU.

        XLA would convert a bfloat16 result in every step of a loop, and has no code for some dots of it.
        """
        wide = self.platform == "cpu" and jnp.issubdtype(self.dtype, jnp.floating)
        return [operand.astype(self.sums) if wide else operand for operand in operands]


def promote(a: np.dtype, b: np.dtype) -> np.dtype:
    """jax's standard promotion, with bfloat16 in place of floats of 8 bits or fewer, which it holds exactly."""
    if a == b:
        return a
    a, b = (np.dtype(jnp.bfloat16) if jnp.issubdtype(d, jnp.floating) and d.itemsize == 1 else d for d in (a, b))
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(a, b)


@dataclasses.dataclass(frozen=True)
class ConvPlan:
    """A convolution by one algorithm, which is the class: derive from it, and define `name`, `work` and `run`.

    Attributes:
      conv: the convolution.
      parts: the plans of the convolutions that it is made of (`split`).
      cost: on a CPU, if it is known.
    """

    conv: Conv
    parts: tuple[ConvPlan, ...] = ()
    cost: Cost | None = None
    name: ClassVar[str]

    @staticmethod
    def work(conv: Conv) -> Work | None:
        """The work beside that of the parts.  None if it does not compute the convolution, or if its program would be far too large."""
        raise NotImplementedError

    @staticmethod
    def split(conv: Conv) -> Sequence[Conv]:
        """The convolutions that it is made of."""
        return ()

    def run(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """The open slot from x and w, or from x and y.  The result may have the dtype `conv.sums`."""
        raise NotImplementedError

    def __str__(self) -> str:
        parts = ", ".join(dict.fromkeys(part.name for part in self.parts))
        return f"{self.name} of {parts}" if parts else self.name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """Counts of what a program does when it runs, of what is compiled for it, and the memory that it takes beside operands and result."""

    matrix: float = 0  # multiply-adds of matrix products, with the columns of the result rounded up to LANES
    gathered: float = 0  # elements that Eigen copies into the rows of a matrix
    gathered_uneven: float = 0  # those of them that do not fill registers, along one axis or two
    gathered_in_space: float = 0  # those of them along three axes
    runs_in_space: float = 0  # as `runs`, along three axes
    runs: float = 0  # pieces of contiguous memory that are gathered, or that the innermost loop of a copy has
    gathered_in_loop: float = 0  # the uneven ones that a loop over groups gathers, on one core
    rows_in_loop: float = 0  # those of `results` that a loop over groups computes
    packed: float = 0  # elements of the filter, which Eigen copies too
    results: float = 0  # elements of the product
    rows_in_groups: float = 0  # rows of the product, if the convolution has groups
    spread: float = 0  # terms that Eigen's transposed convolution adds to its result
    generic: float = 0  # multiply-adds of XLA's own loop, which computes what Eigen has no convolution for
    generic_rows: float = 0  # these, divided by the output channels, along which XLA vectorises
    elementwise: float = 0  # multiply-adds of sums of shifts
    repeated: float = 0  # those whose input is repeated for the channels of a group
    rows: float = 0  # multiply-adds of loops over blocks of rows
    lines: float = 0  # and of those over positions on a line
    few: float = 0  # lanes that are left empty in these two
    reduced: float = 0  # multiply-adds of dots without channels
    copied: float = 0  # bytes
    transposed: float = 0  # bytes
    calls: float = 0  # of a library
    steps: float = 0  # of a loop
    programs: float = 0
    fusions: float = 0  # kernels that are compiled in these
    terms: float = 0  # of sums in these
    bytes: float = 0  # of memory

    def __add__(self, other: Work) -> Work:
        return Work(**{name: n + getattr(other, name) for name, n in vars(self).items()})

    def times(self, n: float) -> Work:
        return Work(**{name: n * count for name, count in vars(self).items()})


LANES = 16  # of a vector register of float32, with 512 bits


def matrix_product(rows: float, inner: float, columns: int) -> float:
    """Multiply-adds of (rows, inner) times (inner, columns), with the columns rounded up."""
    return rows * inner * -(-columns // LANES) * LANES


FILE = pathlib.Path(__file__).parent / "xla_rates.json"  # by `make fit-cpu`
CALLS = 100  # of a program that pay back the time to build it


@dataclasses.dataclass(frozen=True)
class Cost:
    """Expected milliseconds to run, and to lower and compile; bytes of memory beside operands and result."""

    run_ms: float = 0.0
    build_ms: float = 0.0
    bytes: float = 0.0

    @property
    def total(self) -> float:
        """Milliseconds of one call, with its share of the time to build."""
        return self.run_ms + self.build_ms / CALLS

    def __str__(self) -> str:
        """Milliseconds to run and to build."""
        run = f"{self.run_ms:.2g}" if self.run_ms < 99 else f"{self.run_ms:.0f}"
        return f"{run}+{self.build_ms:.0f}"


def cost(work: Work, parts: Sequence[ConvPlan] = ()) -> Cost:
    """The cost of this work and of parts, which run one after the other in the same program."""
    run_ms, build_ms = (sum(of.get(name, 0.0) * count for name, count in vars(work).items()) * 1e-6 for of in rates())
    costs = [part.cost for part in parts if part.cost]
    program = cost(Work(programs=1)) if costs else Cost()
    return Cost(
        run_ms + sum(part.run_ms - program.run_ms for part in costs),
        build_ms + sum(part.build_ms - program.build_ms for part in costs),
        work.bytes + max((part.bytes for part in costs), default=0.0),
    )


@functools.cache
def rates() -> tuple[dict[str, float], dict[str, float]]:
    """Nanoseconds of each count, to run and to build."""
    fitted = json.loads(FILE.read_text())
    return fitted["run"], fitted["build"]
