"""How often XLA's GPU compiler goes over memory for a product with an epilogue, by kernels and by itself, read without a GPU.

As test_gpu_program.py, `make gpu-programs` runs it.
"""

# ruff: noqa: F401, F811 - two fixtures are imported
import jax
import jax.numpy as jnp
import pytest
from lowered import struct
from test_gpu_program import compiled, devices, work

import jaxext

X, W, BIAS, Y = struct(4096, 1024), struct(1024, 4096), struct(4096), struct(4096, 4096)
WEIGHTS = struct(1024, 2, 4096)
IMAGE, FILTER, CHANNELS = struct(8, 28, 28, 256), struct(256, 3, 3, 256), struct(256)
NHWC = ("NHWC", "OHWI", "NHWC")  # as the kernels take filters


def linear(by):
    if by == "jnp":
        return lambda x, w, b, r: jax.nn.gelu(x @ w + jnp.broadcast_to(b, r.shape), approximate=False) + r
    return lambda x, w, b, r: jaxext.linear(x, w, b, activation="gelu", residual=r, implementation=by)


def gated(by):
    if by == "jnp":
        return lambda x, w: jax.nn.silu(x @ w[:, 0]) * (x @ w[:, 1])
    return lambda x, w: jaxext.gated_linear_unit(x, w, activation="silu", implementation=by)


def conv(by):
    return lambda x, w, b, r: jaxext.conv_bias_act(
        x, w, b, (1, 1), "SAME", dimension_numbers=NHWC, activation="relu", residual=r, implementation=by
    )


def halves(fun, *args):
    """Forward that saves, and backward, as two programs: a network has other layers between them."""

    def forward(*args):
        return jax.vjp(fun, *args)

    y, pullback = jax.eval_shape(forward, *args)
    saved, tree = jax.tree.flatten(pullback)
    return (forward, args), (lambda ct, *saved: jax.tree.unflatten(tree, saved)(ct), (y, *saved))


def passes(compiled, program) -> int:
    fun, args = program
    found = work(compiled(fun, *args))
    return found.total() - found["copy"]  # a copy is that of an argument, which becomes a result as it is


@pytest.mark.parametrize(
    ("op", "args", "of_jnp"),
    [(linear, (X, W, BIAS, Y), 2), (gated, (X, WEIGHTS), 2), (conv, (IMAGE, FILTER, CHANNELS, IMAGE), None)],
    ids=["linear", "gated", "conv"],
)
def test_a_forward_pass_is_one_kernel(compiled, op, args, of_jnp):
    """Also if it saves what the backward pass needs; XLA's takes at least two."""
    assert work(compiled(op("triton"), *args)) == {"kernel": 1}
    forward, backward = halves(op("triton"), *args)
    assert work(compiled(*forward[:1], *forward[1]))["kernel"] == 1
    if of_jnp is not None:
        assert passes(compiled, (op("jnp"), args)) >= of_jnp


@pytest.mark.parametrize(("op", "args"), [(linear, (X, W, BIAS, Y)), (gated, (X, WEIGHTS))], ids=["linear", "gated"])
def test_a_backward_pass_is_four_at_most(compiled, op, args):
    """Two products, the slope times the cotangent, and the bias's gradient."""
    _, backward = halves(op("triton"), *args)
    assert work(compiled(*backward[:1], *backward[1]))["kernel"] == 2
    assert passes(compiled, backward) <= 4


def test_the_composition_is_as_many_passes_as_jnp(compiled):
    args = X, W, BIAS, Y
    assert passes(compiled, (linear("xla"), args)) == passes(compiled, (linear("jnp"), args))
    for ours, theirs in zip(halves(linear("xla"), *args), halves(linear("jnp"), *args), strict=True):
        assert passes(compiled, ours) <= passes(compiled, theirs)
