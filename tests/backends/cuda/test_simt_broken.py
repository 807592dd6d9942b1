"""The simulator of CUDA kernels finds kernels that are slightly wrong.  One build of the depthwise kernels has every fault.

Needs g++; no GPU and no CUDA.
"""

import dataclasses
import itertools

import harness
import pytest
from simt import FOUND, build, either, run
from test_depthwise import of_role, operands_of, problem, truth
from test_simt import CASES

from jaxext.backends.cuda.cuda_depthwise import DepthwiseConfig

ROWS = "__syncthreads();  // the rows are there"
NEXT_LINE = "__syncthreads();  // the next line and the sums are there, and all have done with the lines and the sums before these"
MANY_ROWS = problem((5, 4), (31, 31), G=64, low=15, high=15)
ALIGNED = problem((9,), (4,), G=8, low=3)
SHIFTED = {"vectors of a source wherever it starts": (4, 0, 0), "vectors of a target wherever it starts": (0, 0, 4)}
NOWHERE = (0, 0, 0)
BROKEN = {  # the fault -> the role and a case that show it, a piece of the sources, and what takes its place
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
BROKEN |= {
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
    )
}


@pytest.fixture(scope="session")
def broken_driver(tmp_path_factory):
    """Has every piece beside what takes its place where the environment's BROKEN is its number."""
    files = (*(f"depthwise_{name}.cuh" for name in ("common", "gather", "mma", "wgrad")), "depthwise.cc")
    return build(tmp_path_factory, either(files, [(old, new) for _, _, old, new in BROKEN.values()]))


def asked(what):
    role, case, *_ = BROKEN[what]
    if case is ON_TENSOR_CORES:
        case = of_role(case, role, "bf16")
        return [(case, DepthwiseConfig(lanes=4, strip=9, lines=4), operands_of(case))]
    config = DepthwiseConfig(lanes=4, strip=9, pieces=2 if role == "wgrad" else 1, splits=2 if role == "wgrad" else 1)
    cases = [of_role(case, role), of_role(dataclasses.replace(case, G=8), role)]
    return [(case, config, operands_of(case)) for case in cases]


def check(driver, folder, asked, number, shifts):
    replies = run(driver, folder, asked, shifts=shifts, environment={"BROKEN": str(number)})
    for reply, (case, _, operands) in zip(replies, asked, strict=True):
        harness.check(reply.result, truth(case, operands))


@pytest.mark.parametrize("shifts", dict.fromkeys((NOWHERE, *SHIFTED.values())), ids=str)
def test_kernels_of_which_no_piece_is_taken_are_right(broken_driver, tmp_path, shifts):
    shown = [asked(what) for what in BROKEN if SHIFTED.get(what, NOWHERE) == shifts]
    check(broken_driver, tmp_path, [*itertools.chain.from_iterable(shown)], -1, shifts)


@pytest.mark.parametrize("what", BROKEN)
def test_broken_kernels_are_found(broken_driver, tmp_path, what):
    with pytest.raises(AssertionError, match=FOUND):
        check(broken_driver, tmp_path, asked(what), list(BROKEN).index(what), SHIFTED.get(what, NOWHERE))
