"""A report as text: lines for a terminal as rows are measured, findings, changes, and Markdown for the documentation."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxext.bench import findings
from jaxext.bench.bench_report import THEIRS, Failure, Measured, Refusal, Report, Result

STYLES = {findings.FASTER: "green", findings.SLOWER: "bold red", findings.MISSING: "red", findings.NEW: "cyan"}
NAME, TIME, RATIO, SHARE, ERROR, STRAYS = 78, 13, 15, 5, 8, 28  # columns' widths
LEGEND = (
    "columns: milliseconds of each library; lax/jaxext: speedup over lax of the implementation that jaxext takes; roof: its share of the"
    " roofline; error: relative to float64; XLA adds: copies, transposes and pads around it"
)
WIDE = 120  # columns from which a table has room for names of rows


def head(shown: Sequence[str], width: int) -> Text:
    """The heading of `line`, as `LEGEND` explains it.  Times are medians, with half the spread of their quartiles."""
    name, columns = _columns(shown, width)
    return Text(" " * name + "".join(f"{title:>{size}}" for title, size in columns), "bold")


def line(row: Measured, shown: Sequence[str], width: int) -> Text:
    """One row, aligned with `head` of the same libraries.  Where it is wider than `width`, its name has a line of its own."""
    name, columns = _columns(shown, width)
    others = (result for library, result in reversed(row.timed.items()) if library not in THEIRS)
    of_ours = row.timed.get(row.ours or "") or next(others, None)
    ratio = findings.ratio(row, findings.DEFAULT, "lax")
    cells = [(time_of(row.results.get(library)), "bold red" if isinstance(row.results.get(library), Failure) else "") for library in shown]
    standing = STYLES.get(findings.standing(row, findings.DEFAULT, "lax") or "", "")
    cells.append(("-" if ratio is None else f"{row.ours} {ratio:.2f}x", standing))
    if of_ours is not None:
        error = of_ours.error if isinstance(of_ours.error, str) else f"{of_ours.error:.1e}"
        strays = " ".join(f"{count} {kind}" for kind, count in of_ours.hlo.items() if count) or "nothing"
        cells += [("-" if of_ours.roofline is None else f"{of_ours.roofline:.0%}", ""), (error[: ERROR - 1], ""), (strays, "")]
    text = Text(f"{row.name:{name}.{NAME - 1}}" if name else f"{row.name[:width]}\n")
    for (cell, style), (_, size) in zip(cells, columns, strict=False):
        text.append(f"{cell:>{size}}", style)
    for verdict in findings.verdicts(row) if of_ours is not None else ():
        text.append(f"  {verdict}" if name else f"\n  {verdict}", "green" if verdict.reached else "bold red")
    return text


def _columns(shown: Sequence[str], width: int) -> tuple[int, list[tuple[str, int]]]:
    """The columns that the name of a row takes, or 0 if it has a line of its own; and the others that fit, the first ones first."""
    longest = max(map(len, shown), default=0)
    columns = [(f"{library} ms", max(TIME, len(library) + 4)) for library in shown]
    columns += [("lax/jaxext", max(RATIO, longest + 9)), ("roof", SHARE), ("error", ERROR), ("XLA adds", STRAYS)]
    if NAME + sum(size for _, size in columns) <= width:
        return NAME, columns
    ends = itertools.accumulate(size for _, size in columns)
    return 0, [column for column, end in zip(columns, ends, strict=True) if end <= width]


def print_findings(report: Report, console: Console) -> None:
    """Print the means of a report's rows, the reasons why libraries have no time, missed targets, and faults."""
    wide = console.width >= WIDE
    table = Table("kind", "role", "library", "against", "rows", "mean", "least", "slower", *(["row with the least"] if wide else []))
    table.title, table.title_justify = "speedups: geometric mean, least, and number of rows that are slower beyond the noise", "left"
    for mean in findings.summary(report.rows):
        kind, role = mean.group  # type: ignore[misc]
        style = "red" if mean.losers else ""
        numbers = (f"{mean.geometric_mean:.2f}x", f"{mean.least:.2f}x", str(mean.losers))
        table.add_row(kind, role, mean.ours, mean.other, str(mean.rows), *numbers, *([Text(mean.least_row)] if wide else []), style=style)
    if table.row_count:
        console.print(table)
    for note in findings.notes(report.rows):
        console.print(note, markup=False)
    if report.left_out:
        console.print(f"not measured within --minutes: {'; '.join(report.left_out)}", markup=False)
    for row in report.rows:
        for missed in findings.missed(row):
            console.print(f"{missed} [{row.name}]", style="yellow", markup=False)
    for row in report.rows:
        for fault in findings.faults(row):
            console.print(f"WRONG: {fault} [{row.name}]", style="bold red", markup=False)


def print_comparison(comparison: findings.Comparison, console: Console) -> None:
    """Print the changes beyond the noise, and the number of each verdict."""
    for warning in comparison.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False)
    table = Table("row", "library", "before ms", "after ms", "after/before", "verdict")
    alone: dict[str, None] = {}  # rows of one report only
    for change in comparison.changes:
        if change.why == findings.NO_ROW:
            alone[f"{change.verdict}: {change.name}"] = None
        elif change.verdict != findings.SAME:
            times = ("-" if quartiles is None else _quartiles(quartiles) for quartiles in (change.before, change.after))
            takes = f"{change.after[1] / change.before[1]:.2f}x" if change.before and change.after else "-"
            verdict = change.verdict + (f" ({change.why})" if change.why else "")
            table.add_row(Text(change.name), change.library, *times, takes, Text(verdict, STYLES[change.verdict]))
    if table.row_count:
        console.print(table)
    for row in alone:
        console.print(row, markup=False)
    counts = collections.Counter(change.verdict for change in comparison.changes)
    console.print("; ".join(f"{verdict}: {count}" for verdict, count in counts.items()) or "no times", markup=False)


def time_of(result: Result | Refusal | Failure | None) -> str:
    if isinstance(result, Result):
        return _quartiles(result.ms)
    return "-" if result is None else "refused" if isinstance(result, Refusal) else "FAILED"


def _quartiles(ms: Sequence[float]) -> str:
    low, middle, high = ms
    decimals = max(0, 2 - math.floor(math.log10(middle)))  # three significant digits, without an exponent
    return f"{middle:.{decimals}f} ±{50 * (high - low) / middle:.0f}%"
