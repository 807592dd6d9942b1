"""The benchmark of quantised weights: its forms compute the same, and it tells a line and a row for each."""

import json

import pytest

from benchmarks import quantized


@pytest.mark.filterwarnings("ignore:.*float64.*")
def test_what_it_tells(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(quantized, "LAYERS", {"a layer": (256, 8)})
    monkeypatch.setattr(quantized, "ON_CPU", ("a layer",))
    monkeypatch.setattr(quantized, "ROWS", (2, 16))
    quantized.main(["--rounds", "1", "--json", str(tmp_path / "rows.json")])
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert sorted(row["row"] for row in rows) == sorted(["forward"] * 12 + ["gradient in x"] * 3)
    assert all(row["error"].keys() == row["ms"].keys() == {"jaxext", "dequantized", "wide"} for row in rows)
    assert all(error < 1e-6 for row in rows for error in row["error"].values())
    assert len(capsys.readouterr().out.splitlines()) == len(rows)
