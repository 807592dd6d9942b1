"""What the compiler makes of every Triton kernel, told without a GPU: registers, spills, shared memory, and the instructions that matter.

    python benchmarks/compiled.py [--kernel STEM] [--problem SUBSTRING] [--arch SM,SM] [--others none|picks|every] [--jobs N]
                                  [--json PATH] [--check]

Each problem of `kernel_problems.py` tagged "sweep" is compiled, in its roles and kinds of numbers, with every candidate configuration for
every architecture; the others with what the kernel picks on sm_90, or not at all, or like those.  A row tells one compilation; `LAWS` say
what is wrong with a row: a few bytes that are put down outside all loops are not.  With --check the exit status is 1 if anything is.  Speed
is not told: that takes a device.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import importlib
import itertools
import json
import multiprocessing
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any
from unittest import mock

import triton
from kernel_problems import PROBLEMS
from machine_code import access_bytes, instructions, tool
from triton import knobs
from triton.backends.compiler import GPUTarget

from jaxext.kernels._launch import BITS, SHARED_MEMORY, TENSOR_MEMORY

KERNELS = ("matmul", "conv", "depthwise")
ARCHS = (80, 90, 100)
SLOTS = "abcxwy"  # of all forms, in their order
RESTING = 16  # bytes per thread that may rest in local memory while a loop runs: so the assembler fits one more program on a multiprocessor

# An instruction's name in the disassembly -> the column in which it is counted.
MATH = {
    **dict.fromkeys(("HGMMA", "QGMMA", "IGMMA"), "wgmma"),
    **dict.fromkeys(("UTCHMMA", "UTCQMMA", "UTCIMMA"), "tcgen05"),
    **dict.fromkeys(("HMMA", "QMMA", "IMMA"), "mma"),
    **dict.fromkeys(("FFMA", "FFMA2"), "fma"),
}
_RESOURCES = re.compile(r"entry function '(\w+)'.* (\d+) bytes stack frame, (\d+) bytes spill stores.* Used (\d+) registers", re.DOTALL)
_DOT = re.compile(r"tt\.dot (?:.*inputPrecision = (\w+))?.*?: tensor<(?:1x)?(\d+)x(\d+)x(\w+)> \* tensor<(?:1x)?(\d+)x(\d+)x(\w+)>")


@dataclasses.dataclass(frozen=True)
class Program:
    """One compilation: a kernel's problem with one of its configurations."""

    kernel: str
    name: str  # of the problem in `kernel_problems.py`
    numbers: str
    problem: Any
    config: Any
    picked: bool


def programs(kernel: str = "", substring: str = "", archs: Collection[int] = (), others: str = "picks") -> Iterator[Program]:
    """What is to be compiled; problems that the kernel refuses are left out."""
    for case in PROBLEMS:
        if kernel not in ("", case.kernel) or substring not in case.name:
            continue
        module = importlib.import_module(f"jaxext.kernels.{case.kernel}")
        sweep = others == "every" or "sweep" in case.tags
        if others == "none" and not sweep:
            continue
        for role, numbers, arch in itertools.product(case.roles, case.numbers, archs or (ARCHS if sweep else (90,))):
            problem = case.problem(role, numbers, arch)
            if module.supports(problem) is None:
                pick = module.pick(problem)
                for config in module.candidates(problem) if sweep else [pick]:
                    yield Program(case.kernel, case.name, numbers, problem, config, config == pick)


def compile_row(program: Program) -> dict:
    """Compile one program and tell what came out of it."""
    problem = program.problem
    row = {
        "kernel": program.kernel,
        "problem": program.name,
        "role": problem.role,
        "numbers": program.numbers,
        "arch": problem.arch,
        "config": repr(program.config),
        "picked": program.picked,
    }
    start = time.perf_counter()
    try:
        launch = importlib.import_module(f"jaxext.kernels.{program.kernel}").launch(problem, program.config)
        compiled = compile_launch(launch, problem)
        row |= assembled(str(compiled.asm["ptx"]))
    except Exception as error:  # whatever stops a compilation is a finding
        return row | {"error": innermost(error)}
    return row | {
        "name": launch.name,
        "warps": launch.num_warps,
        "stages": launch.num_stages,
        "splits": launch.splits,
        "shared": compiled.metadata.shared,
        "tensor_memory": compiled.metadata.tmem_size,
        "dtypes": dtypes_of(problem, launch),
        "aligned": aligned(problem, launch),
        "dots": dots(str(compiled.asm["ttir"])),
        "seconds": round(time.perf_counter() - start, 2),
    }


def innermost(error: BaseException) -> str:
    """The cause of the cause, and of Triton's quotation of the source only its last line."""
    while error.__cause__:
        error = error.__cause__
    return f"{type(error).__name__}: {''.join(str(error).strip().splitlines()[-1:])}"


def dtypes_of(problem, launch) -> list[str]:
    """The dtypes of the kernel's three pointers."""
    of_slot = dict(zip(sorted(launch.operands, key=SLOTS.index), problem.dtypes, strict=False))
    partial = "i32" if problem.dtypes[2] == "i32" else "fp32"
    return [*(of_slot[slot] for slot in launch.operands), partial if launch.splits > 1 else problem.dtypes[2]]


def compile_launch(launch, problem) -> Any:
    """As jax-triton would, up to PTX: pointers are aligned to 16 bytes, all else is constant."""
    names = launch.kernel.arg_names
    signature = dict(zip(names, (f"*{dtype}" for dtype in dtypes_of(problem, launch)), strict=False))
    source = triton.compiler.ASTSource(
        launch.kernel,
        signature | dict.fromkeys(launch.constants, "constexpr"),
        constexprs={(names.index(name),): value for name, value in launch.constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in range(3)},
    )
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, "enable_fp_fusion": True}
    with mock.patch.object(knobs.runtime, "add_stages_inspection_hook", without_cubin):
        return triton.compile(source, target=GPUTarget("cuda", problem.arch, 32), options=options)


def without_cubin(backend=None, stages=None, *_) -> tuple[str, str]:
    """Triton asks for a key to its cache, or to look over the stages of a compilation.

    Its assembler is left out: jaxlib runs its own, without Triton's option --regAllocOptLevel, which spills here and there.
    """
    if stages is not None:
        stages["cubin"] = lambda ptx, metadata: b""
    return "without cubin", "without cubin"


def aligned(problem, launch) -> bool:
    """Whether every run of consecutive elements that a kernel reads starts and ends at a multiple of 16 bytes.

    A depthwise filter's runs are its taps: they are few, and not counted.
    """
    if hasattr(problem, "M"):
        runs = {"a": problem.K, "b": problem.N, "c": problem.N}
    elif problem.C == 1 and problem.G > 1:
        stepping = problem.role == "dgrad" and problem.K > 1  # over a multiplier's outputs, which lie between those of the groups
        runs = {"x": problem.G, "y": 1 if stepping else problem.G * problem.K, "w": 0}
    else:
        runs = {"x": problem.C, "y": problem.K, "w": problem.C}
    return all(runs[slot] * BITS[dtype] % 128 == 0 for slot, dtype in zip(launch.operands, dtypes_of(problem, launch), strict=False))


def dots(ttir: str) -> list[dict]:
    """The products of tiles that the kernel asks for."""
    return [
        {"rows": int(m), "columns": int(n), "depth": int(k), "dtype": dtype, "precision": precision or "ieee"}
        for precision, m, k, dtype, _, n, _ in sorted(set(_DOT.findall(ttir)))
    ]


def assembled(ptx: str) -> dict:
    """Resources of the machine code, and its instructions counted: loads by their bytes, tensor cores by their generation."""
    target = re.search(r"^\.target (sm_\w+)", ptx, re.MULTILINE)
    assert target
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = (pathlib.Path(folder, name) for name in ("kernel.ptx", "kernel.cubin"))
        source.write_text(ptx)
        # the newer of the two assemblers in Triton's wheel, which knows all architectures
        told = tool("ptxas-blackwell", "-v", f"--gpu-name={target[1]}", source, "-o", cubin)
        code = tool("cuobjdump", "-sass", cubin)
    resources = _RESOURCES.search(told)
    assert resources, told
    loads, math, local, loops = collections.Counter(), collections.Counter(), [], []
    for place, opcode, modifiers, rest in instructions(code):
        if opcode in ("LDG", "LDGSTS"):
            loads[access_bytes(modifiers)] += 1
        elif opcode in ("LDL", "STL"):
            local.append(place)
        elif opcode == "BRA" and (target := re.search(r"0x([0-9a-f]+)", rest)):
            loops.append(range(int(target[1], 16), place))  # empty if it leads forward
        elif opcode in MATH:
            math[MATH[opcode]] += 1
    return {
        "function": resources[1],
        "registers": int(resources[4]),
        "local": int(resources[2]),
        "spills": int(resources[3]),
        "spills_in_loops": sum(any(place in loop for loop in loops) for place in local),
        "loads": {str(width): loads[width] for width in sorted(loads, reverse=True)},
        **{kind: math[kind] for kind in dict.fromkeys(MATH.values())},
    }


def loads_narrowly(row: dict) -> bool:
    """Whether operands that could be read 16 bytes at a time are not.

    A tile must have that much for every thread.  Only tiles of half precision go into shared memory as they lie: others are turned on their
    way where the tensor cores read them along the depth alone, in pieces of 4 or 8 bytes, so of those one wide load is all that is asked.
    """
    sizes = [BITS[dtype] // 8 for dtype in row["dtypes"][:2]]
    least = 16 * 32 * row["warps"] // min(sizes)
    if not row["aligned"] or any(min(dot["rows"], dot["columns"]) * dot["depth"] < least for dot in row["dots"]):
        return False
    if row["dots"] and sizes == [2, 2]:
        return set(row["loads"]) != {"16"}
    return "16" not in row["loads"]


def misses_tensor_cores(row: dict) -> bool:
    """Whether a product of tiles is not made by the tensor cores that Triton has for it; float32's own products have none.

    Hopper's wgmma takes 64 rows per warp group, so a tile needs that many, and warps in fours; Blackwell's tcgen05 likewise, and 16
    columns.  All else goes to mma, as on Ampere; and so may what is not of half precision, of which some must be there.
    """
    newest, columns = {90: ("wgmma", 8), 100: ("tcgen05", 16)}.get(row["arch"], ("mma", 1))

    def made(dot: dict) -> bool:
        if dot["dtype"] == "f32" and dot["precision"] == "ieee":
            return True
        if dot["dtype"] not in ("bf16", "f16"):
            return row["wgmma"] + row["tcgen05"] + row["mma"] > 0
        return row[newest if dot["rows"] % 64 == dot["columns"] % columns == row["warps"] % 4 == 0 else "mma"] > 0

    return not all(made(dot) for dot in row["dots"])


# What no kernel may do -> whether a row does it.
LAWS: dict[str, Callable[[dict], bool]] = {
    "does not compile": lambda row: "error" in row,
    "spills": lambda row: row["spills"] > RESTING,
    "spills in a loop": lambda row: row["spills_in_loops"] > 0,
    "has local memory": lambda row: row["local"] > RESTING,
    "shared memory over the limit": lambda row: row["shared"] > SHARED_MEMORY[row["arch"]],
    "tensor memory over the limit": lambda row: row["tensor_memory"] > TENSOR_MEMORY,
    "not named after its primitive": lambda row: row["function"] != row["name"],
    "not on the tensor cores that it could use": misses_tensor_cores,
    "no products of tiles": lambda row: row["kernel"] != "depthwise" and not row["dots"],
    "narrow loads": loads_narrowly,
}


def offences(row: dict) -> list[str]:
    if "error" in row:
        return ["does not compile"]
    return [law for law, broken in LAWS.items() if broken(row)]


COLUMNS = {"registers": 10, "local": 6, "spills": 7, "shared": 7, "tensor_memory": 14, "wgmma": 6, "tcgen05": 8, "mma": 4, "fma": 5}
HEADER = f"{'':52}{'sm':>4}" + "".join(f"{name:>{width}}" for name, width in COLUMNS.items()) + "  loads"


def line(row: dict) -> str:
    where = f"{row['kernel']:10}{row['role']:6}{row['problem']:26}{row['numbers']:10}{row['arch']:>4}"
    config = f"  {'*' if row['picked'] else ' '} {row['config']}"
    if "error" in row:
        return f"{where}  {row['error']}{config}"
    numbers = "".join(f"{row[name]:>{width}}" for name, width in COLUMNS.items())
    loads = " ".join(f"{count}x{width}" for width, count in row["loads"].items())
    return f"{where}{numbers}  {loads:14}{config}" + "".join(f"  !! {law}" for law in offences(row))


def environment() -> dict:
    here = pathlib.Path(__file__).parent
    commit = subprocess.run(["git", "-C", here, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {
        "versions": {"python": sys.version.split()[0], "triton": triton.__version__},
        "commit": commit or None,
        "command": " ".join(["python", *sys.argv]),
    }


def collect(todo: list[Program], jobs: int) -> Iterator[dict]:
    """The rows, in order.  Nothing comes out of Triton's cache, which does not see when a method of a `Problem` changes."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        with concurrent.futures.ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
            yield from pool.map(compile_row, todo)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", default="", choices=("", *KERNELS), help="only this kernel's problems")
    parser.add_argument("--problem", default="", help="only problems whose names contain this")
    parser.add_argument("--arch", default="", help="only these compute capabilities times ten, with commas between")
    parser.add_argument("--others", default="picks", choices=("none", "picks", "every"), help="'every' takes an hour on two cores")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--json", type=pathlib.Path, help="write the rows there")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a row breaks a law")
    options = parser.parse_args()
    archs = [int(arch) for arch in options.arch.split(",") if arch]
    todo = list(programs(options.kernel, options.problem, archs, options.others))
    if not todo:
        parser.error("no such problem")
    print(HEADER)
    rows = []
    for row in collect(todo, options.jobs):
        rows.append(row)
        print(line(row), flush=True)
    bad = [row for row in rows if offences(row)]
    print(f"{len(rows)} compiled, {len(bad)} bad")
    for row in bad if options.check else []:
        print(line(row))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(environment() | {"rows": rows}, indent=1) + "\n")
    return 1 if options.check and bad else 0


if __name__ == "__main__":
    sys.exit(main())
