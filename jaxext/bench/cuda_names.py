"""The CUDA kernels by name: what the arguments of a kernel's template say, under the names that the module's tables use."""

from __future__ import annotations

import ctypes
import re

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

_NAME = re.compile(
    r"jaxext::(?:sm90|depthwise|causal|weight_only)::"
    r"(Matmul|RaggedProduct|ScaledProduct|GramProduct|Convolution|GatherLine|GatherPlane|GatherMma|WgradMma|Wgrad|CausalForward|CausalBackward|WeightOnlyKernel|WideWeightOnlyKernelOf|PiecesKernelOf)<([^<>]*)"
)  # up to a template among the arguments
# Of a family that has no words of its own here.
_OTHER = re.compile(r"jaxext::(?!sm90:|depthwise:|causal:|weight_only:)(\w+)::(?:\(anonymous namespace\)::)?\w+<([^<>]*)>")


def describe(name: str) -> dict:
    """A kernel by the arguments of its template in csrc/, under the names that the module's tables use."""
    found = _NAME.search(name)
    if not found and (other := _OTHER.search(name)):
        element, *numbers = other[2].replace("(int)", "").split(", ")
        return {"kernel": other[1], "operands": ELEMENTS.get(element, element), "config": ", ".join(numbers)}
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
        (m, n, cluster), ragged = map(int, arguments[2:5]), arguments[-1] == "true"
        return {
            "kernel": "ragged_scaled" if ragged else "scaled",
            "operands": ELEMENTS[arguments[0]],
            "second": ELEMENTS[arguments[1]],
            "config": f"{m}x{n}, cluster {cluster}",
            **{"tile_m": m, "tile_n": n, "cluster_n" if ragged else "cluster_m": cluster},
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
    if template in ("GatherMma", "WgradMma"):
        return {
            "kernel": "depthwise_mma" if template == "GatherMma" else "depthwise_mma_wgrad",
            "operands": ELEMENTS[arguments[0]],
            "config": f"8 channels, {arguments[1]} rows" + (", epilogue" if arguments[-1].endswith("Finish") else ""),
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


# What else identifies a kernel of a family, beside its name, operands and tile.
_FIELDS = {
    "matmul": ("tile_k", "cluster_m", "pingpong", "result", "fused"),
    "ragged": ("cluster_n",),
    "scaled": ("cluster_m", "second"),
    "ragged_scaled": ("cluster_n", "second"),
    "gram": ("cluster_m",),
    "wide": ("bits",),
    "pieces": ("pieces",),
    "conv": ("cluster",),
}


def identity(row: dict) -> tuple:
    """The fields that identify a row of the module's tables, or a kernel by its name: of a family without words here, its config."""
    if "family" not in row:
        kernel, config = row["kernel"], row["config"]
    else:
        family = {"conv": f"conv{row.get('rank')}d", "weight_only": "wide_weight_only"}.get(row["family"]) or row["family"]
        kernel = f"{family}_{row['role']}" if "role" in row else family
        config = ", ".join(str(value) for name, value in row.items() if name not in ("family", "operands", "stages", "shared"))
    names = _FIELDS.get(re.sub(r"\dd$", "", kernel.partition("_")[0]))
    return kernel, row.get("operands"), *((config,) if names is None else (row.get(name) for name in ("tile_m", "tile_n", *names)))


def demangled(function: str) -> str:
    """The names, demangled by the C++ library, which the module needs anyway."""
    demangle = ctypes.CDLL("libstdc++.so.6")["__cxa_demangle"]
    demangle.restype = ctypes.c_void_p
    text = demangle(function.encode(), None, None, None)
    return ctypes.string_at(text).decode() if text else function
