"""Muon's iteration: against the same in float64 and optax's, batched, differentiated, on devices, and called wrongly."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cases import random
from collectives import collectives
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxext
from jaxext.ops.gram.iteration import MUON

OTHERS = ((4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (2.8366, -3.0525, 1.2012))


def plain(x, steps=5, coefficients=MUON, eps=1e-8, xp=np):
    """Compute the iteration as Keller Jordan's code does."""
    if x.ndim > 2:
        return xp.stack([plain(each, steps, coefficients, eps, xp) for each in x])
    x = x / (xp.sqrt(xp.square(x).sum()) + eps)
    for i in range(steps):
        a, b, c = coefficients if np.ndim(coefficients) == 1 else coefficients[i]
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (2, 3, 9, 6), (1, 7)], ids=str)
def test_values(shape):
    x = random(shape, np.float32, 0)
    y = jaxext.newton_schulz(x, precision="highest")
    exact = plain(x.reshape(-1, *shape[-2:]).astype(np.float64)).reshape(shape)
    assert y.dtype == x.dtype
    np.testing.assert_allclose(y, exact, atol=1e-5 * np.abs(exact).max())


def test_singular_values_and_vectors():
    u, _, v = np.linalg.svd(random((8, 12), np.float64, 0), full_matrices=False)
    y = np.asarray(jaxext.newton_schulz(u * np.linspace(0.1, 3, 8) @ v))
    left = u.T @ y @ v.T
    np.testing.assert_allclose(left - np.diag(np.diag(left)), 0, atol=1e-12)
    assert (np.diag(left) > 0.6).all() and (np.diag(left) < 1.3).all()


def test_coefficients_of_each_step():
    x = random((6, 9), np.float64, 0)
    np.testing.assert_allclose(jaxext.newton_schulz(x, steps=3, coefficients=OTHERS), plain(x, 3, OTHERS), atol=1e-12)
    np.testing.assert_allclose(jaxext.newton_schulz(x, steps=2), plain(x, 2), atol=1e-12)
    np.testing.assert_allclose(jaxext.newton_schulz(x, steps=0, eps=0.5), plain(x, 0, eps=0.5), atol=1e-12)
    np.testing.assert_array_equal(jaxext.newton_schulz(x, steps=0, coefficients=()), jaxext.newton_schulz(x, steps=0))


def test_in_16_bits():
    """The error is that of a few roundings, and no larger than of the same in jnp."""
    x = random((24, 40), ml_dtypes.bfloat16, 0)
    exact = plain(np.asarray(x, np.float64))
    error = lambda y: np.abs(np.asarray(y, np.float64) - exact).max()
    y = jaxext.newton_schulz(x)
    assert y.dtype == ml_dtypes.bfloat16
    assert error(y) <= 1.2 * error(jax.jit(lambda x: plain(x, xp=jnp))(jnp.asarray(x))) < 0.1


@pytest.mark.parametrize(("shape", "coefficients"), [((9, 6), MUON), ((6, 9), OTHERS)], ids=["one triple", "a triple for each step"])
def test_as_optax(shape, coefficients):
    optax = pytest.importorskip("optax")
    x = random(shape, np.float32, 0)
    steps = 5 if coefficients is MUON else 3
    with jax.numpy_dtype_promotion("standard"):
        state = (theirs := optax.contrib.scale_by_muon(coefficients, steps, nesterov=False)).init(x)
        want, _ = theirs.update(x, state)
    np.testing.assert_allclose(jaxext.newton_schulz(x, steps=steps, coefficients=coefficients), want, atol=2e-5)


def test_derivatives():
    x = jnp.asarray(random((2, 3), np.float64, 0))

    def derivatives(f):
        loss = lambda x: jnp.sin(f(x)).sum()
        return jax.jit(lambda x: (jax.grad(loss)(x), jax.hessian(loss)(x), jax.jvp(f, (x,), (x + 1,))[1]))(x)

    ours, theirs = derivatives(lambda x: jaxext.newton_schulz(x, steps=1)), derivatives(lambda x: plain(x, 1, xp=jnp))
    for got, want in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9 * np.abs(want).max())


def test_zeros_stay_zeros():
    """Their gradient is finite."""
    zeros = jnp.zeros((3, 4))
    np.testing.assert_array_equal(jaxext.newton_schulz(zeros), zeros)
    assert np.isfinite(jax.grad(lambda x: jaxext.newton_schulz(x, steps=0, eps=1.0).sum())(zeros)).all()


def test_vmap_over_any_axis():
    x = random((4, 6, 3), np.float32, 0)
    for axis in (0, 2):
        y = jax.vmap(jaxext.newton_schulz, axis, axis)(x)
        np.testing.assert_allclose(np.moveaxis(np.asarray(y), axis, 0), plain(np.moveaxis(x, axis, 0).astype(np.float64)), atol=1e-4)


def test_two_of_three_products_are_symmetric():
    rows = jaxext.explain(jaxext.newton_schulz)(jax.ShapeDtypeStruct((2, 9, 6), jnp.float32)).rows
    assert sorted((row.op, row.times) for row in rows) == [("gram", 5), ("gram", 5), ("linear", 5)]
    assert all(row.operands[0].startswith(("c:f32[2,6,", "a:f32[2,6,6]")) for row in rows)


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        (P(None, None, "b"), AxisType.Explicit),
        (P("a", None, "b"), AxisType.Auto),
        (P(None, "b"), AxisType.Explicit),
        (P(("a", "b")), AxisType.Auto),
    ],
    ids=str,
)
def test_on_devices(spec, kind):
    """A step adds up one square matrix if devices split the longer side, and sends nothing if they split the layers."""
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(kind,) * 2)
    x = random((8, 4, 16), np.float32, 0)
    with jax.set_mesh(mesh):
        split = jax.device_put(jnp.asarray(x), NamedSharding(mesh, spec))
        f = jax.jit(jaxext.newton_schulz, out_shardings=split.sharding)
        compiled = f.lower(split).compile()
        y = np.asarray(f(split))
    np.testing.assert_allclose(y, plain(x.astype(np.float64)), atol=1e-4)
    sent = collectives(compiled)
    if spec[-1] == "b" and len(spec) == 3:
        assert sent == {"all-reduce": 6}  # and one of norms
    if spec == P(("a", "b")):
        assert not sent


def test_tune(tmp_path):
    """The second product gets a symmetric matrix to add, which random numbers are not."""
    x = jax.ShapeDtypeStruct((8, 16), jnp.float32)
    rows = jaxext.tune(lambda x: jaxext.newton_schulz(x, steps=1), backward=False, table=tmp_path / "table.json")(x).rows
    skipped = {row.problem.partition("->")[0].count("float32"): row.skipped for row in rows if row.problem.startswith("gram ")}
    assert skipped == {2: None, 3: None}
    assert all(row.skipped or any(candidate.measurement for candidate in row.candidates) for row in rows)  # a slow one may be left out


X = np.ones((3, 4), np.float32)
NO_ARRAY: Any = [[1.0]]
FOUR: Any = (1, 2, 3, 4)
WORD: Any = "5"


WRONG = {
    "a negative eps": (ValueError, "newton_schulz: eps is -1, want", lambda: jaxext.newton_schulz(X, eps=-1)),
    "an infinite eps": (ValueError, "newton_schulz: eps is inf, want", lambda: jaxext.newton_schulz(X, eps=float("inf"))),
    "a vector": (TypeError, r"newton_schulz: x has the shape \(4,\)", lambda: jaxext.newton_schulz(X[0])),
    "no array": (TypeError, "newton_schulz: x is", lambda: jaxext.newton_schulz(NO_ARRAY)),
    "integers": (TypeError, "newton_schulz: x is int32, want floating-point", lambda: jaxext.newton_schulz(X.astype(np.int32))),
    "complex numbers": (TypeError, "newton_schulz: x is complex64", lambda: jaxext.newton_schulz(X.astype(np.complex64))),
    "steps below 0": (ValueError, "newton_schulz: steps is -1, want 0 or more", lambda: jaxext.newton_schulz(X, steps=-1)),
    "a word of steps": (TypeError, "newton_schulz: steps is '5', want an int", lambda: jaxext.newton_schulz(X, steps=WORD)),
    "four coefficients": (
        TypeError,
        r"coefficients is \(1, 2, 3, 4\), want three numbers",
        lambda: jaxext.newton_schulz(X, coefficients=FOUR),
    ),
    "a word of coefficients": (TypeError, "coefficients is '5'", lambda: jaxext.newton_schulz(X, coefficients=WORD)),
    "few triples": (ValueError, "coefficients has 3 triples, want", lambda: jaxext.newton_schulz(X, coefficients=OTHERS)),
    "eps": (TypeError, "eps is '5', want a number", lambda: jaxext.newton_schulz(X, eps=WORD)),
    "implementation": (ValueError, "newton_schulz: implementation is 'cudnn'", lambda: jaxext.newton_schulz(X, implementation="cudnn")),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(name):
    error, message, call = WRONG[name]
    with pytest.raises(error, match=message):
        call()
