"""The public operations on products of a matrix with its own transpose.

They support all of JAX, as `jaxext.matmul` does.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.typing import ArrayLike, DTypeLike

from jaxext.lax.dispatch import compiled
from jaxext.ops.gram import form, iteration

__all__ = ["gram", "newton_schulz"]


def gram(
    x: ArrayLike,
    *,
    precision=None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding=None,
    implementation: str | None = None,
) -> jax.Array:
    """The product of a matrix with its own transpose, `x @ x.mT`: y[..., i, j] = Σ_k x[..., i, k] x[..., j, k].

    For a large x (on a CPU, 768 rows and 512 columns or more) it does half of the work.  y is exactly symmetric if x is real, except in
    two cases, where it is symmetric up to rounding: devices split the rows, or only XLA's partitioner splits the program, as in a
    `shard_map` over some of several axes.  The tangent is symmetric too, and takes one product.  If devices split the columns, each does
    half of the work for its columns.  If they split the rows, each gathers x and computes its rows of y in full.

    Args:
      x: shape (..., M, K), of any dtype that `jax.numpy.matmul` accepts.  Complex numbers are not conjugated.
      precision, preferred_element_type: as in `matmul`.
      out_sharding: sharding of the result on an explicit mesh.  By default its rows are sharded as those of x.
      implementation: an implementation's name, also for derivatives.  None selects one.

    Returns:
      shape (..., M, M).

    Examples:
      >>> gram(jnp.array([[1.0, 2.0], [0.0, 1.0]])).tolist()
      [[5.0, 2.0], [2.0, 1.0]]

    Raises:
      TypeError: x is not an array with two axes or more.
      ValueError: `implementation` is unknown; `out_sharding` does not fit.
      NotImplementedError: `implementation` does not support the call.
    """
    static = dict(precision=precision, preferred_element_type=preferred_element_type, out_sharding=out_sharding)
    return compiled(form.product, ("gram",), form.FAMILY, implementation, (form.matrices("gram", x),), static, name="gram")


def newton_schulz(
    x: ArrayLike,
    *,
    steps: int = 5,
    coefficients: Sequence[float] | Sequence[Sequence[float]] = iteration.MUON,
    eps: float = 1e-8,
    precision=None,
    implementation: str | None = None,
) -> jax.Array:
    """The Newton-Schulz iteration of the optimizer Muon, which moves all singular values of a matrix towards 1.

    x is divided by its Frobenius norm.  Each step is then x ← a x + (b A + c A Aᵀ) x, where A = x xᵀ and (a, b, c) are the coefficients.
    With the default coefficients, which are Muon's, five steps move most singular values into about 0.7 to 1.2.  The singular vectors
    stay.

    Two of the three products of a step are a `gram`, over the shorter side of x, and the kernels of the products also add.  If devices
    split the longer side, each step sums one square matrix over them.

    Args:
      x: shape (..., M, N), floating-point: one or more matrices.  The sum of squares of each must be in the range of float32.
      steps: the number of steps.
      coefficients: three numbers, or three for each step.
      eps: a number that is added to the norm.
      precision, implementation: as in `gram`.

    Returns:
      the shape and dtype of x.

    Examples:
      >>> y = newton_schulz(jnp.array([[3.0, 0.0], [0.0, -0.1]]))
      >>> bool((jnp.abs(jnp.diag(y)) > 0.6).all())
      True

    Raises:
      TypeError: x is not a floating-point array with two axes or more; `steps` is not an int; `coefficients` are not triples; `eps` is not
        a number.
      ValueError: `steps` is negative; `eps` is negative or not finite; the number of triples differs from the number of steps;
        `implementation` is unknown.
      NotImplementedError: `implementation` does not support the call.
    """
    static = dict(precision=precision)
    return iteration.newton_schulz("newton_schulz", x, steps, coefficients, eps=eps, implementation=implementation, **static)
