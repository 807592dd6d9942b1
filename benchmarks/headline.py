"""The headline rows, for a GPU that is there for minutes: all of them by our kernels, and then by lax.

    python -m benchmarks.headline --json gpu.json                # --resume goes on, --quick tries it on tiny problems
    python -m benchmarks.headline --read gpu.json                # the table again

A process of its own measures one library of one row at a time, within LIMIT_S seconds.  If it hangs or dies, it is replaced, and the row
keeps what it has.  The report is written after each result, so nothing is lost if the run is killed; and what a mended kernel computes is
measured again, without the rest.
"""

from __future__ import annotations

import argparse
import collections
import functools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax.numpy as jnp
from msgspec import structs

from jaxext.bench import findings
from jaxext.bench.bench_report import Failure, Measured, Refusal, Report, Result, Results, write
from jaxext.bench.case import Case
from jaxext.bench.digests import current, digests
from jaxext.cli import bench
from jaxext.cli.terminal import UsageError

from .headline_rows import PASSES, cases, steps
from .headline_worker import Hello, serve
from .worker import Worker

LIMIT_S = 25  # for a library and a row, with its compilation
CEILINGS = ("copy", "bfloat16", "float8_e4m3fn")
LIBRARIES = tuple(library for libraries in PASSES for library in libraries)
MOST = 11_000  # characters of a summary: some machines return no more than the end of what was printed
NAME, CELL = 62, 11  # widths of columns


def run(
    chosen: Sequence[Case],
    worker: Worker,
    begin: Callable[[Hello], Report],
    save: Callable[[Report], None],
    until: float,
    say: Callable[[str], None],
) -> Report:
    """Measure what the report that `begin` gives lacks, and save it after each result; what failed before comes last.

    Raises:
      RuntimeError: no process could be started.
    """
    hello = worker.start(until)
    if isinstance(hello, Failure):
        raise RuntimeError(f"no process to measure in: {hello.failed}")
    whole = begin(hello)
    rows = {row.name: structs.replace(row, results=current(row, hello.platform)) for row in whole.rows}
    try:
        whole = _with_ceilings(whole, worker, save, say)
        for step, following in _following(_left(chosen, rows)):
            at, library = step
            if (seconds := min(LIMIT_S, until - time.monotonic())) <= 0:
                break
            answer = worker.ask(("row", at, library, following, whole.ceilings), seconds)
            if isinstance(answer, Failure) and seconds < LIMIT_S and time.monotonic() >= until:
                break  # the run's time is over, not the library's
            case = chosen[at]
            rows[case.name] = _merged(rows.get(case.name) or _empty(case), answer, case, library, hello.platform)
            whole = structs.replace(whole, rows=tuple(rows[case.name] for case in chosen if case.name in rows))
            save(whole)
            say(f"{case.name}: {library} {cell(rows[case.name], library)}")
    except KeyboardInterrupt:
        return whole
    finally:
        worker.stop()
    left_out = dict.fromkeys(chosen[at].name for at, library in steps(chosen) if library not in _results(rows, chosen[at]))
    whole = structs.replace(whole, interrupted=False, left_out=tuple(left_out))
    save(whole)
    return whole


def _with_ceilings(whole: Report, worker: Worker, save: Callable[[Report], None], say: Callable[[str], None]) -> Report:
    """The report with the machine's peak rates, as far as they can be measured."""
    save(whole)
    for what in CEILINGS:
        if what not in whole.ceilings and isinstance(rate := worker.ask(("ceiling", what), LIMIT_S), float):
            whole = structs.replace(whole, ceilings={**whole.ceilings, what: rate})
            save(whole)
            say(f"ceiling {what}: {rate / 1e9:,.4g} G{'B' if what == 'copy' else 'FLOP'}/s")
    return whole


def _left(chosen: Sequence[Case], rows: Mapping[str, Measured]) -> list[tuple[int, str]]:
    """The steps without a result, then those that failed."""
    results = [(step, _results(rows, chosen[step[0]]).get(step[1])) for step in steps(chosen)]
    return [step for step, result in results if result is None] + [step for step, result in results if isinstance(result, Failure)]


def _results(rows: Mapping[str, Measured], case: Case) -> Results:
    return rows[case.name].results if case.name in rows else Results()


def _following(order: Sequence[tuple[int, str]]) -> Iterator[tuple[tuple[int, str], int | None]]:
    """Each step with the next case that is another one, whose truth may be computed meanwhile."""
    for n, step in enumerate(order):
        yield step, next((at for at, _ in order[n + 1 :] if at != step[0]), None)


def _empty(case: Case) -> Measured:
    """The row without a result, as far as it is known without a device."""
    facts = {name: getattr(case, name) for name in ("name", "problem", "role", "dtype", "shapes", "flops")}
    moved = sum(math.prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype in zip(case.shapes, case.dtypes, strict=True))
    return Measured(**facts, tags=tuple(sorted(case.tags)), bytes=moved)


def _merged(row: Measured, answer: Measured | Failure, case: Case, library: str, platform: str) -> Measured:
    """The row with one more library's result."""
    if isinstance(answer, Failure):
        new, result = row, answer
    else:
        new, result = answer, answer.results.get(library, Refusal("there is no kernel of it for this operation"))
    known = {**row.digests, **digests(case.tags, case.numbers, [library], platform)}
    return structs.replace(new, results=Results({**row.results, library: result}), digests=known)


def summary(report: Report) -> str:
    """Counts, what is wrong or failed, and the table, in at most MOST characters."""
    device, rates = report.environment["device"], report.ceilings
    peaks = ", ".join(f"{what} {rate / 1e12:.4g} T{'B' if what == 'copy' else 'FLOP'}/s" for what, rate in rates.items())
    counts = [f"{device}; {peaks or 'no ceilings'}; {len(report.rows)} rows, {len(report.left_out)} of all not complete"]
    for library in LIBRARIES:
        said = collections.Counter(_standing(row, library) for row in report.rows)
        counts.append(f"{library}: " + (", ".join(f"{count} {standing}" for standing, count in sorted(said.items())) or "no row"))
    head = f"{'':{NAME}}" + "".join(f"{library + ' ms':>{CELL}}" for library in LIBRARIES) + f"{'lax/ours':>{CELL}}{'roof':>6}{'error':>9}"
    table = "\n".join([*counts, head, *map(_line, report.rows)])
    room, reasons = MOST - len(table) - 1, []
    for row in report.rows:
        for fault in findings.faults(row):
            room -= len(reason := f"{row.name}: {fault}"[:300]) + 1
            reasons += [reason] if room > 0 else []
    return "\n".join([*reasons, table])[-MOST:]


def _standing(row: Measured, library: str) -> str:
    result = row.results.get(library)
    if isinstance(result, Result):
        return "wrong" if findings.wrong(row, library) else "not checked" if isinstance(result.error, str) else "right"
    return {type(None): "missing", Refusal: "refused"}.get(type(result), "failed")


def cell(row: Measured, library: str) -> str:
    """The library's time, or why it has none, in a word."""
    standing, result = _standing(row, library), row.timed.get(library)
    if result is None:
        return {"missing": "-", "failed": "FAILED"}.get(standing, standing)
    return f"{result.ms[1]:.4g}" + {"wrong": "!", "not checked": "?"}.get(standing, "")


def _line(row: Measured) -> str:
    right = [result for library, result in row.timed.items() if library in PASSES[0] and not findings.wrong(row, library)]
    best, lax = min(right, key=lambda result: result.ms[1], default=None), row.timed.get("lax")
    ratio = f"{lax.ms[1] / best.ms[1]:.2f}" if best and lax else "-"
    share = f"{best.roofline:.0%}" if best and best.roofline is not None else "-"
    error = "-" if best is None else best.error[:8] if isinstance(best.error, str) else f"{best.error:.1e}"
    name = row.name if len(row.name) < NAME else f"{row.name[: NAME - 20]}…{row.name[-17:]}"
    return f"{name:{NAME}}" + "".join(f"{cell(row, library):>{CELL}}" for library in LIBRARIES) + f"{ratio:>{CELL}}{share:>6}{error:>9}"


def _begun(options: argparse.Namespace, hello: Hello) -> Report:
    facts = {"timer": hello.timer, "setting of --quick": options.quick, **hello.environment}
    if before := bench.begun_before(options, facts):
        return structs.replace(before, interrupted=True, left_out=(), environment=hello.environment, state=hello.state)
    facts = {name: getattr(hello, name) for name in ("environment", "timer", "not_cupti", "state")}
    return Report(**facts, reduced=options.quick, trial=options.quick, ceilings={}, interrupted=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 1 if a result is wrong or ours failed where lax did not, 130 if it was interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", default=os.devnull, metavar="PATH", help="the report, written after each result")
    parser.add_argument("--resume", action="store_true", help="go on with the report in --json")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start nothing after this time")
    parser.add_argument("--quick", action="store_true", help="tiny problems and few samples: this tries the harness, and measures nothing")
    parser.add_argument("--list", action="store_true", help="say the names of the rows, and measure nothing")
    parser.add_argument("--read", metavar="REPORT", help="say what is in a report of before, and measure nothing")
    options = parser.parse_args(arguments)
    try:
        if options.list or options.read:
            print(summary(bench.stored(options.read, "--read")) if options.read else "\n".join(case.name for case in cases(False)))
            return 0
        until, worker = time.monotonic() + 60 * options.minutes, Worker(serve, options.quick)
        save = functools.partial(write, options.json)
        whole = run(cases(options.quick), worker, functools.partial(_begun, options), save, until, functools.partial(print, flush=True))
    except (UsageError, RuntimeError) as error:
        parser.error(str(error))
    print(summary(whole))
    return 130 if whole.interrupted else int(any(map(findings.faults, whole.rows)))


if __name__ == "__main__":
    sys.exit(main())
