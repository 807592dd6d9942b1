"""The fit of the rates of convolutions on a CPU: of rows whose times are made up it finds the rates again."""

import json
from typing import Any

import pytest

from benchmarks import algorithms, fit_cpu
from benchmarks.algorithms import THEIRS
from benchmarks.draws import draw
from benchmarks.fit_cpu import Row
from jaxext.ops.conv import xla, xla_plan

SEED = 21


@pytest.fixture
def rates(tmp_path, monkeypatch):
    """The package's, in a file that may be overwritten."""
    copy = tmp_path / "rates.json"
    copy.write_text(xla_plan.FILE.read_text())
    monkeypatch.setattr(xla_plan, "FILE", copy)
    yield copy
    xla_plan.rates.cache_clear()
    xla.plans.cache_clear()


@pytest.fixture(scope="module")
def rows():
    """Random convolutions that take exactly what is expected."""
    made = []
    for number in range(60):
        row = Row(str(draw(SEED, number)[1]), {})
        plans = xla.plans(fit_cpu._conv(row))
        took = {plan.name: (plan.cost.run_ms, plan.cost.build_ms, 1000.0) for plan in plans if plan.cost}
        made.append(row._replace(algorithms=took | {THEIRS: took["lax"]}))
    return made


def test_the_rates_of_exact_times_are_found(rows, rates):
    found, stored = fit_cpu.fit(rows), json.loads(rates.read_text())
    assert found["build"] == pytest.approx(stored["build"], rel=0.01)
    for name in ("generic_rows", "elementwise", "copied", "transposed", "programs", "matrix"):
        assert found["run"][name] == pytest.approx(stored["run"][name], rel=0.1), name


def test_the_report_says_what_the_choice_costs(rows):
    """The plan is the least cost here, but for the margin that lax has, and for memory."""
    report = fit_cpu.report(rows)
    assert report.startswith("60 rows of 60, geometric means: cost over the least 1.0")
    dear = [
        row._replace(algorithms={name: ((1 if name == THEIRS else 10) * ms, *more) for name, (ms, *more) in row.algorithms.items()})
        for row in rows
    ]
    slower = fit_cpu.report(dear)
    assert "0 over 1.3 times lax's time" in report and "0 over 1.3 times lax's time" not in slower


def test_rows_are_measured(rates):
    """One convolution by every algorithm."""

    class Here:
        def ask(self, request, seconds):
            return algorithms.alternatives(*request)

    here: Any = Here()
    (row,) = fit_cpu.measure(1, SEED, here)
    assert {THEIRS, "lax"} < row.algorithms.keys() and all(len(took) == 3 and min(took) > 0 for took in row.algorithms.values())
