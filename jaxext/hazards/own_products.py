"""Writes jaxext's products as the equations that XLA gets of them, where `xla` computes them: XLA's compiler treats them as lax's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from jaxext.core.choose import Choice
from jaxext.core.form import owner
from jaxext.core.invariant import Invariant
from jaxext.hazards.fused_reduction import FusedReductions
from jaxext.hazards.reading import Origins
from jaxext.hazards.subjects import Equation
from jaxext.tuning.explain import chosen
from jaxext.tuning.truth import alone
from jaxext.tuning.walk import Step, walk


def fused_in_own(program: ClosedJaxpr, platform: str) -> Iterator[tuple[Equation, Step]]:
    """Products of jaxext that XLA's CPU compiler fuses with their reduction, as it does lax's."""
    if platform != "cpu":
        return
    written = Written(program, platform)
    fused = FusedReductions(written.program, origins := Origins(written.program))
    for step in walk(written.program.jaxpr):
        if not step.inside and fused.has_one_number(step) and (own := written.product(step)) is not None:
            yield Equation(own.eqn, [None] * len(own.eqn.invars), {}, platform, one_number_reduced=True), own
        origins.follow(step)


class Written:
    """A program in which products of jaxext are written in equations of lax, as `xla` computes them: those with one number everywhere.

    Attributes:
      program: it has the variables of the one that is given.
    """

    def __init__(self, program: ClosedJaxpr, platform: str):
        self._platform = platform
        self._product: dict[int, Any] = {}  # of each equation that was put in its place
        self._wanted = set()
        origins = Origins(program)
        for step in walk(program.jaxpr):
            if step.eqn.primitive in owner and any(origins.of(atom).one_number for atom in step.eqn.invars):
                self._wanted.add(id(step.eqn))
            origins.follow(step)
        self.program = self._of_closed(program) if self._wanted else program

    def product(self, step: Step) -> Step | None:
        """The step of jaxext's product that this equation of lax is a part of."""
        for depth, eqn in enumerate((*step.within, step.eqn)):
            if (product := self._product.get(id(eqn))) is not None:
                return Step(product, step.jaxpr, step.times, step.within[:depth], ())
        return None

    def _of_closed(self, closed: ClosedJaxpr) -> ClosedJaxpr:
        return closed.replace(jaxpr=self._of(closed.jaxpr))

    def _of(self, jaxpr: Jaxpr) -> Jaxpr:
        return jaxpr.replace(eqns=[each for eqn in jaxpr.eqns for each in self._in_place_of(eqn)])

    def _in_place_of(self, eqn: Any) -> Sequence[Any]:
        if id(eqn) in self._wanted:
            return self._written(eqn) or [eqn]
        return [eqn.replace(params={name: self._of_param(value) for name, value in eqn.params.items()})]

    def _of_param(self, value: Any) -> Any:
        if isinstance(value, ClosedJaxpr):
            return self._of_closed(value)
        if isinstance(value, Jaxpr):
            return self._of(value)
        inside = isinstance(value, tuple | list) and any(isinstance(each, ClosedJaxpr | Jaxpr) for each in value)
        return type(value)(map(self._of_param, value)) if inside else value

    def _written(self, eqn: Any) -> list[Any] | None:
        """The equations of `xla`, of the variables around the product; None if another implementation computes it, or xla by parts."""
        if isinstance(eqn.params["static"].implementation, Invariant):
            return None
        choice: Choice = chosen(eqn, self._platform)[-1]
        if choice.plan is None or choice.implementation != "xla":
            return None
        closed = jax.make_jaxpr(alone(choice.plan, choice.config))(*(atom.aval for atom in eqn.invars))
        inner, of = closed.jaxpr, {}
        of.update(zip(inner.outvars, eqn.outvars, strict=True))
        if closed.consts or len(of) < len(inner.outvars) or not {*inner.invars}.isdisjoint(of) or any(isinstance(v, Literal) for v in of):
            return None
        of.update(zip(inner.invars, eqn.invars, strict=True))

        def outer(atom) -> Any:
            return atom if isinstance(atom, Literal) else of.get(atom, atom)

        put = [each.replace(invars=[*map(outer, each.invars)], outvars=[*map(outer, each.outvars)]) for each in inner.eqns]
        self._product.update((id(each), eqn) for each in put)
        return put
