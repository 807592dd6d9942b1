"""Every opcode of our kernels is tested: kernels have those of opcodes.txt only, and tests of instructions execute each of these."""

import itertools
import pathlib

import pytest
import snippets
import test_conv
import test_depthwise
import test_matmul
from interpreter import Module
from opcodes import TABLE, untested

from jaxext.benchmarks import compiled
from jaxext.kernels import conv, depthwise, matmul

HERE = pathlib.Path(__file__).parent


def test_each_opcode_of_the_table_is_executed_by_a_test_of_instructions():
    assert len(TABLE) > 250
    assert not TABLE - snippets.tested_opcodes(TABLE)


def test_what_a_test_of_instructions_does_not_reach_does_not_count():
    """Neither what is jumped over, nor what no lane executes, nor what a fault ends."""
    before = set(snippets.executed)
    body = "setp.ne.u32 %p1, 0, 0; @%p1 brev.b32 %r1, %r1; bra over; {} over: prmt.b32 %r1, %r1, %r1, 0;"
    snippets.executed.clear()
    snippets.launch(body.format("popc.b32 %r1, %r1;"))
    assert snippets.executed == {"setp.ne.u32", "bra", "prmt.b32", "mov.u32", "ret"}
    with pytest.raises(Exception, match="the kernel traps"):
        snippets.launch("clz.b32 %r1, %r1; trap;")
    assert "clz.b32" not in snippets.executed
    snippets.executed.update(before)


def test_all_modules_of_tests_are_known():
    assert sorted(snippets.TESTS) == sorted(path.stem for path in HERE.glob("test_instructions*.py"))


def test_an_opcode_without_a_test_is_found():
    text = f"{snippets.HEAD}.visible .entry kernel() {{ .reg .f32 %f<2>; bra over; sin.approx.f32 %f1, %f1; over: mov.f32 %f1, %f0; ret; }}"
    assert untested(Module(text)) == {"sin.approx.f32"}


def programs():
    """Of Triton's kernels a few for both targets, of which each multiplies with other instructions."""
    for arch, role in itertools.product((80, 90), ("nn", "tn")):
        for dtypes, precision in ((("bf16", "bf16", "fp32"), "ieee"), (("i8", "i8", "i32"), "ieee"), (("fp32", "fp32", "fp32"), "tf32x3")):
            problem = test_matmul.a_problem(role, (1, 150, 176, 336), dtypes, precision, arch)
            yield matmul, problem
    for arch in (80, 90):
        yield conv, test_conv.a_problem("fprop", dtypes=("fp16", "fp16", "fp16"), arch=arch)
        yield depthwise, test_depthwise.of_role(test_depthwise.CASES["3x3"], "wgrad", "bf16", arch=arch)


def test_kernels_of_triton():
    count = 0
    for kernel, problem in programs():
        assert kernel.supports(problem) is None
        made = compiled.compile_launch(kernel.launch(problem, kernel.pick(problem)), problem)
        assert not untested(Module(str(made.asm["ptx"])))
        count += 1
    assert count == 16
