"""Where a label's axis goes in a program, and where its elements are coupled; what cannot be followed is not accused."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxext.forms.coupling import LOST, Coupled, follow

X = jnp.ones((4, 4))  # square, so that no size tells the axes apart
ROWS = jnp.arange(4)


def places(function, *args, at):
    return follow(jax.make_jaxpr(function)(*args).jaxpr, at)


def rotated(x):
    angle = jnp.arange(4.0)[:, None] * 0.1 ** jnp.arange(4.0)[None]
    return x * jnp.sin(angle)


# name -> a function of X, and what becomes of its first and of its second axis: where it lies, the primitive that couples it, or LOST
PROGRAMS = {
    "softmax": (jax.nn.softmax, 0, "reduce_max"),
    "cumsum": (lambda x: jnp.cumsum(x, 0), "cumsum", 1),
    "sum": (lambda x: x.sum(1), 0, "reduce_sum"),
    "sort": (lambda x: jnp.sort(x, 0), "sort", 1),
    "reversed": (lambda x: x[::-1], "rev", 1),
    "argmax": (lambda x: jnp.argmax(x, 0), "argmax", 0),
    "a product of matrices": (lambda x: x @ x, "dot_general", "dot_general"),
    "a product with weights": (lambda x: x @ jnp.ones((4, 3)), 0, "dot_general"),
    "a batch of products": (lambda x: jnp.einsum("nd,nd->n", x, x), 0, "dot_general"),
    "transposed": (lambda x: x.T, 1, 0),
    "the axis with itself": (lambda x: x + x.T, "add", "add"),
    "inside of jit, checkpoint and a custom derivative": (jax.checkpoint(lambda x: jax.nn.relu(jax.nn.silu(x))), 0, 1),
    "a common maximum": (lambda x: x - x.max(), "reduce_max", "reduce_max"),
    "joined with others": (lambda x: jnp.concatenate([x, x], 1), 0, LOST),
    "reshaped": (lambda x: x.reshape(2, 2, 4).reshape(4, 2, 2).mean(-1), LOST, LOST),
    "split and joined": (lambda x: jnp.concatenate(jnp.split(jnp.sin(x), 2, 1), 1), 0, LOST),
    "one more axis": (lambda x: (x[:, None] * jnp.ones((4, 3, 4))).sum(1), 0, 1),
    "padded": (lambda x: jnp.pad(x, ((0, 0), (1, 0)))[:, :-1], 0, LOST),
    "rolled": (lambda x: jnp.roll(x, 1, 0), LOST, 1),
    "a loop": (lambda x: lax.map(jnp.sin, x), LOST, LOST),
    "positions": (rotated, "mul with the numbers of positions", "mul with the numbers of positions"),
    "positions of another axis": (lambda x: x * ROWS[None].astype(x.dtype) * jnp.arange(4.0)[None], 0, "mul with the numbers of positions"),
    "a triangle": (jnp.tril, "select_n with the numbers of positions", "select_n with the numbers of positions"),
    "a constant": (lambda x: x + jnp.zeros_like(x) + jnp.eye(4).sum(), 0, 1),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_where_an_axis_goes(name):
    function, *wanted = PROGRAMS[name]
    for axis, want in enumerate(wanted):
        (got,) = places(function, X, at=[axis])
        if isinstance(got, Coupled):
            assert got.how.split(" at ")[0] == want
        else:
            assert got == want


def test_a_gather_says_nothing_and_a_sum_beside_it_does():
    def loss(logits, labels):
        lse = jax.nn.logsumexp(logits, -1)
        return lse - jnp.take_along_axis(logits, labels[:, None], -1)[:, 0], lse, lse + lse.sum()

    gathered, lse, total = places(loss, X, ROWS, at=[0, 0])
    assert (gathered, lse) == (LOST, 0)
    assert isinstance(total, Coupled) and "test_coupling.py" in total.how
