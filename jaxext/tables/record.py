"""The record of kernels that were verified on a device: the package's own, and the user's, which `python -m jaxext verify` writes.

A kind of kernels, "implementation family role dtypes", is known for a compute capability if it was run there, made by the same compiler,
and compared with float64.  An entry of the user's own holds for the sources that it was made with.  Entries of the package hold for the
code whose digest they carry, which `make record` compares.  What a user's GPU showed goes before what the package knows.
"""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Mapping, Sequence

import msgspec

from jaxext.tables import active, environment, table_file
from jaxext.tables.table_format import Entry, Record, Verified

SHIPPED = pathlib.Path(__file__).with_name(table_file.RECORD)

_lock = threading.Lock()
_records: dict[int, Record] = {}  # compute capability times 10 -> what is known


def unverified(implementation: str, kind: str, arch: int, compiler: str) -> str | None:
    """Return None if kernels of this kind were seen right on a device of this compute capability (times 10), or the reason why they are
    not used without a name.

    Raises:
      RuntimeError: another process of this run has another record.

    Warns:
      UserWarning: once for each capability, that a record is ignored.
    """
    found = record(arch).rows.get((f"{implementation} {kind}", compiler))
    if found is None:
        return f"not yet verified on {arch / 10}: `python -m jaxext verify` takes three minutes there, or name it"
    return None if found.right else f"`python -m jaxext verify` found it wrong on {arch / 10}"


def record(arch: int) -> Record:
    """The record for a compute capability, read when it is first needed; raises and warns as `unverified` does."""
    with _lock:
        known = arch in _records
        found = _records[arch] = _records[arch] if known else read(arch)
        active.agree(f"verified/{arch}", found, "records of verified kernels", ", or remove it")
    if not known:
        active.warn(found.source, found.ignored, "the record of verified kernels")
    return found


def known_as(arch: int | None) -> str:
    """A text that differs if other kernels are verified for this capability."""
    return "" if arch is None else record(arch).digest


def read(arch: int) -> Record:
    """The outcomes that hold for a compute capability.  A file that cannot be read has none."""
    path = table_file.record_path()
    own, ignored = table_file.try_load(path)
    ours, damaged = table_file.try_load(SHIPPED)
    here = environment.codes("cuda")
    kinds, held = _outcomes(ours, arch), _outcomes([_current(entry, here) for entry in own], arch)
    if damaged:
        return Record(held, str(SHIPPED), damaged)
    return Record(kinds | held, str(path), ignored or (_ignored_reason(own, arch) if own and not held else None))


def _current(entry: Entry, sources: Mapping[str, str]) -> Entry:
    """The entry without the implementations that have other sources now."""
    same = {name for name, code in entry.sources.items() if sources.get(name) == code}
    return msgspec.structs.replace(entry, verified={kind: of for kind, of in entry.verified.items() if kind.partition(" ")[0] in same})


def _outcomes(entries: Sequence[Entry], arch: int) -> dict[tuple[str, str], Verified]:
    """Kind and compiler -> the last outcome on a device of this capability.  What was wrong on one of several devices is wrong."""
    devices: dict[str, dict[tuple[str, str], Verified]] = {}
    for entry in entries:
        if entry.capability == arch:
            devices.setdefault(entry.device, {}).update({(kind, of.compiler): of for kind, of in entry.verified.items()})
    found: dict[tuple[str, str], Verified] = {}
    for kinds in devices.values():
        found |= {key: of for key, of in kinds.items() if key not in found or found[key].right}
    return found


def _ignored_reason(entries: Sequence[Entry], arch: int) -> str:
    """Return the reason why none of these entries holds for this capability."""
    there = sorted({(entry.capability or 0) / 10 for entry in entries})
    if arch / 10 in there:
        return f"for {arch / 10} it verified another build of jaxext: verify again"
    return f"it is of compute capability {', '.join(map(str, there))}, this program is for {arch / 10}"
