"""The format of stored measurements and of the record of verified kernels, and which measurements hold here.

A file is JSON, with an entry for each device and set of versions:

    {"format": "jaxext table 1", "entries": [
      {"device": "NVIDIA H200", "capability": 90, "versions": {"jax": "0.10.2", ...}, "sources": {"xla": "38617145de5d5706", ...},
       "measured": "2026-11-22",
       "rows": {"matmul_nn B=1 M=8 ...": [
         {"implementation": "xla", "config": {"algorithm": "lax"}, "ms": [0.9, 1.0, 1.1], "error": 1e-7}, ...]},
       "verified": {"triton conv conv2d_fprop bf16": {"right": true, "error": 0.002, "compiler": "triton 3.6.0"}, ...}}]}

`decode` checks a file against the annotations of the classes below, and one error refuses all of it.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MAX_BYTES = 64 << 20

# No control characters, and none that hide or reverse text: names end up in terminals and logs.
Text = Annotated[str, Meta(pattern=r"\A[^\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]+\Z")]


class _Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An object of the file."""


class Measurement(_Stored, frozen=True):
    """The time and error of one candidate, which is an implementation with one of its configs."""

    implementation: Text
    config: Mapping[Text, int | Text | bool]
    ms: tuple[float, float, float]  # quartiles of the time per call, in milliseconds
    error: float  # relative to the float64 truth, in the norm

    def __post_init__(self):
        if not 0 < self.ms[0] <= self.ms[1] <= self.ms[2]:
            raise ValueError(f"ms is {list(self.ms)}, want three quartiles above 0, in order")


class Verified(_Stored, frozen=True, omit_defaults=True):
    """The outcome of verifying the kernels of one kind on a device."""

    right: bool
    error: float | None  # the worst of all cases, relative to the float64 truth, in the norm; None if a case gave no result
    compiler: Text  # and its version: "triton 3.6.0", or "nvcc 13.0"
    code: Text | None = None  # in the package's record, a digest of the code that ran (bench/shipping.py)
    date: datetime.date | None = None  # there, the day of the verification


Rows = Mapping[str, Sequence[Measurement]]  # `Call.problem` -> measurements


class Context(_Stored, frozen=True):
    """The context of a measurement: where and with what it was made."""

    device: Text
    capability: int | None  # compute capability times 10
    versions: dict[Text, Text]  # of the packages that compile and compute, without ours
    sources: dict[Text, Text]  # implementation -> hash of its code

    @property
    def place(self) -> tuple[str, int | None]:
        return self.device, self.capability


class Entry(Context, frozen=True, omit_defaults=True):
    """The rows that were measured and the kernels that were verified in one context, the last of them on the day `measured` (UTC)."""

    measured: datetime.date
    rows: dict[Text, tuple[Measurement, ...]]
    verified: dict[Text, Verified] = {}  # "implementation family role dtypes" -> the outcome

    @classmethod
    def of(cls, context: Context, measured: datetime.date, rows: Rows, verified: Mapping[str, Verified] | None = None) -> Entry:
        stored = {problem: tuple(row) for problem, row in rows.items()}
        return cls(**msgspec.structs.asdict(context), measured=measured, rows=stored, verified=dict(verified or {}))

    @property
    def context(self) -> Context:
        return Context(self.device, self.capability, self.versions, self.sources)


class _File(_Stored, frozen=True):
    format: Literal["jaxext table 1"]
    entries: tuple[Entry, ...]


def encode(entries: Sequence[Entry]) -> bytes:
    """The file of these entries; raises TypeError or ValueError if `decode` would refuse it."""
    text = msgspec.json.format(msgspec.json.encode(_File("jaxext table 1", tuple(entries))), indent=1)
    decode(text)
    return text


def decode(text: bytes) -> tuple[Entry, ...]:
    """The entries of a file; raises ValueError if it is not a table."""
    try:
        if len(text) > MAX_BYTES:
            raise ValueError(f"over {MAX_BYTES >> 20} MiB")
        return msgspec.json.decode(text, type=_File).entries
    except ValueError as error:  # whose text may contain a name from the file
        why = "".join(filter(str.isprintable, str(error)))[:500]
        raise ValueError(f"it is not a table of this version: {why}") from None


@dataclasses.dataclass(frozen=True)
class Table:
    """The rows that hold in one context."""

    context: Context
    rows: Rows
    source: str  # the file, for messages
    ignored: str | None = None  # why other measurements of this device do not hold

    @functools.cached_property
    def digest(self) -> str:
        """A hash of the rows."""
        return hashlib.sha256(msgspec.json.encode(self.rows, order="sorted")).hexdigest()


@dataclasses.dataclass(frozen=True)
class Record:
    """The outcomes of verification that hold for one compute capability."""

    rows: Mapping[tuple[str, str], Verified]  # "implementation family role dtypes" and the compiler -> the outcome
    source: str  # the user's file, for messages
    ignored: str | None = None  # why the outcomes in it do not hold

    @functools.cached_property
    def digest(self) -> str:
        """A hash of what was right, and what was not."""
        right = sorted((*key, verified.right) for key, verified in self.rows.items())
        return hashlib.sha256(msgspec.json.encode(right)).hexdigest()


def select(entries: Sequence[Entry], here: Context, source: str) -> Table:
    """The rows that are valid in the context `here`.

    Measurements on another device, with other versions or of changed code are not valid, nor are rows without xla's.  If several entries
    have a row, the one measured with exactly this code counts, otherwise the last one.
    """
    same_device = [entry for entry in entries if entry.place == here.place]
    same = sorted((entry for entry in same_device if entry.versions == here.versions), key=lambda entry: entry.sources == here.sources)
    rows: dict[str, Sequence[Measurement]] = {}
    changed: dict[str, set[str]] = {}  # problem -> implementations
    for entry in same:
        valid = dict(entry.sources.items() & here.sources.items())
        for problem, row in entry.rows.items():
            changed_codes = {m.implementation for m in row} - valid.keys()
            held = tuple(m for m in row if m.implementation in valid)
            if any(m.implementation == "xla" for m in held):
                rows[problem], changed[problem] = held, changed_codes
            changed.setdefault(problem, changed_codes)
    ignored = None
    if same_device and not same:
        there, versions = same_device[-1].versions, here.versions
        names = [name for name in sorted({*there, *versions}) if there.get(name) != versions.get(name)]
        others = ", ".join(f"{name} {there.get(name, 'none')} (here {versions.get(name, 'none')})" for name in names)
        ignored = f"what it has for {here.device} was measured on {same_device[-1].measured} with {others}: tune again"
    elif names := sorted(set().union(*changed.values())):
        ignored = f"for this device it measured other code of {', '.join(names)}: tune again"
    return Table(here, rows, source, ignored)
