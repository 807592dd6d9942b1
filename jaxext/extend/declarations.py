"""Checks of users' declarations and calls: names, labels, ranks, arrays and keywords.

A message says whose argument is wrong, and what is wanted.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxext._messages import format_value
from jaxext.core.family import families
from jaxext.core.form import Form, owner
from jaxext.core.implementation import Implementation
from jaxext.core.labelled import Labelled
from jaxext.core.reference import Declaration, Keywords
from jaxext.extend.cuda_kernel import CudaKernel

Labels = tuple[str, ...]

# --- a declaration


def refuse_name(function: str, name: str, primitives: Sequence[str], reserved: Iterable[str], advice: str = "") -> None:
    """Raise if a primitive of `name` has no name that is free.  `reserved` are patterns."""
    taken = {*families, *(primitive.name for primitive in owner)}
    for each in primitives if isinstance(name, str) else [name]:
        if not isinstance(each, str):
            raise TypeError(f"{function}: the name is {format_value(name)}, want a str")
        if not each.isidentifier():
            raise ValueError(f"{function}: the name is {format_value(name)}, want an identifier")
        if each in taken or any(re.fullmatch(pattern, each) for pattern in reserved):
            raise ValueError(f"{function}: the name is {format_value(name)}, but {each!r} is taken, want another name{advice}")


def form_labels(name: str, slots: Mapping[str, str]) -> dict[str, Labels]:
    """The labels of each slot of a bilinear operation."""
    for what, text in {"the name": name, **slots}.items():
        if not isinstance(text, str):
            raise TypeError(f"define: {what} is {format_value(text)}, want a str")
    if len(slots) != 3:
        more = "; `extend.operation` declares an operation of another number of operands or results, by a reference in jnp"
        raise ValueError(f"define: {name} has the slots {list(slots)}, want three: two operands and the result{more}")
    labels = {slot: _words("define", name, slot, text) for slot, text in slots.items()}
    for slot, of_slot in labels.items():
        for label in of_slot:
            if sum(label in others for others in labels.values()) == 1:
                want = "want it in two slots or three (spaces separate labels)"
                raise ValueError(f"define: label {label} of {name} is in {slot} only, {want}")
    return labels


def refuse_where_vmap_cannot_map(form: Form) -> None:
    """Raise if two slots, or all three, have no label for the axes that vmap adds to these."""
    labels = form.slots
    for among in (*itertools.combinations(labels, 2), tuple(labels)):
        if not any({slot for slot in labels if label in labels[slot]} == set(among) for label in form.free):
            raise ValueError(
                f"define: {form.name} has no label in exactly {', '.join(among)}, where vmap would add an axis to these: want one, which"
                " has rank 0 in calls that do not use it"
            )


def operation_labels(
    name: str, operands: Mapping[str, str], results: Mapping[str, str], saved: Mapping[str, str], **words: str
) -> tuple[dict[str, Labels], dict[str, Labels], dict[str, Labels], Labels, Labels, Labels]:
    """The labels of operands, results and saved results, the names that are constant, the labels that are not independent, and those that
    are even if they do not seem so.  `words` are unsharded, independent and constant."""
    given = dict(operands=operands, results=results, saved=saved)
    for what, arrays in given.items():
        if not isinstance(arrays, Mapping):
            raise TypeError(f"operation: {what} of {name} is {format_value(arrays)}, want a dict of names and labels")
    for what, text in words.items():
        if not isinstance(text, str):
            raise TypeError(f"operation: {what} of {name} is {format_value(text)}, want a str")
    for what in ("operands", "results"):
        if not given[what]:
            raise ValueError(f"operation: {name} has no {what}, want at least one")
    inputs, outputs, further = ({each: _words("operation", name, each, text) for each, text in arrays.items()} for arrays in given.values())
    labels = {**inputs, **outputs, **further}
    if len(labels) != len(inputs) + len(outputs) + len(further):
        raise ValueError(f"operation: {name} has two arrays of one name, want different names")
    if clash := next((each for each in labels if f"d_{each}" in labels), None):
        raise ValueError(
            f"operation: {name} has {clash} and d_{clash}, the name of the cotangent of {clash} in `backward`, want another name"
        )
    everywhere = dict.fromkeys(label for of in labels.values() for label in of)
    unsharded, independent, constant = (tuple(words[what].split()) for what in ("unsharded", "independent", "constant"))
    for what, given_labels in (("unsharded", unsharded), ("independent", independent)):
        for label in given_labels:
            if label not in everywhere:
                raise ValueError(f"operation: {what} has {format_value(label)}, {name} has the labels {list(everywhere)}")
    for each in constant:
        if each not in labels:
            raise ValueError(f"operation: constant has {each!r}, {name} has the operands and results {list(labels)}")
    of_results = [*outputs.values(), *further.values()]
    for label in everywhere:
        if not any(label in of for of in inputs.values()):
            raise ValueError(f"operation: label {label} of {name} is in no operand, so its size is unknown, want it in one")
    kept = tuple(label for label in everywhere if label in unsharded or not all(label in of for of in of_results))
    if both := [label for label in independent if label in kept]:
        raise ValueError(f"operation: independent has {both[0]!r}, want none that is in `unsharded` or that a result of {name} lacks")
    if len(kept) == len(everywhere):
        raise ValueError(
            f"operation: {name} has no label that all results have and that is not in `unsharded`, want one, for vmap: it has rank 0 in"
            " calls that need none (`ranks`)"
        )
    return inputs, outputs, further, constant, kept, independent


def refuse_reference(name: str, reference: Any, operands: Sequence[str]) -> None:
    """Raise if a reference is no function, takes operands of these names in another order, or has keywords that calls use themselves."""
    if not callable(reference):
        raise TypeError(f"operation: the reference of {name} is {format_value(reference)}, want a function")
    try:
        parameters = inspect.signature(reference).parameters.values()
    except ValueError:  # it tells none
        return
    first = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)][: len(operands)]
    if len(first) < len(operands) and not any(each.kind is each.VAR_POSITIONAL for each in parameters):
        raise ValueError(f"operation: the reference of {name} takes {first}, want the operands {list(operands)}")
    if first != list(operands) and {*first} == {*operands}:
        raise ValueError(
            f"operation: operands of {name} are in the order {list(operands)}, want {first}, the order of the reference's parameters"
        )
    for each in parameters:
        if each.name in ("implementation", "ranks") and each.name not in operands:
            raise ValueError(
                f"operation: the reference of {name} has the keyword {each.name!r}, which calls use themselves, want another name"
            )


def refuse_kernels(name: str, kernels: Any) -> None:
    """Raise if the kernels of a declaration are no `CudaKernel`s by name."""
    if kernels is not None and not (isinstance(kernels, Mapping) and all(isinstance(each, CudaKernel) for each in kernels.values())):
        raise TypeError(f"operation: kernels of {name} is {format_value(kernels)}, want a dict of names and results of `cuda_kernel`")


def _words(function: str, name: str, array: str, text: str) -> Labels:
    """The labels of an array."""
    if not isinstance(text, str):
        raise TypeError(f"{function}: {array} of {name} is {format_value(text)}, want a str")
    words = tuple(text.split())
    for label in words:
        if not re.fullmatch("[A-Z][A-Za-z]*", label) or words.count(label) > 1:
            raise ValueError(
                f"{function}: {array} of {name} is {format_value(text)}, want different words of letters that begin with a capital letter"
            )
    return words


# --- an implementation


def refuse_implementation(implementation: Implementation) -> None:
    """Raise if an implementation lacks a method, or an attribute is of another type."""
    cls, name = type(implementation), implementation.name
    for old, new in (("supports", "refuses"), ("gains", "not_preferred")):
        if hasattr(implementation, old):
            raise TypeError(
                f"register: {name} has a method `{old}`, which jaxext does not call, want `{new}`, which returns a reason or None"
            )
    if cls.plan is Implementation.plan:
        for method in ("refuses", "run"):
            if getattr(cls, method) is getattr(Implementation, method):
                raise TypeError(f"register: {name} has no method `{method}`, want it, or `plan`")
    targets = implementation.custom_calls
    if isinstance(targets, str) or not all(isinstance(target, str) for target in targets):
        raise TypeError(f"register: custom_calls of {name} is {format_value(targets)}, want a sequence of str")
    if not isinstance(implementation.rows_by_config, bool):
        raise TypeError(f"register: rows_by_config of {name} is {format_value(implementation.rows_by_config)}, want a bool")
    if (value := _traced([vars(implementation), *map(vars, cls.__mro__)], set())) is not None:
        raise TypeError(f"register: {name} closes over {format_value(value)}, a traced value, want it as an operand, which has derivatives")
    implementation.code("cpu")  # raises now if there is none


def _traced(x: Any, seen: set[int]) -> Tracer | None:
    """A traced value in a container, or that a function closes over."""
    if isinstance(x, Tracer) or id(x) in seen:
        return x if isinstance(x, Tracer) else None
    seen.add(id(x))
    inside: list[Any] = [getattr(x, "__wrapped__", None)]
    if isinstance(x, Mapping):
        inside += x.values()
    elif isinstance(x, list | tuple):
        inside += x
    elif isinstance(x, functools.partial):
        inside += [x.func, x.args, x.keywords]
    elif isinstance(x, types.MethodType):
        inside += [x.__func__]
    elif isinstance(x, types.FunctionType):
        inside += [x.__defaults__, x.__kwdefaults__, *(cell.cell_contents for cell in x.__closure__ or () if cell != types.CellType())]
    return next((value for value in (_traced(each, seen) for each in inside if each is not None) if value is not None), None)


# --- a call


def ranks(form: Labelled, given: Mapping[str, int]) -> tuple[int, ...]:
    """The number of axes of each label, 1 unless it is given."""
    if not isinstance(given, Mapping):
        raise TypeError(f"{form.name}: ranks is {format_value(given)}, want a dict of labels and numbers of axes")
    for label, rank in given.items():
        if label not in form.free:
            raise ValueError(f"{form.name}: there is no label {format_value(label)}, want one of {list(form.free)}")
        if not isinstance(rank, int | np.integer) or isinstance(rank, bool) or rank < 0:
            raise ValueError(f"{form.name}: label {label} has the rank {format_value(rank)}, want a number of axes")
    return tuple(int(given.get(label, 1)) for label in form.free)


def operands(form: Labelled, arrays: Mapping[str, Any], ranks: Sequence[int]) -> dict[str, jax.Array]:
    """The arrays by name, checked against the labels and each other."""
    rank = dict(zip(form.free, ranks, strict=True))
    sizes: dict[str, tuple[str, Any]] = {}
    for slot, x in arrays.items():
        if not isinstance(x, jax.Array | np.ndarray | np.generic):
            raise TypeError(f"{form.name}: {slot} is {format_value(x)}, want an array")
        axes = form.axes(slot, ranks)
        if x.ndim != len(axes):
            wanted = " ".join(label if rank[label] == 1 else f"{label}={rank[label]}" for label in form.labels[slot])
            raise TypeError(f"{form.name}: {slot} has the shape {x.shape}, want {len(axes)} axes: {wanted}")
        for axis, size in zip(axes, x.shape, strict=True):
            other, wanted = sizes.setdefault(axis, (slot, size))
            if size != wanted:
                label = axis.rstrip("0123456789")
                raise TypeError(f"{form.name}: axis {label if rank[label] == 1 else axis} of {slot} is {size}, want {wanted} as in {other}")
    return {slot: jnp.asarray(x) for slot, x in arrays.items()}


def operands_of(declared: Declaration, arrays: Sequence[Any], ranks: Sequence[int]) -> dict[str, jax.Array]:
    """The same of a declared operation: as many as it has, and of floating-point numbers where it has a derivative."""
    form, name = declared.operation, declared.name
    for label, n in zip(form.free, ranks, strict=True):
        if label in form.unsharded and n != 1:
            raise ValueError(f"{name}: label {label} has the rank {n}, want 1, since the operation is not independent along it")
    if len(arrays) != len(declared.inputs):
        raise TypeError(f"{name}: got {len(arrays)} arrays, want {len(declared.inputs)}: {', '.join(declared.inputs)}")
    checked = operands(form, dict(zip(declared.inputs, arrays, strict=True)), ranks)
    for each in declared.differentiable:
        if not jnp.issubdtype(checked[each].dtype, jnp.inexact):
            want = f"want floating-point numbers, or `constant={each!r}` in its declaration"
            raise TypeError(f"{name}: {each} is {checked[each].dtype}, {want}")
    return checked


def keywords(declared: Declaration, static: Mapping[str, Any]) -> Keywords:
    """The static keywords of a call, which are part of the key of its program."""
    name, of = declared.name, declared.primal or declared
    try:
        inspect.signature(of.reference).bind(*of.inputs, **static)
    except TypeError as error:
        taken = ", ".join([*of.inputs, *(f"{keyword}=" for keyword in of.keywords)])
        raise TypeError(f"{name}: {error}, want what its reference takes: {taken}") from None
    except ValueError:  # it tells none
        pass
    for keyword, value in static.items():
        try:
            hash(value)
        except TypeError:
            of_arrays = ", such as float(x), or an operand of no labels" if isinstance(value, jax.Array | np.ndarray) else ""
            raise TypeError(f"{name}: keyword {keyword} is {format_value(value)}, want a hashable value{of_arrays}") from None
    return Keywords(tuple(sorted(static.items())), defaults=of.defaults)
