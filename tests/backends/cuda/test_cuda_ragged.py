"""Ragged products on Hopper before any launch: a family of test_cuda_families.py."""

import dataclasses
import functools
from typing import Any

import pytest

from jaxext.kernels.ragged.problem import RaggedProblem
from jaxext.ops.ragged import cuda as cuda_ragged

WIDE = dict(tile_m=128, tile_n=256, tile_k=64, cluster_n=2)
NARROW = dict(tile_m=64, tile_n=128, tile_k=64, cluster_n=1)
TABLE = [dict(role=role, operands="bf16", result="bf16", **tile) for role in ("nn", "nt", "tn") for tile in (WIDE, NARROW)]


def product(M, N, K, G, role="nn", dtypes=("bf16",) * 3, arch=90, **batches) -> RaggedProblem:
    labels: dict[str, Any] = dict(B=1, P=1, R=1, M=M, N=N, K=K, G=G) | batches
    return RaggedProblem(name=f"ragged_{role}", role=role, **labels, dtypes=dtypes, precision="tf32", arch=arch)


SMALL = product(40, 16, 24, 3)
changed = functools.partial(dataclasses.replace, SMALL)
FAMILY, SIZES, ROLES = cuda_ragged, "BPRMNKG", ("nn", "nt", "tn")
REFUSED = {
    "float32": (changed(dtypes=("fp32",) * 3), "fp32 times fp32 into fp32, want one dtype, bf16 or fp16"),
    "a wider result": (changed(dtypes=("bf16", "bf16", "fp32")), "bf16 times bf16 into fp32, want one dtype, bf16 or fp16"),
    "two dtypes": (changed(dtypes=("bf16", "fp16", "bf16")), "bf16 times fp16 into bf16, want one dtype, bf16 or fp16"),
    "short rows": (changed(K=20), "a row of 20 elements has 40 bytes, TMA wants a multiple of 16"),
    "short rows of the result": (changed(N=4), "a row of 4 elements has 8 bytes, TMA wants a multiple of 16"),
    "many matrices": (
        changed(P=2**20, R=2**12, M=1, K=8, N=8),
        "B=1 P=1048576 R=4096 M=1 N=8 K=8 G=3 make 2^31 matrices or more, want fewer",
    ),
    "many elements": (
        changed(G=2**20, K=2**12, N=2**12),
        "an array of B=1 P=1 R=1 M=40 N=4096 K=4096 G=1048576 has 2^38 elements or more, want fewer",
    ),
    "many tiles": (
        changed(P=2**18, M=2**14, G=2**14, K=8, N=8),
        "B=1 P=262144 R=1 M=16384 N=8 K=8 G=16384 make 2^31 tiles or more, want fewer",
    ),
}
TAKEN = [changed(role=role, **empty) for role in ROLES for empty in ({}, *({label: 0} for label in SIZES))]
# 1,024 rows for each of 32 of DeepSeek-V3's experts in training, and 8 for each of 8 of Mixtral's, of which a device has a part.  In nt the
# result is wider, in tn a group's tiles are as many as ever.
TRAINING, DECODING = ({role: product(*sizes, role) for role in ROLES} for sizes in ((32 * 1024, 4096, 7168, 32), (64, 1792, 4096, 8)))
PICKS = {f"training, {role}": (problem, WIDE) for role, problem in TRAINING.items()} | {"decoding": (DECODING["nn"], NARROW)}


@pytest.mark.parametrize("role", ROLES)
def test_few_rows_take_less_time(role):
    few, many = (cuda_ragged.clocks(problem[role], cuda_ragged.candidates(problem[role], TABLE)[0]) for problem in (DECODING, TRAINING))
    assert 0 < few < many
