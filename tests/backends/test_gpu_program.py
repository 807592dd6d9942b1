"""Our programs as XLA's GPU compiler makes them, read without a GPU: it compiles for one that is only described.

Needs jax-cuda13-plugin and jax-cuda13-pjrt of jaxlib's version and a CUDA toolkit, but no driver: `make gpu-programs` runs it with them.
Elsewhere all is skipped but what lowered programs show.
"""

import collections
import functools
import math
import pathlib
import re
from typing import Any

import call_frame
import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from lowered import NHWC, operations, struct
from public_operations import OF_ONE_MATRIX

import jaxext
from jaxext import extend
from jaxext.backends import launcher, nvrtc
from jaxext.backends.cuda import cuda_binding
from jaxext.core.call import Partitioner
from jaxext.core.implementation import Algorithm
from jaxext.core.static import Static
from jaxext.core.window import Window
from jaxext.ops.conv.form import conv_form
from jaxext.ops.conv.xla import XlaConv
from jaxext.tables import record

# NVIDIA's numbers of an H200, those that the compiler asks for.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 151397597184
  cuda_compute_capability { major: 9 } device_address_bits: 64
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.12.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
"""
NT = (((1,), (1,)), ((), ()))
KERNELS = ("triton", "cuda")
OURS = re.compile(r"jaxext_|triton_kernel_call")
FREE = ("parameter", "constant", "bitcast", "tuple", "get-tuple-element")


@pytest.fixture(scope="module")
def devices():
    """Four GPUs that are not there."""
    try:
        devices = topologies.get_topology_desc(platform="cuda", target_config=H200, topology="1x1x4").devices
    except NotImplementedError as error:
        pytest.skip(f"XLA's GPU compiler is not here ({error}): make gpu-programs")
    try:
        jax.jit(jnp.tanh).lower(jax.ShapeDtypeStruct((), np.float32, sharding=SingleDeviceSharding(devices[0]))).compile()
    except jax.errors.JaxRuntimeError as error:
        if "No PTX compilation provider" in str(error) or "libdevice not found" in str(error):
            pytest.skip("no CUDA toolkit here, whose ptxas and libdevice XLA's GPU compiler needs")
        raise
    return devices


def by(implementation):
    """The context in which the operations take this implementation."""
    if implementation == "cuda" and (reason := cuda_binding.missing()):
        pytest.skip(f"no CUDA kernels: {reason}")
    return jaxext.use_implementation(implementation)


@pytest.fixture(params=KERNELS)
def kernels(request):
    with by(request.param):
        yield


@pytest.fixture
def compiled(devices):
    def compiled(fun, *args, donate=(), **options) -> str:
        """The optimised program for the first of the GPUs, or for those of the arguments' shardings."""
        place = SingleDeviceSharding(devices[0])
        args = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or place) for x in args]
        with jaxext.use_target("sm_90a"):
            return str(jax.jit(fun, donate_argnums=donate).lower(*args).compile(compiler_options=options).as_text())

    return compiled


def instructions(text: str):
    """(opcode, type, what follows) of each instruction that runs by itself: those within fusions and reductions do not."""
    inner = set(re.findall(r"(?:calls|to_apply)=%([\w.-]+)", text))
    for computation in re.split(r"\n(?=%|ENTRY )", text):
        name = re.match(r"(?:ENTRY )?%([\w.-]+) \(", computation)
        if name and name[1] not in inner:
            yield from re.findall(r"\n  (?:ROOT )?%\S+ = (\(.*?\)|\S+) ([a-z][\w-]*)\((.*)", computation)


def work(text: str) -> collections.Counter:
    """Count the instructions that go over data: custom calls by their targets, all else by its opcode."""
    found = collections.Counter()
    for _, opcode, rest in instructions(text):
        target = re.search(r'custom_call_target="([^"]+)"', rest)
        if opcode not in FREE:
            found["kernel" if target and OURS.search(target[1]) else target[1] if target else opcode] += 1
    assert found, "no instruction found: the pattern is out of date"
    return found


def dot(x, w):
    return jaxext.dot_general(x, w, NT)


def conv(x, w, strides=(1, 1), **kwargs):
    return jaxext.conv_general_dilated(x, w, strides, "SAME", dimension_numbers=NHWC, **kwargs)


def gradients(op):
    return lambda x, w, y: jax.vjp(op, x, w)[1](y)


# Where the operands of a kernel begin


def flat(x, parameters):
    """A weight within a vector of all parameters, 10 bytes from its beginning."""
    return dot(x, parameters[5 : 5 + 64 * 64].reshape(64, 64))


def written(x, w):
    """Results that a loop writes into a vector, each 10 bytes beside a multiple of 16."""
    body = lambda i, out: lax.dynamic_update_slice_in_dim(out, dot(x, w).reshape(-1), 5 + i * 64 * 64, 0)
    return lax.fori_loop(0, 3, body, jnp.zeros(5 + 3 * 64 * 64, x.dtype))


def test_barriers_stand_around_a_kernel(kernels):
    """Each array has a barrier of its own, since XLA looks through one of several arrays."""
    lowered = jaxext.export.lower_for(flat, arch="sm_90a")(struct(64, 64), struct(5000))
    calls = (op for op in operations(lowered) if op.name == "stablehlo.custom_call")
    (call,) = (op for op in calls if OURS.search(str(op.attributes["call_target_name"])))
    (after,) = (use.owner for use in call.results[0].uses)
    barriers = [*(operand.owner for operand in call.operands), after]
    assert [(op.name, len(op.operands)) for op in barriers] == [("stablehlo.optimization_barrier", 1)] * 3


def test_no_barrier_stands_around_a_kernel_that_takes_slices(kernels):
    """Derivatives are those of the call, wherever they are taken."""
    pullback = lambda x, parameters, y: jax.vjp(jaxext.slices_in_place()(flat), x, parameters)[1](y)
    for fun, args in ((jaxext.slices_in_place()(flat), ()), (pullback, (struct(64, 64),))):
        lowered = jaxext.export.lower_for(fun, arch="sm_90a")(struct(64, 64), struct(5000), *args)
        assert not [op for op in operations(lowered) if op.name == "stablehlo.optimization_barrier"]


def barriers(fun, *args) -> int:
    """Count the barriers of single arrays in a program for a GPU."""
    found = operations(jaxext.export.lower_for(fun, arch="sm_90a")(*args))
    return sum(op.name == "stablehlo.optimization_barrier" and len(op.operands) == 1 for op in found)


ROW = struct(64, 64)
# Rules of these make products that the call does not have.
OF_OTHER_PRODUCTS = {
    "ragged linear": (
        lambda x, w, bias: jaxext.ragged_linear(x, w, np.full(2, 32, np.int32), bias, activation="silu"),
        (ROW, struct(2, 64, 64), struct(2, 64)),
    ),
    "scaled dot": (
        lambda x, w, x_scale, w_scale: jaxext.scaled_dot(x, w, lhs_scale=x_scale, rhs_scale=w_scale),
        (ROW, ROW, struct(1, 1), struct(1, 64)),  # Triton before 3.8 takes no scale of each row in the gradient of w
    ),
    "fp8": (jaxext.fp8_matmul, (ROW, ROW)),
}


@pytest.mark.parametrize("name", OF_OTHER_PRODUCTS)
def test_derivatives_take_slices_where_the_call_does(name):
    """The context in which a derivative is taken does not matter."""
    fun, args = OF_OTHER_PRODUCTS[name]
    gradient = lambda fun: jax.grad(lambda *args: fun(*args).astype(jnp.float32).sum(), range(len(args)))
    inside = jaxext.slices_in_place()
    with by("triton"):
        traced = jax.extend.core.jaxpr_as_fun(jax.make_jaxpr(fun)(*args))
        outside = barriers(gradient(fun), *args)
        assert barriers(inside(gradient(lambda *args: traced(*args)[0])), *args) == outside
        assert outside - barriers(gradient(jax.jit(inside(fun))), *args) >= 3 * 3


def test_the_products_of_a_reference_take_slices():
    declared = {"operands": {"x": "M K", "w": "K N"}, "results": {"y": "M N"}, "unsharded": "K"}
    op = jaxext.extend.operation("squashed_product", lambda x, w: jnp.tanh(jaxext.matmul(x, w, implementation="triton")), **declared)
    assert barriers(op, ROW, ROW) == 3 and barriers(jaxext.slices_in_place()(op), ROW, ROW) == 0


def test_a_fused_kernel_takes_slices(kernels):
    """XLA passes them to typed calls alone."""
    fused = jaxext.slices_in_place()(functools.partial(jaxext.linear, activation="gelu"))
    found = [*operations(jaxext.export.lower_for(fused, arch="sm_90a")(struct(64, 64), struct(64, 64)))]
    assert not [op for op in found if op.name == "stablehlo.optimization_barrier"]
    (call,) = (op for op in found if op.name == "stablehlo.custom_call")
    assert re.search(r"@(jaxext_\w+|triton_kernel_call_ffi)\(", str(call)) and "api_version = 2" not in str(call)


def test_operands_and_results_do_not_begin_within_an_array(kernels, compiled):
    """XLA's GPU compiler hands a typed foreign call a slice in place, at any element: TMA and Triton's vectors want 16 bytes."""
    assert work(compiled(flat, struct(64, 64), struct(5000))) == {"fusion": 1, "kernel": 1}
    assert work(compiled(written, struct(64, 64), struct(64, 64)))["kernel"] == 1


def test_a_depthwise_kernel_takes_a_slice_where_it_is(compiled):
    """It takes any address.  And it shows that the test above can fail."""
    if jax.__version_info__ < (0, 11):
        pytest.skip("this XLA looks at where a slice begins")

    def causal(x, w):
        numbers = ("NHC", "HIO", "NHC")
        return jaxext.conv_general_dilated(x[:, 3:131], w, (1,), [(3, 0)], dimension_numbers=numbers, feature_group_count=3)

    with by("cuda"):  # the filter's transposition, and the kernel with its slice
        assert work(compiled(causal, struct(1, 200, 3), struct(4, 1, 3))) == {"fusion": 2}


# Layers by index

STACK = 6
ROWS = struct(256, 1024)
SIZES_OF_GROUPS = np.full(8, 32, np.int32)
# A layer of rows, its weights, the number of those with a gradient, and by which kernels.
LAYERS = {
    "linear": (lambda x, up, down: jaxext.linear(jaxext.linear(x, up, activation="gelu"), down), [(1024, 2048), (2048, 1024)], 2, KERNELS),
    "gated": (
        lambda x, w, down: jaxext.linear(jaxext.gated_linear_unit(x, w, activation="silu"), down),
        [(1024, 2, 2048), (2048, 1024)],
        2,
        ["triton"],
    ),
    "conv": (lambda x, w: conv_bias_act(x.reshape(4, 8, 8, -1), w, None, None).reshape(x.shape), [(1024, 3, 3, 1024)], 1, KERNELS),
    "ragged": (lambda x, w: jaxext.ragged_dot(x, w, jnp.asarray(SIZES_OF_GROUPS)), [(8, 1024, 1024)], 1, KERNELS),
    "ragged linear": (lambda x, w: jaxext.ragged_linear(x, w, SIZES_OF_GROUPS, activation="silu"), [(8, 1024, 1024)], 1, ["triton"]),
    "int8": (lambda x, w: quantized(x, w.astype(jnp.int8), jnp.ones((1, 1024))), [(1024, 1024)], 0, ["triton"]),
    "int8, few rows": (lambda x, w: jnp.tile(quantized(x[:32], w, jnp.ones((32, 1024))), (8, 1)), [(1024, 1024)], 0, ["cuda"]),
}


def scanned(layer):
    return lambda x, *weights: lax.scan(lambda x, w: (layer(x, *w), None), x, weights)[0]


def recomputed(layer):
    return scanned(jax.checkpoint(layer, prevent_cse=False))


def by_index(layer):
    """Counted layer by layer, as a decoder does for each token."""

    def tokens(x, *weights):
        each = lambda i, x: layer(x, *(lax.dynamic_index_in_dim(w, i, keepdims=False) for w in weights))
        return lax.fori_loop(0, 3, lambda _, x: lax.fori_loop(0, STACK, each, x), x)

    return tokens


def unrolled(layer):
    return lambda x, *weights: functools.reduce(lambda x, i: layer(x, *(w[i] for w in weights)), range(STACK), x)


def copies(text: str, sizes) -> int:
    """Count the instructions whose result has as many elements as one of these."""
    shapes = (re.search(r"[a-z]\w*\[([\d,]+)\]", kind) for kind, opcode, _ in instructions(text) if opcode not in (*FREE, "fusion-start"))
    return sum(math.prod(map(int, shape[1].split(","))) in sizes for shape in shapes if shape)


IN_LOOPS = [(name, kernels, scanned) for name, row in LAYERS.items() for kernels in row[3]]
IN_LOOPS += [("linear", kernels, loop) for kernels in KERNELS for loop in (by_index, unrolled, recomputed)]


@pytest.fixture
def slicing(kernels_of_layers):
    if jax.__version_info__ < (0, 11, 2):
        pytest.skip("this XLA passes no slice of a loop to a custom call: it copies each, as docs/help/stacked-layers.md says")
    with by(kernels_of_layers):
        yield


@pytest.mark.parametrize(("name", "kernels_of_layers", "loop"), IN_LOOPS)
def test_layers_are_read_in_place(slicing, name, loop, compiled):
    """Gradients of scanned weights are written in place, too."""
    layer, weights, differentiable, _ = LAYERS[name]
    dtype = jnp.bfloat16 if differentiable else jnp.int8
    fun, args = loop(layer), (ROWS, *(struct(STACK, *shape, dtype=dtype) for shape in weights))
    funs = [fun]
    two_results = name in ("linear", "gated") and loop is scanned  # y, and the input of the activation
    if differentiable and loop in (scanned, recomputed) and (jax.__version_info__ >= (0, 12) or not two_results):
        funs.append(jax.grad(lambda *args: fun(*args).astype(jnp.float32).sum(), range(1 + differentiable)))
    sizes = {math.prod(shape) for shape in weights}
    for each in funs:
        assert copies(compiled(each, *args), sizes) >= len(weights)
        assert copies(compiled(jaxext.slices_in_place()(each), *args), sizes) == 0


@pytest.mark.parametrize("kernels_of_layers", KERNELS)
def test_layers_split_over_devices_are_read_in_place(slicing, devices, compiled):
    """Each device has a part of the columns of `up` and of the rows of `down`."""
    mesh = Mesh(np.array(devices), "model")
    layer, weights, *_ = LAYERS["linear"]
    specs = PartitionSpec(), PartitionSpec(None, None, "model"), PartitionSpec(None, "model")
    arrays = [ROWS, *(struct(STACK, *shape) for shape in weights)]
    args = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]
    sizes = {math.prod(shape) // len(devices) for shape in weights}
    assert copies(compiled(scanned(layer), *args), sizes) == 2
    assert copies(compiled(jaxext.slices_in_place()(scanned(layer)), *args), sizes) == 0


# What stands around a kernel


LAYOUTS = {
    "nchw": ((4, 64, 28, 28), (64, 64, 3, 3), ("NCHW", "OIHW", "NCHW")),
    "mixed": ((28, 4, 64, 28), (64, 3, 3, 64), ("HNCW", "OWHI", "CWNH")),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_arrays_of_a_kernel_are_dense_and_in_order(kernels, layout, compiled):
    """XLA may lay out an array as it likes, but what a kernel reads and writes."""
    x, w, numbers = LAYOUTS[layout]
    op = lambda x, w: jaxext.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)
    y = jax.eval_shape(op, struct(*x), struct(*w))
    text = compiled(lambda x, w, y: (op(x, w), *gradients(op)(x, w, y)), struct(*x), struct(*w), y)
    types = {name: kind for name, kind in re.findall(r"%([\w.-]+) = (\S+) ", text)}
    calls = [line for line in text.splitlines() if "custom-call(" in line and OURS.search(line)]
    assert len(calls) == 3
    for call in calls:
        names = re.findall(r"%([\w.-]+)", call.partition(", custom_call_target")[0])
        for kind in (types[name] for name in names):
            order = [int(axis) for axis in kind.partition("{")[2].rstrip("}").split(",")]
            assert order == sorted(order, reverse=True), kind


def test_data_parallel_training_sends_the_filters_gradient_alone(kernels, devices, compiled):
    mesh = Mesh(np.array(devices), "data")
    images = jax.ShapeDtypeStruct((8, 28, 28, 64), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec("data")))
    w = jax.ShapeDtypeStruct((3, 3, 64, 64), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec()))
    found = work(compiled(gradients(conv), images, w, images))
    assert found["kernel"] == 2
    assert sum(count for name, count in found.items() if name.startswith("all-reduce") and not name.endswith("-done")) == 1
    assert not [name for name in found if "gather" in name or "permute" in name or "all-to-all" in name]


def test_cuda_kernels_are_captured(compiled, tmp_path):
    """XLA puts the whole program into one CUDA graph."""

    def net(x, w):
        for _ in range(6):
            x = jnp.tanh(dot(x, w))
        return x

    with by("cuda"):
        compiled(net, struct(64, 64), struct(64, 64), xla_dump_to=str(tmp_path), xla_dump_hlo_as_text=True)
    (file,) = tmp_path.glob("*thunk_sequence_after_thunk_passes*")
    top = [line.split()[1] for line in file.read_text().splitlines() if re.match(r"\d+:", line)]
    assert top == ["kCommandBuffer"]
    assert len(re.findall(r": kCustomCall ", file.read_text())) == 6


# How often an operation goes over memory


def exactly(**counts):
    return lambda found: found == counts


def at_most(most, kernels, free=()):
    return lambda found: found["kernel"] == kernels and sum(count for name, count in found.items() if name not in free) <= most


def three_products(found):
    """Return whether the program has three kernels and no copies; the norm, and x times a number, are beside them."""
    return found["kernel"] == 3 and not found.keys() & {"copy", "transpose", "gemm"}


OHWI = ("NHWC", "OHWI", "NHWC")  # as the kernels take filters
linear = lambda x, w, b, r: jaxext.linear(x, w, b, activation="gelu", residual=r)
linear_of_jnp = lambda x, w, b, r: jax.nn.gelu(x @ w + jnp.broadcast_to(b, r.shape), approximate=False) + r
gated = functools.partial(jaxext.gated_linear_unit, activation="silu")
gated_of_jnp = lambda x, w: jax.nn.silu(x @ w[:, 0]) * (x @ w[:, 1])
conv_bias_act = lambda x, w, b, r: jaxext.conv_bias_act(x, w, (1, 1), "SAME", dimension_numbers=OHWI, bias=b, activation="relu", residual=r)
causal = functools.partial(jaxext.causal_conv1d, activation="silu")
with_state = lambda x, w, b, state: causal(x, w, b, initial_states=state)
packed = lambda x, w, b, sequences: causal(x, w, b, seq_idx=sequences)
quantized = lambda x, weight, scale: jaxext.quantized_matmul(x, jaxext.quantization.Quantized(weight, scale))
of_bytes = lambda x, packed, scale: quantized(x, jaxext.quantization.unpack_int4(packed), scale)
moe = lambda x, gate, up, down, weights, indices: jaxext.moe(x, indices, weights, gate, up, down)
ragged_scaled = lambda x, w, scale, sizes: jaxext.ragged_scaled_dot(x, w, sizes, rhs_scale=scale)
ragged_fp8 = lambda x, w, s, t, sizes: jaxext.ragged_scaled_dot(x, w, sizes, lhs_scale=s, rhs_scale=t, transpose_rhs=True)


def moe_int8(x, weights, indices, gate, up, down):
    """The matrices with scales of one for all, as constants; the third turned."""
    of = lambda w: jaxext.quantization.Quantized(w, jnp.ones((1, 1, 1), jnp.float32))
    return jaxext.moe(x, indices, weights, of(gate), of(up), of(down.reshape(64, 1024, 2048)))


step_of_newton_schulz = functools.partial(jaxext.newton_schulz, steps=1)


def halves(fun, *args):
    """Forward that saves, and backward, each with its arguments, as two programs: a network has other layers between them."""
    floats = [x for x in args if jnp.issubdtype(x.dtype, jnp.floating)]  # others come last

    def forward(*args):
        return jax.vjp(lambda *floats: fun(*floats, *args[len(floats) :]), *args[: len(floats)])

    y, pullback = jax.eval_shape(forward, *args)
    saved, tree = jax.tree.flatten(pullback)
    return (forward, *args), (lambda ct, *saved: jax.tree.unflatten(tree, saved)(ct), y, *saved)


IMAGE, W = struct(4, 28, 28, 64), struct(3, 3, 64, 64)
SEQUENCE = struct(8, 2048, 5376), struct(4, 5376), struct(5376)
LINEAR = struct(4096, 1024), struct(1024, 4096), struct(4096), struct(4096, 4096)
GATED = struct(4096, 1024), struct(1024, 2, 4096)
FILTERS = struct(8, 28, 28, 256), struct(256, 3, 3, 256), struct(256), struct(8, 28, 28, 256)
EXPERTS = struct(4096, 2048), struct(64, 2048, 1024), struct(64, dtype=jnp.int32)
MOE = struct(64, 2048), *[struct(64, 2048, 1024)] * 2, struct(64, 1024, 2048), struct(64, 4), struct(64, 4, dtype=jnp.int32)
INT8_EXPERTS, SCALES_OF_EXPERTS = struct(64, 2048, 1024, dtype=jnp.int8), struct(64, 1, 1024, dtype=jnp.float32)
E4M3 = jnp.float8_e4m3fn
FP8_EXPERTS = struct(4096, 2048, dtype=E4M3), struct(64, 1024, 2048, dtype=E4M3), struct(4096, 16, dtype=jnp.float32)
FP8_EXPERTS += struct(64, 8, 16, dtype=jnp.float32), EXPERTS[2]
MANY, FEW, SCALES = struct(512, 4096), struct(32, 4096), struct(32, 4096, dtype=jnp.float32)
INT8, INT4, BYTES = struct(4096, 4096, dtype=jnp.int8), struct(4096, 4096, dtype=jnp.int4), struct(4096, 2048, dtype=jnp.uint8)
BACK = at_most(4, 1)  # the partial sums of weight and bias are added by few small kernels
# The operation, its arguments, by which kernels, and what the programs of its value and of its gradients (if they matter) are made of.
OPERATIONS = {
    # channels last, a convolution is its kernel and the transposition of the filter, which is saved, or of its gradient; all phases at once
    "conv": (conv, (IMAGE, W), KERNELS, exactly(kernel=1, fusion=1), exactly(kernel=2, fusion=1)),
    "conv by 2": (functools.partial(conv, strides=(2, 2)), (IMAGE, W), KERNELS, exactly(kernel=1, fusion=1), exactly(kernel=2, fusion=1)),
    # no array of the size of x is made or copied besides
    "causal": (causal, SEQUENCE, KERNELS, exactly(kernel=1), BACK),
    "causal, state": (with_state, (*SEQUENCE, struct(8, 3, 5376)), KERNELS, exactly(kernel=1), BACK),
    "causal, packed": (packed, (*SEQUENCE, struct(8, 2048, dtype=jnp.int32)), KERNELS, exactly(kernel=1), BACK),
    # the ranges of rows, and where they are listed the visits, are made by small kernels, and no array of the factors' size besides
    "ragged": (jaxext.ragged_dot, EXPERTS, KERNELS, at_most(5, 1), at_most(7, 2)),
    # sorting the choices, the visits of the last product, gate times up, and the sum of what the experts give are the rest
    "moe": (moe, MOE, ["triton"], at_most(15, 3), at_most(20, 6)),
    # the ranges alone; of scaled rows of nobody the scale is masked
    "ragged, int8": (ragged_scaled, (EXPERTS[0], INT8_EXPERTS, SCALES_OF_EXPERTS, EXPERTS[2]), ["triton"], at_most(2, 1)),
    "ragged, fp8": (ragged_fp8, FP8_EXPERTS, ["triton"], at_most(4, 1)),
    "ragged, fp8, listed": (ragged_fp8, FP8_EXPERTS, ["cuda"], at_most(7, 1)),
    "moe, int8": (moe_int8, (*MOE[:1], *MOE[4:], *[INT8_EXPERTS] * 3), ["triton"], at_most(14, 3)),
    # two products, the slope times the cotangent, and the bias's gradient; a copy is that of an argument, which becomes a result as it is
    "linear": (linear, LINEAR, ["triton"], exactly(kernel=1), at_most(4, 2, free=["copy"])),
    "gated": (gated, GATED, ["triton"], exactly(kernel=1), at_most(4, 2, free=["copy"])),
    "conv_bias_act": (conv_bias_act, FILTERS, ["triton"], exactly(kernel=1), at_most(6, 2, free=["copy"])),
    # each takes its operand once
    **{name: (f, (struct(4096, 2048),), ["triton"], exactly(kernel=1)) for name, f in OF_ONE_MATRIX.items()},
    "Newton-Schulz": (step_of_newton_schulz, (struct(1024, 2048),), ["triton"], three_products),
    # int4 lie packed in memory: neither as such nor as bytes are they unpacked before the kernel
    "int8": (quantized, (MANY, INT8, SCALES), ["triton"], exactly(kernel=1)),
    "int4": (quantized, (MANY, INT4, SCALES), ["triton"], exactly(kernel=1)),
    "bytes": (of_bytes, (MANY, BYTES, SCALES), ["triton"], exactly(kernel=1)),
    # a fusion adds the parts of the sum
    "int8, few rows": (quantized, (FEW, INT8, SCALES), ["cuda"], exactly(kernel=1, fusion=1)),
    "int4, few rows": (quantized, (FEW, INT4, SCALES), ["cuda"], exactly(kernel=1, fusion=1)),
    "bytes, few rows": (of_bytes, (FEW, BYTES, SCALES), ["cuda"], exactly(kernel=1, fusion=1)),
}


@pytest.mark.parametrize(("name", "implementation"), [(name, kernels) for name, row in OPERATIONS.items() for kernels in row[2]])
def test_passes(name, implementation, compiled):
    """A forward pass has no more kernels if it saves what the backward pass needs."""
    fun, args, _, expected, *gradients = OPERATIONS[name]
    with by(implementation):
        value = work(compiled(fun, *args))
        assert expected(value), value
        for of_gradients in gradients:
            forward, backward = (work(compiled(*half)) for half in halves(fun, *args))
            assert forward["kernel"] == value["kernel"] and of_gradients(backward), (forward, backward)


@pytest.mark.parametrize(("name", "forward", "backward"), [("ragged", 2, 2), ("moe", 11, 11)])
def test_passes_if_visits_are_found(name, forward, backward, compiled, monkeypatch):
    """Programs of kernels that find their visits, as they are where every kind is verified: a kernel makes the ranges, and none lists."""
    monkeypatch.setattr(record, "unverified", lambda *_: None)
    fun, args, *_ = OPERATIONS[name]
    with by("triton"):
        value, (_, gradients) = work(compiled(fun, *args)), (work(compiled(*half)) for half in halves(fun, *args))
    assert value.total() == forward and gradients.total() <= backward, (value, gradients)


def test_passes_of_jnp(compiled):
    """XLA's own programs take two at least, and our compositions no more than those."""

    def passes(fun, *args):
        found = work(compiled(fun, *args))
        return found.total() - found["copy"]

    assert min(passes(linear_of_jnp, *LINEAR), passes(gated_of_jnp, *GATED)) >= 2
    with by("xla"):
        assert passes(linear, *LINEAR) == passes(linear_of_jnp, *LINEAR)
        for ours, theirs in zip(halves(linear, *LINEAR), halves(linear_of_jnp, *LINEAR), strict=True):
            assert passes(*ours) <= passes(*theirs)


def moved(text: str) -> int:
    """Bytes of the operands, each once, and of the results of what runs, for each turn of a loop."""
    shapes = {name: kind for name, kind in re.findall(r"%([\w.-]+) = (\(.*?\)|\S+) ", text)}

    def size(kind):
        arrays = re.findall(r"([a-z]+)(\d*)\[([\d,]*)\]", kind)
        return sum(int(bits or 8) // 8 * math.prod(map(int, filter(None, sizes.split(",")))) for _, bits, sizes in arrays)

    run = [(kind, rest) for kind, opcode, rest in instructions(text) if opcode not in (*FREE, "fusion-done", "while")]
    return sum(
        size(kind) + sum(size(shapes.get(name, "")) for name in {*re.findall(r"%([\w.-]+)", rest.partition(")")[0])}) for kind, rest in run
    )


def test_an_expert_layer_beside_the_usual_one(compiled):
    """The usual one, as MaxText has it: rows by expert, three ragged products, and the rows in their order again."""
    rows, k, experts = 4096, 4, 64

    def usual(x, gate, up, down, weights, indices):
        order = jnp.argsort(indices.ravel())
        by_expert, sizes = jnp.take(jnp.repeat(x, k, 0), order, 0), jnp.bincount(indices.ravel(), length=experts)
        hidden = jax.nn.silu(lax.ragged_dot(by_expert, gate, sizes)) * lax.ragged_dot(by_expert, up, sizes)
        y = jnp.take(lax.ragged_dot(hidden, down, sizes), jnp.argsort(order), 0).reshape(rows, k, -1)
        return jnp.einsum("tkd,tk->td", y, weights)

    args = (struct(rows, 2048), *MOE[1:4], struct(rows, k), struct(rows, k, dtype=jnp.int32))
    with by("triton"):
        ours, theirs = compiled(moe, *args), compiled(usual, *args)
    assert work(ours)["kernel"] == 3 and work(ours).total() <= 21
    weights = sum(math.prod(w.shape) for w in MOE[1:4]) * 2
    assert weights < moved(ours) < 2 * weights and moved(theirs) > 8 * moved(ours)


@pytest.mark.parametrize(("groups", "wide"), [(1, 0), (32, 1)], ids=["columns", "groups"])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_xla_writes_wide_weights_where_scales_change_along_the_sum(compiled, kind, groups, wide):
    """A kernel is preferred there for few rows, and XLA elsewhere."""
    args = struct(16, 4096), struct(4096, 2048, dtype=jnp.dtype(kind)), struct(groups, 2048, dtype=jnp.float32)
    with by("xla"):
        fusions = [kind for kind, opcode, _ in instructions(compiled(quantized, *args)) if opcode == "fusion"]
    sizes = [math.prod(map(int, re.findall(r"\d+", kind.partition("{")[0].partition("[")[2]))) for kind in fusions]
    assert sizes.count(4096 * 2048) == wide


STEPS = {  # of a decoding step: the state, the operand that says where in it, and what XLA makes of it
    "shifted": (struct(64, 3, 512), None, {"copy": 1, "fusion": 2}),
    "circular": (struct(64, 4, 512), "cache_seqlens", {"fusion": 2}),
    "of a pool": (struct(256, 3, 512), "conv_state_indices", {"fusion": 3}),
}


@pytest.mark.parametrize("kind", STEPS)
def test_a_decoding_step_updates_its_state_in_place(compiled, kind):
    """A donated state is the new one's buffer.  Only one that is shifted is copied, since every element moves."""
    state, where, want = STEPS[kind]

    def step(state, x, w, b, *places):
        return jaxext.causal_conv1d_update(x, state, w, b, activation="silu", **({where: places[0]} if where else {}))

    places = [struct(64, dtype=jnp.int32)] if where else []
    text = compiled(step, state, struct(64, 512), struct(4, 512), struct(512), *places, donate=0)
    assert "input_output_alias={ {1}: (0, {}, may-alias) }" in text
    assert work(text) == want


# The baseline


@pytest.mark.parametrize("stride", [1, 2])
def test_lax_is_lax(stride, compiled):
    """The algorithm `lax` becomes lax's calls of cuDNN.  A dgrad whose filter is transposed after it was reversed becomes a convolution, of
    an input full of zeros if it is strided."""
    padding = ((2 - stride, 1),) * 2
    window = Window(input=(28, 28), filter=(3, 3), stride=(stride,) * 2, padding=padding, input_dilation=(1, 1), filter_dilation=(1, 1))
    x, w = struct(4, 28, 28, 64), struct(3, 3, 64, 64)
    op = lambda x, w: lax.conv_general_dilated(x, w, window.stride, padding, dimension_numbers=NHWC)
    y = jax.eval_shape(op, x, w)

    def ours(x, w, y):
        slots = {"x": x[None, ..., None, :], "w": jnp.moveaxis(w, -1, 0)[None, None], "y": y[None, ..., None, :]}
        static = Static(ranks=(1,) * 5, dtypes=(x.dtype,), window=window)
        how: Any = dict(static=static, partitioner=Partitioner.NOBODY, platform="cuda", arch=90)
        given = {open: {slot: a for slot, a in slots.items() if slot != open} for open in "yxw"}
        calls = [conv_form(2).call(open, [*of.values()], **how) for open, of in given.items()]
        return [XlaConv().plan(call).run(Algorithm("lax"), given[call.open]) for call in calls]

    calls = lambda f: {name: count for name, count in work(compiled(f, x, w, y)).items() if name.startswith("__cudnn")}
    theirs = calls(lambda x, w, y: (op(x, w), *gradients(op)(x, w, y)))
    assert set(theirs) == {"__cudnn$convForward", "__cudnn$convBackwardInput", "__cudnn$convBackwardFilter"}
    assert calls(ours) == theirs


@pytest.fixture
def built_launcher(monkeypatch):
    """The launcher of this checkout, without which XLA compiles no program that calls it."""
    library = call_frame.library(call_frame.ROOT / "csrc/launcher/launcher.cc")
    monkeypatch.setattr(launcher, "find", lambda: pathlib.Path(library._name))
    launcher.missing.cache_clear()
    yield
    launcher.missing.cache_clear()


@pytest.mark.skipif(nvrtc.missing() is not None, reason="NVRTC is not there")
def test_kernels_as_text(compiled, devices, built_launcher):
    """A loop launches them in place; four GPUs launch an operation's on their parts, and exchange nothing."""
    source = """
    extern "C" __global__ void increase(float* x) { x[blockIdx.x * 64 + threadIdx.x] += 1; }
    extern "C" __global__ void square(const float* x, float* y) { y[blockIdx.x * 64 + threadIdx.x] = x[blockIdx.x * 64 + threadIdx.x]; }"""
    how: dict[str, Any] = dict(grid=lambda x: x.size // 64, block=64, out=lambda x: x)
    increase = extend.cuda_kernel(source, "increase", aliases={0: 0}, **how)
    program = compiled(lambda x: lax.fori_loop(0, 5, lambda _, x: increase(increase(x)), x), struct(64, 64, dtype=jnp.float32), donate=(0,))
    assert program.count('custom_call_target="jaxext_raw_v1"') == 2 and not re.search(r"f32\S* copy\(", program), program
    square = extend.cuda_kernel(source, "square", **how)
    op = extend.operation("text_square", jnp.square, operands=dict(x="N"), results=dict(y="N"), kernels={"cuda": square})
    mesh = Mesh(np.array(devices), ("i",))
    split = jax.ShapeDtypeStruct((4096,), "float32", sharding=NamedSharding(mesh, PartitionSpec("i")))
    program = compiled(op, split)
    assert "f32[1024]" in next(line for line in program.splitlines() if "jaxext_raw_v1" in line)
    assert not re.search(r"all-|collective|permute", program)
