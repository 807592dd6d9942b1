"""The opcodes, with their modifiers, that kernels may have: those that a test of instructions executes."""

import pathlib

import snippets

# A list of most of what our kernels have, so that nothing is to be run to know it: test_opcodes.py proves each entry.
TABLE = frozenset((pathlib.Path(__file__).parent / "opcodes.txt").read_text().split())


def untested(module) -> set[str]:
    """Those of a kernel's module that no test in test_instructions*.py executes."""
    assert module.kernels
    unlisted = {opcode for name in module.kernels for opcode, *_ in module.instructions(name)} - TABLE
    return unlisted - snippets.tested_opcodes(frozenset(unlisted))
