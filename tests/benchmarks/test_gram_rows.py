"""The benchmark of x xᵀ: its forms compute the same, and it tells a line and a row for each."""

import json

import pytest

from benchmarks import gram


@pytest.mark.filterwarnings("ignore:.*float64.*")
def test_what_it_tells(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gram, "ON_CPU", ((8, 8), (2, 4, 6)))
    monkeypatch.setattr(gram, "MATRICES", {"cpu": ((4, 6),)})
    gram.main(["--rounds", "1", "--cpu-time", "--json", str(tmp_path / "rows.json")])
    told = json.loads((tmp_path / "rows.json").read_text())
    rows = told["rows"]
    assert told["clock"] == gram.CpuTime.name
    assert [(row["operation"], row["row"]) for row in rows] == [
        *[("gram", "forward"), ("gram", "gradient"), ("gram", "forward")] * 2,
        *[("newton_schulz", "forward")] * 2,
    ]
    assert all(row["error"].keys() == row["ms"].keys() == {"jaxext", "jnp"} for row in rows)
    assert all(row["error"]["jaxext"] <= max(1e-6, 1.5 * row["error"]["jnp"]) for row in rows)
    assert len(capsys.readouterr().out.splitlines()) == len(rows)
