"""The table of compiled kernels, of stand-ins that nobody compiled: what it writes, and with which status it ends."""

import json
import pathlib
import types

import pytest

from benchmarks import compiled, compiled_cuda, kernel_table
from jaxext.bench import triton_ptx


@pytest.fixture
def stand_ins(monkeypatch):
    triton = [{"kernel": "matmul", "problem": name, "good": name == "good"} for name in ("good", "bad")]
    for table in (triton_ptx, compiled_cuda):
        monkeypatch.setattr(table, "missing", lambda *_: None)
    for table in (compiled, compiled_cuda):
        monkeypatch.setattr(table, "offences", lambda row: [] if row["good"] else ["spills"])
        monkeypatch.setattr(table, "line", lambda row: f"{row['kernel']} {'' if row['good'] else '!! spills'}")
    monkeypatch.setattr(compiled, "programs", lambda kernel, problem, *_: [row for row in triton if problem in row["problem"]])
    monkeypatch.setattr(compiled, "compile_all", lambda todo, jobs: iter(todo))
    monkeypatch.setattr(compiled_cuda, "own", lambda: pathlib.Path("module.so"))
    monkeypatch.setattr(compiled_cuda, "load", lambda path: types.SimpleNamespace(cuda_version="13.0", archs="80"))
    monkeypatch.setattr(compiled_cuda, "collect", lambda path, module, archs: [{"kernel": "matmul_nn", "good": True}])


def test_kernels_and_their_digests(capsys, stand_ins, tmp_path):
    """Digests are written if no kernel breaks a law."""
    path, digests = (str(tmp_path / name) for name in ("k.json", "digests.json"))
    assert kernel_table.main(["--json", path]) == 0 and kernel_table.main(["--check"]) == 1
    lines, document = capsys.readouterr().out.splitlines(), json.loads(pathlib.Path(path).read_text())
    assert "2 kernels, 1 bad" in lines and "1 kernels, 0 bad" in lines and "matmul !! spills" in lines
    assert [row["problem"] for row in document["triton"]["rows"]] == ["good", "bad"] and document["cuda"]["nvcc"] == "13.0"
    kernel_table.main(["--digests", digests])
    assert not pathlib.Path(digests).exists()
    kernel_table.main(["--problem", "good", "--digests", digests])
    good = {"kernel": "matmul", "problem": "good", "good": True}
    assert [*json.loads(pathlib.Path(digests).read_text())["rows"].items()] == [compiled.digests(good)]


def test_reasons_why_kernels_are_not_here(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "interpreter cannot compile" in (triton_ptx.missing() or "")
    monkeypatch.setattr(triton_ptx.importlib.util, "find_spec", lambda name: None)
    assert triton_ptx.missing() == "Triton is not installed: pip install 'jaxext[triton]'"
    monkeypatch.setattr("jaxext.backends.cuda.cuda_binding.missing", lambda: "built without CUDA (no nvcc)")
    assert compiled_cuda.missing() == "no CUDA kernels: built without CUDA (no nvcc)"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "cuobjdump is neither in Triton's wheel nor on the PATH" in (compiled_cuda.missing(tmp_path / "m.so") or "")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--of", "triton", "--module", "m.so"], "ask for one of them"),
        (["--problem", "nonsense"], "no problem has such a name, kernel and GPU"),
        (["--arch", "ninety"], "'ninety' is no list of GPUs"),
    ],
)
def test_wrong_options_are_named(arguments, sentence, capsys, stand_ins):
    with pytest.raises(SystemExit, match="2"):
        kernel_table.main(arguments)
    assert sentence in capsys.readouterr().err
