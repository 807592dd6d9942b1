"""The table of measurements that is in force, and its measurements of a call.

`use_table` names the table.  Otherwise it is the user's own, completed by the package's tables; both are read at the first call that asks.
All processes of a run must decide alike, so they compare their tables before any of them counts.  This module must not know operations,
nor how anything is measured.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import hashlib
import json
import os
import pathlib
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from jaxext._compat import published
from jaxext._scope import Scope
from jaxext.tables import environment
from jaxext.tables.table_file import default_path, try_load
from jaxext.tables.table_format import Context, Entry, Measurement, Table, decode, select

__all__ = ["add_code", "collecting", "context", "current", "default_path", "digest", "in_force_on", "known_as", "measured", "use_table"]


@dataclasses.dataclass(frozen=True)
class _File:
    """The entries of a file at the time of `use_table`.  Which of them hold depends on the platform of the call."""

    source: str
    entries: tuple[Entry, ...] = dataclasses.field(hash=False, repr=False)


_used = jax.make_user_context("default")  # a `_File`, or the word "default"; part of jit's cache key

_SHIPPED = pathlib.Path(__file__).parent  # the folder of the package's own tables, if there are any
_lock = threading.Lock()
_tables: dict[tuple[Any, str], Table] = {}  # the value of `_used`, platform -> the rows that hold
_agreed: dict[str, list[str]] = {}  # platform and "default" or "named" -> digests that were compared with other processes, in order
_collectors: list[list] = []


def use_table(table: str | os.PathLike | Table | None) -> Scope:
    """A context in which this table alone decides between implementations and their configurations.

    It is a context manager (`with use_table("tables.json"): ...`) and a decorator of functions (`@use_table("tables.json")`, which reads
    the file once).  It takes effect at lowering: put it around the call of a jitted function, or above `@jax.jit`.
    Rows for other devices, versions or code are ignored.  If the call or `use_implementation` names an implementation, the table only
    decides about its configuration.  The context is part of `jax.jit`'s cache key.

    Args:
      table: the path of a file that `tune` wrote, which is read now; or None for no measurements.

    Raises:
      FileNotFoundError: there is no such file.
      RuntimeError: at lowering, if the processes of a run have different tables.

    Warns:
      UserWarning: the file is not a table, or has measurements of this device with other versions or code.

    Examples:
      >>> jaxext.tune(jaxext.matmul, jnp.ones((64, 32)), jnp.ones((32, 16)), table="tables.json")
      >>> with jaxext.use_table("tables.json"):
      ...     print(jaxext.explain(jaxext.matmul, jnp.ones((64, 32)), jnp.ones((32, 16))))
    """
    if table is None:
        return Scope("use_table", _used, _File("no table", ()))
    if isinstance(table, Table):
        return Scope("use_table", _used, _File(table.source, (Entry.of(table.context, datetime.date.today(), table.rows),)))
    if not isinstance(table, str | os.PathLike):
        raise TypeError(f"use_table: table is {table!r}, want a path or None")
    path = os.fspath(table)
    if not os.path.exists(path):
        raise FileNotFoundError(f"use_table: there is no file {path}")
    entries, ignored = try_load(path)
    _warn(path, ignored)
    return Scope("use_table", _used, _File(path, entries))


def _warn(source: str, ignored: str | None) -> None:
    if ignored is not None:
        warnings.warn(f"jaxext ignores measurements in {source}: {ignored}", stacklevel=3)


def current():
    """The value of `use_table` here.  XLA may ask for a decision later or in another thread, so `measured` takes it as an argument."""
    return _used.value


def measured(call, used=None) -> Sequence[Measurement]:
    """The measurements of the call in the table in force, or in that of `used` (a `current()`); none if it was not measured.

    There are none for a program that XLA splits later, nor for a device that this process does not have.

    Raises:
      RuntimeError: another process of this run has another table.
    """
    for calls in tuple(_collectors):
        calls.append(call)
    problem = call.problem
    if problem is None or not call.splitter.by_labels:
        return ()
    if not _is_here(call.platform) or call.arch != environment.capability(call.platform):
        return ()
    return _in_force(current() if used is None else used, call.platform).rows.get(problem, ())


def digest(platform: str, used=None) -> str:
    """A hash of the table in force, or of that of `used` (a `current()`); "" if it has no rows for this process's device.

    Raises:
      RuntimeError: another process of this run has another table.
    """
    if not _is_here(platform):
        return ""
    table = _in_force(current() if used is None else used, platform)
    return table.digest if table.rows else ""


def add_code(implementation: str, code: Callable[[str], str]) -> None:
    """There is an implementation, and `code(platform)` tells its code from any other: what was measured with another does not hold."""
    with _lock:
        environment.add_code(implementation, code)
        context.cache_clear()
        _tables.clear()


def known_as(platform: str, implementations: Iterable[str], used=None) -> str:
    """What tells programs apart that are alike but for the code of these implementations, and the table in force (see `digest`)."""
    try:
        codes = environment.codes(platform)
    except (OSError, ImportError):  # the sources cannot be read
        codes = {}
    return f"{[codes.get(name) for name in implementations]} {digest(platform, used)}"


@contextlib.contextmanager
def collecting() -> Iterator[list]:
    """The list of the calls that any thread looks up in this context: XLA asks for the parts of a program in threads of its own."""
    calls: list = []
    with _lock:
        _collectors.append(calls)
    try:
        yield calls
    finally:
        with _lock:
            _collectors[:] = [other for other in _collectors if other is not calls]


def in_force_on(platform: str) -> Table:
    """The table in force for the platform's first device, without a warning or a comparison with other processes.

    Raises:
      RuntimeError: this process has no such platform.
    """
    used = current()
    with _lock:
        return _tables[used, platform] if (used, platform) in _tables else _read(used, platform)


@functools.cache
def context(platform: str) -> Context:
    """The context of this process's first device of the platform.

    Raises:
      RuntimeError: this process has no such platform.
    """
    return Context(
        device=environment.device_kind(platform),
        capability=environment.capability(platform),
        versions=environment.versions_for(platform),
        sources=environment.codes(platform),
    )


def _is_here(platform: str) -> bool:
    try:
        environment.capability(platform)
    except RuntimeError:  # it is compiled for another machine
        return False
    return True


def _in_force(used, platform: str) -> Table:
    with _lock:
        known = (used, platform) in _tables
        table = _tables[used, platform] = _tables[used, platform] if known else _read(used, platform)
        _agree(f"{platform}: {'default' if used == 'default' else 'named'}", table)
    if not known:
        _warn(table.source, table.ignored)
    return table


def _read(used, platform: str) -> Table:
    """The rows that hold here.  Lowering must not fail for want of a table, so a table that cannot be read is empty."""
    try:
        here = context(platform)
        return _default(here) if used == "default" else _named(used, here, platform)
    except (ImportError, OSError, ValueError) as error:
        return Table(Context(platform, None, {}, {}), {}, getattr(used, "source", used), f"{type(error).__name__}: {error}")


def _default(here: Context) -> Table:
    path = str(default_path())
    entries, ignored = try_load(path)
    own = select(entries, here, path)
    shipped = [entry for file in sorted(_SHIPPED.glob("*.json")) for entry in decode(file.read_bytes())]
    both = select([*shipped, *entries], here, path)
    # Not `both.ignored`: the user can do nothing about a table of the package that is of other versions.
    return dataclasses.replace(both, ignored=ignored or own.ignored)


def _named(used: _File, here: Context, platform: str) -> Table:
    table = select(used.entries, here, used.source)
    devices = {entry.device for entry in used.entries}
    # The table of a GPU is expected to have nothing for the CPU of the same process.
    if devices and here.device not in devices and platform == environment.default_platform():
        return dataclasses.replace(table, ignored=f"it is of {', '.join(sorted(devices))}, this is {here.device}")
    return table


def _agree(role: str, table: Table) -> None:
    """Publish the digest of this process's table; raise if another process has published another.

    No process waits, since one may lower a program alone.  Each publishes before it reads, so of two with different tables at least the
    later one raises.  A process that uses several tables in one role compares its first with the others' first, and so on.
    """
    digests = _agreed.setdefault(role, [])
    if table.digest in digests:
        return
    if jax.process_count() > 1:
        folder = f"jaxext/tables/{hashlib.sha256(role.encode()).hexdigest()[:16]}/{len(digests)}"
        told = published(folder, json.dumps([table.digest, table.source, len(table.rows)]))
        if told is None and table.rows:
            raise RuntimeError(f"{table.source}: processes cannot compare their tables without jax.distributed.initialize; use_table(None)")
        tables = {process: json.loads(text) for process, text in sorted((told or {}).items())}
        if len({digest for digest, *_ in tables.values()}) > 1:
            each = "; ".join(f"process {p} has {rows} rows, {digest[:12]}, of {source}" for p, (digest, source, rows) in tables.items())
            raise RuntimeError(f"processes have different tables of measurements ({each}): copy one to all of them, or use_table(None)")
    digests.append(table.digest)
