"""What an implementation is, and which one runs: a pure function of static facts.

A `Call` says what is asked of one device; an `Implementation` says whether it can (`supports` gives None or the reason why not), whether
it is expected to be faster than those after it (`gains`), and does it (`run`).  `choose` takes the one that the user named, or else the
first of the form's list that supports the call and gains by it: the list ends with `xla`, which always does.  No timing enters, and nothing
that differs between the processes of a run, so each takes the same decision.  It must not know any particular operation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from jaxext._window import Window


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """One product on one device: slots by name, sizes by label."""

    op: str  # the primitive's name, such as "conv2d_fprop"
    open: str  # the slot that is computed
    labels: Mapping[str, tuple[str, ...]]  # slot -> its labels, in order
    axes: Mapping[str, tuple[str, ...]]  # slot -> a name for each axis of its array; label N may have none, or N0, N1, ...
    sizes: Mapping[str, int]  # label -> elements, the product over its axes
    shape: tuple[int, ...]  # of the result, an entry per axis
    dtypes: Mapping[str, np.dtype]  # operand slot -> dtype
    dtype: np.dtype  # of the result
    window: Window | None
    precision: Any  # as lax canonicalises it
    platform: str  # "cpu", "cuda", "rocm", "tpu" or "other"
    arch: int | None  # compute capability of the CUDA device times 10, such as 90, if known
    # Who may still split this over devices (`_compat.lowered_by`): "nobody", or nobody more since XLA did by our "labels"; "xla", or, once
    # the program is exported, XLA "later".
    splitter: str

    def flatten(self, operands: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The operands with exactly one axis per label; free, since the axes of a label are neighbours."""
        return {slot: x.reshape([self.sizes[label] for label in self.labels[slot]]) for slot, x in operands.items()}


class Implementation(Protocol):
    name: str

    def supports(self, call: Call) -> str | None:
        """None, or the reason for refusing."""

    def gains(self, call: Call) -> str | None:
        """None, or the reason why those after it are taken if nobody named one; asked only if it supports the call."""

    def describe(self, call: Call) -> str:
        """How the call would be computed, in a word or two, for `explain`."""
        ...

    def run(self, call: Call, operands: Mapping[str, jax.Array]) -> jax.Array:
        """The result, in `call.shape` and `call.dtype`, of operands whose axes are `call.axes` (or flatten them)."""
        ...


@dataclasses.dataclass(frozen=True)
class Choice:
    implementation: Implementation | None  # None where the named one refuses
    refusals: Mapping[str, str]  # name -> reason, for each other implementation


def choose(call: Call, implementations: Sequence[Implementation], named: str | None) -> Choice:
    """The implementation for `call`, and why each other one was not taken."""
    chosen, refusals = None, {}
    for implementation in implementations:
        if named is not None and implementation.name != named:
            refusals[implementation.name] = f"{named!r} was named"
        elif reason := implementation.supports(call) or (None if named else implementation.gains(call)):
            refusals[implementation.name] = reason
        elif chosen is not None:
            refusals[implementation.name] = f"{chosen.name!r} is preferred"
        else:
            chosen = implementation
    return Choice(chosen, refusals)


def run(call: Call, implementations: Sequence[Implementation], named: str | None, operands: Mapping[str, jax.Array]) -> jax.Array:
    choice = choose(call, implementations, named)
    if choice.implementation is None:
        reason = choice.refusals.get(named or "", f"it has only {sorted(choice.refusals)}")
        raise NotImplementedError(f"{call.op}: implementation {named!r} does not support this call: {reason}")
    return choice.implementation.run(call, operands)
