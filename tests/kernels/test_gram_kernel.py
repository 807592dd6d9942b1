"""kernels/gram in Triton's interpreter: against float64, bit for bit symmetric, with every tile written once."""

import dataclasses
import os
from typing import Any

import jax
import numpy as np
import pytest
from calls import Call, Suite, absolute, each
from cases import random

import jaxext
from jaxext.backends.triton.interpreter import DTYPES
from jaxext.kernels import gram
from jaxext.kernels.matmul import Config
from jaxext.ops.gram import form as family

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="TRITON_INTERPRET is not 1")
CONFIG = Config(tile_m=16, tile_n=16, tile_k=16)


def a_problem(rows=40, depth=24, dtypes=("bf16", "fp32"), B=1, arch=90, **added):
    return gram.Problem(
        name="gram", role="nt", B=B, M=rows, K=rows, N=depth, dtypes=(dtypes[0], *dtypes), precision="ieee", arch=arch, **added
    )  # fmt: skip


class GramCall(Call):
    kernel = "gram"

    def small(self) -> Config:
        return dataclasses.replace(CONFIG, tile_k=16 if self.problem.bits > 8 else 32)

    def operands(self, integers=True):
        problem = self.problem
        operands = {"c": random((problem.B, problem.M, problem.N), DTYPES[problem.dtypes[0]], 0, integers)}
        if problem.addend:
            square = random((problem.B, problem.M, problem.M), np.float32, 1, integers)
            operands["addend"] = (square + square.swapaxes(1, 2)).astype(DTYPES[problem.addend])
        return operands

    @property
    def shapes(self):
        return ((self.problem.B, self.problem.M, self.problem.M),)

    def sums(self, operands):
        x = operands["c"].astype(np.float64)
        y = self.problem.scale * x @ x.swapaxes(1, 2)
        return y + self.problem.of_addend * operands["addend"].astype(np.float64) if self.problem.addend else y

    def scales(self, operands, product_error=1):
        positive = self.with_problem(scale=abs(self.problem.scale), of_addend=abs(self.problem.of_addend))
        return [product_error * positive.sums(absolute(operands))]

    def judge(self, got, operands, exact, product_error=1):
        np.testing.assert_array_equal(got[0], got[0].swapaxes(1, 2))
        super().judge(got, operands, exact, product_error)


_ADDED: dict[str, Any] = dict(addend="bf16", scale=2.0, of_addend=-4.5)
IN_PTX = {  # for tests/ptx: a problem, and the configuration if it is not the one picked
    "16 bits": (a_problem(300, 72, ("bf16", "bf16")), {}),
    "tall tiles": (a_problem(300, 72, ("fp16", "fp16")), dict(tile_m=128, tile_n=64)),
    "wide stores": (a_problem(136, 40, ("bf16", "bf16"), **_ADDED), dict(tile_m=64, tile_n=64, num_warps=4)),
}
TILES = {"square tiles": {}, "tall tiles": dict(tile_m=32), "splits": dict(splits=3)}
DTYPES_OF_A_CALL = [("fp32", "fp32"), ("bf16", "bf16"), ("fp16", "fp32"), ("fp8e4nv", "bf16")]
BY_DTYPES = each(lambda dtypes, tiles: GramCall.smallest(a_problem(40, 72, dtypes, B=2), **TILES[tiles]), DTYPES_OF_A_CALL, TILES)


class TestGram(Suite):
    call, most = GramCall, 40
    geometry = each(lambda rows, tiles: GramCall.smallest(a_problem(rows), **TILES[tiles]), [1, 16, 31, 33, 64, 80, 150], [*TILES][:2])
    dtypes = BY_DTYPES
    configs = each(
        lambda addend, tiles: GramCall.smallest(a_problem(B=2, addend=addend, scale=-2.0, of_addend=0.5), **TILES[tiles]),
        ["fp32", "bf16"],
        [*TILES][:2],
    )
    rounding = BY_DTYPES + each(
        lambda addend, tiles: GramCall.smallest(
            a_problem(dtypes=("bf16", "bf16"), addend=addend, scale=2.0315, of_addend=-4.775), **TILES[tiles]
        ),
        ["fp32", "bf16"],
        [*TILES][:2],
    )
    same_bits = each(lambda tiles: GramCall.smallest(a_problem(40, 72), **TILES[tiles]), TILES)
    refused_problems = [
        (GramCall(a_problem(dtypes=("i8", "i32")), CONFIG), "want floats"),
        (GramCall(a_problem(addend="i32")), "addend is i32"),
        (GramCall(a_problem(dtypes=("fp8e5", "fp32"), arch=80)), "8-bit floats"),
    ]
    refused_configs = [
        (GramCall.smallest(a_problem(), tile_n=32), "want as many columns as rows, or half as many"),
        (GramCall.smallest(a_problem(), tile_k=8), "tile_k is 8"),
        (GramCall.smallest(a_problem(), splits=0), "splits is 0"),
        (GramCall.smallest(a_problem(scale=2.0), splits=2), "splits is 2"),
        (GramCall.smallest(a_problem(), tile_m=256, tile_n=256, tile_k=256), "shared memory"),
    ]
    candidates = each(
        lambda rows, arch: [
            dataclasses.replace(a_problem(rows, 1024, (dtype, dtype), arch=arch), precision="tf32") for dtype in ("bf16", "fp32")
        ],
        [17, 256, 1000, 4096, 16384],
        [80, 90, 100],
    )

    def check_candidate(self, problem, config, launch):
        """It has about half as many programs as a product."""
        count = -(-problem.M // config.tile_m)
        assert launch.grid == (config.splits * config.tile_m // config.tile_n * count * (count + 1) // 2,)


@pytest.mark.parametrize("ratio", gram.RATIOS)
@pytest.mark.parametrize("count", [*range(1, 12), 31, 32])
def test_each_tile_of_the_triangle_is_computed_once(count, ratio):
    """The kernel's mapping is repeated in Python."""
    config = dataclasses.replace(CONFIG, tile_m=16 * ratio)
    rows, cols, _ = gram.tiles(a_problem(16 * ratio * count), config)
    even = 1 - count % 2
    got = []
    for row in range(rows):
        for col in range(cols):
            short = row + even
            in_short = col < ratio * short
            got.append((short - 1, col) if in_short else (count - 1 + even - short, col - ratio * short))
    assert sorted(got) == [(row, col) for row in range(count) for col in range(ratio * (row + 1))]


def test_only_half_of_the_addend_is_read():
    """Elements above the diagonal may be anything."""
    problem = a_problem(40, 24, addend="fp32", of_addend=1.0)
    call = GramCall(problem)
    operands = call.operands()
    below = {**operands, "addend": np.where(np.tri(40, dtype=bool), operands["addend"], np.float32("nan"))}
    call.judge(call.compute(below), operands, exact=True)


@interpreted
def test_newton_schulz():
    """This kernel and that of matrix products compute it alone, also for no rows."""
    x = random((2, 20, 33), np.float32, 0)
    ours, plain = (jaxext.newton_schulz(x, steps=2, implementation=name, precision="highest") for name in ("triton", "xla"))
    np.testing.assert_allclose(ours, plain, atol=1e-4)
    assert jaxext.newton_schulz(x[:, :0], implementation="triton").shape == (2, 0, 33)
    rows = jaxext.explain(lambda x: jaxext.newton_schulz(x, implementation="triton"))(x).rows
    assert {(row.op, row.chosen) for row in rows} == {("gram", "triton"), ("linear", "triton")}


@interpreted
def test_what_the_binding_refuses():
    for x, reason in [(np.ones((2, 3)), "c is float64"), (np.ones((2, 3), np.int8), "c is int8|want floats|a is int8")]:
        with pytest.raises(NotImplementedError, match=reason):
            jaxext.gram(x, implementation="triton")
    options = family.Options(sum=True, of_addend=1.0)
    with pytest.raises(NotImplementedError, match="addend is complex64"):
        x = jax.numpy.ones((2, 3), np.float32)
        family.bound(x, jax.numpy.ones((2, 2), np.complex64), options, dtypes=(x.dtype,), implementation="triton")
