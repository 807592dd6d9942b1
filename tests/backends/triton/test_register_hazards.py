"""Writes to registers from which a pending wgmma reads are found in machine code; our kernels have none, and refuse what Triton breaks."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("triton")

# ruff: noqa: E402
import test_conv
import test_matmul

import jaxext
from jaxext.benchmarks import compiled, compiled_cuda, register_hazards
from jaxext.benchmarks.compiled_problems import COMPILED, KERNELS
from jaxext.kernels import checks, conv, matmul, scaled

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
    """As cuobjdump prints it."""
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


# (role, left factor, right factor) -> whether Triton 3.6 overwrites it, by its machine code
PAIRS = {
    ("nt", "bf16", "fp32"): True,
    ("nt", "fp16", "fp32"): True,
    ("nt", "fp8e5", "bf16"): True,
    ("nn", "fp8e4nv", "bf16"): True,
    ("tn", "fp8e4nv", "fp16"): True,
    ("nn", "bf16", "fp32"): False,  # the right factor is turned, in registers
    ("tn", "fp8e5", "fp32"): False,
    ("nt", "fp16", "bf16"): False,  # both are converted
    ("nt", "fp32", "bf16"): False,
    ("nt", "bf16", "bf16"): False,
}


def product(role, left, right, **changes):
    dtypes = (right, left, "fp32") if role == "nt" else (left, right, "fp32")
    return dataclasses.replace(test_matmul.a_problem(role, (1, 512, 512, 512), dtypes, "tf32"), **changes)


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_pairs_that_an_old_triton_breaks_are_refused(pair, monkeypatch):
    for version in ((3, 6, 0), (3, 7, 1)):
        monkeypatch.setattr(checks, "triton_version", lambda version=version: version)
        reason = matmul.supports(product(*pair))
        assert bool(reason) == PAIRS[pair]
        assert not reason or f"{pair[1]} by {pair[2]} on compute capability 9.0, where Triton 3." in reason
        assert matmul.supports(product(*pair, arch=100)) is None
        assert matmul.supports(product(*pair, precision="ieee")) is None or "fp32" not in pair
    monkeypatch.setattr(checks, "triton_version", lambda: (3, 8, 0))
    assert matmul.supports(product(*pair)) is None


@pytest.mark.parametrize(
    ("role", "dtypes", "refused"),
    [
        ("fprop", ("bf16", "fp32", "fp32"), True),
        ("fprop", ("fp32", "bf16", "fp32"), False),
        ("dgrad", ("bf16", "fp8e4nv", "bf16"), True),
        ("dgrad", ("fp32", "bf16", "fp32"), False),
        ("wgrad", ("bf16", "fp8e4nv", "bf16"), True),
        ("wgrad", ("fp8e4nv", "bf16", "bf16"), False),
        ("wgrad", ("fp32", "bf16", "fp32"), False),
    ],
)
def test_convolutions_that_an_old_triton_breaks_are_refused(role, dtypes, refused, monkeypatch):
    monkeypatch.setattr(checks, "triton_version", lambda: (3, 6, 0))
    assert ("overwrites" in (conv.supports(test_conv.a_problem(role, dtypes=dtypes)) or "")) == refused


def test_scaled_products_that_an_old_triton_breaks_are_refused(monkeypatch):
    """The weight's gradient of fp8 activations and a bfloat16 cotangent; the forward product is of two fp8 factors."""
    (case,) = (case for case in COMPILED if case.name == "scaled 4096 cubed in fp8, for w")
    problems = [case.problem("tn", numbers, 90) for numbers in case.numbers]
    monkeypatch.setattr(checks, "triton_version", lambda: (3, 7, 1))
    assert all("overwrites factors" in (scaled.supports(problem) or "") for problem in problems)
    assert scaled.supports(case.problem("nn", "fp8 rows", 90)) is None
    monkeypatch.setattr(checks, "triton_version", lambda: (3, 8, 0))
    assert not any(map(scaled.supports, problems))


def test_a_refused_pair_is_told(monkeypatch):
    monkeypatch.setattr(checks, "triton_version", lambda: (3, 6, 0))
    x, w = (jax.ShapeDtypeStruct((64, 64), dtype) for dtype in (jnp.float8_e4m3fn, jnp.bfloat16))
    matmul_of_two = lambda x, w: jaxext.matmul(x, w, preferred_element_type=jnp.float32, implementation="triton")
    with jaxext.use_target("sm_90a"):
        (row,) = jaxext.explain(matmul_of_two, x, w, platform="cuda").rows
    assert row.chosen is None and "overwrites factors that are being read: want 3.8 or newer" in row.refused["triton"]


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_no_kernel_of_triton_has_a_hazard(kernel, capsys):
    if reason := compiled.missing():
        pytest.skip(reason)
    assert register_hazards.main(["--kernel", kernel]) == 0, capsys.readouterr().out


@pytest.mark.slow
def test_no_compiled_cuda_kernel_has_a_hazard(capsys):
    if reason := compiled_cuda.missing():
        pytest.skip(reason)
    assert register_hazards.main(["--module", str(compiled_cuda.own())]) == 0, capsys.readouterr().out
    assert " 0 with left factors" not in capsys.readouterr().out
