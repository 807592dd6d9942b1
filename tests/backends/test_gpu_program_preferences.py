"""What XLA's GPU compiler makes of convolutions, read without a GPU: why a kernel is preferred, or is not, and that integers compile.

As test_gpu_program.py, `make gpu-programs` runs it.
"""

# ruff: noqa: F401, F811 - two fixtures are imported
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import export, lax
from lowered import struct
from test_gpu_program import compiled, devices, gradients, work

import jaxext

FORWARD, INPUT, FILTER = "__cudnn$convForward", "__cudnn$convBackwardInput", "__cudnn$convBackwardFilter"
LINE, IMAGE, VIDEO = struct(4, 256, 64), struct(4, 28, 28, 64), struct(2, 8, 16, 16, 64)
W1, W2, W3, W4 = struct(3, 64, 64), struct(3, 3, 64, 64), struct(3, 3, 3, 64, 64), struct(4, 4, 64, 64)
SMALL = struct(3, 3, 4, 64)


def conv(x, w, *, of=lax, stride=1, padding: Any = "SAME", lhs=1, rhs=1, groups=1, **kwargs):
    rank = x.ndim - 2
    dims = ("N" + "DHW"[3 - rank :] + "C", "DHW"[3 - rank :] + "IO", "N" + "DHW"[3 - rank :] + "C")
    return of.conv_general_dilated(
        x, w, (stride,) * rank, padding, (lhs,) * rank, (rhs,) * rank, dims, feature_group_count=groups, **kwargs
    )


def role(name, x, w, vmapped=None, **kwargs):
    """The function of that role, and its arguments."""
    op = functools.partial(conv, **kwargs)
    y = jax.eval_shape(op, x, w)
    fun, args = {
        "fprop": (op, (x, w)),
        "dgrad": (lambda x, w, y: gradients(op)(x, w, y)[0], (x, w, y)),
        "wgrad": (lambda x, w, y: gradients(op)(x, w, y)[1], (x, w, y)),
    }[name]
    if vmapped is not None:
        fun = jax.vmap(fun, vmapped)
        args = [a if axis is None else struct(8, *a.shape, dtype=a.dtype) for a, axis in zip(args, vmapped, strict=True)]
    return fun, args


TRANSPOSED = dict(padding=[(2, 2), (2, 2)], lhs=2)
# lax's call, the cuDNN call that it becomes, and the passes beside it: the filter's transposition is one.  Then what shows in the call:
# an input that was padded (with zeros in between), a filter's size, channels first.
PROGRAMS = {
    "3x3": (role("fprop", IMAGE, W2), FORWARD, 1, ""),
    "3x3 dgrad": (role("dgrad", IMAGE, W2), INPUT, 1, ""),
    "3x3 wgrad": (role("wgrad", IMAGE, W2), FILTER, 1, ""),
    "strided dgrad is cuDNN's own": (role("dgrad", IMAGE, W2, stride=2), INPUT, 2, ""),
    "strided dgrad of groups: zeros": (role("dgrad", IMAGE, SMALL, stride=2, groups=16), FORWARD, 2, "pad_fusion"),
    "strided and dilated dgrad: zeros": (role("dgrad", IMAGE, W2, stride=2, rhs=2), FORWARD, 2, "pad_fusion"),
    "transposed: zeros": (role("fprop", IMAGE, W4, **TRANSPOSED), FORWARD, 2, "pad_fusion"),
    "transposed dgrad is a strided convolution": (role("dgrad", IMAGE, W4, **TRANSPOSED), FORWARD, 1, "stride=2x2"),
    "transposed wgrad: images as filters": (role("wgrad", IMAGE, W4, **TRANSPOSED), FORWARD, 3, "size=28x28"),
    "dilated wgrad: images as filters": (role("wgrad", IMAGE, W2, rhs=2), FORWARD, 3, "size=28x28"),
    "per-example: images as filters": (role("wgrad", IMAGE, W2, (0, None, 0)), FORWARD, 3, "size=28x28"),
    "batched filters: images moved": (role("fprop", IMAGE, W2, (0, 0)), FORWARD, 3, "feature_group_count=8"),
    "groups": (role("fprop", IMAGE, SMALL, groups=16), FORWARD, 1, "feature_group_count=16"),
    "groups, dgrad": (role("dgrad", IMAGE, SMALL, groups=16), FORWARD, 1, "feature_group_count=16"),
    "groups, wgrad": (role("wgrad", IMAGE, SMALL, groups=16), FILTER, 1, "feature_group_count=16"),
    "1-D": (role("fprop", LINE, W1), FORWARD, 1, ""),
    "1-D wgrad": (role("wgrad", LINE, W1), FILTER, 1, ""),
    "3-D: transposed before and after": (role("fprop", VIDEO, W3), FORWARD, 3, "bf012"),
    "3-D dgrad": (role("dgrad", VIDEO, W3), INPUT, 3, "bf012"),
    "3-D wgrad": (role("wgrad", VIDEO, W3), FILTER, 3, ""),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_laxs_convolution_becomes(name, compiled):
    (fun, args), call, passes, shows = PROGRAMS[name]
    text = compiled(fun, *args)
    assert work(text) == {call: 1, "fusion": passes}
    (line,) = (line for line in text.splitlines() if f'custom_call_target="{call}"' in line)
    assert shows in line


@pytest.mark.parametrize("dtype, stride", [("bfloat16", 1), ("bfloat16", 2), ("float32", 1)])
@pytest.mark.parametrize("x, w", [((4, 256, 64), (4, 1, 64)), ((4, 28, 28, 64), (3, 3, 1, 64))], ids=["causal", "3x3"])
def test_few_taps_are_one_pass_with_bias_and_activation(x, w, dtype, stride, compiled):
    """Except for square ones that cuDNN has a kernel for: that call, a pass over its filter, and one that adds the bias."""
    padding = [(3, 0)] if len(x) == 3 else "SAME"
    op = functools.partial(conv, of=jaxext, stride=stride, padding=padding, groups=64, implementation="xla")
    args = (struct(*shape, dtype=dtype) for shape in (x, w, (*(1,) * (len(x) - 1), 64)))
    cudnn = len(x) == 4 and (dtype, stride) == ("bfloat16", 1)
    expected = {FORWARD: 1, "fusion": 2} if cudnn else {"fusion": 1}
    assert work(compiled(lambda x, w, b: jax.nn.silu(op(x, w) + b), *args)) == expected


def test_an_exported_convolution_and_its_gradients_are_cudnns(compiled):
    """Since its window is kept whole, XLA's partitioner splits it rightly if it is called in a program of several devices."""
    op = functools.partial(conv, of=jaxext, implementation="xla")
    exported = export.export(jax.jit(lambda x, w, y: (op(x, w), *gradients(op)(x, w, y))), platforms=["cuda"])(IMAGE, W2, IMAGE)
    assert work(compiled(exported.call, IMAGE, W2, IMAGE)) == {FORWARD: 1, INPUT: 1, FILTER: 1, "fusion": 2}


# Integers

WIDE = (*((d, d) for d in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "bool")), ("int8", "int32"))


@pytest.mark.parametrize("dtype, result", WIDE)
@pytest.mark.parametrize("groups", [1, 4, 64])
def test_integers_compile(dtype, result, groups, compiled):
    """As dots, which become loops or Triton's products, and never cuDNN's convolution."""
    x, w = struct(2, 9, 8, 64, dtype=dtype), struct(3, 3, 64 // groups, 64, dtype=dtype)
    op = functools.partial(conv, of=jaxext, stride=2, groups=groups, preferred_element_type=result, implementation="xla")
    assert set(work(compiled(op, x, w))) <= {"fusion", "copy"}


@pytest.mark.parametrize("groups", [1, 64])
def test_laxs_convolutions_of_integers(groups, compiled):
    """Why kernels and dots are taken: XLA knows none but int8 into int8, and gives that to cuDNN, which saturates where XLA's CPUs wrap."""
    op = functools.partial(conv, groups=groups)
    shapes = (2, 8, 8, 64), (3, 3, 64 // groups, 64)
    for dtype, result in (("int16", "int16"), ("int8", "int32")):
        with pytest.raises(jax.errors.JaxRuntimeError, match="integer convolutions"):
            compiled(functools.partial(op, preferred_element_type=result), *(struct(*shape, dtype=dtype) for shape in shapes))
    assert work(compiled(op, *(struct(*shape, dtype=jnp.int8) for shape in shapes)))[FORWARD] == 1
