"""The targets of the implementations.

A target is a least value: of the time of another library over that of the implementation ("lax", "xla", or "best", the faster of the two),
of the share of the bandwidth of a large copy ("copy"), or of 10^12 operations per second ("tflops").  Targets of GPUs are what is possible
on an H200 in bfloat16, by kind.  Targets of CPUs are the gains of rewrites in XLA's own operations over lax of jax 0.10.2 in float32, by
name.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping

from jaxext.bench.case import STEP, Case
from jaxext.bench.kinds import CONV_ROLES, DGRAD, FPROP, MATMUL_ROLES, NN, NT, TN, WGRAD

Targets = Mapping[str, Mapping[str, float]]  # implementation -> what is compared -> the least

FASTER: Targets = {"triton": {"best": 2.0}}
RAGGED: Targets = {"triton": {"lax": 5.0}, "cuda": {"lax": 5.0}}
RAGGED_LONG: Targets = {"triton": {"lax": 5.0}, "cuda": {"lax": 5.0, "tflops": 600}}
RAGGED_SUM: Targets = {"triton": {"lax": 3.0}, "cuda": {"lax": 3.0}}
DEPTHWISE: Mapping[str, Targets] = {
    FPROP: {"triton": {"best": 1.3, "copy": 0.75}, "cuda": {"copy": 0.85}},
    DGRAD: {"triton": {"best": 2.0, "copy": 0.75}, "cuda": {"copy": 0.75}},
    WGRAD: {"triton": {"best": 2.0, "copy": 0.75}, "cuda": {"copy": 0.75}},
}
# 49 products for each element.  Outside the tensor cores, as wgrad has them, they take longer than moving the arrays of 16 bits
# (benchmarks/notes/gpu.md).
MANY_TAPS: Mapping[str, Targets] = {
    FPROP: {"triton": {"best": 1.3}, "cuda": {"copy": 0.75}},
    DGRAD: {"triton": {"best": 2.0}, "cuda": {"copy": 0.75}},
    WGRAD: {"triton": {"best": 2.0}, "cuda": {"copy": 0.4}},
}
CAUSAL: Mapping[str, Targets] = {
    FPROP: {"triton": {"lax": 3.0, "xla": 1.0}, "cuda": {"copy": 0.85}},
    DGRAD: {"triton": {"lax": 5.0, "xla": 1.0}, "cuda": {"copy": 0.75}},
    WGRAD: {"triton": {"lax": 5.0, "xla": 1.0}, "cuda": {"copy": 0.75}},
}
# Kind -> role -> targets: of a problem tagged "target", the first kind all of whose tags it has.
OF_GPUS: tuple[tuple[frozenset[str], Mapping[str, Targets]], ...] = tuple(
    (frozenset(tags.split()), by_role)
    for tags, by_role in (
        ("fused gated long", {"forward": {"triton": {"best": 1.05}}}),
        ("fused gated short", {"forward": {"triton": {"best": 1.3}}}),
        ("fused long", {"forward": {"triton": {"best": 1.05}, "cuda": {"best": 1.1}}}),
        ("fused short", {"forward": {"triton": {"best": 1.3}, "cuda": {"best": 1.3}}}),  # the passes that are saved take long
        ("ragged deepseek", {NN: RAGGED_LONG, NT: RAGGED_LONG, TN: RAGGED_SUM}),
        ("ragged", {NN: RAGGED, NT: RAGGED, TN: RAGGED_SUM}),
        ("large", dict.fromkeys(MATMUL_ROLES, {"triton": {"best": 0.85}, "cuda": {"best": 0.97, "tflops": 700}})),
        ("waves", {NN: {"cuda": {"best": 1.03}}}),  # the last round of tiles leaves multiprocessors idle, or the depth is short
        ("thin", {NN: {"cuda": {"copy": 0.8}}}),
        ("batched-filters", dict.fromkeys(CONV_ROLES, FASTER)),
        ("per-example", {WGRAD: FASTER}),
        ("depthwise causal", CAUSAL),
        ("depthwise convnext", MANY_TAPS),
        ("depthwise", DEPTHWISE),
        ("one-axis", dict.fromkeys(CONV_ROLES, {"cuda": {"best": 1.5}})),
        ("three-axes", dict.fromkeys(CONV_ROLES, {"cuda": {"best": 1.3}})),
        ("transposed", {FPROP: FASTER}),
        ("grouped strided", {DGRAD: FASTER}),
        ("few-images", dict.fromkeys(CONV_ROLES, {"cuda": {"best": 1.2}})),
        ("many-images", dict.fromkeys(CONV_ROLES, {"cuda": {"best": 0.9}})),
    )
)

NO_SLOWER = dict.fromkeys((*MATMUL_ROLES, STEP), 0.95)
DENSE = dict.fromkeys(CONV_ROLES, 0.95)  # no slower, as far as can be told
# Name -> role -> the least time of lax over that of xla.
OF_CPUS: Mapping[str, Mapping[str, float]] = {
    "depthwise 7x7, 8x56x56x96": {FPROP: 15, DGRAD: 15, WGRAD: 5},
    "depthwise 3x3, 8x56x56x64": {FPROP: 10, DGRAD: 10, WGRAD: 2.5},
    "causal depthwise k=4, 4x2048x512": {FPROP: 30, DGRAD: 30, WGRAD: 3},
    "32 groups of 4, 3x3, 8x28x28x128": {FPROP: 4, DGRAD: 3, WGRAD: 50},
    "batched filters, 16 x 2x28x28x32": dict.fromkeys(CONV_ROLES, 3),
    "per-example, 16 x 1x28x28x32": {WGRAD: 3},
    "transposed 4x4 stride 2, 4x32x32x64": {FPROP: 1.2, DGRAD: 0.95, WGRAD: 1.2},
    "strided 4x4 by 2, 4x64x64x64": {FPROP: 0.95, DGRAD: 1.2, WGRAD: 0.95},
    "dense 1x1, 8x28x28x128": DENSE,
    "dense 3x3, 8x28x28x64": DENSE,
    "dense 7x7, 2x56x56x16": DENSE,
    "dense 1-D k=5, 8x512x64": DENSE,
    "dense 3-D 3x3x3, 2x12x12x12x16": DENSE,
    "experts, 8 groups, 2048x512x512": {NN: 6, NT: 5, TN: 5, STEP: 5},  # lax does 8 times the work, at full speed
    "experts, skewed, 32 groups, 2048x512x512": {NN: 8, NT: 5, TN: 5, STEP: 5},
    "experts, half empty, 32 groups, 2048x512x512": {NN: 8, NT: 5, TN: 5, STEP: 5},
    "experts, all in one, 8 groups, 2048x256x512": NO_SLOWER,
    "experts, small, 8 groups, 128x64x64": NO_SLOWER,
    "experts, decoding, 16 groups, 16x256x512": NO_SLOWER,
    "experts, decoding, 64 groups, 64x256x512": NO_SLOWER,
    "experts, decoding, 16 groups, 128x256x512": NO_SLOWER,
    "experts, many, 64 groups, 512x256x512": NO_SLOWER,
    "one group, 1 groups, 1024x256x256": NO_SLOWER,
    **{f"cube, {n}x{n}x{n}": {NN: 0.95} for n in (256, 512, 1024, 2048)},
}


# Kinds in the order in which a GPU measures them, those of which most is expected first: a run may end early.
FIRST = ("causal", "depthwise", "batched-filters", "per-example", "transposed", "grouped", "one-axis", "three-axes", "dense")
FIRST += ("ragged", "fused", "large", "waves", "thin")


def targets(case: Case, platform: str) -> Targets:
    """The targets of the implementations on `platform` ("cpu", "gpu" or "cuda"; others have none), such as {"cuda": {"best": 0.97}}.

    A reduced problem, or a case in other numbers, has none.
    """
    if platform == "cpu":
        least = OF_CPUS.get(case.problem, {}).get(case.role)
        return {"xla": {"lax": least}} if least is not None and set(case.dtypes) == {"float32"} else {}
    if platform not in ("gpu", "cuda") or set(case.dtypes) != {"bfloat16"} or "target" not in case.tags or "reduced" in case.tags:
        return {}
    return next((by_role.get(case.role, {}) for tags, by_role in OF_GPUS if tags <= case.tags), {})


def in_order(cases: Iterable[Case], platform: str) -> list[Case]:
    """The cases, ordered for a run that may end early: on a GPU one of each kind and role before a second of any, targets first."""
    if platform == "cpu":
        return list(cases)

    def kind(case: Case) -> int:
        return next((place for place, kind in enumerate(FIRST) if kind in case.tags), len(FIRST))

    ordered = sorted(cases, key=lambda case: (not targets(case, platform), kind(case)))
    count: collections.Counter[tuple[int, str]] = collections.Counter()

    def nth(case: Case) -> int:
        count[kind(case), case.role] += 1
        return count[kind(case), case.role]

    return sorted(ordered, key=nth)
