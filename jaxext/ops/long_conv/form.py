"""Long convolutions: the labels of a convolution along one axis, and a family that takes `fft` where it is expected to be faster."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxext.core import partition
from jaxext.core.call import Call
from jaxext.core.epilogue import accumulated
from jaxext.core.family import Family, declare
from jaxext.core.implementation import Plan
from jaxext.core.static import Static
from jaxext.core.window import Window
from jaxext.lax.dispatch import compiled, conv_precision
from jaxext.ops.conv.fft import FftConv, FftPlan, run_ms
from jaxext.ops.conv.form import defined
from jaxext.ops.conv.xla import XlaConv, XlaConvPlan

# From so many taps on the FFT is taken where no time of the direct sum is expected, as on GPUs.
LONG = 128
# The direct sum takes this many times what is expected of it, where a filter has many taps: 1.2 to 2.7 times were measured.
OPTIMISTIC = 1.5


class LongFft(FftConv):
    """The FFT, which a call may take unnamed."""

    def plan(self, call: Call) -> Plan | str:
        return self._reason("refuses", call) or LongFftPlan(self, call)


class LongFftPlan(FftPlan):
    """The plan of a call, which knows what the direct sum would take."""

    only_if_named = None

    def not_preferred(self) -> str | None:
        if self.empty:
            return "an axis is empty"
        direct = next(iter(XlaConvPlan(DIRECT, self.call).found.values()))
        if self.call.platform != "cpu" or direct.cost is None:
            return None if self.conv.taps >= LONG else f"the filter has {self.conv.taps} taps, want {LONG}"
        ours, theirs = run_ms(self.conv, self.configs[0]), OPTIMISTIC * direct.cost.run_ms
        return None if ours < theirs else f"{ours:.2g} ms are expected, and {theirs:.2g} ms of the direct sum"


DIRECT = XlaConv()

NAMES = {"x": {"G": "C"}, "w": {"G": "C", "K": "O", "C": "I"}, "y": {"G": "C", "K": "C"}}
FAMILY = declare(
    Family("long_conv", lax_primitive=lax.conv_general_dilated_p, names="long_conv", weights="w", axis_names=NAMES), LongFft(), DIRECT
)

LONG_CONV = defined("long_conv", 1, FAMILY)


def reach(steps: int, taps: int, causal: bool) -> tuple[slice, tuple[int, int]]:
    """The taps that meet a step, and how many steps these read before and behind the present one."""
    if not isinstance(steps, int):  # then all of them may
        steps = taps
    present = 0 if causal else (taps - 1) // 2  # the tap that meets the present step
    first, last = max(0, min(present, present + 1 - steps)), min(taps, present + max(1, steps))
    return slice(first, last), (last - 1 - present, present - first)


def summed_dtype(names: Collection[str], dtype: np.dtype) -> np.dtype:
    """The dtype of the sum: wide if something follows it."""
    return accumulated(dtype) if {"skip", "gate"} & {*names} else dtype


def summed(padding: tuple[int, int], dtype: np.dtype, x: jax.Array, w: jax.Array, *, precision, implementation) -> jax.Array:
    """The sum over the taps, of x with so many zeros before and behind it."""
    dense, w = w.ndim - 2, jnp.moveaxis(lax.rev(w, [0]), -1, 0)  # (C, K), or (D, K, C)
    ones = dict(stride=(1,), input_dilation=(1,), filter_dilation=(1,))
    static = Static(
        ranks=LONG_CONV.pack({"B": 0, "N": x.ndim - 2, "G": 1 - dense, "C": dense, "K": dense}),
        dtypes=(dtype,),
        window=Window(input=(x.shape[-2],), filter=(w.shape[1],), padding=(padding,), **ones),
        precision=conv_precision(precision),
        implementation=implementation,
    )
    return LONG_CONV.bind("y", {"x": x, "w": w}, static)


def program(name: str, padding: tuple[int, int], dtype: np.dtype, x: jax.Array, w: jax.Array, *, precision, implementation) -> jax.Array:
    """The same as a jitted program of this name, of the implementation that the caller or the context names."""
    return compiled(summed, (padding, dtype), FAMILY, implementation, (x, w), {"precision": precision}, name=name)


def combined(y: jax.Array, operands: Mapping[str, jax.Array]) -> jax.Array:
    """The result, of the sum and of x, skip and gate, rounded once."""
    x, dtype = operands["x"], operands["x"].dtype
    if "skip" in operands:
        skip, x = partition.broadcast_together(lax.expand_dims(operands["skip"], range(x.ndim - 1)), x)
        y += skip.astype(y.dtype) * x.astype(y.dtype)
    if "gate" in operands:
        gate, y = partition.broadcast_together(operands["gate"], y)
        y *= gate.astype(y.dtype)
    return y.astype(dtype)
