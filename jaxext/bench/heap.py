"""Freed memory that stays with the process, for measurements on CPUs."""

import ctypes
import os
import platform

import jax

# Parameters of glibc's mallopt: M_MMAP_MAX (large blocks come from the heap too), M_TRIM_THRESHOLD (never), and M_ARENA_MAX.
KEEPING = {-4: 0, -1: -1, -8: 1}
NVIDIA = "/dev/nvidiactl"  # exists if a GPU's driver is loaded


def keep_freed_memory() -> bool:
    """Make glibc reuse freed memory instead of returning it to the operating system; returns whether it will.

    Otherwise every page of every result is faulted in anew, which on a CPU takes longer than many products.  Call this before jax looks
    for devices: XLA's threads start then, each with a heap of its own.  On machines with a GPU it does nothing: results are in GPU memory,
    and threads that compile would contend for the single heap.
    """
    gpu = jax.config.jax_platforms != "cpu" and os.path.exists(NVIDIA)  # type: ignore[attr-defined]
    if gpu or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(parameter, value) == 1 for parameter, value in KEEPING.items())
