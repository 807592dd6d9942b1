"""Norms of per-example gradients and clipped sums, compared with those of the gradients themselves in float64."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from example_losses import LOSSES, STORED

import jaxext

CLIP = 0.5


def gradients(loss, p, batch):
    """Return the gradient of each example."""
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
    report = jaxext.privacy.explain_norms(loss)(p, batch)
    assert {each.name.strip("[]'") for each in report.stored} == STORED.get(name, set())


LOSS, P, BATCH = LOSSES["mlp"]


def test_options():
    """Arguments in another order, several of parameters, auxiliary data, a key for each example, padding, and scaling."""

    def loss(key, batch, w, scale, b):
        x, labels = batch
        keep = jax.random.bernoulli(key, 0.5, x.shape)
        z = jnp.where(keep, x, 0.0) @ w + b
        return scale * jnp.sum((z - labels) ** 2), z

    key, (x, _), labels = jax.random.key(3), BATCH, jnp.arange(5.0)
    w, b = jnp.ones((8, 7)), jnp.arange(7.0)
    find = jaxext.privacy.clipped_grad(
        loss,
        argnums=(4, 2),
        has_aux=True,
        l2_clip_norm=3.0,
        rescale_to_unit_norm=True,
        normalize_by=4.0,
        batch_argnums=1,
        keep_batch_dim=False,
        return_values=True,
        return_grad_norms=True,
        prng_argnum=0,
    )
    padding = jnp.arange(5) == 2
    total, aux = find(key, (x, labels), w, 0.5, b, is_padding_example=padding)
    each = jax.vmap(lambda key, *batch: jax.value_and_grad(loss, (4, 2), has_aux=True)(key, batch, w, 0.5, b))
    (values, z), found = each(jax.random.split(key, 5), x, labels)
    factors = jnp.where(padding, 0, jnp.minimum(1 / 3, 1 / norms_of(found)) / 4)
    close(total, jax.tree.map(lambda g: jnp.tensordot(factors, g, 1), found))
    close(aux, jaxext.privacy.Aux(values, norms_of(found), z))
    assert find.l2_norm_bound == find.sensitivity() == 0.25 and find.sensitivity("REPLACE_ONE") == 0.5
    norms = jaxext.privacy.per_example_norms(loss, (4, 2), True, batch_argnums=(1,), keep_batch_dim=False, prng_argnum=0)
    close(norms(key, (x, labels), w, 0.5, b), norms_of(found))


def test_labels_as_an_argument_of_their_own():
    """Both are split if both are named.  If not, each example sees all labels: said where the user calls."""
    loss = lambda p, x, y: LOSS(p, (x, y))
    how: dict[str, Any] = dict(l2_clip_norm=CLIP, nan_safe=False)
    close(jaxext.privacy.clipped_grad(loss, batch_argnums=(1, 2), **how)(P, *BATCH), jaxext.privacy.clipped_grad(LOSS, **how)(P, BATCH))
    fun, p, x, y = lambda p, x, y: jnp.sum(x @ p) * jnp.sum(y), jnp.ones(3), jnp.ones((4, 3)), np.ones(4)
    wanted = r"argument 2 is float64\[4\], as long as the batch, and batch_argnums is \(1,\), .* want batch_argnums=\(1, 2\);"
    for called in (
        jaxext.privacy.clipped_grad(fun, l2_clip_norm=1.0),
        jaxext.privacy.per_example_norms(fun),
        jaxext.privacy.explain_norms(fun),
    ):
        with pytest.warns(UserWarning, match=wanted) as warned:
            called(p, x, y)
        assert [each.filename for each in warned] == [__file__]
    for other in (y[:3], 2.0, np.ones(()), {"w": y}):  # nothing is said of these
        jaxext.privacy.per_example_norms(lambda p, x, y: jnp.sum(x @ p))(p, x, other)


@pytest.mark.parametrize("mode", ["promise_in_bounds", "clip", "fill"])
def test_rows_that_a_table_has_not(mode):
    """jax leaves them out of the gradient, unless the index is clipped."""
    loss = lambda p, i: jnp.sum(p.at[i].get(mode=mode, fill_value=0.0) ** 2)
    p, batch = jnp.linspace(-1.0, 1.0, 200).reshape(50, 4), jnp.array([[60, 49, 1, 49], [3, 50, 3, 0]])
    close(jaxext.privacy.per_example_norms(loss)(p, batch), norms_of(gradients(loss, p, batch)))


@pytest.mark.parametrize("keep", [False, True])
def test_no_examples(keep):
    """Poisson sampling may draw none."""
    loss = lambda p, x: jnp.sum(x @ p["w"])
    p, batch = {"w": jnp.ones((3, 2))}, jnp.ones((0, 3))
    options: dict[str, Any] = dict(keep_batch_dim=keep)
    total, aux = jaxext.privacy.clipped_grad(loss, l2_clip_norm=1.0, return_values=True, return_grad_norms=True, **options)(p, batch)
    close(total, {"w": jnp.zeros((3, 2))})
    assert aux.values.shape == aux.grad_norms.shape == jaxext.privacy.per_example_norms(loss, **options)(p, batch).shape == (0,)


@pytest.mark.parametrize("rescale", [False, True])
@pytest.mark.parametrize("clip", [0.0, 0.7, np.inf])
@pytest.mark.filterwarnings("ignore")  # of its imports
def test_jax_privacy(clip, rescale):
    """The same numbers as jax_privacy, with an example whose gradient is zero, and one whose gradient holds a NaN and infinities."""
    reference = pytest.importorskip("jax_privacy.clipping", reason="jax_privacy is not installed")

    def loss(p, x):
        return jnp.sum(x[:, :1] * jnp.sqrt(p["w"])[None]) + jnp.sum(p["v"][None] * x[:, 1:])

    p = {"w": jnp.array([0.0, 4.0]), "v": jnp.array([1.0, 2.0, 3.0])}
    x = jnp.array([[0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 2.0, 3.0], [2.0, 0.1, 0.0, 0.0], [0.0, 0.1, 0.2, 0.0]])
    p, x = jax.tree.map(lambda x: x.astype(np.float32), (p, x))
    how: dict[str, Any] = dict(l2_clip_norm=clip, rescale_to_unit_norm=rescale, normalize_by=2.0, return_values=True)
    with jax.numpy_dtype_promotion("standard"):
        expected, aux = reference.clipped_grad(loss, **how)(p, x)
    total, ours = jaxext.privacy.clipped_grad(loss, **how)(p, x)
    close(total, expected, 1e-6)
    close(ours.values, aux.values, 1e-6)


def test_infinities():
    """Infinities of an example's gradient count as 0 if this is wanted, as in jax_privacy."""
    loss = lambda w, x: jnp.sum(x[0] * w)
    x = jnp.array([[jnp.inf, 1.0, 0.0], [3.0, 4.0, 0.0], [jnp.nan, jnp.nan, 0.5]])
    total, aux = jaxext.privacy.clipped_grad(loss, l2_clip_norm=1.0, return_grad_norms=True)(jnp.ones(3), x)
    np.testing.assert_allclose(total, [0.6, 1.8, 0.5])
    assert [*np.isfinite(aux.grad_norms)] == [False, True, False]
    assert np.isnan(jaxext.privacy.clipped_grad(loss, l2_clip_norm=1.0, nan_safe=False)(jnp.ones(3), x)).any()


@pytest.mark.parametrize(("dtypes", "error"), [((np.float64, np.float32), 1e-5), ((jnp.bfloat16, np.float32), 0.03)])
def test_dtypes(dtypes, error):
    """Weights and biases have these dtypes; products are in float32 or in bfloat16.  Gradients have the dtypes of the parameters."""
    first, second = dtypes

    def loss(p, batch):
        (w, b), (v, c) = p.values()
        x, labels = batch
        x = jnp.tanh(x.astype(np.float32) @ w.astype(np.float32) + b.reshape(1, -1))
        z = (x.astype(jnp.bfloat16) @ v.astype(jnp.bfloat16)).astype(np.float32) if first is jnp.bfloat16 else x @ v.astype(np.float32)
        return jnp.mean((z + c.reshape(1, -1)) ** 2)

    p = {name: (w.astype(first), b.astype(second)) for name, (w, b) in P.items()}
    found = gradients(loss, p, BATCH)
    total, aux = jaxext.privacy.clipped_grad(loss, l2_clip_norm=0.05, return_grad_norms=True)(p, BATCH)
    assert [x.dtype for x in jax.tree.leaves(total)] == [first, second] * 2
    assert aux.grad_norms.dtype == (np.float64 if np.float64 in dtypes else np.float32)
    np.testing.assert_allclose(aux.grad_norms, norms_of(found), rtol=error)
    for x, y in zip(jax.tree.leaves(total), jax.tree.leaves(clipped(found, 0.05)), strict=True):
        np.testing.assert_allclose(x.astype(np.float64), y, atol=error * float(np.abs(y).max()))


def test_a_batch_over_devices():
    """Each device computes with its examples: nothing of them is gathered.  In a shard_map too the result is that of all devices."""
    loss, p, (x, labels) = LOSSES["convolutions of jaxext"]
    batch = jnp.concatenate([x[:4] * (1 + i % 3) for i in range(4)]), jnp.tile(labels[:4], 4)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.device_put(batch, jax.NamedSharding(mesh, jax.P("data")))
    p_everywhere = jax.device_put(p, jax.NamedSharding(mesh, jax.P()))
    find = jaxext.privacy.clipped_grad(loss, l2_clip_norm=CLIP, return_grad_norms=True, nan_safe=False)
    program = jax.jit(find).lower(p_everywhere, split).compile()
    total, aux = program(p_everywhere, split)
    found = jax.jit(functools.partial(gradients, loss))(p, batch)
    close(aux.grad_norms, norms_of(found))
    close(total, clipped(found))
    text = str(program.as_text())
    assert "all-gather" not in text and "all-to-all" not in text and "all-reduce" in text
    by_hand = jax.shard_map(lambda p, batch: find(p, batch)[0], mesh=mesh, in_specs=(jax.P(), jax.P("data")), out_specs=jax.P())
    close(jax.jit(by_hand)(p, batch), clipped(found))


@pytest.mark.parametrize(
    "specs",
    [
        dict(b=("a",), table=(None, "b")),
        dict(v=(None, "b"), x=(None, None, "a")),
    ],
    ids=str,
)
def test_explicit_meshes(specs):
    """Devices split what is added, the columns of a table, of a product that is used twice, or what is summed."""
    normal = np.random.default_rng(0).normal

    def loss(p, x, i, y):
        z = jnp.tanh(x @ p["w"] + p["b"][None])
        return jnp.sum((z @ p["v"] + x @ p["v"] - y) ** 2) + jnp.sum(jnp.sin(p["table"][i]))

    p = {name: normal(size=shape) for name, shape in dict(w=(8, 8), b=(8,), v=(8, 4), table=(16, 4)).items()}
    batch = {"x": normal(size=(4, 2, 8)), "i": np.arange(12).reshape(4, 3) % 5, "y": normal(size=(4, 2, 4))}
    gradient = jaxext.privacy.clipped_grad(loss, l2_clip_norm=3.0, batch_argnums=(1, 2, 3), keep_batch_dim=False, nan_safe=False)
    want = gradient(p, *batch.values())
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        placed = {name: jax.device_put(x, jax.NamedSharding(mesh, jax.P(*specs.get(name, ())))) for name, x in (p | batch).items()}
        found = gradient({name: placed[name] for name in p}, *(placed[name] for name in batch))
        assert all(found[name].sharding.is_equivalent_to(placed[name].sharding, x.ndim) for name, x in p.items())
    close(jax.tree.map(np.asarray, found), want)


def test_transformations():
    """vmap over models, the derivative of a norm, no example, and a clip norm that is traced."""
    norms = jaxext.privacy.per_example_norms(LOSS)
    models = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), P)
    close(jax.vmap(norms, in_axes=(0, None))(models, BATCH)[1], norms(jax.tree.map(lambda x: 2 * x, P), BATCH))
    slope = jax.grad(lambda p: norms(p, BATCH).sum())(P)
    close(slope, jax.grad(lambda p: norms_of(gradients(LOSS, p, BATCH)).sum())(P))
    assert norms(P, jax.tree.map(lambda x: x[:0], BATCH)).shape == (0,)
    traced = jax.jit(lambda clip: jaxext.privacy.clipped_grad(LOSS, l2_clip_norm=clip)(P, BATCH))
    close(traced(CLIP), clipped(gradients(LOSS, P, BATCH)))
    close(traced(-1.0), jax.tree.map(jnp.zeros_like, P))


def temporary(function, *args) -> int:
    """Bytes."""
    analysis: Any = jax.jit(function).lower(*args).compile().memory_analysis()
    return analysis.temp_size_in_bytes


def test_memory():
    """A gradient of one parameter for each of 64 examples would be 64 times as large as the parameter."""
    mlp, w, x = LOSSES["mlp"][0], np.ones((512, 512)), np.ones((64, 512))
    p = {"first": (w, w[0]), "last": (w, w[0])}
    assert temporary(jaxext.privacy.clipped_grad(mlp, l2_clip_norm=1.0, nan_safe=False), p, (x, np.zeros(64, int))) < 6 * w.nbytes
    x = np.ones((64, 6, 6, 64))
    conv = lambda w, x: jnp.sum(jaxext.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")) ** 2)
    filters = np.ones((3, 3, 64, 256))
    assert temporary(jaxext.privacy.per_example_norms(conv), filters, x) < 64 * filters.nbytes / 2


def refused(error, match, *args, loss=LOSS, **how):
    with pytest.raises(error, match=match):
        jaxext.privacy.clipped_grad(loss, **{"l2_clip_norm": 1.0, **how})(*args)


def test_bad_input():
    x, labels = BATCH
    refused(TypeError, "l2_clip_norm is 'a', want", P, BATCH, l2_clip_norm="a")
    refused(TypeError, r"l2_clip_norm has the shape \(5,\), want a number", P, BATCH, l2_clip_norm=np.ones(5))
    refused(TypeError, "normalize_by is 'a', want", P, BATCH, normalize_by="a")
    refused(TypeError, "argnums is 'a', want", P, BATCH, argnums="a")
    refused(TypeError, "batch_argnums is 1.5, want an int or a sequence of ints", P, BATCH, batch_argnums=1.5)
    refused(TypeError, "prng_argnum is 'a', want an int or None", P, BATCH, prng_argnum="a")
    refused(ValueError, "clipped_grad: l2_clip_norm is -1, want at least 0", l2_clip_norm=-1)
    refused(ValueError, "l2_clip_norm is nan", l2_clip_norm=np.nan)
    refused(ValueError, "normalize_by is 0, want a positive number", normalize_by=0)
    refused(ValueError, "argnums is 1, batch_argnums is 1 and prng_argnum is None, want different ints", argnums=1)
    refused(ValueError, "batch_argnums is -1", batch_argnums=-1)
    refused(ValueError, "got 1 arguments, want one with the number 1", P)
    refused(ValueError, r"batch_argnums is \(1,\), with examples 5 in argument 1\[0\], 4 in argument 1\[1\]", P, (x, labels[:4]))
    refused(ValueError, "argument 1 is a scalar, want a first axis of examples", P, 1.0)
    refused(ValueError, r"with examples no array", P, ())
    integer = {**P, "first": (jnp.ones((8, 12), int), P["first"][1])}
    refused(TypeError, r"argument 0\['first'\]\[0\] is a parameter of dtype int64, want floating-point numbers", integer, BATCH)
    refused(TypeError, r"fun returned float64\[1,8\] for one example, want a real scalar", P, BATCH, loss=lambda p, batch: batch[0])
    refused(TypeError, r"fun returned int64\[\] for one example", P, BATCH, loss=lambda p, batch: batch[1].sum())
    refused(TypeError, "fun returned {} for one example", P, BATCH, loss=lambda p, batch: {})
    refused(TypeError, r"fun returned float64\[\], want a pair of loss and aux, since has_aux is set", P, BATCH, has_aux=True)
    refused(TypeError, "fun is 3, want a function", loss=3)
    with pytest.raises(ValueError, match=r"is_padding_example is bool\[4\], want bool\[5\]"):
        jaxext.privacy.clipped_grad(LOSS, l2_clip_norm=1.0)(P, BATCH, is_padding_example=jnp.zeros(4, bool))
    with pytest.raises(TypeError, match="is_padding_example is 'all', want an array"):
        jaxext.privacy.clipped_grad(LOSS, l2_clip_norm=1.0)(P, BATCH, is_padding_example="all")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="clipped_grad: nan_safe is traced"):
        jax.jit(lambda flag: jaxext.privacy.clipped_grad(LOSS, l2_clip_norm=1.0, nan_safe=flag)(P, BATCH))(True)
    with pytest.raises(ValueError, match="per_example_norms: got 1 arguments, .* batch_argnums is "):
        jaxext.privacy.per_example_norms(LOSS)(P)


@pytest.mark.parametrize("transform", [jax.grad, lambda f: lambda c: jax.jvp(f, (c,), (1.0,))[1]])
def test_a_loss_that_closes_over_a_traced_value(transform):
    """Its derivatives are those of the definition, by gradients of examples."""
    w, x = (np.random.default_rng(i).standard_normal(shape) for i, shape in enumerate([(4, 3), (5, 4)]))
    loss = lambda c: lambda w, x: (jnp.tanh(x @ w * c) ** 2).sum()

    def clipped(c):
        gradients = jax.vmap(lambda x: jax.grad(loss(c))(w, x[None]))(x)
        norms = jnp.sqrt((gradients**2).sum((1, 2)))
        return (gradients * jnp.minimum(1, 0.5 / norms)[:, None, None]).sum() + norms.sum()

    ours = lambda c: (
        jaxext.privacy.clipped_grad(loss(c), l2_clip_norm=0.5)(w, x).sum() + jaxext.privacy.per_example_norms(loss(c))(w, x).sum()
    )
    np.testing.assert_allclose(jax.jit(transform(ours))(1.3), jax.jit(transform(clipped))(1.3), rtol=1e-6)
