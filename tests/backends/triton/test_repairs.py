"""The PTX of our kernels has the fences that Triton before 3.7.1 omits, and no sums that ptxas gets wrong.  That of others is unchanged.

Where a newer Triton is installed, it is made to omit the fences.
"""

import re
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

import jaxext

pytest.importorskip("triton")
jax_triton = pytest.importorskip("jax_triton", exc_type=ImportError)

# ruff: noqa: E402
import triton
import triton.language as tl
from jax_triton import triton_lib
from triton import knobs
from triton.backends.nvidia.compiler import CUDABackend

from jaxext.backends.triton import assembler, repairs, triton_binding
from jaxext.bench import triton_ptx
from jaxext.kernels import checks, matmul
from jaxext.kernels.matmul import kernel as matmul_kernel

FENCE = "fence.proxy.async.shared::cta;"
X = jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16)


@pytest.fixture(autouse=True)
def old_triton(monkeypatch, empty_cache):
    """A Triton that omits fences, and compiles everything anew."""
    make_ptx = CUDABackend.make_ptx
    monkeypatch.setattr(CUDABackend, "make_ptx", lambda *args: make_ptx(*args).replace(FENCE, ""))
    monkeypatch.setattr(checks, "triton_version", lambda: (3, 6, 0))
    for kernel in (squares, matmul_kernel.matmul):  # where jax-triton 0.4 remembers them
        monkeypatch.setattr(kernel, "_jT_kernel_cache", {}, raising=False)
    monkeypatch.setattr(triton_lib, "_COMPILED_KERNEL_CACHE", {}, raising=False)


@triton.jit
def squares(x_ptr, y_ptr, N: tl.constexpr, STEPS: tl.constexpr):
    """The kernel of somebody else: the sum of the products of STEPS tiles with themselves."""
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)
    total = tl.zeros([N, N], tl.float32)
    for step in range(STEPS):
        x = tl.load(x_ptr + step * N * N + at)
        total = tl.dot(x, x, total)
    tl.store(y_ptr + at, total)


def of_somebody_else(x):
    y = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    result, how = triton_binding._keywords() or ("", {})
    return jax_triton.triton_call(x, kernel=squares, grid=1, N=64, STEPS=16, compute_capability=90, **{result: y}, **how)


def matmul_of_ours(x):
    return jaxext.matmul(x, x, implementation="triton")


def lowered_ptx(fun, arch="sm_90a") -> str:
    """The PTX of the only kernel in a program."""
    (ptx,) = assembler.kernels(jaxext.export.lower_for(lambda x: fun(x), arch=arch)(X))  # a new function, since jax remembers programs
    return ptx


def problem(arch, **changes):
    sizes = dict(B=1, M=2048, N=2048, K=2048)
    return matmul.Problem(name="matmul_nn", role="nn", **sizes, dtypes=("bf16",) * 3, precision="tf32", arch=arch, **changes)


def compiled_ptx(arch) -> str:
    asked = problem(arch)
    return str(triton_ptx.compile_launch(matmul.launch(asked, matmul.candidates(asked)[0]), asked).asm["ptx"])


def unfenced_waits(ptx: str) -> int:
    """The number of waits for copies that no fence follows before the next barrier."""
    waits = re.split(r"cp\.async\.wait_group", ptx)[1:]
    assert waits
    return sum("fence.proxy.async" not in behind.partition("bar.sync")[0] for behind in waits)


def test_each_wait_for_copies_has_a_fence_before_the_barrier():
    ptx = lowered_ptx(matmul_of_ours)
    assert "wgmma.mma_async" in ptx and unfenced_waits(ptx) == 0
    assert unfenced_waits(ptx.replace(FENCE, "")) > 0


def test_compile_launch_makes_the_same_ptx():
    """The version of PTX may differ: jaxext asks jax-triton 0.4 for one."""
    assert compiled_ptx(90).partition(".target")[2] == lowered_ptx(matmul_of_ours).partition(".target")[2]


def test_the_cache_of_triton_serves_no_kernel_without_fences():
    """It knows nothing of the fences: what is in it, of whatever version of jaxext, gets them when it is read."""
    with mock.patch.object(triton_ptx, "repaired", lambda ptx: ptx):
        before = compiled_ptx(90)
    assert unfenced_waits(before) > 0
    assert unfenced_waits(compiled_ptx(90)) == 0


def test_kernels_of_others_are_compiled_as_before():
    lowered_ptx(matmul_of_ours)
    ptx = lowered_ptx(of_somebody_else)
    assert "wgmma.mma_async" in ptx and "cp.async.wait_group" in ptx and FENCE not in ptx


@pytest.mark.parametrize("arch", ["sm_80", "sm_100a"])
def test_devices_without_wgmma_need_none(arch):
    assert FENCE not in lowered_ptx(matmul_of_ours, arch)


def test_a_kernel_without_wgmma_is_unchanged():
    ptx = "cp.async.wait_group 1;\nbar.sync 0;\nmma.sync.aligned"
    assert repairs.repaired(ptx) == ptx
    assert repairs.repaired(ptx + "wgmma.mma_async") != ptx + "wgmma.mma_async"


def test_a_newer_triton_has_them(monkeypatch):
    monkeypatch.setattr(checks, "triton_version", lambda: repairs.FENCED)
    assert FENCE not in lowered_ptx(matmul_of_ours)  # the one here omits them


def test_fences_are_not_added_twice():
    ptx = lowered_ptx(matmul_of_ours)
    assert repairs.repaired(ptx) == ptx


def test_triton_adds_them_by_its_hook():
    """Tests of kernels on a GPU compile by Triton alone."""
    asked, without_cubin = problem(90), triton_ptx.without_cubin
    with (
        mock.patch.object(triton_ptx, "repaired", lambda ptx: ptx),
        mock.patch.object(triton_ptx, "without_cubin", lambda *args: repairs.stages_with_repairs(*args) and without_cubin(*args)),
        knobs.compilation.scope(),
    ):
        knobs.compilation.always_compile = True
        ptx = str(triton_ptx.compile_launch(matmul.launch(asked, matmul.candidates(asked)[0]), asked).asm["ptx"])
    assert unfenced_waits(ptx) == 0


def test_a_jax_triton_that_cannot_be_patched_is_refused(monkeypatch):
    monkeypatch.setattr(repairs, "can_patch", lambda jax_triton: False)
    triton_binding.missing.cache_clear()
    try:
        reason = triton_binding.missing(interpreted=False)
    finally:
        triton_binding.missing.cache_clear()
    assert reason and "or another compiler, than 0.3.1 and 0.4" in reason


SUM = "add.s16x2 \t%r115, %r113, %r764;"


def test_sums_of_halves_are_split():
    """CUDA 12.4 to 13.1 add 0 in place of a constant."""
    split = repairs.repaired(f"mov.b32 %r764, 1;\n{SUM}\nadd.u16x2 %r1, %r1, %r2;\nadd.s16 %rs1, %rs2, %rs3;")
    assert "16x2" not in split and split.count("mov.b32 {%a0, %a1}") == 2
    assert "{%a0, %a1}, %r113; mov.b32 {%b0, %b1}, %r764;" in split and "mov.b32 %r115, {%a0, %a1};" in split
    assert split.startswith("mov.b32 %r764, 1;\n") and split.endswith("\nadd.s16 %rs1, %rs2, %rs3;")
