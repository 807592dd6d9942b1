"""Small CUDA kernels, whose results are known, and faults where a barrier is dropped."""

import functools
import pathlib
import re
import shutil
import subprocess

import ml_dtypes
import numpy as np
import pytest
from ptxsim import LATE, Array, Fault, Input, Module, Output, map_bytes, tensor_map
from snippets import both

NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
RNG = np.random.default_rng(0)

pytestmark = pytest.mark.skipif(NVCC is None, reason="no nvcc here")


@functools.cache
def kernels() -> Module:
    source = pathlib.Path(__file__).parent / "small.cu"
    done = subprocess.run([str(NVCC), "-ptx", "-arch=sm_90a", "-std=c++17", source, "-o", "-"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    module = Module(done.stdout)
    assert not (without_test := module.unverified_opcodes()), without_test
    return module


def zeros(shape, dtype) -> Array:
    """Zeros that a kernel wrote, so that another may add to them."""
    array = Output(np.ones(shape, dtype))
    kernels().run("Zero", (2,), (-(-array.values.size // 2),), [array, np.int32(array.values.size)])
    return array


def test_sum():
    values, total = Input(RNG.integers(-9, 10, 1000).astype(np.float32)), zeros(1, np.float32)
    kernels().run("Sum", (3,), (96,), [values, np.int32(1000), total])
    assert total.values[0] == values.values.sum()
    assert (total.written == 4).all()  # once by each launch's block


def test_transpose():
    matrix, result = Input(RNG.integers(0, 1000, (45, 70)).astype(np.int32)), Output(np.zeros((70, 45), np.int32))
    kernels().run("Transpose", (3, 2), (32, 8), [matrix, np.int32(45), np.int32(70), result])
    np.testing.assert_array_equal(result.values, matrix.values.T)
    assert (result.written == 1).all()


def test_compact():
    values, kept, count = Input(RNG.integers(0, 1000, 160).astype(np.int32)), Output(np.zeros(160, np.int32)), Output(np.zeros(1, np.int32))
    kernels().run("Compact", (1,), (160,), [values, kept, count])
    want = values.values[values.values % 2 == 0]
    np.testing.assert_array_equal(kept.values[: count.values[0]], want)
    assert kept.written.sum() == want.nbytes


def test_histogram():
    values, counts = Input(RNG.integers(0, 256, 999).astype(np.uint8)), zeros(256, np.uint32)
    kernels().run("Histogram", (2,), (64,), [values, np.int32(999), counts])
    np.testing.assert_array_equal(counts.values, np.bincount(values.values, minlength=256))


def test_threads_that_diverge_meet_again():
    values, steps, longest = Input(np.arange(1, 65, dtype=np.uint32)), Output(np.zeros(64, np.uint32)), Output(np.zeros(2, np.uint32))
    kernels().run("Collatz", (1,), (64,), [values, steps, longest])

    def collatz(n):
        return 0 if n == 1 else 1 + collatz(3 * n + 1 if n % 2 else n // 2)

    want = [collatz(n) for n in range(1, 65)]
    assert steps.values.tolist() == want
    assert longest.values.tolist() == [max(want[:32]), max(want[32:])]


@both
def test_stencil(late):
    values, sums = Input(RNG.integers(-9, 10, 640).astype(np.float32)), Output(np.zeros(640, np.float32))
    kernels().run("Stencil", (1,), (128,), [values, np.int32(640), sums], late=late)
    np.testing.assert_array_equal(sums.values, np.convolve(values.values, [1, 1, 1], "same"))


@both
def test_tensor_memory_accelerator(late):
    """Tiles that stand out at both ends: zeros are read there, and nothing is written."""
    matrix, result = Input(RNG.integers(-9, 10, (40, 68)).astype(np.float32)), Output(np.zeros((40, 68), np.float32))
    matrix.address, result.address = 1 << 40, 2 << 40
    maps = [tensor_map(array.address, [68 * 4], [68, 40], [32, 16], 4) for array in (matrix, result)]
    arguments = [map_bytes(0), map_bytes(1)]
    kernels().run("Twice", (3, 3), (64,), arguments, arrays=[matrix, result], maps=maps, late=late)
    np.testing.assert_array_equal(result.values, 2 * matrix.values)
    assert (result.written == 1).all()


def test_cluster():
    sums, following = Output(np.zeros(8, np.int32)), Output(np.zeros(8, np.int32))
    kernels().run("Neighbours", (8,), (32,), [sums, following], cluster=(4,))
    assert sums.values.tolist() == [14] * 4 + [126] * 4
    assert following.values.tolist() == [0, 1, 4, 9, 16, 25, 36, 49]


def test_narrow_types_round_as_numpy_does():
    bits = RNG.integers(0, 1 << 32, 3000, dtype=np.uint32).view(np.float32)
    near_one = RNG.standard_normal(1000) * 2.0 ** RNG.integers(-20, 10, 1000)
    values = np.concatenate([bits[~np.isnan(bits)], near_one.astype(np.float32)])
    rounded = Output(np.zeros((len(values), 4), np.float32))
    kernels().run("Narrow", (-(-len(values) // 128),), (128,), [Input(values), np.int32(len(values)), rounded])
    with np.errstate(over="ignore"):
        for column, dtype in enumerate([ml_dtypes.bfloat16, np.float16]):
            np.testing.assert_array_equal(rounded.values[:, column], values.astype(dtype).astype(np.float32))
        for column, dtype in [(2, ml_dtypes.float8_e4m3fn), (3, ml_dtypes.float8_e5m2)]:
            largest = np.float32(ml_dtypes.finfo(dtype).max)
            np.testing.assert_array_equal(rounded.values[:, column], np.clip(values, -largest, largest).astype(dtype).astype(np.float32))


WITH_BARRIERS = {
    "Sum": test_sum,
    "Transpose": test_transpose,
    "Compact": test_compact,
    "Histogram": test_histogram,
    "Stencil": functools.partial(test_stencil, LATE),
    "Twice": functools.partial(test_tensor_memory_accelerator, LATE),
}


@pytest.mark.parametrize("name", WITH_BARRIERS)
def test_each_barrier_is_needed(name, monkeypatch):
    before, entry, rest = kernels().ptx.partition(f".entry {name}(")
    kernel, following, others = rest.partition(".entry ")
    barriers = [*re.finditer(r"bar\.sync\s+0;", kernel)]
    assert barriers
    for barrier in barriers:
        broken = Module(before + entry + kernel[: barrier.start()] + kernel[barrier.end() :] + following + others)
        monkeypatch.setattr(f"{__name__}.kernels", lambda broken=broken: broken)
        with pytest.raises(Fault, match="race|nothing has written|under way|which another warp initialised|async proxy"):
            WITH_BARRIERS[name]()
