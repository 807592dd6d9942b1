"""The GPU benchmark runs where there is no GPU, as far as it can, and says so; what it makes of measurements is checked on made-up ones."""

import json
import math
import os
import pathlib
import subprocess
import sys
import types

import gpu
import gpu_rows
import pytest

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
    assert {"jaxlib", "jax"} <= report["versions"].keys() and report["ceilings"].keys() == {"copy", "bfloat16", "float32"}
    assert [row["name"].split()[-2] for row in report["rows"]] == ["4096^3", "fprop", "drhs"]
    for row in report["rows"]:
        for library in ("lax", "xla"):
            low, middle, high = row[library]["ms_quartiles"]
            assert 0 < low <= middle <= high and row[library]["wall_ms"] > 0 and row[library]["error"] < 1e-2
        reason = row["triton"]["refused"]
        assert ("no ragged product" if "ragged" in row["name"] else "platform is 'cpu'") in reason
        assert row["ratios"] == {} and row["name"] in done.stdout and reason in done.stdout


@on_cpu
def test_it_does_not_pretend():
    assert "no GPU here" in run("--json", os.devnull).stderr
    assert "no row has one of ['nonsense']" in run("--quick", "--only", "nonsense").stderr


def test_every_row_has_a_twin_and_known_targets():
    large, small = gpu_rows.rows(False), gpu_rows.rows(True)
    assert [row.name for row in large] == [row.name for row in small]
    assert len({row.name for row in large}) == len(large)
    for row, twin in zip(large, small, strict=True):
        assert row.targets.keys() <= {"lax", "xla", "best", "copy"} and row.targets == twin.targets
        assert math.prod(twin.case.shapes[0]) <= 2**15 and twin.case.flops < row.case.flops


def record(**entries):
    return {"name": "made up", "dtype": "bfloat16", "targets": {"best": 2.0}, "flops": 1e9, "bytes": 1e6} | entries


def entry(ms, error: float | str = 1e-3):
    return {"ms_quartiles": [ms, ms, ms], "roofline": 0.5, "copy": 0.5, "tflops": 1.0, "gbps": 1.0, "error": error}


def test_ratios_and_verdicts():
    """The better of lax and xla is what counts; a target that is missed is called so."""
    made = record(lax=entry(6.0), xla=entry(4.0), triton=entry(2.5))
    made["ratios"] = gpu.ratios(made)
    assert made["ratios"] == {"lax": 2.4, "xla": 1.6, "best": 1.6, "copy": 0.5}
    assert "best 1.60 (2.0 MISSED)" in gpu.line(made)
    made = record(lax=entry(6.0), xla={"failed": "OSError: gone"}, triton=entry(2.0))
    made["ratios"] = gpu.ratios(made)
    assert made["ratios"]["best"] == 3.0
    assert "best 3.00 (2.0 ok)" in gpu.line(made) and "FAILED" in gpu.line(made)


@pytest.mark.parametrize("error", [0.02, math.nan, math.inf])
def test_a_wrong_result_is_a_fault(error):
    (fault,) = gpu.wrong(record(lax=entry(1.0), xla=entry(1.0), triton=entry(1.0, error)))
    assert fault.startswith("triton is wrong")


def test_a_failure_is_a_fault_but_a_refusal_is_none():
    assert gpu.wrong(record(lax=entry(1.0), xla=entry(1.0), triton={"failed": "OSError: gone"})) == ["triton failed: OSError: gone"]
    assert gpu.wrong(record(lax=entry(1.0), xla=entry(1.0, "no truth: OSError"), triton={"refused": "no"})) == []


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
