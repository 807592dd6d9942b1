"""Programs that are lowered for a GPU without one, and what can be read from them: for the tests of the implementations made of kernels."""

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

import jaxext

NHWC = ("NHWC", "HWIO", "NHWC")
MOVES = ("transpose", "pad", "gather", "concatenate", "reverse", "slice", "dynamic_slice")
MESH = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


def struct(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def operations(lowered):
    """Every operation of a program, those in regions and other functions included."""

    def visit(op):
        yield op
        for region in op.regions:
            for block in region:
                for inner in block:
                    yield from visit(inner.operation)

    yield from visit(lowered.compiler_ir("stablehlo").operation)


def channels_last(rank: int) -> tuple[str, str, str]:
    axes = "DHW"[3 - rank :]
    return f"N{axes}C", f"{axes}IO", f"N{axes}C"


def squares(fun):
    """A loss, so that gradients of `fun` can be taken."""
    return lambda *args: jnp.sum(fun(*args).astype(jnp.float32) ** 2)


def custom_calls(lowered) -> collections.Counter:
    """Count the calls of each target."""
    calls = [op for op in operations(lowered) if op.name == "stablehlo.custom_call"]
    return collections.Counter(str(op.attributes["call_target_name"]).strip('"') for op in calls)


def moved(lowered, elements: int) -> list[str]:
    """Operations that write a changed copy of an array of at least this many elements."""
    found = []
    for op in operations(lowered):
        if op.name.removeprefix("stablehlo.") in MOVES:
            if max(int(np.prod(value.type.shape)) for value in op.operands) >= elements:
                found.append(str(op)[:200])
    return found


def conv(x, w, strides=(1, 1), padding: Any = "SAME", **kwargs):
    return jaxext.conv_general_dilated(x, w, strides, padding, dimension_numbers=NHWC, **kwargs)


def resnet_block(params, x):
    """A block that halves the resolution, with a projection beside it."""
    first, second, projection = params
    y = conv(jax.nn.relu(conv(x, first, (2, 2))), second)
    return jax.nn.relu(y + conv(x, projection, (2, 2)))


BLOCK = (struct(3, 3, 16, 32), struct(3, 3, 32, 32), struct(1, 1, 16, 32))
IMAGES = struct(8, 16, 16, 16)


def loss(params, x):
    return jnp.sum(resnet_block(params, x).astype(jnp.float32) ** 2)
