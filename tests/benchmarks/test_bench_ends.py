"""Runs of the benchmark that end early, killed, hung, on a lost device or out of time: what they leave, and how others go on with it."""

# ruff: noqa: F811 - fixtures are another file's

import types

import pytest
import test_bench
from test_bench import MATMUL, few_problems, made_up, options, run  # noqa: F401

from jaxext.bench import bench_report as report
from jaxext.bench import cells, digests, problems
from jaxext.bench.targets import FIRST, targets
from jaxext.cli import bench
from jaxext.cli.terminal import UsageError
from jaxext.tables import environment

WHOLE_SUITE = problems.PROBLEMS


def names(cases):
    return [case.name for case in cases]


def test_each_row_is_written_at_once(made_up, tmp_path):
    """A kill loses no more than the row that is being measured, and the report names that row."""
    path = tmp_path / "report.json"
    made_up.outcomes += [{}, {}, SystemExit(9)]
    with pytest.raises(SystemExit):
        run("--json", path)
    read = report.read(path)
    assert read.interrupted and names(read.rows) == names(case for case, *_ in made_up.asked[:2])
    assert read.begun == (made_up.asked[2][0].name,)


def test_a_run_goes_on_where_it_died(made_up, tmp_path, monkeypatch, capsys):
    """The rows that are there are not measured again, nor are the ceilings; a case in which a run died waits until all others are done,
    whether the process was killed or the device was lost, and so does the one before it."""
    path, known = tmp_path / "report.json", []
    monkeypatch.setattr(cells, "ceilings", lambda dtypes, clock, quick, there: known.append(there) or {"copy": 1e9})
    made_up.outcomes += [{}, SystemExit(9)]
    with pytest.raises(SystemExit):
        run("--json", path, "--resume")
    (first, killer), made_up.asked[:] = names(case for case, *_ in made_up.asked), []

    gone = iter([None, "CUDA_ERROR_ILLEGAL_ADDRESS"])
    monkeypatch.setattr(cells, "lost", lambda: next(gone, None))
    assert run("--json", path, "--resume") == 130
    (second, loser), made_up.asked[:] = names(case for case, *_ in made_up.asked), []
    read = report.read(path)
    assert names(read.rows) == [first, second] and read.begun == (killer, loser) and read.interrupted
    assert "the device is lost" in capsys.readouterr().out and len({first, killer, second, loser}) == 4

    assert run("--json", path, "--resume") == 0
    read = report.read(path)
    assert names(read.rows)[:2] == [first, second] and sorted(names(read.rows)[-2:]) == sorted([killer, loser])
    assert not read.interrupted and read.begun == () and names(case for case, *_ in made_up.asked) == names(read.rows)[2:]
    assert known == [{}, {"copy": 1e9}, {"copy": 1e9}]


def test_what_cannot_be_gone_on_with(made_up, tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    with pytest.raises(UsageError, match="--resume: name the report to continue with --json"):
        run("--resume")
    run("--roles", "nn", "--json", path)
    world = environment.report()
    monkeypatch.setattr(bench.environment, "report", lambda: dict(world, commit="another"))
    assert run("--roles", "nn", "--json", path, "--resume") == 0 and len(made_up.asked) == 1
    monkeypatch.setattr(bench.environment, "report", lambda: dict(world, device="another", versions={}))
    with pytest.raises(UsageError, match="--resume: .*report.json is of another device, versions: name another file"):
        run("--roles", "nn", "--json", path, "--resume")


def test_a_run_goes_on_with_the_rows_whose_code_is_the_same(made_up, tmp_path, monkeypatch):
    """Another hash of all sources alone changes nothing, and a row of which one library has changed is measured again."""
    path = tmp_path / "report.json"
    made_up.outcomes += [{}, {"triton": test_bench.result()}]
    run("--json", path)
    everything, made_up.asked[:] = names(case for case, *_ in made_up.asked), []
    world = environment.report()
    monkeypatch.setattr(bench.environment, "report", lambda: dict(world, sources={"triton": "another"}))
    assert run("--json", path, "--resume") == 0 and not made_up.asked
    known = digests.digests
    monkeypatch.setattr(digests, "digests", lambda *asked: known(*asked) | {"triton": "mended"})
    assert run("--json", path, "--resume") == 0
    assert names(case for case, *_ in made_up.asked) == everything[1:2] and sorted(names(report.read(path).rows)) == sorted(everything)


def test_a_row_that_hangs_ends_the_process(monkeypatch):
    """Nothing else ends a kernel that hangs on a GPU; the next row has as long again."""
    calls = []
    monkeypatch.setattr(bench.faulthandler, "dump_traceback_later", lambda seconds, exit, file: calls.append((seconds, exit)))
    monkeypatch.setattr(bench.faulthandler, "cancel_dump_traceback_later", lambda: calls.append("done"))
    monkeypatch.setattr(cells, "measure", lambda case, targets, how: calls.append("measured"))
    how = types.SimpleNamespace(libraries=["lax"])
    bench._row(MATMUL.case("nn", "float32"), how)  # type: ignore[arg-type]
    monkeypatch.setattr(bench.jax, "default_backend", lambda: "gpu")
    bench._row(MATMUL.case("nn", "float32"), how)  # type: ignore[arg-type]
    assert calls == ["measured", (bench.STUCK_S, True), "measured", "done"]


def test_the_most_wanted_come_first(monkeypatch):
    """A run on a GPU may end early: one case of each kind and role comes before a second of any, those with targets first."""
    monkeypatch.setattr(problems, "PROBLEMS", WHOLE_SUITE)
    monkeypatch.setattr(bench.jax, "default_backend", lambda: "gpu")
    asked = options()
    asked.quick = False
    chosen = bench.cases(asked)
    kinds = [(next((kind for kind in FIRST if kind in case.tags), ""), case.role) for case in chosen]
    first = kinds[: len(set(kinds))]
    assert len(set(first)) == len(first) > 30 and {kind for kind, _ in first} == {*FIRST, ""}
    held = [bool(targets(case, "gpu")) for case in chosen[: len(first)]]
    assert held == sorted(held, reverse=True) and sum(held) > 20
    assert 50 < sum(bool(targets(case, "gpu")) for case in chosen) < 100
