"""Ends of commands where something around them is missing: one line, status 1 or 2, and no lock file left behind."""

import os
import pathlib
import sys

import jax
import pytest

import jaxext
from jaxext.cli import arguments, command, terminal
from jaxext.tables import active, table_file
from jaxext.tables.table_format import Measurement

MATMUL = ["explain", "jaxext:matmul", "f32[8,4]", "f32[4,2]"]
PLATFORM = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
ROW = (Measurement("xla", {"algorithm": "lax"}, (1.0, 2.0, 3.0), 1e-7),)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Another user's own table."""
    path = tmp_path / "cache/jaxext/tables.json"
    monkeypatch.setattr(table_file, "default_path", lambda: path)
    return path


def ends(capsys, status, *arguments):
    """The one line that a command ends with."""
    try:
        got = command.main([*map(str, arguments)])
    except SystemExit as end:
        got = end.code
    assert got == status
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize("name", command.COMMANDS)
def test_help_in_no_columns(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "2")
    with pytest.raises(SystemExit) as end:
        command.main([name, "--help"])
    assert end.value.code == 0 and "examples:" in capsys.readouterr().out


def test_tables_in_no_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "2")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    terminal.show(terminal.Grid("title", ("a", "b"), [("word " * 20, 1)]))
    assert capsys.readouterr().out.count("word") == 20


def test_closed_stdout(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    status = command.main(MATMUL)
    monkeypatch.undo()
    assert status == 1
    assert capsys.readouterr().err == "python -m jaxext: stdout is closed: redirect it, for example to /dev/null\n"


FULL = pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="no /dev/full here")


@FULL
@pytest.mark.parametrize("json", [[], ["--json"]], ids=["table", "json"])
def test_full_disk(json, capsys, monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert ends(capsys, 1, *MATMUL, *json) == "python -m jaxext: cannot write: No space left on device"
        full.write("what is left")  # goes nowhere at exit


@FULL
def test_full_disk_of_a_file(capsys, tmp_path):
    (tmp_path / "it.json").symlink_to("/dev/full")
    assert ends(capsys, 1, *MATMUL, "--json", tmp_path / "it.json") == "python -m jaxext: --json: [Errno 28] No space left on device"


def test_an_error_of_the_users_is_none_of_the_output(monkeypatch):
    def lacks(*_, **__):
        open("/nonexistent/weights")

    monkeypatch.setattr(jaxext, "explain", lacks)
    with pytest.raises(FileNotFoundError, match="weights"):
        command.main(MATMUL)


@pytest.mark.skipif(not pathlib.Path("/proc/self").exists(), reason="no /proc here")
def test_json_where_no_file_can_be_made(capsys, monkeypatch):
    """The error comes before any work; permissions do not show it."""
    monkeypatch.setattr(jaxext, "explain", None)
    assert ends(capsys, 2, *MATMUL, "--json", "/proc/x.json").endswith("--json: /proc/x.json cannot be written")


def test_json_into_a_file_that_is_there(capsys, tmp_path):
    (path := tmp_path / "it.json").write_text("old")
    assert command.main([*MATMUL, "--json", str(path)]) == 0
    assert path.read_text().startswith("{") and os.listdir(tmp_path) == ["it.json"]


@pytest.fixture
def deleted(tmp_path, monkeypatch):
    (tmp_path / "deleted").mkdir()
    monkeypatch.chdir(tmp_path / "deleted")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    (tmp_path / "deleted").rmdir()


@pytest.mark.parametrize(("status", "arguments", "sentence"), [
    (2, ["explain", "nonsense:f"], "no module 'nonsense', not installed, and the working directory was deleted"),
    (2, [*MATMUL, "--json", "x.json"], "--json: x.json cannot be written"),
    (2, [*MATMUL, "--table", "x.json"], "--table: use_table: there is no file x.json"),
    (2, ["tune", *MATMUL[1:], "--table", "x.json"], "--table: [Errno 2] No such file or directory"),
    (2, ["cache", "import", "x.json"], "no table x.json"),
])  # fmt: skip
def test_deleted_working_directory(status, arguments, sentence, capsys, deleted):
    assert sentence in ends(capsys, status, *arguments)


def test_what_needs_no_working_directory(capsys, deleted):
    assert command.main(MATMUL) == 0
    assert command.main(["cache", "show"]) == 0


@pytest.mark.parametrize("error", [RuntimeError("Unable to initialize backend 'cuda': none\nmore"), AssertionError()])
@pytest.mark.parametrize(
    "arguments", [["cache", "show"], MATMUL, ["info"], ["bench", "--tags", "mlp"], ["tune", "--tags", "mlp"]], ids=lambda a: a[0]
)
def test_no_device(arguments, error, capsys, monkeypatch):
    """JAX_PLATFORMS=cuda is set and there is no GPU."""

    def none(*_):
        raise error

    monkeypatch.setattr(jax, "devices", none)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    line = ends(capsys, 1, *arguments)
    assert line.startswith("python -m jaxext: jax: no device of JAX_PLATFORMS='cuda' was found")
    assert ("Unable to initialize" in line) == isinstance(error, RuntimeError)


def test_tables_go_from_file_to_file_without_a_device(capsys, cache, tmp_path, monkeypatch):
    def none(*_):
        raise RuntimeError("none")

    table_file.write(tmp_path / "x.json", active.context(PLATFORM), {"one": ROW})
    monkeypatch.setattr(jax, "devices", none)
    assert command.main(["cache", "import", str(tmp_path / "x.json")]) == 0
    assert "no device was found" in capsys.readouterr().out
    assert table_file.load(cache)


# What is refused leaves no lock file.


def locks(folder):
    return [*folder.rglob("*.lock")]


@pytest.mark.parametrize(("status", "arguments"), [
    (2, ["tune", *MATMUL[1:], "--table", "notes.json"]),
    (2, ["tune", *MATMUL[1:], "--table", "folder"]),
    (2, ["cache", "export", "x.json"]),
    (2, ["cache", "import", "gone.json"]),
    (2, ["cache", "show", "--table", "gone.json"]),
    (1, ["cache", "import", "notes.json"]),
    (1, ["cache", "import", "good.json", "--table", "notes.json"]),
    (1, ["cache", "import", "good.json", "--table", "folder"]),
    (1, ["cache", "export", "notes.json", "--table", "good.json"]),
    (1, ["cache", "clear", "--yes", "--table", "notes.json"]),
    (1, ["cache", "clear", "--yes", "--table", "folder"]),
    (2, ["cache", "clear"]),
])  # fmt: skip
def test_refused_commands_leave_no_lock_file(status, arguments, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.json").write_text("mine")
    (tmp_path / "folder").mkdir()
    table_file.write("good.json", active.context(PLATFORM), {"one": ROW})
    for lock in locks(tmp_path):
        lock.unlink()
    assert ends(capsys, status, *arguments)
    assert not locks(tmp_path)
    assert (tmp_path / "notes.json").read_text() == "mine"


def test_clearing_nothing_leaves_no_lock_file(tmp_path, capsys):
    assert command.main(["cache", "clear", "--yes", "--table", str(tmp_path / "none.json")]) == 0
    assert not locks(tmp_path)


# Functions without products.


def test_tune_nothing(capsys, tmp_path):
    """It says what to do, and is a failure: nothing was stored."""
    out = command.main(["tune", "jax.numpy:sin", "f32[3]", "--table", str(tmp_path / "t.json")])
    assert out == 1 and not (tmp_path / "t.json").exists()
    said, line = capsys.readouterr()
    assert said == ""
    assert line.splitlines()[-1].startswith("python -m jaxext: tune: the function has no operation of jaxext, so nothing was measured: ")
    assert "--in-place-of-lax" in line


def test_explain_nothing(capsys):
    assert command.main(["explain", "jax.numpy:sin", "f32[2]"]) == 0
    assert "--in-place-of-lax" in capsys.readouterr().out


def test_a_name_of_a_gpu_is_no_architecture(capsys):
    with pytest.raises(SystemExit):
        command.main([*MATMUL, "--arch", "h100"])
    assert "arch is 'h100', want \"sm_90a\" (H100, H200)" in capsys.readouterr().err
    with pytest.raises(Exception, match="sm_90a"):
        arguments.arch("hopper")
