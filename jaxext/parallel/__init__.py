"""Products whose communication is part of them, for use inside `jax.shard_map`, and what each way to split a product costs.

`jit` splits jaxext's operations over devices by itself.  What stands here is for programs that say how: products that gather or scatter
while they multiply, convolutions whose image is split, and the bytes that each sharding sends.
"""

from jaxext.parallel.collective_matmul import all_gather_matmul, matmul_reduce_scatter
from jaxext.parallel.cost_model import Collective, Cost, cost
from jaxext.parallel.halo import conv_general_dilated

__all__ = ["Collective", "Cost", "all_gather_matmul", "conv_general_dilated", "cost", "matmul_reduce_scatter"]
