"""The harness on tiny problems, and on stand-ins for what there is not here: GPUs, CUPTI, cuBLAS, failures, and Ctrl-C."""

import argparse
import ctypes
import dataclasses
import functools
import json
import math
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import registrations

import jaxext
from jaxext import extend
from jaxext.bench import bench_report as report
from jaxext.bench import bench_tables as tables
from jaxext.bench import cells, cublas, problems
from jaxext.bench.digests import digests
from jaxext.bench.kinds import Conv, Matmul
from jaxext.cli import bench
from jaxext.cli.terminal import UsageError
from jaxext.core.implementation import Algorithm
from jaxext.ops.matmul.xla import XlaMatmul
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
    share = product.floor_ms / product.timed["lax"].ms[1]
    assert share and product.timed["lax"].roofline == pytest.approx(share, rel=1e-5)  # six digits are kept


@on_cpu
def test_an_operation_of_a_user(tmp_path, capsys):
    """Its own kernel is measured.  A kernel that the operation does not have is no failure, and another's kernel is not its own."""
    with registrations.undone():
        form = extend.define("bench_own", a="B M K", b="B K N", c="B M N")

        class Mine(extend.Implementation):
            name, version = "bench_mine", "1"

            def refuses(self, call):
                return None

            def run(self, call, config, operands):
                return XlaMatmul().run(call, Algorithm("dot_general"), operands)

        extend.register(form, Mine())
        assert run("--only", "bench_own", "--only", "tiny nn", "--dtype", "float32", "--json", tmp_path / "report.json") == 0
        product, *own = report.read(tmp_path / "report.json").rows
        line = tables.line(own[0], ["lax", "triton", "bench_mine"], bench.UNFOLDED).plain
    assert len(own) == 3 and all(row.timed.keys() == row.results.keys() == {"lax", "xla", "bench_mine"} for row in own)
    assert "bench_mine" not in product.results and product.results.keys() >= {"lax", "xla", "triton", "cuda"}
    assert "FAILED" not in capsys.readouterr().out and line[tables.NAME + tables.TIME :].split()[0] == "-"


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


@pytest.mark.parametrize("arguments", [["--json", "a"], ["--full"], ["--roles", "sideways"], ["--repeats", "-3"], ["--repeats", "0"]])
def test_bad_arguments(arguments):
    with pytest.raises(argparse.ArgumentError):
        options(*arguments)


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


def test_json_on_stdout(made_up, tmp_path, capsys):
    assert run("--roles", "nn", "--json", "-") == 0
    captured = capsys.readouterr()
    path = tmp_path / "report.json"
    path.write_text(captured.out)
    assert [row.name for row in report.read(path).rows] == ["tiny nn float32"] and "tiny nn float32" in captured.err


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


def test_no_truth_is_no_fault():
    case = dataclasses.replace(
        MATMUL.case("nn", "float32"), function=lambda operation: lambda a, b: operation(a, b) if a.itemsize < 8 else 1 / 0
    )
    row = measured(case, libraries=("lax",))
    assert row.timed["lax"].error == "no truth: ZeroDivisionError: division by zero"


def test_truth_without_float64():
    """The truth is a careful product of float32 where XLA has no float64 for it."""
    seen = []

    def function(operation):
        def product(a, b):
            if a.dtype == jnp.float64:
                raise NotImplementedError("no float64 here")
            seen.append(jax.config.jax_default_matmul_precision)  # type: ignore[attr-defined]
            return operation(a, b)

        return product

    case = dataclasses.replace(MATMUL.case("nn", "float32"), function=function)
    row = measured(case, libraries=("lax",))
    assert isinstance(row.timed["lax"].error, float) and row.timed["lax"].error < 1e-6
    assert seen.count("highest") == 1 and seen[0] is None
    with jax.default_matmul_precision("highest"):
        ours = jax.jit(MATMUL.case("nn", "float32").truth).lower(*struct(case)).as_text()
    assert "precision = [HIGHEST, HIGHEST]" in ours


@pytest.mark.parametrize("good", [0, 2])
def test_what_breaks_while_it_is_timed(good):
    """The program fails at once or after some samples."""

    def sampler(program):
        if program.function is broken and good == 0:
            raise MemoryError("at once")
        times = iter([1.0] * good)
        return lambda: next(times) if program.function is broken else 2.0

    broken = jnp.matmul
    row = measured(faked({"xla": broken}), types.SimpleNamespace(name="", sampler=sampler), ("lax", "xla"))
    assert row.timed.keys() == {"lax"}
    assert row.results["xla"] == report.Failure("StopIteration:" if good else "MemoryError: at once")


def test_ctrl_c_is_no_failure_of_a_library():
    def interrupted(a, b):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measured(faked({"xla": interrupted}))


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


@pytest.mark.parametrize("fails", ["at once", "later"])
def test_what_breaks_in_a_chain_has_its_time_by_cupti(monkeypatch, fails):
    def broken(*_):
        raise MemoryError("five results")

    clock = object.__new__(timing.Cupti)
    monkeypatch.setattr(timing.Cupti, "kernels_ms", lambda self, program, cold=True: {"gemm": 2.0})
    monkeypatch.setattr(timing.Chain, "sampler", broken if fails == "at once" else lambda self, program: broken)
    taken = measured(MATMUL.case("nn", "float32"), clock, ("lax",)).timed["lax"]
    assert taken.ms == taken.warm_ms == (2, 2, 2) and taken.wall_ms is None


def test_ceilings():
    found = cells.ceilings(["bfloat16", "float8_e5m2"], timing.Wall(), True, {"copy": 7.0})
    assert found.keys() == {"copy", "bfloat16"} and found["copy"] == 7 and found["bfloat16"] > 0
    assert cells.ceilings(["bfloat16"], timing.Wall(), True, found) == found
    assert cells.ceilings([], timing.Wall(), True, {})["copy"] > 0


def test_state(monkeypatch):
    monkeypatch.setattr(cells.jax, "default_backend", lambda: "gpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    answer = types.SimpleNamespace(stdout=", ".join(map(str, range(len(cells.STATE)))) + "\n")
    monkeypatch.setattr(cells.subprocess, "run", lambda command, **_: answer if command[:3] == ["nvidia-smi", "-i", "3"] else None)
    assert cells.state() == {name: str(i) for i, name in enumerate(cells.STATE)}
    answer.stdout = "no devices were found\n"
    assert cells.state() == {}


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


class CuPy(types.ModuleType):
    """The part of CuPy that is called, on the host: arrays are numpy's, and cuBLAS multiplies matrices by columns."""

    def __init__(self, monkeypatch):
        super().__init__("cupy")
        self.empty, self.cuda = lambda shape, dtype: self._array(np.empty(shape, dtype)), self
        self.device = types.SimpleNamespace(get_cublas_handle=lambda: 7)
        self.get_current_stream = lambda: types.SimpleNamespace(synchronize=lambda: None)
        monkeypatch.setitem(sys.modules, "cupy", self)
        for name in ("cupy_backends", "cupy_backends.cuda", "cupy_backends.cuda.libs"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        sys.modules["cupy_backends.cuda.libs"].cublas = types.SimpleNamespace(gemmEx=self.gemm)  # type: ignore[attr-defined]

    def from_dlpack(self, array):
        return self._array(np.array(array))

    @staticmethod
    def _array(array):
        class Array(np.ndarray):
            data = property(lambda self: types.SimpleNamespace(ptr=self.ctypes.data))  # type: ignore[assignment]

        return array.view(Array)

    @staticmethod
    def gemm(handle, trans_a, trans_b, m, n, k, alpha, a, a_type, lda, b, b_type, ldb, beta, c, c_type, ldc, compute, algorithm):
        assert (handle, algorithm) == (7, -1) and a_type == b_type == c_type and compute == (77 if a_type == 0 else 68)
        dtype = np.dtype({0: np.float32, 2: np.float16, 14: jnp.bfloat16}[a_type])

        def matrix(pointer, leading, rows, columns):
            """Return a matrix that is stored by columns, `leading` elements apart."""
            assert leading >= rows
            raw = (ctypes.c_char * (leading * columns * dtype.itemsize)).from_address(pointer)
            return np.frombuffer(raw, dtype).reshape(columns, leading).T[:rows]

        left = matrix(a, lda, k, m).T if trans_a else matrix(a, lda, m, k)
        right = matrix(b, ldb, n, k).T if trans_b else matrix(b, ldb, k, n)
        scales = [ctypes.c_float.from_address(pointer).value for pointer in (alpha, beta)]
        assert scales == [1, 0]
        matrix(c, ldc, m, n)[...] = (left.astype(np.float32) @ right.astype(np.float32)).astype(dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("role", ["nn", "nt", "tn"])
def test_cublas_is_asked_for_the_product(monkeypatch, role, dtype):
    CuPy(monkeypatch)
    monkeypatch.setattr(cublas.jax, "default_backend", lambda: "gpu")
    case = MATMUL.case(role, dtype)
    assert cublas.refusal(case) is None
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in case.shapes)
    product = cublas.Product(case, (a, b))
    product()
    left, right = (np.asarray(x, np.float64) for x in (a, b))
    truth = {"nn": lambda: left @ right, "nt": lambda: left @ right.T, "tn": lambda: left.T @ right}[role]()
    assert product.result().dtype == dtype
    error, _ = timing.relative_error(product.result(), truth)
    assert error <= timing.law([dtype], None, "cuda")


def test_what_cublas_is_not_asked_for(monkeypatch):
    assert "single products" in (cublas.refusal(MATMUL.case("step", "float32")) or "")
    assert "throughout" in (cublas.refusal(MATMUL.case("nn", "int8")) or "")
    assert "throughout" in (cublas.refusal(MATMUL.case("nn", "ieee")) or "")
    monkeypatch.setattr(cublas.jax, "default_backend", lambda: "gpu")
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert (cublas.refusal(MATMUL.case("nn", "float32")) or "").startswith("no CuPy: ")
