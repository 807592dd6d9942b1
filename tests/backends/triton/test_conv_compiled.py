"""kernels/conv as it is compiled for odd channels: what Triton's interpreter cannot show.  No GPU is needed."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("triton", reason="no Triton here")

# ruff: noqa: E402
from jaxext.benchmarks import compiled
from jaxext.kernels import conv
from jaxext.kernels.geometry import ConvProblem


@pytest.mark.parametrize(
    "role, channels, precision, arch",
    [("fprop", (6, 10), "tf32", 90), ("dgrad", (3, 2), "bf16x6", 90), ("wgrad", (2, 6), "ieee", 80)],
)
def test_loads_are_aligned_and_products_as_precise_as_asked(role, channels, precision, arch, tmp_path, monkeypatch):
    """Groups, pixels and taps lie at any multiple of a group's channels: an access that is wider than that is misaligned on a GPU.

    The interpreter knows neither widths nor precisions.
    """
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    C, K = channels
    problem = ConvProblem(
        name=f"conv2d_{role}", role=role, B=2, N=2, G=3, C=C, K=K, input=(1, 16, 32), filter=(1, 3, 3), output=(1, 8, 32),
        stride=(1, 2, 1), low=(0, 1, 1), dtypes=("fp32",) * 3, precision=precision, arch=arch,
    )  # fmt: skip
    built = compiled.compile_launch(conv.launch(problem, conv.candidates(problem)[0]), problem)
    assert {dot["precision"] for dot in compiled.dots(str(built.asm["ttir"]))} == {precision}
    loads = compiled.assembled(str(built.asm["ptx"]))["loads"]
    assert loads and max(map(int, loads)) <= 4 * max(math.gcd(C, 4), math.gcd(K, 4))


def test_integers_are_multiplied_by_tensor_cores(tmp_path, monkeypatch):
    """Of one channel per group, several of which share a tile; the result wraps in int8."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    problem = ConvProblem(
        name="conv2d_fprop", role="fprop", B=1, N=2, G=32, C=1, K=1, input=(1, 16, 32), filter=(1, 3, 3), output=(1, 16, 32),
        low=(0, 1, 1), dtypes=("i8", "i8", "i8"), precision="tf32", arch=80,
    )  # fmt: skip
    ptx = str(compiled.compile_launch(conv.launch(problem, conv.candidates(problem)[0]), problem).asm["ptx"])
    assert "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32" in ptx
    assert compiled.assembled(ptx)["spills"] == 0
