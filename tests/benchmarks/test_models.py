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
    package, make, sizes = models.NETWORKS[name]
    if importlib.util.find_spec(MODULES.get(package) or package) is None:
        pytest.skip(f"needs {package}")
    jaxprs = []

    def trace():
        step, params, batch = make(*sizes)
        jaxprs.append(jax.make_jaxpr(jaxext.in_place_of_lax()(step))(params, *batch).jaxpr)

    with jax.enable_x64(False), jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        jax.eval_shape(trace)  # no parameter is computed
    found = {step.eqn.primitive.name for step in walk(*jaxprs)}
    assert not found & {"conv_general_dilated", "dot_general"}
    assert {name.rpartition("_")[2] for name in found} >= {"fprop", "dgrad", "wgrad"}


def test_a_line_and_a_row(tmp_path, monkeypatch, capsys):
    small = {"small": ("equinox", models.unet, ((1, 1, 8, 8), (2, 4), 2))}
    monkeypatch.setattr(models, "NETWORKS", small)
    models.main(["--rounds", "1", "--json", str(tmp_path / "rows.json")])
    (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert row["parameters"] == 539
    assert all(error < 1e-5 for errors in row["error"].values() for error in errors) and max(row["difference"]) < 1e-5
    assert row["lax"]["ms"] and row["jaxext"]["bytes"] and row["jaxext over lax"].keys() == models.MOST.keys()
    assert len(capsys.readouterr().out.splitlines()) == 2
