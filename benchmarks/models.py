"""Whole networks: the scripts in examples/models one after the other, each network in a process of its own.

    pip install '.[models]'
    python -m benchmarks.models --json benchmarks/results/models_cpu.json
    python -m benchmarks.models --json models_gpu.json --dtype bfloat16 --jobs 5       # on a GPU

Nothing that is compiled is in a cache.  On a GPU batches are larger, and errors are relative to float32 at the highest precision.  Networks
that are built at once disturb each other: their times to build say nothing, and XLA chooses among a GPU's kernels by times that it takes
beside other work.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import importlib
import multiprocessing
import os
import pathlib
import sys
import traceback
from collections.abc import Iterator

import jax

from jaxext.bench.heap import keep_freed_memory
from jaxext.cli.terminal import count
from jaxext.tuning import timing

from .race import write_rows

FOLDER = pathlib.Path(__file__).parents[1] / "examples" / "models"
sys.path.append(str(FOLDER))

import compare  # noqa: E402

SCRIPTS = [importlib.import_module(path.stem) for path in sorted(FOLDER.glob("*.py")) if path.stem != "compare"]
NETWORKS = {network.name: network for script in SCRIPTS for network in script.NETWORKS}
_built: list[tuple] = []  # the one network of this process


def build(name: str, dtype: str) -> None:
    jax.config.update("jax_enable_compilation_cache", False)
    _built.append((NETWORKS[name], dtype, compare.build(NETWORKS[name], dtype)))


def measure(rounds: int) -> dict:
    ((network, dtype, built),) = _built
    return compare.measure(network, dtype, built, rounds)


def rows(names: list[str], rounds: int, dtype: str, jobs: int, failed: list[str]) -> Iterator[dict]:
    """Build `jobs` networks at once, then measure them one after the other.  What failed is printed, and named in `failed`."""
    for some in (names[at : at + jobs] for at in range(0, len(names), jobs)):
        with contextlib.ExitStack() as stack:
            spawn = multiprocessing.get_context("spawn")
            processes = [stack.enter_context(concurrent.futures.ProcessPoolExecutor(1, spawn, keep_freed_memory)) for _ in some]
            building = [process.submit(build, name, dtype) for process, name in zip(processes, some, strict=True)]
            concurrent.futures.wait(building)
            for name, process, built in zip(some, processes, building, strict=True):
                try:
                    built.result()
                    yield process.submit(measure, rounds).result()
                except Exception as error:  # or a process that died: the other networks are measured nevertheless
                    failed.append(name)
                    traceback.print_exception(error)
                    print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                process.shutdown()


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, help="where the rows go")
    parser.add_argument("--rounds", type=count, default=15, help="of each network, three at least (default: 15)")
    parser.add_argument("--only", action="append", choices=NETWORKS, help="a network (default: all that are installed)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"), help="of parameters and inputs")
    parser.add_argument("--jobs", type=count, default=1, help="networks that are built at once (default: 1)")
    options = parser.parse_args(arguments)
    if options.json and not options.json.resolve().parent.is_dir():
        parser.error(f"--json: there is no folder {options.json.resolve().parent}")
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # the processes share a GPU
    names = options.only or [*NETWORKS]
    for name in names:
        if NETWORKS[name].missing:
            print(f"{name} is skipped: {NETWORKS[name].missing}")
    failed: list[str] = []
    made = rows([name for name in names if not NETWORKS[name].missing], options.rounds, options.dtype, options.jobs, failed)
    write_rows(made, compare.lines, options.json, timing.Wall())
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
