"""XLA's side of csrc/, compiled by a C++ compiler with invented targets and launchers: tests/csrc/invented_targets.cc.

Needs g++; no GPU and no CUDA.
"""

import ctypes
import functools
import itertools

import call_frame
import pytest
from call_frame import INTERNAL, INVALID, OK, ROOT, STAGES

pytestmark = pytest.mark.cuda  # of csrc/ alone

ATTRIBUTES = dict(B=2, M=3, input=(5, 7, 11), low=(-13, 17, -(2**62)), tile=19, splits=1, added=1, scale=2.5, shift=-0.25)
OPERANDS = [("bfloat16", (2, 3), 1 << 44), ("int32", (3,), 2 << 44), ("float32", (2,), 3 << 44)]
RESULTS = [("float32", (2, 3), 4 << 44), ("bfloat16", (2,), 5 << 44)]
NUMBERS = f"2 3 5 7 11 -13 17 {-(2**62)} 19"


@functools.cache
def library():
    units = [f"common/{name}" for name in ("ffi", "family", "epilogue", "product_arrays")]
    units += [f"{family}/{family}_target" for family in ("causal", "depthwise", "gram", "scaled")]
    library = call_frame.library(ROOT / "tests/csrc/invented_targets.cc", *(ROOT / f"csrc/{unit}.cc" for unit in units))
    library.HandlerOf.restype = ctypes.c_void_p
    return library


def staged(handler, stage, operands, results, attributes, target="invented"):
    """The answer of the handler of one stage in another, given by its number."""
    pointer = ctypes.c_void_p(library().HandlerOf(f"jaxext_{target}_v1".encode(), handler == "initialize"))
    assert pointer.value
    return call_frame.call(library(), pointer, stage, operands, results, attributes)


def answer(operands=OPERANDS, results=RESULTS, **attributes):
    """The answer of both stages, which differ in that only execute launches."""
    given = operands, results, {name: value for name, value in (ATTRIBUTES | attributes).items() if value is not None}
    (code, loads), (executed, launches) = (staged(stage, number, *given) for stage, number in STAGES.items())
    assert code == executed and loads == launches.replace("launch ", "load ", 1)
    return code, launches


def test_every_field_and_array_arrives():
    arrays = f"bfloat16 {1 << 44} int32 {2 << 44} float32 {3 << 44} float32 {4 << 44} bfloat16 {5 << 44}"
    assert answer() == (INTERNAL, f"launch {NUMBERS} 1 2.500000 -0.250000 {arrays}")
    parts = [("float32", (4, 2, 3), 4 << 44), RESULTS[1]]
    without = arrays.replace(f"float32 {3 << 44}", "bfloat16 0")
    assert answer(OPERANDS[:2], parts, splits=4, added=0) == (INTERNAL, f"launch {NUMBERS} 4 2.500000 -0.250000 {without}")
    assert staged("execute", STAGES["execute"], [], [], dict(tile=1, splits=2), target="plain") == (OK, "")


def test_factors_of_gram():
    attributes = dict(B=2, M=3, N=5, tile_m=1, tile_n=1, tile_k=1, cluster_m=1, splits=1, scale=7.0, of_addend=-11.0)
    operands, results = [("bfloat16", (2, 3, 5), 16), ("float32", (2, 3, 3), 32)], [("float32", (2, 3, 3), 48)]
    assert staged("execute", STAGES["execute"], operands, results, attributes, "gram") == (INTERNAL, "7.000000 -11.000000")


# Blocks of columns; the scales' shapes; how far their elements are apart: in the batch, of rows or columns, of steps.
STRIDES = [
    (5, (2, 3, 11), (2, 11, 5), "33 11 1 55 1 5 "),
    (4, (2, 3, 11), (2, 4, 11), "33 11 1 44 11 1 "),
    (4, (1, 3, 11), (2, 4, 1), "0 11 1 4 1 0 "),
    (5, (2, 1, 11), (1, 11, 5), "11 0 1 0 1 5 "),
    (1, (2, 3, 1), (1, 1, 1), "3 1 0 0 0 0 "),
]


@pytest.mark.parametrize(("columns", "left", "right", "strides"), STRIDES, ids=str)
def test_strides_of_scales(columns, left, right, strides):
    """An axis of size 1 is for all."""
    attributes = dict(B=2, M=3, N=5, K=7, I=3, J=columns, S=11, tile_m=1, tile_n=1, tile_k=1, cluster_m=1, splits=1)
    operands = [("float8_e4m3fn", (2, 3, 7), 16), ("float8_e5m2", (2, 5, 7), 32), ("float32", left, 48), ("float32", right, 64)]
    results = [("float32", (2, 3, 5), 80)]
    assert staged("execute", STAGES["execute"], operands, results, attributes, "scaled") == (INTERNAL, strides)


def addresses(target, operands, results, attributes):
    """The answer, where the address of the i-th array is 2^20 i, and the addresses by name."""
    where = {name: i << 20 for i, name in enumerate([*operands, *results], 1)}
    given, written = ([(*array, where[name]) for name, array in group.items()] for group in (operands, results))
    return staged("execute", STAGES["execute"], given, written, attributes, target), where


@pytest.mark.parametrize("backward", [False, True])
def test_arrays_of_causal(backward):
    """Each of the optional operands may be absent."""
    B, T, C, J = 2, 7, 11, 5
    x, state = ("bfloat16", (B, T, C)), ("bfloat16", (B, J - 1, C))
    optional = dict(bias=("float32", (C,)), initial_states=state, seq_idx=("int32", (B, T)), idx_of_states=("int32", (B, J - 1)))
    for flags in itertools.product((0, 1), repeat=4):
        given = dict(zip(optional, flags, strict=True))
        operands = {"x": x, "weight": ("float16", (J, C)), **{name: optional[name] for name in optional if given[name]}}
        results = {"first": x}
        if backward:
            operands, results = operands | {"d_y": x}, results | {"sums": ("float32", (3, J + given["bias"], C))}
            results |= {"d_initial_states": state} if given["initial_states"] else {}
        attributes = dict(B=B, T=T, C=C, J=J, lanes=1, strip=1, splits=3, activation=7, **given)
        answer, where = addresses("causal_conv1d" + "_backward" * backward, operands, results, attributes)
        slots = ("x", "weight", *optional, "d_y", "first", "sums", "d_initial_states")
        assert answer == (INTERNAL, "".join(f"{where.get(slot, 0)} " for slot in slots))


def test_arrays_of_depthwise():
    """The arrays of an epilogue arrive too."""
    one, size, y = (1, 1, 1), (1, 1, 4), ("bfloat16", (2, 3, 1, 1, 4, 5, 7))
    attributes = dict(B=2, N=3, G=5, C=1, K=7, input=size, filter=one, output=size, stride=one, low=(0, 0, 0), input_dilation=one)
    attributes |= dict(filter_dilation=one, lanes=1, strip=1, pieces=1, lines=0, splits=1, activation=1, bias=1, residual=1, saves=1)
    operands = dict(x=("bfloat16", (2, 3, 1, 1, 4, 5, 1)), w=("bfloat16", (2, 5, 7, 1, 1, 1, 1)), bias=("float32", (2, 5, 7)), residual=y)
    answer, where = addresses("depthwise1d_bias_act", operands, dict(y=y, saved=y), attributes)
    assert answer == (INTERNAL, "".join(f"{address} " for address in where.values()))


@pytest.mark.parametrize("handler", STAGES)
def test_a_handler_refuses_other_stages(handler):
    for stage in {1, 2, 3} - {STAGES[handler]}:
        code, message = staged(handler, stage, OPERANDS, RESULTS, ATTRIBUTES)
        assert code == INVALID and message.startswith("Wrong execution stage"), message


def replaced(arrays, i, array):
    return [*arrays[:i], array, *arrays[i + 1 :]]


KINDS = {"input": "three int64", "low": "three int64", "scale": "a float64", "shift": "a float64"}
FLOATS = "float32, bfloat16, float16, float8_e4m3fn or float8_e5m2"
FAULTS = {
    **{
        f"no {name}": ({name: None}, f"attribute {name} is missing or of another type, want {KINDS.get(name, 'an int64')}")
        for name in ATTRIBUTES
    },
    "an integer": (dict(scale=2), "attribute scale is missing or of another type, want a float64"),
    "a real number": (dict(tile=2.0), "attribute tile is missing or of another type, want an int64"),
    "two of three": (dict(low=(1, 1)), "attribute low is missing or of another type, want three int64"),
    "an attribute too many": (dict(more=1), "10 attributes, want 9"),
    "an array too many": (dict(operands=[*OPERANDS, OPERANDS[0]]), "4 operands and 2 results, want 3 and 2"),
    "a result too many": (dict(results=[*RESULTS, RESULTS[0]]), "3 operands and 3 results, want 3 and 2"),
    "an array too few": (dict(operands=OPERANDS[:2]), "added is missing: there are 2 operands and 2 results"),
    "a result too few": (dict(results=RESULTS[:1]), "saved is missing: there are 3 operands and 1 results"),
    "an axis": (dict(M=4), "x has the shape (2, 3), want (2, 4)"),
    "no parts": (dict(splits=2), "y has the shape (2, 3), want (2, 2, 3)"),
    "no float": (dict(operands=replaced(OPERANDS, 0, ("int8", (2, 3), 16))), f"x is int8, want {FLOATS}"),
    "no dtype of ours": (dict(operands=replaced(OPERANDS, 0, ("float64", (2, 3), 16))), f"x is of another dtype, want {FLOATS}"),
    "64 bits": (dict(operands=replaced(OPERANDS, 1, ("int64", (3,), 16))), "rows is of another dtype, want int32"),
    "another float": (dict(results=replaced(RESULTS, 1, ("float16", (2,), 16))), "saved is float16, want bfloat16"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(fault):
    changes, message = FAULTS[fault]
    assert answer(**changes) == (INVALID, message)


BROKEN = (
    "",
    "broken has members without a name",
    "two targets are called plain",
    "broken has two attributes B",
    "two families are called invented",
)


@pytest.mark.parametrize(("how", "message"), [*enumerate(BROKEN)])
def test_families_that_contradict_themselves(how, message):
    text = ctypes.create_string_buffer(1000)
    library().CheckBroken(how, text)
    assert text.value.decode() == message
