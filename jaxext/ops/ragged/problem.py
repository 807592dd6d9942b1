"""Comparison of a ragged product's kernels with XLA."""

from __future__ import annotations

from jaxext.core.call import Call


def slower(call: Call) -> str | None:
    """The reason why XLA is expected to be as fast at a ragged product, or None: it multiplies the rows by every group's matrix, or block
    by block in a loop."""
    return "one group makes a plain matrix product, in which XLA (cuBLAS) is expected to be as fast" if call.sizes["G"] == 1 else None
