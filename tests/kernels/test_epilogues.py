"""kernels/tile_epilogue.py in Triton's interpreter: every kernel with every epilogue against float64, and what they refuse."""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import Any

import harness
import jax
import numpy as np
import pytest
import test_conv
import test_depthwise
import test_matmul
from calls import Call, Suite, each
from epilogues import FUNCTIONS, with_epilogue
from jax import numpy as jnp

from jaxext.backends.triton.interpreter import interpreting
from jaxext.kernels import matmul
from jaxext.kernels.epilogue import ACTIVATIONS, Epilogue
from jaxext.kernels.launch import SHARED_MEMORY
from jaxext.ops.conv import triton as triton_conv
from jaxext.ops.matmul import triton as triton_matmul

# Sizes that do not fit the tiles: batches and groups, phases, strips, several groups in a tile.
CALLS: dict[str, Call] = {
    "matmul": test_matmul.a_call("nn", (2, 17, 21, 7)),
    "conv": test_conv.a_call(
        "fprop", dict(B=2, N=1, G=2, C=3, K=5, input=(4, 5), stride=(1, 2), dtypes=("fp32",) * 3, precision="ieee"), test_conv.PLAIN
    ),
    "depthwise": test_depthwise.DepthwiseCall(
        dataclasses.replace(test_depthwise.problem((5, 6), (3, 2), G=3, K=2, B=2, low=1, high=1), name="conv2d_fprop")
    ),
}
each_kernel = pytest.mark.parametrize("kernel", CALLS)
FLOATS = ("fp32", "bf16", "fp16")
ALL: Any = dict(activation="relu", bias="fp32", residual="fp16", saves=True)
MIXED = ("bf16", "bf16", "fp32")


def fused(call: str | Call, dtypes=None, tiles=None, **epilogue) -> Call:
    """A call with an epilogue, with other dtypes and tiles."""
    call = CALLS[call] if isinstance(call, str) else call
    call = call.with_problem(epilogue=Epilogue(**epilogue), dtypes=dtypes or call.problem.dtypes)
    return dataclasses.replace(call, config=dataclasses.replace(call.config or call.small(), **(tiles or {})))


def check_results(kernel: str, problem, operands, got, exact, product_error=1) -> None:
    """y, and z if it is saved, are exact, or as near to the truth as rounding allows; a product of factors as many times farther."""
    type(CALLS[kernel])(problem).judge(got, operands, exact, product_error)


TILES = {"plain": test_conv.PLAIN, "packed": test_conv.PACKED}
WIDE = {
    "matmul": (test_matmul.a_call("nn", (2, 40, 150, 7)), ALL),
    "gated": (test_matmul.a_call("nn", (2, 40, 150, 7)), dict(activation="relu", gated=True, saves=True)),
    "conv": (test_conv.a_call("fprop", dict(C=3, K=150, G=2, dtypes=("fp32",) * 3, precision="ieee"), test_conv.PLAIN), ALL),
}


class TestEpilogues(Suite):
    most = 0
    geometry = [
        *each(lambda kernel: fused(kernel, activation="relu6", bias="bf16", residual="fp16", saves=True), CALLS),
        # whole tiles, one of each, bands, none
        *each(
            lambda sizes, saves: fused(test_matmul.a_call("nn", sizes, MIXED), activation="relu", gated=True, saves=saves),
            [(1, 16, 32, 16), (2, 16, 8, 48), (1, 1, 1, 1), (3, 5, 18, 20), (1, 150, 9, 16), (2, 5, 6, 0), (2, 5, 0, 6)],
            [False, True],
        ),
        *each(
            lambda sizes: fused(
                test_matmul.a_call("nn", test_matmul.SIZES[sizes], MIXED), activation="relu", bias="bf16", residual="bf16", saves=True
            ),
            ["whole_tiles", "batch", "ones", "one_row", "one_column", "bands", "no_m", "no_k"],
        ),
        *each(
            lambda name, config: fused(
                call := test_conv.a_call("fprop", test_conv.CASES[name], TILES[config]),
                tiles=dict(groups=call.problem.G if call.config.packed else 1),
                **ALL,
            ),
            ["strided", "all_strides", "phases_without_targets", "groups", "groups_strided", "causal_1d", "3d", "no_taps"],
            TILES,
        ),
        *each(
            lambda name: fused(test_depthwise.DepthwiseCall(test_depthwise.CASES[name]), **ALL),
            ["causal k4", "k5 stride 3 dilation 2", "transposed 4x4", "batched filters, multiplier", "3x2x3", "no taps"],
        ),
    ]
    # more parts of a tile than residuals are read ahead, and tiles that overhang within them
    configs = each(lambda name: fused(WIDE[name][0], tiles=dict(tile_m=32, tile_n=128, num_warps=2), **WIDE[name][1]), WIDE)
    # with all that there can be beside each
    activations = each(
        lambda kernel, activation: fused(kernel, activation=activation, bias="fp32", residual="fp32", saves=True), CALLS, FUNCTIONS
    )
    # one rounding: the z of the activation is not the one that is saved
    rounding = [
        *each(
            lambda kernel, dtype, beside: fused(kernel, (dtype,) * 3, activation="tanh", bias=beside, residual=beside, saves=True),
            CALLS,
            FLOATS,
            FLOATS,
        ),
        *each(
            lambda dtype, activation: fused("matmul", (dtype,) * 3, activation=activation, gated=True, saves=dtype == "bf16"),
            FLOATS,
            [None, "gelu", "silu", "relu", "tanh"],
        ),
        *each(
            lambda kernel: fused(
                CALLS[kernel].with_problem(precision="tf32"),
                ("fp8e4nv", "fp8e5", "bf16"),
                dict(tile_k=32),
                activation="silu",
                bias="bf16",
                residual="fp32",
                saves=True,
            ),
            ["matmul", "conv"],
        ),
    ]
    refused_problems = [
        (CALLS[kernel].with_problem(**change, epilogue=Epilogue(**epilogue)), f"^{reason}")
        for kernel, change, epilogue, reason in [
            ("matmul", {"role": "nt"}, {"bias": "fp32"}, "an epilogue of the role nt, want nn"),
            ("conv", {"role": "dgrad"}, {"bias": "fp32"}, "an epilogue of the role dgrad, want fprop"),
            ("depthwise", {"role": "wgrad"}, {"bias": "fp32"}, "an epilogue of the role wgrad, want fprop"),
            ("matmul", {}, {"scale": "fp32"}, "an epilogue with a scale for each row, want one of a ragged product"),
            ("matmul", {}, {"activation": "elu"}, "activation 'elu', want one of relu, "),
            ("matmul", {}, {"bias": "fp64"}, "bias is fp64, want one of fp32, bf16, fp16 beside a result of fp32"),
            ("conv", {}, {"residual": "fp8e5"}, "residual is fp8e5, want one of"),
            ("depthwise", {}, {"bias": "i32"}, "bias is i32, want one of"),
            ("conv", {}, {"gated": True}, "a gated epilogue, want one of a matrix product"),
            ("matmul", {}, {"gated": True, "bias": "fp32"}, "a gated epilogue of fp32 with bias fp32 and residual None, want"),
            ("matmul", {}, {"gated": True, "residual": "bf16"}, "a gated epilogue of fp32 with bias None and residual bf16"),
            ("matmul", {"dtypes": ("i8", "i8", "i32")}, {"gated": True}, "a gated epilogue of i32"),
            ("matmul", {"dtypes": ("i8", "i8", "i32")}, {"activation": "relu"}, "activation 'relu' of i32, want none"),
            ("matmul", {"dtypes": ("i8", "i8", "i32")}, {"bias": "fp32"}, "bias is fp32, want i32 beside a result of i32"),
            ("conv", {"dtypes": ("i8", "i8", "i8")}, {"bias": "i32"}, "an epilogue into i8, want one of"),
            ("matmul", {"dtypes": ("i8", "i8", "i32"), "K": 1 << 18}, {"bias": "i32"}, "sums of 262144 products of int8 are split"),
            ("conv", {"dtypes": ("i8", "i8", "i32"), "C": 1 << 15}, {"bias": "i32"}, "sums of 294912 products of int8 are split"),
        ]
    ]  # fmt: skip
    refused_configs = each(
        lambda kernel: (fused(kernel, tiles=dict(splits=2), bias="fp32"), "splits.* an epilogue cannot follow"), ["matmul", "conv"]
    )


@pytest.mark.parametrize("kernel", ["matmul", "conv"])
def test_integers(kernel):
    """Sums of int8, and what is beside them, in int32: beyond the integers of float32 too."""
    call = fused(kernel, ("i8", "i8", "i32"), dict(tile_k=32), bias="i32", residual="i32", saves=True)
    operands = call.operands()
    operands["bias"] += 1 << 24
    call.check(operands=operands)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("saves", [False, True], ids=["", "saves"])
@pytest.mark.parametrize("residual", [None, "bf16"], ids=str)
@pytest.mark.parametrize("bias", [None, "fp16"], ids=str)
@each_kernel
def test_parts(kernel, bias, residual, saves):
    """An absent operand is not read; each operand has a dtype of its own."""
    call = fused(kernel, activation="silu", bias=bias, residual=residual, saves=saves)
    assert call.launch.results == 1 + saves
    assert {*call.launch.operands[2:]} <= {call.launch.operands[0], "bias", "residual"}
    call.check(exact=False)


@pytest.mark.sampled(3)
@pytest.mark.skipif(not interpreting(), reason="tests/backends/triton/test_triton_calls.py is for GPU programs")
@pytest.mark.parametrize("saves", [False, True], ids=["", "saves"])
@each_kernel
def test_a_call_of_a_jax_program(kernel, saves):
    """One array, or a tuple of two; of the operands that there are."""
    fused_call = fused(kernel, activation="gelu", residual="fp32", saves=saves)
    implementation: Any = triton_matmul.TritonMatmul() if kernel == "matmul" else triton_conv.TritonConv()
    called = implementation.launch(types.SimpleNamespace(platform="cpu", arch=None, in_place=None), fused_call.problem, fused_call.config)
    operands = fused_call.operands(integers=False)
    assert called.slots == tuple(operands) and called.splits == 1
    results = tuple(jax.ShapeDtypeStruct(shape, np.float32) for shape in fused_call.shapes)
    got = jax.jit(functools.partial(called.call, results if saves else results[0]))(*operands.values())
    want = fused_call.compute(operands)
    assert isinstance(got, tuple) == saves
    for ours, same in zip(got if saves else (got,), want, strict=True):
        np.testing.assert_array_equal(ours, same)


# The activations themselves.


def activated(z: np.ndarray, activation: str, dtype: str = "fp32") -> np.ndarray:
    """Return the activation of one row of sums, which are z itself."""
    problem = with_epilogue(test_matmul.a_problem("nn", (1, 1, z.size, 1), ("fp32", "fp32", dtype)), activation=activation)
    launch = matmul.launch(problem, matmul.Config(tile_m=16, tile_n=256, tile_k=16))
    with np.errstate(all="ignore"):
        return harness.run(launch, {"a": np.ones((1, 1, 1), np.float32), "b": z.reshape(1, 1, -1)}, [(1, 1, z.size)], dtype)[0].ravel()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_exact_to_the_last_bits_of_float32(activation):
    """Errors are in units of the value, however small: where 1 + tanh or 1 + erf cancels, and far beyond.

    What is left of the least normal numbers may be lost.  The tanh of "gelu_tanh" has an argument that is rounded first.
    """
    sizes = np.concatenate([np.geomspace(1e-35, 1e-3, 300), np.geomspace(1e-3, 130, 1500), np.geomspace(130, 1e18, 100)])
    z = np.concatenate([sizes, -sizes]).astype(np.float32)
    want = FUNCTIONS[activation](z.astype(np.float64))
    units = np.abs(activated(z, activation) - want) / (2.0**-23 * np.abs(want) + 2.0**-119)
    most = 4.0 + (np.abs(z) * (2.4 + 0.11 * z.astype(np.float64) ** 2) if activation == "gelu_tanh" else 0)
    assert (units <= most).all(), f"{units.max()} at {z[units.argmax()]}"


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_infinities_and_nan(activation):
    """They become what jax.nn makes of them."""
    of_jax = {
        "gelu": lambda z: jax.nn.gelu(z, approximate=False),
        "gelu_tanh": jax.nn.gelu,
        "tanh": jnp.tanh,
        "squared_relu": lambda z: jnp.square(jax.nn.relu(z)),
    }
    z = np.array([np.inf, -np.inf, np.nan, 0, -0.0, 3e38, -3e38], np.float32)
    np.testing.assert_array_equal(activated(z, activation), (of_jax.get(activation) or getattr(jax.nn, activation))(z))


def test_offsets_of_a_gated_product_may_need_64_bits():
    """Its right operand and its z have twice the columns."""
    problem = test_matmul.a_problem("nn", (1, 2, 2**15, 2**15))
    assert problem.index == "int32" and with_epilogue(problem, gated=True).index == "int64"


@pytest.mark.parametrize("arch", SHARED_MEMORY)
@each_kernel
def test_candidates_have_one_part(kernel, arch):
    """The plain problem has more."""
    plain: Any = {
        "matmul": test_matmul.a_problem("nn", (1, 64, 64, 100_000), ("bf16",) * 3, arch=arch),
        "conv": test_conv.a_problem("fprop", C=4096, K=64, input=(4, 4), dtypes=("bf16",) * 3, arch=arch),
        "depthwise": CALLS["depthwise"].with_problem(arch=arch).problem,
    }[kernel]
    module = CALLS[kernel].module
    assert any(config.splits > 1 for config in module.candidates(plain)) or kernel == "depthwise"
    for epilogue in ({"bias": "fp32"}, {"activation": "silu", "gated": True, "saves": True})[: 2 if kernel == "matmul" else 1]:
        problem = with_epilogue(plain, **epilogue)
        configs = module.candidates(problem)
        assert module.candidates(problem)[0] == configs[0] and len(set(configs)) == len(configs)
        for config in configs:
            launch = module.launch(problem, config)
            assert config.splits == launch.splits == 1
            assert launch.operands[:2] == module.launch(plain, module.candidates(plain)[0]).operands
