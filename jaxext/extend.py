"""Kernels and forms of your own: an implementation behind jaxext's operations, or behind a bilinear operation that you declare by its axes.

A *form* is a bilinear operation declared by labels, like an einsum,

    y[b,n,m,c] = Σ_k x[b,n,k,c] w[b,k,m,c]:    define("channelwise", x="B N K C", w="B K M C", y="B N M C")

and from its labels follow its gradients, each vmap and each sharding: they are the same sum with another slot left open, or with more axes
in a label.  So an implementation is asked for plain products only (`Call`), and is differentiated, mapped and split over devices without a
rule of its own.  What each form has from the beginning, the implementation "xla", is its definition.

It must not know how an implementation computes, nor which kernels jaxext has.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import hashlib
import inspect
import itertools
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxext import _tuned
from jaxext._conv import CONV_IMPLEMENTATIONS
from jaxext._dispatch import defined, named
from jaxext._form import Form, dimension_numbers, replacing_lax
from jaxext._form import define as _define
from jaxext._implementation import EXPORTED, Algorithm, Call, no_kernel
from jaxext._matmul import MATMUL_IMPLEMENTATIONS, XlaMatmul

__all__ = ["Bilinear", "Call", "Implementation", "define", "no_kernel", "register"]

_OF_JAXEXT = {"matmul": MATMUL_IMPLEMENTATIONS, "conv": CONV_IMPLEMENTATIONS}
_OWN_NAMES = {each.name for implementations in _OF_JAXEXT.values() for each in implementations}


class Implementation(abc.ABC):
    """What computes a form's products: derive from it, say what it `supports`, `run` it, and `register` an instance.

    It is asked when a program is lowered, for one device's part of the product, and must answer by the `Call` alone, alike at every time
    and in every process.  A call has one slot open (`call.open`), which is to be computed from the other two: the operation itself is asked
    for as y, its gradients as x and as w.  Where an implementation refuses, the next one is asked; if it was named, NotImplementedError is
    raised with its reason.

    Attributes:
      name: by which `implementation=` and `jaxext.use_implementation` know it: an identifier, but none of jaxext's own.
      version: of its code, in a word: what `jaxext.tune` measured with another version, and programs that JAX has stored with it, do not
        hold.  None stands for a hash of the file that its class is written in; where a kernel lies in another file, say it yourself.

    >>> class Einsum(Implementation):
    ...     name = "einsum"
    ...     def supports(self, call):
    ...         return None if call.dtype == np.float32 else f"the result is {call.dtype}, want float32"
    ...     def run(self, call, config, operands):
    ...         letters = {slot: "".join(labels) for slot, labels in call.labels.items()}  # one letter each
    ...         equation = f"{','.join(letters[slot] for slot in operands)}->{letters[call.open]}"
    ...         return jnp.einsum(equation, *call.flatten(operands).values()).reshape(call.shape)
    >>> register("matmul", Einsum())
    >>> jax.grad(lambda a, b: jaxext.matmul(a, b, implementation="einsum").sum())(jnp.ones((2, 3)), jnp.ones((3, 4))).shape
    (2, 3)
    """

    name: str
    version: str | None = None

    @abc.abstractmethod
    def supports(self, call: Call) -> str | None:
        """None, or the reason for refusing the call; `no_kernel` says when any kernel must."""

    def gains(self, call: Call) -> str | None:
        """None, or the reason why a call that it supports is left to others if nobody named it: of itself, that it is exported."""
        return EXPORTED if call.splitter == "later" else None

    def candidates(self, call: Call) -> Sequence[Any]:
        """The configs with which it can compute a call that it supports, those expected to be fastest first: frozen dataclasses of numbers
        and words, among which `jaxext.tune` chooses."""
        return (Algorithm(self.name),)

    def describe(self, call: Call, config: Any) -> str:
        """How the call is computed, in a word or two, for `jaxext.explain`."""
        return " ".join(str(value) for value in dataclasses.asdict(config).values())

    @abc.abstractmethod
    def run(self, call: Call, config: Any, operands: Mapping[str, jax.Array]) -> jax.Array:
        """The result, of `call.shape` and `call.dtype`, by anything that JAX can trace: `jax.ffi.ffi_call`, a Triton kernel, `jax.numpy`.

        The operands, by slot, have the axes `call.axes`; `call.flatten(operands)` has exactly one axis per label, of `call.sizes`.  A size
        may be 0.
        """


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Bilinear:
    """A bilinear operation of your own, made by `define`: call it."""

    _form: Form

    def __repr__(self) -> str:
        first, second, result = (f"{slot}[{' '.join(labels)}]" for slot, labels in self._form.slots.items())
        return f"{self._form.name}: {first}, {second} -> {result}"

    def __call__(
        self,
        first: jax.typing.ArrayLike,
        second: jax.typing.ArrayLike,
        /,
        *,
        implementation: str | None = None,
        precision: lax.PrecisionLike = None,
        preferred_element_type: jax.typing.DTypeLike | None = None,
        out_sharding: NamedSharding | P | None = None,
        **ranks: int,
    ) -> jax.Array:
        """The sum of products over the labels that stand in both operands and not in the result.

        All transformations of JAX apply, in any order: jit, grad, jvp, vmap over any axes, shardings, shard_map, pmap, export.

        Args:
          first, second: arrays with the axes of the first and of the second slot, in the order of its labels.
          implementation: the name of what computes it, here and in its gradients; None is as for `jaxext.matmul`.
          precision: as for `jax.lax.dot_general`.
          preferred_element_type: the dtype of the result; None is that to which jnp promotes the operands.
          out_sharding: of the result on an explicit mesh, where that of the operands leaves it open.
          **ranks: how many axes a label has in these arrays, such as `B=0` for none; one if not said.

        Returns:
          an array with the axes of the third slot.

        Raises:
          TypeError: an operand is no array, has another number of axes than its labels, or another size in an axis than the other has.
          ValueError: there is no such label or implementation.
          NotImplementedError: the implementation that was named does not support this call; at lowering.

        >>> channelwise = define("channelwise", x="B N K C", w="B K M C", y="B N M C")
        >>> channelwise(jnp.ones((5, 3, 64)), jnp.ones((3, 7, 64)), B=0).shape
        (5, 7, 64)
        """
        form = self._form
        implementation = named(implementation, form.name, [each.name for each in form.implementations])
        rank = _ranks(form, ranks)
        operands = _operands(form, (first, second), rank)
        axes = [form.axes(slot, rank) for slot in form.slots]
        return form.bind(
            list(form.slots)[-1],
            operands,
            ranks=rank,
            window=None,
            **_as_lax_says(operands.values(), dimension_numbers(*axes), precision, preferred_element_type),
            implementation=implementation,
            out_sharding=_sharding(form, out_sharding, len(axes[-1])),
        )


def define(name: str, /, **slots: str) -> Bilinear:
    """A bilinear operation, declared by the labels of its axes.

    result[...] = Σ first[...] second[...], summed over the labels that the result does not have.

    Args:
      name: an identifier that no other operation has; primitives and profiles show it with the slot that is computed, "channelwise_y".
      **slots: the first operand, the second and the result: a name each, and labels in the order of the axes, separated by spaces.  A label
        is a capital letter, or a word that begins with one, and stands in two slots or in all three.  Each pair of slots needs a label of
        its own, and so do all three together, for the axes that vmap adds; an axis that you do not need has rank 0 in the call.

    Returns:
      the operation, with one implementation, "xla", which is `jax.lax.dot_general`.  Declared again alike, it is the same.

    Raises:
      ValueError: the name is taken, or the labels are not as they must be.

    >>> outer = define("outer_product", u="B I K", v="B J K", t="B I J")
    >>> jax.jit(jax.vmap(lambda u, v: outer(u, v, B=0, K=0)))(jnp.ones((4, 2)), jnp.ones((4, 3))).shape
    (4, 2, 3)
    """
    labels = _labels(name, slots)
    if name in defined and defined[name].slots == labels and list(defined[name].slots) == list(labels):
        return Bilinear(defined[name])
    if not name.isidentifier() or name in defined or re.fullmatch(r"matmul|conv(\d+d)?", name):
        raise ValueError(f"define: the name is {name!r}, want an identifier that no other operation has")
    roles = {slot: slot for slot in labels}
    form = Form(name=name, slots=labels, roles=roles, window=(), implementations=[XlaMatmul()], twin=lax.dot_general_p)
    for among in (*itertools.combinations(labels, 2), tuple(labels)):
        if not any({slot for slot in labels if label in labels[slot]} == set(among) for label in form.free):
            raise ValueError(f"define: {name} has no label in exactly {', '.join(among)}: vmap would have no place for an axis of these")
    defined[name] = _define(form)
    return Bilinear(form)


def register(operation: Bilinear | str, implementation: Implementation) -> None:
    """Put an implementation before those that an operation has.

    From now on it may be named.  Where nobody names one and nothing was measured, it is asked first, and taken where it supports the call
    and `gains`.  Programs that are compiled already do not change.  It stays until the process ends: register what a module brings when
    that is imported, in every process of a run.

    Args:
      operation: what `define` returned; "matmul", which is also `jaxext.dot_general`; or "conv", all convolutions: `call.op` is
        conv1d_fprop, conv2d_wgrad and so on, `call.window` the geometry.
      implementation: an instance.

    Raises:
      TypeError: it is none.
      ValueError: there is no such operation, it has an implementation of this name already, or the code's version cannot be told.
    """
    if not isinstance(implementation, Implementation):
        raise TypeError(f"register: implementation is {implementation!r}, want an instance of a class derived from Implementation")
    implementations: Any = operation._form.implementations if isinstance(operation, Bilinear) else _OF_JAXEXT.get(operation)
    if implementations is None:
        raise ValueError(f"register: operation is {operation!r}, want one of {list(_OF_JAXEXT)}, or what define returned")
    name, taken = getattr(implementation, "name", None), {*_OWN_NAMES, *(each.name for each in implementations)}
    if not isinstance(name, str) or not name.isidentifier() or name in taken:
        raise ValueError(f"register: the implementation's name is {name!r}, want an identifier other than {sorted(taken)}")
    _tuned.add_version(name, _version(implementation))
    implementations.insert(0, implementation)


def _version(implementation: Implementation) -> str:
    if (version := implementation.version) is not None:
        if not isinstance(version, str) or not version.isprintable() or not 0 < len(version) <= 100:
            raise ValueError(f"register: {implementation.name} has the version {version!r}, want a word")
        return version
    try:
        code = pathlib.Path(inspect.getfile(type(implementation))).read_bytes()
    except (OSError, TypeError) as error:
        raise ValueError(f"register: {implementation.name} lies in no file, so it must have a `version` ({error})") from None
    return hashlib.sha256(code).hexdigest()[:16]


def _labels(name: str, slots: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
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
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
            raise ValueError(f"{form.name}: label {label} has the rank {rank!r}, want a number of axes")
    return tuple(ranks.get(label, 1) for label in form.free)


def _operands(form: Form, arrays: Sequence[Any], ranks: Sequence[int]) -> dict[str, jax.Array]:
    """The arrays by slot, of one dtype, if they fit the labels and each other."""
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
    dtype = jnp.result_type(*arrays)
    return {slot: jnp.asarray(x, dtype) for slot, x in zip(form.slots, arrays, strict=False)}


def _as_lax_says(operands: Iterable[jax.Array], dimension_numbers: Any, precision: Any, dtype: Any) -> dict[str, Any]:
    """What `lax.dot_general` makes of its keywords: read from its equation."""
    product = functools.partial(lax.dot_general, dimension_numbers=dimension_numbers, precision=precision, preferred_element_type=dtype)
    with replacing_lax(False):
        (eqn,) = jax.make_jaxpr(product)(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands)).eqns
    return dict(dtype=eqn.outvars[0].aval.dtype, precision=eqn.params["precision"])


def _sharding(form: Form, sharding: NamedSharding | P | None, ndim: int) -> NamedSharding | None:
    """As it stands in types: of an abstract mesh, with an entry for each axis."""
    if sharding is None:
        return None
    mesh = jax.sharding.get_abstract_mesh() if isinstance(sharding, P) else sharding.mesh.abstract_mesh
    spec = tuple(sharding if isinstance(sharding, P) else sharding.spec)
    if mesh.empty or AxisType.Explicit not in mesh.axis_types or len(spec) > ndim:
        raise ValueError(f"{form.name}: out_sharding is {sharding!r}, want one for {ndim} axes, on a mesh with explicit axes")
    return NamedSharding(mesh, P(*spec, *(None,) * (ndim - len(spec))))
