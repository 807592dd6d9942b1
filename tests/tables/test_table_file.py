"""Files of measurements: which of them hold, what a false file can do (nothing), and what killed writers leave."""

import datetime
import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import filelock
import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

import jaxext
from jaxext.tables import table_file, table_format
from jaxext.tables.table_format import Context, Entry, Measurement, select

replace = msgspec.structs.replace
HERE = Context("NVIDIA H200", 90, {"jax": "0.10.2", "jaxlib": "0.10.2"}, {"xla": "aa", "triton": "bb", "cuda": "cc"})
CPU = replace(HERE, device="AMD EPYC, 2 threads", capability=None)
NEWER = replace(HERE, versions={"jax": "0.11.2", "jaxlib": "0.10.2"})
DAY = datetime.date(2026, 11, 22)


def changed(*names):
    """Here, with other code of these implementations."""
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


def test_what_was_written_is_read(path):
    assert read(path) == read(path / "of" / "no" / "folder") == ({}, "")
    rows = {"matmul_nn B=1": row("xla", "triton"), "matmul_nn B=2": row("xla")}
    write(path, rows=rows)
    assert read(path) == (rows, "")


def test_other_devices_and_versions_share_a_file(path):
    """Rows replace those of the same context and problem; rows of other devices are no reason to warn."""
    for context, ms in ((CPU, 3.0), (replace(HERE, capability=100), 4.0), (HERE, 1.0), (NEWER, 5.0), (HERE, 2.0)):
        write(path, context, {"p": row("xla", ms=ms), f"only {ms}": row("xla")})
    assert read(path) == ({"p": row("xla", ms=2.0), "only 1.0": row("xla"), "only 2.0": row("xla")}, "")
    assert read(path, NEWER) == ({"p": row("xla", ms=5.0), "only 5.0": row("xla")}, "")
    assert read(path, CPU)[0]["p"] == row("xla", ms=3.0)
    assert read(path, replace(HERE, device="NVIDIA B200")) == ({}, "")


def test_other_versions_do_not_hold(path):
    write(path)
    assert read(path, NEWER)[0] == {}
    assert re.search(r"was measured on 20\d\d-\d\d-\d\d with jax 0.10.2 \(here 0.11.2\): tune again", read(path, NEWER)[1])
    assert "with triton none (here 3.9.0)" in read(path, replace(HERE, versions={**HERE.versions, "triton": "3.9.0"}))[1]


@pytest.mark.parametrize(
    ("context", "left", "why"),
    [
        (changed("triton"), {"p": ["xla", "cuda"], "q": ["xla"]}, "in 1 of 2 problems of this device it measured other code of triton:"),
        (changed("cuda", "triton"), {"p": ["xla"], "q": ["xla"]}, "other code of cuda, triton: tune again"),
        (changed("xla"), {}, "in 2 of 2 problems of this device it measured other code of xla:"),
        (replace(HERE, sources={"xla": "aa"}), {"p": ["xla"], "q": ["xla"]}, "other code of cuda, triton:"),
    ],
)
def test_changed_code_does_not_hold(path, context, left, why):
    """Nor does any measurement without xla's, with which it was compared."""
    write(path, rows={"p": row("triton", "xla", "cuda"), "q": row("xla")})
    rows, ignored = read(path, context)
    assert {problem: [m.implementation for m in row] for problem, row in rows.items()} == left
    assert why in ignored


def test_measurements_of_this_code_go_first(path):
    """Whichever was written last."""
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
    "empty": (b"", "truncated"),
    "cut short": (WHOLE[:-20], "truncated"),
    "no text": (b"\xff\xfe\x00{", "malformed"),
    "half a character": (measurement(config={"algorithm": "\ud800"}), "malformed"),
    "a list": (b"[]", "Expected `object`, got `array`"),
    "another format": (json.dumps({"format": "jaxext table 2", "entries": []}).encode(), r"'jaxext table 2' - at `\$.format`"),
    "no format": (b'{"entries": []}', "required field `format`"),
    "more fields": (json.dumps(DOCUMENT | {"code": "import os"}).encode(), "unknown field `code`"),
    "a strange field": (measurement(**{"\x1b[2J": 1}), r"unknown field .* - at `\$.entries\[0\].rows"),
    "deep": (b"[" * 200_000, "got `array`"),
    "deep inside": (WHOLE.replace(b'"lax"', b"[" * 100_000 + b"]" * 100_000), "got `array` - at .*config"),
    "NaN": (measurement(ms=[float("nan")] * 3), "malformed"),
    "1e999": (WHOLE.replace(b"2.0]", b"1e999]"), r"out of range - at .*ms\[2\]"),
    "negative": (measurement(ms=[-3.0, -2.0, -1.0]), "want three quartiles above 0"),
    "zero": (measurement(ms=[0.0, 0.0, 0.0]), "want three quartiles above 0"),
    "first above median": (measurement(ms=[2.0, 1.0, 3.0]), "want three quartiles above 0, in order"),
    "third below median": (measurement(ms=[1.0, 3.0, 2.0]), "want three quartiles above 0, in order"),
    "true times": (measurement(ms=[True, True, True]), "got `bool`"),
    "huge config": (measurement(config={"BLOCK_M": 2**63}), "at .*config"),
    "many configs": (measurement(config={str(i): i for i in range(1000)}), "length <= 100"),
    "long text": (measurement(implementation="x" * 5000), "length <= 1000"),
    "control characters": (measurement(implementation="xla\x1b[2J"), "at .*implementation"),
    "reversed text": (measurement(config={"algorithm": "\u202elax"}), "at .*config"),
    "a problem over lines": (entry(rows={"p\n": [MEASUREMENT]}), "at `key` in .*rows"),
    "xla was not measured": (measurement(implementation="triton"), "row 'p' has no measurement of xla"),
    "an empty row": (entry(rows={"p": []}), "length >= 1"),
    "a candidate twice": (entry(rows={"p": [MEASUREMENT] * 2}), "row 'p' has a candidate twice"),
    "many candidates": (entry(rows={"p": [MEASUREMENT] * 257}), "length <= 256"),
    "negative capability": (entry(capability=-90), "at .*capability"),
    "versions of another type": (entry(versions={"jax": 0.1}), "at .*versions"),
    "no day": (entry(measured="2026-13-41"), "at .*measured"),
    "without end": (b" " * (table_format.MAX_BYTES + 1), "over 64 MiB"),
}


@pytest.mark.parametrize(("data", "why"), FALSE.values(), ids=FALSE.keys())
def test_a_false_file_is_refused_as_a_whole(path, data, why):
    path.write_bytes(data)
    with pytest.raises(ValueError, match=f"it is not a table of this version: .*{why}") as raised:
        table_file.load_entries(path)
    assert str(raised.value).isprintable() and len(str(raised.value)) < 1000  # it ends up in terminals and logs
    assert read(path) == ({}, str(raised.value))


def test_the_true_file_is_read(path):
    """Each false one differs from it in one thing; a row holds all that `tune` measures."""
    path.write_bytes(WHOLE)
    assert read(path) == ({"p": (Measurement("xla", {"algorithm": "lax"}, (1.0, 1.5, 2.0), 1e-7),)}, "")
    path.write_bytes(entry(rows={"p": [MEASUREMENT | {"config": {"tile": i}} for i in range(256)]}))
    assert len(read(path)[0]["p"]) == 256


@pytest.mark.parametrize("name", ["../../../etc/passwd", "$(rm -rf ~)", "{0.__class__}", "'; DROP TABLE", "__import__('os')"])
def test_names_are_only_compared(path, name):
    """They name no file and are no code."""
    path.write_bytes(entry(rows={name: [MEASUREMENT, MEASUREMENT | {"implementation": name, "config": {name: name}}]}))
    rows, ignored = read(path)
    assert [m.implementation for m in rows[name]] == ["xla"] and "measured other code of" in ignored
    assert [*path.parent.rglob("*")] == [path]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), value=JSON)
def test_any_value_anywhere_is_refused_or_means_what_it_says(data, value):
    """What is read is written again as the same."""
    node = whole = json.loads(WHOLE)
    while True:
        key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        if not isinstance(node[key], dict | list) or not node[key] or data.draw(st.booleans()):
            break
        node = node[key]
    node[key] = value
    try:
        entries = table_format.decode(json.dumps(whole).encode())
    except ValueError:
        return
    assert table_format.decode(table_format.encode(entries)) == entries
    for m in [m for entry in entries for row in entry.rows.values() for m in row]:
        assert 0 < m.ms[0] <= m.ms[1] <= m.ms[2] < float("inf") and 0 <= m.error < float("inf")


# ---- in whose hands it is


@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize("kind", ["directory", "pipe"])
def test_no_file(path, own, kind, is_own):
    """Nobody writes into the pipe: reading it would wait for ever."""
    path = own if is_own else path
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.mkdir(0o700) if kind == "directory" else os.mkfifo(path, 0o600)
    assert re.search("Is a directory|not a regular file", read(path)[1])
    for refused in (table_file.check_writable, table_file.clear, write):
        with pytest.raises(OSError, match="Is a directory|not a regular file"):
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
    ("make", "why"),
    [
        (someone_elses, "belongs to user"),
        (lambda path, _: path.chmod(0o702), "can be written by others"),
        (lambda path, _: path.chmod(0o720), "can be written by others"),
        (lambda path, _: path.chmod(0o1777), "can be written by others"),
        (moved, "is a link"),
    ],
    ids=["another's", "of the world", "of the group", "sticky", "link"],
)
def test_the_own_table_in_others_hands(own, of, make, why, monkeypatch):
    """It is not read, since nobody asked for it, nor written, since others could change it."""
    write(own)
    before = own.read_bytes()
    make(own if of == "file" else own.parent, monkeypatch)
    rows, ignored = read(own)
    assert rows == {} and why in ignored
    monkeypatch.setattr(table_file, "default_path", lambda: own.parent / ".." / "jaxext" / "tables.json")  # the same path in other words
    assert why in read(own)[1]
    for refused in (table_file.check_writable, table_file.clear, write):
        with pytest.raises(PermissionError, match=why):
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


@pytest.mark.parametrize("data", [WHOLE[:-20], b'{"format": "jaxext table 2", "entries": []}'])
def test_the_own_file_that_is_no_table_is_renamed(own, data):
    own.parent.mkdir(mode=0o700, parents=True)
    own.write_bytes(data)
    own.chmod(0o600)
    table_file.check_writable(own)
    with pytest.warns(UserWarning, match="jaxext renamed .*tables.json to .*not a table"):
        write(own)
    assert read(own) == (ROWS, "")
    (aside,) = own.parent.glob("tables.json.bad-*")
    assert aside.read_bytes() == data


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("data", [b"alias ls='ls -l'\n", b"", b'{"format": "jaxext table 2", "entries": []}'])
def test_another_file_that_is_no_table_is_left_alone(path, data, linked):
    """So is a file to which a link leads that someone planted in the table's place."""
    path.write_bytes(data)
    if linked:
        moved(path)
    before = sorted(path.parent.iterdir())
    for refused in (table_file.check_writable, table_file.clear, write):
        with pytest.raises(ValueError, match="want a table, or a path where there is nothing"):
            refused(path)
    assert path.read_bytes() == data and sorted(path.parent.iterdir()) == before and path.is_symlink() == linked


def test_a_place_where_nothing_can_be_written(path, own, monkeypatch):
    """The error comes before anything is measured or created."""
    path.write_text("a file")
    for refused in (table_file.check_writable, write):
        with pytest.raises(OSError, match="tables.json"):
            refused(path / "folder" / "tables.json")
        with pytest.raises(IsADirectoryError):
            refused("/")
    before = sorted(path.parent.iterdir())
    table_file.check_writable(path.parent / "new" / "new.json")
    assert sorted(path.parent.iterdir()) == before
    table_file.check_writable(own)
    assert own.parent.is_dir() and not own.exists()
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write all
    with pytest.raises(PermissionError, match=f"{path.parent} cannot be written, want to write {path.parent}/new.json"):
        table_file.check_writable(path.with_name("new.json"))


def test_a_file_keeps_the_contexts_that_were_written_last(path):
    """The last ones of each device: otherwise the file would grow with every version."""
    many = [replace(HERE, versions={"jax": f"0.{i}"}) for i in range(table_file.CONTEXTS + 2)]
    for context in [CPU, *many[:-1], many[1], many[-1]]:
        write(path, context)
    assert [entry.context for entry in table_file.load_entries(path)] == [CPU, *many[3:-1], many[1], many[-1]]


def test_entries_of_one_context_are_joined(path):
    """The rows that were written last count, and the last day."""
    table_file.merge(path, [Entry.of(HERE, DAY, {"one": row("xla"), "two": row("xla")})])
    earlier = DAY - datetime.timedelta(1)
    table_file.merge(path, [Entry.of(HERE, earlier, {"two": row("xla", ms=2.0)}), Entry.of(HERE, earlier, {"three": row("xla")})])
    rows = {"one": row("xla"), "two": row("xla", ms=2.0), "three": row("xla")}
    assert table_file.load_entries(path) == (Entry.of(HERE, DAY, rows),)
    assert "measured on 2026-11-22 with" in read(path, NEWER)[1]


UNREADABLE = {
    "no xla": lambda: row("triton"),
    "NaN": lambda: row("xla", ms=float("nan")),
    "infinite": lambda: row("xla", ms=float("inf")),
    "nested": lambda: [Measurement("xla", {"tile": (1, 2)}, (1.0, 1.0, 1.0), 0.0)],  # type: ignore[dict-item]
}


@pytest.mark.parametrize("make", UNREADABLE.values(), ids=UNREADABLE)
def test_what_would_not_be_read_is_not_written(path, make):
    with pytest.raises(ValueError, match="row 'p'|want three|Expected"):
        write(path, rows={"p": make()})
    assert [*path.parent.iterdir()] == []


def test_where_nothing_can_be_locked(path, monkeypatch):
    def fail(*_):
        raise NotImplementedError("no flock")

    monkeypatch.setattr(filelock.FileLock, "acquire", fail)
    with pytest.raises(OSError, match=f"{path}.lock cannot be locked on this file system"):
        write(path)
    assert not path.exists()


def test_a_full_disk_is_told_with_the_file(path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    write(path)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device: .*tables.json"):
        write(path, rows={"q": row("xla")})
    assert read(path) == (ROWS, "")


# Tables are written without jax: the package around them, which imports it, is left out.
WRITER = f"""
import os, pathlib, signal, sys, time, types
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
    os.fsync = lambda _: time.sleep(0.01)
elif how == "in the middle":
    fdopen = os.fdopen
    def halved(*args):
        file = fdopen(*args)
        os.write(file.fileno(), b'{{"format": ')
        die()
    os.fdopen = halved
elif how == "before it is on the disk":
    os.fsync = die
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


@pytest.mark.parametrize("how", ["in the middle", "before it is on the disk", "before it takes the place"])
def test_a_killed_writer_leaves_what_was_there(path, how):
    write(path)
    killed = writer(path, "q", how=how)
    assert (killed.communicate(timeout=60)[0], killed.returncode) == ("", -signal.SIGKILL)
    assert read(path) == (ROWS, "")
    write(path, rows={"r": row("xla")})
    assert set(read(path)[0]) == {"p", "r"}
    assert {file.name for file in path.parent.iterdir()} <= {"tables.json", "tables.json.lock"}


def test_a_writer_that_is_killed_at_any_moment_leaves_what_it_finished(path):
    endless = writer(path, "q", times=10**6)
    assert endless.stdout is not None
    finished = [endless.stdout.readline() for _ in range(20)]
    endless.kill()
    finished += endless.communicate(timeout=60)[0].split()
    rows, ignored = read(path)
    assert ignored == "" and set(rows) >= {f"q {int(i)}" for i in finished}
