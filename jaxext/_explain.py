"""`explain`: which products a function runs, and what would compute each of them, found by walking its jaxpr.  Nothing is run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxext import _tuned
from jaxext._compat import PLATFORMS
from jaxext._form import asked, owner
from jaxext._implementation import choose
from jaxext._target import compute_capability


@dataclasses.dataclass(frozen=True)
class Row:
    """One product: `times` counts the equal ones, and the steps of a scan around it."""

    op: str
    operands: tuple[str, ...]
    result: str
    times: int
    chosen: str | None
    how: str
    why: str  # it was chosen: it is preferred, was named, or was measured
    refused: dict[str, str]  # name -> reason
    problem: str | None  # what tables know it by; None where a size is symbolic

    @property
    def refusals(self) -> str:
        return "; ".join(f"{name}: {reason}" for name, reason in self.refused.items()) or "-"


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The rows, in the order of the program; `str` makes a table of them.

    An op is a form and a role: matmul_nn, matmul_nt and matmul_tn are a b, c bᵀ and aᵀ c; conv2d_fprop, conv2d_dgrad and conv2d_wgrad are
    a convolution and its gradients in the input and the filter.  Operands and result are named by slot (a, b, c, or input x, filter w,
    output y) in the order of the form: channels last, filters as output channels, space, input channels; groups are an axis before the
    channels.  `how` is the algorithm of the implementation, `why` it was taken: named, preferred, or measured (then the table in force says
    so, in the row of this `problem`; see `tune`); `refused` says why each other one was not.
    """

    platform: str
    rows: tuple[Row, ...]

    def __str__(self) -> str:
        head = ("op", "operands", "result", "times", "chosen", "how", "why", "refused")
        body = [(r.op, " ".join(r.operands), r.result, str(r.times), r.chosen or "nothing", r.how, r.why, r.refusals) for r in self.rows]
        widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (head, *body)]
        if not self.rows:
            return "no jaxext product (lax's own are not listed: see in_place_of_lax)"
        return "\n".join([f"products on {self.platform}: {len(self.rows)}", *lines])


def explain(fun: Callable, *args, platform: str | None = None, **kwargs) -> Explanation:
    """Every jaxext product that `fun(*args, **kwargs)` runs, with the implementation that computes it.

    Backward passes are seen where they are written: explain `jax.grad(loss)`.  Every branch of a `cond` counts.  The shapes are those of
    the program as written: per device inside a `shard_map`, global under `jit`, whose shardings XLA decides later.

    Args:
      fun: a function of arrays, or pytrees of them.
      *args, **kwargs: its arguments; `jax.ShapeDtypeStruct`s do.
      platform: "cpu", "cuda", "rocm" or "tpu"; that of the default backend if None.

    Returns:
      an `Explanation`: print it, or read its `rows`.
    """
    jaxpr = jax.make_jaxpr(fun)(*args, **kwargs)
    platform = jax.default_backend() if platform is None else platform
    platform = {"gpu": "cuda"}.get(platform, platform)
    if platform not in PLATFORMS:
        raise ValueError(f"explain: platform is {platform!r}, want one of {PLATFORMS} or None")
    rows: dict[tuple, Row] = {}
    for eqn, times in _products(jaxpr.jaxpr, 1):
        row = _row(eqn, platform)
        key = (row.op, row.operands, row.result, *sorted(eqn.params.items(), key=lambda item: item[0]))
        rows[key] = dataclasses.replace(row, times=times + (rows[key].times if key in rows else 0))
    return Explanation(platform, tuple(rows.values()))


def _row(eqn, platform: str) -> Row:
    form, open = owner[eqn.primitive]
    avals = [atom.aval for atom in eqn.invars]
    call = asked(form, open, avals, platform=platform, arch=compute_capability(platform), splitter="nobody", **eqn.params)
    measured = _tuned.measured(call)
    choice = choose(call, form.implementations, eqn.params["implementation"], measured)
    by_table = f", says {_tuned.in_force(platform).source}" if measured and choice.why.startswith("measured") else ""
    return Row(
        op=call.op,
        operands=tuple(map(_typed, form.operands(open), avals)),
        result=_typed(open, eqn.outvars[0].aval),
        times=1,
        chosen=choice.implementation.name if choice.implementation else None,
        how=choice.implementation.describe(call, choice.config) if choice.implementation else "",
        why=choice.why + by_table,
        refused=dict(choice.refusals),
        problem=call.problem,
    )


def _typed(slot: str, aval) -> str:
    """Such as "x:f32[8,3]"; the manual axes over which it varies, which jax adds in braces, are left out."""
    return f"{slot}:{aval.str_short(short_dtypes=True).partition('{')[0]}"


def _products(jaxpr: Jaxpr, times: int) -> Iterator:
    """Each equation of a form's primitive, and how often it runs as far as the program says (a scan's length; while counts as once)."""
    for eqn in jaxpr.eqns:
        if eqn.primitive in owner:
            yield eqn, times
        repeat = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        for inner in _jaxprs(tuple(eqn.params.values())):
            yield from _products(inner, times * repeat)


def _jaxprs(value) -> Iterator[Jaxpr]:
    if isinstance(value, ClosedJaxpr):
        yield value.jaxpr
    elif isinstance(value, Jaxpr):
        yield value
    elif isinstance(value, tuple | list):
        for inner in value:
            yield from _jaxprs(inner)
