"""What Triton's compiler makes of the kernel of x xᵀ: no spills, tensor cores of the newest kind, wide loads and stores."""

import pytest

from jaxext.benchmarks import compiled
from jaxext.kernels import gram

pytestmark = pytest.mark.skipif(compiled.missing() is not None, reason=str(compiled.missing()))
CASES = {  # rows, depth, dtypes, what is added
    "bf16": (4096, 4096, "bf16", {}),
    "bf16, of few rows": (768, 3072, "bf16", {}),
    "bf16, a polynomial": (4096, 4096, "bf16", dict(addend="bf16", scale=2.0315, of_addend=-4.775)),
    "TF32": (4096, 4096, "fp32", {}),
    "TF32, a polynomial": (4096, 4096, "fp32", dict(addend="fp32", scale=2.0315, of_addend=-4.775)),
    "odd sizes": (1001, 999, "bf16", {}),
}
QUICK = {("bf16", 80), ("TF32", 100)}  # test_kernels_compiled.py has one on 9.0
EACH = [
    pytest.param(name, arch, marks=() if (name, arch) in QUICK else pytest.mark.slow, id=f"{name}-{arch}")
    for name in CASES
    for arch in (80, 90, 100)
]


@pytest.mark.parametrize(("name", "arch"), EACH)
def test_picks_are_well_compiled(name, arch, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    rows, depth, dtype, added = CASES[name]
    problem = gram.Problem(name="gram", role="nt", B=1, M=rows, K=rows, N=depth, dtypes=(dtype,) * 3, precision="tf32", arch=arch, **added)
    made = compiled.compile_launch(gram.launch(problem, gram.candidates(problem)[0]), problem)
    row = compiled.assembled(str(made.asm["ptx"]))
    assert row["function"] == "gram" and row["spills_in_loops"] == 0 and row["spills"] <= compiled.RESTING, row
    assert row[{90: "wgmma", 100: "tcgen05"}.get(arch, "mma")] > 0 and made.metadata.shared <= compiled.SHARED_MEMORY[arch]
    assert row["loads"].get("16", 0) > 0 or not problem.aligned, row["loads"]
