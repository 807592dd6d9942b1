"""A report as Markdown, for the documentation.

python -m benchmarks.markdown benchmarks/results/cpu.json rows.md
"""

from __future__ import annotations

import itertools
import pathlib
import sys
from collections.abc import Iterator, Sequence

from jaxext.bench import findings
from jaxext.bench.bench_report import KINDS, OTHER, PRECISION, Measured, Report, read
from jaxext.bench.bench_tables import time_of

ROLES = ("fprop", "forward", "nn", "dgrad", "nt", "wgrad", "tn", "step")  # as they follow one another in a table

CAPTION = (
    "Each cell says how many times faster than lax jaxext is with what it takes where nobody names an implementation, which",
    "implementation that is, and its time per call in milliseconds, ± half the spread of the quartiles. Where lax is faster",
    "beyond the noise, the cell is in bold.",
)


def markdown(report: Report) -> str:
    """Return the tables of a report, with a heading of the third level for each kind of problem."""
    return "\n".join([*_preface(report), *_means(report), *_kinds(report), *_shortcomings(report)]) + "\n"


def _preface(report: Report) -> Iterator[str]:
    world, commit = report.environment, report.environment.get("commit")
    yield f"- Device: {world['device']}"
    yield f"- Date: {world['date']}" + (f", commit {commit}" if commit else "")
    yield f"- Versions: {', '.join(f'{package} {version}' for package, version in sorted(world['versions'].items()))}"
    yield f"- Time: {report.timer}" + (f" (not CUPTI: {report.not_cupti})" if report.not_cupti else "")
    rates = (f"{what} {rate / 1e9:.4g} G{'B' if what == 'copy' else 'FLOP'}/s" for what, rate in sorted(report.ceilings.items()))
    if report.ceilings:
        yield f"- Ceilings, measured in the same run: {', '.join(rates)}"
    if report.reduced:
        yield "- The problems are small twins of those in the suite."
    yield from ("", *CAPTION)


def _means(report: Report) -> Iterator[str]:
    means = [found for kind, rows in _by_kind(report.rows).items() if (found := findings.mean(kind, rows, findings.DEFAULT, "lax"))]
    if means:
        yield from ("", "| kind | rows | geometric mean | least | slower than lax |", "|---|--:|--:|--:|--:|")
    for mean in means:
        yield f"| {mean.group} | {mean.rows} | {mean.geometric_mean:.2f}× | {mean.least:.2f}× | {mean.losers or 'none'} |"


def _kinds(report: Report) -> Iterator[str]:
    for kind, rows in _by_kind(report.rows).items():
        roles = sorted({row.role for row in rows}, key=lambda role: (ROLES.index(role) if role in ROLES else len(ROLES), role))
        yield from ("", f"### {kind}", "", f"| problem | numbers | {' | '.join(roles)} |", f"|---|---|{'--:|' * len(roles)}")
        problems: dict[tuple[str, str], dict[str, Measured]] = {}
        for row in rows:
            problems.setdefault((row.problem, row.numbers), {})[row.role] = row
        for (problem, numbers), by_role in problems.items():
            cells = (_cell(by_role[role]) if role in by_role else "" for role in roles)
            yield f"| {_escaped(problem)} | {_escaped(numbers)} | {' | '.join(cells)} |"


def _cell(row: Measured) -> str:
    ratio = findings.ratio(row, findings.DEFAULT, "lax")
    if ratio is None:
        return "wrong" if row.ours and findings.wrong(row, row.ours) else "not measured" if row.default else "refused"
    cell = f"{ratio:.2f}× {row.ours} {time_of(row.results[row.ours or ''])}"
    return f"**{cell}**" if findings.standing(row, findings.DEFAULT, "lax") == findings.SLOWER else cell


def _shortcomings(report: Report) -> Iterator[str]:
    missed = [f"{missed} [{row.name}]" for row in report.rows for missed in findings.missed(row)]
    faults = [f"{fault} [{row.name}]" for row in report.rows for fault in findings.faults(row)]
    refused = findings.notes(report.rows)
    for title, lines in (("Wrong", faults), ("Targets that were missed", missed), ("Not measured", refused)):
        if lines:
            yield from ("", f"### {title}", "", *(f"- {_escaped(line)}" for line in lines))


def _by_kind(rows: Sequence[Measured]) -> dict[str, list[Measured]]:
    order = [*KINDS, PRECISION, OTHER]
    ordered = sorted(rows, key=lambda row: order.index(row.kind))
    return {kind: list(members) for kind, members in itertools.groupby(ordered, key=lambda row: row.kind)}


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    source, target = sys.argv[1:]
    pathlib.Path(target).write_text(markdown(read(source)))
