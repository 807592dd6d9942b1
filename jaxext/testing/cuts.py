"""The checks that a function is independent along the axes by which it may be split: its results for two parts of its arguments, put
together, are its result for the whole.

A device gets a part.  A function that couples the elements of such an axis, by a sum or by their position, gives other numbers on several
devices than on one.  One device is enough to find it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxext.testing.conformance import Case, Check, Tree, is_float
from jaxext.testing.derivatives import second, tangent, vjp_of_all


@dataclasses.dataclass(frozen=True)
class Cut:
    """An axis along which a function is independent, as it lies in each argument and in each array of the result; None: it is missing."""

    name: str
    args: tuple[int | None, ...]
    result: tuple[int | None, ...]

    def size(self, args: Sequence) -> int:
        """The number of its elements; 0 if no argument has it."""
        return next((x.shape[axis] for x, axis in zip(args, self.args, strict=True) if axis is not None), 0)


def cuts_of(fn: Any, args: Sequence, result: Tree) -> list[Cut]:
    """The axes that a function names by `independent_axes(**keywords)`: axis -> its positions in the arguments and in the results."""
    given, (fn, bound, keywords) = fn, _unwrapped(fn)
    named: Any = getattr(fn, "independent_axes", None)
    if not callable(named):
        return []
    axes: Any = named(**keywords)
    cuts = []
    for name, (arg_axes, result_axes) in axes.items():
        if any(axis is not None for axis in arg_axes[: len(bound)]):
            continue  # a bound array has this axis, and is not cut
        cut = Cut(name, tuple(arg_axes[len(bound) :]), tuple(result_axes))
        if (len(cut.args), len(cut.result)) != (len(args), len(jax.tree.leaves(result))):
            raise ValueError(f"check_op: fn.independent_axes has {cut} for {len(args)} arguments and {jax.tree.structure(result)}")
        for x, axis in zip((*args, *jax.tree.leaves(result)), (*cut.args, *cut.result), strict=True):
            if axis is not None and not -len(x.shape) <= axis < len(x.shape):
                jax.eval_shape(given, *args)  # says which operand has other axes
                raise ValueError(f"check_op: fn.independent_axes has axis {axis} of an array of shape {x.shape}, want one of its axes")
        cuts.append(cut)
    return cuts


def linear_of(fn: Any, args: Sequence) -> tuple[int, ...]:
    """The floating-point arguments in each of which a function says by `linear` that it is linear."""
    fn, bound, _ = _unwrapped(fn)
    linear = getattr(fn, "linear", ())
    return tuple(k for k, x in enumerate(args) if is_float(x) and isinstance(linear, tuple) and k + len(bound) in linear)


def _unwrapped(fn: Any) -> tuple[Any, tuple, dict[str, Any]]:
    """Return what `functools.partial` and `jax.jit` are around, with the arguments and keywords that are bound."""
    bound: tuple = ()
    keywords: dict[str, Any] = {}
    while isinstance(fn, functools.partial | jax.stages.Wrapped):
        around: Any = fn
        if isinstance(fn, functools.partial):
            fn, bound, keywords = around.func, (*around.args, *bound), {**around.keywords, **keywords}
        else:
            fn = around.__wrapped__
    return fn, bound, keywords


def _parts(case: Case, cut: Cut) -> list[Case]:
    """The case for the first half of an axis, and for the rest."""
    size = cut.size(case.args)
    axes = dict(args=cut.args, tangents=cut.args, cotangents=cut.result)

    def part(name, begin, end):
        pairs = zip(getattr(case, name), axes[name], strict=True)
        return tuple(x if axis is None else lax.slice_in_dim(x, begin, end, axis=axis) for x, axis in pairs)

    bounds = ((0, size // 2), (size // 2, size))
    return [dataclasses.replace(case, **{name: part(name, *bound) for name in axes}) for bound in bounds]


def _together(halves: Sequence[Tree], axes: Sequence[int | None]) -> Tree:
    """The results for two parts put together.  What lacks the axis is the gradient of an argument that both have: a sum."""
    (first, second), structure = map(jax.tree.leaves, halves), jax.tree.structure(halves[0])
    joined = (a + b if axis is None else jnp.concatenate([a, b], axis) for a, b, axis in zip(first, second, axes, strict=True))
    return jax.tree.unflatten(structure, joined)


def _check(name: str, function: Callable[[Case], Tree], axes: Callable[[Case, Cut], Sequence], rule: str, *needs: str) -> Check:
    """`axes` are those of the arrays that `function` returns."""

    def uncut(case):
        value = function(case)
        return {f"along {cut.name}": value for cut in case.cuts}

    def halves(case):
        return {f"along {cut.name}": _together([function(part) for part in _parts(case, cut)], axes(case, cut)) for cut in case.cuts}

    return Check(name, uncut, rule, ("cuts", *needs), halves, note=lambda case: case.uncut)


def _argument_axes(case: Case, cut: Cut) -> list:
    return [cut.args[k] for k in case.floats]


COUPLED = (
    "the function, or a kernel of it, is not independent along this axis, so devices must not split it: name its label in `unsharded` of"
    " extend.operation, or leave its Split out"
)
OF_DERIVATIVE = "the kernel of the derivative is not independent along this axis, which devices split; or it leaves out a part of a sum"

HALVES = (
    _check("halves", lambda case: jax.tree.map(jnp.asarray, case.fn(*case.args)), lambda case, cut: cut.result, COUPLED, "jit"),
    _check(
        "jvp of halves", tangent, lambda case, cut: [*compress(cut.result, map(is_float, case.cotangents))], OF_DERIVATIVE, "halves", "jvp"
    ),
    _check("vjp of halves", vjp_of_all, _argument_axes, OF_DERIVATIVE, "halves", "vjp"),
    _check("jvp of grad of halves", second, _argument_axes, OF_DERIVATIVE, "halves", "jvp of grad"),
)
