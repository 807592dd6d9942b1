"""Calls a Triton kernel: through jax-triton, or in Triton's interpreter.  Says why not, if neither is possible here.

jax-triton and Triton are optional, and are imported by the first program that is lowered for CUDA.  If TRITON_INTERPRET=1 (Triton's own
switch) was set before Triton was imported, the kernels run on CPUs in Triton's interpreter, if they are named.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import inspect
import os
import re
from types import ModuleType
from typing import Any

import jax
import numpy as np

from jaxext._compat import adapt_dce_rule
from jaxext._target import named
from jaxext.backends.kernel import own_buffer
from jaxext.backends.triton import assembler, repairs
from jaxext.core.call import Call, Partitioner, no_kernel
from jaxext.kernels.launch import SHARED_MEMORY

_WANTED = {"triton": (3, 6), "jax-triton": (0, 3, 1)}
# Triton writes the newest PTX version of its own assembler, but jax runs that of the installed CUDA: CUDA 12.9 supports PTX 8.8.
_PTX = 88


NO_PTXAS = "ptxas is missing, which jaxlib runs at a kernel's first launch: install CUDA 12.9 or newer, or pip install nvidia-cuda-nvcc"


def unavailable(call: Call) -> str | None:
    """Return the reason why no kernel can be called for this call, or None."""
    if call.platform == "cpu":
        if os.environ.get("TRITON_INTERPRET") != "1":
            return "platform is 'cpu', want 'cuda' (or TRITON_INTERPRET=1)"
        if call.partitioner is not Partitioner.NOBODY:
            return "the interpreter, a callback into Python, cannot stand in a program that XLA splits or exports: use a shard_map"
        return missing(interpreted=True)
    if reason := no_kernel(call, "cuda"):
        return reason
    if call.arch not in SHARED_MEMORY:
        return f"compute capability is {(call.arch or 0) / 10}, want one of {sorted(arch / 10 for arch in SHARED_MEMORY)}"
    return missing(interpreted=False) or (None if named() or assembler.find() else NO_PTXAS)


@functools.cache
def missing(*, interpreted: bool) -> str | None:
    """Return which package is missing or has an unsupported version, or None.  Imports Triton."""
    found = {package: installed(package) for package in _WANTED}
    for package, version in found.items():
        if interpreted and package == "jax-triton":
            continue
        if version is None:
            return f"{package} is not installed, {_wanted(package)}"
        if tuple(map(int, re.findall(r"\d+", version)[:3])) < _WANTED[package]:
            return f"{package} {version} is installed, {_wanted(package)}"
    try:
        from jaxext.backends.triton.interpreter import interpreting

        if not interpreted and (_keywords() is None or not repairs.can_patch(_jax_triton())):
            return f"jax-triton {found['jax-triton']} has another triton_call, or another compiler, than 0.3.1 and 0.4"
    except Exception as error:  # a broken installation may raise any type
        if not interpreted and not any(map(importlib.util.find_spec, ("jax_cuda12_plugin", "jax_cuda13_plugin"))):
            alone = f"pip install --no-deps jax-cuda13-plugin=={installed('jaxlib')}"
            return f"jax's CUDA plugin is not installed: pip install 'jax[cuda13]', or without a GPU: {alone}"
        return "; ".join(f"{package} {version} is installed, {_wanted(package)}" for package, version in found.items()) + f": {error}"
    if interpreting() != interpreted:
        return f"Triton was imported {'with' if interpreting() else 'without'} TRITON_INTERPRET=1 in the environment"
    return None


def _wanted(package: str) -> str:
    version = ".".join(map(str, _WANTED[package]))
    return f"want {version} or newer: pip install 'jaxext[triton]'"


def installed(package: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def _jax_triton() -> ModuleType:
    """Import jax_triton, restore TRITON_CACHE_DIR, which the import changes, and have it fit this jax and repair our kernels."""
    before = os.environ.get("TRITON_CACHE_DIR")
    try:
        import jax_triton

        adapt_dce_rule(jax_triton.triton_lib.triton_kernel_call_p)  # type: ignore[attr-defined]
        if repairs.can_patch(jax_triton):
            repairs.patch(jax_triton)
        return jax_triton
    finally:
        os.environ.pop("TRITON_CACHE_DIR", None)
        if before is not None:
            os.environ["TRITON_CACHE_DIR"] = before


@functools.cache
def _keywords() -> tuple[str, dict[str, Any]] | None:
    """The name of the result argument of `triton_call`, and further keywords; None if the signature is unknown."""
    taken = inspect.signature(_jax_triton().triton_call).parameters
    if "out_type" in taken and "backend_options" in taken:  # from jax-triton 0.4
        return "out_type", {"backend_options": {"enable_fp_fusion": True, "ptx_version": _PTX}}
    return ("out_shape", {"enable_fp_fusion": True}) if "out_shape" in taken and "enable_fp_fusion" in taken else None


def called(launch, arch, result, *operands) -> Any:
    """The compiled kernel, as a custom call.  There are two results where `result` is a tuple of two."""
    keywords = _keywords()
    assert keywords is not None
    buffers = map(own_buffer, operands)  # it is compiled for pointers aligned to 16 bytes
    slots = dict(zip(dict.fromkeys(launch.operands), buffers, strict=True))
    y = _jax_triton().triton_call(
        *(slots[slot] for slot in launch.operands),
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
    return jax.tree.map(own_buffer, y)


def interpreted(launch, arch, result, *operands) -> Any:
    """The kernel in Triton's interpreter."""
    del arch
    from jaxext.backends.triton.interpreter import interpret

    def callback(*operands):
        written = jax.tree.map(lambda result: np.empty(result.shape, result.dtype), result)
        slots = dict(zip(dict.fromkeys(launch.operands), map(np.ascontiguousarray, operands), strict=True))
        interpret(launch, *(slots[slot] for slot in launch.operands), *jax.tree.leaves(written))
        return written

    return jax.pure_callback(callback, result, *operands)
