"""Rows times numbers: the compiled CUDA kernel against numpy, and in programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_calls import Call
from cuda_kernels import check
from cuda_launches import INVALID, Case, ask
from lowered import custom_calls

import jaxext
from jaxext.ops.rowscale import rowscale


def reference(x, scale):
    return (x.astype(scale.dtype) * scale[:, None]).astype(x.dtype)


def call(dtype, lanes, B, M, N):
    arrays = {"x": (dtype, (B, M, N)), "scale": ("float32", (M,))}
    rng = np.random.default_rng(0)
    operands = {
        name: rng.standard_normal(shape).astype(of) for name, (of, shape) in arrays.items()
    }
    case = Case("rowscale", dict(B=B, M=M, N=N, lanes=lanes), arrays, {"y": arrays["x"]})
    return Call(
        case,
        operands,
        lambda results: np.testing.assert_array_equal(results["y"], reference(**operands)),
    )


@pytest.mark.parametrize("sizes", [(2, 3, 40), (1, 5, 1032)])
@pytest.mark.parametrize(
    ("dtype", "lanes"), [("float32", 1), ("float32", 4), ("bfloat16", 1), ("bfloat16", 8)]
)
def test_the_kernel_is_the_reference(dtype, lanes, sizes):
    check(call(dtype, lanes, *sizes), arch="sm_80")


def test_what_is_refused():
    assert ask(call("float32", 4, 1, 2, 6).case) == (
        INVALID,
        "rowscale: no kernel for B=1 M=2 N=6 has lanes=4",
    )
    with jaxext.use_target("sm_90a"), jaxext.use_implementation("cuda"):
        with pytest.raises(NotImplementedError, match="x is fp16, want fp32 or bf16"):
            jax.jit(rowscale).trace(
                jnp.ones((1, 2, 8), jnp.float16), jnp.ones(2, jnp.float32)
            ).lower(lowering_platforms=("cuda",))


def test_programs_call_the_kernel():
    """Mapped or differentiated ones, too."""
    x, scale = jnp.ones((2, 4, 8), jnp.bfloat16), jnp.arange(4, dtype=jnp.float32)
    mapped, loss = (
        jax.vmap(rowscale, (0, None)),
        lambda x, scale: jnp.square(rowscale(x, scale)).sum(),
    )
    with jaxext.use_target("sm_90a"), jaxext.use_implementation("cuda"):
        assert "cuda rowscale, 8 lanes" in str(
            jaxext.explain(mapped, platform="cuda")(x[None], scale)
        )
        for function, operands in [
            (rowscale, (x, scale)),
            (mapped, (x[None], scale)),
            (jax.value_and_grad(loss, (0, 1)), (x, scale)),
        ]:
            lowered = jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",))
            assert custom_calls(lowered)["jaxext_rowscale_v1"] == 1
