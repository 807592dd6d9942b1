"""Tables of measurements: what of a file holds, what a false file can do (nothing), and what is left of a file whose writers are killed."""

import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import warnings

import filelock
import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

import jaxext
from jaxext.tables import table_file, table_format
from jaxext.tables.table_file import Context, Entry, Measurement, Table

HERE = Context("NVIDIA H200", 90, {"jax": "0.10.2", "jaxlib": "0.10.2"}, {"xla": "aa", "triton": "bb", "cuda": "cc"})
CPU = Context("AMD EPYC, 2 threads", None, {"jax": "0.10.2", "jaxlib": "0.10.2"}, HERE.sources)
NEWER = dataclasses.replace(HERE, versions={"jax": "0.11.2", "jaxlib": "0.10.2"})


def changed(*names):
    """Here, with other code of these implementations."""
    return dataclasses.replace(HERE, sources={**HERE.sources, **dict.fromkeys(names, "dd")})


def row(*names, ms=1.0):
    return tuple(Measurement(name, {"BLOCK_M": 128, "PACKED": True, "algorithm": "lax"}, (ms, ms, 2 * ms), 1e-7) for name in names)


def read(path, context=HERE):
    """The table, and what was warned of, which is one thing at most."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        table = table_file.read(path, context)
    assert len(caught) <= 1
    assert all(str(path) in str(w.message) for w in caught)
    return dict(table.rows), "".join(str(w.message) for w in caught)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tables.json"


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The user's own table, of which there is nothing yet."""
    path = tmp_path / "cache" / "jaxext" / "tables.json"
    monkeypatch.setattr(table_file, "default_path", lambda: path)
    return path


# ---- what holds


def test_what_was_written_is_read(path):
    rows = {"matmul_nn B=1": row("xla", "triton"), "matmul_nn B=2": row("xla")}
    table_file.write(path, HERE, rows)
    assert read(path) == (rows, "")
    assert json.loads(path.read_text())["format"] == "jaxext table 1"


def test_no_file_is_an_empty_table(path):
    assert read(path) == ({}, "")
    assert read(path / "of" / "no" / "folder") == ({}, "")


def test_other_devices_share_a_file(path):
    """A home directory is shared by many machines: that the others were measured too is nothing to warn of."""
    table_file.write(path, HERE, {"p": row("xla")})
    table_file.write(path, CPU, {"p": row("xla", ms=3.0)})
    table_file.write(path, dataclasses.replace(HERE, capability=100), {"q": row("xla", ms=4.0)})
    assert read(path) == ({"p": row("xla")}, "")
    assert read(path, CPU) == ({"p": row("xla", ms=3.0)}, "")
    assert read(path, dataclasses.replace(HERE, device="NVIDIA B200")) == ({}, "")


def test_a_row_takes_the_place_of_that_of_its_problem(path):
    table_file.write(path, HERE, {"p": row("xla", "triton"), "q": row("xla")})
    table_file.write(path, NEWER, {"p": row("xla", ms=5.0)})
    table_file.write(path, HERE, {"p": row("xla", ms=2.0)})
    assert read(path) == ({"p": row("xla", ms=2.0), "q": row("xla")}, "")
    assert read(path, NEWER) == ({"p": row("xla", ms=5.0)}, "")


def test_other_versions_do_not_hold(path):
    table_file.write(path, HERE, {"p": row("xla")})
    rows, warned = read(path, NEWER)
    assert rows == {}
    assert "with jax 0.10.2 (here 0.11.2): tune again" in warned
    _, warned = read(path, dataclasses.replace(HERE, versions={**HERE.versions, "triton": "3.9.0"}))
    assert "with triton none (here 3.9.0)" in warned
    table_file.write(path, NEWER, {"q": row("xla")})
    assert read(path, NEWER) == ({"q": row("xla")}, "")


@pytest.mark.parametrize(
    ("context", "left", "warned"),
    [
        (changed("triton"), {"p": row("xla", "cuda"), "q": row("xla")}, "1 of 2 problems of this device it measured other code of triton:"),
        (changed("cuda", "triton"), {"p": row("xla"), "q": row("xla")}, "other code of cuda, triton: tune again"),
        (changed("xla"), {}, "2 of 2 problems of this device it measured other code of xla:"),
        (dataclasses.replace(HERE, sources={"xla": "aa"}), {"p": row("xla"), "q": row("xla")}, "other code of cuda, triton:"),
    ],
)
def test_changed_code_does_not_hold(path, context, left, warned):
    """Nor, without xla's, does what the others were compared with."""
    table_file.write(path, HERE, {"p": row("triton", "xla", "cuda"), "q": row("xla")})
    rows, told = read(path, context)
    assert {problem: set(m.implementation for m in row) for problem, row in rows.items()} == {
        problem: set(m.implementation for m in row) for problem, row in left.items()
    }
    assert warned in told


def test_what_was_measured_with_our_code_counts_before_what_was_not(path):
    """Whichever was written last."""
    old = changed("triton")
    table_file.write(path, HERE, {"p": row("xla", "triton", ms=1.0)})
    table_file.write(path, old, {"p": row("xla", "triton", ms=2.0), "q": row("xla", ms=2.0)})
    for context, ms in ((HERE, 1.0), (old, 2.0)):
        rows, warned = read(path, context)
        assert (rows["p"], warned) == (row("xla", "triton", ms=ms), "")
        assert rows["q"] == row("xla", ms=2.0)  # nothing of it has changed
    table_file.write(path, changed("xla"), {"p": row("xla", "triton", ms=3.0), "q": row("xla", ms=3.0)})
    assert read(path)[0] == {"p": row("xla", "triton", ms=1.0), "q": row("xla", ms=2.0)}
    assert read(path)[1] == ""


def test_tables_are_equal_if_their_rows_are():
    def table(rows, context=HERE, source="here"):
        return Table(context, rows, source)

    assert table({"p": row("xla"), "q": row("xla")}) == table({"q": row("xla"), "p": row("xla")}, source="there")
    assert table({"p": row("xla")}) != table({"p": row("xla")}, CPU)
    assert table({"p": row("xla")}).digest == table({"p": row("xla")}, CPU).digest
    assert hash(table({"p": row("xla")})) == hash(table({"p": row("xla")}))
    different = [
        table(rows).digest for rows in ({}, {"p": row("xla")}, {"p": row("xla", ms=2.0)}, {"p": row("xla", "cuda")}, {"q": row("xla")})
    ]
    assert len(set(different)) == len(different)


def test_entries_go_from_file_to_file(path):
    table_file.write(path, HERE, {"p": row("xla")})
    table_file.write(path, CPU, {"p": row("xla")})
    other = path.with_name("other.json")
    table_file.write(other, CPU, {"q": row("xla")})
    table_file.merge(other, table_file.load_entries(path))
    assert [(entry.context, set(entry.rows)) for entry in table_file.load_entries(other)] == [(HERE, {"p"}), (CPU, {"p", "q"})]
    table_file.clear(other)
    table_file.clear(other)
    assert not other.exists()


# ---- what a false file can do


def document(**of_measurement):
    measurement = {"implementation": "xla", "config": {"algorithm": "lax"}, "ms": [1.0, 1.5, 2.0], "error": 1e-7} | of_measurement
    entry = dataclasses.asdict(HERE) | {"measured": "2026-11-22", "rows": {"p": [measurement]}}
    return {"format": "jaxext table 1", "entries": [entry]}


def with_entry(**fields):
    data = document()
    data["entries"][0] |= fields
    return data


def text(data):
    return data if isinstance(data, bytes) else json.dumps(data).encode()


WHOLE = text(document())
ROW = document()["entries"][0]["rows"]["p"]
FALSE = {
    "empty": b"",
    "cut short": WHOLE[:-20],
    "no text": b"\xff\xfe\x00{",
    "null": b"null",
    "a list": b"[]",
    "another format": text({"format": "jaxext table 2", "entries": []}),
    "no format": text({"entries": []}),
    "more fields": text(document() | {"code": "import os"}),
    "no entries": text({"format": "jaxext table 1"}),
    "entries of another type": text({"format": "jaxext table 1", "entries": {"0": {}}}),
    "an entry of another type": text({"format": "jaxext table 1", "entries": [3]}),
    "deep": b"[" * 200_000,
    "deep inside": WHOLE.replace(b'"lax"', b"[" * 100_000 + b"]" * 100_000),
    "deep objects": b'{"a":' * 100_000,
    "twice": WHOLE.replace(b'"error": 1e-07', b'"error": 1.0, "error": 1e-07'),
    "a problem twice": WHOLE.replace(b'"rows": {', b'"rows": {"p": [], '),
    "NaN": text(document(ms=[float("nan")] * 3)),
    "infinite": text(document(ms=[1.0, 1.0, float("inf")])),
    "1e999": WHOLE.replace(b"2.0]", b"1e999]"),
    "negative": text(document(ms=[-3.0, -2.0, -1.0])),
    "zero": text(document(ms=[0.0, 0.0, 0.0])),
    "unordered": text(document(ms=[2.0, 1.0, 3.0])),
    "two quartiles": text(document(ms=[1.0, 2.0])),
    "times of another type": text(document(ms=["1", "2", "3"])),
    "true times": text(document(ms=[True, True, True])),
    "huge times": WHOLE.replace(b"2.0]", b"9" * 400 + b"]"),
    "digits without end": WHOLE.replace(b"2.0]", b"9" * 5000 + b"]"),
    "negative error": text(document(error=-1e-7)),
    "NaN error": text(document(error=float("nan"))),
    "huge config": text(document(config={"BLOCK_M": 2**63})),
    "a fraction": text(document(config={"BLOCK_M": 0.5})),
    "nested config": text(document(config={"BLOCK_M": [1]})),
    "null config": text(document(config={"BLOCK_M": None})),
    "config of another type": text(document(config=["BLOCK_M"])),
    "many configs": text(document(config={str(i): i for i in range(1000)})),
    "long text": text(document(implementation="x" * 5000)),
    "control characters": text(document(implementation="xla\x1b[2J")),
    "reversed text": text(document(config={"algorithm": "\u202elax"})),
    "half a character": text(document(config={"algorithm": "\ud800"})),
    "no name": text(document(implementation="")),
    "xla was not measured": text(document(implementation="triton")),
    "an empty row": text(with_entry(rows={"p": []})),
    "a candidate twice": text(with_entry(rows={"p": ROW * 2})),
    "many candidates": text(with_entry(rows={"p": ROW * 1000})),
    "a problem over lines": text(with_entry(rows={"p\nq": ROW})),
    "rows of another type": text(with_entry(rows=[])),
    "device of another type": text(with_entry(device=None)),
    "capability of another type": text(with_entry(capability="90")),
    "negative capability": text(with_entry(capability=-90)),
    "versions of another type": text(with_entry(versions={"jax": 0.1})),
    "sources of another type": text(with_entry(sources=None)),
    "no day": text(with_entry(measured="2026-13-41")),
}


@pytest.mark.parametrize("data", FALSE.values(), ids=FALSE.keys())
def test_a_false_file_is_ignored(path, data):
    path.write_bytes(data)
    rows, warned = read(path)
    assert rows == {}
    assert "jaxext ignores measurements" in warned
    assert warned.isprintable() and len(warned) < 1000  # it ends up in terminals and logs


def test_the_true_file_is_not_ignored(path):
    """Each false one differs from it in one thing."""
    path.write_bytes(WHOLE)
    assert read(path) == ({"p": (Measurement("xla", {"algorithm": "lax"}, (1.0, 1.5, 2.0), 1e-7),)}, "")


@pytest.mark.parametrize(
    "name", ["../../../etc/passwd", "/etc/passwd", "$(rm -rf ~)", "{0.__class__}", "'; DROP TABLE", "__import__('os')"]
)
def test_names_are_only_compared(path, name):
    """They name no file and are no code: what has such names is a candidate of nobody."""
    before = sorted(path.parent.rglob("*"))
    data = with_entry(sources={"xla": "aa", name: "bb"}, rows={name: [*ROW, {**ROW[0], "implementation": name, "config": {name: name}}]})
    path.write_bytes(text(data))
    rows, warned = read(path)
    assert [m.implementation for m in rows[name]] == ["xla"]
    assert "measured other code of" in warned
    assert sorted(path.parent.rglob("*")) == [*before, path]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), value=JSON)
def test_any_value_anywhere_is_refused_or_means_what_it_says(data, value):
    """What is read is written again as the same."""
    node = document()
    whole = node
    while True:
        key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        if not isinstance(node[key], dict | list) or not node[key] or data.draw(st.booleans()):
            break
        node = node[key]
    node[key] = value
    try:
        entries = table_format.parse(json.dumps(whole).encode())
    except ValueError:
        return
    assert table_format.parse(table_format.as_bytes(entries)) == entries
    for measurement in [m for entry in entries for row in entry.rows.values() for m in row]:
        assert 0 < measurement.ms[0] <= measurement.ms[1] <= measurement.ms[2] < float("inf")


def test_a_file_without_end_is_ignored(path):
    with path.open("wb") as file:
        file.truncate(table_format.MAX_BYTES + 1)
    rows, warned = read(path)
    assert rows == {}
    assert "over 64 MiB" in warned


@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize("kind", ["directory", "pipe"])
def test_no_file(path, own, kind, is_own):
    """Nobody writes into the pipe: reading it would wait for ever."""
    path = own if is_own else path
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.mkdir() if kind == "directory" else os.mkfifo(path, 0o600)
    rows, warned = read(path)
    assert rows == {}
    told = "Is a directory|not a regular file|not expected there"
    assert re.search(told, warned)
    with pytest.raises(OSError, match=told):
        table_file.write(path, HERE, {"p": row("xla")})


def test_a_file_that_may_not_be_read(path, monkeypatch):
    path.write_bytes(WHOLE)
    monkeypatch.setattr(os, "open", lambda *_: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))  # root may read all
    rows, warned = read(path)
    assert rows == {}
    assert "Permission denied" in warned


# ---- in whose hands it is


def test_the_own_table_is_made_for_the_user_alone(own):
    before = os.umask(0)
    try:
        table_file.write(own, HERE, {"p": row("xla")})
    finally:
        os.umask(before)
    assert read(own) == ({"p": row("xla")}, "")
    assert own.parent.stat().st_mode & 0o777 == 0o700
    assert own.stat().st_mode & 0o777 == 0o600


def someone_elses(path, monkeypatch):
    if os.geteuid() == 0:  # whose files are trusted
        os.chown(path, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)


def moved(path):
    """It lies elsewhere, and a link in its place."""
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


UNSAFE = {
    "folder of another": lambda path, monkeypatch: someone_elses(path.parent, monkeypatch),
    "folder of the world": lambda path, _: path.parent.chmod(0o777),
    "folder of the group": lambda path, _: path.parent.chmod(0o770),
    "sticky folder": lambda path, _: path.parent.chmod(0o1777),
    "folder is a link": lambda path, _: moved(path.parent),
    "file of another": someone_elses,
    "file of the world": lambda path, _: path.chmod(0o666),
    "file of the group": lambda path, _: path.chmod(0o660),
    "file is a link": lambda path, _: moved(path),
}


@pytest.mark.parametrize("make", UNSAFE.values(), ids=UNSAFE.keys())
def test_the_own_table_in_others_hands(own, make, monkeypatch):
    """It is not read, for nobody asked for it; and not written, for others would see to it that it says something else."""
    table_file.write(own, HERE, {"p": row("xla")})
    before = own.read_bytes()
    make(own, monkeypatch)
    rows, warned = read(own)
    assert rows == {}
    assert "others" in warned or "belongs to user" in warned or "link" in warned
    with pytest.raises(OSError, match="others|belongs to user|link"):
        table_file.write(own, HERE, {"q": row("xla")})
    assert own.read_bytes() == before


def test_the_own_table_by_another_way(tmp_path, monkeypatch):
    """The checks are not left out where the environment says the cache directory in other words."""
    plain = tmp_path / "cache" / "jaxext" / "tables.json"
    monkeypatch.setattr(table_file, "default_path", lambda: tmp_path / "x" / ".." / "cache" / "jaxext" / "tables.json")
    table_file.write(plain, HERE, {"p": row("xla")})
    assert plain.stat().st_mode & 0o777 == 0o600
    plain.parent.chmod(0o777)
    for path in (plain, table_file.default_path()):
        assert "can be written by others" in read(path)[1]


def test_a_table_that_the_user_names_may_be_a_link(path):
    """A link stays one, and the file keeps its mode."""
    table_file.write(path, HERE, {"p": row("xla")})
    path.chmod(0o664)
    moved(path)
    table_file.write(path, HERE, {"q": row("xla")})
    assert path.is_symlink()
    assert set(read(path)[0]) == {"p", "q"}
    assert path.stat().st_mode & 0o777 == 0o664


# ---- writing


@pytest.mark.parametrize("data", [FALSE["cut short"], FALSE["another format"], FALSE["NaN"]])
def test_what_is_no_table_is_set_aside(own, data):
    """In the user's own place, where nothing else can be meant to lie."""
    own.parent.mkdir(mode=0o700, parents=True)
    own.write_bytes(data)
    own.chmod(0o600)
    table_file.check_writable(own)
    with pytest.warns(UserWarning, match="not a table") as caught:
        table_file.write(own, HERE, {"p": row("xla")})
    assert len(caught) == 1
    assert read(own) == ({"p": row("xla")}, "")
    (aside,) = own.parent.glob("tables.json.bad-*")
    assert aside.read_bytes() == data


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("data", [b"alias ls='ls -l'\n", b"", FALSE["another format"]])
def test_a_file_of_the_users_is_no_place_for_a_table(path, data, linked):
    """Nor what a link leads to that someone has planted where the table shall be."""
    path.write_bytes(data)
    if linked:
        moved(path)
    for function in (table_file.check_writable, table_file.clear, lambda path: table_file.write(path, HERE, {"p": row("xla")})):
        with pytest.raises(ValueError, match="want a table, or a path where there is nothing"):
            function(path)
    assert path.read_bytes() == data
    assert path.is_symlink() == linked
    assert not list(path.parent.glob("*.bad-*"))


def test_a_place_where_nothing_can_be_written(path, own, monkeypatch):
    """It is said before anything is measured, as when it is written; and nothing is made meanwhile."""
    path.write_text("a file")
    below = path / "folder" / "tables.json"
    for function in (table_file.check_writable, lambda path: table_file.write(path, HERE, {"p": row("xla")})):
        with pytest.raises(OSError, match="tables.json"):
            function(below)
    with pytest.raises(OSError, match="regular|directory"):
        table_file.check_writable(path.parent)
    before = sorted(path.parent.iterdir())
    table_file.check_writable(path.with_name("new.json"))
    table_file.check_writable(path.parent / "new" / "new.json")
    assert sorted(path.parent.iterdir()) == before
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write all
    with pytest.raises(PermissionError, match=f"{path.parent} cannot be written, want to write {path.parent}/new.json"):
        table_file.check_writable(path.with_name("new.json"))
    monkeypatch.undo()
    monkeypatch.setattr(table_file, "default_path", lambda: own)
    table_file.check_writable(own)
    assert own.parent.is_dir() and not own.exists()
    own.parent.chmod(0o777)
    with pytest.raises(PermissionError, match="can be written by others"):
        table_file.check_writable(own)


def test_a_file_keeps_the_contexts_that_were_written_last(path):
    """A few of each device: otherwise it would grow with every version."""
    many = [dataclasses.replace(HERE, versions={"jax": f"0.{i}"}) for i in range(table_file.CONTEXTS + 2)]
    table_file.write(path, CPU, {"p": row("xla")})
    for context in [*many[:-1], many[1], many[-1]]:
        table_file.write(path, context, {"p": row("xla")})
    entries = table_file.load_entries(path)
    assert [entry.context for entry in entries] == [CPU, *many[3:-1], many[1], many[-1]]
    assert len(entries) == 1 + table_file.CONTEXTS


def test_a_row_holds_what_tune_measures(path):
    """More than a hundred candidates; a file that has many more is not ours."""
    for count, holds in ((256, True), (257, False)):
        measured = tuple(Measurement("xla", {"tile": i}, (1.0, 1.0, 1.0), 0.0) for i in range(count))
        if holds:
            table_file.write(path, HERE, {"p": measured})
            assert read(path) == ({"p": measured}, "")
        else:
            with pytest.raises(ValueError, match="want a list of 1 to 256"):
                table_file.write(path, HERE, {"p": measured})


@pytest.mark.parametrize("error", [NotImplementedError("no flock"), filelock.Timeout("lock")])
def test_where_nothing_can_be_locked(path, monkeypatch, error):
    monkeypatch.setattr(filelock.FileLock, "acquire", lambda *_: (_ for _ in ()).throw(error))
    with pytest.raises(OSError, match=f"{path}.lock (cannot be locked on this file system|is held by another process since 60 s), want to"):
        table_file.write(path, HERE, {"p": row("xla")})
    assert not path.exists()


@pytest.mark.parametrize(
    "rows",
    [
        {"p": row("triton")},
        {"p": row("xla", "xla")},
        {"p": row("xla", ms=float("nan"))},
        {"p": row("xla", ms=-1.0)},
        {"p": [Measurement("xla", {"tile": (1, 2)}, (1.0, 1.0, 1.0), 0.0)]},  # type: ignore[dict-item]
        {"p\n": row("xla")},
    ],
)
def test_what_would_not_be_read_is_not_written(path, rows):
    table_file.write(path, HERE, {"q": row("xla")})
    before = path.read_bytes()
    with pytest.raises(ValueError, match="want|number"):
        table_file.write(path, HERE, rows)
    assert path.read_bytes() == before
    assert sorted(file.name for file in path.parent.iterdir()) in (["tables.json"], ["tables.json", "tables.json.lock"])


# Tables are written without jax: the package around them, which imports it, is left out.
WRITER = f"""
import os, pathlib, signal, sys, time, types
package = types.ModuleType("jaxext")
package.__path__ = [{str(pathlib.Path(jaxext.__file__).parent)!r}]
sys.modules["jaxext"] = package
from jaxext.tables import table_file
assert "jax" not in sys.modules
path, name, times, how = sys.argv[1:]
context = table_file.Context("NVIDIA H200", 90, {HERE.versions!r}, {HERE.sources!r})
row = [table_file.Measurement("xla", {{"algorithm": "lax"}}, (1.0, 1.5, 2.0), 0.0)]

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
    rows, warned = read(path)
    assert set(rows) == {f"{name} {i}" for name in range(4) for i in range(8)}
    assert warned == ""


@pytest.mark.parametrize("how", ["in the middle", "before it is on the disk", "before it takes the place"])
def test_a_killed_writer_leaves_what_was_there(path, how):
    table_file.write(path, HERE, {"p": row("xla")})
    killed = writer(path, "q", how=how)
    assert (killed.communicate(timeout=60)[0], killed.returncode) == ("", -signal.SIGKILL)
    assert read(path) == ({"p": row("xla")}, "")
    table_file.write(path, HERE, {"r": row("xla")})
    assert set(read(path)[0]) == {"p", "r"}
    assert sorted(file.name for file in path.parent.iterdir()) in (["tables.json"], ["tables.json", "tables.json.lock"])


def test_a_writer_that_is_killed_at_any_moment_leaves_what_it_finished(path):
    endless = writer(path, "q", times=10**6)
    assert endless.stdout is not None
    finished = [endless.stdout.readline() for _ in range(20)]
    endless.kill()
    finished += endless.communicate(timeout=60)[0].split()
    rows, warned = read(path)
    assert warned == ""
    assert set(rows) >= {f"q {int(i)}" for i in finished}


def test_entries_are_dated(path):
    table_file.merge(path, [Entry(HERE, "2026-11-22", {"p": row("xla")})])
    table_file.merge(path, [Entry(HERE, "2026-11-20", {"q": row("xla")})])
    assert [entry.measured for entry in table_file.load_entries(path)] == ["2026-11-22"]
    assert "2026-11-22" in read(path, NEWER)[1]


ONE = (Measurement("xla", {}, (1.0, 1.0, 1.0), 0.0),)


class Counted(str):
    """A name that counts its comparisons."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other):
        Counted.compared += 1
        return str(self) == str(other)


@pytest.mark.parametrize("devices", ["one", "many"])
def test_joining_is_linear(devices, monkeypatch):
    """As many comparisons for each entry, however many there are: joining 16,000 contexts took minutes."""
    monkeypatch.setattr(Counted, "compared", 0)
    n = 300

    def entry(i):
        device = Counted(f"device {i}" if devices == "many" else "device")
        return Entry(dataclasses.replace(HERE, device=device, versions={"jax": str(i)}), "2026-11-22", {"one": ONE})

    joined = table_file._joined([entry(i) for i in range(n)], [entry(i) for i in range(n // 2, n + n // 2)])
    assert len(joined) == (1.5 * n if devices == "many" else table_file.CONTEXTS)
    assert Counted.compared <= 10 * n


def test_entries_of_one_context_are_joined(path):
    """In one entry, in which the rows that were written last count."""
    earlier, later = (Measurement("xla", {}, (ms, ms, ms), 0.0) for ms in (1.0, 2.0))
    table_file.merge(path, [Entry(HERE, "2026-01-02", {"one": (earlier,), "two": (earlier,)})])
    table_file.merge(path, [Entry(HERE, "2026-01-01", {"two": (later,)}), Entry(HERE, "2026-01-01", {"three": (later,)})])
    assert table_file.load_entries(path) == (
        Entry(HERE, "2026-01-02", {"one": (earlier,), "two": (later,), "three": (later,)}),
    )  # fmt: skip


def test_a_full_disk_is_told_with_the_file(path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(table_file.os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device: .*tables.json"):
        table_file.write(path, HERE, {"one": ONE})
    assert not path.exists()


@pytest.mark.parametrize("table", ["/", "."])
def test_a_folder_is_no_table(table):
    for refused in (table_file.check_writable, table_file.clear, lambda table: table_file.write(table, HERE, {"one": ONE})):
        with pytest.raises(IsADirectoryError):
            refused(table)
