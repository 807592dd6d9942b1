"""Algorithms of the `xla` convolution: lax's own, or a rewrite in plain XLA ops that is faster.

    y[b,n,p,g,k] = Σ_{r,c} x̃[b,n,stride·p + filter_dilation·r,g,c] · w[b,g,k,r,c]

dgrad is fprop with y as the input and the filter reversed (`Window.transposed`), so only two roles remain here: fprop and wgrad.
`conv_plan` selects the algorithm.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxext import _compat
from jaxext.backends.xla import conv_lanes, conv_line, conv_phases, conv_plan
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
    """Compute the open slot from arrays with exactly one axis per label.  `algorithm` is one of `conv_plan`'s, or None to use its plan.

    XLA's partitioner splits grouped convolutions wrongly, so they are not used in programs that it splits.  It aborts in batched products
    if a mesh axis splits the groups and also the output channels of a group, which are therefore whole there.
    """
    if not splitter.by_labels:
        operands = {slot: z if slot == "x" else _with_whole_outputs(slot, z) for slot, z in operands.items()}
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
    name = algorithm or conv_plan.plan(open, _sizes(open, a, b), window, dtype=common, **where)
    if name == "lax" and w is not None and w.shape[:2] == (1, 1) and not _in_own_layout(1, splitter, platform):
        return lax_conv("x", a, w.astype(common), window, dtype=np.dtype(dtype), precision=precision, platform=platform).astype(dtype)
    return run(name, open, a, b, window, acc=acc, dtype=np.dtype(dtype), precision=precision, **where).astype(dtype)


def run(name, open, a, b, window, *, acc, dtype, precision, splitter, platform):
    """Run the algorithm `name` on x and w (y open) or x and y (w open) of one dtype.  The result may have the dtype `acc`."""
    if name == "zeros":
        return rewrites.zeros(_shape(open, _sizes(open, a, b), window), dtype, a, b)
    if name == "lax" and _in_own_layout(a.shape[0] * a.shape[-2], splitter, platform):
        return rewrites.dense(open, a, b, window, precision=precision, preferred=_preferred(a.dtype, dtype))
    if name == "lax":
        return lax_conv(open, a, b, window, dtype=dtype, precision=precision, platform=platform)
    if name in ("loop", "dots") and platform == "cpu" and jnp.issubdtype(a.dtype, jnp.floating):
        a, b = a.astype(acc), b.astype(acc)  # XLA would convert a bfloat16 result in every step, and has no code for some dots of it
    if name == "loop":
        if open == "w" and platform == "cpu" and a.shape[-2] == 1:  # in groups, an infinity must not meet the padding
            a, window = (conv_phases.padded_apart if a.shape[1] == 1 else conv_phases.larger_than_output)(a, window)
        loop = {"y": rewrites.loop_fprop, "w": rewrites.loop_wgrad}[open]
        return loop(a, b, window, precision=precision, preferred=_preferred(a.dtype, dtype))
    if name == "shifts":
        most = conv_plan.FOLDED_ON_CPU if platform == "cpu" else conv_plan.FOLDED_ON_GPU
        return conv_lanes.shifts_fprop(a, b, window, acc=acc, fold=a.shape[-1] * math.prod(window.filter) <= most)
    if name == "rows":
        return (conv_line.wgrad if conv_line.fits(a.shape[-1], b.shape[-1], window) else conv_lanes.rows_wgrad)(a, b, window, acc=acc)
    if name == "dots":
        return getattr(rewrites, f"dots_{ROLES[open]}")(a, b, window, acc=acc, precision=precision)

    def part(a, b, window):
        a, window = cropped(a, window)
        if open == "w" and platform == "cpu":
            a, window = conv_phases.larger_than_output(a, window)
        where: Any = dict(splitter=splitter, platform=platform)
        name = conv_plan.plan(open, _sizes(open, a, b), window, dtype=a.dtype, **where)
        return run(name, open, a, b, window, acc=acc, dtype=dtype, precision=precision, **where)

    if name == "folded":
        return conv_phases.folded_wgrad(a, b, window, part=part, acc=acc)
    return getattr(conv_phases, f"phases_{ROLES[open]}")(a, b, window, part=part, acc=acc)


ROLES = {"y": "fprop", "w": "wgrad"}


def _with_whole_outputs(slot, z):
    """Keep z's output channels on every device if there are several groups or filters."""
    groups, axis = {"w": (z.shape[0] * z.shape[1], 2), "y": (z.shape[0] * z.shape[-2], z.ndim - 1)}[slot]
    return z if groups == 1 else _compat.unsplit(z, [axis])


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


def lax_conv(open, a, b, window: Window, *, dtype, precision, platform):
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
        feature_groups, batch_groups = (1, B) if conv_plan.by_batch_groups(B, G, b.shape[2], window, platform) else (B * G, 1)
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
