"""The CUDA calls of the compiled kernels' host code: every launch, every TMA descriptor, and its reaction where CUDA fails."""

import concurrent.futures
import ctypes
import itertools
import math
import random
import re
from typing import Any

import cuda_cases
import cuda_convs
import cuda_launches as host
import pytest
import simt_weight_only
import test_causal_kernel
import test_cuda_gram
from cuda_cases import BYTES, INTERNAL, INVALID, OK, SLOTS, Case
from cuda_launches import ELEMENTS, LIBRARY, STREAM, SWIZZLE, ask, load, prepared, runtime
from test_cuda_families import OWN

from jaxext import _cuda_build, _cuda_module
from jaxext.backends.fields import DTYPES
from jaxext.kernels.launch import SHARED_MEMORY
from jaxext.ops.causal import cuda as cuda_causal
from jaxext.ops.conv import cuda_dense as cuda_conv
from jaxext.ops.conv import cuda_depthwise
from jaxext.ops.scaled import cuda_weight_only

pytestmark = pytest.mark.cuda

MULTIPROCESSORS = [132, 78]  # of the first devices of the runtime; the third is of compute capability 8.0
PORTABLE = ("depthwise", "causal", "weight_only")  # which other GPUs run too
# What the Hopper kernels' host code calls: first to load a kernel; last to make descriptors, the last one only for convolutions.
LOADING = ("cudaGetDevice", "cudaDeviceGetAttribute", "cudaFuncGetAttributes", "cudaFuncSetAttribute")
TMA = (*LOADING, "cudaLaunchKernelEx", "cuTensorMapEncodeTiled", "cuTensorMapEncodeIm2col")
OTHERS = ("cudaGetDevice", "cudaFuncGetAttributes", "cudaLaunchKernelEx")  # and the others'
FRESH = itertools.count(4, 4)  # devices as the first one, on which nothing is loaded


# Cases: a kernel, a problem that it takes, and the bytes of both operands and the result.


def some_matmuls(row, count):
    """Yield products with tails, batches and parts, then one with a result of 2^31 rows and one of far more than 2^31 elements."""
    pick, step, product = random.Random(str(row)), 16 // BYTES[row["operands"]], cuda_cases.pieces if "pieces" in row else cuda_cases.matmul
    for _ in range(count):
        in_parts = row.get("result", "float32") == "float32" and not row.get("fused")
        batch, splits = pick.choice([(1, 1), (3, 1), (70000, 1), *([(1, 2), (1, 4)] if in_parts else [])])
        most = 40 if batch > 3 else 600
        m, n, k = (splits * step * pick.choice([1, 2, pick.randint(1, 40), pick.randint(1, most)]) for _ in "mnk")
        if row["role"] != "tn":  # there TMA reads rows of M
            m = pick.choice([1, 63, m + 1, m])
        yield product(row, batch, m, n, k, splits)
    yield product(row, 1, 2**31 - 2**16, step, step)
    yield product(row, 9, 2**16 + 8 * step, 2**16, 2**16)


def some_raggeds(row, count):
    """Yield random products, then one with a result of 2^31 rows and one of far more than 2^31 elements."""
    pick = random.Random(str(row))
    for _ in range(count):
        B, P, R = pick.choice([(1, 1, 1), (2, 3, 1), (3, 2, 5)])
        n, k = (8 * pick.choice([1, 2, pick.randint(1, 90)]) for _ in "nk")
        yield cuda_cases.ragged(row, B, P, R, pick.choice([1, 63, pick.randint(1, 900)]), n, k, pick.choice([1, 7, 300]))
    yield cuda_cases.ragged(row, 1, 1, 1, 2**31 - 2**16, 8, 8, 1)
    yield cuda_cases.ragged(row, 1, 1, 1, 2**19, 2**12, 2**13, 256)


def some_scaleds(row, count):
    """Yield random products, then one with a result of 2^31 rows and one of far more than 2^31 elements."""
    pick = random.Random(str(row))
    for _ in range(count):
        B, M, steps = pick.choice([1, 3]), pick.choice([1, 63, pick.randint(1, 900)]), pick.randint(1, 9)
        N, each, s = 8 * pick.randint(1, 90), pick.random() < 0.5, pick.choice([1, steps])
        J = N if each else 1
        K = 128 * steps if s > 1 else 16 * pick.randint(1, 90)
        splits = pick.choice([1, 4])
        result = "float32" if splits > 1 else pick.choice(["bfloat16", "float32"])
        yield cuda_cases.scaled(row, (B, M, N, K, M, J, s), (B, M, s), (B, s, J) if each else (B, J, s), result, splits)
    yield cuda_cases.scaled(row, (1, 2**31 - 2**16, 8, 16, 1, 1, 1), (1, 1, 1), (1, 1, 1))
    yield cuda_cases.scaled(row, (9, 2**16 + 3, 2**16, 2**16, 1, 2**9, 2**9), (1, 1, 1), (9, 2**9, 2**9))


def some_convs(row, count):
    """Return random cases of a kernel of dense or of depthwise convolutions."""
    pick, depthwise, found = random.Random(str(row)), "tile_m" not in row, []
    several = lambda least, most: tuple(pick.randint(least, most) for _ in range(row["rank"]))
    while len(found) < count:
        labels: dict[str, Any] = dict(G=pick.choice([1, 3]), C=8 * pick.randint(1, 20), K=8 * pick.randint(1, 40))
        if depthwise:
            labels = dict(G=pick.choice([2, 24, 200]), C=1, K=pick.choice([1, 1, 2, 3, 8, 16]))
        labels |= dict(B=pick.choice([1, 2]), N=pick.randint(1, 9), dtypes=(DTYPES[row["operands"]],) * 3)
        labels |= dict(low=several(-1, 3), high=several(-1, 3), stride=several(1, 3), dilation=several(1, 2))
        problem = cuda_convs.problem(row["role"], several(1, 30), several(1, 5), **labels)
        if min(problem.output) > 0 and (cuda_depthwise if depthwise else cuda_conv).refused(problem) is None:
            table = [row | {"operands": problem.dtypes[0]}]
            candidates = cuda_depthwise.candidates(problem) if depthwise else cuda_conv.candidates(problem, table)
            found.append(cuda_cases.conv(row, problem, pick.choice(candidates)))
    return iter(found)


def some_causals(row, count):
    """Yield random cases, then one of far more than 2^31 elements."""
    pick, most = random.Random(str(row)), 31 if row["role"] == "forward" else 8
    sizes = [(pick.randint(1, 9), pick.randint(1, 3000), pick.choice([7, 24, 200])) for _ in range(count)]
    for B, T, C in [*sizes, (9, 2**16, 2**13)]:
        given = {name: pick.random() < 0.5 for name in ("bias", "state", "idx")}
        problem = test_causal_kernel.a_problem(row["role"], pick.randint(1, most), dtype=row["operands"], B=B, T=T, C=C, **given)
        yield cuda_cases.causal(problem, pick.choice(cuda_causal.candidates(problem)))


def some_weight_onlys(row, count):
    """Products of few rows, or of many, whose kernels have tiles.  Yield random cases, then one of far more than 2^31 elements."""
    pick, many, dtype = random.Random(str(row)), "tile_m" in row, str(DTYPES.get(row["operands"], row["operands"]))
    draw = lambda most, step=1: step * pick.randint(1, most)
    sizes = [(draw(9), draw(600 if many else 64), draw(90, 32), draw(90, 32 if many else 64)) for _ in range(count)]
    for B, M, N, K in [*sizes, (9, 2**16, 2**18, 2**17) if many else (9, 64, 2**18, 2**20)]:
        S, result = pick.choice([1, K // 32] if many else [1, K // 64, K // 32]), pick.choice([dtype, "fp32"])
        problem = simt_weight_only.a_problem(M, N, K, S, row["bits"], dtype, result, B, arch=90 if many else 80)
        if many:
            tile = dict(tile_m=row["tile_m"], tile_n=row["tile_n"])
            candidates = [cuda_weight_only.WeightOnlyConfig(**tile, splits=splits) for splits in (1, 1, 4)]
        else:
            candidates = cuda_weight_only.candidates(problem)
        yield cuda_cases.weight_only(problem, pick.choice(candidates))


# Family of kernels -> its cases, the rows for which there are some, and how many for each.
SOME = {
    "matmul": (some_matmuls, host.MATMULS, 8),
    "pieces": (some_matmuls, host.PIECES, 8),
    "ragged": (some_raggeds, host.RAGGEDS, 8),
    "scaled": (some_scaleds, host.SCALEDS, 8),
    **{name: (family.some, host.ROWS[name], 8) for name, family in OWN.items()},
    "conv": (some_convs, host.CONVS, 4),
    "depthwise": (some_convs, host.DEPTHWISE, 4),
    "causal": (some_causals, host.CAUSALS, 4),
    "weight_only": (some_weight_onlys, host.WEIGHT_ONLYS, 4),
    "wide_weight_only": (some_weight_onlys, host.WIDE_WEIGHT_ONLYS, 4),
}


def one_of_each() -> dict[str, Case]:
    return {name: next(some(rows[0], 1)) for name, (some, rows, _) in SOME.items()}


# What CUDA wants.


def check_launch(launch, multiprocessors, case):
    grid, block, cluster = launch["grid"], launch["block"], launch["cluster"]
    assert 1 <= grid[0] < 2**31 and 1 <= grid[1] <= 65535 and 1 <= grid[2] <= 65535
    assert 1 <= math.prod(block) <= 1024
    assert all(blocks % side == 0 for blocks, side in zip(grid, cluster, strict=True))
    assert launch["stream"] == STREAM
    if launch["shared"] > 48 << 10:  # a kernel of Hopper's
        assert launch["carveout"] == (100 if 2 * (launch["shared"] + 1024) <= 228 << 10 else -1), "as many blocks as fit are to be there"
    elif launch["carveout"] != -1:  # two blocks, on devices that have 100 KB or more
        assert 2 * (launch["shared"] + 1024) <= launch["carveout"] << 10
    assert launch["shared"] <= SHARED_MEMORY[90]
    assert launch["shared"] <= max(48 << 10, launch["allowed"]), "more shared memory than was asked for on this device"
    if case.family == "matmul":
        assert math.prod(grid) <= multiprocessors, "blocks stay, one on each multiprocessor of the device at most"
    if case.family in ("ragged", "scaled", *OWN):
        assert math.prod(grid) * launch["shared"] <= multiprocessors * SHARED_MEMORY[90], "blocks stay, as many as there is memory for"


def check_descriptor(d, case):
    """The rules that cuTensorMapEncodeTiled and cuTensorMapEncodeIm2col document, and that nothing beside the array can be reached."""
    size, rank = ELEMENTS[d["type"]], len(d["sizes"])
    assert d["aligned"], "where the descriptor lies"
    assert d["address"] % 16 == 0
    assert all(1 <= extent <= 2**32 for extent in d["sizes"])
    assert all(stride % 16 == 0 and stride < 2**40 for stride in d["strides"])
    assert d["box"][0] * size % 16 == 0 and d["box"][0] * size <= SWIZZLE[d["swizzle"]]
    assert all(1 <= step <= 8 for step in d["steps"])
    if d["descriptor"] == "tiled":
        assert rank <= 5 and all(1 <= extent <= 256 for extent in d["box"])
    else:
        assert d["box"][0] <= 256 and d["box"][1] <= 1024  # channels, pixels
        corner = 1 << {3: 15, 4: 7, 5: 4}[rank]
        assert all(-corner <= at < corner for at in d["lower"] + d["upper"])
    name = next(name for name, address in case.addresses.items() if address >> 44 == d["address"] >> 44)
    end = d["address"] + sum((extent - 1) * stride for extent, stride in zip(d["sizes"], [size, *d["strides"]], strict=True)) + size
    begin, size = case.addresses[name], case.bytes[name]
    assert begin <= d["address"] and end <= begin + size


@pytest.mark.parametrize("device", [0, 1])
def test_what_is_asked_is_what_cuda_takes(device):
    """The test runs on two devices of one process, so that what was set on the first does not stand for the second."""
    seen = set()
    for case in (case for some, rows, count in SOME.values() for row in rows for case in some(row, count)):
        status, asked = ask(case, device)
        assert status == OK, f"{case}: {asked}"
        for entry in asked:
            try:
                check_descriptor(entry, case) if "descriptor" in entry else check_launch(entry, MULTIPROCESSORS[device], case)
            except AssertionError as error:
                raise AssertionError(f"{error}\n{entry}\n{case}") from None
        assert all(entry["relaxed"] for entry in prepared() if "kernel" in entry), "loaded, or set, while XLA may capture"
        launches = [entry for entry in asked if "kernel" in entry]
        assert launches and all(launch["device"] == device for launch in launches)
        assert "kernel" in asked[-1], "descriptors are made before the launch that takes them"
        seen |= {launch["kernel"] for launch in launches}
    assert not runtime().CapturesRelaxed(), "loading leaves the mode of capturing as it was"
    assert (
        len(seen)
        >= sum(map(len, (host.MATMULS, host.RAGGEDS, host.SCALEDS, host.GRAMS, host.WIDE_WEIGHT_ONLYS, host.CONVS)))
        + len(host.PIECES) // 3
        + len(host.DEPTHWISE) // 2
    )


def id_of(row):
    names = ("role", "operands", "second", "bits", "result", "tile_m", "tile_n", "pieces", "fused")
    return "-".join(str(row[name]) for name in names if name in row)


def described_cases():
    """A case for each kernel that takes descriptors, and what is known of boxes, from their neighbours on, and of the launch."""
    B, M, N, K = 3, 161, 224, 288
    of_row = lambda row, case, **known: pytest.param(case, known, id=f"{case.target}-{id_of(row)}")
    yield from (of_row(row, cuda_cases.matmul(row, B, M - 1, N, K)) for row in host.MATMULS)
    for row in host.PIECES:
        outer, inner = {"c": (M - 1, N), "a": (M - 1, K), "b": (K, N)}[SLOTS[row["role"]][2]]
        tiles = -(-outer // 128) * -(-inner // 128)
        yield of_row(row, cuda_cases.pieces(row, B, M - 1, N, K), boxes=[[32], [32]], grid=[B * tiles, 1, 1])
    yield from (of_row(row, cuda_cases.ragged(row, 2, 3, 5, M - 1, N, K, 7)) for row in host.RAGGEDS)
    yield from (of_row(row, cuda_cases.scaled(row, (B, M, N, K, 1, 1, 1), (1, 1, 1), (1, 1, 1))) for row in host.SCALEDS)
    for name, family in OWN.items():
        for row in host.ROWS[name]:
            case, known = family.described(row, B, M - 1, N)
            yield of_row(row, case, **known)
    for row in host.WIDE_WEIGHT_ONLYS:
        problem = simt_weight_only.a_problem(M, N, K, 9, row["bits"], DTYPES[row["operands"]], B=B)
        config = cuda_weight_only.WeightOnlyConfig(tile_m=row["tile_m"], tile_n=row["tile_n"])
        yield of_row(row, cuda_cases.weight_only(problem, config), grid=[B * -(-M // row["tile_m"]), 1, 1])


@pytest.mark.parametrize(("case", "known"), [*described_cases()])
def test_descriptors_are_the_arrays(case, known):
    """Neighbours, rows or columns, and all matrices, each with its stride: of both factors, of all but the bias if there is an epilogue."""
    others = known.get("loaded", [*case.operands][:2])
    names = [name for name in case.arrays if name != "bias"] if case.family == "matmul" else others
    status, (*descriptors, launch) = ask(case)
    assert status == OK
    want = []
    for name in names:
        dtype, (*matrices, outer, inner) = case.arrays[name]
        strides = [inner * BYTES[dtype], outer * inner * BYTES[dtype]]
        want.append((case.addresses[name], [inner, outer, math.prod(matrices)], strides))
    assert sorted((entry["address"], entry["sizes"], entry["strides"]) for entry in descriptors) == sorted(want)
    for entry, box in zip(descriptors, known.get("boxes", [[]] * len(names)), strict=True):
        assert entry["box"][: len(box)] == box
    assert {name: value for name, value in known.items() if name not in ("boxes", "loaded")}.items() <= launch.items()


@pytest.mark.parametrize("row", host.GRAMS, ids=id_of)
def test_half_of_the_tiles_are_launched(row):
    """The device has enough multiprocessors for all blocks."""
    rows = 2 * row["tile_m"]
    for count in (1, 2, 3):
        status, (*_, launch) = ask(test_cuda_gram.case(row, 1, count * rows, 64, row["operands"]))
        wide = [-(-(i + 1) * rows // row["tile_n"]) for i in range(count)]
        assert status == OK and launch["grid"] == [2, sum(wide), 1]


def test_a_wide_sum_of_nothing_reads_nothing():
    """There are no descriptors of arrays without elements."""
    for row in host.WIDE_WEIGHT_ONLYS:
        config = cuda_weight_only.WeightOnlyConfig(tile_m=row["tile_m"], tile_n=row["tile_n"])
        problem = simt_weight_only.a_problem(70, 64, 0, 1, row["bits"], DTYPES[row["operands"]])
        status, (*descriptors, _) = ask(cuda_cases.weight_only(problem, config))
        assert status == OK and not descriptors


@pytest.mark.parametrize("row", host.MATMULS, ids=id_of)
def test_no_block_is_launched_in_vain(row):
    """8 x 8 tiles became 16 x 8: CUTLASS fills bands of tiles up, which were as wide as can be."""
    m, n = 8 * row["tile_m"], 8 * row["tile_n"]
    sizes: dict[str, Any] = dict(zip({"nn": "MNK", "nt": "MKN", "tn": "KNM"}[row["role"]], (m, n, 64), strict=True))
    status, (*_, launch) = ask(cuda_cases.matmul(row, 1, **sizes))
    assert status == OK and math.prod(launch["grid"]) == 64


def test_bands_cost_few_rounds():
    """They are the widest of which that is true, where there are several rounds."""
    cdiv = lambda a, b: -(-a // b)

    def rounds(band, rows, columns, pair, batch, multiprocessors):
        return cdiv(cdiv(rows, band * pair) * band * pair * cdiv(columns, band) * band * batch, multiprocessors)

    seen = set()
    for sizes in itertools.product((1, 7, 8, 17, 32, 96), (2, 9, 16, 40), (1, 2), (1, 5), MULTIPROCESSORS):
        band = runtime().BandOf(*map(ctypes.c_int64, sizes))
        seen.add(band)
        cheap = [wide for wide in (1, 2, 4, 8) if rounds(wide, *sizes) <= 9 / 8 * rounds(1, *sizes)]
        assert band == (max(cheap) if rounds(1, *sizes) > 1 else 1), sizes
    assert seen == {1, 2, 4, 8}
    assert runtime().BandOf(*map(ctypes.c_int64, (32, 16, 2, 1, 132))) == 8  # 4096 x 4096 in tiles of 128 x 256
    assert runtime().BandOf(*map(ctypes.c_int64, (2**24, 32, 2, 1, 132))) == 8


# Where CUDA fails.


OF_FAMILIES = {name: OTHERS if name in PORTABLE else TMA if name == "conv" else TMA[:-1] for name in SOME}
CALLED = [(name, function) for name, functions in OF_FAMILIES.items() for function in functions]


@pytest.mark.parametrize("name, function", CALLED)
def test_errors_say_what_failed(capfd, name, function):
    """An error in any stage is reported, and the next call of any kernel is not blamed for it."""
    device = next(FRESH)
    for call in (load, ask) if function in LOADING else (ask,):
        status, message = call(one_of_each()[name], device, function)
        assert status == INTERNAL
        if "TensorMap" in function:
            assert message.startswith(f"{name}: the driver refuses a TMA descriptor, CUDA error ")
        else:
            said = "the launch failed" if name in PORTABLE else "the kernel does not load" if "Func" in function else function
            assert message == f"{name}: {said}: not permitted, says the test"
        assert not runtime().Remembers() and not runtime().CapturesRelaxed()
    assert [ask(case, device)[0] for case in one_of_each().values()] == [OK] * len(SOME)


def test_kernels_of_hopper_want_hopper():
    """The device's own word counts, not that for which the program was compiled."""
    for name, case in one_of_each().items():
        if name in PORTABLE:
            continue
        for call in (load, ask):
            assert call(case, device=2) == (INVALID, f"{name}: compute capability of the device is 8.0, want 9.0")


def test_threads_do_not_hear_of_one_anothers_failures(capfd):
    """Each device has a thread of its own, as when XLA calls."""
    case = one_of_each()["matmul"]
    answers = lambda device, failing: [ask(case, device, failing)[0] for _ in range(20)]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        right, wrong = pool.submit(answers, 0, ""), pool.submit(answers, 1, "cuTensorMapEncodeTiled")
    assert (right.result(), wrong.result()) == ([OK] * 20, [INTERNAL] * 20)


def test_the_library_says_what_it_is():
    """CMakeLists.txt links that of another build (JAXEXT_KERNELS) only if it is of the same sources, and takes its architectures from it:
    kernels of older sources were linked without a word, and kernels for other architectures were called."""
    runtime()  # skips without a library
    said = re.findall(rb"jaxext kernels of (\w+) for ([\w,-]+)", LIBRARY.read_bytes())
    assert said == [(_cuda_build.SOURCES.encode(), _cuda_module.archs.encode())]
