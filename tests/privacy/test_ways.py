"""The way in which a norm is computed, the report of it, and the number of examples that are computed at a time."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from example_losses import LOSSES, normal
from jax.sharding import AxisType

import jaxext
from jaxext.privacy.square_norms import devices_that_split, part_of
from jaxext.tuning.walk import walk


def how(loss, p, *batch):
    return {each.name: each.how for each in jaxext.privacy.explain_norms(loss)(p, *batch).parameters}


@pytest.mark.parametrize(
    ("rows", "told"),
    [(1, "|x| |y|"), (2, "Gram form of 2 rows, of a few examples at a time"), (9, "its gradient, of a few examples at a time, kept")],
)
def test_the_cheaper_form(rows, told):
    """The gradient with 12 and 24 columns is cheaper from 9 rows on, and smaller than the rows: 9 (12 + 24) > 12 * 24."""
    w, x = jax.ShapeDtypeStruct((12, 24), np.float32), jax.ShapeDtypeStruct((3, rows, 12), np.float32)
    loss = lambda w, x: jnp.sum((x @ w) ** 2)
    assert how(loss, w, x) == {"argument 0": told}


def test_what_the_report_says():
    loss, p, batch = LOSSES["mlp"]
    report = jaxext.privacy.explain_norms(loss)(p, batch)
    assert [(each.name, each.shape, each.dtype, each.stored) for each in report.parameters[:2]] == [
        ("['first'][0]", (8, 12), "float64", False),
        ("['first'][1]", (12,), "float64", False),
    ]
    assert "example_losses.py:" in report.parameters[0].sources[0] and "(dense)" in report.parameters[0].sources[0]
    assert str(report).splitlines() == [
        "parameter     type            meets the example in  norm by",
        "['first'][0]  float64[8, 12]  dot_general           |x| |y|",
        "['first'][1]  float64[12]     add                   its gradient, kept",
        "['last'][0]   float64[12, 7]  dot_general           |x| |y|",
        "['last'][1]   float64[7]      add                   its gradient, kept",
        "no gradient is written that is larger than what it is made of",
    ]


def test_parameters_that_are_used_several_times():
    loss, p, batch = LOSSES["recurrent"]
    told = how(loss, p, batch)
    assert told["['w']"] == "gradients of all examples: it is used in each step of a scan"
    assert told["['inner']"] == "gradients of all examples: it is used 2 times" and told["['head']"] == "|x| |y|"
    report = jaxext.privacy.explain_norms(loss)(p, batch)
    assert str(report).endswith("gradients written for each example: 256 numbers")


def test_parameters_that_are_not_used():
    loss = lambda p, x: jnp.sum(x * p[0]) + jnp.sum(jax.lax.stop_gradient(p[1]) * x)
    assert [*how(loss, (jnp.float32(2), jnp.float32(3), jnp.float32(4)), jnp.ones(3, np.float32)).values()][1:] == ["its gradient is 0"] * 2


NHWC = ("NHWC", "HWIO", "NHWC")
OF_CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "strided and dilated": dict(window_strides=(2, 1), padding=((2, 1), (-1, 3)), rhs_dilation=(1, 2)),
    "transposed": dict(window_strides=(1, 1), padding=((1, 0), (2, 1)), lhs_dilation=(2, 1)),
    "grouped": dict(window_strides=(1, 1), padding="VALID", feature_group_count=2),
}


def square(w, x, **how):
    return jnp.sum(jaxext.conv_general_dilated(x, w, dimension_numbers=NHWC, **how) ** 2)


@pytest.mark.parametrize("name", OF_CONVOLUTIONS)
def test_gram_forms_of_convolutions(name):
    """The convolutions have few positions and many channels."""
    loss = functools.partial(square, **OF_CONVOLUTIONS[name])
    groups = OF_CONVOLUTIONS[name].get("feature_group_count", 1)
    w, x = normal(3, 2, 16 // groups, 64), normal(3, 4, 3, 16)
    assert "Gram form" in how(loss, w, x)["argument 0"]
    gradients = jax.vmap(lambda x: jax.grad(loss)(w, x[None]))(x)
    np.testing.assert_allclose(jaxext.privacy.per_example_norms(loss)(w, x), jnp.sqrt(jnp.sum(gradients**2, (1, 2, 3, 4))), rtol=1e-12)


def test_the_gram_form_of_a_filter_in_the_gradient_of_an_input():
    filters, y = normal(3, 2, 16, 64), normal(3, 2, 2, 64)

    def loss(w, y):
        forward = lambda image: jaxext.conv_general_dilated(image, w, (1, 1), "VALID", dimension_numbers=NHWC)
        (image,) = jax.linear_transpose(forward, jax.ShapeDtypeStruct((1, 4, 3, 16), y.dtype))(y)
        return jnp.sum(image**2)

    assert "Gram form" in how(loss, filters, y)["argument 0"]
    gradients = jax.vmap(lambda y: jax.grad(loss)(filters, y[None]))(y)
    expected = jnp.sqrt(jnp.sum(gradients**2, (1, 2, 3, 4)))
    np.testing.assert_allclose(jaxext.privacy.per_example_norms(loss)(filters, y), expected, rtol=1e-12)


def test_a_gradient_that_is_larger_than_the_layer_is_not_kept():
    """It has 3 * 3 * 8 * 8 numbers.  The image has 8 of them for each of its 6 * 6 pixels, and the result too."""
    w = jax.ShapeDtypeStruct((3, 3, 8, 8), np.float32)
    told = [
        how(functools.partial(square, window_strides=(1, 1), padding="SAME"), w, jax.ShapeDtypeStruct((4, n, n, 8), np.float32))[
            "argument 0"
        ]
        for n in (5, 6)
    ]
    assert told == ["its gradient, of a few examples at a time", "its gradient, of a few examples at a time, kept"]


def sizes(function, *args):
    """Return the sizes of all arrays in the program."""
    steps = walk(jax.make_jaxpr(function)(*args).jaxpr)
    avals: list[Any] = [var.aval for step in steps for var in step.eqn.outvars]
    return {aval.size for aval in avals}


def test_norms_alone_keep_no_small_gradient():
    """The norms do not need the gradients that `clipped_grad` keeps, of 3 examples, with 12 * 24 numbers each."""
    loss = lambda w, x: jnp.sum((x @ w) ** 2)
    w, x = normal(12, 24), normal(3, 9, 12)
    assert "kept" in how(loss, w, x)["argument 0"]
    gradients = 3 * 12 * 24
    assert gradients in sizes(jaxext.privacy.clipped_grad(loss, l2_clip_norm=1.0, nan_safe=False), w, x)
    assert max(sizes(jaxext.privacy.per_example_norms(loss), w, x)) < gradients
    close = functools.partial(np.testing.assert_allclose, rtol=1e-12)
    close(jaxext.privacy.per_example_norms(loss)(w, x), jnp.linalg.norm(jax.vmap(jax.grad(loss), (None, 0))(w, x), axis=(1, 2)))


def test_examples_at_a_time(monkeypatch):
    """Each of 8 devices has an example of a part."""
    assert [part_of(size, devices, 100, 100) for size, devices in ((16, 8), (12, 8), (5, 8), (12, 1))] == [8, 4, 1, 1]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert [part_of(24, 8, 100, arrays) for arrays in (10, 50, 70, 100, 1000)] == [8, 8, 8, 24, 24]
    assert [part_of(30, 8, 10, arrays) for arrays in (1, 4, 7, 10)] == [2, 10, 10, 30]


def test_devices_that_split_a_batch():
    """The types or the context say which; a shard_map leaves only those over which it does not map."""
    seen = []

    def see(x):
        seen.append(devices_that_split([x]))
        return x

    for kind, specs in ((AxisType.Auto, ["data"]), (AxisType.Explicit, ["data", ("data", "model"), None])):
        mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
        for spec in specs:
            jax.jit(see)(jax.device_put(jnp.ones((8, 2)), jax.NamedSharding(mesh, jax.P(spec))))
    assert seen == [8, 4, 8, 1]
    seen.clear()
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    for axes in ({"data", "model"}, {"data"}):
        jax.jit(jax.shard_map(see, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data"), axis_names=axes))(jnp.ones((8, 2)))
    jax.pmap(see)(jnp.ones((8, 2)))
    jax.jit(see)(jnp.ones((8, 2)))
    with jax.set_mesh(mesh):
        jax.jit(lambda: see(jnp.ones((8, 2))))()
    assert seen == [1, 2, 1, jax.device_count(), 8]


def test_a_device_of_a_shard_map_computes_one_example_after_the_other():
    """The 8 devices split 32 images.  A step makes the gradient of a single one."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    w, x = normal(3, 3, 4, 4), normal(32, 6, 6, 4)
    norms = jaxext.privacy.per_example_norms(functools.partial(square, window_strides=(1, 1), padding="SAME"))
    split = jax.shard_map(norms, mesh=mesh, in_specs=(jax.P(), jax.P("data")), out_specs=jax.P("data"))
    assert "length=4" in str(jax.make_jaxpr(split)(w, x))
    np.testing.assert_allclose(jax.jit(split)(w, x), norms(w, x), rtol=1e-12)


EMPTY: dict[str, Any] = {  # the shape of an example, and the padding
    "beyond the image": ((2, 3, 16), ((0, 0), (0, 0))),
    "no pixel": ((0, 3, 16), ((1, 0), (0, 0))),
}


@pytest.mark.parametrize(("name", "dilation"), [("beyond the image", (1, 1)), ("no pixel", (2, 1))])
def test_convolutions_without_outputs(name, dilation):
    """A tap of the filter may lie behind the last pixel.  Another parameter has a gradient all the same."""
    shape, padding = EMPTY[name]
    loss = lambda p, x: square(p[0], x, window_strides=(1, 1), padding=padding, rhs_dilation=dilation) + jnp.sum(p[1] ** 2)
    p, x = (normal(5, 2, 16, 64), normal(3)), normal(2, *shape)
    expected = 2 * jnp.linalg.norm(p[1])
    np.testing.assert_allclose(jaxext.privacy.per_example_norms(loss)(p, x), [expected] * 2, rtol=1e-12)
    total = jaxext.privacy.clipped_grad(loss, l2_clip_norm=expected / 2)(p, x)
    assert not total[0].any()
    np.testing.assert_allclose(total[1], 2 * p[1], rtol=1e-12)


@pytest.mark.parametrize("pixels", [0, 3])
def test_examples_without_images(pixels):
    """An example is a group of no images, as a user without data has."""
    loss = functools.partial(square, window_strides=(1, 1), padding="VALID")
    w, x = normal(2, 2, 16, 64), normal(2, 0, pixels, 3, 16)
    np.testing.assert_array_equal(jaxext.privacy.per_example_norms(loss, keep_batch_dim=False)(w, x), [0, 0])
    np.testing.assert_array_equal(jaxext.privacy.clipped_grad(loss, l2_clip_norm=1.0, keep_batch_dim=False)(w, x), jnp.zeros_like(w))


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
