"""Checks of the arrays that a call of an operation is given.  A message names the operation and the argument."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxext._messages import format_value


def given(**optional: Any) -> dict[str, Any]:
    """The arguments that are not None."""
    return {argument: x for argument, x in optional.items() if x is not None}


def checked(name: str, arrays: Mapping[str, Any]) -> dict[str, jax.Array]:
    """These arguments as arrays of jax.  TypeError for one that is no array."""
    made = {}
    for argument, x in arrays.items():
        if not isinstance(x, jax.Array | np.ndarray | np.generic) and not hasattr(x, "__jax_array__"):
            raise TypeError(f"{name}: {argument} is {format_value(x)}, want an array")
        made[argument] = x if isinstance(x, jax.Array) else jnp.asarray(x)
    refuse_keys(name, made)
    return made


def refuse_keys(name: str, arrays: Mapping[str, jax.Array]) -> None:
    """Raise TypeError for an array of keys of random numbers."""
    for argument, x in arrays.items():
        if jnp.issubdtype(x.dtype, jax.dtypes.extended):
            raise TypeError(f"{name}: {argument} is {format_value(x)}, want an array of numbers")


def refuse_shape(name: str, argument: str, x, wanted: tuple, labels: str) -> None:
    if x.shape != wanted:
        raise TypeError(f"{name}: {argument} has the shape {x.shape}, want {wanted}: {labels}")


def refuse_dtypes(name: str, activation, dtype, added: Mapping[str, Any]) -> None:
    """Raise TypeError for an activation of integers, and for an operand that the result's kind of numbers cannot hold."""
    if activation is not None and not jnp.issubdtype(dtype, jnp.inexact):
        raise TypeError(f"{name}: the result is {dtype} and activation is {activation!r}, want None for a result of integers")
    refuse_kinds(name, added, dtype)


def refuse_kinds(name: str, arrays: Mapping[str, Any], dtype) -> None:
    """Raise TypeError for an array that a result of this dtype cannot hold, such as a complex one beside real numbers."""
    for argument, x in arrays.items():
        if _kind(x.dtype) > _kind(dtype):
            raise TypeError(f"{name}: {argument} is {x.dtype}, want a dtype that converts to {dtype}, the dtype of the result")


def _kind(dtype) -> int:
    """The rank of a dtype's kind: bool, integer, float, complex, then all others."""
    kinds = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
    return next((i for i, kind in enumerate(kinds) if jnp.issubdtype(dtype, kind)), len(kinds))


def promoted(operands: Mapping[str, jax.Array], slots: Iterable[str]) -> dict[str, jax.Array]:
    """These operands with the dtype that jnp gives to both."""
    dtype = jnp.result_type(*(operands[slot] for slot in slots))
    return {slot: operands[slot].astype(dtype) for slot in slots}
