"""The simulator of CUDA kernels finds kernels that are slightly wrong.  One build of a family's kernels has every fault.

Needs g++; no GPU and no CUDA.
"""

import dataclasses
import itertools
from typing import Any

import pytest
from simt import FOUND, build, either
from simt_families import CAUSAL, DEPTHWISE, WEIGHT_ONLY
from simt_weight_only import a_problem as a_product
from test_causal_kernel import a_problem as a_sequence
from test_depthwise import of_role, problem
from test_simt import CASES

from jaxext.ops.causal.cuda import CausalConfig
from jaxext.ops.conv.cuda_depthwise import DepthwiseConfig
from jaxext.ops.scaled.cuda_weight_only import WeightOnlyConfig

pytestmark = pytest.mark.cuda

SHIFTED = {  # faults that show where an array does not start at a multiple of 16
    "vectors of a source wherever it starts": {"x": 4},
    "vectors of a target wherever it starts": {"y": 4},
    "vectors wherever x starts": {"x": 4},
    "wherever the arrays start": {"x": 4},
}

ROWS = "__syncthreads();  // the rows are there"
NEXT_LINE = "__syncthreads();  // the next line and the sums are there, and all have done with the lines and the sums before these"
MANY_ROWS = problem((5, 4), (31, 31), G=64, low=15, high=15)
ALIGNED = problem((9,), (4,), G=8, low=3)
CONVOLUTIONS = {  # the fault -> the role and a case that show it, a piece of the sources, and what takes its place
    "no barrier after staging": ("fprop", CASES["3x3"], ROWS, ""),
    "no barrier before staging again": ("fprop", MANY_ROWS, "__syncthreads();  // all have done with the rows that lie here", ""),
    "no barrier after the taps of a line": ("fprop", CASES["causal k4"], "__syncthreads();  // the taps are there", ""),
    "no barrier before a reduction": ("wgrad", CASES["3x3"], "__syncthreads();  // the parts are there", ""),
    "no barrier after a reduction": ("wgrad", CASES["3x3"], "__syncthreads();  // all have read the parts of the tap before", ""),
    "a barrier for some": ("fprop", CASES["3x3"], ROWS, "if (threadIdx.y < 3) __syncthreads();"),
    "threads that leave early": ("fprop", CASES["3x3"], "own.StageRows(p, row, rows, staged);", "if (own.filter >= p.filters) return;"),
    "a bound too far": (
        "fprop",
        CASES["causal k4"],
        "static_cast<unsigned>(place) < static_cast<unsigned>(size)",
        "static_cast<unsigned>(place) <= static_cast<unsigned>(size)",
    ),
    "a line too few": (
        "dgrad",
        CASES["3x3"],
        "return Inside(sd, p.d.S) && Inside(sh, p.h.S);",
        "return Inside(sd, p.d.S) && Inside(sh, p.h.S - 1);",
    ),
    "a target too many": ("fprop", CASES["3x3"], "if (u >= count) return;", "if (u > count) return;"),
    "a channel too many": ("fprop", CASES["3x3"], "owner < p.filters", "true"),
    "a tap too few": ("wgrad", CASES["3x3"], "s >= p.w.R", "s + 1 >= p.w.R"),
    "shared memory too far": ("fprop", CASES["3x3"], "tap * (channels + 4) + c", "tap * (channels + 4) + c + 8"),
    "a strip too many": ("wgrad", CASES["many images, batched filters"], "min(first_tile + p.share, p.tiles)", "p.tiles"),
    "taps that do not ascend": ("dgrad", CASES["causal k4"], "phase.origin + axis.tap_stride * last", "phase.origin"),
    "a window that stands still": ("fprop", CASES["causal k4"], "window[j] = window[kWidth + j];", ""),
    "a plane too few": ("fprop", CASES["3x2x3"], "if (++plane < d.taps) return;", "if (++plane + 1 < d.taps) return;"),
    "rows of another plane are staged": ("dgrad", CASES["3x2x3"], "planes % d.taps", "0"),
    "targets of another plane": ("fprop", CASES["3x2x3"], "plane * p.h.T + fh", "image * p.h.T + fh"),
    "a piece meets another plane": ("wgrad", CASES["3x2x3"], "(piece.t / p.d.step)", "(piece.r / p.d.step)"),
    "a piece of another plane": ("wgrad", CASES["3x2x3"], "real = t < p.d.R;", "real = t + 1 < p.d.R;"),
    "a window of any length that stands still": ("fprop", CASES["k31, a row in pieces"], "(i + kWidth - 1) % kWidth", "i"),
    "channels beside those that are shared": (
        "fprop",
        CASES["multiplier 2"],
        "image * p.d.S * p.h.S * p.w.S * p.source_channels + filter / p.source_share",
        "image * p.d.S * p.h.S * p.w.S * p.source_channels + filter % p.source_channels",
    ),
    "channels are not shared": (
        "wgrad",
        CASES["multiplier 2"],
        "sources += filter / p.source_share",
        "sources += filter % p.source_channels",
    ),
    "sums of other outputs": ("dgrad", CASES["multiplier 2"], "totals[k / kSummed]", "totals[k % (kVector / kSummed)]"),
    "the same outputs again": ("dgrad", CASES["multiplier 16"], "at.fold", "0"),
    "too few outputs": ("dgrad", CASES["multiplier 3 causal"], "p.folds * d.taps * h.taps", "d.taps * h.taps"),
    "vectors of a source wherever it starts": ("fprop", ALIGNED, "Aligned(first, depthwise::kVectorBytes)", "true"),
    "vectors of a target wherever it starts": ("fprop", ALIGNED, "Aligned(wgrad ? second : third, depthwise::kVectorBytes)", "true"),
}
ON_TENSOR_CORES = problem((5, 9), (6, 7), G=24, N=5, low=3, high=3)  # more than 8 of the 16 lines in step
CONVOLUTIONS |= {
    f"tensor cores: {what}": (role, ON_TENSOR_CORES, old, new)
    for what, role, old, new in (
        ("no barrier after a line", "fprop", NEXT_LINE, ""),
        ("sources beside the image", "fprop", "Inside(place + i, p.w.S)", "true"),
        ("sources below the image", "fprop", "max(min(next + own.count + p.h.taps - 1, p.h.S), 0)", "next + own.count + p.h.taps - 1"),
        ("taps that do not ascend", "dgrad", "axis.first_tap + axis.tap_step * number", "number"),
        ("bands of other filter rows", "fprop", "r + p.h.taps - kRows", "r"),
        ("sums of other filter rows", "fprop", "sums[c][r - 1]", "sums[c][r]"),
        ("sums of other lines", "fprop", "at[8 * kMmaTargets / 2] = {last[2], last[3]};", "at[8 * kMmaTargets / 2] = {last[0], last[1]};"),
        ("a part's line too many", "dgrad", "min(p.lines, p.h.T - first)", "p.lines"),
        ("targets beside the image", "fprop", "Column() < p.w.T ? own.count : 0", "own.count"),
        ("a channel too many", "fprop", "number < p.images * p.parts && channel < p.channels", "number < p.images * p.parts"),
        ("no barrier after a step", "wgrad", "__syncthreads();  // the next lines are there, and all have done with these", ""),
        ("no barrier after the steps of a walk", "wgrad", "__syncthreads();  // the steps of a walk are there", ""),
        ("sources of a sum beside the image", "wgrad", "Source() >= kMmaTargets + of.w.taps - 1 || !Inside(source, of.w.S)", "false"),
        ("a line of a walk too many", "wgrad", "min(p.h.T - first, p.lines)", "p.lines"),
        ("targets of another line", "wgrad", "(now + kRows - u) % kRows", "now"),
        ("another diagonal", "wgrad", "(b + thread) * kMmaTargets + b", "(b + thread + 1) % kMmaSources * kMmaTargets + b"),
        ("a channel of a sum too many", "wgrad", "vector >= vectors || target >= of.w.T", "target >= of.w.T"),
    )
}

PACKED = a_sequence("backward", activation=None, C=8, state=True, idx=True, idx_of_states=True)
SUMMED = a_sequence("backward", activation=None, C=8, state=True)
MANY = a_sequence("forward", 7, activation=None, C=8, state=True, idx=True, idx_of_states=True)
FEW = a_sequence("forward", 3, activation=None, C=8, idx=True)
SHORT = a_sequence("backward", 7, activation=None, C=8, state=True)
IN_VECTORS = a_sequence("forward", activation=None, C=8)
NUMBER = "if (t >= 0) return t < p.T ? of.idx[static_cast<int64_t>(sequence) * p.T + t] : 0;"
SEQUENCES = {
    "no barrier after staging": (SUMMED, "__syncthreads();  // the taps are there", ""),
    "no barrier before a sum": (SUMMED, "__syncthreads();  // the parts are there", ""),
    "no barrier after a sum": (SUMMED, "__syncthreads();  // all have read the parts of the row before", ""),
    "threads that leave early": (SUMMED, "if (!strip.real) continue;", "if (!strip.real) return;"),
    "a channel too many": (dataclasses.replace(FEW, C=5), "channel < p.C", "true"),
    "a sequence too many": (PACKED, "sequence < p.B", "sequence <= p.B"),
    "taps of channels that are not there": (dataclasses.replace(FEW, C=9), "c < p.C && row >= 0 && row < p.J", "row >= 0 && row < p.J"),
    "an input too far": (MANY, "Load<T, kVector>(of.x + Place(t), t < p.T)", "Load<T, kVector>(of.x + Place(t), true)"),
    "a state too far": (MANY, "t < 0 && t + p.J - 1 >= 0", "t < 0"),
    "a number too far": (PACKED, NUMBER, NUMBER.replace("t < p.T", "t <= p.T")),
    "a step too many": (FEW, "if (u >= count) return;", "if (u > count) return;"),
    "a window that stands still": (IN_VECTORS, "inputs[j] = inputs[kWidth + j], numbers[j] = numbers[kWidth + j];", ""),
    "numbers that stand still": (
        PACKED,
        "inputs[j] = inputs[kChunk + j], numbers[j] = numbers[kChunk + j];",
        "inputs[j] = inputs[kChunk + j];",
    ),
    "cotangents behind the strip are summed": (SUMMED, "strip.Owns(t + u)", "true"),
    "cotangents behind the strip are missing": (SUMMED, "strip.end + kBefore", "strip.end"),
    "every strip writes the state's": (SHORT, "strip.begin == 0 && d_state != nullptr", "d_state != nullptr"),
    "a tile too many": (SUMMED, "min((split + 1) * p.share, p.tiles)", "(split + 1) * p.share + 1"),
    "vectors wherever x starts": (IN_VECTORS, "vectors = vectors && Aligned(array, causal::kVectorBytes);", ";"),
}

INT8 = a_product(M=5, N=96, K=12 * 32, S=6)
INT4 = a_product(M=5, N=96, K=20 * 32, S=10, bits=4)  # more steps than all warps load at first
IN_FLOAT32 = dataclasses.replace(INT4, dtypes=("bf16", "i8", "fp32"))
TILES = a_product(M=11, N=64, K=12 * 32, S=12)
BATCHES = a_product(M=2, N=64, K=4 * 32, S=2, B=3)
PRODUCTS = {
    "no barrier before sums are given": (INT8, "__syncthreads();  // all have read what lies here", ""),
    "no barrier before sums are taken": (INT8, "__syncthreads();  // the sums are there", ""),
    "a barrier for some": (INT8, "__syncthreads();  // the sums are there", "if (along < 2 * half) __syncthreads();"),
    "a column too many": (INT8, "real = column < p.N;", "real = true;"),
    "a row too many is read": (INT8, "m < p.M", "true"),
    "a row too many is written": (INT8, "if (m >= p.M) continue;", ""),
    "a step too many": (INT8, "min(begin + p.share, p.steps)", "begin + p.share"),
    "a step ahead too many": (INT8, "real && step + s < end", "real"),
    "scales ahead too many": (INT8, "worker.real && step + kStride < end", "worker.real"),
    "the first scale for all": (INT8, "p.of_scale == 0 ? step : __umulhi(step, p.of_scale)", "0"),
    "the scale of the next column": (INT4, "k < 2 ? scale : next_scale", "k < 2 ? next_scale : scale"),
    "halves of bytes in the other order": (INT4, "both >> bit", "both >> (bit ^ kBits)"),
    "the other rows": (INT8, "half == 0 ? 0x5410 : 0x7632", "half == 0 ? 0x7632 : 0x5410"),
    "a chunk twice": (INT4, "chunk[s][r] = next[s][r];", ""),
    "half of the warps are left out": (INT8, "half > 0", "half > 1"),
    "all warps write": (INT8, "worker.warp / Of::kWarpsN != 0 || !worker.real", "!worker.real"),
    "some of a warp leave": (INT8, "worker.Load(first, end, chunk);", "if (!worker.real) return;\nworker.Load(first, end, chunk);"),
    "one weight for all batches": (BATCHES, "static_cast<int64_t>(batch) * p.K * p.N", "0"),
    "one scale for all batches": (BATCHES, "static_cast<int64_t>(batch) * p.S * p.N", "0"),
    "one x for all batches": (BATCHES, "static_cast<int64_t>(batch) * p.M * p.K", "0"),
    "the first rows again": (TILES, "static_cast<int>(rest % p.row_blocks) * kTiles * kRowsOfTile", "0"),
    "results of 16 bits for 32": (IN_FLOAT32, "p.wide != 0", "p.wide == 0"),
    "wherever the arrays start": (INT8, "!Aligned(array)", "false"),
}


def convolutions(role, case):
    if case is ON_TENSOR_CORES:
        return [(of_role(case, role, "bf16"), DepthwiseConfig(lanes=4, strip=9, lines=4))]
    parts = dict(pieces=2, splits=2) if role == "wgrad" else {}
    return [(of_role(each, role), DepthwiseConfig(lanes=4, strip=9, **parts)) for each in (case, dataclasses.replace(case, G=8))]


def sequences(case):
    return [(case, CausalConfig(lanes=32, strip=2 if case == SHORT else 10, splits=3 if case.role == "backward" else 1))]


def products(case):
    return [(case, WeightOnlyConfig(tile_m=8, tile_n=64, splits=5 if case == INT8 else 1))]  # the last part is empty


BROKEN: dict[Any, tuple] = {  # the table, the launches of a row, and the files
    DEPTHWISE: (
        CONVOLUTIONS,
        convolutions,
        (*(f"depthwise_{name}.cuh" for name in ("common", "gather", "mma", "mma_wgrad", "wgrad")), "depthwise.cc"),
    ),
    CAUSAL: (SEQUENCES, sequences, ("causal.cuh", "causal.cc")),
    WEIGHT_ONLY: (PRODUCTS, products, ("weight_only.cuh", "weight_only.cc")),
}


def check(simulator, family, faults, number, shifts):
    """Check the launches that show some faults, of the kernels with the fault of this number."""
    table, launches_of, files = BROKEN[family]
    driver = build(simulator.builds, family.name, either(files, [(old, new) for *_, old, new in table.values()]))
    launches = dict.fromkeys(itertools.chain.from_iterable(launches_of(*table[fault][:-2]) for fault in faults))
    simulator.check(family, [*launches], driver=driver, broken=number, shifts=shifts)


SOUND = [*((family, {}) for family in BROKEN), (DEPTHWISE, {"x": 4}), (DEPTHWISE, {"y": 4}), (CAUSAL, {"x": 4})]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family, shifts", SOUND, ids=str)
def test_kernels_of_which_no_piece_is_taken_are_right(simulator, family, shifts):
    check(simulator, family, [fault for fault in BROKEN[family][0] if SHIFTED.get(fault) == shifts or not shifts], -1, shifts)


@pytest.mark.parametrize("family, fault", [(family, fault) for family, (table, *_) in BROKEN.items() for fault in table], ids=str)
def test_broken_kernels_are_found(simulator, family, fault):
    with pytest.raises(AssertionError, match=FOUND):
        check(simulator, family, [fault], [*BROKEN[family][0]].index(fault), SHIFTED.get(fault, {}))
