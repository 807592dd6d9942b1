"""Losses of one example, with its batch axis of size 1, and for each parameters and a batch in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxext

NHWC = ("NHWC", "HWIO", "NHWC")


def normal(*shape, seed=0, dtype=np.float64):
    size = max(1, int(np.prod(shape[:-1])))
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape) / size**0.5, dtype)


def integers(*shape, below=7, seed=0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).integers(0, below, shape))


def entropy(logits, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1).mean()


def dense(x, w, b):
    return x @ w + b.reshape(*(1,) * (x.ndim - 1), -1)


def mlp(p, batch):
    x, labels = batch
    x = jax.nn.gelu(dense(x, *p["first"]))
    return entropy(dense(x, *p["last"]), labels)


def group_norm(x, scale, shift, groups=2):
    y = x.reshape(*x.shape[:-1], groups, -1)
    y = (y - y.mean((1, 2, 4), keepdims=True)) * lax.rsqrt(y.var((1, 2, 4), keepdims=True) + 1e-5)
    return y.reshape(x.shape) * scale.reshape(1, 1, 1, -1) + shift.reshape(1, 1, 1, -1)


def resnet(conv, p, batch):
    x, labels = batch
    convolve = functools.partial(conv, dimension_numbers=NHWC)
    x = convolve(x, p["stem"], (1, 1), "SAME")
    y = jax.nn.relu(group_norm(x, *p["norm"]))
    y = convolve(y, p["down"], (2, 2), "SAME") + convolve(x, p["skip"], (2, 2), "VALID")
    y = convolve(jax.nn.relu(y), p["depthwise"], (1, 1), ((2, 1), (-1, 2)), rhs_dilation=(2, 1), feature_group_count=6)
    y = convolve(y, p["grouped"], (1, 1), "SAME", feature_group_count=2)
    y = convolve(y, p["up"], (1, 1), ((1, 1), (2, 1)), lhs_dilation=(2, 2))
    return entropy(dense(y.mean((1, 2)), *p["head"]), labels)


RESNET = {
    "stem": normal(3, 3, 3, 4),
    "norm": (1 + normal(4), normal(4, seed=1)),
    "down": normal(3, 3, 4, 6),
    "skip": normal(1, 1, 4, 6),
    "depthwise": normal(3, 3, 1, 12),
    "grouped": normal(2, 2, 6, 8),
    "up": normal(3, 3, 8, 5),
    "head": (normal(5, 7), normal(7)),
}
IMAGES = (normal(5, 6, 6, 3, seed=2), integers(5))


VECTORS = (normal(5, 8, seed=5), integers(5))
SEQUENCES = (normal(5, 6, 8, seed=6), integers(5))


def causal(p, batch):
    """A causal convolution, with the fused operations."""
    x, labels = batch
    x = jaxext.causal_conv1d(x, p["filter"], p["bias"], activation="silu")
    x = x + jnp.broadcast_to(p["spread"], x.shape)
    x = jaxext.gated_linear_unit(x, p["gate"], activation="silu")
    x = jaxext.linear(x, p["w"], p["b"], activation="gelu").mean(1)
    heads = x.reshape(-1, 2, 1, 4) @ jnp.broadcast_to(p["shared"], (2, 4, 8))  # it has more numbers than an example makes of it
    return entropy(jaxext.matmul(heads.sum((1, 2)), p["head"]), labels)


CAUSAL = {
    "filter": normal(3, 8),
    "bias": normal(8),
    "spread": normal(8, seed=10),
    "gate": normal(8, 2, 8),
    "w": normal(8, 8),
    "b": normal(8, seed=7),
    "shared": normal(4, 8),
    "head": normal(8, 7),
}


def layers(p, batch):
    """A scan over layers, each checkpointed, and with a jit inside; what scans read is made of parameters, in two ways."""
    x, labels = batch

    @jax.checkpoint
    def layer(x, w, b, scale):
        return jax.jit(lambda x: jnp.tanh(dense(x, w, b) * scale.reshape(1, -1)))(x)

    def step(x, layer_of):
        w, b, scale = layer_of
        return layer(x, w, b * (1 + jnp.arange(8.0)), scale), None

    x, _ = lax.scan(step, x + p["first"][None], (p["w"].transpose(0, 2, 1), p["b"], jnp.exp(p["scale"])))
    return entropy(x @ p["head"], labels)


LAYERS = {"first": normal(8, seed=8), "w": normal(3, 8, 8), "b": normal(3, 8), "scale": normal(3, 8, seed=9), "head": normal(8, 7)}


def recurrent(p, batch):
    """A parameter that all steps read, one that is the first state, and one of a scan inside a scan."""
    x, labels = batch

    def step(state, token):
        def inner(state, w):
            return jnp.tanh(state @ w), None

        state = jnp.tanh(token @ p["w"] + state @ p["state"])
        return lax.scan(inner, state, p["inner"])[0], token.sum()

    first = jnp.broadcast_to(p["first"][None], (1, 8))
    state, sums = lax.scan(step, first, x.swapaxes(0, 1))
    return entropy(state @ p["head"], labels) + sums.sum() * p["unused"] * 0


RECURRENT = {
    "first": normal(8),
    "w": normal(8, 8),
    "state": normal(8, 8, seed=1),
    "inner": normal(2, 8, 8),
    "head": normal(8, 7),
    "unused": jnp.asarray(2.0),
}


def made(p, batch):
    """Parameters that go through other operations first, alone and together."""
    x, labels = batch
    low_rank = p["w"] + p["a"] @ p["b"]
    standardised = (p["v"] - p["v"].mean(0, keepdims=True)) / p["v"].std(0, keepdims=True)
    x = jnp.tanh(x @ low_rank) * lax.stop_gradient(p["w"].sum())
    x = jnp.tanh(x @ standardised.reshape(2, 4, 8).transpose(2, 0, 1).reshape(8, 8))
    joined = jnp.concatenate([p["left"], p["right"]], axis=1)
    x = jnp.maximum(x @ joined, (x * p["slope"].reshape(1, 8)))
    x = x * jnp.where(x > 0, p["slopes"].reshape(1, 8), -2 * p["slopes"].reshape(1, 8))
    return entropy(x[:, p["slope"].argsort()] @ p["head"], labels)


MADE = {
    "w": normal(8, 8),
    "a": normal(8, 2),
    "b": normal(2, 8),
    "v": normal(8, 8, seed=1),
    "left": normal(8, 3),
    "right": normal(8, 5),
    "slope": normal(8),
    "slopes": normal(8, seed=2),
    "head": normal(8, 7),
}


def transposed(p, batch):
    """A parameter as the filter of the gradient of an input."""
    x, labels = batch
    forward = lambda image: jaxext.conv_general_dilated(image, p["filter"], (2, 1), "SAME", dimension_numbers=NHWC)
    (image,) = jax.linear_transpose(forward, jax.ShapeDtypeStruct((1, 12, 6, 5), x.dtype))(x)
    return entropy(100 * image.mean((1, 2)) @ p["head"], labels)


LOSSES = {
    "mlp": (mlp, {"first": (normal(8, 12), normal(12)), "last": (normal(12, 7), normal(7))}, VECTORS),
    "convolutions of jaxext": (functools.partial(resnet, jaxext.conv_general_dilated), RESNET, IMAGES),
    "transposed convolution": (transposed, {"filter": normal(3, 2, 5, 3), "head": normal(5, 7)}, IMAGES),
    "causal convolution": (causal, CAUSAL, SEQUENCES),
    "scan over layers": (layers, LAYERS, VECTORS),
    "recurrent": (recurrent, RECURRENT, SEQUENCES),
    "made of parameters": (made, MADE, VECTORS),
}
# The parameters whose gradients are written for each example.
STORED = {
    "scan over layers": {"scale"},
    "recurrent": {"w", "state", "inner"},
}
