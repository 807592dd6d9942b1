"""Every transformation on one device: ours and lax's agree bit for bit, for each primitive and for what is composed of them."""

import functools
import itertools

import bilinear
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bilinear import (
    BATCH_GROUPS,
    CONV1D,
    CONV2D,
    DEPTHWISE,
    DOT,
    DOT_BATCHED,
    FEW,
    GROUPED,
    LAX,
    NHWC,
    OURS,
    ROLES,
    Problem,
    same,
    truth,
)

import jaxext

each_role = pytest.mark.parametrize("role", ROLES)
few_problems = pytest.mark.parametrize("problem", FEW, ids=str)


def loss(problem: Problem, ops, x, w):
    """Compute a polynomial of degree four in integers, so that derivatives of every order are exact; both operands are used twice."""
    y = problem.call(ops, x, w)
    return jnp.sum(y * y) + jnp.sum(problem.call(ops, x * x, w))


def both(problem, transformed, *args):
    """`transformed(loss)(*args)` is the same for ours and for lax's."""
    got, want = (jax.jit(transformed(functools.partial(loss, problem, ops)))(*args) for ops in (OURS, LAX))
    same(got, want)


@each_role
@few_problems
def test_without_jit(problem, role):
    """Eagerly, and under `disable_jit`, where a rule that calls jit of itself recurses for ever."""
    a, b = problem.operands(role)
    want = truth(problem, role, a, b)
    same(problem.role(role)(a, b), want)
    with jax.disable_jit():
        same(problem.role(role)(a, b), want)


def loop(problem, role, a, b, mapped):
    """vmap's meaning: one example after the other; `mapped` says which operands have an axis of examples in front."""
    n = (a if mapped[0] else b).shape[0]
    return np.stack([truth(problem, role, a[i] if mapped[0] else a, b[i] if mapped[1] else b) for i in range(n)])


SUBSETS = ((True, False), (False, True), (True, True))


@pytest.mark.parametrize(
    ("problem", "role"),
    [
        *((DOT, "fprop"), (DOT_BATCHED, "dgrad"), (CONV1D, "wgrad"), (CONV2D, "fprop"), (GROUPED, "wgrad")),
        *((DEPTHWISE, "dgrad"), (BATCH_GROUPS, "fprop")),
    ],
    ids=str,
)
def test_vmap_over_every_subset_and_axis(problem, role):
    """The first operand is mapped over each of its axes in turn, the second over its axes in the opposite order."""
    f = problem.role(role)
    a, b = problem.operands(role, 3)
    want = {mapped: loop(problem, role, a if mapped[0] else a[0], b if mapped[1] else b[0], mapped) for mapped in SUBSETS}

    @jax.jit
    def results(a, b):
        got = {mapped: [] for mapped in SUBSETS}
        for i in range(max(a.ndim, b.ndim)):
            axes = min(i, a.ndim - 1), max(b.ndim - 1 - i, 0)
            moved = jnp.moveaxis(a, 0, axes[0]), jnp.moveaxis(b, 0, axes[1])
            for mapped in SUBSETS:
                operands = [m if yes else whole[0] for m, whole, yes in zip(moved, (a, b), mapped, strict=True)]
                in_axes = tuple(axis if yes else None for axis, yes in zip(axes, mapped, strict=True))
                got[mapped].append(jnp.moveaxis(jax.vmap(f, in_axes, out_axes=i % 3 - 1)(*operands), i % 3 - 1, 0))
        return got

    for mapped, values in results(a, b).items():
        for value in values:
            same(value, want[mapped])


@pytest.mark.parametrize(("problem", "role"), [(DOT_BATCHED, "wgrad"), (GROUPED, "wgrad")], ids=str)
def test_vmap_nested_twice(problem, role):
    """Every pair of subsets: labels with no, one and two axes more."""
    f = problem.role(role)
    a, b = problem.operands(role, 2, 3)
    want = np.stack([loop(problem, role, a[i], b[i], (True, True)) for i in range(2)])

    def nested(outer, inner):
        pick = lambda x, k: x[0, 0] if not outer[k] and not inner[k] else x[0] if not outer[k] else x[:, 0] if not inner[k] else x
        axes = lambda mapped, axis: tuple(axis if yes else None for yes in mapped)
        return jax.vmap(jax.vmap(f, axes(inner, -1), out_axes=1), axes(outer, 0), out_axes=-1)(
            *(jnp.moveaxis(pick(x, k), int(outer[k]), -1) if inner[k] else pick(x, k) for k, x in enumerate((a, b)))
        )

    pairs = list(itertools.product(SUBSETS, SUBSETS))
    got = jax.jit(lambda: [nested(*pair) for pair in pairs])()
    for (outer, inner), value in zip(pairs, got, strict=True):
        value = np.moveaxis(value, (-1, 1), (0, 1))
        for i, j in itertools.product(range(2), range(3)):
            index = [(i if outer[k] else 0, j if inner[k] else 0) for k in range(2)]
            same(value[i, j], want[i, j] if index == [(i, j)] * 2 else truth(problem, role, a[index[0]], b[index[1]]))


@pytest.mark.parametrize("problem", [CONV1D, GROUPED, BATCH_GROUPS], ids=str)
def test_derivatives_of_the_first_order(problem):
    """jvp, vjp, linearize and linear_transpose, each with respect to one operand and to both."""
    x, w = problem.operands("fprop")
    y = bilinear.integers(problem.y, 2)
    dx, dw = bilinear.integers(x.shape, 3), bilinear.integers(w.shape, 4)

    def derivatives(ops, x, w, y, dx, dw):
        f = functools.partial(problem.call, ops)
        in_x, in_w = (lambda x: f(x, w)), (lambda w: f(x, w))
        yield jax.jvp(f, (x, w), (dx, dw))
        yield jax.jvp(in_x, (x,), (dx,))[1]
        yield jax.jvp(in_w, (w,), (dw,))[1]
        yield jax.vjp(f, x, w)[1](y)
        yield jax.vjp(in_x, x)[1](y)
        yield jax.vjp(in_w, w)[1](y)
        yield jax.linearize(f, x, w)[1](dx, dw)
        yield jax.linear_transpose(jax.linearize(f, x, w)[1], x, w)(y)
        yield jax.linear_transpose(in_x, x)(y)
        yield jax.linear_transpose(in_w, w)(y)

    got, want = (jax.jit(lambda *args, ops=ops: list(derivatives(ops, *args)))(x, w, y, dx, dw) for ops in (OURS, LAX))
    same(got, want)


def test_hessian_and_third_derivative_in_full():
    """Every nesting of forward and reverse, and all of the third derivative."""
    problem = Problem("", (1, 3, 2, 4), (2, 2, 2, 4), GROUPED.axes, bilinear.conv((2, 1), "SAME", NHWC, feature_group_count=2))
    x, w = problem.operands("fprop")
    second = (jax.hessian, lambda f, n: jax.jacrev(jax.jacfwd(f, n), n), lambda f, n: jax.jacrev(jax.jacrev(f, n), n))

    def derivatives(f):
        return lambda x, w: [[h(f, (0, 1))(x, w) for h in second], jax.jacfwd(jax.jacrev(jax.jacfwd(f)))(x, w)]

    both(problem, derivatives, x, w)


@few_problems
def test_a_derivative_in_one_operand_costs_one_product(problem):
    x, w = problem.operands("fprop")
    total = lambda x, w: jnp.sum(problem.call(OURS, x, w))
    count = lambda f: sum(row.times for row in jaxext.explain(f)(x, w).rows)
    assert [count(f) for f in (total, jax.grad(total, 0), jax.grad(total, 1), jax.grad(total, (0, 1)))] == [1, 2, 2, 3]
    assert count(lambda x, w: jax.jvp(lambda x: total(x, w), (x,), (x,))) == 2


def test_integer_operands_have_a_gradient_of_no_dtype():
    """float0 under `allow_int`, and a real gradient for the real operand beside an integer one."""
    x, w = (a.astype(np.int32) for a in DOT.operands("fprop"))
    for problem in (DOT, CONV2D):
        x, w = problem.operands("fprop", dtype=np.int32)
        for ops in (OURS, LAX):
            dx, dw = jax.grad(lambda x, w, f=problem.call, ops=ops: jnp.sum(f(ops, x, w)).astype(float), (0, 1), allow_int=True)(x, w)
            assert (dx.dtype, dw.dtype, dx.shape, dw.shape) == (jax.dtypes.float0, jax.dtypes.float0, x.shape, w.shape)
        tangent = np.zeros(x.shape, jax.dtypes.float0), np.zeros(w.shape, jax.dtypes.float0)
        y, dy = jax.jvp(functools.partial(problem.call, OURS), (x, w), tangent)
        assert dy.dtype == jax.dtypes.float0
        same(y, truth(problem, "fprop", x, w))
