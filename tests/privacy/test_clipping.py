"""Norms of per-example gradients and clipped sums, compared with those of the gradients themselves in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from example_losses import LOSSES, STORED

import jaxext

CLIP = 0.5


def gradients(loss, p, batch):
    """Of each example."""
    return jax.vmap(lambda example: jax.grad(loss)(p, jax.tree.map(lambda x: x[None], example)))(batch)


def norms_of(found):
    return jnp.sqrt(sum((g.astype(np.float64) ** 2).reshape(len(g), -1).sum(1) for g in jax.tree.leaves(found)))


def clipped(found, clip=CLIP):
    factors = jnp.minimum(1, clip / norms_of(found))
    return jax.tree.map(lambda g: jnp.tensordot(factors, g.astype(np.float64), 1), found)


def close(actual, expected, error=1e-10):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert x.shape == y.shape and np.isfinite(x).all()
        np.testing.assert_allclose(x, y, rtol=error, atol=error * max(1.0, float(np.abs(y).max(initial=0))))


@pytest.mark.parametrize("name", LOSSES)
def test_values(name):
    loss, p, batch = LOSSES[name]
    found = jax.jit(functools.partial(gradients, loss))(p, batch)
    total, aux = jaxext.privacy.clipped_grad(loss, l2_clip_norm=CLIP, return_grad_norms=True, nan_safe=False)(p, batch)
    close(aux.grad_norms, norms_of(found))
    close(total, clipped(found))
    assert (norms_of(found) > CLIP).any()
    report = jaxext.privacy.explain(loss)(p, batch)
    assert {each.name.strip("[]'") for each in report.stored} == STORED.get(name, set())
