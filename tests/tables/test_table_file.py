"""Files of measurements: which of them hold, what a false file can do (nothing), and what killed writers leave."""

import datetime
import json
import math
import os
import pathlib
import re
import signal
import subprocess
import sys

import msgspec
import pytest

import jaxext
from jaxext.tables import table_file, table_format
from jaxext.tables.table_format import Context, Entry, Measurement, select

replace = msgspec.structs.replace
HERE = Context("NVIDIA H200", 90, {"jax": "0.10.2", "jaxlib": "0.10.2"}, {"xla": "aa", "triton": "bb", "cuda": "cc"})
CPU = replace(HERE, device="AMD EPYC, 2 threads", capability=None)
NEWER = replace(HERE, versions={"jax": "0.11.2", "jaxlib": "0.10.2"})
DAY = datetime.date(2026, 11, 22)


def changed(*names):
    """Return this context with other code of these implementations."""
    return replace(HERE, sources={**HERE.sources, **dict.fromkeys(names, "dd")})


def row(*names, ms=1.0):
    return tuple(Measurement(name, {"BLOCK_M": 128, "PACKED": True, "algorithm": "lax"}, (ms, ms, 2 * ms), 1e-7) for name in names)


ROWS = {"p": row("xla")}


def read(path, context=HERE):
    """The rows that hold, and why others are ignored, "" if none are."""
    entries, ignored = table_file.try_load(path)
    table = select(entries, context, str(path))
    return table.rows, ignored or table.ignored or ""


def write(path, context=HERE, rows=ROWS):
    table_file.write(path, context, rows)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tables.json"


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The user's own table, which does not exist yet."""
    path = tmp_path / "cache" / "jaxext" / "tables.json"
    monkeypatch.setattr(table_file, "default_path", lambda: path)
    return path


# ---- what holds


def test_other_devices_and_versions_share_a_file(path):
    """Rows that were written are read.  They replace those of the same context and problem; rows of other devices are no reason to warn."""
    assert read(path) == read(path / "of" / "no" / "folder") == ({}, "")
    for context, ms in ((CPU, 3.0), (replace(HERE, capability=100), 4.0), (HERE, 1.0), (NEWER, 5.0), (HERE, 2.0)):
        write(path, context, {"p": row("xla", "triton", ms=ms), f"only {ms}": row("xla")})
    assert read(path) == ({"p": row("xla", "triton", ms=2.0), "only 1.0": row("xla"), "only 2.0": row("xla")}, "")
    assert read(path, NEWER) == ({"p": row("xla", "triton", ms=5.0), "only 5.0": row("xla")}, "")
    assert read(path, CPU)[0]["p"] == row("xla", "triton", ms=3.0)
    assert read(path, replace(HERE, device="NVIDIA B200")) == ({}, "")


def test_other_versions_do_not_hold(path):
    write(path)
    assert read(path, NEWER)[0] == {}
    assert re.search(r"was measured on 20\d\d-\d\d-\d\d with jax 0.10.2 \(here 0.11.2\): tune again", read(path, NEWER)[1])
    assert "with triton none (here 3.9.0)" in read(path, replace(HERE, versions={**HERE.versions, "triton": "3.9.0"}))[1]


@pytest.mark.parametrize(("context", "left", "why"), [
    (changed("triton"), {"p": ["xla", "cuda"], "q": ["xla"]}, "for this device it measured other code of triton: tune again"),
    (changed("cuda", "triton"), {"p": ["xla"], "q": ["xla"]}, "other code of cuda, triton: tune again"),
    (changed("xla"), {}, "other code of xla:"),
    (replace(HERE, sources={"xla": "aa"}), {"p": ["xla"], "q": ["xla"]}, "other code of cuda, triton:"),
])  # fmt: skip
def test_changed_code_does_not_hold(path, context, left, why):
    """A measurement without xla's, with which it was compared, does not hold either."""
    write(path, rows={"p": row("triton", "xla", "cuda"), "q": row("xla"), "without xla": row("cuda")})
    rows, ignored = read(path, context)
    assert {problem: [m.implementation for m in row] for problem, row in rows.items()} == left
    assert why in ignored


def test_measurements_of_this_code_go_first(path):
    """The order in which they were written does not matter."""
    old = changed("triton")
    for context, ms in ((HERE, 1.0), (old, 2.0)):
        write(path, context, {"p": row("xla", "triton", ms=ms)} | ({"q": row("xla", ms=2.0)} if context is old else {}))
    for context, ms in ((HERE, 1.0), (old, 2.0)):
        assert read(path, context) == ({"p": row("xla", "triton", ms=ms), "q": row("xla", ms=2.0)}, "")
    write(path, changed("xla"), {"p": row("xla", "triton", ms=3.0), "q": row("xla", ms=3.0)})
    assert read(path) == ({"p": row("xla", "triton", ms=1.0), "q": row("xla", ms=2.0)}, "")


def test_the_digest_is_of_the_rows():
    def digest(rows, context=HERE):
        return table_format.Table(context, rows, "here").digest

    assert digest({"p": row("xla"), "q": row("xla")}) == digest({"q": row("xla"), "p": list(row("xla"))}, CPU)
    different = [digest(rows) for rows in ({}, ROWS, {"p": row("xla", ms=2.0)}, {"p": row("xla", "cuda")}, {"q": row("xla")})]
    assert len(set(different)) == len(different)


# ---- what a false file can do

MEASUREMENT = {"implementation": "xla", "config": {"algorithm": "lax"}, "ms": [1.0, 1.5, 2.0], "error": 1e-7}
ENTRY = msgspec.to_builtins(HERE) | {"measured": "2026-11-22", "rows": {"p": [MEASUREMENT]}}
DOCUMENT = {"format": "jaxext table 1", "entries": [ENTRY]}
WHOLE = json.dumps(DOCUMENT).encode()


def entry(**fields):
    return json.dumps(DOCUMENT | {"entries": [ENTRY | fields]}).encode()


def measurement(**fields):
    return entry(rows={"p": [MEASUREMENT | fields]})


# The file, and words of the refusal.
FALSE = {
    "cut short": (WHOLE[:-20], "truncated"),
    "no text": (b"\xff\xfe\x00{", "malformed"),
    "another format": (json.dumps({"format": "jaxext table 2", "entries": []}).encode(), r"'jaxext table 2' - at `\$.format`"),
    "more fields": (json.dumps(DOCUMENT | {"code": "import os"}).encode(), "unknown field `code`"),
    "a strange field": (measurement(**{"\x1b[2J": 1}), r"unknown field .* - at `\$.entries\[0\].rows"),
    "1e999": (WHOLE.replace(b"2.0]", b"1e999]"), r"out of range - at .*ms\[2\]"),
    "zero": (measurement(ms=[0.0, 0.0, 0.0]), "want three quartiles above 0"),
    "third below median": (measurement(ms=[1.0, 3.0, 2.0]), "want three quartiles above 0, in order"),
    "first above median": (measurement(ms=[2.0, 1.0, 3.0]), "want three quartiles above 0, in order"),
    "control characters": (measurement(implementation="xla\x1b[2J"), "at .*implementation"),
    "reversed text": (measurement(config={"algorithm": "\u202elax"}), "at .*config"),
    "a problem over lines": (entry(rows={"p\n": [MEASUREMENT]}), "at `key` in .*rows"),
    "no day": (entry(measured="2026-13-41"), "at .*measured"),
    "without end": (b" " * (table_format.MAX_BYTES + 1), "over 64 MiB"),
}


@pytest.mark.parametrize(("data", "why"), FALSE.values(), ids=FALSE.keys())
def test_a_false_file_is_refused_as_a_whole(path, data, why):
    path.write_bytes(data)
    with pytest.raises(ValueError, match=f"it is not a table of this version: .*{why}") as raised:
        table_file.load(path)
    assert str(raised.value).isprintable() and len(str(raised.value)) < 1000  # it ends up in terminals and logs
    assert read(path) == ({}, str(raised.value))


def test_the_true_file_is_read(path):
    """Each false one differs from it in one thing."""
    path.write_bytes(WHOLE)
    assert read(path) == ({"p": (Measurement("xla", {"algorithm": "lax"}, (1.0, 1.5, 2.0), 1e-7),)}, "")


# ---- in whose hands it is


def test_a_folder_is_no_table(path):
    path.mkdir()
    assert "Is a directory" in read(path)[1]
    for refused in (table_file.check_writable, table_file.clear, write):
        with pytest.raises(IsADirectoryError):
            refused(path)
    assert not [*path.parent.glob("*.lock")]


def test_the_own_table_is_for_the_user_alone(own):
    before = os.umask(0)
    try:
        write(own)
    finally:
        os.umask(before)
    assert read(own) == (ROWS, "")
    assert (own.parent.stat().st_mode & 0o777, own.stat().st_mode & 0o777) == (0o700, 0o600)


WHY = "is a link, belongs to another user or can be written by others"


def someone_elses(path, monkeypatch):
    if os.geteuid() == 0:  # whose files are trusted
        os.chown(path, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)


def moved(path, _=None):
    """It lies elsewhere, and a link in its place."""
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


@pytest.mark.parametrize("of", ["folder", "file"])
@pytest.mark.parametrize(
    "make",
    [someone_elses, lambda path, _: path.chmod(0o702), lambda path, _: path.chmod(0o720), lambda path, _: path.chmod(0o1777), moved],
    ids=["another's", "of the world", "of the group", "sticky", "link"],
)
def test_the_own_table_in_others_hands(own, of, make, monkeypatch):
    """It is not read, since nobody asked for it, nor written, since others could change it."""
    write(own)
    before = own.read_bytes()
    make(own if of == "file" else own.parent, monkeypatch)
    rows, ignored = read(own)
    assert rows == {} and WHY in ignored
    monkeypatch.setattr(table_file, "default_path", lambda: own.parent / ".." / "jaxext" / "tables.json")  # the same path in other words
    assert WHY in read(own)[1]
    for refused in (table_file.check_writable, table_file.clear, write):
        with pytest.raises(PermissionError, match=WHY):
            refused(own)
    assert own.read_bytes() == before


def test_a_table_that_the_user_names_may_be_a_link(path):
    """The link stays, and the file keeps its mode."""
    write(path)
    path.chmod(0o664)
    moved(path)
    write(path, rows={"q": row("xla")})
    assert path.is_symlink() and path.stat().st_mode & 0o777 == 0o664
    assert set(read(path)[0]) == {"p", "q"}


# ---- writing


def test_the_own_file_that_is_no_table_is_renamed(own):
    """It may be of another version."""
    table_file.check_writable(own)
    own.write_bytes(data := b'{"format": "jaxext table 2", "entries": []}')
    own.chmod(0o600)
    table_file.check_writable(own)
    with pytest.warns(UserWarning, match="jaxext renamed .*tables.json to .*not a table"):
        write(own)
    assert read(own) == (ROWS, "")
    assert own.with_name("tables.json.bad").read_bytes() == data


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("data", [b"alias ls='ls -l'\n", b""])
def test_another_file_that_is_no_table_is_left_alone(path, data, linked):
    """A file to which a link leads that someone planted in the table's place is left alone too."""
    path.write_bytes(data)
    if linked:
        moved(path)
    before = sorted(path.parent.iterdir())
    for refused in (table_file.check_writable, table_file.clear, write):
        with pytest.raises(ValueError, match="want a table, or a path where there is nothing"):
            refused(path)
    assert path.read_bytes() == data and sorted(path.parent.iterdir()) == before and path.is_symlink() == linked


def test_a_place_where_nothing_can_be_written(path):
    """The file and its lock cannot be written, which is known before anything is measured."""
    path.write_text("a file")
    for refused in (table_file.check_writable, write):
        with pytest.raises(NotADirectoryError):
            refused(path / "folder" / "tables.json")
        with pytest.raises(OSError):
            refused("/sys/tables.json")  # root's too
    table_file.check_writable(path.parent / "new" / "new.json")
    assert not (path.parent / "new").exists()


def test_a_file_keeps_the_contexts_that_were_written_last(path):
    """The last ones of each device: otherwise the file would grow with every version."""
    many = [replace(HERE, versions={"jax": f"0.{i}"}) for i in range(table_file.CONTEXTS + 2)]
    for context in [CPU, *many[:-1], many[1], many[-1]]:
        write(path, context)
    assert [entry.context for entry in table_file.load(path)] == [CPU, *many[3:-1], many[1], many[-1]]


def test_entries_of_one_context_are_joined(path):
    """The rows that were written last count, and the last day."""
    table_file.merge(path, [Entry.of(HERE, DAY, {"one": row("xla"), "two": row("xla")})])
    earlier = DAY - datetime.timedelta(1)
    table_file.merge(path, [Entry.of(HERE, earlier, {"two": row("xla", ms=2.0)}), Entry.of(HERE, earlier, {"three": row("xla")})])
    rows = {"one": row("xla"), "two": row("xla", ms=2.0), "three": row("xla")}
    assert table_file.load(path) == (Entry.of(HERE, DAY, rows),)
    assert "measured on 2026-11-22 with" in read(path, NEWER)[1]


@pytest.mark.parametrize("measured", [
    Measurement("xla", {}, (1.0, 1.0, math.inf), 0.0),
    Measurement("xla", {"tile": (1, 2)}, (1.0, 1.0, 1.0), 0.0),  # type: ignore[dict-item]
    Measurement("xla\n", {}, (1.0, 1.0, 1.0), 0.0),
])  # fmt: skip
def test_what_would_not_be_read_is_not_written(path, measured):
    with pytest.raises(ValueError, match="want three|Expected"):
        write(path, rows={"p": [measured]})
    assert [*path.parent.iterdir()] == []
    with pytest.raises(ValueError, match="want three"):
        row("xla", ms=math.nan)


def test_a_full_disk_leaves_what_was_there(path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    write(path)
    monkeypatch.setattr(pathlib.Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left on device: .*tables.json"):
        write(path, rows={"q": row("xla")})
    assert read(path) == (ROWS, "") and not path.with_name("tables.json.new").exists()


# Tables are written without jax: the package around them, which imports it, is left out.
WRITER = f"""
import os, pathlib, shutil, signal, sys, time, types
package = types.ModuleType("jaxext")
package.__path__ = [{str(pathlib.Path(jaxext.__file__).parent)!r}]
sys.modules["jaxext"] = package
from jaxext.tables import table_file, table_format
assert "jax" not in sys.modules
path, name, times, how = sys.argv[1:]
context = table_format.Context("NVIDIA H200", 90, {HERE.versions!r}, {HERE.sources!r})
row = [table_format.Measurement("xla", {{"algorithm": "lax"}}, (1.0, 1.5, 2.0), 0.0)]

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

if how == "slow":
    while not pathlib.Path(path + ".go").exists():
        time.sleep(0.001)
    shutil.copymode = lambda *_: time.sleep(0.01)
elif how == "in the middle":
    pathlib.Path.write_bytes = lambda path, _: (os.write(os.open(path, os.O_WRONLY), b'{{"format": '), die())
elif how == "before it takes the place":
    pathlib.Path.replace = die
for i in range(int(times)):
    table_file.write(path, context, {{f"{{name}} {{i}}": row}})
    print(i, flush=True)
"""


def writer(path, name, times=1, how=""):
    return subprocess.Popen([sys.executable, "-c", WRITER, path, name, str(times), how], stdout=subprocess.PIPE, text=True)


def test_processes_that_write_at_once_lose_nothing(path):
    writers = [writer(path, str(i), times=8, how="slow") for i in range(4)]
    path.with_name(f"{path.name}.go").touch()
    assert [w.communicate(timeout=120)[0].split() for w in writers] == [[str(i) for i in range(8)]] * 4
    rows, ignored = read(path)
    assert set(rows) == {f"{name} {i}" for name in range(4) for i in range(8)} and ignored == ""


@pytest.mark.parametrize("how", ["in the middle", "before it takes the place"])
def test_a_killed_writer_leaves_what_was_there(path, how):
    write(path)
    killed = writer(path, "q", how=how)
    assert (killed.communicate(timeout=60)[0], killed.returncode) == ("", -signal.SIGKILL)
    assert read(path) == (ROWS, "")
    write(path, rows={"r": row("xla")})
    assert set(read(path)[0]) == {"p", "r"}
    assert {file.name for file in path.parent.iterdir()} <= {"tables.json", "tables.json.lock"}
