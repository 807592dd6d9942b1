"""Chooses the implementation of a call: a pure function of static facts.

Each implementation plans the call or refuses.  `choose` prefers the first plan, in the family's order, whose `not_preferred` has no reason
against it.  The order ends with `xla`, which always plans and has none.  If the call was measured (`Measurement`), the fastest candidate is
taken instead, unless it ties with the preferred one: the ranges of their times overlap.  If the user names an implementation, no other is
considered.  Nothing is timed here, and no input differs between the processes of a run, so all processes choose alike.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxext._scope import user_context
from jaxext.core.call import Call
from jaxext.core.implementation import Implementation, Plan
from jaxext.core.invariant import Invariant, part_of, run_parts
from jaxext.tables import active
from jaxext.tables.table_format import Measurement

# False while an implementation is lowered, since these are written in lax.
replacing_lax = user_context("in_place_of_lax", False)


@dataclasses.dataclass(frozen=True)
class Choice:
    plan: Plan | None  # None if the named implementation refuses
    config: Any  # one of the plan's
    why: str  # the reason for the choice
    refusals: Mapping[str, str]  # name -> reason, for each other implementation
    parts: tuple[Call, Call] | None = None  # if the plan is that of a part: the call, and the part

    @property
    def implementation(self) -> str | None:
        """The name of the chosen implementation."""
        return self.plan and self.plan.implementation.name

    @property
    def compute(self) -> Callable[[Mapping[str, jax.Array]], Any]:
        """`compute(operands)` gives the result, or several, for `Call.checked`.  Call it while `replacing_lax` is False."""
        assert self.plan is not None
        run = functools.partial(self.plan.run, self.config)
        if self.parts is None:
            return run
        call, part = self.parts
        return lambda operands: run_parts(call, part, operands, lambda own: part.checked(self.implementation, run(own)))


def choose(call: Call, implementations: Sequence[Implementation], named: str | None, measured: Sequence[Measurement] = ()) -> Choice:
    """Choose an implementation and a config for `call`, and give the reason against each other one.  `measured` comes from a table.

    The measurements of an unnamed call include xla, the last implementation.  A choice by measurement is therefore never slower than xla
    beyond the noise.
    """
    plans: dict[str, Plan] = {}
    refusals: dict[str, str] = {}
    for implementation in implementations:
        if named is not None and implementation.name != named:
            refusals[implementation.name] = f"{named!r} was named"
        elif isinstance(plan := implementation.planned(call), str):
            refusals[implementation.name] = plan
        else:
            plans[implementation.name] = plan
    preferred = _preferred_choice(named, plans, refusals)
    counted = _counted(plans, implementations[-1].name, measured)
    return _measured_choice(counted, preferred, plans, refusals) if counted else preferred


def planned(call: Call, named: str | Invariant | None) -> tuple[str | None, Call | None]:
    """The name of the implementation, and the part of the call for which it is chosen, without measurements, if it is not all of it."""
    return (named.name, part_of(call, named.name)) if isinstance(named, Invariant) else (named, None)


def faster(one: Measurement, other: Measurement) -> bool:
    """Return whether `one` is faster beyond the noise: the ranges of their times do not overlap."""
    return one.ms[2] < other.ms[0]


def _preferred_choice(named: str | None, plans: Mapping[str, Plan], refused: Mapping[str, str]) -> Choice:
    """The first that is preferred and does not yield; if that is the last, xla, the first that is preferred and yields, if there is one."""
    chosen = second = None
    refusals = dict(refused)
    for number, (name, plan) in enumerate(plans.items(), start=1):
        if reason := None if named else plan.only_if_named or plan.not_preferred():
            refusals[name] = reason
        elif not named and plan.yields():
            second = second or name
        else:
            chosen = second if second and number == len(plans) else name
            break
    chosen = chosen or second
    if chosen is None:
        return Choice(None, None, "", refusals)
    refusals |= {name: f"{chosen!r} is preferred" for name in plans if name != chosen and name not in refusals}
    return Choice(plans[chosen], plans[chosen].configs[0], "named" if named else "preferred", refusals)


def _counted(plans: Mapping[str, Plan], last: str, measured: Sequence[Measurement]) -> list[tuple[Measurement, Any]]:
    """The measurements of candidates that still exist, the fastest first, each with its config.

    Measurements of xla, the last implementation, count even if their candidate no longer exists; their config is None.
    """
    counted = []
    for measurement in sorted(measured, key=lambda m: m.ms[1]):
        name = measurement.implementation
        configs = plans[name].configs if name in plans else ()
        config = next((c for c in configs if dataclasses.asdict(c) == measurement.config), None)
        if config is not None or name == last and name in plans:
            counted.append((measurement, config))
    return counted


def _measured_choice(
    counted: Sequence[tuple[Measurement, Any]], preferred: Choice, plans: Mapping[str, Plan], refused: Mapping[str, str]
) -> Choice:
    """The preferred candidate if no measurement is faster beyond the noise, else the fastest.

    If the fastest is a candidate of xla that no longer exists, take xla's fastest existing candidate, or else xla's preferred one.
    """
    fastest, config = counted[0]
    taken, gone = fastest, ""
    if config is None:
        own = [(m, c) for m, c in counted if m.implementation == fastest.implementation and c is not None]
        taken, config = own[0] if own else (fastest, plans[fastest.implementation].configs[0])
        gone = "" if own else ", with a config that is no candidate any more"
    why = f"measured at {taken.ms[1]:.4g} ms{gone}"
    tie = next((m for m, c in counted if (m.implementation, c) == (preferred.implementation, preferred.config)), None)
    if tie not in (None, taken) and not any(faster(m, tie) for m, _ in counted):
        taken, config = tie, preferred.config
        why = f"measured at {tie.ms[1]:.4g} ms, preferred in a tie with {described(fastest.implementation, fastest.config)}"
    refusals = dict(refused)
    for name in plans.keys() - {taken.implementation}:
        times = [m.ms[1] for m, c in counted if m.implementation == name and c is not None]
        refusals[name] = f"it was measured at {min(times):.4g} ms" if times else "it was not measured"
    return Choice(plans[taken.implementation], config, why, refusals)


def described(implementation: str, config: Mapping[str, Any]) -> str:
    """Return an implementation and its config as text, such as "xla algorithm=lax"."""
    return " ".join([implementation, *(f"{key}={value}" for key, value in config.items())])


def chosen(call: Call, implementations: Sequence[Implementation], named: str | Invariant | None) -> Choice:
    """Choose how a call is computed, by the active table.

    Raises:
      NotImplementedError: the named implementation refuses the call.
    """
    with replacing_lax(False):
        name, part = planned(call, named)
        choice = _usable(part or call, implementations, name, () if part else active.measured(call))
        if choice.plan is None:
            reason = choice.refusals.get(name or "", f"it has only {sorted(choice.refusals)}")
            raise NotImplementedError(f"{call.op}: implementation {name!r} does not support this call: {reason}")
        if part is not None and choice.plan.implementation.rows_by_config:
            plan = choice.plan.implementation.planned(call)
            if isinstance(plan, Plan) and choice.config in plan.configs:
                return dataclasses.replace(choice, plan=plan)  # the bits of its rows are those that parts by this config have
        return choice if part is None else dataclasses.replace(choice, parts=(call, part))


def _usable(call: Call, implementations: Sequence[Implementation], named: str | None, measured: Sequence[Measurement]) -> Choice:
    """Choose as `choose` does.  If nobody named the implementation, one whose kernel cannot be compiled here gives way, with a warning."""
    choice = choose(call, implementations, named, measured)
    while named is None and choice.plan is not None and (reason := choice.plan.fails(choice.config)):
        kernel = f"{call.op}: the {choice.implementation} kernel {choice.plan.describe(choice.config)}"
        warnings.warn(f"{kernel} cannot be compiled here, so another implementation is used: {reason}", stacklevel=2)
        implementations = [each for each in implementations if each is not choice.plan.implementation]
        choice = choose(call, implementations, named, measured)
    return choice
