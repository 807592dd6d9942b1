"""The times that the kernels' models predict for the suite, on each GPU whose rates are known, and beside them the measured times.

    python -m jaxext.benchmarks.predictions
    python -m jaxext.benchmarks.predictions benchmarks/results/h100.json --out docs/predictions.md

The time of a pick is that of its model (`clocks`), or that of moving the arrays if this is longer.  The second command takes a report of
the benchmark, and also tells for each family by how much its kernels took longer.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import math
import pathlib
import statistics
import sys
from collections.abc import Iterator
from typing import Any

from jaxext.backends.cuda.cuda_binding import missing
from jaxext.kernels.launch import BITS
from jaxext.kernels.machine import machine
from jaxext.ops.conv.cuda import CudaConv
from jaxext.ops.conv.triton import TritonConv
from jaxext.ops.matmul.cuda import CudaMatmul
from jaxext.ops.matmul.triton import TritonMatmul
from jaxext.ops.ragged.cuda import CudaRagged
from jaxext.ops.ragged.triton import TritonRagged

from .problems import PRODUCTS
from .report import Report, read

KERNELS: dict[str, Any] = {
    "matmul": (TritonMatmul, CudaMatmul),
    "ragged": (TritonRagged, CudaRagged),
    "conv": (TritonConv, CudaConv),
    "depthwise": (TritonConv, CudaConv),
}
LIBRARIES = ("triton", "cuda")
COLUMNS = ((80, "triton"), (90, "triton"), (90, "cuda"), (100, "triton"))  # CUDA's kernels for others are few
OPEN = {"nn": 2, "nt": 0, "tn": 1, "fprop": 2, "dgrad": 0, "wgrad": 1}  # the result's place among the slots
HEAD = """# What the models predict

Each family of kernels has a [model of its time](performance-log.md#what-the-models-expect), by which it orders its configurations.
This is what the models predict for the picks on every row of the suite, in microseconds, with nothing but the rates of
[kernels/machine.py](../kernels/machine.py). A report of the benchmark fills the last two columns, and tells how far off each family's
model is. `python -m jaxext.benchmarks.predictions benchmarks/results/h100.json --out docs/predictions.md` makes this page.
"""


def predictions(tag: str = "", arch: int = 90, device: str = "") -> Iterator[tuple[str, str, dict[str, float]]]:
    """Yield for each row of the benchmark (of problems with the tag) its name, its family, and library -> expected microseconds."""
    for problem in PRODUCTS:
        for case in problem.cases(problem.products) if not tag or tag in problem.tags else ():
            asked = dataclasses.replace(problem.problem(case.role, case.numbers, arch), device=device)
            took = {kind.name: _microseconds(asked, kind()) for kind in KERNELS[problem.kernel] if _takes(kind, asked)}
            yield case.name, problem.kernel, took


def _takes(kind, asked) -> bool:
    return not (kind.name == "cuda" and missing()) and kind().refuses_problem(asked) is None


def _microseconds(asked, implementation) -> float:
    config, gpu = implementation.configs(asked)[0], machine(asked.arch, asked.device)
    model = importlib.import_module(type(config).__module__)
    slots = list("abc" if asked.name.startswith("matmul") else "xwy")
    slots.append(slots.pop(OPEN[asked.role]))
    moved = sum(math.prod(asked.shapes[slot]) * BITS[dtype] // 8 for slot, dtype in zip(slots, asked.dtypes, strict=True))
    return gpu.seconds(max(model.clocks(asked, config), gpu.moving(moved))) * 1e6


def page(report: Report | None, tag: str = "") -> Iterator[str]:
    """The lines of docs/predictions.md."""
    arch = report.environment.get("capability") or 90 if report else 90
    took = _took(report)
    yield from HEAD.splitlines()
    yield ""
    if report is None:
        yield "**Nothing has been measured on a GPU yet.**"
    else:
        yield from _quotients(report, took, list(predictions(tag, arch, report.environment["device"])))
    expected = {gpu: list(predictions(tag, gpu)) for gpu in dict.fromkeys(gpu for gpu, _ in COLUMNS)}
    for family in dict.fromkeys(family for _, family, _ in expected[90]):
        yield from ("", f"## {family.capitalize()}", "")
        yield f"| row | {' | '.join(f'{machine(gpu).name} `{library}`' for gpu, library in COLUMNS)} | took `triton` | `cuda` |"
        yield "|---|" + "--:|" * (len(COLUMNS) + len(LIBRARIES))
        for n, (name, of, _) in enumerate(expected[90]):
            if of == family:
                cells = [_told(expected[gpu][n][2].get(library)) for gpu, library in COLUMNS]
                cells += [_told(took.get((name, library))) for library in LIBRARIES]
                yield f"| {name} | {' | '.join(cells)} |"


def _told(us: float | None) -> str:
    return "" if us is None else f"{us:.3g}" if us < 1000 else f"{us:,.0f}"


def _took(report: Report | None) -> dict[tuple[str, str], float]:
    """The row's name and the library -> measured microseconds."""
    rows = report.rows if report else ()
    return {(row.name, library): result.ms[1] * 1e3 for row in rows for library, result in row.timed.items() if library in LIBRARIES}


def _quotients(report: Report, took, expected) -> Iterator[str]:
    """Yield a table of measured over predicted times, by quartiles for each family of kernels."""
    found: dict[tuple[str, str], list[float]] = {}
    for name, family, by in expected:
        for library, us in by.items():
            if (name, library) in took:
                found.setdefault((library, family), []).append(took[name, library] / us)
    where, when = report.environment["device"], report.environment["date"][:10]
    yield f"Measured on {where}, {when}: the time that kernels took over the predicted one."
    yield from ("", "| kernels | rows | first quartile | median | third quartile |", "|---|--:|--:|--:|--:|")
    for (library, family), each in sorted(found.items()):
        quartiles = statistics.quantiles(each, n=4) if len(each) > 1 else each * 3
        yield f"| {library} {family} | {len(each)} | {' | '.join(f'{q:.2f}' for q in quartiles)} |"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m jaxext.benchmarks.predictions", description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("report", nargs="?", type=pathlib.Path, help="what `python -m jaxext bench --json` wrote on a GPU")
    parser.add_argument("--tag", default="", help="only problems with this tag")
    parser.add_argument("--out", type=pathlib.Path, metavar="PATH", help="write the page there")
    options = parser.parse_args(arguments)
    try:
        report = read(options.report) if options.report else None
    except (OSError, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    if missing():
        print(f"{parser.prog}: the column of cuda is empty: {missing()}", file=sys.stderr)
    text = "\n".join(page(report, options.tag))
    if options.out:
        options.out.write_text(text + "\n")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
