"""Defects planted in the PTX of our Triton kernels are found: by a fault that names them, or by a wrong result.

Triton makes no TMA copies of our kernels, and so no mbarriers: test_cuda_defects.py has defects of those.
"""

import functools
import re

import pytest
import test_conv
import test_depthwise
import test_matmul
from defects import TWICE, WRONG, planted, said
from interpreter import Module
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
UNFENCED = "no fence.proxy.async follows the write"
WAIT = r"(cp\.async\.wait_group\s+)2;"
WGMMA = r"wgmma\.mma_async[^{]*\{[^}]*\}, "

# call, what is replaced, by what, which of the places (None: all), what is said
DEFECTS = {
    "copies are not waited for": ("mma", WAIT, "", None, "reads shared memory at .* into which a copy is under way"),
    "a copy too few is waited for": ("mma", WAIT, r"\g<1>3;", None, "reads shared memory at .* into which a copy is under way"),
    "a stage is filled again too early": ("mma", WAIT, r"\g<1>4;", None, "into which a copy is under way"),
    "a group of copies is not committed": ("mma", r"cp\.async\.commit_group;", "", -1, "into which a copy is under way"),
    "no barrier behind the wait": ("mma", r"bar\.sync\s+0;", "", 0, RACE),
    "no barriers in the loop": ("mma", r"bar\.sync\s+0;", "", None, RACE),
    "a factor is not transposed": ("mma", r"(ldmatrix\S*x4)\.trans", r"\1", None, WRONG),
    "swapped registers of a factor": ("mma", r"(mma\.sync\S* \{[^}]*\}, \{ )(%r\d+), (%r\d+)", r"\1\3, \2", None, WRONG),
    "a product is not added": ("mma", r"(mma\.sync[^;]*\}, )\{[^}]*\};", rf"\1{{{', '.join(4 * ['0f00000000'])}}};", 3, WRONG),
    "rows beyond the matrix are loaded": ("mma", SIZE, r"mov.b32 \1, 16;", None, f"reads {OUTSIDE}"),
    "rows beyond the matrix are stored": ("mma", r"@%p\d+ (st\.global)", r"\1", None, f"writes {OUTSIDE}|{TWICE}"),
    "a store is shifted": ("mma", r"(st\.global\S* \[ %rd\d+ \+) 0", r"\1 16", 1, f"race: writes byte|{TWICE}"),
    "an unaligned load": ("odd", r"(ld\.global\.b16 \{ \S+ \}, \[ %rd\d+ \+) 0", r"\1 1", 3, "is no multiple of 2"),
    "a number beside the matrix is loaded": ("odd", r"@%p\d+ (ld\.global)", r"\1", None, f"reads {OUTSIDE}"),
    "a number beside the matrix is stored": ("odd", r"@%p\d+ (st\.global)", r"\1", None, f"{OUTSIDE}|{TWICE}"),
    "a number is put in its neighbour's place": ("odd", r"(st\.shared\.b16\s+\[%r\d+)\]", r"\1+2]", 0, f"{WRONG}|race|nothing has written"),
    "a stage is filled while wgmma reads it": ("wgmma", r"wgmma\.wait_group\S* 1;", "", None, "under way still reads"),
    "wgmma: a stage is filled too early": ("wgmma", r"(wgmma\.wait_group\S*) 1;", r"\1 2;", None, "under way still reads"),
    "sums are read early": ("wgmma", r"(wgmma\.wait_group\S*) 0;", r"\1 1;", None, "which a wgmma under way writes"),
    "a wgmma that no group has": ("wgmma", r"wgmma\.commit_group\S*;", "", None, "under way"),
    "no fence before wgmma": ("wgmma", r"wgmma\.fence\S*;", "", None, "no wgmma.fence precedes"),
    "no fence between the proxies": ("wgmma", r"fence\.proxy\.async\S*;", "", None, UNFENCED),
    "wgmma: no barrier behind the wait": ("wgmma", r"bar\.sync\s+0;", "", 0, RACE),
    "wgmma: no barrier before a stage is filled": ("wgmma", r"bar\.sync\s+0;", "", 1, RACE),
    "wgmma: copies are not waited for": ("wgmma", WAIT, r"\g<1>3;", None, "into which a copy is under way"),
    "swapped factors": ("wgmma", rf"({WGMMA})(%rd\d+), (%rd\d+)", r"\1\3, \2", None, WRONG),
    "a wgmma is left out": ("wgmma", rf"{WGMMA}[^;]*;", "", 2, WRONG),
    "old sums are not added": ("wgmma", rf"({WGMMA}%rd\d+, %rd\d+), %p\d+", r"\1, 0", 1, WRONG),
    "a step in memory is twice as long": (
        "wgmma",
        r"(add\.s64\s+%rd\d+, %rd\d+), 128;",
        r"\1, 256;",
        None,
        f"{OUTSIDE}|{WRONG}",
    ),
    "the depth's edge is a step late": ("wgmma", r"(setp\.lt\.u32\s+%p\d+, %r\d+), 208;", r"\1, 272;", None, OUTSIDE),
    "a turned factor: no fence between the proxies": (
        "turned",
        r"fence\.proxy\.async\S*;",
        "",
        None,
        "no fence.proxy.async follows the write",
    ),
    "a turned factor: no barriers": ("turned", r"bar\.sync\s+0;", "", None, RACE),
    "blocks' sums are added before they are there": ("fp8", r"wgmma\.wait_group\S* 0;", "", None, "which a wgmma under way writes"),
    "both splits write to one place": ("splits", r"(st\.global\S* \[ )%rd\d+", r"\1%rd3", None, f"race: writes byte|{TWICE}"),
    "padding is loaded": ("strided", SIZE, r"mov.b32 \1, 16;", None, f"{OUTSIDE}|{WRONG}"),
    "filter gradient: sums are read early": ("wgrad", r"wgmma\.wait_group\S* 0;", "", None, "which a wgmma under way writes"),
    "sums are computed behind the fence": (
        "one step",
        r"(wgmma\.fence[^@]*?)mov\.b32\s+(%r\d+), (%r\d+);",
        r"\1add.s32 \2, \3, 0;",
        None,
        "was written since the last wgmma.fence",
    ),
    "depthwise: places beside the line are loaded": ("depthwise", r"@%p\d+ (ld\.global)", r"\1", None, f"{OUTSIDE}|{WRONG}"),
    "depthwise: places beside the result are stored": ("depthwise", r"@%p\d+ (st\.global)", r"\1", None, f"race: writes byte|{TWICE}"),
    "depthwise: a product is not added": (
        "depthwise",
        r"fma\.rn\.f32\s+(%r\d+), (%r\d+), (%r\d+), %r\d+;",
        r"mul.f32 \1, \2, \3;",
        4,
        WRONG,
    ),
    "no barriers between sums of warps": ("depthwise wgrad", r"bar\.sync\s+0;", "", None, RACE),
    "no barrier before the second sum": ("depthwise wgrad", r"bar\.sync\s+0;", "", 1, "race"),
    "sums of the wrong lanes": ("depthwise wgrad", r"(shfl\.sync\.bfly\S*\s+%r\d+, %r\d+,) 16", r"\1 4", None, WRONG),
    "the result of the wrong lane": ("depthwise wgrad", r"(shfl\.sync\.idx\S*\s+%r\d+, %r\d+), %r\d+", r"\1, 1", None, WRONG),
}


@functools.cache
def made(name) -> Call:
    return CALLS[name]()


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_found(name):
    of, pattern, replacement, which, wanted = DEFECTS[name]
    call = made(of)
    broken = Module(planted(call.ptx, call.problem.name, pattern, replacement, which))
    operands = call.operands(integers=True)
    assert re.search(wanted, said(lambda late: call.check(call.execute(operands, late, broken), operands, integers=True)))


@pytest.mark.parametrize("name", CALLS)
def test_without_a_defect_nothing_is_said(name):
    made(name).execute_and_check()
