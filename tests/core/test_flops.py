"""`jax.experimental.roofline` counts our products as it counts lax's: every role, layout and geometry."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import roofline

import jaxext
from jaxext import extend
from jaxext.core import flops
from jaxext.core.form import owner

A, B = jax.ShapeDtypeStruct((4, 6, 8), jnp.bfloat16), jax.ShapeDtypeStruct((4, 8, 5), jnp.bfloat16)
NHWC, NWC = ("NHWC", "HWIO", "NHWC"), ("NWC", "WIO", "NWC")


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


# Ours, lax's, the operands.
CASES = {
    "matmul": (jaxext.matmul, jnp.matmul, (A, B)),
    "vector": (jaxext.matmul, jnp.matmul, (floats(7), floats(7, 3))),
    "two contracted, in float32": (
        *(functools.partial(f, dimension_numbers=(((1, 2), (2, 1)), ((0,), (0,)))) for f in (jaxext.dot_general, lax.dot_general)),
        (A, jax.ShapeDtypeStruct((4, 8, 6, 3), jnp.bfloat16)),
    ),
} | {
    name: (
        *(functools.partial(f, **keywords) for f in (jaxext.conv_general_dilated, lax.conv_general_dilated)),
        (floats(*x), floats(*w)),
    )
    for name, x, w, keywords in [
        ("same", (2, 9, 8, 4), (3, 3, 4, 6), dict(window_strides=(1, 1), padding="SAME", dimension_numbers=NHWC)),
        ("strided, cropped", (2, 4, 9, 8), (6, 4, 3, 2), dict(window_strides=(2, 3), padding=((2, -1), (-1, 3)))),
        ("transposed", (2, 4, 5, 6), (6, 4, 3, 4), dict(window_strides=(1, 1), padding=((2, 1), (3, 2)), lhs_dilation=(2, 3))),
        ("dilated", (2, 9, 4), (3, 4, 6), dict(window_strides=(1,), padding="SAME", rhs_dilation=(2,), dimension_numbers=NWC)),
        ("grouped", (2, 9, 4), (3, 2, 6), dict(window_strides=(1,), padding="SAME", feature_group_count=2, dimension_numbers=NWC)),
        ("batch groups", (4, 3, 9), (6, 3, 3), dict(window_strides=(1,), padding="SAME", batch_group_count=2)),
        ("no axis", (2, 4), (6, 4), dict(window_strides=(), padding=())),
    ]
}


def counted(function, *args, **keywords):
    """All that it counts but the peak, which holds the transpositions of layouts."""
    result = roofline.roofline(function, **keywords)(*args)[1]
    return result.flops, result.unfused_flops, result.hbm_bytes, result.unfused_hbm_bytes


@pytest.mark.parametrize("name", CASES)
def test_a_product_counts_as_lax(name):
    ours, theirs, args = CASES[name]
    want = counted(theirs, *args)
    assert want[1] > 0
    assert counted(ours, *args) == want
    assert counted(jax.vmap(ours), *(floats(3, *x.shape) for x in args)) == counted(jax.vmap(theirs), *(floats(3, *x.shape) for x in args))


@pytest.mark.parametrize("name", CASES)
def test_the_gradients_count_as_lax(name):
    """Operations: how many bytes lax's own gradients move depends on the layouts that it chose."""
    ours, theirs, args = CASES[name]

    def backward(function, x, w):
        y, pull = jax.vjp(function, x, w)
        return pull(y)

    assert counted(functools.partial(backward, ours), *args)[1] == counted(functools.partial(backward, theirs), *args)[1]


def test_pinned_operands():
    for pinned in (dict(pin_lhs_in_vmem=True), dict(pin_rhs_in_vmem=True)):
        assert counted(jaxext.matmul, A, B, **pinned) == counted(jnp.matmul, A, B, **pinned)


def test_an_operation_of_a_user():
    operation = extend.define("of_roofline", x="B N K C", w="B K M C", y="B N M C")
    flops = counted(functools.partial(operation, B=0), floats(5, 3, 64), floats(3, 7, 64))[0]
    assert flops == 2 * 5 * 3 * 7 * 64


def test_a_product_that_comes_after_as_many_others_were_undone(monkeypatch):
    operation = extend.define("of_roofline_too", x="B N K C", w="B K M C", y="B N M C")
    own = {primitive for primitive in owner if primitive.name.startswith("of_roofline_too")}
    monkeypatch.setattr(flops, "_registered", {*owner} - own | {object() for _ in own})
    assert counted(functools.partial(operation, B=0), floats(5, 3, 64), floats(3, 7, 64))[0] == 2 * 5 * 3 * 7 * 64


def test_it_may_be_imported_after_us():
    code = """
import sys, jax.numpy as jnp, jaxext
x = jnp.ones((3, 3))
jaxext.matmul(x, x)
assert "jax.experimental.roofline" not in sys.modules
from jax.experimental import roofline
print(roofline.roofline(jaxext.matmul)(x, x)[1].flops)
"""
    root = os.path.dirname(os.path.dirname(jaxext.__file__))
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": root}, capture_output=True, text=True, timeout=300)
    assert done.stdout == "54\n", done.stderr
