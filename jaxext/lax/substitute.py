"""Runs a function with each lax product replaced by the product of a family.

The public operations run their namesakes this way, so shapes, dtypes, weak types and errors agree with lax by construction.
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
from jaxext.core.choose import replacing_lax
from jaxext.core.family import readers
from jaxext.core.invariant import Invariant


class CacheKey(tuple):
    """Static keyword arguments as a cache key that compares and hashes as fast as a tuple.  `given` holds the original values.

    Keys are equal only if all types in them are equal: lax distinguishes 1 from 1.0, and in numpy the dtype float64 equals None.
    """

    given: Mapping[str, Any]

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> CacheKey | None:
        """The key, or None if a value is mutable, an iterator, traced, or of another type that is not plain."""
        try:
            self = cls([None if value is None else _frozen(value) for value in given.values()])
        except TypeError:
            return None
        self.given = given
        return self

    def copy(self) -> dict[str, Any]:
        """A copy of the values, safe to keep: the caller may change a list or an array later."""
        return {name: _copied(value) for name, value in self.given.items()}


# lax does not distinguish equal values of these types.
_PLAIN = (str, bool, int, float, complex, np.generic, np.dtype, type, enum.Enum, P, Sharding, lax.RaggedDotDimensionNumbers, type(None))


def _frozen(value):
    """A hashable for a value; two are equal only if lax cannot distinguish the values.

    Raises:
      TypeError: the value has none.
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


def traced(function: functools.partial, arrays: Sequence) -> tuple[ClosedJaxpr, tuple]:
    """The jaxpr of `function(*arrays)`, and the arrays as jax's.

    It is traced on shapes and dtypes without shardings.  lax therefore raises its own errors for shapes, while shardings are checked by the
    form, which supports more of them.
    """
    _compat.refuse_parts(getattr(function.func, "__name__", "product"), "out_sharding", function.keywords.get("out_sharding"))
    arrays = tuple(x if isinstance(x, Tracer) else jnp.asarray(x) for x in arrays)
    bare = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=jax.typeof(x).weak_type) for x in arrays]
    with replacing_lax(False):
        return jax.make_jaxpr(function)(*bare), arrays


def substitute(closed: ClosedJaxpr, args: Sequence, implementation: str | Invariant | None) -> jax.Array:
    """Evaluate a jaxpr with one result, with jaxext's products in place of lax's.

    In traces of lax and jnp products, only jit equations contain jaxprs.
    """
    values = dict(zip((*closed.jaxpr.constvars, *closed.jaxpr.invars), (*closed.consts, *args), strict=True))

    def read(atom):
        return _constant(atom) if isinstance(atom, Literal) else values[atom]

    eqn: Any  # pyright knows no dtype of its variables
    for eqn in closed.jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        if (reader := readers.get(eqn.primitive)) is not None:
            out = reader(*operands, dtype=eqn.outvars[0].aval.dtype, implementation=implementation, **eqn.params)
        elif eqn.primitive.name in ("jit", "pjit"):
            out = substitute(eqn.params["jaxpr"], operands, implementation)
        else:
            out = eqn.primitive.bind(*operands, **eqn.params)
        values[eqn.outvars[0]] = out
    return read(closed.jaxpr.outvars[0])


def _constant(literal: Any) -> jax.Array:
    """The literal as an array, weakly typed if it was a Python scalar."""
    aval: Any = literal.aval
    weak = jnp.asarray(np.asarray(literal.val).item())
    same = (weak.dtype, weak.weak_type) == (aval.dtype, aval.weak_type)
    return weak if same else jnp.asarray(literal.val, aval.dtype)


def transpose(x, permutation):
    return x if list(permutation) == list(range(x.ndim)) else lax.transpose(x, permutation)
