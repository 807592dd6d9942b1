"""Calls of Triton kernels in CUDA programs: which there are, what else is in the program, their operands, results and layouts.

By these XLA and jaxlib lay out their arrays, and assemble and launch them.  No GPU is needed.
"""

import importlib.metadata
import inspect
import re
import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import core
from jax.extend.core import Primitive
from jax.interpreters import mlir
from lowered import operations, struct

pytest.importorskip("triton")
jax_triton = pytest.importorskip("jax_triton", exc_type=ImportError)

# ruff: noqa: E402
from test_triton_binding import calls, kernels

import jaxext
from jaxext.kernels import matmul
from jaxext.kernels.epilogue import Epilogue
from jaxext.ops.matmul.triton import TritonMatmul

TRITON = tuple(map(int, re.findall(r"\d+", importlib.metadata.version("triton"))[:2]))


@pytest.fixture(scope="module")
def lowered():
    """Products of operands that XLA would rather transpose by their layouts."""

    def f(a, b, x, w):
        y = jaxext.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NCHW", "OIHW", "NCHW"), implementation="triton")
        return jaxext.matmul(a.T, b.T, implementation="triton"), y

    return jaxext.export.lower_for(f, arch="sm_90a")(struct(48, 32), struct(64, 48), struct(2, 16, 8, 8), struct(16, 16, 3, 3))


def test_every_array_is_asked_for_row_by_row(lowered):
    """Kernels compute addresses from the shape alone: where XLA would hand over another layout it has to copy."""
    for op, _ in calls(lowered):
        for name, values in (("operand_layouts", op.operands), ("result_layouts", op.results)):
            layouts = [list(layout) for layout in op.attributes[name]]
            assert layouts == [[*reversed(range(len(value.type.shape)))] for value in values]
    assert len(calls(lowered)) == 2


@pytest.mark.skipif(
    "out_shape" in inspect.signature(jax_triton.triton_call).parameters and TRITON > (3, 6),
    reason="jax-triton 0.3.1 cannot say which PTX this Triton is to write",
)
def test_the_assembler_of_cuda_12_9_knows_the_ptx(lowered):
    """Triton 3.9 wrote PTX 9.4, its own assembler's; jaxlib runs that of the CUDA which it finds, and 13.0's refused every kernel."""
    for _, description in calls(lowered):
        (version,) = re.findall(rb"\.version (\d+)\.(\d+)\n", description)
        assert tuple(map(int, version)) <= (8, 8)


LEFT, RIGHT, BIAS, RESULT = struct(2, 64, 32), struct(2, 32, 48), struct(2, 48), struct(2, 64, 48)
GATED, BOTH = struct(2, 32, 2, 48), struct(2, 64, 2, 48)
ALL: Any = dict(activation="gelu", bias="bf16", residual="bf16")


@pytest.mark.parametrize(
    ("epilogue", "arrays", "results"),
    [
        (Epilogue(**ALL), dict(a=LEFT, b=RIGHT, bias=BIAS, residual=RESULT), [RESULT]),
        (Epilogue(**ALL, saves=True), dict(a=LEFT, b=RIGHT, bias=BIAS, residual=RESULT), [RESULT, RESULT]),
        (Epilogue(activation="relu"), dict(a=LEFT, b=RIGHT), [RESULT]),
        (Epilogue(activation="silu", gated=True, saves=True), dict(a=LEFT, b=GATED), [RESULT, BOTH]),
    ],
    ids=["all", "saves", "alone", "gated"],
)
def test_operands_of_an_epilogue(epilogue, arrays, results):
    """The left operand stands for those that there are not: it is the same value, and so no copy of it."""
    sizes = dict(B=2, M=64, N=48, K=32)
    problem = matmul.Problem(
        name="matmul_nn", role="nn", **sizes, dtypes=("bf16",) * 3, precision="tf32", arch=90, epilogue=epilogue
    )  # fmt: skip
    asked: Any = types.SimpleNamespace(platform="cuda", arch=90, in_place=None)
    call = TritonMatmul().launch(asked, problem, matmul.candidates(problem)[0])
    # As the library's own primitives are lowered: jax-triton 0.4.1 has a rule for more than that, which jax 0.12 cannot call.
    primitive = Primitive("fused")
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *_: [core.ShapedArray(result.shape, result.dtype) for result in results])
    result = tuple(results) if len(results) > 1 else results[0]
    lowering = mlir.lower_fun(lambda *operands: jax.tree.leaves(call.call(result, *operands)), multiple_results=True)
    mlir.register_lowering(primitive, lowering)
    program = jaxext.export.lower_for(lambda *operands: primitive.bind(*operands), arch="sm_90a")(*arrays.values())
    assert kernels(program) == {"matmul_nn": 1} and call.slots == tuple(arrays)
    assert [out.shape for out in jax.tree.leaves(program.out_info)] == [out.shape for out in results]
    ((op, _),) = calls(program)
    operands = list(op.operands)
    assert [operands.index(value) for value in operands] == [i if i < len(arrays) else 0 for i in range(4)]
    assert [tuple(value.type.shape) for value in operands[: len(arrays)]] == [array.shape for array in arrays.values()]
    assert [tuple(value.type.shape) for value in op.results] == [out.shape for out in results]


# Ragged products.
X, W, SIZES = struct(512, 136), struct(8, 136, 264), struct(8, dtype=jnp.int32)


def loss(x, w, sizes):
    return jnp.sum(jaxext.ragged_dot(x, w, sizes).astype(jnp.float32) ** 2)


def test_a_training_step_is_three_launches():
    """No implementation is named and no CUDA kernel is there.  No array is expanded to the groups, no factor copied, no visit listed."""
    with jaxext.use_table(None):
        program = jaxext.export.lower_for(jax.grad(loss, (0, 1)), arch="sm_80")(X, W, SIZES)
    assert kernels(program) == {"ragged_nn": 1, "ragged_nt": 1, "ragged_tn": 1}
    assert not [op for op in operations(program) if op.name in ("stablehlo.dot_general", "stablehlo.while")]
    assert all([tuple(value.type.shape) for value in op.operands].count((1, 1, 8)) == 2 for op, _ in calls(program))  # the ranges


def test_the_gradient_of_the_matrices_of_long_groups_is_two_launches():
    """The second one takes what the first one writes: partial sums for each chunk, and one more where groups meet in a chunk."""
    x, w, sizes = struct(8201, 136), struct(2, 136, 144), struct(2, dtype=jnp.int32)
    with jaxext.use_table(None), jaxext.use_implementation("triton"):
        program = jaxext.export.lower_for(jax.grad(loss, 1), arch="sm_90")(x, w, sizes)
    assert kernels(program) == {"ragged_nn": 1, "ragged_tn": 2}
    first, second = ([tuple(x.type.shape) for x in (*op.operands, *op.results)] for op, _ in calls(program)[1:])
    assert second[0] == first[-1] == (1, 1, 18, 136, 144) and second[-1] == (1, 2, 136, 144)


def test_a_layer_with_epilogues_is_two_launches():
    """Forward.  Neither a bias for each row nor a product without its epilogue is written to memory; a step saves what it needs."""
    gates, down, scale, bias = struct(8, 136, 2, 264), struct(8, 264, 136), struct(512, dtype=jnp.float32), struct(8, 136)

    def layer(x, gates, down, bias, scale, sizes):
        hidden = jaxext.ragged_gated_linear_unit(x, gates, sizes, activation="silu")
        return jaxext.ragged_linear(hidden, down, sizes, bias, row_scale=scale)

    args = X, gates, down, bias, scale, SIZES
    total = lambda *args: layer(*args).astype(jnp.float32).sum()
    with jaxext.use_table(None):
        program = jaxext.export.lower_for(layer, arch="sm_80")(*args)  # where there are no CUDA kernels for the gradients
        step = jaxext.export.lower_for(jax.grad(total, (0, 1, 2)), arch="sm_80")(*args)
    assert kernels(program) == {"ragged_gated_linear_unit": 1, "ragged_linear": 1}
    results = [[result.type.shape for result in op.results] for op, _ in calls(program)]
    assert results == [[[1, 1, 1, 512, 264]], [[1, 1, 1, 512, 136]]]
    assert kernels(step) == {"ragged_gated_linear_unit": 1, "ragged_nt": 2, "ragged_tn": 2}


def test_integers_are_left_to_xla():
    with jaxext.use_table(None), jaxext.use_target("sm_90a"):
        (row,) = jaxext.explain(jaxext.ragged_dot, platform="cuda")(*(struct(*x.shape, dtype=jnp.int8) for x in (X, W)), SIZES).rows
    assert row.chosen == "xla" and row.refused["triton"].startswith("i8 and i8 into i8") or "integers" in row.refused["triton"]
