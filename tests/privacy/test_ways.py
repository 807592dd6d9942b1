"""Which way a norm is computed, what the report says of it, and how many examples are computed at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from example_losses import LOSSES

import jaxext
from jaxext.privacy.square_norms import part_of


def how(loss, p, *batch):
    return {each.name: each.how for each in jaxext.privacy.explain(loss)(p, *batch).parameters}


@pytest.mark.parametrize(
    ("rows", "told"),
    [(1, "|x| |y|"), (2, "Gram form of 2 rows, of a few examples at a time"), (9, "its gradient, of a few examples at a time")],
)
def test_the_cheaper_form(rows, told):
    """With 12 and 24 columns the gradient is cheaper from 9 rows on: 9 (12 + 24) > 12 * 24."""
    w, x = jax.ShapeDtypeStruct((12, 24), np.float32), jax.ShapeDtypeStruct((3, rows, 12), np.float32)
    loss = lambda w, x: jnp.sum((x @ w) ** 2)
    assert how(loss, w, x) == {"argument 0": told}


def test_what_the_report_says():
    loss, p, batch = LOSSES["mlp"]
    report = jaxext.privacy.explain(loss)(p, batch)
    assert [(each.name, each.shape, each.dtype, each.stored) for each in report.parameters[:2]] == [
        ("['first'][0]", (8, 12), "float64", False),
        ("['first'][1]", (12,), "float64", False),
    ]
    assert "example_losses.py:" in report.parameters[0].sources[0] and "(dense)" in report.parameters[0].sources[0]
    assert str(report).splitlines() == [
        "parameter     type            meets the example in  norm by",
        "['first'][0]  float64[8, 12]  dot_general           |x| |y|",
        "['first'][1]  float64[12]     add                   its gradient",
        "['last'][0]   float64[12, 7]  dot_general           |x| |y|",
        "['last'][1]   float64[7]      add                   its gradient",
        "no gradient is written",
    ]


def test_parameters_that_are_used_several_times():
    loss, p, batch = LOSSES["recurrent"]
    told = how(loss, p, batch)
    assert told["['w']"] == "gradients of all examples: it is used in each step of a scan"
    assert told["['inner']"] == "gradients of all examples: it is used 2 times" and told["['head']"] == "|x| |y|"
    report = jaxext.privacy.explain(loss)(p, batch)
    assert str(report).endswith("gradients written for each example: 256 numbers")


def test_parameters_that_are_not_used():
    loss = lambda p, x: jnp.sum(x * p[0]) + jnp.sum(jax.lax.stop_gradient(p[1]) * x)
    assert [*how(loss, (jnp.float32(2), jnp.float32(3), jnp.float32(4)), jnp.ones(3, np.float32)).values()][1:] == ["its gradient is 0"] * 2


def test_examples_at_a_time(monkeypatch):
    """Here are 8 devices, and each has an example of a part."""
    assert [part_of(size, 100, 100) for size in (16, 12, 5)] == [8, 4, 1]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert [part_of(24, 100, arrays) for arrays in (10, 50, 70, 100, 1000)] == [8, 8, 8, 24, 24]
    assert [part_of(30, 10, arrays) for arrays in (1, 4, 7, 10)] == [2, 10, 10, 30]


@pytest.mark.parametrize("mode", ["clip", "drop", "promise_in_bounds"])
def test_rows_of_a_table(mode):
    """Some repeat, and some are beyond its ends."""
    table, inside = jnp.asarray(np.random.default_rng(0).normal(size=(30, 4, 2))), mode == "promise_in_bounds"
    tokens = jnp.array([[3, 7, 3, 29], [0, 0, 0, 0], [1, 2, 30, 29], [40, 30, -31, 5]]) % (30 if inside else 100)

    def loss(table, tokens):
        rows = table.at[tokens].get(mode=mode, fill_value=0.0 if mode == "drop" else None)
        return jnp.sum(jnp.sin(rows) * jnp.arange(1.0, 5.0).reshape(1, 4, 1, 1))

    assert how(loss, table, tokens) == {"argument 0": "Gram form of 4 rows, of a few examples at a time"}
    gradients = jax.vmap(lambda tokens: jax.grad(loss)(table, tokens[None]))(tokens)
    expected = jnp.sqrt(jnp.sum(gradients**2, (1, 2, 3)))
    np.testing.assert_allclose(jaxext.privacy.per_example_norms(loss)(table, tokens), expected, rtol=1e-12)
    assert how(loss, table[:15], tokens % 15) == {"argument 0": "its gradient, of a few examples at a time"}
