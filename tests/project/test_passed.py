"""The parts that CI leaves out (.ci/passed.py): a line holds until a file of its part, or a compiler, is another."""

import fnmatch
import importlib.util
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = ROOT / ".ci/passed.py"
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="no .ci here")


def script():
    spec = importlib.util.spec_from_file_location("passed", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def passed(tmp_path, monkeypatch):
    """The script in a repository of its own with a file of the part `cuda` and another file."""
    module = script()
    for name in (".ci/passed.txt", "csrc/common/ffi.cc", "jaxext/core/form.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    subprocess.run("git init -q && git add -A", shell=True, cwd=tmp_path, check=True)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "PASSED", tmp_path / ".ci/passed.txt")
    monkeypatch.setattr(module, "version", lambda compiler: "1.0")
    return module


def test_a_line_holds_until_a_file_or_a_compiler_is_another(passed, monkeypatch):
    assert passed.main(["cuda"]) == 1
    assert passed.main(["cuda", "--write"]) == passed.main(["ptxsim", "--write"]) == passed.main(["cuda"]) == 0
    (passed.ROOT / "jaxext/core/form.py").write_text("1")
    assert passed.main(["cuda"]) == 0
    (passed.ROOT / "csrc/common/ffi.cc").write_text("1")
    assert passed.main(["cuda"]) == 1
    (passed.ROOT / "csrc/common/ffi.cc").write_text("")
    assert passed.main(["cuda"]) == 0
    monkeypatch.setattr(passed, "version", lambda compiler: "1.1")
    assert passed.main(["cuda"]) == 1


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no repository here")
def test_every_pattern_matches_a_file():
    passed = script()
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    for patterns, _ in passed.PARTS.values():
        for pattern in patterns.split():
            assert any(fnmatch.fnmatchcase(name, pattern) for name in listed), pattern
