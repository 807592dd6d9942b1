"""The harness on tiny problems, and on stand-ins for what there is not here: GPUs, CUPTI, failures, and runs that end early."""

import argparse
import dataclasses
import functools
import json
import math
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from msgspec import structs
from test_report import result, row

import jaxext
from jaxext.bench import bench_report as report
from jaxext.bench import cells, digests, problems
from jaxext.bench.case import Case
from jaxext.bench.kinds import Conv, Matmul
from jaxext.cli import bench
from jaxext.cli.terminal import UsageError
from jaxext.tables import active, environment
from jaxext.tables.table_format import Measurement, Table
from jaxext.tuning import random_operands, timing

MATMUL = Matmul(name="tiny", M=6, N=5, K=4, tags=frozenset({"matmul"}), numbers=("bf16", "int8"))
CONV = Conv(name="small", x=(2, 5, 5, 4), w=(3, 3, 1, 4), groups=4, tags=frozenset({"depthwise"}))


@pytest.fixture(autouse=True)
def few_problems(monkeypatch):
    monkeypatch.setattr(problems, "PROBLEMS", (MATMUL, CONV))
    monkeypatch.setattr(bench, "keep_freed_memory", lambda: True)  # the rest of the tests would be kept too


def options(*arguments):
    parser = argparse.ArgumentParser(exit_on_error=False)
    bench.add_arguments(parser)
    return parser.parse_args(["--quick", *map(str, arguments)])


def run(*arguments):
    return bench.run(options(*arguments))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="it is about a machine without a GPU")
def test_trial_run(tmp_path, capsys):
    path = tmp_path / "made" / "report.json"
    assert run("--roles", "nt", "wgrad", "--json", path) == 0
    out, read = capsys.readouterr().out, report.read(path)
    assert names(read.rows) == ["tiny nt float32", "small wgrad float32"] and not read.interrupted
    for each in read.rows:
        assert each.timed.keys() == {"lax", "xla"} and each.ours == "xla" and each.name in out
        assert all(float(timed.error) < 1e-6 and timed.compile_ms and timed.tflops for timed in each.timed.values())
        for ours in ("triton", "cuda"):
            refusal = each.results[ours]
            assert isinstance(refusal, report.Refusal) and "platform is 'cpu'" in refusal.refused and refusal.refused in out
    assert "lax ms" in out and "xla ms" in out and "triton ms" not in out  # which refused everything
    product, _ = read.rows
    assert product.bytes == 4 * (6 * 5 + 4 * 5 + 6 * 4) and product.flops == 2 * 6 * 5 * 4
    assert product.floor_ms == pytest.approx(1e3 * max(product.bytes / read.ceilings["copy"], product.flops / read.ceilings["float32"]))
    assert product.timed["lax"].roofline == pytest.approx((product.floor_ms or 0) / product.timed["lax"].ms[1], rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--tags", "matmul", "--roles", "nn", "tn"], ["tiny nn float32", "tiny tn float32"]),
        (["--only", "tiny", "--dtype", "int8", "float16", "--roles", "nn"], ["tiny nn int8", "tiny nn float16"]),
        (["--dtype", "int8", "--roles", "nn", "fprop"], ["tiny nn int8"]),  # the convolution is not about integers
    ],
)
def test_cases(arguments, names, capsys):
    assert run("--list", *arguments) == 0 and capsys.readouterr().out.splitlines() == names


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--tags", "nonsense"], "no problem is tagged nonsense"),
        (["--dtype", "float9"], "dtype is 'float9', want one of"),
        (["--compare", "/nowhere/a.json", "/nowhere/b.json"], "--compare: .*No such file"),
        (["--json", "/dev/null/report.json"], "--json: .*/dev/null"),
        (["--resume"], "--resume: name the report to continue with --json"),
    ],
)
def test_errors_come_before_anything_is_measured(arguments, sentence, monkeypatch):
    monkeypatch.setattr(cells, "measure", lambda *_: pytest.fail("it was measured"))
    with pytest.raises(UsageError, match=sentence):
        run(*arguments)


def test_no_table_counts(monkeypatch):
    """A tuning between two reports would otherwise look like a change of the code."""
    case, seen = CONV.case("fprop", "float32"), []
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(case.shapes, case.dtypes, strict=True)]
    explain = functools.partial(jaxext.explain(case.build("jaxext")), *arrays)
    monkeypatch.setattr(cells, "measure", lambda *_: seen.append(explain().rows[0].how) or sys.exit())
    monkeypatch.setattr(cells, "ceilings", lambda *_: {"copy": 1e9})
    with active.collecting() as calls:
        (usual,) = explain().rows
    shifts = Measurement(implementation="xla", config={"algorithm": "shifts"}, ms=(1.0, 1.0, 1.0), error=0.0)
    with jaxext.use_table(Table(active.context("cpu"), {calls[0].problem: [shifts]}, "a tuning")):
        assert explain().rows[0].how == "shifts" != usual.how
        with pytest.raises(SystemExit):
            run("--only", "small", "--roles", "fprop")
    assert seen == [usual.how]


def test_reduced_or_not(monkeypatch):
    """Problems are reduced without a GPU unless --full is given, and with one only if --reduced is; a problem for CPUs is never reduced."""
    large = dataclasses.replace(MATMUL, M=8192, N=8192, K=8192, name="large")
    for_cpus = dataclasses.replace(large, name="for CPUs", tags=frozenset({"cpu"}))
    monkeypatch.setattr(problems, "PROBLEMS", (large, for_cpus))
    for gpu, reduced, full, is_reduced in [(0, 0, 0, 1), (0, 0, 1, 0), (1, 0, 0, 0), (1, 1, 0, 1)]:
        monkeypatch.setattr(bench.jax, "default_backend", lambda gpu=gpu: "gpu" if gpu else "cpu")
        asked = options("--roles", "nn", "--dtype", "bfloat16")
        asked.quick, asked.reduced, asked.full = False, bool(reduced), bool(full)
        assert [case.flops < 1e10 for case in bench.cases(asked)] == [bool(is_reduced), False]


# Runs


@pytest.fixture
def made_up(monkeypatch):
    """Rows by the next of `outcomes`, which may raise; what was asked of them."""
    asked, outcomes = [], []

    def measure(case, targets, how):
        asked.append((case, targets, how))
        outcome = outcomes.pop(0) if outcomes else {}
        if isinstance(outcome, BaseException):
            raise outcome
        found = row(case.problem, case.role, dtype=case.dtype, tags=(), targets=targets, **{"lax": 1.0, "xla": 1.0} | outcome)
        return structs.replace(found, digests=digests.digests((), case.numbers, found.results, "cpu"))

    monkeypatch.setattr(cells, "measure", measure)
    monkeypatch.setattr(cells, "ceilings", lambda *_: {"copy": 1e9})
    return types.SimpleNamespace(asked=asked, outcomes=outcomes)


def names(rows):
    return [each.name for each in rows]


@pytest.mark.parametrize(
    ("outcome", "status", "said"),
    [
        ({"xla": result(1.0, error=math.nan)}, 1, "xla is wrong: relative error nan"),
        ({"cuda": report.Failure("OSError: gone")}, 1, "cuda failed: OSError: gone"),
        ({"lax": report.Failure("no"), "xla": report.Failure("no")}, 0, "lax failed: no"),
        ({"cuda": report.Refusal("not this one")}, 0, "cuda does not support it: not this one"),
        ({"xla": result(1.0, error="no truth: MemoryError")}, 0, "xla was not checked: no truth: MemoryError"),
        (KeyboardInterrupt(), 130, "interrupted after 1 cases"),
    ],
)
def test_exit_status(made_up, capsys, outcome, status, said):
    made_up.outcomes += [{}, outcome]
    assert run("--tags", "matmul") == status
    assert said in capsys.readouterr().out


def test_options_of_a_run(made_up, monkeypatch, capsys, tmp_path):
    """Missed targets are printed, and are no fault; there may be no time left."""
    monkeypatch.setattr(bench, "targets", lambda case, platform: {"xla": {"lax": 5.0}, "cuda": {"best": 2.0}})
    assert run("--roles", "nn", "--without", "cuda") == 0
    assert "xla lax 1, target 5 MISSED [tiny nn float32]" in capsys.readouterr().out
    ((_, expected, how),) = made_up.asked
    assert expected == {"xla": {"lax": 5.0}} and "cuda" not in how.libraries and how.libraries[0] == "lax"
    assert run("--roles", "nn", "--minutes", 0, "--json", tmp_path / "report.json") == 0
    assert report.read(tmp_path / "report.json").left_out == ("tiny nn float32",) and len(made_up.asked) == 1


def test_reports_are_read_and_compared(made_up, tmp_path, capsys):
    before, after, again, changes = (tmp_path / name for name in ("a.json", "b.json", "again.json", "changes.json"))
    made_up.outcomes += [{}, {"xla": 2.0}]
    for path in (before, after):
        run("--roles", "nn", "--json", path)
    assert run("--read", after, "--json", again) == 0 and report.read(again) == report.read(after)
    assert run("--compare", before, before) == 0 and run("--compare", before, after, "--json", changes) == 1 and len(made_up.asked) == 2
    assert [change["verdict"] for change in json.loads(changes.read_text())["changes"]] == ["within the noise", "slower"]
    assert capsys.readouterr().out.endswith("within the noise: 1; slower: 1\n")


def test_a_run_goes_on_where_it_died(made_up, tmp_path, monkeypatch, capsys):
    """Each row is written at once.  The rows that are there are not measured again, nor are the ceilings; a case in which a run died waits
    until all others are done, whether the process was killed or the device was lost, and so does the one before it."""
    path, known = tmp_path / "report.json", []
    monkeypatch.setattr(cells, "ceilings", lambda dtypes, clock, quick, there: known.append(there) or {"copy": 1e9})
    made_up.outcomes += [{}, SystemExit(9)]
    with pytest.raises(SystemExit):
        run("--json", path, "--resume")
    (first, killer), made_up.asked[:] = names(case for case, *_ in made_up.asked), []
    assert report.read(path).interrupted and names(report.read(path).rows) == [first] and report.read(path).begun == (killer,)

    gone = iter([None, "CUDA_ERROR_ILLEGAL_ADDRESS"])
    monkeypatch.setattr(cells, "lost", lambda: next(gone, None))
    assert run("--json", path, "--resume") == 130 and "the device is lost" in capsys.readouterr().out
    (second, loser), made_up.asked[:] = names(case for case, *_ in made_up.asked), []
    assert names(report.read(path).rows) == [first, second] and report.read(path).begun == (killer, loser)

    assert run("--json", path, "--resume") == 0
    read = report.read(path)
    assert names(read.rows)[:2] == [first, second] and sorted(names(read.rows)[-2:]) == sorted([killer, loser])
    assert not read.interrupted and read.begun == () and names(case for case, *_ in made_up.asked) == names(read.rows)[2:]
    assert known == [{}, {"copy": 1e9}, {"copy": 1e9}]


def test_a_run_goes_on_with_the_rows_whose_code_is_the_same(made_up, tmp_path, monkeypatch):
    """A row of which one library has changed is measured again, and a report of another device is refused."""
    path, world = tmp_path / "report.json", environment.report()
    made_up.outcomes += [{}, {"triton": 1.0}]
    run("--json", path)
    everything, made_up.asked[:] = names(case for case, *_ in made_up.asked), []
    monkeypatch.setattr(bench.environment, "report", lambda: dict(world, commit="another", sources={"triton": "another"}))
    assert run("--json", path, "--resume") == 0 and not made_up.asked
    known = digests.digests
    with monkeypatch.context() as patch:
        patch.setattr(digests, "digests", lambda *asked: known(*asked) | {"triton": "mended"})
        assert run("--json", path, "--resume") == 0
    assert names(case for case, *_ in made_up.asked) == everything[1:2] and sorted(names(report.read(path).rows)) == sorted(everything)
    monkeypatch.setattr(bench.environment, "report", lambda: dict(world, device="another", versions={}))
    with pytest.raises(UsageError, match="--resume: .*report.json was measured with another device, versions: name another file"):
        run("--json", path, "--resume")


def test_a_row_that_hangs_ends_the_process(monkeypatch):
    """Nothing else ends a kernel that hangs on a GPU; the next row has as long again."""
    calls = []
    monkeypatch.setattr(bench.faulthandler, "dump_traceback_later", lambda seconds, exit, file: calls.append((seconds, exit)))
    monkeypatch.setattr(bench.faulthandler, "cancel_dump_traceback_later", lambda: calls.append("done"))
    monkeypatch.setattr(cells, "measure", lambda case, targets, how: calls.append("measured"))
    for platform in ("cpu", "gpu"):
        monkeypatch.setattr(bench.jax, "default_backend", lambda platform=platform: platform)
        bench._row(MATMUL.case("nn", "float32"), types.SimpleNamespace(libraries=["lax"]))  # type: ignore[arg-type]
    assert calls == ["measured", (bench.STUCK_S, True), "measured", "done"]


# Cells


def measured(case, clock: Any = None, libraries=("lax", "xla", "triton", "cuda", "jaxext")):
    clock = clock or types.SimpleNamespace(name="made up", sampler=lambda program: lambda: 2.0)
    return cells.measure(case, {}, cells.Bench(libraries, clock, 1, {"copy": 1e9, "float32": 1e9}))


def test_wrong_and_broken_libraries(monkeypatch):
    """Each says so in its own place, and the others are measured; only our own "does not support this call" is a refusal."""

    def lacking(a, b):
        raise NotImplementedError("no rule")

    by = {"xla": lambda a, b: (a @ b).at[0, 0].set(jnp.nan), "triton": lacking, "cuda": lambda a, b: (a @ b)[:1]}
    build = Case.build
    monkeypatch.setattr(Case, "build", lambda case, library: by.get(library) or build(case, library))
    found = measured(MATMUL.case("nn", "float32"))
    assert math.isnan(float(found.timed["xla"].error)) and float(found.timed["lax"].error) < 1e-6 and found.timed["lax"].ms == (2, 2, 2)
    assert found.results["triton"] == report.Failure("NotImplementedError: no rule")
    assert "result has shape (1, 5), want the truth's (6, 5)" in found.results["cuda"].failed  # type: ignore[union-attr]


def test_nothing_right_is_left_in_memory(monkeypatch):
    """A kernel that leaves its result unwritten must not find the right result of the library before it."""
    order, poison = [], random_operands.poison
    shapes = lambda results: order.append(jax.tree.map(lambda x: x.shape, results))
    monkeypatch.setattr(random_operands, "poison", lambda results: poison(results) or shapes(results))
    monkeypatch.setattr(timing, "relative_error", lambda result, truth: order.append("compared") or (0.0, 0.0))
    measured(MATMUL.case("step", "float32"), libraries=("lax", "xla"))
    assert order == 2 * [((6, 5), (6, 4), (4, 5)), "compared"]


def test_a_mixture_is_measured_too(monkeypatch):
    """The choice of jaxext is a library of its own if it mixes others."""

    def rows(*names):
        return lambda _: lambda *_: types.SimpleNamespace(rows=[types.SimpleNamespace(chosen=name, how="so", refused={}) for name in names])

    for names, there in ((("xla", "triton"), True), (("xla", "xla"), False)):
        monkeypatch.setattr(cells.jaxext, "explain", rows(*names))
        row = measured(MATMUL.case("nn", "float32"))
        assert ("jaxext" in row.timed) == there and row.ours == ("jaxext" if there else "xla")


def test_a_row_by_cupti(monkeypatch):
    """Integers are exact."""
    clock = object.__new__(timing.Cupti)
    monkeypatch.setattr(timing.Cupti, "kernels_ms", lambda self, program, cold=True: {"gemm": 2.0, "pad": 1.0} if cold else {"gemm": 1.0})
    taken = measured(MATMUL.case("nn", "int8"), clock, ("lax",)).timed["lax"]
    assert taken.ms == (3, 3, 3) and taken.warm_ms == (1, 1, 1) and taken.kernels_ms == {"gemm": 2.0, "pad": 1.0} and taken.error == 0
    assert taken.wall_ms is not None and taken.wall_ms[0] > 0
    assert cells.Bench((), clock, 1, {}, brief=True).clocks.keys() == {"ms"}


TEXT = """
%fused (p: f32[2,3]) -> f32[3,2] {
  ROOT %transpose.1 = f32[3,2]{1,0} transpose(%p), dimensions={1,0}, metadata={op_name="copy(pad("}
}
ENTRY main (a: f32[2,3]) -> f32[3,2] {
  copy-start.2 = (f32[2,3]{1,0}, f32[2,3]{1,0}, /*index=2*/u32[]) copy-start(a)
  copy.3 = f32[2,3]{1,0:T(8,128)} copy(a)
}
"""


def test_instructions_that_only_move_data_are_counted():
    assert cells.strays(TEXT) == {"transpose": 1, "copy": 2, "pad": 0}
    program = timing.compile(lambda x: jnp.pad(x, 1) @ jnp.pad(x, 1), [jnp.ones((3, 3))])
    assert cells.strays(program.compiled.as_text())["pad"] >= 1
    with pytest.raises(ValueError, match="no instruction of XLA is found in 'something new'"):
        cells.strays("something new")
