"""Every opcode of our kernels is one that ptxsim's own tests execute."""

import importlib

import pytest
from ptxsim import Module

from benchmarks import compiled
from jaxext.bench import triton_ptx

KINDS = {  # of Triton's kernels: the kinds of numbers for each target, which multiply with different instructions
    ("matmul", 80): ("bf16", "int8"),
    ("matmul", 90): ("bf16", "tf32", "ieee", "bf16x6", "fp8", "int8"),
    ("conv", 80): ("bf16",),
    ("conv", 90): ("bf16",),
    ("depthwise", 90): ("bf16",),
}


@pytest.mark.slow
@pytest.mark.parametrize("kernel, arch", KINDS)
def test_kernels_of_triton(kernel, arch):
    """A few; the tests that run them look at each."""
    picked = [program for program in compiled.programs(kernel, archs=(arch,), others="none") if program.picked]
    for numbers in KINDS[kernel, arch]:
        program = next(program for program in picked if program.numbers == numbers)
        launch = importlib.import_module(f"jaxext.kernels.{kernel}").launch(program.problem, program.config)
        made = triton_ptx.compile_launch(launch, program.problem)
        assert not Module(str(made.asm["ptx"])).unverified_opcodes()
