"""Dense convolutions that the CUDA kernels are tested with, what the definition gives for them, and a table of tiles as the compiled module
tells it."""

import dataclasses
import itertools
from typing import Any

import host_code
import numpy as np
import test_depthwise

from jaxext.kernels.geometry import ConvProblem
from jaxext.ops.conv import cuda_dense as cuda_conv

OPEN = test_depthwise.ROLES  # role -> the slot
ROLES = tuple(OPEN)
SLOTS = {"x": "BNDHWGC", "w": "BGKTRSC", "y": "BNOPQGK"}


# Tiles of two warp groups.
LARGE = {("fprop", 1): (128, 256), ("dgrad", 1): (128, 256), ("wgrad", 1): (256, 128), ("fprop", 2): (256, 128), ("dgrad", 2): (256, 128)}
# That of the compiled module: test_cuda_module.py compares them.
TABLE = [
    dict(role=role, rank=rank, operands=dtype, tile_m=m, tile_n=n, cluster=2, most_parts=64)
    for role, rank, dtype in itertools.product(ROLES, (1, 2, 3), ("bf16", "fp16"))
    for m, n in ((128, 128), (128, 64), *([LARGE[role, rank]] if (role, rank) in LARGE else []))
]


def candidates(problem: ConvProblem) -> list[cuda_conv.ConvConfig]:
    return cuda_conv.candidates(problem, TABLE)


def refuses(problem: ConvProblem) -> str | None:
    return host_code.refuses(problem, cuda_conv)


def problem(role: str, input: tuple[int, ...], filter: tuple[int, ...], *, C: int = 8, **changes: Any) -> ConvProblem:
    """The geometry's arguments are those of depthwise convolutions, with one dilation: that of the filter."""
    geometry = dict(G=1, K=8, filter_dilation=changes.pop("dilation", 1))
    geometry |= {name: changes.pop(name) for name in ("B", "N", "G", "K", "stride", "low", "high") if name in changes}
    case = test_depthwise.problem(input, filter, **geometry)
    fields = dict(name=f"conv{len(input)}d_{role}", role=role, C=C, dtypes=("bf16",) * 3, precision="tf32")
    return dataclasses.replace(case, **{**fields, **changes})


def shape_of(problem: ConvProblem, slot: str) -> tuple[int, ...]:
    p = problem
    return {
        "x": (p.B, p.N, *p.input, p.G, p.C),
        "w": (p.B, p.G, p.K, *p.filter, p.C),
        "y": (p.B, p.N, *p.output, p.G, p.K),
    }[slot]


def truth(problem: ConvProblem, operands) -> np.ndarray:
    def incidence(axis):
        i, r, p = np.ogrid[: problem.input[axis], : problem.filter[axis], : problem.output[axis]]
        meets = problem.stride[axis] * p + problem.filter_dilation[axis] * r == i + problem.low[axis]
        return meets.astype(np.float64)

    terms = ",".join([*(SLOTS[slot] for slot in operands), "DTO", "HRP", "WSQ"])
    return np.einsum(f"{terms}->{SLOTS[OPEN[problem.role]]}", *operands.values(), *map(incidence, range(3)), optimize=True)


CASES = {
    "causal": problem("fprop", (13,), (4,), N=2, low=3),
    "strided, padded unevenly": problem("fprop", (8, 7), (3, 2), N=2, stride=(2, 3), low=(1, 0), high=(0, 2)),
    "rows that no stride reaches": problem("fprop", (8, 8), (1, 1), stride=3),
    "crop": problem("fprop", (9, 9), (3, 3), low=(-2, 1), high=(-3, -1)),
    "groups and batched filters": problem("fprop", (5, 4), (3, 3), B=2, N=2, G=3, K=16, low=1, high=1),
    "3-D, dilated": problem("fprop", (5, 6, 4), (2, 3, 2), low=(1, 2, 0), high=(0, 1, 1), dilation=(2, 2, 1)),
    "dgrad": problem("dgrad", (6, 7), (3, 2), N=2, low=(1, 0), high=(1, 1)),
    "dgrad, output cropped at its end": problem("dgrad", (9,), (2,), high=-3),
    "dgrad, dilated, groups": problem("dgrad", (6, 5, 4), (2, 2, 3), G=2, low=(1, 2, 3), high=(1, 0, 1), dilation=(1, 2, 2)),
    "dgrad of a crop": problem("dgrad", (9, 8), (3, 2), N=2, low=(-2, 1), high=(-3, -1)),
    "dgrad, strided": problem("dgrad", (9, 8), (3, 3), N=2, stride=2, low=1, high=(1, 0)),
    "dgrad, strided, 1x1": problem("dgrad", (7, 6), (1, 1), N=2, stride=2),
    "dgrad, strided along one axis": problem("dgrad", (13,), (4,), N=2, stride=3, low=1, high=2),
    "dgrad, strided, dilated, groups": problem("dgrad", (5, 6, 7), (2, 3, 3), G=2, stride=(1, 2, 4), low=(1, 2, 0), dilation=(2, 1, 2)),
    "wgrad": problem("wgrad", (6, 7), (3, 3), N=3, K=16, low=1, high=1),
    "wgrad, strided, groups": problem("wgrad", (9, 7), (3, 3), B=2, N=2, G=2, stride=2, low=(0, 1), high=1),
    "wgrad of one long image": problem("wgrad", (37,), (5,), low=4, dilation=2),
    "wgrad, 3-D": problem("wgrad", (4, 3, 6), (2, 3, 2), N=2, low=(1, 1, 0), high=(0, 1, 1), dilation=(1, 1, 2)),
    "wgrad of a crop": problem("wgrad", (9, 8), (2, 2), N=2, low=(-1, 1), high=-2),
}
