"""A convolution on one device as the problem of a kernel, and when a kernel is expected to be faster than XLA."""

from __future__ import annotations

from typing import Any

from jaxext.backends.fields import common_fields
from jaxext.backends.kernel import KernelImplementation
from jaxext.kernels.geometry import ConvProblem
from jaxext.ops.conv import preference


class ConvKernels(KernelImplementation):
    def problem(self, call):
        window = call.window
        assert window is not None
        if window.rank > 3:
            return f"{window.rank} spatial axes, want 3 at most"
        common = common_fields(call, self.arch(call))
        if isinstance(common, str):
            return common

        def three(values, missing) -> Any:
            return (missing,) * (3 - window.rank) + tuple(values)

        return ConvProblem(
            **{label: call.sizes[label] for label in "BNGCK"},
            input=three(window.input, 1),
            filter=three(window.filter, 1),
            output=three(window.output, 1),
            stride=three(window.stride, 1),
            low=three((low for low, _ in window.padding), 0),
            input_dilation=three(window.input_dilation, 1),
            filter_dilation=three(window.filter_dilation, 1),
            **common,
        )

    def slower(self, call):
        row = preference.convolution(call)
        return None if row.kernel else row.reason
