"""Operations beside lax's on a GPU, by each implementation, against float64: values and gradients.  On CPUs `xla` runs one set of each."""

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
from jaxext.kernels.epilogue import ACTIVATIONS

NAMES = {"xla": pytest.param("xla")} | {name: pytest.param(name, marks=pytest.mark.gpu) for name in ("triton", "cuda")}
BY_XLA_AND_TRITON = pytest.mark.parametrize("implementation", [NAMES["xla"], NAMES["triton"]])
BY_EACH = pytest.mark.parametrize("implementation", NAMES.values())
UNIT = 2.0**-9  # of bfloat16, to which factors that are scaled before the product may be rounded
UNAVAILABLE = "compute capability|no CUDA kernels|built without|compiled for"  # reasons of a refusal for which a test is skipped
ARCH = "8-bit floats need compute capability"


def each_on_gpus(name, values, ids=None):
    """Parametrize by values of which CPUs take the first alone."""
    first, *others = values
    return pytest.mark.parametrize(name, [first, *(pytest.param(value, marks=pytest.mark.gpu) for value in others)], ids=ids)


def draw(*shapes, dtype: Any = jnp.bfloat16, integers=False):
    return [jnp.asarray(random(shape, np.float32, seed, integers), dtype) for seed, shape in enumerate(shapes)]


def exactly(x) -> Any:
    return np.asarray(x).astype(np.float64)


def within(atol, rtol=0.0):
    """Return a check that numbers are finite and near others, `atol` being in units of the largest of these."""

    def near(got, want):
        assert np.isfinite(exactly(got)).all()
        np.testing.assert_allclose(exactly(got), want, rtol=rtol, atol=atol * np.abs(want).max())

    return near


def exact(got, want, dtype=jnp.bfloat16):
    """Sums of small integers are exact in float32 and rounded once."""
    np.testing.assert_array_equal(exactly(got), exactly(jnp.asarray(want, jnp.float32).astype(dtype)))


def with_gradients(function):
    """Return a function of what is not differentiated, the operands and a cotangent."""

    def both(given, *operands):
        y, pullback = jax.vjp(functools.partial(function, *given), *operands[:-1])
        return y, *pullback(operands[-1])

    return both


def computed(function, operands, refusals=None):
    """The results of a program, which may be refused for reasons like these."""
    try:
        return jax.jit(function)(*operands)
    except NotImplementedError as error:
        if refusals is None or not re.search(refusals, str(error)):
            raise
        pytest.skip(str(error))


def check_gradients(function, true, operands, *near, given=(), refusals=None, repeated=False):
    """Compare the value and the gradients, by one check or one for each, with those of the definition in float64."""
    program = jax.jit(with_gradients(function))
    got = computed(program, (given, *operands), refusals)
    want = jax.jit(with_gradients(true))((), *map(exactly, operands))
    for one, other, check in zip(got, want, near * len(got) if len(near) == 1 else near, strict=True):
        check(one, np.asarray(other))
    for one, again in zip(got, program(given, *operands) if repeated else got, strict=True):
        np.testing.assert_array_equal(one, again)
    return got


# Products of scaled and quantised numbers

BLOCKS = {"rows and columns": (1, 1), "blocks": (4, 1), "squares": (4, 3)}  # of the sum, and of columns if not each has one
EIGHT_BITS = [("float8_e4m3fn", "float8_e4m3fn"), ("float8_e5m2", "float8_e4m3fn")]
PAIRS = [EIGHT_BITS[0], ("bfloat16", "int8"), ("int8", "int8"), ("bfloat16", "float8_e5m2")]
M, K, N = 150, 512, 264


def spread(scale, shape):
    for axis, size in enumerate(shape):
        scale = jnp.repeat(scale, size // scale.shape[axis], axis)
    return scale


def scaled_factors(blocks, dtypes, batch=(), N=N, times=1):
    """x, w, their scales, and the product of these in float64 as a function of the scales."""
    of_sum, of_columns = BLOCKS[blocks]
    x, w = (jnp.asarray(random(of, np.float32, n) * times).astype(dtypes[n]) for n, of in enumerate([(*batch, M, K), (*batch, K, N)]))
    rng = np.random.default_rng(2)
    shapes = (*batch, M, of_sum), (*batch, of_sum, N if of_columns == 1 else of_columns)
    s, t = (jnp.asarray(rng.uniform(0.5, 2, shape), jnp.float32) for shape in shapes)
    return x, w, s, t, lambda s, t: (exactly(x) * spread(s, x.shape)) @ (exactly(w) * spread(t, w.shape))


@BY_XLA_AND_TRITON
@each_on_gpus("dtypes", PAIRS, ids=str)
@each_on_gpus("blocks", BLOCKS)
def test_scaled_dot(implementation, dtypes, blocks):
    """Values and the gradients of the scales."""
    x, w, s, t, true = scaled_factors(blocks, dtypes, times=8)

    def product(x, w, s, t):
        return jaxext.scaled_dot(x, w, lhs_scale=s, rhs_scale=t, preferred_element_type=jnp.float32, implementation=implementation)

    operands = s, t, jnp.asarray(random((M, N), np.float32, 3))
    check_gradients(product, true, operands, *(within(units * UNIT) for units in (2, 4, 4)), given=(x, w), refusals=ARCH)


@pytest.mark.gpu
@pytest.mark.parametrize("result", [jnp.bfloat16, jnp.float32], ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("dtypes", EIGHT_BITS, ids=str)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("blocks", BLOCKS)
def test_scaled_dot_by_cuda(blocks, turned, dtypes, result):
    """Values, of a right factor with either axis last; jitted, and of each example under vmap.  Of a float32 result too: tensor cores keep
    some 14 bits of the sum of a step."""
    *operands, true = scaled_factors(blocks, dtypes, (2,), 3 * 128 if blocks == "squares" else N)

    def product(x, w, s, t):
        w, t = (w.T, t.T) if turned else (w, t)
        static: dict[str, Any] = dict(dimension_numbers=(((1,), (1 if turned else 0,)), ((), ())), preferred_element_type=result)
        return jaxext.scaled_dot(x, w, lhs_scale=s, rhs_scale=t, **static, implementation="cuda")

    got = computed(jax.vmap(product), operands, UNAVAILABLE)
    for n, want in enumerate(np.asarray(true(*map(exactly, operands[2:])))):
        within((2 if result == jnp.bfloat16 else 1) * UNIT)(got[n], want)


def values_of(q, shape):
    """A quantised weight in float64."""
    return exactly(q.qvalue.astype(jnp.float32)) * np.asarray(spread(exactly(q.scale), shape))


@pytest.mark.gpu
@pytest.mark.skipif(bool(cuda_binding.missing()), reason=str(cuda_binding.missing()))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rows", [1, 8, 9, 33, 64, 129])
@pytest.mark.parametrize("group", [None, 32, 128])
@pytest.mark.parametrize("bits", [4, 8])
def test_weight_only(bits, group, rows, dtype):
    """The CUDA kernels for few rows, and Hopper's for more, mapped too, on columns that fill no block."""
    shape = 2, K, N // 32 * 32
    q = jaxext.quantization.quantize(random(shape, np.float32, 5), bits=bits, group=group, axis=1)
    x = jnp.asarray(random((2, rows, K), np.float32, 6), dtype)
    want = exactly(x) @ values_of(q, shape)
    cuda = functools.partial(jaxext.quantized_matmul, implementation="cuda")
    within(2 * UNIT)(computed(jax.vmap(cuda), (x, q), "rows, it takes 64 at most" if rows > 64 else None), want)
    first = x[0], jax.tree.map(lambda part: part[0], q)
    within(2 * UNIT)(computed(cuda, first), want[0])
    within(0.01 * UNIT)(computed(functools.partial(cuda, preferred_element_type=jnp.float32), first), want[0])


@BY_XLA_AND_TRITON
@each_on_gpus("rows", [1, 16, 150])
@each_on_gpus("group", [None, 128])
@each_on_gpus("bits", [4, 8])
def test_quantized_matmul(implementation, bits, group, rows):
    """Values, and the gradient in x."""
    q = jaxext.quantization.quantize(random((K, N), np.float32, 5), bits=bits, group=group)
    product, values = lambda q, x: jaxext.quantized_matmul(x, q, implementation=implementation), values_of(q, (K, N))
    check_gradients(product, lambda x: x @ values, draw((rows, K), (rows, N)), within(2 * UNIT), given=(q,))


@BY_XLA_AND_TRITON
def test_fp8_matmul(implementation):
    """A step: the products of forward and backward, against those of the same rounded numbers by `xla`.

    In the norm: where sums differ by little, their cotangents may be rounded to neighbouring 8-bit floats, which differ by a quarter.
    """

    def step(implementation):
        product = functools.partial(jaxext.fp8_matmul, implementation=implementation)
        loss = lambda x, w: jnp.square(product(x, w).astype(jnp.float32)).sum()
        return computed(jax.grad(loss, (0, 1)), draw((M, K), (K, N)), ARCH)

    for one, other in zip(step(implementation), step("xla"), strict=True):
        assert np.linalg.norm(exactly(one) - exactly(other)) <= 2.0**-5 * np.linalg.norm(exactly(other))


# Products with own transposes


@BY_XLA_AND_TRITON
@each_on_gpus("dtype", ["float32", "bfloat16"])
@each_on_gpus("shape", [(17, 40), (300, 264), (3, 128, 513), (1500, 2048)], ids=str)
def test_gram(implementation, dtype, shape):
    """Values, bits, and the gradient: within roundings to bfloat16, or TF32 and their sums."""
    operands = draw(shape, (*shape[:-1], shape[-2]), dtype=dtype)
    gram = functools.partial(jaxext.gram, implementation=implementation)
    y, _ = check_gradients(gram, lambda x: x @ jnp.swapaxes(x, -1, -2), operands, within(2.0**-7))
    np.testing.assert_array_equal(y, y.swapaxes(-1, -2))


@pytest.mark.gpu
@pytest.mark.parametrize("result", [None, "float32"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(8, 8), (520, 264), (3, 1096, 512), (256, 8192), (2304, 1024)], ids=str)
def test_gram_by_cuda(shape, dtype, result):
    """Every tile and width, batches and parts; bit for bit symmetric."""
    (x,) = draw(shape, dtype=dtype)
    y = computed(lambda x: jaxext.gram(x, preferred_element_type=result, implementation="cuda"), (x,))
    np.testing.assert_array_equal(y, y.swapaxes(-1, -2))
    within(2.0**-8 if result is None else 2.0**-18)(y, exactly(x) @ exactly(x).swapaxes(-1, -2))


@BY_EACH
@each_on_gpus("turned", [False, True])
def test_newton_schulz(implementation, turned):
    cuda = implementation == "cuda"
    sizes, dtype, precision = ((256, 336), "bfloat16", None) if cuda else ((200, 333), "float32", "highest")
    (x,) = draw((2, *(sizes[::-1] if turned else sizes)), dtype=dtype)
    y = computed(lambda x: jaxext.newton_schulz(x, implementation=implementation, precision=precision), (x,))
    np.testing.assert_allclose(exactly(y), jaxext.newton_schulz(exactly(x), implementation="xla"), atol=2.0**-4 if cuda else 1e-4)


# Causal convolutions

BATCH, STEPS, CHANNELS = 2, 300, 136


@BY_EACH
@each_on_gpus("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=lambda dtype: dtype.__name__)
@each_on_gpus("kind", ["state", "packed"])
@each_on_gpus("taps", [2, 4, 8])
def test_causal_conv1d(implementation, dtype, kind, taps):
    x = BATCH, STEPS, CHANNELS
    *operands, state, ct = draw(x, (taps, CHANNELS), (CHANNELS,), (BATCH, taps - 1, CHANNELS), x, dtype=dtype)
    numbers = np.sort(np.random.default_rng(0).integers(1, 9, x[:2]), -1).astype(np.int32)
    numbers, state = (numbers, jnp.zeros_like(state)) if kind == "packed" else (0 * numbers, state)

    def convolve(x, weight, bias, state):
        given: Any = {"seq_idx": numbers} if kind == "packed" else {"initial_states": state}
        return jaxext.causal_conv1d(x, weight, bias, **given, activation="silu", implementation=implementation)

    def true(x, weight, bias, state):
        read = jnp.concatenate([state, x], 1)
        of_read = np.concatenate([np.zeros((BATCH, taps - 1), np.int32), numbers], 1)
        same = lambda i: (of_read[:, i : i + STEPS] == numbers)[..., None]
        terms = [jnp.where(same(i), read[:, i : i + STEPS], 0.0) * jnp.broadcast_to(weight[i], x.shape) for i in range(taps)]
        return jax.nn.silu(sum(terms, jnp.broadcast_to(bias, x.shape)))

    eps = 16 * float(jnp.finfo(dtype).eps)
    got = check_gradients(convolve, true, (*operands, state, ct), within(eps, eps), refusals=UNAVAILABLE, repeated=True)
    assert {one.dtype for one in got} == {np.dtype(dtype)}


@BY_EACH
def test_parts_of_a_sequence(implementation):
    """Bit for bit: a step is computed in the same way wherever it stands."""
    x, weight, bias = draw((BATCH, STEPS, CHANNELS), (4, CHANNELS), (CHANNELS,))
    convolve = functools.partial(jaxext.causal_conv1d, activation="silu", return_final_states=True, implementation=implementation)
    computed(convolve, (x, weight, bias), UNAVAILABLE)
    want, _ = convolve(x, weight, bias)
    first, state = convolve(x[:, :133], weight, bias)
    second, _ = convolve(x[:, 133:], weight, bias, initial_states=state)
    tolerance = 1e-2 if implementation == "xla" else 0
    np.testing.assert_allclose(exactly(jnp.concatenate([first, second], 1)), exactly(want), rtol=tolerance, atol=tolerance)


# Ragged products: groups end beside tiles, are empty, or leave rows to nobody, which are NaN

ROWS, DEPTH = 520, 136
SIZES = {
    "edges beside tiles": (129, 0, 130, 127, 64, 1, 69, 0),
    "nobody's rows": (100, 33, 0, 250, 0, 0, 7, 0),
    "all in one": (0, 0, 0, 520, 0, 0, 0, 0),
    "none": (0,) * 8,
    "few rows each": (3, 1, 0, 2, 5, 1, 1, 4),
}


def ragged_operands(sizes, dtype: Any = jnp.bfloat16):
    """Small integers: x, w and a cotangent of which nobody's rows are NaN."""
    x, w, ct = draw((ROWS, DEPTH), (len(sizes), DEPTH, N), (ROWS, N), dtype=dtype, integers=True)
    return x.at[sum(sizes) :].set(np.nan), w, ct.at[sum(sizes) :].set(np.nan)


def true_ragged(sizes, x, w):
    ends = np.cumsum(sizes)
    parts = [x[end - size : end] @ w[g] for g, (size, end) in enumerate(zip(sizes, ends, strict=True))]
    return jnp.concatenate([*parts, np.zeros((ROWS - ends[-1], N))])


def ragged_dot(implementation):
    return lambda sizes, x, w: jaxext.ragged_dot(x, w, sizes, implementation=implementation)


@BY_EACH
@each_on_gpus("dtype", [jnp.bfloat16, jnp.float16], ids=lambda dtype: dtype.__name__)
@each_on_gpus("sizes", SIZES.values(), ids=SIZES)
def test_ragged_dot(implementation, dtype, sizes):
    operands, true, near = ragged_operands(sizes, dtype), functools.partial(true_ragged, sizes), functools.partial(exact, dtype=dtype)
    given = (np.array(sizes, np.int32),)
    check_gradients(ragged_dot(implementation), true, operands, near, given=given, refusals=UNAVAILABLE, repeated=True)


@BY_XLA_AND_TRITON
@each_on_gpus("sizes", SIZES.values(), ids=SIZES)
def test_ragged_linear(implementation, sizes):
    """A rectifier, a bias for each group and a scale for each row keep small integers exact; "nobody's" bias and scale are not read."""
    x, w, _ = ragged_operands(sizes)
    bias, scale = random((len(sizes), N), np.float64, 3, True), random((ROWS,), np.float64, 4, True)
    group = np.searchsorted(np.cumsum(sizes), np.arange(ROWS), side="right")
    present = group < len(sizes)
    sums = np.asarray(true_ragged(sizes, exactly(x), exactly(w))) + bias[np.minimum(group, len(sizes) - 1)]
    more = np.array(sizes, np.int32), jnp.asarray(bias, jnp.float32), jnp.asarray(np.where(present, scale, np.nan), jnp.float32)

    def fused(x, w, sizes, bias, scale):
        given: dict[str, Any] = dict(activation="relu", row_scale=scale, preferred_element_type=jnp.float32)
        return jaxext.ragged_linear(x, w, sizes, bias, **given, implementation=implementation)

    exact(computed(fused, (x, w, *more)), np.where(present[:, None], np.maximum(sums, 0) * scale[:, None], 0), jnp.float32)


@BY_EACH
def test_ragged_sizes_that_change(implementation):
    """One program for all sizes, also as a step of a scan."""
    operands = [jnp.nan_to_num(of) for of in ragged_operands(SIZES["none"])]
    program, reference = with_gradients(ragged_dot(implementation)), jax.jit(with_gradients(ragged_dot("xla")))
    sizes = np.array([*SIZES.values()], np.int32)
    got = computed(lambda *operands: jax.lax.map(lambda each: program((each,), *operands), sizes), operands, UNAVAILABLE)
    for i, each in enumerate(sizes):
        for one, want in zip(got, reference((each,), *operands), strict=True):
            exact(one[i], exactly(want))


@BY_XLA_AND_TRITON
def test_moe(implementation):
    """Some choices are of nobody, and some experts of no row."""
    x, gate, up, down, weights, ct = draw((96, 64), (8, 64, 128), (8, 64, 128), (8, 128, 64), (96, 2), (96, 64))
    indices = np.random.default_rng(0).integers(-1, 6, (96, 2)).astype(np.int32)

    def layer(indices, x, gate, up, down, weights):
        return jaxext.moe(x, indices, weights, gate, up, down, implementation=implementation)

    def true(x, gate, up, down, weights):
        gated, wide = (jnp.einsum("rk,ekn->ren", x, matrices) for matrices in (gate, up))
        of_each = jnp.einsum("ren,end->red", jax.nn.silu(gated) * wide, down)
        chosen = jnp.where(indices >= 0, weights, 0)
        return jnp.einsum("rkd,rk->rd", jnp.take_along_axis(of_each, np.maximum(indices, 0)[..., None], 1), chosen)

    check_gradients(layer, true, (x, gate, up, down, weights, ct), within(0.02), given=(indices,), refusals=UNAVAILABLE, repeated=True)


EXPERTS = {
    "int8": (PAIRS[1], None, (1, N), False),
    "int4 in blocks": (("bfloat16", "int4"), None, (4, N), False),
    "fp8 in squares": (PAIRS[0], (M, 4), (4, 3), False),
    "fp8 in squares, turned": (PAIRS[0], (M, 4), (4, 3), True),
    "fp8 cotangents, turned": (EIGHT_BITS[1], (M, 1), (1, 3 * 128), True),
}


@BY_EACH
@each_on_gpus("kind", EXPERTS)
def test_ragged_scaled_dot(implementation, kind):
    """Groups of which some are empty, and rows of nobody, which are NaN with their scales; the gradients of the scales."""
    dtypes, of_rows, of_matrices, turned = EXPERTS[kind]
    sizes, columns = np.array([70, 0, 3, 57], np.int32), N if of_matrices[1] == N else 3 * 128
    x, w = (jnp.asarray(random(of, np.float32, n) * 4).astype(dtypes[n]) for n, of in enumerate([(M, K), (4, K, columns)]))
    rng, nobody = np.random.default_rng(2), np.arange(M) >= sizes.sum()
    scales = [jnp.asarray(rng.uniform(0.5, 2, of), jnp.float32) for of in (of_rows, (4, *of_matrices)) if of is not None]
    ct, numbers, matrix = jnp.asarray(random((M, columns), np.float32, 3)), exactly(x), exactly(w.astype(jnp.float32))
    x = x.at[np.flatnonzero(nobody)].set(jnp.nan)

    def product(x, w, *scales):
        *rows, matrices = scales
        if rows:
            rows = [jnp.where(nobody[:, None], jnp.nan, rows[0])]
        w, matrices = (jnp.swapaxes(of, 1, 2) if turned else of for of in (w, matrices))
        named: dict[str, Any] = dict(lhs_scale=rows[0]) if rows else {}
        static: dict[str, Any] = dict(transpose_rhs=turned, preferred_element_type=jnp.float32, implementation=implementation)
        return jaxext.ragged_scaled_dot(x, w, sizes, rhs_scale=matrices, **named, **static)

    def true(*scales):
        *rows, matrices = scales
        wide = matrix * spread(matrices, w.shape)
        left = numbers * (spread(rows[0], x.shape) if rows else 1)
        return jnp.where(nobody[:, None], 0, jnp.concatenate([left[:70] @ wide[0], left[70:73] @ wide[2], left[73:] @ wide[3]]))

    others = f"{UNAVAILABLE}|{ARCH}|want nt|want fp8e4nv or fp8e5|want one dtype"
    if implementation == "cuda":  # whose kernels are of one role
        within(2 * UNIT)(computed(product, (x, w, *scales), others), np.asarray(true(*map(exactly, scales))))
    else:
        near = within(2 * UNIT), *(within(4 * UNIT) for _ in scales)
        check_gradients(product, true, (*scales, ct), *near, given=(x, w), refusals=others)


@BY_EACH
def test_layers_in_place(implementation):
    """Slices of stacked weights, and of their gradients, have the same bits wherever they lie."""
    x, weights, ct = draw((64, 128), (5, 128, 128), (64, 128))

    def layers(x, weights):
        by = functools.partial(jaxext.matmul, implementation=implementation)
        return jax.lax.scan(lambda x, w: (jnp.tanh(by(x, w)), None), x, weights)[0]

    want = computed(with_gradients(layers), ((), x, weights, ct), UNAVAILABLE)
    for one, other in zip(want, computed(with_gradients(jaxext.slices_in_place()(layers)), ((), x, weights, ct)), strict=True):
        np.testing.assert_array_equal(one, other)


@BY_EACH
def test_ragged_dot_mapped_over_everything(implementation):
    """Each role is one launch: rows of other groups, and matrices of others."""
    sizes = SIZES["edges beside tiles"], SIZES["nobody's rows"]
    operands = [jnp.stack(each) for each in zip(*map(ragged_operands, sizes), strict=True)]
    got = computed(jax.vmap(with_gradients(ragged_dot(implementation))), ((np.array(sizes, np.int32),), *operands), UNAVAILABLE)
    for i, each in enumerate(sizes):
        want = jax.jit(with_gradients(functools.partial(true_ragged, each)))((), *(exactly(of[i]) for of in operands))
        for one, other in zip(got, want, strict=True):
            exact(one[i], np.asarray(other))


# Operations with an epilogue.  The kernels themselves, with every epilogue, run in Triton's interpreter (tests/kernels/test_epilogues.py)
# and in that of PTX (tests/ptx)


def convolution(x, w, bias=None, **how):
    """Call `conv_bias_act` without strides: no CUDA kernel computes the input gradient of a strided convolution."""
    return jaxext.conv_bias_act(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), bias=bias, **how)


# name -> the operation, and the shapes of its operands, bias and residual last
OPERATIONS: dict[str, Any] = {
    "linear": (jaxext.linear, ((3, 200, 136), (136, 264), (264,), (3, 200, 264))),
    "large": (jaxext.linear, ((1024, 512), (512, 2048), (2048,), (1024, 2048))),
    "conv": (functools.partial(convolution, feature_group_count=2), ((2, 29, 28, 64), (3, 3, 32, 96), (96,), (2, 29, 28, 96))),
    "depthwise": (functools.partial(convolution, feature_group_count=40), ((2, 13, 12, 40), (5, 5, 1, 40), (40,), (2, 13, 12, 40))),
}
WITH_EPILOGUES = [NAMES["triton"], pytest.param("cuda", marks=pytest.mark.skipif(bool(cuda_binding.missing()), reason="no CUDA kernels"))]


def fused(name, activation):
    """Return a function of an operation's operands with this activation."""
    return lambda x, w, bias, residual=None, *, implementation: OPERATIONS[name][0](
        x, w, bias, activation=activation, residual=residual, implementation=implementation
    )


def check_fused(function, implementation, operands, shape):
    by, true = (functools.partial(function, implementation=name) for name in (implementation, "xla"))
    check_gradients(by, true, (*operands, jnp.ones(shape, jnp.bfloat16)), within(1e-2, 2e-2))


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", WITH_EPILOGUES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_epilogues(name, implementation):
    *shapes, result = OPERATIONS[name][1]
    operands = draw(*shapes, result)
    check_fused(fused(name, "relu"), implementation, operands, result)
    check_fused(fused(name, "relu"), implementation, operands[:3], result)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", WITH_EPILOGUES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation, implementation):
    function, operands = fused("linear", activation), draw(*OPERATIONS["linear"][1])
    y = computed(functools.partial(function, implementation=implementation), operands)
    within(1e-2, 1e-2)(y, np.asarray(function(*map(exactly, operands), implementation="xla")))


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated(activation):
    unit = functools.partial(jaxext.gated_linear_unit, activation=activation)
    check_fused(unit, "triton", draw((300, 136), (136, 2, 264)), (300, 264))
