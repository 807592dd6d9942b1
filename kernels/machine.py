"""The rates of GPUs, and the parts of the roofline models of all kernels, in clocks of a multiprocessor.

A kernel's model counts its products, loads and launches; the rates are defined only here.  None was measured with these kernels.  Models
compare the configs of one problem, so proportions matter more than absolute numbers.
"""

import dataclasses

from .epilogue import Epilogue
from .launch import PRODUCTS_OF_PARTS, cdiv

START = 1500  # clocks until the first tiles of a program are there: about twice the latency of memory
LAUNCH = 4000  # clocks of one kernel more: 2.3 µs at 1.75 GHz
STORED = 32  # bytes of its result that a block stores per clock
# The share of all products that wgmma makes of a tile of so many rows.  It reads the right operand from shared memory anew for each 64.
REACHED = {64: 0.7, 128: 0.9}
ISSUED = 128  # instructions of threads that a multiprocessor issues per clock
LEGACY = 2  # wgmma and its successors multiply so many times as fast as the instruction before them on the same device
ACCESS = 4  # operations for a load or a store of a causal convolution: the address, and whether it is inside
ACTIVATED = 20  # operations for an activation, or its derivative, of a number


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """A GPU.  The fields from `products` on are rates of one multiprocessor per clock while all are busy."""

    name: str
    multiprocessors: int
    hertz: float  # clocks per second while it multiplies
    boost: float  # the same by the data sheet
    bandwidth: float  # bytes per second of its memory, by the data sheet
    products: int  # of 16-bit numbers on tensor cores, added up in float32
    fma: int  # of float32 numbers beside them
    l2: int  # bytes read from the L2 cache
    memory: int  # bytes read or written
    shared: int = 128  # bytes read or written in shared memory

    def rate(self, bits: int, precision: str = "tf32") -> float:
        """Products per clock of numbers of so many bits; for float32 they depend on the precision."""
        if bits < 32:
            return self.products * 16 / bits
        if precision == "ieee":
            return self.fma
        return self.products / (1 if precision.startswith("bf16") else 2) / PRODUCTS_OF_PARTS.get(precision, 1)

    @property
    def flops(self) -> float:
        """Operations per second on 16-bit numbers, by the data sheet: each product is two."""
        return 2 * self.products * self.multiprocessors * self.boost

    def seconds(self, clocks: float) -> float:
        return clocks / self.hertz

    def tile(self, multiplied: float, rate: float, loaded: float) -> float:
        """The clocks for so many products at this rate, or for so many bytes from the L2 cache, whichever is larger."""
        return max(multiplied / rate, loaded / self.l2)

    def rounds(self, programs: int, resident: int = 1) -> int:
        """The number of waves in which so many programs run."""
        return cdiv(programs, self.multiprocessors * resident)

    def moving(self, size: float) -> float:
        """The clocks in which all multiprocessors together move so many bytes from or to memory."""
        return size / (self.memory * self.multiprocessors)

    def adding(self, size: float) -> float:
        """The clocks to write partial results of so many bytes, and to read and add them in another kernel."""
        return self.moving(2 * size) + LAUNCH

    def product(self, computed: float, read: float, written: float, splits: int) -> float:
        """The clocks of a product: to compute it, or to move so many bytes.  Partial results are written, and added, afterwards."""
        return max(computed, self.moving(read)) + self.adding(written) if splits > 1 else max(computed, self.moving(read + written))


# Compute capability -> a common device that has it.  Products are those of data sheets, dense, at the boost clock.  Memory was measured:
# 1.73 TB/s at 1.41 GHz, and at 1.75 GHz 3.0 of an H100 and 4.1 of an H200, which keeps that clock while it multiplies; that others keep
# their boost is a guess.  L2 is nine tenths of what a loop gets that only reads (te42kyfo/gpu-benches: A100 5.4 TB/s at 1.41 GHz,
# H200 9.8 at 1.98, H100 PCIe 6.9 at 1.755, which are 35, 37 and 34 bytes), half of what the port of one multiprocessor takes.  A B200 is
# thought to have an H200's L2, and nine tenths of 8 TB/s from memory.
_MACHINES = {
    80: Machine(name="A100", hertz=1.41e9, boost=1.41e9, bandwidth=2.04e12, multiprocessors=108, products=1024, fma=64, l2=32, memory=11),
    90: Machine(name="H100", hertz=1.75e9, boost=1.83e9, bandwidth=3.35e12, multiprocessors=132, products=2048, fma=128, l2=32, memory=13),
    100: Machine(name="B200", hertz=1.85e9, boost=1.85e9, bandwidth=8e12, multiprocessors=148, products=4096, fma=128, l2=32, memory=26),
    103: Machine(name="B300", hertz=1.85e9, boost=1.85e9, bandwidth=8e12, multiprocessors=148, products=4096, fma=128, l2=32, memory=26),
}
_H200 = dataclasses.replace(_MACHINES[90], name="H200", bandwidth=4.8e12, memory=18)
# Others, from an A10 to an RTX PRO 6000, have 72 to 188 multiprocessors.  An L40's rates: L2 5.2 TB/s, memory 0.8 TB/s, at 2.49 GHz.
_OTHERS = Machine(name="L40", hertz=2.49e9, boost=2.49e9, bandwidth=0.864e12, multiprocessors=128, products=512, fma=128, l2=13, memory=2)


def machine(arch: int, device: str = "") -> Machine:
    """The GPU of a compute capability times 10, and of this name; an H100 if 9.0 has no name."""
    return _H200 if arch == 90 and "H200" in device.split() else _MACHINES.get(arch, _OTHERS)


def stored(epilogue: Epilogue | None) -> int:
    """The number of arrays of the result's shape that a kernel reads or writes at its end: the result and those of its epilogue."""
    return 1 if epilogue is None else 1 + (epilogue.residual is not None) + epilogue.saves
