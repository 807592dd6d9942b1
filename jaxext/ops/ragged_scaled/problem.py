"""A ragged product of scaled numbers on one device as the problem of a kernel, and when a kernel is expected to be faster than XLA."""

from __future__ import annotations

from jaxext.kernels.ragged_scaled.problem import Problem
from jaxext.ops.scaled.problem import ScaledKernels


class RaggedScaledKernels(ScaledKernels):
    problem_type = Problem

    def sizes(self, call):
        """Rows have scales of their own, if they have any."""
        whole = {label: call.sizes[blocks] * call.sizes[label] for blocks, label in ("SK", "JN")}
        scaled_rows = "x_scale" in call.dtypes or "y_scale" in call.dtypes
        return whole | {label: call.sizes[label] for label in "BPRMGSJ"} | {"I": call.sizes["M"] if scaled_rows else 1}

    def slower(self, call):
        if call.op.endswith("_tn") and ("x_scale" in call.dtypes or "y_scale" in call.dtypes):
            return "the kernel scales factors as XLA does, whose wide rows are little beside the product, and has not been timed"
        return None  # XLA writes wide matrices of all groups to memory, and reads them again
