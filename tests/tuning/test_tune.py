"""`tune`: which calls it finds, what it refuses to believe, what it stores, and that no table makes a call slower than xla.

Time is never asserted: a stand-in for the clock says what each candidate takes.
"""

import dataclasses
import functools
import random
import re

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxext
from jaxext.backends.xla.xla_conv import XlaConv
from jaxext.backends.xla.xla_matmul import XlaMatmul
from jaxext.families.matmul import FAMILY
from jaxext.forms.choose import choose, replacing_lax
from jaxext.forms.implementation import Algorithm, Implementation
from jaxext.tables import environment, in_force, table_file
from jaxext.tables.table_format import Measurement, select
from jaxext.tuning import random_operands, timing, trial
from jaxext.tuning import tune as tune_module
from jaxext.tuning.tune import tune

NAN, INF = float("nan"), float("inf")
NWC = ("NWC", "WIO", "NWC")


def struct(*shape, dtype: object = np.float32, sharding=None):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def depthwise(x, w):
    return jaxext.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=NWC, feature_group_count=2)


def network(x, w, head):
    x = jaxext.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=NWC)
    return jaxext.matmul(x.mean(1), head)


DEPTHWISE = struct(2, 5, 2), struct(3, 1, 2)
NETWORK = struct(2, 5, 3), struct(3, 3, 4), struct(4, 3)


class Clock(timing.Wall):
    """Takes no time."""

    name = "a stand-in"

    def sampler(self, program):
        return lambda: 1.0


@pytest.fixture
def clock(monkeypatch):
    """Call it with the milliseconds of some candidates, or their least, middle and greatest; the others take 2."""
    ms: dict[str, float | list[float]] = {}

    def take(samplers, repeats, patience_s):
        del repeats, patience_s
        return {name: taken if isinstance(taken := ms.get(name, 2.0), list) else [taken] * 3 for name in samplers}

    monkeypatch.setattr(timing, "timer", lambda: (Clock(), "it is none"))
    monkeypatch.setattr(timing, "take", take)
    monkeypatch.setattr(
        random_operands, "normal", lambda shapes, dtypes: [jnp.asarray(cases.random(*of)) for of in zip(shapes, dtypes, strict=True)]
    )
    return ms.update


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tables.json"


def stored(path):
    return select(table_file.load(path), in_force.context("cpu"), "").rows


def winner(row):
    """Its name, None if nothing was measured."""
    assert (row.winner is None) == (row.skipped is not None)
    return row.winner and row.winner.name


def ops(tuned):
    return {row.problem.split()[0] for row in tuned.rows}


# ---- from a function to a table


def test_a_network_by_the_clock_of_this_machine(path, monkeypatch):
    """Every product, verified and timed, is in the file as it is in the report."""
    monkeypatch.setattr(timing, "SAMPLE_MS", 0.01)
    seen = []
    tuned = tune(network, *NETWORK, table=path, backward=False, progress=lambda row, done, of: seen.append((row, done, of)))
    assert ops(tuned) == {"conv1d_fprop", "matmul_nn"}
    assert seen == [(row, i + 1, 2) for i, row in enumerate(tuned.rows)]
    assert stored(path) == {row.problem: tuple(row.measurements) for row in tuned.rows}
    for row in tuned.rows:
        assert {"xla"} == {c.implementation for c in row.candidates}
        assert set(row.refused) == {"triton", "cuda"}
        assert all(c.error is not None and max(c.error) < 1e-5 for c in row.candidates)
        _, fastest = min(((c.ms[1], c) for c in row.candidates if c.ms), key=lambda pair: pair[0])
        assert winner(row) in (fastest.name, row.preferred) and (row.winner is fastest or fastest.ties)
        assert row.gain is not None and (row.gain >= 1 or row.winner is row.candidates[0])
        assert row.preferred == row.candidates[0].name


PREFERRED, LAX, DOTS, LOOP = (f"xla algorithm={name}" for name in ("shifts", "lax", "dots", "loop"))


def of_depthwise(path):
    (row,) = tune(depthwise, *DEPTHWISE, table=path, backward=False).rows
    return row


def taken(path):
    """By a program that is lowered with the table."""
    with in_force.use_table(path):
        return jaxext.explain(depthwise, *DEPTHWISE).rows[0]


@pytest.mark.parametrize("fastest", ["lax", "loop"])
def test_the_fastest_is_taken(fastest, clock, path):
    clock({f"xla algorithm={fastest}": 1.0})
    row = of_depthwise(path)
    assert (row.preferred, winner(row), row.gain) == (PREFERRED, f"xla algorithm={fastest}", 2)
    assert jaxext.explain(depthwise, *DEPTHWISE).rows[0].how == "shifts"
    assert taken(path).how == fastest
    with in_force.use_table(path):
        rng = np.random.default_rng(0)
        x, w = (rng.normal(size=s.shape).astype(np.float32) for s in DEPTHWISE)
        want = jax.lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=NWC, feature_group_count=2)
        np.testing.assert_allclose(depthwise(x, w), want, atol=1e-5)


def test_what_is_hopeless_is_measured_once(clock, path):
    """More than twice as slow as the best: out after the first round, and not in the table; what xla prefers stays for comparison."""
    clock({LAX: 1.0, PREFERRED: 5.0, DOTS: 2.1, LOOP: 1.9})
    row = of_depthwise(path)
    assert {c.name: c.left_out for c in row.candidates}[DOTS] == "2.1 ms in a first round"
    assert {m.config["algorithm"] for m in row.measurements} == {"lax", "shifts", "loop"}
    assert row.gain == 5 and stored(path)[row.problem] == tuple(row.measurements)


def test_the_report_is_readable(clock, path):
    clock({LAX: 1.0})
    tuned = tune(depthwise, *DEPTHWISE, table=path, backward=False)
    head, row = str(tuned).split("\n\n")
    assert head == f"1 products on {environment.device_kind('cpu')}, by a stand-in: {path}" and taken(tuned).how == "lax"
    problem, verdict, *candidates = row.splitlines()
    assert problem == tuned.rows[0].problem
    assert verdict == f"  {LAX}: 2.00 times as fast as {PREFERRED} (preferred: {PREFERRED})"
    assert [line for line in candidates if line.startswith("  * ")][0].startswith(f"  * {LAX}: 1 ms (1 to 1), error ")
    assert "    cuda: platform is 'cpu', want 'cuda'" in candidates


@pytest.mark.parametrize(("ms", "won", "ties", "why"), [
    # Ranges that overlap show nothing: the preferred algorithm is taken.
    ({PREFERRED: [0.9, 1.1, 1.2], LAX: [0.8, 1.0, 1.05], DOTS: [0.9, 1.05, 1.3]}, PREFERRED, [LAX, DOTS], f"1.1 ms, .* tie with {LAX}"),
    ({PREFERRED: [1.3, 1.5, 1.7], LAX: [0.8, 1.0, 1.05], DOTS: [0.9, 1.05, 1.4]}, LAX, [DOTS], "1 ms"),
])  # fmt: skip
def test_ties(ms, won, ties, why, clock, path):
    clock(ms)
    row = of_depthwise(path)
    assert row.preferred == PREFERRED and winner(row) == won and [c.name for c in row.candidates if c.ties] == ties
    assert str(row).count("\n  = ") == len(ties) and (f"  {PREFERRED}, as preferred\n" in str(row)) == (won == PREFERRED)
    assert re.fullmatch(f"measured at {why}", taken(path).why)


def test_what_is_measured_stays_if_interrupted(clock, path):
    seen = []

    def progress(row, done, of):
        seen.append(row)
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(matmul, struct(2, 3), struct(3, 4), table=path, progress=progress)
    assert stored(path) == {row.problem: tuple(row.measurements) for row in seen}
    assert len(seen) == 2


# ---- which calls


def matmul(a, b):
    return jaxext.matmul(a, b)


@pytest.fixture
def unmeasured(monkeypatch):
    monkeypatch.setattr(tune_module, "measure", lambda call, most, clock: trial.Trial(call.problem, skipped="not now"))


def test_products_of_a_function_and_its_gradient(unmeasured, path):
    """Equal ones are one; integers have no gradient; pytrees, keywords and arrays of numpy have."""

    def repeated(a, b):
        return matmul(matmul(jnp.tanh(matmul(a, b)), b), b)

    def keywords(i, *, params):
        return {"y": matmul(params["a"], params["b"]), "i": i + 1}

    of_matmul = {"matmul_nn", "matmul_nt", "matmul_tn"}
    both = of_matmul | {"conv1d_fprop", "conv1d_dgrad", "conv1d_wgrad"}
    assert ops(tune(network, *NETWORK, table=path)) == both
    assert ops(tune(network, *NETWORK, table=path, backward=False)) == {"conv1d_fprop", "matmul_nn"}
    assert len(tune(repeated, struct(4, 4), struct(4, 4), table=path, backward=False).rows) == 1
    assert len(tune(repeated, struct(4, 4), struct(4, 4), table=path).rows) == 3
    params = {"a": np.ones((2, 3), np.float32), "b": jnp.ones((3, 4), np.float32)}
    assert ops(tune(keywords, np.int32(3), params=params, table=path)) == of_matmul
    assert ops(tune(matmul, struct(2, 3, dtype=np.int32), struct(3, 2, dtype=np.int32), table=path)) == {"matmul_nn"}


def test_errors_of_the_function_are_its_own(unmeasured, path):
    def loop(a):
        return jax.lax.while_loop(lambda c: c[0, 0] < 3, lambda c: matmul(c, c), a)

    with pytest.raises(ValueError, match="Reverse-mode") as caught:
        tune(loop, struct(3, 3), table=path)
    assert any("backward=False" in note for note in caught.value.__notes__)
    assert ops(tune(loop, struct(3, 3), table=path, backward=False)) == {"matmul_nn"}
    with pytest.raises(TypeError, match="contracting") as caught:
        tune(matmul, struct(2, 3), struct(2, 3), table=path)
    assert "backward" not in str(getattr(caught.value, "__notes__", "")) and not path.exists()


AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_sharded_calls_have_the_shapes_of_one_device(kind, unmeasured, path, tmp_path):
    """Even where jax has stored the program, and so does not compile it."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    a = struct(16, 8, sharding=NamedSharding(mesh, P("data")))
    b = struct(8, 6, sharding=NamedSharding(mesh, P(None, "model")))
    before = {name: getattr(jax.config, name) for name in STORED_PROGRAMS}
    try:
        for name, value in STORED_PROGRAMS.items():
            jax.config.update(name, str(tmp_path / "xla") if value is None else value)
        for _ in range(2):
            problems = [row.problem for row in tune(matmul, a, b, table=path, backward=False).rows]
            assert [problem.split(" float32")[0] for problem in problems] == ["matmul_nn B=1 M=4 K=8 N=3"]
        assert jax.config.values["jax_enable_compilation_cache"]
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


STORED_PROGRAMS = {
    "jax_compilation_cache_dir": None,
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
    "jax_remove_custom_partitioning_ptr_from_cache_key": True,
}


def test_calls_that_no_table_answers(unmeasured, path):
    """XLA's partitioner splits an array that is manual over some axes only; and of an empty axis there is nothing to measure."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AUTO,) * 2)
    manual = jax.shard_map(matmul, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"), axis_names={"data"})
    for fun, shapes, why in ((manual, ((16, 8), (8, 6)), "partitioner"), (matmul, ((0, 3), (3, 4)), "empty")):
        (row,) = tune(fun, *(struct(*shape) for shape in shapes), table=path, backward=False).rows
        assert winner(row) is None and why in str(row.skipped) and str(row).endswith(f"not measured: {row.skipped}")
    assert not path.exists()


def test_products_of_lax_that_are_ours(clock, path):
    with jaxext.in_place_of_lax(), in_force.collecting() as calls:
        assert ops(tune(jnp.matmul, struct(2, 3), struct(3, 4), table=path, backward=False)) == {"matmul_nn"}
        assert replacing_lax.value and len(calls) == 1  # candidates are made of lax itself
    with pytest.warns(UserWarning, match="tune: the function has no jaxext product, so nothing was measured: .*in_place_of_lax"):
        tuned = tune(jnp.matmul, struct(2, 3), struct(3, 4), table=path, backward=False)
    assert tuned.rows == () and "in_place_of_lax" in str(tuned)


@pytest.mark.parametrize(("trace", "of"), [(jax.jit, lambda x: x), (jax.grad, lambda x: x), (jax.jit, lambda x: struct(*x.shape))])
def test_inside_a_function_that_jax_traces(trace, of, path):
    def loss(x):
        tune(matmul, of(x), of(x), table=path)
        return x.sum()

    with pytest.raises(RuntimeError, match="tune: jax is tracing the function that calls it .*call it outside, with arrays or jax.Shape"):
        trace(loss)(np.ones((3, 3), np.float32))


def test_arguments(path, monkeypatch):
    with pytest.raises(TypeError, match="tune: fun is .*, want the function itself, and its arguments after it"):
        tune(np.ones((2, 3)), struct(3, 4), table=path)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tune: candidates is 0, want a whole number from 1 on"):
        tune(matmul, struct(2, 3), struct(3, 4), table=path, candidates=0)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(RuntimeError, match="2 processes, want one"):
        tune(matmul, struct(2, 3), struct(3, 4), table=path)


@pytest.mark.parametrize("table", ["notes.json", "/dev/null/tables.json", "/"])
def test_a_table_that_cannot_be_written_is_told_first(table, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.json").write_text("mine")
    with pytest.raises((OSError, ValueError), match=table):
        tune(lambda *_: pytest.fail("it was traced"), struct(2, 3), table=table)
    assert (tmp_path / "notes.json").read_text() == "mine"


# ---- what is believed


def spoiled(monkeypatch, algorithm, spoil):
    """xla's convolution by one algorithm, spoiled."""
    run = XlaConv.run

    def wrong(self, call, config, operands):
        y = run(self, call, config, operands)
        return spoil(y) if config.algorithm == algorithm and call.dtype == np.float32 else y

    monkeypatch.setattr(XlaConv, "run", wrong)


@pytest.mark.parametrize("spoil", [lambda y: y * 1.001, lambda y: y.at[0, 0, 0].set(jnp.nan), lambda y: y.at[-1, -1, -1].add(0.1)])
def test_what_is_wrong_never_wins(spoil, clock, path, monkeypatch):
    clock({LAX: 0.001, DOTS: 1})
    spoiled(monkeypatch, "lax", spoil)
    with pytest.warns(UserWarning, match="wrong results of conv1d_fprop .*: xla algorithm=lax: its errors are"):
        row = of_depthwise(path)
    assert winner(row) == DOTS
    assert [c.name for c in row.candidates if c.wrong] == [LAX]
    assert "lax" not in {m.config["algorithm"] for m in stored(path)[row.problem]}


def test_what_fails_is_left_out(clock, path, monkeypatch):
    def fail(y):
        raise RuntimeError("no such kernel\nand more lines of it")

    spoiled(monkeypatch, "lax", fail)
    row = of_depthwise(path)
    (failed,) = [c for c in row.candidates if c.error is None]
    assert (failed.name, failed.left_out, failed.wrong) == (LAX, "RuntimeError: no such kernel", False)
    assert row.winner is not None


def test_without_xla_there_is_nothing_to_compare_with(clock, path, monkeypatch):
    spoiled(monkeypatch, "shifts", lambda y: y + 1)
    with pytest.warns(UserWarning, match="wrong results"):
        row = of_depthwise(path)
    assert winner(row) is None and "no time of xla" in str(row.skipped) and not path.exists()


@pytest.mark.parametrize(("of", "name"), [(Clock, "sampler"), (timing, "take")])
def test_a_timer_that_fails(of, name, clock, path, monkeypatch):
    """At once, or in the middle of the samples."""

    def lost(*_):
        raise RuntimeError("CUPTI lost kernels")

    monkeypatch.setattr(of, name, lost)
    (row,) = tune(matmul, struct(2, 3), struct(3, 4), table=path, backward=False).rows
    assert winner(row) is None and "RuntimeError: CUPTI lost kernels" in (row.skipped, row.candidates[0].left_out)
    assert not path.exists()


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float64", "complex64", "int8", "bool"])
def test_truth_in_every_dtype(dtype, clock, path):
    """Integers exactly, where they wrap around too; and rounding is no error."""
    shapes = (5, 700), (700, 3)
    (row,) = tune(matmul, *(struct(*shape, dtype=jnp.dtype(dtype)) for shape in shapes), table=path, backward=False).rows
    (candidate,) = row.candidates
    assert row.winner is candidate and candidate.error is not None
    exact = not jnp.issubdtype(jnp.dtype(dtype), jnp.inexact)
    assert candidate.error == (0, 0) if exact else candidate.error[0] <= 4 * jnp.finfo(dtype).eps


def test_truth_is_wider_than_the_user_allows(clock, path):
    with jax.enable_x64(False):
        (row,) = tune(matmul, struct(50, 70), struct(70, 30), table=path, backward=False).rows
    assert row.candidates[0].error is not None and 0 < row.candidates[0].error[0] < 1e-6


# ---- several implementations, which no CPU has


class Kernel(Implementation):
    """Takes every call of a platform that is said to be a GPU's, by xla's product."""

    def __init__(self, name, configs, scale=1.0):
        self.name, self.scale = name, scale
        self._configs = [Algorithm(config) for config in configs]

    def supports(self, call):
        return None if self._configs else "no kernel"

    def candidates(self, call):
        return self._configs

    def run(self, call, config, operands):
        return XlaMatmul().run(call, Algorithm("dot_general"), operands) * self.scale


@functools.cache
def a_call():
    with in_force.collecting() as calls:
        jax.jit(lambda a, b: matmul(a, b)).lower(struct(4, 5), struct(5, 6))
    return calls[0]


@pytest.fixture
def call(monkeypatch):
    """As if on a GPU, with kernels of two kinds."""
    kernels = Kernel("cuda", ["d", "e", "f"], scale=1.1), Kernel("triton", ["a", "b", "c"])
    monkeypatch.setitem(vars(FAMILY), "implementations", [*kernels, *FAMILY.implementations[-1:]])
    return dataclasses.replace(a_call(), platform="cuda", arch=90)


def test_implementations_side_by_side(call, clock):
    """As many candidates as are asked for; each right implementation keeps its best, for who names it."""
    clock({"xla algorithm=dot_general": 1.0, "triton algorithm=a": 9.0, "triton algorithm=b": 7.0, "triton algorithm=c": 0.1})
    row = trial.measure(call, 2, Clock())
    assert [c.name.replace("algorithm=", "") for c in row.candidates] == ["xla dot_general", "cuda d", "cuda e", "triton a", "triton b"]
    assert [c.wrong for c in row.candidates] == [False, True, True, False, False]
    assert [m.implementation for m in row.measurements] == ["xla", "triton"]
    assert (row.preferred, winner(row), row.gain) == ("cuda algorithm=d", "xla algorithm=dot_general", 1)
    named = choose(call, FAMILY.implementations, "triton", row.measurements)
    assert named.config == Algorithm("b")
    unnamed = choose(call, FAMILY.implementations, None, row.measurements)
    assert unnamed.implementation == "xla"


XLA, BY_CUPTI = "xla algorithm=dot_general", {"xla algorithm=dot_general": 1.0, "triton algorithm=a": 0.5, "triton algorithm=b": 0.7}


@pytest.mark.parametrize(("walls", "won", "asked"), [
    ({XLA: 2.0, "triton algorithm=a": 2.0}, "triton algorithm=a", 1),
    ({XLA: 2.0, "triton algorithm=a": 2.1, "triton algorithm=b": 1.9}, "triton algorithm=b", 2),
    ({XLA: 1.0}, XLA, 2),
    (None, XLA, 2),  # too little memory for a chain
])  # fmt: skip
def test_what_cupti_does_not_see_wins_nothing(walls, won, asked, call, clock, monkeypatch):
    """A kernel that is the fastest without its copies must not be slower than xla with them."""
    pairs = []

    def wall(samplers, repeats, patience_s, of_kernels=timing.take):
        if walls is None or all(sample() == 1.0 for sample in samplers.values()):
            return of_kernels(samplers, repeats, patience_s)
        pairs.append([*samplers])
        return {name: [walls.get(name, 2.0)] * 3 for name in samplers}

    def chain(self, program):
        if walls is None:
            pairs.append([])
            raise MemoryError("five results")
        return lambda: 2.0

    clock(BY_CUPTI)
    monkeypatch.setattr(timing, "take", wall)
    monkeypatch.setattr(timing.Cupti, "sampler", lambda self, program, cold=True: lambda: 1.0)
    monkeypatch.setattr(timing.Chain, "sampler", chain)
    row = trial.measure(call, 3, object.__new__(timing.Cupti))
    assert winner(row) == won and len(pairs) == asked
    left = {c.name: c.left_out for c in row.candidates if c.left_out and not c.wrong}
    why = "no wall time of a chain: MemoryError: five results" if walls is None else f"slower than {XLA} with copies"
    for name, ms in BY_CUPTI.items():
        assert left.get(name, "").startswith(why) == (ms < BY_CUPTI[won])
    assert min(row.measurements, key=lambda measurement: measurement.ms[1]).ms == (row.winner and row.winner.ms)


def test_wall_time_is_no_matter_to_another_clock(call, clock, monkeypatch):
    clock(BY_CUPTI)
    monkeypatch.setattr(trial, "_confirmed", None)
    assert winner(trial.measure(call, 3, Clock())) == "triton algorithm=a"


def test_errors_that_are_rounding(call):
    """Those that the law of the dtypes allows, and four times xla's; a large error of xla's excuses nobody, and integers are exact."""

    def judged(error, of_xla, **what):
        return error <= trial._allowed(dataclasses.replace(call, **what), (of_xla, 0.0))[0]

    highest, bfloat16 = dict(precision=(jax.lax.Precision.HIGHEST,) * 2), dict(dtype=jnp.dtype(jnp.bfloat16))
    integer = dict(dtype=np.dtype(np.int32), dtypes={slot: np.dtype(np.int8) for slot in call.dtypes})
    right = [(1e-3, 0, {}), (1e-3, 3e-4, highest), (9e-3, 0, bfloat16), (1.1e-2, 3e-3, bfloat16), (0, 0, integer)]
    wrong = [(1e-3, 0, highest), (1e-3, 0, dict(platform="cpu")), (1.1e-2, 0, bfloat16), (0.5, 0.4, {}), (0.5, 1, {})]
    unknown = [(1e-9, 1e-9, integer), (INF, INF, {}), (NAN, 0, {}), (NAN, NAN, {}), (0.1, NAN, {})]
    assert [judged(error, of_xla, **what) for error, of_xla, what in (*right, *wrong, *unknown)] == [True] * 5 + [False] * 10


CONFIGS = {"xla": ("dot_general",), "triton": ("a", "b", "c"), "cuda": ("d", "e", "f")}


@settings(deadline=None)
@given(st.data())
def test_no_table_makes_a_call_slower_than_xla(data):
    """Whatever was measured, of candidates that are there still or not: the one taken was measured, and not slower than xla beyond the
    noise, nor slower at all unless it is the preferred one."""
    call = a_call()
    able = {name: data.draw(st.lists(st.sampled_from(configs), unique=True), name) for name, configs in CONFIGS.items() if name != "xla"}
    implementations = (*(Kernel(name, configs) for name, configs in able.items()), FAMILY.implementations[-1])
    others = st.sampled_from([(name, config) for name, configs in CONFIGS.items() for config in (*configs, "gone") if name != "xla"])
    xla = ("xla", data.draw(st.sampled_from(["dot_general", "gone"])))
    names = [xla, *data.draw(st.lists(others, unique=True))]
    random.Random(data.draw(st.integers())).shuffle(names)
    ranges = st.tuples(*[st.floats(1e-6, 1e6)] * 3).map(sorted)
    ms = {name: data.draw(ranges) for name in names}
    row = [Measurement(implementation=n, config={"algorithm": c}, ms=tuple(m), error=0.0) for (n, c), m in ms.items()]
    choice = choose(call, implementations, None, row)
    preferred = choose(call, implementations, None)
    assert choice.plan is not None and preferred.plan is not None
    assert choice.config in choice.plan.configs
    if choice.implementation != "xla":
        low, median, _ = ms[choice.implementation, choice.config.algorithm]
        assert low <= ms[xla][2]
        assert median <= ms[xla][1] or (choice.implementation, choice.config) == (preferred.implementation, preferred.config)
    own = ms.get((preferred.implementation, preferred.config.algorithm))
    if own and all(own[0] <= high for _, _, high in ms.values()):
        assert (choice.implementation, choice.config) == (preferred.implementation, preferred.config)
