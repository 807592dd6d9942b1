"""Every opcode of our kernels is one that a test of instructions executes."""

import importlib

import pytest
import snippets
from interpreter import Module
from opcodes import untested

from benchmarks import compiled
from jaxext.bench import triton_ptx


def test_what_a_test_of_instructions_does_not_reach_does_not_count():
    """Instructions that are jumped over, that no lane executes, or that a fault ends do not count."""
    body = "setp.ne.u32 %p1, 0, 0; @%p1 not.b32 %r1, %r1; bra over; {} over: prmt.b32 %r1, %r1, %r1, 0;"
    snippets.executed.clear()
    snippets.launch(body.format("popc.b32 %r1, %r1;"))
    assert snippets.executed == {"setp.ne.u32", "bra", "prmt.b32", "mov.u32", "ret"}
    with pytest.raises(Exception, match="the kernel traps"):
        snippets.launch("neg.s32 %r1, %r1; trap;")
    assert "neg.s32" not in snippets.executed


def test_an_opcode_without_a_test_is_found():
    text = f"{snippets.HEAD}.visible .entry kernel() {{ .reg .f32 %f<2>; bra over; sin.approx.f32 %f1, %f1; over: mov.f32 %f1, %f0; ret; }}"
    assert untested(Module(text)) == {"sin.approx.f32"}


KINDS = {  # of Triton's kernels: the kinds of numbers for each target, which multiply with different instructions
    ("matmul", 80): ("bf16", "int8"),
    ("matmul", 90): ("bf16", "tf32", "ieee", "bf16x6", "fp8", "int8"),
    ("conv", 80): ("bf16",),
    ("conv", 90): ("bf16",),
    ("depthwise", 90): ("bf16",),
}


@pytest.mark.parametrize("kernel, arch", KINDS)
def test_kernels_of_triton(kernel, arch):
    """A few; the tests that run them look at each."""
    picked = [program for program in compiled.programs(kernel, archs=(arch,), others="none") if program.picked]
    for numbers in KINDS[kernel, arch]:
        program = next(program for program in picked if program.numbers == numbers)
        launch = importlib.import_module(f"jaxext.kernels.{kernel}").launch(program.problem, program.config)
        made = triton_ptx.compile_launch(launch, program.problem)
        assert not untested(Module(str(made.asm["ptx"])))
