"""The benchmark of whole networks: inside `in_place_of_lax` each has jaxext's products alone, and it tells a line and a row."""

import importlib.util
import json
import math
from typing import Any

import jax
import pytest

import jaxext
from benchmarks import models
from jaxext.tuning import timing
from jaxext.tuning.walk import walk

MODULES = {"dm-haiku": "haiku"}  # where it is not the package's name


@pytest.mark.filterwarnings("ignore")  # of others' packages
@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("name", models.NETWORKS)
def test_a_step_has_no_product_of_lax(name, device):
    network = models.NETWORKS[name]
    arguments = {"cpu": network.cpu_arguments, "gpu": network.gpu_arguments}[device]
    if importlib.util.find_spec(MODULES.get(network.package) or network.package) is None:
        pytest.skip(f"needs {network.package}")
    jaxprs = []

    def trace():
        step, params, batch = network.make(*arguments)
        jaxprs.append(jax.make_jaxpr(jaxext.in_place_of_lax()(step))(params, *batch).jaxpr)

    with jax.enable_x64(False), jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        jax.eval_shape(trace)  # no parameter is computed
    found = {step.eqn.primitive.name for step in walk(*jaxprs)}
    assert not found & {"conv_general_dilated", "dot_general"}
    assert {name.rpartition("_")[2] for name in found} >= {"fprop", "dgrad", "wgrad"}


@pytest.mark.parametrize("dtype, least, most", [("float32", 0, 1e-5), ("bfloat16", 1e-3, 5e-2)])
def test_a_line_and_a_row(dtype, least, most, tmp_path, monkeypatch, capfd):
    small = models.NetworkSpec("equinox", models.unet, ((1, 1, 8, 8), (2, 4), 2), ())
    broken = models.NetworkSpec("equinox", models.unet, ((1, 1, 8, 8), (2, 4)), ())
    monkeypatch.setattr(models, "NETWORKS", {"small": small, "broken": broken})
    status = models.main(["--rounds", "1", "--jobs", "2", "--dtype", dtype, "--json", str(tmp_path / "rows.json")])
    (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert row["parameters"] == 539 and row["dtype"] == dtype
    for of_gradients in (row["error"]["lax"][1], row["error"]["jaxext"][1], row["difference"][1]):
        assert math.isfinite(of_gradients) and of_gradients < most
    assert min(row["error"]["lax"][1], row["error"]["jaxext"][1]) > least
    assert row["lax"]["ms"] and row["jaxext"]["bytes"] and row["jaxext over lax"].keys() == models.MOST.keys()
    captured = capfd.readouterr()
    assert status == 1 and len(captured.out.splitlines()) == 2 and "broken: TypeError: unet() missing 1 required" in captured.err


class Cupti(timing.Cupti):
    """Reports two kernels, or that it lost some."""

    def __init__(self, ms):
        self.ms = ms

    def kernels_ms(self, program, cold=True):
        if self.ms is None:
            raise RuntimeError("CUPTI lost kernels")
        return self.ms


def test_the_longest_kernels(monkeypatch):
    programs: dict[str, Any] = {"lax": None, "jaxext": None}
    monkeypatch.setattr(models, "KERNELS", 1)
    for ms, want in (({"a": 1.0, "b": 2.0}, dict.fromkeys(programs, {"all": 3.0, "b": 2.0})), (None, "CUPTI lost kernels")):
        monkeypatch.setattr(timing, "timer", lambda ms=ms: (Cupti(ms), None))
        assert models._kernels(programs) == want
