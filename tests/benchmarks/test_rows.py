"""The benchmarks whose rows the pages show: their forms compute the same, and each tells a line and a row for each product."""

import json

import jax
import pytest

from benchmarks import causal, gram, invariant, private_training, quantized

NETWORK, MAKE, _ = private_training.NETWORKS["MLP 784-512-512-10, 128 examples"]
# A benchmark, what is small in it, how many rows it has then, and their columns.
SMALL = {
    "causal": (causal, {"SHAPES": ((1, 8, 4, 2),), "STEP": (2, 4, 2)}, 3, {"jaxext"}),
    "gram": (gram, {"ON_CPU": ((8, 8), (2, 4, 6)), "MATRICES": {"cpu": ((4, 6),)}}, 4, {"jaxext", "jnp"}),
    "invariant": (invariant, {"MATRICES": [(2, 64, 8)], "IMAGES": {"a": ((2, 6, 6, 4), (3, 3, 4, 8), {})}}, 4, {"invariant", "jaxext"}),
    "private": (private_training, {"NETWORKS": {"a": (NETWORK, MAKE, (4, 16))}}, 1, {"jaxext", "vmap, lax", "vmap, jaxext"}),
    "quantized": (
        quantized,
        {"LAYERS": {"a": (256, 8)}, "ON_CPU": ("a",), "ROWS": (2, 16)},
        15,
        {"jaxext", "dequantized", "wide"},
    ),
}


@pytest.mark.filterwarnings("ignore:.*float64.*")
@pytest.mark.parametrize("name", SMALL)
def test_lines_and_rows(name, tmp_path, monkeypatch, capsys):
    benchmark, sizes, count, columns = SMALL[name]
    for constant, value in sizes.items():
        monkeypatch.setattr(benchmark, constant, value)
    numbers = ["--dtypes", "float32"] if benchmark is gram else []
    with jax.numpy_rank_promotion("allow"):
        benchmark.main(["--rounds", "1", "--json", str(tmp_path / "rows.json"), *numbers])
    document = json.loads((tmp_path / "rows.json").read_text())
    rows = document["rows"]
    assert len(rows) == len(capsys.readouterr().out.splitlines()) == count and document["environment"]["cores"]
    assert all(row["error"].keys() == row["ms"].keys() >= columns and not row["failed"] for row in rows)
    assert all(error < 1e-5 for row in rows for error in row["error"].values())
