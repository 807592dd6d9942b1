"""Kernels where numbers of 32 bits end: on arrays of about 2^31 elements and more, nearly all zeros.

Only the last programs of a launch are interpreted; what they read is drawn, and what they write is compared.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import harness
import numpy as np
import pytest
import test_conv
import test_depthwise
import test_matmul
import triton
import triton.language as tl
from test_depthwise import DepthwiseCall
from test_matmul import MatmulCall

from jaxext.backends.triton.interpreter import _Tensor, interpret, interpreting
from jaxext.kernels import conv, depthwise, matmul
from jaxext.kernels.conv.kernel import first_tap
from jaxext.kernels.geometry import Axis
from jaxext.kernels.launch import SHARED_MEMORY

UNPACKED = dataclasses.replace(test_conv.PACKED, packed=False)


def check_corner(call, corner, folder, programs=None) -> None:
    """`corner` is the call of the last rows, columns, channels or images alone; the others are zeros."""
    operands, dtypes = corner.operands(), call.problem.dtypes
    (want,) = corner.results(operands)

    def at_the_end(slot, dtype, shape, values: Any = 0):
        return harness.Sparse(call.problem.shapes[slot], dtype, harness.corner(shape), values)

    arrays = {slot: at_the_end(slot, dtype, x.shape, x) for (slot, x), dtype in zip(operands.items(), dtypes, strict=False)}
    result = at_the_end(call.open[call.problem.role], dtypes[2], want.shape)
    harness.check(harness.run_large(call.launch, arrays, result, folder, programs), want)


# What is large -> B, rows, columns, depth; and the step in depth, so that there are few of them to interpret.
PRODUCTS = {
    # in the roles in which they are read along their columns a step is 2^31 elements
    "left": (1, 2**22 + 9, 16, 520, 512),
    "right": (1, 16, 2**22 + 9, 520, 512),
    "result": (1, 2**16 + 9, 2**15, 16, 32),
    "all batches together": (2**15 + 2, 256, 16, 256, 256),
}


@pytest.mark.parametrize("role", test_matmul.ROLES)
@pytest.mark.parametrize("name", PRODUCTS)
def test_the_last_tile_of_a_product(name, role, tmp_path):
    """It reads all of the depth."""
    *sizes, step = PRODUCTS[name]
    dtypes = ("fp8e5", "fp8e5", "bf16") if name == "result" else test_matmul.INTEGERS

    def a_call(B, rows, cols, depth):
        sizes = {"nn": (B, rows, cols, depth), "nt": (B, rows, depth, cols), "tn": (B, depth, cols, rows)}[role]
        return MatmulCall(test_matmul.a_problem(role, sizes, dtypes), matmul.Config(tile_m=16, tile_n=16, tile_k=step))

    _, rows, cols, depth = sizes
    check_corner(a_call(*sizes), a_call(1, rows % 16 or 16, cols % 16 or 16, depth), tmp_path)


@pytest.mark.skipif(not interpreting(), reason="what is too large is found when the kernel is traced")
def test_a_band_of_more_tiles_than_32_bits_number():
    """Eight rows of tiles were a band even where there is one row: their number was an unsigned one, by which Triton does not divide."""
    problem = test_matmul.a_problem("nn", (1, 1, 2**32, 1), test_matmul.INTEGERS)
    launch = matmul.launch(problem, matmul.Config(tile_m=16, tile_n=16, tile_k=32))
    a, b, c = np.full((1, 1), 3, np.int8), np.arange(16, dtype=np.int8), np.zeros(16, np.int32)  # what the first program touches
    interpret(dataclasses.replace(launch, grid=(1,)), a, b, c)
    harness.check(c, 3 * np.arange(16.0))


@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_a_depth_beyond_the_end_of_the_last_split_keeps_its_sign(arch):
    """The last of 132 splits of a sum of almost 2^31 products goes some thousands beyond it: as negative numbers those were inside."""
    for depth in (2**31 - 64, 2**31 - 2**15, 2**31 - 2**15 - 1, 2**31 - 2**20):
        problem = test_matmul.a_problem("nn", (1, 1, 1, depth), ("bf16",) * 3, arch=arch)
        for config in matmul.candidates(problem):
            _, _, steps = matmul.tiles(problem, config)
            assert problem.index == "int64" or config.splits * steps * config.tile_k <= 2**31


DEPTHWISE = {
    # a strip's row of sources starts beside the array, whose own offsets have 32 bits; its did not
    "just below 2^31 elements": test_depthwise.problem((31,), (7,), G=2**31 // 248 * 8, low=3, high=3),
    "beyond 2^31 elements": test_depthwise.problem((9,), (3,), G=2**28, low=2),
    "beyond 2^31 elements, by images": test_depthwise.problem((37,), (3,), G=64, N=2**20, low=1, high=1),
    # the one that a GPU has memory for beside the others: the result is small, or the sources of a small one are
    "beyond 2^31 elements, mostly of one array": test_depthwise.problem((32,), (3,), G=64, N=2**20 + 64, stride=6),
    "beyond 2^31 elements, with phases": test_depthwise.problem((9,), (4,), G=2**28, stride=2, low=1, high=1, input_dilation=3),
    # the number of a filter, and that of an image, times channels was a product of 32 bits
    "beyond 2^31 filters": test_depthwise.problem((1,), (1,), G=2**16, B=2**15 + 8),
    "beyond 2^31 images": test_depthwise.problem((1,), (1,), G=2, B=2**16, N=2**15 + 64),
}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("role", test_depthwise.ROLES)
@pytest.mark.parametrize("name", DEPTHWISE)
def test_the_last_channels_and_images(name, role, tmp_path):
    case = test_depthwise.of_role(DEPTHWISE[name], role, "bf16")
    call = DepthwiseCall.smallest(case, pieces=1, strips=64)  # a tile takes the last images whole
    if role == "wgrad":  # so does a part of the sum
        call = DepthwiseCall.smallest(case, pieces=1, strips=64, splits=max(1, depthwise.strips(case, call.config) // 64))
    programs = range(call.launch.grid[0] - 1, -1, -1)
    if role == "wgrad":  # the last of each piece
        programs = programs[:: -(-case.G // call.config.tile_g)][: depthwise.filter_pieces(case, call.config)]
    else:  # the last of each phase
        phases = case.axes[2].period
        programs = programs[:: call.launch.grid[0] // (case.B * phases)][:phases]
    check_corner(call, call.with_problem(B=1, N=min(case.N, 2), G=min(case.G, 8)), tmp_path, programs)


@pytest.mark.parametrize(
    "config, axis, many",
    [
        (UNPACKED, 0, dict(N=17)),
        (test_conv.PACKED, 0, dict(N=17)),
        (test_conv.PACKED, 1, dict(N=17)),
        (UNPACKED, 2, dict(N=17)),
        (UNPACKED, 2, dict(N=1, B=3)),
    ],
)
@pytest.mark.parametrize("role", test_conv.ROLES)
def test_sources_of_over_2_to_the_31_elements(role, config, axis, many, tmp_path):
    """Each image has one place, its last, that meets a target.  A plane's number, image by depth, once wrapped at 2^31."""
    count = math.prod(many.values())
    length = 2**31 // (count - 1)

    def along(long, others):
        return tuple(long if i == axis else others for i in range(3))

    window: dict[str, Any]
    if role == "dgrad":  # from a long output into an input of one
        window = dict(input=(1, 1, 1), padding=along((length - 1, 0), (0, 0)))
    else:
        window = dict(input=along(length, 1), stride=along(length, 1), padding=along((1 - length, 0), (0, 0)))
    problem = test_conv.a_problem(role, **many, C=1, K=1, filter=(1, 1, 1), dtypes=("i8", "i8", "i32"), **window)
    numbers = np.arange(1, count + 1).reshape(problem.B, problem.N)
    operands = {}
    for slot in {*"xwy"} - {test_conv.OPEN[role]}:
        size = problem.shapes[slot]
        place = (...,) if slot == "w" else (slice(None), slice(None), -1, -1, -1, 0, 0)
        operands[slot] = harness.Sparse(size, "i8", place, numbers if math.prod(size) >= 2**31 else 3)
    launch = conv.launch(problem, config)
    result = harness.Sparse(problem.shapes[test_conv.OPEN[role]], "i32", (...,))
    got = harness.run_large(launch, operands, result, tmp_path, range(launch.grid[0]))
    sums = (numbers if role != "wgrad" else numbers.sum(axis=1)).reshape(got.shape)
    harness.check(got, 3.0 * sums)


@pytest.mark.parametrize("role", ["fprop", "dgrad"])
def test_targets_of_over_2_to_the_31_elements(role, tmp_path):
    """The last program writes the last pixels."""
    C, K = (1, 16) if role == "fprop" else (16, 1)
    problem = test_conv.a_problem(
        role, N=1, C=C, K=K, input=(2**27 + 5,), filter=(1,), padding=((0, 0),), dtypes=("fp8e5", "fp8e5", "bf16")
    )
    source, target = ("x", "y") if role == "fprop" else ("y", "x")
    operands = {
        source: harness.Sparse(problem.shapes[source], "fp8e5", (0, 0, 0, 0, slice(-5, None), 0, 0), np.arange(1, 6)),
        "w": harness.Sparse(problem.shapes["w"], "fp8e5", (...,), 1),
    }
    result = harness.Sparse(problem.shapes[target], "bf16", (0, 0, 0, 0, slice(-6, None), 0))
    assert math.prod(result.shape) > 2**31
    got = harness.run_large(conv.launch(problem, UNPACKED), operands, result, tmp_path)
    harness.check(got, np.repeat(np.arange(6.0)[:, None], 16, axis=1))


@triton.jit
def first_taps(result_ptr, first, AXIS: tl.constexpr):
    lane = tl.arange(0, 256)
    tl.store(result_ptr + lane, first_tap(first + lane, AXIS))


@pytest.mark.skipif(not interpreting(), reason="it calls a part of a kernel, as only the interpreter can")
@pytest.mark.parametrize("b", [-1, -7, -2])
def test_the_first_tap_of_large_strides(b):
    """A stride of a second of sound, whose square is over 2^31: phases once took other phases' taps."""
    axis = Axis(T=10**6, R=48000, S=21, b=b, offset=5, d=48000)
    got = np.zeros(256, np.int32)
    for first in (0, 47000):
        first_taps[(1,)](_Tensor(got), first, AXIS=axis)
        taps = (np.arange(first, first + got.size)[:, None] + b * np.arange(axis.R) + axis.offset) % axis.d == 0
        assert np.array_equal(got, np.where(taps.any(axis=1), taps.argmax(axis=1), axis.R))
