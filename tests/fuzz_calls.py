"""Random calls of jaxext's operations, each drawn from its seed alone, with the direct sum that says what is right.

It must not know jaxext: an operation is looked up by name in a module that is passed in.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from typing import Any

import fuzz_functions
import fuzz_windows
import jax.numpy as jnp
import numpy as np
from direct_sum import Convolution, Product
from fuzz_functions import Use
from jax import lax

DTYPES = {
    "float32": 50, "float64": 8, "bfloat16": 10, "float16": 10, "complex64": 4, "complex128": 2,
    "int8": 4, "int16": 1, "int32": 4, "int64": 1, "uint8": 2, "uint32": 1, "bool": 2, "float8_e4m3fn": 1,
}  # fmt: skip
PREFERRED = {
    "f": ["float32", "float32", "float64", "float16", "bfloat16"],
    "i": ["int32", "int32", "int64", "int16"], "u": ["uint32", "uint64"], "c": ["complex64", "complex128"], "b": ["bool", "int32"],
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """A call of the operation `op` of a module, on two operands of the shapes of `truth`, which has what `direct_sum.Convolution` has.

    `mapped` holds the axes of x, w and y (the cotangent) that `vmap` maps, or None; `derivatives_inside` says whether `vmap` maps the
    derivatives too, or derivatives are taken of the mapped operation.  `integers` says whether operands are small integers, so that sums
    are exact, or normal numbers.
    """

    op: str
    truth: Any
    dtypes: tuple[str, str]
    kwargs: Mapping[str, Any]
    size: int = 1
    mapped: tuple[int | None, int | None, int | None] = (None, None, None)
    derivatives_inside: bool = False
    integers: bool = True

    def function(self, module):
        """The operation, not mapped."""
        names = {"matmul": jnp, "convolve": jnp}
        op = getattr(names.get(self.op, lax) if module is lax else module, self.op)
        return lambda x, w: op(x, w, **self.kwargs)

    def __str__(self):
        x, w = (f"{dtype}{list(shape)}" for dtype, shape in zip(self.dtypes, (self.truth.x, self.truth.w), strict=True))
        said = [f"{self.op}({x}, {w}", *(f"{name}={value!r}" for name, value in self.kwargs.items())]
        call = ", ".join(said) + ")"
        if self.mapped != (None,) * 3:
            where = "inside" if self.derivatives_inside else "outside"
            call += f", vmap of {self.size} over axes {self.mapped} of x, w, ct, derivatives {where}"
        return call + ("" if self.integers else ", normal numbers")


class Draw(random.Random):
    """The choices of one seed."""

    def chance(self, percent: float) -> bool:
        return self.random() * 100 < percent

    def weighted(self, weights: Mapping[Any, float]):
        return self.choices(list(weights), list(weights.values()))[0]

    def order(self, n: int) -> tuple[int, ...]:
        return tuple(self.sample(range(n), n))


def call(seed: int) -> Call | Use:
    """The call of a seed: of a product of lax if it is even, else of another operation."""
    draw = Draw(seed // 2)
    if seed % 2:
        return fuzz_functions.use(draw)
    kinds = {convolution: 86, transposed: 4, vectors: 2, product: 4, matrices: 4}
    kind = draw.weighted(kinds)
    return mapped(draw, kind(draw, **some_dtypes(draw)))


def some_dtypes(draw):
    """The dtypes of both operands, and keywords that say that of the result."""
    dtype = draw.weighted(DTYPES)
    other = draw.weighted(DTYPES) if draw.chance(2) else dtype
    preferred = dtype == "float8_e4m3fn" or draw.chance(20)
    kind = draw.choice("fiucb") if draw.chance(5) else "f" if "float" in dtype else dtype[0]
    results = [d for d in map(np.dtype, PREFERRED[kind]) if d.itemsize >= np.dtype(dtype).itemsize or draw.chance(10)]
    kwargs = {"preferred_element_type": draw.choice(results)} if preferred and results else {}
    if draw.chance(5):
        kwargs["precision"] = draw.choice(["highest", "default", lax.Precision.HIGH])
    return {"dtypes": (dtype, other), "kwargs": kwargs}


def mapped(draw, made: Call) -> Call:
    """The call as it is, or mapped over some of its operands; with small integers, or else with normal numbers."""
    integers = draw.chance(80)
    if draw.chance(65):
        return dataclasses.replace(made, integers=integers)
    size = draw.weighted({1: 2, 2: 5, 3: 3, 17: 1})
    which = draw.choice([(1, 0, 0), (0, 1, 0), (1, 1, 0), (1, 0, 1), (0, 1, 1), (1, 1, 1), (0, 0, 1)])
    inside = which[2] == 1 or draw.chance(30)
    ranks = len(made.truth.x), len(made.truth.w), len(made.truth.output)
    axes = tuple(draw.randint(0, rank) if on else None for on, rank in zip(which, ranks, strict=True))
    return dataclasses.replace(made, size=size, mapped=axes, derivatives_inside=inside, integers=integers)


def convolution(draw, dtypes, kwargs) -> Call:
    """`lax.conv_general_dilated`."""
    truth, more = fuzz_windows.convolution(draw)
    return Call(op="conv_general_dilated", truth=truth, dtypes=dtypes, kwargs=more | kwargs)


def transposed(draw, dtypes, kwargs) -> Call:
    """`lax.conv_transpose`."""
    truth, more = fuzz_windows.transposed(draw)
    return Call(op="conv_transpose", truth=truth, dtypes=dtypes, kwargs=more | kwargs)


def vectors(draw, dtypes, kwargs) -> Call:
    """`jnp.convolve`."""
    m, n = draw.randint(1, 6), draw.randint(1, 6)
    mode = draw.choice(["full", "same", "valid"])
    return Call(op="convolve", truth=Vectors(m, n, mode), dtypes=dtypes, kwargs={"mode": mode} | kwargs)


class Vectors:
    """c[k] = Σ_j a[k-j] v[j], or the middle of that."""

    def __init__(self, m, n, mode):
        count, start = {"full": (m + n - 1, 0), "same": (max(m, n), (min(m, n) - 1) // 2), "valid": (abs(m - n) + 1, min(m, n) - 1)}[mode]
        self.x, self.w, self.output = (m,), (n,), (count,)
        pads = (n - 1 - start, count - m + start)
        self.sum = Convolution((1, 1, m), (1, 1, n), (1,), (pads,), (1,), (1,))

    def y(self, x, w):
        return self.sum.y(x[None, None], w[None, None, ::-1])[0, 0]

    def dx(self, y, w):
        return self.sum.dx(y[None, None], w[None, None, ::-1])[0, 0]

    def dw(self, x, y):
        return self.sum.dw(x[None, None], y[None, None])[0, 0, ::-1]


def product(draw, dtypes, kwargs) -> Call:
    """`lax.dot_general`, the axes of each operand in any order."""
    letters = iter("abcdefghijkl")
    kinds = {kind: [next(letters) for _ in range(draw.choice([0, 1, 1, 2]))] for kind in ("batch", "contracted", "x", "w")}
    sizes = {
        letter: 0 if draw.chance(1) else draw.weighted({1: 3, 2: 3, 3: 3, 8: 1, 17: 1}) for names in kinds.values() for letter in names
    }
    axes = [kinds["batch"] + kinds["contracted"] + kinds[slot] for slot in "xw"]
    for names in axes:
        draw.shuffle(names)
    x, w = (tuple(sizes[letter] for letter in names) for names in axes)
    numbers = tuple(tuple(tuple(names.index(letter) for letter in kinds[kind]) for names in axes) for kind in ("contracted", "batch"))
    y = kinds["batch"] + [letter for slot, names in zip("xw", axes, strict=True) for letter in names if letter in kinds[slot]]
    truth = Product(x, w, ("".join(axes[0]), "".join(axes[1]), "".join(y)))
    return Call(op="dot_general", truth=truth, dtypes=dtypes, kwargs={"dimension_numbers": numbers} | kwargs)


def matrices(draw, dtypes, kwargs) -> Call:
    """`jnp.matmul`: vectors, matrices, and batches that broadcast."""
    m, k, n = (0 if draw.chance(1) else draw.weighted({1: 3, 2: 3, 3: 3, 8: 1, 17: 1}) for _ in range(3))
    batch = [draw.randint(1, 3) for _ in range(draw.choice([0, 0, 1, 2]))]
    shapes, letters = [], []
    for core, names, alone in (((m, k), "mk", "st"), ((k, n), "kn", "uv")):
        if draw.chance(15):  # a vector
            shapes.append((k,))
            letters.append("k")
            continue
        here = list(zip(batch, "ab", alone, strict=False))[draw.randint(0, len(batch)) :]
        ones = [draw.chance(25) for _ in here]
        shapes.append((*(1 if one else size for (size, _, _), one in zip(here, ones, strict=True)), *core))
        letters.append("".join(other if one else name for (_, name, other), one in zip(here, ones, strict=True)) + names)
    result = ""
    for name, *others in ("asu", "btv"):  # an axis of size 1 in both operands, or in the only one that has it, stays
        there = [letter for letter in (name, *others) if any(letter in names for names in letters)]
        result += there[0] if there else ""
    result += "".join(letter for letter in "mn" if any(letter in names for names in letters))
    return Call(op="matmul", truth=Product(shapes[0], shapes[1], (letters[0], letters[1], result)), dtypes=dtypes, kwargs=kwargs)
