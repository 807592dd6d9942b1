"""Finds where a reference couples the elements of a label: by a sum, a sort, a cumulative sum or a shift along its axis, or by positions.

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
        if place := next((place for place in having if isinstance(place, Coupled | Part)), None):
            found[label] = place.how if isinstance(place, Coupled) else "its elements are shifted or cut off"
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


@dataclasses.dataclass(frozen=True)
class Part:
    """An axis with a part of the label's elements, or with padding beside them.

    Index i has element i + by, of the elements `low` to `high` of all `size`.
    """

    axis: int
    by: int
    low: int
    high: int
    size: int

    def cut(self, start: int, length: int) -> Part | int:
        """The axis from `start` on, which may be before it; the axis itself if it has all elements at their indices."""
        by = self.by + start
        part = dataclasses.replace(self, by=by, low=max(self.low, by), high=min(self.high, by + length))
        return self.axis if (part.by, part.low, part.high, length) == (0, 0, self.size, self.size) else part


LOST = "lost"  # of an array: the axis of the label could not be followed
Place = int | None | Coupled | Positions | Part | str  # an axis of an array; None: the array does not have the label

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
    if eqn.primitive.name == "split" and _axis_of(places[0]) == eqn.params["axis"]:
        part, sizes = _part(eqn, 0, places[0]), eqn.params["sizes"]
        return [part.cut(sum(sizes[:i]), size) for i, size in enumerate(sizes)]
    return [_result_place(eqn, places)] * len(eqn.outvars)


def _result_place(eqn, places: list[Place]) -> Place:
    if eqn.primitive.name == "iota":
        return Positions({eqn.params["dimension"]})
    if LOST in places:
        return LOST
    counted = frozenset().union(*(place for place in places if isinstance(place, Positions)))
    of_label = [None if isinstance(place, Positions) else place for place in places]
    if any(place is not None for place in of_label):
        by_position = eqn.primitive.name in _ELEMENTWISE and not counted.isdisjoint(map(_axis_of, of_label))
        return Coupled.found(eqn, " with the numbers of positions") if by_position else _of_parts(eqn, of_label)

    def moved(axis):
        return _of_parts(eqn, [axis if isinstance(place, Positions) and axis in place else None for place in places])

    return Positions(place for place in map(moved, counted) if isinstance(place, int)) or None


def _of_parts(eqn, places):
    """The place by the rule for axes that have all elements; parts stay the same parts."""
    if eqn.primitive.name in _CUTTING:
        return _CUTTING[eqn.primitive.name](eqn, places)
    place = _rule(eqn)(eqn, list(map(_axis_of, places)))
    if isinstance(place, Coupled) or place == LOST or not any(isinstance(each, Part) for each in places):
        return place
    first, *others = {dataclasses.replace(each, axis=place) if isinstance(each, Part) else each for each in places if each is not None}
    return Coupled.found(eqn, " of shifted elements") if others else first


def _axis_of(place: Any) -> Any:
    return place.axis if isinstance(place, Part) else place


def _part(eqn, operand: int, place: Any) -> Part:
    """The place of an operand as a part, which may be all."""
    if isinstance(place, Part):
        return place
    size = eqn.invars[operand].aval.shape[place]
    return Part(place, 0, 0, size, size)


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


def _slice(eqn, places):
    part = _part(eqn, 0, places[0])
    start, end = eqn.params["start_indices"][part.axis], eqn.params["limit_indices"][part.axis]
    strides = eqn.params["strides"]
    return LOST if strides is not None and strides[part.axis] != 1 else part.cut(start, end - start)


def _pad(eqn, places):
    if places[0] is None:
        return LOST
    part = _part(eqn, 0, places[0])
    low, _, interior = eqn.params["padding_config"][part.axis]
    return LOST if interior else part.cut(-low, eqn.outvars[0].aval.shape[part.axis])


def _concatenate(eqn, places):
    """Return the place: along the axis, one array with the label is padded by the others; several put together may be in their order."""
    dimension = eqn.params["dimension"]
    if dimension not in map(_axis_of, places):
        parts = {place for place in places if place is not None}
        return parts.pop() if len(parts) == 1 else Coupled.found(eqn, " of shifted elements")
    begins = [sum(x.aval.shape[dimension] for x in eqn.invars[:i]) for i in range(len(places))]
    length = eqn.outvars[0].aval.shape[dimension]
    cut = [
        _part(eqn, i, place).cut(-begin, length) for i, (place, begin) in enumerate(zip(places, begins, strict=True)) if place is not None
    ]
    if len(cut) == 1:
        return cut[0]
    return LOST if any(isinstance(part, int) or part.by == 0 for part in cut) else Coupled.found(eqn, " of shifted elements")


def _broadcast(eqn, places):
    axis = eqn.params["broadcast_dimensions"][places[0]]
    return axis if eqn.outvars[0].aval.shape[axis] == eqn.invars[0].aval.shape[places[0]] else Coupled.found(eqn)


def _conv(eqn, places):
    axis, of_filter = places
    numbers = eqn.params["dimension_numbers"]
    if axis is None or of_filter is not None:
        return LOST
    if axis == numbers.lhs_spec[0]:
        return numbers.out_spec[0] if eqn.params["batch_group_count"] == 1 else LOST
    wide = axis in numbers.lhs_spec[2:] and eqn.invars[1].aval.shape[numbers.rhs_spec[numbers.lhs_spec.index(axis)]] > 1
    return Coupled.found(eqn) if wide else LOST


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


def _reduce_window(eqn, places):
    return Coupled.found(eqn) if eqn.params["window_dimensions"][places[0]] > 1 else LOST


_RULES: dict[str, Callable[..., Place]] = {
    **dict.fromkeys(("reduce_window_max", "reduce_window_min", "reduce_window_sum"), _reduce_window),
    "broadcast_in_dim": _broadcast,
    "conv_general_dilated": _conv,
    "dot_general": _dot_general,
    "reshape": _reshape,
    "rev": lambda eqn, places: _kept_axis(eqn, places[0], eqn.params["dimensions"]),
    "sort": _sort,
    "split": lambda eqn, places: places[0],  # along another axis
    "squeeze": lambda eqn, places: _reduced(eqn, places[0], eqn.params["dimensions"]),
    "transpose": lambda eqn, places: eqn.params["permutation"].index(places[0]),
}
# Those that can change which elements an axis has.
_CUTTING: dict[str, Callable[..., Place]] = {"concatenate": _concatenate, "pad": _pad, "slice": _slice}
