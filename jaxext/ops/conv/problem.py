"""A convolution on one device as the problem of a kernel."""

from __future__ import annotations

from typing import Any

from jaxext.backends.fields import common_fields
from jaxext.core.call import Call
from jaxext.kernels.geometry import ConvProblem


def conv_problem(call: Call, arch: int) -> ConvProblem | str:
    """A call of a convolution as a problem, or the reason why it is not one."""
    window = call.window
    assert window is not None
    if window.rank > 3:
        return f"{window.rank} spatial axes, want 3 at most"
    common = common_fields(call, arch)
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
