"""kernels/gram in Triton's interpreter: against float64, bit for bit symmetric, with every tile written once."""

import dataclasses
import functools
import os

import harness
import jax
import numpy as np
import pytest
from cases import random

import jaxext
from jaxext import testing
from jaxext.backends.triton.interpreter import DTYPES
from jaxext.families import gram as family
from jaxext.kernels import gram
from jaxext.kernels.matmul import Config

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="TRITON_INTERPRET is not 1")
CONFIG = Config(tile_m=16, tile_n=16, tile_k=16)
WIDE = dataclasses.replace(CONFIG, tile_m=32)  # twice as many rows as columns


def a_problem(rows=40, depth=24, dtypes=("bf16", "fp32"), B=1, arch=90, **added):
    return gram.Problem(
        name="gram",
        role="nt",
        B=B,
        M=rows,
        K=rows,
        N=depth,
        dtypes=(dtypes[0], dtypes[0], dtypes[1]),
        precision="ieee",
        arch=arch,
        **added,
    )


def some_operands(problem, integers=True) -> dict[str, np.ndarray]:
    operands = {"c": random((problem.B, problem.M, problem.N), DTYPES[problem.dtypes[0]], 0, integers)}
    if problem.addend:
        square = random((problem.B, problem.M, problem.M), np.float32, 1, integers)
        operands["addend"] = (square + square.swapaxes(1, 2)).astype(DTYPES[problem.addend])
    return operands


def true(problem, operands) -> np.ndarray:
    x = operands["c"].astype(np.float64)
    y = problem.scale * x @ x.swapaxes(1, 2)
    return y + problem.of_addend * operands["addend"].astype(np.float64) if problem.addend else y


def magnitude(problem, operands) -> np.ndarray:
    positive = dataclasses.replace(problem, scale=abs(problem.scale), of_addend=abs(problem.of_addend))
    return true(positive, {name: np.abs(x) for name, x in operands.items()})


def shape(problem) -> tuple[int, int, int]:
    return problem.B, problem.M, problem.M


def check(problem, config=CONFIG, integers=True) -> None:
    operands = some_operands(problem, integers)
    got = harness.run(gram.launch(problem, config), operands, shape(problem), problem.dtypes[2])
    np.testing.assert_array_equal(got, got.swapaxes(1, 2))
    harness.check(got, true(problem, operands), None if integers else magnitude(problem, operands))


@pytest.mark.parametrize("ratio", gram.RATIOS)
@pytest.mark.parametrize("count", [*range(1, 12), 31, 32])
def test_each_tile_of_the_triangle_is_computed_once(count, ratio):
    """By the mapping of the kernel, in Python."""
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


@interpreted
@pytest.mark.parametrize("config", [CONFIG, WIDE], ids=["square tiles", "tall tiles"])
@pytest.mark.parametrize("rows", [1, 16, 31, 33, 64, 80, 150])
def test_sizes(rows, config):
    check(a_problem(rows), config)


@interpreted
@pytest.mark.parametrize("config", [CONFIG, WIDE, dataclasses.replace(CONFIG, splits=3)], ids=["square tiles", "tall tiles", "splits"])
@pytest.mark.parametrize("dtypes", [("fp32", "fp32"), ("bf16", "bf16"), ("fp16", "fp32"), ("fp8e4nv", "bf16")], ids=str)
def test_dtypes(dtypes, config):
    config = dataclasses.replace(config, tile_k=32) if dtypes[0] == "fp8e4nv" else config
    for integers in (True, False):
        check(a_problem(40, 72, dtypes, B=2), config, integers)


@interpreted
@pytest.mark.parametrize("addend", ["fp32", "bf16"])
@pytest.mark.parametrize("config", [CONFIG, WIDE], ids=["square tiles", "tall tiles"])
def test_what_is_added(config, addend):
    check(a_problem(40, 24, ("bf16", "fp32"), B=2, addend=addend, scale=-2.0, of_addend=0.5), config)
    check(a_problem(40, 24, ("bf16", "bf16"), addend=addend, scale=2.0315, of_addend=-4.775), config, integers=False)


@interpreted
def test_only_half_of_the_addend_is_read():
    """That on and below the diagonal: the rest may be anything."""
    problem = a_problem(40, 24, addend="fp32", of_addend=1.0)
    operands = some_operands(problem)
    below = {**operands, "addend": np.where(np.tri(40, dtype=bool), operands["addend"], np.float32("nan"))}
    got = harness.run(gram.launch(problem, CONFIG), below, shape(problem), "fp32")
    harness.check(got, true(problem, operands))


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("rows", [17, 256, 1000, 4096, 16384])
def test_every_candidate_can_be_launched(rows, arch):
    """And it has about half as many programs as a product."""
    for dtypes in (("bf16", "bf16"), ("fp32", "fp32")):
        problem = dataclasses.replace(a_problem(rows, 1024, dtypes, arch=arch), precision="tf32")
        assert gram.candidates(problem)
        for config in gram.candidates(problem):
            (programs,) = gram.launch(problem, config).grid
            count = -(-rows // config.tile_m)
            assert programs == config.splits * config.tile_m // config.tile_n * count * (count + 1) // 2


@pytest.mark.parametrize(
    ("problem", "config", "reason"),
    [
        (a_problem(dtypes=("i8", "i32")), CONFIG, "want floats"),
        (a_problem(addend="i32"), CONFIG, "addend is i32"),
        (a_problem(dtypes=("fp8e5", "fp32"), arch=80), CONFIG, "8-bit floats"),
        (a_problem(), dataclasses.replace(CONFIG, tile_n=32), "want as many columns as rows, or half as many"),
        (a_problem(), dataclasses.replace(CONFIG, tile_k=8), "tile_k is 8"),
        (a_problem(), dataclasses.replace(CONFIG, splits=0), "splits is 0"),
        (a_problem(scale=2.0), dataclasses.replace(CONFIG, splits=2), "splits is 2"),
        (a_problem(), Config(tile_m=256, tile_n=256, tile_k=256), "shared memory"),
    ],
    ids=str,
)
def test_what_is_refused(problem, config, reason):
    with pytest.raises(ValueError, match=reason):
        gram.launch(problem, config)


SKIP = {name: "interpreted" for name in testing.CHECKS if "automatic" in name or "export" in name or "of two" in name}


@interpreted
def test_every_transformation():
    """Small integers: bit for bit."""
    x = random((3, 4), np.float32, 0, integers=True)
    product = functools.partial(jaxext.gram, implementation="triton")
    report = testing.check_op(product, lambda x: x @ x.swapaxes(-1, -2), (x,), tolerance=0, skip=SKIP, show=False)
    report.raise_if_failed()
    assert sum(row.outcome == "passed" for row in report.rows) > 20


@interpreted
def test_newton_schulz():
    """By this kernel and that of matrix products alone, also of no rows."""
    x = random((2, 20, 33), np.float32, 0)
    ours, plain = (jaxext.newton_schulz(x, 2, implementation=name, precision="highest") for name in ("triton", "xla"))
    np.testing.assert_allclose(ours, plain, atol=1e-4)
    assert jaxext.newton_schulz(x[:, :0], implementation="triton").shape == (2, 0, 33)
    rows = jaxext.explain(lambda x: jaxext.newton_schulz(x, implementation="triton"), x).rows
    assert {(row.op, row.chosen) for row in rows} == {("gram", "triton"), ("linear", "triton")}


@interpreted
def test_what_the_binding_refuses():
    for x, reason in [(np.ones((2, 3)), "c is float64"), (np.ones((2, 3), np.int8), "c is int8|want floats|a is int8")]:
        with pytest.raises(NotImplementedError, match=reason):
            jaxext.gram(x, implementation="triton")
    static = family.Static(sum=True, of_addend=1.0)
    with pytest.raises(NotImplementedError, match="addend is complex64"):
        x = jax.numpy.ones((2, 3), np.float32)
        family.bound(
            x, jax.numpy.ones((2, 2), np.complex64), static, dtype=x.dtype, precision=None, out_sharding=None, implementation="triton"
        )
