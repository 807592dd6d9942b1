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
    """The product of a matrix with its own transpose, as `x @ x.mT`: y[..., i, j] = Σ_k x[..., i, k] x[..., j, k].

    It does half of the work where x is large (from 768 rows and 512 columns on, on a CPU), and y is symmetric to the last bit.  Its tangent
    is symmetric, too, and takes one product.  Where devices split the columns, each does half of its part.  Where they split the rows,
    each gathers x and computes all of its rows of y.  Then y is symmetric but for rounding; so it is if x is complex, and where XLA's
    partitioner alone splits the program, such as in a `shard_map` over some of several axes.

    Args:
      x: shape (..., M, K), of any dtype that `jax.numpy.matmul` takes.  Complex numbers are not conjugated.
      precision, preferred_element_type: as in `matmul`.
      out_sharding: of the result, on explicit meshes.  By default rows are sharded as those of x.
      implementation: the name of an implementation, also used for all derivatives.  None selects one automatically.

    Returns:
      shape (..., M, M).

    Examples:
      >>> gram(jnp.array([[1.0, 2.0], [0.0, 1.0]])).tolist()
      [[5.0, 2.0], [2.0, 1.0]]

    Raises:
      TypeError: x is not an array with two axes or more.
      ValueError: `implementation` is unknown.
      NotImplementedError: the named implementation does not support the call.
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

    x is divided by its Frobenius norm.  Then each step is x ← a x + (b A + c A Aᵀ) x with A = x xᵀ, and coefficients (a, b, c).  With the
    coefficients of Muon, singular values become about 0.7 to 1.2 after five steps, and singular vectors stay.

    Two of the three products of a step are `gram`, of the shorter side of x, and the sums are done by the products' own kernels.  Where
    devices split the longer side, a step adds up one square matrix over them.

    Args:
      x: floating-point numbers of shape (..., M, N): matrices, such as those of several layers.  The sum of the squares of one must be in
        the range of float32.
      steps: how many.
      coefficients: three numbers, or three for each step.
      eps: added to the norm.
      precision, implementation: as in `gram`.

    Returns:
      the shape and dtype of x.

    Examples:
      >>> y = newton_schulz(jnp.array([[3.0, 0.0], [0.0, -0.1]]))
      >>> bool((jnp.abs(jnp.diag(y)) > 0.6).all())
      True

    Raises:
      TypeError: x is not a floating-point array with two axes or more; `steps` is not an int; `coefficients` are not triples; `eps` is
        not a number.
      ValueError: `steps` is negative, there are not as many triples as steps, or `implementation` is unknown.
      NotImplementedError: the named implementation does not support the call.
    """
    static = dict(precision=precision)
    return iteration.newton_schulz("newton_schulz", x, steps, coefficients, eps=eps, implementation=implementation, **static)
