"""kernels/conv in Triton's interpreter: every role, dtype and geometry against the definition in float64, and what it refuses.

Operands are small integers, whose sums are exact in float32 in any order: a result is right bit for bit or it is wrong.  The tiles are
the smallest, so that small problems have many.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from calls import Call, Suite, each, factors

from jaxext.core.window import Window
from jaxext.kernels import conv
from jaxext.kernels.conv import Config
from jaxext.kernels.geometry import ConvProblem
from jaxext.kernels.launch import PRODUCTS_OF_PARTS

OPEN = {"fprop": "y", "dgrad": "x", "wgrad": "w"}
ROLES = tuple(OPEN)

CASES = {
    "same": dict(),
    "one_pixel": dict(input=(1, 1), filter=(1, 1), padding=((0, 0), (0, 0)), C=1, K=1),
    "many_channels": dict(N=1, input=(2, 3), filter=(1, 2), padding=((0, 0), (0, 0)), C=35, K=18),
    "whole_tiles": dict(N=2, input=(4, 4), filter=(1, 2), padding=((0, 0), (0, 1)), C=16, K=32),
    "strided": dict(stride=(2, 2)),
    "stride_beyond_filter": dict(stride=(3, 2), filter=(2, 1), padding=((0, 0), (0, 0))),
    "asymmetric": dict(padding=((2, 0), (0, 3)), filter=(2, 3)),
    "cropped": dict(padding=((-1, 2), (1, -2))),
    "beside_the_input": dict(input=(2, 3), padding=((4, 1), (0, 4))),
    "filter_dilated": dict(filter_dilation=(2, 3), padding=((2, 2), (3, 3))),
    "transposed": dict(input=(3, 4), filter=(4, 4), input_dilation=(2, 2), padding=((2, 2), (2, 2))),
    "all_strides": dict(input=(5, 4), stride=(2, 3), input_dilation=(3, 2), filter_dilation=(2, 1), padding=((1, 2), (2, 1))),
    "taps_that_meet_nothing": dict(stride=(2, 4), input_dilation=(2, 2), filter=(3, 2)),
    "phases_without_targets": dict(input=(2, 2), input_dilation=(5, 1), filter=(1, 1), stride=(4, 1), padding=((0, 0), (0, 0))),
    "groups": dict(N=1, G=3, C=3, K=2, input=(3, 4), filter=(2, 2)),
    "groups_strided": dict(G=2, C=2, K=3, stride=(2, 1)),
    "batch": dict(B=3, N=1, G=2, input=(3, 4)),
    "causal_1d": dict(input=(13,), filter=(3,), padding=((4, 0),), filter_dilation=(2,)),
    "pointwise_1d": dict(input=(9,), filter=(1,), padding=((0, 0),), stride=(2,)),
    "3d": dict(N=1, input=(3, 2, 4), filter=(2, 2, 3), padding=((1, 0), (0, 0), (1, 1)), stride=(1, 1, 2)),
    "3d_transposed": dict(N=1, input=(2, 2, 2), filter=(2, 1, 2), padding=((1, 0), (0, 0), (1, 1)), input_dilation=(2, 1, 2)),
    "no_images": dict(N=0),
    "no_input_channels": dict(C=0),
    "no_output_channels": dict(K=0),
    "no_input": dict(input=(0, 3)),
    "no_taps": dict(filter=(0, 2)),
    "no_output": dict(input=(2, 3), filter=(3, 2), padding=((0, 0), (0, 0))),
}

PLAIN, PACKED = Config(tile_m=16, tile_n=16, tile_k=16), Config(tile_m=32, tile_n=16, tile_k=32, packed=True)

FLOATS = ("fp32", "bf16", "fp16")
EIGHTS = ("fp8e4nv", "fp8e5")
DTYPES_OF_A_CALL = (
    *((x, x, y) for x in FLOATS for y in FLOATS),
    *((x, y, "fp32") for x in FLOATS for y in FLOATS if x != y),
    *((x, y, "fp32") for x in EIGHTS for y in EIGHTS),
    *(("fp8e5", x, x) for x in FLOATS),
    ("i8", "i8", "i32"),
    ("i8", "i8", "i8"),
)


def a_problem(
    role,
    *,
    B=1,
    N=2,
    G=1,
    C=3,
    K=5,
    input=(4, 5),
    filter=(3, 3),
    dtypes=("bf16", "bf16", "fp32"),
    precision="tf32",
    arch=90,
    **given,
) -> ConvProblem:
    rank = len(input)
    ones = (1,) * rank
    window: dict[str, Any] = dict(stride=ones, padding=((1, 1),) * rank, input_dilation=ones, filter_dilation=ones) | given
    output = Window(input=input, filter=filter, **window).output

    def three(sizes, missing=1) -> Any:
        return (missing,) * (3 - rank) + tuple(sizes)

    return ConvProblem(
        name=f"conv{rank}d_{role}", role=role, B=B, N=N, G=G, C=C, K=K, input=three(input), filter=three(filter), output=three(output),
        stride=three(window["stride"]), low=three((low for low, _ in window["padding"]), 0), input_dilation=three(window["input_dilation"]),
        filter_dilation=three(window["filter_dilation"]), dtypes=dtypes, precision=precision, arch=arch,
    )  # fmt: skip


def shape(problem: ConvProblem, slot: str) -> tuple[int, ...]:
    return problem.shapes[slot]


def some_operands(problem: ConvProblem, integers: bool = True) -> dict[str, np.ndarray]:
    return factors(problem, OPEN[problem.role], integers)


def true(problem: ConvProblem, operands) -> np.ndarray:
    """The definition: for each tap, every output position and the input position that it meets there."""
    arrays = {slot: x.astype(np.float64) for slot, x in operands.items()}
    labels = {"x": "bniGc", "w": "bGkc", "y": "bniGk"}
    open = OPEN[problem.role]
    result = np.zeros(shape(problem, open))
    equation = f"{','.join(labels[slot] for slot in arrays)}->{labels[open]}"
    for tap in itertools.product(*map(range, problem.filter)):
        meetings = list(itertools.product(*(_meetings(problem, axis, r) for axis, r in enumerate(tap))))
        outputs, inputs = (tuple(np.array([[ps[i] for ps in m] for m in meetings], int).reshape(-1, 3).T) for i in (0, 1))
        places = {"x": (slice(None), slice(None), *inputs), "w": (*[slice(None)] * 3, *tap), "y": (slice(None), slice(None), *outputs)}
        result[places[open]] += np.einsum(equation, *(x[places[slot]] for slot, x in arrays.items()))
    return result


def _meetings(p: ConvProblem, axis: int, r: int) -> list[tuple[int, int]]:
    places = ((o, p.stride[axis] * o + p.filter_dilation[axis] * r - p.low[axis]) for o in range(p.output[axis]))
    di = p.input_dilation[axis]
    return [(o, place // di) for o, place in places if place % di == 0 and 0 <= place // di < p.input[axis]]


# Plain tiles have one tap each and take six times as long as packed ones.  Of the cases that resemble others, plain tiles are a slow test.
SLOW = {"one_pixel", "whole_tiles", "stride_beyond_filter", "asymmetric", "beside_the_input", "groups_strided", "pointwise_1d", "no_input"}
SLOW |= {"3d_transposed", "no_output_channels"}
assert SLOW < CASES.keys()


NETWORK = {
    "resnet_3x3": dict(N=32, input=(56, 56), C=64, K=64),
    "resnet_late": dict(N=32, input=(7, 7), C=512, K=512),
    "pointwise": dict(N=32, input=(56, 56), filter=(1, 1), padding=((0, 0), (0, 0)), C=64, K=256),
    "stem": dict(N=32, input=(224, 224), filter=(7, 7), stride=(2, 2), padding=((3, 3), (3, 3)), C=3, K=64),
    "resnext": dict(N=32, input=(56, 56), G=32, C=4, K=4),
    "transposed": dict(N=16, input=(32, 32), filter=(4, 4), input_dilation=(2, 2), padding=((2, 2), (2, 2)), C=64, K=64),
    "per_example": dict(B=64, N=1, input=(28, 28), C=64, K=64),
    "video": dict(N=4, input=(16, 56, 56), filter=(3, 3, 3), C=64, K=64),
}
KINDS: list[dict[str, Any]] = [
    *(dict(arch=arch) for arch in (80, 86, 89, 90, 100, 120)),
    *(dict(dtypes=("fp32",) * 3, precision=precision) for precision in ("tf32", "tf32x3", "bf16x3", "bf16x6", "ieee")),
    *(dict(dtypes=("i8", "i8", "i32")), dict(dtypes=("fp8e5", "fp8e5", "bf16"))),
]


class ConvCall(Call):
    kernel, open = "conv", OPEN

    def small(self) -> Config:
        return PLAIN

    def sums(self, operands) -> np.ndarray:
        return true(self.problem, {slot: operands[slot] for slot in "xwy" if slot in operands})


def a_call(role, case: dict[str, Any], config=PACKED, **changes) -> ConvCall:
    return ConvCall(a_problem(role, **case), dataclasses.replace(config, **changes))


def refuses_packing(problem: ConvProblem) -> bool:
    return problem.role == "wgrad" and any(di > 1 for di in problem.input_dilation)


FEW = dict(B=2, N=1, G=4, C=3, K=2, stride=(1, 2))
DEEP = dict(B=2, N=1, C=9, K=9, input=(6, 7), filter=(3, 2), stride=(1, 2))  # three to six steps
SPLIT = Config(tile_m=16, tile_n=32, tile_k=16, packed=True)
INTEGERS = ("i8", "i8", "i32")
# The phases of a transposed convolution have taps of different numbers, some none.
PHASES = dict(input=(3, 3), input_dilation=(3, 1), stride=(1, 3), filter=(2, 2))
SHORT = dict(input=(9,), filter=(3,), padding=((1, 1),), N=1)


class TestConv(Suite):
    call, most = ConvCall, 100
    geometry = [
        *each(lambda role, name, _: a_call(role, CASES[name], PLAIN), ROLES, CASES, ["plain"], slow=lambda role, name, _: name in SLOW),
        *each(
            lambda role, name, _: None if refuses_packing((call := a_call(role, CASES[name])).problem) else call, ROLES, CASES, ["packed"]
        ),
    ]
    dtypes = each(lambda role, dtypes: a_call(role, dict(input=(3, 4), stride=(2, 1), dtypes=dtypes)), ROLES, DTYPES_OF_A_CALL)
    configs = [
        *each(lambda role, n, config: a_call(role, FEW, config, groups=n), ROLES, [2, 4], [PLAIN, PACKED]),
        *each(
            lambda role, dtypes, splits: a_call(role, DEEP | {"dtypes": dtypes}, SPLIT, splits=splits),
            ROLES, [("bf16", "bf16", "bf16"), ("fp32", "bf16", "fp32")], [2, 5],
        ),
        *each(lambda role: a_call(role, dict(dtypes=INTEGERS), splits=2), ROLES),
        *each(lambda role: a_call(role, PHASES, PLAIN, splits=3), ROLES),
        *each(lambda role: ConvCall.picked(a_problem(role, N=1, stride=(2, 2))), ROLES),
    ]  # fmt: skip
    rounding = each(lambda role, dtype: a_call(role, dict(stride=(2, 1), dtypes=(dtype,) * 3, precision="ieee")), ROLES, FLOATS)
    same_bits = each(lambda role, splits: a_call(role, dict(dtypes=("fp32",) * 3), splits=splits), ROLES, [1, 3])
    wrong_launches = each(lambda role: (a_call(role, {}), dict(low=(0, 1, 2)), "are wrong"), ROLES)
    refused_problems = [
        (a_call("fprop", change, PLAIN), f"^{reason}")
        for change, reason in [
            (dict(dtypes=("fp64", "fp64", "fp64")), "operands fp64 and fp64 into fp64"),
            (dict(dtypes=("i8", "bf16", "fp32")), "operands i8 and bf16 into fp32"),
            (dict(dtypes=("i8", "i8", "fp32")), "int8 gives int8 or int32, not fp32"),
            (dict(dtypes=("fp8e5", "fp8e5", "fp32"), arch=80), "8-bit floats need compute capability 8.9, got 8.0"),
            (dict(arch=75), "compute capability 7.5, want one of"),
            (dict(input=(1 << 16, 1 << 15)), "4294967296 positions, it takes fewer than"),
            (dict(C=1 << 14, K=1 << 14), "a filter of 2415919104 elements, it takes fewer than"),
        ]
    ]
    # numbers that 32 bits do not hold: they were taken, and wrapped, or did not compile, or had no config at all
    refused_problems += [
        (a_call(role, SHORT | change, PLAIN), rf"^({reason}|\d+ positions, it takes fewer)")
        for change, reason in [
            (dict(input=(2**32,), stride=(4,)), "a spatial axis that reaches to 4294967"),
            (dict(input=(2**32,), stride=(4,), padding=((0, -(2**32) + 9),)), "a spatial axis that reaches to 4294967"),
            (dict(stride=(2**31,)), "a spatial axis that reaches to 2147483648"),
            (dict(stride=(2**40,), padding=((2**31, 2**31),)), "a spatial axis that reaches to"),
            (dict(filter_dilation=(2**30,), padding=((0, 2**31),)), "a spatial axis that reaches to"),
            (dict(input_dilation=(2**30,), stride=(2**29,)), "a spatial axis that reaches to"),
            (dict(C=2**16, K=2**15 - 1, filter=(1,)), "a filter of 2147418112 elements, it takes fewer than"),
            (dict(B=2**26, G=64, C=64, K=64), r"\d+ small tiles, and no larger ones that suit it are 2147483647 or fewer"),
        ]
        for role in ROLES
    ]
    refused_configs = [
        (ConvCall.picked(a_problem("fprop", **NETWORK["resnet_3x3"]), num_stages=20), r"needs \d+ bytes of shared memory, .* 232448"),
        *(
            (a_call("fprop", dict(G=4), PLAIN, **change), reason)
            for change, reason in [
                (dict(tile_m=24), "tile_m is 24, want a power of two, at least 16"),
                (dict(tile_k=8), "tile_k is 8, want a power of two, at least 16"),
                (dict(groups=3), "has 3 groups to a tile, which do not divide 4"),
                (dict(tile_m=256, tile_n=256, tile_k=128, num_warps=16), "needs 393216 bytes of shared memory, .* 9.0 has 232448"),
                (dict(tile_m=256, tile_n=128), "has 256 sums to a thread, registers hold 128"),
            ]
        ),
        *(
            (a_call("wgrad", case), "packed, but an input dilation gives each tap its own targets")
            for case in CASES.values()
            if refuses_packing(a_problem("wgrad", **case))
        ),
    ]  # fmt: skip
    tensor_memory = each(
        lambda precision: a_call(
            "fprop", dict(dtypes=("fp32",) * 3, precision=precision, arch=100), PLAIN, tile_m=128, tile_n=256, num_warps=16
        ),
        PRODUCTS_OF_PARTS,
    )
    long_sums_of_integers = [(a_problem("wgrad", N=32, input=(112, 112), C=64, K=64, dtypes=INTEGERS), 32 * 112 * 112)]
    candidates = each(lambda role, name: [a_problem(role, **NETWORK[name], **kind) for kind in KINDS], ROLES, NETWORK)


@pytest.mark.parametrize(
    "case, result",
    [(dict(stride=(2, 1)), "i8"), (dict(stride=(2, 1)), "i32"), (dict(N=1, G=4, C=1, K=1), "i8"), (dict(N=1, G=2, C=1, K=3), "i32")],
    ids=["dense_i8", "dense_i32", "depthwise_i8", "multiplier_i32"],
)
@pytest.mark.parametrize("role", ROLES)
def test_integers_of_any_size(role, case, result):
    """The whole range of int8: sums exceed it, and wrap in an int8 result as everywhere in XLA.  Groups of one channel are such products
    too, since the depthwise kernels add up in float32."""
    call = a_call(role, dict(input=(3, 4), filter=(3, 2), **case, dtypes=("i8", "i8", result)), splits=2)
    shapes = {slot: x.shape for slot, x in call.operands().items()}
    operands = {slot: np.random.default_rng(i).integers(-128, 128, shape).astype(np.int8) for i, (slot, shape) in enumerate(shapes.items())}
    assert np.abs(call.sums(operands)).max() > 127
    for each_config in (call, ConvCall.picked(call.problem)):
        each_config.check(operands=operands)


def test_picks_suit_their_networks():
    def picks(name):
        return {role: conv.candidates(a_problem(role, **NETWORK[name]))[0] for role in ROLES}

    assert picks("stem")["fprop"].packed and picks("stem")["wgrad"].packed, "three channels fill no tile"
    assert all(config.groups > 1 for config in picks("resnext").values()), "nor do groups of four"
    assert picks("resnet_3x3")["wgrad"].splits > 1, "one filter is few tiles"
    assert picks("resnet_3x3")["fprop"].splits == 1
