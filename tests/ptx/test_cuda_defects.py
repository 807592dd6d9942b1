"""Defects planted in the PTX of our CUDA kernels, and of small ones, are found: by a fault that names them, or by a wrong result."""

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
import test_small_kernels
from cuda_calls import causal_call, conv_call, gram_call, matmul_call, ragged_call, weight_only_call
from cuda_kernels import execute, modules
from cuda_launches import GRAMS, MATMULS, PIECES, RAGGEDS, SCALEDS, WIDE_WEIGHT_ONLYS, ask
from defects import TWICE, WRONG, planted, said
from interpreter import LATE, Fault, Module
from test_cuda_kernels import TWO_MULTIPROCESSORS, scaled

from jaxext.backends import problems
from jaxext.backends.cuda import cuda_causal, cuda_conv, cuda_depthwise, cuda_weight_only


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


def ragged(role):
    """A group ends within a tile, and within a step of the contraction over its rows."""
    row = row_of(RAGGEDS, role=role, operands="bfloat16", tile_m=128)
    return ragged_call(row, (150, 0, 75), 230, K=(row["stages"] + 1) * row["tile_k"] + 8, N=264), {"device": TWO_MULTIPROCESSORS}


def scaled_product(columns):
    """More steps than stages, with a scale for 128 of each row, and for squares or each column."""
    row = row_of(SCALEDS, operands="float8_e4m3fn", second="float8_e4m3fn", tile_m=128)
    M, N, steps = 2 * row["tile_m"] + 8, 3 * 128, row["stages"] + 1
    return scaled(row, (M, 128 * steps, N), (M, steps, columns)), {"device": TWO_MULTIPROCESSORS}


def gram():
    """Two rows of clusters and more steps than stages, with an addend."""
    row = row_of(GRAMS, operands="bfloat16", tile_m=192)
    sizes = 2 * row["tile_m"] + 40, (row["stages"] + 1) * row["tile_k"] + 8
    return gram_call(row, 1, *sizes, factors=(2.0, -1.0)), {"device": TWO_MULTIPROCESSORS}


def pieces(role, number):
    """More steps than stages and slots; rows, columns and a part of a step that are not there."""
    row: dict[str, Any] = row_of(PIECES, role=role, pieces=number)
    return matmul_call(row, 1, row["tile_m"] + 4, row["tile_n"] + 4, (row["stages"] + 1) * 32 + 4, integers=number == 2), {}


def convolution(name, tile=(128, 128), **changes):
    problem = dataclasses.replace(cuda_convs.CASES[name], **changes)
    tile = dict(zip(("tile_m", "tile_n"), tile, strict=True))
    return conv_call(problem, cuda_conv.ConvConfig(**tile, cluster=2)), {}


def depthwise(name, role, dtype, tensor_cores=False, **changes):
    case = dataclasses.replace(test_simt.CASES[name], **changes)
    problem = test_depthwise.of_role(case, role, problems.DTYPES[dtype], arch=90)
    config = next(config for config in cuda_depthwise.candidates(problem) if (config.lines > 0) == tensor_cores)
    return conv_call(problem, config), {}


def causal_conv1d(role, **given):
    """Exactly 4 taps, or packed sequences."""
    problem = test_causal_kernel.a_problem(role, activation=None, dtype="fp32", C=24, state=True, **given)
    return causal_call(problem, cuda_causal.CausalConfig(lanes=2, strip=6, splits=2 if role == "backward" else 1)), {}


def weight_only():
    """Several steps, of which each has its scale, and a row, columns and a step that are not there."""
    problem = simt_weight_only.a_problem(M=5, N=96, K=9 * 32, S=9, bits=4)
    return weight_only_call(problem, cuda_weight_only.WeightOnlyConfig(tile_m=8, tile_n=64)), {}


def wide_weight_only():
    """More stages than the ring has, of which each has its scales, and a row, columns and half of a stage that are not there."""
    row = row_of(WIDE_WEIGHT_ONLYS, operands="bfloat16", bits=8, tile_m=64)
    problem = simt_weight_only.a_problem(M=5, N=288, K=(row["stages"] + 1) * 64, S=row["stages"] + 1, bits=8)
    return weight_only_call(problem, cuda_weight_only.WeightOnlyConfig(tile_m=64, tile_n=256), integers=False), {}


CALLS = {
    "product": product,
    "ping-pong": pingpong,
    "ragged": functools.partial(ragged, "nn"),
    "ragged sum": functools.partial(ragged, "tn"),
    "scaled": functools.partial(scaled_product, 3),
    "scaled columns": functools.partial(scaled_product, 3 * 128),
    "gram": gram,
    "pieces": functools.partial(pieces, "nn", 3),
    "two pieces": functools.partial(pieces, "tn", 2),
    "fprop": functools.partial(convolution, "strided, padded unevenly", C=520, K=72),
    "wgrad": functools.partial(convolution, "wgrad", N=12, C=136, K=72),
    "dgrad": functools.partial(convolution, "dgrad, strided, 1x1", C=72, K=136),
    # Both warp groups have rows in each of their bands, and the ring of stages begins anew.
    "two groups": functools.partial(convolution, "strided, padded unevenly", (256, 128), N=16, C=136, K=136),
    "two groups, dgrad": functools.partial(convolution, "dgrad, strided", (256, 128), N=12, C=72, K=136),
    "two groups, wide": functools.partial(convolution, "causal", (128, 256), N=8, C=136, K=264),
    "two groups, wgrad": functools.partial(convolution, "wgrad of one long image", (256, 128), N=10, C=72, K=200),
    "causal": functools.partial(depthwise, "causal k3, several chunks", "fprop", "float32", G=240),
    "depthwise wgrad": functools.partial(depthwise, "3x3", "wgrad", "bfloat16", G=240),
    "7x7": functools.partial(depthwise, "7x7", "dgrad", "float16", G=240),
    "tensor cores": functools.partial(depthwise, "7x7", "fprop", "bfloat16", True, G=24, N=3),
    "many outputs": functools.partial(depthwise, "multiplier 2", "fprop", "bfloat16", G=120),
    "sums of outputs": functools.partial(depthwise, "multiplier 16", "dgrad", "bfloat16", G=15),
    "planes": functools.partial(depthwise, "3x2x3", "fprop", "bfloat16", G=240),
    "causal forward": functools.partial(causal_conv1d, "forward"),
    "causal backward": functools.partial(causal_conv1d, "backward"),
    "weight-only": weight_only,
    "wide weight-only": wide_weight_only,
    "packed": functools.partial(causal_conv1d, "backward", idx=True, idx_of_states=True),
}
TRY_WAIT = r"(mbarrier\.try_wait\.parity\S* P1, \[%r\d+\]), %r\d+"
WAITS = r"mbarrier\.try_wait\.parity\S* P1, \[%r\d+\], %r\d+, %r\d+;"  # without an end
EXPECT = r"(mbarrier\.arrive\.expect_tx\S* _, \[%r\d+\]), %r\d+"
WARP_BARRIER = r"bar\.warp\.sync\s+-1;"
ARRIVE = r"mbarrier\.arrive\.shared::cta\.b64 _, \[%r\d+\];"
ROUNDED_PAIR = r"cvt\.rn\.bf16x2\.f32 (%r\d+), (%f\d+), (%f\d+);"
REMOTE_ARRIVE = r"mbarrier\.arrive\.shared::cluster\.b64 _, \[remAddr32\];"

# call, what is replaced, by what, which of the places (None: all), what is said
DEFECTS = {
    "no barrier before a store by TMA": ("product", r"bar\.sync %r\d+, %r\d+;", "", 0, "race: reads shared memory"),
    "no barrier before the next part": ("product", r"bar\.sync %r\d+, %r\d+;", "", 1, "which a copy or a wgmma under way still reads"),
    "no fence before a store by TMA": ("product", r"fence\.proxy\.async\.shared::cta;", "", 3, "no fence.proxy.async follows"),
    "no wait for stores by TMA": ("product", r"cp\.async\.bulk\.wait_group\.read 1;", "", None, "under way still reads"),
    "a store that no group has": ("product", r"cp\.async\.bulk\.commit_group;", "", 2, "under way still reads"),
    "the last store is not waited for": ("product", r"cp\.async\.bulk\.wait_group\.read 0;", "", None, "ends|under way"),
    "a stage is given back too early": ("product", r"(wgmma\.wait_group\.sync\.aligned) 1;", r"\1 2;", None, "race: writes shared memory"),
    "a stage is given back without a wait": ("product", r"wgmma\.wait_group\.sync\.aligned 1;", "", None, "under way still reads"),
    "sums are read early": ("product", r"(wgmma\.wait_group\.sync\.aligned) 0;", r"\1 1;", None, "which a wgmma under way writes"),
    "no fence before wgmma": ("product", r"wgmma\.fence\.sync\.aligned;", "", 0, "no wgmma.fence"),
    "a wgmma that no group has": ("product", r"wgmma\.commit_group\.sync\.aligned;", "", None, "under way still reads"),
    "a phase is not waited for": ("product", TRY_WAIT, r"\1, 1", 0, "more arrivals"),
    "the wrong phase": ("product", TRY_WAIT, r"\1, 0", None, "deadlock"),
    "too few bytes expected": ("product", EXPECT, r"\1, 1024", None, "bytes more than they expect"),
    "too many bytes expected": ("product", EXPECT, r"\1, 500000", None, "deadlock"),
    "a barrier for too many": ("product", r"(mbarrier\.init\S* \[%r\d+\]), %r\d+;", r"\1, 3;", 4, "deadlock"),
    "a barrier that is not made": ("product", r"mbarrier\.init\S* \[%r\d+\], %r\d+;", "", 0, "no mbarrier was initialised"),
    "no cluster barrier": ("product", r"barrier\.cluster\.(wait|arrive\.relaxed)\.aligned;", "", None, "no mbarrier was initialised"),
    "barriers made without a fence": ("product", r"fence\.mbarrier_init\.release\.cluster;", "", None, "which another warp initialised"),
    "a stage is not given back": ("product", REMOTE_ARRIVE, "", None, "deadlock"),
    "a stage for the wrong block": (
        "product",
        r"mapa\S* *remAddr32, (%r\d+), \S+;",
        r"mov.u32 remAddr32, \1;",
        None,
        "under way|race",
    ),
    "a store at swapped coordinates": ("product", r"(bulk\.tensor\.3d\.global\S* \[%rd\d+, \{)(%r\d+), (%r\d+)", r"\1\3, \2", None, TWICE),
    "a load at swapped coordinates": ("product", r"(bulk\.tensor\.3d\.shared\S*[^;]*\{)(%r\d+), (%r\d+)", r"\1\3, \2", 0, WRONG),
    "a part that is not stored": ("product", r"stmatrix\S* \[%r\d+\], \{[^}]*\};", "", 5, WRONG),
    "swapped registers": ("product", r"(stmatrix\S* \[%r\d+\], \{)(%r\d+), (%r\d+)", r"\1\3, \2", 5, WRONG),
    "swapped factors": ("product", r"(wgmma\.mma_async\S* \{[^}]*\}, )(%rd\d+), (%rd\d+)", r"\1\3, \2", 0, WRONG),
    "ping-pong: a store before its turn": ("ping-pong", WAITS, r"setp.eq.b32 P1, 0, 0;", 3, "race|under way"),
    "ping-pong: no turn is given": ("ping-pong", r"mbarrier\.arrive\.shared::cta\.b64 _, \[%r\d+\];", "", 1, "deadlock"),
    "ping-pong: no fence before a store": ("ping-pong", r"fence\.proxy\.async\.shared::cta;", "", 0, "no fence.proxy.async follows"),
    "ping-pong: a part that is not stored": ("ping-pong", r"st\.shared\.v2\.f32[^;]*;", "", 5, f"{WRONG}|nothing has written"),
    "ping-pong: swapped sums": ("ping-pong", r"(st\.shared\.v2\.f32 \[%r\d+\S*\], \{)(%f\d+), (%f\d+)", r"\1\3, \2", 5, WRONG),
    "ragged: stages reused early": ("ragged", r"wgmma\.wait_group\.sync\.aligned 1;", "", None, "under way still reads"),
    "ragged: sums are read early": ("ragged", r"wgmma\.wait_group\.sync\.aligned 0;", "", None, "which a wgmma under way writes"),
    "ragged: a stage is not given back": ("ragged", REMOTE_ARRIVE, "", None, "deadlock"),
    "ragged: a store is shifted": ("ragged", r"(st\.global\.v4\.u32 \[%rd\d+)\]", r"\1+16]", None, f"{TWICE}|outside of all arrays"),
    "ragged sum: rows of others are not cleared": ("ragged sum", r"st\.v4\.u32[^;]*;", "", None, WRONG),
    "ragged sum: no fence after clearing": ("ragged sum", r"fence\.proxy\.async\.shared::cta;", "", None, "no fence.proxy.async follows"),
    "ragged sum: no barrier after clearing": ("ragged sum", r"bar\.sync\s+%r\d+, %r\d+;", "", None, "under way still reads|race"),
    "scaled: sums are read early": ("scaled", r"wgmma\.wait_group\.sync\.aligned 0;", "", None, "which a wgmma under way writes"),
    "scaled: a stage is not given back": ("scaled", REMOTE_ARRIVE, "", None, "deadlock"),
    "scaled: sums are not begun anew": ("scaled", r"setp\.ne\.b32 p, %r\d+, 0;", "setp.eq.b32 p, 0, 0;", None, WRONG),
    "scaled: a scale of the row above": (
        "scaled",
        r"(ld\.global\.nc\.f32 %f\d+, \[%rd\d+)\]",
        r"\1+-4]",
        None,
        f"{WRONG}|outside of all arrays",
    ),
    "scaled: sums are not added": ("scaled", r"fma\.rn\.f32 (%f\d+), (%f\d+), (%f\d+), %f\d+;", r"mul.rn.f32 \1, \2, \3;", None, WRONG),
    "scaled: a store is shifted": ("scaled", r"(st\.global\.v4\.u32 \[%rd\d+)\]", r"\1+16]", None, f"{TWICE}|outside of all arrays"),
    "scaled: swapped scales of columns": (
        "scaled columns",
        r"(st\.shared\.v4\S* \[%r\d+\S*\], \{)(%\w+), (%\w+)",
        r"\1\3, \2",
        None,
        WRONG,
    ),
    "gram: sums are read early": ("gram", r"wgmma\.wait_group\.sync\.aligned 0;", "", None, "which a wgmma under way writes"),
    "gram: a stage is not given back": ("gram", REMOTE_ARRIVE, "", None, "deadlock"),
    "gram: sums are not begun anew": ("gram", r"setp\.ne\.b32 p, %r\d+, 0;", "setp.eq.b32 p, 0, 0;", None, WRONG),
    "gram: no barriers of a warp": ("gram", WARP_BARRIER, "", None, "which another lane of the warp|race"),
    "gram: no barriers of a warp group": ("gram", r"bar\.sync %r\d+, %r\d+;", "", None, "race|reads shared memory at"),
    "gram: columns are not turned": ("gram", r"stmatrix\S* \[%r\d+\S*\], \{[^}]*\};", "", None, WRONG),
    "gram: swapped squares": ("gram", r"(stmatrix\S* \[%r\d+\S*\], \{)(%r\d+), (%r\d+)", r"\1\3, \2", None, WRONG),
    "gram: a store is shifted": ("gram", r"(st\.global\.v4\.u32 \[%rd\d+)\]", r"\1+16]", None, f"{TWICE}|outside of all arrays"),
    "pieces: small sums are read early": ("pieces", r"wgmma\.wait_group\.sync\.aligned 0;", "", 0, "which a wgmma under way writes"),
    "pieces: sums are read early": ("pieces", r"wgmma\.wait_group\.sync\.aligned 0;", "", 1, "which a wgmma under way writes"),
    "pieces: no fence before wgmma": ("pieces", r"wgmma\.fence\.sync\.aligned;", "", 0, "no wgmma.fence"),
    "pieces: no fence after they are written": ("pieces", r"fence\.proxy\.async\.shared::cta;", "", None, "no fence.proxy.async follows"),
    "pieces: the columns of a stage are not given back": ("pieces", ARRIVE, "", 0, "deadlock"),
    "pieces: they are not told to be there": ("pieces", ARRIVE, "", 1, "deadlock"),
    "pieces: the rows of a stage are not given back": ("pieces", ARRIVE, "", 2, "deadlock"),
    "pieces: no turn is given": ("pieces", ARRIVE, "", 3, "deadlock"),
    "pieces: a slot is not given back": ("pieces", ARRIVE, "", 4, "deadlock"),
    "pieces: columns are read before they come": ("pieces", TRY_WAIT, r"\1, 1", 0, "a copy is under way|nothing has written"),
    "pieces: a slot is taken early": ("two pieces", TRY_WAIT, r"\1, 1", 1, "deadlock|more arrivals|race|under way"),
    "pieces: rows are read before they come": ("pieces", TRY_WAIT, r"\1, 1", 3, "a copy is under way|nothing has written"),
    "pieces: too few bytes expected": ("pieces", EXPECT, r"\1, 1024", None, "bytes more than they expect"),
    "pieces: no barrier after the barriers": ("pieces", r"bar\.sync\s+0;", "", None, "which another warp initialised|no mbarrier"),
    "pieces: sums are not begun anew": ("pieces", r"setp\.ne\.b32 p, %r\d+, 0;", "setp.eq.b32 p, 0, 0;", None, WRONG),
    "pieces: neighbours change places": ("pieces", ROUNDED_PAIR, r"cvt.rn.bf16x2.f32 \1, \3, \2;", 3, WRONG),
    "pieces: a last piece is lost": ("pieces", ROUNDED_PAIR, r"mov.b32 \1, 0;", 1, WRONG),
    "pieces: swapped factors": ("pieces", r"(wgmma\.mma_async\S* \{[^}]*\}, *\{)(%r\d+), (%r\d+)", r"\1\3, \2", 0, WRONG),
    "pieces: columns in another order": ("two pieces", r"(st\.shared\.v4\S* \[%r\d+\S*\], \{)(%\w+), (%\w+)", r"\1\3, \2", 1, WRONG),
    "pieces: sums are not added": ("two pieces", r"add(?:\.rn)?\.f32 (%f\d+), (%f\d+), \1;", r"mov.f32 \1, \2;", None, WRONG),
    "pieces: a store too far": ("pieces", r"(st\.global\S* \[%rd\d+)\]", r"\1+16]", None, "outside of all arrays|once"),
    "pieces: more registers than there are": (
        "pieces",
        r"(setmaxnreg\.dec\.sync\.aligned\.u32) 104;",
        r"\1 128;",
        None,
        "registers, more than 65536",
    ),
    "im2col: stages reused early": ("fprop", r"wgmma\.wait_group\.sync\.aligned 1;", "", None, "under way still reads"),
    "im2col: swapped corners": ("fprop", r"(im2col\S* \[%r\d+\], \[%rd\d+, \{%r\d+, )(%r\d+), (%r\d+)", r"\1\3, \2", None, WRONG),
    "im2col: too few bytes expected": ("fprop", EXPECT, r"\1, 16384", None, "bytes more than they expect"),
    "im2col: a phase is not waited for": ("fprop", TRY_WAIT, r"\1, 1", None, "nothing has written"),
    "im2col: no cluster barrier": ("fprop", r"barrier\.cluster\.(wait|arrive\.relaxed)\.aligned;", "", None, "no mbarrier was initialised"),
    "filter gradient: no cluster barrier": (
        "wgrad",
        r"barrier\.cluster\.(wait|arrive\.relaxed)\.aligned;",
        "",
        None,
        "no mbarrier was initialised",
    ),
    "filter gradient: stages reused early": ("wgrad", r"wgmma\.wait_group\.sync\.aligned 1;", "", None, "under way still reads"),
    "filter gradient: a store is shifted": (
        "wgrad",
        r"(st\.global\.v4\.u32 \[%rd\d+)\]",
        r"\1+16]",
        None,
        f"{TWICE}|outside of all arrays",
    ),
    "input gradient: a store is shifted": ("dgrad", r"(st\.global\.v4\.u32 \[%rd\d+)\]", r"\1+16]", None, f"{TWICE}|outside of all arrays"),
    "input gradient: rows are not divided": (
        "dgrad",
        r"(mul\.hi\.u32 %r\d+, %r\d+), %r\d+;",
        r"\1, 0;",
        None,
        "wrote, and no barrier is between",
    ),
    "im2col: no barriers of a warp": ("fprop", WARP_BARRIER, "", None, "which another lane of the warp"),
    "ragged: no barriers of a warp": ("ragged", WARP_BARRIER, "", None, "which another lane of the warp"),
    "scaled: no barriers of a warp": ("scaled", WARP_BARRIER, "", None, "which another lane of the warp"),
    "two groups: no barrier of a warp before a store": (
        "two groups",
        rf"(st\.shared\.u32 [^;]*;\s*){WARP_BARRIER}",
        r"\1",
        None,
        r"reads shared memory at \d+, which another lane of the warp wrote",
    ),
    "two groups: no barrier of a warp behind a store": (
        "two groups",
        rf"{WARP_BARRIER}(\s*(?:cvt\.\S+ [^;]*;\s*)*st\.shared)",
        r"\1",
        None,
        r"writes shared memory at \d+, which another lane of the warp reads",
    ),
    "two groups: one multiplies rows of the other": ("two groups", r"(shl\.b32 %r\d+, %r\d+), 13;", r"\1, 12;", 0, WRONG),
    "two groups: they share the way to memory": ("two groups", r"(mad\.lo\.s32 %r\d+, %r\d+), 2304,", r"\1, 0,", None, "race: "),
    "two groups: sums are stored early": (
        "two groups",
        r"wgmma\.wait_group\.sync\.aligned 0;",
        "",
        None,
        "which a wgmma under way writes",
    ),
    "two groups: one gives a stage back for both": (
        "two groups",
        r"(mbarrier\.init\S* \[%r\d+\]), %r\d+;",
        r"\1, 2;",
        1,
        "more arrivals|under way|race",
    ),
    "two groups: they take more registers than there are": (
        "two groups",
        r"(setmaxnreg\.dec\.sync\.aligned\.u32) 40;",
        r"\1 96;",
        None,
        "registers, more than 65536",
    ),
    "two groups: stages reused early": ("two groups", r"wgmma\.wait_group\.sync\.aligned 1;", "", None, "under way still reads"),
    "two groups, dgrad: rows are not divided": (
        "two groups, dgrad",
        r"(mul\.hi\.u32 %r\d+, %r\d+), %r\d+;",
        r"\1, 0;",
        None,
        "wrote, and no barrier is between",
    ),
    "two groups, wide: one multiplies rows of the other": ("two groups, wide", r"(shl\.b32 %r\d+, %r\d+), 13;", r"\1, 12;", 0, WRONG),
    "two groups, wide: a store is shifted": (
        "two groups, wide",
        r"(st\.global\.v4\.u32 \[%rd\d+)\]",
        r"\1+16]",
        None,
        f"{TWICE}|outside of all arrays",
    ),
    "two groups, wgrad: one multiplies rows of the other": (
        "two groups, wgrad",
        r"(shl\.b32 %r\d+, %r\d+), 13;",
        r"\1, 12;",
        0,
        WRONG,
    ),
    "two groups, wgrad: a stage is not given back": ("two groups, wgrad", REMOTE_ARRIVE, "", None, "deadlock"),
    "depthwise: no barrier after the filter": ("causal", r"bar\.sync\s+0;", "", None, "nothing has written|race"),
    "depthwise: a store too far": ("causal", r"(st\.global\S* \[%rd\d+)\]", r"\1+16]", None, "outside of all arrays|once"),
    "depthwise: an unaligned load": ("causal", r"(ld\.global\.nc\.v4\S* \{[^}]*\}, \[%rd\d+)\]", r"\1+2]", None, "no multiple of 16"),
    "depthwise: a load too far": (
        "causal",
        r"(ld\.global\.nc\.v4\S* \{[^}]*\}, \[%rd\d+)\]",
        r"\1+16]",
        None,
        "outside of all arrays|wrong",
    ),
    "depthwise: no barriers before the sum": ("depthwise wgrad", r"bar\.sync\s+0;", "", None, "nothing has written|race"),
    "depthwise: a product is not added": ("7x7", r"fma\.rn\.f32 (%f\d+), (%f\d+), (%f\d+), %f\d+;", r"mul.rn.f32 \1, \2, \3;", 0, WRONG),
    "depthwise: shared channels from elsewhere": (
        "many outputs",
        r"(ld\.global\.nc\.v2\S* \{[^}]*\}, \[%rd\d+)\]",
        r"\1+8]",
        None,
        "outside of all arrays|wrong",
    ),
    "depthwise: outputs are not summed": (
        "sums of outputs",
        r"add(?:\.rn)?\.f32 (%f\d+), (%f\d+), %f\d+;",
        r"mov.f32 \1, \2;",
        None,
        WRONG,
    ),
    "depthwise: no barrier after the rows": ("sums of outputs", r"bar\.sync\s+0;", "", None, "nothing has written|race"),
    "depthwise: sources beside the image": (
        "planes",
        r"setp\.(?:ge|lt|gt|le)\.u32 (%p\d+), (%r\d+), (%r\d+);",
        r"setp.eq.u32 \1, \2, \2;",
        None,
        "outside of all arrays|wrong",
    ),
    "tensor cores: no barrier after the first line": ("tensor cores", r"bar\.sync\s+0;", "", 0, "nothing has written|race"),
    "tensor cores: no barrier between lines": ("tensor cores", r"bar\.sync\s+0;", "", 1, "nothing has written|race"),
    "tensor cores: swapped factors": ("tensor cores", r"(mma\.sync\S* \{[^}]*\}, \{)(%r\d+), (%r\d+)", r"\1\3, \2", 3, WRONG),
    "tensor cores: swapped positions": ("tensor cores", r"(prmt\.b32\s+%r\d+, )(%r\d+), (%r\d+), ", r"\1\3, \2, ", 9, WRONG),
    "tensor cores: a store too far": ("tensor cores", r"(st\.global\S* \[%rd\d+)\]", r"\1+16]", None, "outside of all arrays|once"),
    "tensor cores: a load too far": (
        "tensor cores",
        r"(ld\.global\.nc\.v4\S* \{[^}]*\}, \[%rd\d+)\]",
        r"\1+16]",
        None,
        "outside of all arrays|wrong",
    ),
    "causal: no barrier after the taps": ("causal forward", r"bar\.sync\s+0;", "", 0, "nothing has written|race"),
    "causal: a store too far": ("causal forward", r"(st\.global\S* \[%rd\d+)\]", r"\1+16]", None, "outside of all arrays|once"),
    "causal: an unaligned load": ("causal forward", r"(ld\.global\.v4\S* \{[^}]*\}, \[%rd\d+)\]", r"\1+2]", None, "no multiple of 16"),
    "causal: no barriers before the sums": ("causal backward", r"bar\.sync\s+0;", "", None, "nothing has written|race"),
    "causal: no barrier between the sums": ("causal backward", r"bar\.sync\s+0;", "", 3, "race"),
    "causal: products are not added": (
        "causal backward",
        r"fma\.rn\.f32 (%f\d+), (%f\d+), (%f\d+), %f\d+;",
        r"mul.rn.f32 \1, \2, \3;",
        None,
        WRONG,
    ),
    "weight-only: no barrier before sums are taken": ("weight-only", r"bar\.sync\s+0;", "", 1, "nothing has written|race"),
    "weight-only: no barrier before sums are given": ("weight-only", r"bar\.sync\s+0;", "", 2, "race"),
    "weight-only: another mask": ("weight-only", r"(lop3\.b32 %r\d+, %r\d+, %r\d+, %r\d+, )(106|0x6A);", r"\g<1>0x80;", 3, WRONG),
    "weight-only: swapped rows": ("weight-only", r"(prmt\.b32\s+%r\d+, )(%r\d+), (%r\d+), ", r"\1\3, \2, ", 2, WRONG),
    "weight-only: swapped factors": ("weight-only", r"(mma\.sync\S* \{[^}]*\}, \{)(%r\d+), (%r\d+)", r"\1\3, \2", 1, WRONG),
    "weight-only: a store too far": ("weight-only", r"(st\.global\S* \[%rd\d+)\]", r"\1+16]", None, "outside of all arrays|once"),
    "weight-only: an unaligned load": (
        "weight-only",
        r"(ld\.global\.nc\.v4\S* \{[^}]*\}, \[%rd\d+)\]",
        r"\1+2]",
        None,
        "no multiple of 16",
    ),
    "wide: factors are made anew early": (
        "wide weight-only",
        r"wgmma\.wait_group\.sync\.aligned 1;",
        "",
        None,
        "which a wgmma under way reads",
    ),
    "wide: sums are read early": ("wide weight-only", r"wgmma\.wait_group\.sync\.aligned 0;", "", None, "which a wgmma under way writes"),
    "wide: no fence after factors": ("wide weight-only", r"wgmma\.fence\.sync\.aligned;", "", None, "no wgmma.fence"),
    "wide: a stage is not given back": ("wide weight-only", r"mbarrier\.arrive\.shared::cta\.b64 _, \[%r\d+\];", "", None, "deadlock"),
    "wide: a stage is given back by one warp": (
        "wide weight-only",
        r"(mbarrier\.init\S* \[%r\d+\]), %r\d+;",
        r"\1, 1;",
        None,
        "race|deadlock",
    ),
    "wide: a stage is not waited for": ("wide weight-only", TRY_WAIT, r"\1, 1", None, "nothing has written|race"),
    "wide: too few bytes expected": ("wide weight-only", EXPECT, r"\1, 1024", None, "bytes more than they expect"),
    "wide: no barrier after the barriers": ("wide weight-only", r"bar\.sync\s+0;", "", None, "which another warp initialised|no mbarrier"),
    "wide: swapped rows": ("wide weight-only", r"(prmt\.b32\s+%r\d+, )(%r\d+), (%r\d+), ", r"\1\3, \2, ", None, WRONG),
    "wide: another mask": ("wide weight-only", r"(lop3\.b32 %r\d+, %r\d+, %r\d+, %r\d+, )(106|0x6A);", r"\g<1>0x80;", None, WRONG),
    "wide: sums are not begun anew": ("wide weight-only", r"setp\.ne\.b32 p, %r\d+, 0;", "setp.eq.b32 p, 0, 0;", None, WRONG),
    "wide: the scales of other columns": (
        "wide weight-only",
        r"(ld\.global\.nc\.v2\.f32 \{[^}]*\}, \[%rd\d+)\]",
        r"\1+8]",
        None,
        f"{WRONG}|outside of all arrays",
    ),
    "wide: sums are not added": (
        "wide weight-only",
        r"fma\.rn\.f32 (%f\d+), (%f\d+), (%f\d+), %f\d+;",
        r"mul.rn.f32 \1, \2, \3;",
        None,
        WRONG,
    ),
    "wide: swapped factors": ("wide weight-only", r"(wgmma\.mma_async\S* \{[^}]*\}, *\{)(%r\d+), (%r\d+)", r"\1\3, \2", None, WRONG),
    "wide: a store too far": ("wide weight-only", r"(st\.global\S* \[%rd\d+)\]", r"\1+16]", None, "outside of all arrays|once"),
    "causal: other sequences are read": ("packed", r"setp\.ne\.s32 (%p\d+), (%r\d+), %r\d+;", r"setp.ne.s32 \1, \2, \2;", None, WRONG),
}


@pytest.mark.sampled(25)
@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_found(name):
    of, pattern, replacement, which, wanted = DEFECTS[name]
    call, where = CALLS[of]()
    known = modules()
    (kernel_name,) = {entry["kernel"] for entry in ask(call.case, where.get("device", 0))[1] if "kernel" in entry}
    broken = known | {kernel_name: Module(planted(known[kernel_name].ptx, kernel_name, pattern, replacement, which))}
    assert re.search(wanted, said(lambda late: call.check(execute(call, late, instead=broken, **where))))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", CALLS)
def test_without_a_defect_nothing_is_said(name):
    call, where = CALLS[name]()
    assert not said(lambda late: call.check(execute(call, late, **where)))


SMALL = {
    "Sum": test_small_kernels.test_sum,
    "Transpose": test_small_kernels.test_transpose,
    "Compact": test_small_kernels.test_compact,
    "Histogram": test_small_kernels.test_histogram,
    "Stencil": functools.partial(test_small_kernels.test_stencil, LATE),
    "Twice": functools.partial(test_small_kernels.test_tensor_memory_accelerator, LATE),
}


@pytest.mark.parametrize("name", SMALL)
def test_each_barrier_of_a_small_kernel_is_needed(name, monkeypatch):
    ptx = test_small_kernels.kernels().ptx
    barriers = len(re.findall(r"bar\.sync\s+0;", ptx[ptx.index(f".entry {name}(") :].split(".entry ")[1]))
    assert barriers
    for which in range(barriers):
        broken = Module(planted(ptx, name, r"bar\.sync\s+0;", "", which))
        monkeypatch.setattr(test_small_kernels, "kernels", lambda broken=broken: broken)
        with pytest.raises(Fault, match="race|nothing has written|under way|which another warp initialised|async proxy"):
            SMALL[name]()
