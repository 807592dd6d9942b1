"""The sweep over random convolutions: what it draws, how it judges, and what it reports.  Times are made up; one row is measured."""

import dataclasses
import math
import operator
import types

import jax
import jax.numpy as jnp
import pytest

from jaxext.benchmarks import plan_rows, plan_sweep, sweep_report
from jaxext.benchmarks.draws import KINDS, LEAST_WORK, MOST_WORK, draw
from jaxext.benchmarks.geometry import parse
from jaxext.benchmarks.named import named
from jaxext.benchmarks.plan_rows import Pair, PlanRow, Side
from jaxext.benchmarks.sweep_report import Report

SPEC = "wgrad float32 x=2,9,8,4 w=3,3,2,8 stride=2,1 padding=1:1,0:2 groups=2"


@pytest.fixture(scope="module")
def drawn():
    return [draw(7, number) for number in range(720)]


def test_every_kind_is_drawn_in_every_role_rank_and_size(drawn):
    roles = {kind: {geometry.role for name, geometry in drawn if name == kind} for kind in KINDS}
    assert roles == {kind: {"wgrad"} if kind == "per-example" else {"fprop", "dgrad", "wgrad"} for kind in KINDS}
    assert {geometry.rank for _, geometry in drawn} == {0, 1, 2, 3}
    assert {geometry.dtype for _, geometry in drawn} == {"float32", "bfloat16"}
    works = [geometry.work for _, geometry in drawn]
    assert all(LEAST_WORK <= work <= MOST_WORK for work in works)
    assert all(any(10**n <= work < 10 ** (n + 1) for work in works) for n in (5, 6, 7, 8))


def test_a_draw_is_a_function_of_seed_and_number(drawn):
    assert [draw(7, number) for number in (0, 31)] == [drawn[0], drawn[31]]
    assert draw(8, 0) != drawn[0]
    assert {kind for kind, _ in (draw(7, number, ("long", "rgb")) for number in range(4))} == {"long", "rgb"}


def test_specs_round_trip(drawn):
    for _, geometry in [*drawn, *named()]:
        assert parse(str(geometry)) == geometry
    assert str(parse(SPEC)) == SPEC
    assert parse("dgrad x=1,9,9,2 w=3,3,1,2 stride=2 padding=SAME groups=2").padding == ((1, 1), (1, 1))


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("", "w: is missing"),
        ("backward x=1,4,2 w=2,2,2", "role: got 'backward'"),
        ("fprop x=1,4,2 w=2,2,2 colour=3", "colour: is no field"),
        ("fprop x=1,4,2 w=2,2,2 stride=2,2", "stride: got \\(2, 2\\), want one for each of 1"),
        ("fprop x=1,4,2 w=2,2,2 groups=2", "groups: got 2"),
    ],
)
def test_a_wrong_spec_is_an_error_that_says_where(spec, says):
    with pytest.raises(ValueError, match=says):
        parse(spec)


@pytest.mark.parametrize(
    ("spec", "work"),
    [
        ("fprop x=3,5 w=5,7", 3 * 5 * 7),
        ("fprop x=1,4,2 w=3,2,2 padding=SAME", (2 + 3 + 3 + 2) * 2 * 2),  # taps on the padding multiply nothing
        ("dgrad x=1,4,1 w=2,1,1 input_dilation=2 padding=1:1", 4 * 2),  # nor do those on a dilation's zeros
        ("wgrad x=4,4,2 w=2,2,6 batch_groups=2", 2 * 3 * 2 * 2 * 6),
        ("wgrad x=2,4,2 w=2,1,6 groups=2 batch=5 mapped=x", 5 * 2 * 3 * 2 * 6),
        ("step x=1,4,2 w=1,2,2 layers=3", 3 * 3 * 4 * 2 * 2),
    ],
)
def test_work_counts_products_without_zeros(spec, work):
    assert parse(spec).work == work


@pytest.mark.parametrize(
    "spec",
    [SPEC, "dgrad x=2,6 w=3,4 groups=2 batch=2 mapped=w", "step x=1,4,2 w=1,1,2 groups=2 layers=2"],
    ids=lambda spec: spec.split()[0],
)
def test_both_libraries_are_asked_for_the_same(spec):
    geometry = parse(spec)
    arguments = [jnp.arange(math.prod(shape), dtype=jnp.float32).reshape(shape) / 8 for shape in geometry.shapes]
    ours, theirs = (jax.tree.leaves(jax.jit(geometry.build(library))(*arguments)) for library in ("jaxext", "lax"))
    assert len(ours) == len(theirs) and all(jnp.allclose(a, b, rtol=1e-5) for a, b in zip(ours, theirs, strict=True))


def test_a_row_is_measured():
    row = plan_rows.measure(parse(SPEC), "grouped")
    assert row.failed is None and row.algorithms and "result" not in row.broken
    assert row.last and row.last.lax.bytes >= 4 * (2 * 9 * 8 * 4 + 2 * 5 * 8 * 8) and row.last.ours.build_ms > 0


def test_every_algorithm_is_measured():
    stages = []
    sides = plan_rows.alternatives(parse("fprop x=1,6,2 w=2,1,2 groups=2"), 3, tell=stages.append)
    assert {"(lax)", "shifts", "lax", "dots", "loop"} <= sides.keys()
    assert all(isinstance(side, Side) for side in sides.values()) and "dots: compiling" in stages
    told = sweep_report.algorithms(sides)
    assert len(told) == len(sides) and sum("P" in line[:4] for line in told) == sum("*" in line[:4] for line in told) == 1


# The judgement, by times that are made up

LAX = dict(ms=[1.0], bytes=1000, build=100.0, value=1.0)


class Made:
    """A program that takes what the test says."""

    def __init__(self, ms, bytes, build, value):
        self.arguments, self.trace_ms, self.compile_ms, self.value, self.ms = (), 0.0, build, value, ms
        used = dict(argument_size_in_bytes=0, output_size_in_bytes=bytes, temp_size_in_bytes=0, alias_size_in_bytes=0)
        self.compiled = types.SimpleNamespace(memory_analysis=lambda: types.SimpleNamespace(**used))

    def __call__(self):
        if isinstance(self.value, Exception):
            raise self.value
        return jnp.full(3, self.value)


def judged(monkeypatch, builds=(), **ours):
    """The row of programs that take what `LAX` and `ours` say; `ms` are sampled round by round; `builds` come after the first."""
    rounds = {"lax": LAX, "jaxext": LAX | ours}
    later = iter(builds)

    def sampler(program):
        ms = program.ms.pop(0) if len(program.ms) > 1 else program.ms[0]
        return lambda: ms

    made = {library: Made(**takes | {"ms": list(takes["ms"])}) for library, takes in rounds.items()}
    again = {"lax": lambda: made["lax"], "jaxext": lambda: Made(**rounds["jaxext"] | {"build": next(later)})}
    known = set()
    monkeypatch.setattr(
        plan_rows, "_built", lambda geometry, library, _: again[library]() if library in known else known.add(library) or made[library]
    )
    monkeypatch.setattr(plan_rows, "_sampler", sampler)
    return plan_rows.measure(parse(SPEC), "grouped")


@pytest.mark.parametrize(
    ("broken", "ours"),
    [
        ((), {}),
        (("time",), dict(ms=[1.2])),
        (("memory",), dict(bytes=1600)),
        ((), dict(bytes=1600, ms=[0.5])),
        (("memory",), dict(bytes=3100, ms=[0.1])),
        (("build",), dict(build=500.0)),
        (("result",), dict(value=1.1)),
        (("result",), dict(value=math.nan)),
        (("result",), dict(value=RuntimeError("out of luck"))),
    ],
    ids=str,
)
def test_what_breaks_a_goal_is_told(monkeypatch, broken, ours):
    row = judged(monkeypatch, **ours)
    assert row.broken == broken
    told = sweep_report.summary(Report({}, "made up", (row,)))
    for goal in plan_rows.GOALS:
        assert f"\n{goal}: {int(goal in broken)} rows break the goal" in told
    assert told.count(SPEC) == len(broken)


@pytest.mark.parametrize(
    ("failed", "broken"),
    [
        ("jaxext: compiling: took more than 45 s", ("build",)),
        ("jaxext: running: the process died with status -11", ("result",)),
        ("lax: running: took more than 45 s", ()),
    ],
)
def test_a_row_that_cannot_be_measured_breaks_the_goal_of_its_stage(failed, broken):
    assert PlanRow(geometry=SPEC, kind="grouped", work=1e6, failed=failed).broken == broken


def test_what_is_broken_once_does_not_count_but_is_kept(monkeypatch):
    row = judged(monkeypatch, ms=[1.5, 1.1])
    assert row.broken == () and row.first and row.again and (row.first.time, row.again.time) == (1.5, 1.1)
    row = judged(monkeypatch, build=210.0, builds=[150.0])
    assert row.broken == () and row.again and row.again.ours.build_ms == 150
    assert judged(monkeypatch, build=210.0, builds=[220.0]).broken == ("build",)


# The report


def side(ms, bytes=1000, build=100.0):
    return Side(ms=(ms, ms, ms), least_ms=ms, bytes=bytes, lower_ms=0.0, compile_ms=build)


def made_up(ms, number=0, **ours):
    """A row that takes so long, and lax 1 ms."""
    geometry = dataclasses.replace(parse(SPEC), x=(2 + number, 9, 8, 4))
    return PlanRow(geometry=str(geometry), kind="grouped", work=1e6, algorithms=("dots",), first=Pair(lax=side(1.0), ours=side(ms, **ours)))


def test_a_report_is_what_was_written(tmp_path):
    rows = (
        made_up(1.0),
        dataclasses.replace(made_up(2.0, 1), difference=math.inf),
        PlanRow(geometry=SPEC, kind="", work=1.0, failed="lax: no"),
    )
    report = Report({"device": "a CPU"}, "made up", rows)
    sweep_report.write(tmp_path / "of" / "it.json", report)
    assert sweep_report.read(tmp_path / "of" / "it.json") == report
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match="not a report of schema"):
        sweep_report.read(tmp_path / "other.json")


def test_reports_are_compared(tmp_path, capsys):
    before = [made_up(3.0, 0), made_up(0.2, 1), made_up(0.5, 2), made_up(1.0, 3), made_up(1.0, 4)]
    after = [made_up(1.0, 0), made_up(0.3, 1), made_up(0.52, 2), made_up(1.0, 3, bytes=5000)]
    paths = [str(tmp_path / name) for name in ("before.json", "after.json")]
    for path, rows in zip(paths, (before, after), strict=True):
        sweep_report.write(path, Report({}, "made up", tuple(rows)))
    assert plan_sweep.main(["--compare", *paths]) == 0
    told = capsys.readouterr().out
    assert "4 rows are in both reports, of 5 before and 4 after" in told
    assert "time: 1 (worst 2.61 times what is allowed) -> 0 rows" in told
    assert "memory: 0 -> 1 (worst 3.33 times" in told and "new: memory" in told
    assert "1 wins got smaller by more than a tenth" in told and "1.50 times as long: time 0.20 -> 0.30, dots" in told


class Asked:
    """A stand-in for a worker that answers with made-up rows and remembers the geometries that it was asked for."""

    def __init__(self):
        self.geometries = []

    def ask(self, what, geometry, *arguments, **_):
        self.geometries.append(geometry)
        if what == "alternatives":
            return {"(lax)": side(1.0), "loop": side(2.0), "dots": side(1.1, bytes=2000), "blocks/1": "it fails"}
        if len(self.geometries) == 2:
            raise RuntimeError("jaxext: running: the process died with status -11")
        return PlanRow(geometry=str(geometry), kind=arguments[0], work=1e6, first=Pair(lax=side(1.0), ours=side(1.0)))

    def close(self):
        pass


def test_a_sweep_goes_on_after_a_crash_and_where_it_ended(tmp_path, monkeypatch, capsys):
    worker, path = Asked(), tmp_path / "sweep.json"
    monkeypatch.setattr(plan_sweep, "Worker", lambda: worker)
    assert plan_sweep.main(["--count", "3", "--json", str(path)]) == 1
    assert "result: 1 rows break the goal" in capsys.readouterr().out
    assert plan_sweep.main(["--count", "5", "--json", str(path), "--resume"]) == 1
    assert worker.geometries == [draw(0, number)[1] for number in range(5)]
    assert [row.failed is None for row in sweep_report.read(path).rows] == [True, False, True, True, True]


def test_only_rows_with_another_plan_are_measured_again(tmp_path, monkeypatch):
    """The plan of small convolutions is lax's."""
    specs, algorithms = [SPEC, "fprop float32 x=2,9,8,4 w=3,3,4,8", "fprop x=8,56,56,64 w=3,3,1,64 groups=64"], ("lax",)
    rows = tuple(PlanRow(geometry=str(parse(spec)), kind="any", work=1.0, algorithms=algorithms) for spec in specs)
    sweep_report.write(tmp_path / "it.json", Report({}, "made up", rows))

    class Planned(Asked):
        def ask(self, what, geometry, *arguments, **_):
            return plan_rows.planned(geometry) if what == "planned" else super().ask(what, geometry, *arguments)

    worker = Planned()
    monkeypatch.setattr(plan_sweep, "Worker", lambda: worker)
    plan_sweep.main(["--changed", str(tmp_path / "it.json")])
    assert worker.geometries == [parse(spec) for spec in specs if plan_rows.planned(parse(spec)) != algorithms] != []
    assert parse(specs[1]) not in worker.geometries


def test_losers_are_shown_with_every_algorithm(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(plan_sweep, "Worker", Asked)
    sweep_report.write(tmp_path / "it.json", Report({}, "made up", (made_up(1.0), made_up(2.0, 1), made_up(4.0, 2))))
    assert plan_sweep.main(["--losers", str(tmp_path / "it.json"), "--most", "1"]) == 0
    told = capsys.readouterr().out
    assert made_up(4.0, 2).geometry in told and made_up(2.0, 1).geometry not in told
    assert " P  loop " in told and "  * dots" in told and "breaks memory" in told and "it fails" in told


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--row", "fprop x=1,2"], "w: is missing"),
        (["--resume"], "--resume: "),
        (["--only", "odd"], "--only: got odd"),
        (["--read", "/no"], "/no"),
    ],
    ids=lambda value: value[0],
)
def test_a_wrong_option_is_an_error_of_one_line(capsys, arguments, says):
    assert plan_sweep.main(arguments) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


def test_a_worker_that_dies_or_takes_too_long_is_an_error(monkeypatch):
    monkeypatch.setattr(plan_sweep, "serve", operator.methodcaller("close"))
    worker = plan_sweep.Worker()
    with pytest.raises(RuntimeError, match="lax: starting: the process died with status 0"):
        worker.ask("row")
    with pytest.raises(RuntimeError, match="lax: starting: took more than 0 s"):
        worker.ask("row", patience_s=0.0)
