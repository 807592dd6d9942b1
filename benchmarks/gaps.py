"""The largest gaps between a report of the benchmark and its aims; each can be run again by itself, for a profiler.

    python -m jaxext.benchmarks.gaps gpu.json
    ncu --set full --profile-from-start off python -m jaxext.benchmarks.gaps gpu.json --run 1

The aims are the targets of a row (targets.py) or, in a report without any, the roofline.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import pathlib
import sys

import jax

from jaxext.cli.terminal import UsageError, count
from jaxext.tuning import random_operands, timing

from . import bench, findings
from .case import Case
from .report import THEIRS, Measured, Report, read


@dataclasses.dataclass(frozen=True)
class Gap:
    """A library that takes `factor` times as long for a row as its aim."""

    row: Measured
    library: str
    factor: float
    aim: str

    def __str__(self) -> str:
        ms = self.row.timed[self.library].ms[1]
        return f"{self.library} takes {ms:.3g} ms for {self.row.name}, {self.factor:.2f} times the {ms / self.factor:.3g} ms of {self.aim}"


def gaps(report: Report) -> list[Gap]:
    """One gap for each library and row that is slower than its aim, the largest first.

    Args:
      report: of the benchmark.

    Returns:
      the gaps, without those of libraries that have no time for a row or a wrong result.

    Example:
      >>> print(*gaps(read("gpu.json"))[:10], sep="\\n")
    """
    aimed = any(row.targets for row in report.rows)
    found = [gap for row in report.rows for gap in (_missed(row) if aimed else _below_the_roofline(row))]
    largest: dict[tuple[str, str], Gap] = {}
    for gap in sorted(found, key=lambda gap: -gap.factor):
        largest.setdefault((gap.row.name, gap.library), gap)
    return list(largest.values())


def _missed(row: Measured) -> list[Gap]:
    """The factor by which a target is missed.  Every kind of target is inversely proportional to the time."""
    missed = [verdict for verdict in findings.verdicts(row) if verdict.got and not verdict.reached]
    return [Gap(row, verdict.ours, verdict.target / verdict.got, _aim(verdict.kind, verdict.target)) for verdict in missed if verdict.got]


def _aim(kind: str, target: float) -> str:
    return {"copy": f"{target:.0%} of a copy's bandwidth", "tflops": f"{target:g} TFLOP/s"}.get(kind, f"{kind}'s time / {target:g}")


def _below_the_roofline(row: Measured) -> list[Gap]:
    ours = {library: result for library, result in row.timed.items() if library not in THEIRS and not findings.wrong(row, library)}
    shares = {library: result.roofline for library, result in ours.items()}
    return [Gap(row, library, 1 / share, "the roofline") for library, share in shares.items() if share and share < 1]


def again(gap: Gap, report: Report) -> Case:
    """The case of a gap."""
    options = argparse.Namespace(modules=[], tags=[], only=[gap.row.name], roles=[gap.row.role], dtype=[gap.row.numbers])
    vars(options).update(quick=report.trial, reduced=report.reduced, full=not report.reduced)
    found = [case for case in bench.cases(options) if case.name == gap.row.name]
    if not found:
        raise UsageError(f"{gap.row.name} is not in the suite any more")
    return found[0]


def run(gap: Gap, report: Report) -> None:
    """Compile the case, run it once, and then run it under the profiler.

    Raises:
      UsageError: the suite has no such case.
      RuntimeError: the profiler cannot be started.
    """
    case = again(gap, report)
    program = timing.compile(case.build(gap.library), random_operands.normal(case.shapes, case.dtypes))
    program()
    if jax.default_backend() == "gpu":
        _profiler("cuProfilerStart")
    program()
    if jax.default_backend() == "gpu":
        _profiler("cuProfilerStop")


def _profiler(function: str) -> None:
    """Start the profiler.  The driver needs a context in this thread: the device's primary one, which jax uses too."""
    driver = ctypes.CDLL("libcuda.so.1")
    context = ctypes.c_void_p()
    for name, *arguments in (("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0), ("cuCtxSetCurrent", context), (function,)):
        if error := getattr(driver, name)(*arguments):
            raise RuntimeError(f"{name}: CUDA error {error}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m jaxext.benchmarks.gaps", description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
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
            gap = found[options.run - 1]
            print(gap)
            run(gap, report)
    except (OSError, ValueError, UsageError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
