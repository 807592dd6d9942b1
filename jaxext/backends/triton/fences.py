"""Adds the fences to our kernels' PTX that Triton before 3.7.1 omits on Hopper (triton-lang/triton#9610).

`cp.async` writes shared memory through the generic proxy, `wgmma` reads it through the async proxy.  So each thread that waited for its
copies must make them visible to the async proxy before the barrier behind which any warp's `wgmma` reads them.  PTX without `wgmma`, as for
other devices, stays as it is, and so do the kernels of others in this process.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

FIXED = (3, 7, 1)  # the first Triton that has the fences
_WAIT = re.compile(r"cp\.async\.wait_(?:group\s+\d+|all);(?!\s*fence\.proxy\.async)")


def omitted() -> bool:
    """Return whether this Triton omits the fences."""
    from jaxext.kernels import _products  # imports Triton

    return _products.triton_version() < FIXED


def fenced(ptx: str) -> str:
    """The PTX with a fence behind each wait for copies, if Triton omitted them."""
    if not omitted() or "wgmma.mma_async" not in ptx:
        return ptx
    return _WAIT.sub(r"\g<0>\n\tfence.proxy.async.shared::cta;", ptx)


def stages_with_fences(backend: Any = None, stages: dict[str, Callable] | None = None, *_) -> tuple[str, str]:
    """A hook for `triton.knobs.runtime.add_stages_inspection_hook`: Triton adds fences when it compiles a kernel.

    Triton 3.6 has no part of the hook in the key of its cache, so the cache must be bypassed.
    """
    if stages is not None:
        make_ptx = stages["ptx"]
        stages["ptx"] = lambda *args: fenced(make_ptx(*args))
    return "with fences", "with fences"


def can_patch(jax_triton: Any) -> bool:
    """Return whether `patch` knows this jax-triton: 0.3, since 0.4 wants a newer Triton."""
    return hasattr(jax_triton.triton_lib, "get_or_create_triton_kernel")


def patch(jax_triton: Any) -> None:
    """Have jax-triton add fences to our kernels.  Those of others are compiled as before.

    jax-triton makes a backend for each compilation, so no other one, in this thread or in another, sees the replaced method.
    """
    get_or_create = jax_triton.triton_lib.get_or_create_triton_kernel

    @functools.wraps(get_or_create)
    def with_fences(backend_init_func, platform, fn, *args, **kwargs):
        if fn.fn.__module__.startswith("jaxext.kernels."):
            backend_init_func = functools.partial(_fencing_backend, backend_init_func)
        return get_or_create(backend_init_func, platform, fn, *args, **kwargs)

    jax_triton.triton_lib.get_or_create_triton_kernel = with_fences


def _fencing_backend(make_backend: Callable[..., Any], *args: Any) -> Any:
    backend = make_backend(*args)
    make_ptx = backend.make_ptx
    backend.make_ptx = lambda *args: fenced(make_ptx(*args))
    return backend
