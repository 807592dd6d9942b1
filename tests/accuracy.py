"""Operands of float32 products that are hard to multiply, and how far a result is from the exact one in units of float32's own."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

MOST = float(np.finfo(np.float32).max)
Pair = tuple[np.ndarray, np.ndarray]
Numbers = Callable[[tuple[int, int]], np.ndarray]


def _numbers(rng: np.random.Generator, low: float, high: float) -> Numbers:
    """Return a function from shapes to numbers of random signs, with magnitudes from 2**low to 2**high."""

    def of(shape):
        with np.errstate(under="ignore"):
            return (rng.choice([-1, 1], shape) * np.exp2(rng.uniform(low, high, shape))).astype(np.float32)

    return of


def _cancelling(rng: np.random.Generator, rows: int, depth: int, columns: int) -> Pair:
    """Every product has its negative, but for a part in 2**20."""
    a, b = _numbers(rng, -8, 8)((rows, depth // 2)), _numbers(rng, -8, 8)((depth // 2, columns))
    return np.hstack([a, -a * np.float32(1 + 2.0**-20)]), np.vstack([b, b])


def _between(*exponents: float) -> Callable[..., Pair]:
    """a between two powers of two, and b between two."""

    def pair(rng, rows, depth, columns):
        return _numbers(rng, *exponents[:2])((rows, depth)), _numbers(rng, *exponents[2:])((depth, columns))

    return pair


def _largest(rng, rows, depth, columns):
    """Return numbers that overflow in bfloat16, and small ones for the other factor."""
    return rng.choice([-1, 1], (rows, depth)).astype(np.float32) * np.float32(MOST), _numbers(rng, -20, -10)((depth, columns))


# Finite operands, by what is hard.
FINITE: dict[str, Callable[..., Pair]] = {
    "of one size": _between(-1, 1, -1, 1),
    "mixed": _between(-60, 60, -60, 60),
    "cancelling": _cancelling,
    "large": _between(100, 127, -60, -20),
    "largest": _largest,
    "small": _between(-126, -110, 60, 100),
    "subnormal": _between(-148, -127, 60, 100),
}


ORDINARY = ("of one size", "mixed", "cancelling", "large")
# What is as exact as float32, within a factor of two: where precision="highest" could take it.
EXACT = {"ieee": (*FINITE,), "tf32x3": ORDINARY, "bf16x6": ORDINARY}


def _with(b: float, **places: float) -> Callable[..., Pair]:
    """Ones and these, in a's first row, times b."""

    def pair(rng, rows, depth, columns):
        a = np.ones((rows, depth), np.float32)
        a[0, : len(places)] = [*places.values()]
        return a, np.full((depth, columns), b, np.float32)

    return pair


# Operands with infinities and NaN, or with sums that overflow.
SPECIAL: dict[str, Callable[..., Pair]] = {
    "infinity": _with(1.5, one=np.inf),
    "negative infinity": _with(1 + 2.0**-23, one=-np.inf),
    "two infinities": _with(1.5, one=np.inf, other=-np.inf),
    "infinity by zero": _with(0.0, one=np.inf),
    "infinity by a subnormal number": _with(2.0**-140, one=np.inf),
    "NaN": _with(1.5, one=np.nan),
    "overflow": _with(2.0, one=MOST, other=MOST),
}


def fma(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """float32's own product: one fused multiply-add after another."""
    total = np.zeros((len(a), b.shape[1]), np.float32)
    with np.errstate(all="ignore"):
        for k in range(a.shape[1]):
            total = (total + a[:, k : k + 1].astype(np.float64) * b[k].astype(np.float64)).astype(np.float32)
    return total


def error(got: np.ndarray, a: np.ndarray, b: np.ndarray) -> float:
    """The largest error of an element, in units of float32's rounding of its products' magnitude; infinity if one is not finite."""
    if not np.isfinite(got).all():
        return np.inf
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float((np.abs(got - a @ b) / (2.0**-24 * (np.abs(a) @ np.abs(b)))).max())


def same_special(got: np.ndarray, want: np.ndarray) -> bool:
    """Return whether both are infinite, NaN and finite at the same places."""
    return bool((np.isnan(got) == np.isnan(want)).all() and (np.where(np.isinf(got), got, 0) == np.where(np.isinf(want), want, 0)).all())
