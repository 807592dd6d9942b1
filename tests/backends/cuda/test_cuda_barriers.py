"""The Hopper kernels' barriers as their sources have them.  CUTLASS's own have no "memory" clobber, so a compiler may move plain accesses
of shared memory across them: every kernel takes those of csrc/common/barriers_sm90.cuh.  Needs no CUDA.
"""

import pathlib
import re

import pytest

CSRC = pathlib.Path(__file__).parents[3] / "csrc"
OURS = "barriers_sm90.cuh"
SOURCES = {path.name: path.read_text() for path in sorted(CSRC.glob("*/*.cu*")) if path.name != OURS}
HEADER = (CSRC / "common" / OURS).read_text()
BYPASS = re.compile(
    r"cutlass::arch::(?:Cluster\w*Barrier|NamedBarrier|fence_)|\b(?:consumer|producer)_(?:try_)?(?:wait|acquire|release|commit)\(|arch/barrier\.h"
)
# What a call of CUTLASS's in the header has beside it.
BEFORE, AFTER = "arrive|arrive_and_expect_tx|sync|fence_barrier_init|fence_view_async_shared|consumer_release", "wait|sync|consumer_wait"
CALL = re.compile(r"^\s*(?:Wrapped::|cutlass::arch::(?:NamedBarrier::)?|pipeline\.)(\w+)\(.*\);$")


def bypasses(sources) -> list[str]:
    """The lines that name CUTLASS's barriers, fences or pipelines themselves."""
    return [f"{name}: {line.strip()}" for name, text in sources.items() for line in text.splitlines() if BYPASS.search(line)]


def unordered(header) -> list[str]:
    """The calls in our header that a compiler may move plain accesses across."""
    lines = header.splitlines()
    found = []
    for i, line in enumerate(lines):
        if not (call := CALL.match(line)):
            continue
        before, after = ("KeepOrder();" == lines[at].strip() for at in (i - 1, i + 1))
        if (re.fullmatch(BEFORE, call[1]) and not before) or (re.fullmatch(AFTER, call[1]) and not after):
            found.append(line.strip())
    return found


def test_kernels_take_our_barriers():
    assert not bypasses(SOURCES)


def test_our_barriers_keep_the_order():
    called = {call[1] for line in HEADER.splitlines() if (call := CALL.match(line))}
    assert called == {*f"{BEFORE}|{AFTER}".split("|")}
    assert not unordered(HEADER)
    assert re.search(r'void KeepOrder\(\) \{ asm volatile\("" ::: "memory"\); \}', HEADER)


@pytest.mark.parametrize(
    ("name", "ours", "cutlass"),
    [
        ("pieces_sm90.cuh", "Barrier::Wait(&storage.full", "cutlass::arch::ClusterTransactionBarrier::wait(&storage.full"),
        ("pieces_sm90.cuh", "FenceWrites()", "cutlass::arch::fence_view_async_shared()"),
        ("wide_weight_only.cuh", "Barrier::Arrive(", "cutlass::arch::ClusterBarrier::arrive("),
        ("ragged_sm90.cuh", "WaitForStage(pipeline, state)", "pipeline.consumer_wait(state)"),
        ("ragged_sm90.cuh", "ReleaseStage(pipeline, released)", "pipeline.consumer_release(released)"),
        ("gram_sm90.cuh", "SyncThreads(128, ", "cutlass::arch::NamedBarrier::sync(128, "),
    ],
)
def test_one_of_cutlass_is_found(name, ours, cutlass):
    assert ours in SOURCES[name]
    (line, *_) = bypasses(SOURCES | {name: SOURCES[name].replace(ours, cutlass)})
    assert line.startswith(name) and cutlass in line


def test_one_that_keeps_no_order_is_found():
    places = [place.span() for place in re.finditer(r"^ +KeepOrder\(\);\n", HEADER, re.MULTILINE)]
    assert len(places) == 9
    for begin, end in places:
        assert len(unordered(HEADER[:begin] + HEADER[end:])) == 1
