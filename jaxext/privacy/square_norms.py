"""What an example contributes to the squared norm of a gradient, where a parameter meets it: three ways, for one example.

- The Gram form of a product (`products`) or of looking up rows (`lookups`) does not make the gradient.
- The gradient of a product is made and squared if that is cheaper.  As for Gram matrices, examples are taken a few at a time, so that
  what is made of them is no larger than one array of the layer.
- The gradient of any other operation is made by its transpose: of all examples at once if it is small, as that of a bias is.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun

from jaxext._compat import evaluated
from jaxext.privacy.lookups import lookup_of
from jaxext.privacy.products import product_of, squared


@dataclasses.dataclass(frozen=True)
class Way:
    """How an operation's contribution is computed.

    Attributes:
      name: "gram", "gradient", or "stored".
      rows: of a Gram matrix.
      at_once: whether of all examples at once.
      contribution: the squared norm, from residuals and cotangents.
      gradients: of the values that meet the example, from the same.
      residuals: what is kept for them.
    """

    name: str
    rows: int = 0
    at_once: bool = True
    contribution: Callable[..., jax.Array] | None = None
    gradients: Callable[..., Sequence[jax.Array]] | None = None
    residuals: Any = None

    @classmethod
    def stored(cls) -> Way:
        return cls("stored")

    def __str__(self) -> str:
        if self.name == "gram":
            told = "|x| |y|" if self.rows == 1 else f"Gram form of {self.rows} rows"
        else:
            told = "its gradient"
        return told + ("" if self.at_once else ", of a few examples at a time")

    def tap(
        self, results: list[jax.Array], total: jax.Array, zeros: Sequence | None, kept: list | None, *, summed: bool
    ) -> list[jax.Array]:
        """The results.  Backwards, `total` receives the contribution, if `summed`; `zeros` receive the gradients, and `kept` the cotangents
        of the results, unless they are None."""
        assert self.contribution is not None and self.gradients is not None
        contribution, gradients = self.contribution, self.gradients
        dtype = total.dtype

        def backward(residuals, cotangents):
            square = contribution(residuals, cotangents).astype(dtype) if summed else None
            found = None if zeros is None else [*gradients(residuals, cotangents)]
            return cotangents, square, found, None if kept is None else cotangents, None

        tap = jax.custom_vjp(lambda results, total, zeros, kept, residuals: _of_each(results, total))
        tap.defvjp(lambda results, total, zeros, kept, residuals: (_of_each(results, total), residuals), backward)
        return tap(results, total, None if zeros is None else [*zeros], kept, self.residuals)


@custom_vmap
def _of_each(results: list[jax.Array], total: jax.Array) -> list[jax.Array]:
    """The results, with an axis of examples even if they are the same for all: the tap must see the cotangent of each."""
    return results


@_of_each.def_vmap
def _of_each_of(size, batched, results, total):
    return [y if b else jnp.broadcast_to(y, (size, *y.shape)) for y, b in zip(results, batched[0], strict=True)], [True] * len(results)


@dataclasses.dataclass(frozen=True)
class Meeting:
    """An operation of which some operands are made of parameters; `eqn` is None for the identity."""

    eqn: JaxprEqn | None
    made: tuple[bool, ...]  # of each operand

    def results(self, data: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        """The floating-point ones.  The values are the operands made of parameters."""
        if self.eqn is None:
            return [*values]
        rest, others = iter(values), iter(data)
        results = evaluated(self.eqn, *(next(rest if made else others) for made in self.made))
        return [y for y in results if jnp.issubdtype(y.dtype, jnp.inexact)]

    def gradients(self, data: Sequence[Any], values: Sequence[Any], cotangents: Sequence[Any]) -> Sequence[jax.Array]:
        """Of the values."""
        return jax.vjp(lambda *values: self.results(data, values), *values)[1]([*cotangents])

    def way(self, data, values, leaves, results, dtype, remake: ClosedJaxpr | None) -> Way:
        """The cheapest way to the sum of the squared norms of the leaves' gradients.

        Args:
          data: the operands that depend on the example.
          values: the others.
          leaves: the parameters that they are made of, and whose squared norms are wanted.
          results: of the operation.
          dtype: of the squared norm.
          remake: makes the values of the leaves.  None: the only value's gradient has the norm of the only leaf's.
        """
        product = None
        if remake is None:
            product = product_of(self.eqn, self.made, [*data, *results], dtype) or lookup_of(self.eqn, self.made, dtype)
        arrays = _size([*data, *results])
        # Gradients of the operands are as large as these, but those of elementwise operations are fused with the sums after them.
        temporary = max(_size(leaves), 0 if _size(values) <= _size(results) else _size(values))
        consts = [] if remake is None else remake.consts
        residuals = [*data], [*values], [*leaves], [*consts]

        def gradients(residuals, cotangents):
            data, values, _, _ = residuals
            return self.gradients(data, values, cotangents)

        def by_gradients(residuals, cotangents):
            data, values, leaves, consts = residuals
            found = self.gradients(data, values, cotangents)
            if remake is not None:
                function = jaxpr_as_fun(ClosedJaxpr(remake.jaxpr, consts))  # its own may be those of a scan's step
                found = jax.vjp(lambda *leaves: function(*leaves), *leaves)[1]([*found])
            return sum((squared(x, dtype) for x in found), jnp.zeros((), dtype))

        if product is None:
            at_once = temporary <= arrays
            how = by_gradients if at_once else in_parts(by_gradients, temporary, arrays)
            return Way("gradient", 0, at_once, how, gradients, residuals)

        def by_product(residuals, cotangents):
            return product(residuals[0][0], *cotangents)

        how = by_product if product.temporary == 0 else in_parts(by_product, product.temporary, arrays)
        return Way("gram" if product.gram else "gradient", product.rows, product.temporary == 0, how, gradients, residuals)


def _size(arrays: Sequence[Any]) -> int:
    return sum(math.prod(x.shape) for x in arrays)


def in_parts(function: Callable, temporary: int, arrays: int) -> Callable:
    """`function`, whose `vmap` computes as many examples at a time as have no more temporary numbers than all examples have in arrays.

    The examples of a part lie far apart, at least one on each device: if devices split the batch, each has as much of every part.
    """
    mapped = custom_vmap(function)

    @mapped.def_vmap
    def rule(size, batched, *args):
        if size == 0:
            return jnp.zeros(0, jax.eval_shape(function, *jax.tree.map(lambda x, b: x[0] if b else x, args, batched)).dtype), True
        part = part_of(size, temporary, arrays)
        steps = size // part
        leaves, tree = jax.tree.flatten(args)
        is_batched = jax.tree.leaves(batched)
        split = [x.reshape(part, steps, *x.shape[1:]) if b else x for x, b in zip(leaves, is_batched, strict=True)]

        def step(i):
            some = [lax.dynamic_index_in_dim(x, i, 1, keepdims=False) if b else x for x, b in zip(split, is_batched, strict=True)]
            return jax.vmap(lambda *x: function(*tree.unflatten(x)), in_axes=[0 if b else None for b in is_batched])(*some)

        return lax.map(step, jnp.arange(steps)).T.reshape(size), True

    return mapped


def part_of(size: int, temporary: int, arrays: int) -> int:
    """How many examples are computed at a time: a divisor of the batch, and a multiple of as many devices as may split it."""
    least = math.gcd(size, jax.device_count())
    # XLA multiplies a matrix by a matrix with all cores of a CPU, but a batch of them in a plain loop.
    most = least if jax.default_backend() == "cpu" else max(least, size * arrays // max(temporary, 1))
    return max(n for n in range(least, min(most, size) + 1, least) if size % n == 0)
