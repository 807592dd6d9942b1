"""Products of scaled and of quantised numbers: values against float64 and exact integers, every transformation, and every wrong call."""

import doctest
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cases import check_second_derivatives, random
from jax import export, lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxext
from jaxext.ops import quantized
from jaxext.ops.scaled import xla as xla_scaled

M, K, N = 6, 8, 10
FLOAT8 = [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
SCALES = {  # of lhs and of rhs, and None
    "tensors": ((1, 1), (1, 1)),
    "rows and columns": ((M, 1), (1, N)),
    "blocks of K": ((M, 4), (2, N)),
    "squares": ((3, 2), (4, 5)),
    "blocks of rows, blocks of K": ((2, 1), (4, 1)),
    "each element": ((M, K), (K, N)),
    "rhs": (None, (4, 5)),
}


def small(shape, dtype, seed, low=-3, high=3):
    """Integers whose products and sums are exact in float32."""
    return jnp.asarray(np.random.default_rng(seed).integers(low, high + 1, shape)).astype(dtype)


def powers(shape, seed, dtype: Any = jnp.float32) -> Any:
    """Scales whose products are exact."""
    return None if shape is None else jnp.exp2(small(shape, jnp.float32, seed, -2, 2)).astype(dtype)


def wide(x, scale=None):
    """Return x in float64, scaled."""
    x = np.asarray(x).astype(np.float64)
    scale = np.ones((1,) * x.ndim) if scale is None else np.asarray(scale).astype(np.float64).reshape(scale.shape or (1,) * x.ndim)
    for axis, (size, count) in enumerate(zip(x.shape, scale.shape, strict=True)):
        scale = np.repeat(scale, size // count, axis)
    return x * scale


float32 = functools.partial(jaxext.scaled_dot, preferred_element_type=jnp.float32)


@pytest.mark.parametrize(
    ("scales", "layout"),
    [
        ("tensors", "nn"),
        ("rows and columns", "nn"),
        ("blocks of K", "tt"),
        ("squares", "nt"),
        ("blocks of rows, blocks of K", "nn"),
        ("each element", "tn"),
        ("rhs", "nn"),
    ],
)
def test_scales_and_layouts(scales, layout):
    """Products are exact in each layout of the operands, with scales of several dtypes."""
    for dtypes, of_scale in ((("float8_e4m3fn", "float8_e5m2"), "float8_e8m0fnu"), (("int8", "bfloat16"), "float32")):
        x, w = small((M, K), dtypes[0], 0), small((K, N), dtypes[1], 1)
        s, t = (powers(shape, i, of_scale) for i, shape in enumerate(SCALES[scales]))
        want = wide(x, s) @ wide(w, t)
        turned = lambda of: of if of is None else of.T
        left = (x, s) if layout[0] == "n" else (x.T, turned(s))
        right = (w, t) if layout[1] == "n" else (w.T, turned(t))
        numbers = (((int(layout[0] == "n"),), (int(layout[1] == "t"),)), ((), ()))
        y = float32(left[0], right[0], lhs_scale=left[1], rhs_scale=right[1], dimension_numbers=numbers)
        np.testing.assert_array_equal(y, want)


def test_several_axes():
    """Batches, free and contracted axes in any order, with scales along some of each."""
    x, w = small((2, 4, 3, 6, 5), jnp.int8, 0), small((6, 7, 3, 4), jnp.int8, 1)
    numbers = (((3, 1), (0, 3)), ((2,), (2,)))
    for ls, rs in [((1, 2, 3, 6, 5), (3, 7, 1, 4)), ((2, 1, 1, 3, 1), (6, 1, 3, 2)), ((2, 4, 3, 1, 1), (1, 1, 1, 1))]:
        s, t = powers(ls, 2), powers(rs, 3)
        y = float32(x, w, lhs_scale=s, rhs_scale=t, dimension_numbers=numbers)
        np.testing.assert_array_equal(y, np.einsum("npbkd,kebp->bnde", wide(x, s), wide(w, t)))


@pytest.mark.parametrize("shape", [(0, 8, 3), (2, 0, 3), (2, 8, 0)], ids=str)
def test_empty_ones(shape):
    m, k, n = shape
    x, w = jnp.ones((m, k), jnp.int8), jnp.ones((k, n), jnp.int8)
    y = float32(x, w, lhs_scale=jnp.ones((m, 1)), rhs_scale=jnp.ones((k, n)))
    np.testing.assert_array_equal(y, np.zeros((m, n)))


@pytest.mark.parametrize(("batch", "dtype", "scaled"), [((), jnp.float32, False), ((2,), None, True)], ids=str)
def test_as_lax_says(batch, dtype, scaled):
    x, w = small((*batch, 4, 64), jnp.float8_e4m3fn, 0), small((*batch, 64, 6), jnp.float8_e5m2, 1)
    scales = dict(lhs_scale=powers((*batch, 4, 2), 2, jnp.float8_e8m0fnu), rhs_scale=powers((*batch, 2, 6), 3, jnp.float8_e8m0fnu))
    ours, theirs = (of(x, w, **scales if scaled else {}, preferred_element_type=dtype) for of in (jaxext.scaled_dot, lax.scaled_dot))
    assert ours.dtype == theirs.dtype
    np.testing.assert_array_equal(np.asarray(ours, np.float32), np.asarray(theirs, np.float32))


def test_in_place_of_lax():
    """lax's product has no derivative; ours has that of the dequantised numbers."""
    x, w, weight = small((4, 64), jnp.bfloat16, 0), small((64, 6), jnp.int8, 1), small((4, 6), jnp.float32, 2)
    s, t = powers((4, 2), 3), powers((4, 6), 4)

    def loss(x, s, w):
        return (lax.scaled_dot(x, w, lhs_scale=s, rhs_scale=t, preferred_element_type=jnp.float32) * weight).sum()

    outside = str(jax.make_jaxpr(loss)(x, s, w))
    with jaxext.in_place_of_lax():
        inside = str(jax.make_jaxpr(loss)(x, s, w))
        of_x, of_s = jax.jit(jax.grad(loss, (0, 1)))(x, s, w)
        y = jax.vmap(lambda x, w: lax.scaled_dot(x, w, rhs_scale=t, preferred_element_type=jnp.float32), (None, 0))(x, jnp.stack([w, -w]))
    assert " scaled_dot[" in outside and "scaled_dot_xw_nn" in inside and " scaled_dot[" not in inside
    back = np.asarray(weight, np.float64) @ wide(w, t).T
    np.testing.assert_array_equal(of_x.astype(np.float64), (back * wide(np.ones((4, 64)), s)).astype(jnp.bfloat16).astype(np.float64))
    np.testing.assert_array_equal(of_s, (back * wide(x)).reshape(4, 2, 32).sum(-1))
    np.testing.assert_array_equal(y, np.stack([wide(x) @ wide(w, t), -wide(x) @ wide(w, t)]))
    assert str(jax.make_jaxpr(loss)(x, s, w)) == outside


def test_in_place_of_lax_numbers_that_only_lax_takes():
    """It rounds them to bfloat16: wide integers and truth values, as operands and as scales."""
    x, w = small((4, 64), jnp.int32, 0, -400, 400), small((64, 6), jnp.int8, 1) > 0
    scales = dict(lhs_scale=2 ** small((4, 2), jnp.int32, 2, 0), rhs_scale=powers((2, 6), 3))
    product = functools.partial(lax.scaled_dot, x, w, **scales, preferred_element_type=jnp.float32)
    want = product()
    with jaxext.in_place_of_lax():
        np.testing.assert_array_equal(product(), want)


def test_in_place_of_lax_wrong_calls_are_laxs():
    x, w = jnp.ones((4, 64), jnp.int8), jnp.ones((64, 6), jnp.int8)
    calls: Any = {"lhs_scale": jnp.ones((2, 2))}, {"rhs_scale": jnp.ones((64, 6))}, {"dimension_numbers": (((0,), (0,)), ((), ()))}
    for given in calls:
        with pytest.raises(TypeError) as theirs:
            lax.scaled_dot(x, w, **given)
        with pytest.raises(TypeError) as ours, jaxext.in_place_of_lax():
            lax.scaled_dot(x, w, **given)
        assert str(ours.value) == str(theirs.value)
    with (
        pytest.raises(NotImplementedError, match="scaled_dot: not supported inside use_invariant"),
        jaxext.use_invariant(),
        jaxext.in_place_of_lax(),
    ):
        lax.scaled_dot(x, w)


def test_norms_of_examples_read_laxs_products():
    """A gradient of lax's scaled product, which lax does not have."""
    w, x = small((64, 6), jnp.float32, 0), small((3, 64), jnp.float32, 1)

    def loss(w, x):
        return lax.scaled_dot(x, w, preferred_element_type=jnp.float32).sum()

    norms = jaxext.privacy.per_example_norms(loss)(w, x)
    np.testing.assert_allclose(norms, np.sqrt(6 * (wide(x) ** 2).sum(-1)), rtol=1e-5)


@pytest.mark.parametrize("dtype", FLOAT8, ids=lambda dtype: dtype.__name__)
def test_every_number_of_8_bits(dtype):
    """NaN and infinities, too, as the formats say."""
    x = np.arange(256, dtype=np.uint8).view(dtype)[:, None]
    y = float32(x, np.ones((1, 1), dtype), lhs_scale=jnp.full((1, 1), 0.5))
    np.testing.assert_array_equal(y, x.astype(np.float32) / 2)


def plain(x, w, s, t):
    """Compute the product in jnp."""

    def scaled(x, scale):
        for axis, size in enumerate(x.shape):
            scale = jnp.repeat(scale, size // scale.shape[axis], axis)
        return x * scale

    return jnp.matmul(scaled(x, s), scaled(w, t), precision="highest")


def test_second_derivatives():
    args = [jnp.asarray(random(shape, np.float64, seed)) for seed, shape in enumerate([(2, 4), (4, 2), (2, 2), (1, 2)])]
    double = functools.partial(jaxext.scaled_dot, preferred_element_type=jnp.float64)
    check_second_derivatives(lambda x, w, s, t: double(x, w, lhs_scale=s, rhs_scale=t), plain, *args)


def test_gradients_have_the_dtypes_of_operands():
    x, w, s = small((2, 4), jnp.float8_e4m3fn, 0), small((4, 2), jnp.float8_e5m2, 1), powers((2, 2), 2, jnp.bfloat16)
    dx, dw, ds = jax.grad(lambda x, w, s: float32(x, w, lhs_scale=s).sum(), (0, 1, 2))(x, w, s)
    assert (dx.dtype, dw.dtype, ds.dtype) == (x.dtype, w.dtype, s.dtype)
    np.testing.assert_array_equal(dx, jnp.asarray(wide(wide(w).sum(1) * np.ones((2, 1)), s)).astype(x.dtype))
    np.testing.assert_array_equal(dw, jnp.asarray(wide(x, s).T @ np.ones((2, 2))).astype(w.dtype))
    np.testing.assert_array_equal(np.asarray(ds, np.float64), (wide(x) * wide(w).sum(1)).reshape(2, 2, 2).sum(-1))


def test_only_given_arrays_are_kept_for_the_derivative():
    """They hold no wide copy of an operand."""
    x, w, s = small((M, K), jnp.float8_e4m3fn, 0), small((K, N), jnp.float8_e4m3fn, 1), powers((M, 2), 2)
    pullback = jax.vjp(lambda x, w: float32(x, w, lhs_scale=s), x, w)[1]
    assert sum(of.nbytes for of in jax.tree.leaves(pullback)) == x.nbytes + w.nbytes + s.nbytes


@pytest.mark.parametrize(("layout", "most"), [("nn", 7), ("nt", 40), ("tn", 160)])
def test_by_parts(layout, most, monkeypatch):
    """Parts are of the sum, of a kept axis, and of a batch; one part is smaller than the others."""
    monkeypatch.setattr(xla_scaled, "MOST_AT_ONCE", most)
    shapes = {"nn": ((3, 2, 8), (3, 8, 9)), "nt": ((3, 2, 8), (3, 9, 8)), "tn": ((3, 8, 2), (3, 8, 9))}[layout]
    x, w = small(shapes[0], jnp.int8, 0), small(shapes[1], jnp.int8, 1)
    numbers = {"nn": ((2,), (1,)), "nt": ((2,), (2,)), "tn": ((1,), (1,))}[layout]
    t = powers(tuple(3 if n == 3 else 4 if n == 8 else 3 for n in w.shape), 2)
    y = jax.jit(lambda *args: float32(*args[:2], rhs_scale=args[2], dimension_numbers=(numbers, ((0,), (0,)))))(x, w, t)
    equation = {"nn": "bmk,bkn->bmn", "nt": "bmk,bnk->bmn", "tn": "bkm,bkn->bmn"}[layout]
    np.testing.assert_array_equal(y, np.einsum(equation, wide(x), wide(w, t)))


def weights(bits, group, symmetric, shape=(32, 6)):
    return jaxext.quantization.quantize(random(shape, np.float32, 5), bits=bits, group=group, symmetric=symmetric)


def value(q) -> np.ndarray:
    zero = 0 if q.zero_point is None else wide(np.ones(q.shape), q.zero_point)
    return (wide(q.qvalue) - zero) * wide(np.ones(q.shape), q.scale)


@pytest.mark.parametrize(("bits", "group", "symmetric"), [(4, 8, True), (4, None, False), (8, 32, True), (8, 8, False)])
def test_quantize(bits, group, symmetric):
    w = random((32, 6), np.float32, 5)
    q = jaxext.quantization.quantize(w, bits=bits, group=group, symmetric=symmetric)
    assert q.qvalue.dtype == {4: jnp.int4, 8: jnp.int8}[bits] and q.scale.shape == (32 // (group or 32), 6)
    step = wide(np.ones(w.shape), q.scale)
    assert (np.abs(value(q) - w) <= step * (0.5 if symmetric else 1) * (1 + 1e-5)).all()
    np.testing.assert_allclose(q.dequantize(), value(q), rtol=1e-6)
    if symmetric:  # the largest number of each block keeps its value
        blocks = np.abs(w).reshape(-1, group or 32, 6)
        np.testing.assert_allclose(np.abs(value(q)).reshape(blocks.shape).max(1), blocks.max(1), rtol=1e-6)


@pytest.mark.parametrize("axis", [0, -1, None])
def test_quantize_along_an_axis(axis):
    w = random((4, 6), np.float32, 5)
    q = jaxext.quantization.quantize(w, axis=axis)
    assert q.scale.shape == {0: (1, 6), -1: (4, 1), None: (1, 1)}[axis]
    np.testing.assert_allclose(value(q), w, atol=np.abs(w).max() / 250)


def test_stacked_weights_have_scales_of_their_own():
    """The scales are those of each weight alone; a second expert that is a thousand times as small keeps its values."""
    w = random((2, 3, 8, 6), np.float32, 5) * np.array([1, 1e-3, 1], np.float32)[:, None, None]
    q = jaxext.quantization.quantize(w, group=4)
    assert q.scale.shape == (2, 3, 2, 6)
    for i in np.ndindex(2, 3):
        for got, want in zip(jax.tree.leaves(q), jax.tree.leaves(jaxext.quantization.quantize(w[i], group=4, axis=0)), strict=True):
            np.testing.assert_array_equal(got[i], want)
        np.testing.assert_allclose(value(q)[i], w[i], atol=np.abs(w[i]).max() / 250)
    x = random((2, 3, 5, 8), np.float32, 0)
    y = jax.vmap(jax.vmap(jaxext.quantized_matmul))(x, q)
    np.testing.assert_allclose(y, x.astype(np.float64) @ value(q), atol=1e-5)


@pytest.mark.parametrize("axis", [0, None])
def test_a_vector_names_its_axis(axis):
    w = random((8,), np.float32, 5)
    q = jaxext.quantization.quantize(w, axis=axis)
    np.testing.assert_array_equal(q.scale, np.abs(w).max(keepdims=True) / np.float32(127))
    np.testing.assert_allclose(q.dequantize(), w, atol=np.abs(w).max() / 250)
    with pytest.raises(ValueError, match="quantize: axis is -2, want 0, the axis of a vector, or None"):
        jaxext.quantization.quantize(w)


@pytest.mark.parametrize("dtype", [np.int8, ml_dtypes.float8_e4m3fn], ids=lambda dtype: dtype.__name__)
def test_the_derivative_of_quantize_is_that_of_its_scales(dtype):
    """The largest number of each block alone has one, also of 8-bit floats; by a straight-through gradient all have the wide weight's."""
    w, x, top = jnp.asarray(random((8, 3), np.float32, 5)), random((4, 8), np.float32, 0), {np.int8: 127}.get(dtype, 448)
    quantized = lambda w: jaxext.quantization.quantize(w, group=4, dtype=dtype)
    of_w = jax.jit(jax.grad(lambda w: jaxext.quantized_matmul(x, quantized(w)).sum()))(w).reshape(2, 4, 3)
    blocks = np.asarray(w).reshape(2, 4, 3)
    largest = np.abs(blocks) == np.abs(blocks).max(1, keepdims=True)
    q = quantized(w)
    of_scale = jax.grad(lambda s: jaxext.quantized_matmul(x, jaxext.quantization.Quantized(q.qvalue, s)).sum())(q.scale)
    np.testing.assert_allclose(of_scale, (x.sum(0)[:, None] * wide(q.qvalue)).reshape(2, 4, 3).sum(1), rtol=1e-5)
    np.testing.assert_allclose(of_w, np.where(largest, np.sign(blocks) * of_scale[:, None] / top, 0), atol=1e-5)
    assert not jax.grad(lambda w: quantized(w).qvalue.astype(np.float32).sum())(w).any()
    if dtype is not np.int8:
        of_q = jax.grad(lambda q: jaxext.quantized_matmul(x, q).sum() + q.dequantize().sum())(q)
        assert not of_q.qvalue.astype(np.float32).any()
    got = jax.jit(jax.grad(lambda w: (x @ quantized(w).dequantize()).sum()))(w)
    np.testing.assert_allclose(got.reshape(2, 4, 3), of_w, atol=1e-5)
    through = lambda w: w + jax.lax.stop_gradient(quantized(w).dequantize() - w)
    np.testing.assert_allclose(jax.jit(jax.grad(lambda w: (x @ through(w)).sum()))(w), np.tile(x.sum(0)[:, None], 3), rtol=1e-6)


@pytest.mark.parametrize("dtype", [*FLOAT8, np.int8, ml_dtypes.int4], ids=lambda dtype: dtype.__name__)
def test_quantize_saturates(dtype):
    """It saturates where a division rounds up too, and a block of zeros stays zero."""
    w = np.array([[3e38, 1e-38, 0.0], [-3e38, -1e-38, 0.0]], np.float32)
    q = jaxext.quantization.quantize(w, dtype=dtype)
    assert q.qvalue.dtype == dtype and (np.asarray(q.scale)[0, 2], *np.asarray(q.qvalue)[:, 2].astype(float)) == (1, 0, 0)
    largest = float(jnp.finfo(dtype).max if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max)
    np.testing.assert_array_equal(np.abs(np.asarray(q.qvalue, np.float32))[:, 0], largest)


@pytest.mark.parametrize("dtype", [np.int8, ml_dtypes.int4, ml_dtypes.uint4, np.uint8], ids=lambda dtype: dtype.__name__)
def test_zero_points(dtype):
    """All of the dtype's range, for numbers of both signs, of one, and as large as there are."""
    w = np.array([[3e38, 1.0, -5.0, 0.0], [-3e38, 3.0, -1.0, 0.0]], np.float32)
    q = jaxext.quantization.quantize(w, dtype=dtype, symmetric=False)
    assert q.zero_point is not None and q.qvalue.dtype == q.zero_point.dtype == dtype
    np.testing.assert_allclose(value(q), w, atol=0, rtol=1 if dtype in (ml_dtypes.int4, ml_dtypes.uint4) else 0.02)
    assert value(q)[0, 2] < -4 and value(q)[1, 1] > 2.5


def test_the_precision_in_force():
    """The precision at the time of tracing is taken, as by lax's products."""
    q, x = weights(8, None, False), random((3, 32), np.float32, 0)
    with jax.default_matmul_precision("highest"):
        text = str(jax.make_jaxpr(lambda x: jaxext.quantized_matmul(x, q))(x))
    assert text.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") == 2


@pytest.mark.parametrize("precision", ["highest", jax.lax.Precision.HIGH, jax.lax.DotAlgorithmPreset.F32_F32_F32], ids=str)
def test_the_precision_of_a_call(precision):
    q, x = weights(8, None, False), random((3, 32), np.float32, 0)
    wanted = {"highest": "precision=(Precision.HIGHEST, Precision.HIGHEST)", jax.lax.Precision.HIGH: "precision=(Precision.HIGH, Precision"}
    for product in (lambda x: jaxext.quantized_matmul(x, q, precision=precision), lambda x: float32(x, x.T, precision=precision)):
        assert wanted.get(precision, "DotAlgorithmPreset.F32_F32_F32") in str(jax.make_jaxpr(product)(x))


@pytest.mark.parametrize("scale", [("b", 1), ("b", 4), ("b", 64)], ids=str)
def test_a_symbolic_batch_with_scales_of_rows(scale):
    (b,) = export.symbolic_shape("b")
    struct = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    w = small((64, 3), jnp.float32, 0)
    f = jax.jit(lambda x, s: float32(x, w, lhs_scale=s))
    exported = export.export(f)(struct(b, 64), struct(b, scale[1]))
    x, s = small((5, 64), jnp.float32, 1), powers((5, scale[1]), 2)
    np.testing.assert_array_equal(exported.call(x, s), wide(x, s) @ wide(w))


@pytest.mark.parametrize("given", [dict(axis=1), dict(group=8)], ids=str)
def test_zero_points_on_an_explicit_mesh(given):
    """There are fewer columns of blocks than devices."""
    q, x = (
        jaxext.quantization.quantize(random((32, 8), np.float32, 5), symmetric=False, **given),
        jnp.asarray(random((4, 32), np.float32, 0)),
    )
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    put = lambda x: jax.device_put(x, NamedSharding(mesh, P()))
    with jax.set_mesh(mesh):
        y = jaxext.quantized_matmul(put(x), jax.tree.map(put, q), out_sharding=P("a", "b"))
    np.testing.assert_allclose(jax.device_get(y), np.asarray(x, np.float64) @ value(q), atol=1e-5)


@pytest.mark.parametrize("op", [jaxext.scaled_dot, jaxext.ragged_linear, jaxext.ragged_scaled_dot], ids=lambda op: op.__name__)
def test_a_split_sum_goes_where_out_sharding_says(op):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    ragged = [jnp.array([4], jnp.int32)] if op is not jaxext.scaled_dot else []
    x, w = random((4, 8), np.float32, 0), random((8, 6), np.float32, 1)
    args = [jax.device_put(x, NamedSharding(mesh, P(None, "d")))]
    args += [jax.device_put(w[None], NamedSharding(mesh, P(None, "d"))) if ragged else jax.device_put(w, NamedSharding(mesh, P("d")))]
    with jax.set_mesh(mesh):
        y = jax.jit(lambda *args: op(*args, *ragged, out_sharding=P("d"), preferred_element_type="float32"))(*args)
    assert jax.typeof(y).sharding.spec == P("d", None)
    np.testing.assert_allclose(jax.device_get(y), x.astype(np.float64) @ w, atol=1e-5)


@pytest.mark.parametrize("side", ["lhs", "rhs"])
def test_tangents_of_scales_have_the_sharding_of_the_product(side):
    """Devices split the factor along the sum and its scale along the result: one of both is gathered where the tangent multiplies them."""
    factor, scale = {"lhs": (P(None, "d"), P("d")), "rhs": (P("d"), P(None, "d"))}[side]
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    args = small((M, K), jnp.float32, 0), small((K, N), jnp.float32, 1), powers((M, 4), 2), powers((4, N), 3)
    moved = [0, 2] if side == "lhs" else [1, 3]

    def along(args):
        some = {i: args[i] for i in moved}

        def f(some):
            x, w, s, t = (some.get(i, x) for i, x in enumerate(args))
            return float32(x, w, lhs_scale=s, rhs_scale=t)

        return jax.jvp(f, (some,), (some,))

    with jax.set_mesh(mesh):
        specs = dict(zip(moved, (factor, scale), strict=True))
        y, dot = jax.jit(along)([jax.device_put(x, NamedSharding(mesh, specs.get(i, P()))) for i, x in enumerate(args)])
    np.testing.assert_array_equal(dot, 2 * y)
    np.testing.assert_array_equal(y, wide(args[0], args[2]) @ wide(args[1], args[3]))


@pytest.mark.parametrize("shapes", [((1, 1), (1, 1)), ((M, 1), (1, N)), ((M, 1), (1, 1))], ids=str)
def test_scales_on_both_sides_of_the_range(shapes):
    """The product with the first alone is infinite, or zero."""
    x, w = small((M, K), jnp.float8_e4m3fn, 0) * 64, small((K, N), jnp.float8_e4m3fn, 1) * 64
    for sizes in ((120, -60), (-60, 120), (-120, 30), (30, -120)):
        s, t = (jnp.full(shape, 2.0**size, jnp.float32) for shape, size in zip(shapes, sizes, strict=True))
        y = float32(x, w, lhs_scale=s, rhs_scale=t)
        np.testing.assert_array_equal(y, wide(x, s) @ wide(w, t))


@pytest.mark.parametrize("given", [{}, dict(symmetric=False), dict(dtype=jnp.float8_e4m3fn)], ids=str)
def test_quantize_numbers_whose_scale_would_be_subnormal(given):
    """XLA takes such a scale for zero on CPUs, and it counted as one: so all numbers were zero."""
    w = random((32, 6), np.float32, 5) * np.float32(1e-36)
    q = jaxext.quantization.quantize(w, **given)
    np.testing.assert_allclose(value(q), w, rtol=0.0625, atol=float(np.finfo(np.float32).tiny))


def test_one_scale_without_axes():
    q = jaxext.quantization.Quantized(small((32, 4), jnp.int8, 0), jnp.float32(0.5), jnp.int8(2))
    np.testing.assert_array_equal(q.dequantize(), (wide(q.qvalue) - 2) / 2)
    np.testing.assert_array_equal(jaxext.quantized_matmul(jnp.eye(32, dtype=jnp.float32), q), q.dequantize())


def test_float64_scales_of_integers():
    x, w, s = small((3, 8), jnp.int8, 0), small((8, 4), jnp.int8, 1), jnp.asarray(random((3, 2), np.float64, 2))
    y = jaxext.scaled_dot(x, w, lhs_scale=s, preferred_element_type=jnp.float64)
    np.testing.assert_allclose(y, wide(x, s) @ wide(w), rtol=1e-13)


@pytest.mark.parametrize(
    ("before", "dtypes", "result", "wanted"),
    [
        (False, ("bfloat16", "int8"), "float32", "bfloat16"),
        (True, ("bfloat16", "int8"), "float32", "float32"),
        (True, ("bfloat16", "int8"), "bfloat16", "bfloat16"),
        (True, ("float16", "int8"), "float16", "float32"),
        (False, ("float16", "int8"), "float16", "float16"),
        (False, ("float16", "bfloat16"), "float32", "float32"),
        (False, ("float8_e4m3fn", "float8_e5m2"), "float32", "bfloat16"),
    ],
    ids=str,
)
def test_what_gpus_multiply(before, dtypes, result, wanted):
    """16 bits where they hold the numbers; a float16 that is scaled may leave its range."""
    of_slots = dict(zip("xw", map(jnp.dtype, dtypes), strict=True))
    call: Any = types.SimpleNamespace(platform="cuda", factors=("x", "w"), dtypes=of_slots, dtype=jnp.dtype(result))
    assert xla_scaled.multiplied_dtype(call, before) == wanted


@pytest.mark.parametrize(("module", "least"), [(quantized, 4), (jaxext.quantization, 7)])
def test_examples_of_the_docstrings(module, least):
    """Examples run with JAX's defaults, as for users."""
    both = dict(jax=jax, jnp=jnp, quantize=jaxext.quantization.quantize, quantized_matmul=jaxext.quantized_matmul)
    with jax.enable_x64(False), jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        found = doctest.testmod(module, extraglobs=both)
    assert found.attempted >= least and found.failed == 0


def test_every_pair_of_int4():
    """All 65,536 pairs of bytes."""
    pairs = np.arange(1 << 16, dtype=np.uint16).view(np.uint8).reshape(-1, 2)
    numbers = jax.jit(jaxext.quantization.unpack_int4)(pairs)
    halves = np.stack([pairs & 15, pairs >> 4], -1).reshape(-1, 4).astype(np.int8)
    np.testing.assert_array_equal(np.asarray(numbers).astype(np.int8), np.where(halves > 7, halves - 16, halves))
    np.testing.assert_array_equal(jax.jit(jaxext.quantization.pack_int4)(numbers), pairs)
    unsigned = jaxext.quantization.unpack_int4(pairs, jnp.uint4)
    np.testing.assert_array_equal(np.asarray(unsigned).astype(np.int8), halves)
    y = jaxext.quantized_matmul(np.array([[0.0, 1], [1, 0]], np.float32), jaxext.quantization.Quantized(numbers[:2], jnp.ones((1, 1))))
    np.testing.assert_array_equal(y, np.asarray(numbers)[1::-1].astype(np.float32))


@pytest.mark.parametrize(
    ("bits", "symmetric", "dtype"),
    [(4, True, np.float32), (4, False, ml_dtypes.bfloat16), (8, True, ml_dtypes.bfloat16), (8, False, np.float32)],
    ids=str,
)
def test_quantized_matmul(bits, symmetric, dtype):
    q, x = weights(bits, 8, symmetric), random((2, 3, 32), dtype, 0)
    y = jaxext.quantized_matmul(x, q)
    want = np.asarray(x, np.float64) @ value(q)
    assert y.dtype == dtype
    np.testing.assert_allclose(np.asarray(y, np.float64), want, atol=8 * float(jnp.finfo(dtype).eps) * np.abs(want).max())


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "with zero points"])
def test_gradients_of_quantized_matmul(symmetric):
    """Gradients are in x and in the scale; the weight is also mapped, as over experts."""
    q, x = weights(8, 8, symmetric), jnp.asarray(random((3, 32), np.float32, 0))
    loss = lambda f: lambda x, s: jnp.sin(f(x, jaxext.quantization.Quantized(q.qvalue, s, q.zero_point))).sum()
    by_value = lambda x, q: jnp.matmul(x, q.dequantize(), precision="highest")
    all_of = lambda f: jax.jit(lambda x, s: (jax.grad(f, (0, 1))(x, s), jax.hessian(f)(x, s), jax.jacfwd(jax.grad(f, 1))(x, s)))
    one, other = (all_of(loss(f))(x, q.scale) for f in (jaxext.quantized_matmul, by_value))
    for got, want in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max())
    several = jax.tree.map(lambda of: jnp.stack([of, of[::-1]]), q)
    y = jax.vmap(jaxext.quantized_matmul, (None, 0))(x, several)
    np.testing.assert_allclose(y[1], by_value(x, jax.tree.map(lambda of: of[1], several)), atol=1e-5)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("specs", [(P("n"), P(None, "k")), (P("n", "k"), P("k"))], ids=["N", "K"])
def test_weights_on_devices(specs, kind):
    """The scales lie where their blocks do; where K is split one sum is sent, and no weight ever is."""
    q, x = weights(4, 8, True, (64, 8)), jnp.asarray(random((4, 64), np.float32, 0))
    mesh = jax.make_mesh((2, 4), ("n", "k"), axis_types=(kind,) * 2)
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    split = jax.tree.map(lambda of: put(of, specs[1]), q)
    with jax.set_mesh(mesh):
        out = P("n") if kind is AxisType.Explicit and specs[1] == P("k") else None
        f = jax.jit(lambda x, q: jaxext.quantized_matmul(x, q, out_sharding=out))
        y = f(put(x, specs[0]), split)
        text = f.lower(put(x, specs[0]), split).compile().as_text() or ""
    np.testing.assert_allclose(np.asarray(y), np.asarray(x, np.float64) @ value(q), atol=1e-5)
    sent = [name for name in ("all-gather(", "all-reduce(", "all-to-all(", "collective-permute(") for _ in range(text.count(f" {name}"))]
    assert sent == (["all-reduce("] if specs[1] == P("k") else [])


def test_qwix_arrays_are_taken():
    """Their attributes are read."""
    q = weights(8, None, True)
    x = random((3, 32), np.float32, 0)
    other = types.SimpleNamespace(qvalue=q.qvalue, scale=q.scale, zero_point=None, qtype="int8")
    np.testing.assert_array_equal(jaxext.quantized_matmul(x, other), jaxext.quantized_matmul(x, q))


LIST: Any = [1.0]
X, W, S = np.ones((2, 8), np.float32), np.ones((8, 4), np.float32), np.ones((1, 4), np.float32)
INT, UINT = np.ones((8, 4), np.int8), np.ones((8, 4), np.uint8)
FLOAT: Any = 4.0
NONE: Any = None
WRONG = {
    "rank": (TypeError, "equally many axes", lambda: jaxext.scaled_dot(X, W[0])),
    "lists": (TypeError, "lhs is", lambda: jaxext.scaled_dot(LIST, W)),
    "contraction": (TypeError, "contracting dimensions", lambda: jaxext.scaled_dot(X, W[:4])),
    "integers": (TypeError, "lhs is int32", lambda: jaxext.scaled_dot(X.astype(np.int32), W)),
    "integer scales": (TypeError, "rhs_scale is int8", lambda: jaxext.scaled_dot(X, W, rhs_scale=INT[:1])),
    "blocks": (TypeError, r"lhs_scale has the shape \(2, 3\)", lambda: jaxext.scaled_dot(X, W, lhs_scale=np.ones((2, 3), np.float32))),
    "axes of a scale": (TypeError, r"lhs_scale has the shape \(2,\)", lambda: jaxext.scaled_dot(X, W, lhs_scale=np.ones(2, np.float32))),
    "result": (TypeError, "preferred_element_type is int32", lambda: jaxext.scaled_dot(X, W, preferred_element_type=jnp.int32)),
    "implementation": (ValueError, "implementation is 'cudnn'", lambda: jaxext.scaled_dot(X, W, implementation="cudnn")),
    "e8m0": (
        TypeError,
        r"scaled_dot: lhs_scale is float8_e8m0fnu\[2,1\].*stop_gradient",
        lambda: jax.grad(lambda s: jaxext.scaled_dot(X, W, lhs_scale=s).astype(jnp.float32).sum())(jnp.ones((2, 1), jnp.float8_e8m0fnu)),
    ),
    "e8m0 of a weight": (
        TypeError,
        r"quantized_matmul: w.scale is float8_e8m0fnu\[1,4\]",
        lambda: jax.grad(lambda s: jaxext.quantized_matmul(X, q(INT, s)).sum())(jnp.ones((1, 4), jnp.float8_e8m0fnu)),
    ),
    "dimension_numbers": (TypeError, "dimension_numbers is 5, want", lambda: jaxext.scaled_dot(X, W, dimension_numbers=5)),
    "a name of no dtype": (TypeError, "dtype is 'nonsense', want a dtype", lambda: jaxext.quantization.quantize(W, dtype="nonsense")),
    "a name of no dtype to unpack": (TypeError, "dtype is 'x', want a dtype", lambda: jaxext.quantization.unpack_int4(UINT, "x")),
    "traced": (TypeError, "symmetric is traced", lambda: jax.jit(lambda s: jaxext.quantization.quantize(W, symmetric=s).scale)(True)),
    "no arrays to dequantize": (TypeError, "dequantize: qvalue is None, want an array", lambda: q(NONE, NONE).dequantize()),
    "no weight": (TypeError, r"w is float32\[8,4\], want a Quantized", lambda: jaxext.quantized_matmul(X, W)),
    "weight of text": (TypeError, "w is 'w', want a Quantized", lambda: jaxext.quantized_matmul(X, "w")),
    "weight of another K": (TypeError, r"w.qvalue has the shape \(4, 4\)", lambda: jaxext.quantized_matmul(X, q(INT[:4], S))),
    "wide weight": (TypeError, "w.qvalue is int32", lambda: jaxext.quantized_matmul(X, q(INT.astype(np.int32), S))),
    "integer x": (TypeError, "x is int8", lambda: jaxext.quantized_matmul(INT, q(INT, S))),
    "blocks of a weight": (TypeError, r"w.scale has the shape \(3, 4\)", lambda: jaxext.quantized_matmul(X, q(INT, np.ones((3, 4))))),
    "bytes of int4": (TypeError, r"want unpack_int4\(w.qvalue\)", lambda: jaxext.quantized_matmul(X, q(UINT, np.ones((1, 8))))),
    "bytes of grouped int4": (TypeError, "as if each byte held two int4", lambda: jaxext.quantized_matmul(X, q(INT, np.ones((2, 8))))),
    "bytes to dequantize": (TypeError, r"dequantize: .* want unpack_int4\(qvalue\)", lambda: q(INT, np.ones((1, 8))).dequantize()),
    "zeros of another shape": (TypeError, "w.zero_point has", lambda: jaxext.quantized_matmul(X, q(INT, S, np.ones(4, np.int8)))),
    "zeros out of range": (ValueError, "from 200 to 200", lambda: jaxext.quantized_matmul(X, q(INT, S, np.full((1, 4), 200)))),
    "bits": (ValueError, "bits is 3", lambda: jaxext.quantization.quantize(W, bits=3)),
    "dtype": (TypeError, "dtype is int16", lambda: jaxext.quantization.quantize(W, dtype=jnp.int16)),
    "complex64": (
        TypeError,
        "preferred_element_type is complex64",
        lambda: jaxext.quantized_matmul(X, q(INT, S), preferred_element_type="complex64"),
    ),
    "complex zeros": (TypeError, "zero_point is complex64", lambda: jaxext.quantized_matmul(X, q(INT, S, S.astype(np.complex64)))),
    "no zero": (TypeError, "dtype is float8_e8m0fnu", lambda: jaxext.quantization.quantize(W, dtype=jnp.float8_e8m0fnu)),
    "unsigned": (ValueError, "no negative numbers", lambda: jaxext.quantization.quantize(W, dtype=jnp.uint8)),
    "floats with zeros": (
        ValueError,
        "want symmetric=True, or an integer dtype",
        lambda: jaxext.quantization.quantize(W, dtype=jnp.float8_e5m2, symmetric=False),
    ),
    "group": (ValueError, "group is 3", lambda: jaxext.quantization.quantize(W, group=3)),
    "group without an axis": (ValueError, "group is 4 and axis is None", lambda: jaxext.quantization.quantize(W, group=4, axis=None)),
    "axis": (ValueError, "axis is 2, want one of the 2 axes of w", lambda: jaxext.quantization.quantize(W, axis=2)),
    "axis of floats": (TypeError, "axis is 0.5, want an int or None", lambda: jaxext.quantization.quantize(W, axis=0.5)),  # type: ignore[arg-type]
    "a group of floats": (TypeError, "group is 4.0, want an int", lambda: jaxext.quantization.quantize(W, group=FLOAT)),
    "integers to quantize": (TypeError, "w is int8", lambda: jaxext.quantization.quantize(INT)),
    "odd int4": (ValueError, "even size", lambda: jaxext.quantization.pack_int4(np.ones((2, 3), ml_dtypes.int4))),
    "int8 to pack": (TypeError, "q is int8", lambda: jaxext.quantization.pack_int4(INT)),
    "floats to unpack": (TypeError, "packed is float32", lambda: jaxext.quantization.unpack_int4(W)),
}


def q(*arrays):
    return jaxext.quantization.Quantized(*arrays)


@pytest.mark.parametrize("case", WRONG)
def test_wrong_calls(case):
    error, words, call = WRONG[case]
    with pytest.raises(error, match=words):
        call()
