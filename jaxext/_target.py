"""Selects the target GPU of a program, so that machines without that GPU can lower and export GPU programs."""

from __future__ import annotations

import re

import jax

from jaxext._messages import format_value
from jaxext._scope import Scope, in_parentheses, user_context

# Name of a compute capability -> GPUs that have it (https://developer.nvidia.com/cuda-gpus).  NVIDIA adds "a" or "f" to names from 9.0 on.
_KNOWN = {
    "sm_90a": "H100, H200",
    "sm_80": "A100",
    "sm_86": "A10, RTX 3090",
    "sm_89": "L4, L40S, RTX 4090",
    "sm_100a": "B200",
    "sm_103a": "B300",
    "sm_120a": "RTX 5090",
    "sm_70": "V100",
    "sm_75": "T4",
    "sm_87": "Jetson Orin",
    "sm_110a": "Jetson Thor",
    "sm_121a": "DGX Spark",
}

# The compute capability set by `use_target`, times 10.
_named = user_context("use_target", None)
# The name of the GPU that is meant by it, if one is.
_device = user_context("use_device", "")


@in_parentheses('use_target("sm_90a")')
def use_target(arch: str | None) -> Scope:
    """A context in which CUDA programs are compiled for the GPU architecture `arch`.

    Use it as `with use_target("sm_90a"): ...` or as a decorator, `@use_target("sm_90a")`.  The target is read at lowering, so put the
    decorator above `@jax.jit`.

    Args:
      arch: NVIDIA's name of a compute capability, such as "sm_80" (A100), "sm_90a" (H100, H200) or "sm_100a" (B200), not the name of a
        GPU.  None means the architecture of this machine's GPUs, if they all have the same.

    Raises:
      ValueError: `arch` is not such a name, or no known GPU has this compute capability.
    """
    return Scope("use_target", _named, None if arch is None else _capability(arch))


def _capability(arch: str) -> int:
    match = re.fullmatch(r"sm_(\d{2,3})([af]?)", arch) if isinstance(arch, str) else None
    capability = int(match[1]) if match else -1
    if match and capability in map(_number, _KNOWN) and (not match[2] or capability >= 90):
        return capability
    meant = _meant(arch) if isinstance(arch, str) else None
    known = ", ".join(f'"{name}" ({gpus})' for name, gpus in _KNOWN.items() if name == (meant or name))
    raise ValueError(
        f"arch is {format_value(arch)}, want {known}" if meant else f"arch is {format_value(arch)}, want one of {known}; or None"
    )


def _number(name: str) -> int:
    return int(name.strip("sm_af"))


def _meant(arch: str) -> str | None:
    """The name of the compute capability that is meant: by a GPU, such as "h100" or "rtx-4090", or by its number, such as "90" or "8.0"."""
    plain = re.sub(r"[^a-z0-9]", "", arch.lower())
    number = re.fullmatch(r"(?:sm|compute)?(\d{2,3})[af]?", plain)
    for name, gpus in _KNOWN.items():
        called = {re.sub(r"\W", "", gpu.lower()) for gpu in gpus.split(", ")}
        if plain.removeprefix("nvidia") in called or number and _number(name) == int(number[1]):
            return name
    return None


def use_device(name: str) -> Scope:
    """A context inside `use_target` in which the GPU has this name: GPUs of one capability may differ in their picked configs."""
    return Scope("use_device", _device, name)


def named() -> bool:
    """Return whether `use_target` is active."""
    return _named.value is not None


def compute_capability(platform: str) -> int | None:
    """The compute capability, times 10, of the target GPU of a program for `platform`; None if unknown.

    It is unknown on machines with GPUs of different capabilities: a kernel compiled for one may be slow on the others, or fail to load.
    """
    if platform != "cuda":
        return None
    if named():
        return _named.value
    here = {device.compute_capability for device in _gpus()}
    return int(here.pop().replace(".", "")) if len(here) == 1 else None


def device_kind(platform: str) -> str:
    """The name of the GPUs that a program for `platform` is lowered for, such as "NVIDIA H200".

    It is empty if `use_target` names an architecture without one, if this machine has GPUs of several names, and if it has none.
    """
    if platform == "cuda" and named():
        return _device.value
    here = {device.device_kind for device in _gpus()} if platform == "cuda" else set()
    return here.pop() if len(here) == 1 else ""


def _gpus():
    try:
        return jax.local_devices(backend="cuda")
    except RuntimeError:  # jax has no CUDA backend here
        return []
