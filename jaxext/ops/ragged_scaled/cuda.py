"""The launch of a ragged product of scaled 8-bit floats on Hopper (csrc/ragged_scaled/ragged_scaled.h): its arrays, and which kernel is
expected to be fastest.

The kernel wants what is contracted last in both factors: rows times transposed matrices, as gradients of rows are, and products with
`transpose_rhs`.  The scale of the result joins that of its rows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxext.backends.cuda.cuda_binding import Cuda, called, compiled, config_of, refusal
from jaxext.backends.kernel import KernelCall, kernel_result
from jaxext.kernels.geometry import MOST_POSITIONS
from jaxext.kernels.launch import BITS, cdiv
from jaxext.kernels.ragged.problem import visits
from jaxext.kernels.ragged_scaled.problem import Problem
from jaxext.ops.ragged.cuda import RaggedConfig
from jaxext.ops.ragged_scaled.problem import RaggedScaledKernels
from jaxext.ops.scaled.cuda import STEP, ScaledProblem, clocks_of_tiles


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedScaledProblem(Problem, ScaledProblem):
    """A product, with the facts that its arrays depend on."""


def fields(problem: RaggedScaledProblem) -> dict[str, int]:
    """Return the fields of jaxext::RaggedScaledProblem."""
    _, j, s = problem.kernel_blocks
    return dict(B=problem.B, P=problem.P, R=problem.R, M=problem.M, N=problem.cols, K=problem.depth, G=problem.G, S=s, J=j)


def refused(problem: RaggedScaledProblem) -> str | None:
    """Return the reason why the kernels do not take it, or None."""
    if problem.role != "nt":
        return f"the product {problem.role}, want nt, as with transpose_rhs"
    if problem.has_result and problem.blocks[1] > 1:
        return f"the result has scales for {problem.blocks[1]} blocks of columns, want one for each row"
    return refusal("ragged_scaled", fields(problem), (*problem.operand_dtypes, problem.dtypes[2]), problem.arch)


def slots(problem: RaggedScaledProblem) -> tuple[str, ...]:
    """The operands of a call that `arrays` takes."""
    return "y", "w", *(f"{slot}_scale" for slot in problem.scaled), "begin", "end"


def arrays(problem: RaggedScaledProblem, operands: Mapping[str, jax.Array], tile_m: int) -> dict[str, jax.Array]:
    """The kernel's: a[BPR,M,K], b[BG,N,K], left[BPR,M,S], right[BG,J,S], or [BG,S,J] if each column has its own scale, and visits.  A
    scale's axis of size 1 is for all."""
    matrices, groups = problem.B * problem.P * problem.R, problem.B * problem.G
    scales = {name: x.astype(jnp.float32) for name, x in operands.items() if name.endswith("_scale")}
    left = right = jnp.ones((1, 1, 1), jnp.float32)
    if problem.has_left:
        left = scales["y_scale"].reshape(matrices, problem.M, -1)
    if problem.has_result:
        left = left * scales["x_scale"].reshape(matrices, problem.M, 1)
    if problem.has_right:
        right = scales["w_scale"].reshape(groups, *problem.blocks[1:])
    j = problem.kernel_blocks[1]
    right = right if right.shape[1] == j else jnp.repeat(right, j // right.shape[1], 1)
    return dict(
        a=operands["y"].reshape(matrices, problem.M, problem.depth),
        b=operands["w"].reshape(groups, problem.cols, problem.depth),
        left=left,
        right=right.swapaxes(1, 2) if j == problem.cols else right,
        visits=visits(jnp, operands["begin"], operands["end"], problem.M, tile_m),
    )


def candidates(problem: RaggedScaledProblem, table: Sequence[Mapping[str, Any]]) -> list[RaggedConfig]:
    """Every tile of the operands' dtypes.  The one that is expected to take the fewest clocks is first."""
    configs = [config_of(RaggedConfig, row) for row in table if (row["operands"], row["second"]) == problem.operand_dtypes]
    fit = [config for config in configs if _tiles(problem, config, problem.tiles_down(config.tile_m)) <= MOST_POSITIONS]
    return sorted(fit, key=lambda config: clocks(problem, config))


def clocks(problem: RaggedScaledProblem, config: RaggedConfig) -> float:
    """Expected time, in clocks, if half of the groups end within a tile of rows."""
    tiles, depth = _tiles(problem, config, problem.expected_tiles_down(config.tile_m)), cdiv(problem.depth, STEP) * STEP
    loaded = config.tile_m / config.cluster_n + config.tile_n
    return clocks_of_tiles(problem, config, tiles, depth, loaded, BITS[problem.dtypes[2]])


def _tiles(problem: RaggedScaledProblem, config: RaggedConfig, down: int) -> int:
    """Return the number of tiles of the result, with those that fill up a cluster."""
    return problem.batches * down * cdiv(problem.cols, config.tile_n * config.cluster_n) * config.cluster_n


class CudaRaggedScaled(RaggedScaledKernels, Cuda):
    custom_calls = ("jaxext_ragged_scaled_v1",)
    epilogues = False
    kernel_family = "ragged_scaled"
    problem_type = RaggedScaledProblem

    def refuses_problem(self, problem):
        return refused(problem)

    def configs(self, problem):
        return candidates(problem, compiled("ragged_scaled"))

    def launch(self, call, problem, config):
        attributes = fields(problem) | dataclasses.asdict(config)
        function = functools.partial(_called, problem, attributes, not call.in_place)
        return KernelCall(describe="ragged_scaled", slots=slots(problem), splits=1, call=function)


def _called(problem: RaggedScaledProblem, attributes: Mapping[str, Any], own_buffers: bool, result, *operands: jax.Array) -> jax.Array:
    given = arrays(problem, dict(zip(slots(problem), operands, strict=True)), attributes["tile_m"])
    shapes = {"result": (problem.B * problem.P * problem.R, problem.M, problem.cols)}
    y = called("jaxext_ragged_scaled_v1", attributes, [*given], shapes, kernel_result(result), *given.values(), own_buffers=own_buffers)
    return y.astype(result.dtype)
