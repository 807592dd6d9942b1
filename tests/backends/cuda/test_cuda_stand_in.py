"""The implementation `cuda` on a stand-in for the compiled module: where its kernels run, which calls they are preferred for, what the
module is asked, and with which arrays they are called.

Tests that need the module itself are in test_cuda_binding.py.
"""

import functools
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_cases import LONG, SLOTS
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from lowered import channels_last, moved, operations, squares, struct
from test_cuda_families import FAMILIES, OWN

import jaxext
from jaxext.backends.cuda import cuda_binding
from jaxext.core.contact import Contact
from jaxext.ops.causal import cuda as cuda_causal
from jaxext.tables import record
from jaxext.verify.cases import calls_of

TABLES = {  # as the compiled module lists them
    name: [{key: LONG.get(value, value) for key, value in row.items()} for row in family.TABLE] for name, family in FAMILIES.items()
}


@pytest.fixture(autouse=True)
def module(monkeypatch):
    """The stand-in, and a program for Hopper."""
    takes = {"scaled": {"fp8e4nv", "fp8e5"}} | {name: {row["operands"] for row in family.TABLE} for name, family in OWN.items()}

    def refuses(target, *, dtypes, **asked):
        return None if target not in takes or {*dtypes[:2]} <= takes[target] else "says the stand-in"

    module = types.SimpleNamespace(archs="80-real,90", cuda_version="12.9", kernels=TABLES.__getitem__, refuses=refuses)
    monkeypatch.setattr(jaxext, "_cuda_module", module, raising=False)
    for name in ("missing", "register"):
        monkeypatch.setattr(cuda_binding, name, lambda: None)
    cuda_binding.compiled.cache_clear()
    with jaxext.use_target("sm_90a"), jaxext.use_table(None):
        yield module
    cuda_binding.compiled.cache_clear()


def lower(function, *operands):
    return jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",))


def calls(lowered) -> dict[str, list]:
    """The shapes of operands and results of each target's call, without an axis for the parts of a result, and the attributes."""
    found = {}
    for op in operations(lowered):
        if op.name == "stablehlo.custom_call" and "jaxext" in (target := str(op.attributes["call_target_name"])):
            attributes: dict[str, Any] = {each.name: getattr(each.attr, "value", None) for each in op.attributes["mhlo.backend_config"]}
            given, results = ([tuple(value.type.shape) for value in values] for values in (op.operands, op.results))
            if attributes.get("splits", 1) > 1:
                partial = int("causal" in target)  # whose first result is d_x
                assert results[partial][0] == attributes["splits"]
                results[partial] = results[partial][1:]
            name = target.removeprefix('"jaxext_').removesuffix('_v1"')
            found[f"{name} again" if name in found else name] = [*given, *results, attributes]
    return found


def explained(function, *operands, op=""):
    """The row of the only call, or of that whose name ends in `op`."""
    (row,) = [row for row in jaxext.explain(function, platform="cuda")(*operands).rows if row.op.endswith(op)]
    return row


def gradients(function, slots=(0, 1)):
    return jax.value_and_grad(squares(function), slots)


def grouped(x, w) -> tuple[Any, Any, Any]:
    axes = x.ndim - 2
    return (1,) * axes, "VALID", dict(dimension_numbers=channels_last(axes), feature_group_count=x.shape[-1] // w.shape[-2])


def conv(x, w):
    strides, padding, static = grouped(x, w)
    return jaxext.conv_general_dilated(x, w, strides, padding, **static)


def conv_bias_act(x, w, bias, residual):
    strides, padding, static = grouped(x, w)
    return jaxext.conv_bias_act(x, w, strides, padding, bias=bias, residual=residual, activation="silu", **static)


def linear(x, w, bias, residual):
    return jaxext.linear(x, w, bias, residual=residual, activation="silu")


def scaled(turned):
    """A product of factors in eight bits, with a scale for 128 of each row and for squares of the weight, and its operands."""
    (w, t), dims = (((384, 512), (3, 4)), ((1,), (1,))) if turned else (((512, 384), (4, 3)), ((1,), (0,)))
    factors, scales = [struct(*shape, dtype=jnp.float8_e4m3fn) for shape in ((256, 512), w)], [floats(256, 4), floats(*t)]
    return lambda x, w, s, t: jaxext.scaled_dot(x, w, lhs_scale=s, rhs_scale=t, dimension_numbers=(dims, ((), ()))), [*factors, *scales]


def causal(*names):
    """Return a convolution that has these operands beside x, w and bias."""
    run = lambda x, w, b, *more: jaxext.causal_conv1d(x, w, b, **dict(zip(names, more, strict=True)), activation="silu")
    return gradients(run, (0, 1, 2))


def quantized(bits, group, K=512, N=256, layers=()):
    q: Any = struct(*layers, K, N, dtype=jnp.int4 if bits == 4 else jnp.int8)
    scale: Any = floats(*layers, K // group if group else 1, N)
    return jaxext.quantization.Quantized(q, scale)


def pieces(a, b):
    return jaxext.matmul(a, b, precision=jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X6)


def ragged(x, w, sizes):
    return gradients(lambda x, w: jaxext.ragged_dot(x, w, sizes))(x, w)


floats = functools.partial(struct, dtype=jnp.float32)
SEQUENCE, STATE, SEQ_IDX = (struct(2, 4000, 16), struct(4, 16), struct(16)), floats(2, 3, 16), struct(2, 4000, dtype=jnp.int32)
GROUPS = struct(300, 256), struct(6, 256, 512), struct(6, dtype=jnp.int32)
CALLS = {  # a function and its operands
    "matmul": (jaxext.matmul, (struct(128, 256), struct(256, 512))),
    "pieces": (pieces, (floats(128, 256), floats(256, 512))),
    "conv2d": (conv, (struct(2, 8, 9, 16), struct(3, 2, 16, 24))),
    "depthwise2d": (conv, (struct(2, 8, 9, 16), struct(3, 2, 1, 16))),
    "depthwise3d": (conv, (struct(2, 4, 8, 9, 16), struct(2, 3, 2, 1, 32))),
}
SHAPES = {  # and those of the kernels' arrays
    "matmul": {"a": (1, 128, 256), "b": (1, 256, 512), "c": (1, 128, 512)},
    "pieces": {"a": (1, 128, 256), "b": (1, 256, 512), "c": (1, 128, 512)},
    "conv2d": {"x": (1, 2, 1, 8, 9, 1, 16), "w": (1, 1, 24, 1, 3, 2, 16), "y": (1, 2, 1, 6, 8, 1, 24)},
    "depthwise3d": {"x": (1, 2, 4, 8, 9, 16, 1), "w": (1, 16, 2, 2, 3, 2, 1), "y": (1, 2, 3, 6, 8, 16, 2)},
    "depthwise2d": {"x": (1, 2, 1, 8, 9, 16, 1), "w": (1, 16, 1, 1, 3, 2, 1), "y": (1, 2, 1, 6, 8, 16, 1)},
}
FUSED = {  # of what: the function, bias and residual
    "linear": ("matmul", linear, struct(512), struct(128, 512)),
    "conv2d_bias_act": ("conv2d", conv_bias_act, struct(24), struct(2, 6, 8, 24)),
    "depthwise3d_bias_act": ("depthwise3d", conv_bias_act, struct(32), struct(2, 3, 6, 8, 32)),
    "depthwise2d_bias_act": ("depthwise2d", conv_bias_act, struct(16), struct(2, 6, 8, 16)),
}


def programs() -> Iterator[Any]:
    """Functions, their operands, and of each kernel that they call the shapes of operands and results, and some attributes."""
    for form, (function, operands) in CALLS.items():
        roles = {role: slots for role, slots in SLOTS.items() if {*slots} == {*SHAPES[form]}}
        yield form, gradients(function), operands, {f"{form}_{role}": [SHAPES[form][slot] for slot in roles[role]] for role in roles}
    x, w, y, visits = (1, 1, 1, 300, 256), (1, 6, 256, 512), (1, 1, 1, 300, 512), (1, 1, 5 + 6 - 1, 5)  # of tiles of 64 rows
    yield "ragged", ragged, GROUPS, dict(ragged_nn=[x, w, visits, y], ragged_nt=[w, y, visits, x], ragged_tn=[x, y, (1, 1, 6, 2), w])
    for turned in (False, True):  # the last axis of the kernel's factors is contracted
        yield f"scaled {turned}", *scaled(turned), dict(scaled=[(1, 256, 512), (1, 384, 512), (1, 256, 4), (1, 3, 4), (1, 256, 384)])
    for family in OWN.values():
        yield from family.programs()
    for name, (form, function, *added) in FUSED.items():  # bias, residual, and what the backward pass needs of the sum
        x, w, y = SHAPES[form].values()
        want = [x, w, (1, *(y[2:] if name == "linear" else y[-2:])), y, y]
        attributes, operands = dict(activation=5, bias=1, residual=1), [*CALLS[form][1], *added]
        yield name, lambda *args, run=function: jax.vjp(run, *args)[0], operands, {name: [*want, attributes | dict(saves=0)]}
        yield f"{name} saves", functools.partial(jax.vjp, function), operands, {name: [*want, y, attributes | dict(saves=1)]}
    x, w, b = (2, 4000, 16), (4, 16), (16,)
    sums = (5, 16)  # of weight and bias, in parts
    for names, more, d_state in (((), (), []), (("initial_states",), (STATE,), [STATE.shape]), (("seq_idx",), (SEQ_IDX,), [])):
        operands = [x, w, b, *(each.shape for each in more)]
        want = dict(causal_conv1d=[*operands, x], causal_conv1d_backward=[*operands, x, x, sums, *d_state])
        yield f"causal {names}", causal(*names), [*SEQUENCE, *more], want
    x, w, y = floats(128, 256), floats(256, 512), floats(128, 512)
    yield "tf32", jaxext.matmul, [x, w], dict(matmul_nt=[(1, 512, 256), (1, 128, 256), (1, 128, 512)])
    want = dict(linear_nt=[(1, 512, 256), (1, 128, 256), (1, 512), (1, 128, 512), (1, 128, 512), dict(M=128, N=256, K=512)])
    yield "tf32, linear", linear, [x, w, floats(512), y], want
    for bits, width in ((4, 128), (8, 256)):  # two int4 are a byte
        for group, blocks in ((None, 1), (64, 8)):
            operands, want = [struct(2, 3, 512), quantized(bits, group)], [(1, 6, 512), (1, 512, width), (1, blocks, 256), (1, 6, 256)]
            yield f"int{bits} {group}", jaxext.quantized_matmul, operands, dict(weight_only=want)
    stacked = [(4, 3, 512), (4, 512, 128), (4, 4, 256), (4, 3, 256)]
    yield "mapped", jax.vmap(jaxext.quantized_matmul), [struct(4, 3, 512), quantized(4, 128, layers=(4,))], dict(weight_only=stacked)


PROGRAMS = {name: program for name, *program in programs()}


@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_are_called_with_arrays_of_their_problem(name):
    """XLA moves factors of eight bits and integers only if the contracted axis does not lie as their kernels want it."""
    function, operands, want = PROGRAMS[name]
    with jaxext.use_implementation("cuda"):
        lowered = lower(function, *operands)
    found = calls(lowered)
    assert found.keys() == want.keys()
    for target, (*shapes, attributes) in found.items():
        assert shapes == [shape for shape in want[target] if isinstance(shape, tuple)]
        assert attributes.items() >= next((each for each in want[target] if isinstance(each, dict)), {}).items()
    if {"scaled", "weight_only"} & {*want}:
        assert bool(moved(lowered, 1)) == (name == "scaled False")


@pytest.mark.parametrize("split", [False, True])
def test_float32_products_and_their_gradients_are_those_of_nt(split, monkeypatch):
    """Batches too, and an epilogue with all that it may have: the kernels' results, by their definition, are those of xla."""
    relu = lambda x, w, bias, residual: jaxext.linear(x, w, bias, residual=residual, activation="relu")
    contact = lambda *args: (gradients(relu)(*args), jax.vmap(jaxext.matmul)(*(jnp.stack([x] * 3) for x in args[:2])))
    shapes = (22, 256), (256, 1024), (1024,), (22, 1024)  # the sum of 22 is padded to 24
    found, targets = [*calls_of(Contact("float32", contact, tuple(floats(*shape) for shape in shapes)), "cuda")], set()

    def ffi_call(target, results, operands, attributes):
        targets.add(target)
        b, c, *added = operands
        assert {b.shape[-1] % 4, c.shape[-1] % 4} == {0}
        splits = attributes["splits"]
        part = lambda x: x.reshape(*x.shape[:2], splits, -1)
        sums = jnp.einsum("bmsn,bksn->sbmk", part(c), part(b))
        if "linear" not in target:
            return sums if splits > 1 else sums[0]
        z = sums[0] + added[0][:, None]
        y = jnp.maximum(z, 0) + added[1]
        return (y, z) if attributes["saves"] else y

    monkeypatch.setattr(cuda_binding, "ffi_call", ffi_call)
    parts = set()
    rng = np.random.default_rng(0)
    for family, call in found:
        operands = {slot: jnp.asarray(rng.integers(-3, 4, call.shape_of(slot)), dtype) for slot, dtype in call.dtypes.items()}
        plan: Any = next(each for each in family.implementations if each.name == "cuda").planned(call)
        config = next((config for config in plan.configs if (config.splits > 1) == split), plan.configs[0])
        parts.add(config.splits)
        want: Any = family.implementations[-1].planned(call)
        jax.tree.map(np.testing.assert_array_equal, plan.run(config, operands), want.run(want.configs[0], operands))
    assert targets == {"jaxext_matmul_nt_v1", "jaxext_linear_nt_v1"} and len(found) == 4 and (max(parts) > 1) == split


@pytest.mark.parametrize("given", [("bias",), ("initial_states",), ("bias", "initial_states"), ()], ids=str)
def test_partial_sums_of_a_causal_convolution_become_cotangents(monkeypatch, given):
    """The last row of each is the bias's; each cotangent has the dtype of its operand."""
    rng = np.random.default_rng(0)
    made = {}

    def ffi_call(target, results):
        made["arrays"] = [rng.integers(-3, 4, of.shape).astype(of.dtype) for of in results]
        return lambda *operands, **attributes: [jnp.asarray(of) for of in made["arrays"]]

    monkeypatch.setattr(jax.ffi, "ffi_call", ffi_call)
    operands = {"x": jnp.zeros((2, 9, 5), jnp.bfloat16), "w": jnp.zeros((4, 5), jnp.float32)}
    added = {"bias": jnp.zeros(5, jnp.float16), "initial_states": jnp.zeros((2, 3, 5), jnp.float32)}
    operands |= {name: of for name, of in added.items() if name in given}
    call: Any = types.SimpleNamespace(results={f"d_{name}": of.dtype for name, of in operands.items()}, further=True)
    attributes = dict(B=2, T=9, C=5, J=4, splits=3, bias=int("bias" in given), initial_states=int("initial_states" in given))
    got = cuda_causal._causal_backward(call, attributes, None, *operands.values(), operands["x"])
    d_x, sums, *d_state = made["arrays"]
    assert sums.shape == (3, 4 + ("bias" in given), 5) and sums.dtype == np.float32
    want = {"d_x": d_x, "d_w": sums.sum(0)[:4], "d_bias": sums.sum(0)[-1]} | ({"d_initial_states": d_state[0]} if d_state else {})
    for (name, dtype), of in zip(call.results.items(), got, strict=True):
        assert of.dtype == dtype
        np.testing.assert_array_equal(np.asarray(of, np.float32), want[name].astype(np.float32))


# Weights that devices share.

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
    with jax.set_mesh(mesh):
        return lower(lambda x, qvalue, scale: jaxext.quantized_matmul(x, jaxext.quantization.Quantized(qvalue, scale), **named), *args)


@pytest.mark.parametrize("split", SPLITS)
def test_weights_that_devices_share(split):
    """Each has the kernel for its part of the weight, with the scales of that part."""
    *specs, want = SPLITS[split]
    ((*shapes, _),) = calls(split_product("cuda", 512, *specs)).values()
    assert shapes == want


# What is asked of the module, and what is preferred.


@pytest.fixture
def asked(module, monkeypatch):
    """The fields of the last question to the module, which refuses everything."""
    asked = {}
    monkeypatch.setattr(module, "refuses", lambda target, **fields: asked.update(fields, target=target) or "says the test")
    return asked


def test_parts_of_a_weight_that_no_kernel_takes(asked):
    """The module is asked about a device's part, 48 columns."""
    assert "jaxext_weight_only" not in split_product(None, 384, *SPLITS["columns"][:3]).as_text()
    assert asked["N"] == 48


BF16, WINDOW = ["bf16"] * 3, dict(stride=(1, 1, 1), low=(0, 0, 0), input_dilation=(1, 1, 1), filter_dilation=(1, 1, 1))
DEPTHWISE3D = dict(input=(4, 8, 9), filter=(2, 3, 2), output=(3, 6, 8))
DEPTHWISE2D = dict(input=(1, 8, 9), filter=(1, 3, 2), output=(1, 6, 8))
ASKED = {  # by the target: a function, its operands, and the fields that are asked
    "matmul_nn": (*CALLS["matmul"], dict(B=1, M=128, N=512, K=256, dtypes=BF16)),
    "pieces_nn": (*CALLS["pieces"], dict(B=1, M=128, N=512, K=256, dtypes=["fp32"] * 3)),
    "conv2d_fprop": (*CALLS["conv2d"], dict(B=1, N=2, G=1, C=16, K=24, dtypes=BF16, **DEPTHWISE2D, **WINDOW)),
    "depthwise3d_fprop": (*CALLS["depthwise3d"], dict(B=1, N=2, G=16, C=1, K=2, dtypes=BF16, **DEPTHWISE3D, **WINDOW)),
    "depthwise2d_fprop": (*CALLS["depthwise2d"], dict(B=1, N=2, G=16, C=1, K=1, dtypes=BF16, **DEPTHWISE2D, **WINDOW)),
    "scaled": (*scaled(False), dict(B=1, M=256, N=384, K=512, I=256, J=3, S=4, dtypes=["fp8e4nv", "fp8e4nv", "bf16"])),
    "weight_only": (
        jaxext.quantized_matmul,
        (struct(5, 512), quantized(4, 128)),
        dict(B=1, M=5, N=256, K=512, S=4, bits=4, dtypes=["bf16", "i8", "bf16"]),
    ),
    "causal_conv1d": (
        jaxext.causal_conv1d,
        (struct(2, 40, 16), floats(4, 16), struct(16)),
        dict(B=2, T=40, C=16, J=4, dtypes=["bf16", "fp32", "bf16", "bf16"]),
    ),
}


@pytest.mark.parametrize("target", ASKED)
def test_what_the_module_refuses_is_refused(asked, target):
    """The reason is shown; the module is asked in full, about the family and the axes of the kernel that would be called."""
    function, operands, fields = ASKED[target]
    with jax.numpy_dtype_promotion("standard"):
        assert explained(function, *operands).refused["cuda"] == "says the test"
    assert asked == dict(target=target, arch=90, **fields)


PREFERRED = "'triton' is preferred"
AS_FAST = {
    "triton": "Triton's kernels are expected to be as fast",
    "16 bits": "XLA's products of 16-bit numbers are expected to be as fast",
    "converted": "XLA converts factors inside of its products, which are expected to be as fast",
    "wide": "XLA's product with a weight that it makes wide before is expected to be as fast",
}


def products(bits, rows, K=512, N=256, group: int | None = 128):
    return [(jaxext.quantized_matmul, struct(m, K), quantized(bits, group, K, N)) for m in rows]


def product_of_scales(s, t):
    """Return a product whose scales have these shapes."""
    product = lambda x, w, t: jaxext.scaled_dot(x, w, lhs_scale=None if s is None else jnp.ones(s, jnp.float32), rhs_scale=t)
    return product, struct(3, 512), struct(512, 256, dtype=jnp.int8), floats(*t)


def eight_bits(*dtypes):
    product = lambda x, y: jaxext.scaled_dot(x, y, lhs_scale=jnp.ones((1, 1)), rhs_scale=jnp.ones((1, 1)))
    return product, *(struct(2048, 2048, dtype=dtype) for dtype in dtypes)


def choices() -> Iterator[Any]:
    """Calls by name, and the reason for which `cuda` is not chosen, or None."""
    e4m3, e5m2, bf16 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16
    fused = lambda **added: (
        lambda x, w, *more: jaxext.linear(x, w, **dict(zip(added, more, strict=True))),
        *CALLS["matmul"][1],
        *added.values(),
    )
    gated = jaxext.gated_linear_unit, struct(128, 256), struct(256, 2, 512)
    yield "eight bits", [(jaxext.fp8_matmul, struct(2048, 2048), struct(2048, 2048))], None
    yield "a cotangent of eight bits", [eight_bits(*pair) for pair in ((e4m3, e4m3), (e5m2, e4m3), (e4m3, e5m2))], None
    yield "a wide cotangent", [eight_bits(bf16, e4m3)], "says the stand-in"
    yield "scaled, too small to transpose", [(scaled(False)[0], *scaled(False)[1])], AS_FAST["16 bits"]
    yield "scaled", [(scaled(True)[0], *scaled(True)[1])], None
    for family in OWN.values():
        yield from family.choices("says the stand-in")
    yield "another bias", [fused(bias=struct(512, dtype=jnp.int8))], "bias is i8, want fp32, bf16 or fp16"
    yield "another residual", [fused(residual=struct(128, 512, dtype=jnp.float16))], "residual is fp16, want bf16, as the result"
    yield "gate", [gated], "a gated epilogue, want one without a gate"
    for bits in (4, 8):
        yield f"int{bits}, few rows", products(bits, (1, 16, 32)), None
        yield f"int{bits}, a scale for each column", products(bits, (1,), group=None), AS_FAST["converted"]
        yield f"int{bits}, more rows", products(bits, (33, 64, 128, 512), 4096, 4096), None
    yield "many rows", products(8, (4096,), 4096, 4096), AS_FAST["wide"]
    yield "more rows, a scale for each column", products(8, (64,), 4096, 4096, group=None), AS_FAST["converted"]
    yield "scales of both", [product_of_scales((3, 1), (1, 256))], "scales of x and w, want scales of w alone"
    yield "a scale for all columns", [product_of_scales(None, (4, 1))], "1 scales along N of 256, want one for each column"
    yield "a scale for half of the columns", [product_of_scales(None, (4, 2))], "2 scales along N of 256, want one for each column"


CHOICES = {name: choice for name, *choice in choices()}


@pytest.mark.parametrize("name", CHOICES)
def test_a_kernel_is_preferred_where_it_is_expected_to_take_less_time(name):
    asked, reason = CHOICES[name]
    for function, *operands in asked:
        row = explained(function, *operands)
        assert (row.chosen == "cuda", row.refused.get("cuda")) == (reason is None, reason), operands


def test_triton_is_preferred_for_ragged_products():
    row = explained(jaxext.ragged_dot, *GROUPS)
    assert (row.chosen, row.refused["cuda"]) == ("triton", PREFERRED)


def test_weight_only_products_on_older_gpus():
    """They have the kernels of few rows."""
    with jaxext.use_target("sm_80"):
        (few,) = products(4, (3,))
        assert explained(*few).chosen == "cuda"
        for more in (*products(4, (33,)), *products(8, (33,)), *products(8, (64,), 4096, 4096)):
            assert explained(*more).refused["cuda"] == AS_FAST["triton"]


@pytest.mark.parametrize(
    ("verified", "chosen", "refusals"),
    [
        (["triton", "cuda"], "triton", {"cuda": PREFERRED, "xla": PREFERRED}),
        (["cuda"], "cuda", {"triton": "not verified", "xla": "'cuda' is preferred"}),
        ([], "xla", {"triton": "not verified", "cuda": "not verified"}),
    ],
    ids=["both", "cuda alone", "neither"],
)
def test_cuda_is_second_choice_for_causal_convolutions(verified, chosen, refusals, monkeypatch):
    monkeypatch.setattr(record, "unverified", lambda name, *_: None if name in verified else "not verified")
    row = explained(jaxext.causal_conv1d, struct(4, 2048, 1024), struct(4, 1024), struct(1024))
    assert (row.chosen, row.refused) == (chosen, refusals)


def test_gradients_are_left_to_others_and_named_refused():
    gradient = jax.grad(lambda x, q: jaxext.quantized_matmul(x, q).astype(jnp.float32).sum())
    args, reason = (struct(3, 512), quantized(4, 128)), "the product nt, a derivative, want the product itself"
    row = explained(gradient, *args, op="_nt")
    assert row.chosen != "cuda" and row.refused["cuda"] == reason
    with jaxext.use_implementation("cuda"), pytest.raises(NotImplementedError, match=reason):
        lower(gradient, *args)


@pytest.mark.parametrize(
    ("archs", "arch", "runs"),
    [
        *(("80-real,90", arch, True) for arch in (80, 86, 89, 90, 100, 120)),
        *(("90-real", arch, runs) for arch, runs in ((80, False), (89, False), (90, True), (100, False))),
        *(("89-virtual", arch, runs) for arch, runs in ((86, False), (89, True), (90, True))),
        *(("80-real", 90, False), ("86-real", 80, False), ("80-virtual", 120, True)),
    ],
)
def test_portable_kernels_run_where_they_were_compiled_for(module, archs, arch, runs):
    """Compiled code also runs on newer GPUs of its generation, and PTX on all newer ones."""
    module.archs = archs
    want = None if runs else f"compiled for {archs}, compute capability is {arch / 10}"
    assert cuda_binding.not_compiled_for(arch) == want
    with jaxext.use_target(f"sm_{arch}" + "a" * (arch >= 90)):
        depthwise = explained(conv, struct(2, 256, 64), struct(16, 1, 64))  # so many taps that a kernel is preferred
        assert (depthwise.chosen == "cuda", depthwise.refused.get("cuda")) == (runs, want)
        assert explained(jaxext.causal_conv1d, struct(2, 40, 16), struct(4, 16)).refused["cuda"] == (want or PREFERRED)
