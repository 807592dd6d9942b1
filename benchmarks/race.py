"""Functions of the same arguments, timed in turn, with errors against float64; and rows of such figures, told and kept."""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
from collections.abc import Callable, Iterable, Sequence

import jax

from jaxext.tables.environment import report
from jaxext.tuning import timing


def race(functions: dict[str, Callable], arguments, clock, rounds: int, definition: Callable) -> dict:
    """Times and errors by name, and why a function has none.  `copy` has no error: it computes something else."""
    truth = timing.truth(lambda dtype, _: definition(*(x.astype(dtype) for x in arguments)))
    samplers, errors, failed = {}, {}, {}
    for name, function in functions.items():
        try:
            program = timing.compile(function, arguments)
            if name != "copy":
                errors[name] = timing.relative_error(program(), truth)[0]
            samplers[name] = clock.sampler(program)
        except (NotImplementedError, jax.errors.JaxRuntimeError) as error:
            failed[name] = str(error).splitlines()[0]
    samples = timing.take(samplers, rounds, patience_s=600)
    return {"ms": {name: statistics.median(took) for name, took in samples.items()}, "error": errors, "failed": failed}


def tell(rows: Iterable[dict], line: Callable[[dict], str], path: pathlib.Path | None, clock=None) -> None:
    """A line for each row, as soon as it is known, and all of them in a file, with the clock, the default one unless it is given."""
    told, clock = [], clock or timing.timer()[0]
    for row in rows:
        print(line(row), flush=True)
        told.append(row)
        if path:
            path.write_text(json.dumps({"environment": report(), "clock": clock.name, "rows": told}, indent=1) + "\n")


def parser(description: str | None, rounds: int) -> argparse.ArgumentParser:
    """The arguments that all of these benchmarks have."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--json", type=pathlib.Path, help="where the rows go")
    found.add_argument("--rounds", type=int, default=rounds, help="of each row (default: %(default)s)")
    return found


def run(
    description: str | None, rows: Callable[[int], Iterable[dict]], line: Callable, rounds: int, arguments: Sequence[str] | None
) -> None:
    """Tell the rows of `rows(rounds)`, by a command's arguments."""
    options = parser(description, rounds).parse_args(arguments)
    tell(rows(options.rounds), line, options.json)


def outcome(row: dict) -> str:
    """Return jaxext's milliseconds and relative error in a row, and the times of the others over its own."""
    ms = row["ms"]
    ratios = "".join(f" {name} {took / ms['jaxext']:6.2f}" for name, took in ms.items() if name != "jaxext")
    return f"{ms['jaxext']:9.3f} ms  error {row['error']['jaxext']:.1e} {ratios}"
