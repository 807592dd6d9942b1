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

import triton
import triton.language as tl

from ..launch import kernel_name
from ..tile import exists, widened
from ..tile_epilogue import activate, derivative, load_bias


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
    bias = load_bias(bias_ptr, c[None, :], real[None, :], PROBLEM)
    xs = _inputs(x_ptr, state_ptr, b, t, c, real, STRIP + PROBLEM.J - 1, PROBLEM)
    idx = _numbers(idx_ptr, idx_of_states_ptr, b, t, STRIP + PROBLEM.J - 1, PROBLEM)
    at = y_ptr + _offset(b, t, c, PROBLEM.T, PROBLEM)
    for u in tl.static_range(STRIP):
        y = activate(_z(xs, idx, taps, bias, u, PROBLEM), PROBLEM)
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
    LATER: tl.constexpr = PROBLEM.J - 1
    ROWS: tl.constexpr = CONFIG.strips
    BLOCK: tl.constexpr = CONFIG.tile_c
    SHARE: tl.constexpr = ROWS * CONFIG.splits
    TILES: tl.constexpr = (PROBLEM.B * ((PROBLEM.T + STRIP - 1) // STRIP) + SHARE - 1) // SHARE
    INPUTS: tl.constexpr = STRIP + LATER + (LATER if PROBLEM.reads_z else 0)
    d_bias_ptr = third_ptr if PROBLEM.epilogue.bias is not None else None
    d_state_ptr = (third_ptr if d_bias_ptr is None else fourth_ptr) if PROBLEM.state is not None else None
    pid = tl.program_id(0)
    split = pid // BLOCKS
    c, real = _channels(pid % BLOCKS, PROBLEM, CONFIG)
    taps = _taps(w_ptr, c, real, PROBLEM)
    bias = load_bias(bias_ptr, c[None, :], real[None, :], PROBLEM)
    dw = ()
    for _ in tl.static_range(TAPS):
        dw = dw + (tl.zeros((ROWS, BLOCK), tl.float32),)
    db = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in range(TILES):
        b, t = _strips(split * TILES + tile, PROBLEM, CONFIG)
        xs = _inputs(x_ptr, state_ptr, b, t, c, real, INPUTS, PROBLEM)
        idx = _numbers(idx_ptr, idx_of_states_ptr, b, t, STRIP + 2 * LATER, PROBLEM)
        place = _offset(b, t, c, PROBLEM.T, PROBLEM)
        dz = ()
        for u in tl.static_range(STRIP + LATER):
            inside = ((b < PROBLEM.B) & (t + u < PROBLEM.T))[:, None] & real[None, :]
            d = tl.load(dy_ptr + (place + u * PROBLEM.C), mask=inside, other=0.0).to(tl.float32)
            if PROBLEM.reads_z:
                # Outside, z may be infinite or NaN.
                d = tl.where(inside, d * derivative(_z(xs, idx, taps, bias, u, PROBLEM), PROBLEM), 0.0)
            dz = dz + (d,)
        for u in tl.static_range(STRIP):
            dx = tl.zeros((ROWS, BLOCK), tl.float32)
            for i in tl.static_range(TAPS):
                d = _same_sequence(dz[u + LATER - i], idx, u + LATER, u + 2 * LATER - i, PROBLEM)
                dx = tl.fma(d, taps[i], dx)
            inside = ((b < PROBLEM.B) & (t + u < PROBLEM.T))[:, None] & real[None, :]
            tl.store(dx_ptr + (place + u * PROBLEM.C), dx.to(dx_ptr.dtype.element_ty), mask=inside)
        new = ()
        for i in tl.static_range(TAPS):
            total = dw[i]
            for u in tl.static_range(STRIP):
                total = tl.fma(dz[u], _same_sequence(xs[u + i], idx, u + i, u + LATER, PROBLEM), total)
            new = new + (total,)
        dw = new
        if d_bias_ptr is not None:
            for u in tl.static_range(STRIP):
                db += dz[u]
        if d_state_ptr is not None:
            for j in tl.static_range(LATER):
                d = tl.zeros((ROWS, BLOCK), tl.float32)
                for u in tl.static_range(j + 1):
                    d = tl.fma(_same_sequence(dz[u], idx, j, u + LATER, PROBLEM), taps[j - u], d)
                at = d_state_ptr + _offset(b, j, c, LATER, PROBLEM)
                mask = ((b < PROBLEM.B) & (t == 0))[:, None] & real[None, :]
                tl.store(at, d.to(d_state_ptr.dtype.element_ty), mask=mask)
    for i in tl.static_range(TAPS):
        tl.store(dw_ptr + (split * TAPS + i) * PROBLEM.C + c, tl.sum(dw[i], axis=0).to(dw_ptr.dtype.element_ty), mask=real)
    if d_bias_ptr is not None:
        tl.store(d_bias_ptr + split * PROBLEM.C + c, tl.sum(db, axis=0).to(d_bias_ptr.dtype.element_ty), mask=real)


@triton.jit
def _channels(block, PROBLEM: tl.constexpr, CONFIG: tl.constexpr):
    c = block * CONFIG.tile_c + tl.arange(0, CONFIG.tile_c)
    return c, exists(c, PROBLEM.C, CONFIG.tile_c)


@triton.jit
def _strips(tile, PROBLEM: tl.constexpr, CONFIG: tl.constexpr):
    """The sequence and the first step of each strip of a tile."""
    EACH: tl.constexpr = (PROBLEM.T + CONFIG.strip - 1) // CONFIG.strip
    strip = tile * CONFIG.strips + tl.arange(0, CONFIG.strips)
    return strip // EACH, strip % EACH * CONFIG.strip


@triton.jit
def _sequence(b, PROBLEM: tl.constexpr):
    """The number of a sequence as a factor of an offset.  Tiles reach beyond the sequences."""
    return widened(b, (PROBLEM.B + 1024) * (PROBLEM.T + 1024) * PROBLEM.C)


@triton.jit
def _offset(b, t, c, STEPS: tl.constexpr, PROBLEM: tl.constexpr):
    return ((_sequence(b, PROBLEM) * STEPS + t) * PROBLEM.C)[:, None] + c[None, :]


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
    EARLIER: tl.constexpr = PROBLEM.J - 1
    place = _offset(b, t - EARLIER, c, PROBLEM.T, PROBLEM)
    xs = ()
    for u in tl.static_range(COUNT):
        s = t - EARLIER + u
        inside = ((b < PROBLEM.B) & (s >= 0) & (s < PROBLEM.T))[:, None] & real[None, :]
        x = tl.load(x_ptr + (place + u * PROBLEM.C), mask=inside, other=0.0).to(tl.float32)
        if PROBLEM.state is not None and u < EARLIER:
            mask = ((b < PROBLEM.B) & (s < 0))[:, None] & real[None, :]
            kept = tl.load(state_ptr + _offset(b, s + EARLIER, c, EARLIER, PROBLEM), mask=mask, other=0.0).to(tl.float32)
            x = tl.where(mask, kept, x)
        xs = xs + (x,)
    return xs


@triton.jit
def _numbers(idx_ptr, idx_of_states_ptr, b, t, COUNT: tl.constexpr, PROBLEM: tl.constexpr):
    """The sequence number of each of these inputs, if there are such numbers."""
    EARLIER: tl.constexpr = PROBLEM.J - 1
    idx = ()
    if PROBLEM.idx:
        for u in tl.static_range(COUNT):
            s = t - EARLIER + u
            inside = (b < PROBLEM.B) & (s >= 0) & (s < PROBLEM.T)
            number = tl.load(idx_ptr + (_sequence(b, PROBLEM) * PROBLEM.T + s), mask=inside, other=0)
            if PROBLEM.idx_of_states and u < EARLIER:
                mask = (b < PROBLEM.B) & (s < 0)
                kept = tl.load(idx_of_states_ptr + (_sequence(b, PROBLEM) * EARLIER + s + EARLIER), mask=mask, other=0)
                number = tl.where(mask, kept, number)
            idx = idx + (number,)
    return idx


@triton.jit
def _same_sequence(values, idx, one: tl.constexpr, other: tl.constexpr, PROBLEM: tl.constexpr):
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
        z = tl.fma(_same_sequence(xs[u + i], idx, u + i, u + TAPS - 1, PROBLEM), taps[i], z)
    return z
