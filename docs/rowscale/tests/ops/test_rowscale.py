"""Rows times numbers: every rule of JAX, and errors."""

import jax.numpy as jnp
import pytest

from jaxext import testing
from jaxext.ops.rowscale import rowscale

X, SCALE = jnp.ones((4, 4, 4)), jnp.arange(4.0)


def test_every_rule_is_the_references():
    testing.check_op(
        rowscale, lambda x, scale: x * scale[None, :, None], (X, SCALE), show=False
    ).raise_if_failed()


@pytest.mark.parametrize(
    ("operands", "message"),
    [
        ((X, SCALE[:3]), r"scale has the shape \(3,\), want \(4,\): a number for each row"),
        ((SCALE, SCALE), r"x has the shape \(4,\), want \(..., M, N\)"),
        ((X, 2.0), "scale is 2.0, want an array"),
    ],
)
def test_a_wrong_argument_is_refused(operands, message):
    with pytest.raises(TypeError, match=f"^rowscale: {message}"):
        rowscale(*operands)
