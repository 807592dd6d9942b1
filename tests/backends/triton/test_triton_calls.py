"""What a program says of the calls of Triton kernels in it, by which XLA and jaxlib lay out their arrays, and assemble and launch them."""

import importlib.metadata
import inspect
import re

import pytest
from lowered import struct

pytest.importorskip("triton")
jax_triton = pytest.importorskip("jax_triton", exc_type=ImportError)

# ruff: noqa: E402
from test_triton_binding import calls

import jaxext

TRITON = tuple(map(int, re.findall(r"\d+", importlib.metadata.version("triton"))[:2]))


@pytest.fixture(scope="module")
def lowered():
    """Products of operands that XLA would rather transpose by their layouts."""

    def f(a, b, x, w):
        y = jaxext.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NCHW", "OIHW", "NCHW"), implementation="triton")
        return jaxext.matmul(a.T, b.T, implementation="triton"), y

    return jaxext.lower_for(f, struct(48, 32), struct(64, 48), struct(2, 16, 8, 8), struct(16, 16, 3, 3), arch="sm_90a")


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
