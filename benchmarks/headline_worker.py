"""The process that measures headline rows (worker.py)."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxext
from jaxext.bench import cells
from jaxext.bench.bench_report import Failure, Measured
from jaxext.bench.case import Case
from jaxext.bench.targets import targets
from jaxext.tables import environment
from jaxext.tuning import random_operands, timing

from .headline_rows import WINDOWS, cases

TRUTH_S = 12  # to wait for a truth after the kernel ran: a row without one is better than none
REPEATS = 5


@dataclasses.dataclass(frozen=True)
class Hello:
    """The first words of a process that is ready: the fields of a report that depend on the device."""

    platform: str
    environment: Mapping[str, Any]
    timer: str
    not_cupti: str | None
    state: Mapping[str, str]


class Ahead:
    """Operands and truths of convolutions, computed on the CPU by a thread for each, while the GPU still works on the row before."""

    def __init__(self):
        self._of_operands, self._of_truths = (concurrent.futures.ThreadPoolExecutor(1) for _ in range(2))
        self._known: dict[str, tuple[concurrent.futures.Future, concurrent.futures.Future]] = {}

    def begin(self, cases: Sequence[Case]) -> None:
        """Compute these, and forget others."""
        known = {case.name: self._known.get(case.name) for case in cases if case.operation in WINDOWS}
        for name in self._known.keys() - known.keys():
            for future in self._known[name]:
                future.cancel()
        self._known = {case.name: known[case.name] or self._submitted(case) for case in cases if case.name in known}

    def _submitted(self, case: Case):
        operands = self._of_operands.submit(_on_cpu, random_operands.normal, case.shapes, case.dtypes)
        return operands, self._of_truths.submit(lambda: _on_cpu(_exact, case, operands.result()))

    def operands(self, case: Case) -> list[jax.Array]:
        return [jax.device_put(x) for x in self._known[case.name][0].result()]

    def truth(self, case: Case) -> Any:
        return self._known[case.name][1].result(TRUTH_S)


def _on_cpu(function: Callable, *arguments: Any) -> Any:
    """The result as numpy's arrays, so that no device is attached to it."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]), jaxext.use_table(None):
        return jax.tree.map(np.asarray, function(*arguments))


def _exact(case: Case, operands: Sequence[np.ndarray]) -> Any:
    """The right result.  Dense convolutions are sums of dots: with one or three axes XLA takes minutes on a CPU in float64."""
    if "dense" not in case.tags or not {"strided", "transposed", "batched-filters", "per-example"}.isdisjoint(case.tags):
        return cells.exact(case, operands)
    function = jax.jit(case.function(functools.partial(_sum_of_taps, **case.static)))
    return timing.truth(lambda real, precision: function(*(x.astype(real) for x in operands)))


def _sum_of_taps(x: jax.Array, w: jax.Array, *, padding: Any, rhs_dilation: Sequence[int], **static: Any) -> jax.Array:
    """The convolution of x (N, *space, C) with w (*filter, C, K), without strides."""
    x = jnp.pad(x, ((0, 0), *padding, (0, 0)))
    places = [n - (r - 1) * d for n, r, d in zip(x.shape[1:-1], w.shape[:-2], rhs_dilation, strict=True)]

    def term(tap: Sequence[int]) -> jax.Array:
        first = [i * d for i, d in zip(tap, rhs_dilation, strict=True)]
        last = [i + n for i, n in zip(first, places, strict=True)]
        return jnp.tensordot(lax.slice(x, (0, *first, 0), (x.shape[0], *last, x.shape[-1])), w[tuple(tap)], 1)

    return functools.reduce(jnp.add, map(term, np.ndindex(*w.shape[:-2])))


def serve(pipe: Any, is_trial: bool) -> None:
    """Answer requests until the pipe ends: `("ceiling", what)` and `("row", at, library, following, ceilings)`, with places in the list of
    cases.  An answer is a pair: what was found, and whether the device is lost."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this process
    chosen, ahead = cases(is_trial), Ahead()
    clock, why_not = timing.timer()
    pipe.send((Hello(environment.default_platform(), environment.report(), clock.name, why_not, cells.state()), False))
    while True:
        try:
            kind, *request = pipe.recv()
        except EOFError:
            return
        try:
            answer = _ceiling(request[0], clock, is_trial) if kind == "ceiling" else _row(chosen, request, clock, is_trial, ahead)
        except Exception as error:  # of operands that do not fit into the device's memory, say
            answer = Failure(" ".join(f"{type(error).__name__}: {error}".split())[:500])
        results = answer.results.values() if isinstance(answer, Measured) else [answer]
        pipe.send((answer, any(isinstance(result, Failure) for result in results) and cells.lost() is not None))


def _ceiling(what: str, clock: timing.Clock, is_trial: bool) -> float | None:
    return cells.ceilings([what], clock, is_trial, {} if what == "copy" else {"copy": 1.0}).get(what)


def _row(chosen: Sequence[Case], request: Sequence[Any], clock: timing.Clock, is_trial: bool, ahead: Ahead) -> Measured:
    at, library, following, ceilings = request
    case, arguments, truth = chosen[at], (), None
    ahead.begin([case, *([] if following is None else [chosen[following]])])
    if case.operation in WINDOWS:
        arguments, truth = ahead.operands(case), functools.partial(ahead.truth, case)
    how = cells.Bench([library], clock, 1 if is_trial else REPEATS, ceilings, brief=True)
    with jaxext.use_table(None):
        return cells.measure(case, targets(case, jax.default_backend()), how, arguments, truth)
