"""The portable CUDA kernels, their launchers included, on a CPU: how tests/csrc/driver.cc is built for a family, and called.

It is compiled by g++, with AddressSanitizer and UBSan; this needs no GPU and no CUDA.  Families are those of simt_families.py.
"""

import dataclasses
import fcntl
import json
import math
import os
import pathlib
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from cuda_cases import BYTES, CODES

ROOT = pathlib.Path(__file__).parent.parent
CXX = "g++"
FLAGS = "-std=c++17 -O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all -Wall -Wextra -Wno-unknown-pragmas".split()
FEW = {"depthwise": ("depthwise_f32.cu", "depthwise_mma_bf16.cu"), "causal": ("causal_f32.cu",), "weight_only": ("weight_only_bf16.cu",)}
EVERY_BLOCK = 2**63 - 1
FOUND = (  # messages about broken kernels
    "AddressSanitizer|runtime error|simt: another order of threads|simt: some threads wait at a barrier|simt: some threads of a warp"
    "|were never written, or are NaN|are wrong, the first at"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reply:
    code: int
    message: str
    kernel: tuple  # the one that was launched last: its name, and the numbers among its template arguments; or ()
    grid: tuple[int, int, int]
    shared_bytes: int
    remembered: int  # the error that CUDA still knows of
    results: list[np.ndarray]  # as `Family.results` has them; none if the call was refused, or has no operands


def build(folder: pathlib.Path, family: str, broken: Mapping[str, str] | None = None) -> pathlib.Path:
    """Build the family's driver, once for all workers; with `broken`, other texts for some of its files, in kernels of few dtypes."""
    if not shutil.which(CXX):
        pytest.skip(f"{CXX} is not there")
    csrc, home = ROOT / "csrc", folder / f"simt-{family}{'-broken' if broken else ''}"
    common = [path for path in csrc.glob("common/*.cc") if path.stem != "ffi"]
    units = [*csrc.glob(f"{family}/{family}*.cu"), *csrc.glob(f"{family}/*.cc"), *common, ROOT / "tests/csrc/driver.cc"]
    others = []
    if broken:
        sound = build(folder, family).parent
        few = [unit for unit in units if unit.name in (*FEW[family], f"{family}.cc")]
        others = [sound / f"{unit.name}.o" for unit in units if unit not in few]
        units = [home / family / unit.name if unit.name in broken else unit for unit in few]
    (home / family).mkdir(parents=True, exist_ok=True)
    with open(home / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (home / "driver").exists():
            for name, text in (broken or {}).items():  # found before those of csrc
                (home / family / name).write_text(text)
            paths = [f"-I{path}" for path in (home, csrc, ROOT / "tests/csrc", ROOT / "tests/csrc/cuda")]
            objects = [home / f"{unit.name}.o" for unit in units]
            compilers = [_start("-x", "c++", *paths, "-c", unit, "-o", made) for unit, made in zip(units, objects, strict=True)]
            for compiler in compilers:  # side by side
                _finish(compiler)
            _finish(_start("-rdynamic", *others, *objects, "-o", home / "linked"))  # dynamic symbols are the names of kernels
            (home / "linked").rename(home / "driver")
    return home / "driver"


def _start(*arguments):
    return subprocess.Popen([CXX, *FLAGS, *map(str, arguments)], stderr=subprocess.PIPE, text=True)


def _finish(process):
    _, errors = process.communicate()
    assert process.returncode == 0 and not errors, errors[:3000]


def either(names: Sequence[str], pieces: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return the texts of these files of csrc, in which each piece, old, has beside it what takes its place where the environment's BROKEN
    is its number, new."""
    texts = {name: next((ROOT / "csrc").glob(f"*/{name}")).read_text() for name in names}
    for number, (old, new) in enumerate(pieces):
        assert sum(text.count(old) for text in texts.values()) == 1, f"{old!r} is not there, or more than once"
        statement = f"if (broken == {number}) {{\n{new}\n}} else {{\n{old}\n}}"
        choice = statement if ";" in old else f"(broken == {number} ? {new} : {old})"
        texts = {name: text.replace(old, choice) for name, text in texts.items()}
    broken = '#ifndef BROKEN\n#define BROKEN\nstatic const int broken = atoi(getenv("BROKEN"));\n#endif\n\nnamespace jaxext'
    return {name: text.replace("namespace jaxext", broken, 1) for name, text in texts.items()}


@dataclasses.dataclass(frozen=True)
class Simulator:
    """Calls of a family's kernels in one test: a family of simt_families.py makes the case of a problem and a config."""

    builds: pathlib.Path
    folder: pathlib.Path

    def run(
        self, family, asked, *, driver=None, whole=None, shifts=None, blocks=EVERY_BLOCK, pending=0, refusal=0, broken=None
    ) -> list[Reply]:
        """Return the replies to (problem, config, operands), from one process.  Without operands nothing is run.

        With `whole`, a problem, operands and results are the ends of its arrays, and zeros the rest; of partial results, of the last one.
        `shifts`: bytes from a multiple of 16 at which arrays start.  `broken`: the number of the piece that a broken driver takes.
        """
        request, results = [f"{len(asked)}\n".encode()], []
        for problem, config, operands in asked:
            case = family.case(whole or problem, config)
            ends = family.case(problem, dataclasses.replace(config, splits=1) if whole else config)
            words = [case.target, int(not operands), blocks, pending, refusal, len(case.operands) + len(case.results)]
            for name, (dtype, shape) in case.arrays.items():
                carried = BYTES[dtype] * math.prod(ends.arrays[name][1])
                words += [int(name in case.results), CODES.index(dtype), carried, (shifts or {}).get(name, 0), len(shape), *shape]
            words.append(len(case.attributes))
            for name, value in case.attributes.items():
                words += [name, np.size(value), *np.ravel(value)]
            request.append((" ".join(map(str, words)) + "\n").encode())
            request += [np.ascontiguousarray(operands[name]).tobytes() for name in case.operands if operands]
            results.append({name: (dtype, ends.results[name][1]) for name, (dtype, _) in case.results.items() if operands})
        (self.folder / "request").write_bytes(b"".join(request))
        command = [driver or build(self.builds, family.name), self.folder / "request", self.folder / "response"]
        ran = subprocess.run(command, capture_output=True, text=True, env=os.environ | ({} if broken is None else {"BROKEN": str(broken)}))
        assert ran.returncode == 0, ran.stderr[-4000:].split("Shadow bytes")[0]
        with open(self.folder / "response", "rb") as response:
            return [_reply(response, family, problem, arrays) for (problem, *_), arrays in zip(asked, results, strict=True)]

    def launch(self, family, problem, config, operands=None, **options) -> Reply:
        return self.run(family, [(problem, config, operands or family.operands(problem, integers=True))], **options)[0]

    def plan(self, family, problem, config, **options) -> Reply:
        """Return what is launched, without running it."""
        return self.run(family, [(problem, config, None)], **options)[0]

    def check(self, family, cases, integers=True, **options) -> None:
        """Check the results of (problem, config)."""
        asked = [(problem, config, family.operands(problem, integers=integers)) for problem, config in cases]
        for (problem, config, operands), reply in zip(asked, self.run(family, asked, **options), strict=True):
            try:
                assert reply.code == 0, reply.message
                family.check(problem, reply.results, operands, integers)
            except AssertionError as error:
                raise AssertionError(f"{problem}, {config}: {error}") from None


def _reply(response, family, problem, arrays) -> Reply:
    reply = json.loads(response.readline())
    results = {
        name: np.frombuffer(response.read(BYTES[dtype] * math.prod(shape)), dtype).reshape(shape) for name, (dtype, shape) in arrays.items()
    }
    name, _, arguments = reply["kernel"].partition(">(")[0].partition("<")
    numbers = re.findall(r"(?:^| |\))(true|false|\d+)(?=$|,| )", arguments)
    reply |= dict(kernel=(name.rpartition(":")[2], *map(json.loads, numbers)) if name else (), grid=tuple(reply["grid"]))
    return Reply(**reply, results=family.results(problem, results) if results and not reply["code"] else [])
