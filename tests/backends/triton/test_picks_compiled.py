"""Kernels are well compiled for the layers of models and for odd channels, which Triton's interpreter cannot show.  No GPU is needed."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("triton", reason="no Triton here")

# ruff: noqa: E402
from benchmarks import compiled
from jaxext.bench import triton_ptx
from jaxext.kernels import conv, ragged_scaled, scaled
from jaxext.kernels.geometry import ConvProblem

pytestmark = [
    pytest.mark.skipif(triton_ptx.missing() is not None, reason=str(triton_ptx.missing())),
    pytest.mark.usefixtures("empty_cache"),
]


def blocks_of_16():
    sizes = dict(M=4096, K=4096, N=4096, I=4096, S=256, J=4096)
    given = dict(role="nn", scaled=("x", "w"), packed=False, dtypes=("fp8e4nv", "fp8e4nv", "bf16"), precision="tf32", arch=90)
    return scaled, scaled.Problem(name="scaled_dot_xw_nn", B=1, **sizes, **given)


def expert_problem(slots, arch, **given):
    """The experts of DeepSeek-V3."""
    sizes = dict(B=1, P=1, R=1, M=8192, K=7168, N=2048, G=256)
    name = f"ragged_scaled_{''.join(slots)}_nn"
    return ragged_scaled, ragged_scaled.Problem(name=name, role="nn", scaled=slots, precision="tf32", arch=arch, **sizes, **given)


def squares():
    return expert_problem(("x", "w"), 90, S=56, J=16, I=8192, packed=False, dtypes=("fp8e4nv", "fp8e4nv", "bf16"))


def int4_in_groups():
    return expert_problem(("w",), 80, S=56, J=2048, I=1, packed=True, dtypes=("bf16", "i8", "bf16"))


@pytest.mark.parametrize("problem", [blocks_of_16, squares, int4_in_groups])
def test_picks_are_well_compiled(problem):
    """The laws of all kernels hold, and large tiles are multiplied by the newest tensor cores."""
    module, problem = problem()
    config = module.candidates(problem)[0]
    row = compiled.compile_row(compiled.Program(module.__name__.rpartition(".")[2], problem.name, "", problem, config, True))
    assert compiled.offences(row) == [], row
    assert row["wgmma" if problem.arch == 90 and config.tile_m >= 64 else "mma"] > 0
    assert module is ragged_scaled or row["loads"].keys() & {"16", "8"}


@pytest.mark.parametrize("role, channels, precision, arch", [("fprop", (6, 10), "tf32", 90), ("wgrad", (2, 6), "ieee", 80)])
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
