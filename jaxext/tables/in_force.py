"""The table of measurements that is in force, and its measurements of a call.

`use_table` names the table.  Otherwise it is the user's own, completed by the package's tables; both are read at the first call that asks.
All processes of a run must decide alike, so they compare their tables before any of them counts.  This module must not know operations,
nor how anything is measured.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
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
from jaxext.tables import environment, table_file
from jaxext.tables.table_format import Context, Entry, Measurement, Table, select

__all__ = ["add_code", "collecting", "context", "current", "in_force_on", "known_as", "measured", "use_table"]


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
_collectors: dict[int, list] = {}


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
    path = os.fspath(table)
    if not os.path.exists(path):
        raise FileNotFoundError(f"use_table: there is no file {path}")
    entries, ignored = table_file.try_load(path)
    _warn(path, ignored)
    return Scope("use_table", _used, _File(path, entries))


def _warn(source: str, ignored: str | None) -> None:
    if ignored is not None:
        warnings.warn(f"jaxext ignores measurements in {source}: {ignored}", stacklevel=3)


def current():
    """The value of `use_table` here.  XLA may ask for a decision later or in another thread, so `measured` takes it as an argument."""
    return _used.value


def as_in(used):
    """A context of the table that `current()` gave."""
    return _used(used)


def measured(call, used=None) -> Sequence[Measurement]:
    """The measurements of the call in the table in force, or in that of `used` (a `current()`); none if it was not measured.

    There are none for a program that XLA splits later, nor for a device that this process does not have.

    Raises:
      RuntimeError: another process of this run has another table.
    """
    for calls in tuple(_collectors.values()):
        calls.append(call)
    if call.problem is None or not call.splitter.by_labels:
        return ()
    if not _is_here(call.platform) or call.arch != environment.capability(call.platform):
        return ()
    return _in_force(used or current(), call.platform).rows.get(call.problem, ())


def known_as(platform: str, implementations: Iterable[str], used=None) -> str:
    """What tells programs apart that are alike but for the code of these implementations, and the rows of the table in force.

    Raises:
      RuntimeError: another process of this run has another table.
    """
    codes = environment.codes(platform)
    rows = _in_force(used or current(), platform).digest if _is_here(platform) else ""
    return f"{[codes.get(name) for name in implementations]} {rows}"


def add_code(implementation: str, code: Callable[[str], str]) -> None:
    """There is an implementation, and `code(platform)` tells its code from any other: what was measured with another does not hold."""
    with _lock:
        environment.add_code(implementation, code)
        _tables.clear()  # rows of it hold from now on


@contextlib.contextmanager
def collecting() -> Iterator[list]:
    """The list of the calls that any thread looks up in this context: XLA asks for the parts of a program in threads of its own."""
    calls: list = []
    _collectors[id(calls)] = calls
    try:
        yield calls
    finally:
        del _collectors[id(calls)]


def in_force_on(platform: str) -> Table:
    """The table in force for the platform's first device, without a warning or a comparison with other processes.

    Raises:
      RuntimeError: this process has no such platform.
    """
    return _tables.get((current(), platform)) or _read(current(), platform)


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
        _agree(f"{platform}/{'default' if used == 'default' else 'named'}", table)
    if not known:
        _warn(table.source, table.ignored)
    return table


def _read(used, platform: str) -> Table:
    """The rows that hold here.  Lowering must not fail for want of a table, so a file that cannot be read has none."""
    here = context(platform)
    if used != "default":
        table = select(used.entries, here, used.source)
        devices = {entry.device for entry in used.entries}
        # The table of a GPU is expected to have nothing for the CPU of the same process.
        if devices and here.device not in devices and platform == environment.default_platform():
            return dataclasses.replace(table, ignored=f"it is of {', '.join(sorted(devices))}, this is {here.device}")
        return table
    path = str(table_file.default_path())
    files = [table_file.try_load(file) for file in (*sorted(_SHIPPED.glob("*.json")), path)]
    # Measurements that do not hold are told of the user's own table alone: the user can do nothing about a table of the package.
    ignored = next((why for _, why in files if why), None) or select(files[-1][0], here, path).ignored
    return dataclasses.replace(select([entry for entries, _ in files for entry in entries], here, path), ignored=ignored)


def _agree(role: str, table: Table) -> None:
    """Publish the digest of this process's table; raise if another process has published another.

    No process waits, since one may lower a program alone.  Each publishes before it reads, so of two with different tables at least the
    later one raises.  A process that uses several tables in one role compares its first with the others' first, and so on.
    """
    digests = _agreed.setdefault(role, [])
    if table.digest in digests:
        return
    if jax.process_count() > 1:
        told = published(f"jaxext/tables/{role}/{len(digests)}", json.dumps([table.digest, table.source, len(table.rows)]))
        if told is None and table.rows:
            raise RuntimeError(f"{table.source}: processes cannot compare their tables without jax.distributed.initialize; use_table(None)")
        tables = {process: json.loads(text) for process, text in sorted((told or {}).items())}
        if len({digest for digest, *_ in tables.values()}) > 1:
            each = "; ".join(f"process {p} has {rows} rows, {digest[:12]}, of {source}" for p, (digest, source, rows) in tables.items())
            raise RuntimeError(f"processes have different tables of measurements ({each}): copy one to all of them, or use_table(None)")
    digests.append(table.digest)
