"""Finds where a reference couples the elements of a label: by a sum, a sort or a cumulative sum over its axis, or by their positions.

The axis is followed through the program, from the operands to the results.  A dependence that is found is there, but may cancel: then
the label is declared `independent`.  Where the axis cannot be followed (a gather, a loop, a reduction by a function, a call of foreign
code), nothing is said; `jaxext.testing.check_op` compares numbers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from jaxext import _compat


def refuse_coupled(declared, sizes: Mapping[str, Any], operands: Sequence[jax.ShapeDtypeStruct], static) -> None:
    """Raise ValueError if the reference of a `Declaration` couples the elements of a label, in a result that has it.

    `sizes` are those of the labels that may be mapped and split; `operands` have one axis for each label.
    """
    labels = [label for label, size in sizes.items() if isinstance(size, int) and size > 1]
    if not labels:
        return
    jaxpr = jax.make_jaxpr(functools.partial(declared.reference, **dict(static.items)))(*operands).jaxpr
    found: dict[str, str] = {}
    for label in labels:
        places = follow(jaxpr, [list(of).index(label) if label in of else None for of in declared.inputs.values()])
        having = [place for place, of in zip(places, declared.results.values(), strict=True) if label in of]
        if place := next((place for place in having if isinstance(place, Coupled)), None):
            found[label] = place.how
    if found:
        label, how = next(iter(found.items()))
        raise ValueError(
            f"{declared.name}: the reference couples the elements of {label} ({how}), so {label} can be neither mapped nor split: want"
            f" `unsharded={' '.join([*declared.unsharded, *found])!r}` in its declaration, or `independent={label!r}` if the results do not"
            " depend on that"
        )


@dataclasses.dataclass(frozen=True)
class Coupled:
    """The state of an array each of whose elements depends on several elements of the label."""

    how: str

    @classmethod
    def found(cls, eqn, what: str = "") -> Coupled:
        line = _compat.source_line([eqn])
        return cls(f"{eqn.primitive.name}{what}" + (f" at {line}" if line else ""))


class Positions(frozenset):
    """The axes along which an array that has not the label counts, as `jnp.arange` does."""


LOST = "lost"  # of an array: the axis of the label could not be followed
Place = int | None | Coupled | Positions | str  # an axis of an array; None: the array does not have the label

_ELEMENTWISE = frozenset(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp clz complex conj convert_element_type copy cos cosh digamma"
    " div eq erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg"
    " nextafter not or polygamma population_count pow real reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic"
    " shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor".split()
)
_REDUCTIONS = frozenset("argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor".split())
_CUMULATIVE = frozenset("cumlogsumexp cummax cummin cumprod cumsum".split())


def follow(jaxpr: Jaxpr, places: Sequence[Place]) -> list[Place]:
    """Return where the axis of a label lies in each result, from where it lies in each operand.  Its size is at least 2."""
    at = dict(zip(jaxpr.invars, places, strict=True))

    def place(atom) -> Place:
        return None if isinstance(atom, Literal) else at.get(atom)

    for eqn in jaxpr.eqns:
        at.update(zip(eqn.outvars, _through(eqn, list(map(place, eqn.invars))), strict=True))
    return list(map(place, jaxpr.outvars))


def _through(eqn, places: list[Place]) -> Sequence[Place]:
    found = next((place for place in places if isinstance(place, Coupled)), None)
    if found:
        return [found] * len(eqn.outvars)
    if (called := inner(eqn)) is not None:
        return follow(called.jaxpr, places)
    return [_result_place(eqn, places)] * len(eqn.outvars)


def _result_place(eqn, places: list[Place]) -> Place:
    if eqn.primitive.name == "iota":
        return Positions({eqn.params["dimension"]})
    if LOST in places:
        return LOST
    counted = frozenset().union(*(place for place in places if isinstance(place, Positions)))
    of_label = [None if isinstance(place, Positions) else place for place in places]
    if any(place is not None for place in of_label):
        by_position = eqn.primitive.name in _ELEMENTWISE and not counted.isdisjoint(of_label)
        return Coupled.found(eqn, " with the numbers of positions") if by_position else _rule(eqn)(eqn, of_label)

    def moved(axis):
        return _rule(eqn)(eqn, [axis if isinstance(place, Positions) and axis in place else None for place in places])

    return Positions(place for place in map(moved, counted) if isinstance(place, int)) or None


def inner(eqn) -> ClosedJaxpr | None:
    """The program of an equation that only calls it: jit, checkpoint, custom derivatives.

    It has the operands and the results of the equation.  That of a reduction by a function has scalars.
    """
    if eqn.primitive.name in ("scan", "while", "cond"):
        return None
    programs = [p if isinstance(p, ClosedJaxpr) else ClosedJaxpr(p, ()) for p in eqn.params.values() if isinstance(p, ClosedJaxpr | Jaxpr)]
    if len(programs) != 1:
        return None
    called = programs[0].jaxpr
    own, outer = ([[atom.aval.shape for atom in atoms] for atoms in (of.invars, of.outvars)] for of in (called, eqn))  # pyright: ignore
    return programs[0] if own == outer and len(called.constvars) == len(programs[0].consts) else None


def _rule(eqn) -> Callable[..., Place]:
    name = eqn.primitive.name
    if name in _ELEMENTWISE:
        return _elementwise
    if name in _REDUCTIONS:
        return lambda eqn, places: _reduced(eqn, places[0], eqn.params["axes"])
    if name in _CUMULATIVE:
        return lambda eqn, places: _kept_axis(eqn, places[0], (eqn.params["axis"],))
    return _RULES.get(name, lambda eqn, places: LOST)


def _elementwise(eqn, places):
    axes = {place for place in places if place is not None}
    return axes.pop() if len(axes) == 1 else Coupled.found(eqn)


def _reduced(eqn, axis, removed):
    return Coupled.found(eqn) if axis in removed else axis - sum(other < axis for other in removed)


def _kept_axis(eqn, axis, coupled):
    return Coupled.found(eqn) if axis in coupled else axis


def _sort(eqn, places):
    return _kept_axis(eqn, _elementwise(eqn, places), (eqn.params["dimension"],)) if len({*places} - {None}) == 1 else Coupled.found(eqn)


def _reshape(eqn, places):
    axis, old, new = places[0], eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    fits = (i for i, size in enumerate(new) if size == old[axis] and math.prod(new[:i]) == math.prod(old[:axis]))
    return next(fits, LOST)


def _kept(eqn, places):
    """Return the place in the result of a slice, a padding or several parts: the axis keeps its elements if it keeps its size."""
    axis = places[0]
    same = (
        axis is not None and all(place in (axis, None) for place in places) and eqn.params.get("dimension", eqn.params.get("axis")) != axis
    )
    return axis if same and all(y.aval.shape[axis] == eqn.invars[0].aval.shape[axis] for y in eqn.outvars) else LOST


def _pad(eqn, places):
    axis = places[0]
    return axis if axis is not None and tuple(eqn.params["padding_config"][axis]) == (0, 0, 0) else LOST


def _concatenate(eqn, places):
    axis = _elementwise(eqn, places)
    return LOST if axis == eqn.params["dimension"] else axis


def _dot_general(eqn, places):
    """The axes of the result: those of the batch, then those of one operand alone."""
    contracted, batch = eqn.params["dimension_numbers"]
    found = set()
    for side, axis in enumerate(places):
        if axis is None:
            continue
        if axis in contracted[side]:
            return Coupled.found(eqn)
        if axis in batch[side]:
            found.add(tuple(batch[side]).index(axis))
            continue
        own = [i for i in range(eqn.invars[side].aval.ndim) if i not in (*contracted[side], *batch[side])]
        before = 0 if side == 0 else eqn.invars[0].aval.ndim - len(contracted[0]) - len(batch[0])
        found.add(len(batch[side]) + before + own.index(axis))
    return found.pop() if len(found) == 1 else Coupled.found(eqn)


_RULES: dict[str, Callable[..., Place]] = {
    "broadcast_in_dim": lambda eqn, places: eqn.params["broadcast_dimensions"][places[0]],
    "concatenate": _concatenate,
    "dot_general": _dot_general,
    "pad": _pad,
    "reshape": _reshape,
    "rev": lambda eqn, places: _kept_axis(eqn, places[0], eqn.params["dimensions"]),
    "slice": _kept,
    "sort": _sort,
    "split": _kept,
    "squeeze": lambda eqn, places: _reduced(eqn, places[0], eqn.params["dimensions"]),
    "transpose": lambda eqn, places: eqn.params["permutation"].index(places[0]),
}
