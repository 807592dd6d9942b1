"""A form and a kernel that are declared here, as a user declares them, are found by every tool with no other edit."""

import argparse
import dataclasses
import functools
import string
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import random

import jaxext
from jaxext import checkpoint_policies, extend
from jaxext.bench import bench_report as report
from jaxext.bench import cells
from jaxext.cli import bench, command
from jaxext.parallel import cost
from jaxext.tuning import timing


@dataclasses.dataclass(frozen=True)
class Order:
    swapped: bool


class Gather(extend.Implementation):
    """A kernel as users write them, of float32 alone; it counts its runs by role."""

    name, version, custom_calls = "gather", "1", ("one_door_gather",)

    def __init__(self):
        self.ran: dict[str, int] = {}

    def refuses(self, call):
        return None if call.dtype == np.float32 else f"the result is {call.dtype}, want float32"

    def candidates(self, call):
        return Order(False), Order(True)

    def run(self, call, config, operands):
        self.ran[call.op] = self.ran.get(call.op, 0) + 1
        letters = {label: letter for label, letter in zip(call.sizes, string.ascii_letters, strict=False)}
        named = {slot: "".join(letters[label] for label in labels) for slot, labels in call.labels.items()}
        flat = dict(sorted(call.flatten(operands).items(), reverse=config.swapped))
        return jnp.einsum(f"{','.join(named[slot] for slot in flat)}->{named[call.open]}", *flat.values()).reshape(call.shape)


X, W = random((4, 3, 8), np.float32), random((3, 2, 8), np.float32, seed=1)


@pytest.fixture(scope="module")
def door():
    """The operation, of x (N, K, C) and w (K, M, C), and its kernel."""
    operation, kernel = extend.define("one_door", x="B N K C", w="B K M C", y="B N M C"), Gather()
    extend.register(operation, kernel)
    return functools.partial(operation, B=0), kernel


def test_explain_and_tune(door, tmp_path):
    product, _ = door
    loss = jax.grad(lambda x, w: product(x, w).sum())
    rows = jaxext.explain(loss)(X, W).rows
    assert {(row.op, row.chosen, row.how) for row in rows} == {(f"one_door_{slot}", "gather", "False") for slot in "yx"}
    (row,) = jaxext.tune(product, backward=False, table=tmp_path / "table.json")(X, W).rows
    assert {c.name for c in row.candidates} == {"xla algorithm=dot_general", "gather swapped=False", "gather swapped=True"}
    with jaxext.use_table(tmp_path / "table.json"):
        assert jaxext.explain(product)(X, W).rows[0].why.startswith("measured")


def test_checkpoint_policies(door):
    """The product is saved, as lax's would be."""
    product, _ = door
    f = jax.checkpoint(lambda x, w: jnp.sin(product(x, w)).sum(), policy=checkpoint_policies.dots_saveable)
    assert str(jax.make_jaxpr(jax.grad(f))(X, W)).count("one_door_y") == 1


def test_cost_names_and_export(door):
    assert cost("one_door", {"N": 2}, sizes=dict(N=4, K=3, M=2, C=8))["y"].flops == 2 * 4 * 3 * 2 * 8 / 2
    with jaxext.use_implementation("gather"):
        assert jaxext.explain(door[0])(X, W).rows[0].why == "named"
    assert any("one_door_gather" in str(check) for check in jaxext.export.disabled_checks())


def test_bench_of_a_users_module(tmp_path, monkeypatch, capsys):
    (tmp_path / "one_door_module.py").write_text(
        "from jaxext import extend\nproduct = extend.define('one_door_import', x='B N K', w='B K M', y='B N M')\n"
        "class Mine(extend.Implementation):\n"
        "    name, version = 'one_door_mine', '1'\n"
        "    refuses = lambda self, call: None\n"
        "    run = lambda self, call, config, operands: None\n"
        "extend.register(product, Mine())\n"
        "extend.operation('one_door_square', lambda x: x * x, operands=dict(x='N'), results=dict(y='N'))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    asked = ["bench", "--import", "one_door_module", "--tags", "one_door_import", "--list"]
    assert command.main([*asked, "--implementation", "one_door_mine", "--without", "lax"]) == 0
    assert len(capsys.readouterr().out.split("one_door_import")) == 1 + 3
    for option in ("--implementation", "--without"):
        with pytest.raises(SystemExit, match="2"):
            command.main([*asked, option, "one_door_yours"])
        error = capsys.readouterr().err
        assert f"{option}: unknown 'one_door_yours', want one of " in error and "xla" in error and "one_door_mine" in error
    with pytest.raises(SystemExit, match="2"):
        command.main([*asked[:3], "--tags", "one_door_square"])
    assert "one_door_square (one_door_square: of `extend.operation`" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        command.main(["bench", "--import", "one_door_nowhere", "--list"])


def test_bench(door):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    options = parser.parse_args(["--tags", "one_door", "--quick", "--implementation", "gather"])
    found = bench.cases(options)
    assert {case.role for case in found} == {"x", "w", "y"}
    how: Any = cells.Bench(["lax", "xla", "gather", "jaxext"], timing.Wall(), 1, {"copy": 1e9}, False)
    for case in found:
        row = cells.measure(case, {}, how)
        assert row.default == (report.Default("gather", "False"),)
        errors = {library: float(result.error) for library, result in row.timed.items()}
        assert errors.keys() == {"lax", "xla", "gather"} and max(errors.values()) < 1e-6
