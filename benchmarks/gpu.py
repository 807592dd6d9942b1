"""lax, and jaxext's implementations `xla`, `triton` and `cuda`, on one GPU: the same problem by each, in one process, called in turn.

    python benchmarks/gpu.py [--only SUBSTRING]... [--targets-of NAME] [--without NAME]...
                             [--quick] [--repeats N] [--minutes M] [--json PATH]

Time is the sum of the times of all GPU kernels of the compiled program, whatever XLA put around the product included, as CUPTI reports
them; a write of 256 MB before each call leaves nothing of the operands in the L2 cache.  Where CUPTI cannot be had, time is the wall time
of a chain of calls in one program, over its length, with a warm cache; the JSON says which.  Beside it stand the share of the roofline,
whose two slopes (a large copy and a large product) are measured in the same run, the error against float64, and the ratios that the
targets speak of.  Operands are normal random numbers: zeros draw less power, and so run faster.

Without a GPU it runs too, with `--quick`: that tries the script, not the GPU.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import itertools
import json
import math
import os
import pathlib
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from gpu_rows import ERRORS, Row, product, rows
from jax import lax
from problems import environment

import jaxext

RESULTS = pathlib.Path(__file__).parent / "results"
OURS = ("triton", "cuda")  # of which targets speak
LIBRARIES = ("lax", "xla", *OURS)
CALLS = 5  # per sample, of which the mean is taken
WARM_UP = 3  # calls before each sample: the clocks have risen
FLUSHED_BYTES = 256 << 20  # several times the L2 cache of any GPU
COPIED_BYTES = 2 << 30
RECORDED = ("jaxlib", "triton", "jax-triton", "jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cudnn-cu13", "nvidia-cublas")
STATE = ("name", "driver_version", "pstate", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw", "power.limit", "temperature.gpu")


class Cupti:
    """Kernel times by CUPTI, with a cold L2 cache.  It uses what `jax.experimental.mosaic.gpu.profiler` is made of: that itself allows
    nothing between two calls."""

    name = "CUPTI: sum of kernel times, cold L2"

    def __init__(self):
        from jax.experimental.mosaic.gpu import profiler

        self._cupti: Any = profiler.mosaic_gpu_lib._mosaic_gpu_ext  # type: ignore[union-attr]
        self._flush = jax.jit(lambda buffer: buffer ^ 1, donate_argnums=0)
        self._buffer = jax.block_until_ready(self._flush(jnp.zeros(FLUSHED_BYTES // 4, jnp.uint32)))
        self._flushing = frozenset()
        self._flushing = frozenset(self._kernels(lambda: None))
        if not self._flushing:
            raise RuntimeError("CUPTI reports no kernel")

    def sampler(self, f: Callable, arguments: Sequence[jax.Array], compiled: Callable) -> Callable[[], dict[str, float]]:
        del f
        return lambda: self._kernels(lambda: compiled(*arguments))

    def _kernels(self, run: Callable) -> dict[str, float]:
        """Milliseconds per call, by kernel."""
        for _ in range(WARM_UP):
            jax.block_until_ready(run())
        self._cupti._cupti_init()
        try:
            for _ in range(CALLS):
                self._buffer = self._flush(self._buffer)
                jax.block_until_ready((run(), self._buffer))
        finally:
            launches = self._cupti._cupti_get_timings(False)
        kernels: dict[str, float] = {}
        for name, ms in launches or ():
            if name not in self._flushing:  # nothing else is a kernel of a single exclusive or
                kernels[name] = kernels.get(name, 0) + ms / CALLS
        return kernels


class Wall:
    """Wall time of a chain of calls in one program, each of which waits for the one before."""

    name = "wall time of a chain of calls in one program, warm L2"

    def sampler(self, f: Callable, arguments: Sequence[jax.Array], compiled: Callable) -> Callable[[], dict[str, float]]:
        del compiled

        def chain(*arguments):
            y = None
            for _ in range(CALLS):
                arguments, y = lax.optimization_barrier((arguments, f(*arguments)))
            return y

        compiled = jax.jit(chain).lower(*arguments).compile()
        for _ in range(WARM_UP):
            jax.block_until_ready(compiled(*arguments))
        return lambda: {"": wall_ms(lambda: compiled(*arguments), 1) / CALLS}


def wall_ms(run: Callable, calls: int) -> float:
    """Per call, of calls that are queued without waiting."""
    start = time.perf_counter()
    jax.block_until_ready([run() for _ in range(calls)][-1])
    return (time.perf_counter() - start) * 1e3 / calls


def timer() -> tuple[Cupti | Wall, str | None]:
    """How to take time here, and why not with CUPTI."""
    if jax.default_backend() != "gpu":
        return Wall(), f"the platform is {jax.default_backend()}"
    try:
        return Cupti(), None
    except Exception as error:  # whatever is missing, of jax's or of the machine's
        return Wall(), f"{type(error).__name__}: {error}"


def normal(shapes, dtype) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), len(shapes))
    dtype = jnp.dtype(dtype)
    drawn = jnp.dtype(jnp.float32) if dtype.itemsize == 1 else dtype
    draw = jax.jit(lambda key, shape: jax.random.normal(key, shape, drawn).astype(dtype), static_argnums=1)
    return [draw(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def ceilings(clock: Cupti | Wall, quick: bool) -> dict[str, float]:
    """Bytes per second of a large copy ("copy"), read and written, and operations per second of a large product, by dtype."""

    def seconds(f, arguments):
        sample = clock.sampler(f, arguments, jax.jit(f).lower(*arguments).compile())
        return statistics.median(sum(sample().values()) for _ in range(5)) / 1e3

    size, n = (1 << 20, 128) if quick else (COPIED_BYTES, 8192)
    found = {"copy": 2 * size / seconds(lambda x: x + 1, [jnp.zeros(size // 4, jnp.uint32)])}
    for dtype in ("bfloat16", "float32"):
        found[dtype] = 2 * n**3 / seconds(jnp.matmul, normal(((n, n), (n, n)), dtype))
    eight_bits = product("ceiling nt", n, n, n, preferred=jnp.bfloat16)
    found["float8_e4m3fn"] = eight_bits.flops / seconds(eight_bits.build("lax"), normal(eight_bits.shapes, "float8_e4m3fn"))
    return found


def measure(row: Row, clock: Cupti | Wall, repeats: int, limits: dict[str, float], without: Sequence[str] = ()) -> dict:
    """The row's record; what a library refuses or fails at stands in its place as text."""
    arguments = normal(row.case.shapes, row.dtype)
    result = jax.eval_shape(row.case.build("xla"), *arguments)
    moved = sum(x.size * x.dtype.itemsize for x in (*arguments, result))
    floor_ms = 1e3 * max(moved / limits["copy"], row.case.flops / limits[row.dtype])
    record = {"name": row.name, "dtype": row.dtype, "shapes": row.case.shapes, "targets": row.targets}
    record |= {"flops": row.case.flops, "bytes": moved, "floor_ms": floor_ms, "default": chosen(row, arguments)}
    programs, samplers = {}, {}
    for library in LIBRARIES:
        f = row.case.build(library)
        try:
            if library in without:
                raise NotImplementedError("left out")
            programs[library] = compiled = jax.jit(f).lower(*arguments).compile()
            jax.block_until_ready(compiled(*arguments))
            samplers[library] = clock.sampler(f, arguments, compiled)
        except NotImplementedError as refusal:
            record[library] = {"refused": str(refusal).rpartition("does not support this call: ")[2]}
        except Exception as error:  # of XLA, of Triton's compiler, of the GPU: the row goes on without it
            record[library] = {"failed": f"{type(error).__name__}: {error}"[:500]}
    samples: dict[str, list[dict[str, float]]] = {library: [] for library in samplers}
    for turn in range(repeats):
        for library in sorted(samplers, reverse=turn % 2 == 1):
            samples[library].append(samplers[library]())
    errors = relative_errors(row, arguments, {library: programs[library] for library in samplers})
    for library, taken in samples.items():
        low, ms, high = statistics.quantiles([sum(kernels.values()) for kernels in taken], n=4, method="inclusive")
        run = functools.partial(programs[library], *arguments)
        record[library] = {
            "ms_quartiles": [low, ms, high],
            "wall_ms": wall_ms(run, CALLS),
            "kernels_ms": taken[-1],
            "roofline": floor_ms / ms,
            "copy": moved / limits["copy"] * 1e3 / ms,
            "tflops": row.case.flops / ms / 1e9,
            "gbps": moved / ms / 1e6,
            "error": errors[library],
        }
    record["ratios"] = ratios(record)
    record["state"] = state()
    return record


def chosen(row: Row, arguments) -> str | None:
    """What jaxext takes where nobody names an implementation."""
    try:
        products = jaxext.explain(row.case.build("jaxext"), *arguments).rows
    except NotImplementedError:
        return None
    return ", ".join(f"{product.chosen}: {product.how}" for product in products)


def relative_errors(row: Row, arguments, programs) -> dict[str, float | str]:
    """‖y - truth‖ / ‖truth‖, where the truth is `xla` in float64; NaN stays NaN."""
    try:
        with jax.enable_x64(True):
            wide = [x.astype(jnp.float64) for x in arguments]
            truth = jax.jit((row.reference or row.case).build("xla"))(*wide)
            return {
                library: float(jnp.linalg.norm((program(*arguments).astype(jnp.float64) - truth).ravel()) / jnp.linalg.norm(truth.ravel()))
                for library, program in programs.items()
            }
    except Exception as error:  # memory, or a convolution that cuDNN lacks in float64
        return dict.fromkeys(programs, f"no truth: {type(error).__name__}: {error}"[:200])


def ratios(record: dict) -> dict[str, dict[str, float]]:
    """What the targets speak of, by implementation; nothing where it has no time, or nobody to be compared with."""
    ms = {library: record[library]["ms_quartiles"][1] for library in LIBRARIES if "ms_quartiles" in record[library]}
    others = [library for library in ms if library not in OURS]
    found = {}
    for ours in OURS:
        if ours in ms and others:
            ratio = {other: ms[other] / ms[ours] for other in others}
            found[ours] = ratio | {"best": min(ratio.values())} | {kind: record[ours][kind] for kind in ("copy", "tflops")}
    return found


def missed(record: dict) -> list[str]:
    """The targets that the row does not reach; all those of an implementation that has no time."""
    found = []
    for ours, targets in record["targets"].items():
        for kind, target in targets.items():
            got = record["ratios"].get(ours, {}).get(kind)
            if got is None or got < target:
                found.append(f"{ours} {kind} {'-' if got is None else format(got, '.3g')} of {target}")
    return found


def wrong(record: dict) -> list[str]:
    """What must not be: failures of ours where lax has none, and results that are not right."""
    found = []
    for library in ("xla", *OURS):
        entry = record[library]
        if "failed" in entry and "failed" not in record["lax"]:
            found.append(f"{library} failed: {entry['failed']}")
        error = entry.get("error")
        if isinstance(error, float) and not error <= ERRORS[record["dtype"]]:
            found.append(f"{library} is wrong: relative error {error:.2g}, want {ERRORS[record['dtype']]}")
    return found


def state() -> dict[str, str]:
    """Of the GPU, right now."""
    query = ["nvidia-smi", "-i", "0", f"--query-gpu={','.join(STATE)}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(STATE, map(str.strip, answer.splitlines()[0].split(",")), strict=True))


def versions() -> dict[str, str]:
    found = {}
    for package in RECORDED:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pass
    return found


HEAD = f"{'':58}" + "".join(f"{library + ' ms':>16}" for library in LIBRARIES) + f"{'rate':>13}{'roof':>6}{'error':>9}  ratios (targets)"


def line(record: dict) -> str:
    """Rate, share of the roofline and error are those of `cuda` or, where that has no time, of `triton` or `xla`."""

    def ms(entry):
        if "ms_quartiles" not in entry:
            return "refused" if "refused" in entry else "FAILED"
        low, middle, high = entry["ms_quartiles"]
        return f"{middle:.4g} ±{50 * (high - low) / middle:2.0f}%"

    def verdicts(ours, ratio):
        targets = record["targets"].get(ours)
        if targets is None:
            return f"{ours} best {ratio['best']:.2f}"
        return f"{ours} " + ", ".join(
            f"{kind} {ratio[kind]:.3g} ({target} {'ok' if ratio[kind] >= target else 'MISSED'})"
            for kind, target in targets.items()
            if kind in ratio
        )

    shown = next((record[library] for library in (*reversed(OURS), "xla") if "ms_quartiles" in record[library]), None)
    text = f"{record['name']:58.57}" + "".join(f"{ms(record[library]):>16}" for library in LIBRARIES)
    if shown:
        dense = record["flops"] / record["bytes"] > 100
        rate = f"{shown['tflops']:.0f} TFLOP/s" if dense else f"{shown['gbps']:.0f} GB/s"
        error = f"{shown['error']:.1e}" if isinstance(shown["error"], float) else "?"
        text += f"{rate:>13}{shown['roofline']:>6.0%}{error:>9}"
    return "  ".join([text, *(verdicts(ours, ratio) for ours, ratio in record["ratios"].items())])


def notes(records: list[dict]) -> list[str]:
    """Every reason once, with the first row that had it."""
    found: dict[str, str] = {}
    for record, library in itertools.product(records, LIBRARIES):
        for kind in ("refused", "failed"):
            if kind in record[library]:
                found.setdefault(f"{library} {kind}: {record[library][kind]}", record["name"])
    return [f"{note} [{name}]" for note, name in found.items()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="the rows whose names contain this, or one of these")
    parser.add_argument("--targets-of", choices=OURS, help="the rows with targets for this implementation")
    parser.add_argument("--without", action="append", default=[], choices=OURS, help="an implementation to leave out")
    parser.add_argument("--quick", action="store_true", help="small twins of the problems and few samples: a trial of the script")
    parser.add_argument("--repeats", type=int, default=10, help="samples per row and library")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no row after this time")
    parser.add_argument("--json", type=pathlib.Path, default=RESULTS / "gpu.json", help="written anew after every row")
    options = parser.parse_args()
    start = time.monotonic()
    # Not every driver reports each kernel of a CUDA graph.  XLA reads this when the first device is asked for.
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_enable_command_buffer="
    if jax.default_backend() != "gpu" and not options.quick:
        parser.error(f"no GPU here: the platform is {jax.default_backend()} (--quick tries the script without one)")
    asked = [row for row in rows(options.quick) if not options.only or any(part in row.name for part in options.only)]
    asked = [row for row in asked if options.targets_of is None or options.targets_of in row.targets]
    if not asked:
        parser.error(f"no row has one of {options.only} in its name")

    clock, why_not = timer()
    limits = ceilings(clock, options.quick)
    report = environment()
    report["versions"] |= versions()
    report["commit"] = report["commit"] or os.environ.get("COMMIT") or None
    report |= {"timer": clock.name, "not_cupti": why_not, "quick": options.quick, "ceilings": limits, "state_before": state()}
    report |= {"xla_flags": os.environ["XLA_FLAGS"], "left_out": [], "rows": []}
    print(f"{report['device']}  {report['state_before']}\n{clock.name}" + (f" ({why_not})" if why_not else ""))
    print("  ".join(f"{what}: {rate / 1e12:.4g} T{'B' if what == 'copy' else 'FLOP'}/s" for what, rate in limits.items()))
    print(HEAD)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    for row in asked:
        if time.monotonic() - start > 60 * options.minutes:
            report["left_out"].append(row.name)
            continue
        report["rows"].append(measure(row, clock, 2 if options.quick else options.repeats, limits, options.without))
        print(line(report["rows"][-1]), flush=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    for note in notes(report["rows"]):
        print(note)
    if report["left_out"]:
        print(f"left out, for want of time: {'; '.join(report['left_out'])}")
    for record in report["rows"]:
        if fallen := missed(record):
            print(f"missed: {'; '.join(fallen)} [{record['name']}]")
    faults = [f"{record['name']}: {fault}" for record in report["rows"] for fault in wrong(record)]
    print(*(f"WRONG: {fault}" for fault in faults), f"written: {options.json}", sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
