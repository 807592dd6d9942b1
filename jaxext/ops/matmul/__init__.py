"""Matrix products: drop-in replacements for `jax.numpy.matmul` and `jax.lax.dot_general`, with one extra keyword, `implementation`.

Each traces its namesake and replaces every lax product in it with jaxext's (`dispatch.call_namesake`).  Shapes, dtypes, weak types and
errors are therefore those of the namesake.

Both support all of JAX: jit, vmap over any operand and axis, forward and reverse derivatives of any order, remat, scan, shard_map, pmap,
automatic and explicit sharding, and export.  float16 and bfloat16 are accumulated in float32 and rounded once.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jaxext.lax.dispatch import call_namesake
from jaxext.ops.matmul.form import FAMILY

__all__ = ["dot_general", "matmul"]


def matmul(
    a: ArrayLike,
    b: ArrayLike,
    *,
    precision=None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding=None,
    implementation: str | None = None,
) -> jax.Array:
    """Matrix multiplication, as `jax.numpy.matmul`: c[..., m, n] = Σ_k a[..., m, k] b[..., k, n].

    Args:
      a: shape (..., M, K) or (K,).
      b: shape (..., K, N) or (K,).  Leading axes broadcast against those of `a`.
      precision: as in `jax.lax.dot_general`.
      preferred_element_type: dtype of accumulation and result.  Defaults to the promoted dtype of the operands.
      out_sharding: sharding of the result on an explicit mesh.
      implementation: an implementation's name, also for derivatives.  None selects one.

    Returns:
      shape (..., M, N), without M if `a` is a vector and without N if `b` is one.

    Examples:
      >>> matmul(jnp.ones((5, 2, 3)), jnp.ones((3, 4))).shape
      (5, 2, 4)

    Raises:
      Exception: any error that `jax.numpy.matmul` raises.
      ValueError: `implementation` is unknown.
      NotImplementedError: `implementation` does not support the call.
    """
    static = dict(precision=precision, preferred_element_type=preferred_element_type, out_sharding=out_sharding)
    return call_namesake(jnp.matmul, FAMILY, implementation, (a, b), static)


def dot_general(
    lhs: ArrayLike,
    rhs: ArrayLike,
    dimension_numbers,
    precision=None,
    preferred_element_type: DTypeLike | None = None,
    *,
    out_sharding=None,
    implementation: str | None = None,
) -> jax.Array:
    """General tensor product, as `jax.lax.dot_general`: out[b, m, n] = Σ_k lhs[b, m, k] rhs[b, k, n], for axes in any order.

    Each of b, m, n and k stands for any number of axes.  An operand is not copied if its batch axes come first and its contracted axes are
    adjacent, before or after its free axes.  If both operands are transposed, one is copied.

    Args:
      lhs, rhs: arrays of any rank.
      dimension_numbers: ((lhs contracting, rhs contracting), (lhs batch, rhs batch)) axes.
      precision: None, a `jax.lax.Precision`, a string, a pair of either, or a `jax.lax.DotAlgorithmPreset`.
      preferred_element_type: dtype of accumulation and result.  Defaults to the dtype of the operands.
      out_sharding: sharding of the result on an explicit mesh.
      implementation: an implementation's name, also for derivatives.  None selects one.

    Returns:
      shape: batch axes, free axes of `lhs`, free axes of `rhs`.

    Examples:
      >>> dot_general(jnp.ones((7, 2, 3)), jnp.ones((7, 4, 3)), (((2,), (2,)), ((0,), (0,)))).shape
      (7, 2, 4)

    Raises:
      Exception: any error that `jax.lax.dot_general` raises.
      ValueError: `implementation` is unknown.
      NotImplementedError: `implementation` does not support the call.
    """
    static = dict(precision=precision, preferred_element_type=preferred_element_type, out_sharding=out_sharding)
    return call_namesake(lax.dot_general, FAMILY, implementation, (lhs, rhs), dict(dimension_numbers=dimension_numbers, **static))
