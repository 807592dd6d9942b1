"""Convolutions in loops have XLA's own layout, without which its CPU backend is some fifteen times slower there."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxext

LAYOUTS = {
    "channels last": (("NHWC", "HWIO", "NHWC"), (2, 8, 8, 4), (3, 3, 4, 4)),
    "channels first": (("NCHW", "OIHW", "NCHW"), (2, 4, 8, 8), (4, 4, 3, 3)),
    "one axis": (("NWC", "WIO", "NWC"), (2, 32, 4), (5, 4, 4)),
}
OWN = re.compile(r"b(\d+)f_\1io->b\1f")


def layouts(f, *args) -> list[str]:
    """Return the layouts of every convolution in the compiled program."""
    text = jax.jit(f).lower(*args).compile().as_text()
    assert text is not None
    return re.findall(r" convolution\(.*dim_labels=([\w>-]+)", text)


@pytest.mark.parametrize("case", LAYOUTS)
def test_values_and_gradients_have_the_layout(case):
    numbers, x, w = LAYOUTS[case]
    x, w = jnp.ones(x), jnp.ones((3, *w)) / 36

    def network(conv):
        conv = functools.partial(conv, window_strides=(1,) * (x.ndim - 2), padding="SAME", dimension_numbers=numbers)
        return lambda x, w: lax.scan(lambda x, w: (jnp.tanh(conv(x, w)), None), x, w)[0]

    def both(f):
        return lambda x, w: jax.value_and_grad(lambda w: f(x, w).sum())(w)

    found = layouts(both(network(jaxext.conv_general_dilated)), x, w)
    assert len(found) == 3, found  # forward, and the gradients in the input and in the filter
    assert all(OWN.fullmatch(layout) for layout in found), found
    assert not all(OWN.fullmatch(layout) for layout in layouts(both(network(lax.conv_general_dilated)), x, w)), "lax is as fast now"


def test_filter_gradients_with_groups_are_no_convolution_of_lax():
    """XLA has a fast one for them, but not in a loop."""
    x, w = jnp.ones((8, 64, 128), jnp.float32), jnp.ones((3, 4, 128), jnp.float32) / 4
    numbers = {"dimension_numbers": ("NWC", "WIO", "NWC"), "feature_group_count": 128}

    def gradient(conv):
        network = lambda w, x: lax.scan(lambda x, w: (jnp.tanh(conv(x, w[:, None], (1,), [(3, 0)], **numbers)), None), x, w)[0].sum()
        return jax.grad(network)

    others = [
        [layout for layout in layouts(gradient(conv), w, x) if not OWN.fullmatch(layout)]
        for conv in (jaxext.conv_general_dilated, lax.conv_general_dilated)
    ]
    assert others[0] == [] and others[1], others
