"""Convolution: its labels for each number of spatial axes, its roles and its implementations.

    y[b,n,p,g,k] = Σ_{r,c} x̃[b,n,stride·p + dilation·r,g,c] w[b,g,k,r,c]     (`Window` says what x̃ is)

Leave y open: fprop; x open: dgrad, the gradient of the input; w open: wgrad, the gradient of the filter.  Channels last, the filter is
KRSC.  It must not know the public signatures.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import jax
from jax import lax

from jaxext.backends.cuda.cuda_binding import CudaConv
from jaxext.backends.triton.triton_binding import TritonConv
from jaxext.backends.xla import conv_algorithms
from jaxext.forms.choose import Algorithm, Call, Implementation
from jaxext.forms.form import Form, define
from jaxext.forms.window import labels


class XlaConv:
    """The definition, in plain XLA ops.  It supports every call."""

    name = "xla"

    def supports(self, call: Call) -> str | None:
        return None

    def gains(self, call: Call) -> str | None:
        return None

    def candidates(self, call: Call) -> Sequence[Algorithm]:
        assert call.window is not None
        dtype = conv_algorithms.promote(*call.dtypes.values())
        names = conv_algorithms.algorithms(call.open, call.sizes, call.window, dtype=dtype, splitter=call.splitter, platform=call.platform)
        return [Algorithm(name) for name in names]

    def describe(self, call: Call, config: Algorithm) -> str:
        return config.algorithm

    def run(self, call: Call, config: Algorithm, operands: Mapping[str, jax.Array]) -> jax.Array:
        assert call.window is not None
        y = conv_algorithms.conv(
            call.open,
            call.flatten(operands),
            call.window,
            algorithm=config.algorithm,
            dtype=call.dtype,
            precision=call.precision,
            splitter=call.splitter,
            platform=call.platform,
        )
        return y.reshape(call.shape)


CONV_IMPLEMENTATIONS: list[Implementation] = [CudaConv(), TritonConv(), XlaConv()]  # of every rank


@functools.cache
def conv_form(rank: int) -> Form:
    """The form of a convolution with `rank` spatial axes."""
    inputs, filters, outputs = labels(rank)
    return define(
        Form(
            name=f"conv{rank}d",
            slots={
                "x": ("B", "N", *inputs, "G", "C"),
                "w": ("B", "G", "K", *filters, "C"),
                "y": ("B", "N", *outputs, "G", "K"),
            },
            roles={"y": "fprop", "x": "dgrad", "w": "wgrad"},
            window=inputs + filters + outputs,
            implementations=CONV_IMPLEMENTATIONS,
            twin=lax.conv_general_dilated_p,
        )
    )
