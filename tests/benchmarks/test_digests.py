"""The digests of rows: a change in a family of kernels changes those of its own rows alone."""

import hashlib
import pathlib
import shutil

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
# A file, the library that it is of, and the families whose rows change with it.
CHANGES = [
    ("kernels/conv/kernel.py", "triton", {"conv"}),
    ("kernels/matmul/kernel.py", "triton", {*ROWS} - {"conv", "depthwise", "causal"}),  # what others import
    ("kernels/scaled/kernel.py", "triton", {"scaled", "ragged_scaled"}),
    ("csrc/conv/conv_store.cuh", "cuda", {"conv"}),
    ("csrc/weight_only/wide_weight_only.cuh", "cuda", {"scaled"}),
    ("csrc/common/product_arrays.cc", "cuda", {*ROWS}),
    ("csrc/matmul/matmul_target.cc", "cuda", {"matmul", "pieces"}),
]


def test_a_mended_kernel_changes_its_own_rows(tmp_path, monkeypatch, request):
    """The digest is of all sources if those of the module are not here."""
    request.addfinalizer(digests._digest.cache_clear)
    request.addfinalizer(digests._csrc.cache_clear)
    shutil.copytree(digests.KERNELS, tmp_path / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(CSRC, tmp_path / "csrc")
    monkeypatch.setattr(digests, "KERNELS", tmp_path / "kernels")

    def current(sources=None):
        digests._digest.cache_clear()
        digests._csrc.cache_clear()
        files = sorted((tmp_path / "csrc").rglob("*.*"), key=pathlib.Path.as_posix)
        files = [path for path in files if path.parent.name != "launcher"]  # which is none of the kernels
        hashes = "".join(hashlib.sha256(path.read_bytes()).hexdigest() for path in files)
        monkeypatch.setattr(_cuda_build, "SOURCES", sources or hashlib.sha256(hashes.encode()).hexdigest())  # of which the module is made
        found = {family: digests.digests(tags, numbers, ["triton", "cuda", "lax"], "cpu") for family, (tags, numbers) in ROWS.items()}
        return {(family, library): digest for family, of in found.items() for library, digest in of.items()}

    before = current()
    assert len({digest for (_, library), digest in before.items() if library == "cuda"}) == len(ROWS)
    for file, library, changed in CHANGES:
        with (tmp_path / file).open("a") as text:
            text.write("\n")
        after = current()
        assert {row for row in before if before[row] != after[row]} == {(family, library) for family in changed}, file
        assert all(after[family, "lax"] == "" for family in ROWS)
        before = after
    others = current("of another checkout")
    assert {others[family, "cuda"] for family in ROWS} == {digests.environment.codes("cpu")["cuda"]}
