"""The opcodes, with their modifiers, of the kernels that the tests run: a listed table, each entry of which a test of instructions executes."""

import pathlib

TABLE = frozenset((pathlib.Path(__file__).parent / "opcodes.txt").read_text().split())


def untested(module) -> set[str]:
    """Those of a kernel's module that the table has not: without a test in test_instructions*.py no kernel may have them."""
    assert module.kernels
    return {opcode for name in module.kernels for opcode, *_ in module.instructions(name)} - TABLE
