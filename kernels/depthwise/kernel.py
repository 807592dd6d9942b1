"""Depthwise convolution: one input channel per group, any number K of outputs per group, one to three axes, three roles.

    fprop   y[n,p,g,k] = Σ_r x[n,s(p,r),g] w[g,k,r]
    dgrad   x[n,i,g] = Σ_{r,k} y[n,s(i,r),g,k] w[g,k,r]
    wgrad   w[g,k,r] = Σ_{n,p} y[n,p,g,k] x[n,s(p,r),g]

where s(t, r) is the source that the target t meets at the tap r (`geometry.py`).  There is no contraction for tensor cores, only bytes
to move, so a thread keeps in registers everything that it uses again.  It works on vectors of channels, which are contiguous in memory, and
on *strips* of `strip` targets along the innermost axis: a row of strip + S - 1 sources serves all S taps of a filter row.  A tile is
some strips, not necessarily neighbours, times tile_g channels.  Products and sums are in float32.
"""

from __future__ import annotations

import dataclasses
import math

import triton
import triton.language as tl

from .. import tile_epilogue as _fused
from ..geometry import Axis, ConvProblem
from ..launch import BITS, MOST_PROGRAMS, SHARED_MEMORY, Launch, cdiv, kernel_name, largest_block
from ..machine import machine

Problem = ConvProblem

DTYPES = ("fp32", "bf16", "fp16")
VECTOR_BITS = 128  # the widest load
MOST_COLUMNS = 8  # taps of a filter row that a thread holds at once; longer rows are cut
NUM_WARPS = 4
WIDTHS = (14, 8, 7, 4, 2, 1)  # 7 and 14 divide the images of many networks
MOST_PHASES = 64  # their tables are unrolled: with 640, compiling took 39 s
REGISTERS = 255  # of a thread
FEW_REGISTERS = 184  # by the count of `registers`, which is somewhat high: three programs then fit a multiprocessor (170 each)
MOST_STRIPS = 2**31 - 2**20  # kernels number them with 32 bits, and up to 6·148 splits of 512 strips overhang
FARTHEST = 1 << 30  # no target or source that a kernel considers lies as far from 0
FAR = tl.constexpr(-FARTHEST)  # a place outside every axis, and so are its neighbours


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    tile_g: int  # channels of a tile, a power of two
    strips: int  # strips of a tile, a power of two
    strip: int  # targets of a strip
    pieces: int = 1  # wgrad: pieces of the filter that share a tile, a power of two
    splits: int = 1  # wgrad: parts of the sum over targets
    num_warps: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line(Axis):
    """The innermost axis, with its targets cut into strips and its taps into pieces of COLUMNS.

    The targets of a strip are `spacing` apart (within their phase), so that dilated taps meet the same sources again: the target u and
    the tap s of a piece meet the source number  hop·u + s  of a row of sources that are `tap_stride` apart.
    """

    strip: int

    @property
    def taps(self) -> int:
        """The most taps of a phase."""
        return max(1, cdiv(self.R, self.step))

    @property
    def pieces(self) -> int:
        return cdiv(self.taps, MOST_COLUMNS)

    @property
    def COLUMNS(self) -> int:
        return cdiv(self.taps, self.pieces)

    @property
    def uneven(self) -> bool:
        """Whether the last piece of a phase is not full."""
        return self.pieces > 1 and self.R % (self.step * self.COLUMNS) != 0

    @property
    def levels(self) -> int:
        """The number of binary digits of a column's number."""
        return (self.COLUMNS - 1).bit_length()

    @property
    def tap_stride(self) -> int:
        """The axis's own; for a single tap the target's stride, which leaves no gaps in the row."""
        return super().tap_stride if self.taps > 1 else self.target_stride

    @property
    def spacing(self) -> int:
        return abs(self.tap_stride) // math.gcd(self.target_stride, self.tap_stride)

    @property
    def hop(self) -> int:
        return self.target_stride * self.spacing // self.tap_stride

    @property
    def lowest(self) -> int:
        """The smallest hop·u + s."""
        return min(0, self.hop * (self.strip - 1))

    @property
    def sources(self) -> int:
        """The number of sources of a row."""
        return abs(self.hop) * (self.strip - 1) + self.COLUMNS

    @property
    def reach(self) -> int:
        """The largest distance between source number 0 and a source of its row."""
        return self.sources * abs(self.tap_stride)

    @property
    def strips(self) -> int:
        """The number of strips of a line of targets of one phase."""
        return self.spacing * cdiv(self.targets, self.strip * self.spacing)


def axes(problem: Problem, config: Config) -> tuple[Axis, Axis, Line]:
    d, h, w = problem.axes
    return d, h, Line(**dataclasses.asdict(w), strip=config.strip)


def classes(axis: Axis) -> int:
    """The number of residues of taps; a phase meets one of them, or none."""
    return min(axis.step, axis.R)


def supports(problem: Problem) -> str | None:
    """None, or the reason for refusing."""
    if problem.C != 1:
        return f"{problem.C} input channels per group, it takes 1"
    if unknown := [dtype for dtype in problem.dtypes if dtype not in DTYPES]:
        return f"dtype {unknown[0]}, it takes {', '.join(DTYPES)}"
    if reason := _fused.refused(problem.epilogue, problem.role, "fprop", problem.dtypes[2]):
        return reason
    if (period := max(axis.period for axis in problem.axes)) > MOST_PHASES:
        return f"{period} phases along an axis, it takes {MOST_PHASES} at most"
    if (farthest := _farthest(problem)) >= FARTHEST:
        return f"places up to {farthest} along an axis, it takes those below {FARTHEST}"
    narrowest = Config(tile_g=1, strips=1, strip=1, num_warps=NUM_WARPS)  # the others have fewer strips
    if (count := strips(problem, narrowest)) >= MOST_STRIPS:
        return f"{count} strips, it takes fewer than {MOST_STRIPS}"
    if problem.arch not in SHARED_MEMORY:
        return f"compute capability {problem.arch / 10}, it takes {', '.join(str(arch / 10) for arch in SHARED_MEMORY)}"
    return None


def _farthest(problem: Problem) -> int:
    """The largest distance from 0 of a target or (before the division by d) a source, including those of overhanging strips and pieces.

    A strip is no wider than REGISTERS, since each of its targets takes one.
    """
    lines = [Line(**dataclasses.asdict(axis), strip=1) for axis in problem.axes]
    return max(line.largest(line.T + line.period * line.spacing * REGISTERS, line.R + line.step * MOST_COLUMNS) for line in lines)


def candidates(problem: Problem) -> list[Config]:
    """Configs for several widths of a strip; the width determines the rest.

    A thread has one strip and 16 bytes of channels (of the widest dtype).  The block of channels is the largest power of two, up to eight
    such vectors, that leaves at most an eighth of the lanes idle.  A wgrad tile has as many pieces of the filter as leave at most a quarter
    of the lanes idle, since they read the same y.  The sum of wgrad is split until there are 6 programs per multiprocessor, each with at
    least 4 tiles: more would only write more partial results.  The width with the fewest clocks is first, among equals the widest.
    """
    vector = VECTOR_BITS // max(BITS[dtype] for dtype in problem.dtypes)
    channels = max(1, _target_channels(problem))
    block = largest_block([min(vector << i, triton.next_power_of_2(channels)) for i in range(4)], channels, idle=1 / 8)
    rows = max(1, 32 * NUM_WARPS * vector // block)
    configs = [Config(tile_g=block, strips=rows, strip=width, num_warps=NUM_WARPS) for width in WIDTHS]
    if problem.role == "wgrad":
        configs = [_with_splits(problem, config) for config in configs]
    few = (config for config in configs if registers(problem, config) <= FEW_REGISTERS)
    return sorted(few, key=lambda config: (clocks(problem, config), -config.strip))


def _with_splits(problem: Problem, config: Config) -> Config:
    """The config with the tile's rows divided between strips and lanes, and the sum between programs."""
    rows = config.strips
    lanes = largest_block([1 << i for i in range(rows.bit_length())], filter_pieces(problem, config), idle=1 / 4)
    config = dataclasses.replace(config, pieces=lanes, strips=rows // lanes)
    wanted = 6 * machine(problem.arch, problem.device).multiprocessors // max(1, grid(problem, config)[0])
    return dataclasses.replace(config, splits=max(1, min(wanted, strips(problem, config) // (4 * config.strips))))


def pick(problem: Problem) -> Config:
    return candidates(problem)[0]


def clocks(problem: Problem, config: Config) -> float:
    """The time to load a multiprocessor's vectors from the L2 cache.

    For each tile a thread moves its targets, `strip` vectors, and for each row of the filter a row of sources and a share of the taps.
    Programs run in waves, so a few wide ones may be slower than more narrow ones.
    """
    line = axes(problem, config)[2]
    if problem.role == "wgrad":
        of_program = cdiv(strips(problem, config), config.strips * config.splits) * (config.strip + line.sources)
    else:
        rows = problem.filter[0] * problem.filter[1] * line.pieces
        of_program = config.strip + rows * (line.sources + line.COLUMNS / 2)
    gpu, vectors = machine(problem.arch, problem.device), 32 * config.num_warps * VECTOR_BITS // 8
    return gpu.rounds(grid(problem, config)[0]) * of_program * vectors / gpu.l2


def registers(problem: Problem, config: Config) -> int:
    """The approximate number of registers of a thread: sums and taps in float32, sources and targets in their own dtype, addresses."""
    line = axes(problem, config)[2]
    vector = cdiv(config.strips * config.pieces * config.tile_g, 32 * config.num_warps)
    loaded = vector * max(BITS[dtype] for dtype in problem.dtypes) // 32
    if problem.role == "wgrad":
        return vector * line.COLUMNS + loaded * (line.sources + config.strip) + 16
    return vector * (config.strip + line.COLUMNS) + loaded * line.sources + 16


def strips(problem: Problem, config: Config) -> int:
    """The number of strips of one phase."""
    d, h, w = axes(problem, config)
    return problem.N * d.targets * h.targets * w.strips


def _target_channels(problem: Problem) -> int:
    """The number of channels of the result; x has the same channels, or is a sum over K of them."""
    return problem.G if problem.role == "dgrad" else problem.G * problem.K


def filter_pieces(problem: Problem, config: Config) -> int:
    d, h, w = axes(problem, config)
    return d.R * h.R * classes(w) * w.pieces


def grid(problem: Problem, config: Config) -> tuple[int]:
    d, h, w = problem.axes
    if problem.role == "wgrad":
        blocks = cdiv(_target_channels(problem), config.tile_g) * cdiv(filter_pieces(problem, config), config.pieces)
        return (blocks * config.splits * problem.B,)
    blocks = cdiv(_target_channels(problem), config.tile_g) * cdiv(strips(problem, config), config.strips)
    return (blocks * d.period * h.period * w.period * problem.B,)


def launch(problem: Problem, config: Config) -> Launch:
    if reason := supports(problem):
        raise ValueError(f"{problem.name}: {reason}")
    for field in ("tile_g", "strips", "pieces"):
        if (size := getattr(config, field)) < 1 or size & (size - 1):
            raise ValueError(f"{problem.name}: {field} is {size}, want a power of two")
    for field in ("strip", "splits"):
        if (size := getattr(config, field)) < 1:
            raise ValueError(f"{problem.name}: {field} is {size}, want at least 1")
    if problem.role != "wgrad" and (config.pieces, config.splits) != (1, 1):
        raise ValueError(f"{problem.name}: pieces={config.pieces} and splits={config.splits}, want 1 for {problem.role}")
    if (needed := registers(problem, config)) > REGISTERS:
        raise ValueError(f"{problem.name}: {config} needs {needed} registers per thread, there are {REGISTERS}")
    if (programs := grid(problem, config)[0]) > MOST_PROGRAMS:
        raise ValueError(f"{problem.name}: {config} has {programs} programs, a grid has at most {MOST_PROGRAMS}")
    if (count := strips(problem, config) + config.splits * config.strips) > 2**31:
        raise ValueError(f"{problem.name}: {config} numbers {count} strips, the limit is 2^31")
    kernel, operands = {
        "fprop": (depthwise_fprop, ("x", "w")),
        "dgrad": (depthwise_dgrad, ("y", "w")),
        "wgrad": (depthwise_wgrad, ("x", "y")),
    }[problem.role]
    d, h, w = axes(problem, config)
    plain = Launch(
        name=problem.name,
        kernel=kernel,
        operands=operands,
        grid=grid(problem, config),
        constants={"PROBLEM": problem, "CONFIG": config, "D": d, "H": h, "W": w},
        num_warps=config.num_warps,
        num_stages=1,  # without a dot there is no pipeline: more programs per multiprocessor hide the latency
        splits=config.splits,
    )
    return _fused.launch(plain, depthwise_fused, problem.epilogue) if problem.epilogue else plain


@triton.jit(repr=kernel_name)
def depthwise_fprop(x_ptr, w_ptr, y_ptr, PROBLEM: tl.constexpr, CONFIG: tl.constexpr, D: tl.constexpr, H: tl.constexpr, W: tl.constexpr):
    _gather(x_ptr, w_ptr, None, None, y_ptr, None, PROBLEM.G * PROBLEM.K, PROBLEM.G, PROBLEM.K, 1, PROBLEM, CONFIG, D, H, W)


@triton.jit(repr=kernel_name)
def depthwise_fused(
    x_ptr, w_ptr, bias_ptr, residual_ptr, y_ptr, saved_ptr, PROBLEM: tl.constexpr, CONFIG: tl.constexpr,
    D: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """fprop with an epilogue."""
    CHANNELS: tl.constexpr = PROBLEM.G * PROBLEM.K
    _gather(x_ptr, w_ptr, bias_ptr, residual_ptr, y_ptr, saved_ptr, CHANNELS, PROBLEM.G, PROBLEM.K, 1, PROBLEM, CONFIG, D, H, W)


@triton.jit(repr=kernel_name)
def depthwise_dgrad(y_ptr, w_ptr, x_ptr, PROBLEM: tl.constexpr, CONFIG: tl.constexpr, D: tl.constexpr, H: tl.constexpr, W: tl.constexpr):
    _gather(y_ptr, w_ptr, None, None, x_ptr, None, PROBLEM.G, PROBLEM.G * PROBLEM.K, 1, PROBLEM.K, PROBLEM, CONFIG, D, H, W)


@triton.jit
def _gather(
    source_ptr,
    w_ptr,
    bias_ptr,
    residual_ptr,
    target_ptr,
    saved_ptr,
    TARGET_C: tl.constexpr,
    SOURCE_C: tl.constexpr,
    SHARING: tl.constexpr,  # neighbouring channels of the target that read the same channel of the source
    SUMMED: tl.constexpr,  # channels of the source that go into one of the target
    PROBLEM: tl.constexpr,
    CONFIG: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
):
    """One tile of targets of one phase."""
    BLOCKS: tl.constexpr = (TARGET_C + CONFIG.tile_g - 1) // CONFIG.tile_g
    LINES: tl.constexpr = PROBLEM.N * D.targets * H.targets
    TILES: tl.constexpr = (LINES * W.strips + CONFIG.strips - 1) // CONFIG.strips
    IMAGES: tl.constexpr = PROBLEM.B * PROBLEM.N
    pid = tl.program_id(0)
    c = pid % BLOCKS * CONFIG.tile_g + tl.arange(0, CONFIG.tile_g)
    real = (c < TARGET_C) | (TARGET_C % CONFIG.tile_g == 0)
    phase = pid // (BLOCKS * TILES)
    fw, fh, fd = phase % W.period, phase // W.period % H.period, phase // (W.period * H.period) % D.period
    b = phase // (W.period * H.period * D.period)
    n, jd, jh, jw = _strip(pid // BLOCKS % TILES * CONFIG.strips + tl.arange(0, CONFIG.strips), D, H, W)
    td, th, tw = fd + D.period * jd, fh + H.period * jh, fw + W.period * jw
    image = _wide(b, IMAGES) * PROBLEM.N + n
    valid = (n < PROBLEM.N) & (td < D.T) & (th < H.T)
    tw = tl.where(valid, tw, W.T)
    sd = _origin(D, fd) + D.target_stride * jd
    sh = tl.where(valid, _origin(H, fh) + H.target_stride * jh, FAR)
    sw = _origin(W, fw) + W.target_stride * jw
    first_d, first_h, first_w = _first(D, fd), _first(H, fh), _first(W, fw)

    filter = _wide(b, PROBLEM.B * PROBLEM.G * PROBLEM.K * D.R * H.R * W.R) * TARGET_C + c

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
                    sums = _correlate(sums, sources, taps, W)

    place = _offset(image, td, th, tw, c, D.T, H.T, W.T, TARGET_C, IMAGES, 0)
    if PROBLEM.epilogue is None:
        at = target_ptr + place
        for u in tl.static_range(WIDTH):
            step = W.period * W.spacing * u
            tl.store(at + step * TARGET_C, sums[u].to(target_ptr.dtype.element_ty), mask=(tw + step < W.T)[:, None] & real[None, :])
    else:
        bias = _fused.load_bias(bias_ptr, (_wide(b, PROBLEM.B * TARGET_C) * TARGET_C + c)[None, :], real[None, :], PROBLEM)
        for u in tl.static_range(WIDTH):
            step = W.period * W.spacing * u
            mask = (tw + step < W.T)[:, None] & real[None, :]
            at = place + step * TARGET_C
            residual = tl.load(residual_ptr + at, mask=mask, other=0) if PROBLEM.epilogue.residual is not None else 0
            _fused.store(sums[u], bias, residual, target_ptr, saved_ptr, at, mask, PROBLEM)


@triton.jit(repr=kernel_name)
def depthwise_wgrad(x_ptr, y_ptr, w_ptr, PROBLEM: tl.constexpr, CONFIG: tl.constexpr, D: tl.constexpr, H: tl.constexpr, W: tl.constexpr):
    """One tile of filter elements (pieces of rows times channels), and one part of the sum.

    A row of the tile is a strip and a piece: it meets the targets of the only phase that meets the piece's taps.
    """
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
    real = (c < CHANNELS) | (CHANNELS % CONFIG.tile_g == 0)
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
        image = _wide(b, IMAGES) * PROBLEM.N + n
        at = y_ptr + _offset(image, td, th, tw, c, D.T, H.T, W.T, CHANNELS, IMAGES, 0)
        ys = _target_row(at, tw, real, CHANNELS, W)
        sd = _origin(D, fd) + D.target_stride * jd + D.tap_stride * (t // D.step)
        sh = tl.where(valid, _origin(H, fh) + H.target_stride * jh + H.tap_stride * (r // H.step), FAR)
        sw = _origin(W, fw) + W.target_stride * jw + W.tap_stride * W.COLUMNS * piece
        at = x_ptr + _offset(image, sd, sh, sw, c // PROBLEM.K, D.S, H.S, W.S, PROBLEM.G, IMAGES, W.reach)
        xs = _source_row(at, _column(sd, sh, sw, D, H), real, PROBLEM.G, W)
        sums = _outer(sums, xs, ys, W)

    t, r, first_w, piece = _piece(pid // BLOCKS % PIECES * CONFIG.pieces + tl.arange(0, CONFIG.pieces), H, CLASSES, W)
    filter = _wide(split * PROBLEM.B + b, CONFIG.splits * PROBLEM.B * CHANNELS * D.R * H.R * W.R) * CHANNELS + c
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
def _wide(index, LIMIT: tl.constexpr):
    """A factor of numbers below LIMIT, in 64 bits if they need them."""
    return index.to(tl.int64) if LIMIT >= 2**31 else index


@triton.jit
def _offset(
    image, d, h, w, c, D: tl.constexpr, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, IMAGES: tl.constexpr, REACH: tl.constexpr
):  # fmt: skip
    """The offset, in places times channels, in an array [IMAGES, D, H, W, C]; w may be up to REACH places outside."""
    image = _wide(image, (IMAGES * D * H * W + REACH) * C)
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
def _correlate(sums, sources, taps, W: tl.constexpr):
    """sums[u] + Σ_s sources[hop·u + s] taps[s]"""
    new = ()
    for u in tl.static_range(len(sums)):
        total = sums[u]
        for s in tl.static_range(len(taps)):
            total = tl.fma(sources[W.hop * u + s - W.lowest], taps[s], total)
        new = new + (total,)
    return new


@triton.jit
def _outer(sums, sources, targets, W: tl.constexpr):
    """sums[s] + Σ_u sources[hop·u + s] targets[u]"""
    new = ()
    for s in tl.static_range(len(sums)):
        total = sums[s]
        for u in tl.static_range(len(targets)):
            total = tl.fma(sources[W.hop * u + s - W.lowest], targets[u], total)
        new = new + (total,)
    return new
