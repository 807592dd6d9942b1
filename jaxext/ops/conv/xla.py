"""The `xla` implementation of convolution: plain XLA ops, by the algorithm whose expected cost on a CPU is least; on GPUs by a rule.

zeros      an axis is empty, so nothing is computed
lax        lax's own convolution
padded     the same of images that are padded before, where XLA would exchange them with a filter that is larger
phases     residues of the outputs as channels of few convolutions: for input dilation
folded     the same for wgrad; else phases, a convolution for each
slices     convolutions of the slices of the first of three axes, whose taps are channels or convolutions of their own
shifts     shifted inputs times weights, elementwise: for fprop
rows       a loop over output rows: for wgrad
loop       one dense convolution per b and g, in a loop: for groups, batched filters, per-example gradients
dots       one batched dot per tap; and for integers on GPUs, and groups that XLA may still partition
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxext import _compat
from jaxext.core.call import Call, Partitioner
from jaxext.core.implementation import Algorithm, Implementation, Plan, file_of, files_of, hash_of
from jaxext.core.window import Window
from jaxext.ops.conv.xla_dots import Dots
from jaxext.ops.conv.xla_elementwise import FEW_ON_GPU, FOLDED_ON_GPU, Rows, Shifts
from jaxext.ops.conv.xla_lax import Lax, Loop, Padded, cropped, reverses
from jaxext.ops.conv.xla_phases import MOST_PHASES, Folded, Phases
from jaxext.ops.conv.xla_plan import Conv, ConvPlan, cost
from jaxext.ops.conv.xla_slices import Slices
from jaxext.ops.conv.xla_views import moveaxis, zeros

GPUS = ("cuda", "rocm")


class XlaConv(Implementation):
    """It supports every call."""

    name = "xla"
    version = "of its files"

    def code(self, platform: str) -> str:
        return hash_of([*files_of(self), file_of(Window)])

    def not_preferred(self, call: Call) -> str | None:
        return None

    def plan(self, call: Call) -> XlaConvPlan:
        return XlaConvPlan(self, call)

    def expected(self, call: Call) -> Sequence[str]:
        if call.platform != "cpu" or call.in_loop:
            return []
        return [f"{name} {plan.cost}" for name, plan in self.plan(call).found.items() if plan.cost]


class XlaConvPlan(Plan):
    """The plans of a call, one by each algorithm that is worth measuring.

    dgrad is fprop with y as the input and the filter reversed, arrays are cropped, and have one dtype: `conv` is what remains to compute.
    """

    def __init__(self, implementation: XlaConv, call: Call):
        super().__init__(implementation, call)
        self.conv, self.window = Conv.of(call)

    @functools.cached_property
    def found(self) -> Mapping[str, ConvPlan]:
        """The plans by the name of the algorithm, first the one that is taken."""
        # a transposed window does not say that the result is empty
        found: list[ConvPlan] = [Zeros(self.conv)] if self.call.empty else [*plans(self.conv)]
        if self.call.in_loop and isinstance(found[0], Lax):
            found.insert(0, Loop(self.conv))  # which has the layout that is fast in a loop
        return {plan.name: plan for plan in found}

    @functools.cached_property
    def configs(self) -> Sequence[Algorithm]:
        return [*map(Algorithm, self.found)]

    def describe(self, config: Algorithm) -> str:
        return str(self.found[config.algorithm])

    def run(self, config: Algorithm, operands: Mapping[str, jax.Array]) -> jax.Array:
        call, conv, plan = self.call, self.conv, self.found[config.algorithm]
        operands = call.flatten(operands)
        if call.empty:
            return zeros(call.shape, call.dtype, *operands.values())
        if not call.partitioner.by_labels:
            operands = {slot: z if slot == "x" else _with_whole_outputs(slot, z) for slot, z in operands.items()}
        a, b = operands["y" if conv.dgrad else "x"], operands["y" if conv.open == "w" else "w"]
        if conv.dgrad and not (isinstance(plan, Lax) and reverses(conv)):
            b = _reversed(b, conv.window.rank)
        a, _ = cropped(a, self.window)
        return plan.run(a.astype(conv.dtype), b.astype(conv.dtype)).astype(call.dtype).reshape(call.shape)


def _with_whole_outputs(slot, z):
    """Keep z's output channels on every device if there are several groups or filters.

    XLA's partitioner aborts in batched products if a mesh axis splits the groups and also the output channels of a group.
    """
    groups, axis = {"w": (z.shape[0] * z.shape[1], 2), "y": (z.shape[0] * z.shape[-2], z.ndim - 1)}[slot]
    return z if groups == 1 else _compat.unsplit(z, [axis])


def _reversed(w, rank):
    """The filter of dgrad: (B, G, K, *filter, C) -> (B, G, C, *reversed filter, K).

    XLA makes one transposition of several if no axis of size 1 is between them.
    """
    alone = w.shape[:2] == (1, 1)
    w = w.reshape(w.shape[2:]) if alone else w
    last = w.ndim - 1
    w = lax.rev(w, tuple(range(last - rank, last)))
    w = moveaxis(w, (last, last - rank - 1), (last - rank - 1, last))
    return lax.expand_dims(w, (0, 1)) if alone else w


class Zeros(ConvPlan):
    """A plan without products, for a result of zeros."""

    name = "zeros"

    def run(self, a, b):
        return zeros(self.conv.shape, self.conv.result, a, b)


ALGORITHMS: Sequence[type[ConvPlan]] = (Lax, Padded, Phases, Folded, Slices, Shifts, Rows, Loop, Dots)
WHOLE = (Lax, Padded, Phases, Folded)  # those without products of groups, which XLA may still partition


@functools.lru_cache(maxsize=4096)
def plans(conv: Conv) -> tuple[ConvPlan, ...]:
    """The plan that is taken, then the others."""
    only = _only(conv)
    if only:
        return (only(conv),)
    by_labels = conv.partitioner.by_labels
    found = [plan for algorithm in (ALGORITHMS if by_labels else WHOLE) if (plan := _planned(algorithm, conv))]
    if conv.platform in GPUS:
        first = _algorithm_of_gpu(conv)
        found.sort(key=lambda plan: not isinstance(plan, first))
    else:
        found = _by_cost(conv, found)
    return tuple(found if by_labels else found[:1])


def _only(conv: Conv) -> type[ConvPlan] | None:
    """The algorithm where there is no choice."""
    window = conv.window
    extents = (conv.B, conv.N, conv.G, conv.C, conv.K, *window.input, *window.filter, *window.output)
    if any(isinstance(n, int) and n == 0 for n in extents):
        return Zeros
    if conv.platform in GPUS and not jnp.issubdtype(conv.dtype, jnp.inexact):
        return Dots  # on GPUs XLA refuses integer convolutions, saturates them, or computes groups of them wrongly
    if not (conv.groups == 1 or conv.partitioner.by_labels) or conv.open == "w" and conv.partitioner.splits_windows:
        return Dots  # XLA's partitioner multiplies these by the size of a mesh axis that splits nothing, or gathers them
    if conv.partitioner is Partitioner.XLA:
        return Lax  # it would gather what phases interleave
    if not all(isinstance(n, int) for n in extents) or not jnp.issubdtype(conv.dtype, jnp.inexact):
        return Lax
    if conv.platform not in GPUS and conv.dtype.itemsize > 4 and conv.groups == 1 and not conv.dilated:
        return Lax  # the rates are of at most 32 bits
    return None


def _planned(algorithm: type[ConvPlan], conv: Conv) -> ConvPlan | None:
    """The plan by an algorithm, or None.  Its parts are the fastest, or those that build fastest if the others take too long or too much
    memory."""
    work = algorithm.work(conv)
    if work is None:
        return None
    choices = [plans(part) for part in algorithm.split(conv)]
    parts = [found[0] for found in choices]
    of_parts, most = cost(work, parts), MOST_BYTES_IF_FAST * (_arrays(conv) + Lax.work(conv).bytes)
    if of_parts.build_ms > MOST_BUILD_MS or _arrays(conv) + of_parts.bytes > most:
        parts = [min(found, key=lambda plan: plan.cost.build_ms if plan.cost else 0.0) for found in choices]
    return algorithm(conv, tuple(parts), cost(work, parts))


def _arrays(conv: Conv) -> int:
    """The bytes of the operands and the result."""
    return conv.dtype.itemsize * (conv.x + conv.w + conv.y)


def _by_cost(conv: Conv, found: Sequence[ConvPlan]) -> list[ConvPlan]:
    """The least expected cost first; what takes too much more memory than lax, or too much longer to compile, last."""
    lax, arrays = found[0].cost, _arrays(conv)
    of_lax = IN_LOOPS if conv.open == "w" and conv.G > 1 else 1
    assert lax is not None

    def order(plan):
        cost = plan.cost
        most = MOST_BYTES_IF_FAST if cost.run_ms <= FAST * lax.run_ms else MOST_BYTES
        over = arrays + cost.bytes > most * (arrays + lax.bytes) or cost.build_ms > lax.build_ms + MOST_BUILD_MS
        beyond = max(0.0, arrays + cost.bytes - MOST_BYTES * (arrays + lax.bytes))
        return over, (cost.total + MS_OF_BYTE * beyond) * (of_lax if isinstance(plan, Lax) else MARGIN)

    return sorted(found, key=order)


# The most memory, in multiples of lax's: more is allowed where it takes at most half of the time.
MOST_BYTES, MOST_BYTES_IF_FAST, FAST = 1.5, 3.0, 0.5
# The price of a byte beyond MOST_BYTES: four times what a copy of it takes.
MS_OF_BYTE = 1e-7
# The longest that a rewrite may take to build beyond lax.
MOST_BUILD_MS = 1500.0
# A rewrite is taken if this many times its cost is less than lax's: expectations are uncertain.
MARGIN = 1.2
# The same for lax's filter gradients with groups: XLA has Eigen's convolution for them, but not in a loop, where they take many times as
# long.  It is not known here whether there is a loop.
IN_LOOPS = 2.5


def _algorithm_of_gpu(conv: Conv) -> type[ConvPlan]:
    """cuDNN's convolution, with or without groups, except for mostly zero inputs, and for products so few that XLA fuses them.

    Of these cuDNN has kernels for square depthwise filters in 16 bits without strides, which took two thirds of the fusion's time on an
    H100; with strides of 2 cuDNN took 2.7 times as long.

    A loop would be thousands of tiny kernels.  A strided dense dgrad has a transposed window, so its input is dilated, but cuDNN supports
    it directly.
    """
    window, B, G, C, K = conv.window, conv.B, conv.G, conv.C, conv.K
    of_cudnn = conv.dgrad and B * G == 1 and max((*window.stride, *window.filter_dilation), default=1) == 1
    if 1 < math.prod(window.input_dilation) <= MOST_PHASES and not of_cudnn:
        return Phases
    few = C * K <= FEW_ON_GPU and C * math.prod(window.filter) <= FOLDED_ON_GPU
    depthwise = B * C * K == 1 and window.plain_square and conv.dtype.itemsize == 2
    return Shifts if conv.open == "y" and G > 1 and window.rank and few and not depthwise else Lax
