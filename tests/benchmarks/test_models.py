"""The benchmark of whole networks: inside `in_place_of_lax` each has jaxext's products alone, and it tells a line and a row."""

import importlib.util
import json

import jax
import pytest

import jaxext
from jaxext.benchmarks import models
from jaxext.tuning.walk import walk

MODULES = {"dm-haiku": "haiku"}  # where it is not the package's name


@pytest.mark.filterwarnings("ignore")  # of others' packages
@pytest.mark.parametrize("name", models.NETWORKS)
def test_a_step_has_no_product_of_lax(name):
    network = models.NETWORKS[name]
    if importlib.util.find_spec(MODULES.get(network.package) or network.package) is None:
        pytest.skip(f"needs {network.package}")
    jaxprs = []

    def trace():
        step, params, batch = network.make(*network.on_cpu)
        jaxprs.append(jax.make_jaxpr(jaxext.in_place_of_lax()(step))(params, *batch).jaxpr)

    with jax.enable_x64(False), jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        jax.eval_shape(trace)  # no parameter is computed
    found = {step.eqn.primitive.name for step in walk(*jaxprs)}
    assert not found & {"conv_general_dilated", "dot_general"}
    assert {name.rpartition("_")[2] for name in found} >= {"fprop", "dgrad", "wgrad"}


@pytest.mark.parametrize("dtype, error", [("float32", 1e-5), ("bfloat16", 5e-2)])
def test_a_line_and_a_row(dtype, error, tmp_path, monkeypatch, capfd):
    small = models.Made("equinox", models.unet, ((1, 1, 8, 8), (2, 4), 2), ())
    broken = models.Made("equinox", models.unet, ((1, 1, 8, 8), (2, 4)), ())
    monkeypatch.setattr(models, "NETWORKS", {"small": small, "broken": broken})
    models.main(["--rounds", "1", "--jobs", "2", "--dtype", dtype, "--json", str(tmp_path / "rows.json")])
    (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert row["parameters"] == 539
    assert 0 < max(error for errors in row["error"].values() for error in errors) < error
    assert row["lax"]["ms"] and row["jaxext"]["bytes"] and row["jaxext over lax"].keys() == models.MOST.keys()
    told = capfd.readouterr()
    assert len(told.out.splitlines()) == 2 and "broken: TypeError: unet() missing 1 required" in told.err
