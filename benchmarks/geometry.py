"""One convolution of any geometry, in one role, and the line of text that specifies it.

    wgrad float32 x=1,1000,2 w=128,1,2 padding=64:63 groups=2

`x` is (N, *space, C) and `w` is (*filter, C/groups, K), channels last, as lax takes them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

from jax import lax

import jaxext
from jaxext.bench.case import STEP, convolution
from jaxext.core.window import Window, dilate, meetings

ROLES = ("fprop", "dgrad", "wgrad", STEP)
SLOTS = {"fprop": "xw", "dgrad": "wy", "wgrad": "xy", STEP: "xwy"}  # the arguments of each role
MAPPED = ("", "xw", "x", "w")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Geometry:
    """A convolution, its role and its dtype.

    Attributes:
      role: "fprop", "dgrad" or "wgrad": the output, or the gradient of the input or the filter, which is the pullback alone with the
        cotangent as an argument; "step": all three in one program.
      x, w: shapes without the mapped axis.
      stride, padding, input_dilation, filter_dilation: one entry per spatial axis; all ones and zeros if left out.
      groups, batch_groups: lax's feature_group_count and batch_group_count.
      batch: the size of an axis over which the function is mapped by `vmap`, in front.
      mapped: which of x and w have it: "xw" (batched filters), "x" (with role "wgrad": per-example gradients), "w" (an ensemble that shares
        its input).  The output always has it.

    Raises:
      ValueError: names the field that does not fit.
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
            steps = getattr(self, name)
            object.__setattr__(self, name, steps * self.rank if len(steps) == 1 else steps or (1,) * self.rank)
        object.__setattr__(self, "padding", self.padding or ((0, 0),) * self.rank)
        for name in ("stride", "padding", "input_dilation", "filter_dilation"):
            if len(getattr(self, name)) != self.rank:
                raise ValueError(f"{name}: got {getattr(self, name)}, want one for each of {self.rank} spatial axes")
        self._check()

    def _check(self):
        if self.role not in ROLES:
            raise ValueError(f"role: got {self.role!r}, want one of {', '.join(ROLES)}")
        if len(self.w) != len(self.x) or len(self.x) < 2:
            raise ValueError(f"w: got {self.w} for x {self.x}, want as many axes")
        if self.w[-2] * self.groups != self.x[-1] or self.w[-1] % self.groups:
            raise ValueError(f"groups: got {self.groups}, want them to divide w {self.w} and to make the channels of x {self.x}")
        if self.x[0] % self.batch_groups or self.w[-1] % self.batch_groups:
            raise ValueError(f"batch_groups: got {self.batch_groups}, want a divisor of N of x {self.x} and K of w {self.w}")
        if self.mapped not in MAPPED or bool(self.mapped) != (self.batch > 1):
            raise ValueError(
                f"mapped: got {self.mapped!r} for batch {self.batch}, want one of {', '.join(MAPPED[1:])} with a batch above 1"
            )

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
        products = 3 if self.role == STEP else 1
        return self.batch * self.y[0] * pairs * self.w[-2] * self.w[-1] * products

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
        """The line that `parse` takes, without fields that have their default."""
        words = [self.role, self.dtype]
        for field in dataclasses.fields(self)[2:]:
            value = getattr(self, field.name)
            usual = {"padding": ((0, 0),) * self.rank}.get(field.name, (1,) * self.rank) if isinstance(value, tuple) else field.default
            if field.name in ("x", "w") or value != usual:
                words.append(f"{field.name}={_text(value)}")
        return " ".join(words)


def parse(text: str) -> Geometry:
    """The geometry of a line: the role, optionally a dtype, then NAME=VALUE for each field without its default, in any order.

    Sizes are separated by commas; a single stride or dilation stands for all axes.  Padding is LOW:HIGH for each axis, SAME or VALID.

    Raises:
      ValueError: a word is not understood, or a field does not fit; the message names it.

    >>> parse("wgrad x=8,56,56,64 w=3,3,1,64 stride=2 padding=SAME groups=64")
    """
    role, *words = text.split() or [""]
    fields: dict[str, Any] = {"dtype": words.pop(0)} if words and "=" not in words[0] else {}
    for word in words:
        name, _, value = word.partition("=")
        fields[name] = _value(name, value)
    if missing := {"x", "w"} - fields.keys():
        raise ValueError(f"{min(missing)}: is missing in {text!r}")
    named = fields.get("padding")
    if isinstance(named, str):
        rank = len(fields["x"]) - 2
        stride, of_input, of_filter = (
            step * rank if len(step := fields.get(name, (1,))) == 1 else step for name in ("stride", "input_dilation", "filter_dilation")
        )
        input, filter = tuple(map(dilate, fields["x"][1:-1], of_input)), tuple(map(dilate, fields["w"][:-2], of_filter))
        fields["padding"] = tuple(lax.padtype_to_pads(input, filter, stride, named)) if rank else ()
    return Geometry(role=role, **fields)


def _value(name: str, text: str) -> Any:
    numbers = ("groups", "batch_groups", "batch")
    known = [field.name for field in dataclasses.fields(Geometry)]
    if name not in known:
        raise ValueError(f"{name}: is no field, want one of {', '.join(known)}")
    try:
        if name in ("dtype", "mapped", "role") or (name == "padding" and text in ("SAME", "VALID")):
            return text
        if name in numbers:
            return int(text)
        if name == "padding":
            low_high = [tuple(map(int, pair.split(":"))) for pair in text.split(",")]
            return tuple((low, high) for low, high in low_high)
        return tuple(map(int, text.split(",")))
    except ValueError:
        raise ValueError(f"{name}: got {text!r}, want {'a whole number' if name in numbers else 'whole numbers, such as 1,2,3'}") from None


def _text(value) -> str:
    if isinstance(value, tuple):
        return ",".join(":".join(map(str, n)) if isinstance(n, tuple) else str(n) for n in value)
    return str(value)
