"""What XLA's GPU compiler makes of scaled products by our kernels, read without a GPU.

As test_gpu_program.py, `make gpu-programs` runs it.
"""

# ruff: noqa: F401, F811 - two fixtures are imported
import math
import re

import jax
import jax.numpy as jnp
import pytest
from lowered import struct
from test_gpu_program import compiled, devices, instructions, work

import jaxext
from jaxext.backends.cuda import cuda_binding


def by(implementation):
    def product(x, qvalue, scale):
        return jaxext.quantized_matmul(x, jaxext.Quantized(qvalue, scale), implementation=implementation)

    return product


CUDA = pytest.param("cuda", marks=pytest.mark.skipif(cuda_binding.missing() is not None, reason="no CUDA kernels"))


@pytest.mark.parametrize("implementation", ["triton", CUDA])
@pytest.mark.parametrize("kind", ["int8", "int4", "bytes"])
def test_weights_are_not_copied(compiled, kind, implementation):
    """int4 lie packed in memory: neither as such nor as bytes are they unpacked before the kernel."""
    product, rows = by(implementation), {"triton": 512, "cuda": 32}[implementation]

    def of_bytes(x, packed, scale):
        return product(x, jaxext.unpack_int4(packed), scale)

    f = of_bytes if kind == "bytes" else product
    weight = struct(4096, 2048, dtype=jnp.uint8) if kind == "bytes" else struct(4096, 4096, dtype=jnp.dtype(kind))
    counted = work(compiled(f, struct(rows, 4096), weight, struct(32, 4096, dtype=jnp.float32)))
    assert counted == {"kernel": 1} | ({"fusion": 1} if implementation == "cuda" else {})  # which adds the parts of the sum


@pytest.mark.parametrize(("groups", "wide"), [(1, 0), (32, 1)], ids=["columns", "groups"])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_xla_writes_wide_weights_where_scales_change_along_the_sum(compiled, kind, groups, wide):
    """So a kernel is preferred there, for few rows, and XLA elsewhere."""
    text = compiled(by("xla"), struct(16, 4096), struct(4096, 2048, dtype=jnp.dtype(kind)), struct(groups, 2048, dtype=jnp.float32))
    sizes = [
        math.prod(map(int, re.findall(r"\d+", kind.partition("{")[0].partition("[")[2])))
        for kind, opcode, _ in instructions(text)
        if opcode == "fusion"
    ]
    large = [size for size in sizes if size == 4096 * 2048]
    assert len(large) == wide


CUDA = not cuda_binding.missing()
FEW = "cuda" if CUDA else "triton"
PREFERRED = [(16, 1, "xla"), (32, 32, FEW), (33, 32, FEW), (128, 64, FEW), (256, 32, "cuda" if CUDA else "xla"), (4096, 32, "xla")]


@pytest.mark.parametrize(("rows", "groups", "chosen"), PREFERRED)
def test_preference(rows, groups, chosen):
    args = struct(rows, 4096), struct(4096, 2048, dtype=jnp.int8), struct(groups, 2048, dtype=jnp.float32)
    with jaxext.use_target("sm_90a"):
        lowered = jax.jit(by(None)).trace(*args).lower(lowering_platforms=("cuda",))
    assert ("triton_kernel_call" in lowered.as_text()) == (chosen == "triton")
    assert ("jaxext_weight_only_v1" in lowered.as_text()) == (chosen == "cuda")
