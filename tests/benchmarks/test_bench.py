"""The harness on tiny problems, and on stand-ins for what there is not here: GPUs, CUPTI, cuBLAS, failures, and Ctrl-C."""

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

import jaxext
from jaxext.bench import bench_report as report
from jaxext.bench import cells, problems
from jaxext.bench.digests import digests
from jaxext.bench.kinds import Conv, Matmul
from jaxext.cli import bench
from jaxext.cli.terminal import UsageError
from jaxext.tables import active
from jaxext.tables.table_format import Measurement, Table
from jaxext.tuning import random_operands, timing

MATMUL = Matmul(name="tiny", M=6, N=5, K=4, tags=frozenset({"matmul"}), numbers=("bf16", "int8"))
CONV = Conv(name="small", x=(2, 5, 5, 4), w=(3, 3, 1, 4), groups=4, tags=frozenset({"depthwise"}))
on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="it is about a machine without a GPU")


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


@on_cpu
def test_trial_run(tmp_path, capsys):
    path = tmp_path / "made" / "report.json"
    assert run("--roles", "nt", "wgrad", "--json", path) == 0
    out = capsys.readouterr().out
    read = report.read(path)
    assert [row.name for row in read.rows] == ["tiny nt float32", "small wgrad float32"]
    assert read.ceilings.keys() == {"copy", "float32"} and read.not_cupti == "the platform is 'cpu'" and not read.interrupted
    assert read.timer == "wall time of calls one by one, freed memory kept"
    assert read.environment["versions"]["jax"] == jax.__version__
    for row in read.rows:
        assert row.timed.keys() == {"lax", "xla"} and row.ours == "xla" and row.name in out
        for result in row.timed.values():
            assert float(result.error) < 1e-6 and result.compile_ms and result.tflops and result.warm_ms is result.wall_ms is None
        for ours in ("triton", "cuda"):
            refusal = row.results[ours]
            assert isinstance(refusal, report.Refusal) and "platform is 'cpu'" in refusal.refused and refusal.refused in out
    assert "lax ms" in out and "xla ms" in out and "triton ms" not in out and "cublas ms" not in out  # which refused everything
    product, convolution = read.rows
    assert product.bytes == 4 * (6 * 5 + 4 * 5 + 6 * 4) and product.flops == 2 * 6 * 5 * 4
    assert product.results["cublas"] == report.Refusal("the platform is 'cpu'") and "cublas" not in convolution.results
    assert product.floor_ms == pytest.approx(1e3 * max(product.bytes / read.ceilings["copy"], product.flops / read.ceilings["float32"]))
    share = (product.floor_ms or 0) / product.timed["lax"].ms[1]
    assert share and product.timed["lax"].roofline == pytest.approx(share, rel=1e-5)  # six digits are kept


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--tags", "matmul", "--roles", "nn", "tn"], ["tiny nn float32", "tiny tn float32"]),
        (["--only", "fprop", "--dtype", "bfloat16"], ["small fprop bfloat16"]),
        (["--only", "tiny", "--dtype", "int8", "float16", "--roles", "nn"], ["tiny nn int8", "tiny nn float16"]),
        (["--dtype", "int8", "--roles", "nn", "fprop"], ["tiny nn int8"]),  # the convolution is not about integers
    ],
)
def test_cases(arguments, names, capsys, tmp_path):
    assert run("--list", *arguments, "--json", tmp_path / "made" / "list.json") == 0
    assert capsys.readouterr().out.splitlines() == json.loads((tmp_path / "made" / "list.json").read_text())["cases"] == names


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--tags", "nonsense"], "no problem is tagged nonsense"),
        (["--only", "nonsense", "--roles", "nn"], "no case for --only nonsense --roles nn"),
        (["--dtype", "float9"], "dtype is 'float9', want one of"),
        (["--compare", "/nowhere/a.json", "/nowhere/b.json"], "--compare: .*No such file"),
        (["--read", "/nowhere/a.json"], "--read: .*No such file"),
        (["--json", "/dev/null/report.json"], "--json: .*/dev/null"),
    ],
)
def test_what_there_is_not(arguments, sentence, monkeypatch):
    """The error comes before anything is measured."""
    monkeypatch.setattr(cells, "measure", lambda *_: pytest.fail("it was measured"))
    with pytest.raises(UsageError, match=sentence):
        run(*arguments)


def test_no_table_counts(monkeypatch):
    """A tuning between two reports would otherwise look like a change of the code."""
    seen = []
    explain = functools.partial(jaxext.explain(CONV.case("fprop", "float32").build("jaxext")), *struct(CONV.case("fprop", "float32")))
    monkeypatch.setattr(cells, "measure", lambda *_: seen.append(explain().rows[0].how) or sys.exit())
    monkeypatch.setattr(cells, "ceilings", lambda *_: {"copy": 1e9})
    (usual,) = explain().rows
    context = active.context("cpu")
    rows = {_called(explain): [Measurement(implementation="xla", config={"algorithm": "shifts"}, ms=(1.0, 1.0, 1.0), error=0.0)]}
    with jaxext.use_table(Table(context, rows, "a tuning")):
        assert explain().rows[0].how == "shifts" != usual.how
        with pytest.raises(SystemExit):
            run("--only", "small", "--roles", "fprop")
    assert seen == [usual.how]


def struct(case):
    return [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(case.shapes, case.dtypes, strict=True)]


def _called(explain):
    with active.collecting() as calls:
        explain()
    return calls[0].problem


def test_reduced_or_not():
    """Problems are reduced without a GPU unless --full is given, and with one only if --reduced is; a problem for CPUs is never reduced."""
    large = dataclasses.replace(MATMUL, M=8192, N=8192, K=8192, name="large")
    for_cpus = dataclasses.replace(large, name="for CPUs", tags=frozenset({"cpu"}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(problems, "PROBLEMS", (large, for_cpus))
        for gpu, reduced, full, twin in [(0, 0, 0, 1), (0, 0, 1, 0), (1, 0, 0, 0), (1, 1, 0, 1)]:
            patch.setattr(bench.jax, "default_backend", lambda gpu=gpu: "gpu" if gpu else "cpu")
            asked = options("--roles", "nn", "--dtype", "bfloat16")
            asked.quick, asked.reduced, asked.full = False, bool(reduced), bool(full)
            assert [case.flops < 1e10 for case in bench.cases(asked)] == [bool(twin), False]


def result(ms=1.0, error: float | str = 0.0):
    return report.Result(ms=(ms, ms, ms), tflops=1, gbps=1, error=error, worst=error, trace_ms=1, compile_ms=1)


@pytest.fixture
def made_up(monkeypatch):
    """Rows by the next of `outcomes`, which may raise; what was asked of them."""
    asked, outcomes = [], []

    def measure(case, targets, how):
        asked.append((case, targets, how))
        outcome = outcomes.pop(0) if outcomes else {}
        if isinstance(outcome, BaseException):
            raise outcome
        facts: Any = dict(name=case.name, problem=case.problem, tags=(), role=case.role, dtype=case.dtype, shapes=case.shapes)
        results = report.Results({"lax": result(), "xla": result()} | outcome)
        known = digests((), case.numbers, results, "cpu")
        return report.Measured(**facts, flops=case.flops, bytes=1, targets=targets, results=results, digests=known)

    monkeypatch.setattr(cells, "measure", measure)
    monkeypatch.setattr(cells, "ceilings", lambda *_: {"copy": 1e9})
    return types.SimpleNamespace(asked=asked, outcomes=outcomes)


def test_ctrl_c_keeps_what_was_measured(made_up, tmp_path, capsys):
    made_up.outcomes += [{}, KeyboardInterrupt()]
    path = tmp_path / "report.json"
    assert run("--json", path) == 130
    read = report.read(path)
    assert read.interrupted and [row.name for row in read.rows] == ["tiny nn float32"]
    assert "interrupted after 1 cases" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("outcome", "status", "said"),
    [
        ({"xla": result(error=math.nan)}, 1, "xla is wrong: relative error nan"),
        ({"triton": result(error=0.1)}, 1, "triton is wrong"),
        ({"cuda": report.Failure("OSError: gone")}, 1, "cuda failed: OSError: gone"),
        ({"lax": report.Failure("no"), "xla": report.Failure("no")}, 0, "lax failed: no"),
        ({"cuda": report.Refusal("not this one")}, 0, "cuda refused: not this one"),
        ({"xla": result(error="no truth: MemoryError")}, 0, "xla was not checked: no truth: MemoryError"),
    ],
)
def test_exit_status(made_up, capsys, outcome, status, said):
    made_up.outcomes += [{}, outcome]
    assert run("--tags", "matmul") == status
    assert said in capsys.readouterr().out


def test_targets_are_told_but_no_fault(made_up, monkeypatch, capsys):
    monkeypatch.setattr(bench, "targets", lambda case, platform: {"xla": {"lax": 5.0}, "cuda": {"best": 2.0}})
    assert run("--roles", "nn", "--without", "cuda") == 0
    assert "xla lax 1 of 5 MISSED [tiny nn float32]" in capsys.readouterr().out
    ((_, targets, how),) = made_up.asked
    assert targets == {"xla": {"lax": 5.0}} and "cuda" not in how.libraries and how.libraries[0] == "lax"
    run("--roles", "nn", "--implementation", "xla")
    assert list(made_up.asked[-1][2].libraries) == ["lax", "xla"]


def test_no_time_left(made_up, tmp_path, capsys):
    path = tmp_path / "report.json"
    assert run("--roles", "nn", "--minutes", 0, "--json", path) == 0
    assert report.read(path).left_out == ("tiny nn float32",) and not made_up.asked
    assert "left out, for want of time: tiny nn float32" in capsys.readouterr().out


def test_a_report_of_before(made_up, tmp_path, capsys):
    """Read again, told again, and nothing measured."""
    before, again = tmp_path / "a.json", tmp_path / "b.json"
    run("--roles", "nn", "--json", before)
    asked = len(made_up.asked)
    assert run("--read", before, "--json", again) == 0
    assert len(made_up.asked) == asked and report.read(again) == report.read(before)


@pytest.mark.parametrize(("factor", "status"), [(1.0, 0), (0.5, 0), (2.0, 1)])
def test_compare(made_up, tmp_path, capsys, factor, status):
    before, after, changes = (tmp_path / name for name in ("a.json", "b.json", "changes.json"))
    made_up.outcomes += [{}, {"xla": result(ms=factor)}]
    for path in (before, after):
        run("--roles", "nn", "--json", path)
    assert run("--compare", before, after, "--json", changes) == status
    (change,) = [change for change in json.loads(changes.read_text())["changes"] if change["library"] == "xla"]
    assert change["verdict"] == {1.0: "within the noise", 0.5: "faster", 2.0: "slower"}[factor]
    assert ("slower" in capsys.readouterr().out.splitlines()[-1]) or status == 0


# Cells


class Faked(type(MATMUL.case("nn", "float32"))):
    """A case whose functions are those of `by`, where it has one for the library."""

    by: dict = {}

    def build(self, library):
        return self.by.get(library) or super().build(library)


def faked(by, role="nn", dtype="float32"):
    case = MATMUL.case(role, dtype)
    made = Faked(**{field.name: getattr(case, field.name) for field in dataclasses.fields(case)})
    object.__setattr__(made, "by", by)
    return made


def measured(case, clock: Any = None, libraries=("lax", "xla", "triton", "cuda", "jaxext")):
    clock = clock or types.SimpleNamespace(name="made up", sampler=lambda program: lambda: 2.0)
    return cells.measure(case, {}, cells.Bench(libraries, clock, 1, {"copy": 1e9, "float32": 1e9}))


def test_wrong_and_broken_libraries():
    """Each says so in its own place, and the others are measured; only our own "does not support this call" is a refusal."""

    def wrong(a, b):
        return (a @ b).at[0, 0].set(jnp.nan)

    def lacking(a, b):
        raise NotImplementedError("no rule")

    row = measured(faked({"xla": wrong, "triton": lacking, "cuda": lambda a, b: (a @ b)[:1]}))
    assert math.isnan(float(row.timed["xla"].error)) and float(row.timed["lax"].error) < 1e-6 and row.timed["lax"].ms == (2, 2, 2)
    assert row.results["triton"] == report.Failure("NotImplementedError: no rule")
    assert "result has shape (1, 5), want the truth's (6, 5)" in row.results["cuda"].failed  # type: ignore[union-attr]


def test_nothing_right_is_left_in_memory(monkeypatch):
    """A kernel that leaves its result unwritten must not find the right result of the library before it."""
    order = []
    poison = random_operands.poison
    monkeypatch.setattr(
        random_operands, "poison", lambda results: poison(results) or order.append(jax.tree.map(lambda x: x.shape, results))
    )
    monkeypatch.setattr(timing, "relative_error", lambda result, truth: order.append("compared") or (0.0, 0.0))
    measured(MATMUL.case("step", "float32"), libraries=("lax", "xla"))
    assert order == 2 * [((6, 5), (6, 4), (4, 5)), "compared"]


def test_integers_are_exact():
    row = measured(MATMUL.case("nn", "int8"), libraries=("lax", "xla"))
    assert row.timed.keys() == {"lax", "xla"} and all(result.error == 0 for result in row.timed.values())


def test_a_mixture_is_measured_too(monkeypatch):
    """The choice of jaxext is a library of its own if it mixes others."""

    def rows(*names):
        return lambda _: lambda *_: types.SimpleNamespace(rows=[types.SimpleNamespace(chosen=name, how="so", refused={}) for name in names])

    for names, there in ((("xla", "triton"), True), (("xla", "xla"), False)):
        monkeypatch.setattr(cells.jaxext, "explain", rows(*names))
        row = measured(MATMUL.case("nn", "float32"))
        assert ("jaxext" in row.timed) == there and row.ours == ("jaxext" if there else "xla")


def test_a_row_by_cupti(monkeypatch):
    clock = object.__new__(timing.Cupti)
    monkeypatch.setattr(timing.Cupti, "kernels_ms", lambda self, program, cold=True: {"gemm": 2.0, "pad": 1.0} if cold else {"gemm": 1.0})
    row = measured(MATMUL.case("nn", "float32"), clock, ("lax",))
    taken = row.timed["lax"]
    assert taken.ms == (3, 3, 3) and taken.warm_ms == (1, 1, 1) and taken.kernels_ms == {"gemm": 2.0, "pad": 1.0}
    assert taken.wall_ms is not None and taken.wall_ms[0] > 0
    assert cells.Bench((), clock, 1, {}, brief=True).clocks.keys() == {"ms"}


TEXT = """
%fused (p: f32[2,3]) -> f32[3,2] {
  %p = f32[2,3]{1,0} parameter(0)
  ROOT %transpose.1 = f32[3,2]{1,0} transpose(%p), dimensions={1,0}, metadata={op_name="copy(pad("}
}
ENTRY main (a: f32[2,3]) -> f32[3,2] {
  a = f32[2,3]{1,0} parameter(0)
  copy-start.2 = (f32[2,3]{1,0}, f32[2,3]{1,0}, /*index=2*/u32[]) copy-start(a)
  copy.3 = f32[2,3]{1,0:T(8,128)} copy(a)
  ROOT fusion = f32[3,2]{1,0} fusion(copy.3), kind=kLoop, calls=fused
}
"""


def test_strays():
    assert cells.strays(TEXT) == {"transpose": 1, "copy": 2, "pad": 0}
    program = timing.compile(lambda x: jnp.pad(x, 1) @ jnp.pad(x, 1), [jnp.ones((3, 3))])
    assert cells.strays(program.compiled.as_text())["pad"] >= 1
    with pytest.raises(ValueError, match="no instruction of XLA is found in 'something new'"):
        cells.strays("something new")
