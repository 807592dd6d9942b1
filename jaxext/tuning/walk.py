"""Walks the equations of a jaxpr and of every jaxpr inside: `jit`, `scan`, `while`, `cond`, `checkpoint`, derivatives, `shard_map`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """An equation on the way.  One with jaxprs inside comes before their equations, and a second time, `left`, after them."""

    eqn: JaxprEqn
    jaxpr: Jaxpr  # that it stands in
    times: int  # how often it runs: a scan counts its length, a while loop and each branch of a cond count one
    within: tuple[JaxprEqn, ...]  # the equations around it, the outermost first
    inside: tuple[Jaxpr, ...]  # in the order of its parameters
    left: bool = False
    outer: tuple[Jaxpr, ...] = ()  # in which the equations of `within` stand


def walk(jaxpr: Jaxpr, times: int = 1, within: tuple[JaxprEqn, ...] = (), outer: tuple[Jaxpr, ...] = ()) -> Iterator[Step]:
    """The equations in program order."""
    for eqn in jaxpr.eqns:
        inside = jaxprs_in(eqn)
        yield Step(eqn, jaxpr, times, within, inside, outer=outer)
        repeat = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        for inner in inside:
            yield from walk(inner, times * repeat, (*within, eqn), (*outer, jaxpr))
        if inside:
            yield Step(eqn, jaxpr, times, within, inside, True, outer)


def jaxprs_in(eqn: JaxprEqn) -> tuple[Jaxpr, ...]:
    """Return the jaxprs of an equation in the order of its parameters."""
    return tuple(_jaxprs(tuple(eqn.params.values())))


def _jaxprs(value) -> Iterator[Jaxpr]:
    if isinstance(value, ClosedJaxpr):
        yield value.jaxpr
    elif isinstance(value, Jaxpr):
        yield value
    elif isinstance(value, tuple | list):
        for inner in value:
            yield from _jaxprs(inner)
