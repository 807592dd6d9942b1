"""Depthwise convolution: one input channel per group, any number K of outputs per group, one to three axes, three roles.

    fprop   y[n,p,g,k] = Σ_r x[n,s(p,r),g] w[g,k,r]
    dgrad   x[n,i,g] = Σ_{r,k} y[n,s(i,r),g,k] w[g,k,r]
    wgrad   w[g,k,r] = Σ_{n,p} y[n,p,g,k] x[n,s(p,r),g]

where s(t, r) is the source that the target t meets at the tap r (`geometry.py`).  There is no contraction for tensor cores, only bytes
to move, so a thread keeps in registers everything that it uses again.  It works on vectors of channels, which are contiguous in memory, and
on *strips* of `strip` targets along the innermost axis: a row of strip + S - 1 sources serves all S taps of a filter row.  A tile is
some strips, not necessarily neighbours, times tile_g channels.  Products and sums are in float32.
"""

import triton
import triton.language as tl

from ..launch import kernel_name
from ..tile import exists, widened
from ..tile_epilogue import load_bias, store
from .problem import FARTHEST

FAR = tl.constexpr(-FARTHEST)  # a place outside every axis, and so are its neighbours


@triton.jit(repr=kernel_name)
def depthwise_gather(source_ptr, w_ptr, target_ptr, PROBLEM: tl.constexpr, CONFIG: tl.constexpr, AXES: tl.constexpr):
    """fprop: x and w into y.  dgrad: y and w into x."""
    _gather(source_ptr, w_ptr, None, None, target_ptr, None, PROBLEM, CONFIG, AXES)


@triton.jit(repr=kernel_name)
def depthwise_fused(
    x_ptr, w_ptr, bias_ptr, residual_ptr, y_ptr, saved_ptr, PROBLEM: tl.constexpr, CONFIG: tl.constexpr, AXES: tl.constexpr
):  # fmt: skip
    """fprop with an epilogue."""
    _gather(x_ptr, w_ptr, bias_ptr, residual_ptr, y_ptr, saved_ptr, PROBLEM, CONFIG, AXES)


@triton.jit
def _gather(
    source_ptr, w_ptr, bias_ptr, residual_ptr, target_ptr, saved_ptr, PROBLEM: tl.constexpr, CONFIG: tl.constexpr, AXES: tl.constexpr
):  # fmt: skip
    """One tile of targets of one phase.  SHARING channels of the target read the same one of the source, and SUMMED go into one."""
    D: tl.constexpr = AXES[0]
    H: tl.constexpr = AXES[1]
    W: tl.constexpr = AXES[2]
    FPROP: tl.constexpr = PROBLEM.role == "fprop"
    SHARING: tl.constexpr = PROBLEM.K if FPROP else 1
    SUMMED: tl.constexpr = 1 if FPROP else PROBLEM.K
    TARGET_C: tl.constexpr = PROBLEM.G * SHARING
    SOURCE_C: tl.constexpr = PROBLEM.G * SUMMED
    BLOCKS: tl.constexpr = (TARGET_C + CONFIG.tile_g - 1) // CONFIG.tile_g
    LINES: tl.constexpr = PROBLEM.N * D.targets * H.targets
    TILES: tl.constexpr = (LINES * W.strips + CONFIG.strips - 1) // CONFIG.strips
    IMAGES: tl.constexpr = PROBLEM.B * PROBLEM.N
    pid = tl.program_id(0)
    c = pid % BLOCKS * CONFIG.tile_g + tl.arange(0, CONFIG.tile_g)
    real = exists(c, TARGET_C, CONFIG.tile_g)
    phase = pid // (BLOCKS * TILES)
    fw, fh, fd = phase % W.period, phase // W.period % H.period, phase // (W.period * H.period) % D.period
    b = phase // (W.period * H.period * D.period)
    n, jd, jh, jw = _strip(pid // BLOCKS % TILES * CONFIG.strips + tl.arange(0, CONFIG.strips), D, H, W)
    td, th, tw = fd + D.period * jd, fh + H.period * jh, fw + W.period * jw
    image = widened(b, IMAGES) * PROBLEM.N + n
    valid = (n < PROBLEM.N) & (td < D.T) & (th < H.T)
    tw = tl.where(valid, tw, W.T)
    sd = _origin(D, fd) + D.target_stride * jd
    sh = tl.where(valid, _origin(H, fh) + H.target_stride * jh, FAR)
    sw = _origin(W, fw) + W.target_stride * jw
    first_d, first_h, first_w = _first(D, fd), _first(H, fh), _first(W, fw)

    filter = widened(b, PROBLEM.B * PROBLEM.G * PROBLEM.K * D.R * H.R * W.R) * TARGET_C + c

    WIDTH: tl.constexpr = CONFIG.strip
    sums = _zeros(WIDTH, CONFIG.strips, CONFIG.tile_g)
    for k in range(SUMMED):
        for t in range((D.R - first_d + D.step - 1) // D.step):
            for r in range((H.R - first_h + H.step - 1) // H.step):
                for piece in range(W.pieces):
                    row = (filter * SUMMED + k) * D.R + first_d + D.step * t
                    row = row * H.R + first_h + H.step * r
                    begin = _begin(piece, first_w, W)
                    taps = _filter_row(w_ptr, row, first_w + W.step * begin, first_w + W.step * W.COLUMNS * piece, real, W)
                    d, h, w = sd + D.tap_stride * t, sh + H.tap_stride * r, sw + W.tap_stride * begin
                    at = source_ptr + _offset(image, d, h, w, c // SHARING * SUMMED + k, D.S, H.S, W.S, SOURCE_C, IMAGES, W.reach)
                    sources = _source_row(at, _column(d, h, w, D, H), real, SOURCE_C, W)
                    sums = _accumulate(sums, sources, taps, W.hop, 1, W.lowest)

    place = _offset(image, td, th, tw, c, D.T, H.T, W.T, TARGET_C, IMAGES, 0)
    if PROBLEM.epilogue is None:
        at = target_ptr + place
        for u in tl.static_range(WIDTH):
            step = W.period * W.spacing * u
            tl.store(at + step * TARGET_C, sums[u].to(target_ptr.dtype.element_ty), mask=(tw + step < W.T)[:, None] & real[None, :])
    else:
        bias = load_bias(bias_ptr, (widened(b, PROBLEM.B * TARGET_C) * TARGET_C + c)[None, :], real[None, :], PROBLEM)
        for u in tl.static_range(WIDTH):
            step = W.period * W.spacing * u
            mask = (tw + step < W.T)[:, None] & real[None, :]
            at = place + step * TARGET_C
            residual = tl.load(residual_ptr + at, mask=mask, other=0) if PROBLEM.epilogue.residual is not None else 0
            store(sums[u], bias, residual, target_ptr, saved_ptr, at, mask, PROBLEM)


@triton.jit(repr=kernel_name)
def depthwise_wgrad(x_ptr, y_ptr, w_ptr, PROBLEM: tl.constexpr, CONFIG: tl.constexpr, AXES: tl.constexpr):
    """One tile of filter elements (pieces of rows times channels), and one part of the sum.

    A row of the tile is a strip and a piece: it meets the targets of the only phase that meets the piece's taps.
    """
    D: tl.constexpr = AXES[0]
    H: tl.constexpr = AXES[1]
    W: tl.constexpr = AXES[2]
    CHANNELS: tl.constexpr = PROBLEM.G * PROBLEM.K
    BLOCKS: tl.constexpr = (CHANNELS + CONFIG.tile_g - 1) // CONFIG.tile_g
    CLASSES: tl.constexpr = min(W.step, W.R)
    PIECES: tl.constexpr = (D.R * H.R * CLASSES * W.pieces + CONFIG.pieces - 1) // CONFIG.pieces
    LINES: tl.constexpr = PROBLEM.N * D.targets * H.targets
    SHARE: tl.constexpr = CONFIG.splits * CONFIG.strips
    TILES: tl.constexpr = (LINES * W.strips + SHARE - 1) // SHARE
    IMAGES: tl.constexpr = PROBLEM.B * PROBLEM.N
    pid = tl.program_id(0)
    c = pid % BLOCKS * CONFIG.tile_g + tl.arange(0, CONFIG.tile_g)
    real = exists(c, CHANNELS, CONFIG.tile_g)
    split, b = pid // (BLOCKS * PIECES) % CONFIG.splits, pid // (BLOCKS * PIECES * CONFIG.splits)

    row = tl.arange(0, CONFIG.strips * CONFIG.pieces)
    t, r, first_w, piece = _piece(pid // BLOCKS % PIECES * CONFIG.pieces + row % CONFIG.pieces, H, CLASSES, W)
    fd, fh, fw = _phase_of(D, t % D.step), _phase_of(H, r % H.step), _phase_of(W, first_w)
    seen = (t < D.R) & (fd < D.period) & (fh < H.period) & (fw < W.period)

    COLUMNS: tl.constexpr = W.COLUMNS
    sums = _zeros(COLUMNS, CONFIG.strips * CONFIG.pieces, CONFIG.tile_g)
    for tile in range(TILES):
        n, jd, jh, jw = _strip((split * TILES + tile) * CONFIG.strips + row // CONFIG.pieces, D, H, W)
        td, th, tw = fd + D.period * jd, fh + H.period * jh, fw + W.period * jw
        valid = seen & (n < PROBLEM.N) & (td < D.T) & (th < H.T)
        tw = tl.where(valid, tw, W.T)
        image = widened(b, IMAGES) * PROBLEM.N + n
        at = y_ptr + _offset(image, td, th, tw, c, D.T, H.T, W.T, CHANNELS, IMAGES, 0)
        ys = _target_row(at, tw, real, CHANNELS, W)
        sd = _origin(D, fd) + D.target_stride * jd + D.tap_stride * (t // D.step)
        sh = tl.where(valid, _origin(H, fh) + H.target_stride * jh + H.tap_stride * (r // H.step), FAR)
        sw = _origin(W, fw) + W.target_stride * jw + W.tap_stride * W.COLUMNS * piece
        at = x_ptr + _offset(image, sd, sh, sw, c // PROBLEM.K, D.S, H.S, W.S, PROBLEM.G, IMAGES, W.reach)
        xs = _source_row(at, _column(sd, sh, sw, D, H), real, PROBLEM.G, W)
        sums = _accumulate(sums, xs, ys, 1, W.hop, W.lowest)

    t, r, first_w, piece = _piece(pid // BLOCKS % PIECES * CONFIG.pieces + tl.arange(0, CONFIG.pieces), H, CLASSES, W)
    filter = widened(split * PROBLEM.B + b, CONFIG.splits * PROBLEM.B * CHANNELS * D.R * H.R * W.R) * CHANNELS + c
    for s in tl.static_range(COLUMNS):
        tap = first_w + W.step * (COLUMNS * piece + s)
        at = w_ptr + ((filter[None, :] * D.R + t[:, None]) * H.R + r[:, None]) * W.R + tap[:, None]
        total = tl.sum(tl.reshape(sums[s], (CONFIG.strips, CONFIG.pieces, CONFIG.tile_g)), axis=0)
        tl.store(at, total.to(w_ptr.dtype.element_ty), mask=((t < D.R) & (tap < W.R))[:, None] & real[None, :])


@triton.jit
def _zeros(COUNT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """A tuple of tiles."""
    tiles = ()
    for _ in tl.static_range(COUNT):
        tiles = tiles + (tl.zeros((ROWS, BLOCK), tl.float32),)
    return tiles


@triton.jit
def _first(AXIS: tl.constexpr, phase):
    """AXIS.first[phase]"""
    tap = tl.zeros_like(phase) + AXIS.first[0]
    PERIOD: tl.constexpr = AXIS.period
    for f in tl.static_range(1, PERIOD):
        tap = tl.where(phase == f, AXIS.first[f], tap)
    return tap


@triton.jit
def _origin(AXIS: tl.constexpr, phase):
    """AXIS.origin[phase], or that of the first phase if there is no such phase."""
    source = tl.zeros_like(phase) + AXIS.origin[0]
    PERIOD: tl.constexpr = AXIS.period
    for f in tl.static_range(1, PERIOD):
        source = tl.where(phase == f, AXIS.origin[f], source)
    return source


@triton.jit
def _phase_of(AXIS: tl.constexpr, first):
    """The phase with this first tap, or AXIS.period if there is none."""
    phase = tl.zeros_like(first) + AXIS.period
    PERIOD: tl.constexpr = AXIS.period
    for i in tl.static_range(PERIOD):
        phase = tl.where(first == AXIS.first[i], i, phase)
    return phase


@triton.jit
def _strip(strip, D: tl.constexpr, H: tl.constexpr, W: tl.constexpr):
    """The image of a strip and its first target on each axis, as numbers within their phase."""
    line, place = strip // W.strips, strip % W.strips
    jw = place // W.spacing * (W.spacing * W.strip) + place % W.spacing
    return line // (D.targets * H.targets), line // H.targets % D.targets, line % H.targets, jw


@triton.jit
def _piece(lane, H: tl.constexpr, CLASSES: tl.constexpr, W: tl.constexpr):
    """The taps of a piece of the filter: t, r, the first tap of its class along the row, and the piece's number in that class."""
    row = lane // (W.pieces * CLASSES)
    return row // H.R, row % H.R, lane // W.pieces % CLASSES, lane % W.pieces


@triton.jit
def _offset(
    image, d, h, w, c, D: tl.constexpr, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, IMAGES: tl.constexpr, REACH: tl.constexpr
):  # fmt: skip
    """The offset, in places times channels, in an array [IMAGES, D, H, W, C]; w may be up to REACH places outside."""
    image = widened(image, (IMAGES * D * H * W + REACH) * C)
    return ((((image * D + d) * H + h) * W + w) * C)[:, None] + c[None, :]


@triton.jit
def _column(sd, sh, sw, D: tl.constexpr, H: tl.constexpr):
    """sw, or a place far outside if the line does not exist, so that a load needs only one comparison."""
    return tl.where((sd >= 0) & (sd < D.S) & (sh >= 0) & (sh < H.S), sw, FAR)


@triton.jit
def _source_row(at, column, real, CHANNELS: tl.constexpr, W: tl.constexpr):
    """The sources of a strip, from number `lowest` on; `at` points to number 0, which is in `column`."""
    SOURCES: tl.constexpr = W.sources
    row = ()
    for i in tl.static_range(SOURCES):
        shift = (W.lowest + i) * W.tap_stride
        inside = (column + shift).to(tl.uint32, bitcast=True) < W.S
        row = row + (tl.load(at + shift * CHANNELS, mask=inside[:, None] & real[None, :], other=0.0).to(tl.float32),)
    return row


@triton.jit
def _target_row(at, tw, real, CHANNELS: tl.constexpr, W: tl.constexpr):
    """The targets of a strip; `at` points to the first, which is at tw."""
    WIDTH: tl.constexpr = W.strip
    row = ()
    for u in tl.static_range(WIDTH):
        step = W.period * W.spacing * u
        row = row + (tl.load(at + step * CHANNELS, mask=(tw + step < W.T)[:, None] & real[None, :], other=0.0).to(tl.float32),)
    return row


@triton.jit
def _begin(piece, first, W: tl.constexpr):
    """The number, within its phase, of a piece's first tap.

    The last piece begins early and ends with the row, and the taps that it reads again count as zero.  If it went beyond the row, sources
    that a target does not meet would be multiplied by zero, and an infinite one would turn the target into NaN, such as a later input of a
    causal convolution.
    """
    if W.uneven:
        return tl.minimum(W.COLUMNS * piece, tl.maximum((W.R - first + W.step - 1) // W.step - W.COLUMNS, 0))
    else:
        return W.COLUMNS * piece


@triton.jit
def _filter_row(w_ptr, row, first, least, real, W: tl.constexpr):
    """COLUMNS taps of a row of the filter for each channel, one vector of channels per tap; zeros before the tap `least`.

    The taps of a channel are contiguous in memory, so a tile is loaded and split repeatedly into even and odd columns.
    """
    COLUMNS: tl.constexpr = W.COLUMNS
    LEVELS: tl.constexpr = W.levels
    i = tl.arange(0, 1 << LEVELS)
    tap = first + W.step * i
    mask = real[:, None] & ((i < COLUMNS) & (tap < W.R))[None, :]
    if W.uneven:
        mask = mask & (tap >= least)[None, :]
    parts = (tl.load(w_ptr + row[:, None] * W.R + tap[None, :], mask=mask, other=0.0).to(tl.float32),)
    for level in tl.static_range(LEVELS):
        even, odd = (), ()
        for p in tl.static_range(len(parts)):
            halves = tl.split(tl.reshape(parts[p], (row.shape[0], 1 << (LEVELS - level - 1), 2)))
            even, odd = even + (halves[0],), odd + (halves[1],)
        parts = even + odd
    columns = ()
    for s in tl.static_range(COLUMNS):
        columns = columns + (tl.reshape(parts[s], (1, row.shape[0])),)
    return columns


@triton.jit
def _accumulate(sums, sources, factors, HOP: tl.constexpr, FACTOR_HOP: tl.constexpr, LOWEST: tl.constexpr):
    """sums[i] + Σ_j sources[HOP·i + FACTOR_HOP·j] factors[j], where the first of the sources has the number LOWEST."""
    new = ()
    for i in tl.static_range(len(sums)):
        total = sums[i]
        for j in tl.static_range(len(factors)):
            total = tl.fma(sources[HOP * i + FACTOR_HOP * j - LOWEST], factors[j], total)
        new = new + (total,)
    return new
