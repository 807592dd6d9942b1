"""The benchmark harness: chooses cases of the suite, measures them in order, and keeps the rows if it is interrupted.

A row of the report is one case by every library (cells.py).  Tables of measurements are not used: a report is about the code, and must not
change if the user tunes between two reports.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import faulthandler
import json
import math
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from msgspec import structs
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

import jaxext
from jaxext.bench import bench_report as report
from jaxext.bench import bench_tables as tables
from jaxext.bench import cells, findings, problems
from jaxext.bench.case import PLAIN, Case, Problem, kind
from jaxext.bench.digests import current
from jaxext.bench.heap import keep_freed_memory
from jaxext.bench.targets import in_order, targets
from jaxext.cli.arguments import module
from jaxext.cli.terminal import UsageError, count, make_folders, says_json, tell
from jaxext.tables import environment
from jaxext.tuning import timing

ROLES = ("fprop", "dgrad", "wgrad", "nn", "nt", "tn", "forward", "backward", "step")
UNASKED = ("fft",)  # taken by name alone, and so measured
UNFOLDED = 240  # columns of tables in files and pipes
QUICK = 2e6  # operations per role in a trial of the harness
STUCK_S = 120  # a row on a GPU that takes longer waits for a kernel that hangs, which only the end of the process ends


def add_selection(parser: argparse.ArgumentParser) -> None:
    """The options by which `cases` chooses."""
    which = parser.add_argument_group("cases of the suite")
    declares = "import this module first: the suite then has the forms that it declares (jaxext.extend), tagged by name, and its kernels"
    which.add_argument("--import", action="append", default=[], dest="modules", metavar="MODULE", help=declares)
    which.add_argument("--tags", nargs="+", action="extend", default=[], metavar="TAG", help="only problems with one of these tags")
    which.add_argument("--only", action="append", default=[], metavar="SUBSTRING", help="only cases with this in their name")
    which.add_argument("--roles", nargs="+", action="extend", default=[], choices=ROLES, metavar="ROLE", help=f"only {', '.join(ROLES)}")
    numbers = "dtypes instead of the problem's own (default without a GPU: float32)"
    which.add_argument("--dtype", nargs="+", action="extend", default=[], metavar="DTYPE", help=numbers)
    size = which.add_mutually_exclusive_group()
    size.add_argument("--full", action="store_true", help="problems in full size (default on a GPU)")
    size.add_argument("--reduced", action="store_true", help=f"problems of {problems.DEFAULT:.0e} operations (default without a GPU)")
    size.add_argument("--quick", action="store_true", help="tiny problems and few samples, to try the command: its times say nothing")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_selection(parser)
    how = parser.add_argument_group("how to measure (tables of measurements are not used)")
    known = ", ".join(report.libraries()[1:])  # not its choices: what --import imports registers more
    beside = f"measure this beside lax (default: all but fft): {known}, or yours"
    how.add_argument("--implementation", action="append", default=[], metavar="NAME", help=beside)
    how.add_argument("--without", action="append", default=[], metavar="NAME", help="leave this out: one of these, or lax")
    how.add_argument("--repeats", type=count, default=10, help="samples per case and library (default: 10)")
    how.add_argument("--minutes", type=float, default=math.inf, help="start no case after this time")
    how.add_argument("--brief", action="store_true", help="on a GPU, measure only times of kernels with a cold L2 cache")
    how.add_argument("--resume", action="store_true", help="continue the report in --json; cases in which an earlier run died come last")
    output = parser.add_argument_group("output")
    output.add_argument("--list", action="store_true", help="list the names of the cases, and measure nothing")
    says_json(output)
    output.add_argument("--read", metavar="REPORT", help="summarize an earlier report, and measure nothing")
    output.add_argument(
        "--compare", nargs=2, metavar=("BEFORE", "AFTER"), help="show what changed from one report to another, and measure nothing"
    )


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status: 1 if a result is wrong, an implementation failed where lax did not, or one got slower;
    130 if it was interrupted or the device was lost.

    Raises:
      UsageError: an option asks for something that does not exist.
    """
    # JSON on stdout is for programs: what people read goes beside it.
    console = Console(stderr=options.json == "-", highlight=False)
    if not console.is_terminal:
        console.width = UNFOLDED
    make_folders(options)
    if options.resume and options.json in (None, "-"):
        raise UsageError("--resume: name the report to continue with --json")
    if options.compare:
        return _compare(options, console)
    if options.read:
        return _conclude(options, stored(options.read, "--read"), console)
    kept = keep_freed_memory()  # before anything asks jax for a device
    chosen, libraries = cases(options), _libraries(options)
    if options.list:
        names = [case.name for case in chosen]
        tell(options, {"cases": names})
        if options.json != "-":
            print(*names, sep="\n")
        return 0
    return _measured(options, chosen, libraries, console, kept)


def stored(path: str, option: str) -> report.Report:
    """Read a report; a UsageError says what is wrong with the option."""
    try:
        return report.read(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"{option}: {error}") from None


def cases(options: argparse.Namespace) -> list[Case]:
    """The cases that the options ask for, the most important first."""
    for name in options.modules:
        module(name)
    gpu = jax.default_backend() == "gpu"
    try:
        found = problems.select(options.tags)
        numbers = [kind(dtype) for dtype in options.dtype or ([] if gpu else ["float32"])]
    except ValueError as error:
        raise UsageError(str(error)) from None
    found = [problem for problem in (_in(problem, numbers) for problem in found) if problem.numbers]
    if options.quick or options.reduced or not (gpu or options.full):
        found = problems.cpu_problems(found, QUICK if options.quick else problems.DEFAULT)
    chosen = [case for problem in found for case in problem.cases(options.roles)]
    chosen = [case for case in chosen if not options.only or any(part in case.name for part in options.only)]
    if not chosen:
        asked = {"--only": options.only, "--tags": options.tags, "--roles": options.roles, "--dtype": options.dtype}
        raise UsageError(f"no case matches {' '.join(' '.join([option, *values]) for option, values in asked.items() if values)}")
    return in_order(chosen, jax.default_backend())


def _in(problem: Problem, numbers: Sequence[str]) -> Problem:
    """The problem in those of these numbers that it supports.  A problem in plain numbers supports all plain ones."""
    if not numbers:
        return problem
    plain = not PLAIN.keys().isdisjoint(problem.numbers)
    fitting = tuple(asked for asked in numbers if asked in problem.numbers or (plain and asked in PLAIN))
    return dataclasses.replace(problem, numbers=fitting)  # type: ignore[type-var]


def _libraries(options: argparse.Namespace) -> list[str]:
    """Return the libraries that the options ask for, after the modules that may register some are imported."""
    known = report.libraries()
    for option, names, of in (("--implementation", options.implementation, known[1:]), ("--without", options.without, known)):
        if unknown := [name for name in names if name not in of]:
            raise UsageError(f"{option}: unknown {unknown[0]!r}, want one of {', '.join(of)}; --import MODULE imports what registers yours")
    asked = {"lax", *(options.implementation or [name for name in known if name not in UNASKED])} - {*options.without}
    return [library for library in known if library in asked]


def _measured(options: argparse.Namespace, chosen: Sequence[Case], libraries: list[str], console: Console, kept: bool) -> int:
    start = time.monotonic()
    clock, why_not = timing.timer()
    world = environment.report()
    timer = clock.name + (", freed memory kept" if kept and isinstance(clock, timing.Wall) else "")
    if options.quick:
        console.print("--quick: tiny problems, whose times say nothing")
    before = begun_before(options, {"timer": timer, "setting of --quick": options.quick, **world})
    ceilings = cells.ceilings(sorted({case.dtype for case in chosen}), clock, options.quick, before.ceilings if before else {})
    whole = report.Report(
        environment=world,
        timer=timer,
        not_cupti=why_not,
        reduced=any("reduced" in case.tags for case in chosen),
        trial=options.quick,
        ceilings=ceilings,
        state=cells.state(),
        interrupted=True,  # until it is done
        begun=before.begun if before else (),
        rows=tuple(row for row in before.rows if current(row, environment.default_platform()) == row.results) if before else (),
    )
    try:
        _write(options, whole)
    except OSError as error:
        raise UsageError(f"--json: {error}") from None
    _introduce(whole, console)
    how = cells.Bench(libraries, clock, 1 if options.quick else options.repeats, ceilings, options.brief)
    return _conclude(options, _with_rows(options, whole, chosen, how, console, start + 60 * options.minutes), console)


def begun_before(options: argparse.Namespace, world: Mapping[str, Any]) -> report.Report | None:
    """The report to resume, if there is one: of the same device and versions."""
    if not options.resume or not pathlib.Path(options.json).exists():
        return None
    before = stored(options.json, "--resume")
    other = {"timer": before.timer, "setting of --quick": before.trial, **before.environment}
    may_differ = {"date", "command", "commit", "sources"} | (
        {"processor", "cores"} if world.get("capability") else set()
    )  # of a GPU's host
    differing = [name for name in world if name not in may_differ and world[name] != other.get(name)]
    if differing:
        raise UsageError(f"--resume: {options.json} was measured with another {', '.join(differing)}: name another file, or remove it")
    return before


def _with_rows(
    options: argparse.Namespace, whole: report.Report, chosen: Sequence[Case], how: cells.Bench, console: Console, until: float
) -> report.Report:
    """The report with its missing rows, each written at once; those in which an earlier run died come last."""
    shown: list[str] = []  # the libraries that did not refuse all rows so far
    there = {row.name for row in whole.rows}
    died = {name: place for place, name in enumerate(whole.begun, 1)}  # the last that did is the last again
    rest = sorted((case for case in chosen if case.name not in there), key=lambda case: died.get(case.name, 0))
    try:
        for case in _with_progress(rest, console):
            if time.monotonic() > until:
                whole = structs.replace(whole, left_out=(*whole.left_out, case.name))
                continue
            others = tuple(name for name in whole.begun if name != case.name)
            whole = structs.replace(whole, begun=(*others, case.name))
            _write(options, whole)
            row = _row(case, how)
            timed = {*shown, *(name for name, result in row.results.items() if not isinstance(result, report.Refusal))} - {"jaxext"}
            if timed != {*shown}:
                shown = [library for library in how.libraries if library in timed]
                console.print(tables.head(shown, console.width), soft_wrap=True)
            console.print(tables.line(row, shown, console.width), soft_wrap=True)
            if why := cells.lost():
                console.print(f"the device is lost; --resume continues without this case: {why}", style="bold red", markup=False)
                return whole
            whole = structs.replace(whole, begun=others, rows=(*whole.rows, row))
            _write(options, whole)
    except KeyboardInterrupt:
        return whole
    return structs.replace(whole, interrupted=False)


def _row(case: Case, how: cells.Bench) -> report.Measured:
    expected = {ours: least for ours, least in targets(case, jax.default_backend()).items() if ours in how.libraries}
    with jaxext.use_table(None), _ended_if_stuck() if jax.default_backend() == "gpu" else contextlib.nullcontext():
        return cells.measure(case, expected, how)


@contextlib.contextmanager
def _ended_if_stuck() -> Iterator[None]:
    """End the process with a traceback if a row takes too long, from a thread that does not need Python's lock."""
    faulthandler.dump_traceback_later(STUCK_S, exit=True, file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _introduce(whole: report.Report, console: Console) -> None:
    rates = (f"{what} {rate / 1e9:,.4g} G{'B' if what == 'copy' else 'FLOP'}/s" for what, rate in whole.ceilings.items())
    console.print(f"{whole.environment['device']}  {' '.join(whole.state.values())}", markup=False)
    console.print(whole.timer + (f" ({whole.not_cupti})" if whole.not_cupti else ""), markup=False)
    console.print(f"measured peak rates: {', '.join(rates)}", markup=False)
    console.print(tables.LEGEND, markup=False)


def _with_progress(chosen: Sequence[Case], console: Console) -> Iterator[Case]:
    """The cases; on a terminal, a progress bar shows the case that is measured and the time left."""
    terminal = console if console.is_terminal else Console(stderr=True)
    name = TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"))
    columns = (BarColumn(10), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(), name)
    how: Any = {"transient": True, "redirect_stdout": False, "expand": True}
    with Progress(*columns, console=terminal, disable=not terminal.is_terminal, **how) as progress:
        task = progress.add_task("", total=len(chosen))
        for case in chosen:
            progress.update(task, description=case.name)
            yield case
            progress.advance(task)


def _write(options: argparse.Namespace, whole: report.Report) -> None:
    if options.json and options.json != "-":
        report.write(options.json, whole)


def _conclude(options: argparse.Namespace, whole: report.Report, console: Console) -> int:
    _write(options, whole)
    tables.print_findings(whole, console)
    if options.json == "-":
        print(json.dumps(report.data(whole), indent=1))
    elif options.json:
        console.print(f"written: {options.json}", markup=False, soft_wrap=True)
    if whole.interrupted:
        console.print(f"interrupted after {len(whole.rows)} cases", style="bold yellow")
        console.print(f"started and not finished: {'; '.join(whole.begun) or 'none'}", markup=False)
        return 130
    return int(any(map(findings.faults, whole.rows)))


def _compare(options: argparse.Namespace, console: Console) -> int:
    comparison = findings.compare(*(stored(path, "--compare") for path in options.compare))
    tables.print_comparison(comparison, console)
    if options.json:
        tell(options, dataclasses.asdict(comparison))
    return 1 if comparison.regressions else 0
