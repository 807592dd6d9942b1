"""The PTX that Triton makes of our kernels, in the configurations that they pick, on small problems that do not fit their tiles.

Results are compared with the definition in float64: small integers exactly, other numbers up to rounding.  Asynchronous copies and products
take effect as late as they may, and then at once: both must give the same bits.  No device is needed, only Triton's compiler.
"""

import dataclasses
import functools
import math
from typing import Any
from unittest import mock

import pytest
import test_causal_kernel
import test_conv
import test_depthwise
import test_gram_kernel
import test_matmul
import test_ragged_kernel
import test_scaled_dot
from ptxsim import LATE, Fault, Module
from test_ragged_scaled_kernel import a_problem as ragged_scaled_problem
from triton_kernels import Call, call, kernel_module, skip_without_compiler

from jaxext.bench import triton_ptx
from jaxext.bench.kinds import Matmul
from jaxext.bench.problems import PRODUCTS, reduced
from jaxext.kernels.epilogue import Epilogue

FLOPS = 2e5  # of a smaller problem
MOST_SPLITS = 2  # of its depth
BF16 = ("bf16",) * 3

skip_without_compiler()


def each(build, *keys):
    """Parametrize by calls that are built when their test runs: to look for a configuration takes time."""
    rows = [pytest.param(functools.partial(build, *key), id="-".join(map(str, key))) for key in keys]
    return pytest.mark.parametrize("build", rows)


def run(call):
    assert not call.module.unverified_opcodes()
    assert not call.launch.then or not call.next_module.unverified_opcodes()
    call.execute_and_check()


def pick(name, role, numbers, arch):
    """The configuration that is picked for a problem of the suite, with a small problem that does not fit its tiles.

    If the problem's own sizes make it special, the small one is that problem reduced.
    """
    case = next(case for case in PRODUCTS if case.name == name)
    config = kernel_module(case.kernel).candidates(case.problem(role, numbers, arch))[0]
    config = dataclasses.replace(config, splits=min(config.splits, MOST_SPLITS))
    if isinstance(case, Matmul):
        sizes: Any = dict(B=min(case.B, 2), M=config.tile_m + 24, N=config.tile_n // 2 + 40, K=2 * config.tile_k + 16)
        small: Any = Matmul(name=case.name, numbers=case.numbers, **sizes)
    else:
        small = reduced(case, FLOPS)
    problem = small.problem(role, numbers, arch)
    if case.kernel == "conv":  # it may have fewer groups
        config = dataclasses.replace(config, groups=math.gcd(config.groups, problem.G))
    return Call(case.kernel, problem, config)


@each(
    pick,
    ("4096 cubed by other means, 4096x4096x4096", "nn", "fp8", 90),
    ("4096 cubed by other means, 4096x4096x4096", "nn", "int8", 90),
    ("convnext 7x7, 64x56x56x96", "dgrad", "bf16", 90),
    ("wrn 3x3 of few, 16 x 1x32x32x64", "wgrad", "fp32bf16", 80),
)
def test_pick(build):
    run(build())


MATMULS = {name: (sizes, ("bf16", "bf16", "fp32")) for name, sizes in test_matmul.SIZES.items()}
MATMULS["of three dtypes"] = test_matmul.SIZES["odd"], ("fp16", "bf16", "fp32")
CONVS = test_conv.CASES | {"in parts": dict(filter_dilation=(2, 1), dtypes=("fp32",) * 3, precision="tf32x3")}
PROBLEMS = {
    "matmul": lambda role, name, arch: test_matmul.a_problem(role, *MATMULS[name], "tf32", arch),
    "conv": lambda role, name, arch: test_conv.a_problem(role, **CONVS[name], arch=arch),
    "depthwise": lambda role, name, arch: test_depthwise.of_role(test_depthwise.CASES[name], role, arch=arch),
}


@each(
    lambda kernel, *of: call(kernel, PROBLEMS[kernel](*of)),
    ("matmul", "nn", "odd", 80),
    ("matmul", "nt", "outer", 90),
    ("matmul", "nn", "no_k", 90),
    ("matmul", "tn", "of three dtypes", 90),
    ("conv", "dgrad", "all_strides", 80),
    ("conv", "fprop", "in parts", 90),
    ("depthwise", "fprop", "k5 stride 3 dilation 2", 80),
    ("depthwise", "dgrad", "3-D stride 2", 90),
    ("depthwise", "wgrad", "3-D stride 2", 80),
)
def test_edges(build):
    run(build())


ALL = dict(bias="fp32", residual="bf16", saves=True)
FUSED: dict[str, tuple[Any, dict[str, Any]]] = {
    "matmul": (test_matmul.a_problem("nn", (2, 40, 72, 24), BF16), dict(activation="gelu", **ALL)),
    "gated": (test_matmul.a_problem("nn", (2, 40, 72, 24), BF16), dict(activation="silu", gated=True, saves=True)),
    "conv": (test_conv.a_problem("fprop", C=16, K=24, dtypes=BF16), dict(activation="relu6", **ALL)),
    "depthwise": (test_depthwise.CASES["3x3"], dict(activation="silu", **ALL)),
}


def fused(kernel, name, arch):
    problem, epilogue = FUSED[name]
    return call(kernel, dataclasses.replace(problem, arch=arch, epilogue=Epilogue(**epilogue)))


@each(fused, ("matmul", "matmul", 80), ("matmul", "gated", 90), ("conv", "conv", 90), ("depthwise", "depthwise", 80))
def test_epilogues(build):
    run(build())


@pytest.mark.parametrize("role", test_matmul.ROLES)
def test_copies_are_fenced_from_the_wgmma_that_read_them(role):
    """Triton before 3.7.1 omits the fences, and `compile_launch` adds them."""
    problem = test_matmul.a_problem(role, (1, 136, 144, 136), BF16, arch=90)
    product = Call("matmul", problem, kernel_module("matmul").Config(tile_m=64, tile_n=64, tile_k=64))
    unfenced = product.ptx.replace("fence.proxy.async.shared::cta;", "")
    with pytest.raises(Fault, match="no fence.proxy.async follows the write"):
        product.execute(product.operands(integers=True), LATE, Module(unfenced))
    product.execute_and_check()


def test_sums_of_halves_of_indices():
    """This gradient read its sources one row too high on an H100: ptxas before CUDA 13.2 got the sums of its rows and 1 wrong."""
    problem = test_conv.a_problem("dgrad", N=1, C=136, K=72, input=(29, 28), dtypes=("fp16",) * 3, arch=90)
    gradient = Call("conv", problem, kernel_module("conv").Config(tile_m=128, tile_n=128, tile_k=64, num_warps=8, splits=2))
    with mock.patch.object(triton_ptx, "repaired", lambda ptx: ptx):
        assert "add.s16x2" in str(triton_ptx.compile_launch(gradient.launch, problem).asm["ptx"])
    assert "16x2" not in gradient.ptx
    operands = gradient.operands(integers=True)
    gradient.check(gradient.execute(operands, LATE), operands, integers=True)


RANGES = dict(sizes=(150, 0, 7, 133, 1), offset=3)  # edges in tiles and several in one; the last rows are nobody's
OFFSET = dict(sizes=(50, 0, 7, 93, 1), offset=140)  # a tile before the first group, edges in tiles, and rows of nobody at the end
OF_RAGGED = {
    "plain": None,
    "rectified": Epilogue(activation="relu", bias="fp32", scale="bf16", saves=True),
    "gated": Epilogue(activation="silu", scale="fp32", gated=True, saves=True),
}


def ragged(how, role, epilogue, arch):
    """Visits are listed before, or found by each program; of gathered rows some are of several places, or of none."""
    B = 2 if (how, role) == ("found", "nt") else 1
    sizes = dict(rows=310, B=B, R=2 if role == "tn" else 1, K=72, N=136, S=90 if how == "gathered" else None)
    ranges = test_ragged_kernel.ranges_of(**(RANGES if epilogue == "plain" else OFFSET), B=B)
    problem = test_ragged_kernel.a_problem(role, ranges, **sizes, dtypes=BF16, precision="tf32", arch=arch)
    problem = dataclasses.replace(problem, epilogue=OF_RAGGED[epilogue])
    return call("ragged", problem, ranges, finds_visit=how != "listed" and role != "tn")


@each(
    ragged,
    ("listed", "nn", "plain", 80),
    ("listed", "tn", "plain", 90),
    ("found", "nt", "plain", 90),
    ("gathered", "tn", "plain", 80),
    ("listed", "nn", "rectified", 80),
    ("gathered", "nn", "gated", 90),
)
def test_ragged(build):
    run(build())


def test_ragged_in_chunks():
    """Some groups share a chunk, one has two; some rows of x are nobody's, and some places have none."""
    ranges = test_ragged_kernel.ranges_of(**OFFSET, B=2)
    problem = test_ragged_kernel.a_problem("tn", ranges, rows=310, S=90, B=2, R=2, K=72, N=40, dtypes=BF16, precision="tf32")
    run(call("ragged", problem, ranges, tile_m=64, tile_n=64, num_warps=4, chunk=128))


def causal(role, given, arch):
    """Several tiles to a program of the derivative; channels that fill no tile."""
    problem = test_causal_kernel.a_problem(role, T=300, C=72, dtype="bf16", **test_causal_kernel.GIVEN[given])
    return call("causal", dataclasses.replace(problem, arch=arch), splits=MOST_SPLITS)


@each(causal, ("forward", "plain", 80), ("forward", "packed, state", 80), ("backward", "plain", 90))
def test_causal(build):
    run(build())


SCALED = {  # role, slots with scales, blocks of rows, depth and columns, their sizes, dtypes
    "weights": ("nn", "w", (1, 3, 136), (24, 192, 136), ("bf16", "i8", "bf16")),
    "packed": ("nn", "w", (1, 3, 136), (24, 192, 136), ("bf16", "i8", "bf16")),
    "packed, transposed": ("nt", "w", (1, 3, 136), (72, 192, 136), ("i8", "bf16", "fp32")),
    "sum over rows": ("tn", "xyw", (8, 3, 17), (72, 192, 136), ("bf16", "bf16", "fp32")),
    "fp8": ("nn", "xw", (150, 2, 2), (150, 256, 136), ("fp8e4nv", "fp8e4nv", "bf16")),
}


def scaled_call(name, arch):
    problem = test_scaled_dot.a_problem(*SCALED[name], packed="packed" in name, arch=arch)
    return call("scaled", dataclasses.replace(problem, precision="tf32"), splits=MOST_SPLITS)


@each(scaled_call, ("weights", 80), ("packed", 80), ("packed, transposed", 90), ("sum over rows", 90), ("fp8", 90))
def test_scaled(build):
    run(build())


RAGGED_SCALED = {  # role, slots with scales, blocks of depth and columns, their sizes, dtypes
    "weights": ("nn", "w", (1, 136), (136, 136), ("bf16", "i8", "bf16")),
    "packed": ("nn", "w", (3, 136), (192, 136), ("bf16", "i8", "bf16")),
    "transposed": ("nt", "wx", (192, 2), (192, 136), ("i8", "bf16", "bf16")),
    "sum over rows": ("tn", "xyw", (3, 17), (72, 136), ("bf16", "bf16", "fp32")),
    "fp8": ("nn", "xw", (2, 2), (256, 136), ("fp8e4nv", "fp8e4nv", "bf16")),
}


def ragged_scaled_call(name, arch):
    role, *given = RAGGED_SCALED[name]
    sizes = dict(B=2 if name == "weights" else 1, R=2 if role == "tn" else 1)
    problem = ragged_scaled_problem(role, *given, **sizes, G=5, rows=170, packed="packed" in name, arch=arch)
    ranges = test_ragged_kernel.ranges_of((50, 0, 7, 93, 1), B=sizes["B"], offset=10)
    return call("ragged_scaled", dataclasses.replace(problem, precision="tf32"), ranges)


@each(ragged_scaled_call, ("weights", 80), ("packed", 90), ("transposed", 80), ("sum over rows", 90), ("fp8", 90))
def test_ragged_scaled(build):
    run(build())


def gram(name, arch):
    problem, config = test_gram_kernel.IN_PTX[name]
    return call("gram", dataclasses.replace(problem, arch=arch), **config)


@each(gram, ("16 bits", 90), ("tall tiles", 80), ("wide stores", 80))
def test_gram(build):
    run(build())
