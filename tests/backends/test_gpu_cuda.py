"""`implementation="cuda"` on a GPU: each compiled kernel by itself, the public operations on top, and the runtime around them.

By itself a kernel is called as exported programs call it, by the name of its target with attributes from the frozen dataclasses, in every
configuration and into memory full of NaN.  Comparisons are with float64: small integers, exact in any order of summation, bit for bit;
normal numbers within what rounding explains.  Whether kernels read or write beside their arrays is for compute-sanitizer to see
(benchmarks/on_gpu.sh), and on a CPU for tests/backends/cuda/test_simt.py.
"""

import concurrent.futures
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import test_conv as dense
import test_depthwise as depthwise
import test_ragged_kernel as ragged
import test_scaled_dot as scaled
from cases import CASES, ConvCase, DotCase, named, random
from jax import lax
from test_cuda_scaled import product as scaled_product
from test_gpu import HALF, NN, conv, exact, label, on_cpu, ours, value_and_gradients, verify
from test_simt import CASES as DEPTHWISE

import jaxext
from jaxext._target import compute_capability
from jaxext.backends.cuda import cuda_binding
from jaxext.kernels.matmul.problem import MatmulProblem
from jaxext.ops.conv import cuda_dense as cuda_conv
from jaxext.ops.conv import cuda_depthwise
from jaxext.ops.matmul import cuda as cuda_matmul
from jaxext.ops.matmul import cuda_pieces
from jaxext.ops.ragged import cuda as cuda_ragged
from jaxext.ops.scaled import cuda as cuda_scaled
from jaxext.verify.check import RECORDED, held
from jaxext.verify.laws import SUMS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(cuda_binding.missing() is not None, reason=f"no CUDA kernels: {cuda_binding.missing()}")]
hopper = pytest.mark.skipif(compute_capability("cuda") != 90, reason="the kernels of matmul and dense convolution are for sm_90a alone")

if not cuda_binding.missing():
    import cuda_calls


@pytest.fixture(autouse=True)
def cuda():
    with jaxext.use_implementation("cuda"):
        yield


# The kernels alone


def check_kernels(kernels, problem, configs, call=None, integers=True):
    """Check that a problem is taken, and right in these configurations."""
    assert kernels.refused(problem) is None
    for config in configs:
        made = (call or cuda_calls.conv_call)(problem, config, integers)
        made.check(cuda_calls.compute_on_device(made))


def some(configs):
    """All of them but for how a sum is split: as little as can be, as much, and halfway."""
    for tile in dict.fromkeys(dataclasses.replace(config, splits=1) for config in configs):
        splits = sorted(config.splits for config in configs if dataclasses.replace(config, splits=1) == tile)
        for number in dict.fromkeys((splits[0], splits[len(splits) // 2], splits[-1])):
            yield dataclasses.replace(tile, splits=number)


def has_result(case, role):
    return 0 not in depthwise.shape_of(case, depthwise.ROLES[role])


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("name", "role"), [(name, role) for name, case in DEPTHWISE.items() for role in depthwise.ROLES if has_result(case, role)]
)
def test_depthwise_kernel(name, role, dtype):
    problem = depthwise.of_role(DEPTHWISE[name], role, dtype)
    picked = cuda_depthwise.candidates(problem)[0]
    configs = {picked, *some(cuda_depthwise.candidates(problem))}
    if role == "wgrad":
        configs |= {dataclasses.replace(picked, splits=3)}  # what is picked for so little is not split
        check_kernels(cuda_depthwise, dataclasses.replace(problem, dtypes=(dtype, dtype, "fp32")), [picked])
    check_kernels(cuda_depthwise, problem, configs)


@pytest.mark.parametrize("role", depthwise.ROLES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["causal k4", "7x7", "5x5 dilated", "3x3 stride 2"])
def test_depthwise_kernel_rounds_once(name, role, dtype):
    """Operands are normal numbers, and the channels make several blocks."""
    problem = depthwise.of_role(DEPTHWISE[name], role, dtype, G=264, N=3)
    check_kernels(cuda_depthwise, problem, [cuda_depthwise.candidates(problem)[0]], integers=False)


# Channels in eights, and problems of several tiles along each axis.
DENSE = {name: case | {"C": 8 * case.get("C", 3), "K": 8 * case.get("K", 5)} for name, case in dense.CASES.items()} | {
    "tiles": dict(N=3, input=(13, 11), C=72, K=200),
    "tiles_strided": dict(N=3, input=(21, 18), C=136, K=72, stride=(2, 2)),
    "deep": dict(N=2, input=(6, 7), filter=(1, 1), padding=((0, 0), (0, 0)), C=520, K=264),
    "long": dict(N=2, input=(700,), filter=(5,), padding=((4, 4),), filter_dilation=(2,), C=64, K=136),
    "tiles_3d": dict(N=2, input=(5, 6, 7), padding=((1, 1),) * 3, filter=(3, 3, 3), C=40, K=136),
    "images": dict(N=70, input=(3, 2), filter=(2, 2), padding=((0, 1), (1, 0)), C=8, K=8),
    "groups_of_parts": dict(B=2, N=2, G=5, input=(7, 6), C=16, K=24),
    "few_channels_many_filters": dict(N=2, input=(9, 9), C=8, K=4096),
    "corner": dict(N=1, input=(9, 9), filter=(2, 2), padding=((128, 0), (0, 127)), C=8, K=8),  # of TMA's boxes: the farthest
    "stride_8": dict(N=2, input=(40, 33), filter=(3, 3), stride=(8, 8), C=72, K=72),
}


@functools.cache
def taken(name, role, dtype, result):
    problem = dense.a_problem(role, **DENSE[name], dtypes=(dtype, dtype, result))
    sizes = (problem.B, problem.N, problem.G, problem.C, problem.K, *problem.input, *problem.filter, *problem.output)
    refused = cuda_binding.missing() or cuda_conv.refused(problem)
    return None if refused or 0 in sizes else problem


@hopper
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(("name", "role"), [(name, role) for name in DENSE for role in dense.ROLES if taken(name, role, "bf16", "bf16")])
def test_conv_kernel(name, role, dtype):
    for result in (dtype, "fp32"):
        problem = taken(name, role, dtype, result)
        check_kernels(cuda_conv, problem, some(cuda_conv.candidates(problem, cuda_binding.compiled("conv"))))


MATMULS = {
    "ragged": dict(M=203, N=336, K=144),
    "batch": dict(B=3, M=77, N=144, K=272),
    "one row": dict(M=1, N=256, K=512),
    "skinny": dict(M=16, N=1024, K=4096),
    "tiles": dict(M=1037, N=784, K=528),
    "waves": dict(M=640, N=5392, K=64),
    "one multiple of 16 bytes": dict(M=5, N=16, K=16),
}
PIECES = {
    "ragged": dict(M=204, N=340, K=144),
    "batch": dict(B=3, M=76, N=144, K=272),
    "one row": dict(M=4, N=256, K=512),
    "skinny": dict(M=16, N=1024, K=4096),
    "tiles": dict(M=1036, N=784, K=528),
}


def check_products(family, kernels, role, sizes, dtypes, precision="tf32", integers=True):
    problem = MatmulProblem(name=f"{family}_{role}", role=role, **{"B": 1} | sizes, dtypes=dtypes, precision=precision, arch=90)

    def call(problem, config, integers):
        row = cuda_calls.row_of(problem, config)
        return cuda_calls.matmul_call(row, problem.B, problem.rows, problem.cols, problem.depth, config.splits, integers)

    check_kernels(kernels, problem, some(kernels.candidates(problem, cuda_binding.compiled(family))), call, integers)


@hopper
@pytest.mark.parametrize(
    ("role", "dtype", "result"),
    [
        *((role, dtype, result) for role in ("nn", "nt", "tn") for dtype in ("bf16", "fp16") for result in (dtype, "fp32")),
        *(("nt", "fp8e4nv", result) for result in ("bf16", "fp32")),
        ("nt", "fp32", "fp32"),
    ],
)
@pytest.mark.parametrize("name", MATMULS)
def test_matmul_kernel(name, role, dtype, result):
    check_products("matmul", cuda_matmul, role, MATMULS[name], (dtype, dtype, result))


@hopper
@pytest.mark.parametrize(("precision", "integers"), [("bf16x3", True), ("bf16x6", True), ("bf16x6", False)])
@pytest.mark.parametrize("role", ["nn", "nt", "tn"])
@pytest.mark.parametrize("name", PIECES)
def test_products_in_pieces(name, role, precision, integers):
    """Integers are exact in any number of pieces; of other numbers six products keep what float32 does."""
    check_products("pieces", cuda_pieces, role, PIECES[name], ("fp32",) * 3, precision, integers)


# The sizes of groups, rows of which the last may be nobody's, and the rest of the problem.
RAGGED = {
    "edges beside tiles": ((129, 0, 130, 127, 64, 1, 69, 0), 560, dict(K=136, N=264)),
    "all in one": ((0, 700, 0), 700, dict(K=72, N=520)),
    "none": ((0, 0), 3, dict(K=16, N=24)),
    "one row each": ((1,) * 40, 40, dict(K=328, N=16)),
    "batches": ((7, 65, 0, 33), 130, dict(K=24, N=272, B=2, P=2, R=2)),
    "many": (tuple(i % 17 for i in range(300)), 2500, dict(K=64, N=136)),
}


@hopper
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("role", ragged.ROLES)
@pytest.mark.parametrize("name", RAGGED)
def test_ragged_kernel(name, role, dtype):
    sizes, rows, more = RAGGED[name]
    begin_end = ragged.ranges_of(sizes, more.get("B", 1), more.get("P", 1))
    problem = ragged.a_problem(role, begin_end, rows, **more, dtypes=(dtype,) * 3)
    call = lambda problem, config, integers: cuda_calls.ragged_call(cuda_calls.row_of(problem, config), sizes, rows, integers, **more)
    check_kernels(cuda_ragged, problem, cuda_ragged.candidates(problem, cuda_binding.compiled("ragged")), call)


# Rows, the depth and columns, and their blocks: tiles and steps end early, and the depth is long enough for parts.
SCALED = {
    "tensor": ((203, 2320, 392), (1, 1, 1)),
    "rows and columns": ((203, 2320, 392), (203, 1, 392)),
    "rows and squares": ((203, 2304, 384), (203, 18, 3)),
    "lines": ((77, 2304, 392), (77, 18, 392)),
    "long blocks": ((1030, 1536, 512), (2, 3, 1)),
    "one row": ((1, 512, 8), (1, 4, 8)),
}


@hopper
@pytest.mark.parametrize("dtypes", [("fp8e4nv", "fp8e4nv"), ("fp8e5", "fp8e4nv"), ("fp8e4nv", "fp8e5")], ids=str)
@pytest.mark.parametrize("role", scaled.ROLES)
@pytest.mark.parametrize("name", SCALED)
def test_scaled_kernel(name, role, dtypes):
    for result in ("bf16", "fp32"):
        problem = scaled_product(role, *SCALED[name], dtypes=(*dtypes, result), B=2 if name == "long blocks" else 1)
        configs = some(cuda_scaled.candidates(problem, cuda_binding.compiled("scaled")))
        check_kernels(cuda_scaled, problem, configs, cuda_calls.scaled_call)


# The public operations

DEPTHWISE_CALLS = (
    conv("depthwise_7x7", (2, 57, 56, 96), (7, 7, 1, 96), feature_group_count=96),
    conv("depthwise_5x5_strided", (2, 29, 28, 60), (5, 5, 1, 60), 2, feature_group_count=60),
    conv("depthwise_transposed", (2, 13, 12, 64), (4, 4, 1, 64), 1, ((2, 2), (2, 2)), lhs_dilation=(2, 2), feature_group_count=64),
    conv("causal", (2, 2048, 520), (4, 1, 520), 1, ((3, 0),), feature_group_count=520),
    conv("depthwise_three_axes", (2, 7, 15, 14, 64), (3, 3, 3, 1, 64), feature_group_count=64),
    conv("depthwise_multiplier", (2, 29, 28, 60), (5, 5, 1, 120), feature_group_count=60),
    conv("depthwise_31x31", (1, 33, 30, 32), (31, 31, 1, 32), feature_group_count=32),
    conv("causal_dilated", (3, 1021, 64), (3, 1, 64), 1, ((16, 0),), rhs_dilation=(8,), feature_group_count=64),
)
HOPPER_CALLS = (
    DotCase("tiles", (515, 776), (776, 392), NN),
    DotCase("skinny", (16, 8192), (8192, 48), NN),
    DotCase("waves", (1024, 256), (256, 3080), NN),
    DotCase("transposed", (264, 136), (200, 136), (((1,), (1,)), ((), ()))),
    DotCase("batch", (5, 130, 72), (5, 72, 264), (((2,), (1,)), ((0,), (0,)))),
    conv("dense", (2, 29, 28, 64), (3, 3, 64, 96)),
    conv("pointwise", (2, 28, 28, 136), (1, 1, 136, 72)),
    conv("groups", (2, 14, 14, 128), (3, 3, 32, 128), feature_group_count=4),
    conv("one_axis", (3, 515, 64), (5, 64, 96), 1, ((16, 0),), rhs_dilation=(4,)),
    conv("three_axes", (1, 7, 15, 14, 32), (3, 3, 3, 32, 64)),
)


@pytest.mark.parametrize("dtype", [np.float32, *HALF], ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("case", DEPTHWISE_CALLS, ids=label)
def test_depthwise_call(case, dtype):
    verify(case, dtype, SUMS)


@hopper
@pytest.mark.parametrize("dtype", HALF, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("case", HOPPER_CALLS, ids=label)
def test_hopper_call(case, dtype):
    verify(case, dtype, SUMS)


@hopper
@pytest.mark.parametrize("dtype", [np.float32, *HALF], ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("case", CASES, ids=label)
def test_named_case(case, dtype):
    """Either it is right or it is refused, and `explain` knows which."""
    program, args = value_and_gradients(case, ours(case)), case.operands(dtype, integers=True)
    y = jax.eval_shape(lambda x, w: case.run(case.op, x, w), *args)
    args = (*args, np.zeros(y.shape, y.dtype))
    if all(row.chosen == "cuda" for row in jaxext.explain(program)(*args).rows):
        verify(case, dtype, SUMS)
    else:
        with pytest.raises(NotImplementedError, match="implementation 'cuda' does not support this call: "):
            jax.jit(program)(*args)


@hopper
@pytest.mark.parametrize("result", [jnp.bfloat16, np.float32], ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("sizes", [(200, 144, 336), (16, 4096, 1024)], ids=str)
def test_eight_bits(sizes, result):
    m, k, n = sizes
    case = DotCase("a b^T", (m, k), (n, k), (((1,), (1,)), ((), ())))
    a, b = case.operands(ml_dtypes.float8_e4m3fn, integers=True)
    got = jax.jit(lambda a, b: case.run(jaxext.dot_general, a, b, preferred_element_type=result))(a, b)
    assert got.dtype == result
    exact(got, on_cpu(functools.partial(case.run, lax.dot_general), a, b))


# Of ones and zeros, with sums below 256: exact in 16 bits after every rounding, however many there are.
SMALL = (
    conv("small_depthwise", (2, 7, 6, 8), (3, 3, 1, 8), feature_group_count=8),
    pytest.param(conv("small_dense", (2, 6, 5, 16), (3, 3, 16, 24)), marks=hopper),
    pytest.param(DotCase("small", (24, 40), (40, 16), NN), marks=hopper),
)


@pytest.mark.parametrize("dtype", HALF, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("case", SMALL, ids=label)
def test_transformed(case, dtype):
    """The operation is eager, mapped over both operands and over one, and differentiated per example, forward, and forward over reverse."""

    def signs(shape, seed):
        return np.sign(random(shape, np.float32, seed, True)).astype(dtype)

    x, w = case.operands(dtype)
    y = jax.eval_shape(functools.partial(case.run, case.op), x, w)
    x, w, dx, dw = (signs(a.shape, seed) for seed, a in enumerate((x, w, x, w)))
    xs, ws, cts = (signs((3, *a.shape), seed) for seed, a in enumerate((x, w, y), 4))

    def pullback(f):
        return lambda x, w, ct: jax.vjp(f, x, w)[1](ct)

    def apply(op):
        return functools.partial(case.run, op)

    for transformed, args in (
        (apply, (x, w)),
        (lambda op: jax.jit(jax.vmap(apply(op))), (xs, ws)),
        (lambda op: jax.jit(jax.vmap(apply(op), (0, None))), (xs, w)),
        (lambda op: jax.jit(jax.vmap(pullback(apply(op)), (0, None, 0))), (xs, w, cts)),
        (lambda op: jax.jit(lambda x, w, dx, dw: jax.jvp(apply(op), (x, w), (dx, dw))), (x, w, dx, dw)),
        (
            lambda op: jax.jit(lambda x, w, dx, dw, ct: jax.jvp(lambda x, w: pullback(apply(op))(x, w, ct), (x, w), (dx, dw))),
            (x, w, dx, dw, cts[0]),
        ),
    ):
        exact(transformed(ours(case))(*args), on_cpu(transformed(case.op), *args))


# The runtime around them

ROUND = DEPTHWISE_CALLS[3]
FORMS = [ROUND, DEPTHWISE_CALLS[0], *(pytest.param(case, marks=hopper) for case in (HOPPER_CALLS[0], HOPPER_CALLS[5]))]
each_form = pytest.mark.parametrize("case", FORMS, ids=label)


def inputs(case, dtype, seeds):
    """Operands and a cotangent for each seed, and what is right."""
    for seed in seeds:
        x, w = case.operands(dtype, seed, integers=True)
        y = jax.eval_shape(functools.partial(case.run, case.op), x, w)
        args = (x, w, random(y.shape, dtype, seed + 2, True))
        program = value_and_gradients(case, functools.partial(ours(case), implementation="xla"))
        yield args, on_cpu(jax.jit(program), *args)


@each_form
def test_recorded_in_cuda_graphs(case, tmp_path):
    """XLA's command buffers hold every call of ours, and replay it with whatever arrays come."""
    tries = list(inputs(case, jnp.bfloat16, range(0, 40, 10)))
    program = (
        jax.jit(value_and_gradients(case, ours(case)))
        .lower(*tries[0][0])
        .compile(compiler_options={**RECORDED, "xla_dump_to": str(tmp_path)})
    )
    calls = str(program.as_text()).count('custom_call_target="jaxext_')
    assert calls >= 3
    assert held(tmp_path) == (calls, None)
    for args, want in 3 * tries:  # it runs as it is, is recorded, and then replayed, or changed where arrays lie elsewhere
        exact(program(*args), want)


def test_two_threads():
    """Each with a program of its own, and one that both call, on arrays of their own."""
    shared = jax.jit(value_and_gradients(ROUND, ours(ROUND)))

    def work(seed):
        case = DEPTHWISE_CALLS[seed // 10]
        own = jax.jit(value_and_gradients(case, ours(case)))
        tasks = [(own, *next(inputs(case, np.float32, [seed]))), (shared, *next(inputs(ROUND, jnp.bfloat16, [seed])))]
        for _ in range(100):
            flying = [(program(*args), want) for program, args, want in tasks]
            for got, want in flying:
                exact(got, want)

    in_threads(work, 0, 10)


def in_threads(work, *arguments):
    """`work` of each, all at once; an error in one is raised here."""

    def named(argument):
        with jaxext.use_implementation("cuda"):  # a thread has contexts of its own
            work(argument)

    with concurrent.futures.ThreadPoolExecutor(len(arguments)) as pool:
        list(pool.map(named, arguments))


@each_form
def test_two_devices(case):
    """The same kernels on each GPU of this machine in turn, so that what a first launch sets is set on every one, then on two at once."""
    devices = jax.local_devices(backend="cuda")
    if len(devices) < 2:
        pytest.skip("this machine has one GPU")
    program = jax.jit(value_and_gradients(case, ours(case)))
    tries = list(inputs(case, jnp.bfloat16, (0, 10)))

    def work(device):
        for args, want in tries:
            got = program(*jax.device_put(args, device))
            assert all(y.devices() == {device} for y in got)
            exact(got, want)

    for device in devices:
        work(device)
    for _ in range(20):
        in_threads(work, *devices[:2])


def test_two_streams():
    """Calls that do not wait for one another, on streams that the program names."""
    compute_on = pytest.importorskip("jax.experimental.compute_on").compute_on

    def apply(x, w):
        return ROUND.run(ours(ROUND), x, w)

    def program(x, w, x2, w2):
        first, second = (compute_on(apply, compute_type=f"gpu_stream:{i}", out_memory_spaces=jax.memory.Space.Device) for i in (1, 2))
        return first(x, w), second(x2, w2)

    ((first, (want, *_)), (second, (want2, *_))) = inputs(ROUND, jnp.bfloat16, (0, 10))
    args = [*map(jax.device_put, (*first[:2], *second[:2]))]
    compiled = jax.jit(program).lower(*args).compile()
    text = str(compiled.as_text())
    assert {"1", "2"} <= set(re.findall(r'_xla_stream_annotation="(\d)"', text)), "the program has one stream"
    for _ in range(20):
        exact(compiled(*args), (want, want2))


@pytest.mark.filterwarnings("ignore")  # of importing CuPy
def test_cupy_without_a_copy():
    cupy = pytest.importorskip("cupy")
    (args, want) = next(inputs(ROUND, np.float16, [0]))
    theirs = [cupy.asarray(x) for x in args]
    arrays = [jax.dlpack.from_dlpack(x, copy=False) for x in theirs]
    assert [x.unsafe_buffer_pointer() for x in arrays] == [x.data.ptr for x in theirs]
    results = jax.jit(value_and_gradients(ROUND, ours(ROUND)))(*arrays)
    back = [cupy.from_dlpack(y) for y in results]
    assert [x.data.ptr for x in back] == [y.unsafe_buffer_pointer() for y in results]
    exact([cupy.asnumpy(x) for x in back], list(want))


# Refusals


@pytest.mark.parametrize(
    ("case", "dtype", "reason"),
    [
        (named("conv:3x3_same"), jnp.bfloat16, "3 channels per group, TMA wants a multiple of 8"),
        (conv("long", (1, 40, 8), (32, 1, 8), 1, ((31, 0),), feature_group_count=8), np.float32, "32 taps along an axis, it takes 31"),
        (named("dot:odd"), jnp.bfloat16, "TMA wants a multiple of 16"),
    ],
    ids=lambda value: label(value) if isinstance(value, ConvCase | DotCase) else "",
)
@hopper
def test_what_is_named_and_refused_raises(case, dtype, reason):
    with pytest.raises(NotImplementedError, match=f"implementation 'cuda' does not support this call: .*{reason}"):
        jax.jit(functools.partial(case.run, ours(case)))(*case.operands(dtype))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(lanes=3), "lanes is 3, want a power of two"),
        (dict(strip=0), "strip is 0, want 1 to"),
        (dict(splits=2), r"y has the shape \(.*\), want \(2, "),
        (dict(G=11), r"x has the shape \(.*\), want \(1, 2, 1, 1, 13, 11, 1\)"),
        (dict(stride=(1, 1, 0)), "a stride or dilation of 0, it takes 1 or more"),
        (dict(low=(0, 3)), "attribute low is missing or of another type, want three int64"),
        (dict(filter_dilation=(1, 1, 1 << 40)), "an axis reaches .* places, it takes fewer than"),
        (dict(nonsense=1), "attribute"),
        (dict(strip=None), "attribute"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_a_handler_refuses_in_words(changes, message):
    """The handler is called directly, without Python's checks; the device works after that."""
    problem = depthwise.of_role(DEPTHWISE["causal k4"], "fprop")
    call = cuda_calls.conv_call(problem, cuda_depthwise.candidates(problem)[0])
    attributes = {name: value for name, value in {**call.case.attributes, **changes}.items() if value is not None}
    wrong = cuda_calls.kernel(dataclasses.replace(call.case, attributes=attributes))
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(jax.jit(wrong)(*call.operands.values()))
    call.check(cuda_calls.compute_on_device(call))
