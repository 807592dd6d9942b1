"""Functions of the same arguments, timed in turn, with errors against float64; and rows of such figures, printed and written."""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from jaxext.tables.environment import report
from jaxext.tuning import timing


def race(functions: dict[str, Callable], arguments: Sequence, rounds: int, definition: Callable, memory: bool = False) -> dict:
    """Return the median milliseconds and the error of each function, and with `memory` the MiB of its temporaries."""
    clock, _ = timing.timer()
    truth = timing.truth(lambda dtype, _: definition(*(x.astype(dtype) for x in arguments)))
    programs = {name: timing.compile(function, arguments) for name, function in functions.items()}
    errors = {name: timing.relative_error(program(), truth)[0] for name, program in programs.items()}
    samples = timing.take({name: clock.sampler(program) for name, program in programs.items()}, rounds, patience_s=600)
    found = {"ms": {name: statistics.median(took) for name, took in samples.items()}, "error": errors}
    if memory:
        analyses = {name: program.compiled.memory_analysis() for name, program in programs.items()}
        found["MiB"] = {name: analysis.temp_size_in_bytes / 2**20 for name, analysis in analyses.items()}
    return found


def write_rows(rows: Iterable[dict], line: Callable[[dict], str], path: pathlib.Path | None, clock: timing.Clock) -> None:
    """Print a line for each row as soon as it is known, and write all of them to a file."""
    known = []
    for row in rows:
        print(line(row), flush=True)
        known.append(row)
        if path:
            path.write_text(json.dumps({"environment": report(), "clock": clock.name, "rows": known}, indent=1) + "\n")


def run(description: str | None, kinds: Mapping[str, Callable], line: Callable, arguments: Sequence[str] | None) -> None:
    """Run a command that measures one of these kinds: each is a function of the rounds that gives rows."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=kinds, nargs="?" if len(kinds) == 1 else None, default=next(iter(kinds)))
    parser.add_argument("--json", type=pathlib.Path, help="where the rows go")
    parser.add_argument("--rounds", type=int, default=7, help="of each row (default: %(default)s)")
    options = parser.parse_args(arguments)
    write_rows(kinds[options.kind](options.rounds), line, options.json, timing.timer()[0])


def outcome(row: dict) -> str:
    """Return jaxext's milliseconds and relative error in a row, and the times of the others over its own."""
    ms = row["ms"]
    ratios = "".join(f" {name} {took / ms['jaxext']:6.2f}" for name, took in ms.items() if name != "jaxext")
    return f"{ms['jaxext']:9.3f} ms  error {row['error']['jaxext']:.1e} {ratios}"
