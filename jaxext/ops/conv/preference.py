"""The heuristic that prefers kernels for some convolutions on GPUs, for calls without a name and without measurements.

A kernel is preferred where the structure of XLA's program wastes work: it multiplies the zeros of a dilated input, convolves with filters
as large as the image, or copies every activation.  XLA's program can be read without a GPU
(tests/backends/test_gpu_program_preferences.py).  What was measured on an H100 corrects these expectations (docs/benchmarks.md).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable

import jax.numpy as jnp

from jaxext.core.call import Call
from jaxext.core.window import Window
from jaxext.ops.conv.xla_elementwise import FEW_ON_GPU as FUSED_OUTPUTS  # most outputs of a group in one XLA fusion
from jaxext.ops.conv.xla_elementwise import FOLDED_ON_GPU as FUSED_TAPS  # most taps of a depthwise convolution in one XLA fusion

SMALL_GROUP = 32  # groups of at most this many channels leave most of a tensor core's tile empty
TILE = 64  # channels that fill a tile
FAST = (90,)  # compute capabilities, times 10, whose tensor core instructions the kernels of dense convolutions use to the full


@dataclasses.dataclass(frozen=True)
class Preference:
    """A row of the table."""

    kernel: bool  # whether a kernel is preferred
    name: str
    holds: Callable[[Call], bool]
    reason: str


def convolution(call: Call) -> Preference:
    """The first row of `CONVOLUTIONS` that holds for a call of a convolution's form."""
    return next(row for row in CONVOLUTIONS if row.holds(call))


def prefers_cuda(row: Preference, call: Call) -> bool:
    """Return whether CUDA's kernel of a convolution in this row is expected to be faster than Triton's."""
    sizes = call.sizes
    if row.name == "depthwise":
        few = math.prod(_window(call).filter) <= FUSED_TAPS
        return sizes["K"] == 1 and (call.open == "w") == few
    if row.name in ("batched filters", "images as filters"):
        return sizes["B"] > 1 and sizes["C"] % (2 * TILE) == sizes["K"] % (2 * TILE) == 0
    return row.name == "three axes"


def _integers(call: Call) -> bool:
    return not any(jnp.issubdtype(dtype, jnp.inexact) for dtype in call.dtypes.values())


def _depthwise(call: Call) -> bool:
    return call.sizes["G"] > 1 and call.sizes["C"] == 1


def _depthwise_of_cudnn(call: Call) -> bool:
    """Return whether cuDNN has kernels for a depthwise convolution: square without strides, in 16 bits, one output for each input."""
    halves = all(call.dtypes[slot].itemsize == 2 for slot in call.factors)  # a bias may be wider
    return _depthwise(call) and call.sizes["B"] == call.sizes["K"] == 1 and _window(call).plain_square and halves


def _fused(call: Call) -> bool:
    """Return whether XLA computes the sum of shifted inputs in one fusion."""
    window = _window(call)
    few = math.prod(window.filter) <= FUSED_TAPS and call.sizes["K"] <= FUSED_OUTPUTS
    fits = few and not _holes(window.input_dilation, window.input) and not _depthwise_of_cudnn(call)
    return call.open == "y" and _depthwise(call) and fits


def _zeros(call: Call) -> bool:
    """Return whether XLA's input is mostly zeros: it is dilated, or the dgrad of a strided convolution that is not a single cuDNN call."""
    window = _window(call)
    dilated, filter_dilated = _holes(window.input_dilation, window.input), _holes(window.filter_dilation, window.filter)
    if call.open != "x":
        return dilated and call.open == "y"
    of_cudnn = call.sizes["B"] * call.sizes["G"] == 1 and not dilated and not filter_dilated
    return _holes(window.stride, window.output) and not of_cudnn


def _images_as_filters(call: Call) -> bool:
    """Return whether a filter's gradient is not a single cuDNN call, which supports neither dilations nor one filter per example."""
    window = _window(call)
    dilated = _holes(window.input_dilation, window.input) or _holes(window.filter_dilation, window.filter)
    return call.open == "w" and (dilated or call.sizes["B"] > 1 and call.sizes["G"] == 1)


def _window(call: Call) -> Window:
    assert call.window is not None
    return call.window


def _holes(steps: Iterable[int], sizes: Iterable[int]) -> bool:
    """Return whether there are zeros between neighbours along an axis."""
    return any(step > 1 and size > 1 for step, size in zip(steps, sizes, strict=True))


_kernel, _xla = (functools.partial(Preference, kernel) for kernel in (True, False))

# The first row that holds decides.
CONVOLUTIONS = (
    _kernel("integers", _integers, "XLA refuses convolutions of integers on GPUs, saturates them, or multiplies them without tensor cores"),
    _xla(
        "depthwise, the filter's gradient",
        lambda call: call.open == "w" and _depthwise_of_cudnn(call),
        "cuDNN's kernel for gradients of square depthwise filters in 16 bits without strides was faster on an H100",
    ),
    _xla(
        "depthwise, one fusion",
        _fused,
        f"XLA fuses a depthwise convolution of at most {FUSED_TAPS} taps with the bias and the activation around it",
    ),
    _kernel("depthwise", _depthwise, "cuDNN's tiles have one channel of a group to fill"),
    _kernel("zeros", _zeros, "XLA multiplies the zeros of a dilated input, or interleaves what it computes for each phase"),
    _kernel(
        "images as filters",
        _images_as_filters,
        "XLA computes such a filter's gradient as a convolution whose filters are as large as the image",
    ),
    _kernel("batched filters", lambda call: call.sizes["B"] > 1, "XLA moves the images beside the channels, and makes groups of them"),
    _kernel(
        "gradients of small groups",
        lambda call: call.sizes["G"] > 1 and call.sizes["C"] <= SMALL_GROUP and call.open != "y",
        f"groups of at most {SMALL_GROUP} channels leave most of cuDNN's tiles empty",
    ),
    _xla("groups", lambda call: call.sizes["G"] > 1, "cuDNN computes groups without a copy, and is expected to be as fast"),
    _xla("no three axes", lambda call: _window(call).rank != 3, "XLA's dense convolutions (cuDNN) are expected to be as fast"),
    _xla(
        "three axes, one tap",
        lambda call: math.prod(_window(call).filter) == 1,
        "with a filter of one tap, a matrix product, cuDNN is expected to be as fast",
    ),
    _xla(
        "three axes, not 16 bits",
        lambda call: any(dtype not in (jnp.bfloat16, jnp.float16) for dtype in call.dtypes.values()),
        "products of operands that are not of 16 bits (TF32, or one by one) are expected to be slower than cuDNN's",
    ),
    _xla(
        "three axes, odd channels",
        lambda call: call.sizes["C"] % TILE != 0 or call.sizes["K"] % TILE != 0,
        f"channels that are no multiple of {TILE} leave tiles partly empty: cuDNN is expected to be as fast",
    ),
    _xla(
        "three axes, another GPU",
        lambda call: call.arch not in FAST,
        f"without the tensor core instructions of {', '.join(str(arch / 10) for arch in FAST)} cuDNN is expected to be as fast",
    ),
    _kernel("three axes", lambda call: True, "XLA puts channels first for cuDNN, and so transposes all operands and the result"),
)
