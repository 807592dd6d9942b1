"""The `fft` implementation of convolution: products of spectra, in float32 or float64.

With zeros of the dilations and strides between the elements of x, w and y,

    y[b] = Σ_u w[u] x[b + u],        so  ŷ = x̂ · conj ŵ        and  ŵ = x̂ · conj ŷ

for the spectra of circular transforms with at least as many points as x has: what wraps around is not read.  dgrad is fprop of y by the
reversed filter (`Window.transposed`), so x̂ = ŷ · ŵ.  The products are those of all other labels, for each frequency.

The loop over *steps* bounds the memory.  A step has a part of the groups, of the images, and, where the filter is much shorter than the
result, a block of the outputs along one axis: neighbouring blocks read overlapping inputs (overlap-save).  The spectrum of the filter stays
from step to step; that of wgrad is added up.  If there is one step, XLA computes each spectrum once for a result and its gradients in one
program.  If there are several, the gradients compute the spectra again, and none is kept.

The error of each element is in proportion to the norms of x and w, also of what it does not read, and an infinity spreads over all.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxext.core.call import Call, symbolic_size
from jaxext.core.implementation import Implementation, Plan, file_of, hash_of
from jaxext.core.window import Window, dilate
from jaxext.ops.conv.xla_lax import cropped
from jaxext.ops.conv.xla_plan import Conv
from jaxext.ops.conv.xla_views import divisor, moveaxis, pair, repeat, zeros

MOST_AXES = 3  # of lax.fft
IN_THE_NORM = "taken only by name or tuned with a tolerance: errors are relative to the operands' norm, infinities spread"
SPLIT = (
    "XLA's partitioner may split this program, and gives FFTs layouts that its CPU backend refuses: "
    "use jit with automatic axes, or a shard_map over all axes, and no export"
)
# The spectra of a step have so many bytes, if that is possible.
STEP_BYTES, STEP_BYTES_ELSEWHERE = 64 << 20, 1 << 30
# Nanoseconds on two cores of a CPU: of a point of a transform and each bit of their number, of a product of complex numbers, of a step.
POINT_NS, PRODUCT_NS, STEP_NS = 0.25, 0.4, 1e5
SEVERAL = 1.5  # several steps are taken if this many times their time is less: they copy, and share no spectra with the gradients
TERMS = 16  # of a sum of products that are added in one pass
CANDIDATES = 4


@dataclasses.dataclass(frozen=True)
class Steps:
    """The config: how much of a convolution a step has.

    Attributes:
      axis: the spatial axis that is cut into blocks.
      outputs: the number in a block, along it.
      groups, images: the number in a step.
    """

    axis: int
    outputs: int
    groups: int
    images: int


class FftConv(Implementation):
    """Convolutions of floats and complex numbers with one to three spatial axes."""

    name, version = "fft", "of its files"

    def code(self, platform: str) -> str:
        return hash_of(map(file_of, (FftConv, Conv, Window)))

    def refuses(self, call: Call) -> str | None:
        if symbolic := symbolic_size(call):
            return symbolic
        assert call.window is not None
        if not 1 <= call.window.rank <= MOST_AXES:
            return f"there are {call.window.rank} spatial axes, want 1 to {MOST_AXES}"
        inexact = [jnp.issubdtype(dtype, jnp.inexact) for dtype in (*call.dtypes.values(), call.dtype)]
        if not all(inexact):
            return "an FFT rounds, want floating-point or complex numbers"
        return None if call.partitioner.by_labels else SPLIT

    def plan(self, call: Call) -> Plan | str:
        return self._reason("refuses", call) or FftPlan(self, call)


class FftPlan(Plan):
    """The plan of a call."""

    only_if_named, in_the_norm = IN_THE_NORM, True

    def __init__(self, implementation: FftConv, call: Call):
        super().__init__(implementation, call)
        self.conv, self.window = Conv.of(call)
        window = self.conv.window
        self.empty = call.empty or 0 in (*window.input, *window.output)

    @functools.cached_property
    def configs(self) -> Sequence[Steps]:
        return (Steps(0, 0, 0, 0),) if self.empty else steps(self.conv)

    def describe(self, config: Steps) -> str:
        if self.empty:
            return "zeros"
        count = math.prod(_counts(self.conv, config))
        return f"{'x'.join(map(str, points(self.conv, config)))} points" + (f" in {count} steps" if count > 1 else "")

    def multiplies(self) -> str:
        return "spectra: its error is in the norm"

    def run(self, config: Steps, operands: Mapping[str, jax.Array]) -> jax.Array:
        call, conv = self.call, self.conv
        operands = call.flatten(operands)
        if self.empty:
            return zeros(call.shape, call.dtype, *operands.values())
        a, b = operands["y" if conv.dgrad else "x"], operands["y" if conv.open == "w" else "w"]
        a, _ = cropped(a, self.window)
        return (_wgrad if conv.open == "w" else _fprop)(conv, config, a, b).reshape(call.shape)


def good_length(n: int) -> int:
    """The least even number from n on that is a product of 2, 3 and 5."""
    odd = (3**i * 5**j for i in range(20) for j in range(14) if 3**i * 5**j <= n)
    return min(of * max(2, 1 << (-(-n // of) - 1).bit_length()) for of in odd)


def steps(conv: Conv) -> list[Steps]:
    """The configs, the least expected time first."""
    window = conv.window
    axis = max(range(window.rank), key=lambda i: window.output[i] / window.filter[i])
    outputs, taps, stride = window.output[axis], _taps(window)[axis], window.stride[axis]
    blocks = {(good_length(taps << i) - taps) // stride + 1 for i in range(1, 7)}
    found = [_within(conv, axis, n) for n in {outputs, *(n for n in blocks if n < outputs)}]

    def order(config: Steps) -> tuple[int, float, int]:
        """The least time on a CPU.  Elsewhere the fewest steps, each of which is a few kernels."""
        count = math.prod(_counts(conv, config))
        return 0 if conv.platform == "cpu" else count, run_ms(conv, config) * (SEVERAL if count > 1 else 1), config.outputs

    return sorted(found, key=order)[:CANDIDATES]


def _within(conv: Conv, axis: int, outputs: int) -> Steps:
    """The steps of blocks of this size, of as many groups and images as memory allows."""
    most = STEP_BYTES if conv.platform == "cpu" else STEP_BYTES_ELSEWHERE
    shape = _frequencies(conv, points(conv, Steps(axis, outputs, 1, 1)))
    spectrum = 2 * _complex(conv).itemsize * math.prod(shape)  # with the numbers that it is of
    image, filters = spectrum * (conv.C + conv.K), spectrum * conv.C * conv.K
    pairs = most // (image * conv.N + filters)  # of filters and groups
    groups = _even_part(conv.G, pairs)
    groups *= _even_part(conv.B, pairs // groups) if groups == conv.G else 1
    return Steps(axis, outputs, groups, divisor(conv.N, max(1, (most // groups - filters) // image)))


def _even_part(n: int, most: int) -> int:
    """The size of a part of n, if there are as few parts as possible, of at most `most`."""
    return -(-n // -(-n // max(1, most)))


def run_ms(conv: Conv, config: Steps) -> float:
    """Expected milliseconds on two cores of a CPU."""
    count, lengths = math.prod(_counts(conv, config)), points(conv, config)
    n, pairs = math.prod(lengths), _counts(conv, config)[0]
    transforms = count * config.groups * config.images * (conv.C + conv.K) + pairs * config.groups * conv.C * conv.K
    products = count * config.groups * config.images * conv.C * conv.K * math.prod(_frequencies(conv, lengths))
    return 1e-6 * (POINT_NS * transforms * n * math.log2(n) + PRODUCT_NS * products + STEP_NS * (count - 1))


def points(conv: Conv, config: Steps) -> list[int]:
    """The points of the transform along each axis."""
    return [good_length(n) for n in _extents(conv, config)]


def _extents(conv: Conv, config: Steps) -> list[int]:
    """The inputs that the outputs of a step read, along each axis."""
    window = conv.window
    outputs = [config.outputs if i == config.axis else n for i, n in enumerate(window.output)]
    return [dilate(o, s) + taps - 1 for o, s, taps in zip(outputs, window.stride, _taps(window), strict=True)]


def _counts(conv: Conv, config: Steps) -> tuple[int, int, int]:
    """The numbers of steps: of filters and groups, of images, of blocks."""
    sizes = _group_sizes(conv, config)
    groups = math.prod(-(-n // size) for n, size in zip((conv.B, conv.G), sizes, strict=True))
    return groups, conv.N // config.images, -(-conv.window.output[config.axis] // config.outputs)


def _taps(window: Window) -> list[int]:
    return [dilate(r, d) for r, d in zip(window.filter, window.filter_dilation, strict=True)]


def _is_complex(conv: Conv) -> bool:
    return jnp.issubdtype(conv.sums, jnp.complexfloating)


def _complex(conv: Conv) -> np.dtype:
    return np.result_type(conv.sums, np.complex64)


def _fprop(conv: Conv, config: Steps, x: jax.Array, w: jax.Array) -> jax.Array:
    """(B, N, *input, G, C) and (B, G, K, *filter, C), in dgrad with C and K exchanged -> (B, N, *output, G, K)"""
    window, lengths, groups = conv.window, points(conv, config), _group_sizes(conv, config)
    parts, images, blocks = _counts(conv, config)
    space = tuple(range(4, 4 + window.rank))  # of spectra
    x = _padded(conv, config, x)

    def group_step(i, y):
        b, g = _first_groups(conv, groups, i)
        part = _part(w, {0: (b, groups[0]), 1: (g, groups[1])})  # (b, g, K, *filter, C), or with C and K exchanged
        part = moveaxis(part, (-1, 2), (2, 3)) if conv.dgrad else moveaxis(part, -1, 3)
        spectrum = _spectrum if conv.dgrad else _reversed_spectrum
        filters = spectrum(conv, lengths, part, [(0, d) for d in window.filter_dilation])

        def block_step(j, y):
            n, p = _first_outputs(conv, config, blocks, j)
            inputs = _inputs(conv, config, lengths, x, b, n, g, p)
            outputs = _inverse(conv, lengths, _sum_of_products(conv, inputs[:, :, :, None], filters[:, None], 4))
            sizes = [config.outputs if i == config.axis else o for i, o in enumerate(window.output)]
            first = [taps - 1 if conv.dgrad else 0 for taps in _taps(window)]  # of the outputs, in a circle that is not turned back
            ends = [at + dilate(o, s) for at, o, s in zip(first, sizes, window.stride, strict=True)]
            outputs = lax.slice(outputs, (*[0] * 4, *first), (*outputs.shape[:4], *ends), (1,) * 4 + window.stride)
            outputs = moveaxis(outputs, space, range(2, 2 + window.rank)).astype(y.dtype)
            starts = [b, n, *[p if i == config.axis else np.int32(0) for i in range(window.rank)], g, np.int32(0)]
            return lax.dynamic_update_slice(y, outputs, starts, allow_negative_indices=False)

        return _loop(images * blocks, block_step, y)

    return _loop(parts, group_step, zeros(conv.shape, conv.result, x, w))


def _wgrad(conv: Conv, config: Steps, x: jax.Array, y: jax.Array) -> jax.Array:
    """(B, N, *input, G, C) and (B, N, *output, G, K) -> (B, G, K, *filter, C)"""
    window, lengths, groups = conv.window, points(conv, config), _group_sizes(conv, config)
    parts, images, blocks = _counts(conv, config)
    at = 2 + config.axis
    x = _padded(conv, config, x)

    def group_step(i, w):
        b, g = _first_groups(conv, groups, i)

        def block_step(j, total):
            n, p = _first_outputs(conv, config, blocks, j)
            inputs = _inputs(conv, config, lengths, x, b, n, g, p)
            parts = {0: (b, groups[0]), 1: (n, config.images), at: (p, config.outputs), y.ndim - 2: (g, groups[1])}
            outputs = _part(y, parts)
            if blocks > 1:  # the last one begins among the outputs of the one before
                own = lax.rem(j, np.int32(blocks)) * np.int32(config.outputs)
                outputs = jnp.where(lax.broadcasted_iota(np.int32, outputs.shape, at) + p >= own, outputs, np.zeros((), y.dtype))
            outputs = _reversed_spectrum(conv, lengths, moveaxis(outputs, (-2, -1), (2, 3)), [(0, s) for s in window.stride])
            return total + _sum_of_products(conv, inputs[:, :, :, None], outputs[:, :, :, :, None], 1)

        total = zeros((*groups, conv.K, conv.C, *_frequencies(conv, lengths)), _complex(conv), x, y)
        filters = _inverse(conv, lengths, _loop(images * blocks, block_step, total))
        filters = lax.slice(filters, (0,) * filters.ndim, (*filters.shape[:4], *_taps(window)), (1,) * 4 + window.filter_dilation)
        starts = [b, g, *[np.int32(0)] * (w.ndim - 2)]
        return lax.dynamic_update_slice(w, moveaxis(filters, 3, -1).astype(w.dtype), starts, allow_negative_indices=False)

    return _loop(parts, group_step, zeros(conv.shape, conv.result, x, y))


def _group_sizes(conv: Conv, config: Steps) -> tuple[int, int]:
    """The filters and the groups of a step: all groups if there are several filters."""
    return max(1, config.groups // conv.G), min(conv.G, config.groups)


def _first_groups(conv: Conv, sizes: tuple[int, int], i):
    """The first filter and the first group of step i.  The last part is as large as the others, so it begins earlier."""
    each = (conv.B, conv.G)
    indices = pair(i, *(-(-n // size) for n, size in zip(each, sizes, strict=True)))
    return [lax.min(at * np.int32(size), np.int32(n - size)) for at, size, n in zip(indices, sizes, each, strict=True)]


def _first_outputs(conv: Conv, config: Steps, blocks: int, j):
    """The first image and the first output of step j.  The last block is as long as the others, so it begins earlier."""
    n, block = pair(j, conv.N // config.images, blocks)
    last = np.int32(conv.window.output[config.axis] - config.outputs)
    return n * np.int32(config.images), lax.min(block * np.int32(config.outputs), last)


def _loop(count: int, step: Callable, total: jax.Array) -> jax.Array:
    return repeat(count, step, total) if count > 1 else step(np.int32(0), total)


def _part(x: jax.Array, parts: Mapping[int, tuple[Any, int]]) -> jax.Array:
    """The slice of x that begins at `first` and has `size` elements along each of some axes: {axis: (first, size)}."""
    starts = [parts[axis][0] if axis in parts else np.int32(0) for axis in range(x.ndim)]
    sizes = [parts[axis][1] if axis in parts else n for axis, n in enumerate(x.shape)]
    return lax.dynamic_slice(x, starts, sizes, allow_negative_indices=False)


def _padded(conv: Conv, config: Steps, x: jax.Array) -> jax.Array:
    """x with its padding and the zeros of its dilation along the axis that is cut into blocks."""
    window, i = conv.window, config.axis
    if config.outputs == window.output[i]:
        return x
    low, high = window.read[i]
    return _pad(x, {2 + i: (low, high, window.input_dilation[i] - 1)})


def _inputs(conv: Conv, config: Steps, lengths, x: jax.Array, b, n, g, p) -> jax.Array:
    """The spectra (b, n, g, C, ...) of what the outputs of a step read, from output p on along the axis of blocks."""
    window, at, groups = conv.window, 2 + config.axis, _group_sizes(conv, config)
    parts = {0: (b, groups[0]), 1: (n, config.images), x.ndim - 2: (g, groups[1])}
    lows = [(low, d) for (low, _), d in zip(window.padding, window.input_dilation, strict=True)]
    if config.outputs < window.output[config.axis]:
        parts[at] = p * np.int32(window.stride[config.axis]), _extents(conv, config)[config.axis]
        lows[config.axis] = 0, 1
    return _spectrum(conv, lengths, moveaxis(_part(x, parts), (-2, -1), (2, 3)), lows)


def _spectrum(conv: Conv, lengths: Sequence[int], x: jax.Array, lows: Sequence[tuple[int, int]]) -> jax.Array:
    """The spectrum along the last axes, each of which has (zeros before it, dilation)."""
    first = x.ndim - len(lengths)
    edges = {
        first + i: (low, n - low - dilate(x.shape[first + i], d), d - 1) for i, (n, (low, d)) in enumerate(zip(lengths, lows, strict=True))
    }
    kind = lax.FftType.FFT if _is_complex(conv) else lax.FftType.RFFT
    return lax.fft(_pad(x.astype(conv.sums), edges), kind, tuple(lengths))


def _reversed_spectrum(conv: Conv, lengths: Sequence[int], x: jax.Array, lows: Sequence[tuple[int, int]]) -> jax.Array:
    """The spectrum of x in reverse order, in which a circular convolution is a correlation with x."""
    x = x.astype(conv.sums)
    return lax.conj(_spectrum(conv, lengths, lax.conj(x) if _is_complex(conv) else x, lows))


def _inverse(conv: Conv, lengths: Sequence[int], spectrum: jax.Array) -> jax.Array:
    return lax.fft(spectrum, lax.FftType.IFFT if _is_complex(conv) else lax.FftType.IRFFT, tuple(lengths))


def _frequencies(conv: Conv, lengths: Sequence[int]) -> tuple[int, ...]:
    """The shape of a spectrum."""
    *others, last = lengths
    return *others, last if _is_complex(conv) else last // 2 + 1


def _sum_of_products(conv: Conv, a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    """The sum over an axis of the products of spectra (b, n, g, K, C, ...), whose axes may have size 1."""
    count = a.shape[axis]
    if conv.platform != "cpu":
        return (a * b).sum(axis)

    def term(i):
        return lax.dynamic_index_in_dim(a, i, axis, keepdims=False) * lax.dynamic_index_in_dim(b, i, axis, keepdims=False)

    def terms(first, n, *total):  # XLA adds them in one pass, which is faster than a sum over the axis
        return functools.reduce(lax.add, [*total, *(term(first + np.int32(i)) for i in range(n))])

    rest = min(count, count % TERMS or TERMS)
    more = (count - rest) // TERMS
    total = terms(np.int32(0), rest)
    return repeat(more, lambda i, total: terms(np.int32(rest) + i * np.int32(TERMS), TERMS, total), total) if more else total


def _pad(x: jax.Array, edges: Mapping[int, tuple[int, int, int]]) -> jax.Array:
    return lax.pad(x, np.zeros((), x.dtype), [edges.get(axis, (0, 0, 0)) for axis in range(x.ndim)])
