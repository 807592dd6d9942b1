"""How a `Call` becomes a kernel's problem, or the reason why it is none: its sizes, dtypes and precision, and what is fused."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxext.forms.call import Call
from jaxext.kernels.causal.problem import CausalProblem
from jaxext.kernels.epilogue import ACTIVATIONS as ACTIVATIONS
from jaxext.kernels.epilogue import Epilogue
from jaxext.kernels.geometry import ConvProblem
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
_PRESETS = {
    "DEFAULT": "tf32",
    "TF32_TF32_F32": "tf32",
    "TF32_TF32_F32_X3": "tf32x3",
    "BF16_BF16_F32_X3": "bf16x3",
    "BF16_BF16_F32_X6": "bf16x6",
    "F32_F32_F32": "ieee",
}


def matmul_problem(call: Call, kind: type[MatmulProblem], arch: int) -> MatmulProblem | str:
    """A call of a form of matrix products as a problem of this class, which has a field for each label, or the reason why it is not one."""
    common = _common(call, arch)
    labels = (field.name for field in dataclasses.fields(kind) if field.name in call.sizes)
    return common if isinstance(common, str) else kind(**{label: call.sizes[label] for label in labels}, **common)


def scaled_problem(call: Call, kind: type[MatmulProblem], arch: int) -> MatmulProblem | str:
    """A call of a product of scaled numbers as a problem of this class, which has fields for blocks, or the reason why it is not one.

    Results that are no wider than 8 bits are float32 to the kernel.
    """
    dtypes = {slot: call.dtypes[slot].name for slot in call.factors}
    packed = dtypes.get("w") == "int4"
    dtypes |= {"w": "int8"} if packed else {}
    for slot, name in dtypes.items():
        if name not in DTYPES:
            return f"{slot} is {name}, want one of {sorted(DTYPES)}" + (", or int4" if slot == "w" else "")
    if (precision := _precision(call.precision, map(np.dtype, dtypes.values()))) is None:
        return f"precision is {call.precision}, want one of {sorted(_PRESETS)}, or one that the operands have of themselves"
    sizes = {label: call.sizes[blocks] * call.sizes[label] for blocks, label in ("IM", "SK", "JN")}
    return kind(
        name=call.op,
        role=call.op.rpartition("_")[2],
        B=call.sizes["B"],
        **sizes,
        **{blocks: call.sizes[blocks] for blocks in "ISJ"},
        dtypes=(*(DTYPES[name] for name in dtypes.values()), DTYPES[call.dtype.name] if call.dtype.itemsize > 1 else "fp32"),
        scaled=tuple(slot for slot in "xwy" if f"{slot}_scale" in call.dtypes),
        packed=packed,
        precision=precision,
        arch=arch,
        device=call.device,
    )


def conv_problem(call: Call, arch: int) -> ConvProblem | str:
    """A call of a convolution as a problem, or the reason why it is not one."""
    window = call.window
    assert window is not None
    if window.rank > 3:
        return f"{window.rank} spatial axes, want 3 at most"
    common = _common(call, arch)
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


def causal_problem(call: Call, arch: int) -> CausalProblem | str:
    """A call of `causal_conv1d`, or of its backward, as a problem, or the reason why it is not one."""
    for name in ("seq_idx", "idx_of_states"):
        if name in call.dtypes and call.dtypes[name] != np.int32:
            return f"{name} is {call.dtypes[name].name}, want int32"
    dtypes = {}
    for name in ("x", "weight", "bias", "initial_states"):
        if name in call.dtypes:
            if call.dtypes[name].name not in DTYPES:
                return f"{name} is {call.dtypes[name].name}, want one of {sorted(DTYPES)}"
            dtypes[name] = DTYPES[call.dtypes[name].name]
    return CausalProblem(
        name=call.op,
        role="backward" if call.op.endswith("_backward") else "forward",
        **{label: call.sizes[label] for label in "BTCJ"},
        dtypes=(dtypes["x"], dtypes["weight"], dtypes["x"]),
        epilogue=Epilogue(activation=dict(call.static.items)["activation"], bias=dtypes.get("bias")),
        state=dtypes.get("initial_states"),
        idx="seq_idx" in call.dtypes,
        idx_of_states="idx_of_states" in call.dtypes,
        arch=arch,
        device=call.device,
    )


def gram_problem(call: Call, kind: type[MatmulProblem], arch: int) -> MatmulProblem | str:
    """A call of `gram` as a problem of this class, which has fields for what is added, or the reason why it is not one."""
    numbers = _numbers(call, arch)
    if isinstance(numbers, str):
        return numbers
    added = {}
    if "addend" in call.dtypes:
        if (dtype := call.dtypes["addend"].name) not in DTYPES:
            return f"addend is {dtype}, want one of {sorted(DTYPES)}"
        added = dict(addend=DTYPES[dtype], of_addend=call.static.of_addend)
    return kind(**{label: call.sizes[label] for label in "BMNK"}, scale=call.static.scale, **added, **numbers)


def _common(call: Call, arch: int) -> dict[str, Any] | str:
    """The part of a problem that is the same for all kernels of products and convolutions."""
    numbers = _numbers(call, arch)
    epilogue = None if isinstance(numbers, str) else _epilogue(call)
    if isinstance(numbers, str) or isinstance(epilogue, str):
        return numbers if isinstance(numbers, str) else str(epilogue)
    return dict(**numbers, epilogue=epilogue)


def _numbers(call: Call, arch: int) -> dict[str, Any] | str:
    """The names of a product, and what is multiplied how."""
    dtypes = []
    factors = {slot: call.dtypes[slot] for slot in call.factors}
    for slot, dtype in (*factors.items(), (call.open, call.dtype)):
        if dtype.name not in DTYPES:
            return f"{slot} is {dtype.name}, want one of {sorted(DTYPES)}"
        dtypes.append(DTYPES[dtype.name])
    precision = _precision(call.precision, factors.values())
    if precision is None:
        return f"precision is {call.precision}, want one of {sorted(_PRESETS)}, or one that the operands have of themselves"
    role = call.product.rpartition("_")[2]
    return dict(name=call.op, role=role, dtypes=tuple(dtypes), precision=precision, arch=arch, device=call.device)


def _epilogue(call: Call) -> Epilogue | None | str:
    """The epilogue of a call as kernels know it, or the reason why they do not."""
    if call.operation is None:
        return None
    added = {}
    for slot in ("bias", "residual", "scale"):
        if slot in call.dtypes:
            name = call.dtypes[slot].name
            if name not in DTYPES:
                return f"{slot} is {name}, want one of {sorted(DTYPES)}"
            added[slot] = DTYPES[name]
    gated = call.window is None and "T" in call.sizes  # of a convolution along three axes T is an axis of the filter
    return Epilogue(activation=call.static.activation, gated=gated, saves=bool(call.further), **added)


def _precision(asked: Any, dtypes) -> str | None:
    """The kernels' name of a precision, or None if they do not support it."""
    dtypes = {np.dtype(dtype) for dtype in dtypes}
    if isinstance(asked, lax.DotAlgorithmPreset):
        # For operands of these dtypes the preset is what kernels do anyway: exact products, accumulated in float32.
        own = {
            "F16_F16_F32": {np.dtype(np.float16)},
            "BF16_BF16_F32": {np.dtype(jnp.bfloat16)},
            "ANY_F8_ANY_F8_F32": {np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2)},
        }.get(asked.name)
        return "ieee" if own and dtypes <= own else _PRESETS.get(asked.name)
    if asked is None or isinstance(asked, tuple) and all(isinstance(p, lax.Precision) for p in asked):
        return "ieee" if asked is not None and lax.Precision.HIGHEST in asked else "tf32"
    return None
