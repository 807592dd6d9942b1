"""Whole networks at their small sizes: values and gradients are lax's, and jaxext rewrites operations where claimed."""

import dataclasses

import jax
import pytest

import jaxext
from benchmarks import models, pictures
from benchmarks.models import compare
from jaxext.tables import environment


@pytest.fixture(autouse=True)
def as_users_run_it():
    with jax.enable_x64(False), jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


SHORT = ("MobileNetV1", "MobileNetV3Small")  # of the scripts that have several large networks
LONG = {
    network.name for script in models.SCRIPTS if len(script.NETWORKS) > 1 for network in script.NETWORKS if network.package != "equinox"
} - {*SHORT}


@pytest.mark.filterwarnings("ignore")  # of others' packages
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in models.NETWORKS])
def test_values_and_gradients_are_those_of_lax(name):
    network = models.NETWORKS[name]
    if network.missing:
        pytest.skip(network.missing)
    compare.check(network)


def dense(size):
    x, labels = compare.images(size, size, classes=size)
    return compare.model(lambda w, x, training: x @ w, x, (x, labels))


def test_a_difference_and_a_false_claim_are_noticed(monkeypatch):
    network = compare.Network("dense", "jax", dense, (4,), (4,), (4,), rewritten=False)
    assert "0 of 2 operations of a step are rewritten" in compare.check(network)
    with pytest.raises(AssertionError, match="0 of 2 operations"):
        compare.check(dataclasses.replace(network, rewritten=True))
    assert jax.numpy.isnan(compare.difference((jax.numpy.ones(1), jax.numpy.ones(1) * jax.numpy.nan), (jax.numpy.ones(1),) * 2))
    wrong = lambda function: lambda *arguments: jax.tree.map(lambda x: x * (1 + 1e-6), function(*arguments))
    monkeypatch.setattr(jaxext, "in_place_of_lax", lambda: wrong)
    with pytest.raises(AssertionError, match="differs from lax by 1e-06"):
        compare.check(network)


def test_a_network_is_measured_and_drawn(tmp_path, capsys):
    network = compare.Network("dense", "jax", dense, (4,), (64,), (64,), rewritten=False)
    row = compare.measure(network, "float32", compare.build(network, "float32"), 3)
    assert (
        row["rewritten"] == [0, 2] and row["difference"] == {"forward": 0, "step": 0} and row["error"]["lax"] == row["error"]["jaxext"] > 0
    )
    assert compare.lines(row).count("over jaxext") == 2
    pictures.networks({"rows": [row], "environment": environment.report()}, tmp_path / "a.svg")
    drawn = (tmp_path / "a.svg").read_text()
    assert all(f">{words}</text>" in drawn for words in ("dense", "forward", "training step"))
    missing = dataclasses.replace(network, package="no-such-package")
    assert compare.main([missing], []) == 1 and "pip install no-such-package" in capsys.readouterr().out
