"""What the implementations that launch kernels share: from a `Call` to a kernel's problem, and from its launch to the result.

A kernel takes dense operands with exactly one axis per label.  It writes the result, or partial results along a further axis in front
("splits"), which are added up here, always in the same order.
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
import numpy as np
from jax import lax

from jaxext.forms.call import EXPORTED, Call, Splitter, symbolic_size
from jaxext.forms.implementation import Algorithm, Implementation, Plan, file_of, folder_of, hash_of
from jaxext.kernels._gemm import MatmulProblem
from jaxext.kernels._geometry import ConvProblem

KERNELS = file_of(MatmulProblem).parent  # the folder of Triton's kernels, and of the geometry that CUDA's share with them

# Short names of the dtypes that kernels take.
DTYPES = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
    "int32": "i32",
    "int8": "i8",
}

# How float32 operands are multiplied, by the precision that the user asked for; XLA's GPU defaults, TF32, hold for DEFAULT and HIGH.
_PRESETS = {
    "DEFAULT": "tf32",
    "TF32_TF32_F32": "tf32",
    "TF32_TF32_F32_X3": "tf32x3",
    "BF16_BF16_F32_X3": "bf16x3",
    "BF16_BF16_F32_X6": "bf16x6",
    "F32_F32_F32": "ieee",
}


ZEROS = Algorithm("zeros")  # the config where there is nothing to add up, or nowhere to put it: no kernel is launched


@dataclasses.dataclass(frozen=True)
class KernelCall:
    """One launch: `call(result, *operands)` of these slots gives `splits` partial results, or the result."""

    describe: str
    slots: tuple[str, ...]
    splits: int
    call: Callable[..., jax.Array]  # result: a ShapeDtypeStruct


class KernelImplementation(Implementation, abc.ABC):
    """An implementation made of kernels: a class of it says what it lacks, what it takes and how, whether that is worth it, and how to
    launch."""

    version = "of its files"
    # Beside the files of the class's own folder, those that decide what it computes with.
    shared: Sequence[pathlib.Path] = (pathlib.Path(__file__),)

    def plan(self, call: Call) -> Plan | str:
        if reason := symbolic_size(call) or self.lacks(call):
            return reason
        problem = self.problem(call)
        reason = problem if isinstance(problem, str) else self.refuses(problem)
        return reason or KernelPlan(self, call, problem)

    def code(self, platform: str) -> str:
        return hash_of([*folder_of(type(self)), *self.shared])

    @abc.abstractmethod
    def lacks(self, call: Call) -> str | None:
        """Why no kernel at all can be launched for this call's device, or None."""

    @abc.abstractmethod
    def problem(self, call: Call) -> Any:
        """What the kernels are asked, or (a string) the reason why they cannot be."""

    @abc.abstractmethod
    def refuses(self, problem: Any) -> str | None:
        """Why no kernel takes the problem, or None."""

    @abc.abstractmethod
    def slower(self, call: Call) -> str | None:
        """Why another implementation is expected to be as fast, or None."""

    @abc.abstractmethod
    def configs(self, problem: Any) -> Sequence[Any]:
        """With which kernels take a problem that none of them refuses; the one expected to be fastest first."""

    @abc.abstractmethod
    def launch(self, call: Call, problem: Any, config: Any) -> KernelCall:
        """Of a call that is supported, its problem and one of the problem's configs."""


class KernelPlan(Plan):
    """How kernels would compute a call: `problem` is what they are asked."""

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

    def run(self, config: Any, operands: Mapping[str, jax.Array]) -> jax.Array:
        call = self.call
        if config == ZEROS:
            return jnp.zeros(call.shape, call.dtype)
        launch = self._launch(config)
        shape = tuple(call.sizes[label] for label in call.labels[call.open])
        result = jax.ShapeDtypeStruct(shape, call.dtype)
        if launch.splits > 1:
            partial = jnp.int32 if jnp.issubdtype(call.dtype, jnp.integer) else jnp.float32
            result = jax.ShapeDtypeStruct((launch.splits, *shape), partial)
        flat = call.flatten(operands)
        with jax.named_scope(call.op):
            y = launch.call(result, *(flat[slot] for slot in launch.slots))
        if launch.splits > 1:
            y = jnp.sum(y, axis=0, dtype=y.dtype).astype(call.dtype)
        return y.reshape(call.shape)

    def _launch(self, config: Any) -> KernelCall:
        return self.implementation.launch(self.call, self.problem, config)


def apart(x: jax.Array) -> jax.Array:
    """An operand or a result of a kernel that wants multiples of 16 bytes, in memory that XLA allocates for it alone.

    XLA's GPU compiler hands a typed foreign call a slice of an array in place, at whatever element it begins: a weight within a vector of
    all parameters, what a loop writes into a larger array.  It does not look through the barrier of a single array.
    """
    return lax.optimization_barrier(x)


def matmul_problem(call: Call, kind: type[MatmulProblem], arch: int) -> MatmulProblem | str:
    """A call of the form `matmul` as a problem of this class, or the reason why it is none."""
    common = _common(call, arch)
    return common if isinstance(common, str) else kind(**{label: call.sizes[label] for label in "BMNK"}, **common)


def conv_problem(call: Call, arch: int) -> ConvProblem | str:
    """A call of a form of convolutions as a problem, or the reason why it is none."""
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


def _common(call: Call, arch: int) -> dict[str, Any] | str:
    """The part of a problem that is the same for all kernels."""
    dtypes = []
    for slot, dtype in (*call.dtypes.items(), (call.open, call.dtype)):
        if dtype.name not in DTYPES:
            return f"{slot} is {dtype.name}, want one of {sorted(DTYPES)}"
        dtypes.append(DTYPES[dtype.name])
    precision = _precision(call.precision, call.dtypes.values())
    if precision is None:
        return f"precision is {call.precision}, want one of {sorted(_PRESETS)}, or one that the operands have of themselves"
    role = call.op.rpartition("_")[2]
    return dict(name=call.op, role=role, dtypes=tuple(dtypes), precision=precision, arch=arch)


def _precision(asked: Any, dtypes) -> str | None:
    """The name that kernels have for it, None if they have not."""
    dtypes = {np.dtype(dtype) for dtype in dtypes}
    if isinstance(asked, lax.DotAlgorithmPreset):
        # What the name asks of 16-bit and 8-bit operands is what they are multiplied with anyway: exactly, and added up in float32.
        own = {
            "F16_F16_F32": {np.dtype(np.float16)},
            "BF16_BF16_F32": {np.dtype(jnp.bfloat16)},
            "ANY_F8_ANY_F8_F32": {np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2)},
        }.get(asked.name)
        return "ieee" if own and dtypes <= own else _PRESETS.get(asked.name)
    if asked is None or isinstance(asked, tuple) and all(isinstance(p, lax.Precision) for p in asked):
        return "ieee" if asked is not None and lax.Precision.HIGHEST in asked else "tf32"
    return None
