"""Repairs the PTX of our kernels where the compilers are known to be wrong.  The kernels of others in this process stay as they are.

Triton before 3.7.1 omits fences on Hopper (triton-lang/triton#9610).  `cp.async` writes shared memory through the generic proxy, `wgmma`
reads it through the async proxy.  So each thread that waited for its copies must make them visible to the async proxy before the barrier
behind which any warp's `wgmma` reads them.  PTX without `wgmma` needs none.

`ptxas` of CUDA 12.4 to 13.1 adds 0 in place of the constant of an `add.s16x2` of which one half alone is used, from compute capability 9.0
on.  LLVM makes such sums of indices: on an H100 a gradient read its sources one row too high.  So these sums are split into their halves.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

FENCED = (3, 7, 1)  # the first Triton that has the fences
_WAIT = re.compile(r"cp\.async\.wait_(?:group\s+\d+|all);(?!\s*fence\.proxy\.async)")
_SUM_OF_HALVES = re.compile(r"add\.[su]16x2\s+(%\w+), (%\w+), (%\w+);")
_SPLIT_SUM = (
    r"{ .reg .b16 %a<2>, %b<2>; mov.b32 {%a0, %a1}, \2; mov.b32 {%b0, %b1}, \3; "
    r"add.s16 %a0, %a0, %b0; add.s16 %a1, %a1, %b1; mov.b32 \1, {%a0, %a1}; }"
)


def repaired(ptx: str) -> str:
    """The PTX with what the compilers omitted, and without what they get wrong."""
    return _SUM_OF_HALVES.sub(_SPLIT_SUM, _fenced(ptx))


def _fenced(ptx: str) -> str:
    """The PTX with a fence behind each wait for copies, if Triton omitted them."""
    from jaxext.kernels import checks

    if checks.triton_version() >= FENCED or "wgmma.mma_async" not in ptx:
        return ptx
    return _WAIT.sub(r"\g<0>\n\tfence.proxy.async.shared::cta;", ptx)


def stages_with_repairs(backend: Any = None, stages: dict[str, Callable] | None = None, *_) -> tuple[str, str]:
    """A hook for `triton.knobs.runtime.add_stages_inspection_hook`: Triton repairs a kernel when it compiles it.

    Triton 3.6 has no part of the hook in the key of its cache, so the cache must be bypassed.
    """
    if stages is not None:
        make_ptx = stages["ptx"]
        stages["ptx"] = lambda *args: repaired(make_ptx(*args))
    return "with repairs", "with repairs"


def can_patch(jax_triton: Any) -> bool:
    """Return whether `patch` knows this jax-triton: 0.3 or 0.4."""
    lib = jax_triton.triton_lib
    return hasattr(lib, "get_or_create_triton_kernel") or hasattr(getattr(lib, "TritonFunction", None), "_compile_kernel")


def patch(jax_triton: Any) -> None:
    """Have jax-triton repair our kernels.  Those of others are compiled as before.

    jax-triton makes a backend for each compilation, so no other one, in this thread or in another, sees the replaced method.
    """
    lib = jax_triton.triton_lib
    if hasattr(lib, "get_or_create_triton_kernel"):  # jax-triton 0.3
        create = lib.get_or_create_triton_kernel

        @functools.wraps(create)
        def created(backend_init_func, platform, fn, *args, **kwargs):
            make_backend = (lambda *of: _repairing(backend_init_func(*of))) if _is_ours(fn) else backend_init_func
            return create(make_backend, platform, fn, *args, **kwargs)

        lib.get_or_create_triton_kernel = created
    else:
        compile = lib.TritonFunction._compile_kernel

        @functools.wraps(compile)
        def compiled(self, spec, gpu_target, backend, backend_options):
            return compile(self, spec, gpu_target, _repairing(backend) if _is_ours(self.fn) else backend, backend_options)

        lib.TritonFunction._compile_kernel = compiled


def _is_ours(kernel: Any) -> bool:
    return kernel.fn.__module__.startswith("jaxext.kernels.")


def _repairing(backend: Any) -> Any:
    make_ptx = backend.make_ptx
    backend.make_ptx = lambda *args: repaired(make_ptx(*args))
    return backend
