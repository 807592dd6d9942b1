"""The implementation `triton`: the kernels of `jaxext.kernels` on CUDA GPUs, through jax-triton, and interpreted on CPUs.

A `Call` becomes a kernel's `Problem`, one of its `candidates` is the `Config`, and its `launch` becomes the custom call (`triton_call`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxext._target import named
from jaxext.backends import preference
from jaxext.backends.kernel import KERNELS, KernelCall, KernelImplementation
from jaxext.backends.problems import causal_problem, conv_problem, gram_problem, matmul_problem, scaled_problem
from jaxext.backends.triton import assembler, triton_call
from jaxext.forms.call import Call
from jaxext.forms.implementation import Plan
from jaxext.kernels.ragged.problem import visits

_INTERPRETED_CAPABILITY = 90
FEW_ROWS = 128  # of a product whose time is that of reading its other factor


class TritonKernels(KernelImplementation):
    """The common part of all families.  `kernels` returns the module whose kernels support a problem."""

    name = "triton"
    custom_calls = ("triton_kernel_call", "triton_kernel_call_ffi")  # of jax-triton 0.3 and 0.4
    epilogues = True
    shared = (*KernelImplementation.shared, *sorted(KERNELS.rglob("*.py")))

    def plan(self, call: Call) -> Plan | str:
        plan = super().plan(call)
        if call.platform == "cpu" and isinstance(plan, Plan):
            plan.only_if_named = "the interpreter is slow: it is taken only if it is named"
        return plan

    def kernels(self, problem: Any) -> ModuleType:
        raise NotImplementedError

    def lacks(self, call: Call) -> str | None:
        return triton_call.unavailable(call)

    def refuses(self, problem: Any) -> str | None:
        return self.kernels(problem).supports(problem)

    def configs(self, problem: Any) -> Sequence[Any]:
        return self.kernels(problem).candidates(problem)

    def family(self, problem: Any, config: Any) -> str:
        return self.kernels(problem).__name__.rpartition(".")[2]

    def compiler(self) -> str:
        return f"triton {triton_call.installed('triton')}"

    def unassembled(self, lowered: jax.stages.Lowered) -> str | None:
        """As in the base class; only where a GPU of this machine is the target."""
        ptxas = None if named() else assembler.find()
        return assembler.failure(lowered, ptxas) if ptxas else None

    def launch(self, call: Call, problem: Any, config: Any) -> KernelCall:
        kernels = self.kernels(problem)
        launch = kernels.launch(problem, config)
        return KernelCall(
            describe=kernels.__name__.rpartition(".")[2] + (f" in {launch.splits} parts" if launch.splits > 1 else ""),
            slots=tuple(dict.fromkeys(launch.operands)),  # an operand that a fused kernel lacks is the left one again
            splits=launch.splits,
            call=functools.partial(triton_call.called if call.platform == "cuda" else triton_call.interpreted, launch, call.arch),
        )


class TritonMatmul(TritonKernels):
    def problem(self, call):
        return matmul_problem(call, self.kernels(None).Problem, call.arch or _INTERPRETED_CAPABILITY)

    def kernels(self, problem):
        from jaxext.kernels import matmul

        return matmul

    def slower(self, call):
        return "XLA's matrix products (cuBLAS) are expected to be as fast"


class TritonGram(TritonKernels):
    """Half of a product with its own transpose."""

    def problem(self, call):
        return gram_problem(call, self.kernels(None).Problem, call.arch or _INTERPRETED_CAPABILITY)

    def kernels(self, problem):
        from jaxext.kernels import gram

        return gram

    def slower(self, call):
        return preference.of_half(self.kernels(None).share(self.problem(call)))


class TritonRagged(TritonMatmul):
    def kernels(self, problem):
        from jaxext.kernels import ragged

        return ragged

    def slower(self, call):
        return preference.ragged(call)

    def launch(self, call, problem, config):
        plain = super().launch(call, problem, config)
        if "visits" not in plain.slots:
            return plain

        def after_visits(result, *operands):
            *given, begin, end = operands
            return plain.call(result, *given, visits(jnp, begin, end, problem.M, config.tile_m))

        return dataclasses.replace(plain, slots=(*plain.slots[:-1], "begin", "end"), call=after_visits)


class TritonScaled(TritonKernels):
    def problem(self, call):
        return scaled_problem(call, self.kernels(None).Problem, call.arch or _INTERPRETED_CAPABILITY)

    def kernels(self, problem):
        from jaxext.kernels import scaled

        return scaled

    def multiplied(self, problem):
        """Factors that are scaled in registers are rounded to 16 bits there, if the result has so many."""
        if problem.fine:
            return problem.precision if problem.bits == 32 else "bf16"
        return super().multiplied(problem)

    def slower(self, call):
        problem = self.problem(call)
        assert not isinstance(problem, str)  # it is asked of calls that it supports
        if problem.scales_steps and min(problem.rows, problem.cols) <= FEW_ROWS:
            return None  # XLA writes the scaled factor to memory, in 16 bits, and reads it again
        if problem.scales_steps:
            return "what XLA writes to memory is little beside so many products, and they are expected to be as fast"
        if problem.fine:
            return "the kernel scales factors as XLA does, and has not been timed"
        return "XLA converts factors inside of its products, which are expected to be as fast"

    def launch(self, call, problem, config):
        plain = super().launch(call, problem, config)

        def converted(result, *operands):
            """Scales are float32 to the kernel, two int4 a byte, and a result of 8 bits float32."""
            given = [
                x.astype(jnp.float32)
                if name.endswith("_scale")
                else lax.bitcast_convert_type(x.reshape(-1, 2), jnp.int8)
                if x.dtype == jnp.int4
                else x
                for name, x in zip(plain.slots, operands, strict=True)
            ]
            wide = result if result.dtype.itemsize > 1 else jax.ShapeDtypeStruct(result.shape, jnp.float32)
            return plain.call(wide, *given).astype(result.dtype)

        return dataclasses.replace(plain, call=converted)


class TritonConv(TritonKernels):
    def problem(self, call):
        return conv_problem(call, call.arch or _INTERPRETED_CAPABILITY)

    def kernels(self, problem):
        from jaxext.kernels import conv, depthwise

        # A single input channel per group has no matmul to use.  `conv` is the fallback for problems that `depthwise` refuses.
        alone = problem.C == 1 and problem.G > 1 and depthwise.supports(problem) is None
        return depthwise if alone else conv

    def multiplied(self, problem):
        return "ieee" if self.kernels(problem).__name__.endswith("depthwise") else super().multiplied(problem)

    def slower(self, call):
        row = preference.convolution(call)
        return None if row.kernel else row.reason


class TritonCausal(TritonKernels):
    """`causal_conv1d`, and its backward as one kernel, which computes all cotangents."""

    def problem(self, call):
        return causal_problem(call, call.arch or _INTERPRETED_CAPABILITY)

    def kernels(self, problem):
        from jaxext.kernels import causal

        return causal

    def slower(self, call):
        return preference.causal(call)

    def launch(self, call, problem, config):
        plain = super().launch(call, problem, config)
        if problem.role == "forward":
            return plain
        of = {f"d_{name}": name for name in ("x", "weight", "bias", "initial_states") if name in call.dtypes}
        added = () if plain.splits == 1 else ("d_weight", "d_bias")
        results = []
        for name, operand in of.items():
            shape = tuple(call.sizes[label] for label in call.labels[operand])
            partial = jax.ShapeDtypeStruct((plain.splits, *shape), jnp.float32)
            results.append(partial if name in added else jax.ShapeDtypeStruct(shape, call.dtypes[operand]))

        def cotangents(_, *operands):
            arrays = dict(zip(of, plain.call(tuple(results), *operands), strict=True))
            for name in arrays.keys() & added:
                arrays[name] = jnp.sum(arrays[name], axis=0).astype(call.dtypes[of[name]])
            return tuple(arrays[name] for name in call.results) if call.further else arrays[call.open]

        return dataclasses.replace(plain, splits=1, call=cotangents)
