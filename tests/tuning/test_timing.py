"""Programs, clocks and errors, as far as they can be checked without trusting a clock: CUPTI by stand-ins."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxext.tuning import random_operands, timing


def test_a_program_is_the_function_traced_anew():
    traced = []
    f = jax.jit(lambda x: traced.append(x) or (x @ x.T, x.sum())).__wrapped__  # type: ignore[attr-defined]
    for _ in range(2):
        square, total = timing.compile(f, [jnp.arange(6.0).reshape(2, 3)])()
        np.testing.assert_array_equal(square, [[5, 14], [14, 50]])
        assert total == 15
    assert len(traced) == 2


class Counted:
    """A program that takes `ms` of a clock of its own."""

    def __init__(self, monkeypatch, ms=1000.0):
        self.runs, self.now, self.ms = 0, 0.0, ms
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)

    def __call__(self):
        self.runs, self.now = self.runs + 1, self.now + self.ms / 1e3


@pytest.mark.parametrize(("ms", "calls"), [(1000.0, 1), (0.02, 250)])
def test_a_wall_sample_is_as_many_calls_as_it_needs(monkeypatch, ms, calls):
    program = Counted(monkeypatch, ms)
    sample = timing.Wall().sampler(program)  # type: ignore[arg-type]
    before = program.runs
    assert sample() == pytest.approx(ms) and program.runs - before == calls


@pytest.mark.parametrize(("f", "links"), [(jnp.matmul, 1), (lambda x, y: (jnp.sin(x), y @ y), 2)])
def test_a_chain_computes_each_link(monkeypatch, f, links):
    """XLA drops none as equal to the previous one or as partly unused, and a sample is one link's share."""
    compiled = []

    def keep(self, real=jax.stages.Lowered.compile):
        return compiled.append(real(self)) or compiled[-1]

    monkeypatch.setattr(jax.stages.Lowered, "compile", keep)
    x, y = jnp.ones((8, 8)), jnp.ones((8, 8))
    sample = timing.Chain().sampler(timing.Program(f, (x, y), None, 0, 0))
    (chain,) = compiled
    assert len(re.findall(r" dot\(|\[8,8\]\S* sine\(", chain.as_text())) == links * timing.CALLS
    monkeypatch.setattr(timing, "_wall_ms", lambda run, calls: run() or 10.0)
    assert sample() == sample() == 10.0 / timing.CALLS
    assert np.all(x == 1) and np.all(y == 1)


@pytest.mark.parametrize("dtypes", [("int8", "int32"), ("float32", "int32"), ("int32", "int32")])
def test_a_chain_leaves_ranges(monkeypatch, dtypes):
    """It overwrites an element of the numbers, and none of the 32-bit integers beside them."""
    programs = []
    monkeypatch.setattr(timing.jax, "jit", lambda f, jit=jax.jit, **how: programs.append(f) or jit(f, **how))
    operands = [jnp.full(4, 3, dtype) for dtype in dtypes]
    timing.Chain().sampler(timing.Program(lambda x, y: x * y.astype(x.dtype) * 0, tuple(operands), None, 0, 0))
    after, _ = programs[0](operands)
    changed = {dtype for dtype, x in zip(dtypes, after, strict=True) if x[0] == 1 and (x[1:] == 3).all()}
    same = {dtype for dtype, x in zip(dtypes, after, strict=True) if (x == 3).all()}
    assert changed == {dtypes[0]} and same == {*dtypes} - changed


def test_samples_are_taken_in_turn():
    order = []
    taken = timing.take({name: lambda name=name: order.append(name) or float(len(order)) for name in "abc"}, 4, math.inf)
    assert "".join(order) == "abccbaabccba"
    assert taken == {"a": [1, 6, 7, 12], "b": [2, 5, 8, 11], "c": [3, 4, 9, 10]}
    assert timing.quartiles([5.0, 1.0, 2.0, 4.0, 3.0]) == (2, 3, 4)


@pytest.mark.parametrize(("repeats", "patience_s", "want"), [(10, 7.5, 8), (10, 0, 3), (1, math.inf, 3), (5, math.inf, 5)])
def test_patience(monkeypatch, repeats, patience_s, want):
    program = Counted(monkeypatch)
    taken = timing.take({"only": lambda: program() or 1.0}, repeats, patience_s)
    assert len(taken["only"]) == program.runs == want


def test_kernel_times(monkeypatch):
    """Kernels that clear the cache are not counted, nor is a sample with lost kernels; the time is that of one call."""
    reports = [[("xor", 9.0)] * timing.CALLS]
    monkeypatch.setattr(timing, "FLUSHED_BYTES", 64 * timing.FLUSHED_ROWS)
    monkeypatch.setattr(timing, "kernels_launched", lambda run: run() or reports.pop(0))
    clock, program = timing.Cupti(), timing.compile(jnp.negative, [jnp.ones(1)])
    whole, lost = [("xor", 9.0), ("pad", 0.25), ("gemm", 1.0)] * timing.CALLS, [("gemm", 1.0)] * (timing.CALLS - 1)
    reports += [whole, lost, [], whole]
    assert clock.kernels_ms(program) == {"pad": 0.25, "gemm": 1.0} and clock.sampler(program)() == 1.25
    reports += [lost] * timing.TRIES
    with pytest.raises(RuntimeError, match="CUPTI lost kernels"):
        clock.sampler(program)()
    order, flush = [], clock._flush
    monkeypatch.setattr(clock, "_flush", lambda rows: order.append("flush") or flush(rows))
    for cold in (True, False):
        reports.append(whole)
        order.clear()
        clock.sampler(lambda: order.append("run") or program(), cold)()
        assert order[timing.WARM_UP :] == (["flush", "run"] if cold else ["run"]) * timing.CALLS


def test_a_flush_reads_all_and_leaves_one_row_dirty():
    """It is one elementwise kernel, whose name no measured reduction has, and it writes no more than its result."""
    rows = jnp.zeros((timing.FLUSHED_ROWS, 4), jnp.uint32)
    compiled = jax.jit(timing.flush).lower(rows).compile()
    assert all((compiled(rows.at[i].set(i + 1)) == i + 1).all() for i in range(len(rows)))
    text, memory = str(compiled.as_text()), compiled.memory_analysis()
    assert memory is not None and "reduce" not in text and len(re.findall(r" xor\(", text)) == len(rows) - 1
    assert (memory.output_size_in_bytes, memory.temp_size_in_bytes, memory.alias_size_in_bytes) == (16, 0, 0)
    assert re.findall(r"ENTRY .* -> (.*) {", text) == ["u32[4]"] and len(re.findall(r" fusion\(", text)) <= 1
    assert timing.FLUSHED_BYTES // timing.FLUSHED_ROWS <= 1 << 20 < 200 << 20 <= timing.FLUSHED_BYTES


def test_cupti_is_what_the_clock_takes_it_for():
    """The functions of jax's module, which are there without a GPU too."""
    profiler = pytest.importorskip("jax.experimental.mosaic.gpu.profiler")
    if profiler.mosaic_gpu_lib is None:
        pytest.skip("jax's plugin for CUDA is not installed")
    extension = profiler.mosaic_gpu_lib._mosaic_gpu_ext
    assert extension._cupti_init.__doc__.startswith("_cupti_init()")
    assert re.match(r"_cupti_get_timings\(finalize: bool.*\) -> list\[tuple\[str, float\]\]", extension._cupti_get_timings.__doc__)


def test_the_timer_says_why_not(monkeypatch):
    clock, why_not = timing.timer()
    if jax.default_backend() == "cpu":
        assert isinstance(clock, timing.Wall) and why_not == "the platform is 'cpu'"
    monkeypatch.setattr(timing.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(timing, "Cupti", lambda: [][0])
    clock, why_not = timing.timer()
    assert isinstance(clock, timing.Chain) and why_not == "IndexError: list index out of range"


PRESET = lax.DotAlgorithmPreset


@pytest.mark.parametrize(("dtypes", "precision", "want"), [
    *[((dtype,) * 3, None, want) for dtype, want in dict(bfloat16=1e-2, float8_e5m2=1e-2, complex128=1e-12, int8=0, bool=0).items()],
    *[((dtype,) * 3, None, 2e-3) for dtype in ("float16", "float32", "complex64")],  # on a GPU, by TF32
    (("float32", "bfloat16", "float32"), None, 2e-3),  # the product is in float32
    (("float32", "float32", "bfloat16"), None, 1e-2),
    (("float8_e4m3fn", "float64", "float64"), None, 1e-12),
    (("int8", "int8", "float32"), None, 2e-3),
    *[(("float32",) * 3, precision, 2e-4) for precision in (PRESET.BF16_BF16_F32_X3, "bf16x3")],  # as lax and as kernels name it
    *[(("float32",) * 3, precision, 1e-4) for precision in (PRESET.BF16_BF16_F32_X6, "bf16x6", PRESET.TF32_TF32_F32_X3, "tf32x3")],
    *[(("float32",) * 3, precision, 2e-3) for precision in (PRESET.TF32_TF32_F32, "tf32", (lax.Precision.HIGH,) * 2)],
    *[(("float32",) * 3, precision, 1e-5) for precision in (PRESET.F32_F32_F32, "ieee", (lax.Precision.HIGHEST,) * 2)],
    (("bfloat16",), "ieee", 1e-2),
])  # fmt: skip
def test_law(dtypes, precision, want):
    assert timing.law(dtypes, precision, "cuda") == want
    assert timing.law(["float32"] * 3, None, "cpu") == 1e-5


def test_bf16x3_is_no_more_wrong_than_its_law():
    """Three products of halves in bfloat16, summed in float32, as kernels make it."""
    a, b = random_operands.normal([(64, 256), (256, 64)], "float32")
    halves = [(x.astype(jnp.bfloat16), (x - x.astype(jnp.bfloat16).astype(x.dtype)).astype(jnp.bfloat16)) for x in (a, b)]
    (high, low), (other_high, other_low) = [[half.astype(jnp.float32) for half in pair] for pair in halves]
    product = high @ other_high + high @ other_low + low @ other_high
    error, _ = timing.relative_error(product, np.asarray(a, np.float64) @ np.asarray(b, np.float64))
    assert 1e-6 < error < timing.law(["float32"], "bf16x3", "cuda")


def test_truth_is_float64_or_the_best_of_float32():
    asked = []

    def of(real, precision):
        asked.append((real, precision, jax.config.jax_enable_x64))  # type: ignore[attr-defined]
        if real is np.float64 or len(asked) > 2:
            raise NotImplementedError("not here")
        return jnp.ones(1, real)

    assert timing.truth(of).dtype == np.float32
    assert asked == [(np.float64, None, True), (np.float32, lax.Precision.HIGHEST, True)]
    with pytest.raises(NotImplementedError):
        timing.truth(of)


TRUTH, NAN = np.array([3.0, 4.0]), math.nan


@pytest.mark.parametrize(("result", "truth", "want"), [
    (jnp.array([3.0, 4.5]), TRUTH, (0.1, 0.125)),
    ((TRUTH, TRUTH + 4), (TRUTH, TRUTH), (4 * 2**0.5 / 5, 1)),
    (np.array([3, 5], np.int8), np.array([3, 4], np.int8), (0.2, 0.25)),
    (np.array([3j]), np.array([2j]), (0.5, 0.5)),
    (np.ones(4, np.float32), np.full(4, 1 + 1e-12), (1e-12, 1e-12)),
    (np.array((3, NAN)), TRUTH, (NAN, NAN)),
    *[(x, (TRUTH, TRUTH), (NAN, NAN)) for x in ((TRUTH, TRUTH * NAN), (TRUTH * NAN, TRUTH))],
    (np.ones((0, 3)), np.ones((0, 3)), (0, 0)),
    (np.zeros(3), np.zeros(3), (0, 0)),
    (np.ones(3), np.zeros(3), (math.inf, math.inf)),
])  # fmt: skip
def test_error(result, truth, want):
    """The error is the same whether the user allows float64 or not."""
    with jax.enable_x64(False):
        assert timing.relative_error(result, truth) == pytest.approx(want, rel=1e-3, abs=0, nan_ok=True)
    with pytest.raises(ValueError, match=r"result has shape \(2, 1\), want the truth's \(2,\)"):
        timing.relative_error(np.ones((2, 1)), np.ones(2))
