"""Times lax's product and jaxext's choice for it, each alone, side by side on this machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxext.forms.call import symbolic_size
from jaxext.forms.choose import computed, replacing_lax
from jaxext.forms.form import owner
from jaxext.forms.implementation import Plan
from jaxext.hazards.subjects import Planned
from jaxext.tuning import random_operands, timing

REPEATS = 9  # samples of each
PATIENCE_S = 3  # seconds for the samples of one product

# Family -> the algorithm of `xla` that is the same program as lax's.
AS_LAX = {"conv": "lax", "matmul": "dot_general", "ragged": "expanded"}


@dataclasses.dataclass(frozen=True)
class Measured:
    """Quartiles of milliseconds."""

    lax_ms: tuple[float, float, float]
    jaxext_ms: tuple[float, float, float]

    def __str__(self) -> str:
        lax, ours = self.lax_ms[1], self.jaxext_ms[1]
        return f"measured here: lax {lax:.3g} ms, jaxext {ours:.3g} ms ({lax / ours:.3g} times as fast)"


def compare(planned: Planned) -> Measured | None:
    """The times of both on random operands, or None if a size is symbolic or the family has no program of lax's."""
    call, choice = planned.call, planned.choice
    family = owner[planned.eqn.primitive][0].family
    if symbolic_size(call) or family.name not in AS_LAX or choice.plan is None:
        return None
    plan = family.implementations[-1].plan(call)
    assert isinstance(plan, Plan)  # the last implementation plans every call
    lax = dataclasses.replace(plan.configs[0], algorithm=AS_LAX[family.name])
    operands = random_operands.normal([call.shape_of(slot) for slot in call.dtypes], list(call.dtypes.values()))
    clock, _ = timing.timer()
    both = {"lax": (plan, lax), "jaxext": (choice.plan, choice.config)}
    samplers = {name: clock.sampler(timing.compile(_function(*way), operands)) for name, way in both.items()}
    ms = timing.take(samplers, REPEATS, PATIENCE_S)
    return Measured(timing.quartiles(ms["lax"]), timing.quartiles(ms["jaxext"]))


def _function(plan: Plan, config: Any) -> Callable:
    def function(*operands: jax.Array):
        with replacing_lax(False):
            return computed(plan, config, dict(zip(plan.call.dtypes, operands, strict=True)))

    return function
