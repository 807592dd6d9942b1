"""Ragged products on Hopper before any launch: what is refused, and which kernel is taken.  Needs g++; no GPU and no compiled module."""

import dataclasses

import host_code
import pytest

from jaxext.backends.cuda import cuda_ragged
from jaxext.kernels.ragged.problem import RaggedProblem

WIDE = dict(tile_m=128, tile_n=256, tile_k=64, cluster_n=2)
NARROW = dict(tile_m=64, tile_n=128, tile_k=64, cluster_n=1)
TABLE = [dict(role=role, operands="bf16", result="bf16", **tile) for role in ("nn", "nt", "tn") for tile in (WIDE, NARROW)]


def product(M, N, K, G, role="nn", dtypes=("bf16",) * 3, arch=90, **batches) -> RaggedProblem:
    labels = dict(B=1, P=1, R=1, M=M, N=N, K=K, G=G) | batches
    return RaggedProblem(name=f"ragged_{role}", role=role, **labels, dtypes=dtypes, precision="tf32", arch=arch)


def refused(problem) -> str | None:
    return host_code.refuses(problem, cuda_ragged)


SMALL = product(40, 16, 24, 3)
REASONS = {
    "an older GPU": (dict(arch=80), "compute capability is 8.0, the ragged kernels want 9.0"),
    "a newer GPU": (dict(arch=100), "compute capability is 10.0, the ragged kernels want 9.0"),
    "float32": (dict(dtypes=("fp32",) * 3), "fp32 times fp32 into fp32, want one dtype, bf16 or fp16"),
    "a wider result": (dict(dtypes=("bf16", "bf16", "fp32")), "bf16 times bf16 into fp32, want one dtype, bf16 or fp16"),
    "two dtypes": (dict(dtypes=("bf16", "fp16", "bf16")), "bf16 times fp16 into bf16, want one dtype, bf16 or fp16"),
    "short rows": (dict(K=20), "a row of 20 elements has 40 bytes, TMA wants a multiple of 16"),
    "short rows of the result": (dict(N=4), "a row of 4 elements has 8 bytes, TMA wants a multiple of 16"),
    "a negative size": (dict(P=-1), "an axis has -1 elements, want 0 or more"),
    "a long axis": (dict(M=2**31), f"an axis has {2**31} elements, want {2**31 - 2**16} at most"),
    "many matrices": (dict(P=2**20, R=2**12, M=1, K=8, N=8), "make 2^31 matrices or more, want fewer"),
    "many elements": (dict(G=2**20, K=2**12, N=2**12), "has 2^38 elements or more, want fewer"),
    "many tiles": (dict(P=2**18, M=1, G=2**14, K=8, N=8), "make 2^31 tiles or more, want fewer"),
}


@pytest.mark.parametrize("name", REASONS)
def test_what_is_refused(name):
    changes, reason = REASONS[name]
    assert str(refused(dataclasses.replace(SMALL, **changes))).endswith(reason)


@pytest.mark.parametrize("role", ["nn", "nt", "tn"])
def test_what_is_taken(role):
    assert refused(dataclasses.replace(SMALL, role=role)) is None
    for label in "BPRMNKG":
        assert refused(dataclasses.replace(SMALL, role=role, **{label: 0})) is None, "nothing is launched"


@pytest.mark.parametrize("label", "BPRMNKG")
@pytest.mark.parametrize("number", [2**63 - 1, -(2**63), 2**62, 2**31, -1])
def test_every_number_may_be_asked_about(label, number):
    assert refused(dataclasses.replace(SMALL, **{label: number})) is not None


@pytest.mark.parametrize("role", ["nn", "nt", "tn"])
def test_tiles_by_the_size_of_groups(role):
    """1,024 rows for each of 32 of DeepSeek-V3's experts in training, and 8 for each of 8 of Mixtral's, of which a device has a part."""
    training, decoding = product(32 * 1024, 4096, 7168, 32, role), product(64, 1792, 4096, 8, role)
    assert cuda_ragged.pick(training, TABLE) == cuda_ragged.RaggedConfig(**WIDE)
    if role == "nn":  # in nt the result is wider, in tn a group's tiles are as many as ever
        assert cuda_ragged.pick(decoding, TABLE) == cuda_ragged.RaggedConfig(**NARROW)
    few, many = (cuda_ragged.clocks(problem, cuda_ragged.pick(problem, TABLE)) for problem in (decoding, training))
    assert 0 < few < many
