"""Reads the resources and the important instructions of every CUDA kernel in the compiled module, without a GPU.

A row describes one kernel for one architecture.  Kernels that the module holds as PTX, for future GPUs, are assembled here for the known
architectures; on a GPU the driver's assembler decides.  `cuda_laws` says what is wrong with a row.  Speed needs a device and is
not reported.
"""

from __future__ import annotations

import collections
import concurrent.futures
import importlib.util
import os
import pathlib
import re
import tempfile
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from jaxext.backends.cuda import cuda_binding
from jaxext.bench.cuda_names import demangled, describe, identity
from jaxext.bench.machine_code import Image, access_bytes, find, functions, images, instructions, own, tool

from .cuda_laws import offences

_RESOURCES = re.compile(r"Function (\w+):\s*REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_ATTRIBUTES = re.compile(r"^\.nv\.info\.(\w+)\n(.*?)(?=^\.)", re.MULTILINE | re.DOTALL)
_BARRIERS = re.compile(r"EIATTR_NUM_BARRIERS\s+Format:\s*\w+\s+Value:\s*0x([0-9a-f]+)")


def rows_of(module: pathlib.Path, tables: Iterable[dict], archs: Collection[int]) -> Iterator[dict]:
    """The rows of the kernels in a compiled module, with the facts from its tables."""
    told = {identity(row): row for row in tables}
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        found = images(module, pathlib.Path(folder), archs)
        for image, kernels in zip(found, pool.map(kernels_in, found), strict=True):
            for row in kernels:
                entry = told.get(identity(row), {})
                dynamic = {"stages": entry.get("stages"), "shared": entry.get("shared", row["static"]), "told": bool(entry)}
                dynamic |= {"vector": entry["vector"]} if "vector" in entry else {}
                yield {"arch": image.arch, "source": image.source} | row | dynamic


def kernels_in(image: Image) -> list[dict]:
    cubin = image.path
    if image.source == "PTX":
        cubin = image.path.with_suffix(f".{image.arch}")
        tool("ptxas-blackwell", f"--gpu-name=sm_{image.arch}", image.path, "-o", cubin)
    resources = {name: numbers for name, *numbers in _RESOURCES.findall(tool("cuobjdump", "-res-usage", cubin))}
    attributes = dict(_ATTRIBUTES.findall(tool("cuobjdump", "-elf", cubin)))
    rows = []
    for function, code in functions(tool("cuobjdump", "-sass", cubin)).items():
        registers, stack, static, local = map(int, resources[function])
        barriers = _BARRIERS.search(attributes.get(function, ""))
        used = {"registers": registers, "stack": stack, "static": static, "local": local}
        used["barriers"] = int(barriers[1], 16) if barriers else 0
        rows.append({"function": function} | describe(demangled(function)) | used | count(code))
    return rows


def count(code: str) -> dict:
    """The counts of the important instructions in a function's disassembly; accesses to global memory by width."""
    counted, loads, stores, end = collections.Counter(), collections.Counter(), collections.Counter(), 0
    for place, name, modifiers, operands, _ in instructions(code):
        end = place + 16  # bytes of an instruction
        if name == "LDG":
            loads[access_bytes(modifiers)] += 1
        elif name == "STG":
            stores[access_bytes(modifiers)] += 1
        elif name in ("LDL", "STL"):
            counted["spills"] += 1
        elif name in ("HGMMA", "QGMMA", "HMMA"):
            counted["mma" if name == "HMMA" else "wgmma"] += 1
            counted["of_registers"] += name != "HMMA" and not operands.partition(",")[2].lstrip().startswith("gdesc")
        elif name in ("UTMALDG", "UTMASTG"):
            counted.update(["tma" if name == "UTMALDG" else "tma_stores", *(m.lower() for m in modifiers if m in ("IM2COL", "MULTICAST"))])
    return {
        **{kind: counted[kind] for kind in ("spills", "wgmma", "of_registers", "mma", "tma", "im2col", "multicast", "tma_stores")},
        "loads": {str(width): loads[width] for width in sorted(loads, reverse=True)},
        "stores": {str(width): stores[width] for width in sorted(stores, reverse=True)},
        "bytes": end,
    }


COLUMNS = ("registers", "stack", "spills", "shared", "barriers", "wgmma", "tma", "im2col", "multicast", "tma_stores")
HEADER = f"{'':79}{'sm':>5}" + " ".join(("", *COLUMNS, "  bytes  loads, stores"))


def line(row: dict) -> str:
    numbers = " -> ".join(dict.fromkeys(row[slot] for slot in ("operands", "result") if slot in row))
    numbers = f"{numbers}, {row['second']}" if row.get("second", numbers) != numbers else numbers
    where = f"{row['kernel']:17}{numbers:27}{row['config'][:34]:35}{row['arch']:>5}{'' if row['source'] == 'code' else '*':1}"
    columns = " ".join(f"{row[name]:>{len(name)}}" for name in COLUMNS)
    accesses = ", ".join(" ".join(f"{n}x{width}" for width, n in row[kind].items()) for kind in ("loads", "stores"))
    return f"{where}{columns}{row['bytes']:>8}  {accesses}" + "".join(f"  !! {law}" for law in offences(row))


def missing(path: pathlib.Path | None = None) -> str | None:
    """The reason if the module, this one or jaxext's own, cannot be read, or None."""
    if path is None and not own():
        return f"no CUDA kernels: {cuda_binding.missing()}"
    try:
        find("cuobjdump")
    except FileNotFoundError as error:
        return str(error)
    return None


def load(path: pathlib.Path) -> Any:
    spec = importlib.util.spec_from_file_location("_cuda_module", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tables(module: Any) -> list[dict]:
    """The rows of the module's tables, each with the name of its family."""
    return [{"family": family} | row for family in module.families() for row in module.kernels(family)]


def collect(path: pathlib.Path, module: Any, archs: Collection[int] = ()) -> list[dict]:
    """The rows for these architectures, or for all."""
    rows = rows_of(path, tables(module), archs)
    return sorted(rows, key=lambda row: (row["kernel"], row["arch"], row["source"], row.get("operands", ""), row["config"]))
