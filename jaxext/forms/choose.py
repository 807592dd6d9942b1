"""Which implementation computes a call: a pure function of static facts.

Each implementation plans the call or refuses.  `choose` prefers the first plan, in the family's order, that is expected to gain: the order
ends with `xla`, which always plans and gains.  If the call was measured (`Measurement`), the fastest is taken instead, unless that is a
tie: the ranges of its times and of the preferred one's overlap.  A user's name for one leaves no other.  Nothing is timed here, and nothing
enters that differs between the processes of a run, so each takes the same decision.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxext.forms.call import Call
from jaxext.forms.implementation import Implementation, Plan
from jaxext.tables.table_format import Measurement


@dataclasses.dataclass(frozen=True)
class Choice:
    plan: Plan | None  # None where the named implementation refuses
    config: Any  # one of the plan's
    why: str  # it was taken
    refusals: Mapping[str, str]  # name -> reason, for each other implementation

    @property
    def implementation(self) -> str | None:
        """Its name."""
        return self.plan and self.plan.implementation.name


def choose(call: Call, implementations: Sequence[Implementation], named: str | None, measured: Sequence[Measurement] = ()) -> Choice:
    """The implementation for `call`, with what config, and why each other one was not taken; `measured` is what a table says of the call.

    Of an unnamed call's measurements xla's, the last implementation's, is one.  So the one that is taken by them was never slower than it
    beyond the noise.
    """
    plans: dict[str, Plan] = {}
    refusals: dict[str, str] = {}
    for implementation in implementations:
        if named is not None and implementation.name != named:
            refusals[implementation.name] = f"{named!r} was named"
        elif isinstance(plan := implementation.plan(call), str):
            refusals[implementation.name] = plan
        else:
            plans[implementation.name] = plan
    preferred = _by_preference(named, plans, refusals)
    counted = _counted(plans, implementations[-1].name, measured)
    return _by_measurement(counted, preferred, plans, refusals) if counted else preferred


def faster(one: Measurement, other: Measurement) -> bool:
    """Beyond the noise: the ranges of their times do not overlap."""
    return one.ms[2] < other.ms[0]


def _by_preference(named: str | None, plans: Mapping[str, Plan], refused: Mapping[str, str]) -> Choice:
    chosen, refusals = None, dict(refused)
    for name, plan in plans.items():
        if chosen is not None:
            refusals[name] = f"{chosen!r} is preferred"
        elif reason := None if named else plan.only_if_named or plan.gains():
            refusals[name] = reason
        else:
            chosen = name
    if chosen is None:
        return Choice(None, None, "", refusals)
    return Choice(plans[chosen], plans[chosen].configs[0], "named" if named else "preferred", refusals)


def _counted(plans: Mapping[str, Plan], last: str, measured: Sequence[Measurement]) -> list[tuple[Measurement, Any]]:
    """The measurements of the candidates that there are still, the fastest first, each with its config.

    Those of xla, the last, count too where they are of candidates that are gone; their config is None.
    """
    counted = []
    for measurement in sorted(measured, key=lambda m: m.ms[1]):
        name = measurement.implementation
        configs = plans[name].configs if name in plans else ()
        config = next((c for c in configs if dataclasses.asdict(c) == measurement.config), None)
        if config is not None or name == last and name in plans:
            counted.append((measurement, config))
    return counted


def _by_measurement(
    counted: Sequence[tuple[Measurement, Any]], preferred: Choice, plans: Mapping[str, Plan], refused: Mapping[str, str]
) -> Choice:
    """The preferred one, if no measurement that counts is faster beyond the noise; else the fastest.

    Where the fastest is of a candidate of xla's that is gone, the fastest of xla's others is taken, or else what xla prefers.
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
    """Such as "xla algorithm=lax"."""
    return " ".join([implementation, *(f"{key}={value}" for key, value in config.items())])


def run(
    call: Call,
    implementations: Sequence[Implementation],
    named: str | None,
    measured: Sequence[Measurement],
    operands: Mapping[str, jax.Array],
) -> jax.Array:
    choice = choose(call, implementations, named, measured)
    if choice.plan is None:
        reason = choice.refusals.get(named or "", f"it has only {sorted(choice.refusals)}")
        raise NotImplementedError(f"{call.op}: implementation {named!r} does not support this call: {reason}")
    return computed(choice.plan, choice.config, operands)


def computed(plan: Plan, config: Any, operands: Mapping[str, jax.Array]) -> jax.Array:
    """What the plan gives, if that is what was asked: else the program would go on with another shape or dtype than its types say."""
    y: Any = plan.run(config, operands)
    call = plan.call
    if (getattr(y, "dtype", None), getattr(y, "shape", None)) != (call.dtype, call.shape):
        got = f"{y.dtype}{list(y.shape)}" if hasattr(y, "shape") else repr(y)
        raise TypeError(f"{call.op}: implementation {plan.implementation.name!r} gave {got}, want {call.dtype}{list(call.shape)}")
    return y
