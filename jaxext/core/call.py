"""The description of one product on one device: static facts for implementations to plan from, and for tables to look up."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax import lax

from jaxext._compat import Partitioner
from jaxext._messages import format_value
from jaxext.core.static import Static
from jaxext.core.window import Window


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """One operation on one device: operands and results by name, sizes by label.

    Attributes:
      op: the primitive's name, such as "conv2d_fprop".
      open: the slot that is computed, or an operation's first result.
      labels: slot -> its labels, in order.
      axes: slot -> the name of each axis of its array.  Label N has the axes N0, N1, ..., or none.
      sizes: label -> elements, the product over its axes.
      extents: axis -> elements.
      dtypes: operand -> dtype: the factors, then the companions.
      dtype: the dtype of the first result.
      further: an operation's further results -> dtype.
      window: the geometry of a convolution, else None.
      precision: as lax canonicalises it; None is the default.
      platform: "cpu", "cuda", "rocm", "tpu" or "other".
      arch: the compute capability of the CUDA device times 10, such as 90, if it is known.
      device: the name of the CUDA device, such as "NVIDIA H200", if it is here.
      partitioner: who may still split this over devices.
      operation: the `Operation`; None if this is a form.
      static: the static arguments of an operation; `keywords` has those of an `extend.operation`.
      parameters: those of the primitive.
      in_place: whether kernels may read slices of larger arrays in place.
      in_loop: whether a loop computes it, as it does parts (`core/invariant`).
      rows: the labels of batch and rows, if the rows of the result are independent of each other.
    """

    op: str
    open: str
    labels: Mapping[str, tuple[str, ...]]
    axes: Mapping[str, tuple[str, ...]]
    sizes: Mapping[str, int]
    extents: Mapping[str, int]
    dtypes: Mapping[str, np.dtype]
    dtype: np.dtype
    window: Window | None
    precision: Any
    platform: str
    arch: int | None
    partitioner: Partitioner
    device: str = ""
    further: Mapping[str, np.dtype] = dataclasses.field(default_factory=dict)
    operation: Any = None
    static: Any = None
    parameters: Static
    in_place: bool | None = None
    in_loop: bool = False
    rows: tuple[str, str] | None = None

    @property
    def results(self) -> Mapping[str, np.dtype]:
        """The dtype of each result."""
        return {self.open: self.dtype, **self.further}

    @property
    def keywords(self) -> dict[str, Any]:
        """The keywords of a call of an `extend.operation`, with the defaults of its reference."""
        return {} if self.static is None else {**self.static.defaults, **dict(self.static.items)}

    @property
    def product(self) -> str:
        """The name of the operation, or of the matmul or convolution inside it if it has an epilogue."""
        if self.operation is None or self.operation.product is None:
            return self.op
        form, open = self.operation.product
        return form.op(open)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        return self.shape_of(self.open)

    def shape_of(self, slot: str) -> tuple[int, ...]:
        return tuple(self.extents[axis] for axis in self.axes[slot])

    @property
    def factors(self) -> tuple[str, str]:
        """The slots of the two operands in which the operation is bilinear."""
        first, second, *_ = self.dtypes
        return first, second

    @property
    def empty(self) -> bool:
        """Return whether an axis has size 0, so that the result is empty or all zeros."""
        return 0 in self.sizes.values()

    @property
    def problem(self) -> str | None:
        """The key of the call in tables, in one line; None if a size is symbolic."""
        if not all(isinstance(size, int) for size in self.sizes.values()):
            return None
        window = {} if self.window is None else self.window.sizes
        parts = [self.op, *(f"{label}={size}" for label, size in self.sizes.items() if label not in window)]
        if self.window is not None:
            for field in dataclasses.fields(self.window):
                per_axis = getattr(self.window, field.name)
                numbers = [":".join(map(str, n)) if isinstance(n, tuple) else str(n) for n in per_axis]
                parts.append(f"{field.name}={','.join(numbers)}")
        operands = " ".join(dtype.name for dtype in self.dtypes.values())
        if self.static is not None:  # then operands and results may be absent
            parts.append(str(self.static))
            operands = ", ".join(f"{name}={dtype.name}" for name, dtype in self.dtypes.items())
        results = " ".join([self.dtype.name, *(f"{name}={dtype.name}" for name, dtype in self.further.items())])
        return f"{' '.join(parts)} {operands} -> {results} precision={precision_name(self.precision)}"

    def flatten(self, operands: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Return the operands with exactly one axis per label.  This copies nothing, since the axes of a label are adjacent."""
        return {slot: x.reshape([self.sizes[label] for label in self.labels[slot]]) for slot, x in operands.items()}

    def checked(self, implementation: str | None, results: Any) -> Any:
        """Return what an implementation computed, or raise TypeError if its shapes or dtypes are wrong."""
        if self.empty:  # XLA aborts on a sum of complex zeros over devices, also outside, if it sees that they are constant
            results = lax.optimization_barrier(results)
        wanted = [(dtype, self.shape_of(slot)) for slot, dtype in self.results.items()]
        got = list(results) if isinstance(results, tuple | list) else [results]
        if [(getattr(y, "dtype", None), getattr(y, "shape", None)) for y in got] != wanted:
            gave = ", ".join(f"{y.dtype}{list(y.shape)}" if hasattr(y, "shape") else format_value(y) for y in got)
            want = ", ".join(f"{dtype}{list(shape)}" for dtype, shape in wanted)
            raise TypeError(f"{self.op}: implementation {implementation!r} returned {gave}, want {want}")
        return tuple(got) if self.further else got[0]


def precision_name(precision: Any) -> str:
    if precision is None or precision == (lax.Precision.DEFAULT,) * 2:
        return "default"
    if isinstance(precision, tuple):
        return ",".join(str(p).lower() for p in precision)
    return "".join(str(precision).split())


# Why kernels are not used in exported programs unless they are named.
EXPORTED = "an exported program uses kernels only if they are named, since jax requires their custom calls to be allowed"


def no_kernel(call: Call, platform: str) -> str | None:
    """Return the reason why no kernel for `platform` can run in this program, or None.

    The reasons: a size is symbolic, the program is for another platform, XLA's partitioner (which cannot split kernels) splits the
    program, or the target GPU is unknown.
    """
    if symbolic := symbolic_size(call):
        return symbolic
    if call.platform != platform:
        return f"platform is {call.platform!r}, want {platform!r}"
    if call.partitioner is Partitioner.XLA:
        return "XLA's partitioner splits this program and cannot split a kernel: use jit with automatic axes, or a shard_map over all axes"
    if call.platform == "cuda" and call.arch is None:
        return (
            "the target GPU is unknown: this machine has none, or GPUs of several compute capabilities (see jaxext.use_target), "
            "or the program is for several platforms"
        )
    return None


def symbolic_size(call: Call) -> str | None:
    """Return the reason why no implementation that needs static sizes can run in this program, or None."""
    symbolic = [label for label, size in call.sizes.items() if not isinstance(size, int)]
    return f"the size of {symbolic[0]} is symbolic, want a number" if symbolic else None
