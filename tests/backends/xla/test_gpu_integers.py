"""Convolutions of integers on GPUs, most of which XLA refuses there: the form that the `xla` implementation gives them.

Its values are a CPU's, from the same operations; test_gpu_program_preferences.py compiles them for a GPU.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowered import conv, operations, struct
from test_conv_algorithms import conv as conv_of_slots
from test_conv_algorithms import definition, found, labels, shapes_of, window

import jaxext
from jaxext.core.call import Partitioner

DTYPES = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "bool")
SIZES = labels(B=2, G=2, C=3, K=2)
WINDOW = window((5, 4), (3, 2), stride=(2, 1), padding=((-1, 3), (2, 0)), input_dilation=(2, 1), filter_dilation=(1, 2))


VALUES = [(d, d) for d in ("int8", "int16", "uint32", "int64", "bool")] + [("int8", "int32"), ("uint8", "int32")]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype, result", VALUES)
def test_values_in_every_role(dtype, result):
    """Sums exceed 8 bits and wrap; truth is exact in float64."""
    rng = np.random.default_rng(0)
    low, high = (0, 2) if dtype == "bool" else (0, 256) if dtype.startswith("u") else (-128, 128)
    arrays = {slot: rng.integers(low, high, shape).astype(dtype) for slot, shape in shapes_of(SIZES, WINDOW).items()}
    for slot in arrays:
        operands = {s: a for s, a in arrays.items() if s != slot}
        got = jax.jit(functools.partial(conv_of_slots, slot, window=WINDOW, dtype=result, platform="cuda"))(operands)
        want = definition(slot, operands, SIZES, WINDOW)
        assert dtype == "bool" or np.abs(want).max() > 255
        np.testing.assert_array_equal(got, want.astype(bool) if dtype == "bool" else want.astype(np.int64).astype(result))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [labels(C=8, K=8), labels(G=4, C=8, K=8), labels(G=4), labels(B=3)], ids=str)
def test_the_plan(sizes, dtype):
    """GPUs take dots with every partitioner; CPUs take lax's own, which is right there."""
    for open in "yxw":
        plans = functools.partial(found, open, sizes, WINDOW, dtype)
        assert {*itertools.chain(*(plans(s, p) for s in Partitioner for p in ("cuda", "rocm")))} == {"dots"}
        assert [*plans()] == ["lax"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("groups", [1, 8])
def test_programs_for_gpus_hold_no_convolution(dtype, groups):
    """lax's compile for a GPU only of int8 into int8, which cuDNN saturates, and of booleans."""
    args = struct(2, 8, 8, 8, dtype=dtype), struct(3, 3, 8 // groups, 8, dtype=dtype)
    lowered = jaxext.export.lower_for(functools.partial(conv, feature_group_count=groups, implementation="xla"), arch="sm_90a")(*args)
    assert not any(op.name == "stablehlo.convolution" for op in operations(lowered))
    (row,) = jaxext.explain(functools.partial(conv, feature_group_count=groups), platform="cuda")(*args).rows
    assert (row.chosen, row.how) == ("xla", "dots")  # no GPU is named: it is not known which Triton would compile for


def test_int8_takes_the_kernel():
    pytest.importorskip("triton")
    pytest.importorskip("jax_triton", exc_type=ImportError)
    args = struct(2, 8, 8, 8, dtype=jnp.int8), struct(3, 3, 8, 8, dtype=jnp.int8)
    for result, chosen in ("int8", ("triton", "conv")), ("int32", ("triton", "conv")), ("int16", ("xla", "dots")):
        with jaxext.use_target("sm_90a"):
            (row,) = jaxext.explain(functools.partial(conv, preferred_element_type=result), platform="cuda")(*args).rows
        assert (row.chosen, row.how) == chosen and (chosen[0] == "triton" or "int16" in row.refused["triton"])
