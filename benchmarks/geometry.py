"""One convolution of any geometry, in one role, and the line of text that specifies it.

    wgrad float32 x=1,1000,2 w=128,1,2 padding=64:63 groups=2

`x` is (N, *space, C) and `w` is (*filter, C/groups, K), channels last, as lax takes them.  Other fields have an entry for each axis.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

from jax import lax

import jaxext
from jaxext.bench.case import convolution
from jaxext.core.window import Window, meetings

SLOTS = {"fprop": "xw", "dgrad": "wy", "wgrad": "xy"}  # the arguments of each role


@dataclasses.dataclass(frozen=True, kw_only=True)
class Geometry:
    """A convolution, its role and its dtype.

    Attributes:
      role: "fprop", "dgrad" or "wgrad": the output, or the gradient of the input or the filter, which is the pullback alone with the
        cotangent as an argument.
      x, w: shapes without the mapped axis.
      stride, padding, input_dilation, filter_dilation: one entry per spatial axis; all ones and zeros if left out.
      groups, batch_groups: lax's feature_group_count and batch_group_count.
      batch: the size of an axis over which the function is mapped by `vmap`, in front.
      mapped: which of x and w have it: "xw" (batched filters), "x" (with role "wgrad": per-example gradients), "w" (an ensemble that shares
        its input).  The output always has it.
    """

    role: str
    dtype: str = "float32"
    x: tuple[int, ...]
    w: tuple[int, ...]
    stride: tuple[int, ...] = ()
    padding: tuple[tuple[int, int], ...] = ()
    input_dilation: tuple[int, ...] = ()
    filter_dilation: tuple[int, ...] = ()
    groups: int = 1
    batch_groups: int = 1
    batch: int = 1
    mapped: str = ""

    def __post_init__(self):
        for name in ("stride", "input_dilation", "filter_dilation"):
            object.__setattr__(self, name, getattr(self, name) or (1,) * self.rank)
        object.__setattr__(self, "padding", self.padding or ((0, 0),) * self.rank)

    @property
    def rank(self) -> int:
        return len(self.x) - 2

    @property
    def window(self) -> Window:
        return Window(
            input=self.x[1:-1],
            filter=self.w[:-2],
            stride=self.stride,
            padding=self.padding,
            input_dilation=self.input_dilation,
            filter_dilation=self.filter_dilation,
        )

    @property
    def y(self) -> tuple[int, ...]:
        """The shape of the output, without the mapped axis."""
        return (self.x[0] // self.batch_groups, *self.window.output, self.w[-1])

    @property
    def work(self) -> int:
        """The number of multiply-adds, without those with zeros of padding or dilation."""
        pairs = math.prod(meetings(self.window, axis) for axis in range(self.rank))
        return self.batch * self.y[0] * pairs * self.w[-2] * self.w[-1]

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the arguments."""
        slots = {"x": self.x, "w": self.w, "y": self.y}
        return tuple((self.batch,) * (axis == 0) + slots[slot] for slot, axis in zip(SLOTS[self.role], self._axes, strict=True))

    @property
    def _axes(self) -> tuple[int | None, ...]:
        """The position of the mapped axis in each argument."""
        return tuple(0 if self.mapped and slot in self.mapped + "y" else None for slot in SLOTS[self.role])

    def build(self, library: str) -> Callable:
        """The function of the arguments, made with "lax" or "jaxext"."""
        spec = (0, self.rank + 1, *range(1, self.rank + 1))
        of_filter = (self.rank + 1, self.rank, *range(self.rank))
        operation: Any = {"lax": lax, "jaxext": jaxext}[library].conv_general_dilated
        op = functools.partial(
            operation,
            window_strides=self.stride,
            padding=self.padding,
            lhs_dilation=self.input_dilation,
            rhs_dilation=self.filter_dilation,
            dimension_numbers=lax.ConvDimensionNumbers(spec, of_filter, spec),
            feature_group_count=self.groups,
            batch_group_count=self.batch_groups,
        )
        return convolution(self.role, self.x, self.w, self._axes if self.mapped else None)(op)

    def __str__(self) -> str:
        """The text that `parse` reads, without fields that have their default."""
        words, usual = [self.role, self.dtype], Geometry(role=self.role, x=self.x, w=self.w)
        for field in dataclasses.fields(self)[2:]:
            value = getattr(self, field.name)
            if field.name in ("x", "w") or value != getattr(usual, field.name):
                words.append(f"{field.name}={_text(value)}")
        return " ".join(words)


def parse(text: str) -> Geometry:
    """The geometry whose text this is.

    >>> parse("wgrad float32 x=8,56,56,64 w=3,3,1,64 stride=2,2 padding=0:1,0:1 groups=64")
    """
    role, dtype, *words = text.split()
    fields: dict[str, Any] = dict(word.split("=") for word in words)
    for name, value in fields.items():
        if name == "padding":
            fields[name] = tuple(tuple(map(int, pair.split(":"))) for pair in value.split(","))
        elif name in ("groups", "batch_groups", "batch"):
            fields[name] = int(value)
        elif name != "mapped":
            fields[name] = tuple(map(int, value.split(",")))
    return Geometry(role=role, dtype=dtype, **fields)


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(":".join(map(str, n)) if isinstance(n, tuple) else str(n) for n in value)
    return str(value)
