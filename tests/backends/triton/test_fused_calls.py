"""The calls of Triton kernels with epilogues in CUDA programs: their operands and results.  No GPU is needed."""

import dataclasses
import types
from typing import Any

import jax
import pytest
from jax import core
from jax.extend.core import Primitive
from jax.interpreters import mlir
from lowered import struct

pytest.importorskip("triton")
pytest.importorskip("jax_triton", exc_type=ImportError)

# ruff: noqa: E402
from test_triton_binding import calls, kernels

import jaxext
from jaxext.backends.triton.triton_matmul import TritonMatmul
from jaxext.kernels import matmul
from jaxext.kernels.epilogue import Epilogue

PLAIN = matmul.Problem(name="matmul_nn", role="nn", B=2, M=64, N=48, K=32, dtypes=("bf16",) * 3, precision="tf32", arch=90)
A, BIAS, RESULT = struct(2, 64, 32), struct(2, 48), struct(2, 64, 48)


@dataclasses.dataclass
class Made:
    slots: tuple[str, ...]  # of the KernelCall
    operands: list  # shapes, of the custom call
    values: list[int]  # for each operand, the first that is the same value
    results: list


def made(epilogue, *operands, results) -> Made:
    problem = dataclasses.replace(PLAIN, epilogue=epilogue)
    asked: Any = types.SimpleNamespace(platform="cuda", arch=90)
    call = TritonMatmul().launch(asked, problem, matmul.candidates(problem)[0])
    result = results if len(results) > 1 else results[0]
    # As the library's own primitives are lowered: jax-triton 0.4.1 has a rule for more than that, which jax 0.12 cannot call.
    primitive = Primitive("fused")
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *_: [core.ShapedArray(result.shape, result.dtype) for result in results])
    mlir.register_lowering(
        primitive, mlir.lower_fun(lambda *operands: jax.tree.leaves(call.call(result, *operands)), multiple_results=True)
    )
    program = jaxext.lower_for(lambda *operands: primitive.bind(*operands), *operands, arch="sm_90a")
    assert kernels(program) == {"matmul_nn": 1}
    assert [out.shape for out in jax.tree.leaves(program.out_info)] == [out.shape for out in results]
    ((op, _),) = calls(program)
    values = list(op.operands)
    shapes = [[tuple(value.type.shape) for value in side] for side in (values, op.results)]
    return Made(call.slots, shapes[0], [values.index(value) for value in values], shapes[1])


@pytest.mark.parametrize("saves", [False, True], ids=["", "saves"])
def test_all_operands(saves):
    epilogue = Epilogue(activation="gelu", bias="bf16", residual="bf16", saves=saves)
    got = made(epilogue, A, struct(2, 32, 48), BIAS, RESULT, results=(RESULT,) * (1 + saves))
    assert got.slots == ("a", "b", "bias", "residual")
    assert got.operands == [(2, 64, 32), (2, 32, 48), (2, 48), (2, 64, 48)]
    assert got.results == [(2, 64, 48)] * (1 + saves)


def test_the_left_operand_stands_for_those_that_there_are_not():
    """It is the same value, and so no copy of it."""
    got = made(Epilogue(activation="relu"), A, struct(2, 32, 48), results=(RESULT,))
    assert got.slots == ("a", "b")
    assert got.values == [0, 1, 0, 0]


def test_gated():
    got = made(Epilogue(activation="silu", gated=True, saves=True), A, struct(2, 32, 2, 48), results=(RESULT, struct(2, 64, 2, 48)))
    assert got.slots == ("a", "b")
    assert got.results == [(2, 64, 48), (2, 64, 2, 48)]
