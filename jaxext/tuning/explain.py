"""`explain`: lists the operations of a function and the implementation chosen for each, by walking its jaxpr.  Nothing is run."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jaxext._compat import PLATFORMS, Partitioner
from jaxext._messages import aligned, counted, format_value
from jaxext._target import compute_capability
from jaxext.core.call import Call, precision_name
from jaxext.core.choose import Choice, choose, planned
from jaxext.core.form import Form, owner
from jaxext.core.invariant import Invariant
from jaxext.core.window import Window
from jaxext.tables import active
from jaxext.tables.table_format import Measurement
from jaxext.tuning.tool import Tool
from jaxext.tuning.walk import Step, jaxprs_in, walk

NOTHING = "no operation of jaxext (lax's own are listed inside jaxext.in_place_of_lax(), or with --in-place-of-lax on the command line)"
EXPECTED = "expected milliseconds to run + to compile, for each algorithm of xla; if none was measured, the first is taken:"
WIDTH = 120  # columns, beyond which details are folded
# The algorithms of `xla` that are lax's own operation, or do not differ in what they compute; and those that lax has no operation for.
AS_LAX, COMPOSED = ("lax", "dot_general", "expanded", "dense", "zeros"), ("composition", "reference")
JITS = ("jit", "pjit")  # what jax calls it, by version
RESHAPES = ("reshape", "broadcast_in_dim", "squeeze", "reduce_sum")  # by which programs and derivatives add and remove sizes of 1


@dataclasses.dataclass(frozen=True)
class Explained:
    """One operation and the choice of its implementation."""

    op: str
    operands: tuple[str, ...]
    results: tuple[str, ...]  # one, or those of an operation with several, and what it saves for its derivative
    window: Window | None  # of a convolution: sizes, stride, padding and dilations for each spatial axis
    layout: str  # of operands and results, as the program stores them
    shapes: tuple[str, ...]  # likewise, of the results last
    precision: str  # of the call or of `jax.default_matmul_precision`: "highest", or "default,highest" if the factors have two
    multiplies: str  # in how many bits factors are multiplied, such as "TF32: 11 bits"; empty if these are all that they have, or unknown
    expected: tuple[str, ...]  # costs of the implementation's algorithms, if it expects some, the first being that of its own choice
    times: int  # counts equal operations, and the steps of a scan around them
    chosen: str | None  # the implementation
    how: str  # its algorithm with its parts, such as "phases of lax", or "composition of dot_general" of an operation that no kernel fuses
    why: str  # it was chosen: preferred, named, or measured in the row of this `problem` in the active table (see `tune`)
    table: str | None  # the table with the measurement
    refused: dict[str, str]  # every other implementation -> the reason why it was not chosen
    problem: str | None  # its key in tables; None if a size is symbolic

    @property
    def as_lax(self) -> bool:
        """True if lax's own operation computes it, or one that does not differ in what it computes."""
        return self.chosen == "xla" and self.how.partition(" ")[0] in AS_LAX


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The operations of a function, in program order.

    `str` formats them as a table of two lines per operation, of `shapes`, with reasons and a summary below it.

    An op is a form and a role: matmul_nn, matmul_nt and matmul_tn are a b, c bᵀ and aᵀ c; conv2d_fprop, conv2d_dgrad and conv2d_wgrad
    are a convolution and its gradients in the input and the filter.  Operands and results are named by slot (a, b, c, or input x, filter
    w, output y).  Their axes have the order of the form: channels last; filters as output channels, space, input channels; groups as an
    axis before the channels.  `shapes` and `layout` are the shapes and the order of axes in the program, before the transposes of the
    operands and after those of the results; of equal operations with several layouts, the shapes of the first.
    """

    platform: str
    rows: tuple[Explained, ...]

    def __str__(self) -> str:
        if not self.rows:
            return NOTHING
        cells = [("op", "times", "by", "operands", "result")]
        for row in self.rows:
            by = f"{row.chosen or 'nothing'} {row.how}".strip() if row.how != row.chosen else row.how
            stored = len(row.operands)
            cells.append((row.op, str(row.times), by, " ".join(row.shapes[:stored]), " ".join(row.shapes[stored:])))
        title, *lines = aligned(cells)
        reasons = {reason: i for i, reason in enumerate(dict.fromkeys(item for row in self.rows for item in row.refused.items()), 1)}
        details = [_folded("; ".join(_details(row, reasons)), "  ", "  ") for row in self.rows]
        legend = [f"[{i}] {name}: {reason}" for (name, reason), i in reasons.items()]
        legend += [f"measured: {table}" for table in dict.fromkeys(row.table for row in self.rows if row.table)]
        table = [line for pair in zip(lines, details, strict=True) for line in pair]
        several = [row for row in self.rows if len(row.expected) > 1]
        expected = dict.fromkeys(f"  {row.op} {' '.join(row.shapes[: len(row.operands)])}: {', '.join(row.expected)}" for row in several)
        legend += [EXPECTED, *expected] if expected else []
        if any(len({*axes}) < len(axes) for row in self.rows for axes in row.layout.split()):
            legend += ["a letter twice in a layout, as in NNHWC: an axis that vmap added, or several axes of one kind"]
        if len(self.rows) > 1:
            counts = collections.Counter(how for row in self.rows for how in itertools.repeat(_computed(row), row.times))
            legend += [f"{counted(counts.total(), 'call')}: {', '.join(f'{count} {how}' for how, count in sorted(counts.items()))}"]
        below = [_folded(line, "", "    ") for line in legend]
        return "\n".join([f"{counted(len(self.rows), 'operation')} on {self.platform}", title, *table, *([""] if below else []), *below])


def _folded(text: str, first: str, others: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=others, break_long_words=False, break_on_hyphens=False)


def _computed(row: Explained) -> str:
    """Return how an operation is computed, for the summary."""
    if row.chosen != "xla":
        return f"by {row.chosen or 'nothing'}"
    if row.how.partition(" ")[0] in COMPOSED:
        return "composed"
    return "as lax" if row.as_lax else "rewritten"


def _details(row: Explained, reasons: dict[tuple[str, str], int]) -> Iterator[str]:
    if row.window is not None:
        yield geometry(row.window)
    yield f"layout {row.layout}"
    yield f"precision {row.precision}" + (f" ({row.multiplies})" if row.multiplies else "")
    refused = " ".join(f"{name}[{reasons[name, reason]}]" for name, reason in row.refused.items())
    yield ", ".join(filter(None, [row.why, refused and f"not {refused}"]))


def geometry(window: Window) -> str:
    """Return a text such as "stride 2, padding 0:1, dilation 2": one number if all axes are alike, else one per axis.  Values without
    effect are omitted, except the stride."""
    parts = []
    for name, per_axis, no_effect in (
        ("stride", window.stride, None),
        ("padding", window.padding, (0, 0)),
        ("dilation", window.filter_dilation, 1),
        ("input dilation", window.input_dilation, 1),
    ):
        if any(n != no_effect for n in per_axis):
            each = [str(n) if not isinstance(n, tuple) else str(n[0]) if n[0] == n[1] else f"{n[0]}:{n[1]}" for n in per_axis]
            parts.append(f"{name} {each[0] if len({*each}) == 1 else ('/' if name == 'padding' else 'x').join(each)}")
    return ", ".join(parts)


def explain(fun: Callable, *, platform: str | None = None) -> Callable[..., Explanation]:
    """Return a function of the arguments of `fun` that lists its jaxext operations, with the implementation that computes each.

    It traces `fun` and runs nothing.  To see a backward pass, explain `jax.grad(loss)`.  Every branch of a `cond` counts.  Shapes are those
    of the program as written: per device inside a `shard_map`, global under `jit`, where XLA decides the shardings later.

    Args:
      fun: a function of arrays, or pytrees of them, of any shapes and dtypes.
      platform: "cpu", "cuda", "rocm" or "tpu".  None is the platform of the default backend.

    Returns:
      a function that takes the arguments of `fun`, or `jax.ShapeDtypeStruct`s in place of arrays, and returns an `Explanation`: print it,
      or read its `rows`.  Leaves of the arguments that are no
      arrays, such as strides, are static.  Times that are estimated are in milliseconds.

    Examples:
      >>> (row,) = explain(jaxext.matmul, platform="cpu")(jnp.ones((2, 3)), jnp.ones((3, 4))).rows
      >>> row.op, row.operands, row.results, row.chosen
      ('matmul_nn', ('a:f32[2,3]', 'b:f32[3,4]'), ('c:f32[2,4]',), 'xla')

    Raises:
      TypeError: `fun` is not callable.
      ValueError: `platform` is unknown.
    """
    platform = known_platform("explain", platform)

    def explained(fun, args, kwargs) -> Explanation:
        rows: dict[tuple, Explained] = {}
        for eqn, stored, times in _operations(jax.make_jaxpr(fun)(*args, **kwargs).jaxpr):
            row = _row(eqn, stored, platform)
            key = (row.op, row.operands, row.results, *eqn.params.values())
            if (equal := rows.get(key)) is not None:
                layouts = dict.fromkeys([*equal.layout.split(" or "), row.layout])
                row = dataclasses.replace(equal, layout=" or ".join(layouts))
            rows[key] = dataclasses.replace(row, times=times + (equal.times if equal else 0))
        return Explanation(platform, tuple(rows.values()))

    return Tool("explain", fun, explained)


def known_platform(asked_by: str, platform: str | None) -> str:
    """The platform as XLA names it; None is that of the default backend."""
    platform = jax.default_backend() if platform is None else platform
    if not isinstance(platform, str) or (platform := {"gpu": "cuda"}.get(platform, platform)) not in PLATFORMS:
        raise ValueError(f"{asked_by}: platform is {format_value(platform)}, want one of {PLATFORMS} or None")
    return platform


def call_of(eqn: JaxprEqn, platform: str) -> Call:
    """The call of an operation's equation, as one device would make it."""
    form, open = owner[eqn.primitive]
    avals = [atom.aval for atom in eqn.invars]
    return form.call(open, avals, platform=platform, arch=compute_capability(platform), partitioner=Partitioner.NOBODY, **eqn.params)


def chosen(eqn: JaxprEqn, platform: str) -> tuple[Call, Sequence[Measurement], Choice]:
    """The call of an operation's equation, as one device would make it, what was measured of it, and the choice."""
    form, _ = owner[eqn.primitive]
    call = call_of(eqn, platform)
    named = eqn.params["static"].implementation
    name, part = planned(call, named)
    measured = () if part else active.measured(call)
    choice = choose(part or call, form.family.implementations, name, measured)
    if isinstance(named, Invariant):
        choice = dataclasses.replace(choice, why=f"{choice.why}, {_invariant(call, part)}")
    return call, measured, choice


def _invariant(call: Call, part: Call | None) -> str:
    if part is None or call.rows is None:
        return "not bitwise identical in other batches, since it has no rows"
    return f"bitwise identical in every batch, as for {part.sizes[call.rows[1]]} {'rows' if call.window is None else 'images'}"


def _row(eqn, stored: dict[str, tuple[str, Any]], platform: str) -> Explained:
    form, open = owner[eqn.primitive]
    avals = [atom.aval for atom in eqn.invars]
    call, measured, choice = chosen(eqn, platform)
    return Explained(
        op=call.op,
        operands=tuple(map(_typed, form.operands(open), avals)),
        results=tuple(_typed(slot, x.aval) for slot, x in _results(eqn).items()),
        window=call.window,
        layout=" ".join(layout for layout, _ in stored.values()),
        shapes=tuple(_typed(slot, aval) for slot, (_, aval) in stored.items()),
        precision=",".join(dict.fromkeys(precision_name(call.precision).split(","))),
        multiplies=choice.plan.multiplies() if choice.plan else "",
        expected=tuple(choice.plan.implementation.expected(choice.plan.call)) if choice.plan else (),
        times=1,
        chosen=choice.implementation,
        how=choice.plan.describe(choice.config) if choice.plan else "",
        why=choice.why,
        table=active.active_on(platform).source if measured and choice.why.startswith("measured") else None,
        refused=dict(choice.refusals),
        problem=call.problem,
    )


def _typed(slot: str, aval) -> str:
    """Return a type such as "x:f32[8,3]", without the varying manual axes that jax appends in braces."""
    return f"{slot}:{aval.str_short(short_dtypes=True).partition('{')[0]}"


def _results(eqn: JaxprEqn) -> dict[str, Any]:
    """The results by slot."""
    _, open = owner[eqn.primitive]
    return dict(zip(eqn.params.get("wanted", (open,)), eqn.outvars, strict=True))


def _operations(jaxpr: Jaxpr) -> Iterator[tuple]:
    """Each equation of a form's primitive, its arrays as the program stores them, and how often it runs."""
    program = Stored()
    for step in walk(jaxpr):
        if step.eqn.primitive in owner and not step.left:
            yield step.eqn, program.arrays(step), step.times


class Stored:
    """The arrays of operations as the program stores them.

    A form has a fixed order of axes.  The call adds transposes around it, reshapes that split channels into groups, and axes of size 1.
    They are followed backwards from the operands and forwards from the result, also into and out of `jit`.  Axes get the letters of `lax`'s
    dimension numbers, such as NHWC and HWIO.  An axis added by `vmap` repeats the letter of its label.
    """

    def __init__(self):
        self._neighbours: dict[Jaxpr, tuple[dict, dict]] = {}

    def arrays(self, step: Step) -> dict[str, tuple[str, Any]]:
        """The layout and the type, by slot: of the operands and, last, of the results."""
        form, open = owner[step.eqn.primitive]
        results = _results(step.eqn)
        found = {}
        for slot, x in (dict(zip(form.operands(open), step.eqn.invars, strict=False)) | results).items():
            axes, aval = self._beyond(x, form.axes(slot, step.eqn.params["static"].ranks), form.family.groups, slot in results, step)
            found[slot] = _letters(form, slot, axes), aval
        return found

    def types(self, step: Step) -> tuple[str, ...]:
        """Return the types, such as "x:f32[8,3]", in the order of `arrays`."""
        return tuple(_typed(slot, aval) for slot, (_, aval) in self.arrays(step).items())

    def _beyond(self, x, axes: Sequence[str], groups: str, forwards: bool, step: Step) -> tuple[Sequence[str], Any]:
        """The axes and the type of an array beyond the transposes and reshapes around an operation, but not in the `jit` of another."""
        jaxpr, around = step.jaxpr, [*zip(step.within, step.outer, strict=True)]
        depth, found = len(around), (axes, x.aval)
        while not isinstance(x, Literal):
            if len(around) <= depth:
                depth, found = len(around), (axes, x.aval)
            eqns, border = self._of(jaxpr)[forwards].get(x, ()), jaxpr.outvars if forwards else jaxpr.invars
            if not eqns and x in border and around and around[-1][0].primitive.name in JITS:
                eqn, jaxpr = around.pop()
                x = (eqn.outvars if forwards else eqn.invars)[border.index(x)]
                continue
            if len(eqns) != 1 or not eqns[0].outvars:  # such as a callback
                break
            (eqn,) = eqns
            if eqn.primitive.name in JITS:
                around.append((eqn, jaxpr))
                (jaxpr,) = jaxprs_in(eqn)
                x = jaxpr.invars[eqn.invars.index(x)] if forwards else jaxpr.outvars[eqn.outvars.index(x)]
                continue
            beyond: Any = eqn.outvars[0] if forwards else eqn.invars[0]
            aval: Any = x.aval
            if eqn.primitive.name == "transpose":
                order = eqn.params["permutation"]
                axes = [axes[int(i)] for i in (order if forwards else np.argsort(order))]
            elif eqn.primitive.name == "reshape" and (merged := _merged(groups, axes, aval.shape, beyond.aval.shape)):
                axes = merged
            elif eqn.primitive.name in RESHAPES and (kept := _without_ones(aval.shape, beyond.aval.shape)):
                axes = [axes[i] for i in kept]
            else:
                break
            x = beyond
        return found

    def _of(self, jaxpr: Jaxpr) -> tuple[dict[Any, list[JaxprEqn]], dict[Any, list[JaxprEqn]]]:
        """The equation that makes each variable of a jaxpr, and those that take it."""
        if jaxpr not in self._neighbours:
            takers = collections.defaultdict(list)
            for eqn in jaxpr.eqns:
                for atom in eqn.invars:
                    if not isinstance(atom, Literal):
                        takers[atom].append(eqn)
            self._neighbours[jaxpr] = {var: [eqn] for eqn in jaxpr.eqns for var in eqn.outvars}, takers
        return self._neighbours[jaxpr]


def _without_ones(shape: Sequence[int], beyond: Sequence[int]) -> Sequence[int]:
    """The axes of a shape that are left in another one which lacks some of its sizes of 1; empty if the shapes do not match that."""
    every = range(len(shape))
    subsets = itertools.combinations(every, len(beyond))
    fitting = (kept for kept in subsets if [shape[i] for i in kept] == [*beyond] and all(i in kept or shape[i] == 1 for i in every))
    return max(fitting, default=())  # the last axes, where several subsets do


def _merged(groups: str, axes: Sequence[str], split: Sequence[int], shape: Sequence[int]) -> tuple[str, ...] | None:
    """The axes with a group axis merged into its neighbour, or None if the shapes do not match that."""
    for i, axis in enumerate(axes[:-1]):
        if axis[0] in groups and tuple(shape) == (*split[:i], split[i] * split[i + 1], *split[i + 2 :]):
            return *axes[:i], *axes[i + 1 :]
    return None


def _letters(form: Form, slot: str, axes: Sequence[str]) -> str:
    """The axes as letters, without numbers.  Window axes use the input's letters, and channels the family's."""
    rank = len(form.window) // 3
    spatial = {label: form.window[i % rank] for i, label in enumerate(form.window)}
    channels = form.family.axis_names.get(slot, {})
    letters = [spatial.get(axis, axis).rstrip("0123456789") for axis in axes]
    return "".join(channels.get(letter, letter) for letter in letters)
