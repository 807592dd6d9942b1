"""Finds registers that an instruction writes while a pending `wgmma` still reads its left factor from them.

Hopper's `wgmma` runs asynchronously.  Its left factor may lie in registers, which nothing may write until a wait (`WARPGROUP.DEPBAR`) says
that the multiplication is done.  Compilers have broken this rule (triton-lang/triton#9433), and results are then wrong now and then.
The machine code is followed along both ways of each branch, with the factors that are pending there, until nothing new is met.

    python -m benchmarks.register_hazards [--kernel matmul] [--module _cuda_module.so] [--jobs 2]

scans the picks of the Triton kernels for 9.0, or the kernels of a compiled CUDA module, and exits with 1 if it finds such a write.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterator

from jaxext.bench import triton_ptx
from jaxext.bench.machine_code import Instruction, functions, instructions, tool

from . import compiled

MULTIPLIES = ("HGMMA", "QGMMA", "IGMMA")
FACTOR = 4  # registers of a left factor, whatever its dtype
# What names a register first and does not write it.
READS = ("BAR", "BRX", "CALL", "JMX", "NANOSLEEP", "R2B", "R2P", "RET", "WARPSYNC")
MOST_GROUPS = 16  # of pending wgmma, which the scan distinguishes

# Of pending multiplications, the registers of left factors: those of each committed group, and at the end those of no group yet.
Pending = tuple[frozenset[int], ...]
NOTHING: Pending = (frozenset(),)


@dataclasses.dataclass(frozen=True)
class Scan:
    """The findings in one kernel's machine code."""

    factors: int  # instructions that read a left factor from registers
    hazards: tuple[str, ...]  # instructions that write to one while it is read


def scan(code: str) -> Scan:
    """Follow the disassembly of one function."""
    listed = list(instructions(code))
    if (factors := sum(_factor(instruction) is not None for instruction in listed)) == 0:
        return Scan(0, ())
    places = {instruction.place: n for n, instruction in enumerate(listed)}
    hazards: dict[str, None] = {}
    seen: set[tuple[int, Pending]] = set()
    todo = [(0, NOTHING)]
    while todo:
        n, pending = todo.pop()
        while n < len(listed) and (n, pending) not in seen:
            seen.add((n, pending))
            instruction = listed[n]
            if written := _written(instruction) & frozenset().union(*pending):
                registers = ", ".join(f"R{register}" for register in sorted(written))
                hazards[f"{instruction.place:#x}: {instruction} writes {registers}"] = None
            pending = _after(instruction, pending)
            todo += [(places[target], pending) for target in _targets(instruction) if target in places]
            if not instruction.predicate and instruction.name in ("BRA", "EXIT", "RET", "BRX", "JMP"):
                break
            n += 1
    return Scan(factors, tuple(hazards))


def _after(instruction: Instruction, pending: Pending) -> Pending:
    """The factors that are pending behind an instruction."""
    if instruction.name in MULTIPLIES:
        *groups, open = pending
        factor = _factor(instruction)
        open |= frozenset() if factor is None else frozenset(range(factor, factor + FACTOR))
        if "gsb0" not in instruction.operands:
            return *groups, open
        if len(groups) == MOST_GROUPS:
            groups[:2] = [groups[0] | groups[1]]
        return *groups, open, frozenset()
    if instruction.name == "WARPGROUP" and "DEPBAR" in instruction.modifiers and "gsb0" in instruction.operands:
        left = int(instruction.operands.rpartition(",")[2], 16)
        *groups, open = pending
        return *groups[max(0, len(groups) - left) :], open
    return pending


def _factor(instruction: Instruction) -> int | None:
    """The first register of a multiplication's left factor; None if that lies in shared memory."""
    if instruction.name not in MULTIPLIES:
        return None
    left = re.match(r"\s*R\d+,\s*R(\d+)", instruction.operands)
    return int(left[1]) if left else None


def _written(instruction: Instruction) -> frozenset[int]:
    """The registers that an instruction writes.  Those of sums are none here: multiplications wait for one another."""
    name, modifiers = instruction.name, instruction.modifiers
    first = re.match(r"\s*(?:U?PT?\d*,\s*)*R(\d+)\b", instruction.operands)
    if not first or name in (*MULTIPLIES, *READS) or "SETP" in name or name == "FCHK":
        return frozenset()
    if name == "LDSM":
        count = int(modifiers[-1]) if modifiers[-1] in ("2", "4") else 1
    elif name in ("HMMA", "IMMA", "QMMA"):
        count = 2 if modifiers[-1] == "F16" else 4
    elif "128" in modifiers:
        count = 4
    elif name == "CS2R":
        count = 1 if "32" in modifiers else 2
    else:
        count = 2 if name.startswith("D") or {"64", "WIDE", "F64", "S64", "U64"} & {*modifiers} else 1
    return frozenset(range(int(first[1]), int(first[1]) + count))


def _targets(instruction: Instruction) -> Iterator[int]:
    if instruction.name in ("BRA", "JMP") and (target := re.search(r"0x([0-9a-f]+)", instruction.operands)):
        yield int(target[1], 16)


def scan_program(program: compiled.Program) -> tuple[str, Scan]:
    """Compile one of Triton's kernels and scan its machine code."""
    launch = importlib.import_module(f"jaxext.kernels.{program.kernel}").launch(program.problem, program.config)
    _, disassembly = compiled.machine_code(str(triton_ptx.compile_launch(launch, program.problem).asm["ptx"]))
    (code,) = functions(disassembly).values()
    return f"{launch.name} {program.name}, {program.numbers}, {program.config}", scan(code)


def scan_module(module: pathlib.Path) -> Iterator[tuple[str, Scan]]:
    """Scan the kernels for 9.0a in a compiled CUDA module."""
    with tempfile.TemporaryDirectory() as folder:
        tool("cuobjdump", "-xelf", "sm_90a", module.resolve(), cwd=folder)
        for cubin in sorted(pathlib.Path(folder).glob("*.cubin")):
            for name, code in functions(tool("cuobjdump", "-sass", cubin)).items():
                yield name, scan(code)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.register_hazards", description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--kernel", default="", help="only this file of kernels/")
    parser.add_argument("--module", type=pathlib.Path, help="the compiled CUDA module instead of Triton's kernels")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    picks = (program for program in compiled.programs(options.kernel, archs=(90,)) if program.picked)
    found = scan_module(options.module) if options.module else compiled.compile_all(picks, options.jobs, scan_program)
    kernels = factors = bad = 0
    for name, result in found:
        kernels, factors, bad = kernels + 1, factors + (result.factors > 0), bad + bool(result.hazards)
        for hazard in result.hazards:
            print(f"{name}: {hazard}")
    print(f"{kernels} kernels, {factors} with left factors in registers, {bad} that write to one while it is read")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
