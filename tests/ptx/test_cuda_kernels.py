"""Every CUDA kernel's PTX, launched by our host code on the interpreter, against the definition in float64.

Problems are small, and none fits its tiles.  Asynchronous copies and products take effect as late as they may, and then at once: both must
give the same bits.  That the kernels race nowhere, read nothing that nobody wrote and write each element once, the interpreter checks.
"""

import dataclasses
import functools
import itertools
import pathlib
import sys

import numpy as np
import pytest
from cuda_kernels import DTYPES, execute, modules
from cuda_launches import BYTES, CONVS, DEPTHWISE, MATMULS, SLOTS, conv, matmul
from interpreter import EARLY, LATE

from jaxext.backends import kernel
from jaxext.backends.cuda import cuda_binding, cuda_conv, cuda_depthwise

# Where pytest too has them, once it has collected those folders.
sys.path += [str(pathlib.Path(__file__).parents[1] / folder) for folder in ("kernels", "backends/cuda")]
import test_cuda_conv  # noqa: E402
import test_depthwise  # noqa: E402
import test_simt  # noqa: E402
from harness import check  # noqa: E402

TWO_MULTIPROCESSORS = 3  # a device of csrc/cuda_runtime.cc, on which a block computes several tiles
RNG = np.random.default_rng(0)


def executed(case, operands, shape, **where):
    """The result, its partial sums added up; the same bits whether asynchronous work is late or early."""
    late, early = (execute(case, operands, when, **where) for when in (LATE, EARLY))
    np.testing.assert_array_equal(late.view(np.uint8), early.view(np.uint8))
    parts = late.reshape(-1, *shape)
    return parts[0] if len(parts) == 1 else parts.sum(axis=0)


def check_against(truth, got, operands, integers):
    """Integers exactly, others within rounding of the sum of magnitudes."""
    exact = {slot: values.astype(np.float64) for slot, values in operands.items()}
    check(got, truth(exact), None if integers else truth({slot: np.abs(values) for slot, values in exact.items()}))


def some(shape, dtype, integers):
    values = RNG.integers(-3, 4, shape) if integers else RNG.standard_normal(shape)
    return values.astype(DTYPES[dtype])


# Products.

LABELS = {"a": "bmk", "b": "bkn", "c": "bmn"}


def product(role, operands):
    terms = ",".join(LABELS[slot] for slot in operands)
    return np.einsum(f"{terms}->{LABELS[SLOTS[role][2]]}", *operands.values())


def check_matmul(row, B, rows, columns, depth, splits=1, device=0, integers=True):
    """`rows` and `columns`: of the result."""
    names = {"nn": "MNK", "nt": "MKN", "tn": "KNM"}[row["role"]]
    sizes = dict(zip(names, (rows, columns, depth), strict=True))
    shapes = {slot: (B, *(sizes[label] for label in labels)) for slot, labels in dict(a="MK", b="KN", c="MN").items()}
    *slots, open_slot = SLOTS[row["role"]]
    operands = {slot: some(shapes[slot], row["operands"], integers) for slot in slots}
    case = matmul(row, B, **sizes, splits=splits)
    if splits > 1:
        case["result"] = "float32"
    got = executed(case, list(operands.values()), shapes[open_slot], device=device)
    check_against(functools.partial(product, row["role"]), got, operands, integers)


def id_of(row):
    return "-".join(str(row[name]) for name in ("role", "rank", "operands", "result", "tile_m", "tile_n") if name in row)


@pytest.mark.parametrize("row", MATMULS, ids=id_of)
def test_matmul(row):
    m, n, k = row["tile_m"], row["tile_n"], row["tile_k"]
    step = 16 // BYTES[row["operands"]]  # what rows are multiples of
    check_matmul(row, 1, step, step, step)
    check_matmul(row, 2, m + step, n + step, (row["stages"] + 1) * k + step)  # the ring of stages begins anew
    check_matmul(row, 1, m - step, n // 2, 2 * k - step, integers=False)
    check_matmul(row, 1, 3 * m + step, 2 * n + step, k + step, device=TWO_MULTIPROCESSORS)
    if row["result"] == "float32":
        check_matmul(row, 1, m + step, step, 4 * k, splits=2)


# Dense convolutions.


def check_conv(row, problem, config, integers=True):
    *slots, open_slot = SLOTS[row["role"]]
    operands = {slot: some(test_cuda_conv.shape_of(problem, slot), row["operands"], integers) for slot in slots}
    case = conv(row, problem, config)
    got = executed(case, list(operands.values()), test_cuda_conv.shape_of(problem, open_slot))
    check_against(functools.partial(test_cuda_conv.truth, problem), got, operands, integers)


def larger(problem):
    """More channels than a tile has, and not as many as two: the contraction goes over several steps."""
    return dataclasses.replace(problem, C=72, K=136)


@pytest.mark.parametrize("row", CONVS, ids=id_of)
def test_conv(row):
    problems = [case for case in test_cuda_conv.CASES.values() if case.name == f"conv{row['rank']}d_{row['role']}"]
    assert problems
    if row["operands"] == "float16":  # what depends on the dtype is little
        problems = problems[:1]
    for problem in problems:
        problem = dataclasses.replace(problem, dtypes=(kernel.DTYPES[row["operands"]],) * 3)
        configs = [config for config in cuda_conv.candidates(problem) if config.tile_n == row["tile_n"]]
        splits = {config.splits: config for config in configs}
        for few_or_most in {min(splits), max(splits)}:  # the most parts may be more than a launch takes
            check_conv(row, problem, splits[few_or_most])
    check_conv(row, larger(problem), configs[0], integers=False)


# Depthwise convolutions.


def refused(problem) -> bool:
    empty = any(0 in test_depthwise.shape_of(problem, slot) for slot in "xwy")
    return empty or cuda_binding.refused(problem, cuda_depthwise) is not None


def check_depthwise(row, problem, config, arch, integers=True):
    *slots, open_slot = SLOTS[row["role"]]
    operands = {slot: some(test_depthwise.shape_of(problem, slot), row["operands"], integers) for slot in slots}
    got = executed(conv(row, problem, config), list(operands.values()), test_depthwise.shape_of(problem, open_slot), arch=arch)
    check_against(functools.partial(test_depthwise.truth, problem), got, operands, integers)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_depthwise_convolution(dtype, arch):
    """All kernels of the dtype run: the filter, the sizes and whether channels fill vectors decide which one is taken."""
    rows = [row for row in DEPTHWISE if row["operands"] == dtype]
    for row, few in itertools.product(rows, test_simt.CASES.values()):
        for case in (few, dataclasses.replace(few, G=24)):
            problem = test_depthwise.of_role(case, row["role"], kernel.DTYPES[dtype], arch=int(arch[3:]))
            if problem.name == f"conv{row['rank']}d_{row['role']}" and not refused(problem):
                configs = cuda_depthwise.candidates(problem)
                check_depthwise(row, problem, configs[0], arch)
                check_depthwise(row, problem, configs[-1], arch, integers=False)
    of_dtype = {"float32": "If", "bfloat16": "__nv_bfloat16", "float16": "__half"}[dtype]
    kernels = {name: module for name, module in modules(arch).items() if "depthwise" in name and of_dtype in name}
    assert kernels and not [name for name, module in kernels.items() if not module.executed[name].any()]


def test_each_kernel_of_the_library_has_a_row():
    kernels = list(modules())
    assert sum("cutlass13device_kernel" in name for name in kernels) == len(MATMULS)
    assert sum("ConvKernelOf" in name for name in kernels) == len(CONVS)
    assert len(kernels) == len(MATMULS) + len(CONVS) + sum("depthwise" in name for name in kernels)
