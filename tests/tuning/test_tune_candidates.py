"""The candidates of a product that may win: none that is wrong or fails; and no table makes a call slower than xla.

Time is never asserted: a stand-in for the clock says what each candidate takes.
"""

# ruff: noqa: F401, F811 - fixtures are imported

import dataclasses
import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tune import DEPTHWISE, LAX, OTHER, PREFERRED, Clock, clock, depthwise, matmul, of_depthwise, path, stored, struct, winner

from jaxext.core.choose import choose
from jaxext.core.implementation import Algorithm, Implementation
from jaxext.ops.conv.xla import XlaConvPlan
from jaxext.ops.matmul.form import FAMILY
from jaxext.ops.matmul.xla import XlaMatmul
from jaxext.tables import active
from jaxext.tables.table_format import Measurement
from jaxext.tuning import timing, trial
from jaxext.tuning.tune import tune

pytestmark = pytest.mark.usefixtures("long_runs")  # what is small here stands for what is large

NAN, INF = float("nan"), float("inf")


# ---- what is believed


def spoiled(monkeypatch, algorithm, spoil):
    """xla's convolution by one algorithm, spoiled."""
    run = XlaConvPlan.run

    def wrong(self, config, operands):
        y = run(self, config, operands)
        return spoil(y) if config.algorithm == algorithm and self.call.dtype == np.float32 else y

    monkeypatch.setattr(XlaConvPlan, "run", wrong)


@pytest.mark.parametrize("spoil", [lambda y: y * 1.001, lambda y: y.at[0, 0, 0].set(jnp.nan), lambda y: y.at[-1, -1, -1].add(0.1)])
def test_what_is_wrong_never_wins(spoil, clock, path, monkeypatch):
    clock({LAX: 0.001, OTHER: 1})
    spoiled(monkeypatch, "lax", spoil)
    with pytest.warns(UserWarning, match="wrong results of conv1d_fprop .*: xla algorithm=lax: its errors are"):
        row = of_depthwise(path)
    assert winner(row) == OTHER
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
    spoiled(monkeypatch, "dots", lambda y: y + 1)
    with pytest.warns(UserWarning, match="wrong results"):
        row = of_depthwise(path)
    assert winner(row) is None and "no time to compare with" in str(row.skipped) and not path.exists()


@pytest.mark.parametrize(("of", "name"), [(Clock, "sampler"), (timing, "take")])
def test_a_timer_that_fails(of, name, clock, path, monkeypatch):
    """The timer fails at once, or in the middle of the samples."""

    def lost(*_):
        raise RuntimeError("CUPTI lost kernels")

    monkeypatch.setattr(of, name, lost)
    (row,) = tune(matmul, table=path, backward=False)(struct(2, 3), struct(3, 4)).rows
    assert winner(row) is None and "RuntimeError: CUPTI lost kernels" in (row.skipped, row.candidates[0].left_out)
    assert not path.exists()


def test_a_product_that_fails_leaves_the_others(clock, path, monkeypatch):
    """A defect in what the truth is computed by."""
    run = XlaMatmul.run

    def fails(self, call, config, operands):
        if call.dtype == np.float64:
            raise TypeError("not of this kind\nand more lines of it")
        return run(self, call, config, operands)

    def both(a, x, w):
        return matmul(a, a), depthwise(x, w)

    monkeypatch.setattr(XlaMatmul, "run", fails)
    with pytest.warns(UserWarning, match="tune: matmul_nn .* is not measured: measuring it failed with TypeError: not of this kind$"):
        rows = tune(both, table=path, backward=False)(struct(3, 3), *DEPTHWISE).rows
    assert [(row.problem.split()[0], row.winner is None) for row in rows] == [("matmul_nn", True), ("conv1d_fprop", False)]
    assert rows[0].skipped == "measuring it failed with TypeError: not of this kind" and {*stored(path)} == {rows[1].problem}


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float64", "complex64", "int8", "bool"])
def test_truth_in_every_dtype(dtype, clock, path):
    """Integers exactly, where they wrap around too; and rounding is no error."""
    shapes = (5, 700), (700, 3)
    (row,) = tune(matmul, table=path, backward=False)(*(struct(*shape, dtype=jnp.dtype(dtype)) for shape in shapes)).rows
    (candidate,) = row.candidates
    assert row.winner is candidate and candidate.error is not None
    exact = not jnp.issubdtype(jnp.dtype(dtype), jnp.inexact)
    assert candidate.error == (0, 0) if exact else candidate.error[0] <= 4 * jnp.finfo(dtype).eps


def test_truth_is_wider_than_the_user_allows(clock, path):
    with jax.enable_x64(False):
        (row,) = tune(matmul, table=path, backward=False)(struct(50, 70), struct(70, 30)).rows
    assert row.candidates[0].error is not None and 0 < row.candidates[0].error[0] < 1e-6


# ---- several implementations, which no CPU has


class Kernel(Implementation):
    """Takes every call of a platform that is said to be a GPU's, by xla's product."""

    def __init__(self, name, configs, scale=1.0):
        self.name, self.scale = name, scale
        self._configs = [Algorithm(config) for config in configs]

    def refuses(self, call):
        return None if self._configs else "no kernel"

    def candidates(self, call):
        return self._configs

    def run(self, call, config, operands):
        return XlaMatmul().run(call, Algorithm("dot_general"), operands) * self.scale


@functools.cache
def a_call():
    with active.collecting() as calls:
        jax.jit(lambda a, b: matmul(a, b)).lower(struct(4, 5), struct(5, 6))
    return calls[0]


@pytest.fixture
def call(monkeypatch):
    """Return a call as on a GPU, with kernels of two kinds."""
    kernels = Kernel("cuda", ["d", "e", "f"], scale=1.1), Kernel("triton", ["a", "b", "c"])
    monkeypatch.setitem(vars(FAMILY), "implementations", [*kernels, *FAMILY.implementations[-1:]])
    return dataclasses.replace(a_call(), platform="cuda", arch=90)


def test_implementations_side_by_side(call, clock):
    """Each implementation has as many candidates as are asked for; each right one keeps its best, for calls that name it."""
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
    why = "wall time could not be measured: MemoryError: five results" if walls is None else f"slower than {XLA} if copies"
    for name, ms in BY_CUPTI.items():
        assert left.get(name, "").startswith(why) == (ms < BY_CUPTI[won])
    assert min(row.measurements, key=lambda measurement: measurement.ms[1]).ms == (row.winner and row.winner.ms)


def test_wall_time_is_no_matter_to_another_clock(call, clock, monkeypatch):
    clock(BY_CUPTI)
    monkeypatch.setattr(trial, "_confirmed", None)
    assert winner(trial.measure(call, 3, Clock())) == "triton algorithm=a"


def test_errors_that_are_rounding(call):
    """The law of the dtypes allows them, and four times xla's; a large error of xla's excuses nobody, and integers are exact."""

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
    """Any measurements, of candidates that are there still or not, choose one that was measured and is not slower than xla beyond the
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
