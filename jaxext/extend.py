"""Your own kernels and forms: add an implementation to jaxext's operations, or declare a bilinear operation by its axes.

A *form* is a bilinear operation declared by labels, like an einsum:

    y[b,n,m,c] = Σ_k x[b,n,k,c] w[b,k,m,c]:    define("channelwise", x="B N K C", w="B K M C", y="B N M C")

The labels determine its gradients, its vmaps and its shardings: each is the same sum with another slot left open, or with more axes in a
label.  An implementation therefore computes plain products only (`Call`) and needs no rules for differentiation, vmap or sharding.  Every
form starts with the implementation "xla", which defines it.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxext import ops
from jaxext.backends.xla.xla_matmul import XlaMatmul
from jaxext.families.dispatch import as_dot_general_says, named, sharding_in_types
from jaxext.forms.call import Call, no_kernel
from jaxext.forms.family import Family, declare, families, names_of_implementations
from jaxext.forms.family import register as _register
from jaxext.forms.form import Form, dimension_numbers, owner
from jaxext.forms.form import define as _define
from jaxext.forms.implementation import Algorithm, Implementation, Plan

__all__ = ["Algorithm", "Bilinear", "Call", "Implementation", "Plan", "define", "no_kernel", "register"]

# The forms that `define` declared, by name.
_defined: dict[str, Form] = {}
_OWN = dict(families)  # jaxext's
_OWN_NAMES = set(names_of_implementations())


@dataclasses.dataclass(frozen=True, repr=False)
class Bilinear:
    """A bilinear operation made by `define`.  Call it like a function."""

    _form: Form

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
        """The sum of products over the labels that both operands have and the result lacks.

        All JAX transformations apply, in any order: jit, grad, jvp, vmap over any axes, shardings, shard_map, pmap, export.

        Args:
          first, second: arrays with the axes of the first and the second slot, in the order of the labels.  They are promoted to a common
            dtype as in jnp, unless `preferred_element_type` is given.
          implementation: the name of an implementation, also used for all gradients.  None selects one automatically.
          precision: as for `jax.lax.dot_general`.
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
        implementation = named(implementation, form.name, form.family)
        rank = _ranks(form, ranks)
        operands = _operands(form, (first, second), rank, promote=preferred_element_type is None)
        axes = [form.axes(slot, rank) for slot in form.slots]
        return form.bind(
            list(form.slots)[-1],
            operands,
            ranks=rank,
            window=None,
            **as_dot_general_says(operands.values(), dimension_numbers(*axes), precision, preferred_element_type),
            implementation=implementation,
            out_sharding=sharding_in_types(form.name, out_sharding, len(axes[-1])),
        )


def define(name: str, /, **slots: str) -> Bilinear:
    """Declare a bilinear operation by the labels of its axes.

    result[...] = Σ first[...] second[...], summed over the labels that the result lacks.

    Args:
      name: a unique identifier.  Primitives and profiles append the computed slot, as in "channelwise_y", which must be unique too.
      **slots: the first operand, the second operand and the result, as slot name = labels, separated by spaces, in the order of the axes.
        A label is a word that begins with a capital letter, and occurs in two slots or in all three.  Each pair of slots needs a label of
        its own, and so do all three together, for the axes that vmap adds.  Give a label rank 0 in calls that do not use it.

    Returns:
      the operation, with the implementation "xla", which is `jax.lax.dot_general`.  Repeating a declaration returns an equal operation.

    Raises:
      TypeError: the name or the labels of a slot are not a str.
      ValueError: the name is taken, or the labels break a rule above.

    Examples:
      >>> outer = define("outer_product", u="B I K", v="B J K", t="B I J")
      >>> jax.jit(jax.vmap(lambda u, v: outer(u, v, B=0, K=0)))(jnp.ones((4, 2)), jnp.ones((4, 3))).shape
      (4, 2, 3)
    """
    labels = _labels(name, slots)
    if name in _defined and _defined[name].slots == labels and list(_defined[name].slots) == list(labels):
        return Bilinear(_defined[name])
    taken = {*ops.__all__, *families, *(primitive.name for primitive in owner)}
    for each in (name, *(f"{name}_{slot}" for slot in labels)):
        if not each.isidentifier() or each in taken or any(re.fullmatch(family.names, each) for family in _OWN.values()):
            raise ValueError(f"define: the name is {name!r}, want an identifier, and {each!r} to be no other operation's")
    family = Family(name, twin=lax.dot_general_p, names=name)
    form = Form(name=name, slots=labels, roles={slot: slot for slot in labels}, window=(), family=family)
    for among in (*itertools.combinations(labels, 2), tuple(labels)):
        if not any({slot for slot in labels if label in labels[slot]} == set(among) for label in form.free):
            raise ValueError(
                f"define: {name} has no label in exactly {', '.join(among)}, where vmap would put an axis of these: give it one, which has"
                " rank 0 in the calls that need none"
            )
    declare(family, XlaMatmul())
    _defined[name] = _define(form)
    return Bilinear(form)


def register(operation: Bilinear | str, implementation: Implementation) -> None:
    """Add an implementation to an operation, in front of those that it has.

    Calls can then name it.  Calls without a name and without measurements ask it first, and use it if it `supports` the call and `gains`
    has no objection.  Compiled programs do not change.  It stays registered until the process ends: register at import, in every process
    of a run.

    Args:
      operation: the result of `define`; "matmul", which includes `jaxext.dot_general`; or "conv" for all convolutions, where `call.op` is
        conv1d_fprop, conv2d_wgrad and so on, and `call.window` is the geometry.
      implementation: an instance of a class derived from `Implementation`.

    Raises:
      TypeError: `implementation` is not an instance, or lacks a method.
      ValueError: the operation is unknown, the name is taken, or the version of the code cannot be determined.
    """
    if not isinstance(implementation, Implementation):
        raise TypeError(f"register: implementation is {implementation!r}, want an instance of a class derived from Implementation")
    if not isinstance(operation, Bilinear) and operation not in list(_OWN):
        raise ValueError(f"register: operation is {operation!r}, want one of {list(_OWN)}, or what define returned")
    family = operation._form.family if isinstance(operation, Bilinear) else _OWN[operation]
    name, taken = getattr(implementation, "name", None), {*_OWN_NAMES, *family.names_of_implementations}
    if not isinstance(name, str) or not name.isidentifier() or name in taken:
        raise ValueError(f"register: the implementation's name is {name!r}, want an identifier that is not taken, as {sorted(taken)} are")
    if type(implementation).plan is Implementation.plan:
        for question in ("supports", "run"):
            if getattr(type(implementation), question) is getattr(Implementation, question):
                raise TypeError(f"register: {name} has no method `{question}`, want it, or `plan`")
    implementation.code("cpu")  # raises now if there is none
    _register(family, implementation)


def _labels(name: str, slots: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    for what, text in {"the name": name, **slots}.items():
        if not isinstance(text, str):
            raise TypeError(f"define: {what} is {text!r}, want a str")
    if len(slots) != 3:
        raise ValueError(f"define: {name} has the slots {list(slots)}, want three: two operands and the result")
    labels = {slot: tuple(text.split()) for slot, text in slots.items()}
    for slot, of_slot in labels.items():
        for label in of_slot:
            if not re.fullmatch("[A-Z][A-Za-z]*", label) or of_slot.count(label) > 1:
                raise ValueError(f"define: {slot} of {name} is {slots[slot]!r}, want different words of letters that begin with a capital")
            if sum(label in others for others in labels.values()) == 1:
                raise ValueError(f"define: label {label} of {name} stands in {slot} alone, want it in two slots or three")
    return labels


def _ranks(form: Form, ranks: Mapping[str, int]) -> tuple[int, ...]:
    for label, rank in ranks.items():
        if label not in form.free:
            raise ValueError(f"{form.name}: there is no label {label!r}, want one of {list(form.free)}")
        if not isinstance(rank, int | np.integer) or isinstance(rank, bool) or rank < 0:
            raise ValueError(f"{form.name}: label {label} has the rank {rank!r}, want a number of axes")
    return tuple(int(ranks.get(label, 1)) for label in form.free)


def _operands(form: Form, arrays: Sequence[Any], ranks: Sequence[int], promote: bool) -> dict[str, jax.Array]:
    """The arrays by slot, checked against the labels and each other, and promoted to one dtype if `promote`."""
    rank = dict(zip(form.free, ranks, strict=True))
    sizes: dict[str, tuple[str, Any]] = {}
    for slot, x in zip(form.slots, arrays, strict=False):
        if not isinstance(x, jax.Array | np.ndarray | np.generic):
            raise TypeError(f"{form.name}: {slot} is {x!r}, want an array")
        axes = form.axes(slot, ranks)
        if x.ndim != len(axes):
            wanted = " ".join(label if rank[label] == 1 else f"{label}={rank[label]}" for label in form.slots[slot])
            raise TypeError(f"{form.name}: {slot} has the shape {x.shape}, want {len(axes)} axes: {wanted}")
        for axis, size in zip(axes, x.shape, strict=True):
            other, wanted = sizes.setdefault(axis, (slot, size))
            if size != wanted:
                label = axis.rstrip("0123456789")
                raise TypeError(f"{form.name}: axis {label if rank[label] == 1 else axis} of {slot} is {size}, want {wanted} as in {other}")
    dtype = jnp.result_type(*arrays) if promote else None
    return {slot: jnp.asarray(x, dtype) for slot, x in zip(form.slots, arrays, strict=False)}
