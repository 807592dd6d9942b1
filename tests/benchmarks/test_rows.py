"""The benchmarks whose rows the pages show: their forms compute the same, and each prints a line and writes a row for each product."""

import json

import jax
import jax.numpy as jnp
import pytest

import jaxext
from benchmarks import private_training, quantized, sequences, training_memory

NETWORK, MAKE, _ = private_training.NETWORKS["MLP 784-512-512-10, 128 examples"]
FORMATS = {name: quantized.FORMATS[name] for name in ("int8", "fp8, blocks and squares of 128")}
# Kind -> the benchmark, what is small in it, how many rows it has then, and their columns.
SMALL = {
    "causal_conv": (sequences, {"CHUNKED": {"a": ((1, 6, 5, 2), (3, 3, 2, 4), 2)}}, 1, {"jaxext", "stream", "lax"}),
    "long_conv": (sequences, {"LONG": ((8, 4, 3),)}, 3, {"jaxext"}),
    "causal": (sequences, {"CAUSAL": ((1, 8, 4, 2),), "STEP": (2, 4, 2)}, 3, {"jaxext"}),
    "sums": (private_training, {"NETWORKS": {"a": (NETWORK, MAKE, (4, 16))}}, 1, {"jaxext", "vmap, lax", "vmap, jaxext"}),
    "experts": (quantized, {"EXPERTS": (4, 256, 8), "ROWS_OF_EACH": (1,), "FORMATS": FORMATS}, 1, {"jaxext", "dequantized", "wide"}),
    "layers": (quantized, {"FORMATS": FORMATS, "K": 256, "N": 8, "ROWS": (16,)}, 3, {"jaxext", "dequantized", "wide"}),
}


@pytest.mark.filterwarnings("ignore:.*float64.*")
@pytest.mark.parametrize("kind", SMALL)
def test_lines_and_rows(kind, tmp_path, monkeypatch, capsys):
    benchmark, sizes, count, columns = SMALL[kind]
    for constant, value in sizes.items():
        monkeypatch.setattr(benchmark, constant, value)
    with jax.numpy_rank_promotion("allow"):
        benchmark.main([kind, "--rounds", "1", "--json", str(tmp_path / "rows.json")])
    document = json.loads((tmp_path / "rows.json").read_text())
    rows = document["rows"]
    assert len(rows) == len(capsys.readouterr().out.splitlines()) == count and document["environment"]["cores"]
    assert all(row["error"].keys() == row["ms"].keys() >= columns for row in rows)
    assert all(error < 1e-5 for row in rows for error in row["error"].values())


@pytest.mark.parametrize("block", ["swiglu", "convnext"])
def test_a_training_step_of_fused_operations_keeps_a_quarter_less(block):
    with jax.numpy_rank_promotion("allow"):
        plain, ours = (training_memory.temporaries(block, ops, 4, jnp.float32) for ops in (training_memory.PLAIN, jaxext))
    assert 0 < ours < 0.75 * plain
