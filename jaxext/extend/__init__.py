"""Your own kernels and operations: add an implementation to jaxext's operations, or declare an operation by its axes.

A *form* is a bilinear operation declared by labels, like an einsum:

    y[b,n,m,c] = Σ_k x[b,n,k,c] w[b,k,m,c]:    define("channelwise", x="B N K C", w="B K M C", y="B N M C")

The labels determine its gradients, vmaps and shardings: each is the same sum with another slot left open, or with more axes in a label.
So an implementation only computes plain sums (`Call`) and needs no rules for differentiation, vmap or sharding.  Every form starts with
the implementation "xla", which defines it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
from jax import lax

from jaxext._messages import format_value
from jaxext.core.blame import attach
from jaxext.core.call import Call, no_kernel
from jaxext.core.family import Family, declare, families, names_of_implementations
from jaxext.core.family import register as _register
from jaxext.core.form import Form, owner
from jaxext.core.form import define as _define
from jaxext.core.implementation import Algorithm, Implementation, Plan
from jaxext.core.reference import Declaration
from jaxext.extend import declarations, text_kernels
from jaxext.extend.callables import Bilinear, Declared
from jaxext.extend.cuda_kernel import CudaKernel, cuda_kernel
from jaxext.ops import conv, matmul
from jaxext.ops.matmul.xla import XlaMatmul

__all__ = [
    "Algorithm",
    "Bilinear",
    "Call",
    "CudaKernel",
    "Declared",
    "Implementation",
    "Plan",
    "cuda_kernel",
    "define",
    "no_kernel",
    "operation",
    "register",
]

_defined: dict[str, Form] = {}  # what `define` declared, by name
_declared: dict[str, Declaration] = {}  # what `operation` declared, by name
_OWN = {family.name: family for family in (matmul.FAMILY, conv.FAMILY)}
_OWN_NAMES = set(names_of_implementations())


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
    labels = declarations.form_labels(name, slots)
    if name in _defined and _defined[name].slots == labels and list(_defined[name].slots) == list(labels):
        return Bilinear(_defined[name])
    advice = " (or the labels of its first declaration, which last until the process ends)" if name in _defined else ""
    declarations.refuse_name("define", name, (name, *(f"{name}_{slot}" for slot in labels)), _reserved(), advice)
    family = Family(name, lax_primitive=lax.dot_general_p, names=name)
    form = Form(name=name, slots=labels, roles={slot: slot for slot in labels}, window=(), family=family)
    declarations.refuse_where_vmap_cannot_map(form)
    declare(family, XlaMatmul())
    _defined[name] = _define(form)
    return Bilinear(form)


def operation(
    name: str,
    reference: Callable[..., Any],
    /,
    *,
    operands: Mapping[str, str],
    results: Mapping[str, str],
    saved: Mapping[str, str] | None = None,
    unsharded: str = "",
    independent: str = "",
    constant: str = "",
    kernels: Mapping[str, CudaKernel] | None = None,
    replace: bool = False,
) -> Declared:
    """Declare any operation by a reference in jnp and the labels of its axes, to give it kernels.

    Kernels are registered as for a form (`register`).  They get one device's part, and see no derivative, vmap or mesh: all rules of JAX
    follow from the labels and the reference.  Derivatives are the reference's, unless the result's `backward` has a kernel too.

    Args:
      name: a unique identifier, also of the primitive.
      reference: a function of the operands, with one axis per label, and of static keywords.  It returns the results, then the saved ones:
        an array, or a tuple of several.  If it closes over a value that jax is tracing, such as an argument of a function under `grad` or
        `jit`, the reference itself computes the call, because kernels only get the operands.
      operands, results: name -> labels separated by spaces, in the order of the axes.  A label is a word that begins with a capital
        letter.  The names are in the order of the reference's arguments and results.
      saved: further results, for `backward`.  They are computed only where a derivative needs them.
      unsharded: labels whose elements the reference couples, such as the axis of a softmax.  They are neither mapped nor split over
        devices.  Labels that a result lacks always count as unsharded.  Along every other label, the operation on a part of the arrays
        must give that part of the results, since a device gets a part.  A call raises ValueError if the reference is found to break this;
        `jaxext.testing.check_op` compares numbers, also those of kernels.
      independent: labels that are not `unsharded` although the reference seems to couple their elements, such as by a common maximum that
        it subtracts and adds again.  `check_op` tests them.
      constant: operands and results that have no derivative, separated by spaces.
      kernels: implementation's name -> what `cuda_kernel` returned, such as `{"cuda": kernel}`.  Each is registered under its name, as by
        `register`.
      replace: whether to replace your earlier operation of this name, whose kernels are then dropped.  See `register`.

    Returns:
      the operation, with the implementation "xla", which is the reference.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: the name is taken, a label or an operand is unknown, or no label is independent, which vmap needs.

    Examples:
      >>> def reference(logits, labels):
      ...     return jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
      >>> loss = operation(
      ...     "cross_entropy", reference, operands=dict(logits="N V", labels="N"), results=dict(loss="N"), constant="labels"
      ... )
      >>> jax.grad(lambda x: loss(x, jnp.array([1, 0])).sum())(jnp.zeros((2, 4))).tolist()
      [[0.25, -0.75, 0.25, 0.25], [-0.75, 0.25, 0.25, 0.25]]
    """
    former = _declared.get(name) if isinstance(name, str) and name in families else None
    if not (former and replace):
        advice = ", or `replace=True`, which compiles all programs anew" if former else ""
        declarations.refuse_name("operation", name, (name, f"{name}_tangent", f"{name}_backward"), _reserved(), advice)
    inputs, outputs, further, fixed, kept, believed = declarations.operation_labels(
        name, operands, results, saved or {}, unsharded=unsharded, independent=independent, constant=constant
    )
    declarations.refuse_reference(name, reference, list(inputs))
    declarations.refuse_kernels(name, kernels)
    declaration = Declaration(
        name=name,
        reference=_as_tuple(reference),
        inputs=inputs,
        results=outputs | further,
        saved=tuple(further),
        unsharded=kept,
        believed=believed,
        constant=fixed,
    )
    if former:
        _forget(name)
    declared = Declared(declaration)
    _declared[name] = declaration
    _ = declaration.operation  # registers its family, and so its name
    if hasattr(declared, "backward"):
        _ = declaration.tangent, declaration.backward.operation  # theirs, too
    try:
        for each, kernel in (kernels or {}).items():
            register(declared, kernel, name=each)
    except (TypeError, ValueError):
        del _declared[name]
        _forget(name)
        raise
    return declared


def _forget(name: str) -> None:
    """Free the names of a declared operation, and let jax forget the programs that hold it."""
    for each in (name, f"{name}_tangent", f"{name}_backward"):
        family = families.pop(each, None)
        for primitive in [primitive for primitive, (form, _) in owner.items() if form.family is family]:
            del owner[primitive]
    jax.clear_caches()


def _reserved() -> list[str]:
    """Patterns of the names that are jaxext's."""
    return [*conv.__all__, *matmul.__all__, *(family.names for family in _OWN.values())]


def _as_tuple(reference: Callable[..., Any]) -> Callable[..., tuple]:
    @functools.wraps(reference)
    def function(*args, **keywords):
        results = reference(*args, **keywords)
        return tuple(results) if isinstance(results, tuple | list) else (results,)

    return function


def register(
    operation: Bilinear | Declared | str, implementation: Implementation | CudaKernel, *, name: str = "cuda", replace: bool = False
) -> None:
    """Add an implementation to an operation, in front of those that it has.

    Calls can then name it.  Calls without a name and without measurements try it first, and use it unless `refuses` or `not_preferred`
    gives a reason.  It stays registered until the process ends: register at import, in every process of a run.  If the operation was
    traced before, jax discards all compiled programs of the process (`jax.clear_caches`), so that later calls use it.  Programs that you
    hold yourself (`jit(f).lower(...).compile()`) or that `jax.export` has stored do not change.

    Args:
      operation: the result of `define` or `operation`; "matmul", which includes `jaxext.dot_general`; or "conv" for all convolutions,
        where `call.op` is conv1d_fprop, conv2d_wgrad and so on, and `call.window` is the geometry.
      implementation: an instance of a class derived from `Implementation`, or, for an `operation` or its `backward`, a `cuda_kernel`.  Its
        pointers get the operands and results of their names if every pointer has one, else all of them in order, operands first.  Its
        scalars are keywords of a call, or sizes of the labels of their names.  A second implementation, `<name>_simulated`, executes it on
        a CPU by ptxsim if it is named.
      name: the name of the implementation, for a `cuda_kernel`.
      replace: whether to replace your earlier implementation of this name, so that a cell of a notebook can run again.

    Raises:
      TypeError: `implementation` is not an instance, lacks a method, has an attribute of another type, or contains a traced value.
      ValueError: the operation is unknown, the name is taken, the version of the code cannot be determined, or the pointers of a
        `cuda_kernel` do not fit the operation.
    """
    if isinstance(implementation, CudaKernel):
        if not isinstance(operation, Declared):
            raise TypeError(
                f"register: operation is {format_value(operation)}, want the result of `extend.operation`, since the implementation is a"
                " cuda_kernel; an Implementation can call it for other operations"
            )
        for each in list(text_kernels.implementations(operation._declaration, name, implementation)):
            _add(operation, each, ("xla",), replace)  # the reference
        return
    if not isinstance(implementation, Implementation):
        raise TypeError(
            f"register: implementation is {format_value(implementation)}, want an instance of a class derived from Implementation"
        )
    if not isinstance(operation, Bilinear | Declared) and operation not in list(_OWN):
        raise ValueError(
            f"register: operation is {format_value(operation)}, want one of {list(_OWN)}, or the result of define or operation"
        )
    _add(operation, implementation, _OWN_NAMES, replace)


def _add(operation: Bilinear | Declared | str, implementation: Implementation, reserved: Collection[str], replace: bool) -> None:
    """Register an implementation whose name is not reserved."""
    family = _family(operation)
    name = getattr(implementation, "name", None)
    if not isinstance(name, str) or not name.isidentifier() or name in reserved:
        raise ValueError(
            f"register: the implementation's name is {format_value(name)}, want an identifier that is not one of {sorted(reserved)}"
        )
    if name in family.names_of_implementations and not replace:
        raise ValueError(
            f"register: {family.name} has an implementation {format_value(name)} already, want another name, or `replace=True`, which"
            " compiles all programs anew"
        )
    declarations.refuse_implementation(implementation)
    _register(family, implementation)
    attach(family)


def _family(operation: Bilinear | Declared | str) -> Family:
    if isinstance(operation, Bilinear):
        return operation._form.family
    if isinstance(operation, str):
        return _OWN[operation]
    _ = operation._declaration.operation.primitive  # which is made when it is needed
    return operation._declaration.operation.family


def __dir__() -> list[str]:
    return __all__
