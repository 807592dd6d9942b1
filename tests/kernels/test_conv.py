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
from cases import random
from harness import check, run, skip_what_is_overwritten

from jaxext.backends.triton.interpreter import DTYPES
from jaxext.forms.window import Window
from jaxext.kernels import conv
from jaxext.kernels.conv import Config
from jaxext.kernels.geometry import ConvProblem

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


def shape(p: ConvProblem, slot: str) -> tuple[int, ...]:
    return {"x": (p.B, p.N, *p.input, p.G, p.C), "w": (p.B, p.G, p.K, *p.filter, p.C), "y": (p.B, p.N, *p.output, p.G, p.K)}[slot]


def some_operands(problem: ConvProblem, integers: bool = True) -> dict[str, np.ndarray]:
    slots = [slot for slot in "xwy" if slot != OPEN[problem.role]]
    return {
        slot: random(shape(problem, slot), DTYPES[dtype], seed, integers)
        for seed, (slot, dtype) in enumerate(zip(slots, problem.dtypes, strict=False))
    }


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


def compute(problem: ConvProblem, config: Config, operands) -> np.ndarray:
    skip_what_is_overwritten(conv, problem)
    return run(conv.launch(problem, config), operands, shape(problem, OPEN[problem.role]), problem.dtypes[2])


def check_exactly(problem: ConvProblem, config: Config) -> None:
    operands = some_operands(problem)
    check(compute(problem, config, operands), true(problem, operands))


def refuses_packing(problem: ConvProblem) -> bool:
    return problem.role == "wgrad" and any(di > 1 for di in problem.input_dilation)


# Plain tiles have one tap each and take six times as long as packed ones.  Of the cases that resemble others, plain tiles are a slow test.
SLOW = {"one_pixel", "whole_tiles", "stride_beyond_filter", "asymmetric", "beside_the_input", "groups_strided", "pointwise_1d", "no_input"}
SLOW |= {"3d_transposed", "no_output_channels"}


def test_the_slow_cases_are_cases():
    assert SLOW < CASES.keys()


@pytest.mark.parametrize(
    ("name", "config"),
    [
        *(pytest.param(name, PLAIN, id=f"{name}-plain", marks=pytest.mark.slow if name in SLOW else ()) for name in CASES),
        *(pytest.param(name, PACKED, id=f"{name}-packed") for name in CASES),
    ],
)
@pytest.mark.parametrize("role", ROLES)
def test_geometry(role, name, config):
    problem = a_problem(role, **CASES[name])
    if config.packed and refuses_packing(problem):
        with pytest.raises(ValueError, match="packed, but an input dilation gives each tap its own targets"):
            conv.launch(problem, config)
    else:
        check_exactly(problem, config)


@pytest.mark.parametrize("dtypes", DTYPES_OF_A_CALL, ids="_".join)
@pytest.mark.parametrize("role", ROLES)
def test_dtypes(role, dtypes):
    check_exactly(a_problem(role, input=(3, 4), stride=(2, 1), dtypes=dtypes), PACKED)


@pytest.mark.parametrize("config", [PLAIN, PACKED], ids=["plain", "packed"])
@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("role", ROLES)
def test_groups_that_share_a_tile(role, groups, config):
    check_exactly(a_problem(role, B=2, N=1, G=4, C=3, K=2, stride=(1, 2)), dataclasses.replace(config, groups=groups))


@pytest.mark.parametrize("splits", [2, 5])
@pytest.mark.parametrize("dtypes", [("bf16", "bf16", "bf16"), ("fp32", "bf16", "fp32")], ids="_".join)
@pytest.mark.parametrize("role", ROLES)
def test_splits(role, dtypes, splits):
    """Of three to six steps, so some have nothing to add."""
    config = Config(tile_m=16, tile_n=32, tile_k=16, packed=True, splits=splits)
    check_exactly(a_problem(role, B=2, N=1, C=9, K=9, input=(6, 7), filter=(3, 2), stride=(1, 2), dtypes=dtypes), config)


@pytest.mark.parametrize("role", ROLES)
def test_splits_of_integers(role):
    check_exactly(a_problem(role, dtypes=("i8", "i8", "i32")), dataclasses.replace(PACKED, splits=2))


@pytest.mark.parametrize(
    "case, result",
    [(dict(stride=(2, 1)), "i8"), (dict(stride=(2, 1)), "i32"), (dict(N=1, G=4, C=1, K=1), "i8"), (dict(N=1, G=2, C=1, K=3), "i32")],
    ids=["dense_i8", "dense_i32", "depthwise_i8", "multiplier_i32"],
)
@pytest.mark.parametrize("role", ROLES)
def test_integers_of_any_size(role, case, result):
    """The whole range of int8: sums exceed it, and wrap in an int8 result as everywhere in XLA.  Groups of one channel are such products
    too, since the depthwise kernels add up in float32."""
    problem = a_problem(role, input=(3, 4), filter=(3, 2), **case, dtypes=("i8", "i8", result))
    shapes = {slot: x.shape for slot, x in some_operands(problem).items()}
    operands = {slot: np.random.default_rng(i).integers(-128, 128, shape).astype(np.int8) for i, (slot, shape) in enumerate(shapes.items())}
    want = true(problem, operands)
    assert np.abs(want).max() > 127
    for config in (dataclasses.replace(PACKED, splits=2), conv.candidates(problem)[0]):
        check(compute(problem, config, operands), want)


def test_long_sums_of_integers_are_split():
    """Tensor cores saturate (mma's satfinite) where a sum leaves int32; sums of shorter shares are added up by XLA, and wrap."""
    problem = a_problem("wgrad", N=32, input=(112, 112), C=64, K=64, dtypes=("i8", "i8", "i32"))
    positions = 32 * 112 * 112
    for config in conv.candidates(problem):
        assert -(-positions // config.splits) < 2**17
    with pytest.raises(ValueError, match="adds up 401408 products of int8, tensor cores may saturate with 131072"):
        conv.launch(problem, dataclasses.replace(conv.candidates(problem)[0], splits=1))


@pytest.mark.parametrize("role", ROLES)
def test_splits_of_phases(role):
    """The phases of a transposed convolution have taps of different numbers, some none."""
    check_exactly(a_problem(role, input=(3, 3), input_dilation=(3, 1), stride=(1, 3), filter=(2, 2)), dataclasses.replace(PLAIN, splits=3))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("role", ROLES)
def test_rounding(role, dtype):
    problem = a_problem(role, stride=(2, 1), dtypes=(dtype, dtype, dtype), precision="ieee")
    operands = some_operands(problem, integers=False)
    magnitudes = {slot: np.abs(x) for slot, x in operands.items()}
    check(compute(problem, PACKED, operands), true(problem, operands), true(problem, magnitudes))


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("role", ROLES)
def test_same_bits_twice(role, splits):
    problem = a_problem(role, dtypes=("fp32", "fp32", "fp32"))
    operands = some_operands(problem, integers=False)
    once, again = (compute(problem, dataclasses.replace(PACKED, splits=splits), operands) for _ in range(2))
    assert once.tobytes() == again.tobytes()


@pytest.mark.parametrize("role", ROLES)
def test_the_picked_config(role):
    problem = a_problem(role, N=1, stride=(2, 2))
    check_exactly(problem, conv.candidates(problem)[0])


@pytest.mark.parametrize("role", ROLES)
def test_a_wrong_geometry_is_found(role):
    problem = a_problem(role)
    operands = some_operands(problem)
    shifted = dataclasses.replace(problem, low=(0, 1, 2))
    with pytest.raises(AssertionError, match="are wrong"):
        check(compute(shifted, PACKED, operands), true(problem, operands))


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(tile_m=24), "tile_m is 24, want a power of two, at least 16"),
        (dict(tile_k=8), "tile_k is 8, want a power of two, at least 16"),
        (dict(groups=3), "has 3 groups to a tile, which do not divide 4"),
        (
            dict(tile_m=256, tile_n=256, tile_k=128, num_warps=16),
            "needs 393216 bytes of shared memory, compute capability 9.0 has 232448",
        ),
        (dict(tile_m=256, tile_n=128), "has 256 sums to a thread, registers hold 128"),
    ],
)
def test_configs_that_do_not_fit(change, message):
    with pytest.raises(ValueError, match=f"conv2d_fprop: .*{message}"):
        conv.launch(a_problem("fprop", G=4), dataclasses.replace(PLAIN, **change))


@pytest.mark.parametrize("precision", ["tf32x3", "bf16x3", "bf16x6"])
def test_sums_of_parts_that_exceed_tensor_memory_are_refused(precision):
    """Triton would make an empty kernel of them."""
    problem = a_problem("fprop", dtypes=("fp32",) * 3, precision=precision, arch=100)
    config = conv.Config(tile_m=128, tile_n=256, tile_k=16, num_warps=16)
    with pytest.raises(ValueError, match="conv2d_fprop: .* needs (784|1552) columns of tensor memory, compute capability 10.0 has 512"):
        conv.launch(problem, config)
    conv.launch(dataclasses.replace(problem, precision="tf32"), config)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(dtypes=("fp64", "fp64", "fp64")), "operands fp64 and fp64 into fp64"),
        (dict(dtypes=("i8", "bf16", "fp32")), "operands i8 and bf16 into fp32"),
        (dict(dtypes=("i8", "i8", "fp32")), "int8 gives int8 or int32, not fp32"),
        (dict(dtypes=("fp8e5", "fp8e5", "fp32"), arch=80), "8-bit floats need compute capability 8.9, got 8.0"),
        (dict(arch=75), "compute capability 7.5, want one of"),
        (dict(input=(1 << 16, 1 << 15)), "4294967296 positions, it takes fewer than"),
        (dict(C=1 << 14, K=1 << 14), "a filter of 2415919104 elements, it takes fewer than"),
    ],
)
def test_problems_that_it_lacks(change, message):
    problem = a_problem("fprop", **change)
    assert conv.supports(a_problem("fprop")) is None
    with pytest.raises(ValueError, match=f"conv2d_fprop: {message}"):
        conv.launch(problem, PLAIN)


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


@pytest.mark.parametrize("case", NETWORK.values(), ids=NETWORK.keys())
@pytest.mark.parametrize("role", ROLES)
def test_candidates_of_networks(role, case):
    """Each fits, and the pick is one of them, the same every time."""
    kinds: list[dict[str, Any]] = [dict(arch=arch) for arch in (80, 86, 89, 90, 100, 120)]
    kinds += [dict(dtypes=("fp32",) * 3, precision=precision) for precision in ("tf32", "tf32x3", "bf16x3", "bf16x6", "ieee")]
    kinds += [dict(dtypes=("i8", "i8", "i32")), dict(dtypes=("fp8e5", "fp8e5", "bf16"))]
    for kind in kinds:
        problem = a_problem(role, **case, **kind)
        candidates = conv.candidates(problem)
        assert candidates
        assert all(conv.launch(problem, config).grid == conv.grid(problem, config) for config in candidates)
        assert conv.candidates(problem)[0] == conv.candidates(problem)[0] in candidates


def test_picks_suit_their_networks():
    def picks(name):
        return {role: conv.candidates(a_problem(role, **NETWORK[name]))[0] for role in ROLES}

    assert picks("stem")["fprop"].packed and picks("stem")["wgrad"].packed, "three channels fill no tile"
    assert all(config.groups > 1 for config in picks("resnext").values()), "nor do groups of four"
    assert picks("resnet_3x3")["wgrad"].splits > 1, "one filter is few tiles"
    assert picks("resnet_3x3")["fprop"].splits == 1
