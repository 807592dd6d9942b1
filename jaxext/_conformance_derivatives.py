"""The checks of derivatives: both modes, in every order, of examples and through programs.

It must not know meshes.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxext._conformance import Case, Check, Tree, is_float
from jaxext._conformance_programs import through_a_file
from jaxext._conformance_vmap import one_by_one, some, subsets

# The names of the modes in those of checks.
FORWARD, REVERSE = "jvp", "grad"


def smooth(case: Case) -> tuple[Callable, tuple, tuple]:
    """The function of its floating-point arguments alone, with its floating-point results alone; these arguments, and their tangents."""

    def g(*floats):
        args = list(case.args)
        for k, x in zip(case.floats, floats, strict=True):
            args[k] = x
        return [y for y in jax.tree.leaves(case.fn(*args)) if is_float(y)]

    return g, tuple(case.args[k] for k in case.floats), tuple(case.tangents[k] for k in case.floats)


def square(result: Tree):
    """A loss, so that derivatives of every order matter."""
    return sum(jnp.sum(y * y) for y in jax.tree.leaves(result) if is_float(y))


def loss(case: Case) -> tuple[Callable, tuple, tuple]:
    g, primals, tangents = smooth(case)
    return (lambda *floats: square(g(*floats))), primals, tangents


def alone(g: Callable, args: tuple, k: int) -> Callable:
    """g of its k-th argument."""
    return lambda x: g(*args[:k], x, *args[k + 1 :])


def by_jvp(case: Case) -> Tree:
    """Along all arguments, and along each alone."""
    g, primals, tangents = smooth(case)
    each = [jax.jvp(alone(g, primals, k), (x,), (t,))[1] for k, (x, t) in enumerate(zip(primals, tangents, strict=True))]
    return jax.jvp(g, primals, tangents), each


def tangent(case: Case) -> Tree:
    return jax.jvp(*smooth(case))[1]


def by_differences(case: Case) -> Tree:
    """Central, so exact for polynomials of degree two."""
    g, primals, tangents = smooth(case)
    step = 2.0**-13
    ends = [g(*(x + sign * step * t for x, t in zip(primals, tangents, strict=True))) for sign in (1, -1)]
    return jax.tree.map(lambda a, b: (a - b) / (2 * step), *ends)


def by_linearize(case: Case) -> Tree:
    g, primals, tangents = smooth(case)
    return jax.linearize(g, *primals)[1](*tangents)


def _cotangents(case):
    return [ct for ct in case.cotangents if is_float(ct)]


def by_vjp(case: Case) -> Tree:
    """With respect to all arguments, and to each alone."""
    g, primals, _ = smooth(case)
    each = [jax.vjp(alone(g, primals, k), x)[1](_cotangents(case)) for k, x in enumerate(primals)]
    return jax.vjp(g, *primals)[1](_cotangents(case)), each


def by_linear_transpose(case: Case) -> Tree:
    return [jax.linear_transpose(alone(case.fn, case.args, k), case.args[k])(_whole_cotangent(case)) for k in case.linear]


def by_vjp_where_linear(case: Case) -> Tree:
    return [jax.vjp(alone(case.fn, case.args, k), case.args[k])[1](_whole_cotangent(case)) for k in case.linear]


def _whole_cotangent(case):
    structure = jax.tree.structure(jax.eval_shape(case.fn, *case.args))
    return jax.tree.unflatten(structure, case.cotangents)


def wrong_transpose(case: Case) -> str:
    """Which of two rules a wrong vjp comes from: a transpose satisfies <vjp(dy), dx> = <dy, jvp(dx)> whatever the jvp is."""
    g, primals, tangents = smooth(case)

    def dot(xs, ys):
        return sum(float(jnp.sum((x * y).astype(jnp.float32))) for x, y in zip(xs, ys, strict=True))

    try:
        forward = dot(_cotangents(case), jax.jvp(g, primals, tangents)[1])
    except Exception:
        return (
            "the reverse rule is wrong (the bwd of jax.custom_vjp.defvjp); it cannot be compared with forward mode, of which there is none"
        )
    reverse = dot(jax.vjp(g, *primals)[1](_cotangents(case)), tangents)
    if abs(forward - reverse) <= 1e-2 * max(abs(forward), abs(reverse)):
        return "the JVP rule is wrong (ad.primitive_jvps[p], jax.custom_jvp); the transpose agrees with it"
    return (
        "the transpose rule is wrong (ad.primitive_transposes[p], or the bwd of jax.custom_vjp):"
        f" <vjp(dy), dx> = {reverse:.6g} differs from <dy, jvp(dx)> = {forward:.6g}"
    )


def by_jacfwd(case: Case) -> Tree:
    g, primals, _ = smooth(case)
    return jax.jacfwd(g, range(len(primals)))(*primals)


def by_jacrev(case: Case) -> Tree:
    g, primals, _ = smooth(case)
    return jax.jacrev(g, range(len(primals)))(*primals)


def by_hessian(case: Case) -> Tree:
    f, primals, _ = loss(case)
    return jax.hessian(f, range(len(primals)))(*primals)


def in_order(*modes: str) -> Callable[[Case], Tree]:
    """A derivative of the loss, `modes` from the outermost to the innermost; all but the outermost gradient along the tangents."""

    def derivative(case):
        f, primals, tangents = loss(case)
        everywhere = range(len(primals))

        def along(f):
            return lambda *xs: jax.jvp(f, xs, tangents)[1]

        def slope(f):
            return lambda *xs: sum(jnp.sum(dx * t) for dx, t in zip(jax.grad(f, everywhere)(*xs), tangents, strict=True))

        for i, mode in reversed(list(enumerate(modes))):
            outermost_gradient = REVERSE not in modes[:i]
            f = along(f) if mode == FORWARD else jax.grad(f, everywhere) if outermost_gradient else slope(f)
        return f(*primals)

    return derivative


second, third = in_order(FORWARD, REVERSE), in_order(FORWARD, FORWARD, REVERSE)


def second_along(case: Case) -> Tree:
    return sum(jnp.sum(dx * t) for dx, t in zip(second(case), loss(case)[2], strict=True))


def of_each_example(case: Case) -> Tree:
    return _per_example(case, lambda gradient, args, mapped: one_by_one(gradient, args, mapped))


def of_each_example_by_vmap(case: Case) -> Tree:
    return _per_example(
        case, lambda gradient, args, mapped: jax.vmap(gradient, [0 if k in mapped else None for k in range(len(args))])(*args)
    )


def _per_example(case, mapping):
    gradient = jax.grad(lambda *args: square(case.fn(*args)), case.floats)
    return {f"mapped {mapped}": mapping(gradient, some(case, mapped), mapped) for mapped in subsets(len(case.args))}


def gradient(case: Case) -> Tree:
    f, primals, _ = loss(case)
    return jax.grad(f, range(len(primals)))(*primals)


def gradient_rematerialised(case: Case) -> Tree:
    f, primals, _ = loss(case)
    return jax.grad(jax.checkpoint(f), range(len(primals)))(*primals)


def gradient_scanned(case: Case) -> Tree:
    """Through a scan that takes the step once."""
    f, primals, _ = loss(case)

    def through(*xs):
        return lax.scan(lambda total, _: (total + f(*xs), None), jnp.zeros_like(jax.eval_shape(f, *xs)), length=1)[0]

    return jax.grad(through, range(len(primals)))(*primals)


def gradient_exported(case: Case) -> Tree:
    f, primals, _ = loss(case)
    return jax.jit(jax.grad(through_a_file(jax.jit(f), primals, 1), range(len(primals))))(*primals)


JVP = "the JVP rule is wrong (ad.primitive_jvps[p], jax.custom_jvp)"
CLOSED = "a rule is written in operations that lack one: write JVP and transpose in operations that have all"

DERIVATIVES = (
    Check("jvp", by_jvp, JVP, ("floats", "jit")),
    Check(
        "finite differences", by_differences, "the reference's own derivative is not its slope, or has a kink at `args`", ("jvp",), tangent
    ),
    Check("linearize", by_linearize, "the JVP rule is not linear in its tangents, or cannot be evaluated in part", ("jvp",)),
    Check("vjp", by_vjp, wrong_transpose, ("floats", "jit")),
    Check(
        "linear_transpose", by_vjp_where_linear, "the transpose rule reads what only a vjp knows", ("linear", "vjp"), by_linear_transpose
    ),
    Check("jacfwd", by_jacfwd, "the batching rule of the JVP", ("small", "jvp", "vmap")),
    Check("jacrev", by_jacrev, "the batching rule of the transpose", ("small", "vjp", "vmap")),
    Check("hessian", by_hessian, "the batching rule of a derivative of the transpose", ("small", "jacfwd", "jacrev")),
    *(
        Check(" of ".join(modes), want, CLOSED, tuple(sorted({"jvp" if mode == FORWARD else "vjp" for mode in modes})), in_order(*modes))
        for want, modes in (
            (second, (FORWARD, REVERSE)),
            (second, (REVERSE, FORWARD)),
            (second, (REVERSE, REVERSE)),
            (second_along, (FORWARD, FORWARD)),
            (third, (FORWARD, FORWARD, REVERSE)),
            (third, (REVERSE, REVERSE, REVERSE)),
        )
    ),
    Check("gradient per example", of_each_example, "the batching rule of the transpose", ("vmap", "vjp"), of_each_example_by_vmap),
    Check("gradient of scan", gradient, "the partial evaluation of the JVP inside of lax.scan", ("vjp", "scan"), gradient_scanned),
    Check(
        "gradient of remat", gradient, "the partial evaluation of the JVP: effects, or state in a rule", ("vjp",), gradient_rematerialised
    ),
    Check(
        "gradient of export",
        gradient,
        "the lowering of the transpose cannot be written to a file",
        ("export", "vjp"),
        run=gradient_exported,
    ),
)
