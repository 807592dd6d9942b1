"""The depthwise kernels, bit for bit against the definition in float64, for every role, on small integers.

Truth is written with the incidence of each axis, A[i, r, p] = 1 where stride·p + filter dilation·r = input dilation·i + low: nothing in it
knows of phases, strips or pieces.
"""

import dataclasses

import numpy as np
import pytest
from calls import Call, Suite, each

from jaxext.backends.triton.interpreter import DTYPES
from jaxext.kernels import depthwise
from jaxext.kernels.geometry import ConvProblem

ROLES = {"fprop": "y", "dgrad": "x", "wgrad": "w"}  # role -> the open slot
SLOTS = {"x": "BNDHWG", "w": "BGKTRS", "y": "BNOPQGK"}


Sizes = int | tuple[int, ...]


def problem(
    input: tuple[int, ...],
    filter: tuple[int, ...],
    *,
    G: int = 5,
    K: int = 1,
    N: int = 1,
    B: int = 1,
    stride: Sizes = 1,
    low: Sizes = 0,
    high: Sizes = 0,
    input_dilation: Sizes = 1,
    filter_dilation: Sizes = 1,
) -> ConvProblem:
    """Return a problem of role fprop in float32; sizes are of the last axes, one number for all of them or one for each."""
    rank = len(input)

    def three(value: Sizes, missing: int) -> tuple[int, int, int]:
        d, h, w = (missing,) * (3 - rank) + (value if isinstance(value, tuple) else (value,) * rank)
        return d, h, w

    def outputs(i, r, lo, hi, stride, di, dr):
        return max(0, (lo + (i - 1) * di + hi - (r - 1) * dr) // stride + 1)

    sizes = three(input, 1), three(filter, 1), three(low, 0), three(high, 0)
    steps = three(stride, 1), three(input_dilation, 1), three(filter_dilation, 1)
    o, p, q = map(outputs, *sizes, *steps)
    return ConvProblem(
        name=f"conv{rank}d_fprop",
        role="fprop",
        B=B,
        N=N,
        G=G,
        C=1,
        K=K,
        input=sizes[0],
        filter=sizes[1],
        output=(o, p, q),
        stride=steps[0],
        low=sizes[2],
        input_dilation=steps[1],
        filter_dilation=steps[2],
        dtypes=("fp32", "fp32", "fp32"),
        precision="ieee",
        arch=90,
    )


CASES = {
    "causal k4": problem((13,), (4,), G=10, N=2, low=3),
    "causal k2": problem((9,), (2,), G=8, N=3, low=1),
    "causal k3 dilated by 4": problem((19,), (3,), G=3, low=8, filter_dilation=4),
    "k31, a row in pieces": problem((17,), (31,), G=4, low=15, high=15),
    "k5 stride 3 dilation 2": problem((23,), (5,), stride=3, filter_dilation=2, low=1, high=2),
    "k4 stride 2 dilation 2": problem((15,), (4,), stride=2, filter_dilation=2, low=3),
    "3x3": problem((5, 6), (3, 3), G=7, N=2, low=1, high=1),
    "3x3 stride 2": problem((7, 6), (3, 3), G=6, stride=2, low=(0, 1), high=1),
    "7x7": problem((4, 7), (7, 7), G=4, low=3, high=3),
    "1x1 stride 2": problem((4, 5), (1, 1), G=3, stride=2),
    "2x3, strides and dilations differ": problem((8, 9), (2, 3), stride=(1, 2), filter_dilation=(3, 1), low=(1, 0), high=(2, 1)),
    "negative padding": problem((7, 8), (3, 2), low=(-2, 1), high=(1, -3)),
    "transposed 4x4": problem((3, 4), (4, 4), G=4, input_dilation=2, low=2, high=2),
    "transposed 3, stride 2 of dilation 3": problem((6,), (3,), input_dilation=3, stride=2, low=1, high=2),
    "phases without taps": problem((5,), (2,), input_dilation=3, low=1, high=1),
    "taps that meet nothing": problem((5,), (3,), input_dilation=2, stride=2, low=1, high=1),
    "both dilated": problem((6,), (3,), input_dilation=2, filter_dilation=2, low=1, high=2),
    "multiplier 2": problem((5, 4), (3, 2), G=3, K=2, low=1, high=1),
    "multiplier 3 causal": problem((9,), (4,), G=4, K=3, N=2, low=3),
    "batched filters": problem((6,), (3,), G=4, B=3, N=2, low=1, high=1),
    "batched filters, multiplier": problem((4, 3), (2, 2), G=2, K=2, B=2, stride=2, low=1),
    "3x2x3": problem((3, 4, 3), (3, 2, 3), G=4, low=1, high=(1, 0, 1)),
    "3-D stride 2": problem((4, 3, 5), (2, 1, 3), G=2, stride=2, low=(0, 0, 1), high=1),
    "all of size 1": problem((1,), (1,), G=1),
    "one channel": problem((6, 5), (3, 3), G=1, N=2, low=1, high=1),
    "more channels than a block": problem((3,), (2,), G=70, low=1),
    "no taps": problem((4,), (0,), G=3),
    "no images": problem((4,), (3,), G=3, N=0),
    "no channels": problem((4,), (3,), G=0),
    "no source at all": problem((2,), (3,), G=3, low=-2, high=5),
}


def of_role(case: ConvProblem, role: str, dtype: str = "fp32", **changes) -> ConvProblem:
    return dataclasses.replace(case, role=role, name=case.name.replace("fprop", role), dtypes=(dtype,) * 3, **changes)


def shape_of(case: ConvProblem, slot: str) -> tuple[int, ...]:
    return case.shapes[slot]


def operands_of(case: ConvProblem, integers: bool = True) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(sum(map(ord, case.name)))
    slots = [slot for slot in SLOTS if slot != ROLES[case.role]]

    def draw(slot, dtype):
        shape = shape_of(case, slot)
        return (rng.integers(-3, 4, shape) if integers else rng.normal(size=shape)).astype(DTYPES[dtype])

    return {slot: draw(slot, dtype) for slot, dtype in zip(slots, case.dtypes, strict=False)}


def truth(case: ConvProblem, operands) -> np.ndarray:
    def incidence(axis):
        i, r, p = np.ogrid[: case.input[axis], : case.filter[axis], : case.output[axis]]
        meets = case.stride[axis] * p + case.filter_dilation[axis] * r == case.input_dilation[axis] * i + case.low[axis]
        return meets.astype(np.float64)

    open_slot = ROLES[case.role]
    arrays = {slot: x.astype(np.float64).reshape(x.shape[: len(SLOTS[slot])]) for slot, x in operands.items()}
    terms = ",".join([*(SLOTS[slot] for slot in arrays), "DTO", "HRP", "WSQ"])
    y = np.einsum(f"{terms}->{SLOTS[open_slot]}", *arrays.values(), *map(incidence, range(3)), optimize=True)
    return y.reshape(shape_of(case, open_slot))


LARGE = {  # problems of models, in bfloat16
    "mamba": problem((2048,), (4,), G=5376, N=8, low=3),
    "hyena": problem((16384,), (4,), G=12288, low=3),
    "convnext 56": problem((56, 56), (7, 7), G=96, N=128, low=3, high=3),
    "convnext 7": problem((7, 7), (7, 7), G=768, N=128, low=3, high=3),
    "mobilenet stride 2": problem((56, 56), (3, 3), G=144, N=128, stride=2, high=1),
    "efficientnet 5x5": problem((28, 28), (5, 5), G=240, N=128, low=2, high=2),
    "wavenet": problem((16384,), (2,), G=64, N=4, low=512, filter_dilation=512),
    "video": problem((16, 28, 28), (3, 3, 3), G=64, N=2, low=1, high=1),
    "k31": problem((4096,), (31,), G=256, N=2, low=15, high=15),
}


class DepthwiseCall(Call):
    kernel, open = "depthwise", ROLES

    def small(self) -> depthwise.Config:
        """Tiles of 4 rows and 8 channels: the interpreter takes a time per operation, whatever the size, and edges are to be met."""
        lanes = 2 if self.problem.role == "wgrad" else 1
        return depthwise.Config(tile_g=8, strips=8 // lanes, strip=3, pieces=lanes, num_warps=1)

    def sums(self, operands) -> np.ndarray:
        return truth(self.problem, {slot: operands[slot] for slot in SLOTS if slot in operands})


# Of a dilated, strided row: neighbours within a strip are not neighbours in memory.
STRIDED = problem((29,), (3,), G=3, stride=2, filter_dilation=3, low=2, high=3)
SPLITS = {"causal k4": 2, "3x3 stride 2": 3, "transposed 4x4": 2, "batched filters, multiplier": 2, "causal k2": 7}  # some parts are empty
PICKED = each(
    lambda role, name: DepthwiseCall.picked(of_role(CASES[name], role, "bf16")),
    ROLES,
    ["causal k4", "3x3", "transposed 4x4", "multiplier 2"],
)
IN_PARTS = each(lambda name: DepthwiseCall.smallest(of_role(CASES[name], "wgrad"), splits=SPLITS[name]), SPLITS)
STRIPS = "2147483648 strips, it takes fewer than 2146435072"
PLACES = r"places up to \d+ along an axis, it takes those below 1073741824"


class TestDepthwise(Suite):
    call, most = DepthwiseCall, 6
    geometry = each(lambda role, name: DepthwiseCall(of_role(CASES[name], role)), ROLES, CASES)
    configs = [*each(lambda role, n: DepthwiseCall.smallest(of_role(STRIDED, role), strip=n), ROLES, [1, 2, 5, 8]), *PICKED, *IN_PARTS]
    same_bits = [*PICKED, *IN_PARTS]
    rounding = each(
        lambda role, dtypes: DepthwiseCall(dataclasses.replace(of_role(CASES["3x3 stride 2"], role, N=2), dtypes=dtypes)),
        ROLES,
        [("bf16",) * 3, ("fp16",) * 3, ("fp32", "bf16", "fp32"), ("fp16", "bf16", "fp32"), ("bf16", "fp32", "bf16")],
    )
    # a kernel for slightly other numbers gives another result, or leaves some of it unwritten
    wrong_launches = [
        (DepthwiseCall(CASES["3x3"]), change, "wrong|never written|written beside")
        for change in [{"low": (0, 1, 0)}, {"stride": (1, 1, 2)}, {"filter_dilation": (1, 2, 1)}, {"N": 1}]
    ]
    # numbers beyond 32 bits became negative, below every bound that is checked: a strip, or a place far outside, counted as one inside
    refused_problems = [
        *(
            (DepthwiseCall(of_role(CASES["3x3"], "fprop", dtype)), f"^dtype {dtype}, it takes fp32, bf16, fp16$")
            for dtype in ["i8", "fp8e4nv"]
        ),
        (DepthwiseCall(CASES["3x3"]).with_problem(C=2), "^2 input channels per group, it takes 1$"),
        (DepthwiseCall(CASES["3x3"]).with_problem(arch=75), "compute capability 7.5, want one of 8.0"),
        *(
            (DepthwiseCall(of_role(case, role)), f"^{reason}$")
            for case, reason in [
                (problem((2**28,), (2,), N=8, low=1), STRIPS),
                (problem((4,), (2,), N=2**22, low=512, filter_dilation=512), STRIPS),  # they are shorter than their dilation
                (problem((4,), (3,), low=2**30, filter_dilation=2**29), PLACES),
                (problem((2**30, 2), (1, 1), stride=(3, 1)), PLACES),
                (problem((2**31 + 8,), (1,), high=-(2**31)), PLACES),
            ]
            for role in ROLES
        ),
    ]
    LAST = of_role(problem((2**19,), (1,), N=2**12 - 4, G=2), "wgrad")  # the last part of its sum has a number
    refused_configs = [
        (DepthwiseCall.picked(of_role(LARGE["mamba"], "fprop", "bf16"), strip=64), r"needs \d+ registers per thread, there are 255"),
        (DepthwiseCall.smallest(LAST, strip=1, splits=2**20), r"numbers \d+ strips, the limit is 2\^31"),
        *(
            (DepthwiseCall.smallest(of_role(CASES["3x3"], role), **changes), reason)
            for role, changes, reason in [
                ("fprop", {"tile_g": 12}, "tile_g is 12, want a power of two"),
                ("wgrad", {"pieces": 0}, "pieces is 0, want a power of two"),
                ("fprop", {"strip": 0}, "strip is 0, want at least 1"),
                ("dgrad", {"splits": 2}, "pieces=1 and splits=2, want 1 for dgrad"),
                ("fprop", {"strips": 256}, r"Config\(.*\) needs \d+ registers per thread, there are 255"),
            ]
        ),
    ]
    candidates = [
        *each(
            lambda role, dtype, name: [of_role(LARGE[name], role, dtype, arch=arch) for arch in (80, 86, 89, 90, 100, 120)],
            ROLES, depthwise.FLOATS, LARGE,
        ),
        pytest.param([LAST], id="last part"),
    ]  # fmt: skip

    def check_candidate(self, problem, config, launch):
        """A thread loads 16 bytes of channels."""
        assert (launch.name, launch.num_warps) == (problem.name, config.num_warps)
        if problem.G >= 64:
            numbers = 4 if problem.dtypes[0] == "fp32" else 2
            assert config.strips * config.pieces * config.tile_g * numbers == 16 * 32 * config.num_warps


@pytest.mark.parametrize("role", ["fprop", "dgrad"])
@pytest.mark.parametrize("taps, dilation", [(4, 1), (31, 1), (21, 2)])
def test_an_infinity_reaches_only_targets_that_meet_it(taps, dilation, role):
    """An infinity in the future of a causal convolution made NaN of the past if the last piece of a row of the filter was not full."""
    case = of_role(problem((24,), (taps,), G=2, low=taps - 1, high=dilation - 1, input_dilation=dilation), role)
    operands = operands_of(case)
    source = operands["x" if role == "fprop" else "y"]
    source[...] = 0
    source[:, :, :, :, 12] = 1
    met = truth(case, operands | {"w": np.ones_like(operands["w"])}) > 0
    source[source > 0] = np.inf
    with np.errstate(invalid="ignore"):
        (got,) = DepthwiseCall(case).compute(operands)
    np.testing.assert_array_equal(np.isfinite(got), ~met)


def test_a_multiprocessor_has_enough_to_do():
    """The filter gradient of a long sum is split, that of a short one is not."""
    long, short = of_role(LARGE["convnext 56"], "wgrad", "bf16"), of_role(CASES["3x3"], "wgrad", "bf16")
    assert 132 <= depthwise.grid(long, depthwise.candidates(long)[0])[0] <= 6 * 132
    assert depthwise.candidates(short)[0].splits == 1
