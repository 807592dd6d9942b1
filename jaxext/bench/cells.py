"""A row of the report: one case by every library, side by side in this process, on the same operands.

Every library's result is compared with the truth before any is timed.  If a library refuses or fails, its result is the reason.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxext
from jaxext.bench import cublas
from jaxext.bench.bench_report import Default, Failure, Measured, Refusal, Result, Results
from jaxext.bench.case import PLAIN, Case
from jaxext.bench.digests import digests
from jaxext.bench.kinds import Matmul
from jaxext.tables import environment
from jaxext.tuning import random_operands, timing
from jaxext.tuning.timing import Chain, Clock, Cupti, Program, Sampler

PATIENCE_S = 5.0  # of all samples of a row by one clock; then there are only the least
REFUSED = "does not support this call: "  # as jaxext says it of an implementation
STRAYS = ("transpose", "copy", "pad")
# An instruction of XLA's text, with its opcode; the type before that may be a tuple of types.
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.-]+ = (?:\(.*?\)|\S+) ([a-z][a-z0-9-]*)\(", re.MULTILINE)
STATE = ("name", "driver_version", "pstate", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw", "power.limit", "temperature.gpu")


@dataclasses.dataclass(frozen=True)
class Bench:
    """A way to measure rows: the libraries, the clock, the number of samples, the machine's peak rates, and whether (`brief`) only times
    with a cold L2 cache are taken on a GPU."""

    libraries: Sequence[str]
    clock: Clock
    repeats: int
    ceilings: Mapping[str, float]
    brief: bool = False

    @property
    def clocks(self) -> dict[str, Callable[[Any], Sampler]]:
        """Return the sampler of each timed field of a `Result`."""
        if isinstance(self.clock, Cupti) and not self.brief:
            return {"ms": self.clock.sampler, "warm_ms": functools.partial(self.clock.sampler, cold=False), "wall_ms": Chain().sampler}
        return {"ms": self.clock.sampler}


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of a case: operations, bytes read and written, the time to copy as many bytes, and the least possible time (`floor_ms`) if
    the machine's peak rates are known."""

    flops: float
    bytes: int
    copied_ms: float | None
    floor_ms: float | None

    def rates(self, ms: float) -> dict[str, float | None]:
        """The fields of a `Result` that takes `ms` milliseconds."""
        shares = {"roofline": self.floor_ms, "copy": self.copied_ms}
        return {name: least and least / ms for name, least in shares.items()} | {
            "tflops": self.flops / ms / 1e9,
            "gbps": self.bytes / ms / 1e6,
        }


def measure(
    case: Case,
    targets: Mapping[str, Mapping[str, float]],
    bench: Bench,
    arguments: Sequence[jax.Array] = (),
    truth: Callable[[], Any] | None = None,
) -> Measured:
    """The row of a case in the report, with its random operands and a function that gives the truth about them, if they are known."""
    arguments = arguments or random_operands.normal(case.shapes, case.dtypes)
    products = jaxext.explain(case.build("jaxext"))(*arguments).rows
    default = tuple(Default(row.chosen, row.how) for row in products if row.chosen)
    having = {"lax", "jaxext", *(name for row in products for name in (row.chosen, *row.refused))}  # the form's implementations
    having |= {"cublas"} if case.operation == "dot_general" else set()
    mixed = len({product.implementation for product in default}) > 1
    results: dict[str, Any] = {}  # first those in words, then those with times
    programs: dict[str, Any] = {}
    for library in bench.libraries:
        if library in having and (library != "jaxext" or mixed):
            programs[library] = _attempt(library, results, functools.partial(_program, case, library, arguments))
    errors = _errors(case, arguments, programs, results, truth or functools.partial(exact, case, arguments))
    samples = {field: _samples(clock, programs, results, bench.repeats, field) for field, clock in bench.clocks.items()}
    work = _work(case, arguments, bench.ceilings)
    for library in programs.keys() - results.keys():
        times = {field: timing.quartiles(taken[library]) for field, taken in samples.items() if library in taken}
        facts = _attempt(library, results, functools.partial(_facts, programs[library], bench.clock))
        if facts is not None:
            results[library] = Result(**times, **errors[library], **facts, **work.rates(times["ms"][1]))  # type: ignore[arg-type]
    return Measured(
        name=case.name,
        problem=case.problem,
        tags=tuple(sorted(case.tags)),
        role=case.role,
        dtype=case.dtype,
        shapes=case.shapes,
        flops=case.flops,
        bytes=work.bytes,
        floor_ms=work.floor_ms,
        default=default,
        targets=targets,
        digests=digests(case.tags, case.numbers, programs, environment.default_platform()),
        results=Results((library, results[library]) for library in programs),
    )


def _attempt(library: str, results: dict, do: Callable[[], Any]) -> Any:
    """The value of `do()`; if it raises, None, and the reason becomes the library's result."""
    try:
        return do()
    except Exception as error:  # of XLA, of Triton's compiler, of the GPU: the row goes on without it
        _, refused, reason = str(error).rpartition(REFUSED)
        if refused and isinstance(error, NotImplementedError):
            results[library] = Refusal(reason)
        else:
            results[library] = Failure(" ".join(f"{type(error).__name__}: {error}".split())[:500])


def _program(case: Case, library: str, arguments: Sequence[jax.Array]) -> Program | cublas.Product:
    """The program, compiled and run once."""
    if library == "cublas":
        if reason := cublas.refusal(case):
            raise NotImplementedError(REFUSED + reason)
        program = cublas.Product(case, arguments)
    else:
        program = timing.compile(case.build(library), arguments)
    program()
    return program


def _work(case: Case, arguments: Sequence[jax.Array], ceilings: Mapping[str, float]) -> Work:
    arrays = jax.tree.leaves((arguments, jax.eval_shape(case.build("lax"), *arguments)))
    moved = sum(x.size * jax.dtypes.itemsize_bits(x.dtype) // 8 for x in arrays)  # two numbers of 4 bits lie in a byte
    copied_ms = moved / ceilings["copy"] * 1e3 if "copy" in ceilings else None
    rate = ceilings.get(case.dtype)
    return Work(case.flops, moved, copied_ms, None if rate is None or copied_ms is None else max(copied_ms, case.flops / rate * 1e3))


def exact(case: Case, arguments: Sequence[Any]) -> Any:
    """The right result of a case, on the device of its arguments."""

    def exactly(real, precision):
        with jax.default_matmul_precision(precision and precision.name.lower()):
            return jax.jit(case.truth)(*(x.astype(real) for x in arguments))

    return timing.truth(exactly)


def _errors(
    case: Case, arguments: Sequence[jax.Array], programs: Mapping[str, Any], results: dict, known: Callable[[], Any]
) -> dict[str, dict]:
    """Library -> the error fields of its `Result`; texts if there is no truth."""
    ready = {library: program for library, program in programs.items() if library not in results}
    if not ready:
        return {}
    try:
        truth = known()
    except Exception as failure:  # memory, or a convolution that cuDNN lacks
        why = " ".join(f"no truth: {type(failure).__name__}: {failure}".split())[:200]
        return {library: {"error": why, "worst": why} for library in ready}

    like = jax.eval_shape(case.build("lax"), *arguments)

    def errors(program):
        random_operands.poison(like)
        result = program()
        error, worst = timing.relative_error(program.result() if isinstance(program, cublas.Product) else result, truth)
        return {"error": error, "worst": worst}

    return {library: _attempt(library, results, functools.partial(errors, program)) for library, program in ready.items()}


def _samples(clock: Callable, programs: Mapping[str, Any], results: dict, repeats: int, field: str) -> dict[str, list[float]]:
    """Milliseconds by library, sampled in turn.  A library that fails is not sampled again: if the field is "ms", it has failed; otherwise
    the field is None, and earlier measurements stay."""
    failed = results if field == "ms" else dict(results)

    def guarded(library, sampler):
        def sample():
            ms = None if library in failed else _attempt(library, failed, sampler)
            return math.nan if ms is None else ms

        return sample

    samplers = {}
    for library, program in programs.items():
        if library not in failed and (field != "wall_ms" or isinstance(program, Program)):  # a chain is one of programs
            sampler = _attempt(library, failed, functools.partial(clock, program))
            samplers[library] = guarded(library, sampler)
    taken = timing.take(samplers, repeats, PATIENCE_S)
    return {library: ms for library, ms in taken.items() if library not in failed}


def _facts(program: Program | cublas.Product, clock: Clock) -> dict[str, Any]:
    """The fields of a `Result` that explain its time."""
    kernels_ms = clock.kernels_ms(program) if isinstance(clock, Cupti) else None
    if isinstance(program, cublas.Product):
        return {"kernels_ms": kernels_ms, "trace_ms": 0.0, "compile_ms": 0.0}
    memory = program.compiled.memory_analysis()
    return {
        "kernels_ms": kernels_ms,
        "hlo": strays(program.compiled.as_text()),
        "temporaries_bytes": None if memory is None else memory.temp_size_in_bytes,
        "trace_ms": program.trace_ms,
        "compile_ms": program.compile_ms,
    }


def strays(text: str) -> dict[str, int]:
    """The number of instructions in a compiled program, including fusions, that only move data."""
    opcodes = INSTRUCTION.findall(text)
    if not opcodes:
        raise ValueError(f"strays: no instruction of XLA is found in {text[:200]!r}")
    return {stray: sum(opcode.removesuffix("-start") == stray for opcode in opcodes) for stray in STRAYS}


def ceilings(dtypes: Sequence[str], clock: Clock, quick: bool, known: Mapping[str, float]) -> dict[str, float]:
    """Peak rates: bytes per second of a large copy ("copy"), counting reads and writes, and operations per second of a large matrix product
    by dtype.  Dtypes without a product are left out.  Rates in `known` are not measured again."""
    gpu = jax.default_backend() == "gpu"
    size, n = (1 << 20, 128) if quick else (2 << 30, 8192) if gpu else (64 << 20, 1024)

    def seconds(function, arguments):
        sample = clock.sampler(timing.compile(function, arguments))
        return min(sample() for _ in range(10)) / 1e3

    found = dict(known)
    if "copy" not in found:
        found["copy"] = 2 * size / seconds(lambda x: x + 1, [jnp.zeros(size // 4, jnp.uint32)])
    kinds = {dtype: numbers for numbers, dtype in PLAIN.items()} | {"float8_e4m3fn": "fp8", "int8": "int8"}
    for dtype in dtypes:
        if dtype in kinds and dtype not in found:
            case = Matmul(name="ceiling", M=n, N=n, K=n).case("nn", kinds[dtype])
            try:
                found[dtype] = case.flops / seconds(case.build("lax"), random_operands.normal(case.shapes, case.dtypes))
            except Exception:  # the rows of this dtype say why
                continue
    return found


def lost() -> str | None:
    """Return the reason if the device has stopped working, or None: after an illegal access every later program of the process fails."""
    try:
        np.asarray(jnp.arange(2) + 1)
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def state() -> dict[str, str]:
    """The state of the GPU now, from nvidia-smi; empty on a CPU."""
    if jax.default_backend() != "gpu":
        return {}
    # A UUID means the same GPU to CUDA and to nvidia-smi.  A number does if all GPUs are of one kind or CUDA_DEVICE_ORDER is PCI_BUS_ID;
    # otherwise CUDA numbers the fastest GPU first.
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    query = ["nvidia-smi", "-i", device, f"--query-gpu={','.join(STATE)}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in answer.partition("\n")[0].split(",")]
    return dict(zip(STATE, values, strict=True)) if len(values) == len(STATE) else {}
