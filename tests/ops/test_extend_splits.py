"""Splits of a declared operation over devices: a label that couples is refused or found, on one device as on eight.

Without `unsharded`, a cumulative sum over rows and an rms norm over channels are right on one device, and wrong where the axis is split.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import other_checks, random
from collectives import collectives
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxext import extend, testing

NAMES = itertools.count()
X, G = random((8, 8), np.float32), 1 + random((8,), np.float32, 1)
operation: Any = extend.operation


def running(x):
    return jnp.cumsum(x, 0)


def rms_norm(x, g):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-3) * g[None]


# name -> the reference, its arguments, its operands, and the label that it couples
COUPLED: dict[str, Any] = {
    "cumsum": (running, (X,), dict(x="N C"), "N"),
    "rms_norm": (rms_norm, (X, G), dict(x="N C", g="C"), "C"),
}
ON_DEVICES = pytest.mark.parametrize(("name", "count"), [("cumsum", 8), ("rms_norm", 1)])


def declared(name, **more):
    reference, args, operands, label = COUPLED[name]
    return operation(f"toy_{name}_{next(NAMES)}", reference, operands=operands, results=dict(y="N C"), **more), reference, args, label


def check(fn, reference, args, *names, **options):
    """Some checks alone."""
    skip = other_checks("eager", "jit", *names)
    return testing.check_op(fn, reference, args, skip=skip, show=False, **options)


@ON_DEVICES
def test_a_forgotten_unsharded_label_is_an_error(name, count):
    """The first call raises it under every transformation.  Declared, the operation is right where the axis is split."""
    mesh = jax.make_mesh((count,), ("d",), devices=jax.devices()[:count], axis_types=(AxisType.Auto,))
    forgotten, reference, args, label = declared(name)
    spec = {2: P("d") if label == "N" else P(None, "d"), 1: P("d")}
    split = [jax.device_put(x, NamedSharding(mesh, spec[x.ndim])) for x in args]
    coupled = rf"{forgotten.__name__}: the reference couples the elements of {label} \(.*\)"
    message = rf"{coupled}, so {label} can be neither .* `unsharded='{label}'`"
    for f in (forgotten, jax.jit(forgotten), jax.grad(lambda *args: forgotten(*args).sum())):
        with pytest.raises(ValueError, match=message):
            f(*split)
    with pytest.raises(ValueError, match=message):
        jax.vmap(forgotten)(*(x[None] for x in args))
    right, *_ = declared(name, unsharded=label)
    np.testing.assert_allclose(jax.jit(right)(*split), reference(*args), atol=1e-5)


@ON_DEVICES
def test_check_op_finds_a_forgotten_unsharded_label(name, count):
    forgotten, reference, args, label = declared(name)
    report = check(forgotten, reference, args, devices=jax.devices()[:count])
    assert not report.passed and "name it in `unsharded`" in report["eager"].rule and f"elements of {label}" in report["eager"].detail


@ON_DEVICES
def test_check_op_does_not_believe_what_is_declared(name, count):
    """Split over devices the numbers are wrong; halves on one device say so, too."""
    believed, reference, args, label = declared(name, independent=COUPLED[name][-1])
    report = check(believed, reference, args, "halves", "vjp", "vjp of halves", "splits, automatic mesh", devices=jax.devices()[:count])
    assert {row.check for row in report.failures} == {"halves"} | ({"splits, automatic mesh"} if count > 1 else set())
    assert f"along {label}0" in report["halves"].detail and "name its label in `unsharded`" in report["halves"].rule
    right, *_ = declared(name, unsharded=label)
    report = check(right, reference, args, "halves", "vjp", "vjp of halves", "splits, automatic mesh", devices=jax.devices()[:count])
    report.raise_if_failed()
    assert report["vjp of halves"].outcome == "passed"


# What no rule sees is found by numbers: the size, a shuffle, a sum in a loop.
HIDDEN = {
    "size": lambda x: x / x.shape[0],
    "constant": lambda x: x * np.linspace(0, 1, x.shape[0], dtype=x.dtype)[:, None],
    "shuffle": lambda x: x[np.arange(x.shape[0])[::-1]],
    "roll": lambda x: x[(jnp.arange(x.shape[0]) - 1) % x.shape[0]],
    "loop": lambda x: jax.lax.scan(lambda sum, row: (sum + row, sum + row), jnp.zeros_like(x[0]), x)[1],
}


@pytest.mark.parametrize("name", HIDDEN)
def test_check_op_finds_what_is_not_seen(name):
    hidden = operation(f"toy_hidden_{next(NAMES)}", HIDDEN[name], operands=dict(x="N C"), results=dict(y="N C"))
    hidden(X)
    report = check(hidden, HIDDEN[name], (X,), "halves", devices=jax.devices()[:1])
    assert [row.check for row in report.failures] == ["halves"] and "along N0" in report["halves"].detail


def test_a_reduction_by_a_function_is_not_followed():
    """Its function, of scalars, is no program that the equation calls, in which an axis keeps its place."""

    def reference(x):
        largest = jax.lax.reduce(x, jnp.asarray(-jnp.inf, x.dtype), jnp.logaddexp, (0,))
        return jnp.stack([largest, -largest], 1).sum(1) + jnp.broadcast_to(largest[:, None], (x.shape[1], 2)).max(1)

    reduced = operation(f"toy_reduced_{next(NAMES)}", reference, operands=dict(x="C N"), results=dict(y="N"))
    np.testing.assert_allclose(reduced(X), np.log(np.exp(X).sum(0)), rtol=1e-5)


def test_what_is_coupled_in_appearance_alone():
    """A common maximum does not change the loss: declared so, it is mapped and split without communication, and check_op agrees."""

    def stable(x):
        return jnp.log(jnp.sum(jnp.exp(x - jnp.max(x)), -1)) + jnp.max(x)

    refused = operation(f"toy_stable_{next(NAMES)}", stable, operands=dict(x="N V"), results=dict(y="N"))
    with pytest.raises(ValueError, match="couples the elements of N .*, or `independent='N'` if the results do not depend on that"):
        refused(X)
    believed = operation(f"toy_stable_{next(NAMES)}", stable, operands=dict(x="N V"), results=dict(y="N"), independent="N")
    names = ("halves", "vjp", "vjp of halves", "vmap")
    report = check(believed, stable, (X,), *names, devices=jax.devices()[:1])
    report.raise_if_failed()
    assert all(report[name].outcome == "passed" for name in names)
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    compiled = jax.jit(believed).lower(jax.device_put(X, NamedSharding(mesh, P("d")))).compile()
    assert not collectives(compiled)


class Backward(extend.Implementation):
    """A kernel that is right for eight rows, as in the examples of its author."""

    name, version = "of_eight", "1"

    def refuses(self, call):
        return None

    def run(self, call, config, operands):
        flat = call.flatten(operands)
        return 3 * jnp.cos(flat["x"]) * flat["d_y"] * (8 / flat["x"].shape[0])


def test_a_kernel_that_couples_is_found():
    """The reference is independent, and the kernel of the derivative is not."""
    sine = operation(f"toy_sine_{next(NAMES)}", lambda x: 3 * jnp.sin(x), operands=dict(x="N C"), results=dict(y="N C"))
    extend.register(sine.backward, Backward())
    names = ("halves", "jvp", "vjp", "jvp of halves", "vjp of halves")
    report = check(sine, lambda x: 3 * jnp.sin(x), (X,), *names, devices=jax.devices()[:1])
    assert [row.check for row in report.failures] == ["vjp of halves"]
    assert f"implementation 'of_eight' is wrong where call.op is '{sine.__name__}_backward', in 'd_x'" in report["vjp of halves"].rule


def test_sizes_that_no_mesh_divides_are_not_complete():
    """All splits are left out, or one; with sizes that the mesh divides it is complete."""
    product = extend.define(f"toy_product_{next(NAMES)}", x="B N K", w="B K M", y="B N M")
    fn, names = functools.partial(product, B=0), ("splits, automatic mesh",)
    for n, m, left in ((2, 3, "not over N0 (size 2), M0 (size 3): want"), (4, 3, "not over M0 (size 3): want"), (4, 4, "")):
        x, w = np.ones((n, 2), np.float32), np.ones((2, m), np.float32)
        report = check(fn, lambda x, w: x @ w, (x, w), *names)
        row = report["splits, automatic mesh"]
        assert row.outcome == ("skipped" if (n, m) == (2, 3) else "passed") and row.detail.startswith(left)
        assert report.passed and report.complete == (not left)
        if left:
            with pytest.raises(AssertionError, match="splits, automatic mesh .*not over"):
                report.raise_if_failed(complete=True)


def test_a_bilinear_operation_is_linear_by_its_declaration():
    product = extend.define(f"toy_product_{next(NAMES)}", x="B N K", w="B K M", y="B N M")
    names = ("vjp", "linear_transpose")
    for fn, args, of in (
        (jax.jit(functools.partial(product, B=0)), (X, X), lambda x, w: x @ w),
        (functools.partial(product, X, B=0), (X,), lambda w: X.astype(w.dtype) @ w),
    ):
        assert check(fn, of, args, *names, devices=jax.devices()[:1])["linear_transpose"].outcome == "passed"
    report = check(functools.partial(product, B=0), lambda x, w: x @ w, (X, X), *names, linear=(), devices=jax.devices()[:1])
    assert report["linear_transpose"].detail == "no argument is declared linear"


def test_the_axes_that_an_operation_names():
    norm, *_ = declared("rms_norm", unsharded="C")
    assert norm.independent_axes() == {"N0": ((0, None), (0,))}
    assert norm.independent_axes(ranks=dict(N=2), implementation="xla") == {"N0": ((0, None), (0,)), "N1": ((1, None), (1,))}
    assert norm.backward.independent_axes() == {}  # d_g is a sum over rows
    product = extend.define(f"toy_product_{next(NAMES)}", x="B N K", w="B K M", y="B N M")
    assert product.independent_axes(B=0, precision="highest") == {"N0": ((0, None), (0,)), "M0": ((None, 1), (1,))}
    reference = functools.partial(jnp.einsum, "nk,km->nm")
    x, w = X, X
    for fn, args in (
        (functools.partial(product, B=0), (x, w)),
        (jax.jit(functools.partial(product, B=0)), (x, w)),
        (functools.partial(product, x, B=0), (w,)),
    ):
        of = reference if len(args) == 2 else lambda w: reference(x.astype(w.dtype), w)
        report = check(fn, of, args, "halves", "splits, automatic mesh")
        report.raise_if_failed()
        assert report["halves"].outcome == report["splits, automatic mesh"].outcome == "passed"
    assert check(lambda x, w: product(x, w, B=0), reference, (x, w), "halves")["halves"].detail == "no splits are declared"


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (lambda: operation("bad", abs, operands=dict(x="N"), results=dict(y="N"), independent="Q"), "independent has 'Q', bad has"),
        (lambda: operation("bad", abs, operands=dict(x="N D"), results=dict(y="N D"), unsharded="D", independent="D"),
            "independent has 'D', want none that is in `unsharded` or that a result of bad lacks"),
        (lambda: operation("bad", abs, operands=dict(x="N D"), results=dict(y="N"), independent="D"), "independent has 'D', want none"),
        (lambda: operation("bad", abs, operands=dict(x="N"), results=dict(y="N M")),
            "label M of bad is in no operand, so its size is unknown, want it in one"),
        (lambda: operation("bad", abs, operands=dict(x="N"), results=dict(y="N"), unsharded="N"),
            "no label that all results have and that is not in `unsharded`, want one, for vmap: it has rank 0 in calls that need none"),
        (lambda: operation("bad", lambda x, w: x - w, operands=dict(w="N", x="N"), results=dict(y="N")),
            r"operands of bad are in the order \['w', 'x'\], want \['x', 'w'\], the order of the reference's"),
        (lambda: operation("bad", lambda x, *, ranks=2: x, operands=dict(x="N"), results=dict(y="N")),
            "the reference of bad has the keyword 'ranks', which calls use themselves, want another name"),
    ],
)  # fmt: skip
def test_a_declaration_that_does_not_fit(declare, message):
    with pytest.raises(ValueError, match=message):
        declare()
