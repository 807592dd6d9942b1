"""Which algorithm of `conv_algorithms` the `xla` convolution takes: a heuristic of labels, sizes, window, dtype and platform alone."""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from jaxext.backends.xla import conv_line, conv_phases
from jaxext.forms.call import Splitter
from jaxext.forms.window import Window


def algorithms(open: str, sizes: Mapping[str, int], window: Window, *, dtype, splitter: Splitter, platform: str = "cpu") -> list[str]:
    """The algorithm of `plan`, then the others worth measuring.  There are no others if XLA may still partition the call."""
    first = plan(open, sizes, window, dtype=dtype, splitter=splitter, platform=platform)
    static = all(isinstance(n, int) for n in (*sizes.values(), *window.input))
    if first == "zeros" or not static or not splitter.by_labels or not jnp.issubdtype(dtype, jnp.inexact):
        return [first]
    if open == "x":
        sizes, window, open = {**sizes, "C": sizes["K"], "K": sizes["C"]}, window.transposed, "y"
    B, G, C, K = (sizes[label] for label in "BGCK")
    found = [first, "lax"]
    if 1 < math.prod(window.input_dilation) <= MOST_PHASES:
        return list(dict.fromkeys([*found, "phases", *(["folded"] if open == "w" and conv_phases.foldable(window) else [])]))
    if window.rank and C * K <= 4 * FEW_CHANNELS and C * math.prod(window.filter) <= MOST_TERMS:
        found.append("shifts" if open == "y" else "rows")
    if B * G > 1:
        found += ["loop", "dots"]
    return list(dict.fromkeys(found))


def plan(open: str, sizes: Mapping[str, int], window: Window, *, dtype, splitter: Splitter, platform: str = "cpu") -> str:
    """The name of the algorithm, from static facts: labels, sizes, window, the dtype of both operands (`promote`) and the platform.

    zeros      an axis is empty, so nothing is computed
    lax        lax's own convolution: for dense ones, unless phases are faster; and for groups too small for the loop
    phases     one convolution per residue of the outputs: for input dilation, if XLA has no fast transposed convolution
    folded     the residues as channels of one convolution: for wgrad where phases would be, if they are of one size
    shifts     shifted inputs times weights, elementwise: for fprop of few channels per group (depthwise)
    rows       a loop over output rows: for wgrad of few channels per group
    loop       one dense convolution per b and g, in a loop: for groups, batched filters, per-example gradients
    dots       one batched dot per tap: for no spatial axes, integers on GPUs, and groups that XLA may still partition
    """
    dgrad = open == "x"
    if dgrad:
        sizes, window, open = {**sizes, "C": sizes["K"], "K": sizes["C"]}, window.transposed, "y"
    window = window.cropped[1]
    B, G, C, K = (sizes[label] for label in "BGCK")
    extents = (*sizes.values(), *window.input, *window.filter, *window.output)
    if any(isinstance(n, int) and n == 0 for n in extents):
        return "zeros"
    if platform in GPUS and not jnp.issubdtype(dtype, jnp.inexact):
        return "dots"  # on GPUs XLA refuses integer convolutions, saturates them, or computes groups of them wrongly
    alone = B * G == 1
    if not splitter.by_labels and (open == "w" or not alone) and window.rank:
        return "dots"  # XLA's partitioner multiplies these by the size of a mesh axis that splits nothing, or gathers them
    if splitter is Splitter.XLA:
        return "lax" if alone else "dots"
    grouped = "lax" if splitter.by_labels else "dots"
    if not all(isinstance(n, int) for n in extents) or not jnp.issubdtype(dtype, jnp.inexact):
        return "lax" if alone else grouped
    if platform in GPUS:
        return _plan_of_gpu(open, dgrad, sizes, window, grouped)
    if open == "y" and by_batch_groups(B, G, K, window):
        return grouped
    large = alone or C * K > FEW_CHANNELS and _products(sizes, window) >= LEAST_OF_STEP["y"]
    if 1 < math.prod(window.input_dilation) <= MOST_PHASES and not (large and _transposed_by_lax(open, alone, window, dtype)):
        return "folded" if open == "w" and _folds(sizes, window, dtype) else "phases"
    if alone:
        return "lax"
    if not window.rank:
        copied, weights = sizes["N"] * (C + K), C * K
        return grouped if open == "y" and B == 1 and copied > weights else "dots"
    if open == "y":
        # Lanes fewer than half of the channels are slower than a matrix.
        if G > 1 and C * K <= FEW_CHANNELS and C < 2 * G * K and C * math.prod(window.filter) <= MOST_TERMS:
            return "shifts"
        return "loop" if _loops(dgrad, sizes, window) else grouped
    return _plan_of_wgrad(sizes, window, grouped)


def _loops(dgrad, sizes, window):
    """Whether a loop of dense convolutions is faster than lax's grouped one.

    With three axes XLA has no faster convolution without groups, so only lax's batch groups, in fprop, are worth avoiding.  A single tap
    along one axis is a product of matrices to lax too.
    """
    B, G, C, K = (sizes[label] for label in "BGCK")
    if window.rank == 3 and (B == 1 or dgrad):
        return False
    if window.filter == (1,) and B == 1 or dgrad and G == 1 and C * K <= FEWEST_CHANNELS:
        return False
    return _products(sizes, window) >= LEAST_OF_STEP["y"]


def _plan_of_wgrad(sizes, window, grouped):
    """Rows for few channels, the loop for large products, and lax for the rest.

    Times per multiply-add, measured on a CPU: lax takes 0.4 ns with one channel in few groups, and far more otherwise.  The loop takes 0.1
    ns along one axis, 0.6 ns along more, and 0.1 ms for each step.  Rows take 0.2 ns if there are enough lanes, and 0.6 ns along one axis
    where `conv_line` does not compute them.
    """
    B, G, C, K = (sizes[label] for label in "BGCK")
    long = window.rank == 1 and sizes["N"] * window.output[0] * window.filter[0] >= LONG
    if long and G >= LEAST_LANES and conv_line.fits(C, K, window):
        return "rows"
    if G > 1 and C * K <= FEW_CHANNELS and K < MANY_OUTPUTS and not long and C * math.prod(window.filter) <= MOST_TERMS:
        if G * K >= FEW_LANES:
            return "rows"
        if C * K == 1:
            return grouped
    # With groups lax takes 2 ns per multiply-add, and multiplies each group with all others.
    return "loop" if G * _products(sizes, window) >= LEAST_OF_STEP["y" if G > 1 else "w"] else grouped


def _plan_of_gpu(open, dgrad, sizes, window, grouped):
    """cuDNN's convolution, with or without groups, except for mostly zero inputs, and for products so few that XLA fuses them.

    A loop would be thousands of tiny kernels.  A strided dense dgrad has a transposed window, so its input is dilated, but cuDNN supports
    it directly.
    """
    B, G, C, K = (sizes[label] for label in "BGCK")
    of_cudnn = dgrad and B * G == 1 and max((*window.stride, *window.filter_dilation), default=1) == 1
    if 1 < math.prod(window.input_dilation) <= MOST_PHASES and not of_cudnn:
        return "phases"
    few = C * K <= FEW_ON_GPU and C * math.prod(window.filter) <= FOLDED_ON_GPU
    return "shifts" if open == "y" and G > 1 and window.rank and few else "lax" if B * G == 1 else grouped


def _folds(sizes, window, dtype):
    """Whether the residues of the outputs fit into the channels without much more work, and elementwise lanes remain such."""
    if not conv_phases.foldable(window):
        return False
    C, K, factor = sizes["C"], sizes["K"], math.prod(window.input_dilation)
    _, largest = max(conv_phases.folded(window), key=lambda part: math.prod(map(len, part[0])))
    if math.prod(largest.filter) * factor > MOST_FOLDED[C * K > MANY_CHANNELS] * math.prod(window.filter):
        return False
    few = sizes["G"] > 1 and C * K <= FEW_CHANNELS
    return not few or plan("w", {**sizes, "K": K * factor}, largest, dtype=dtype, splitter=Splitter.NOBODY) == "rows"


def _transposed_by_lax(open, alone, window, dtype):
    """Whether XLA's CPU backend has a transposed convolution for this, which does not multiply the zeros of the dilation.

    With three axes it has none, but exchanges input and filter if the filter is larger.  This beats many small phases.
    """
    if open != "y" or max(*window.stride, *window.filter_dilation) > 1:
        return False
    if window.rank == 3:
        return alone and math.prod(window.filter) > math.prod(window.input) and len(window.merged_phases) > 1
    return np.dtype(dtype).itemsize <= 4


def _products(sizes, window):
    """Multiply-adds in a step of the loop."""
    return sizes["N"] * math.prod(window.output) * math.prod(window.filter) * sizes["C"] * sizes["K"]


def by_batch_groups(B, G, K, window):
    """Whether to use lax's batch groups, with one output each: XLA has no fast dilated convolution with three axes."""
    return B > 1 and G == K == 1 and window.rank == 3 and max(*window.input_dilation, *window.filter_dilation) > 1


GPUS = ("cuda", "rocm")
# The most phases in one program.
MOST_PHASES = 64
# The most work of a folded product, in multiples of that of its phases: taps are computed in whole periods.  With more than MANY_CHANNELS
# in C·K, matrices take the time, else what gathers them.
MOST_FOLDED, MANY_CHANNELS = {False: 2.5, True: 1.5}, 1024
# Up to this C·K, a group's channels are cheaper as elementwise lanes than as a matrix.
FEW_CHANNELS = 32
# Up to this C·K, a dense convolution gains nothing over dgrad's grouped one.
FEWEST_CHANNELS = 16
# In wgrad lanes are cheaper only below this K, and fill vectors only if G·K is at least FEW_LANES.
MANY_OUTPUTS, FEW_LANES = 8, 16
# From this G on, `conv_line` beats the loop at long sequences.
LEAST_LANES = 4
# From this many positions times taps on, a step of the loop is fast at wgrad along one axis.
LONG = 300_000
# The most terms of an elementwise sum.
MOST_TERMS = 1024
# Up to this C·K and this many terms, XLA's GPU compiler fuses padding, elementwise sum and the operations after it into one kernel.
FEW_ON_GPU, FOLDED_ON_GPU = 16, 9
# Up to this many terms, XLA's CPU compiler computes padding and sum in one pass, as fast as the sum alone.
FOLDED_ON_CPU = 4
# From this many multiply-adds on, a step of the loop is worth its overhead: some 40 microseconds, and twice that in wgrad.
LEAST_OF_STEP = {"y": 50_000, "w": 1_000_000}
