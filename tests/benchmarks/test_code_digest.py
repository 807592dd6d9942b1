"""The record of verified kernels follows the code: it outlives moves and new names, and no change of what is computed."""

import datetime
import importlib.util
from unittest import mock

import pytest
from msgspec.structs import replace

from benchmarks import record
from jaxext.bench import code_digest, shipping
from jaxext.tables import environment, table_file
from jaxext.tables.table_format import Context, Entry, Verified

triton = pytest.importorskip("triton")

DAY = datetime.date(2026, 11, 26)
KERNEL = """
import triton
import triton.language as tl

@triton.jit
def scaled_copy(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    tl.store(y_ptr + at, x * 2 + 1)
"""


def ptx(path, source, name):
    """The PTX of a kernel in a file of its own, for an H100."""
    from jaxext.bench.triton_ptx import without_cubin

    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    signature = {"x_ptr": "*fp32", "y_ptr": "*fp32", "BLOCK": "constexpr"}
    made = triton.compiler.ASTSource(getattr(module, name), signature, constexprs={(2,): 128})
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    with mock.patch.object(triton.knobs.runtime, "add_stages_inspection_hook", without_cubin):
        return str(triton.compile(made, target=target, options={"enable_fp_fusion": True}).asm["ptx"])


def test_a_kernel_that_is_moved_and_renamed_keeps_its_digest(tmp_path, monkeypatch):
    """One that computes something else has another."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    renamed = KERNEL.replace("scaled_copy", "copy_of_twice")
    before = ptx(tmp_path / "a.py", KERNEL, "scaled_copy")
    moved = ptx(tmp_path / "b.py", "# comment\n\n\n" + renamed.replace("    at =", "    # where\n    at ="), "copy_of_twice")
    other = ptx(tmp_path / "c.py", renamed.replace("x * 2 + 1", "x * 2 - 1"), "copy_of_twice")
    assert before != moved and code_digest.ptx_digest(before) == code_digest.ptx_digest(moved) != code_digest.ptx_digest(other)


SASS = """
		Function : _ZN6jaxext6raggedEv
	.headerflags	@"EF_CUDA_SM90"
        /*0000*/                   LDC R1, c[0x0][0x28] ;                 /* 0x00000a00ff017b82 */
        /*0010*/                   CALL.REL.NOINC `($_ZN6jaxext6raggedEv$helper) ;   /* 0x0000000000057919 */
        /*0020*/              @!P0 FADD R5, R5, 1 ;                       /* 0x0000000000057919 */
"""


def test_machine_code_is_its_instructions():
    digest = code_digest.machine_code_digest(SASS)
    assert digest == code_digest.machine_code_digest(SASS.replace("ragged", "half_product").replace("0x00000a00ff017b82", "0x0"))
    for change in (("FADD R5, R5, 1", "FADD R5, R5, 2"), ("@!P0", "@P0"), ("FADD", "FMUL")):
        assert digest != code_digest.machine_code_digest(SASS.replace(*change))


# A compiled kernel and the dtype of its operands -> the kinds for which it counts.
ROWS = {
    # other roles of float32 are transposed before, so they have these kernels
    ("matmul_nt", "float32"): ["matmul matmul_nn fp32,tf32", "matmul matmul_tn fp32,tf32", "matmul linear fp32,tf32"],
    ("matmul_nn", "bfloat16"): ["matmul matmul_nn bf16", "matmul linear bf16", "matmul linear+z bf16"],
    ("matmul_nt", "bfloat16"): ["matmul matmul_nt bf16", "matmul matmul_nt bf16->fp32", "matmul linear bf16", "matmul linear+z bf16"],
    ("conv2d_wgrad", "float16"): ["conv conv2d_wgrad fp16->fp32"],
    ("depthwise_gather", "float32"): ["depthwise conv2d_fprop fp32,ieee"],
    ("depthwise_mma", "bfloat16"): ["depthwise_mma conv2d_fprop bf16", "depthwise_mma conv2d_bias_act+z bf16"],
    ("depthwise_mma_wgrad", "bfloat16"): ["depthwise_mma conv2d_wgrad bf16"],
    ("wide_weight_only", "bfloat16"): ["wide_weight_only scaled_dot_w_nn bf16xi4->bf16"],
    ("scaled", "float8_e4m3fn"): ["scaled scaled_dot_xw_nn fp8e4nv->bf16"],
}


def test_kernels_of_the_module_count_for_their_kinds():
    kinds = {kind for of in ROWS.values() for kind in of}
    for (kernel, operands), expected in ROWS.items():
        row = {"kernel": kernel, "operands": operands}
        assert {kind for kind in kinds if code_digest._is_of(row, *kind.split(" "))} == {*expected}, kernel


HERE = {"triton": "triton 3.6.0", "cuda": "nvcc 13.0"}
CODES = {"triton a r bf16": "aa", "triton b r bf16": "bb", "cuda c r bf16": "cc"}
KINDS = {kind: Verified(right=True, error=0.0, compiler=HERE[kind.partition(" ")[0]], code=code) for kind, code in CODES.items()}


@pytest.fixture
def code(monkeypatch):
    """Return the digests of the code by kind, which a test may change."""
    now = dict(CODES)
    for module in (record, shipping):
        monkeypatch.setattr(module, "digests", lambda kinds, arch, device: {kind: now[kind] for kind in kinds if kind in now})
        monkeypatch.setattr(module, "compilers", lambda: HERE)
    return now


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "verified.json"
    table_file.merge(path, [Entry.of(Context(*device, {}, {}), DAY, {}, KINDS) for device in (("H100", 90), ("A100", 80))])
    return path


def recorded(path):
    return {(each.device, kind) for each in table_file.load(path) for kind in each.verified}


def test_kinds_whose_code_has_changed_are_dropped_by_name(code, path, capsys):
    before = path.read_bytes()
    assert record.main(["--check"], path) == 0 and path.read_bytes() == before
    assert "6 kinds are recorded, 0 of them are stale, 0 are of compilers that are not here" in capsys.readouterr().out
    code["triton b r bf16"] = "changed"
    del code["cuda c r bf16"]
    assert record.main(["--check"], path) == 1 and record.main([], path) == 0
    printed = capsys.readouterr().out
    assert "H100, triton b r bf16: the code has changed: changed, recorded bb" in printed
    assert "A100, cuda c r bf16: there are no such kernels any more" in printed
    assert recorded(path) == {("H100", "triton a r bf16"), ("A100", "triton a r bf16")}


def test_kinds_that_a_machine_verified_are_added(code, path, tmp_path):
    """A user's own record gets the digests of the code; what is shared has them."""
    sources = environment.codes("cuda")
    verified = {kind: replace(of, code=None, right="b r" not in kind) for kind, of in KINDS.items()}
    shared, given = tmp_path / "shared.json", tmp_path / "given.json"
    table_file.merge(shared, [Entry.of(Context("NVIDIA H100", 90, {"jax": "0.11.2"}, sources), DAY, {}, verified)])
    assert record.main(["--add", str(shared)], path) == 0
    added = next(each for each in table_file.load(path) if each.device == "NVIDIA H100")
    expected = {kind: (code, "b r" not in kind, DAY) for kind, code in CODES.items()}
    assert {kind: (of.code, of.right, of.date) for kind, of in added.verified.items()} == expected
    table_file.merge(given, [replace(added, device="GH200")])  # as --share writes it
    code["triton b r bf16"] = "changed"
    assert record.main(["--add", str(given)], path) == 0
    assert {each for each in recorded(path) if each[0] == "GH200"} == {("GH200", kind) for kind in CODES if "b r" not in kind}
    table_file.merge(shared, [Entry.of(Context("NVIDIA H100", 90, {}, {name: "other" for name in sources}), DAY, {}, verified)])
    with pytest.raises(ValueError, match="NVIDIA H100: its cuda kernels are of another build"):
        record.main(["--add", str(shared)], path)
