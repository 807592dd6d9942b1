"""The implementation `cuda`: the kernels of csrc/, compiled when jaxext was installed, through XLA's foreign function interface (FFI).

A `Call` becomes a kernel's problem, one of its `candidates` the config, and the fields of both the attributes of the call; csrc/*_ffi.cc
reads them by the same names.  The compiled module says which problems the kernels refuse (csrc/refusals.h).  The handlers are registered
when the first program that calls one is lowered.  XLA refuses every program, not only ours, once a handler is registered that was compiled
with newer headers than its own: such a module is left alone.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxext._target import named
from jaxext.backends.cuda import cuda_causal, cuda_conv, cuda_depthwise, cuda_matmul, cuda_ragged, cuda_scaled, cuda_weight_only
from jaxext.backends.cuda.cuda_weight_only import WeightOnlyProblem
from jaxext.backends.kernel import (
    DTYPES,
    KERNELS,
    KernelCall,
    KernelImplementation,
    apart,
    causal_problem,
    conv_problem,
    matmul_problem,
    scaled_problem,
)
from jaxext.backends.preference import preference
from jaxext.forms.call import Call, no_kernel
from jaxext.forms.implementation import folder_of, hash_of
from jaxext.kernels._causal import CausalProblem
from jaxext.kernels._epilogue import ACTIVATIONS
from jaxext.kernels._gemm import MatmulProblem
from jaxext.kernels._geometry import ConvProblem
from jaxext.kernels._ragged import RaggedProblem, visits

_CAUSAL_ADDED = ("bias", "initial_states", "seq_idx", "idx_of_states")  # beside x and weight
GEOMETRY = ("input", "filter", "output", "stride", "low", "input_dilation", "filter_dilation")


class _Cuda(KernelImplementation):
    """What the families share."""

    name = "cuda"
    epilogues = True
    shared = (*KernelImplementation.shared, *sorted(KERNELS.glob("_*.py")))  # the geometry of problems

    def lacks(self, call):
        return no_kernel(call, "cuda") or missing() or _older_driver()

    def multiplied(self, problem):
        return "ieee"  # no kernel takes float32 numbers to the tensor cores

    def code(self, platform):
        """On CUDA devices also of the compiler and of what it compiled for, which only the compiled module tells."""
        return hash_of([*folder_of(type(self)), *self.shared], _csrc(), _build() if platform == "cuda" else b"")


# The names of handlers carry a version: csrc/*_ffi.cc raises it where a meaning changes, since exported programs outlive releases.
class CudaMatmul(_Cuda):
    custom_calls = (*(f"jaxext_matmul_{role}_v1" for role in ("nn", "nt", "tn")), "jaxext_linear_v1")

    def problem(self, call):
        return matmul_problem(call, MatmulProblem, call.arch or 0)

    def refuses(self, problem):
        return refused(problem, cuda_matmul)

    def slower(self, call):
        return "XLA's matrix products (cuBLAS) are expected to be as fast"

    def configs(self, problem):
        return cuda_matmul.candidates(problem, _compiled("matmul_kernels"))

    def launch(self, call, problem, config):
        return _launch(call, problem, call.op, config)


class CudaRagged(_Cuda):
    custom_calls = tuple(f"jaxext_ragged_{role}_v1" for role in ("nn", "nt", "tn"))
    epilogues = False

    def problem(self, call):
        return matmul_problem(call, RaggedProblem, call.arch or 0)

    def refuses(self, problem):
        return refused(problem, cuda_ragged)

    def slower(self, call):
        return None  # XLA multiplies the rows by every group's matrix, or block by block in a loop

    def configs(self, problem):
        return cuda_ragged.candidates(problem, _compiled("ragged_kernels"))

    def launch(self, call, problem, config):
        plain = _launch(call, problem, call.op, config, "places")

        def with_places(result, first, second, begin, end):
            places = jnp.stack([begin, end], -1) if problem.role == "tn" else visits(jnp, begin, end, problem.M, config.tile_m)
            return plain.call(result, first, second, places)

        return dataclasses.replace(plain, slots=(*plain.slots[:2], "begin", "end"), call=with_places)


class CudaWeightOnly(_Cuda):
    """Products of few rows with int8 and int4, which have a scale for each column, or for blocks of each."""

    custom_calls = ("jaxext_weight_only_v1",)
    epilogues = False

    def problem(self, call):
        return scaled_problem(call, WeightOnlyProblem, call.arch or 0)

    def refuses(self, problem):
        return cuda_weight_only.refuses(problem) or refused(problem, cuda_weight_only) or _not_compiled_for(problem.arch)

    def slower(self, call):
        if call.sizes["S"] == 1:
            return "XLA converts factors inside of its products, which are expected to be as fast"
        if call.sizes["I"] * call.sizes["M"] > cuda_weight_only.FEW_ROWS:
            return "Triton's kernels are expected to be as fast"
        return None  # XLA writes the scaled weight to memory, in 16 bits, and reads it again

    def configs(self, problem):
        return cuda_weight_only.candidates(problem)

    def launch(self, call, problem, config):
        return KernelCall(
            describe="weight_only" + (f" in {config.splits} parts" if config.splits > 1 else ""),
            slots=("x", "w", "w_scale"),
            splits=config.splits,
            call=functools.partial(_weight_only, problem, fields(problem) | dataclasses.asdict(config)),
        )


class CudaScaled(_Cuda):
    """Products of 8-bit floats, and those with integers by `CudaWeightOnly`."""

    custom_calls = ("jaxext_scaled_v1", *CudaWeightOnly.custom_calls)
    epilogues = False

    def plan(self, call):
        integers = any(jnp.issubdtype(call.dtypes[slot], jnp.integer) for slot in call.factors)
        return _WEIGHT_ONLY.plan(call) if integers else super().plan(call)

    def problem(self, call):
        return scaled_problem(call, cuda_scaled.ScaledProblem, call.arch or 0)

    def refuses(self, problem):
        return refused(problem, cuda_scaled)

    def slower(self, call):
        problem = self.problem(call)
        assert not isinstance(problem, str)  # it is asked of calls that it supports
        if cuda_scaled.clocks(problem, self.configs(problem)[0]) < cuda_scaled.wide_clocks(problem):
            return None  # others multiply numbers of 16 bits
        return "XLA's products of 16-bit numbers are expected to be as fast"

    def configs(self, problem):
        return cuda_scaled.candidates(problem, _compiled("scaled_kernels"))

    def launch(self, call, problem, config):
        slots, attributes = cuda_scaled.slots(problem), fields(problem) | dataclasses.asdict(config)
        shapes = {"result": tuple(attributes[name] for name in "BMN")}

        def prepared(result, *operands):
            """A result of 8 bits is float32 to the kernel."""
            given = cuda_scaled.arrays(problem, dict(zip(slots, operands, strict=True)))
            wide = result if result.dtype.itemsize > 1 else jax.ShapeDtypeStruct(result.shape, jnp.float32)
            return _called("jaxext_scaled_v1", attributes, tuple(given), shapes, wide, *given.values()).astype(result.dtype)

        splits = config.splits
        return KernelCall(describe="scaled" + (f" in {splits} parts" if splits > 1 else ""), slots=slots, splits=splits, call=prepared)


_WEIGHT_ONLY = CudaWeightOnly()


class CudaConv(_Cuda):
    custom_calls = (
        *(
            f"jaxext_{kernel}{rank}d_{name}_v1"
            for kernel in ("conv", "depthwise")
            for rank in (1, 2, 3)
            for name in ("fprop", "dgrad", "wgrad", "bias_act")
        ),
    )

    def problem(self, call):
        return conv_problem(call, call.arch or 0)

    def refuses(self, problem):
        family = _family(problem)
        return refused(problem, family) or (_not_compiled_for(problem.arch) if family is cuda_depthwise else None)

    def slower(self, call):
        row = preference(call)
        if not row.kernel:
            return row.reason
        if row.name == "three axes" or row.name == "depthwise" and call.sizes["K"] == 1:
            return None
        return "Triton's kernels are expected to be as fast"

    def configs(self, problem):
        return _family(problem).candidates(problem)

    def launch(self, call, problem, config):
        stem = call.op.replace("conv", "depthwise", 1) if _family(problem) is cuda_depthwise else call.op
        return _launch(call, problem, stem, config)


class CudaCausal(_Cuda):
    """`causal_conv1d`, and its backward as one kernel, which computes all cotangents."""

    custom_calls = ("jaxext_causal_conv1d_v1", "jaxext_causal_conv1d_backward_v1")

    def problem(self, call):
        return causal_problem(call, call.arch or 0)

    def refuses(self, problem):
        return refused(problem, cuda_causal) or _not_compiled_for(problem.arch)

    def slower(self, call):
        return None  # others take several kernels

    def configs(self, problem):
        return cuda_causal.candidates(problem)

    def launch(self, call, problem, config):
        added = [name for name in _CAUSAL_ADDED if name in call.dtypes]
        backward = problem.role == "backward"
        attributes = fields(problem) | dataclasses.asdict(config) | {name: int(name in added) for name in _CAUSAL_ADDED}
        attributes["activation"] = _number(problem.epilogue.activation)
        return KernelCall(
            describe="causal" + (f" in {config.splits} parts" if config.splits > 1 else ""),
            slots=("x", "weight", *added, *(["d_y"] if backward else [])),
            splits=1,
            call=functools.partial(_causal_backward if backward else _causal_forward, call, attributes),
        )


def _family(problem: ConvProblem) -> Any:
    """The module of the kernels that take the problem."""
    return cuda_depthwise if _depthwise(problem.G, problem.C) else cuda_conv


def _depthwise(groups: int, channels: int) -> bool:
    """One input channel and several groups leave nothing to a matrix product."""
    return groups > 1 and channels == 1


def refused(problem: MatmulProblem | ConvProblem | CausalProblem, family: Any) -> str | None:
    """Why the kernels of the family, which has the module, do not take the problem, or None; as the compiled module tells."""
    from jaxext import _cuda_module

    if isinstance(problem, CausalProblem):
        asked = fields(problem) | {"role": problem.role, "dtypes": problem.dtypes, "bias": problem.epilogue.bias, "arch": problem.arch}
        return _cuda_module.causal_refuses(**asked)
    if isinstance(problem, WeightOnlyProblem):
        return _cuda_module.weight_only_refuses(**fields(problem), dtypes=problem.dtypes, arch=problem.arch)
    if isinstance(problem, cuda_scaled.ScaledProblem):
        asked = fields(problem) | {"dtypes": (*problem.operand_dtypes, problem.dtypes[2]), "arch": problem.arch}
        return cuda_scaled.scaled_both_ways(problem) or _cuda_module.scaled_refuses(**asked)
    if reason := _refused_epilogue(problem):
        return reason
    asked = fields(problem) | {"role": problem.role, "dtypes": problem.dtypes, "arch": problem.arch}
    if isinstance(problem, RaggedProblem):
        return _cuda_module.ragged_refuses(**asked)
    if isinstance(problem, MatmulProblem):
        return _cuda_module.matmul_refuses(**asked, fused=problem.epilogue is not None)
    ask = _cuda_module.depthwise_refuses if family is cuda_depthwise else _cuda_module.conv_refuses
    return ask(rank=cuda_conv.rank(problem), **asked)


def _refused_epilogue(problem: MatmulProblem | ConvProblem) -> str | None:
    """Why no kernel fuses it, or None.  Its role is the forward one, since operations have no other."""
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


def fields(problem: MatmulProblem | ConvProblem | CausalProblem) -> dict[str, Any]:
    """Sizes and geometry, by the names that their structs in csrc have for them."""
    if isinstance(problem, CausalProblem):
        return {name: getattr(problem, name) for name in "BTCJ"}
    if isinstance(problem, WeightOnlyProblem):
        return {name: getattr(problem, name) for name in "BMNKS"} | {"bits": problem.bits_of_weight}
    if isinstance(problem, cuda_scaled.ScaledProblem):
        return cuda_scaled.asked(problem)
    of_products = "BPRMNKG" if isinstance(problem, RaggedProblem) else "BMNK"
    names = of_products if isinstance(problem, MatmulProblem) else (*"BNGCK", *GEOMETRY)
    return {name: getattr(problem, name) for name in names}


def _launch(call: Call, problem: MatmulProblem | ConvProblem, stem: str, config: Any, *more: str) -> KernelCall:
    """`more`: operands beside the factors."""
    attributes, slots, epilogue = fields(problem) | dataclasses.asdict(config), [*call.factors, *more], problem.epilogue
    if epilogue is not None:
        added = [slot for slot in ("bias", "residual") if getattr(epilogue, slot)]
        attributes |= {slot: int(slot in added) for slot in ("bias", "residual")} | {"saves": int(epilogue.saves)}
        attributes["activation"] = _number(epilogue.activation)
        slots += added
    shapes = {slot: problem.shapes[slot] for slot in call.factors}
    shapes |= dict.fromkeys(("residual", "result"), problem.shapes[call.open])
    kernel = stem if epilogue is not None else stem.rpartition("_")[0]
    splits = attributes.get("splits", 1)
    return KernelCall(
        describe=kernel + (f" in {splits} parts" if splits > 1 else ""),
        slots=tuple(slots),
        splits=splits,
        call=functools.partial(_called, f"jaxext_{stem}_v1", attributes, tuple(slots), shapes),
    )


def _number(activation: str | None) -> int:
    """jaxext::Activation."""
    return 0 if activation is None else 1 + ACTIVATIONS.index(activation)


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
    register()
    given = list(operands)
    if attributes["initial_states"]:
        at = 2 + attributes["bias"]
        given[at] = given[at].astype(given[0].dtype)
    typed = {name: np.array(value, np.int64)[()] for name, value in attributes.items()}
    return jax.ffi.ffi_call(target, results)(*given, **typed)


def _weight_only(problem: WeightOnlyProblem, attributes: Mapping[str, Any], result, x, w, scale) -> jax.Array:
    """The call of the handler, which takes two int4 in a byte, the first in the low half, as XLA packs them on GPUs."""
    register()
    B, M, N, K, S = (getattr(problem, label) for label in "BMNKS")
    if problem.packed:
        w = lax.bitcast_convert_type(w.reshape(-1, 2), jnp.int8)
    given = [x.reshape(B, M, K), w.reshape(B, K, -1), scale.reshape(B, S, N).astype(jnp.float32)]
    parts = (attributes["splits"],) if attributes["splits"] > 1 else ()
    typed = {name: np.array(value, np.int64)[()] for name, value in attributes.items()}
    made = jax.ShapeDtypeStruct((*parts, B, M, N), result.dtype if result.dtype.itemsize > 1 else jnp.float32)
    y = jax.ffi.ffi_call("jaxext_weight_only_v1", made)(*map(apart, given), **typed)
    return apart(y).reshape(result.shape).astype(result.dtype)


def _called(target: str, attributes: Mapping[str, Any], slots: Sequence[str], shapes: Mapping[str, tuple[int, ...]], result, *operands):
    """The call of a handler, which knows arrays by the shapes of their problem: three spatial axes, where a form may have fewer.

    `result` is a tuple if there are several, which have one shape, and so is what is returned.
    """
    register()
    parts = (attributes["splits"],) if attributes.get("splits", 1) > 1 else ()
    typed = {name: np.array(value, np.int64)[()] for name, value in attributes.items()}
    placed = (lambda x: x) if target.startswith("jaxext_depthwise") else apart  # depthwise kernels take any address, TMA does not
    given = [
        placed(x.astype(jnp.float32) if slot == "bias" else x.reshape(shapes.get(slot, x.shape)))
        for slot, x in zip(slots, operands, strict=True)
    ]
    results = jax.tree.map(lambda each: jax.ShapeDtypeStruct((*parts, *shapes["result"]), each.dtype), result)
    made = jax.ffi.ffi_call(target, results)(*given, **typed)
    return jax.tree.map(lambda y, each: placed(y).reshape(each.shape), made, result)


@functools.cache
def register() -> None:
    """Make the handlers known to XLA."""
    if reason := missing():
        raise RuntimeError(f"no CUDA kernels: {reason}")
    from jaxext import _cuda_module

    for name, handler in _cuda_module.handlers().items():
        jax.ffi.register_ffi_target(name, handler, platform="CUDA", api_version=1)


@functools.cache
def missing() -> str | None:
    """Why there are no CUDA kernels here, or None.  Loads the compiled module."""
    try:
        from jaxext._cuda_build import REASON
    except ImportError:
        return "jaxext runs from its sources, want it installed: pip install ."
    if REASON:
        return f"built without CUDA ({REASON})"
    try:
        from jaxext import _cuda_module
    except ImportError as error:
        return f"the compiled module does not load: {error}"
    built, known = _cuda_module.ffi_version(), _ffi_version()
    if built[0] != known[0] or built > known:
        built, known = (".".join(map(str, version)) for version in (built, known))
        return f"built with headers of XLA's FFI {built}, this jaxlib runs {known}: install jaxext anew, beside this jaxlib"
    return None


def _ffi_version() -> tuple[int, int]:
    """Of the FFI that this jaxlib runs, as its headers say."""
    header = (pathlib.Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text()
    major, minor = (int(re.findall(rf"define XLA_FFI_API_{part} (\d+)", header)[0]) for part in ("MAJOR", "MINOR"))
    return major, minor


def _older_driver() -> str | None:
    """Why the CUDA driver of this machine, if it has one, does not run what was compiled, so that every launch would fail; or None, as for
    the GPU of another machine.

    Any driver runs the code that a CUDA of its own series made, or an older one.  PTX, for GPUs newer than the code is for, wants a driver
    as new as the compiler.
    """
    from jaxext import _cuda_module

    driver = None if named() else _driver()
    if driver is None or driver[0] >= int(_cuda_module.cuda_version.partition(".")[0]):
        return None
    return f"compiled with CUDA {_cuda_module.cuda_version}, the driver is of CUDA {driver[0]}.{driver[1]}"


@functools.cache
def _driver() -> tuple[int, int] | None:
    """The version of CUDA that the driver of this machine is of, if there is one."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    return (version.value // 1000, version.value % 1000 // 10) if version.value > 0 else None


def _not_compiled_for(arch: int) -> str | None:
    """Why the portable kernels do not run there, or None: code runs on its own generation from its capability on, PTX on all newer ones."""
    from jaxext import _cuda_module

    for compiled in _cuda_module.archs.split(","):
        number, _, kind = compiled.partition("-")
        oldest = int(re.findall(r"\d+", number)[0])
        if oldest <= arch and (kind != "real" or oldest // 10 == arch // 10):
            return None
    return f"compiled for {_cuda_module.archs}, compute capability is {arch / 10}"


@functools.cache
def _compiled(table: str) -> Sequence[Mapping[str, Any]]:
    """The kernels that were compiled, with dtypes by their short names; the module has the table."""
    from jaxext import _cuda_module

    dtypes = ("operands", "second", "result")
    return [row | {slot: DTYPES[row[slot]] for slot in dtypes if slot in row} for row in getattr(_cuda_module, table)()]


def _csrc() -> bytes:
    """A hash of the CUDA sources, b"" where jaxext runs from its own sources."""
    try:
        from jaxext._cuda_build import SOURCES
    except ImportError:
        return b""
    return SOURCES.encode()


def _build() -> bytes:
    """What compiled the CUDA sources and for which devices, b"" where no module loads."""
    try:
        from jaxext import _cuda_module
    except ImportError:
        return b""
    return f"{_cuda_module.cuda_version} {_cuda_module.archs}".encode()
