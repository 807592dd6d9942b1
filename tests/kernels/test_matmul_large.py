"""kernels/matmul where numbers of 32 bits end: the last program of a launch on matrices of more than 2^31 elements, nearly all zeros."""

import dataclasses

import harness
import numpy as np
import pytest
from cases import random
from test_matmul import OPEN, ROLES, a_problem, shape, true

from jaxext.backends.triton.interpreter import DTYPES, interpret, interpreting
from jaxext.kernels import matmul
from jaxext.kernels.launch import SHARED_MEMORY
from jaxext.kernels.matmul import Config

# What is large -> B, rows, columns, depth; and the step in depth, so that there are few of them to interpret.
CASES = {
    # in the roles in which they are read along their columns a step is 2^31 elements
    "left": (1, 2**22 + 9, 16, 520, 512),
    "right": (1, 16, 2**22 + 9, 520, 512),
    "result": (1, 2**16 + 9, 2**15, 16, 32),
    "all batches together": (2**15 + 2, 256, 16, 256, 256),
}
INTEGERS = ("i8", "i8", "i32")


def a_role_of(role, B, rows, cols, depth, **more):
    sizes = {"nn": (B, rows, cols, depth), "nt": (B, rows, depth, cols), "tn": (B, depth, cols, rows)}[role]
    return a_problem(role, sizes, **more)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("name", CASES)
def test_the_last_program(name, role, tmp_path):
    B, rows, cols, depth, step = CASES[name]
    problem = a_role_of(role, B, rows, cols, depth, dtypes=("fp8e5", "fp8e5", "bf16") if name == "result" else INTEGERS)
    launch = matmul.launch(problem, Config(tile_m=16, tile_n=16, tile_k=step))
    # The tile that the last program computes, and what it reads: all of the depth.
    corner = a_role_of(role, 1, rows % 16 or 16, cols % 16 or 16, depth, dtypes=problem.dtypes)
    slots = [slot for slot in "abc" if slot != OPEN[role]]
    operands, arrays = {}, {}
    for slot, dtype in zip(slots, problem.dtypes, strict=False):
        operands[slot] = random(shape(corner, slot), DTYPES[dtype], len(operands), True)
        arrays[slot] = harness.Sparse(shape(problem, slot), dtype, harness.corner(shape(corner, slot)), operands[slot])
    want = true(corner, operands)
    result = harness.Sparse(shape(problem, OPEN[role]), problem.dtypes[2], harness.corner(want.shape))
    harness.check(harness.run_large(launch, arrays, result, tmp_path), want)


@pytest.mark.skipif(not interpreting(), reason="what is too large is found when the kernel is traced")
def test_a_band_of_more_tiles_than_32_bits_number():
    """Eight rows of tiles were a band even where there is one row: their number was an unsigned one, by which Triton does not divide."""
    problem = a_problem("nn", (1, 1, 2**32, 1), INTEGERS)
    launch = matmul.launch(problem, Config(tile_m=16, tile_n=16, tile_k=32))
    a, b, c = np.full((1, 1), 3, np.int8), np.arange(16, dtype=np.int8), np.zeros(16, np.int32)  # what the first program touches
    interpret(dataclasses.replace(launch, grid=(1,)), a, b, c)
    harness.check(c, 3 * np.arange(16.0))


@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_a_depth_beyond_the_end_of_the_last_split_keeps_its_sign(arch):
    """The last of 132 splits of a sum of almost 2^31 products goes some thousands beyond it: as negative numbers those were inside."""
    for depth in (2**31 - 64, 2**31 - 2**15, 2**31 - 2**15 - 1, 2**31 - 2**20):
        problem = a_problem("nn", (1, 1, 1, depth), ("bf16",) * 3, arch=arch)
        for config in matmul.candidates(problem):
            _, _, steps = matmul.tiles(problem, config)
            assert problem.index == "int64" or config.splits * steps * config.tile_k <= 2**31
