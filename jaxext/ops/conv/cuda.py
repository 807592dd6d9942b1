"""The implementation `cuda` of convolutions, dense and depthwise."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxext.backends.cuda.cuda_binding import Cuda, compiled, kernel_call, not_compiled_for
from jaxext.kernels.geometry import ConvProblem
from jaxext.ops.conv import cuda_dense as cuda_conv
from jaxext.ops.conv import cuda_depthwise, preference
from jaxext.ops.conv.problem import ConvKernels


class CudaConv(ConvKernels, Cuda):
    custom_calls = tuple(
        f"jaxext_{kernel}{rank}d_{name}_v1"
        for kernel in ("conv", "depthwise")
        for rank in (1, 2, 3)
        for name in ("fprop", "dgrad", "wgrad", "bias_act")
    )

    def refuses_problem(self, problem):
        family = _family(problem)
        return family.refused(problem) or (not_compiled_for(problem.arch) if family is cuda_depthwise else None)

    def family(self, problem, config):
        if _family(problem) is cuda_conv:
            return "conv"
        return "depthwise_mma" if config.lines else "depthwise"

    def yields(self, call):
        return not preference.prefers_cuda(preference.convolution(call), call)

    def configs(self, problem):
        if _family(problem) is cuda_depthwise:
            return cuda_depthwise.candidates(problem)
        return cuda_conv.candidates(problem, compiled("conv"))

    def launch(self, call, problem, config):
        depthwise = _family(problem) is cuda_depthwise  # whose kernels take any address
        stem = call.op.replace("conv", "depthwise", 1) if depthwise else call.op
        made = kernel_call(call, problem, cuda_conv.fields(problem), stem, config, aligned=not depthwise)
        return dataclasses.replace(made, describe=f"{made.describe} on tensor cores") if getattr(config, "lines", 0) else made


def _family(problem: ConvProblem) -> Any:
    """The module of the kernels that take the problem: one input channel and several groups leave nothing to a matrix product."""
    return cuda_depthwise if problem.G > 1 and problem.C == 1 else cuda_conv
