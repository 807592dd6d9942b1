"""Modules of PTX, and what their kernels are run with."""

import ctypes
import dataclasses
import functools
import itertools
import math
import pathlib
from typing import Any

import numpy as np

from .library import library

LATE, EARLY = True, False  # when asynchronous copies and products take effect
TENSOR_MAP_MAGIC = 0x70616D20726F736E  # asynchronous.cc
OPCODES = pathlib.Path(__file__).parent / "opcodes.txt"


class Fault(Exception):
    """The kernel does what it may not: the message says what, at which instruction, and in which block and thread."""


class TensorMap(ctypes.Structure):
    """A tensor map's fields, innermost axis first: TensorMap in machine.h."""

    _fields_ = [(name, ctypes.c_int64) for name in ("im2col", "element_bytes", "rank", "address")]
    _fields_ += [(name, ctypes.c_int64 * 5) for name in ("sizes", "strides", "box", "steps")]
    _fields_ += [(name, ctypes.c_int64 * 3) for name in ("lower", "upper")]
    _fields_ += [(name, ctypes.c_int64) for name in ("swizzle", "nan_fill")]


def tensor_map(address, strides, sizes, box, element_bytes, swizzle=0, steps=None, corners=None) -> TensorMap:
    """Return what `cuTensorMapEncodeTiled` or, with `corners`, `cuTensorMapEncodeIm2col` encodes: all lists are innermost axis first.

    Args:
      address: that of the array, an int.
      strides: in bytes, of all axes but the innermost.
      sizes: of the array, in elements.
      box: its sizes in elements; of an im2col map channels and pixels.
      element_bytes: of an element.
      swizzle: bytes of the swizzled rows: 0, 32, 64 or 128.
      steps: `elementStrides`; default: ones.
      corners: of an im2col map the lower and the upper corner.
    """
    steps = steps or [1] * len(sizes)
    lower, upper = corners or ((), ())
    lists = [(ctypes.c_int64 * 5)(*values) for values in (sizes, [element_bytes, *strides], box, steps)]
    corner = [(ctypes.c_int64 * 3)(*values) for values in (lower, upper)]
    return TensorMap(corners is not None, element_bytes, len(sizes), address, *lists, *corner, swizzle, 0)


def map_bytes(index: int) -> bytes:
    """Return a substitute for the 128 bytes of the tensor map `maps[index]`, as an argument of `Module.run`."""
    return TENSOR_MAP_MAGIC.to_bytes(8, "little") + index.to_bytes(8, "little") + bytes(112)


@dataclasses.dataclass
class Array:
    """Global memory: exactly the bytes of `values`, a contiguous array, at `address` or, without one, at a place of its own.

    `written` has a uint8 for each byte: how often kernels wrote it, at most 255.  It is None for an input.
    """

    values: np.ndarray
    address: int | None = None
    written: Any = None

    def __post_init__(self):
        if not self.values.flags.c_contiguous:
            raise ValueError("an array of a kernel must be contiguous")


def Input(values, address=None) -> Array:
    """Return an array that the kernel may only read."""
    return Array(np.ascontiguousarray(values), address)


def Output(values, address=None) -> Array:
    """Return an array that the kernel writes: to read a byte before is a fault.  The results are in `values`, which are not copied."""
    return Array(values, address, np.zeros(values.nbytes, np.uint8))


def InOut(values, address=None) -> Array:
    """Return an array that the kernel may read and write.  The results are in `values`, which are not copied."""
    return Array(values, address, np.ones(values.nbytes, np.uint8))


@dataclasses.dataclass(frozen=True)
class Kernel:
    """An entry of a module."""

    name: str
    index: int
    parameter_bytes: int
    shared_bytes: int  # static
    most_threads: int
    parameters: tuple[tuple[int, int], ...]  # offset and bytes of each


@functools.cache
def verified_opcodes() -> frozenset[str]:
    """Return the opcodes, with their modifiers, that ptxsim's own tests compare with the ISA's text or with numpy."""
    return frozenset(OPCODES.read_text().split())


class Module:
    """A module of PTX.

    Attributes:
      ptx: its text.
      kernels: name -> `Kernel`.
      executed: name -> a uint8 for each instruction: whether a run that ended well executed it.
    """

    def __init__(self, ptx: str):
        """Parse the text of a module; a `Fault` says at which line that is impossible."""
        self._module = None
        self._library = library()
        message = ctypes.create_string_buffer(2000)
        self.ptx = ptx
        self._module = ctypes.c_void_p(self._library.PtxParse(ptx.encode(), message, ctypes.c_int64(2000)))
        if not self._module:
            raise Fault(message.value.decode())
        self.kernels: dict[str, Kernel] = {}
        for index, line in enumerate(self._text(self._library.PtxKernels)):
            name, *numbers = line.split()
            parameter_bytes, shared_bytes, threads = map(int, numbers[:3])
            parameters: Any = tuple(tuple(map(int, pair.split(":"))) for pair in numbers[3:])
            self.kernels[name] = Kernel(name, index, parameter_bytes, shared_bytes, threads, parameters)
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
        """Return of each instruction its opcode with all modifiers, whether the machine knows it, and its text."""
        rows = (line.split("\t") for line in self._text(self._library.PtxInstructions, self.kernels[name].index))
        return [(opcode, known == "known", text) for opcode, known, text in rows]

    def unverified_opcodes(self) -> set[str]:
        """Return the opcodes of all kernels that are not among `verified_opcodes`."""
        return {opcode for name in self.kernels for opcode, *_ in self.instructions(name)} - verified_opcodes()

    def run(self, name, grid, block, arguments=(), *, arrays=(), shared=0, cluster=(1,), maps=(), late=LATE, most_steps=10**8) -> int:
        """Run a kernel, and return how many instructions its warps executed.

        Args:
          name: of the kernel, as in `kernels`.
          grid, block, cluster: sizes along x, y and z, of which trailing ones may be left out; the grid's in blocks, like the cluster's.
          arguments: each an `Array`, bytes (of a parameter of that size), or a number (an int, or a numpy scalar of the parameter's
            size).  Parameters behind the last argument are zero, such as the scratch memory that Triton's kernels ask for.
          arrays: `Array`s that arguments point to in another way.
          shared: bytes of dynamic shared memory.
          maps: tensor maps, which an argument names by `map_bytes`.
          late: LATE or EARLY; a kernel that is right gives the same bits both ways.
          most_steps: how many instructions of warps are an endless loop.

        Raises:
          Fault: the kernel does what it may not.
          TypeError: arguments that do not fit the parameters, or more threads than the kernel is for.
          ValueError: arrays that overlap, or a grid that is no multiple of the cluster.
        """
        kernel = self.kernels[name]
        # One that is given twice is one place in memory.
        arrays = [*{id(array): array for array in (*arrays, *arguments) if isinstance(array, Array)}.values()]
        free = iter({(n << 40) + 256 for n in range(1, len(arrays) + 1)} - {array.address for array in arrays})
        places = {id(array): (array.address or next(free), array.values.nbytes) for array in arrays}
        if any(begin + size > following for (begin, size), (following, _) in itertools.pairwise(sorted(places.values()))):
            raise ValueError("arrays overlap in memory")
        parameters = bytearray(kernel.parameter_bytes)
        if len(arguments) > len(kernel.parameters):
            raise TypeError(f"{len(arguments)} arguments for {len(kernel.parameters)} parameters of {name}")
        for argument, (offset, size) in zip(arguments, kernel.parameters, strict=False):
            parameters[offset : offset + size] = _bytes_of(places[id(argument)][0] if isinstance(argument, Array) else argument, size)
        grid, block, cluster = ([*sizes, 1, 1][:3] for sizes in (grid, block, cluster))
        if any(blocks % along for blocks, along in zip(grid, cluster, strict=True)):
            raise ValueError(f"a grid of {grid} blocks is no multiple of a cluster of {cluster}")
        numbers = [*grid, *block, *cluster, shared, most_steps]
        if math.prod(block) > kernel.most_threads:
            raise TypeError(f"{math.prod(block)} threads, and {name} is for {kernel.most_threads}")
        message, steps = ctypes.create_string_buffer(20000), ctypes.c_int64()
        executed = np.zeros_like(self.executed[name])
        status = self._library.PtxRun(
            self._module,
            kernel.index,
            (ctypes.c_int64 * len(numbers))(*numbers),
            bytes(parameters),
            len(arrays),
            (ctypes.c_int64 * (2 * len(arrays)))(*itertools.chain(*places.values())),
            _pointers([array.values for array in arrays]),
            _pointers([array.written for array in arrays]),
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


def _pointers(arrays: list):
    return (ctypes.c_void_p * len(arrays))(*(None if values is None else values.ctypes.data for values in arrays))


def _bytes_of(argument, size: int) -> bytes:
    if isinstance(argument, int):
        return (argument % (1 << 8 * size)).to_bytes(size, "little")
    made = argument if isinstance(argument, bytes) else np.asarray(argument).tobytes()
    if len(made) != size:
        raise TypeError(f"an argument of {len(made)} bytes for a parameter of {size}")
    return made
