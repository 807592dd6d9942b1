"""Runs a kernel launch in Triton's interpreter, on a CPU: for tests, and to debug a kernel with `print`.

TRITON_INTERPRET=1 must be set before Triton is imported.  There is one interpreter per process, and it is slow (milliseconds per operation
on a tile).  Its `tl.dot` multiplies the bits of bfloat16, its casts do not round to nearest, and those of integers take them for such bits;
`tl.fma` rounds twice.  All that is fixed here, with the dtypes of ml_dtypes.  It supports fewer precisions than GPUs.  Here those that
split float32 numbers do as Triton's compiler, and TF32 multiplies float32 numbers as they are.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from unittest import mock

import ml_dtypes
import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter

from jaxext.kernels.launch import Launch

# The numpy dtype of each Triton type that kernels support, in which the interpreter stores it.
DTYPES = {
    "fp32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp16": np.dtype(np.float16),
    "fp8e4nv": np.dtype(ml_dtypes.float8_e4m3fn),
    "fp8e5": np.dtype(ml_dtypes.float8_e5m2),
    "i32": np.dtype(np.int32),
    "i8": np.dtype(np.int8),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_one_at_a_time = threading.Lock()


def interpreting() -> bool:
    """Return whether kernels of this process run in the interpreter."""
    return not isinstance(tl.zeros, triton.JITFunction)


def interpret(launch: Launch, *arrays: np.ndarray) -> None:
    """Run all programs of the grid.  They write into the last arrays, the results.  The arrays must be C-contiguous."""
    with _one_at_a_time:
        builder = interpreter.interpreter_builder
        options = dataclasses.replace(builder.options, allowed_dot_input_precisions=("ieee", "tf32", "tf32x3", "bf16x3", "bf16x6"))
        with (
            mock.patch.object(builder, "options", options),
            mock.patch.object(builder, "create_dot", _dot),
            mock.patch.object(builder, "create_fma", _fma),
            mock.patch.object(builder, "create_si_to_fp", _float_of_integer),
            mock.patch.object(interpreter, "_convert_float", _convert),
            mock.patch.object(interpreter, "_patch_lang", _once(interpreter._patch_lang)),
        ):
            launch.kernel[launch.grid](*map(_Tensor, arrays), **launch.constants)


def _once(patch):
    """`patch`, applied only once to each module.

    The interpreter patches a module's language at each call of a function inside a kernel, which would take a quarter of the time.
    """
    scopes = {}

    def patch_once(function):
        module = function.__globals__["__name__"]
        if module not in scopes:
            scopes[module] = patch(function)
        return scopes[module]

    return patch_once


class _Tensor:
    """The part of torch.Tensor's interface that the interpreter uses.  No data is moved."""

    def __init__(self, array: np.ndarray):
        assert array.flags.c_contiguous
        self._array = array
        self.dtype = tl.str_to_ty(_NAMES[array.dtype], None)

    def data_ptr(self):
        return self._array.ctypes.data

    def untyped_storage(self):
        return self

    def cpu(self):
        return self

    def new_empty(self, *_, **__):
        return _Tensor(self._array)

    def set_(self, *_):
        pass

    def storage_offset(self):
        return 0

    def size(self):
        return self._array.shape

    def stride(self):
        return ()

    def copy_(self, _):
        pass


def _dot(a, b, accumulator, input_precision, max_num_imprecise_acc):
    """`tl.dot` of the values of the interpreter's handles, not of their bits."""
    del max_num_imprecise_acc
    wide, method = accumulator.data.dtype, input_precision.name.lower()
    a, b = _values(a), _values(b)
    if method in _ORDER and a.dtype == b.dtype == np.float32:
        product = _in_parts(a, b, method)
    else:
        product = np.matmul(a.astype(wide), b.astype(wide))
    return interpreter.TensorHandle(product + accumulator.data, accumulator.dtype.scalar)


# Which parts of the left and the right factor are multiplied, the smallest first; 0 is the largest part.
_SMALL = ((1, 0), (0, 1), (0, 0))
_ORDER = {"tf32x3": _SMALL, "bf16x3": _SMALL, "bf16x6": ((1, 1), (2, 0), (0, 2), *_SMALL)}


def _in_parts(a: np.ndarray, b: np.ndarray, method: str) -> np.ndarray:
    """The products of parts, added to one sum; what is NaN among the small ones, as of infinities, is left out."""
    order = _ORDER[method]
    count = 1 + max(map(max, order))
    with np.errstate(all="ignore"):
        left, right = (list(_parts(x, method, count)) for x in (a, b))
        total = np.zeros((*a.shape[:-1], b.shape[-1]), np.float32)
        for i, j in order:
            total = np.where(np.isnan(total), np.float32(0), total) if (i, j) == (0, 0) else total
            total = np.matmul(left[i], right[j]) + total
    return total


def _parts(x: np.ndarray, method: str, count: int) -> Iterator[np.ndarray]:
    """The nearest number of few bits, that of what is left, and so on."""
    for _ in range(count):
        if method.startswith("bf16"):
            part = x.astype(ml_dtypes.bfloat16).astype(np.float32)
        else:  # halves are rounded away from zero
            part = ((x.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)
        yield part
        x = x - part


def _fma(x, y, z):
    """Return the fused multiply-add of float32 numbers.  Triton 3.6 rounds the product too."""
    product = np.multiply(x.data, y.data, dtype=np.float64)
    return interpreter.TensorHandle((product + z.data).astype(z.data.dtype), z.dtype.scalar)


def _float_of_integer(x, dtype):
    """A cast of integers.  The interpreter takes them for the bits of bfloat16."""
    values = x.data.astype(DTYPES[dtype.scalar.name])
    return interpreter.TensorHandle(values.view(interpreter._get_np_dtype(dtype)), dtype.scalar)


def _convert(bits, source, target, rounding_mode):
    """A cast, rounded to nearest even, as the bits of the target type."""
    del rounding_mode
    with np.errstate(over="ignore"):  # becomes infinity, or NaN if the type has no infinity
        values = bits.view(DTYPES[source.name]).astype(DTYPES[target.name])
    return values.view(f"uint{target.primitive_bitwidth}")


def _values(handle) -> np.ndarray:
    return handle.data.view(DTYPES[handle.dtype.scalar.name]) if handle.dtype.scalar.is_floating() else handle.data
