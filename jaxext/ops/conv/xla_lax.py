"""lax's own convolution: with groups if there are several, or in XLA's own layout, or a dense one for each b and g, in a loop.

A convolution inside a loop is as fast on CPUs as outside only in XLA's own layout, NHWC with the filter HWIO.  In other layouts it is some
fifteen times slower.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxext import _compat
from jaxext.core.window import Window
from jaxext.ops.conv.xla_plan import LANES, Conv, ConvPlan, Work, matrix_product, promote
from jaxext.ops.conv.xla_views import moveaxis, outputs_first, outputs_last, padded, padded_size, pair, repeat, zeros


class Lax(ConvPlan):
    """lax's own convolution.  XLA's CPU backend has Eigen's convolutions, and a loop of its own for what these do not compute."""

    name = "lax"

    @staticmethod
    def work(conv: Conv) -> Work:
        size, wgrad = conv.dtype.itemsize, conv.open == "w"
        copies = conv.x + conv.y if wgrad or conv.B > 1 else 0  # with batch and groups in one axis, or with the batch as channels
        converted = 4 * (conv.x + conv.w + conv.y) if conv.short else 0
        return (_work_of_wgrad if wgrad else _work_of_fprop)(conv) + Work(
            programs=1,
            fusions=conv.dgrad + wgrad * (2 + (conv.groups > 1)) + (conv.B > 1) + 2 * conv.short,
            copied=1.5 * converted + 2 * size * (conv.y * (conv.N > 1) if wgrad else copies),
            transposed=size * conv.x * wgrad,
            bytes=size * (copies + conv.w * conv.dgrad) + converted,
        )

    def run(self, a, b):
        conv, preferred = self.conv, preferred_dtype(a.dtype, self.conv.result)
        if not in_own_layout(conv):
            return _grouped_convolution(conv, a, b, preferred)
        a = lax.squeeze(a, (0, -2))
        if conv.open == "w":
            w = dense_wgrad(a, lax.squeeze(b, (0, -2)), conv.window, conv.precision, preferred)
            return lax.expand_dims(moveaxis(w, -1, 0), (0, 1))
        w = moveaxis(lax.squeeze(b, (0, 1)), 0, -1)
        return lax.expand_dims(dense_fprop(a, w, conv.window, conv.precision, preferred), (0, -2))


def in_own_layout(conv: Conv) -> bool:
    """Return whether a convolution is given to XLA in its own layout, which its CPU backend gives only those outside of loops."""
    return conv.groups == 1 and conv.local


def reverses(conv: Conv) -> bool:
    """Return whether lax's convolution reverses the filter of dgrad itself: right before, in the axes that it has.

    XLA's GPU compiler recognises cuDNN's dgrad only in this form; otherwise it multiplies the zeros of a strided one.
    """
    return conv.dgrad and conv.groups == 1 and not in_own_layout(conv)


def _grouped_convolution(conv: Conv, a, b, preferred):
    """lax's convolution, with groups if B·G > 1: the same HLO as lax's own forward and transposes."""
    window, B, G = conv.window, conv.B, conv.G
    first, last, space = 0, window.rank + 1, tuple(range(1, window.rank + 1))
    convolve = functools.partial(
        _compat.conv_general_dilated, precision=conv.precision, preferred_element_type=preferred, out_sharding=None
    )
    if conv.open == "y":
        w = b.reshape((-1,) + b.shape[3:])
        feature_groups, batch_groups = (1, B) if uses_batch_groups(B, G, conv.K, window, conv.platform) else (B * G, 1)
        x = a.reshape((-1,) + a.shape[2:-2] + a.shape[-1:]) if batch_groups > 1 else _merge(a)
        spec = filter_spec = (first, last, *space)
        if reverses(conv):
            w, filter_spec = lax.rev(w, space), (last, first, *space)
        y = convolve(
            x, w, window_strides=window.stride, padding=window.padding, lhs_dilation=window.input_dilation,
            rhs_dilation=window.filter_dilation, dimension_numbers=lax.ConvDimensionNumbers(spec, filter_spec, spec),
            feature_group_count=feature_groups, batch_group_count=batch_groups,
        )  # fmt: skip
        return _split(y, B, G)
    if any(low > 0 > high for low, high in window.read if all(isinstance(n, int) for n in (low, high))):
        a, window = cropped(a, dataclasses.replace(window, padding=window.read))
        if 0 in window.input:
            return zeros(conv.shape, conv.result, a, b)
    # If only B > 1, the groups are feature groups of x, with B and N in one axis as in lax's vmap.  XLA is slow at batch groups there.
    x = _merge(a) if G > 1 else a.reshape((-1,) + a.shape[2:-2] + a.shape[-1:])
    batch_groups, feature_groups = (B * G, 1) if G > 1 else (1, B)
    spec = (last, first, *space)
    w = convolve(
        x, _merge(b), window_strides=window.filter_dilation, padding=window.read, lhs_dilation=window.input_dilation,
        rhs_dilation=window.stride, dimension_numbers=lax.ConvDimensionNumbers(spec, spec, spec),
        feature_group_count=feature_groups, batch_group_count=batch_groups,
    )  # fmt: skip
    return w.reshape((B, G, -1) + w.shape[1:])


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
    return moveaxis(x, source, destination)


def dense_fprop(x, w, window, precision, preferred):
    """lax's convolution of (N, *input, C) and (*filter, C, K)."""
    last, space = window.rank + 1, tuple(range(1, window.rank + 1))
    numbers = lax.ConvDimensionNumbers((0, last, *space), (last, last - 1, *range(window.rank)), (0, last, *space))
    return lax.conv_general_dilated(
        x, w, window.stride, window.padding, window.input_dilation, window.filter_dilation, numbers,
        precision=precision, preferred_element_type=preferred,
    )  # fmt: skip


def dense_wgrad(x, y, window, precision, preferred):
    """(N, *input, C) and (N, *output, K) -> (*filter, C, K)"""
    window = dataclasses.replace(window, stride=window.filter_dilation, filter_dilation=window.stride, padding=window.read)
    images, filters = moveaxis(x, (0, -1), (-1, 0)), moveaxis(y, 0, -2)
    return moveaxis(dense_fprop(images, filters, window, precision, preferred), 0, -2)


def preferred_dtype(common, dtype):
    """The `preferred_element_type` for lax, whose results are never narrower than the operands.  For floats, a dtype that holds both."""
    wide = promote(common, np.dtype(dtype))
    return wide if wide == dtype or jnp.issubdtype(wide, jnp.floating) else None


def cropped(x, window):
    """Negative padding as a slice of x.

    XLA's CPU convolution before jaxlib 0.12 reads out of bounds if one side of an axis is cropped and the other padded.
    """
    kept, rest = window.cropped
    if rest == window:
        return x, window
    starts, stops = ((part.start for part in kept), (part.stop for part in kept))
    return lax.slice(x, (0, 0, *starts, 0, 0), (*x.shape[:2], *stops, *x.shape[-2:])), rest


def _work_of_fprop(conv):
    window, groups, N, C, K = conv.window, conv.groups, conv.N, conv.C, conv.K
    dilation, plain = math.prod(window.input_dilation), max((*window.stride, *window.filter_dilation), default=1) == 1
    if not window.rank and groups > 1:
        return Work(matrix=groups * matrix_product(N, C, K), calls=1, results=conv.y)
    if not window.rank and conv.dgrad:  # XLA does not call a library for the transposed filter
        return work_of_xla(conv)
    if conv.taps == dilation == 1 and groups == 1 and plain and not any(map(any, window.padding)):
        return Work(matrix=matrix_product(N * conv.outputs, C, K), calls=1, results=conv.y)
    if groups == 1 and exchanges("y", window) and math.prod(window.input) > 1:
        return Work(generic=conv.products / dilation) if dilation > 1 else work_of_xla(conv)
    batched = window.rank == 3 and uses_batch_groups(conv.B, conv.G, K, window, "cpu")
    slow = window.rank == 3 and (groups > 1 or max(window.filter_dilation) > 1) and not batched
    if not _eigen_has(conv) or slow or dilation > 1 and (window.rank == 3 or not plain):
        return work_of_xla(conv)
    if batched:
        return dataclasses.replace(_work_of_eigen(3, 1, groups * N, conv.outputs, conv.taps, C, groups * K, 1), runs_in_space=0)
    if dilation == 1:
        run = window.filter[-1] if max(window.filter_dilation) == 1 else 1
        return _work_of_eigen(window.rank, groups, N, conv.outputs, conv.taps, C, K, run)
    if groups > 1:
        return work_of_xla(conv).times(0.5 / dilation) + Work(rows_in_groups=conv.products / C / K / dilation)
    # Eigen multiplies each input by all taps, and adds the terms where they belong.
    return Work(matrix=matrix_product(N * conv.outputs / dilation, C, conv.taps * K), spread=conv.y * conv.taps / dilation, calls=1)


def _work_of_wgrad(conv):
    """XLA's own loop, or Eigen's convolution of the images as channels; with groups each of them meets all others."""
    window, groups, N, C, K = conv.window, conv.groups, conv.N, conv.C, conv.K
    if not window.rank and groups == 1:
        return Work(matrix=matrix_product(K, N, C), calls=1)
    exchanged = exchanges("w", window)
    alone = groups == 1 or conv.G > 1 and window.rank < 3 and (K == 1 or window.rank == 1 < C)
    if not window.rank or not _eigen_has(conv) or conv.dilated or exchanged or not alone:
        return work_of_xla(conv).times((conv.G if K > 1 else 1) / math.prod(window.input_dilation))
    padded_inside = conv.G > 1 and any(map(any, window.padding))
    run = window.output[-1] if max(window.stride) == 1 and not padded_inside else 1
    found = _work_of_eigen(window.rank, 1, groups * C, conv.taps, conv.outputs, N, groups * K, run)
    return found + Work(bytes=conv.dtype.itemsize * conv.w * (groups - 1))


def _eigen_has(conv):
    return 0 < conv.window.rank < 4 and conv.dtype.itemsize <= 4


def work_of_xla(conv):
    return Work(generic=conv.products, generic_rows=conv.products / conv.K)


LONG_RUN = 64  # elements beside each other, which are copied as one


def _work_of_eigen(rank, groups, images, positions, taps, inputs, outputs, run):
    """Dense convolutions of that many images each, with `run` taps of a row beside each other in memory."""
    rows = groups * images * positions
    gathered = rows * taps * inputs
    uneven = gathered if inputs % LANES and run * inputs < LONG_RUN else 0
    return Work(
        matrix=matrix_product(rows * taps, inputs, outputs),
        gathered=gathered,
        gathered_uneven=uneven if rank < 3 else 0,
        gathered_in_space=gathered if rank == 3 else 0,
        runs_in_space=rows * taps if rank == 3 else 0,
        runs=rows * taps / run * (inputs if groups > 1 and run > 1 else 1),
        rows_in_groups=rows if groups > 1 else 0,
        packed=groups * taps * inputs * outputs,
        results=rows * outputs,
        calls=groups,
    )


class Padded(ConvPlan):
    """lax's convolution of images that are padded before, where XLA would exchange them with a filter that is larger."""

    name = "padded"

    @staticmethod
    def work(conv: Conv) -> Work | None:
        if conv.groups > 1 or conv.dilated or not exchanges(conv.open, conv.window) or not any(map(any, conv.window.padding)):
            return None
        size = conv.dtype.itemsize * conv.x / math.prod(conv.window.input) * padded_size(conv.window)
        inputs = tuple(i + low + high for i, (low, high) in zip(conv.window.input, conv.window.padding, strict=True))
        inside = dataclasses.replace(conv.window, input=inputs, padding=((0, 0),) * conv.window.rank)
        return Lax.work(dataclasses.replace(conv, window=inside)) + Work(fusions=1, copied=2 * size, bytes=size)

    def run(self, a, b):
        a, window = padded_apart(a, self.conv.window)
        return Lax(dataclasses.replace(self.conv, window=window, dgrad=False)).run(a, b)


def exchanges(open, window: Window) -> bool:
    """Return whether XLA exchanges image and filter, as it does where the filter is larger, which y is in wgrad.

    Its CPU backend has no fast convolution for the result: it took two to twenty times as long.
    """
    return math.prod(window.filter if open == "y" else window.output) > math.prod(window.input)


def padded_apart(x, window: Window):
    """x, padded, and the window that is left, if no input is dilated.  The barrier keeps the padding out of the convolution.

    XLA's CPU backend is slow at padding images of a single channel, which one image is in wgrad.
    """
    if max(window.input_dilation, default=1) > 1 or all(ends == (0, 0) for ends in window.padding):
        return x, window
    x = lax.optimization_barrier(padded(x, window))
    return x, dataclasses.replace(window, input=x.shape[2:-2], padding=((0, 0),) * window.rank)


def uses_batch_groups(B, G, K, window, platform):
    """Return whether to use lax's batch groups in fprop: XLA's other convolutions with three axes are slow, the more so with a dilation.

    XLA's CPU backend multiplies the filter of each group with the images of all.
    """
    if window.rank != 3 or not all(isinstance(n, int) for n in (B, G, K)) or B <= 1 or G != 1:
        return False
    dilated = max(*window.input_dilation, *window.filter_dilation) > 1
    return K == 1 if dilated else platform == "cpu" and K <= FILTERS_OF_BATCH_GROUPS and B <= MOST_BATCH_GROUPS


# Up to this K and B, lax's batch groups are fast in fprop with three axes.
FILTERS_OF_BATCH_GROUPS, MOST_BATCH_GROUPS = 4, 8


class Loop(ConvPlan):
    """Dense convolutions in a loop, for groups, batched filters and per-example gradients."""

    name = "loop"

    @staticmethod
    def work(conv: Conv) -> Work | None:
        if conv.groups == 1 or not conv.window.rank:
            return None
        one = dataclasses.replace(conv, B=1, G=1, dtype=np.dtype(np.float32), dgrad=False)
        step = Lax.work(one) if conv.window.rank < 3 else work_of_xla(one)  # Eigen's has three axes only outside of loops
        elements, size = conv.x + conv.w + conv.y, conv.dtype.itemsize
        converted = 4 * elements if conv.short else 0
        return dataclasses.replace(step.times(conv.groups), programs=1, fusions=4, bytes=step.bytes) + Work(
            steps=conv.groups,
            gathered_in_loop=step.gathered_uneven * conv.groups,
            rows_in_loop=(step.results + step.spread) * conv.groups,
            transposed=size * elements,
            copied=1.5 * converted,
            bytes=size * (elements / conv.groups + conv.w) + converted,
        )

    def run(self, a, b):
        conv, window, fprop = self.conv, self.conv.window, self.conv.open == "y"
        a, b = conv.widened(a, b)
        if conv.platform == "cpu" and (fprop or conv.G == 1):  # in groups, an infinity of y must not meet the padding
            if not fprop and conv.N == 1 or exchanges(conv.open, window):
                a, window = padded_apart(a, window)
        preferred, C, K = preferred_dtype(a.dtype, conv.result), conv.C, conv.K
        a, b = a.reshape((*a.shape[:-2], -1)), outputs_last(b) if fprop else b.reshape((*b.shape[:-2], -1))
        dense = dense_fprop if fprop else dense_wgrad

        def step(i, total):
            group = pair(i, conv.B, conv.G)
            part = dense(_part(a, *group, C), _part(b, *group, K), window, conv.precision, preferred)
            return lax.dynamic_update_slice(total, part[None], _starts(total, *group, K), allow_negative_indices=False)

        shape = (conv.B, conv.N, *window.output, conv.G * K) if fprop else (conv.B, *window.filter, C, conv.G * K)
        total = repeat(conv.groups, step, zeros(shape, preferred or a.dtype, a, b))
        return total.reshape(conv.shape) if fprop else outputs_first(total, conv.G)


def _starts(x, b, g, channels):
    return [b, *[np.int32(0)] * (x.ndim - 2), g * np.int32(channels)]


def _part(x, b, g, channels):
    """(B, ..., G·channels) -> (..., channels)"""
    return lax.dynamic_slice(x, _starts(x, b, g, channels), (1,) + x.shape[1:-1] + (channels,), allow_negative_indices=False)[0]
