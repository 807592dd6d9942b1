"""For which GPU a program is compiled, where that is not the GPU of this machine: machines without one can read and export GPU programs."""

from __future__ import annotations

import re
from collections.abc import Callable

import jax

from jaxext._scope import Scope

# For messages: what people call the GPU that they have (https://developer.nvidia.com/cuda-gpus).
_KNOWN = {"sm_90a": "H100, H200", "sm_80": "A100", "sm_86": "RTX 3090", "sm_89": "L4, L40S, RTX 4090", "sm_100a": "B200"}

# The compute capability, times 10, that `use_target` names; part of jit's cache key.
_named = jax.make_user_context(None)


def use_target(arch: str | None) -> Scope:
    """A context in which programs lowered for CUDA are compiled for this architecture (None: that of this machine's GPUs, if they are of
    one).

    It is a context manager (`with use_target("sm_90a"): ...`) and a decorator of functions (`@use_target("sm_90a")`).  It decides at
    lowering: decorate the jitted function, above `@jax.jit`.

    Args:
      arch: NVIDIA's name of a compute capability, such as "sm_80" (A100), "sm_90a" (H100, H200) or "sm_100a" (B200).

    Raises:
      ValueError: it is no such name.
    """
    if arch is None:
        return Scope("use_target", _named, None)
    match = re.fullmatch(r"sm_(\d{2,3})[af]?", arch) if isinstance(arch, str) else None
    if not match:
        known = ", ".join(f'"{name}" ({gpus})' for name, gpus in _KNOWN.items())
        raise ValueError(f"arch is {arch!r}, want a name such as {known}; or None")
    return Scope("use_target", _named, int(match[1]))


def lower_for(fun: Callable, *args, arch: str, **kwargs) -> jax.stages.Lowered:
    """`jax.jit(fun).lower(*args, **kwargs)` for CUDA devices of the architecture `arch`, on any machine.

    The program holds the compiled kernels; read it with `as_text()`.  To compile and run it such a device is needed.  To export for a GPU,
    call `jax.export.export(..., platforms=["cuda"], disabled_checks=jaxext.export_disabled_checks())` in the context `use_target`.

    Args:
      fun: a function of arrays, jitted or not.
      *args, **kwargs: its arguments; `jax.ShapeDtypeStruct`s do.
      arch: as for `use_target`.
    """
    jitted = fun if hasattr(fun, "trace") else jax.jit(fun)
    with use_target(arch):
        return jitted.trace(*args, **kwargs).lower(lowering_platforms=("cuda",))


def named() -> bool:
    """Whether programs are for a GPU that `use_target` names, and not for those of this machine."""
    return _named.value is not None


def compute_capability(platform: str) -> int | None:
    """Times 10, of the GPU for which a program for `platform` is compiled; None if that is not known.

    Nor is it where GPUs of several capabilities are: a kernel compiled for one would not load, or not be at its best, on the others.
    """
    if platform != "cuda":
        return None
    if named():
        return _named.value
    try:
        here = {device.compute_capability for device in jax.local_devices(backend="cuda")}
    except RuntimeError:  # jax has no such backend here
        return None
    return int(here.pop().replace(".", "")) if len(here) == 1 else None
