"""What a hazard looks at: an equation of lax in its place (`Equation`), or how jaxext would compute lax's product (`Planned`)."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from jaxext import _compat
from jaxext.forms import flops
from jaxext.forms.call import Call
from jaxext.forms.choose import Choice
from jaxext.forms.form import owner
from jaxext.forms.window import dilate
from jaxext.hazards.split_axes import Split
from jaxext.tuning.explain import AS_LAX
from jaxext.tuning.walk import Step

PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")  # lax's primitives


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an equation stands."""

    source: str  # the user's line, such as "mynet.py:12 (loss)"
    scope: str  # the names of modules around it, such as "CNN/Conv_0", and of jax's transformations
    backward: bool
    times: int


def place(step: Step) -> Place:
    stacks = [eqn.source_info.name_stack for eqn in (*step.within, step.eqn)]
    scope = "/".join(filter(None, map(str, stacks)))
    return Place(_compat.source_line((step.eqn, *reversed(step.within))), scope, "transpose(" in scope, step.times)


@dataclasses.dataclass(frozen=True, eq=False)
class Equation:
    """An equation of lax, perhaps in a loop, or a product of jaxext that XLA's compiler gets wrong.  `axes` are the mesh axes, with their
    sizes, over which XLA still splits the program there.
    """

    eqn: Any  # a JaxprEqn
    splits: Sequence[Split | None]  # of the operands
    axes: Mapping[str, int]
    platform: str
    in_loop: bool = False
    one_number_reduced: bool = False  # whether it is a product with one number everywhere, and reduced at once
    narrow_reduced: bool = False  # whether it is a product of many rows and a few columns, and reduced at once

    @property
    def name(self) -> str:
        return self.eqn.primitive.name

    @property
    def dtypes(self) -> list[np.dtype]:
        return [atom.aval.dtype for atom in self.eqn.invars[:2]]

    @property
    def dtype(self) -> np.dtype:
        """Of the result."""
        return self.eqn.outvars[0].aval.dtype

    @property
    def integers(self) -> bool:
        return not any(jnp.issubdtype(dtype, jnp.inexact) for dtype in self.dtypes)

    @functools.cached_property
    def unused(self) -> dict[str, int]:
        """The axes that split neither operand."""
        used = {axis for split in self.splits for axes in split or () for axis in axes}
        return {axis: size for axis, size in self.axes.items() if axis not in used}

    @functools.cached_property
    def conv(self) -> Conv | None:
        return Conv(self) if self.name == "conv_general_dilated" else None

    def __str__(self) -> str:
        operands = " ".join(_typed(atom.aval, split) for atom, split in zip(self.eqn.invars, self.splits, strict=True))
        return f"{self.name} {operands} -> {_typed(self.eqn.outvars[0].aval, None)}{self.conv or ''}"

    @property
    def key(self) -> str:
        return str(self)


def _typed(aval, split: Split | None) -> str:
    """Such as "f32[8@data,32]"."""
    named = ["".join([str(n), "@" if axes else "", "+".join(axes)]) for n, axes in zip(aval.shape, split or ((),) * aval.ndim, strict=True)]
    return f"{aval.str_short(short_dtypes=True).partition('[')[0]}[{','.join(named)}]"


class Conv:
    """lax's convolution by its parts."""

    def __init__(self, equation: Equation):
        self.params, (self._lhs, self._rhs), self._axes = equation.eqn.params, equation.splits[:2], equation.axes
        self.numbers = self.params["dimension_numbers"]
        lhs, rhs = (atom.aval.shape for atom in equation.eqn.invars)
        self._elements = math.prod(lhs), math.prod(rhs)
        self.input = [lhs[i] for i in self.numbers.lhs_spec[2:]]
        self.filter = [rhs[i] for i in self.numbers.rhs_spec[2:]]
        self.output = [equation.eqn.outvars[0].aval.shape[i] for i in self.numbers.out_spec[2:]]
        self.groups, self.batch_groups = self.params["feature_group_count"], self.params["batch_group_count"]
        self.channels = lhs[self.numbers.lhs_spec[1]] // self.groups  # of the input, per group
        self.strides, self.padding = self.params["window_strides"], self.params["padding"]
        self.lhs_dilation, self.rhs_dilation = self.params["lhs_dilation"], self.params["rhs_dilation"]

    def split(self, *which: str) -> bool:
        """Whether a mesh axis splits one of these of the input: "batch", "channels", "space"."""
        batch, channels, *space = self.numbers.lhs_spec
        of = {"batch": [batch], "channels": [channels], "space": space}
        return any(self._parts(i) > 1 for name in which for i in of[name])

    def split_images(self) -> bool:
        """Whether a spatial axis is split along which this is a filter's gradient: its filter is as large as images, its result is not.

        If the convolution was strided, XLA splits the images only if the devices divide both.
        """
        space = zip(self.numbers.lhs_spec[2:], self.filter, self.output, self.rhs_dilation, strict=True)
        parts = [(self._parts(i), f, o, stride) for i, f, o, stride in space]
        return any(n > 1 and f > o and (f % n == 0 or stride == 1) for n, f, o, stride in parts)

    @property
    def has_wrong_halo(self) -> bool:
        """Return whether XLA's halo exchange is wrong: space and the filter's channels are sharded, and a mesh axis leaves the input whole.

        That holds for two shards along space if the input is larger than the filter, and otherwise for any number of them if the
        contracted channels are sharded.  XLA's partitioner moves the smaller operand.
        """
        lhs, rhs = (split or () for split in (self._lhs, self._rhs))
        if not rhs or any(rhs[i] for i in self.numbers.rhs_spec[2:]) or max(self.filter) == 1 or max(self.lhs_dilation) > 1:
            return False
        idle = {axis for axis, size in self._axes.items() if size > 1} - {axis for axes in lhs for axis in axes}
        parts = math.prod(self._parts(i) for i in self.numbers.lhs_spec[2:])
        outputs, inputs = (bool(rhs[i]) for i in self.numbers.rhs_spec[:2])
        larger = self._elements[0] > self._elements[1]
        return bool(idle) and (parts == 2 and (outputs or inputs) if larger else parts > 1 and inputs)

    @property
    def split_pointwise(self) -> bool:
        """Whether it has no window, and mesh axes split the channels of the images or of the filters."""
        of_filters = self._rhs is not None and any(self._rhs[i] for i in self.numbers.rhs_spec[:2])
        alone = {*self.filter, *self.strides, *self.lhs_dilation} == {1} and not any(map(any, self.padding))
        return alone and (self.split("channels") or of_filters)

    @property
    def in_own_layout(self) -> bool:
        """Whether it has the layout of XLA's CPU backend: channels last, and filters with the output's channels last."""
        last = len(self.filter) + 1
        images, space = (0, last, *range(1, last)), tuple(range(last - 1))
        return tuple(self.numbers.lhs_spec) == tuple(self.numbers.out_spec) == images and tuple(self.numbers.rhs_spec) == (
            last,
            last - 1,
            *space,
        )

    @property
    def is_dot(self) -> bool:
        """Whether it is the gradient of a filter of one tap, without strides: a matrix product."""
        return {*self.output} == {1} and self.groups == self.batch_groups == 1 and {*self.rhs_dilation} <= {1}

    def _parts(self, dimension: int) -> int:
        """How many parts of the input there are along it."""
        return math.prod(self._axes.get(axis, 1) for axis in self._lhs[dimension]) if self._lhs else 1

    def crops(self) -> Iterator[tuple[int, int, int]]:
        """Of each axis: the padding, and what a crop leaves of the input."""
        for n, d, (low, high) in zip(self.input, self.lhs_dilation, self.padding, strict=True):
            yield low, high, dilate(n, d) + min(low, 0) + min(high, 0)

    def __str__(self) -> str:
        steps = {"strides": self.strides, "lhs_dilation": self.lhs_dilation, "rhs_dilation": self.rhs_dilation}
        told = [f"{name} {'x'.join(map(str, n))}" for name, n in steps.items() if {*n} - {1}]
        told += [f"padding {'/'.join(f'{low}:{high}' for low, high in self.padding)}"] if any(map(any, self.padding)) else []
        groups = {"feature_group_count": self.groups, "batch_group_count": self.batch_groups}
        told += [f"{name} {n}" for name, n in groups.items() if n > 1]
        return "".join(f", {each}" for each in told)


@dataclasses.dataclass(frozen=True, eq=False)
class Planned:
    """A product of lax as jaxext's product, and what jaxext would choose for it."""

    eqn: JaxprEqn
    call: Call
    choice: Choice

    platform = property(lambda self: self.call.platform)

    @property
    def by(self) -> str:
        assert self.choice.plan is not None
        return f"{self.choice.implementation} {self.choice.plan.describe(self.choice.config)}"

    @property
    def as_lax(self) -> bool:
        """Whether the choice is lax's own product."""
        return self.choice.implementation == "xla" and getattr(self.choice.config, "algorithm", None) in AS_LAX

    @property
    def flops(self) -> float:
        form, open = owner[self.eqn.primitive]
        return flops.operations(form, self.call.extents, self.call.window)

    def __str__(self) -> str:
        form, open = owner[self.eqn.primitive]
        operands = " ".join(f"{slot}:{_typed(atom.aval, None)}" for slot, atom in zip(form.factors(open), self.eqn.invars, strict=False))
        return f"{self.call.op} {operands} -> {open}:{_typed(self.eqn.outvars[0].aval, None)}"

    @property
    def key(self) -> str:
        return f"{self} {self.call.window} {self.by}"
