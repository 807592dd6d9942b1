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


def test_the_operand_is_not_copied(compiled):
    """And the kernel takes it once."""
    assert work(compiled(functools.partial(jaxext.gram, implementation="triton"), struct(4096, 2048))) == {"kernel": 1}


def test_a_step_of_newton_schulz(compiled):
    """Three kernels; beside them the norm, and x times a number."""
    step = functools.partial(jaxext.newton_schulz, steps=1, implementation="triton")
    counted = work(compiled(step, struct(1024, 2048)))
    assert counted["kernel"] == 3 and not counted.keys() & {"copy", "transpose", "gemm"}


PREFERRED = {(4096, 4096): "triton", (4, 4096, 8192): "triton", (16, 2048, 2048): "triton", (2048, 2048): "xla", (512, 8192): "xla"}


@pytest.mark.parametrize(("shape", "chosen"), PREFERRED.items(), ids=str)
def test_preference(shape, chosen):
    with jaxext.use_target("sm_90a"):
        lowered = jax.jit(jaxext.gram).trace(struct(*shape)).lower(lowering_platforms=("cuda",))
    assert ("triton_kernel_call" in lowered.as_text()) == (chosen == "triton")
