"""What XLA's GPU compiler makes of causal convolutions by our kernels, read without a GPU.

As test_gpu_program.py, `make gpu-programs` runs it.
"""

# ruff: noqa: F401, F811 - two fixtures are imported
import jax
import jax.numpy as jnp
import pytest
from lowered import struct
from test_gpu_program import compiled, devices, work

import jaxext

ARGS = struct(8, 2048, 5376), struct(4, 5376), struct(5376)
MORE = {"plain": {}, "state": {"initial_states": struct(8, 3, 5376)}, "packed": {"seq_idx": struct(8, 2048, dtype=jnp.int32)}}


@pytest.mark.parametrize("kind", MORE)
def test_one_kernel_each(compiled, kind):
    """No array of the size of x is made or copied besides; the partial sums of weight and bias are added by few small kernels."""

    def forward(x, w, b, *more):
        return jaxext.causal_conv1d(x, w, b, **dict(zip(MORE[kind], more, strict=True)), activation="silu")

    def backward(ct, x, w, b, *more):
        return jax.vjp(lambda *args: forward(*args, *more), x, w, b)[1](ct)

    more = MORE[kind].values()
    one, both = work(compiled(forward, *ARGS, *more)), work(compiled(backward, ARGS[0], *ARGS, *more))
    assert one == {"kernel": 1}
    assert both["kernel"] == 1 and both.total() <= 4
