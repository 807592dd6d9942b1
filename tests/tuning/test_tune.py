"""`tune`: which calls it finds, and what it stores.

Time is never asserted: a stand-in for the clock says what each candidate takes.
"""

import functools
import re

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxext
from jaxext.core import form
from jaxext.core.choose import replacing_lax
from jaxext.ops.ragged import form as ragged
from jaxext.ops.ragged_gather import ragged_gather_linear
from jaxext.tables import active, environment, table_file
from jaxext.tables.table_format import select
from jaxext.tuning import random_operands, timing, trial
from jaxext.tuning import tune as tune_module
from jaxext.tuning.tune import tune

pytestmark = pytest.mark.usefixtures("long_runs")  # what is small here stands for what is large


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
        random_operands, "normal", lambda shapes, dtypes, **_: [jnp.asarray(cases.random(*of)) for of in zip(shapes, dtypes, strict=True)]
    )
    return ms.update


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tables.json"


def stored(path):
    return select(table_file.load(path), active.context("cpu"), "").rows


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
    tuned = tune(network, table=path, backward=False, progress=lambda row, done, of: seen.append((row, done, of)))(*NETWORK)
    assert ops(tuned) == {"conv1d_fprop", "matmul_nn"}
    assert seen == [(row, i + 1, 2) for i, row in enumerate(tuned.rows)]
    assert stored(path) == {row.problem: tuple(row.measurements) for row in tuned.rows}
    for row in tuned.rows:
        assert {"xla"} == {c.implementation for c in row.candidates}
        assert set(row.refused) == {"triton", "cuda"} | ({"fft"} if row.problem.startswith("conv") else set())
        assert all(c.error is not None and max(c.error) < 1e-5 for c in row.candidates)
        _, fastest = min(((c.ms[1], c) for c in row.candidates if c.ms), key=lambda pair: pair[0])
        assert winner(row) in (fastest.name, row.preferred) and (row.winner is fastest or fastest.ties)
        assert row.gain is not None and (row.gain >= 1 or row.winner is row.candidates[0])
        assert row.preferred == row.candidates[0].name


PREFERRED, LAX, OTHER, LOOP = (f"xla algorithm={name}" for name in ("dots", "lax", "shifts", "loop"))


def of_depthwise(path):
    (row,) = tune(depthwise, table=path, backward=False)(*DEPTHWISE).rows
    return row


def taken(path):
    """Return the row of a program that is lowered with the table."""
    with active.use_table(path):
        return jaxext.explain(depthwise)(*DEPTHWISE).rows[0]


@pytest.mark.parametrize("fastest", ["lax", "loop"])
def test_the_fastest_is_taken(fastest, clock, path):
    clock({f"xla algorithm={fastest}": 1.0})
    row = of_depthwise(path)
    assert (row.preferred, winner(row), row.gain) == (PREFERRED, f"xla algorithm={fastest}", 2)
    assert jaxext.explain(depthwise)(*DEPTHWISE).rows[0].how == "dots"
    assert taken(path).how == fastest
    with active.use_table(path):
        rng = np.random.default_rng(0)
        x, w = (rng.normal(size=s.shape).astype(np.float32) for s in DEPTHWISE)
        want = jax.lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=NWC, feature_group_count=2)
        np.testing.assert_allclose(depthwise(x, w), want, atol=1e-5)


def test_what_is_hopeless_is_measured_once(clock, path):
    """A candidate more than twice as slow as the best leaves after the first round; what xla prefers stays for comparison."""
    clock({LAX: 1.0, PREFERRED: 5.0, OTHER: 2.1, LOOP: 1.9})
    row = of_depthwise(path)
    assert {c.name: c.left_out for c in row.candidates}[OTHER] == "2.1 ms in the first round, too slow for more"
    assert {m.config["algorithm"] for m in row.measurements} == {"lax", "dots", "loop"}
    assert row.gain == 5 and stored(path)[row.problem] == tuple(row.measurements)


def test_the_report_is_readable(clock, path):
    clock({LAX: 1.0})
    tuned = tune(depthwise, table=path, backward=False)(*DEPTHWISE)
    head, row, legend = str(tuned).split("\n\n")
    assert head == f"1 operation on {environment.device_kind('cpu')}, by a stand-in: {path}" and taken(tuned).how == "lax"
    assert legend == "*: the one that is taken; =: a tie with it, within the noise"
    problem, verdict, *candidates = row.splitlines()
    assert problem == tuned.rows[0].problem
    assert verdict == f"  {LAX}: 2.00x as fast as {PREFERRED} (preferred: {PREFERRED})"
    assert [line for line in candidates if line.startswith("  * ")][0].startswith(f"  * {LAX}: 1 ms (1 to 1), error ")
    assert "    cuda: platform is 'cpu', want 'cuda'" in candidates


@pytest.mark.parametrize(("ms", "won", "ties", "why"), [
    # Ranges that overlap show nothing: the preferred algorithm is taken.
    ({PREFERRED: [0.9, 1.1, 1.2], LAX: [0.8, 1.0, 1.05], OTHER: [0.9, 1.05, 1.3]}, PREFERRED, [LAX, OTHER], f"1.1 ms, .* tie with {LAX}"),
    ({PREFERRED: [1.3, 1.5, 1.7], LAX: [0.8, 1.0, 1.05], OTHER: [0.9, 1.05, 1.4]}, LAX, [OTHER], "1 ms"),
])  # fmt: skip
def test_ties(ms, won, ties, why, clock, path):
    clock(ms)
    row = of_depthwise(path)
    assert row.preferred == PREFERRED and winner(row) == won and [c.name for c in row.candidates if c.ties] == ties
    assert str(row).count("\n  = ") == len(ties) and (f"  {PREFERRED}, as preferred\n" in str(row)) == (won == PREFERRED)
    assert re.fullmatch(f"measured at {why}", taken(path).why)


def gated(x, w, sizes):
    return jaxext.ragged_gated_linear_unit(x, w.reshape(3, 4, 2, 3), sizes, activation="silu")


@pytest.mark.parametrize(("function", "rows", "dtype", "names"), [
    (jaxext.ragged_dot, 8, np.float32, "ragged_nn ragged_nt ragged_tn"),
    (functools.partial(jaxext.ragged_linear, activation="silu"), 100, jnp.bfloat16, "ragged_linear ragged_nn"),
    (gated, 8, np.float32, "ragged_gated_linear_unit ragged_nn"),
], ids=["dot", "linear", "gated"])  # fmt: skip
def test_ragged_products(function, rows, dtype, names, clock, path):
    """The ranges are integers in the truth, too, and hold rows, so that there are numbers to compare."""
    arguments = struct(rows, 4, dtype=dtype), struct(3, 4, 6, dtype=dtype), struct(3, dtype=np.int32)
    tuned = tune(function, table=path, backward="tn" in names)(*arguments)
    assert ops(tuned) == {*names.split()} and {*stored(path)} == {row.problem for row in tuned.rows}
    for row in tuned.rows:
        assert winner(row) is not None and all(c.error is not None and max(c.error) < 1e-2 for c in row.candidates)


def test_gathered_rows(clock, path, monkeypatch):
    """The product inside is measured too, also if nobody has called it; rows and places of random numbers would meet nothing."""
    inner = ragged.ragged_gated_linear_unit(False)
    monkeypatch.setattr(form, "owner", {primitive: of for primitive, of in form.owner.items() if of[0] is not inner})
    product = lambda x, gates, w, *at: ragged_gather_linear(x, gates, *at, activation="silu") * ragged_gather_linear(x, w, *at)
    integers = (struct(*shape, dtype=np.int32) for shape in ((3,), (10,), (6, 2)))
    tuned = tune(product, table=path, backward=False)(struct(6, 4), struct(3, 4, 2, 5), struct(3, 4, 5), *integers)
    assert ops(tuned) == {"ragged_gather_gated_linear_unit", inner.name, "ragged_gather_nn", "ragged_nn"}
    for row in tuned.rows:
        assert winner(row) is not None and all(c.error is not None and max(c.error) < 1e-6 for c in row.candidates)


def test_causal_convolutions(clock, path):
    """The gradient is tuned too; sequences are packed one behind the other."""

    def packed(x, w, seq_idx):
        return jaxext.causal_conv1d(x, w, seq_idx=seq_idx, activation="silu")

    with active.collecting() as calls:
        tuned = tune(packed, table=path)(struct(2, 9, 3), struct(4, 3), struct(2, 9, dtype=np.int8))
    assert ops(tuned) == {"causal_conv1d", "causal_conv1d_backward"} and all(winner(row) for row in tuned.rows)
    for call in calls:
        np.testing.assert_array_equal(random_operands.valid(call)["seq_idx"], [[0, 0, 0, 1, 1, 2, 2, 3, 3]] * 2)


@pytest.mark.parametrize(("rows", "groups", "lead"), [(100, 3, (2,)), (2, 5, ()), (7, 1, ())])
def test_ranges_that_are_measured_are_valid(rows, groups, lead):
    """The ranges are in order, without overlap, and have every row."""

    def product(x, w, sizes):
        return jaxext.ragged_dot(x, w, sizes)

    for _ in lead:
        product = jax.vmap(product)
    with active.collecting() as calls:
        jax.jit(product).lower(struct(*lead, rows, 4), struct(*lead, groups, 4, 6), struct(*lead, groups, dtype=np.int32))
    (call,) = calls
    operands = dict(zip(call.dtypes, random_operands.of(call), strict=True))
    assert {name: (x.shape, x.dtype) for name, x in operands.items()} == {name: (call.shape_of(name), d) for name, d in call.dtypes.items()}
    begin, end = (np.asarray(operands[name]).reshape(-1, groups) for name in ("begin", "end"))
    assert (begin[:, 0] == 0).all() and (begin[:, 1:] == end[:, :-1]).all() and (begin <= end).all() and (end[:, -1] == rows).all()


def test_what_is_measured_stays_if_interrupted(clock, path):
    seen = []

    def progress(row, done, of):
        seen.append(row)
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(matmul, table=path, progress=progress)(struct(2, 3), struct(3, 4))
    assert stored(path) == {row.problem: tuple(row.measurements) for row in seen}
    assert len(seen) == 2


# ---- which calls


def matmul(a, b):
    return jaxext.matmul(a, b)


@pytest.fixture
def unmeasured(monkeypatch):
    monkeypatch.setattr(tune_module, "measure", lambda call, most, clock, tolerance: trial.Trial(call.problem, skipped="not now"))


def test_products_of_a_function_and_its_gradient(unmeasured, path):
    """Equal ones are one; integers have no gradient; pytrees, keywords and arrays of numpy have."""

    def repeated(a, b):
        return matmul(matmul(jnp.tanh(matmul(a, b)), b), b)

    def keywords(i, *, params):
        return {"y": matmul(params["a"], params["b"]), "i": i + 1}

    of_matmul = {"matmul_nn", "matmul_nt", "matmul_tn"}
    both = of_matmul | {"conv1d_fprop", "conv1d_dgrad", "conv1d_wgrad"}
    assert ops(tune(network, table=path)(*NETWORK)) == both
    assert ops(tune(network, table=path, backward=False)(*NETWORK)) == {"conv1d_fprop", "matmul_nn"}
    assert len(tune(repeated, table=path, backward=False)(struct(4, 4), struct(4, 4)).rows) == 1
    assert len(tune(repeated, table=path)(struct(4, 4), struct(4, 4)).rows) == 3
    params = {"a": np.ones((2, 3), np.float32), "b": jnp.ones((3, 4), np.float32)}
    assert ops(tune(keywords, table=path)(np.int32(3), params=params)) == of_matmul
    assert ops(tune(matmul, table=path)(struct(2, 3, dtype=np.int32), struct(3, 2, dtype=np.int32))) == {"matmul_nn"}


def test_errors_of_the_function_are_its_own(unmeasured, path):
    def loop(a):
        return jax.lax.while_loop(lambda c: c[0, 0] < 3, lambda c: matmul(c, c), a)

    with pytest.raises(ValueError, match="Reverse-mode") as caught:
        tune(loop, table=path)(struct(3, 3))
    assert any("backward=False" in note for note in caught.value.__notes__)
    assert ops(tune(loop, table=path, backward=False)(struct(3, 3))) == {"matmul_nn"}
    with pytest.raises(TypeError, match="contracting") as caught:
        tune(matmul, table=path)(struct(2, 3), struct(2, 3))
    assert "backward" not in str(getattr(caught.value, "__notes__", "")) and not path.exists()


AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_sharded_calls_have_the_shapes_of_one_device(kind, unmeasured, path, tmp_path):
    """They have them even if jax has stored the program, and so does not compile it."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    a = struct(16, 8, sharding=NamedSharding(mesh, P("data")))
    b = struct(8, 6, sharding=NamedSharding(mesh, P(None, "model")))
    before = {name: getattr(jax.config, name) for name in STORED_PROGRAMS}
    try:
        for name, value in STORED_PROGRAMS.items():
            jax.config.update(name, str(tmp_path / "xla") if value is None else value)
        for _ in range(2):
            problems = [row.problem for row in tune(matmul, table=path, backward=False)(a, b).rows]
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
        (row,) = tune(fun, table=path, backward=False)(*(struct(*shape) for shape in shapes)).rows
        assert winner(row) is None and why in str(row.skipped) and str(row).endswith(f"not measured: {row.skipped}")
    assert not path.exists()


def test_products_of_lax_that_are_ours(clock, path):
    with jaxext.in_place_of_lax(), active.collecting() as calls:
        assert ops(tune(jnp.matmul, table=path, backward=False)(struct(2, 3), struct(3, 4))) == {"matmul_nn"}
        assert replacing_lax.value and len(calls) == 1  # candidates are made of lax itself
    with pytest.warns(UserWarning, match="tune: the function has no operation of jaxext, so nothing was measured: .*in_place_of_lax"):
        tuned = tune(jnp.matmul, table=path, backward=False)(struct(2, 3), struct(3, 4))
    assert tuned.rows == () and "in_place_of_lax" in str(tuned)


@pytest.mark.parametrize(("trace", "of"), [(jax.jit, lambda x: x), (jax.grad, lambda x: x), (jax.jit, lambda x: struct(*x.shape))])
def test_inside_a_function_that_jax_traces(trace, of, path):
    def loss(x):
        tune(matmul, table=path)(of(x), of(x))
        return x.sum()

    with pytest.raises(RuntimeError, match="tune: jax is tracing the function that calls it .*call it outside, with arrays or jax.Shape"):
        trace(loss)(np.ones((3, 3), np.float32))


def test_arguments(path, monkeypatch):
    with pytest.raises(TypeError, match=r"tune: fun is .*, want the function itself: tune\(fun\)"):
        tune(np.ones((2, 3)), table=path)(struct(3, 4))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tune: candidates is 0, want a whole number from 1 on"):
        tune(matmul, table=path, candidates=0)(struct(2, 3), struct(3, 4))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(RuntimeError, match="2 processes, want one"):
        tune(matmul, table=path)(struct(2, 3), struct(3, 4))


@pytest.mark.parametrize("table", ["notes.json", "/dev/null/tables.json", "/"])
def test_a_table_that_cannot_be_written_is_told_first(table, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.json").write_text("mine")
    with pytest.raises((OSError, ValueError), match=table):
        tune(lambda *_: pytest.fail("it was traced"), table=table)(struct(2, 3))
    assert (tmp_path / "notes.json").read_text() == "mine"
