"""Your own kernels, with all of JAX's transformations, for a bilinear operation that JAX lacks.

On CPUs the kernel is in C++, called through XLA's foreign function interface; on NVIDIA GPUs it is in Triton.

    python examples/custom_kernel.py
    python examples/custom_kernel.py --implementation xla    # the operation's definition instead of the kernels

A bare `jax.ffi.ffi_call` or `triton_call` has no gradient, no vmap and no sharding.  Here the labels of the axes declare the operation, and
jaxext derives the rest; a kernel only computes the sum.  The conformance kit compares every transformation with jnp.einsum, which takes a
minute.  cuda_text.py has an operation that is not bilinear, with its own kernel for the derivative.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # eight devices on a CPU; GPUs are left alone

import argparse
import ctypes
import functools
import hashlib
import importlib.util
import inspect
import math
import pathlib
import shutil
import subprocess
import sys
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jaxext
from jaxext import extend, testing

HERE = pathlib.Path(__file__).parent
BLOCK_IJ, BLOCK_C = 4, 64  # the tile of one program of the Triton kernel

# --- the operation: each channel c is multiplied by a matrix of its own,
#
#         y[b,n,m,c] = Σ_k x[b,n,k,c] w[b,k,m,c],
#
# which for lax is a matrix product whose batch lies innermost.  The layer below has no b: that is where vmap puts the axes of a mapped x
# and a mapped w.

CHANNELWISE = extend.define("channelwise", x="B N K C", w="B K M C", y="B N M C")


def layer(x, w):
    """(N, K, C), (K, M, C) -> (N, M, C)"""
    return CHANNELWISE(x, w, B=0)


def reference(x, w):
    return jnp.einsum("nkc,kmc->nmc", x, w, precision="highest")


# --- the kernels.  They are asked for y, and for the gradients of x and w, which are such sums too:
#
#         out[b,i,j,c] = Σ_s first[b,i,s,c] second[b,s,j,c],
#
# where i and j are the labels of the slot that is open, and s is summed.  Only the strides differ.


def as_sum(call):
    """(the slot of `first`, the slot of `second`, the sizes and strides) of a call."""
    _, i, j, _ = call.labels[call.open]
    first, second = sorted(call.dtypes, key=lambda slot: i not in call.labels[slot])
    (s,) = set(call.labels[first]) - set(call.labels[call.open])

    def stride(slot, label):
        after = call.labels[slot].index(label) + 1
        return math.prod(call.sizes[other] for other in call.labels[slot][after:])

    strides = dict(first_i=stride(first, i), first_s=stride(first, s), second_s=stride(second, s), second_j=stride(second, j))
    return first, second, dict(S=call.sizes[s], **strides)


def not_float32(call):
    wrong = [dtype for dtype in (*call.dtypes.values(), call.dtype) if dtype != np.float32]
    return f"it has {wrong[0].name}, want float32" if wrong else None


# A hash of the kernels' code; measurements and stored programs of another version do not hold.
VERSION = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(HERE.glob("custom_kernel*")))).hexdigest()


class Ffi(extend.Implementation):
    """custom_kernel.cc.  For a GPU the handler also takes a `ffi::PlatformStream<cudaStream_t>` (`.Ctx<...>()`), on which it launches a
    CUDA kernel; nvcc compiles it, and the platform is "CUDA" where it is registered and "cuda" where `no_kernel` is asked.
    """

    name, version = "custom_ffi", VERSION

    def refuses(self, call):
        return extend.no_kernel(call, "cpu") or not_float32(call) or compiled()

    def run(self, call, config, operands):
        first, second, attributes = as_sum(call)
        flat = call.flatten(operands)  # one axis for each label
        result = jax.ShapeDtypeStruct([call.sizes[label] for label in call.labels[call.open]], call.dtype)
        attributes = {name: np.int64(value) for name, value in attributes.items()}
        return jax.ffi.ffi_call("custom_Channelwise", result)(flat[first], flat[second], **attributes).reshape(call.shape)


@functools.cache
def compiled():
    """Compiles custom_kernel.cc and registers its handler; the reason why it cannot, or None."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        return "there is no C++ compiler (c++ or $CXX)"
    with tempfile.TemporaryDirectory() as folder:
        library = pathlib.Path(folder) / "custom_kernel.so"
        flags = ["-O3", "-std=c++17", "-shared", "-fPIC", "-isystem", jax.ffi.include_dir()]
        done = subprocess.run([compiler, *flags, HERE / "custom_kernel.cc", "-o", library], capture_output=True, text=True)
        if done.returncode:
            return f"{compiler} failed: {done.stderr.strip()[-1000:]}"
        handlers = ctypes.CDLL(str(library))
    jax.ffi.register_ffi_target("custom_Channelwise", jax.ffi.pycapsule(handlers.ChannelwiseHandler), platform="cpu")
    return None


class Triton(extend.Implementation):
    """custom_kernel_triton.py, through jax-triton."""

    name, version = "custom_triton", VERSION

    def refuses(self, call):
        if reason := extend.no_kernel(call, "cuda") or not_float32(call):
            return reason
        if any(math.prod(call.shape_of(slot)) >= 2**31 for slot in call.labels):
            return "an array has 2**31 elements or more, which the kernel counts in 32 bits"
        return without_triton()

    def launch(self, call):
        """The operands' slots, the grid and the constants of the kernel."""
        first, second, sizes_and_strides = as_sum(call)
        b, i, j, c = (call.sizes[label] for label in call.labels[call.open])
        tiles = b * math.ceil(i / BLOCK_IJ) * math.ceil(j / BLOCK_IJ) * math.ceil(c / BLOCK_C)
        constants: dict[str, Any] = dict(I=i, J=j, C=c, BLOCK_IJ=BLOCK_IJ, BLOCK_C=BLOCK_C, **sizes_and_strides)
        return first, second, (tiles,), constants

    def run(self, call, config, operands):
        if call.empty:  # nothing to launch
            return jnp.zeros(call.shape, call.dtype)
        import custom_kernel_triton
        import jax_triton

        first, second, grid, constants = self.launch(call)
        result = jax.ShapeDtypeStruct(call.shape, call.dtype)
        if "out_type" in inspect.signature(jax_triton.triton_call).parameters:  # jax-triton 0.4
            constants |= dict(out_type=result, backend_options={"enable_fp_fusion": True})
        else:
            constants |= dict(out_shape=result)
        target = dict(kernel=custom_kernel_triton.channelwise, name=call.op, grid=grid, compute_capability=call.arch)
        return jax_triton.triton_call(operands[first], operands[second], **target, **constants)


def without_triton():
    """Return the reason why the Triton kernel cannot be compiled, or None."""
    return None if all(map(importlib.util.find_spec, ("jax_triton", "triton"))) else "jax-triton and triton are not both installed"


compiled()  # now, since a program that JAX has stored (jax_compilation_cache_dir) calls the handler without asking what supports it
extend.register(CHANNELWISE, Ffi())
extend.register(CHANNELWISE, Triton())


# --- what comes for free


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--implementation", choices=["custom_ffi", "custom_triton", "xla"], help="default: the kernel that runs here")
    named, on_cpu = parser.parse_args(argv).implementation, jax.default_backend() == "cpu"
    rng = np.random.default_rng(0)
    x, w = (rng.integers(-2, 3, shape).astype(np.float32) for shape in ((8, 2, 4), (2, 2, 4)))
    gradient = jax.grad(lambda x, w: jnp.sum(layer(x, w) ** 2), (0, 1))

    print(CHANNELWISE)
    with jaxext.use_implementation(named):
        explained = jaxext.explain(gradient)(x, w)
    print("\nA gradient runs these products here:", explained, sep="\n")
    if on_cpu and (reason := compiled()):
        print(f"\nThe C++ kernel does not run: {reason}.")

    if on_cpu and (reason := without_triton()):
        print(f"\nThe Triton kernel is not compiled: {reason}.")
    elif on_cpu:  # a machine without a GPU can compile for one all the same
        with jaxext.use_implementation("custom_triton"):
            program = jaxext.export.lower_for(gradient, arch="sm_90a")(x, w).as_text()
        calls = sum("custom_call" in line and "triton_kernel_call" in line for line in program.splitlines())
        print(f"\nThe gradient's program for an H100 (sm_90a) calls {calls} Triton kernels: for y, and for the gradients of x and of w.")
        assert calls == 3, f"want a kernel for each product of the gradient, got {calls}"

    print("\nEvery transformation, compared with jnp.einsum in float64:")
    splits = [testing.Split((P("x"), P()), P("x")), testing.Split((P(None, None, "y"),) * 2, P(None, None, "y"))]
    skip: dict[str, str] = {}
    if named in ("custom_ffi", "custom_triton"):  # without a name, the definition takes its place there
        partitioner = "XLA's partitioner, which cannot split a kernel, has the program"
        skip = {"export": "jax stores a custom call only if `disabled_checks` names it", "shard_map over one axis of two": partitioner}
        skip["splits, shard_map over one axis of two"] = partitioner
    with jaxext.use_implementation(named):
        return 0 if testing.check_op(layer, reference, (x, w), linear=(0, 1), splits=splits, skip=skip).passed else 1


if __name__ == "__main__":
    sys.exit(main())
