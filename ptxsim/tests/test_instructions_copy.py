"""mbarrier, and copies by tensor maps: tiles of every rank and swizzle, im2col, several blocks at once, and back to global memory."""

import itertools
import math

import ml_dtypes
import numpy as np
import pytest
from ptxsim import LATE, Input, Output, map_bytes, tensor_map
from snippets import both, launch

RNG = np.random.default_rng(0)
BF16 = np.dtype(ml_dtypes.bfloat16)
FROM, TO = 17 << 40, 18 << 40  # addresses
MAP = "mov.b64 %d1, p0; cvta.param.u64 %d1, %d1;"
INIT = """setp.eq.u32 %p1, %r100, 0; @%p1 mbarrier.init.shared::cta.b64 [%r101], 1; fence.mbarrier_init.release.cluster;
          bar.sync 0; add.u32 %r102, %r101, 1024;"""
WAIT = "wait: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r101], 0; @!%p2 bra wait;"
COPY = "cp.async.bulk.tensor.{0}d.shared::cluster.global{1}.mbarrier::complete_tx::bytes"


def values_of(shape, dtype):
    return RNG.integers(0, 1 << 8 * dtype.itemsize, shape, dtype=f"u{dtype.itemsize}").view(dtype)


def map_of(array, box, swizzle=0, **more):
    """Return the tensor map of an array; its axes are outermost first, as are the box's sizes."""
    values = array.values
    return tensor_map(array.address, values.strides[-2::-1], values.shape[::-1], box[::-1], values.itemsize, swizzle, **more)


def tile(values, corner, box, steps=None, fill=0):
    """Return what a box takes, outermost axis first; elements out of bounds are the fill."""
    steps = steps or [1] * len(box)
    made = np.full([-(-size // step) for size, step in zip(box, steps, strict=True)], fill, f"u{values.itemsize}")
    for index in np.ndindex(*made.shape):
        at = [c + i * step for c, i, step in zip(corner, index, steps, strict=True)]
        if all(0 <= i < size for i, size in zip(at, values.shape, strict=True)):
            made[index] = values.view(made.dtype)[tuple(at)]
    return made


def swizzled(bytes, swizzle):
    """Rows of `swizzle` bytes, whose chunks of 16 change places by the row."""
    if not swizzle:
        return bytes.ravel()
    rows = bytes.reshape(-1, swizzle // 16, 16)
    turn = np.arange(len(rows)) % 8 // (128 // swizzle)
    return np.stack([row[np.arange(swizzle // 16) ^ t] for row, t in zip(rows, turn, strict=True)]).ravel()


def copy_out(count, offset=0):
    """Words from %r102 on to %d21, by 32 threads."""
    return f"""mov.u32 %r1, %r100; out: setp.ge.u32 %p3, %r1, {count}; @%p3 bra done; mad.lo.u32 %r2, %r1, 4, %r102;
                   ld.shared.b32 %r3, [%r2+{offset}]; mul.wide.u32 %d2, %r1, 4;
               add.u64 %d2, %d2, %d21; st.global.b32 [%d2], %r3; add.u32 %r1, %r1, 32; bra out; done:"""


def loaded(values, corner, box, swizzle=0, late=LATE, hint=False, nan=False, tiled="", **more):
    """The bytes in shared memory that a load of a box leaves there."""
    source = Input(values, FROM)
    described = map_of(source, box, swizzle, **more)
    described.nan_fill = nan
    count = len(tile(values, corner, box, more.get("steps") and more["steps"][::-1]).tobytes())
    result = Output(np.zeros(-(-count // 4), np.uint32))
    suffix, policy = (".L2::cache_hint", ", %d9") if hint else ("", "")
    coordinates = ", ".join(map(str, corner[::-1]))
    body = f"""{MAP} ld.param.b64 %d21, [p1]; {INIT} mov.u64 %d9, 0x12F0000000000000; prefetch.tensormap [%d1];
               @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r101], {count};
               @%p1 {COPY.format(values.ndim, tiled)}{suffix} [%r102], [%d1, {{{coordinates}}}], [%r101]{policy};
               {WAIT} {copy_out(len(result.values))}"""
    launch(body, [map_bytes(0), result], maps=[described], shared=4096 + count, late=late, arrays=[source])
    return result.values.view(np.uint8)[:count]


SHAPES = {1: (50,), 2: (9, 40), 3: (3, 5, 40), 4: (2, 3, 4, 40), 5: (2, 2, 3, 3, 40)}
BOXES = {1: (16,), 2: (12, 16), 3: (2, 3, 16), 4: (2, 2, 3, 16), 5: (1, 2, 2, 3, 16)}


@both
@pytest.mark.parametrize("hint", [False, True], ids=["", "hint"])
@pytest.mark.parametrize("rank", SHAPES)
def test_a_tile_of_each_rank(rank, hint, late):
    """Tiles lie within the array, and beyond each of its edges, where zeros are."""
    values = values_of(SHAPES[rank], BF16)
    corners = [
        [0] * rank,
        [1] * (rank - 1) + [8],
        [-1] * (rank - 1) + [-8],
        [size - 1 for size in values.shape],
        [size for size in values.shape],
    ]
    corners += [[-100] + [0] * (rank - 1), [0] * (rank - 1) + [2**31 - 16]]
    for corner in corners:
        want = tile(values, corner, BOXES[rank])
        found = loaded(values, corner, BOXES[rank], late=late, hint=hint, tiled="" if hint else ".tile" if corner[0] else "")
        np.testing.assert_array_equal(found, want.view(np.uint8).ravel())


@pytest.mark.parametrize("dtype", [np.dtype(np.uint8), BF16, np.dtype(np.float32)], ids=["8", "16", "32"])
@pytest.mark.parametrize("swizzle", [32, 64, 128])
def test_each_swizzle(swizzle, dtype):
    for rank, lines in ((2, (20,)), (3, (3, 7)), (1, ())):
        box = (*lines, swizzle // dtype.itemsize)
        values = values_of((*(n + 1 for n in lines), 3 * box[-1]), dtype)
        corner = [-1] * (rank - 1) + [16 // dtype.itemsize]
        want = tile(values, corner, box).view(np.uint8)
        np.testing.assert_array_equal(loaded(values, corner, box, swizzle), swizzled(want, swizzle))


@pytest.mark.parametrize("tiled", ["", ".tile"])
def test_a_box_with_steps(tiled):
    """The sizes are no multiples of the steps: each step takes one element."""
    values = values_of((7, 9, 8), np.dtype(np.float32))
    want = tile(values, (1, -2, 0), (4, 7, 8), (2, 3, 1))
    assert want.shape == (2, 3, 8)
    np.testing.assert_array_equal(loaded(values, (1, -2, 0), (4, 7, 8), steps=[1, 3, 2], tiled=tiled), want.view(np.uint8).ravel())


def test_out_of_bounds_may_be_nan():
    values = RNG.standard_normal((4, 8)).astype(np.float32)
    want = tile(values, (2, 4), (4, 8), fill=2**32 - 1)
    found = loaded(values, (2, 4), (4, 8), nan=True)
    np.testing.assert_array_equal(found, want.view(np.uint8).ravel())
    assert np.isnan(found.view(np.float32)).sum() == 24


def pixels(sizes, lower, upper, steps):
    """Base pixels of im2col in order, (image, ..., width): all within the corners."""
    ranges = [range(low, size + up, step) for size, low, up, step in zip(sizes[1:], lower, upper, steps, strict=True)]
    return list(itertools.product(range(sizes[0] + 5), *ranges))


@both
@pytest.mark.parametrize("swizzle", [0, 32, 128])
@pytest.mark.parametrize("rank", [3, 4, 5])
def test_im2col(rank, swizzle, late):
    """The filter's offset is added to each base pixel; what is then out of bounds is zero.  Sizes and corners are outermost first."""
    spatial = rank - 2
    channels = swizzle // 2 or 8
    values = values_of((2, *(5, 4, 6)[:spatial], channels + 8), BF16)
    lower, upper, steps = (-1, 0, -2)[:spatial], (0, -1, 1)[:spatial], (1, 2, 2)[:spatial]
    for first, offset, channel in ((0, (0, 0, 0), 0), (7, (1, 2, 1), 8), (3 if spatial == 1 else 40, (2, 0, 3), -8)):
        offset = offset[:spatial]
        base = pixels(values.shape[:-1], lower, upper, steps)[first:][:24]
        want = np.stack(
            [
                tile(values, (n, *(b + o for b, o in zip(at, offset, strict=True)), channel), (1,) * (rank - 1) + (channels,)).ravel()
                for n, *at in base
            ]
        )
        source, result = Input(values, FROM), Output(np.zeros(want.nbytes // 4, np.uint32))
        described = map_of(source, (24, channels), swizzle, steps=[1, *steps[::-1], 1], corners=(lower[::-1], upper[::-1]))
        n, *at = base[0]
        body = f"""{MAP} ld.param.b64 %d21, [p1]; {INIT} {"".join(f"mov.b16 %h{a}, {o};" for a, o in enumerate(offset[::-1]))}
                   @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r101], {want.nbytes};
                   @%p1 {COPY.format(rank, ".im2col")} [%r102], [%d1, {{{", ".join(map(str, [channel, *at[::-1], n]))}}}], [%r101],
                   {{{", ".join(f"%h{a}" for a in range(spatial))}}}; {WAIT} {copy_out(len(result.values))}"""
        launch(body, [map_bytes(0), result], maps=[described], shared=8192, late=late, arrays=[source])
        np.testing.assert_array_equal(result.values.view(np.uint8), swizzled(want.view(np.uint8), swizzle))


@both
@pytest.mark.parametrize("hint", [False, True], ids=["", "hint"])
@pytest.mark.parametrize("rank", [2, 3, 4, 5])
def test_multicast(rank, hint, late):
    """The first two of four blocks give tiles to some of them; each waits at its own mbarrier for what it gets."""
    values = values_of((2,) * (rank - 1) + (8,), np.dtype(np.float32))
    source, result = Input(values, FROM), Output(np.zeros((4, 16), np.uint32))
    described = map_of(source, (1,) * (rank - 1) + (8,))
    masks = [0b1101, 0b0110]
    rest = ", %d9" if hint else ""
    suffix = ".multicast::cluster" + ".L2::cache_hint" * hint
    body = f"""{MAP} ld.param.b64 %d21, [p1]; {INIT} barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;
               mov.u32 %r4, %cluster_ctarank; mov.u32 %r6, {sum((mask >> n & 1) << 8 * n for n in range(4) for mask in masks)};
               mov.u64 %d9, 0;
               shl.b32 %r7, %r4, 3; shr.u32 %r6, %r6, %r7; and.b32 %r6, %r6, 255; shl.b32 %r6, %r6, 5;
               @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r101], %r6;
               mov.u16 %h1, {masks[0]}; setp.eq.u32 %p4, %r4, 1; @%p4 mov.u16 %h1, {masks[1]}; mov.u32 %r5, %r102;
               @%p4 add.u32 %r5, %r102, 128;
               setp.le.and.u32 %p5, %r4, 1, %p1;
               @%p5 {COPY.format(rank, "")}{suffix} [%r5], [%d1, {{0, {", ".join(["%r4"] * (rank - 1))}}}], [%r101], %h1{rest};
               {WAIT} mul.wide.u32 %d3, %r4, 64; add.u64 %d21, %d21, %d3; mov.u16 %h2, {masks[0]}; mov.u16 %h3, {masks[1]};
               cvt.u32.u16 %r10, %h2; cvt.u32.u16 %r11, %h3; shr.u32 %r10, %r10, %r4; shr.u32 %r11, %r11, %r4; and.b32 %r10, %r10, 1;
               and.b32 %r11, %r11, 1; setp.lt.u32 %p6, %r100, 8; setp.eq.and.u32 %p7, %r10, 1, %p6; setp.eq.and.u32 %p8, %r11, 1, %p6;
               mul.wide.u32 %d4, %r100, 4; add.u64 %d4, %d4, %d21; mad.lo.u32 %r12, %r100, 4, %r102; mov.u32 %r13, 77; mov.u32 %r14, 77;
               @%p7 ld.shared.b32 %r13, [%r12]; @%p8 ld.shared.b32 %r14, [%r12+128]; @%p6 st.global.b32 [%d4], %r13;
               @%p6 st.global.b32 [%d4+32], %r14;
               barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"""
    launch(body, [map_bytes(0), result], (4,), maps=[described], shared=2048, cluster=(4,), late=late, arrays=[source])
    words = values.view(np.uint32)
    tiles = [words[(0,) * (rank - 1)], words[(1,) * (rank - 1)]]
    want = [np.concatenate([tiles[n] if masks[n] >> block & 1 else np.full(8, 77) for n in (0, 1)]) for block in range(4)]
    np.testing.assert_array_equal(result.values, want)


@both
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("rank", SHAPES)
def test_stores(rank, swizzle, late):
    """Elements out of bounds are not written, and all others once."""
    width = swizzle // 2 or 16
    box = (*BOXES[rank][:-1], width)
    for where, tiled in ((0, ""), (-1, ".tile"), (1, "")):
        values = np.zeros((*SHAPES[rank][:-1], 40), BF16)
        result = Output(values, TO)
        corner = [where * (size > 1) for size in box[:-1]] + [8 * where]
        words = values_of(math.prod(box), np.dtype(np.uint16))
        image = Input(swizzled(words.view(np.uint8), swizzle).view(np.uint32))
        body = f"""{MAP} ld.param.b64 %d20, [p1]; add.u32 %r102, %r101, 1024; mov.u32 %r1, %r100;
                   in: setp.ge.u32 %p3, %r1, {len(image.values)}; @%p3 bra done; mul.wide.u32 %d2, %r1, 4; add.u64 %d2, %d2, %d20;
                   ld.global.b32 %r3, [%d2]; mad.lo.u32 %r2, %r1, 4, %r102;
                   st.shared.b32 [%r2], %r3; add.u32 %r1, %r1, 32; bra in;
                   done: fence.proxy.async.shared::cta; bar.sync 0; setp.eq.u32 %p1, %r100, 0;
                   @%p1 cp.async.bulk.tensor.{rank}d.global.shared::cta{tiled}.bulk_group
                   [%d1, {{{", ".join(map(str, corner[::-1]))}}}], [%r102];
                   @%p1 cp.async.bulk.commit_group; @%p1 cp.async.bulk.wait_group{".read" * (where > 0)} 0;"""
        launch(body, [map_bytes(0), image], maps=[map_of(result, box, swizzle)], shared=1024 + words.nbytes, late=late, arrays=[result])
        want, written = np.zeros(values.shape, np.uint16), np.zeros(values.shape, int)
        for index, word in zip(np.ndindex(*box), words, strict=True):
            at = tuple(c + i for c, i in zip(corner, index, strict=True))
            if all(0 <= i < size for i, size in zip(at, values.shape, strict=True)):
                want[at], written[at] = word, 1
        np.testing.assert_array_equal(values.view(np.uint16), want)
        assert (result.written.reshape(-1, 2) == written.reshape(-1, 1)).all() and written.any()


@both
def test_stores_in_groups(late):
    """The first one's source is written anew when only the second may still be read."""
    result = Output(np.zeros((3, 32), np.uint32), TO)
    fence = "fence.proxy.async.shared::cta; bar.warp.sync 0xffffffff;"
    store = "@%p1 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%d1, {0, %r3}], [%r4];"
    body = f"""{MAP} mad.lo.u32 %r2, %r100, 4, %r101; setp.eq.u32 %p1, %r100, 0; mov.u32 %r3, 0; mov.u32 %r4, %r101; st.shared.b32 [%r2], 1;
               st.shared.b32 [%r2+128], 2; {fence} {store} @%p1 cp.async.bulk.commit_group; mov.u32 %r3, 1; add.u32 %r4, %r101, 128; {store}
               @%p1 cp.async.bulk.commit_group; @%p1 cp.async.bulk.wait_group.read 1; bar.warp.sync 0xffffffff; st.shared.b32 [%r2], 3;
               {fence}
               mov.u32 %r3, 2; mov.u32 %r4, %r101; {store} @%p1 cp.async.bulk.commit_group; @%p1 cp.async.bulk.wait_group.read 0;"""
    launch(body, [map_bytes(0)], maps=[map_of(result, (1, 32))], shared=256, late=late, arrays=[result])
    assert (result.values == [[1], [2], [3]]).all()


# ---- mbarrier


def test_phases_end_when_all_have_arrived():
    """Threads write, arrive and read what another wrote, for five phases; the wait is for each one's parity."""
    result = Output(np.zeros(64, np.uint32))
    body = """setp.eq.u32 %p1, %r100, 0; @%p1 mbarrier.init.shared::cta.b64 [%r101], 64; bar.sync 0; mad.lo.u32 %r2, %r100, 4, %r101;
              mov.u32 %r9, 64; xor.b32 %r3, %r100, 37; mad.lo.u32 %r3, %r3, 4, %r101; mov.u32 %r1, %r100; mov.u32 %r5, 0; mov.u32 %r6, 0;
              again: st.shared.b32 [%r2+64], %r1; mbarrier.arrive.shared::cta.b64 _, [%r101];
              wait: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r101], %r6; @!%p2 bra wait; ld.shared.b32 %r1, [%r3+64];
              add.u32 %r1, %r1, 1; xor.b32 %r6, %r6, 1; mbarrier.arrive.shared.b64 %d5, [%r101];
              wait2: mbarrier.test_wait.parity.shared::cta.b64 %p2, [%r101], %r6; @%p2 bra go; nanosleep.u32 9;
              mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r101], %r6, %r9; @!%p2 bra wait2; go: xor.b32 %r6, %r6, 1;
              add.u32 %r5, %r5, 1; setp.lt.u32 %p4, %r5, 5; @%p4 bra again;
              mul.wide.u32 %d10, %r100, 4; add.u64 %d10, %d10, %d20; st.global.b32 [%d10], %r1;"""
    launch(body, [result], block=(64,), shared=512)
    want = np.arange(64)
    for _ in range(5):
        want = want[np.arange(64) ^ 37] + 1
    assert result.values.tolist() == want.tolist()


def test_arrivals_are_counted_and_a_phase_is_known_by_its_parity():
    result = Output(np.zeros(5, np.uint32))
    look = "mbarrier.test_wait.parity.shared::cta.b64 %p1, [%r101], {1}; selp.u32 %r1, 1, 0, %p1; st.global.b32 [%d20+{0}], %r1;"
    body = f"""mbarrier.init.shared.b64 [%r101], 4; {look.format(0, 0)} {look.format(4, 1)} mov.u32 %r5, 3;
               mbarrier.arrive.shared::cta.b64 _, [%r101], %r5; {look.format(8, 0)} mbarrier.arrive.release.cta.shared::cta.b64 _, [%r101];
               {look.format(12, 0)} {look.format(16, 1)}"""
    launch(body, [result], block=(1,), shared=16)
    assert result.values.tolist() == [0, 1, 0, 1, 0]


@both
@pytest.mark.parametrize("order", ["before", "behind", "apart", "apart, without a scope"])
def test_bytes_are_expected_before_or_behind_the_copies(order, late):
    source, result = Input(values_of((2, 8), np.dtype(np.uint32)), FROM), Output(np.zeros(16, np.uint32))
    copies = "".join(f"@%p1 {COPY.format(2, '')} [%r102+{128 * n}], [%d1, {{0, {n}}}], [%r101];" for n in range(2))
    arrive = "@%p1 mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%r101], 64;"
    apart = "@%p1 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r101], {};"
    ways = {
        "before": arrive + copies,
        "behind": copies + arrive,
        "apart": apart.format(48) + copies + "@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r101], 16;",
        "apart, without a scope": "@%p1 mbarrier.expect_tx.shared::cta.b64 [%r101], 48;"
        + copies
        + "@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r101], 16;",
    }
    body = f"{MAP} ld.param.b64 %d21, [p1]; {INIT} {ways[order]} {WAIT} shr.u32 %r4, %r100, 3; mad.lo.u32 %r102, %r4, 96, %r102;"
    body += copy_out(16)
    launch(body, [map_bytes(0), result], maps=[map_of(source, (1, 8))], shared=2048, late=late, arrays=[source])
    assert result.values.tolist() == source.values.ravel().tolist()


@pytest.mark.parametrize(
    "mapped",
    [
        "mapa.shared::cluster.u32 %r4, %r101, %r3; mbarrier.arrive.shared::cluster.b64 _, [%r4];",
        "mapa.shared::cluster.u32 %r4, %r101, %r3; mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r4], 1;",
    ],
)
def test_threads_arrive_at_another_blocks_mbarrier(mapped):
    """Each block writes into the next one's memory, arrives there, and waits for the one before."""
    result = Output(np.zeros(4, np.uint32))
    body = f"""mov.u32 %r1, %cluster_ctarank; add.u32 %r3, %r1, 1; and.b32 %r3, %r3, 3; setp.eq.u32 %p1, %r100, 0;
               @%p1 mbarrier.init.shared::cta.b64 [%r101], 1; fence.mbarrier_init.release.cluster; barrier.cluster.arrive.relaxed.aligned;
               barrier.cluster.wait.aligned; @!%p1 bra over; add.u32 %r5, %r101, 64; mapa.shared::cluster.u32 %r6, %r5, %r3;
               mul.lo.u32 %r7, %r1, 11; st.shared::cluster.b32 [%r6], %r7; {mapped} {WAIT} ld.shared.b32 %r8, [%r5];
               mul.wide.u32 %d10, %r1, 4; add.u64 %d10, %d10, %d20; st.global.b32 [%d10], %r8; over:
               barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"""
    launch(body, [result], (4,), shared=128, cluster=(4,))
    assert result.values.tolist() == [33, 0, 11, 22]


@both
def test_a_ring_of_stages(late):
    """Warp 0 loads seven tiles into two stages; warps 1 and 2 add each one up and give its stage back."""
    source, result = Input(values_of((7, 32), np.dtype(np.uint32)) % 1000, FROM), Output(np.zeros((2, 32), np.uint32))
    body = f"""{MAP} ld.param.b64 %d21, [p1]; setp.eq.u32 %p1, %r100, 0; add.u32 %r102, %r101, 128;
               @%p1 mbarrier.init.shared::cta.b64 [%r101], 1; @%p1 mbarrier.init.shared::cta.b64 [%r101+8], 1;
               @%p1 mbarrier.init.shared::cta.b64 [%r101+16], 2; @%p1 mbarrier.init.shared::cta.b64 [%r101+24], 2; fence.proxy.async;
               bar.sync 0; mov.u32 %r5, 0; setp.ge.u32 %p4, %r100, 32; @%p4 bra consume; @!%p1 bra end;
               produce: and.b32 %r6, %r5, 1; shr.u32 %r7, %r5, 1; and.b32 %r7, %r7, 1; xor.b32 %r8, %r7, 1; mad.lo.u32 %r9, %r6, 8, %r101;
               empty: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r9+16], %r8; @!%p2 bra empty; mad.lo.u32 %r10, %r6, 128, %r102;
               mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r9], 128; {COPY.format(2, "")} [%r10], [%d1, {{0, %r5}}], [%r9];
               add.u32 %r5, %r5, 1; setp.lt.u32 %p3, %r5, 7; @%p3 bra produce; bra end;
               consume: and.b32 %r103, %r100, 31; mov.u32 %r20, 0;
               next: and.b32 %r6, %r5, 1; shr.u32 %r7, %r5, 1; and.b32 %r7, %r7, 1; mad.lo.u32 %r9, %r6, 8, %r101;
               full: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r9], %r7; @!%p2 bra full; mad.lo.u32 %r10, %r6, 128, %r102;
               mad.lo.u32 %r10, %r103, 4, %r10; ld.shared.b32 %r11, [%r10]; add.u32 %r20, %r20, %r11; bar.warp.sync -1;
               elect.sync _|%p5, 0xffffffff; @%p5 mbarrier.arrive.shared::cta.b64 _, [%r9+16];
               add.u32 %r5, %r5, 1; setp.lt.u32 %p3, %r5, 7; @%p3 bra next; sub.u32 %r12, %r100, 32; mul.wide.u32 %d10, %r12, 4;
               add.u64 %d10, %d10, %d21; st.global.b32 [%d10], %r20; end:"""
    launch(body, [map_bytes(0), result], block=(96,), maps=[map_of(source, (1, 32))], shared=384, late=late, arrays=[source])
    assert (result.values == source.values.sum(axis=0)).all()


@both
def test_a_copy_of_a_copy(late):
    """A store may take what a load brought without a fence: both are of the async proxy."""
    source, result = Input(values_of((4, 32), np.dtype(np.uint32)), FROM), Output(np.zeros((4, 32), np.uint32), TO)
    body = f"""{MAP} mov.b64 %d2, p1; cvta.param.u64 %d2, %d2; {INIT} @!%p1 bra end;
                   mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r101], 512;
               {COPY.format(2, "")} [%r102], [%d1, {{0, 0}}], [%r101]; {WAIT}
               cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%d2, {{0, 0}}], [%r102]; cp.async.bulk.commit_group;
               cp.async.bulk.wait_group 0; end:"""
    maps = [map_of(source, (4, 32), 0), map_of(result, (4, 32), 0)]
    launch(body, [map_bytes(0), map_bytes(1)], maps=maps, shared=2048, late=late, arrays=[source, result])
    np.testing.assert_array_equal(result.values, source.values)
