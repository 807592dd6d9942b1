"""Freed memory is kept on CPUs, and only there."""

import os
import subprocess
import sys

import pytest

from jaxext.bench import heap

MAPPED = """
import ctypes, runpy, sys, types
sys.modules["jax"] = types.SimpleNamespace(config=types.SimpleNamespace(jax_platforms="cpu"))  # whose import takes a second
if not runpy.run_path(sys.argv[1])["keep_freed_memory"]():
    sys.exit()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
resident = lambda: int(open("/proc/self/statm").read().split()[1])
block = libc.malloc(1 << 27)
ctypes.memset(block, 1, 1 << 27)
used = resident()
libc.free(block)
print(resident() / used)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="this is not Linux")
def test_freed_memory_is_kept():
    """Pages that were written stay the process's once they are free; otherwise most of its memory would be gone."""
    done = subprocess.run([sys.executable, "-c", MAPPED, heap.__file__], capture_output=True, text=True, check=True)
    if not done.stdout:
        pytest.skip("this is not glibc")
    assert float(done.stdout) > 0.9
