"""Replaces lax's products with jaxext's, for one call or inside a context, and resolves the implementation's name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxext import _compat
from jaxext._messages import dtype_named, format_value
from jaxext._scope import Scope, in_parentheses, user_context
from jaxext.core import entry_points, flops
from jaxext.core.choose import replacing_lax
from jaxext.core.family import Family, families, names_of_implementations
from jaxext.core.form import owner
from jaxext.core.invariant import Invariant
from jaxext.core.static import slices_in_place as _slices_in_place
from jaxext.lax.substitute import CacheKey, substitute, traced

_named = user_context("use_implementation", None)
_invariant = user_context("use_invariant", False)


@in_parentheses('use_implementation("xla")')
def use_implementation(name: str | None) -> Scope:
    """A context in which every jaxext operation and its gradients use the implementation `name`.  None selects automatically.

    Use it as `with use_implementation("xla"): ...` or as a decorator, `@use_implementation("xla")`.

    An `implementation=` argument of a call takes precedence.  Calling an operation that has no implementation of this name raises
    ValueError.  The context is part of `jax.jit`'s cache key.

    Raises:
      ValueError: no operation has an implementation of this name.
    """
    if name is not None:
        entry_points.load()
    known = sorted(names_of_implementations())
    if name is not None and name not in known:
        raise ValueError(f"use_implementation: name is {format_value(name)}, want one of {known} or None")
    return Scope("use_implementation", _named, name)


@in_parentheses("use_invariant()")
def use_invariant() -> Scope:
    """A context in which a row of a result is bitwise identical whatever the other rows of the batch are, and however many there are.

    Use it as `with use_invariant(): ...` or as a decorator, `@use_invariant()`.  The context is part of `jax.jit`'s cache key.

    The rows are those of the first operand of a matmul, the images of a convolution, and the examples that `vmap` maps over them; the
    second operand holds the weights.  A row's bits do not depend on the number of rows, on its position among them, or on the number of
    devices that share them.  This holds for matmuls, convolutions, `linear`, `gated_linear_unit` and `conv_bias_act`, and for their
    gradients in the first operand, of any order.  It does not hold for:

    - the gradient of the weights, which is a sum over rows, and any matmul that contracts the first axes of both operands, which is the
      same operation
    - the columns of the second operand
    - sums over axes that are split over devices

    https://github.com/jaxext/jaxext/blob/main/docs/invariant.md describes the cost.

    Raises:
      NotImplementedError: raised by an operation inside that has no invariant form, or if a size is symbolic.
    """
    return Scope("use_invariant", _invariant, True)


@in_parentheses("slices_in_place()")
def slices_in_place() -> Scope:
    """A context in which GPU kernels read slices of larger arrays in place, and write results into larger arrays, without copies.

    Use it as `with slices_in_place(): ...` or as a decorator, `@slices_in_place()`.  The context is part of `jax.jit`'s cache key.

    Outside the context, XLA copies a slice before a kernel reads it, such as a layer's weight in a `lax.scan` over stacked parameters.  It
    also copies a kernel's result into a larger array, such as that weight's gradient.  Inside the context, XLA from jaxlib 0.11.2 on
    passes the address of the slice if its index is a constant or follows from a loop counter.  Slices are still copied with older jaxlibs,
    for other indices and for other implementations.

    Kernels require each array to start at a multiple of 16 bytes.  A layer of a stacked array does, because XLA (of jaxlib 0.11.2 and
    0.12) only passes slices whose size is a multiple of 128 bytes.  A slice of a flat vector of all parameters may start anywhere, so do
    not use one inside this context.

    Raises:
      jax.errors.JaxRuntimeError: raised when a program runs, if an array of a kernel starts at another address.
    """
    return Scope("slices_in_place", _slices_in_place, True)


@in_parentheses("in_place_of_lax()")
def in_place_of_lax() -> Scope:
    """A context in which jaxext's operations replace lax's, for models that do not let you pass in an operation.

    Use it as `with in_place_of_lax(): ...` or as a decorator, `@in_place_of_lax()`.

    Every `dot_general`, `ragged_dot_general`, `scaled_dot` and `conv_general_dilated` of `jax.lax` that is traced or run inside becomes
    the jaxext operation.  This includes calls from libraries: `jnp.matmul`, `@`, `jnp.einsum`, layers of flax and equinox.  They use the
    implementation set by `use_implementation`.  The context applies to the current thread and is part of `jax.jit`'s cache key.

    Do not use it around code that interprets lax's primitives itself: Pallas kernels, `jax.experimental.sparse` and `jax.experimental.jet`
    do not know jaxext's.  For `jax.checkpoint`, use the policies of `jaxext.checkpoint_policies`.
    """
    for family in families.values():
        if family.replaced is not None:
            _compat.replace_bind(family.replaced, functools.partial(_bind, family))
    return Scope("in_place_of_lax", replacing_lax, True)


def _bind(family, original, *operands, **params):
    """`bind` of lax's primitive, redirected to jaxext while `replacing_lax` is set."""
    if not replacing_lax.value:
        return original(*operands, **params)
    if family.bind is not None:
        return family.bind(*operands, **params)
    return call_namesake(original, family, None, operands, params, name=family.replaced.name)


def call_namesake(
    namesake: Callable, family: Family, implementation: str | None, arrays: tuple, static: dict[str, Any], *, name: str | None = None
) -> jax.Array:
    """`namesake(*arrays, **static)` with the family's products, by the implementation that the call or the context names.

    It runs as one jitted program, traced once for each type of the arrays.  Only arrays are its operands, and only plain values are in its
    key.  Any other argument goes to the namesake directly, which accepts Python scalars and flax's nnx.Param, and refuses lists, None and
    traced static arguments.
    """
    name = name or namesake.__name__
    by = _resolved(implementation, name, family)
    _refuse_dtype(name, static)
    keywords = CacheKey.of(static)
    if keywords is None or not all([_is_array(x) for x in arrays]):
        return substitute(*traced(functools.partial(namesake, *arrays, **static), ()), by)
    return _program(namesake, name, keywords, by)(*arrays)


def compiled(
    function: Callable,
    key: tuple[Hashable, ...],
    family: Family,
    implementation: str | None,
    arrays: tuple,
    static: dict[str, Any],
    *,
    name: str,
) -> jax.Array:
    """`function(*key, *arrays, **static, implementation=)` as a jitted program, as in `call_namesake`."""
    by = _resolved(implementation, name, family)
    _refuse_dtype(name, static)
    keywords = CacheKey.of(static)
    if keywords is None:
        return function(*key, *arrays, **static, implementation=by)
    return _program_of(function, key, name, keywords, by)(*arrays)


@functools.lru_cache(maxsize=4096)
def _program_of(function, key, name, keywords, implementation):
    program = functools.partial(function, *key, **keywords.copy(), implementation=implementation)
    program.__name__ = program.__qualname__ = name  # type: ignore[attr-defined]
    return jax.jit(program, inline=True)


def _resolved(implementation: str | None, name: str, family: Family) -> str | Invariant | None:
    """The implementation that the call or the context names, at the beginning of a call."""
    flops.register(owner)  # on a cache hit jax binds no primitive, so `Form.bind` would not register the rules
    return named(implementation, name, family) if implementation is not None or _named.value is not None or _invariant.value else None


def _refuse_dtype(name: str, static: dict[str, Any]) -> None:
    if isinstance(dtype := static.get("preferred_element_type"), str | int | float):  # others are left to the namesake
        dtype_named(name, "preferred_element_type", dtype)


def _is_array(x: Any) -> bool:
    """Return whether jit accepts x as an array.  It refuses numpy's object arrays and masked arrays."""
    if type(x) is np.ndarray:
        return x.dtype.kind != "O"
    return isinstance(x, (Tracer, jax.Array, np.generic))  # Tracer first: isinstance(tracer, jax.Array) is slow


@functools.lru_cache(maxsize=4096)
def _program(namesake, name, keywords, implementation):
    """A jitted function of the arrays alone: jit is slow to compare static arguments.

    It is inlined into jaxprs, on versions of jax that respect `inline`.  jnp.convolve is not inlined, and is differentiated as one call.
    """

    function = functools.partial(namesake, **keywords.copy())

    def program(*arrays):
        return substitute(*traced(function, arrays), implementation)

    program.__name__ = program.__qualname__ = name
    return jax.jit(program, inline=namesake is not jnp.convolve)


def named(implementation: str | None, operation: Any, family: Family) -> str | Invariant | None:
    """The implementation named by the call, else by the context; ValueError if the family does not have it."""
    entry_points.load()
    implementation = _named.value if implementation is None else implementation
    if implementation is not None and implementation not in (known := family.names_of_implementations):
        raise ValueError(f"{operation}: implementation is {format_value(implementation)}, want one of {known} or None")
    if not _invariant.value:
        return implementation
    if family.weights is None:
        raise NotImplementedError(
            f"{operation}: not supported inside use_invariant, want matmul, dot_general, a convolution, linear, gated_linear_unit or "
            "conv_bias_act, or a call outside"
        )
    return Invariant(implementation)


def dot_general_params(operands: Iterable[jax.Array], dimension_numbers: Any, precision: Any, dtype: Any) -> dict[str, Any]:
    """The dtypes and precision of `Static` that `lax.dot_general` derives from its keywords, read from its equation."""
    product = functools.partial(lax.dot_general, dimension_numbers=dimension_numbers, precision=precision, preferred_element_type=dtype)
    params, result = lax_params(product, *operands)
    return dict(dtypes=(result.dtype,), precision=params["precision"])


def lax_params(product: Callable, *operands: jax.Array | jax.ShapeDtypeStruct) -> tuple[dict[str, Any], Any]:
    """The parameters of a product of lax, and the type of its result, from its equation for operands without shardings."""
    with replacing_lax(False):
        (eqn,) = jax.make_jaxpr(product)(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands)).eqns
    return dict(eqn.params), eqn.outvars[0].aval


def conv_precision(precision: Any) -> Any:
    """The precision of a convolution as lax canonicalises it."""
    one = jax.ShapeDtypeStruct((1, 1, 1), jnp.float32)
    params, _ = lax_params(functools.partial(lax.conv, window_strides=(1,), padding="VALID", precision=precision), one, one)
    return params["precision"]


def sharding_in_types(name: str, sharding: NamedSharding | P | None, ndim: int) -> NamedSharding | None:
    """An `out_sharding` as types hold it: on an abstract mesh, with an entry for each axis."""
    if sharding is None:
        return None
    if not isinstance(sharding, NamedSharding | P):
        raise TypeError(f"{name}: out_sharding is {format_value(sharding)}, want a NamedSharding or a PartitionSpec")
    mesh = jax.sharding.get_abstract_mesh() if isinstance(sharding, P) else sharding.mesh.abstract_mesh
    spec = tuple(sharding if isinstance(sharding, P) else sharding.spec)
    if mesh.empty or AxisType.Explicit not in mesh.axis_types or len(spec) > ndim:
        raise ValueError(f"{name}: out_sharding is {format_value(sharding)}, want one for {ndim} axes, on a mesh with explicit axes")
    return NamedSharding(mesh, P(*spec, *(None,) * (ndim - len(spec))))
