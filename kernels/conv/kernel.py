"""Convolutions as implicit matrix products: no im2col in memory, channels last, nothing transposed or padded.

fprop and dgrad gather by the same equation (`geometry.py`), from x through w into y and from y through w into x:

    target[(n, t), column] = Σ_{tap, channel}  source[(n, s(t, tap)), channel] · w[tap, channel, column]

and wgrad contracts the positions:  w[k, (tap, c)] = Σ_{n, t}  y[(n, t), k] · x[(n, s(t, tap)), c].

*Packed* tiles run over (tap, channel) as one axis; others keep to one tap, which suits many channels.  If some taps meet no source (a
stride in dgrad, an input dilation), a program computes one phase of targets (in wgrad: one tap) and visits only pairs that meet.  Several
small groups can share a tile with a block-diagonal filter; then an infinity or NaN of one group makes the others' sums NaN too.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import triton
import triton.language as tl

from .. import tile_epilogue as _fused
from ..geometry import MOST_POSITIONS, ConvProblem
from ..launch import BITS, MOST_INTEGER_PRODUCTS, MOST_PROGRAMS, SHARED_MEMORY, Launch, cdiv, kernel_name, lacking_memory, tensor_memory
from ..machine import START, machine
from ..tile import refused_pair, to_tf32

Problem = ConvProblem


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A program computes tile_m rows by tile_n columns, tile_k of the contraction at a time."""

    tile_m: int
    tile_n: int
    tile_k: int
    groups: int = 1  # neighbouring groups in one tile, a divisor of G
    packed: bool = False  # whether a tile spans taps
    splits: int = 1  # shares of the contraction, which go to programs of their own
    num_warps: int = 4
    num_stages: int = 3


# ---- kernels


@triton.jit
def _program(TILES: tl.constexpr):
    """The indices of this program's tile, from the counts of `_tiles`.  The first varies fastest, so that neighbours share sources."""
    program = tl.program_id(0)
    column_block = program % TILES[0]
    program = program // TILES[0]
    group_block = program % TILES[1]
    program = program // TILES[1]
    phase = program % TILES[2]
    program = program // TILES[2]
    row_block = program % TILES[3]
    program = program // TILES[3]
    return column_block, group_block, phase, row_block, program % TILES[4], program // TILES[4]


@triton.jit
def _below(index, SIZE: tl.constexpr, MULTIPLE: tl.constexpr):
    """index < SIZE, a constant if SIZE is a multiple of the block."""
    if SIZE % MULTIPLE == 0:
        return tl.full(index.shape, 1, tl.int1)
    else:
        return index < SIZE


@triton.jit
def _split3(index, H, W):
    """(d, h, w) of a flat index into (…, H, W)."""
    return index // (H * W), index % (H * W) // W, index % (H * W) % W


@triton.jit
def _lanes(block, lane, taps, CHANNELS: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr):
    """The tap and the channel of each lane of a block, and whether it exists; unless packed, all lanes have one tap."""
    if PACKED:
        index = block * BLOCK + lane
        return index // CHANNELS, index % CHANNELS, index // CHANNELS < taps
    else:
        BLOCKS: tl.constexpr = (CHANNELS + BLOCK - 1) // BLOCK
        channel = block % BLOCKS * BLOCK + lane
        return block // BLOCKS, channel, _below(channel, CHANNELS, BLOCK)


@triton.jit
def _first(f, AXIS: tl.constexpr):
    """The first tap that the targets of phase f meet; R if there is none (`Axis.first`, in closed form)."""
    if AXIS.d == 1:
        return tl.full([], 0, tl.int32)
    else:
        GCD: tl.constexpr = AXIS.d // AXIS.step
        e = (AXIS.minus_a * f.to(tl.int64) + AXIS.minus_offset) % AXIS.d  # the products reach d², and a stride may be a second of sound
        return tl.where(e % GCD == 0, e // GCD * AXIS.inverse % AXIS.step, AXIS.R).to(tl.int32)


@triton.jit
def _targets(index, fd, fh, fw, N: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, H: tl.constexpr, W: tl.constexpr):
    """n and the three j of the targets t = f + period·j at a flat index into a phase, and whether they exist."""
    nd, h, w = _split3(index, H.targets, W.targets)
    n, d = nd // D.targets, nd % D.targets
    exists = _below(index, N * D.targets * H.targets * W.targets, BLOCK) & _below(fd + D.period * d, D.T, D.period)
    return n, d, h, w, exists & _below(fh + H.period * h, H.T, H.period) & _below(fw + W.period * w, W.T, W.period)


@triton.jit
def _source(t, r, AXIS: tl.constexpr):
    """The source of target t at tap r, if d divides."""
    return (AXIS.a * t + AXIS.b * r + AXIS.offset) // AXIS.d


@triton.jit
def _exists(s, AXIS: tl.constexpr):
    if AXIS.inside:
        return tl.full(s.shape, 1, tl.int1)
    else:
        return (s >= 0) & (s < AXIS.S)


@triton.jit
def _pixel(n, d, h, w, D: tl.constexpr, H: tl.constexpr, W: tl.constexpr, CHANNELS: tl.constexpr, ELEMENTS: tl.constexpr):
    """Offset of a pixel's first channel in an array of that many elements."""
    if ELEMENTS >= 2**31:
        n = tl.cast(n, tl.int64)
    return (((n * D + d) * H + h) * W + w) * CHANNELS


@triton.jit
def _filter(k, tap, c, PROBLEM: tl.constexpr, CONFIG: tl.constexpr, TAPS: tl.constexpr):
    """The offset in w of output channel k and input channel c, counted from the tile's first group, and whether they share a group."""
    if CONFIG.groups == 1:
        return (k * TAPS + tap) * PROBLEM.C + c, tl.full([1, 1], 1, tl.int1)
    else:
        return (k * TAPS + tap) * PROBLEM.C + c % PROBLEM.C, k // PROBLEM.K == c // PROBLEM.C


@triton.jit
def _alike(a, b):
    """Both tiles in the narrowest dtype that holds both."""
    if a.dtype == b.dtype or (a.dtype.primitive_bitwidth == 8 and b.dtype.primitive_bitwidth == 8):
        return a, b
    elif a.dtype.primitive_bitwidth > b.dtype.primitive_bitwidth:
        return a, b.to(a.dtype)
    elif a.dtype.primitive_bitwidth < b.dtype.primitive_bitwidth:
        return a.to(b.dtype), b
    else:
        return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def _multiply(a, b, accumulator, PROBLEM: tl.constexpr, TURN_A: tl.constexpr, TURN_B: tl.constexpr):
    """accumulator + a b; a tile whose contraction is not contiguous is transposed."""
    a, b = _alike(a, b)
    TF32: tl.constexpr = a.dtype == tl.float32 and PROBLEM.precision == "tf32" and PROBLEM.arch >= 90 and PROBLEM.arch < 120
    if TF32 and TURN_A:
        a = to_tf32(a)
    if TF32 and TURN_B:
        b = to_tf32(b)
    # Hopper adds 8-bit floats in fewer bits than float32 has: no more than a block of them.  Triton's own limit would add a block before
    # it has waited for it.
    if a.dtype.is_fp8() and PROBLEM.arch == 90:
        return accumulator + tl.dot(a, b, out_dtype=accumulator.dtype)
    else:
        return tl.dot(a, b, accumulator, input_precision=PROBLEM.precision, out_dtype=accumulator.dtype)


@triton.jit(repr=kernel_name)
def conv_gather(
    source_ptr, w_ptr, target_ptr, PROBLEM: tl.constexpr, CONFIG: tl.constexpr, TILES: tl.constexpr,
    D: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """fprop: x and w into y.  dgrad: y and w into x."""
    _gather(source_ptr, w_ptr, None, None, target_ptr, None, PROBLEM, CONFIG, TILES, D, H, W)


@triton.jit(repr=kernel_name)
def conv_fused(
    x_ptr, w_ptr, bias_ptr, residual_ptr, y_ptr, saved_ptr, PROBLEM: tl.constexpr, CONFIG: tl.constexpr, TILES: tl.constexpr,
    D: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """fprop with an epilogue."""
    _gather(x_ptr, w_ptr, bias_ptr, residual_ptr, y_ptr, saved_ptr, PROBLEM, CONFIG, TILES, D, H, W)


@triton.jit
def _gather(
    source_ptr, w_ptr, bias_ptr, residual_ptr, target_ptr, saved_ptr, PROBLEM: tl.constexpr, CONFIG: tl.constexpr, TILES: tl.constexpr,
    D: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Rows are the targets of one phase."""
    BLOCK_M: tl.constexpr = CONFIG.tile_m
    BLOCK_N: tl.constexpr = CONFIG.tile_n
    BLOCK_K: tl.constexpr = CONFIG.tile_k
    FPROP: tl.constexpr = PROBLEM.role == "fprop"
    C: tl.constexpr = PROBLEM.C * CONFIG.groups
    K: tl.constexpr = PROBLEM.K * CONFIG.groups
    CONTRACTED: tl.constexpr = C if FPROP else K
    COLUMNS: tl.constexpr = K if FPROP else C
    SOURCE_CHANNELS: tl.constexpr = PROBLEM.G * (PROBLEM.C if FPROP else PROBLEM.K)
    TARGET_CHANNELS: tl.constexpr = PROBLEM.G * (PROBLEM.K if FPROP else PROBLEM.C)
    SOURCES: tl.constexpr = PROBLEM.N * D.S * H.S * W.S * SOURCE_CHANNELS
    TARGETS: tl.constexpr = PROBLEM.N * D.T * H.T * W.T * TARGET_CHANNELS
    TAPS: tl.constexpr = D.R * H.R * W.R

    column_block, group_block, phase, row_block, split, batch = _program(TILES)
    source_ptr += batch.to(tl.int64) * SOURCES + group_block * CONTRACTED
    w_ptr += (batch.to(tl.int64) * TILES[1] + group_block) * (K * TAPS * PROBLEM.C)
    first_target = (split.to(tl.int64) * PROBLEM.B + batch) * TARGETS + group_block * COLUMNS
    if PROBLEM.epilogue is None:
        target_ptr += first_target

    # The targets t = f + period·j of this phase, (BLOCK_M, 1), and their sources at the first tap.
    fd, fh, fw = _split3(phase, H.phases, W.phases)
    n, d, h, w, row_exists = _targets(row_block * BLOCK_M + tl.arange(0, BLOCK_M)[:, None], fd, fh, fw, PROBLEM.N, BLOCK_M, D, H, W)
    d, h, w = fd + D.period * d, fh + H.period * h, fw + W.period * w
    rd, rh, rw = _first(fd, D), _first(fh, H), _first(fw, W)
    taps_d, taps_h, taps_w = (D.R - rd + D.step - 1) // D.step, (H.R - rh + H.step - 1) // H.step, (W.R - rw + W.step - 1) // W.step
    taps = taps_d * taps_h * taps_w
    taps_h, taps_w = tl.maximum(taps_h, 1), tl.maximum(taps_w, 1)  # they divide, even where there are no taps
    sd, sh, sw = _source(d, rd, D), _source(h, rh, H), _source(w, rw, W)
    pixel = _pixel(n, sd, sh, sw, D.S, H.S, W.S, SOURCE_CHANNELS, SOURCES)

    column = column_block * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    column_exists = _below(column, COLUMNS, BLOCK_N)

    steps = tl.cdiv(taps * CONTRACTED, BLOCK_K) if CONFIG.packed else taps * ((CONTRACTED + BLOCK_K - 1) // BLOCK_K)
    share = tl.cdiv(steps, CONFIG.splits)
    accumulator = tl.zeros([BLOCK_M, BLOCK_N], tl.int32 if PROBLEM.dtypes[0] == "i8" else tl.float32)
    for step in range(split * share, tl.minimum(steps, (split + 1) * share)):
        tap, channel, lane_exists = _lanes(step, tl.arange(0, BLOCK_K)[None, :], taps, CONTRACTED, BLOCK_K, CONFIG.packed)
        ud, uh, uw = _split3(tap, taps_h, taps_w)
        dd, dh, dw = D.tap_stride * ud, H.tap_stride * uh, W.tap_stride * uw
        exists = row_exists & lane_exists & _exists(sd + dd, D) & _exists(sh + dh, H) & _exists(sw + dw, W)
        delta = _pixel(0, dd, dh, dw, D.S, H.S, W.S, SOURCE_CHANNELS, SOURCES)
        source = tl.load(source_ptr + (pixel + (delta + channel)), mask=exists, other=0.0)
        tap, channel, lane_exists = _lanes(step, tl.arange(0, BLOCK_K)[:, None], taps, CONTRACTED, BLOCK_K, CONFIG.packed)
        ud, uh, uw = _split3(tap, taps_h, taps_w)
        r = ((rd + D.step * ud) * H.R + rh + H.step * uh) * W.R + rw + W.step * uw
        k, c = (column, channel) if FPROP else (channel, column)
        offset, same_group = _filter(k, r, c, PROBLEM, CONFIG, TAPS)
        filter = tl.load(w_ptr + offset, mask=column_exists & lane_exists & same_group, other=0.0)
        accumulator = _multiply(source, filter, accumulator, PROBLEM, False, not FPROP)

    pixel = _pixel(n, d, h, w, D.T, H.T, W.T, TARGET_CHANNELS, TARGETS)
    if PROBLEM.epilogue is None:
        tl.store(target_ptr + (pixel + column), accumulator.to(target_ptr.dtype.element_ty), mask=row_exists & column_exists)
    else:
        if PROBLEM.epilogue.saves:
            saved_ptr += first_target
        _fused.finish(
            accumulator,
            None,
            bias_ptr + (batch.to(tl.int64) * TARGET_CHANNELS + group_block * COLUMNS),
            residual_ptr + first_target,
            target_ptr + first_target,
            saved_ptr,
            pixel,
            row_exists,
            column_block * BLOCK_N,
            PROBLEM,
            COLUMNS,
            COLUMNS % BLOCK_N == 0,
            CONFIG.num_warps,
        )


@triton.jit(repr=kernel_name)
def conv_wgrad(
    y_ptr, x_ptr, w_ptr, PROBLEM: tl.constexpr, CONFIG: tl.constexpr, TILES: tl.constexpr,
    D: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """y and x into w.  Rows are output channels, columns (tap, input channel)."""
    BLOCK_M: tl.constexpr = CONFIG.tile_m
    BLOCK_N: tl.constexpr = CONFIG.tile_n
    BLOCK_K: tl.constexpr = CONFIG.tile_k
    C: tl.constexpr = PROBLEM.C * CONFIG.groups
    K: tl.constexpr = PROBLEM.K * CONFIG.groups
    SOURCES: tl.constexpr = PROBLEM.N * D.S * H.S * W.S * PROBLEM.G * PROBLEM.C
    TARGETS: tl.constexpr = PROBLEM.N * D.T * H.T * W.T * PROBLEM.G * PROBLEM.K
    POSITIONS: tl.constexpr = PROBLEM.N * D.targets * H.targets * W.targets  # that one tap meets
    TAPS: tl.constexpr = D.R * H.R * W.R

    column_block, group_block, _, row_block, split, batch = _program(TILES)
    y_ptr += batch.to(tl.int64) * TARGETS + group_block * K
    x_ptr += batch.to(tl.int64) * SOURCES + group_block * C
    w_ptr += ((split.to(tl.int64) * PROBLEM.B + batch) * TILES[1] + group_block) * (K * TAPS * PROBLEM.C)

    k = row_block * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    k_exists = _below(k, K, BLOCK_M)
    tap, c, column_exists = _lanes(column_block, tl.arange(0, BLOCK_N)[None, :], TAPS, C, BLOCK_N, CONFIG.packed)

    # The targets t = first + period·j that meet the tap, and the source of the first; packed columns have all their targets in common.
    rd, rh, rw = _split3(tap, H.R, W.R)
    TAPS_OF_D: tl.constexpr = D.swapped
    TAPS_OF_H: tl.constexpr = H.swapped
    TAPS_OF_W: tl.constexpr = W.swapped
    td, th, tw = _first(rd, TAPS_OF_D), _first(rh, TAPS_OF_H), _first(rw, TAPS_OF_W)
    sd, sh, sw = _source(td, rd, D), _source(th, rh, H), _source(tw, rw, W)
    column_pixel = _pixel(0, sd, sh, sw, D.S, H.S, W.S, PROBLEM.G * PROBLEM.C, SOURCES) + c
    met = ((td < D.T) & (th < H.T) & (tw < W.T)).to(tl.int32)

    steps = met * ((POSITIONS + BLOCK_K - 1) // BLOCK_K)
    share = tl.cdiv(steps, CONFIG.splits)
    accumulator = tl.zeros([BLOCK_M, BLOCK_N], tl.int32 if PROBLEM.dtypes[0] == "i8" else tl.float32)
    for step in range(split * share, tl.minimum(steps, (split + 1) * share)):
        n, d, h, w, exists = _targets(step * BLOCK_K + tl.arange(0, BLOCK_K)[None, :], td, th, tw, PROBLEM.N, BLOCK_K, D, H, W)
        pixel = _pixel(n, td + D.period * d, th + H.period * h, tw + W.period * w, D.T, H.T, W.T, PROBLEM.G * PROBLEM.K, TARGETS)
        y = tl.load(y_ptr + (pixel + k), mask=exists & k_exists, other=0.0)
        n, d, h, w, exists = _targets(step * BLOCK_K + tl.arange(0, BLOCK_K)[:, None], td, th, tw, PROBLEM.N, BLOCK_K, D, H, W)
        dd, dh, dw = D.target_stride * d, H.target_stride * h, W.target_stride * w
        exists = exists & column_exists & _exists(sd + dd, D) & _exists(sh + dh, H) & _exists(sw + dw, W)
        pixel = _pixel(n, dd, dh, dw, D.S, H.S, W.S, PROBLEM.G * PROBLEM.C, SOURCES)
        x = tl.load(x_ptr + (pixel + column_pixel), mask=exists, other=0.0)
        accumulator = _multiply(y, x, accumulator, PROBLEM, True, True)

    offset, same_group = _filter(k, tap, c, PROBLEM, CONFIG, TAPS)
    tl.store(w_ptr + offset, accumulator.to(w_ptr.dtype.element_ty), mask=k_exists & column_exists & same_group)


# ---- which kernel, how, and whether

HALF, EIGHT = {"bf16", "fp16"}, {"fp8e4nv", "fp8e5"}

# tile_m, tile_n, bytes of tile_k, warps, stages.  Large tiles re-read least, small ones are many and waste little.  Those of 256 rows
# read the filter half as often; they are for gathers on 9.0, where factors take no registers.
SHAPES = (
    (256, 128, 128, 8, 3),
    (128, 256, 128, 8, 3),
    (128, 128, 128, 8, 3),
    (256, 64, 128, 8, 3),
    (128, 64, 128, 4, 3),
    (64, 128, 128, 4, 3),
    (64, 64, 128, 4, 4),
    (128, 64, 64, 4, 4),
    (128, 32, 64, 4, 4),
    (128, 16, 64, 4, 4),
    (32, 64, 64, 4, 4),
    (16, 64, 64, 4, 4),
    (16, 16, 128, 1, 3),
)


def supports(problem: Problem) -> str | None:
    first, second, result = problem.dtypes
    kinds = {first, second}
    if reason := _fused.refused(problem.epilogue, problem.role, "fprop", result):
        return reason
    if problem.arch not in SHARED_MEMORY:
        return f"compute capability {problem.arch / 10}, kernels are compiled for {sorted(a / 10 for a in SHARED_MEMORY)}"
    if kinds & EIGHT and problem.arch < 89:
        return f"8-bit floats need compute capability 8.9, this device has {problem.arch / 10}"
    if kinds == {"i8"}:
        if problem.epilogue and not candidates(problem):
            return f"sums of {problem.C * math.prod(problem.filter)} products of int8 are split, and no epilogue can follow their parts"
        return None if result in ("i8", "i32") else f"int8 gives int8 or int32, not {result}"
    if not kinds <= HALF | EIGHT | {"fp32"} or result not in HALF | {"fp32"}:
        return (
            f"operands {first} and {second} into {result}, it takes floats of 8 to 32 bits into fp32, bf16 or fp16, and i8 into i8 or i32"
        )
    left, right = (first, second) if problem.role == "fprop" else (second, first)
    if reason := refused_pair(problem.arch, left, right, problem.precision, turned=right == "fp32" and problem.role != "fprop"):
        return reason
    axes = problem.axes
    if (positions := problem.N * math.prod(axis.period * axis.targets for axis in axes)) >= MOST_POSITIONS:
        return f"{positions} positions, it takes fewer than {MOST_POSITIONS}"
    if (largest := max(axis.largest(axis.period * axis.targets - 1, axis.R - 1) for axis in axes)) >= MOST_POSITIONS:
        return f"a spatial axis that reaches to {largest}, it takes less than {MOST_POSITIONS}"
    if (elements := problem.G * problem.K * problem.C * math.prod(axis.R for axis in axes)) >= MOST_POSITIONS:
        return f"a filter of {elements} elements, it takes fewer than {MOST_POSITIONS}"
    most = math.prod(_tiles(problem, Config(tile_m=16, tile_n=16, tile_k=16)))
    if most > MOST_PROGRAMS and not candidates(problem):
        return f"{most} small tiles, and no larger ones that suit it are {MOST_PROGRAMS} or fewer"
    return None


def candidates(problem: Problem) -> list[Config]:
    """The tile shapes that fit and are at least half full, each with suitable groups, packing and splits.

    The one with the fewest clocks, by a rough model, is first.
    """
    tall = problem.arch == 90 and problem.role != "wgrad" and not _in_parts(problem)
    configs = [_complete(problem, shape) for shape in SHAPES if tall or shape[0] <= 128]
    fitting = (config for config in configs if _refusal(problem, config) is None and _fills(problem, config))
    return sorted(fitting, key=functools.partial(clocks, problem))


def pick(problem: Problem) -> Config:
    return candidates(problem)[0]


def grid(problem: Problem, config: Config) -> tuple[int]:
    return (math.prod(_tiles(problem, config)),)


def launch(problem: Problem, config: Config) -> Launch:
    if reason := supports(problem) or _refusal(problem, config):
        raise ValueError(f"{problem.name}: {reason}")
    d, h, w = problem.axes
    plain = Launch(
        name=problem.name,
        kernel=conv_wgrad if problem.role == "wgrad" else conv_gather,
        operands={"fprop": ("x", "w"), "dgrad": ("y", "w"), "wgrad": ("y", "x")}[problem.role],
        grid=grid(problem, config),
        constants={"PROBLEM": problem, "CONFIG": config, "TILES": _tiles(problem, config), "D": d, "H": h, "W": w},
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        splits=config.splits,
    )
    return _fused.launch(plain, conv_fused, problem.epilogue) if problem.epilogue else plain


def _refusal(problem: Problem, config: Config) -> str | None:
    """The reason if the config does not fit the problem, or None."""
    if problem.epilogue and config.splits > 1:
        return f"{config} splits sums, an epilogue cannot follow their parts"
    if any(block < 16 or block & (block - 1) for block in (config.tile_m, config.tile_n, config.tile_k)):
        return f"{config} has a block that is no power of two of at least 16"
    if (least := _least_k(problem)) > config.tile_k:
        return f"{config} has tile_k {config.tile_k}, tensor cores take at least {least} numbers of {_bits(problem)} bits"
    if problem.G % config.groups:
        return f"{config} has {config.groups} groups to a tile, which do not divide {problem.G}"
    if config.packed and problem.role == "wgrad" and any(axis.d > 1 for axis in problem.axes):
        return f"{config} is packed, but an input dilation gives each tap its own targets"
    few = (_bits(problem) < 32 or problem.precision == "tf32") and not {*problem.dtypes[:2]} <= EIGHT  # sums of 8-bit floats are kept apart
    if (sums := config.tile_m * config.tile_n // (32 * config.num_warps)) > (limit := 128 if few else 64):
        return f"{config} has {sums} sums to a thread, registers hold {limit} beside the factors"
    if "i8" in problem.dtypes and (n := cdiv(_extent(problem, config)[2], config.splits) * config.tile_k) >= MOST_INTEGER_PRODUCTS:
        return f"{config} adds up {n} products of int8, tensor cores may saturate with {MOST_INTEGER_PRODUCTS}: it wants more splits"
    if (programs := math.prod(_tiles(problem, config))) > MOST_PROGRAMS:
        return f"{config} has {programs} programs, a grid has at most {MOST_PROGRAMS}"
    stage = (config.tile_m + config.tile_n) * config.tile_k * _bits(problem) // 8
    parts = problem.precision if _in_parts(problem) else ""
    tensor = tensor_memory(problem.arch, config.tile_m, config.tile_n, config.tile_k, parts)
    if lacking := lacking_memory(problem.arch, shared=stage * config.num_stages, tensor=tensor):
        return f"{config} {lacking}"
    return None


def _fills(problem: Problem, config: Config) -> bool:
    """Whether the result fills at least half of the tile, so that blocks of half the size would be more blocks.

    Columns are also not cut into narrow blocks if there are many rows, since each block of columns reads all sources again.
    """
    rows, columns, _ = _extent(problem, config)
    m, n = config.tile_m, config.tile_n
    halved_rows = _extent(problem, dataclasses.replace(config, tile_m=m // 2))[0]
    halved_columns = _extent(problem, dataclasses.replace(config, tile_n=n // 2))[1]
    narrow = problem.role != "wgrad" and m > n < 64 and columns > 1
    return (m == 16 or halved_rows > rows) and (n == 16 or halved_columns > columns) and not narrow


def _bits(problem: Problem) -> int:
    """Bits of a factor as it is multiplied."""
    first, second, _ = problem.dtypes
    return 32 if {first, second} == HALF else max(BITS[first], BITS[second])


def _least_k(problem: Problem) -> int:
    """The depth of one tensor core instruction."""
    return max(16, 256 // _bits(problem))


def _in_parts(problem: Problem) -> bool:
    """Whether float32 numbers are split into parts for the tensor cores."""
    return _bits(problem) == 32 and problem.precision not in ("tf32", "ieee")


def _blocks(taps: int, channels: int, block: int, packed: bool) -> int:
    return cdiv(taps * channels, block) if packed else taps * cdiv(channels, block)


def _extent(problem: Problem, config: Config) -> tuple[int, int, int]:
    """Blocks of rows, of columns and of the contraction, in the largest phase."""
    c, k = problem.C * config.groups, problem.K * config.groups
    positions = problem.N * math.prod(axis.targets for axis in problem.axes)
    if problem.role == "wgrad":
        taps = math.prod(axis.R for axis in problem.axes)
        return cdiv(k, config.tile_m), _blocks(taps, c, config.tile_n, config.packed), cdiv(positions, config.tile_k)
    taps = math.prod(cdiv(axis.R, axis.step) for axis in problem.axes)
    contracted, columns = (c, k) if problem.role == "fprop" else (k, c)
    return cdiv(positions, config.tile_m), cdiv(columns, config.tile_n), _blocks(taps, contracted, config.tile_k, config.packed)


def _tiles(problem: Problem, config: Config) -> tuple[int, int, int, int, int, int]:
    """The numbers of blocks of columns, blocks of groups, phases, blocks of rows, splits and batch elements."""
    rows, columns, _ = _extent(problem, config)
    phases = 1 if problem.role == "wgrad" else math.prod(axis.phases for axis in problem.axes)
    return columns, problem.G // config.groups, phases, rows, config.splits, problem.B


def _complete(problem: Problem, shape: tuple[int, int, int, int, int]) -> Config:
    """The config of a tile shape: warps, depth, groups, packing and splits that suit the problem.

    Three rules avoid register spills.  If an odd number of channels is loaded one by one, more warps, then shorter steps, limit a thread to
    16 loads.  Steps are halved if tensor cores read 8-bit factors, or parts of float32 numbers, from registers.  With tcgen05 more than 4
    warps load both factors of a wgrad tile of 64 by 128.
    Groups share a tile while all their channels fit its narrow side, and 64.  Tiles are packed if that saves a quarter of them.  The
    contraction is split, into at least 8 steps each, if there are fewer than two programs per multiprocessor, and if a sum of integers
    could exceed int32.
    """
    m, n, k_bytes, warps, stages = shape
    vector, k, least = math.gcd(problem.C, problem.K, 128 // _bits(problem)), k_bytes * 8 // _bits(problem), _least_k(problem)
    if problem.role == "wgrad" and 100 <= problem.arch < 120 and m * n >= 64 * 128:
        warps = 8
    if not 90 <= problem.arch < 120 and (_bits(problem) == 8 or _in_parts(problem)):
        k = max(least, k // 2)
    while warps < 8 and max(m, n) * k > 16 * (32 * warps * vector):
        warps *= 2
    while k > least and max(m, n) * k > 16 * (32 * warps * vector):
        k //= 2
    config = Config(tile_m=m, tile_n=n, tile_k=k, num_warps=warps, num_stages=stages)
    room = min(m, n, 64) // max(problem.C, problem.K, 1)
    config = dataclasses.replace(config, groups=max((g for g in range(1, room + 1) if problem.G % g == 0), default=1))
    packed = dataclasses.replace(config, packed=True)
    if _refusal(problem, packed) is None and 4 * math.prod(_extent(problem, packed)) <= 3 * math.prod(_extent(problem, config)):
        config = packed
    steps, programs = _extent(problem, config)[2], math.prod(_tiles(problem, config))
    shares = min(steps // 8, 2 * machine(problem.arch, problem.device).multiprocessors // max(programs, 1))
    if problem.epilogue:
        return config
    least = cdiv(steps, (MOST_INTEGER_PRODUCTS - 1) // config.tile_k) if "i8" in problem.dtypes else 1
    splits = (dataclasses.replace(config, splits=n) for n in (max(1, least), max(1, least, shares)))
    return min(splits, key=functools.partial(clocks, problem))


def clocks(problem: Problem, config: Config) -> float:
    """The time of one multiprocessor's programs, and of adding partial results if sums are split.

    A step takes 50 more clocks for addresses and barriers.  Programs on the same multiprocessor hide one another's start.
    """
    gpu, bits, programs = machine(problem.arch, problem.device), _bits(problem), grid(problem, config)[0]
    m, n, k = config.tile_m, config.tile_n, config.tile_k
    loaded = (m + n) * k * bits // 8
    step = gpu.tile(m * n * k, gpu.rate(bits, problem.precision), loaded) + 50
    beside = max(1, min(SHARED_MEMORY[problem.arch] // (loaded * config.num_stages), 48 // config.num_warps))
    of_programs = gpu.rounds(programs) * (cdiv(_extent(problem, config)[2], config.splits) * step + START / beside)
    return of_programs + (gpu.adding(4 * programs * m * n) if config.splits > 1 else 0)
