"""The hazards of lax that the doctor knows.  Each is one declaration here, and a section of the documentation with its reproduction."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from jaxext.hazards.hazard import CPU, GPUS, Hazard
from jaxext.hazards.predicates import (
    all_groups,
    by_eigen,
    dilated,
    exchanges_batch,
    factor,
    float32_at_most,
    gathered,
    in_several_groups,
    of_conv,
    of_planned,
    zeros,
)
from jaxext.hazards.subjects import Equation, Planned

FROM_STRUCTURE = "This follows from the structure of XLA's program, and was measured on an H100 for some kinds."

# A subject has the hazards that hold; of those that are slow, only the first.
HAZARDS = (
    Hazard(
        name="all-reduce over a replicated axis",
        what="wrong",
        of=Equation,
        holds=of_conv(lambda conv, e: bool(conv.counted_again)),
        why="If both operands of a convolution are sharded, along space for instance, XLA can add up partial results over all devices, "
        "also over a mesh axis that leaves the larger operand whole. Gradients of filters have it in data-parallel training.",
        page="lax-hazards.md#an-all-reduce-over-a-replicated-axis",
        cost=factor,
    ),
    Hazard(
        name="groups on all devices, transposed",
        what="wrong",
        of=Equation,
        holds=of_conv(lambda conv, e: conv.misplaced),
        why="If each device has groups of its own, and the result has another order of dimensions than the input, such as NHWC after NCHW, "
        "XLA permutes the split of the result the wrong way round.",
        page="lax-hazards.md#groups-on-all-devices-transposed",
    ),
    Hazard(
        name="pointwise groups split over devices",
        what="wrong",
        of=Equation,
        holds=of_conv(lambda conv, e: conv.groups > 1 and conv.mixes_groups),
        why="If devices split the channels of a grouped convolution with a filter of one tap, as vmap makes it too, XLA multiplies other "
        "groups, or refuses its own program.",
        page="lax-hazards.md#groups-of-a-pointwise-convolution-split-over-devices",
    ),
    Hazard(
        name="pointwise depthwise convolution with split channels",
        what="crash",
        of=Equation,
        holds=of_conv(lambda conv, e: conv.frees_twice),
        why="If a mesh axis splits the channels of a depthwise convolution with a filter of one tap, and another neither input nor result, "
        "XLA ends the process.",
        page="lax-hazards.md#a-pointwise-depthwise-convolution-with-split-channels",
    ),
    Hazard(
        name="batch groups split over devices",
        what="crash",
        of=Equation,
        holds=of_conv(lambda conv, e: conv.batch_groups > 1 and conv.mixes_groups),
        why="If the channels of the result are split into more parts than there are batch groups, XLA ends the process. With a filter of "
        "one tap the numbers are wrong instead, also for a batch in more parts.",
        page="lax-hazards.md#batch-groups-split-over-devices",
    ),
    Hazard(
        name="batch of products split otherwise",
        what="wrong",
        of=Equation,
        holds=exchanges_batch,
        why="If the batch of a matrix product is split over one mesh axis, the sum over another of another size, and the result's batch is "
        "asked over the second, with its rows or columns over the first, XLA multiplies other matrices.",
        page="lax-hazards.md#a-batch-of-products-whose-result-is-split-otherwise",
    ),
    Hazard(
        name="cropped and padded",
        what="wrong",
        of=Equation,
        holds=of_conv(lambda conv, e: by_eigen(conv, e) and any(low < 0 < high and left > 0 for low, high, left in conv.crops())),
        why="If the beginning of an axis is cropped (negative padding, as gradients have it) and its end is padded, XLA's CPU convolution "
        "can read beyond the row and the array.",
        page="lax-hazards.md#cropped-and-padded-on-one-axis",
        platforms=CPU,
        fixed=(0, 12),
    ),
    Hazard(
        name="crop that leaves nothing",
        what="crash",
        of=Equation,
        holds=of_conv(
            lambda conv, e: 0 not in conv.output and any(left <= 0 < n for (*_, left), n in zip(conv.crops(), conv.input, strict=True))
        ),
        why="If negative padding leaves no row of the input, XLA's CPU convolution reads far outside of the array and can end the process.",
        page="lax-hazards.md#a-crop-that-leaves-nothing",
        platforms=CPU,
    ),
    Hazard(
        name="product with one number, reduced",
        what="wrong",
        of=Equation,
        holds=lambda equation: equation.one_number_reduced,
        why="If the right factor of a matrix product, or the filter of a convolution, is one number everywhere, and the result of 4,096 "
        "elements or more is reduced in the same jit, XLA's CPU backend makes one kernel of all, whose numbers are wrong, infinite or NaN.",
        cure="number * x.sum(-1, keepdims=True) in place of the product, or lax.reduce_precision(y, 8, 23) of a float32 product y",
        page="lax-hazards.md#a-product-with-one-number-everywhere-then-a-reduction",
        platforms=CPU,
    ),
    Hazard(
        name="narrow product, reduced",
        what="wrong",
        of=Equation,
        holds=lambda equation: equation.narrow_reduced,
        why="If many rows, more than 128 KiB of one column, are multiplied by a few columns, as vmap makes it of a small matrix and a "
        "vector, and the product is reduced in the same jit, XLA's CPU backend makes one kernel of all, which is wrong for the rows after.",
        page="lax-hazards.md#a-product-with-a-few-columns-then-a-reduction",
        platforms=CPU,
        fixed=(0, 11),
    ),
    Hazard(
        name="integer convolution on a GPU",
        what="crash",
        of=Equation,
        holds=of_conv(lambda conv, e: e.integers and not (e.dtypes[0] == e.dtypes[1] == e.dtype == jnp.int8)),
        why="XLA's GPU compiler refuses convolutions of integers, except those of int8 into int8.",
        page="doctor.md#integer-convolutions-on-gpus",
        platforms=GPUS,
        seen=False,
    ),
    Hazard(
        name="int8 convolution that saturates",
        what="wrong",
        of=Equation,
        holds=of_conv(lambda conv, e: e.dtypes[0] == e.dtypes[1] == e.dtype == jnp.int8),
        why="On GPUs cuDNN saturates the sums of int8 convolutions, which wrap around elsewhere; with groups it returns a wrong channel.",
        page="doctor.md#integer-convolutions-on-gpus",
        platforms=GPUS,
        seen=False,
    ),
    Hazard(
        name="bfloat16 conv1d with stride and dilation",
        what="crash",
        of=Equation,
        holds=of_conv(lambda conv, e: jnp.bfloat16 in e.dtypes and len(conv.input) == 1 and conv.strides[0] > 1 < conv.rhs_dilation[0]),
        why="On GPUs a convolution along one axis in bfloat16 that is strided and dilated ends with an error of CUDA.",
        cure="jaxext's operation with implementation='triton', or float32",
        page="doctor.md#bfloat16-convolutions-along-one-axis",
        platforms=("cuda",),
        seen=False,
    ),
    Hazard(
        name="batch of grouped convolutions",
        what="slow",
        of=Equation,
        holds=of_conv(lambda conv, e: conv.groups > 1 < conv.channels and conv.split("batch", "space")),
        why="XLA gathers the input of a convolution with groups of several channels on every device, and convolves all of it there.",
        page="lax-hazards.md#a-batch-of-grouped-convolutions",
        cost=gathered,
    ),
    Hazard(
        name="groups split over devices",
        what="slow",
        of=Equation,
        holds=of_conv(lambda conv, e: conv.groups > 1 < conv.channels and conv.split("channels") and not conv.split("batch", "space")),
        why="vmap over images and filters makes a grouped convolution. If devices split the mapped axis, or the groups, XLA gathers them.",
        page="lax-hazards.md#vmap-over-a-split-axis",
        cost=gathered,
    ),
    Hazard(
        name="convolution in a loop",
        what="slow",
        of=Equation,
        holds=of_conv(lambda conv, e: e.in_loop and by_eigen(conv, e) and not conv.in_own_layout),
        why="XLA's CPU compiler gives convolutions the layout of its fast code only outside of loops, such as lax.scan and lax.while_loop.",
        page="lax-hazards.md#convolutions-in-a-loop",
        platforms=CPU,
    ),
    Hazard(
        name="float32 multiplied as TF32",
        what="note",
        of=Equation,
        holds=float32_at_most(lax.Precision.HIGH),
        why="With the precision 'default' or 'high', products of float32 on GPUs since Ampere round their operands to TF32: 11 bits of 24.",
        cure="jax.default_matmul_precision('highest'), or precision='highest' in the call, where float32 is meant",
        page="doctor.md#float32-with-the-default-precision",
        platforms=("cuda",),
        seen=False,
    ),
    Hazard(
        name="float32 multiplied as bfloat16",
        what="note",
        of=Equation,
        holds=float32_at_most(lax.Precision.DEFAULT),
        why="With the default precision, products of float32 on TPUs round their operands to bfloat16: 8 bits of 24.",
        cure="jax.default_matmul_precision('highest'), or precision='highest' in the call, where float32 is meant",
        page="doctor.md#float32-with-the-default-precision",
        platforms=("tpu",),
        seen=False,
    ),
    Hazard(
        name="dilated input",
        what="slow",
        of=Planned,
        holds=of_planned(dilated),
        why={
            "cpu": "XLA's CPU compiler has no fast code for this transposed convolution, or strided gradient, and multiplies the zeros.",
            "cuda": f"XLA multiplies the zeros of a transposed convolution, or of a strided gradient. {FROM_STRUCTURE}",
        },
        page="doctor.md#transposed-convolutions-and-strided-gradients",
        cost=zeros,
    ),
    Hazard(
        name="depthwise convolution",
        what="slow",
        of=Planned,
        holds=of_planned(lambda call: in_several_groups(call) and call.sizes["C"] == 1 and call.sizes["G"] > 1),
        why={
            "cpu": "XLA's CPU compiler has no fast code for groups of one channel.",
            "cuda": f"With one channel in a group cuDNN leaves most of its tiles empty. {FROM_STRUCTURE}",
        },
        page="doctor.md#depthwise-and-grouped-convolutions",
    ),
    Hazard(
        name="gradients of each example",
        what="slow",
        of=Planned,
        holds=of_planned(lambda call: in_several_groups(call) and call.sizes["B"] > 1 and call.open == "w"),
        why={
            "cpu": "lax makes a grouped convolution of the gradients of each example, for which XLA's CPU compiler has no fast code.",
            "cuda": f"lax makes a grouped convolution of a filter's gradient for each example, with images as filters. {FROM_STRUCTURE}",
        },
        page="doctor.md#batched-filters-and-gradients-of-each-example",
    ),
    Hazard(
        name="batched filters",
        what="slow",
        of=Planned,
        holds=of_planned(lambda call: in_several_groups(call) and call.sizes["B"] > 1),
        why={
            "cpu": "lax makes a grouped convolution of vmap over filters, for which XLA's CPU compiler has no fast code.",
            "cuda": f"lax makes a grouped convolution of vmap over filters, and moves the images beside the channels. {FROM_STRUCTURE}",
        },
        page="doctor.md#batched-filters-and-gradients-of-each-example",
    ),
    Hazard(
        name="grouped convolution",
        what="slow",
        of=Planned,
        holds=of_planned(in_several_groups),
        why={
            "cpu": "XLA's CPU compiler has no fast code for groups.",
            "cuda": f"Groups of few channels leave most of cuDNN's tiles empty in gradients. {FROM_STRUCTURE}",
        },
        page="doctor.md#depthwise-and-grouped-convolutions",
    ),
    Hazard(
        name="ragged product",
        what="slow",
        of=Planned,
        holds=of_planned(lambda call: call.op.startswith("ragged")),
        why="lax multiplies every row by the filter of every group, except where XLA has a kernel for it.",
        page="doctor.md#ragged-products",
        cost=all_groups,
    ),
    Hazard(
        name="another implementation is faster",
        what="slow",
        of=Planned,
        holds=of_planned(lambda call: True),
        why="jaxext has an implementation that it prefers here, by its structure, by its expected cost, or by what `tune` measured.",
        page="implementations.md",
    ),
)
