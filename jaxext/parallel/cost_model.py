"""Cost model: operations, memory and communication per device of a form whose labels are split over devices, from the labels alone.

A label split into n parts splits every slot that has it.  A slot that lacks a split label is replicated n times.  Then

    a split label that the result keeps       costs nothing
    a split label that the result lacks       is contracted: an all-reduce adds the n partial results
    a slot that is scattered                  each replica keeps one n-th: an all-gather assembles an operand, and a reduce-scatter
                                              replaces the all-reduce of a result
    a slot that is sent                       outside of the product another of its labels is split: an all-to-all
    a split spatial axis                      collective-permutes move its halo to the neighbours, or an all-gather moves the whole axis

A spatial axis has one label, that of the input, for both input and output; the filter is whole.  For a result of b bytes per device, each
of n devices in a ring sends

    all-gather, all-to-all  (n-1)/n·b      reduce-scatter  (n-1)·b
    all-reduce, a reduce-scatter and an all-gather of its result,  2(n-1)/n·b
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxext._messages import dtype_named, format_value
from jaxext.core.form import Form, owner
from jaxext.core.window import Window, dilate, labels, meetings
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
        """The bytes that each device sends."""
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
        """The bytes that each device sends."""
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

    def bytes(self, slot: str, unsplit: Sequence[str] = ()) -> int:
        """Bytes of one device's part, as the product reads it, except that the labels in `unsplit` are not split."""
        parts = (1 if label in unsplit else self.parts(label) for label in self.form.labels[slot])
        return self.itemsize * math.prod(self.sizes[label] for label in self.form.labels[slot]) // math.prod(parts)

    def cost(self, open: str, role: str) -> Cost:
        operands, unsplit = self.form.operands(open), self.form.window if self.gathers else ()
        kept = {slot: self.copies(slot) if slot in self.scattered else 1 for slot in self.form.labels}
        held = {slot: self.bytes(slot, unsplit if slot == open else ()) // kept[slot] for slot in (*operands, open)}
        pairs = math.prod(self.sizes[label] // self.parts(label) for label in self.form.free)
        pairs = pairs / math.prod(self.sizes[label] for label in self.form.chosen) if self.form.chosen else pairs
        pairs *= math.prod(meetings(self.window, axis) for axis in range(len(self.axes)))
        computed_apart = math.prod(1 if self.gathers else self.parts(label) for label, _, _ in self.axes)
        collectives = [collective for slot in operands for collective in (*self.assemble(slot), *self.exchange(slot))]
        collectives += [*reversed(self.exchange(open)), *self.add(open, unsplit), *self.send(open)]
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

    def add(self, open: str, unsplit: Sequence[str]) -> Iterator[Collective]:
        """The reduction of partial results, if a label that the result lacks is split."""
        if missing := self.missing(open):
            kind, kept = ("reduce-scatter", self.copies(open)) if open in self.scattered else ("all-reduce", 1)
            yield Collective(kind, open, missing, self.copies(open), self.bytes(open, unsplit) // kept)

    def check(self) -> None:
        slots = "; ".join(f"{slot}: {' '.join(labels)}" for slot, labels in self.form.slots.items())
        for label in self.sizes:
            if self.sizes[label] % self.parts(label):
                split = f"{self.inputs[label]}, and {label} with it," if label in self.inputs else label
                raise ValueError(f"cost: sharding splits {split} into {self.parts(label)}, want a divisor of {label}={self.sizes[label]}")
        for slot, label in self.scattered.items():
            if slot not in self.form.slots or label not in self.form.labels[slot]:
                got = f"{format_value(label)} of {format_value(slot)}"
                raise ValueError(f"cost: scattered is {got}, want a slot and one of its labels ({slots})")
            if self.copies(slot) == 1:
                raise ValueError(f"cost: scattered has {slot!r}, which has only one copy; want a slot that lacks a split label")
            if self.sizes[label] % (self.parts(label) * self.copies(slot)):
                many = f"{self.parts(label)} parts and {self.copies(slot)} copies"
                raise ValueError(f"cost: scattered {slot!r} has {label}={self.sizes[label]} in {many}, want their product to divide it")
        for slot, (outside, label) in self.sent.items():
            slot_labels = self.form.labels.get(slot, ())
            if not {outside, label} <= {*slot_labels} or self.parts(outside) > 1:
                got = f"{format_value((outside, label))} of {format_value(slot)}"
                raise ValueError(f"cost: sent is {got}, want two labels of a slot, of which the first is not split ({slots})")
            if self.sizes[outside] % self.parts(label):
                want = f"want {self.parts(label)} parts of {outside}={self.sizes[outside]}"
                raise ValueError(f"cost: sent splits {slot!r} along {outside}, {want}")


def cost(
    form: str,
    sharding: Mapping[str, int],
    *,
    sizes: Mapping[str, int],
    dtype: DTypeLike = jnp.float32,
    window_strides: Sequence[int] | None = None,
    padding: str | Sequence[tuple[int, int]] = "SAME",
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    spatial: str = "halo",
    scattered: Mapping[str, str] | None = None,
    sent: Mapping[str, tuple[str, str]] | None = None,
) -> dict[str, Cost]:
    """Predict the cost per device of each role of a form whose labels are split over devices.

        matmul    c[b,m,n] = Σ_k a[b,m,k] b[b,k,n]
                  roles nn (c), nt (a), tn (b)
        conv2d    y[b,n,p,q,g,k] = Σ_{r,s,c} x̃[b,n,p + r,q + s,g,c] w[b,g,k,r,s,c]
                  roles fprop (y), dgrad (x), wgrad (w)

    The slot in parentheses is the result; the other two are the operands.  The spatial labels (input and filter) are W and S for conv1d,
    H, W and R, S for conv2d, and D, H, W and T, R, S for conv3d.  No device is needed and nothing is compiled.

    Args:
      form: "matmul", "conv1d", "conv2d", "conv3d", or the name of a form declared by `jaxext.extend.define`.
      sharding: label -> the number of devices that split it.  The numbers of several labels multiply.  A spatial axis is named by the
        input's label (D, H, W), and its output is split alike.
      sizes: label -> elements of the whole arrays.  The output's spatial sizes are derived.  Labels in all three slots (B, G) default to
        1.  C and K of a convolution are per group.
      dtype: the dtype of operands and result.
      window_strides, padding, lhs_dilation, rhs_dilation: as in `jax.lax.conv_general_dilated`.
      spatial: how a split spatial axis is computed.  "halo": each device computes its part, as in `jaxext.parallel.halo_conv`.  "gather":
        each device computes the whole axis, as under `jit`.
      scattered: slot -> the label along which its replicas are scattered. {"a": "M"} with N split is `all_gather_matmul`, {"c": "M"} with
        K split is `matmul_reduce_scatter`, and {"b": "K"} with M split is data parallelism with scattered parameters ("FSDP", "ZeRO").
        The two collective matmuls send the same bytes in n-1 collective-permutes.  Under `jit` XLA decides what to gather, and may send
        more.
      sent: slot -> (label, split label): outside of the form, the devices that split the second label split the first instead.  With B,
        the experts, split, {"a": ("M", "B"), "c": ("M", "B")} sends rows to their experts and results back, as
        `jaxext.parallel.expert_parallel` does if all experts have equally many rows, and equally many from each device.

    Returns:
      role -> its `Cost`: `flops`, bytes `held` by each slot, `collectives` with their kind, group and bytes, and bytes on the `wire`.
      Roles are independent: in a training step, wgrad may also reuse the input that fprop gathered, with its halo.

    Examples:
      >>> step = cost("matmul", {"M": 8}, sizes=dict(M=65536, K=8192, N=28672), dtype="bfloat16")  # data parallelism
      >>> step["nn"].collectives, step["tn"].collectives[0].kind, step["tn"].wire / 2**20
      ((), 'all-reduce', 784.0)

    Raises:
      TypeError: `dtype` is not a dtype.
      ValueError: a form, label, slot or option is unknown; a size is missing or not divisible by its parts; a scattered slot is not
        replicated; a sent slot lacks a label; `padding` is invalid.
    """
    known = forms()
    if not isinstance(form, str) or form not in known:
        raise ValueError(f"cost: form is {format_value(form)}, want one of {', '.join(known)}")
    if not isinstance(spatial, str) or spatial not in ("halo", "gather"):
        raise ValueError(f"cost: spatial is {format_value(spatial)}, want 'halo' or 'gather'")
    product = known[form]
    rank = len(product.window) // 3
    sizes = _sizes(product, rank, sizes)
    window = _window(rank, sizes, padding, window_strides=window_strides, lhs_dilation=lhs_dilation, rhs_dilation=rhs_dilation)
    splittable = (*product.free, *labels(rank)[0])
    if unknown := sharding.keys() - {*splittable}:
        raise ValueError(f"cost: sharding splits {', '.join(map(format_value, unknown))}, want labels of {', '.join(splittable)}")
    devices = {label: _positive(f"sharding of {label}", n) for label, n in sharding.items()}
    split = SplitForm(
        form=product,
        window=window,
        sizes=sizes | window.sizes,
        devices={label: n for label, n in devices.items() if n != 1},
        scattered=dict(scattered or {}),
        sent=dict(sent or {}),
        gathers=spatial == "gather",
        itemsize=dtype_named("cost", "dtype", dtype).itemsize,
    )
    split.check()
    return {role: split.cost(open, role) for open, role in product.roles.items()}


def forms() -> dict[str, Form]:
    """The forms of all families, by name."""
    return {form.name: form for form, _ in owner.values() if isinstance(form, Form)}


def _sizes(form: Form, rank: int, given: Mapping[str, int]) -> dict[str, int]:
    """The size of every label but the output's."""
    inputs, filters, _ = labels(rank)
    batch = [label for label in form.free if all(label in names for names in form.slots.values())]
    sizes = dict.fromkeys(batch, 1) | dict(given)
    wanted = (*form.free, *inputs, *filters)
    if sizes.keys() != set(wanted):
        optional = f", of which {', '.join(batch)} may be left out" if batch else ""
        raise ValueError(f"cost: sizes has {', '.join(map(str, given)) or 'no labels'}; want {', '.join(wanted)}{optional}")
    return {label: _positive(f"size of {label}", size) for label, size in sizes.items()}


def _window(rank: int, sizes: Mapping[str, int], padding, **steps: Sequence[int] | None) -> Window:
    """The geometry, as lax understands padding."""
    inputs, filters, _ = labels(rank)
    for name, entries in dict(steps, padding=padding).items():
        if entries is not None and not isinstance(entries, str) and not (isinstance(entries, Sequence) and len(entries) == rank):
            raise ValueError(f"cost: {name} is {format_value(entries)}, want one entry for each of {rank} spatial axes")
    strides, lhs_dilation, rhs_dilation = (tuple(_positive(name, n) for n in entries or (1,) * rank) for name, entries in steps.items())
    input, filter = (tuple(sizes[label] for label in names) for names in (inputs, filters))
    if isinstance(padding, str):
        if padding.upper() not in ("SAME", "SAME_LOWER", "VALID"):
            raise ValueError(f"cost: padding is {format_value(padding)}, want 'SAME', 'SAME_LOWER', 'VALID' or (low, high) pairs")
        dilated = tuple(map(dilate, input, lhs_dilation)), tuple(map(dilate, filter, rhs_dilation))
        padding = lax.padtype_to_pads(*dilated, strides, padding) if rank else ()
    pads = tuple((operator.index(low), operator.index(high)) for low, high in padding)
    window = Window(input=input, filter=filter, stride=strides, padding=pads, input_dilation=lhs_dilation, filter_dilation=rhs_dilation)
    if not all(window.output):
        raise ValueError(f"cost: the output of {window} has sizes {window.output}, want a filter that fits into the padded input")
    return window


def _positive(what: str, n: int) -> int:
    if not isinstance(n, numbers.Integral) or n < 1:
        raise ValueError(f"cost: {what} is {format_value(n)}, want a positive integer")
    return int(n)
