"""The widest loads and stores that a Triton kernel can use, from the addresses at which the rows of its arrays start."""

from __future__ import annotations

import itertools
import math

from jaxext.kernels.launch import BITS

SLOTS = "abcxwy"  # of all forms, in their order
RANGES = ("begin", "end", "visits")  # of ragged products: whole numbers, read one by one
SCALES = {"x_scale": "S", "w_scale": "J", "y_scale": "J"}  # of products of scaled numbers, with how many there are in a row


def dtypes_of(problem, launch) -> list[str]:
    """The dtypes of the kernel's pointers: of operands and results."""
    if hasattr(problem, "T"):
        return _of_causal(problem, launch)
    if not hasattr(problem, "role"):
        return [*problem.dtypes]
    factors = sorted((slot for slot in launch.operands[:2] if slot in SLOTS), key=SLOTS.index)
    of_slot = (
        dict.fromkeys(RANGES, "i32")
        | dict.fromkeys(SCALES, "fp32")
        | {"addend": getattr(problem, "addend", None) or ""}
        | dict(zip(factors, problem.dtypes, strict=False))
    )
    if problem.epilogue is not None:
        of_slot |= {slot: getattr(problem.epilogue, slot) for slot in ("bias", "residual", "scale")}
    partial = "i32" if problem.dtypes[2] == "i32" else "fp32"
    results = [partial if launch.splits > 1 else problem.dtypes[2]] * launch.results
    return [*(of_slot[slot] for slot in launch.operands), *results]


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


def _of_causal(problem, launch) -> list[str]:
    x, w, y = problem.dtypes
    of_slot = {"x": x, "w": w, "bias": problem.epilogue.bias, "initial_states": problem.state, "d_y": y}
    of_slot |= {"seq_idx": "i32", "idx_of_states": "i32"}
    results = [y] if problem.role == "forward" else [x, w, *filter(None, (problem.epilogue.bias, problem.state))]
    partial = launch.splits > 1
    return [
        *(of_slot[slot] for slot in launch.operands),
        *("fp32" if partial and i not in launch.whole else dtype for i, dtype in enumerate(results)),
    ]


def _vector(launch) -> int:
    """The channels of a thread of a causal convolution: a narrower one is a choice."""
    config = launch.constants["CONFIG"]
    return config.tile_c * config.strips // (32 * launch.num_warps)
