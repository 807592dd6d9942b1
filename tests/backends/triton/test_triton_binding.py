"""The implementation `triton` without a GPU: what it refuses and why, when it is preferred, and the CUDA programs that it is lowered to.

Whether its kernels compute what they should is tested in tests/kernels, how well they are compiled in test_kernels_compiled.py.
"""

import collections
import contextlib
import functools
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from lowered import BLOCK, IMAGES, MESH, conv, loss, moved, resnet_block, struct

import jaxext
from jaxext import _target
from jaxext.backends.cuda import cuda_binding
from jaxext.backends.fields import matmul_problem
from jaxext.backends.triton import assembler, triton_binding
from jaxext.ops.matmul import triton as triton_matmul

pytest.importorskip("triton")
pytest.importorskip("jax_triton", exc_type=ImportError)


WITH_24 = struct(2, 16, 16, 24), struct(7, 7, 1, 24)  # an image and a depthwise filter
TAPS = struct(7, 7, 1, 16)  # of a depthwise convolution: so many that a kernel is preferred


def calls(lowered) -> list[tuple]:
    """Each call of a kernel, and its description: the PTX is in it."""
    return list(assembler.calls(lowered))


def kernels(lowered) -> collections.Counter:
    """Count the calls of each kernel, by the name that it has in the compiled code."""
    return collections.Counter(kernel_name(description) for _, description in calls(lowered))


def kernel_name(description: bytes) -> str:
    """The entry point of the PTX."""
    (name,) = set(re.findall(rb"\.visible \.entry (\w+)\(", description))
    return name.decode()


@pytest.fixture(autouse=True)
def without_cuda_kernels(monkeypatch):
    """Leave out the CUDA kernels: test_cuda_binding.py tests the choice between both."""
    monkeypatch.setattr(cuda_binding, "missing", lambda: "they are left out")


@pytest.fixture
def named():
    with jaxext.use_implementation("triton"):
        yield


def mlp(params, x):
    for w in params[:-1]:
        x = jax.nn.relu(jaxext.matmul(x, w))
    return jnp.sum(jaxext.matmul(x, params[-1]).astype(jnp.float32) ** 2)


def causal(w, x):
    y = jaxext.conv_general_dilated(x, w, (1,), [(3, 0)], dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=64)
    return jnp.sum(y.astype(jnp.float32) ** 2)


def several(count, tree):
    return jax.tree.map(lambda s: struct(count, *s.shape), tree)


def of_convs(fprop, dgrad, wgrad, rank=2):
    return {f"conv{rank}d_fprop": fprop, f"conv{rank}d_dgrad": dgrad, f"conv{rank}d_wgrad": wgrad}


ACTIVATION = 8 * 8 * 8 * 32  # elements of one
LAYERS, FEATURES = [struct(784, 256), struct(256, 256), struct(256, 16)], struct(512, 784)
OF_LAYERS = {"matmul_nn": 3, "matmul_nt": 2, "matmul_tn": 3}
# function, arguments, its kernels, the number of elements from which on nothing is moved
PROGRAMS = {
    "resnet block": (resnet_block, (BLOCK, IMAGES), {"conv2d_fprop": 3}, ACTIVATION),
    "its gradients": (jax.grad(loss, (0, 1)), (BLOCK, IMAGES), of_convs(3, 3, 3), ACTIVATION),
    "its gradient for each example": (
        jax.vmap(jax.grad(loss), (None, 0)),
        (BLOCK, struct(8, 1, 16, 16, 16)),
        of_convs(3, 1, 3),
        ACTIVATION,
    ),
    "an ensemble": (jax.vmap(resnet_block, (0, None)), (several(4, BLOCK), IMAGES), {"conv2d_fprop": 3}, ACTIVATION),
    "an ensemble with an input for each": (jax.vmap(resnet_block), several(4, (BLOCK, IMAGES)), {"conv2d_fprop": 3}, ACTIVATION),
    "its gradients for each": (jax.vmap(jax.grad(loss, (0, 1))), several(4, (BLOCK, IMAGES)), of_convs(3, 3, 3), ACTIVATION),
    "mlp": (jax.grad(mlp), (LAYERS, FEATURES), OF_LAYERS, 1),
    "two mlps": (jax.vmap(jax.grad(mlp)), several(2, (LAYERS, FEATURES)), OF_LAYERS, 1),
    "depthwise": (jax.grad(causal, (0, 1)), (struct(4, 1, 64), struct(2, 256, 64)), of_convs(1, 1, 1, rank=1), 2 * 256 * 64),
}


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("named")
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name):
    """A program has exactly the expected kernels, and no copy of an activation beside them.

    Of a vmap of the block its filters alone are moved, HWIO into the kernels' KHWI or back.  With one input for all, an ensemble's members
    stand beside the channels after the first layer and in front from the next on: that is the one move of activations, once for each
    layer that sees the input.
    """
    fun, args, wanted, elements = PROGRAMS[name]
    lowered = jaxext.export.lower_for(fun, arch="sm_80" if "mlp" in name else "sm_90a")(*args)
    assert kernels(lowered) == wanted
    mapped = "each" in name or "ensemble" in name
    found = [text.split(" : ")[-1] for text in moved(lowered, elements) if not (mapped and "3x3x" in text)]
    assert found == (["(tensor<8x8x8x4x32xbf16>) -> tensor<4x8x8x8x32xbf16>"] * 2 if name == "an ensemble" else [])
    if name == "resnet block":
        assert "conv2d_fprop/triton_kernel_call" in lowered.as_text(debug_info=True)  # what profilers show for the operation


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("named")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_architectures(arch):
    def three(a, b, x, w, v):
        return jaxext.matmul(a, b), conv(x, w), conv(x, v, feature_group_count=32)

    args = struct(64, 64), struct(64, 64), struct(2, 8, 8, 32), struct(3, 3, 32, 32), struct(3, 3, 1, 32)
    assert kernels(jaxext.export.lower_for(three, arch=arch)(*args)) == {"matmul_nn": 1, "conv2d_fprop": 2}


@pytest.mark.usefixtures("named")
def test_export_and_serialize():
    """A program of kernels leaves the machine, and is the same when it comes back."""
    with jaxext.use_target("sm_90a"):
        exported = export.export(jax.jit(resnet_block), platforms=["cuda"], disabled_checks=jaxext.export.disabled_checks())(BLOCK, IMAGES)
    again = export.deserialize(exported.serialize())
    assert again.platforms == ("cuda",)
    assert again.mlir_module() == exported.mlir_module()
    assert again.mlir_module().count("stablehlo.custom_call @triton_kernel_call") == 3


@pytest.mark.usefixtures("named")
def test_shard_map():
    """Each device's program calls the kernels on its part; the filter's gradient is added up."""
    split = jax.shard_map(jax.grad(loss), mesh=MESH, in_specs=(P(), P("data")), out_specs=P())
    lowered = jaxext.export.lower_for(split, arch="sm_90a")(BLOCK, struct(64, 16, 16, 16))
    assert kernels(lowered) == {"conv2d_fprop": 3, "conv2d_dgrad": 1, "conv2d_wgrad": 3}
    assert "all_reduce" in lowered.as_text() and "tensor<8x16x16x16xbf16>" in lowered.as_text()


def test_a_sharded_export_takes_xla():
    """XLA's partitioner would gather what a kernel reads: unnamed it is not taken, named it is refused."""
    depthwise = lambda x, w: conv(x, w, feature_group_count=16)
    split = jax.jit(depthwise, in_shardings=(NamedSharding(MESH, P("data")), NamedSharding(MESH, P())))
    with jaxext.use_target("sm_90a"):
        exported = export.export(split, platforms=["cuda"])(IMAGES, TAPS)
        assert "triton_kernel_call" not in exported.mlir_module()
        with (
            jaxext.use_implementation("triton"),
            pytest.raises(NotImplementedError, match="partitioner splits this program and cannot split a kernel"),
        ):
            export.export(split, platforms=["cuda"])(IMAGES, TAPS)


def test_export_without_the_disabled_checks_names_the_custom_call():
    with jaxext.use_target("sm_90a"), jaxext.use_implementation("triton"), pytest.raises(ValueError, match="triton_kernel_call"):
        export.export(jax.jit(resnet_block), platforms=["cuda"])(BLOCK, IMAGES)


REFUSALS = {
    "platform": (dict(platform="cpu"), "platform is 'cpu', want 'cuda'"),
    "no GPU": (dict(platform="cuda"), "the target GPU is unknown: this machine has none"),
    "old GPU": (dict(arch="sm_75"), "compute capability is 7.5, want one of [8.0, "),
    "float64": (dict(arch="sm_90a", dtype=jnp.float64), "a is float64, want one of"),
    "complex": (dict(arch="sm_90a", dtype=jnp.complex64), "a is complex64, want one of"),
    "fp8": (dict(arch="sm_80", dtype=jnp.float8_e4m3fn, preferred_element_type=jnp.float32), "8.9"),
}


def refusal(arch=None, platform="cuda", dtype: jax.typing.DTypeLike = jnp.float32, **kwargs):
    with jaxext.use_target(arch), jaxext.use_implementation("triton"):
        x = struct(32, 32, dtype=dtype)
        (row,) = jaxext.explain(lambda x: jaxext.matmul(x, x, **kwargs), platform=platform)(x).rows
    assert row.chosen is None
    return row.refused["triton"]


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case):
    given, reason = REFUSALS[case]
    assert reason in refusal(**given)


@pytest.fixture
def installed_afresh():
    """Look up the installed packages anew, in this test and in those after it."""
    caches = triton_binding.missing, triton_binding._keywords, triton_binding._jax_triton
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.usefixtures("installed_afresh")
@pytest.mark.parametrize(
    ("package", "found", "reason"),
    [
        ("triton", None, "triton is not installed, want 3.6 or newer: pip install 'jaxext[triton]'"),
        ("jax-triton", None, "jax-triton is not installed"),
        ("triton", "3.5.1", "triton 3.5.1 is installed, want 3.6 or newer"),
        ("jax-triton", "0.2.0", "jax-triton 0.2.0 is installed, want 0.3.1 or newer"),
    ],
)
def test_refused_installations(monkeypatch, package, found, reason):
    version = importlib.metadata.version

    def installed(name):
        if name == package and found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found if name == package else version(name)

    monkeypatch.setattr(importlib.metadata, "version", installed)
    assert reason in refusal(arch="sm_90a")


@pytest.mark.usefixtures("installed_afresh")
def test_an_installation_that_does_not_import(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    found = refusal(arch="sm_90a")
    assert f"triton {importlib.metadata.version('triton')} is installed, want 3.6 or newer" in found and "want 0.3.1 or newer" in found


@pytest.mark.usefixtures("installed_afresh")
def test_without_the_plugin_of_jax(monkeypatch):
    """jax-triton imports without it from 0.4.1 on."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name.startswith("jax_cuda") else find(name))
    assert f"pip install --no-deps jax-cuda13-plugin=={importlib.metadata.version('jaxlib')}" in refusal(arch="sm_90a")


@pytest.mark.usefixtures("installed_afresh")
def test_a_jax_triton_with_another_interface(monkeypatch):
    """Its version is new enough and it imports; whatever nobody named must lower all the same."""
    monkeypatch.setattr(triton_binding, "_jax_triton", lambda: types.SimpleNamespace(triton_call=lambda *args, **kwargs: None))
    assert "has another triton_call, or another compiler, than 0.3.1 and 0.4" in refusal(arch="sm_90a")
    assert chosen(lambda x, w: conv(x, w, feature_group_count=16), IMAGES, TAPS) == [("conv2d_fprop", "xla")]


@pytest.fixture
def without_ptxas(monkeypatch, tmp_path):
    """A machine with an H100 and no ptxas; returns a folder, the working directory."""
    gpus_here(monkeypatch, "9.0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).startswith("/usr/local/cuda") and access(path, mode))
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: types.SimpleNamespace(origin=str(tmp_path / "site" / name / "__init__.py"))
    )
    return tmp_path


def test_a_gpu_of_this_machine_needs_ptxas(without_ptxas):
    """It is run at the first launch, where it ended the user's program."""
    assert "ptxas is missing, which jaxlib runs at a kernel's first launch" in refusal()


@pytest.mark.parametrize("place", ["bin", "path", "cuda/bin", "site/nvidia/cu13/bin", "site/nvidia/cuda_nvcc/bin"])
def test_ptxas_is_found_where_jaxlib_looks(place, without_ptxas):
    (without_ptxas / place).mkdir(parents=True)
    (without_ptxas / place / "ptxas").touch(mode=0o755)
    assert assembler.find() == str(without_ptxas / place / "ptxas")
    (row,) = jaxext.explain(functools.partial(jaxext.matmul, implementation="triton"), platform="cuda")(*[struct(64, 64)] * 2).rows
    assert row.chosen == "triton"


def test_other_machines_need_ptxas_but_not_this_one(without_ptxas):
    square = jax.jit(lambda x: jaxext.matmul(x, x, implementation="triton"))
    assert kernels(jaxext.export.lower_for(square, arch="sm_90a")(struct(64, 64))) == {"matmul_nn": 1}


def test_symbolic_sizes_are_left_to_xla():
    """Kernels are compiled for the sizes: with a symbolic batch an unnamed program raised TracerBoolConversionError."""
    (batch,) = export.symbolic_shape("b")
    args = struct(batch, 16, 16, 16), TAPS
    depthwise = lambda x, w: conv(x, w, feature_group_count=16)
    with jaxext.use_target("sm_90a"):
        assert "triton_kernel_call" not in export.export(jax.jit(depthwise), platforms=["cuda"])(*args).mlir_module()
        with jaxext.use_implementation("triton"), pytest.raises(NotImplementedError, match="the size of N is symbolic, want a number"):
            export.export(jax.jit(depthwise), platforms=["cuda"])(*args)


def test_an_export_holds_kernels_only_if_they_are_named():
    """jax refuses to serialise custom calls that it was not told to allow, so an export without names stays what it was."""
    depthwise = lambda x, w: conv(x, w, feature_group_count=16)
    with jaxext.use_target("sm_90a"):
        exported = export.export(jax.jit(depthwise), platforms=["cuda"])(IMAGES, TAPS)
    assert "triton_kernel_call" not in exported.mlir_module()


def test_named_and_refused_is_an_error_when_lowered():
    with pytest.raises(NotImplementedError, match="matmul_nn: implementation 'triton' does not support this call: platform is 'cpu'"):
        jaxext.matmul(np.ones((2, 2), np.float32), np.ones((2, 2), np.float32), implementation="triton")


def test_several_platforms_in_one_program_take_xla():
    """One program for CPUs and GPUs: nobody says for which GPU, so nothing is compiled for one."""
    depthwise = lambda x, w: conv(x, w, feature_group_count=16)
    with jaxext.use_target("sm_90a"):
        exported = export.export(jax.jit(depthwise), platforms=["cpu", "cuda"])(IMAGES, TAPS)
        assert chosen(depthwise, IMAGES, TAPS) == [("conv2d_fprop", "triton")]  # as it would be for a GPU alone
    assert "triton_kernel_call" not in exported.mlir_module()


def broken(*args, **kwargs):
    raise RuntimeError("PassManager::run failed\n at line 3")


def test_an_unnamed_kernel_that_cannot_be_compiled_gives_way(monkeypatch):
    """One warning names it and the reason.  A named one is an error."""
    monkeypatch.setattr("jax_triton.triton_lib.compile_ttir_inplace", broken)
    lower = lambda **named: jaxext.export.lower_for(lambda x, w: conv(x, w, feature_group_count=24, **named), arch="sm_90a")(*WITH_24)
    with pytest.warns(UserWarning, match="conv2d_fprop: the triton kernel depthwise cannot be compiled here") as told:
        assert not kernels(lower())
    assert len(told) == 1 and "another implementation is used: RuntimeError: PassManager::run failed at line 3" in str(told[0].message)
    with pytest.raises(RuntimeError, match="PassManager::run failed"):
        lower(implementation="triton")


def test_an_unnamed_kernel_that_cannot_be_assembled_gives_way(monkeypatch, tmp_path):
    """jaxlib would run the assembler at the first launch, where its error ends the program."""
    gpus_here(monkeypatch, "9.0")
    assembled = []
    for status in (0, 1):
        ptxas = tmp_path / f"ptxas-{status}"
        ptxas.write_text(f'#!/bin/bash\ngrep -o "entry [a-z0-9_]*" "$2" >>{tmp_path}/told; echo "Unsupported .version"; exit {status}\n')
        ptxas.chmod(0o755)
        monkeypatch.setattr(assembler, "find", functools.partial(str, ptxas))
        monkeypatch.setattr("jaxext.backends.kernel._failures", {})
        program = jax.jit(lambda x, w: conv(x, w, feature_group_count=24)).trace(*WITH_24)
        with pytest.warns(UserWarning, match="cannot be compiled here.*Unsupported .version") if status else contextlib.nullcontext():
            assembled.append(bool(kernels(program.lower(lowering_platforms=("cuda",)))))
    assert assembled == [True, False] and (tmp_path / "told").read_text().split() == ["entry", "conv2d_fprop"] * 2


def test_devices_that_share_a_product_do_without_such_a_kernel_too(monkeypatch):
    monkeypatch.setattr("jax_triton.triton_lib.compile_ttir_inplace", broken)
    x = jax.ShapeDtypeStruct((16, 16, 16, 24), jnp.bfloat16, sharding=NamedSharding(MESH, P("data")))
    fun = jax.shard_map(lambda x, w: conv(x, w, feature_group_count=24), mesh=MESH, in_specs=(P("data"), P()), out_specs=P("data"))
    with pytest.warns(UserWarning, match="the triton kernel depthwise cannot be compiled here"):
        assert not kernels(jaxext.export.lower_for(fun, arch="sm_90a")(x, WITH_24[1]))


def test_importing_jax_triton_leaves_the_environment(tmp_path):
    """It sets, or deletes, TRITON_CACHE_DIR, after which Triton could not find its cache."""
    script = """if True:
        import os, sys, jax, jaxext, jax.numpy as jnp
        from jaxext.backends.triton import triton_binding
        x = jax.ShapeDtypeStruct((16, 16), jnp.float16)
        for cache in ({}, {"TRITON_CACHE_DIR": sys.argv[1]}):
            os.environ.update(cache)
            for name in [name for name in sys.modules if name.startswith("jax_triton")]:
                del sys.modules[name]
            triton_binding._jax_triton.cache_clear()
            before = dict(os.environ)
            jaxext.export.lower_for(lambda a: jaxext.matmul(a, a, implementation="triton"), arch="sm_80")(x)
            assert dict(os.environ) == before and "jax_triton" in sys.modules, set(os.environ.items()) ^ set(before.items())"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_CACHE_DIR"}
    subprocess.run([sys.executable, "-c", script, tmp_path], check=True, env=environment)


def chosen(fun, *args):
    with jaxext.use_target("sm_90a"):
        return [(row.op, row.chosen) for row in jaxext.explain(fun, platform="cuda")(*args).rows]


@pytest.mark.parametrize("arch", ["sm_9x", "", 90, "h100x", "rtx", "sm_91", "sm_900", "sm_12"])
def test_targets_that_are_none(arch):
    with pytest.raises(ValueError, match=re.escape(f'arch is {arch!r}, want one of "sm_90a" (H100, H200), "sm_80" (A100), ')):
        jaxext.use_target(arch)


@pytest.mark.parametrize(
    ("arch", "want"),
    [("90", "sm_90a"), ("sm90", "sm_90a"), ("H100", "sm_90a"), ("nvidia-rtx-4090", "sm_89"), ("8.0", "sm_80"), ("sm_80a", "sm_80")],
)
def test_targets_that_are_named_otherwise(arch, want):
    with pytest.raises(ValueError, match=rf'arch is .*, want "{want}" \([^()]*\)$'):
        jaxext.use_target(arch)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_90a", "sm_100f", "sm_103", "sm_120", None])
def test_targets(arch):
    with jaxext.use_target(arch):
        assert _target.compute_capability("cuda") == (arch and int(arch.strip("sm_af")))


def test_the_target_is_what_the_gpus_of_this_machine_are(monkeypatch):
    """A named target takes precedence."""
    gpus_here(monkeypatch, "12.0", "12.0")
    assert _target.compute_capability("cuda") == 120
    assert _target.compute_capability("cpu") is None
    with jaxext.use_target("sm_90a"):
        assert _target.compute_capability("cuda") == 90


def test_models_know_the_gpus_of_this_machine_by_name(monkeypatch):
    """The name is empty if a target is named, or if the GPUs have several names."""
    devices = gpus_here(monkeypatch, "9.0", "9.0")
    devices[0].device_kind = devices[1].device_kind = "NVIDIA H200"
    assert _target.device_kind("cuda") == "NVIDIA H200" and _target.device_kind("cpu") == ""
    plans = []
    monkeypatch.setattr(triton_matmul, "matmul_problem", lambda *args: plans.append(matmul_problem(*args)) or plans[-1])
    jaxext.explain(functools.partial(jaxext.matmul, implementation="triton"), platform="cuda")(struct(64, 64), struct(64, 64))
    assert {plan.device for plan in plans} == {"NVIDIA H200"}
    with jaxext.use_target("sm_90a"):
        assert _target.device_kind("cuda") == ""
    devices[0].device_kind = "NVIDIA H100"
    assert _target.device_kind("cuda") == ""


def test_gpus_of_several_kinds_have_no_target(monkeypatch):
    """The first one decided, and what was compiled for it did not load on the others."""
    gpus_here(monkeypatch, "9.0", "8.0")
    matmul = functools.partial(jaxext.matmul, implementation="triton")
    (row,) = jaxext.explain(matmul, platform="cuda")(struct(64, 64), struct(64, 64)).rows
    assert row.chosen is None and "GPUs of several compute capabilities (see jaxext.use_target)" in row.refused["triton"]
    with jaxext.use_target("sm_80"):
        (row,) = jaxext.explain(matmul, platform="cuda")(struct(64, 64), struct(64, 64)).rows
    assert row.chosen == "triton"


def gpus_here(monkeypatch, *capabilities):
    devices = [types.SimpleNamespace(compute_capability=capability, device_kind="a GPU") for capability in capabilities]
    monkeypatch.setattr(_target, "jax", types.SimpleNamespace(local_devices=lambda backend: devices))
    return devices


def test_the_target_is_part_of_jits_key():
    f = jax.jit(lambda a: jaxext.matmul(a, a, implementation="triton"))
    x = struct(64, 64)
    first, second, again = (jaxext.export.lower_for(f, arch=arch)(x).as_text() for arch in ("sm_80", "sm_90a", "sm_80"))
    assert first == again != second
