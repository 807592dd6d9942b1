"""The commands that measure, `tune` and `bench`, and `cache`, for the tables that they leave."""

# ruff: noqa: F401, F811 - a fixture is imported

import json
import math
import pathlib
import re

import jax
import msgspec
import pytest
from test_command import MATMUL, PLATFORM, cache, refused, said

import jaxext
from jaxext.cli import bench, command
from jaxext.tables import active, table_file
from jaxext.tables.table_format import Measurement
from jaxext.tuning import trial

# tune and bench


def test_tune(capsys, tmp_path, cache):
    """A function: its products and those of its gradient; what was measured is active afterwards."""
    path = tmp_path / "tables.json"
    document = json.loads(said(capsys, "tune", *MATMUL[1:], "--table", path, "--json"))
    assert [row["problem"].split()[0] for row in document["rows"]] == ["matmul_nn", "matmul_tn", "matmul_nt"]
    assert all(row["winner"]["implementation"] == "xla" for row in document["rows"]) and document["table"] == str(path)
    assert not cache.exists()
    why = json.loads(said(capsys, *MATMUL, "--table", path, "--json"))["rows"][0]["why"]
    assert why.startswith("measured at ")
    rows = said(capsys, "tune", *MATMUL[1:], "--no-backward", "--candidates", 1)
    assert rows.startswith("matmul_nn ") and "matmul_nt" not in rows and cache.exists()
    assert rows.splitlines()[-1].startswith("1 operation on ") and rows.endswith(f": {cache}\n")


@pytest.fixture
def stand_in_for_tune(monkeypatch):
    """Return the calls of `jaxext.tune`; its stand-in finds a wrong candidate for shapes with a 7."""
    asked = []

    def tune(fun, *, progress, **options):
        def tuned(*arrays):
            asked.append(([(x.shape, x.dtype.name) for x in arrays], options))
            wrong = trial.Candidate("triton", {}, error=(math.nan, math.nan), wrong=any(7 in x.shape for x in arrays))
            progress(trial.Trial("conv", candidates=(wrong,)), 1, 1)

        return tuned

    monkeypatch.setattr(jaxext, "tune", tune)
    return asked


def test_tune_tells_what_is_wrong(capsys, stand_in_for_tune):
    said(capsys, "tune", "jax.numpy:sin", "f32[8]")
    document = json.loads(said(capsys, "tune", "jax.numpy:sin", "f32[7]", "--json", status=1))
    assert document["rows"][0]["candidates"][0]["error"] == ["nan", "nan"]


def test_tune_interrupted(capsys, stand_in_for_tune, monkeypatch):
    """Measurements before the interrupt are printed."""
    tune = jaxext.tune

    def interrupted(fun, **options):
        def tuned(*arrays):
            tune(fun, **options)(*arrays)
            raise KeyboardInterrupt

        return tuned

    monkeypatch.setattr(jaxext, "tune", interrupted)
    document = json.loads(said(capsys, "tune", "jax.numpy:sin", "f32[8]", "--json", status=130))
    assert len(document["rows"]) == 1 and document["interrupted"]


def test_tune_the_suite(capsys, stand_in_for_tune):
    assert command.main(["tune", "--tags", "mamba", "--only", "k=4", "--table", "t.json"]) in (0, 1)
    assert stand_in_for_tune and all(
        options == {"backward": False, "candidates": 8, "tolerance": None, "table": pathlib.Path("t.json")}
        for _, options in stand_in_for_tune
    )
    small = sum(math.prod(shape) for arrays, _ in stand_in_for_tune for shape, _ in arrays)
    stand_in_for_tune.clear()
    assert command.main(["tune", "--tags", "mamba", "--only", "k=4", "--full"]) in (0, 1)
    assert sum(math.prod(shape) for arrays, _ in stand_in_for_tune for shape, _ in arrays) > 2 * small


def test_tune_refuses(capsys):
    assert "no problem is tagged nonsense" in refused(capsys, "tune", "--tags", "nonsense")
    assert "give a module:function, or --tags or --only" in refused(capsys, "tune")
    assert refused(capsys, "tune", "--only", "nonsense") == "no case matches --only nonsense"
    assert "want it without a function" in refused(capsys, "tune", "jax.numpy:sin", "f32[8]", "--full")
    assert "no module" in refused(capsys, "tune", "nonsense:f")
    assert "--candidates: '0' is not a whole number from 1 on" in refused(capsys, "tune", "jax.numpy:sin", "f32[8]", "--candidates", "0")


def test_bench_ends_as_the_harness_does(monkeypatch):
    asked = []
    monkeypatch.setattr(bench, "run", lambda options: asked.append(options) or 1)
    assert command.main(["bench", "--tags", "depthwise"]) == 1
    assert "depthwise" in asked[0].tags


# cache

ROW = (Measurement("xla", {"algorithm": "lax"}, (1.0, 2.0, 3.0), 1e-7),)


def test_cache(capsys, cache, tmp_path):
    assert json.loads(said(capsys, "cache", "show", "--json")) == {"path": str(cache), "entries": []}
    here = active.context(PLATFORM)
    table_file.write(cache, here, {"one": ROW, "two": ROW})
    table_file.write(cache, msgspec.structs.replace(here, device="Another"), {"one": ROW})
    entries = json.loads(said(capsys, "cache", "show", "--json"))["entries"]
    assert [(entry["device"], entry["rows"], entry["valid"], entry["reason"]) for entry in entries] == [
        (here.device, 2, 2, None),
        ("Another", 1, 0, "another device"),
    ]
    assert entries[0]["versions"]["jax"] == jax.__version__
    exported = tmp_path / "exported.json"
    said(capsys, "cache", "export", exported)
    assert table_file.load(exported) == table_file.load(cache)
    said(capsys, "cache", "clear", "--yes")
    assert not cache.exists() and "nothing was measured" in said(capsys, "cache", "show")
    said(capsys, "cache", "clear", "--yes")
    table_file.write(cache, here, {"three": ROW})
    said(capsys, "cache", "import", exported)
    assert {*table_file.load(cache)[0].rows} == {"one", "two", "three"}


def test_cache_says_what_does_not_hold(capsys, cache):
    here = active.context(PLATFORM)
    table_file.write(cache, msgspec.structs.replace(here, versions={**here.versions, "jax": "0.1"}), {"one": ROW})
    (line,) = [line for line in said(capsys, "cache", "show").splitlines() if line.startswith(here.device)]
    assert re.search(r"  1 +0 +\S.*with jax 0\.1 .*tune again$", line)


def test_cache_refuses(capsys, cache, tmp_path):
    assert refused(capsys, "cache", "clear") == f"clear deletes {cache}: confirm with --yes"
    assert refused(capsys, "cache", "export") == "export takes a PATH"
    assert refused(capsys, "cache", "show", "x.json") == "show takes no PATH"
    assert "gone.json" in refused(capsys, "cache", "import", tmp_path / "gone.json")
    (tmp_path / "false.json").write_text('{"format": "jaxext table 1", "entries": [{"rows": NaN}]}')
    table_file.write(cache, active.context(PLATFORM), {"one": ROW})
    before = cache.read_bytes()
    assert command.main(["cache", "import", str(tmp_path / "false.json")]) == 1
    assert re.search(r"cache import \S+false.json .*: it is not a table of this version: JSON is malformed", capsys.readouterr().err)
    assert cache.read_bytes() == before
    cache.parent.chmod(0o777)
    assert command.main(["cache", "import", str(cache)]) == 1
    assert "can be written by others" in capsys.readouterr().err
