"""Algorithms of the `xla` convolution: lax's own, or a rewrite in plain XLA ops that is faster.

    y[b,n,p,g,k] = Σ_{r,c} x̃[b,n,stride·p + filter_dilation·r,g,c] · w[b,g,k,r,c]

dgrad is fprop with y as the input and the filter reversed (`Window.transposed`), so only two roles remain here: fprop and wgrad.  `plan`
selects an algorithm by a heuristic.  `algorithms` also lists the others that a table may select.  Both use only labels, sizes and the
window.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxext import _compat
from jaxext.backends.xla import conv_line, conv_phases
from jaxext.backends.xla import conv_rewrites as rewrites
from jaxext.forms.call import Splitter
from jaxext.forms.window import Window


def conv(
    open: str,
    operands: dict[str, jax.Array],
    window: Window,
    *,
    algorithm: str | None = None,
    dtype,
    precision,
    splitter: Splitter,
    platform: str = "cpu",
) -> jax.Array:
    """Compute the open slot from arrays with exactly one axis per label.  `algorithm` is one of `algorithms`, or None to use `plan`.

    XLA's partitioner splits grouped convolutions wrongly, so they are not used in programs that it splits.
    """
    w = operands["w"] if open == "x" else None
    if w is not None:
        y = operands["y"]
        if 0 in window.input:  # the transposed window does not say so
            return rewrites.zeros((*y.shape[:2], *window.input, y.shape[-2], w.shape[-1]), np.dtype(dtype), y, w)
        operands, window, open = {"x": operands["y"], "w": _reversed(w, window)}, window.transposed, "y"
    a, b = operands["x"], operands["w" if open == "y" else "y"]
    a, window = cropped(a, window)
    common, acc = _dtypes(a.dtype, b.dtype, dtype)
    a, b = a.astype(common), b.astype(common)
    where: Any = dict(splitter=splitter, platform=platform)
    name = algorithm or plan(open, _sizes(open, a, b), window, dtype=common, **where)
    if name == "lax" and w is not None and w.shape[:2] == (1, 1) and not _in_own_layout(1, splitter, platform):
        return lax_conv("x", a, w.astype(common), window, dtype=np.dtype(dtype), precision=precision).astype(dtype)
    return run(name, open, a, b, window, acc=acc, dtype=np.dtype(dtype), precision=precision, **where).astype(dtype)


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
    if open == "y" and _by_batch_groups(B, G, K, window):
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


def _by_batch_groups(B, G, K, window):
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


def run(name, open, a, b, window, *, acc, dtype, precision, splitter, platform):
    """Run the algorithm `name` on x and w (y open) or x and y (w open) of one dtype.  The result may have the dtype `acc`."""
    if name == "zeros":
        return rewrites.zeros(_shape(open, _sizes(open, a, b), window), dtype, a, b)
    if name == "lax" and _in_own_layout(a.shape[0] * a.shape[-2], splitter, platform):
        return rewrites.dense(open, a, b, window, precision=precision, preferred=_preferred(a.dtype, dtype))
    if name == "lax":
        return lax_conv(open, a, b, window, dtype=dtype, precision=precision)
    if name == "loop":
        loop = {"y": rewrites.loop_fprop, "w": rewrites.loop_wgrad}[open]
        return loop(a, b, window, precision=precision, preferred=_preferred(a.dtype, dtype))
    if name == "shifts":
        terms = a.shape[-1] * math.prod(window.filter)
        return rewrites.shifts_fprop(a, b, window, acc=acc, fold=terms <= (FOLDED_ON_CPU if platform == "cpu" else FOLDED_ON_GPU))
    if name == "rows":
        return (conv_line.wgrad if conv_line.fits(a.shape[-1], b.shape[-1], window) else rewrites.rows_wgrad)(a, b, window, acc=acc)
    if name == "dots":
        return getattr(rewrites, f"dots_{ROLES[open]}")(a, b, window, acc=acc, precision=precision)

    def part(a, b, window):
        a, window = cropped(a, window)
        if open == "w" and platform == "cpu":
            a, window = conv_phases.larger_than_output(a, window)
        where: Any = dict(splitter=splitter, platform=platform)
        name = plan(open, _sizes(open, a, b), window, dtype=a.dtype, **where)
        return run(name, open, a, b, window, acc=acc, dtype=dtype, precision=precision, **where)

    if name == "folded":
        return conv_phases.folded_wgrad(a, b, window, part=part, acc=acc)
    return getattr(conv_phases, f"phases_{ROLES[open]}")(a, b, window, part=part, acc=acc)


ROLES = {"y": "fprop", "w": "wgrad"}


def _in_own_layout(groups, splitter, platform):
    """Whether a convolution is given to XLA in its own layout, which its CPU backend gives only those outside of loops."""
    return platform == "cpu" and groups == 1 and splitter.by_labels


def _sizes(open, a, b):
    sizes = {"B": a.shape[0], "N": a.shape[1], "G": a.shape[-2], "C": a.shape[-1]}
    return sizes | {"K": b.shape[2] if open == "y" else b.shape[-1]}


def _shape(open, sizes, window):
    B, N, G, C, K = (sizes[label] for label in "BNGCK")
    return (B, N, *window.output, G, K) if open == "y" else (B, G, K, *window.filter, C)


def _reversed(w, window):
    """The filter of dgrad: (B, G, K, *filter, C) -> (B, G, C, *reversed filter, K)."""
    return jnp.swapaxes(lax.rev(w, tuple(range(3, 3 + window.rank))), 2, -1)


def _dtypes(a, b, result):
    """A dtype that holds both operands exactly, and the dtype of accumulation: at least float32 for floats."""
    common = promote(a, b)
    acc = promote(common, np.dtype(result))
    if jnp.issubdtype(acc, jnp.floating) and acc.itemsize < 4:
        acc = np.dtype(np.float32)
    return common, acc


def _preferred(common, dtype):
    """The `preferred_element_type` for lax, whose results are never narrower than the operands.  For floats, a dtype that holds both."""
    wide = promote(common, np.dtype(dtype))
    return wide if wide == dtype or jnp.issubdtype(wide, jnp.floating) else None


def promote(a, b):
    """jax's standard promotion, with bfloat16 in place of floats of 8 bits or fewer, which it holds exactly."""
    if a == b:
        return a
    a, b = (jnp.bfloat16 if jnp.issubdtype(d, jnp.floating) and d.itemsize == 1 else d for d in (a, b))
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(a, b)


def lax_conv(open, a, b, window: Window, *, dtype, precision):
    """lax's convolution, with groups if B·G > 1: the same HLO as lax's own forward and transposes.

    x may be open if there is one group.  Then `a` is y, `b` is w, the window is transposed, and the filter is reversed right before the
    convolution.  XLA's GPU compiler recognises cuDNN's dgrad only in this form; otherwise it multiplies the zeros of a strided one.
    """
    B, G = a.shape[0], a.shape[-2]
    first, last, space = 0, window.rank + 1, tuple(range(1, window.rank + 1))
    preferred = _preferred(a.dtype, dtype)
    conv = functools.partial(_compat.conv_general_dilated, precision=precision, preferred_element_type=preferred, out_sharding=None)
    if open != "w":
        w = b.reshape((-1,) + b.shape[3:])
        feature_groups, batch_groups = (1, B) if _by_batch_groups(B, G, b.shape[2], window) else (B * G, 1)
        x = a.reshape((-1,) + a.shape[2:-2] + a.shape[-1:]) if batch_groups > 1 else _merge(a)
        spec = filter_spec = (first, last, *space)
        if open == "x":
            w, filter_spec = lax.rev(w, space), (last, first, *space)
        y = conv(
            x, w, window_strides=window.stride, padding=window.padding, lhs_dilation=window.input_dilation,
            rhs_dilation=window.filter_dilation, dimension_numbers=lax.ConvDimensionNumbers(spec, filter_spec, spec),
            feature_group_count=feature_groups, batch_group_count=batch_groups,
        )  # fmt: skip
        return _split(y, B, G)
    if any(low > 0 > high for low, high in window.read if all(isinstance(n, int) for n in (low, high))):
        a, window = cropped(a, dataclasses.replace(window, padding=window.read))
        if 0 in window.input:
            return rewrites.zeros(_shape(open, _sizes(open, a, b), window), dtype, a, b)
    # If only B > 1, the groups are feature groups of x, with B and N in one axis as in lax's vmap.  XLA is slow at batch groups there.
    x = _merge(a) if G > 1 else a.reshape((-1,) + a.shape[2:-2] + a.shape[-1:])
    batch_groups, feature_groups = (B * G, 1) if G > 1 else (1, B)
    spec = (last, first, *space)
    w = conv(
        x, _merge(b), window_strides=window.filter_dilation, padding=window.read, lhs_dilation=window.input_dilation,
        rhs_dilation=window.stride, dimension_numbers=lax.ConvDimensionNumbers(spec, spec, spec),
        feature_group_count=feature_groups, batch_group_count=batch_groups,
    )  # fmt: skip
    return w.reshape((B, G, -1) + w.shape[1:])


def cropped(x, window):
    """Negative padding as a slice of x.

    XLA's CPU convolution before jaxlib 0.12 reads out of bounds if one side of an axis is cropped and the other padded.
    """
    kept, rest = window.cropped
    if rest == window:
        return x, window
    starts, stops = ((part.start for part in kept), (part.stop for part in kept))
    return lax.slice(x, (0, 0, *starts, 0, 0), (*x.shape[:2], *stops, *x.shape[-2:])), rest


def _merge(x):
    """(B, N, *space, G, C) -> (N, *space, B·G·C)

    G and C are merged before B moves, so that XLA sees where this undoes how B came to the front.
    """
    shape = x.shape[1:-2]
    return _moved(x.reshape((x.shape[0], *shape, -1)), 0, -2).reshape((*shape, -1))


def _split(y, B, G):
    """(N, *space, B·G·K) -> (B, N, *space, G, K)"""
    y = _moved(y.reshape(y.shape[:-1] + (B, -1)), -2, 0)
    return y.reshape(y.shape[:-1] + (G, -1))


def _moved(x, source, destination):
    """`moveaxis`, but a reshape if the axis has size 1, because XLA may copy even then."""
    if x.shape[source] == 1:
        shape = [n for i, n in enumerate(x.shape) if i != source % x.ndim]
        shape.insert(destination % x.ndim, 1)
        return x.reshape(shape)
    return jnp.moveaxis(x, source, destination)
