"""An interpreter of PTX: what the compilers made of a kernel, executed on a CPU.

>>> module = Module(ptx)
>>> module.run("kernel", grid=(2,), block=(128,), arguments=[Input(x), Output(y), 7])

The machine is C++ (machine.h says how it works), compiled by g++ when it is first used.  A run raises `Fault` where the kernel does what
it may not: an access outside of an array, of what nothing has written, or that races with another; a missing fence or wait; a deadlock;
an instruction that the machine does not know.
"""

import ctypes
import dataclasses
import functools
import itertools
import math
import pathlib
from typing import Any

import cpp
import numpy as np

HERE = pathlib.Path(__file__).parent
FLAGS = ["-std=c++20", "-O2", "-fPIC", "-Wall", "-Wextra", "-Werror"]
LATE, EARLY = True, False  # when asynchronous copies and products take effect
TENSOR_MAP_MAGIC = 0x70616D20726F736E  # asynchronous.cc


class Fault(Exception):
    """The kernel does what it may not; the message says where."""


def texts(*patterns: str) -> list[str]:
    return [path.read_text() for pattern in patterns for path in sorted(HERE.glob(pattern))]


@functools.cache
def library() -> ctypes.CDLL:
    """The machine, compiled once for all processes."""
    library = cpp.shared_library(sorted(HERE.glob("*.cc")), FLAGS, HERE.glob("*.h"))
    library.PtxParse.restype = ctypes.c_void_p
    return library


class TensorMap(ctypes.Structure):
    """A tensor map's fields, innermost axis first: TensorMap in machine.h."""

    _fields_ = [(name, ctypes.c_int64) for name in ("im2col", "element_bytes", "rank", "address")]
    _fields_ += [(name, ctypes.c_int64 * 5) for name in ("sizes", "strides", "box", "steps")]
    _fields_ += [(name, ctypes.c_int64 * 3) for name in ("lower", "upper")]
    _fields_ += [(name, ctypes.c_int64) for name in ("swizzle", "nan_fill")]


def tensor_map(address, strides, sizes, box, element_bytes, swizzle=0, steps=None, corners=None) -> TensorMap:
    """`strides`: in bytes, of all axes but the innermost.  `corners`: lower and upper ones, of an im2col map; box: channels, pixels."""
    steps = steps or [1] * len(sizes)
    lower, upper = corners or ((), ())
    lists = [(ctypes.c_int64 * 5)(*values) for values in (sizes, [element_bytes, *strides], box, steps)]
    corner = [(ctypes.c_int64 * 3)(*values) for values in (lower, upper)]
    return TensorMap(corners is not None, element_bytes, len(sizes), address, *lists, *corner, swizzle, 0)


@dataclasses.dataclass
class Array:
    """Global memory: exactly the array's bytes, at `address` or, without one, at a place of its own."""

    values: np.ndarray
    address: int | None = None
    written: Any = None  # array; for each byte how often it was written; None: an input


def Input(values, address=None) -> Array:
    return Array(np.ascontiguousarray(values), address)


def Output(values, address=None) -> Array:
    """Return an array that the kernel writes: to read it before is a fault, and its `written` marks the bytes that were."""
    return Array(values, address, np.zeros(values.nbytes, np.uint8))


@dataclasses.dataclass(frozen=True)
class Kernel:
    name: str
    index: int
    parameter_bytes: int
    shared_bytes: int  # static
    most_threads: int
    parameters: tuple[tuple[int, int], ...]  # offset and bytes of each


class Module:
    def __init__(self, ptx: str):
        self._module = None
        self._library = library()
        message = ctypes.create_string_buffer(2000)
        self.ptx = ptx
        self._module = ctypes.c_void_p(self._library.PtxParse(ptx.encode(), message, ctypes.c_int64(2000)))
        if not self._module:
            raise Fault(message.value.decode())
        self.kernels = {}
        for index, line in enumerate(self._text(self._library.PtxKernels)):
            name, *numbers = line.split()
            of_parameters, of_shared, threads = map(int, numbers[:3])
            parameters: Any = tuple(tuple(map(int, pair.split(":"))) for pair in numbers[3:])
            self.kernels[name] = Kernel(name, index, of_parameters, of_shared, threads, parameters)
        self.executed = {name: np.zeros(len(self.instructions(name)), np.uint8) for name in self.kernels}

    def __del__(self):
        if self._module:
            self._library.PtxFree(self._module)

    def _text(self, function, *arguments):
        room = 1 << 16
        while True:
            text = ctypes.create_string_buffer(room)
            if function(self._module, *arguments, text, ctypes.c_int64(room)) == 0:
                return text.value.decode().splitlines()
            room *= 8

    def instructions(self, name: str) -> list[tuple[str, bool, str]]:
        """Return the opcode of each instruction with all modifiers, whether the machine knows it, and its text."""
        rows = (line.split("\t") for line in self._text(self._library.PtxInstructions, self.kernels[name].index))
        return [(opcode, known == "known", text) for opcode, known, text in rows]

    def run(self, name, grid, block, arguments=(), *, arrays=(), shared=0, cluster=(1,), maps=(), late=LATE, most_steps=10**8) -> int:
        """Runs a kernel and returns how many instructions its warps executed.

        `arguments`: an `Array`, bytes (of a parameter of that size), or a number (an int, or a numpy scalar).  `arrays`: memory that
        arguments point to in another way.  `shared`: bytes of dynamic shared memory.  `maps`: tensor maps, which a parameter names by
        `map_bytes`.
        """
        kernel = self.kernels[name]
        # One that is given twice is one place in memory.
        arrays = [*{id(array): array for array in (*arrays, *arguments) if isinstance(array, Array)}.values()]
        free = iter({(n << 40) + 256 for n in range(1, len(arrays) + 1)} - {array.address for array in arrays})
        for array in arrays:
            array.address = array.address or next(free)
        ends = sorted((array.address or 0, (array.address or 0) + array.values.nbytes) for array in arrays)
        if any(end > begin for (_, end), (begin, _) in itertools.pairwise(ends)):
            raise ValueError("arrays overlap in memory")
        parameters = bytearray(kernel.parameter_bytes)
        if len(arguments) > len(kernel.parameters):
            raise TypeError(f"{len(arguments)} arguments for {len(kernel.parameters)} parameters of {name}")
        for argument, (offset, size) in zip(arguments, kernel.parameters, strict=False):
            parameters[offset : offset + size] = _bytes_of(argument, size)
        three = lambda sizes: [*sizes, 1, 1][:3]
        numbers = np.array([*three(grid), *three(block), *three(cluster), shared, most_steps], np.int64)
        places = np.array([[array.address, array.values.nbytes] for array in arrays], np.int64).ravel()
        pointers = lambda values: (ctypes.c_void_p * len(arrays))(*(None if v is None else v.ctypes.data for v in values))
        if math.prod(block) > kernel.most_threads:
            raise TypeError(f"{math.prod(block)} threads, and {name} is for {kernel.most_threads}")
        message, steps = ctypes.create_string_buffer(20000), ctypes.c_int64()
        executed = np.zeros_like(self.executed[name])
        status = self._library.PtxRun(
            self._module,
            kernel.index,
            numbers.ctypes.data_as(ctypes.c_void_p),
            bytes(parameters),
            len(arrays),
            places.ctypes.data_as(ctypes.c_void_p),
            pointers([array.values for array in arrays]),
            pointers([array.written for array in arrays]),
            len(maps),
            (TensorMap * len(maps))(*maps),
            int(late),
            executed.ctypes.data_as(ctypes.c_void_p),
            ctypes.byref(steps),
            message,
            ctypes.c_int64(len(message)),
        )
        self.executed[name] |= executed
        if status:
            raise Fault(message.value.decode())
        return steps.value


def map_bytes(index: int) -> bytes:
    """Return a substitute for the 128 bytes of the tensor map `maps[index]`."""
    return TENSOR_MAP_MAGIC.to_bytes(8, "little") + index.to_bytes(8, "little") + bytes(112)


def _bytes_of(argument, size: int) -> bytes:
    if isinstance(argument, Array):
        argument = argument.address
    if isinstance(argument, int):
        return (argument % (1 << 8 * size)).to_bytes(size, "little")
    made = argument if isinstance(argument, bytes) else np.asarray(argument).tobytes()
    if len(made) != size:
        raise TypeError(f"an argument of {len(made)} bytes for a parameter of {size}")
    return made
