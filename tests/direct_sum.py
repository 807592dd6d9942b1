"""Convolutions and tensor products by their definition, in numpy: the truth of the random tests.

A convolution is a sum over the taps of its filter.  For each tap an explicit list says which output meets which element of the input, so
nothing here is shared with lax or with `Window`.  A bilinear operation's gradients need no other definition than its values: ⟨y, op(x, w)⟩
is linear in each operand, so the same lists, read in the other direction, give both.  Arrays are float64, complex128 or int64; the products
of complex gradients are not conjugated, as in JAX.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np


def outputs(i: int, r: int, stride: int, low: int, high: int, input_dilation: int, filter_dilation: int) -> int:
    """Number of outputs along one axis with `i` elements and `r` taps."""
    padded = low + _dilated(i, input_dilation) + high
    return max(0, (max(padded, 0) - _dilated(r, filter_dilation)) // stride + 1)


def _dilated(n, dilation):
    return n and (n - 1) * dilation + 1


@dataclasses.dataclass(frozen=True)
class Convolution:
    """`lax.conv_general_dilated` of an input and a filter of these shapes.

    `padding` holds (low, high) pairs.  The layouts name the array axes that hold (batch, channels, *space) of input and output, and
    (output channels, input channels, *space) of the filter; None is the order of NCHW and OIHW.
    """

    x: tuple[int, ...]
    w: tuple[int, ...]
    strides: Sequence[int]
    padding: Sequence[tuple[int, int]]
    input_dilation: Sequence[int]
    filter_dilation: Sequence[int]
    feature_groups: int = 1
    batch_groups: int = 1
    layouts: tuple[Sequence[int], Sequence[int], Sequence[int]] | None = None

    @property
    def _axes(self):
        (_, _, *inputs), (_, _, *taps) = self._sizes("x"), self._sizes("w")
        return list(zip(inputs, taps, self.strides, self.padding, self.input_dilation, self.filter_dilation, strict=True))

    @property
    def output(self) -> tuple[int, ...]:
        """Shape of the result, in its layout."""
        space = [outputs(i, r, s, low, high, di, dr) for i, r, s, (low, high), di, dr in self._axes]
        sizes = (self._sizes("x")[0] // self.batch_groups, self._sizes("w")[0], *space)
        return tuple(sizes[i] for i in np.argsort(self._layout("y")))

    def y(self, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        """The value."""
        x, w = self._apart("x", x), self._apart("w", w)
        y = np.zeros(self._grouped("y"), np.result_type(x, w))
        for out, tap, met in self._taps():
            y[out] += _matmul(x[met], w[tap].swapaxes(-1, -2))
        return self._together("y", y)

    def dx(self, y: np.ndarray, w: np.ndarray) -> np.ndarray:
        """The gradient of the input, of ⟨y, value⟩."""
        y, w = self._apart("y", y), self._apart("w", w)
        x = np.zeros(self._grouped("x"), np.result_type(y, w))
        for out, tap, met in self._taps():
            x[met] += _matmul(y[out], w[tap])
        return self._together("x", x)

    def dw(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """The gradient of the filter, of ⟨y, value⟩."""
        x, y = self._apart("x", x), self._apart("y", y)
        w = np.zeros(self._grouped("w"), np.result_type(x, y))
        for out, tap, met in self._taps():
            flat_y, flat_x = (a.reshape(*a.shape[:2], math.prod(a.shape[2:-1]), a.shape[-1]) for a in (y[out], x[met]))
            w[tap] += flat_y.swapaxes(-1, -2) @ flat_x
        return self._together("w", w)

    def _taps(self) -> Iterator[tuple[tuple, tuple, tuple]]:
        """Yield for each tap the indices of the outputs, of the tap and of the inputs that meet, in arrays that are grouped."""
        meetings = []
        for axis, n in zip(self._axes, self._sizes("y")[2:], strict=True):
            i, taps, stride, (low, _), input_dilation, filter_dilation = axis
            meetings.append([])
            for tap in range(taps):
                places = [divmod(p * stride + tap * filter_dilation - low, input_dilation) for p in range(n)]
                pairs = [(p, e) for p, (e, between) in enumerate(places) if not between and 0 <= e < i]
                meetings[-1].append((tap, [p for p, _ in pairs], [e for _, e in pairs]))
        front = (slice(None),) * 3
        for parts in itertools.product(*meetings):
            tap, out, met = zip(*parts, strict=True) if parts else ((), (), ())
            if all(out) or not parts:
                yield (*front, *np.ix_(*out)), (*front[1:], *tap), (*front, *np.ix_(*met))

    def _layout(self, slot):
        return self.layouts["xwy".index(slot)] if self.layouts else range(len(self.x))

    def _sizes(self, slot):
        """Sizes in the order of NCHW and OIHW."""
        shape = {"x": self.x, "w": self.w}.get(slot) or self.output
        return tuple(shape[axis] for axis in self._layout(slot))

    def _grouped(self, slot):
        """Batch groups, feature groups, then: batch, *space, channels; for the filter, *space, output channels, input channels."""
        first, second, *space = self._sizes(slot)
        b, f = self.batch_groups, self.feature_groups
        if slot == "w":
            return b, f, *space, first // (b * f), second
        return (b, f, first // b, *space, second // f) if slot == "x" else (b, f, first, *space, second // (b * f))

    def _apart(self, slot, array):
        """An array in its layout, as one of the shape `_grouped`."""
        array = array.transpose(self._layout(slot))
        b, f, *_, one_before_last, last = self._grouped(slot)
        first, _, *space = array.shape
        if slot == "w":
            return np.moveaxis(array.reshape(b, f, one_before_last, last, *space), (2, 3), (-2, -1))
        if slot == "x":
            return np.moveaxis(array.reshape(b, first // b, f, last, *space), (2, 3), (1, -1))
        return np.moveaxis(array.reshape(first, b, f, last, *space), (0, 3), (2, -1))

    def _together(self, slot, array):
        """The inverse of `_apart`."""
        if slot == "w":
            array = np.moveaxis(array, (-2, -1), (2, 3))
        elif slot == "x":
            array = np.moveaxis(array, (1, -1), (2, 3))
        else:
            array = np.moveaxis(array, (2, -1), (0, 3))
        return array.reshape(self._sizes(slot)).transpose(np.argsort(self._layout(slot)))


def _matmul(a, b):
    """(b, f, n, *space, c) times (b, f, c, k), over the last axes."""
    flat = a.reshape(*a.shape[:2], math.prod(a.shape[2:-1]), a.shape[-1])
    return (flat @ b).reshape(*a.shape[:-1], b.shape[-1])


@dataclasses.dataclass(frozen=True)
class Product:
    """A product of tensors, as in `np.einsum`: the letters of the operands x and w and of the result y, and the shapes of the operands.

    An axis whose letter stands in one operand alone has size 1.
    """

    x: tuple[int, ...]
    w: tuple[int, ...]
    letters: tuple[str, str, str]

    @classmethod
    def of(cls, lhs: tuple[int, ...], rhs: tuple[int, ...], dimension_numbers: tuple) -> Product:
        """`lax.dot_general` of these shapes."""
        (lc, rc), (lb, rb) = dimension_numbers
        letters = iter("abcdefghijkl")
        x, w = ([next(letters) for _ in shape] for shape in (lhs, rhs))
        for i, j in (*zip(lc, rc, strict=True), *zip(lb, rb, strict=True)):
            w[j] = x[i]
        free = [a for i, a in enumerate(x) if i not in (*lc, *lb)] + [a for i, a in enumerate(w) if i not in (*rc, *rb)]
        return cls(lhs, rhs, ("".join(x), "".join(w), "".join([x[i] for i in lb] + free)))

    @property
    def output(self) -> tuple[int, ...]:
        sizes = dict(zip(self.letters[0] + self.letters[1], self.x + self.w, strict=True))
        return tuple(sizes[letter] for letter in self.letters[2])

    def y(self, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        return self._sum(0, x, 1, w, 2)

    def dx(self, y: np.ndarray, w: np.ndarray) -> np.ndarray:
        return self._sum(2, y, 1, w, 0)

    def dw(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return self._sum(0, x, 2, y, 1)

    def _sum(self, i, a, j, b, k):
        first, second, result = (self.letters[slot] for slot in (i, j, k))
        alone = "".join(letter for letter in result if letter not in first + second)
        return np.einsum(f"{first},{second},{alone}->{result}", a, b, np.ones((1,) * len(alone), np.int64))
