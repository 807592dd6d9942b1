"""What Triton's compiler makes of the kernel of scaled products: no spills, tensor cores of the newest kind, and wide loads of weights."""

import pytest

from jaxext.benchmarks import compiled
from jaxext.kernels import scaled

pytestmark = pytest.mark.skipif(compiled.missing() is not None, reason=str(compiled.missing()))
WIDE = (4096, 4096, 4096)  # M, K, N
FEW = (16, 4096, 4096)
FP8 = ("fp8e4nv", "fp8e4nv", "bf16")
CASES = {  # role, slots with scales, blocks of M, K and N, sizes, dtypes
    "fp8, rows and columns": ("nn", "xw", (4096, 1, 4096), WIDE, FP8),
    "fp8, squares of 128": ("nn", "xw", (4096, 32, 32), WIDE, FP8),
    "fp8, squares of 128, transposed": ("nt", "yw", (4096, 32, 32), WIDE, FP8),
    "fp8, blocks of 32": ("nn", "xw", (4096, 128, 4096), WIDE, FP8),
    "fp8, sum over rows": ("tn", "xy", (1, 1, 1), WIDE, ("fp8e4nv", "fp8e5", "bf16")),
    "int8, few rows": ("nn", "w", (1, 1, 4096), FEW, ("bf16", "i8", "bf16")),
    "int8 in groups, few rows": ("nn", "w", (1, 32, 4096), FEW, ("bf16", "i8", "bf16")),
    "packed int4 in groups, few rows": ("nn", "w", (1, 32, 4096), FEW, ("bf16", "i8", "bf16")),
    "packed int4 in groups": ("nn", "w", (1, 32, 4096), WIDE, ("bf16", "i8", "bf16")),
    "packed int4 in groups, gradient": ("nt", "w", (1, 32, 4096), WIDE, ("i8", "bf16", "bf16")),
    "int8 by int8": ("nn", "xw", (4096, 1, 4096), WIDE, ("i8", "i8", "bf16")),
}
QUICK = {
    ("fp8, squares of 128", 90),
    ("packed int4 in groups, few rows", 80),
    ("int8 by int8", 100),
}
EACH = [
    pytest.param(name, arch, marks=() if (name, arch) in QUICK else pytest.mark.slow, id=f"{name}-{arch}")
    for name in CASES
    for arch in (80, 90, 100)
]


@pytest.mark.parametrize(("name", "arch"), EACH)
def test_picks_are_well_compiled(name, arch, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    role, slots, (i, s, j), (M, K, N), dtypes = CASES[name]
    fields = dict(B=1, M=M, K=K, N=N, I=i, S=s, J=j, dtypes=dtypes, precision="tf32", arch=arch)
    problem = scaled.Problem(name=f"scaled_dot_{slots}_{role}", role=role, scaled=tuple(slots), packed="packed" in name, **fields)
    if arch < 89 and "fp8" in name:
        assert "8-bit floats" in (scaled.supports(problem) or "")
        return
    config = scaled.candidates(problem)[0]
    made = compiled.compile_launch(scaled.launch(problem, config), problem)
    row = compiled.assembled(str(made.asm["ptx"]))
    assert row["function"] == problem.name and row["spills_in_loops"] == 0 and row["spills"] <= compiled.RESTING, row
    newest = {90: "wgmma", 100: "tcgen05"}.get(arch, "mma") if config.tile_m >= 64 else "mma"
    if "int8 by int8" in name:  # Triton 3.6 has mma alone for these on 10.0
        newest = max(("mma", "wgmma", "tcgen05"), key=row.__getitem__)
    assert row[newest] > 0 and made.metadata.shared <= compiled.SHARED_MEMORY[arch]
    assert row["loads"].get("16", 0) > 0 or row["loads"].get("8", 0) > 0
