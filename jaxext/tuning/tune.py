"""`tune`: measures the implementations of each operation of a function, and stores the correct ones in a table.

The function and its gradient are lowered, and each `Call` that is looked up meanwhile is collected and measured (`trial`).
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxext._compat import without_stored_programs
from jaxext._messages import counted, format_value
from jaxext.core.call import Call
from jaxext.tables import active, environment, table_file
from jaxext.tuning import timing
from jaxext.tuning.tool import Tool
from jaxext.tuning.trial import Trial, measure, short

NOTHING = (
    "the function has no operation of jaxext, so nothing was measured: call one in it, such as jaxext.matmul, or tune it inside "
    "`with jaxext.in_place_of_lax():` (--in-place-of-lax on the command line), where lax's operations count"
)


@dataclasses.dataclass(frozen=True)
class Tuned:
    """The result of `tune`.  `str` formats it as a table, and `use_table` accepts it in place of its file `table`."""

    device: str
    timer: str
    table: pathlib.Path
    rows: tuple[Trial, ...]

    def __fspath__(self) -> str:
        return os.fspath(self.table)

    def __str__(self) -> str:
        if not self.rows:
            return NOTHING
        head = f"{counted(len(self.rows), 'operation')} on {self.device}, by {self.timer}: {self.table}"
        legend = ["*: the one that is taken; =: a tie with it, within the noise"] if any(row.winner for row in self.rows) else []
        return "\n\n".join([head, *map(str, self.rows), *legend])


def tune(
    fun: Callable,
    *,
    backward: bool = True,
    candidates: int = 8,
    tolerance: float | None = None,
    table: str | os.PathLike | None = None,
    progress: Callable[[Trial, int, int], None] | None = None,
) -> Callable[..., Tuned]:
    """Return a function of the arguments of `fun` that measures the implementations of its operations and stores the times in a table.

    The function itself is not run.  Its jaxext operations are run on random operands of the same shapes and dtypes, on the default device
    of this machine.  New measurements of an operation replace old ones.  Programs lowered later use the fastest correct candidate, which
    may be XLA's, or the preferred one if the ranges of their times overlap.  The default table takes effect in later processes, since a
    process reads it once.

    Args:
      fun: a function of arrays, or pytrees of them, of any shapes and dtypes.
      backward: whether to measure the operations of its gradient in all floating-point arguments as well.
      candidates: how many configs of each implementation to measure, those expected to be fastest first.  All of xla's are measured.
      tolerance: the largest relative error against float64, in the norm and of the largest element, for the random operands, with which an
        implementation is taken that is otherwise only taken by name, since its error is in the norm of the operands: "fft" of
        convolutions.  A float.  None: it is not measured.
      table: the file.  None is the default table, in the user's cache directory.
      progress: called after each operation with its `Trial`, the number of operations done, and the total.

    Returns:
      a function that takes the arguments of `fun`, or `jax.ShapeDtypeStruct`s in place of arrays, with their shardings, and returns a
      `Tuned`: print it, read its `rows`, whose times are in milliseconds, or pass it to `use_table`.  Leaves of the arguments that are no
      arrays are static.

    Examples:
      >>> x, w = jnp.ones((64, 32)), jnp.ones((32, 16))
      >>> tuned = tune(lambda x, w: jnp.tanh(jaxext.matmul(x, w)), table="tables.json")(x, w)
      >>> with jaxext.use_table(tuned):
      ...     print(jaxext.explain(jaxext.matmul)(x, w))

    Raises:
      RuntimeError: this run has several processes, or jax is tracing the caller.
      TypeError: `fun` is not callable.
      ValueError: `candidates` is less than 1, `tolerance` is no float between 0 and 1, or the file is not a table.
      OSError: the table cannot be written.
      Exception: any error that JAX raises if `fun` cannot be differentiated.

    Warns:
      UserWarning: a candidate's result is wrong, so it is not stored; measuring an operation failed, so it is left out; or the function has
        no jaxext operations.
    """
    if not isinstance(candidates, int) or candidates < 1:
        raise ValueError(f"tune: candidates is {format_value(candidates)}, want a whole number from 1 on")
    if tolerance is not None and not (isinstance(tolerance, float | np.floating) and 0 < tolerance < 1):
        raise ValueError(f"tune: tolerance is {format_value(tolerance)}, want a float between 0 and 1, or None")

    def tuned(fun, args, kwargs) -> Tuned:
        if (processes := jax.process_count()) > 1:
            raise RuntimeError(f"tune: this run has {processes} processes, want one: tune in it, and give all the same table (`use_table`)")
        if any(isinstance(x, Tracer) for x in [jnp.zeros(()), *jax.tree.leaves((args, kwargs))]):
            raise RuntimeError(
                "tune: jax is tracing the function that calls it (jit, grad, vmap, scan), so nothing can be timed: call it outside, with "
                "arrays or jax.ShapeDtypeStructs"
            )
        path = pathlib.Path(table_file.default_path() if table is None else table)
        table_file.check_writable(path)
        calls = {(call.problem or call.op, _unanswered(call)): call for call in _collected(fun, args, kwargs, backward)}
        if not calls:
            warnings.warn(f"tune: {NOTHING}", stacklevel=2)
        context, (clock, _) = active.context(environment.default_platform()), timing.timer()
        rows: list[Trial] = []
        for (problem, unanswered), call in calls.items():
            row = Trial(problem, skipped=unanswered) if unanswered else _measured(problem, call, candidates, clock, tolerance)
            if row.winner:
                table_file.write(path, context, {problem: row.measurements})
            if wrong := [str(c) for c in row.candidates if c.wrong]:
                warnings.warn(f"tune: wrong results of {problem}: {'; '.join(wrong)}", stacklevel=2)
            rows.append(row)
            if progress is not None:
                progress(row, len(rows), len(calls))
        return Tuned(context.device, clock.name, path, tuple(rows))

    return Tool("tune", fun, tuned)


def _measured(problem: str, call: Call, candidates: int, clock: timing.Clock, tolerance: float | None) -> Trial:
    """The trial of a call; one that fails leaves the others to be measured."""
    try:
        return measure(call, candidates, clock, tolerance)
    except Exception as error:  # of an implementation that plans, or of the definition in float64
        why = f"measuring it failed with {short(error)}"
        warnings.warn(f"tune: {problem} is not measured: {why}", stacklevel=3)
        return Trial(problem, skipped=why)


def _collected(fun, args, kwargs, backward) -> list[Call]:
    """Every call that is looked up while the function and its gradient are lowered."""
    # A new function, since jit caches programs by function.
    traced = [jax.jit(lambda *args, **kwargs: fun(*args, **kwargs)).trace(*args, **kwargs)]
    if backward:
        try:
            traced.append(jax.jit(with_gradient(fun)).trace(*args, **kwargs))
        except Exception as error:
            error.add_note("tune: the gradient raised this; with backward=False (--no-backward) the function alone is measured")
            raise
    with active.collecting() as calls:
        for program in traced:
            lowered = program.lower()
            if "CustomSPMDPartitioning" in lowered.as_text():  # then XLA looks up the calls when it compiles
                with without_stored_programs():  # a cached program would not be compiled
                    lowered.compile()
    return calls


def with_gradient(fun) -> Callable:
    """The function together with its pullback, for a cotangent equal to its result."""

    def both(*args, **kwargs):
        y, pullback = jax.vjp(lambda args, kwargs: fun(*args, **kwargs), args, kwargs)
        none = jax.dtypes.float0  # the dtype of cotangents of integers
        cotangents = jax.tree.map(lambda y: y if jnp.issubdtype(y.dtype, jnp.inexact) else np.zeros(y.shape, none), y)
        return y, [x for x in jax.tree.leaves(pullback(cotangents)) if x.dtype != none]

    return both


def _unanswered(call: Call) -> str | None:
    """Return the reason why the call cannot be measured on the default device, or None."""
    if reason := active.unanswered(call):
        return reason
    if call.platform != (platform := environment.default_platform()):
        return f"it is for another device than that of this process ({platform})"
    if call.operation is not None and call.operation.unmeasured:
        return call.operation.unmeasured
    return "an axis is empty, so nothing is computed" if 0 in call.sizes.values() else None
