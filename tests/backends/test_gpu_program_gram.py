"""What XLA's GPU compiler makes of products with their own transposes by our kernels, read without a GPU.

As test_gpu_program.py, `make gpu-programs` runs it.
"""

# ruff: noqa: F401, F811 - two fixtures are imported
import functools

import jax
import jax.numpy as jnp
import pytest
from lowered import struct
from test_gpu_program import compiled, devices, work

import jaxext
from jaxext.backends.cuda import cuda_binding


def test_the_operand_is_not_copied(compiled):
    """And the kernel takes it once."""
    assert work(compiled(functools.partial(jaxext.gram, implementation="triton"), struct(4096, 2048))) == {"kernel": 1}


def test_a_step_of_newton_schulz(compiled):
    """Three kernels; beside them the norm, and x times a number."""
    step = functools.partial(jaxext.newton_schulz, steps=1, implementation="triton")
    counted = work(compiled(step, struct(1024, 2048)))
    assert counted["kernel"] == 3 and not counted.keys() & {"copy", "transpose", "gemm"}


# Whether a kernel is preferred: CUDA's where it is compiled, else Triton's.
PREFERRED = {(4096, 4096): True, (4, 4096, 8192): True, (16, 2048, 2048): True, (2048, 2048): False, (512, 8192): False}
CALLED = "triton_kernel_call" if cuda_binding.missing() else "jaxext_gram_v1"


@pytest.mark.parametrize(("shape", "preferred"), PREFERRED.items(), ids=str)
def test_preference(shape, preferred):
    with jaxext.use_target("sm_90a"):
        text = jax.jit(jaxext.gram).trace(struct(*shape)).lower(lowering_platforms=("cuda",)).as_text()
    assert [name for name in ("triton_kernel_call", "jaxext_gram_v1") if name in text] == [CALLED] * preferred
