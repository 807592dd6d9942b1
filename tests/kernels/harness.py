"""Runs one launch of a kernel in memory that shows what it touched, and judges the result.

It runs in Triton's interpreter or, where Triton is not made for that, on a GPU, on PyTorch's tensors.  Every array lies between guards.
Those of an operand are NaN: what a kernel reads beside it spoils its sums.  The result starts as NaN, so an element that is never written
is one, and its guards must be there afterwards.  Arrays of billions of elements have none.  It must not know any particular kernel.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
from triton import knobs

from jaxext.backends.triton.interpreter import DTYPES, interpret, interpreting
from jaxext.backends.triton.repairs import stages_with_repairs
from jaxext.kernels.launch import Launch
from jaxext.verify import laws
from jaxext.verify.laws import is_integer

# Bytes on either side: more than a row or a tile's run of any case.  Where PyTorch makes every array an allocation of its own,
# compute-sanitizer is to see what goes beyond it, which guards would hide.
GUARD = 0 if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") == "1" else 1 << 14
MOST_MEMORY = 5 * 10**9  # bytes of a GPU, which 16 workers may share, for one test
NAN = 0xFF  # every byte of a number that is NaN in each float format
NOTHING = 0xA5  # every byte of one that no kernel computes


def skip_what_is_overwritten(module, problem) -> None:
    """Skip the products that a kernel refuses because this Triton overwrites their factors."""
    if "overwrites factors" in (reason := module.refuses(problem) or ""):
        pytest.skip(reason)


def run(launch: Launch, operands: Mapping[str, np.ndarray], shapes: Sequence[tuple[int, ...]], dtype_name: str) -> list[np.ndarray]:
    """Return all results of a launch, of these shapes, or of the one after it; partial results are added up in their own order."""
    if launch.then:
        (partial,) = run(dataclasses.replace(launch, then=None), operands, [launch.partial], "fp32")
        return run(launch.then, {**operands, "partial": partial}, shapes, dtype_name)
    dtype = DTYPES[dtype_name]
    assert launch.results == len(shapes)
    inputs = {slot: _Guarded.operand(operands[slot]) for slot in dict.fromkeys(launch.operands)}
    parts = [launch.splits > 1 and i not in launch.whole for i in range(len(shapes))]
    sums = np.dtype(np.int32 if is_integer(dtype) else np.float32)
    results = [
        _Guarded.result((launch.splits, *shape), sums) if partial else _Guarded.result(shape, dtype)
        for shape, partial in zip(shapes, parts, strict=True)
    ]
    if all(launch.grid):
        (_in_interpreter if interpreting() else _on_gpu)(launch, *(inputs[slot] for slot in launch.operands), *results)
    for what, guarded in (*inputs.items(), *(("the result", result) for result in results)):
        assert guarded.intact(), f"{launch.name}: written beside {what}"
    for slot, guarded in inputs.items():
        assert guarded.array.tobytes() == operands[slot].tobytes(), f"{launch.name}: operand {slot} was changed"
    return [
        result.array.sum(axis=0, dtype=result.array.dtype).astype(dtype) if partial else result.array
        for result, partial in zip(results, parts, strict=True)
    ]


def _in_interpreter(launch: Launch, *arrays: _Guarded) -> None:
    interpret(launch, *(guarded.array for guarded in arrays))


def _on_gpu(launch: Launch, *arrays: _Guarded) -> None:
    """All the memory goes there, guards included, and comes back."""
    torch = importlib.import_module("torch")
    copies = [torch.from_numpy(guarded.memory).cuda() for guarded in arrays]
    tensors = [
        copy[GUARD : copy.numel() - GUARD].view(getattr(torch, guarded.array.dtype.name))
        for copy, guarded in zip(copies, arrays, strict=True)
    ]
    launch_on_gpu(launch, *tensors)
    for copy, guarded in zip(copies, arrays, strict=True):
        guarded.memory[...] = copy.cpu().numpy()


def launch_on_gpu(launch: Launch, *tensors) -> None:
    """The kernel as it is now: Triton's cache on disk knows one by its source and its constants as they are printed.

    So after a change to a method of a problem it would hand out the kernel of before.
    """
    how = dict(num_warps=launch.num_warps, num_stages=launch.num_stages, enable_fp_fusion=True)
    with knobs.compilation.scope():
        knobs.compilation.always_compile = True
        with mock.patch.object(knobs.runtime, "add_stages_inspection_hook", stages_with_repairs):
            launch.kernel[launch.grid](*tensors, **launch.constants, **how)


@dataclasses.dataclass(frozen=True, eq=False)
class Sparse:
    """An array of billions of elements, zeros but for these values at a place."""

    shape: tuple[int, ...]
    dtype_name: str
    place: Any  # an index
    values: Any = 0

    @property
    def memory(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype_name].itemsize

    def in_file(self, path: pathlib.Path) -> np.ndarray:
        """Return the array in a file, of which only the touched pages exist."""
        array = np.memmap(path, DTYPES[self.dtype_name], "w+", shape=self.shape).view(np.ndarray)
        array[self.place] = self.values
        return array

    def on_gpu(self) -> Any:
        torch = importlib.import_module("torch")
        tensor = torch.zeros(self.shape, dtype=getattr(torch, DTYPES[self.dtype_name].name), device="cuda")
        tensor[self.place].copy_(torch.from_numpy(np.asarray(self.values, np.float32)))
        return tensor


def run_large(
    launch: Launch, operands: Mapping[str, Sparse], result: Sparse, folder: pathlib.Path, programs: Sequence[int] | None = None
) -> np.ndarray:
    """Return the result of `launch` for the operands, by slot, at the result's place.

    On a GPU the arrays are real.  In the interpreter they are files, and only these programs run, or the last one.
    """
    whole = result
    if launch.splits > 1:
        partial = "i32" if result.dtype_name == "i32" else "fp32"
        whole = Sparse((launch.splits, *result.shape), partial, (slice(None), *result.place))
    arrays = {slot: operands[slot] for slot in launch.operands} | {"result": whole}
    if interpreting():
        first, second, into = (array.in_file(folder / name) for name, array in arrays.items())
        _some_in_interpreter(launch, programs or [launch.grid[0] - 1], first, second, into)
        got = into[whole.place].astype(np.float64)
    else:
        _skip_what_takes_too_much(sum(array.memory for array in arrays.values()))
        tensors = [array.on_gpu() for array in arrays.values()]
        launch_on_gpu(launch, *tensors)
        got = tensors[-1][whole.place].double().cpu().numpy()
    return (got.sum(axis=0) if launch.splits > 1 else got).astype(DTYPES[result.dtype_name])


def _some_in_interpreter(launch: Launch, programs: Sequence[int], first: np.ndarray, second: np.ndarray, result: np.ndarray) -> None:
    from triton.runtime.interpreter import interpreter_builder as builder

    (count,) = launch.grid
    place, size = builder.set_grid_idx, builder.set_grid_dim
    with (
        mock.patch.object(builder, "set_grid_idx", lambda x, y, z: place(programs[x], y, z)),
        mock.patch.object(builder, "set_grid_dim", lambda *_: size(count, 1, 1)),
    ):
        interpret(dataclasses.replace(launch, grid=(len(programs),)), first, second, result)


def _skip_what_takes_too_much(memory: int) -> None:
    if GUARD == 0:
        pytest.skip("compute-sanitizer takes long for so many programs")
    if memory > MOST_MEMORY:
        pytest.skip(f"it takes {memory} bytes of a GPU that others share, a test has {MOST_MEMORY}")
    importlib.import_module("torch").cuda.empty_cache()  # where the arrays of the test before may be


def corner(shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Return the slices of an array of that shape at the end of a larger one."""
    return tuple(slice(-size, None) for size in shape)


def check(got: np.ndarray, want: np.ndarray, scale: np.ndarray | None = None) -> None:
    """`got` is `want`, which is float64, rounded; if `scale`, the sum of the products' magnitudes, is given: up to float32's own rounding.

    Without `scale` the operands are small integers, whose products and sums are exact in float32: no element may differ at all.
    """
    # Sums in float32, in any order, are off by its eps (2^-23) of the running sum, which is far below the sum of magnitudes: 4 of them are
    # ample for the lengths of tests, and far below one missing product.
    wrong = laws.exact(got, want) if scale is None else laws.near(got, want, scale, stray=4 * 2.0**-23)
    assert wrong is None, wrong


@dataclasses.dataclass(frozen=True, eq=False)
class _Guarded:
    """An array in the middle of a longer run of memory."""

    memory: np.ndarray  # bytes
    array: np.ndarray  # its middle, by the dtype
    guard: int  # each byte of the rest

    @staticmethod
    def make(shape: tuple[int, ...], dtype: np.dtype, guard: int) -> _Guarded:
        size = int(np.prod(shape)) * dtype.itemsize
        memory = np.full(size + 2 * GUARD, guard, np.uint8)
        return _Guarded(memory, memory[GUARD : GUARD + size].view(dtype).reshape(shape), guard)

    @staticmethod
    def operand(array: np.ndarray) -> _Guarded:
        guarded = _Guarded.make(array.shape, array.dtype, NOTHING if is_integer(array.dtype) else NAN)
        guarded.array[...] = array
        return guarded

    @staticmethod
    def result(shape: tuple[int, ...], dtype: np.dtype) -> _Guarded:
        guarded = _Guarded.make(shape, dtype, NOTHING)
        if not is_integer(dtype):
            guarded.array.view(np.uint8)[...] = NAN
        return guarded

    def intact(self) -> bool:
        return bool((self.memory[:GUARD] == self.guard).all() and (self.memory[self.memory.size - GUARD :] == self.guard).all())
