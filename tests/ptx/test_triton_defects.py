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
    "turned": functools.partial(product, "nn", (1, 72, 80, 144), ("fp32",) * 3, 90, **TILE),
    "fp8": functools.partial(product, "nt", (1, 72, 272, 80), ("fp8e4nv", "fp8e4nv", "bf16"), 90, **dict(TILE, tile_k=64)),
    "splits": functools.partial(product, "tn", (1, 272, 72, 80), BF16, 90, **TILE, splits=2),
    "strided": functools.partial(convolution, "fprop", 80, dict(TILE, num_warps=2), C=16, K=24, input=(7, 7), stride=(2, 1)),
    "wgrad": functools.partial(convolution, "wgrad", 90, dict(TILE, splits=2), C=16, K=72, input=(9, 9)),
    "one step": functools.partial(convolution, "wgrad", 90, dict(TILE, splits=2), N=1, C=16, K=72, input=(7, 8)),
    "depthwise": functools.partial(depthwise, "3x3", "fprop"),
    "depthwise wgrad": functools.partial(depthwise, "3x3 stride 2", "wgrad"),
}
RACE = "race|nothing has written|under way"
OUTSIDE = "outside of all arrays"
SIZE = r"selp\.b32\s+(%r\d+), 16, 0, %p\d+;"  # bytes of a copy: 16, or none
ARRIVING, PENDING_SUMS = "into which a copy is under way", "which a wgmma under way writes"
BARRIER = r"bar\.sync\s+0;"
WAIT = r"(cp\.async\.wait_group\s+)2;"
WGMMA = r"wgmma\.mma_async[^{]*\{[^}]*\}, "

# What is replaced, by what, what is said, and in which calls, with a number if it is in one of several places.
DEFECTS = {
    "copies are not waited for": (WAIT, "", f"reads shared memory at .* {ARRIVING}", "mma"),
    "a copy too few is waited for": (WAIT, r"\g<1>3;", f"reads shared memory at .* {ARRIVING}", "mma"),
    "a stage is filled again too early": (WAIT, r"\g<1>4;", ARRIVING, "mma"),
    "a group of copies is not committed": (r"cp\.async\.commit_group;", "", ARRIVING, "mma #-1"),
    "wgmma: a copy too few is waited for": (WAIT, r"\g<1>3;", ARRIVING, "wgmma"),
    "no barrier behind the wait": (BARRIER, "", RACE, "mma #0, wgmma #0"),
    "no barrier before a stage is filled": (BARRIER, "", RACE, "wgmma #1"),
    "no barriers": (BARRIER, "", RACE, "mma, turned, depthwise wgrad"),
    "no barrier before the second sum": (BARRIER, "", "race", "depthwise wgrad #1"),
    "a factor is not transposed": (r"(ldmatrix\S*x4)\.trans", r"\1", WRONG, "mma"),
    "swapped registers of a factor": (r"(mma\.sync\S* \{[^}]*\}, \{ )(%r\d+), (%r\d+)", r"\1\3, \2", WRONG, "mma"),
    "a product is not added": (r"(mma\.sync[^;]*\}, )\{[^}]*\};", rf"\1{{{', '.join(4 * ['0f00000000'])}}};", WRONG, "mma #3"),
    "rows beyond the matrix are loaded": (SIZE, r"mov.b32 \1, 16;", f"reads {OUTSIDE}", "mma"),
    "rows beyond the matrix are stored": (r"@%p\d+ (st\.global)", r"\1", f"writes {OUTSIDE}|{TWICE}", "mma"),
    "a store is shifted": (r"(st\.global\S* \[ %rd\d+ \+) 0", r"\1 16", f"race: writes byte|{TWICE}", "mma #1"),
    "an unaligned load": (r"(ld\.global\.b16 \{ \S+ \}, \[ %rd\d+ \+) 0", r"\1 1", "is no multiple of 2", "odd #3"),
    "a number beside the matrix is loaded": (r"@%p\d+ (ld\.global)", r"\1", f"reads {OUTSIDE}", "odd"),
    "a number beside the matrix is stored": (r"@%p\d+ (st\.global)", r"\1", f"{OUTSIDE}|{TWICE}", "odd"),
    "a number is put in its neighbour's place": (r"(st\.shared\.b16\s+\[%r\d+)\]", r"\1+2]", f"{WRONG}|race|nothing has written", "odd #0"),
    "a stage is filled while wgmma reads it": (r"wgmma\.wait_group\S* 1;", "", "under way still reads", "wgmma"),
    "a stage is filled too early": (r"(wgmma\.wait_group\S*) 1;", r"\1 2;", "under way still reads", "wgmma"),
    "sums are read a group early": (r"(wgmma\.wait_group\S*) 0;", r"\1 1;", PENDING_SUMS, "wgmma"),
    "sums are read early": (r"wgmma\.wait_group\S* 0;", "", PENDING_SUMS, "fp8, wgrad"),
    "a wgmma that no group has": (r"wgmma\.commit_group\S*;", "", "under way", "wgmma"),
    "no fence before wgmma": (r"wgmma\.fence\S*;", "", "no wgmma.fence precedes", "wgmma"),
    "no fence between the proxies": (r"fence\.proxy\.async\S*;", "", "no fence.proxy.async follows the write", "wgmma, turned"),
    "swapped factors": (rf"({WGMMA})(%rd\d+), (%rd\d+)", r"\1\3, \2", WRONG, "wgmma"),
    "a wgmma is left out": (rf"{WGMMA}[^;]*;", "", WRONG, "wgmma #2"),
    "old sums are not added": (rf"({WGMMA}%rd\d+, %rd\d+), %p\d+", r"\1, 0", WRONG, "wgmma #1"),
    "a step in memory is twice as long": (r"(add\.s64\s+%rd\d+, %rd\d+), 128;", r"\1, 256;", f"{OUTSIDE}|{WRONG}", "wgmma"),
    "the depth's edge is a step late": (r"(setp\.lt\.u32\s+%p\d+, %r\d+), 208;", r"\1, 272;", OUTSIDE, "wgmma"),
    "both splits write to one place": (r"(st\.global\S* \[ )%rd\d+", r"\1%rd3", f"race: writes byte|{TWICE}", "splits"),
    "padding is loaded": (SIZE, r"mov.b32 \1, 16;", f"{OUTSIDE}|{WRONG}", "strided"),
    "sums are computed behind the fence": (
        r"(wgmma\.fence[^@]*?)mov\.b32\s+(%r\d+), (%r\d+);",
        r"\1add.s32 \2, \3, 0;",
        "was written since the last wgmma.fence",
        "one step",
    ),
    "places beside the line are loaded": (r"@%p\d+ (ld\.global)", r"\1", f"{OUTSIDE}|{WRONG}", "depthwise"),
    "places beside the result are stored": (r"@%p\d+ (st\.global)", r"\1", f"race: writes byte|{TWICE}", "depthwise"),
    "a tap is not added": (r"fma\.rn\.f32\s+(%r\d+), (%r\d+), (%r\d+), %r\d+;", r"mul.f32 \1, \2, \3;", WRONG, "depthwise #4"),
    "sums of the wrong lanes": (r"(shfl\.sync\.bfly\S*\s+%r\d+, %r\d+,) 16", r"\1 4", WRONG, "depthwise wgrad"),
    "the result of the wrong lane": (r"(shfl\.sync\.idx\S*\s+%r\d+, %r\d+), %r\d+", r"\1, 1", WRONG, "depthwise wgrad"),
}


@functools.cache
def made(name) -> Call:
    return CALLS[name]()


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name, pattern, replacement, which, wanted", rows(DEFECTS))
def test_a_planted_defect_is_found(name, pattern, replacement, which, wanted):
    call = made(name)
    broken = Module(planted(call.ptx, call.problem.name, pattern, replacement, which))
    operands = call.operands(integers=True)
    assert re.search(wanted, said(lambda late: call.check(call.execute(operands, late, broken), operands, integers=True)))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", CALLS)
def test_without_a_defect_nothing_is_said(name):
    made(name).execute_and_check()
