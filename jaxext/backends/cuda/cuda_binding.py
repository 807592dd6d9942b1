"""The implementations `cuda`: how the compiled module of csrc/ is found, asked, and called through XLA's foreign function interface (FFI).

A `Call` becomes a kernel's problem, one of its `candidates` the config, and the fields of both the attributes of the call, by the names of
the structs in the family's header in csrc/.  The compiled module says which problems the kernels refuse, which kernels there are, and what
their configs may be.

The handlers are registered when the first program that calls one is lowered, unless XLA would refuse them (`ffi_version`).
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxext._target import named
from jaxext.backends import native
from jaxext.backends.ffi_version import refused_version
from jaxext.backends.fields import DTYPES
from jaxext.backends.kernel import PROBLEMS, KernelCall, KernelImplementation, own_buffer
from jaxext.core.call import Call, no_kernel
from jaxext.core.implementation import files_of, hash_of
from jaxext.kernels.epilogue import ACTIVATIONS
from jaxext.kernels.geometry import ConvProblem
from jaxext.kernels.matmul.problem import MatmulProblem


class Cuda(KernelImplementation):
    name = "cuda"
    epilogues = True
    kernel_family: str  # of all its kernels; a class that has several overrides `family`
    shared = (*KernelImplementation.shared, *PROBLEMS)

    def lacks(self, call):
        return no_kernel(call, "cuda") or missing() or _older_driver()

    def family(self, problem, config):
        return self.kernel_family

    def multiplied(self, problem):
        return "ieee"  # unless a family says otherwise, no kernel takes float32 numbers to the tensor cores

    def compiler(self):
        return f"nvcc {native.cuda_module().cuda_version}"

    def code(self, platform):
        """Return the hash of the code; on CUDA devices also of the compiler and of what it compiled for, which only the compiled module
        tells."""
        return hash_of([*files_of(self, "problem.py"), *self.shared], _csrc(), _build() if platform == "cuda" else b"")


def refusal(target: str, fields: Mapping[str, Any], dtypes: Sequence[str | None], arch: int) -> str | None:
    """Return the compiled module's reason why no kernel of a target takes a problem with these fields, or None.

    `dtypes` are those of the operands, of the result, and of a further operand that may be absent.
    """
    return native.cuda_module().refuses(target, dtypes=[dtype or "" for dtype in dtypes], arch=arch, **fields)


def refused_epilogue(problem: MatmulProblem | ConvProblem) -> str | None:
    """Return the reason why no kernel fuses it, or None.  Its role is the forward one, since operations have no other."""
    epilogue, result = problem.epilogue, problem.dtypes[2]
    if epilogue is None:
        return None
    if epilogue.gated:
        return "a gated epilogue, want one without a gate"
    if epilogue.bias not in (None, "fp32", "bf16", "fp16"):
        return f"bias is {epilogue.bias}, want fp32, bf16 or fp16"
    if epilogue.residual not in (None, result):
        return f"residual is {epilogue.residual}, want {result}, as the result"
    return None


def fields_named(problem: Any, names: Iterable[str]) -> dict[str, Any]:
    """The sizes and the geometry of a problem by name."""
    return {name: getattr(problem, name) for name in names}


def kernel_call(
    call: Call,
    problem: MatmulProblem | ConvProblem,
    fields: Mapping[str, Any],
    stem: str,
    config: Any,
    *more: str,
    aligned: bool = True,
    factors: Sequence[str] = (),
    transposed: Sequence[str] = (),
) -> KernelCall:
    """Return the call of the target `stem`.  `more`: operands beside the factors; `aligned`: arrays have to begin where TMA can read.

    `factors`: those of the call in the target's order, if it is another; `transposed`: those whose matrices XLA transposes first.
    """
    attributes, slots, epilogue = {**fields, **dataclasses.asdict(config)}, [*(factors or call.factors), *more], problem.epilogue
    if epilogue is not None:
        added = [slot for slot in ("bias", "residual") if getattr(epilogue, slot)]
        attributes |= {slot: int(slot in added) for slot in ("bias", "residual")} | {"saves": int(epilogue.saves)}
        attributes["activation"] = number_of(epilogue.activation)
        slots += added
    shapes = {slot: problem.shapes[slot] for slot in call.factors}
    shapes |= dict.fromkeys(("residual", "result"), problem.shapes[call.open])
    return KernelCall(
        describe=stem if epilogue is not None else stem.rpartition("_")[0],
        slots=tuple(slots),
        splits=attributes.get("splits", 1),
        call=functools.partial(
            called, f"jaxext_{stem}_v1", attributes, tuple(slots), shapes, own_buffers=aligned and not call.in_place, transposed=transposed
        ),
    )


def number_of(activation: str | None) -> int:
    """jaxext::Activation."""
    return 0 if activation is None else 1 + ACTIVATIONS.index(activation)


def called(
    target: str,
    attributes: Mapping[str, Any],
    slots: Sequence[str],
    shapes: Mapping[str, tuple[int, ...]],
    result: Any,
    *operands: jax.Array,
    own_buffers: bool,
    transposed: Sequence[str] = (),
) -> Any:
    """Call a handler, which knows arrays by the shapes of their problem: three spatial axes, where a form may have fewer.

    `result` is a tuple if there are several, which have one shape, and so is what is returned.  `own_buffers`: no
    array is passed as a slice of a larger one.  `transposed`: slots whose matrices are transposed first, with rows as TMA wants them.
    """
    parts = (attributes["splits"],) if attributes.get("splits", 1) > 1 else ()
    place = own_buffer if own_buffers else (lambda x: x)
    arrays = {slot: x.reshape(shapes.get(slot, x.shape)) for slot, x in zip(slots, operands, strict=True)}
    arrays |= {slot: _transposed(arrays[slot]) for slot in transposed}
    given = [place(x.astype(jnp.float32) if slot == "bias" else x) for slot, x in arrays.items()]
    results = jax.tree.map(lambda each: jax.ShapeDtypeStruct((*parts, *shapes["result"]), each.dtype), result)
    made = ffi_call(target, results, given, attributes)
    return jax.tree.map(lambda y, each: place(y).reshape(each.shape), made, result)


def _transposed(x: jax.Array) -> jax.Array:
    """The transposes of matrices, with rows padded with zeros to a multiple of 16 bytes."""
    more = -x.shape[-2] % (16 // x.dtype.itemsize)
    x = x.swapaxes(-1, -2)
    return jnp.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, more)]) if more else x


def ffi_call(target: str, results: Any, operands: Sequence[jax.Array], attributes: Mapping[str, Any]) -> Any:
    """The results of a handler."""
    register()
    typed = {name: np.array(value, np.float64 if isinstance(value, float) else np.int64)[()] for name, value in attributes.items()}
    return jax.ffi.ffi_call(target, results)(*operands, **typed)


@functools.cache
def register() -> None:
    """Make the handlers known to XLA."""
    if reason := missing():
        raise RuntimeError(f"no CUDA kernels: {reason}")
    for name, handler in native.cuda_module().handlers().items():
        jax.ffi.register_ffi_target(name, handler, platform="CUDA", api_version=1)


@functools.cache
def missing() -> str | None:
    """Return the reason why there are no CUDA kernels here, or None.  Loads the compiled module."""
    try:
        from jaxext._cuda_build import REASON
    except ImportError:
        return "jaxext runs from its sources, install it: pip install . in the repository"
    if REASON and native.kernels().taken is None:
        return "; ".join(filter(None, [f"built without CUDA ({REASON})", str(native.kernels())]))
    try:
        module = native.cuda_module()
    except ImportError as error:
        return f"the compiled module does not load: {error}"
    return refused_version(module.ffi_version())


def _older_driver() -> str | None:
    """Return why the CUDA driver of this machine, if it has one, does not run what was compiled, so that every launch would fail; or None,
    as for the GPU of another machine.

    Any driver runs the code that a CUDA of its own series made, or an older one.  PTX, for GPUs newer than the code is for, wants a driver
    as new as the compiler.
    """
    version, driver = native.cuda_module().cuda_version, None if named() else native.driver()
    if driver is None or driver[0] >= int(version.partition(".")[0]):
        return None
    return f"compiled with CUDA {version}, the driver is of CUDA {driver[0]}.{driver[1]}, want {version.partition('.')[0]} or newer"


def not_compiled_for(arch: int) -> str | None:
    """Return the reason why the portable kernels do not run there, or None.

    Code runs on its own generation from its capability on, PTX on all newer ones.
    """
    archs = native.cuda_module().archs
    for compiled in archs.split(","):
        number, _, kind = compiled.partition("-")
        oldest = int(re.findall(r"\d+", number)[0])
        if oldest <= arch and (kind != "real" or oldest // 10 == arch // 10):
            return None
    return f"compiled for {archs}, compute capability is {arch / 10}"


@functools.cache
def compiled(family: str) -> Sequence[Mapping[str, Any]]:
    """The kernels of a family that were compiled, with dtypes by their short names, and with the limits of their configs."""
    dtypes = ("operands", "second", "result")
    return [row | {slot: DTYPES[row[slot]] for slot in dtypes if slot in row} for row in native.cuda_module().kernels(family)]


def splits(row: Mapping[str, Any]) -> list[int]:
    """The numbers of parts in which a compiled kernel may compute a sum: powers of two up to its limit."""
    return [1 << i for i in range(row["most_splits"].bit_length())]


def split_configs(kind: Any, rows: Iterable[Mapping[str, Any]], divides: Callable[[Mapping[str, Any], int], bool]) -> list[Any]:
    """The configs of compiled kernels, in one part, and in as many more as `divides(row, parts)` accepts."""
    return [config_of(kind, row, splits=parts) for row in rows for parts in splits(row) if parts == 1 or divides(row, parts)]


def config_of(kind: Any, row: Mapping[str, Any], **more: int) -> Any:
    """The config of a compiled kernel, a dataclass `kind`, with the fields that its row does not have."""
    return kind(**{field.name: row[field.name] for field in dataclasses.fields(kind) if field.name in row}, **more)


def _csrc() -> bytes:
    """A hash of the CUDA sources, b"" where jaxext runs from its own sources."""
    try:
        from jaxext._cuda_build import SOURCES
    except ImportError:
        return b""
    return SOURCES.encode()


def _build() -> bytes:
    """Return what compiled the CUDA sources and for which devices, b"" where no module loads."""
    try:
        module = native.cuda_module()
    except ImportError:
        return b""
    return f"{module.cuda_version} {module.archs}".encode()
