"""Matrix products by cuBLAS through CuPy, with cuBLAS's own choice of the algorithm.

Arrays are exchanged by DLPack, as integers of the same width, since CuPy has no bfloat16.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxext.bench.case import Case

# cuBLAS's cudaDataType_t and cublasComputeType_t: float32 as XLA takes it by default, that is as TF32.
TYPES = {"bfloat16": (14, 68), "float16": (2, 68), "float32": (0, 77)}
WORDS = {2: jnp.uint16, 4: jnp.uint32}


def refusal(case: Case) -> str | None:
    """Return the reason if cuBLAS does not measure this case, or None; reasons of the case come before those of the machine."""
    if case.role not in ("nn", "nt", "tn") or len(case.shapes[0]) != 2:
        return "cuBLAS is called for single products of matrices"
    if set(case.dtypes) - TYPES.keys() or len(set(case.dtypes)) > 1 or any(case.how.values()):
        return f"cuBLAS is called for one of {', '.join(TYPES)} throughout"
    if jax.default_backend() != "gpu":
        return f"the platform is {jax.default_backend()!r}"
    try:
        import cupy  # noqa: F401
    except Exception as error:  # it is missing, or finds no CUDA
        return f"no CuPy: {type(error).__name__}: {error}"
    return None


class Product:
    """A call computes the product of the case's matrices and waits for it."""

    def __init__(self, case: Case, arguments: Sequence[jax.Array]):
        import cupy
        from cupy_backends.cuda.libs import cublas

        a, b = arguments
        self._cupy: Any = cupy
        self._dtype = a.dtype
        self._operands = [cupy.from_dlpack(lax.bitcast_convert_type(x, WORDS[x.dtype.itemsize])) for x in (a, b)]
        # A matrix by rows is to cuBLAS its transpose by columns, so that it is asked for cᵀ = bᵀ aᵀ.
        m, k = a.shape[::-1] if case.role == "tn" else a.shape
        n = b.shape[0] if case.role == "nt" else b.shape[1]
        self._result = cupy.empty((m, n), self._operands[0].dtype)
        dtype, compute = TYPES[a.dtype.name]
        self._one, self._zero = np.ones(1, np.float32), np.zeros(1, np.float32)
        right, left = (self._operands[1].data.ptr, dtype, b.shape[1]), (self._operands[0].data.ptr, dtype, a.shape[1])
        transposed = (int(case.role == "nt"), int(case.role == "tn"))
        self._run = functools.partial(
            cublas.gemmEx,
            cupy.cuda.device.get_cublas_handle(),
            *(*transposed, n, m, k, self._one.ctypes.data, *right, *left, self._zero.ctypes.data),
            *(self._result.data.ptr, dtype, n, compute, -1),  # the algorithm that cuBLAS expects to be fastest
        )

    def __call__(self) -> None:
        self._run()
        self._cupy.cuda.get_current_stream().synchronize()

    def result(self) -> jax.Array:
        """The result of the last call."""
        return lax.bitcast_convert_type(jax.dlpack.from_dlpack(self._result), self._dtype)
