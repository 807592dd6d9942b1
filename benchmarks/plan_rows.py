"""A row of the sweep: one geometry by lax and by jaxext's `xla`: time, memory, time to compile, and the goals that it breaks."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

import jaxext
from jaxext.ops.conv.xla import XlaConv
from jaxext.ops.conv.xla_plan import Conv
from jaxext.tables import active, environment
from jaxext.tables.table_format import Measurement, Table
from jaxext.tuning import random_operands, timing
from jaxext.tuning.timing import Program

from .geometry import Geometry
from .heap import keep_freed_memory

# The goals, for ours over lax's.
MOST_TIME = 1.15
MOST_BYTES, MOST_BYTES_IF_FAST, FAST = 1.5, 3.0, 0.5  # more memory is allowed where ours takes at most half of lax's time
MOST_BUILD, FREE_BUILD_MS = 1.5, 50.0  # of lowering and compiling
TOO_LONG = "took more than"  # so begins why there is no measurement, where it would have taken too long
THEIRS = "(lax)"  # the library, beside the algorithm of `xla` that is called so
GOALS = ("time", "memory", "build", "result")

SAMPLE_MS = 1.0  # at least
SAMPLES, MORE_SAMPLES = 30, 100  # of each library, at first and where a goal seems to be broken
PATIENCE_S, MORE_PATIENCE_S = 0.4, 3.0  # after which there are no more than the least
SLOW_S = 2.0  # a call that takes as long is its only sample
CLEARLY = 2.0  # times what is allowed to compile: no noise, and no use to wait for it again
DIFFERENT = 4  # times what rounding may do: the results of two ways to compute are not those of one


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
    """The costs of one library.

    Attributes:
      ms: per call: first quartile, median, third quartile.
      least_ms: the least sample.
      bytes: arguments, result and temporaries, as XLA says.
      lower_ms, compile_ms: from the function to XLA's program, and from there to one that runs.  The least measurement counts, of wall time
        and of processor time.
    """

    ms: tuple[float, float, float]
    least_ms: float
    bytes: int
    lower_ms: float
    compile_ms: float

    @property
    def build_ms(self) -> float:
        return self.lower_ms + self.compile_ms


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """One measurement of both, sampled in turn."""

    lax: Side
    ours: Side

    @property
    def time(self) -> float:
        """Ours over lax's, by the median, a quartile or the least sample: the ratio nearest to 1, since the others may be noise."""
        pairs = zip((*self.ours.ms, self.ours.least_ms), (*self.lax.ms, self.lax.least_ms), strict=True)
        return min((ours / lax for ours, lax in pairs), key=lambda ratio: abs(math.log(ratio)))

    @property
    def memory(self) -> float:
        return self.ours.bytes / self.lax.bytes

    @property
    def build_over(self) -> float:
        """Our time to build over the goal's limit."""
        return self.ours.build_ms / (MOST_BUILD * self.lax.build_ms + FREE_BUILD_MS)

    @property
    def broken(self) -> tuple[str, ...]:
        """The goals that are broken, except the one for the result."""
        most_bytes = MOST_BYTES_IF_FAST if self.time <= FAST else MOST_BYTES
        over = {"time": self.time > MOST_TIME, "memory": self.memory > most_bytes, "build": self.build_over > 1}
        return tuple(goal for goal, broken in over.items() if broken)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanRow:
    """The measurements of a geometry.

    Attributes:
      geometry: as `geometry.parse` takes it.
      kind: the kind for which it was drawn.
      work: the number of multiply-adds, without those with zeros of padding or dilation.
      algorithms: for each product, the algorithm that `xla` took.
      first, again: the measurement, and a second one with more samples if the first seems to break a goal.
      difference: of the results, relative and in the norm, and the part of it that rounding explains.
      failed: the reason if there is no measurement.
    """

    geometry: str
    kind: str
    work: float
    algorithms: tuple[str, ...] = ()
    first: Pair | None = None
    again: Pair | None = None
    difference: float | str = 0.0
    allowed: float = 0.0
    failed: str | None = None

    @property
    def last(self) -> Pair | None:
        return self.again or self.first

    @property
    def broken(self) -> tuple[str, ...]:
        """The goals that all measurements break; if ours failed or took too long and lax did not, the goal of that stage."""
        if self.failed is not None:
            library, stage, why = (self.failed + ": : ").split(": ")[:3]
            slow = {"running": "time", "timing": "time", "compiling": "build"}
            return () if library != "jaxext" else (slow.get(stage, "result") if why.startswith(TOO_LONG) else "result",)
        assert self.first is not None
        both = [goal for goal in self.first.broken if self.again is None or goal in self.again.broken]
        return (*both, *(() if float(self.difference) <= self.allowed else ("result",)))


def measure(geometry: Geometry, kind: str, tell: Callable[[str], None] = lambda stage: None) -> PlanRow:
    """The row of a geometry.  `tell` is called before each stage with its name, such as "lax: compiling"."""
    row = PlanRow(geometry=str(geometry), kind=kind, work=geometry.work)
    try:
        arguments = random_operands.normal(geometry.shapes, geometry.dtype)
        programs = {"lax": _compiled(geometry, "lax", arguments, tell)}
        with active.collecting() as calls:
            programs["jaxext"] = _compiled(geometry, "jaxext", arguments, tell)
        row = dataclasses.replace(row, algorithms=tuple(dict.fromkeys(_algorithms(call)[0] for call in calls)))
        results = {library: _first(library, program, tell) for library, program in programs.items()}
        difference, allowed = _difference(results["jaxext"].value, results["lax"].value, geometry.dtype)
        first = _pair(programs, results, SAMPLES, PATIENCE_S, tell)
        row = dataclasses.replace(row, first=first, difference=difference, allowed=allowed)
        return dataclasses.replace(row, again=_again(geometry, programs, results, first, tell)) if first.broken else row
    except Exception as error:  # whatever XLA raises
        return dataclasses.replace(row, first=None, failed=f"{getattr(error, 'library', 'lax')}: {type(error).__name__}: {error}"[:500])


@dataclasses.dataclass(frozen=True)
class Result:
    value: Any
    seconds: float  # of the first call


def _compiled(geometry: Geometry, library: str, arguments: Sequence[jax.Array], tell: Callable[[str], None]) -> Program:
    tell(f"{library}: compiling")
    with _named(library), jaxext.use_table(None):
        return _built(geometry, library, arguments)


def _built(geometry: Geometry, library: str, arguments: Sequence[jax.Array]) -> Program:
    """Compile like `timing.compile`, with wall time or processor time, whichever is less, to exclude other load of the machine."""
    function, ends = geometry.build(library), [_now()]
    lowered = jax.jit(lambda *arguments: function(*arguments)).lower(*arguments)
    ends.append(_now())
    compiled = lowered.compile()
    ends.append(_now())
    lower_ms, compile_ms = (1e3 * min(b - a for a, b in zip(*pair, strict=True)) for pair in itertools.pairwise(ends))
    return Program(function, tuple(arguments), compiled, lower_ms, compile_ms)


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _sampler(program: Program) -> timing.Sampler:
    """Sample like `timing.Wall`, in short samples, so that some are free of other load of the machine."""

    def sample(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            program()
        return (time.perf_counter() - start) * 1e3 / calls

    calls = max(1, round(SAMPLE_MS / min(sample(1) for _ in range(2))))
    return lambda: sample(calls)


def _first(library: str, program: Program, tell: Callable[[str], None]) -> Result:
    tell(f"{library}: running")
    with _named(library):
        start = time.perf_counter()
        value = program()
        return Result(value, time.perf_counter() - start)


@contextlib.contextmanager
def _named(library: str) -> Iterator[None]:
    """An error says by whom it is."""
    try:
        yield
    except Exception as error:
        error.library = library  # type: ignore[attr-defined]
        raise


def _again(geometry: Geometry, programs: Mapping[str, Program], results, first: Pair, tell) -> Pair:
    """A second measurement of what seems to break a goal: times with more samples, and the time to compile, with empty caches of jax,
    unless it is far over its goal."""
    if "build" in first.broken and first.build_over < CLEARLY:
        jax.clear_caches()
        fresh = {library: _compiled(geometry, library, programs[library].arguments, tell) for library in ("jaxext", "lax")}
        programs = {name: min(program, fresh[name], key=lambda p: p.trace_ms + p.compile_ms) for name, program in programs.items()}
    if first.broken != ("build",):
        results = {name: _first(name, programs[name], tell) if result.seconds > SLOW_S else result for name, result in results.items()}
        return _pair(programs, results, MORE_SAMPLES, MORE_PATIENCE_S, tell)
    built = {library: {"lower_ms": program.trace_ms, "compile_ms": program.compile_ms} for library, program in programs.items()}
    return Pair(lax=dataclasses.replace(first.lax, **built["lax"]), ours=dataclasses.replace(first.ours, **built["jaxext"]))


def _pair(programs: Mapping[str, Program], results: Mapping[str, Result], samples: int, patience_s: float, tell) -> Pair:
    sides = _sides(programs, results, samples, patience_s, tell)
    return Pair(lax=sides["lax"], ours=sides["jaxext"])


def _sides(programs: Mapping[str, Program], results: Mapping[str, Result], samples: int, patience_s: float, tell) -> dict[str, Side]:
    slow = {name: [result.seconds * 1e3] for name, result in results.items() if result.seconds > SLOW_S}
    samplers = {}
    for name in programs.keys() - slow.keys():
        tell(f"{name}: timing")
        samplers[name] = _sampler(programs[name])
    taken = slow | (timing.take(samplers, samples, patience_s) if samplers else {})
    return {name: side(program, taken[name]) for name, program in programs.items()}


def side(program: Program, ms: Sequence[float]) -> Side:
    memory = program.compiled.memory_analysis()
    used = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes - memory.alias_size_in_bytes
    return Side(ms=timing.quartiles(ms), least_ms=min(ms), bytes=used, lower_ms=program.trace_ms, compile_ms=program.compile_ms)


def _difference(ours: Any, theirs: Any, dtype: str) -> tuple[float, float]:
    """The difference of our results from lax's, relative and in the norm, and the difference that is allowed."""
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    found = 0.0
    for ours, theirs in pairs:
        ours, theirs = (np.asarray(array, np.float32).ravel() for array in (ours, theirs))
        size, apart = (math.sqrt(float(np.vdot(a, a))) for a in (theirs, ours - theirs))
        found = max(found, apart / size if size else apart) if math.isfinite(apart) else math.inf
    return found, DIFFERENT * timing.law((dtype, dtype, dtype), None, "cpu")


def alternatives(
    geometry: Geometry, samples: int = SAMPLES, patience_s: float = MORE_PATIENCE_S, tell: Callable[[str], None] = lambda stage: None
) -> dict[str, Side | str]:
    """The costs of lax (`THEIRS`) and of every algorithm that `xla` has for the geometry's product, the plan's choice first; or the reason
    why one is not timed."""
    arguments = random_operands.normal(geometry.shapes, geometry.dtype)
    programs = {THEIRS: _compiled(geometry, "lax", arguments, tell)}
    results = {THEIRS: _first(THEIRS, programs[THEIRS], tell)}
    with active.collecting() as calls:
        jax.jit(geometry.build("jaxext")).lower(*arguments)
    found: dict[str, Side | str] = {THEIRS: ""}
    for name in dict.fromkeys(name for call in calls for name in _algorithms(call)):
        tell(f"{name}: compiling")
        try:
            with jaxext.use_table(_table_of(calls, name)):
                program = _built(geometry, "jaxext", arguments)
            result = _first(name, program, tell)
            difference, allowed = _difference(result.value, results[THEIRS].value, geometry.dtype)
            found[name] = f"differs from lax by {difference:.1e}, want at most {allowed:.1e}"
            if difference <= allowed:
                programs[name], results[name] = program, result
        except Exception as error:  # whatever XLA raises: the others are of interest all the same
            found[name] = f"{type(error).__name__}: {error}"[:200]
    return found | _sides(programs, results, samples, patience_s, tell)


def convs(geometry: Geometry) -> tuple[Conv, ...]:
    """The convolutions that `xla` plans for it; nothing is compiled."""
    arguments = [jax.ShapeDtypeStruct(shape, geometry.dtype) for shape in geometry.shapes]
    with active.collecting() as calls, jaxext.use_table(None):
        jax.jit(geometry.build("jaxext")).lower(*arguments)
    return tuple(XlaConv().plan(call).conv for call in calls)


def planned(geometry: Geometry, tell: Callable[[str], None] = lambda stage: None) -> tuple[str, ...]:
    """Return the algorithms that `xla` takes now, one for each product; nothing is compiled."""
    tell("jaxext: lowering")
    arguments = [jax.ShapeDtypeStruct(shape, geometry.dtype) for shape in geometry.shapes]
    with active.collecting() as calls, jaxext.use_table(None):
        jax.jit(geometry.build("jaxext")).lower(*arguments)
    return tuple(dict.fromkeys(_algorithms(call)[0] for call in calls))


def _table_of(calls: Sequence[Any], algorithm: str) -> Table:
    """A table in which this algorithm is the fastest for these calls."""
    measurement = Measurement(implementation="xla", config={"algorithm": algorithm}, ms=(1.0, 1.0, 1.0), error=0.0)
    return Table(active.context(environment.default_platform()), {call.problem: (measurement,) for call in calls}, "the sweep")


def serve(connection) -> None:
    """Serve measurements until the connection is closed: (what, arguments) -> ("done", result)."""
    keep_freed_memory()
    jax.config.update("jax_enable_compilation_cache", False)
    measure(Geometry(role="step", x=(1, 2, 2), w=(1, 2, 2)), "")  # the first program of a process takes longer to make
    asked = {"row": measure, "alternatives": alternatives, "planned": planned}
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        while True:
            what, arguments = connection.recv()
            connection.send(("done", asked[what](*arguments, tell=lambda stage: connection.send(("stage", stage)))))


def _algorithms(call) -> list[str]:
    """The algorithms of `xla`, the preferred one first."""
    return [*XlaConv().plan(call).found]
