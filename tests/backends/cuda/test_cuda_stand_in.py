"""The implementation `cuda` on a stand-in for the compiled module: where its kernels run, and with which arrays they are called.

Tests that need the module itself are in test_cuda_binding.py.
"""

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from lowered import operations, struct

import jaxext
from jaxext.backends.cuda import cuda_binding, cuda_causal
from jaxext.tables import record

KERNEL = {"tile_m": 128, "tile_n": 128, "tile_k": 64, "cluster_m": 2, "pingpong": 0, "most_splits": 32}
ROWS = [{"role": role, "operands": "bfloat16", "result": "bfloat16", "fused": False, **KERNEL} for role in ("nn", "nt", "tn")]
ROWS.append({**ROWS[0], "fused": True})
PIECES = [{"operands": "float32", "pieces": pieces, "tile_m": 128, "tile_n": 128, "most_splits": 32} for pieces in (2, 3)]
SCALED = [{**KERNEL, "operands": "float8_e4m3fn", "second": "float8_e4m3fn", "tile_n": 256, "tile_k": 128}]
SCALED.append({**SCALED[0], "tile_m": 64, "tile_n": 128, "cluster_m": 1})
SCALED += [{**row, "operands": "float8_e5m2"} for row in SCALED] + [{**row, "second": "float8_e5m2"} for row in SCALED]

GRAMS = [{**KERNEL, "operands": "bfloat16", "tile_m": m, "tile_n": n} for m, n in ((128, 256), (192, 192))]

CONVS = [
    {"rank": 2, "role": role, "operands": "bfloat16", "tile_m": 128, "tile_n": 128, "cluster": 2, "most_parts": 64}
    for role in ("fprop", "dgrad", "wgrad")
]


@pytest.fixture(autouse=True)
def module(monkeypatch):
    tables = {"matmul": ROWS, "ragged": [row | {"cluster_n": 2} for row in ROWS[:3]], "pieces": PIECES, "scaled": SCALED}
    tables |= {"gram": GRAMS, "conv": CONVS}
    takes = {"scaled": {"fp8e4nv", "fp8e5"}, "gram": {"bf16"}}

    def refuses(target, *, dtypes, **asked):
        return None if target not in takes or {*dtypes[:2]} <= takes[target] else "says the stand-in"

    module = types.SimpleNamespace(archs="80-real,90", cuda_version="12.9", kernels=tables.__getitem__, refuses=refuses)
    monkeypatch.setattr(jaxext, "_cuda_module", module, raising=False)
    for name in ("missing", "register"):
        monkeypatch.setattr(cuda_binding, name, lambda: None)
    cuda_binding.compiled.cache_clear()
    yield module
    cuda_binding.compiled.cache_clear()


@pytest.mark.parametrize(
    ("archs", "arch", "runs"),
    [
        *(("80-real,90", arch, True) for arch in (80, 86, 90, 100, 120)),
        *(("90-real", arch, runs) for arch, runs in ((89, False), (90, True), (100, False))),
        *(("89-virtual", arch, runs) for arch, runs in ((86, False), (89, True), (90, True))),
    ],
)
def test_portable_kernels_run_where_they_were_compiled_for(module, archs, arch, runs):
    """And code on newer GPUs of its generation, PTX on all newer ones."""
    module.archs = archs
    want = None if runs else f"compiled for {archs}, compute capability is {arch / 10}"
    assert cuda_binding.not_compiled_for(arch) == want


def matmul(a, b):
    return jaxext.matmul(a, b, implementation="cuda")


def conv(x, w):
    groups = x.shape[-1] // w.shape[-2]
    axes = "DHW"[5 - x.ndim :]
    numbers = (f"N{axes}C", f"{axes}IO", f"N{axes}C")
    return jaxext.conv_general_dilated(x, w, (1,) * len(axes), "VALID", None, None, numbers, groups, implementation="cuda")


def in_pieces(a, b):
    return jaxext.matmul(a, b, precision=jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X6, implementation="cuda")


FLOATS = struct(128, 256, dtype=jnp.float32), struct(256, 512, dtype=jnp.float32)
CALLS = {  # the function, its operands, and of each call the operands and the result
    "matmul": (matmul, (struct(128, 256), struct(256, 512)), {"nn": "abc", "nt": "bca", "tn": "acb"}),
    "pieces": (in_pieces, FLOATS, {"nn": "abc", "nt": "bca", "tn": "acb"}),
    "conv2d": (conv, (struct(2, 8, 9, 16), struct(3, 2, 16, 24)), {"fprop": "xwy", "dgrad": "wyx", "wgrad": "xyw"}),
    "depthwise2d": (conv, (struct(2, 8, 9, 16), struct(3, 2, 1, 16)), {"fprop": "xwy", "dgrad": "wyx", "wgrad": "xyw"}),
    "depthwise3d": (conv, (struct(2, 4, 8, 9, 16), struct(2, 3, 2, 1, 32)), {"fprop": "xwy", "dgrad": "wyx", "wgrad": "xyw"}),
}
SHAPES = {
    "matmul": {"a": (1, 128, 256), "b": (1, 256, 512), "c": (1, 128, 512)},
    "pieces": {"a": (1, 128, 256), "b": (1, 256, 512), "c": (1, 128, 512)},
    "conv2d": {"x": (1, 2, 1, 8, 9, 1, 16), "w": (1, 1, 24, 1, 3, 2, 16), "y": (1, 2, 1, 6, 8, 1, 24)},
    "depthwise3d": {"x": (1, 2, 4, 8, 9, 16, 1), "w": (1, 16, 2, 2, 3, 2, 1), "y": (1, 2, 3, 6, 8, 16, 2)},
    "depthwise2d": {"x": (1, 2, 1, 8, 9, 16, 1), "w": (1, 16, 1, 1, 3, 2, 1), "y": (1, 2, 1, 6, 8, 16, 1)},
}


@pytest.mark.parametrize("form", CALLS)
def test_kernels_are_called_with_arrays_of_their_problem(form):
    function, operands, roles = CALLS[form]
    with jaxext.use_target("sm_90a"), jaxext.use_table(None):
        both = jax.jit(jax.value_and_grad(lambda *args: jnp.sum(function(*args).astype(jnp.float32) ** 2), (0, 1)))
        lowered = both.trace(*operands).lower(lowering_platforms=("cuda",))
    axes = len(next(iter(SHAPES[form].values())))  # of results in parts, the last ones
    found = {target: [shape[-axes:] for shape in shapes] for target, shapes in calls(lowered).items()}
    assert found == {f"jaxext_{form}_{role}_v1": [SHAPES[form][slot] for slot in slots] for role, slots in roles.items()}


def calls(lowered):
    """The shapes of operands and results of each call of ours."""
    return {
        target.strip('"'): [tuple(value.type.shape) for value in (*op.operands, *op.results)]
        for op in operations(lowered)
        if op.name == "stablehlo.custom_call" and "jaxext" in (target := str(op.attributes["call_target_name"]))
    }


def test_ragged_kernels_are_called_with_places():
    """In nn and nt visits, in tn the ranges of the groups."""

    def gradients(x, w, sizes):
        product = lambda x, w: jaxext.ragged_dot(x, w, sizes, implementation="cuda")
        return jax.value_and_grad(lambda *args: jnp.sum(product(*args).astype(jnp.float32) ** 2), (0, 1))(x, w)

    operands = struct(300, 256), struct(6, 256, 512), struct(6, dtype=jnp.int32)
    with jaxext.use_target("sm_90a"), jaxext.use_table(None):
        lowered = jax.jit(gradients).trace(*operands).lower(lowering_platforms=("cuda",))
    x, w, y, visits = (1, 1, 1, 300, 256), (1, 6, 256, 512), (1, 1, 1, 300, 512), (1, 1, 3 + 6 - 1, 5)
    assert calls(lowered) == {
        "jaxext_ragged_nn_v1": [x, w, visits, y],
        "jaxext_ragged_nt_v1": [w, y, visits, x],
        "jaxext_ragged_tn_v1": [x, y, (1, 1, 6, 2), w],
    }


def test_ragged_products_are_expected_to_gain():
    product = lambda x, w, sizes: jaxext.ragged_dot(x, w, sizes)
    operands = struct(300, 256), struct(6, 256, 512), struct(6, dtype=jnp.int32)
    with jaxext.use_target("sm_90a"), jaxext.use_table(None):
        (row,) = jaxext.explain(product, *operands, platform="cuda").rows
    assert row.chosen == "triton" and row.refused["cuda"] == "'triton' is preferred"


@pytest.mark.parametrize(
    ("verified", "chosen", "refusals"),
    [
        (["triton", "cuda"], "triton", {"cuda": "'triton' is preferred", "xla": "'triton' is preferred"}),
        (["cuda"], "cuda", {"triton": "not verified", "xla": "'cuda' is preferred"}),
        ([], "xla", {"triton": "not verified", "cuda": "not verified"}),
    ],
    ids=["both", "cuda alone", "neither"],
)
def test_cuda_is_second_choice_for_causal_convolutions(verified, chosen, refusals, monkeypatch):
    monkeypatch.setattr(record, "unverified", lambda name, *_: None if name in verified else "not verified")
    with jaxext.use_target("sm_90a"), jaxext.use_table(None):
        (row,) = jaxext.explain(jaxext.causal_conv1d, struct(4, 2048, 1024), struct(4, 1024), struct(1024), platform="cuda").rows
    assert (row.chosen, row.refused) == (chosen, refusals)


def scaled(turned, implementation=None):
    """Factors in eight bits, with a scale for 128 of each row and for squares of the weight."""
    float32, e4m3 = jnp.float32, jnp.float8_e4m3fn
    w, t = ((512, 384), (4, 3)) if not turned else ((384, 512), (3, 4))
    operands = struct(256, 512, dtype=e4m3), struct(*w, dtype=e4m3), struct(256, 4, dtype=float32), struct(*t, dtype=float32)
    static = dict(dimension_numbers=(((1,), (1 if turned else 0,)), ((), ())), implementation=implementation)
    return lambda x, w, s, t: jaxext.scaled_dot(x, w, lhs_scale=s, rhs_scale=t, **static), operands


@pytest.mark.parametrize("turned", [False, True])
def test_scaled_kernels_are_called_with_factors_whose_last_axis_is_contracted(turned):
    """Which XLA transposes, if they lie otherwise, and their scales with them."""
    function, operands = scaled(turned, "cuda")
    with jaxext.use_target("sm_90a"), jaxext.use_table(None):
        lowered = jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",))
    assert calls(lowered) == {"jaxext_scaled_v1": [(1, 256, 512), (1, 384, 512), (1, 256, 4), (1, 3, 4), (1, 256, 384)]}
    assert ("stablehlo.transpose" in lowered.as_text()) == (not turned)


def test_products_of_eight_bits_are_computed_so():
    """Of `fp8_matmul`, and of a cotangent in float8_e5m2 with either factor.  A wide cotangent, as for `scaled_dot`, is for others."""
    x, g = struct(2048, 2048, dtype=jnp.float8_e4m3fn), struct(2048, 2048, dtype=jnp.float8_e5m2)
    scaled_dot = lambda x, y: jaxext.scaled_dot(x, y, lhs_scale=jnp.ones((1, 1)), rhs_scale=jnp.ones((1, 1)))
    with jaxext.use_target("sm_90a"), jaxext.use_table(None):
        chosen = lambda f, *operands: jaxext.explain(f, *operands, platform="cuda").rows[0].chosen
        assert chosen(jaxext.fp8_matmul, struct(2048, 2048), struct(2048, 2048)) == "cuda"
        assert [chosen(scaled_dot, *operands) for operands in ((x, x), (g, x), (x, g))] == ["cuda"] * 3
        assert chosen(scaled_dot, struct(2048, 2048), x) != "cuda"


@pytest.mark.parametrize("layers", [(), (3,)], ids=str)
def test_gram_is_called_with_x_alone(layers):
    """And Muon's iteration by gram twice, once with what is added, and by a product with a residual."""
    x, square = (*(layers or (1,)), 512, 2048), (*(layers or (1,)), 512, 512)
    with jaxext.use_target("sm_90a"), jaxext.use_table(None):
        lower = lambda f: jax.jit(f).trace(struct(*layers, 512, 2048)).lower(lowering_platforms=("cuda",))
        gram = lower(lambda x: jaxext.gram(x, implementation="cuda"))
        muon = lower(lambda x: jaxext.newton_schulz(x, 1, implementation="cuda"))
    assert calls(gram) == {"jaxext_gram_v1": [x, square if layers else (4, *square)]}, (
        "one matrix has parts, so that all multiprocessors work"
    )
    called = [op for op in operations(muon) if op.name == "stablehlo.custom_call" and "gram" in str(op.attributes["call_target_name"])]
    configs = [op.attributes["mhlo.backend_config"] for op in called]
    assert [(of["scale"].value, of["of_addend"].value) for of in configs] == [(1, 0), (2.0315, -4.775)]
    assert calls(muon) == {"jaxext_gram_v1": [square] * 3, "jaxext_linear_v1": [square, x, x, x]}


@pytest.mark.parametrize("rows, chosen", [(8, "xla"), (1024, "xla"), (4096, "cuda"), (8192, "cuda")])
def test_gram_is_preferred_where_half_of_the_tiles_are_expected_to_take_less_time(rows, chosen):
    with jaxext.use_target("sm_90a"), jaxext.use_table(None):
        (row,) = jaxext.explain(jaxext.gram, struct(rows, rows), platform="cuda").rows
        (wide,) = jaxext.explain(jaxext.gram, struct(rows, rows, dtype=jnp.float32), platform="cuda").rows
    assert row.chosen == chosen
    assert wide.chosen != "cuda"


@pytest.mark.parametrize("turned", [False, True])
def test_a_scaled_product_too_small_to_transpose_is_left_to_others(turned):
    function, operands = scaled(turned)
    with jaxext.use_target("sm_90a"), jaxext.use_table(None):
        (row,) = jaxext.explain(function, *operands, platform="cuda").rows
    if turned:
        assert row.chosen == "cuda"
    else:
        assert row.chosen != "cuda" and row.refused["cuda"] == "XLA's products of 16-bit numbers are expected to be as fast"


def conv_bias_act(x, w, *added, **how):
    groups = x.shape[-1] // w.shape[-2]
    axes = "DHW"[5 - x.ndim :]
    static = dict(dimension_numbers=(f"N{axes}C", f"{axes}IO", f"N{axes}C"), feature_group_count=groups, implementation="cuda")
    bias, residual = added or (None, None)
    return jaxext.conv_bias_act(x, w, bias, (1,) * len(axes), "VALID", residual=residual, **static, **how)


def linear(x, w, *added, **how):
    return jaxext.linear(x, w, *added[:1], residual=added[1] if added else None, implementation="cuda", **how)


FUSED = {  # the function, its operands, bias and residual
    "linear": (linear, *CALLS["matmul"][1], struct(512), struct(128, 512)),
    "conv2d_bias_act": (conv_bias_act, *CALLS["conv2d"][1], struct(24), struct(2, 6, 8, 24)),
    "depthwise3d_bias_act": (conv_bias_act, *CALLS["depthwise3d"][1], struct(32), struct(2, 3, 6, 8, 32)),
    "depthwise2d_bias_act": (conv_bias_act, *CALLS["depthwise2d"][1], struct(16), struct(2, 6, 8, 16)),
}


@pytest.mark.parametrize("saves", [False, True], ids=["", "saves"])
@pytest.mark.parametrize("name", FUSED)
def test_epilogues_are_called_with_their_arrays(name, saves):
    """Bias, residual, and what the backward pass needs of the sum."""
    function, *operands = FUSED[name]
    run = lambda *args: function(*args, activation="silu")
    wanted = jax.jit((lambda *args: jax.vjp(run, *args)[0]) if not saves else lambda *args: jax.vjp(run, *args))
    with jaxext.use_target("sm_90a"), jaxext.use_table(None):
        lowered = wanted.trace(*operands).lower(lowering_platforms=("cuda",))
    found = calls(lowered)
    x, w, y = SHAPES["matmul" if name == "linear" else name.removesuffix("_bias_act")].values()
    bias = (1, *y[2:]) if name == "linear" else (1, *y[-2:])
    assert found == {f"jaxext_{name}_v1": [x, w, bias, y, y, *([y] if saves else [])]}
    for attribute, value in dict(activation=5, bias=1, residual=1, saves=int(saves)).items():
        assert f"{attribute} = {value} : i64" in lowered.as_text()


CAUSAL = {"plain": (), "state": ("initial_states",), "packed": ("seq_idx",)}


@pytest.mark.parametrize("kind", CAUSAL)
def test_causal_convolutions_are_one_kernel_each_way(kind):
    """With their operands and, backward, the partial sums of weight and bias; a state is rounded to the dtype of x."""
    given = {"initial_states": struct(2, 3, 16, dtype=jnp.float32), "seq_idx": struct(2, 4000, dtype=jnp.int32)}
    more = [given[name] for name in CAUSAL[kind]]

    def gradients(x, w, b, *more):
        run = lambda *args: jaxext.causal_conv1d(*args, **dict(zip(CAUSAL[kind], more, strict=True)), activation="silu")
        return jax.value_and_grad(lambda *args: jnp.sum(run(*args).astype(jnp.float32) ** 2), (0, 1, 2))(x, w, b)

    operands = struct(2, 4000, 16), struct(4, 16), struct(16)
    with jaxext.use_target("sm_90a"), jaxext.use_implementation("cuda"):
        rows = jaxext.explain(gradients, *operands, *more, platform="cuda").rows
        lowered = jax.jit(gradients).trace(*operands, *more).lower(lowering_platforms=("cuda",))
    assert [(row.op, row.chosen) for row in rows] == [("causal_conv1d", "cuda"), ("causal_conv1d_backward", "cuda")]
    x, w, b = ((2, 4000, 16), (4, 16), (16,))
    added = {"plain": [], "state": [(2, 3, 16)], "packed": [(2, 4000)]}[kind]
    found = calls(lowered)
    (parts,) = {shape[0] for shape in found["jaxext_causal_conv1d_backward_v1"] if shape[1:] == (5, 16)}
    d_state = added if kind == "state" else []
    assert found == {
        "jaxext_causal_conv1d_v1": [x, w, b, *added, x],
        "jaxext_causal_conv1d_backward_v1": [x, w, b, *added, x, x, (parts, 5, 16), *d_state],
    }
    assert parts > 1 and f"splits = {parts} : i64" in lowered.as_text()


@pytest.mark.parametrize("given", [("bias",), ("initial_states",), ("bias", "initial_states"), ()], ids=str)
def test_partial_sums_of_a_causal_convolution_become_cotangents(monkeypatch, given):
    """The last row of each is the bias's; each cotangent has the dtype of its operand."""
    rng = np.random.default_rng(0)
    made = {}

    def ffi_call(target, results):
        made["arrays"] = [rng.integers(-3, 4, of.shape).astype(of.dtype) for of in results]
        return lambda *operands, **attributes: [jnp.asarray(of) for of in made["arrays"]]

    monkeypatch.setattr(jax.ffi, "ffi_call", ffi_call)
    operands = {"x": jnp.zeros((2, 9, 5), jnp.bfloat16), "weight": jnp.zeros((4, 5), jnp.float32)}
    added = {"bias": jnp.zeros(5, jnp.float16), "initial_states": jnp.zeros((2, 3, 5), jnp.float32)}
    operands |= {name: of for name, of in added.items() if name in given}
    call: Any = types.SimpleNamespace(results={f"d_{name}": of.dtype for name, of in operands.items()}, further=True)
    attributes = dict(B=2, T=9, C=5, J=4, splits=3, bias=int("bias" in given), initial_states=int("initial_states" in given))
    got = cuda_causal._causal_backward(call, attributes, None, *operands.values(), operands["x"])
    d_x, sums, *d_state = made["arrays"]
    assert sums.shape == (3, 4 + ("bias" in given), 5) and sums.dtype == np.float32
    want = {"d_x": d_x, "d_weight": sums.sum(0)[:4], "d_bias": sums.sum(0)[-1]} | ({"d_initial_states": d_state[0]} if d_state else {})
    for (name, dtype), of in zip(call.results.items(), got, strict=True):
        assert of.dtype == dtype
        np.testing.assert_array_equal(np.asarray(of, np.float32), want[name].astype(np.float32))


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        (dict(bias=struct(512, dtype=jnp.int8)), "bias is i8, want fp32, bf16 or fp16"),
        (dict(residual=struct(128, 512, dtype=jnp.float16)), "residual is fp16, want bf16, as the result"),
    ],
)
def test_epilogues_that_no_kernel_fuses(arrays, said):
    x, w = CALLS["matmul"][1]
    function = lambda x, w, *more: jaxext.linear(x, w, **dict(zip(arrays, more, strict=True)))
    with jaxext.use_target("sm_90a"), jaxext.use_table(None):
        (row,) = jaxext.explain(function, x, w, *arrays.values(), platform="cuda").rows
    assert row.refused["cuda"].startswith(said)


def test_no_cuda_kernel_has_a_gate():
    with jaxext.use_target("sm_90a"), jaxext.use_table(None):
        (row,) = jaxext.explain(jaxext.gated_linear_unit, struct(128, 256), struct(256, 2, 512), platform="cuda").rows
    assert row.refused["cuda"] == "a gated epilogue, want one without a gate"


ASKED = {  # of each form's first role, what the module is asked
    "matmul": dict(target="matmul_nn", B=1, M=128, N=512, K=256),
    "pieces": dict(target="pieces_nn", B=1, M=128, N=512, K=256),
    "conv2d": dict(target="conv2d_fprop", B=1, N=2, G=1, C=16, K=24, input=(1, 8, 9), filter=(1, 3, 2), output=(1, 6, 8)),
    "depthwise3d": dict(target="depthwise3d_fprop", B=1, N=2, G=16, C=1, K=2, input=(4, 8, 9), filter=(2, 3, 2), output=(3, 6, 8)),
    "depthwise2d": dict(target="depthwise2d_fprop", B=1, N=2, G=16, C=1, K=1, input=(1, 8, 9), filter=(1, 3, 2), output=(1, 6, 8)),
}
CAUSAL_ASKED = dict(target="causal_conv1d", B=2, T=40, C=16, J=4, dtypes=["bf16", "fp32", "bf16", "bf16"], arch=90)
WINDOW = dict(stride=(1, 1, 1), low=(0, 0, 0), input_dilation=(1, 1, 1), filter_dilation=(1, 1, 1))


def test_what_the_module_refuses_of_scaled_products(module, monkeypatch):
    """It is asked of the kernel's axes."""
    asked = {}
    monkeypatch.setattr(module, "refuses", lambda target, **fields: asked.update(fields, target=target) or "says the test")
    function, operands = scaled(turned=False)
    with jaxext.use_target("sm_90a"), jaxext.use_table(None):
        (row,) = jaxext.explain(function, *operands, platform="cuda").rows
    assert row.refused["cuda"] == "says the test"
    assert asked == dict(target="scaled", B=1, M=256, N=384, K=512, I=256, J=3, S=4, dtypes=["fp8e4nv", "fp8e4nv", "bf16"], arch=90)


@pytest.mark.parametrize("form", CALLS)
def test_what_the_module_refuses_is_refused(module, monkeypatch, form):
    """With its reason; it is asked of the family whose kernels would be called, in full."""
    function, operands, _ = CALLS[form]
    asked = {}
    monkeypatch.setattr(module, "refuses", lambda target, **fields: asked.update(fields, target=target) or "says the test")
    with jaxext.use_target("sm_90a"), jaxext.use_table(None):
        (row,) = jaxext.explain(function, *operands, platform="cuda").rows
    assert row.refused["cuda"] == "says the test"
    window = {} if form in ("matmul", "pieces") else WINDOW
    assert asked == ASKED[form] | window | {"dtypes": ["fp32" if form == "pieces" else "bf16"] * 3, "arch": 90}


def test_what_the_module_refuses_of_causal_convolutions(module, monkeypatch):
    """With its reason; it is asked in full."""
    asked = {}
    monkeypatch.setattr(module, "refuses", lambda target, **fields: asked.update(fields, target=target) or "says the test")
    operands = struct(2, 40, 16), struct(4, 16, dtype=jnp.float32), struct(16)
    with jaxext.use_target("sm_90a"), jaxext.use_table(None), jax.numpy_dtype_promotion("standard"):
        (row,) = jaxext.explain(jaxext.causal_conv1d, *operands, platform="cuda").rows
    assert row.refused["cuda"] == "says the test" and asked == CAUSAL_ASKED


def test_causal_convolutions_run_where_they_were_compiled_for(module):
    module.archs = "90-real"
    with jaxext.use_target("sm_80"), jaxext.use_table(None):
        (row,) = jaxext.explain(jaxext.causal_conv1d, struct(2, 40, 16), struct(4, 16), platform="cuda").rows
    assert row.refused["cuda"] == "compiled for 90-real, compute capability is 8.0"


# Products with quantised weights.


def quantized(bits, group, K=512, N=256):
    arrays: Any = struct(K, N, dtype=jnp.int4 if bits == 4 else jnp.int8), struct(K // group if group else 1, N, dtype=jnp.float32)
    return jaxext.Quantized(*arrays)


def product_row(rows=3, bits=4, group: int | None = 128, function=jaxext.quantized_matmul, arch="sm_90a", **sizes):
    q = quantized(bits, group, **sizes)
    with jaxext.use_target(arch), jaxext.use_table(None):
        return jaxext.explain(function, struct(rows, q.shape[0]), q, platform="cuda").rows[0]


def test_products_of_few_rows_with_blocks_of_scales_are_a_kernel():
    """One with a scale for each column XLA multiplies as fast, it is thought."""
    for bits in (4, 8):
        assert [product_row(rows, bits).chosen for rows in (1, 16, 32)] == ["cuda"] * 3
        assert product_row(33, bits, arch="sm_80").refused["cuda"] == "Triton's kernels are expected to be as fast"
        assert "expected to be as fast" in product_row(1, bits, None).refused["cuda"]
    assert product_row(arch="sm_80").chosen == "cuda"


def test_products_of_more_rows_with_blocks_of_scales_are_a_kernel_of_hopper():
    """Where it takes clearly less time than to write a wide weight and to multiply that."""
    of = lambda rows, bits=8, **given: product_row(rows, bits, K=4096, N=4096, **given)
    assert [of(rows, bits).chosen for bits in (4, 8) for rows in (33, 64, 128, 512)] == ["cuda"] * 8
    assert of(4096).refused["cuda"] == "XLA's product with a weight that it makes wide before is expected to be as fast"
    assert "expected to be as fast" in of(64, group=None).refused["cuda"]
    assert of(64, arch="sm_80").chosen != "cuda"


@pytest.mark.parametrize("bits", [4, 8])
def test_arrays_of_a_weight_only_product(bits):
    """The weight is as its user has it: two int4 are a byte, and nothing is moved."""
    named = lambda x, q: jaxext.quantized_matmul(x, q, implementation="cuda")
    for group, S in ((None, 1), (64, 8)):
        args = struct(2, 3, 512), quantized(bits, group)
        with jaxext.use_target("sm_90a"), jaxext.use_table(None):
            lowered = jax.jit(named).trace(*args).lower(lowering_platforms=("cuda",))
        (found,) = calls(lowered).values()
        *operands, result = found
        assert operands == [(1, 6, 512), (1, 512, 256 if bits == 8 else 128), (1, S, 256)]
        assert result[-3:] == (1, 6, 256)
        assert not {"stablehlo.transpose", "stablehlo.gather", "stablehlo.concatenate", "stablehlo.pad"} & {*operations(lowered)}


def test_mapped_weights_are_one_launch():
    mapped = jax.vmap(functools.partial(jaxext.quantized_matmul, implementation="cuda"))
    q = jax.tree.map(lambda x: struct(4, *x.shape, dtype=x.dtype), quantized(4, 128))
    with jaxext.use_target("sm_90a"), jaxext.use_table(None):
        lowered = jax.jit(mapped).trace(struct(4, 3, 512), q).lower(lowering_platforms=("cuda",))
    (found,) = calls(lowered).values()
    assert found[:3] == [(4, 3, 512), (4, 512, 128), (4, 4, 256)]


SPLITS = {  # of the weight and x -> the shapes of a device's arrays
    "columns": (P(), P(None, "data"), P(None, "data"), [(1, 3, 512), (1, 512, 32), (1, 8, 64), (1, 3, 64)]),
    "the sum": (P(None, "data"), P("data"), P("data"), [(1, 3, 64), (1, 64, 256), (1, 1, 512), (1, 3, 512)]),
    "rows": (P("data"), P(), P(), [(1, 3, 512), (1, 512, 256), (1, 8, 512), (1, 3, 512)]),
}


def split_product(name, columns, of_x, of_q, of_scale):
    """The lowered product, on a mesh of explicit axes."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    placed = lambda of, spec: jax.ShapeDtypeStruct(of.shape, of.dtype, sharding=NamedSharding(mesh, spec))
    q = quantized(4, 64, N=columns)
    args = placed(struct(24 if of_x == P("data") else 3, 512), of_x), placed(q.qvalue, of_q), placed(q.scale, of_scale)
    out = P(of_x[0] if of_x == P("data") else None, of_q[1] if len(of_q) > 1 else None)
    named: Any = dict(implementation=name, out_sharding=NamedSharding(mesh, out))
    product = lambda x, qvalue, scale: jaxext.quantized_matmul(x, jaxext.Quantized(qvalue, scale), **named)
    with jaxext.use_target("sm_90a"), jaxext.use_table(None), jax.set_mesh(mesh):
        return jax.jit(product).trace(*args).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("split", SPLITS)
def test_weights_that_devices_share(split):
    """Each has the kernel for its part of the weight, with the scales of that part."""
    *specs, want = SPLITS[split]
    (found,) = calls(split_product("cuda", 512, *specs)).values()
    *operands, result = found
    assert [*operands, result[-3:]] == want


def test_parts_of_a_weight_that_no_kernel_takes(module, monkeypatch):
    """What is asked is a device's part: of 48 columns."""
    asked = {}
    monkeypatch.setattr(module, "refuses", lambda target, **fields: asked.update(fields, target=target) or "says the test")
    assert "jaxext_weight_only" not in split_product(None, 384, *SPLITS["columns"][:3]).as_text()
    assert asked["N"] == 48


def test_what_the_module_refuses_of_weight_only_products(module, monkeypatch):
    """With its reason; it is asked in full."""
    asked = {}
    monkeypatch.setattr(module, "refuses", lambda target, **fields: asked.update(fields, target=target) or "says the test")
    assert product_row(rows=5).refused["cuda"] == "says the test"
    assert asked == dict(target="weight_only", B=1, M=5, N=256, K=512, S=4, bits=4, dtypes=["bf16", "i8", "bf16"], arch=90)


def test_gradients_are_left_to_others_and_named_refused():
    def gradient(x, q, name=None):
        return jax.grad(lambda x: jaxext.quantized_matmul(x, q, implementation=name).astype(jnp.float32).sum())(x)

    args = struct(3, 512), quantized(4, 128)
    with jaxext.use_target("sm_90a"), jaxext.use_table(None):
        row = next(row for row in jaxext.explain(gradient, *args, platform="cuda").rows if row.op.endswith("_nt"))
        named = jax.jit(functools.partial(gradient, name="cuda")).trace(*args)
        with pytest.raises(NotImplementedError, match="the product nt, a derivative, want the product itself"):
            named.lower(lowering_platforms=("cuda",))
    assert row.chosen != "cuda" and row.refused["cuda"] == "the product nt, a derivative, want the product itself"


def test_other_scales_are_refused():
    scaled = lambda x, w, s, t: jaxext.scaled_dot(x, w, lhs_scale=s, rhs_scale=t)
    x, w = struct(3, 512), struct(512, 256, dtype=jnp.int8)
    scales = {
        "scales of x and w, want scales of w alone": ((3, 1), (1, 256)),
        "1 scales along N of 256, want one for each column": (None, (4, 1)),
        "2 scales along N of 256, want one for each column": (None, (4, 2)),
    }
    for reason, shapes in scales.items():
        s, t = (None if shape is None else struct(*shape, dtype=jnp.float32) for shape in shapes)
        with jaxext.use_target("sm_90a"), jaxext.use_table(None):
            (row,) = jaxext.explain(lambda x, w, t, s=s: scaled(x, w, s and jnp.ones(s.shape), t), x, w, t, platform="cuda").rows
        assert row.refused["cuda"] == reason
