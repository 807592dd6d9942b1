"""The model of a product of matrices on Hopper, by TMA and wgmma: the time of a tile's kernel, in clocks of one multiprocessor.

    tile    = max(multiply, load, shared memory) per element of depth, and what its schedule does not hide of its prologue and epilogue
    product = max(rounds of tiles over the multiprocessors, all bytes from memory), and the partial results written and read again

So large tiles win where there are many, ping-pong where the depth is short, narrow ones where wide ones would leave a last round empty,
and splits where tiles are few.  TMA writes both operands to shared memory, and wgmma reads them from it, the right one anew for each 64
rows: that bounds tiles of few rows or columns.
"""

from __future__ import annotations

import dataclasses
import itertools

from jaxext.kernels.launch import BITS, cdiv
from jaxext.kernels.machine import REACHED, START, STORED, Machine, machine, stored
from jaxext.kernels.matmul.problem import MatmulProblem

FEWEST_STEPS = 4  # of a part of a sum: less does not fill the ring of stages
RESIDENT = {128: 1, 64: 2}  # tile_m -> blocks with sums of their own that fit on a multiprocessor


@dataclasses.dataclass(frozen=True, kw_only=True)
class TileConfig:
    tile_m: int
    tile_n: int
    tile_k: int
    cluster_m: int  # blocks, one above the other, that share what they load of the right operand
    splits: int = 1  # partial results along a leading axis of the result, which is float32 if there are several


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmConfig:
    """The tile of a kernel with two warp groups, with the fields of `TileConfig`."""

    tile_m: int
    tile_n: int
    tile_k: int
    cluster_m: int
    pingpong: int  # 1: two warp groups take turns, one multiplies while the other stores; 0: both work on one tile
    splits: int = 1


def clocks(problem: MatmulProblem, config: GemmConfig) -> float:
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


def step(config: TileConfig | GemmConfig, gpu: Machine, bits: int) -> float:
    """Clocks of a tile for one element of depth."""
    m, n = config.tile_m, config.tile_n
    shared = (m + n) + (m + m // 64 * n)  # written, and read
    loaded = m + n / config.cluster_m
    return max(gpu.tile(m * n, gpu.rate(bits) * REACHED[128], loaded * bits / 8), shared * bits / 8 / gpu.shared)


# XLA's kernels of 16-bit factors, for comparison.
_LIBRARY = [
    GemmConfig(tile_m=m, tile_n=n, tile_k=64, cluster_m=cluster, pingpong=pingpong, splits=splits)
    for (m, n, cluster, pingpong), splits in itertools.product([(128, 256, 2, 0), (128, 192, 2, 1), (64, 128, 1, 1)], (1, 2, 4, 8, 16, 32))
]


def library_clocks(problem: MatmulProblem) -> float:
    """Expected time of XLA's product of 16-bit factors, whatever the factors, without what it takes to convert them."""
    halves = dataclasses.replace(problem, dtypes=("bf16", "bf16", problem.dtypes[2]))
    return min(clocks(halves, config) for config in _LIBRARY)
