"""The checks of vmap, compared with lax.map, one example after the other."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxext.testing.conformance import Case, Check, Tree, each


def subsets(n: int) -> list[tuple[int, ...]]:
    """All subsets of up to three arguments.  For more: each argument alone, all but one, and all."""
    sizes = range(1, n + 1) if n <= 3 else sorted({1, n - 1, n})
    return [subset for size in sizes for subset in itertools.combinations(range(n), size)]


def one_by_one(f: Callable, args: Sequence, mapped: Sequence[int]) -> Tree:
    def one(parts):
        parts = dict(zip(mapped, parts, strict=True))
        return f(*(parts.get(k, x) for k, x in enumerate(args)))

    return lax.map(one, tuple(args[k] for k in mapped))


def some(case: Case, mapped: Sequence[int]) -> list:
    """Three examples of the mapped arguments, and the first example of the others."""
    return [case.examples[k][:3] if k in mapped else x for k, x in enumerate(case.args)]


def every_subset(case: Case) -> Tree:
    return {f"mapped {mapped}": [one_by_one(case.fn, some(case, mapped), mapped)] * 3 for mapped in subsets(len(case.args))}


def vmapped(case: Case) -> Tree:
    """Each subset three times, over the first, a middle and the last axis, with different axes for the arguments and the result."""

    def by_vmap(mapped, turn):
        args, in_axes = some(case, mapped), [None] * len(case.args)
        for k in mapped:
            in_axes[k] = (0, args[k].ndim - 1, args[k].ndim // 2)[(turn + k) % 3]
            args[k] = jnp.moveaxis(args[k], 0, in_axes[k])
        out_axis = 0 if any(y.ndim == 0 for y in case.cotangents) else (0, -1, 1)[turn]
        result = jax.vmap(case.fn, in_axes, out_axis)(*args)
        return jax.tree.map(lambda y: jnp.moveaxis(y, out_axis, 0), result)

    return each(
        {f"mapped {mapped}": lambda mapped=mapped: [by_vmap(mapped, turn) for turn in range(3)] for mapped in subsets(len(case.args))}
    )


def _nestings(case):
    """The arguments mapped by the outer and by the inner of two vmaps: one or all of them."""
    n = len(case.args)
    one_or_all = sorted({(k,) for k in range(n)} | {tuple(range(n))})
    return itertools.product(one_or_all, one_or_all)


def _grid(case, outer, inner):
    """Examples of shape (2, 2, ...), without the axes over which an argument is not mapped."""
    for k, x in enumerate(case.examples):
        x = x[:4].reshape(2, 2, *x.shape[1:])
        x = x if k in outer else x[0]
        yield x if k in inner else x.take(0, axis=int(k in outer))


def nested_loops(case: Case) -> Tree:
    def loops(outer, inner):
        return one_by_one(lambda *args: one_by_one(case.fn, args, inner), tuple(_grid(case, outer, inner)), outer)

    return {f"outer {pair[0]}, inner {pair[1]}": loops(*pair) for pair in _nestings(case)}


def nested_vmaps(case: Case) -> Tree:
    """The inner vmap is over the last axis."""

    def vmaps(outer, inner):
        args = [jnp.moveaxis(x, int(k in outer), -1) if k in inner else x for k, x in enumerate(_grid(case, outer, inner))]
        inside = jax.vmap(case.fn, [-1 if k in inner else None for k in range(len(args))], -1)
        y = jax.vmap(inside, [0 if k in outer else None for k in range(len(args))])(*args)
        return jax.tree.map(lambda y: jnp.moveaxis(y, -1, 1), y)

    return {f"outer {pair[0]}, inner {pair[1]}": vmaps(*pair) for pair in _nestings(case)}


AXES = "the batching rule (batching.primitive_batchers[p]) is wrong for these mapped arguments, or for where their axes lie"

VMAP = (
    Check("vmap", every_subset, AXES, ("jit",), vmapped),
    Check("nested vmap", nested_loops, "the batching rule is wrong for an operation that is batched already", ("vmap",), nested_vmaps),
)
