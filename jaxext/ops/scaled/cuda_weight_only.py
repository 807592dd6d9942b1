"""The launch of products with quantised weights (csrc/weight_only/weight_only.h): the problem, and the config for each.

Of few rows, the weight is what takes the time, so a config is judged by how its bytes come.  A block has `tile_n` columns and `tile_m`
rows, and its warps take turns along the sum; blocks split the sum further where there are few columns, which costs another kernel.  Hopper
has kernels for more rows (csrc/weight_only/wide_weight_only.cuh), whose blocks multiply with wgmma.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxext.backends.cuda.cuda_binding import Cuda, called, fields_named, not_compiled_for, refusal
from jaxext.backends.cuda.cuda_tiles import library_clocks
from jaxext.backends.kernel import KernelCall, kernel_result
from jaxext.kernels.launch import BITS, cdiv
from jaxext.kernels.machine import ISSUED, LAUNCH, LEGACY, REACHED, START, STORED, machine
from jaxext.kernels.scaled.problem import Problem
from jaxext.ops.scaled.problem import ScaledKernels

MOST_ROWS = 64  # but for wide kernels; csrc/weight_only/weight_only_plan.h has this and the next too
STEP = 32  # of the sum
FEW_ROWS = 32  # of a block, at most: with more, blocks load the weight several times, and its bytes are no longer what takes the time
# Bits of an integer -> the tiles that there are -> instructions of a thread for each integer, without products: counted in the loop that
# ptxas 13.0 made for 9.0 and bfloat16.
TILES = {
    4: {(8, 256): 2.3, (8, 64): 3.1, (16, 256): 3.0, (32, 256): 4.3},
    8: {(8, 128): 3.4, (8, 64): 3.9, (16, 128): 4.3, (32, 256): 5.1},
}
# The same of Hopper's kernels, whose steps are of 64: a stage of the ring.  Additions of sums are not in these numbers.
WIDE_TILES = {4: {(64, 256): 3.8, (128, 256): 3.9}, 8: {(64, 256): 4.2, (128, 256): 4.4}}
WIDE_STEP = 64
_SPLITS = (1, 2, 4, 8, 16, 32)
_FEWEST_STEPS = 16  # of a part: two for each warp


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightOnlyProblem(Problem):
    @property
    def bits_of_weight(self) -> int:
        return 4 if self.packed else 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightOnlyConfig:
    tile_m: int
    tile_n: int
    splits: int = 1  # partial results along a leading axis of the result, which is float32 if there are several


def fields(problem: WeightOnlyProblem) -> dict[str, int]:
    """Return the fields of jaxext::WeightOnlyProblem."""
    return fields_named(problem, "BMNKS") | {"bits": problem.bits_of_weight}


def refused(problem: WeightOnlyProblem) -> str | None:
    """Return the reason why the kernels do not take it, or None."""
    if problem.role != "nn":
        return f"the product {problem.role}, a derivative, want the product itself"
    if problem.scaled != ("w",):
        return f"scales of {' and '.join(problem.scaled)}, want scales of w alone"
    if problem.J != problem.N:
        return f"{problem.J} scales along N of {problem.N}, want one for each column"
    return refusal("weight_only", fields(problem), problem.dtypes, problem.arch)


def candidates(problem: WeightOnlyProblem) -> list[WeightOnlyConfig]:
    """Every tile that is no higher than the rows want, in as many parts as are long enough.  The one that takes the fewest clocks is first,
    among equals the largest."""
    few, wide = TILES[problem.bits_of_weight], WIDE_TILES[problem.bits_of_weight]
    highest = next((m for m in (8, 16, 32, 64, 128) if m >= problem.M), 128)
    tiles = [*(few if problem.M <= MOST_ROWS else ()), *(wide if problem.arch == 90 and problem.M > FEW_ROWS else ())]
    configs = [
        WeightOnlyConfig(tile_m=m, tile_n=n, splits=splits)
        for m, n in tiles
        if m <= highest
        for splits in _SPLITS
        if splits == 1 or problem.K // STEP >= splits * _FEWEST_STEPS
    ]
    return sorted(configs, key=lambda config: (clocks(problem, config), -config.tile_m, -config.tile_n))


def resident(problem: WeightOnlyProblem, config: WeightOnlyConfig) -> int:
    """Blocks on a multiprocessor, which their registers allow: `kResident` of csrc/weight_only/weight_only.cuh."""
    columns = config.tile_n // config.tile_m  # of a thread
    return 1 if config.tile_m > 8 or columns * problem.bits_of_weight == 128 else 2


def grid(problem: WeightOnlyProblem, config: WeightOnlyConfig) -> int:
    """Blocks, as csrc/weight_only/weight_only_plan.cc counts them."""
    return problem.B * config.splits * cdiv(problem.N, config.tile_n) * cdiv(problem.M, config.tile_m)


def clocks(problem: WeightOnlyProblem, config: WeightOnlyConfig) -> float:
    """Expected time, in clocks: to start, and the largest of three: to load all from memory, to load a block's share from the L2 cache, and
    to compute it.  Blocks that lie one above the other find the weight in the cache."""
    gpu, bits, blocks = machine(problem.arch, problem.device), problem.bits_of_weight, resident(problem, config)
    if config.tile_m > FEW_ROWS:
        return _wide_clocks(problem, config)
    depth = cdiv(problem.K // STEP, config.splits) * STEP
    integers = depth * config.tile_n
    loaded = integers * bits / 8 + depth * config.tile_m * 2 + 4 * config.tile_n * cdiv(problem.S, config.splits)
    issued = integers * TILES[bits][config.tile_m, config.tile_n] / ISSUED
    multiplied = integers * config.tile_m / (gpu.products / (LEGACY if problem.arch >= 90 else 1))
    rounds = gpu.rounds(grid(problem, config), blocks) * blocks
    parts = 4 * config.splits * problem.B * problem.M * problem.N if config.splits > 1 else 0
    busy = rounds * max(loaded / gpu.l2, issued, multiplied)
    return START + max(busy, gpu.moving(weight_bytes(problem))) + (gpu.adding(parts) if parts else 0)


def _wide_clocks(problem: WeightOnlyProblem, config: WeightOnlyConfig) -> float:
    """The same of Hopper's kernels.  Blocks store after they have multiplied, and those side by side find x in the cache.  All warps add up
    the sums of each step."""
    gpu, bits, split = machine(problem.arch, problem.device), problem.bits_of_weight, config.splits > 1
    depth = cdiv(cdiv(problem.K, WIDE_STEP), config.splits) * WIDE_STEP
    integers, sums = depth * config.tile_n, config.tile_m * config.tile_n
    unit = STEP if problem.S > 1 and problem.K // problem.S % WIDE_STEP else WIDE_STEP  # whose sums are added at once
    loaded = integers * bits / 8 + depth * config.tile_m * 2 + 4 * config.tile_n * cdiv(problem.S, config.splits)
    issued = (integers * WIDE_TILES[bits][config.tile_m, config.tile_n] + sums * depth / unit) / ISSUED
    multiplied = integers * config.tile_m / (gpu.products * REACHED[config.tile_m])
    result = 4 if split else BITS[problem.dtypes[2]] / 8
    rounds = gpu.rounds(grid(problem, config))
    busy = rounds * (max(loaded / gpu.l2, issued, multiplied) + sums * result / STORED)
    written = result * config.splits * problem.B * problem.M * problem.N
    moved = weight_bytes(problem) + 2 * problem.B * problem.M * problem.K + (0 if split else written)
    return START + max(busy, gpu.moving(moved)) + (gpu.adding(written) if split else 0)


def dequantised_clocks(problem: WeightOnlyProblem) -> float:
    """Return the clocks of a product with the weight in 16 bits, which another kernel writes before."""
    gpu, numbers = machine(problem.arch, problem.device), problem.B * problem.N * problem.K
    return gpu.moving(weight_bytes(problem) + 2 * numbers) + LAUNCH + library_clocks(problem)


def weight_bytes(problem: WeightOnlyProblem) -> float:
    """Return the bytes of the weight with its scales."""
    return problem.B * problem.N * (problem.K * problem.bits_of_weight / 8 + 4 * problem.S)


_CLEARLY = 1.25  # models of two kernels differ by less than that without a reason


class CudaWeightOnly(ScaledKernels, Cuda):
    """Products with int8 and int4, which have a scale for each column, or for blocks of each: of few rows, and on Hopper of many."""

    custom_calls = ("jaxext_weight_only_v1",)
    epilogues = False

    problem_type = WeightOnlyProblem

    def refuses_problem(self, problem):
        return refused(problem) or not_compiled_for(problem.arch)

    def family(self, problem, config):
        return "wide_weight_only" if config.tile_m > FEW_ROWS else "weight_only"

    def slower(self, call):
        if call.sizes["S"] == 1:
            return "XLA converts factors inside of its products, which are expected to be as fast"
        problem = self.problem(call)
        assert not isinstance(problem, str)  # it is asked of calls that it supports
        if problem.M <= FEW_ROWS:
            return None  # XLA writes the scaled weight to memory, in 16 bits, and reads it again
        if problem.arch != 90:
            return "Triton's kernels are expected to be as fast"
        if clocks(problem, self.configs(problem)[0]) * _CLEARLY < dequantised_clocks(problem):
            return None
        return "XLA's product with a weight that it makes wide before is expected to be as fast"

    def configs(self, problem):
        return candidates(problem)

    def launch(self, call, problem, config):
        return KernelCall(
            describe="weight_only",
            slots=("x", "w", "w_scale"),
            splits=config.splits,
            call=functools.partial(_weight_only, problem, fields(problem) | dataclasses.asdict(config), not call.in_place),
        )


def _weight_only(problem: WeightOnlyProblem, attributes: Mapping[str, Any], own_buffers: bool, result, x, w, scale) -> jax.Array:
    """The call of the handler, which takes two int4 in a byte, the first in the low half, as XLA packs them on GPUs."""
    B, M, N, K, S = (getattr(problem, label) for label in "BMNKS")
    w = lax.bitcast_convert_type(w.reshape(-1, 2), jnp.int8) if problem.packed else w
    given, shapes = (x, w.reshape(B, K, -1), scale.astype(jnp.float32)), {"x": (B, M, K), "scale": (B, S, N), "result": (B, M, N)}
    slots = ("x", "w", "scale")
    y = called("jaxext_weight_only_v1", attributes, slots, shapes, kernel_result(result), *given, own_buffers=own_buffers)
    return y.astype(result.dtype)
