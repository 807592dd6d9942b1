"""The operations whose splits over devices `python -m jaxext.testing.shardings` verifies: jaxext's, and lax's namesakes beside them.

Sizes that 8 divides can be split by any mesh axes, so most axes have one.
"""

from typing import Any

import numpy as np

from jaxext.testing.sharding_worker import AUTOMATIC, EXPORTED, Function, drawn


def subject(name, source, *shapes, parameters="x, w", **more):
    """A function of operands with these shapes, of float32 if they have no dtype; an array is an operand itself."""
    given = [one if isinstance(one, np.ndarray) else one if isinstance(one[-1], str) else (*one, "float32") for one in shapes]
    args = [one if isinstance(one, np.ndarray) else drawn(one[:-1], k).astype(one[-1]) for k, one in enumerate(given)]
    out = ", out_sharding=None" if "out_sharding" in source else ""
    return Function(name, f"lambda {parameters}{out}: {source}", tuple(args), **more)


def both(name, source, *shapes, **how):
    """The subject of jaxext, and that of lax, which has no derivatives of scaled_dot."""
    of_lax: dict[str, Any] = how | ({"order": 0} if name == "scaled_dot" else {})
    return [
        *ours(name, source.replace("OPS.", ""), *shapes, **how),
        subject(f"{name}, lax", source.replace("OPS", "lax"), *shapes, **of_lax),
    ]


def ours(name, source, *shapes, **how):
    return [subject(f"{name}, jaxext", f"jaxext.{source}", *shapes, **how)]


def windows(rank, channels=()):
    """The axes that a convolution gathers: its window's, and some channels."""
    space = range(1, rank + 1)
    return dict(gathered=((*space, *channels), (*range(rank), *channels), (*space, *channels)))


def conv(name, x, w, *, strides=1, padding: object = "SAME", **how):
    axes = "DHW"[5 - len(x) :]
    numbers = (f"N{axes}C", f"{axes}IO", f"N{axes}C")
    more = "".join(f", {key}={value}" for key, value in how.items())
    given = f"x, w, {(strides,) * len(axes)}, {padding!r}, dimension_numbers={numbers}{more}, out_sharding=out_sharding"
    divided = [value for key, value in how.items() if key.endswith("group_count") and value % 8]  # by more devices than there are groups
    return both(name, f"OPS.conv_general_dilated({given})", x, w, **windows(len(axes), [len(x) - 1] if divided else ()))


def dot(name, x, w, numbers):
    return both(name, f"OPS.dot_general(x, w, {numbers}, out_sharding=out_sharding)", x, w)


def parallel(name, source, specs, reference, *shapes):
    """A function inside of a `shard_map` over the mesh axis "a", whose other axis XLA splits."""
    inside = f"jax.shard_map(lambda x, w: jaxext.parallel.{source}, mesh=mesh, in_specs=({specs[0]}, {specs[1]}), out_specs={specs[2]}"
    args = tuple(drawn(shape, k).astype("float32") for k, shape in enumerate(shapes))
    source = f'lambda x, w: {inside}, axis_names={{"a"}})(x, w)'
    every = (0, 1, 2, 3)
    return [
        Function(f"parallel {name}, jaxext", source, args, f"lambda x, w: {reference}", ways=(AUTOMATIC, EXPORTED), gathered=(every,) * 3)
    ]


_PLAIN = '(1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")'
_SIZES = np.array([3, 0, 4, 1], np.int32)

SUBJECTS = [
    *conv("conv along one axis", (8, 8, 8), (3, 8, 8)),
    *conv("dense conv", (8, 8, 8, 8), (3, 3, 8, 8)),
    *conv("conv along three axes", (8, 4, 4, 4, 8), (3, 1, 3, 8, 8)),
    *conv("conv of one tap", (8, 8, 8, 8), (1, 1, 8, 8)),
    *conv("conv with strides", (8, 8, 8, 8), (3, 3, 8, 8), strides=2),
    *conv("conv of patches", (8, 8, 8, 8), (2, 2, 8, 8), strides=2, padding="VALID"),
    *conv("dilated conv", (8, 8, 8, 8), (3, 3, 8, 8), rhs_dilation=(2, 2)),
    *conv("transposed conv", (8, 4, 4, 8), (4, 4, 8, 8), padding=[(2, 2), (2, 2)], lhs_dilation=(2, 2)),
    *conv("conv in groups", (8, 8, 8, 16), (3, 3, 4, 16), feature_group_count=4),
    *conv("conv of one tap in groups", (8, 8, 8, 16), (1, 1, 4, 16), feature_group_count=4),
    *conv("depthwise conv", (8, 8, 8, 8), (3, 3, 1, 8), feature_group_count=8),
    *conv("depthwise conv of one tap", (8, 8, 8, 8), (1, 1, 1, 8), feature_group_count=8),
    *conv("conv in batch groups", (8, 8, 8, 8), (3, 3, 8, 8), batch_group_count=2),
    *dot("matmul", (8, 16), (16, 8), (((1,), (0,)), ((), ()))),
    *dot("matmul of batches", (8, 4, 8), (8, 8, 4), (((2,), (1,)), ((0,), (0,)))),
    *dot("dot of all kinds of axes", (8, 2, 4, 8), (4, 8, 8, 2), (((3, 1), (1, 3)), ((0,), (2,)))),
    *both("ragged_dot", "OPS.ragged_dot(x, w, sizes)", (8, 8), (4, 8, 8), _SIZES, parameters="x, w, sizes"),
    *ours(
        "ragged_linear",
        'ragged_linear(x, w, sizes, bias, activation="silu", out_sharding=out_sharding)',
        *((8, 8), (4, 8, 8), _SIZES, (4, 8)),
        parameters="x, w, sizes, bias",
    ),
    *ours("causal_conv1d", 'causal_conv1d(x, w, bias, activation="silu")', (8, 8, 8), (4, 8), (8,), parameters="x, w, bias"),
    *both(
        "scaled_dot",
        "OPS.scaled_dot(x, w, lhs_scale=s, rhs_scale=t, preferred_element_type=x.dtype)",
        *((8, 8, 16), (8, 16, 8), (8, 8, 2), (8, 2, 8)),
        parameters="x, w, s, t",
        tolerance=0.05,
    ),
    *ours(
        "ragged_scaled_dot",
        "ragged_scaled_dot(x, w, sizes, lhs_scale=s, rhs_scale=t, preferred_element_type=x.dtype, out_sharding=out_sharding)",
        *((8, 16), (4, 16, 8), _SIZES, (8, 8), (4, 4, 8)),
        parameters="x, w, sizes, s, t",
    ),
    *ours(
        "quantized_matmul",
        "quantized_matmul(x, jaxext.quantization.Quantized(q, s), out_sharding=out_sharding)",
        *((8, 16), (16, 8, "int8"), (2, 8)),
        parameters="x, q, s",
    ),
    *ours(
        "fp8_matmul", "fp8_matmul(x, w, x_scale=1.0, w_scale=1.0, gradient_scale=1.0, out_sharding=out_sharding)", (8, 16), (16, 8), order=1
    ),
    *ours("gram", "gram(x, out_sharding=out_sharding)", (8, 8, 16), parameters="x"),
    *ours(
        "linear",
        'linear(x, w, bias, activation="silu", residual=r, out_sharding=out_sharding)',
        *((8, 4, 8), (8, 8), (8,), (8, 4, 8)),
        parameters="x, w, bias, r",
    ),
    *ours("gated_linear_unit", 'gated_linear_unit(x, w, activation="silu", out_sharding=out_sharding)', (8, 4, 8), (8, 2, 8)),
    *ours(
        "conv_bias_act",
        f'conv_bias_act(x, w, {_PLAIN}, bias=bias, activation="silu", out_sharding=out_sharding)',
        *((8, 8, 8, 8), (3, 3, 8, 8), (8,)),
        parameters="x, w, bias",
        gathered=((1, 2), (0, 1), (), (1, 2)),
    ),
    *parallel(
        "conv",
        f'halo_conv(x, w, {_PLAIN}, axis_names=("a", None))',
        ('P(None, "a")', "P()", 'P(None, "a")'),
        f"lax.conv_general_dilated(x, w, {_PLAIN})",
        *((8, 8, 8, 8), (3, 3, 8, 8)),
    ),
    *parallel(
        "all_gather_matmul", 'all_gather_matmul(x, w, axis_name="a")', ('P("a")', 'P(None, "a")', 'P(None, "a")'), "x @ w", (8, 16), (16, 8)
    ),
    *parallel(
        "matmul_reduce_scatter",
        'matmul_reduce_scatter(x, w, axis_name="a")',
        ('P(None, "a")', 'P("a")', 'P("a")'),
        *("x @ w", (8, 16), (16, 8)),
    ),
    *parallel(
        "causal_conv1d",
        'halo_causal_conv1d(x, w, axis_name="a")',
        ('P(None, "a")', "P()", 'P(None, "a")'),
        "jaxext.causal_conv1d(x, w)",
        *((8, 16, 8), (4, 8)),
    ),
]
