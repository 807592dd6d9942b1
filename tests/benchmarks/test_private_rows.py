"""The benchmark of private training: its forms compute the same, and it tells a line and a row for each network."""

import json

import jax
import pytest

from benchmarks import private_training


@pytest.mark.filterwarnings("ignore:.*float64.*")
def test_what_it_tells(tmp_path, monkeypatch, capsys):
    network, make, _ = private_training.NETWORKS["MLP 784-512-512-10, 128 examples"]
    monkeypatch.setattr(private_training, "NETWORKS", {"small": (network, make, (4, 16))})
    with jax.numpy_rank_promotion("allow"):
        private_training.main(["--rounds", "1", "--json", str(tmp_path / "rows.json")])
    (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert row["parameters"] == 785 * 16 + 17 * 16 + 17 * 10 and row["examples"] == 4
    assert row["error"].keys() == row["ms"].keys() == row["MiB"].keys() == {"jaxext", "vmap, lax", "vmap, jaxext"}
    assert all(error < 1e-5 for error in row["error"].values())
    assert len(capsys.readouterr().out.splitlines()) == 1
