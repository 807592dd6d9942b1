"""The fit of the rates of convolutions on a CPU: of rows whose times are made up it finds the rates again."""

import json
from typing import Any

import pytest

from benchmarks import algorithms, fit_cpu
from benchmarks.algorithms import THEIRS
from benchmarks.draws import CHANNELS, WINDOWS, draw
from benchmarks.fit_cpu import Row
from benchmarks.geometry import parse
from jaxext.ops.conv import xla, xla_plan

SEED = 7


def test_the_rates_of_exact_times_are_found():
    """Random convolutions take exactly what is expected; the plan is the least cost then, but for the margin that lax has, and memory."""
    rows = []
    for number in range(len(CHANNELS) * len(WINDOWS)):
        geometry = draw(SEED, number)
        assert parse(str(geometry)) == geometry
        row = Row(str(geometry), {})
        plans = xla.plans(fit_cpu._conv(row.geometry))
        took = {plan.name: (plan.cost.run_ms, plan.cost.build_ms, 1000.0) for plan in plans if plan.cost}
        rows.append(row._replace(algorithms=took | {THEIRS: took["lax"]}))
    found, stored = fit_cpu.fit(rows), json.loads(xla_plan.FILE.read_text())
    assert found["build"] == pytest.approx(stored["build"], rel=0.01)
    for name in ("generic_rows", "elementwise", "copied", "transposed", "programs", "matrix"):
        assert found["run"][name] == pytest.approx(stored["run"][name], rel=0.1), name
    report = fit_cpu.report(rows)
    assert (
        report.startswith(f"{len(rows)} rows of {len(rows)}, geometric means: cost over the least 1.0") and "; 0 over 1.3 times" in report
    )
    dear = [
        row._replace(algorithms={name: ((1 if name == THEIRS else 10) * ms, *more) for name, (ms, *more) in row.algorithms.items()})
        for row in rows
    ]
    assert "; 0 over 1.3 times" not in fit_cpu.report(dear)


def test_rows_are_measured():
    """One convolution by every algorithm."""

    class Here:
        def ask(self, request, seconds):
            return algorithms.alternatives(*request)

    here: Any = Here()
    (row,) = fit_cpu.measure(1, SEED, here)
    assert {THEIRS, "lax"} < row.algorithms.keys() and all(len(took) == 3 and min(took) > 0 for took in row.algorithms.values())
