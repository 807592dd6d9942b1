"""`per_example_norms` and `clipped_grad`: the norm of each example's gradient, and the sum of the gradients clipped to a norm."""

from __future__ import annotations

import dataclasses
import functools
import numbers
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxext._messages import array_named, format_value, refuse_traced
from jaxext.privacy.gram_forms import squared
from jaxext.privacy.per_example import Batch, Function
from jaxext.privacy.square_norms import parts


class Aux(NamedTuple):
    """The values that `clipped_grad` returns besides the gradient: an array over the examples each, or None if it was not requested.

    They are not clipped, so they carry no guarantee of privacy.
    """

    values: jax.Array | None
    grad_norms: jax.Array | None
    aux: Any


@dataclasses.dataclass(frozen=True)
class ClippedGrad:
    """The function that `clipped_grad` returns.  Call it with the arguments of the original function.

    Attributes:
      l2_norm_bound: the largest L2 norm by which adding or removing one example changes the gradient.
    """

    fun: Callable[..., Any]
    l2_norm_bound: float | jax.Array

    def __call__(self, *args: Any, is_padding_example: jax.Array | None = None) -> Any:
        padding = None if is_padding_example is None else array_named("clipped_grad", "is_padding_example", is_padding_example)
        return self.fun(args, padding)

    def sensitivity(self, neighboring_relation: Any = None) -> float | jax.Array:
        """Return the L2 sensitivity: `l2_norm_bound`, or twice that for `dp_accounting.NeighboringRelation.REPLACE_ONE`."""
        return self.l2_norm_bound * (2 if getattr(neighboring_relation, "name", neighboring_relation) == "REPLACE_ONE" else 1)


def per_example_norms(
    fun: Callable,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    batch_argnums: int | Sequence[int] = 1,
    keep_batch_dim: bool = True,
    prng_argnum: int | None = None,
) -> Callable[..., jax.Array]:
    """Return a function of the arguments of `fun` that returns the L2 norm of each example's gradient.

    The norm is over all parameters together, from one backward pass.  Per-example gradients are stored only for parameters that are used
    more than once, which `explain_norms` lists.

    Args:
      fun: a loss, as in `clipped_grad`.
      argnums, has_aux, batch_argnums, keep_batch_dim, prng_argnum: as in `clipped_grad`.

    Returns:
      a function that returns an array of shape (examples,), in float32, or float64 if a parameter is float64.

    Examples:
      >>> loss = lambda w, x: (x @ w).sum()
      >>> per_example_norms(loss)(jnp.zeros(2), jnp.array([[3.0, 4.0], [0.0, 1.0]]))
      Array([5., 1.], dtype=float32)

    Raises:
      TypeError, ValueError: as `clipped_grad`.
    """
    function = Function("per_example_norms", fun, argnums, has_aux, batch_argnums, keep_batch_dim, prng_argnum)

    @jax.jit
    def norms(args):
        size, batch = function.batched(args)
        return jnp.sqrt(batch.traced().pass_backwards(for_sum=False)[2]) if size else batch.zeros(batch.dtype)

    return lambda *args: norms(args)


def clipped_grad(
    fun: Callable,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    l2_clip_norm: float | jax.Array,
    rescale_to_unit_norm: bool = False,
    normalize_by: float = 1.0,
    batch_argnums: int | Sequence[int] = 1,
    keep_batch_dim: bool = True,
    return_values: bool = False,
    return_grad_norms: bool = False,
    nan_safe: bool = True,
    prng_argnum: int | None = None,
) -> ClippedGrad:
    """Return a function of the arguments of `fun` that returns Σ_b g_b min(1, l2_clip_norm / |g_b|), g_b the gradient of example b.

    It is jax_privacy's `clipped_grad` without large per-example gradients.  One backward pass computes the norms, and the clipped sum is
    computed from its cotangents.  Where per-example gradients are no larger than their layer's arrays, they are kept and rescaled instead.
    A second pass is needed only if a parameter is used inside a scan or a checkpoint.  The caller adds the noise.  lax's matmuls and
    convolutions with a parameter become jaxext's, as in `in_place_of_lax`.  The function is compiled, as by `jax.jit`.

    Args:
      fun: a loss.  It is called for one example at a time, as if by `vmap`, so it cannot mix examples.
      argnums: the positions of the parameters, which are pytrees of floating-point arrays.
      has_aux: whether `fun` returns a pair of the loss and anything else.
      l2_clip_norm: the norm to which larger gradients are clipped.
      rescale_to_unit_norm: whether to divide the sum by `l2_clip_norm`.
      normalize_by: a positive number by which to divide the sum.
      batch_argnums: the positions of the arguments whose arrays have the examples along their first axis: (1, 2) for a loss of (params, x,
        y).  Each example sees all of every other argument.
      keep_batch_dim: whether `fun` gets this axis, with size 1.  If False, `fun` is the loss of a single example.  An example may also be
        a group, such as one user's data, with an axis of its own.
      return_values, return_grad_norms: whether to return the losses and the norms of all examples.
      nan_safe: whether an infinity or NaN in an example's gradient counts as 0, as in jax_privacy.  If a norm is not finite, another
        branch of the program clips the per-example gradients themselves.
      prng_argnum: the position of a random key, which is split into one for each example, or None.

    Returns:
      a `ClippedGrad`.  Calling it returns the sum, or a pair of the sum and an `Aux` if `has_aux`, `return_values` or `return_grad_norms`
      is set.  It accepts `is_padding_example=`, an array of bools: the gradients of these examples count as 0.

    Examples:
      >>> loss = lambda w, x: (x @ w).sum()
      >>> clipped_grad(loss, l2_clip_norm=1.0)(jnp.zeros(2), jnp.array([[3.0, 4.0], [0.0, 1.0]]))
      Array([0.6, 1.8], dtype=float32)

    Raises:
      TypeError: an argument has the wrong type; a parameter is not floating-point; `fun` does not return a real scalar for an example.
      ValueError: `l2_clip_norm` is negative; `normalize_by` is not positive; `argnums` and `batch_argnums` overlap or are negative; the
        batch arguments have different numbers of examples.

    Warns:
      UserWarning: an array that is not in `batch_argnums` is as long as the batch.
    """
    flags = dict(rescale_to_unit_norm=rescale_to_unit_norm, return_values=return_values, return_grad_norms=return_grad_norms)
    refuse_traced("clipped_grad", **flags, nan_safe=nan_safe)
    for name, given, wanted in (
        ("l2_clip_norm", l2_clip_norm, numbers.Real | jax.Array | np.ndarray),
        ("normalize_by", normalize_by, numbers.Real),
    ):
        if not isinstance(given, wanted) or isinstance(given, bool):
            raise TypeError(f"clipped_grad: {name} is {format_value(given)}, want a number")
    if shape := jnp.shape(l2_clip_norm):
        raise TypeError(f"clipped_grad: l2_clip_norm has the shape {shape}, want a number")
    if isinstance(l2_clip_norm, numbers.Real) and not l2_clip_norm >= 0:
        raise ValueError(f"clipped_grad: l2_clip_norm is {format_value(l2_clip_norm)}, want at least 0")
    if not normalize_by > 0:
        raise ValueError(f"clipped_grad: normalize_by is {normalize_by}, want a positive number")
    function = Function("clipped_grad", fun, argnums, has_aux, batch_argnums, keep_batch_dim, prng_argnum)

    @jax.jit
    def compiled(args, padding, clip):
        size, batch = function.batched(args)
        if padding is None:
            padding = batch.zeros(bool)
        elif padding.shape != (size,) or padding.dtype != bool:
            raise ValueError(f"clipped_grad: is_padding_example is {format_value(padding)}, want bool[{size}], one for each example")
        if size == 0:  # as Poisson sampling may draw
            values, aux = jax.vmap(batch.loss, (None, 0))(batch.parameters, batch.examples)
            none = tuple(jax.tree.map(jnp.zeros_like, args[i]) for i in function.parameters)
            return none[0] if isinstance(function.argnums, int) else none, values, batch.zeros(batch.dtype), aux
        traced = batch.traced()
        values, aux, squares, weighted = traced.pass_backwards(for_sum=True)
        norms = jnp.sqrt(squares)
        scale = functools.partial(_scale, clip=jnp.maximum(clip, 0).astype(norms.dtype), unit=rescale_to_unit_norm)

        total = weighted(jnp.where(padding, 0, scale(norms)))
        if nan_safe:  # outside of the branch, since XLA computes convolutions inside of one in plain loops on CPUs
            finite = jnp.all(jnp.isfinite(norms))
            total = lax.cond(finite, lambda: total, lambda: _one_by_one(batch, padding, scale, norms.dtype))
        total = jax.vjp(batch.varying, tuple(args[i] for i in function.parameters))[1](total)[0]  # adds up over devices in a shard_map
        total = jax.tree.map(lambda g: g / jnp.asarray(normalize_by, g.dtype), total) if normalize_by != 1 else total
        total = total[0] if isinstance(function.argnums, int) else total
        return total, values, norms, aux

    def clipped(args, padding):
        total, values, norms, aux = compiled(args, padding, l2_clip_norm)
        if not (has_aux or return_values or return_grad_norms):
            return total
        return total, Aux(values if return_values else None, norms if return_grad_norms else None, aux if has_aux else None)

    return ClippedGrad(clipped, (1.0 if rescale_to_unit_norm else l2_clip_norm) / normalize_by)


def _scale(norms: jax.Array, *, clip: jax.Array, unit: bool) -> jax.Array:
    """Return what to multiply gradients by: 0 if the norm is a NaN, or if a gradient of zero is clipped to 0."""
    scale = jnp.minimum(1, clip / norms)
    if unit:
        scale = jnp.where(clip > 0, scale / clip, 1 / norms)
    return jnp.where(jnp.isfinite(scale), scale, 0)


def _one_by_one(batch: Batch, padding: jax.Array, scale: Callable, dtype: Any) -> tuple:
    """The sum of the gradients, which are made for a few examples at a time, and in which infinities and NaNs count as 0."""
    steps, part = parts((batch.examples, padding), 1, 0)

    def gradient(example, is_padding):
        gradients = jax.grad(batch.loss, has_aux=True)(batch.parameters, example)[0]
        gradients = jax.tree.map(lambda g: jnp.where(jnp.isfinite(g), g, 0), gradients)
        norm = jnp.sqrt(sum(squared(g, dtype) for g in jax.tree.leaves(gradients)))
        factor = jnp.where(is_padding, 0, scale(norm))
        return jax.tree.map(lambda g: factor.astype(g.dtype) * g, gradients)

    def step(total, i):
        return jax.tree.map(lambda x, g: x + g.sum(0), total, jax.vmap(gradient)(*part(i))), None

    start = batch.varying(jax.tree.map(jnp.zeros_like, batch.parameters))
    return lax.scan(step, start, jnp.arange(steps))[0]
