"""The launchers of the portable CUDA kernels on a CPU (simt.py): which problems they take, with which configs, where arrays may start,
where offsets leave 32 bits, and what the CUDA runtime answers."""

import dataclasses
import itertools
import math
from typing import Any

import harness
import host_code
import numpy as np
import pytest
import test_depthwise
from cuda_cases import BYTES, INTERNAL, INVALID
from simt_families import CAUSAL, DEPTHWISE, WEIGHT_ONLY
from simt_weight_only import a_problem as a_product
from test_causal_kernel import a_problem as a_sequence
from test_depthwise import of_role, problem
from test_simt import CASES
from test_simt_depthwise_mma import SMALL, uses_tensor_cores

from jaxext.kernels.epilogue import Epilogue
from jaxext.ops.causal import cuda as cuda_causal
from jaxext.ops.causal.cuda import CausalConfig
from jaxext.ops.conv import cuda_depthwise
from jaxext.ops.conv.cuda_depthwise import DepthwiseConfig
from jaxext.ops.scaled import cuda_weight_only
from jaxext.ops.scaled.cuda_weight_only import WeightOnlyConfig

pytestmark = pytest.mark.cuda

UNKNOWN = 999  # cudaErrorUnknown
DTYPES = ("fp32", "bf16", "fp16")
ROLES = {DEPTHWISE: ("fprop", "dgrad", "wgrad"), CAUSAL: ("forward", "backward"), WEIGHT_ONLY: ("nn",)}
PROBLEMS = {DEPTHWISE: CASES["3x3"], CAUSAL: a_sequence("forward", activation=None), WEIGHT_ONLY: a_product()}
CONFIGS = {
    DEPTHWISE: DepthwiseConfig(lanes=2, strip=8),
    CAUSAL: CausalConfig(lanes=2, strip=8),
    WEIGHT_ONLY: WeightOnlyConfig(tile_m=8, tile_n=64),
}
DGRAD = {"role": "dgrad"}
STEP = "a stride or input dilation of 65536, it takes 65535 at most"
PLACES = "an axis reaches 1073741824 places, it takes fewer than 1073741824"
APART = "neighbours in a strip or a filter row lie 33554432 places apart, it takes fewer than 33554432"
POSITIONS = "about 2147425000 positions, it takes fewer than 2147418112"
OLD = {"arch": 79}, "compute capability 7.9, it takes 8.0 and newer", {"arch": 80}
HUGE = problem((1 << 20, 1 << 10), (3, 3), G=8, N=1 << 10, low=1, high=1)


def changed(family, changes):
    return dataclasses.replace(PROBLEMS[family], **changes)


def rows(tables, columns=3):
    """The rows of each family's table, after the family, with {} for columns that they lack."""
    return [(family, *row, *[{}] * (columns - len(row))) for family, table in tables.items() for row in table]


# By every config: what changes, the reason, and of a limit the last problem within.
REFUSED: dict[Any, list] = {
    DEPTHWISE: [
        ({"C": 2}, "2 input channels per group, it takes 1"),
        ({"K": 0}, "0 outputs per group, it takes 1 to 65535"),
        ({"K": 65536}, "65536 outputs per group, it takes 1 to 65535"),
        ({"G": 1, "K": 65536}, "65536 outputs per group, it takes 1 to 65535", {"G": 1, "K": 65535}),
        ({"G": 1 << 30}, "1073741824 outputs of all groups, it takes fewer than 1073741824", {"G": (1 << 30) - 1}),
        ({"G": 1 << 25, "K": 32}, "1073741824 outputs of all groups, it takes fewer than 1073741824", {"G": 35791394, "K": 30}),
        ({"G": 1 << 16, "K": 1 << 14}, "1073741824 outputs of all groups, it takes fewer than 1073741824"),
        ({"N": -1}, "a size is -1, it takes 0 or more"),
        ({"input": (1, -1, 6)}, "a size is -1, it takes 0 or more"),
        ({"stride": (1, 0, 1)}, "a stride or dilation of 0, it takes 1 or more"),
        ({"filter": (1, 3, 32)}, "32 taps along an axis, it takes 31 at most"),
        ({"filter": (1, 32, 3)}, "32 taps along an axis, it takes 31 at most", {"filter": (1, 31, 3)}),
        ({"filter": (32, 3, 3)}, "32 taps along an axis, it takes 31 at most"),
        ({"stride": (1, 65536, 1)}, STEP),
        ({"stride": (65536, 1, 1)}, STEP),
        ({"input_dilation": (1, 1, 65536)}, STEP, {"input_dilation": (1, 1, 65535)}),
        ({"filter_dilation": (1, 1, 1 << 30)}, "an axis reaches 3221225479 places, it takes fewer than 1073741824"),
        ({"low": (1 << 30, 0, 0)}, "an axis reaches 1073741826 places, it takes fewer than 1073741824"),
        ({"low": (0, 1 << 30, 0)}, "an axis reaches 1073741832 places, it takes fewer than 1073741824"),
        ({"low": (0, (1 << 30) - 8, 0)}, PLACES, {"low": (0, (1 << 30) - 9, 0)}),
        ({"low": (0, 8 - (1 << 30), 0)}, PLACES, {"low": (0, 9 - (1 << 30), 0)}),
        ({"filter_dilation": (1, 1, 1 << 25)}, APART, {"filter_dilation": (1, 1, (1 << 25) - 1)}),
        ({"B": 65536}, "B=65536 and 1 phases, it takes 65535 at most", {"B": 65535}),
        (DGRAD | {"input": (1, 600, 600), "stride": (1, 512, 512)}, "B=1 and 262144 phases, it takes 65535 at most"),
        (DGRAD | {"input": (60, 60, 60), "stride": (50, 50, 50)}, "B=1 and 125000 phases, it takes 65535 at most"),
        (
            DGRAD | {"input": (1, 256, 256), "stride": (1, 511, 509)},
            "B=1 and 65536 phases, it takes 65535 at most",
            DGRAD | {"input": (1, 255, 257), "stride": (1, 511, 509)},
        ),
        ({"N": HUGE.N, "input": HUGE.input, "output": HUGE.output}, "about 1100585369600 positions, it takes fewer than 2147418112"),
        ({"N": 61355, "output": (50, 100, 6)}, POSITIONS, {"N": 61354, "output": (50, 100, 6)}),
        ({"N": 61355, "output": (1, 5000, 6)}, POSITIONS, {"N": 61354, "output": (1, 5000, 6)}),
        ({"dtypes": ("bf16", "bf16", "fp32")}, "bf16 times bf16 into fp32, it takes a single dtype"),
        ({"role": "wgrad", "dtypes": ("bf16", "bf16", "fp16")}, "bf16 times bf16 into fp16, it takes a single dtype"),
    ],
    CAUSAL: [
        ({"B": -1}, "a size is -1, it takes 0 or more"),
        ({"J": 0}, "0 taps, it takes 1 or more"),
        ({"J": 32}, "32 taps, its forward takes 31 at most", {"J": 31}),
        ({"role": "backward", "J": 9}, "9 taps, its backward takes 8 at most", {"role": "backward", "J": 8}),
        ({"dtypes": ("fp8e4nv", "fp32", "fp8e4nv")}, "x is fp8e4nv, it takes fp32, bf16, fp16"),
        ({"dtypes": ("fp32", "fp8e4nv", "fp32")}, "weight is fp8e4nv, it takes fp32, bf16, fp16"),
        ({"epilogue": Epilogue(bias="fp8e4nv")}, "bias is fp8e4nv, it takes fp32, bf16, fp16"),
        ({"C": 1 << 30}, "1073741824 channels, it takes fewer than 1073741824", {"C": (1 << 30) - 1}),
        ({"T": 1 << 30, "B": 1}, "1073741824 steps, it takes fewer than 1073741824", {"T": (1 << 30) - 1, "B": 1}),
        ({"B": 1 << 21, "T": 1 << 10}, "2097152 sequences of 1024 steps, it numbers fewer than 2147418112 steps"),
        (
            {"B": 32767, "T": 65536},
            "32767 sequences of 65536 steps, it numbers fewer than 2147418112 steps",
            {"B": 32767, "T": 65535},
        ),
        (
            {"B": (1 << 31) - (1 << 16), "T": 0},
            "2147418112 sequences of 0 steps, it numbers fewer than 2147418112 steps",
            {"B": (1 << 31) - (1 << 16) - 1, "T": 0},
        ),
    ],
    WEIGHT_ONLY: [
        ({"B": -1}, "B is -1, it takes 0 or more"),
        ({"M": 65, "arch": 80}, "65 rows, it takes 64 at most, and more on compute capability 9.0", {"M": 64, "arch": 80}),
        ({"M": 1 << 30, "B": 1}, "M is 1073741824, it takes fewer than 1073741824", {"M": (1 << 30) - 1, "B": 1}),
        ({"N": 1 << 30, "J": 1 << 30}, "N is 1073741824, it takes fewer than 1073741824"),
        ({"K": 1 << 21}, "K is 2097152, it takes fewer than 2097152"),
        ({"K": 1 << 21, "S": 2}, "K is 2097152, it takes fewer than 2097152", {"K": (1 << 21) - 64, "S": 2}),
        ({"dtypes": ("fp32", "i8", "fp32")}, "x is fp32, it takes bf16, fp16"),
        ({"dtypes": ("bf16", "i8", "fp16")}, "the result is fp16, it takes bf16, as x, and fp32"),
        ({"N": 80, "J": 80}, "N is 80, it takes multiples of 32"),
        ({"N": 97, "J": 97}, "N is 97, it takes multiples of 32", {}),
        ({"K": 48}, "K is 48, it takes multiples of 32"),
        ({"K": 129}, "K is 129, it takes multiples of 32", {}),
        ({"S": 8}, "8 scales along K of 128, it takes blocks of multiples of 32"),
        ({"S": 5}, "5 scales along K of 128, it takes blocks of multiples of 32", {"S": 4}),
        ({"S": 3}, "3 scales along K of 128, it takes blocks of multiples of 32"),
        ({"S": 0}, "0 scales along K of 128, it takes blocks of multiples of 32"),
        ({"B": 1 << 24}, "16777216 products with 96 columns, it takes fewer: a grid has 2147483647 blocks at most"),
        (
            {"B": 1 << 24, "N": 64, "J": 64},
            "16777216 products with 64 columns, it takes fewer: a grid has 2147483647 blocks at most",
            {"B": (1 << 24) - 1, "N": 64, "J": 64},
        ),
    ],
}
REFUSED_BEFORE: dict[Any, list] = {  # for reasons that a launcher does not see
    DEPTHWISE: [
        ({"name": "conv4d_fprop"}, "4 spatial axes, want 1 to 3"),
        ({"name": "conv0d_fprop"}, "0 spatial axes, want 1 to 3"),
        ({"dtypes": ("i8",) * 3}, "dtype i8, it takes fp32, bf16, fp16"),
        ({"dtypes": ("bf16", "fp32", "bf16")}, "bf16 times fp32 into bf16, it takes a single dtype"),
        ({"arch": 75}, "compute capability 7.5, it takes 8.0 and newer"),
        OLD,
    ],
    CAUSAL: [OLD],
    WEIGHT_ONLY: [
        ({"dtypes": ("bf16", "fp8e4nv", "bf16")}, "w is fp8e4nv, it takes int8 and int4"),
        ({"role": "nt"}, "the product nt, a derivative, want the product itself"),
        ({"scaled": ("x", "w")}, "scales of x and w, want scales of w alone"),
        ({"J": 1}, "1 scales along N of 96, want one for each column"),
        OLD,
    ],
}


@pytest.mark.parametrize("family, changes, reason, within", rows(REFUSED), ids=str)
def test_refusals(simulator, family, changes, reason, within):
    """The launcher says the same as the module says before a program is made."""
    test_refusals_before_a_launch(family, changes, reason, within)
    reply = simulator.plan(family, changed(family, changes), CONFIGS[family])
    assert (reply.code, reply.message) == (INVALID, f"{family}: {reason}")


@pytest.mark.parametrize("family, changes, reason, within", rows(REFUSED_BEFORE), ids=str)
def test_refusals_before_a_launch(family, changes, reason, within):
    assert host_code.refuses(changed(family, changes), family.module) == reason
    assert host_code.refuses(changed(family, within), family.module) is None


REFUSED_CONFIGS: dict[Any, list] = {
    DEPTHWISE: [
        ({}, {"lanes": 3}, " fprop: lanes is 3, want a power of two up to 32"),
        ({}, {"lanes": 64}, " fprop: lanes is 64, want a power of two up to 32"),
        ({}, {"strip": 0}, " fprop: strip is 0, want 1 to 2^30 - 1"),
        ({}, {"pieces": 2}, " fprop: pieces is 2, want a power of two up to 1"),
        ({}, {"splits": 2}, " fprop: splits is 2, want 1 to 1"),
        ({"role": "wgrad"}, {"lanes": 32, "pieces": 8}, " wgrad: pieces is 8, want a power of two up to 4"),
        ({"role": "wgrad"}, {"splits": 65536}, " wgrad: splits is 65536, want 1 to 65535"),
        (
            {"G": (1 << 29) + 1, "input": (1, 64, 64), "output": (1, 64, 64)},
            {"lanes": 1, "strip": 8},
            ": 4294967304 blocks along the first axis of the grid, it takes 2147483647 at most",
        ),
    ],
    CAUSAL: [
        ({}, {"lanes": 3}, " forward: lanes is 3, want a power of two up to 32"),
        ({"role": "backward"}, {"lanes": 64}, " backward: lanes is 64, want a power of two up to 32"),
        ({}, {"strip": 0}, " forward: strip is 0, want 1 to 2^30 - 1"),
        ({}, {"splits": 2}, " forward: splits is 2, want 1 to 1"),
        ({"role": "backward"}, {"splits": 65536}, " backward: splits is 65536, want 1 to 65535"),
        ({"B": 1, "T": (1 << 30) - 1, "C": 1 << 12}, {"lanes": 1, "strip": 1}, ": 8589934592 blocks, a grid has 2147483647 at most"),
    ],
    WEIGHT_ONLY: [
        ({}, {"tile_m": 16}, ": tile_m x tile_n is 16x64, want one of 8x128, 8x64, 16x128, 32x256, 64x256, 128x256"),
        ({}, {"tile_n": 256}, ": tile_m x tile_n is 8x256, want one of 8x128, 8x64, 16x128, 32x256, 64x256, 128x256"),
        ({}, {"splits": 0}, ": splits is 0, want 1 to 64"),
        ({}, {"splits": 65}, ": splits is 65, want 1 to 64"),
    ],
}


@pytest.mark.parametrize("family, changes, config, message", rows(REFUSED_CONFIGS), ids=str)
def test_refused_configs(simulator, family, changes, config, message):
    """The refusal comes before any launch."""
    reply = simulator.plan(family, changed(family, changes), dataclasses.replace(CONFIGS[family], **config))
    assert (reply.code, reply.message, reply.kernel) == (INVALID, f"{family}{message}", ())


def misaligned():
    packed = dict(activation=None, C=8, state=True, idx=True, idx_of_states=True)
    for dtype in DTYPES:
        for role in ROLES[DEPTHWISE]:
            yield DEPTHWISE, of_role(problem((9,), (4,), G=8, low=3), role, dtype), [DepthwiseConfig(lanes=4, strip=8)]
        for role in ROLES[CAUSAL]:
            yield CAUSAL, (case := a_sequence(role, dtype=dtype, **packed)), CAUSAL.configs(case)
    for role in ("dgrad", "wgrad"):
        yield DEPTHWISE, of_role(SMALL, role, "bf16"), [uses_tensor_cores(4)]


@pytest.mark.parametrize("family, case, configs", [*misaligned()], ids=lambda value: getattr(value, "role", str(value)[:9]))
def test_misaligned_arrays(simulator, family, case, configs):
    """Any of them may start wherever one of its elements can.  Another kernel than that of tensor cores takes those."""
    made = family.case(case, configs[0])
    sizes = {name: BYTES[dtype] for name, (dtype, _) in made.arrays.items()}
    _, second, *_, last = sizes
    for shifts in [{}, *({name: size} for name, size in sizes.items()), dict.fromkeys(sizes, 8), {second: 16 - sizes[second], last: 8}]:
        simulator.check(family, [(case, config) for config in configs], shifts=shifts)


LARGE: dict[Any, list] = {  # what there are more than 2^31 of, the ends of the arrays, what the arrays are besides, blocks, and how
    DEPTHWISE: [
        ("elements of an image", problem((40,), (4,), G=1024, low=3), {"N": 2, "input": (1, 1, 1 << 22)}, 8, {"splits": 4096}),
        (
            "elements of all lines",
            problem((4, 30), (3, 3), G=512, low=1, high=1),
            {"N": 3, "input": (1, 1 << 16, 30)},
            12,
            {"splits": 8192},
        ),
        ("elements that are read one by one", problem((40,), (3,), G=129, low=2), {"N": 4, "input": (1, 1, 1 << 22)}, 9, {"splits": 16384}),
        ("elements of all batches", problem((16, 16), (3, 3), G=136, low=1, high=1), {"B": 65535}, 6, {}),
        (
            "elements from one target to the next",
            problem((40,), (2,), G=1024, low=1 << 21, filter_dilation=1 << 21),
            {"input": (1, 1, 1 << 22)},
            40,
            {"splits": 1 << 15},
        ),
        ("taps of all channels", problem((1, 1), (7, 7), G=8, low=3, high=3), {"G": 1 << 26}, 1, {"pieces": 8}),
        (
            "elements of all planes",
            problem((4, 3, 5), (3, 2, 3), G=264, low=(1, 0, 1), high=(1, 1, 1)),
            {"N": 40, "input": (14000, 3, 5)},
            18,
            {"splits": 4200},
        ),
        ("elements of all outputs", problem((40,), (4,), G=64, K=16, low=3), {"N": 2, "input": (1, 1, 1 << 22)}, 8, {"splits": 4096}),
        ("outputs read one by one", problem((40,), (3,), G=43, K=3, low=2), {"N": 4, "input": (1, 1, 1 << 22)}, 9, {"splits": 16384}),
    ],
    CAUSAL: [
        ("elements of a sequence", dict(B=1, T=40, C=1024), {"T": 1 << 22}, 16, {"splits": 1 << 13}),
        ("elements of all sequences", dict(B=2, T=8, C=64), {"B": 1 << 23}, 1, {"splits": 1 << 15}),
        ("elements that go one by one", dict(B=1, T=40, C=129), {"T": 1 << 24}, 9, {"splits": 1 << 15}),
    ],
    WEIGHT_ONLY: [
        ("bytes of the weight", a_product(1, 1 << 17, 64, 1), {"K": 1 << 15}, 1, {"splits": 64}),
        ("numbers of batches", a_product(1, 64, 64, 1), {"B": 1 << 20}, 1, {}),
    ],
}


def large():
    for what, case, changes, blocks, parts in LARGE[DEPTHWISE]:
        changes = {"output": changes.get("input", case.output)} | changes
        for role in ROLES[DEPTHWISE]:
            config = DepthwiseConfig(lanes=16, strip=64, **(parts if role == "wgrad" else {}))
            yield pytest.param(DEPTHWISE, of_role(case, role, "bf16"), changes, blocks, config, id=f"{what}, {role}")
    batches = of_role(problem((16, 16), (3, 3), G=136, low=1, high=1), "wgrad", "bf16")
    yield pytest.param(DEPTHWISE, batches, {"B": 65535}, 9, uses_tensor_cores(16), id="elements of all batches, wgrad on tensor cores")
    for (what, sizes, changes, blocks, parts), role, taps in itertools.product(LARGE[CAUSAL], ROLES[CAUSAL], (4, 7)):
        config = CausalConfig(lanes=16, strip=64, **(parts if role == "backward" else {}))
        case = a_sequence(role, taps, activation=None, dtype="bf16", **sizes)
        yield pytest.param(CAUSAL, case, changes, blocks, config, id=f"{what}, {role}, {taps} taps")
    for what, case, changes, blocks, parts in LARGE[WEIGHT_ONLY]:
        config = dataclasses.replace(CONFIGS[WEIGHT_ONLY], **parts)
        yield pytest.param(WEIGHT_ONLY, case, changes, blocks, config, id=what)


@pytest.mark.parametrize("family, case, changes, blocks, config", [*large()])
def test_more_than_2_to_the_31(simulator, family, case, changes, blocks, config):
    """The last blocks of arrays that are zero before their ends give what the ends alone give; one of a product has 64 columns."""
    whole = dataclasses.replace(case, **changes)
    one_part = family.case(whole, dataclasses.replace(config, splits=1))
    assert max(math.prod(shape) for _, shape in one_part.arrays.values()) > 2**31
    assert host_code.refuses(whole, family.module) is None
    operands = family.operands(case, integers=True)
    reply = simulator.launch(family, case, config, operands, whole=whole, blocks=blocks)
    assert reply.code == 0, reply.message
    columns = slice(-64 if family is WEIGHT_ONLY else None, None)
    harness.check(reply.results[0][..., columns], family.truth(case, operands)[0][..., columns])


@pytest.mark.parametrize("family, role", [(family, role) for family in PROBLEMS for role in ROLES[family]], ids=str)
def test_what_cuda_remembers(simulator, family, role):
    """An error of another's call, which nobody asked for, was taken for one of the launch; and one of a launch is told once."""
    case, config = changed(family, {"role": role}), CONFIGS[family]
    operands = family.operands(case, integers=True)
    reply = simulator.launch(family, case, config, operands, pending=UNKNOWN)
    assert (reply.code, reply.message, reply.remembered) == (0, "", UNKNOWN)
    family.check(case, reply.results, operands)
    reply = simulator.launch(family, case, config, operands, refusal=UNKNOWN)
    assert reply.code == INTERNAL and reply.message.startswith(f"{family}: the launch failed: ") and reply.remembered == 0


# Random problems, of sizes from 1 to the limits, and sometimes at one or one beyond it.


def size(rng, limit, of=1, many=True):
    """`many`: the smaller the more often."""
    if rng.random() < 0.1:
        return limit + of * int(rng.integers(-1, 2))
    most = math.log2(limit // of)
    return of * int(2 ** rng.uniform(0, rng.uniform(0, most) if many else most))


def convolutions(rng):
    def random(role):
        def sizes(limit):
            return tuple(size(rng, limit) if rng.random() < 0.4 else 1 for _ in range(rank))

        rank = int(rng.integers(1, 4))
        input, filter = sizes(1 << 30), sizes(31)
        steps = dict(stride=sizes(65535), input_dilation=sizes(65535), filter_dilation=sizes(1 << 25))
        low, high = (tuple(int(rng.choice([-1, 1])) * n for n in sizes(1 << 30)) for _ in range(2))
        outputs = size(rng, 65535) if rng.random() < 0.4 else 1
        batch = dict(G=size(rng, 1 << 30), K=outputs, N=sizes(1 << 31)[0], B=sizes(65535)[0])
        return of_role(problem(input, filter, **batch, low=low, high=high, **steps), role, str(rng.choice([*DTYPES])))

    cases = [random(role) for _ in range(1000) for role in ROLES[DEPTHWISE]]
    elements = [[math.prod(shape) for shape in case.shapes.values()] for case in cases]
    return [case for case, counts in zip(cases, elements, strict=True) if 0 < min(counts) and max(counts) < 1 << 38]


def sequences(rng):
    def random(role):
        given = {name: bool(rng.random() < 0.5) for name in ("bias", "state", "idx")}
        dtype, taps = str(rng.choice([*DTYPES])), int(rng.integers(1, 33 if role == "forward" else 10))
        return a_sequence(role, taps, dtype=dtype, B=size(rng, 1 << 31), T=size(rng, 1 << 30), C=size(rng, 1 << 30), **given)

    cases = [random(role) for _ in range(1500) for role in ROLES[CAUSAL]]
    return [case for case in cases if case.B * case.T * case.C < 1 << 38]


def products(rng):
    def random():
        group, bits = 32 * int(rng.integers(1, 5)), int(rng.choice([4, 8]))
        K = size(rng, 1 << 21, 32, many=False) // group * group or group
        M, N, B = (size(rng, *limit, many=False) for limit in ((65,), (1 << 30, 32), (1 << 24,)))
        return a_product(M, N, K, K // group, bits, str(rng.choice(["bf16", "fp16"])), B=B)

    return [random() for _ in range(1000)]


def check_launches(simulator, family, cases, shifts=None):
    asked = [(case, config, None) for case in cases for config in family.module.candidates(case)]
    for (case, config, _), reply in zip(asked, simulator.run(family, asked, shifts=shifts), strict=True):
        assert reply.code == 0, f"{reply.message}: {case}, {config}"
        assert reply.shared_bytes <= 48 << 10
        assert shifts or reply.grid == family.grid(case, config) and family.is_kernel(case, config, reply.kernel), f"{case}, {config}"


@pytest.mark.parametrize(
    "family, random, shifts", [(DEPTHWISE, convolutions, "xwy"), (CAUSAL, sequences, "x"), (WEIGHT_ONLY, products, "")]
)
def test_what_is_taken_can_be_launched(simulator, family, random, shifts):
    """Every configuration can, wherever the arrays start, if they fit into memory.  2^30 channels were taken, and then refused."""
    cases = random(np.random.default_rng(0))
    taken = [case for case in cases if host_code.refuses(case, family.module) is None]
    assert min(len(taken), len(cases) - len(taken)) > 100
    check_launches(simulator, family, taken)
    if shifts:
        check_launches(simulator, family, taken, dict.fromkeys(shifts, 8))


CONVOLUTIONS = test_depthwise.LARGE | {
    "multiplier 2": problem((56, 56), (3, 3), G=64, K=2, N=32, low=1, high=1),
    "multiplier 32": problem((64, 64), (7, 7), G=32, K=32, N=32, low=3, high=3),
    "31x31": problem((32, 32), (31, 31), G=384, N=32, low=15, high=15),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("role", ROLES[DEPTHWISE])
def test_what_is_picked_for_a_convolution_fills_a_gpu(simulator, role, dtype):
    """All configurations can be launched, with vectors."""
    cases = [of_role(case, role, dtype, arch=arch) for case in CONVOLUTIONS.values() for arch in (80, 90, 100)]
    check_launches(simulator, DEPTHWISE, cases)
    for case in cases:
        assert host_code.refuses(case, cuda_depthwise) is None and cuda_depthwise.fills_vectors(case)
        assert math.prod(cuda_depthwise.grid(case, cuda_depthwise.candidates(case)[0])) >= 132


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("role", ROLES[CAUSAL])
@pytest.mark.parametrize("B, T, C", [(8, 2048, 5376), (1, 16384, 12288)])
def test_what_is_picked_for_sequences_fills_a_gpu(B, T, C, role, arch):
    """Partial sums are small beside the arrays."""
    case = dataclasses.replace(a_sequence(role, dtype="bf16", B=B, T=T, C=C), arch=arch)
    config = cuda_causal.candidates(case)[0]
    assert cuda_causal.grid(case, config) >= 3 * 108
    assert cuda_causal.partial_bytes(case, config) < 0.02 * 6 * B * T * C


LAYERS = {"qkv": (4096, 6144), "out": (4096, 4096), "gate and up": (4096, 28672), "down": (14336, 4096)}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("layer", LAYERS)
def test_what_is_picked_for_one_row_fills_a_gpu(layer, bits):
    K, N = LAYERS[layer]
    case = dataclasses.replace(a_product(1, N, K, K // 128, bits), device="NVIDIA H200")  # an H100 wants fewer
    config = cuda_weight_only.candidates(case)[0]
    assert config.tile_m == 8 and cuda_weight_only.grid(case, config) >= 96
    assert 4 * config.splits * N < 0.05 * cuda_weight_only.weight_bytes(case)  # partial results


@pytest.mark.parametrize("bits", [4, 8])
def test_products_of_any_rows_can_be_launched(simulator, bits):
    check_launches(simulator, WEIGHT_ONLY, [a_product(M, 4096, 4096, 32, bits) for M in (1, 8, 9, 16, 17, 33, 64)])
