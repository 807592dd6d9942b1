"""A sweep over random convolutions that compares jaxext's `xla` plan with lax: time, memory, and time to lower and compile.

    python -m jaxext.benchmarks.plan_sweep --count 1000 --seed 0 --json sweep.json
    python -m jaxext.benchmarks.plan_sweep --row "wgrad x=1,1000,2 w=128,1,2 padding=SAME groups=2"

A row is measured in a process of its own, which may die or take too long.  A row that seems to break a goal is measured again, and counts
only if it breaks it again.  With --row every algorithm that `xla` has for the geometry is measured too.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import pathlib
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from jaxext.cli.terminal import UsageError, count
from jaxext.tables import environment

from . import sweep_report
from .draws import KINDS, draw
from .geometry import Geometry, parse
from .named import named
from .plan_rows import MORE_SAMPLES, TOO_LONG, PlanRow, Side, serve
from .sweep_report import Report

PATIENCE_S = 45.0  # for each stage of a row, such as "lax: running"; what takes longer is told by that
ROWS_OF_A_PROCESS = 250  # jax keeps what it traced
WRITTEN_EVERY_S = 10.0


class Worker:
    """A process that measures rows.  It is replaced if it dies or is too slow, and after a number of rows."""

    def __init__(self):
        self._process, self._connection, self._asked = None, None, 0

    def ask(self, what: str, *arguments, patience_s: float = PATIENCE_S) -> Any:
        """The answer of `plan_rows.serve`; it may be silent for `patience_s` seconds.

        Raises:
          RuntimeError: the process died, or took longer; says in which stage.
        """
        if self._process is None or self._asked >= ROWS_OF_A_PROCESS:
            self._start()
        assert self._connection is not None and self._process is not None
        self._asked += 1
        self._connection.send((what, arguments))
        stage = "lax: starting"
        while _comes(self._connection, patience_s):
            try:
                kind, value = self._connection.recv()
            except (EOFError, ConnectionResetError):
                self._process.join()
                code = self._process.exitcode
                self._process = None
                raise RuntimeError(f"{stage}: the process died with status {code}") from None
            if kind == "done":
                return value
            stage = value
        self.close()
        raise RuntimeError(f"{stage}: {TOO_LONG} {patience_s:.0f} s")

    def _start(self):
        self.close()
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        self._process, self._asked = process, 0

    def close(self):
        if self._process is not None:
            self._process.kill()
            self._process.join()
        self._process = None


def _comes(connection: Any, patience_s: float) -> bool:
    """Return whether a message arrives within `patience_s`, not counting time in which this process was stopped."""
    steps = max(1, math.ceil(patience_s))
    return any(connection.poll(patience_s / steps) for _ in range(steps))


def wanted(options: argparse.Namespace, worker: Worker) -> Iterator[tuple[str, Geometry]]:
    """The kind or name, and the geometry, of each row that the options ask for."""
    if options.changed:
        rows = sweep_report.read(options.changed).rows
        yield from ((row.kind, geometry) for row in rows if worker.ask("planned", geometry := parse(row.geometry)) != row.algorithms)
    elif options.named:
        yield from ((name, geometry) for name, geometry in named() if not options.only or any(part in name for part in options.only))
    else:
        kinds = tuple(kind for kind in KINDS if not options.only or kind in options.only)
        if not kinds:
            raise UsageError(f"--only: got {', '.join(options.only)}, want of {', '.join(KINDS)}")
        yield from (draw(options.seed, number, kinds) for number in range(options.count))


def sweep(options: argparse.Namespace, worker: Worker) -> Report:
    """All rows, with earlier ones unchanged; the report is written from time to time."""
    start = written = time.monotonic()
    report = _begun(options)
    there, rows = {row.geometry for row in report.rows}, list(report.rows)
    try:
        for kind, geometry in wanted(options, worker):
            if str(geometry) in there:
                continue
            if time.monotonic() - start > options.seconds:
                break
            rows.append(_row(worker, kind, geometry))
            there.add(str(geometry))
            if rows[-1].broken or options.verbose:
                print(sweep_report.line(rows[-1]), flush=True)
            if options.json and time.monotonic() - written > WRITTEN_EVERY_S:
                sweep_report.write(options.json, Report(report.environment, report.timer, tuple(rows)))
                written = time.monotonic()
    except KeyboardInterrupt:
        print("interrupted")
    whole = Report(report.environment, report.timer, tuple(rows))
    if options.json:
        sweep_report.write(options.json, whole)
    return whole


def _begun(options: argparse.Namespace) -> Report:
    if options.resume and pathlib.Path(options.json).exists():
        return sweep_report.read(options.json)
    return Report(environment.report(), "wall time of calls one by one, freed memory kept", ())


def _row(worker: Worker, kind: str, geometry: Geometry) -> PlanRow:
    try:
        return worker.ask("row", geometry, kind)
    except RuntimeError as error:
        return PlanRow(geometry=str(geometry), kind=kind, work=geometry.work, failed=str(error))


def print_algorithms(worker: Worker, geometry: Geometry, samples: int, patience_s: float) -> None:
    print(f"{geometry}\n  {geometry.work:.2e} multiply-adds", flush=True)
    try:
        sides: Mapping[str, Side | str] = worker.ask("alternatives", geometry, samples, patience_s=patience_s)
    except RuntimeError as error:
        print(f"  {error}", flush=True)
        return
    for line in sweep_report.algorithms(sides):
        print(f"  {line}", flush=True)


def _parser() -> argparse.ArgumentParser:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m jaxext.benchmarks.plan_sweep", description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=count, default=1000, help="how many random geometries (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: %(default)s)")
    parser.add_argument("--named", action="store_true", help="the geometries that have names instead of random ones")
    parser.add_argument("--changed", metavar="REPORT", help="the rows of a report for which `xla` takes another algorithm now")
    parser.add_argument(
        "--only", action="append", default=[], metavar="KIND", help=f"of {', '.join(KINDS)}; with --named, those with this in their name"
    )
    parser.add_argument("--seconds", type=float, default=math.inf, metavar="BUDGET", help="start no row after this time")
    parser.add_argument("--json", metavar="PATH", help="the file for all rows, written as they come")
    parser.add_argument("--resume", action="store_true", help="go on with the rows that the file of --json has")
    parser.add_argument("--verbose", action="store_true", help="print all rows, not only those that break a goal")
    other = parser.add_argument_group("instead of a sweep").add_mutually_exclusive_group()
    other.add_argument("--row", action="append", metavar="SPEC", help="measure one geometry, by every algorithm that there is for it")
    other.add_argument("--losers", metavar="REPORT", help="the same for the rows of a report that break a goal, the worst first")
    other.add_argument("--read", metavar="REPORT", help="say what is in a report")
    other.add_argument("--compare", nargs=2, metavar=("BEFORE", "AFTER"), help="say what changed from one report to another")
    parser.add_argument("--most", type=count, default=60, help="of --losers (default: %(default)s)")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit status: 1 if a goal is broken, 2 if an option asks for something that does not exist."""
    parser = _parser()
    options = parser.parse_args(arguments)
    worker = Worker()
    try:
        if options.resume and not options.json:
            raise UsageError("--resume: name the report to continue with --json")
        if options.compare:
            print(sweep_report.compared(*map(sweep_report.read, options.compare)))
            return 0
        if options.row or options.losers:
            specs = options.row or [row.geometry for row in sweep_report.worst(sweep_report.read(options.losers).rows)[: options.most]]
            for geometry in list(map(parse, specs)):
                print_algorithms(worker, geometry, MORE_SAMPLES, 300.0 if options.row else 2 * PATIENCE_S)
            return 0
        whole = sweep_report.read(options.read) if options.read else sweep(options, worker)
        print(sweep_report.summary(whole))
        return 1 if any(row.broken for row in whole.rows) else 0
    except (OSError, ValueError, UsageError, json.JSONDecodeError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    finally:
        worker.close()


if __name__ == "__main__":
    sys.exit(main())
