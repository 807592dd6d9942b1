"""What XLA's GPU compiler makes of our programs, read without a GPU: it compiles for one that is only described.

Needs jax-cuda13-plugin and jax-cuda13-pjrt of jaxlib's version and a CUDA toolkit, but no driver: `make gpu-programs` runs it with them.
Elsewhere all is skipped but what lowered programs show.
"""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from lowered import NHWC, operations, struct

import jaxext
from jaxext.backends.cuda import cuda_binding
from jaxext.backends.xla import conv_algorithms
from jaxext.forms.call import Splitter
from jaxext.forms.window import Window

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


@pytest.fixture(params=["triton", "cuda"])
def kernels(request):
    """The name of an implementation made of kernels, which the operations take."""
    if request.param == "cuda" and (reason := cuda_binding.missing()):
        pytest.skip(f"no CUDA kernels: {reason}")
    with jaxext.use_implementation(request.param):
        yield request.param


@pytest.fixture
def compiled(devices):
    def compiled(fun, *args, **options) -> str:
        """The optimised program for the first of the GPUs, or for those of the arguments' shardings."""
        place = SingleDeviceSharding(devices[0])
        args = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or place) for x in args]
        with jaxext.use_target("sm_90a"):
            return str(jax.jit(fun).lower(*args).compile(compiler_options=options).as_text())

    return compiled


def instructions(text: str):
    """(opcode, type, what follows) of each instruction that runs by itself: those within fusions and reductions do not."""
    inner = set(re.findall(r"(?:calls|to_apply)=%([\w.-]+)", text))
    for computation in re.split(r"\n(?=%|ENTRY )", text):
        name = re.match(r"(?:ENTRY )?%([\w.-]+) \(", computation)
        if name and name[1] not in inner:
            yield from re.findall(r"\n  (?:ROOT )?%\S+ = (\(.*?\)|\S+) ([a-z][\w-]*)\((.*)", computation)


def work(text: str) -> collections.Counter:
    """What goes over data: custom calls by their targets, all else by its opcode."""
    found = collections.Counter()
    for _, opcode, rest in instructions(text):
        target = re.search(r'custom_call_target="([^"]+)"', rest)
        if opcode not in FREE:
            found["kernel" if target and OURS.search(target[1]) else target[1] if target else opcode] += 1
    assert found, "no instruction found: the pattern is out of date"
    return found


def is_kernel(op) -> bool:
    """Of an operation that is lowered."""
    return op.name == "stablehlo.custom_call" and bool(OURS.search(str(op.attributes["call_target_name"])))


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
    """In every version of XLA, seen or not; it looks through one of several arrays."""
    (call,) = (op for op in operations(jaxext.lower_for(flat, struct(64, 64), struct(5000), arch="sm_90a")) if is_kernel(op))
    (after,) = (use.owner for use in call.results[0].uses)
    barriers = [*(operand.owner for operand in call.operands), after]
    assert [(op.name, len(op.operands)) for op in barriers] == [("stablehlo.optimization_barrier", 1)] * 3


def test_an_operand_does_not_begin_within_an_array(kernels, compiled):
    """XLA's GPU compiler hands a typed foreign call a slice in place, at any element: TMA and Triton's vectors want 16 bytes."""
    assert work(compiled(flat, struct(64, 64), struct(5000))) == {"fusion": 1, "kernel": 1}


def test_a_result_is_not_written_within_an_array(kernels, compiled):
    assert work(compiled(written, struct(64, 64), struct(64, 64)))["kernel"] == 1


def test_a_depthwise_kernel_takes_a_slice_where_it_is(compiled):
    """It takes any address.  And it shows that the two tests above can fail."""
    if reason := cuda_binding.missing():
        pytest.skip(f"no CUDA kernels: {reason}")
    if jax.__version_info__ < (0, 11):
        pytest.skip("this XLA looks at where a slice begins")

    def causal(x, w):
        numbers = ("NHC", "HIO", "NHC")
        return jaxext.conv_general_dilated(
            x[:, 3:131], w, (1,), [(3, 0)], dimension_numbers=numbers, feature_group_count=3, implementation="cuda"
        )

    # the filter's transposition, and the kernel with its slice
    assert work(compiled(causal, struct(1, 200, 3), struct(4, 1, 3))) == {"fusion": 2}


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


@pytest.mark.parametrize("stride", [1, 2])
def test_nothing_else_goes_over_the_data(kernels, stride, compiled):
    """Channels last, a convolution is its kernel and the filter's transposition, and likewise its gradients, all phases at once."""
    op = functools.partial(conv, strides=(stride, stride))
    x, w, y = struct(4, 28, 28, 64), struct(3, 3, 64, 64), struct(4, 28 // stride, 28 // stride, 64)
    assert work(compiled(op, x, w)) == {"kernel": 1, "fusion": 1}
    assert work(compiled(gradients(op), x, w, y)) == {"kernel": 2, "fusion": 2}


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
    if reason := cuda_binding.missing():
        pytest.skip(f"no CUDA kernels: {reason}")

    def net(x, w):
        for _ in range(6):
            x = jnp.tanh(jaxext.dot_general(x, w, NT, implementation="cuda"))
        return x

    compiled(net, struct(64, 64), struct(64, 64), xla_dump_to=str(tmp_path), xla_dump_hlo_as_text=True)
    (file,) = tmp_path.glob("*thunk_sequence_after_thunk_passes*")
    top = [line.split()[1] for line in file.read_text().splitlines() if re.match(r"\d+:", line)]
    assert top == ["kCommandBuffer"]
    assert len(re.findall(r": kCustomCall ", file.read_text())) == 6


# The baseline


@pytest.mark.parametrize("stride", [1, 2])
def test_lax_is_lax(stride, compiled):
    """What is called `lax` becomes lax's calls of cuDNN: a dgrad whose filter is transposed after it was reversed becomes a convolution,
    of an input full of zeros if it is strided."""
    padding = ((1, 1), (1, 1)) if stride == 1 else ((0, 1), (0, 1))
    one = (1, 1)
    window = Window(input=(28, 28), filter=(3, 3), stride=(stride, stride), padding=padding, input_dilation=one, filter_dilation=one)
    x, w = struct(4, 28, 28, 64), struct(3, 3, 64, 64)
    op = lambda x, w: lax.conv_general_dilated(x, w, window.stride, padding, dimension_numbers=NHWC)
    y = jax.eval_shape(op, x, w)

    def ours(x, w, y):
        slots = {"x": x[None, ..., None, :], "w": jnp.moveaxis(w, -1, 0)[None, None], "y": y[None, ..., None, :]}
        run = lambda open: conv_algorithms.conv(
            open,
            {k: v for k, v in slots.items() if k != open},
            window,
            algorithm="lax",
            dtype=x.dtype,
            precision=None,
            splitter=Splitter.NOBODY,
            platform="cuda",
        )
        return run("y"), run("x"), run("w")

    calls = lambda f: {name: count for name, count in work(compiled(f, x, w, y)).items() if name.startswith("__cudnn")}
    theirs = calls(lambda x, w, y: (op(x, w), *gradients(op)(x, w, y)))
    assert set(theirs) == {"__cudnn$convForward", "__cudnn$convBackwardInput", "__cudnn$convBackwardFilter"}
    assert calls(ours) == theirs
