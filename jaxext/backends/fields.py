"""The fields of a kernel's problem that follow from a `Call`: dtypes, precision and epilogue, or the reason why no kernel has these."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxext.core.call import Call
from jaxext.kernels.epilogue import Epilogue
from jaxext.kernels.matmul.problem import MatmulProblem

# Short names of the dtypes that kernels support.
DTYPES = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
    "int32": "i32",
    "int8": "i8",
}

# How float32 operands are multiplied, by the requested precision.  DEFAULT and HIGH are TF32, as XLA's defaults on GPUs.
PRESETS = {
    "DEFAULT": "tf32",
    "TF32_TF32_F32": "tf32",
    "TF32_TF32_F32_X3": "tf32x3",
    "BF16_BF16_F32_X3": "bf16x3",
    "BF16_BF16_F32_X6": "bf16x6",
    "F32_F32_F32": "ieee",
}


def matmul_problem(call: Call, kind: type[MatmulProblem], arch: int) -> MatmulProblem | str:
    """A call of a form of matrix products as a problem of this class, which has a field for each label, or the reason why it is not one."""
    common = common_fields(call, arch)
    labels = (field.name for field in dataclasses.fields(kind) if field.name in call.sizes)
    return common if isinstance(common, str) else kind(**{label: call.sizes[label] for label in labels}, **common)


def common_fields(call: Call, arch: int) -> dict[str, Any] | str:
    """The part of a problem that is the same for all kernels of products and convolutions."""
    numbers = factor_fields(call, arch)
    if isinstance(numbers, str):
        return numbers
    epilogue = _epilogue(call)
    return epilogue if isinstance(epilogue, str) else dict(**numbers, epilogue=epilogue)


def named_dtypes(dtypes: Mapping[str, np.dtype]) -> dict[str, str] | str:
    """The short name of the dtype of each slot, or the reason why kernels do not support one."""
    for slot, dtype in dtypes.items():
        if dtype.name not in DTYPES:
            return f"{slot} is {dtype.name}, want one of {sorted(DTYPES)}"
    return {slot: DTYPES[dtype.name] for slot, dtype in dtypes.items()}


def factor_fields(call: Call, arch: int) -> dict[str, Any] | str:
    """The names of a product, and what is multiplied how."""
    factors = {slot: call.dtypes[slot] for slot in call.factors}
    dtypes = named_dtypes({**factors, call.open: call.dtype})
    if isinstance(dtypes, str):
        return dtypes
    precision = precision_of(call.precision, factors.values())
    if precision is None:
        return f"precision is {call.precision}, want one of {sorted(PRESETS)}, or one that the operands have of themselves"
    role = call.product.rpartition("_")[2]
    return dict(name=call.op, role=role, dtypes=tuple(dtypes.values()), precision=precision, arch=arch, device=call.device)


def _epilogue(call: Call) -> Epilogue | None | str:
    """The epilogue of a call as kernels know it, or the reason why they do not."""
    if call.operation is None:
        return None
    added = named_dtypes({slot: call.dtypes[slot] for slot in ("bias", "residual", "scale") if slot in call.dtypes})
    if isinstance(added, str):
        return added
    gated = call.window is None and "T" in call.sizes  # of a convolution along three axes T is an axis of the filter
    return Epilogue(activation=call.static.activation, gated=gated, saves=bool(call.further), **added)


def precision_of(asked: Any, dtypes) -> str | None:
    """The kernels' name of a precision, or None if they do not support it."""
    dtypes = {np.dtype(dtype) for dtype in dtypes}
    if isinstance(asked, lax.DotAlgorithmPreset):
        # For operands of these dtypes the preset is what kernels do anyway: exact products, accumulated in float32.
        own = {
            "F16_F16_F32": {np.dtype(np.float16)},
            "BF16_BF16_F32": {np.dtype(jnp.bfloat16)},
            "ANY_F8_ANY_F8_F32": {np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2)},
        }.get(asked.name)
        return "ieee" if own and dtypes <= own else PRESETS.get(asked.name)
    if asked is None or isinstance(asked, tuple) and all(isinstance(p, lax.Precision) for p in asked):
        return "ieee" if asked is not None and lax.Precision.HIGHEST in asked else "tf32"
    return None
