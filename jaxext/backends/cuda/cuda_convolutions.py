"""The implementation `cuda` of convolutions: dense, depthwise, and causal along a sequence."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxext.backends import preference
from jaxext.backends.cuda import cuda_causal, cuda_conv, cuda_depthwise
from jaxext.backends.cuda.cuda_binding import Cuda, compiled, ffi_call, kernel_call, not_compiled_for, number_of
from jaxext.backends.kernel import KernelCall
from jaxext.backends.problems import causal_problem, conv_problem
from jaxext.forms.call import Call
from jaxext.kernels.geometry import ConvProblem

_CAUSAL_ADDED = ("bias", "initial_states", "seq_idx", "idx_of_states")  # beside x and weight


class CudaConv(Cuda):
    custom_calls = tuple(
        f"jaxext_{kernel}{rank}d_{name}_v1"
        for kernel in ("conv", "depthwise")
        for rank in (1, 2, 3)
        for name in ("fprop", "dgrad", "wgrad", "bias_act")
    )

    def problem(self, call):
        return conv_problem(call, call.arch or 0)

    def refuses(self, problem):
        family = _family(problem)
        return family.refused(problem) or (not_compiled_for(problem.arch) if family is cuda_depthwise else None)

    def family(self, problem, config):
        if _family(problem) is cuda_conv:
            return "conv"
        return "depthwise_mma" if config.lines else "depthwise"

    def slower(self, call):
        row = preference.convolution(call)
        return None if row.kernel else row.reason

    def yields(self, call):
        return not preference.prefers_cuda(preference.convolution(call), call)

    def configs(self, problem):
        if _family(problem) is cuda_depthwise:
            return cuda_depthwise.candidates(problem)
        return cuda_conv.candidates(problem, compiled("conv"))

    def launch(self, call, problem, config):
        stem = call.op.replace("conv", "depthwise", 1) if _family(problem) is cuda_depthwise else call.op
        made = kernel_call(call, problem, cuda_conv.fields(problem), stem, config)
        return dataclasses.replace(made, describe=f"{made.describe} on tensor cores") if getattr(config, "lines", 0) else made


class CudaCausal(Cuda):
    """`causal_conv1d`, and its backward as one kernel, which computes all cotangents."""

    custom_calls = ("jaxext_causal_conv1d_v1", "jaxext_causal_conv1d_backward_v1")

    def problem(self, call):
        return causal_problem(call, call.arch or 0)

    def refuses(self, problem):
        return cuda_causal.refused(problem) or not_compiled_for(problem.arch)

    def family(self, problem, config):
        return "causal"

    def slower(self, call):
        return preference.causal(call)

    def yields(self, call):
        return True

    def configs(self, problem):
        return cuda_causal.candidates(problem)

    def launch(self, call, problem, config):
        added = [name for name in _CAUSAL_ADDED if name in call.dtypes]
        backward = problem.role == "backward"
        attributes = cuda_causal.fields(problem) | dataclasses.asdict(config) | {name: int(name in added) for name in _CAUSAL_ADDED}
        attributes["activation"] = number_of(problem.epilogue.activation)
        return KernelCall(
            describe="causal" + (f" in {config.splits} parts" if config.splits > 1 else ""),
            slots=("x", "weight", *added, *(["d_y"] if backward else [])),
            splits=1,
            call=functools.partial(_causal_backward if backward else _causal_forward, call, attributes),
        )


def _family(problem: ConvProblem) -> Any:
    """The module of the kernels that take the problem: one input channel and several groups leave nothing to a matrix product."""
    return cuda_depthwise if problem.G > 1 and problem.C == 1 else cuda_conv


def _causal_forward(call: Call, attributes: Mapping[str, Any], result, *operands) -> Any:
    return _called_causal("jaxext_causal_conv1d_v1", attributes, [result], operands)[0]


def _causal_backward(call: Call, attributes: Mapping[str, Any], _, *operands) -> Any:
    """All cotangents.  Those of weight and bias are partial sums, the bias's the last row of each, which are added here in their order."""
    x, weight = operands[:2]
    taps = attributes["J"]
    sums = jax.ShapeDtypeStruct((attributes["splits"], taps + attributes["bias"], attributes["C"]), jnp.float32)
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype), sums]
    if attributes["initial_states"]:
        results.append(jax.ShapeDtypeStruct(operands[2 + attributes["bias"]].shape, x.dtype))
    d_x, sums, *d_state = _called_causal("jaxext_causal_conv1d_backward_v1", attributes, results, operands)
    total = jnp.sum(sums, axis=0)
    arrays = {"d_x": d_x, "d_weight": total[:taps], "d_bias": total[taps:].reshape(-1), "d_initial_states": next(iter(d_state), None)}
    made = {name: arrays[name].astype(dtype) for name, dtype in call.results.items()}
    return tuple(made.values()) if call.further else made[call.open]


def _called_causal(target: str, attributes: Mapping[str, Any], results: Sequence[Any], operands: Sequence[jax.Array]) -> Any:
    """The call of a handler.  The state is rounded to the dtype of x, as the definition has it."""
    given = list(operands)
    if attributes["initial_states"]:
        at = 2 + attributes["bias"]
        given[at] = given[at].astype(given[0].dtype)
    return ffi_call(target, results, given, attributes)
