"""The implementation `triton`: the kernels of `jaxext.kernels` on CUDA GPUs, through jax-triton, and on CPUs, interpreted.

A `Call` becomes a kernel's `Problem`, its `pick` the `Config`, its `launch` the call.  jax-triton and Triton are optional and are imported
by the first program that is lowered for CUDA.  Where TRITON_INTERPRET=1 was set before Triton was imported, which is Triton's own
switch, the kernels run on CPUs in Triton's interpreter, if they are named.  It must not know forms or public operations.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import inspect
import os
import re
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxext._implementation import Call
from jaxext.kernels._geometry import ConvProblem
from jaxext.kernels._launch import SHARED_MEMORY

_WANTED = {"triton": (3, 6), "jax-triton": (0, 3, 1)}
_INTERPRETED_CAPABILITY = 90

# Triton's names of the dtypes that kernels take.
_DTYPES = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
    "int32": "i32",
    "int8": "i8",
}

# How float32 operands are multiplied, by the precision that the user asked for; XLA's GPU defaults, TF32, hold for DEFAULT and HIGH.
_PRESETS = {
    "DEFAULT": "tf32",
    "TF32_TF32_F32": "tf32",
    "TF32_TF32_F32_X3": "tf32x3",
    "BF16_BF16_F32_X3": "bf16x3",
    "BF16_BF16_F32_X6": "bf16x6",
    "F32_F32_F32": "ieee",
}


class _Triton:
    """What the two families share: `_problem` makes a kernel's problem of a call, or the reason why it cannot."""

    name = "triton"

    def _problem(self, call: Call) -> tuple[ModuleType, Any] | str:
        raise NotImplementedError

    def supports(self, call: Call) -> str | None:
        reason = _unavailable(call)
        if reason is None:
            problem = self._problem(call)
            reason = problem if isinstance(problem, str) else problem[0].supports(problem[1])
        return reason

    def gains(self, call: Call) -> str | None:
        if call.platform == "cpu":
            return "the interpreter is slow: it is taken only if it is named"
        if call.splitter == "later":
            return "an exported program holds kernels only if they are named, since jax wants their custom calls to be allowed"
        return self._slower(call)

    def _slower(self, call: Call) -> str | None:
        """Why XLA is expected to be as fast on a GPU, or None."""
        raise NotImplementedError

    def describe(self, call: Call) -> str:
        kernels, launch = self._launch(call)
        return kernels.__name__.rpartition(".")[2] + (f" in {launch.splits} parts" if launch.splits > 1 else "")

    def _launch(self, call: Call) -> tuple[ModuleType, Any]:
        problem = self._problem(call)
        assert not isinstance(problem, str)
        kernels, problem = problem
        return kernels, kernels.launch(problem, kernels.pick(problem))

    def run(self, call: Call, operands: Mapping[str, jax.Array]) -> jax.Array:
        if 0 in call.sizes.values():  # nothing to add up, or nowhere to put it
            return jnp.zeros(call.shape, call.dtype)
        _, launch = self._launch(call)
        shape = tuple(call.sizes[label] for label in call.labels[call.open])
        result = jax.ShapeDtypeStruct(shape, call.dtype)
        if launch.splits > 1:
            partial = jnp.int32 if jnp.issubdtype(call.dtype, jnp.integer) else jnp.float32
            result = jax.ShapeDtypeStruct((launch.splits, *shape), partial)
        flat = call.flatten(operands)
        with jax.named_scope(call.op):
            y = (_called if call.platform == "cuda" else _interpreted)(launch, result, call.arch, *(flat[slot] for slot in launch.operands))
        if launch.splits > 1:
            y = jnp.sum(y, axis=0, dtype=y.dtype).astype(call.dtype)
        return y.reshape(call.shape)


class TritonMatmul(_Triton):
    def _problem(self, call):
        common = _common(call)
        if isinstance(common, str):
            return common
        from jaxext.kernels import matmul

        return matmul, matmul.Problem(**{label: call.sizes[label] for label in "BMNK"}, **common)

    def _slower(self, call):
        return "XLA's matrix products (cuBLAS) are expected to be as fast"


class TritonConv(_Triton):
    def _problem(self, call):
        window = call.window
        assert window is not None
        if window.rank > 3:
            return f"{window.rank} spatial axes, want 3 at most"
        common = _common(call)
        if isinstance(common, str):
            return common

        from jaxext.kernels import conv, depthwise

        def three(values, missing) -> Any:
            return (missing,) * (3 - window.rank) + tuple(values)

        problem = ConvProblem(
            **{label: call.sizes[label] for label in "BNGCK"},
            input=three(window.input, 1),
            filter=three(window.filter, 1),
            output=three(window.output, 1),
            stride=three(window.stride, 1),
            low=three((low for low, _ in window.padding), 0),
            input_dilation=three(window.input_dilation, 1),
            filter_dilation=three(window.filter_dilation, 1),
            **common,
        )
        # One input channel and several groups leave nothing to a matrix product; it is also the way for what `depthwise` refuses.
        alone = problem.C == 1 and problem.G > 1 and depthwise.supports(problem) is None
        return (depthwise if alone else conv), problem

    def _slower(self, call):
        window, sizes = call.window, call.sizes
        assert window is not None
        irregular = (
            sizes["B"] > 1  # XLA makes groups of it
            or sizes["G"] > 1 and (sizes["C"] <= 32 or call.open != "y")  # slow in cuDNN; XLA maps none of their gradients to it
            or max(window.input_dilation, default=1) > 1  # XLA writes out the zeros
            or window.rank in (1, 3)  # cuDNN is made for two axes
            or sizes["C"] <= 4 and jnp.bfloat16 in call.dtypes.values()  # XLA pads few channels of float16 only
        )  # fmt: skip
        return None if irregular else "XLA's dense convolutions (cuDNN) are expected to be as fast"


def _unavailable(call: Call) -> str | None:
    """Why no kernel can be called at all, or None."""
    if symbolic := [label for label, size in call.sizes.items() if not isinstance(size, int)]:
        return f"the size of {symbolic[0]} is symbolic, want a number"
    if call.platform == "cpu":
        if os.environ.get("TRITON_INTERPRET") != "1":
            return "platform is 'cpu', want 'cuda' (or TRITON_INTERPRET=1)"
        if call.splitter != "nobody":
            return "the interpreter, a callback into Python, cannot stand in a program that XLA splits or exports: use a shard_map"
        return _missing(interpreted=True)
    if call.platform != "cuda":
        return f"platform is {call.platform!r}, want 'cuda'"
    if call.splitter == "xla":
        return "XLA's partitioner, which cannot split a kernel, has this program: use jit with automatic axes, or a shard_map over all axes"
    if call.arch is None:
        return "not known for which GPU: there is none here (see jaxext.use_target), or the program is for several platforms"
    if call.arch not in SHARED_MEMORY:
        return f"compute capability is {call.arch / 10}, want one of {sorted(arch / 10 for arch in SHARED_MEMORY)}"
    return _missing(interpreted=False)


@functools.cache
def _missing(*, interpreted: bool) -> str | None:
    """What is not installed as it must be, or None.  Imports Triton."""
    found = {package: _version(package) for package in _WANTED}
    for package, version in found.items():
        if interpreted and package == "jax-triton":
            continue
        if version is None:
            return f"{package} is not installed, {_wanted(package)}"
        if tuple(map(int, re.findall(r"\d+", version)[:3])) < _WANTED[package]:
            return f"{package} {version} is installed, {_wanted(package)}"
    try:
        from jaxext._interpreter import interpreting

        if not interpreted and _keywords() is None:
            return f"jax-triton {found['jax-triton']} has another triton_call than 0.3.1 and 0.4"
    except Exception as error:  # whatever an installation that does not fit raises
        if not interpreted and not any(map(importlib.util.find_spec, ("jax_cuda12_plugin", "jax_cuda13_plugin"))):
            return f"jax's CUDA plugin is not installed; without a GPU: pip install --no-deps jax-cuda13-plugin=={_version('jaxlib')}"
        return "; ".join(f"{package} {version} is installed, {_wanted(package)}" for package, version in found.items()) + f": {error}"
    if interpreting() != interpreted:
        return f"Triton was imported {'with' if interpreting() else 'without'} TRITON_INTERPRET=1 in the environment"
    return None


def _wanted(package: str) -> str:
    version = ".".join(map(str, _WANTED[package]))
    return f"want {version} or newer: pip install '{package}>={version}'"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def _jax_triton() -> ModuleType:
    """jax_triton, whose import changes the place of Triton's cache of compiled kernels: that is put back."""
    before = os.environ.get("TRITON_CACHE_DIR")
    try:
        import jax_triton

        return jax_triton
    finally:
        os.environ.pop("TRITON_CACHE_DIR", None)
        if before is not None:
            os.environ["TRITON_CACHE_DIR"] = before


@functools.cache
def _keywords() -> tuple[str, dict[str, Any]] | None:
    """How `triton_call` names the result, and further keywords; None where it is none that is known."""
    taken = inspect.signature(_jax_triton().triton_call).parameters
    if "out_type" in taken and "backend_options" in taken:  # from jax-triton 0.4
        return "out_type", {"backend_options": {"enable_fp_fusion": True}}
    return ("out_shape", {"enable_fp_fusion": True}) if "out_shape" in taken and "enable_fp_fusion" in taken else None


def _common(call: Call) -> dict[str, Any] | str:
    """The part of a problem that is the same for all kernels."""
    dtypes = []
    for slot, dtype in (*call.dtypes.items(), (call.open, call.dtype)):
        if dtype.name not in _DTYPES:
            return f"{slot} is {dtype.name}, want one of {sorted(_DTYPES)}"
        dtypes.append(_DTYPES[dtype.name])
    precision = _precision(call.precision, call.dtypes.values())
    if precision is None:
        return f"precision is {call.precision}, want one of {sorted(_PRESETS)}, or one that the operands have of themselves"
    role = call.op.rpartition("_")[2]
    return dict(name=call.op, role=role, dtypes=tuple(dtypes), precision=precision, arch=call.arch or _INTERPRETED_CAPABILITY)


def _precision(asked: Any, dtypes) -> str | None:
    """The name that kernels have for it, None if they have not."""
    dtypes = {np.dtype(dtype) for dtype in dtypes}
    if isinstance(asked, lax.DotAlgorithmPreset):
        # What the name asks of 16-bit and 8-bit operands is what they are multiplied with anyway: exactly, and added up in float32.
        own = {
            "F16_F16_F32": {np.dtype(np.float16)},
            "BF16_BF16_F32": {np.dtype(jnp.bfloat16)},
            "ANY_F8_ANY_F8_F32": {np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2)},
        }.get(asked.name)
        return "ieee" if own and dtypes <= own else _PRESETS.get(asked.name)
    if asked is None or isinstance(asked, tuple) and all(isinstance(p, lax.Precision) for p in asked):
        return "ieee" if asked is not None and lax.Precision.HIGHEST in asked else "tf32"
    return None


def _called(launch, result, arch, first, second) -> jax.Array:
    """The compiled kernel, as a custom call."""
    keywords = _keywords()
    assert keywords is not None
    return _jax_triton().triton_call(
        first,
        second,
        kernel=launch.kernel,
        name=launch.name,
        grid=launch.grid,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        compute_capability=arch,
        **{keywords[0]: result},
        **keywords[1],
        **launch.constants,
    )


def _interpreted(launch, result, arch, first, second) -> jax.Array:
    """The kernel in Triton's interpreter."""
    del arch
    from jaxext._interpreter import interpret

    def callback(first, second):
        written = np.empty(result.shape, result.dtype)
        interpret(launch, np.ascontiguousarray(first), np.ascontiguousarray(second), written)
        return written

    return jax.pure_callback(callback, result, first, second)
