"""Fits the rates by which `xla` chooses the algorithm of a convolution on a CPU (jaxext/ops/conv/xla_rates.json).

    python -m benchmarks.fit_cpu --json rows.json                # measures random convolutions by every algorithm, and fits
    python -m benchmarks.fit_cpu --rows rows.json                # fits again
    python -m benchmarks.fit_cpu --rows held_out.json --check    # only tells how good the rates are for these rows

Half an hour on a quiet machine.  A rate is how long a count of `xla_plan.Work` takes.  All are fitted together, to the logarithms of the
times of all algorithms: a program of a microsecond counts as much as one of a second, and what no formula foresees counts little.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import least_squares

from jaxext.bench.bench_report import Failure
from jaxext.cli.terminal import UsageError, count
from jaxext.ops.conv import xla, xla_plan
from jaxext.ops.conv.xla_plan import Conv, Work
from jaxext.tables import environment

from .algorithms import THEIRS, Side, convs, serve
from .draws import draw
from .geometry import parse
from .worker import Worker

BUILD = ("programs", "fusions", "terms")  # the counts that take time to build
SCALE = 0.3  # of a logarithm, beyond which an error counts as an outlier
PATIENCE_S = 300.0  # for all algorithms of a convolution
ROWS_OF_A_PROCESS = 250  # jax keeps what it traced


class Row(NamedTuple):
    """A convolution, and what each algorithm took: milliseconds to run and to build, and bytes with operands and result."""

    geometry: str
    algorithms: Mapping[str, Sequence[float]]


def measure(number: int, seed: int, worker: Worker) -> list[Row]:
    rows = []
    for n in range(number):
        geometry = draw(seed, n)
        sides = worker.ask((geometry, 10, 0.2), PATIENCE_S)
        if n % ROWS_OF_A_PROCESS == ROWS_OF_A_PROCESS - 1:
            worker.stop()
        if isinstance(sides, Failure):
            print(f"{geometry}: {sides.failed}", flush=True)
            continue
        found = {name: (side.least_ms, side.build_ms, side.bytes) for name, side in sides.items() if isinstance(side, Side)}
        rows.append(Row(str(geometry), found))
    return rows


def fit(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """The rates in nanoseconds, to run and to build."""
    works, run, build = [], [], []
    for row in rows:
        for name, work in _works(_conv(row.geometry)).items():
            if name in row.algorithms:
                works.append(vars(work))
                run.append(row.algorithms[name][0] * 1e6)
                build.append(row.algorithms[name][1] * 1e6)
    counts = [field.name for field in dataclasses.fields(Work) if field.name not in (*BUILD[1:], "bytes")]
    return {"run": _fitted(counts, works, run), "build": _fitted(BUILD, works, build)}


def _fitted(counts: Sequence[str], works: Sequence[Mapping[str, float]], ns: Sequence[float]) -> dict[str, float]:
    missing = [name for name in counts if not any(work[name] for work in works)]
    if missing:
        raise UsageError(f"no row measures {', '.join(missing)}: more rows are needed")
    features, logs = np.array([[work[name] for name in counts] for work in works]), np.log(ns)
    start = [np.log(np.median((np.exp(logs) / np.maximum(of, 1e-9))[of > 0]) / 3) for of in features.T]
    found = least_squares(lambda rates: np.log(features @ np.exp(rates)) - logs, start, loss="soft_l1", f_scale=SCALE, bounds=(-12, 22))
    return {name: float(f"{rate:.3g}") for name, rate in zip(counts, np.exp(found.x), strict=True)}


@functools.cache
def _conv(geometry: str) -> Conv:
    (conv,) = convs(parse(geometry))
    return conv


def _works(conv: Conv) -> dict[str, Work]:
    """The work of each algorithm that is no sum of others."""
    found = {algorithm.name: algorithm.work(conv) for algorithm in xla.ALGORITHMS if algorithm not in (xla.Phases, xla.Folded, xla.Slices)}
    return {name: work for name, work in found.items() if work is not None}


def report(rows: Sequence[Row]) -> str:
    """The quality of the choice by what was measured, in the rows in which the plan's algorithm and lax were."""
    over_best, over_lax, slower, larger, taken = [], [], 0, 0, [0.0] * 4
    for row in rows:
        lax, found = row.algorithms.get(THEIRS), {name: took for name, took in row.algorithms.items() if name != THEIRS}
        plan = xla.plans(_conv(row.geometry))[0].name
        if lax is None or plan not in found:
            continue
        costs = {name: ms + build / xla_plan.CALLS for name, (ms, build, _) in found.items()}
        over_best.append(math.log(costs[plan] / min(costs.values())))
        over_lax.append(math.log(found[plan][0] / lax[0]))
        slower += found[plan][0] > 1.3 * lax[0]
        larger += found[plan][2] > 1.5 * lax[2]
        taken = [a + b for a, b in zip(taken, (found[plan][0], lax[0], found[plan][1], lax[1]), strict=True)]
    return (
        f"{len(over_best)} rows of {len(rows)}, geometric means: cost over the least {np.exp(np.mean(over_best)):.3f}, time over lax's "
        f"{np.exp(np.mean(over_lax)):.3f}; {slower} over 1.3 times lax's time, {larger} over 1.5 times its memory\n"
        f"sums: {taken[0]:.0f} ms to run (lax {taken[1]:.0f}), {taken[2]:.0f} ms to build (lax {taken[3]:.0f})"
    )


def _stored(path: pathlib.Path) -> tuple[list[Row], dict[str, Any]]:
    try:
        stored = json.loads(path.read_text())
        return [Row(*row) for row in stored["rows"]], stored["environment"]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--rows: {path} holds no rows of this command ({type(error).__name__}: {error})") from None


def main(arguments: list[str] | None = None) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fit_cpu", description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=count, default=800, help="how many random geometries (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: %(default)s)")
    parser.add_argument("--json", type=pathlib.Path, metavar="PATH", help="the file for what was measured")
    parser.add_argument("--rows", type=pathlib.Path, metavar="PATH", help="what was measured before, in place of measuring")
    parser.add_argument("--check", action="store_true", help="keep the rates")
    options = parser.parse_args(arguments)
    worker = Worker(serve)
    try:
        if options.rows:
            rows, where = _stored(options.rows)
        else:
            rows, where = measure(options.count, options.seed, worker), environment.report()
        if options.json:
            rows_of_text = ",\n".join(json.dumps(row) for row in rows)
            options.json.write_text(f'{{"environment": {json.dumps(where)},\n"rows": [\n{rows_of_text}\n]}}\n')
        if not any(len(row.algorithms) > 1 for row in rows):
            raise UsageError("no convolution was measured")
        if not options.check:
            named = {"machine": where["device"], "jax": where["versions"]["jax"], "rows": len(rows)}
            xla_plan.FILE.write_text(json.dumps(named | fit(rows), indent=1) + "\n")
            xla_plan.rates.cache_clear()
            xla.plans.cache_clear()
        print(report(rows))
        return 0
    except (OSError, UsageError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    finally:
        worker.stop()


if __name__ == "__main__":
    sys.exit(main())
