"""Causal convolutions block of frames after block, in a loop, so that the bits of a frame do not depend on how many frames there are.

The body of the loop is the same program in each call.  It convolves the steps that a few frames read, with the taps of time as channels:
of video a convolution along two axes, of audio a matrix product.  XLA's CPU backend has fast code for these, also in a loop, where its own
convolution along three axes is slow.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax import lax

from jaxext._compat import Partitioner
from jaxext.core.call import Call, symbolic_size
from jaxext.core.implementation import Algorithm, Plan
from jaxext.core.static import Static
from jaxext.core.window import Window
from jaxext.ops.conv.form import conv_form
from jaxext.ops.conv.xla import XlaConv, XlaConvPlan
from jaxext.ops.conv.xla_views import moveaxis, zeros

# A block has at least so many positions of the result: a matrix product of fewer rows takes as long.
POSITIONS = 16


class XlaCausalConv(XlaConv):
    """The loop for the convolution itself on CPUs, and elsewhere in `use_invariant`; else XLA's convolution."""

    def plan(self, call: Call) -> Plan:
        whole = call.open != "y" or call.empty or symbolic_size(call) or call.partitioner is Partitioner.XLA
        return super().plan(call) if whole or not (call.platform == "cpu" or call.in_loop) else FramesPlan(self, call)

    def expected(self, call: Call) -> Sequence[str]:
        return () if isinstance(self.plan(call), FramesPlan) else super().expected(call)


class FramesPlan(Plan):
    """The plan of a loop over blocks of frames.

    Attributes:
      frames: the number of frames in a block, which depends on the size of one, and not on how many there are.
      block: the plan of the convolution of a block.
    """

    def __init__(self, implementation: XlaCausalConv, call: Call):
        super().__init__(implementation, call)
        window, sizes = call.window, call.sizes
        assert window is not None and window.padding[0] == (0, 0) and window.input_dilation[0] == 1
        space = {field.name: getattr(window, field.name)[1:] for field in dataclasses.fields(Window)}
        self.taps, self.stride, self.dilation = window.filter[0], window.stride[0], window.filter_dilation[0]
        B, N, G, C, K = (sizes[label] for label in "BNGCK")
        self.frames = math.ceil(POSITIONS / (B * N * math.prod(window.output[1:])))
        form = conv_form(window.rank - 1)
        static = Static(ranks=(1,) * len(form.free), dtypes=(call.dtype,), window=Window(**space), precision=call.precision)
        shapes = (B, N * self.frames, *space["input"], G, self.taps * C), (B, G, K, *space["filter"], self.taps * C)
        operands = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, call.dtypes.values(), strict=True)]
        how = dict(platform=call.platform, arch=call.arch, partitioner=call.partitioner)
        self.block = XlaConvPlan(implementation, dataclasses.replace(form.call("y", operands, static=static, **how), in_loop=True))

    @functools.cached_property
    def configs(self) -> Sequence[Algorithm]:
        return [self.block.configs[0]]

    def describe(self, config: Algorithm) -> str:
        return f"blocks of {self.frames} by {self.block.describe(config)}"

    def run(self, config: Algorithm, operands: Mapping[str, jax.Array]) -> jax.Array:
        flat = self.call.flatten(operands)
        x, w = flat["x"], flat["w"]
        w = moveaxis(w, 3, -2)  # (B, G, K, *filter, taps, C)
        w = w.reshape((*w.shape[:-2], -1))
        steps = self.call.window.output[0]
        blocks, advance = -(-steps // self.frames), self.frames * self.stride
        read = (self.frames - 1) * self.stride + (self.taps - 1) * self.dilation + 1
        # One step more, since XLA would take a slice of all steps out of the loop, and compute it by other code.
        missing = max(0, (blocks - 1) * advance + read + (blocks == 1) - x.shape[2])
        x = lax.pad(x, np.zeros((), x.dtype), [(0, missing if axis == 2 else 0, 0) for axis in range(x.ndim)])
        count = lax.optimization_barrier(np.int32(blocks))  # so XLA makes the same loop for all numbers

        def step(i, y):
            return lax.dynamic_update_slice_in_dim(y, self._frames(config, lax.dynamic_slice_in_dim(x, i * advance, read, 2), w), i * self.frames, 2)

        *shape, = (self.call.sizes[label] for label in self.call.labels["y"])
        shape[2] = blocks * self.frames
        y = lax.fori_loop(np.int32(0), count, step, zeros(shape, self.call.dtype, x, w))
        return lax.slice_in_dim(y, 0, steps, axis=2).reshape(self.call.shape)

    def _frames(self, config: Algorithm, x: jax.Array, w: jax.Array) -> jax.Array:
        """A block of frames, from the steps that they read."""
        last = (self.frames - 1) * self.stride + 1
        taps = [lax.slice_in_dim(x, r * self.dilation, r * self.dilation + last, self.stride, 2) for r in range(self.taps)]
        x = lax.concatenate(taps, x.ndim - 1)
        x = x.reshape((x.shape[0], -1, *x.shape[3:]))
        y = self.block.run(config, {"x": x, "w": w})
        return y.reshape((y.shape[0], -1, self.frames, *y.shape[2:]))
