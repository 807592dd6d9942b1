"""The compiled program of a dense product goes over its data no more often than lax's: a statement about speed that needs no clock.

And the rewrites of slow convolutions hold little more than lax's does.
"""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxext
from jaxext.bench.problems import select
from jaxext.bench.targets import targets


def conv(x, w, *numbers):
    return "conv_general_dilated", x, w, dict(window_strides=(1,) * (len(x) - 2), padding="SAME", dimension_numbers=numbers)


def dot(x, w, contracting, batch=((), ())):
    return "dot_general", x, w, dict(dimension_numbers=(contracting, batch))


PRODUCTS = {
    "2d_nhwc_hwio": conv((2, 8, 8, 4), (3, 3, 4, 8), "NHWC", "HWIO", "NHWC"),
    "2d_nchw_oihw": conv((2, 4, 8, 8), (8, 4, 3, 3), "NCHW", "OIHW", "NCHW"),
    "1d": conv((2, 16, 4), (3, 4, 8), "NHC", "HIO", "NHC"),
    "3d": conv((2, 5, 6, 7, 4), (3, 3, 3, 4, 8), "NDHWC", "DHWIO", "NDHWC"),
    "pointwise": conv((2, 8, 8, 4), (1, 1, 4, 8), "NHWC", "HWIO", "NHWC"),
    "nn": dot((16, 8), (8, 32), ((1,), (0,))),
    "nt": dot((16, 8), (32, 8), ((1,), (1,))),
    "tn": dot((8, 16), (8, 32), ((0,), (0,))),
    "tt": dot((8, 16), (32, 8), ((0,), (1,))),
    "batched": dot((3, 16, 8), (3, 8, 32), ((2,), (1,)), ((0,), (0,))),
    "two_free_axes": dot((3, 16, 8), (8, 32), ((2,), (0,))),
}
FREE = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element"}


def roles(op, *operands):
    """The operation and its two pullbacks, each with its arguments."""
    y = jax.eval_shape(op, *operands)
    pullbacks = [(lambda a, b, y, i=i: jax.vjp(op, a, b)[1](y)[i], *operands, jnp.ones(y.shape, y.dtype)) for i in (0, 1)]
    return [(op, *operands), *pullbacks]


def passes(fun, *args) -> int:
    """Count the instructions of the optimised program that go over data; a fusion is one."""
    text = str(jax.jit(fun).lower(*args).compile().as_text())
    opcodes = re.findall(r"= \S+ ([a-z][\w-]*)\(", text[text.index("ENTRY") :])
    assert opcodes, "no instruction found: the pattern is out of date"
    return sum(opcode not in FREE for opcode in opcodes)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", PRODUCTS)
def test_dense_product(name):
    op, x, w, static = PRODUCTS[name]
    ours, theirs = (roles(functools.partial(getattr(library, op), **static), jnp.ones(x), jnp.ones(w)) for library in (jaxext, lax))
    for our_role, their_role in zip(ours, theirs, strict=True):
        assert passes(*our_role) <= passes(*their_role)


REWRITTEN = [
    case for problem in select(tags=["cpu"], names=["depthwise", "groups", "batched", "per-example", "4x4"]) for case in problem.cases()
    if targets(case, "cpu")
]  # fmt: skip


@pytest.mark.sampled(16)
@pytest.mark.parametrize("case", REWRITTEN, ids=lambda case: case.name)
def test_rewrites_cost_little_memory(case):
    """Arguments, result and temporaries together: lax's own temporaries are often none.

    What is many times as fast as lax's may take more: a convolution of few channels per group holds its input padded, and the filters'
    gradients of many images copy it for each tap.
    """
    padded = case.role != "wgrad" and ("depthwise" in case.tags or "grouped" in case.tags)
    limit = 3.0 if case.role == "wgrad" else 2.0 if padded else 1.5

    def peak(library):
        arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in case.shapes]
        memory = jax.jit(case.build(library)).lower(*arguments).compile().memory_analysis()
        assert memory is not None
        return memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes

    assert peak("jaxext") <= limit * peak("lax")


@pytest.mark.parametrize("columns", [4, 64])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_products_of_16_bits_have_the_smaller_operand_on_the_left(dtype, columns):
    """The contracted axes of the operands come first, as in the gradient of the right operand: the other order takes twice the time."""
    args = [jnp.ones(shape, dtype) for shape in ((32, 16), (16, columns), (32, columns))]
    text = jax.jit(lambda a, b, y: jax.vjp(jaxext.matmul, a, b)[1](y)[1]).lower(*args).as_text("hlo")
    (left,) = re.findall(r"dot\((\S+),", text)
    name = {line.split()[0]: line for line in text.splitlines() if " parameter(" in line}
    of_y = dtype == "bfloat16" and columns == 4
    assert (f"[32,{columns}]" in name[left]) == of_y


def test_a_loop_reads_filters_in_the_order_of_the_user():
    """A filter HWIO is already in the order of the loop's convolutions: nothing copies it."""
    x, w = jnp.ones((4, 14, 14, 128)), jnp.ones((3, 3, 64, 128))
    program = jax.jit(
        lambda x, w: jaxext.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=2)
    )
    text = str(program.lower(x, w).compile().as_text())
    entry = text[text.index("ENTRY") :]
    assert "while(" in entry
    assert not re.findall(r"= f\S+ (?:copy|transpose)\(|transpose_\S*fusion|copy_\S*fusion", entry)
