"""kernels/scaled in Triton's interpreter: every role, with scales of every kind of block, against float64."""

from __future__ import annotations

import dataclasses

import numpy as np
from calls import Call, Suite, absolute, each
from cases import random

from jaxext.backends.triton.interpreter import DTYPES
from jaxext.kernels import scaled
from jaxext.kernels.matmul import Config

ROLES = {"nn": "y", "nt": "x", "tn": "w"}
FACTORS = {"nn": "xw", "nt": "wy", "tn": "xy"}
PAIRS = {"x": "MK", "w": "KN", "y": "MN"}
BLOCKS = dict(M="I", K="S", N="J")
CONFIG = Config(tile_m=16, tile_n=32, tile_k=32)
SIZES = (24, 64, 40)  # of rows, depth and columns
CUTS = {
    "tensor": (1, 1, 1),
    "rows and columns": (24, 1, 40),
    "along the sum": (24, 2, 40),
    "squares": (3, 2, 5),
    "fine": (24, 64, 5),
}  # blocks


def a_problem(role, slots, cuts=(24, 2, 40), sizes=SIZES, dtypes=("bf16", "i8", "fp32"), B=1, packed=False, arch=90):
    of = {"nn": "MKN", "nt": "MNK", "tn": "KMN"}[role]
    (M, K, N), (i, s, j) = ([each[of.index(letter)] for letter in "MKN"] for each in (sizes, cuts))
    name = f"scaled_dot_{''.join(slots)}_{role}"
    fields = dict(B=B, M=M, K=K, N=N, I=i, S=s, J=j, dtypes=dtypes, precision="ieee", arch=arch)
    return scaled.Problem(name=name, role=role, scaled=tuple(slots), packed=packed, **fields)


def shape(problem, slot) -> tuple[int, int, int]:
    return (problem.B, *(getattr(problem, letter) for letter in PAIRS[slot]))


def some_operands(problem, integers=True) -> dict[str, np.ndarray]:
    operands = {}
    for seed, (slot, dtype) in enumerate(zip(FACTORS[problem.role], problem.dtypes, strict=False)):
        numbers = random(shape(problem, slot), DTYPES[dtype], seed, integers)
        operands[slot] = pack(numbers) if problem.packed and slot == "w" else numbers
    for seed, slot in enumerate(problem.scaled):
        blocks = (problem.B, *(getattr(problem, BLOCKS[letter]) for letter in PAIRS[slot]))
        operands[f"{slot}_scale"] = random_scale(blocks, seed, integers)
    return operands


def random_scale(blocks, seed, integers=True) -> np.ndarray:
    """Powers of two, or other positive numbers."""
    rng = np.random.default_rng(7 + seed)
    return (np.exp2(rng.integers(-2, 3, blocks)) if integers else rng.random(blocks)).astype(np.float32)


def pack(numbers: np.ndarray) -> np.ndarray:
    low, high = numbers[..., ::2], numbers[..., 1::2]
    return ((low & 15) | (high << 4)).astype(np.int8)


def unpack(pairs: np.ndarray) -> np.ndarray:
    halves = np.stack([pairs & 15, (pairs >> 4) & 15], -1).reshape(*pairs.shape[:-1], -1)
    return np.where(halves > 7, halves - 16, halves)


def true(problem, operands) -> np.ndarray:
    def value(slot):
        x = unpack(operands[slot]) if problem.packed and slot == "w" else operands[slot]
        return x.astype(np.float64) * spread(slot)

    def spread(slot):
        if slot not in problem.scaled:
            return 1.0
        scale = operands[f"{slot}_scale"].astype(np.float64)
        for axis in (1, 2):
            scale = np.repeat(scale, shape(problem, slot)[axis] // scale.shape[axis], axis)
        return scale

    first, second = map(value, FACTORS[problem.role])
    equation = {"nn": "bmk,bkn->bmn", "nt": "bkn,bmn->bmk", "tn": "bmk,bmn->bkn"}[problem.role]
    return np.einsum(equation, first, second) * spread(ROLES[problem.role])


class ScaledCall(Call):
    kernel = "scaled"

    def small(self) -> Config:
        return CONFIG

    def operands(self, integers=True):
        return some_operands(self.problem, integers)

    @property
    def shapes(self):
        return (shape(self.problem, ROLES[self.problem.role]),)

    def sums(self, operands):
        return true(self.problem, operands)

    def scales(self, operands, product_error=1):
        """The numbers of a packed operand have magnitudes, its bytes have not."""
        numbers = operands | ({"w": unpack(operands["w"])} if self.problem.packed else {})
        return [product_error * true(dataclasses.replace(self.problem, packed=False), absolute(numbers))]


def packed(role, other, arch=90, B=1) -> ScaledCall:
    """Two int4 in a byte, along the columns or along the depth."""
    dtypes = (other, "i8", "fp32") if role == "nn" else ("i8", other, "fp32")
    return ScaledCall(a_problem(role, "w", (1, 2, 19), (20, 64, 38), dtypes, B, packed=True, arch=arch))


DTYPES_OF_A_CALL = [
    ("bf16", "bf16", "bf16"),
    ("fp8e4nv", "fp8e4nv", "fp32"),
    ("fp8e4nv", "fp8e5", "bf16"),
    ("i8", "i8", "fp32"),
    ("fp16", "fp8e4nv", "fp16"),
    ("i8", "fp8e4nv", "fp32"),
    ("fp32", "i8", "fp32"),
]
FINE = [("bf16", "i8", "bf16"), ("fp8e4nv", "fp8e4nv", "fp32"), ("i8", "i8", "bf16"), ("fp32",) * 3]
SPLITS = each(
    lambda role: ScaledCall.smallest(a_problem(role, "xwy", (1, 5, 1), (20, 160, 24)), splits=3), ROLES
)  # the last beyond the sum


LAYERS = {(1, 32, 4096): (64, 4096, 4096), (1, 128, 8): (16, 4096, 1024), (1024, 12, 4): (1024, 1536, 512)}  # blocks -> sizes


class TestScaled(Suite):
    call, most = ScaledCall, 40
    geometry = [
        # scales of both factors and of the result; one that changes along the sum has blocks of a step or more
        *each(lambda role, cuts: ScaledCall(a_problem(role, "xwy", CUTS[cuts])), ROLES, CUTS),
        *each(lambda role, slots: ScaledCall(a_problem(role, slots, (1, 1, 1))), ROLES, ["x", "w", "y", "xw", "wy"]),
    ]
    dtypes = [
        *each(lambda role, dtypes: ScaledCall(a_problem(role, "xw", (1, 3, 1), (20, 96, 24), dtypes)), ROLES, DTYPES_OF_A_CALL),
        # a scale for each number of the sum, or for some, beside the end of a tile
        *each(
            lambda role, cuts, dtypes: ScaledCall(a_problem(role, "xwy", cuts, (20, 39, 24), dtypes)),
            ROLES,
            [(1, 39, 1), (20, 13, 24)],
            FINE,
        ),
    ]
    configs = SPLITS + each(packed, ["nn", "nt"], ["bf16", "i8"], [80, 90]) + each(packed, ["nn", "nt"], ["i8"], [80, 90], [2])
    rounding = each(packed, ["nn", "nt"], ["bf16"], [80, 90], [2])
    same_bits = SPLITS
    refused_problems = [
        (ScaledCall(a_problem("nn", "w", (1, 1, 1), (24, 64, 41), packed=True)), "want an even number"),
        (ScaledCall(a_problem("nn", "w", dtypes=("fp8e4nv", "i8", "fp32"), arch=80)), "8-bit floats need compute capability 8.9"),
        (ScaledCall(a_problem("nn", "w", dtypes=("fp32", "i8", "fp8e5"))), "fp32 and i8 into fp8e5"),
    ]
    refused_configs = [(ScaledCall.smallest(a_problem("nn", "w"), tile_k=64), "a step lies within a block")]
    candidates = each(
        lambda cuts, dtypes: [a_problem("nn", "xw", cuts, LAYERS[cuts], dtypes)],
        LAYERS,
        [("bf16", "i8", "bf16"), ("fp8e4nv", "fp8e4nv", "bf16")],
    )

    def check_candidate(self, problem, config, launch):
        assert problem.K // problem.S % config.tile_k == 0
