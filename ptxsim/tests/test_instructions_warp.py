"""Control flow, barriers of blocks and clusters, and what lanes of a warp exchange."""

import itertools

import numpy as np
import pytest
from ptxsim import Input, Output
from snippets import launch

RNG = np.random.default_rng(0)
LANES = np.arange(32)
STORE = "mul.wide.u32 %d10, %r100, 4; add.u64 %d10, %d10, %d20; st.global.b32 [%d10], %r1;"


def of_threads(body, threads=32, *inputs, count=1, **how):
    """Return what each thread leaves in %r1 and, with a count of 2, in %r2; it finds its elements of the inputs in %r21, %r22 and so on."""
    result = Output(np.zeros((count, threads), np.uint32))
    load, arrays = "mul.wide.u32 %d11, %r100, 4;", []
    for n, values in enumerate(inputs):
        load += f"add.u64 %d12, %d{21 + n}, %d11; ld.global.b32 %r{21 + n}, [%d12];"
        arrays.append(Input(np.asarray(values).astype(np.uint32)))
    store = STORE + (f"st.global.b32 [%d10+{4 * threads}], %r2;" if count == 2 else "")
    launch(load + body + store, [result, *arrays], block=(threads,), **how)
    return result.values[0].tolist() if count == 1 else result.values.tolist()


# ---- shuffles


def natural(mode, width, by, values):
    """Return what lanes get in each segment of `width` lanes, and whether it comes from there; bfly reads earlier segments too."""
    first = LANES // width * width
    source = {"up": LANES - by, "down": LANES + by, "bfly": LANES ^ by, "idx": first + by % width}[mode]
    inside = (source < first + width) & ((source >= first) | (mode == "bfly"))
    return values[np.where(inside, source, LANES)], inside


@pytest.mark.parametrize("width", [32, 16, 8, 4, 2, 1])
@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shuffles_within_segments(mode, width):
    values = RNG.integers(0, 1 << 32, 32)
    control = (32 - width) << 8 | (0 if mode == "up" else 31)
    for by in (0, 1, 2, 5, 16, 31):
        body = f"shfl.sync.{mode}.b32 %r1|%p1, %r21, {by}, {control}, 0xffffffff; selp.u32 %r2, 1, 0, %p1;"
        got, inside = of_threads(body, 32, values, count=2)
        want, ok = natural(mode, width, by, values)
        assert (got, inside) == (want.tolist(), ok.astype(int).tolist())
        alone = of_threads(f"shfl.sync.{mode}.b32 %r1, %r21, {by}, {control}, -1;", 32, values)
        assert alone == got


def by_the_isa(mode, lane, b, c):
    """The ISA's text of shfl: the source lane, and the predicate."""
    b, c, mask = b & 31, c & 31, c >> 8 & 31
    highest, lowest = (lane & mask) | (c & ~mask), lane & mask
    if mode == "up":
        j, p = lane - b, lane - b >= highest
    elif mode == "down":
        j, p = lane + b, lane + b <= highest
    elif mode == "bfly":
        j, p = lane ^ b, lane ^ b <= highest
    else:
        j, p = lowest | (b & ~mask), (lowest | (b & ~mask)) <= highest
    return (j if p else lane), p


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shuffles_with_different_operands_in_each_lane(mode):
    values = RNG.integers(0, 1 << 32, 32)
    b, c = RNG.integers(0, 256, 32), RNG.integers(0, 1 << 13, 32)
    body = f"shfl.sync.{mode}.b32 %r1|%p1, %r21, %r22, %r23, 0xffffffff; selp.u32 %r2, 1, 0, %p1;"
    rows = [by_the_isa(mode, *map(int, row)) for row in zip(LANES, b, c, strict=True)]
    assert of_threads(body, 32, values, b, c, count=2) == [[values[j] for j, _ in rows], [p for _, p in rows]]


def test_shuffles_among_the_lanes_that_take_part():
    body = """mov.u32 %r1, 99; setp.lt.u32 %p1, %r100, 8; @%p1 shfl.sync.down.b32 %r1, %r21, 3, 0x1807, 0xff;
              setp.ge.u32 %p2, %r100, 24; @!%p2 bra others; shfl.sync.idx.b32 %r1, %r21, 30, 31, 0xff000000; others:"""
    want = [*range(103, 108), 105, 106, 107, *[99] * 16, *[130] * 8]
    assert of_threads(body, 32, LANES + 100) == want


# ---- votes and their like


@pytest.mark.parametrize("values", [LANES % 3 == 0, LANES < 0, LANES >= 0, LANES == 7], ids=["some", "none", "all", "one"])
def test_votes(values):
    ballot = sum(1 << n for n in LANES.tolist() if values[n])
    modes = {"any": any(values), "all": all(values), "uni": len(set(values)) == 1}
    body = "setp.ne.u32 %p1, %r21, 0; vote.sync.ballot.b32 %r1, %p1, 0xffffffff; vote.sync.ballot.b32 %r2, !%p1, -1;"
    assert of_threads(body, 32, values, count=2) == [[ballot] * 32, [ballot ^ 0xFFFFFFFF] * 32]
    for mode, want in modes.items():
        body = f"setp.ne.u32 %p1, %r21, 0; vote.sync.{mode}.pred %p2, %p1, 0xffffffff; selp.u32 %r1, 1, 0, %p2;"
        assert of_threads(body, 32, values) == [want] * 32


def test_votes_of_some_lanes():
    """Lanes below 12 vote by themselves, and then the others."""
    body = """setp.ne.u32 %p1, %r21, 0; setp.lt.u32 %p2, %r100, 12; @%p2 bra low;
              vote.sync.ballot.b32 %r1, %p1, 0xfffff000; activemask.b32 %r2; bra meet;
              low: vote.sync.ballot.b32 %r1, %p1, 0xfff; activemask.b32 %r2; meet:"""
    odd = 0xAAAAAAAA
    want = [[odd & 0xFFF] * 12 + [odd & 0xFFFFF000] * 20, [0xFFF] * 12 + [0xFFFFF000] * 20]
    assert of_threads(body, 32, LANES % 2, count=2) == want


@pytest.mark.parametrize("values", [LANES % 3, LANES * 0 + 5, LANES, np.minimum(LANES, 9)], ids=["three", "same", "own", "tail"])
def test_matches(values):
    """match.any gives the lanes with the same value, match.all all lanes or none; of the lanes from 8 on too."""
    same = [sum(1 << k for k in range(32) if values[k] == value) for value in values]
    every = len(set(values.tolist())) == 1
    for type, register in (("b32", "%r21"), ("b64", "%d1")):
        body = f"""cvt.u64.u32 %d1, %r21; shl.b64 %d1, %d1, 33; match.any.sync.{type} %r1, {register}, -1;
                   match.all.sync.{type} %r2|%p1, {register}, -1; @%p1 xor.b32 %r2, %r2, 3;"""
        assert of_threads(body, 32, values, count=2) == [same, [0xFFFFFFFC if every else 0] * 32]
        body = (
            f"""cvt.u64.u32 %d1, %r21; mov.u32 %r1, 7; setp.ge.u32 %p2, %r100, 8; @%p2 match.any.sync.{type} %r1, {register}, 0xffffff00;"""
        )
        assert of_threads(body, 32, values) == [7] * 8 + [mask & 0xFFFFFF00 for mask in same[8:]]


@pytest.mark.parametrize(
    "holds", [lambda n: n % 3 == 0, lambda n: n < 0, lambda n: n >= 0, lambda n: n == 70], ids=["some", "none", "all", "one"]
)
def test_barriers_that_count(holds):
    values = np.array([holds(n) for n in range(96)])
    body = """setp.ne.u32 %p1, %r21, 0; bar.red.popc.u32 %r1, 0, %p1; bar.red.and.pred %p2, 0, %p1; bar.red.or.pred %p3, 0, %p1;
              bar.red.popc.u32 %r3, 1, 96, !%p1; selp.u32 %r2, 1, 0, %p2; @%p3 add.u32 %r2, %r2, 2; mad.lo.u32 %r2, %r3, 4, %r2;"""
    count = int(values.sum())
    assert of_threads(body, 96, values, count=2) == [[count] * 96, [4 * (96 - count) + 2 * (count > 0) + (count == 96)] * 96]


REDUCTIONS = {"add": sum, "min": min, "max": max, "and": np.bitwise_and.reduce, "or": np.bitwise_or.reduce, "xor": np.bitwise_xor.reduce}


@pytest.mark.parametrize(
    "name, type",
    [(name, type) for name in ("add", "min", "max") for type in ("u32", "s32")] + [(name, "b32") for name in ("and", "or", "xor")],
)
def test_reductions_of_a_warp(name, type):
    values = RNG.integers(0, 1 << 32, 32, dtype=np.uint32)
    typed = values.view(np.int32) if type == "s32" else values
    reduced = lambda some: int(REDUCTIONS[name](some.tolist())) % (1 << 32)
    assert of_threads(f"redux.sync.{name}.{type} %r1, %r21, 0xffffffff;", 32, values) == [reduced(typed)] * 32
    body = f"mov.u32 %r1, 5; setp.lt.u32 %p1, %r100, 9; @%p1 redux.sync.{name}.{type} %r1, %r21, 0x1ff;"
    assert of_threads(body, 32, values) == [reduced(typed[:9])] * 9 + [5] * 23


def test_elect_takes_one_lane_of_those_that_take_part():
    body = "elect.sync %r1|%p1, 0xffffffff; selp.u32 %r2, 1, 0, %p1;"
    leaders, elected = of_threads(body, count=2)
    assert len(set(leaders)) == 1 and [n for n in range(32) if elected[n]] == [leaders[0]]
    body = """mov.u32 %r1, 0; setp.gt.u32 %p2, %r100, 20; @%p2 bra some; bra meet;
              some: elect.sync _|%p1, 0xffe00000; selp.u32 %r1, 1, 0, %p1; meet:"""
    assert of_threads(body) == [0] * 21 + [1] + [0] * 10


# ---- branches


def test_lanes_that_loop_differently_meet_again():
    """Collatz: each lane leaves the loop at its own time, and all take part in what comes behind it."""
    body = """mov.u32 %r1, 0; mov.u32 %r3, %r21;
              loop: setp.eq.u32 %p1, %r3, 1; @%p1 bra done; and.b32 %r4, %r3, 1; setp.eq.u32 %p2, %r4, 0; @%p2 bra even;
              mad.lo.u32 %r3, %r3, 3, 1; bra next; even: shr.u32 %r3, %r3, 1; next: add.u32 %r1, %r1, 1; bra.uni loop;
              done: activemask.b32 %r2;"""
    counts = []
    for value in range(1, 33):
        counts.append(0)
        while value != 1:
            value, counts[-1] = value // 2 if value % 2 == 0 else 3 * value + 1, counts[-1] + 1
    assert of_threads(body, 32, LANES + 1, count=2) == [counts, [0xFFFFFFFF] * 32]


def test_labels_belong_to_their_braces():
    body = """mov.u32 %r1, 1; { .reg .b32 %r1; mov.u32 %r1, 7; bra.uni over; mov.u32 %r1, 8; over: { bra over; over: } }
              bra.uni over; mov.u32 %r1, 2; over: add.u32 %r1, %r1, 10;"""
    assert of_threads(body) == [11] * 32


def test_threads_that_have_ended_are_not_waited_for():
    """The threads are half of warp 0 and all of warp 2; the others meet at barriers of the warp, the block and the cluster."""
    body = """mov.u32 %r1, 0; setp.lt.u32 %p1, %r100, 16; @%p1 st.global.b32 [%d10], %r1; @%p1 ret; setp.ge.u32 %p1, %r100, 64;
              @%p1 exit; bar.sync 0; bar.warp.sync 0xffffffff; shfl.sync.idx.b32 %r1, %r100, 31, 31, 0xffff0000;
              barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"""
    result = Output(np.zeros(96, np.uint32))
    address = "mul.wide.u32 %d10, %r100, 4; add.u64 %d10, %d10, %d20;"
    guard = "setp.ge.u32 %p3, %r100, 32; @%p3 mov.u32 %r1, 5; @!%p3"
    body = body.replace("shfl", guard + " shfl")
    launch(address + body + STORE, [result], block=(96,))
    assert result.values[:64].tolist() == [0] * 16 + [31] * 16 + [5] * 32
    assert result.written.reshape(-1, 4)[:, 0].tolist() == [1] * 64 + [0] * 32


@pytest.mark.parametrize(
    "name, want",
    [
        ("%laneid", lambda t: t % 32),
        ("%warpid", lambda t: t // 32),
        ("%tid.x", lambda t: t % 8),
        ("%tid.y", lambda t: t // 8 % 4),
        ("%tid.z", lambda t: t // 32),
        ("%ntid.x", lambda t: 8),
        ("%ntid.y", lambda t: 4),
        ("%ntid.z", lambda t: 2),
        ("%lanemask_lt", lambda t: (1 << t % 32) - 1),
        ("%lanemask_le", lambda t: (2 << t % 32) - 1),
        ("%lanemask_eq", lambda t: 1 << t % 32),
    ],
)
def test_special_registers_of_threads(name, want):
    result = Output(np.zeros(64, np.uint32))
    body = (
        f"mov.u32 %r1, {name}; mov.u32 %r2, %tid.y; mov.u32 %r3, %tid.z; mad.lo.u32 %r100, %r2, 8, %r100; mad.lo.u32 %r100, %r3, 32, %r100;"
    )
    launch(body + STORE, [result], block=(8, 4, 2))
    assert result.values.tolist() == [want(t) for t in range(64)]


GRID, CLUSTER = (4, 6, 2), (2, 3, 1)
PLACES = {
    "%ctaid": lambda at: at,
    "%nctaid": lambda at: GRID,
    "%cluster_ctaid": lambda at: [i % c for i, c in zip(at, CLUSTER, strict=True)],
    "%cluster_nctaid": lambda at: CLUSTER,
    "%clusterid": lambda at: [i // c for i, c in zip(at, CLUSTER, strict=True)],
    "%nclusterid": lambda at: [i // c for i, c in zip(GRID, CLUSTER, strict=True)],
}


def test_special_registers_of_blocks():
    names = [f"{name}.{axis}" for name in PLACES for axis in "xyz"] + ["%cluster_ctarank", "%cluster_nctarank"]
    result = Output(np.zeros((48, len(names)), np.uint32))
    body = f"""mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ctaid.y; mov.u32 %r3, %ctaid.z; mad.lo.u32 %r1, %r2, 4, %r1;
                   mad.lo.u32 %r1, %r3, 24, %r1;
               mul.wide.u32 %d10, %r1, {4 * len(names)}; add.u64 %d10, %d10, %d20;"""
    for n, name in enumerate(names):
        body += f"mov.u32 %r4, {name}; st.global.b32 [%d10+{4 * n}], %r4;"
    launch(body, [result], GRID, (1,), cluster=CLUSTER)
    for z, y, x in itertools.product(*map(range, GRID[::-1])):
        want = [value for name in PLACES for value in PLACES[name]((x, y, z))] + [y % 3 * 2 + x % 2, 6]
        assert result.values[z * 24 + y * 4 + x].tolist() == want


# ---- barriers

SHARE = "mad.lo.u32 %r101, %r100, 4, %r101;"  # each thread's place in shared memory


@pytest.mark.parametrize(
    "sync",
    [
        "bar.sync 0;",
        "bar.sync 7;",
        "mov.u32 %r9, 3; bar.sync %r9;",
        "bar.sync 1, 96;",
        "barrier.sync 0;",
        "mov.u32 %r9, 2; mov.u32 %r8, 96; bar.sync %r9, %r8;",
        "barrier.sync.aligned 15, 96;",
    ],
)
def test_barriers_of_a_block(sync):
    """Three times: each thread hands a number to the thread of the next warp."""
    turn = "add.u32 %r3, %r100, 32; rem.u32 %r3, %r3, 96; sub.u32 %r3, %r3, %r100; mad.lo.u32 %r3, %r3, 4, %r101;"
    body = SHARE + turn + "mov.u32 %r1, %r100;" + f"st.shared.b32 [%r101], %r1; {sync} ld.shared.b32 %r1, [%r3]; {sync}" * 3
    assert of_threads(body, 96, shared=384) == list(range(96))
    assert of_threads(body.replace("mov.u32 %r1, %r100;", "mul.lo.u32 %r1, %r100, 3;", 1), 96, shared=384) == [3 * t for t in range(96)]
    once = SHARE + turn + f"st.shared.b32 [%r101], %r100; {sync} ld.shared.b32 %r1, [%r3];"
    assert of_threads(once, 96, shared=384) == [(t + 32) % 96 for t in range(96)]


def test_one_warp_arrives_and_another_waits():
    """Warp 0 gives, and goes on; warp 1 takes.  Warps 2 and 3 meet at a barrier of their own meanwhile."""
    body = (
        SHARE
        + """mov.u32 %r1, 0; setp.ge.u32 %p1, %r100, 64; @%p1 bra rest; setp.ge.u32 %p2, %r100, 32; @%p2 bra take;
           st.shared.b32 [%r101], %r100; bar.arrive 1, 64; bra meet;
           take: bar.sync 1, 64; ld.shared.b32 %r1, [%r101+-128]; bra meet;
           rest: st.shared.b32 [%r101], %r100; bar.sync 2, 64; xor.b32 %r3, %r100, 32; sub.u32 %r3, %r3, %r100;
           mad.lo.s32 %r3, %r3, 4, %r101; ld.shared.b32 %r1, [%r3]; meet: bar.sync 0;"""
    )
    assert of_threads(body, 128, shared=512) == [0] * 32 + [*range(32)] + [*range(96, 128)] + [*range(64, 96)]


def test_lanes_come_to_a_barrier_at_different_times():
    body = (
        SHARE
        + """st.shared.b32 [%r101], %r100; setp.lt.u32 %p1, %r100, 5; @%p1 bra some; bar.warp.sync 0xffffffe0; bra meet;
           some: nanosleep.u32 20; bar.warp.sync 31; meet: bar.sync 0; bar.warp.sync 0xffffffff;
           xor.b32 %r3, %r100, 63; sub.u32 %r3, %r3, %r100; mad.lo.s32 %r3, %r3, 4, %r101; ld.shared.b32 %r1, [%r3];"""
    )
    assert of_threads(body, 64, shared=256) == [63 - t for t in range(64)]


ARRIVALS = [
    ("arrive.aligned", "wait.aligned"),
    ("arrive.release.aligned", "wait.acquire.aligned"),
    ("arrive", "wait"),
    ("arrive.release", "wait.acquire"),
]


@pytest.mark.parametrize("arrive, wait", ARRIVALS)
def test_barriers_of_a_cluster(arrive, wait):
    """Blocks write into each other's shared memory, and read it, by addresses of the window and by generic ones."""
    result = Output(np.zeros(8, np.uint32))
    sync = f"barrier.cluster.{arrive}; barrier.cluster.{wait};"
    body = f"""mov.u32 %r1, %cluster_ctarank; mov.u32 %r2, %ctaid.x; add.u32 %r3, %r1, 1; and.b32 %r3, %r3, 3;
               setp.eq.u32 %p1, %r100, 0; mapa.shared::cluster.u32 %r4, %r101, %r3; mul.lo.u32 %r5, %r2, %r2;
               cvt.u64.u32 %d1, %r101; cvta.shared.u64 %d1, %d1; mapa.u64 %d2, %d1, %r3; @%p1 st.shared::cluster.b32 [%r4], %r5;
               {sync} @%p1 ld.shared.b32 %r6, [%r101]; @%p1 ld.shared::cluster.b32 %r7, [%r4]; @%p1 ld.b32 %r8, [%d2];
               setp.ne.u32 %p2, %r7, %r8; @%p2 mov.u32 %r7, 999; mad.lo.u32 %r6, %r7, 100, %r6; mul.wide.u32 %d10, %r2, 4;
               add.u64 %d10, %d10, %d20; @%p1 st.global.b32 [%d10], %r6; {sync}"""
    launch(body, [result], (8,), (64,), shared=16, cluster=(4,))
    squares = [n * n for n in range(8)]
    before = [n // 4 * 4 + (n - 1) % 4 for n in range(8)]
    assert result.values.tolist() == [100 * squares[n] + squares[before[n]] for n in range(8)]


@pytest.mark.parametrize("fence", ["acq_rel.cluster", "acq_rel.gpu", "sc.cluster"])
def test_a_fence_orders_what_comes_before_a_relaxed_arrival(fence):
    result = Output(np.zeros(2, np.uint32))
    body = f"""mov.u32 %r1, %cluster_ctarank; xor.b32 %r2, %r1, 1; mapa.shared::cluster.u32 %r4, %r101, %r2;
                   st.shared::cluster.b32 [%r4], %r1;
               fence.{fence}; barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;
               ld.shared.b32 %r3, [%r101]; mul.wide.u32 %d10, %r1, 4; add.u64 %d10, %d10, %d20; st.global.b32 [%d10], %r3;"""
    launch(body, [result], (2,), (1,), shared=16, cluster=(2,))
    assert result.values.tolist() == [1, 0]


def test_registers_move_between_warp_groups():
    body = """mov.u32 %r1, 1; setp.ge.u32 %p1, %r100, 128; @%p1 bra more; setmaxnreg.dec.sync.aligned.u32 24; bra meet;
              more: setmaxnreg.inc.sync.aligned.u32 240; mov.u32 %r1, 2; meet:"""
    assert of_threads(body, 384) == [1] * 128 + [2] * 256


def test_hints_do_nothing():
    body = """mov.u32 %r1, 4; griddepcontrol.wait; griddepcontrol.launch_dependents; membar.gl; membar.cta; membar.sys; fence.acq_rel.gpu;
                  prefetch.global.L2 [%d20];
              cp.async.bulk.prefetch.L2.global [%d20], 64; nanosleep.u32 1;"""
    assert of_threads(body) == [4] * 32
