"""Ragged products in CUDA programs: which kernels are called, what else is in the program, and how they are compiled.  No GPU is needed."""

import functools

import jax
import jax.numpy as jnp
import pytest
from lowered import operations, struct

pytest.importorskip("triton")
pytest.importorskip("jax_triton", exc_type=ImportError)

# ruff: noqa: E402
from test_triton_binding import calls, kernels

import jaxext
from jaxext.benchmarks import compiled
from jaxext.kernels import ragged
from jaxext.kernels.epilogue import Epilogue

X, W, SIZES = struct(512, 136), struct(8, 136, 264), struct(8, dtype=jnp.int32)


def loss(x, w, sizes):
    return jnp.sum(jaxext.ragged_dot(x, w, sizes).astype(jnp.float32) ** 2)


def test_a_training_step_is_three_launches():
    """Without a name, where no CUDA kernel is: no array is expanded to the groups, and none of the factors is copied."""
    with jaxext.use_table(None):
        program = jaxext.lower_for(jax.grad(loss, (0, 1)), X, W, SIZES, arch="sm_80")
    assert kernels(program) == {"ragged_nn": 1, "ragged_nt": 1, "ragged_tn": 1}
    assert not [op for op in operations(program) if op.name in ("stablehlo.dot_general", "stablehlo.while")]
    visits = [op.operands[2].type.shape for op, _ in calls(program) if len(op.operands) == 3]
    assert [(*shape[:2], *shape[3:]) for shape in visits] == [(1, 1, 5)] * 2


def test_a_layer_with_epilogues_is_two_launches():
    """Forward.  Neither a bias for each row nor a product without its epilogue is written to memory; a step saves what it needs."""
    gates, down, scale, bias = struct(8, 136, 2, 264), struct(8, 264, 136), struct(512, dtype=jnp.float32), struct(8, 136)

    def layer(x, gates, down, bias, scale, sizes):
        hidden = jaxext.ragged_gated_linear_unit(x, gates, sizes, activation="silu")
        return jaxext.ragged_linear(hidden, down, sizes, bias, row_scale=scale)

    args = X, gates, down, bias, scale, SIZES
    total = lambda *args: layer(*args).astype(jnp.float32).sum()
    with jaxext.use_table(None):
        program = jaxext.lower_for(layer, *args, arch="sm_80")  # where there are no CUDA kernels for the gradients
        step = jaxext.lower_for(jax.grad(total, (0, 1, 2)), *args, arch="sm_80")
    assert kernels(program) == {"ragged_gated_linear_unit": 1, "ragged_linear": 1}
    results = [[result.type.shape for result in op.results] for op, _ in calls(program)]
    assert results == [[[1, 1, 1, 512, 264]], [[1, 1, 1, 512, 136]]]
    assert kernels(step) == {"ragged_gated_linear_unit": 1, "ragged_nt": 2, "ragged_tn": 2}


def test_integers_are_left_to_xla():
    with jaxext.use_table(None), jaxext.use_target("sm_90a"):
        (row,) = jaxext.explain(jaxext.ragged_dot, *(struct(*x.shape, dtype=jnp.int8) for x in (X, W)), SIZES, platform="cuda").rows
    assert row.chosen == "xla" and row.refused["triton"].startswith("i8 and i8 into i8") or "integers" in row.refused["triton"]


SHAPES = {"DeepSeek-V3": (8192, 7168, 2048, 256), "Mixtral": (8192, 4096, 14336, 8), "gpt-oss": (8192, 2880, 2880, 128)}  # M, K, N, G
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
COMPILED = [
    *(("DeepSeek-V3", role, 90) for role in ("nn", "nt", "tn")),
    *(
        slow(name, role, arch)
        for name in SHAPES
        for role in ("nn", "nt", "tn")
        for arch in (80, 90, 100)
        if (name, arch) != ("DeepSeek-V3", 90)
    ),
]


EPILOGUES = {
    "bias and scale": Epilogue(activation="gelu", bias="bf16", scale="fp32", saves=True),
    "gate": Epilogue(activation="silu", gated=True, scale="fp32", saves=True),
}


@pytest.mark.parametrize("epilogue", EPILOGUES.values(), ids=EPILOGUES)
@pytest.mark.parametrize(
    ("name", "arch"), [("DeepSeek-V3", 90), *(slow(n, a) for n in SHAPES for a in (80, 90, 100) if (n, a) != ("DeepSeek-V3", 90))]
)
def test_compiled_epilogues(name, arch, epilogue, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    check_compiled(name, "nn", arch, epilogue)


@pytest.mark.parametrize(("name", "role", "arch"), COMPILED)
def test_compiled(name, role, arch, tmp_path, monkeypatch):
    """By the laws of all kernels: tensor cores, wide loads, and nothing spilled."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # jax-triton, which tests before may have imported, says that there is none
    check_compiled(name, role, arch)


def check_compiled(name, role, arch, epilogue=None):
    M, K, N, G = SHAPES[name]
    common = dict(B=1, P=1, R=1, M=M, K=K, N=N, G=G, dtypes=("bf16",) * 3, precision="tf32", arch=arch)
    problem = ragged.Problem(name=f"ragged_{role}", role=role, **common, epilogue=epilogue)
    row = compiled.compile_row(compiled.Program("ragged", name, "bf16", problem, ragged.candidates(problem)[0], True))
    assert not compiled.offences(row), row.get("error", row)
