"""The environment of a measurement: the device, the versions of what compiles and computes, and hashes of our own code."""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib.metadata
import os
import pathlib
import platform as machine
import shlex
import subprocess
import sys
from collections.abc import Callable

import jax

_PACKAGE = pathlib.Path(__file__).parents[1]

_COMPILERS = ("jax", "jaxlib")  # what computes on any platform
_FOR_CUDA = (
    *("triton", "jax-triton", "jax-cuda12-plugin", "jax-cuda13-plugin", "jax-cuda12-pjrt", "jax-cuda13-pjrt"),
    *("nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-cublas-cu12", "nvidia-cublas"),
)

# Implementation -> functions of the platform, each a word for its code: one for each family.
_codes: dict[str, list[Callable[[str], str]]] = {}


@functools.cache
def _installed(*packages: str) -> dict[str, str]:
    found = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def versions_for(platform: str) -> dict[str, str]:
    """The versions on which the time of a program for `platform` depends."""
    return _installed(*_COMPILERS, *(_FOR_CUDA if platform == "cuda" else ()))


def default_platform() -> str:
    """Return the platform of jax's default backend, by the name under which programs are lowered for it."""
    backend = jax.default_backend()
    return "cuda" if backend == "gpu" else backend


@functools.cache
def device_kind(platform: str) -> str:
    """Return a name such as "NVIDIA H200"; for a CPU, the processor and this process's threads.  Raises RuntimeError if there is none."""
    device = jax.local_devices(backend=platform)[0]
    return f"{processor()}, {cores()} threads" if platform == "cpu" else device.device_kind


@functools.cache
def capability(platform: str) -> int | None:
    """The compute capability of this process's first CUDA device, times 10; None on other platforms.  Raises as `device_kind` does."""
    device = jax.local_devices(backend=platform)[0]
    return int(device.compute_capability.replace(".", "")) if platform == "cuda" else None


def processor() -> str:
    """Its name and its model in numbers: virtual machines call many models "AMD EPYC", and ARM processors have no name."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return machine.processor() or machine.machine()
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in reversed(lines))}  # of the first processor
    numbers = {"family": "cpu family", "model": "model", "implementer": "CPU implementer", "part": "CPU part"}
    model = ", ".join(f"{word} {facts[name]}" for word, name in numbers.items() if facts.get(name))
    name = facts.get("model name") or machine.machine()
    return f"{name} ({model})" if model else name


def cores() -> int:
    """The number of hardware threads on which this process may run, as XLA counts them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def add_code(implementation: str, code: Callable[[str], str], instead_of: Callable[[str], str] | None = None) -> None:
    """Register an implementation; `code(platform)` is a word that identifies its code.  It may replace another one."""
    of = _codes.setdefault(implementation, [])
    if instead_of is not None and instead_of in of:
        of.remove(instead_of)
    of.append(code)
    codes.cache_clear()


@functools.cache
def codes(platform: str) -> dict[str, str]:
    """Implementation -> a word that identifies its code.  Empty, so that no measurement is valid, if sources cannot be read."""
    try:
        return {name: " ".join(sorted({code(platform) for code in of})) for name, of in _codes.items()}
    except (OSError, ImportError):
        return {}


def report() -> dict:
    """The environment as data: the device, its host, the versions, our commit, the date and the command."""
    platform = default_platform()
    return {
        "device": device_kind(platform),
        "capability": capability(platform),
        "processor": processor(),
        "cores": cores(),
        "versions": {"python": machine.python_version(), **_installed(*_COMPILERS, "numpy", *_FOR_CUDA, "jaxext")},
        "sources": codes(platform),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command(),
    }


def command() -> str:
    """Return how this process was started, as a shell takes it, without the folders of this machine."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None and spec.origin == sys.argv[0]:
        program = f"python -m {spec.name.removesuffix('.__main__')}"
    else:
        program = pathlib.Path(sys.argv[0]).name.replace("__main__.py", "python -m jaxext")
    return " ".join([program, *(shlex.quote("=".join(map(_without_folders, each.split("=")))) for each in sys.argv[1:])])


def _without_folders(argument: str) -> str:
    """An absolute path from our checkout on, if it is in it, and else its last part alone."""
    if not (path := pathlib.Path(argument)).is_absolute():
        return argument
    checkout = _PACKAGE.parent
    return str(path.relative_to(checkout)) if path.is_relative_to(checkout) and path != checkout else path.name


def commit() -> str | None:
    """Return the commit of the checkout that this is part of, with "-dirty" if a file was changed; otherwise the environment's
    COMMIT, or None."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", _PACKAGE, *arguments], capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")  # fails if this is installed inside another checkout
        return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("COMMIT") or None
