"""Defects planted in the PTX of our Triton kernels are found: by a fault that names them, or by a wrong result.

Triton makes no TMA copies of our kernels, and so no mbarriers: test_cuda_defects.py has defects of those.
"""

import functools
import re

import pytest
import test_conv
import test_depthwise
import test_matmul
from defects import TWICE, WRONG, planted, rows, said
from ptxsim import Module
from triton_kernels import Call, call, skip_without_compiler

from jaxext.kernels import conv, matmul

skip_without_compiler()

BF16 = ("bf16",) * 3


def product(role, sizes, dtypes, arch, **config):
    return Call("matmul", test_matmul.a_problem(role, sizes, dtypes, "tf32", arch), matmul.Config(**config))


def convolution(role, arch, config, **problem):
    return Call("conv", test_conv.a_problem(role, dtypes=BF16, arch=arch, **problem), conv.Config(**config))


def depthwise(name, role, **changes):
    return call("depthwise", test_depthwise.of_role(test_depthwise.CASES[name], role, **changes))


TILE = dict(tile_m=64, tile_n=64, tile_k=32, num_warps=4, num_stages=3)
# No problem fits its tiles, and all but "one step" have more steps than stages.
CALLS = {
    "mma": functools.partial(product, "nn", (1, 72, 80, 136), BF16, 80, **TILE),
    "odd": functools.partial(product, "nn", (1, 33, 35, 37), BF16, 80, **TILE),
    "wgmma": functools.partial(product, "nn", (1, 136, 144, 272), BF16, 90, **dict(TILE, tile_m=128, tile_n=128, tile_k=64, num_warps=8)),
    "fp8": functools.partial(product, "nt", (1, 72, 272, 80), ("fp8e4nv", "fp8e4nv", "bf16"), 90, **dict(TILE, tile_k=64)),
    "one step": functools.partial(convolution, "wgrad", 90, dict(TILE, splits=2), N=1, C=16, K=72, input=(7, 8)),
    "depthwise wgrad": functools.partial(depthwise, "3x3 stride 2", "wgrad"),
}
OUTSIDE = "outside of all arrays"
ARRIVING = "into which a copy is under way"
BARRIER = r"bar\.sync\s+0;"
WAIT = r"(cp\.async\.wait_group\s+)2;"

# What is replaced, by what, what is said, and in which calls, with a number if it is in one of several places.
DEFECTS = {
    "a group of copies is not committed": (r"cp\.async\.commit_group;", "", ARRIVING, "mma #-1"),
    "wgmma: a copy too few is waited for": (WAIT, r"\g<1>3;", ARRIVING, "wgmma"),
    "no barrier before the second sum": (BARRIER, "", "race", "depthwise wgrad #1"),
    "rows beyond the matrix are stored": (r"@%p\d+ (st\.global)", r"\1", f"writes {OUTSIDE}|{TWICE}", "mma"),
    "a number is put in its neighbour's place": (r"(st\.shared\.b16\s+\[%r\d+)\]", r"\1+2]", f"{WRONG}|race|nothing has written", "odd #0"),
    "a stage is filled while wgmma reads it": (r"wgmma\.wait_group\S* 1;", "", "under way still reads", "wgmma"),
    "sums are computed behind the fence": (
        r"(wgmma\.fence[^@]*?)mov\.b32\s+(%r\d+), (%r\d+);",
        r"\1add.s32 \2, \3, 0;",
        "was written since the last wgmma.fence",
        "one step",
    ),
}


@functools.cache
def made(name) -> Call:
    return CALLS[name]()


@pytest.mark.parametrize("name, pattern, replacement, which, wanted", rows(DEFECTS))
def test_a_planted_defect_is_found(name, pattern, replacement, which, wanted):
    call = made(name)
    broken = Module(planted(call.ptx, call.problem.name, pattern, replacement, which))
    operands = call.operands(integers=True)
    assert re.search(wanted, said(lambda late: call.check(call.execute(operands, late, broken), operands, integers=True)))


@pytest.mark.parametrize("name", CALLS)
def test_without_a_defect_nothing_is_said(name):
    made(name).execute_and_check()
