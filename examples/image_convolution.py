"""A photograph blurred, sharpened, outlined, tracked and deblurred by convolutions in one, two and three dimensions.

    pip install '.[demo]'
    python examples/image_convolution.py    # saves image_convolution.png

The photograph comes with scikit-learn.  `convolve` below has the results of `jax.scipy.signal.convolve` and `convolve2d`, by
`jaxext.conv_general_dilated`.
"""

import os

# A computer without GPUs shows JAX one CPU device; this splits it into eight.  GPUs are left alone: where there are any, JAX takes them.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import argparse
import functools
import sys

import jax
import jax.numpy as jnp
import jax.scipy.signal
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from matplotlib.figure import Figure  # pip install '.[demo]'
from sklearn.datasets import load_sample_image  # pip install '.[demo]'

import jaxext

GREY = np.array([0.299, 0.587, 0.114], np.float32)  # how bright the eye finds red, green and blue (ITU-R BT.601)
EXACT = "highest"  # GPUs would otherwise round float32 operands to TF32, here and in jax.scipy


def claim(text, holds):
    if not holds:
        raise RuntimeError(f"this does not hold: {text}")
    print(text)


def near(x, y):
    return x.shape == y.shape and np.allclose(x, y, rtol=1e-4, atol=1e-5)


@functools.partial(jax.jit, static_argnames="mode")
def convolve(x, kernel, mode="same"):
    """y[i] = Σ_j x[i - j] kernel[j] in any number of dimensions, with zeros outside of x; no side of the kernel exceeds that of x.

    "full" is all of the result, "same" its middle, as large as x, and "valid" that part which no zero enters.
    """
    if any(k > n for k, n in zip(kernel.shape, x.shape, strict=True)):
        raise ValueError(f"convolve: the kernel has shape {kernel.shape} and x has {x.shape}, want no side of it to be longer")
    padding = {
        "full": [(k - 1, k - 1) for k in kernel.shape],
        "same": [(k // 2, (k - 1) // 2) for k in kernel.shape],
        "valid": [(0, 0)] * kernel.ndim,
    }[mode]
    # Nets call "convolution" what does not flip the kernel; their arrays have a batch axis and one of channels before the others.
    return jaxext.conv_general_dilated(x[None, None], jnp.flip(kernel)[None, None], [1] * x.ndim, padding, precision=EXACT)[0, 0]


def gaussian(sigma):
    """A bell of length 6 sigma + 1 and sum 1."""
    t = jnp.arange(-3 * sigma, 3 * sigma + 1, dtype=jnp.float32)
    bell = jnp.exp(-((t / sigma) ** 2) / 2)
    return bell / bell.sum()


@functools.partial(jax.jit, static_argnames="sigma")
def blur(image, sigma):
    """(height, width, colours), each colour by itself: two depthwise convolutions with a line, one down and one across."""
    colours = image.shape[-1]
    bell = jnp.tile(gaussian(sigma)[:, None, None, None], colours)  # height, width, 1, colours
    depthwise = functools.partial(
        jaxext.conv_general_dilated,
        window_strides=(1, 1),
        padding="SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=colours,
        precision=EXACT,
    )
    return depthwise(depthwise(image[None], bell), bell.swapaxes(0, 1))[0]


def lines(grey):
    """One dimension: a row of pixels."""
    row, bell = grey[len(grey) // 2], gaussian(3)
    for mode in ("full", "same", "valid"):
        smooth = convolve(row, bell, mode)
        want = jnp.convolve(row, bell, mode, precision=EXACT)
        claim(f"1-D {mode:5} {row.shape} * {bell.shape} -> {smooth.shape}, as jnp.convolve", near(smooth, want))


def planes(image, grey, blurred):
    """Two dimensions: (edges, sharpened)."""
    smooth, step = jnp.array([1.0, 2.0, 1.0]), jnp.array([1.0, 0.0, -1.0])
    sobel = jnp.outer(step, smooth)  # the difference of rows, smoothed along them
    for mode in ("full", "same", "valid"):
        down = convolve(grey, sobel, mode)
        want = jax.scipy.signal.convolve2d(grey, sobel, mode, precision=EXACT)
        claim(f"2-D {mode:5} {grey.shape} * {sobel.shape} -> {down.shape}, as jax.scipy.signal.convolve2d", near(down, want))
    edges = jnp.hypot(convolve(grey, sobel), convolve(grey, sobel.T))

    bell = gaussian(3)
    plane = jnp.outer(bell, bell)
    by_plane = jax.vmap(lambda colour: convolve(colour, plane), in_axes=2, out_axes=2)(image)
    claim(f"two convolutions with {bell.size} numbers blur as one with {plane.size}, vmapped over the colours", near(blurred, by_plane))

    sharpened = jnp.clip(image + 1.5 * (image - blurred), 0, 1)  # more of what the blur takes away
    return edges, sharpened


def film(grey, frames):
    """(time, height, width): the camera turns by one pixel per frame, and what leaves on one side comes back on the other."""
    return jnp.stack([jnp.roll(grey, t, axis=1) for t in range(frames)])


def volumes(frames):
    """Three dimensions: what changes in a film, from which the speed of the camera is found."""
    smooth, still = gaussian(1), jnp.array([0.0, 1.0, 0.0])
    change = jnp.array([1.0, 0.0, -1.0]) / 2  # (what comes after - what was before) / 2
    in_time = change[:, None, None] * jnp.outer(smooth, jnp.pad(smooth, 1))
    in_width = still[:, None, None] * jnp.outer(smooth, convolve(smooth, change, "full"))

    both = jax.vmap(lambda kernel: convolve(frames, kernel, "valid"))(jnp.stack([in_time, in_width]))
    want = jax.scipy.signal.convolve(frames, in_time, "valid", method="direct", precision=EXACT)
    claim(f"3-D valid {frames.shape} * {in_time.shape} -> {want.shape}, as jax.scipy.signal.convolve", near(both[0], want))

    # A picture that moves by v pixels changes by -v times its slope: least squares over all pixels but those that come round the edge.
    dt, dx = both[..., len(frames) :]
    speed = float(-jnp.vdot(dt, dx) / jnp.vdot(dx, dx))
    claim(f"the camera turns by {speed:.3f} pixels per frame", abs(speed - 1) < 1e-3)
    return dt[0]


def spread(frames):
    """One frame on each device, which finds the outlines in it; nothing is sent."""
    mesh = jax.make_mesh((len(frames),), ("time",), (AxisType.Auto,))
    outlined = jax.vmap(lambda frame: convolve(frame, jnp.array([[0.0, 1.0, 0.0], [1.0, -4.0, 1.0], [0.0, 1.0, 0.0]])))
    split = outlined(jax.device_put(frames, NamedSharding(mesh, P("time"))))
    claim(
        f"{len(frames)} frames on as many devices: their outlines lie there too",
        split.addressable_shards[0].data.shape == (1, *frames.shape[1:]),
    )
    claim("and are those that one device finds", near(split, outlined(frames)))


@functools.partial(jax.jit, static_argnames=("sigma", "steps"))
def deblur(blurred, sigma, steps):
    """The image whose blur is nearest to `blurred`, by Nesterov's gradient descent from there; and the distances on the way."""

    def distance(image):
        return jnp.sum((blur(image, sigma) - blurred) ** 2) / 2

    def descend(carry, t):
        image, last = carry
        ahead = image + t / (t + 3) * (image - last)
        value, gradient = jax.value_and_grad(distance)(ahead)
        return (jnp.clip(ahead - gradient, 0, 1), image), value  # a step of 1 is safe: no blur makes an image larger

    (image, _), values = jax.lax.scan(descend, (blurred, blurred), jnp.arange(steps, dtype=jnp.float32))
    return image, values


def plot(path, pictures):
    figure = Figure(figsize=(12, 6), layout="constrained")
    for axes, (title, picture) in zip(figure.subplots(2, 3).flat, pictures.items(), strict=True):
        axes.imshow(picture, cmap="gray")
        axes.set_title(title)
        axes.axis("off")
    figure.savefig(path, dpi=120)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--implementation", choices=["triton", "cuda", "xla"], help="of the convolutions (default: what jaxext prefers)")
    parser.add_argument("--every", type=int, default=4 if jax.default_backend() == "cpu" else 1, help="take every N-th pixel (%(default)s)")
    parser.add_argument("--plot", default="image_convolution.png", metavar="PATH", help="where to save the picture (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.every < 1:
        parser.error(f"argument --every: it is {args.every}, want at least 1")
    image = jnp.asarray(load_sample_image("china.jpg")[:: args.every, :: args.every], jnp.float32) / 255  # height, width, colours
    grey = jaxext.matmul(image, GREY)

    with jaxext.use_implementation(args.implementation):
        blurred = blur(image, 3)
        restored, _ = deblur(blurred, 3, 30)
    # The CUDA kernels take float32 in depthwise convolutions only, which these are not.
    with jaxext.use_implementation(None if args.implementation == "cuda" else args.implementation):
        lines(grey)
        edges, sharpened = planes(image, grey, blurred)
        moved = volumes(film(grey, 5))
        spread(film(grey, jax.device_count()))

    before, after = (float(jnp.sqrt(jnp.mean((x - image) ** 2))) for x in (blurred, restored))
    claim(
        f"30 steps down its gradient bring the blurred photograph nearer to the sharp one, from {before:.4f} to {after:.4f}",
        after < 0.9 * before,
    )
    pictures = {"photograph": image, "blurred": blurred, "deblurred": restored}
    pictures |= {"sharpened": sharpened, "edges (2-D)": edges, "change in time (3-D)": moved}
    plot(args.plot, pictures)
    print(f"Picture saved to {args.plot}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
