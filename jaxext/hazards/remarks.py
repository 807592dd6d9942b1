"""The remarks of a report on how a function was read: constants among its operands, and which gradient was read, or why none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from jaxext.core.form import owner
from jaxext.hazards.reading import computes_gradients, constants_in_products
from jaxext.hazards.subjects import PRODUCTS

LISTED = 3  # constants that are named
NOTHING = "no argument is a floating-point array"


def no_loss(program: ClosedJaxpr) -> str | None:
    """Return the reason why the gradient is not read unless it is asked for, or None."""
    results: list[Any] = program.out_avals
    arguments: list[Any] = program.in_avals
    if len(results) != 1 or results[0].shape != () or not jnp.issubdtype(results[0].dtype, jnp.floating):
        return "the function does not return one real number"
    if not any(jnp.issubdtype(aval.dtype, jnp.inexact) for aval in arguments):
        return NOTHING
    return None


def remarks(program: ClosedJaxpr, backward: bool, gradients: bool | None) -> Iterator[str]:
    """Yield remarks on a function by its own program.  `backward`: whether its gradient is read too; `gradients`: whether it was asked."""
    own = computes_gradients(program)
    if own and gradients:
        yield "The function computes gradients itself, and gradients=True (--backward) reads the gradient of that: second derivatives."
    elif own and backward:
        yield (
            "The function computes gradients itself and returns one real number, so its gradient is read too, as that of a loss. "
            "If it is a training step, gradients=False (--no-backward) reads it as it stands."
        )
    elif own:
        yield "The function computes gradients itself, as a training step does. It is read as it stands, and is not differentiated again."
    elif not backward and gradients is None:
        reason = no_loss(program)
        forced = "" if reason == NOTHING else " gradients=True (--backward) reads it in all floating-point arguments."
        yield f"No gradient is read, since {reason}.{forced}"
    constants = [*constants_in_products(program, lambda eqn: eqn.primitive.name in PRODUCTS or eqn.primitive in owner)]
    if constants:
        types = sorted(frozenset().union(*constants))
        named = ", ".join(types[:LISTED]) + (f" and {len(types) - LISTED} more types" if len(types) > LISTED else "")
        counted = "1 product has an operand" if len(constants) == 1 else f"{len(constants)} products have operands"
        yield (
            f"{counted} made of arrays that the function closes over ({named}). These are constants of the program: XLA compiles them in "
            "and may fold what is made of them alone. "
            + ("" if own else "No gradient in them is read, so hazards of such a gradient are not reported. ")
            + "If they are parameters, pass them as arguments."
        )
