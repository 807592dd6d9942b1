"""The end of a verification: the record of verified kernels, and in words a table of marks and the first failure of each family."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from jaxext.tables.table_format import Verified
from jaxext.verify.cases import Case
from jaxext.verify.events import FAILED, Verdict

# Of the cases of a kind the first of these that occurs; "." is no verdict.
MARKS = {"died": "D", "hung": "H", "wrong": "x", "raised": "!", None: ".", "refused": "r", "right": "+"}
LEGEND = "+ right, x wrong, ! raised an exception, H hung, D died, r refused (not supported), . not run"
REASON = 700  # characters of a failure
WIDTH = 44  # of a cell with marks, beyond which another row begins


def table(cases: Iterable[Case], verdicts: Mapping[str, Verdict]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The columns, and the rows: family, role, and of each implementation its dtypes with their marks."""
    names: dict[str, None] = {}
    marks: dict[tuple[str, str], dict[str, dict[str, list[str | None]]]] = {}
    for case in cases:
        names[case.implementation] = None
        family, role, dtypes = case.kind.split(" ", 2)
        row = marks.setdefault((family, role), {}).setdefault(case.implementation, {})
        verdict = verdicts.get(case.name)
        row.setdefault(dtypes, []).append(verdict and verdict.outcome)
    rows = []
    for (family, role), each in sorted(marks.items()):
        cells = [_folded([f"{dtypes} {_mark(outcomes)}" for dtypes, outcomes in each.get(name, {}).items()]) for name in names]
        for line in itertools.zip_longest(*cells, fillvalue=""):
            rows.append((family, role, *line))
            family = role = ""
    return ("family", "role", *names), rows


def graphs(verdicts: Iterable[Verdict]) -> list[str]:
    """A line on the cases whose kernels ran inside a CUDA graph, and the first reason why others did not."""
    right = [str(verdict.event.get("graph")) for verdict in verdicts if verdict.outcome == "right"]
    outside = [graph for graph in right if not graph.startswith("held")]
    if not right:
        return []
    reason = f"; the first that did not: {outside[0]}" if outside else ""
    return [f"{len(right) - len(outside)} of {len(right)} right cases ran inside a CUDA graph{reason}"]


def failures(cases: Iterable[Case], verdicts: Mapping[str, Verdict], room: int) -> list[str]:
    """The first failure of each family and implementation, in at most `room` characters in all."""
    first: dict[tuple[str, str], str] = {}
    for case in cases:
        verdict = verdicts.get(case.name)
        if verdict is not None and verdict.outcome in FAILED:
            first.setdefault((case.family, case.implementation), f"{verdict.outcome}: {case.name}\n  {verdict.reason[:REASON]}")
    lines = list(first.values())
    while len(lines) > 1 and sum(map(len, lines)) + len(lines) > room:
        lines = [*lines[:-2], f"and {len(first) - len(lines) + 2} more families"]
    return lines


def _mark(outcomes: Sequence[str | None]) -> str:
    return next(mark for outcome, mark in MARKS.items() if outcome in outcomes)


def _folded(parts: Sequence[str]) -> list[str]:
    lines = [parts[0]] if parts else [""]
    for part in parts[1:]:
        longer = f"{lines[-1]}  {part}"
        lines[-1:] = [longer] if len(longer) <= WIDTH else [lines[-1], part]
    return lines


def verified(cases: Iterable[Case], verdicts: Mapping[str, Verdict]) -> dict[str, Verified]:
    """The entry of each kind in the record.

    `cases` are all that there are, also those that did not run, each kind's most important first.  A kind of which a case failed is wrong.
    One whose first case was not right is left out.  A case that did not come as far as its first launch in time says nothing, and neither
    does one that the harness could not check.
    """
    kinds: dict[str, list[Case]] = {}
    for case in cases:
        kinds.setdefault(case.key, []).append(case)
    found = {}
    for kind, members in kinds.items():
        each = [verdicts[case.name] for case in members if case.name in verdicts]
        failed = any(verdict.outcome in FAILED and not _says_nothing(verdict) for verdict in each)
        first = verdicts.get(members[0].name)
        if failed or first is not None and first.outcome == "right":
            # In words if it is no number in JSON.
            errors = [float(verdict.event.get("errors", {}).get("norm", "nan")) for verdict in each if failed or verdict.outcome == "right"]
            worst = max(errors) if all(map(math.isfinite, errors)) else None
            compiler = members[0].plan.implementation.compiler()  # type: ignore[attr-defined]
            found[kind] = Verified(right=not failed, error=worst, compiler=compiler)
    return found


def _says_nothing(verdict: Verdict) -> bool:
    return verdict.outcome == "hung" and not verdict.event.get("launched") or bool(verdict.event.get("harness"))
