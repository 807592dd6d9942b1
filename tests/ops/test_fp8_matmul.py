"""Training in 8-bit floats: what is rounded, how, and where, against float64 of the rounded numbers."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cases import equations, random
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxext

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2


def rounded(x, dtype=E4M3, scale=None):
    """Round to `dtype` and return float64: saturated, nearest, with the largest number at the largest of the dtype."""
    x, most = np.asarray(x).astype(np.float32), np.float32(ml_dtypes.finfo(dtype).max)
    scale = (np.abs(x).max() / most or np.float32(1)) if scale is None else np.float32(scale)
    return np.clip(x / scale, -most, most).astype(dtype).astype(np.float64) * scale


def gradients(x, w, ct, **given):
    """Return the product and its gradients by definition."""
    left, right = rounded(x, scale=given.get("x_scale")), rounded(w, scale=given.get("w_scale"))
    ct = rounded(ct, E5M2, given.get("gradient_scale"))
    return left @ right, ct @ right.T, left.T @ ct


def arrays(dtype: type = np.float32):
    return [jnp.asarray(random(shape, dtype, seed)) for seed, shape in enumerate([(6, 32), (32, 8), (6, 8)])]


def near(got, want, units=8.0):
    eps = float(jnp.finfo(got.dtype).eps)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=units * eps, atol=units * eps * np.abs(want).max())


def with_gradients(**given):
    """The product and its gradients, in one program."""

    def run(x, w, ct):
        y, pullback = jax.vjp(functools.partial(jaxext.fp8_matmul, **given), x, w)
        return y, *pullback(ct)

    return jax.jit(run)


@pytest.mark.parametrize(
    ("dtype", "given"),
    [
        (np.float32, {}),
        (ml_dtypes.bfloat16, dict(x_scale=0.004, w_scale=0.01, gradient_scale=1e-5)),
        (np.float32, dict(gradient_scale=0.5)),
    ],
    ids=str,
)
def test_values_and_gradients(dtype, given):
    """Scales are current ones or given ones, which saturate here."""
    x, w, ct = arrays(dtype)
    given = {name: jnp.float32(scale) for name, scale in given.items()}
    for got, want in zip(with_gradients(**given)(x, w, ct), gradients(x, w, ct, **given), strict=True):
        assert got.dtype == dtype
        near(got, want)


def test_float64_is_rounded_once():
    """2 / float32(0.01) is above 200, the middle of two numbers of 8 bits, by less than float32 has, in which it would become 192."""
    scale = np.float32(0.01)
    with jax.enable_x64(True):
        y = jaxext.fp8_matmul(jnp.ones((1, 1)), jnp.full((1, 1), 2.0), w_scale=jnp.asarray(scale))
    assert 200 < 2 / np.float64(scale) < 200.00001 and y.dtype == np.float64
    np.testing.assert_allclose(y, 208 * np.float64(scale), rtol=1e-12)


def test_a_result_of_another_dtype():
    """The cotangent has it too; gradients have the dtypes of their arrays."""
    of_arrays, of_result = ml_dtypes.bfloat16, np.float32
    (x, w, _), (_, _, ct) = arrays(of_arrays), arrays(of_result)
    found = with_gradients(preferred_element_type=of_result)(x, w, ct)
    for got, want, dtype in zip(found, gradients(x, w, ct), (of_result, of_arrays, of_arrays), strict=True):
        assert got.dtype == dtype
        near(got, want)


@pytest.mark.parametrize("sizes", [(1e36, 1, 1), (1e37, 1e-3, 1e34), (1e-36, 1, 1e35), (2e-38, 1e10, 1e-10), (1e36, 1e-36, 1e-3)], ids=str)
def test_products_of_huge_and_tiny_numbers(sizes):
    """Nothing between the numbers and the result leaves the range of float32: neither scales nor their products."""
    x, w, ct = (array * np.float32(size) for array, size in zip(arrays(), sizes, strict=True))
    y, pullback = jax.vjp(jaxext.fp8_matmul, x, w)
    x, w, ct, *gots = (np.asarray(array, np.float64) for array in (x, w, ct, y, *pullback(ct)))
    pairs = zip(gots, (x @ w, ct @ w.T, x.T @ ct), strict=True)
    within = [(got, want) for got, want in pairs if 1e-36 < np.abs(want).max() < 1e38]
    assert within and all(np.linalg.norm(got - want) < 0.1 * np.linalg.norm(want) for got, want in within)


def test_what_is_kept_has_8_bits():
    x, w, _ = arrays()
    kept = jax.tree.leaves(jax.vjp(jaxext.fp8_matmul, x, w)[1])
    assert sum(of.nbytes for of in kept) == x.size + w.size + 8


def test_products_that_nobody_reads_are_not_computed():
    x, w, _ = arrays()
    text = str(jax.make_jaxpr(jax.grad(lambda w: jaxext.fp8_matmul(x, w).sum()))(w))
    assert text.count("= scaled_dot") == 2, text


def test_zeros_and_a_single_axis():
    y, pullback = jax.vjp(jaxext.fp8_matmul, jnp.zeros(4), jnp.ones((4, 2)))
    np.testing.assert_array_equal(y, 0)
    np.testing.assert_array_equal(pullback(jnp.zeros(2))[0], 0)


def test_forward_mode_is_linear_in_tangents():
    x, w, _ = arrays()
    y, dot = jax.jvp(jaxext.fp8_matmul, (x, w), (x, w))
    near(y, rounded(x) @ rounded(w))
    near(dot, np.asarray(x, np.float64) @ rounded(w) + rounded(x) @ np.asarray(w, np.float64))


@pytest.mark.parametrize("given", [{}, dict(gradient_scale=jnp.linspace(1e-5, 1e-4, 3, dtype=jnp.float32))], ids=["current", "given"])
def test_vmap_rounds_each_example_by_itself(given):
    xs, w, ct = (jnp.stack([of, 3 * of, of[::-1]]) if of.shape[0] == 6 else of for of in arrays())
    grad = lambda x, w, ct, given: jax.vjp(functools.partial(jaxext.fp8_matmul, **given), x, w)[1](ct)
    dx, dw = jax.jit(jax.vmap(grad, (0, None, 0, 0)))(xs, w, ct, given)
    for i in range(3):
        each = {name: scale[i] for name, scale in given.items()}
        _, of_x, of_w = gradients(xs[i], w, ct[i], **each)
        near(dx[i], of_x)
        near(dw[i], of_w)


@pytest.mark.parametrize("mapped", ["x w", "x", "w", "gradient_scale", "x_scale", "w_scale"])
def test_gradients_through_two_vmaps(mapped):
    """The outer one maps x.  The gradient of what is not mapped is a sum over examples, whose cotangents have scales of their own."""
    x, w, ct = arrays()
    mapped = mapped.split()
    name = next((each for each in mapped if each.endswith("scale")), "")
    xs, ws, cts = jnp.stack([x, 3 * x, x * x]), jnp.stack([w, w / 2, 5 * w]), jnp.stack([ct, 7 * ct, ct * ct])
    xs, ws = xs if "x" in mapped else xs[:1], ws if "w" in mapped else ws[:1]
    xs, cts = jnp.stack([xs, xs[::-1] / 2]), jnp.stack([cts, cts[::-1]])
    scales = None if not name else [1e-5, 1e-4, 1e-3] if name == "gradient_scale" else [0.004, 0.01, 0.02]
    over = (0 if "x" in mapped else None, 0 if "w" in mapped else None, 0, None if scales is None else 0)

    def loss(xs, ws):
        one = lambda x, w, ct, scale: (jaxext.fp8_matmul(x, w, **({} if scale is None else {name: scale})) * ct).sum()
        xs, ws = xs if "x" in mapped else xs[:, 0], ws if "w" in mapped else ws[0]
        return jax.vmap(jax.vmap(one, over), (0, None, 0, None))(xs, ws, cts, scales and jnp.array(scales)).sum()

    dx, dw = jax.jit(jax.grad(loss, (0, 1)))(xs, ws)
    want_x, want_w = np.zeros(xs.shape), np.zeros(ws.shape)
    for i, j in np.ndindex(2, 3):
        at_x, at_w = j % xs.shape[1], j % ws.shape[0]
        given = {} if scales is None else {name: scales[j]}
        _, of_x, of_w = gradients(xs[i, at_x], ws[at_w], cts[i, j], **given)
        want_x[i, at_x] += of_x
        want_w[at_w] += of_w
    near(dx, want_x, units=32)
    near(dw, want_w, units=32)


def test_all_three_products_have_factors_of_8_bits():
    """The products of the gradients once took the rounded cotangent in the dtype of x."""
    x, w, ct = arrays()
    found = equations(lambda x, w, ct: jax.vjp(jaxext.fp8_matmul, x, w)[1](ct), x, w, ct)
    products = [eqn for eqn in found if eqn.primitive.name.startswith("scaled_dot")]
    factors = [[of.aval.dtype.name for of in eqn.invars[:2]] for eqn in products]
    assert sorted(map(sorted, factors)) == [["float8_e4m3fn"] * 2, *[["float8_e4m3fn", "float8_e5m2"]] * 2], products


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_devices_round_by_the_largest_number_of_all(kind):
    x, w, ct = arrays()
    mesh = jax.make_mesh((2,), ("n",), axis_types=(kind,), devices=jax.devices()[:2])
    split = lambda x: jax.device_put(x, NamedSharding(mesh, P("n")))
    with jax.set_mesh(mesh):
        both = jax.jit(jax.grad(lambda x, w, ct: (jaxext.fp8_matmul(x, w) * ct).sum(), (0, 1)))
        dx, dw = both(split(x), jax.device_put(w, NamedSharding(mesh, P())), split(ct))
    _, of_x, of_w = gradients(x, w, ct)
    near(jax.device_get(dx), of_x)
    near(jax.device_get(dw), of_w)


def test_in_a_shard_map():
    """The largest number is that of a device's part; the gradient of the weights is a sum over devices."""
    x, w, ct = arrays()
    mesh = jax.make_mesh((2,), ("n",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    loss = lambda x, w, ct: jax.lax.psum((jaxext.fp8_matmul(x, w) * ct).sum(), "n")
    f = jax.shard_map(loss, mesh=mesh, in_specs=(P("n"), P(), P("n")), out_specs=P())
    dx, dw = jax.jit(jax.grad(f, (0, 1)))(x, w, ct)
    parts = [gradients(part, w, of) for part, of in zip(np.split(x, 2), np.split(ct, 2), strict=True)]
    near(dx, np.concatenate([of_x for _, of_x, _ in parts]))
    near(dw, sum(of_w for *_, of_w in parts))


def test_a_derivative_of_the_derivative_is_refused():
    """It was zero."""
    x, w, _ = arrays()
    loss = lambda x, w: jnp.sin(jaxext.fp8_matmul(x, w)).sum()
    for second in (jax.jacfwd(jax.grad(loss)), jax.jacrev(jax.grad(loss)), jax.jacfwd(jax.jacfwd(loss)), jax.jacrev(jax.grad(loss), 1)):
        with pytest.raises(TypeError, match="derivative of its derivative"):
            second(x, w)


def test_a_scale_of_zero_counts_as_one():
    """A history of scales begins with zeros."""
    x, w, ct = arrays()
    zero = jnp.float32(0)
    y, pullback = jax.vjp(functools.partial(jaxext.fp8_matmul, x_scale=zero, gradient_scale=zero), 0 * x, w)
    np.testing.assert_array_equal(y, 0)
    assert all(np.isfinite(of).all() for of in pullback(0 * ct))


def test_scales_that_vary_over_more_devices_than_arrays():
    x, w, ct = arrays()
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    s = jnp.array([0.01, 0.02], jnp.float32)
    loss = lambda x, s: jax.lax.psum((jaxext.fp8_matmul(x, w, x_scale=s[0], gradient_scale=s[0] / 1e3) * ct[:3]).sum(), ("a", "b"))
    f = jax.shard_map(loss, mesh=mesh, in_specs=(P("a"), P("b")), out_specs=P())
    dx = jax.jit(jax.grad(f))(x, s)
    near(dx, sum(np.tile(gradients(x[:3], w, ct[:3], gradient_scale=of / 1e3)[1], (2, 1)) for of in s))


X, W = np.ones((2, 8), np.float32), np.ones((8, 4), np.float32)


def test_a_scale_may_be_a_number():
    got = jaxext.fp8_matmul(X, W, x_scale=0.5, w_scale=1, gradient_scale=2.0)
    np.testing.assert_array_equal(got, jaxext.fp8_matmul(X, W, x_scale=jnp.float32(0.5), w_scale=jnp.float32(1)))


WRONG = {
    "integers": (TypeError, "x is int32", lambda: jaxext.fp8_matmul(X.astype(np.int32), W)),
    "shapes": (TypeError, "want", lambda: jaxext.fp8_matmul(X, W[:4])),
    "scale": (TypeError, r"x_scale has the shape \(2,\)", lambda: jaxext.fp8_matmul(X, W, x_scale=X[:, 0])),
    "dtype": (TypeError, "preferred_element_type is int32", lambda: jaxext.fp8_matmul(X, W, preferred_element_type=np.int32)),
    "implementation": (ValueError, "'cublas'", lambda: jaxext.fp8_matmul(X, W, implementation="cublas")),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_calls(case):
    error, words, call = WRONG[case]
    with pytest.raises(error, match=words):
        call()
