"""A causal autoencoder of videos, trained on short videos and run as a stream, chunk by chunk, with the bits of the whole video.

    latent = conv(relu(conv(relu(conv(frames)))))           4 frames of 32x32 -> 1 of 8x8 with 8 channels
    result = conv(relu(conv(relu(conv(relu(latent))))))     back to 4 frames; all are `jaxext.causal_conv`, here with `transpose=True`

    pip install '.[demo]'
    python examples/video_stream.py --plot video_stream.png

What to see: a stream keeps only the last steps of each layer's input.  Chunks of a video, or 4 frames at a time inside `jax.lax.scan`, are
bitwise identical to the result of the whole video.  A step costs the same wherever it is in the stream.

Latent frame p reads the frames up to 4p, and gives the results 4p to 4p + 3.  So the network is trained to be 3 frames late.  The videos
are generated: two handwritten digits fly across the picture and bounce off its sides.
"""

import argparse
import contextlib
import functools
import math
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits  # pip install '.[demo]'

import jaxext

# The shape of a filter, time first, its strides, and whether it is transposed.
LAYERS = (
    ((3, 3, 3, 1, 16), (1, 2, 2), False),
    ((3, 3, 3, 16, 32), (2, 2, 2), False),
    ((3, 3, 3, 32, 8), (2, 1, 1), False),
    ((4, 3, 3, 8, 32), (2, 1, 1), True),
    ((4, 4, 4, 32, 16), (2, 2, 2), True),
    ((3, 4, 4, 16, 1), (1, 2, 2), True),
)
STEP, DELAY = 4, 3  # frames of a latent frame, and how many frames the result is late
SIDE, DIGIT, DIGITS, SPEED = 32, 14, 2, 1.5  # pixels of a frame and of a digit, digits of a video, pixels per frame
BATCH, LENGTH, RATE = 4, 16, 0.003
FRAMES, CHUNK, ROUNDS = 64, 8, 7  # of the streamed video; times are medians of so many rounds
GOAL = 0.5  # of the error of black frames


@functools.cache
def sprites():
    """Handwritten digits of DIGIT x DIGIT pixels from 0 to 1; those of scikit-learn have 8 x 8."""
    loaded: Any = load_digits()
    images = loaded.images.astype(np.float32) / 16
    return np.asarray(jax.image.resize(images, (len(images), DIGIT, DIGIT), "linear"))


def videos(rng, count, length):
    """Videos (count, length, SIDE, SIDE, 1) of digits with random places and directions."""
    room, pictures = SIDE - DIGIT, np.zeros((count, length, SIDE, SIDE, 1), np.float32)
    for video in pictures:
        for sprite in sprites()[rng.integers(len(sprites()), size=DIGITS)]:
            angle = rng.uniform(0, 2 * math.pi)
            way = rng.uniform(0, 2 * room, 2) + SPEED * np.arange(length)[:, None] * (math.cos(angle), math.sin(angle))
            places = np.rint(abs(way % (2 * room) - room)).astype(int)  # bounces between 0 and room
            for frame, (row, column) in zip(video, places, strict=True):
                place = frame[row : row + DIGIT, column : column + DIGIT, 0]
                np.maximum(place, sprite, out=place)
    return pictures


# --- the network


def init(seed=0):
    """A filter and a bias for each layer."""
    rng, params = np.random.default_rng(seed), []
    for shape, strides, transpose in LAYERS:
        read = math.prod(shape[:-1]) / (math.prod(strides) if transpose else 1)  # by an element of the result
        params.append(((rng.normal(size=shape) * math.sqrt(2 / read)).astype(np.float32), np.zeros(shape[-1], np.float32)))
    return params


@jax.jit
def network(params, frames, states=None):
    """The result of frames (N, T, SIDE, SIDE, 1), and the states after them.  Without states a video begins."""
    x, after = frames, []
    for (w, bias), (_, strides, transpose), state in zip(params, LAYERS, states or [None] * len(LAYERS), strict=True):
        x = jax.nn.relu(x)  # frames are not negative
        x, state = jaxext.causal_conv(x, w, strides=strides, transpose=transpose, state=state, return_state=True)
        x = x + bias
        after.append(state)
    return x, after


def error(result, frames):
    """Mean squared difference of frames and their reconstructions."""
    return jnp.square(result[:, DELAY:] - frames[:, :-DELAY]).mean()


@jax.jit
def update(params, moments, frames, count):
    """A step of Adam: (parameters, moments), error."""
    value, grads = jax.value_and_grad(lambda params: error(network(params, frames)[0], frames))(params)
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], grads)
    second = jax.tree.map(lambda m, g: 0.99 * m + 0.01 * g * g, moments[1], grads)
    rate, unbias = RATE / (1 - 0.9**count), 1 / (1 - 0.99**count)
    params = jax.tree.map(lambda p, m, s: p - rate * m / (jnp.sqrt(unbias * s) + 1e-6), params, first, second)
    return (params, (first, second)), value


def train(steps):
    zeros, rng = jax.tree.map(np.zeros_like, init()), np.random.default_rng(1)
    run = init(), (zeros, zeros)
    for step in range(1, steps + 1):
        run, value = update(*run, videos(rng, BATCH, LENGTH), jnp.float32(step))
        if step == 1 or step % 50 == 0 or step == steps:
            print(f"step {step:4}   error {value:.4f}")
    return run[0]


# --- the stream


@jax.jit
def loop(params, frames, states):
    """The same, one latent frame at a time."""
    steps = jnp.moveaxis(frames.reshape(len(frames), -1, STEP, *frames.shape[2:]), 1, 0)
    states, results = jax.lax.scan(lambda states, frames: network(params, frames, states)[::-1], states, steps)
    return jnp.moveaxis(results, 0, 1).reshape(frames.shape), states


def timed(f, *args):
    """The milliseconds of a call."""
    start = time.perf_counter()
    jax.block_until_ready(f(*args))
    return (time.perf_counter() - start) * 1e3


def show_stream(params, frames):
    """Print times and bytes, and return the results of a video at once and in a loop, and which ways have the bits of the whole."""
    whole, count = network(params, frames), frames.shape[1]
    before = jax.tree.map(jnp.zeros_like, whole[1])
    looped = loop(params, frames, before)
    states, results = before, []
    for chunk in np.split(frames, count // CHUNK, axis=1):
        result, states = network(params, chunk, states)
        results.append(result)
    ways = {f"{CHUNK} frames": (jnp.concatenate(results, axis=1), states), f"{STEP} frames in lax.scan": looped}

    calls = (network, params, frames), (network, params, chunk, before), (loop, params, frames, before)
    of_whole, of_chunk, of_loop = np.median([[timed(*call) for call in calls] for _ in range(ROUNDS)], axis=0)
    print(f"\n{count} frames at once take {of_whole:.1f} ms")
    print(f"A chunk of {CHUNK} takes {of_chunk:.2f} ms, and its share of the whole is {of_whole * CHUNK / count:.2f} ms")
    print(f"A step of {STEP} in lax.scan takes {of_loop * STEP / count:.2f} ms, and its share is {of_whole * STEP / count:.2f} ms")
    print(f"The states have {sum(state.nbytes for state in states)} bytes, and the frames {frames.nbytes}\n")
    return whole[0], looped[0], {name: all(map(np.array_equal, *map(jax.tree.leaves, (way, whole)))) for name, way in ways.items()}


def plot(path, rows, every=8):
    from matplotlib.figure import Figure  # pip install '.[demo]'

    figure = Figure(figsize=(8, 3.5), layout="constrained")
    for axes, (name, video) in zip(figure.subplots(len(rows)), rows.items(), strict=True):
        pictures = [np.pad(frame, 1, constant_values=1) for frame in np.asarray(video)[0, ::every, ..., 0]]
        axes.imshow(np.concatenate(pictures, axis=1), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        axes.set_title(name, fontsize=9)
        axes.axis("off")
    figure.savefig(path, dpi=90)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="of training (%(default)s)")
    parser.add_argument("--plot", metavar="PATH", help="where to draw frames, and the results at once and streamed")
    args = parser.parse_args(argv)
    if args.steps < 1:
        parser.error(f"argument --steps: it is {args.steps}, want at least 1")

    # A stream has the bits of the whole on GPUs inside `use_invariant`, and on CPUs everywhere.
    with contextlib.nullcontext() if jax.default_backend() == "cpu" else jaxext.use_invariant():
        frames, params = videos(np.random.default_rng(2), 1, FRAMES), train(args.steps)
        whole, looped, same = show_stream(params, frames)
        untrained, _ = network(init(), frames)
    before, after, black = (float(error(result, frames)) for result in (untrained, whole, np.zeros_like(frames)))
    if args.plot:
        plot(args.plot, {"frames": frames[:, :-DELAY], "at once": whole[:, DELAY:], "streamed": looped[:, DELAY:]})
        print(f"Picture saved to {args.plot}")
    print(f"Error {before:.4f} before training, {after:.4f} after it (goal: at most {GOAL:.0%} of {black:.4f}, that of black frames)")
    for name, holds in same.items():
        print(f"The bits of the whole, by {name}: {holds}")
    return 0 if after <= GOAL * black and all(same.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
