"""The benchmark of causal convolutions: its forms compute the same, and it tells a line and a row for each."""

import json

import jax
import numpy as np
from cases import random

from benchmarks import causal
from jaxext.tuning import timing


def test_all_forms_are_the_same_convolution():
    args = [random(shape, np.float32, seed) for seed, shape in enumerate([(2, 9, 4), (3, 4), (4,)])]
    results = {name: form(*args) for name, form in causal.FORMS.items()}
    for y in results.values():
        np.testing.assert_allclose(y, results["jaxext"], rtol=1e-5, atol=1e-6)
    step = [random(shape, np.float32, seed) for seed, shape in enumerate([(2, 4), (2, 2, 4), (3, 4), (4,)])]
    for one, other in zip(jax.tree.leaves(causal.our_step(*step)), jax.tree.leaves(causal.step(*step)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_what_it_tells(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(causal, "SHAPES", ((1, 8, 4, 2),))
    monkeypatch.setattr(causal, "STEP", (2, 4, 2))
    causal.main(["--rounds", "1", "--json", str(tmp_path / "rows.json")])
    document = json.loads((tmp_path / "rows.json").read_text())
    assert [row["row"] for row in document["rows"]] == ["forward", "backward", "step"]
    assert all(took > 0 for row in document["rows"] for took in row["ms"].values())
    assert all(error < 1e-5 for row in document["rows"] for error in row["error"].values())
    assert document["environment"]["cores"] and len(capsys.readouterr().out.splitlines()) == 3


def test_what_cannot_be_measured_says_why():
    """The columns are those of a GPU: on a CPU no kernel runs."""
    args = [jax.numpy.asarray(random(shape, np.float32, seed)) for seed, shape in enumerate([(2, 9, 4), (3, 4), (4,)])]
    row = causal.race(causal.on_gpu() | {"copy": lambda x, *_: -x}, args, timing.Wall(), 1, causal.sum_of_padded)
    assert row["ms"].keys() == {*causal.FORMS, "xla", "copy"} and row["error"].keys() == {*causal.FORMS, "xla"}
    assert all("does not support this call" in row["failed"][name] for name in ("triton", "cuda"))
