"""A causal convolution on one device as the problem of a kernel, and when a kernel is expected to be faster than XLA."""

from __future__ import annotations

import numpy as np

from jaxext.backends.fields import named_dtypes
from jaxext.backends.kernel import KernelImplementation
from jaxext.kernels.causal.problem import CausalProblem
from jaxext.kernels.epilogue import Epilogue


class CausalKernels(KernelImplementation):
    """`causal_conv1d`, and its backward as one kernel, which computes all cotangents."""

    def problem(self, call):
        for name in ("seq_idx", "idx_of_states"):
            if name in call.dtypes and call.dtypes[name] != np.int32:
                return f"{name} is {call.dtypes[name].name}, want int32"
        dtypes = named_dtypes({name: call.dtypes[name] for name in ("x", "w", "bias", "initial_states") if name in call.dtypes})
        if isinstance(dtypes, str):
            return dtypes
        return CausalProblem(
            name=call.op,
            role="backward" if call.op.endswith("_backward") else "forward",
            **{label: call.sizes[label] for label in "BTCJ"},
            dtypes=(dtypes["x"], dtypes["w"], dtypes["x"]),
            epilogue=Epilogue(activation=dict(call.static.items)["activation"], bias=dtypes.get("bias")),
            state=dtypes.get("initial_states"),
            idx="seq_idx" in call.dtypes,
            idx_of_states="idx_of_states" in call.dtypes,
            arch=self.arch(call),
            device=call.device,
        )

    def slower(self, call):
        return "a sequence of one step is a few elementwise operations, which XLA fuses" if call.sizes["T"] == 1 else None
