"""Causal convolutions block of frames after block, in a loop, so that the bits of a frame do not depend on how many frames there are.

The body of the loop is the same program in each call: it convolves the steps that the frames of a block read.  Of a video these are the
channels of a convolution along two axes: XLA's CPU backend is slow at three.
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
from jaxext.ops.conv.xla_views import moveaxis, outputs_first, outputs_last, zeros

# A block has at least so many positions of the result: a convolution of fewer takes as long.
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
      read: the steps that a block reads.
      folded: whether the taps of time are channels of a block.
      block: the plan of the convolution of a block.
    """

    def __init__(self, implementation: XlaCausalConv, call: Call):
        super().__init__(implementation, call)
        window, sizes = call.window, call.sizes
        assert window is not None and window.padding[0] == (0, 0) and window.input_dilation[0] == 1
        self.window, taps = window, window.filter[0]
        B, N, G, C, K = (sizes[label] for label in "BNGCK")
        self.frames = math.ceil(POSITIONS / (B * N * math.prod(window.output[1:])))
        self.read = (self.frames - 1) * window.stride[0] + (taps - 1) * window.filter_dilation[0] + 1
        self.folded = window.rank == 3
        if self.folded:
            window = Window(**{field.name: getattr(window, field.name)[1:] for field in dataclasses.fields(Window)})
            N, C = N * self.frames, C * taps
        else:
            window = dataclasses.replace(window, input=(self.read, *window.input[1:]))
        form = conv_form(window.rank)
        static = Static(ranks=(1,) * len(form.free), dtypes=(call.dtype,), window=window, precision=call.precision)
        shapes = (B, N, *window.input, G, C), (B, G, K, *window.filter, C)
        operands = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, call.dtypes.values(), strict=True)]
        block = form.call("y", operands, static=static, platform=call.platform, arch=call.arch, partitioner=call.partitioner)
        self.block = XlaConvPlan(implementation, dataclasses.replace(block, in_loop=True))

    @functools.cached_property
    def configs(self) -> Sequence[Algorithm]:
        return self.block.configs[:1]  # the bits would depend on another choice

    def describe(self, config: Algorithm) -> str:
        return f"blocks of {self.frames}, {self.block.describe(config)}"

    def run(self, config: Algorithm, operands: Mapping[str, jax.Array]) -> jax.Array:
        call, frames = self.call, self.frames
        x, w = call.flatten(operands).values()
        B, N, G, K = (call.sizes[label] for label in "BNGK")
        if self.folded:
            w = moveaxis(w, 3, -2)
            w = w.reshape((*w.shape[:-2], -1))
        w = outputs_last(w)  # once, and not in each block
        steps, *space = self.window.output
        blocks, advance = -(-steps // frames), frames * self.window.stride[0]
        x = x.reshape((*x.shape[:-2], -1))
        missing = max(0, (blocks - 1) * advance + self.read - x.shape[2])
        x = lax.pad(x, np.zeros((), x.dtype), [(0, missing if axis == 2 else 0, 0) for axis in range(x.ndim)])
        count = lax.optimization_barrier(np.int32(blocks))  # so that XLA makes the same loop for all numbers

        def step(i, y):
            # The barriers keep what is between them apart from the size of x and y, and in the loop.
            block, _ = lax.optimization_barrier((lax.dynamic_slice_in_dim(x, i * advance, self.read, 2), i))
            done = lax.optimization_barrier(self._convolved(config, block, w))
            return lax.dynamic_update_slice_in_dim(y, done, i * frames, 2)

        y = lax.fori_loop(np.int32(0), count, step, zeros((B, N, blocks * frames, *space, G * K), call.dtype, x, w))
        return lax.slice_in_dim(y, 0, steps, axis=2).reshape(call.shape)

    def _convolved(self, config: Algorithm, x: jax.Array, w: jax.Array) -> jax.Array:
        """The frames of a block: (B, N, read, *space, G·C) -> (B, N, frames, *space, G·K)"""
        G, frames = self.call.sizes["G"], self.frames
        x = x.reshape((*x.shape[:-1], G, -1))
        if self.folded:
            stride, dilation = self.window.stride[0], self.window.filter_dilation[0]
            starts = range(0, self.window.filter[0] * dilation, dilation)
            x = lax.concatenate([lax.slice_in_dim(x, r, r + (frames - 1) * stride + 1, stride, 2) for r in starts], x.ndim - 1)
            x = x.reshape((x.shape[0], -1, *x.shape[3:]))
        y = self.block.run(config, {"x": x, "w": outputs_first(w, G)})
        y = y.reshape((*y.shape[:-2], -1))
        return y.reshape((y.shape[0], -1, frames, *y.shape[2:])) if self.folded else y
