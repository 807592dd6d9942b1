"""The part of fuzz.py that knows JAX: one process that evaluates calls, and says before each which one it is.

It writes one line of JSON as it begins a seed and one when it is done.
"""

from __future__ import annotations

import importlib
import json
import sys
import warnings
import zlib
from typing import Any

import fuzz_calls
import fuzz_functions
import jax
import jax.numpy as jnp
import numpy as np
from cases import random, wide
from jax import lax

NAMES = ("value", "gradient of x", "gradient of w", "jvp")


def work(seeds, operations: str, planned: bool, infinities: bool) -> None:
    """Every seed in turn."""
    warnings.simplefilter("ignore")
    module = lax if operations == "jax.lax" else importlib.import_module(operations)
    reached: set[str] = set()
    if module is not lax:
        watch(reached, planned)
    for seed in seeds:
        reached.clear()
        call = fuzz_calls.call(seed)
        say(seed=seed, call=str(call))
        try:
            outcome, wrong = judge(call, seed // 2, module, infinities)
        except Exception as error:  # of the tool itself
            outcome, wrong = "wrong", f"the check raises {type(error).__name__}: {error}"
        say(seed=seed, call=str(call), op=call.op, dtype=call.dtypes[0], outcome=outcome, wrong=wrong, reached=sorted(reached))


def say(**message) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def watch(reached: set[str], planned: bool) -> None:
    """Notes every algorithm of a convolution; unless `planned`, takes another than the plan's for one product in four.

    Which ones follows from the product alone, so that what JAX caches does not depend on the seeds before.  lax's own convolution only runs
    where the plan has it, since XLA has defects of its own there.
    """
    from jaxext.ops.conv import xla

    plans, planning, running = xla.plans, 0, []

    def turn(conv, others):
        """The number of another algorithm, or None."""
        code = zlib.crc32(repr(conv).encode())
        return code // 4 % len(others) if others and not planned and code % 4 == 0 else None

    def watched_plans(conv):
        nonlocal planning
        planning += 1
        first, *others = plans.__wrapped__(conv)
        planning -= 1
        others = [plan for plan in others if plan.name != "lax"]
        number = None if planning else turn(conv, others)
        chosen = first if number is None else others[number]
        return (chosen, *(plan for plan in (first, *others) if plan is not chosen))

    def watched(run):
        def watched_run(plan, *operands):
            role = "wgrad" if plan.conv.open == "w" else "dgrad" if plan.conv.dgrad else "fprop"
            if "padded" not in running:  # which lax's own computes
                how = "part of phases" if running else "planned" if plan.name == plans.__wrapped__(plan.conv)[0].name else "forced"
                reached.add(f"{how} {role} {plan.name}")
            running.append(plan.name)
            try:
                return run(plan, *operands)
            finally:
                running.pop()

        return watched_run

    xla.plans = watched_plans
    algorithms: Any = (*xla.ALGORITHMS, xla.Zeros)
    for algorithm in algorithms:
        algorithm.run = watched(algorithm.run)


def judge(call, seed: int, module, infinities: bool = False) -> tuple[str, str | None]:
    """("right" or "refused", None), or ("wrong", what is wrong)."""
    if isinstance(call, fuzz_functions.Use):
        if module is lax or infinities:
            return "not tried", None
        return fuzz_functions.judge(call, seed, module)
    x, w = (jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip((call.truth.x, call.truth.w), call.dtypes, strict=True))
    result, refusal = attempt(jax.eval_shape, call.function(lax), x, w)
    ours, error = attempt(jax.eval_shape, call.function(module), x, w)
    if type(refusal) is not type(error):
        return "wrong", f"lax: {said(refusal)}; here: {said(error)}"
    if refusal:
        return "refused", None
    if (result.shape, result.dtype) != (ours.shape, ours.dtype):
        return "wrong", f"{ours.dtype}{ours.shape}, lax {result.dtype}{result.shape}"
    if result.shape != call.truth.output:
        return "wrong", f"lax has shape {result.shape}, the direct sum {call.truth.output}"
    arrays = operands(call, seed, result)
    if infinities:
        return spread(call, seed, arrays, module)
    got, error = attempt(jax.jit(program(call, module)), *arrays)
    if error:
        _, refusal = attempt(jax.jit(program(call, lax)), *arrays)
        return ("refused", None) if type(refusal) is type(error) else ("wrong", f"lax: {said(refusal)}; here: {said(error)}")
    if jnp.issubdtype(result.dtype, jnp.unsignedinteger) and not jnp.issubdtype(arrays[0].dtype, jnp.unsignedinteger):
        return "right", None  # so far as negative numbers have a value as such
    wrong = compare(call, arrays, [np.asarray(value) for value in got], result.dtype)
    return ("wrong", wrong) if wrong else ("right", None)


def attempt(function, *args) -> tuple[Any, Exception | None]:
    try:
        return jax.block_until_ready(function(*args)), None
    except Exception as error:
        return None, error


def said(error) -> str:
    return "works" if error is None else f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def differentiable(call, result) -> bool:
    """Return whether both gradients exist; those of 8-bit floats overflow."""
    dtypes = [np.dtype(dtype) for dtype in (*call.dtypes, result)]
    return all(jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize > 1 for dtype in dtypes)


def operands(call, seed, result) -> list[np.ndarray]:
    """x, w, the cotangent, and tangents of x and w, with their mapped axes."""
    truth, (ax, aw, ay) = call.truth, call.mapped
    if not call.derivatives_inside and (ax, aw) != (None, None):
        ay = 0
    slots = [(truth.x, call.dtypes[0], ax), (truth.w, call.dtypes[1], aw), (truth.output, result.dtype, ay)]
    arrays = []
    for i, (shape, dtype, axis) in enumerate([*slots, *slots[:2]] if differentiable(call, result.dtype) else slots[:2]):
        shape = shape if axis is None else (*shape[:axis], call.size, *shape[axis:])
        integers = call.integers or not jnp.issubdtype(result.dtype, jnp.inexact) or np.dtype(dtype).itemsize == 1
        arrays.append(random(shape, dtype, 5 * seed + i, integers))
    return arrays


def program(call, module):
    """A function of the operands: value, gradients and jvp, as many as there are."""
    f, (ax, aw, ay) = call.function(module), call.mapped

    def derivatives(f):
        def run(x, w, ct=None, tx=None, tw=None):
            if ct is None:
                return (f(x, w),)
            y, back = jax.vjp(f, x, w)
            return y, *back(ct), jax.jvp(f, (x, w), (tx, tw))[1]

        return run

    if call.mapped == (None,) * 3:
        return derivatives(f)
    if not call.derivatives_inside:
        return derivatives(jax.vmap(f, (ax, aw)))

    def run(*arrays):
        axes = (ax, aw, ay, ax, aw)[: len(arrays)]
        return (jax.vmap(derivatives(f), axes) if axes != (None, None) else derivatives(f))(*arrays)

    return run


def truths(call, x, w, ct=None, tx=None, tw=None) -> list[np.ndarray]:
    """Return the results of `program` by the direct sum, with the two terms of the jvp separate."""
    truth, (ax, aw, ay) = call.truth, call.mapped

    def one(x, w, ct, tx, tw):
        y = truth.y(x, w)
        return [y] if ct is None else [y, truth.dx(ct, w), truth.dw(x, ct), truth.y(tx, w), truth.y(x, tw)]

    if call.mapped == (None,) * 3 or (ct is None and (ax, aw) == (None, None)):
        return one(x, w, ct, tx, tw)

    def at(array, axis, i):
        return array if array is None or axis is None else array.take(i, axis)

    ay = ay if call.derivatives_inside else 0
    axes = (ax, aw, ay, ax, aw)
    each = zip(*(one(*map(at, (x, w, ct, tx, tw), axes, [i] * 5)) for i in range(call.size)), strict=True)
    stacked = [np.stack(values) for values in each]
    if ct is None or call.derivatives_inside:
        return stacked
    for i, axis in ((1, ax), (2, aw)):
        stacked[i] = stacked[i].sum(0) if axis is None else np.moveaxis(stacked[i], 0, axis)
    return stacked


def spread(call, seed, arrays, module) -> tuple[str, str | None]:
    """Check that an infinity or NaN in one element reaches each result that it meets, and no other where lax is finite."""
    rng = np.random.default_rng(seed)
    slot = rng.integers(3)
    if len(arrays) < 3 or not arrays[slot].size:
        return "nothing planted", None
    place, planted = tuple(rng.integers(arrays[slot].shape)), rng.choice([np.inf, -np.inf, np.nan])
    arrays[slot][place] = planted
    got, error = attempt(jax.jit(program(call, module)), *arrays)
    if error:
        return "wrong", said(error)
    ones = [np.ones(array.shape) for array in arrays]
    without, alone = ([*ones[:slot], np.zeros(ones[slot].shape), *ones[slot + 1 :]] for _ in range(2))
    alone[slot][place] = 1
    reached = [with_it - none for with_it, none in zip(truths(call, *alone), truths(call, *without), strict=True)]
    of_lax = None
    for i, value in enumerate(got):
        must, infinite = np.sum(reached[i:] if i == 3 else [reached[i]], 0) > 0, ~np.isfinite(wide(value))
        where = f"{planted} in {'x w ct'.split()[slot]}[{', '.join(map(str, place))}]: the {NAMES[i]}"
        if (must & ~infinite).any():
            return "wrong", f"{where} is finite in {(must & ~infinite).sum()} elements that it meets"
        if (infinite & ~must).any():
            of_lax = of_lax or jax.jit(program(call, lax))(*arrays)
            if count := (infinite & ~must & np.isfinite(wide(of_lax[i]))).sum():
                return "wrong", f"{where} is not finite in {count} elements that it does not meet, where lax is finite"
    return "right", None


def compare(call, arrays, got, dtype) -> str | None:
    """The first result that is wrong."""
    exact = [wide(array) for array in arrays]
    want, sizes = truths(call, *exact), None
    for i, value in enumerate(got):
        name, terms = NAMES[i], want[i:] if i == 3 else [want[i]]
        true = np.sum(terms, 0)
        wanted = np.dtype(call.dtypes[i - 1] if i in (1, 2) else dtype)
        if value.shape != true.shape or value.dtype != wanted:
            return f"{name} is {value.dtype}{value.shape}, want {wanted}{true.shape}"
        with np.errstate(all="ignore"):
            if np.array_equal(value, true.astype(wanted)):
                continue
        if jnp.issubdtype(wanted, jnp.inexact):
            sizes = sizes or truths(call, *map(np.abs, exact))
            allowed = tolerance(call, wanted, dtype, terms, sizes[i:] if i == 3 else [sizes[i]])
        else:
            true, allowed = true.astype(wanted), 0
        if wrong := different(name, value, true, allowed):
            return wrong
    return None


def tolerance(call, wanted, dtype, terms, sizes):
    """Return the largest error of a sum of these terms; `sizes` are the terms of the absolute values of the operands.

    Nothing for small integers; one rounding of each term to 16 bits; and some roundings while normal numbers are summed.
    """
    allowed = 0
    if wanted.itemsize < 4:
        # XLA rounds to the one where there are two; to which operand's or the result's, lax does not say.
        mixed = {d for d in (dtype, *map(np.dtype, call.dtypes)) if d.itemsize == 2} | {wanted}
        eps = max(float(jnp.finfo(d).eps) for d in mixed)
        allowed = eps * np.sum(sizes if len(mixed) > 1 else np.abs(terms), 0) + float(jnp.finfo(wanted).smallest_subnormal)
    if not call.integers:
        double = all(d in (np.float64, np.complex128) for d in (dtype, *map(np.dtype, call.dtypes)))
        allowed = allowed + 16 * np.finfo(np.float64 if double else np.float32).eps * np.sum(sizes, 0)
    return allowed


def different(name, value, true, allowed) -> str | None:
    """Return where they differ the most, and by how much, if any error is above its limit; values that are not finite always differ."""
    value, true = wide(value), wide(true)
    error = np.where(np.isfinite(value), np.abs(value - true), np.inf)
    if (error <= allowed).all():
        return None
    place = np.unravel_index(np.argmax(error - allowed), error.shape)
    count = int((error > allowed).sum())
    return f"{name}[{', '.join(map(str, place))}] is {value[place]}, want {true[place]}; {count} of {error.size} are wrong"
