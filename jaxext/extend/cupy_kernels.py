"""Kernels of CuPy as `cuda_kernel` takes them: `RawKernel`, `RawModule` and `ElementwiseKernel`.  CuPy itself is not imported."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxext.extend.signature import DTYPES

_THREADS = 256


def taken(source: Any, name: str | None) -> tuple[Any, str | None, dict[str, Any]]:
    """Source, name and further arguments of `cuda_kernel` for a kernel of CuPy; anything else as it is."""
    kind = type(source)
    if kind.__module__.partition(".")[0] != "cupy":
        return source, name, {}
    if kind.__name__ == "ElementwiseKernel":
        return _elementwise(source)
    if kind.__name__ not in ("RawKernel", "RawModule"):
        raise TypeError(f"cuda_kernel: source is cupy's {kind.__name__}, want a RawKernel, a RawModule or an ElementwiseKernel, or text")
    if source.code is None:
        raise TypeError(f"cuda_kernel: source is cupy's {kind.__name__} of the file {source.file_path}, want the file's path itself")
    if source.enable_cooperative_groups:
        raise NotImplementedError(
            "cuda_kernel: source is launched for cooperative groups, want a kernel whose blocks do not wait for others"
        )
    return source.code, getattr(source, "name", name) if name is None else name, dict(options=tuple(source.options))


def _elementwise(kernel: Any) -> tuple[str, str, dict[str, Any]]:
    """A kernel with a thread for each element: all operands but `raw` ones have one shape."""
    arrays = [each for each in kernel.params if each.name != "_ind"]
    variables = list(dict.fromkeys(each.ctype for each in arrays if each.dtype is None))
    if unknown := [each.ctype for each in arrays if each.dtype is not None and each.ctype not in DTYPES]:
        raise TypeError(f"cuda_kernel: {kernel.name} has the type {unknown[0]} of cupy, want a type of C++")
    if more := sorted({"loop_prep", "after_loop"} & {*kernel.kwargs}):
        raise NotImplementedError(f"cuda_kernel: {kernel.name} has {more[0]}, want an ElementwiseKernel without it, or a RawKernel")
    outputs = {each.name for each in kernel.out_params}
    pointers = [f"{'' if each.name in outputs else 'const '}{each.ctype}* {_pointer(each)}" for each in arrays]
    elements = [
        f"{'' if each.name in outputs else 'const '}{each.ctype}& {each.name} = {_pointer(each)}[i];" for each in arrays if not each.raw
    ]
    template = f"template <{', '.join(f'typename {each}' for each in variables)}>\n" if variables else ""
    source = f"""{kernel.kwargs.get("preamble", getattr(kernel, "preamble", ""))}
{template}__global__ void {kernel.name}({", ".join(pointers)}, long long _n) {{
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < _n; i += (long long)gridDim.x * blockDim.x) {{
    {" ".join(elements)}
    {kernel.operation};
  }}
}}
"""

    def dtypes(*operands: jax.ShapeDtypeStruct) -> Mapping[str, np.dtype]:
        found: dict[str, np.dtype] = {}
        for each, x in zip(kernel.in_params, operands, strict=False):
            if each.dtype is None and found.setdefault(each.ctype, x.dtype) != x.dtype:
                raise TypeError(
                    f"kernel {kernel.name}: {each.name} is {x.dtype}, want {found[each.ctype]} as the others of type {each.ctype}"
                )
        if missing := [each for each in variables if each not in found]:
            raise TypeError(f"kernel {kernel.name}: no operand has the type {missing[0]}, want one that says which it is")
        return found

    def shape(*operands: jax.ShapeDtypeStruct) -> tuple[int, ...]:
        shapes = {x.shape for each, x in zip(kernel.in_params, operands, strict=False) if not each.raw}
        if len(shapes) != 1:
            raise TypeError(f"kernel {kernel.name}: its operands have the shapes {sorted(shapes)}, want one: jnp.broadcast_arrays")
        return shapes.pop()

    def out(*operands):
        known = dtypes(*operands)
        return tuple(jax.ShapeDtypeStruct(shape(*operands), known.get(each.ctype, each.dtype)) for each in kernel.out_params)

    return (
        source,
        kernel.name,
        dict(
            grid=lambda *operands: -(-math.prod(shape(*operands)) // _THREADS),
            block=_THREADS,
            out=out,
            scalars=lambda *operands: {"_n": math.prod(shape(*operands))},
            templates=lambda *operands: tuple(dtypes(*operands)[each] for each in variables),
            options=tuple(kernel.kwargs.get("options", ())),
        ),
    )


def _pointer(parameter: Any) -> str:
    return parameter.name if parameter.raw else f"_{parameter.name}"
