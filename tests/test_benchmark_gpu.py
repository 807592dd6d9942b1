"""The GPU benchmark runs where there is no GPU, as far as it can, and says so; what it makes of measurements is checked on made-up ones."""

import json
import math
import os
import pathlib
import re
import subprocess
import sys
import types

import gpu
import gpu_rows
import pytest

import jaxext
from jaxext import _cuda

SCRIPT = pathlib.Path(gpu.__file__)
on_cpu = pytest.mark.skipif(gpu.jax.default_backend() != "cpu", reason="it measures here")


def run(*arguments):
    here = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, env=os.environ | here)


@on_cpu
def test_trial_run(tmp_path):
    path = tmp_path / "made" / "gpu.json"
    done = run("--quick", "--only", "matmul: 4096^3 bf", "--only", "16x32x32x256 fprop", "--only", "drhs", "--json", path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(path.read_text())
    assert report["quick"] and report["timer"].startswith("wall") and report["not_cupti"] == "the platform is cpu"
    assert {"jaxlib", "jax"} <= report["versions"].keys() and report["ceilings"].keys() == {"copy", "bfloat16", "float32", "float8_e4m3fn"}
    assert [row["name"].split()[-2] for row in report["rows"]] == ["4096^3", "fprop", "drhs"]
    for row in report["rows"]:
        for library in ("lax", "xla"):
            low, middle, high = row[library]["ms_quartiles"]
            assert 0 < low <= middle <= high and row[library]["wall_ms"] > 0 and row[library]["error"] < 1e-2
        for ours in gpu.OURS:
            reason = row[ours]["refused"]
            assert ("no ragged product" if "ragged" in row["name"] else "platform is 'cpu'") in reason
            assert reason in done.stdout
        assert row["ratios"] == {} and row["name"] in done.stdout


@on_cpu
def test_it_does_not_pretend():
    assert "no GPU here" in run("--json", os.devnull).stderr
    assert "no row has one of ['nonsense']" in run("--quick", "--only", "nonsense").stderr


@on_cpu
def test_rows_and_libraries_may_be_left_out(tmp_path):
    path = tmp_path / "gpu.json"
    done = run("--quick", "--targets-of", "cuda", "--only", " nt ", "--without", "triton", "--json", path)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(path.read_text())["rows"]
    assert row["name"] == "matmul: 4096^3 nt bfloat16" and row["triton"] == {"refused": "left out"}
    assert "missed: triton best - of 0.85; cuda best - of 0.97; cuda tflops - of 700 [matmul: 4096^3 nt bfloat16]" in done.stdout


def test_every_row_has_a_twin_and_known_targets():
    large, small = gpu_rows.rows(False), gpu_rows.rows(True)
    assert [row.name for row in large] == [row.name for row in small]
    assert len({row.name for row in large}) == len(large)
    for row, twin in zip(large, small, strict=True):
        assert row.targets.keys() <= set(gpu.OURS) and row.targets == twin.targets
        assert {kind for targets in row.targets.values() for kind in targets} <= {"lax", "xla", "best", "copy", "tflops"}
        assert math.prod(twin.case.shapes[0]) <= 2**15 and twin.case.flops < row.case.flops


def record(**entries) -> dict:
    made: dict = {"name": "made up", "dtype": "bfloat16", "flops": 1e9, "bytes": 1e6, "targets": {"triton": {"best": 2.0}}} | entries
    nothing = {library: {"refused": "no"} for library in gpu.LIBRARIES}
    made = nothing | made
    return made | {"ratios": gpu.ratios(made)}


def entry(ms, error: float | str = 1e-3):
    return {"ms_quartiles": [ms, ms, ms], "roofline": 0.5, "copy": 0.5, "tflops": 650.0, "gbps": 1.0, "error": error}


def test_ratios_and_verdicts():
    """The better of lax and xla is what counts; a target that is missed is called so."""
    made = record(lax=entry(6.0), xla=entry(4.0), triton=entry(2.5))
    assert made["ratios"] == {"triton": {"lax": 2.4, "xla": 1.6, "best": 1.6, "copy": 0.5, "tflops": 650.0}}
    assert "triton best 1.6 (2.0 MISSED)" in gpu.line(made) and gpu.missed(made) == ["triton best 1.6 of 2.0"]
    made = record(lax=entry(6.0), xla={"failed": "OSError: gone"}, triton=entry(2.0))
    assert made["ratios"]["triton"]["best"] == 3.0
    assert "triton best 3 (2.0 ok)" in gpu.line(made) and "FAILED" in gpu.line(made) and not gpu.missed(made)


def test_each_implementation_has_targets_of_its_own():
    targets = {"triton": {"best": 0.85}, "cuda": {"best": 0.97, "tflops": 700}}
    made = record(targets=targets, lax=entry(1.0), xla=entry(1.0), triton=entry(1.1), cuda=entry(1.0))
    assert "triton best 0.909 (0.85 ok)  cuda best 1 (0.97 ok), tflops 650 (700 MISSED)" in gpu.line(made)
    assert gpu.missed(made) == ["cuda tflops 650 of 700"]
    made = record(targets=targets, lax=entry(1.0), xla=entry(1.0), triton=entry(1.1))
    assert gpu.missed(made) == ["cuda best - of 0.97", "cuda tflops - of 700"]
    assert "triton best 1.25" in gpu.line(record(targets={}, lax=entry(1.0), xla=entry(1.0), triton=entry(0.8)))


@pytest.mark.parametrize("ours", gpu.OURS)
@pytest.mark.parametrize("error", [0.02, math.nan, math.inf])
def test_a_wrong_result_is_a_fault(error, ours):
    (fault,) = gpu.wrong(record(lax=entry(1.0), xla=entry(1.0)) | {ours: entry(1.0, error)})
    assert fault.startswith(f"{ours} is wrong")


def test_a_failure_is_a_fault_but_a_refusal_is_none():
    assert gpu.wrong(record(lax=entry(1.0), xla=entry(1.0), triton={"failed": "OSError: gone"})) == ["triton failed: OSError: gone"]
    assert gpu.wrong(record(lax=entry(1.0), xla=entry(1.0, "no truth: OSError"), cuda={"refused": "no"})) == []


@pytest.mark.skipif(_cuda.missing() is not None, reason=f"no CUDA kernels: {_cuda.missing()}")
@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in gpu_rows.rows(False) if "cuda" in row.targets])
def test_rows_with_targets_are_calls_of_kernels(row):
    """One each, of the row's role, on arrays with an axis per label: three spatial ones, whatever the convolution has."""
    arguments = [gpu.jax.ShapeDtypeStruct(shape, row.dtype) for shape in row.case.shapes]
    text = jaxext.lower_for(row.case.build("cuda"), *arguments, arch="sm_90a").as_text()
    (target,) = re.findall(r"jaxext_\w+_v1", text)
    role = row.case.name.rpartition(" ")[2]
    form, called = target.removeprefix("jaxext_").removesuffix("_v1").split("_")
    assert called == (role if role in ("fprop", "dgrad", "wgrad", "nt", "tn") else "nn")
    (operands,) = re.findall(rf"@{target}\(.*: \((.*)\) ->", text)
    assert [sizes.count("x") for sizes in re.findall(r"tensor<(\S+)>", operands)] == 2 * [3 if form == "matmul" else 7]
    assert form.startswith({"matmul": "matmul", "depthwise": "depthwise2d", "causal": "depthwise1d"}.get(row.tag, "conv"))


def test_kernel_times_without_the_flush(monkeypatch):
    """What clears the cache is not counted, and the sum over calls is one call's."""
    profiler = pytest.importorskip("jax.experimental.mosaic.gpu.profiler")
    reported = [("xor", 9.0)] * gpu.CALLS
    cupti = types.SimpleNamespace(_cupti_init=lambda: None, _cupti_get_timings=lambda finalize: list(reported))
    monkeypatch.setattr(profiler, "mosaic_gpu_lib", types.SimpleNamespace(_mosaic_gpu_ext=cupti))
    monkeypatch.setattr(gpu, "FLUSHED_BYTES", 64)
    clock = gpu.Cupti()
    reported += [("pad", 0.25), ("gemm", 1.0)] * gpu.CALLS
    assert clock.sampler(gpu.jnp.add, [], lambda: gpu.jnp.zeros(1))() == {"pad": 0.25, "gemm": 1.0}
