"""The checks of derivatives: both modes, in every order, per example and through programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxext.testing.conformance import Case, Check, Tree, is_float
from jaxext.testing.programs import at, through_a_file
from jaxext.testing.vmapped import one_by_one, some, subsets

# The modes, as in the names of checks.
FORWARD, REVERSE = "jvp", "grad"


def smooth(case: Case) -> tuple[Callable, tuple, tuple]:
    """The function restricted to floating-point arguments and results, these arguments, and their tangents."""

    def g(*floats):
        args = list(case.args)
        for k, x in zip(case.floats, floats, strict=True):
            args[k] = x
        return [jnp.asarray(y) for y in jax.tree.leaves(case.fn(*args)) if is_float(y)]

    return g, tuple(case.args[k] for k in case.floats), tuple(case.tangents[k] for k in case.floats)


def square(result: Tree, weights: Tree):
    """A nonlinear loss, so that derivatives of higher order are not zero.  `weights` are as the result.

    Without weights it is constant for a function that normalizes, and its gradient is zero up to rounding.
    """
    pairs = zip(jax.tree.leaves(result), jax.tree.leaves(weights), strict=True)
    return total([jnp.sum(weight.astype(jnp.result_type(y)) * y * y) for y, weight in pairs if is_float(y)])


def total(numbers: Sequence[jax.Array]) -> jax.Array:
    """The sum, in the narrowest dtype, which determines the tolerance.  Strict promotion would not choose one."""
    narrowest = min((x.dtype for x in numbers), key=lambda dtype: dtype.itemsize)
    return sum((x.astype(narrowest) for x in numbers), jnp.zeros((), narrowest))


def loss(case: Case) -> tuple[Callable, tuple, tuple]:
    g, primals, tangents = smooth(case)
    return (lambda *floats: square(g(*floats), _cotangents(case))), primals, tangents


def alone(g: Callable, args: tuple, k: int) -> Callable:
    """g as a function of its k-th argument alone."""
    return lambda x: g(*args[:k], x, *args[k + 1 :])


def by_jvp(case: Case) -> Tree:
    """Return the derivatives along all arguments together, and along each alone."""
    g, primals, tangents = smooth(case)
    each = [jax.jvp(alone(g, primals, k), (x,), (t,))[1] for k, (x, t) in enumerate(zip(primals, tangents, strict=True))]
    return jax.jvp(g, primals, tangents), each


def tangent(case: Case) -> Tree:
    return jax.jvp(*smooth(case))[1]


def by_differences(case: Case) -> Tree:
    """Central differences of four points: exact for polynomials of degree four, and accurate enough in float64."""
    g, primals, tangents = smooth(case)
    step = 2.0**-10
    points = [g(*(x + i * step * t for x, t in zip(primals, tangents, strict=True))) for i in (1, -1, 2, -2)]

    def slope(a, b, c, d):  # 0 for equal infinities, whose difference is NaN
        return jnp.where((a == b) & (c == d), 0, (8 * (a - b) - (c - d)) / (12 * step)).astype(a.dtype)

    return jax.tree.map(slope, *points)


def by_linearize(case: Case) -> Tree:
    g, primals, tangents = smooth(case)
    return jax.linearize(g, *primals)[1](*tangents)


def _cotangents(case):
    return [ct for ct in jax.tree.leaves(whole_cotangent(case)) if is_float(ct)]


def vjp_of_all(case: Case) -> Tree:
    g, primals, _ = smooth(case)
    return jax.vjp(g, *primals)[1](_cotangents(case))


def by_vjp(case: Case) -> Tree:
    """Return the gradients with respect to all arguments together, and to each alone."""
    g, primals, _ = smooth(case)
    return vjp_of_all(case), [jax.vjp(alone(g, primals, k), x)[1](_cotangents(case)) for k, x in enumerate(primals)]


def by_linear_transpose(case: Case) -> Tree:
    return [jax.linear_transpose(alone(case.fn, case.args, k), case.args[k])(whole_cotangent(case)) for k in case.linear]


def by_vjp_where_linear(case: Case) -> Tree:
    return [jax.vjp(alone(case.fn, case.args, k), case.args[k])[1](whole_cotangent(case)) for k in case.linear]


def whole_cotangent(case):
    """The cotangents in the dtypes of the results, which may differ when the arguments are widened."""
    results, structure = jax.tree.flatten(jax.eval_shape(case.fn, *case.args))
    return jax.tree.unflatten(structure, [ct.astype(y.dtype) for ct, y in zip(case.cotangents, results, strict=True)])


def wrong_transpose(case: Case) -> str:
    """The rule that causes a wrong vjp.  A correct transpose satisfies <vjp(dy), dx> = <dy, jvp(dx)> for any jvp, even a wrong one."""
    g, primals, tangents = smooth(case)

    def dot(xs, ys):
        return sum(float(jnp.sum((x * y).astype(jnp.float32))) for x, y in zip(xs, ys, strict=True))

    try:
        forward = dot(_cotangents(case), jax.jvp(g, primals, tangents)[1])
    except Exception:
        return (
            "the reverse rule is wrong (the bwd of jax.custom_vjp.defvjp); it cannot be compared with forward mode, of which there is none"
        )
    try:
        reverse = dot(jax.vjp(g, *primals)[1](_cotangents(case)), tangents)
    except Exception:
        return "there is no reverse mode: the JVP is not linear in its tangents, or a rule of it has no transpose"
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
    """A derivative of the loss by `modes`, outermost first.  Gradients except the outermost are contracted with the tangents."""

    def derivative(case):
        f, primals, tangents = loss(case)
        everywhere = range(len(primals))

        def along(f):
            return lambda *xs: jax.jvp(f, xs, tangents)[1]

        def slope(f):
            return lambda *xs: total([jnp.sum(dx * t) for dx, t in zip(jax.grad(f, everywhere)(*xs), tangents, strict=True)])

        for i, mode in reversed(list(enumerate(modes))):
            outermost_gradient = REVERSE not in modes[:i]
            f = along(f) if mode == FORWARD else jax.grad(f, everywhere) if outermost_gradient else slope(f)
        return f(*primals)

    return derivative


second, third = in_order(FORWARD, REVERSE), in_order(FORWARD, FORWARD, REVERSE)


def of_each_example(case: Case) -> Tree:
    return _per_example(case, one_by_one)


def of_each_example_by_vmap(case: Case) -> Tree:
    """Every argument is mapped over its last axis."""

    def by_vmap(f, args, mapped):
        args = [jnp.moveaxis(x, 0, -1) if k in mapped else x for k, x in enumerate(args)]
        result = jax.vmap(f, [-1 if k in mapped else None for k in range(len(args))], -1)(*args)
        return jax.tree.map(lambda y: jnp.moveaxis(y, -1, 0), result)

    return _per_example(case, by_vmap)


def _per_example(case, mapping):
    """The vjp of three examples, each with its own cotangent.  `mapping` maps a function over the first axis."""
    n, cotangents = len(case.args), [jnp.stack([ct, 2 * ct, 3 * ct]) for ct in _cotangents(case)]

    def pullback(*args):
        g, primals, _ = smooth(dataclasses.replace(case, args=args[:n]))
        return jax.vjp(g, *primals)[1](list(args[n:]))

    def of(mapped):
        return mapping(pullback, [*some(case, mapped), *cotangents], (*mapped, *range(n, n + len(cotangents))))

    return {f"mapped {mapped}": of(mapped) for mapped in subsets(n)}


def gradient(case: Case) -> Tree:
    f, primals, _ = loss(case)
    return jax.grad(f, range(len(primals)))(*primals)


def gradient_rematerialised(case: Case) -> Tree:
    f, primals, _ = loss(case)
    return jax.grad(jax.checkpoint(f), range(len(primals)))(*primals)


def gradients_of_two(case: Case) -> Tree:
    return jax.tree.map(lambda *dxs: jnp.stack(dxs), *(gradient(dataclasses.replace(case, args=at(case, i))) for i in range(2)))


def gradients_scanned(case: Case) -> Tree:
    """Return the gradients through a scan over two examples."""

    def of_one(args):
        return square(case.fn(*args), case.cotangents)

    zero = jnp.zeros_like(jax.eval_shape(of_one, case.args))

    def through(*examples):
        return lax.scan(lambda total, args: (total + of_one(args), None), zero, examples)[0]

    return jax.grad(through, case.floats)(*(x[:2] for x in case.examples))


def gradient_exported(case: Case) -> Tree:
    f, primals, _ = loss(case)
    return jax.jit(jax.grad(through_a_file(jax.jit(f), primals, 1), range(len(primals))))(*primals)


JVP = "the JVP rule is wrong (ad.primitive_jvps[p], jax.custom_jvp)"
CLOSED = "a rule is written in operations that lack one: write JVP and transpose in operations that have all"
AGAIN = "the derivative of the JVP or of the transpose rule is wrong: a stop_gradient, or a residual taken as constant"

DERIVATIVES = (
    Check("jvp", by_jvp, JVP, ("floats", "jit")),
    Check(
        "finite differences", by_differences, "the reference's own derivative is not its slope, or has a kink at `args`", ("jvp",), tangent
    ),
    Check("linearize", by_linearize, "the JVP rule is not linear in its tangents, or cannot be evaluated in part", ("jvp",)),
    Check("vjp", by_vjp, wrong_transpose, ("floats", "jit")),
    Check(
        "linear_transpose",
        by_vjp_where_linear,
        "fn is not linear in this argument, or the transpose rule reads what only a vjp knows",
        ("linear", "vjp"),
        by_linear_transpose,
    ),
    Check("jacfwd", by_jacfwd, "the batching rule of the JVP", ("small", "jvp", "vmap")),
    Check("jacrev", by_jacrev, "the batching rule of the transpose", ("small", "vjp", "vmap")),
    *(
        Check(
            " of ".join(modes),
            want,
            CLOSED,
            tuple(sorted({"jvp" if mode == FORWARD else "vjp" for mode in modes})),
            in_order(*modes),
            wrong=AGAIN,
        )
        for want, modes in (
            (second, (FORWARD, REVERSE)),
            (second, (REVERSE, FORWARD)),
            (second, (REVERSE, REVERSE)),
            (in_order(FORWARD, FORWARD), (FORWARD, FORWARD)),
            (third, (FORWARD, FORWARD, REVERSE)),
            (third, (REVERSE, REVERSE, REVERSE)),
        )
    ),
    Check("hessian", by_hessian, "the batching rule of a derivative of the transpose", ("small", "jacfwd", "jacrev", "jvp of grad")),
    Check("gradient per example", of_each_example, "the batching rule of the transpose", ("vmap", "vjp"), of_each_example_by_vmap),
    Check("gradient of scan", gradients_of_two, "the partial evaluation of the JVP inside of lax.scan", ("vjp", "scan"), gradients_scanned),
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
