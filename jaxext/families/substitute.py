"""Runs a function with each product of lax in it replaced by that of the family that reads it.

The public operations are their namesakes so substituted, which is why shapes, dtypes, weak types and errors agree with lax by construction.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Literal
from jax.sharding import PartitionSpec as P
from jax.sharding import Sharding

from jaxext import _compat
from jaxext.forms.family import readers
from jaxext.forms.form import replacing_lax


class Keywords(tuple):
    """Static keyword arguments as a key of caches, which compares and hashes as fast as a tuple; `given` holds them as they were given.

    Keys are equal only if all types in them are.  lax tells 1 from 1.0, and numpy says that float64's dtype equals None.
    """

    given: Mapping[str, Any]

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Keywords | None:
        """None if a value is no plain one: it can change, be used up or be traced."""
        try:
            self = cls([None if value is None else _frozen(value) for value in given.values()])
        except TypeError:
            return None
        self.given = given
        return self

    def copy(self) -> dict[str, Any]:
        """What was given, for those who keep it: a list or an array can change after."""
        return {name: _copied(value) for name, value in self.given.items()}


# Of these types equal values are the same to lax.
_PLAIN = (str, bool, int, float, complex, np.generic, np.dtype, type, enum.Enum, P, Sharding, type(None))


def _frozen(value):
    """A hashable that equals another only if lax cannot tell the values apart.

    Raises:
      TypeError: there is none.
    """
    kind = type(value)
    if kind in (tuple, list) or hasattr(value, "_make"):
        return (kind, *map(_frozen, value))
    if isinstance(value, np.ndarray) and value.dtype != object:
        return kind, value.dtype, value.shape, value.tobytes()
    if isinstance(value, _PLAIN):
        hash(value)
        return kind, value
    raise TypeError


def _copied(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, tuple | list):  # or a named tuple
        parts = map(_copied, value)
        return getattr(value, "_make", type(value))(parts)
    return value


def substitute(function: functools.partial, arrays: Sequence, implementation: str | None) -> jax.Array:
    """`function(*arrays)` with our products for lax's.

    It is traced on bare shapes and dtypes: what lax refuses of shapes it refuses here, in its own words; what it refuses of the operands'
    shardings is left to the form, which can do more.
    """
    _compat.refuse_parts(getattr(function.func, "__name__", "product"), "out_sharding", function.keywords.get("out_sharding"))
    arrays = tuple(x if isinstance(x, Tracer) else jnp.asarray(x) for x in arrays)
    bare = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=jax.typeof(x).weak_type) for x in arrays]
    with replacing_lax(False):
        jaxpr = jax.make_jaxpr(function)(*bare)
    return _evaluate(jaxpr, arrays, implementation)


def _evaluate(closed: ClosedJaxpr, args, implementation):
    """The value of a jaxpr with one result; only jit's own equations hold jaxprs in what lax and jnp trace for a product."""
    values = dict(zip((*closed.jaxpr.constvars, *closed.jaxpr.invars), (*closed.consts, *args), strict=True))

    def read(atom):
        return _constant(atom) if isinstance(atom, Literal) else values[atom]

    for eqn in closed.jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        if (reader := readers.get(eqn.primitive)) is not None:
            out = reader(*operands, dtype=eqn.outvars[0].aval.dtype, implementation=implementation, **eqn.params)
        elif eqn.primitive.name in ("jit", "pjit"):
            out = _evaluate(eqn.params["jaxpr"], operands, implementation)
        else:
            out = eqn.primitive.bind(*operands, **eqn.params)
        values[eqn.outvars[0]] = out
    return read(closed.jaxpr.outvars[0])


def _constant(literal: Any) -> jax.Array:
    """A Python scalar that was an operand has a weak type, which an array of its dtype has not."""
    aval: Any = literal.aval
    weak = jnp.asarray(np.asarray(literal.val).item())
    same = (weak.dtype, weak.weak_type) == (aval.dtype, aval.weak_type)
    return weak if same else jnp.asarray(literal.val, aval.dtype)


def transpose(x, permutation):
    return x if list(permutation) == list(range(x.ndim)) else lax.transpose(x, permutation)
