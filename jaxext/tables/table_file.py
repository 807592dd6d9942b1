"""The files that hold measurements: read with suspicion, replaced whole, under a lock.

Nothing in a file is executed or names another file, so the worst that a false table can do is to have a slower candidate preferred.
A file that the user names may lie anywhere, and is left alone if it is not a table.  The user's own table (`default_path`) is read
unasked, so nobody else may be able to write it; if it is not a table, it is renamed.  This module must not know jax.
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

from jaxext.tables.table_format import MAX_BYTES, Context, Entry, Rows, decode, encode

CONTEXTS = 8  # of each device, the last to be written, or a file would grow with every version and change of code
PATIENCE_S = 60  # for the lock, which others hold while they read and write the file


def default_path() -> pathlib.Path:
    """The user's own table, in the user's cache directory."""
    import platformdirs

    return platformdirs.user_cache_path("jaxext", appauthor=False) / "tables.json"


# ---- reading


def load_entries(path: str | os.PathLike) -> tuple[Entry, ...]:
    """The entries of the file at `path`.

    Raises:
      OSError: it cannot be read, or is not a regular file, or is the user's own and others can write it.
      ValueError: it is not a table.
    """
    path, own = _located(path)
    if own:
        _check_hands(path.parent)
        _check_hands(path)
    nonblocking = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)  # or opening a pipe would wait for its writer
    with open(path, "rb", opener=lambda path, _: os.open(path, nonblocking)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{path} is not a regular file")
        return decode(file.read(MAX_BYTES + 1))


def try_load(path: str | os.PathLike) -> tuple[tuple[Entry, ...], str | None]:
    """The entries of the file at `path`, none if there is no such file; and the error that `load_entries` would raise, as a text."""
    try:
        return load_entries(path), None
    except FileNotFoundError:
        return (), None
    except (OSError, ValueError) as error:
        return (), str(error)


def _located(path: str | os.PathLike) -> tuple[pathlib.Path, bool]:
    """The absolute path, and whether it is the user's own table."""
    try:
        path = pathlib.Path(os.path.abspath(path))
    except FileNotFoundError:
        raise OSError(f"{os.fspath(path)} leads nowhere, since the working directory was deleted: want an absolute path") from None
    return path, path == pathlib.Path(os.path.abspath(default_path()))


def _check_hands(path: pathlib.Path) -> None:
    """Raise PermissionError for a link, and for a file or folder that others can write."""
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise PermissionError(f"{path} is a link, want a file or folder of this user")
    if not hasattr(os, "geteuid"):
        return
    if status.st_uid not in (os.geteuid(), 0):
        raise PermissionError(f"{path} belongs to user {status.st_uid}, want this user or root")
    if status.st_mode & 0o022:
        raise PermissionError(f"{path} can be written by others, want: chmod go-w")


# ---- writing


def write(path: str | os.PathLike, context: Context, rows: Rows) -> None:
    """Store rows that were measured today in `context`, as `merge` does."""
    merge(path, [Entry.of(context, datetime.datetime.now(datetime.UTC).date(), rows)])


def merge(path: str | os.PathLike, entries: Sequence[Entry]) -> None:
    """Add entries to the file at `path`, which is made if there is none.  A row replaces the one of the same context and problem.

    Several processes may write at once, and any may be killed: the file is always whole, and holds all that any of them finished to
    write.  A lock file stays beside it, unless the file or the entries are refused.

    Raises:
      OSError: the file cannot be written, or is the user's own and others can write it.
      TypeError, ValueError: the entries are not valid, or the file is not a table and not the user's own; it is left as it was.

    Warns:
      UserWarning: the user's own file is not a table; it is renamed.
    """
    encode(entries)  # raises before there is a lock file
    with _locked(path) as (path, own):
        before, wrong = _existing(path, own)
        if wrong:
            aside = path.with_name(f"{path.name}.bad-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}")
            path.rename(aside)
            warnings.warn(f"jaxext renamed {path} to {aside}: {wrong}", stacklevel=2)
        _replace(path, encode(_joined(before, entries)), own)


def check_writable(path: str | os.PathLike) -> None:
    """Raise now what `merge` would raise after hours of measuring.  Creates nothing but the folder of the user's own table."""
    path, own = _target(path)
    _existing(path, own)
    folder = next(folder for folder in path.parents if folder.exists())
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"{folder} cannot be written, want to write {path}")


def clear(path: str | os.PathLike) -> None:
    """Remove the file at `path`, if it is there; raises as `merge` does."""
    if os.path.lexists(path):
        with _locked(path) as (path, _):
            path.unlink(missing_ok=True)


def _target(path: str | os.PathLike) -> tuple[pathlib.Path, bool]:
    """The file to replace, and whether it is the user's own, whose folder is made.  Links that the user names are followed."""
    path, own = _located(path)
    if not own:
        return path.resolve(), False
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_hands(path.parent)
    return path, True


def _existing(path: pathlib.Path, own: bool) -> tuple[tuple[Entry, ...], str | None]:
    """The entries of the file to replace, and why the user's own is not a table.  Never overwrite another file that is not a table."""
    try:
        return load_entries(path), None
    except FileNotFoundError:
        return (), None
    except ValueError as error:
        if own:
            return (), str(error)
        raise ValueError(f"{path}: {error}; want a table, or a path where there is nothing") from None


@contextlib.contextmanager
def _locked(path: str | os.PathLike) -> Iterator[tuple[pathlib.Path, bool]]:
    """Holds the lock of the file to replace.  Yields what `_target` returns."""
    import filelock

    path, own = _target(path)
    _existing(path, own)  # raises before there is a lock file
    try:
        lock = filelock.FileLock(f"{path}.lock", timeout=PATIENCE_S).acquire()
    except NotImplementedError:  # of an older filelock, on some network file systems
        raise OSError(f"{path}.lock cannot be locked on this file system: name a table elsewhere") from None
    with lock:
        yield path, own


def _joined(before: Sequence[Entry], entries: Sequence[Entry]) -> list[Entry]:
    """One entry for each context, in the order of writing, and only the last `CONTEXTS` of each device."""
    joined: dict[Context, tuple[datetime.date, dict]] = {}
    for entry in (*before, *entries):
        day, rows = joined.pop(entry.context, (entry.measured, {}))
        rows.update(entry.rows)
        joined[entry.context] = max(day, entry.measured), rows
    places: collections.Counter = collections.Counter()
    kept = []
    for context, (day, rows) in reversed(joined.items()):
        places[context.place] += 1
        if places[context.place] <= CONTEXTS:
            kept.append(Entry.of(context, day, rows))
    return kept[::-1]


def _replace(path: pathlib.Path, text: bytes, own: bool) -> None:
    """Write the file whole or not at all, even if this process is killed.  The caller holds the lock."""
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)  # left by a writer that was killed
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if own else 0o666), "wb") as file:
            if not own and path.exists():
                new.chmod(stat.S_IMODE(path.stat().st_mode))
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError as error:
        error.filename = error.filename or str(path)  # Python does not say which file a full disk concerns
        raise
    finally:
        new.unlink(missing_ok=True)
