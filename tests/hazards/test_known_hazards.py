"""Each hazard in pairs: a program that has it, and a near miss that has not.  Where a CPU can show it, lax itself shows which is which."""

import dataclasses
import pathlib
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from public_operations import OF_ONE_MATRIX

import jaxext
from jaxext.hazards.known_hazards import HAZARDS, PLANNED_HAZARDS

pytestmark = pytest.mark.usefixtures("long_runs")  # what is small here stands for what is large


DOCS = pathlib.Path(__file__).parents[2] / "docs"
BY_NAME = {hazard.name: hazard for hazard in HAZARDS}
GRID = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
LINE = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


def conv(x, w, padding: Any = "SAME", strides=None, **how):
    layouts = {3: ("NHC", "HIO", "NHC"), 4: ("NHWC", "HWIO", "NHWC")}
    return lax.conv_general_dilated(x, w, strides or (1,) * (x.ndim - 2), padding, dimension_numbers=layouts[x.ndim], **how)


def struct(*shape, dtype: Any = np.float32, mesh=None, spec: Any = None):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=None if mesh is None else NamedSharding(mesh, spec))


@dataclasses.dataclass(frozen=True)
class Program:
    """A function of arrays of these types.  `how` are keywords of `doctor`, and `arch` is the GPU."""

    function: Callable
    types: tuple
    arch: str | None = None
    how: dict = dataclasses.field(default_factory=dict)

    def hazards(self):
        with jaxext.use_target(self.arch):
            return {finding.issue for finding in jaxext.doctor(self.function, **self.how)(*self.types).findings}

    def operands(self, dtype=None):
        rng = np.random.default_rng(0)
        return [rng.integers(-2, 3, t.shape).astype(dtype or t.dtype) for t in self.types]

    def split(self):
        """Its operands on the devices."""
        return [x if t.sharding is None else jax.device_put(x, t.sharding) for x, t in zip(self.operands(), self.types, strict=True)]

    def is_wrong(self):
        """Return whether it is wrong on its mesh, in its dtype or in one jit, against one device, float64 and operation by operation."""
        want = jax.tree.leaves(self.function(*self.operands(np.float64)))
        got = jax.tree.leaves(jax.jit(self.function)(*self.split()))
        return not all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))

    def gathers(self):
        return "all-gather" in str(jax.jit(self.function).lower(*self.split()).compile().as_text())


def gradient(groups=1, **how):
    return jax.grad(lambda w, x: (conv(x, w, feature_group_count=groups, **how) ** 2).sum())


def on(mesh, spec, groups=1, taps=3, **how):
    """A filter's gradient."""
    return Program(gradient(groups, **how), (struct(taps, taps, 8 // groups, 8), struct(8, 8, 8, 8, mesh=mesh, spec=spec)))


def split(of_images, of_filter, groups=1, taps=3, mesh=GRID, **how):
    types = struct(8, 8, 8, 8, mesh=mesh, spec=of_images), struct(taps, taps, 8 // groups, 8, mesh=mesh, spec=of_filter)
    return Program(lambda x, w: conv(x, w, feature_group_count=groups, **how), types)


def transposed(out, spec, mesh=GRID):
    """A depthwise convolution of channels first."""
    how: Any = dict(dimension_numbers=("NCHW", "OIHW", out), feature_group_count=8)
    types = struct(8, 8, 8, 8, mesh=mesh, spec=spec), struct(8, 1, 3, 3)
    return Program(lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME", **how), types)


def gradients(of_images, of_filter, filter, argnums: Any = (0, 1), **how):
    """The gradients of a loss that is not linear in the convolution."""
    types = struct(8, 8, 8, 8, mesh=GRID, spec=of_images), struct(*filter, mesh=GRID, spec=of_filter)
    return Program(jax.grad(lambda x, w: (conv(x, w, **how) ** 2).sum(), argnums), types)


def pulled_back(of_images, of_filter, spec, filter=(3, 3, 8, 8), **how):
    """Both gradients, without the result."""
    types = struct(8, 8, 8, 8, mesh=GRID, spec=of_images), struct(*filter, mesh=GRID, spec=of_filter)
    ct = jax.eval_shape(lambda x, w: conv(x, w, **how), *types)
    return Program(lambda x, w, ct: jax.vjp(lambda x, w: conv(x, w, **how), x, w)[1](ct), (*types, struct(*ct.shape, mesh=GRID, spec=spec)))


def constrained(program, spec):
    """Its result has another split."""
    return dataclasses.replace(program, function=lambda *xs: lax.with_sharding_constraint(program.function(*xs), NamedSharding(GRID, spec)))


def batch_of_products(spec, of_w=("data", "model")):
    types = struct(8, 8, 8, mesh=GRID, spec=P("data", None, "model")), struct(8, 8, 8, mesh=GRID, spec=P(*of_w))
    return constrained(Program(lambda x, w: x @ w, types), spec)


def padded(*padding, dtype: Any = np.float32, **how):
    return Program(lambda x, w: conv(x, w, padding=padding, **how), (struct(1, 4, 8, 8, dtype=dtype), struct(1, 1, 8, 8, dtype=dtype)))


def grouped(spec, groups, mesh=LINE):
    types = struct(8, 8, 8, 8, mesh=mesh, spec=spec), struct(3, 3, 8 // groups, 8)
    return Program(lambda x, w: conv(x, w, feature_group_count=groups), types)


BY_CHANNEL = P(None, None, None, "model")


HALVES = P(None, "model")


EVERY = ("data", "model")


def pointwise(groups, spec, of_filter=None, **how):
    types = struct(8, 8, 8, 8, mesh=GRID, spec=spec), struct(1, 1, 8 // groups, 8, mesh=of_filter and GRID, spec=of_filter)
    return Program(lambda x, w: conv(x, w, feature_group_count=groups, **how), types)


def of_gpu(dtype, result=None, rank=2, groups=1, platform="cuda", **how):
    types = struct(2, *(8,) * rank, 8, dtype=dtype), struct(*(3,) * rank, 8 // groups, 8, dtype=dtype)
    function = lambda x, w: conv(x, w, feature_group_count=groups, preferred_element_type=result, **how)
    return Program(function, types, how=dict(platform=platform))


def loss(call, *types, **how):
    return Program(lambda *operands: (call(*operands) ** 2).sum(), types, how=dict(platform="cpu") | how)


def ragged(groups):
    return Program(lax.ragged_dot, (struct(256, 32), struct(groups, 32, 32), struct(groups, dtype=np.int32)), how=dict(platform="cpu"))


def halves(*shape):
    return struct(*shape, dtype=jnp.bfloat16)


def gradient_of_scan(filters, x):
    return jax.grad(lambda filters: (lax.scan(lambda x, w: (conv(x, w), None), x, filters)[0] ** 2).sum())(filters)


def repeated(call):
    return lambda x, w: lax.fori_loop(0, 3, lambda _, x: call(x, w), x)


def spread(number, x, rows=64, columns=64):
    """A matrix that is one number everywhere."""
    return jnp.full((rows, columns), number, x.dtype)


def reduced(call, *shape, dtype: Any = np.float32, read: Any = None):
    return Program(call, (struct(*(shape or (64, 64)), dtype=dtype),), how=dict(platform="cpu", gradients=read))


def convolved(taps, columns=64, **how):
    """The sum of a convolution whose filter is one number."""
    rows = columns // how.get("feature_group_count", 1)
    return lambda x: conv(x, jnp.full((taps, taps, rows, columns), 2.0, x.dtype), **how).sum()


def narrow(call, rows=20001, depth=3, dtype: Any = np.float64):
    return Program(call, (struct(rows, depth, dtype=dtype), struct(3, depth, dtype=dtype)), how=dict(platform="cpu", gradients=False))


def squares(x):
    return (x**2).sum()


def norm_of_gradient(labels):
    """Return a function that gives the norm of the gradient of a loss that is linear in the product."""
    return lambda x: squares(jax.grad(lambda w: jnp.einsum(labels, x, w).sum())(jnp.ones_like(x)))


LINEAR = Program(
    jax.grad(lambda w, x: conv(x, w).sum()), (struct(3, 3, 8, 8), struct(8, 8, 8, 8, mesh=GRID, spec=P(None, "data")))
)  # its cotangent is a constant
RAGGED = reduced(lambda x: lax.ragged_dot(x, jnp.full((2, 64, 64), 2.0, x.dtype), jnp.array([30, 34])).sum(), read=False)
HOPPER: Any = dict(arch="sm_90a", how=dict(platform="cuda"))
MAPPED = struct(8, 2, 6, 6, 3, mesh=LINE, spec=P("data")), struct(8, 3, 3, 3, 4, mesh=LINE, spec=P("data"))
MAPPED_POINTWISE = struct(8, 2, 6, 6, 3, mesh=GRID, spec=P("data")), struct(8, 1, 1, 3, 4, mesh=GRID, spec=P("data"))
MAPPED_WHOLE = struct(8, 2, 6, 6, 3), struct(8, 3, 3, 3, 4)
IMAGES, FILTER = struct(4, 32, 32, 16), struct(3, 3, 16, 16)
PER_EXAMPLE = jax.vmap(jax.grad(lambda w, x: (conv(x[None], w) ** 2).sum()), (None, 0))
WIDE = struct(4, 16, 16, 16, dtype=np.float64), struct(3, 3, 16, 16, dtype=np.float64)

# Hazard -> programs that have it, near misses
PAIRS: dict[str, tuple[list[Program], list[Program]]] = {
    "all-reduce over a replicated axis": (
        [
            on(GRID, P("data"), 8), on(GRID, P("model"), 2), on(GRID, P(None, "data"), 8), on(GRID, P(None, "data")), LINEAR,
            on(GRID, P(None, None, "model")), on(GRID, P(None, "data"), taps=1, strides=(2, 2)),
            split(HALVES, P(None, None, None, "data")), split(HALVES, P(None, None, "data")), split(HALVES, BY_CHANNEL),
            split(P(None, None, "model"), P(None, None, None, "data")), split(HALVES, P(None, None, None, "data"), strides=(2, 2)),
            split(HALVES, P(None, None, None, "data"), rhs_dilation=(2, 2)), split(HALVES, P(None, None, None, "data"), groups=8),
            split(P(None, "data"), P(None, None, "model"), taps=9), split(BY_CHANNEL, P("data"), taps=4),
            split(HALVES, P("model"), taps=2, strides=(2, 2)), split(BY_CHANNEL, P(None, None, "data"), batch_group_count=2),
            split(HALVES, P(None, None, ("data",)), groups=2),
        ],
        [
            on(LINE, P("data"), 8), on(GRID, P(("data", "model")), 8), on(GRID, P("data", "model"), 8), on(GRID, P("data")),
            on(GRID, P(), 8), on(LINE, P(None, "data")), on(GRID, P("model", "data")), on(GRID, P(None, None, None, "data")),
            on(GRID, P(None, "data"), taps=1), on(GRID, P(None, "data"), strides=(2, 2), padding="VALID"),
            split(P("data", "model"), P(None, None, None, "data")), split(P(None, "model", None, "data"), P(None, None, None, "data")),
            split(P("data"), BY_CHANNEL), split(HALVES, P()), split(P(None, ("data", "model")), BY_CHANNEL),
            split(P(None, "data"), BY_CHANNEL), split(P(None, "data"), P(None, None, "model")), split(P(None, "data"), BY_CHANNEL, taps=9),
            split(HALVES, P(None, None, None, "data"), taps=1), split(P(None, "data"), P(None, None, None, "data"), mesh=LINE),
            split(HALVES, P(None, None, None, "data"), groups=2), split(HALVES, P(None, None, None, "data"), taps=9),
            split(HALVES, P(None, None, None, "data"), lhs_dilation=(2, 2), taps=4, padding=[(2, 2)] * 2),
            split(BY_CHANNEL, P("data", None, "model"), taps=4), split(HALVES, P(None, None, None, "data"), padding=[(2, 2)] * 2),
            pulled_back(HALVES, P(None, None, "data"), P()), pulled_back(HALVES, P(None, None, None, "data"), P()),
            pulled_back(BY_CHANNEL, P(None, None, "data"), P(), batch_group_count=8),
            gradients(P(None, "data", None, "model"), P(None, None, None, "data"), (3, 3, 1, 16), 1, feature_group_count=8),
            gradients(P(None, "model", None, "data"), P(None, None, None, "model"), (3, 3, 1, 8), feature_group_count=8),
        ],
    ),
    "groups on all devices, transposed": (
        [
            transposed("NHWC", P(None, EVERY)), transposed("NHWC", P(None, "data"), LINE),
            gradients(P(EVERY), P(), (3, 3, 8, 8), 1, batch_group_count=8),
        ],
        [transposed("NHWC", P(None, "data")), transposed("NCHW", P(None, EVERY)), transposed("CNHW", P(None, EVERY))],
    ),
    "pointwise groups split over devices": (
        [
            pointwise(2, BY_CHANNEL), pointwise(2, P(), BY_CHANNEL), Program(jax.vmap(conv), MAPPED_POINTWISE),
            constrained(pointwise(2, P()), BY_CHANNEL),
            gradients(P("model", None, None, "data"), P(None, None, EVERY), (1, 1, 8, 8), 0, batch_group_count=2),
        ],
        [
            pointwise(2, P("data")), pointwise(2, P(None, "data")), pointwise(1, BY_CHANNEL), grouped(BY_CHANNEL, 2, GRID),
            pointwise(2, BY_CHANNEL, strides=(2, 2)), pointwise(2, BY_CHANNEL, padding=[(1, 1), (0, 0)]),
        ],
    ),
    "pointwise depthwise convolution with split channels": (
        [pointwise(8, BY_CHANNEL)],
        [pointwise(8, P("data", None, None, "model")), pointwise(8, P("data")), grouped(BY_CHANNEL, 8, GRID)],
    ),
    "batch groups split over devices": (
        [
            split(P(), P(None, None, None, "data"), batch_group_count=2), split(P("data"), P(), taps=1, batch_group_count=2),
            constrained(split(P(), P(), batch_group_count=2), P("data")),
        ],
        [
            split(P(), BY_CHANNEL, batch_group_count=2), split(P("data"), P(), batch_group_count=2),
            split(P("model"), P(None, None, None, "data"), batch_group_count=2),
            constrained(split(P(), P(), batch_group_count=2), BY_CHANNEL),
            constrained(
                split(P("model", None, None, "data"), P(None, None, "model", "data"), batch_group_count=2), P(None, "model", None, "data")
            ),
        ],
    ),
    "batch of matmuls split otherwise": (
        [batch_of_products(P("model", "data")), batch_of_products(P("model", None, "data"))],
        [batch_of_products(P("model")), batch_of_products(P("data", "model")), batch_of_products(P("model", "data"), of_w=())],
    ),
    "cropped and padded": (
        [padded((0, 0), (-5, 1))],
        [
            padded((0, 0), (1, -5)), padded((0, 0), (-5, 0)), padded((0, 0), (5, 1)), padded((0, 0), (-5, 1), dtype=np.float64),
            padded((0, 0), (-5, 1), rhs_dilation=(2, 2)),
        ],
    ),
    "crop that leaves nothing": (
        [
            padded((0, 0), (-9, 3)),
            Program(
                lambda x, w: conv(x, w, padding=[(1, -1), (1, -2)], strides=(5, 3), feature_group_count=17),
                (struct(1, 1, 2, 136), struct(1, 1, 8, 272)),
            ),
        ],
        [padded((0, 0), (-7, 3), rhs_dilation=(2, 2)), padded((0, 0), (-9, 1)), padded((0, 0), (9, -3))],
    ),
    "matmul with one number, reduced": (
        [
            reduced(lambda x: (x @ spread(2, x)).sum()),
            reduced(lambda x: squares(x @ spread(2, x))),
            reduced(lambda x: (x @ spread(x[0, 0] + 3, x)).max(1)),
            reduced(lambda x: jax.jit(lambda x: x @ spread(2, x))(x).sum(), read=False),
            reduced(lambda x: lax.map(lambda x: (x @ spread(2, x)).sum(), x), 2, 64, 64),
            reduced(lambda x: (x @ spread(2, x, 2, 64)).sum(), 64, 2),
            reduced(lambda x: jax.nn.relu(x @ spread(2, x)).sum()),
            reduced(lambda x: (x @ np.full((64, 64), 2, x.dtype)).sum()),
            reduced(norm_of_gradient("kn,km->nm")),
            reduced(lambda x: (lambda y: (y * jnp.abs(y)).sum())(x @ spread(2, x))),
            reduced(lambda x: (lambda y: jnp.abs(y - y.max(1, keepdims=True)))(x * (x @ spread(2, x)))),
            reduced(lambda x: (spread(2, x) @ x.T).T.sum()),
            reduced(lambda x: (x @ spread(2, x)).swapaxes(0, 1).sum(), 2, 64, 64),
            reduced(lambda x: (x.swapaxes(1, 2) @ spread(2, x)).sum(), 2, 64, 64),
            reduced(lambda x: lax.reduce_window(x @ spread(2, x), -jnp.inf, lax.max, (2, 2), (2, 2), "VALID")),
            RAGGED,
            reduced(convolved(1), 2, 8, 8, 64),
            reduced(convolved(3), 2, 8, 8, 64),
        ],
        [
            reduced(convolved(3, feature_group_count=2), 2, 8, 8, 64),
            reduced(convolved(3, lhs_dilation=(2, 2), padding=[(1, 1)] * 2), 2, 8, 8, 64),
            reduced(convolved(3, columns=8), 2, 32, 32, 8),
            reduced(lambda x: (lambda y: (y.sum(), (y * y).sum()))(x @ spread(2, x))),
            reduced(lambda x: (x.swapaxes(1, 2) @ jnp.full((2, 64, 64), 2.0, x.dtype)).sum(), 2, 64, 64),
            reduced(lambda x: (spread(2, x) @ x).sum()),
            reduced(lambda x: (x.T @ spread(2, x)).sum()),
            reduced(lambda x: jax.jit(lambda x: x @ spread(2, x))(x.T).sum()),
            reduced(lambda x: (x @ spread(2, x)).T.sum()),
            reduced(lambda x: (lambda y: (y, y.sum()))(x @ spread(2, x))),
            reduced(lambda x: jnp.clip(x @ spread(2, x), -9, 9).sum()),
            reduced(lambda x: lax.reduce_precision(x @ spread(2, x), 8, 23).sum()),
            reduced(lambda x: (2 * x.sum(-1, keepdims=True) + spread(0, x)).sum()),
            reduced(lambda x: (x @ jnp.broadcast_to(x[:1], (64, 64))).sum()),
            reduced(lambda x: (x @ jnp.eye(64, dtype=x.dtype)).sum()),
            reduced(lambda x: (x @ spread(2, x)).sum(), 63, 64),
            reduced(lambda x: (x @ spread(2, x, 1, 64)).sum(), 64, 1),
            reduced(lambda x: (x @ spread(2, x, 64, 1)).sum(), 4096, 64),
            reduced(lambda x: (x @ spread(2, x)).sum(), dtype=np.int32),
            reduced(norm_of_gradient("nk,km->nm")),
            reduced(norm_of_gradient("nk,mk->nm")),
        ],
    ),
    "narrow matmul, reduced": (
        [
            narrow(lambda x, w: jax.vmap(lambda row: squares(w @ row))(x)),
            narrow(lambda x, w: jax.vmap(lambda row: (lambda y: (y * jnp.abs(y)).sum())(w @ row))(x)),
            narrow(lambda x, w: (x @ w.T).T.max(0)),
            narrow(lambda x, w: jax.jit(lambda x, w: w @ x.T)(x, w).sum()),
            narrow(lambda x, w: jax.vmap(lambda row: squares(w @ row))(x), rows=33000, dtype=np.float32),
        ],
        [
            narrow(lambda x, w: jax.vmap(lambda row: squares(row @ w))(x)),
            narrow(lambda x, w: squares(x @ w.T)),
            narrow(lambda x, w: jax.vmap(lambda row: squares(w @ row))(x), dtype=np.float32),
            narrow(lambda x, w: jax.vmap(lambda row: squares(w @ row))(x), rows=45000),
            narrow(lambda x, w: jax.vmap(lambda row: squares(w @ row))(x), depth=4),
            narrow(lambda x, w: (lambda y: (y, squares(y)))(w @ x.T)),
        ],
    ),
    "integer convolution on a GPU": (
        [of_gpu(np.int32), of_gpu(np.int8, np.int32), of_gpu(np.uint8, platform="rocm")],
        [of_gpu(np.int32, platform="cpu"), of_gpu(np.float32), of_gpu(np.int8)],
    ),
    "int8 convolution that saturates": (
        [of_gpu(np.int8), of_gpu(np.int8, groups=2)],
        [of_gpu(np.int8, np.int32), of_gpu(np.int8, platform="cpu"), of_gpu(jnp.bfloat16)],
    ),
    "bfloat16 conv1d with stride and dilation": (
        [of_gpu(jnp.bfloat16, rank=1, strides=(2,), rhs_dilation=(2,))],
        [
            of_gpu(jnp.bfloat16, rank=1, strides=(2,)),
            of_gpu(np.float16, rank=1, strides=(2,), rhs_dilation=(2,)),
            of_gpu(jnp.bfloat16, strides=(2, 2), rhs_dilation=(2, 2)),
            of_gpu(jnp.bfloat16, rank=1, strides=(2,), rhs_dilation=(2,), platform="cpu"),
        ],
    ),
    "batch of grouped convolutions": (
        [grouped(P("data"), 2), grouped(P(None, "data"), 2)],
        [grouped(P("data"), 8), grouped(P("data"), 1), grouped(P(), 2)],
    ),
    "groups split over devices": (
        [Program(jax.vmap(conv), MAPPED), grouped(P(None, None, None, "data"), 2)],
        [Program(jax.vmap(conv), MAPPED_WHOLE), grouped(P(None, None, None, "data"), 8)],
    ),
    "float32 multiplied as TF32": (
        [
            of_gpu(np.float32),
            of_gpu(np.float32, precision="high"),
            of_gpu(np.complex64),
            Program(jnp.matmul, (struct(8, 8), struct(8, 8)), how=dict(platform="cuda")),
        ],
        [
            of_gpu(np.float32, precision="highest"),
            of_gpu(np.float32, precision=("default", "highest")),
            of_gpu(np.float16),
            of_gpu(np.float32, platform="cpu"),
        ],
    ),
    "float32 multiplied as bfloat16": (
        [of_gpu(np.float32, platform="tpu")],
        [of_gpu(np.float32, precision="high", platform="tpu"), of_gpu(np.float32)],
    ),
    "convolution in a loop": (
        [
            Program(gradient_of_scan, (struct(3, 3, 3, 16, 16), IMAGES)),
            Program(repeated(lambda x, w: lax.conv(x, w, (1, 1), "SAME")), (struct(2, 8, 9, 9), struct(8, 8, 3, 3))),
        ],
        [
            Program(repeated(conv), (IMAGES, FILTER)),
            Program(gradient_of_scan, (struct(3, 3, 3, 16, 16), IMAGES), how=dict(platform="cuda")),
            Program(gradient(), (FILTER, IMAGES)),
        ],
    ),
    "dilated input": (
        [
            Program(lambda x, w: conv(x, w, lhs_dilation=(2, 2), padding=[(1, 1)] * 2), WIDE),
            Program(lambda x, w: lax.conv_transpose(x, w, (2, 2), "SAME"), (IMAGES, FILTER), **HOPPER),
        ],
        [Program(conv, WIDE), loss(lambda x, w: conv(x, w, strides=(2, 2)), IMAGES, FILTER)],
    ),
    "depthwise convolution": (
        [loss(lambda x, w: conv(x, w, feature_group_count=16), IMAGES, struct(3, 3, 1, 16))],
        [loss(conv, IMAGES, FILTER), loss(lambda x, w: conv(x, w, feature_group_count=1), struct(4, 32, 32, 1), struct(3, 3, 1, 16))],
    ),
    "per-example gradients": ([Program(PER_EXAMPLE, (struct(3, 3, 16, 16), IMAGES))], [Program(gradient(), (FILTER, IMAGES))]),
    "batched filters": (
        [Program(jax.vmap(conv), (struct(4, 2, 16, 16, 16), struct(4, 3, 3, 16, 16)))],
        [Program(jax.vmap(conv, (0, None)), (struct(4, 2, 16, 16, 16), FILTER))],
    ),
    "grouped convolution": (
        [loss(lambda x, w: conv(x, w, feature_group_count=2), IMAGES, struct(3, 3, 8, 16))],
        [loss(conv, IMAGES, FILTER)],
    ),
    "ragged matmul": ([ragged(8)], [ragged(1)]),
    "another implementation is faster": (
        [Program(lambda x, w: lax.conv(x, w, (1, 1, 1), "SAME"), (halves(2, 64, 8, 8, 8), halves(64, 64, 3, 3, 3)), **HOPPER)],
        [Program(lambda x, w: lax.conv(x, w, (1, 1), "SAME"), (halves(2, 64, 8, 8), halves(64, 64, 3, 3)), **HOPPER)],
    ),
}  # fmt: skip


# jaxext's own products: those that have the hazard "matmul with one number, reduced", near misses.
OWN = (
    [
        reduced(lambda x: jaxext.matmul(x, spread(2, x)).sum()),
        reduced(lambda x: jaxext.matmul(x, spread(2, x), implementation="xla").max(1)),
        reduced(lambda x: jaxext.linear(x, spread(2, x), x[0], activation="relu").sum()),
        reduced(lambda x: jaxext.linear(x, spread(2, x), activation="silu").sum()),
        reduced(lambda x: jaxext.conv(x, jnp.full((64, 64, 1, 1), 2.0, x.dtype), (1, 1), "VALID").sum(), 2, 64, 8, 8),
        reduced(lambda x: jax.vmap(lambda x: jaxext.matmul(x, spread(2, x)).sum())(x), 2, 64, 64),
        reduced(lambda x: lax.map(lambda x: jaxext.matmul(x, spread(2, x)).sum(), x), 2, 64, 64),
        reduced(lambda x: squares(jax.grad(lambda w: jaxext.dot_general(x, w, (((0,), (0,)), ((), ()))).sum())(jnp.ones_like(x)))),
    ],
    [
        reduced(lambda x: jaxext.matmul(spread(2, x), x).sum()),
        reduced(lambda x: jaxext.matmul(x.T, spread(2, x)).sum()),
        reduced(lambda x: jaxext.matmul(x, x).sum()),
        reduced(lambda x: (lambda y: (y, y.sum()))(jaxext.matmul(x, spread(2, x)))),
        reduced(lambda x: jnp.clip(jaxext.matmul(x, spread(2, x)), -9, 9).sum()),
        *(reduced(lambda x, f=f: f(spread(2, x)).sum()) for f in OF_ONE_MATRIX.values()),
        reduced(lambda x: jaxext.matmul(x, spread(2, x)).sum(), 63, 64),
        reduced(jaxext.use_invariant()(lambda x: jaxext.matmul(x, spread(2, x)).sum())),
    ],
)


def test_every_hazard_has_a_pair():
    assert PAIRS.keys() == BY_NAME.keys() and len(BY_NAME) == len(HAZARDS)


@pytest.mark.usefixtures("verified")
@pytest.mark.parametrize("name", PAIRS)
def test_it_is_found_and_a_near_miss_is_not(name):
    having, near = PAIRS[name]
    shows = BY_NAME[name].shows_on(jax.__version_info__)
    for program in having:
        assert (name in program.hazards()) == shows
    for program in near:
        assert name not in program.hazards()


@pytest.mark.parametrize("in_place", [False, True], ids=["own", "in place of lax"])
def test_it_is_found_in_products_of_jaxext(in_place):
    """XLA's compiler gets them wrong as it does lax's, and the doctor names the line and the product."""
    name = "matmul with one number, reduced"
    having, near = PAIRS[name] if in_place else OWN
    if in_place:
        having, near = (
            [dataclasses.replace(each, function=jaxext.in_place_of_lax()(each.function)) for each in of if each is not RAGGED]
            for of in (having, near)
        )
    for program in having:
        assert name in program.hazards()
    for program in near:
        assert name not in program.hazards()
    some = slice(0, None, 4 if in_place else 1)
    assert all(program.is_wrong() for program in having[some]) and not any(program.is_wrong() for program in near[some])
    (finding,) = jaxext.doctor(having[0].function, platform="cpu")(*having[0].types).findings
    assert finding.operation == "matmul_nn f32[64,64] f32[64,64] -> f32[64,64]" and "test_known_hazards.py" in finding.source
    assert not jaxext.doctor(having[0].function, platform="cuda")(*having[0].types).findings or in_place


def test_narrow_products_of_jaxext_are_kept_apart_from_the_reduction():
    for program in (
        narrow(lambda x, w: squares_of_columns(jaxext.matmul(w, x.T))),
        narrow(lambda x, w: squares_of_columns(jaxext.linear(x, w.T).T), rows=33000, dtype=np.float32),
        narrow(jaxext.in_place_of_lax()(lambda x, w: jax.vmap(lambda row: squares(w @ row))(x))),
    ):
        assert not program.is_wrong() and not program.hazards()
    program = narrow(lambda x, w: jaxext.matmul(w, x.T))
    assert ("reduce_precision" in jax.jit(program.function).lower(*program.types).as_text()) == (jax.__version_info__ < (0, 11))
    assert "reduce_precision" not in jax.jit(program.function).lower(struct(64, 64), struct(64, 64)).as_text()


def test_narrow_products_into_numbers_of_8_bits():
    """float8_e4m3fn has no infinity, so its largest numbers are no such to `lax.reduce_precision`."""
    x, w = np.full((40000, 3), 8, np.float32), np.full((3, 2), 16, np.float32)
    y = jax.jit(lambda x, w: jaxext.matmul(x, w, preferred_element_type=jnp.float8_e4m3fn))(x, w)
    np.testing.assert_array_equal(y.astype(np.float32), 384)


def squares_of_columns(y):
    return (y**2).sum(0)


SEEN_WRONG = (*(hazard.name for hazard in HAZARDS if hazard.what == "wrong" and hazard.seen),)


@pytest.mark.parametrize("name", SEEN_WRONG)
def test_lax_is_wrong_where_the_doctor_says_so(name):
    having, near = (of if len(of) <= 6 else of[::4] for of in PAIRS[name])  # of a long list a sample
    shows = BY_NAME[name].shows_on(jax.__version_info__)
    assert [program.is_wrong() for program in having] == [shows] * len(having)
    assert not any(program.is_wrong() for program in near)


@pytest.mark.parametrize("name", ["batch of grouped convolutions", "groups split over devices"])
def test_lax_gathers_where_the_doctor_says_so(name):
    having, near = PAIRS[name]
    assert all(program.gathers() for program in having) and not any(program.gathers() for program in near)


def test_lax_multiplies_every_row_by_every_filter():
    ((program,), _), groups = PAIRS["ragged matmul"], 8
    rows, depth, columns = 256, 32, 32
    counted = jax.jit(program.function).lower(*program.types).compile().cost_analysis()
    assert counted is not None and counted["flops"] > 0.9 * groups * 2 * rows * depth * columns


@pytest.mark.parametrize("name", BY_NAME)
def test_its_section_exists_and_says_the_same(name):
    hazard = BY_NAME[name]
    page, _, anchor = hazard.page.partition("#")
    text = (DOCS / page).read_text()
    sections = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-"): body for title, body in SECTION.findall(text)}
    assert not anchor or anchor in sections
    assert name in (DOCS / "doctor.md").read_text()
    if page == "lax-hazards.md":  # its reproduction runs in tests/project/test_docs.py
        shows = re.search(r"^Shows on jax ([\d., and]+)\.$", sections[anchor], re.MULTILINE)
        assert shows is not None
        for version in ("0.10.2", "0.11.2", "0.12.0.1"):
            assert (version in shows[1]) == hazard.shows_on(tuple(map(int, version.split("."))))
    else:
        assert not hazard.seen or hazard in PLANNED_HAZARDS


SECTION = re.compile(r"^#{2,3} (.*?)\n(.*?)(?=^##|\Z)", re.MULTILINE | re.DOTALL)
