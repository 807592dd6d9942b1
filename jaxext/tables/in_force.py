"""Which table of measurements is in force, and what it says of a call.

It is the one that `use_table` names, else the package's own for this device and, above it, the user's, which are read at the first call
that asks.  All processes of a run must take the same decisions: they compare what they read before any of it counts.  It must not know
operations, nor how anything is measured.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.resources
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from jaxext._compat import published
from jaxext._scope import Scope
from jaxext.tables import environment
from jaxext.tables.table_file import Context, Entry, Measurement, Table, default_path, parse, read_entries, select, warn

__all__ = ["add_code", "collecting", "context", "current", "default_path", "digest", "in_force_on", "known_as", "measured", "use_table"]


@dataclasses.dataclass(frozen=True)
class _File:
    """The entries of a file, as they were when it was named; which of them hold depends on the platform of the call."""

    source: str
    entries: tuple[Entry, ...] = dataclasses.field(hash=False, repr=False)


# A `_File`, a `Table`, or the word "default"; part of jit's cache key.
_used = jax.make_user_context("default")

_ANOTHER = "it was measured with other versions or code: tune again"

_lock = threading.Lock()
_tables: dict[tuple[Any, str], Table] = {}  # what is used, platform -> what of it holds
_agreed: dict[str, list[str]] = {}  # platform and "default" or "named" -> digests that every process which told has too, in order
_collectors: list[list] = []


def use_table(table: str | os.PathLike | Table | None) -> Scope:
    """A context in which the table decides between implementations and their configurations, and neither the user's own nor the package's.

    It is a context manager (`with use_table("tables.json"): ...`) and a decorator of functions (`@use_table("tables.json")`, which reads
    the file once).  It decides at lowering: put it around the call of a jitted function, or above `@jax.jit`.
    Its rows for other devices, versions or code do not count.  An implementation that the call or `use_implementation` names leaves the
    table only the choice of its configuration.  The context is part of `jax.jit`'s cache key.

    Args:
      table: the path of a file that `tune` wrote, which is read now; or None: nothing was measured.

    Raises:
      FileNotFoundError: there is no such file.
      RuntimeError: at lowering, in a run of several processes whose tables differ.

    Warns:
      UserWarning: the file is not a table, or its measurements for this device are ignored: other versions or code made them.

    Examples:
      >>> jaxext.tune(jaxext.matmul, jnp.ones((64, 32)), jnp.ones((32, 16)), table="tables.json")
      >>> with jaxext.use_table("tables.json"):
      ...     print(jaxext.explain(jaxext.matmul, jnp.ones((64, 32)), jnp.ones((32, 16))))
    """
    if table is None:
        return Scope("use_table", _used, _File("no table", ()))
    if isinstance(table, Table):
        return Scope("use_table", _used, table)
    if not isinstance(table, str | os.PathLike):
        raise TypeError(f"use_table: table is {table!r}, want a path or None")
    path = os.fspath(table)
    if not os.path.exists(path):
        raise FileNotFoundError(f"use_table: there is no file {path}")
    entries, ignored = read_entries(path)
    warn(path, ignored)
    return Scope("use_table", _used, _File(path, entries))


def current():
    """What `use_table` says here: for `measured` elsewhere, since XLA may ask once this context was left, or in a thread of its own."""
    return _used.value


def measured(call, used=None) -> Sequence[Measurement]:
    """What the table in force (that of `used`, which is a `current()`) says of the call; nothing if it was not measured.

    A program whose parts XLA decides later, or for another device than this process has, is nothing that was measured.

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
    """What tells programs of one table from those of another: of the table in force (that of `used`, which is a `current()`), a hash.

    "" if it says nothing of this process's device, or the process has none of that platform: then no table decides.

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
    """Every call that is looked up meanwhile, by any thread: XLA asks for the parts of a program in its own."""
    calls: list = []
    with _lock:
        _collectors.append(calls)
    try:
        yield calls
    finally:
        with _lock:
            _collectors[:] = [other for other in _collectors if other is not calls]


def in_force_on(platform: str) -> Table:
    """The table that decides here for the platform's first device, for those who tell of it: nothing is warned of or compared.

    Raises:
      RuntimeError: this process has no such platform.
    """
    used = current()
    with _lock:
        return _tables[used, platform] if (used, platform) in _tables else _read(used, platform)


@functools.cache
def context(platform: str) -> Context:
    """What is measured in this process, on its first device of the platform, holds in.

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
        warn(table.source, table.ignored)
    return table


def _read(used, platform: str) -> Table:
    """What holds here.  Lowering asks, which must not fail for want of a table: what cannot be had is ignored."""
    try:
        here = context(platform)
        return _default(here) if used == "default" else _named(used, here, platform)
    except (ImportError, OSError, ValueError) as error:
        unknown = Context(platform, None, {}, {})
        return Table(unknown, {}, used if isinstance(used, str) else used.source, f"{type(error).__name__}: {error}")


def _default(here: Context) -> Table:
    path = default_path()
    entries, ignored = read_entries(path)
    own = select(entries, here, str(path))
    both = select((*_shipped(), *entries), here, str(path))
    # That the package has measurements of other versions than these is nothing that its user can mend.
    return dataclasses.replace(both, ignored=ignored or own.ignored, shipped=len(both.rows.keys() - own.rows.keys()))


def _named(used: _File | Table, here: Context, platform: str) -> Table:
    if isinstance(used, Table):
        table = used if used.context == here else dataclasses.replace(used, context=here, rows={}, ignored=_ANOTHER)
        devices = {used.context.device}
    else:
        table = select(used.entries, here, used.source)
        devices = {entry.context.device for entry in used.entries}
    if not devices or here.device in devices:
        return table
    # One of a GPU says nothing of what the same process computes on its CPU, and need not.
    foreign = f"it is of {', '.join(sorted(devices))}, this is {here.device}" if platform == environment.default_platform() else None
    return dataclasses.replace(table, ignored=foreign)


def _shipped() -> Iterator[Entry]:
    """The entries of the package's own tables, in the folder `tables` if there is one."""
    folder = importlib.resources.files("jaxext") / "tables"
    for file in sorted(folder.iterdir(), key=lambda file: file.name) if folder.is_dir() else ():
        if file.name.endswith(".json"):
            try:
                yield from parse(file.read_bytes())
            except ValueError as error:
                raise ValueError(f"{file} of the package: {error}") from None


def _agree(role: str, table: Table) -> None:
    """Tell the other processes which table this one has; raise if one has told of another.

    Nobody is waited for, since a process may lower a program alone.  Each tells before it hears: so of two that differ one hears of it, the
    later.  Where a role is played by one table after the other, the first is compared with the others' first, and so on.
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
