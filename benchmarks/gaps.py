"""The rows of a report that take longest beside the roofline; each can be run again by itself, for a profiler.

python -m benchmarks.gaps gpu.json
ncu --set full --profile-from-start off python -m benchmarks.gaps gpu.json --run 1
"""

from __future__ import annotations

import argparse
import ctypes
import pathlib
import sys
from typing import NamedTuple

import jax

from jaxext.bench import findings
from jaxext.bench.bench_report import THEIRS, Measured, Report, read
from jaxext.cli import bench
from jaxext.cli.terminal import UsageError, count
from jaxext.tuning import random_operands, timing


class Gap(NamedTuple):
    """A library that takes `factor` times as long for a row as the roofline."""

    factor: float
    row: Measured
    library: str

    def __str__(self) -> str:
        ms = self.row.timed[self.library].ms[1]
        return (
            f"{self.library} takes {ms:.3g} ms for {self.row.name}, {self.factor:.2f} times the {ms / self.factor:.3g} ms of the roofline"
        )


def gaps(report: Report) -> list[Gap]:
    """Return the gap of each row and each of jaxext's libraries, the largest first; wrong results have none."""
    rows = [(row, library, result.roofline) for row in report.rows for library, result in row.timed.items() if library not in THEIRS]
    found = [Gap(1 / share, row, library) for row, library, share in rows if share and not findings.wrong(row, library)]
    return sorted(found, key=lambda gap: -gap.factor)


def run(gap: Gap, report: Report) -> None:
    """Compile the case of a gap, run it once, and then run it under the profiler.

    Raises:
      UsageError: the suite has no such case.
      RuntimeError: the profiler cannot be started.
    """
    options = argparse.Namespace(modules=[], tags=[], only=[gap.row.name], roles=[gap.row.role], dtype=[gap.row.numbers])
    vars(options).update(quick=report.trial, reduced=report.reduced, full=not report.reduced)
    case = next((case for case in bench.cases(options) if case.name == gap.row.name), None)
    if case is None:
        raise UsageError(f"{gap.row.name} is not in the suite any more")
    program = timing.compile(case.build(gap.library), random_operands.normal(case.shapes, case.dtypes))
    program()
    if jax.default_backend() == "gpu":
        _profiler("cuProfilerStart")
    program()
    if jax.default_backend() == "gpu":
        _profiler("cuProfilerStop")


def _profiler(function: str) -> None:
    """Start or stop the profiler.  The driver needs a context in this thread: the device's primary one, which jax uses too."""
    driver = ctypes.CDLL("libcuda.so.1")
    context = ctypes.c_void_p()
    for name, *arguments in (("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0), ("cuCtxSetCurrent", context), (function,)):
        if error := getattr(driver, name)(*arguments):
            raise RuntimeError(f"{name}: CUDA error {error}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=pathlib.Path, help="what `python -m jaxext bench --json` wrote")
    parser.add_argument("--most", type=count, default=10, metavar="N", help="how many to list (default: %(default)s)")
    parser.add_argument("--run", type=count, metavar="RANK", help="run the gap of this rank again, and list none")
    options = parser.parse_args(arguments)
    try:
        report = read(options.report)
        found = gaps(report)
        if options.run is None:
            for rank, gap in enumerate(found[: options.most], start=1):
                print(f"{rank}. {gap}")
        elif options.run > len(found):
            raise UsageError(f"--run: got {options.run}, want one of the {len(found)} gaps")
        else:
            print(gap := found[options.run - 1])
            run(gap, report)
    except (OSError, ValueError, UsageError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
