"""Compiles every Triton kernel without a GPU and reports registers, spills, shared memory, and the important instructions.

Each problem of the suite tagged "sweep" is compiled in its roles and kinds of numbers, with every candidate config, for every architecture.
The `others` are compiled with the config picked on sm_90, in the same way, or not at all.  A row describes one compilation.  `LAWS` say
what is wrong with a row; a few bytes spilled outside of all loops are allowed.  Speed needs a device and is not reported.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import hashlib
import importlib
import importlib.util
import itertools
import json
import multiprocessing
import os
import pathlib
import pkgutil
import re
import signal
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any
from unittest import mock

import jaxext
from jaxext import kernels
from jaxext.bench.machine_code import access_bytes, instructions, tool
from jaxext.bench.triton_ptx import compile_launch, dtypes_of
from jaxext.kernels.launch import BITS, SHARED_MEMORY, TENSOR_MEMORY
from jaxext.verify import cases

from .alignment import aligned, widest
from .kernel_problems import COMPILED, KERNELS

ARCHS = (80, 90, 100)
RESTING = 16  # bytes per thread that may rest in local memory while a loop runs: so the assembler fits one more program on a multiprocessor

# An instruction's name in the disassembly -> the column in which it is counted.
MATH = {
    **dict.fromkeys(("HGMMA", "QGMMA", "IGMMA"), "wgmma"),
    **dict.fromkeys(("UTCHMMA", "UTCQMMA", "UTCIMMA"), "tcgen05"),
    **dict.fromkeys(("HMMA", "QMMA", "IMMA"), "mma"),
    **dict.fromkeys(("FFMA", "FFMA2"), "fma"),
}
# The facts of a row that need no compiler: `described` and `facts`.
ASKED = "kernel problem role numbers arch config picked name warps stages splits dtypes aligned widest".split()
_RESOURCES = re.compile(r"entry function '(\w+)'.* (\d+) bytes stack frame, (\d+) bytes spill stores.* Used (\d+) registers", re.DOTALL)
_DOT = re.compile(r"tt\.dot (?:.*inputPrecision = (\w+))?.*?: tensor<(?:1x)?(\d+)x(\d+)x(\w+)> \* tensor<(?:1x)?(\d+)x(\d+)x(\w+)>")


@dataclasses.dataclass(frozen=True)
class Program:
    """One compilation: a kernel's problem with one of its configurations."""

    kernel: str
    name: str  # of the problem in the suite
    numbers: str
    problem: Any
    config: Any
    picked: bool


def programs(kernel: str = "", substring: str = "", archs: Collection[int] = (), others: str = "picks") -> Iterator[Program]:
    """The programs to compile, without problems that the kernel refuses: of the suite, and of operations that it lacks."""
    for case in COMPILED:
        if kernel not in ("", case.kernel) or substring not in case.name:
            continue
        module = importlib.import_module(f"jaxext.kernels.{case.kernel}")
        sweep = others == "every" or "sweep" in case.tags
        if others == "none" and not sweep:
            continue
        for role, numbers, arch in itertools.product(case.products, case.numbers, archs or (ARCHS if sweep else (90,))):
            problem = case.problem(role, numbers, arch)
            if module.refuses(problem) is None:
                pick = module.candidates(problem)[0]
                for config in module.candidates(problem) if sweep else [pick]:
                    yield Program(case.kernel, case.name, numbers, problem, config, config == pick)
    lacking = {module.name for module in pkgutil.iter_modules(kernels.__path__) if module.ispkg} - {*KERNELS}
    for arch in archs or (90,):
        with jaxext.use_target(f"sm_{arch}"):
            sampled, _ = cases.listed(cases.contacts(lacking), "cuda", ["triton"])
        for sample in sampled:
            if kernel in ("", sample.family) and substring in sample.contact:
                plan: Any = sample.plan
                yield Program(sample.family, sample.contact, sample.kind.rpartition(" ")[2], plan.problem, sample.config, True)


def compile_row(program: Program) -> dict:
    """Compile one program and return its row."""
    problem, row = program.problem, described(program)
    start = time.perf_counter()
    try:
        launch = importlib.import_module(f"jaxext.kernels.{program.kernel}").launch(problem, program.config)
        compiled = compile_launch(launch, problem)
        row |= assembled(str(compiled.asm["ptx"]))
    except Exception as error:  # whatever stops a compilation is a finding
        return row | {"error": innermost(error)}
    return row | {
        **facts(problem, launch),
        "shared": compiled.metadata.shared,
        "tensor_memory": compiled.metadata.tmem_size,
        "dots": dots(str(compiled.asm["ttir"])),
        "seconds": round(time.perf_counter() - start, 2),
    }


def described(program: Program) -> dict:
    return {
        "kernel": program.kernel,
        "problem": program.name,
        "role": getattr(program.problem, "role", program.problem.name),
        "numbers": program.numbers,
        "arch": program.problem.arch,
        "config": repr(program.config),
        "picked": program.picked,
    }


def facts(problem, launch) -> dict:
    """The facts of a row that need no compiler."""
    return {
        "name": launch.name,
        "warps": launch.num_warps,
        "stages": launch.num_stages,
        "splits": launch.splits,
        "dtypes": dtypes_of(problem, launch),
        "aligned": aligned(problem, launch),
        "widest": widest(problem, launch),
    }


def digests(row: dict) -> tuple[str, str]:
    """Return two hashes of a row: of the kernel that is compiled, with its launch, and of what the compiler makes of it."""
    asked = {name: value for name, value in row.items() if name in ASKED}
    made = {name: value for name, value in row.items() if name not in (*ASKED, "seconds")}
    first, second = (hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest()[:10] for part in (asked, made))
    return first, second


def innermost(error: BaseException) -> str:
    """The innermost cause of an error, with only the last line of Triton's quotation of the source."""
    while error.__cause__:
        error = error.__cause__
    return f"{type(error).__name__}: {''.join(str(error).strip().splitlines()[-1:])}"


def dots(ttir: str) -> list[dict]:
    """The tile products in the kernel's code."""
    return [
        {"rows": int(m), "columns": int(n), "depth": int(k), "dtype": dtype, "precision": precision or "ieee"}
        for precision, m, k, dtype, _, n, _ in sorted(set(_DOT.findall(ttir)))
    ]


def machine_code(ptx: str) -> tuple[str, str]:
    """Return the assembler's report and the disassembly of PTX."""
    target = re.search(r"^\.target (sm_\w+)", ptx, re.MULTILINE)
    assert target
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = (pathlib.Path(folder, name) for name in ("kernel.ptx", "kernel.cubin"))
        source.write_text(ptx)
        # the newer of the two assemblers in Triton's wheel, which knows all architectures
        printed = tool("ptxas-blackwell", "-v", f"--gpu-name={target[1]}", source, "-o", cubin)
        return printed, tool("cuobjdump", "-sass", cubin)


def assembled(ptx: str) -> dict:
    """The resources of the machine code and its instruction counts: loads by width, tensor core instructions by generation."""
    printed, code = machine_code(ptx)
    resources = _RESOURCES.search(printed)
    assert resources, printed
    loads, stores, made, local, loops = collections.Counter(), collections.Counter(), collections.Counter(), [], []
    for place, opcode, modifiers, rest, _ in instructions(code):
        if opcode in ("LDG", "LDGSTS"):
            loads[access_bytes(modifiers)] += 1
        elif opcode == "STG":
            stores[access_bytes(modifiers)] += 1
        elif opcode in ("LDL", "STL"):
            local.append(place)
        elif opcode == "BRA" and (target := re.search(r"0x([0-9a-f]+)", rest)):
            loops.append(range(int(target[1], 16), place))  # empty if it leads forward
        elif opcode in MATH:
            made[MATH[opcode]] += 1
    return {
        "function": resources[1],
        "registers": int(resources[4]),
        "local": int(resources[2]),
        "spills": int(resources[3]),
        "spills_in_loops": sum(any(place in loop for loop in loops) for place in local),
        "loads": {str(width): loads[width] for width in sorted(loads, reverse=True)},
        "stores": {str(width): stores[width] for width in sorted(stores, reverse=True)},
        **{kind: made[kind] for kind in dict.fromkeys(MATH.values())},
    }


def loads_narrowly(row: dict) -> bool:
    """Return whether some operands that could be read 16 bytes at a time are not.

    A tile must have 16 bytes for every thread.  Only tiles of half precision are copied to shared memory unchanged.  Others are transposed
    on the way, in pieces of 4 or 8 bytes, if the tensor cores need the depth contiguous.  For these, and for kernels with an epilogue,
    whose bias is a single row, one wide load suffices.
    """
    sizes = [BITS[dtype] // 8 for dtype in row["dtypes"][:2]]
    least = 16 * 32 * row["warps"] // min(sizes)
    if not row["aligned"] or any(min(dot["rows"], dot["columns"]) * dot["depth"] < least for dot in row["dots"]):
        return False
    if row["dots"] and sizes == [2, 2] and len(row["dtypes"]) == 3:
        return set(row["loads"]) != {"16"}
    return "16" not in row["loads"]


def reaches_too_wide(row: dict) -> bool:
    """Return whether an access is wider than the alignment of odd rows allows, a fault on a GPU that the interpreter cannot find."""
    return any(int(width) > most for kind, most in zip(("loads", "stores"), row["widest"], strict=True) for width in row[kind])


def misses_tensor_cores(row: dict) -> bool:
    """Return whether a tile product does not use the tensor core instruction that Triton has for it.  Exact float32 products have none.

    Hopper's wgmma takes 64 rows per warp group, so a tile needs 64 rows and a multiple of four warps; Blackwell's tcgen05 also needs 16
    columns.  Other tiles use mma, as on Ampere.  Products that are not of half precision may use either, but must use one.
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
    "no products of tiles": lambda row: row["kernel"] in {*KERNELS} - {"depthwise", "causal"} and not row["dots"],
    "narrow loads": loads_narrowly,
    "misaligned accesses": reaches_too_wide,
}


def offences(row: dict) -> list[str]:
    if "error" in row:
        return ["does not compile"]
    return [law for law, broken in LAWS.items() if broken(row)]


COLUMNS = ("registers", "local", "spills", "shared", "tensor_memory", "wgmma", "tcgen05", "mma", "fma")
NAME = max(len(case.name) for case in COMPILED) + 1
HEADER = f"{'':{NAME + 33}}{'sm':>4}" + " ".join(("", *COLUMNS, " loads"))


def line(row: dict) -> str:
    where = f"{row['kernel']:14}{row['role']:9}{row['problem']:{NAME}}{row['numbers']:10}{row['arch']:>4}"
    config = f"  {'*' if row['picked'] else ' '} {row['config']}"
    if "error" in row:
        return f"{where}  {row['error']}{config}"
    numbers = "".join(f" {row[name]:>{len(name)}}" for name in COLUMNS)
    loads = " ".join(f"{count}x{width}" for width, count in row["loads"].items())
    return f"{where}{numbers}  {loads:14}{config}" + "".join(f"  !! {law}" for law in offences(row))


def compile_all(todo: Iterable[Program], jobs: int, compile: Callable[[Program], Any] = compile_row) -> Iterator[Any]:
    """The rows, in order.  Nothing comes out of Triton's cache, which does not see when a method of a `Problem` changes."""
    deaf: Any = dict(initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN))  # Ctrl-C is for who waits for them
    with tempfile.TemporaryDirectory() as cache, mock.patch.dict(os.environ, TRITON_CACHE_DIR=cache):
        with concurrent.futures.ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), **deaf) as pool:
            yield from pool.map(compile, todo)
