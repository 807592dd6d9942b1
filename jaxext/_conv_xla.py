"""The `xla` implementation of convolution: lax's own, or the rewrite in plain XLA ops that is known to beat it.

    y[b,n,p,g,k] = Σ_{r,c} x̃[b,n,stride·p + filter_dilation·r,g,c] · w[b,g,k,r,c]

dgrad is the same form with y as the input and the filter reversed (`Window.transposed`), so there are two roles here: fprop and wgrad.
`plan` names the algorithm, `algorithms` the others that a table may name; they see labels, sizes and the window, never a clock.  It must
not know primitives, sharding or derivatives.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxext import _conv_rewrites as rewrites
from jaxext._window import Window, dilate


def conv(
    open: str,
    operands: dict[str, jax.Array],
    window: Window,
    *,
    algorithm: str | None = None,
    dtype,
    precision,
    splitter: str,
    platform="cpu",
) -> jax.Array:
    """The open slot, from arrays with exactly one axis per label, by one of its `algorithms`: `plan`'s if it is None.

    XLA's partitioner never gets a grouped convolution, which it splits wrongly.
    """
    w = operands["w"] if open == "x" else None
    if w is not None:
        operands, window, open = {"x": operands["y"], "w": _reversed(w, window)}, window.transposed, "y"
    a, b = operands["x"], operands["w" if open == "y" else "y"]
    common, acc = _dtypes(a.dtype, b.dtype, dtype)
    a, b = a.astype(common), b.astype(common)
    name = algorithm or plan(open, _sizes(open, a, b), window, dtype=common, splitter=splitter, platform=platform)
    if name == "lax" and w is not None and w.shape[:2] == (1, 1):
        return lax_conv("x", a, w.astype(common), window, dtype=np.dtype(dtype), precision=precision).astype(dtype)
    how = dict(acc=acc, dtype=np.dtype(dtype), precision=precision, splitter=splitter, platform=platform)
    return run(name, open, a, b, window, **how).astype(dtype)


def algorithms(open: str, sizes: Mapping[str, int], window: Window, *, dtype, splitter: str, platform="cpu") -> list[str]:
    """What computes the call: the name that `plan` gives, then those worth measuring against it, none where XLA may still partition."""
    first = plan(open, sizes, window, dtype=dtype, splitter=splitter, platform=platform)
    static = all(isinstance(n, int) for n in (*sizes.values(), *window.input))
    if first == "zeros" or not static or splitter not in ("nobody", "labels") or not jnp.issubdtype(dtype, jnp.inexact):
        return [first]
    if open == "x":
        sizes, window, open = {**sizes, "C": sizes["K"], "K": sizes["C"]}, window.transposed, "y"
    B, G, C, K = (sizes[label] for label in "BGCK")
    found = [first, "lax", "dots"]
    if 1 < math.prod(window.input_dilation) <= MOST_UNROLLED:
        return list(dict.fromkeys([*found, "phases"]))
    if window.rank and C * K <= 4 * FEW_CHANNELS and C * math.prod(window.filter) <= MOST_TERMS:
        found.append("shifts" if open == "y" else "rows")
    if B > 1:
        found.append("loop")
    if B * G > 1:
        merged = (m for m in range(1, G + 1) if G % m == 0 and m * min(C, K) <= 4 * DENSE_CHANNELS and B * G // m <= MOST_UNROLLED)
        found += [f"blocks/{m}" for m in merged]
    return list(dict.fromkeys(found))


def plan(open: str, sizes: Mapping[str, int], window: Window, *, dtype, splitter: str, platform="cpu") -> str:
    """The name of the algorithm, from what is static: labels, sizes, window and the dtype of both operands (`promote`).

    zeros      no product is taken: an axis is empty
    lax        lax's own convolution; the only one for dense problems without input dilation
    phases     one convolution for each residue of outputs: input dilation, and so the dgrad of a strided convolution
    shifts     fprop of few channels per group (depthwise): shifted inputs times weights, elementwise
    rows       wgrad of the same: a scan over output rows
    blocks/m   one dense convolution for each b and each m groups: grouped, batched filters, per-example gradients
    loop       one dot per tap, one b at a time: as blocks, with too many b to unroll
    dots       one batched dot per tap: in place of lax's grouped convolution wherever XLA may still partition, and of integers' on GPUs
    """
    dgrad = open == "x"
    if dgrad:
        sizes, window, open = {**sizes, "C": sizes["K"], "K": sizes["C"]}, window.transposed, "y"
    B, G, C, K = (sizes[label] for label in "BGCK")
    extents = (*sizes.values(), *window.input, *window.filter, *window.output)
    static = all(isinstance(n, int) for n in extents)
    if any(isinstance(n, int) and n == 0 for n in extents):
        return "zeros"
    if platform in GPUS and not jnp.issubdtype(dtype, jnp.inexact):
        return "dots"  # XLA refuses their convolutions there, saturates them, or gets groups of them wrong
    grouped = "lax" if splitter in ("nobody", "labels") else "dots"
    if splitter == "xla":
        return "lax" if B == 1 and G == 1 else "dots"
    if not static or not jnp.issubdtype(dtype, jnp.inexact):
        return "lax" if B == 1 and G == 1 else grouped
    if platform in GPUS:
        return _plan_of_gpu(open, dgrad, sizes, window)
    if 1 < math.prod(window.input_dilation) <= MOST_UNROLLED:
        return "phases"
    if B == 1 and G == 1:
        return "lax"
    if G > 1 and window.rank and C * K <= FEW_CHANNELS and C * math.prod(window.filter) <= MOST_TERMS:
        return "shifts" if open == "y" else "rows"
    if open == "w" and G > 1 and C == K == 1:
        return grouped
    if open == "w":
        worth = G > 1 or C * K >= MATRIX_CHANNELS
    else:
        worth = sizes["N"] * math.prod(window.output) >= MANY_POSITIONS
    if worth and (merged := _merged(B, G, C, K)):
        return f"blocks/{merged}"
    return "loop" if C * K >= MATRIX_CHANNELS or (open == "w" and G > 1) else grouped


def _plan_of_gpu(open, dgrad, sizes, window):
    """cuDNN's convolution, with groups or without, but for inputs full of zeros and for few products that are one fusion.

    A loop over images or rows, which suits a CPU's cache, would be thousands of tiny kernels, and a block of groups a kernel of its own.
    A strided dense dgrad, whose window arrives transposed, is no input full of zeros: cuDNN has a call for it.
    """
    B, G, C, K = (sizes[label] for label in "BGCK")
    of_cudnn = dgrad and B * G == 1 and max((*window.stride, *window.filter_dilation), default=1) == 1
    if 1 < math.prod(window.input_dilation) <= MOST_UNROLLED and not of_cudnn:
        return "phases"
    few = C * K <= FEW_CHANNELS and C * math.prod(window.filter) <= rewrites.FUSED_TERMS
    return "shifts" if open == "y" and G > 1 and window.rank and few else "lax"


GPUS = ("cuda", "rocm")
# Convolutions that one program may hold: each takes XLA some 50 ms to compile.
MOST_UNROLLED = 16
# C·K up to which a group's channels are cheaper as elementwise lanes than as a matrix.
FEW_CHANNELS = 16
# Terms of an unrolled elementwise sum: at 15x15 lax wins, and 225 terms take over a second to compile.
MOST_TERMS = 128
# Channels below which a dense convolution leaves its vector units idle: groups are merged up to here.
DENSE_CHANNELS = 16
# C·K from which a dot per tap, and a dense wgrad, fill the vector units.
MATRIX_CHANNELS = 512
# N times output positions from which a convolution outweighs the copies that cut it out.
MANY_POSITIONS = 512


def _merged(B, G, C, K):
    """Groups per block: the fewest that fill a dense convolution and leave few of them; 0 if there is no such number.

    Of m merged groups m - 1 parts in m are multiplied by zeros, so a number of groups that few divide is not merged at all.
    """
    most = max(1, 2 * DENSE_CHANNELS // min(C, K))
    for m in range(1, min(G, most) + 1):
        if G % m == 0 and m * min(C, K) >= min(DENSE_CHANNELS, G * min(C, K)) and B * G // m <= MOST_UNROLLED:
            return m
    return 0


def run(name, open, a, b, window, *, acc, dtype, precision, splitter, platform="cpu"):
    """The algorithm `name`, for operands x and w (open y) or x and y (open w) of one dtype; the result may be in `acc` still."""
    name, _, merged = name.partition("/")
    if name == "zeros":
        return rewrites.zeros(_shape(open, _sizes(open, a, b), window), dtype, a, b)
    if name == "lax":
        return lax_conv(open, a, b, window, dtype=dtype, precision=precision)
    if name == "blocks":
        blocks = {"y": rewrites.blocks_fprop, "w": rewrites.blocks_wgrad}[open]
        return blocks(a, b, window, dense=functools.partial(lax_conv, open, dtype=dtype, precision=precision), merged=int(merged or 1))
    if name == "phases":
        phases = {"y": rewrites.phases_fprop, "w": rewrites.phases_wgrad}[open]

        def part(a, b, window):
            name = plan(open, _sizes(open, a, b), window, dtype=a.dtype, splitter=splitter, platform=platform)
            return run(name, open, a, b, window, acc=acc, dtype=dtype, precision=precision, splitter=splitter, platform=platform)

        return phases(a, b, window, part=part, acc=acc)
    return getattr(rewrites, f"{name}_{ROLES[open]}")(a, b, window, acc=acc, precision=precision)


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
    """What both operands are cast to, without loss, and what the sum is taken in: float32 at least, if it is a float."""
    common = promote(a, b)
    acc = promote(common, np.dtype(result))
    if jnp.issubdtype(acc, jnp.floating) and acc.itemsize < 4:
        acc = np.dtype(np.float32)
    return common, acc


def promote(a, b):
    """jax's standard promotion, where a float of 8 bits or fewer counts as bfloat16, which holds it exactly."""
    if a == b:
        return a
    a, b = (jnp.bfloat16 if jnp.issubdtype(d, jnp.floating) and d.itemsize == 1 else d for d in (a, b))
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(a, b)


def lax_conv(open, a, b, window: Window, *, dtype, precision):
    """lax's convolution, with groups where B·G > 1: the same HLO as lax's own forward and transposes.

    With x open, of one group, `a` is y, `b` is w and the window is transposed: XLA's GPU compiler finds cuDNN's dgrad where the reversal of
    the filter comes right before the convolution.  Else it writes out the zeros of a strided one, and multiplies by them.
    """
    a, window = _cropped(a, window)
    B, G = a.shape[0], a.shape[-2]
    first, last, space = 0, window.rank + 1, tuple(range(1, window.rank + 1))
    common = a.dtype
    preferred = dtype if promote(common, np.dtype(dtype)) == dtype else None
    # The primitive and not the function, which takes no symbolic padding.
    conv = functools.partial(lax.conv_general_dilated_p.bind, precision=precision, preferred_element_type=preferred, out_sharding=None)
    if open != "w":
        w = b.reshape((-1,) + b.shape[3:])
        spec = filter_spec = (first, last, *space)
        if open == "x":
            w, filter_spec = lax.rev(w, space), (last, first, *space)
        y = conv(
            _merge(a), w, window_strides=window.stride, padding=window.padding, lhs_dilation=window.input_dilation,
            rhs_dilation=window.filter_dilation, dimension_numbers=lax.ConvDimensionNumbers(spec, filter_spec, spec),
            feature_group_count=B * G, batch_group_count=1,
        )  # fmt: skip
        return _split(y, B, G)
    axes = zip(
        window.padding,
        window.output,
        window.stride,
        window.filter,
        window.filter_dilation,
        window.input,
        window.input_dilation,
        strict=True,
    )
    padding = tuple((low, dilate(o, s) + dilate(r, dr) - 1 - low - dilate(i, di)) for (low, _), o, s, r, dr, i, di in axes)
    # Groups of b alone are feature groups of x with B and N in one axis, as in lax's vmap: XLA is fast there and slow at batch groups.
    x = _merge(a) if G > 1 else a.reshape((-1,) + a.shape[2:-2] + a.shape[-1:])
    batch_groups, feature_groups = (B * G, 1) if G > 1 else (1, B)
    spec = (last, first, *space)
    w = conv(
        x, _merge(b), window_strides=window.filter_dilation, padding=padding, lhs_dilation=window.input_dilation,
        rhs_dilation=window.stride, dimension_numbers=lax.ConvDimensionNumbers(spec, spec, spec),
        feature_group_count=feature_groups, batch_group_count=batch_groups,
    )  # fmt: skip
    return w.reshape((B, G, -1) + w.shape[1:])


def _cropped(x, window):
    """Negative padding as a slice of x.

    XLA's CPU convolution before jaxlib 0.12 reads out of bounds where one side of an axis is cropped and the other padded.
    """
    starts, stops, padding = [0] * x.ndim, list(x.shape), list(window.padding)
    for axis, ((low, high), i, di) in enumerate(zip(window.padding, window.input, window.input_dilation, strict=True)):
        numbers = all(isinstance(n, int) for n in (low, high, i))
        if numbers and di == 1 and min(low, high) < 0 and (start := max(0, -low)) < (stop := i + min(0, high)):
            starts[axis + 2], stops[axis + 2], padding[axis] = start, stop, (max(0, low), max(0, high))
    if padding == list(window.padding):
        return x, window
    x = lax.slice(x, starts, stops)
    return x, dataclasses.replace(window, input=x.shape[2 : 2 + window.rank], padding=tuple(padding))


def _merge(x):
    """(B, N, *space, G, C) -> (N, *space, B·G·C)"""
    return _moved(x, 0, -3).reshape(x.shape[1:-2] + (-1,))


def _split(y, B, G):
    """(N, *space, B·G·K) -> (B, N, *space, G, K)"""
    return _moved(y.reshape(y.shape[:-1] + (B, G, -1)), -3, 0)


def _moved(x, source, destination):
    """`moveaxis`, but a reshape where the axis has size 1: XLA may copy even then."""
    if x.shape[source] == 1:
        shape = [n for i, n in enumerate(x.shape) if i != source % x.ndim]
        shape.insert(destination % x.ndim, 1)
        return x.reshape(shape)
    return jnp.moveaxis(x, source, destination)
