"""The common part of implementations that launch kernels: the plan of a `Call` that is a kernel's problem, and the launch.

A kernel takes dense operands with exactly one axis per label.  It writes the result, or partial results along an additional first axis
("splits", as in split-K).  These are added here, always in the same order.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxext.forms.call import EXPORTED, Call, Splitter, symbolic_size
from jaxext.forms.composition import composed
from jaxext.forms.implementation import Algorithm, Implementation, Plan, file_of, folder_of, hash_of
from jaxext.forms.precisions import WORDS
from jaxext.kernels._gemm import MatmulProblem

KERNELS = file_of(MatmulProblem).parent  # the folder of the Triton kernels, and of the geometry shared with the CUDA kernels

ZEROS = Algorithm("zeros")  # the config for empty sums and empty results: no kernel is launched; an epilogue is jnp's then


@dataclasses.dataclass(frozen=True)
class KernelCall:
    """One kernel launch: `call(result, *operands)` of these slots gives the result, or `splits` partial results.

    If the call has several results, `result` is a tuple, and so is what `call` gives.
    """

    describe: str
    slots: tuple[str, ...]
    splits: int
    call: Callable[..., Any]  # result: a ShapeDtypeStruct


class KernelImplementation(Implementation, abc.ABC):
    """Base class of implementations made of kernels.  The version of a subclass is a hash of its folder and of the files in `shared`."""

    version = "of its files"
    rows_by_config = True
    epilogues = False  # whether its kernels fuse them
    # Files outside the class's own folder that its results depend on.
    shared: Sequence[pathlib.Path] = (pathlib.Path(__file__), pathlib.Path(__file__).with_name("problems.py"))

    def plan(self, call: Call) -> Plan | str:
        if reason := symbolic_size(call) or self.lacks(call):
            return reason
        if call.operation is not None and not self.epilogues:
            return "its kernels fuse no epilogue"
        problem = self.problem(call)
        reason = problem if isinstance(problem, str) else self.refuses(problem)
        return reason or KernelPlan(self, call, problem)

    def code(self, platform: str) -> str:
        return hash_of([*folder_of(type(self)), *self.shared])

    @abc.abstractmethod
    def lacks(self, call: Call) -> str | None:
        """Why no kernel can be launched on this call's device, or None."""

    @abc.abstractmethod
    def problem(self, call: Call) -> Any:
        """The call as a kernel's problem, or (a string) the reason why it is not one."""

    @abc.abstractmethod
    def refuses(self, problem: Any) -> str | None:
        """Why no kernel supports the problem, or None."""

    def multiplied(self, problem: Any) -> str:
        """How float32 factors of a supported problem are multiplied, by its name in kernels."""
        return getattr(problem, "precision", "ieee") if "fp32" in problem.dtypes[:2] else "ieee"

    @abc.abstractmethod
    def slower(self, call: Call) -> str | None:
        """Why another implementation is expected to be as fast, or None."""

    @abc.abstractmethod
    def configs(self, problem: Any) -> Sequence[Any]:
        """The configs for a supported problem, the one expected to be fastest first."""

    @abc.abstractmethod
    def launch(self, call: Call, problem: Any, config: Any) -> KernelCall:
        """The launch for a supported call, its problem and one of its configs."""


class KernelPlan(Plan):
    """A plan by kernels.  `problem` is the call as the kernel's problem."""

    implementation: KernelImplementation

    def __init__(self, implementation: KernelImplementation, call: Call, problem: Any):
        super().__init__(implementation, call)
        self.problem = problem

    @functools.cached_property
    def configs(self) -> Sequence[Any]:
        return (ZEROS,) if self.call.empty else self.implementation.configs(self.problem)

    def gains(self) -> str | None:
        return EXPORTED if self.call.splitter is Splitter.LATER else self.implementation.slower(self.call)

    def describe(self, config: Any) -> str:
        return config.algorithm if config == ZEROS else self._launch(config).describe

    def multiplies(self) -> str:
        return WORDS.get(self.implementation.multiplied(self.problem), "")

    def run(self, config: Any, operands: Mapping[str, jax.Array]) -> Any:
        call = self.call
        if config == ZEROS and call.operation is None:
            return jnp.zeros(call.shape, call.dtype)
        if config == ZEROS:
            return composed(call, operands, self.implementation.name)
        launch = self._launch(config)
        dense = [
            jax.ShapeDtypeStruct(tuple(call.sizes[label] for label in call.labels[name]), dtype) for name, dtype in call.results.items()
        ]
        flat = call.flatten(operands)
        given = [flat[slot] for slot in launch.slots]
        with jax.named_scope(call.op):
            if call.further:
                results = launch.call(tuple(dense), *given)
                return tuple(y.reshape(call.shape_of(name)) for name, y in zip(call.results, results, strict=True))
            if launch.splits > 1:
                partial = jnp.int32 if jnp.issubdtype(call.dtype, jnp.integer) else jnp.float32
                y = launch.call(jax.ShapeDtypeStruct((launch.splits, *dense[0].shape), partial), *given)
            else:
                y = launch.call(dense[0], *given)
        if launch.splits > 1:
            y = jnp.sum(y, axis=0, dtype=y.dtype).astype(call.dtype)
        return y.reshape(call.shape)

    def _launch(self, config: Any) -> KernelCall:
        return self.implementation.launch(self.call, self.problem, config)


def apart(x: jax.Array) -> jax.Array:
    """Put an operand or a result of a kernel into a buffer of its own, for kernels that need alignment to 16 bytes.

    XLA's GPU compiler may pass a slice of a larger array to a typed FFI call without a copy, at any offset: a weight within a vector of all
    parameters, or the part of an array that a loop writes.  It does not do so across an optimization barrier of a single array.
    """
    return lax.optimization_barrier(x)
