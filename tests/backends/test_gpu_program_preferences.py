"""Convolutions as XLA's GPU compiler makes them, read without a GPU: why a kernel is preferred, or is not, and that integers compile.

`make gpu-programs` runs it, like test_gpu_program.py.
"""

# ruff: noqa: F401, F811 - two fixtures are imported
import functools

import jax
import jax.numpy as jnp
import pytest
from jax import export, lax
from lowered import struct
from test_gpu_preference import CASES, layer
from test_gpu_program import compiled, devices, gradients, work

import jaxext

FORWARD, INPUT, FILTER = "__cudnn$convForward", "__cudnn$convBackwardInput", "__cudnn$convBackwardFilter"
# The cuDNN call that lax's becomes, and the passes beside it: the filter's transposition is one.  Then what shows in the call: an input
# that was padded (with zeros in between), a filter of an image's size, channels first.
PROGRAMS = {
    "3x3": (FORWARD, 1, ""),
    "3x3 dgrad": (INPUT, 1, ""),
    "3x3 wgrad": (FILTER, 1, ""),
    "strided dgrad, cuDNN's own": (INPUT, 2, ""),
    "groups of 4, dgrad by 2": (FORWARD, 2, "pad_fusion"),
    "strided and dilated dgrad": (FORWARD, 2, "pad_fusion"),
    "transposed": (FORWARD, 2, "pad_fusion"),
    "transposed dgrad, a plain strided convolution": (FORWARD, 1, "stride=2x2"),
    "transposed wgrad": (FORWARD, 3, "size=28x28"),
    "dilated wgrad": (FORWARD, 3, "size=28x28"),
    "per-example gradients": (FORWARD, 3, "size=28x28"),
    "batched filters": (FORWARD, 3, "feature_group_count=8"),  # images are moved beside the channels
    "small groups": (FORWARD, 1, "feature_group_count=16"),
    "small groups, dgrad": (FORWARD, 1, "feature_group_count=16"),
    "groups of 4, wgrad": (FILTER, 1, "feature_group_count=16"),
    "1-D": (FORWARD, 1, ""),
    "1-D wgrad": (FILTER, 1, ""),
    "3-D": (FORWARD, 3, "bf012"),  # transposed before and after
    "3-D dgrad": (INPUT, 3, "bf012"),
    "3-D wgrad": (FILTER, 3, ""),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_laxs_convolution_becomes(name, compiled):
    ((function, args, *_), *_), (call, passes, shows) = CASES[name], PROGRAMS[name]
    text = compiled(function(lax.conv_general_dilated), *args)
    assert work(text) == {call: 1, "fusion": passes}
    (line,) = (line for line in text.splitlines() if f'custom_call_target="{call}"' in line)
    assert shows in line


def of_xla(rank, **given):
    return layer(jaxext.conv_general_dilated, rank, implementation="xla", **given)


@pytest.mark.parametrize("dtype, stride", [("bfloat16", 1), ("bfloat16", 2), ("float32", 1)])
@pytest.mark.parametrize("x, w", [((4, 256, 64), (4, 1, 64)), ((4, 28, 28, 64), (3, 3, 1, 64))], ids=["causal", "3x3"])
def test_few_taps_are_one_pass_with_bias_and_activation(x, w, dtype, stride, compiled):
    """The exceptions are square filters that cuDNN has a kernel for: that call, a pass over its filter, and one that adds the bias."""
    padding = [(3, 0)] if len(x) == 3 else "SAME"
    op = of_xla(len(x) - 2, stride=stride, padding=padding, groups=64)
    args = (struct(*shape, dtype=dtype) for shape in (x, w, (*(1,) * (len(x) - 1), 64)))
    cudnn = len(x) == 4 and (dtype, stride) == ("bfloat16", 1)
    expected = {FORWARD: 1, "fusion": 2} if cudnn else {"fusion": 1}
    assert work(compiled(lambda x, w, b: jax.nn.silu(op(x, w) + b), *args)) == expected


def test_an_exported_convolution_and_its_gradients_are_cudnns(compiled):
    """XLA's partitioner splits the convolution rightly if it is called in a program of several devices, since the window is preserved."""
    op, image, filters = of_xla(2), struct(4, 28, 28, 64), struct(3, 3, 64, 64)
    exported = export.export(jax.jit(lambda x, w, y: (op(x, w), *gradients(op)(x, w, y))), platforms=["cuda"])(image, filters, image)
    assert work(compiled(exported.call, image, filters, image)) == {FORWARD: 1, INPUT: 1, FILTER: 1, "fusion": 2}


WIDE = [(d, d) for d in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "bool")] + [("int8", "int32")]


@pytest.mark.parametrize("dtype, result", WIDE)
@pytest.mark.parametrize("groups", [1, 4, 64])
def test_integers_compile(dtype, result, groups, compiled):
    """They compile as dots, which become loops or Triton's products, and never cuDNN's convolution."""
    x, w = struct(2, 9, 8, 64, dtype=dtype), struct(3, 3, 64 // groups, 64, dtype=dtype)
    op = of_xla(2, stride=2, groups=groups, preferred_element_type=result)
    assert set(work(compiled(op, x, w))) <= {"fusion", "copy"}


@pytest.mark.parametrize("groups", [1, 64])
def test_laxs_convolutions_of_integers(groups, compiled):
    """Kernels and dots are taken because XLA supports int8 into int8 alone, by cuDNN, which saturates where XLA's CPUs wrap."""
    op = layer(lax.conv_general_dilated, 2, groups=groups)
    shapes = (2, 8, 8, 64), (3, 3, 64 // groups, 64)
    for dtype, result in (("int16", "int16"), ("int8", "int32")):
        with pytest.raises(jax.errors.JaxRuntimeError, match="integer convolutions"):
            compiled(functools.partial(op, preferred_element_type=result), *(struct(*shape, dtype=dtype) for shape in shapes))
    assert work(compiled(op, *(struct(*shape, dtype=jnp.int8) for shape in shapes)))[FORWARD] == 1
