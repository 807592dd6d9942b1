"""Reads the resources and the important instructions of every CUDA kernel in the compiled module, without a GPU.

A row describes one kernel for one architecture.  Kernels that the module holds as PTX, for future GPUs, are assembled here for the known
architectures; on a GPU the driver's assembler decides.  `LAWS` say what is wrong with a row.  Speed needs a device and is not reported.
"""

from __future__ import annotations

import collections
import concurrent.futures
import ctypes
import dataclasses
import importlib.util
import os
import pathlib
import re
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from jaxext.backends.cuda import cuda_binding
from jaxext.kernels._launch import SHARED_MEMORY

from .machine_code import access_bytes, find, instructions, tool

ONLY = ("weight_only", "wide_weight_only")  # families that Triton has not
NEWER = (100, 120)  # the architectures for which PTX is assembled: that for 9.0, and none that tests keep for others
DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")  # jaxext::Dtype
ELEMENTS = {
    "float": "float32",
    "__nv_bfloat16": "bfloat16",
    "__half": "float16",
    "cutlass::bfloat16_t": "bfloat16",
    "cutlass::half_t": "float16",
    "cutlass::float_e4m3_t": "float8_e4m3fn",
    "cutlass::float_e5m2_t": "float8_e5m2",
}
MATMUL_ROLES = ("nn", "nt", "tn")
CONV_ROLES = ("fprop", "dgrad", "wgrad")

_FUNCTION = re.compile(r"^\s*Function : (\w+)\n", re.MULTILINE)
_RESOURCES = re.compile(r"Function (\w+):\s*REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_ATTRIBUTES = re.compile(r"^\.nv\.info\.(\w+)\n(.*?)(?=^\.)", re.MULTILINE | re.DOTALL)
_BARRIERS = re.compile(r"EIATTR_NUM_BARRIERS\s+Format:\s*\w+\s+Value:\s*0x([0-9a-f]+)")
_NAME = re.compile(
    r"jaxext::(?:sm90|depthwise|causal|weight_only)::"
    r"(Matmul|RaggedProduct|ScaledProduct|GramProduct|Convolution|GatherLine|GatherPlane|GatherMma|Wgrad|CausalForward|CausalBackward|WeightOnlyKernel|WideWeightOnlyKernelOf|PiecesKernelOf)<([^<>]*)"
)  # up to a template among the arguments


def rows_of(module: pathlib.Path, tables: Iterable[dict], archs: Collection[int]) -> Iterator[dict]:
    """The rows of the kernels in a compiled module, with the facts from its tables."""
    told = {identity(row): row for row in tables}
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        found = images(module, pathlib.Path(folder), archs)
        for image, kernels in zip(found, pool.map(kernels_in, found), strict=True):
            for row in kernels:
                entry = told.get(identity(row), {})
                dynamic = {"stages": entry.get("stages"), "shared": entry.get("shared", row["static"]), "told": bool(entry)}
                yield {"arch": image.arch, "source": image.source} | row | dynamic


@dataclasses.dataclass(frozen=True)
class Image:
    """A compile unit's code for one architecture."""

    arch: str
    source: str  # "code" or "PTX"
    path: pathlib.Path


def images(module: pathlib.Path, folder: pathlib.Path, archs: Collection[int]) -> list[Image]:
    for kind in ("elf", "ptx"):
        tool("cuobjdump", f"-x{kind}", "all", module.resolve(), cwd=folder)
    compiled = [Image(path.suffixes[-2].removeprefix(".sm_"), "code", path) for path in sorted(folder.glob("*.cubin"))]
    assembled = [Image(str(arch), "PTX", path) for path in sorted(folder.glob("*.sm_90.ptx")) for arch in NEWER]
    return [image for image in compiled + assembled if not archs or int(image.arch.rstrip("af")) in archs]


def kernels_in(image: Image) -> list[dict]:
    cubin = image.path
    if image.source == "PTX":
        cubin = image.path.with_suffix(f".{image.arch}")
        tool("ptxas-blackwell", f"--gpu-name=sm_{image.arch}", image.path, "-o", cubin)
    resources = {name: numbers for name, *numbers in _RESOURCES.findall(tool("cuobjdump", "-res-usage", cubin))}
    attributes = dict(_ATTRIBUTES.findall(tool("cuobjdump", "-elf", cubin)))
    _, *parts = _FUNCTION.split(tool("cuobjdump", "-sass", cubin))
    rows = []
    for function, code in zip(parts[::2], parts[1::2], strict=True):
        registers, stack, static, local = map(int, resources[function])
        barriers = _BARRIERS.search(attributes.get(function, ""))
        used = {
            "registers": registers,
            "stack": stack,
            "static": static,
            "local": local,
            "barriers": int(barriers[1], 16) if barriers else 0,
        }
        rows.append({"function": function} | describe(demangled(function)) | used | count(code))
    return rows


def count(code: str) -> dict:
    """The counts of the important instructions in a function's disassembly; accesses to global memory by width."""
    counted, loads, stores, end = collections.Counter(), collections.Counter(), collections.Counter(), 0
    for place, name, modifiers, operands in instructions(code):
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


def describe(name: str) -> dict:
    """A kernel by the arguments of its template in csrc/, under the names that the module's tables use."""
    found = _NAME.search(name)
    if not found:
        return {"kernel": "unknown", "config": name[:60]}
    template, arguments = found[1], [argument.rpartition(")")[2] for argument in found[2].split(", ")]  # without casts to enumerations
    if template == "Matmul":
        role, operands, result, m, n, k, cluster, schedule = map(int, arguments[:-1])
        fused = arguments[-1] == "true"
        return {
            "kernel": f"matmul_{MATMUL_ROLES[role]}",
            "fused": fused,
            "operands": DTYPES[operands],
            "result": DTYPES[result],
            "config": f"{m}x{n}x{k}, {'ping-pong' if schedule else 'cooperative'}, cluster {cluster}" + (", epilogue" if fused else ""),
            **{"tile_m": m, "tile_n": n, "tile_k": k, "cluster_m": cluster, "pingpong": schedule},
        }
    if template == "RaggedProduct":
        role, m, n, cluster = (int(arguments[i]) for i in (0, 2, 3, 4))
        return {
            "kernel": f"ragged_{MATMUL_ROLES[role]}",
            "operands": ELEMENTS[arguments[1]],
            "config": f"{m}x{n}, cluster {cluster}",
            **{"tile_m": m, "tile_n": n, "cluster_n": cluster},
        }
    if template == "ScaledProduct":
        m, n, cluster = map(int, arguments[2:5])
        return {
            "kernel": "scaled",
            "operands": ELEMENTS[arguments[0]],
            "second": ELEMENTS[arguments[1]],
            "config": f"{m}x{n}, cluster {cluster}",
            **{"tile_m": m, "tile_n": n, "cluster_m": cluster},
        }
    if template == "GramProduct":
        m, n = map(int, arguments[1:3])
        return {
            "kernel": "gram",
            "operands": ELEMENTS[arguments[0]],
            "config": f"{m}x{n}, cluster 2",
            **{"tile_m": m, "tile_n": n, "cluster_m": 2},
        }
    if template == "PiecesKernelOf":
        (pieces,) = map(int, arguments)
        return {
            "kernel": "pieces",
            "operands": "float32",
            "config": f"{pieces} pieces, 128x128",
            **{"pieces": pieces, "tile_m": 128, "tile_n": 128},
        }
    if template == "Convolution":
        role, rank, m, n, cluster = (int(arguments[i]) for i in (0, 1, 3, 4, 5))
        return {
            "kernel": f"conv{rank}d_{CONV_ROLES[role]}",
            "operands": ELEMENTS[arguments[2]],
            "config": f"{m}x{n}, cluster {cluster}",
            **{"tile_m": m, "tile_n": n, "cluster": cluster},
        }
    if template.startswith("Causal"):
        return _describe_causal(template, *arguments)
    if template == "WeightOnlyKernel":
        bits, tiles, columns = map(int, arguments[1:])
        return {
            "kernel": "weight_only",
            "operands": ELEMENTS[arguments[0]],
            "config": f"int{bits}, {8 * tiles}x{8 * tiles * columns}",
            "vector": columns,
            "access": columns * bits // 8,
        }
    if template == "WideWeightOnlyKernelOf":
        bits, m = map(int, arguments[1:])
        return {
            "kernel": "wide_weight_only",
            "operands": ELEMENTS[arguments[0]],
            "config": f"int{bits}, {m}x256",
            **{"bits": bits, "tile_m": m, "tile_n": 256},
        }
    if template == "GatherMma":
        return {
            "kernel": "depthwise_mma",
            "operands": ELEMENTS[arguments[0]],
            "config": f"8 channels, {arguments[1]} rows" + (", epilogue" if arguments[2].endswith("Finish") else ""),
            "vector": 8,
            "rows": int(arguments[1]),
        }
    element, vector, taps, *flags = arguments
    apart, many = flags[:1] == ["false"], flags[1:2] == ["true"]
    walk = {"GatherLine": "line", "GatherPlane": "plane", "Wgrad": "sums"}[template]
    return {
        "kernel": "depthwise_wgrad" if template == "Wgrad" else "depthwise_gather",  # fprop and dgrad are one kernel
        "operands": ELEMENTS[element],
        "config": f"{walk}, {vector} channels, {taps if int(taps) else 'any'} taps"
        + (", apart" if apart else "")
        + (", many" if many else "")
        + (", epilogue" if flags and flags[-1].endswith("Finish") else ""),
        "vector": int(vector),
        **({"many": True} if many else {}),
    }


def _describe_causal(template: str, element: str, vector: str, *which: str) -> dict:
    """Taps are those that stay in registers."""
    if template == "CausalForward":
        taps = ("4 taps", "up to 4 taps", "any taps")[int(which[0])]
    else:
        taps = f"{'up to ' * (which[1] == 'false')}{which[0]} taps"
    return {
        "kernel": "causal_forward" if template == "CausalForward" else "causal_backward",
        "operands": ELEMENTS[element],
        "config": f"{vector} channels, {taps}",
        "vector": int(vector),
        "access": int(vector) * (4 if element == "float" else 2),
    }


def identity(row: dict) -> tuple:
    """The fields that identify a row."""
    family = "conv" if "rank" in row else "ragged" if "cluster_n" in row else "matmul"
    of_product = "scaled" if "second" in row else f"{family}_{row.get('role')}"
    of_product = "wide_weight_only" if "bits" in row else "pieces" if "pieces" in row else of_product
    of_product = "gram" if "cluster_m" in row and not {"role", "second", "kernel"} & row.keys() else of_product
    kernel = row.get("kernel") or (f"conv{row['rank']}d_{row['role']}" if "rank" in row else of_product)
    names = {
        "matmul": ("tile_k", "cluster_m", "pingpong", "result", "fused"),
        "ragged": ("cluster_n",),
        "scaled": ("cluster_m", "second"),
        "gram": ("cluster_m",),
        "wide": ("bits",),
        "pieces": ("pieces",),
    }.get(kernel.partition("_")[0], ("cluster",))
    return kernel, *(row.get(name) for name in ("operands", "tile_m", "tile_n", *names))


def demangled(function: str) -> str:
    """The names, demangled by the C++ library, which the module needs anyway."""
    demangle = ctypes.CDLL("libstdc++.so.6")["__cxa_demangle"]
    demangle.restype = ctypes.c_void_p
    text = demangle(function.encode(), None, None, None)
    return ctypes.string_at(text).decode() if text else function


def hopper(row: dict) -> bool:
    return row["arch"] == "90a"


def vectorised(row: dict) -> bool:
    return row.get("vector", 1) > 1


def access(row: dict) -> str:
    """Bytes of a load or store of a vector."""
    return str(row.get("access", 16))


def sums(row: dict) -> bool:
    """Whether its results, or some, are sums, which go element by element."""
    return "wgrad" in row["kernel"] or row["kernel"] == "causal_backward"


def stores_lines(row: dict) -> bool:
    gradient = row["kernel"].startswith("conv") and "fprop" not in row["kernel"]  # what fprop's epilogue saves goes by pairs
    return row["kernel"].startswith(("ragged", "scaled", "gram")) or gradient or vectorised(row) and not sums(row)


# What no kernel may do -> whether a row does it.
LAWS: dict[str, Callable[[dict], bool]] = {
    # registers that do not suffice cost more than what the kernel saves
    "spills": lambda row: row["spills"] > 0,
    "has local memory": lambda row: row["local"] + row["stack"] > 0,
    "more shared memory than a block gets": lambda row: row["shared"] > SHARED_MEMORY[int(row["arch"].rstrip("af"))],
    # swizzles go by the bits of an address, so tiles begin at multiples of 1 KiB: behind the system's, and nothing else, the dynamic do
    "static shared memory misaligns the swizzled tiles": lambda row: hopper(row) and row["static"] > 1 << 10,
    # what sm_90a is for
    "not on the tensor cores": lambda row: (
        hopper(row) and row["wgmma"] == 0 or row["kernel"] in ("weight_only", "depthwise_mma") and row["mma"] == 0
    ),
    # a line meets each filter row once, in two channels
    "not two products for each filter row": lambda row: row["kernel"] == "depthwise_mma" and row["mma"] != 2 * row["rows"],
    "fewer than two blocks on a multiprocessor": lambda row: row["kernel"] == "depthwise_mma" and row["registers"] > 128,
    "left factors not multiplied from registers": lambda row: (
        row["kernel"] in ("wide_weight_only", "pieces") and row["of_registers"] < row["wgmma"]
    ),
    # three products of two pieces, six of three, of 16 elements of the sum each; more would be what a compiler took apart
    "not one instruction for each product of pieces": lambda row: (
        row["kernel"] == "pieces" and row["wgmma"] != {2: 6, 3: 12}[row["pieces"]]
    ),
    "operands not loaded by TMA": lambda row: hopper(row) and row["tma"] == 0,
    "pixels not gathered by TMA": lambda row: row["kernel"].startswith("conv") and row["im2col"] == 0,
    "nothing shared in a cluster": lambda row: (
        max(row.get(name, 1) for name in ("cluster", "cluster_m", "cluster_n")) > 1 and row["multicast"] == 0
    ),
    "results not stored by TMA": lambda row: row["kernel"].startswith("matmul") and row["tma_stores"] == 0,
    # a memory-bound kernel: the filter, which is small, and sums go element by element, and the numbers of sequences; channels of x that
    # several filters share are fewer than a vector's
    "narrow loads": lambda row: (
        vectorised(row)
        and (access(row) not in row["loads"] or "wgrad" in row["kernel"] and "many" not in row and set(row["loads"]) != {"16"})
    ),
    "narrow stores": lambda row: (
        row["kernel"].startswith("matmul")  # TMA stores all its results
        and bool(row["stores"])
        or stores_lines(row)
        and (set(row["stores"]) != {"16"} if "many" not in row else "16" not in row["stores"])
        or vectorised(row)
        and "causal" in row["kernel"]
        and access(row) not in row["stores"]
    ),
    # profiles show it, and this table reads it
    "named after nothing in csrc": lambda row: row["kernel"] == "unknown",
    "not in the module's table": lambda row: hopper(row) and not row["told"],
}


def offences(row: dict) -> list[str]:
    return [law for law, broken in LAWS.items() if broken(row)]


COLUMNS = {
    "registers": 10,
    "stack": 6,
    "spills": 7,
    "shared": 7,
    "barriers": 9,
    "wgmma": 6,
    "tma": 4,
    "im2col": 7,
    "multicast": 10,
    "tma_stores": 11,
}
HEADER = f"{'':79}{'sm':>5}" + "".join(f"{name:>{width}}" for name, width in COLUMNS.items()) + "   bytes  loads, stores"


def line(row: dict) -> str:
    numbers = " -> ".join(dict.fromkeys(row[slot] for slot in ("operands", "result") if slot in row))
    numbers = f"{numbers}, {row['second']}" if row.get("second", numbers) != numbers else numbers
    where = f"{row['kernel']:17}{numbers:27}{row['config'][:34]:35}{row['arch']:>5}{'' if row['source'] == 'code' else '*':1}"
    columns = "".join(f"{row[name]:>{width}}" for name, width in COLUMNS.items())[1:]
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


def own() -> pathlib.Path | None:
    """The module compiled with jaxext.  It is read but not loaded, so it need not fit this jaxlib."""
    spec = importlib.util.find_spec("jaxext._cuda_module")
    return pathlib.Path(spec.origin) if spec and spec.origin else None


def load(path: pathlib.Path) -> Any:
    spec = importlib.util.spec_from_file_location("_cuda_module", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tables(module: Any) -> list[dict]:
    """A row for each Hopper kernel in the module's tables."""
    families = (
        module.matmul_kernels,
        module.pieces_kernels,
        module.ragged_kernels,
        module.scaled_kernels,
        module.gram_kernels,
        module.wide_weight_only_kernels,
        module.conv_kernels,
    )
    return [row for kernels in families for row in kernels()]


def collect(path: pathlib.Path, module: Any, archs: Collection[int] = ()) -> list[dict]:
    """The rows for these architectures, or for all."""
    rows = rows_of(path, tables(module), archs)
    return sorted(rows, key=lambda row: (row["kernel"], row["arch"], row["source"], row.get("operands", ""), row["config"]))
