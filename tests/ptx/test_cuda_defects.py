"""Defects planted in the PTX of our CUDA kernels are found: by a fault that names them, or by a wrong result."""

import dataclasses
import functools
import re
from typing import Any

import cuda_convs
import pytest
import simt_weight_only
import test_causal_kernel
import test_depthwise
import test_simt
from cuda_calls import causal_call, conv_call, gram_call, matmul_call, ragged_call, weight_only_call
from cuda_kernels import execute, modules
from cuda_launches import GRAMS, MATMULS, PIECES, RAGGEDS, SCALEDS, WIDE_WEIGHT_ONLYS, ask
from defects import TWICE, WRONG, planted, rows, said
from ptxsim import Module
from test_cuda_kernels import TWO_MULTIPROCESSORS, scaled

from jaxext.backends.fields import DTYPES
from jaxext.ops.causal import cuda as cuda_causal
from jaxext.ops.conv import cuda_dense as cuda_conv
from jaxext.ops.conv import cuda_depthwise
from jaxext.ops.scaled import cuda_weight_only

pytestmark = pytest.mark.cuda


def row_of(rows, **wanted):
    return next(row for row in rows if wanted.items() <= row.items())


def product():
    """Several tiles by each block, and more steps than stages."""
    row = row_of(MATMULS, role="nn", operands="bfloat16", tile_m=128, tile_n=256, fused=False)
    sizes = 3 * row["tile_m"] + 8, row["tile_n"] + 8, (row["stages"] + 1) * row["tile_k"] + 8
    return matmul_call(row, 1, *sizes), {"device": TWO_MULTIPROCESSORS}


def pingpong():
    """Float32 sums; the warp groups take turns, and each has several tiles."""
    row = row_of(MATMULS, role="nn", operands="bfloat16", result="float32", tile_m=64, tile_n=64)
    return matmul_call(row, 1, 3 * 64 + 8, 64 + 8, 2 * row["tile_k"] + 8), {"device": TWO_MULTIPROCESSORS}


def tf32():
    """Float32; several tiles by each block, and more steps than stages."""
    row = row_of(MATMULS, role="nt", operands="float32", tile_m=128, tile_n=256)
    sizes = 2 * row["tile_m"] + 4, row["tile_n"] + 4, (row["stages"] + 1) * row["tile_k"] + 4
    return matmul_call(row, 1, *sizes), {"device": TWO_MULTIPROCESSORS}


def ragged(role):
    """A group ends within a tile, and within a step of the contraction over its rows."""
    row = row_of(RAGGEDS, role=role, operands="bfloat16", tile_m=128)
    return ragged_call(row, (150, 0, 75), 230, K=(row["stages"] + 1) * row["tile_k"] + 8, N=264), {"device": TWO_MULTIPROCESSORS}


def scaled_product(columns):
    """Return a product with more steps than stages, and a scale for 128 of each row, and for squares or each column."""
    row = row_of(SCALEDS, operands="float8_e4m3fn", second="float8_e4m3fn", tile_m=128)
    M, N, steps = 2 * row["tile_m"] + 8, 3 * 128, row["stages"] + 1
    return scaled(row, (M, 128 * steps, N), (M, steps, columns)), {"device": TWO_MULTIPROCESSORS}


def own_transpose():
    """Two rows of clusters and more steps than stages, with an addend."""
    row = row_of(GRAMS, operands="bfloat16", tile_m=192)
    sizes = 2 * row["tile_m"] + 40, (row["stages"] + 1) * row["tile_k"] + 8
    return gram_call(row, 1, *sizes, factors=(2.0, -1.0)), {"device": TWO_MULTIPROCESSORS}


def pieces(role, number):
    """Return a product with more steps than stages and slots, and tails of rows, columns and a step."""
    row: dict[str, Any] = row_of(PIECES, role=role, pieces=number)
    return matmul_call(row, 1, row["tile_m"] + 4, row["tile_n"] + 4, (row["stages"] + 1) * 32 + 4, integers=number == 2), {}


def convolution(name, tile=(128, 128), **changes):
    problem = dataclasses.replace(cuda_convs.CASES[name], **changes)
    tile = dict(zip(("tile_m", "tile_n"), tile, strict=True))
    return conv_call(problem, cuda_conv.ConvConfig(**tile, cluster=2)), {}


def depthwise(name, role, dtype, tensor_cores=False, **changes):
    case = dataclasses.replace(test_simt.CASES[name], **changes)
    problem = test_depthwise.of_role(case, role, DTYPES[dtype], arch=90)
    config = next(config for config in cuda_depthwise.candidates(problem) if (config.lines > 0) == tensor_cores)
    return conv_call(problem, config), {}


def causal_conv1d(role, **given):
    """Return a convolution with exactly 4 taps, or of packed sequences."""
    problem = test_causal_kernel.a_problem(role, activation=None, dtype="fp32", C=24, state=True, **given)
    return causal_call(problem, cuda_causal.CausalConfig(lanes=2, strip=6, splits=2 if role == "backward" else 1)), {}


def weight_only():
    """Several steps, of which each has its scale, and a row, columns and a step that are not there."""
    problem = simt_weight_only.a_problem(M=5, N=96, K=9 * 32, S=9, bits=4)
    return weight_only_call(problem, cuda_weight_only.WeightOnlyConfig(tile_m=8, tile_n=64)), {}


def wide_weight_only():
    """Return a product with more stages than the ring has, each with its scales, and tails of a row, columns and half a stage."""
    row = row_of(WIDE_WEIGHT_ONLYS, operands="bfloat16", bits=8, tile_m=64)
    problem = simt_weight_only.a_problem(M=5, N=288, K=(row["stages"] + 1) * 64, S=row["stages"] + 1, bits=8)
    return weight_only_call(problem, cuda_weight_only.WeightOnlyConfig(tile_m=64, tile_n=256), integers=False), {}


CALLS = {
    "product": product,
    "ping-pong": pingpong,
    "TF32": tf32,
    "ragged": functools.partial(ragged, "nn"),
    "ragged sum": functools.partial(ragged, "tn"),
    "scaled": functools.partial(scaled_product, 3),
    "scaled columns": functools.partial(scaled_product, 3 * 128),
    "x xT": own_transpose,
    "pieces": functools.partial(pieces, "nn", 3),
    "two pieces": functools.partial(pieces, "tn", 2),
    "fprop": functools.partial(convolution, "strided, padded unevenly", C=520, K=72),
    "wgrad": functools.partial(convolution, "wgrad", N=12, C=136, K=72),
    "dgrad": functools.partial(convolution, "dgrad, strided, 1x1", C=72, K=136),
    # Both warp groups have rows in each of their bands, and the ring of stages begins anew.
    "two groups": functools.partial(convolution, "strided, padded unevenly", (256, 128), N=16, C=136, K=136),
    "two groups of dgrad": functools.partial(convolution, "dgrad, strided", (256, 128), N=12, C=72, K=136),
    "two groups of 256": functools.partial(convolution, "causal", (128, 256), N=8, C=136, K=264),
    "two groups of wgrad": functools.partial(convolution, "wgrad of one long image", (256, 128), N=10, C=72, K=200),
    "causal": functools.partial(depthwise, "causal k3, several chunks", "fprop", "float32", G=240),
    "depthwise wgrad": functools.partial(depthwise, "3x3", "wgrad", "bfloat16", G=240),
    "7x7": functools.partial(depthwise, "7x7", "dgrad", "float16", G=240),
    "tensor cores": functools.partial(depthwise, "7x7", "fprop", "bfloat16", True, G=24, N=3),
    "tensor sums": functools.partial(depthwise, "7x7", "wgrad", "bfloat16", True, G=24, N=3),
    "many outputs": functools.partial(depthwise, "multiplier 2", "fprop", "bfloat16", G=120),
    "sums of outputs": functools.partial(depthwise, "multiplier 16", "dgrad", "bfloat16", G=15),
    "planes": functools.partial(depthwise, "3x2x3", "fprop", "bfloat16", G=240),
    "causal forward": functools.partial(causal_conv1d, "forward"),
    "causal backward": functools.partial(causal_conv1d, "backward"),
    "weight-only": weight_only,
    "wide weight-only": wide_weight_only,
    "packed": functools.partial(causal_conv1d, "backward", idx=True, idx_of_states=True),
}
# Kinds of instructions, and parts of them in groups.
WAIT_FOR_ALL, WAIT_FOR_ALL_BUT_ONE = r"wgmma\.wait_group\.sync\.aligned 0;", r"wgmma\.wait_group\.sync\.aligned 1;"
TRY_WAIT = r"(mbarrier\.try_wait\.parity\S* P1, \[%r\d+\]), %r\d+"
WAITS = r"mbarrier\.try_wait\.parity\S* P1, \[%r\d+\], %r\d+, %r\d+;"  # without an end
EXPECT = r"(mbarrier\.arrive\.expect_tx\S* _, \[%r\d+\]), %r\d+"
ARRIVE = r"mbarrier\.arrive\.shared::cta\.b64 _, \[%r\d+\];"
REMOTE_ARRIVE = r"mbarrier\.arrive\.shared::cluster\.b64 _, \[remAddr32\];"
INIT = r"(mbarrier\.init\S* \[%r\d+\]), %r\d+;"
BARRIER, WARP_BARRIER, GROUP_BARRIER = r"bar\.sync\s+0;", r"bar\.warp\.sync\s+-1;", r"bar\.sync\s+%r\d+, %r\d+;"
PROXY_FENCE = r"fence\.proxy\.async\.shared::cta;"
STORED_PART = r"stmatrix\S* \[%r\d+\S*\], \{[^}]*\};"
ROUNDED_PAIR = r"cvt\.rn\.bf16x2\.f32 (%r\d+), (%f\d+), (%f\d+);"
FMA, PRODUCT = r"fma\.rn\.f32 (%f\d+), (%f\d+), (%f\d+), %f\d+;", r"mul.rn.f32 \1, \2, \3;"
LOAD, LOAD_OF_16_BYTES = r"(ld\.global\.nc\.f32 %f\d+, \[%rd\d+)\]", r"(ld\.global\.nc\.v4\S* \{[^}]*\}, \[%rd\d+)\]"
LOAD_OF_8_BYTES = LOAD_OF_16_BYTES.replace("v4", "v2")
STORE, STORE_OF_16_BYTES = r"(st\.global\S* \[%rd\d+)\]", r"(st\.global\.v4\.u32 \[%rd\d+)\]"
PAIR, SWAPPED = r"(%\w+), (%\w+)", r"\1\3, \2"
# What is said.
DEADLOCK, READS, WRITES = "deadlock", "under way still reads", "which a wgmma under way writes"
RACE, LANES, UNFENCED = "nothing has written|race", "which another lane of the warp", "no fence.proxy.async follows"
OUTSIDE, MORE_BYTES, NO_MBARRIER = "outside of all arrays", "bytes more than they expect", "no mbarrier was initialised"
NOT_WRITTEN, MORE_REGISTERS = "a copy is under way|nothing has written", "registers, more than 65536"

# What is replaced, by what, what is said, and in which calls, with a number if it is in one of several places.
DEFECTS = {
    "no barrier before a store by TMA": (GROUP_BARRIER, "", "race: reads shared memory", "product #0"),
    "no barrier before the next part": (GROUP_BARRIER, "", "which a copy or a wgmma under way still reads", "product #1"),
    "no barriers of a warp group": (GROUP_BARRIER, "", "race|reads shared memory at", "x xT"),
    "no barrier after clearing": (GROUP_BARRIER, "", f"{READS}|race", "ragged sum"),
    "no proxy fence": (PROXY_FENCE, "", UNFENCED, "product #3, ping-pong #0, ragged sum, pieces"),
    "no wait for stores by TMA": (r"cp\.async\.bulk\.wait_group\.read 1;", "", READS, "product"),
    "a store that no group has": (r"cp\.async\.bulk\.commit_group;", "", READS, "product #2"),
    "the last store is not waited for": (r"cp\.async\.bulk\.wait_group\.read 0;", "", "ends|under way", "product"),
    "a stage is given back too early": (r"(wgmma\.wait_group\S*) 1;", r"\1 2;", "race: writes shared memory", "product"),
    "stages reused early": (WAIT_FOR_ALL_BUT_ONE, "", READS, "product, TF32, ragged, fprop, wgrad, two groups"),
    "factors are made anew early": (WAIT_FOR_ALL_BUT_ONE, "", "which a wgmma under way reads", "wide weight-only"),
    "sums are read early": (WAIT_FOR_ALL, "", WRITES, "ragged, scaled, x xT, pieces #0, pieces #1, two groups, wide weight-only"),
    "sums are read a group early": (r"(wgmma\.wait_group\S*) 0;", r"\1 1;", WRITES, "product"),
    "no fence before wgmma": (r"wgmma\.fence\.sync\.aligned;", "", "no wgmma.fence", "product #0, pieces #0, wide weight-only"),
    "a wgmma that no group has": (r"wgmma\.commit_group\.sync\.aligned;", "", READS, "product"),
    "a phase is not waited for": (TRY_WAIT, r"\1, 1", "more arrivals", "product #0"),
    "a slot is taken early": (TRY_WAIT, r"\1, 1", "deadlock|more arrivals|race|under way", "two pieces #1"),
    "operands are read before they come": (TRY_WAIT, r"\1, 1", NOT_WRITTEN, "pieces #0, pieces #3"),
    "nothing is waited for": (TRY_WAIT, r"\1, 1", "nothing has written", "fprop"),
    "a stage is not waited for": (TRY_WAIT, r"\1, 1", RACE, "wide weight-only"),
    "the wrong phase": (TRY_WAIT, r"\1, 0", DEADLOCK, "product"),
    "a store before its turn": (WAITS, r"setp.eq.b32 P1, 0, 0;", "race|under way", "ping-pong #3"),
    "too few bytes expected": (EXPECT, r"\1, 1024", MORE_BYTES, "product, pieces, wide weight-only"),
    "half of the bytes expected": (EXPECT, r"\1, 16384", MORE_BYTES, "fprop"),
    "too many bytes expected": (EXPECT, r"\1, 500000", DEADLOCK, "product"),
    "a barrier for too many": (INIT, r"\1, 3;", DEADLOCK, "product #4"),
    "a barrier that is not made": (INIT, "", NO_MBARRIER, "product #0"),
    "one group gives a stage back for both": (INIT, r"\1, 2;", "more arrivals|under way|race", "two groups #1"),
    "a stage is given back by one warp": (INIT, r"\1, 1;", "race|deadlock", "wide weight-only"),
    "no cluster barrier": (r"barrier\.cluster\.(wait|arrive\.relaxed)\.aligned;", "", NO_MBARRIER, "product, fprop, wgrad"),
    "barriers made without a fence": (r"fence\.mbarrier_init\.release\.cluster;", "", "which another warp initialised", "product"),
    "no barrier after the barriers": (BARRIER, "", "which another warp initialised|no mbarrier", "pieces, wide weight-only"),
    "a stage is not given back": (REMOTE_ARRIVE, "", DEADLOCK, "product, ragged, scaled, x xT, two groups of wgrad"),
    "no arrival": (ARRIVE, "", DEADLOCK, "ping-pong #1, pieces #0, pieces #1, pieces #2, pieces #3, pieces #4, wide weight-only"),
    "a stage for the wrong block": (r"mapa\S* *remAddr32, (%r\d+), \S+;", r"mov.u32 remAddr32, \1;", "under way|race", "product"),
    "a store at swapped coordinates": (rf"(bulk\.tensor\.3d\.global\S* \[%rd\d+, \{{){PAIR}", SWAPPED, TWICE, "product"),
    "a load at swapped coordinates": (rf"(bulk\.tensor\.3d\.shared\S*[^;]*\{{){PAIR}", SWAPPED, WRONG, "product #0, TF32 #0"),
    "swapped corners": (rf"(im2col\S* \[%r\d+\], \[%rd\d+, \{{%r\d+, ){PAIR}", SWAPPED, WRONG, "fprop"),
    "a part that is not stored": (STORED_PART, "", WRONG, "product #5, x xT"),
    "a pair that is not stored": (r"st\.shared\.v2\.f32[^;]*;", "", f"{WRONG}|nothing has written", "ping-pong #5"),
    "swapped registers": (rf"(stmatrix\S* \[%r\d+\S*\], \{{){PAIR}", SWAPPED, WRONG, "product #5, x xT"),
    "swapped sums": (rf"(st\.shared\.v2\.f32 \[%r\d+\S*\], \{{){PAIR}", SWAPPED, WRONG, "ping-pong #5"),
    "swapped columns": (rf"(st\.shared\.v4\S* \[%r\d+\S*\], \{{){PAIR}", SWAPPED, WRONG, "scaled columns, two pieces #1"),
    "swapped descriptors": (rf"(wgmma\.mma_async\S* \{{[^}}]*\}}, ){PAIR}", SWAPPED, WRONG, "product #0"),
    "swapped factors of wgmma": (rf"(wgmma\.mma_async\S* \{{[^}}]*\}}, *\{{){PAIR}", SWAPPED, WRONG, "pieces #0, wide weight-only"),
    "swapped factors of mma": (
        rf"(mma\.sync\S* \{{[^}}]*\}}, \{{){PAIR}",
        SWAPPED,
        WRONG,
        "tensor cores #3, tensor sums #45, weight-only #1",
    ),
    "swapped bytes": (rf"(prmt\.b32\s+%r\d+, ){PAIR}, ", rf"{SWAPPED}, ", WRONG, "tensor cores #9, weight-only #2, wide weight-only"),
    "neighbours change places": (ROUNDED_PAIR, r"cvt.rn.bf16x2.f32 \1, \3, \2;", WRONG, "pieces #3"),
    "a last piece is lost": (ROUNDED_PAIR, r"mov.b32 \1, 0;", WRONG, "pieces #1"),
    "another mask": (r"(lop3\.b32 (?:%r\d+, ){4})(106|0x6A);", r"\g<1>0x80;", WRONG, "weight-only #3, wide weight-only"),
    "sums are not begun anew": (r"setp\.ne\.b32 p, %r\d+, 0;", "setp.eq.b32 p, 0, 0;", WRONG, "scaled, x xT, pieces, wide weight-only"),
    "products are not added": (FMA, PRODUCT, WRONG, "scaled, 7x7 #0, causal backward, wide weight-only"),
    "sums are not added to old ones": (r"add(?:\.rn)?\.f32 (%f\d+), (%f\d+), \1;", r"mov.f32 \1, \2;", WRONG, "two pieces"),
    "outputs are not summed": (r"add(?:\.rn)?\.f32 (%f\d+), (%f\d+), %f\d+;", r"mov.f32 \1, \2;", WRONG, "sums of outputs"),
    "rows of others are not cleared": (r"st\.v4\.u32[^;]*;", "", WRONG, "ragged sum"),
    "other sequences are read": (r"setp\.ne\.s32 (%p\d+), (%r\d+), %r\d+;", r"setp.ne.s32 \1, \2, \2;", WRONG, "packed"),
    "one group multiplies rows of the other": (
        r"(shl\.b32 %r\d+, %r\d+), 13;",
        r"\1, 12;",
        WRONG,
        "two groups #0, two groups of 256 #0, two groups of wgrad #0",
    ),
    "warps share the way to memory": (r"(mad\.lo\.s32 %r\d+, %r\d+), 2304,", r"\1, 0,", "race: ", "two groups"),
    "more registers than there are": (r"(setmaxnreg\.dec\.sync\.aligned\.u32) 104;", r"\1 128;", MORE_REGISTERS, "pieces"),
    "two groups take more registers": (r"(setmaxnreg\.dec\.sync\.aligned\.u32) 40;", r"\1 96;", MORE_REGISTERS, "two groups"),
    "rows are not divided": (
        r"(mul\.hi\.u32 %r\d+, %r\d+), %r\d+;",
        r"\1, 0;",
        "wrote, and no barrier is between",
        "dgrad, two groups of dgrad",
    ),
    "no barriers of a warp": (WARP_BARRIER, "", LANES, "fprop, ragged, scaled"),
    "no barrier of a warp group's lanes": (WARP_BARRIER, "", f"{LANES}|race", "x xT"),
    "no barrier of a warp before a store": (
        rf"(st\.shared\.u32 [^;]*;\s*){WARP_BARRIER}",
        r"\1",
        rf"reads shared memory at \d+, {LANES} wrote",
        "two groups",
    ),
    "no barrier of a warp behind a store": (
        rf"{WARP_BARRIER}(\s*(?:cvt\.\S+ [^;]*;\s*)*st\.shared)",
        r"\1",
        rf"writes shared memory at \d+, {LANES} reads",
        "two groups",
    ),
    "no barriers": (BARRIER, "", RACE, "causal, depthwise wgrad, sums of outputs, causal backward"),
    "one barrier too few": (BARRIER, "", RACE, "tensor cores #0, tensor cores #1, tensor sums #1, causal forward #0, weight-only #1"),
    "no barrier between sums": (BARRIER, "", "race", "causal backward #3, weight-only #2"),
    "a store is shifted": (STORE_OF_16_BYTES, r"\1+16]", f"{TWICE}|{OUTSIDE}", "ragged, scaled, x xT, wgrad, dgrad, two groups of 256"),
    "a store too far": (STORE, r"\1+16]", f"{OUTSIDE}|once", "pieces, causal, tensor cores, causal forward, weight-only, wide weight-only"),
    "a load too far": (LOAD_OF_16_BYTES, r"\1+16]", f"{OUTSIDE}|wrong", "causal, tensor cores"),
    "shared channels from elsewhere": (LOAD_OF_8_BYTES, r"\1+8]", f"{OUTSIDE}|wrong", "many outputs"),
    "the scales of other columns": (LOAD_OF_8_BYTES, r"\1+8]", f"{WRONG}|{OUTSIDE}", "wide weight-only"),
    "a scale of the row above": (LOAD, r"\1+-4]", f"{WRONG}|{OUTSIDE}", "scaled"),
    "an unaligned load": (LOAD_OF_16_BYTES, r"\1+2]", "no multiple of 16", "causal, weight-only"),
    "an unaligned load through the cache": (
        LOAD_OF_16_BYTES.replace(r"\.nc", ""),
        r"\1+2]",
        "no multiple of 16",
        "causal forward, tensor sums",
    ),
    "sources beside the image": (
        r"setp\.(?:ge|lt|gt|le)\.u32 (%p\d+), (%r\d+), (%r\d+);",
        r"setp.eq.u32 \1, \2, \2;",
        f"{OUTSIDE}|wrong",
        "planes",
    ),
}


@pytest.mark.sampled(25)
@pytest.mark.parametrize("name, pattern, replacement, which, wanted", rows(DEFECTS))
def test_a_planted_defect_is_found(name, pattern, replacement, which, wanted):
    call, where = CALLS[name]()
    known = modules()
    (kernel_name,) = {entry["kernel"] for entry in ask(call.case, where.get("device", 0))[1] if "kernel" in entry}
    broken = known | {kernel_name: Module(planted(known[kernel_name].ptx, kernel_name, pattern, replacement, which))}
    assert re.search(wanted, said(lambda late: call.check(execute(call, late, instead=broken, **where))))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", CALLS)
def test_without_a_defect_nothing_is_said(name):
    call, where = CALLS[name]()
    assert not said(lambda late: call.check(execute(call, late, **where)))
