"""The implementation `cuda` without a GPU: what it refuses and why, when it is preferred, and the CUDA programs that it is lowered to.

Whether its hand-written kernels compute what they should is tested in test_simt.py, what its handlers refuse in test_cuda_calls.py, how
well the kernels are compiled in test_cuda_compiled.py.
"""

import functools
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from lowered import BLOCK, IMAGES, MESH, NHWC, conv, custom_calls, moved, resnet_block, struct

import jaxext
from jaxext import _target
from jaxext.backends.cuda import cuda_binding
from jaxext.backends.cuda.cuda_causal import CudaCausal
from jaxext.backends.cuda.cuda_convolutions import CudaConv
from jaxext.backends.cuda.cuda_gram import CudaGram
from jaxext.backends.cuda.cuda_matmul import CudaMatmul
from jaxext.backends.cuda.cuda_ragged import CudaRagged
from jaxext.backends.cuda.cuda_scaled import CudaScaled

FAMILIES = (CudaMatmul, CudaGram, CudaRagged, CudaScaled, CudaConv, CudaCausal)
CUSTOM_CALLS = [name for family in FAMILIES for name in family.custom_calls]
built = pytest.mark.skipif(cuda_binding.missing() is not None, reason=f"no CUDA kernels: {cuda_binding.missing()}")


@pytest.fixture
def named():
    with jaxext.use_implementation("cuda"):
        yield


def causal(x, w):
    return jaxext.conv_general_dilated(
        x, w, (1,), [(w.shape[0] - 1, 0)], dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=x.shape[-1]
    )


LONG = struct(2, 256, 64), struct(16, 1, 64)  # so many taps that a kernel is preferred


def squares(fun):
    """A loss, so that gradients of `fun` can be taken."""
    return lambda *args: jnp.sum(fun(*args).astype(jnp.float32) ** 2)


@built
@pytest.mark.usefixtures("named")
class TestPrograms:
    """Exactly the calls that one expects, and no copy of an activation beside them."""

    def test_matmul_in_every_role(self):
        a, b = struct(512, 256), struct(256, 128)
        lowered = jaxext.lower_for(jax.grad(squares(jaxext.matmul), (0, 1)), a, b, arch="sm_90a")
        assert custom_calls(lowered) == {f"jaxext_matmul_{role}_v1": 1 for role in ("nn", "nt", "tn")}
        assert moved(lowered, 1) == []

    def test_batched_matmul(self):
        a, b = struct(4, 512, 256), struct(4, 256, 128)
        lowered = jaxext.lower_for(jax.vmap(jaxext.matmul), a, b, arch="sm_90a")
        assert custom_calls(lowered) == {"jaxext_matmul_nn_v1": 1}
        assert "B = 4 : i64" in lowered.as_text()

    @pytest.mark.parametrize("result", [jnp.bfloat16, jnp.float32])
    def test_eight_bit_floats(self, result):
        """Where the contracted axis is the last of both operands."""
        x = struct(256, 512, dtype=jnp.float8_e4m3fn)
        dot = lambda a, b: jaxext.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=result)
        assert custom_calls(jaxext.lower_for(dot, x, x, arch="sm_90a")) == {"jaxext_matmul_nt_v1": 1}

    def test_parts_are_added_up_outside(self):
        """A long contracted axis and a small result: float32 partial results, and XLA's reduction of them."""
        lowered = jaxext.lower_for(jaxext.matmul, struct(16, 16384), struct(16384, 1024), arch="sm_90a")
        (call,) = [line for line in lowered.as_text().splitlines() if "jaxext_matmul_nn_v1" in line]
        splits = int(call.split("splits = ")[1].split(" ")[0])
        assert splits > 1 and f"-> tensor<{splits}x1x16x1024xf32>" in call
        assert "stablehlo.reduce" in lowered.as_text()

    def test_resnet_block(self):
        lowered = jaxext.lower_for(resnet_block, BLOCK, IMAGES, arch="sm_90a")
        assert custom_calls(lowered) == {"jaxext_conv2d_fprop_v1": 3}
        assert "conv2d_fprop/ffi_call" in lowered.as_text(debug_info=True)  # what profilers show for the operation
        assert moved(lowered, 8 * 8 * 8 * 32) == []

    @pytest.mark.parametrize("rank", [1, 2, 3])
    def test_convolutions_in_every_role(self, rank):
        def dense(x, w):
            dims = ("N" + "DHW"[3 - rank :] + "C", "DHW"[3 - rank :] + "IO", "N" + "DHW"[3 - rank :] + "C")
            return jaxext.conv_general_dilated(x, w, (1,) * rank, [(2, 1)] * rank, dimension_numbers=dims)

        x, w = struct(64, *(8,) * rank, 64), struct(*(3,) * rank, 64, 32)
        lowered = jaxext.lower_for(jax.grad(squares(dense), (0, 1)), x, w, arch="sm_90a")
        assert custom_calls(lowered) == {f"jaxext_conv{rank}d_{role}_v1": 1 for role in ("fprop", "dgrad", "wgrad")}
        assert moved(lowered, 64 * 8**rank * 64) == []

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
    @pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
    def test_depthwise_in_every_role(self, dtype, arch):
        x, w = struct(2, 256, 64, dtype=dtype), struct(4, 1, 64, dtype=dtype)
        lowered = jaxext.lower_for(jax.grad(squares(causal), (0, 1)), x, w, arch=arch)
        assert custom_calls(lowered) == {f"jaxext_depthwise1d_{role}_v1": 1 for role in ("fprop", "dgrad", "wgrad")}
        assert moved(lowered, 2 * 256 * 64) == []

    @pytest.mark.parametrize("outputs", [1, 4])
    @pytest.mark.parametrize("rank", [1, 2, 3])
    def test_depthwise_with_several_outputs_and_axes(self, rank, outputs):
        """Under vmap too, and in derivatives."""
        dims = ("N" + "DHW"[3 - rank :] + "C", "DHW"[3 - rank :] + "IO", "N" + "DHW"[3 - rank :] + "C")
        run = lambda x, w: jaxext.conv_general_dilated(x, w, (1,) * rank, "SAME", dimension_numbers=dims, feature_group_count=16)
        x, w = struct(2, 3, *(8,) * rank, 16), struct(*(5,) * rank, 1, 16 * outputs)
        gradients = jax.vmap(jax.grad(squares(run), (0, 1)), (0, None))
        lowered = jaxext.lower_for(gradients, x, w, arch="sm_90a")
        assert custom_calls(lowered) == {f"jaxext_depthwise{rank}d_{role}_v1": 1 for role in ("fprop", "dgrad", "wgrad")}

    def test_depthwise_of_images_for_each_example(self):
        depthwise = lambda w, x: conv(x, w, (2, 2), feature_group_count=16)
        each = jax.vmap(jax.grad(squares(depthwise)), (None, 0))
        lowered = jaxext.lower_for(each, struct(3, 3, 1, 16), struct(8, 1, 16, 16, 16), arch="sm_90a")
        assert custom_calls(lowered) == {"jaxext_depthwise2d_fprop_v1": 1, "jaxext_depthwise2d_wgrad_v1": 1}

    def test_forward_mode_and_second_order(self):
        x, w = struct(2, 64, 16), struct(3, 1, 16)
        hvp = lambda x, w: jax.jvp(jax.grad(squares(causal)), (x, w), (x, w))[1]
        calls = custom_calls(jaxext.lower_for(hvp, x, w, arch="sm_90a"))
        assert set(calls) == {"jaxext_depthwise1d_fprop_v1", "jaxext_depthwise1d_dgrad_v1"} and calls["jaxext_depthwise1d_fprop_v1"] >= 2

    def test_shard_map(self):
        """Each device's program calls the kernels on its part; the filter's gradient is added up."""
        stride_one = (struct(3, 3, 16, 32), struct(3, 3, 32, 32), struct(1, 1, 16, 32))
        split = jax.shard_map(jax.grad(squares(causal), 1), mesh=MESH, in_specs=(P("data"), P()), out_specs=P())
        lowered = jaxext.lower_for(split, struct(64, 256, 64), struct(4, 1, 64), arch="sm_90a")
        assert custom_calls(lowered) == {"jaxext_depthwise1d_fprop_v1": 1, "jaxext_depthwise1d_wgrad_v1": 1}
        assert "all_reduce" in lowered.as_text() and "N = 8 : i64" in lowered.as_text()
        split = jax.shard_map(resnet_block, mesh=MESH, in_specs=(P(), P("data")), out_specs=P("data"))
        lowered = jaxext.lower_for(split, stride_one, struct(64, 16, 16, 16), arch="sm_90a")
        assert custom_calls(lowered) == {"jaxext_conv2d_fprop_v1": 3}

    def test_export_and_serialize(self):
        with jaxext.use_target("sm_90a"):
            exported = export.export(jax.jit(causal), platforms=["cuda"], disabled_checks=jaxext.export_disabled_checks())(
                struct(2, 256, 64), struct(4, 1, 64)
            )
        again = export.deserialize(exported.serialize())
        assert again.platforms == ("cuda",)
        assert again.mlir_module() == exported.mlir_module()
        assert again.mlir_module().count("stablehlo.custom_call @jaxext_depthwise1d_fprop_v1") == 1

    def test_nothing_to_do_is_not_called(self):
        empty = jaxext.lower_for(jaxext.matmul, struct(64, 0), struct(0, 64), arch="sm_90a")
        assert custom_calls(empty) == {}


@built
def test_export_without_the_disabled_checks_names_the_custom_call():
    args = struct(2, 256, 64), struct(4, 1, 64)
    with jaxext.use_target("sm_90a"), jaxext.use_implementation("cuda"), pytest.raises(ValueError, match="jaxext_depthwise1d_fprop_v1"):
        export.export(jax.jit(causal), platforms=["cuda"])(*args)


@built
def test_a_sharded_export_takes_xla():
    """XLA's partitioner would gather what a kernel reads: unnamed it is not taken, named it is refused."""
    split = jax.jit(causal, in_shardings=(NamedSharding(MESH, P("data")), NamedSharding(MESH, P())))
    args = struct(64, 256, 64), struct(16, 1, 64)
    with jaxext.use_target("sm_90a"):
        assert "jaxext_" not in export.export(split, platforms=["cuda"])(*args).mlir_module()
        with jaxext.use_implementation("cuda"), pytest.raises(NotImplementedError, match="partitioner, which cannot split a kernel"):
            export.export(split, platforms=["cuda"])(*args)


def refusal(fun, *args, arch="sm_90a", platform="cuda"):
    with jaxext.use_target(arch), jaxext.use_implementation("cuda"):
        (row,) = jaxext.explain(fun, *args, platform=platform).rows
    assert row.chosen is None
    return row.refused["cuda"]


def of_conv(**kwargs):
    """A dense convolution with these arguments, and its operands."""
    strides, padding = kwargs.pop("strides", (1, 1)), kwargs.pop("padding", "SAME")
    return lambda x, w: jaxext.conv_general_dilated(x, w, strides, padding, dimension_numbers=NHWC, **kwargs)


X, W = struct(4, 16, 16, 32), struct(3, 3, 32, 32)
REFUSALS = {
    "platform": ((jaxext.matmul, struct(64, 64), struct(64, 64)), dict(platform="cpu"), "platform is 'cpu', want 'cuda'"),
    "no GPU": ((jaxext.matmul, struct(64, 64), struct(64, 64)), dict(arch=None), "not known for which GPU: there is none here"),
    "another GPU": ((jaxext.matmul, struct(64, 64), struct(64, 64)), dict(arch="sm_80"), "compute capability is 8.0, .*want 9.0"),
    "float32": (
        (jaxext.matmul, struct(64, 64, dtype=jnp.float32), struct(64, 64, dtype=jnp.float32)),
        {},
        "float32 is multiplied in pieces alone, want precision BF16_BF16_F32_X3 or BF16_BF16_F32_X6",
    ),
    "float64": ((jaxext.matmul, struct(64, 64, dtype=jnp.float64), struct(64, 64, dtype=jnp.float64)), {}, "a is float64, want one of"),
    "rows of no 16 bytes": (
        (jaxext.matmul, struct(64, 60), struct(60, 64)),
        {},
        "a row of the left operand has 120 bytes, TMA wants a multiple of 16",
    ),
    "fp8 with the contracted axis first": (
        (jaxext.matmul, struct(64, 64, dtype=jnp.float8_e4m3fn), struct(64, 64, dtype=jnp.float8_e4m3fn)),
        {},
        "the operands are fp8e4nv, nn takes bf16, fp16",
    ),
    "dilated input": ((of_conv(padding=[(1, 1), (1, 1)], lhs_dilation=(2, 2)), X, W), {}, "dilat"),
    "channels of no 16 bytes": ((of_conv(), struct(4, 16, 16, 3), struct(3, 3, 3, 32)), {}, "channels"),
    "depthwise with too many outputs": (
        (of_conv(feature_group_count=32), X, struct(1, 1, 1, 32 << 16)),
        {},
        "65536 outputs per group, it takes 1 to 65535",
    ),
    "depthwise, many taps": ((of_conv(feature_group_count=32), X, struct(3, 33, 1, 32)), {}, "33 taps"),
}


@built
@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case):
    args, kwargs, reason = REFUSALS[case]
    assert re.search(reason, refusal(*args, **kwargs)), refusal(*args, **kwargs)


@pytest.fixture
def looked_up_anew():
    """What was built is looked up anew, by this test and by those after it."""
    cuda_binding.missing.cache_clear()
    yield
    cuda_binding.missing.cache_clear()


@pytest.mark.usefixtures("looked_up_anew")
class TestMissing:
    """Without a module that fits, XLA computes, and `explain` says why."""

    ARGS = causal, struct(2, 256, 64), struct(4, 1, 64)

    def reason(self):
        with jaxext.use_target("sm_90a"):
            (row,) = jaxext.explain(*self.ARGS, platform="cuda").rows
        assert row.chosen in ("triton", "xla")
        with pytest.raises(RuntimeError, match="no CUDA kernels: "):
            cuda_binding.register.__wrapped__()
        return row.refused["cuda"]

    def test_built_without_cuda(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "jaxext._cuda_build", types.SimpleNamespace(REASON="no nvcc found"))
        assert self.reason() == "built without CUDA (no nvcc found)"

    def test_not_installed(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "jaxext._cuda_build", None)
        assert "want it installed: pip install ." in self.reason()

    def test_a_module_that_does_not_load(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "jaxext._cuda_build", types.SimpleNamespace(REASON=""))
        monkeypatch.setitem(sys.modules, "jaxext._cuda_module", None)
        monkeypatch.delattr(jaxext, "_cuda_module", raising=False)
        assert "the compiled module does not load: " in self.reason()

    def test_a_module_for_a_newer_ffi(self, monkeypatch):
        """Registered, it would make XLA refuse every program."""
        major, minor = cuda_binding._ffi_version()
        newer = types.SimpleNamespace(ffi_version=lambda: (major, minor + 1))
        monkeypatch.setitem(sys.modules, "jaxext._cuda_build", types.SimpleNamespace(REASON=""))
        monkeypatch.setitem(sys.modules, "jaxext._cuda_module", newer)
        monkeypatch.setattr(jaxext, "_cuda_module", newer, raising=False)
        assert f"built with headers of XLA's FFI {major}.{minor + 1}, this jaxlib runs {major}.{minor}" in self.reason()


@built
@pytest.mark.parametrize(
    ("of_driver", "reason"),
    [
        (None, None),
        (0, None),
        (13000, None),
        (13020, None),
        (14010, None),
        (12080, "compiled with CUDA 13.0.88, the driver is of CUDA 12.8"),
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
    monkeypatch.setattr(cuda_binding.ctypes, "CDLL", load)
    monkeypatch.setattr(cuda_binding, "_driver", cuda_binding._driver.__wrapped__)
    asked = functools.partial(jaxext.explain, causal, *LONG, platform="cuda")
    with jaxext.use_target("sm_90a"):
        assert asked().rows[0].chosen == "cuda"
    here = [types.SimpleNamespace(compute_capability="9.0", device_kind="NVIDIA H100")]
    monkeypatch.setattr(_target, "jax", types.SimpleNamespace(local_devices=lambda backend: here))
    (row,) = asked().rows
    assert (row.chosen == "cuda", row.refused.get("cuda")) == (reason is None, reason)


def test_the_version_of_the_ffi_is_known():
    major, minor = cuda_binding._ffi_version()
    assert (major, minor) >= (0, 3)


@built
@pytest.mark.parametrize("rank", [0, 1, 2, 3])
@pytest.mark.parametrize("implementation", ["cuda", None])
def test_every_call_has_a_handler(rank, implementation):
    """Depthwise convolutions of no axes were called by names that do not exist."""
    from jaxext import _cuda_module

    def depthwise(x, w):
        dims = ("N" + "DHW"[3 - rank :] + "C", "DHW"[3 - rank :] + "IO", "N" + "DHW"[3 - rank :] + "C")
        return jaxext.conv_general_dilated(x, w, (1,) * rank, "SAME", dimension_numbers=dims, feature_group_count=16)

    space, taps = (1, 8, 8)[3 - rank :], {0: (), 1: (16,), 2: (4, 4), 3: (1, 4, 4)}[rank]
    args = struct(2, *space, 16), struct(*taps, 1, 16)
    if implementation and not rank:
        assert "0 spatial axes, want 1 to 3" in refusal(depthwise, *args)
        return
    with jaxext.use_implementation(implementation):
        calls = {name for name in custom_calls(jaxext.lower_for(depthwise, *args, arch="sm_90a")) if name.startswith("jaxext")}
    assert calls <= set(_cuda_module.handlers()) and bool(calls) == (rank > 0)


@built
@pytest.mark.parametrize(
    ("archs", "arch", "runs"),
    [
        ("80-real,90", "sm_80", True),
        ("80-real,90", "sm_89", True),
        ("80-real,90", "sm_90a", True),
        ("80-real,90", "sm_100a", True),
        ("80-real", "sm_90a", False),
        ("90-real", "sm_80", False),
        ("86-real", "sm_80", False),
        ("80-virtual", "sm_120a", True),
    ],
)
def test_portable_kernels_run_where_they_were_compiled_for(monkeypatch, archs, arch, runs):
    from jaxext import _cuda_module

    monkeypatch.setattr(_cuda_module, "archs", archs)
    with jaxext.use_target(arch):
        (row,) = jaxext.explain(causal, *LONG, platform="cuda").rows
    assert (row.chosen == "cuda") == runs
    assert runs or f"compiled for {archs}, compute capability is" in row.refused["cuda"]


@built
def test_every_handler_may_be_exported():
    from jaxext import _cuda_module

    assert set(_cuda_module.handlers()) == set(CUSTOM_CALLS)
    allowed = [str(check) for check in jaxext.export_disabled_checks()]
    assert all(any(name in check for check in allowed) for name in CUSTOM_CALLS)


@built
def test_handlers_are_registered_once():
    jaxext.register_cuda_kernels()
    jaxext.register_cuda_kernels()


def test_named_and_refused_is_an_error_when_lowered():
    with pytest.raises(NotImplementedError, match="matmul_nn: implementation 'cuda' does not support this call: platform is 'cpu'"):
        jaxext.matmul(np.ones((2, 2), np.float32), np.ones((2, 2), np.float32), implementation="cuda")
