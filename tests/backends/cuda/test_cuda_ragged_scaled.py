"""Ragged products of scaled numbers on Hopper: a family of test_cuda_families.py with all of its cases, and the arrays of a kernel."""

import dataclasses
import random
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import test_ragged_kernel
from cuda_cases import change_dtypes, config_of, make_case
from lowered import struct

import jaxext
from jaxext.kernels.ragged.problem import most_visits
from jaxext.ops.ragged_scaled import cuda as cuda_ragged_scaled
from jaxext.ops.ragged_scaled.cuda import RaggedScaledProblem

WIDE = dict(tile_m=128, tile_n=256, tile_k=128, cluster_n=2)
NARROW = dict(tile_m=64, tile_n=128, tile_k=128, cluster_n=1)
TABLE = [dict(operands=first, second="fp8e4nv", **tile) for first in ("fp8e4nv", "fp8e5") for tile in (WIDE, NARROW)]
E4M3 = ("fp8e4nv", "fp8e4nv", "bf16")  # w, y, x


def a_problem(M=40, K=384, N=512, G=3, S=3, J=4, scaled=("w", "y"), role="nt", dtypes=E4M3, arch=90, **batches) -> RaggedScaledProblem:
    """K are the columns of the result, and N is contracted."""
    labels: dict[str, Any] = dict(B=1, P=1, R=1, M=M, N=N, K=K, G=G, S=S, J=J, I=M if {"x", "y"} & {*scaled} else 1) | batches
    name = f"ragged_scaled_{''.join(scaled)}_{role}"
    return RaggedScaledProblem(name=name, role=role, **labels, scaled=tuple(scaled), dtypes=dtypes, precision="tf32", arch=arch)


def for_cuda(problem) -> RaggedScaledProblem:
    """A problem of the Triton kernels as one of these."""
    return RaggedScaledProblem(**{field.name: getattr(problem, field.name) for field in dataclasses.fields(problem)})


FAMILY, SMALL, SIZES = cuda_ragged_scaled, a_problem(), "BPRMNKGSJ"
PAIRS = "want fp8e4nv or fp8e5 times fp8e4nv, into bf16 or fp32"
REFUSED = {
    "another role": (
        a_problem(role="nn", scaled=("x", "w")),
        "the product nn, want nt, as with transpose_rhs",
    ),
    "scales of the result's columns": (
        a_problem(scaled=("x", "w", "y")),
        "the result has scales for 3 blocks of columns, want one for each row",
    ),
    "wide rows": (a_problem(dtypes=("fp8e4nv", "bf16", "bf16")), f"bf16 times fp8e4nv into bf16, {PAIRS}"),
    "cotangents twice": (a_problem(dtypes=("fp8e5", "fp8e5", "bf16")), f"fp8e5 times fp8e5 into bf16, {PAIRS}"),
    "another result": (a_problem(dtypes=("fp8e4nv", "fp8e4nv", "fp16")), f"fp8e4nv times fp8e4nv into fp16, {PAIRS}"),
    "a short sum": (a_problem(N=520, J=1), "520 elements are contracted, TMA wants a multiple of 16"),
    "short rows of the result": (a_problem(K=388, S=1), "a row of 388 elements of the result has 776 bytes, want a multiple of 16"),
    "fine scales": (a_problem(J=16), "scales for each 32 elements of a sum, want one for all or for multiples of 128"),
    "many elements": (
        a_problem(G=2**20, K=2**12, N=2**7, S=1, J=1),
        "an array of B=1 P=1 R=1 M=40 N=4096 K=128 G=1048576 S=1 J=1 has 2^38 elements or more, want fewer",
    ),
    "many matrices": (
        a_problem(P=2**20, R=2**12, M=1, K=8, N=16, S=1, J=1),
        "B=1 P=1048576 R=4096 M=1 N=8 K=16 G=3 S=1 J=1 make 2^31 matrices or more, want fewer",
    ),
    "many tiles": (
        a_problem(P=2**18, M=2**14, G=2**14, K=8, N=16, S=1, J=1),
        "B=1 P=262144 R=1 M=16384 N=8 K=16 G=16384 S=1 J=1 make 2^31 tiles or more, want fewer",
    ),
}
SCALES = {"none for rows": ("w",), "none for matrices": ("y",), "of the result": ("x", "w", "y"), "both": ("w", "y")}
BLOCKS = {"one": (1, 1), "blocks": (3, 4), "columns": (384, 1), "columns in steps": (384, 4), "narrow blocks": (12, 4)}
TAKEN = [
    a_problem(scaled=slots, S=s, J=j, dtypes=dtypes, B=2, P=2, R=3)
    for slots in SCALES.values()
    for s, j in BLOCKS.values()
    for dtypes in (E4M3, ("fp8e4nv", "fp8e5", "fp32"))
    if "x" not in slots or s == 1
]
TAKEN += [a_problem(**dict[str, Any]({label: 0})) for label in "BPRMG"]
# 1,024 rows for each of 32 of DeepSeek-V3's experts in training, and 8 for each of 8 of Mixtral's, of which a device has a part.
TRAINING, DECODING = a_problem(32 * 1024, 4096, 7168, 32, 32, 56), a_problem(64, 1792, 4096, 8, 14, 32)
PICKS = {"training": (TRAINING, WIDE), "decoding": (DECODING, NARROW)}


def shapes(a):
    """The shapes of all arrays, and the name of the result."""
    matrices, groups = a.B * a.P * a.R, a.B * a.G
    right = (groups, a.S, a.J) if a.J == a.N else (groups, a.J, a.S)
    visits = (a.B, a.P, most_visits(a.M, a.G, max(a.tile_m, 1)), 5)
    operands = dict(a=(matrices, a.M, a.K), b=(groups, a.N, a.K), left=(matrices, a.M, a.S), right=right, visits=visits)
    return operands | dict(d=(matrices, a.M, a.N)), "d"


def case(row, B, P, R, M, N, K, G, S, J, result="bfloat16"):
    attributes = dict(B=B, P=P, R=R, M=M, N=N, K=K, G=G, S=S, J=J) | config_of(row, "tile_m tile_n tile_k cluster_n")
    dtypes = dict(a=row["operands"], b=row["second"], left="float32", right="float32", visits="int32")
    return make_case("ragged_scaled", attributes, dtypes, {"d": result})


def right(row):
    for s, j in ((4, 3), (4, 384), (1, 1)):
        for result in ("bfloat16", "float32"):
            yield case(row, 3, 2, 1, 300, 384, 512, 6, s, j, result)


def some(row, count):
    """Yield random cases, then one with a result of 2^31 rows and one of far more than 2^31 elements."""
    pick = random.Random(str(row))
    for _ in range(count):
        B, P, R = pick.choice([(1, 1, 1), (2, 3, 1), (3, 2, 5)])
        steps, n, each = pick.randint(1, 9), 8 * pick.randint(1, 90), pick.random() < 0.5
        s = pick.choice([1, steps])
        k = 128 * steps if s > 1 else 16 * pick.randint(1, 90)
        rows, groups = pick.choice([1, 63, pick.randint(1, 900)]), pick.choice([1, 7, 300])
        yield case(row, B, P, R, rows, n, k, groups, s, n if each else 1, pick.choice(["bfloat16", "float32"]))
    yield case(row, 1, 1, 1, 2**31 - 2**16, 8, 16, 1, 1, 1)
    yield case(row, 1, 1, 1, 2**19, 2**13, 2**12, 256, 2**5, 2**6)


def described(row, B, M, N):
    """A case, and what is known of its launch: the blocks of a cluster load a part of the rows each."""
    boxes = [[128, row["tile_m"] // row["cluster_n"], 1], [128, row["tile_n"], 1]]
    return case(row, B, 1, 1, M, 8 * M, N, 1, 1, 1), dict(loaded=["a", "b"], boxes=boxes, cluster=[1, row["cluster_n"], 1])


def faults(parts):
    """Changes of a right case, and the message."""
    del parts
    yield from (({name: 0}, f"{name}=0.*, want 1 or more") for name in "BPRMNKG")
    yield from (({name: 96}, "no kernel has") for name in ("tile_m", "tile_n", "tile_k", "cluster_n"))
    yield dict(tile_m=0), "tile_m is 0, want 1 or more"
    yield from (
        (lambda case, value=value: dataclasses.replace(case, attributes={**case.attributes, "tile_m": value}), "visits has the shape")
        for value in (16, 2**62)
    )
    yield change_dtypes(a="bfloat16"), "bf16 times fp8e4nv into bf16, want fp8e4nv or fp8e5 times fp8e4nv"
    yield change_dtypes(b="float8_e5m2"), "times fp8e5 into bf16, want"
    yield change_dtypes(d="float16"), "into fp16, want"


def a_product(transpose_rhs, dtype: Any = jnp.float8_e4m3fn):
    """A function of rows of this dtype in blocks of 128, of matrices in squares, and its operands."""
    shapes = ((8, 2048, 1024), (8, 16, 8)) if transpose_rhs else ((8, 1024, 2048), (8, 8, 16))
    factors = struct(4096, 1024, dtype=dtype), struct(*shapes[0], dtype=jnp.float8_e4m3fn)
    scales = [struct(*shape, dtype=jnp.float32) for shape in ((4096, 8), shapes[1])]
    named: dict[str, Any] = dict(transpose_rhs=transpose_rhs, preferred_element_type=jnp.bfloat16)
    call = lambda x, w, sizes, s, t: jaxext.ragged_scaled_dot(x, w, sizes, lhs_scale=s, rhs_scale=t, **named)
    return call, *factors, struct(8, dtype=jnp.int32), *scales


def programs():
    """Functions, operands, and of each kernel that they call the shapes of its arrays, and attributes (test_cuda_stand_in.py)."""
    call, *operands = a_product(True)
    visits = (1, 1, 4096 // WIDE["tile_m"] + 8 - 1, 5)
    arrays = [(1, 4096, 1024), (8, 2048, 1024), (1, 4096, 8), (8, 16, 8), visits, (1, 4096, 2048)]
    yield "ragged_scaled", call, operands, dict(ragged_scaled=[*arrays, WIDE])


def choices(refusal):
    """Calls by name, and the reason for which `cuda` is not chosen, or None.  `refusal`: the module's."""
    yield "ragged_scaled", [a_product(True), a_product(True, jnp.float8_e5m2)], None
    yield "ragged_scaled, nn", [a_product(False)], "the product nn, want nt, as with transpose_rhs"
    yield "ragged_scaled, wide rows", [a_product(True, jnp.bfloat16)], refusal


@pytest.mark.parametrize("of", BLOCKS)
def test_arrays_of_the_kernel(of):
    """They are those of csrc/ragged_scaled/ragged_scaled_target.cc; the product of the first group is that of the operands."""
    s, j = BLOCKS[of]
    for slots in SCALES.values():
        problem = a_problem(S=s, J=j, scaled=slots, G=1)
        if "x" in slots and s > 1:
            continue
        rng, shapes_of = np.random.default_rng(0), problem.shapes
        numbers = {name: jnp.asarray(rng.integers(-3, 4, shapes_of[name]), jnp.float32) for name in ("y", "w")}
        numbers |= {f"{slot}_scale": jnp.asarray(2.0 ** rng.integers(-2, 3, shapes_of[f"{slot}_scale"]), jnp.float32) for slot in slots}
        begin, end = test_ragged_kernel.ranges_of((problem.M,))
        given = numbers | dict(begin=jnp.asarray(begin), end=jnp.asarray(end))
        assert {*cuda_ragged_scaled.slots(problem)} == {*given}
        made = {name: np.asarray(x, np.float64) for name, x in cuda_ragged_scaled.arrays(problem, given, 64).items()}
        _, columns, steps = problem.kernel_blocks
        right = made["right"].swapaxes(1, 2) if columns == problem.cols else made["right"]
        each = lambda scale, size, axis: np.repeat(scale, size // scale.shape[axis], axis)
        left, right = each(made["left"], 512, 2), each(each(right, 384, 1), 512, 2)
        assert made["left"].shape[2] in (1, steps) and right.shape == (1, 384, 512)
        wide = {name: np.asarray(x, np.float64) for name, x in numbers.items()}
        x = wide["y"][0, 0, 0] * (np.repeat(wide["y_scale"][0, 0, 0], 512 // j, 1) if "y" in slots else 1)
        w = wide["w"][0, 0] * (np.repeat(np.repeat(wide["w_scale"][0, 0], 384 // s, 0), 512 // j, 1) if "w" in slots else 1)
        want = x @ w.T * (wide["x_scale"][0, 0, 0] if "x" in slots else 1)
        np.testing.assert_array_equal((made["a"][0] * left[0]) @ (made["b"][0] * right[0]).T, want)


def test_few_rows_take_less_time():
    few, many = (cuda_ragged_scaled.clocks(of, cuda_ragged_scaled.candidates(of, TABLE)[0]) for of in (DECODING, TRAINING))
    assert 0 < few < many
