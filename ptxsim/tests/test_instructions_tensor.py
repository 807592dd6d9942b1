"""Matrix instructions against numpy's products: ldmatrix and stmatrix, mma.sync, and wgmma with each way that a descriptor tells."""

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from ptxsim import LATE, Input, Output
from snippets import both, launch

RNG = np.random.default_rng(0)
DTYPES = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "tf32": np.float32,
    "f32": np.float32,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "s8": np.int8,
    "u8": np.uint8,
    "s32": np.int32,
}


def some(shape, type, most=4):
    return RNG.integers(0 if type[0] == "u" else -most, most + 1, shape).astype(DTYPES[type])


def product(a, b):
    """Return the product of (M, K) and (N, K) in float64."""
    return a.astype(np.float64) @ b.astype(np.float64).T


def braces(register, first, count):
    return "{" + ", ".join(f"{register}{n}" for n in range(first, first + count)) + "}"


# ---- ldmatrix and stmatrix: 8 x 8 matrices of 16-bit numbers, of which lane l holds two neighbours of row l // 4


def held(matrix):
    """(8, 8) to (32, 2)."""
    return matrix.reshape(32, 2)


@pytest.mark.parametrize("trans", [False, True], ids=["", "trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("order", ["m8n8.x{0}", "x{0}.m8n8"])
def test_ldmatrix(count, trans, order):
    """Rows lie in any order; lanes whose addresses are not wanted have none."""
    rows = RNG.integers(0, 1 << 16, (8 * count, 8)).astype(np.uint16)
    places = RNG.permutation(8 * count)
    image = np.zeros_like(rows)
    image[places] = rows
    addresses = np.full(32, 1 << 20, np.uint32)
    addresses[: 8 * count] = 16 * places
    result = Output(np.zeros((32, count, 2), np.uint16))
    body = f"""mul.wide.u32 %d1, %r100, 16; add.u64 %d2, %d20, %d1; setp.lt.u32 %p1, %r100, {8 * count}; mad.lo.u32 %r1, %r100, 16, %r101;
               @%p1 ld.global.v4.b32 {{%r2, %r3, %r4, %r5}}, [%d2]; @%p1 st.shared.v4.b32 [%r1+32], {{%r2, %r3, %r4, %r5}};
               mul.wide.u32 %d1, %r100, 4; add.u64 %d2, %d21, %d1; ld.global.b32 %r6, [%d2]; add.u32 %r6, %r6, %r101; bar.warp.sync -1;
               ldmatrix.sync.aligned.{order.format(count)}{".trans" if trans else ""}.shared.b16 {braces("%r", 10, count)}, [%r6+32];
               mul.wide.u32 %d1, %r100, {4 * count}; add.u64 %d2, %d22, %d1;"""
    body += "".join(f"st.global.b32 [%d2+{4 * n}], %r{10 + n};" for n in range(count))
    launch(body, [Input(image), Input(addresses), result], shared=128 * count + 32)
    for n, matrix in enumerate(rows.reshape(count, 8, 8)):
        np.testing.assert_array_equal(result.values[:, n], held(matrix.T.copy() if trans else matrix))


@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("order", ["m8n8.x{0}{1}", "x{0}{1}.m8n8"])  # as compilers have them, and as CUTLASS does
def test_stmatrix(count, trans, order):
    registers = RNG.integers(0, 1 << 16, (32, count, 2)).astype(np.uint16)
    places = RNG.permutation(32)
    result = Output(np.zeros((32, 8), np.uint16))
    opcode = f"stmatrix.sync.aligned.{order.format(count, trans)}.shared.b16"
    body = f"mul.wide.u32 %d1, %r100, {4 * count}; add.u64 %d2, %d20, %d1;"
    body += "".join(f"ld.global.b32 %r{10 + n}, [%d2+{4 * n}];" for n in range(count))
    body += f"""mul.wide.u32 %d1, %r100, 4; add.u64 %d2, %d21, %d1; ld.global.b32 %r6, [%d2]; mad.lo.u32 %r7, %r6, 16, %r101;
                {opcode} [%r7+16], {braces("%r", 10, count)}; setp.lt.u32 %p1, %r100, {8 * count};
                @%p1 ld.shared.v4.b32 {{%r2, %r3, %r4, %r5}}, [%r7+16]; mul.wide.u32 %d1, %r100, 16; add.u64 %d2, %d22, %d1;
                @%p1 st.global.v4.b32 [%d2], {{%r2, %r3, %r4, %r5}};"""
    launch(body, [Input(registers), Input(places.astype(np.uint32)), result], shared=16 * 32 + 16)
    for n in range(count):
        found = result.values[8 * n : 8 * n + 8]
        np.testing.assert_array_equal(held(found.T.copy() if trans else found), registers[:, n])


# ---- mma.sync: the ISA's tables of who holds what, for element i of a lane's; g is lane // 4 and t is lane % 4

FRAGMENTS = {  # bits, K -> rows and columns of A, and rows of B, whose column is g
    (16, 16): (lambda i: 8 * (i in (2, 3, 6, 7)), lambda i, t: 2 * t + i % 2 + 8 * (i >= 4), lambda i, t: 2 * t + i % 2 + 8 * (i >= 2)),
    (16, 8): (lambda i: 8 * (i >= 2), lambda i, t: 2 * t + i % 2, lambda i, t: 2 * t + i),
    (32, 8): (lambda i: 8 * (i % 2), lambda i, t: t + 4 * (i >= 2), lambda i, t: t + 4 * i),
    (32, 4): (lambda i: 8 * i, lambda i, t: t, lambda i, t: t),
    (8, 32): (
        lambda i: 8 * (i in (4, 5, 6, 7, 12, 13, 14, 15)),
        lambda i, t: 4 * t + i % 4 + 16 * (i >= 8),
        lambda i, t: 4 * t + i % 4 + 16 * (i >= 4),
    ),
    (8, 16): (lambda i: 8 * (i >= 4), lambda i, t: 4 * t + i % 4, lambda i, t: 4 * t + i),
}


def registers_of_a(a):
    """(16, K) to (32, registers)."""
    k = a.shape[1]
    down, across, _ = FRAGMENTS[8 * a.itemsize, k]
    rows = [[a[lane // 4 + down(i), across(i, lane % 4)] for i in range(16 * k // 32)] for lane in range(32)]
    return np.array(rows).astype(a.dtype).view(np.uint32)


def registers_of_b(b):
    """(8, K) to (32, registers)."""
    k = b.shape[1]
    *_, down = FRAGMENTS[8 * b.itemsize, k]
    return np.array([[b[lane // 4, down(i, lane % 4)] for i in range(8 * k // 32)] for lane in range(32)]).astype(b.dtype).view(np.uint32)


def of_sum(c):
    """(16, 8) to (32, 4) and, by the same places, back."""
    return np.array([[(lane // 4 + 8 * (i // 2)) * 8 + lane % 4 * 2 + i % 2 for i in range(4)] for lane in range(32)])


def run_mma(opcode, a, b, c):
    """Return the result of the instruction for (16, K), (8, K) and (16, 8)."""
    places = of_sum(c)
    held_c = c.ravel()[places].view(np.uint32)
    inputs = [registers_of_a(a), registers_of_b(b), held_c]
    result = Output(np.zeros_like(held_c))
    body = ""
    for n, values in enumerate(inputs):
        each = values.shape[1]
        body += f"mul.wide.u32 %d1, %r100, {4 * each}; add.u64 %d2, %d{20 + n}, %d1;"
        body += "".join(f"ld.global.b32 %r{10 * n + m}, [%d2+{4 * m}];" for m in range(each))
    sums = held_c.shape[1]
    a_registers, b_registers = (inputs[n].shape[1] for n in (0, 1))
    body += f"{opcode} {braces('%r', 30, sums)}, {braces('%r', 0, a_registers)}, {braces('%r', 10, b_registers)}, {braces('%r', 20, sums)};"
    body += f"mul.wide.u32 %d1, %r100, {4 * sums}; add.u64 %d2, %d23, %d1;"
    body += "".join(f"st.global.b32 [%d2+{4 * m}], %r{30 + m};" for m in range(sums))
    launch(body, [*map(Input, inputs), result])
    found = np.zeros(c.size, c.dtype)
    found[places.ravel()] = result.values.view(c.dtype).ravel()
    return found.reshape(c.shape)


MMA = [  # K, sum, A, B
    *((k, "f32", type, type) for k in (16, 8) for type in ("f16", "bf16")),
    *((k, "f16", "f16", "f16") for k in (16, 8)),
    *((k, "f32", "tf32", "tf32") for k in (8, 4)),
    *((32, "f32", a, b) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")),
    *((k, "s32", a, b) for k in (32, 16) for a in ("s8", "u8") for b in ("s8", "u8")),
]


def mma(k, sum, a, b, flag=""):
    return f"mma.sync.aligned.m16n8k{k}.row.col{flag}.{sum}.{a}.{b}.{sum}"


@pytest.mark.parametrize("k, sum, of_a, of_b", MMA)
def test_mma(k, sum, of_a, of_b):
    a, b, c = some((16, k), of_a), some((8, k), of_b), some((16, 8), sum, 100)
    want = (product(a, b) + c.astype(np.float64)).astype(c.dtype)
    for flag in ("", ".satfinite") if sum == "s32" else ("",):
        np.testing.assert_array_equal(run_mma(mma(k, sum, of_a, of_b, flag), a, b, c), want)
    if sum == "f32":
        a, b, c = (RNG.standard_normal(x.shape).astype(x.dtype) for x in (a, b, c))
        if of_a == "tf32":  # 10 bits of the mantissa
            a, b = ((x.view(np.uint32) & 0xFFFFE000).view(np.float32) for x in (a, b))
        want = (product(a, b) + c.astype(np.float64)).astype(np.float32)
        np.testing.assert_allclose(run_mma(mma(k, sum, of_a, of_b), a, b, c), want, rtol=2**-23)


def test_mma_of_tf32_reads_no_more_than_19_bits():
    a, b, c = (some(shape, "f32", 1000) + np.float32(0.5) for shape in ((16, 8), (8, 8), (16, 8)))
    dirty = [(x.view(np.uint32) | RNG.integers(0, 1 << 13, x.shape, dtype=np.uint32)).view(np.float32) for x in (a, b)]
    clean = [(x.view(np.uint32) & 0xFFFFE000).view(np.float32) for x in (a, b)]
    want = (product(*clean) + c).astype(np.float32)
    np.testing.assert_array_equal(run_mma(mma(8, "f32", "tf32", "tf32"), dirty[0], dirty[1], c), want)


@pytest.mark.parametrize("a, b, limit", [(-128, -128, 2**31 - 1), (-128, 127, -(2**31))])
def test_mma_of_integers_saturates_or_wraps(a, b, limit):
    a, b = np.full((16, 32), a, np.int8), np.full((8, 32), b, np.int8)
    c = np.full((16, 8), limit - np.sign(limit) * 1000, np.int32)
    assert (run_mma(mma(32, "s32", "s8", "s8", ".satfinite"), a, b, c) == limit).all()
    wrapped = (product(a, b) + c.astype(np.float64)).astype(np.int64).astype(np.int32)
    np.testing.assert_array_equal(run_mma(mma(32, "s32", "s8", "s8"), a, b, c), wrapped)


def test_mma_passes_infinity_and_nan_on():
    a, b, c = (np.zeros(shape, np.float16) for shape in ((16, 16), (8, 16), (16, 8)))
    a[3, 5], b[2, 5], a[9, 1], c[0, 0] = np.inf, 2, np.nan, -np.inf
    found = run_mma(mma(16, "f32", "f16", "f16"), a, b, c.astype(np.float32))
    assert found[3, 2] == np.inf and np.isnan(found[3, [0, 1, 3, 4, 5, 6, 7]]).all() and np.isnan(found[9]).all() and found[0, 0] == -np.inf
    assert np.isfinite(found[[1, 2, 4, 5, 6, 7, 8, *range(10, 16)]]).all()


# ---- wgmma


@dataclasses.dataclass(frozen=True)
class Layout:
    """A layout of `rows` x K matrices in shared memory.  `turned`: rows are contiguous (MN-major).  `swizzle`: bytes of a swizzled row.

    The pictures of the ISA's "Asynchronous Warpgroup Level Matrix Shared Memory Layout": bricks of 8 lines of `swizzle` bytes, in which
    16-byte chunks change places by the line; or of 8 lines of 16 bytes without a swizzle.
    """

    swizzle: int = 128
    turned: bool = False
    apart: int = 1  # how many bricks' room a brick takes

    def image(self, matrix):
        """Bytes, and the offsets `leading` and `stride` of the descriptor."""
        rows, k = matrix.shape
        lines, line = (k, rows * matrix.itemsize) if self.turned else (rows, k * matrix.itemsize)  # contiguous along a line
        bytes = np.ascontiguousarray(matrix.T if self.turned else matrix).view(np.uint8).reshape(lines, line)
        wide = self.swizzle or 16
        brick = 8 * wide * self.apart
        down, across = lines // 8, -(-line // wide)
        if self.swizzle or not self.turned:  # bricks first go down the lines
            by_lines, by_width = brick, brick * down
        else:
            by_lines, by_width = brick * across, brick
        made = RNG.integers(0, 256, brick * down * across, dtype=np.uint8)
        turns = {0: 0, 32: 4, 64: 2, 128: 1}[self.swizzle]  # lines after which the chunks' order changes
        for at in range(lines):
            for chunk in range(line // 16):
                place = chunk % (wide // 16)
                if turns:
                    place ^= at % 8 // turns
                to = at // 8 * by_lines + chunk // (wide // 16) * by_width + at % 8 * wide + place * 16
                made[to : to + 16] = bytes[at, 16 * chunk : 16 * chunk + 16]
        if not self.turned:
            return made, by_width, by_lines
        return (made, by_width, by_lines) if self.swizzle else (made, by_lines, by_width)

    def step(self, image, k_bytes, k):
        """Return the offset from a product's start to that of the next one, K further."""
        _, leading, stride = image
        if self.turned:
            return k // 8 * (stride if self.swizzle else leading)
        if not self.swizzle:
            return 2 * leading
        return k_bytes if self.swizzle > k_bytes else leading

    def descriptor(self, image):
        """All but the address."""
        _, leading, stride = image
        return (leading >> 4) << 16 | (stride >> 4) << 32 | {0: 0, 128: 1, 64: 2, 32: 3}[self.swizzle] << 62


def wgmma(
    sum, of_a, of_b, n, *, a: Any = Layout(), b=Layout(), steps=1, keep=True, signs=(1, 1), late=LATE, matrices=None, flag="", waits=0
):
    """Runs `steps` products of 64 x K and K x n (`a` None: A in registers) and checks the sum."""
    size = np.dtype(DTYPES[of_a]).itemsize
    k = 32 // size
    left, right, c = matrices or (some((64, k * steps), of_a), some((n, k * steps), of_b), some((64, n), sum, 50))
    places = np.array(
        [  # thread, element -> row, column
            [(t // 32 * 16 + t % 32 // 4 + 8 * (i // 2 % 2)) * n + i // 4 * 8 + t % 4 * 2 + i % 2 for i in range(n // 2)]
            for t in range(128)
        ]
    )
    held_c = c.ravel()[places].view(np.uint32)
    count = held_c.shape[1]
    image_b = b.image(right)
    b_at = 0
    arrays = [Input(held_c), Output(np.zeros_like(held_c))]
    pieces = [image_b[0]]
    if a:
        image_a = a.image(left)
        b_at = -(-len(image_a[0]) // 1024) * 1024
        pieces = [np.resize(image_a[0], b_at), image_b[0]]
    else:
        fragments = [np.stack([registers_of_a(left[16 * w : 16 * w + 16, k * s : k * s + k]) for w in range(4)]) for s in range(steps)]
        arrays.append(Input(np.concatenate(fragments, axis=-1).reshape(128, 4 * steps)))
    shared = np.concatenate(pieces)
    shared = np.resize(shared, -(-len(shared) // 2048) * 2048)
    arrays.insert(0, Input(shared))

    body = f"""mov.u32 %r1, %r100; copy: mul.wide.u32 %d1, %r1, 16; add.u64 %d2, %d20, %d1; mad.lo.u32 %r2, %r1, 16, %r101;
               ld.global.v4.b32 {{%r3, %r4, %r5, %r6}}, [%d2]; st.shared.v4.b32 [%r2], {{%r3, %r4, %r5, %r6}}; add.u32 %r1, %r1, 128;
               setp.lt.u32 %p1, %r1, {len(shared) // 16}; @%p1 bra copy; fence.proxy.async.shared::cta; bar.sync 0;
               mul.wide.u32 %d1, %r100, {4 * count}; add.u64 %d2, %d21, %d1; add.u64 %d3, %d22, %d1;"""
    body += "".join(f"ld.global.b32 %c{m}, [%d2+{4 * m}];" for m in range(count))
    if not a:
        body += f"mul.wide.u32 %d1, %r100, {16 * steps}; add.u64 %d2, %d23, %d1;"
        body += "".join(f"ld.global.b32 %a{m}, [%d2+{4 * m}];" for m in range(4 * steps))
    body += f"""shr.u32 %r7, %r101, 4; cvt.u64.u32 %d4, %r7; setp.{"eq" if keep else "ne"}.u32 %p2, 0, 0; wgmma.fence.sync.aligned;"""
    opcode = f"wgmma.mma_async.sync.aligned.m64n{n}k{k}{flag}.{sum}.{of_a}.{of_b}"
    for s in range(steps):
        b_bits = b.descriptor(image_b) + ((b_at + s * b.step(image_b, 32, k)) >> 4)
        body += f"add.u64 %d5, %d4, {b_bits};"
        operand_a = braces("%a", 4 * s, 4)
        if a:
            body += f"add.u64 %d6, %d4, {a.descriptor(image_a) + (s * a.step(image_a, 32, k) >> 4)};"
            operand_a = "%d6"
        rest = [] if sum == "s32" else [*signs]
        if size == 2:
            rest += [int(layout.turned) for layout in ([a, b] if a else [b])]
        scale = "%p2" if s == 0 else "1" if not isinstance(keep, str) else keep
        body += f"{opcode} {braces('%c', 0, count)}, {', '.join([operand_a, '%d5', scale, *map(str, rest)])};"
    body += f"wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned {waits};"
    body += "".join(f"st.global.b32 [%d3+{4 * m}], %c{m};" for m in range(count))
    launch(body, arrays, block=(128,), shared=len(shared), late=late, declare=".reg .b32 %c<128>; .reg .b32 %a<16>;")
    found = np.zeros(c.size, c.dtype)
    found[places.ravel()] = arrays[2].values.view(c.dtype).ravel()
    want = product(left, right) * signs[0] * signs[1] + (c.astype(np.float64) if keep else 0)
    if flag:
        want = np.clip(want, -(2.0**31), 2.0**31 - 1)
    np.testing.assert_array_equal(found.reshape(c.shape), want.astype(c.dtype))


PAIRS = [
    *(("f32", type, type) for type in ("f16", "bf16", "tf32")),
    *(("f32", a, b) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")),
    ("f16", "f16", "f16"),
    ("f16", "e4m3", "e5m2"),
    *(("s32", a, b) for a in ("s8", "u8") for b in ("s8", "u8")),
]
WIDTHS = (8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 240, 256)
OF_KERNELS = (16, 32, 64, 128, 256)  # Triton's


@pytest.mark.parametrize("sum, of_a, of_b", PAIRS)
@pytest.mark.parametrize("in_registers", [False, True], ids=["shared", "registers"])
def test_wgmma_of_all_types_and_widths(sum, of_a, of_b, in_registers):
    """Widths beyond those of kernels for a few."""
    widths = WIDTHS if (of_a, in_registers) in (("bf16", False), ("f16", True)) else (*OF_KERNELS, *[192] * (of_a == "tf32"))
    for n in [n for n in widths if sum != "s32" or n in (8, 16, 24, 32) or n % 16 == 0]:
        wgmma(sum, of_a, of_b, n, a=None if in_registers else Layout(), late=n % 64 == 0)


SWIZZLES = (0, 32, 64, 128)
LAYOUTS = [Layout(swizzle, turned, apart) for swizzle in SWIZZLES for turned in (False, True) for apart in (1, 2)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: f"{x.swizzle}{'-turned' * x.turned}{'-apart' * (x.apart > 1)}")
@pytest.mark.parametrize("which", ["a", "b"])
def test_wgmma_of_each_layout(which, layout):
    """Two products, the second further along K.  Only 16-bit numbers can be turned."""
    other = {"a": "b", "b": "a"}[which]
    for type in ("bf16", "f16") if layout.turned else ("f16", "tf32", "e4m3"):
        wgmma("f32", type, type, 64, steps=2, **{which: layout, other: Layout(128)}, late=type == "f16")


@pytest.mark.parametrize(
    "a, b",
    [
        (Layout(s, t), Layout(u, v))
        for s, t, u, v in ((128, True, 128, True), (64, True, 32, False), (0, False, 0, True), (32, False, 64, True), (0, True, 0, False))
    ],
)
def test_wgmma_of_two_layouts(a, b):
    wgmma("f32", "bf16", "bf16", 128, a=a, b=b, steps=2)


@both
@pytest.mark.parametrize("b", [Layout(128), Layout(128, True), Layout(64), Layout(0, True)])
def test_wgmma_with_a_in_registers(b, late):
    wgmma("f32", "bf16", "bf16", 64, a=None, b=b, steps=4 if b.turned else 2, late=late)


@both
@pytest.mark.parametrize("signs", [(1, -1), (-1, 1), (-1, -1)])
@pytest.mark.parametrize("keep", [True, False], ids=["adds", "begins"])
def test_wgmma_negates_and_begins_anew(signs, keep, late):
    wgmma("f32", "f16", "f16", 32, signs=signs, keep=keep, late=late)
    wgmma("f32", "tf32", "tf32", 32, signs=signs, keep=keep, late=late, steps=2)
    wgmma("s32", "s8", "s8", 32, keep=keep, late=late)


def test_wgmma_of_integers_saturates():
    c = np.full((64, 16), 2**31 - 1000, np.int32) * np.where(np.arange(16) % 2, 1, -1).astype(np.int32)
    left, right = (
        np.full((64, 32), 127, np.int8),
        np.full((16, 32), 127, np.int8) * np.where(np.arange(16) % 2, 1, -1).astype(np.int8)[:, None],
    )
    wgmma("s32", "s8", "s8", 16, matrices=(left, right, c), flag=".satfinite")


@both
def test_groups_of_wgmma_end_in_order(late):
    """Two products with sums of their own: the first is known when one group may still be under way."""
    values = Input(np.ones(64 * 16, ml_dtypes.bfloat16))
    result = Output(np.zeros((128, 2), np.float32))
    multiply = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%f{0}, %f{1}, %f{2}, %f{3}}}, %d5, %d5, 0, 1, 1, 0, 0;"
    body = f"""mul.wide.u32 %d1, %r100, 16; add.u64 %d2, %d20, %d1; mad.lo.u32 %r2, %r100, 16, %r101;
               ld.global.v4.b32 {{%r3, %r4, %r5, %r6}}, [%d2]; st.shared.v4.b32 [%r2], {{%r3, %r4, %r5, %r6}};
               fence.proxy.async; bar.sync 0; shr.u32 %r7, %r101, 4; cvt.u64.u32 %d4, %r7; add.u64 %d5, %d4, {8 << 16 | 16 << 32};
               wgmma.fence.sync.aligned; {multiply.format(0, 1, 2, 3)} wgmma.commit_group.sync.aligned; {multiply.format(4, 5, 6, 7)}
               wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 1; mul.wide.u32 %d1, %r100, 8; add.u64 %d2, %d21, %d1;
               st.global.f32 [%d2], %f3; wgmma.wait_group.sync.aligned 0; st.global.f32 [%d2+4], %f4;"""
    launch(body, [values, result], block=(128,), shared=2048, late=late)
    assert (result.values == 16).all()
