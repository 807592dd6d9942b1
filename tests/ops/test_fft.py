"""Convolutions by FFT: all roles against the direct sum in float64, whatever the steps; memory; who takes it, and who does not."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import random
from jax import lax

import jaxext
from jaxext.ops.conv import fft

# Shapes of x and w, and keywords.  `groups` is feature_group_count.
GEOMETRIES = {
    "strided, dilated, in groups": ((3, 4, 37), (6, 2, 5), dict(padding=[(3, 2)], strides=(2,), rhs_dilation=(3,), feature_group_count=2)),
    "transposed, cropped": ((2, 3, 11), (4, 3, 4), dict(padding=[(-1, 3)], lhs_dilation=(3,))),
    "many terms of a sum": ((2, 19, 9), (3, 19, 3), dict(padding="SAME")),
    "images": ((2, 3, 14, 9), (4, 3, 5, 3), dict(padding="SAME", strides=(1, 2))),
    "three axes": ((2, 2, 5, 6, 7), (2, 2, 2, 3, 3), dict(padding="VALID", rhs_dilation=(1, 2, 1))),
    "a filter longer than x": ((1, 2, 5), (2, 2, 9), dict(padding=[(8, 8)])),
}


def call(name, implementation=None):
    *_, given = GEOMETRIES[name]
    given = dict(given)
    axes = len(GEOMETRIES[name][0]) - 2
    return functools.partial(
        jaxext.conv_general_dilated, window_strides=given.pop("strides", (1,) * axes), **given, implementation=implementation
    )


def with_gradients(f, x, w):
    """The result, and both gradients for a fixed cotangent."""
    y, pullback = jax.vjp(f, x, w)
    return y, *pullback(jnp.cos(jnp.arange(y.size, dtype=jnp.float64)).reshape(y.shape).astype(y.dtype))


def error(got, want):
    pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(got, want, strict=True)]
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_roles_and_steps(name, monkeypatch):
    """One step, and steps of few bytes and short blocks; in float32, in float64, and of complex numbers."""
    shapes = GEOMETRIES[name][:2]
    with jax.enable_x64(True):
        x, w = (random(shape, np.float64, seed) for seed, shape in enumerate(shapes))
        want = jax.jit(functools.partial(with_gradients, call(name, "xla")))(x, w)
        with monkeypatch.context() as small:
            small.setattr(fft, "STEP_BYTES", 1)
            small.setattr(fft, "run_ms", lambda conv, config: config.outputs)  # the shortest blocks are preferred
            narrow = [z.astype(np.float32) for z in (x, w)]
            got = jax.jit(functools.partial(with_gradients, lambda x, w: call(name, "fft")(x, w)))(*narrow)
            assert {y.dtype for y in got} == {np.dtype(np.float32)} and error(got, want) < 1e-6
        if name in ("images", "transposed, cropped"):
            assert error(jax.jit(functools.partial(with_gradients, call(name, "fft")))(x, w), want) < 1e-14
            z, y = lax.complex(x, x[..., ::-1]), lax.complex(want[0], call(name, "xla")(x[..., ::-1], w))
            assert error([call(name, "fft")(z, w.astype(z.dtype))], [y]) < 1e-14


def test_parts_that_do_not_divide(monkeypatch):
    """Seven groups in three steps: the last one begins among those of the step before."""
    monkeypatch.setattr(fft, "STEP_BYTES", 3 * 2240)
    x, w = random((2, 7, 40), np.float32), random((7, 1, 12), np.float32, seed=1)
    by = lambda name: functools.partial(
        jaxext.conv_general_dilated, window_strides=(1,), padding=[(11, 0)], feature_group_count=7, implementation=name
    )
    (row,) = jaxext.explain(by("fft"))(x, w).rows
    assert row.how.endswith("in 3 steps"), row.how
    assert error(*(jax.jit(functools.partial(with_gradients, by(name)))(x, w) for name in ("fft", "xla"))) < 1e-6


def test_batched_filters_and_second_derivatives():
    x, w = random((3, 2, 4, 15), np.float32), random((3, 4, 4, 6), np.float32, seed=1)
    fun = lambda implementation, x, w: jnp.sum(jnp.sin(jax.vmap(call_of(implementation))(x, w)))
    call_of = lambda implementation: functools.partial(
        jaxext.conv_general_dilated, window_strides=(1,), padding="SAME", implementation=implementation
    )
    twice = lambda implementation: jax.grad(lambda x, w: jnp.sum(jax.grad(functools.partial(fun, implementation))(x, w) ** 2), (0, 1))
    for one, other in zip(jax.jit(twice("fft"))(x, w), jax.jit(twice("xla"))(x, w), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4 * np.abs(other).max())


def test_sixteen_bits_are_rounded_once():
    x, w = random((2, 40, 3), jnp.bfloat16), random((9, 1, 3), jnp.bfloat16, seed=1)
    convolve = functools.partial(
        jaxext.conv_general_dilated, window_strides=(1,), padding="SAME", dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=3
    )
    got = convolve(x, w, implementation="fft")
    wide = convolve(x.astype(np.float32), w.astype(np.float32), implementation="xla")
    assert got.dtype == jnp.bfloat16 and np.mean(got == wide.astype(jnp.bfloat16)) > 0.98


def long(channels=16, steps=8192, taps=8192):
    shapes = jax.ShapeDtypeStruct((1, steps, channels), np.float32), jax.ShapeDtypeStruct((taps, channels), np.float32)
    return functools.partial(jaxext.long_conv, implementation="fft"), shapes


def test_memory_is_that_of_a_step(monkeypatch):
    """Temporaries are less than three signals, in both gradients too; those of a single step are more than four."""
    monkeypatch.setattr(fft, "STEP_BYTES", 1 << 18)
    for taps in (256, 8192):
        f, shapes = long(taps=taps)
        signal = 4 * shapes[0].size
        for fun in (f, lambda x, w, f=f: jax.vjp(f, x, w)[1](x)):
            memory: Any = jax.jit(fun).lower(*shapes).compile().memory_analysis()
            assert memory.temp_size_in_bytes < 3.01 * signal
        how = jaxext.explain(f)(*shapes).rows[0].how
        assert re.fullmatch(r"\d+ points in \d+ steps", how)
    monkeypatch.undo()
    memory = jax.jit(lambda x, w: f(x, w) + 0).lower(*shapes).compile().memory_analysis()
    assert memory.temp_size_in_bytes > 4 * signal


def test_spectra_of_one_step_are_shared():
    """A result and its gradients transform x, w and the cotangent once each, and back: six FFTs; `jax.checkpoint` repeats some."""

    def transforms(f):
        fun = lambda x, w: jax.value_and_grad(lambda x, w: jnp.sum(jnp.sin(f(x, w))), (0, 1))(x, w)
        text: Any = jax.jit(fun).lower(*shapes).compile().as_text()
        return len(re.findall(r" fft\(", text))

    f, shapes = long(steps=256, taps=256)
    assert transforms(f) == 6
    assert transforms(jax.checkpoint(f)) > 6


def test_nobody_takes_it_unnamed(tmp_path):
    shapes = jax.ShapeDtypeStruct((1, 256, 4), np.float32), jax.ShapeDtypeStruct((65, 1, 4), np.float32)
    convolve = functools.partial(
        jaxext.conv_general_dilated, window_strides=(1,), padding="SAME", dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=4
    )
    (row,) = jaxext.explain(convolve)(*shapes).rows
    assert row.chosen == "xla" and "only by name" in row.refused["fft"]
    with jaxext.use_implementation("fft"):
        (row,) = jaxext.explain(lambda *args: convolve(*args))(*shapes).rows
    assert (row.chosen, row.why, row.multiplies) == ("fft", "named", "spectra: its error is in the norm")
    tune = functools.partial(jaxext.tune, convolve, backward=False, candidates=1)
    (untried,) = tune(table=tmp_path / "a.json")(*shapes).rows
    assert "fft" in untried.refused and {c.implementation for c in untried.candidates} == {"xla"}
    (row,) = tune(tolerance=1e-6, table=tmp_path / "b.json")(*shapes).rows
    assert [c for c in row.candidates if c.implementation == "fft" and c.ms] and "fft" not in row.refused
    with pytest.warns(UserWarning, match="wrong results"):
        (row,) = tune(tolerance=1e-9, table=tmp_path / "c.json")(*shapes).rows
    assert [c.wrong for c in row.candidates if c.implementation == "fft"] == [True]
    bad: Any
    for bad in (0.0, 1, "1e-6"):
        with pytest.raises(ValueError, match="tolerance is .*, want a float between 0 and 1"):
            jaxext.tune(convolve, tolerance=bad)


def test_infinities_spread():
    """One element reaches all of its channel, also results that do not read it, as the docs say; and no other channel."""
    x, w = np.ones((64, 2), np.float32), np.ones((64, 2), np.float32)
    x[40, 0] = np.inf
    y = jaxext.long_conv(x, w, implementation="fft")
    assert not np.isfinite(y[:, 0]).any() and np.isfinite(y[:, 1]).all()


def test_refusals():
    def convolve(rank, dtype):
        return lax.conv_general_dilated, jnp.zeros((1, 1, *[3] * rank), dtype), jnp.zeros((1, 1, *[2] * rank), dtype)

    for rank, dtype, why in ((1, np.int32, "an FFT rounds"), (4, np.float32, "4 spatial axes, want 1 to 3"), (0, np.float32, "0 spatial")):
        with pytest.raises(NotImplementedError, match=why), jaxext.in_place_of_lax(), jaxext.use_implementation("fft"):
            f, x, w = convolve(rank, dtype)
            jax.block_until_ready(f(x, w, (1,) * rank, "VALID"))
    (n,) = jax.export.symbolic_shape("n")
    f: Any = functools.partial(jaxext.conv, window_strides=(1,), padding="SAME", implementation="fft")
    with pytest.raises(NotImplementedError, match="XLA's partitioner may split this program"):
        jax.export.export(jax.jit(f))(np.ones((1, 1, 8), np.float32), np.ones((1, 1, 3), np.float32))
    with pytest.raises(NotImplementedError, match="symbolic"):
        jax.export.export(jax.jit(f))(jax.ShapeDtypeStruct((n, 1, 8), np.float32), jax.ShapeDtypeStruct((1, 1, 3), np.float32))
    assert f(np.zeros((0, 1, 8), np.float32), np.ones((1, 1, 3), np.float32)).shape == (0, 1, 8)
