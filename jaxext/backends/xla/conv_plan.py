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
    if _takes_phases(open, window):
        found += ["folded"] if open == "w" and conv_phases.folds(window) else []
        found += ["phases"] if open == "y" or _phases(window) <= MOST_PHASES else []
        return list(dict.fromkeys(found))
    if window.rank and C * K <= 4 * FEW_CHANNELS and C * math.prod(window.filter) <= MOST_TERMS:
        found.append("shifts" if open == "y" else "rows")
    if B * G > 1:
        found += ["loop", "dots"]
    return list(dict.fromkeys(found))


def plan(open: str, sizes: Mapping[str, int], window: Window, *, dtype, splitter: Splitter, platform: str = "cpu") -> str:
    """The name of the algorithm, from static facts: labels, sizes, window, the dtype of both operands (`promote`) and the platform.

    zeros      an axis is empty, so nothing is computed
    lax        lax's own convolution: for dense ones, unless phases are faster; and for groups where it is as fast as the loop
    phases     residues of the outputs as channels of few convolutions: for input dilation, if XLA has no fast transposed convolution
    folded     the same for wgrad, if it is not much more work, or if there are many residues; else phases, a convolution for each
    shifts     shifted inputs times weights, elementwise: for fprop of few channels, depthwise, in groups or with batched filters
    rows       a loop over output rows: for wgrad of few channels per group
    loop       one dense convolution per b and g, in a loop: for groups, batched filters, per-example gradients
    dots       one batched dot per tap: for a single tap, integers on GPUs, and groups that XLA may still partition
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
    if not (alone or splitter.by_labels) or open == "w" and splitter.splits_windows:
        return "dots"  # XLA's partitioner multiplies these by the size of a mesh axis that splits nothing, or gathers them
    if splitter is Splitter.XLA:
        return "lax"  # it would gather what phases interleave
    if not all(isinstance(n, int) for n in extents) or not jnp.issubdtype(dtype, jnp.inexact):
        return "lax"
    if platform in GPUS:
        return _plan_of_gpu(open, dgrad, sizes, window, dtype)
    if open == "y" and by_batch_groups(B, G, K, window, platform):
        return "lax"
    large = alone or C * K > FEW_CHANNELS and _products(sizes, window) >= LEAST_OF_STEP["y"]
    if _takes_phases(open, window) and not (large and _transposed_by_lax(open, alone, sizes, window, dtype)):
        return "folded" if open == "w" and _folds(sizes, window, dtype) else "phases"
    if alone:
        return "lax"
    if open == "w":
        return _plan_of_wgrad(sizes, window)
    if _few_channels(sizes, window, dtype):
        return "shifts"
    if _has_single_tap(window) and (B > 1 or not window.rank):
        copied, weights = _copied_and_weights(sizes, window)
        return "lax" if B == 1 and copied > weights else "dots"
    return "loop" if _loops(dgrad, sizes, window) else "lax"


def _takes_phases(open, window):
    """Return whether the input is dilated, and convolutions of many residues are few."""
    few = conv_phases.foldable if open == "y" else conv_phases.folds
    return math.prod(window.input_dilation) > 1 and (_phases(window) <= MOST_PHASES or few(window))


def _phases(window):
    """Return the number of residues of outputs that see taps: each would be a phase."""
    return math.prod(map(min, window.filter, window.input_dilation))


def _has_single_tap(window):
    """Whether it is a product of matrices, without zeros between its inputs."""
    return math.prod(window.filter) == max(window.input_dilation, default=1) == 1


def _few_channels(sizes, window, dtype):
    """Whether fprop is cheaper as a sum of elementwise products.  Lanes up to half of the channels are slower than a matrix."""
    B, G, C, K = (sizes[label] for label in "BGCK")
    terms, lax_is_fast = C * math.prod(window.filter), B == window.rank == 1
    if not window.rank or C >= 2 * G * K:
        return False
    if G > 1 and C * K <= FEW_CHANNELS:
        return terms <= (MANY_TERMS if _of_one_channel(sizes, window) else MOST_TERMS)
    if max(window.input_dilation) > 1:  # zeros too would be terms
        return False
    if lax_is_fast and (G * K < FEW_LANES or window.stride[0] > 1) or C == 1 and K > FEW_CHANNELS:
        return False
    read = window.filter[0] * math.prod(window.input[1:]) * G * C + G * K * terms  # elements of x and w for a row of outputs
    if read > CACHED or not jnp.issubdtype(dtype, jnp.floating):
        return False
    most = FEW_TERMS_OF_A_LINE if lax_is_fast else FEW_TERMS
    return C * K <= 2 * FEW_CHANNELS and terms <= MANY_TERMS or C * K <= 4 * FEW_CHANNELS and terms <= most


def _of_one_channel(sizes, window):
    """Whether each channel has several filters along two axes or more: a loop is slower than lax then, and so is a sum of many terms."""
    return sizes["C"] == 1 and MOST_FILTERS_OF_A_CHANNEL < sizes["K"] <= FEW_CHANNELS and window.rank > 1


def _loops(dgrad, sizes, window):
    """Whether a loop of dense convolutions is faster than lax's grouped one.

    With three axes XLA has no faster convolution without groups.  Along one axis lax's own is as fast, unless there are many taps or, in
    more than two groups, more weights than images.  With a single tap it is as fast if the matrices are small.
    """
    B, G, C, K = (sizes[label] for label in "BGCK")
    if window.rank == 3 or dgrad and G == 1 and C * K <= FEWEST_CHANNELS or _of_one_channel(sizes, window):
        return False
    if B == 1 and max(window.input_dilation) == 1:
        copied, weights = _copied_and_weights(sizes, window)
        if window.rank == 1 and C * K > FEW_CHANNELS and window.filter[0] <= FEW_TAPS and (copied > weights or G == 2):
            return False
        if math.prod(window.filter) == 1 and (window.rank == 1 or C * K <= SMALL_MATRIX):
            return False
    return _products(sizes, window) >= LEAST_OF_STEP["y"]


def _copied_and_weights(sizes, window):
    """Elements of images and results, and of the filter, in a group of fprop."""
    C, K = sizes["C"], sizes["K"]
    return sizes["N"] * (math.prod(window.input) * C + math.prod(window.output) * K), C * K * math.prod(window.filter)


def _plan_of_wgrad(sizes, window):
    """Rows for few channels, a dot for a single tap, the loop for large products, and lax for the rest.

    Times per multiply-add, measured on a CPU: lax takes 0.4 ns with one channel in few groups, and far more otherwise.  The loop takes 0.1
    ns along one axis, 0.6 ns along more, and 0.1 ms for each step.  Rows take 0.2 ns if there are enough lanes, and 0.6 ns along one axis
    where `conv_line` does not compute them.
    """
    B, N, G, C, K = (sizes[label] for label in "BNGCK")
    if not window.rank:
        return "dots"
    long = window.rank == 1 and N * window.output[0] * window.filter[0] >= LONG
    if long and G >= LEAST_LANES and conv_line.fits(C, K, window):
        return "rows"
    if G > 1 and C * K <= FEW_CHANNELS and K < MANY_OUTPUTS and not long and C * math.prod(window.filter) <= MOST_TERMS:
        if G * K >= FEW_LANES:
            return "rows"
        if C * K == 1:
            return "lax"
    inside = {(0, 0)} >= {*window.padding}  # an infinity times the zeros of a border would be NaN
    if _has_single_tap(window) and inside:
        return "dots"
    if window.rank == 3 and B == 1 and C * K <= 2 * FEW_CHANNELS and math.prod(window.output) <= SMALL_IMAGE:
        return "lax"
    # With groups lax takes 2 ns per multiply-add, and multiplies each group with all others.
    return "loop" if G * _products(sizes, window) >= LEAST_OF_STEP["y" if G > 1 else "w"] else "lax"


def _plan_of_gpu(open, dgrad, sizes, window, dtype):
    """cuDNN's convolution, with or without groups, except for mostly zero inputs, and for products so few that XLA fuses them.

    Of these cuDNN has kernels for square depthwise filters in 16 bits without strides, which took two thirds of the fusion's time on an
    H100; with strides of 2 cuDNN took 2.7 times as long.

    A loop would be thousands of tiny kernels.  A strided dense dgrad has a transposed window, so its input is dilated, but cuDNN supports
    it directly.
    """
    B, G, C, K = (sizes[label] for label in "BGCK")
    of_cudnn = dgrad and B * G == 1 and max((*window.stride, *window.filter_dilation), default=1) == 1
    if 1 < math.prod(window.input_dilation) <= MOST_PHASES and not of_cudnn:
        return "phases"
    few = C * K <= FEW_ON_GPU and C * math.prod(window.filter) <= FOLDED_ON_GPU
    depthwise = B * C * K == 1 and window.plain_square and jnp.dtype(dtype).itemsize == 2
    return "shifts" if open == "y" and G > 1 and window.rank and few and not depthwise else "lax"


def _folds(sizes, window, dtype):
    """Return whether residues become channels: they are many, or it is not much more work and elementwise lanes remain such."""
    if not conv_phases.folds(window):
        return False
    if _phases(window) > MANY_PHASES:
        return True
    C, K, factor = sizes["C"], sizes["K"], math.prod(window.input_dilation)
    _, largest = max(conv_phases.folded(window), key=lambda part: math.prod(map(len, part[0])))
    if math.prod(largest.filter) * factor > MOST_FOLDED[C * K > MANY_CHANNELS] * math.prod(window.filter):
        return False
    few = sizes["G"] > 1 and C * K <= FEW_CHANNELS
    return not few or plan("w", {**sizes, "K": K * factor}, largest, dtype=dtype, splitter=Splitter.NOBODY) == "rows"


def _transposed_by_lax(open, alone, sizes, window, dtype):
    """Return whether XLA's CPU backend has a transposed convolution for this, which does not multiply the zeros of the dilation.

    XLA has none with three axes, and exchanges input and filter if the filter is larger: then an output meets all positions of the input.
    A single convolution of phases is faster, unless the filter is far larger.  Several phases take longer to compile than few products,
    and with three axes longer to run if the positions are few.  Groups take phases.
    """
    if open != "y" or max(*window.stride, *window.filter_dilation) > 1 or window.rank < 3 and np.dtype(dtype).itemsize > 4:
        return False
    taps, positions = math.prod(window.filter), math.prod(window.input)
    if taps <= positions or positions == 1:
        return window.rank < 3
    if not alone:
        return False
    if all(r % di == 0 for r, di in zip(window.filter, window.input_dilation, strict=True)):
        return sizes["N"] == 1 and positions <= taps / FAR_LARGER
    products = sizes["N"] * math.prod(window.output) * positions * sizes["C"] * sizes["K"]
    return products <= FEW_EXCHANGED or window.rank == 3 and positions * _phases(window) <= MORE_POSITIONS * taps


def _products(sizes, window):
    """Multiply-adds in a step of the loop."""
    return sizes["N"] * math.prod(window.output) * math.prod(window.filter) * sizes["C"] * sizes["K"]


def by_batch_groups(B, G, K, window, platform):
    """Whether to use lax's batch groups in fprop: XLA's other convolutions with three axes are slow, the more so with a dilation.

    XLA's CPU backend multiplies the filter of each group with the images of all.
    """
    if window.rank != 3 or not all(isinstance(n, int) for n in (B, G, K)) or not B > 1 == G:
        return False
    dilated = max(*window.input_dilation, *window.filter_dilation) > 1
    return K == 1 if dilated else platform == "cpu" and K <= FILTERS_OF_BATCH_GROUPS and B <= MOST_BATCH_GROUPS


GPUS = ("cuda", "rocm")
# The most residues that are convolutions of their own.
MOST_PHASES = 64
# Beyond this many, their convolutions would take XLA seconds to compile: wgrad folds them.
MANY_PHASES = 16
# The most work of a folded product, in multiples of that of its phases: taps are computed in whole periods.  With more than MANY_CHANNELS
# in C·K, matrices take the time, else what gathers them.
MOST_FOLDED, MANY_CHANNELS = {False: 2.5, True: 1.5}, 1024
# Up to this C·K, a group's channels are cheaper as elementwise lanes than as a matrix; in fprop up to four times as many if terms are few.
FEW_CHANNELS = 32
# Up to this C·K, a dense convolution gains nothing over dgrad's grouped one.
FEWEST_CHANNELS = 16
# In wgrad lanes are cheaper only below this K.  In every role G·K lanes fill vectors only from FEW_LANES on.
MANY_OUTPUTS, FEW_LANES = 8, 16
# From this G on, `conv_line` beats the loop at long sequences.
LEAST_LANES = 4
# From this many positions times taps on, a step of the loop is fast at wgrad along one axis.
LONG = 300_000
# The most terms of an elementwise sum, up to FEW_CHANNELS; up to twice as many; and up to four times as many, on a line and elsewhere.
MOST_TERMS, MANY_TERMS, FEW_TERMS_OF_A_LINE, FEW_TERMS = 1024, 128, 16, 64
# The most elements of x and w that such a sum of more than FEW_CHANNELS may read for a row of outputs.
CACHED = 55_000
# With more filters than this for one channel, lax is as fast beyond MANY_TERMS.
MOST_FILTERS_OF_A_CHANNEL = 4
# Along one axis, up to this many taps lax's grouped fprop is as fast as a loop.
FEW_TAPS = 32
# Up to this C·K a single tap is no faster in a loop.
SMALL_MATRIX = 4096
# In wgrad of few channels with three axes, up to this many outputs lax is faster than a loop.
SMALL_IMAGE = 1000
# Up to this K and B, lax's batch groups are fast in fprop with three axes.
FILTERS_OF_BATCH_GROUPS, MOST_BATCH_GROUPS = 4, 8
# From this many taps per position on, an exchanged convolution beats phases that are one convolution of one image.
FAR_LARGER = 8
# Up to this many multiply-adds, an exchanged convolution compiles sooner than several phases by more than it is slower.
FEW_EXCHANGED = 10_000_000
# Up to this many times the work of several phases with three axes, it is faster, since these are slow with few channels.
MORE_POSITIONS = 2
# Up to this C·K and this many terms, XLA's GPU compiler fuses padding, elementwise sum and the operations after it into one kernel.
FEW_ON_GPU, FOLDED_ON_GPU = 16, 9
# Up to this many terms, XLA's CPU compiler computes padding and sum in one pass, as fast as the sum alone.
FOLDED_ON_CPU = 4
# From this many multiply-adds on, a step of the loop is worth its overhead: some 40 microseconds, and twice that in wgrad.
LEAST_OF_STEP = {"y": 50_000, "w": 1_000_000}
