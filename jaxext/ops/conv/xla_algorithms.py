"""The `xla` convolution: lax's own, or a rewrite in plain XLA ops that is faster.

    y[b,n,p,g,k] = Σ_{r,c} x̃[b,n,stride·p + filter_dilation·r,g,c] · w[b,g,k,r,c]

dgrad is fprop with y as the input and the filter reversed (`Window.transposed`), so only two roles remain here: fprop and wgrad.
`conv_plan` selects the algorithm.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxext import _compat
from jaxext.core.call import Splitter
from jaxext.core.window import Window
from jaxext.ops.conv import xla_dots as conv_dots
from jaxext.ops.conv import xla_lax as conv_lax
from jaxext.ops.conv import xla_line as conv_line
from jaxext.ops.conv import xla_loop as conv_loop
from jaxext.ops.conv import xla_phases as conv_phases
from jaxext.ops.conv import xla_plan as conv_plan
from jaxext.ops.conv import xla_rows as conv_rows
from jaxext.ops.conv import xla_shifts as conv_shifts
from jaxext.ops.conv.xla_lax import cropped, preferred_dtype, promote
from jaxext.ops.conv.xla_plan import Plan
from jaxext.ops.conv.xla_views import moveaxis, zeros
from jaxext.ops.conv.xla_work import Conv


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
            return zeros((*y.shape[:2], *window.input, y.shape[-2], w.shape[-1]), np.dtype(dtype), y, w)
        operands, window, open = {"x": operands["y"], "w": _reversed(w, window)}, window.transposed, "y"
    a, b = operands["x"], operands["w" if open == "y" else "y"]
    a, window = cropped(a, window)
    common, acc = _dtypes(a.dtype, b.dtype, dtype)
    a, b = a.astype(common), b.astype(common)
    problem = _problem(open, a, b, window, dgrad=w is not None)
    how: Any = dict(splitter=splitter, platform=platform)
    plan = conv_plan.plan(problem, algorithm, **how)
    if plan.algorithm == "lax" and w is not None and w.shape[:2] == (1, 1) and not _in_own_layout(1, splitter, platform):
        own = conv_lax.lax_conv("x", a, w.astype(common), window, dtype=np.dtype(dtype), precision=precision, platform=platform)
        return own.astype(dtype)
    return run(plan, problem, a, b, acc=acc, dtype=np.dtype(dtype), precision=precision, **how).astype(dtype)


def run(plan: Plan, conv: Conv, a, b, *, acc, dtype, precision, splitter, platform):
    """Run the plan on x and w (y open) or x and y (w open) of one dtype.  The result may have the dtype `acc`."""
    open, window, name = conv.open, conv.window, plan.algorithm
    if name == "zeros":
        return zeros(_shape(conv), dtype, a, b)
    if name == "padded":
        a, window = conv_lax.padded_apart(a, window)
        name = "lax"
    if name == "lax" and _in_own_layout(conv.groups, splitter, platform):
        return conv_lax.dense(open, a, b, window, precision=precision, preferred=preferred_dtype(a.dtype, dtype))
    if name == "lax":
        return conv_lax.lax_conv(open, a, b, window, dtype=dtype, precision=precision, platform=platform)
    if name in ("loop", "dots") and platform == "cpu" and jnp.issubdtype(a.dtype, jnp.floating):
        a, b = a.astype(acc), b.astype(acc)  # XLA would convert a bfloat16 result in every step, and has no code for some dots of it
    if name == "loop":
        if platform == "cpu" and (open == "y" or conv.G == 1):  # in groups, an infinity of y must not meet the padding
            apart = open == "w" and conv.N == 1
            a, window = conv_lax.padded_apart(a, window) if apart else conv_lax.unexchanged(open, a, window)
        loop = {"y": conv_loop.loop_fprop, "w": conv_loop.loop_wgrad}[open]
        return loop(a, b, window, precision=precision, preferred=preferred_dtype(a.dtype, dtype))
    if name == "shifts":
        fold = conv.C * conv.taps <= (FOLDED_ON_CPU if platform == "cpu" else conv_plan.FOLDED_ON_GPU)
        y = conv_shifts.shifts_fprop(a, b, window, acc=acc, fold=fold).astype(dtype)
        # XLA would compute the sum again in each fusion that reads it.
        return y if fold or platform != "cpu" else lax.optimization_barrier(y)
    if name == "rows":
        return (conv_line.wgrad if conv_line.fits(conv.C, conv.K, window) else conv_rows.rows_wgrad)(a, b, window, acc=acc)
    if name == "dots":
        dots = {"y": conv_dots.dots_fprop, "w": conv_dots.dots_wgrad}[open]
        return dots(a, b, window, acc=acc, precision=precision, local=platform == "cpu" and splitter.by_labels)

    def part(a, b, window):
        a, window = cropped(a, window)
        inner = _problem(open, a, b, window)
        return run(plan.parts[inner], inner, a, b, acc=acc, dtype=dtype, precision=precision, splitter=splitter, platform=platform)

    rewrite = {"y": conv_phases.phases_fprop, "w": conv_phases.folded_wgrad if name == "folded" else conv_phases.phases_wgrad}[open]
    return rewrite(a, b, window, part=part, acc=acc)


# Up to this many terms, XLA's CPU compiler computes padding and sum in one pass, as fast as the sum alone.
FOLDED_ON_CPU = 4


def _problem(open, a, b, window, dgrad=False):
    K = b.shape[2] if open == "y" else b.shape[-1]
    return Conv(open, a.shape[0], a.shape[1], a.shape[-2], a.shape[-1], K, window, np.dtype(a.dtype), dgrad)


def _with_whole_outputs(slot, z):
    """Keep z's output channels on every device if there are several groups or filters."""
    groups, axis = {"w": (z.shape[0] * z.shape[1], 2), "y": (z.shape[0] * z.shape[-2], z.ndim - 1)}[slot]
    return z if groups == 1 else _compat.unsplit(z, [axis])


def _in_own_layout(groups, splitter, platform):
    """Whether a convolution is given to XLA in its own layout, which its CPU backend gives only those outside of loops."""
    return platform == "cpu" and groups == 1 and splitter.by_labels


def _shape(conv):
    window = conv.window
    if conv.open == "y":
        return (conv.B, conv.N, *window.output, conv.G, conv.K)
    return (conv.B, conv.G, conv.K, *window.filter, conv.C)


def _reversed(w, window):
    """The filter of dgrad: (B, G, K, *filter, C) -> (B, G, C, *reversed filter, K).

    XLA makes one transposition of several if no axis of size 1 is between them.
    """
    alone = w.shape[:2] == (1, 1)
    w = w.reshape(w.shape[2:]) if alone else w
    last = w.ndim - 1
    w = lax.rev(w, tuple(range(last - window.rank, last)))
    w = moveaxis(w, (last, last - window.rank - 1), (last - window.rank - 1, last))
    return lax.expand_dims(w, (0, 1)) if alone else w


def _dtypes(a, b, result):
    """A dtype that holds both operands exactly, and the dtype of accumulation: at least float32 for floats."""
    common = promote(a, b)
    acc = promote(common, np.dtype(result))
    if jnp.issubdtype(acc, jnp.floating) and acc.itemsize < 4:
        acc = np.dtype(np.float32)
    return common, acc
