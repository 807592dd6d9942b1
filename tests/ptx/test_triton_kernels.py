"""The PTX that Triton makes of our kernels, in the configurations that they pick, on small problems that do not fit their tiles.

Results are compared with the definition in float64: small integers exactly, other numbers up to rounding.  Asynchronous copies and products
take effect as late as they may, and then at once: both must give the same bits.  No device is needed, only Triton's compiler.
"""

import dataclasses
import itertools
import math
import sys
from typing import Any
from unittest import mock

import pytest
import test_causal_kernel
import test_conv
import test_depthwise
import test_matmul
import test_ragged_kernel
import test_scaled_dot
from calls import each
from ptxsim import LATE, Fault, Module
from test_ragged_scaled_kernel import a_problem as ragged_scaled_problem
from triton_kernels import CALLS, Call, call, kernel_module, skip_without_compiler

from jaxext.bench import triton_ptx
from jaxext.bench.kinds import Matmul
from jaxext.bench.problems import PRODUCTS, reduced
from jaxext.kernels import matmul, ragged_scaled, scaled
from jaxext.kernels.epilogue import Epilogue

ARCHS = (80, 90)
FLOPS = 2e5  # of a smaller problem
MOST_SPLITS = 2  # of its depth
# Numbers that are multiplied as others are; of their tests but one is slow.
ALIKE: dict[Any, str] = {"fp16": "halves", "bf16": "halves", "tf32x3": "parts", "bf16x3": "parts", "bf16x6": "parts", "fp8 both": "fp8"}

skip_without_compiler()


def run(call):
    assert not call.module.unverified_opcodes()
    assert not call.launch.then or not call.next_module.unverified_opcodes()
    call.execute_and_check()


# The suite's problems.


def smaller(case, config):
    """A problem of the kind that does not fit the tiles; or, if its own sizes make it what it is, that problem reduced."""
    if isinstance(case, Matmul) and not any(size % 16 for size in (case.M, case.N, case.K)):
        sizes: Any = dict(B=min(case.B, 2), M=config.tile_m + 24, N=config.tile_n // 2 + 40, K=2 * config.tile_k + 16)
        return Matmul(name=case.name, numbers=case.numbers, **sizes)
    return reduced(case, FLOPS)


def picks():
    """(suite's problem, role, numbers, arch, config): each config once.

    All are slow but the first of a role and kind of numbers on one arch.  The archs alternate, where both have such numbers.
    """
    seen: set = set()
    quick: dict[Any, int] = {}
    for case in (case for case in PRODUCTS if case.kernel != "ragged"):  # ragged ones are below
        kernel = kernel_module(case.kernel)
        for role, numbers, arch in itertools.product(case.products, case.numbers, ARCHS):
            problem = case.problem(role, numbers, arch)
            if kernel.refuses(problem) is not None:
                continue
            kind, config = (case.kernel, role, ALIKE.get(numbers, numbers)), kernel.candidates(problem)[0]
            on = quick.setdefault(kind, 90 if "fp8" in kind else ARCHS[len(quick) % 2])
            if (kind, arch, numbers, config) not in seen:
                marks = [] if arch == on and (kind, arch) not in seen else [pytest.mark.slow]
                seen |= {(kind, arch), (kind, arch, numbers, config)}
                yield pytest.param(case, role, numbers, arch, config, marks=marks, id=f"{case.name}-{role}-{numbers}-sm_{arch}-{config}")


PICKS: list[Any] = list(picks())


@pytest.mark.sampled(3, "nn-fp8-sm_90")
@pytest.mark.parametrize(("case", "role", "numbers", "arch", "config"), PICKS)
def test_pick(case, role, numbers, arch, config):
    config = dataclasses.replace(config, splits=min(config.splits, MOST_SPLITS))
    small: Any = smaller(case, config)
    problem = small.problem(role, numbers, arch)
    if case.kernel == "conv":  # it may have fewer groups
        config = dataclasses.replace(config, groups=math.gcd(config.groups, problem.G))
    run(Call(case.kernel, problem, config))


def test_every_kernel_and_role_is_picked_for_both_architectures():
    quick = {(case.kernel, role, arch) for case, role, _, arch, _ in (pick.values for pick in PICKS if not pick.marks)}
    assert quick == {(kernel, role, arch) for kernel in ROLES for role in ROLES[kernel] for arch in ARCHS}


# Small problems of every geometry, in the configurations that are picked for them.

MATMULS = {name: (sizes, ("bf16", "bf16", "fp32")) for name, sizes in test_matmul.SIZES.items()}
MATMULS |= {"_".join(dtypes): (test_matmul.SIZES["odd"], dtypes) for dtypes in test_matmul.DTYPES_OF_A_CALL}
CONVS = test_conv.CASES | {
    "int8": dict(stride=(2, 1), dtypes=("i8", "i8", "i8")),
    "fp8 of two kinds": dict(input_dilation=(2, 2), dtypes=("fp8e4nv", "fp8e5", "bf16")),
    "in parts": dict(filter_dilation=(2, 1), dtypes=("fp32",) * 3, precision="tf32x3"),
    "fp16 and bf16": dict(G=2, dtypes=("fp16", "bf16", "fp32")),
}
PROBLEMS = {
    "matmul": lambda role, name, arch: test_matmul.a_problem(role, *MATMULS[name], "tf32", arch),
    "conv": lambda role, name, arch: test_conv.a_problem(role, **CONVS[name], arch=arch),
    "depthwise": lambda role, name, arch: test_depthwise.of_role(test_depthwise.CASES[name], role, arch=arch),
}
ROLES = {"matmul": test_matmul.ROLES, "conv": test_conv.ROLES, "depthwise": tuple(test_depthwise.ROLES)}
NAMES = {"matmul": MATMULS, "conv": CONVS, "depthwise": test_depthwise.CASES}
# The others are slow tests.
QUICK = {
    "matmul": ("odd", "outer", "no_k", "fp16_bf16_fp32", "fp8e4nv_fp32_fp32"),
    "conv": ("all_strides", "groups", "3d", "3d_transposed", "causal_1d", "int8", "in parts"),
    "depthwise": ("k5 stride 3 dilation 2", "transposed 4x4", "multiplier 3 causal", "3-D stride 2", "more channels than a block"),
}


def edges():
    """Each on both architectures; of those that are quick, in turn, one is slow."""
    for kernel, problem_of in PROBLEMS.items():
        for n, (name, role, arch) in enumerate(itertools.product(NAMES[kernel], ROLES[kernel], ARCHS)):
            problem = problem_of(role, name, arch)
            if kernel_module(kernel).refuses(problem) is None and all(call(kernel, problem).launch.grid):
                quick = name in QUICK[kernel] and n // 2 % 2 == n % 2
                marks = () if quick else pytest.mark.slow
                yield pytest.param(kernel, problem, marks=marks, id=f"{kernel}-{role}-{name}-sm_{arch}")


EDGES = list(edges())


@pytest.mark.sampled(6, "conv-dgrad-all_strides-sm_80", "matmul-nn-no_k-sm_90", "depthwise-fprop-k5 stride 3 dilation 2-sm_80")
@pytest.mark.parametrize(("kernel", "problem"), EDGES)
def test_edges(kernel, problem):
    run(call(kernel, problem))


def on_each(build, *axes, quick):
    """Return the rows for both architectures; all but the quick ones are slow tests."""
    return each(build, *axes, ARCHS, slow=lambda *key: key not in quick)


# Epilogues, on problems that do not fit the tiles: each of the short suite once, on one of the architectures.

ALL = dict(bias="fp32", residual="bf16", saves=True)
BF16 = ("bf16",) * 3
LARGE_TILES = matmul.Config(tile_m=128, tile_n=256, tile_k=32, num_warps=8)
FUSED: dict[str, tuple[Any, dict[str, Any]]] = {
    "matmul": (test_matmul.a_problem("nn", (2, 40, 72, 24), BF16), dict(activation="gelu", **ALL)),
    "matmul of float32": (test_matmul.a_problem("nn", (1, 136, 140, 36), precision="tf32"), dict(activation="tanh", **ALL)),
    "matmul of odd sizes": (test_matmul.a_problem("nn", (2, 17, 33, 19), ("fp16",) * 3), dict(activation="gelu_tanh", bias="bf16")),
    "wide tiles": (test_matmul.a_problem("nn", (1, 264, 260, 72), BF16), dict(activation="relu", **ALL)),
    "gated": (test_matmul.a_problem("nn", (2, 40, 72, 24), BF16), dict(activation="silu", gated=True, saves=True)),
    "gated, odd": (test_matmul.a_problem("nn", (1, 33, 17, 21), ("bf16", "bf16", "fp32")), dict(activation="relu", gated=True)),
    "integers": (test_matmul.a_problem("nn", (1, 40, 72, 40), ("i8", "i8", "i32")), dict(bias="i32", residual="i32", saves=True)),
    "conv": (test_conv.a_problem("fprop", C=16, K=24, dtypes=BF16), dict(activation="relu6", **ALL)),
    "conv with groups": (test_conv.a_problem("fprop", **test_conv.CASES["groups_strided"]), dict(activation="sigmoid", bias="fp16")),
    "conv of phases": (test_conv.a_problem("fprop", **test_conv.CASES["all_strides"]), dict(activation="leaky_relu", **ALL)),
    "depthwise": (test_depthwise.CASES["3x3"], dict(activation="silu", **ALL)),
    "depthwise multiplier": (test_depthwise.CASES["batched filters, multiplier"], dict(activation="squared_relu", bias="bf16")),
}


def fused(name, arch):
    problem, epilogue = FUSED[name]
    problem = dataclasses.replace(problem, arch=arch, epilogue=Epilogue(**epilogue))
    if name == "wide tiles":
        return Call("matmul", problem, LARGE_TILES)
    return call(next((kernel for kernel in ("conv", "depthwise") if name.startswith(kernel)), "matmul"), problem)


@pytest.mark.parametrize("call", on_each(fused, FUSED, quick={("matmul", 80), ("gated", 90), ("conv", 90), ("depthwise", 80)}))
def test_epilogues(call):
    run(call)


@pytest.mark.parametrize("role", ROLES["matmul"])
def test_copies_are_fenced_from_the_wgmma_that_read_them(role):
    """Triton before 3.7.1 omits the fences, and `compile_launch` adds them."""
    problem = test_matmul.a_problem(role, (1, 136, 144, 136), ("bf16",) * 3, arch=90)
    product = Call("matmul", problem, kernel_module("matmul").Config(tile_m=64, tile_n=64, tile_k=64))
    unfenced = product.ptx.replace("fence.proxy.async.shared::cta;", "")
    with pytest.raises(Fault, match="no fence.proxy.async follows the write"):
        product.execute(product.operands(integers=True), LATE, Module(unfenced))
    product.execute_and_check()


def test_sums_of_halves_of_indices():
    """This gradient read its sources one row too high on an H100: ptxas before CUDA 13.2 got the sums of its rows and 1 wrong."""
    problem = test_conv.a_problem("dgrad", N=3, C=136, K=264, input=(29, 28), dtypes=("fp16",) * 3, arch=90)
    gradient = Call("conv", problem, kernel_module("conv").Config(tile_m=128, tile_n=128, tile_k=64, num_warps=8, splits=5))
    with mock.patch.object(triton_ptx, "repaired", lambda ptx: ptx):
        assert "add.s16x2" in str(triton_ptx.compile_launch(gradient.launch, problem).asm["ptx"])
    assert "16x2" not in gradient.ptx
    operands = gradient.operands(integers=True)
    gradient.check(gradient.execute(operands, LATE), operands, integers=True)


RANGES = test_ragged_kernel.ranges_of((150, 0, 7, 133, 1), B=2, offset=3)  # edges in tiles and several in one; the last rows are nobody's
# A tile before the first group, edges in tiles, and rows of nobody at the end.
OFFSET = test_ragged_kernel.ranges_of((50, 0, 7, 93, 1), B=2, offset=140)
OF_RAGGED = {
    "plain": None,
    "rectified": Epilogue(activation="relu", bias="fp32", scale="bf16", saves=True),
    "gated": Epilogue(activation="silu", scale="fp32", gated=True, saves=True),
}


def ragged(how, role, numbers, epilogue, arch):
    """Visits are listed before, or found by each program; of gathered rows some are of several places, or of none."""
    sizes = dict(rows=310, B=2, R=2 if role == "tn" else 1, K=72, N=136, S=90 if how == "gathered" else None)
    ranges = RANGES if epilogue == "plain" else OFFSET
    problem = test_ragged_kernel.a_problem(role, ranges, **sizes, dtypes=(numbers,) * 3, precision="tf32", arch=arch)
    problem = dataclasses.replace(problem, epilogue=OF_RAGGED[epilogue])
    return call("ragged", problem, ranges, finds_visit=how != "listed" and role != "tn")


ROLES_OF_RAGGED = {"listed": ("nn", "nt", "tn"), "found": ("nn", "nt"), "gathered": ("nn", "tn")}
RAGGED = [row for how, roles in ROLES_OF_RAGGED.items() for row in each(ragged, [how], roles, ["bf16", "fp32"], ["plain"], ARCHS,
          slow=lambda *key: "fp32" in key)]  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("call", RAGGED)
def test_ragged(call):
    run(call)


def in_chunks(numbers, gathered, arch):
    """Some groups share a chunk, one has two; some rows of x are nobody's, and some places have none."""
    sizes = dict(rows=310, S=90 if gathered else None, B=2, R=2, K=72, N=40)
    problem = test_ragged_kernel.a_problem("tn", OFFSET, **sizes, dtypes=(numbers,) * 3, precision="tf32", arch=arch)
    return call("ragged", problem, OFFSET, tile_m=64, tile_n=64, num_warps=4, chunk=128)


@pytest.mark.parametrize("call", each(in_chunks, ["bf16", "fp32"], [False, True], ARCHS, slow=lambda *key: key != ("bf16", True, 90)))
def test_ragged_in_chunks(call):
    run(call)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("call", each(ragged, ROLES_OF_RAGGED, ["nn"], ["bf16"], ["rectified", "gated"], ARCHS))
def test_ragged_with_epilogue(call):
    run(call)


def causal(role, given, arch):
    """Several tiles to a program of the derivative; channels that fill no tile."""
    problem = test_causal_kernel.a_problem(role, T=300, C=72, dtype="bf16", **test_causal_kernel.GIVEN[given])
    return call("causal", dataclasses.replace(problem, arch=arch), splits=MOST_SPLITS)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "call", each(causal, test_causal_kernel.ROLES, ["plain", "state", "packed, state"], ARCHS, slow=lambda *key: "state" in key)
)
def test_causal(call):
    run(call)


SCALED = {  # role, slots with scales, blocks of rows, depth and columns, their sizes, dtypes
    "rows": ("nn", "xw", (150, 1, 136), (150, 192, 136), ("bf16", "bf16", "bf16")),
    "weights": ("nn", "w", (1, 3, 136), (24, 192, 136), ("bf16", "i8", "bf16")),
    "packed": ("nn", "w", (1, 3, 136), (24, 192, 136), ("bf16", "i8", "bf16")),
    "packed, transposed": ("nt", "w", (1, 3, 136), (72, 192, 136), ("i8", "bf16", "fp32")),
    "transposed": ("nt", "wx", (1, 192, 2), (72, 192, 136), ("i8", "bf16", "bf16")),
    "integers": ("nn", "xw", (72, 3, 136), (72, 192, 136), ("i8", "i8", "fp32")),
    "sum over rows": ("tn", "xyw", (8, 3, 17), (72, 192, 136), ("bf16", "bf16", "fp32")),
    "fp8": ("nn", "xw", (150, 2, 2), (150, 256, 136), ("fp8e4nv", "fp8e4nv", "bf16")),
    "fp8, transposed": ("nt", "yw", (150, 2, 2), (150, 256, 136), ("fp8e5", "fp8e4nv", "bf16")),
}


def scaled_call(name, arch):
    role, slots, cuts, sizes, dtypes = SCALED[name]
    problem = test_scaled_dot.a_problem(role, slots, cuts, sizes, dtypes, packed="packed" in name, arch=arch)
    problem = dataclasses.replace(problem, precision="tf32")
    if reason := scaled.refuses(problem):
        assert "8-bit floats" in reason and arch < 89
        return None
    return call("scaled", problem, splits=MOST_SPLITS)


QUICK_SCALED = {("weights", 80), ("packed", 80), ("packed, transposed", 90), ("sum over rows", 90), ("fp8", 90)}


@pytest.mark.parametrize("call", on_each(scaled_call, SCALED, quick=QUICK_SCALED))
def test_scaled(call):
    run(call)


RAGGED_SCALED = {  # role, slots with scales, blocks of depth and columns, their sizes, dtypes
    "weights": ("nn", "w", (1, 136), (136, 136), ("bf16", "i8", "bf16")),
    "packed": ("nn", "w", (3, 136), (192, 136), ("bf16", "i8", "bf16")),
    "packed, transposed": ("nt", "w", (3, 136), (192, 136), ("i8", "bf16", "bf16")),
    "transposed": ("nt", "wx", (192, 2), (192, 136), ("i8", "bf16", "bf16")),
    "integers": ("nn", "xw", (1, 136), (192, 136), ("i8", "i8", "bf16")),
    "sum over rows": ("tn", "xyw", (3, 17), (72, 136), ("bf16", "bf16", "fp32")),
    "fp8": ("nn", "xw", (2, 2), (256, 136), ("fp8e4nv", "fp8e4nv", "bf16")),
    "fp8, transposed": ("nt", "yw", (2, 2), (256, 136), ("fp8e4nv", "fp8e5", "bf16")),
    "fp8, sum over rows": ("tn", "xy", (2, 2), (136, 72), ("fp8e4nv", "fp8e5", "bf16")),
}


def ragged_scaled_call(name, arch):
    role, *given = RAGGED_SCALED[name]
    sizes = dict(G=5, rows=310, B=2, R=2 if role == "tn" else 1)
    problem = ragged_scaled_problem(role, *given, **sizes, packed="packed" in name, arch=arch)
    problem = dataclasses.replace(problem, precision="tf32")
    if reason := ragged_scaled.refuses(problem):
        assert "8-bit floats" in reason and arch < 89
        return None
    return call("ragged_scaled", problem, OFFSET)


QUICK_RAGGED_SCALED = {("weights", 80), ("packed", 90), ("transposed", 80), ("sum over rows", 90), ("fp8", 90)}


@pytest.mark.parametrize("call", on_each(ragged_scaled_call, RAGGED_SCALED, quick=QUICK_RAGGED_SCALED))
def test_ragged_scaled(call):
    run(call)


def call_of_tests(name, arch):
    kernel, name = name.split(": ")
    problem, config = OF_TESTS[kernel].IN_PTX[name]
    return call(kernel, dataclasses.replace(problem, precision="tf32", arch=arch), **config)


# Kernels whose tests in tests/kernels have the problems (`IN_PTX`), and of which architectures some are quick.
OF_TESTS = {kernel: module for kernel, of in CALLS.items() if hasattr(module := sys.modules[of.__module__], "IN_PTX")}
IN_PTX = [f"{kernel}: {name}" for kernel, module in OF_TESTS.items() for name in module.IN_PTX]
QUICK_OF_TESTS = {(f"{kernel}: {name}", arch) for kernel, module in OF_TESTS.items() for name, arch in module.QUICK_IN_PTX}


@pytest.mark.sampled(2, "gram: wide stores-80")
@pytest.mark.parametrize("call", on_each(call_of_tests, IN_PTX, quick=QUICK_OF_TESTS))
def test_problems_of_the_kernels_own_tests(call):
    run(call)
