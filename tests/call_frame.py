"""Calls of handlers as XLA makes them, through its FFI's C API: csrc/call_frame.cc.  Needs g++; no GPU and no CUDA."""

import ctypes
import functools
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import cpp
import jax
import numpy as np

ROOT = pathlib.Path(__file__).parent.parent
OK, INVALID, INTERNAL = 0, 3, 13  # XLA_FFI_Error_Code
STAGES = {"initialize": 2, "execute": 3}  # XLA_FFI_ExecutionStage
DTYPES = {  # XLA_FFI_DataType
    **{"int8": 2, "int32": 4, "int64": 5, "float16": 10, "float32": 11, "float64": 12, "bfloat16": 16},
    **{"float8_e5m2": 19, "float8_e4m3fn": 20},
}
Array = tuple[str, tuple[int, ...], int]  # dtype, shape and address


class _Buffer(ctypes.Structure):
    _fields_ = [("dtype", ctypes.c_int32), ("address", ctypes.c_int64), ("rank", ctypes.c_int64), ("sizes", ctypes.c_void_p)]


class _Attribute(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("dtype", ctypes.c_int32), ("size", ctypes.c_int64), ("data", ctypes.c_void_p)]


# Checks of every pointer double the time that XLA's templates take to compile.
WITHOUT_POINTERS = "-fno-sanitize=null,alignment,vptr,nonnull-attribute,returns-nonnull-attribute"


@functools.cache
def library(*more: pathlib.Path) -> ctypes.CDLL:
    """The library that calls, with these files of C++."""
    flags = [*cpp.SANITIZED, WITHOUT_POINTERS, "-O0", "-isystem", jax.ffi.include_dir()]
    return cpp.shared_library([ROOT / "tests/csrc/call_frame.cc", *more], flags)


def call(
    library: ctypes.CDLL,
    handler: ctypes.c_void_p,
    stage: int,
    operands: Iterable[Array],
    results: Iterable[Array],
    attributes: Mapping[str, Any],
) -> tuple[int, str]:
    """The code and the message of a handler's answer.  Attributes are strings, numpy's numbers and arrays, or Python's of 64 bits."""
    keep = []  # what the structures point to

    def buffer(dtype, shape, address):
        keep.append(np.array(shape, np.int64))
        return _Buffer(DTYPES[dtype], address, len(shape), keep[-1].ctypes.data)

    def attribute(name, value):
        if isinstance(value, str):
            keep.append(ctypes.create_string_buffer(value.encode()))
            return _Attribute(name.encode(), -1, len(value.encode()), ctypes.addressof(keep[-1]))
        keep.append(np.asarray(value, getattr(value, "dtype", np.float64 if isinstance(value, float) else np.int64)))
        return _Attribute(name.encode(), DTYPES[keep[-1].dtype.name], keep[-1].size if keep[-1].ndim else -1, keep[-1].ctypes.data)

    groups: list[tuple[Any, list[Any]]] = [(_Buffer, [buffer(*array) for array in arrays]) for arrays in (operands, results)]
    groups.append((_Attribute, [attribute(*item) for item in sorted(attributes.items())]))
    counted = [x for kind, items in groups for x in (ctypes.c_int64(len(items)), (kind * len(items))(*items))]
    message = ctypes.create_string_buffer(4096)
    code = library.CallHandler(handler, stage, *counted, message, ctypes.c_int64(len(message)))
    return code, message.value.decode()
