"""The widest loads and stores that a Triton kernel can use, from the addresses at which the rows of its arrays start."""

from __future__ import annotations

import itertools
import math

from jaxext.bench.triton_ptx import RANGES, SCALES, SLOTS, dtypes_of
from jaxext.kernels.launch import BITS


def aligned(problem, launch) -> bool:
    """Return whether every run of consecutive elements that a kernel reads starts and ends at a multiple of 16 bytes.

    The taps of a depthwise filter are not counted, since they are few, nor are an epilogue's operands, which are read once.  The result is
    False for kernels without roles.
    """
    if not hasattr(problem, "role"):
        return False
    if hasattr(problem, "T"):
        return _vector(launch) * BITS[problem.dtypes[0]] >= 128 and problem.C * BITS[problem.dtypes[0]] % 128 == 0
    if hasattr(problem, "M"):
        runs = _rows(problem)
    elif problem.C == 1 and problem.G > 1:
        stepping = problem.role == "dgrad" and problem.K > 1  # over a multiplier's outputs, which lie between those of the groups
        runs = {"x": problem.G, "y": 1 if stepping else problem.G * problem.K, "w": 0}
    else:
        runs = {"x": problem.C, "y": problem.K, "w": problem.C}
    factors = zip(launch.operands[:2], dtypes_of(problem, launch), strict=False)
    return all(runs[slot] * BITS[dtype] % 128 == 0 for slot, dtype in factors if slot in SLOTS)


def widest(problem, launch) -> list[int]:
    """The most bytes, up to 16, of one load and of one store: they divide each address at which a row of a tile can start.

    The operand of a load is unknown, so any load may be as wide as the widest operand allows.
    """
    if not hasattr(problem, "role"):
        return [16, 16]
    config = launch.constants["CONFIG"]
    if hasattr(problem, "T"):
        return [math.gcd(16, problem.C * BITS[dtype] // 8) for dtype in (problem.dtypes[0], problem.dtypes[2])]
    if hasattr(problem, "M"):
        rows = _rows(problem)
    elif launch.kernel.__name__.startswith("depthwise"):
        rows = {"x": problem.G, "w": math.prod(problem.filter), "y": problem.G * problem.K}
    else:
        taps = math.prod(problem.filter) if config.packed and problem.role != "dgrad" else 1  # in one row of a tile
        rows = {"x": problem.C * config.groups, "w": taps * problem.C, "y": problem.K * config.groups}
    (result,) = rows.keys() - {*launch.operands}
    rows |= dict.fromkeys(("bias", "residual", "addend"), rows[result]) | dict.fromkeys((*RANGES, "scale"), 1)
    rows |= {slot: getattr(problem, blocks) for slot, blocks in SCALES.items() if hasattr(problem, blocks)}
    slots = (*launch.operands, *[result] * launch.results)
    starts = (rows[slot] * BITS[dtype] // 8 for slot, dtype in zip(slots, dtypes_of(problem, launch), strict=True))
    *loaded, stored = (math.gcd(16, start) for start in itertools.islice(starts, len(launch.operands) + 1))
    return [max(loaded), stored]


def _rows(problem) -> dict[str, int]:
    """The elements of a row of each slot of a product of matrices, ragged, scaled or neither; of one with itself, of factor and result."""
    if hasattr(problem, "addend"):
        return {"a": problem.K, "c": problem.N}
    slots = "xwy" if hasattr(problem, "G") or hasattr(problem, "scaled") else "abc"
    packed = 2 if getattr(problem, "packed", False) else 1
    return dict(zip(slots, (problem.K, problem.N // packed, problem.N), strict=True))


def _vector(launch) -> int:
    """The channels of a thread of a causal convolution: a narrower one is a choice."""
    config = launch.constants["CONFIG"]
    return config.tile_c * config.strips // (32 * launch.num_warps)
