"""Kernels are well compiled for the layers of models and for odd channels, which Triton's interpreter cannot show.  No GPU is needed."""

from __future__ import annotations

import importlib
import itertools
import math
from typing import Any

import pytest

pytest.importorskip("triton", reason="no Triton here")

# ruff: noqa: E402
from benchmarks import compiled
from benchmarks.kernel_problems import COMPILED
from jaxext.bench import triton_ptx
from jaxext.bench.own import Own
from jaxext.kernels import conv, ragged, ragged_scaled, scaled
from jaxext.kernels.epilogue import Epilogue
from jaxext.kernels.geometry import ConvProblem

pytestmark = [
    pytest.mark.skipif(triton_ptx.missing() is not None, reason=str(triton_ptx.missing())),
    pytest.mark.usefixtures("empty_cache"),
]

# Those of jaxext's own operations, but for exact float32, which tensor cores do not multiply.
OWN: dict[str, tuple[Any, str, str]] = {
    f"{case.name}, {numbers}": (case, case.products[0], numbers)
    for case in COMPILED
    if case.kernel != "causal" and isinstance(case, Own)  # which multiplies no tiles
    for numbers in case.numbers
    if numbers != "ieee"
}
WIDE, FEW = (4096, 4096, 4096), (16, 4096, 4096)  # M, K, N
FP8, INT8 = ("fp8e4nv", "fp8e4nv", "bf16"), ("bf16", "i8", "bf16")
SCALED = {  # role, slots with scales, blocks of M, K and N, sizes, dtypes
    "fp8, rows and columns": ("nn", "xw", (4096, 1, 4096), WIDE, FP8),
    "fp8, squares of 128": ("nn", "xw", (4096, 32, 32), WIDE, FP8),
    "fp8, squares of 128, transposed": ("nt", "yw", (4096, 32, 32), WIDE, FP8),
    "fp8, blocks of 32": ("nn", "xw", (4096, 128, 4096), WIDE, FP8),
    "fp8, blocks of 16": ("nn", "xw", (4096, 256, 4096), WIDE, FP8),
    "fp8, sum over rows": ("tn", "xy", (1, 1, 1), WIDE, ("fp8e4nv", "fp8e5", "bf16")),
    "int8, few rows": ("nn", "w", (1, 1, 4096), FEW, INT8),
    "int8 in groups, few rows": ("nn", "w", (1, 32, 4096), FEW, INT8),
    "packed int4 in groups, few rows": ("nn", "w", (1, 32, 4096), FEW, INT8),
    "packed int4 in groups": ("nn", "w", (1, 32, 4096), WIDE, INT8),
    "packed int4 in groups, gradient": ("nt", "w", (1, 32, 4096), WIDE, ("i8", "bf16", "bf16")),
    "int8 by int8": ("nn", "xw", (4096, 1, 4096), WIDE, ("i8", "i8", "bf16")),
}
EXPERTS = {"DeepSeek-V3": (8192, 7168, 2048, 256), "Mixtral": (8192, 4096, 14336, 8), "gpt-oss": (8192, 2880, 2880, 128)}  # M, K, N, G
EPILOGUES = {
    "bias and scale": Epilogue(activation="gelu", bias="bf16", scale="fp32", saves=True),
    "gate": Epilogue(activation="silu", gated=True, scale="fp32", saves=True),
}
RAGGED = {f"{name}, {role}": (name, role, None) for name in EXPERTS for role in ("nn", "nt", "tn")}
RAGGED |= {f"{name}, {epilogue}": (name, "nn", EPILOGUES[epilogue]) for name in EXPERTS for epilogue in EPILOGUES}
SCALED_EXPERTS = {  # role, slots with scales, sizes of their blocks of K and N (None: all of K), dtypes
    "fp8, squares of 128": ("nn", "xw", (128, 128), FP8),
    "fp8, squares of 128, transposed": ("nt", "yw", (128, 128), FP8),
    "fp8, sum over rows": ("tn", "xy", (128, 128), ("fp8e4nv", "fp8e5", "bf16")),
    "int8": ("nn", "w", (None, 1), INT8),
    "int8, gradient": ("nt", "w", (None, 1), ("i8", "bf16", "bf16")),
    "packed int4 in groups": ("nn", "w", (128, 1), INT8),
    "packed int4 in groups, gradient": ("nt", "w", (128, 1), ("i8", "bf16", "bf16")),
}
RAGGED_SCALED = {f"{name}, {of}": (name, *SCALED_EXPERTS[of]) for name in ("DeepSeek-V3", "Mixtral") for of in SCALED_EXPERTS}
QUICK = {
    ("DeepSeek-V3, fp8, squares of 128", 90),
    ("DeepSeek-V3, packed int4 in groups", 80),
    ("fp8, squares of 128", 90),
    ("fp8, blocks of 16", 90),
    ("packed int4 in groups, few rows", 80),
    ("int8 by int8", 100),
}
QUICK |= {(next(iter(OWN)), 80), (next(name for name in OWN if name.endswith("tf32")), 100)}
QUICK |= {(name, 90) for name in RAGGED if name.startswith("DeepSeek-V3")}


def a_problem(name, arch):
    """The kernel, and its problem."""
    common: Any = dict(B=1, precision="tf32", arch=arch)
    if name in OWN:
        case, role, numbers = OWN[name]
        return importlib.import_module(f"jaxext.kernels.{case.kernel}"), case.problem(role, numbers, arch)
    if name in SCALED:
        role, slots, blocks, sizes, dtypes = SCALED[name]
        common |= dict(zip("ISJMKN", blocks + sizes, strict=True))
        given = dict(role=role, scaled=tuple(slots), packed="packed" in name, dtypes=dtypes)
        return scaled, scaled.Problem(name=f"scaled_dot_{slots}_{role}", **given, **common)
    if name in RAGGED_SCALED:
        experts, role, slots, (s, j), dtypes = RAGGED_SCALED[name]
        sizes = dict(zip("MKNG", EXPERTS[experts], strict=True))
        blocks = dict(S=sizes["K"] // (s or sizes["K"]), J=sizes["N"] // j, I=sizes["M"] if {*"xy"} & {*slots} else 1)
        given = dict(role=role, scaled=tuple(slots), packed="packed" in name, dtypes=dtypes)
        return ragged_scaled, ragged_scaled.Problem(name=f"ragged_scaled_{slots}_{role}", P=1, R=1, **sizes, **blocks, **given, **common)
    experts, role, epilogue = RAGGED[name]
    sizes = dict(zip("MKNG", EXPERTS[experts], strict=True))
    return ragged, ragged.Problem(name=f"ragged_{role}", role=role, P=1, R=1, **sizes, dtypes=("bf16",) * 3, epilogue=epilogue, **common)


@pytest.mark.sampled(2, "blocks of 16")
@pytest.mark.parametrize(
    ("name", "arch"),
    [
        pytest.param(*key, marks=() if key in QUICK else pytest.mark.slow)
        for key in itertools.product([*OWN, *SCALED, *RAGGED, *RAGGED_SCALED], compiled.ARCHS)
    ],
)
def test_picks_are_well_compiled(name, arch):
    """The laws of all kernels hold, and large tiles are multiplied by the newest tensor cores."""
    module, problem = a_problem(name, arch)
    if reason := module.refuses(problem):
        assert arch < 89 and "8-bit floats" in reason
        return
    config = module.candidates(problem)[0]
    row = compiled.compile_row(compiled.Program(module.__name__.rpartition(".")[2], name, "", problem, config, True))
    assert compiled.offences(row) == [], row
    if name != "int8 by int8":  # Triton 3.6 has mma alone for these on 10.0
        assert row[{90: "wgmma", 100: "tcgen05"}.get(arch, "mma") if config.tile_m >= 64 else "mma"] > 0
    if name in SCALED:
        assert row["loads"].keys() & {"16", "8"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "role, channels, precision, arch",
    [("fprop", (6, 10), "tf32", 90), ("dgrad", (3, 2), "bf16x6", 90), ("wgrad", (2, 6), "ieee", 80)],
)
def test_convolutions_of_odd_channels(role, channels, precision, arch):
    """Loads are aligned, and products as precise as asked.

    Groups, pixels and taps lie at any multiple of a group's channels: an access that is wider than that is misaligned on a GPU.
    """
    C, K = channels
    problem = ConvProblem(
        name=f"conv2d_{role}", role=role, B=2, N=2, G=3, C=C, K=K, input=(1, 16, 32), filter=(1, 3, 3), output=(1, 8, 32),
        stride=(1, 2, 1), low=(0, 1, 1), dtypes=("fp32",) * 3, precision=precision, arch=arch,
    )  # fmt: skip
    row = compiled.compile_row(compiled.Program("conv", "odd", "", problem, conv.candidates(problem)[0], True))
    assert {dot["precision"] for dot in row["dots"]} == {precision}
    assert row["loads"] and max(map(int, row["loads"])) <= 4 * max(math.gcd(C, 4), math.gcd(K, 4))


def test_integers_are_multiplied_by_tensor_cores():
    """Groups have one channel, and several share a tile; the result wraps in int8."""
    problem = ConvProblem(
        name="conv2d_fprop", role="fprop", B=1, N=2, G=32, C=1, K=1, input=(1, 16, 32), filter=(1, 3, 3), output=(1, 16, 32),
        low=(0, 1, 1), dtypes=("i8", "i8", "i8"), precision="tf32", arch=80,
    )  # fmt: skip
    ptx = str(triton_ptx.compile_launch(conv.launch(problem, conv.candidates(problem)[0]), problem).asm["ptx"])
    assert "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32" in ptx
    assert compiled.assembled(ptx)["spills"] == 0
