"""The cost of a form whose labels are split over devices, by the rules of `cost_model`: operations, bytes held, collectives."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from jaxext._messages import format_value
from jaxext.core.form import Form
from jaxext.core.window import Window, labels, meetings
from jaxext.parallel.shards import halo, senders

# Bytes that each of n devices in a ring sends, divided by the bytes of its result.
_RING: Mapping[str, Callable[[int], float]] = {
    "all-gather": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: n - 1,
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "collective-permute": lambda n: 1,
}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of the compiled program."""

    kind: str  # its name in HLO
    slot: str  # the slot that it moves
    over: tuple[str, ...]  # the split labels that it runs over
    devices: int  # in a group
    bytes: int  # of the result on one device

    @property
    def wire(self) -> float:
        """Bytes that each device sends."""
        return _RING[self.kind](self.devices) * self.bytes


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of one role, per device."""

    role: str
    flops: float  # multiplications and additions, without those with a zero of padding or dilation; the mean over the devices
    held: Mapping[str, int]  # slot -> bytes on one device: of the operands before, of the result after
    collectives: tuple[Collective, ...]  # in the order in which they run

    @property
    def wire(self) -> float:
        """Bytes that each device sends."""
        return sum(collective.wire for collective in self.collectives)


@dataclasses.dataclass(frozen=True)
class SplitForm:
    """A form of known sizes with split labels."""

    form: Form
    window: Window  # with no axes if the form has none
    sizes: Mapping[str, int]
    devices: Mapping[str, int]  # split label -> number of parts
    scattered: Mapping[str, str]
    sent: Mapping[str, tuple[str, str]]
    gathers: bool  # spatial axes are computed whole
    itemsize: int

    @functools.cached_property
    def axes(self) -> tuple[tuple[str, str, str], ...]:
        """The window's labels of input, filter and output, axis by axis."""
        return tuple(zip(*labels(self.window.rank), strict=True))

    @functools.cached_property
    def inputs(self) -> Mapping[str, str]:
        """Output's label -> input's label of the same axis."""
        return {output: input for input, _, output in self.axes}

    def parts(self, label: str) -> int:
        return self.devices.get(self.inputs.get(label, label), 1)

    def missing(self, slot: str) -> tuple[str, ...]:
        """The split labels that a slot lacks, without spatial axes that are computed whole."""
        has = {self.inputs.get(label, label) for label in self.form.labels[slot]}
        return tuple(label for label in self.devices if label not in has and not (self.gathers and label in self.form.window))

    def copies(self, slot: str) -> int:
        return math.prod(self.devices[label] for label in self.missing(slot))

    def bytes(self, slot: str, whole: Sequence[str] = ()) -> int:
        """Bytes of one device's part, as the product reads it, except that the labels in `whole` are not split."""
        parts = (1 if label in whole else self.parts(label) for label in self.form.labels[slot])
        return self.itemsize * math.prod(self.sizes[label] for label in self.form.labels[slot]) // math.prod(parts)

    def cost(self, open: str, role: str) -> Cost:
        operands, whole = self.form.operands(open), self.form.window if self.gathers else ()
        kept = {slot: self.copies(slot) if slot in self.scattered else 1 for slot in self.form.labels}
        held = {slot: self.bytes(slot, whole if slot == open else ()) // kept[slot] for slot in (*operands, open)}
        pairs = math.prod(self.sizes[label] // self.parts(label) for label in self.form.free)
        pairs = pairs / math.prod(self.sizes[label] for label in self.form.chosen) if self.form.chosen else pairs
        pairs *= math.prod(meetings(self.window, axis) for axis in range(len(self.axes)))
        computed_apart = math.prod(1 if self.gathers else self.parts(label) for label, _, _ in self.axes)
        collectives = [collective for slot in operands for collective in (*self.assemble(slot), *self.exchange(slot))]
        collectives += [*reversed(self.exchange(open)), *self.add(open, whole), *self.send(open)]
        return Cost(role, 2 * pairs / computed_apart, held, tuple(collectives))

    def assemble(self, slot: str) -> Iterator[Collective]:
        """Yield the collectives for an operand that is sent, or scattered, or whose spatial axes are computed whole."""
        yield from self.send(slot)
        if slot in self.scattered:
            yield Collective("all-gather", slot, self.missing(slot), self.copies(slot), self.bytes(slot))
        split = [label for label in self.form.labels[slot] if self.gathers and label in self.form.window and self.parts(label) > 1]
        for i in reversed(range(len(split))):
            yield Collective("all-gather", slot, (self.inputs.get(split[i], split[i]),), self.parts(split[i]), self.bytes(slot, split[i:]))

    def send(self, slot: str) -> Iterator[Collective]:
        """The all-to-all of a slot that is split another way outside of the product."""
        _, label = self.sent.get(slot, ("", ""))
        if self.parts(label) > 1:
            yield Collective("all-to-all", slot, (label,), self.parts(label), self.bytes(slot))

    def exchange(self, slot: str) -> list[Collective]:
        """The halo exchange of the input, axis by axis so that corners are included.  Its gradient's halo takes the reverse way."""
        permutes, local = [], dict(self.sizes)
        for label in self.form.labels[slot]:
            local[label] //= self.parts(label)
        for axis, (label, _, _) in enumerate(self.axes):
            if label in self.form.labels[slot] and not self.gathers:
                n, sides = self.parts(label), halo(self.window, axis, self.parts(label))
                row = self.itemsize * math.prod(local[other] for other in self.form.labels[slot] if other != label)
                sent = (rows for side in sides for rows in senders(side, local[label], n))
                permutes += [Collective("collective-permute", slot, (label,), n, rows * row) for rows in sent]
                local[label] += sum(sides)
        return permutes

    def add(self, open: str, whole: Sequence[str]) -> Iterator[Collective]:
        """The reduction of partial results, if a label that the result lacks is split."""
        if missing := self.missing(open):
            kind, kept = ("reduce-scatter", self.copies(open)) if open in self.scattered else ("all-reduce", 1)
            yield Collective(kind, open, missing, self.copies(open), self.bytes(open, whole) // kept)

    def check(self) -> None:
        for label in self.sizes:
            if self.sizes[label] % self.parts(label):
                split = f"{self.inputs[label]}, and {label} with it," if label in self.inputs else label
                raise ValueError(f"cost: sharding splits {split} into {self.parts(label)}, want a divisor of {label}={self.sizes[label]}")
        for slot, label in self.scattered.items():
            if slot not in self.form.slots or label not in self.form.labels[slot]:
                slots = "; ".join(f"{slot}: {' '.join(labels)}" for slot, labels in self.form.slots.items())
                raise ValueError(
                    f"cost: scattered is {format_value(label)} of {format_value(slot)}, want a slot and one of its labels ({slots})"
                )
            if self.copies(slot) == 1:
                raise ValueError(f"cost: scattered has {slot!r}, which has only one copy; want a slot that lacks a split label")
            if self.sizes[label] % (self.parts(label) * self.copies(slot)):
                many = f"{self.parts(label)} parts and {self.copies(slot)} copies"
                raise ValueError(f"cost: scattered {slot!r} has {label}={self.sizes[label]} in {many}, want their product to divide it")
        for slot, (outside, label) in self.sent.items():
            of_slot = self.form.labels.get(slot, ())
            if not {outside, label} <= {*of_slot} or self.parts(outside) > 1:
                slots = "; ".join(f"{slot}: {' '.join(labels)}" for slot, labels in self.form.slots.items())
                got = f"{format_value((outside, label))} of {format_value(slot)}"
                raise ValueError(f"cost: sent is {got}, want two labels of a slot, of which the first is not split ({slots})")
            if self.sizes[outside] % self.parts(label):
                want = f"want {self.parts(label)} parts of {outside}={self.sizes[outside]}"
                raise ValueError(f"cost: sent splits {slot!r} along {outside}, {want}")
