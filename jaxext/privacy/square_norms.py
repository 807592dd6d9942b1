"""The contribution of an example to the squared norm of a gradient, where a parameter meets it: two ways, for one example.

- The Gram form (`gram_forms`) of a product or of looking up rows does not make the gradient.
- The gradient is made by the operation's transpose, and squared: of all examples at once if it is small, as that of a bias is.

Some arrays are made for a few examples at a time, so that they are no larger than one array of the layer: Gram matrices, the gradients of
products, and other large gradients.
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
from jaxext.privacy.gram_forms import gram_of, is_product, squared


@dataclasses.dataclass(frozen=True)
class Way:
    """The way in which an operation's contribution is computed.

    Attributes:
      rows: of a Gram matrix; 0: the gradient is made.
      at_once: whether of all examples at once.
      small: whether the gradients are made, and no larger than what they are made of.
      contribution: the squared norm, from residuals and cotangents.
      gradients: of the values that meet the example, from the same.
      residuals: what is kept for them.
    """

    rows: int
    at_once: bool
    small: bool
    contribution: Callable[..., jax.Array]
    gradients: Callable[..., Sequence[jax.Array]]
    residuals: Any

    def __str__(self) -> str:
        form = {0: "its gradient", 1: "|x| |y|"}.get(self.rows, f"Gram form of {self.rows} rows")
        return form if self.at_once else f"{form}, of a few examples at a time"

    def tap(
        self, results: list[jax.Array], total: jax.Array, zeros: Sequence | None, kept: list | None, *, summed: bool
    ) -> list[jax.Array]:
        """The results.  Backwards, `total` receives the contribution, if `summed`; `zeros` receive the gradients, and `kept` the cotangents
        of the results, unless they are None."""
        contribution, gradients, dtype = self.contribution, self.gradients, total.dtype

        def backward(residuals, cotangents):
            square = contribution(residuals, cotangents).astype(dtype) if summed else None
            found = None if zeros is None else [*gradients(residuals, cotangents)]
            return cotangents, square, found, None if kept is None else cotangents, None

        tap = jax.custom_vjp(lambda results, total, zeros, kept, residuals: _per_example(results, total))
        tap.defvjp(lambda results, total, zeros, kept, residuals: (_per_example(results, total), residuals), backward)
        return tap(results, total, None if zeros is None else [*zeros], kept, self.residuals)


@custom_vmap
def _per_example(results: list[jax.Array], total: jax.Array) -> list[jax.Array]:
    """The results, with an axis of examples even if they are the same for all: the tap must see the cotangent of each."""
    return results


@_per_example.def_vmap
def _per_example_rule(size, batched, results, total):
    return [y if b else jnp.broadcast_to(y, (size, *y.shape)) for y, b in zip(results, batched[0], strict=True)], [True] * len(results)


@dataclasses.dataclass(frozen=True)
class Meeting:
    """An operation of which some operands are made of parameters; `eqn` is None for the identity."""

    eqn: JaxprEqn | None
    derived: tuple[bool, ...]  # of each operand

    def results(self, data: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        """The floating-point ones.  The values are the operands made of parameters."""
        if self.eqn is None:
            return [*values]
        rest, others = iter(values), iter(data)
        results = evaluated(self.eqn, *(next(rest if derived else others) for derived in self.derived))
        return [y for y in results if jnp.issubdtype(y.dtype, jnp.inexact)]

    def gradients(self, data: Sequence[Any], values: Sequence[Any], cotangents: Sequence[Any]) -> Sequence[jax.Array]:
        """Return the gradients of the values."""
        return jax.vjp(lambda *values: self.results(data, values), *values)[1]([*cotangents])

    def way(self, data, values, leaves, results, dtype, recompute: ClosedJaxpr | None) -> Way:
        """The cheapest way to the sum of the squared norms of the leaves' gradients.

        Args:
          data: the operands that depend on the example.
          values: the others.
          leaves: the parameters that they are made of, and whose squared norms are wanted.
          results: of the operation.
          dtype: of the squared norm.
          recompute: makes the values of the leaves.  None: the only value's gradient has the norm of the only leaf's.
        """
        arrays = _size([*data, *results])
        consts = [] if recompute is None else recompute.consts
        residuals = [*data], [*values], [*leaves], [*consts]

        def gradients(residuals, cotangents):
            data, values, _, _ = residuals
            return self.gradients(data, values, cotangents)

        def by_gradients(residuals, cotangents):
            found, (_, _, leaves, consts) = gradients(residuals, cotangents), residuals
            if recompute is not None:
                function = jaxpr_as_fun(ClosedJaxpr(recompute.jaxpr, consts))  # its own may be those of a scan's step
                found = jax.vjp(lambda *leaves: function(*leaves), *leaves)[1]([*found])
            return sum((squared(x, dtype) for x in found), jnp.zeros((), dtype))

        # Gradients of the operands are as large as these, but those of elementwise operations are fused with the sums after them.
        temporary = max(_size(leaves), 0 if _size(values) <= _size(results) else _size(values))
        at_once = temporary <= arrays and not is_product(self.eqn)
        if not at_once:
            by_gradients, gradients = (in_parts(function, temporary, arrays) for function in (by_gradients, gradients))
        gram = gram_of(self.eqn, self.derived, [*data, *results], dtype) if recompute is None else None
        if gram is None:
            return Way(0, at_once, _size(leaves) <= arrays, by_gradients, gradients, residuals)

        def by_gram(residuals, cotangents):
            return gram.square(residuals[0][0], *cotangents)

        how = by_gram if gram.temporary == 0 else in_parts(by_gram, gram.temporary, arrays)
        return Way(gram.rows, gram.temporary == 0, False, how, gradients, residuals)


def _size(arrays: Sequence[Any]) -> int:
    return sum(math.prod(x.shape) for x in arrays)


def in_parts(function: Callable, temporary: int, arrays: int) -> Callable:
    """`function`, whose `vmap` computes as many examples at a time as have no more temporary numbers than all examples have in arrays.

    The examples of a part lie far apart, at least one on each device: if devices split the batch, each has as much of every part.
    """
    mapped = custom_vmap(function)

    @mapped.def_vmap
    def rule(size, batched, *args):
        leaves, tree = jax.tree.flatten(args)
        is_batched = jax.tree.leaves(batched)
        examples = [x for x, b in zip(leaves, is_batched, strict=True) if b]

        @jax.vmap
        def some(examples):
            rest = iter(examples)
            return function(*tree.unflatten([next(rest) if b else x for x, b in zip(leaves, is_batched, strict=True)]))

        if size == 0:
            results = jax.tree.map(lambda y: jnp.zeros(y.shape, y.dtype), jax.eval_shape(some, examples))
        else:
            steps, part = parts(examples, temporary, arrays)
            results = lax.map(lambda i: some(part(i)), jnp.arange(steps))
            results = jax.tree.map(lambda y: y.swapaxes(0, 1).reshape(size, *y.shape[2:]), results)
        return results, jax.tree.map(lambda y: True, results)

    return mapped


def parts(examples: Any, temporary: int, arrays: int) -> tuple[int, Callable[[Any], Any]]:
    """The number of parts of a batch, and a function that returns the i-th."""
    leaves = jax.tree.leaves(examples)
    size = leaves[0].shape[0]
    part = part_of(size, devices_that_split(leaves), temporary, arrays)
    split = jax.tree.map(lambda x: x.reshape(part, size // part, *x.shape[1:]), examples)
    return size // part, lambda i: jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, 1, keepdims=False), split)


def part_of(size: int, devices: int, temporary: int, arrays: int) -> int:
    """Return how many examples are computed at a time: a divisor of the batch, and a multiple of as many devices as may split it."""
    least = math.gcd(size, devices)
    # XLA multiplies a matrix by a matrix with all cores of a CPU, but a batch of them in a plain loop.
    most = least if jax.default_backend() == "cpu" else max(least, size * arrays // max(temporary, 1))
    return max(n for n in range(least, min(most, size) + 1, least) if size % n == 0)


def devices_that_split(arrays: Sequence[jax.Array]) -> int:
    """Return how many devices may split the first axis of these arrays: all of the process, if their types and the context have no mesh."""
    shardings = [jax.typeof(x).sharding for x in arrays]
    mesh = next((sharding.mesh for sharding in shardings if not sharding.mesh.empty), jax.sharding.get_abstract_mesh())
    if mesh.empty:
        return jax.device_count()
    specs = [spec for sharding in shardings for spec in sharding.spec[:1] if spec is not None]
    explicit = {axis for spec in specs for axis in (spec if isinstance(spec, tuple) else (spec,))}
    return math.prod(size for axis, size in mesh.shape.items() if axis in explicit or axis in mesh.auto_axes)
