"""The callables that a user's declarations give: bilinear operations and those with a reference, called like functions.

`jaxext.extend` declares them, and registers their implementations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxext.core.checks import refuse_keys
from jaxext.core.form import Form, dimension_numbers
from jaxext.core.reference import Declaration
from jaxext.core.static import Static
from jaxext.extend import declarations
from jaxext.lax.dispatch import dot_general_params, named, sharding_in_types


@dataclasses.dataclass(frozen=True, repr=False)
class Bilinear:
    """A bilinear operation made by `define`.  Call it like a function."""

    _form: Form

    linear: ClassVar = (0, 1)  # the operands in each of which it is linear; `jaxext.testing.check_op` reads it

    @property
    def __name__(self) -> str:  # jax.jit names the program after it
        return self._form.name

    def __repr__(self) -> str:
        first, second, result = (f"{slot}[{' '.join(labels)}]" for slot, labels in self._form.slots.items())
        return f"{self._form.name}: {first}, {second} -> {result}"

    def __call__(
        self,
        first: jax.Array | np.ndarray,
        second: jax.Array | np.ndarray,
        /,
        *,
        implementation: str | None = None,
        precision: lax.PrecisionLike = None,
        preferred_element_type: jax.typing.DTypeLike | None = None,
        out_sharding: NamedSharding | P | None = None,
        **ranks: int,
    ) -> jax.Array:
        """Return the sum of products over the labels that both operands have and the result lacks.

        All JAX transformations apply, in any order: jit, grad, jvp, vmap over any axes, shardings, shard_map, pmap, export.

        Args:
          first, second: arrays with the axes of the first and the second slot, in the order of the labels.  They are promoted to a common
            dtype as in jnp, unless `preferred_element_type` is given.
          implementation: an implementation's name, also for derivatives.  None selects one.
          precision: as in `jax.lax.dot_general`.
          preferred_element_type: dtype of the result.  Defaults to the dtype of the operands.
          out_sharding: sharding of the result on an explicit mesh, if the operands leave it ambiguous.
          **ranks: the number of axes of a label in these arrays, such as `B=0` for none.  Defaults to 1.

        Returns:
          an array with the axes of the third slot.

        Raises:
          TypeError: an operand is not an array, or does not match its labels or the other operand; `out_sharding` is not a sharding.
          ValueError: a label or the implementation is unknown.
          NotImplementedError: the named implementation does not support this call.  Raised at lowering.

        Examples:
          >>> channelwise = define("channelwise", x="B N K C", w="B K M C", y="B N M C")
          >>> channelwise(jnp.ones((5, 3, 64)), jnp.ones((3, 7, 64)), B=0).shape
          (5, 7, 64)
        """
        form = self._form
        by = named(implementation, form.name, form.family)
        rank = declarations.ranks(form, ranks)
        operands = declarations.operands(form, dict(zip(form.slots, (first, second), strict=False)), rank)
        refuse_keys(form.name, operands)
        if preferred_element_type is None:
            dtype = jnp.result_type(first, second)
            operands = {slot: jnp.asarray(x, dtype) for slot, x in operands.items()}
        axes = [form.axes(slot, rank) for slot in form.slots]
        said = dot_general_params(operands.values(), dimension_numbers(*axes), precision, preferred_element_type)
        sharding = sharding_in_types(form.name, out_sharding, len(axes[-1]))
        return form.bind(list(form.slots)[-1], operands, Static(ranks=rank, implementation=by, out_sharding=sharding, **said))

    def independent_axes(self, **keywords: Any) -> dict[str, tuple[tuple[int | None, ...], tuple[int | None, ...]]]:
        """Return the axes along which a call with these keywords can be split without a sum over devices.

        The result maps an axis to its positions in the operands and in the result, None where it is missing.  `jaxext.testing.check_op`
        reads it.
        """
        form = self._form
        rank = declarations.ranks(form, {label: keywords[label] for label in form.free if label in keywords})
        *operands, result = form.slots
        return form.independent(operands, [result], rank)


@dataclasses.dataclass(frozen=True, repr=False)
class Declared:
    """An operation made by `operation`.  Call it like a function."""

    _declaration: Declaration

    @property
    def __name__(self) -> str:
        return self._declaration.name

    def __repr__(self) -> str:
        declared = self._declaration
        operands, results = (
            ", ".join(f"{name}[{' '.join(of)}]" for name, of in some.items()) for some in (declared.inputs, declared.results)
        )
        return f"{declared.name}: {operands} -> {results}"

    @property
    def backward(self) -> Declared:
        """The operation that computes the cotangents d_<operand>, in the order of the differentiable operands.

        Its operands are those of this operation, all results including the saved ones, and the cotangents d_<result>.  If you register a
        kernel for it, reverse mode uses it.  Its reference is the derivative of this operation's reference.

        Raises:
          AttributeError: this operation is a `backward` itself, whose derivative is always its reference's, or it has no derivative.
        """
        declared = self._declaration
        if declared.unread or not (declared.differentiable and declared.given):
            why = "its derivative is its reference's" if declared.unread else "all its operands or all its results are constant"
            raise AttributeError(f"{declared.name} has no backward: {why}")
        return Declared(declared.backward)

    def __call__(
        self, *arrays: jax.Array | np.ndarray, implementation: str | None = None, ranks: Mapping[str, int] | None = None, **static
    ) -> Any:
        """Return the result, or a tuple of several, without the saved ones.

        All JAX transformations apply, in any order, except `jax.linear_transpose`.

        Args:
          *arrays: the operands, with the axes of their labels.
          implementation: name of an implementation.  Reverse mode uses the implementation of `backward` with this name, or the reference
            if there is none.  None selects automatically.
          ranks: the number of axes of independent labels in these arrays, if not 1.
          **static: further keywords of the reference: numbers, strings and other hashable values.

        Raises:
          TypeError: an operand is not an array, does not match its labels or the others, or is neither floating-point nor constant; a
            keyword is not hashable; the reference returns other results than declared.
          ValueError: a label or the implementation is unknown, or the reference couples the elements of a label that is not in
            `unsharded`.
          NotImplementedError: the named implementation does not support this call.  Raised at lowering, by vmap of an operation that has
            no independent label, or by a call whose reference closes over a traced value.
        """
        declared, form = self._declaration, self._declaration.operation
        by = named(implementation, form.name, form.family)
        rank = declarations.ranks(form, {} if ranks is None else ranks)
        operands = declarations.operands_of(declared, arrays, rank)
        keywords = declarations.keywords(declared, static)
        dtypes, closed = declared.types(operands, rank, keywords)
        wanted = tuple(name for name in declared.results if name not in declared.saved)
        if closed is not None:
            inlined = declared.inlined(operands, rank, keywords, by, closed)
            results = {name: inlined[name] for name in wanted}
        else:
            results = form.bind(operands, Static(ranks=rank, dtypes=dtypes, implementation=by, options=keywords), wanted=wanted)
        return tuple(results.values()) if len(results) > 1 else results[form.open]

    def independent_axes(
        self, *, ranks: Mapping[str, int] | None = None, **keywords: Any
    ) -> dict[str, tuple[tuple[int | None, ...], tuple[int | None, ...]]]:
        """Return the axes along which a call with these keywords can be split over devices: those of labels that are not `unsharded`.

        The result maps an axis to its positions in the operands and in the results, None where it is missing.  `jaxext.testing.check_op`
        reads it.
        """
        del keywords  # none changes it
        declared, form = self._declaration, self._declaration.operation
        rank = declarations.ranks(form, {} if ranks is None else ranks)
        results = [name for name in declared.results if name not in declared.saved]
        return form.independent(list(declared.inputs), results, rank, form.unsplit_axes(rank))
