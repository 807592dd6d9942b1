"""The benchmark of quantised weights: its forms compute the same, and it tells a line and a row for each."""

import json

import pytest

from jaxext.benchmarks import quantized


@pytest.mark.filterwarnings("ignore:.*float64.*")
def test_what_it_tells(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(quantized, "LAYERS", {"a layer": (256, 8)})
    monkeypatch.setattr(quantized, "ON_CPU", ("a layer",))
    monkeypatch.setattr(quantized, "ROWS", (2, 16))
    quantized.main(["--rounds", "1", "--json", str(tmp_path / "rows.json")])
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["row"] for row in rows] == ["forward", "forward", "gradient in x"] * 3
    assert all(row["error"].keys() == row["ms"].keys() == {"jaxext", "dequantized", "wide"} for row in rows)
    assert all(error < 1e-6 for row in rows for error in row["error"].values())
    assert len(capsys.readouterr().out.splitlines()) == len(rows)


@pytest.mark.filterwarnings("ignore:.*float64.*")
def test_scaled_products():
    cube, blocks = quantized.scaled_rows([(16, 256, 128)], rounds=1)
    assert (cube["format"], blocks["format"]) == ("fp8, a scale each", "fp8, blocks of 128")
    for row in (cube, blocks):
        assert row["error"].keys() == row["ms"].keys() == {"jaxext", "wide"} and not row["failed"]
        assert all(error < 4e-3 for error in row["error"].values()), "the result is rounded to bfloat16"
        assert quantized.line(row)
