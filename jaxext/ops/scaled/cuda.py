"""The launch of a product of scaled 8-bit floats on Hopper (scaled.h): its arrays, and which kernel is expected to be fastest.

The kernel wants what is contracted last in both factors, and scales for rows and columns of the result: factors and scales that lie
otherwise are transposed by XLA, and the scale of the result joins that of its rows or its columns.

`table` is the list of kernels that were compiled, which the module tells.  A tile is judged by a small model, in clocks of one
multiprocessor: the longest of multiplying, loading and moving sums for each element of depth, the rounds of tiles, what is transposed
before, and the partial results written and read again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxext.backends.cuda.cuda_binding import Cuda, called, compiled, refusal, split_configs
from jaxext.backends.cuda.cuda_tiles import FEWEST_STEPS, RESIDENT, TileConfig, library_clocks
from jaxext.backends.kernel import KernelCall, kernel_result
from jaxext.kernels.geometry import MOST_POSITIONS
from jaxext.kernels.launch import BITS, cdiv
from jaxext.kernels.machine import LAUNCH, REACHED, START, STORED, machine
from jaxext.kernels.scaled.problem import LEFT, OPEN, RIGHT, Problem
from jaxext.ops.scaled.cuda_weight_only import CudaWeightOnly
from jaxext.ops.scaled.problem import ScaledKernels

STEP = 128  # of the depth, whose product is scaled
_TURNED = {"nn": "b", "nt": "", "tn": "ab"}  # factors that lie with what is contracted first


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaledProblem(Problem):
    """A product, with the facts that its arrays depend on."""

    @property
    def by_rows(self) -> bool:
        """Return whether the scale of the result joins that of its rows."""
        return self.blocks[1] == 1

    @property
    def kernel_blocks(self) -> tuple[int, int, int]:
        """The numbers of blocks as the kernel is given them: those of scales that there are.  Narrow blocks of columns are spread."""
        rows, cols, depth = self.blocks
        i = rows if self.has_left or self.has_result and self.by_rows else 1
        j = cols if self.has_right or self.has_result and not self.by_rows else 1
        narrow = 1 < j < self.cols and self.cols // j % STEP
        return i, self.cols if narrow else j, depth if self.has_left or self.has_right else 1

    @property
    def columns_in_steps(self) -> bool:
        """Return whether scales change along the sum, and each column has its own."""
        _, j, s = self.kernel_blocks
        return s > 1 and j == self.cols


def fields(problem: ScaledProblem) -> dict[str, int]:
    """Return the fields of jaxext::ScaledProblem."""
    i, j, s = problem.kernel_blocks
    return dict(B=problem.B, M=problem.rows, N=problem.cols, K=problem.depth, I=i, J=j, S=s)


def scaled_both_ways(problem: ScaledProblem) -> str | None:
    """The reason if the result has scales that join neither its rows' nor its columns'."""
    rows, cols, _ = problem.blocks
    return "the result has scales of rows and columns at once" if problem.has_result and min(rows, cols) > 1 else None


def refused(problem: ScaledProblem) -> str | None:
    """Return the reason why the kernels do not take it, or None."""
    return scaled_both_ways(problem) or refusal("scaled", fields(problem), (*problem.operand_dtypes, problem.dtypes[2]), problem.arch)


def slots(problem: ScaledProblem) -> tuple[str, ...]:
    """The operands of a call that `arrays` takes."""
    factors = LEFT[problem.role], RIGHT[problem.role]
    return (*factors, *(f"{slot}_scale" for slot in (*factors, OPEN[problem.role]) if slot in problem.scaled))


def arrays(problem: ScaledProblem, operands: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The kernel's: a[B,M,K], b[B,N,K], left[B,I,S] and right[B,J,S], or [B,S,J] if each column has its own scale.  A scale's axis of
    size 1 is for all."""
    role, (rows, cols, depth) = problem.role, problem.blocks
    at = dict(zip(slots(problem), operands.values(), strict=True))
    a, b = at[LEFT[role]], at[RIGHT[role]]
    a = a.reshape(problem.B, problem.depth, problem.rows).swapaxes(1, 2) if "a" in _TURNED[role] else a.reshape(problem.B, problem.rows, -1)
    b = b.reshape(problem.B, problem.depth, problem.cols).swapaxes(1, 2) if "b" in _TURNED[role] else b.reshape(problem.B, problem.cols, -1)
    left = right = jnp.ones((1, 1, 1), jnp.float32)
    if problem.has_left:
        scale = at[f"{LEFT[role]}_scale"].astype(jnp.float32)
        left = scale.reshape(problem.B, depth, rows).swapaxes(1, 2) if role == "tn" else scale.reshape(problem.B, rows, depth)
    if problem.has_right:
        scale = at[f"{RIGHT[role]}_scale"].astype(jnp.float32)
        right = scale.reshape(problem.B, cols, depth) if role == "nt" else scale.reshape(problem.B, depth, cols).swapaxes(1, 2)
    if problem.has_result:
        scale = at[f"{OPEN[role]}_scale"].astype(jnp.float32).reshape(problem.B, -1, 1)
        left, right = (left * scale, right) if problem.by_rows else (left, right * scale)
    j = problem.kernel_blocks[1]
    right = right if right.shape[1] == j else jnp.repeat(right, j // right.shape[1], 1)
    return dict(a=a, b=b, left=left, right=right.swapaxes(1, 2) if j == problem.cols else right)


def candidates(problem: ScaledProblem, table: Sequence[Mapping[str, Any]]) -> list[TileConfig]:
    """Every tile of the operands' dtypes, in one part or more.  The one that is expected to take the fewest clocks is first."""
    steps = cdiv(problem.depth, STEP)
    rows = [row for row in table if (row["operands"], row["second"]) == problem.operand_dtypes]
    configs = split_configs(TileConfig, rows, lambda row, parts: problem.B == 1 and steps // parts >= FEWEST_STEPS)
    fit = [config for config in configs if _tiles(problem, config) <= MOST_POSITIONS]
    return sorted(fit, key=lambda config: clocks(problem, config))


def clocks(problem: ScaledProblem, config: TileConfig) -> float:
    """Expected time, in clocks.  While one warp group, or block, moves its sums another multiplies."""
    gpu, result_bits = machine(problem.arch, problem.device), 32 if config.splits > 1 else BITS[problem.dtypes[2]]
    depth = cdiv(cdiv(problem.depth, STEP), config.splits) * STEP
    computed = clocks_of_tiles(
        problem, config, _tiles(problem, config), depth, config.tile_m + config.tile_n / config.cluster_m, result_bits
    )

    operands = {"a": problem.B * problem.rows * problem.depth, "b": problem.B * problem.cols * problem.depth}
    written = problem.B * problem.rows * problem.cols * config.splits * result_bits / 8
    turned = sum(gpu.moving(2 * operands[name]) + LAUNCH for name in _TURNED[problem.role])
    return turned + gpu.product(computed, sum(operands.values()), written, config.splits)


def clocks_of_tiles(problem: ScaledProblem, config: Any, tiles: int, depth: int, loaded: float, result_bits: int) -> float:
    """The time of a multiprocessor's tiles; `loaded`: bytes for each element of depth."""
    gpu, elements = machine(problem.arch, problem.device), config.tile_m * config.tile_n
    resident = max(1, min(RESIDENT[config.tile_m], gpu.rounds(tiles)))
    multiplied = elements / (gpu.rate(8) * REACHED[config.tile_m])
    moved = elements * (3 if problem.columns_in_steps else 1) / gpu.fma / STEP  # with a scale of each column: loaded, multiplied twice
    step = max(gpu.tile(elements, gpu.rate(8) * REACHED[config.tile_m], loaded), multiplied / 2 + moved)
    store = elements * result_bits / 8 / STORED
    return START + gpu.rounds(tiles, resident) * (resident * depth * step + store)


def _tiles(problem: ScaledProblem, config: TileConfig) -> int:
    """Return the number of tiles of all parts, with those that fill up a cluster."""
    down = cdiv(problem.rows, config.tile_m * config.cluster_m) * config.cluster_m
    return problem.B * config.splits * down * cdiv(problem.cols, config.tile_n)


class CudaScaled(ScaledKernels, Cuda):
    """Products of 8-bit floats, and those with integers by `CudaWeightOnly`."""

    custom_calls = ("jaxext_scaled_v1", *CudaWeightOnly.custom_calls)
    epilogues = False
    kernel_family = "scaled"

    def plan(self, call):
        integers = any(jnp.issubdtype(call.dtypes[slot], jnp.integer) for slot in call.factors)
        return _WEIGHT_ONLY.plan(call) if integers else super().plan(call)

    problem_type = ScaledProblem

    def refuses_problem(self, problem):
        return refused(problem)

    def slower(self, call):
        problem = self.problem(call)
        assert not isinstance(problem, str)  # it is asked of calls that it supports
        if clocks(problem, self.configs(problem)[0]) < library_clocks(problem):
            return None  # others multiply numbers of 16 bits
        return "XLA's products of 16-bit numbers are expected to be as fast"

    def configs(self, problem):
        return candidates(problem, compiled("scaled"))

    def launch(self, call, problem, config):
        attributes = fields(problem) | dataclasses.asdict(config)
        call = functools.partial(_scaled, problem, attributes, not call.in_place)
        return KernelCall(describe="scaled", slots=slots(problem), splits=config.splits, call=call)


def _scaled(problem: ScaledProblem, attributes: Mapping[str, Any], own_buffers: bool, result, *operands: jax.Array) -> jax.Array:
    given, shapes = arrays(problem, dict(zip(slots(problem), operands, strict=True))), {"result": (problem.B, problem.rows, problem.cols)}
    y = called("jaxext_scaled_v1", attributes, [*given], shapes, kernel_result(result), *given.values(), own_buffers=own_buffers)
    return y.astype(result.dtype)


_WEIGHT_ONLY = CudaWeightOnly()
