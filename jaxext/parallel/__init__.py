"""Distributed operations for use inside `jax.shard_map`, and a cost model for shardings.

`jit` splits jaxext's operations over devices by itself.  This package is for explicit control: matmuls that overlap an all-gather or a
reduce-scatter, mixtures whose experts are split over devices, convolutions with halo exchange along space or time, and the bytes that each
sharding sends.
"""

from jaxext.parallel.collective_matmul import all_gather_matmul, matmul_reduce_scatter
from jaxext.parallel.cost_model import Collective, Cost, cost
from jaxext.parallel.expert_parallel import expert_parallel
from jaxext.parallel.halo import halo_causal_conv, halo_causal_conv1d, halo_conv
from jaxext.parallel.long_conv import split_long_conv

__all__ = [
    "Collective",
    "Cost",
    "all_gather_matmul",
    "cost",
    "expert_parallel",
    "halo_causal_conv",
    "halo_causal_conv1d",
    "halo_conv",
    "matmul_reduce_scatter",
    "split_long_conv",
]


def __dir__() -> list[str]:
    return __all__
