"""The launch of a product of a matrix with its own transpose on Hopper (csrc/gram/gram.h), and which kernel is expected to be fastest.

`table` is the list of kernels that were compiled, which the module tells.  A tile is judged by the model of matrix products
(`cuda_tiles`), with the tiles that touch the lower triangle, each of which is stored twice.  Clusters are two tiles high, and those
on the diagonal are whole, so the number of rows decides which tile leaves the fewest multiprocessors without work.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from jaxext.backends.cuda.cuda_binding import Cuda, called, compiled, refusal, split_configs
from jaxext.backends.cuda.cuda_tiles import FEWEST_STEPS, TileConfig, library_clocks, step
from jaxext.backends.kernel import KernelCall
from jaxext.kernels.geometry import MOST_POSITIONS
from jaxext.kernels.gram.problem import Problem
from jaxext.kernels.launch import BITS, cdiv
from jaxext.kernels.machine import START, STORED, machine
from jaxext.ops.gram.problem import GramKernels, slower


def fields(problem: Problem) -> dict[str, int]:
    """Return the fields of jaxext::GramProblem."""
    return dict(B=problem.B, M=problem.rows, N=problem.depth)


def refused(problem: Problem) -> str | None:
    """Return the reason why the kernels do not take it, or None."""
    return refusal("gram", fields(problem), (*problem.dtypes, problem.addend), problem.arch)


def candidates(problem: Problem, table: Sequence[Mapping[str, Any]]) -> list[TileConfig]:
    """Every tile of the operands' dtype, in one part or, without an addend, in more.  The one that is expected to take the fewest clocks
    is first."""
    splittable = problem.B == 1 and problem.addend is None
    rows = [row for row in table if row["operands"] == problem.dtypes[0]]

    def divides(row, parts):
        return splittable and cdiv(problem.depth, row["tile_k"]) // parts >= FEWEST_STEPS

    configs = split_configs(TileConfig, rows, divides)
    fit = [config for config in configs if tiles(problem, config) // config.cluster_m <= MOST_POSITIONS]
    return sorted(fit, key=lambda config: clocks(problem, config))


def tiles(problem: Problem, config: TileConfig) -> int:
    """Return the number of tiles of all parts, with those of clusters that lie above the diagonal."""
    height, across = config.tile_m * config.cluster_m, cdiv(problem.rows, config.tile_n)
    clusters = sum(min(across, cdiv(i * height, config.tile_n)) for i in range(1, cdiv(problem.rows, height) + 1))
    return clusters * config.cluster_m * problem.B * config.splits


def clocks(problem: Problem, config: TileConfig) -> float:
    """Expected time, in clocks."""
    gpu, split = machine(problem.arch, problem.device), config.splits > 1
    result_bits = 32 if split else BITS[problem.dtypes[2]]
    depth = cdiv(cdiv(problem.depth, config.tile_k), config.splits) * config.tile_k
    added = problem.addend is not None  # and read, where tiles of the result are stored
    store = (2 + added) * config.tile_m * config.tile_n * result_bits / 8 / STORED
    computed = START + gpu.rounds(tiles(problem, config)) * (depth * step(config, gpu, BITS[problem.dtypes[0]]) + store)

    operands = problem.B * problem.rows * problem.depth * BITS[problem.dtypes[0]] / 8
    written = problem.B * problem.rows * problem.rows * config.splits * result_bits / 8
    return gpu.product(computed, operands, written if split else (1 + added / 2) * written, config.splits)


def share(problem: Problem, table: Sequence[Mapping[str, Any]]) -> float:
    """The clocks of this kernel over those of a kernel that computes the whole product, by the models."""
    return clocks(problem, candidates(problem, table)[0]) / library_clocks(problem)


class CudaGram(GramKernels, Cuda):
    """Half of a product with its own transpose."""

    custom_calls = ("jaxext_gram_v1",)
    kernel_family = "gram"

    def refuses_problem(self, problem):
        return refused(problem)

    def slower(self, call):
        problem = self.problem(call)
        assert not isinstance(problem, str)  # it is asked of calls that it supports
        return slower(share(problem, compiled("gram")))

    def configs(self, problem):
        return candidates(problem, compiled("gram"))

    def launch(self, call, problem, config):
        slots = ("c", "addend") if problem.addend else ("c",)
        shapes = {"c": (problem.B, problem.rows, problem.depth)} | dict.fromkeys(("addend", "result"), (problem.B, *(problem.rows,) * 2))
        scales = {name: float(getattr(problem, name)) for name in ("scale", "of_addend")}
        attributes = fields(problem) | dataclasses.asdict(config) | scales
        return KernelCall(
            describe="gram",
            slots=slots,
            splits=config.splits,
            call=functools.partial(called, *self.custom_calls, attributes, slots, shapes, own_buffers=not call.in_place),
        )
