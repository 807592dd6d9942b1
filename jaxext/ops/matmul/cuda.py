"""The launch of a matrix product on Hopper (csrc/matmul/matmul.h): which kernel is expected to be fastest.

`table` is the list of kernels that were compiled, which the module tells.  A tile is judged by a small model, in clocks of one
multiprocessor:

    tile    = max(multiply, load, shared memory) per element of depth, and what its schedule does not hide of its prologue and epilogue
    product = max(rounds of tiles over the multiprocessors, all bytes from memory), and the partial results written and read again

so large tiles win where there are many, ping-pong where the depth is short, narrow ones where wide ones would leave a last round empty,
and splits where tiles are few.  TMA writes both operands to shared memory, and wgmma reads them from it, the right one anew for each 64
rows: that bounds tiles of few rows or columns.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from jaxext.backends.cuda.cuda_binding import Cuda, compiled, config_of, fields_named, kernel_call, refusal, refused_epilogue, splits
from jaxext.backends.fields import matmul_problem
from jaxext.kernels.geometry import MOST_POSITIONS
from jaxext.kernels.launch import BITS, cdiv
from jaxext.kernels.machine import REACHED, START, STORED, Machine, machine, stored
from jaxext.kernels.matmul.problem import MatmulProblem
from jaxext.ops.matmul import cuda_pieces

_FEWEST_STEPS = 4  # of a part: less does not fill the ring of stages


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulConfig:
    tile_m: int
    tile_n: int
    tile_k: int
    cluster_m: int  # blocks, one above the other, that share what they load of the right operand
    pingpong: int  # 1: two warp groups take turns, one multiplies while the other stores; 0: both work on one tile
    splits: int = 1  # partial results along a leading axis of the result, which is float32 if there are several


def fields(problem: MatmulProblem) -> dict[str, int]:
    """Return the fields of jaxext::MatmulProblem."""
    return fields_named(problem, "BMNK")


def refused(problem: MatmulProblem) -> str | None:
    """Return the reason why the kernels do not take it, or None."""
    target = "linear" if problem.epilogue else f"matmul_{problem.role}"
    return refused_epilogue(problem) or refusal(target, fields(problem), problem.dtypes, problem.arch)


def candidates(problem: MatmulProblem, table: Sequence[Mapping[str, Any]]) -> list[MatmulConfig]:
    """Every tile of the operands' dtype: that gives the result's, or float32 in parts that TMA can find.  With an epilogue, of those that
    fuse it, and in one part.

    The one that is expected to take the fewest clocks is first.
    """
    kind, result = (problem.role, problem.dtypes[0], problem.epilogue is not None), problem.dtypes[2]
    rows = [row for row in table if (row["role"], row["operands"], row["fused"]) == kind and _few_enough(problem, row)]

    def exists(row: Mapping[str, Any], parts: int) -> bool:
        if parts == 1:
            return row["result"] == result
        return not row["fused"] and row["result"] == "fp32" and _divides(problem, parts, row["tile_k"])

    configs = [config_of(MatmulConfig, row, splits=parts) for row in rows for parts in splits(row) if exists(row, parts)]
    return sorted(configs, key=lambda config: clocks(problem, config))


def pick(problem: MatmulProblem, table: Sequence[Mapping[str, Any]]) -> MatmulConfig:
    return candidates(problem, table)[0]


def clocks(problem: MatmulProblem, config: MatmulConfig) -> float:
    """Expected time of the product, in clocks."""
    gpu, split = machine(problem.arch, problem.device), config.splits > 1
    bits, result_bits = BITS[problem.dtypes[0]], 32 if split else BITS[problem.dtypes[2]]
    pairs = cdiv(cdiv(problem.rows, config.tile_m), config.cluster_m)  # clusters, one below the other
    tiles = pairs * config.cluster_m * cdiv(problem.cols, config.tile_n) * problem.B * config.splits

    mainloop = problem.depth // config.splits * step(config, gpu, bits)
    store = stored(problem.epilogue) * config.tile_m * config.tile_n * result_bits / 8 / STORED
    computed = START + gpu.rounds(tiles) * (max(mainloop, store) if config.pingpong else mainloop + store)

    operands = (problem.rows + problem.cols) * problem.depth * problem.B * bits / 8
    written = stored(problem.epilogue) * problem.rows * problem.cols * problem.B * config.splits * result_bits / 8
    return gpu.product(computed, operands, written, config.splits)


_LIBRARY_SPLITS = (1, 2, 4, 8, 16, 32)
# What makes a 16-bit product of XLA's, for comparison.
_LIBRARY = [
    MatmulConfig(tile_m=m, tile_n=n, tile_k=64, cluster_m=cluster, pingpong=pingpong, splits=splits)
    for (m, n, cluster, pingpong), splits in itertools.product([(128, 256, 2, 0), (128, 192, 2, 1), (64, 128, 1, 1)], _LIBRARY_SPLITS)
]


def library_clocks(problem: MatmulProblem) -> float:
    """Expected time of XLA's product of 16-bit factors, in clocks."""
    return min(clocks(problem, config) for config in _LIBRARY)


def step(config: Any, gpu: Machine, bits: int) -> float:
    """Clocks of a tile for one element of depth.  `config` has the fields of a tile."""
    m, n = config.tile_m, config.tile_n
    shared = (m + n) + (m + m // 64 * n)  # written, and read
    loaded = m + n / config.cluster_m
    return max(gpu.tile(m * n, gpu.rate(bits) * REACHED[128], loaded * bits / 8), shared * bits / 8 / gpu.shared)


def _few_enough(problem: MatmulProblem, row: Mapping[str, Any]) -> bool:
    """Return whether CUTLASS can number the tiles with 32 bits, in a grid that it rounds up to pairs of blocks and bands of eight."""
    down, across = cdiv(problem.rows, row["tile_m"]) + 15, cdiv(problem.cols, row["tile_n"]) + 15
    return down * across * problem.B * row["most_splits"] <= MOST_POSITIONS


def _divides(problem: MatmulProblem, splits: int, tile_k: int) -> bool:
    """Return whether parts are equal, begin at multiples of 16 bytes, and are long enough."""
    depth = problem.depth
    return problem.B == 1 and depth % (splits * 128 // BITS[problem.dtypes[0]]) == 0 and depth // splits >= _FEWEST_STEPS * tile_k


def library_clocks_16_bits(problem: MatmulProblem) -> float:
    """Expected time of XLA's product of 16-bit factors, whatever the factors, without what it takes to convert them."""
    plain = MatmulProblem(
        **{field.name: getattr(problem, field.name) for field in dataclasses.fields(MatmulProblem) if field.name != "dtypes"},
        dtypes=("bf16", "bf16", problem.dtypes[2]),
    )
    return library_clocks(plain)


class CudaMatmul(Cuda):
    """Products of 16 and 8 bits, and of float32 where a precision asks for pieces of bfloat16."""

    custom_calls = (
        *(f"jaxext_{kernel}_{role}_v1" for kernel in ("matmul", "pieces") for role in ("nn", "nt", "tn")),
        "jaxext_linear_v1",
    )

    def problem(self, call):
        return matmul_problem(call, MatmulProblem, call.arch or 0)

    def refuses_problem(self, problem):
        return cuda_pieces.refused(problem) if _float32(problem) else refused(problem)

    def multiplied(self, problem):
        return problem.precision if _float32(problem) else "ieee"

    def family(self, problem, config):
        return "pieces" if _float32(problem) else "matmul"

    def slower(self, call):
        return "XLA's matrix products (cuBLAS) are expected to be as fast"

    def configs(self, problem):
        if _float32(problem):
            return cuda_pieces.candidates(problem, compiled("pieces"))
        return candidates(problem, compiled("matmul"))

    def launch(self, call, problem, config):
        op = call.op.replace("matmul", "pieces") if _float32(problem) else call.op
        return kernel_call(call, problem, fields(problem), op, config)


def _float32(problem: MatmulProblem) -> bool:
    """Return whether the kernels that split float32 into bfloat16 take the problem.  They fuse no epilogue."""
    return problem.dtypes[:2] == ("fp32", "fp32") and problem.epilogue is None
