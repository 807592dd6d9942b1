"""The CUDA kernels of weight-only products on a CPU: problems, operands and the truth, and how the driver
tests/csrc/weight_only_driver.cc is asked (simt.py builds it)."""

import dataclasses
import math
import os
import subprocess
from typing import Any

import numpy as np
from harness import check
from simt import CODES, DTYPES, EVERY_BLOCK

from jaxext.backends.cuda.cuda_weight_only import WeightOnlyProblem

NAMES = ("x", "q", "scale", "y")
HEAD = 7  # numbers of a Reply


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reply:
    code: int
    message: str
    tiles: int
    columns: int
    grid: int
    shared_bytes: int
    remembered: int  # the error that CUDA still knows of
    parts: Any  # partial results; None of a dry run


def a_problem(M=3, N=96, K=128, S=2, bits=8, dtype="bf16", result=None, B=1, arch=90) -> WeightOnlyProblem:
    return WeightOnlyProblem(
        name="scaled_dot_w_nn",
        role="nn",
        B=B,
        M=M,
        N=N,
        K=K,
        dtypes=(dtype, "i8", result or dtype),
        precision="tf32",
        arch=arch,
        I=1,
        S=S,
        J=N,
        scaled=("w",),
        packed=bits == 4,
    )


def shapes(problem, splits=1):
    B, M, N, K, S = problem.B, problem.M, problem.N, problem.K, problem.S
    columns = N // 2 if problem.packed else N
    return dict(zip(NAMES, ((B, M, K), (B, K, columns), (B, S, N), (splits, B, M, N)), strict=True))


def dtypes(problem, splits=1):
    result = "fp32" if splits > 1 else problem.dtypes[2]
    return dict(zip(NAMES, map(np.dtype, (DTYPES[problem.dtypes[0]], np.int8, np.float32, DTYPES[result])), strict=True))


def operands_of(problem, integers=True):
    """With `integers`, those whose products and sums are exact, in a result of 16 bits too; the weight has each number that it can."""
    rng = np.random.default_rng(0)
    sizes = shapes(problem)
    most = 1 << (problem.bits_of_weight - 1)
    q = rng.integers(-most, most, (problem.B, problem.K, problem.N))
    if not integers:
        x = rng.standard_normal(sizes["x"])
        scale = rng.uniform(0.5, 2, sizes["scale"])
    else:
        x = np.zeros(sizes["x"])
        places = rng.integers(0, problem.K, (problem.B, problem.M, 6))  # so that sums are of few numbers
        np.put_along_axis(x, places, rng.choice([-1, 1], places.shape), -1)
        scale = np.exp2(rng.integers(-2, 3, sizes["scale"]))
    drawn = {"x": x.astype(DTYPES[problem.dtypes[0]]), "q": packed(q) if problem.packed else q.astype(np.int8)}
    return drawn | {"scale": scale.astype(np.float32)}


def packed(q):
    return ((q[..., 0::2] & 15) | (q[..., 1::2] & 15) << 4).astype(np.uint8).view(np.int8)


def unpacked(q):
    return np.stack([(q << 4) >> 4, q >> 4], -1).reshape(*q.shape[:-1], -1)


def true(problem, operands, magnitude=False):
    """In float64; or the sum of the absolute values of what is added."""
    of = np.abs if magnitude else lambda x: x
    q = unpacked(operands["q"]) if problem.packed else operands["q"]
    w = of(q.astype(np.float64)) * np.repeat(operands["scale"].astype(np.float64), problem.K // problem.S, 1)
    return of(operands["x"].astype(np.float64)) @ w


def check_parts(problem, parts, operands, integers=True):
    """Parts are added in float32, and rounded once; a result of integers is exact, if it is no larger than its dtype holds."""
    got = parts[0] if len(parts) == 1 else parts.sum(0, dtype=np.float32).astype(DTYPES[problem.dtypes[2]])
    want = true(problem, operands)
    if integers:
        check(got, want.astype(got.dtype).astype(np.float64))
    else:
        check(got, want, true(problem, operands, magnitude=True))


def run(driver, folder, asked, *, shifts=None, dry=False, whole=None, blocks=EVERY_BLOCK, pending=0, refusal=0, environment=None):
    """The replies to (problem, config, operands), from one process.  With `whole`, a problem, the operands and the result are the ends of
    its arrays, and zeros the rest.  `shifts`: by the names of arrays."""
    request = [np.int64(len(asked)).tobytes()]
    for case, config, operands in asked:
        problem, of = whole or case, dtypes(case, config.splits)
        small, large = shapes(case, config.splits), shapes(problem, config.splits)
        numbers = [CODES.index(problem.dtypes[0]), CODES.index("fp32" if config.splits > 1 else problem.dtypes[2])]
        numbers += [problem.B, problem.M, problem.N, problem.K, problem.S, problem.bits_of_weight]
        numbers += [config.tile_m, config.tile_n, config.splits, dry, blocks, pending, refusal]
        numbers += [(shifts or {}).get(name, 0) for name in NAMES]
        for sizes in (large, small):
            numbers += [0 if dry else math.prod(sizes[name]) * of[name].itemsize for name in NAMES]
        arrays = [] if dry else [np.ascontiguousarray(operands[name]).tobytes() for name in NAMES[:3]]
        request += [np.array(numbers, np.int64).tobytes(), *arrays]
    (folder / "request").write_bytes(b"".join(request))
    ran = subprocess.run(
        [driver, folder / "request", folder / "response"], capture_output=True, text=True, env=os.environ | (environment or {})
    )
    assert ran.returncode == 0, ran.stderr[-4000:].split("Shadow bytes")[0]
    return list(_replies((folder / "response").read_bytes(), asked, dry))


def _replies(response, asked, dry):
    at = 0
    for case, config, _ in asked:
        code, length, tiles, columns, grid, shared, remembered = np.frombuffer(response, np.int64, HEAD, at).tolist()
        at += 8 * HEAD
        message = response[at : at + length].decode()
        at += length
        parts = None
        if not dry:
            shape, dtype = shapes(case, config.splits)["y"], dtypes(case, config.splits)["y"]
            parts = np.frombuffer(response, dtype, math.prod(shape), at).reshape(shape)
            at += parts.nbytes
        yield Reply(
            code=code,
            message=message,
            tiles=tiles,
            columns=columns,
            grid=grid,
            shared_bytes=shared,
            remembered=remembered,
            parts=parts,
        )
