"""Products with quantised weights for the CUDA kernels: problems, operands and the truth."""

import numpy as np
from harness import check

from jaxext.backends.triton.interpreter import DTYPES
from jaxext.ops.scaled.cuda_weight_only import WeightOnlyProblem

NAMES = ("x", "q", "scale", "y")


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


def shapes(problem):
    B, M, N, K, S = problem.B, problem.M, problem.N, problem.K, problem.S
    columns = N // 2 if problem.packed else N
    return dict(zip(NAMES, ((B, M, K), (B, K, columns), (B, S, N), (B, M, N)), strict=True))


def operands_of(problem, integers=True):
    """Return operands, with exact products and sums for `integers`, in a result of 16 bits too; the weight has each number that it can."""
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
    """Return the product in float64, or the sum of the absolute values of what is added."""
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
