"""Norms have the precision of the gradients that `vmap(grad)` gives, and their squares are added up in float32 or float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from example_losses import integers, normal

import jaxext
from jaxext.tuning.walk import walk


def product(p, x):
    return x @ p["w"]


def looked_up(p, tokens):
    return p["table"][tokens]


WIDE, LOW_RANK = {"w": normal(12, 24)}, {"a": normal(12, 2), "b": normal(2, 24)}
WAYS = {  # the network, its parameters, the examples, and words of the report
    "one row": (product, WIDE, normal(3, 1, 12), "|x| |y|"),
    "Gram form": (product, WIDE, normal(3, 2, 12), "Gram form of 2 rows"),
    "rows of a table": (looked_up, {"table": normal(30, 24)}, integers(3, 4, below=30), "Gram form of 4 rows"),
}


def in_dtype(dtype, tree):
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


@pytest.mark.parametrize("name", WAYS)
def test_bfloat16(name):
    """The truth is in float64, of the same numbers.  Cotangents and gradients are rounded to 8 bits, and `vmap(grad)` rounds no less."""
    network, p, x, how = WAYS[name]
    narrow = in_dtype(jnp.bfloat16, (p, x))

    def loss(p, x):
        return jnp.sum(jnp.sin(network(p, x)) ** 2)

    def norms_of(p, x):
        found = jax.tree.leaves(jax.vmap(lambda x: jax.grad(loss)(p, x[None]))(x))
        return jnp.sqrt(sum(jnp.sum(g.astype(np.float64).reshape(len(g), -1) ** 2, 1) for g in found))

    assert all(each.how.startswith(how) for each in jaxext.privacy.explain_norms(loss)(*narrow).parameters)
    norms = jaxext.privacy.per_example_norms(loss)(*narrow)
    truth = norms_of(*in_dtype(np.float64, narrow))
    assert norms.dtype == np.float32
    np.testing.assert_allclose(norms, truth, rtol=2**-7)
    np.testing.assert_allclose(norms_of(*narrow), truth, rtol=2**-7)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16])
@pytest.mark.parametrize("rows", [1, 2, 400])
def test_many_and_large_squares(rows, dtype):
    """Sums of integers, exact in float32.  In bfloat16 a sum of 200 * 200 squares would end at 256, in float16 512 squared is infinite."""
    w, x = jnp.ones((200, 200), dtype), jnp.zeros((2, rows, 200), dtype).at[:, 0].set(jnp.array([[1], [512]], dtype))
    loss = lambda w, batch: jnp.sum((batch[0] @ w).astype(np.float32) * batch[1])
    norms = jaxext.privacy.per_example_norms(loss)(w, (x, jnp.ones((2, rows, 200), np.float32)))
    np.testing.assert_array_equal(norms, np.array([1, 512]) * 200)


def test_products_of_parameters_keep_their_precision():
    """Derivatives of the products keep it too: the norms are those of gradients that are rounded so.  CPUs multiply in float32 anyway."""
    algorithm = jax.lax.DotAlgorithmPreset.BF16_BF16_F32
    loss = lambda p, x: jnp.sum(jnp.sin(x @ jax.lax.dot(p["a"], p["b"], precision=algorithm)))
    p, x = in_dtype(np.float32, (LOW_RANK, normal(3, 12)))
    steps = walk(jax.make_jaxpr(jaxext.privacy.per_example_norms(loss))(p, x).jaxpr)
    precisions = [step.eqn.params["precision"] for step in steps if step.eqn.primitive is jax.lax.dot_general_p]
    assert len(precisions) >= 3 and {*precisions} == {algorithm}
