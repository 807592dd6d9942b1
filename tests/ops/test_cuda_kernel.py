"""CUDA kernels given as text: what a call checks, what a program for a GPU holds, and what ptxsim computes and finds."""

import base64
import functools
import re
import types
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxext
from jaxext import extend, testing
from jaxext.backends import launcher, nvrtc
from jaxext.extend import signature

pytest.importorskip("ptxsim")
pytestmark = pytest.mark.skipif(nvrtc.missing() is not None, reason="NVRTC is not there")

SCALE_ADD = """
template <typename T>
__global__ void scale_add(const T* x, const T* y, T* z, int n, float scale) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) z[i] = (T)scale * x[i] + y[i];
}"""
# Sums of rows, in blocks of 64 threads with dynamic shared memory.
ROW_SUM = """
extern "C" __global__ void row_sum(const int* x, int* sums, int C) {
  extern __shared__ int part[];
  int sum = 0;
  for (int c = threadIdx.x; c < C; c += blockDim.x) sum += x[blockIdx.x * C + c];
  part[threadIdx.x] = sum;
  __syncthreads();
  for (int half = blockDim.x / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x == 0) sums[blockIdx.x] = part[0];
}"""
INCREASE = """
extern "C" __global__ void increase(int* x, int by) { x[threadIdx.x] += by; }"""
X = np.arange(300, dtype=np.float32)


def made(source: Any = SCALE_ADD, name="scale_add", **given) -> extend.CudaKernel:
    how: dict[str, Any] = dict(grid=lambda x, y: -(-x.size // 256), block=256, out=lambda x, y: x, scalars=lambda x, y: dict(n=x.size))
    if "template" in str(source):
        how |= dict(templates=lambda x, y: (x.dtype,))
    return extend.cuda_kernel(source, name, **{**how, **given})


def row_sum(source=ROW_SUM, threads=64) -> extend.CudaKernel:
    def out(x):
        return jax.ShapeDtypeStruct(x.shape[:1], x.dtype)

    return extend.cuda_kernel(
        source, "row_sum", grid=lambda x: x.shape[0], block=threads, out=out, shared=4 * threads, scalars=lambda x: dict(C=x.shape[1])
    )


def increase(**given) -> extend.CudaKernel:
    return extend.cuda_kernel(INCREASE, "increase", grid=1, block=lambda x: x.shape, out=lambda x: x, aliases={0: 0}, **given)


def described(kernel, *args, arch="sm_90a", **keywords) -> dict[str, str]:
    """The attributes of the launch in a program for a GPU."""
    text = jaxext.export.lower_for(functools.partial(kernel, **keywords), arch=arch)(*args).as_text()
    (config,) = re.findall(rf"@{launcher.TARGET}\(.*?mhlo.backend_config = \{{(.*?)\}}", text)
    return dict(re.findall(r"(\w+) = (\"[^\"]*\"|[^,]*<[^>]*>|[^,]*)", config))


# --- parameters


def test_parameters_of_source():
    source = r"""
    // __global__ void no(int);
    __device__ char quote() { return '"'; }
    namespace k { template <typename T, int N>
    __global__ void __launch_bounds__(256, 2) f(const T* __restrict__ x, const float *y, T z[], long unsigned n, const int long long m = 3,
                                                std::uint8_t b /* , int c */, signed s, float2* pairs) {} }
    extern "C" __global__ __maxnreg__(64) void g(float const* const, int count);"""
    assert signature.names(source) == ["f", "g"]
    found = list(signature.of_source(source, "k::f<float, 4>") or ())
    types = ["T*", "float*", "T*", "unsigned long", "long long", "uint8_t", "int", "float2*"]
    assert [str(each) for each in found] == [f"{kind} {name}" for kind, name in zip(types, "x y z n m b s pairs".split(), strict=True)]
    assert found[-1].dtype is None  # of arrays of their elements, too
    assert [each.pointer for each in signature.of_source(source, "g") or ()] == [True, False]
    assert signature.of_source(source, "h") is None
    for text in ("float& x", "float** x", "void (*f)(int)"):
        with pytest.raises(ValueError, match="want a pointer to numbers, or a scalar"):
            signature.of_text(text)


def test_parameters_of_compiled_code():
    source = """
    __shared__ float neighbours[12000];
    extern "C" __global__ void other(float* x) { neighbours[threadIdx.x] = *x; __syncthreads(); *x = neighbours[0]; }
    __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(64) f(const double* x, float* y, unsigned char n) {
      __shared__ int own[10]; own[threadIdx.x % 10] = n; __syncthreads(); y[0] = own[1] + x[0];
    }"""
    compiled = nvrtc.compile(source, "f", 90)
    assert [str(each) for each in signature.of_mangled(compiled.name) or ()] == ["double*", "float*", "unsigned char"]
    assert signature.of_ptx(compiled.ptx, compiled.name) == signature.Entry((8, 8, 1), 40, 64, (2, 1, 1), "sm_90a")


# --- ptxsim


def test_float64_where_float32_is_given():
    """numpy takes None for float64, so that a comparison of dtypes with None would let it pass."""
    with pytest.raises(TypeError, match=r"the array of x is float32\[300\], want float64: double\* x"):
        made(SCALE_ADD.replace("template <typename T>\n", "").replace("T", "double"), templates=())(X, X, scale=1)


@pytest.mark.parametrize("dtype", [np.int32, np.float32, np.float64])
def test_simulated_is_exact(dtype):
    x, y = X.astype(dtype), (X + 7).astype(dtype)
    z = made().simulate(x, y, scale=3)
    assert z.dtype == dtype
    np.testing.assert_array_equal(z, 3 * x + y)


def test_simulated_bfloat16():
    source = (
        "#include <cuda_bf16.h>\n"
        + """
    __global__ void twice(const __nv_bfloat16* x, __nv_bfloat16* y, __nv_bfloat16 two) { y[threadIdx.x] = __hmul(two, x[threadIdx.x]); }"""
    )
    x = jnp.arange(32, dtype=jnp.bfloat16)
    twice = extend.cuda_kernel(source, "twice", grid=1, block=(16, 2), out=lambda x: x)
    half = twice.simulate(x[:16], two=2)
    assert half.dtype == jnp.bfloat16
    np.testing.assert_array_equal(half, 2 * x[:16])


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_simulated_shared_memory(arch):
    x = np.arange(3 * 100, dtype=np.int32).reshape(3, 100)
    with jaxext.use_target(arch):
        np.testing.assert_array_equal(row_sum().simulate(x), x.sum(1))


def test_simulated_cluster():
    source = """
    __global__ void rank(int* y) { unsigned r; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); y[blockIdx.x] = r; }"""
    rank = extend.cuda_kernel(source, "rank", grid=6, block=1, cluster=2, out=jax.ShapeDtypeStruct((6,), np.int32))
    assert rank.simulate().tolist() == [0, 1] * 3
    with pytest.raises(ValueError, match=r"cluster is \(2, 1, 1\), want \(1, 1, 1\) on sm_80"):
        described(rank, arch="sm_80")


def test_nothing_is_launched_for_no_elements():
    assert made()(X[:0], X[:0], scale=1).shape == made().simulate(X[:0], X[:0], scale=1).shape == (0,)


def test_simulated_without_x64():
    with jax.enable_x64(False):
        np.testing.assert_array_equal(made().simulate(X.astype(np.float64), X, scale=3), 4 * X)


def test_simulated_alias_leaves_the_operand():
    x = np.arange(8, dtype=np.int32)
    np.testing.assert_array_equal(increase().simulate(x, by=5), x + 5)
    assert x.tolist() == list(range(8))


def test_faults_have_the_line_of_the_source():
    ptxsim = __import__("ptxsim")
    barrier = "  part[threadIdx.x] = sum;\n  __syncthreads();\n"
    assert barrier in ROW_SUM
    x = np.ones((2, 128), np.int32)
    line = 1 + ROW_SUM.replace(barrier, barrier.replace("  __syncthreads();\n", "")).splitlines().index(
        "    if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];"
    )
    with pytest.raises(ptxsim.Fault, match=rf"of line {line} of the kernel's source"):
        row_sum(ROW_SUM.replace(barrier, barrier.replace("  __syncthreads();\n", ""))).simulate(x)
    with pytest.raises(ptxsim.Fault, match="out of bounds|outside"):
        made(SCALE_ADD.replace("if (i < n) ", ""), templates=("float",)).simulate(X, X, scale=1)
    with pytest.raises(ptxsim.Fault, match="leaves 1196 of 1200 bytes of result 0 unwritten, the first of element 1"):
        made(SCALE_ADD.replace("i < n", "i < 1"), templates=("float",)).simulate(X, X, scale=1)


# --- programs for a GPU


def test_program_holds_the_image_and_the_launch():
    attributes = described(made(), X, X, scale=2)
    image = base64.b64decode(attributes["image"])
    assert image.startswith(b"\x7fELF") and b"scale_add" in image
    assert image == nvrtc.compile(SCALE_ADD, "scale_add<float>", 90).cubin
    assert attributes["name"] == '"_Z9scale_addIfEvPKT_S2_PS0_if"'
    assert attributes["grid"] == "dense<[2, 1, 1]>" and attributes["block"] == "dense<[256, 1, 1]>"
    two = int(np.float32(2).view(np.int32))
    assert attributes["parameters"] == f"dense<[0, 0, 0, 1, 0, 2, 4, 300, 4, {two}]>"


def test_equal_numbers_of_other_bits_are_other_programs():
    kernel = made()
    last = [described(kernel, X, X, scale=scale)["parameters"].split(", ")[-1] for scale in (0.0, -0.0, 1)]
    assert last == ["0]>", "2147483648]>", "1065353216]>"]


def test_program_is_of_its_architecture():
    images = [base64.b64decode(described(made(), X, X, arch=arch, scale=2)["image"]) for arch in ("sm_80", "sm_90a")]
    assert images[0] != images[1]


def test_program_with_an_alias():
    lowered = jaxext.export.lower_for(functools.partial(increase(), by=1), arch="sm_90a")(np.arange(8, dtype=np.int32))
    assert "output_operand_aliases = [#stablehlo.output_operand_alias<" in lowered.as_text()


def test_ptx_and_machine_code(tmp_path):
    compiled = nvrtc.compile(ROW_SUM, "row_sum", 90)
    x = np.arange(128, dtype=np.int32).reshape(2, 64)
    file = tmp_path / "row_sum.ptx"
    file.write_text(compiled.ptx)
    how: dict[str, Any] = dict(grid=2, block=64, out=lambda x: jax.ShapeDtypeStruct(x.shape[:1], x.dtype), shared=256)
    how |= dict(parameters="const int* x, int* sums, int C")
    for given in (file, str(file), compiled.ptx):
        of_ptx = extend.cuda_kernel(given, "row_sum", **how)
        np.testing.assert_array_equal(of_ptx.simulate(x, C=64), x.sum(1))
        assert base64.b64decode(described(of_ptx, x, C=64)["image"]) == compiled.ptx.encode() + b"\0"
    with pytest.raises(ValueError, match="it is compiled for sm_90a, want one for sm_80"):
        described(extend.cuda_kernel(compiled.ptx, "row_sum", **how), x, arch="sm_80", C=64)
    of_cubin = extend.cuda_kernel(compiled.cubin, "row_sum", **how)
    assert base64.b64decode(described(of_cubin, x, C=64)["image"]) == compiled.cubin
    with pytest.raises(NotImplementedError, match="it was given as machine code, want its source or its PTX"):
        of_cubin.simulate(x, C=64)


def test_headers_beside_a_file(tmp_path, monkeypatch):
    (tmp_path / "factor.h").write_text("constexpr int kFactor = 3;")
    file = tmp_path / "times.cu"
    file.write_text('#include "factor.h"\n__global__ void times(const int* x, int* y) { y[threadIdx.x] = kFactor * x[threadIdx.x]; }')
    times = extend.cuda_kernel(file, "times", grid=1, block=4, out=lambda x: x)
    x = np.arange(4, dtype=np.int32)
    assert times.simulate(x).tolist() == [0, 3, 6, 9]
    (tmp_path / "factor.h").write_text("constexpr int kFactor = 30;")
    assert times.simulate(x).tolist() == [0, 30, 60, 90]
    monkeypatch.chdir(tmp_path)
    assert extend.cuda_kernel("times.cu", "times", grid=1, block=4, out=lambda x: x).simulate(x).tolist() == [0, 30, 60, 90]


def test_export_carries_the_kernel():
    with jaxext.use_target("sm_90a"):
        allowed = jaxext.export.disabled_checks()
        exported = jax.export.export(jax.jit(functools.partial(made(), scale=2)), platforms=["cuda"], disabled_checks=allowed)(X, X)
    assert made().name in exported.mlir_module() and launcher.TARGET in exported.mlir_module()


# --- what is refused

UINT = SCALE_ADD.replace("int n", "unsigned char n")
BAD = {
    "a number is missing": (lambda: made()(X, X), TypeError, "float scale is missing, want a keyword"),
    "of another type": (lambda: made()(X, X, scale="2"), TypeError, "scale is '2', want a scalar, float"),
    "of another kind": (lambda: made(scalars=None)(X, X, n=2.5, scale=1), TypeError, "n is 2.5, want a int"),
    "beyond its type": (lambda: made(UINT)(X, X, scale=1), ValueError, "n is 300, want a unsigned char, 0 to 255"),
    "beyond its float": (lambda: made()(X, X, scale=1e300), ValueError, "scale is 1e.300, want a number in the range of float"),
    "results without a shape": (lambda: made(out=(4,))(X, X, scale=1), TypeError, "out is 4, want an object with a shape and a dtype"),
    "an array for a number": (lambda: made()(X, X, scale=X), TypeError, r"scale is float32\[300\], want a scalar, float"),
    "a number for an array": (
        lambda: made()(X, 2.0, scale=1),  # type: ignore[arg-type]
        TypeError,
        "operand 1 is 2.0, want an array of numbers; scalars are keywords",
    ),
    "a pointer by keyword": (lambda: made()(X, X, z=X, scale=1), TypeError, "keyword z is a pointer, want its array as an operand"),
    "an unknown keyword": (lambda: made()(X, X, scale=1, m=2), TypeError, r"keyword m is no parameter, want one of \['n', 'scale'\]"),
    "an unknown scalar": (lambda: made(scalars=dict(m=2))(X, X, scale=1), TypeError, r"scalars is .'m': 2., want a dict with keys of"),
    "a function of a launch": (lambda: made(grid=lambda x: 1)(X, X, scale=1), TypeError, r"grid\(float32\[300\], float32\[300\]\) raises"),
    "two kernels of a name": (
        lambda: made(SCALE_ADD + "template <int> __global__ void scale_add(float* y);"),
        ValueError,
        "declares scale_add with different parameters, want those of the kernel as `parameters`",
    ),
    "no name": (lambda: made(SCALE_ADD.replace("float scale", "float")), ValueError, r"scalars of scale_add have the names \['n', ''\]"),
    "a template": (lambda: made(templates=(None,))(X, X, scale=1), TypeError, "templates has None, want a number, a dtype"),
    "a result for a const pointer": (
        lambda: made(SCALE_ADD.replace("T* z", "const T* z"))(X, X, scale=1),
        TypeError,
        r"const T\* z would get a result, want the pointers of operands before",
    ),
    "a traced number": (lambda: jax.jit(made())(X, X, scale=2.0), TypeError, "scale is traced"),
    "another dtype": (
        lambda: row_sum()(np.ones((2, 64), np.float32)),
        TypeError,
        r"the array of x is float32\[2,64\], want int32: int\* x",
    ),
    "too few arrays": (
        lambda: made(grid=1, out=X, scalars=None, templates=("float",))(X, n=1, scale=1),
        TypeError,
        "1 operands and 1 results, want 3 arrays for the pointers",
    ),
    "no block": (lambda: made(grid=0)(X, X, scale=1), ValueError, "grid is 0, 0 along x, want 1 to 2147483647"),
    "too many threads": (lambda: made(block=(64, 32))(X, X, scale=1), ValueError, "block is .64, 32, 1., 2048 threads, want at most 1024"),
    "a grid of reals": (lambda: made(grid=1.5)(X, X, scale=1), ValueError, "grid is 1.5, want one to three whole numbers"),
    "a cluster that does not divide": (lambda: made(cluster=3)(X, X, scale=1), ValueError, "want a multiple of the cluster"),
    "no kernel": (lambda: made(name="f"), ValueError, r"no __global__ function f, it has \['scale_add'\]"),
    "no text": (lambda: made(source=3), TypeError, "the source of scale_add is 3, want CUDA C"),
    "no grid": (lambda: made(grid=None), TypeError, "grid of scale_add is missing"),
    "an alias of another shape": (
        lambda: (
            increase()(np.arange(8, dtype=np.int32))
            if False
            else extend.cuda_kernel(INCREASE, "increase", grid=1, block=1, out=X, aliases={0: 0})(np.arange(8, dtype=np.int32), by=1)
        ),
        ValueError,
        r"operand 0 is int32\[8\], want float32\[300\] as result 0",
    ),
    "a CPU": (lambda: made()(X, X, scale=1), NotImplementedError, "platform is 'cpu', want 'cuda': `simulate` runs it on a CPU"),
    "a derivative": (
        lambda: jax.grad(lambda x: made()(x, x, scale=1).sum())(X),
        NotImplementedError,
        "it has no derivative: declare it by jaxext.extend.operation",
    ),
    "vmap": (lambda: jax.vmap(lambda x: made()(x, x, scale=1))(X[None]), NotImplementedError, "it has no vmap: declare it"),
    "a register without labels": (
        lambda: extend.register("matmul", made()),
        TypeError,
        "operation is 'matmul', want the result of `extend.operation`",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_call_is_refused(what):
    call, kind, message = BAD[what]
    with pytest.raises(kind, match=message):
        call()


TYPEDEF = 'typedef double number;\nextern "C" __global__ void f(float* y, number a) { *y = a; }'
AT_LOWERING = {
    "a syntax error": (SCALE_ADD.replace("z[i] =", "z[i]"), {}, ValueError, r"scale_add.*\n.*\(5\): error"),
    "too much shared memory": (SCALE_ADD, dict(shared=228 * 1024), ValueError,
        "shared is 233472 bytes, want at most 232448 in all on sm_90"),
    "a pointer to another type": (SCALE_ADD, dict(templates=("double",)), TypeError,
        "parameter 0 is compiled as double., 8 bytes, but the call passes a pointer to float32"),
    "more threads than the source allows": (SCALE_ADD.replace("void scale", "void __launch_bounds__(64) scale"), {}, ValueError,
        r"block is .256, 1, 1., 256 threads, want at most 64, as the source declares"),
    "another cluster than the source declares": (SCALE_ADD.replace("void scale", "void __cluster_dims__(2, 1, 1) scale"), {}, ValueError,
        r"cluster is \(1, 1, 1\), want \(2, 1, 1\) as the source declares"),
    "a number of another type": ("using n_t = long long;\n" + SCALE_ADD.replace("int n", "n_t n"), dict(scalars=dict(n=np.int32(300))),
        TypeError, "parameter 3 is compiled as long long, 8 bytes, but the call passes int32, 4 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("what", AT_LOWERING)
def test_lowering_is_refused(what):
    source, given, kind, message = AT_LOWERING[what]
    with pytest.raises(kind, match=message):
        described(made(source, **given), X, X, scale=1)


def test_number_of_unknown_type():
    f = extend.cuda_kernel(TYPEDEF, "f", grid=1, block=1, out=jax.ShapeDtypeStruct((), np.float32))
    with pytest.raises(TypeError, match=r"a has the type number, want a scalar of numpy"):
        f.simulate(a=2)
    with pytest.raises(TypeError, match="parameter 1 is compiled as 8 bytes, but the call passes float32, 4 bytes"):
        f.simulate(a=np.float32(2))
    assert f.simulate(a=np.float64(2)) == 2


# --- operations

FILTER = """
extern "C" __global__ void blend(const float* x, const float* g, float* y, int N, int C) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < N * C) y[i] = x[i] * x[i] * g[i % C];
}
extern "C" __global__ void blend_backward(const float* x, const float* g, const float* d_y, float* d_x, float* d_g, int N, int C) {
  int c = threadIdx.x;
  float sum = 0;
  for (int n = 0; n < N; ++n) {
    sum += d_y[n * C + c] * x[n * C + c] * x[n * C + c];
    d_x[n * C + c] = 2 * d_y[n * C + c] * x[n * C + c] * g[c];
  }
  d_g[c] = sum;
}"""


@functools.cache
def blend():
    forward = extend.cuda_kernel(FILTER, "blend", grid=lambda x, g: -(-x.size // 64), block=64, out=lambda x, g: x)
    backward = extend.cuda_kernel(FILTER, "blend_backward", grid=1, block=lambda x, g, d_y: g.size, out=lambda x, g, d_y: (x, g))
    operands, results = dict(x="N C", g="C"), dict(y="N C")
    op = extend.operation("blend", lambda x, g: x * x * g[None], operands=operands, results=results, kernels=dict(cuda=forward))
    extend.register(op.backward, backward)
    return op


RULES = {
    "eager", "jit", "scan", "vmap", "jvp", "vjp", "jvp of grad", "gradient of scan", "gradient of remat", "halves", "vjp of halves",
    "shard_map", "gradient of shard_map", "explicit mesh", "gradient, explicit mesh",
}  # fmt: skip


def test_operation_has_every_rule():
    x, g = jnp.arange(1, 33, dtype="float32").reshape(8, 4) % 5, jnp.arange(1, 5, dtype="float32")
    op = functools.partial(blend(), implementation="cuda_simulated")
    skip = cases.other_checks(*RULES) | testing.WITH_CALLBACKS
    report = testing.check_op(op, lambda x, g: x * x * g[None], (x, g), skip=skip, show=False)
    assert report.passed and report.complete and {row.check for row in report.rows if row.outcome == "passed"} == RULES, report


def test_operation_in_programs_for_a_gpu():
    x, g = jnp.ones((6, 4), "float32"), jnp.ones(4, "float32")
    with jaxext.use_target("sm_90a"):
        report = jaxext.explain(jax.grad(lambda x, g: blend()(x, g).sum(), (0, 1)), platform="cuda")(x, g)
    assert [row.chosen for row in report.rows] == ["cuda", "cuda"], report
    mapped = jax.vmap(jax.grad(lambda x, g: blend()(x, g).sum()), (0, None))
    assert jaxext.export.lower_for(mapped, arch="sm_90a")(jnp.ones((3, 6, 4), "float32"), g).as_text().count(f"@{launcher.TARGET}") == 2


def test_operation_refuses_and_says_why():
    with pytest.raises(NotImplementedError, match="platform is 'cpu', want 'cuda'"):
        blend()(jnp.ones((6, 4)), jnp.ones(4), implementation="cuda")
    with pytest.raises(NotImplementedError, match=r"the array of x is float16\[6,4\], want float32"):
        op = functools.partial(blend(), implementation="cuda")
        jaxext.export.lower_for(op, arch="sm_90a")(jnp.ones((6, 4), "float16"), jnp.ones(4, "float16"))
    with pytest.raises(NotImplementedError, match="an axis has size 0"):
        blend()(jnp.ones((0, 4)), jnp.ones(4), implementation="cuda_simulated")


def test_operation_binds_pointers_by_name_and_keywords():
    """The defaults of the reference count.  A pointer at the place of another array, and a keyword that the kernel lacks, are refused."""
    source = """
    __global__ void f(const float* b, const float* a, float* c, float s) { int i = threadIdx.x; c[i] = s * (a[i] - b[i]); }"""
    how: dict[str, Any] = dict(operands=dict(a="N", b="N"))
    kernel = extend.cuda_kernel(source, "f", grid=1, block=lambda a, b: a.size, out=lambda a, b: a)
    op = extend.operation("text_named", lambda a, b, *, s=2.0: s * (a - b), results=dict(c="N"), kernels=dict(cuda=kernel), **how)
    a, b = jnp.arange(4, dtype="float32"), jnp.ones(4, "float32")
    simulated = functools.partial(op, implementation="cuda_simulated")
    np.testing.assert_array_equal(simulated(a, b), 2 * (a - b))
    np.testing.assert_array_equal(simulated(a, b, s=3.0), 3 * (a - b))
    for _ in range(2):  # what was refused has left no name behind
        with pytest.raises(ValueError, match="pointer b of cuda_kernel f.* would not get the operand or result of its name"):
            extend.operation("text_swapped", lambda a, b: a - b, results=dict(d="N"), kernels=dict(cuda=kernel), **how)
    with pytest.raises(ValueError, match=r"f.* has 3 pointers, want 2 in the order \['x', 'y'\], or these names alone"):
        extend.operation("text_others", lambda x: x, operands=dict(x="N"), results=dict(y="N"), kernels=dict(cuda=kernel))
    with pytest.raises(ValueError, match="name is 'xla'"):
        extend.register(op, kernel, name="xla", replace=True)
    further = extend.operation("text_further", lambda a, b, *, s=2.0, t=1.0: s * t * (a - b), results=dict(c="N"), **how)
    extend.register(further, kernel)
    np.testing.assert_array_equal(further(a, b, implementation="cuda_simulated"), 2 * (a - b))
    with pytest.raises(NotImplementedError, match=r"keyword t is no parameter, want one of \['s'\]"):
        further(a, b, t=3.0, implementation="cuda_simulated")


def test_code_of_a_launch_tells_processes_apart():
    def kernel(scale, add=lambda x: 1):
        return made(scalars=lambda x, y: dict(n=x.size, scale=scale), grid=lambda x, y: add(x))._digest

    assert kernel(1.0) == kernel(1.0) != kernel(2.0)
    assert kernel(1.0) != kernel(1.0, lambda x: 2)


def test_operation_splits_over_devices():
    mesh = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    x, g = jnp.arange(64, dtype="float32").reshape(16, 4), jnp.arange(4, dtype="float32")
    op = functools.partial(blend(), implementation="cuda_simulated")
    split = jax.shard_map(op, mesh=mesh, in_specs=(P("i"), P()), out_specs=P("i"))
    np.testing.assert_array_equal(jax.jit(split)(x, g), x * x * g[None])
    with pytest.raises(jax.errors.JaxRuntimeError, match="has no callbacks then"):
        jax.jit(op)(jax.device_put(x, jax.NamedSharding(mesh, P("i"))), g)


# --- CuPy


def cupy_object(kind: str, **attributes) -> Any:
    """An object with the attributes that CuPy 14 gives it.  CuPy is not installed where most tests run."""
    return type(kind, (types.SimpleNamespace,), {"__module__": "cupy._core.raw"})(**attributes)


def info(name, dtype, ctype, raw=False) -> Any:
    return types.SimpleNamespace(name=name, dtype=dtype and np.dtype(dtype), ctype=ctype, raw=raw)


def test_cupy_raw_kernel_and_module():
    shared: dict[str, Any] = dict(options=("-use_fast_math",), file_path=None, enable_cooperative_groups=False)
    how: dict[str, Any] = dict(grid=2, block=64, out=lambda x: jax.ShapeDtypeStruct(x.shape[:1], x.dtype), shared=256)
    x = np.arange(128, dtype=np.int32).reshape(2, 64)
    raw = extend.cuda_kernel(cupy_object("RawKernel", code=ROW_SUM, name="row_sum", **shared), **how)
    module = extend.cuda_kernel(cupy_object("RawModule", code=ROW_SUM, **shared), "row_sum", **how)
    for kernel in (raw, module):
        np.testing.assert_array_equal(kernel.simulate(x, C=64), x.sum(1))
    with pytest.raises(NotImplementedError, match="cooperative groups"):
        extend.cuda_kernel(cupy_object("RawKernel", code="", name="f", **{**shared, "enable_cooperative_groups": True}), **how)
    with pytest.raises(TypeError, match="cupy's ReductionKernel"):
        extend.cuda_kernel(cupy_object("ReductionKernel"), **how)


def test_cupy_elementwise_kernel():
    inputs = [info("x", np.float32, "float"), info("y", None, "T"), info("t", np.int32, "int", raw=True)]
    outputs, index = [info("z", None, "T")], info("_ind", None, None)
    params = dict(in_params=inputs, out_params=outputs, params=[*inputs, *outputs, index], kwargs={})
    kernel = extend.cuda_kernel(cupy_object("ElementwiseKernel", name="mul", operation="z = x * y + t[1]", **params))
    x, y, t = X, np.arange(300.0), np.array([1, 2, 3], np.int32)
    with jax.enable_x64(True):
        z = kernel.simulate(x, y, t)
    assert z.dtype == np.float64
    np.testing.assert_array_equal(z, x * y + 2)
    with pytest.raises(TypeError, match="want one: jnp.broadcast_arrays"):
        kernel(x, y[:1].astype(np.float32), t)
