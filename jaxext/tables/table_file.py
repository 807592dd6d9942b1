"""The files that hold tables of measurements: read with suspicion, written whole, under a lock.

A file that is not as it should be is ignored.  Nothing of a file is ever run, nor does it name a path: the worst that a false one can do is
to have a slower candidate preferred.  A file that the user names may lie anywhere, and is left alone if it is no table; the user's own
(`default_path`), which is read unasked, must be in the user's hands, and is set aside then.  It must not know jax.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import os
import pathlib
import stat
import time
import warnings
from collections.abc import Iterator, Sequence

from jaxext.tables.table_format import MAX_BYTES, Context, Entry, Measurement, Rows, Table, as_bytes, parse, select

__all__ = [
    "CONTEXTS",
    "Context",
    "Entry",
    "Measurement",
    "Rows",
    "Table",
    "check_writable",
    "clear",
    "default_path",
    "load_entries",
    "merge",
    "parse",
    "read",
    "select",
    "warn",
    "write",
]

CONTEXTS = 8  # of a device, the last to be written: a file does not grow with every version and change of code
PATIENCE_S = 60  # for the lock, which others hold for as long as it takes to read and write a file


def default_path() -> pathlib.Path:
    """The user's own table, in the user's cache directory."""
    import platformdirs

    return platformdirs.user_cache_path("jaxext", appauthor=False) / "tables.json"


# ---- reading


def read(path: str | os.PathLike, context: Context) -> Table:
    """What the file at `path` says that holds in `context`; an empty table if there is no file, or if it is not as it should be.

    Warns:
      once, of all that it has for this device and that does not hold: which file, what of it and why.
    """
    entries, ignored = read_entries(path)
    table = select(entries, context, os.fspath(path))
    warn(path, ignored or table.ignored)
    return table


def read_entries(path: str | os.PathLike) -> tuple[tuple[Entry, ...], str | None]:
    """As `load_entries`, but nothing is raised: the entries, and why they are ignored if they are."""
    try:
        return load_entries(path), None
    except FileNotFoundError:
        return (), None
    except (OSError, ValueError) as error:
        return (), str(error)


def warn(path: str | os.PathLike, ignored: str | None) -> None:
    if ignored is not None:
        warnings.warn(f"jaxext ignores measurements in {os.fspath(path)}: {ignored}", stacklevel=3)


def load_entries(path: str | os.PathLike) -> tuple[Entry, ...]:
    """The entries of the file at `path`.

    Raises:
      OSError: it cannot be read, is not a regular file, or, if it is the user's own, is not in the user's hands.
      ValueError: it is not a table.
    """
    path, own = _whose(path)
    if own:
        _refuse_strange(path.parent, path.parent.lstat(), stat.S_ISDIR)
        _refuse_strange(path, path.lstat(), stat.S_ISREG)  # as below, of the file that is open; here for links too
    # NONBLOCK: a pipe has no writer that would end the wait.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | (getattr(os, "O_NOFOLLOW", 0) if own else 0)
    with open(path, "rb", opener=lambda path, _: os.open(path, flags)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is not a regular file")
        if own:
            _refuse_strange(path, status, stat.S_ISREG)
        return parse(file.read(MAX_BYTES + 1))


def _whose(path: str | os.PathLike) -> tuple[pathlib.Path, bool]:
    """The path, and whether it is that of the user's own table."""
    try:
        path = pathlib.Path(os.path.abspath(path))
    except FileNotFoundError:
        raise OSError(f"{os.fspath(path)} leads nowhere, since the working directory was deleted: want an absolute path") from None
    return path, path == pathlib.Path(os.path.abspath(default_path()))


def _refuse_strange(path: pathlib.Path, status: os.stat_result, is_kind) -> None:
    """Raise PermissionError for a link, and for what others can write: that says nothing of the user's measurements."""
    if not is_kind(status.st_mode):
        raise PermissionError(f"{path} is a link, or something else that is not expected there")
    if not hasattr(os, "geteuid"):
        return
    if status.st_uid not in (os.geteuid(), 0):
        raise PermissionError(f"{path} belongs to user {status.st_uid}, want this user or root")
    if status.st_mode & 0o022:
        raise PermissionError(f"{path} can be written by others, want: chmod go-w")


# ---- writing


def write(path: str | os.PathLike, context: Context, rows: Rows) -> None:
    """Store rows that were measured today in `context`; otherwise as `merge`."""
    merge(path, [Entry(context, datetime.datetime.now(datetime.UTC).date().isoformat(), rows)])


def merge(path: str | os.PathLike, entries: Sequence[Entry]) -> None:
    """Add entries to the file at `path`, making it if there is none.  A row takes the place of that of the same context and problem.

    Several processes may do so at once, or be killed: the file is whole at any time, and holds all that any finished to write.  A lock file
    stays beside it, except where the file or the entries are refused.

    Raises:
      OSError: it cannot be written, or, if it is the user's own, is not in the user's hands.
      TypeError, ValueError: something of the entries is not as it should be, or a file that is not the user's own is no table; it is
        left as it was.

    Warns:
      if the user's own is no table; it is renamed.
    """
    as_bytes(entries)  # raises before there is a lock file
    with _locked(path) as (path, own):
        before, wrong = _what_is_there(path, own)
        if wrong:
            aside = path.with_name(f"{path.name}.bad-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}")
            path.rename(aside)
            warnings.warn(f"jaxext: {path} is not a table of this version ({wrong}); it is {aside} now", stacklevel=2)
        _replace(path, as_bytes(_joined(before, entries)), own)


def check_writable(path: str | os.PathLike) -> None:
    """Raise now what `write` would raise after the measuring.  Makes nothing but the folder of the user's own table.

    Raises:
      OSError: it cannot be written, or, if it is the user's own, is not in the user's hands.
      ValueError: it is not the user's own, and no table.
    """
    path, own = _target(path)
    folder = next((folder for folder in path.parents if os.path.lexists(folder)), path)  # "/" has no parents
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is not a folder, want one for {path}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"{folder} cannot be written, want to write {path}")
    _what_is_there(path, own)


def clear(path: str | os.PathLike) -> None:
    """Remove the file at `path`, if it is there.

    Raises:
      OSError: it cannot be removed, or, if it is the user's own, is not in the user's hands.
      ValueError: it is not the user's own, and no table.
    """
    if not os.path.lexists(path):
        return
    with _locked(path) as (path, own):
        _what_is_there(path, own)
        path.unlink(missing_ok=True)


def _what_is_there(path: pathlib.Path, own: bool) -> tuple[tuple[Entry, ...], str | None]:
    """The entries of the file that is to be replaced, and why the user's own is no table; another that is none is the user's, not ours."""
    try:
        return load_entries(path), None
    except FileNotFoundError:
        return (), None
    except ValueError as error:
        if own:
            return (), str(error)
        raise ValueError(f"{path} is no table of this version ({error}), want a table, or a path where there is nothing") from None


def _joined(before: Sequence[Entry], entries: Sequence[Entry]) -> list[Entry]:
    """In the order in which they were written last; of each device the last `CONTEXTS` contexts.  Linear in the number of entries."""
    joined: dict[Context, tuple[str, dict]] = {}
    for entry in (*before, *entries):
        day, rows = joined.pop(entry.context, ("", {}))
        rows.update(entry.rows)
        joined[entry.context] = max(day, entry.measured), rows
    places: collections.Counter = collections.Counter()
    kept = []
    for context, (day, rows) in reversed(joined.items()):
        places[place := (context.device, context.capability)] += 1
        if places[place] <= CONTEXTS:
            kept.append(Entry(context, day, rows))
    return kept[::-1]


def _target(path: str | os.PathLike) -> tuple[pathlib.Path, bool]:
    """The file to be replaced, to which links that the user names lead, and whether it is the user's own, whose folder is made."""
    path, own = _whose(path)
    if not own:
        return path.resolve(), False
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _refuse_strange(path.parent, path.parent.lstat(), stat.S_ISDIR)
    return path, True


@contextlib.contextmanager
def _locked(path: str | os.PathLike) -> Iterator[tuple[pathlib.Path, bool]]:
    """Yields the file to be replaced, and whether it is the user's own.  No lock file is made where the file that is there is refused."""
    import filelock

    path, own = _target(path)
    _what_is_there(path, own)
    lock = f"{path}.lock"
    try:
        held = filelock.FileLock(lock, timeout=PATIENCE_S).acquire()
    except filelock.Timeout:
        raise TimeoutError(f"{lock} is held by another process since {PATIENCE_S} s, want to write {path}") from None
    except NotImplementedError:
        raise OSError(f"{lock} cannot be locked on this file system, want to write {path}: name a table elsewhere") from None
    with held:
        yield path, own


def _replace(path: pathlib.Path, text: bytes, own: bool) -> None:
    """All of it or nothing, whenever we are killed or the power fails; only one does it at a time."""
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)  # of one that was killed
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if own else 0o666), "wb") as file:
            if not own and path.exists():
                new.chmod(stat.S_IMODE(path.stat().st_mode))
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError as error:
        error.filename = error.filename or str(path)  # of a full disk Python does not say which file
        raise
    finally:
        new.unlink(missing_ok=True)
