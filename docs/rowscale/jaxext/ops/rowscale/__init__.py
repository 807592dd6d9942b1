"""The public operation on rows times numbers."""

from __future__ import annotations

import jax
from jax.typing import ArrayLike

from jaxext.ops.rowscale import form as _form

__all__ = ["rowscale"]


def rowscale(
    x: ArrayLike, scale: ArrayLike, *, implementation: str | None = None
) -> jax.Array:
    """Multiply each row of a matrix by a number: y[..., m, n] = x[..., m, n] scale[m].

    Args:
      x: shape (..., M, N).
      scale: shape (M,).  Products are computed in its dtype.
      implementation: the name of an implementation, also used for all derivatives.  None
        selects one automatically.

    Returns:
      the shape and dtype of x.

    Raises:
      TypeError: an argument is not an array, x has fewer than two axes, or scale has
        another shape.
      ValueError: `implementation` is unknown.
      NotImplementedError: the named implementation does not support the call.
    """
    return _form.rowscale("rowscale", x, scale, implementation=implementation)
