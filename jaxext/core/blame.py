"""Names the implementation that computes a product of a program wrong, by comparing each product with its definition.

Primitives of which users have implementations carry `blame` as an attribute: so `jaxext.testing`, which knows nothing of jaxext, can ask.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from jaxext import _compat
from jaxext._compat import Partitioner
from jaxext.core.choose import choose, planned
from jaxext.core.coupling import inner
from jaxext.core.family import Family
from jaxext.core.form import owner
from jaxext.tables import active, environment


def blame(program: ClosedJaxpr, *args: jax.Array) -> str | None:
    """The implementations that compute products of a program wrong for these arguments, each with its error; None if none does."""
    values = dict(zip((*program.jaxpr.constvars, *program.jaxpr.invars), (*program.consts, *args), strict=True))
    found = dict.fromkeys(_wrong(program.jaxpr, values))
    return "; ".join(found) or None


def attach(family: Family) -> None:
    """Let the primitives of a family carry `blame`."""
    for primitive, (form, _) in owner.items():
        if form.family is family:
            setattr(primitive, "blame", blame)  # noqa: B010 (jax's class has no such attribute)


def _wrong(jaxpr: Jaxpr, values: dict) -> Iterator[str]:
    """Evaluates a program: `values` has those of its constants and operands, and gets those of all variables."""
    for eqn in jaxpr.eqns:
        operands = [atom.val if isinstance(atom, Literal) else values[atom] for atom in eqn.invars]
        if (called := inner(eqn)) is not None:
            inside = dict(zip((*called.jaxpr.constvars, *called.jaxpr.invars), (*called.consts, *operands), strict=True))
            yield from _wrong(called.jaxpr, inside)
            results = [atom.val if isinstance(atom, Literal) else inside[atom] for atom in called.jaxpr.outvars]
        else:
            results = _compat.evaluated(eqn, *operands)
            if eqn.primitive in owner:
                yield from _compared(eqn, operands, results)
        values.update(zip(eqn.outvars, results, strict=True))


def _compared(eqn, operands, results) -> Iterator[str]:
    form, open = owner[eqn.primitive]
    platform, params = environment.default_platform(), eqn.params
    device = dict(platform=platform, arch=environment.capability(platform), partitioner=Partitioner.NOBODY)
    call = form.call(open, [jax.typeof(x) for x in operands], **device, **params)
    implementations, definition = form.family.implementations, form.family.implementations[-1].name
    name, part = planned(call, params["static"].implementation)
    chosen = choose(part or call, implementations, name, () if part else active.measured(call)).implementation
    if chosen in (None, definition):
        return
    wanted = _compat.evaluated(eqn.replace(params={**params, "static": params["static"].replace(implementation=definition)}), *operands)
    for slot, y, want in zip(call.results, results, wanted, strict=True):
        y, want = np.asarray(y), np.asarray(want)
        allowed = float(jnp.finfo(y.dtype).eps) ** (2 / 3) if jnp.issubdtype(y.dtype, jnp.inexact) else 0
        if y.size and not (error := _error(y, want)) <= allowed:
            where = f"call.op is {call.op!r}" + (f" and call.open {open!r}" if call.operation is None else f", in {slot!r}")
            yield f"implementation {chosen!r} is wrong where {where}: its error is {error:.2g} of the largest element; fix its `run`"


def _error(y: np.ndarray, want: np.ndarray) -> float:
    """The largest, relative to the largest finite element; infinite if infinities and NaN are not in the same places."""
    wide = np.complex128 if jnp.issubdtype(y.dtype, jnp.complexfloating) else np.float64
    y, want = y.astype(wide), want.astype(wide)
    finite = np.isfinite(want)
    if not np.array_equal(y[~finite], want[~finite], equal_nan=True) or not np.isfinite(y[finite]).all():
        return np.inf
    y, want = y[finite], want[finite]
    return float(np.max(np.abs(y - want), initial=0) / (np.max(np.abs(want), initial=0) or 1.0))
