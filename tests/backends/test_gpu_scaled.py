"""Products of scaled and quantised numbers on a GPU, by each implementation, against float64; `xla` on CPUs too."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import random

import jaxext
from jaxext.backends.cuda import cuda_binding

BY_EACH = pytest.mark.parametrize("implementation", ["xla", pytest.param("triton", marks=pytest.mark.gpu)])
SIZES = {"rows and columns": (1, 1), "blocks": (4, 1), "squares": (4, 3)}  # blocks of the sum, and of columns if not each has one
PAIRS = [("float8_e4m3fn", "float8_e4m3fn"), ("bfloat16", "int8"), ("int8", "int8"), ("bfloat16", "float8_e5m2")]
M, K, N = 150, 512, 264


def near(got, want, units):
    """`units` of bfloat16, in which factors that are scaled before the product may be rounded."""
    assert np.isfinite(np.asarray(got, np.float64)).all()
    np.testing.assert_allclose(np.asarray(got, np.float64), want, atol=units * 2.0**-9 * np.abs(want).max())


def spread(scale, shape):
    for axis, size in enumerate(shape):
        scale = np.repeat(scale, size // scale.shape[axis], axis)
    return scale


def refused(error: Exception) -> None:
    if "8-bit floats need compute capability" not in str(error):
        raise error
    pytest.skip(str(error))


@BY_EACH
@pytest.mark.parametrize(
    "dtypes", [("float8_e4m3fn", "float8_e4m3fn"), ("bfloat16", "int8"), ("int8", "int8"), ("bfloat16", "float8_e5m2")], ids=str
)
@pytest.mark.parametrize("blocks", SIZES)
def test_scaled_dot(implementation, dtypes, blocks):
    """Values, the gradient of a wide operand and those of the scales."""
    of_sum, of_columns = SIZES[blocks]
    x, w = (jnp.asarray(random(shape, np.float32, n) * 8).astype(dtypes[n]) for n, shape in enumerate([(M, K), (K, N)]))
    rng = np.random.default_rng(2)
    s, t = (jnp.asarray(rng.uniform(0.5, 2, shape), jnp.float32) for shape in ((M, of_sum), (of_sum, N if of_columns == 1 else of_columns)))
    ct = jnp.asarray(random((M, N), np.float32, 3))

    @jax.jit
    def both(x, w, s, t):
        def product(s, t):
            given: dict[str, Any] = dict(lhs_scale=s, rhs_scale=t, preferred_element_type=jnp.float32)
            return jaxext.scaled_dot(x, w, **given, implementation=implementation)

        y, pullback = jax.vjp(product, s, t)
        return y, *pullback(ct)

    try:
        y, ds, dt = both(x, w, s, t)
    except NotImplementedError as error:
        return refused(error)
    wide = [np.asarray(of.astype(jnp.float32), np.float64) for of in (x, w)]
    left, right = wide[0] * spread(np.asarray(s), (M, K)), wide[1] * spread(np.asarray(t), (K, N))
    near(y, left @ right, 2)
    of_left = wide[0] * (np.asarray(ct, np.float64) @ right.T)
    near(ds, of_left.reshape(M, of_sum, -1).sum(-1), 4)
    of_right = wide[1] * (left.T @ np.asarray(ct, np.float64))
    near(dt, of_right.reshape(of_sum, K // of_sum, t.shape[1], N // t.shape[1]).sum((1, 3)), 4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rows", [1, 8, 9, 33, 64, 129])
@pytest.mark.parametrize("group", [None, 32, 128])
@pytest.mark.parametrize("bits", [4, 8])
def test_weight_only(bits, group, rows, dtype):
    """The CUDA kernels for few rows, and Hopper's for more, mapped too, on columns that fill no block."""
    columns = N // 32 * 32
    q = jaxext.quantize(random((2, K, columns), np.float32, 5), bits, group, 1)
    x = jnp.asarray(random((2, rows, K), np.float32, 6), dtype)
    value = np.asarray(q.qvalue.astype(jnp.float32), np.float64) * spread(np.asarray(q.scale, np.float64), (2, K, columns))
    want = np.asarray(x.astype(jnp.float32), np.float64) @ value
    if reason := cuda_binding.missing():
        pytest.skip(reason)
    cuda = functools.partial(jaxext.quantized_matmul, implementation="cuda")
    try:
        near(jax.jit(jax.vmap(cuda))(x, q), want, 2)
    except NotImplementedError as error:
        if rows > 64 and "rows, it takes 64 at most" in str(error):
            pytest.skip(str(error))
        raise
    first = jax.tree.map(lambda part: part[0], q)
    near(jax.jit(cuda)(x[0], first), want[0], 2)
    near(jax.jit(functools.partial(cuda, preferred_element_type=jnp.float32))(x[0], first), want[0], 0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("result", [jnp.bfloat16, jnp.float32], ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("dtypes", [("float8_e4m3fn", "float8_e4m3fn"), ("float8_e5m2", "float8_e4m3fn")], ids=str)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("blocks", SIZES)
def test_scaled_dot_by_cuda(blocks, turned, dtypes, result):
    """Values, of a right factor with either axis last; jitted, and of each example under vmap.  Of a float32 result too: tensor cores keep
    some 14 bits of the sum of a step."""
    of_sum, of_columns = SIZES[blocks]
    of_columns = N if of_columns == 1 else of_columns
    sizes = M, K, of_columns * 128 if blocks == "squares" else N
    x, w = (jnp.asarray(random(shape, np.float32, n)).astype(dtypes[n]) for n, shape in enumerate([(2, *sizes[:2]), (2, *sizes[1:])]))
    rng = np.random.default_rng(2)
    s, t = (jnp.asarray(rng.uniform(0.5, 2, shape), jnp.float32) for shape in ((2, M, of_sum), (2, of_sum, of_columns)))

    def product(x, w, s, t):
        w, t = (w.T, t.T) if turned else (w, t)
        dims = (((1,), (1 if turned else 0,)), ((), ()))
        static: dict[str, Any] = dict(dimension_numbers=dims, preferred_element_type=result, implementation="cuda")
        return jaxext.scaled_dot(x, w, lhs_scale=s, rhs_scale=t, **static)

    try:
        got = jax.jit(jax.vmap(product))(x, w, s, t)
    except NotImplementedError as error:
        if re.search("compute capability|no CUDA kernels|built without", str(error)):
            pytest.skip(str(error))
        raise
    wide = [np.asarray(of.astype(jnp.float32), np.float64) for of in (x, w)]
    for n in range(2):
        left, right = (of[n] * spread(np.asarray(scale)[n], of[n].shape) for of, scale in zip(wide, (s, t), strict=True))
        near(np.asarray(got[n].astype(jnp.float32)), left @ right, 2 if result == jnp.bfloat16 else 1)


@BY_EACH
@pytest.mark.parametrize("rows", [1, 16, 150])
@pytest.mark.parametrize("group", [None, 128])
@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_matmul(implementation, bits, group, rows):
    """Values, and the gradient in x."""
    q = jaxext.quantize(random((K, N), np.float32, 5), bits, group)
    x, ct = (jnp.asarray(random(shape, np.float32, seed), jnp.bfloat16) for seed, shape in enumerate([(rows, K), (rows, N)]))

    @jax.jit
    def both(x, q, ct):
        y, pullback = jax.vjp(lambda x: jaxext.quantized_matmul(x, q, implementation=implementation), x)
        return y, pullback(ct)[0]

    y, dx = both(x, q, ct)
    value = np.asarray(q.qvalue.astype(jnp.float32), np.float64) * spread(np.asarray(q.scale, np.float64), (K, N))
    near(y, np.asarray(x.astype(jnp.float32), np.float64) @ value, 2)
    near(dx, np.asarray(ct.astype(jnp.float32), np.float64) @ value.T, 2)


@BY_EACH
def test_fp8_matmul(implementation):
    """A step: the products of forward and backward, against those of the same rounded numbers by `xla`.

    In the norm: where sums differ by little, their cotangents may be rounded to neighbouring 8-bit floats, which differ by a quarter.
    """
    x, w = (jnp.asarray(random(shape, np.float32, seed), jnp.bfloat16) for seed, shape in enumerate([(M, K), (K, N)]))

    def step(implementation):
        product = functools.partial(jaxext.fp8_matmul, implementation=implementation)
        return jax.jit(jax.grad(lambda x, w: jnp.square(product(x, w).astype(jnp.float32)).sum(), (0, 1)))

    try:
        got = step(implementation)(x, w)
    except NotImplementedError as error:
        return refused(error)
    for one, other in zip(got, step("xla")(x, w), strict=True):
        one, other = (np.asarray(x.astype(jnp.float32), np.float64) for x in (one, other))
        assert np.linalg.norm(one - other) <= 2.0**-5 * np.linalg.norm(other)
