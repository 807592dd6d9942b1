"""The report of the sweep: the JSON file that holds its rows, and its summary in text."""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import os
import pathlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from jaxext.cli import terminal

from .plan_rows import GOALS, MOST_BYTES, MOST_TIME, THEIRS, Pair, PlanRow, Side

SCHEMA = "jaxext plan sweep 1"
BINS = (0.1, 0.25, 0.5, 0.8, 0.95, 1.05, MOST_TIME, 1.5, 2.0, 5.0, 20.0)  # of ours over lax's
WIN, LOST = 0.9, 1.1  # a row below the first, by lax's time, is a win; one that takes so much more of lax's time than before lost some


@dataclasses.dataclass(frozen=True)
class Report:
    environment: Mapping[str, Any]
    timer: str
    rows: tuple[PlanRow, ...]


def read(path: str | os.PathLike) -> Report:
    """The report in a file.

    Raises:
      OSError: it cannot be read.
      ValueError: it is not a report; the message says where.
    """
    fields = msgspec.json.decode(pathlib.Path(path).read_bytes())
    if not isinstance(fields, dict) or fields.pop("schema", None) != SCHEMA:
        raise ValueError(f"{path}: this is not a report of schema {SCHEMA!r}")
    report = msgspec.convert(fields, Report)
    rows = (dataclasses.replace(row, difference=float(row.difference)) for row in report.rows)  # JSON has infinity as a text
    return dataclasses.replace(report, rows=tuple(rows))


def write(path: str | os.PathLike, report: Report) -> None:
    """Write the report whole, or not at all."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        written.write_text(json.dumps(terminal.plain({"schema": SCHEMA, **dataclasses.asdict(report)}), indent=1) + "\n")
        written.replace(path)
    finally:
        written.unlink(missing_ok=True)


def line(row: PlanRow) -> str:
    """One row: the broken goals, ours over lax's, and the geometry as --row takes it."""
    broken = ",".join(row.broken) or "-"
    if row.last is None:
        return f"{broken:12} {row.failed} | {row.kind} | {row.geometry}"
    return f"{broken:12} {_ratios(row.last)} | {'+'.join(row.algorithms)} | {row.kind} {row.work:.1e} | {row.geometry}"


def _ratios(pair: Pair) -> str:
    theirs, ours = pair.lax, pair.ours
    medians = f"median {theirs.ms[1]:.3g} -> {ours.ms[1]:.3g}"
    times = f"time {pair.time:5.2f} ({theirs.least_ms:.3g} -> {ours.least_ms:.3g} ms, {medians})"
    memory = f"memory {pair.memory:5.2f} ({theirs.bytes / 2**20:.3g} -> {ours.bytes / 2**20:.3g} MiB)"
    return f"{times}  {memory}  build {theirs.build_ms:.0f} -> {ours.build_ms:.0f} ms"


def worst(rows: Sequence[PlanRow], goal: str | None = None) -> list[PlanRow]:
    """The rows that break this goal, or any goal, the worst first."""
    found = [row for row in rows if (goal in row.broken if goal else row.broken)]
    return sorted(found, key=lambda row: _badness(row, goal), reverse=True)


def _badness(row: PlanRow, goal: str | None) -> float:
    """Return how far the row is over this goal, or the most over any goal."""
    pair = row.last
    if pair is None or "result" in row.broken:
        return math.inf
    over = {"time": pair.time / MOST_TIME, "memory": pair.memory / MOST_BYTES, "build": pair.build_over}
    return over[goal] if goal in over else max(over[goal] for goal in row.broken)


def summary(report: Report) -> str:
    return "\n".join(_summary(report))


def _summary(report: Report) -> Iterator[str]:
    rows = report.rows
    measured = [row for row in rows if row.last is not None]
    yield f"{report.environment.get('device')}  {report.environment.get('date')}  {report.timer}"
    yield f"{len(rows)} rows, {len(measured)} measured, {sum(row.again is not None for row in rows)} of them twice"
    if measured:
        times = [row.last.time for row in measured if row.last]
        yield f"ours over lax's time: geometric mean {statistics.geometric_mean(times):.3f}, worst {max(times):.3g}, best {min(times):.3g}"
        yield from _histogram(times)
    for goal in GOALS:
        broken = worst(rows, goal)
        yield f"\n{goal}: {len(broken)} rows break the goal"
        yield from map(line, broken)
    if unknown := [row for row in rows if row.last is None and not row.broken]:
        yield f"\n{len(unknown)} rows for which lax failed or took too long:"
        yield from map(line, unknown)


def _histogram(times: Sequence[float]) -> Iterator[str]:
    counts = collections.Counter(sum(time >= edge for edge in BINS) for time in times)
    for i, (low, high) in enumerate(zip((0.0, *BINS), (*BINS, math.inf), strict=True)):
        yield f"  {low:5.2f} to {high:5.2f}  {counts[i]:5}  {'#' * math.ceil(60 * counts[i] / len(times))}"


def compared(before: Report, after: Report) -> str:
    """A comparison of the rows in both reports: how many break each goal, the worst, and wins that shrank by more than a tenth."""
    return "\n".join(_compared(before, after))


def _compared(before: Report, after: Report) -> Iterator[str]:
    then, now = ({row.geometry: row for row in report.rows} for report in (before, after))
    both = [(then[name], now[name]) for name in then if name in now]
    yield f"{len(both)} rows are in both reports, of {len(then)} before and {len(now)} after"
    for goal in GOALS:
        sides = [worst([pair[i] for pair in both], goal) for i in (0, 1)]
        extremes = [f"{len(rows)}" + (f" (worst {_badness(rows[0], goal):.3g} times what is allowed)" if rows else "") for rows in sides]
        yield f"{goal}: {extremes[0]} -> {extremes[1]} rows break the goal"
        known = {row.geometry for row in sides[0]}
        yield from (f"  new: {line(row)}" for row in sides[1] if row.geometry not in known)
    times = [statistics.geometric_mean(row.last.time for row in rows if row.last) for rows in zip(*both, strict=True)] if both else []
    if times:
        yield f"ours over lax's time, geometric mean: {times[0]:.3f} -> {times[1]:.3f}"
    lost = [(a, b) for a, b in both if a.last and b.last and a.last.time < WIN and b.last.time > LOST * a.last.time]
    yield f"{len(lost)} wins got smaller by more than a tenth"
    for a, b in sorted(lost, key=lambda pair: _grown(*pair), reverse=True):
        yield f"  {_grown(a, b):.2f} times as long: time {a.last.time:.2f} -> {b.last.time:.2f}, {'+'.join(a.algorithms)} -> {line(b)}"  # type: ignore[union-attr]


def _grown(before: PlanRow, after: PlanRow) -> float:
    assert before.last and after.last
    return after.last.time / before.last.time


def algorithms(sides: Mapping[str, Side | str]) -> list[str]:
    """A line for each algorithm, relative to lax, the fastest first.  `P` marks the plan's choice, `*` the result of `best_of`."""
    theirs = sides[THEIRS]
    assert isinstance(theirs, Side)
    ours = {name: Pair(lax=theirs, ours=side) for name, side in sides.items() if name != THEIRS and isinstance(side, Side)}
    planned = next((name for name in sides if name != THEIRS), None)
    best = best_of(ours)
    takes = f"{theirs.least_ms:.3g} ms, median {theirs.ms[1]:.3g}, {theirs.bytes / 2**20:.3g} MiB, build {theirs.build_ms:.0f} ms"
    lines = [f"    {THEIRS:22} ({takes})"]
    for name, pair in sorted(ours.items(), key=lambda item: item[1].time):
        marks = ("P" if name == planned else " ") + ("*" if name == best else " ")
        broken = f"  breaks {', '.join(pair.broken)}" if pair.broken else ""
        lines.append(f" {marks} {name:12} {_ratios(pair)}{broken}")
    return lines + [f" {'P' if name == planned else ' '}  {name:12} {why}" for name, why in sides.items() if isinstance(why, str)]


def best_of(pairs: Mapping[str, Pair]) -> str | None:
    """The fastest algorithm that keeps all goals, or the fastest if none does."""
    return min(pairs, key=lambda name: (bool(pairs[name].broken), pairs[name].time), default=None)
