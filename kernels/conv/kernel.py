"""Convolutions as implicit matrix products: no im2col in memory, channels last, nothing transposed or padded.

fprop and dgrad gather by the same equation (`geometry.py`), from x through w into y and from y through w into x:

    target[(n, t), column] = Σ_{tap, channel}  source[(n, s(t, tap)), channel] · w[tap, channel, column]

and wgrad contracts the positions:  w[k, (tap, c)] = Σ_{n, t}  y[(n, t), k] · x[(n, s(t, tap)), c].

*Packed* tiles run over (tap, channel) as one axis; others keep to one tap, which suits many channels.  If some taps meet no source (a
stride in dgrad, an input dilation), a program computes one phase of targets (in wgrad: one tap) and visits only pairs that meet.  Several
small groups can share a tile with a block-diagonal filter; then an infinity or NaN of one group makes the others' sums NaN too.

An example, fprop: x[32,56,56,64] and w[64,3,3,64] in bfloat16 into y[32,56,56,64], stride 1, padding 1, on an H100.  The config that is
expected to be fastest has tiles of 256 rows by 64 columns and steps of 64:

- Rows are pixels of y, 32·56·56 = 100352 in all, so there are 392 programs.  All 64 output channels are columns of the same tile.
- Row i of program p is the pixel 256 p + i.  Row 0 of program 1 is the pixel 256 = 4·56 + 32: image 0, h = 4, w = 32.
- A step is one tap, since it has as many lanes as x has channels: 9 steps.  Step s has the tap (s // 3, s % 3).
- The source of the first tap is (h - 1, w - 1), for that row (3, 31), the pixel 3·56 + 31 = 199: `pixel` = 199·64 = 12736.
- Step 5 has the tap (1, 2), so every row reads `delta` = (1·56 + 2)·64 = 3712 elements further: that row at (4, 33).  Its lane c reads
  x[0,4,33,c], element 12736 + 3712 + c.  A row is 128 contiguous bytes, and the row below it, a neighbour in y, reads the next 128.
- Row 0 of program 0 is y's corner (0, 0).  Its source in step 0 is (-1, -1), outside of x: it is masked and reads zeros.
- The lane (c, k) of the right factor reads w[k,1,2,c], element (9 k + 5)·64 + c.  All programs read the whole filter, 72 KiB, from L2.
- After the last step `pixel` is that of the target, and lane k of that row writes y[0,4,32,k], element 256·64 + k.
"""

import triton
import triton.language as tl

from ..launch import kernel_name
from ..tile import exists, multiply, widened
from ..tile_epilogue import finish


@triton.jit
def _program(TILES: tl.constexpr):
    """The indices of this program's tile, from the counts of `_tiles`.  The first varies fastest, so that neighbours share sources."""
    indices, rest = (), tl.program_id(0)
    for i in tl.static_range(5):
        indices = indices + (rest % TILES[i],)
        rest = rest // TILES[i]
    return indices + (rest,)


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
        return block // BLOCKS, channel, exists(channel, CHANNELS, BLOCK)


@triton.jit
def first_tap(f, AXIS: tl.constexpr):
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
    real = exists(index, N * D.targets * H.targets * W.targets, BLOCK) & exists(fd + D.period * d, D.T, D.period)
    return n, d, h, w, real & exists(fh + H.period * h, H.T, H.period) & exists(fw + W.period * w, W.T, W.period)


@triton.jit
def _source(t, r, AXIS: tl.constexpr):
    """The source of target t at tap r, if d divides."""
    return (AXIS.a * t + AXIS.b * r + AXIS.offset) // AXIS.d


@triton.jit
def _inside(s, AXIS: tl.constexpr):
    if AXIS.inside:
        return tl.full(s.shape, 1, tl.int1)
    else:
        return (s >= 0) & (s < AXIS.S)


@triton.jit
def _pixel(n, d, h, w, D: tl.constexpr, H: tl.constexpr, W: tl.constexpr, CHANNELS: tl.constexpr, ELEMENTS: tl.constexpr):
    """Offset of a pixel's first channel in an array of that many elements."""
    return (((widened(n, ELEMENTS) * D + d) * H + h) * W + w) * CHANNELS


@triton.jit
def _filter(k, tap, c, PROBLEM: tl.constexpr, CONFIG: tl.constexpr, TAPS: tl.constexpr):
    """The offset in w of output channel k and input channel c, counted from the tile's first group, and whether they share a group."""
    if CONFIG.groups == 1:
        return (k * TAPS + tap) * PROBLEM.C + c, tl.full([1, 1], 1, tl.int1)
    else:
        return (k * TAPS + tap) * PROBLEM.C + c % PROBLEM.C, k // PROBLEM.K == c // PROBLEM.C


@triton.jit(repr=kernel_name)
def conv_gather(source_ptr, w_ptr, target_ptr, PROBLEM: tl.constexpr, CONFIG: tl.constexpr, TILES: tl.constexpr, AXES: tl.constexpr):
    """fprop: x and w into y.  dgrad: y and w into x."""
    _gather(source_ptr, w_ptr, None, None, target_ptr, None, PROBLEM, CONFIG, TILES, AXES)


@triton.jit(repr=kernel_name)
def conv_fused(
    x_ptr, w_ptr, bias_ptr, residual_ptr, y_ptr, saved_ptr, PROBLEM: tl.constexpr, CONFIG: tl.constexpr,
    TILES: tl.constexpr, AXES: tl.constexpr,
):  # fmt: skip
    """fprop with an epilogue."""
    _gather(x_ptr, w_ptr, bias_ptr, residual_ptr, y_ptr, saved_ptr, PROBLEM, CONFIG, TILES, AXES)


@triton.jit
def _gather(
    source_ptr, w_ptr, bias_ptr, residual_ptr, target_ptr, saved_ptr, PROBLEM: tl.constexpr, CONFIG: tl.constexpr,
    TILES: tl.constexpr, AXES: tl.constexpr,
):  # fmt: skip
    """Rows are the targets of one phase."""
    D: tl.constexpr = AXES[0]
    H: tl.constexpr = AXES[1]
    W: tl.constexpr = AXES[2]
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
    rd, rh, rw = first_tap(fd, D), first_tap(fh, H), first_tap(fw, W)
    taps_d, taps_h, taps_w = (D.R - rd + D.step - 1) // D.step, (H.R - rh + H.step - 1) // H.step, (W.R - rw + W.step - 1) // W.step
    taps = taps_d * taps_h * taps_w
    taps_h, taps_w = tl.maximum(taps_h, 1), tl.maximum(taps_w, 1)  # they divide, even where there are no taps
    sd, sh, sw = _source(d, rd, D), _source(h, rh, H), _source(w, rw, W)
    pixel = _pixel(n, sd, sh, sw, D.S, H.S, W.S, SOURCE_CHANNELS, SOURCES)

    column = column_block * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    column_exists = exists(column, COLUMNS, BLOCK_N)

    steps = tl.cdiv(taps * CONTRACTED, BLOCK_K) if CONFIG.packed else taps * ((CONTRACTED + BLOCK_K - 1) // BLOCK_K)
    share = tl.cdiv(steps, CONFIG.splits)
    accumulator = tl.zeros([BLOCK_M, BLOCK_N], tl.int32 if PROBLEM.dtypes[0] == "i8" else tl.float32)
    for step in range(split * share, tl.minimum(steps, (split + 1) * share)):
        tap, channel, lane_exists = _lanes(step, tl.arange(0, BLOCK_K)[None, :], taps, CONTRACTED, BLOCK_K, CONFIG.packed)
        ud, uh, uw = _split3(tap, taps_h, taps_w)
        dd, dh, dw = D.tap_stride * ud, H.tap_stride * uh, W.tap_stride * uw
        real = row_exists & lane_exists & _inside(sd + dd, D) & _inside(sh + dh, H) & _inside(sw + dw, W)
        delta = _pixel(0, dd, dh, dw, D.S, H.S, W.S, SOURCE_CHANNELS, SOURCES)
        source = tl.load(source_ptr + (pixel + (delta + channel)), mask=real, other=0.0)
        tap, channel, lane_exists = _lanes(step, tl.arange(0, BLOCK_K)[:, None], taps, CONTRACTED, BLOCK_K, CONFIG.packed)
        ud, uh, uw = _split3(tap, taps_h, taps_w)
        r = ((rd + D.step * ud) * H.R + rh + H.step * uh) * W.R + rw + W.step * uw
        k, c = (column, channel) if FPROP else (channel, column)
        offset, same_group = _filter(k, r, c, PROBLEM, CONFIG, TAPS)
        filter = tl.load(w_ptr + offset, mask=column_exists & lane_exists & same_group, other=0.0)
        accumulator = multiply(source, filter, accumulator, PROBLEM)

    pixel = _pixel(n, d, h, w, D.T, H.T, W.T, TARGET_CHANNELS, TARGETS)
    if PROBLEM.epilogue is None:
        tl.store(target_ptr + (pixel + column), accumulator.to(target_ptr.dtype.element_ty), mask=row_exists & column_exists)
    else:
        if PROBLEM.epilogue.saves:
            saved_ptr += first_target
        bias_ptr += batch.to(tl.int64) * TARGET_CHANNELS + group_block * COLUMNS
        pointers = bias_ptr, residual_ptr + first_target, target_ptr + first_target, saved_ptr
        finish(accumulator, pointers, pixel, row_exists, column_block, PROBLEM, CONFIG, COLUMNS)


@triton.jit(repr=kernel_name)
def conv_wgrad(y_ptr, x_ptr, w_ptr, PROBLEM: tl.constexpr, CONFIG: tl.constexpr, TILES: tl.constexpr, AXES: tl.constexpr):
    """y and x into w.  Rows are output channels, columns (tap, input channel)."""
    D: tl.constexpr = AXES[0]
    H: tl.constexpr = AXES[1]
    W: tl.constexpr = AXES[2]
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
    k_exists = exists(k, K, BLOCK_M)
    tap, c, column_exists = _lanes(column_block, tl.arange(0, BLOCK_N)[None, :], TAPS, C, BLOCK_N, CONFIG.packed)

    # The targets t = first + period·j that meet the tap, and the source of the first; packed columns have all their targets in common.
    rd, rh, rw = _split3(tap, H.R, W.R)
    TAPS_OF_D: tl.constexpr = D.swapped
    TAPS_OF_H: tl.constexpr = H.swapped
    TAPS_OF_W: tl.constexpr = W.swapped
    td, th, tw = first_tap(rd, TAPS_OF_D), first_tap(rh, TAPS_OF_H), first_tap(rw, TAPS_OF_W)
    sd, sh, sw = _source(td, rd, D), _source(th, rh, H), _source(tw, rw, W)
    column_pixel = _pixel(0, sd, sh, sw, D.S, H.S, W.S, PROBLEM.G * PROBLEM.C, SOURCES) + c
    met = ((td < D.T) & (th < H.T) & (tw < W.T)).to(tl.int32)

    steps = met * ((POSITIONS + BLOCK_K - 1) // BLOCK_K)
    share = tl.cdiv(steps, CONFIG.splits)
    accumulator = tl.zeros([BLOCK_M, BLOCK_N], tl.int32 if PROBLEM.dtypes[0] == "i8" else tl.float32)
    for step in range(split * share, tl.minimum(steps, (split + 1) * share)):
        n, d, h, w, real = _targets(step * BLOCK_K + tl.arange(0, BLOCK_K)[None, :], td, th, tw, PROBLEM.N, BLOCK_K, D, H, W)
        pixel = _pixel(n, td + D.period * d, th + H.period * h, tw + W.period * w, D.T, H.T, W.T, PROBLEM.G * PROBLEM.K, TARGETS)
        y = tl.load(y_ptr + (pixel + k), mask=real & k_exists, other=0.0)
        n, d, h, w, real = _targets(step * BLOCK_K + tl.arange(0, BLOCK_K)[:, None], td, th, tw, PROBLEM.N, BLOCK_K, D, H, W)
        dd, dh, dw = D.target_stride * d, H.target_stride * h, W.target_stride * w
        real = real & column_exists & _inside(sd + dd, D) & _inside(sh + dh, H) & _inside(sw + dw, W)
        pixel = _pixel(n, dd, dh, dw, D.S, H.S, W.S, PROBLEM.G * PROBLEM.C, SOURCES)
        x = tl.load(x_ptr + (pixel + column_pixel), mask=real, other=0.0)
        accumulator = multiply(y, x, accumulator, PROBLEM)

    offset, same_group = _filter(k, tap, c, PROBLEM, CONFIG, TAPS)
    tl.store(w_ptr + offset, accumulator.to(w_ptr.dtype.element_ty), mask=k_exists & column_exists & same_group)
