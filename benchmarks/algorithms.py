"""One convolution by lax and by every algorithm that `xla` has for it: time, memory, and time to lower and compile."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import jaxext
from jaxext.bench.heap import keep_freed_memory
from jaxext.ops.conv.xla import XlaConv
from jaxext.ops.conv.xla_plan import Conv
from jaxext.tables import active, environment
from jaxext.tables.table_format import Measurement, Table
from jaxext.tuning import random_operands, timing
from jaxext.tuning.timing import Program

from .geometry import Geometry

THEIRS = "(lax)"  # the library, beside the algorithm of `xla` that is called so
SAMPLES, PATIENCE_S = 100, 3.0
DIFFERENT = 4  # times what rounding may do: the results of two ways to compute are not those of one


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
    """The costs of one program.

    Attributes:
      ms: per call: first quartile, median, third quartile.
      least_ms: the least sample.
      bytes: arguments, result and temporaries, as XLA says.
      lower_ms, compile_ms: from the function to XLA's program, and from there to one that runs.
    """

    ms: tuple[float, float, float]
    least_ms: float
    bytes: int
    lower_ms: float
    compile_ms: float

    @property
    def build_ms(self) -> float:
        return self.lower_ms + self.compile_ms


def side(program: Program, ms: Sequence[float]) -> Side:
    memory = program.compiled.memory_analysis()
    used = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes - memory.alias_size_in_bytes
    return Side(ms=timing.quartiles(ms), least_ms=min(ms), bytes=used, lower_ms=program.trace_ms, compile_ms=program.compile_ms)


def alternatives(geometry: Geometry, samples: int = SAMPLES, patience_s: float = PATIENCE_S) -> dict[str, Side | str]:
    """The costs of lax (`THEIRS`) and of every algorithm that `xla` has for the geometry's products, the plan's choice first; or the reason
    why one is not timed."""
    arguments = random_operands.normal(geometry.shapes, geometry.dtype)
    programs = {THEIRS: timing.compile(geometry.build("lax"), arguments)}
    truth, calls, found = programs[THEIRS](), _calls(geometry), {}
    for name in dict.fromkeys(name for call in calls for name in XlaConv().plan(call).found):
        try:
            with jaxext.use_table(_table_of(calls, name)):
                program = timing.compile(geometry.build("jaxext"), arguments)
            difference, allowed = _difference(program(), truth, geometry.dtype)
            found[name] = f"differs from lax by {difference:.1e}, want at most {allowed:.1e}"
            if difference <= allowed:
                programs[name] = program
        except Exception as error:  # whatever XLA raises: the others are of interest all the same
            found[name] = f"{type(error).__name__}: {error}"[:200]
    samplers = {name: timing.Wall().sampler(program) for name, program in programs.items()}
    taken = timing.take(samplers, samples, patience_s)
    return found | {name: side(program, taken[name]) for name, program in programs.items()}


def convs(geometry: Geometry) -> tuple[Conv, ...]:
    """The convolutions that `xla` plans for it; nothing is compiled."""
    return tuple(XlaConv().plan(call).conv for call in _calls(geometry))


def _calls(geometry: Geometry) -> Sequence[Any]:
    arguments = [jax.ShapeDtypeStruct(shape, geometry.dtype) for shape in geometry.shapes]
    with active.collecting() as calls, jaxext.use_table(None):
        jax.jit(geometry.build("jaxext")).lower(*arguments)
    return calls


def _table_of(calls: Sequence[Any], algorithm: str) -> Table:
    """A table in which this algorithm is the fastest for these calls."""
    measurement = Measurement(implementation="xla", config={"algorithm": algorithm}, ms=(1.0, 1.0, 1.0), error=0.0)
    return Table(active.context(environment.default_platform()), {call.problem: (measurement,) for call in calls}, "one algorithm")


def _difference(ours: Any, theirs: Any, dtype: str) -> tuple[float, float]:
    """The difference of our results from lax's, relative and in the norm, and the difference that is allowed."""
    found = 0.0
    for pair in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        a, b = (np.asarray(array, np.float32).ravel() for array in pair)
        size, apart = (math.sqrt(float(np.vdot(x, x))) for x in (b, a - b))
        found = max(found, apart / size if size else apart) if math.isfinite(apart) else math.inf
    return found, DIFFERENT * timing.law((dtype, dtype, dtype), None, "cpu")


def serve(pipe: Any) -> None:
    """Answer `alternatives(*request)` for each request, in a process of its own (worker.py), until the pipe ends."""
    begin()
    pipe.send((None, False))
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        while True:
            pipe.send((alternatives(*pipe.recv()), False))


def begin() -> None:
    keep_freed_memory()
    jax.config.update("jax_enable_compilation_cache", False)
    alternatives(Geometry(role="fprop", x=(1, 2, 2), w=(1, 2, 2)), 1, 0.0)  # the first programs of a process take longer to make
