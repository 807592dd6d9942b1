"""The examples of networks over many devices, and of images: what they show is so, and they fail where it is not."""

import functools
import re

import image_convolution
import jax
import jax.numpy as jnp
import mixture_of_experts
import numpy as np
import pytest
import scipy.signal
import sharded_mlp
from collectives import collectives
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxext
from jaxext.backends.cuda import cuda_binding


@pytest.fixture(autouse=True)
def as_users_run_it():
    with jax.enable_x64(False), jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


# --- sharded_mlp

SIZES = (12, 16, 32, 16, 10)
BATCH = 64


def reference(params, batch, rate, steps):
    """(losses, parameters) in float64 on one device, by jnp alone."""

    def loss(params, batch):
        x, y = batch
        for i, (weights, bias) in enumerate(params):
            x = jnp.dot(x if i == 0 else jnp.maximum(x, 0), weights) + bias
        return jnp.mean(jnp.sum((x - y) ** 2, axis=-1))

    losses = []
    with jax.enable_x64(True):
        params, batch = jax.tree.map(np.float64, (params, batch))
        step = jax.jit(jax.value_and_grad(loss))
        for _ in range(steps):
            value, grads = step(params, batch)
            params = jax.tree.map(lambda p, g: p - rate * g, params, grads)
            losses.append(value)
    return np.array(losses), params


def test_training_is_the_same_on_every_mesh_and_only_sums_are_sent():
    rng = np.random.default_rng(0)
    params, batch = sharded_mlp.init(rng, SIZES), sharded_mlp.examples(rng, BATCH, SIZES[0], SIZES[-1])
    want, trained = reference(params, batch, 0.05, 6)
    assert want[-1] < 0.95 * want[0]

    # float32 numbers that a device gets: the gradients of its parameters, and the loss.  With the columns of layers 1 and 3 and the rows
    # of 2 and 4 halved also what layers 2 and 4 give, and the gradient of what layer 3 takes, of a quarter of the batch.
    _, a, b, c, last = SIZES
    whole = sum(x.size for x in jax.tree.leaves(params)) + 1
    halved = (whole - 1 + b + last) // 2 + 1 + BATCH // 4 * (b + last + b)
    sends = {(1, 1): {}, (8, 1): {"all-reduce": whole}, (4, 2): {"all-reduce": halved}}
    assert len(meshes := sharded_mlp.meshes(jax.devices())) == 3
    for mesh in meshes:
        losses, got, sent, _ = sharded_mlp.train(mesh, jnp.float32, params, batch, 0.05, 6)
        np.testing.assert_allclose(losses, want, rtol=1e-6)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(trained), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)
        assert {name: round(megabytes * 1e6 / 4) for name, (_, megabytes) in sent.items()} == sends[mesh.devices.shape]


def test_networks_on_fewer_devices(capsys):
    shapes = {n: [mesh.devices.shape for mesh in sharded_mlp.meshes(jax.devices()[:n])] for n in (1, 2, 4)}
    assert shapes == {1: [(1, 1)], 2: [(1, 1), (2, 1), (1, 2)], 4: [(1, 1), (4, 1), (2, 2)]}
    assert sharded_mlp.main(["--width", "64", "--batch", "32", "--devices", "2"]) == 0
    printed = capsys.readouterr().out
    assert re.findall(r"(\d)-way data x (\d)", printed) == [("1", "1"), ("2", "1"), ("1", "2")]
    losses = [[float(number) for number in line.split()] for line in re.findall(r"  losses (.*)", printed)]
    np.testing.assert_allclose(losses, losses[:1] * 3, rtol=1e-4)
    assert losses[0][-1] < losses[0][0]


def test_a_network_that_gathers_is_a_failure(monkeypatch, capsys):
    """The columns of every layer: what one gives is not what the next one takes."""

    def place(mesh, params, batch):
        put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
        return [(put(w, None, "model"), put(b, "model")) for w, b in params], tuple(put(x, "data") for x in batch)

    monkeypatch.setattr(sharded_mlp, "place", place)
    assert sharded_mlp.main(["--width", "64", "--batch", "32", "--devices", "2"]) == 1
    assert "all-gather" in capsys.readouterr().out


# --- image_convolution


@pytest.mark.slow
def test_the_picture_and_what_is_read_from_it(tmp_path, capsys):
    path = tmp_path / "picture.png"
    assert image_convolution.main(["--every", "8", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert re.findall(r"[123]-D (?:full|same|valid)", printed) == [f"{n}-D {m}" for n in "12" for m in ("full", "same", "valid")] + [
        "3-D valid"
    ]
    assert float(re.findall(r"turns by ([\d.]+)", printed)[0]) == pytest.approx(1, abs=1e-3)
    before, after = map(float, re.findall(r"from ([\d.]+) to ([\d.]+)", printed)[0])
    assert 0.05 < after < 0.9 * before
    assert "8 frames" in printed


def test_a_kernel_that_is_longer_than_what_it_meets_is_refused():
    with pytest.raises(ValueError, match=re.escape("the kernel has shape (3, 2) and x has (2, 5), want no side of it to be longer")):
        image_convolution.convolve(jnp.ones((2, 5)), jnp.ones((3, 2)))


@pytest.mark.parametrize("mode", ["full", "same", "valid"])
def test_convolutions_are_scipys(mode):
    """Bit for bit: small whole numbers, sides of the kernel even and odd."""
    rng = np.random.default_rng(0)
    for shape, kernel_shape in (((17,), (4,)), ((9, 12), (4, 3)), ((5, 6, 7), (2, 3, 4))):
        x, kernel = (rng.integers(-4, 5, shape).astype(np.float64) for shape in (shape, kernel_shape))
        want = scipy.signal.convolve(x, kernel, mode, method="direct")
        np.testing.assert_array_equal(image_convolution.convolve(jnp.asarray(x), jnp.asarray(kernel), mode), want)


def test_a_kernel_that_is_not_flipped_is_a_failure(monkeypatch):
    correlate = lambda x, kernel, mode="same", convolve=image_convolution.convolve: convolve(x, jnp.flip(kernel), mode)
    monkeypatch.setattr(image_convolution, "convolve", correlate)
    image = jnp.asarray(np.random.default_rng(0).uniform(size=(20, 24, 3)), jnp.float32)
    with pytest.raises(RuntimeError, match="convolve2d"):
        image_convolution.planes(image, image[..., 0], image)


def test_blur_and_the_way_back():
    """The blur is compared with scipy's in float64; the way back goes down to the image that was blurred."""
    image = np.random.default_rng(0).uniform(size=(24, 30, 2)).astype(np.float32)
    bell = np.exp(-((np.arange(-3, 4) / 1.0) ** 2) / 2)
    bell /= bell.sum()
    want = scipy.signal.convolve(image.astype(np.float64), np.multiply.outer(bell, bell)[..., None], "same", method="direct")
    blurred = image_convolution.blur(jnp.asarray(image), 1)
    np.testing.assert_allclose(blurred, want, rtol=1e-5, atol=1e-6)
    restored, distances = image_convolution.deblur(blurred, 1, 20)
    assert distances[-1] < 0.02 * distances[0]
    assert np.mean((restored - image) ** 2) < 0.75 * np.mean((blurred - image) ** 2)


def test_frames_on_their_devices_send_nothing():
    mesh = jax.make_mesh((8,), ("time",), (AxisType.Auto,))
    frames = jax.device_put(jnp.ones((8, 6, 7)), NamedSharding(mesh, P("time")))
    compiled = jax.jit(jax.vmap(lambda frame: image_convolution.convolve(frame, jnp.ones((3, 3))))).lower(frames).compile()
    assert not collectives(compiled)


# --- both


@pytest.mark.parametrize(
    ("example", "args", "got"),
    [
        (sharded_mlp, "--width 0", "got 0, 512 and 8"),
        (image_convolution, "--every 0", "it is 0, want at least 1"),
    ],
)
def test_arguments_that_are_refused(example, args, got, capsys):
    with pytest.raises(SystemExit, match="2"):
        example.main(args.split())
    assert got in capsys.readouterr().err


@pytest.mark.skipif(cuda_binding.missing() is not None, reason="there are no CUDA kernels, which refuse everything then")
def test_what_is_offered_to_the_cuda_kernels_they_take():
    """The target is an H100; of image_convolution the depthwise blurs are offered alone."""
    image = jax.ShapeDtypeStruct((107, 160, 3), jnp.float32)
    rng = np.random.default_rng(0)
    params, batch = sharded_mlp.init(rng, (784, 64, 64, 64, 10)), sharded_mlp.examples(rng, 32, 784, 10)
    train = functools.partial(sharded_mlp.step, jnp.bfloat16)
    with jaxext.use_implementation("cuda"), jaxext.use_target("sm_90a"):
        assert {row.chosen for row in jaxext.explain(train, platform="cuda")(params, batch, 0.1).rows} <= {"cuda", "xla"}
        blurs = jaxext.explain(functools.partial(image_convolution.deblur, sigma=3, steps=2), platform="cuda")(image)
    assert {row.chosen for row in blurs.rows} == {"cuda"}


# --- mixture_of_experts


def test_a_mixture_of_experts_on_eight_devices(capsys, tmp_path):
    """The bias spreads the rows over the experts, and does not cost much."""
    assert mixture_of_experts.main(["--steps", "40", "--plot", str(tmp_path / "plot.png"), "--balance"]) == 0
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert "16 experts, 2 for each row, on 8 x cpu: 2 on each" in printed and "one device trains: True\n" in printed
    assert "than at first: True\n" in printed
    rows = np.array([line.replace("%", "").split() for line in re.findall(r"^ +\d+ .*$", printed, re.MULTILINE)], float)
    np.testing.assert_allclose(rows[:, 1], rows[:, 2], rtol=1e-5)
    assert rows[0, 1] > 2 and rows[-1, 1] < 1.4 and rows[-1, 3] > 80 and rows[-1, 4] < 20


def test_the_mixture_is_that_of_its_formula():
    params, (images, _) = mixture_of_experts.init(), mixture_of_experts.load()
    x, up, down = (each.astype(np.float64) for each in (images[:50], params["up"], params["down"]))
    scores = np.exp(x @ params["router"])
    probabilities = scores / scores.sum(1, keepdims=True)
    kept = np.where(probabilities >= np.sort(probabilities)[:, [-mixture_of_experts.TOP]], probabilities, 0)
    of_all = np.einsum("neh,ehk->nek", np.maximum(np.einsum("nk,ekh->neh", x, up), 0), down)
    got, _ = mixture_of_experts.mixture(params, images[:50])
    np.testing.assert_allclose(got, x + np.einsum("ne,nek->nk", kept, of_all), rtol=1e-4, atol=1e-5)


def test_the_products_of_the_mixture_are_ragged():
    def gradient(params, images, labels):
        return jax.grad(lambda params: mixture_of_experts.losses(params, images, labels)[0].mean())(params)

    rows = jaxext.explain(gradient)(mixture_of_experts.init(), *(of[:8] for of in mixture_of_experts.load())).rows
    assert {"ragged_linear", "ragged_nt", "ragged_tn"} <= {row.op for row in rows}
