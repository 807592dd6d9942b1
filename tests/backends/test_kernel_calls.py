"""The problem that a kernel gets for a call, and the sum of its partial results: without a GPU, on a stand-in for a kernel."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxext
from jaxext.backends import kernel
from jaxext.backends.fields import matmul_problem
from jaxext.core.implementation import Plan
from jaxext.kernels.geometry import ConvProblem
from jaxext.kernels.matmul.problem import MatmulProblem
from jaxext.ops.conv.problem import conv_problem
from jaxext.tables import active

PRESET = lax.DotAlgorithmPreset


def call_of(op, *operands):
    with active.collecting() as calls:
        jax.jit(op).trace(*operands).lower(lowering_platforms=("cuda",))
    return calls[0]


def matmul_of(dtype: Any = np.float32, precision=None, result=None):
    x = jnp.ones((4, 4), dtype)
    return call_of(functools.partial(jaxext.matmul, precision=precision, preferred_element_type=result), x, x)


PRECISIONS = [
    *((precision, np.float32, "tf32") for precision in (None, "default", "high", PRESET.DEFAULT, PRESET.TF32_TF32_F32)),
    *((precision, np.float32, "ieee") for precision in ("highest", ("default", "highest"), PRESET.F32_F32_F32)),
    (PRESET.TF32_TF32_F32_X3, np.float32, "tf32x3"),
    (PRESET.BF16_BF16_F32_X3, np.float32, "bf16x3"),
    (PRESET.BF16_BF16_F32_X6, np.float32, "bf16x6"),
    (PRESET.BF16_BF16_F32, jnp.bfloat16, "ieee"),
]


@pytest.mark.parametrize(("precision", "dtype", "want"), PRECISIONS, ids=str)
def test_the_precision_that_kernels_multiply_with(precision, dtype, want):
    problem: Any = matmul_problem(matmul_of(dtype, precision, np.float32), MatmulProblem, 90)
    assert isinstance(problem, MatmulProblem) and problem.precision == want


@pytest.mark.parametrize("precision", [PRESET.BF16_BF16_F32, PRESET.F16_F16_F32, PRESET.F64_F64_F64], ids=str)
def test_a_precision_that_no_kernel_has_is_refused(precision):
    reason = matmul_problem(matmul_of(np.float32, precision), MatmulProblem, 90)
    assert isinstance(reason, str) and reason.startswith(f"precision is {precision}, want one of")


def test_missing_spatial_axes_are_the_leading_ones():
    x, w = np.ones((2, 9, 3), np.float32), np.ones((5, 3, 4), np.float32)
    conv = lambda x, w: jaxext.conv_general_dilated(x, w, (2,), [(3, 1)], (6,), (4,), ("NWC", "WIO", "NWC"))
    problem: Any = conv_problem(call_of(conv, x, w), 90)
    assert isinstance(problem, ConvProblem)
    assert (problem.input, problem.filter, problem.output) == ((1, 1, 9), (1, 1, 5), (1, 1, 19))
    assert (problem.stride, problem.low) == ((1, 1, 2), (0, 0, 3))
    assert (problem.input_dilation, problem.filter_dilation) == ((1, 1, 6), (1, 1, 4))


class InThreeParts(kernel.KernelImplementation):
    """Its parts are 256, 1 and 1, and it remembers the dtype that they shall have."""

    name = "parts"
    dtype: Any = None
    problem = lacks = refuses_problem = slower = lambda *_, **__: None
    configs = lambda self, problem: ()
    family = lambda self, problem, config: "parts"
    compiler = lambda self: "none"

    def launch(self, call, problem, config):
        def parts(result, first, second):
            self.dtype = result.dtype
            return jnp.broadcast_to(jnp.array([256, 1, 1], result.dtype).reshape(3, 1, 1, 1), result.shape)

        first, second = call.dtypes
        return kernel.KernelCall("", (first, second), 3, parts)


@pytest.mark.parametrize(
    ("dtype", "result", "partial"),
    [(jnp.bfloat16, jnp.bfloat16, np.float32), (np.float32, np.float32, np.float32), (np.int8, np.int32, np.int32)],
)
def test_parts_are_added_up_before_they_are_rounded(dtype, result, partial):
    """A sum of 256 and 1 in bfloat16 would be 256."""
    call, kernel = matmul_of(dtype, result=result), InThreeParts()
    plan = kernel.plan(call)
    assert isinstance(plan, Plan)
    y = plan.run(None, {slot: jnp.ones((4, 4), dtype) for slot in call.dtypes})
    assert (kernel.dtype, y.dtype) == (partial, result)
    np.testing.assert_array_equal(np.asarray(y, np.float32), np.full((4, 4), 258))
