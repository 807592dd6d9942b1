"""How long a compiled program takes, and how far its result is from the truth.

A `Program` is a function compiled for its arguments; a `Clock` makes of it a sampler, whose every call is one sample: milliseconds per call
of the program.  On a GPU that is what CUPTI reports of the program's kernels, those included that XLA put around the product, with nothing
of the operands left in the L2 cache (a user's next layer rarely finds them there) or, if asked, warm.  Copies and memsets that are no
kernels take no time there: only the wall time of a `Chain` has them.  Elsewhere it is wall time.  Samples of programs that are compared are
taken in turn, so that a machine that slows down slows all.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import platform
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxext._compat import kernels_launched

SAMPLE_MS = 5  # of wall time, at least: as many calls as that takes, so that short ones are not all overhead
CALLS = 5  # in a sample by CUPTI, of which the mean is taken, and in a chain: the least that XLA makes a CUDA graph of
TRIES = 3  # at a sample by CUPTI, which may drop records
WARM_UP = 3  # calls before each sample by CUPTI: the clocks have risen
LEAST_SAMPLES = 3  # quartiles of fewer say nothing
FLUSHED_BYTES = 256 << 20  # several times the L2 cache of any GPU
# Not every driver reports each kernel of a CUDA graph.
UNCAPTURED = {"xla_gpu_enable_command_buffer": ""}
# Parameters of glibc's mallopt: M_MMAP_MAX, so that large blocks too are of the heap, M_TRIM_THRESHOLD: never, and M_ARENA_MAX.
KEEPING = {-4: 0, -1: -1, -8: 1}
NVIDIA = "/dev/nvidiactl"  # where the driver of a GPU is

Sampler = Callable[[], float]


@dataclasses.dataclass(frozen=True)
class Program:
    """`function`, compiled for `arguments`; calling it gives the result once it is there."""

    function: Callable
    arguments: tuple[jax.Array, ...]
    compiled: Any
    trace_ms: float  # until XLA has the program
    compile_ms: float

    def __call__(self):
        return jax.block_until_ready(self.compiled(*self.arguments))

    @property
    def temporaries_bytes(self) -> int | None:
        memory = self.compiled.memory_analysis()
        return None if memory is None else memory.temp_size_in_bytes


def compile(function: Callable, arguments: Sequence[jax.Array]) -> Program:
    """`function` as a program of its own, whatever was jitted before; on a GPU, not as CUDA graphs."""
    start = time.perf_counter()
    lowered = jax.jit(lambda *arguments: function(*arguments)).lower(*arguments)
    traced = time.perf_counter()
    options: Any = UNCAPTURED if jax.default_backend() == "gpu" else None
    compiled = lowered.compile(options)
    done = time.perf_counter()
    return Program(function, tuple(arguments), compiled, (traced - start) * 1e3, (done - traced) * 1e3)


class Clock(Protocol):
    name: str

    def sampler(self, program: Program) -> Sampler:
        """One sample of `program` per call; it has run before."""
        ...


class Wall:
    """Wall time of calls one by one: what a CPU needs, with the overhead of a call."""

    name = "wall time of calls one by one"

    def sampler(self, program: Callable[[], object]) -> Sampler:
        program()
        calls = max(1, round(SAMPLE_MS / _wall_ms(program, 1)))
        return lambda: _wall_ms(program, calls)


class Chain:
    """Wall time of a chain of calls in one program, which a GPU runs as a CUDA graph: the gaps between kernels are in it.

    Each call needs the one before, or XLA would run one for all (it drops `lax.optimization_barrier` before it looks for equal ones): an
    element of each operand, which the chain owns and changes in place, says whether elements of the results were zero.  All results are
    results of the chain, or XLA might compute no more of one than is needed.
    """

    name = f"wall time of a chain of {CALLS} calls in one program, warm L2"

    def sampler(self, program: Program) -> Sampler:
        def chain(operands):
            results = []
            for _ in range(CALLS):
                results.append(program.function(*operands))
                zeros = [leaf.ravel()[:1] == 0 for leaf in jax.tree.leaves(results[-1])]
                operands = [_fed(operand, functools.reduce(jnp.logical_or, zeros)) for operand in operands]
            return operands, results

        operands = [jnp.array(operand) for operand in program.arguments]  # copies
        links = jax.jit(chain, donate_argnums=0).lower(operands).compile()

        def run():
            nonlocal operands
            operands, results = links(operands)
            jax.block_until_ready(results)

        wall = Wall().sampler(run)
        return lambda: wall() / CALLS


def _fed(operand, bit):
    return lax.dynamic_update_slice(operand.ravel(), bit.astype(operand.dtype), (0,)).reshape(operand.shape)


class Cupti:
    """The sum of the times of a program's kernels; CUPTI is asked for nothing else, so copies and memsets are not in it."""

    name = "CUPTI: sum of kernel times without copies and memsets, cold L2"

    def __init__(self):
        self._flush = jax.jit(lambda buffer: buffer ^ 1, donate_argnums=0)
        self._buffer = jax.block_until_ready(self._flush(jnp.zeros(FLUSHED_BYTES // 4, jnp.uint32)))
        self._flushing = frozenset(name for name, _ in self._launches(lambda: None, cold=True))
        if not self._flushing:
            raise RuntimeError("CUPTI reports no kernel")

    def sampler(self, program: Callable, cold: bool = True) -> Sampler:
        return lambda: sum(self.kernels_ms(program, cold).values())

    def kernels_ms(self, program: Callable, cold: bool = True) -> dict[str, float]:
        """Per call, by kernel."""
        times: dict[str, list[float]] = {}
        for _ in range(TRIES):
            times.clear()
            for name, ms in self._launches(program, cold):
                if name not in self._flushing:  # nothing else is a kernel of a single exclusive or
                    times.setdefault(name, []).append(ms)
            if times and not any(len(launched) % CALLS for launched in times.values()):
                return {name: sum(launched) / CALLS for name, launched in times.items()}
        raise RuntimeError(f"CUPTI lost kernels of {CALLS} equal calls: it reports { {name: len(ms) for name, ms in times.items()} }")

    def _launches(self, run: Callable, cold: bool) -> Sequence[tuple[str, float]]:
        """Name and milliseconds of each kernel of `CALLS` calls."""
        for _ in range(WARM_UP):
            jax.block_until_ready(run())

        def calls():
            for _ in range(CALLS):
                if cold:
                    self._buffer = jax.block_until_ready(self._flush(self._buffer))
                jax.block_until_ready(run())

        return kernels_launched(calls)


def _wall_ms(run: Callable[[], object], calls: int) -> float:
    """Per call."""
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) * 1e3 / calls


def keep_freed_memory() -> bool:
    """Whether, from now on, memory that was freed is given to the next call instead of the operating system, which would hand out every
    page of every result anew: on a CPU that takes longer than many a product.  XLA's threads each keep a heap of their own unless this
    comes before they start, which is when jax is asked for a device; only glibc can do it.  Where there is a GPU results lie elsewhere, and
    the threads that compile would wait for one another at the one heap."""
    gpu = jax.config.jax_platforms != "cpu" and os.path.exists(NVIDIA)  # type: ignore[attr-defined]
    if gpu or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(parameter, value) == 1 for parameter, value in KEEPING.items())


def timer() -> tuple[Clock, str | None]:
    """How to take time on the default backend, and why not by CUPTI."""
    if jax.default_backend() != "gpu":
        return Wall(), f"the platform is {jax.default_backend()!r}"
    try:
        return Cupti(), None
    except Exception as error:  # whatever is missing, of jax's or of the machine's
        return Chain(), f"{type(error).__name__}: {error}"


def take(samplers: Mapping[str, Sampler], repeats: int, patience_s: float) -> dict[str, list[float]]:
    """`repeats` samples of each, in turn and every other turn backwards; once `patience_s` seconds have passed, no more than the least."""
    taken: dict[str, list[float]] = {name: [] for name in samplers}
    start = time.perf_counter()
    for turn in range(max(repeats, LEAST_SAMPLES)):
        if turn >= LEAST_SAMPLES and time.perf_counter() - start > patience_s:
            break
        for name in reversed(taken) if turn % 2 else taken:
            taken[name].append(samplers[name]())
    return taken


def quartiles(ms: Sequence[float]) -> tuple[float, float, float]:
    low, median, high = (float(quartile) for quartile in np.quantile(ms, (0.25, 0.5, 0.75)))
    return low, median, high


def truth(of: Callable[[Any, lax.Precision | None], Any]) -> Any:
    """`of(np.float64, None)`, or where that cannot be had `of(np.float32, lax.Precision.HIGHEST)`: either is called under x64, and is exact
    for small integers.

    Raises:
      RuntimeError: what XLA raises where it can do neither.
    """
    with jax.enable_x64(True):
        try:
            return jax.block_until_ready(of(np.float64, None))
        except RuntimeError:  # too large, or a convolution that cuDNN has not in float64
            return jax.block_until_ready(of(np.float32, lax.Precision.HIGHEST))


# Relative errors, in the norm, that rounding may make: of a dtype; of float32 at a precision, as kernels name it; and of float32 otherwise.
# TF32's is near 3e-4.  Hopper adds up products of 8-bit numbers with fewer bits than float32 has.
_ROUNDING = {"bfloat16": 1e-2, "float16": 2e-3, "float64": 1e-12, "complex128": 1e-12}
_OF_PRECISION = {"bf16x3": 2e-4, "bf16x6": 1e-4, "tf32x3": 1e-4} | dict.fromkeys(("bf16x9", "ieee", "highest", "f32_f32_f32"), 1e-5)
_ROUNDING_8_BITS, _ROUNDING_TF32, _ROUNDING_32_BITS = 1e-2, 2e-3, 1e-5


def law(dtypes: Sequence[Any], precision: Any, platform: str) -> float:
    """The largest error, relative and in the norm, that is not wrong: 0 of integers.

    Operands need be rounded to no coarser dtype than the finer of theirs.  `dtypes` are of the operands and, last, of the result; the
    precision is as lax canonicalises it, or by its kernels' name, such as "tf32x3".
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

    Both may be several arrays, of which the worst counts.  A truth in float64 must have been computed under `jax.enable_x64`.
    """
    with jax.enable_x64(True):
        pairs = zip(jax.tree.leaves(result), jax.tree.leaves(truth), strict=True)
        sizes = [_sizes(jnp.asarray(x), jnp.asarray(y)) for x, y in pairs]
    with np.errstate(divide="ignore", invalid="ignore"):  # a truth of zeros, or infinite
        shares = [[0 if difference == 0 else difference / of_truth for difference, of_truth in np.asarray(each)] for each in sizes]
    in_norm, worst = np.max(shares, axis=0, initial=0)
    return float(in_norm), float(worst)


@jax.jit
def _sizes(result, truth) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """Of the difference and of the truth: the norms, and the largest elements."""
    if result.shape != truth.shape:
        raise ValueError(f"relative_error: result has shape {result.shape}, want the truth's {truth.shape}")
    wide = jnp.complex128 if jnp.issubdtype(truth.dtype, jnp.complexfloating) else jnp.float64
    truth = truth.astype(wide).ravel()
    difference = result.astype(wide).ravel() - truth
    norms, largest = jnp.linalg.norm, lambda x: jnp.max(jnp.abs(x), initial=0)
    return (norms(difference), norms(truth)), (largest(difference), largest(truth))
