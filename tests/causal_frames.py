"""The definition of `causal_conv` in numpy, tap by tap.  It must not know jaxext."""

import itertools

import numpy as np


def size_and_low(n, taps, stride, dilation, padding, transpose):
    """The size of the result along an axis of space, and the padding before it, of "SAME" or "VALID"."""
    reach = (taps - 1) * dilation
    if transpose and padding == "SAME":
        return n * stride, min(reach, -(-(reach + stride - 1) // 2))
    if transpose:
        return n * stride + max(0, reach + 1 - stride), reach
    if padding == "SAME":
        return -(-n // stride), max(0, (-(-n // stride) - 1) * stride + reach + 1 - n) // 2
    return max(0, (n - reach - 1) // stride + 1), 0


def held(taps, strides, dilation, transpose):
    """The number of steps in the state."""
    return (taps - 1) * dilation[0] // (strides[0] if transpose else 1)


def causal_frames(x, w, state=None, *, strides, dilation, padding="SAME", groups=1, transpose=False):
    """Compute the result, and the state after x, of arrays of 64 bits."""
    axes, steps = x.ndim - 2, held(w.shape[0], strides, dilation, transpose)
    state = np.zeros((x.shape[0], steps, *x.shape[2:])) if state is None else state
    seen = np.concatenate([state, x], 1)
    last = seen[:, seen.shape[1] - steps :]
    reach = [(taps - 1) * d for taps, d in zip(w.shape, dilation, strict=False)]
    geometry = zip(x.shape[2:-1], w.shape[1:-2], strides[1:], dilation[1:], strict=True)
    frames = x.shape[1] * strides[0] if transpose else x.shape[1] // strides[0]
    sizes, lows = zip((frames, 0), *(size_and_low(*of, padding, transpose) for of in geometry), strict=True)
    seen = seen.reshape((*seen.shape[:-1], groups, x.shape[-1] // groups))
    w = w.reshape((*w.shape[:-1], groups, w.shape[-1] // groups))
    read = seen.shape[1:-2] if transpose else sizes  # how many elements meet each tap
    ends = [s * (n - 1) + r + 1 for s, n, r in zip(strides, read, reach, strict=True)]
    if transpose:  # terms are added where they belong, from the first element on; then the result is cut
        first = (steps * strides[0], *(r - low for r, low in zip(reach[1:], lows[1:], strict=True)))
        shape = [max(end, f + n) for end, f, n in zip(ends, first, sizes, strict=True)]
    else:
        first, shape = (0,) * axes, sizes
        highs = [max(0, end - low - n) for end, low, n in zip(ends, lows, seen.shape[1:], strict=False)]
        seen = np.pad(seen, [(0, 0), *zip(lows, highs, strict=True), (0, 0), (0, 0)])
    y = np.zeros((x.shape[0], *shape, groups, w.shape[-1]), np.result_type(seen, w))
    for tap in itertools.product(*map(range, w.shape[:axes])):
        at = [(r - t * d if transpose else t * d) for r, t, d in zip(reach, tap, dilation, strict=True)]
        place = (slice(None), *(slice(a, max(a, a + s * (n - 1) + 1), s) for a, s, n in zip(at, strides, read, strict=True)))
        y[place if transpose else ...] += np.einsum("...gc,cgk->...gk", seen if transpose else seen[place], w[tap])
    y = y[(slice(None), *(slice(f, f + n) for f, n in zip(first, sizes, strict=True)))]
    return y.reshape((*y.shape[:-2], y.shape[-2] * y.shape[-1])), last
