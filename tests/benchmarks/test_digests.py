"""The digests of rows: a change in a family of kernels changes those of its own rows alone."""

import hashlib
import pathlib
import shutil

import pytest

from jaxext import _cuda_build
from jaxext.bench import digests
from jaxext.bench.problems import OWN

CSRC = pathlib.Path(__file__).parents[2] / "csrc"
ROWS = {
    "matmul": (("matmul",), "bfloat16"),
    "pieces": (("matmul",), "bf16x6"),
    "conv": (("two-axes", "dense"), "bfloat16"),
    "depthwise": (("two-axes", "depthwise"), "bfloat16"),
    "ragged": (("ragged",), "bfloat16"),
    **{digests.family(problem.tags, ""): (problem.tags, problem.numbers[0]) for problem in OWN},
}


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """Copies of the kernels and of csrc, of which the CUDA module is made; a function that gives the digests, by family and library."""
    shutil.copytree(digests.KERNELS, tmp_path / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(CSRC, tmp_path / "csrc")
    monkeypatch.setattr(digests, "KERNELS", tmp_path / "kernels")

    def found():
        digests._digest.cache_clear()
        digests._csrc.cache_clear()
        hashes = [
            hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted((tmp_path / "csrc").rglob("*.*"), key=pathlib.Path.as_posix)
        ]
        monkeypatch.setattr(_cuda_build, "SOURCES", hashlib.sha256("".join(hashes).encode()).hexdigest())
        return {
            (family, library): digest
            for family, (tags, numbers) in ROWS.items()
            for library, digest in digests.digests(tags, numbers, ["triton", "cuda", "lax"], "cpu").items()
        }

    yield tmp_path, found
    digests._digest.cache_clear()
    digests._csrc.cache_clear()


@pytest.mark.parametrize(
    ("file", "library", "changed"),
    [
        ("kernels/conv/kernel.py", "triton", {"conv"}),
        ("kernels/matmul/kernel.py", "triton", {*ROWS} - {"conv", "depthwise", "causal"}),  # what others import
        ("csrc/conv/conv_store.cuh", "cuda", {"conv"}),
        ("csrc/weight_only/wide_weight_only.cuh", "cuda", {"scaled"}),
        ("csrc/common/product_arrays.cc", "cuda", {*ROWS}),
        ("csrc/matmul/matmul_target.cc", "cuda", {"matmul", "pieces"}),
    ],
)
def test_a_mended_kernel_changes_its_own_rows(file, library, changed, sources):
    folder, found = sources
    before = found()
    with (folder / file).open("a") as text:
        text.write("\n")
    after = found()
    assert {family for family, of in before if before[family, of] != after[family, of] and of == library} == changed
    assert all(before[family, "lax"] == after[family, "lax"] == "" for family in ROWS)
    assert len({digest for (_, of), digest in before.items() if of == "cuda"}) == len(ROWS)


def test_without_the_sources_of_the_module_the_digest_is_of_all_of_them(monkeypatch):
    digests._csrc.cache_clear()
    digests._digest.cache_clear()
    monkeypatch.setattr(_cuda_build, "SOURCES", "of another checkout")
    of = [digests.digests(tags, numbers, ["cuda"], "cpu")["cuda"] for tags, numbers in ROWS.values()]
    assert set(of) == {digests.environment.codes("cpu")["cuda"]}
    digests._csrc.cache_clear()
    digests._digest.cache_clear()
