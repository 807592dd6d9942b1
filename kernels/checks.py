"""Checks of devices, of numbers that Triton's version gets wrong, and of configs; `check` is the one of all launches."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .launch import BITS, MOST_PROGRAMS, PRODUCTS_OF_PARTS, SHARED_MEMORY, TENSOR_MEMORY, cdiv


def check(problem: Any, reasons: Iterable[str | None]) -> None:
    """Raise the first reason why a kernel cannot be launched, if there is one."""
    if reason := next(filter(None, reasons), None):
        raise ValueError(f"{problem.name}: {reason}")


def wrong_field(config: Any, powers: Mapping[str, int], counts: Sequence[str] = ("splits",)) -> str | None:
    """Return the reason if a field is not a power of two of at least this size, or a count is below 1, or None."""
    for field, least in powers.items():
        if (got := getattr(config, field)) < least or got & (got - 1):
            return f"{field} is {got}, want a power of two, at least {least}"
    return next((f"{field} is {got}, want at least 1" for field in counts if (got := getattr(config, field)) < 1), None)


def refused_device(arch: int, eights: bool = False) -> str | None:
    """Return the reason if kernels are not compiled for the device, or it does not multiply 8-bit floats and they are, or None."""
    if arch not in SHARED_MEMORY:
        return f"compute capability {arch / 10}, want one of {', '.join(str(arch / 10) for arch in SHARED_MEMORY)}"
    return f"8-bit floats need compute capability 8.9, got {arch / 10}" if eights and arch < 89 else None


def lacking(config: Any, arch: int, programs: int, shared: int = 0, tensor: int = 0) -> str | None:
    """Return the reason if the config has more programs than a grid, or needs more shared or tensor memory than there is, or None."""
    if programs > MOST_PROGRAMS:
        return f"{config} makes {programs} programs, a grid has at most {MOST_PROGRAMS}"
    if shared > SHARED_MEMORY[arch]:
        return f"{config} needs {shared} bytes of shared memory, compute capability {arch / 10} has {SHARED_MEMORY[arch]}"
    if tensor > TENSOR_MEMORY:
        return f"{config} needs {tensor} columns of tensor memory, compute capability {arch / 10} has {TENSOR_MEMORY}"
    return None


def tensor_memory(arch: int, rows: int, cols: int, depth: int, parts: str) -> int:
    """The most columns of tensor memory that a tile product by tcgen05 needs, for sums and left factors; `parts` splits float32 factors.

    Triton 3.6 has separate sums for the parts of float32 numbers, and compiles an empty kernel without an error if they do not fit.
    """
    if not 100 <= arch < 120 or rows < 64:
        return 0
    sums = cdiv(rows, 128) * cols
    return PRODUCTS_OF_PARTS[parts] * sums + depth if parts in PRODUCTS_OF_PARTS else sums


def triton_version() -> tuple[int, ...]:
    import triton

    return tuple(map(int, re.findall(r"\d+", triton.__version__)[:3]))


def refused_pair(arch: int, left: str, right: str, method: str, turned: bool, scaled: bool = False) -> str | None:
    """Return the reason if Triton overwrites the left factor while tensor cores still read it, or None.

    Triton before 3.8 does so on 9.0 if the left factor alone is converted, or `scaled`: it is then read from registers, which the next
    step's conversion writes (triton-lang/triton#9433).  If the right factor is converted or `turned` too, each product is waited for; so
    are those of parts.
    """
    if arch != 90 or triton_version() >= (3, 8) or turned or BITS[right] == 32 and method != "tf32":
        return None
    if BITS[left] >= BITS[right] and not scaled:
        return None
    version = ".".join(map(str, triton_version()))
    return f"{left} by {right} on compute capability 9.0, where Triton {version} overwrites factors that are being read: want 3.8 or newer"
