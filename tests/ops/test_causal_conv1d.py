"""Causal convolutions: whole, in pieces, packed and step by step, against a sum in float64, and under every transformation.

The cases of shapes are those of the tests of the package causal-conv1d, of its widths, lengths, states and dtypes, in smaller sizes.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import check_second_derivatives, random
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from scipy import special

import jaxext

SILU = {None: lambda z: z, "silu": lambda z: z * special.expit(z)}


def true(x, w, bias=None, seq_idx=None, state=None, activation=None):
    """Compute the convolution in float64, step by step."""
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    taps, steps = len(w), x.shape[-2]
    z = np.zeros_like(x)
    for t, i in itertools.product(range(steps), range(taps)):
        at = t - (taps - 1) + i
        if at >= 0:
            read = x[..., at, :]
            same = 1 if seq_idx is None else (np.asarray(seq_idx)[..., at] == np.asarray(seq_idx)[..., t])[..., None]
            z[..., t, :] += w[i] * np.where(same, read, 0)
        elif state is not None:
            same = 1 if seq_idx is None else (np.asarray(seq_idx)[..., 0] == np.asarray(seq_idx)[..., t])[..., None]
            z[..., t, :] += w[i] * np.where(same, np.asarray(state, np.float64)[..., taps - 1 + at, :], 0)
    return SILU[activation](z if bias is None else z + np.asarray(bias, np.float64))


def some(dtype, taps=4, steps=13, channels=8, batch=(2,)):
    shapes = (*batch, steps, channels), (taps, channels), (channels,), (*batch, taps - 1, channels)
    return [jnp.asarray(random(shape, np.float32, seed), dtype) for seed, shape in enumerate(shapes)]


def near(got, want, *, dtype=jnp.float32, units=8):
    assert got.dtype == dtype and got.shape == want.shape
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=units * eps, atol=units * eps * np.abs(want).max(initial=1))


@pytest.mark.parametrize(
    ("taps", "steps", "dtype", "bias", "state", "activation"),
    [
        (1, 16, jnp.float32, True, True, "silu"),
        (2, 1, jnp.bfloat16, False, True, None),
        (3, 151, jnp.float16, True, False, "silu"),
        (4, 2, jnp.float16, True, True, "silu"),
        (4, 8, jnp.bfloat16, True, False, "silu"),
        (31, 2, jnp.float32, False, True, None),
        (31, 8, jnp.float32, True, False, "silu"),
    ],
    ids=str,
)
def test_values_and_final_states(taps, steps, dtype, bias, state, activation):
    x, w, b, before = some(dtype, taps, steps)
    given: Any = dict(bias=b if bias else None, initial_states=before if state else None)
    y, last = jaxext.causal_conv1d(x, w, **given, return_final_states=True, activation=activation)
    near(y, true(x, w, given["bias"], None, given["initial_states"], activation), dtype=dtype, units=2 * taps)
    inputs = np.concatenate([before if state else np.zeros_like(before), x], -2)
    np.testing.assert_array_equal(last, inputs[:, inputs.shape[1] - (taps - 1) :])


@pytest.mark.parametrize(
    ("taps", "lengths", "dtype"),
    [
        (2, (13,), jnp.bfloat16),
        (7, (1, 1, 11), jnp.bfloat16),
        (4, (4, 9), jnp.float32),
        (7, (3, 0, 5, 5), jnp.float32),
        (4, (2,) * 6 + (1,), jnp.float32),
    ],
    ids=str,
)
def test_packed_sequences_are_separate_ones(taps, lengths, dtype):
    """They agree up to the last bits: XLA decides where it fuses a product and a sum, which rounds once."""
    x, w, bias, _ = some(dtype, taps)
    seq_idx = np.broadcast_to(np.repeat(np.arange(len(lengths), dtype=np.int32), lengths), x.shape[:-1])
    convolve = functools.partial(jaxext.causal_conv1d, w=w, bias=bias, activation="silu")
    separate = [convolve(part) for part in jnp.split(x, np.cumsum(lengths)[:-1], 1)]
    y = convolve(x, seq_idx=seq_idx)
    near(y, true(x, w, bias, seq_idx, None, "silu"), dtype=dtype, units=2 * taps)
    near(y, np.asarray(jnp.concatenate(separate, 1), np.float64), dtype=dtype, units=4)


@pytest.mark.parametrize(("taps", "cuts"), [(2, (6, 12)), (9, (1, 2, 3))], ids=str)
def test_pieces_are_the_whole(taps, cuts):
    """Each piece starts from the state of the piece before, also where a piece is shorter than the state."""
    x, w, bias, state = some(jnp.float32, taps)
    convolve = functools.partial(jaxext.causal_conv1d, w=w, bias=bias, activation="silu", return_final_states=True)
    whole, last = convolve(x, initial_states=state)
    results = []
    for part in jnp.split(x, cuts, 1):
        y, state = convolve(part, initial_states=state)
        results.append(y)
    near(jnp.concatenate(results, 1), np.asarray(whole, np.float64), units=4)
    np.testing.assert_array_equal(state, last)


@pytest.mark.parametrize(("taps", "lengths"), [(4, (13,)), (7, (1, 1, 11)), (4, (3, 0, 5, 5))], ids=str)
def test_packed_sequences_with_states(taps, lengths):
    """The first has the initial one, the last gives the final one; so pieces are the whole, wherever they are cut."""
    x, w, bias, state = some(jnp.float32, taps)
    seq_idx = np.broadcast_to(np.repeat(np.arange(len(lengths), dtype=np.int32) + 5, lengths), x.shape[:-1])
    convolve = functools.partial(jaxext.causal_conv1d, w=w, bias=bias, activation="silu", return_final_states=True)
    y, last = convolve(x, seq_idx=seq_idx, initial_states=state)
    near(y, true(x, w, bias, seq_idx, state, "silu"), units=2 * taps)
    of_last = jnp.concatenate([state, x] if lengths == (13,) else [0 * state, x[:, 13 - lengths[-1] :]], 1)
    np.testing.assert_array_equal(last, of_last[:, of_last.shape[1] - (taps - 1) :])
    for cut in (1, 2, 10):
        head, middle = convolve(x[:, :cut], seq_idx=seq_idx[:, :cut], initial_states=state)
        goes_on = seq_idx[0, cut - 1] == seq_idx[0, cut]
        tail, end = convolve(x[:, cut:], seq_idx=seq_idx[:, cut:], initial_states=middle if goes_on else None)
        near(jnp.concatenate([head, tail], 1), np.asarray(y, np.float64), units=4)
        np.testing.assert_array_equal(end, last)


def test_packed_sequences_without_steps():
    x, w, _, state = some(jnp.float32, steps=0)
    y, last = jaxext.causal_conv1d(x, w, seq_idx=np.zeros((2, 0), np.int8), initial_states=state, return_final_states=True)
    assert y.shape == (2, 0, 8)
    np.testing.assert_array_equal(last, state)


def test_precision():
    """It reaches the convolution by which the gradient of w is computed, and `explain`; packed sequences check it too."""
    x, w, bias, _ = some(jnp.float32)

    def gradient(precision, **given):
        return jax.grad(lambda w: jaxext.causal_conv1d(x, w, bias, precision=precision, implementation="xla", **given).sum())

    for precision, times in ((None, 0), ("highest", 2)):
        text = jax.jit(gradient(precision)).trace(w).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("HIGHEST") == times
    assert {row.precision for row in jaxext.explain(gradient("highest"), platform="cuda")(w).rows} == {"highest"}
    for given in ({}, dict(seq_idx=jnp.zeros(x.shape[:-1], jnp.int32))):
        with pytest.raises(ValueError, match="sharp"):
            gradient("sharp", **given)(w)


def plain(x, w, bias, state, activation=jax.nn.silu):
    """Compute the convolution in jnp."""
    taps, steps = w.shape[0], x.shape[-2]
    read = jnp.concatenate([state, x], -2)
    z = sum(read[..., i : i + steps, :] * jnp.broadcast_to(w[i], x.shape) for i in range(taps))
    return activation(z + jnp.broadcast_to(bias, x.shape))


def ours(x, w, bias, state):
    return jaxext.causal_conv1d(x, w, bias, initial_states=state, activation="silu")


def test_only_operands_are_kept_for_the_derivative():
    """The result and the input of the activation are not kept."""
    x, w, bias, _ = some(jnp.float32)
    pullback = jax.vjp(functools.partial(jaxext.causal_conv1d, activation="silu"), x, w, bias)[1]
    assert sorted(of.shape for of in jax.tree.leaves(pullback)) == sorted(of.shape for of in (x, w, bias))


def test_second_derivatives():
    check_second_derivatives(ours, plain, *some(jnp.float64, 3, 4, 2, ()))


def test_gradients_with_several_axes_of_sequences():
    """Two axes, one of them mapped by vmap, and three."""
    x, w, bias, state = some(jnp.float32, 3, 4, 2, (1, 2, 2))
    mapped = jax.vmap(ours, (1, None, None, 1), 1)
    one, other, truth = (
        jax.jit(jax.grad(lambda *args, f=f: jnp.sin(f(*args)).sum(), (0, 1, 2, 3)))(x, w, bias, state) for f in (ours, mapped, plain)
    )
    for got, mine, want in zip(one, other, truth, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(mine, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kind", "packed"), [(AxisType.Auto, False), (AxisType.Explicit, True)], ids=["auto", "explicit and packed"])
def test_devices(kind, packed):
    """Batch and channels split; the gradients have the shardings of their values."""
    x, w, bias, state = some(jnp.float32, batch=(4,))
    mesh = jax.make_mesh((2, 4), ("n", "c"), axis_types=(kind,) * 2)
    specs = P("n", None, "c"), P(None, "c"), P("c"), P("n", None, "c")
    numbers = np.broadcast_to(np.repeat(np.arange(2, dtype=np.int32), (2, 11)), (4, 13))

    def results(x, w, bias, state, *numbers):
        given: Any = dict(seq_idx=numbers[0]) if numbers else {}
        return jaxext.causal_conv1d(x, w, bias, initial_states=state, activation="silu", return_final_states=True, **given)

    def all_of(*args):
        return results(*args), jax.grad(lambda *args: sum(jnp.sum(jnp.sin(y)) for y in results(*args)), (0, 1, 2, 3))(*args)

    args, specs = ((x, w, bias, state, numbers), (*specs, P("n"))) if packed else ((x, w, bias, state), specs)
    with jax.set_mesh(mesh):
        (y, last), got = jax.jit(all_of)(*(jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(args, specs, strict=True)))
    near(y, true(x, w, bias, numbers if packed else None, state, "silu"))
    (_, end), want = jax.jit(all_of)(*args)
    np.testing.assert_array_equal(last, end)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_a_mesh_axis_that_splits_the_sequences_of_x_and_the_channels_of_states():
    x, state, w = random((4, 2, 2), np.float32), random((4, 1, 2), np.float32, 1), random((1, 2), np.float32, 2)
    want, _ = jaxext.causal_conv1d_update(x, state, w)
    with jax.set_mesh(jax.make_mesh((2,), ("b",), axis_types=(AxisType.Explicit,))):
        got, _ = jaxext.causal_conv1d_update(jax.reshard(x, P("b")), jax.reshard(state, P(None, None, "b")), w)
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("steps", [0, 3])
def test_second_derivatives_where_only_the_channels_of_a_state_are_split(steps):
    """The reference is differentiated on arrays with one sharding of each axis."""
    x, w, _, state = some(jnp.float32, taps=3, steps=steps, channels=2, batch=())
    f = lambda x, w, state: jnp.sin(jaxext.causal_conv1d(x, w, initial_states=state, activation="gelu_tanh")).sum()
    gradient = jax.grad(f, (0, 1, 2))
    second = jax.jit(lambda *args: jax.vjp(gradient, *args)[1](args))
    want = second(x, w, state)
    with jax.set_mesh(jax.make_mesh((2,), ("c",), axis_types=(AxisType.Explicit,))):
        got = second(x, w, jax.reshard(state, P(None, "c")))
    for one, other, of in zip(got, want, (P(None, None), P(None, None), P(None, "c")), strict=True):
        assert jax.typeof(one).sharding.spec == of
        if steps or other.size:
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_fewer_sequences_than_devices_that_split_the_states():
    x, buffer, w = random((3, 8), np.float32), random((16, 2, 8), np.float32, 1), random((3, 8), np.float32, 2)
    update = functools.partial(jaxext.causal_conv1d_update, x, w=w, conv_state_indices=np.array([4, -1, 0], np.int32))
    want = update(buffer)
    with jax.set_mesh(jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))):
        got = update(jax.reshard(buffer, P("d")))
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_gelu_of_split_channels():
    """jax 0.12 cannot differentiate the one of `jax.nn` in a shard_map."""
    x, w = random((1, 5, 2), np.float32), random((3, 2), np.float32, 1)
    loss = lambda x: jnp.sin(jaxext.causal_conv1d(x, w, activation="gelu")).sum()
    second = jax.jit(jax.grad(lambda x: (jax.grad(loss)(x) ** 2).sum()))
    want = second(x)
    with jax.set_mesh(jax.make_mesh((2,), ("c",), axis_types=(AxisType.Explicit,))):
        np.testing.assert_allclose(second(jax.reshard(x, P(None, None, "c"))), want, rtol=1e-4, atol=1e-5)


def test_export_and_scan():
    x, w, bias, state = some(jnp.float32)
    exported = jax.export.export(jax.jit(ours), platforms=("cpu", "cuda"))(x, w, bias, state)
    near(exported.call(x, w, bias, state), true(x, w, bias, None, state, "silu"))

    def step(state, x):
        y, state = jaxext.causal_conv1d_update(x, state, w, bias, activation="silu")
        return state, y

    _, y = jax.jit(lambda x, state: jax.lax.scan(step, state, x.swapaxes(0, 1)))(x, state)
    near(y.swapaxes(0, 1), true(x, w, bias, None, state, "silu"))


# Step by step.


@pytest.mark.parametrize(
    ("taps", "size", "steps", "circle", "dtype"),
    [
        (1, 1, 1, True, jnp.bfloat16),
        (2, 1, 6, False, jnp.float32),
        (4, 3, None, True, jnp.bfloat16),
        (4, 4, None, False, jnp.float32),
        (4, 5, 3, True, jnp.float32),
        (4, 5, 6, False, jnp.bfloat16),
    ],
    ids=str,
)
def test_updates(taps, size, steps, circle, dtype):
    """Several in turn are the whole sequence; in a circle from any step on."""
    x, w, bias, _ = some(dtype, taps, 12)
    state = jnp.zeros((2, size, 8), dtype)
    lengths = jnp.array([0, 0], jnp.int32)
    results = []
    for begin in range(0, 12, steps or 1):
        part = x[:, begin] if steps is None else x[:, begin : begin + steps]
        seen = lengths if circle else None
        y, state = jaxext.causal_conv1d_update(part, state, w, bias, activation="silu", cache_seqlens=seen)
        assert y.shape == part.shape and y.dtype == dtype
        lengths = lengths + (steps or 1)
        results.append(y[:, None] if steps is None else y)
    near(jnp.concatenate(results, 1), true(x, w, bias, None, None, "silu"), dtype=dtype, units=2 * taps)
    order = np.arange(12 - size, 12)
    np.testing.assert_array_equal(state[:, order % size] if circle else state, x[:, order])


def test_sequences_of_a_circle_are_of_different_lengths():
    x, w, bias, _ = some(jnp.float32, 3, 9)
    lengths, states = (5, 2), []
    for part, length in zip(x, lengths, strict=True):
        state = jnp.zeros((4, 8), jnp.float32)
        states.append(jaxext.causal_conv1d_update(part[:length], state, w, bias, cache_seqlens=jnp.int32(0))[1])
    parts = jnp.stack([part[length : length + 3] for part, length in zip(x, lengths, strict=True)])
    y, _ = jaxext.causal_conv1d_update(parts, jnp.stack(states), w, bias, cache_seqlens=jnp.array(lengths, jnp.int32))
    for n, length in enumerate(lengths):
        near(y[n], true(x[n, : length + 3], w, bias)[length:])


def test_states_of_a_larger_buffer():
    """A sequence without a state gives zeros and changes none."""
    x, w, bias, _ = some(jnp.float32, 3, 4, batch=(3,))
    buffer = jnp.asarray(random((6, 2, 8), np.float32, 9))
    rows = np.array([4, -1, 0], np.int32)
    y, new = jax.jit(functools.partial(jaxext.causal_conv1d_update, conv_state_indices=rows))(x, buffer, w, bias)
    for n in (0, 2):
        near(y[n], true(x[n], w, bias, None, buffer[rows[n]]))
        np.testing.assert_array_equal(new[rows[n]], x[n, -2:])
    np.testing.assert_array_equal(y[1], 0)
    for row in (1, 2, 3, 5):
        np.testing.assert_array_equal(new[row], buffer[row])


@pytest.mark.parametrize("split", [P(), P("d")], ids=["a whole buffer", "a split one"])
def test_states_of_a_larger_buffer_on_an_explicit_mesh(split):
    """Each device has a part of the sequences."""
    x, w, bias, _ = some(jnp.float32, 3, 4, batch=(8,))
    buffer, rows = jnp.asarray(random((16, 2, 8), np.float32, 9)), np.array([4, -1, 0, 15, 7, 2, 3, 1], np.int32)
    update = jax.jit(lambda x, buffer: jaxext.causal_conv1d_update(x, buffer, w, bias, conv_state_indices=rows))
    want = update(x, buffer)
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        got = update(jax.device_put(x, P("d")), jax.device_put(buffer, split))
        assert jax.typeof(got[0]).sharding.spec == P("d", None, None) and jax.typeof(got[1]).sharding.spec == P(
            *split, *[None] * (3 - len(split))
        )
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("mode", "mapped", "placed"),
    [("in order", "x", True), ("circle", "state", True), ("circle", "numbers", False), ("rows", "x numbers", False)],
)
def test_updates_mapped_over_an_axis_of_an_explicit_mesh(mapped, mode, placed):
    """A mapped argument is split, even if it is the steps or rows alone; the others are on every device, or on no mesh."""
    x, w, bias, _ = some(jnp.float32, 3, 4, batch=(4, 2))
    state = jnp.asarray(random((4, 2, 5, 8) if mode != "rows" else (4, 6, 2, 8), np.float32, 9))
    numbers = jnp.array([[0, 3], [1, 4], [7, 5], [2, -1 if mode == "rows" else 9]], jnp.int32)
    argument = {"in order": None, "circle": "cache_seqlens", "rows": "conv_state_indices"}[mode]
    axes = tuple(0 if name in mapped.split() else None for name in ("x", "state", "numbers"))
    args = [each if axis == 0 else each[1] for each, axis in zip((x, state, numbers), axes, strict=True)]

    def update(x, state, numbers):
        return jaxext.causal_conv1d_update(x, state, w, bias, **({argument: numbers} if argument else {}))

    gradient = jax.grad(lambda *args: sum(jnp.sin(y).sum() for y in update(*args)), (0, 1))
    functions = [jax.vmap(f, axes) for f in ((update, gradient) if mapped == "x numbers" else (update,))]
    want = jax.jit(lambda *args: [f(*args) for f in functions])(*args)
    with jax.set_mesh(jax.make_mesh((4, 2), ("d", "m"), axis_types=(AxisType.Explicit,) * 2)):
        specs = [P("d") if axis == 0 else P() if placed else None for axis in axes]
        args = [x if spec is None else jax.device_put(x, spec) for x, spec in zip(args, specs, strict=True)]
        got = jax.jit(lambda *args: [f(*args) for f in functions])(*args)
    assert [jax.typeof(y).sharding.spec[0] for y in jax.tree.leaves(got)] == ["d"] * 2 * len(functions)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("split", [(P("d"), P(), P()), (P(), P("d"), P()), (P(), P(), P("d"))], ids=str)
def test_updates_with_parts_of_the_sequences_on_an_explicit_mesh(split):
    """Each of x, the state and the steps may be unsplit, as for `causal_conv1d`."""
    x, w, bias, _ = some(jnp.float32, 3, 4, batch=(4,))
    args = x, jnp.asarray(random((4, 5, 8), np.float32, 9)), jnp.array([0, 4, 7, 9], jnp.int32)
    update = jax.jit(lambda x, state, lengths: jaxext.causal_conv1d_update(x, state, w, bias, cache_seqlens=lengths))
    want = update(*args)
    with jax.set_mesh(jax.make_mesh((4, 2), ("d", "m"), axis_types=(AxisType.Explicit,) * 2)):
        got = update(*(jax.device_put(x, spec) for x, spec in zip(args, split, strict=True)))
    assert [jax.typeof(y).sharding.spec[0] for y in got] == ["d"] * 2
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.uint32], ids=lambda dtype: np.dtype(dtype).name)
def test_numbers_of_steps_and_rows_are_integers_of_any_dtype(dtype):
    """Types of few bits count fewer steps or rows than there are; types without a sign have no step before the first."""
    x, w, bias, state = some(jnp.float32, 3, 4, batch=(3,))
    state = jnp.asarray(random((3, 5, 8), np.float32, 9))
    lengths = np.array([1, 126, 127])
    update = functools.partial(jaxext.causal_conv1d_update, x, w=w, bias=bias)
    for got, want in zip(*(update(conv_state=state, cache_seqlens=lengths.astype(of)) for of in (dtype, np.int32)), strict=True):
        np.testing.assert_array_equal(got, want)
    buffer, rows = jnp.asarray(random((300, 2, 8), np.float32, 9)), np.array([4, 0, 120])
    for got, want in zip(*(update(conv_state=buffer, conv_state_indices=rows.astype(of)) for of in (dtype, np.int32)), strict=True):
        np.testing.assert_array_equal(got, want)


def test_integers_beside_x_and_no_channels():
    """Integers have no gradient, and x has that beside the same floats."""
    x, w, _, _ = some(jnp.float32, 3, 6)
    bias, state = np.arange(8), np.arange(32).reshape(2, 2, 8)
    gradient = jax.jit(jax.grad(lambda x, b, s: jnp.sin(jaxext.causal_conv1d(x, w, b, initial_states=s, activation="silu")).sum()))
    floats = gradient(x, jnp.asarray(bias, jnp.float32), jnp.asarray(state, jnp.float32))
    np.testing.assert_array_equal(gradient(x, bias, state), floats)
    assert jaxext.causal_conv1d(x[..., :0], w[:, :0]).shape == (2, 6, 0)


def test_a_donated_state_is_updated_in_place():
    x, w, bias, _ = some(jnp.float32, batch=(3,))
    update = jax.jit(jaxext.causal_conv1d_update, donate_argnums=1)
    state = jnp.zeros((3, 3, 8))
    compiled = update.lower(x[:, 0], state, w, bias).compile()
    memory: Any = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == state.nbytes


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(x=[[1.0]]), TypeError, "causal_conv1d: x is .*, want an array"),
        (dict(x=jnp.ones(8)), TypeError, r"x has the shape \(8,\), want \(..., T, C\)"),
        (dict(x=jnp.ones((2, 13, 8), jnp.int32)), TypeError, "x is int32, want floating-point numbers"),
        (dict(w=jnp.ones((4, 1, 8))), TypeError, r"w has the shape \(4, 1, 8\), want \(k, 8\) with .* x has the shape \(2, 13, 8\)"),
        (dict(w=jnp.ones((0, 8))), TypeError, r"w has the shape \(0, 8\), want \(k, 8\) with at least one tap"),
        (dict(bias=jnp.ones(4)), TypeError, r"bias has the shape \(4,\), want \(8,\): an element for each channel"),
        (dict(w=jnp.ones((4, 8), complex)), TypeError, "w is complex.*, want a dtype that converts to float32"),
        (dict(initial_states=jnp.ones((2, 3, 8), complex)), TypeError, "initial_states is complex.*, want a dtype that converts"),
        (dict(initial_states=jnp.ones((2, 4, 8))), TypeError, r"initial_states has the shape \(2, 4, 8\), want \(2, 3, 8\)"),
        (dict(seq_idx=np.zeros((2, 12), np.int32)), TypeError, r"seq_idx has the shape \(2, 12\), want \(2, 13\)"),
        (dict(seq_idx=np.zeros((2, 13))), TypeError, "seq_idx is float.*, want integers"),
        (dict(return_final_states="yes"), TypeError, "causal_conv1d: return_final_states is 'yes', want a bool"),
        (dict(return_final_states=np.ones(2, bool)), TypeError, r"return_final_states is bool\[2\], want a bool"),
        (dict(activation="swoosh"), ValueError, "causal_conv1d: activation is 'swoosh', want one of"),
        (dict(implementation="none"), ValueError, "causal_conv1d: implementation is 'none', want one of"),
        (dict(implementation="cuda"), NotImplementedError, "implementation 'cuda' does not support this call"),
    ],
)
def test_errors(change, error, message):
    x, w, bias, _ = some(jnp.float32)
    with pytest.raises(error, match=message):
        jaxext.causal_conv1d(**(dict(x=x, w=w, bias=bias) | change))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(conv_state=jnp.ones((2, 2, 8))), ValueError, "conv_state has 2 steps, want at least 3, one less than the taps of w"),
        (dict(conv_state=jnp.ones((2, 3, 4))), TypeError, r"conv_state has the shape \(2, 3, 4\), want \(..., steps, C\)"),
        (dict(conv_state=jnp.ones((3, 3, 8))), TypeError, r"conv_state has the shape \(3, 3, 8\), want \(2, 3, 8\)"),
        (dict(conv_state=jnp.ones((2, 3, 8), int)), TypeError, "conv_state is int.*, want floating-point numbers, since x is float32"),
        (dict(x=jnp.ones((2, 8), complex)), TypeError, "conv_state is float32, want complex numbers, since x is complex"),
        (dict(cache_seqlens=np.ones(3, np.int32)), TypeError, r"cache_seqlens has the shape \(3,\), want \(2,\)"),
        (dict(cache_seqlens=np.ones(2)), TypeError, "cache_seqlens is float.*, want integers"),
        (dict(conv_state_indices=np.ones(3, np.int32)), TypeError, r"conv_state_indices has the shape \(3,\), want \(2,\)"),
        (dict(x=jnp.ones((5, 2, 1, 8))), TypeError, r"x has the shape \(5, 2, 1, 8\), want \(..., C\) or \(..., T, C\)"),
        (
            dict(conv_state=jnp.ones((3, 8)), conv_state_indices=np.ones(2, np.int32)),
            TypeError,
            r"conv_state has the shape \(3, 8\), want \(rows, steps, C\) with conv_state_indices",
        ),
        (dict(x=jnp.ones(8), conv_state_indices=np.int32(1)), TypeError, r"x has the shape \(8,\), want \(N, C\) or \(N, T, C\)"),
        (dict(implementation="cuda"), ValueError, r"causal_conv1d_update: implementation is 'cuda', want one of \['xla'\] or None"),
    ],
)
def test_errors_of_updates(change, error, message):
    x, w, bias, state = some(jnp.float32)
    with pytest.raises(error, match=message):
        jaxext.causal_conv1d_update(**(dict(x=x[:, 0], conv_state=state, w=w, bias=bias) | change))
