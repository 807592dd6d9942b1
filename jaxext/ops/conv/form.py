"""Convolution: labels for each number of spatial axes, roles, implementations, and the translation of lax's convolution.

    y[b,n,p,g,k] = Σ_{r,c} x̃[b,n,stride·p + dilation·r,g,c] w[b,g,k,r,c]     (x̃ is defined in `Window`)

With y open the form is fprop, with x open dgrad (the gradient of the input), with w open wgrad (that of the filter).  The layout is
channels last, with KRSC filters.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxext._messages import format_value
from jaxext.core.family import Family, declare
from jaxext.core.form import Form, define
from jaxext.core.static import Static
from jaxext.core.window import Window, dilate, labels
from jaxext.lax.substitute import transpose
from jaxext.ops.conv.cuda import CudaConv
from jaxext.ops.conv.fft import FftConv
from jaxext.ops.conv.triton import TritonConv
from jaxext.ops.conv.xla import XlaConv


def read(lhs, rhs, *, out_sharding, **params):
    """lax's convolution by the form."""
    form, operands, static, arrangement = arranged(lhs, rhs, out_sharding=out_sharding, **params)
    y = arrangement.to_lax(form.bind("y", operands, static))
    return y if out_sharding is None else jax.sharding.reshard(y, out_sharding)


def arranged(
    lhs,
    rhs,
    *,
    dtype,
    window_strides,
    padding,
    lhs_dilation,
    rhs_dilation,
    dimension_numbers,
    feature_group_count,
    batch_group_count,
    precision,
    out_sharding,
    implementation,
    preferred_element_type=None,
    forms: Callable[[int], Form] | None = None,
) -> tuple[Form, dict[str, jax.Array], Static, Arrangement]:
    """Form, operands and parameters for lax's convolution, and how its result becomes that of lax.

    `forms` gives the form for a number of spatial axes, None those of `conv_form`.

    Channels move last, feature groups become the label G.  Batch groups, each with its own inputs and filters, become the label B.
    """
    del preferred_element_type  # the dtype of the result says it
    rank = lhs.ndim - 2
    lhs_dilation, rhs_dilation = lhs_dilation or (1,) * rank, rhs_dilation or (1,) * rank  # lax takes () for ones
    feature_group_count, batch_group_count = int(feature_group_count), int(batch_group_count)  # from 2.0, too
    _refuse_numbers(rank, window_strides, lhs_dilation, rhs_dilation, dimension_numbers)
    dimension_numbers = lax.ConvDimensionNumbers(*(tuple(map(int, spec)) for spec in dimension_numbers))
    x = transpose(lhs, _channels_last(dimension_numbers.lhs_spec))  # (N, *input, C)
    w = transpose(rhs, _channels_last(dimension_numbers.rhs_spec))  # (K, *filter, C)
    window = Window(
        input=x.shape[1:-1],
        filter=w.shape[1:-1],
        stride=window_strides,
        padding=padding,
        input_dilation=lhs_dilation,
        filter_dilation=rhs_dilation,
    )
    _refuse_large(window, lhs.shape[dimension_numbers.lhs_spec[0]], rhs.shape[dimension_numbers.rhs_spec[0]])
    form = (forms or conv_form)(window.rank)
    arrangement = Arrangement(tuple(dimension_numbers.out_spec), feature_group_count, batch_group_count)
    if feature_group_count > 1:
        x, w = _split(x, -1, feature_group_count), _split(w, 0, feature_group_count)
    if batch_group_count > 1:
        x, w = _split(x, 0, batch_group_count), _split(w, 0, batch_group_count)
    ranks = dict(B=int(batch_group_count > 1), N=1, G=int(feature_group_count > 1), C=1, K=1)
    static = Static(
        ranks=form.pack(ranks),
        dtypes=(dtype,),
        window=window,
        precision=precision,
        implementation=implementation,
        out_sharding=_channels_last_sharding(out_sharding, dimension_numbers, feature_group_count, batch_group_count),
    )
    return form, {"x": x, "w": w}, static, arrangement


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """The way in which the result of a form becomes that of lax."""

    out_spec: tuple[int, ...]  # of lax's dimension numbers
    groups: int
    batch_groups: int

    def to_lax(self, y: jax.Array) -> jax.Array:
        if self.batch_groups > 1:
            y = jnp.moveaxis(y, 0, -2)
        if self.groups > 1 or self.batch_groups > 1:
            y = lax.collapse(y, y.ndim - 2)
        return transpose(y, sorted(range(y.ndim), key=_channels_last(self.out_spec).__getitem__))

    def from_lax(self, y: jax.Array) -> jax.Array:
        """The inverse, for an array with the shape of the result."""
        y = self.bias_from_lax(transpose(y, _channels_last(self.out_spec)))
        return jnp.moveaxis(y, -2, 0) if self.batch_groups > 1 else y

    def bias_from_lax(self, bias: jax.Array) -> jax.Array:
        """The last axis, output channels, with an axis of its own for the groups."""
        groups = self.groups * self.batch_groups  # lax refuses both
        return _split(bias, -1, groups) if groups > 1 else bias


def _refuse_numbers(rank, window_strides, lhs_dilation, rhs_dilation, dimension_numbers):
    """Raise errors at tracing that lax leaves to the compiler."""
    for name, value in (("lhs_dilation", lhs_dilation), ("rhs_dilation", rhs_dilation)):
        if len(value) != rank:
            raise ValueError(f"conv_general_dilated: {name} is {format_value(value)}, want one entry for each of {rank} spatial axes")
    if any(stride <= 0 for stride in window_strides):
        raise ValueError(f"conv_general_dilated: window_strides is {format_value(window_strides)}, want positive numbers")
    for name, spec in zip(dimension_numbers._fields, dimension_numbers, strict=True):
        if not isinstance(spec, Sequence) or sorted(spec) != list(range(rank + 2)):
            error = ValueError if isinstance(spec, Sequence) else TypeError
            raise error(f"conv_general_dilated: {name} of dimension_numbers is {format_value(spec)}, want each of {rank + 2} axes once")


def _refuse_large(window, *others):
    """Raise if a number of the window overflows 32 bits, or the result 64: XLA would read elsewhere, or abort the process."""
    numbers = {
        "window_strides": window.stride,
        "padding": [n for ends in window.padding for n in ends],
        "lhs_dilation": window.input_dilation,
        "rhs_dilation": window.filter_dilation,
        "lhs, padded and dilated,": [
            low + dilate(n, d) + high for n, d, (low, high) in zip(window.input, window.input_dilation, window.padding, strict=True)
        ],
        "rhs, dilated,": [*map(dilate, window.filter, window.filter_dilation)],
    }
    for name, sizes in numbers.items():
        if any(isinstance(n, int | np.integer) and not -(2**31) <= n < 2**31 for n in sizes):
            raise ValueError(f"conv_general_dilated: {name} has the spatial sizes {format_value(sizes)}, want sizes that fit in 32 bits")
    result = [int(n) for n in (*others, *window.output) if isinstance(n, int | np.integer)]
    if math.prod(result) >= 2**63:
        raise ValueError(
            f"conv_general_dilated: the result has the spatial sizes {window.output}, want a number of elements that fits in 64 bits"
        )


def _channels_last(spec):
    return (spec[0], *spec[2:], spec[1])


def _split(x, axis, groups):
    axis %= x.ndim
    return lax.reshape(x, (*x.shape[:axis], groups, x.shape[axis] // groups, *x.shape[axis + 1 :]))


def _channels_last_sharding(sharding, dimension_numbers, feature_group_count, batch_group_count):
    """The sharding of the form's result for lax's `out_sharding`.  Of channels in groups the groups are split, if devices divide them."""
    if sharding is None:
        return None
    n, c, *spatial = dimension_numbers.out_spec
    spec = (*sharding.spec, *(None,) * (2 + len(spatial) - len(sharding.spec)))
    count = feature_group_count * batch_group_count  # lax refuses both
    over = spec[c] if isinstance(spec[c], tuple) else (spec[c],) if spec[c] else ()
    groups = (spec[c] if count % math.prod(sharding.mesh.shape[name] for name in over) == 0 else None,) if count > 1 else ()
    channels = (None,) if groups else (spec[c],)
    batch_groups = groups if batch_group_count > 1 else ()
    feature_groups = groups if feature_group_count > 1 else ()
    return NamedSharding(sharding.mesh, P(*batch_groups, spec[n], *(spec[s] for s in spatial), *feature_groups, *channels))


KERNELS = CudaConv(), TritonConv()
FAMILY = declare(
    Family(
        "conv",
        lax_primitive=lax.conv_general_dilated_p,
        names=r"conv\d+d",
        read=read,
        weights="w",
        axis_names={"w": {"K": "O", "C": "I"}, "y": {"K": "C"}},
        groups="GB",
    ),
    *KERNELS,
    FftConv(),
    XlaConv(),
)


def defined(name: str, rank: int, family: Family) -> Form:
    """Define the form of a convolution of this name, with `rank` spatial axes."""
    inputs, filters, outputs = labels(rank)
    return define(
        Form(
            name=name,
            slots={
                "x": ("B", "N", *inputs, "G", "C"),
                "w": ("B", "G", "K", *filters, "C"),
                "y": ("B", "N", *outputs, "G", "K"),
            },
            roles={"y": "fprop", "x": "dgrad", "w": "wgrad"},
            window=inputs + filters + outputs,
            family=family,
        )
    )


@functools.cache
def conv_form(rank: int) -> Form:
    """The form of a convolution with `rank` spatial axes."""
    return defined(f"conv{rank}d", rank, FAMILY)


for _rank in (1, 2, 3):  # other ranks are defined at their first call
    conv_form(_rank)
