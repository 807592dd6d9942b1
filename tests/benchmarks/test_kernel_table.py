"""The table of compiled kernels: what it writes of one kernel, and with which status it ends."""

import json

import pytest

from benchmarks import compiled, compiled_cuda, kernel_table
from jaxext.bench import triton_ptx

KERNEL = ["--kernel", "gram", "--problem", "gram 1024x4096"]


@pytest.mark.skipif(triton_ptx.missing() is not None, reason=str(triton_ptx.missing()))
def test_a_kernel_and_its_digest(capsys, monkeypatch, tmp_path):
    """Digests are written if no kernel breaks a law."""
    monkeypatch.setattr(compiled, "compile_all", lambda todo, jobs: map(compiled.compile_row, todo[:1]))
    rows, digests = tmp_path / "rows.json", tmp_path / "digests.json"
    assert kernel_table.main([*KERNEL, "--check", "--json", str(rows), "--digests", str(digests)]) == 0
    document = json.loads(rows.read_text())["triton"]
    assert {row["problem"] for row in document["rows"]} == {"gram 1024x4096"} and document["version"]
    assert json.loads(digests.read_text())["rows"] == dict(map(compiled.digests, document["rows"]))
    digests.unlink()
    monkeypatch.setattr(compiled, "compile_all", lambda todo, jobs: document["rows"])
    monkeypatch.setitem(compiled.LAWS, "has registers", lambda row: row["registers"] > 0)
    assert kernel_table.main([*KERNEL, "--check", "--digests", str(digests)]) == 1 and not digests.exists()
    assert capsys.readouterr().out.splitlines()[-1].endswith("!! has registers")
    for arguments, sentence in (["--module", "m.so"], "ask for one of them"), (["--arch", "9"], "'9' is no list of GPUs"):
        with pytest.raises(SystemExit, match="2"):
            kernel_table.main([*KERNEL, *arguments])
        assert sentence in capsys.readouterr().err


def test_reasons_why_kernels_are_not_here(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "interpreter cannot compile" in (triton_ptx.missing() or "")
    monkeypatch.setattr(triton_ptx.importlib.util, "find_spec", lambda name: None)
    assert triton_ptx.missing() == "Triton is not installed: pip install 'jaxext[triton]'"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "cuobjdump is neither in Triton's wheel nor on the PATH" in (compiled_cuda.missing(tmp_path / "m.so") or "")
