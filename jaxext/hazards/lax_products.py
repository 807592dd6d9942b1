"""The products that the doctor examines: an equation of lax in its place (`Equation`), or how jaxext would compute it (`Planned`)."""

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
from jaxext.core import flops
from jaxext.core.call import Call
from jaxext.core.choose import Choice
from jaxext.core.form import owner
from jaxext.core.window import dilate
from jaxext.hazards.split_axes import Split
from jaxext.tuning.explain import AS_LAX
from jaxext.tuning.walk import Step

PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")  # lax's primitives


@dataclasses.dataclass(frozen=True)
class Place:
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
    result: Split | None = None  # of the result, if it is known

    @property
    def name(self) -> str:
        return self.eqn.primitive.name

    @property
    def dtypes(self) -> list[np.dtype]:
        return [atom.aval.dtype for atom in self.eqn.invars[:2]]

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the result."""
        return self.eqn.outvars[0].aval.dtype

    @property
    def integers(self) -> bool:
        return not any(jnp.issubdtype(dtype, jnp.inexact) for dtype in self.dtypes)

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
    """Return a type with its split axes, such as "f32[8@data,32]"."""
    named = ["".join([str(n), "@" if axes else "", "+".join(axes)]) for n, axes in zip(aval.shape, split or ((),) * aval.ndim, strict=True)]
    return f"{aval.str_short(short_dtypes=True).partition('[')[0]}[{','.join(named)}]"


class Conv:
    """lax's convolution by its parts."""

    def __init__(self, equation: Equation):
        self.params, self._axes = equation.eqn.params, {axis: size for axis, size in equation.axes.items() if size > 1}
        self.numbers = self.params["dimension_numbers"]
        lhs, rhs = (atom.aval.shape for atom in equation.eqn.invars)
        self.input = [lhs[i] for i in self.numbers.lhs_spec[2:]]
        self.filter = [rhs[i] for i in self.numbers.rhs_spec[2:]]
        self.output = [equation.eqn.outvars[0].aval.shape[i] for i in self.numbers.out_spec[2:]]
        self.groups, self.batch_groups = self.params["feature_group_count"], self.params["batch_group_count"]
        self._grouped_sizes = lhs[self._grouped], rhs[self.numbers.rhs_spec[0]]
        self.channels = lhs[self.numbers.lhs_spec[1]] // self.groups  # of the input, per group
        self.strides, self.padding = self.params["window_strides"], self.params["padding"]
        self.lhs_dilation, self.rhs_dilation = self.params["lhs_dilation"], self.params["rhs_dilation"]
        unsplit: Any = ((),) * len(lhs)
        self._lhs, self._rhs, self._result = (split or unsplit for split in (*equation.splits, equation.result))
        self._output_axes = self._result[self.numbers.out_spec[1]]  # those that shard the groups, and so the channels of the result
        self._group_parts = self._count(self._lhs[self._grouped]), self._count(self._rhs[self.numbers.rhs_spec[0]])  # in input and filter
        self._larger = (self._rhs, self.numbers.rhs_spec) if math.prod(lhs) < math.prod(rhs) else (self._lhs, self.numbers.lhs_spec)

    def split(self, *which: str) -> bool:
        """Return whether a mesh axis splits one of these of the input: "batch", "channels", "space"."""
        batch, channels, *space = self.numbers.lhs_spec
        of = {"batch": [batch], "channels": [channels], "space": space}
        return any(self._count(self._lhs[i]) > 1 for name in which for i in of[name])

    @functools.cached_property
    def counted_again(self) -> dict[str, int]:
        """The mesh axes over which XLA adds up equal numbers, in a sum over all devices: those that leave the larger operand whole."""
        return self._without(*self._larger[0]) if self._is_summed else {}

    @functools.cached_property
    def _is_summed(self) -> bool:
        """Return whether XLA shards the smaller operand like the larger, exchanges halos, convolves and adds up over all devices.

        This is `PartitionConvolution` of its SPMD partitioner.
        """
        (_, channels, *space), (_, inputs, *taps) = self.numbers.lhs_spec, self.numbers.rhs_spec
        larger, (outer, inner, *spatial) = self._larger
        if not any(self._lhs) or not any(self._rhs) or larger[outer] or max(self.lhs_dilation) > 1 or self._is_parallel:
            return False
        if self.groups > 1 and (larger[inner] or not self._is_depthwise):
            return False
        if self.groups == self.batch_groups == 1:  # else XLA takes no axis for one of a matrix product
            pairs = [*zip(space, taps, self._kinds, strict=True)]
            contracted = [(channels, inputs), *((s, t) for s, t, kind in pairs if kind == "contracted")]
            if all(any(split[pair[i]] for pair in contracted) for i, split in enumerate((self._lhs, self._rhs))):
                return False
            if not any(self._lhs[s] or self._rhs[t] for s, t, kind in pairs if kind == "window"):
                return False
        return all(self._halo_fits(i, self._count(larger[s])) for i, s in enumerate(spatial))

    @property
    def misplaced(self) -> bool:
        """Return whether each device has groups of its own, and XLA permutes the result's dimensions the wrong way round."""
        batch, channels, *space = self.numbers.out_spec
        order = (batch, channels, *space) if self.batch_groups == 1 else (channels, batch, *space)
        to = dict(zip(self.numbers.lhs_spec, order, strict=True))
        return self._is_parallel and to[to[self._grouped]] != self._grouped

    @property
    def _is_parallel(self) -> bool:
        """Return whether each device has groups of its own."""
        groups, devices = max(self.groups, self.batch_groups), math.prod(self._axes.values())
        if groups == 1 or groups % devices or self.batch_groups > 1 and {*self._grouped_sizes} != {groups}:
            return False
        return devices in self._group_parts

    @property
    def _kinds(self) -> list[str]:
        """The kind of each spatial axis, as in a matrix product."""
        kinds, known = [], zip(self.input, self.filter, self.strides, self.lhs_dilation, self.rhs_dilation, self.padding, strict=True)
        for n, taps, stride, *dilation, padding in known:
            is_window = max(dilation) > 1 or any(padding)
            kinds.append("window" if is_window else "contracted" if n == taps else "free" if taps == stride == 1 else "window")
        return kinds

    def _halo_fits(self, i: int, count: int) -> bool:
        """Return whether the halos of a spatial axis in so many shards are no larger than a shard."""
        shard, taps = -(-self.input[i] // count), -(-self.filter[i] // count) * self.rhs_dilation[i]
        low = self.padding[i][0]
        high = self.strides[i] * (self.output[i] - 1) + 1 - self.rhs_dilation[i] - low
        return all(max((shard - taps) * j + low, (taps - shard) * j + high) <= shard for j in range(1, count))

    @property
    def _is_depthwise(self) -> bool:
        """Return whether a shard of the filter has one input channel."""
        return self.channels <= self._count(self._rhs[self.numbers.rhs_spec[1]])

    @property
    def _groups_devices(self) -> bool:
        """Return whether XLA groups devices by the channels of the result: an operand's groups have as many parts, and none has more."""
        return 1 < self._count(self._output_axes) == max(self._group_parts)

    @property
    def mixes_groups(self) -> bool:
        """Return whether XLA multiplies other groups, or divides groups over more devices than there are: it partitions a convolution
        without windows as a matrix product."""
        groups, output_parts, group_parts = max(self.groups, self.batch_groups), self._count(self._output_axes), self._group_parts
        if groups == 1 or self._is_summed:
            return False
        if "window" in self._kinds:
            too_many = output_parts > groups and not self.split("space")
            if self.groups > 1:
                return too_many and self.channels == 1 < group_parts[0]
            return too_many and self._groups_devices and not self._splits_both or self._splits_batch
        if self._splits_batch or output_parts > 1 and not any(self._lhs) and len({*self._grouped_sizes}) > 1 and not self._is_parallel:
            return True
        if self.batch_groups > 1:
            return output_parts > 1 and max(output_parts, *group_parts) > groups
        return output_parts > 1 and (group_parts[0] > groups or not self._is_depthwise)

    @property
    def _splits_batch(self) -> bool:
        """Return whether XLA splits the images of batch groups as the result's batch is split."""
        if self.groups > 1 or not self._result[self.numbers.out_spec[0]]:
            return False
        input_parts, filter_parts = self._group_parts
        return not self._splits_both and filter_parts <= input_parts == self._count(self._output_axes)

    @property
    def _splits_both(self) -> bool:
        """Return whether the groups of the input are split, and the input channels of the filter."""
        return bool(self._lhs[self._grouped] and self._rhs[self.numbers.rhs_spec[1]])

    @property
    def frees_twice(self) -> bool:
        """Return whether XLA frees memory twice: channels are split without a window, and an axis splits neither input nor result."""
        if "window" in self._kinds or self.groups == 1 or not self._is_depthwise or self._is_summed:
            return False
        space = [(self._lhs[i], kind) for i, kind in zip(self.numbers.lhs_spec[2:], self._kinds, strict=True)]
        taken = {axis for axes, _ in space for axis in axes} | {*self._rhs[self.numbers.rhs_spec[1]]}
        used = [*self._result, *(axes for axes, kind in space if kind == "contracted")]
        return self._groups_devices and not taken & {*self._output_axes} and bool(self._without(*used))

    @property
    def _grouped(self) -> int:
        """The dimension of the input that has the groups."""
        return self.numbers.lhs_spec[0 if self.batch_groups > 1 else 1]

    def _without(self, *used: Sequence[str]) -> dict[str, int]:
        """The mesh axes, or what is left of them, with their sizes."""
        parts = [*map(self._part, {each for axes in used for each in axes})]
        left = {axis: size // math.prod(n for name, n in parts if name == axis) for axis, size in self._axes.items()}
        return {axis: size for axis, size in left.items() if size > 1}

    def _count(self, axes: Sequence[str]) -> int:
        """The number of shards that the axes make."""
        return math.prod(size for _, size in map(self._part, axes))

    def _part(self, axis: str) -> tuple[str, int]:
        """The name and the size of a mesh axis, or of a part of one, such as "data:(1)2"."""
        name, _, part = axis.partition(":")
        return name, int(part.partition(")")[2]) if part else self._axes.get(name, 1)

    @property
    def in_own_layout(self) -> bool:
        """Return whether it has the layout of XLA's CPU backend: channels last, and filters with the output's channels last."""
        last = len(self.filter) + 1
        images, space = (0, last, *range(1, last)), tuple(range(last - 1))
        specs = tuple(map(tuple, (self.numbers.lhs_spec, self.numbers.out_spec, self.numbers.rhs_spec)))
        return specs == (images, images, (last, last - 1, *space))

    def crops(self) -> Iterator[tuple[int, int, int]]:
        """Yield for each axis the padding, and what a crop leaves of the input."""
        for n, d, (low, high) in zip(self.input, self.lhs_dilation, self.padding, strict=True):
            yield low, high, dilate(n, d) + min(low, 0) + min(high, 0)

    def __str__(self) -> str:
        steps = {"strides": self.strides, "lhs_dilation": self.lhs_dilation, "rhs_dilation": self.rhs_dilation}
        parts = [f"{name} {'x'.join(map(str, n))}" for name, n in steps.items() if {*n} - {1}]
        parts += [f"padding {'/'.join(f'{low}:{high}' for low, high in self.padding)}"] if any(map(any, self.padding)) else []
        groups = {"feature_group_count": self.groups, "batch_group_count": self.batch_groups}
        parts += [f"{name} {n}" for name, n in groups.items() if n > 1]
        return "".join(f", {part}" for part in parts)


@dataclasses.dataclass(frozen=True, eq=False)
class Planned:
    """A product of lax as jaxext's product, and what jaxext would choose for it."""

    eqn: JaxprEqn
    call: Call
    choice: Choice
    types: tuple[str, ...]  # of operands and result, as the program stores them

    platform = property(lambda self: self.call.platform)

    @property
    def by(self) -> str:
        assert self.choice.plan is not None
        return f"{self.choice.implementation} {self.choice.plan.describe(self.choice.config)}"

    @property
    def as_lax(self) -> bool:
        """Return whether the choice is lax's own product."""
        return self.choice.implementation == "xla" and getattr(self.choice.config, "algorithm", None) in AS_LAX

    @property
    def integers(self) -> bool:
        return not all(jnp.issubdtype(self.call.dtypes[slot], jnp.inexact) for slot in self.call.factors)

    @property
    def flops(self) -> float:
        form, open = owner[self.eqn.primitive]
        return flops.operations(form, self.call.extents, self.call.window)

    def __str__(self) -> str:
        return f"{self.call.op} {' '.join(self.types[:-1])} -> {self.types[-1]}"

    @property
    def key(self) -> str:
        return f"{self} {self.call.window} {self.by}"
