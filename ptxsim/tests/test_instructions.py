"""Arithmetic, logic, comparisons and conversions, a thread for each of many values, against Python's integers, fractions and ml_dtypes."""

import inspect
import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from ptxsim import Fault
from snippets import of_each

DTYPES = {
    f"{letter}{bits}": np.dtype(f"{kind}{bits // 8}") for letter, kind in (("s", "i"), ("u", "u"), ("b", "u")) for bits in (8, 16, 32, 64)
}
DTYPES |= {"f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16), "f32": np.dtype(np.float32), "f64": np.dtype(np.float64)}
E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
U32, F16, BF16, F32 = (DTYPES[type] for type in ("u32", "f16", "bf16", "f32"))
F64 = np.dtype(np.float64)
QUIET = np.errstate(all="ignore")  # infinities and NaNs are meant


@QUIET
def edges(dtype):
    """Values at which something may go wrong; of counts of bits, for a width."""
    if isinstance(dtype, int):
        return np.array([0, 1, 5, 7, dtype // 2, dtype - 1, dtype, dtype + 1, 255, 256 + 3, 2**31, 2**32 - 1], U32)
    if dtype.kind in "iu":
        bits, low, high = 8 * dtype.itemsize, np.iinfo(dtype).min, np.iinfo(dtype).max
        return np.array(sorted({low, low + 1, 0, 1, 2, 3, 5, bits - 1, bits, high // 2, high - 1, high, *([-1, -2] if low else [])}), dtype)
    info = ml_dtypes.finfo(dtype)
    tiny, least, most = (float(x) for x in (info.tiny, info.smallest_subnormal, info.max))
    positive = [0, least, 3 * least, tiny - least, tiny, 0.5, 1, 1 + float(info.eps), 1.5, 3, 100.25, most, math.inf]
    return np.array([*positive, *(-x for x in positive), math.nan]).astype(dtype)


@QUIET
def random_values(dtype, count, seed):
    random = np.random.default_rng(seed)
    if isinstance(dtype, int):
        return random.choice(edges(dtype), count)
    bits = random.integers(0, 256, (count, dtype.itemsize), dtype=np.uint8).view(dtype).ravel()
    if dtype.kind in "iu":  # small ones too
        return np.where(random.random(count) < 0.3, random.integers(0, 100, count).astype(dtype), bits)
    return np.where(random.random(count) < 0.6, random.normal(size=count).astype(dtype), bits)


@QUIET
def operands(*dtypes, count=400):
    """Each combination of the edges (at most 2000 of them), and random values."""
    grid = [axis.ravel() for axis in np.meshgrid(*(edges(dtype) for dtype in dtypes), indexing="ij")]
    if len(grid[0]) > 2000:
        chosen = np.random.default_rng(0).integers(0, len(grid[0]), 2000)
        grid = [axis[chosen] for axis in grid]
    return [np.concatenate([axis, random_values(dtype, count, seed)]) for seed, (axis, dtype) in enumerate(zip(grid, dtypes, strict=True))]


def wrapped(value, dtype):
    """An integer of any size, modulo 2**bits."""
    return np.array(int(value) % (1 << 8 * dtype.itemsize), f"u{dtype.itemsize}").view(dtype)


@QUIET
def same(found, expected):
    """Equal in every bit, but for NaNs' payloads."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.dtype == expected.dtype
    if found.dtype.kind in "iu":
        return np.testing.assert_array_equal(found, expected)
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(found), nan)
    np.testing.assert_array_equal(found[~nan].view(f"u{found.itemsize}"), expected[~nan].view(f"u{found.itemsize}"))


def run(opcode, type, *inputs, out=None):
    """The results of an instruction for elements of the inputs, of which two are in a register where the type is a pair."""
    pairs = type.endswith("x2")
    if pairs:
        inputs = [values[: len(values) // 2 * 2].view(U32) for values in inputs]
    registers = ", ".join(["%a", "%b", "%c", "%e"][: len(inputs)])
    found = of_each(f"{opcode}.{type} %x, {registers};", *inputs, out=U32 if pairs else out or inputs[0].dtype)
    return found.view(dtype_of(type)) if pairs else found


def dtype_of(type):
    return DTYPES[type.removesuffix("x2")]


def parameters(function):
    return [name for name, each in inspect.signature(function).parameters.items() if each.default is each.empty]


# ---- integers: the expected value is Python's, which never overflows


def field(value, start, length, bits, signed):
    """The ISA's text of bfe, with a string of binary digits instead of a loop."""
    digits = format(value % (1 << bits), f"0{bits}b")
    if length == 0:
        return 0
    sign = digits[-1 - min(start + length - 1, bits - 1)] if signed else "0"
    taken = digits[: bits - start][-length:] if start < bits else ""
    return int(taken.rjust(bits, sign), 2)


def inserted(a, b, n, m, bits):
    """The ISA's text of bfi."""
    mask = ((1 << m % 256) - 1 << n % 256) % (1 << bits)
    return b & ~mask | a << n % 256 & mask


def selected_bytes(a, b, c):
    """The ISA's text of prmt: four bits of c choose a byte, or the sign of it."""
    bytes = (b << 32 | a).to_bytes(8, "little")
    chosen = [(bytes[c >> 4 * n & 7], c >> 4 * n & 8) for n in range(4)]
    return sum((255 * (byte >> 7) if sign else byte) << 8 * n for n, (byte, sign) in enumerate(chosen))


QUOTIENT = lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
SIGNED, UNSIGNED = ["s16", "s32", "s64"], ["u16", "u32", "u64"]
BITS, INTEGERS, PAIRS = ["b16", "b32", "b64"], SIGNED + UNSIGNED, ["s16x2", "u16x2"]
LOW_24 = [("u32", lambda x: x % (1 << 24)), ("s32", lambda x: (x + (1 << 23)) % (1 << 24) - (1 << 23))]
HALF = [("lo", 0), ("hi", 16)]
# Opcode, types, and the result of numbers a, b and c of the type, of w of twice its width, and of n and m, which count bits.
INTEGER_TABLE = [
    ("add", INTEGERS + PAIRS, lambda a, b: a + b),
    ("sub", INTEGERS, lambda a, b: a - b),
    ("mul.lo", INTEGERS, lambda a, b: a * b),
    ("mul.hi", INTEGERS, lambda a, b, bits: a * b >> bits),
    ("mad.hi", INTEGERS, lambda a, b, c, bits: (a * b >> bits) + c),
    ("mul.wide", ["s16", "u16", "s32", "u32"], lambda a, b: a * b),
    ("mad.lo", INTEGERS, lambda a, b, c: a * b + c),
    ("mad.wide", ["s16", "u16", "s32", "u32"], lambda a, b, w: a * b + w),
    ("div", INTEGERS, QUOTIENT),
    ("rem", INTEGERS, lambda a, b: a - b * QUOTIENT(a, b)),
    ("min", INTEGERS + PAIRS, lambda a, b: min(a, b)),
    ("max", INTEGERS + PAIRS, lambda a, b: max(a, b)),
    ("min.relu", ["s32"], lambda a, b: max(min(a, b), 0)),
    ("max.relu", ["s32"], lambda a, b: max(a, b, 0)),
    ("neg", SIGNED, lambda a: -a),
    ("abs", SIGNED, lambda a: abs(a)),
    ("and", BITS, lambda a, b: a & b),
    ("or", BITS, lambda a, b: a | b),
    ("xor", BITS, lambda a, b: a ^ b),
    ("not", BITS, lambda a: ~a),
    ("mov", BITS + INTEGERS, lambda a: a),
    ("shl", BITS, lambda a, n: a << min(n, 99)),
    ("shr", BITS + INTEGERS, lambda a, n: a >> min(n, 99)),
    ("bfe", ["u32", "u64"], lambda a, n, m, bits: field(a, n % 256, m % 256, bits, False)),
    ("bfe", ["s32", "s64"], lambda a, n, m, bits: field(a, n % 256, m % 256, bits, True)),
    ("bfi", ["b32", "b64"], inserted),
    ("popc", ["b32", "b64"], lambda a: a.bit_count()),
    ("prmt", ["b32"], selected_bytes),
    ("clz", ["b32", "b64"], lambda a, bits: bits - a.bit_length()),
    ("brev", ["b32", "b64"], lambda a, bits: int(format(a, f"0{bits}b")[::-1], 2)),
    ("bfind", ["u32", "s32", "u64", "s64"], lambda a: (a if a >= 0 else ~a).bit_length() - 1),
    ("bfind.shiftamt", ["u32", "s32", "u64", "s64"], lambda a, bits: bits - (a if a >= 0 else ~a).bit_length() if a not in (0, -1) else -1),
    ("sad", INTEGERS, lambda a, b, c: c + abs(a - b)),
    *(
        (f"mul24.{part}", [type], lambda a, b, low=low, shift=shift: low(a) * low(b) >> shift)
        for type, low in LOW_24
        for part, shift in HALF
    ),
    *(
        (f"mad24.{part}", [type], lambda a, b, c, low=low, shift=shift: (low(a) * low(b) >> shift) + c)
        for type, low in LOW_24
        for part, shift in HALF
    ),
    ("shf.l.wrap", ["b32"], lambda a, b, c: ((b << 32 | a) << c % 32) >> 32),
    ("shf.l.clamp", ["b32"], lambda a, b, c: ((b << 32 | a) << min(c, 32)) >> 32),
    ("shf.r.wrap", ["b32"], lambda a, b, c: (b << 32 | a) >> c % 32),
    ("shf.r.clamp", ["b32"], lambda a, b, c: (b << 32 | a) >> min(c, 32)),
]


@pytest.mark.parametrize("name, type, function", [(name, type, function) for name, types, function in INTEGER_TABLE for type in types])
def test_integers(name, type, function):
    dtype = dtype_of(type)
    bits = 8 * dtype.itemsize
    wide = DTYPES.get(f"{type[0]}{2 * bits}")
    names = parameters(function)
    more = {"bits": bits} if "bits" in names else {}
    kinds = [{"n": bits, "m": bits, "w": wide}.get(operand, dtype) for operand in names if operand != "bits"]
    inputs = operands(*kinds)
    if name in ("div", "rem"):
        inputs = [values[inputs[1] != 0] for values in inputs]
    found = run(
        name,
        type,
        *inputs,
        out={"popc": U32, "clz": U32, "bfind": U32, "bfind.shiftamt": U32, "mul.wide": wide, "mad.wide": wide}.get(name),
    )
    expected = np.array([wrapped(function(*map(int, row), **more), found.dtype) for row in zip(*inputs, strict=True)])
    same(found, expected[: len(found)])


@pytest.mark.parametrize("types", ["u32.u32", "u32.s32", "s32.u32", "s32.s32"])
def test_dot_products_of_bytes(types):
    """dp4a, and dp2a of halves with the lower or the upper two bytes."""
    a, b, c = operands(U32, U32, DTYPES["s32"])
    found = of_each(
        f"dp4a.{types} %x, %a, %b, %c; dp2a.lo.{types} %y, %a, %b, %c; dp2a.hi.{types} %z, %a, %b, %c;", a, b, c, out=[np.int32] * 3
    )
    letters = types.replace("u", "u").replace("s", "i").split(".")
    part = lambda values, letter, size: values.view(f"{letter[0]}{size}").reshape(len(values), -1).astype(np.int64)
    bytes, halves, others = part(a, letters[0], 1), part(a, letters[0], 2), part(b, letters[1], 1)
    for one, products in zip(found, (bytes * others, halves * others[:, :2], halves * others[:, 2:]), strict=True):
        same(one, (products.sum(1) + c).astype(np.int32))


@pytest.mark.parametrize("table, function", [
    (0x80, lambda a, b, c: a & b & c), (0xF8, lambda a, b, c: a | (b & c)), (0x96, lambda a, b, c: a ^ b ^ c),
    (0xE8, lambda a, b, c: (a & b) | (a & c) | (b & c)), (0x0F, lambda a, b, c: ~a), (0xCC, lambda a, b, c: b), (0xAA, lambda a, b, c: c),
])  # fmt: skip
def test_lop3(table, function):
    a, b, c = operands(U32, U32, U32)
    same(of_each(f"lop3.b32 %x, %a, %b, %c, {table};", a, b, c, out=U32), function(a, b, c))


# ---- comparisons and predicates

COMPARISONS = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
FLOATS = ["f16", "bf16", "f32", "f64"]
COMPARED = [
    *((name, type) for name in COMPARISONS for type in INTEGERS + BITS * (name in ("eq", "ne"))),
    *((name, type) for name in (*COMPARISONS, *(name + "u" for name in COMPARISONS), "num", "nan") for type in FLOATS),
]


def as_numbers(*conditions):
    return "".join(f"selp.u32 %{name}, 1, 0, {p};" for name, p in zip("xyzw", conditions, strict=False))


@pytest.mark.parametrize("name, type", COMPARED)
@QUIET
def test_comparisons(name, type):
    """A NaN is in no relation to anything, or in each with a `u`."""
    a, b = operands(DTYPES[type], DTYPES[type])
    nan = np.isnan(a) | np.isnan(b)
    if name in ("num", "nan"):
        expected = nan == (name == "nan")
    else:
        expected = np.where(nan, name[2:] == "u", COMPARISONS[name[:2]](a, b))
    same(of_each(f"setp.{name}.{type} %p1, %a, %b; {as_numbers('%p1')}", a, b, out=U32), expected.astype(U32))


@pytest.mark.parametrize("name, function", [("and", np.logical_and), ("or", np.logical_or), ("xor", np.logical_xor)])
def test_comparisons_combined_with_a_predicate(name, function):
    a, b, c = operands(DTYPES["s32"], DTYPES["s32"], DTYPES["u32"])
    body = f"setp.ne.u32 %p3, %c, 0; setp.lt.{name}.s32 %p1|%p2, %a, %b, %p3; setp.lt.{name}.s32 %p4|%p5, %a, %b, !%p3;"
    found = of_each(body + as_numbers("%p1", "%p2", "%p4", "%p5"), a, b, c, out=[np.uint32] * 4)
    expected = [function(less, p) for p in (c != 0, c == 0) for less in (a < b, a >= b)]
    for one, other in zip(found, expected, strict=True):
        same(one, other.astype(np.uint32))


@pytest.mark.parametrize("name, function", [
    ("and.pred %p3, %p1, %p2", lambda a, b: a and b), ("or.pred %p3, %p1, %p2", lambda a, b: a or b),
    ("xor.pred %p3, %p1, %p2", lambda a, b: a != b), ("not.pred %p3, %p1", lambda a, b: not a),
    ("mov.pred %p3, %p2", lambda a, b: b), ("mov.pred %p3, -1", lambda a, b: True), ("mov.pred %p3, 0", lambda a, b: False),
    ("or.pred %p3, !%p1, %p2", lambda a, b: not a or b),
])  # fmt: skip
def test_predicates(name, function):
    a, b = np.array([0, 0, 1, 1], np.uint32), np.array([0, 1, 0, 1], np.uint32)
    found = of_each(f"setp.ne.u32 %p1, %a, 0; setp.ne.u32 %p2, %b, 0; {name}; {as_numbers('%p3')}", a, b, out=np.uint32)
    same(found, np.array([bool(function(x, y)) for x, y in zip(a, b, strict=True)], np.uint32))


@pytest.mark.parametrize("type", [*BITS, *INTEGERS, "f32", "f64"])
def test_selp(type):
    a, b, c = operands(DTYPES[type], DTYPES[type], DTYPES["u32"])
    same(of_each(f"setp.ne.u32 %p1, %c, 0; selp.{type} %x, %a, %b, %p1;", a, b, c, out=DTYPES[type]), np.where(c != 0, a, b))


def test_guards_choose_threads():
    a, b = operands(DTYPES["u32"], DTYPES["u32"])
    found = of_each("setp.lt.u32 %p1, %a, %b; mov.u32 %x, 1; @%p1 mov.u32 %x, 2; @!%p1 add.u32 %x, %x, 6;", a, b, out=np.uint32)
    same(found, np.where(a < b, 2, 7).astype(np.uint32))


# ---- moves


def test_mov_packs_and_unpacks():
    a, b = operands(DTYPES["u64"], DTYPES["u16"])
    body = """mov.b64 {%r1, %r2}, %a; mov.b64 %x, {%r2, %r1}; mov.b32 {%h1, %h2}, %r1; mov.b32 %y, {%h2, %b};
              mov.b64 {%h3, %h4, %h5, %h6}, %a; mov.b64 %z, {%h6, %h5, %h4, %h3}; mov.b32 {_, %h7}, %r2; mov.b32 {%h8, _}, %r2;
              mov.b32 %w, {-1, %h7};"""
    turned, pair, four, sunk = of_each(body, a, b, out=[np.uint64, np.uint32, np.uint64, np.uint32])
    halves = a.view(np.uint16).reshape(-1, 4)
    same(turned.view(np.uint32), a.view(np.uint32).reshape(-1, 2)[:, ::-1].ravel())
    same(pair.view(np.uint16).reshape(-1, 2), np.stack([halves[:, 1], b], axis=1))
    same(four.view(np.uint16).reshape(-1, 4), halves[:, ::-1])
    same(sunk.view(np.uint16).reshape(-1, 2), np.stack([np.full_like(b, 0xFFFF), halves[:, 3]], axis=1))


@pytest.mark.parametrize("type, text, value", [
    ("f32", "0f3FC00000", np.float32(1.5)), ("b32", "0x80000000", np.uint32(2**31)),
    ("u64", "0xffffffffffffffff", np.uint64(2**64 - 1)), ("s32", "-7", np.int32(-7)),
    ("f64", "0d3FF8000000000000", np.float64(1.5)), ("b32", "0x5410U", np.uint32(0x5410)),
])  # fmt: skip
def test_constants(type, text, value):
    assert of_each(f"mov.{type} %x, {text};", np.zeros(1, np.uint32), out=value.dtype)[0] == value


# ---- floating point

# Bits of the mantissa, least and largest exponents.
FORMATS = {F16: (10, -14, 15), BF16: (7, -126, 127), F32: (23, -126, 127), F64: (52, -1022, 1023), "tf32": (10, -126, 127)}
AWAY = {  # whether the digit is rounded up, by what is left of it
    "rn": lambda rest, odd, negative: rest > Fraction(1, 2) or (rest == Fraction(1, 2) and odd),
    "rna": lambda rest, odd, negative: rest >= Fraction(1, 2),
    "rz": lambda rest, odd, negative: False,
    "rm": lambda rest, odd, negative: negative and rest > 0,
    "rp": lambda rest, odd, negative: not negative and rest > 0,
}


def rounded(exact: Fraction, format, way="rn"):
    """The format's number that a fraction becomes, as a float; zero is positive."""
    mantissa, least, largest = FORMATS[format]
    if exact == 0:
        return 0.0
    size = abs(exact)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent = max(exponent - (size < Fraction(2) ** exponent), least)
    quantum = Fraction(2) ** (exponent - mantissa)
    whole, rest = divmod(size, quantum)
    whole += AWAY[way](rest / quantum, whole % 2 == 1, exact < 0)
    made, most = whole * quantum, (2 - Fraction(1, 2**mantissa)) * Fraction(2) ** largest
    if made > most:
        made = most if way == "rz" or (way == "rm" and exact > 0) or (way == "rp" and exact < 0) else math.inf
    return math.copysign(float(made), -1 if exact < 0 else 1)


@QUIET
def exactly(function, dtype, *inputs, way="rn"):
    """Expected values of a function of fractions: those of numpy where one is not finite or the result is zero, whose sign it knows."""
    wide = [values.astype(F64) for values in inputs]
    expected = np.array(function(*(values.astype(np.longdouble) for values in wide))).astype(F64)
    for n, row in enumerate(zip(*wide, strict=True)):
        if all(map(math.isfinite, row)) and (exact := function(*map(Fraction, row))) != 0:
            expected[n] = rounded(exact, dtype, way)
    return expected.astype(dtype)


ARITHMETIC = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "fma": lambda a, b, c: a * b + c,
    "mad": lambda a, b, c: a * b + c,
}


@QUIET
def flushed(values):
    return np.where(np.abs(values) < np.finfo(F32).tiny, np.copysign(F32.type(0), values), values)


def relu(values):
    return np.where(values <= 0, np.zeros_like(values), values)


def saturated(values):
    return np.where(values > 0, np.minimum(values, values.dtype.type(1)), values.dtype.type(0))


SAME = lambda values: values
HALVES_AND_PAIRS = ["f16", "bf16", "f16x2", "bf16x2"]
# Opcodes but for their types, and what is done to operands before and to results after what the name says.
FLOAT_TABLE = [
    (("add.rn", "sub.rn", "mul.rn", "fma.rn"), [*HALVES_AND_PAIRS, "f32", "f64"], SAME, SAME),
    (("add", "sub", "mul"), [*HALVES_AND_PAIRS, "f32", "f64"], SAME, SAME),
    (("mad.rn",), ["f32", "f64"], SAME, SAME),
    (("add.ftz", "sub.ftz", "mul.ftz"), ["f32"], flushed, flushed),
    (("fma.rn.relu",), ["f16", "bf16"], SAME, relu),
    (("add.rn.ftz", "sub.rn.ftz", "mul.rn.ftz", "fma.rn.ftz"), ["f32"], flushed, flushed),
    (("add.sat", "mul.sat", "fma.rn.sat"), ["f32"], SAME, saturated),
]
FLOAT_ROWS = [(name, type, before, after) for names, types, before, after in FLOAT_TABLE for name in names for type in types]


@pytest.mark.parametrize("name, type, before, after", FLOAT_ROWS)
@QUIET
def test_float_arithmetic_rounds_once(name, type, before, after):
    dtype, function = dtype_of(type), ARITHMETIC[name[:3]]
    inputs = operands(*[dtype] * len(parameters(function)))
    if name == "fma.rn":  # a half way between two numbers, and a little more
        eps, little = float(ml_dtypes.finfo(dtype).eps), float(ml_dtypes.finfo(dtype).smallest_subnormal)
        hard = [(1 + eps, 1 + eps / 2, little), (1 + eps, 1.5, -little), (1 + 3 * eps, 1.5, little), (1 + eps, -1.5, little)]
        inputs = [np.concatenate([values, column.astype(dtype)]) for values, column in zip(inputs, np.array(hard).T, strict=True)]
    inputs = [values[: len(values) // 2 * 2] for values in inputs]
    same(run(name, type, *inputs), after(exactly(function, dtype, *map(before, inputs))))


def root(x):
    """The square root: of a fraction to 200 bits, with a bit behind them if it is not exact."""
    if not isinstance(x, Fraction):
        return np.sqrt(x)
    square = max(x.numerator, 0) * x.denominator << 400
    return Fraction(2 * math.isqrt(square) + (math.isqrt(square) ** 2 != square), x.denominator << 201)


QUOTIENTS = {
    "div": lambda a, b: 0 if isinstance(b, Fraction) and b == 0 else a / b,
    "rcp": lambda a: QUOTIENTS["div"](a**0, a),
    "sqrt": root,
}
PARTS = {"add": lambda a, b: (a, b), "sub": lambda a, b: (a, -b), "fma": lambda a, b, c: (a * b, c)}


@pytest.mark.parametrize("type", ["f32", "ftz.f32", "f64"])
@pytest.mark.parametrize("way", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "fma", *QUOTIENTS])
@QUIET
def test_roundings(name, way, type):
    """A sum that is exactly zero is negative with .rm, unless both of its parts are positive."""
    dtype, function, flush = DTYPES[type[-3:]], (ARITHMETIC | QUOTIENTS)[name], flushed if "ftz" in type else SAME
    inputs = operands(*[dtype] * len(parameters(function)), count=200)
    some = [[1, -1, 0, 0, 1, -1 - 2.0**-23], [2, 2, 3, -3, 2.0**-30, 1.5], [-2, 2, 0, 0, 1, 0]]
    inputs = [np.concatenate([values, np.array(more, dtype)]) for values, more in zip(inputs, some, strict=False)]
    expected = exactly(function, dtype, *map(flush, inputs), way=way)
    if way == "rm" and name in PARTS:
        parts = PARTS[name](*(flush(values).astype(np.longdouble) for values in inputs))
        expected[(expected == 0) & (parts[0] + parts[1] == 0) & (np.signbit(parts[0]) | np.signbit(parts[1]))] = -0.0
    same(run(f"{name}.{way}", type, *inputs, out=dtype), flush(expected))


@pytest.mark.parametrize("type", ["f32", "f64"])
@QUIET
def test_copysign(type):
    a, b = operands(DTYPES[type], DTYPES[type])
    same(run("copysign", type, a, b), np.copysign(b, a))


@QUIET
def test_approximations_of_f64():
    """With .ftz the lower halves of a number's bits are ignored, and zeros in the result."""
    (a,) = operands(F64)
    upper = (a.view(np.uint64) & np.uint64(0xFFFFFFFF << 32)).view(F64)
    upper = np.where(np.abs(upper) < np.finfo(F64).tiny, np.copysign(0.0, upper), upper)
    upper[np.isnan(a)] = np.nan
    for opcode, values, function, error in [
        ("rsqrt.approx", a, lambda x: 1 / np.sqrt(x), 2.0**-51),
        ("rsqrt.approx.ftz", upper, lambda x: 1 / np.sqrt(x), 2.0**-19),
        ("rcp.approx.ftz", upper, lambda x: 1 / x, 2.0**-19),
    ]:
        found, expected = run(opcode, "f64", a), function(values)
        if "ftz" in opcode:
            expected = np.where(np.abs(expected) < np.finfo(F64).tiny, np.copysign(0.0, expected), expected)
            assert not np.any(found[~np.isnan(found)].view(np.uint64) & np.uint64(0xFFFFFFFF))
        special = ~np.isfinite(expected) | (expected == 0)
        same(found[special], expected[special])
        np.testing.assert_allclose(found[~special], expected[~special], rtol=error)


@QUIET
def test_f64_to_floats_and_back():
    (a,) = operands(F64)
    single = random_values(F32, 300, 5).astype(F64)
    halfway = (single + np.nextafter(single.astype(F32), F32.type(np.inf)).astype(F64)) / 2
    a = np.concatenate([a, single, halfway, np.nextafter(halfway, 0), np.nextafter(halfway, 9)])
    finite = np.isfinite(a)
    for type, way in [*(("f32", way) for way in ("rn", "rz", "rm", "rp")), ("f16", "rn"), ("bf16", "rn")]:
        expected = a.astype(DTYPES[type])
        expected[finite] = [rounded(Fraction(x), DTYPES[type], way) or math.copysign(0, x) for x in a[finite].tolist()]
        found = of_each(f"cvt.{way}.{type}.f64 %x, %a;", a, out=DTYPES[type])
        same(found, expected)
        if type == "f32":
            same(of_each(f"cvt.{way}.ftz.f32.f64 %x, %a;", a, out=F32), flushed(expected))
        if way == "rn":
            same(of_each(f"cvt.f64.{type} %x, %a;", found, out=F64), found.astype(F64))
    (b,) = operands(F32)
    same(of_each("cvt.ftz.f64.f32 %x, %a;", b, out=F64), flushed(b).astype(F64))


@pytest.mark.parametrize("type", [*FLOATS, "f16x2", "bf16x2"])
@QUIET
def test_min_and_max_pass_nan_by_and_know_the_sign_of_zero(type):
    a, b = (values[: len(values) // 2 * 2] for values in operands(dtype_of(type), dtype_of(type)))
    first = np.array([y != y or x < y or (x == y and math.copysign(1, x) < 0) for x, y in zip(a.astype(F64), b.astype(F64), strict=True)])
    first &= ~np.isnan(a)
    first |= np.isnan(b)
    same(run("min", type, a, b), np.where(first, a, b))
    same(run("max", type, a, b), np.where(np.isnan(b), a, np.where(np.isnan(a), b, np.where(first, b, a))))


@pytest.mark.parametrize("type", FLOATS)
@QUIET
def test_neg_and_abs(type):
    (a,) = operands(DTYPES[type])
    same(run("neg", type, a), -a)
    same(run("abs", type, a), np.abs(a))


@QUIET
def test_ftz_of_comparisons():
    a, b = operands(F32, F32)
    nan = np.isnan(a) | np.isnan(b)
    for name, function in COMPARISONS.items():
        found = of_each(
            f"setp.{name}.ftz.f32 %p1, %a, %b; setp.{name}u.ftz.f32 %p2, %a, %b; {as_numbers('%p1', '%p2')}", a, b, out=[U32] * 2
        )
        holds = function(flushed(a), flushed(b))
        same(found[0], (holds & ~nan).astype(U32))
        same(found[1], (holds | nan).astype(U32))


@QUIET
def test_ftz_of_single_operands():
    (a,) = operands(F32)
    same(run("neg.ftz", "f32", a), -flushed(a))
    same(run("abs.ftz", "f32", a), np.abs(flushed(a)))
    for way, function in (("rni", np.rint), ("rzi", np.trunc), ("rmi", np.floor), ("rpi", np.ceil)):
        same(of_each(f"cvt.{way}.ftz.f32.f32 %x, %a;", a, out=F32), function(flushed(a)))
        for type in ("s32", "u32", "s64", "u64"):  # those of floats_to_integers, of the flushed operand
            with_ftz, plain = (
                of_each(f"cvt.{way}{ftz}.{type}.f32 %x, %a;", b, out=DTYPES[type]) for ftz, b in ((".ftz", a), ("", flushed(a)))
            )
            same(with_ftz, plain)


@pytest.mark.parametrize("ftz", ["", ".ftz"])
@QUIET
def test_sines(ftz):
    """Absolute errors of at most 2^-20.5 between -pi and pi."""
    (a,) = operands(F32)
    inside = np.abs(a) <= np.pi
    for name, function in (("sin", np.sin), ("cos", np.cos)):
        found = run(f"{name}.approx{ftz}", "f32", a)
        assert np.all(np.abs(found - function(a.astype(F64)))[inside] <= 2**-20.5)
        assert np.all(np.isnan(found[~np.isfinite(a)])) and np.all(np.abs(found[np.isfinite(a)]) <= 1)


FUNCTIONS = [  # opcode, function, largest error by the ISA, and whether it is relative
    ("sqrt.rn", np.sqrt, 0, True), ("rcp.rn", lambda x: 1 / x, 0, True), ("sqrt.approx", np.sqrt, 2**-22, True),
    ("rcp.approx", lambda x: 1 / x, 2**-22, True), ("rsqrt.approx", lambda x: 1 / np.sqrt(x), 2**-21, True),
    ("ex2.approx", np.exp2, 2**-21, True), ("tanh.approx", np.tanh, 2**-10, True), ("lg2.approx", np.log2, 2**-22, False),
]  # fmt: skip
FUNCTIONS += [(f"{name}.ftz", *rest) for name, *rest in FUNCTIONS if name != "tanh.approx"]


@pytest.mark.parametrize("opcode, function, error, relative", FUNCTIONS)
@QUIET
def test_functions(opcode, function, error, relative):
    (a,) = operands(F32)
    flush = flushed if "ftz" in opcode else SAME
    expected = flush(function(flush(a).astype(F64)).astype(F32))
    found = run(opcode, "f32", a)
    close = np.abs(found - expected) <= error * np.maximum(np.abs(expected), 0 if relative else 1)
    equal = (found == expected) & ((np.signbit(found) == np.signbit(expected)) | (not relative))
    assert np.all((np.isnan(found) & np.isnan(expected)) | equal | close & (error > 0))


@pytest.mark.parametrize(
    "opcode, ulps", [("div.rn", 0), ("div.full", 2), ("div.approx", 2), ("div.rn.ftz", 0), ("div.approx.ftz", 2), ("div.full.ftz", 2)]
)
@QUIET
def test_division(opcode, ulps):
    a, b = (np.abs(values[np.isfinite(values)])[:700] for values in (random_values(F32, 900, seed) for seed in range(2)))
    b = np.clip(b, 2.0**-60, 2.0**60)
    flush = flushed if "ftz" in opcode else SAME
    expected = flush((flush(a).astype(F64) / b.astype(F64)).astype(F32))
    assert np.max(np.abs(run(opcode, "f32", a, b).view(np.int32) - expected.view(np.int32))) <= ulps


# ---- conversions

HALVES = np.arange(1 << 16, dtype=np.uint16)


def close_to_halves(dtype):
    """float32 values beside each 16-bit one and beside the middle to its neighbour, and others."""
    below = 16 if dtype == BF16 else 13
    exact = HALVES.view(dtype).astype(F32)[::37].view(np.uint32)
    near = [
        (exact + np.uint32(step)).view(F32) for step in (0, 1, (1 << below - 1) - 1, 1 << below - 1, (1 << below - 1) + 1, (1 << below) - 1)
    ]
    return np.concatenate([*near, edges(F32), random_values(F32, 500, 3)])


@pytest.mark.parametrize("type", ["f16", "bf16"])
@QUIET
def test_all_halves_to_f32_and_back(type):
    values = HALVES.view(DTYPES[type])
    wide, back = of_each(f"cvt.f32.{type} %x, %a; cvt.rn.{type}.f32 %y, %x;", values, out=[F32, DTYPES[type]])
    same(wide, values.astype(F32))
    same(back, values)


@pytest.mark.parametrize("type, way", [("f16", way) for way in ("rn", "rz", "rm", "rp")] + [("bf16", way) for way in ("rn", "rz")])
@QUIET
def test_f32_to_halves(type, way):
    values = close_to_halves(DTYPES[type])
    finite = np.isfinite(values)
    found = of_each(f"cvt.{way}.{type}.f32 %x, %a;", values, out=DTYPES[type])
    expected = np.array([rounded(Fraction(float(x)), DTYPES[type], way) or math.copysign(0, x) for x in values[finite]])
    same(found[finite], expected.astype(DTYPES[type]))
    same(found[~finite], values[~finite].astype(DTYPES[type]))


@pytest.mark.parametrize("relu", ["", ".relu"])
@pytest.mark.parametrize("type", ["f16", "bf16"])
@QUIET
def test_f32_to_pairs_of_halves(type, relu):
    high = close_to_halves(DTYPES[type])
    low = np.roll(high, 7)
    expected = np.stack([low, high], axis=1)
    expected = (np.where(expected <= 0, F32.type(0), expected) if relu else expected).astype(DTYPES[type])
    found = of_each(f"cvt.rn{relu}.{type}x2.f32 %x, %a, %b; cvt.rn{relu}.{type}.f32 %y, %a;", high, low, out=[np.uint32, DTYPES[type]])
    same(found[0].view(DTYPES[type]).reshape(-1, 2), expected)
    same(found[1], expected[:, 1])


@QUIET
def test_f32_to_pairs_of_bf16_towards_zero():
    """The halves are those of single conversions; infinities and NaN stay."""
    high = close_to_halves(DTYPES["bf16"])
    low = np.roll(high, 7)
    pair, one = of_each("cvt.rz.bf16x2.f32 %x, %a, %b; cvt.rz.bf16.f32 %y, %a;", high, low, out=[np.uint32, DTYPES["bf16"]])
    same(pair.view(DTYPES["bf16"]).reshape(-1, 2), np.stack([np.roll(one, 7), one], axis=1))


@QUIET
def test_f32_to_tf32_rounds_away_from_the_middle():
    values = close_to_halves(F16)
    values = np.concatenate([values, values * F32.type(2.0**60), values * F32.type(2.0**-60)])[::2]
    values = values[np.isfinite(values)]
    expected = np.array([rounded(Fraction(float(x)), "tf32", "rna") or math.copysign(0, x) for x in values], F32)
    same(of_each("cvt.rna.tf32.f32 %x, %a;", values, out=F32), expected)


@pytest.mark.parametrize("relu", ["", ".relu"])
@pytest.mark.parametrize("type, dtype", [("e4m3", E4M3), ("e5m2", E5M2)])
@QUIET
def test_pairs_of_8_bit_floats(type, dtype, relu):
    most = F32.type(ml_dtypes.finfo(dtype).max)

    def narrow(values):
        values = np.where(values <= 0, F32.type(0), values) if relu else values
        made = np.clip(values.astype(F32), -most, most).astype(dtype).view(np.uint8)
        return np.where(np.isnan(values), 0x7F, made).astype(np.uint8)

    all = np.arange(256, dtype=np.uint8).view(dtype)
    pairs = np.stack([all, np.roll(all, 5)], axis=1)
    wide = of_each(f"cvt.rn{relu}.f16x2.{type}x2 %x, %a;", pairs.view(np.uint16).ravel(), out=np.uint32)
    expected = pairs.astype(F16)
    same(wide.view(F16).reshape(-1, 2), np.where(expected <= 0, F16.type(0), expected) if relu else expected)
    halves = HALVES.view(F16)
    found = of_each(f"cvt.rn.satfinite{relu}.{type}x2.f16x2 %x, %a;", halves.view(np.uint32), out=np.uint16)
    same(found.view(np.uint8), narrow(halves))
    steps = all.astype(F32)[:, None] * np.array([1, 1.01, 1.0625, 1.125, 1.1251, 1.249, 1.25], F32)
    high = np.concatenate([steps.ravel(), edges(F32), random_values(F32, 500, 4)])
    found = of_each(f"cvt.rn.satfinite{relu}.{type}x2.f32 %x, %a, %b;", high, np.roll(high, 3), out=np.uint16)
    same(found.view(np.uint8).reshape(-1, 2), np.stack([narrow(np.roll(high, 3)), narrow(high)], axis=1))


@QUIET
def test_what_was_an_8_bit_float_from_f16_to_bf16():
    """These values need no rounding."""
    for dtype in (E4M3, E5M2):
        values = np.arange(256, dtype=np.uint8).view(dtype).astype(F16)
        same(of_each("cvt.bf16.f16 %x, %a;", values, out=BF16), values.astype(BF16))


WIDTHS = ("s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64")


@pytest.mark.parametrize("origin", WIDTHS)
def test_integers_to_integers(origin):
    (a,) = operands(DTYPES[origin])
    for type in WIDTHS:
        same(of_each(f"cvt.{type}.{origin} %x, %a;", a, out=DTYPES[type]), np.array([wrapped(x, DTYPES[type]) for x in a]))


@pytest.mark.parametrize("type", ["s8", "u8", "s16", "u16"])
def test_a_narrow_result_fills_the_register_by_its_sign(type):
    (a,) = operands(DTYPES["s32"])
    wide = np.dtype(f"{DTYPES[type].kind}4")
    same(of_each(f"cvt.{type}.s32 %x, %a;", a, out=wide), np.array([wrapped(x, DTYPES[type]) for x in a]).astype(wide))


@pytest.mark.parametrize("origin", WIDTHS)
@QUIET
def test_integers_to_floats(origin):
    (a,) = operands(DTYPES[origin])
    if a.itemsize == 8:  # beside the middle of two floats, by less than a double knows
        middle = [(1 << 62) + (1 << 38) + n for n in (-1, 0, 1)] + [(1 << 62) + (3 << 38) + n for n in (-1, 0, 1)]
        middle += [(1 << 62) + odd * (1 << 9) + n for odd in (1, 3) for n in (-1, 0, 1)]
        a = np.concatenate([a, np.array(middle, a.dtype)])
    for type in FLOATS:
        for way in ("rn", "rz", "rm", "rp") if type in ("f32", "f64") else ("rn",):
            expected = np.array([rounded(Fraction(int(x)), DTYPES[type], way) for x in a]).astype(DTYPES[type])
            same(of_each(f"cvt.{way}.{type}.{origin} %x, %a;", a, out=DTYPES[type]), expected)


WHOLE = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}


@pytest.mark.parametrize("way", WHOLE)
@pytest.mark.parametrize("origin", FLOATS)
@QUIET
def test_floats_to_integers(origin, way):
    (a,) = operands(DTYPES[origin])
    a = np.concatenate([a, np.array([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 2.0**31, 2.0**32, -(2.0**31), 2.0**63]).astype(a.dtype)])
    for type in WIDTHS:
        dtype = DTYPES[type]
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        nan = 1 << 8 * dtype.itemsize - 1 if 8 in (dtype.itemsize, a.itemsize) else 0
        found = of_each(f"cvt.{way}.{type}.{origin} %x, %a;", a, out=dtype)
        expected = [
            nan if math.isnan(x) else (high if x > 0 else low) if math.isinf(x) else min(max(WHOLE[way](x), low), high) for x in a.tolist()
        ]
        same(found, np.array([wrapped(x, dtype) for x in expected]))


@pytest.mark.parametrize("way, function", [("rni", np.rint), ("rzi", np.trunc), ("rmi", np.floor), ("rpi", np.ceil)])
@pytest.mark.parametrize("type", ["f32", "f16", "f64"])
@QUIET
def test_floats_to_whole_numbers(type, way, function):
    (a,) = operands(DTYPES[type])
    same(of_each(f"cvt.{way}.{type}.{type} %x, %a;", a, out=DTYPES[type]), function(a))


@pytest.mark.parametrize(
    "opcode, origin, type", [("cvt.sat.f32.f32", F32, F32), ("cvt.rn.sat.f16.f32", F32, F16), ("cvt.sat.f32.f16", F16, F32)]
)
@QUIET
def test_saturated_floats(opcode, origin, type):
    (a,) = operands(origin)
    same(of_each(f"{opcode} %x, %a;", a, out=type), saturated(a).astype(type))


@pytest.mark.parametrize(
    "opcode", ["add.cc.u32 %x, %a, %b", "cvt.rn.f16.e4m3 %x, %a", "vabsdiff4.u32.u32.u32 %x, %a, %b, %a", "min.NaN.f32 %x, %a, %b"]
)
def test_an_unknown_instruction_is_told_by_its_text(opcode):
    with pytest.raises(Fault, match="an instruction that the machine does not know\n  at line 14: " + opcode.replace(".", r"\.")):
        of_each(opcode + ";", np.zeros(1, np.uint32), np.zeros(1, np.uint32), out=np.uint32)
