"""Measures the time of a compiled program and the error of its result.

A `Program` is a function compiled for its arguments.  A `Clock` turns it into a sampler; each call of a sampler is one sample, in
milliseconds per call of the program.  On a GPU that is the time of the program's kernels as reported by CUPTI, including kernels that XLA
adds around the product, with a cold L2 cache, as a user's next layer rarely finds its operands there.  CUPTI does not count copies and
memsets that are not kernels; only the wall time of a `Chain` includes them.  On other platforms the time is wall time.  Programs that are
compared are sampled in turn, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxext._compat import kernels_launched

SAMPLE_MS = 5  # minimum wall time of a sample, so that short calls are not all overhead
CALLS = 5  # calls averaged in a CUPTI sample, and in a chain: the fewest for which XLA builds a CUDA graph
TRIES = 3  # attempts at a CUPTI sample, since CUPTI may drop records
WARM_UP = 3  # calls before each CUPTI sample, so that the clocks have risen
LEAST_SAMPLES = 3  # quartiles of fewer are meaningless
FLUSHED_BYTES = 256 << 20  # several times the L2 cache of any GPU
FLUSHED_ROWS = 256  # of which one is written: 1 MB
# Not every driver reports each kernel of a CUDA graph.
UNCAPTURED: Any = {"xla_gpu_enable_command_buffer": ""}

Sampler = Callable[[], float]


@dataclasses.dataclass(frozen=True)
class Program:
    """`function`, compiled for `arguments`.  Calling it waits for the result."""

    function: Callable
    arguments: tuple[Any, ...]  # arrays, or trees of them
    compiled: Any
    trace_ms: float  # tracing and lowering
    compile_ms: float

    def __call__(self):
        return jax.block_until_ready(self.compiled(*self.arguments))


def compile(function: Callable, arguments: Sequence[Any], *, graphs: bool = False) -> Program:
    """Compile `function` as a new program, without jit's cache, and without CUDA graphs unless they are wanted."""
    start = time.perf_counter()
    lowered = jax.jit(lambda *arguments: function(*arguments)).lower(*arguments)
    traced = time.perf_counter()
    compiled = lowered.compile(UNCAPTURED if jax.default_backend() == "gpu" and not graphs else None)
    done = time.perf_counter()
    return Program(function, tuple(arguments), compiled, (traced - start) * 1e3, (done - traced) * 1e3)


class Wall:
    """Wall time of single calls, including the overhead of a call.  Used on CPUs."""

    name = "wall time of calls one by one"

    def sampler(self, program: Callable[[], object]) -> Sampler:
        program()
        calls = max(1, round(SAMPLE_MS / _wall_ms(program, 1)))
        return lambda: _wall_ms(program, calls)


def _wall_ms(run: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) * 1e3 / calls


class Chain:
    """Wall time of a chain of calls in one program, which a GPU runs as a CUDA graph.  It includes the gaps between kernels.

    Each call depends on the previous one; otherwise XLA would merge equal calls (it drops `lax.optimization_barrier` before that).  The
    chain owns its operands, and overwrites one element of each in place with whether an element of the results was zero.  Integers of 32
    bits beside other numbers stay as they are, since they may be ranges of rows, which say how much work there is.  All results are
    returned; otherwise XLA might compute only the part that is used.
    """

    name = f"wall time of a chain of {CALLS} calls in one program, warm L2"

    def sampler(self, program: Program) -> Sampler:
        indices = [jnp.issubdtype(x.dtype, jnp.integer) and x.dtype.itemsize >= 4 for x in program.arguments]

        def fed(operand, is_index, bit):
            if is_index and not all(indices):
                return operand
            return lax.dynamic_update_slice(operand.ravel(), bit.astype(operand.dtype), (0,)).reshape(operand.shape)

        def chain(operands):
            results = []
            for _ in range(CALLS):
                results.append(program.function(*operands))
                zeros = [leaf.ravel()[:1] == 0 for leaf in jax.tree.leaves(results[-1])]
                bit = functools.reduce(jnp.logical_or, zeros)
                operands = [fed(*of, bit) for of in zip(operands, indices, strict=True)]
            return operands, results

        operands = [jnp.array(operand) for operand in program.arguments]  # copies
        links = jax.jit(chain, donate_argnums=0).lower(operands).compile()

        def run():
            nonlocal operands
            operands, results = links(operands)
            jax.block_until_ready(results)

        wall = Wall().sampler(run)
        return lambda: wall() / CALLS


def flush(rows: jax.Array) -> jax.Array:
    """Clear the L2 cache by reading all of a large array: the exclusive or of its rows.

    It reads, and writes one row alone: lines that a flush has written would be written back during the next kernel, at its expense (50 MB
    take 17 µs at 3 TB/s).  It is elementwise, one fusion, because a reduction's kernel has the name of reductions that are measured.
    """
    return functools.reduce(jnp.bitwise_xor, [rows[i] for i in range(len(rows))])


class Cupti:
    """The sum of the kernel times of a program.  CUPTI records only kernels, so copies and memsets are not included."""

    name = "CUPTI: sum of kernel times without copies and memsets, cold and clean L2"

    def __init__(self):
        self._flush = jax.jit(flush)
        self._rows = jnp.zeros((FLUSHED_ROWS, FLUSHED_BYTES // FLUSHED_ROWS // 4), jnp.uint32)
        jax.block_until_ready(self._flush(self._rows))  # compiled before kernels are counted
        self._flushing = frozenset(name for name, _ in self._launches(lambda: None, cold=True))
        if not self._flushing:
            raise RuntimeError("CUPTI reports no kernel")

    def sampler(self, program: Callable, cold: bool = True) -> Sampler:
        return lambda: sum(self.kernels_ms(program, cold).values())

    def kernels_ms(self, program: Callable, cold: bool = True) -> dict[str, float]:
        """Milliseconds per call, by kernel."""
        for _ in range(TRIES):
            times: dict[str, list[float]] = {}
            for name, ms in self._launches(program, cold):
                if name not in self._flushing:  # no other kernel is a single exclusive or
                    times.setdefault(name, []).append(ms)
            if times and not any(len(launched) % CALLS for launched in times.values()):
                return {name: sum(launched) / CALLS for name, launched in times.items()}
        raise RuntimeError(f"CUPTI lost kernels of {CALLS} equal calls")

    def _launches(self, run: Callable, cold: bool) -> Sequence[tuple[str, float]]:
        """Name and milliseconds of each kernel of `CALLS` calls."""
        for _ in range(WARM_UP):
            jax.block_until_ready(run())

        def calls():
            for _ in range(CALLS):
                if cold:
                    jax.block_until_ready(self._flush(self._rows))
                jax.block_until_ready(run())

        return kernels_launched(calls)


Clock = Wall | Chain | Cupti


def timer() -> tuple[Clock, str | None]:
    """The clock for the default backend, and the reason if it is not CUPTI."""
    if jax.default_backend() != "gpu":
        return Wall(), f"the platform is {jax.default_backend()!r}"
    try:
        return Cupti(), None
    except Exception as error:  # jax or the machine may lack many things
        return Chain(), f"{type(error).__name__}: {error}"


def take(samplers: Mapping[str, Sampler], repeats: int, patience_s: float) -> dict[str, list[float]]:
    """`repeats` samples of each, in turn, every other turn in reverse; after `patience_s` seconds only `LEAST_SAMPLES` are completed."""
    taken: dict[str, list[float]] = {name: [] for name in samplers}
    start = time.perf_counter()
    for turn in range(max(repeats, LEAST_SAMPLES)):
        if turn >= LEAST_SAMPLES and time.perf_counter() - start > patience_s:
            break
        for name in reversed(taken) if turn % 2 else taken:
            taken[name].append(samplers[name]())
    return taken


def quartiles(ms: Sequence[float]) -> tuple[float, float, float]:
    low, median, high = np.quantile(ms, (0.25, 0.5, 0.75)).tolist()
    return low, median, high


def truth(of: Callable[[Any, lax.Precision | None], Any]) -> Any:
    """`of(np.float64, None)` under x64, or if XLA cannot compute that, `of(np.float32, lax.Precision.HIGHEST)`."""
    with jax.enable_x64(True):
        try:
            return jax.block_until_ready(of(np.float64, None))
        except RuntimeError:  # too large, or a convolution that cuDNN lacks in float64
            return jax.block_until_ready(of(np.float32, lax.Precision.HIGHEST))


# Relative errors in the norm that rounding may cause, by dtype, and for float32 by precision, as kernels name it.  TF32's error is near
# 3e-4.  Hopper accumulates products of 8-bit numbers with fewer bits than float32.
_ROUNDING = {"bfloat16": 1e-2, "float16": 2e-3, "float64": 1e-12, "complex128": 1e-12}
_OF_PRECISION = {"bf16x3": 2e-4, "bf16x6": 1e-4, "tf32x3": 1e-4} | dict.fromkeys(("bf16x9", "ieee", "highest", "f32_f32_f32"), 1e-5)
_ROUNDING_8_BITS, _ROUNDING_TF32, _ROUNDING_32_BITS = 1e-2, 2e-3, 1e-5


def law(dtypes: Sequence[Any], precision: Any, platform: str) -> float:
    """The largest relative error, in the norm, that counts as rounding: 0 for integers.

    `dtypes` are those of the operands, of which the finer one counts, and of the result, last.  `precision` is in lax's canonical form, or
    by its name in kernels, such as "tf32x3".
    """
    named = re.sub("_(tf32|bf16)_f32_x", "x", str(precision).lower())
    rest = _ROUNDING_TF32 if platform == "cuda" else _ROUNDING_32_BITS
    rest = next((rounding for name, rounding in _OF_PRECISION.items() if name in named), rest)
    inexact = [dtype for dtype in map(jnp.dtype, dtypes) if jnp.issubdtype(dtype, jnp.inexact)]
    if jnp.dtype(dtypes[-1]) not in inexact:
        return 0.0
    *operands, result = (_ROUNDING_8_BITS if dtype.itemsize == 1 else _ROUNDING.get(dtype.name, rest) for dtype in inexact)
    return max(result, min(operands, default=0.0))


def relative_error(result: Any, truth: Any) -> tuple[float, float]:
    """‖result - truth‖ / ‖truth‖, and the largest element of the difference over that of the truth; NaN stays NaN.

    Both may be trees of arrays; the worst counts.
    """
    with jax.enable_x64(True):
        pairs = zip(jax.tree.leaves(result), jax.tree.leaves(truth), strict=True)
        differences, truths = np.array([_sizes(jnp.asarray(x), jnp.asarray(y)) for x, y in pairs]).swapaxes(0, 1)
    with np.errstate(divide="ignore", invalid="ignore"):  # a truth of zeros, or infinite
        in_norm, worst = np.where(differences == 0, 0, differences / truths).max(axis=0).tolist()
    return in_norm, worst


@jax.jit
def _sizes(result, truth) -> jax.Array:
    """The norm and the largest element of the difference, then of the truth."""
    if result.shape != truth.shape:
        raise ValueError(f"relative_error: result has shape {result.shape}, want the truth's {truth.shape}")
    wide = jnp.complex128 if jnp.issubdtype(truth.dtype, jnp.complexfloating) else jnp.float64
    truth = truth.astype(wide).ravel()
    pair = result.astype(wide).ravel() - truth, truth
    return jnp.array([[jnp.linalg.norm(x), jnp.max(jnp.abs(x), initial=0)] for x in pair])
