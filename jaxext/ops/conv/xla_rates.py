"""The time that the counts of `conv_work` take on a CPU, and so the cost of an algorithm."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Sequence

from jaxext.ops.conv.xla_work import Work

FILE = pathlib.Path(__file__).parent / "xla_rates.json"  # by `make fit-cpu`
CALLS = 100  # of a program that pay back the time to build it


@dataclasses.dataclass(frozen=True)
class Cost:
    """Expected milliseconds to run, and to lower and compile; bytes of memory beside operands and result."""

    run_ms: float = 0.0
    build_ms: float = 0.0
    bytes: float = 0.0

    @property
    def total(self) -> float:
        """Milliseconds of one call, with its share of the time to build."""
        return self.run_ms + self.build_ms / CALLS

    def __str__(self) -> str:
        """Milliseconds to run and to build."""
        run = f"{self.run_ms:.2g}" if self.run_ms < 99 else f"{self.run_ms:.0f}"
        return f"{run}+{self.build_ms:.0f}"


def cost(work: Work, parts: Sequence[Cost] = ()) -> Cost:
    """The cost of this work and of parts, which run one after the other in the same program."""
    run_ms, build_ms = (sum(of.get(name, 0.0) * count for name, count in vars(work).items()) * 1e-6 for of in rates())
    program = cost(Work(programs=1)) if parts else Cost()
    return Cost(
        run_ms + sum(part.run_ms - program.run_ms for part in parts),
        build_ms + sum(part.build_ms - program.build_ms for part in parts),
        work.bytes + max((part.bytes for part in parts), default=0.0),
    )


@functools.cache
def rates() -> tuple[dict[str, float], dict[str, float]]:
    """Nanoseconds of each count, to run and to build."""
    fitted = json.loads(FILE.read_text())
    return fitted["run"], fitted["build"]
