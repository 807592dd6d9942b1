"""The algorithm that the `xla` convolution takes: the one whose expected cost on a CPU is least; on GPUs by a rule.

zeros      an axis is empty, so nothing is computed
lax        lax's own convolution
padded     the same of images that are padded before, where XLA would exchange them with a filter that is larger
phases     residues of the outputs as channels of few convolutions: for input dilation
folded     the same for wgrad; else phases, a convolution for each
shifts     shifted inputs times weights, elementwise: for fprop
rows       a loop over output rows: for wgrad
loop       one dense convolution per b and g, in a loop: for groups, batched filters, per-example gradients
dots       one batched dot per tap; and for integers on GPUs, and groups that XLA may still partition
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxext.core.call import Splitter
from jaxext.core.window import Window
from jaxext.ops.conv import xla_dots as conv_dots
from jaxext.ops.conv import xla_lax as conv_lax
from jaxext.ops.conv import xla_loop as conv_loop
from jaxext.ops.conv import xla_phases as conv_phases
from jaxext.ops.conv import xla_rates as conv_rates
from jaxext.ops.conv import xla_rows as conv_rows
from jaxext.ops.conv import xla_shifts as conv_shifts
from jaxext.ops.conv.xla_rates import Cost
from jaxext.ops.conv.xla_work import Conv, Work

GPUS = ("cuda", "rocm")


class Plan(NamedTuple):
    """An algorithm, the plan of each convolution that it is made of, and its cost on a CPU."""

    algorithm: str
    parts: Mapping[Conv, Plan] = {}
    cost: Cost | None = None


def conv_of(open: str, sizes: Mapping[str, int], window: Window, dtype) -> Conv:
    """The convolution that a call is; dgrad is fprop with y as the input.  `dtype` is that of both operands (`promote`)."""
    B, N, G, C, K = (sizes[label] for label in "BNGCK")
    if open == "x":
        return Conv("y", B, N, G, K, C, window.transposed.cropped[1], np.dtype(dtype), dgrad=True)
    return Conv(open, B, N, G, C, K, window.cropped[1], np.dtype(dtype))


def plan(conv: Conv, algorithm: str | None, *, splitter: Splitter, platform: str) -> Plan:
    """The plan that is taken, or the one by this algorithm, which need not be among those that are worth measuring.

    Raises:
      ValueError: the algorithm does not compute this convolution.
    """
    found = plans(conv, splitter=splitter, platform=platform)
    if algorithm is None:
        return found[0]
    if algorithm not in PARTS:
        return next((plan for plan in found if plan.algorithm == algorithm), Plan(algorithm))
    named = _plan_by(algorithm, conv, functools.partial(plans, splitter=splitter, platform=platform))
    if named is None:
        raise ValueError(f"algorithm: got {algorithm!r}, which does not compute {conv}")
    return named


@functools.lru_cache(maxsize=4096)
def plans(conv: Conv, *, splitter: Splitter, platform: str) -> tuple[Plan, ...]:
    """The plan that is taken, then the others."""
    only = _only(conv, splitter, platform)
    if only:
        return (Plan(only),)
    part = functools.partial(plans, splitter=splitter, platform=platform)
    names = WORK if splitter.by_labels else ("lax", "padded", "phases", "folded")  # as XLA may still partition them
    found = [plan for plan in (_plan_by(name, conv, part) for name in names) if plan]
    if platform in GPUS:
        first = _algorithm_of_gpu(conv)
        found.sort(key=lambda plan: plan.algorithm != first)
    else:
        found = _by_cost(conv, found)
    return tuple(found if splitter.by_labels else found[:1])


def _only(conv, splitter, platform):
    """The algorithm where there is no choice."""
    window = conv.window
    extents = (conv.B, conv.N, conv.G, conv.C, conv.K, *window.input, *window.filter, *window.output)
    if any(isinstance(n, int) and n == 0 for n in extents):
        return "zeros"
    if platform in GPUS and not jnp.issubdtype(conv.dtype, jnp.inexact):
        return "dots"  # on GPUs XLA refuses integer convolutions, saturates them, or computes groups of them wrongly
    if not (conv.groups == 1 or splitter.by_labels) or conv.open == "w" and splitter.splits_windows:
        return "dots"  # XLA's partitioner multiplies these by the size of a mesh axis that splits nothing, or gathers them
    if splitter is Splitter.XLA:
        return "lax"  # it would gather what phases interleave
    if not all(isinstance(n, int) for n in extents) or not jnp.issubdtype(conv.dtype, jnp.inexact):
        return "lax"
    if platform not in GPUS and conv.dtype.itemsize > 4 and conv.groups == 1 and not conv.dilated:
        return "lax"  # the rates are of at most 32 bits
    return None


def _plan_by(algorithm: str, conv: Conv, plans_of: Callable[[Conv], Sequence[Plan]]) -> Plan | None:
    work = WORK[algorithm](conv)
    if work is None:
        return None
    if algorithm not in PARTS:
        return Plan(algorithm, {}, conv_rates.cost(work))
    parts = PARTS[algorithm](conv)

    def chosen(choose) -> tuple[Mapping[Conv, Plan], Cost]:
        plan_of = {part: choose(plans_of(part)) for part in parts}
        return plan_of, conv_rates.cost(work, [cost for part in parts if (cost := plan_of[part].cost)])

    plan_of, cost = chosen(lambda found: found[0])
    if cost.build_ms > MOST_BUILD_MS:
        plan_of, cost = chosen(lambda found: min(found, key=lambda plan: plan.cost.build_ms if plan.cost else 0.0))
    return Plan(algorithm, plan_of, cost)


WORK: dict[str, Callable[[Conv], Work | None]] = {
    "lax": conv_lax.work,
    "padded": conv_lax.work_of_padded,
    "phases": conv_phases.work_of_phases,
    "folded": conv_phases.work_of_folded,
    "shifts": conv_shifts.work,
    "rows": conv_rows.work,
    "loop": conv_loop.work,
    "dots": conv_dots.work,
}
# The convolutions that these are made of.
PARTS: dict[str, Callable[[Conv], list[Conv]]] = {"phases": conv_phases.parts_of_phases, "folded": conv_phases.parts_of_folded}


def _by_cost(conv: Conv, found: Sequence[Plan]) -> list[Plan]:
    """The least expected cost first; what takes too much more memory than lax, or too much longer to compile, last."""
    lax, arrays = found[0].cost, conv.dtype.itemsize * (conv.x + conv.w + conv.y)
    assert lax is not None

    def order(plan):
        cost = plan.cost
        most = MOST_BYTES_IF_FAST if cost.run_ms <= FAST * lax.run_ms else MOST_BYTES
        over = arrays + cost.bytes > most * (arrays + lax.bytes) or cost.build_ms > lax.build_ms + MOST_BUILD_MS
        beyond = max(0.0, arrays + cost.bytes - MOST_BYTES * (arrays + lax.bytes))
        return over, (cost.total + MS_OF_BYTE * beyond) * (1 if plan.algorithm == "lax" else MARGIN)

    return sorted(found, key=order)


# The most memory, in multiples of lax's: more is allowed where it takes at most half of the time.
MOST_BYTES, MOST_BYTES_IF_FAST, FAST = 1.5, 3.0, 0.5
# The price of a byte beyond MOST_BYTES: four times what a copy of it takes.
MS_OF_BYTE = 1e-7
# The longest that a rewrite may take to build beyond lax.
MOST_BUILD_MS = 1500.0
# A rewrite is taken if this many times its cost is less than lax's: expectations are uncertain.
MARGIN = 1.2


def _algorithm_of_gpu(conv):
    """cuDNN's convolution, with or without groups, except for mostly zero inputs, and for products so few that XLA fuses them.

    Of these cuDNN has kernels for square depthwise filters in 16 bits without strides, which took two thirds of the fusion's time on an
    H100; with strides of 2 cuDNN took 2.7 times as long.

    A loop would be thousands of tiny kernels.  A strided dense dgrad has a transposed window, so its input is dilated, but cuDNN supports
    it directly.
    """
    window, B, G, C, K = conv.window, conv.B, conv.G, conv.C, conv.K
    of_cudnn = conv.dgrad and B * G == 1 and max((*window.stride, *window.filter_dilation), default=1) == 1
    if 1 < math.prod(window.input_dilation) <= conv_phases.MOST_PHASES and not of_cudnn:
        return "phases"
    few = C * K <= FEW_ON_GPU and C * math.prod(window.filter) <= FOLDED_ON_GPU
    depthwise = B * C * K == 1 and window.plain_square and conv.dtype.itemsize == 2
    return "shifts" if conv.open == "y" and G > 1 and window.rank and few and not depthwise else "lax"


# Up to this C·K and this many terms, XLA's GPU compiler fuses padding, elementwise sum and the operations after it into one kernel.
FEW_ON_GPU, FOLDED_ON_GPU = 16, 9
