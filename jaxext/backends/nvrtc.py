"""NVRTC compiles CUDA C++ source text to machine code: it needs neither a host compiler nor a GPU.

NVRTC is a library of CUDA. It is called through ctypes; jax[cuda13] brings it, as does `pip install jaxext[nvrtc]`.
What is compiled is cached, in the process and on disk: in the folder `nvrtc` of the user's cache directory, or in the folder that
JAXEXT_NVRTC_CACHE names in the environment; nowhere if it is empty. The folder may be deleted at any time.

This module knows nothing of jax: to lower a call and to launch its kernel is its callers' work.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import importlib.util
import json
import os
import pathlib
import re
import tempfile
from collections.abc import Iterator, Sequence

_RELEASES = (13, 12)  # of CUDA: the suffixes of the library's name
_FORMAT = 1  # of the entries on disk
_INVALID_OPTION = 5  # nvrtcResult
# NVRTC's name of each source. Headers beside it are found, as in the working directory if it has no folder, and the cache does not see
# their changes. --no-source-include also hides the headers beside another header.
_NOWHERE = "/dev/null/source.cu"
# Headers that NVRTC does not have itself -> how to get them.
_HINTS = {
    r"crt/.*": "CUDA's package nvidia-cuda-crt has this header, as has a CUDA toolkit",
    r"(nv|cuda|cub|thrust)/.*": "CUDA's package nvidia-cuda-cccl has this header, as has a CUDA toolkit",
    r"(cuda|cooperative_groups|mma|vector_)\w*\.h": "CUDA's package nvidia-cuda-runtime has this header, as has a CUDA toolkit",
    r"(std\w+|assert|float|limits|math|string)\.h|[a-z_]+": "NVRTC has no standard library, but has the functions of <math.h> without it;"
    " <cuda/std/cstdint> and others are in the package nvidia-cuda-cccl",
}
_GETTERS = {"log": "ProgramLog", "ptx": "PTX", "cubin": "CUBIN"}


class CompileError(ValueError):
    """A source that NVRTC does not compile. The message has NVRTC's log."""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A kernel's machine code and PTX, of one compilation."""

    cubin: bytes  # for the real architecture
    ptx: str
    name: str  # of the kernel in both: mangled, unless it is extern "C"
    log: str  # warnings


def compile(
    source: str,
    kernel: str,
    arch: int,
    *,
    options: Sequence[str] = (),
    includes: Sequence[str | os.PathLike] = (),
    file: str = "",
) -> Compiled:
    """Return the kernel named `kernel`, compiled from CUDA C++.

    Args:
      source: CUDA C++. It may include CUDA's own headers, such as <cuda_bf16.h>, those in `includes` and those beside `file`. Headers in
        the working directory are not found.
      kernel: a C++ expression that names one __global__ function, such as "scale_add" or "ns::f<float, 128>".
      arch: the GPU's compute capability times 10, such as 90.
      options: NVRTC's options, besides --gpu-architecture.
      includes: folders of headers. The kernel is compiled again if any file in them changes, but not if a header elsewhere does, which a
        source includes by its absolute path or through "..".
      file: the name of the source in messages and line information, or its path.

    Raises:
      CompileError: NVRTC does not compile it, or finds no such kernel.
      RuntimeError: there is no NVRTC here; see `missing`.
    """
    for name, text in {
        "source": source,
        "kernel": kernel,
        "file": file,
        **{f"options[{n}]": each for n, each in enumerate(options)},
    }.items():
        if "\0" in text:  # C ends a string there, silently
            raise CompileError(f"kernel {kernel!r}: {name} has a null character")
    folders = tuple(os.path.abspath(folder) for folder in includes)
    for folder in folders:
        if not os.path.isdir(folder):  # NVRTC ignores it
            raise CompileError(f"kernel {kernel}: includes has {folder}, which is no folder")
    headers = _fingerprint([*folders, *_paths(options), *_headers_beside(file)])
    if os.path.dirname(file):
        folders = (*folders, os.path.dirname(os.path.abspath(file)))
    return _cached(source, kernel, arch, tuple(options), folders, file or f"{kernel}.cu", headers, os.environ.get("JAXEXT_NVRTC_CACHE"))


def missing() -> str | None:
    """Return the reason why NVRTC cannot be used here, and how to get it, or None."""
    try:
        _nvrtc()
    except RuntimeError as error:
        return str(error)
    return None


def version() -> tuple[int, int]:
    """The version of NVRTC, such as (13, 5)."""
    return _nvrtc().version


@functools.lru_cache(maxsize=256)
def _cached(
    source: str, kernel: str, arch: int, options: tuple[str, ...], folders: tuple[str, ...], file: str, headers: str, cache: str | None
) -> Compiled:
    nvrtc = _nvrtc()
    meant = [_FORMAT, nvrtc.identity, source, kernel, arch, options, folders, file, headers]
    key = hashlib.sha256(json.dumps(meant).encode()).hexdigest()
    folder = _cache_folder(cache)
    compiled = _read(folder / key, key) if folder else None
    if compiled is None:
        compiled = _compile(nvrtc, source, kernel, arch, options, folders, file)
        if folder:
            _write(folder / key, key, compiled)
    return compiled


def _compile(nvrtc: _Nvrtc, source: str, kernel: str, arch: int, options: tuple[str, ...], folders: tuple[str, ...], file: str) -> Compiled:
    real = f"sm_{arch}a" if arch >= 90 else f"sm_{arch}"  # "a": with the instructions of this architecture alone, such as wgmma
    given = [f"--gpu-architecture={real}", "--generate-line-info"]
    if not any(re.match("--?std", option) for option in options):  # NVRTC warns about a second one
        given.append("--std=c++17")
    given += [f"--include-path={folder}" for folder in (*folders, *nvrtc.headers)]
    result, name, texts = nvrtc.run(f"#line 1 {json.dumps(file, ensure_ascii=False)}\n{source}", kernel, [*given, *options])
    log = texts["log"].decode(errors="replace").strip("\0\n").replace(_NOWHERE, file)
    fails = f"kernel {kernel}: NVRTC does not compile it for {real}"
    if result == _INVALID_OPTION:
        raise CompileError(f"{fails}, with options {list(options)}\n{log}")
    errors = re.findall(r"^(.*)\(\d+\): (?:catastrophic )?error", log, re.MULTILINE)
    if errors and set(errors) == {"__nv_name_map"}:  # the file in which NVRTC looks names up
        raise CompileError(
            f"{fails}: {kernel!r} does not name one kernel of {file}. "
            f'A template needs its arguments, as in "f<float>", and a namespace its name, as in "ns::f"\n{log}'
        )
    if result:
        unopened = re.search(r'not open source file "(.*?)"', log)
        hints = [hint for header, hint in _HINTS.items() if unopened and re.fullmatch(header, unopened[1])]
        raise CompileError("\n".join([fails, log or nvrtc.error(result), *hints[:1]]))
    ptx = texts["ptx"].decode().strip("\0")
    if not texts["cubin"] or f".entry {name}(" not in ptx or not re.search(rf"^\.target {real}\b", ptx, re.MULTILINE):
        raise CompileError(f"{fails}: there is no kernel for this architecture in the result, with options {list(options)}\n{log}".rstrip())
    return Compiled(texts["cubin"], ptx, name, log)


def _paths(options: Sequence[str]) -> Iterator[str]:
    """The folders and files of headers that options name."""
    for option in options:
        match = re.fullmatch(r"(?:-I|--include-path=?|-include=?|--pre-include=?)?([^-].*)", option, re.DOTALL)
        if match and os.path.exists(match[1]):
            yield os.path.abspath(match[1])


def _headers_beside(file: str) -> list[str]:
    """The files beside a source that it may include, if it is a file."""
    folder = os.path.dirname(file)
    names = sorted(os.listdir(folder)) if folder else ()
    return [os.path.abspath(os.path.join(folder, name)) for name in names if name.endswith((".h", ".hpp", ".cuh", ".cu", ".inl"))]


def _fingerprint(paths: Sequence[str]) -> str:
    """A hash of the names, sizes and times of change of all files under `paths`."""
    found = []
    for path in paths:
        files: list[str] = []
        seen: set[str] = set()
        for at, folders, names in os.walk(path, followlinks=True):
            if os.path.realpath(at) in seen:  # a link to a folder that holds it would never end
                folders.clear()
            seen.add(os.path.realpath(at))
            files += [os.path.join(at, name) for name in names]
        for each in sorted(files or [path]):
            try:
                status = os.stat(each)
                found.append((each, status.st_size, status.st_mtime_ns))
            except OSError:  # a link to nothing, which NVRTC cannot read either
                found.append((each, 0, 0))
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


# Entries on disk: a line with the hash of all that follows and of the key, a line of JSON, then the machine code and the PTX.
# Each is written to a file of its own and then renamed, so that readers see all of it or nothing, without a lock.


def _cache_folder(named: str | None) -> pathlib.Path | None:
    if named is not None:
        return pathlib.Path(named).absolute() if named else None
    import platformdirs

    return platformdirs.user_cache_path("jaxext", appauthor=False) / "nvrtc"


def _read(path: pathlib.Path, key: str) -> Compiled | None:
    try:
        digest, _, content = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    if digest != hashlib.sha256(key.encode() + content).hexdigest().encode():
        return None
    header, _, data = content.partition(b"\n")
    fields = json.loads(header)
    return Compiled(data[: fields["cubin"]], data[fields["cubin"] :].decode(), fields["name"], fields["log"])


def _write(path: pathlib.Path, key: str, compiled: Compiled) -> None:
    header = {"name": compiled.name, "log": compiled.log, "cubin": len(compiled.cubin)}
    content = json.dumps(header).encode() + b"\n" + compiled.cubin + compiled.ptx.encode()
    temporary = None
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
            temporary = file.name
            file.write(hashlib.sha256(key.encode() + content).hexdigest().encode() + b"\n" + content)
        os.replace(temporary, path)
    except OSError:  # a folder that cannot be written, or a full disk: it is compiled again the next time
        if temporary:
            pathlib.Path(temporary).unlink(missing_ok=True)


class _Nvrtc:
    """The library, where its headers are, and what it was built as."""

    def __init__(self, path: str):
        """Load a library, by its path or by its name.

        Raises:
          OSError: there is none.
          AttributeError: it is not NVRTC, or too old.
        """
        self._library = ctypes.CDLL(path)
        self._library.nvrtcGetCUBIN  # noqa: B018 - missing before CUDA 11.1
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        self.version = (major.value, minor.value)
        path = path if os.path.isabs(path) else _loaded(path)
        self.headers = [*_headers(path, major.value)]
        sizes = [(folder, sorted((e.name, e.stat().st_size) for e in os.scandir(folder))) for folder in self.headers]
        self.identity = [*self.version, os.path.getsize(path) if path else 0, sizes]

    def run(self, source: str, kernel: str, options: list[str]) -> tuple[int, str, dict[str, bytes]]:
        """Return the result of nvrtcCompileProgram, the mangled name, and log, PTX and machine code."""
        program, expression, lowered = ctypes.c_void_p(), kernel.encode(), ctypes.c_char_p()
        self._check(self._library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), _NOWHERE.encode(), 0, None, None))
        try:
            self._check(self._library.nvrtcAddNameExpression(program, expression))
            result = self._library.nvrtcCompileProgram(
                program, len(options), (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            )
            if result:
                return result, "", {"log": self._get("ProgramLog", program)}
            self._check(self._library.nvrtcGetLoweredName(program, expression, ctypes.byref(lowered)))
            return 0, (lowered.value or b"").decode(), {key: self._get(name, program) for key, name in _GETTERS.items()}
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def error(self, result: int) -> str:
        return self._library.nvrtcGetErrorString(result).decode()

    def _get(self, name: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{name}Size")(program, ctypes.byref(size)))
        data = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{name}")(program, data) if size.value else 0)
        return data.raw

    def _check(self, result: int) -> None:
        if result:
            raise RuntimeError(f"NVRTC {self.version[0]}.{self.version[1]}: {self.error(result)}")


@functools.cache
def _nvrtc() -> _Nvrtc:
    tried = []
    for path in _libraries():
        try:
            return _Nvrtc(path)
        except (OSError, AttributeError) as error:
            tried.append(str(error))
    raise RuntimeError(
        "NVRTC, which compiles CUDA C++, was not found: pip install 'jaxext[nvrtc]' (jax[cuda13] brings it too), or set "
        f"CUDA_HOME to the folder of a CUDA toolkit ({'; '.join(tried)})"
    )


def _wheels() -> list[str]:
    """The folders of NVIDIA's packages."""
    spec = importlib.util.find_spec("nvidia")
    return [*(spec.submodule_search_locations or ())] if spec else []


def _toolkits() -> list[str]:
    named = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    return [os.path.abspath(folder) for folder in named if folder]


def _libraries() -> Iterator[str]:
    """Paths of libraries that exist, then names for the loader: of a library that is loaded already, or the system's."""
    of = {13: ("cu13/lib",), 12: ("cuda_nvrtc/lib",)}
    folders = {release: [f"{wheel}/{folder}" for wheel in _wheels() for folder in of[release]] for release in _RELEASES}
    paths = [f"{folder}/libnvrtc.so.{release}" for release in _RELEASES for folder in folders[release]]
    paths += [f"{toolkit}/lib64/libnvrtc.so.{release}" for toolkit in _toolkits() for release in _RELEASES]
    yield from filter(os.path.exists, paths)
    yield from (f"libnvrtc.so.{release}" for release in _RELEASES)


def _loaded(name: str) -> str:
    """The path of a loaded library, empty if unknown."""
    with open("/proc/self/maps") as maps:
        return next((line.split(maxsplit=5)[5].strip() for line in maps if f"/{name}" in line), "")


def _headers(library: str, release: int) -> Iterator[str]:
    """The folders of CUDA's headers of the library's release: beside it, of another package, or of a toolkit."""
    wheels = [f"{wheel}/{folder}" for wheel in _wheels() for folder in (f"cu{release}", "cuda_runtime")]
    for root in filter(None, (os.path.dirname(os.path.dirname(library)), *wheels, *_toolkits())):
        include = os.path.join(root, "include")
        try:
            text = pathlib.Path(include, "cuda_runtime_api.h").read_text(errors="replace")
        except OSError:
            continue
        defined = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", text)
        if defined and int(defined[1]) // 1000 == release:
            yield include
            if os.path.isdir(f"{include}/cccl"):  # <cuda/std/...>, if nvidia-cuda-cccl is here
                yield f"{include}/cccl"
            return
