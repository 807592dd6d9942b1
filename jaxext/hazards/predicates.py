"""The parts of which hazards are declared: predicates on what the doctor looks at, and what a hazard costs, in words."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax

from jaxext.core.call import Call
from jaxext.hazards.hazard import GPUS
from jaxext.hazards.subjects import PRODUCTS, Conv, Equation, Planned


def of_conv(holds: Callable[[Conv, Equation], bool]) -> Callable[[Equation], bool]:
    """A predicate on lax's convolutions."""
    return lambda equation: equation.conv is not None and holds(equation.conv, equation)


def exchanges_batch(equation: Equation) -> bool:
    """Return whether a product's batch and sum are split, and its result's batch like the sum, with another axis like the batch."""
    if equation.name != "dot_general" or equation.result is None or None in equation.splits:
        return False

    def axes(split, at):
        return {axis for i in at for axis in split[i]}

    (lhs, rhs), result = equation.splits, equation.result
    contracted, batched = equation.eqn.params["dimension_numbers"]
    sums, batch = (axes(lhs, one) & axes(rhs, other) for one, other in (contracted, batched))
    own, others = (axes(result, at) for at in (range(len(batched[0])), range(len(batched[0]), len(result))))
    return any(equation.axes.get(one) != equation.axes.get(other) for one, other in itertools.product(batch & others, sums & own))


def by_eigen(conv: Conv, equation: Equation) -> bool:
    """Return whether XLA's CPU compiler has Eigen compute this convolution, without a loop of its own."""
    floats = all(jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize <= 4 for dtype in equation.dtypes)
    return floats and conv.groups == conv.batch_groups == 1 and {*conv.lhs_dilation, *conv.rhs_dilation} <= {1}


def of_planned(holds: Callable[[Call], bool]) -> Callable[[Planned], bool]:
    """A predicate on products that jaxext would not compute as lax does, without those of integers."""

    def found(planned: Planned) -> bool:
        inexact = all(jnp.issubdtype(planned.call.dtypes[slot], jnp.inexact) for slot in planned.call.factors)
        return inexact and not planned.as_lax and holds(planned.call)

    return found


def in_several_groups(call: Call) -> bool:
    return call.window is not None and call.sizes["G"] * call.sizes["B"] > 1


def dilated(call: Call) -> bool:
    """Return whether lax's convolution has an input that is full of zeros."""
    window = call.window
    return window is not None and max(*window.input_dilation, *(window.stride if call.open == "x" else ()), 1) > 1


LEVELS = (lax.Precision.DEFAULT, lax.Precision.HIGH, lax.Precision.HIGHEST)


def float32_at_most(highest: lax.Precision):
    """Return whether float32 operands, or complex ones of them, are multiplied with a precision up to this one; of two the higher holds."""

    def holds(equation: Equation) -> bool:
        precision = equation.eqn.params.get("precision")
        default = precision is None or precision == lax.DotAlgorithmPreset.DEFAULT
        asked = {lax.Precision.DEFAULT} if default else {*(precision if isinstance(precision, tuple) else ())}
        level = max(asked, key=LEVELS.index, default=lax.Precision.HIGHEST)
        narrow = all(dtype in (jnp.float32, jnp.complex64) for dtype in equation.dtypes)
        return equation.name in PRODUCTS and narrow and LEVELS.index(level) <= LEVELS.index(highest)

    return holds


def factor(equation: Equation) -> str:
    assert equation.conv is not None
    return f"the result is {math.prod(equation.conv.counted_again.values())} times too large"


def gathered(equation: Equation) -> str:
    aval = equation.eqn.invars[0].aval
    return f"{math.prod(aval.shape) * aval.dtype.itemsize / 2**20:.3g} MiB of input gathered on every device"


def zeros(planned: Planned) -> str:
    window = planned.call.window
    assert window is not None
    steps = math.prod(window.input_dilation) * (math.prod(window.stride) if planned.call.open == "x" else 1)
    return f"up to {steps} times the multiplications in lax" if planned.platform in GPUS else ""


def all_groups(planned: Planned) -> str:
    return f"{planned.call.sizes['G']} times the multiplications in lax"
