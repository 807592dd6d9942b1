"""jaxext against lax on a CPU: the same expression with either, jitted, in one process, called in turn.

    python benchmarks/cpu.py [--only SUBSTRING] [--repeats N] [--json PATH] [--plot PATH]

A row's ratio is lax's median time over jaxext's: above 1, jaxext is faster.  Memory is the temporaries of the compiled program.  Rows
without a target are there to show where the thresholds of `jaxext._conv_xla.plan` stand, the shapes that gain least among them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from problems import LAYOUTS, Case, all_roles, conv, environment, floats, matmul, operation, roles

RESULTS = pathlib.Path(__file__).parent / "results"
SAMPLE_SECONDS = 5e-3  # a sample is as many calls as take this long, so that short ones are not all overhead
PATIENCE_SECONDS = 5  # a case whose samples would take longer than this together gets fewer of them, but three
# glibc reads these when a process starts.  It keeps what is freed, so that a call does not wait for the kernel to hand out the result's
# pages anew: that took up to three quarters of the time of a pass over 16 MiB, of lax's and of ours.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**33)}


def tracing():
    static = dict(window_strides=(1, 1), padding="SAME", dimension_numbers=LAYOUTS[2])

    def build(library):
        op = operation(library, "conv_general_dilated")
        return lambda x, w: op(x, w, **static)

    return Case("tracing a convolution", build, ((2, 8, 8, 4), (3, 3, 4, 4)), 1 / 3, traced=True)


CASES = [
    *roles("depthwise 7x7, 8x56x56x96", (8, 56, 56, 96), (7, 7, 1, 96), {"fprop": 15, "dgrad": 15, "wgrad": 5}, groups=96),
    *roles("depthwise 3x3, 8x56x56x64", (8, 56, 56, 64), (3, 3, 1, 64), {"fprop": 10, "dgrad": 10, "wgrad": 2.5}, groups=64),
    *roles("causal depthwise k=4, 4x2048x512", (4, 2048, 512), (4, 1, 512), {"fprop": 30, "dgrad": 30, "wgrad": 3},
           groups=512, padding=((3, 0),)),
    *roles("32 groups of 4, 3x3, 8x28x28x128", (8, 28, 28, 128), (3, 3, 4, 128), {"fprop": 4, "dgrad": 3, "wgrad": 50}, groups=32),
    *roles("batched filters, 16 x 2x28x28x32", (2, 28, 28, 32), (3, 3, 32, 32), all_roles(3), vmap=16),
    conv("per-example, 16 x 28x28x32", (1, 28, 28, 32), (3, 3, 32, 32), "wgrad", vmap=16, target=3),
    *roles("transposed 4x4 stride 2, 4x32x32x64", (4, 32, 32, 64), (4, 4, 64, 64), {"fprop": 1.2, "dgrad": 0.95, "wgrad": 1.2},
           input_dilation=2, padding=((2, 2), (2, 2))),
    *roles("strided 4x4 by 2, 4x64x64x64", (4, 64, 64, 64), (4, 4, 64, 64), {"fprop": 0.95, "dgrad": 1.2, "wgrad": 0.95}, stride=2),
    *roles("dense 1x1, 8x28x28x128", (8, 28, 28, 128), (1, 1, 128, 128), all_roles(0.95)),
    *roles("dense 3x3, 8x28x28x64", (8, 28, 28, 64), (3, 3, 64, 64), all_roles(0.95)),
    *roles("dense 7x7, 2x56x56x16", (2, 56, 56, 16), (7, 7, 16, 16), all_roles(0.95)),
    *roles("dense 1-D k=5, 8x512x64", (8, 512, 64), (5, 64, 64), all_roles(0.95)),
    *roles("dense 3-D 3x3x3, 2x12x12x12x16", (2, 12, 12, 12, 16), (3, 3, 3, 16, 16), all_roles(0.95)),
    *(matmul(f"matmul {n}", n, n, n, target=0.95) for n in (256, 512, 1024, 2048)),
    tracing(),
    *roles("depthwise 3x3, 1x14x14x64", (1, 14, 14, 64), (3, 3, 1, 64), all_roles(None), groups=64),
    *roles("depthwise 5x5 by 2, 4x28x28x32", (4, 28, 28, 32), (5, 5, 1, 32), all_roles(None), groups=32, stride=2),
    *roles("depthwise 3x3 dilated, 4x28x28x32", (4, 28, 28, 32), (3, 3, 1, 32), all_roles(None), groups=32, dilation=2),
    *roles("depthwise 15x15, 2x32x32x32", (2, 32, 32, 32), (15, 15, 1, 32), all_roles(None), groups=32),
    *roles("2 groups of 32, 3x3, 4x28x28x64", (4, 28, 28, 64), (3, 3, 32, 64), all_roles(None), groups=2),
    *roles("64 groups of 16, 3x3, 4x7x7x1024", (4, 7, 7, 1024), (3, 3, 16, 1024), all_roles(None), groups=64),
    *roles("29 groups of 12, 3x3, 8x14x14x348", (8, 14, 14, 348), (3, 3, 12, 348), all_roles(None), groups=29),
    *roles("batched filters, 64 x 1x8x8x4", (1, 8, 8, 4), (3, 3, 4, 4), all_roles(None), vmap=64),
    *roles("batched filters, 32 x 1x14x14x32", (1, 14, 14, 32), (3, 3, 32, 32), all_roles(None), vmap=32),
]  # fmt: skip


def measure(case: Case, repeats: int) -> dict:
    rng = np.random.default_rng(0)
    arguments = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in case.shapes]
    runs, row = {}, {"name": case.name, "shapes": case.shapes, "target": case.target}
    for library in ("lax", "jaxext"):
        f = case.build(library)
        if case.traced:
            # A new function and a new batch size each time, or a cache would hold the jaxpr.
            batches = itertools.count(arguments[0].shape[0])
            runs[library] = lambda f=f, batches=batches: jax.make_jaxpr(lambda *a: f(*a))(
                floats((next(batches), *arguments[0].shape[1:])), *arguments[1:]
            )
        else:
            compiled = jax.jit(f).lower(*arguments).compile()
            runs[library] = lambda compiled=compiled: jax.block_until_ready(compiled(*arguments))
            if memory := compiled.memory_analysis():
                row[f"{library}_temporaries_bytes"] = memory.temp_size_in_bytes
    seconds = sample(runs, repeats)
    for library, samples in seconds.items():
        row[f"{library}_ms_quartiles"] = [float(q) * 1e3 for q in np.quantile(samples, (0.25, 0.5, 0.75))]
    row["ratio"] = row["lax_ms_quartiles"][1] / row["jaxext_ms_quartiles"][1]
    return row


def sample(runs: dict[str, Callable], repeats: int) -> dict[str, list[float]]:
    """Seconds per call, the libraries in turn, so that a machine that slows down slows both."""
    calls, total = {}, 0.0
    for library, run in runs.items():
        run()
        start = time.perf_counter()
        run()
        once = time.perf_counter() - start
        calls[library] = max(1, round(SAMPLE_SECONDS / once))
        total += max(once, SAMPLE_SECONDS)
    repeats = max(3, min(repeats, int(PATIENCE_SECONDS / total)))
    seconds = {library: [] for library in runs}
    for _ in range(repeats):
        for library, run in runs.items():
            start = time.perf_counter()
            for _ in range(calls[library]):
                run()
            seconds[library].append((time.perf_counter() - start) / calls[library])
    return seconds


def line(row: dict) -> str:
    lax_ms, ours_ms = row["lax_ms_quartiles"], row["jaxext_ms_quartiles"]
    target = row["target"]
    verdict = "" if target is None else f"{target:6.2f} {'ok' if row['ratio'] >= target else 'MISSED'}"
    memory = "".join(f"{row.get(f'{library}_temporaries_bytes', 0) / 2**20:8.2f}" for library in ("lax", "jaxext"))
    times = "".join(f"{q[1]:10.3f} ±{50 * (q[2] - q[0]) / q[1]:3.0f}%" for q in (lax_ms, ours_ms))
    return f"{row['name']:48}{times}{memory}{row['ratio']:9.2f}  {verdict}"


def plot(rows: list[dict], path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 1.5 + 0.22 * len(rows)), layout="constrained")
    places = np.arange(len(rows))[::-1]
    colours = ["tab:green" if row["ratio"] >= 1.05 else "tab:gray" if row["ratio"] >= 0.95 else "tab:red" for row in rows]
    axes.barh(places, [row["ratio"] - 1 for row in rows], left=1, color=colours)
    for place, row in zip(places, rows, strict=True):
        if row["target"] is not None:
            axes.plot(row["target"], place, "k|", markersize=9)
    axes.set_yticks(places, [row["name"] for row in rows], fontsize=7)
    axes.set_xscale("log")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("time of lax / time of jaxext (log scale; the mark is the target)")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run the cases whose names contain this")
    parser.add_argument("--repeats", type=int, default=9, help="samples per case and library")
    parser.add_argument("--json", type=pathlib.Path, default=RESULTS / "cpu.json")
    parser.add_argument("--plot", type=pathlib.Path, default=RESULTS / "cpu.png")
    options = parser.parse_args()
    cases = [case for case in CASES if options.only in case.name]
    if not cases:
        parser.error(f"no case has {options.only!r} in its name")
    print(f"{'':48}{'lax ms':>15}{'jaxext ms':>15}{'MiB lax':>8}{'jaxext':>8}{'ratio':>9}  target")
    rows = []
    for case in cases:
        rows.append(measure(case, options.repeats))
        print(line(rows[-1]), flush=True)
    for path in (options.json, options.plot):
        path.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(environment() | {"rows": rows}, indent=1) + "\n")
    plot(rows, options.plot)
    print(f"written: {options.json} and {options.plot}")


if __name__ == "__main__":
    if not ALLOCATOR.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | ALLOCATOR)
    main()
