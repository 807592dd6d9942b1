"""The activations that kernels fuse, by name."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxext import _compat
from jaxext._messages import format_value
from jaxext.kernels.epilogue import ACTIVATIONS


def _squared_relu(z: jax.Array) -> jax.Array:
    return jnp.square(jax.nn.relu(z))


@jax.custom_jvp
def _normal(z: jax.Array) -> jax.Array:
    """The distribution function of normal numbers.  jax 0.12 cannot differentiate `lax.erfc` in a shard_map."""
    return lax.erfc(z * -math.sqrt(0.5)) * 0.5


_normal.defjvps(lambda dot, _, z: dot * jnp.exp(z * z * -0.5) * (1 / math.sqrt(2 * math.pi)))


def _gelu(z: jax.Array) -> jax.Array:
    return z * _normal(z)


@jax.custom_jvp
def _logistic(v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The logistic function and its derivative, in which nothing cancels."""
    e = jnp.exp(-jnp.abs(v))
    q = 1 / (1 + e)
    return jnp.where(v < 0, e * q, q), e * q * q


@_logistic.defjvp
def _(primals, tangents):
    y, slope = _logistic(*primals)
    return (y, slope), (tangents[0] * slope, tangents[0] * slope * (1 - 2 * y))


@jax.custom_jvp
def _gelu_tanh(z: jax.Array) -> jax.Array:
    """Return jax.nn.gelu(z, approximate=True).  What jax derives of it has 1 - tanh(u)^2, small differences whose errors z^3 multiplies."""
    return jax.nn.gelu(z, approximate=True)


@_gelu_tanh.defjvp
def _(primals, tangents):
    (z,), (dot,) = primals, tangents
    if jnp.issubdtype(z.dtype, jnp.complexfloating):  # what follows is for real numbers
        return jax.jvp(functools.partial(jax.nn.gelu, approximate=True), primals, tangents)
    a, b = math.sqrt(8 / math.pi), math.sqrt(8 / math.pi) * 0.044715
    y, slope = _logistic(z * (a + b * (z * z)))  # (1 + tanh(u)) / 2 is the logistic function of 2u
    return _gelu_tanh(z), dot * (y + z * slope * (a + 3 * b * (z * z)))


FUNCTIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": jax.nn.silu,
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
    "leaky_relu": jax.nn.leaky_relu,
    "squared_relu": _squared_relu,
}
assert tuple(FUNCTIONS) == ACTIVATIONS

_ALIASES = {"swish": "silu"}  # causal-conv1d's and jax.nn's second name

# A function that is one of these, by the name that kernels know.
_NAMES = {
    jax.nn.relu: "relu",
    jax.nn.relu6: "relu6",
    jax.nn.gelu: "gelu_tanh",
    jax.nn.silu: "silu",
    jax.nn.sigmoid: "sigmoid",
    lax.logistic: "sigmoid",
    jnp.tanh: "tanh",
    lax.tanh: "tanh",
    jax.nn.leaky_relu: "leaky_relu",
}

# The derivative of these at z, from y = activation(z).  The others need z.
_SLOPES_OF_RESULT: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": lambda y: (y > 0).astype(y.dtype),
    "leaky_relu": lambda y: jnp.where(y >= 0, 1, 0.01).astype(y.dtype),
    "sigmoid": lambda y: y * (1 - y),
    "tanh": lambda y: (1 - y) * (1 + y),
}

Activation = str | None


def named(operation: str, activation: Any) -> tuple[Activation, Callable[[jax.Array], jax.Array] | None]:
    """The activation by its name, and None; or None, and a function that has no name, which `epilogue.applied` applies.

    Raises:
      TypeError: it is neither a name nor a function.
      ValueError: the name is unknown.
    """
    if activation is None:
        return None, None
    wanted = f"want one of {[*FUNCTIONS, *_ALIASES]}, a function, or None"
    if isinstance(activation, str):
        activation = _ALIASES.get(activation, activation)
        if activation not in FUNCTIONS:
            raise ValueError(f"{operation}: activation is {format_value(activation)}, {wanted}")
        return activation, None
    if not callable(activation):
        raise TypeError(f"{operation}: activation is {format_value(activation)}, {wanted}")
    function: Any = activation
    name = next((name for other, name in _NAMES.items() if other is function), None)
    return name, function if name is None else None


def apply(activation: Activation, z: jax.Array) -> jax.Array:
    return z if activation is None else FUNCTIONS[activation](z)


def follows_from_result(activation: Activation) -> bool:
    """Return whether the derivative follows from the activation's result."""
    return activation is None or activation in _SLOPES_OF_RESULT


def tangent_by_result(activation: Activation, y: jax.Array, dot: jax.Array) -> jax.Array:
    """The tangent of y = activation(z) for the tangent of z, with the dtype of `dot`."""
    return dot if activation is None else _SLOPES_OF_RESULT[activation](y.astype(dot.dtype)) * dot


def tangent(function: Callable[[jax.Array], jax.Array], z: jax.Array, dot: jax.Array) -> jax.Array:
    """The tangent of function(z) for the tangent of z, computed with the dtype of `dot`.  For the transpose z is saved, not a slope."""

    @_compat.checkpoint_of_tangent
    def slope_times(z, dot):
        return jax.jvp(function, (z.astype(dot.dtype),), (dot,))[1]

    return slope_times(z, dot)
