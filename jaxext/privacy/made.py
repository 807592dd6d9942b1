"""Values that are made of parameters and constants alone, and how: a gradient of one leads to those of the parameters.

A `Leaf` is a parameter, and a `Made` value remembers the equation and the operands that made it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from jaxext._compat import evaluated


@dataclasses.dataclass(frozen=True, eq=False)
class Leaf:
    """A parameter, or inside a scan a slice of what is made of parameters.

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
class Made:
    """A value made of leaves and constants alone: `eqn` of `operands` has it as one of its results.  Constants have no leaves."""

    value: Any
    leaves: frozenset[Leaf] = frozenset()
    eqn: JaxprEqn | None = None
    operands: tuple = ()
    position: int = 0
    same_norm: bool = False  # its gradient has the norm of the gradient of its only leaf

    @classmethod
    def of(cls, leaf: Leaf) -> Made:
        return cls(leaf.value, frozenset([leaf]), None, (leaf,), same_norm=True)


def plain(x: Any) -> Any:
    return x.value if isinstance(x, Made) else x


def has_leaves(x: Any) -> bool:
    return isinstance(x, Made) and bool(x.leaves)


def leaves_of(made: Sequence[Made]) -> list[Leaf]:
    return sorted(frozenset[Leaf]().union(*(x.leaves for x in made)), key=lambda leaf: leaf.root)


def remaking(made: Sequence[Made], leaves: Sequence[Leaf]) -> Callable[..., list[Any]]:
    """A function of other values of some leaves, which makes these values of them.  The other leaves keep theirs."""

    def remake(*values: Any) -> list[Any]:
        given = {leaf: leaf.value for leaf in leaves_of(made)} | dict(zip(leaves, values, strict=True))
        known: dict = {}
        return [_remade(x, given, known) for x in made]

    return remake


def _remade(made: Made, given: Mapping[Leaf, Any], known: dict) -> Any:
    """`known` holds results so far."""
    if not made.leaves:
        return made.value
    if made.eqn is None:
        return given[made.operands[0]]
    key = id(made.operands)
    if key not in known:
        known[key] = evaluated(made.eqn, *(_remade(x, given, known) for x in made.operands))
    return known[key][made.position]


def tangents(made: Sequence[Made]) -> list[Any] | None:
    """The zeros of leaves, taken through what the values are made by: the transpose leads gradients back.  None if there are no zeros."""
    stored = [leaf for leaf in leaves_of(made) if leaf.zeros is not None]
    if not stored:
        return None
    return jax.jvp(remaking(made, stored), [leaf.value for leaf in stored], [leaf.zeros for leaf in stored])[1]
