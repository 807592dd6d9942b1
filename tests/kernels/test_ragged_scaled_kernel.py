"""kernels/ragged_scaled in Triton's interpreter: every role, with scales of every kind of block, against float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from calls import Suite, absolute, each
from test_ragged_kernel import BATCHES, OPERANDS, ROLES, SIZES, RaggedCall, ranges_of, rows_of, true
from test_scaled_dot import CONFIG, FINE, pack, random_scale, unpack

from jaxext.kernels import ragged_scaled
from jaxext.kernels.launch import MOST_PROGRAMS
from jaxext.kernels.matmul import Config

FEW: dict[str, Any] = dict(
    sizes=(7, 0, 14), offset=19
)  # a tile before the first group, edges inside tiles, rows of nobody before and after
CUTS = {"matrix": (1, 1), "columns": (1, 40), "along the sum": (2, 40), "squares": (2, 5), "fine": (64, 5)}  # blocks of depth, of columns
TALL = Config(tile_m=32, tile_n=16, tile_k=16)


def a_problem(
    role, slots, cuts=(2, 5), sizes=(64, 40), dtypes=("bf16", "i8", "fp32"), *, G, rows=48, B=1, P=1, R=1, packed=False, arch=90
) -> ragged_scaled.Problem:
    """`cuts` and `sizes` are of the depth, or in tn of the rows, and of the columns of the result."""
    letters = ("NK", "JS") if role == "nt" else ("KN", "SJ")
    fields: Any = dict(zip(letters[0], sizes, strict=True)) | dict(zip(letters[1], cuts, strict=True))
    return ragged_scaled.Problem(
        name=f"ragged_scaled_{slots}_{role}", role=role, B=B, P=P, R=R, G=G, M=rows, I=rows if {*"xy"} & {*slots} else 1, **fields,
        dtypes=dtypes, scaled=tuple(slots), packed=packed, precision="ieee", arch=arch,
    )  # fmt: skip


class RaggedScaledCall(RaggedCall):
    kernel = "ragged_scaled"

    def small(self) -> Config:
        return CONFIG

    def operands(self, integers=True):
        """The scales of rows of no group are NaN, as these rows are."""
        problem, operands = self.problem, super().operands(integers)
        if problem.packed:
            operands["w"] = pack(operands["w"])
        present, _ = rows_of(problem, *self.ranges)
        for seed, slot in enumerate(problem.scaled):
            scale = random_scale(problem.shapes[f"{slot}_scale"], seed, integers)
            operands[f"{slot}_scale"] = scale if slot == "w" else np.where(present[..., None], scale, np.float32(np.nan))
        return operands

    def results(self, operands):
        problem, open_slot = self.problem, ROLES[self.problem.role]
        numbers = operands | ({"w": unpack(operands["w"])} if problem.packed else {})

        def spread(slot):
            if slot not in problem.scaled:
                return 1.0
            scale, shape = operands[f"{slot}_scale"].astype(np.float64), problem.shapes[slot]
            for axis in (-2, -1):
                scale = np.repeat(scale, shape[axis] // max(1, scale.shape[axis]), axis)
            return scale

        factors = {slot: numbers[slot].astype(np.float64) * spread(slot) for slot in OPERANDS[problem.role]}
        y = true(problem, factors, *self.ranges) * spread(open_slot)
        return [y if open_slot == "w" else np.where(rows_of(problem, *self.ranges)[0][..., None], y, 0)]

    def scales(self, operands, product_error=1):
        """The numbers of a packed operand have magnitudes, its bytes have not."""
        numbers = operands | ({"w": unpack(operands["w"])} if self.problem.packed else {})
        unpacked = dataclasses.replace(self, problem=dataclasses.replace(self.problem, packed=False))
        return [product_error * of for of in unpacked.results(absolute(numbers))]


def a_call(role, slots, *given, sizes=FEW["sizes"], offset=FEW["offset"], **more) -> RaggedScaledCall:
    ranges = ranges_of(sizes, more.get("B", 1), more.get("P", 1), offset)
    return RaggedScaledCall(a_problem(role, slots, *given, G=len(sizes), **more), None, ranges)


def packed(role, other, arch=90, **more) -> RaggedScaledCall:
    """Two int4 in a byte, along the columns or along the depth."""
    dtypes = (other, "i8", "fp32") if role == "nn" else ("i8", other, "fp32")
    return a_call(role, "w", (2, 19), (64, 38), dtypes, packed=True, arch=arch, **more)


DTYPES_OF_A_CALL = [
    ("bf16", "i8", "bf16"),
    ("fp16", "i8", "fp16"),
    ("fp32", "i8", "fp32"),
    ("i8", "i8", "bf16"),
    ("fp8e4nv", "fp8e4nv", "bf16"),
    ("fp8e4nv", "fp8e5", "fp32"),
]
LAYERS = {(1, 4096): (4096, 4096), (32, 32): (4096, 4096), (16, 4): (512, 1536)}  # blocks -> sizes


class TestRaggedScaled(Suite):
    call, most = RaggedScaledCall, 40
    geometry = [
        *each(lambda role, cuts: a_call(role, "xwy", CUTS[cuts]), ROLES, CUTS),
        *each(lambda role, sizes: a_call(role, "xw" if role == "nn" else "wy", sizes=SIZES[sizes], offset=0), ROLES, SIZES),
        *each(lambda role, slots: a_call(role, slots, (1, 1)), ROLES, ["x", "w", "y", "xw", "wy"]),
        *each(lambda role: a_call(role, "xwy", sizes=(0, 1, 0), offset=0, rows=1), ROLES),
    ]
    dtypes = [
        *each(lambda role, dtypes: a_call(role, "xw", (3, 1), (96, 24), dtypes), ROLES, DTYPES_OF_A_CALL),
        # a scale for each number of the sum, or for some, beside the end of a tile
        *each(lambda role, cuts, dtypes: a_call(role, "xwy", cuts, (39, 24), dtypes), ROLES, [(39, 1), (13, 24)], FINE),
    ]
    configs = [
        *each(packed, ["nn", "nt"], ["bf16", "i8"], [80, 90]),
        *each(lambda role: a_call(role, "xwy", **BATCHES), ROLES),
        *each(lambda role: packed(role, "bf16", B=2), ["nn", "nt"]),
        *each(lambda role: dataclasses.replace(a_call(role, "xwy", (1, 3), (50, 27)), config=TALL), ROLES),  # which tiles do not divide
    ]
    rounding = [
        *each(lambda role, cuts: a_call(role, "xwy", CUTS[cuts]), ROLES, ["columns", "squares"]),
        *each(packed, ["nn", "nt"], ["bf16"], [80, 90]),
    ]
    same_bits = each(lambda role: a_call(role, "xwy", P=2), ROLES)
    refused_problems = [
        (a_call("nn", "w", (1, 1), (64, 41), packed=True), "want an even number"),
        (a_call("nn", "w", dtypes=("fp8e4nv", "i8", "fp32"), arch=80), "8-bit floats need compute capability 8.9"),
        (a_call("nn", "w", dtypes=("fp32", "i8", "fp8e5")), "fp32 and i8 into fp8e5"),
        (a_call("nt", "w").with_problem(G=2049), "^2049 groups, want at most 2048"),
        (a_call("nn", "w").with_problem(P=2**20, R=2**12), f"more tiles than a grid has programs, {MOST_PROGRAMS}$"),
    ]
    refused_configs = [
        (RaggedScaledCall.smallest(a_call("nn", "w").problem, tile_k=64), "a step lies within a block"),
        (RaggedScaledCall.smallest(a_call("nn", "w").problem, splits=2), "splits is 2, want 1"),
    ]
    candidates = each(
        lambda role, cuts, dtypes: [a_problem(role, "xw", cuts, LAYERS[cuts], dtypes, G=8, rows=8192)],
        ROLES,
        LAYERS,
        [("bf16", "i8", "bf16"), ("fp8e4nv", "fp8e4nv", "bf16")],
    )  # fmt: skip

    def check_candidate(self, problem, config, launch):
        assert not problem.scales_steps or problem.step % config.tile_k == 0


def test_an_infinity_in_a_matrix_reaches_rows_of_its_group_alone():
    call = a_call("nn", "xw")
    operands, (present, group) = call.operands(), rows_of(call.problem, *call.ranges)
    operands["w_scale"][:, 0] = np.inf
    with np.errstate(invalid="ignore"):
        (y,) = call.compute(operands)
    assert np.isfinite(y[~present | (group > 0)]).all() and not np.isfinite(y[present & (group == 0)]).any()
