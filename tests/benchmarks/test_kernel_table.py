"""The table of compiled kernels, of stand-ins that nobody compiled: what it says, and with which status it ends."""

import json
import pathlib
import types

import pytest

from benchmarks import compiled, compiled_cuda, kernel_table
from jaxext.bench import triton_ptx


def said(capsys, *arguments, status=0):
    assert kernel_table.main([*map(str, arguments)]) == status
    return capsys.readouterr().out


@pytest.fixture
def stand_ins(monkeypatch):
    """Kernels that nobody compiled."""
    triton = [{"kernel": "matmul", "problem": name, "good": name == "good"} for name in ("good", "bad")]
    cuda = [{"kernel": kernel, "good": True} for kernel in ("matmul_nn", "ragged_tn", "conv2d_fprop")]
    for table in (triton_ptx, compiled_cuda):
        monkeypatch.setattr(table, "missing", lambda *_: None)
    for table in (compiled, compiled_cuda):
        monkeypatch.setattr(table, "offences", lambda row: [] if row["good"] else ["spills"])
        monkeypatch.setattr(table, "line", lambda row: f"{row['kernel']} {'' if row['good'] else '!! spills'}")
    monkeypatch.setattr(compiled, "programs", lambda kernel, problem, *_: [row for row in triton if problem in row["problem"]])
    monkeypatch.setattr(compiled, "compile_all", lambda todo, jobs: iter(todo))
    monkeypatch.setattr(compiled_cuda, "own", lambda: pathlib.Path("module.so"))
    monkeypatch.setattr(compiled_cuda, "load", lambda path: types.SimpleNamespace(cuda_version="13.0", archs="80"))
    monkeypatch.setattr(compiled_cuda, "collect", lambda path, module, archs: cuda)
    monkeypatch.setattr(kernel_table.importlib.metadata, "version", lambda name: "3.9.0")
    monkeypatch.setattr(kernel_table, "report", lambda: {"device": "none"})


def test_kernels(capsys, stand_ins, tmp_path):
    document = json.loads(said(capsys, "--json"))
    assert document["triton"]["version"] == "3.9.0" and document["cuda"]["nvcc"] == "13.0"
    assert [row["problem"] for row in document["triton"]["rows"]] == ["good", "bad"]
    assert [row["kernel"] for row in document["cuda"]["rows"]] == ["matmul_nn", "ragged_tn", "conv2d_fprop"]
    lines = said(capsys, "--json", tmp_path / "k.json").splitlines()
    assert "2 kernels, 1 bad" in lines and "3 kernels, 0 bad" in lines and lines.count("matmul !! spills") == 2
    assert json.loads((tmp_path / "k.json").read_text()) == document


def test_digests_of_kernels(capsys, stand_ins, tmp_path):
    """They are written where no kernel breaks a law."""
    path = tmp_path / "k.json"
    assert "2 kernels, 1 bad" in said(capsys, "--digests", path) and not path.exists()
    assert "1 kernels, 0 bad" in said(capsys, "--problem", "good", "--digests", path)
    ((asked, made),) = json.loads(path.read_text())["rows"].items()
    assert (asked, made) == compiled.digests({"kernel": "matmul", "problem": "good", "good": True})


def test_why_kernels_are_not_here(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "interpreter cannot compile" in (triton_ptx.missing() or "")
    monkeypatch.setattr(triton_ptx.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("jaxext.backends.cuda.cuda_binding.missing", lambda: "built without CUDA (no nvcc)")
    assert triton_ptx.missing() == "Triton is not installed: pip install 'jaxext[triton]'"
    assert compiled_cuda.missing() == "no CUDA kernels: built without CUDA (no nvcc)"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (
        compiled_cuda.missing(tmp_path / "m.so") == "cuobjdump is neither in Triton's wheel nor on the PATH: pip install 'jaxext[triton]'"
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--of", "cuda", "--problem", "good"], "ask for one of them"),
        (["--of", "triton", "--module", "m.so"], "ask for one of them"),
        (["--problem", "nonsense"], "no problem has such a name, kernel and GPU"),
        (["--arch", "ninety"], "'ninety' is no list of GPUs"),
        (["--json", "/dev/null/k.json"], "--json: "),
    ],
)
def test_kernels_refuses(arguments, sentence, capsys, stand_ins):
    with pytest.raises(SystemExit) as end:
        kernel_table.main(arguments)
    assert end.value.code == 2 and sentence in capsys.readouterr().err
