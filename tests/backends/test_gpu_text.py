"""CUDA kernels given as text on a GPU: one of each kind of launch, against numpy, bit for bit on integers."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxext
from jaxext import extend
from jaxext.backends import launcher, nvrtc

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(nvrtc.missing() is not None or launcher.missing() is not None, reason="NVRTC or the launcher is not there"),
]

SUM = """
template <typename T>
__global__ void total(const T* x, T* y, int n, T by) {  // each thread of a block adds its part, in dynamic shared memory
  extern __shared__ char memory[];
  T* part = reinterpret_cast<T*>(memory);
  part[threadIdx.x] = 0;
  for (int i = threadIdx.x; i < n; i += blockDim.x) part[threadIdx.x] += by * x[(long long)blockIdx.x * n + i];
  __syncthreads();
  if (threadIdx.x != 0) return;
  T sum = 0;
  for (int i = 0; i < blockDim.x; ++i) sum += part[i];
  y[blockIdx.x] = sum;
}
__global__ void increase(int* x, int by) { x[threadIdx.x + 8 * threadIdx.y] += by; }
__global__ void rank(int* y) { unsigned r; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); y[blockIdx.x] = r; }
"""
X = np.arange(12 * 1000, dtype=np.int32).reshape(12, 1000)


def total(source: Any = SUM, name="total", shared=1024, **more):
    def out(x):
        return jax.ShapeDtypeStruct(x.shape[:1], x.dtype)

    how: dict[str, Any] = dict(grid=lambda x: x.shape[0], block=256, scalars=lambda x: dict(n=x.shape[1]))
    return extend.cuda_kernel(source, name, out=out, shared=shared, **{**how, **more})


of_dtype = functools.partial(total, templates=lambda x: (x.dtype,))


@pytest.mark.parametrize("dtype", ["int32", "float32", "int64"])
def test_source(dtype):
    with jax.enable_x64(True):
        np.testing.assert_array_equal(of_dtype()(X.astype(dtype) % 8, by=3), 3 * (X.astype(dtype) % 8).sum(1))


def test_much_shared_memory():
    np.testing.assert_array_equal(of_dtype(shared=90 * 1024)(X, by=1), X.sum(1))


def test_cluster():
    rank = extend.cuda_kernel(SUM, "rank", grid=32, block=1, cluster=16, out=jax.ShapeDtypeStruct((32,), np.int32))
    if float(jax.local_devices(backend="cuda")[0].compute_capability) < 9:
        pytest.skip("clusters need compute capability 9.0")
    assert rank().tolist() == [*range(16)] * 2


def test_alias_and_loop():
    """XLA records CUDA graphs of a loop.  The operand lives on in its caller."""
    increase = extend.cuda_kernel(SUM, "increase", grid=1, block=(8, 4), out=lambda x: x, aliases={0: 0})
    x = jnp.arange(32, dtype=jnp.int32).reshape(4, 8)
    loop = jax.jit(lambda x: jax.lax.fori_loop(0, 10, lambda _, x: increase(increase(x, by=1), by=2), x))
    np.testing.assert_array_equal(loop(x), x + 30)
    np.testing.assert_array_equal(increase(x, by=5), np.arange(32).reshape(4, 8) + 5)


def test_compiled_code():
    arch = int(jax.local_devices(backend="cuda")[0].compute_capability.replace(".", ""))
    compiled = nvrtc.compile(SUM, "total<int>", arch)
    for image in (compiled.cubin, compiled.ptx):
        np.testing.assert_array_equal(total(image, compiled.name, parameters="const int* x, int* y, int n, int by")(X, by=2), 2 * X.sum(1))
    with pytest.raises(jax.errors.JaxRuntimeError, match="its parameters have"):
        total(compiled.cubin, compiled.name, parameters="const int* x, int* y, int n, double by")(X, by=2).block_until_ready()


def test_errors_of_a_launch():
    with pytest.raises(jax.errors.JaxRuntimeError, match="cuLaunchKernelEx"):
        bounded = SUM.replace("__global__ void total", "__global__ void __launch_bounds__(64) total")
        of_dtype(bounded)(X, by=1).block_until_ready()
    np.testing.assert_array_equal(of_dtype()(X, by=1), X.sum(1))  # the context lives


def test_operation():
    """An operation splits over all devices, and maps."""
    how: dict[str, Any] = dict(operands=dict(x="M N"), results=dict(y="M"), constant="x y")
    op = extend.operation("gpu_text_total", lambda x, *, by: by * x.sum(1), kernels=dict(cuda=of_dtype()), **how)
    by_two = functools.partial(op, by=2, implementation="cuda")
    np.testing.assert_array_equal(jax.jit(jax.vmap(by_two))(X.reshape(3, 4, 1000)), 2 * X.sum(1).reshape(3, 4))
    mesh = jax.make_mesh((len(jax.devices()),), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = 12 // len(jax.devices()) * len(jax.devices())
    split = jax.device_put(X[:rows], jax.NamedSharding(mesh, jax.P("i")))
    np.testing.assert_array_equal(jax.jit(by_two)(split), 2 * X[:rows].sum(1))


def test_export():
    allowed = jaxext.export.disabled_checks()
    exported = jax.export.export(jax.jit(functools.partial(of_dtype(), by=2)), platforms=["cuda"], disabled_checks=allowed)(X)
    again = jax.export.deserialize(exported.serialize())
    np.testing.assert_array_equal(jax.jit(again.call)(X), 2 * X.sum(1))
