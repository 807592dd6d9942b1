"""The axis of a label is followed through programs: it stays an axis, is coupled, or is lost, and nothing is said then."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxext.core.coupling import LOST, Coupled, Part, follow

# The label has the size 3, and nothing else has.
X = jax.ShapeDtypeStruct((3, 4), np.float32)


@pytest.fixture(autouse=True)
def as_users_write_it():
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


KEPT = {
    "elementwise": lambda x: jnp.exp(x) + 1,
    "transpose": lambda x: x.T,
    "a new axis": lambda x: x[None, :, None] * jnp.ones((2, 1, 7, 1)),
    "a sum beside it": lambda x: x.sum(1),
    "a sum before it": lambda x: x.T.sum(0),
    "argmax": lambda x: jnp.argmax(x, 1),
    "softmax": lambda x: jax.nn.softmax(x, 1),
    "cumsum": lambda x: jnp.cumsum(x, 1),
    "sort": lambda x: jnp.sort(x, 1),
    "sort with positions": lambda x: jnp.argsort(x, 1),
    "rev": lambda x: x[:, ::-1],
    "reshape behind it": lambda x: x.reshape(3, 2, 2),
    "reshape before it": lambda x: x.T.reshape(2, 2, 3),
    "squeeze": lambda x: lax.squeeze(lax.expand_dims(x, [0]), [0]),
    "slice": lambda x: x[:, 1:],
    "split": lambda x: jnp.split(x, 2, 1)[1],
    "pad": lambda x: jnp.pad(x, ((0, 0), (1, 2))),
    "concatenate": lambda x: jnp.concatenate([x, 2 * x], 1),
    "the left of a product": lambda x: x @ jnp.ones((4, 5)),
    "the right of a product": lambda x: jnp.ones((5, 4)) @ x.T,
    "the batch of a product": lambda x: jnp.einsum("nc,ncd->nd", x, jnp.ones((3, 4, 5)) * x[..., None]),
    "the right, behind a batch": lambda x: lax.dot_general(
        jnp.ones((5, 7, 4)), x.T[None] * jnp.ones((5, 1, 1)), (((2,), (1,)), ((0,), (0,)))
    ),
    "padding that is cut off": lambda x: jnp.exp(jnp.pad(x, ((2, 3), (0, 0))).T)[:, 2:5],
    "padding by other arrays": lambda x: jnp.sin(jnp.concatenate([jnp.ones((2, 4)), x, jnp.ones((2, 4))]))[2:-2],
    "a convolution of each": lambda x: lax.conv(x[:, None], jnp.ones((1, 1, 2)), (1,), "VALID"),
    "positions along another axis": lambda x: jnp.where(jnp.arange(4) < 2, x, 0),
    "a diagonal beside it": lambda x: x[:, None] * jnp.tril(jnp.ones((4, 4))),
    "jit": jax.jit(lambda x: x.T),
    "checkpoint": jax.checkpoint(lambda x: jnp.sin(x).T),
    "a derivative of its own": lambda x: jax.nn.relu(x).T,
    "a sum that nothing reads": lambda x: x + jnp.zeros_like(x.sum(0)),
}
COUPLED = {
    "a sum": ("reduce_sum", lambda x: x / x.sum(0)),
    "a maximum in jit": ("reduce_max", jax.jit(lambda x: x - x.max())),
    "argmax": ("argmax", lambda x: x + jnp.argmax(x, 0)),
    "cumsum": ("cumsum", lambda x: jnp.cumsum(x, 0)),
    "sort": ("sort", lambda x: jnp.sort(x, 0)),
    "sort by two keys": ("sort", lambda x: lax.sort((x[:, :3] * 1, x[:, :3].T * 1), dimension=1, num_keys=1)[0]),
    "rev": ("rev", lambda x: lax.rev(x, [0])),
    "a contraction": ("dot_general", lambda x: x.T @ jnp.ones((3, 5))),
    "a product with itself": ("dot_general", lambda x: x @ x.T),
    "all pairs": ("sub", lambda x: (x[:, None] - x[None]).sum(1)),
    "neighbours": ("sub of shifted", lambda x: x[1:] - x[:-1]),
    "neighbours with padding": ("sub of shifted", lambda x: x - jnp.pad(x, ((1, 0), (0, 0)))[:-1]),
    "neighbours and the first": ("sub of shifted", lambda x: jnp.concatenate([x[:1], x[1:] - x[:-1]])),
    "a rotation": ("concatenate of shifted", lambda x: jnp.roll(x, 1, 0)),
    "halves exchanged": ("concatenate of shifted", lambda x: jnp.concatenate(jnp.split(x, [1])[::-1])),
    "the first for all": ("sub of shifted", lambda x: x - x[:1]),
    "the first by its index": ("squeeze", lambda x: x - x[0]),
    "a convolution": ("conv_general_dilated", lambda x: lax.conv(x.T[None], jnp.ones((4, 4, 2)), (1,), "SAME")),
    "a window": ("reduce_window_max", lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 1), (1, 1), "SAME")),
    "positions": ("with the numbers of positions", lambda x: jnp.where(jnp.arange(3)[:, None] < 2, x, 0)),
    "positions in another order": ("with the numbers of positions", lambda x: x + jnp.arange(3).reshape(1, 3).T),
    "a diagonal": ("with the numbers of positions", lambda x: x[:, None] * jnp.eye(3)[..., None]),
}
GONE = {
    "a gather": lambda x: x[np.array([2, 0, 1])],
    "a loop": lambda x: lax.scan(lambda sum, row: (sum + row, sum + row), jnp.zeros(4), x)[1],
    "a branch": lambda x: lax.cond(True, jnp.sin, jnp.cos, x),
    "a strided slice": lambda x: lax.slice(x, (0, 0), (3, 4), (2, 1)),
    "padding between elements": lambda x: lax.pad(x, 0.0, ((0, 0, 1), (0, 0, 0))),
    "parts put together": lambda x: jnp.concatenate([2 * x[:1], x[1:]]),
    "more behind it": lambda x: jnp.concatenate([x, x], 0),
    "a reshape into one axis": lambda x: x.reshape(12),
    "a reshape into other rows": lambda x: x.reshape(2, 2, 3),
    "a reduction by a function": lambda x: lax.reduce(x, jnp.float32(0), lambda a, b: a + b * 1, (1,)),
    "foreign code": lambda x: jax.pure_callback(np.sin, x, x),
}


def place(f) -> tuple[Any, Any]:
    """Return the place of the label in the only result of a function of `X`, and that result."""
    closed, result = jax.make_jaxpr(f, return_shape=True)(X)
    (found,) = follow(closed.jaxpr, [0])
    return found, result


@pytest.mark.parametrize("name", KEPT)
def test_an_axis_that_is_kept(name):
    found, result = place(KEPT[name])
    assert found == result.shape.index(3) and isinstance(found, int)


@pytest.mark.parametrize("name", COUPLED)
def test_elements_that_are_coupled(name):
    how, f = COUPLED[name]
    found, _ = place(f)
    assert isinstance(found, Coupled) and how in found.how, found


@pytest.mark.parametrize("name", GONE)
def test_an_axis_that_is_lost(name):
    """The label stays lost in all that follows."""
    for f in (GONE[name], lambda x: GONE[name](x).sum()):
        assert place(f)[0] == LOST


def test_elements_that_are_shifted_or_cut_off():
    """A part of them, or all elsewhere: as a result that is coupled, and nothing by itself."""
    for f in (lambda x: x[1:], lambda x: jnp.pad(x, ((1, 0), (0, 0)))[:-1], lambda x: jnp.pad(x[:-1], ((0, 1), (0, 0)))):
        assert isinstance(place(f)[0], Part)


def test_what_has_no_label():
    """Numbers of positions beside it, which count nothing any more, and constants."""
    for f in (lambda x: jnp.ones(5), lambda x: jnp.arange(5).sum()):
        assert place(f)[0] is None
