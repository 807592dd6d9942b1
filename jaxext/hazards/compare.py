"""Times lax's product and jaxext's choice for it, each alone or in a loop of its own, side by side on this machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
from jax import lax

from jaxext.core.call import symbolic_size
from jaxext.core.choose import replacing_lax
from jaxext.core.form import owner
from jaxext.core.implementation import Plan
from jaxext.hazards.lax_products import Equation, Planned
from jaxext.tuning import random_operands, timing
from jaxext.tuning.truth import alone

REPEATS = 9  # samples of each
PATIENCE_S = 3  # seconds for the samples of one product
STEPS = 3  # of a loop, each with operands of its own

# Family -> the algorithm of `xla` that is the same program as lax's.
AS_LAX = {"conv": "lax", "matmul": "dot_general", "ragged": "expanded"}


@dataclasses.dataclass(frozen=True)
class Measured:
    """Quartiles of milliseconds."""

    lax_ms: tuple[float, float, float]
    jaxext_ms: tuple[float, float, float]

    def __str__(self) -> str:
        lax, ours = self.lax_ms[1], self.jaxext_ms[1]
        return f"measured here: lax {lax:.3g} ms, jaxext {ours:.3g} ms ({lax / ours:.3g}x as fast)"


def compare(product: Equation | Planned) -> Measured | None:
    """The times of both on random operands.

    None if a size is symbolic, the family has no program of lax's, or what is slow is that devices split the product.
    """
    both = _planned(product) if isinstance(product, Planned) else _in_loop(product)
    if both is None:
        return None
    functions, operands, calls = both
    clock, _ = timing.timer()
    samplers = {name: clock.sampler(timing.compile(function, operands)) for name, function in functions.items()}
    ms = timing.take(samplers, REPEATS, PATIENCE_S)
    lax_ms, jaxext_ms = (timing.quartiles([time / calls for time in ms[name]]) for name in ("lax", "jaxext"))
    return Measured(lax_ms, jaxext_ms)


# The functions of lax and of jaxext, their operands, and how many products each call makes.
Both = tuple[dict[str, Callable], list[jax.Array], int]


def _planned(planned: Planned) -> Both | None:
    call, choice = planned.call, planned.choice
    family = owner[planned.eqn.primitive][0].family
    if symbolic_size(call) or family.name not in AS_LAX or choice.plan is None:
        return None
    plan = family.implementations[-1].plan(call)
    assert isinstance(plan, Plan)  # the last implementation plans every call
    as_lax = dataclasses.replace(plan.configs[0], algorithm=AS_LAX[family.name])
    return {"lax": alone(plan, as_lax), "jaxext": alone(choice.plan, choice.config)}, random_operands.of(call), 1


def _in_loop(equation: Equation) -> Both | None:
    avals = [atom.aval for atom in equation.eqn.invars]
    if not equation.in_loop or equation.axes or not all(isinstance(n, int) for aval in avals for n in aval.shape):
        return None

    def function(in_place_of_lax: bool) -> Callable:
        def step(operands):
            with replacing_lax(in_place_of_lax):
                return equation.eqn.primitive.bind(*operands, **equation.eqn.params)

        return lambda *operands: lax.map(step, operands)

    operands = random_operands.normal([(STEPS, *aval.shape) for aval in avals], [np.dtype(aval.dtype) for aval in avals])
    return {"lax": function(False), "jaxext": function(True)}, operands, STEPS
