"""Causal depthwise convolution of sequences, with bias, activation, state and boundaries of sequences, and its whole derivative.

    z[b,t,c] = Σ_i w[i,c] x[b,t-(J-1)+i,c] + bias[c]      y = activation(z)

The inputs before t = 0 are the state's, or zero.  With `idx`, a tap reads zero at a step of another sequence than t's.
The derivative is one pass over x and the cotangent dy.  It computes z again:

    dz = dy activation'(z)                                db[c] = Σ_{b,t} dz[b,t,c]
    dx[b,s,c] = Σ_i w[i,c] dz[b,s+(J-1)-i,c]              dw[i,c] = Σ_{b,t} dz[b,t,c] x[b,t-(J-1)+i,c]

There are only bytes to move.  A thread works on a vector of channels, which are neighbours in memory, and on a *strip* of `strip` steps: it
loads each input of the strip once and keeps it in registers.  A tile is some strips, of any sequences, times tile_c channels.  Products and
sums are in float32.  dw and db are partial sums, one for each of `splits` programs, which are added in a fixed order.
"""

from __future__ import annotations

import dataclasses

import triton
import triton.language as tl

from .. import tile_epilogue as _fused
from ..epilogue import ACTIVATIONS
from ..launch import BITS, MOST_PROGRAMS, SHARED_MEMORY, Launch, cdiv, kernel_name, largest_block
from ..machine import ACCESS, ACTIVATED, machine
from .problem import CausalProblem

Problem = CausalProblem

DTYPES = ("fp32", "bf16", "fp16")
MOST_TAPS = {"forward": 31, "backward": 8}  # of more, the derivative does not fit the registers, and takes minutes to compile
VECTOR_BITS = (128, 64, 32)  # of a thread's channels
STRIPS = (16, 8, 4, 2)
NUM_WARPS = 4
REGISTERS = 168  # of a thread, by the count of `registers`: three programs then fit a multiprocessor
ROW = 128  # bytes of a row of a tile, at most: a line of the cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    tile_c: int  # channels of a tile, a power of two
    strips: int  # strips of a tile, a power of two
    strip: int  # steps of a strip
    splits: int = 1  # of the derivative: programs that share the strips
    num_warps: int


def supports(problem: Problem) -> str | None:
    """None, or the reason for refusing."""
    if problem.J > (most := MOST_TAPS[problem.role]):
        return f"{problem.J} taps, its {problem.role} takes {most} at most"
    named = {
        "x": problem.dtypes[0],
        "weight": problem.dtypes[1],
        "y": problem.dtypes[2],
        "bias": problem.epilogue.bias,
        "state": problem.state,
    }
    for name, dtype in named.items():
        if dtype is not None and dtype not in DTYPES:
            return f"{name} is {dtype}, it takes {', '.join(DTYPES)}"
    if problem.epilogue.activation not in (None, *ACTIVATIONS):
        return f"activation {problem.epilogue.activation!r}, want one of {', '.join(ACTIVATIONS)}"
    if problem.B * (problem.T + 2 * problem.J) >= 2**31 - 2**20:
        return f"{problem.B} sequences of {problem.T} steps, it numbers fewer than 2^31 steps"
    if problem.arch not in SHARED_MEMORY:
        return f"compute capability {problem.arch / 10}, it takes {', '.join(str(arch / 10) for arch in SHARED_MEMORY)}"
    return None


def candidates(problem: Problem) -> list[Config]:
    """Vectors and strips of several widths that fit the registers: the one with the fewest clocks first, among equals the widest.

    If none fits, as with many taps, the narrowest.  The derivative shares the strips between at most 6 programs per multiprocessor: more
    would only write more partial sums.
    """
    configs = []
    widest = max(BITS[dtype] for dtype in problem.dtypes)
    for bits in VECTOR_BITS:
        vector = max(1, bits // widest)
        blocks = [vector << i for i in range(6) if (vector << i) * widest <= 8 * ROW]
        block = largest_block(blocks, max(1, problem.C), idle=1 / 8)
        rows = 32 * NUM_WARPS * vector // block
        for strip in STRIPS:
            config = Config(tile_c=block, strips=rows, strip=strip, num_warps=NUM_WARPS)
            if problem.role == "backward":
                wanted = 6 * machine(problem.arch, problem.device).multiprocessors // max(1, cdiv(problem.C, block))
                config = dataclasses.replace(config, splits=max(1, min(wanted, cdiv(strips(problem, config), rows))))
            if config not in configs:
                configs.append(config)
    few = [config for config in configs if registers(problem, config) <= REGISTERS] or [min(configs, key=lambda c: registers(problem, c))]
    return sorted(few, key=lambda config: (clocks(problem, config), -config.tile_c, -config.strip))


def pick(problem: Problem) -> Config:
    return candidates(problem)[0]


def strips(problem: Problem, config: Config) -> int:
    return problem.B * cdiv(problem.T, config.strip)


def registers(problem: Problem, config: Config) -> int:
    """The approximate number of registers of a thread.

    Taps, sums and cotangents are in float32, inputs in their own dtype; then come masks of the steps of one sequence, and addresses.  The
    derivative needs a third more, for values in flight.
    """
    vector = cdiv(config.strips * config.tile_c, 32 * config.num_warps)
    backward = problem.role == "backward"
    inputs = config.strip + problem.before + (problem.after if problem.reads_z else 0)
    sums = problem.J + 1 + config.strip + problem.after if backward else config.strip
    pairs = (inputs + problem.J * (config.strip + problem.after)) if problem.idx else 0
    needed = vector * (problem.J + sums) + cdiv(vector * BITS[problem.dtypes[0]], 32) * inputs + pairs + 16
    return needed * 4 // 3 if backward else needed


def clocks(problem: Problem, config: Config) -> float:
    """The larger of two times of a multiprocessor: to move its vectors to and from the L2 cache, and to compute."""
    gpu, taps, strip = machine(problem.arch, problem.device), problem.J, config.strip
    if problem.role == "backward":
        moved = 3 * strip + 3 * (taps - 1)
        computed = 2 * taps * strip + (strip + taps - 1) * ((taps + ACTIVATED) if problem.reads_z else 1)
        programs, times = grid(problem, config)[0], cdiv(strips(problem, config), config.strips * config.splits)
    else:
        moved = 2 * strip + taps - 1
        computed = strip * (taps + (ACTIVATED if problem.epilogue.activation else 1))
        programs, times = grid(problem, config)[0], 1
    elements = config.strips * config.tile_c
    computed += ACCESS * moved * 32 * config.num_warps / elements
    bits = max(BITS[dtype] for dtype in problem.dtypes)
    return gpu.rounds(programs) * times * elements * max(moved * bits / 8 / gpu.l2, computed / gpu.fma)


def grid(problem: Problem, config: Config) -> tuple[int]:
    blocks = cdiv(problem.C, config.tile_c)
    return (blocks * (config.splits if problem.role == "backward" else cdiv(strips(problem, config), config.strips)),)


def launch(problem: Problem, config: Config) -> Launch:
    if reason := supports(problem):
        raise ValueError(f"{problem.name}: {reason}")
    for field in ("tile_c", "strips"):
        if (size := getattr(config, field)) < 1 or size & (size - 1):
            raise ValueError(f"{problem.name}: {field} is {size}, want a power of two")
    for field in ("strip", "splits"):
        if (size := getattr(config, field)) < 1:
            raise ValueError(f"{problem.name}: {field} is {size}, want at least 1")
    if problem.role == "forward" and config.splits != 1:
        raise ValueError(f"{problem.name}: splits is {config.splits}, want 1 for the role forward")
    if (programs := grid(problem, config)[0]) > MOST_PROGRAMS:
        raise ValueError(f"{problem.name}: {config} has {programs} programs, a grid has at most {MOST_PROGRAMS}")
    # An absent operand is x again, through which nothing is read.
    given = {
        "bias": problem.epilogue.bias is not None,
        "initial_states": problem.state is not None,
        "seq_idx": problem.idx,
        "idx_of_states": problem.idx_of_states,
    }
    operands = ("x", "weight", *(name if there else "x" for name, there in given.items()))
    backward = problem.role == "backward"
    further = given["bias"] + given["initial_states"]
    absent = {name: None for name in ("third_ptr", "fourth_ptr")[further:] if backward}
    return Launch(
        name=problem.name,
        kernel=causal_backward if backward else causal_forward,
        operands=(*operands, "d_y") if backward else operands,
        grid=grid(problem, config),
        constants={**absent, "PROBLEM": problem, "CONFIG": config},
        num_warps=config.num_warps,
        num_stages=1,  # more programs per multiprocessor hide the latency
        splits=config.splits,
        results=2 + further if backward else 1,
        whole=(0, 2 + given["bias"]),
    )


@triton.jit(repr=kernel_name)
def causal_forward(
    x_ptr, w_ptr, bias_ptr, state_ptr, idx_ptr, idx_of_states_ptr, y_ptr, PROBLEM: tl.constexpr, CONFIG: tl.constexpr
):  # fmt: skip
    BLOCKS: tl.constexpr = (PROBLEM.C + CONFIG.tile_c - 1) // CONFIG.tile_c
    STRIP: tl.constexpr = CONFIG.strip
    pid = tl.program_id(0)
    c, real = _channels(pid % BLOCKS, PROBLEM, CONFIG)
    b, t = _strips(pid // BLOCKS, PROBLEM, CONFIG)
    taps = _taps(w_ptr, c, real, PROBLEM)
    bias = _fused.load_bias(bias_ptr, c[None, :], real[None, :], PROBLEM)
    xs = _inputs(x_ptr, state_ptr, b, t, c, real, STRIP + PROBLEM.J - 1, PROBLEM)
    idx = _numbers(idx_ptr, idx_of_states_ptr, b, t, STRIP + PROBLEM.J - 1, PROBLEM)
    at = y_ptr + _place(b, t, c, PROBLEM)
    for u in tl.static_range(STRIP):
        y = _fused.activate(_z(xs, idx, taps, bias, u, PROBLEM), PROBLEM)
        tl.store(at + u * PROBLEM.C, y.to(y_ptr.dtype.element_ty), mask=((b < PROBLEM.B) & (t + u < PROBLEM.T))[:, None] & real[None, :])


@triton.jit(repr=kernel_name)
def causal_backward(
    x_ptr, w_ptr, bias_ptr, state_ptr, idx_ptr, idx_of_states_ptr, dy_ptr, dx_ptr, dw_ptr, third_ptr, fourth_ptr,
    PROBLEM: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """A share of the strips of some channels, tile by tile.  Further results: the cotangents of the bias and of the state, if present."""
    BLOCKS: tl.constexpr = (PROBLEM.C + CONFIG.tile_c - 1) // CONFIG.tile_c
    STRIP: tl.constexpr = CONFIG.strip
    TAPS: tl.constexpr = PROBLEM.J
    BEHIND: tl.constexpr = PROBLEM.J - 1
    ROWS: tl.constexpr = CONFIG.strips
    BLOCK: tl.constexpr = CONFIG.tile_c
    SHARE: tl.constexpr = ROWS * CONFIG.splits
    TILES: tl.constexpr = (PROBLEM.B * ((PROBLEM.T + STRIP - 1) // STRIP) + SHARE - 1) // SHARE
    INPUTS: tl.constexpr = STRIP + BEHIND + (BEHIND if PROBLEM.reads_z else 0)
    d_bias_ptr = third_ptr if PROBLEM.epilogue.bias is not None else None
    d_state_ptr = (third_ptr if d_bias_ptr is None else fourth_ptr) if PROBLEM.state is not None else None
    pid = tl.program_id(0)
    split = pid // BLOCKS
    c, real = _channels(pid % BLOCKS, PROBLEM, CONFIG)
    taps = _taps(w_ptr, c, real, PROBLEM)
    bias = _fused.load_bias(bias_ptr, c[None, :], real[None, :], PROBLEM)
    dw = ()
    for _ in tl.static_range(TAPS):
        dw = dw + (tl.zeros((ROWS, BLOCK), tl.float32),)
    db = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in range(TILES):
        b, t = _strips(split * TILES + tile, PROBLEM, CONFIG)
        xs = _inputs(x_ptr, state_ptr, b, t, c, real, INPUTS, PROBLEM)
        idx = _numbers(idx_ptr, idx_of_states_ptr, b, t, STRIP + 2 * BEHIND, PROBLEM)
        place = _place(b, t, c, PROBLEM)
        dz = ()
        for u in tl.static_range(STRIP + BEHIND):
            inside = ((b < PROBLEM.B) & (t + u < PROBLEM.T))[:, None] & real[None, :]
            d = tl.load(dy_ptr + (place + u * PROBLEM.C), mask=inside, other=0.0).to(tl.float32)
            if PROBLEM.reads_z:
                # Outside, z may be infinite or NaN.
                d = tl.where(inside, d * _fused.derivative(_z(xs, idx, taps, bias, u, PROBLEM), PROBLEM), 0.0)
            dz = dz + (d,)
        for u in tl.static_range(STRIP):
            dx = tl.zeros((ROWS, BLOCK), tl.float32)
            for i in tl.static_range(TAPS):
                d = _of_same(dz[u + BEHIND - i], idx, u + BEHIND, u + 2 * BEHIND - i, PROBLEM)
                dx = tl.fma(d, taps[i], dx)
            inside = ((b < PROBLEM.B) & (t + u < PROBLEM.T))[:, None] & real[None, :]
            tl.store(dx_ptr + (place + u * PROBLEM.C), dx.to(dx_ptr.dtype.element_ty), mask=inside)
        new = ()
        for i in tl.static_range(TAPS):
            total = dw[i]
            for u in tl.static_range(STRIP):
                total = tl.fma(dz[u], _of_same(xs[u + i], idx, u + i, u + BEHIND, PROBLEM), total)
            new = new + (total,)
        dw = new
        if d_bias_ptr is not None:
            for u in tl.static_range(STRIP):
                db += dz[u]
        if d_state_ptr is not None:
            for j in tl.static_range(BEHIND):
                d = tl.zeros((ROWS, BLOCK), tl.float32)
                for u in tl.static_range(j + 1):
                    d = tl.fma(_of_same(dz[u], idx, j, u + BEHIND, PROBLEM), taps[j - u], d)
                at = d_state_ptr + _of_state(b, j, c, PROBLEM)
                mask = ((b < PROBLEM.B) & (t == 0))[:, None] & real[None, :]
                tl.store(at, d.to(d_state_ptr.dtype.element_ty), mask=mask)
    for i in tl.static_range(TAPS):
        tl.store(dw_ptr + (split * TAPS + i) * PROBLEM.C + c, tl.sum(dw[i], axis=0).to(dw_ptr.dtype.element_ty), mask=real)
    if d_bias_ptr is not None:
        tl.store(d_bias_ptr + split * PROBLEM.C + c, tl.sum(db, axis=0).to(d_bias_ptr.dtype.element_ty), mask=real)


@triton.jit
def _channels(block, PROBLEM: tl.constexpr, CONFIG: tl.constexpr):
    c = block * CONFIG.tile_c + tl.arange(0, CONFIG.tile_c)
    return c, (c < PROBLEM.C) | (PROBLEM.C % CONFIG.tile_c == 0)


@triton.jit
def _strips(tile, PROBLEM: tl.constexpr, CONFIG: tl.constexpr):
    """The sequence and the first step of each strip of a tile."""
    EACH: tl.constexpr = (PROBLEM.T + CONFIG.strip - 1) // CONFIG.strip
    strip = tile * CONFIG.strips + tl.arange(0, CONFIG.strips)
    return strip // EACH, strip % EACH * CONFIG.strip


@triton.jit
def _wide(index, PROBLEM: tl.constexpr):
    """A factor of an offset, in 64 bits if the offsets need them.  Tiles reach beyond the sequences."""
    return index.to(tl.int64) if (PROBLEM.B + 1024) * (PROBLEM.T + 1024) * PROBLEM.C >= 2**31 else index


@triton.jit
def _place(b, t, c, PROBLEM: tl.constexpr):
    return ((_wide(b, PROBLEM) * PROBLEM.T + t) * PROBLEM.C)[:, None] + c[None, :]


@triton.jit
def _of_state(b, j, c, PROBLEM: tl.constexpr):
    return ((_wide(b, PROBLEM) * (PROBLEM.J - 1) + j) * PROBLEM.C)[:, None] + c[None, :]


@triton.jit
def _taps(w_ptr, c, real, PROBLEM: tl.constexpr):
    TAPS: tl.constexpr = PROBLEM.J
    taps = ()
    for i in tl.static_range(TAPS):
        taps = taps + (tl.load(w_ptr + i * PROBLEM.C + c, mask=real, other=0.0).to(tl.float32)[None, :],)
    return taps


@triton.jit
def _inputs(x_ptr, state_ptr, b, t, c, real, COUNT: tl.constexpr, PROBLEM: tl.constexpr):
    """The inputs of a strip and of the J - 1 steps before it, which may be the state's; zeros outside."""
    BEFORE: tl.constexpr = PROBLEM.J - 1
    place = _place(b, t - BEFORE, c, PROBLEM)
    xs = ()
    for u in tl.static_range(COUNT):
        s = t - BEFORE + u
        inside = ((b < PROBLEM.B) & (s >= 0) & (s < PROBLEM.T))[:, None] & real[None, :]
        x = tl.load(x_ptr + (place + u * PROBLEM.C), mask=inside, other=0.0).to(tl.float32)
        if PROBLEM.state is not None and u < BEFORE:
            mask = ((b < PROBLEM.B) & (s < 0))[:, None] & real[None, :]
            before = tl.load(state_ptr + _of_state(b, s + BEFORE, c, PROBLEM), mask=mask, other=0.0).to(tl.float32)
            x = tl.where(mask, before, x)
        xs = xs + (x,)
    return xs


@triton.jit
def _numbers(idx_ptr, idx_of_states_ptr, b, t, COUNT: tl.constexpr, PROBLEM: tl.constexpr):
    """The sequence number of each of these inputs, if there are such numbers."""
    BEFORE: tl.constexpr = PROBLEM.J - 1
    idx = ()
    if PROBLEM.idx:
        for u in tl.static_range(COUNT):
            s = t - BEFORE + u
            inside = (b < PROBLEM.B) & (s >= 0) & (s < PROBLEM.T)
            number = tl.load(idx_ptr + (_wide(b, PROBLEM) * PROBLEM.T + s), mask=inside, other=0)
            if PROBLEM.idx_of_states and u < BEFORE:
                mask = (b < PROBLEM.B) & (s < 0)
                before = tl.load(idx_of_states_ptr + (_wide(b, PROBLEM) * BEFORE + s + BEFORE), mask=mask, other=0)
                number = tl.where(mask, before, number)
            idx = idx + (number,)
    return idx


@triton.jit
def _of_same(values, idx, one: tl.constexpr, other: tl.constexpr, PROBLEM: tl.constexpr):
    """The values, or zeros if the two inputs belong to different sequences."""
    if PROBLEM.idx:
        return tl.where((idx[one] == idx[other])[:, None], values, 0.0)
    else:
        return values


@triton.jit
def _z(xs, idx, taps, bias, u: tl.constexpr, PROBLEM: tl.constexpr):
    """z at step u of a strip."""
    TAPS: tl.constexpr = PROBLEM.J
    z = tl.zeros(xs[0].shape, tl.float32) + bias
    for i in tl.static_range(TAPS):
        z = tl.fma(_of_same(xs[u + i], idx, u + i, u + TAPS - 1, PROBLEM), taps[i], z)
    return z
