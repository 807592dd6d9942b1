"""The implementation that a GPU takes for a call without a name and without measurements, and the reason: a claim for each row.

Without a GPU these are claims about the structure of XLA's program, the same for every jaxlib: test_gpu_program_preferences.py reads them
in what XLA's GPU compiler makes.  Here every GPU counts as one that the kernels are compiled for.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from lowered import custom_calls, struct
from public_operations import OF_ONE_MATRIX

import jaxext
from jaxext.backends.cuda import cuda_binding
from jaxext.ops.conv import cuda as cuda_convolutions
from jaxext.ops.conv import preference
from jaxext.ops.conv import triton as triton_conv

pytest.importorskip("triton")

BF16, F16, F32, I8 = jnp.bfloat16, jnp.float16, jnp.float32, jnp.int8
FUSED = "XLA fuses a depthwise convolution of at most 9 taps with the bias and the activation around it"
OF_CUDNN = "cuDNN's kernel for gradients of square depthwise filters in 16 bits without strides was faster on an H100"
DEPTHWISE = "cuDNN's tiles have one channel of a group to fill"
ZEROS = "XLA multiplies the zeros of a dilated input, or interleaves what it computes for each phase"
IMAGES = "a convolution whose filters are as large as the image"
BATCHED = "XLA moves the images beside the channels, and makes groups of them"
SMALL = "groups of at most 32 channels leave most of cuDNN's tiles empty"
GROUPS = "cuDNN computes groups without a copy, and is expected to be as fast"
DENSE = "XLA's dense convolutions (cuDNN) are expected to be as fast"
THREE = "XLA puts channels first for cuDNN, and so transposes all operands and the result"
ONE_TAP = "with a filter of one tap, a matrix product, cuDNN is expected to be as fast"
BITS = "products of operands that are not of 16 bits (TF32, or one by one) are expected to be slower than cuDNN's"
CHANNELS = "channels that are no multiple of 64 leave tiles partly empty"
ANOTHER = "without the tensor core instructions of 9.0 cuDNN is expected to be as fast"
INTEGERS = "XLA refuses convolutions of integers on GPUs, saturates them, or multiplies them without tensor cores"


def layer(conv, rank, *, stride=1, groups=1, **given):
    """A convolution of one size for all axes, channels last."""
    space = "DHW"[3 - rank :]
    given = dict(padding="SAME" if "lhs_dilation" not in given else [(2, 2)] * rank) | given
    given |= {side: (given[side],) * rank for side in ("lhs_dilation", "rhs_dilation") if side in given}
    numbers = (f"N{space}C", f"{space}IO", f"N{space}C")
    return functools.partial(conv, window_strides=(stride,) * rank, dimension_numbers=numbers, feature_group_count=groups, **given)


def case(x, w, role="fprop", *, dtype=BF16, arch="sm_90a", vmapped=None, **given):
    """The function of a role that a convolution becomes, its arguments, the role and the GPU."""
    x, w = struct(*x, dtype=dtype), struct(*w, dtype=dtype)
    args = (x, w) if role == "fprop" else (x, w, jax.eval_shape(layer(lax.conv_general_dilated, x.ndim - 2, **given), x, w))
    axes = None if vmapped is None else (*vmapped, 0)[: len(args)]

    def function(conv):
        op = layer(conv, x.ndim - 2, **given)
        fun = op if role == "fprop" else lambda x, w, y: jax.vjp(op, x, w)[1](y)[("dgrad", "wgrad").index(role)]
        return fun if axes is None else jax.vmap(fun, axes)

    if axes is not None:
        args = tuple(a if axis is None else struct(8, *a.shape, dtype=dtype) for a, axis in zip(args, axes, strict=True))
    return function, args, role, arch


LINE, IMAGE, VIDEO = (4, 256, 64), (4, 28, 28, 64), (2, 8, 16, 16, 64)
W1, W2, W3 = (3, 64, 64), (3, 3, 64, 64), (3, 3, 3, 64, 64)

# the call, what computes it, why
CASES = {
    # depthwise
    "causal, 4 taps": (case(LINE, (4, 1, 64), groups=64), "xla", FUSED),
    "causal, 4 taps, A100": (case(LINE, (4, 1, 64), groups=64, arch="sm_80"), "xla", FUSED),
    "causal, 16 taps": (case(LINE, (16, 1, 64), groups=64), "cuda", DEPTHWISE),
    "causal dgrad": (case(LINE, (4, 1, 64), "dgrad", groups=64), "triton", DEPTHWISE),
    "causal dgrad, 16 taps": (case(LINE, (16, 1, 64), "dgrad", groups=64), "cuda", DEPTHWISE),
    "causal wgrad": (case(LINE, (4, 1, 64), "wgrad", groups=64), "cuda", DEPTHWISE),
    "causal wgrad, A100": (case(LINE, (4, 1, 64), "wgrad", groups=64, arch="sm_80"), "cuda", DEPTHWISE),
    "depthwise 3x3": (case(IMAGE, (3, 3, 1, 64), groups=64), "triton", DEPTHWISE),
    "depthwise 3x3 by 2": (case(IMAGE, (3, 3, 1, 64), stride=2, groups=64), "xla", FUSED),
    "depthwise 3x3, float32": (case(IMAGE, (3, 3, 1, 64), groups=64, dtype=F32), "xla", FUSED),
    "depthwise 3x3, dilated": (case(IMAGE, (3, 3, 1, 64), rhs_dilation=2, groups=64), "xla", FUSED),
    "depthwise 7x7": (case(IMAGE, (7, 7, 1, 64), groups=64), "cuda", DEPTHWISE),
    "depthwise 7x7, float32": (case(IMAGE, (7, 7, 1, 64), groups=64, dtype=F32, precision="highest"), "cuda", DEPTHWISE),
    "depthwise dgrad by 2": (case(IMAGE, (3, 3, 1, 64), "dgrad", stride=2, groups=64), "triton", DEPTHWISE),
    "depthwise wgrad": (case(IMAGE, (3, 3, 1, 64), "wgrad", groups=64), "xla", OF_CUDNN),
    "depthwise wgrad by 2": (case(IMAGE, (3, 3, 1, 64), "wgrad", stride=2, groups=64), "cuda", DEPTHWISE),
    "depthwise wgrad, dilated": (case(IMAGE, (3, 3, 1, 64), "wgrad", rhs_dilation=2, groups=64), "cuda", DEPTHWISE),
    "depthwise wgrad, dilated 7x7": (case(IMAGE, (7, 7, 1, 64), "wgrad", rhs_dilation=2, groups=64), "triton", DEPTHWISE),
    "depthwise wgrad, one axis in two": (case(IMAGE, (4, 1, 1, 64), "wgrad", groups=64), "cuda", DEPTHWISE),
    "depthwise wgrad, float32": (case(IMAGE, (3, 3, 1, 64), "wgrad", dtype=F32, groups=64), "cuda", DEPTHWISE),
    "multiplier 2, wgrad": (case(IMAGE, (3, 3, 1, 128), "wgrad", groups=64), "triton", DEPTHWISE),
    "depthwise wgrad of examples": (case(IMAGE, (3, 3, 1, 64), "wgrad", vmapped=(0, None), groups=64), "cuda", DEPTHWISE),
    "depthwise dgrad, RTX 50": (case(IMAGE, (3, 3, 1, 64), "dgrad", groups=64, arch="sm_120"), "triton", DEPTHWISE),
    "depthwise transposed": (case(IMAGE, (3, 3, 1, 64), lhs_dilation=2, groups=64), "triton", DEPTHWISE),
    "depthwise 3x3x3": (case(VIDEO, (3, 3, 3, 1, 64), "wgrad", groups=64), "triton", DEPTHWISE),
    "multiplier 2, dgrad": (case(IMAGE, (3, 3, 1, 128), "dgrad", groups=64), "triton", DEPTHWISE),
    # transposed and strided
    "transposed": (case(IMAGE, (4, 4, 64, 64), lhs_dilation=2), "triton", ZEROS),
    "transposed, float32, A100": (case(IMAGE, (4, 4, 64, 64), lhs_dilation=2, dtype=F32, arch="sm_80"), "triton", ZEROS),
    "transposed dgrad, a plain strided convolution": (case(IMAGE, (4, 4, 64, 64), "dgrad", lhs_dilation=2), "xla", DENSE),
    "transposed dgrad, 1-D": (case(LINE, (4, 64, 64), "dgrad", lhs_dilation=2), "xla", DENSE),
    "transposed wgrad": (case(IMAGE, (4, 4, 64, 64), "wgrad", lhs_dilation=2), "triton", IMAGES),
    "strided": (case(IMAGE, W2, stride=2), "xla", DENSE),
    "strided dgrad, cuDNN's own": (case(IMAGE, W2, "dgrad", stride=2), "xla", DENSE),
    "strided wgrad": (case(IMAGE, W2, "wgrad", stride=2), "xla", DENSE),
    "strided and dilated dgrad": (case(IMAGE, W2, "dgrad", stride=2, rhs_dilation=2), "triton", ZEROS),
    "dilated": (case(IMAGE, W2, rhs_dilation=2), "xla", DENSE),
    "dilated dgrad": (case(IMAGE, W2, "dgrad", rhs_dilation=2), "xla", DENSE),
    "dilated wgrad": (case(IMAGE, W2, "wgrad", rhs_dilation=2), "triton", IMAGES),
    "filter of one tap, dilated in name": (case(IMAGE, (1, 1, 64, 64), "wgrad", rhs_dilation=2), "xla", DENSE),
    # a filter for each example, or a gradient
    "batched filters": (case(IMAGE, W2, vmapped=(0, 0)), "triton", BATCHED),
    "batched filters, 128 channels": (case((4, 28, 28, 128), (3, 3, 128, 128), vmapped=(0, 0)), "cuda", BATCHED),
    "batched filters, 128 channels, wgrad": (case((4, 28, 28, 128), (3, 3, 128, 128), "wgrad", vmapped=(0, 0)), "cuda", IMAGES),
    "batched filters, dgrad": (case(IMAGE, W2, "dgrad", vmapped=(0, 0)), "triton", BATCHED),
    "batched filters, float32, A100": (case(IMAGE, W2, vmapped=(0, 0), dtype=F32, arch="sm_80"), "triton", BATCHED),
    "per-example gradients": (case(IMAGE, W2, "wgrad", vmapped=(0, None)), "triton", IMAGES),
    "per-example gradients, 1-D": (case(LINE, W1, "wgrad", vmapped=(0, None), dtype=F32), "triton", IMAGES),
    # groups
    "small groups": (case(IMAGE, (3, 3, 4, 64), groups=16), "xla", GROUPS),
    "small groups, dgrad": (case(IMAGE, (3, 3, 4, 64), "dgrad", groups=16), "triton", SMALL),
    "small groups, wgrad": (case(IMAGE, (3, 3, 32, 64), "wgrad", groups=2), "triton", SMALL),
    "groups of 4, wgrad": (case(IMAGE, (3, 3, 4, 64), "wgrad", groups=16), "triton", SMALL),
    "groups of 4, dgrad by 2": (case(IMAGE, (3, 3, 4, 64), "dgrad", stride=2, groups=16), "triton", ZEROS),
    "large groups": (case((4, 28, 28, 128), (3, 3, 64, 128), groups=2), "xla", GROUPS),
    "large groups, dgrad": (case((4, 28, 28, 128), (3, 3, 64, 128), "dgrad", groups=2), "xla", GROUPS),
    "large groups, dgrad by 2": (case((4, 28, 28, 128), (3, 3, 64, 128), "dgrad", stride=2, groups=2), "triton", ZEROS),
    "large groups, wgrad": (case((4, 28, 28, 128), (3, 3, 64, 128), "wgrad", groups=2), "xla", GROUPS),
    # dense, one or two axes
    "3x3": (case(IMAGE, W2), "xla", DENSE),
    "3x3 dgrad": (case(IMAGE, W2, "dgrad"), "xla", DENSE),
    "3x3 wgrad": (case(IMAGE, W2, "wgrad"), "xla", DENSE),
    "stem": (case((4, 224, 224, 3), (7, 7, 3, 64), stride=2), "xla", DENSE),
    "stem, wgrad": (case((4, 224, 224, 3), (7, 7, 3, 64), "wgrad", stride=2), "xla", DENSE),
    "1-D": (case(LINE, W1), "xla", DENSE),
    "1-D wgrad": (case(LINE, W1, "wgrad"), "xla", DENSE),
    "1-D wgrad, float32 exactly": (case(LINE, W1, "wgrad", dtype=F32, precision="highest"), "xla", DENSE),
    "1-D, 1x1": (case(LINE, (1, 64, 64)), "xla", DENSE),
    # dense, three axes
    "3-D": (case(VIDEO, W3), "cuda", THREE),
    "3-D, float16": (case(VIDEO, W3, dtype=F16), "cuda", THREE),
    "3-D dgrad": (case(VIDEO, W3, "dgrad"), "cuda", THREE),
    "3-D wgrad": (case(VIDEO, W3, "wgrad"), "cuda", THREE),
    "3-D dgrad by 2": (case(VIDEO, W3, "dgrad", stride=2), "cuda", THREE),
    "3-D dgrad by 9, no CUDA kernel": (case(VIDEO, W3, "dgrad", stride=9), "triton", THREE),
    "3-D transposed, RTX 40": (case(VIDEO, W3, lhs_dilation=2, arch="sm_89"), "triton", ZEROS),
    "3-D, 1x1x1": (case(VIDEO, (1, 1, 1, 64, 64)), "xla", ONE_TAP),
    "3-D, TF32": (case(VIDEO, W3, dtype=F32), "xla", BITS),
    "3-D, float32 exactly": (case(VIDEO, W3, dtype=F32, precision="highest"), "xla", BITS),
    "3-D, 48 inputs": (case((2, 8, 16, 16, 48), (3, 3, 3, 48, 64)), "xla", CHANNELS),
    "3-D, 32 outputs": (case(VIDEO, (3, 3, 3, 64, 32)), "xla", CHANNELS),
    "3-D, 96 outputs": (case(VIDEO, (3, 3, 3, 64, 96)), "xla", CHANNELS),
    **{
        f"3-D, {arch}": (case(VIDEO, W3, arch=arch), "xla", ANOTHER) for arch in ("sm_80", "sm_86", "sm_89", "sm_100a", "sm_103a", "sm_120")
    },
    # integers
    "int8 into int8": (case(IMAGE, W2, dtype=I8), "triton", INTEGERS),
    "int8 into int32, A100": (case(IMAGE, W2, dtype=I8, preferred_element_type=jnp.int32, arch="sm_80"), "triton", INTEGERS),
    "int8, depthwise": (case(IMAGE, (3, 3, 1, 64), dtype=I8, groups=64), "triton", INTEGERS),
    "int8, 1-D, 1x1": (case(LINE, (1, 64, 64), dtype=I8), "triton", INTEGERS),
}


NO_KERNELS = f"no CUDA kernels, which say what they refuse: {cuda_binding.missing()}"
compiled = pytest.mark.skipif(cuda_binding.missing() is not None, reason=NO_KERNELS)


@pytest.fixture
def rows(monkeypatch):
    """The row of the table that each implementation was told, by the operation."""
    told, row_of = {}, preference.convolution

    def watched(call):
        told[call.op] = row_of(call)
        return told[call.op]

    monkeypatch.setattr(preference, "convolution", watched)
    for kind in (cuda_convolutions.CudaConv, triton_conv.TritonConv):
        monkeypatch.setattr(kind, "lacks", lambda self, call: None)
    monkeypatch.setattr(cuda_convolutions, "not_compiled_for", lambda arch: None)
    return told


def explained(function, args, role):
    (row,) = (row for row in jaxext.explain(function(jaxext.conv_general_dilated), platform="cuda")(*args).rows if row.op.endswith(role))
    return row


@compiled
@pytest.mark.parametrize("name", CASES)
def test_preferred(name, rows):
    (function, args, role, arch), chosen, reason = CASES[name]
    with jaxext.use_target(arch):
        row = explained(function, args, role)
    assert row.chosen == chosen
    assert reason in rows[row.op].reason
    if chosen == "xla":
        assert reason in row.refused["triton"]  # which users read
    assert rows[row.op].kernel == (chosen != "xla")


@compiled
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_the_dtype_of_a_bias_changes_no_row(dtype, rows):
    """cuDNN's kernels of depthwise filters ask for factors of 16 bits."""
    numbers: Any = dict(window_strides=(1, 1), padding="SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=64)
    args = struct(*IMAGE, dtype=BF16), struct(3, 3, 1, 64, dtype=BF16), struct(64, dtype=dtype)
    with jaxext.use_target("sm_90a"):
        (row,) = jaxext.explain(lambda x, w, bias: jaxext.conv_bias_act(x, w, **numbers, bias=bias), platform="cuda")(*args).rows
    assert row.chosen == "triton" and rows[row.op].reason == DEPTHWISE


def test_every_row_of_the_table_is_claimed(rows):
    """Each row has a reason of its own."""
    claimed = {reason for _, _, reason in CASES.values()}
    told = [row.reason for row in preference.CONVOLUTIONS]
    assert len(set(told)) == len(told) == len(claimed)
    assert all(sum(reason in words for words in told) == 1 for reason in claimed)


# The algorithms of `xla` on a GPU.
PLANS = {
    "lax": (
        *("3x3", "strided dgrad, cuDNN's own", "transposed dgrad, a plain strided convolution", "small groups", "groups of 4, wgrad"),
        *("depthwise 3x3", "depthwise 7x7", "causal wgrad", "batched filters", "per-example gradients"),
    ),
    "phases": ("strided and dilated dgrad", "transposed", "transposed wgrad", "groups of 4, dgrad by 2"),
    "shifts": ("depthwise 3x3, float32", "depthwise 3x3 by 2", "depthwise 3x3, dilated"),
}


@pytest.mark.parametrize(("how", "name"), [(how, name) for how, names in PLANS.items() for name in names])
def test_the_plan_of_xla_holds_no_loop(how, name):
    """The plan has no convolution for each block of groups either: that suits a CPU's caches and leaves a GPU idle."""
    (function, args, role, _), *_ = CASES[name]
    with jaxext.use_implementation("xla"):
        assert explained(function, args, role).how.partition(" ")[0] == how


def gradient_of_weights(w, x, sizes):
    return jax.grad(lambda w: jnp.sum(jaxext.ragged_dot(x, w, sizes).astype(F32)))(w)


def quantized(x, weight, scale):
    return jaxext.quantized_matmul(x, jaxext.quantization.Quantized(weight, scale))


def weights(rows, groups):
    return struct(rows, 4096), struct(4096, 2048, dtype=I8), struct(groups, 2048, dtype=F32)


def by_cuda(name):
    """The call of a CUDA kernel, or of Triton's where none is compiled."""
    return "triton_kernel_call" if cuda_binding.missing() else f"jaxext_{name}_v1"


ONE, TWO = struct(1, dtype=jnp.int32), struct(2, dtype=jnp.int32)
DENSE_OF_ONE, OF_ONE_STEP = "one group makes a plain matrix product", "a sequence of one step is a few elementwise operations"
# Other operations: what is called, if it is not XLA, and why it is not a kernel.
OTHERS = {
    "one group": (jaxext.ragged_dot, (struct(256, 64), struct(1, 64, 64), ONE), None, DENSE_OF_ONE),
    "two groups": (jaxext.ragged_dot, (struct(256, 64), struct(2, 64, 64), TWO), "triton_kernel_call"),
    "two groups, wgrad": (gradient_of_weights, (struct(2, 64, 64), struct(256, 64), TWO), by_cuda("ragged_tn")),
    "one step": (jaxext.causal_conv1d, (struct(4, 1, 64), struct(4, 64), struct(64)), None, OF_ONE_STEP),
    "two steps": (jaxext.causal_conv1d, (struct(4, 2, 64), struct(4, 64), struct(64)), "triton_kernel_call"),
    **{
        f"{name} of {'x'.join(map(str, shape))}": (f, (struct(*shape),), by_cuda(name) if large else None)
        for name, f in OF_ONE_MATRIX.items()
        for shape, large in {(4096, 4096): 1, (4, 4096, 8192): 1, (16, 2048, 2048): 1, (2048, 2048): 0, (512, 8192): 0}.items()
    },
    "int8, 16 rows, scales of columns": (quantized, weights(16, 1), None),
    "int8, 32 rows": (quantized, weights(32, 32), by_cuda("weight_only")),
    "int8, 33 rows": (quantized, weights(33, 32), by_cuda("weight_only")),
    "int8, 128 rows": (quantized, weights(128, 64), by_cuda("weight_only")),
    "int8, 256 rows": (quantized, weights(256, 32), None if cuda_binding.missing() else by_cuda("weight_only")),
    "int8, 4096 rows": (quantized, weights(4096, 32), None),
}


@pytest.mark.sampled(8, "one step")
@pytest.mark.parametrize("name", OTHERS)
def test_other_products(name):
    fun, args, call, *reason = OTHERS[name]
    with jaxext.use_target("sm_90a"):
        *_, row = jaxext.explain(fun, platform="cuda")(*args).rows
        called = custom_calls(jax.jit(fun).trace(*args).lower(lowering_platforms=("cuda",)))
    assert [name.removesuffix("_ffi") for name in called] == ([call] if call else [])
    assert row.chosen == {None: "xla", "triton_kernel_call": "triton"}.get(call, "cuda")
    assert row.refused.get("triton", "").startswith("".join(reason))
