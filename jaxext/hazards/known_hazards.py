"""The hazards of lax that the doctor knows.  Each is one declaration here, and a section of the documentation with its reproduction."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import jax.numpy as jnp
from jax import lax

from jaxext._compat import PLATFORMS
from jaxext.core.call import Call
from jaxext.hazards.lax_products import PRODUCTS, Conv, Equation, Planned

CPU, GPUS = ("cpu",), ("cuda", "rocm")
IN_PLACE = "use jaxext's operation, or jaxext.in_place_of_lax() around the model"


@dataclasses.dataclass(frozen=True)
class Hazard:
    """A fault or a weakness of lax's own products."""

    name: str  # as messages say it
    what: Literal["wrong", "crash", "slow", "note"]  # "crash": an error or the end of the process
    _: dataclasses.KW_ONLY
    holds: Callable[[Any], bool]  # of an equation of lax, or, in PLANNED_HAZARDS, of a call that jaxext would not compute as lax does
    why: str | Mapping[str, str]  # one or two sentences; by platform if they differ
    fix: str = IN_PLACE  # what to call instead
    page: str  # its section of the documentation
    platforms: tuple[str, ...] = PLATFORMS  # where it shows
    fixed: tuple[int, ...] | None = None  # the first version of jax without it; it shows from the oldest supported one on
    cost: Callable[[Any], str] = lambda product: ""  # what it costs, if that is more than the product itself

    def shows_on(self, version: tuple[int, ...]) -> bool:
        return self.fixed is None or version < self.fixed

    @property
    def seen(self) -> bool:
        """Return whether a test shows it: others were read about, or are on a GPU, of which the tests have none."""
        return "cpu" in self.platforms

    def why_on(self, platform: str) -> str:
        return self.why if isinstance(self.why, str) else self.why[platform if platform in self.why else "cuda"]

    def since_on(self, platform: str) -> str:
        """Return on which versions it shows, in words."""
        versions = "every tested version of jax" if self.fixed is None else f"jax before {'.'.join(map(str, self.fixed))}"
        return "as reported, not tested" if not self.seen else versions + ("" if platform == "cpu" else ", on CPUs")


def is_conv(holds: Callable[[Conv, Equation], bool]) -> Callable[[Equation], bool]:
    """A predicate on lax's convolutions."""
    return lambda equation: equation.conv is not None and holds(equation.conv, equation)


def exchanges_batch(equation: Equation) -> bool:
    """Return whether a product's batch and sum are split, and its result's batch like the sum, with another axis like the batch."""
    if equation.name != "dot_general" or equation.result is None or None in equation.splits:
        return False

    def axes(split, at):
        return {axis for i in at for axis in split[i]}

    (lhs, rhs), result = equation.splits, equation.result
    contracted, batched = equation.eqn.params["dimension_numbers"]
    sums, batch = (axes(lhs, one) & axes(rhs, other) for one, other in (contracted, batched))
    own, others = (axes(result, at) for at in (range(len(batched[0])), range(len(batched[0]), len(result))))
    return any(equation.axes.get(one) != equation.axes.get(other) for one, other in itertools.product(batch & others, sums & own))


def by_eigen(conv: Conv, equation: Equation) -> bool:
    """Return whether XLA's CPU compiler has Eigen compute this convolution, without a loop of its own."""
    floats = all(jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize <= 4 for dtype in equation.dtypes)
    return floats and conv.groups == conv.batch_groups == 1 and {*conv.lhs_dilation, *conv.rhs_dilation} <= {1}


def leaves_nothing(conv: Conv) -> bool:
    """Return whether padding crops an axis of the input, and leaves nothing of it."""
    return 0 not in conv.output and any(left <= 0 < n for (*_, left), n in zip(conv.crops(), conv.input, strict=True))


def in_several_groups(call: Call) -> bool:
    return call.window is not None and call.sizes["G"] * call.sizes["B"] > 1


def dilated(call: Call) -> bool:
    """Return whether lax's convolution has an input that is full of zeros."""
    window = call.window
    return window is not None and max(*window.input_dilation, *(window.stride if call.open == "x" else ()), 1) > 1


LEVELS = (lax.Precision.DEFAULT, lax.Precision.HIGH, lax.Precision.HIGHEST)


def float32_at_most(highest: lax.Precision):
    """Return whether float32 operands, or complex ones of them, are multiplied with a precision up to this one; of two the higher holds."""

    def holds(equation: Equation) -> bool:
        precision = equation.eqn.params.get("precision")
        default = precision is None or precision == lax.DotAlgorithmPreset.DEFAULT
        asked = {lax.Precision.DEFAULT} if default else {*(precision if isinstance(precision, tuple) else ())}
        level = max(asked, key=LEVELS.index, default=lax.Precision.HIGHEST)
        narrow = all(dtype in (jnp.float32, jnp.complex64) for dtype in equation.dtypes)
        return equation.name in PRODUCTS and narrow and LEVELS.index(level) <= LEVELS.index(highest)

    return holds


def factor(equation: Equation) -> str:
    assert equation.conv is not None
    return f"the result is {math.prod(equation.conv.counted_again.values())} times too large"


def gathered(equation: Equation) -> str:
    aval = equation.eqn.invars[0].aval
    return f"{math.prod(aval.shape) * aval.dtype.itemsize / 2**20:.3g} MiB of input gathered on every device"


def zeros(planned: Planned) -> str:
    window = planned.call.window
    assert window is not None
    steps = math.prod(window.input_dilation) * (math.prod(window.stride) if planned.call.open == "x" else 1)
    return f"lax does up to {steps} times the multiplications" if planned.platform in GPUS else ""


def all_groups(planned: Planned) -> str:
    return f"lax does {planned.call.sizes['G']} times the multiplications"


FROM_STRUCTURE = "This is concluded from XLA's program, and was measured on an H100 for some kinds."
HIGHEST = "jax.default_matmul_precision('highest'), or precision='highest' in the call, if the result must be accurate to float32"

# An equation of lax has all that hold.
EQUATION_HAZARDS = (
    Hazard("all-reduce over a replicated axis", "wrong", page="lax-hazards.md#an-all-reduce-over-a-replicated-axis", cost=factor,
        holds=is_conv(lambda conv, e: bool(conv.counted_again)),
        why="If both operands of a convolution are sharded, for example along space, XLA can sum partial results over all devices, "
            "including a mesh axis over which the larger operand is replicated. Filter gradients in data-parallel training are affected."),
    Hazard("groups on all devices, transposed", "wrong", page="lax-hazards.md#groups-on-all-devices-transposed",
        holds=is_conv(lambda conv, e: conv.misplaced),
        why="If each device has groups of its own, and the result has another order of dimensions than the input, such as NHWC after "
            "NCHW, XLA permutes the sharding of the result in the wrong direction."),
    Hazard("pointwise groups split over devices", "wrong", page="lax-hazards.md#groups-of-a-pointwise-convolution-split-over-devices",
        holds=is_conv(lambda conv, e: conv.groups > 1 and conv.mixes_groups),
        why="If the channels of a grouped convolution with a filter of size 1 are sharded, XLA multiplies the wrong groups, or rejects its "
            "own program. vmap makes such convolutions too."),
    Hazard("pointwise depthwise convolution with split channels", "crash",
        page="lax-hazards.md#a-pointwise-depthwise-convolution-with-split-channels", holds=is_conv(lambda conv, e: conv.frees_twice),
        why="If one mesh axis splits the channels of a depthwise convolution with a filter of size 1, and another axis splits neither "
            "input nor result, XLA aborts the process."),
    Hazard("batch groups split over devices", "crash", page="lax-hazards.md#batch-groups-split-over-devices",
        holds=is_conv(lambda conv, e: conv.batch_groups > 1 and conv.mixes_groups),
        why="If the channels of the result are split into more parts than there are batch groups, XLA aborts the process. With a filter "
            "of size 1 the result is wrong instead, also if the batch is split into more parts."),
    Hazard("batch of matmuls split otherwise", "wrong", page="lax-hazards.md#a-batch-of-matmuls-whose-result-is-split-differently",
        holds=exchanges_batch,
        why="If the batch of a matmul is split over one mesh axis and the contracted dimension over another of another size, and the batch "
            "of the result must be split over the second, its rows or columns over the first, XLA multiplies the wrong matrices."),
    Hazard("cropped and padded", "wrong", platforms=CPU, fixed=(0, 12), page="lax-hazards.md#cropped-and-padded-on-one-axis",
        holds=is_conv(lambda conv, e: by_eigen(conv, e) and any(low < 0 < high and left > 0 for low, high, left in conv.crops())),
        why="If an axis is cropped at its beginning (negative padding, which gradients have) and padded at its end, XLA's CPU "
            "convolution can read beyond the row and the array."),
    Hazard("crop that leaves nothing", "crash", platforms=CPU, page="lax-hazards.md#a-crop-that-leaves-nothing",
        holds=is_conv(lambda conv, e: leaves_nothing(conv)),
        why="If negative padding leaves no row of the input, XLA's CPU convolution reads far outside of the array and can abort the "
            "process."),
    Hazard("matmul with one number, reduced", "wrong", platforms=CPU,
        page="lax-hazards.md#a-matmul-with-one-number-everywhere-then-a-reduction", holds=lambda equation: equation.one_number_reduced,
        fix="use number * x.sum(-1, keepdims=True) instead of the matmul, or lax.reduce_precision(y, 8, 23) on its float32 result y",
        why="If the second factor of a matmul, or the filter of a convolution, holds the same number everywhere, and a result of 4,096 "
            "elements or more is reduced in the same jit, XLA's CPU backend fuses them into one kernel, whose results are wrong, infinite "
            "or NaN."),
    Hazard("narrow matmul, reduced", "wrong", platforms=CPU, fixed=(0, 11),
        page="lax-hazards.md#a-matmul-with-a-few-columns-then-a-reduction", holds=lambda equation: equation.narrow_reduced,
        why="If many rows (more than 128 KiB in one column) are multiplied by a few columns, as in a vmap over a small matrix and a "
            "vector, and the result is reduced in the same jit, XLA's CPU backend fuses them into one kernel, which is wrong for the "
            "rows beyond."),
    Hazard("integer convolution on a GPU", "crash", platforms=GPUS, page="doctor.md#integer-convolutions-on-gpus",
        holds=is_conv(lambda conv, e: e.integers and not (e.dtypes[0] == e.dtypes[1] == e.dtype == jnp.int8)),
        why="XLA's GPU compiler does not support convolutions of integers, except int8 with an int8 result."),
    Hazard("int8 convolution that saturates", "wrong", platforms=GPUS, page="doctor.md#integer-convolutions-on-gpus",
        holds=is_conv(lambda conv, e: e.dtypes[0] == e.dtypes[1] == e.dtype == jnp.int8),
        why="On GPUs cuDNN saturates the sums of int8 convolutions, which wrap around elsewhere. With groups it returns a wrong channel."),
    Hazard("bfloat16 conv1d with stride and dilation", "crash", platforms=("cuda",),
        page="doctor.md#bfloat16-convolutions-along-one-axis",
        holds=is_conv(lambda conv, e: jnp.bfloat16 in e.dtypes and len(conv.input) == 1 and conv.strides[0] > 1 < conv.rhs_dilation[0]),
        fix="use jaxext's operation with implementation='triton', or float32",
        why="On GPUs a bfloat16 convolution along one axis that is both strided and dilated fails with a CUDA error."),
    Hazard("batch of grouped convolutions", "slow", page="lax-hazards.md#a-batch-of-grouped-convolutions", cost=gathered,
        holds=is_conv(lambda conv, e: conv.groups > 1 < conv.channels and conv.split("batch", "space")),
        why="XLA gathers the input of a convolution with several channels per group on every device, and convolves all of it there."),
    Hazard("groups split over devices", "slow", page="lax-hazards.md#vmap-over-a-split-axis", cost=gathered,
        holds=is_conv(lambda conv, e: conv.groups > 1 < conv.channels and conv.split("channels") and not conv.split("batch", "space")),
        why="vmap over images and filters becomes a grouped convolution. If the mapped axis or the groups are sharded, XLA gathers them."),
    Hazard("convolution in a loop", "slow", platforms=CPU, page="lax-hazards.md#convolutions-in-a-loop",
        holds=is_conv(lambda conv, e: e.in_loop and by_eigen(conv, e) and not conv.in_own_layout),
        why="Inside loops, such as lax.scan and lax.while_loop, XLA's CPU compiler uses its fast code only for convolutions in its own "
            "layout (NHWC, HWIO)."),
    Hazard("float32 multiplied as TF32", "note", platforms=("cuda",), page="doctor.md#float32-with-the-default-precision",
        holds=float32_at_most(lax.Precision.HIGH), fix=HIGHEST,
        why="With precision 'default' or 'high', GPUs since Ampere round float32 operands to TF32: 11 of 24 significant bits."),
    Hazard("float32 multiplied as bfloat16", "note", platforms=("tpu",), page="doctor.md#float32-with-the-default-precision",
        holds=float32_at_most(lax.Precision.DEFAULT), fix=HIGHEST,
        why="With the default precision, TPUs round float32 operands to bfloat16: 8 of 24 significant bits."),
)  # fmt: skip
# A product that jaxext would not compute as lax does has the first that holds.
PLANNED_HAZARDS = (
    Hazard("dilated input", "slow", page="doctor.md#transposed-convolutions-and-strided-gradients", cost=zeros, holds=dilated,
        why={
            "cpu": "XLA's CPU compiler has no fast code for this transposed convolution or strided gradient, and multiplies its zeros.",
            "cuda": f"XLA multiplies the zeros of a transposed convolution or a strided gradient. {FROM_STRUCTURE}",
        }),
    Hazard("depthwise convolution", "slow", page="doctor.md#depthwise-and-grouped-convolutions",
        holds=lambda call: in_several_groups(call) and call.sizes["C"] == 1 and call.sizes["G"] > 1,
        why={
            "cpu": "XLA's CPU compiler has no fast code for groups of one channel.",
            "cuda": f"With one channel per group cuDNN leaves most of its tiles empty. {FROM_STRUCTURE}",
        }),
    Hazard("per-example gradients", "slow", page="doctor.md#batched-filters-and-per-example-gradients",
        holds=lambda call: in_several_groups(call) and call.sizes["B"] > 1 and call.open == "w",
        why={
            "cpu": "lax computes per-example gradients by a grouped convolution, for which XLA's CPU compiler has no fast code.",
            "cuda": f"lax computes per-example filter gradients by a grouped convolution, with images as filters. {FROM_STRUCTURE}",
        }),
    Hazard("batched filters", "slow", page="doctor.md#batched-filters-and-per-example-gradients",
        holds=lambda call: in_several_groups(call) and call.sizes["B"] > 1,
        why={
            "cpu": "lax computes vmap over filters by a grouped convolution, for which XLA's CPU compiler has no fast code.",
            "cuda": f"lax computes vmap over filters by a grouped convolution, and moves the images beside the channels. {FROM_STRUCTURE}",
        }),
    Hazard("grouped convolution", "slow", page="doctor.md#depthwise-and-grouped-convolutions", holds=in_several_groups,
        why={
            "cpu": "XLA's CPU compiler has no fast code for groups.",
            "cuda": f"In gradients, groups of few channels leave most of cuDNN's tiles empty. {FROM_STRUCTURE}",
        }),
    Hazard("ragged matmul", "slow", page="doctor.md#ragged-matmuls", cost=all_groups, holds=lambda call: call.op.startswith("ragged"),
        why="lax multiplies every row by the matrix of every group, except where XLA has a kernel for it."),
    Hazard("another implementation is faster", "slow", page="implementations.md", holds=lambda call: True,
        why="jaxext prefers another implementation here: by its structure, its expected cost, or the measurements of `tune`."),
)  # fmt: skip
HAZARDS = EQUATION_HAZARDS + PLANNED_HAZARDS


def found_in(product: Equation | Planned, version: tuple[int, ...]) -> Iterator[Hazard]:
    """Yield the hazards of a product in a version of jax."""
    planned = isinstance(product, Planned)
    if planned and (product.as_lax or product.integers):
        return
    looked_at = product.call if planned else product
    hazards = (
        hazard
        for hazard in (PLANNED_HAZARDS if planned else EQUATION_HAZARDS)
        if product.platform in hazard.platforms and hazard.shows_on(version) and hazard.holds(looked_at)
    )
    yield from itertools.islice(hazards, 1 if planned else None)
