"""The package's record of verified kernels, kept true: adds what `python -m jaxext verify --share` wrote, and drops what has changed.

    make record                                     # drops the entries whose code has changed since, and says which
    make record SHARED=verified.json                # adds first what a machine with a GPU found: a shared record, or its user's own
    python -m benchmarks.record --check      # changes nothing; exit status 1 if there is such an entry

An entry is compared where its compiler is: Triton kernels are compiled here, CUDA kernels are read in the compiled module.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from jaxext.bench.shipping import compilers, digests, shipped
from jaxext.tables import record, table_file
from jaxext.tables.table_format import Entry


def stale(entries: Sequence[Entry], here: Mapping[str, str]) -> Iterator[tuple[Entry, str, str]]:
    """Each entry and kind whose code is another than the record says, with the reason; of the compilers that are `here`."""
    for entry in entries:
        asked = {kind: of for kind, of in entry.verified.items() if here.get(kind.partition(" ")[0]) == of.compiler}
        found = digests(asked, entry.capability or 0, entry.device) if asked else {}
        for kind, verified in asked.items():
            if kind not in found:
                yield entry, kind, "there are no such kernels any more"
            elif found[kind] != verified.code:
                yield entry, kind, f"the code has changed: {found[kind]}, recorded {verified.code}"


def without(entries: Sequence[Entry], dropped: Iterable[tuple[Entry, str, str]]) -> list[Entry]:
    """The entries without these kinds."""
    gone = {(entry.place, kind) for entry, kind, _ in dropped}
    kept = ({kind: of for kind, of in entry.verified.items() if (entry.place, kind) not in gone} for entry in entries)
    return [msgspec.structs.replace(entry, verified=verified) for entry, verified in zip(entries, kept, strict=True) if verified]


def compared(entry: Entry) -> Entry:
    """A shared entry without the kinds whose code is another here; a user's own record as `shipped` makes it."""
    if not all(of.code for of in entry.verified.values()):
        return shipped(entry)
    dropped = list(stale([entry], compilers()))
    _tell(dropped)
    return next(iter(without([entry], dropped)), msgspec.structs.replace(entry, verified={}))


def _tell(dropped: Iterable[tuple[Entry, str, str]]) -> None:
    for entry, kind, reason in dropped:
        print(f"{entry.device}, {kind}: {reason}")


def main(argv: Sequence[str] | None = None, path: pathlib.Path = record.SHIPPED) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.record", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--add", metavar="FILE", help="what `python -m jaxext verify --share FILE` wrote")
    parser.add_argument("--check", action="store_true", help="change nothing")
    options = parser.parse_args(argv)
    entries = table_file.load(path)
    dropped = list(stale(entries, compilers()))
    _tell(dropped)
    if options.check:
        here = compilers()
        recorded = [(kind, of) for entry in entries for kind, of in entry.verified.items()]
        others = sum(here.get(kind.partition(" ")[0]) != of.compiler for kind, of in recorded)
        print(f"{len(recorded)} kinds are recorded, {len(dropped)} of them are stale, {others} are of compilers that are not here")
        return 1 if dropped else 0
    kept = without(entries, dropped)
    added = [compared(entry) for entry in table_file.load(options.add)] if options.add else []
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        table_file.merge(new := pathlib.Path(folder, path.name), [*kept, *added])
        new.replace(path)
    print(f"{path.name}: {len(dropped)} kinds dropped, {sum(len(entry.verified) for entry in added)} added")
    return 0


if __name__ == "__main__":
    sys.exit(main())
