"""The benchmark of `use_invariant`: it tells the price of each product."""

import json

import pytest

from benchmarks import invariant


@pytest.mark.filterwarnings("ignore:.*float64.*")
def test_what_it_tells(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(invariant, "MATRICES", [(2, 64, 8)])
    monkeypatch.setattr(invariant, "IMAGES", {"a layer": ((2, 6, 6, 4), (3, 3, 4, 8), {})})
    invariant.main(["--rounds", "1", "--json", str(tmp_path / "rows.json")])
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["row"] for row in rows] == ["forward", "gradient in x"] * 2
    assert all(row["ms"].keys() == {"invariant", "jaxext"} and max(row["error"].values()) < 1e-6 for row in rows)
    assert all("price" in line for line in capsys.readouterr().out.splitlines())
