"""Cost model: operations, memory and communication per device of a form whose labels are split over devices, from the labels alone.

A label split into n parts splits every slot that has it.  A slot that lacks a split label is replicated n times.  Then

    a split label that the result keeps       costs nothing
    a split label that the result lacks       is contracted: an all-reduce adds the n partial results
    a slot that is scattered                  each replica keeps one n-th: an all-gather assembles an operand, and a reduce-scatter
                                              replaces the all-reduce of a result
    a slot that is sent                       outside of the product another of its labels is split: an all-to-all
    a split spatial axis                      collective-permutes move its halo to the neighbours, or an all-gather moves the whole axis

A spatial axis has one label, that of the input, for both input and output; the filter is whole.  For a result of b bytes per device, each
of n devices in a ring sends

    all-gather, all-to-all  (n-1)/n·b      reduce-scatter  (n-1)·b
    all-reduce, a reduce-scatter and an all-gather of its result,  2(n-1)/n·b
"""

from __future__ import annotations

import numbers
import operator
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxext._messages import format_value
from jaxext.core.form import Form, owner
from jaxext.core.window import Window, dilate, labels
from jaxext.parallel.split_form import Cost, SplitForm


def cost(
    form: str,
    sharding: Mapping[str, int],
    *,
    sizes: Mapping[str, int],
    dtype: DTypeLike = jnp.float32,
    window_strides: Sequence[int] | None = None,
    padding: str | Sequence[tuple[int, int]] = "SAME",
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    spatial: str = "halo",
    scattered: Mapping[str, str] | None = None,
    sent: Mapping[str, tuple[str, str]] | None = None,
) -> dict[str, Cost]:
    """Predict the cost per device of each role of a form whose labels are split over devices.

        matmul    c[b,m,n] = Σ_k a[b,m,k] b[b,k,n]                           roles nn (c), nt (a), tn (b)
        conv2d    y[b,n,p,q,g,k] = Σ_{r,s,c} x̃[b,n,p + r,q + s,g,c] w[b,g,k,r,s,c]      fprop (y), dgrad (x), wgrad (w)

    The slot in parentheses is the result; the other two are the operands.  The spatial labels (input and filter) are W and S for conv1d,
    H, W and R, S for conv2d, and D, H, W and T, R, S for conv3d.  No device is needed and nothing is compiled.

    Args:
      form: "matmul", "conv1d", "conv2d", "conv3d", or the name of a form declared by `jaxext.extend.define`.
      sharding: label -> the number of devices that split it.  The numbers of several labels multiply.  A spatial axis is named by the
        input's label (D, H, W), and its output is split alike.
      sizes: label -> elements of the whole arrays.  The output's spatial sizes are derived.  Labels in all three slots (B, G) default to 1.
        C and K of a convolution are per group.
      dtype: of operands and result.
      window_strides, padding, lhs_dilation, rhs_dilation: of the convolution, as in `jax.lax.conv_general_dilated`.
      spatial: how a split spatial axis is computed.  "halo": each device computes its part, as in
        `jaxext.parallel.halo_conv`.  "gather": each device computes the whole axis, as under `jit`.
      scattered: slot -> the label along which its replicas are scattered.  {"a": "M"} with N split is `all_gather_matmul`, {"c": "M"} with
        K split is `matmul_reduce_scatter`, and {"b": "K"} with M split is data parallelism with scattered parameters ("FSDP", "ZeRO").  The
        two collective matmuls send the same bytes in n-1 collective-permutes.  Under `jit` XLA decides what to gather, and may send more.
      sent: slot -> (label, split label): outside of the product the devices that split the one label of the slot split the other one.  With
        B, the experts, split, {"a": ("M", "B"), "c": ("M", "B")} sends rows to their experts and results back, as
        `jaxext.parallel.expert_parallel` does where every expert has as many rows, and as many of each device.

    Returns:
      role -> its `Cost`: `flops`, bytes `held` of each slot, `collectives` with their kind, group and bytes, and bytes on the `wire`.
      Roles are independent: a training step may also reuse for wgrad the input that fprop gathered, with its halo.

    Examples:
      >>> step = cost("matmul", {"M": 8}, sizes=dict(M=65536, K=8192, N=28672), dtype="bfloat16")  # data parallelism
      >>> step["nn"].collectives, step["tn"].collectives[0].kind, step["tn"].wire / 2**20
      ((), 'all-reduce', 784.0)

    Raises:
      ValueError: a form, label, slot or option is unknown; a size is missing or not divisible by its parts; a scattered slot is
        not replicated; a sent slot lacks a label; or jax.lax does not know the padding.
    """
    known = forms()
    if not isinstance(form, str) or form not in known:
        raise ValueError(f"cost: form is {format_value(form)}, want one of {', '.join(known)}")
    if not isinstance(spatial, str) or spatial not in ("halo", "gather"):
        raise ValueError(f"cost: spatial is {format_value(spatial)}, want 'halo' or 'gather'")
    product = known[form]
    rank = len(product.window) // 3
    sizes = _sizes(product, rank, sizes)
    window = _window(rank, sizes, padding, window_strides=window_strides, lhs_dilation=lhs_dilation, rhs_dilation=rhs_dilation)
    splittable = (*product.free, *labels(rank)[0])
    if unknown := sharding.keys() - {*splittable}:
        raise ValueError(f"cost: sharding splits {', '.join(map(format_value, unknown))}, want labels of {', '.join(splittable)}")
    devices = {label: _positive(f"sharding of {label}", n) for label, n in sharding.items()}
    split = SplitForm(
        form=product,
        window=window,
        sizes=sizes | window.sizes,
        devices={label: n for label, n in devices.items() if n != 1},
        scattered=dict(scattered or {}),
        sent=dict(sent or {}),
        gathers=spatial == "gather",
        itemsize=jnp.dtype(dtype).itemsize,
    )
    split.check()
    return {role: split.cost(open, role) for open, role in product.roles.items()}


def forms() -> dict[str, Form]:
    """The forms of all families, by name."""
    return {form.name: form for form, _ in owner.values()}


def _sizes(form: Form, rank: int, given: Mapping[str, int]) -> dict[str, int]:
    """The size of every label but the output's."""
    inputs, filters, _ = labels(rank)
    batch = [label for label in form.free if all(label in names for names in form.slots.values())]
    sizes = dict.fromkeys(batch, 1) | dict(given)
    wanted = (*form.free, *inputs, *filters)
    if sizes.keys() != set(wanted):
        optional = f", of which {', '.join(batch)} may be left out" if batch else ""
        raise ValueError(f"cost: sizes has {', '.join(map(str, given)) or 'no labels'}; want {', '.join(wanted)}{optional}")
    return {label: _positive(f"size of {label}", size) for label, size in sizes.items()}


def _window(rank: int, sizes: Mapping[str, int], padding, **steps: Sequence[int] | None) -> Window:
    """The geometry, as lax understands padding."""
    inputs, filters, _ = labels(rank)
    for name, entries in dict(steps, padding=padding).items():
        if entries is not None and not isinstance(entries, str) and not (isinstance(entries, Sequence) and len(entries) == rank):
            raise ValueError(f"cost: {name} is {format_value(entries)}, want one entry for each of {rank} spatial axes")
    strides, of_input, of_filter = (tuple(_positive(name, n) for n in entries or (1,) * rank) for name, entries in steps.items())
    input, filter = (tuple(sizes[label] for label in names) for names in (inputs, filters))
    if isinstance(padding, str):
        dilated = tuple(map(dilate, input, of_input)), tuple(map(dilate, filter, of_filter))
        padding = lax.padtype_to_pads(*dilated, strides, padding) if rank else ()
    pads = tuple((operator.index(low), operator.index(high)) for low, high in padding)
    window = Window(input=input, filter=filter, stride=strides, padding=pads, input_dilation=of_input, filter_dilation=of_filter)
    if not all(window.output):
        raise ValueError(f"cost: the output of {window} has sizes {window.output}, want a filter that fits into the padded input")
    return window


def _positive(what: str, n: int) -> int:
    if not isinstance(n, numbers.Integral) or n < 1:
        raise ValueError(f"cost: {what} is {format_value(n)}, want a positive integer")
    return int(n)
