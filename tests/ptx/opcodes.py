"""The opcodes, with their modifiers, that kernels may have: those that a test of instructions executes."""

import functools
import importlib
import inspect
import itertools
import pathlib

import pytest
import snippets
from cpp import shared_file
from interpreter import HERE, texts


def untested(module) -> set[str]:
    """Return those of a kernel's module that no test in test_instructions*.py executes."""
    assert module.kernels
    return {opcode for name in module.kernels for opcode, *_ in module.instructions(name)} - tested()


@functools.cache
def tested() -> frozenset[str]:
    """Return what the tests of instructions execute: they run here once, and a file tells other processes."""
    sources = texts("*.cc", "*.h", "test_instructions*.py", "snippets.py", "interpreter.py")
    return frozenset(shared_file("opcodes", sources, _run_tests).read_text().split())


def _run_tests(made: pathlib.Path):
    snippets.executed.clear()
    for path in sorted(HERE.glob("test_instructions*.py")):
        for test in vars(importlib.import_module(path.stem)).values():
            if inspect.isfunction(test) and test.__name__.startswith("test_"):
                for arguments in _rows(test):
                    test(**arguments)
    made.write_text("\n".join(sorted(snippets.executed)))


def _rows(test):
    """Arguments of each of a parametrised test's rows."""
    tables = []
    for mark in getattr(test, "pytestmark", []):
        if mark.name == "parametrize":
            names = [name.strip() for name in mark.args[0].split(",")]
            rows = [row.values if isinstance(row, type(pytest.param())) else row if len(names) > 1 else [row] for row in mark.args[1]]
            tables.append([dict(zip(names, row, strict=True)) for row in rows])
    for combination in itertools.product(*tables):
        yield functools.reduce(dict.__or__, combination, {})
