"""A product of scaled numbers on one device as the problem of a kernel."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxext.backends.fields import DTYPES, PRESETS, precision_of
from jaxext.backends.kernel import KernelImplementation
from jaxext.kernels.scaled.problem import Problem


class ScaledKernels(KernelImplementation):
    problem_type: type[Any] = Problem

    def problem(self, call):
        """Results that are no wider than 8 bits are float32 to the kernel."""
        dtypes = {slot: call.dtypes[slot].name for slot in call.factors}
        packed = dtypes.get("w") == "int4"
        dtypes |= {"w": "int8"} if packed else {}
        for slot, name in dtypes.items():
            if name not in DTYPES:
                return f"{slot} is {name}, want one of {sorted(DTYPES)}" + (", or int4" if slot == "w" else "")
        if (precision := precision_of(call.precision, map(np.dtype, dtypes.values()))) is None:
            return f"precision is {call.precision}, want one of {sorted(PRESETS)}, or one that the operands have of themselves"
        return self.problem_type(
            name=call.op,
            role=call.op.rpartition("_")[2],
            **self.sizes(call),
            dtypes=(*(DTYPES[name] for name in dtypes.values()), DTYPES[call.dtype.name] if call.dtype.itemsize > 1 else "fp32"),
            scaled=tuple(slot for slot in "xwy" if f"{slot}_scale" in call.dtypes),
            packed=packed,
            precision=precision,
            arch=self.arch(call),
            device=call.device,
        )

    def sizes(self, call) -> dict[str, int]:
        """The sizes of the problem: of the batch, of whole axes, and how many blocks they have."""
        whole = {label: call.sizes[blocks] * call.sizes[label] for blocks, label in ("IM", "SK", "JN")}
        return whole | {label: call.sizes[label] for label in "BISJ"}
