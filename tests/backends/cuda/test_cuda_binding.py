"""The implementation `cuda` without a GPU: what it refuses and why, when it is preferred, and the CUDA programs that it is lowered to.

Whether its hand-written kernels compute what they should is tested in test_simt.py, what its handlers refuse in test_cuda_calls.py, how
well the kernels are compiled in test_cuda_compiled.py.
"""

import functools
import itertools
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from lowered import BLOCK, IMAGES, MESH, channels_last, conv, custom_calls, moved, operations, resnet_block, squares, struct

import jaxext
from jaxext import _target
from jaxext.backends import native
from jaxext.backends.cuda import cuda_binding
from jaxext.backends.ffi_version import running_version
from jaxext.core.family import families

CUDA = [each for family in families.values() for each in family.implementations if each.name == "cuda"]
CUSTOM_CALLS = {name for each in CUDA for name in each.custom_calls}
built = pytest.mark.skipif(cuda_binding.missing() is not None, reason=f"no CUDA kernels: {cuda_binding.missing()}")


def causal(x, w):
    return jaxext.conv_general_dilated(
        x, w, (1,), [(w.shape[0] - 1, 0)], dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=x.shape[-1]
    )


LONG = struct(2, 256, 64), struct(16, 1, 64)  # so many taps that a kernel is preferred
SHORT = struct(2, 256, 64), struct(4, 1, 64)


def gradients(fun, slots=(0, 1)):
    return jax.grad(squares(fun), slots)


def convolution(padding, groups=1):
    """Return a convolution over all spatial axes of x, padded alike."""

    def run(x, w):
        axes = x.ndim - 2
        paddings = padding if padding == "SAME" else [padding] * axes
        return jaxext.conv_general_dilated(x, w, (1,) * axes, paddings, dimension_numbers=channels_last(axes), feature_group_count=groups)

    return run


def eight_bits(result):
    """A product whose contracted axis is the last of both operands."""
    return lambda a, b: jaxext.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=result)


def strided(filters, x):
    """The loss of a network with strides, which was refused in the backward pass."""
    stem, shortcut, crop, up = filters
    y = conv(jnp.tanh(conv(x, stem, (2, 2))), shortcut, (2, 2), "VALID", feature_group_count=2)
    return jnp.sum(conv(conv(y, crop, (3, 1), ((-1, 1), (0, -2)), rhs_dilation=(1, 2)), up), dtype=jnp.float32)


def programs() -> Iterator[Any]:
    """Functions, their operands, how often each kernel is called, and more: the GPU, the elements of an array that no operation moves, and
    parts of the text."""
    product, every = ("nn", "nt", "tn"), ("fprop", "dgrad", "wgrad")
    once = lambda form, *roles: {f"{form}_{role}": 1 for role in roles}
    split = functools.partial(jax.shard_map, mesh=MESH)
    yield "matmul", gradients(jaxext.matmul), [struct(512, 256), struct(256, 128)], once("matmul", *product), dict(unmoved=1)
    yield "batched", jax.vmap(jaxext.matmul), [struct(4, 512, 256), struct(4, 256, 128)], once("matmul", "nn"), dict(texts=["B = 4 : i64"])
    yield "nothing to do", jaxext.matmul, [struct(64, 0), struct(0, 64)], {}
    factors = [struct(256, 512, dtype=jnp.float8_e4m3fn)] * 2
    for dtype in (jnp.bfloat16, jnp.float32):
        yield f"eight bits {jnp.dtype(dtype).name}", eight_bits(dtype), factors, once("matmul", "nt")
    shown = ["conv2d_fprop/ffi_call"]  # what profilers show for the operation
    yield "resnet", resnet_block, [BLOCK, IMAGES], dict(conv2d_fprop=3), dict(unmoved=8 * 8 * 8 * 32, texts=shown)
    filters = [struct(3, 3, 8, 32), struct(1, 1, 16, 64), struct(2, 3, 64, 16), struct(3, 3, 16, 8)]
    yield "strides", jax.value_and_grad(strided, (0, 1)), [filters, struct(2, 64, 48, 8)], dict.fromkeys(once("conv2d", *every), 4)
    for rank in (1, 2, 3):
        x, w, dense = struct(64, *(8,) * rank, 64), struct(*(3,) * rank, 64, 32), convolution((2, 1))
        yield f"{rank}-D", gradients(dense), [x, w], once(f"conv{rank}d", *every), dict(unmoved=64 * 8**rank * 64)
        for outputs in (1, 4):  # under vmap too
            x, w = struct(2, 3, *(8,) * rank, 16), struct(*(5,) * rank, 1, 16 * outputs)
            mapped = jax.vmap(gradients(convolution("SAME", 16)), (0, None))
            yield f"depthwise {rank}-D, {outputs} outputs", mapped, [x, w], once(f"depthwise{rank}d", *every)
    for rank, taps in enumerate(((), (16,), (4, 4), (1, 4, 4))):  # those of no axes were called by names that do not exist
        x, w, calls = struct(2, *(1, 8, 8)[3 - rank :], 16), struct(*taps, 1, 16), once(f"depthwise{rank}d", "fprop") if rank else {}
        yield f"depthwise {rank}-D without a name", convolution("SAME", 16), [x, w], calls, dict(implementation=None)
    for arch, dtype in itertools.product(("sm_80", "sm_90a", "sm_100a"), (jnp.float32, jnp.bfloat16, jnp.float16)):
        operands, how = [struct(*each.shape, dtype=dtype) for each in SHORT], dict(unmoved=2 * 256 * 64, arch=arch)
        yield f"causal {arch} {jnp.dtype(dtype).name}", gradients(causal), operands, once("depthwise1d", *every), how
    each_example = jax.vmap(gradients(lambda w, x: conv(x, w, (2, 2), feature_group_count=16), 0), (None, 0))
    yield "depthwise for each example", each_example, [struct(3, 3, 1, 16), struct(8, 1, 16, 16, 16)], once("depthwise2d", "fprop", "wgrad")
    sharded = split(gradients(causal, 1), in_specs=(P("data"), P()), out_specs=P())  # the filter's gradient is added up
    x, w = struct(64, 256, 64), struct(4, 1, 64)
    yield "shard_map", sharded, [x, w], once("depthwise1d", "fprop", "wgrad"), dict(texts=["all_reduce", "N = 8 : i64"])
    sharded = split(resnet_block, in_specs=(P(), P("data")), out_specs=P("data"))
    yield "shard_map of resnet", sharded, [BLOCK, struct(64, 16, 16, 16)], dict(conv2d_fprop=3)
    # XLA fails when it captures a call that launches nothing into a CUDA graph; and a sum of nothing is zeros, which no kernel writes.
    for kind, x, w, padding in [
        ("no image", (0, 5, 5, 8), (3, 3, 8, 8), 1),
        ("no output", (2, 2, 5, 8), (3, 3, 8, 8), 0),
        ("no input", (2, 0, 5, 8), (3, 3, 8, 8), 2),
        ("no channel", (2, 5, 5, 0), (3, 3, 0, 8), 1),
        ("no tap", (2, 5, 5, 8), (0, 3, 8, 8), 1),
    ]:
        yield kind, jax.value_and_grad(squares(convolution((padding, padding))), (0, 1)), [struct(*x), struct(*w)], {}


PROGRAMS = {name: program for name, *program in programs()}


@built
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name):
    """A program has exactly the expected calls, which have handlers, and no copy of an activation beside them."""
    from jaxext import _cuda_module

    function, operands, calls, *more = PROGRAMS[name]
    how = dict(*more)
    with jaxext.use_implementation(how.get("implementation", "cuda")):
        lowered = jaxext.export.lower_for(function, arch=how.get("arch", "sm_90a"))(*operands)
    found = custom_calls(lowered)
    assert found == {f"jaxext_{target}_v1": count for target, count in calls.items()} and found.keys() <= _cuda_module.handlers().keys()
    assert "unmoved" not in how or moved(lowered, how["unmoved"]) == []
    assert not calls or not {"stablehlo.convolution", "stablehlo.dot_general"} & {op.name for op in operations(lowered)}
    text = lowered.as_text(debug_info=True)
    assert all(part in text for part in how.get("texts", []))


@built
def test_parts_are_added_up_outside():
    """A long contracted axis and a small result: float32 partial results, and XLA's reduction of them."""
    with jaxext.use_implementation("cuda"):
        lowered = jaxext.export.lower_for(jaxext.matmul, arch="sm_90a")(struct(16, 16384), struct(16384, 1024))
    (call,) = [line for line in lowered.as_text().splitlines() if "jaxext_matmul_nn_v1" in line]
    splits = int(call.split("splits = ")[1].split(" ")[0])
    assert splits > 1 and f"-> tensor<{splits}x1x16x1024xf32>" in call
    assert "stablehlo.reduce" in lowered.as_text()


@built
def test_forward_mode_and_second_order():
    hvp = lambda x, w: jax.jvp(gradients(causal, 0), (x, w), (x, w))[1]
    with jaxext.use_implementation("cuda"):
        calls = custom_calls(jaxext.export.lower_for(hvp, arch="sm_90a")(struct(2, 64, 16), struct(3, 1, 16)))
    assert set(calls) == {"jaxext_depthwise1d_fprop_v1", "jaxext_depthwise1d_dgrad_v1"} and calls["jaxext_depthwise1d_fprop_v1"] >= 2


@built
def test_export_and_serialize():
    """The error names the custom call unless its check is disabled."""
    with jaxext.use_target("sm_90a"), jaxext.use_implementation("cuda"):
        exported = export.export(jax.jit(causal), platforms=["cuda"], disabled_checks=jaxext.export.disabled_checks())(*SHORT)
        with pytest.raises(ValueError, match="jaxext_depthwise1d_fprop_v1"):
            export.export(jax.jit(causal), platforms=["cuda"])(*SHORT)
    again = export.deserialize(exported.serialize())
    assert again.platforms == ("cuda",)
    assert again.mlir_module() == exported.mlir_module()
    assert again.mlir_module().count("stablehlo.custom_call @jaxext_depthwise1d_fprop_v1") == 1


@built
def test_a_sharded_export_takes_xla():
    """XLA's partitioner would gather what a kernel reads: unnamed it is not taken, named it is refused."""
    split = jax.jit(causal, in_shardings=(NamedSharding(MESH, P("data")), NamedSharding(MESH, P())))
    args = struct(64, 256, 64), struct(16, 1, 64)
    with jaxext.use_target("sm_90a"):
        assert "jaxext_" not in export.export(split, platforms=["cuda"])(*args).mlir_module()
        with (
            jaxext.use_implementation("cuda"),
            pytest.raises(NotImplementedError, match="partitioner splits this program and cannot split a kernel"),
        ):
            export.export(split, platforms=["cuda"])(*args)


def refusal(fun, *args, arch="sm_90a", platform="cuda"):
    with jaxext.use_target(arch), jaxext.use_implementation("cuda"):
        (row,) = jaxext.explain(fun, platform=platform)(*args).rows
    assert row.chosen is None
    return row.refused["cuda"]


def grouped(x, w):
    return conv(x, w, feature_group_count=32)


def square(rows, columns, dtype=jnp.bfloat16):
    return jaxext.matmul, struct(rows, columns, dtype=dtype), struct(columns, rows, dtype=dtype)


X = struct(4, 16, 16, 32)
REFUSALS = {  # a function and its operands, where it is to run, and the reason
    "platform": (square(64, 64), dict(platform="cpu"), "platform is 'cpu', want 'cuda'"),
    "no GPU": (square(64, 64), dict(arch=None), "the target GPU is unknown: this machine has none"),
    "another GPU": (square(64, 64), dict(arch="sm_80"), "compute capability is 8.0, .*want 9.0"),
    "highest": (
        (functools.partial(jaxext.matmul, precision="highest"), *square(64, 64, jnp.float32)[1:]),
        {},
        "float32 is multiplied as TF32 or in pieces alone",
    ),
    "float64": (square(64, 64, jnp.float64), {}, "a is float64, want one of"),
    "rows of no 16 bytes": (square(64, 60), {}, "a row of the left operand has 120 bytes, TMA wants a multiple of 16"),
    "fp8 with the contracted axis first": (square(64, 64, jnp.float8_e4m3fn), {}, "the operands are fp8e4nv, nn takes bf16, fp16"),
    "dilated input": ((functools.partial(conv, padding=[(1, 1), (1, 1)], lhs_dilation=(2, 2)), X, struct(3, 3, 32, 32)), {}, "dilat"),
    "channels of no 16 bytes": ((conv, struct(4, 16, 16, 3), struct(3, 3, 3, 32)), {}, "channels"),
    "depthwise, many outputs": ((grouped, X, struct(1, 1, 1, 32 << 16)), {}, "65536 outputs per group, it takes 1 to 65535"),
    "depthwise, many taps": ((grouped, X, struct(3, 33, 1, 32)), {}, "33 taps"),
    "no axes": ((convolution("SAME", 16), struct(2, 16), struct(1, 16)), {}, "0 spatial axes, want 1 to 3"),
}


@built
@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case):
    args, kwargs, reason = REFUSALS[case]
    assert re.search(reason, refusal(*args, **kwargs)), refusal(*args, **kwargs)


@pytest.fixture
def looked_up_anew():
    """Look up the build anew, in this test and in those after it."""
    cuda_binding.missing.cache_clear()
    yield
    cuda_binding.missing.cache_clear()


MAJOR, MINOR = running_version()
NEWER = types.SimpleNamespace(ffi_version=lambda: (MAJOR, MINOR + 1))  # registered, it would make XLA refuse every program
BUILT = types.SimpleNamespace(REASON="")
MISSING = {  # how the module was built, the module, and the reason
    "built without CUDA": (types.SimpleNamespace(REASON="no nvcc found"), None, r"built without CUDA \(no nvcc found\)"),
    "not installed": (None, None, r".*install it: pip install \..*"),
    "a module that does not load": (BUILT, None, ".*the compiled module does not load: .*"),
    "a newer FFI": (BUILT, NEWER, rf".*headers of XLA's FFI {MAJOR}\.{MINOR + 1}, this jaxlib runs {MAJOR}\.{MINOR}.*"),
}


@pytest.mark.usefixtures("looked_up_anew")
@pytest.mark.parametrize("case", MISSING)
def test_no_module_that_fits(case, monkeypatch):
    """XLA computes, and `explain` says why."""
    build, module, reason = MISSING[case]
    monkeypatch.setitem(sys.modules, "jaxext._cuda_build", build)
    monkeypatch.setitem(sys.modules, "jaxext._cuda_module", module)
    monkeypatch.delattr(jaxext, "_cuda_module", raising=False)
    with jaxext.use_target("sm_90a"):
        (row,) = jaxext.explain(causal, platform="cuda")(*SHORT).rows
    assert row.chosen in ("triton", "xla") and re.fullmatch(reason, row.refused["cuda"])
    with pytest.raises(RuntimeError, match="no CUDA kernels: "):
        cuda_binding.register.__wrapped__()


@built
@pytest.mark.parametrize(
    ("of_driver", "reason"),
    [
        *((version, None) for version in (None, 0, 13000, 13020, 14010)),
        (12080, "compiled with CUDA 13.0.88, the driver is of CUDA 12.8, want 13 or newer"),
    ],
)
def test_a_driver_older_than_the_compiler(monkeypatch, of_driver, reason):
    """Unnamed, the kernels would be taken, and every launch fail: "CUDA driver version is insufficient for CUDA runtime version".  What is
    for the GPU of another machine is none of this driver's business."""
    from jaxext import _cuda_module

    def load(name):
        if of_driver is None:
            raise OSError(f"{name}: cannot open shared object file")
        return types.SimpleNamespace(cuDriverGetVersion=lambda version: setattr(version._obj, "value", of_driver))

    monkeypatch.setattr(_cuda_module, "cuda_version", "13.0.88")
    monkeypatch.setattr(native.ctypes, "CDLL", load)
    monkeypatch.setattr(native, "driver", native.driver.__wrapped__)
    asked = jaxext.explain(causal, platform="cuda")
    with jaxext.use_target("sm_90a"):
        assert asked(*LONG).rows[0].chosen == "cuda"
    here = [types.SimpleNamespace(compute_capability="9.0", device_kind="NVIDIA H100")]
    monkeypatch.setattr(_target, "jax", types.SimpleNamespace(local_devices=lambda backend: here))
    (row,) = asked(*LONG).rows
    assert (row.chosen == "cuda", row.refused.get("cuda")) == (reason is None, reason)


def test_the_version_of_the_ffi_is_known():
    major, minor = running_version()
    assert (major, minor) >= (0, 3)


@built
def test_every_handler_may_be_exported():
    from jaxext import _cuda_module

    assert set(_cuda_module.handlers()) == CUSTOM_CALLS
    allowed = [str(check) for check in jaxext.export.disabled_checks()]
    assert all(any(name in check for check in allowed) for name in CUSTOM_CALLS)


@built
def test_handlers_are_registered_once():
    jaxext.export.register_cuda_kernels()
    jaxext.export.register_cuda_kernels()


def test_named_and_refused_is_an_error_when_lowered():
    with pytest.raises(NotImplementedError, match="matmul_nn: implementation 'cuda' does not support this call: platform is 'cpu'"):
        jaxext.matmul(np.ones((2, 2), np.float32), np.ones((2, 2), np.float32), implementation="cuda")
