"""Long convolutions: values against their definition in float64, every transformation, the choice, and sequences on several devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import random
from collectives import collectives
from jax.sharding import PartitionSpec as P

import jaxext

SPLIT = P(None, "t")


def reference(x, w, skip=None, gate=None, *, causal=True):
    """The definition in jnp, of x (..., T, C)."""
    taps, steps = w.shape[0], x.shape[-2]
    present = 0 if causal else (taps - 1) // 2
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(taps, taps), (0, 0)])
    read = jnp.stack([padded[..., taps + present - s : taps + present - s + steps, :] for s in range(taps)])
    y = jnp.einsum("s...tc,sc->...tc" if w.ndim == 2 else "s...tc,scd->...td", read, w, precision="highest")
    y = y if skip is None else y + x * skip.reshape((1,) * (x.ndim - 1) + skip.shape)
    return y if gate is None else y * gate


@pytest.mark.parametrize(
    ("taps", "outputs", "implementation"),
    [(1, None, "fft"), (5, None, "fft"), (30, None, "fft"), (12, 2, "fft"), (5, None, "xla"), (30, None, "xla"), (6, 3, "xla")],
)
def test_values(taps, outputs, implementation):
    """Filters shorter than the sequence, as long, and longer; causal and centred, of odd and even lengths."""
    with jax.enable_x64(True):
        x, w = random((2, 9, 3), np.float64), random((taps, 3) if outputs is None else (taps, 3, outputs), np.float64, seed=1)
        optional = [random((3,), np.float64, seed=2)] if outputs in (None, 3) else [None]
        optional.append(random((2, 9, outputs or 3), np.float64, seed=3))
        for causal in (True, False):
            got = jaxext.long_conv(x, w, skip=optional[0], gate=optional[1], causal=causal, implementation=implementation)
            np.testing.assert_allclose(got, reference(x, w, *optional, causal=causal), atol=1e-12)
        if taps == 5:
            same = [np.convolve(x[0, :, c], w[:, c], "same") for c in range(3)]
            np.testing.assert_allclose(jaxext.long_conv(x[0], w, causal=False), np.stack(same, 1), atol=1e-12)


def test_edges():
    assert jaxext.long_conv(jnp.zeros((0, 3)), jnp.ones((4, 3))).shape == (0, 3)
    assert jaxext.long_conv(jnp.zeros((2, 5, 0)), jnp.ones((4, 0))).shape == (2, 5, 0)
    x, w = random((6, 2), jnp.bfloat16), random((4, 2), np.float32, seed=1)
    got = jaxext.long_conv(x, w, skip=w[0], gate=x)
    assert got.dtype == jnp.bfloat16
    want = reference(x.astype(np.float32), w, w[0], x.astype(np.float32))
    np.testing.assert_array_equal(got, want.astype(jnp.bfloat16))  # rounded once
    z = jax.lax.complex(w, -w)
    got = jaxext.long_conv(z, x[:4], implementation="fft")  # a filter of 16 bits beside complex numbers
    np.testing.assert_allclose(got, reference(z, x[:4].astype(np.complex64)), atol=1e-5)


def test_gradients_and_vmap():
    """Gradients of all operands; mapped signals with one filter, and one signal with several filters."""
    x, w, skip, gate = (random(shape, np.float32, seed) for seed, shape in enumerate([(2, 20, 3), (13, 3), (3,), (2, 20, 3)]))
    loss = lambda f: jax.jit(jax.grad(lambda x, w, skip, gate: jnp.sum(jnp.sin(f(x, w, skip, gate))), (0, 1, 2, 3)))
    ours = lambda x, w, skip, gate: jaxext.long_conv(x, w, skip=skip, gate=gate, implementation="fft")
    for one, other in zip(loss(ours)(x, w, skip, gate), loss(reference)(x, w, skip, gate), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
    fft = functools.partial(jaxext.long_conv, implementation="fft", causal=False)
    centred = functools.partial(reference, causal=False)
    for axes, args in (((0, None), (x, w)), ((None, 2), (x[0], jnp.stack([w, -2 * w], 2)))):
        np.testing.assert_allclose(jax.vmap(fft, axes)(*args), jax.vmap(centred, axes)(*args), atol=1e-5)


def test_the_choice_is_by_cost():
    """Few taps are summed directly, many by the FFT, in each role; on a GPU by the number of taps."""

    def chosen(taps, platform=None, f=jaxext.long_conv):
        shapes = jax.ShapeDtypeStruct((1, 16384, 64), np.float32), jax.ShapeDtypeStruct((taps, 64), np.float32)
        return [(row.op, row.chosen) for row in jaxext.explain(f, platform=platform)(*shapes).rows]

    backward = lambda x, w: jax.vjp(jaxext.long_conv, x, w)[1](x)
    assert chosen(4) == [("long_conv_fprop", "xla")] and chosen(16384) == [("long_conv_fprop", "fft")]
    assert {op for op, by in chosen(16384, f=backward) if by == "fft"} == {f"long_conv_{role}" for role in ("fprop", "dgrad", "wgrad")}
    assert {by for _, by in chosen(4, "cuda", backward)} == {"xla"}
    assert chosen(4, "cuda") == [("long_conv_fprop", "xla")] and chosen(256, "cuda") == [("long_conv_fprop", "fft")]
    shapes = jax.ShapeDtypeStruct((1, 16384, 64), np.float32), jax.ShapeDtypeStruct((16, 64), np.float32)
    assert "ms of the direct sum" in jaxext.explain(jaxext.long_conv)(*shapes).rows[0].refused["fft"]


@pytest.mark.parametrize(("taps", "by", "causal"), [(3, "collective-permute", False), (40, "all-to-all", True)])
def test_split_along_time(taps, by, causal):
    """Eight devices compute what one does, with its gradients, by a halo or by channels, whichever sends less."""
    x, w, skip, gate = (random(shape, np.float32, seed) for seed, shape in enumerate([(2, 32, 8), (taps, 8), (8,), (2, 32, 8)]))
    mesh = jax.make_mesh((8,), ("t",), axis_types=(jax.sharding.AxisType.Auto,))
    split = lambda x, w, skip, gate: jaxext.parallel.split_long_conv(x, w, skip=skip, gate=gate, axis_name="t", causal=causal)
    split = jax.jit(jax.shard_map(split, mesh=mesh, in_specs=(SPLIT, P(), P(), SPLIT), out_specs=SPLIT))
    whole = functools.partial(reference, causal=causal)
    assert {*collectives(split.lower(x, w, skip, gate).compile())} == {by}
    np.testing.assert_allclose(split(x, w, skip, gate), whole(x, w, skip, gate), atol=1e-5)
    gradients = lambda f: jax.jit(jax.grad(lambda *args: jnp.sum(jnp.sin(f(*args))), (0, 1, 2, 3)))(x, w, skip, gate)
    for one, other in zip(gradients(split), gradients(whole), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_a_dense_filter_is_split_with_a_halo():
    x, w = random((16, 4), np.float32), random((11, 4, 3), np.float32, seed=1)
    mesh = jax.make_mesh((4,), ("t",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    split = functools.partial(jaxext.parallel.split_long_conv, axis_name="t")
    split = jax.jit(jax.shard_map(split, mesh=mesh, in_specs=(P("t"), P()), out_specs=P("t")))
    assert {*collectives(split.lower(x, w).compile())} == {"collective-permute"}
    np.testing.assert_allclose(split(x, w), reference(x, w), atol=1e-5)


def test_channels_and_batch_are_split_by_jit():
    """An automatic and an explicit mesh, without a collective."""
    x, w, gate = (random(shape, np.float32, seed) for seed, shape in enumerate([(4, 12, 4), (12, 4), (4, 12, 4)]))
    of_x, of_w = P("b", None, "c"), P(None, "c")
    for kind in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit):
        mesh = jax.make_mesh((2, 2), ("b", "c"), axis_types=(kind,) * 2, devices=jax.devices()[:4])
        with jax.set_mesh(mesh):
            args = [jax.device_put(z, jax.NamedSharding(mesh, spec)) for z, spec in ((x, of_x), (w, of_w), (gate, of_x))]
            f = jax.jit(lambda x, w, gate: jaxext.long_conv(x, w, skip=w[0], gate=gate, implementation="fft"))
            assert not collectives(f.lower(*args).compile())
            np.testing.assert_allclose(f(*args), reference(x, w, w[0], gate), atol=1e-5)


@pytest.mark.parametrize(
    ("shapes", "more", "message"),
    [
        (((4,), (2, 4)), {}, r"x has the shape \(4,\), want \(\.\.\., T, C\)"),
        (((5, 4), (2, 3)), {}, r"w has the shape \(2, 3\), want \(K, 4\) or \(K, 4, D\) with at least one tap"),
        (((5, 4), (0, 4)), {}, "with at least one tap"),
        (((5, 4), (2, 4)), {"skip": np.ones(3, np.float32)}, r"skip has the shape \(3,\), want \(4,\)"),
        (((5, 4), (2, 4, 3)), {"skip": np.ones(4, np.float32)}, "as many output channels as input channels, since skip"),
        (((5, 4), (2, 4)), {"gate": np.ones((5, 3), np.float32)}, r"gate has the shape \(5, 3\), want \(5, 4\)"),
        (((5, 4), (2, 4)), {"gate": np.ones((5, 4), np.int32)}, "gate is int32, want floating-point or complex numbers"),
        (((5, 4), (2, 4)), {"skip": np.ones(4, np.complex64)}, "skip is complex64, want a dtype that converts to float32"),
        (((5, 4), (2, 4)), {"causal": None}, "causal is None, want a bool"),
    ],
)
def test_errors(shapes, more, message):
    with pytest.raises(TypeError, match=f"long_conv: .*{message}"):
        jaxext.long_conv(*(np.ones(shape, np.float32) for shape in shapes), **more)
