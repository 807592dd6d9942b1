"""Writes to registers from which a pending wgmma reads are found in machine code; our kernels have none, and refuse what Triton breaks."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("triton")

# ruff: noqa: E402
import test_conv
import test_matmul
import test_scaled_dot

import jaxext
from benchmarks import register_hazards
from benchmarks.kernel_problems import COMPILED
from jaxext.kernels import checks, conv, matmul, scaled

BF16, FP32 = ("bf16",) * 3, ("fp32",) * 3
# A loop of two steps: one group of two multiplications each, from R104 to R111 and from R112 to R119.
LOOP = """
WARPGROUP.ARRIVE
HGMMA.64x64x8.F32.TF32 R24, R104, gdesc[UR16], R24
HGMMA.64x64x8.F32.TF32 R24, R108, gdesc[UR20], R24, gsb0
WARPGROUP.DEPBAR.LE gsb0, 0x1
LDS.128 R112, [R3+UR17+0x8020]
LDS.128 R116, [R3+UR17+0x8030]
WARPGROUP.ARRIVE
HGMMA.64x64x8.F32.TF32 R24, R112, gdesc[UR16], R24
HGMMA.64x64x8.F32.TF32 R24, R116, gdesc[UR20], R24, gsb0
WARPGROUP.DEPBAR.LE gsb0, 0x1
LDS.128 R104, [R3+UR17+0x8040]
LDS.128 R108, [R3+UR17+0x8050]
@P0 BRA 0x0
EXIT
"""
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x1"
# What is replaced in the loop, by what, and the first register of each write to a factor then.
CHANGES = {
    "nothing": ("", "", set()),
    "a wait too weak": (f"{WAIT}\nLDS.128 R112", "WARPGROUP.DEPBAR.LE gsb0, 0x2\nLDS.128 R112", {"R112", "R116"}),
    "another wait": (f"{WAIT}\nLDS.128 R104", "WARPGROUP.DEPBAR.LE gsb1, 0x1\nLDS.128 R104", {"R104", "R108"}),
    "no wait": (f"{WAIT}\nLDS.128 R104", "LDS.128 R104", {"R104", "R108"}),
    "a stronger wait": (f"{WAIT}\nLDS.128 R112", "WARPGROUP.DEPBAR.LE gsb0, 0x0\nLDS.128 R112", set()),
    "a group that is not committed": (f", gsb0\n{WAIT}\nLDS.128 R104", "\nWARPGROUP.DEPBAR.LE gsb0, 0x0\nLDS.128 R104", {"R112", "R116"}),
    "a move": (f"{WAIT}\nLDS.128 R112", f"IMAD.MOV.U32 R111, RZ, RZ, R3\n{WAIT}\nLDS.128 R112", {"R111"}),
    "the first of two": ("LDS.128 R116", "LDS.64 R111", {"R111"}),
    "the last of four": ("LDS.128 R116", "LDS.128 R101", {"R104"}),
    "beside it": ("LDS.128 R116", "LDS.128 R100", set()),
    "a comparison": ("LDS.128 R116", "ISETP.GE.AND P1, PT, R104, 0x1, PT\nLDS.128 R116", set()),
    "a store": ("LDS.128 R116", "STS.128 [R3+UR17], R104\nLDS.128 R116", set()),
    "under a predicate": ("LDS.128 R116", "@!P2 F2FP.BF16.PACK_AB R105, R3, R4\nLDS.128 R116", {"R105"}),
}


def listing(lines: str) -> str:
    """Return the instructions in the format of cuobjdump."""
    return "\n".join(f"        /*{16 * n:04x}*/    {line} ;   /* 0x0 */" for n, line in enumerate(lines.strip().splitlines()))


@pytest.mark.parametrize("change", CHANGES)
def test_a_planted_hazard_is_found_and_its_mended_twin_has_none(change):
    old, new, written = CHANGES[change]
    assert old in LOOP
    found = register_hazards.scan(listing(LOOP.replace(old, new)))
    assert found.factors == 4
    assert {hazard.rpartition("writes ")[2].partition(",")[0] for hazard in found.hazards} == written


def test_a_hazard_of_the_second_time_around():
    """Nothing is pending when the loop is entered."""
    loop = """
    LDS.128 R104, [R3]
    HGMMA.64x64x16.F32.BF16 R24, R104, gdesc[UR16], R24, gsb0
    @P0 BRA 0x0
    WARPGROUP.DEPBAR.LE gsb0, 0x0
    EXIT
    """
    assert len(register_hazards.scan(listing(loop)).hazards) == 1
    assert not register_hazards.scan(listing(loop.replace("@P0 BRA 0x0", "NOP"))).hazards


def test_both_ways_of_a_branch_are_followed():
    """The wait lies on one of them."""
    code = """
    HGMMA.64x64x16.F32.BF16 R24, R104, gdesc[UR16], R24, gsb0
    @P0 BRA 0x30
    WARPGROUP.DEPBAR.LE gsb0, 0x0
    MOV R104, R3
    EXIT
    """
    assert len(register_hazards.scan(listing(code)).hazards) == 1
    assert not register_hazards.scan(listing(code.replace("@P0 BRA", "@P0 NOP"))).hazards
    assert not register_hazards.scan(listing(code.replace("R104, gdesc", "gdesc[UR12], gdesc"))).hazards


def product(role, left, right):
    return test_matmul.a_problem(role, (1, 512, 512, 512), (right, left, "fp32") if role == "nt" else (left, right, "fp32"), "tf32")


def convolution(role, *dtypes):
    return test_conv.a_problem(role, dtypes=dtypes)


def scaled_product(role, numbers):
    name = "scaled 4096 cubed in fp8, for w" if role == "tn" else "scaled 4096 cubed"
    return next(case for case in COMPILED if case.name == name).problem(role, numbers, 90)


def scaled_in_registers(role, slots, dtypes):
    return dataclasses.replace(test_scaled_dot.a_problem(role, slots, (64, 4, 64), (64,) * 3, dtypes), precision="tf32")


# kernel, problem -> the pair of which Triton 3.6 overwrites the left factor, by its machine code
BROKEN = {
    (matmul, product("nt", "bf16", "fp32")): "bf16 by fp32",
    (matmul, product("nt", "fp16", "fp32")): "fp16 by fp32",
    (matmul, product("nt", "fp8e5", "bf16")): "fp8e5 by bf16",
    (matmul, product("nn", "fp8e4nv", "bf16")): "fp8e4nv by bf16",
    (matmul, product("tn", "fp8e4nv", "fp16")): "fp8e4nv by fp16",
    (matmul, product("nn", "bf16", "fp32")): None,  # the right factor is turned, in registers
    (matmul, product("tn", "fp8e5", "fp32")): None,
    (matmul, product("nt", "fp16", "bf16")): None,  # both are converted
    (matmul, product("nt", "fp32", "bf16")): None,
    (matmul, product("nt", "bf16", "bf16")): None,
    (conv, convolution("fprop", "bf16", "fp32", "fp32")): "bf16 by fp32",
    (conv, convolution("fprop", "fp32", "bf16", "fp32")): None,
    (conv, convolution("dgrad", "bf16", "fp8e4nv", "bf16")): "fp8e4nv by bf16",
    (conv, convolution("dgrad", "fp32", "bf16", "fp32")): None,
    (conv, convolution("wgrad", "bf16", "fp8e4nv", "bf16")): "fp8e4nv by bf16",
    (conv, convolution("wgrad", "fp8e4nv", "bf16", "bf16")): None,
    (conv, convolution("wgrad", "fp32", "bf16", "fp32")): None,
    # the weight's gradient of fp8 activations and a bfloat16 cotangent; the forward product is of two fp8 factors
    (scaled, scaled_product("tn", "fp8 rows")): "fp8e4nv by bf16",
    (scaled, scaled_product("tn", "fp8 squares")): "fp8e4nv by bf16",
    (scaled, scaled_product("nn", "fp8 rows")): None,
    # a left factor that alone is scaled in registers
    (scaled, scaled_in_registers("nn", "x", BF16)): "bf16 by bf16",
    (scaled, scaled_in_registers("nt", "y", FP32)): "fp32 by fp32",
    (scaled, scaled_in_registers("nn", "x", FP32)): None,
    (scaled, scaled_in_registers("nn", "w", BF16)): None,
    (scaled, scaled_in_registers("nn", "xw", BF16)): None,
    (scaled, scaled_in_registers("nn", "x", ("bf16", "i8", "bf16"))): None,
    (scaled, scaled_in_registers("nn", "x", ("bf16", "bf16", "fp32"))): None,
}


@pytest.mark.parametrize(("kernel", "problem"), BROKEN, ids=lambda of: f"{of.name}-{'-'.join(of.dtypes)}" if hasattr(of, "dtypes") else "")
def test_problems_that_an_old_triton_breaks_are_refused(kernel, problem, monkeypatch):
    refuses = lambda **changes: kernel.refuses(dataclasses.replace(problem, **changes))
    for version in ((3, 6, 0), (3, 7, 1)):
        monkeypatch.setattr(checks, "triton_version", lambda version=version: version)
        pair = BROKEN[kernel, problem]
        reason = refuses()
        assert reason is None if pair is None else f"{pair} on compute capability 9.0, where Triton 3." in reason
        assert refuses(arch=100) is None
        assert refuses(precision="ieee") is None or "fp32" not in problem.dtypes[:2]
    monkeypatch.setattr(checks, "triton_version", lambda: (3, 8, 0))
    assert refuses() is None


def test_a_refused_pair_is_told(monkeypatch):
    monkeypatch.setattr(checks, "triton_version", lambda: (3, 6, 0))
    x, w = (jax.ShapeDtypeStruct((64, 64), dtype) for dtype in (jnp.float8_e4m3fn, jnp.bfloat16))
    matmul_of_two = lambda x, w: jaxext.matmul(x, w, preferred_element_type=jnp.float32, implementation="triton")
    with jaxext.use_target("sm_90a"):
        (row,) = jaxext.explain(matmul_of_two, platform="cuda")(x, w).rows
    assert row.chosen is None and "overwrites factors that are being read: want 3.8 or newer" in row.refused["triton"]
