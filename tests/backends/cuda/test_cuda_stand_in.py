"""The implementation `cuda` on a stand-in for the compiled module: where its kernels run, and with which arrays they are called.

Tests that need the module itself are in test_cuda_binding.py.
"""

import types

import jax
import jax.numpy as jnp
import pytest
from lowered import operations, struct

import jaxext
from jaxext.backends.cuda import cuda_binding

KERNEL = {"tile_m": 128, "tile_n": 128, "tile_k": 64, "cluster_m": 2, "pingpong": 0}
ROWS = [{"role": role, "operands": "bfloat16", "result": "bfloat16", **KERNEL} for role in ("nn", "nt", "tn")]


@pytest.fixture(autouse=True)
def module(monkeypatch):
    families = {f"{family}_refuses": lambda **asked: None for family in ("matmul", "conv", "depthwise")}
    module = types.SimpleNamespace(archs="80-real,90", cuda_version="12.9", matmul_kernels=lambda: ROWS, **families)
    monkeypatch.setattr(jaxext, "_cuda_module", module, raising=False)
    for name in ("missing", "register"):
        monkeypatch.setattr(cuda_binding, name, lambda: None)
    cuda_binding._matmul_kernels.cache_clear()
    yield module
    cuda_binding._matmul_kernels.cache_clear()


@pytest.mark.parametrize(
    ("archs", "arch", "runs"),
    [
        *(("80-real,90", arch, True) for arch in (80, 86, 90, 100, 120)),
        *(("90-real", arch, runs) for arch, runs in ((89, False), (90, True), (100, False))),
        *(("89-virtual", arch, runs) for arch, runs in ((86, False), (89, True), (90, True))),
    ],
)
def test_portable_kernels_run_where_they_were_compiled_for(module, archs, arch, runs):
    """And code on newer GPUs of its generation, PTX on all newer ones."""
    module.archs = archs
    want = None if runs else f"compiled for {archs}, compute capability is {arch / 10}"
    assert cuda_binding._not_compiled_for(arch) == want


def matmul(a, b):
    return jaxext.matmul(a, b, implementation="cuda")


def conv(x, w):
    groups = x.shape[-1] // w.shape[-2]
    numbers = ("NHWC", "HWIO", "NHWC")
    return jaxext.conv_general_dilated(x, w, (1, 1), "VALID", None, None, numbers, groups, implementation="cuda")


CALLS = {  # the function, its operands, and of each call the operands and the result
    "matmul": (matmul, (struct(128, 256), struct(256, 512)), {"nn": "abc", "nt": "bca", "tn": "acb"}),
    "conv2d": (conv, (struct(2, 8, 9, 16), struct(3, 2, 16, 24)), {"fprop": "xwy", "dgrad": "wyx", "wgrad": "xyw"}),
    "depthwise2d": (conv, (struct(2, 8, 9, 16), struct(3, 2, 1, 16)), {"fprop": "xwy", "dgrad": "wyx", "wgrad": "xyw"}),
}
SHAPES = {
    "matmul": {"a": (1, 128, 256), "b": (1, 256, 512), "c": (1, 128, 512)},
    "conv2d": {"x": (1, 2, 1, 8, 9, 1, 16), "w": (1, 1, 24, 1, 3, 2, 16), "y": (1, 2, 1, 6, 8, 1, 24)},
    "depthwise2d": {"x": (1, 2, 1, 8, 9, 16, 1), "w": (1, 16, 1, 1, 3, 2, 1), "y": (1, 2, 1, 6, 8, 16, 1)},
}


@pytest.mark.parametrize("form", CALLS)
def test_kernels_are_called_with_arrays_of_their_problem(form):
    function, operands, roles = CALLS[form]
    with jaxext.use_target("sm_90a"), jaxext.use_table(None):
        both = jax.jit(jax.value_and_grad(lambda *args: jnp.sum(function(*args).astype(jnp.float32) ** 2), (0, 1)))
        lowered = both.trace(*operands).lower(lowering_platforms=("cuda",))
    found, axes = {}, len(next(iter(SHAPES[form].values())))  # of results in parts, the last ones
    for op in operations(lowered):
        if op.name == "stablehlo.custom_call" and "jaxext" in (target := str(op.attributes["call_target_name"])):
            found[target.strip('"')] = [tuple(value.type.shape[-axes:]) for value in (*op.operands, op.result)]
    assert found == {f"jaxext_{form}_{role}_v1": [SHAPES[form][slot] for slot in slots] for role, slots in roles.items()}


ASKED = {  # of each form's first role, what the module is asked
    "matmul": ("matmul", dict(role="nn", B=1, M=128, N=512, K=256)),
    "conv2d": ("conv", dict(role="fprop", rank=2, B=1, N=2, G=1, C=16, K=24, input=(1, 8, 9), filter=(1, 3, 2), output=(1, 6, 8))),
    "depthwise2d": ("depthwise", dict(role="fprop", rank=2, B=1, N=2, G=16, C=1, K=1, input=(1, 8, 9), filter=(1, 3, 2), output=(1, 6, 8))),
}
WINDOW = dict(stride=(1, 1, 1), low=(0, 0, 0), input_dilation=(1, 1, 1), filter_dilation=(1, 1, 1))


@pytest.mark.parametrize("form", CALLS)
def test_what_the_module_refuses_is_refused(module, monkeypatch, form):
    """With its reason; it is asked of the family whose kernels would be called, in full."""
    function, operands, _ = CALLS[form]
    family, sizes = ASKED[form]
    asked = {}
    monkeypatch.setattr(module, f"{family}_refuses", lambda **fields: asked.update(fields) or "says the test")
    with jaxext.use_target("sm_90a"), jaxext.use_table(None):
        (row,) = jaxext.explain(function, *operands, platform="cuda").rows
    assert row.refused["cuda"] == "says the test"
    window = {} if form == "matmul" else WINDOW
    assert asked == sizes | window | {"dtypes": ("bf16",) * 3, "arch": 90}
