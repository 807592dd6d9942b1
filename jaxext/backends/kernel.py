"""The common part of implementations that launch kernels: the plan of a `Call` that is a kernel's problem, and the launch.

A kernel takes dense operands with exactly one axis per label.  It writes the result, or partial results along an additional first axis
("splits", as in split-K).  These are added here, always in the same order.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxext.core.call import EXPORTED, Call, Partitioner, symbolic_size
from jaxext.core.composition import composed
from jaxext.core.form import form_of
from jaxext.core.implementation import Algorithm, Implementation, Plan, file_of, files_of, hash_of
from jaxext.core.precisions import WORDS
from jaxext.core.window import meetings
from jaxext.kernels.launch import BITS
from jaxext.kernels.machine import machine
from jaxext.kernels.matmul.problem import MatmulProblem
from jaxext.tables import record

KERNELS = file_of(MatmulProblem).parents[1]  # the folder of the Triton kernels
# Of these, what the CUDA kernels share.
PROBLEMS = [*(KERNELS / f"{name}.py" for name in ("epilogue", "geometry", "launch", "machine")), *sorted(KERNELS.glob("*/problem.py"))]

SMALL_SECONDS = 10e-6  # about what a launch outside of XLA's fusions and CUDA graphs costs

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
    """Base class of implementations made of kernels.  The version of a subclass is a hash of its files and of those in `shared`."""

    version = "of its files"
    rows_by_config = True
    epilogues = False  # whether its kernels fuse them
    assumed_arch = 0  # of a device without a compute capability
    # Files of no class that its results depend on.
    shared: Sequence[pathlib.Path] = (pathlib.Path(__file__), pathlib.Path(__file__).with_name("fields.py"))

    def plan(self, call: Call) -> Plan | str:
        if reason := symbolic_size(call) or self.lacks(call):
            return reason
        if call.operation is not None and not self.epilogues:
            return "its kernels fuse no epilogue"
        problem = self.problem(call)
        reason = problem if isinstance(problem, str) else self.refuses_problem(problem)
        return reason or KernelPlan(self, call, problem)

    def code(self, platform: str) -> str:
        return hash_of([*files_of(self, "problem.py"), *self.shared])

    def arch(self, call: Call) -> int:
        """The compute capability, times 10, of the device for which a problem is planned."""
        return call.arch or self.assumed_arch

    @abc.abstractmethod
    def lacks(self, call: Call) -> str | None:
        """Return the reason why no kernel can be launched on this call's device, or None."""

    @abc.abstractmethod
    def problem(self, call: Call) -> Any:
        """The call as a kernel's problem, or (a string) the reason why it is not one."""

    @abc.abstractmethod
    def refuses_problem(self, problem: Any) -> str | None:
        """Return the reason why no kernel takes the problem, or None."""

    def multiplied(self, problem: Any) -> str:
        """Return how float32 factors of a supported problem are multiplied, by its name in kernels."""
        return getattr(problem, "precision", "ieee") if "fp32" in problem.dtypes[:2] else "ieee"

    @abc.abstractmethod
    def family(self, problem: Any, config: Any) -> str:
        """The family of the kernel that takes a supported problem with one of its configs, such as "depthwise"."""

    @abc.abstractmethod
    def compiler(self) -> str:
        """The compiler of its kernels, with the version, such as "nvcc 13.0"."""

    def unassembled(self, lowered: jax.stages.Lowered) -> str | None:
        """Return the reason why this machine cannot assemble the kernels of a lowered program, or None."""
        return None

    def yields(self, call: Call) -> bool:
        """Return whether the kernels of an implementation that follows are expected to be faster, where they may be used."""
        return False

    @abc.abstractmethod
    def slower(self, call: Call) -> str | None:
        """Return the reason why another implementation is expected to be as fast, or None."""

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
        """All configs.  The first is of a kind that is verified on the device, if there is one; the others are ranked, for `tune`."""
        if self.call.empty:
            return (ZEROS,)
        ranked = self.implementation.configs(self.problem)
        first = next((config for config in ranked if self._unverified(config) is None), ranked[0])
        return (first, *(config for config in ranked if config != first))

    def not_preferred(self) -> str | None:
        if self.call.partitioner is Partitioner.LATER:
            return EXPORTED
        return self.implementation.slower(self.call) or self._small() or self._unverified(self.configs[0])

    def yields(self) -> bool:
        return self.implementation.yields(self.call)

    def kind(self, config: Any) -> str:
        """The family, role and dtypes of the kernel, by which it is verified: such as "conv conv2d_fprop bf16"."""
        problem, multiplied = self.problem, self.implementation.multiplied(self.problem)
        *factors, result = problem.dtypes
        if getattr(problem, "packed", False):
            factors[self.call.factors.index("w")] = "i4"
        dtypes = "x".join(dict.fromkeys(factors)) + (f"->{result}" if {*factors} != {result} else "")
        role = problem.name + ("+z" if self.call.further and self.call.product != self.call.op else "")
        return " ".join([self.implementation.family(problem, config), role, dtypes + (f",{multiplied}" if "fp32" in factors else "")])

    def _unverified(self, config: Any) -> str | None:
        if config == ZEROS or self.call.arch is None:
            return None
        implementation = self.implementation
        return record.unverified(implementation.name, self.kind(config), self.call.arch, implementation.compiler())

    def _small(self) -> str | None:
        """Return the reason for leaving a small call to XLA, which fuses it, or None."""
        least = least_seconds(self.call, self.problem, self.implementation.multiplied(self.problem))
        if least >= SMALL_SECONDS:
            return None
        return f"it takes {least * 1e6:.2g} µs at least, and XLA fuses what takes less than {SMALL_SECONDS * 1e6:.0f}"

    def describe(self, config: Any) -> str:
        if config == ZEROS:
            return config.algorithm
        launch = self._launch(config)
        parts = max(launch.splits, getattr(config, "splits", 1))  # a kernel that adds its parts up itself is called for one
        return launch.describe + (f" in {parts} parts" if parts > 1 else "")

    def fails(self, config: Any) -> str | None:
        key = (self.implementation, self.call.problem, self.call.arch, config)
        if key not in _failures:
            _failures[key] = self._failure(config)
        return _failures[key]

    def _failure(self, config: Any) -> str | None:
        """The reason why a program with nothing else cannot be lowered: a kernel is compiled when its call is lowered."""
        call = self.call
        operands = {name: jax.ShapeDtypeStruct(call.shape_of(name), dtype) for name, dtype in call.dtypes.items()}
        try:
            lowered = jax.jit(functools.partial(self.run, config)).trace(operands).lower(lowering_platforms=(call.platform,))
            reason = self.implementation.unassembled(lowered)
        except Exception as error:  # of Triton's compiler, in any of its stages
            reason = f"{type(error).__name__}: {error}"
        return reason and " ".join(reason.split())[:500]

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


# The implementation, the problem, its device and config -> the answer of `KernelPlan.fails`.
_failures: dict[tuple, str | None] = {}


def least_seconds(call: Call, problem: Any, multiplied: str) -> float:
    """The least possible time of a call on the problem's device, by its bytes and its products of two numbers."""
    gpu = machine(problem.arch, problem.device)
    arrays = [*call.dtypes.items(), *call.results.items()]
    moved = sum(math.prod(call.shape_of(name)) * jax.dtypes.itemsize_bits(dtype) for name, dtype in arrays) / 8
    factors = [*call.dtypes][:2]  # without companions, such as the bounds of groups
    shared = collections.Counter(label for name in (*factors, *call.results) for label in call.labels[name])
    form = form_of(call)
    tied = {*form.unmapped} - {*form.chosen} if form else ()  # the places of gathered rows are in the result alone
    window = {} if call.window is None else call.window.sizes
    products = math.prod(size for label, size in call.sizes.items() if (shared[label] > 1 or label in tied) and label not in window)
    products *= math.prod(meetings(call.window, axis) for axis in range(call.window.rank)) if call.window else 1
    rate = gpu.rate(BITS[problem.dtypes[0]], multiplied) * gpu.multiprocessors
    return gpu.seconds(max(gpu.moving(moved), products / rate))


def kernel_result(result: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Return what a kernel writes for a result: float32 in place of 8 bits, which no kernel writes."""
    return result if result.dtype.itemsize > 1 else jax.ShapeDtypeStruct(result.shape, jnp.float32)


def own_buffer(x: jax.Array) -> jax.Array:
    """Put an operand or a result of a kernel into a buffer of its own, for kernels that need alignment to 16 bytes.

    XLA's GPU compiler may pass a slice of a larger array to a typed FFI call without a copy, at any offset: a weight within a vector of all
    parameters, or the part of an array that a loop writes.  It does not do so across an optimization barrier of a single array.  Inside
    `jaxext.slices_in_place` kernels do without.
    """
    return lax.optimization_barrier(x)
