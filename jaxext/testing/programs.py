"""The checks of the function in programs: eager, compiled, retraced, with donation, in control flow, exported, under vmap."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import export, lax

from jaxext.testing.conformance import Case, Check, Tree, each


def value(case: Case) -> Tree:
    return case.fn(*case.args)


def at(case: Case, i) -> tuple:
    return jax.tree.map(lambda x: x[i], case.examples)


def jitted(case: Case) -> Tree:
    return jax.jit(lambda *args: case.fn(*args))(*case.args)


def without_jit(case: Case) -> Tree:
    with jax.disable_jit():
        return case.fn(*case.args)


def with_leaks_checked(case: Case) -> Tree:
    with jax.checking_leaks():
        return jitted(case)


def donated(case: Case) -> Tree:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        return jax.jit(lambda *args: case.fn(*args), donate_argnums=tuple(range(len(case.args))))(*map(jnp.copy, case.args))


def exported(case: Case) -> Tree:
    return through_a_file(jax.jit(lambda *args: case.fn(*args)), case.args, 0)(*case.args)


def through_a_file(jitted, args, order) -> Callable:
    return export.deserialize(export.export(jitted)(*args).serialize(vjp_order=order)).call


def several_values(case: Case) -> Tree:
    return [case.fn(*at(case, 0)), case.fn(*at(case, 1)), case.fn(*at(case, 0))]


def again(case: Case) -> Tree:
    """One program called with different values, then a new program called with the first values."""
    f = jax.jit(lambda *args: case.fn(*args))
    return [f(*at(case, 0)), f(*at(case, 1)), jax.jit(lambda *args: case.fn(*args))(*at(case, 0))]


def unrolled(case: Case) -> Tree:
    results = [case.fn(*at(case, i)) for i in range(3)]
    return jax.tree.map(lambda *ys: jnp.stack(ys), *results)


def scanned(case: Case) -> Tree:
    return lax.scan(lambda i, args: (i + 1, case.fn(*args)), 0, jax.tree.map(lambda x: x[:3], case.examples))[1]


def branched(case: Case) -> Tree:
    """A cond on traced data, inside a while loop on traced data."""
    zeros = jax.tree.map(lambda y: jnp.zeros(y.shape, y.dtype), jax.eval_shape(case.fn, *case.args))
    taken = sum(jnp.sum(x == x) for x in case.args) > 0

    def step(state):
        return ~state[0], lax.cond(state[0], lambda *args: case.fn(*args), lambda *_: zeros, *case.args)

    return lax.while_loop(lambda state: state[0], step, (taken, zeros))[1]


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


STATE = (
    "the result depends on what was traced before: state that is read while tracing is to be an argument, a parameter of the primitive or a"
    " jax.make_user_context"
)

PROGRAMS = (
    Check("eager", value, "the eager rule (p.def_impl), or the implementation itself", run=value),
    Check("jit", value, "the lowering (mlir.register_lowering) gives another result than the eager rule", ("eager",), run=jitted),
    Check("jit again", several_values, STATE, ("jit",), run=again),
    Check("disable_jit", value, "a rule that needs jit: an eager rule is xla.apply_primitive", ("eager",), run=without_jit),
    Check("checking_leaks", value, "a tracer outlives its trace: keep none in a global or a cache", ("jit",), run=with_leaks_checked),
    Check("donation", value, "the lowering reads an operand after the result has its buffer", ("jit",), run=donated),
    Check("scan", unrolled, "the lowering inside of lax.scan", ("jit",), scanned),
    Check("cond in while_loop", value, "shape, dtype or weak type of the result differ between traces", ("jit",), branched),
    Check("export", value, "the lowering cannot be written to a file: a Python callback, or an FFI target without a stable name",
        ("jit", "flatbuffers"), run=exported),
)  # fmt: skip

VMAP = (
    Check("vmap", every_subset,
        "the batching rule (batching.primitive_batchers[p]) is wrong for these mapped arguments, or for where their axes lie",
        ("jit",), vmapped),
    Check("nested vmap", nested_loops, "the batching rule is wrong for an operation that is batched already", ("vmap",), nested_vmaps),
)  # fmt: skip
