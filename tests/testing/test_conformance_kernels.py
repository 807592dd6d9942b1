"""Kernels that are registered with `extend`: a failed check names the implementation and the product that it computes wrong."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bilinear import integers
from cases import other_checks

import jaxext
from jaxext import extend, testing
from jaxext.core.family import families

ONE = jax.devices()[:1]
X, W = integers((2, 3, 4)), integers((3, 2, 4), 1)


class Einsum(extend.Implementation):
    """Computes a product of labels of one letter, `times` as much where it is asked for some slots."""

    version = "1"

    def __init__(self, name, **attributes):
        self.name, self.wrong = name, ()
        vars(self).update(attributes)

    def refuses(self, call):
        return None

    def run(self, call, config, operands):
        letters = {slot: "".join(labels) for slot, labels in call.labels.items()}
        equation = f"{','.join(letters[slot] for slot in operands)}->{letters[call.open]}"
        y = jnp.einsum(equation, *call.flatten(operands).values()).reshape(call.shape)
        return y * (3 if call.open in self.wrong else 1)


@functools.cache
def form() -> Any:
    return extend.define("toy_blamed", x="B N K C", w="B K M C", y="B N M C")


def ours(x, w):
    return form()(x, w, B=0)


def reference(x, w):
    return jnp.einsum("nkc,kmc->nmc", x, w)


def rules(fn, wanted=reference, args=(X, W), checks=("eager", "jit", "vmap", "vjp", "gradient per example")):
    skip = other_checks(*checks)
    return {row.check: row.rule for row in testing.check_op(fn, wanted, args, devices=ONE, skip=skip, show=False).failures}


def registered(**attributes):
    extend.register(form(), Einsum("mine", **attributes), replace=True)


def test_a_kernel_that_is_wrong_as_such():
    registered(wrong=("y",))
    assert "call.op is 'toy_blamed_y'" in rules(ours)["eager"]


def test_a_function_around_a_right_kernel():
    """It is the function's own fault."""
    registered()
    assert not rules(ours)
    assert rules(lambda x, w: 2 * ours(x, w))["eager"].startswith("the eager rule")


def test_infinities_of_a_right_kernel():
    """They are equal, though their difference is a NaN."""
    registered()
    args = np.where(X == X.max(), np.inf, X).astype(X.dtype), np.abs(W) + 1
    with np.errstate(invalid="ignore"):  # numpy's warning, an error in tests, would end the search
        assert rules(lambda x, w: 2 * ours(x, w), args=args, checks=("eager",))["eager"].startswith("the eager rule")


def test_a_wrong_kernel_behind_a_reduction_by_a_function():
    """The function of the reduction, of scalars, is no program that the equation calls."""
    registered(wrong=("y",))
    summed = lambda x: jax.lax.reduce(x, jnp.asarray(0, x.dtype), lambda a, b: a + b * 1, (0,))[None]
    found = rules(lambda x, w: ours(summed(x), w), lambda x, w: reference(summed(x), w))
    assert "implementation 'mine' is wrong where call.op is 'toy_blamed_y'" in found["eager"]


def test_a_kernel_of_jaxexts_operations():
    """One of a convolution's three roles is wrong, and is named."""

    class Conv(Einsum):
        def run(self, call, config, operands):
            plan: Any = families["conv"].implementations[-1].plan(call)
            return plan.run(plan.configs[0], operands) * (3 if call.op == "conv2d_dgrad" else 1)

    extend.register("conv", Conv("blamed"))
    x, w = integers((1, 2, 3, 3)), integers((2, 2, 2, 2), 1)
    conv = functools.partial(jaxext.conv, window_strides=(1, 1), padding="VALID", implementation="blamed")
    found = rules(conv, functools.partial(jax.lax.conv, window_strides=(1, 1), padding="VALID"), (x, w))
    assert found.keys() == {"vjp"} and "implementation 'blamed' is wrong where call.op is 'conv2d_dgrad' and call.open 'x'" in found["vjp"]


@pytest.mark.parametrize(
    ("attributes", "rule"),
    [
        (dict(run=lambda *_: np.ones((2, 3), np.float32)),
            "`run` of implementation 'mine' must return `call.shape` and `call.dtype` for toy_blamed_y"),
        (dict(refuses=lambda call: True), "`refuses` of implementation 'mine' must return what the message wants"),
    ],
)  # fmt: skip
def test_a_kernel_that_answers_wrong(attributes, rule):
    registered(**attributes)
    assert rules(ours) == {"eager": rule}


def test_a_kernel_that_was_named_and_refuses():
    registered(refuses=lambda call: None if call.open == "y" else "forward only")
    found = rules(functools.partial(form(), B=0, implementation="mine"))
    assert found == {"vjp": "implementation 'mine' was named, and refuses: forward only"}
