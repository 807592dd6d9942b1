"""The losses of a batch with taps, and the norms of the gradients of its examples: what all functions of this package have in common."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxext import _compat
from jaxext._messages import depth_of_the_user, format_value, refuse_traced
from jaxext.core import partition
from jaxext.privacy.gram_forms import squared
from jaxext.privacy.taps import Met, Taps, used_often


@dataclasses.dataclass
class Function:
    """A loss of one example, and which of its arguments are what.

    Attributes:
      asked_by: the public function, for messages.
      fun, argnums, has_aux, batch_argnums, keep_batch_dim, prng_argnum: as in `clipped_grad`; sequences become tuples.
      parameters: `argnums` as a tuple.
      mapped: of the arguments that differ between examples.
    """

    asked_by: str
    fun: Callable
    argnums: Any
    has_aux: bool
    batch_argnums: Any
    keep_batch_dim: bool
    prng_argnum: int | None

    def __post_init__(self):
        refuse_traced(self.asked_by, has_aux=self.has_aux, keep_batch_dim=self.keep_batch_dim)
        if not callable(self.fun):
            raise TypeError(f"{self.asked_by}: fun is {format_value(self.fun)}, want a function")
        argnums, batch, prng = given = self.argnums, self.batch_argnums, self.prng_argnum
        for name, numbers in (("argnums", argnums), ("batch_argnums", batch)):
            if not all(isinstance(n, int) for n in (numbers if isinstance(numbers, Sequence) else (numbers,))):
                raise TypeError(f"{self.asked_by}: {name} is {format_value(numbers)}, want an int or a sequence of ints")
        if not isinstance(prng, int | None):
            raise TypeError(f"{self.asked_by}: prng_argnum is {format_value(prng)}, want an int or None")
        self.parameters, self.batch_argnums = ((n,) if isinstance(n, int) else tuple(n) for n in (argnums, batch))
        self.argnums = argnums if isinstance(argnums, int) else self.parameters
        self.mapped = self.batch_argnums if prng is None else (*self.batch_argnums, prng)
        everything = (*self.parameters, *self.mapped)
        if not self.parameters or not self.batch_argnums or len({*everything}) < len(everything) or min(everything) < 0:
            first, second, third = map(format_value, given)
            got = f"argnums is {first}, batch_argnums is {second} and prng_argnum is {third}"
            raise ValueError(f"{self.asked_by}: {got}, want different ints of at least 0, one or more in argnums and in batch_argnums")

    def batch_size(self, args: Sequence[Any]) -> int:
        """The number of examples, after the arguments were checked."""
        last = max(*self.parameters, *self.mapped)
        if len(args) <= last:
            numbers = f"argnums is {self.argnums}, batch_argnums is {self.batch_argnums} and prng_argnum is {self.prng_argnum}"
            raise ValueError(f"{self.asked_by}: got {len(args)} arguments, want one with the number {last}: {numbers}")

        def named(numbers: Sequence[int]) -> list[tuple[str, Any]]:
            found = ((i, *leaf) for i in numbers for leaf in jax.tree_util.tree_leaves_with_path(args[i]))
            return [(f"argument {i}{jax.tree_util.keystr(path)}", leaf) for i, path, leaf in found]

        for name, leaf in named(self.parameters):
            if not jnp.issubdtype(dtype := jnp.result_type(leaf), jnp.inexact):
                raise TypeError(f"{self.asked_by}: {name} is a parameter of dtype {dtype}, want floating-point numbers")
        sizes: dict[str, int] = {}
        for name, leaf in named(self.batch_argnums):
            if not jnp.shape(leaf):
                raise ValueError(f"{self.asked_by}: {name} is a scalar, want a first axis of examples")
            sizes[name] = jnp.shape(leaf)[0]
        if len({*sizes.values()}) != 1:
            got = ", ".join(f"{size} in {name}" for name, size in sizes.items()) or "no array"
            raise ValueError(f"{self.asked_by}: batch_argnums is {self.batch_argnums}, with examples {got}: want one number of examples")
        size = next(iter(sizes.values()))
        self._warn_of_forgotten(args, size)
        return size

    def _warn_of_forgotten(self, args: Sequence[Any], size: int) -> None:
        """Warn of arrays that look like examples, such as the labels of a loss of (params, x, y), but are not split.

        Containers of arrays are rather parameters or states that are not trained, whose sizes may be that of a batch.
        """
        for i, x in enumerate(args):
            if i not in (*self.parameters, *self.mapped) and isinstance(x, jax.Array | np.ndarray) and x.ndim and x.shape[0] == size > 1:
                all_of_them = tuple(sorted((*self.batch_argnums, i)))
                warnings.warn(
                    f"{self.asked_by}: argument {i} is {format_value(x)}, as long as the batch, and batch_argnums is"
                    f" {format_value(self.batch_argnums)}, so each example sees all of it: if it belongs to the examples, want"
                    f" batch_argnums={all_of_them}; if not, close over it",
                    stacklevel=depth_of_the_user(),
                )

    def batched(self, args: Sequence[Any]) -> tuple[int, Batch]:
        """The number of examples and the arguments in parts."""
        size = self.batch_size(args)
        args = [jax.tree.map(jnp.asarray, x) for x in args]
        if self.prng_argnum is not None:
            args[self.prng_argnum] = jax.random.split(args[self.prng_argnum], size)
        if self.keep_batch_dim:
            for i in self.batch_argnums:
                args[i] = jax.tree.map(lambda x: jnp.expand_dims(x, 1), args[i])
        parameters: tuple = tuple(args[i] for i in self.parameters)
        examples = tuple(args[i] for i in self.mapped)
        others = tuple(x for i, x in enumerate(args) if i not in (*self.parameters, *self.mapped))
        batch = Batch(self, parameters, examples, others)
        return size, dataclasses.replace(batch, parameters=batch.varying(parameters))


@dataclasses.dataclass(frozen=True)
class Batch:
    """A function's arguments: parameters, examples along a first axis, and others."""

    function: Function
    parameters: tuple
    examples: tuple
    others: tuple

    def loss(self, parameters: tuple, example: tuple) -> tuple[jax.Array, Any]:
        """Return the loss of one example, with its auxiliary data."""
        function = self.function
        args = dict(zip((*function.parameters, *function.mapped), (*parameters, *example), strict=True))
        others = iter(self.others)
        count = len(args) + len(self.others)
        result = function.fun(*(args[i] if i in args else next(others) for i in range(count)))
        if function.has_aux and not (isinstance(result, tuple) and len(result) == 2):
            raise TypeError(f"{function.asked_by}: fun returned {format_value(result)}, want a pair of loss and aux, since has_aux is set")
        value, aux = result if function.has_aux else (result, ())
        if not isinstance(value, _NUMBER) or jnp.shape(value) != () or not jnp.issubdtype(jnp.result_type(value), jnp.floating):
            raise TypeError(f"{function.asked_by}: fun returned {format_value(value)} for one example, want a real scalar, its loss")
        return jnp.asarray(value), aux

    @property
    def dtype(self) -> Any:
        """The dtype of norms, and of their squares: at least float32."""
        wide = any(jnp.finfo(leaf.dtype).bits == 64 for leaf in jax.tree.leaves(self.parameters))
        return jnp.dtype(jnp.float64 if wide else jnp.float32)

    def zeros(self, dtype: Any, like: Any = 0.0) -> jax.Array:
        """Return zeros like an array for each example: the first axis is sharded as the examples, the others as the array."""
        leaves = jax.tree.leaves(self.examples)
        example_type, array_type = map(jax.typeof, (leaves[0], like))
        sharding = partition.explicit(example_type)
        sharding = None if sharding is None else NamedSharding(sharding.mesh, P(sharding.spec[0], *array_type.sharding.spec))
        zeros = jnp.zeros((leaves[0].shape[0], *array_type.shape), dtype, device=sharding)
        return _compat.align_varying(zeros, *leaves)[0]

    def varying(self, parameters: tuple) -> tuple:
        """Parameters that vary over the manual axes of a `shard_map` as the examples do, so that gradients are those of this device."""
        leaves, tree = jax.tree.flatten(parameters)
        return tree.unflatten(_compat.align_varying(*leaves, *jax.tree.leaves(self.examples))[: len(leaves)])

    def traced(self) -> Traced:
        found: list[Traced] = []

        def trace(example):
            closed, results = jax.make_jaxpr(self.loss, return_shape=True)(self.parameters, example)
            found.append(Traced(self, closed, jax.tree.structure(results)))
            return ()

        jax.vmap(trace)(self.examples)
        return found[0]


_NUMBER = jax.Array | np.ndarray | np.generic | float


@dataclasses.dataclass(frozen=True)
class Traced:
    """A batch, and the loss of one example as a jaxpr."""

    batch: Batch
    closed: ClosedJaxpr
    results: Any  # the structure of loss and aux

    @property
    def leaves(self) -> list[Any]:
        return jax.tree.leaves(self.batch.parameters)

    @functools.cached_property
    def probed(self) -> Taps:
        """Taps that saw where parameters meet the example.  Of their arrays only the types may be used."""
        found: list[Taps] = []

        def tap(example):
            taps = Taps(jnp.zeros((), self.batch.dtype), {})
            taps.run(self.closed, self.leaves, jax.tree.leaves(example))
            found.append(taps)
            return ()

        jax.eval_shape(jax.vmap(tap), self.batch.examples)
        return found[0]

    @functools.cached_property
    def often(self) -> set[int]:
        """The roots of parameters that are used more than once, whose gradients are stored for each example."""
        return used_often(self.probed.uses)

    @functools.cached_property
    def kept(self) -> set[int]:
        """The roots of others whose gradients are stored, since these are smaller than what the weighted sum would be made of."""
        return set() if self.probed.nested else {use.root for use in self.probed.uses if use.way and use.way.small} - self.often

    def pass_backwards(self, *, for_sum: bool) -> tuple[jax.Array, Any, jax.Array, Callable[[jax.Array], tuple]]:
        """The losses, the auxiliary data and the squared norms of all examples, and the gradient of a weighted sum of the losses.

        The cotangent of a weighted loss is the weighted cotangent of the loss.  So the gradient is that of the meetings alone, without
        another pass through the network, unless they are inside of a scan or of a checkpoint, out of which cotangents are not kept.
        Gradients that are stored are added up.  Without `for_sum`, small gradients and cotangents are not stored for this.
        """
        zeros, probed = self.batch.zeros, self.probed
        roots = self.often | (self.kept if for_sum else set())
        stored = {root: zeros(leaf.dtype, leaf) for root, leaf in enumerate(self.leaves) if root in roots}
        again = [any(leaf.root not in stored for leaf in met.leaves) for met in probed.meetings]
        probes = [[zeros(y.dtype, y) for y in met.results] if a else None for met, a in zip(probed.meetings, again, strict=True)]
        met: list[Met] = []

        def tapped(parameters, total, stored, probes, example):
            taps = Taps(total, stored, probes)
            value, *aux = taps.run(self.closed, jax.tree.leaves(parameters), jax.tree.leaves(example))
            met[:] = taps.meetings
            data = None if probes is None else [each.example_data if a else None for each, a in zip(met, again, strict=True)]
            return value, (aux, data)

        def losses(parameters, total, stored, probes):
            return jax.vmap(tapped, in_axes=(None, 0, 0, 0, 0))(parameters, total, stored, probes, self.batch.examples)

        given = self.batch.parameters, zeros(self.batch.dtype), stored, probes if for_sum and not probed.nested else None
        values, pull, (aux, data) = jax.vjp(losses, *given, has_aux=True)
        _, squares, gradients, cotangents = pull(zeros(values.dtype) + 1)
        for gradient in gradients.values():
            squares += jax.vmap(functools.partial(squared, dtype=self.batch.dtype))(gradient)

        def weighted(weights: jax.Array) -> tuple:
            def results(parameters):
                leaves = jax.tree.leaves(parameters)

                def one(data, _):
                    return [each.again(leaves, some) if a else None for each, some, a in zip(met, data, again, strict=True)]

                return jax.vmap(one)(data, weights)

            def scaled(found):
                return jax.vmap(lambda weight, found: jax.tree.map(lambda y: weight.astype(y.dtype) * y, found))(weights, found)

            if data is None:
                (total,) = pull(scaled(zeros(values.dtype) + 1))[:1]
            else:
                (total,) = jax.vjp(results, self.batch.parameters)[1](scaled(cotangents))
            leaves, tree = jax.tree.flatten(total)
            for root, each in gradients.items():  # the sum is the transpose of an outer product: a dot, and sharded as the parameter is
                outer = functools.partial(jnp.tensordot, weights.astype(each.dtype), axes=0, precision="highest")
                (leaves[root],) = jax.vjp(outer, self.leaves[root])[1](each)
            return tree.unflatten(leaves)

        return values, jax.tree.unflatten(self.results, [values, *aux])[1], squares, weighted
