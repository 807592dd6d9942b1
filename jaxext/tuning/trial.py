"""Measures the candidates for one call: each is compiled, compared with the truth, and timed in turn with the others.

The truth is the same product in float64, with the same random operands.  A candidate that is wrong or fails is left out with the reason
and is not timed, so it cannot win.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxext._compat import Partitioner
from jaxext.core.call import Call
from jaxext.core.choose import choose, described, faster
from jaxext.core.form import form_of
from jaxext.core.implementation import Plan
from jaxext.tables.table_format import Measurement
from jaxext.tuning import random_operands, timing, truth

REPEATS = 15  # samples of each candidate that passes the first round
PATIENCE_S = 10  # seconds for the samples of one call
HOPELESS = 2  # candidates this many times slower than the best in the first round are dropped


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An implementation with one of its configs, and its measurement.  `left_out` says why `ms` is None."""

    implementation: str
    config: Mapping[str, Any]
    error: tuple[float, float] | None = None  # relative, against float64: in the norm, and the worst element over the largest element
    ms: tuple[float, float, float] | None = None  # quartiles of milliseconds per call
    left_out: str | None = None
    wrong: bool = False
    ties: bool = False  # with the winner: the ranges of their times overlap

    @property
    def name(self) -> str:
        return described(self.implementation, self.config)

    @property
    def measurement(self) -> Measurement | None:
        if self.ms is None or self.error is None:
            return None
        return Measurement(implementation=self.implementation, config=self.config, ms=self.ms, error=self.error[0])

    def __str__(self) -> str:
        if (m := self.measurement) is None:
            return f"{self.name}: {self.left_out}"
        return f"{self.name}: {m.ms[1]:.4g} ms ({m.ms[0]:.4g} to {m.ms[2]:.4g}), error {m.error:.1e}"


@dataclasses.dataclass(frozen=True)
class Trial:
    """One product: its preferred candidate without measurements, the candidates measured, and the winner."""

    problem: str
    preferred: str = ""
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)  # implementation -> reason
    candidates: tuple[Candidate, ...] = ()  # the first is xla's preferred one
    winner: Candidate | None = None
    skipped: str | None = None  # why there is no winner, and nothing in the table

    @property
    def measurements(self) -> list[Measurement]:
        return _measurements(self.candidates)

    @property
    def gain(self) -> float | None:
        """The speedup of the winner over xla's preferred candidate."""
        if self.winner is None or self.winner.ms is None or self.candidates[0].ms is None:
            return None
        return self.candidates[0].ms[1] / self.winner.ms[1]

    def __str__(self) -> str:
        verdict = f"not measured: {self.skipped}"
        if self.winner is not None:
            against = "" if self.winner is self.candidates[0] else f": {self.gain:.2f}x as fast as {self.candidates[0].name}"
            preferred = ", as preferred" if self.winner.name == self.preferred else f" (preferred: {self.preferred})"
            verdict = f"{self.winner.name}{against}{preferred}"
        candidates = [f"  {'*' if c is self.winner else '=' if c.ties else ' '} {c}" for c in self.candidates]
        return "\n".join([self.problem, f"  {verdict}", *candidates, *(f"    {name}: {why}" for name, why in self.refused.items())])


def _measurements(candidates: Iterable[Candidate]) -> list[Measurement]:
    return [c.measurement for c in candidates if c.measurement is not None]


def measure(call: Call, most: int, clock: timing.Clock, tolerance: float | None = None) -> Trial:
    """Try the candidates of a call, at most `most` configs of each kernel implementation, and those with errors in the norm within the
    tolerance."""
    of = call.operation or form_of(call)
    assert of is not None  # the call is of one or the other
    implementations = of.family.implementations
    call = dataclasses.replace(call, partitioner=Partitioner.NOBODY)  # the call is one device's part

    def taken(candidates: Iterable[Candidate]) -> str:
        choice = choose(call, implementations, None, _measurements(candidates))
        assert choice.implementation is not None  # xla plans all
        return described(choice.implementation, dataclasses.asdict(choice.config))

    *kernels, xla = implementations
    plans: dict[str, Any] = {each.name: each.planned(call) for each in (xla, *kernels)}
    refused = {name: why for name, plan in plans.items() if (why := _untried(plan, tolerance))}
    assert call.problem is not None
    row = Trial(call.problem, taken(()), refused)
    found: list[Candidate] = []
    runs: dict[str, tuple[timing.Program, timing.Sampler]] = {}
    try:
        operands = random_operands.of(call)
        right = timing.truth(lambda real, precision: truth.of(call, xla, operands, real=real, precision=precision)[0])
        for plan in (plan for name, plan in plans.items() if name not in refused):
            for config in plan.configs[: None if plan.implementation is xla else most]:
                candidate, run = _tried(plan, config, operands, right, clock, found[0].error if found else None, tolerance)
                found.append(candidate)
                if run is not None:
                    runs[candidate.name] = run
                elif candidate is found[0]:
                    return dataclasses.replace(row, candidates=(candidate,), skipped="xla has no time to compare with")
        found = _timed(found, {name: sampler for name, (_, sampler) in runs.items()})
        if isinstance(clock, timing.Cupti):
            found = _confirmed(found, {name: program for name, (program, _) in runs.items()}, taken)
    except RuntimeError as error:  # of the device, such as too little memory for the truth, or of CUPTI
        return dataclasses.replace(row, candidates=tuple(found), skipped=short(error))
    name = taken(found)
    winner = next(c for c in found if c.name == name)
    won = winner.measurement
    ties = {c.name for c in found if (m := c.measurement) and won and c.name != name and not faster(m, won) and not faster(won, m)}
    candidates = tuple(dataclasses.replace(c, ties=True) if c.name in ties else c for c in found)
    return dataclasses.replace(row, candidates=candidates, winner=winner)


def _untried(plan: Plan | str, tolerance: float | None) -> str | None:
    """Return the reason why no candidate of a plan is tried, or None."""
    if isinstance(plan, str):
        return plan
    return None if plan.in_the_norm and tolerance is not None else plan.only_if_named


def _tried(
    plan: Plan, config: Any, operands, right, clock, xla_error, tolerance
) -> tuple[Candidate, tuple[timing.Program, timing.Sampler] | None]:
    """The candidate with its error, its program and its sampler; or with the reason why it is wrong or cannot be compiled, run or timed."""
    call, candidate = plan.call, Candidate(plan.implementation.name, dataclasses.asdict(config))
    try:
        program = timing.compile(truth.alone(plan, config), operands)
        random_operands.poison([jax.ShapeDtypeStruct(call.shape_of(name), dtype) for name, dtype in call.results.items()])
        error = timing.relative_error(program(), right)
        candidate, limits = dataclasses.replace(candidate, error=error), _allowed(call, xla_error or error)
        limits = [tolerance] * 2 if plan.only_if_named and tolerance else limits
        if not all(each <= limit for each, limit in zip(error, limits, strict=True)):  # NaN is not
            errors, most = (" and ".join(f"{x:.1e}" for x in pair) for pair in (error, limits))
            return dataclasses.replace(candidate, wrong=True, left_out=f"its errors are {errors}, want at most {most}"), None
        sampler = clock.sampler(program)
        sampler()
        return candidate, (program, sampler)
    except Exception as error:  # compilers and launches raise many types
        return dataclasses.replace(candidate, left_out=short(error)), None


def short(error: Exception) -> str:
    """The type and the first line of an error."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"


# A candidate's error may be _AS_XLA times that of xla, which counts as at most _MOST_OF_XLA: a larger error is not rounding.
_AS_XLA, _MOST_OF_XLA = 4, 1 / 64


def _allowed(call: Call, xla_error: tuple[float, float]) -> list[float]:
    """The largest errors that rounding explains."""
    rounding = timing.law((*call.dtypes.values(), call.dtype), call.precision, call.platform)
    most = max(_MOST_OF_XLA, float(jnp.finfo(call.dtype).eps)) if rounding else 0
    return [max(rounding, _AS_XLA * min(error, most)) if rounding else 0 for error in xla_error]


def _timed(candidates: Sequence[Candidate], samplers: Mapping[str, timing.Sampler]) -> list[Candidate]:
    """The candidates with their times.  A first round keeps those that may win, and the best of each implementation, for calls by name."""
    quick = {name: statistics.median(ms) for name, ms in timing.take(samplers, timing.LEAST_SAMPLES, PATIENCE_S).items()}
    best = {c.implementation: c.name for c in sorted((c for c in candidates if c.name in quick), key=lambda c: -quick[c.name])}
    limit = HOPELESS * min(quick.values())
    kept = {name: s for name, s in samplers.items() if quick[name] <= limit or name in (candidates[0].name, *best.values())}
    ms = {name: timing.quartiles(samples) for name, samples in timing.take(kept, REPEATS, PATIENCE_S).items()}
    slow = {name: f"{time:.4g} ms in the first round, too slow for more" for name, time in quick.items() if name not in ms}
    return [dataclasses.replace(c, ms=ms.get(c.name), left_out=c.left_out or slow.get(c.name)) for c in candidates]


def _confirmed(
    candidates: Sequence[Candidate], programs: Mapping[str, timing.Program], taken: Callable[[Iterable[Candidate]], str]
) -> list[Candidate]:
    """The candidates without kernels that win only by CUPTI's times, which exclude copies and memsets.

    The candidate that is taken must not be slower than xla by the wall time of a chain either, beyond the noise.
    """
    found = {candidate.name: candidate for candidate in candidates}
    _, xla = min((c.ms[1], c.name) for c in candidates if c.ms is not None and c.implementation == "xla")
    while (best := found[taken(found.values())]).implementation != "xla":
        try:
            chains = {name: timing.Chain().sampler(programs[name]) for name in (xla, best.name)}
            theirs, ours = map(timing.quartiles, timing.take(chains, REPEATS, PATIENCE_S).values())
            if ours[0] <= theirs[2]:
                break
            why = f"slower than {xla} if copies and memsets count: {ours[1]:.4g} ms of wall time, want at most {theirs[1]:.4g} ms"
        except Exception as error:  # such as too little memory
            why = f"wall time could not be measured: {short(error)}"
        found[best.name] = dataclasses.replace(best, ms=None, left_out=why)
    return list(found.values())
