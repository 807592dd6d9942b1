"""Programs that do what they may not: each is stopped, with the reason, the instruction and its place."""

import re

import ml_dtypes
import numpy as np
import pytest
from ptxsim import EARLY, LATE, Fault, InOut, Input, Module, Output, map_bytes, tensor_map
from ptxsim.library import library
from snippets import HEAD, both, launch

FROM, TO = 17 << 40, 18 << 40  # addresses


def numbers(count=32):
    return np.arange(count, dtype=np.uint32)


def passes(body, arguments=None, **how):
    arguments = [Input(numbers()), Output(numbers(64))] if arguments is None else arguments
    launch(body, arguments, **{"shared": 1024, "block": (64,)} | how)


def fault(body, arguments=None, **how) -> str:
    """Return the message of the program's fault."""
    with pytest.raises(Fault) as caught:
        passes(body, arguments, **how)
    return str(caught.value)


def check(wanted, body, arguments=None, **how):
    """Run a body with `<wrong|right>` in it, both ways: the one is a fault, and the other none."""
    wrong, right = (re.sub(r"<([^|>]*)\|([^>]*)>", rf"\{n}", body) for n in (1, 2))
    said = fault(wrong, arguments, **how)
    assert re.search(wanted, said), said
    passes(right, arguments, **how)


def marked(body, right, wrong):
    """Return a body for `check`, whose right text stands in it once."""
    assert body.count(right) == 1
    return body.replace(right, f"<{wrong}|{right}>")


def rows(table):
    """Return rows of a parametrised test, which a table's keys name."""
    return {"argvalues": [*table.values()], "ids": [*table]}


# ---- addresses

OUTSIDE, SHARED, MULTIPLE = "outside of all arrays", "outside of shared memory", "is no multiple of"
COPIED = "cp.async.wait_all;"
ADDRESSES = {  # what is said, and the program
    "beyond an input": (rf"reads {OUTSIDE}: 0x\w+, byte 128 of an array of 128", "ld.global.b32 %r1, [%d20+<128|124>];"),
    "before an input": (rf"reads {OUTSIDE}: 0x\w+, byte -4 of", "ld.global.b32 %r1, [%d20<-|+>4];"),
    "beyond an output": (f"writes {OUTSIDE}", "@%p1 st.global.b8 [%d21+<256|255>], %r1;"),
    "a null pointer": (f"reads {OUTSIDE}: 0x0", "mov.u64 %d1, <0|%d20>; ld.global.b32 %r1, [%d1];"),
    "an input that is written": ("writes into an input, at byte 0", "@%p1 st.global.b32 [<%d20|%d21>], %r1;"),
    "an output that is not written": (
        "reads byte 8 of an array, which nothing has written",
        "@%p1 st.global.b64 [%d21], 0; @%p1 ld.global.b32 %r1, [%d21+<8|4>];",
    ),
    "beyond shared memory": (f"{SHARED}: 2048 of 1024 to 2048", "@%p1 st.shared.b32 [%r101+<1024|1020>], 0;"),
    "beyond shared memory, generic": (SHARED, "cvt.u64.u32 %d1, %r101; cvta.shared.u64 %d1, %d1; @%p1 st.b32 [%d1+<1024|1020>], 0;"),
    "the first of shared memory": (f"{SHARED}: 0 of", "mov.u32 %r1, <0|%r101>; @%p1 st.shared.b32 [%r1], 0;"),
    "shared memory that is not written": (
        "reads shared memory at 1024, which nothing has written",
        "<|@%p1 st.shared.b32 [%r101], 0;> @%p1 ld.shared.b32 %r1, [%r101];",
    ),
    "half of it": ("which nothing has written", "@%p1 st.shared.b32 [%r101], 0; @%p1 ld.shared.<b64 %d1|b32 %r1>, [%r101];"),
    "beyond the parameters": ("outside of the parameters: byte 16 of 16", "ld.param.b32 %r1, [p0+<16|12>];"),
    "a parameter that is written": ("writes a parameter", "mov.b64 %d1, <p0; cvta.param.u64 %d1, %d1|%d21>; @%p1 st.b32 [%d1], 0;"),
    "beyond a thread's own memory": ("outside of the thread's own memory: byte 16 of 16", "st.local.b32 [depot+<16|12>], 0;"),
    "an unaligned word": (f"{MULTIPLE} 4", "ld.global.b32 %r1, [%d20+<2|4>];"),
    "an unaligned vector": (f"{MULTIPLE} 16", "ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%d20+<8|16>];"),
    "an unaligned store": (f"{MULTIPLE} 8", "@%p1 st.shared.v2.b32 [%r101+<4|8>], {%r1, %r1};"),
    "an unaligned half": (f"{MULTIPLE} 2", "ld.global.b16 %h1, [%d20+<5|6>];"),
    "an unaligned atomic": (f"{MULTIPLE} 4", "@%p1 st.shared.b64 [%r101], 0; @%p1 red.shared.add.u32 [%r101+<2|4>], 1;"),
    "an unaligned copy": (f"{MULTIPLE} 16", f"@%p1 cp.async.cg.shared.global [%r101], [%d20+<8|16>], 16; {COPIED}"),
    "an unaligned copy's target": (f"{MULTIPLE} 8", f"@%p1 cp.async.ca.shared.global [%r101+<4|8>], [%d20], 8; {COPIED}"),
    "more bytes than are copied": ("copies 17 of 16 bytes", f"@%p1 cp.async.cg.shared.global [%r101], [%d20], 16, <17|15>; {COPIED}"),
    "a copy of odd size": ("copies 12 bytes", f"@%p1 cp.async.ca.shared.global [%r101], [%d20], <12|8>; {COPIED}"),
    "a copy beyond the input": (f"reads {OUTSIDE}", f"@%p1 cp.async.ca.shared.global [%r101], [%d20+<128|112>], 16, 4; {COPIED}"),
    "an unaligned matrix": (
        f"a row of a matrix at 1032, which {MULTIPLE} 16",
        "mad.lo.u32 %r1, %r9, 16, %r101; stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r1+<8|16>], {%r2};",
    ),
    "a space of another block": (
        "an address of another block",
        "mapa.shared::cluster.u32 %r1, %r101, %r8; @%p1 st.shared::<cta|cluster>.b32 [%r1], 0;",
    ),
    "no such block": ("no block 2 in the cluster", "mapa.shared::cluster.u32 %r1, %r101, <2|1>;"),
    "mapa of what is not shared": (
        "mapa of an address that is not in shared memory",
        "mapa.<u64 %d1, %d20|shared::cluster.u32 %r1, %r101>, 1;",
    ),
}


@pytest.mark.parametrize("wanted, body", **rows(ADDRESSES))
def test_addresses(wanted, body):
    """The cluster has two blocks, of which the second does nothing; thread 0 of the first has %p1."""
    head = """mov.u32 %r1, 0; mov.u32 %r2, 0; mov.u32 %r8, %cluster_ctarank; setp.ne.u32 %p1, %r8, 0; @%p1 bra end; xor.b32 %r8, %r8, 1;
              setp.eq.u32 %p1, %r100, 0; shr.u32 %r9, %r100, 5; and.b32 %r10, %r100, 7; mad.lo.u32 %r9, %r9, 8, %r10;"""
    foot = "end: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
    check(wanted, head + body + foot, grid=(2,), cluster=(2,), declare=".local .align 8 .b8 depot[16];")


def test_a_fault_tells_its_place():
    said = fault("setp.eq.u32 %p1, %r100, 37;\n.loc 1 123 4\n@%p1 ld.global.b32 %r1, [%d20+500];", grid=(3,))
    assert "\n  at line 10: @%p1 ld.global.b32 %r1, [%d20+500]\n" in said
    assert said.startswith("kernel: reads outside") and "of line 123 of the kernel's source" in said
    assert said.endswith("block (0, 0, 0), warp 1, thread 37")


# ---- what warps do to each other

OWN = "mad.lo.u32 %r102, %r100, 4, %r101; xor.b32 %r103, %r100, 32; mad.lo.u32 %r103, %r103, 4, %r101;"
OWN += "mov.u32 %r1, 5; setp.eq.u32 %p1, %r100, 0;"
UNORDERED = "race: reads|nothing has written"
WARP, LANE = r"shared memory at \d+, which warp \d of block 0 of the cluster", r"shared memory at \d+, which another lane of the warp"
RACES = {
    "a read behind a write": (
        f"race: reads {WARP} wrote, and no barrier is between|nothing has",
        "st.shared.b32 [%r102], 1; <|bar.sync 0;> ld.shared.b32 %r1, [%r103];",
    ),
    "a write behind a read": (
        f"race: (writes|reads) {WARP} (reads|wrote), and no barrier",
        "st.shared.b32 [%r102], 1; bar.sync 0; ld.shared.b32 %r1, [%r103]; <|bar.sync 0;> st.shared.b32 [%r102], 2;",
    ),
    "a write behind a write": (
        r"race: writes shared memory at \d+, which warp 0 of block 0 of the cluster wrote",
        "st.shared.b32 [<%r101|%r102>], %r100;",
    ),
    "bytes of a word": ("race: writes", "add.u32 %r104, %r101, <%r9|%r100>; st.shared.b8 [%r104], %r100;"),
    "a read behind another lane's write": (
        f"race: reads {LANE} wrote, and no bar.warp.sync is between",
        "st.shared.b32 [%r102], %r100; <|bar.warp.sync -1;> ld.shared.b32 %r6, [%r105];",
    ),
    "a write behind another lane's read": (
        f"race: writes {LANE} reads, and no bar.warp.sync is between",
        "st.shared.b32 [%r102], %r100; bar.warp.sync -1; ld.shared.b32 %r6, [%r105]; <|bar.warp.sync -1;> st.shared.b32 [%r102], 99;",
    ),
    "a shuffle orders no memory": (
        f"race: reads {LANE} wrote",
        "st.shared.b32 [%r102], %r100; <shfl.sync.bfly.b32 %r6, %r100, 1, 31,|bar.warp.sync> -1; ld.shared.b32 %r6, [%r105];",
    ),
    "barriers of different warps": (
        UNORDERED,
        "st.shared.b32 [%r102], 1; shr.u32 %r5, %r100, 5; <add.u32 %r5, %r5, 1; bar.sync %r5, 32|bar.sync 1, 64>;"
        "ld.shared.b32 %r1, [%r103];",
    ),
    "an arrival is no wait": (
        UNORDERED,
        "st.shared.b32 [%r102], 1; @!%p2 bar.sync 1, 64; @%p2 bar.<arrive|sync> 1, 64; ld.shared.b32 %r1, [%r103];",
    ),
    "a barrier of the warp is none of the block": (
        UNORDERED,
        "st.shared.b32 [%r102], 1; <bar.warp.sync -1|bar.sync 0>; ld.shared.b32 %r1, [%r103];",
    ),
    "an atomic operation and a read": (
        "race: (reads|writes)",
        "@%p1 st.shared.b32 [%r101], 0; bar.sync 0; red.shared.add.u32 [%r101], 1; <|bar.sync 0;> ld.shared.b32 %r1, [%r101];",
    ),
    "a write and an atomic operation": (
        "race: |nothing has written",
        "@%p1 st.shared.b32 [%r101], 0; <|bar.sync 0;> red.shared.add.u32 [%r101], 1;",
    ),
    "global memory that another warp wrote": (
        r"race: reads byte \d+ of an array, which warp \d of block 0 of the cluster wrote|nothing has written",
        "st.global.b32 [%d10], 3; <|bar.sync 0;> ld.global.b32 %r1, [%d11];",
    ),
    "global memory that two warps write": ("race: writes byte 0 of an array, which warp 0", "@<!%p3|%p1> st.global.b32 [%d21], 3;"),
    "an atomic operation in global memory and a read": (
        "race: reads byte 0|nothing has written",
        "@%p1 st.global.b32 [%d21], 3; bar.sync 0; red.global.add.u32 [%d21], 1; <|bar.sync 0;> ld.global.b32 %r1, [%d21];",
    ),
}


@pytest.mark.parametrize("wanted, body", **rows(RACES))
def test_races(wanted, body):
    head = """and.b32 %r9, %r100, 31; setp.lt.u32 %p2, %r100, 32; setp.eq.u32 %p3, %r100, 99; mul.wide.u32 %d10, %r100, 4;
              add.u64 %d10, %d10, %d21; xor.b32 %r104, %r100, 32; mul.wide.u32 %d11, %r104, 4;
              add.u64 %d11, %d11, %d21; xor.b32 %r105, %r100, 1; mad.lo.u32 %r105, %r105, 4, %r101;"""
    check(wanted, OWN + head + body)


def test_what_is_there_may_be_written_again():
    """Warps of Triton's that hold the same data both write it, and so do lanes of a warp."""
    passes(OWN + "st.shared.b32 [%r101], 1;")
    passes(OWN + "st.shared.b32 [%r101], 1; ld.shared.b32 %r6, [%r101]; st.shared.b32 [%r101], 1;", block=(32,))


def test_blocks_have_no_order_in_global_memory():
    body = "mov.u32 %r1, %ctaid.x; mul.wide.u32 %d10, %r1, {}; add.u64 %d10, %d10, %d21; st.global.b32 [%d10], 1; {}"
    assert "race: writes byte 0 of an array, which a block of another cluster wrote" in fault(body.format(0, ""), grid=(2,), block=(1,))
    passes(body.format(4, ""), grid=(2,), block=(1,))
    read = "@%p1 bra end; ld.global.b32 %r2, [%d21+{}]; end:"
    body = body.format(4, "setp.ne.u32 %p1, %r1, 1; " + read)
    assert "race: reads byte 0 of an array, which a block of another cluster wrote" in fault(body.format(0), grid=(2,), block=(1,))
    passes(body.format(4), grid=(2,), block=(1,))
    atomic = "setp.eq.u32 %p1, %r100, 0; {} red.global.add.u32 [%d21], 1;"
    zero = Output(np.zeros(1, np.uint32))
    launch("st.global.b32 [%d20], 0;", [zero], block=(1,))
    launch(atomic.format(""), [Input(numbers()), zero], grid=(3,), block=(64,))
    assert zero.values[0] == 192
    assert "which a block of another cluster wrote" in fault(atomic.format("@%p1 st.global.b32 [%d21], 0;"), grid=(2,), block=(32,))


ARRIVE, AWAIT = "barrier.cluster.arrive.aligned;", "barrier.cluster.wait.aligned;"
CLUSTER = {
    "no barrier of the cluster": (UNORDERED, f"{ARRIVE} {AWAIT} ld", "ld"),
    "a barrier of the block instead": (UNORDERED, f"{ARRIVE} {AWAIT} ld", "bar.sync 0; ld"),
    "an arrival that orders nothing": (UNORDERED, f"arrive.aligned; {AWAIT} ld", f"arrive.relaxed.aligned; {AWAIT} ld"),
    "an end while another reads": ("accesses shared memory of a block that has ended", f"{ARRIVE} {AWAIT} end", "end"),
    "no arrival": ("waits at the cluster's barrier, where it has not arrived", f"{ARRIVE} {AWAIT} ld", f"{AWAIT} ld"),
    "two arrivals": ("arrives twice at the cluster's barrier", f"{ARRIVE} {AWAIT} ld", f"{ARRIVE} {ARRIVE} {AWAIT} ld"),
}


@pytest.mark.parametrize("wanted, right, wrong", **rows(CLUSTER))
def test_blocks_of_a_cluster(wanted, right, wrong):
    body = f"""mov.u32 %r1, %cluster_ctarank; xor.b32 %r2, %r1, 1; mapa.shared::cluster.u32 %r3, %r101, %r2; st.shared.b32 [%r101], %r1;
               {ARRIVE} {AWAIT} ld.shared::cluster.b32 %r4, [%r3]; {ARRIVE} {AWAIT} end:"""
    check(wanted, marked(body, right, wrong), grid=(2,), cluster=(2,), block=(1,))


# ---- cp.async

COPY = "mad.lo.u32 %r102, %r100, 4, %r101; mul.wide.u32 %d10, %r100, 4; add.u64 %d10, %d10, %d20;"
COPY += "cp.async.ca.shared.global [%r102], [%d10], 4;"
ARRIVING = "into which a copy is under way"
NOT_THERE = "race: reads|a copy is under way|nothing has written"
COPIES = {
    "a read before the wait": (
        rf"reads shared memory at \d+, {ARRIVING}",
        "cp.async.commit_group; <|cp.async.wait_group 0;> ld.shared.b32 %r1, [%r102];",
    ),
    "a write before the wait": (
        rf"writes shared memory at \d+, {ARRIVING}",
        "cp.async.commit_group; <|cp.async.wait_group 0;> st.shared.b32 [%r102], 0;",
    ),
    "a wait for too few groups": (
        ARRIVING,
        "cp.async.commit_group; cp.async.wait_group 1; <|cp.async.wait_group 0;> ld.shared.b32 %r1, [%r102];",
    ),
    "a copy that no group has": (ARRIVING, "<|cp.async.commit_group;> cp.async.wait_group 0; ld.shared.b32 %r1, [%r102];"),
    "a read without a barrier": (NOT_THERE, "cp.async.wait_all; <|bar.sync 0;> ld.shared.b32 %r1, [%r103];"),
    "a barrier before the wait": (NOT_THERE, "bar.sync 0; cp.async.wait_all; <|bar.sync 0;> ld.shared.b32 %r1, [%r103];"),
}


@both
@pytest.mark.parametrize("wanted, body", **rows(COPIES))
def test_copies_of_threads(wanted, body, late):
    head = COPY + "xor.b32 %r103, %r100, 32; mad.lo.u32 %r103, %r103, 4, %r101;"
    check(wanted, head + body, [Input(numbers(64))], late=late)


# ---- copies by tensor maps

MAP = "mov.b64 %d1, p0; cvta.param.u64 %d1, %d1; setp.eq.u32 %p1, %r100, 0; add.u32 %r102, %r101, 128; mad.lo.u32 %r103, %r100, 4, %r102;"
MAKE = "@%p1 mbarrier.init.shared::cta.b64 [%r101], 1;"
INIT = MAKE + "fence.mbarrier_init.release.cluster; bar.sync 0;"
EXPECT = "@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r101], 256;"
LOAD = "@%p1 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r102], [%d1, {0, 0}], [%r101];"
WAIT = "wait: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r101], 0; @!%p2 bra wait;"
READ = "ld.shared.b32 %r1, [%r103];"
MBARRIER = "the mbarrier at 1024 of block 0"
BEHIND = "a copy is under way|nothing has written|race: reads shared memory at"
LOADS = {  # said, what is right, what is wrong
    "a read before the wait": (f"{BEHIND} 1152, which a copy that ends at {MBARRIER.removesuffix(' of block 0')}", WAIT, ""),
    "a write before the wait": (
        "a copy is under way|race: writes shared memory at 1152, which (a copy|warp 1)",
        WAIT + READ,
        "st.shared.b32 [%r103], 1;",
    ),
    "one warp waits": (f"{BEHIND} 1280, which a copy", WAIT, f"setp.ge.u32 %p4, %r100, 32; @%p4 bra over; {WAIT} over:"),
    "the wrong parity": (f"{BEHIND} 1152, which a copy", "[%r101], 0;", "[%r101], 1;"),
    "too few bytes expected": (f"all have arrived at {MBARRIER}, and 128 bytes more than they expect", "256", "128"),
    "too many bytes expected": (
        rf"deadlock: no thread can go on(.*\n)*.*warp 0, 32 lanes: for {MBARRIER}, parity 0, line \d+"
        rf"(.*\n)*.*{MBARRIER} lacks 1 of 1 arrivals and 4 bytes|lacks 0 of 1 arrivals and 4 bytes",
        "256",
        "260",
    ),
    "far too many bytes": (f"{MBARRIER} expects 1048576 bytes", "256", "1048576"),
    "no bytes expected": (
        "deadlock|a copy is under way|race|more than they expect",
        ".expect_tx.shared::cta.b64 _, [%r101], 256",
        ".shared::cta.b64 _, [%r101]",
    ),
    "no arrival": (rf"deadlock(.*\n)*.*{MBARRIER} lacks 1 of 1 arrivals and -256 bytes", EXPECT, ""),
    "two arrivals": (f"more arrivals at {MBARRIER} than the 1", EXPECT, EXPECT + EXPECT),
    "no mbarrier": ("no mbarrier was initialised at 1024", MAKE, ""),
    "an mbarrier that another warp does not know": (
        rf"race: uses {MBARRIER}, which another warp initialised \(warp 0 of block 0",
        "bar.sync 0;",
        "",
    ),
    "an mbarrier for none": ("an mbarrier for 0 arrivals", "[%r101], 1;", "[%r101], 0;"),
    "an mbarrier at an odd place": ("an mbarrier at 1028, which is no multiple of 8", "[%r101], 1;", "[%r101+4], 1;"),
    "an mbarrier twice": ("initialises an mbarrier that is one", MAKE, MAKE + MAKE),
    "a write over an mbarrier": ("writes shared memory at 1024, which is an mbarrier", READ, "@%p1 st.shared.b32 [%r101], 0;"),
    "a read of an mbarrier": ("reads shared memory at 1024, which nothing has written", READ, "@%p1 ld.shared.b32 %r1, [%r101];"),
    "parity 2": ("waits for parity 2", "[%r101], 0;", "[%r101], 2;"),
    "an odd target": ("copies to 1216, which is no multiple of 128", "[%r102], [%d1", "[%r104], [%d1"),
    "a target beyond shared memory": (SHARED, "[%r102], [%d1", "[%r105], [%d1"),
    "another rank": ("a tensor map of rank 2", "{0, 0}", "{0, 0, 0}"),
    "no tensor map": ("there is no tensor map at", "mov.b64 %d1, p0;", "mov.b64 %d1, p1;"),
    "a tensor map at an odd place": ("which is no multiple of 64", "%d1, %d1; setp", "%d1, %d1; add.u64 %d1, %d1, 8; setp"),
    "a map of the other kind": ("the tensor map is of the other kind", "global.mbarrier", "global.im2col.mbarrier"),
    "a write before the load, without a barrier": ("race: writes|a copy is under way", INIT, INIT + "st.shared.b32 [%r103], 1;"),
    "an end before the copy": ("the blocks ended, and a copy into their shared memory is under way|more arrivals", WAIT + READ, ""),
}


def load(body, late):
    """Return the fault of a program with a tensor map of 2 x 32 words, or ""."""
    map = tensor_map(FROM, [128], [32, 2], [32, 2], 4)
    try:
        passes(body, [map_bytes(0), bytes(128)], maps=[map], arrays=[Input(numbers(64).reshape(2, 32), FROM)], late=late)
    except Fault as error:
        return str(error)
    return ""


@pytest.mark.parametrize("wanted, right, wrong", **rows(LOADS))
def test_loads_by_tensor_maps(wanted, right, wrong):
    """A wrong program fails in at least one of both orders, and the right one passes in both."""
    body = MAP + "add.u32 %r104, %r101, 192; add.u32 %r105, %r101, 1024;" + INIT + EXPECT + LOAD + WAIT + READ
    assert body.count(right) == 1
    said = [load(body.replace(right, wrong), late) for late in (LATE, EARLY)]
    assert any(said) and all(re.search(wanted, text) for text in said if text), said
    assert not load(body, LATE) and not load(body, EARLY)


@both
def test_who_waits_for_one_copy_does_not_know_of_another(late):
    """Both have come when warp 1 reads, and it has waited for the one alone."""
    body = MAP + "add.u32 %r106, %r101, 512; add.u32 %r107, %r103, 384;"
    body += INIT.replace("fence", "@%p1 mbarrier.init.shared::cta.b64 [%r101+8], 1; fence")
    body += EXPECT + EXPECT.replace("[%r101]", "[%r101+8]")
    body += LOAD.replace("[%r102]", "[%r106]").replace("[%r101]", "[%r101+8]") + LOAD
    body += WAIT.replace("[%r101]", "[%r101+8]") + "# ld.shared.b32 %r1, [%r103]; ld.shared.b32 %r1, [%r107];"
    assert not load(body.replace("#", WAIT.replace("wait:", "other:").replace("bra wait", "bra other")), late)
    said = load(body.replace("#", ""), late)
    assert re.search("race: reads shared memory at 1152, which a copy that ends at the mbarrier at 1024 of block 0", said), said


# ---- copies out of shared memory

UNFENCED = "no fence.proxy.async follows the write of warp"
STILL_READ = "which a copy or a wgmma under way still reads"
COMMIT = "@%p1 cp.async.bulk.commit_group;"
REST = "@%p1 cp.async.bulk.wait_group.read 0; bar.sync 1; st.shared.b32 [%r103], 7;"
PROXY_FENCE, WRITE = "fence.proxy.async.shared::cta;", "st.shared.b32 [%r103], %r100;"
STORE = {
    "no fence": (f"reads shared memory at 1152 by the async proxy, and {UNFENCED} 0", PROXY_FENCE, ""),
    "a fence before the write": (UNFENCED, f"{WRITE} {PROXY_FENCE}", f"{PROXY_FENCE} {WRITE}"),
    "a fence of another thread's warp alone": (
        f"{UNFENCED} 1",
        PROXY_FENCE,
        f"setp.ge.u32 %p4, %r100, 32; @%p4 bra over; {PROXY_FENCE} over:",
    ),
    "no barrier": ("race: reads shared memory at 1152, which warp 1|which nothing has written", "bar.sync 0;", ""),
    "a write before the wait": (rf"writes shared memory at \d+, {STILL_READ}", "wait_group.read 0;", "wait_group.read 1;"),
    "a write without a barrier": (f"race: (writes|reads) {WARP} (reads|wrote)|still reads", "bar.sync 1;", ""),
    "no group": (STILL_READ, COMMIT, ""),
    "another thread waits": (STILL_READ, "@%p1 cp.async.bulk.wait_group", "@!%p1 cp.async.bulk.wait_group"),
    "an end before the wait": ("ends while a bulk copy out of shared memory is under way", REST, ""),
    "an end without a group": ("ends with a bulk copy that no group has", f"{COMMIT} {REST}", ""),
    "what is not written": ("which nothing has written", WRITE, f"@%p1 {WRITE}"),
    "an odd source": ("copies from 1168, which is no multiple of 128", "{0, 0}], [%r102]", "{0, 0}], [%r104]"),
    "a map of the other kind": ("a tensor map of rank 2", "{0, 0}", "{0}"),
}


@both
@pytest.mark.parametrize("wanted, right, wrong", **rows(STORE))
def test_stores_by_tensor_maps(wanted, right, wrong, late):
    body = f"""{MAP} add.u32 %r104, %r102, 16; {WRITE} {PROXY_FENCE} bar.sync 0;
               @%p1 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%d1, {{0, 0}}], [%r102]; {COMMIT} {REST}"""
    result = Output(numbers(64).reshape(2, 32), TO)
    maps = [tensor_map(TO, [128], [32, 2], [32, 2], 4)]
    check(wanted, marked(body, right, wrong), [map_bytes(0)], maps=maps, arrays=[result], late=late)
    assert result.values.ravel().tolist() == [*range(64)]


# ---- wgmma

FENCE, COMMITTED, WAITED = (
    f"wgmma.{name}.sync.aligned{rest};" for name, rest in (("fence", ""), ("commit_group", ""), ("wait_group", " 0"))
)
MULTIPLY = """wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16
    {%f0, %f1, %f2, %f3}, {%r10, %r11, %r12, %r13}, %d5, %p3, 1, 1, 0;"""
WRITTEN, PENDING = "which was written since the last wgmma.fence", "which a wgmma under way writes"
WGMMA = {
    "no fence between the proxies": (f"by the async proxy, and {UNFENCED}", "fence.proxy.async;", ""),
    "no barrier": (UNORDERED, "bar.sync 0;", ""),
    "no fence": ("no wgmma.fence precedes the first wgmma", FENCE, ""),
    "sums that are computed behind the fence": (f"takes %f2, {WRITTEN}", FENCE, FENCE + "add.f32 %f2, %f3, %f3;"),
    "factors that are computed behind the fence": (f"takes %r12, {WRITTEN}", FENCE, FENCE + "add.u32 %r12, %r13, 0;"),
    "sums that are computed behind the fence, and moved": (
        f"takes %f2, {WRITTEN}",
        FENCE,
        FENCE + "add.f32 %f5, %f3, %f3; mov.f32 %f2, %f5;",
    ),
    "sums that are moved before a later product": (
        f"takes %f2, {WRITTEN}",
        COMMITTED,
        f"{COMMITTED} {WAITED} mov.f32 %f2, %f3; {MULTIPLY} {COMMITTED}",
    ),
    "no wait": (f"accesses %f0, {PENDING}", WAITED, ""),
    "a wait for too few": (f"accesses %f0, {PENDING}", WAITED, "wgmma.wait_group.sync.aligned 1;"),
    "no group": (f"accesses %f0, {PENDING}", COMMITTED, ""),
    "sums that are written": (f"accesses %f1, {PENDING}", WAITED, "mov.f32 %f1, 0f00000000;" + WAITED),
    "factors that are written": ("writes %r11, which a wgmma under way reads", WAITED, "mov.b32 %r11, 5;" + WAITED),
    "an end": ("ends while a wgmma is under way", WAITED + " st.global.f32 [%d21], %f0;", ""),
    "memory that is written": (f"writes shared memory at 1024, {STILL_READ}", WAITED, "st.shared.b32 [%r2], 0;" + WAITED),
    "memory that is not written": ("which nothing has written", "st.shared.v4.b32 [%r2]", "@%p4 st.shared.v4.b32 [%r2]"),
    "a warp that is missing": (
        r"deadlock(.*\n)*.*warp 0, 32 lanes: for the other warps of a wgmma, line \d+\n.*warp 1, 32 lanes: for the other warps",
        FENCE,
        "setp.lt.u32 %p5, %r100, 96; @!%p5 bra end;" + FENCE,
    ),
    "a lane that is missing": (
        r"deadlock(.*\n)*.*warp 2, 1 lanes: for other lanes of its warp, line 13\n.*warp 2, 31 lanes: for other lanes of its warp, line 14",
        FENCE,
        "setp.eq.u32 %p5, %r100, 77; @%p5 bar.sync 3;\n" + FENCE,
    ),
    "different descriptors": ("lanes have different descriptors", FENCE, "cvt.u64.u32 %d6, %r100; add.u64 %d5, %d5, %d6;" + FENCE),
    "lanes that disagree": ("lanes disagree on scale-d", "setp.eq.u32 %p3, 0, 0", "setp.eq.u32 %p3, %r100, 70"),
    "memory that is not there": (SHARED, FENCE, "add.u64 %d5, %d5, 0x1000;" + FENCE),
    "a base offset": ("a descriptor with a base offset", FENCE, "or.b64 %d5, %d5, 0x2000000000000;" + FENCE),
}


@both
@pytest.mark.parametrize("wanted, right, wrong", **rows(WGMMA))
def test_wgmma(wanted, right, wrong, late):
    body = f"""mul.wide.u32 %d1, %r100, 16; add.u64 %d2, %d20, %d1; mad.lo.u32 %r2, %r100, 16, %r101; setp.ge.u32 %p4, %r100, 1;
        mov.b32 %r10, 0; mov.b32 %r11, 0; mov.b32 %r12, 0; mov.b32 %r13, 0; setp.eq.u32 %p3, 0, 0;
        mov.f32 %f0, 0f00000000; mov.f32 %f1, 0f00000000; mov.f32 %f2, 0f00000000; mov.f32 %f3, 0f00000000;
        ld.global.v4.b32 {{%r3, %r4, %r5, %r6}}, [%d2]; st.shared.v4.b32 [%r2], {{%r3, %r4, %r5, %r6}};
        fence.proxy.async; bar.sync 0; shr.u32 %r7, %r101, 4; cvt.u64.u32 %d4, %r7; add.u64 %d5, %d4, {8 << 16 | 16 << 32};
        mul.wide.u32 %d1, %r100, 4; add.u64 %d21, %d21, %d1; {FENCE} {MULTIPLY} {COMMITTED} {WAITED} st.global.f32 [%d21], %f0; end:"""
    arguments = [Input(np.ones(64 * 16, ml_dtypes.bfloat16)), Output(np.zeros(128, np.float32))]
    how = dict(block=(128,), shared=2048, late=late)
    check(wanted, marked(body, right, wrong), arguments, **how)
    passes(body.replace(FENCE, f"{FENCE} mov.f32 %f2, %f3; mov.b32 %r12, 0;"), arguments, **how)  # the assembler has them there before
    unread = body.replace("setp.eq.u32 %p3", "setp.ne.u32 %p3")  # sums that begin anew may be written behind the fence
    passes(unread.replace(FENCE, f"{FENCE} mov.f32 %f2, 0f00000000;"), arguments, **how)


# ---- lanes, barriers, and who waits for whom

LANES = {
    "a shuffle from a lane that takes no part": (
        "shuffles from lane 20, which does not take part",
        "setp.lt.u32 %p1, %r100, 16; @%p1 shfl.sync.idx.b32 %r1, %r100, <20|12>, 31, 0xffff;",
    ),
    "bra.uni": ("lanes disagree on bra.uni", "setp.lt.u32 %p1, %r100, 16; @%p1 bra<.uni|> over; over:"),
    "a trap": ("the kernel traps", "setp.eq.u32 %p1, %r100, <5|50>; @%p1 trap;"),
    "barrier 16": ("barrier 16", "bar.sync <16|15>;"),
    "a part of a warp at a barrier": ("a barrier of 40 threads", "bar.sync 1, <40|32>;"),
    "registers": ("setmaxnreg 20", "setmaxnreg.dec.sync.aligned.u32 <20|24>;"),
    "registers, not by eight": ("setmaxnreg 41", "setmaxnreg.dec.sync.aligned.u32 <41|40>;"),
    "registers beyond 256": ("setmaxnreg 264", "setmaxnreg.inc.sync.aligned.u32 <264|256>;"),
}


@pytest.mark.parametrize("wanted, body", **rows(LANES))
def test_lanes_and_barriers(wanted, body):
    check(wanted, body, block=(32,))


def test_two_counts_at_a_barrier():
    check(
        "barrier 1 for 64 threads, and others wait at it for 96|barrier 1 for 96 threads, and others wait at it for 64",
        """setp.ge.u32 %p1, %r100, 32; @%p1 bra some; bar.arrive 1, 96; bra over; some: bar.arrive 1, <64|96>; over: bar.sync 2, 64;
        setp.ge.u32 %p2, %r100, 32; @%p2 bar.sync 1, 96;""",
    )


def test_registers_of_a_block():
    said = fault("setmaxnreg.inc.sync.aligned.u32 168;", block=(416,))
    assert "setmaxnreg: warps of the block have 69888 registers, more than 65536" in said
    passes("setmaxnreg.inc.sync.aligned.u32 168;", block=(384,))


DEADLOCKS = {
    "a barrier": (
        "setp.ge.u32 %p1, %r100, 64; @%p1 bra other; bar.sync 1, 96; bra end; other: bar.sync 2, 64; end:",
        [
            "block 0 of the cluster, warp 0, 32 lanes: for barrier 1 (32 threads have come), line 8",
            "block 0 of the cluster, warp 1, 32 lanes: for barrier 1 (64 threads have come), line 8",
            "block 0 of the cluster, warp 2, 32 lanes: for barrier 2 (32 threads have come), line 8",
        ],
    ),
    "mbarriers": (
        """setp.eq.u32 %p1, %r100, 0; @%p1 mbarrier.init.shared::cta.b64 [%r101], 3; @%p1 mbarrier.arrive.shared::cta.b64 _, [%r101];
           bar.sync 0; wait: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r101], 0; @!%p2 bra wait;""",
        [
            "warp 2, 32 lanes: for the mbarrier at 1024 of block 0, parity 0, line 9",
            "the mbarrier at 1024 of block 0 lacks 2 of 3 arrivals and 0 bytes",
        ],
    ),
    "lanes": (
        "setp.eq.u32 %p1, %r100, 9; @%p1 bra some; bar.warp.sync -1;\nsome: bar.sync 0;",
        ["warp 0, 31 lanes: for other lanes of its warp, line 8", "warp 0, 1 lanes: for other lanes of its warp, line 9"],
    ),
    "the cluster": (
        "mov.u32 %r1, %cluster_ctarank; setp.eq.u32 %p1, %r1, 1; @%p1 bar.sync 1, 128; barrier.cluster.arrive; barrier.cluster.wait;",
        [
            "block 0 of the cluster, warp 1, 32 lanes: for the cluster's barrier, line 8",
            "block 1 of the cluster, warp 0, 32 lanes: for barrier 1",
        ],
    ),
}


@pytest.mark.parametrize("name", DEADLOCKS)
def test_deadlocks_tell_who_waits_for_what(name):
    body, wanted = DEADLOCKS[name]
    said = fault(body, block=(96,), grid=(2,), cluster=(2,))
    assert said.startswith("kernel: deadlock: no thread can go on\n") and all(text in said for text in wanted), said


def test_a_loop_without_end():
    assert "more than 5000 instructions" in fault("again: bra again;", most_steps=5000)


# ---- what the machine does not know


def test_an_assertion_and_calls():
    """Functions may be in a module; a call is a fault when it is executed."""
    head = ".extern .func __assertfail (.param .b64 a, .param .b32 line); .func (.param .b32 r) f (.param .b32 x) { ret; }"
    body = """setp.gt.u32 %p1, %tid.x, <40>; @!%p1 bra end; {{ .param .b64 param0; .param .b32 param1; st.param.b64 [param0], 7;
              st.param.b32 [param1+0], 3; call.uni {}, (param0, param1); }} end: ret;"""
    for name, said in (("__assertfail", "an assertion of the kernel fails"), ("f", "an instruction that the machine does not know")):
        text = f".version 8.6\n.target sm_90\n{head}\n.visible .entry kernel() {{ .reg .pred %p<2>; .reg .b32 %r<2>; {body.format(name)} }}"
        Module(text.replace("<40>", "63")).run("kernel", (1,), (64,))
        with pytest.raises(Fault, match=f"{said}\n  at line 5: call.uni {name}, .*\n.* warp 1"):
            Module(text.replace("<40>", "40")).run("kernel", (1,), (64,))


UNKNOWN = [
    "vabsdiff4.u32.u32.u32 %r1, %r2, %r2, %r2",
    "ld.global.b128 %d1, [%d20]",
    "atom.global.add.noftz.f16x2.v2 %r1, [%d20], %r1",
    "ld.global.new.b32 %r1, [%d20]",
    "mma.sp.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 {%f0}, {%r1}, {%r1}, {%f0}, %r1, 0",
    "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%g0}, {%g0}, {%g0}, {%g0}",
    "wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.f16.f16 {%f0}, %d1, %d1, %r1, 0, 0, 1, 1, 0, 0",
    "cp.async.bulk.shared::cluster.global [%r101], [%d20], 16, [%r101]",
    "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%d1, {0, 0}], [%r101]",
    "fence.proxy.tensormap::generic.release.gpu",
    "mbarrier.try_wait.shared::cta.b64 %p1, [%r101], %d1",
    "add.cc.u32 %r1, %r1, %r1",
    "barrier.cluster.sync",
    "ldmatrix.sync.aligned.m16n16.x1.shared.b8 %r1, [%r101]",
    "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r101], 32",
    "cp.async.mbarrier.arrive.shared.b64 [%r101]",
    "shfl.up.b32 %r1, %r1, 1, 0",
]


@pytest.mark.parametrize("text", UNKNOWN, ids=lambda text: text.split()[0])
def test_unknown_instructions_are_told_when_they_are_executed(text):
    said = fault(text + ";", block=(32,))
    assert said.startswith("kernel: an instruction that the machine does not know\n  at line 8: " + text[:190])
    passes(f"setp.ne.u32 %p7, 0, 0; @%p7 bra.uni never; bra.uni over; never: {text}; over:", block=(32,))


@pytest.mark.parametrize(
    "body, wanted",
    [
        ("add.u32 %r1, %r1, %missing_;", "unknown special register %missing_"),
        ("mov.u32 %r1, nothing;", "no such name: nothing"),
        ("bra nowhere;", "no label nowhere"),
        (".magic 4;", "unknown directive .magic"),
        ("add.u32 %r1, %r1 %r1;", "line 8: expected ;"),
    ],
)
def test_programs_that_cannot_be_read(body, wanted):
    assert wanted in fault(body)


def test_a_program_without_an_end():
    module = Module(HEAD + ".visible .entry kernel() { .reg .b32 %r1; mov.u32 %r1, 0; }")
    with pytest.raises(Fault, match="runs behind the kernel's last instruction"):
        module.run("kernel", (1,), (32,))


@pytest.mark.parametrize("body", [
    "mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r4], 1;",
    "@%p1 mbarrier.init.shared::cta.b64 [%r4+8], 1;",
])  # fmt: skip
def test_threads_only_arrive_at_another_blocks_mbarrier(body):
    head = """mov.u32 %r1, %cluster_ctarank; xor.b32 %r3, %r1, 1; setp.eq.u32 %p1, %r100, 0; mapa.shared::cluster.u32 %r4, %r101, %r3;
              @%p1 mbarrier.init.shared::cta.b64 [%r101], 64; barrier.cluster.arrive; barrier.cluster.wait;"""
    foot = "barrier.cluster.arrive; barrier.cluster.wait;"
    how = dict(grid=(2,), cluster=(2,))
    assert "an mbarrier of another block, at which threads can only arrive" in fault(head + body + foot, **how)
    passes(head + body.replace("%r4", "%r101") + foot, **how)
    passes(head + "mbarrier.arrive.shared::cluster.b64 _, [%r4];" + foot, **how)


def test_arrays_may_not_overlap():
    with pytest.raises(ValueError, match="overlap"):
        launch("", [Input(numbers(), FROM), Output(numbers(), FROM + 124)])
    launch("", [Input(numbers(), FROM), Output(numbers(), FROM + 128)])


def test_an_array_may_be_read_and_written():
    counter = InOut(np.array([41], np.uint32))
    passes("red.global.add.u32 [%d20], 1;", [counter], block=(1,))
    assert counter.values[0] == 42 and counter.address is None


ONE_PARAMETER = HEAD + ".visible .entry kernel(.param .u32 p) { ret; }"


@pytest.mark.parametrize(
    "error, wanted, run",
    [
        (ValueError, "must be contiguous", lambda: Output(numbers()[::2])),
        (
            ValueError,
            r"a grid of \[3, 1, 1\] blocks is no multiple of a cluster of \[2, 1, 1\]",
            lambda: passes("", grid=(3,), cluster=(2,)),
        ),
        (TypeError, "1025 threads, and kernel is for 1024", lambda: passes("", block=(1025,))),
        (TypeError, "an argument of 2 bytes for a parameter of 4", lambda: Module(ONE_PARAMETER).run("kernel", (1,), (1,), [np.int16(0)])),
        (TypeError, "2 arguments for 1 parameters of kernel", lambda: Module(ONE_PARAMETER).run("kernel", (1,), (1,), [0, 0])),
    ],
)
def test_a_wrong_call_is_refused(error, wanted, run):
    with pytest.raises(error, match=wanted):
        run()


def test_a_missing_compiler_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("PTXSIM_CACHE", str(tmp_path))
    with pytest.raises(RuntimeError, match="no-such-compiler is not found, and CXX may name another"):
        library.__wrapped__()
