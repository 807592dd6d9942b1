"""The kinds of problems, given by sizes in the terms of users.

`problem` gives the kernels' own `Problem`, and `case` a function of arrays, each for one role and kind of numbers; `halved` makes a problem
smaller step by step.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Self, TypeVar

from jaxext.bench.case import LAYOUTS, NUMBERS, STEP, Problem, bilinear, convolution, epilogue, network, product, ragged
from jaxext.core.form import Form

FPROP, DGRAD, WGRAD = "fprop", "dgrad", "wgrad"
NN, NT, TN = "nn", "nt", "tn"
CONV_ROLES: tuple[str, ...] = (FPROP, DGRAD, WGRAD)
MATMUL_ROLES: tuple[str, ...] = (NN, NT, TN)


def _problem(family: str, role: str, numbers: str, arch: int, **sizes: int) -> Any:
    """The problem of the family's kernels, whose module needs Triton."""
    dtypes, precision = NUMBERS[numbers]
    module = importlib.import_module(f"jaxext.kernels.{family}")
    return module.Problem(name=f"{family}_{role}", role=role, **sizes, dtypes=dtypes, precision=precision, arch=arch)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Matmul(Problem):
    """c[B,M,N] = a[B,M,K] b[B,K,N], and its gradients."""

    M: int
    N: int
    K: int
    B: int = 1
    roles: tuple[str, ...] = (*MATMUL_ROLES, STEP)

    kernel: ClassVar = "matmul"
    stages: ClassVar = ("batch", "matrices")

    @property
    def size(self) -> str:
        return f"{self.B} x " * (self.B > 1) + by((self.M, self.K, self.N))

    def problem(self, role: str, numbers: str, arch: int) -> Any:
        return _problem("matmul", role, numbers, arch, B=self.B, M=self.M, N=self.N, K=self.K)

    def flops(self, role: str) -> float:
        return 2.0 * self.B * self.M * self.N * self.K * (3 if role == STEP else 1)

    def shapes(self, role: str) -> tuple[tuple[int, ...], ...]:
        a, b, c = ((self.B,) * (self.B > 1) + matrix for matrix in ((self.M, self.K), (self.K, self.N), (self.M, self.N)))
        return {NN: (a, b), NT: (c, b), TN: (a, c), STEP: (a, b, c)}[role]

    def _writable(self, role: str, numbers: str) -> bool:
        return role != STEP or super()._writable(role, numbers)

    def _function(self, role: str) -> tuple[str, Any, Any]:
        return "dot_general", *product(role, self.B > 1)

    def halved(self, stage: str) -> Self:
        return smaller(self, B=2) if stage == "batch" else smaller(self, M=16, N=16, K=16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ragged(Problem):
    """Rows of (M, K) in groups of these sizes, each multiplied by its group's matrix of (G, K, N), and the gradients."""

    sizes: tuple[int, ...]
    N: int
    K: int
    roles: tuple[str, ...] = (*MATMUL_ROLES, STEP)

    kernel: ClassVar = "ragged"
    stages: ClassVar = ("rows", "matrices")

    @property
    def size(self) -> str:
        return f"{len(self.sizes)} groups, {by((sum(self.sizes), self.K, self.N))}"

    def problem(self, role: str, numbers: str, arch: int) -> Any:
        return _problem("ragged", role, numbers, arch, B=1, P=1, R=1, M=sum(self.sizes), N=self.N, K=self.K, G=len(self.sizes))

    def flops(self, role: str) -> float:
        return 2.0 * sum(self.sizes) * self.N * self.K * (3 if role == STEP else 1)

    def shapes(self, role: str) -> tuple[tuple[int, ...], ...]:
        rows = sum(self.sizes)
        x, w, y = (rows, self.K), (len(self.sizes), self.K, self.N), (rows, self.N)
        return {NN: (x, w), NT: (y, w), TN: (x, y), STEP: (x, w, y)}[role]

    def _function(self, role: str) -> tuple[str, Any, Any]:
        return "ragged_dot_general", *ragged(role, self.sizes)

    def halved(self, stage: str) -> Self:
        """Halve the rows, or N and K.  The number of groups stays, and empty groups stay empty."""
        if stage == "rows":
            return dataclasses.replace(self, sizes=tuple((size + 1) // 2 for size in self.sizes))
        return smaller(self, N=16, K=16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conv(Problem):
    """A convolution of x (N, *space, C) with w (*filter, C/groups, K), and its gradients.

    With a `batch` there are that many, each with its own x and filter, or with one filter and a gradient for each x (`per_example`).

    `padding` is (low, high) per axis, or None for lax's SAME; stride and dilations are the same on all axes.
    """

    x: tuple[int, ...]
    w: tuple[int, ...]
    stride: int = 1
    padding: tuple[tuple[int, int], ...] | None = None
    dilation: int = 1
    input_dilation: int = 1
    groups: int = 1
    batch: int = 1
    per_example: bool = False
    roles: tuple[str, ...] = (*CONV_ROLES, STEP)

    stages: ClassVar = ("batch", "space", "channels")

    @property
    def size(self) -> str:
        return f"{self.batch} x " * (self.batch > 1) + by(self.x)

    @property
    def rank(self) -> int:
        return len(self.x) - 2

    @property
    def kernel(self) -> str:
        return "depthwise" if self.w[-2] == 1 and self.groups > 1 else "conv"

    @property
    def pads(self) -> tuple[tuple[int, int], ...]:
        return self.padding or tuple(self._same(n, r) for n, r in zip(self.x[1:-1], self.w[:-2], strict=True))

    def _same(self, size: int, taps: int) -> tuple[int, int]:
        total = max(0, (-(-size // self.stride) - 1) * self.stride + (taps - 1) * self.dilation + 1 - size)
        return total // 2, total - total // 2

    @property
    def output(self) -> tuple[int, ...]:
        return tuple(
            (low + (n - 1) * self.input_dilation + 1 + high - ((r - 1) * self.dilation + 1)) // self.stride + 1
            for n, r, (low, high) in zip(self.x[1:-1], self.w[:-2], self.pads, strict=True)
        )

    def problem(self, role: str, numbers: str, arch: int) -> Any:
        dtypes, precision = NUMBERS[numbers]

        def three(values, missing: int) -> Any:
            return (missing,) * (3 - self.rank) + tuple(values)

        return importlib.import_module("jaxext.kernels.geometry").ConvProblem(
            name=f"conv{self.rank}d_{role}",
            role=role,
            B=self.batch,
            N=self.x[0],
            G=self.groups,
            C=self.w[-2],
            K=self.w[-1] // self.groups,
            input=three(self.x[1:-1], 1),
            filter=three(self.w[:-2], 1),
            output=three(self.output, 1),
            stride=three((self.stride,) * self.rank, 1),
            low=three((low for low, _ in self.pads), 0),
            input_dilation=three((self.input_dilation,) * self.rank, 1),
            filter_dilation=three((self.dilation,) * self.rank, 1),
            dtypes=dtypes,
            precision=precision,
            arch=arch,
        )

    @property
    def kinds(self) -> Iterator[str]:
        """The tags that follow from the sizes."""
        yield {1: "one-axis", 2: "two-axes", 3: "three-axes"}[self.rank]
        if self.batch > 1:
            yield "per-example" if self.per_example else "batched-filters"
        if self.groups > 1:
            yield "depthwise" if self.kernel == "depthwise" else "grouped"
        elif set(self.w[:-2]) == {1}:
            yield "pointwise"
        else:
            yield "stem" if self.w[-2] <= 3 else "dense"
        if self.stride > 1:
            yield "strided"
        if self.input_dilation > 1:
            yield "transposed"
        if self.dilation > 1:
            yield "dilated"
        if self.rank == 1 and self.stride == 1 and self.padding == (((self.w[0] - 1) * self.dilation, 0),):
            yield "causal"

    def flops(self, role: str) -> float:
        pairs = self.batch * self.x[0] * math.prod(self.output) * math.prod(self.w) / self.input_dilation**self.rank
        return 2 * pairs * (3 if role == STEP else 1)

    def shapes(self, role: str) -> tuple[tuple[int, ...], ...]:
        y = (self.x[0], *self.output, self.w[-1])
        arrays = {"x": self.x, "w": self.w, "y": y}
        mapped = self._mapped(role)
        shapes = tuple(arrays[slot] for slot in _SLOTS[role])
        if mapped is None:
            return shapes
        return tuple(shape if axis is None else (self.batch, *shape) for shape, axis in zip(shapes, mapped, strict=True))

    def _mapped(self, role: str) -> tuple[int | None, ...] | None:
        """The operands that have a batch axis, in front."""
        return None if self.batch == 1 else tuple(None if slot == "w" and self.per_example else 0 for slot in _SLOTS[role])

    def _function(self, role: str) -> tuple[str, Any, Any]:
        static = {
            "window_strides": (self.stride,) * self.rank,
            "padding": self.pads,
            "lhs_dilation": (self.input_dilation,) * self.rank,
            "rhs_dilation": (self.dilation,) * self.rank,
            "dimension_numbers": LAYOUTS[self.rank],
            "feature_group_count": self.groups,
        }
        return "conv_general_dilated", static, convolution(role, self.x, self.w, self._mapped(role))

    def halved(self, stage: str) -> Self:
        """Halve the batch, space or channels.  Filter, stride, padding and dilations stay, and each axis keeps more than one output."""
        n, *space, channels = self.x
        if stage == "batch":
            batch, n = halved((self.batch, n), (2, 2))
            return dataclasses.replace(self, batch=batch, x=(n, *space, channels))
        if stage == "space":
            space = halved(space, [max(_ROOM[self.rank], (r - 1) * self.dilation + 1 + self.stride) for r in self.w[:-2]])
            return dataclasses.replace(self, x=(n, *space, channels))
        groups, inputs, outputs = halved((self.groups, self.w[-2], self.w[-1] // self.groups), (2, 4, 4))
        return dataclasses.replace(self, groups=groups, x=(n, *space, groups * inputs), w=(*self.w[:-2], inputs, groups * outputs))


_ROOM = {1: 64, 2: 16, 3: 8}  # places on an axis, of so many: on fewer, all are near an edge
_SLOTS = {FPROP: "xw", DGRAD: "wy", WGRAD: "xy", STEP: "xwy"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mlp(Problem):
    """A network of matrix products between layers of such widths, with GELUs between them."""

    widths: tuple[int, ...]
    batch: int
    roles: tuple[str, ...] = ("forward", "dgrad", "wgrad", STEP)

    stages: ClassVar = ("batch", "widths")

    @property
    def size(self) -> str:
        return f"batch {self.batch}, {'-'.join(map(str, self.widths))}"

    def flops(self, role: str) -> float:
        """The operations of a role.  Gradients do not need the last product, and the gradient in the weights not that in the input."""
        first, *between, last = (2.0 * self.batch * m * n for m, n in itertools.pairwise(self.widths))
        middle = sum(between)
        return {
            "forward": first + middle + last,
            "dgrad": 2 * (first + middle) + last,
            "wgrad": 2 * first + 3 * middle + 2 * last,
            STEP: 2 * first + 3 * middle + 3 * last,
        }[role]

    def shapes(self, role: str) -> tuple[tuple[int, ...], ...]:
        x, y = (self.batch, self.widths[0]), (self.batch, self.widths[-1])
        return (x, *((y,) if role != "forward" else ()), *itertools.pairwise(self.widths))

    def _function(self, role: str) -> tuple[str, Any, Any]:
        return "dot_general", {"dimension_numbers": (((1,), (0,)), ((), ()))}, network(role)

    def halved(self, stage: str) -> Self:
        if stage == "batch":
            return smaller(self, batch=64)
        return dataclasses.replace(self, widths=halved(self.widths, (8,) * len(self.widths)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fused(Problem):
    """A product of (M, K) and (K, N) with bias, activation and residual, or a gated one of (M, K) and (K, 2, N)."""

    operation: str  # "linear" or "gated_linear_unit"
    activation: str
    M: int
    N: int
    K: int
    roles: tuple[str, ...] = ("forward", STEP)

    stages: ClassVar = ("matrices",)

    @property
    def size(self) -> str:
        return by((self.M, self.K, self.N))

    @property
    def gated(self) -> bool:
        return self.operation == "gated_linear_unit"

    def flops(self, role: str) -> float:
        return 2.0 * self.M * self.N * self.K * (1 + self.gated) * (3 if role == STEP else 1)

    def shapes(self, role: str) -> tuple[tuple[int, ...], ...]:
        x, y = (self.M, self.K), (self.M, self.N)
        operands = (x, (self.K, 2, self.N)) if self.gated else (x, (self.K, self.N), (self.N,), y)
        return operands if role == "forward" else (y, *operands)

    def _function(self, role: str) -> tuple[str, Any, Any]:
        return self.operation, {"activation": self.activation}, epilogue(role, self.K)

    def halved(self, stage: str) -> Self:
        return smaller(self, M=16, N=16, K=16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Labelled(Problem):
    """A form that a user declared (`jaxext.extend.define`), with one axis for each label."""

    form: Form
    sizes: tuple[int, ...]  # of the form's labels, in their order

    stages: ClassVar = ("sizes",)

    @classmethod
    def of(cls, form: Form, flops: float) -> Self:
        """A problem with labels of one size, and about that many operations for each role."""
        each = max(2, round((flops / 2) ** (1 / len(form.free))))
        sizes = (each,) * len(form.free)
        roles, tags = tuple(form.roles.values()), frozenset({form.name})
        return cls(name=f"{form.name}, {by(sizes)}", form=form, sizes=sizes, roles=roles, numbers=("tf32",), tags=tags)

    @property
    def size(self) -> str:
        return by(self.sizes)

    def flops(self, role: str) -> float:
        return 2.0 * math.prod(self.sizes)

    def shapes(self, role: str) -> tuple[tuple[int, ...], ...]:
        open = next(slot for slot, name in self.form.roles.items() if name == role)
        return tuple(self._shape(slot) for slot in self.form.factors(open))

    def _shape(self, slot: str) -> tuple[int, ...]:
        size = dict(zip(self.form.free, self.sizes, strict=True))
        return tuple(size[label] for label in self.form.slots[slot])

    def _function(self, role: str) -> tuple[str, Any, Any]:
        return self.form.name, {}, bilinear(self.form, role, {slot: self._shape(slot) for slot in self.form.slots})

    def halved(self, stage: str) -> Self:
        return dataclasses.replace(self, sizes=halved(self.sizes, (2,) * len(self.sizes)))


def by(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes))


AProblem = TypeVar("AProblem", bound=Problem)


def smaller(problem: AProblem, **least: int) -> AProblem:
    """The problem with the largest of these sizes halved, none below its minimum."""
    sizes = halved([getattr(problem, name) for name in least], [*least.values()])
    return dataclasses.replace(problem, **dict(zip(least, sizes, strict=True)))


def halved(sizes: Sequence[int], least: Sequence[int]) -> tuple[int, ...]:
    """The sizes with the largest one halved that can be, if any.  Odd sizes stay odd, even sizes even."""
    halves = [size // 2 | 1 if size % 2 else (size + 2) // 4 * 2 for size in sizes]
    may = [i for i, half in enumerate(halves) if least[i] <= half < sizes[i]]
    largest = max(may, key=lambda i: sizes[i], default=None)
    return tuple(halves[i] if i == largest else size for i, size in enumerate(sizes))
