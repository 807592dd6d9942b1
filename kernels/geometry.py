"""The geometry of a convolution for its kernels: three spatial axes, each an equation between target, tap and source.

Every role gathers.  The position t of the target takes, at the tap r, the position s of the source for which

    a·t + b·r + offset = d·s        (none, where d does not divide or s lies outside)

    role     target            source  a               b                 offset  d
    fprop    output p          input   stride          filter dilation   -low    input dilation
    dgrad    input i           output  input dilation  -filter dilation  low     stride
    wgrad    (contracted) p    input   as fprop

With d > 1 only some taps meet a source.  They depend on the target's *phase*, t mod `period`: the targets of one phase meet the taps
first, first + step, ...  Within a phase s is linear in t and r, so no division is needed and no tap is wasted.
"""

from __future__ import annotations

import dataclasses
import math

from .epilogue import Epilogue
from .launch import cdiv

MOST_POSITIONS = 2**31 - 2**16  # kernels number them with 32 bits, and their tiles overhang


@dataclasses.dataclass(frozen=True, kw_only=True)
class Axis:
    """The equation of one spatial axis, with T targets, R taps and S sources.

    In phase f (0 <= f < period):  t = f + period·j,  r = first(f) + step·u,  s = origin(f) + target_stride·j + tap_stride·u.
    """

    T: int
    R: int
    S: int
    a: int = 1
    b: int = 1
    offset: int = 0
    d: int = 1

    @property
    def period(self) -> int:
        return self.d // math.gcd(self.a, self.d)

    @property
    def step(self) -> int:
        return self.d // math.gcd(self.b, self.d)

    @property
    def phases(self) -> int:
        """The number of phases that have a target."""
        return min(self.period, self.T)

    @property
    def targets(self) -> int:
        """The number of targets of a phase; in some phases the last one lies outside."""
        return cdiv(self.T, self.period)

    @property
    def inverse(self) -> int:
        """The inverse of b / gcd(b, d) modulo `step`, for a closed form of `first`.

        With e = -(a·f + offset) mod d:  first = inverse · (e / gcd(b, d)) mod step, if gcd(b, d) divides e; otherwise there is no tap.
        """
        return pow(self.b * self.step // self.d, -1, self.step)

    @property
    def minus_a(self) -> int:
        """-a modulo d: kernels must not divide negative numbers, since their division truncates."""
        return -self.a % self.d

    @property
    def minus_offset(self) -> int:
        return -self.offset % self.d

    @property
    def inside(self) -> bool:
        """Return whether every source in the equation exists."""
        ends = [self.a * t + self.b * r + self.offset for t in (0, self.T - 1) for r in (0, self.R - 1)]
        return min(ends) >= 0 and max(ends) < self.S * self.d

    def largest(self, target: int, tap: int) -> int:
        """The largest absolute value in computing the source, for any target and tap up to these, the equation's own numbers included."""
        way = self.a * target + abs(self.b) * tap + abs(self.offset)
        return max(way, self.a, abs(self.b), self.d, self.S)

    @property
    def swapped(self) -> Axis:
        """The same equation with taps and targets exchanged: the phase of a tap, and the targets that it meets."""
        return dataclasses.replace(self, T=self.R, R=self.T, a=self.b, b=self.a)

    @property
    def target_stride(self) -> int:
        return self.a * self.period // self.d

    @property
    def tap_stride(self) -> int:
        return self.b * self.step // self.d

    @property
    def first(self) -> tuple[int, ...]:
        """The first tap of each phase that meets a source; R if none does."""
        return tuple(
            next((r for r in range(min(self.step, self.R)) if (self.a * f + self.b * r + self.offset) % self.d == 0), self.R)
            for f in range(self.period)
        )

    @property
    def origin(self) -> tuple[int, ...]:
        """The source of the first target at the first tap of each phase; 0 if it has no taps."""
        return tuple(0 if r == self.R else (self.a * f + self.b * r + self.offset) // self.d for f, r in enumerate(self.first))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvProblem:
    """A convolution's role on one device: sizes by label (`jaxext.ops.conv.form`), x[B,N,D,H,W,G,C], w[B,G,K,T,R,S,C], y[B,N,O,P,Q,G,K].

    Missing spatial axes, the leading ones, have size 1.
    """

    name: str  # of the primitive, such as "conv2d_fprop"
    role: str  # fprop, dgrad or wgrad
    B: int
    N: int
    G: int
    C: int
    K: int
    input: tuple[int, int, int]
    filter: tuple[int, int, int]
    output: tuple[int, int, int]
    stride: tuple[int, int, int] = (1, 1, 1)
    low: tuple[int, int, int] = (0, 0, 0)
    input_dilation: tuple[int, int, int] = (1, 1, 1)
    filter_dilation: tuple[int, int, int] = (1, 1, 1)
    dtypes: tuple[str, str, str]  # of the operands in the order of slots (x, w, y without the open one), and of the result
    precision: str  # of float32 products: tf32, tf32x3, bf16x3, bf16x6 or ieee
    arch: int  # compute capability times 10, such as 90
    device: str = dataclasses.field(default="", repr=False)  # its name, such as "NVIDIA H200", if it is known
    epilogue: Epilogue | None = None  # of fprop

    @property
    def method(self) -> str:
        """The way in which float32 factors are multiplied."""
        return self.precision

    @property
    def turned(self) -> tuple[bool, bool]:
        """Return whether the depth of the left and of the right factor is not contiguous in memory."""
        return self.role == "wgrad", self.role != "fprop"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Slot -> shape."""
        return {
            "x": (self.B, self.N, *self.input, self.G, self.C),
            "w": (self.B, self.G, self.K, *self.filter, self.C),
            "y": (self.B, self.N, *self.output, self.G, self.K),
        }

    @property
    def axes(self) -> tuple[Axis, Axis, Axis]:
        d, h, w = (self._axis(i) for i in range(3))
        return d, h, w

    def _axis(self, i: int) -> Axis:
        into, taps, out = self.input[i], self.filter[i], self.output[i]
        stride, low, di, dr = self.stride[i], self.low[i], self.input_dilation[i], self.filter_dilation[i]
        if self.role == "dgrad":
            return Axis(T=into, R=taps, S=out, a=di, b=-dr, offset=low, d=stride)
        return Axis(T=out, R=taps, S=into, a=stride, b=dr, offset=-low, d=di)
