"""The truth about a call: its results by xla, as precisely as possible.  And a candidate by itself, as a function of the operands."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxext.core.call import Call
from jaxext.core.choose import replacing_lax
from jaxext.core.implementation import Implementation, Plan
from jaxext.tuning import random_operands, timing


def alone(plan: Plan, config: Any) -> Callable:
    """A function of the operands that is this candidate and no other product."""

    def function(*operands):
        with replacing_lax(False):
            return plan.call.checked(plan.implementation.name, plan.run(config, dict(zip(plan.call.dtypes, operands, strict=True))))

    return function


def of(
    call: Call, xla: Implementation, *sets: Sequence[jax.Array], real: Any = np.float64, precision: lax.Precision | None = None
) -> list[list[jax.Array]]:
    """The results for each set of operands, in dtypes as wide as `real`, by one program.  float64 needs `jax.enable_x64`.

    Integers wrap around, and a sum of booleans is "any".  Operands that must be valid, such as ranges of rows, keep their dtype.
    """
    kept = random_operands.valid(call)

    def wide(dtypes):
        complex_ = np.result_type(real, np.complex64)
        numbers = {name: complex_ if jnp.issubdtype(d, jnp.complexfloating) else np.dtype(real) for name, d in dtypes.items()}
        return numbers | {name: d for name, d in dtypes.items() if name in kept}

    dtypes, results = wide(call.dtypes), wide(call.results)
    further = {name: results[name] for name in call.further}
    precisions = precision and (precision,) * 2
    plan: Any = xla.plan(dataclasses.replace(call, dtypes=dtypes, dtype=results[call.open], further=further, precision=precisions))
    each = [[x.astype(dtype) for x, dtype in zip(operands, dtypes.values(), strict=True)] for operands in sets]
    program = timing.compile(alone(plan, plan.configs[0]), each[0]).compiled
    exact = [jax.block_until_ready(jax.tree.leaves(program(*operands))) for operands in each]
    if jnp.issubdtype(call.dtype, jnp.inexact):
        return exact
    return [[y.astype(np.int64).astype(call.dtype) for y in results] for results in exact]
