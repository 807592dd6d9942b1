"""What an implementation is, and which one runs: a pure function of static facts.

A `Call` says what is asked of one device; an `Implementation` says whether it can (`supports` gives None or the reason why not), with which
configurations (`candidates`), whether it is expected to be faster than those after it (`gains`), and does it (`run`).  `choose` prefers the
first of the form's list that supports the call and gains by it: the list ends with `xla`, which always does.  If the call was measured
(`Measurement`), the fastest is taken instead, unless that is a tie: the ranges of its times and of the preferred one's overlap.  A user's
name for one leaves no other.  Nothing is timed here, and nothing enters that differs between the processes of a run, so each takes the same
decision.  It must not know any particular operation, nor where tables are kept.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax import lax

from jaxext.forms.window import Window
from jaxext.tables.table_format import Measurement


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """One product on one device: slots by name, sizes by label."""

    op: str  # the primitive's name, such as "conv2d_fprop"
    open: str  # the slot that is computed
    labels: Mapping[str, tuple[str, ...]]  # slot -> its labels, in order
    axes: Mapping[str, tuple[str, ...]]  # slot -> a name for each axis of its array; label N may have none, or N0, N1, ...
    sizes: Mapping[str, int]  # label -> elements, the product over its axes
    extents: Mapping[str, int]  # axis -> elements
    dtypes: Mapping[str, np.dtype]  # operand slot -> dtype
    dtype: np.dtype  # of the result
    window: Window | None
    precision: Any  # as lax canonicalises it
    platform: str  # "cpu", "cuda", "rocm", "tpu" or "other"
    arch: int | None  # compute capability of the CUDA device times 10, such as 90, if known
    # Who may still split this over devices (`_compat.lowered_by`): "nobody", or nobody more since XLA did by our "labels"; "xla", or, once
    # the program is exported, XLA "later".
    splitter: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the result."""
        return self.shape_of(self.open)

    def shape_of(self, slot: str) -> tuple[int, ...]:
        return tuple(self.extents[axis] for axis in self.axes[slot])

    @property
    def problem(self) -> str | None:
        """What is asked, in one line, by which tables know it; None where a size is symbolic."""
        if not all(isinstance(size, int) for size in self.sizes.values()):
            return None
        window = {} if self.window is None else self.window.sizes
        parts = [self.op, *(f"{label}={size}" for label, size in self.sizes.items() if label not in window)]
        if self.window is not None:
            for field in dataclasses.fields(self.window):
                per_axis = getattr(self.window, field.name)
                numbers = [":".join(map(str, n)) if isinstance(n, tuple) else str(n) for n in per_axis]
                parts.append(f"{field.name}={','.join(numbers)}")
        operands = " ".join(dtype.name for dtype in self.dtypes.values())
        return f"{' '.join(parts)} {operands} -> {self.dtype.name} precision={precision_name(self.precision)}"

    def flatten(self, operands: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The operands with exactly one axis per label; free, since the axes of a label are neighbours."""
        return {slot: x.reshape([self.sizes[label] for label in self.labels[slot]]) for slot, x in operands.items()}


def precision_name(precision: Any) -> str:
    if precision is None or precision == (lax.Precision.DEFAULT,) * 2:
        return "default"
    if isinstance(precision, tuple):
        return ",".join(str(p).lower() for p in precision)
    return "".join(str(precision).split())


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """The config of an implementation that has nothing else to choose."""

    algorithm: str


# Why a kernel that could stand in a program that is exported is not taken if nobody named it.
EXPORTED = "an exported program holds kernels only if they are named, since jax wants their custom calls to be allowed"


def no_kernel(call: Call, platform: str) -> str | None:
    """Why no kernel for `platform` can stand in this program, whatever it computes; None if one can.

    A size is symbolic, the platform is another, XLA's partitioner, which cannot split kernels, has the program, or it is not known for
    which GPU the program is compiled.
    """
    if symbolic := symbolic_size(call):
        return symbolic
    if call.platform != platform:
        return f"platform is {call.platform!r}, want {platform!r}"
    if call.splitter == "xla":
        return "XLA's partitioner, which cannot split a kernel, has this program: use jit with automatic axes, or a shard_map over all axes"
    if call.platform == "cuda" and call.arch is None:
        return (
            "not known for which GPU: there is none here, or those here are of several compute capabilities (see jaxext.use_target), "
            "or the program is for several platforms"
        )
    return None


def symbolic_size(call: Call) -> str | None:
    """Why nothing that must know the sizes can stand in this program, or None."""
    symbolic = [label for label, size in call.sizes.items() if not isinstance(size, int)]
    return f"the size of {symbolic[0]} is symbolic, want a number" if symbolic else None


class Implementation(Protocol):
    name: str

    def supports(self, call: Call) -> str | None:
        """None, or the reason for refusing."""

    def gains(self, call: Call) -> str | None:
        """None, or the reason why those after it are taken if nobody named one; asked only if it supports the call."""

    def candidates(self, call: Call) -> Sequence[Any]:
        """The configs, frozen dataclasses of whole numbers, words and truth values, with which it computes a call that it supports; the
        one expected to be fastest first."""
        ...

    def describe(self, call: Call, config: Any) -> str:
        """How the call would be computed, in a word or two, for `explain`."""
        ...

    def run(self, call: Call, config: Any, operands: Mapping[str, jax.Array]) -> jax.Array:
        """The result, in `call.shape` and `call.dtype`, of operands whose axes are `call.axes` (or flatten them)."""
        ...


def version_of(implementation: Any) -> str:
    """Of a user's implementation, the code: what it says itself, or a hash of the file that its class is written in."""
    if (version := implementation.version) is not None:
        if not isinstance(version, str) or not version.isprintable() or not 0 < len(version) <= 100:
            raise ValueError(f"register: {implementation.name} has the version {version!r}, want a word")
        return version
    try:
        code = pathlib.Path(inspect.getfile(type(implementation))).read_bytes()
    except (OSError, TypeError) as error:
        raise ValueError(f"register: {implementation.name} lies in no file, so it must have a `version` ({error})") from None
    return hashlib.sha256(code).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class Choice:
    implementation: Implementation | None  # None where the named one refuses
    config: Any  # one of its candidates
    why: str  # it was taken
    refusals: Mapping[str, str]  # name -> reason, for each other implementation


def choose(call: Call, implementations: Sequence[Implementation], named: str | None, measured: Sequence[Measurement] = ()) -> Choice:
    """The implementation for `call`, with what config, and why each other one was not taken; `measured` is what a table says of the call.

    Of an unnamed call's measurements xla's, the last implementation's, is one.  So the one that is taken by them was never slower than it
    beyond the noise.
    """
    able, refusals = {}, {}
    for implementation in implementations:
        if named is not None and implementation.name != named:
            refusals[implementation.name] = f"{named!r} was named"
        elif reason := _answer(call, implementation, "supports"):
            refusals[implementation.name] = reason
        else:
            able[implementation.name] = implementation
    preferred = _by_preference(call, named, able, refusals)
    counted = _counted(call, able, implementations[-1].name, measured)
    return _by_measurement(call, counted, preferred, able, refusals) if counted else preferred


def faster(one: Measurement, other: Measurement) -> bool:
    """Beyond the noise: the ranges of their times do not overlap."""
    return one.ms[2] < other.ms[0]


def _counted(call, able, last, measured) -> list[tuple[Measurement, Any]]:
    """The measurements of the candidates that there are still, the fastest first, each with its config.

    Those of xla, the last, count too where they are of candidates that are gone; their config is None.
    """
    found = {name: configs(call, able[name]) for name in {m.implementation for m in measured} & able.keys()}
    counted = []
    for measurement in sorted(measured, key=lambda m: m.ms[1]):
        name = measurement.implementation
        config = next((c for c in found.get(name, ()) if dataclasses.asdict(c) == measurement.config), None)
        if config is not None or name == last and name in able:
            counted.append((measurement, config))
    return counted


def _by_measurement(call, counted, preferred, able, refusals) -> Choice:
    """The preferred one, if no measurement that counts is faster beyond the noise; else the fastest.

    Where the fastest is of a candidate of xla's that is gone, the fastest of xla's others is taken, or else what xla prefers.
    """
    fastest, config = counted[0]
    taken, gone = fastest, ""
    if config is None:
        own = [(m, c) for m, c in counted if m.implementation == fastest.implementation and c is not None]
        taken, config = own[0] if own else (fastest, configs(call, able[fastest.implementation])[0])
        gone = "" if own else ", with a config that is no candidate any more"
    why = f"measured at {taken.ms[1]:.4g} ms{gone}"
    first = preferred.implementation and preferred.implementation.name
    tie = next((m for m, c in counted if (m.implementation, c) == (first, preferred.config)), None)
    if tie not in (None, taken) and not any(faster(m, tie) for m, _ in counted):
        taken, config = tie, preferred.config
        why = f"measured at {tie.ms[1]:.4g} ms, preferred in a tie with {described(fastest.implementation, fastest.config)}"
    refusals = dict(refusals)
    for name in able.keys() - {taken.implementation}:
        times = [m.ms[1] for m, c in counted if m.implementation == name and c is not None]
        refusals[name] = f"it was measured at {min(times):.4g} ms" if times else "it was not measured"
    return Choice(able[taken.implementation], config, why, refusals)


def described(implementation: str, config: Mapping[str, Any]) -> str:
    """Such as "xla algorithm=lax"."""
    return " ".join([implementation, *(f"{key}={value}" for key, value in config.items())])


def _by_preference(call, named, able, refusals) -> Choice:
    chosen, refusals = None, dict(refusals)
    for name, implementation in able.items():
        if chosen is not None:
            refusals[name] = f"{chosen.name!r} is preferred"
        elif reason := None if named else _answer(call, implementation, "gains"):
            refusals[name] = reason
        else:
            chosen = implementation
    if chosen is None:
        return Choice(None, None, "", refusals)
    return Choice(chosen, configs(call, chosen)[0], "named" if named else "preferred", refusals)


def _answer(call: Call, implementation: Implementation, question: str) -> str | None:
    """What `supports` or `gains` says."""
    reason = getattr(implementation, question)(call)
    if reason is not None and not isinstance(reason, str):
        raise TypeError(f"{call.op}: `{question}` of implementation {implementation.name!r} gave {reason!r}, want None or a reason")
    return reason


def configs(call: Call, implementation: Implementation) -> Sequence[Any]:
    """Its candidates, each of which a table could hold."""
    found = implementation.candidates(call)
    if not isinstance(found, Sequence) or not found or not all(map(_is_config, found)):
        wanted = "one or more frozen dataclasses of whole numbers, words and truth values"
        raise TypeError(f"{call.op}: `candidates` of implementation {implementation.name!r} gave {found!r}, want {wanted}")
    return found


def _is_config(config: Any) -> bool:
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        return False
    return all(type(value) in (int, str, bool) for value in dataclasses.asdict(config).values())


def run(
    call: Call,
    implementations: Sequence[Implementation],
    named: str | None,
    measured: Sequence[Measurement],
    operands: Mapping[str, jax.Array],
) -> jax.Array:
    choice = choose(call, implementations, named, measured)
    if choice.implementation is None:
        reason = choice.refusals.get(named or "", f"it has only {sorted(choice.refusals)}")
        raise NotImplementedError(f"{call.op}: implementation {named!r} does not support this call: {reason}")
    return computed(call, choice.implementation, choice.config, operands)


def computed(call: Call, implementation: Implementation, config: Any, operands: Mapping[str, jax.Array]) -> jax.Array:
    """What its `run` gives, if that is what was asked: else the program would go on with another shape or dtype than its types say."""
    y: Any = implementation.run(call, config, operands)
    if (getattr(y, "dtype", None), getattr(y, "shape", None)) != (call.dtype, call.shape):
        got = f"{y.dtype}{list(y.shape)}" if hasattr(y, "shape") else repr(y)
        raise TypeError(f"{call.op}: implementation {implementation.name!r} gave {got}, want {call.dtype}{list(call.shape)}")
    return y
