"""Messages describe an array by its dtype and shape: a wrong call with large arrays gives a short message, with none of their numbers."""

import collections
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import registrations

import jaxext
from jaxext import extend, parallel, privacy, testing
from jaxext._messages import format_value

A: Any = np.full((50, 40), 0.25, np.float32)
AS: Any = [A]
Pair = collections.namedtuple("Pair", "first second")


@pytest.fixture(autouse=True)
def undone():
    with registrations.undone():
        yield


class Holder:
    """A class that is no pytree, with a repr of as many lines as its array has."""

    def __repr__(self):
        return f"Holder({A})"


class Broken:
    shape = property(lambda self: 1 // 0)

    def __repr__(self):
        raise ValueError


class Mine(extend.Implementation):
    """Named, of a version, and with a method that gives an array where a reason is wanted."""

    name, version = "mine_typed", "1"

    def refuses(self, call) -> Any:
        return A

    def run(self, operands) -> Any:
        return A


@pytest.mark.parametrize("x, text", [
    (A, "float32[50,40]"),
    (np.ones((), np.int8), "int8[]"),
    ([A, 1, None], "[float32[50,40], 1, None]"),
    ({"a": (A, "b")}, "{'a': (float32[50,40], 'b')}"),
    (Pair(A, 3), "Pair(first=float32[50,40], second=3)"),
    (functools.partial(max, A, key=A), "partial(<built-in function max>, float32[50,40], key=float32[50,40])"),
    (jax.ShapeDtypeStruct((3,), np.int8), "ShapeDtypeStruct(int8[3])"),
    (np.float32(0.5), "np.float32(0.5)"),
    ("cudnn", "'cudnn'"),
    (list(range(50)), "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, ...]"),
    (np.float32, "<class 'numpy.float32'>"),
], ids=str)  # fmt: skip
def test_a_value(x, text):
    assert format_value(x) == text


def test_arrays_of_jax():
    x = jnp.asarray(A)
    assert format_value(x) == format_value(x.T.T) == "float32[50,40]" and format_value(jax.random.key(0)).startswith("key<")
    assert format_value(jaxext.quantization.quantize(x)) == "Quantized(qvalue=int8[50,40], scale=float32[1,40], zero_point=None)"
    said = []
    jax.jit(jax.grad(lambda x: (said.append(format_value({"x": x})), x.sum())[1]))(x)
    assert said == ["{'x': float32[50,40]}"]
    x.delete()
    assert format_value(x) == "float32[50,40]"


def test_a_value_is_a_short_line():
    for x in (Holder(), [Holder()] * 99, "a" * 999, Broken(), {"a": [[[[[[[A]]]]]]]}):
        assert "\n" not in format_value(x) and len(format_value(x)) <= 200
    assert format_value(Broken()).startswith("<Broken instance")


def operation() -> Any:
    return extend.define("typed_product", x="B M K", w="B K N", y="B M N")


def declared(**given) -> Any:
    arguments: dict[str, Any] = {"operands": {"x": "B"}, "results": {"y": "B"}} | given
    return extend.operation("declared_operation", lambda x: x, **arguments)


# What is wrong -> the call, and whose argument is told.
WRONG: dict[str, tuple[Any, str]] = {
    "an operand": (lambda: jaxext.linear(AS + AS, A.T), "linear: x is [float32[50,40], float32[50,40]], want"),
    "a ragged operand": (lambda: jaxext.ragged_dot(AS, A, A), "ragged_dot: lhs is [float32[50,40]], want"),
    "ragged numbers": (lambda: jaxext.ragged_dot_general(A, A, A, A), "ragged_dot_dimension_numbers is float32[50,40], want"),
    "an activation": (lambda: jaxext.linear(A, A.T, activation=A), "activation is float32[50,40], want"),
    "a sharding": (lambda: jaxext.linear(A, A.T, out_sharding=A), "out_sharding is float32[50,40], want"),
    "a weight": (lambda: jaxext.quantized_matmul(A, (A, A)), "w is (float32[50,40], float32[50,40]), want"),
    "bits": (lambda: jaxext.quantization.quantize(A, bits=A), "bits is float32[50,40], want"),
    "a group": (lambda: jaxext.quantization.quantize(A, group=A), "group is float32[50,40], want"),
    "steps": (lambda: jaxext.newton_schulz(A, steps=A), "steps is float32[50,40], want"),
    "eps": (lambda: jaxext.newton_schulz(A, eps=A), "eps is float32[50,40], want"),
    "coefficients": (lambda: jaxext.newton_schulz(A, coefficients=A), "coefficients is float32[50,40], want"),
    "a GPU": (lambda: jaxext.use_target(A), "arch is float32[50,40], want"),
    "what is decorated": (lambda: jaxext.in_place_of_lax()(A), "got float32[50,40]"),
    "explain": (lambda: jaxext.explain(A)(A), "explain: fun is float32[50,40], want"),
    "a platform": (lambda: jaxext.explain(jnp.sin, platform=A)(A), "platform is float32[50,40], want"),
    "tune": (lambda: jaxext.tune(A)(A), "tune: fun is float32[50,40], want"),
    "candidates": (lambda: jaxext.tune(jnp.sin, candidates=A)(A), "candidates is float32[50,40], want"),
    "doctor": (lambda: jaxext.doctor(A)(A), "doctor: fun is float32[50,40], want"),
    "an implementation": (lambda: extend.register("matmul", A), "implementation is float32[50,40], want"),
    "a name": (lambda: extend.define(A, x="B M", w="B N", y="M N"), "the name is float32[50,40], want"),
    "labels": (lambda: extend.define("told_labels", x=A, w="B N", y="M N"), "define: x is float32[50,40], want"),
    "operands": (lambda: declared(operands=AS), "operands of declared_operation is [float32[50,40]], want"),
    "an operand's labels": (lambda: declared(operands={"x": A}), "x of declared_operation is float32[50,40], want"),
    "a word": (lambda: declared(unsharded=A), "unsharded of declared_operation is float32[50,40], want"),
    "a call": (lambda: operation()(AS, A), "typed_product: x is [float32[50,40]], want"),
    "arguments": (lambda: testing.check_op(jnp.sin, jnp.sin, A), "args is float32[50,40], want"),
    "what is skipped": (lambda: testing.check_op(jnp.sin, jnp.sin, (A,), skip=A), "skip is float32[50,40], want"),
    "a split": (lambda: testing.Split((A,), jax.P()), "args and result have [float32[50,40]], want"),
    "collectives": (lambda: testing.Split((), (), AS), "collectives is [float32[50,40]], want"),
    "a form": (lambda: parallel.cost(A, {}, sizes={}, dtype="float32"), "form is float32[50,40], want"),
    "a number of devices": (
        lambda: parallel.cost("matmul", {"M": A}, sizes=dict(M=4, K=4, N=4), dtype="float32"),
        "sharding of M is float32[50,40], want",
    ),
    "an axis of the mesh": (lambda: parallel.all_gather_matmul(A, A.T, axis_name=AS), "axis_name is [float32[50,40]], want"),
    "axes of the mesh": (
        lambda: parallel.halo_conv(A[None, None], A[None, None], (1, 1), "SAME", axis_names=A),
        "axis_names is float32[50,40], want",
    ),
    "a loss": (lambda: privacy.clipped_grad(A, l2_clip_norm=1.0), "fun is float32[50,40], want"),
    "a norm": (lambda: privacy.clipped_grad(jnp.sin, l2_clip_norm=AS), "l2_clip_norm is [float32[50,40]], want"),
    "numbers of arguments": (lambda: privacy.clipped_grad(jnp.sin, l2_clip_norm=1.0, argnums=(A,)), "argnums is (float32[50,40],), want"),
    "a result": (
        lambda: privacy.clipped_grad(lambda p, x: {"loss": p}, l2_clip_norm=1.0)(A, A),
        "fun returned {'loss': float32[50,40]} for one example",
    ),
}


@pytest.mark.parametrize("call, text", WRONG.values(), ids=WRONG)
def test_a_wrong_call_with_large_arrays(call, text):
    with pytest.raises((TypeError, ValueError)) as raised:
        call()
    message = str(raised.value)
    assert text in message and "0.25" not in message and len(message) < 1000 and "\n" not in message


def test_a_wrong_answer_of_an_implementation():
    product = operation()
    extend.register(product, Mine())
    said = r"typed_product_\w+: `refuses` of implementation 'mine_typed' returned float32\[50,40\], want"
    with pytest.raises(TypeError, match=said) as raised:
        product(A[None], A.T[None], implementation="mine_typed")
    assert "0.25" not in str(raised.value)
