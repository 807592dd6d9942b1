"""The launch of a ragged product on Hopper (csrc/ragged/ragged.h): which kernel is expected to be fastest.

`table` is the list of kernels that were compiled, which the module tells.  A tile is judged by a small model, in clocks of one
multiprocessor: the longer of multiplying and loading for each element of depth, and the rounds of tiles, if groups are alike and half of
them end within a tile of rows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxext.backends.cuda.cuda_binding import Cuda, compiled, config_of, fields_named, kernel_call, refusal
from jaxext.backends.cuda.cuda_tiles import RESIDENT
from jaxext.backends.kernel import KernelCall
from jaxext.kernels.geometry import MOST_POSITIONS
from jaxext.kernels.launch import BITS, cdiv
from jaxext.kernels.machine import REACHED, START, STORED, machine
from jaxext.kernels.ragged.problem import RaggedProblem, visits
from jaxext.ops.ragged.problem import RaggedKernels


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedConfig:
    tile_m: int
    tile_n: int
    tile_k: int
    cluster_n: int  # blocks, side by side, that share what they load of the left operand


def fields(problem: RaggedProblem) -> dict[str, int]:
    """Return the fields of jaxext::RaggedProblem."""
    return fields_named(problem, "BPRMNKG")


def refused(problem: RaggedProblem) -> str | None:
    """Return the reason why the kernels do not take it, or None."""
    return refusal(f"ragged_{problem.role}", fields(problem), problem.dtypes, problem.arch)


def candidates(problem: RaggedProblem, table: Sequence[Mapping[str, Any]]) -> list[RaggedConfig]:
    """Every tile of the dtype.  The one that is expected to take the fewest clocks is first."""
    configs = [config_of(RaggedConfig, row) for row in table if (row["role"], row["operands"]) == (problem.role, problem.dtypes[0])]
    fit = [config for config in configs if _tiles(problem, config, problem.tiles_down(config.tile_m)) <= MOST_POSITIONS]
    return sorted(fit, key=lambda config: clocks(problem, config))


def clocks(problem: RaggedProblem, config: RaggedConfig) -> float:
    """Expected time, in clocks.  Blocks that share a multiprocessor multiply in turns and hide one another's stores."""
    gpu, bits = machine(problem.arch, problem.device), BITS[problem.dtypes[0]]
    tiles = _tiles(problem, config, problem.expected_tiles_down(config.tile_m))
    resident = max(1, min(RESIDENT[config.tile_m], gpu.rounds(tiles)))
    elements = config.tile_m * config.tile_n
    loaded = (config.tile_m / config.cluster_n + config.tile_n) * bits / 8
    depth = cdiv(problem.expected_depth, config.tile_k) * config.tile_k
    product = depth * gpu.tile(elements, gpu.rate(bits) * REACHED[config.tile_m], loaded)
    store = elements * bits / 8 / STORED
    return START + gpu.rounds(tiles, resident) * (resident * product + store)


def _tiles(problem: RaggedProblem, config: RaggedConfig, down: int) -> int:
    """Return the number of tiles of the result, with those that fill up a cluster."""
    return problem.batches * down * cdiv(problem.cols, config.tile_n * config.cluster_n) * config.cluster_n


class CudaRagged(RaggedKernels, Cuda):
    custom_calls = tuple(f"jaxext_ragged_{role}_v1" for role in ("nn", "nt", "tn"))
    epilogues = False
    kernel_family = "ragged"

    def refuses_problem(self, problem):
        return refused(problem)

    def yields(self, call):
        return call.op != "ragged_tn"

    def configs(self, problem):
        return candidates(problem, compiled("ragged"))

    def launch(self, call, problem, config):
        plain = kernel_call(call, problem, fields(problem), call.op, config, "places")
        call_with_places = functools.partial(_call_with_places, plain, problem, config.tile_m)
        return dataclasses.replace(plain, slots=(*plain.slots[:2], "begin", "end"), call=call_with_places)


def _call_with_places(plain: KernelCall, problem: RaggedProblem, tile_m: int, result, first, second, begin, end) -> jax.Array:
    """Call the kernel with the visits of tiles of rows, or in tn with the ranges of groups in one array."""
    places = jnp.stack([begin, end], -1) if problem.role == "tn" else visits(jnp, begin, end, problem.M, tile_m)
    return plain.call(result, first, second, places)
