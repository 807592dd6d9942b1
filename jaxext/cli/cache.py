"""The command `cache`: shows, clears, exports and imports tables of measurements."""

from __future__ import annotations

import argparse
import os
import pathlib
from collections.abc import Sequence

from jaxext.cli.info import check_device
from jaxext.cli.terminal import Failure, Grid, UsageError, failed, says_json, tell
from jaxext.tables import active, environment, table_file, table_format


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("action", choices=("show", "clear", "export", "import"))
    command.add_argument("path", nargs="?", metavar="PATH", help="file to export to, or to import")
    command.add_argument("--table", metavar="PATH", help="use this table (default: the user's own)")
    command.add_argument("--yes", action="store_true", help="confirm clear, which deletes the table")
    says_json(command)


def cache(options) -> int:
    """Show, clear, export or import the stored measurements.  One table may have those of several machines.

    An export adds the stored measurements to the file, an import adds the file to the stored measurements.  For an operation in both, the
    added measurements replace the others.  A file that is not a table is rejected as a whole.  The record of verified kernels has the
    same format, and is verified.json in the table's folder: --table names it.

    examples:
      python -m jaxext cache show
      python -m jaxext cache export tables.json
      python -m jaxext cache import tables.json
      python -m jaxext cache clear --yes
    """
    path = pathlib.Path(options.table) if options.table else table_file.default_path()
    if (options.action in ("export", "import")) != (options.path is not None):
        raise UsageError(f"{options.action} takes {'a PATH' if options.path is None else 'no PATH'}")
    if options.action == "clear" and not options.yes:
        raise UsageError(f"clear deletes {path}: confirm with --yes")
    try:
        entries = _kept(options, path)
    except (OSError, ValueError) as error:
        return failed(" ".join(filter(None, ["cache", options.action, options.path, f"({path}): {error}"])))
    _tell(options, path, entries, _here(options))
    return 0


def _here(options) -> table_format.Context | None:
    """The context of this machine's device, or None if there is no device.  Only `show` requires one."""
    try:
        check_device()
    except Failure:
        if options.action == "show":
            raise
        return None
    return active.context(environment.default_platform())


def _kept(options, path: pathlib.Path) -> Sequence[table_format.Entry]:
    """Do the action, and return the entries of the table at `path` afterwards."""
    if options.action == "show" and options.table and not path.exists():
        raise UsageError(f"there is no table {path}")
    if options.action == "clear":
        table_file.clear(path)
    elif options.action != "show":
        source, target = (path, options.path) if options.action == "export" else (options.path, path)
        if not os.path.exists(source):
            raise UsageError(f"there is no table {source}")
        table_file.merge(target, table_file.load(source))
    return table_file.load(path)


def _tell(options, path: pathlib.Path, entries: Sequence[table_format.Entry], here: table_format.Context | None) -> None:
    facts, rows = [], []
    for entry in entries:
        measured, known = str(entry.measured), ("device", "capability", "versions", "sources")
        hold, why_not = None, "no device was found"
        if here is not None:
            table = table_format.select((entry,), here, str(path))
            hold, why_not = len(table.rows), table.ignored or (None if entry.place == here.place else "another device")
        numbers = {"measured": measured, "rows": len(entry.rows), "verified": len(entry.verified), "valid": hold, "reason": why_not}
        cells = measured, len(entry.rows), len(entry.verified), "-" if hold is None else hold, why_not or "-"
        facts.append({name: getattr(entry, name) for name in known} | numbers)
        versions = ", ".join(f"{name} {version}" for name, version in entry.versions.items())
        rows.append((entry.device, entry.capability or "-", versions, *cells))
    columns = ("device", "capability", "versions", "measured", "rows", "verified", "valid here", "reason")
    shown = Grid(str(path), columns, rows) if rows else Grid(f"{path}: nothing was measured", (), [])
    tell(options, {"path": str(path), "entries": facts}, shown)
