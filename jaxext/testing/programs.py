"""The checks of the function in programs: eager, compiled, retraced, with donation, in control flow, exported."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import export, lax

from jaxext.testing.conformance import Case, Check, Tree


def value(case: Case) -> Tree:
    return case.fn(*case.args)


def at(case: Case, i) -> tuple:
    """The arguments of example i."""
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
    Check(
        "export",
        value,
        "the lowering cannot be written to a file: a Python callback, or an FFI target without a stable name",
        ("jit", "flatbuffers"),
        run=exported,
    ),
)
