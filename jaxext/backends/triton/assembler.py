"""Assembles the kernels of a lowered program as jaxlib does when they are first launched.

jax-triton lowers a kernel to a custom call that holds its PTX.  What `ptxas` refuses there would end the program at its first launch,
so a kernel that nobody named is assembled when it is chosen.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import zlib
from collections.abc import Iterator
from typing import Any

import jax


def find() -> str | None:
    """The `ptxas` that jaxlib runs on this machine, or None.

    jaxlib looks in bin/ of the working directory, on the PATH, in the CUDA toolkit, and in NVIDIA's wheel beside jax's plugin.
    """
    folder = re.search(r"--xla_gpu_cuda_data_dir=(\S+)", os.environ.get("XLA_FLAGS", ""))
    return _found(os.getcwd(), os.environ.get("PATH"), os.environ.get("CUDA_HOME", "/usr/local/cuda"), folder[1] if folder else "")


@functools.cache
def _found(here: str, path: str | None, toolkit: str, data_dir: str) -> str | None:
    """The first `ptxas` in these places."""
    roots = [pathlib.Path(root) for root in (data_dir, toolkit, "/usr/local/cuda") if root]
    for plugin, wheel in (("jax_cuda13_plugin", "cu13"), ("jax_cuda12_plugin", "cuda_nvcc")):
        if (spec := importlib.util.find_spec(plugin)) and spec.origin:
            roots.append(pathlib.Path(spec.origin).parents[1] / "nvidia" / wheel)
    places = [str(pathlib.Path(here, "bin", "ptxas")), shutil.which("ptxas", path=path), *(str(root / "bin" / "ptxas") for root in roots)]
    return next((place for place in places if place and os.access(place, os.X_OK)), None)


def failure(lowered: jax.stages.Lowered, ptxas: str) -> str | None:
    """Return what the assembler says against a kernel of the program, or None."""
    for ptx in kernels(lowered):
        target = ptx.partition(".target ")[2].split()[0].rstrip(",")
        with tempfile.TemporaryDirectory() as folder:
            source = pathlib.Path(folder, "kernel.ptx")
            source.write_text(ptx)
            command = [ptxas, f"--gpu-name={target}", source, "-o", source.with_suffix(".cubin")]
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            return f"{ptxas}: {done.stdout.strip()}"
    return None


def kernels(lowered: jax.stages.Lowered) -> Iterator[str]:
    """The PTX of each call of a Triton kernel."""
    for _, description in calls(lowered):
        yield from _ptx_in(description)


def calls(lowered: jax.stages.Lowered) -> Iterator[tuple[Any, bytes]]:
    """Each call of a Triton kernel in a program, and its description, which jax-triton compresses."""
    module: Any = lowered.compiler_ir("stablehlo")
    for op in _within(module.operation):
        if op.name == "stablehlo.custom_call" and "triton_kernel_call" in str(op.attributes["call_target_name"]):
            newer = "mhlo.backend_config" in op.attributes  # jax-triton 0.4
            config = op.attributes["mhlo.backend_config"]["opaque"] if newer else op.attributes["backend_config"]
            yield op, zlib.decompress(config.value_bytes)


def _within(op: Any) -> Iterator[Any]:
    for region in op.regions:
        for block in region:
            for inner in block:
                yield inner
                yield from _within(inner.operation)


def _ptx_in(message: bytes) -> Iterator[str]:
    """The fields of a serialized protocol buffer, and of the messages in it, that are PTX."""
    at = 0
    while at < len(message):
        tag, at = _number(message, at)
        if tag & 7 == 0:
            _, at = _number(message, at)
        elif tag & 7 == 2:
            size, at = _number(message, at)
            field, at = message[at : at + size], at + size
            if b".entry" in field:
                start = field.lstrip()
                yield from [field.decode()] if start.startswith((b"//", b".version")) else _ptx_in(field)
        else:
            at += {1: 8, 5: 4}[tag & 7]


def _number(message: bytes, at: int) -> tuple[int, int]:
    """A varint, and where it ends."""
    value = shift = 0
    while True:
        value, shift, at = value | (message[at] & 127) << shift, shift + 7, at + 1
        if message[at - 1] < 128:
            return value, at
