"""The active table of measurements, and its measurements of a call.

`use_table` names the table.  Otherwise it is the user's own, completed by the package's tables; both are read when they are first needed.
All processes of a run must decide alike, so they compare their tables before using them.
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
from jaxext._scope import Scope, in_parentheses, user_context
from jaxext.tables import environment, table_file
from jaxext.tables.table_format import Context, Entry, Measurement, Record, Table, select


@dataclasses.dataclass(frozen=True)
class _File:
    """The entries of a file at the time of `use_table`.  Which of them are valid depends on the platform of the call."""

    source: str = dataclasses.field(repr=False)  # programs have the `repr`, and are the same for copies of a file
    entries: tuple[Entry, ...] = dataclasses.field(hash=False, repr=False)


_used = user_context("use_table", "default")  # a `_File`, or the word "default"

_SHIPPED = pathlib.Path(__file__).parent  # the folder of the package's own tables, if there are any
_lock = threading.Lock()
_tables: dict[tuple[Any, str], Table] = {}  # the value of `_used`, platform -> the valid rows
_agreed: dict[str, list[str]] = {}  # platform and "default" or "named" -> digests already compared with other processes, in order
_collectors: dict[int, list] = {}


@in_parentheses('use_table("tables.json")')
def use_table(table: str | os.PathLike | Table | None) -> Scope:
    """A context in which only this table decides between implementations and their configs.

    Use it as `with use_table("tables.json"): ...` or as a decorator, `@use_table("tables.json")`, which reads the file once.  It takes
    effect at lowering: put it around the call of a jitted function, or above `@jax.jit`.  Rows for other devices, versions or code are
    ignored.  If the call or `use_implementation` names an implementation, the table decides only between that implementation's configs.
    The context is part of `jax.jit`'s cache key.

    Args:
      table: the path of a file that `tune` wrote, or what `tune(fun)(...)` returned.  The file is read immediately.  None means no
        measurements.

    Raises:
      FileNotFoundError: the file does not exist.
      RuntimeError: raised at lowering, if the processes of a run have different tables.

    Warns:
      UserWarning: the file is not a table, or its measurements of this device are of other versions or code.

    Examples:
      >>> jaxext.tune(jaxext.matmul, table="tables.json")(jnp.ones((64, 32)), jnp.ones((32, 16)))
      >>> with jaxext.use_table("tables.json"):
      ...     print(jaxext.explain(jaxext.matmul)(jnp.ones((64, 32)), jnp.ones((32, 16))))
    """
    if table is None:
        return Scope("use_table", _used, _File("no table", ()))
    if isinstance(table, Table):  # of benchmarks
        return Scope("use_table", _used, _File(table.source, (Entry.of(table.context, datetime.date.today(), table.rows),)))
    path = os.fspath(table)
    if not os.path.exists(path):
        raise FileNotFoundError(f"use_table: there is no file {path}")
    entries, ignored = table_file.try_load(path)
    warn(path, ignored)
    return Scope("use_table", _used, _File(path, entries))


def warn(source: str, ignored: str | None, what: str = "measurements") -> None:
    """Warn that a file is ignored, if there is a reason."""
    if ignored is not None:
        warnings.warn(f"jaxext ignores {what} in {source}: {ignored}", stacklevel=4)  # the caller of `use_table`, or deep in a lowering


def current():
    return _used.value


def measured(call) -> Sequence[Measurement]:
    """The measurements of the call in the active table.

    Raises RuntimeError if another process of this run has another table.
    """
    for calls in tuple(_collectors.values()):
        calls.append(call)
    return () if unanswered(call) else _active(current(), call.platform).rows.get(call.problem, ())


def unanswered(call) -> str | None:
    """Return the reason why no table has measurements of the call, or None."""
    if call.problem is None:
        return "a size is symbolic"
    if not call.partitioner.by_labels:
        return "XLA's partitioner may split it over devices, here or where the exported program is called"
    if not _is_here(call.platform) or call.arch != environment.capability(call.platform):
        return "it is for a device that this process does not have"
    return None


def known_as(platform: str, implementations: Iterable[str]) -> str:
    """A text that differs if the code of these implementations or the rows of the active table differ.  Raises as `measured` does."""
    codes = environment.codes(platform)
    rows = _active(current(), platform).digest if _is_here(platform) else ""
    return f"{[codes.get(name) for name in implementations]} {rows}"


def add_code(implementation: str, code: Callable[[str], str], instead_of: Callable[[str], str] | None = None) -> None:
    """Register an implementation, or replace one; measurements made with another `code(platform)` are not valid."""
    with _lock:
        environment.add_code(implementation, code, instead_of)
        _tables.clear()  # its rows are valid from now on


@contextlib.contextmanager
def collecting() -> Iterator[list]:
    """A list of the calls that any thread looks up in this context: XLA lowers the parts of a program in its own threads."""
    calls: list = []
    _collectors[id(calls)] = calls
    try:
        yield calls
    finally:
        del _collectors[id(calls)]


def active_on(platform: str) -> Table:
    """The active table for the platform's first device, without warnings and without comparing it with other processes."""
    return _tables.get((current(), platform)) or _read(current(), platform)


def context(platform: str) -> Context:
    """The context of this process's first device of the platform.  Raises RuntimeError if there is none."""
    device, capability = environment.device_kind(platform), environment.capability(platform)
    return Context(device, capability, environment.versions_for(platform), environment.codes(platform))


def _is_here(platform: str) -> bool:
    try:
        environment.capability(platform)
    except RuntimeError:  # the program is compiled for another machine
        return False
    return True


def _active(used, platform: str) -> Table:
    with _lock:
        known = (used, platform) in _tables
        table = _tables[used, platform] = _tables[used, platform] if known else _read(used, platform)
        agree(f"{platform}/{'default' if used == 'default' else 'named'}", table)
    if not known:
        warn(table.source, table.ignored)
    return table


def _read(used, platform: str) -> Table:
    """The rows that are valid here.  A file that cannot be read has none: lowering must not fail without a table."""
    here = context(platform)
    if used != "default":
        table = select(used.entries, here, used.source)
        devices = {entry.device for entry in used.entries}
        # A GPU's table need not have measurements of the CPU of the same process.
        if devices and here.device not in devices and platform == environment.default_platform():
            return dataclasses.replace(table, ignored=f"it is of {', '.join(sorted(devices))}, this is {here.device}")
        return table
    path = str(table_file.default_path())
    own, why = table_file.try_load(path)
    shipped = [
        entry for file in sorted({*_SHIPPED.glob("*.json")} - {_SHIPPED / table_file.RECORD}) for entry in table_file.try_load(file)[0]
    ]
    # Warn of invalid measurements in the user's own table only: the user cannot change a table of the package.
    return dataclasses.replace(select([*shipped, *own], here, path), ignored=why or select(own, here, path).ignored)


def agree(role: str, table: Table | Record, what: str = "tables of measurements", fix: str = ", or use_table(None)") -> None:
    """Publish the digest of this process's table or record; raise if another process has published another.

    No process waits, since one may lower a program alone.  Each publishes before it reads, so of two with different tables at least the
    later one raises.  The n-th table of a process in one role is compared with the n-th of the others.
    """
    digests = _agreed.setdefault(role, [])
    if table.digest in digests:
        return
    if jax.process_count() > 1:
        answers = published(f"jaxext/tables/{role}/{len(digests)}", json.dumps([table.digest, table.source, len(table.rows)]))
        if answers is None and table.rows:
            raise RuntimeError(f"{table.source}: processes cannot compare their {what} without jax.distributed.initialize{fix}")
        tables = {process: json.loads(text) for process, text in sorted((answers or {}).items())}
        if len({digest for digest, *_ in tables.values()}) > 1:
            each = "; ".join(f"process {p} has {rows} rows, {digest[:12]}, of {source}" for p, (digest, source, rows) in tables.items())
            raise RuntimeError(f"processes have different {what} ({each}): copy one to all of them{fix}")
    digests.append(table.digest)
