"""The implementation `triton`: the kernels of `jaxext.kernels` on CUDA GPUs, through jax-triton, and on CPUs in Triton's interpreter.

A `Call` becomes a kernel's `Problem`, one of its `candidates` is the `Config`, and its `launch` becomes the custom call.

jax-triton and Triton are optional, and are imported by the first program that is lowered for CUDA.  If TRITON_INTERPRET=1 (Triton's own
switch) was set before Triton was imported, the kernels run on CPUs in Triton's interpreter, if they are named.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import inspect
import os
import pathlib
import re
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import jax
import numpy as np
from jax.extend.mlir import ir
from jax.interpreters import mlir

from jaxext._compat import adapt_dce_rule
from jaxext._target import named
from jaxext.backends.kernel import KERNELS, KernelCall, KernelImplementation, own_buffer
from jaxext.backends.triton import assembler, repairs
from jaxext.core.call import Call, Partitioner, no_kernel
from jaxext.core.implementation import Plan
from jaxext.kernels.launch import SHARED_MEMORY

_WANTED = {"triton": (3, 6), "jax-triton": (0, 3, 1)}
# The call of jax-triton 0.4; that of 0.3 is of an older kind, which XLA neither passes slices to nor captures into a CUDA graph.
TYPED_CALL = "triton_kernel_call_ffi"
# Triton writes the newest PTX version of its own assembler, but jax runs that of the installed CUDA: CUDA 12.9 supports PTX 8.8.
_PTX = 88


NO_PTXAS = "ptxas is missing, which jaxlib runs at a kernel's first launch: install CUDA 12.9 or newer, or pip install nvidia-cuda-nvcc"


class TritonKernels(KernelImplementation):
    """The common part of all families.  `module` has the kernels; a class that has several modules overrides `kernels`."""

    name = "triton"
    custom_calls = ("triton_kernel_call", TYPED_CALL)
    epilogues = True
    assumed_arch = 90  # the interpreter computes what an H100 would
    module: ModuleType
    shared = (*KernelImplementation.shared, *sorted(pathlib.Path(__file__).parent.glob("*.py")), *sorted(KERNELS.rglob("*.py")))

    def plan(self, call: Call) -> Plan | str:
        plan = super().plan(call)
        if call.platform == "cpu" and isinstance(plan, Plan):
            plan.only_if_named = "the interpreter is slow: it is taken only if it is named"
        return plan

    def kernels(self, problem: Any) -> ModuleType:
        """The module whose kernels support a problem."""
        return self.module

    def lacks(self, call: Call) -> str | None:
        return unavailable(call)

    def refuses_problem(self, problem: Any) -> str | None:
        return self.kernels(problem).refuses(problem)

    def configs(self, problem: Any) -> Sequence[Any]:
        return self.kernels(problem).candidates(problem)

    def family(self, problem: Any, config: Any) -> str:
        return self.kernels(problem).__name__.rpartition(".")[2]

    def compiler(self) -> str:
        return f"triton {installed('triton')}"

    def unassembled(self, lowered: jax.stages.Lowered) -> str | None:
        """Return the reason or None, as in the base class; the reason only where a GPU of this machine is the target."""
        ptxas = None if named() else assembler.find()
        return assembler.failure(lowered, ptxas) if ptxas else None

    def launch(self, call: Call, problem: Any, config: Any) -> KernelCall:
        kernels = self.kernels(problem)
        launch = kernels.launch(problem, config)
        return KernelCall(
            describe=self.family(problem, config),
            slots=tuple(dict.fromkeys(launch.operands)),  # an operand that a fused kernel lacks is the left one again
            splits=launch.splits,
            call=_bound(launch, call),
        )


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
    if not interpreted and not any(map(importlib.util.find_spec, ("jax_cuda12_plugin", "jax_cuda13_plugin"))):
        alone = f"pip install --no-deps jax-cuda13-plugin=={installed('jaxlib')}"
        return f"jax's CUDA plugin is not installed: pip install 'jax[cuda13]', or without a GPU: {alone}"
    try:
        from jaxext.backends.triton.interpreter import interpreting

        if not interpreted and (_keywords() is None or not repairs.can_patch(_jax_triton())):
            return f"jax-triton {found['jax-triton']} has another triton_call, or another compiler, than 0.3.1 and 0.4"
    except Exception as error:  # a broken installation may raise any type
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

        lib: Any = jax_triton.triton_lib  # type: ignore[attr-defined]
        adapt_dce_rule(lib.triton_kernel_call_p)
        if repairs.can_patch(jax_triton):
            repairs.patch(jax_triton)
        if hasattr(lib, "get_cuda_backend"):  # jax-triton 0.3
            mlir.register_lowering(lib.triton_kernel_call_p, functools.partial(_lower_call, lib), platform="cuda")
        return jax_triton
    finally:
        os.environ.pop("TRITON_CACHE_DIR", None)
        if before is not None:
            os.environ["TRITON_CACHE_DIR"] = before


def _lower_call(lib: ModuleType, ctx: Any, *args: Any, **params: Any) -> Any:
    """Lower a call by jax-triton 0.3, and make it a typed one if it has that name: jaxlib knows both, and what they hold is the same."""
    results = lib.triton_kernel_call_lowering(lib.get_cuda_backend, ctx, *args, **params)
    if params["custom_call_target_name"] == TYPED_CALL:
        attributes = results[0].owner.attributes
        attributes["api_version"] = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 4)
        attributes["backend_config"] = ir.DictAttr.get({"opaque": attributes["backend_config"]})
    return results


@functools.cache
def _keywords() -> tuple[str, dict[str, Any]] | None:
    """The name of the result argument of `triton_call`, and further keywords; None if the signature is unknown."""
    taken = inspect.signature(_jax_triton().triton_call).parameters
    if "out_type" in taken and "backend_options" in taken:  # from jax-triton 0.4
        return "out_type", {"backend_options": {"enable_fp_fusion": True, "ptx_version": _PTX}}
    return ("out_shape", {"enable_fp_fusion": True}) if "out_shape" in taken and "enable_fp_fusion" in taken else None


def _bound(launch: Any, call: Call) -> Callable[..., Any]:
    """The function of the result's shape and of operands that launches a kernel, or two in turn."""
    cuda = functools.partial(called, launch, call.arch, not call.in_place)
    one = cuda if call.platform == "cuda" else functools.partial(interpreted, launch)
    return functools.partial(_in_turn, launch, one, _bound(launch.then, call)) if launch.then else one


def _in_turn(launch, first, then, result, *operands) -> Any:
    slots = dict(zip(dict.fromkeys(launch.operands), operands, strict=True))
    slots["partial"] = first(jax.ShapeDtypeStruct(launch.partial, np.float32), *operands)
    return then(result, *(slots[slot] for slot in launch.then.operands))


def called(launch, arch, own_buffers, result, *operands) -> Any:
    """The compiled kernel, as a custom call, for pointers aligned to 16 bytes.  There are two results where `result` is a tuple of two."""
    keywords = _keywords()
    assert keywords is not None
    place = own_buffer if own_buffers else (lambda x: x)
    typed = {} if own_buffers or keywords[0] == "out_type" else {"custom_call_target_name": TYPED_CALL}
    slots = dict(zip(dict.fromkeys(launch.operands), map(place, operands), strict=True))
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
        **typed,
        **launch.constants,
    )
    return jax.tree.map(place, y)


def interpreted(launch, result, *operands) -> Any:
    """The kernel in Triton's interpreter."""
    from jaxext.backends.triton.interpreter import interpret

    def callback(*operands):
        written = jax.tree.map(lambda result: np.empty(result.shape, result.dtype), result)
        slots = dict(zip(dict.fromkeys(launch.operands), map(np.ascontiguousarray, operands), strict=True))
        interpret(launch, *(slots[slot] for slot in launch.operands), *jax.tree.leaves(written))
        return written

    return jax.pure_callback(callback, result, *operands)
