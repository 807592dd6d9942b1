"""The `xla` implementation of convolution: lax's own, or the rewrite in plain XLA ops that is known to beat it.

    y[b,n,p,g,k] = Σ_{r,c} x̃[b,n,stride·p + filter_dilation·r,g,c] · w[b,g,k,r,c]

dgrad is the same form with y as the input and the filter reversed (`Window.transposed`), so there are two roles here: fprop and wgrad.
`plan` names the algorithm, `algorithms` also the others that a table may name.  They see labels, sizes and the window, never a clock.
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
    """The open slot, from arrays with exactly one axis per label.  `algorithm` is one of `algorithms`, or None for that of `plan`.

    XLA's partitioner splits grouped convolutions wrongly, so it never gets one.
    """
    w = operands["w"] if open == "x" else None
    if w is not None:
        operands, window, open = {"x": operands["y"], "w": _reversed(w, window)}, window.transposed, "y"
    a, b = operands["x"], operands["w" if open == "y" else "y"]
    a, window = cropped(a, window)
    common, acc = _dtypes(a.dtype, b.dtype, dtype)
    a, b = a.astype(common), b.astype(common)
    where: Any = dict(splitter=splitter, platform=platform)
    name = algorithm or plan(open, _sizes(open, a, b), window, dtype=common, **where)
    if name == "lax" and w is not None and w.shape[:2] == (1, 1):
        return lax_conv("x", a, w.astype(common), window, dtype=np.dtype(dtype), precision=precision).astype(dtype)
    return run(name, open, a, b, window, acc=acc, dtype=np.dtype(dtype), precision=precision, **where).astype(dtype)


def algorithms(open: str, sizes: Mapping[str, int], window: Window, *, dtype, splitter: Splitter, platform: str = "cpu") -> list[str]:
    """The name that `plan` gives, then those worth measuring against it; there are none of these where XLA may still partition the call."""
    first = plan(open, sizes, window, dtype=dtype, splitter=splitter, platform=platform)
    static = all(isinstance(n, int) for n in (*sizes.values(), *window.input))
    if first == "zeros" or not static or not splitter.by_labels or not jnp.issubdtype(dtype, jnp.inexact):
        return [first]
    if open == "x":
        sizes, window, open = {**sizes, "C": sizes["K"], "K": sizes["C"]}, window.transposed, "y"
    B, G, C, K = (sizes[label] for label in "BGCK")
    found = [first, "lax"]
    if 1 < math.prod(window.input_dilation) <= MOST_PHASES:
        return list(dict.fromkeys([*found, "phases"]))
    if window.rank and C * K <= 4 * FEW_CHANNELS and C * math.prod(window.filter) <= MOST_TERMS:
        found.append("shifts" if open == "y" else "rows")
    if B * G > 1:
        found += ["loop", "dots"]
    return list(dict.fromkeys(found))


def plan(open: str, sizes: Mapping[str, int], window: Window, *, dtype, splitter: Splitter, platform: str = "cpu") -> str:
    """The name of the algorithm, from static facts: labels, sizes, window, the dtype of both operands (`promote`) and the platform.

    zeros      no product is taken: an axis is empty
    lax        lax's own convolution: dense, unless phases are faster; and groups too small for the loop
    phases     a convolution for each residue of the outputs: input dilation, if XLA has no fast transposed convolution for it
    shifts     fprop of few channels per group (depthwise): shifted inputs times weights, elementwise
    rows       wgrad of the same: a loop over output rows
    loop       one dense convolution for each b and g, in a loop: groups, batched filters, per-example gradients
    dots       one batched dot per tap: no spatial axes, integers on GPUs, and groups that XLA may still partition
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
        return "dots"  # XLA refuses their convolutions there, saturates them, or gets groups of them wrong
    alone = B * G == 1
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
    if 1 < math.prod(window.input_dilation) <= MOST_PHASES and not (large and _transposed_by_lax(open, window, dtype)):
        return "phases"
    if alone:
        return "lax"
    if not window.rank:
        return "dots"
    if open == "y":
        if G > 1 and C * K <= FEW_CHANNELS and C * math.prod(window.filter) <= MOST_TERMS:
            return "shifts"
        return "loop" if _products(sizes, window) >= LEAST_OF_STEP["y"] else grouped
    return _plan_of_wgrad(sizes, window, grouped)


def _plan_of_wgrad(sizes, window, grouped):
    """Rows for few channels, the loop for large products, and lax for the rest.

    Times of one product, measured on a CPU: lax takes 0.4 ns with one channel in few groups, and far more otherwise.  The loop takes 0.1 ns
    along one axis, 0.6 ns along more, and 0.1 ms for each step.  Rows take 0.2 ns if there are enough lanes, and 0.6 ns along one axis.
    """
    B, G, C, K = (sizes[label] for label in "BGCK")
    long = window.rank == 1 and sizes["N"] * window.output[0] * window.filter[0] >= LONG
    if G > 1 and C * K <= FEW_CHANNELS and K < MANY_OUTPUTS and not long and C * math.prod(window.filter) <= MOST_TERMS:
        if G * K >= FEW_LANES:
            return "rows"
        if C * K == 1:
            return grouped
    # With groups lax takes 2 ns for a product, and multiplies each group with all others.
    return "loop" if G * _products(sizes, window) >= LEAST_OF_STEP["y" if G > 1 else "w"] else grouped


def _plan_of_gpu(open, dgrad, sizes, window, grouped):
    """cuDNN's convolution, with groups or without, except for inputs full of zeros and for so few products that XLA makes them one fusion.

    A loop would be thousands of tiny kernels.  A strided dense dgrad arrives with a transposed window, so its input is dilated, but
    cuDNN has a call for it.
    """
    B, G, C, K = (sizes[label] for label in "BGCK")
    of_cudnn = dgrad and B * G == 1 and max((*window.stride, *window.filter_dilation), default=1) == 1
    if 1 < math.prod(window.input_dilation) <= MOST_PHASES and not of_cudnn:
        return "phases"
    few = C * K <= FEW_ON_GPU and C * math.prod(window.filter) <= FOLDED_ON_GPU
    return "shifts" if open == "y" and G > 1 and window.rank and few else "lax" if B * G == 1 else grouped


def _transposed_by_lax(open, window, dtype):
    """Whether XLA's CPU backend has a transposed convolution for this: one that does not multiply with the zeros of the dilation."""
    return open == "y" and window.rank <= 2 and max(*window.stride, *window.filter_dilation) == 1 and np.dtype(dtype).itemsize <= 4


def _products(sizes, window):
    """Products of two elements in a step of the loop."""
    return sizes["N"] * math.prod(window.output) * math.prod(window.filter) * sizes["C"] * sizes["K"]


def _by_batch_groups(B, G, K, window):
    """Whether lax's batch groups compute this, with one output each: XLA has no fast dilated convolution with three axes."""
    return B > 1 and G == K == 1 and window.rank == 3 and max(*window.input_dilation, *window.filter_dilation) > 1


GPUS = ("cuda", "rocm")
# The most phases in one program.
MOST_PHASES = 64
# Up to this C·K, a group's channels are cheaper as elementwise lanes than as a matrix.
FEW_CHANNELS = 32
# In wgrad lanes are cheaper only below this K, and fill vectors only from this G·K on.
MANY_OUTPUTS, FEW_LANES = 8, 16
# From this many positions times taps on, a step of the loop computes the filter's gradient along one axis fast.
LONG = 300_000
# The most terms of an elementwise sum.
MOST_TERMS = 1024
# Up to this C·K and this many terms, XLA's GPU compiler makes one kernel of padding and elementwise sum, and fuses it with what follows.
FEW_ON_GPU, FOLDED_ON_GPU = 16, 9
# Up to this many terms, XLA's CPU compiler computes padding and sum in one pass as fast as the sum alone.
FOLDED_ON_CPU = 4
# From this many products on, a step of the loop is worth its overhead: some 40 microseconds, and twice that in wgrad.
LEAST_OF_STEP = {"y": 50_000, "w": 1_000_000}


def run(name, open, a, b, window, *, acc, dtype, precision, splitter, platform):
    """The result of the algorithm `name`, from x and w (y open) or x and y (w open) of one dtype.  It may still have the dtype `acc`."""
    if name == "zeros":
        return rewrites.zeros(_shape(open, _sizes(open, a, b), window), dtype, a, b)
    if name == "lax":
        return lax_conv(open, a, b, window, dtype=dtype, precision=precision)
    if name == "loop":
        loop = {"y": rewrites.loop_fprop, "w": rewrites.loop_wgrad}[open]
        return loop(a, b, window, precision=precision, preferred=_preferred(a.dtype, dtype))
    if name == "shifts":
        terms = a.shape[-1] * math.prod(window.filter)
        return rewrites.shifts_fprop(a, b, window, acc=acc, fold=terms <= (FOLDED_ON_CPU if platform == "cpu" else FOLDED_ON_GPU))
    if name == "rows":
        return rewrites.rows_wgrad(a, b, window, acc=acc)
    if name == "dots":
        return getattr(rewrites, f"dots_{ROLES[open]}")(a, b, window, acc=acc, precision=precision)

    def part(a, b, window):
        a, window = cropped(a, window)
        where = dict(splitter=splitter, platform=platform)
        name = plan(open, _sizes(open, a, b), window, dtype=a.dtype, **where)
        return run(name, open, a, b, window, acc=acc, dtype=dtype, precision=precision, **where)

    return getattr(rewrites, f"phases_{ROLES[open]}")(a, b, window, part=part, acc=acc)


ROLES = {"y": "fprop", "w": "wgrad"}


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
    """The dtype that both operands are cast to without loss, and that of the sum: at least float32, if it is a float."""
    common = promote(a, b)
    acc = promote(common, np.dtype(result))
    if jnp.issubdtype(acc, jnp.floating) and acc.itemsize < 4:
        acc = np.dtype(np.float32)
    return common, acc


def _preferred(common, dtype):
    """The `preferred_element_type` for lax, which gives no result narrower than the operands: of floats, a dtype that holds both."""
    wide = promote(common, np.dtype(dtype))
    return wide if wide == dtype or jnp.issubdtype(wide, jnp.floating) else None


def promote(a, b):
    """jax's standard promotion, with bfloat16 in place of floats of 8 bits or fewer: it holds them exactly."""
    if a == b:
        return a
    a, b = (jnp.bfloat16 if jnp.issubdtype(d, jnp.floating) and d.itemsize == 1 else d for d in (a, b))
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(a, b)


def lax_conv(open, a, b, window: Window, *, dtype, precision):
    """lax's convolution, with groups if B·G > 1: the same HLO as lax's own forward and transposes.

    x may be open if there is one group.  Then `a` is y, `b` is w, the window is transposed, and the filter is reversed right before the
    convolution.  Only there does XLA's GPU compiler find cuDNN's dgrad; otherwise it multiplies by the zeros of a strided one.
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
    # With B alone, the groups are feature groups of x, with B and N in one axis as in lax's vmap.  XLA is slow at batch groups there.
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

    XLA's CPU convolution before jaxlib 0.12 reads out of bounds where one side of an axis is cropped and the other padded.
    """
    kept, rest = window.cropped
    if rest == window:
        return x, window
    starts, stops = ((part.start for part in kept), (part.stop for part in kept))
    return lax.slice(x, (0, 0, *starts, 0, 0), (*x.shape[:2], *stops, *x.shape[-2:])), rest


def _merge(x):
    """(B, N, *space, G, C) -> (N, *space, B·G·C)"""
    return _moved(x, 0, -3).reshape(x.shape[1:-2] + (-1,))


def _split(y, B, G):
    """(N, *space, B·G·K) -> (B, N, *space, G, K)"""
    return _moved(y.reshape(y.shape[:-1] + (B, G, -1)), -3, 0)


def _moved(x, source, destination):
    """`moveaxis`, but a reshape if the axis has size 1, because XLA may copy even then."""
    if x.shape[source] == 1:
        shape = [n for i, n in enumerate(x.shape) if i != source % x.ndim]
        shape.insert(destination % x.ndim, 1)
        return x.reshape(shape)
    return jnp.moveaxis(x, source, destination)
