"""A bilateral filter as CUDA text, with all of JAX's transformations.  It smooths images and keeps their edges.

    y[p] = Σ_q w[p,q] x[q] / Σ_q w[p,q]
    w[p,q] = exp(-|p - q|² / (2 sigma_space²) - (x[p] - x[q])² / (2 sigma_range²))    q: the pixels of the image within `radius` of p

    python examples/cuda_text.py
    python examples/cuda_text.py --radius 4 --sigma-range 0.3

What to see: the filter is one CUDA kernel, and its derivative another.  NVRTC compiles both when a program for a GPU is lowered, and XLA
launches them.  Without a GPU, ptxsim executes both on small images, and the reference in jnp filters the larger images.  All results and
gradients are compared with the reference in float64.  The kernels need NVRTC: `pip install 'jaxext[nvrtc]'`.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # eight devices on a CPU; GPUs are left alone

import argparse
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxext
from jaxext import extend

TILE = 16  # a block of TILE x TILE threads computes as many pixels
SIZE, NOISE = 96, 0.1  # of the images
SMALL = (2, 18, 21)  # the images of ptxsim: two blocks along each axis, the last ones partly outside
GOAL = 1e-5  # of the largest element

SOURCE = r"""
__device__ float weight_of(int square, float difference, float sigma_space, float sigma_range) {
  return expf(-square / (2 * sigma_space * sigma_space) - difference * difference / (2 * sigma_range * sigma_range));
}

// The tile of a block, with a halo of `radius` pixels, lies in shared memory.
__global__ void bilateral(const float* x, float* y, float* total, int H, int W, int radius, float sigma_space, float sigma_range) {
  extern __shared__ float tile[];
  const int side = blockDim.x + 2 * radius, top = blockIdx.y * blockDim.y - radius, left = blockIdx.x * blockDim.x - radius;
  const float* image = x + (size_t)blockIdx.z * H * W;
  for (int k = threadIdx.y * blockDim.x + threadIdx.x; k < side * side; k += blockDim.x * blockDim.y) {
    const int i = top + k / side, j = left + k % side;
    tile[k] = i >= 0 && i < H && j >= 0 && j < W ? image[(size_t)i * W + j] : 0;
  }
  __syncthreads();
  const int i = blockIdx.y * blockDim.y + threadIdx.y, j = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= H || j >= W) return;
  const float centre = tile[(threadIdx.y + radius) * side + threadIdx.x + radius];
  float sum = 0, all = 0;
  for (int di = max(-radius, -i); di <= min(radius, H - 1 - i); ++di)
    for (int dj = max(-radius, -j); dj <= min(radius, W - 1 - j); ++dj) {
      const float other = tile[(threadIdx.y + radius + di) * side + threadIdx.x + radius + dj];
      const float weight = weight_of(di * di + dj * dj, other - centre, sigma_space, sigma_range);
      sum += weight * (other - centre);
      all += weight;
    }
  const size_t p = ((size_t)blockIdx.z * H + i) * W + j;
  y[p] = centre + sum / all;
  total[p] = all;
}

// The cotangent of pixel p gathers those of its window, since p has the same weight in the window of q as q in that of p.
__global__ void bilateral_backward(const float* x, const float* y, const float* total, const float* d_y, float* d_x, int H, int W,
                                   int radius, float sigma_space, float sigma_range) {
  const int i = blockIdx.y * blockDim.y + threadIdx.y, j = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= H || j >= W) return;
  const size_t p = ((size_t)blockIdx.z * H + i) * W + j;
  const float centre = x[p], slope = 1 / (sigma_range * sigma_range), own = d_y[p] / total[p];
  float sum = 0;
  for (int di = max(-radius, -i); di <= min(radius, H - 1 - i); ++di)
    for (int dj = max(-radius, -j); dj <= min(radius, W - 1 - j); ++dj) {
      const size_t q = p + (ptrdiff_t)di * W + dj;
      const float difference = x[q] - centre, weight = weight_of(di * di + dj * dj, difference, sigma_space, sigma_range);
      const float as_neighbour = d_y[q] / total[q] * (1 + slope * difference * (centre - y[q]));  // through y[q]
      const float as_centre = own * slope * difference * (x[q] - y[p]);                           // through the weights of y[p]
      sum += weight * (as_neighbour + as_centre);
    }
  d_x[p] = sum;
}
"""


def reference(x, *, radius, sigma_space, sigma_range):
    """(N, H, W) -> the filtered images, and the sums of the weights."""
    H, W = x.shape[1:]
    offsets = [(di, dj) for di in range(-radius, radius + 1) for dj in range(-radius, radius + 1)]

    def windows(a):
        a = jnp.pad(a, ((0, 0), (radius, radius), (radius, radius)))
        return jnp.stack([a[:, radius + di : radius + di + H, radius + dj : radius + dj + W] for di, dj in offsets])

    near = jnp.array([np.exp(-(di * di + dj * dj) / (2 * sigma_space**2)) for di, dj in offsets], x.dtype)
    differences = windows(x) - x[None]
    weights = near[:, None, None, None] * windows(jnp.ones_like(x)) * jnp.exp(-(differences**2) / (2 * sigma_range**2))
    total = weights.sum(0)
    return x + (weights * differences).sum(0) / total, total


def grid(x, *_):
    return -(-x.shape[2] // TILE), -(-x.shape[1] // TILE), x.shape[0]


def shared(x, radius):
    return 4 * (TILE + 2 * radius) ** 2  # bytes


forward = extend.cuda_kernel(SOURCE, "bilateral", grid=grid, block=(TILE, TILE), shared=shared, out=lambda x: (x, x))
backward = extend.cuda_kernel(SOURCE, "bilateral_backward", grid=grid, block=(TILE, TILE), out=lambda x, *_: x)

# Images are independent, and pixels are not.  The kernels' pointers have the names of operands and results.  Their numbers H and W are the
# sizes of labels, and the others are keywords.
bilateral = extend.operation(
    "bilateral",
    reference,
    operands=dict(x="N H W"),
    results=dict(y="N H W"),
    saved=dict(total="N H W"),
    unsharded="H W",
    kernels={"cuda": forward},
)
extend.register(bilateral.backward, backward)


def images(count, rng):
    """Images of bright and dark squares, (count, SIZE, SIZE), and the same with noise."""
    of_pixel = np.arange(SIZE) * 4 // SIZE
    clean = rng.random((count, 4, 4))[:, of_pixel][:, :, of_pixel]
    return tuple(a.astype(np.float32) for a in (clean, clean + NOISE * rng.normal(size=clean.shape)))


def compare(rows, x, c, given):
    """Print the errors of functions of images x and cotangents c, which give results and gradients; return the largest."""
    with jax.enable_x64(True):
        y, pullback = jax.vjp(jax.jit(lambda x: reference(x, **given)[0]), jnp.asarray(x, jnp.float64))
        truth = [np.asarray(a) for a in (y, *pullback(jnp.asarray(c, jnp.float64)))]
    errors = []
    for name, function in rows.items():
        by = dict.fromkeys(row.chosen for row in jaxext.explain(function)(x, c).rows)
        errors.append([np.abs(np.asarray(a) - b).max() / np.abs(b).max() for a, b in zip(function(x, c), truth, strict=True)])
        print("  {:24}result {:.1e}   gradient {:.1e}   by {}".format(name, *errors[-1], ", ".join(map(str, by))))
    return np.max(errors)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--radius", type=int, default=2, help="of the window, in pixels (%(default)s)")
    parser.add_argument("--sigma-space", type=float, default=1.5, help="in pixels (%(default)s)")
    parser.add_argument("--sigma-range", type=float, default=0.25, help="of the values, which lie about 0 to 1 (%(default)s)")
    args = parser.parse_args(argv)
    if args.radius < 0 or min(args.sigma_space, args.sigma_range) <= 0:
        parser.error("want a --radius of 0 or more, and positive sigmas")
    given = dict(radius=args.radius, sigma_space=args.sigma_space, sigma_range=args.sigma_range)
    smooth, rng = functools.partial(bilateral, **given), np.random.default_rng(0)

    def filtered(x, _, **named):
        return smooth(x, **named)

    def gradient(x, c, **named):
        return jax.grad(lambda x: jnp.sum(c * smooth(x, **named)))(x)

    def one_by_one(f):
        return lambda *arrays: jax.vmap(f)(*(a[:, None] for a in arrays))[:, 0]

    clean, x = images(jax.device_count(), rng)
    c = rng.normal(size=x.shape).astype(np.float32)
    program = jaxext.export.lower_for(gradient, arch="sm_90a")(x, c).as_text()
    calls = program.count("custom_call @jaxext_raw_v1")
    print(bilateral, bilateral.backward, sep="\n")
    print(f"The gradient's program for an H100 (sm_90a) launches {calls} kernels.")

    mesh = jax.make_mesh((len(x),), ("data",), axis_types=(AxisType.Auto,))
    split = functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=P("data"))
    rows = {
        "jit": jax.jit(lambda x, c: (filtered(x, c), gradient(x, c))),
        "vmap": jax.jit(lambda x, c: (one_by_one(filtered)(x, c), one_by_one(gradient)(x, c))),
        f"shard_map, {len(x)} devices": jax.jit(lambda x, c: (split(filtered)(x, c), split(gradient)(x, c))),
    }
    print(f"\nThe largest errors against float64\n{len(x)} images of {SIZE} x {SIZE}")
    worst = compare(rows, x, c, given)
    if jax.default_backend() == "cpu":
        named = dict(implementation="cuda_simulated")
        print("{} images of {} x {}, by ptxsim".format(*SMALL))
        rows = {"kernels": lambda x, c: (filtered(x, c, **named), gradient(x, c, **named))}
        worst = max(worst, compare(rows, rng.random(SMALL).astype(np.float32), rng.normal(size=SMALL).astype(np.float32), given))

    smoothed, blurred = smooth(x), smooth(x, sigma_range=1e3)
    noise, left, of_blur = (float(np.sqrt(np.mean((np.asarray(a) - clean) ** 2))) for a in (x, smoothed, blurred))
    print(f"\nNoise {noise:.3f}, after the filter {left:.3f}, after a plain Gaussian blur {of_blur:.3f}")
    print("(goal: the filter leaves the least; parameters other than the defaults need not reach it)")
    print(f"Largest error {worst:.1e} (goal: at most {GOAL:.0e})")
    return 0 if worst <= GOAL and calls == 2 and left < min(noise, of_blur) else 1


if __name__ == "__main__":
    sys.exit(main())
