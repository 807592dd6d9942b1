"""Operations that are declared by a reference in jnp: every rule of JAX from their labels and the reference.

The derivative is that of the reference.  If `backward`, the operation that gives the cotangents of the operands, has an implementation of
its own, the transpose of the derivative is that operation instead; then the results that are saved for it are computed, too.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.interpreters import ad

from jaxext._messages import format_value
from jaxext.core import partition
from jaxext.core.call import Call
from jaxext.core.composition import composed
from jaxext.core.coupling import refuse_coupled
from jaxext.core.family import Family, declare, families
from jaxext.core.implementation import Algorithm, Definition
from jaxext.core.operation import Operation, sharded_as
from jaxext.core.static import Static

UNMEASURED = "random operands need not be ones that the operation accepts, such as labels, or saved results that fit the others"


class Reference(Definition):
    name = "xla"  # version None: the reference is the user's code

    def code(self, platform: str) -> str:
        return "reference"

    def candidates(self, call: Call) -> Sequence[Algorithm]:
        return (Algorithm("reference"),)

    def multiplies(self, call: Call) -> str:
        return super().multiplies(call) if len(call.dtypes) > 1 else ""  # a single operand has no other factor

    def run(self, call: Call, config: Algorithm, operands: Mapping[str, jax.Array]) -> Any:
        return composed(call, operands, self.name)


@dataclasses.dataclass(frozen=True)
class Keywords:
    """The static keywords of a call by name; of a tangent also the implementation that was named, which its transpose uses.

    They are part of the key of a program.  Its reference can distinguish 1 from True and from 1.0, or 0.0 from -0.0, which are equal:
    `types` tells them apart.
    """

    items: tuple[tuple[str, Any], ...]
    named: str | None = None
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)  # of the reference
    types: tuple = dataclasses.field(init=False, repr=False)

    def __post_init__(self):
        object.__setattr__(self, "types", tuple(_types(value) for _, value in self.items))

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.items)


def _types(value: Any) -> Any:
    if isinstance(value, tuple):
        return (type(value), *map(_types, value))
    return (type(value), math.copysign(1.0, value)) if isinstance(value, float | np.floating) else type(value)


@dataclasses.dataclass(frozen=True, eq=False)
class Declaration:
    """The declaration that a user makes.

    Attributes:
      reference: a function of the operands, each with one axis for each label, and static keywords.  It gives a tuple of all results.
      inputs, results: name -> labels.  Results include those that are `saved` for the derivative.
      unsharded: the labels in whose elements the reference is not independent.
      believed: labels that are declared independent even where the reference seems to couple their elements.
      constant: the operands and results that are not differentiable.
      unread: the operands that the reference does not read.  Only a `backward` has any: the results, which are for its kernels.
      dropped: the results that no kernel of `backward` reads, and that are not saved for it.  Only a single result can be.
      examples: operands with which a call can be measured, besides random ones, as of `Operation`.  None: it cannot be.
      primal: of a `backward`, the declaration whose derivative it is.
    """

    name: str
    reference: Callable[..., tuple[jax.Array, ...]]
    inputs: Mapping[str, tuple[str, ...]]
    results: Mapping[str, tuple[str, ...]]
    saved: tuple[str, ...] = ()
    unsharded: tuple[str, ...] = ()
    believed: tuple[str, ...] = ()
    constant: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    examples: Callable[[Call], dict[str, jax.Array]] | None = None
    primal: Declaration | None = None

    @property
    def differentiable(self) -> list[str]:
        return [name for name in self.inputs if name not in (*self.constant, *self.unread)]

    @property
    def given(self) -> list[str]:
        """The results that have a derivative: not those that are saved for it."""
        return [name for name in self.results if name not in (*self.saved, *self.constant)]

    @property
    def keywords(self) -> dict[str, Any]:
        """The keywords of the reference, with their defaults, `inspect.Parameter.empty` of those that have none."""
        of = self.primal or self
        try:
            parameters = inspect.signature(of.reference).parameters.values()
        except ValueError:  # it tells none
            return {}
        positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
        named = [*positional[len(of.inputs) :], *(each for each in parameters if each.kind is each.KEYWORD_ONLY)]
        return {each.name: each.default for each in named}

    @property
    def defaults(self) -> dict[str, Any]:
        """The keywords of the reference that have a default."""
        return {name: default for name, default in self.keywords.items() if default is not inspect.Parameter.empty}

    @property
    def kept(self) -> dict[str, tuple[str, ...]]:
        """The results that are operands of `backward`."""
        return {name: labels for name, labels in self.results.items() if name not in self.dropped}

    @functools.cached_property
    def operation(self) -> Operation:
        return self._operation(self.name, self.inputs, self.results, self._results)

    @functools.cached_property
    def backward(self) -> Declaration:
        """The cotangents d_<operand> from operands, results and the cotangents d_<result>."""
        given, differentiable = self.given, self.differentiable

        def reference(*args, **keywords):
            operands, cotangents = args[: len(self.inputs)], args[len(self.inputs) + len(self.kept) :]
            values = dict(zip(self.inputs, operands, strict=True))

            def differentiated(*moved):
                everything = values | dict(zip(differentiable, moved, strict=True))
                results = dict(zip(self.results, self.reference(*everything.values(), **keywords), strict=True))
                return tuple(results[name] for name in given)

            primals, transposed = jax.vjp(differentiated, *(values[name] for name in differentiable))
            return transposed(tuple(ct.astype(y.dtype) for ct, y in zip(cotangents, primals, strict=True)))

        return Declaration(
            name=f"{self.name}_backward",
            reference=reference,
            inputs={**self.inputs, **self.kept, **{f"d_{name}": self.results[name] for name in given}},
            results={f"d_{name}": self.inputs[name] for name in differentiable},
            unsharded=self.unsharded,
            believed=self.believed,
            constant=tuple(name for name in self.constant if name in self.inputs),
            unread=tuple(self.kept),
            examples=self.examples,
            primal=self,
        )

    @functools.cached_property
    def tangent(self) -> Operation:
        """The tangents d_<result>, linear in d_<operand>; its transpose is `backward`."""
        given, differentiable = self.given, self.differentiable
        dots = {f"d_{name}": self.inputs[name] for name in differentiable}

        def results(operands, ranks, static):
            moved = {name: operands[f"d_{name}"] for name in differentiable}
            return {f"d_{name}": y for name, y in self._derivative(operands, moved, ranks, static).items() if name in given}

        inputs = {**self.inputs, **self.kept, **dots}
        operation = self._operation(f"{self.name}_tangent", inputs, {f"d_{name}": self.results[name] for name in given}, results)
        ad.primitive_transposes[operation.primitive] = functools.partial(self._transpose, operation)
        return operation

    def _operation(self, name, inputs, results, function) -> Operation:
        """`function(operands, ranks, keywords)` gives the results in a dict."""
        reference = Reference()

        def composition(operation, product, operands, static, narrow=False):
            implementation = static.implementation
            # Another name than the reference's is given by vmap, where no label can have the mapped axis, and by a kernel for empty arrays.
            if implementation not in (None, reference.name) and not any(0 in x.shape for x in operands.values()):
                reason = "vmap maps an operand or a result that has no independent label, which only the reference computes: name none"
                raise NotImplementedError(f"{name}: implementation {implementation!r} does not support this call: {reason}")
            return function(operands, static.ranks, static.options)

        family = families.get(name) or declare(Family(name, lax_primitive=None, names=name), reference)
        return Operation(
            name=name,
            inputs=inputs,
            results=results,
            composition=composition,
            tangents=self._tangents if name == self.name else functools.partial(_tangents_of, function),
            family=family,
            saved=lambda options: tuple(self.kept) if name == self.name and self.has_backward else (),
            unsharded=self.unsharded,
            examples=self.examples,
            unmeasured="" if self.examples else UNMEASURED,
        )

    def types(self, operands: Mapping[str, jax.Array], ranks: Sequence[int], static: Keywords) -> tuple[tuple, Tracer | None]:
        """The dtypes of all results, and a traced value that the reference closes over, or None.

        Raises:
          TypeError: the reference gives another number of results, or other shapes, than declared.
          ValueError: the reference couples the elements of a label that is not in `unsharded`.
        """
        operation = self.operation
        sizes = operation.sizes(operation.open, [x.shape for x in operands.values()], ranks, None)
        rank = operation.unpack(ranks)
        one = {label: sizes[f"{label}0"] if rank[label] else 1 for label in operation.free}

        def bare_shape(labels):
            return tuple(one[label] for label in labels)

        bare = [jax.ShapeDtypeStruct(bare_shape(labels), operands[name].dtype) for name, labels in self.inputs.items()]
        program, given = jax.make_jaxpr(functools.partial(self.reference, **dict(static.items)), return_shape=True)(*bare)
        shapes, wanted = [getattr(y, "shape", None) for y in given], [bare_shape(labels) for labels in self.results.values()]
        if shapes != wanted:
            raise TypeError(f"{self.name}: the reference returns arrays of the shapes {shapes}, want {wanted} for {list(self.results)}")
        for name, y in zip(self.results, given, strict=True):
            if name in self.given and not jnp.issubdtype(y.dtype, jnp.inexact):
                want = f"want floating-point numbers, or `constant={name!r}` in its declaration"
                raise TypeError(f"{self.name}: the reference returns {name} in {y.dtype}, {want}")
        if (key := (static, *((x.shape, x.dtype) for x in bare))) not in self._uncoupled:
            refuse_coupled(
                self, {label: one[label] for label in operation.free if label not in (*self.unsharded, *self.believed)}, bare, static
            )
            self._uncoupled.add(key)
        return tuple(y.dtype for y in given), next((x for x in program.consts if isinstance(x, Tracer)), None)

    def inlined(self, operands, ranks, static, named, closed: Tracer) -> dict[str, jax.Array]:
        """All results where the reference closes over a traced value: of the primitive, that has neither a derivative nor a value."""
        if named not in (None, Reference.name):
            why = f"{format_value(self.reference)} closes over {format_value(closed)}, a traced value, want it as an operand"
            raise NotImplementedError(f"{self.name}: implementation {named!r} does not support this call: the reference {why}")
        results = self._results(operands, ranks, static)
        return {name: lax.stop_gradient(y) if name in self.constant else y for name, y in results.items()}

    @functools.cached_property
    def _uncoupled(self) -> set:
        """The keywords and operands for which `refuse_coupled` has found nothing."""
        return set()

    @property
    def has_backward(self) -> bool:
        """Return whether `backward` has an implementation besides its reference."""
        return "backward" in vars(self) and len(self.backward.operation.family.implementations) > 1

    def _named(self, named: str | None) -> str | None:
        """The implementation of `backward` where one of this operation is named: the reference if it has none of that name."""
        return named if named in (None, *self.backward.operation.family.names_of_implementations) else Reference.name

    def _results(self, operands, ranks, static) -> dict[str, jax.Array]:
        """All results of the reference, of operands with any number of axes for each independent label."""
        axes = [self.operation.axes(name, ranks) for name in self.inputs]
        args = partition.aligned(axes, [operands[name] for name in self.inputs])
        results = self._mapped(self.operation.unpack(ranks), dict(static.items))(*args)
        return dict(zip(self.results, results, strict=True))

    def _mapped(self, rank: Mapping[str, int], keywords: Mapping[str, Any]) -> Callable:
        label = next((label for label, n in rank.items() if n != 1), None)
        if label is None:
            return functools.partial(self.reference, **keywords)
        inputs, results = ([self._first(label, labels, rank) for labels in of.values()] for of in (self.inputs, self.results))
        if rank[label] > 1:  # a result without the label is a sum over it: only those of a `backward` are
            fewer = self._mapped({**rank, label: rank[label] - 1}, keywords)
            mapped = jax.vmap(fewer, in_axes=tuple(inputs), out_axes=tuple(at or 0 for at in results))

            def mapped_and_summed(*args):
                return tuple(y.sum(0) if at is None else y for y, at in zip(mapped(*partition.alike(args, inputs)), results, strict=True))

            return mapped_and_summed
        single = self._mapped({**rank, label: 1}, keywords)

        def removed(*args):
            given = single(*(x if at is None else lax.expand_dims(x, [at]) for x, at in zip(args, inputs, strict=True)))
            return tuple(y if at is None else lax.squeeze(y, [at]) for y, at in zip(given, results, strict=True))

        return removed

    @staticmethod
    def _first(label: str, labels: Sequence[str], rank: Mapping[str, int]) -> int | None:
        """The position of the first axis of a label."""
        return sum(rank[other] for other in labels[: labels.index(label)]) if label in labels else None

    def _derivative(self, operands, dots, ranks, static) -> dict[str, jax.Array]:
        """The tangents of all inexact results, by the reference."""

        def differentiated(moved):
            results = self._results({**operands, **moved}, ranks, static)
            return {name: y for name, y in results.items() if name not in self.constant and jnp.issubdtype(y.dtype, jnp.inexact)}

        return jax.jvp(differentiated, ({name: operands[name] for name in dots},), (dict(dots),))[1]

    def _tangents(self, operation, operands, results, dots, static: Static) -> dict[str, jax.Array]:
        for name in dots:
            if name in self.constant:
                raise TypeError(f"{self.name}: {name} is not differentiable, want it constant: jax.lax.stop_gradient")
        if not self.has_backward:
            return self._derivative(operands, dots, static.ranks, static.options)
        everything = {name: dots.get(name, jnp.zeros_like(operands[name])) for name in self.differentiable}
        tangent = self.tangent
        dtypes = dict(zip(operation.results, static.dtypes, strict=True))
        of_tangent = static.replace(
            ranks=tangent.pack(operation.unpack(static.ranks)),
            options=dataclasses.replace(static.options, named=static.implementation),
            implementation=None,
            dtypes=tuple(dtypes[name[2:]] for name in tangent.results),
        )
        given = {**operands, **results, **{f"d_{name}": dot for name, dot in everything.items()}}
        moved = tangent.bind(given, of_tangent, wanted=tuple(tangent.results))
        return {name[2:]: dot for name, dot in moved.items()}

    def _transpose(self, tangent, cts, *args, static: Static, wanted):
        operands = dict(zip(tangent.inputs, args, strict=True))
        linear = {name: x.aval for name, x in operands.items() if ad.is_undefined_primal(x)}
        if all(type(ct) is ad.Zero for ct in cts):
            return [ad.Zero(linear[name]) if name in linear else None for name in operands]
        backward = self.backward.operation
        cotangents = dict(zip(wanted, map(ad.instantiate_zeros, cts), strict=True))
        known = {name: x for name, x in operands.items() if name not in linear}
        for name in tangent.results:
            if name not in cotangents:  # nobody wanted this tangent
                cotangents[name] = jnp.zeros_like(known[name[2:]])
        of_backward = static.replace(
            ranks=backward.pack(tangent.unpack(static.ranks)),
            options=dataclasses.replace(static.options, named=None),
            implementation=self._named(static.options.named),
            dtypes=tuple(known[name[2:]].dtype for name in backward.results),
            out_sharding=None,
        )
        gradients = backward.bind({**known, **cotangents}, of_backward, wanted=tuple(backward.results))
        return [sharded_as(gradients[name], linear[name]) if name in linear else None for name in operands]


def _tangents_of(function, operation, operands, results, dots, static: Static):
    """The tangents of the results of `function`, by its own derivative."""

    def differentiated(moved):
        return function({**operands, **moved}, static.ranks, static.options)

    return jax.jvp(differentiated, ({name: operands[name] for name in dots},), (dict(dots),))[1]
