"""Every CUDA kernel's PTX, launched by our host code on the interpreter, against the definition in float64.

Problems are small, and none fits its tiles.  Asynchronous copies and products take effect as late as they may, and then at once: both must
give the same bits.  That the kernels race nowhere, read nothing that nobody wrote and write each element once, the interpreter checks.
"""

import dataclasses
import itertools
from typing import Any

import cuda_convs
import pytest
import test_causal_kernel
import test_cuda_scaled
import test_depthwise
import test_simt
from cuda_calls import (
    causal_call,
    conv_call,
    fused_call,
    gram_call,
    matmul_call,
    ragged_call,
    ragged_scaled_call,
    scaled_call,
    weight_only_call,
)  # fmt: skip
from cuda_cases import BYTES
from cuda_kernels import check, modules
from cuda_launches import CONVS, GRAMS, MATMULS, PIECES, RAGGED_SCALEDS, RAGGEDS, SCALEDS, WIDE_WEIGHT_ONLYS
from simt_weight_only import a_problem as a_weight_only_problem

from jaxext.backends.cuda.cuda_binding import config_of
from jaxext.backends.fields import DTYPES
from jaxext.kernels.epilogue import ACTIVATIONS, Epilogue
from jaxext.kernels.matmul.problem import MatmulProblem
from jaxext.ops.causal import cuda as cuda_causal
from jaxext.ops.conv import cuda_dense as cuda_conv
from jaxext.ops.conv import cuda_depthwise
from jaxext.ops.matmul import cuda as cuda_matmul
from jaxext.ops.scaled import cuda as cuda_scaled
from jaxext.ops.scaled import cuda_weight_only

pytestmark = pytest.mark.cuda

TWO_MULTIPROCESSORS = 3  # a device of csrc/cuda_runtime.cc, on which a block computes several tiles


def each(rows, is_short=lambda row: True):
    """A parameter for each row, slow if it is not in the short suite."""
    names = "role", "rank", "operands", "second", "result", "bits", "pieces", "tile_m", "tile_n"
    ids = ["-".join(str(row[name]) for name in names if name in row) for row in rows]
    params = [pytest.param(row, id=id, marks=() if is_short(row) else pytest.mark.slow) for row, id in zip(rows, ids, strict=True)]
    return pytest.mark.parametrize("row", params)


PLAIN = [row for row in MATMULS if not row["fused"]]
TILES = list(dict.fromkeys((row["result"] == "float32", row["tile_m"], row["tile_n"]) for row in PLAIN if row["operands"] == "bfloat16"))


def in_short_suite(row) -> bool:
    """Each tile in one role, the large one in all, float16 once: roles differ in the majors of the factors, dtypes of 16 bits in little."""
    tile = row["result"] == "float32", row["tile_m"], row["tile_n"]
    if row["operands"] == "bfloat16":
        return row["role"] == ("nn", "nt", "tn")[TILES.index(tile) % 3] or tile == TILES[0]
    return row["operands"] != "float16" or (row["role"], tile) == ("nn", TILES[1])


@pytest.mark.sampled(5)
@each(PLAIN, in_short_suite)
def test_matmul(row):
    m, n, k = row["tile_m"], row["tile_n"], row["tile_k"]
    step = 16 // BYTES[row["operands"]]  # what rows are multiples of
    check(matmul_call(row, 1, step, step, step))
    check(matmul_call(row, 2, m + step, n + step, (row["stages"] + 1) * k + step))  # the ring of stages begins anew
    check(matmul_call(row, 1, m - step, n // 2, 2 * k - step, integers=False))
    check(matmul_call(row, 1, 3 * m + step, 2 * n + step, k + step), device=TWO_MULTIPROCESSORS)
    if row["result"] == "float32":
        check(matmul_call(row, 1, m + step, step, 4 * k, splits=2))


@each(PIECES, lambda row: (row["role"], row["pieces"]) in {("nn", 3), ("nt", 2), ("tn", 3)})
def test_pieces(row):
    """Tiles, steps and rows of four elements that end early; more steps than the ring has stages; a batch, and parts."""
    m, n = row["tile_m"], row["tile_n"]
    check(matmul_call(row, 1, 4, 4, 4))
    check(matmul_call(row, 2, m + 4, n + 4, (row["stages"] + 1) * 32 + 4))
    check(matmul_call(row, 1, 2 * m + 4, 3 * n - 60, 36, integers=row["pieces"] == 2))  # two pieces have fewer bits
    check(matmul_call(row, 1, m + 4, 12, 8 * 32, splits=2))
    if row["role"] == "nt":  # where nothing wants columns in fours
        check(matmul_call(row, 1, 7, n + 3, 40))


@pytest.mark.sampled(4)
@each(RAGGEDS)
def test_ragged(row):
    m, n, sizes = row["tile_m"], row["tile_n"], dict(K=row["tile_m"] + 72, N=row["tile_n"] + 40)
    check(ragged_call(row, (5, 0, m - 3, 9, 0, 20), m + 50, **sizes), device=TWO_MULTIPROCESSORS)  # the last rows are nobody's
    check(ragged_call(row, (3, 0, 70, 66), m + 40, K=8, N=8, offset=29, integers=False))
    check(ragged_call(row, (0, 0), 3, K=16, N=24))
    if row["operands"] == "bfloat16":  # what depends on the dtype is little
        check(ragged_call(row, (7, 65), 90, K=24, N=2 * n + 16, B=2, P=2, R=2, integers=False), device=TWO_MULTIPROCESSORS)
        check(ragged_call(row, (1,) * 9, 9, K=5 * 64 + 8, N=16))


def scaled(row, sizes, blocks=(1, 1, 1), result="bf16", B=1, splits=1, integers=True):
    """`sizes` and `blocks`: of rows, the sum and columns."""
    problem = test_cuda_scaled.product("nn", sizes, blocks, dtypes=(DTYPES[row["operands"]], DTYPES[row["second"]], result), B=B)
    return scaled_call(problem, config_of(cuda_scaled.TileConfig, row, splits=splits), integers)


@each(SCALEDS)
def test_scaled(row):
    """Scales for all, for rows and columns, for blocks of 128 of the sum in rows, squares and columns; tiles and splits that end early."""
    m, n = row["tile_m"], row["tile_n"]
    check(scaled(row, (2 * m + 3, 6 * 128, n + 136)), device=TWO_MULTIPROCESSORS)
    check(scaled(row, (5, 256, 128), (5, 2, 1), "fp32", splits=2, integers=False))
    if row["operands"] == row["second"]:  # what depends on the dtype is little
        check(scaled(row, (m + 5, 144, n + 8), (m + 5, 1, n + 8), "fp32", B=2))
        check(scaled(row, (m + 6, 6 * 128, 384), (2, 3, 3), B=2))
        check(scaled(row, (m, 384, 264), (m, 3, 264), integers=False), device=TWO_MULTIPROCESSORS)
        check(scaled(row, (1, 16, 8), result="fp32", splits=3))


@each(RAGGED_SCALEDS)
def test_ragged_scaled(row):
    """Scales for rows and squares, for columns in steps, of the result, and none for one side; groups within a tile and over several; rows
    of nobody; more steps than the ring has stages."""
    m, n = row["tile_m"], row["tile_n"]
    several: dict[str, Any] = dict(sizes=(5, 0, m - 3, 9, 0, 20), offset=0, rows=m + 50)
    check(ragged_scaled_call(row, blocks=(6, 3), widths=(6 * 128, 384), **several), device=TWO_MULTIPROCESSORS)
    check(ragged_scaled_call(row, (0, 0), "y", widths=(144, 24), offset=0, rows=3))
    if row["operands"] == row["second"]:  # what depends on the dtype is little
        check(ragged_scaled_call(row, (3, 0, 70), "w", (2, n + 8), (256, n + 8), offset=29, rows=m + 40, integers=False))
        batches: dict[str, Any] = dict(offset=0, rows=90, B=2, P=2, R=2)
        check(ragged_scaled_call(row, (7, 65), "xwy", (3, 1), (384, 264), "fp32", **batches), device=TWO_MULTIPROCESSORS)
        check(ragged_scaled_call(row, (1,) * 9, "wy", (1, 136), (144, 136), offset=0, rows=9))


@each(GRAMS, lambda row: (row["operands"], row["tile_m"]) in (("bfloat16", 192), ("float16", 128)))
def test_gram(row):
    """One tile that is not full, several clusters and steps, with an addend, batches, and results of both widths, in parts too.

    A tile of each number of warp groups is in the short suite, one for each dtype.
    """
    m, k, dtype = row["tile_m"], row["tile_k"], row["operands"]
    check(gram_call(row, 2, 2 * m + 24, (row["stages"] + 1) * k + 8, dtype, (2.0, -1.0)), device=TWO_MULTIPROCESSORS)
    check(gram_call(row, 1, m + 40, k - 8, dtype, (0.7, 1.3), integers=False))
    if dtype == "bfloat16":  # what depends on the dtype is little
        check(gram_call(row, 1, 8, 8))
        check(gram_call(row, 1, 4, 2 * k, "float32"))
        check(gram_call(row, 1, 2 * m + 12, 2 * k, "float32", (0.7, 1.3), integers=False))
        check(gram_call(row, 2, m + 36, 5 * k + 16, "float32", splits=3), device=TWO_MULTIPROCESSORS)


@pytest.mark.slow
@each([row for row in GRAMS if row["operands"] == "bfloat16"])
def test_bands_of_gram(row):
    """A band is eight tiles wide: behind two whole ones there is one that ends early."""
    check(gram_call(row, 1, 17 * row["tile_n"] + 8, 8), device=TWO_MULTIPROCESSORS)


def larger(problem):
    """Return the problem with more channels than one tile has and fewer than two: the contraction goes over several steps."""
    return dataclasses.replace(problem, C=72, K=136)


def of_row(row, problem):
    return cuda_conv.candidates(problem, [row | {"operands": problem.dtypes[0]}])


@pytest.mark.sampled(12)
@each(CONVS)
def test_conv(row):
    problems = [case for case in cuda_convs.CASES.values() if case.name == f"conv{row['rank']}d_{row['role']}"]
    assert problems
    if row["operands"] == "float16":  # what depends on the dtype is little
        problems = problems[:1]
    for problem in problems:
        problem = dataclasses.replace(problem, dtypes=(DTYPES[row["operands"]],) * 3)
        configs = of_row(row, problem)
        splits = {config.splits: config for config in configs}
        for few_or_most in {min(splits), max(splits)}:  # the most parts may be more than a launch takes
            check(conv_call(problem, splits[few_or_most]))
    check(conv_call(larger(problem), configs[0], integers=False))


def depthwise_problems(dtype, roles, arch):
    cases: list[Any] = list(test_simt.CASES.values())
    for case, role in itertools.product([*cases, *map(test_simt.in_vectors, cases)], roles):
        problem = test_depthwise.of_role(case, role, DTYPES[dtype], arch=arch)
        if not (any(0 in test_depthwise.shape_of(problem, slot) for slot in "xwy") or cuda_depthwise.refused(problem)):
            yield problem


BOTH = [(dtype, arch) for dtype in ("float32", "bfloat16", "float16") for arch in ("sm_80", "sm_90")]
IN_TURN = [pytest.param(*key, marks=() if n % 4 in (0, 3) else pytest.mark.slow) for n, key in enumerate(BOTH)]  # one of two is slow


@pytest.mark.parametrize("dtype, arch", IN_TURN)
def test_depthwise_convolution(dtype, arch):
    """All kernels of the dtype run: the filter, the sizes and whether channels fill vectors decide which one is taken."""
    for problem in depthwise_problems(dtype, test_depthwise.ROLES, int(arch[3:])):
        configs = cuda_depthwise.candidates(problem)
        on_tensor_cores, others = ([config for config in configs if (config.lines > 0) == which] for which in (True, False))
        for config in {configs[0], *on_tensor_cores[:1]}:
            check(conv_call(problem, config), arch=arch)
        check(conv_call(problem, others[-1], integers=False), arch=arch)
    assert_all_ran(dtype, arch, lambda name: "depthwise" in name and "Finish" not in name)


CAUSAL_GIVEN = [{}, dict(state=True, bias=False), dict(idx=True, state=True, idx_of_states=True)]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_causal_convolution(dtype, arch):
    """All kernels of the dtype run: taps, channels and sequences decide which one is taken."""
    config = cuda_causal.CausalConfig(lanes=2, strip=6)
    sizes = itertools.product(("forward", "backward"), (3, 4, 7), (24, 7), CAUSAL_GIVEN)
    for role, taps, C, given in sizes:
        problem = test_causal_kernel.a_problem(role, taps, activation=None, dtype=DTYPES[dtype], C=C, **given)
        check(causal_call(problem, dataclasses.replace(config, splits=2 if role == "backward" else 1)), arch=arch)
    for role, taps in (("forward", 31), ("forward", 4), ("backward", 4), ("backward", 8)):
        problem = test_causal_kernel.a_problem(role, taps, dtype=DTYPES[dtype], C=24, T=33, **CAUSAL_GIVEN[1])
        check(causal_call(problem, cuda_causal.candidates(problem)[0], integers=False), arch=arch)
    assert_all_ran(dtype, arch, lambda name: "6causal" in name)


@pytest.mark.parametrize("role", ["forward", "backward"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_of_a_causal_convolution(activation, role):
    """Backward its derivative, which no other kernel has."""
    problem = test_causal_kernel.a_problem(role, activation=activation, C=8)
    check(causal_call(problem, cuda_causal.candidates(problem)[0], integers=False))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weight_only_product(dtype, arch):
    """All kernels of the dtype run: exactly, with tails of rows, columns and the sum, with blocks of scales and with one for all, in parts;
    and rounded."""
    for bits, tiles in cuda_weight_only.TILES.items():
        given: dict[str, Any] = dict(bits=bits, dtype=DTYPES[dtype], arch=int(arch[3:]))
        for m, n in tiles:
            config = cuda_weight_only.WeightOnlyConfig(tile_m=m, tile_n=n)
            problem = a_weight_only_problem(M=m + 1, N=n // 2 + 32, K=6 * 32, S=3, **given)
            check(weight_only_call(problem, config), arch=arch)
            problem = a_weight_only_problem(M=m - 1, N=32, K=11 * 32, S=1, result="fp32", B=2, **given)
            check(weight_only_call(problem, dataclasses.replace(config, splits=3)), arch=arch)
        problem = a_weight_only_problem(M=3, N=64, K=11 * 32, S=11, **given)
        check(weight_only_call(problem, cuda_weight_only.candidates(problem)[0], integers=False), arch=arch)
    assert_all_ran(dtype, arch, lambda name: "11weight_only" in name)


@each(WIDE_WEIGHT_ONLYS)
def test_wide_weight_only_product(row):
    """The products have tails of rows, columns and the sum, more stages than the ring has, blocks of scales of 32 elements and others, and
    one for all; batches and parts, of which one has no step; rounded too."""
    given: dict[str, Any] = dict(bits=row["bits"], dtype=DTYPES[row["operands"]])
    m, ring = row["tile_m"], row["stages"] * cuda_weight_only.WIDE_STEP
    config = cuda_weight_only.WeightOnlyConfig(tile_m=m, tile_n=row["tile_n"])
    in_parts = dataclasses.replace(config, splits=3)
    check(weight_only_call(a_weight_only_problem(M=m + 1, N=288, K=96, S=3, **given), config))
    check(weight_only_call(a_weight_only_problem(M=5, N=160, K=ring + 96, S=1, **given), config))
    check(weight_only_call(a_weight_only_problem(M=m - 1, N=32, K=256, S=4, result="fp32", B=2, **given), in_parts))
    check(weight_only_call(a_weight_only_problem(M=9, N=64, K=384, S=4, **given), config, integers=False))
    check(weight_only_call(a_weight_only_problem(M=9, N=64, K=384, S=3, **given), config, integers=False))


def test_each_byte_of_a_wide_weight():
    """Rows of x pick rows of the weight; each kernel that makes floats of integers, so not each number of rows, has each of its bytes."""
    for row in WIDE_WEIGHT_ONLYS:
        if row["tile_m"] == 64:
            problem = a_weight_only_problem(M=64, N=256, K=64, S=1, bits=row["bits"], dtype=DTYPES[row["operands"]], result="fp32")
            check(weight_only_call(problem, cuda_weight_only.WeightOnlyConfig(tile_m=64, tile_n=256), picks=True))


def assert_all_ran(dtype, arch, which):
    """Assert that all kernels with such a name ran."""
    of_dtype = {"float32": "If", "bfloat16": "__nv_bfloat16", "float16": "__half"}[dtype]
    kernels = {name: module for name, module in modules(arch).items() if of_dtype in name and which(name)}
    assert kernels and not [name for name, module in kernels.items() if not module.executed[name].any()]


ALL = dict(activation="gelu", bias="fp32", saves=True)  # and the residual, which has the result's dtype
EPILOGUES: list[dict[str, Any]] = [
    {},
    dict(activation="relu", bias="fp32"),
    dict(activation="gelu_tanh", saves=True),
    dict(residual=True),
    dict(activation="tanh", bias="fp32", residual=True, saves=True),
]


def fused(problem, epilogue):
    residual = problem.dtypes[2] if epilogue.get("residual") else None
    return dataclasses.replace(problem, epilogue=Epilogue(**(epilogue | dict(residual=residual))))


def check_fused(problem, config):
    for integers in (True, False):
        check(fused_call(problem, config, integers))


@each([row for row in MATMULS if row["fused"]])
def test_matmul_with_an_epilogue(row):
    m, n, k = row["tile_m"], row["tile_n"], row["tile_k"]
    dtype = DTYPES[row["operands"]]
    plain = MatmulProblem(name="linear", role="nn", B=2, M=m + 8, N=n + 8, K=k + 8, dtypes=(dtype,) * 3, precision="tf32", arch=90)
    small = dataclasses.replace(plain, B=1, M=24, N=40, K=16)
    epilogues = EPILOGUES if dtype != "fp16" else []  # what depends on the dtype of 16 bits is little
    for problem in [fused(plain, ALL | dict(residual=True)), *(fused(small, epilogue) for epilogue in epilogues)]:
        check_fused(problem, config_of(cuda_matmul.GemmConfig, row))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation(activation):
    """The kernel is that of depthwise convolutions: all kernels compile the same functions."""
    plain = test_depthwise.of_role(test_simt.CASES["causal k3, several chunks"], "fprop", "fp32", arch=90)
    problem = fused(plain, dict(activation=activation, saves=True))
    check_fused(problem, cuda_depthwise.candidates(problem)[0])


@pytest.mark.sampled(5)
@each([row for row in CONVS if row["role"] == "fprop"])
def test_conv_with_an_epilogue(row):
    plain = next(case for case in cuda_convs.CASES.values() if case.name == f"conv{row['rank']}d_fprop")
    dtype = DTYPES[row["operands"]]
    cases = [(dataclasses.replace(plain, B=2, G=3), ALL | dict(residual=True), dtype)]  # each of several parts has a bias of its own
    if (row["rank"], row["operands"]) == (2, "bfloat16"):  # what depends on these is little
        cases += [(plain, epilogue, result) for epilogue in EPILOGUES for result in (dtype, "fp32")]
    for problem, epilogue, result in cases:
        problem = fused(dataclasses.replace(problem, dtypes=(dtype, dtype, result)), epilogue)
        check_fused(problem, *of_row(row, problem))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_depthwise_convolution_with_an_epilogue(dtype):
    for plain in depthwise_problems(dtype, ["fprop"], arch=90):
        problem = fused(plain, dict(activation="silu", bias="fp32", residual=True, saves=True))
        configs = cuda_depthwise.candidates(problem)
        other = next(config for config in configs if config.lines == 0)  # than one on tensor cores
        for config in dict.fromkeys((configs[0], other)):
            check_fused(problem, config)
    assert_all_ran(dtype, "sm_90", lambda name: "depthwise" in name and "Finish" in name)


def test_each_kernel_of_the_library_has_a_row():
    kernels = list(modules())
    assert sum("RaggedProduct" in name for name in kernels) == len(RAGGEDS)
    assert sum("ScaledProduct" in name for name in kernels) == len(SCALEDS) + len(RAGGED_SCALEDS)
    assert sum("GramProduct" in name for name in kernels) == len(GRAMS)
    assert sum("cutlass13device_kernel" in name for name in kernels) == sum(map(len, (MATMULS, RAGGEDS, SCALEDS, RAGGED_SCALEDS, GRAMS)))
    assert sum("PiecesKernelOf" in name for name in kernels) == len(PIECES) // 3  # a kernel has all roles
    assert sum("ConvKernelOf" in name for name in kernels) == len(CONVS)
    assert sum("WideWeightOnly" in name for name in kernels) == len(WIDE_WEIGHT_ONLYS)
    portable = [kernel for kernel in kernels if any(name in kernel for name in ("depthwise", "6causal", "11weight_only"))]
    assert (
        len(kernels)
        == sum(map(len, (MATMULS, RAGGEDS, SCALEDS, RAGGED_SCALEDS, GRAMS, WIDE_WEIGHT_ONLYS, CONVS, portable))) + len(PIECES) // 3
    )
