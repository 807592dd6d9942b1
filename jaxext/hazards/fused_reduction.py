"""Finds the products of which XLA's CPU compiler makes one kernel with the reduction behind them, and whose right factor is one number.

XLA makes such a kernel if the product is used once, elementwise operations alone lie between it and the reduction, and nothing is
transposed: the last axis of the left factor is contracted.  To XLA a product is the same as that of the exchanged factors, transposed.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from jaxext.hazards.reading import CALLS, ELEMENTWISE, Origins
from jaxext.tuning.walk import Step, jaxprs_in, walk

REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min")
DTYPES = (jnp.bfloat16, jnp.float32, jnp.float64)
LEAST_ELEMENTS = 4096  # smaller products are no kernel of this kind


class FusedReductions:
    def __init__(self, program: ClosedJaxpr, origins: Origins):
        self._origins = origins
        self._users: dict[Any, dict[int, Any]] = collections.defaultdict(dict)  # variable -> equations, each once
        self._maker: dict[Any, Any] = {}
        self._given: dict[Any, list[Any]] = collections.defaultdict(list)  # variable inside of calls -> what they give it
        self._home: dict[int, Jaxpr] = {}  # of each equation
        live = set()
        _add_live(program.jaxpr, program.jaxpr.outvars, live)
        for step in walk(program.jaxpr):
            self._home[id(step.eqn)] = step.jaxpr
            self._maker.update(dict.fromkeys(step.eqn.outvars, step.eqn))
            for atom in step.eqn.invars if id(step.eqn) in live else ():
                if not isinstance(atom, Literal):
                    self._users[atom][id(step.eqn)] = step.eqn
            if step.eqn.primitive.name in CALLS and not step.left and len(step.inside) == 1:
                for var, atom in zip(step.inside[0].invars, step.eqn.invars, strict=False):
                    if not isinstance(atom, Literal):
                        self._given[var].append(atom)

    def has_one_number(self, step: Step) -> bool:
        """Whether this equation is such a product."""
        eqn: Any = step.eqn
        if eqn.primitive.name != "dot_general" or any(around.primitive.name == "cond" for around in step.within):
            return False
        (contracted, _), (result,) = eqn.params["dimension_numbers"], eqn.outvars
        sizes = [n for atom in (*eqn.invars, result) for n in atom.aval.shape]
        if not all(isinstance(n, int) for n in sizes) or result.aval.size < LEAST_ELEMENTS or _is_vector(eqn):
            return False
        if any(aval.dtype not in DTYPES for aval in (eqn.invars[0].aval, eqn.invars[1].aval, result.aval)):
            return False
        numbers = [self._origins.of(atom).one_number for atom in eqn.invars]
        if numbers == [False, True]:
            left, axes, first = eqn.invars[0], contracted[0], result
        elif numbers == [True, False] and result.aval.ndim == 2:  # as the right factor of the transposed product
            left, axes, first = eqn.invars[1], contracted[1], self._transposed(result)
        else:
            return False
        ends_last = (*sorted(axes),) == (*range(left.aval.ndim - len(axes), left.aval.ndim),)
        return (
            first is not None
            and ends_last
            and self._origins.of(left).argument
            and not self._is_transposed(left)
            and self._reduced(first, step.within)
        )

    def _transposed(self, var: Any) -> Any:
        users = [*self._users[var].values()]
        return users[0].outvars[0] if len(users) == 1 and users[0].primitive.name == "transpose" else None

    def _is_transposed(self, var: Any) -> bool:
        """Whether the array is a transposed one, or elementwise operations of one, perhaps outside of the call that it is given to."""
        while (maker := self._maker.get(var)) is not None:
            if maker.primitive.name == "transpose":
                return True
            arrays = [atom for atom in maker.invars if not isinstance(atom, Literal) and atom.aval.shape == var.aval.shape]
            if maker.primitive.name not in ELEMENTWISE or not arrays:
                return False
            if any(map(self._is_transposed, arrays[1:])):
                return True
            var = arrays[0]
        return any(map(self._is_transposed, self._given.get(var, ())))

    def _reduced(self, var: Any, within: Sequence[Any]) -> bool:
        """Whether the one use of the array is elementwise, and leads to a reduction."""
        bounds = set()
        while True:
            users = [*self._users[var].values()]
            around = within[-1] if within else None
            if around is not None and around.primitive.name in CALLS and not users:
                inside = self._home_of_result(var, around)
                if inside is None:
                    return False
                var, within = inside, within[:-1]
                continue
            if len(users) != 1 or self._is_returned(var, users[0]):
                return False
            (eqn,) = users
            name, result = eqn.primitive.name, eqn.outvars[0]
            bounds |= {name} & {"min", "max"}
            if len(bounds) == 2:  # a clamp, which XLA leaves out of such kernels
                return False
            if name in REDUCTIONS:
                return True
            if name in CALLS and (entered := _entered(eqn, var)) is not None:
                var, within = entered, (*within, eqn)
            elif name in ELEMENTWISE and result.aval.dtype in DTYPES and result.aval.size == var.aval.size:
                var = result
            else:
                return False

    def _home_of_result(self, var: Any, around: Any) -> Any:
        """The result of a call that is this variable inside."""
        (inner,) = jaxprs_in(around)
        return next((out for out, own in zip(around.outvars, inner.outvars, strict=True) if own is var), None)

    def _is_returned(self, var: Any, user: Any) -> bool:
        return any(out is var for out in self._home[id(user)].outvars)


def _add_live(jaxpr: Jaxpr, results: Sequence[Any], live: set[int]) -> None:
    """Add the equations on which these results depend.  XLA removes the others, such as the value of a loss in its gradient."""
    wanted = {atom for atom in results if not isinstance(atom, Literal)}
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or not wanted.isdisjoint(eqn.outvars):
            live.add(id(eqn))
            wanted.update(atom for atom in eqn.invars if not isinstance(atom, Literal))
            call = eqn.primitive.name in CALLS and len(jaxprs_in(eqn)) == 1
            for inner in jaxprs_in(eqn):
                outs = [out for out, own in zip(inner.outvars, eqn.outvars, strict=True) if own in wanted] if call else inner.outvars
                _add_live(inner, outs, live)


def _is_vector(eqn: Any) -> bool:
    """Whether a factor has no axis of its own, or nothing is summed: XLA makes a matrix product of none of these."""
    (contracted, batched), shapes = eqn.params["dimension_numbers"], [atom.aval.shape for atom in eqn.invars]
    sides = [*zip(shapes, contracted, batched, strict=True)]
    free = [math.prod(n for i, n in enumerate(shape) if i not in (*c, *b)) for shape, c, b in sides]
    return 1 in (*free, math.prod(shapes[0][i] for i in contracted[0]))


def _entered(eqn: Any, var: Any) -> Any:
    """The variable inside a call, if the call has it once."""
    inside, at = jaxprs_in(eqn), [i for i, atom in enumerate(eqn.invars) if atom is var]
    return inside[0].invars[at[0]] if len(inside) == len(at) == 1 and len(inside[0].invars) == len(eqn.invars) else None
