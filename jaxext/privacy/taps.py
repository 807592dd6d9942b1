"""Runs a function of one example with a tap behind each operation in which a parameter meets the example.

A tap is the identity on the operation's results.  Backwards it sees their cotangents, and adds to the cotangent of a further input, a zero
that nothing reads, what the example contributes to the squared norm of the parameter's gradient.  All taps share this input, so its
gradient is the sum over all parameters: one backward pass that writes no gradient.  Everything is written for one example, and `vmap` and
`grad` do the rest.

The gradient of a parameter that meets the example several times is a sum whose terms are not orthogonal, so squared norms must not be
added.  Its taps add their gradients instead, to the cotangent of zeros with the shape of the parameter.

A parameter may go through other operations before it meets the example, together with constants and other parameters.  A value that is
computed from these alone is `Derived`, and remembers how, so that its gradient leads to theirs.  Other values depend on the example.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from jaxext._compat import evaluated, scan_counts, source_line
from jaxext.core.family import is_replaced
from jaxext.core.form import Form, owner
from jaxext.core.operation import Operation
from jaxext.lax.dispatch import in_place_of_lax
from jaxext.privacy.square_norms import Meeting, Way

# Operations of one operand whose result, as far as it depends on a parameter, has a gradient of the same norm.
SAME_NORM = {"reshape", "transpose", "squeeze", "expand_dims", "rev", "copy", "neg", "convert_element_type", "reduce_precision"}


@dataclasses.dataclass(frozen=True, eq=False)
class Leaf:
    """A parameter, or inside a scan a slice of what is computed from parameters.

    Attributes:
      root: the parameter's number.
      depth: of scans around the place where it becomes known: used deeper inside, it is used several times.
      zeros: if gradients are stored, the zeros whose cotangent they become.
    """

    value: Any
    root: int
    depth: int = 0
    zeros: Any = None


@dataclasses.dataclass(frozen=True, eq=False)
class Derived:
    """A value computed from leaves and constants alone: `eqn` of `operands` has it as one of its results.  Constants have no leaves."""

    value: Any
    leaves: frozenset[Leaf] = frozenset()
    eqn: JaxprEqn | None = None
    operands: tuple = ()
    position: int = 0
    same_norm: bool = False  # its gradient has the norm of the gradient of its only leaf

    @classmethod
    def of(cls, leaf: Leaf) -> Derived:
        return cls(leaf.value, frozenset([leaf]), None, (leaf,), same_norm=True)


def plain(x: Any) -> Any:
    return x.value if isinstance(x, Derived) else x


def has_leaves(x: Any) -> bool:
    return isinstance(x, Derived) and bool(x.leaves)


def leaves_of(derived: Sequence[Derived]) -> list[Leaf]:
    return sorted(frozenset[Leaf]().union(*(x.leaves for x in derived)), key=lambda leaf: leaf.root)


def recomputing(derived: Sequence[Derived], leaves: Sequence[Leaf]) -> Callable[..., list[Any]]:
    """A function of other values of some leaves, from which these values are computed.  The other leaves keep theirs."""

    def recompute(*values: Any) -> list[Any]:
        given = {leaf: leaf.value for leaf in leaves_of(derived)} | dict(zip(leaves, values, strict=True))
        known: dict = {}
        return [_recomputed(x, given, known) for x in derived]

    return recompute


def _recomputed(derived: Derived, given: Mapping[Leaf, Any], known: dict) -> Any:
    """`known` holds results so far."""
    if not derived.leaves:
        return derived.value
    if derived.eqn is None:
        return given[derived.operands[0]]
    key = id(derived.operands)
    if key not in known:
        known[key] = evaluated(derived.eqn, *(_recomputed(x, given, known) for x in derived.operands))
    return known[key][derived.position]


def tangents(derived: Sequence[Derived]) -> list[Any] | None:
    """The zeros of leaves, taken through the computation of the values: its transpose leads gradients back.  None if there are no zeros."""
    stored = [leaf for leaf in leaves_of(derived) if leaf.zeros is not None]
    if not stored:
        return None
    return jax.jvp(recomputing(derived, stored), [leaf.value for leaf in stored], [leaf.zeros for leaf in stored])[1]


@dataclasses.dataclass(frozen=True)
class Use:
    """An operation in which a parameter meets the example.  `times` is 2 or more if it does so repeatedly, as in the steps of a scan."""

    root: int
    op: str
    source: str
    way: Way | None
    times: int


@dataclasses.dataclass(frozen=True)
class Met:
    """A meeting with its operands and floating-point results.  The operands that no parameter is in, also constants, are `data`."""

    meeting: Meeting
    derived: list[Derived]
    data: list[Any]
    results: list[Any]

    @property
    def leaves(self) -> list[Leaf]:
        return leaves_of(self.derived)

    @property
    def example_data(self) -> list[Any]:
        return [x for x in self.data if not isinstance(x, Derived)]

    def again(self, parameters: Sequence[Any], example_data: Sequence[Any]) -> Sequence[Any]:
        """The results for other parameters and another example."""
        others = iter(example_data)
        data = [x.value if isinstance(x, Derived) else next(others) for x in self.data]
        values = recomputing(self.derived, self.leaves)(*(parameters[leaf.root] for leaf in self.leaves))
        return self.meeting.results(data, values)


class Taps:
    """Evaluates a jaxpr of one example.

    Attributes:
      total: the zero whose cotangent becomes the squared norm.
      stored: for the roots of parameters whose gradients are added up, the zeros whose cotangents they become.
      kept: for each meeting, zeros whose cotangents become those of its results; None: these are not wanted.
      uses: what it met so far.
      meetings: the same, once each, to be run again.
      nested: whether a scan or a checkpoint has some of them.
    """

    def __init__(self, total: jax.Array, stored: Mapping[int, Any], kept: Sequence[list] | None = None):
        self.total, self.stored, self.kept = total, stored, kept
        self.uses: list[Use] = []
        self.meetings: list[Met] = []
        self.nested = False
        self._depth = 0
        self._around: list[JaxprEqn] = []  # the innermost last

    def run(self, closed: ClosedJaxpr, parameters: Sequence[Any], example: Sequence[Any]) -> list[Any]:
        """The results for these arguments, with taps."""
        leaves = [Derived.of(Leaf(value, root, zeros=self.stored.get(root))) for root, value in enumerate(parameters)]
        results = self._evaluate(closed.jaxpr, map(Derived, closed.consts), [*leaves, *example])
        return [self._met(x) for x in results]

    def _evaluate(self, jaxpr: Jaxpr, consts, args) -> list[Any]:
        values: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
        for eqn in jaxpr.eqns:
            operands = [Derived(atom.val) if isinstance(atom, Literal) else values[atom] for atom in eqn.invars]
            values.update(zip(eqn.outvars, self._equation(eqn, operands), strict=True))
        return [Derived(atom.val) if isinstance(atom, Literal) else values[atom] for atom in jaxpr.outvars]

    def _equation(self, eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        name = eqn.primitive.name
        if not any(map(has_leaves, operands)):
            results = evaluated(eqn, *map(plain, operands))
            return [Derived(y) for y in results] if all(isinstance(x, Derived) for x in operands) else results
        if name in ("jit", "pjit"):
            return self._inside(eqn, eqn.params["jaxpr"], operands)
        if all(isinstance(x, Derived) for x in operands):
            return self._derived(eqn, operands)
        if is_replaced(eqn.primitive):
            with in_place_of_lax():
                closed = _traced(functools.partial(evaluated, eqn), operands)
            return self._inside(eqn, closed, operands)
        if isinstance(owner.get(eqn.primitive, (None,))[0], Operation):
            return self._inside(eqn, _traced(functools.partial(_composed, eqn), operands), operands)
        if name == "scan":
            return self._scan(eqn, operands)
        if name in ("checkpoint", "remat", "remat2"):
            return self._checkpoint(eqn, operands)
        return self._meeting(eqn, operands)

    def _inside(self, eqn, closed: ClosedJaxpr, operands) -> list[Any]:
        self._around.append(eqn)
        try:
            return self._evaluate(closed.jaxpr, map(Derived, closed.consts), operands)
        finally:
            self._around.pop()

    def _derived(self, eqn, operands) -> list[Derived]:
        results, shared = evaluated(eqn, *map(plain, operands)), tuple(operands)
        leaves = frozenset[Leaf]().union(*(x.leaves for x in operands))
        if eqn.primitive.name == "stop_gradient":
            leaves = frozenset[Leaf]()
        first, name = operands[0], eqn.primitive.name
        same_norm = first.same_norm and (name in SAME_NORM or (name == "broadcast_in_dim" and results[0].size == first.value.size))
        return [
            Derived(y, leaves, eqn, shared, i, same_norm and jnp.issubdtype(y.dtype, jnp.floating))
            if leaves and jnp.issubdtype(y.dtype, jnp.inexact)
            else Derived(y)  # an integer has no gradient
            for i, y in enumerate(results)
        ]

    def _meeting(self, eqn, operands) -> list[Any]:
        """An operation of parameters and the example, with its tap."""
        meeting = Meeting(eqn, tuple(map(has_leaves, operands)))
        results = evaluated(eqn, *map(plain, operands))
        return self._tapped(meeting, [x for x in operands if has_leaves(x)], [x for x in operands if not has_leaves(x)], results)

    def _met(self, x: Any) -> Any:
        """A value that from here on counts as one of the example."""
        return self._tapped(Meeting(None, (True,)), [x], [], [x.value])[0] if has_leaves(x) else plain(x)

    def _tapped(self, meeting: Meeting, derived: list[Derived], data: list[Any], results: list[Any]) -> list[Any]:
        leaves = leaves_of(derived)
        summed = [leaf for leaf in leaves if leaf.zeros is None]
        given = [leaf.value for leaf in summed]
        same_norm = len(derived) == 1 and derived[0].same_norm
        way = meeting.way(
            [*map(plain, data)],
            [x.value for x in derived],
            given,
            results,
            self.total.dtype,
            None if same_norm else jax.make_jaxpr(recomputing(derived, summed))(*given),
        )
        self.uses += [self._use(leaf, meeting.eqn, way) for leaf in leaves]
        zeros = tangents(derived)
        floats = [i for i, y in enumerate(results) if jnp.issubdtype(y.dtype, jnp.inexact)]
        kept = None if self.kept is None else self.kept[len(self.meetings)]
        self.meetings.append(Met(meeting, derived, data, [results[i] for i in floats]))
        tapped = way.tap([results[i] for i in floats], self.total, zeros, kept, summed=bool(summed))
        return [tapped[floats.index(i)] if i in floats else y for i, y in enumerate(results)]

    def _use(self, leaf: Leaf, eqn: JaxprEqn | None, way: Way) -> Use:
        around = [*([] if eqn is None else [eqn]), *reversed(self._around)]
        products = [each for each in around if is_replaced(each.primitive)] or around
        name = products[0].primitive.name if products else "result"
        return Use(leaf.root, name, source_line(around) if around else "", way, 2 if leaf.depth < self._depth else 1)

    def _checkpoint(self, eqn, operands) -> list[Any]:
        self.nested = True
        met = [x for x in operands if not isinstance(x, Derived)]

        def inner(*values):
            rest = iter(values)
            args = [x if isinstance(x, Derived) else next(rest) for x in operands]
            return [self._met(y) for y in self._inside(eqn, ClosedJaxpr(eqn.params["jaxpr"], ()), args)]

        how = {name: eqn.params[name] for name in ("prevent_cse", "policy")}
        return jax.checkpoint(inner, **how)(*met)

    def _scan(self, eqn, operands) -> list[Any]:
        """A parameter that is scanned over is a leaf for each step.  One that all steps read is used as often."""
        self.nested, params = True, eqn.params
        consts, carried = scan_counts(params)
        carried += consts
        init = [self._met(x) for x in operands[consts:carried]]
        scanned = operands[carried:]
        zeros = [self._zeros_of(x) if has_leaves(x) else None for x in scanned]

        def slice_of(x: Any, value: Any, zero: Any) -> Any:
            if not isinstance(x, Derived):
                return value
            if not x.leaves:
                return Derived(value)
            root = min(leaf.root for leaf in x.leaves)  # if there are several, gradients of all of them are stored, so any will do
            return Derived.of(Leaf(value, root, self._depth, zero))

        def step(carry, slices):
            values, zeros = slices
            args = [*operands[:consts], *carry, *map(slice_of, scanned, values, zeros)]
            results = [self._met(y) for y in self._inside(eqn, params["jaxpr"], args)]
            return results[: len(init)], results[len(init) :]

        repeats = params["length"] != 1
        self._depth += repeats
        try:
            how = {name: params[name] for name in ("reverse", "length", "unroll")}
            carry, ys = jax.lax.scan(step, init, ([plain(x) for x in scanned], zeros), **how)
        finally:
            self._depth -= repeats
        return [*carry, *ys]

    def _zeros_of(self, x: Derived) -> Any:
        """Return the zeros of what is scanned over.  Only the slices of a whole parameter have gradients whose squared norms add up."""
        leaves = leaves_of([x])
        is_parameter = x.same_norm and all(leaf.zeros is None and leaf.depth == self._depth for leaf in leaves)
        if not is_parameter:
            self.uses += [Use(leaf.root, "scan", "", None, 2) for leaf in leaves]
        found = tangents([x])
        return None if found is None else found[0]


def _traced(function: Callable, operands: Sequence[Any]) -> ClosedJaxpr:
    return jax.make_jaxpr(function)(*(plain(x) for x in operands))


def _composed(eqn: JaxprEqn, *operands: Any) -> list[Any]:
    """The results of an operation by its composition, in which products are unfused."""
    operation, _ = owner[eqn.primitive]
    results = operation.composition(operation, Form.bind, dict(zip(operation.inputs, operands, strict=True)), eqn.params["static"])
    return [results[name] for name in eqn.params["wanted"]]


def used_often(uses: Sequence[Use]) -> set[int]:
    """The roots of the parameters that are used more than once."""
    counts: dict[int, int] = {}
    for use in uses:
        counts[use.root] = counts.get(use.root, 0) + use.times
    return {root for root, count in counts.items() if count > 1}
