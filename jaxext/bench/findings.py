"""Conclusions from a report: ratios, targets reached or missed, faults, means, and changes from one report to another.

A difference counts if it is beyond the noise: the quartile ranges do not overlap, and the medians differ by more than LEAST and by more
than the two spreads together.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence

from jaxext.bench.bench_report import RATIOS, THEIRS, Failure, Measured, Quartiles, Refusal, Report, Result, libraries, ours

LEAST = 0.05  # of the median: what two runs of one program differ by anyway

DEFAULT = "default"
FASTER, SLOWER, SAME, MISSING, NEW = "faster", "slower", "within the noise", "missing", "new"
NO_ROW = "no such row"  # why a time is missing, or new


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A target and the value reached; None if there is no time or the result is wrong."""

    ours: str
    kind: str
    got: float | None
    target: float

    @property
    def reached(self) -> bool:
        return self.got is not None and self.got >= self.target

    def __str__(self) -> str:
        got = "-" if self.got is None else f"{self.got:.3g}"
        return f"{self.ours} {self.kind} {got}, target {self.target:g} {'reached' if self.reached else 'MISSED'}"


@dataclasses.dataclass(frozen=True)
class Mean:
    """The mean ratio of a group of rows, the least ratio with its row, and the number of `losers`: below 1 beyond the noise."""

    group: Hashable
    ours: str
    other: str
    rows: int
    geometric_mean: float
    least: float
    least_row: str
    losers: int


@dataclasses.dataclass(frozen=True)
class Change:
    """The change of one library on one row.  A time may be None; `why` gives the reason if it is known."""

    name: str
    library: str
    verdict: str
    before: Quartiles | None
    after: Quartiles | None
    why: str = ""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The changes between two reports.  `warnings` name other changes than those of the code."""

    warnings: tuple[str, ...]
    changes: tuple[Change, ...]

    @property
    def regressions(self) -> tuple[Change, ...]:
        """The implementations of jaxext that got slower."""
        return tuple(change for change in self.changes if change.verdict == SLOWER and change.library not in THEIRS)


def ratio(row: Measured, ours: str, other: str) -> float | None:
    """The time of `other` over that of `ours`.

    Args:
      row: of a report.
      ours: a library, or "default": the implementation that jaxext takes if none is named.
      other: a library, or "best": the faster of lax and `xla`; lax alone if `ours` is `xla`.

    Returns:
      the ratio of the medians, above 1 if `ours` is faster; None if one has no time or the result of `ours` is wrong.

    Example:
      >>> ratio(row, "cuda", "best")
    """
    pair = _pair(row, ours, other)
    return pair[1][1] / pair[0][1] if pair else None


def standing(row: Measured, ours: str, other: str) -> str | None:
    """Return "faster", "slower", or "within the noise" for `ours` against `other` (arguments as of `ratio`); None if one has no time."""
    pair = _pair(row, ours, other)
    return compared(pair[1], pair[0]) if pair else None


def _pair(row: Measured, ours: str, other: str) -> tuple[Quartiles, Quartiles] | None:
    ms = {library: result.ms for library, result in row.timed.items()}
    library = row.ours if ours == DEFAULT else ours
    if library not in (None, *THEIRS) and wrong(row, library):
        return None
    meant = ("lax",) if (ours, other) == ("xla", "best") else ("lax", "xla") if other == "best" else (other,)
    others = [ms[name] for name in meant if name in ms]
    return (ms[library], min(others, key=lambda quartiles: quartiles[1])) if library in ms and others else None


def compared(before: Quartiles, after: Quartiles) -> str:
    """Return whether `after` is "faster" than `before`, "slower", or "within the noise"."""
    apart = after[2] < before[0] or before[2] < after[0]
    far = abs(after[1] - before[1])
    spreads = math.hypot(before[2] - before[0], after[2] - after[0])
    if not (apart and far > LEAST * before[1] and far > spreads):
        return SAME
    return FASTER if after[1] < before[1] else SLOWER


def verdicts(row: Measured) -> list[Verdict]:
    """Every target of the row, with the value reached."""

    def got(ours: str, kind: str) -> float | None:
        if kind in RATIOS:
            return ratio(row, ours, kind)
        return getattr(row.timed[ours], kind) if ours in row.timed and not wrong(row, ours) else None

    return [Verdict(ours, kind, got(ours, kind), target) for ours, targets in row.targets.items() for kind, target in targets.items()]


def missed(row: Measured) -> list[str]:
    """The targets that the row misses, including all targets of an implementation without a time."""
    return [str(verdict) for verdict in verdicts(row) if not verdict.reached]


def faults(row: Measured) -> list[str]:
    """Faults: failures of ours if lax has none, and wrong results."""
    found = []
    for library in (library for library in row.results if library not in THEIRS):
        result = row.results[library]
        if isinstance(result, Failure):
            if not isinstance(row.results.get("lax"), Failure):
                found.append(f"{library} failed: {result.failed}")
        elif isinstance(result, Result) and wrong(row, library):
            found.append(f"{library} is wrong: relative error {result.error:.2g}, want at most {row.law:g}")
    return found


def wrong(row: Measured, library: str) -> bool:
    """Return whether the error of a result is over the limit, or NaN."""
    result = row.timed.get(library)
    return result is not None and isinstance(result.error, float) and not result.error <= row.law


def notes(rows: Iterable[Measured]) -> list[str]:
    """The reason of each refusal, failure or unchecked result, once, with its first row."""
    found: dict[str, str] = {}
    for row in rows:
        for library, result in row.results.items():
            if not isinstance(result, Result):
                found.setdefault(f"{library} {reason(result)}", row.name)
            elif isinstance(result.error, str):
                found.setdefault(f"{library} was not checked: {result.error}", row.name)
    return [f"{note} [{name}]" for note, name in found.items()]


def reason(result: Refusal | Failure) -> str:
    return f"does not support it: {result.refused}" if isinstance(result, Refusal) else f"failed: {result.failed}"


def summary(rows: Iterable[Measured], by: Callable[[Measured], Hashable] = lambda row: (row.kind, row.role)) -> list[Mean]:
    """The mean ratios of groups of rows.

    Args:
      rows: of a report.
      by: the group of a row; its kind and role.

    Returns:
      for each group, in the order of the rows, and each implementation: `xla` over lax, kernels over the best of both.

    Example:
      >>> summary(report.rows, by=lambda row: row.kind)
    """
    groups: dict[Hashable, list[Measured]] = {}
    for row in rows:
        groups.setdefault(by(row), []).append(row)
    means = (mean(group, members, library) for group, members in groups.items() for library in ours(members))
    return [found for found in means if found]


def mean(group: Hashable, rows: Iterable[Measured], ours: str, other: str = "best") -> Mean | None:
    """The mean `ratio` of the rows on which both have a time; None if there are none."""
    found = {row.name: (ratio(row, ours, other), standing(row, ours, other)) for row in rows}
    ratios = {name: ratio for name, (ratio, _) in found.items() if ratio is not None}
    if not ratios:
        return None
    least = min(ratios, key=lambda name: ratios[name])
    losers = sum(verdict == SLOWER for _, verdict in found.values())
    other = "lax" if ours == "xla" else other
    return Mean(group, ours, other, len(ratios), statistics.geometric_mean(ratios.values()), ratios[least], least, losers)


def compare(before: Report, after: Report) -> Comparison:
    """The changes from one report to another, for each library on each row, in the order of the rows.

    Args:
      before, after: the reports.

    Returns:
      every change, also those within the noise.  Rows of one name but other shapes are not compared, with a warning.

    Example:
      >>> compare(read("a.json"), read("b.json")).regressions
    """
    old, new = ({row.name: row for row in report.rows} for report in (before, after))
    unlike = [name for name in old.keys() & new.keys() if old[name].shapes != new[name].shapes]
    names = [name for name in dict.fromkeys((*old, *new)) if name not in unlike]
    told = libraries([*old.values(), *new.values()])
    changes = tuple(change for name in names for library in told if (change := _change(name, library, old.get(name), new.get(name))))
    warnings = [*_differences(before, after), *_drift(changes)]
    if before.trial or after.trial:
        warnings.append("a report is of --quick: its times say nothing")
    warnings += [f"the shapes differ, so it is not compared: {name}" for name in sorted(unlike)]
    return Comparison(tuple(warnings), changes)


def _change(name: str, library: str, old: Measured | None, new: Measured | None) -> Change | None:
    before, after = (row.timed[library].ms if row and library in row.timed else None for row in (old, new))
    if before and after:
        return Change(name, library, compared(before, after), before, after)
    if before:
        return Change(name, library, MISSING, before, None, _why(new, library))
    return Change(name, library, NEW, None, after, _why(old, library)) if after else None


def _why(row: Measured | None, library: str) -> str:
    """The reason why there is no time."""
    if row is None:
        return NO_ROW
    result = row.results.get(library)
    return "" if result is None or isinstance(result, Result) else reason(result)


def _differences(before: Report, after: Report) -> list[str]:
    worlds = [before.environment, after.environment]
    versions = [world["versions"] for world in worlds]
    pairs = [(what, *(world.get(what) for world in worlds)) for what in ("device", "processor", "cores")]
    pairs += [("timer", before.timer, after.timer)]
    pairs += [(f"version of {package}", *(have.get(package) for have in versions)) for package in sorted(versions[0] | versions[1])]
    found = [f"{what}: {old or 'none'}, then {new or 'none'}" for what, old, new in pairs if old != new]
    if before.reduced != after.reduced:
        found.append(f"only the {'first' if before.reduced else 'second'} has reduced problems")
    return found + [f"the {which} was interrupted" for which, report in (("first", before), ("second", after)) if report.interrupted]


def _drift(changes: Sequence[Change]) -> list[str]:
    """The change of the machine: lax is the same code in both reports if the versions are, so its times should not change."""
    moved = [change.after[1] / change.before[1] for change in changes if change.library == "lax" and change.before and change.after]
    drift = statistics.geometric_mean(moved) if moved else 1.0
    return [f"lax itself takes {drift:.2f} times as long as before (geometric mean)"] if abs(math.log(drift)) > LEAST else []
