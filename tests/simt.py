"""The hand-written CUDA kernels, their launchers included, on a CPU: how the drivers in tests/csrc are built, and that of depthwise
convolutions is asked (simt_causal.py and simt_weight_only.py ask the others).

They are compiled by g++, with AddressSanitizer and UBSan; this needs no GPU and no CUDA.
"""

import dataclasses
import fcntl
import math
import os
import pathlib
import shutil
import subprocess

import ml_dtypes
import numpy as np
import pytest
from test_depthwise import ROLES, shape_of

ROOT = pathlib.Path(__file__).parent.parent
CXX = "g++"
FLAGS = [
    "-std=c++17",
    "-O1",
    "-g1",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-Wall",
    "-Wextra",
    "-Wno-unknown-pragmas",
]
DTYPES = {"fp32": np.float32, "bf16": ml_dtypes.bfloat16, "fp16": np.float16}
CODES = ["fp32", "bf16", "fp16"]  # jaxext::Dtype
EVERY_BLOCK = 2**63 - 1
FOUND = (  # what is said of broken kernels
    "AddressSanitizer|runtime error|simt: another order of threads|simt: some threads wait at a barrier|were never written, or are NaN"
    "|are wrong, the first at"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reply:
    code: int
    message: str
    vector: bool
    many: bool  # of several filters per channel of x
    window: bool
    line: bool
    taps: int  # of the kernel that was taken, 0 for any
    rows: int  # of the filter, for which a kernel on tensor cores is made, 0 for another
    grid: tuple[int, int, int]
    shared_bytes: int
    remembered: int  # the error that CUDA still knows of
    result: np.ndarray | None  # partial results added up; None where the problem was refused


def build(tmp_path_factory, broken: dict[str, str] | None = None, family: str = "depthwise") -> pathlib.Path:
    """The family's driver, made once for all workers; with `broken`, other texts for some of its files, of one dtype alone."""
    if not shutil.which(CXX):
        pytest.skip(f"{CXX} is not there")
    here = tmp_path_factory.getbasetemp()
    folder = here.parent if here.name.startswith("popen-") else here  # pytest-xdist gives each worker a folder of its own
    return _made(folder, broken, family)


def either(names, pieces) -> dict[str, str]:
    """The texts of these files of csrc, in which each piece, old, has beside it what takes its place where the environment's BROKEN is its
    number, new."""
    texts = {name: next((ROOT / "csrc").glob(f"*/{name}")).read_text() for name in names}
    for number, (old, new) in enumerate(pieces):
        assert sum(text.count(old) for text in texts.values()) == 1, f"{old!r} is not there, or more than once"
        statement = f"if (broken == {number}) {{\n{new}\n}} else {{\n{old}\n}}"
        choice = statement if ";" in old else f"(broken == {number} ? {new} : {old})"
        texts = {name: text.replace(old, choice) for name, text in texts.items()}
    broken = '#ifndef BROKEN\n#define BROKEN\nstatic const int broken = atoi(getenv("BROKEN"));\n#endif\n\nnamespace jaxext'
    return {name: text.replace("namespace jaxext", broken, 1) for name, text in texts.items()}


def _made(folder, broken, family):
    csrc, sound = ROOT / "csrc" / family, folder / f"simt-{family}"
    ones = {"weight_only": ("weight_only_bf16.cu",), "depthwise": ("depthwise_f32.cu", "depthwise_mma_bf16.cu")}
    replaced = *ones.get(family, (f"{family}_f32.cu",)), f"{family}.cc"
    home = folder / f"simt-{family}-broken" if broken else sound
    units = [*csrc.glob(f"{family}_*.cu"), csrc / f"{family}.cc", csrc / f"{family}_plan.cc", ROOT / f"tests/csrc/{family}_driver.cc"]
    others = []
    if broken:
        _made(folder, None, family)
        others = [sound / f"{unit.name}.o" for unit in units if unit.name not in replaced]
        units = [home / family / name for name in replaced]
    (home / family).mkdir(parents=True, exist_ok=True)
    with open(home / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (home / "driver").exists():
            for name in {*broken, *replaced} if broken else ():  # found before those of csrc
                (home / family / name).write_text(broken.get(name) or (csrc / name).read_text())
            _compile(units, home)
            _done(_start([CXX, *FLAGS, *others, *(home / f"{unit.name}.o" for unit in units), "-o", home / "linked"]))
            (home / "linked").rename(home / "driver")
    return home / "driver"


def _compile(units, home):
    """Side by side."""
    paths = [f"-I{path}" for path in (home, ROOT / "csrc", ROOT / "tests" / "csrc", ROOT / "tests" / "csrc" / "cuda")]
    for compiler in [_start([CXX, *FLAGS, *paths, "-x", "c++", "-c", unit, "-o", home / f"{unit.name}.o"]) for unit in units]:
        _done(compiler)


def _start(command):
    return subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE, text=True)


def _done(process):
    _, said = process.communicate()
    assert process.returncode == 0 and not said, said[:3000]


def run(
    driver, folder, asked, *, shifts=(0, 0, 0), dry=False, whole=None, blocks=EVERY_BLOCK, pending=0, refusal=0, environment=None
) -> list[Reply]:
    """The replies to (case, config, operands), from one process.  With `whole`, a problem, the operands and the result are the ends of its
    arrays, and zeros the rest."""
    request = [np.int64(len(asked)).tobytes()]
    results = []
    for case, config, operands in asked:
        problem, open_slot = whole or case, ROLES[case.role]
        slots = [*(slot for slot in ("x", "w", "y") if slot != open_slot), open_slot]
        dtypes = [*case.dtypes[:2], "fp32" if config.splits > 1 else case.dtypes[2]]
        result = shape_of(case, open_slot) if whole else (config.splits, *shape_of(case, open_slot))
        results.append((case, np.dtype(DTYPES[dtypes[2]]), result))
        itemsizes = [np.dtype(DTYPES[dtype]).itemsize for dtype in dtypes]
        sizes = [math.prod(shape_of(problem, slot)) * size for slot, size in zip(slots, itemsizes, strict=True)]
        carried = [*(operands[slot].nbytes for slot in slots[:2] if not dry), math.prod(result) * itemsizes[2]]
        numbers = [list(ROLES).index(problem.role), CODES.index(dtypes[0]), CODES.index(dtypes[2])]
        numbers += [problem.B, problem.N, problem.G, problem.C, problem.K, *problem.input, *problem.filter, *problem.output]
        numbers += [*problem.stride, *problem.low, *problem.input_dilation, *problem.filter_dilation]
        numbers += [config.lanes, config.strip, config.pieces, config.lines, config.splits, *shifts, dry, blocks, pending, refusal]
        numbers += [0] * 6 if dry else [*sizes[:2], sizes[2] * config.splits, *carried]
        arrays = [] if dry else [np.ascontiguousarray(operands[slot]).tobytes() for slot in slots[:2]]
        request += [np.array(numbers, np.int64).tobytes(), *arrays]
    (folder / "request").write_bytes(b"".join(request))
    command = [driver, folder / "request", folder / "response"]
    ran = subprocess.run(command, capture_output=True, text=True, env=os.environ | (environment or {}))
    assert ran.returncode == 0, ran.stderr[-4000:].split("Shadow bytes")[0]
    return list(_replies((folder / "response").read_bytes(), results, dry, parts=not whole))


def _replies(response, results, dry, parts):
    at = 0
    for case, dtype, shape in results:
        numbers = np.frombuffer(response, np.int64, 13, at).tolist()
        code, length, vector, many, window, line, taps, rows, x, y, z, shared, remembered = numbers
        message = response[at + 104 : at + 104 + length].decode()
        at += 104 + length
        result = None
        if not dry:
            result = np.frombuffer(response, dtype, math.prod(shape), at).reshape(shape)
            at += result.nbytes
            if parts:
                result = result.sum(axis=0, dtype=np.float32) if shape[0] > 1 else result[0]
            result = None if code else result.astype(DTYPES[case.dtypes[2]])
        yield Reply(
            code=code,
            message=message,
            vector=bool(vector),
            many=bool(many),
            window=bool(window),
            line=bool(line),
            taps=taps,
            rows=rows,
            grid=(x, y, z),
            shared_bytes=shared,
            remembered=remembered,
            result=result,
        )
