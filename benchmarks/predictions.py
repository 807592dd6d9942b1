"""The kernels' times on an H200 according to their models, as a table; with a report of the benchmark, also the measured times.

    python -m jaxext.benchmarks.predictions --tag target
    python -m jaxext.benchmarks.predictions gpu.json

The time of a pick is that of its model (`clocks`), or that of moving the arrays if this is longer.  docs/performance-log.md explains the
quotients.
"""

from __future__ import annotations

import argparse
import importlib
import math
import pathlib
import statistics
import sys
from collections.abc import Iterator
from typing import Any

from jaxext.backends.cuda.cuda_binding import CudaConv, CudaMatmul, CudaRagged, missing
from jaxext.backends.triton.triton_binding import TritonConv, TritonMatmul, TritonRagged
from jaxext.kernels._launch import BITS
from jaxext.kernels._roofline import machine

from .problems import PRODUCTS
from .report import Measured, read

ARCH = 90
HERTZ = 1.75e9  # of an H200 that multiplies
KERNELS: dict[str, Any] = {
    "matmul": (TritonMatmul, CudaMatmul),
    "ragged": (TritonRagged, CudaRagged),
    "conv": (TritonConv, CudaConv),
    "depthwise": (TritonConv, CudaConv),
}

OPEN = {"nn": 2, "nt": 0, "tn": 1, "fprop": 2, "dgrad": 0, "wgrad": 1}  # the result's place among the slots


def predictions(tag: str = "") -> Iterator[tuple[str, str, dict[str, float]]]:
    """For each row of the benchmark (of problems with the tag): its name, its family, and library -> expected microseconds."""
    for problem in PRODUCTS:
        for case in problem.cases(problem.products) if not tag or tag in problem.tags else ():
            asked = problem.problem(case.role, case.numbers, ARCH)
            took = {kind.name: _microseconds(asked, kind()) for kind in KERNELS[problem.kernel] if _takes(kind, asked)}
            yield case.name, problem.kernel, took


def _takes(kind, asked) -> bool:
    return not (kind.name == "cuda" and missing()) and kind().refuses(asked) is None


def _microseconds(asked, implementation) -> float:
    config = implementation.configs(asked)[0]
    model = importlib.import_module(type(config).__module__)
    slots = list("abc" if asked.name.startswith("matmul") else "xwy")
    slots.append(slots.pop(OPEN[asked.role]))
    moved = sum(math.prod(asked.shapes[slot]) * BITS[dtype] // 8 for slot, dtype in zip(slots, asked.dtypes, strict=True))
    return max(model.clocks(asked, config), machine(ARCH).moving(moved)) / HERTZ * 1e6


def table(measured: dict[str, Measured], tag: str) -> Iterator[str]:
    quotients: dict[tuple[str, str], list[float]] = {}
    yield "| row | " + " | ".join(f"{library}, µs" for library in ("triton", "cuda")) + " |"
    yield "|---|--:|--:|"
    for name, family, expected in predictions(tag):
        cells = []
        for library in ("triton", "cuda"):
            us = expected.get(library)
            cell = "" if us is None else f"{us:.3g}"
            if us is not None and name in measured and (result := measured[name].timed.get(library)) is not None:
                quotients.setdefault((library, family), []).append(result.ms[1] * 1e3 / us)
                cell += f", took {result.ms[1] * 1e3:.3g}"
            cells.append(cell)
        if not measured or name in measured:
            yield f"| {name} | {' | '.join(cells)} |"
    for (library, family), found in sorted(quotients.items()):
        low, middle, high = statistics.quantiles(found, n=4) if len(found) > 1 else found * 3
        yield f"{library} {family}: took {middle:.2f} times what was expected, quartiles {low:.2f} and {high:.2f}, {len(found)} rows"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m jaxext.benchmarks.predictions", description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("report", nargs="?", type=pathlib.Path, help="what `python -m jaxext bench --json` wrote on an H200")
    parser.add_argument("--tag", default="", help="only problems with this tag")
    options = parser.parse_args(arguments)
    try:
        measured = {row.name: row for row in read(options.report).rows} if options.report else {}
    except (OSError, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    print(*table(measured, options.tag), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
