"""Laws for CUDA kernels, read from their rows: no spilled registers, no idle tensor cores, no narrow loads and stores."""

from __future__ import annotations

from collections.abc import Callable

from jaxext.kernels.launch import SHARED_MEMORY


def hopper(row: dict) -> bool:
    return row["arch"] == "90a"


def vectorised(row: dict) -> bool:
    return row.get("vector", 1) > 1


def access(row: dict) -> str:
    """Bytes of a load or store of a vector."""
    return str(row.get("access", 16))


def sums(row: dict) -> bool:
    """Return whether some results of the kernel are sums, which are stored element by element."""
    return "wgrad" in row["kernel"] or row["kernel"] == "causal_backward"


def depthwise_mma(row: dict) -> bool:
    return row["kernel"].startswith("depthwise_mma")


def stores_lines(row: dict) -> bool:
    gradient = row["kernel"].startswith("conv") and "fprop" not in row["kernel"]  # what fprop's epilogue saves goes by pairs
    by_hand = hopper(row) and not row["kernel"].startswith(("matmul", "pieces", "conv", "wide"))
    return by_hand or gradient or vectorised(row) and not sums(row)


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
        hopper(row) and row["wgmma"] == 0 or (row["kernel"] == "weight_only" or depthwise_mma(row)) and row["mma"] == 0
    ),
    # a line meets each filter row once, in two channels; wgrad's loop has as many lines as rows
    "not two products for each filter row": lambda row: (
        depthwise_mma(row) and row["mma"] != 2 * row["rows"] * (row["rows"] if sums(row) else 1)
    ),
    "fewer than two blocks on a multiprocessor": lambda row: depthwise_mma(row) and row["registers"] > 128,
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
        and (access(row) not in row["loads"] or row["kernel"] == "depthwise_wgrad" and "many" not in row and set(row["loads"]) != {"16"})
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
