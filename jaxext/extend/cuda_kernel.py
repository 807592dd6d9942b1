"""CUDA kernels that are given as text: compiled when a program is lowered, launched by XLA, and executed by ptxsim where no GPU is.

A call is checked when it is traced (`launches.py`).  The primitive's lowering compiles the source for the device, compares the compiled
parameters with those of the call, and embeds the image.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import inspect
import math
import os
import pathlib
import re
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.interpreters import ad, batching
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxext import _compat
from jaxext._messages import format_value
from jaxext._target import compute_capability, named
from jaxext.backends import launcher, nvrtc
from jaxext.extend import cupy_kernels, launches, signature
from jaxext.extend.launches import Launch, Number, short
from jaxext.extend.signature import Parameter

_simulating = threading.Lock()  # ptxsim runs one kernel at a time
# The shared memory that a block may have, in KB less one of the system's, by compute capability times 10 (CUDA C++ Programming Guide).
_SHARED = {70: 96, 75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}


class CudaKernel:
    """A CUDA kernel made by `cuda_kernel`.  Call it with arrays and keywords, in a program for a GPU."""

    def __init__(
        self,
        name: str,
        *,
        source: str,
        image: str | bytes,
        parameters: tuple[Parameter, ...],
        file: str,
        compiles: Mapping[str, Any],
        given: Mapping[str, Any],
    ):
        self.name, self._source, self._image, self._file = name, source, image, file
        self._compiles, self._given = compiles, given
        self.parameters = parameters
        code = [source, image, name, sorted(compiles.items()), list(map(str, parameters)), _code([*given.values()])]
        self._digest = hashlib.sha256(repr(code).encode()).hexdigest()[:16]

    @property
    def __name__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"cuda_kernel {self.name}({', '.join(map(str, self.parameters))})"

    def __call__(self, *arrays: jax.Array | np.ndarray, **keywords: Any) -> Any:
        """Return the results of a launch, under `jax.jit` or not.

        Operands that are split over devices are gathered, or raise an error on explicit meshes.  Inside `jax.shard_map`, or as the kernel
        of an `operation`, each device launches the kernel on its part.  The kernel has no derivative and no `vmap`; `operation` provides
        both.

        Args:
          *arrays: the arrays of the first pointers, in order.  The other pointers are the results'.
          **keywords: the kernel's scalars, by their parameters' names, and further static keywords of the functions of `cuda_kernel`.

        Returns:
          the result, or a tuple of several.

        Raises:
          TypeError: an operand is not an array, or not of the pointer's type; a scalar is missing, unknown or of another type.
          ValueError: the launch is not possible, such as a grid of zero blocks; the source does not compile.  The latter, and too much
            shared memory, are raised at lowering.
          ShardingTypeError: an operand is split on an explicit mesh.
          NotImplementedError: a derivative or a `vmap` is taken; or, at lowering, the program is not for a CUDA device, or NVRTC is
            missing.
          RuntimeError: the launcher is missing.  Raised at lowering.
        """
        structs = self._structs(arrays)
        if (empty := self._empty(structs, keywords)) is not None:
            return jax.tree.map(lambda y: jax.numpy.zeros(y.shape, y.dtype), empty)
        launch = self._launch(structs, keywords)
        results = self._bind(list(map(jax.numpy.asarray, arrays)), launch)
        return tuple(results) if len(results) > 1 else results[0]

    def _bind(self, operands: Sequence[jax.Array], launch: Launch) -> list[jax.Array]:
        """The results of a launch."""
        return _kernel_p.bind(*operands, kernel=self, launch=launch, wanted=tuple(range(len(launch.out))))

    def simulate(self, *arrays: np.ndarray | jax.Array, **keywords: Any) -> Any:
        """Execute the kernel's PTX on this CPU with ptxsim.  NVRTC compiles the source; no GPU is needed.

        Races, accesses out of bounds and reads of uninitialised memory are errors, even if the results would be right.

        Args:
          *arrays, **keywords: those of a call, with values.  The source is compiled for an H100, or for an A100 inside
            `jaxext.use_target("sm_80")`; ptxsim supports the instructions of these.

        Returns:
          the result, or a tuple of several, as numpy arrays.

        Raises:
          ptxsim.Fault: the kernel does one of the above, or leaves a part of a result unwritten.  The message has the line of the source.
          ModuleNotFoundError: ptxsim is not installed.
          NotImplementedError: NVRTC is missing, or the kernel was given as machine code.
        """
        try:
            import ptxsim
        except ModuleNotFoundError:
            raise ModuleNotFoundError(f"{self._is}: simulate needs ptxsim: pip install ./ptxsim of jaxext's repository") from None
        structs = self._structs(arrays)
        if (empty := self._empty(structs, keywords)) is not None:
            return jax.tree.map(lambda y: np.zeros(y.shape, y.dtype), empty)
        launch = self._launch(structs, keywords)
        given = [np.array(x, struct.dtype, order="C") for x, struct in zip(arrays, structs, strict=True)]
        aliases = {result: ptxsim.InOut(given[operand]) for operand, result in launch.aliases}
        changed = {operand: aliases[result] for operand, result in launch.aliases}
        operands = [changed.get(i) or ptxsim.Input(x) for i, x in enumerate(given)]
        results = [aliases.get(i) or ptxsim.Output(np.zeros(y.shape, y.dtype)) for i, y in enumerate(launch.out)]
        ptx, entry = self._for_ptxsim(launch)
        buffers, places = launch.buffers(len(operands)), [*operands, *results]
        arguments = [places[next(buffers)] if each is None else each.data for each in launch.numbers]
        with _simulating:
            module = ptxsim.Module(ptx)
            module.run(entry, launch.grid, launch.block, arguments, shared=launch.shared, cluster=launch.cluster)
        for i, result in enumerate(results):
            if missed := np.count_nonzero(result.written == 0):
                first = int(np.argmax(result.written == 0)) // result.values.itemsize
                where = f"the first of element {first} in row-major order" if result.values.ndim else "of its only element"
                raise ptxsim.Fault(f"{self._is} leaves {missed} of {result.values.nbytes} bytes of result {i} unwritten, {where}")
        return results[0].values if len(results) == 1 else tuple(result.values for result in results)

    @property
    def _aliases(self) -> Mapping[int, int]:
        return self._given["aliases"]

    @property
    def _is(self) -> str:
        return f"kernel {self.name}"

    def _structs(self, arrays: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        for i, x in enumerate(arrays):
            if not isinstance(x, jax.Array | np.ndarray) or jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
                raise TypeError(f"{self._is}: operand {i} is {format_value(x)}, want an array of numbers; scalars are keywords")
        return [jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype)) for x in arrays]

    def _empty(self, operands: Sequence[jax.ShapeDtypeStruct], keywords: Mapping[str, Any]) -> Any:
        """The results if they have no elements, so that there is nothing to launch; else None."""
        results = launches.shaped(self._is, self._evaluated(operands, keywords, "out"))
        if any(0 not in y.shape for y in results):
            return None
        first, *others = results
        return results if others else first

    # --- a launch

    def _launch(self, operands: Sequence[jax.ShapeDtypeStruct], keywords: Mapping[str, Any]) -> Launch:
        """The launch of a call, checked without compiling anything."""
        evaluate = functools.partial(self._evaluated, operands, keywords)
        results = launches.shaped(self._is, evaluate("out"))
        self._refuse_aliases(operands, results)
        for name in keywords:
            if not self._takes(name, len(operands)):
                pointer = any(each.name == name for each in self.parameters)
                why = (
                    "is a pointer, want its array as an operand"
                    if pointer
                    else f"is no parameter, want one of {[each for each in self._scalars if each[0] != '_']}"
                )
                raise TypeError(f"{self._is}: keyword {name} {why}")
        grid, block, cluster = (launches.sizes(self._is, each, evaluate(each)) for each in ("grid", "block", "cluster"))
        launches.refuse_sizes(self._is, grid, block, cluster)
        shared = evaluate("shared")
        if not launches.is_whole(shared) or shared < 0:
            raise ValueError(f"{self._is}: shared is {format_value(shared)}, want a number of bytes")
        scalars = evaluate("scalars") or {}
        if not isinstance(scalars, Mapping) or {*scalars} - {*self._scalars}:
            raise TypeError(f"{self._is}: scalars is {format_value(scalars)}, want a dict with keys of {self._scalars}")
        numbers, pointed = self._parameters(operands, results, {**scalars, **keywords})
        aliases = tuple(sorted(self._aliases.items()))
        return Launch(self._instance(evaluate("templates")), results, aliases, numbers, pointed, grid, block, cluster, int(shared))

    def _instance(self, templates: Any) -> str:
        """The kernel's name with the arguments of its template."""
        if isinstance(templates, str) or not isinstance(templates, Sequence):
            raise TypeError(f"{self._is}: templates is {format_value(templates)}, want a sequence of arguments")
        return f"{self.name}<{', '.join(map(_template, templates))}>" if templates else self.name

    def _evaluated(self, operands: Sequence[Any], keywords: Mapping[str, Any], what: str) -> Any:
        given = self._given[what]
        if not callable(given):
            return given
        names = _keywords_of(given, len(operands))
        try:
            return given(*operands, **{name: value for name, value in keywords.items() if names is None or name in names})
        except Exception as error:
            shapes = ", ".join(map(short, operands))
            raise TypeError(f"{self._is}: {what}({shapes}) raises {type(error).__name__}: {error}") from error

    def _takes(self, keyword: str, operands: int) -> bool:
        """Return whether a keyword of a call is a scalar of the kernel, or a keyword of a function of its launch."""
        of_functions = [_keywords_of(each, operands) for each in self._given.values() if callable(each)]
        return keyword in self._scalars or any(names is None or keyword in names for names in of_functions)

    @property
    def _scalars(self) -> list[str]:
        return [each.name for each in self.parameters if not each.pointer]

    def _refuse_aliases(self, operands: Sequence[Any], results: Sequence[Any]) -> None:
        if len({*self._aliases.values()}) < len(self._aliases):
            raise ValueError(f"{self._is}: aliases is {dict(self._aliases)}, want another result for each operand")
        for operand, result in self._aliases.items():
            if not (operand < len(operands) and result < len(results)):
                have = f"{len(operands)} operands and {len(results)} results"
                raise ValueError(f"{self._is}: aliases has {operand}: {result}, and there are {have}")
            x, y = operands[operand], results[result]
            if (x.shape, x.dtype) != (y.shape, y.dtype):
                raise ValueError(
                    f"{self._is}: operand {operand} is {short(x)}, want {short(y)} as result {result}, with which it shares a buffer"
                )

    def _parameters(
        self, operands: Sequence[Any], results: Sequence[Any], given: Mapping[str, Any]
    ) -> tuple[tuple[Number | None, ...], tuple[np.dtype, ...]]:
        """The scalar of each parameter, None of a pointer; and the dtype of each pointer's array."""
        aliased = {*self._aliases.values()}
        arrays = [*operands, *(y for i, y in enumerate(results) if i not in aliased)]
        if (count := sum(each.pointer for each in self.parameters)) != len(arrays):
            have = f"{len(operands)} operands and {len(results)} results" + (f", {len(aliased)} of them in one place" if aliased else "")
            raise TypeError(f"{self._is}: {have}, want {count} arrays for the pointers of {self!r}")
        pointed, numbers = iter(enumerate(arrays)), []
        for i, parameter in enumerate(self.parameters):
            if parameter.pointer:
                at, x = next(pointed)
                if parameter.is_other(x.dtype):
                    what = parameter.name or f"pointer {i}"
                    raise TypeError(f"{self._is}: the array of {what} is {short(x)}, want {parameter.dtype}: {parameter}")
                if parameter.const and at >= len(operands):
                    raise TypeError(
                        f"{self._is}: const {parameter} would get a result, want the pointers of operands before those of results"
                    )
                numbers.append(None)
            elif parameter.name not in given:
                raise TypeError(
                    f"{self._is}: {parameter} is missing, want a keyword {parameter.name}, or a label {parameter.name} of the operation"
                )
            else:
                numbers.append(launches.number(self._is, parameter, given[parameter.name]))
        return tuple(numbers), tuple(np.dtype(x.dtype) for x in arrays)

    # --- compiling

    def _compiled(self, arch: int, launch: Launch, *, ptx: bool) -> tuple[str | bytes, str]:
        """The image for a device and the name of its entry; its parameters are those of the call."""
        if math.prod(launch.cluster) > 1 and arch < 90:
            raise ValueError(f"{self._is}: cluster is {launch.cluster}, want (1, 1, 1) on sm_{arch}, since clusters need sm_90")
        if self._source:
            if reason := nvrtc.missing():
                raise NotImplementedError(f"{self._is}: {reason}")
            made = nvrtc.compile(self._source, launch.name, arch, file=self._file, **self._compiles)
            image, text, entry = made.cubin, made.ptx, made.name
        else:
            image, entry = self._image, self.name
            text = image if isinstance(image, str) else ""
            if ptx and not text:
                raise NotImplementedError(f"{self._is}: it was given as machine code, want its source or its PTX to simulate it")
        static = 0
        if text:
            compiled = signature.of_ptx(text, entry)
            assert compiled is not None, entry
            if not self._source and not _runs(compiled.target, arch):
                raise ValueError(f"{self._is}: it is compiled for {compiled.target}, want one for sm_{arch}")
            launches.refuse_compiled(self._is, signature.of_mangled(entry), compiled, launch)
            static = compiled.shared
        limit = _SHARED.get(arch, 227) * 1024
        if static + launch.shared > limit:
            beside = f" beside {static} of the source" if static else ""
            raise ValueError(f"{self._is}: shared is {launch.shared} bytes{beside}, want at most {limit} in all on sm_{arch}")
        return text if ptx else image, entry

    def _for_ptxsim(self, launch: Launch) -> tuple[str, str]:
        """The PTX of the kernel and the name of its entry."""
        ptx, entry = self._compiled((named() and compute_capability("cuda")) or 90, launch, ptx=True)
        return str(ptx), entry

    def _lower(self, platform: str, arch: int | None, operands: Sequence[jax.Array], launch: Launch) -> Sequence[jax.Array]:
        """The results of the launch in a program for a device."""
        if platform != "cuda":
            instead = "want 'cuda': `simulate` runs it on a CPU, and `operation` gives it a reference"
            raise NotImplementedError(f"{self._is}: platform is {platform!r}, {instead}")
        if arch is None:
            raise NotImplementedError(f"{self._is}: the target GPU is unknown: name one by jaxext.use_target")
        if not named() or launcher.missing() is None:
            launcher.register()  # of a machine without one the program is for another
        image, entry = self._compiled(arch, launch, ptx=False)
        data = image.encode() + b"\0" if isinstance(image, str) else image
        buffers = launch.buffers(len(operands))
        pairs = [(0, next(buffers)) if each is None else (each.dtype.itemsize, each.bits) for each in launch.numbers]
        results = [jax.ShapeDtypeStruct(y.shape, y.dtype) for y in launch.out]
        return jax.ffi.ffi_call(launcher.TARGET, results, input_output_aliases=dict(launch.aliases))(
            *operands,
            image=base64.b64encode(data).decode(),
            digest=hashlib.sha256(data).hexdigest(),
            name=entry,
            shared=np.int64(launch.shared),
            parameters=np.array(pairs, np.int64).ravel(),
            **{each: np.array(getattr(launch, each), np.int64) for each in ("grid", "block", "cluster")},
        )


def _keywords_of(function: Callable, operands: int) -> list[str] | None:
    """The keywords that a function takes besides the operands; None: any."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return None
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return None
    positional = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    return [*positional[operands:], *(each.name for each in parameters if each.kind is each.KEYWORD_ONLY)]


def _runs(target: str, arch: int) -> bool:
    """Return whether PTX for a target such as "sm_80" runs on a device."""
    found = re.fullmatch(r"sm_(\d+)([af]?)", target)
    return found is None or (int(found[1]) == arch if found[2] else int(found[1]) <= arch)


def _code(value: Any, depth: int = 4) -> Any:
    """The code of a function of a launch with all that it closes over, by which other processes tell it from another one."""
    if isinstance(value, functools.partial):
        value = (value.func, value.args, *sorted(value.keywords.items()))
    if isinstance(value, tuple | list):
        return [_code(each, depth) for each in value]
    if isinstance(value, types.CodeType):
        return [value.co_code.hex(), value.co_names, [_code(each, depth) for each in value.co_consts]]
    if isinstance(value, types.FunctionType) and depth:
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        read = [value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__]
        return [
            _code(each, depth - 1) for each in (value.__code__, value.__defaults__, *(value.__kwdefaults__ or {}).values(), *cells, *read)
        ]
    if isinstance(value, bool | int | float | str | bytes | None | np.dtype | np.generic | jax.ShapeDtypeStruct | Mapping):
        return repr(value)
    return getattr(value, "__qualname__", None) or getattr(value, "__name__", None) or type(value).__qualname__


# --- the primitive


def _sharding_rule(*avals, launch: Launch, result, **_):
    split = next((aval.sharding for aval in avals if any(aval.sharding.spec)), None)
    if split is not None:
        raise _compat.ShardingTypeError(
            f"cuda_kernel: an operand is split as {split.spec}, want it replicated: call the kernel in a shard_map, or declare an operation"
        )
    return NamedSharding(avals[0].sharding.mesh, P(*[None] * launch.out[result].ndim))


_kernel_p = _compat.operation_primitive(
    "cuda_kernel",
    lambda *_, launch, result=0, **__: launch.out[result].shape,
    lambda *_, launch, result=0, **__: launch.out[result].dtype,
    lambda *avals, launch, result=0, **__: _sharding_rule(*avals, launch=launch, result=result),
)


def _lower(platform, arch, partitioner, *operands, kernel: CudaKernel, launch: Launch, wanted: Sequence[int]):
    results = kernel._lower(platform, arch, operands, launch)
    return [results[i] for i in wanted]


def _no_rule(what: str, *_, kernel: CudaKernel, **__):
    raise NotImplementedError(f"kernel {kernel.name}: it has no {what}: declare it by jaxext.extend.operation, with a reference in jnp")


_typed = _kernel_p.abstract_eval


@_kernel_p.def_abstract_eval
def _types(*avals, launch: Launch, wanted: Sequence[int], **params):
    return _typed(*avals, launch=launch, wanted=wanted, **params)[0] if avals else [launch.out[i] for i in wanted]


_compat.register_lowering(_kernel_p, _lower, multiple_results=True)
ad.primitive_jvps[_kernel_p] = functools.partial(_no_rule, "derivative")
batching.primitive_batchers[_kernel_p] = functools.partial(_no_rule, "vmap")


# --- the declaration


def cuda_kernel(
    source: Any,
    name: str | None = None,
    /,
    *,
    grid: Any = None,
    block: Any = None,
    out: Any = None,
    shared: Any = 0,
    cluster: Any = None,
    scalars: Callable[..., Mapping[str, Any]] | Mapping[str, Any] | None = None,
    options: Sequence[str] = (),
    includes: Sequence[str | os.PathLike] = (),
    templates: Any = (),
    aliases: Mapping[int, int] | None = None,
    parameters: str | None = None,
) -> CudaKernel:
    """Declare a CUDA kernel from its source, for jax programs.

    NVRTC compiles it for the device's compute capability when a program is first lowered, and a cache on disk keeps the machine code.  XLA
    launches it, also in CUDA graphs, and exported programs contain the compiled code.

    The kernel's parameters are pointers and scalars.  Pointers take the operands in order, then the results.  Scalars are keywords of a
    call, converted to the types of their parameters.  `grid`, `block`, `shared`, `cluster`, `out`, `scalars` and `templates` are values,
    or functions of the operands' `jax.ShapeDtypeStruct`s and of those static keywords of the call that they name.

    Args:
      source: CUDA C++ as a str; the path of a file of CUDA C++, PTX (`.ptx`) or machine code (`.cubin`); PTX as a str; machine code as
        bytes; or a `cupy.RawKernel`, `cupy.RawModule` or `cupy.ElementwiseKernel`.
      name: the kernel's name, such as "scale_add" or "filters::blur".  A `RawKernel` and an `ElementwiseKernel` have their own.
      grid, block: the number of blocks, and of threads per block: one to three ints each.  An `ElementwiseKernel` has its own, and its own
        `out`.
      out: an object with the shape and dtype of the result, such as a `jax.ShapeDtypeStruct`, or a tuple of several.
      shared: bytes of dynamic shared memory per block.
      cluster: the blocks of a cluster along each axis (compute capability 9.0 and newer), or None for no clusters.
      scalars: default values of scalars, by name, such as `lambda x: dict(n=x.size)`.
      options: further options of NVRTC, such as "-use_fast_math".
      includes: folders for `#include`.
      templates: the template's arguments: numbers, C++ types as str, or dtypes.
      aliases: operand -> the result that shares its buffer.  The kernel has one pointer for both, and updates it in place.  XLA copies the
        operand if it is read later.
      parameters: the parameters in C++, such as "const float* x, float* y, int n", if the source does not show them: for PTX and machine
        code, and if an included file or a macro defines the kernel.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: the source has no such kernel.
      FileNotFoundError: `source` is a path without a file.
      NotImplementedError: a cupy kernel uses cooperative groups, `loop_prep` or `after_loop`.

    Examples:
      >>> source = '''
      ... __global__ void scale_add(const float* x, const float* y, float* z, int n, float scale) {
      ...   int i = blockIdx.x * blockDim.x + threadIdx.x;
      ...   if (i < n) z[i] = scale * x[i] + y[i];
      ... }'''
      >>> scale_add = cuda_kernel(source, "scale_add", grid=lambda x, y: -(-x.size // 256), block=256, out=lambda x, y: x)
      >>> x = np.arange(5, dtype=np.float32)
      >>> scale_add.simulate(x, x, n=x.size, scale=2)
      array([ 0.,  3.,  6.,  9., 12.], dtype=float32)
    """
    source, name, own = cupy_kernels.taken(source, name)
    if not isinstance(name, str) or not name.strip():
        raise TypeError(f"cuda_kernel: name is {format_value(name)}, want the kernel's name, a str")
    text, image, file = _read(source, name)
    for what, given, kind, of in (("options", options, "words", str), ("includes", includes, "folders", str | os.PathLike)):
        if isinstance(given, str) or not isinstance(given, Sequence) or not all(isinstance(each, of) for each in given):
            raise TypeError(f"cuda_kernel: {what} of {name} is {format_value(given)}, want a sequence of {kind}")
    if parameters is not None and not isinstance(parameters, str):
        raise TypeError(f"cuda_kernel: parameters of {name} is {format_value(parameters)}, want C++ text, a str")
    if aliases is not None and not (
        isinstance(aliases, Mapping) and all(launches.is_whole(n) and n >= 0 for pair in aliases.items() for n in pair)
    ):
        raise TypeError(f"cuda_kernel: aliases of {name} is {format_value(aliases)}, want a dict of operands' and results' numbers")
    given = dict(grid=grid, block=block, out=out, shared=shared, cluster=cluster, scalars=scalars, templates=templates)
    given["cluster"] = (1, 1, 1) if cluster is None else cluster
    absent = [what for what, value in given.items() if value is None or isinstance(value, tuple) and not value]
    how: dict[str, Any] = {**given, **{what: own[what] for what in own if what in absent}}
    if missing := [what for what in ("grid", "block", "out") if how[what] is None]:
        raise TypeError(f"cuda_kernel: {missing[0]} of {name} is missing, want a value, or a function of the operands")
    options = (*own.get("options", ()), *options)
    compiles = dict(options=tuple(options), includes=tuple(os.fspath(each) for each in includes)) if text else {}
    try:
        known = signature.of_text(parameters) if parameters is not None else signature.of_source(text, name)
    except ValueError as error:
        raise ValueError(f"cuda_kernel: {error}") from None
    if text and known is None:
        have = f"it has {signature.names(text)}; for an included kernel, pass `parameters`"
        raise ValueError(f"cuda_kernel: the source has no __global__ function {name}, {have}")
    if not text and (templates or options or includes):
        raise ValueError(f"cuda_kernel: {name} is compiled code, want neither options, includes nor templates")
    if isinstance(image, str) and not text and signature.of_ptx(image, name) is None:
        raise ValueError(f"cuda_kernel: the PTX has no kernel {name}, it has {signature.entries(image)}")
    if known is None:
        raise ValueError(f"cuda_kernel: {name} is compiled code, want its `parameters` in C++, such as 'const float* x, float* y, int n'")
    names = [each.name for each in known if not each.pointer]
    if "" in names or len({*names}) < len(names):
        raise ValueError(f"cuda_kernel: scalars of {name} have the names {names}, want a different name for each")
    return CudaKernel(
        name,
        source=text,
        image=image,
        parameters=known,
        file=file,
        compiles=compiles,
        given={**how, "aliases": dict(aliases or {})},
    )


def _read(source: Any, name: str) -> tuple[str, str | bytes, str]:
    """The source, or else the image, and the name of the file for messages."""
    file = ""
    if isinstance(source, os.PathLike) or (
        isinstance(source, str) and "\n" not in source and source.endswith((".cu", ".cuh", ".ptx", ".cubin"))
    ):
        path = pathlib.Path(source)
        file, source = os.path.abspath(path), path.read_bytes() if path.suffix == ".cubin" else path.read_text()
    if isinstance(source, bytes):
        if not source.startswith(b"\x7fELF"):
            raise ValueError(f"cuda_kernel: {name} is given as bytes that are not machine code, want a cubin, or source or PTX as a str")
        return "", source, file
    if not isinstance(source, str):
        raise TypeError(
            f"cuda_kernel: the source of {name} is {format_value(source)}, want CUDA C++ or PTX as a str, a path, or a cubin's bytes"
        )
    is_ptx = ".version" in source and ".entry" in source and "__global__" not in source
    return ("", source, file) if is_ptx else (source, "", file)


def _template(argument: Any) -> str:
    """A template's argument in C++."""
    if isinstance(argument, bool | np.bool_):
        return str(bool(argument)).lower()
    if isinstance(argument, str | int | np.integer):
        return str(argument)
    found = [name for name, dtype in signature.DTYPES.items() if argument is not None and dtype == argument]
    if not found:
        raise TypeError(f"cuda_kernel: templates has {format_value(argument)}, want a number, a dtype, or a type of C++ as a str")
    return "signed char" if found[0] == "char" else found[0]
