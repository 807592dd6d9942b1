"""What XLA's GPU compiler makes of causal convolutions by our kernels, and of decoding steps, read without a GPU.

As test_gpu_program.py, `make gpu-programs` runs it.
"""

# ruff: noqa: F401, F811 - fixtures are imported
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding
from lowered import struct
from test_gpu_program import compiled, devices, kernels, work

import jaxext

ARGS = struct(8, 2048, 5376), struct(4, 5376), struct(5376)
MORE = {"plain": {}, "state": {"initial_states": struct(8, 3, 5376)}, "packed": {"seq_idx": struct(8, 2048, dtype=jnp.int32)}}


@pytest.mark.parametrize("kind", MORE)
def test_one_kernel_each(compiled, kernels, kind):
    """No array of the size of x is made or copied besides; the partial sums of weight and bias are added by few small kernels."""

    def forward(x, w, b, *more):
        return jaxext.causal_conv1d(x, w, b, **dict(zip(MORE[kind], more, strict=True)), activation="silu")

    def backward(ct, x, w, b, *more):
        return jax.vjp(lambda *args: forward(*args, *more), x, w, b)[1](ct)

    more = MORE[kind].values()
    one, both = work(compiled(forward, *ARGS, *more)), work(compiled(backward, ARGS[0], *ARGS, *more))
    assert one == {"kernel": 1}
    assert both["kernel"] == 1 and both.total() <= 4


STEPS = {  # of a decoding step: the state, the operand that says where in it, and what XLA makes of it
    "shifted": (struct(64, 3, 512), None, {"copy": 1, "fusion": 2}),
    "circular": (struct(64, 4, 512), "cache_seqlens", {"fusion": 2}),
    "of a pool": (struct(256, 3, 512), "conv_state_indices", {"fusion": 3}),
}


@pytest.mark.parametrize("kind", STEPS)
def test_a_decoding_step_updates_its_state_in_place(devices, kind):
    """A donated state is the new one's buffer.  Only one that is shifted is copied, since every element moves."""
    state, where, want = STEPS[kind]

    def step(state, x, w, b, *places):
        return jaxext.causal_conv1d_update(x, state, w, b, activation="silu", **({where: places[0]} if where else {}))

    args = [state, struct(64, 512), struct(4, 512), struct(512), *([struct(64, dtype=jnp.int32)] if where else [])]
    args = [jax.ShapeDtypeStruct(of.shape, of.dtype, sharding=SingleDeviceSharding(devices[0])) for of in args]
    with jaxext.use_target("sm_90a"):
        text = str(jax.jit(step, donate_argnums=0).lower(*args).compile().as_text())
    assert "input_output_alias={ {1}: (0, {}, may-alias) }" in text
    assert work(text) == want
