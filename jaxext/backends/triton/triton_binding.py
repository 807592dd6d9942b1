"""The implementation `triton`: the kernels of `jaxext.kernels` on CUDA GPUs, through jax-triton, and interpreted on CPUs.

A `Call` becomes a kernel's `Problem`, one of its `candidates` is the `Config`, and its `launch` becomes the custom call (`triton_call`).
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import jax

from jaxext._target import named
from jaxext.backends.kernel import KERNELS, KernelCall, KernelImplementation
from jaxext.backends.triton import assembler, triton_call
from jaxext.core.call import Call
from jaxext.core.implementation import Plan

INTERPRETED_CAPABILITY = 90


class TritonKernels(KernelImplementation):
    """The common part of all families.  `kernels` returns the module whose kernels support a problem."""

    name = "triton"
    custom_calls = ("triton_kernel_call", "triton_kernel_call_ffi")  # of jax-triton 0.3 and 0.4
    epilogues = True
    shared = (*KernelImplementation.shared, *sorted(pathlib.Path(__file__).parent.glob("*.py")), *sorted(KERNELS.rglob("*.py")))

    def plan(self, call: Call) -> Plan | str:
        plan = super().plan(call)
        if call.platform == "cpu" and isinstance(plan, Plan):
            plan.only_if_named = "the interpreter is slow: it is taken only if it is named"
        return plan

    def kernels(self, problem: Any) -> ModuleType:
        raise NotImplementedError

    def lacks(self, call: Call) -> str | None:
        return triton_call.unavailable(call)

    def refuses_problem(self, problem: Any) -> str | None:
        return self.kernels(problem).refuses(problem)

    def configs(self, problem: Any) -> Sequence[Any]:
        return self.kernels(problem).candidates(problem)

    def family(self, problem: Any, config: Any) -> str:
        return self.kernels(problem).__name__.rpartition(".")[2]

    def compiler(self) -> str:
        return f"triton {triton_call.installed('triton')}"

    def unassembled(self, lowered: jax.stages.Lowered) -> str | None:
        """Return the reason or None, as in the base class; the reason only where a GPU of this machine is the target."""
        ptxas = None if named() else assembler.find()
        return assembler.failure(lowered, ptxas) if ptxas else None

    def launch(self, call: Call, problem: Any, config: Any) -> KernelCall:
        kernels = self.kernels(problem)
        launch = kernels.launch(problem, config)
        return KernelCall(
            describe=self.family(problem, config),
            slots=tuple(dict.fromkeys(launch.operands)),  # an operand that a fused kernel lacks is the left one again
            splits=launch.splits,
            call=functools.partial(triton_call.called if call.platform == "cuda" else triton_call.interpreted, launch, call.arch),
        )
