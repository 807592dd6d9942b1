"""kernels/conv beyond 32 bits: arrays of over 2^31 elements, strides whose squares are over 2^31, and numbers that it must refuse."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import harness
import numpy as np
import pytest
import triton
import triton.language as tl
from test_conv import OPEN, PACKED, PLAIN, ROLES, a_problem, shape

from jaxext.backends.triton.interpreter import _Tensor, interpreting
from jaxext.kernels import conv
from jaxext.kernels.conv.kernel import first_tap
from jaxext.kernels.geometry import Axis

UNPACKED = dataclasses.replace(PACKED, packed=False)


@pytest.mark.parametrize(
    "config, axis, many",
    [
        (UNPACKED, 0, dict(N=17)),
        (PACKED, 0, dict(N=17)),
        (PACKED, 1, dict(N=17)),
        (UNPACKED, 2, dict(N=17)),
        (UNPACKED, 2, dict(N=1, B=3)),
    ],
)
@pytest.mark.parametrize("role", ROLES)
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
    problem = a_problem(role, **many, C=1, K=1, filter=(1, 1, 1), dtypes=("i8", "i8", "i32"), **window)
    numbers = np.arange(1, count + 1).reshape(problem.B, problem.N)
    operands = {}
    for slot in {*"xwy"} - {OPEN[role]}:
        size = shape(problem, slot)
        place = (...,) if slot == "w" else (slice(None), slice(None), -1, -1, -1, 0, 0)
        operands[slot] = harness.Sparse(size, "i8", place, numbers if math.prod(size) >= 2**31 else 3)
    launch = conv.launch(problem, config)
    result = harness.Sparse(shape(problem, OPEN[role]), "i32", (...,))
    got = harness.run_large(launch, operands, result, tmp_path, range(launch.grid[0]))
    sums = (numbers if role != "wgrad" else numbers.sum(axis=1)).reshape(got.shape)
    harness.check(got, 3.0 * sums)


@pytest.mark.parametrize("role", ["fprop", "dgrad"])
def test_targets_of_over_2_to_the_31_elements(role, tmp_path):
    """The last program writes the last pixels."""
    C, K = (1, 16) if role == "fprop" else (16, 1)
    problem = a_problem(role, N=1, C=C, K=K, input=(2**27 + 5,), filter=(1,), padding=((0, 0),), dtypes=("fp8e5", "fp8e5", "bf16"))
    source, target = ("x", "y") if role == "fprop" else ("y", "x")
    operands = {
        source: harness.Sparse(shape(problem, source), "fp8e5", (0, 0, 0, 0, slice(-5, None), 0, 0), np.arange(1, 6)),
        "w": harness.Sparse(shape(problem, "w"), "fp8e5", (...,), 1),
    }
    result = harness.Sparse(shape(problem, target), "bf16", (0, 0, 0, 0, slice(-6, None), 0))
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


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(input=(2**32,), stride=(4,)), "a spatial axis that reaches to 4294967"),
        (dict(input=(2**32,), stride=(4,), padding=((0, -(2**32) + 9),)), "a spatial axis that reaches to 4294967"),
        (dict(stride=(2**31,)), "a spatial axis that reaches to 2147483648"),
        (dict(stride=(2**40,), padding=((2**31, 2**31),)), "a spatial axis that reaches to"),
        (dict(filter_dilation=(2**30,), padding=((0, 2**31),)), "a spatial axis that reaches to"),
        (dict(input_dilation=(2**30,), stride=(2**29,)), "a spatial axis that reaches to"),
        (dict(C=2**16, K=2**15 - 1, filter=(1,)), "a filter of 2147418112 elements, it takes fewer than"),
        (dict(B=2**26, G=64, C=64, K=64), r"\d+ small tiles, and no larger ones that suit it are 2147483647 or fewer"),
    ],
)
@pytest.mark.parametrize("role", ROLES)
def test_numbers_that_32_bits_do_not_hold_are_refused(role, change, message):
    """They were taken, and wrapped, or did not compile, or had no config at all."""
    problem = a_problem(role, **dict(input=(9,), filter=(3,), padding=((1, 1),), N=1) | change)
    assert math.prod(problem.output)
    with pytest.raises(ValueError, match=rf"conv1d_{role}: ({message}|\d+ positions, it takes fewer)"):
        conv.launch(problem, PLAIN)
