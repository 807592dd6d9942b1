"""A causal convolution on one device as the problem of a kernel, and when a kernel is expected to be faster than XLA."""

from __future__ import annotations

import numpy as np

from jaxext.backends.fields import DTYPES
from jaxext.core.call import Call
from jaxext.kernels.causal.problem import CausalProblem
from jaxext.kernels.epilogue import Epilogue


def causal_problem(call: Call, arch: int) -> CausalProblem | str:
    """A call of `causal_conv1d`, or of its backward, as a problem, or the reason why it is not one."""
    for name in ("seq_idx", "idx_of_states"):
        if name in call.dtypes and call.dtypes[name] != np.int32:
            return f"{name} is {call.dtypes[name].name}, want int32"
    dtypes = {}
    for name in ("x", "w", "bias", "initial_states"):
        if name in call.dtypes:
            if call.dtypes[name].name not in DTYPES:
                return f"{name} is {call.dtypes[name].name}, want one of {sorted(DTYPES)}"
            dtypes[name] = DTYPES[call.dtypes[name].name]
    return CausalProblem(
        name=call.op,
        role="backward" if call.op.endswith("_backward") else "forward",
        **{label: call.sizes[label] for label in "BTCJ"},
        dtypes=(dtypes["x"], dtypes["w"], dtypes["x"]),
        epilogue=Epilogue(activation=dict(call.static.items)["activation"], bias=dtypes.get("bias")),
        state=dtypes.get("initial_states"),
        idx="seq_idx" in call.dtypes,
        idx_of_states="idx_of_states" in call.dtypes,
        arch=arch,
        device=call.device,
    )


def slower(call: Call) -> str | None:
    """The reason why XLA is expected to be as fast at a causal convolution, which it computes in several kernels, or None."""
    return "a sequence of one step is a few elementwise operations, which XLA fuses" if call.sizes["T"] == 1 else None
