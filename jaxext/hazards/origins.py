"""The origins of the arrays of a jaxpr, arguments or arrays that the function closes over, and equations in place of others.

Origins follow forwards through equations and programs inside.  In loops and branches no array counts as one number everywhere.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from jaxext import _compat
from jaxext.tuning.walk import Step

# Calls whose operands and results are those of the program inside.
CALLS = ("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2", "custom_jvp_call", "custom_vjp_call")
# Of operands that are one number everywhere these, and those in SPREADING, make one number everywhere.
ELEMENTWISE = {
    *("add", "sub", "mul", "div", "neg", "abs", "max", "min", "exp", "log", "log1p", "sqrt", "rsqrt", "square", "integer_pow", "pow"),
    *("tanh", "logistic", "sign", "convert_element_type", "copy", "reshape"),
}
SPREADING = {"broadcast_in_dim", "transpose", "squeeze", "slice", "rev"}
LARGEST_READ = 2**24  # elements of a constant whose numbers are compared: it is copied from its device


@dataclasses.dataclass(frozen=True)
class Origin:
    """The origin of an array, what it is made of.  `arrays` are the types of those that the function closes over."""

    argument: bool = False
    arrays: frozenset[str] = frozenset()
    one_number: bool = False

    @property
    def constant(self) -> bool:
        """Return whether it is made of arrays that the function closes over, and of no argument."""
        return bool(self.arrays) and not self.argument


def merged(origins: Iterable[Origin], one_number: bool = False) -> Origin:
    origins = [*origins]
    return Origin(any(each.argument for each in origins), frozenset().union(*(each.arrays for each in origins)), one_number)


class Origins:
    """The origin of each array so far.  `follow` takes every step of a walk, in order."""

    def __init__(self, program: ClosedJaxpr):
        self._known: dict[Any, Origin] = {var: Origin(argument=True, one_number=_single(var.aval)) for var in program.jaxpr.invars}
        self._add_constants(program)

    def of(self, atom: Any) -> Origin:
        return _array_origin(atom.val) if isinstance(atom, Literal) else self._known.get(atom, Origin())

    def follow(self, step: Step) -> None:
        eqn: Any = step.eqn
        operands = [self.of(atom) for atom in eqn.invars]
        call = eqn.primitive.name in CALLS and len(step.inside) == 1 and len(step.inside[0].invars) == len(operands)
        if step.inside and not step.left:
            self._enter(eqn, step.inside, operands, call)
        elif step.left and call:
            for var, inner in zip(eqn.outvars, step.inside[0].outvars, strict=True):
                self._known[var] = self.of(inner)
        else:
            name = eqn.primitive.name
            alike = name in ELEMENTWISE | SPREADING and all(each.one_number for each in operands)
            for var in eqn.outvars:
                self._known[var] = merged(operands, (alike or _single(var.aval)))

    def _enter(self, eqn: Any, inside: Sequence[Jaxpr], operands: list[Origin], call: bool) -> None:
        for value in eqn.params.values():
            for closed in value if isinstance(value, tuple | list) else (value,):
                if isinstance(closed, ClosedJaxpr):
                    self._add_constants(closed)
        for inner in inside:
            # A loop carries what it makes of all operands.  Of others the last operands are those of the program inside.
            mixed, looped = merged(operands), eqn.primitive.name in ("scan", "while")
            for i, var in enumerate(reversed(inner.invars), 1):
                origin = operands[-i] if i <= len(operands) and not looped else mixed
                self._known[var] = origin if call else dataclasses.replace(origin, one_number=_single(var.aval))
            if looped:
                self._known.update(zip(inner.invars, self._loop_constants(eqn, inner, operands), strict=False))

    def _loop_constants(self, eqn: Any, inner: Jaxpr, operands: list[Origin]) -> list[Origin]:
        """Return the origins of the operands that are the same in each step."""
        params = eqn.params
        if eqn.primitive.name == "scan":
            return operands[: _compat.scan_counts(params)[0]]
        condition_consts = params["cond_nconsts"]
        body = params["body_jaxpr"].jaxpr is inner
        return operands[condition_consts : condition_consts + params["body_nconsts"]] if body else operands[:condition_consts]

    def _add_constants(self, closed: ClosedJaxpr) -> None:
        self._known.update({var: _array_origin(value) for var, value in zip(closed.jaxpr.constvars, closed.consts, strict=True)})


def _single(aval: Any) -> bool:
    shape = getattr(aval, "shape", None)
    return shape is not None and all(isinstance(n, int) for n in shape) and math.prod(shape) == 1


def _array_origin(value: Any) -> Origin:
    """Return the origin of an array that is written into the program.  A single number is no array."""
    dtype = getattr(value, "dtype", None)
    if np.size(value) == 1 or dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
        return Origin(one_number=np.size(value) == 1)
    return Origin(arrays=frozenset({jax.typeof(value).str_short(short_dtypes=True)}), one_number=_all_equal(value))


def _all_equal(value: Any) -> bool:
    if isinstance(value, Tracer) or not 0 < np.size(value) <= LARGEST_READ:
        return False
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return False
    numbers = np.asarray(value)
    return bool((numbers == numbers.flat[0]).all())


def rewritten(value: Any, rewrite: Callable[[Any], Sequence[Any]]) -> Any:
    """A program with `rewrite(eqn)` in place of each equation, those of programs inside first.

    What has nothing else inside stays the same object, since jax lowers that once.
    """
    if isinstance(value, ClosedJaxpr):
        jaxpr = _rewritten_jaxpr(value.jaxpr, rewrite)
        return value if jaxpr is value.jaxpr else value.replace(jaxpr=jaxpr)
    if isinstance(value, Jaxpr):
        return _rewritten_jaxpr(value, rewrite)
    if isinstance(value, tuple | list) and not _same(each := [rewritten(one, rewrite) for one in value], value):
        return type(value)(*each) if hasattr(value, "_fields") else type(value)(each)
    return value


def _rewritten_jaxpr(jaxpr: Jaxpr, rewrite: Callable[[Any], Sequence[Any]]) -> Jaxpr:
    eqns: list[Any] = []
    for eqn in jaxpr.eqns:
        params = {name: rewritten(value, rewrite) for name, value in eqn.params.items()}
        eqns += rewrite(eqn if _same(params.values(), eqn.params.values()) else eqn.replace(params=params))
    return jaxpr if _same(eqns, jaxpr.eqns) else jaxpr.replace(eqns=eqns)


def _same(new: Iterable[Any], old: Iterable[Any]) -> bool:
    return [*map(id, new)] == [*map(id, old)]
