"""Programs that do what they may not: each is stopped, with the reason, the instruction and its place."""

import re

import ml_dtypes
import numpy as np
import pytest
from interpreter import EARLY, LATE, Fault, Input, Module, Output, map_bytes, tensor_map
from snippets import HEAD, launch

FROM, TO = 17 << 40, 18 << 40  # addresses
both = pytest.mark.parametrize("late", [LATE, EARLY], ids=["late", "early"])


def numbers(count=32):
    return np.arange(count, dtype=np.uint32)


def fault(body, arguments=None, **how) -> str:
    """What is said of the program."""
    arguments = [Input(numbers()), Output(numbers())] if arguments is None else arguments
    with pytest.raises(Fault) as caught:
        launch(body, arguments, **{"shared": 1024, "block": (64,)} | how)
    return str(caught.value)


def passes(body, arguments=None, **how):
    arguments = [Input(numbers()), Output(numbers())] if arguments is None else arguments
    launch(body, arguments, **{"shared": 1024, "block": (64,)} | how)


# ---- addresses

ADDRESSES = {  # what is said, the program, what is wrong in it, and how it is right
    "beyond an input": (r"reads outside of all arrays: 0x\w+, byte 128 of an array of 128", "ld.global.b32 %r1, [%d20+128];", "128", "124"),
    "before an input": (r"reads outside of all arrays: 0x\w+, byte -4 of", "ld.global.b32 %r1, [%d20-4];", "-4", "+4"),
    "beyond an output": (r"writes outside of all arrays", "@%p1 st.global.b8 [%d21+128], %r1;", "+128", "+127"),
    "a null pointer": (r"reads outside of all arrays: 0x0", "mov.u64 %d1, 0; ld.global.b32 %r1, [%d1];", "0; ld", "%d20; ld"),
    "an input that is written": (r"writes into an input, at byte 0", "@%p1 st.global.b32 [%d20], %r1;", "d20", "d21"),
    "an output that is not written": (r"reads byte 8 of an array, which nothing has written",
                                      "@%p1 st.global.b64 [%d21], 0; @%p1 ld.global.b32 %r1, [%d21+8];", "+8", "+4"),
    "beyond shared memory": (r"outside of shared memory: 2048 of 1024 to 2048", "@%p1 st.shared.b32 [%r101+1024], 0;", "1024", "1020"),
    "beyond shared memory, generic": (r"outside of shared memory", "cvt.u64.u32 %d1, %r101; cvta.shared.u64 %d1, %d1; @%p1 st.b32 [%d1+1024], 0;",
                                      "1024", "1020"),
    "the first of shared memory": (r"outside of shared memory: 0 of", "mov.u32 %r1, 0; @%p1 st.shared.b32 [%r1], 0;", "0; @", "%r101; @"),
    "shared memory that is not written": (r"reads shared memory at 1024, which nothing has written", "mov.u32 %r1, 0; @%p1 ld.shared.b32 %r1, [%r101];",
                                          "mov.u32 %r1, 0;", "@%p1 st.shared.b32 [%r101], 0;"),
    "half of it": (r"which nothing has written", "@%p1 st.shared.b32 [%r101], 0; @%p1 ld.shared.b64 %d1, [%r101];", "b64 %d1", "b32 %r1"),
    "beyond the parameters": (r"outside of the parameters: byte 16 of 16", "ld.param.b32 %r1, [p0+16];", "16", "12"),
    "a parameter that is written": (r"writes a parameter", "mov.b64 %d1, p0; cvta.param.u64 %d1, %d1; @%p1 st.b32 [%d1], 0;",
                                    "mov.b64 %d1, p0; cvta.param.u64 %d1, %d1;", "mov.b64 %d1, %d21;"),
    "beyond a thread's own memory": (r"outside of the thread's own memory: byte 16 of 16", "st.local.b32 [depot+16], 0;", "+16", "+12"),
    "an unaligned word": (r"is no multiple of 4", "ld.global.b32 %r1, [%d20+2];", "+2", "+4"),
    "an unaligned vector": (r"is no multiple of 16", "ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%d20+8];", "+8", "+16"),
    "an unaligned store": (r"is no multiple of 8", "@%p1 st.shared.v2.b32 [%r101+4], {%r1, %r1};", "+4", "+8"),
    "an unaligned half": (r"is no multiple of 2", "ld.global.b16 %h1, [%d20+5];", "+5", "+6"),
    "an unaligned atomic operation": (r"is no multiple of 4", "@%p1 st.shared.b64 [%r101], 0; @%p1 red.shared.add.u32 [%r101+2], 1;", "+2", "+4"),
    "an unaligned copy": (r"is no multiple of 16", "@%p1 cp.async.cg.shared.global [%r101], [%d20+8], 16; cp.async.wait_all;", "+8", "+16"),
    "an unaligned copy's target": (r"is no multiple of 8", "@%p1 cp.async.ca.shared.global [%r101+4], [%d20], 8; cp.async.wait_all;", "+4", "+8"),
    "more bytes than are copied": (r"copies 17 of 16 bytes", "@%p1 cp.async.cg.shared.global [%r101], [%d20], 16, 17; cp.async.wait_all;", "17", "15"),
    "a copy of odd size": (r"copies 12 bytes", "@%p1 cp.async.ca.shared.global [%r101], [%d20], 12; cp.async.wait_all;", "12", "8"),
    "a copy beyond the input": (r"reads outside of all arrays", "@%p1 cp.async.ca.shared.global [%r101], [%d20+128], 16, 4; cp.async.wait_all;",
                                "128", "112"),
    "an unaligned matrix": (r"a row of a matrix at 1032, which is no multiple of 16",
                            "mad.lo.u32 %r1, %r9, 16, %r101; stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r1+8], {%r2};", "%r1+8", "%r1+16"),
    "a space of another block": (r"an address of another block", "mapa.shared::cluster.u32 %r1, %r101, %r8; @%p1 st.shared::cta.b32 [%r1], 0;",
                                 "cta", "cluster"),
    "no such block": (r"no block 2 in the cluster", "mapa.shared::cluster.u32 %r1, %r101, 2;", "2;", "1;"),
    "mapa of what is not shared": (r"mapa of an address that is not in shared memory", "mapa.u64 %d1, %d20, 1;", "mapa.u64 %d1, %d20, 1",
                                   "mapa.shared::cluster.u32 %r1, %r101, 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", ADDRESSES)
def test_addresses(name):
    """In a cluster of two blocks, of which the second does nothing; thread 0 of the first has %p1."""
    wanted, body, wrong, right = ADDRESSES[name]
    head = """mov.u32 %r1, 0; mov.u32 %r2, 0; mov.u32 %r8, %cluster_ctarank; setp.ne.u32 %p1, %r8, 0; @%p1 bra end; xor.b32 %r8, %r8, 1;
              setp.eq.u32 %p1, %r100, 0; shr.u32 %r9, %r100, 5; and.b32 %r10, %r100, 7; mad.lo.u32 %r9, %r9, 8, %r10;"""
    foot = "end: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
    how = dict(grid=(2,), cluster=(2,), declare=".local .align 8 .b8 depot[16];")
    assert body.count(wrong) == 1
    assert re.search(wanted, fault(head + body + foot, **how))
    passes(head + body.replace(wrong, right) + foot, **how)


def test_a_fault_tells_its_place():
    said = fault("setp.eq.u32 %p1, %r100, 37;\n.loc 1 123 4\n@%p1 ld.global.b32 %r1, [%d20+500];", grid=(3,))
    assert "\n  at line 10: @%p1 ld.global.b32 %r1, [%d20+500]\n" in said
    assert said.startswith("kernel: reads outside") and "of line 123 of the kernel's source" in said
    assert said.endswith("block (0, 0, 0), warp 1, thread 37")


# ---- what warps do to each other

OWN = "mad.lo.u32 %r102, %r100, 4, %r101; xor.b32 %r103, %r100, 32; mad.lo.u32 %r103, %r103, 4, %r101; mov.u32 %r1, 5; setp.eq.u32 %p1, %r100, 0;"
RACES = {
    "a read behind a write": (r"race: reads shared memory at \d+, which warp \d of block 0 of the cluster wrote, and no barrier is between|nothing has",
                              "st.shared.b32 [%r102], 1; # ld.shared.b32 %r1, [%r103];", "#", "bar.sync 0;"),
    "a write behind a read": (r"race: (writes|reads) shared memory at \d+, which warp \d of block 0 of the cluster (reads|wrote), and no barrier",
                              "st.shared.b32 [%r102], 1; bar.sync 0; ld.shared.b32 %r1, [%r103]; # st.shared.b32 [%r102], 2;", "#", "bar.sync 0;"),
    "a write behind a write": (r"race: writes shared memory at \d+, which warp 0 of block 0 of the cluster wrote", "st.shared.b32 [%r101], 1;",
                               "[%r101]", "[%r102]"),
    "bytes of a word": (r"race: writes", "add.u32 %r104, %r101, %r9; # st.shared.b8 [%r104], 1;", "#", "add.u32 %r104, %r101, %r100;"),
    "barriers of different warps": (r"race: reads|nothing has written",
                                    "st.shared.b32 [%r102], 1; shr.u32 %r5, %r100, 5; #add.u32 %r5, %r5, 1; bar.sync %r5, 32; ld.shared.b32 %r1, [%r103];",
                                    "#add.u32 %r5, %r5, 1; bar.sync %r5, 32;", "bar.sync 1, 64;"),
    "an arrival is no wait": (r"race: reads|nothing has written",
                              "st.shared.b32 [%r102], 1; @#%p2 bar.sync 1, 64; @%p2 bar.arrive 1, 64; ld.shared.b32 %r1, [%r103];",
                              "@%p2 bar.arrive 1, 64; ld", "@%p2 bar.sync 1, 64; ld"),
    "a barrier of the warp is none of the block": (r"race: reads|nothing has written", "st.shared.b32 [%r102], 1; bar.warp.sync -1; ld.shared.b32 %r1, [%r103];",
                                                   "bar.warp.sync -1", "bar.sync 0"),
    "an atomic operation and a read": (r"race: (reads|writes)", "@%p1 st.shared.b32 [%r101], 0; bar.sync 0; red.shared.add.u32 [%r101], 1; # ld.shared.b32 %r1, [%r101];",
                                       "#", "bar.sync 0;"),
    "a write and an atomic operation": (r"race: |nothing has written", "@%p1 st.shared.b32 [%r101], 0; # red.shared.add.u32 [%r101], 1;", "#", "bar.sync 0;"),
    "global memory that another warp wrote": (r"race: reads byte \d+ of an array, which warp \d of block 0 of the cluster wrote|nothing has written",
                                              "st.global.b32 [%d10], 3; # ld.global.b32 %r1, [%d11];", "#", "bar.sync 0;"),
    "global memory that two warps write": (r"race: writes byte 0 of an array, which warp 0", "@!%p3 st.global.b32 [%d21], 3;", "@!%p3", "@%p1"),
    "an atomic operation in global memory and a read": (r"race: reads byte 0|nothing has written",
                                                        "@%p1 st.global.b32 [%d21], 3; bar.sync 0; red.global.add.u32 [%d21], 1; # ld.global.b32 %r1, [%d21];",
                                                        "#", "bar.sync 0;"),
}  # fmt: skip


@pytest.mark.parametrize("name", RACES)
def test_races(name):
    wanted, body, wrong, right = RACES[name]
    head = OWN + """and.b32 %r9, %r100, 31; setp.lt.u32 %p2, %r100, 32; setp.eq.u32 %p3, %r100, 99; mul.wide.u32 %d10, %r100, 4; add.u64 %d10, %d10, %d21;
                    xor.b32 %r104, %r100, 32; mul.wide.u32 %d11, %r104, 4; add.u64 %d11, %d11, %d21;"""
    fill = lambda text: text.replace("@#", "@!").replace("#", "")
    assert body.count(wrong) == 1
    arguments = lambda: [Input(numbers()), Output(numbers(64))]
    assert re.search(wanted, fault(head + fill(body), arguments()))
    passes(head + fill(body.replace(wrong, right)), arguments())


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


CLUSTER = {
    "no barrier of the cluster": (r"race: reads|nothing has written", "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; ld", "ld"),
    "a barrier of the block instead": (r"race: reads|nothing has written", "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; ld",
                                       "bar.sync 0; ld"),
    "an arrival that orders nothing": (r"race: reads|nothing has written", "arrive.aligned; barrier.cluster.wait.aligned; ld",
                                       "arrive.relaxed.aligned; barrier.cluster.wait.aligned; ld"),
    "an end while another reads": (r"accesses shared memory of a block that has ended", "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; end",
                                   "end"),
    "no arrival": (r"waits at the cluster's barrier, where it has not arrived", "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; ld",
                   "barrier.cluster.wait.aligned; ld"),
    "two arrivals": (r"arrives twice at the cluster's barrier", "arrive.aligned; barrier.cluster.wait.aligned; ld",
                     "arrive.aligned; barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; ld"),
}  # fmt: skip


@pytest.mark.parametrize("name", CLUSTER)
def test_blocks_of_a_cluster(name):
    wanted, right, wrong = CLUSTER[name]
    body = """mov.u32 %r1, %cluster_ctarank; xor.b32 %r2, %r1, 1; mapa.shared::cluster.u32 %r3, %r101, %r2; st.shared.b32 [%r101], %r1;
              barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; ld.shared::cluster.b32 %r4, [%r3];
              barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; end:"""
    assert body.count(right) == 1
    how = dict(grid=(2,), cluster=(2,), block=(1,))
    assert re.search(wanted, fault(body.replace(right, wrong), **how))
    passes(body, **how)


# ---- cp.async

COPY = "mad.lo.u32 %r102, %r100, 4, %r101; mul.wide.u32 %d10, %r100, 4; add.u64 %d10, %d10, %d20; cp.async.ca.shared.global [%r102], [%d10], 4;"
COPIES = {
    "a read before the wait": (r"reads shared memory at \d+, into which a copy is under way", "cp.async.commit_group; # ld.shared.b32 %r1, [%r102];",
                               "cp.async.wait_group 0;"),
    "a write before the wait": (r"writes shared memory at \d+, into which a copy is under way", "cp.async.commit_group; # st.shared.b32 [%r102], 0;",
                                "cp.async.wait_group 0;"),
    "a wait for too few groups": (r"into which a copy is under way", "cp.async.commit_group; cp.async.wait_group 1; # ld.shared.b32 %r1, [%r102];",
                                  "cp.async.wait_group 0;"),
    "a copy that no group has": (r"into which a copy is under way", "# cp.async.wait_group 0; ld.shared.b32 %r1, [%r102];", "cp.async.commit_group;"),
    "a read without a barrier": (r"race: reads|a copy is under way|nothing has written", "cp.async.wait_all; # ld.shared.b32 %r1, [%r103];", "bar.sync 0;"),
    "a barrier before the wait": (r"race: reads|a copy is under way|nothing has written", "bar.sync 0; cp.async.wait_all; # ld.shared.b32 %r1, [%r103];", "bar.sync 0;"),
}  # fmt: skip


@both
@pytest.mark.parametrize("name", COPIES)
def test_copies_of_threads(name, late):
    wanted, body, right = COPIES[name]
    head = COPY + "xor.b32 %r103, %r100, 32; mad.lo.u32 %r103, %r103, 4, %r101;"
    arguments = [Input(numbers(64))]
    assert re.search(wanted, fault(head + body.replace("#", ""), arguments, late=late))
    passes(head + body.replace("#", right), arguments, late=late)


# ---- copies by tensor maps

MAP = "mov.b64 %d1, p0; cvta.param.u64 %d1, %d1; setp.eq.u32 %p1, %r100, 0; add.u32 %r102, %r101, 128; mad.lo.u32 %r103, %r100, 4, %r102;"
INIT = "@%p1 mbarrier.init.shared::cta.b64 [%r101], 1; fence.mbarrier_init.release.cluster; bar.sync 0;"
EXPECT = "@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r101], 256;"
LOAD = "@%p1 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r102], [%d1, {0, 0}], [%r101];"
WAIT = "wait: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r101], 0; @!%p2 bra wait;"
READ = "ld.shared.b32 %r1, [%r103];"
LOADS = {  # said, what is right, what is wrong
    "a read before the wait": ("a copy is under way|nothing has written|race: reads shared memory at 1152, which a copy that ends at the mbarrier at 1024", WAIT, ""),
    "a write before the wait": ("a copy is under way|race: writes shared memory at 1152, which (a copy|warp 1)", WAIT + READ, "st.shared.b32 [%r103], 1;"),
    "one warp waits": ("a copy is under way|nothing has written|race: reads shared memory at 1280, which a copy", WAIT, "setp.ge.u32 %p4, %r100, 32; @%p4 bra over;" + WAIT + "over:"),
    "the wrong parity": ("a copy is under way|nothing has written|race: reads shared memory at 1152, which a copy", "[%r101], 0;", "[%r101], 1;"),
    "too few bytes expected": (r"all have arrived at the mbarrier at 1024 of block 0, and 128 bytes more than they expect", "256", "128"),
    "too many bytes expected": (r"deadlock: no thread can go on(.*\n)*.*warp 0, 32 lanes: for the mbarrier at 1024 of block 0, parity 0, line \d+"
                                r"(.*\n)*.*the mbarrier at 1024 of block 0 lacks 1 of 1 arrivals and 4 bytes|lacks 0 of 1 arrivals and 4 bytes", "256", "260"),
    "far too many bytes": ("the mbarrier at 1024 of block 0 expects 1048576 bytes", "256", "1048576"),
    "no bytes expected": ("deadlock|a copy is under way|race|more than they expect", ".expect_tx.shared::cta.b64 _, [%r101], 256", ".shared::cta.b64 _, [%r101]"),
    "no arrival": (r"deadlock(.*\n)*.*the mbarrier at 1024 of block 0 lacks 1 of 1 arrivals and -256 bytes", EXPECT, ""),
    "two arrivals": (r"more arrivals at the mbarrier at 1024 of block 0 than the 1", EXPECT, EXPECT + EXPECT),
    "no mbarrier": ("no mbarrier was initialised at 1024", "@%p1 mbarrier.init.shared::cta.b64 [%r101], 1;", ""),
    "an mbarrier that another warp does not know": (r"race: uses the mbarrier at 1024 of block 0, which another warp initialised \(warp 0 of block 0", "bar.sync 0;", ""),
    "an mbarrier for none": ("an mbarrier for 0 arrivals", "[%r101], 1;", "[%r101], 0;"),
    "an mbarrier at an odd place": ("an mbarrier at 1028, which is no multiple of 8", "[%r101], 1;", "[%r101+4], 1;"),
    "an mbarrier twice": ("initialises an mbarrier that is one", "fence.mbarrier_init", "@%p1 mbarrier.init.shared::cta.b64 [%r101], 1; fence.mbarrier_init"),
    "a write over an mbarrier": ("writes shared memory at 1024, which is an mbarrier", READ, "@%p1 st.shared.b32 [%r101], 0;"),
    "a read of an mbarrier": ("reads shared memory at 1024, which nothing has written", READ, "@%p1 ld.shared.b32 %r1, [%r101];"),
    "parity 2": ("waits for parity 2", "[%r101], 0;", "[%r101], 2;"),
    "an odd target": ("copies to 1216, which is no multiple of 128", "[%r102], [%d1", "[%r104], [%d1"),
    "a target beyond shared memory": ("outside of shared memory", "[%r102], [%d1", "[%r105], [%d1"),
    "another rank": ("a tensor map of rank 2", "{0, 0}", "{0, 0, 0}"),
    "no tensor map": ("there is no tensor map at", "mov.b64 %d1, p0;", "mov.b64 %d1, p1;"),
    "a tensor map at an odd place": ("which is no multiple of 64", "cvta.param.u64 %d1, %d1;", "cvta.param.u64 %d1, %d1; add.u64 %d1, %d1, 8;"),
    "a map of the other kind": ("the tensor map is of the other kind", "global.mbarrier", "global.im2col.mbarrier"),
    "a write before the load, without a barrier": ("race: writes|a copy is under way", INIT, INIT + "st.shared.b32 [%r103], 1;"),
    "an end before the copy": ("the blocks ended, and a copy into their shared memory is under way|more arrivals", WAIT + READ, ""),
}  # fmt: skip


def load(body, late):
    """What is said of a program with a tensor map of 2 x 32 words, or ""."""
    how = dict(maps=[tensor_map(FROM, [128], [32, 2], [32, 2], 4)], arrays=[Input(numbers(64).reshape(2, 32), FROM)], late=late)
    try:
        launch(body, [map_bytes(0), bytes(128)], block=(64,), shared=1024, **how)
    except Fault as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", LOADS)
def test_loads_by_tensor_maps(name):
    """What is wrong is found in one of both orders, and what is right passes in both."""
    wanted, right, wrong = LOADS[name]
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
