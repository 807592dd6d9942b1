"""How an operation of lax or jnp becomes ours, for one call or for all in a context, and which implementation it names.

It must not know the public operations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.core import Tracer

from jaxext._conv import CONV_IMPLEMENTATIONS
from jaxext._form import Form, replacing_lax
from jaxext._matmul import MATMUL
from jaxext._products import Keywords, substitute
from jaxext._scope import Scope

# `ArrayLike` for isinstance, which for that union itself says no to a tracer.
_ARRAYS = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)

# The implementation that `use_implementation` names; part of jit's cache key.
_named = jax.make_user_context(None)

# The forms that users declared (`jaxext.extend`), by name.
defined: dict[str, Form] = {}


def implementations(product) -> list[str]:
    """The names that `implementation` may take for a product of lax: the implementations of the form that it becomes."""
    return [i.name for i in (MATMUL.implementations if product is lax.dot_general_p else CONV_IMPLEMENTATIONS)]


def use_implementation(name: str | None) -> Scope:
    """A context in which every jaxext operation, and its gradients, use the implementation `name` (None: the preferred one).

    It is a context manager (`with use_implementation("xla"): ...`) and a decorator of functions (`@use_implementation("xla")`).

    An `implementation=` at the call wins over the context.  An operation that has no implementation of this name raises ValueError where
    it is called.  The context is part of `jax.jit`'s cache key.

    Raises:
      ValueError: no operation has an implementation of that name.
    """
    of_users = (implementation.name for form in defined.values() for implementation in form.implementations)
    known = sorted({*implementations(lax.dot_general_p), *implementations(lax.conv_general_dilated_p), *of_users})
    if name is not None and name not in known:
        raise ValueError(f"use_implementation: name is {name!r}, want one of {known} or None")
    return Scope("use_implementation", _named, name)


def in_place_of_lax() -> Scope:
    """A context in which lax's products are ours, for models that offer no place to inject an operation.

    It is a context manager (`with in_place_of_lax(): ...`) and a decorator of functions (`@in_place_of_lax()`).

    Every `jax.lax.dot_general` and `jax.lax.conv_general_dilated` that is traced or run inside, by whatever jax or library function
    (`jnp.matmul`, `@`, `jnp.einsum`, flax's and equinox's layers), becomes the jaxext operation, with the implementation that
    `use_implementation` names.  The context belongs to this thread and is part of `jax.jit`'s cache key.

    Leave it around code that interprets lax's products itself: Pallas kernels, `jax.experimental.sparse` and `jax.experimental.jet` do
    not know ours.  A policy of `jax.checkpoint` sees ours only through `jaxext.checkpoint_policies`.
    """
    for name, primitive in (("dot_general", lax.dot_general_p), ("conv_general_dilated", lax.conv_general_dilated_p)):
        if "bind" not in vars(primitive):
            primitive.bind = functools.partial(_bind, name, primitive, primitive.bind)
    return Scope("in_place_of_lax", replacing_lax, True)


def _bind(name, primitive, original, *operands, **params):
    """`primitive.bind` of lax, which is ours while `replacing_lax`."""
    if not replacing_lax.value:
        return original(*operands, **params)
    return like(original, None, *operands, name=name, product=primitive, **params)


def like(namesake: Callable, implementation: str | None, *arrays, product: Any = None, name: Any = None, **static: Any) -> jax.Array:
    """`namesake(*arrays, **static)` with our products, by the implementation that the call or the context names.

    `product` is lax's primitive in it; it is told from the name where it is not said.
    """
    name = name or namesake.__name__
    product = product or (lax.conv_general_dilated_p if name.startswith("conv") else lax.dot_general_p)
    implementation = named(implementation, name, implementations(product))
    if not all(isinstance(x, _ARRAYS) for x in arrays):
        # What else the namesake takes (flax's nnx.Param) or, mostly, refuses: lists, None.  jit would take it for a tree of arrays.
        return substitute(functools.partial(namesake, *arrays, **static), Keywords({}), (), implementation)
    keywords = Keywords(static)
    if any(isinstance(x, Tracer) for x in arrays):
        return substitute(namesake, keywords, arrays, implementation)
    return _compiled(namesake, keywords, implementation, *arrays)


def named(implementation: str | None, operation: Any, known: Sequence[str]) -> str | None:
    """The implementation that the call or else the context names, if it is one of the operation's."""
    implementation = _named.value if implementation is None else implementation
    if implementation is not None and implementation not in known:
        raise ValueError(f"{operation}: implementation is {implementation!r}, want one of {known} or None")
    return implementation


def as_dot_general_says(operands: Iterable[jax.Array], dimension_numbers: Any, precision: Any, dtype: Any) -> dict[str, Any]:
    """What `lax.dot_general` makes of its keywords: read from its equation."""
    product = functools.partial(lax.dot_general, dimension_numbers=dimension_numbers, precision=precision, preferred_element_type=dtype)
    with replacing_lax(False):
        (eqn,) = jax.make_jaxpr(product)(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands)).eqns
    return dict(dtype=eqn.outvars[0].aval.dtype, precision=eqn.params["precision"])


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _compiled(namesake, keywords, implementation, *arrays):
    """The operation as one program, for arrays that are there."""
    return substitute(namesake, keywords, arrays, implementation)
