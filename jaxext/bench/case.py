"""The functions that are measured for a problem, made with lax's operation or with ours.

A gradient is a pullback with the cotangent as an argument, so that only one role is computed.  A step is all roles in one program, as in
training.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import lax

import jaxext
from jaxext import extend
from jaxext.backends import fields
from jaxext.core.form import Form, owner

LAYOUTS = {1: ("NHC", "HIO", "NHC"), 2: ("NHWC", "HWIO", "NHWC"), 3: ("NDHWC", "DHWIO", "NDHWC")}
LEARNING_RATE = 1e-3

STEP = "step"  # the role that is all others in one program

# Kind of numbers -> the dtypes of both operands and the result, and how products of float32 are made.
NUMBERS = {
    "bf16": (("bf16", "bf16", "bf16"), "tf32"),
    "fp16": (("fp16", "fp16", "fp16"), "tf32"),
    "tf32": (("fp32", "fp32", "fp32"), "tf32"),
    "tf32x3": (("fp32", "fp32", "fp32"), "tf32x3"),
    "bf16x3": (("fp32", "fp32", "fp32"), "bf16x3"),
    "bf16x6": (("fp32", "fp32", "fp32"), "bf16x6"),
    "ieee": (("fp32", "fp32", "fp32"), "ieee"),
    "fp8": (("fp8e4nv", "fp8e4nv", "bf16"), "tf32"),
    "fp8 both": (("fp8e4nv", "fp8e5", "fp32"), "tf32"),
    "int8": (("i8", "i8", "i32"), "tf32"),
    "fp32bf16": (("fp32", "bf16", "fp32"), "tf32"),
    "int8 weights": (("bf16", "i8", "bf16"), "tf32"),
    "int4 weights": (("bf16", "i4", "bf16"), "tf32"),
}
_NAMES = {short: name for name, short in fields.DTYPES.items()} | {"i4": "int4"}
_PRECISIONS = {
    "tf32": None,  # what GPUs take by default
    "tf32x3": "TF32_TF32_F32_X3",
    "bf16x3": "BF16_BF16_F32_X3",
    "bf16x6": "BF16_BF16_F32_X6",
    "ieee": "highest",
}
DTYPES = {numbers: tuple(_NAMES[dtype] for dtype in dtypes) for numbers, (dtypes, _) in NUMBERS.items()}
PLAIN = {"bf16": "bfloat16", "fp16": "float16", "tf32": "float32"}  # kinds that go by the name of their one dtype


def kind(dtype: str) -> str:
    """The kind of numbers with that name or dtype."""
    numbers = {plain: numbers for numbers, plain in PLAIN.items()}.get(dtype, dtype)
    if numbers not in NUMBERS:
        raise ValueError(f"dtype is {dtype!r}, want one of {', '.join([*PLAIN.values(), *NUMBERS])}")
    return numbers


def how(numbers: str) -> dict[str, Any]:
    """The arguments of lax's operations for this kind of numbers."""
    first, second, result = DTYPES[numbers]
    preferred = {} if first == second == result else {"preferred_element_type": result}
    return {"precision": _PRECISIONS[NUMBERS[numbers][1]]} | preferred


@dataclasses.dataclass(frozen=True)
class Case:
    """One role of a problem in one kind of numbers.

    `build(library)` is the function to measure, of arrays of those shapes and dtypes, by "lax", by "jaxext" as it comes, or by the
    jaxext implementation of that name.  `truth` is a function of the same numbers in float64 (or int64) that gives the right result.
    """

    name: str
    problem: str  # the name of the problem that it is of
    tags: frozenset[str]
    role: str
    numbers: str  # of `NUMBERS`
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]  # of the same arrays
    flops: float  # products and additions; none with the zeros that a dilation inserts
    operation: str  # of lax's and jaxext's, such as "dot_general"
    static: Mapping[str, Any]  # its arguments that say what is computed
    how: Mapping[str, Any]  # its arguments that say in which numbers
    function: Callable[[Callable], Callable]  # of the operation with those arguments -> of the arrays

    @property
    def dtype(self) -> str:
        """Return the dtype of the first array."""
        return self.dtypes[0]

    def build(self, library: str) -> Callable:
        return self.function(functools.partial(_operation(library, self.operation), **self.static, **self.how))

    @property
    def truth(self) -> Callable:
        # jaxext refuses quantised numbers in float64
        library = "lax" if self.operation in ("quantized_matmul", "ragged_scaled_dot") else "xla"
        return self.function(functools.partial(_operation(library, self.operation), **self.static))


def _operation(library: str, name: str) -> Callable:
    if name in COMPOSITIONS:
        return COMPOSITIONS[name] if library == "lax" else _ours(OF_ARRAYS.get(name) or getattr(jaxext, name), library)
    if declared := next((form for form, _ in owner.values() if form.name == name), None):
        return functools.partial(_definition, declared) if library == "lax" else _ours(extend.Bilinear(declared), library)
    if library == "lax":
        return functools.partial(_of_wider, getattr(lax, name))
    return _ours(getattr(jaxext, name), library)


def _ours(operation: Callable, library: str) -> Callable:
    return operation if library == "jaxext" else functools.partial(operation, implementation=library)


def _definition(form: Form, first: jax.Array, second: jax.Array, **how) -> jax.Array:
    """A user's form as lax's users write it."""
    letters = dict(zip(form.free, string.ascii_letters, strict=False))
    lhs, rhs, result = ("".join(letters[label] for label in labels) for labels in form.slots.values())
    return jnp.einsum(f"{lhs},{rhs}->{result}", first, second, **how)


def _linear(x, w, bias, *, activation: str, residual, precision=None) -> jax.Array:
    """Compute `linear` as users of jnp write it."""
    z = jnp.matmul(x, w, precision=precision)
    return _ACTIVATIONS[activation](z + jnp.broadcast_to(bias, z.shape)) + residual


def _gated(x, weights, *, activation: str, precision=None) -> jax.Array:
    gate, up = (jnp.matmul(x, weights[:, i], precision=precision) for i in (0, 1))
    return _ACTIVATIONS[activation](gate) * up


# What has no namesake in lax, as lax's users write it.  own.py adds jaxext's own operations.
COMPOSITIONS: dict[str, Callable] = {"linear": _linear, "gated_linear_unit": _gated}
OF_ARRAYS: dict[str, Callable] = {}  # operations of more than arrays
_ACTIVATIONS: Mapping[str, Callable] = {
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
}


def epilogue(role: str, depth: int) -> Callable:
    """The function of a product with an epilogue, or of a step with a cotangent in front.

    Benchmarks draw weights of variance one, so the input is scaled: else every activation would be saturated.
    """

    def function(op):
        def forward(x, w, *added):
            more = {} if not added else {"residual": added[1]}
            return op(x * jnp.asarray(1 / math.sqrt(depth), x.dtype), w, *added[:1], **more)

        def step(cotangent, *operands):
            y, pullback = jax.vjp(forward, *operands)
            return y, *pullback(cotangent)

        return {"forward": forward, "step": step}[role]

    return function


def _of_wider(operation: Callable, a, b, *, preferred_element_type=None, **static):
    """lax's product of 8-bit floats: XLA passes the operands to cuBLASLt if the program widens them first."""
    if preferred_element_type is not None and jnp.issubdtype(a.dtype, jnp.floating) and a.dtype.itemsize == 1:
        return operation(a.astype(preferred_element_type), b.astype(preferred_element_type), **static)
    return operation(a, b, preferred_element_type=preferred_element_type, **static)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """A problem, given by sizes, in some roles and kinds of numbers.  The base class of all kinds of problems."""

    name: str
    roles: tuple[str, ...]
    numbers: tuple[str, ...] = ("bf16",)
    tags: frozenset[str] = frozenset()

    stages: ClassVar[tuple[str, ...]]  # what to make smaller, one after the other, for a smaller problem

    @property
    def products(self) -> tuple[str, ...]:
        """The roles of one product; only kinds with a kernel use it."""
        return tuple(role for role in self.roles if role != STEP)

    def cases(self, roles: Sequence[str] = ()) -> list[Case]:
        """All roles, or those named, in all of its numbers, except combinations that nobody would write."""
        asked = itertools.product(self.numbers, [role for role in self.roles if not roles or role in roles])
        return [self.case(role, numbers) for numbers, role in asked if self._writable(role, numbers)]

    def case(self, role: str, dtype: str) -> Case:
        """`dtype` is one of `NUMBERS`, or "bfloat16", "float16" or "float32"; ValueError if nobody would write such a role in it."""
        if role not in self.roles or not self._writable(role, kind(dtype)):
            raise ValueError(f"{self.name}: no case for role {role!r} in {dtype!r}, its roles are {', '.join(self.roles)}")
        operation, static, function = self._function(role)
        shapes = self.shapes(role)
        first, second, result = DTYPES[kind(dtype)]
        # The operands in the order of the form's slots; beyond two, all are of one dtype.
        dtypes = (second, first) if role == "nt" else (first, second, *(result,) * (len(shapes) - 2))[: len(shapes)]
        return Case(
            name=f"{self.name} {role} {PLAIN.get(kind(dtype), dtype)}",
            problem=self.name,
            tags=self.tags,
            role=role,
            numbers=kind(dtype),
            shapes=shapes,
            dtypes=dtypes,
            flops=self.flops(role),
            operation=operation,
            static=static,
            how=self._how(kind(dtype)),
            function=function,
        )

    def _how(self, numbers: str) -> Mapping[str, Any]:
        return how(numbers)

    def _writable(self, role: str, numbers: str) -> bool:
        """Return whether lax supports the product: a gradient has mixed dtypes if the result has another dtype than the operands."""
        first, second, result = NUMBERS[numbers][0]
        return first == second == result or first == second and role == "fprop"

    @property
    def size(self) -> str:
        """The sizes, which distinguish it from others of the same name."""
        raise NotImplementedError

    def shapes(self, role: str) -> tuple[tuple[int, ...], ...]:
        raise NotImplementedError

    def flops(self, role: str) -> float:
        raise NotImplementedError

    def _function(self, role: str) -> tuple[str, Any, Any]:
        """The operation, its static arguments, and the function of arrays made with it."""
        raise NotImplementedError

    def halved(self, stage: str) -> Self:
        """The problem with the largest size of that stage halved, if it can be halved."""
        raise NotImplementedError


def product(role: str, batched: bool) -> tuple[Mapping[str, Any], Callable]:
    """The static arguments and the function of a matrix product a b, of one of its gradients c bᵀ and aᵀ c, or of all three."""
    contracted = {"nn": ((1,), (0,)), "nt": ((1,), (1,)), "tn": ((0,), (0,)), "step": ((1,), (0,))}[role]
    if not batched:
        static = {"dimension_numbers": (contracted, ((), ()))}
    else:
        (left,), (right,) = contracted
        static = {"dimension_numbers": (((left + 1,), (right + 1,)), ((0,), (0,)))}
    return static, _step if role == "step" else lambda dot: dot


def ragged(role: str, sizes: Sequence[int]) -> tuple[Mapping[str, Any], Callable]:
    """The static arguments and the function of a ragged product of rows and matrices, of its gradients as for `product`, or of all.

    The compiler must not know the sizes, which depend on data.
    """
    contracted = {"nn": ((1,), (1,)), "nt": ((1,), (2,)), "tn": ((0,), (0,)), "step": ((1,), (1,))}[role]
    numbers = lax.RaggedDotDimensionNumbers((contracted, ((), ())), [0], [] if role == "tn" else [0])

    def function(op):
        def of_sizes(first, second):
            return op(first, second, group_sizes=lax.optimization_barrier(jnp.asarray(sizes, jnp.int32)))

        return _step(of_sizes) if role == "step" else of_sizes

    return {"ragged_dot_dimension_numbers": numbers}, function


def bilinear(form: Form, role: str, shapes: Mapping[str, Sequence[int]]) -> Callable:
    """The function of a form's product whose operands and result have such shapes, or of its gradient in one operand."""
    *operands, result = form.slots
    open = next(slot for slot, name in form.roles.items() if name == role)
    if open == result:
        return lambda op: op

    def gradient(op):
        def of(other, cotangent):
            def product(x):
                return op(x, other) if open == operands[0] else op(other, x)

            return jax.linear_transpose(product, jax.ShapeDtypeStruct(shapes[open], other.dtype))(cotangent)[0]

        return of

    return gradient


def convolution(role: str, x: Sequence[int], w: Sequence[int], mapped: Sequence[int | None] | None) -> Callable:
    """The function of a convolution of such shapes, of a gradient, or of all three; `mapped` arguments have one more axis."""

    def function(op):
        f = {
            "fprop": op,
            "dgrad": lambda w, y: jax.vjp(lambda x: op(x, w), jnp.zeros(x, w.dtype))[1](y)[0],
            "wgrad": lambda x, y: jax.vjp(lambda w: op(x, w), jnp.zeros(w, x.dtype))[1](y)[0],
            "step": _step(op),
        }[role]
        return f if mapped is None else jax.vmap(f, tuple(mapped))

    return function


def _step(op: Callable) -> Callable:
    def step(a, b, cotangent):
        c, pullback = jax.vjp(op, a, b)
        return c, *pullback(cotangent)

    return step


def network(role: str) -> Callable:
    """The function of a network of matrix products with GELUs between them, of its gradient in the input or in the weights, or of a step of
    training: mean squared error and gradient descent.

    Weights are normal numbers of variance one, as benchmarks draw them, so their usual scale is applied after the product.  GELU is used
    because the slope of a ReLU jumps: gradients in 16 bits would differ by several percent with the rounding.  Elementwise operations are
    in float32, which costs nothing.
    """

    def function(dot):
        def forward(x, *weights):
            for w in weights[:-1]:
                x = dot(x, w)
                wide = x if x.dtype == jnp.float64 else x.astype(jnp.float32)
                x = jax.nn.gelu(wide * math.sqrt(2 / w.shape[0])).astype(x.dtype)
            return dot(x, weights[-1])

        def step(x, y, *weights):
            def loss(weights):
                return jnp.mean((forward(x, *weights) - y) ** 2)

            value, gradients = jax.value_and_grad(loss)(weights)
            return value, *(w - LEARNING_RATE * g for w, g in zip(weights, gradients, strict=True))

        return {
            "forward": forward,
            "dgrad": lambda x, y, *weights: jax.vjp(lambda x: forward(x, *weights), x)[1](y)[0],
            "wgrad": lambda x, y, *weights: jax.vjp(lambda *weights: forward(x, *weights), *weights)[1](y),
            "step": step,
        }[role]

    return function
