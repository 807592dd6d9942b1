"""Loads, stores, atomic operations and cp.async, against numpy."""

import ml_dtypes
import numpy as np
import pytest
from ptxsim import Input, Output
from snippets import both, launch

RNG = np.random.default_rng(0)


def bits_of(type):
    return int(type[1:])


def registers(type, count):
    """Return registers of the type's width, in braces if there are several."""
    kind = {8: "h", 16: "h", 32: "f" if type[0] == "f" else "r", 64: "d"}[bits_of(type)]
    names = [f"%{kind}{n}" for n in range(count)]
    return names[0] if count == 1 else "{" + ", ".join(names) + "}"


def random_bytes(count):
    return RNG.integers(0, 256, count, dtype=np.uint8)


def moved(load, store, type, count):
    """Return the source and the result of 64 threads that move data; each has `count` elements of the type at %d20 and at %d21, and half as
    many bytes before and behind them."""
    size = bits_of(type) // 8 * count
    source, result = Input(random_bytes(3 * 64 * size)), Output(np.zeros(3 * 64 * size, np.uint8))
    body = f"""mul.lo.u32 %r102, %r100, {size}; cvt.u64.u32 %d10, %r102; add.u32 %r101, %r101, %r102;
               add.u64 %d20, %d20, %d10; add.u64 %d21, %d21, %d10; {load} {store}"""
    launch(body, [source, result], block=(64,), shared=64 * size)
    return source.values, result


# As kernels have them, and each type and width.
GLOBAL_LOADS = """
    f32 nc.f32 nc.u16 nc.u32 nc.v4.f32 nc.v4.u32 nc.v2.u32 nc.v2.f32 b8 b16 b32 b64 u8 u16 u32 u64 s32 s64 f64 v2.b8 v4.b8
    v2.b16 v4.b16 v2.b32 v4.b32 v2.f32 v4.f32 v2.u32 v4.u32 v2.b64 v2.u64 nc.b16 nc.v2.b32 nc.u8 v2.u16 v4.u16
    v2.f64 nc.f64 nc.v2.f64 nc.b32 nc.b64 nc.u64
    L1::evict_first.v4.b32 nc.L1::no_allocate.L2::128B.v4.u32 volatile.u32 relaxed.gpu.u32 acquire.sys.u32
""".split()
GLOBAL_STORES = """
    f32 b8 b16 b32 b64 u8 u16 u32 u64 v2.b8 v2.b16 v4.b16 v2.b32 v4.b32 v2.f32 v4.f32 v2.b64 wb.v2.u32 wb.v4.u32 v2.u16
    v4.u16 v2.u32 v4.u32 volatile.u32 relaxed.gpu.u32 release.sys.u32 L1::evict_first.v4.b32 v4.b8 f64
    v2.f64 v2.u64
""".split()
SHARED = """
    f32 b8 b16 b32 b64 u8 u16 u32 v2.b8 v4.b8 v2.b16 v4.b16 v2.b32 v4.b32 v2.f32 v4.f32 v2.u32 v4.u32 v2.b64 u64 v2.u16
    v4.u16 f64 v2.f64
""".split()


def parts(suffix):
    *names, type = suffix.split(".")
    return type, next((int(name[1:]) for name in names if name in ("v2", "v4", "v8")), 1)


def bits(type, count):
    vector = "" if count == 1 else f"v{count}."
    return f"{vector}b{bits_of(type)}"


@pytest.mark.parametrize("suffix", GLOBAL_LOADS)
def test_loads_from_global_memory(suffix):
    type, count = parts(suffix)
    size, regs = bits_of(type) // 8 * count, registers(type, count)
    for space in ("global.", "") if "." not in suffix else ("global.",):
        load, store = f"ld.{space}{suffix} {regs}, [%d20+{64 * size}];", f"st.global.{bits(type, count)} [%d21], {regs};"
        source, result = moved(load, store, type, count)
        np.testing.assert_array_equal(result.values[: 64 * size], source[64 * size : 128 * size])
        assert result.written.tolist() == [1] * 64 * size + [0] * 128 * size


@pytest.mark.parametrize("suffix", GLOBAL_STORES)
def test_stores_to_global_memory(suffix):
    type, count = parts(suffix)
    size, regs = bits_of(type) // 8 * count, registers(type, count)
    load = f"add.u64 %d21, %d21, {128 * size}; ld.global.{bits(type, count)} {regs}, [%d20];"
    source, result = moved(load, f"st.global.{suffix} [%d21-{64 * size}], {regs};", type, count)
    np.testing.assert_array_equal(result.values[64 * size : 128 * size], source[: 64 * size])
    assert result.written.tolist() == [0] * 64 * size + [1] * 64 * size + [0] * 64 * size


@pytest.mark.parametrize("suffix", SHARED)
def test_shared_memory(suffix):
    """Values go through another thread of the warp, by addresses of the space and by generic ones."""
    type, count = parts(suffix)
    size, regs = bits_of(type) // 8 * count, registers(type, count)
    for window in (False, True):
        at = "[%d13]" if window else "[%r101]"
        space = "" if window else "shared."
        body = f"""ld.global.{bits(type, count)} {regs}, [%d20]; cvt.u64.u32 %d12, %r101; cvta.shared.u64 %d13, %d12;
                   st.{space}{suffix} {at}, {regs}; bar.warp.sync -1;
                   xor.b32 %r103, %r100, 5; sub.u32 %r103, %r103, %r100; mad.lo.s32 %r101, %r103, {size}, %r101;
                   cvt.u64.u32 %d12, %r101; cvta.shared.u64 %d13, %d12; ld.{space}{suffix} {regs}, {at};"""
        source, result = moved(body, f"st.global.{bits(type, count)} [%d21], {regs};", type, count)
        want = source[: 64 * size].reshape(64, size)[np.arange(64) ^ 5]
        np.testing.assert_array_equal(result.values[: 64 * size], want.ravel())


@pytest.mark.parametrize("type, register", [
    *((type, "r") for type in ("s8", "s16", "u8", "u16", "b8")), *((type, "h") for type in ("s8", "u8")),
    *((type, "d") for type in ("s8", "s16", "s32", "u32", "b32")),
])  # fmt: skip
def test_loads_fill_a_wider_register_by_the_types_sign(type, register):
    bits, wide = bits_of(type), {"h": 16, "r": 32, "d": 64}[register]
    source, result = Input(random_bytes(32 * bits // 8)), Output(np.zeros(32, f"u{wide // 8}"))
    body = f"""mul.wide.u32 %d10, %r100, {bits // 8}; add.u64 %d20, %d20, %d10; ld.global.{type} %{register}0, [%d20];
               mul.wide.u32 %d10, %r100, {wide // 8}; add.u64 %d21, %d21, %d10; st.global.b{wide} [%d21], %{register}0;"""
    launch(body, [source, result])
    narrow = source.values.view(f"{'i' if type[0] == 's' else 'u'}{bits // 8}")
    np.testing.assert_array_equal(result.values, narrow.astype(f"i{wide // 8}").view(result.values.dtype))


PARAMETER_LOADS = "f32 s32 u32 u64 u8 v2.u32 v2.u64 v4.u32 b64 b32 u16 b16 b8 f64 s64 v4.b32 v2.b64 v4.f32 v2.f32 v4.u16".split()


@pytest.mark.parametrize("suffix", PARAMETER_LOADS)
def test_parameters(suffix):
    type, count = parts(suffix)
    size, regs = bits_of(type) // 8 * count, registers(type, count)
    given, result = random_bytes(48).tobytes(), Output(np.zeros(3 * size, np.uint8))
    before, behind = np.int32(-3), np.float32(1.5)
    names = [f"[p2+{16}]", f"[p2+{48 - size}]"]
    body = "".join(
        f"ld.param.{suffix} {regs}, {name}; st.global.{bits(type, count)} [%d20+{n * size}], {regs};" for n, name in enumerate(names)
    )
    body += f"""mov.b64 %d12, p2; cvta.param.u64 %d12, %d12; ld.{suffix} {regs}, [%d12];
                st.global.{bits(type, count)} [%d20+{2 * size}], {regs};"""
    launch(body, [result, before, given, behind], block=(1,))
    want = given[16 : 16 + size] + given[48 - size :] + given[:size]
    assert result.values.tobytes() == want


def test_parameters_of_different_sizes_lie_at_their_alignment():
    values = [np.uint8(7), np.int16(-9), np.int64(1 << 40), np.uint8(200), np.int32(-5)]
    result = Output(np.zeros(5, np.int64))
    body = ""
    for n, (value, register) in enumerate(zip(values, ("%r1", "%h1", "%d1", "%r1", "%r1"), strict=True)):
        type = f"{value.dtype.kind.replace('i', 's')}{8 * value.itemsize}"
        body += f"ld.param.{type} {register}, [p{n + 1}];"
        body += f"cvt.s64.{type if type[0] == 's' else 'u32'} %d1, {register}; st.global.s64 [%d20+{8 * n}], %d1;"
    launch(body, [result, *values], block=(1,))
    assert result.values.tolist() == values


def test_a_threads_own_memory():
    """Each thread has its own, at the same addresses; an index is known only when it runs."""
    result = Output(np.zeros(64, np.uint32))
    body = """mov.b64 %d1, depot; cvta.local.u64 %d2, %d1; st.local.v2.b32 [%d1], {%r100, 11}; st.b32 [%d2+8], 22;
                  st.local.b32 [depot+12], 33;
              and.b32 %r1, %r100, 3; mul.wide.u32 %d3, %r1, 4; add.u64 %d3, %d3, %d1; ld.local.b32 %r2, [%d3];
              mul.wide.u32 %d3, %r100, 4; add.u64 %d20, %d20, %d3; st.global.b32 [%d20], %r2;"""
    launch(body, [result], block=(64,), declare=".local .align 8 .b8 depot[16];")
    assert result.values.tolist() == [(n, 11, 22, 33)[n % 4] for n in range(64)]


@pytest.mark.parametrize("suffix", ["u32", "f32", "f64", "v2.f32", "v4.f32", "v2.u32", "v4.u32", "v2.f64"])
def test_a_threads_own_memory_of_each_type(suffix):
    type, count = parts(suffix)
    regs, bytes = registers(type, count), bits_of(type) // 8 * count
    load = f"ld.global.{bits(type, count)} {regs}, [%d20]; st.local.{suffix} [depot+{bytes}], {regs};"
    for n in range(count):
        load += f"mov.b{bits_of(type)} {registers(type, count).strip('{}').split(', ')[n]}, 0;"
    store = f"ld.local.{suffix} {regs}, [depot+{bytes}]; st.global.{bits(type, count)} [%d21], {regs};"
    source, result = moved(".local .align 16 .b8 depot[64];" + load, store, type, count)
    np.testing.assert_array_equal(result.values[: 64 * bytes], source[: 64 * bytes])


def test_static_shared_memory_lies_beside_the_dynamic():
    result = Output(np.zeros(3, np.uint32))
    body = """st.shared.b32 [dynamic+12], 3; st.shared.b8 [one], 1; st.shared.b32 [two+8], 2; mov.u32 %r1, two; add.u32 %r1, %r1, 8;
                  mov.u32 %r6, two+8;
              ld.shared.b32 %r2, [%r6]; ld.shared.b8 %r3, [one]; ld.shared.b32 %r4, [%r101+12]; ld.shared.b32 %r2, [%r1];
              st.global.b32 [%d20], %r3; st.global.b32 [%d20+4], %r2; st.global.b32 [%d20+8], %r4;"""
    launch(body, [result], block=(1,), shared=16, declare=".shared .align 1 .b8 one[5]; .shared .align 4 .b8 two[12];")
    assert result.values.tolist() == [1, 2, 3]


# ---- atomic operations: a lane after the other


@pytest.mark.parametrize("space", ["global", "shared", "shared::cta", ""])
@pytest.mark.parametrize("type", ["u32", "s32", "f32"])
def test_atomic_additions(type, space):
    dtype = np.dtype({"u": np.uint32, "s": np.int32, "f": np.float32}[type[0]])
    values = RNG.integers(-99, 99, 32).astype(dtype)
    given, olds, result = Input(values), Output(np.zeros(32, dtype)), Output(np.zeros(2, dtype))
    to = "%d22" if space in ("global", "") else "%r101"
    where, dot = space or "global", f".{space}" if space else ""
    body = f"""mul.wide.u32 %d10, %r100, 4; add.u64 %d20, %d20, %d10; add.u64 %d21, %d21, %d10; setp.eq.u32 %p1, %r100, 0;
               @%p1 st.{where}.v2.b32 [{to}], {{0, 0}}; ld.global.b32 %r1, [%d20]; atom{dot}.add.{type} %r2, [{to}], %r1;
               st.global.b32 [%d21], %r2; red{dot}.add.{type} [{to}+4], %r1;
               @%p1 ld.{where}.v2.b32 {{%r3, %r4}}, [{to}]; @%p1 st.global.v2.b32 [%d22], {{%r3, %r4}};"""
    launch(body, [given, olds, result], shared=16)
    sums = np.cumsum(values, dtype=dtype)
    np.testing.assert_array_equal(olds.values, [0, *sums[:-1]])
    assert result.values.tolist() == [sums[-1]] * 2


def test_atomic_additions_of_warps_do_not_race():
    result = Output(np.zeros(2, np.uint32))
    body = """setp.eq.u32 %p1, %r100, 0; @%p1 st.shared.b32 [%r101], 0; @%p1 st.global.b32 [%d20], 0; bar.sync 0;
              red.shared.add.u32 [%r101], %r100; atom.global.add.u32 %r1, [%d20], 2; bar.sync 0;
              @%p1 ld.shared.b32 %r1, [%r101]; @%p1 st.global.b32 [%d20+4], %r1;"""
    launch(body, [result], block=(96,), shared=16)
    assert result.values.tolist() == [192, 95 * 48]


def signed(bits, value):
    return (value + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)


# Of the bits of the old value and the operand: names and types, and the function that gives the new value, by the ISA's text.
ATOMICS = [
    ("and", ["b32", "b64"], lambda old, b, bits: old & b), ("or", ["b32", "b64"], lambda old, b, bits: old | b),
    ("xor", ["b32", "b64"], lambda old, b, bits: old ^ b), ("exch", ["b32", "b64"], lambda old, b, bits: b),
    ("add", ["u64"], lambda old, b, bits: (old + b) % (1 << bits)),
    ("min", ["u32", "u64"], lambda old, b, bits: min(old, b)), ("max", ["u32", "u64"], lambda old, b, bits: max(old, b)),
    ("min", ["s32", "s64"], lambda old, b, bits: min(old, b, key=lambda x: signed(bits, x))),
    ("max", ["s32", "s64"], lambda old, b, bits: max(old, b, key=lambda x: signed(bits, x))),
    ("inc", ["u32"], lambda old, b, bits: 0 if old >= b else old + 1),
    ("dec", ["u32"], lambda old, b, bits: b if old == 0 or old > b else old - 1),
    ("cas", ["b32", "b64"], lambda old, b, bits: b ^ 1 if old == b else old),
    ("add", ["f64"], lambda old, b, bits: int((np.uint64(old).view(np.float64) + np.uint64(b).view(np.float64)).view(np.uint64))),
    *(("add.noftz", [f"{type}x2"], lambda old, b, bits, dtype=dtype: int(
        np.add(np.uint32(old).reshape(1).view(dtype), np.uint32(b).reshape(1).view(dtype)).view(np.uint32)[0]
    )) for type, dtype in (("f16", np.float16), ("bf16", ml_dtypes.bfloat16))),
]  # fmt: skip


@pytest.mark.parametrize("space", ["global", "shared", ""])
@pytest.mark.parametrize("name, type, function", [(name, type, function) for name, types, function in ATOMICS for type in types])
def test_atomic_operations(name, type, function, space):
    """Lanes come one after the other; two places, of which the second is changed by red where there is one."""
    bits = 32 if type.endswith("x2") else int(type[1:])
    size, dtype = bits // 8, np.dtype(f"u{bits // 8}")
    values = RNG.integers(0, 1 << bits, 32, dtype=dtype) if type[0] != "f" else RNG.normal(size=32).view(np.uint64)
    if type.endswith("x2"):
        kind = np.float16 if type[0] == "f" else ml_dtypes.bfloat16
        values = RNG.normal(size=64).astype(kind).view(np.uint32)
    if name in ("inc", "dec"):
        values = RNG.integers(0, 5, 32).astype(dtype)
    if name == "cas":
        values = np.resize([0, 1, 5, 0], 32).astype(dtype)
    given, olds, result = Input(values), Output(np.zeros(32, dtype)), Output(np.zeros(2, dtype))
    to, reg = "%d22" if space != "shared" else "%r101", "r" if bits == 32 else "d"
    where, dot = space or "global", f".{space}" if space else ""
    if name == "cas":
        more, second = f", %{reg}6", f"xor.b{bits} %{reg}6, %{reg}1, 1;"
    else:
        more = second = ""
    red = f"red{dot}.{name}.{type} [{to}+{size}], %{reg}1;" if name not in ("exch", "cas") else ""
    body = f"""mul.wide.u32 %d10, %r100, {size}; add.u64 %d20, %d20, %d10; add.u64 %d21, %d21, %d10; setp.eq.u32 %p1, %r100, 0;
               @%p1 st.{where}.v2.b{bits} [{to}], {{0, 0}}; ld.global.b{bits} %{reg}1, [%d20]; {second}
               atom{dot}.{name}.{type} %{reg}2, [{to}], %{reg}1{more}; st.global.b{bits} [%d21], %{reg}2; {red}
               @%p1 ld.{where}.v2.b{bits} {{%{reg}3, %{reg}4}}, [{to}]; @%p1 st.global.v2.b{bits} [%d22], {{%{reg}3, %{reg}4}};"""
    launch(body, [given, olds, result], shared=16)
    states = [0]
    for value in values.tolist():
        states.append(function(states[-1], value, bits))
    assert olds.values.tolist() == states[:-1]
    assert result.values.tolist() == [states[-1], states[-1] if red else 0]


# ---- cp.async

COPIES = [("ca", 4), ("ca", 8), ("ca", 16), ("cg", 16)]


@both
@pytest.mark.parametrize("level, size", COPIES)
@pytest.mark.parametrize("hint", ["", ".L2::128B"])
def test_cp_async(level, size, late, hint):
    source, result = Input(random_bytes(32 * size)), Output(np.zeros(32 * size, np.uint8))
    type, count = {4: ("b32", 1), 8: ("b32", 2), 16: ("b32", 4)}[size]
    regs = registers(type, count)
    body = f"""mad.lo.u32 %r101, %r100, {size}, %r101; mul.wide.u32 %d10, %r100, {size}; add.u64 %d20, %d20, %d10; add.u64 %d21, %d21, %d10;
               cp.async.{level}.shared.global{hint} [%r101+16], [%d20], {size}; cp.async.commit_group; cp.async.wait_group 0;
               ld.shared.{bits(type, count)} {regs}, [%r101+16]; st.global.{bits(type, count)} [%d21], {regs};"""
    launch(body, [source, result], shared=32 * size + 16, late=late)
    np.testing.assert_array_equal(result.values, source.values)


@both
@pytest.mark.parametrize("level, size", COPIES)
def test_cp_async_fills_with_zeros_and_reads_no_more_than_it_is_told(level, size, late):
    """Lane n copies n % (size + 1) bytes, and the array ends behind them."""
    source, result = Input(random_bytes(32)), Output(np.zeros(32 * size, np.uint8))
    given = np.arange(32) % (size + 1)
    body = f"""mad.lo.u32 %r101, %r100, {size}, %r101; mul.wide.u32 %d10, %r100, {size}; add.u64 %d21, %d21, %d10;
               rem.u32 %r1, %r100, {size + 1}; setp.eq.u32 %p1, %r1, 0; @%p1 mov.b64 %d20, 0; @!%p1 add.u64 %d20, %d20, {32 - size};
               cp.async.{level}.shared.global [%r101], [%d20], {size}, %r1; cp.async.commit_group; cp.async.wait_all;"""
    for n in range(size // 4):
        body += f"ld.shared.b32 %r2, [%r101+{4 * n}]; st.global.b32 [%d21+{4 * n}], %r2;"
    launch(body, [source, result], shared=32 * size, late=late)
    want = np.where(np.arange(size) < given[:, None], source.values[32 - size :], 0)
    np.testing.assert_array_equal(result.values.reshape(32, size), want)


@both
def test_groups_of_cp_async_are_waited_for_in_order(late):
    """Each wait leaves as many of the four groups pending as it allows; one group is empty."""
    source, result = Input(RNG.integers(0, 1000, 4 * 32).astype(np.int32)), Output(np.zeros(3 * 32, np.int32))
    copy = "cp.async.ca.shared.global [%r101+{0}], [%d20+{0}], 4;"
    load = "ld.shared.b32 %r1, [%r101+{0}]; st.global.b32 [%d21+{0}], %r1;"
    body = f"""mad.lo.u32 %r101, %r100, 4, %r101; mul.wide.u32 %d10, %r100, 4; add.u64 %d20, %d20, %d10; add.u64 %d21, %d21, %d10;
               {copy.format(0)} cp.async.commit_group; {copy.format(128)} cp.async.commit_group; cp.async.commit_group; {copy.format(256)}
               cp.async.commit_group; cp.async.wait_group 0x3; {load.format(0)} cp.async.wait_group 2; {load.format(128)}
               cp.async.wait_group 0; {load.format(256)}"""
    launch(body, [source, result], shared=4 * 128, late=late)
    np.testing.assert_array_equal(result.values, source.values[:96])


@both
def test_what_a_warp_copied_others_read_behind_a_barrier(late):
    source, result = Input(random_bytes(64 * 4).view(np.int32)), Output(np.zeros(64, np.int32))
    body = """mad.lo.u32 %r101, %r100, 4, %r101; mul.wide.u32 %d10, %r100, 4; add.u64 %d20, %d20, %d10; add.u64 %d21, %d21, %d10;
              cp.async.ca.shared.global [%r101], [%d20], 4; cp.async.wait_all; bar.sync 0;
              xor.b32 %r1, %r100, 63; sub.u32 %r1, %r1, %r100; mad.lo.s32 %r101, %r1, 4, %r101; ld.shared.b32 %r2, [%r101];
              st.global.b32 [%d21], %r2;"""
    launch(body, [source, result], block=(64,), shared=256, late=late)
    np.testing.assert_array_equal(result.values, source.values[::-1])


def test_bfloat16_is_moved_by_its_bits():
    values = RNG.standard_normal(64).astype(ml_dtypes.bfloat16)
    result = Output(np.zeros(64, ml_dtypes.bfloat16))
    body = """mul.wide.u32 %d10, %r100, 4; add.u64 %d20, %d20, %d10; add.u64 %d21, %d21, %d10; ld.global.v2.b16 {%h1, %h2}, [%d20];
              st.global.v2.b16 [%d21], {%h2, %h1};"""
    launch(body, [Input(values), result])
    np.testing.assert_array_equal(result.values.reshape(-1, 2), values.reshape(-1, 2)[:, ::-1])


def test_what_is_not_wanted_of_a_vector_goes_nowhere():
    source, result = Input(np.arange(4, dtype=np.uint32) + 5), Output(np.zeros(2, np.uint32))
    launch("ld.global.v4.b32 {_, %r1, _, %r2}, [%d20]; st.global.v2.b32 [%d21], {%r2, %r1};", [source, result], block=(1,))
    assert result.values.tolist() == [8, 6]


def test_generic_addresses_and_those_of_a_space():
    source, result = Input(np.arange(4, dtype=np.uint32) + 5), Output(np.zeros(3, np.uint32))
    body = """cvta.to.global.u64 %d1, %d20; ld.global.b32 %r1, [%d1+4]; cvta.global.u64 %d2, %d1; ld.b32 %r2, [%d2+8];
              st.shared.b32 [%r101+4], 77; cvt.u64.u32 %d3, %r101; cvta.shared.u64 %d4, %d3; cvta.to.shared.u64 %d5, %d4;
              cvt.u32.u64 %r3, %d5;
              ld.shared.b32 %r3, [%r3+4]; st.global.b32 [%d21], %r1; st.global.b32 [%d21+4], %r2; st.global.b32 [%d21+8], %r3;"""
    launch(body, [source, result], block=(1,), shared=16)
    assert result.values.tolist() == [6, 7, 77]
