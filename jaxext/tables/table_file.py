"""The files that hold measurements: read with suspicion, replaced atomically, under a lock.

A file that the user names may lie anywhere, and is left alone if it is not a table.  The user's own table (`default_path`) and record
(`record_path`) are read unasked, so nobody else may be able to write them; one that is not a table is renamed.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import pathlib
import shutil
import stat
import tempfile
import warnings
from collections.abc import Iterator, Sequence

import msgspec

from jaxext.tables.table_format import MAX_BYTES, Context, Entry, Rows, decode, encode

CONTEXTS = 8  # kept for each device, those written last; otherwise a file would grow with every version and change of code
RECORD = "verified.json"  # the record of verified kernels: the user's, beside the table, and the package's
PATIENCE_S = 60  # for the lock, which others hold while they read and write the file


def default_path() -> pathlib.Path:
    """The user's own table, in the user's cache directory."""
    import platformdirs

    return platformdirs.user_cache_path("jaxext", appauthor=False) / "tables.json"


def record_path() -> pathlib.Path:
    """The user's own record of verified kernels, beside the table."""
    return default_path().with_name(RECORD)


def _is_own(path: str | os.PathLike) -> bool:
    return os.path.abspath(path) in map(os.path.abspath, (default_path(), record_path()))


def load(path: str | os.PathLike) -> tuple[Entry, ...]:
    """The entries of the file at `path`, none if there is no such file.

    Raises:
      OSError: it cannot be read, or is the user's own and others can write it.
      ValueError: it is not a table.
    """
    path = pathlib.Path(path)
    try:
        if _is_own(path):
            _check_hands(path.parent)
            _check_hands(path)
        with path.open("rb") as file:
            return decode(file.read(MAX_BYTES + 1))
    except FileNotFoundError:
        return ()


def try_load(path: str | os.PathLike) -> tuple[tuple[Entry, ...], str | None]:
    """Return what `load` returns, and the text of the error that it would raise."""
    try:
        return load(path), None
    except (OSError, ValueError) as error:
        return (), str(error)


def _check_hands(path: pathlib.Path) -> None:
    status = path.lstat()
    others = hasattr(os, "geteuid") and (status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o022)
    if others or stat.S_ISLNK(status.st_mode):
        raise PermissionError(
            f"{path} is a link, belongs to another user or can be written by others: want one of your own, and chmod go-w"
        )


def write(path: str | os.PathLike, context: Context, rows: Rows) -> None:
    """Store rows that were measured today in `context`, as `merge` does."""
    merge(path, [Entry.of(context, datetime.datetime.now(datetime.UTC).date(), rows)])


def merge(path: str | os.PathLike, entries: Sequence[Entry]) -> None:
    """Add entries to the file at `path`, which is made if there is none.  A row replaces the one of the same context and problem.

    Several processes may write at once, and any may be killed: the file is always complete, and no finished write is lost.

    Raises:
      OSError: the file cannot be written, or is the user's own and others can write it.
      TypeError, ValueError: the entries are not valid, or the file is not a table and not the user's own; it is left as it was.

    Warns:
      UserWarning: the user's own file is not a table; it is renamed.
    """
    encode(entries)  # raises before there is a lock file
    with _locked(path) as path:
        try:
            before = load(path)
        except ValueError as error:  # it is the user's own: `_target` refuses any other
            before, aside = (), path.replace(path.with_name(f"{path.name}.bad"))
            warnings.warn(f"jaxext renamed {path} to {aside}: {error}", stacklevel=2)
        _replace(path, encode(_joined((*before, *entries))))


def check_writable(path: str | os.PathLike) -> None:
    """Raise now what `merge` would raise after minutes of measuring."""
    path = _target(path)
    with tempfile.TemporaryFile(dir=next(folder for folder in path.parents if folder.exists())):
        pass


def clear(path: str | os.PathLike) -> None:
    """Remove the file at `path`, if it is there; raises as `merge` does."""
    if os.path.lexists(path):
        with _locked(path) as path:
            path.unlink(missing_ok=True)


def _target(path: str | os.PathLike) -> pathlib.Path:
    """The file to replace, if that is allowed.  Links that the user names are followed."""
    path, own = pathlib.Path(path), _is_own(path)
    if own:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    else:
        path = path.resolve()
    try:
        load(path)
    except ValueError as error:
        if not own:
            raise ValueError(f"{path}: {error}; want a table, or a path where there is nothing") from None
    return path


@contextlib.contextmanager
def _locked(path: str | os.PathLike) -> Iterator[pathlib.Path]:
    import filelock

    path = _target(path)  # raises before there is a lock file
    with filelock.FileLock(f"{path}.lock", timeout=PATIENCE_S):
        yield path


def _joined(entries: Sequence[Entry]) -> list[Entry]:
    """One entry for each context, in the order of writing, and only the last `CONTEXTS` of each device."""
    joined: dict[bytes, Entry] = {}
    for entry in entries:
        before = joined.pop(key := msgspec.json.encode(entry.context, order="sorted"), entry)
        rows, verified = before.rows | entry.rows, before.verified | entry.verified
        joined[key] = msgspec.structs.replace(entry, measured=max(before.measured, entry.measured), rows=rows, verified=verified)
    places = [entry.place for entry in joined.values()]
    return [entry for i, entry in enumerate(joined.values()) if places[i:].count(entry.place) <= CONTEXTS]


def _replace(path: pathlib.Path, text: bytes) -> None:
    """Write the file completely or not at all, even if this process is killed.  The caller holds the lock."""
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)  # left by a writer that was killed
    try:
        new.touch(0o600 if _is_own(path) else 0o666, exist_ok=False)  # does not follow a link
        if path.exists():
            shutil.copymode(path, new)
        new.write_bytes(text)
        new.replace(path)
    except OSError as error:
        error.filename = error.filename or str(path)  # Python does not say which file a full disk concerns
        raise
    finally:
        new.unlink(missing_ok=True)
