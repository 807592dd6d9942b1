"""The package's list of tested opcodes is of those that a test in test_instructions*.py executes: this file, as a script, writes it."""

import functools
import importlib
import inspect
import itertools
import pathlib

import pytest
import snippets
from ptxsim import Module, module, verified_opcodes

HERE = pathlib.Path(__file__).parent


def executed() -> set[str]:
    """Run each test of instructions, and return what they execute."""
    snippets.executed.clear()
    for path in sorted(HERE.glob("test_instructions*.py")):
        for name, test in vars(importlib.import_module(path.stem)).items():
            if name.startswith("test_") and inspect.isfunction(test):
                for arguments in rows(test):
                    test(**arguments)
    return snippets.executed


def rows(test):
    """Arguments of each of a parametrised test's rows."""
    tables = []
    for mark in getattr(test, "pytestmark", []):
        if mark.name == "parametrize":
            names = [name.strip() for name in mark.args[0].split(",")]
            tables.append([dict(zip(names, row if len(names) > 1 else [row], strict=True)) for row in mark.args[1]])
    for combination in itertools.product(*tables):
        yield functools.reduce(dict.__or__, combination, {})


def test_the_list_is_of_what_the_tests_of_instructions_execute():
    assert verified_opcodes() == executed(), f"run python {__file__}, which writes the list"


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
    text = (
        f"{snippets.HEAD}.visible .entry kernel() {{ .reg .b16 %h<2>; bra over; tanh.approx.f16 %h1, %h1; over: mov.b16 %h1, %h0; ret; }}"
    )
    assert Module(text).unverified_opcodes() == {"tanh.approx.f16"}


if __name__ == "__main__":
    module.OPCODES.write_text("\n".join(sorted(executed())) + "\n")
