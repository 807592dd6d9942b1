"""What was measured, as data: its form, how bytes from anywhere are checked for it, and which of it holds here.

It is JSON, and has entries for several devices:

    {"format": "jaxext table 1", "entries": [
      {"device": "NVIDIA H200", "capability": 90, "versions": {"jax": "0.10.2", ...}, "sources": {"xla": "38617145de5d5706", ...},
       "measured": "2026-11-22",
       "rows": {"matmul_nn B=1 M=8 ...": [
         {"implementation": "xla", "config": {"algorithm": "lax"}, "ms": [0.9, 1.0, 1.1], "error": 1e-7}, ...]}}]}

Where anything is wrong with it, none of it is taken.  It must not know jax or files, nor what the implementations and their configs are.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

FORMAT = "jaxext table 1"
MAX_BYTES = 64 << 20
MAX_TEXT = 1000  # characters of a problem, a name or a version
MAX_FIELDS = 100  # of a config or of the versions
MAX_CANDIDATES = 256  # of a row


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One candidate for one problem: an implementation with one of its configs."""

    implementation: str
    config: Mapping[str, int | str | bool]
    ms: tuple[float, float, float]  # quartiles of the time per call, in milliseconds
    error: float  # relative to the float64 truth, in the norm


Rows = Mapping[str, Sequence[Measurement]]  # `Call.problem` -> measurements, of which one is xla's


@dataclasses.dataclass(frozen=True)
class Context:
    """Where and with what was measured."""

    device: str
    capability: int | None  # times 10
    versions: Mapping[str, str]  # of what compiles and computes, other than us
    sources: Mapping[str, str]  # implementation -> hash of its code

    def __hash__(self):
        return hash((self.device, self.capability, frozenset(self.versions.items()), frozenset(self.sources.items())))


@dataclasses.dataclass(frozen=True)
class Entry:
    """The rows that were measured in one context, the last of them on the day `measured` (UTC)."""

    context: Context
    measured: str
    rows: Rows


@dataclasses.dataclass(frozen=True)
class Table:
    """The rows that hold in one context, where those with the same are equal: `digest` is a hash of them."""

    context: Context = dataclasses.field(hash=False)
    rows: Rows = dataclasses.field(compare=False, repr=False)
    source: str = dataclasses.field(compare=False)  # its file, for messages
    ignored: str | None = dataclasses.field(default=None, compare=False)  # why measurements of this device do not hold
    shipped: int = dataclasses.field(default=0, compare=False)  # how many of the rows are only in the package's own tables
    digest: str = dataclasses.field(init=False)

    def __post_init__(self):
        text = json.dumps(_rows_as_data(self.rows), sort_keys=True)
        object.__setattr__(self, "digest", hashlib.sha256(text.encode()).hexdigest())


# ---- which of it holds


def select(entries: Sequence[Entry], context: Context, source: str) -> Table:
    """The rows of this device and these versions, without the measurements of code that has changed; none without xla's.

    Where several entries have a row, that counts which was measured with exactly our code; then the last.
    """
    here = [entry for entry in entries if _place(entry.context) == _place(context)]
    same = sorted((entry for entry in here if entry.context.versions == context.versions), key=lambda entry: entry.context == context)
    rows: dict[str, Sequence[Measurement]] = {}
    changed: dict[str, set[str]] = {}  # problem -> implementations
    for entry in same:
        valid = {name for name, code in entry.context.sources.items() if context.sources.get(name) == code}
        for problem, row in entry.rows.items():
            others = {m.implementation for m in row} - valid
            if "xla" in valid:
                rows[problem] = tuple(m for m in row if m.implementation in valid)
                changed[problem] = others
            else:
                changed.setdefault(problem, others)
    return Table(context, rows, source, _of_other_versions(here[-1], context) if here and not same else _of_other_code(changed))


def _place(context: Context) -> tuple[str, int | None]:
    return context.device, context.capability


def _of_other_versions(entry: Entry, context: Context) -> str:
    there, here = entry.context.versions, context.versions
    names = [name for name in sorted({*there, *here}) if there.get(name) != here.get(name)]
    others = ", ".join(f"{name} {there.get(name, 'none')} (here {here.get(name, 'none')})" for name in names)
    return f"what it has for {context.device} was measured on {entry.measured} with {others}: tune again"


def _of_other_code(changed: Mapping[str, set[str]]) -> str | None:
    names = sorted(set().union(*changed.values()))
    count = sum(map(bool, changed.values()))
    return (
        f"in {count} of {len(changed)} problems of this device it measured other code of {', '.join(names)}: tune again" if names else None
    )


# ---- as bytes


def as_bytes(entries: Sequence[Entry]) -> bytes:
    """What `parse` takes for the same entries.

    Raises:
      TypeError, ValueError: it would not; then something of them is not as it should be.
    """
    data = [{**dataclasses.asdict(e.context), "measured": e.measured, "rows": _rows_as_data(e.rows)} for e in entries]
    text = json.dumps({"format": FORMAT, "entries": data}, indent=1).encode()
    parse(text)
    return text


def _rows_as_data(rows: Rows) -> dict[str, list[dict[str, Any]]]:
    return {problem: [dataclasses.asdict(m) for m in row] for problem, row in rows.items()}


def parse(text: bytes) -> tuple[Entry, ...]:
    """The entries that a file's bytes say.

    Raises:
      ValueError: they are not a table, in any part.
    """
    if len(text) > MAX_BYTES:
        raise ValueError(f"it is over {MAX_BYTES >> 20} MiB")
    try:
        data = json.loads(text.decode(), object_pairs_hook=_once)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"it is not JSON, or cut short: {error}") from None
    _want(isinstance(data, dict) and data.get("format") == FORMAT, "it", data, f"the format {FORMAT!r}")
    return tuple(map(_entry, _list(_record(data, "it", "format", "entries")["entries"], "entries", MAX_BYTES, least=0)))


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _want(len(data := dict(pairs)) == len(pairs), "an object", [name for name, _ in pairs], "each name once")
    return data


def _entry(data: Any) -> Entry:
    fields = _record(data, "an entry", "device", "capability", "versions", "sources", "measured", "rows")
    capability = fields["capability"]
    _want(
        capability is None or type(capability) is int and 0 < capability < 10000, "capability", capability, "a number such as 90, or null"
    )
    context = Context(
        _text(fields["device"], "device"),
        capability,
        _mapping(fields["versions"], "versions", _text),
        _mapping(fields["sources"], "sources", _text),
    )
    measured = datetime.date.fromisoformat(_text(fields["measured"], "measured")).isoformat()
    return Entry(context, measured, _mapping(fields["rows"], "rows", _row, most=MAX_BYTES))


def _row(data: Any, what: str) -> tuple[Measurement, ...]:
    row = tuple(map(_measurement, _list(data, what, MAX_CANDIDATES)))
    names = [m.implementation for m in row]
    _want("xla" in names, what, names, "xla among the measured")
    candidates = [(m.implementation, frozenset(m.config.items())) for m in row]
    _want(len({*candidates}) == len(candidates), what, candidates, "each candidate once")
    return row


def _measurement(data: Any) -> Measurement:
    fields = _record(data, "a measurement", "implementation", "config", "ms", "error")
    first, median, third = ms = [_number(x, "ms") for x in _list(fields["ms"], "ms", 3, least=3)]
    _want(0 < first <= median <= third, "ms", ms, "three quartiles above 0, in order")
    return Measurement(
        _text(fields["implementation"], "implementation"),
        _mapping(fields["config"], "config", _scalar),
        (first, median, third),
        _number(fields["error"], "error"),
    )


def _number(x: Any, what: str) -> float:
    _want(type(x) in (int, float) and 0 <= x < 2**63 and math.isfinite(x), what, x, "a number of 0 or more")
    return float(x)


def _scalar(x: Any, what: str) -> int | str | bool:
    _want(type(x) in (bool, str) or type(x) is int and abs(x) < 2**63, what, x, "a whole number, a text or a truth value")
    return _text(x, what) if isinstance(x, str) else x


def _text(x: Any, what: str) -> str:
    _want(isinstance(x, str) and 0 < len(x) <= MAX_TEXT and x.isprintable(), what, x, f"1 to {MAX_TEXT} printable characters")
    return x


def _mapping(data: Any, what: str, of: Callable[[Any, str], Any], most: int = MAX_FIELDS) -> dict[str, Any]:
    _want(isinstance(data, dict) and len(data) <= most, what, data, f"an object of at most {most} fields")
    return {_text(name, what): of(value, name) for name, value in data.items()}


def _list(data: Any, what: str, most: int, least: int = 1) -> list[Any]:
    _want(isinstance(data, list) and least <= len(data) <= most, what, data, f"a list of {least} to {most}")
    return data


def _record(data: Any, what: str, *fields: str) -> dict[str, Any]:
    _want(isinstance(data, dict) and set(data) == set(fields), what, data, f"the fields {', '.join(fields)}")
    return data


def _want(good: bool, what: str, got: Any, wanted: str) -> None:
    if not good:
        raise ValueError(f"{what} is {reprlib.repr(got)}, want {wanted}")
