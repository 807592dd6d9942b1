"""Race and fault detection for compiled CUDA and Triton kernels, on a CPU: an interpreter of PTX with its memory model.

>>> module = Module(ptx)
>>> module.run("kernel", grid=(2,), block=(128,), arguments=[Input(x), Output(y), 7])
"""

from .module import EARLY, LATE, Array, Fault, InOut, Input, Kernel, Module, Output, TensorMap, map_bytes, tensor_map, verified_opcodes

__all__ = [
    "EARLY",
    "LATE",
    "Array",
    "Fault",
    "InOut",
    "Input",
    "Kernel",
    "Module",
    "Output",
    "TensorMap",
    "map_bytes",
    "tensor_map",
    "verified_opcodes",
]
