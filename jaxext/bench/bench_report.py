"""The benchmark's report: its records, and the JSON file that holds them, with a line for each row.

The classes are the schema: a file is checked against their annotations when it is read.  A field that has its default is left out.
"""

from __future__ import annotations

import collections
import json
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from jaxext._messages import DTYPES as EVERY_DTYPE
from jaxext._messages import plain
from jaxext.core.family import names_of_implementations
from jaxext.tuning.timing import law

SCHEMA = "jaxext bench 1"
THEIRS = ("lax", "cublas")  # the libraries that are none of jaxext's implementations
RATIOS = ("lax", "xla", "best")
TARGETS = (*RATIOS, "copy", "tflops")
# Tags, special before general: a row is of the first that is among its own.
KINDS = ("mlp", "fused", "ragged", "per-example", "batched-filters", "transposed", "causal", "depthwise", "grouped", "three-axes")
KINDS += ("one-axis", "stem", "strided", "pointwise", "dense", "batched", "skinny", "matmul")
PRECISION, OTHER = "precision", "other"  # kinds of rows whose numbers are not those of one of DTYPES, and of rows without such a tag
DTYPES = ("bfloat16", "float16", "float32", "float64")
NOT_FINITE = ("nan", "inf", "-inf")  # numbers that JSON does not have, as texts

Quartiles = tuple[float, float, float]  # of milliseconds per call: first quartile, median, third quartile
Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Name = Annotated[str, Meta(pattern=r"\A[^\W\d]\w*\Z")]  # of a library


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An object of the file."""


class Result(_Record, frozen=True, kw_only=True):
    """The measurements of a library for a row.

    Attributes:
      ms: on a GPU the time of all its kernels with a cold L2 cache, on a CPU wall time.
      warm_ms: on a GPU, the same with a warm L2.
      wall_ms: on a GPU, wall time in a captured loop.
      roofline: the share of the roofline, if the ceilings of the dtype are known.
      copy: the share of the bandwidth of a large copy.
      error, worst: relative errors against float64: in the norm, and of the worst element over the largest of the truth; NaN if the result
        is NaN; a text if there is no truth.
      hlo: the number of instructions of each kind that XLA put around the product: "transpose", "copy", "pad".
      kernels_ms: on a GPU, by kernel.

    What is None was not measured, or a report in benchmarks/results leaves it out, since no page reads it.
    """

    ms: Quartiles
    warm_ms: Quartiles | None = None
    wall_ms: Quartiles | None = None
    roofline: NotNegative | None = None
    copy: NotNegative | None = None
    tflops: NotNegative | None = None
    gbps: NotNegative | None = None
    error: float | str
    worst: float | str | None = None
    hlo: Mapping[str, int] = {}
    temporaries_bytes: Annotated[int, Meta(ge=0)] | None = None
    trace_ms: NotNegative | None = None
    compile_ms: NotNegative | None = None
    kernels_ms: Mapping[str, float] | None = None

    def __post_init__(self):
        for field in ("ms", "warm_ms", "wall_ms"):
            times = getattr(self, field)
            if times is not None and not 0 < times[0] <= times[1] <= times[2]:
                raise ValueError(f"{field}: got {list(times)}, want 0 < first quartile <= median <= third quartile")
        for field in ("error", "worst"):
            value = getattr(self, field)
            if isinstance(value, float) and value < 0:
                raise ValueError(f"{field}: got {value}, want 0 or more")


class Refusal(_Record, frozen=True):
    """A library that does not support the row's problem here, with the reason."""

    refused: str


class Failure(_Record, frozen=True):
    failed: str


class Results(dict[str, Result | Refusal | Failure]):
    """Library -> result.  The file does not name the class: only a refusal has "refused", and only a failure has "failed"."""

    @classmethod
    def of(cls, data: Any) -> Results:
        made, library = cls(), "libraries"
        try:
            for library, fields in msgspec.convert(data, dict[Name, dict[str, Any]]).items():
                kind = Refusal if "refused" in fields else Failure if "failed" in fields else Result
                errors = {name: float(fields[name]) for name in ("error", "worst") if fields.get(name) in NOT_FINITE}
                made[library] = msgspec.convert(fields | errors, kind)
        except msgspec.ValidationError as error:
            raise ValueError(f"{library}: {error}") from None
        return made


class Default(_Record, frozen=True):
    """The implementation of one product if none is named."""

    implementation: str
    how: str


class Measured(_Record, frozen=True, kw_only=True):
    """One problem in one role and kind of numbers, by every library.

    Attributes:
      name: unique in the report: of the problem, the role and the kind of numbers, one after the other.
      problem: the name of the problem, which its rows of other roles and numbers share.
      dtype: of the first array.
      floor_ms: the least time that the ceilings allow, if those of the dtype are known.
      default: by product; none where jaxext refuses.
      targets: implementation -> kind -> least value; kinds are the ratios "lax", "xla" and "best", "copy" (a share) and "tflops".
      digests: library -> the digest of the code that gave its result (digests.py).
      results: by library; "jaxext" is what is taken where nobody names an implementation, where that is none of the others.
    """

    name: str
    problem: str
    tags: tuple[str, ...]
    role: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    flops: NotNegative
    bytes: Positive
    floor_ms: Positive | None = None
    default: tuple[Default, ...] = ()
    targets: Mapping[Name, Mapping[str, float]] = {}
    digests: Mapping[Name, str] = {}
    results: Results = msgspec.field(default_factory=Results)

    def __post_init__(self):
        _known("dtype", [self.dtype], EVERY_DTYPE)
        for ours, targets in self.targets.items():
            _known(f"targets.{ours}", targets, TARGETS)

    @property
    def kind(self) -> str:
        return next((kind for kind in KINDS if kind in self.tags), OTHER) if self.numbers in DTYPES else PRECISION

    @property
    def numbers(self) -> str:
        """The kind of numbers: a dtype, or one with a precision."""
        return self.name.removeprefix(f"{self.problem} {self.role} ")

    @property
    def law(self) -> float:
        """The largest error that counts as rounding, on a GPU, for a result as coarse as the first array, or in float32."""
        return law([self.dtype], self.numbers, "cuda")

    @property
    def timed(self) -> dict[str, Result]:
        return {library: result for library, result in self.results.items() if isinstance(result, Result)}

    @property
    def ours(self) -> str | None:
        """The library that jaxext takes if none is named; None if it was not measured."""
        taken = {default.implementation for default in self.default}
        library = next(iter(taken)) if len(taken) == 1 else "jaxext"
        return library if library in self.timed else None


class Report(_Record, frozen=True, kw_only=True):
    """One run of the benchmark.

    Attributes:
      environment: of `jaxext.tables.environment.report()`; "device", "date" and "versions" are among it.
      timer, not_cupti: how time was measured, and the reason if not by CUPTI.
      reduced: whether the problems are reduced from those in the suite.
      trial: whether this was a trial of the harness, on tiny problems with one sample, so that times mean nothing.
      ceilings: bytes per second of a large copy ("copy"), and operations per second of a large product, by dtype.
      state: of the GPU before the first row.
      interrupted: whether the run did not finish: it was interrupted or killed, or the device was lost.
      begun: names of the rows that were begun and not ended.
      left_out: names of the rows for which there was no time.
    """

    environment: Mapping[str, Any]
    timer: str
    not_cupti: str | None
    reduced: bool
    ceilings: Mapping[str, Positive]
    state: Mapping[str, str] = {}
    interrupted: bool = False
    begun: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    trial: bool = False
    rows: tuple[Measured, ...] = ()

    def __post_init__(self):
        for field, kind in (("device", str), ("date", str), ("versions", dict)):
            if not isinstance(self.environment.get(field), kind):
                raise ValueError(f"environment.{field}: got {self.environment.get(field)!r}, want a {kind.__name__}")
        if twice := [name for name, times in collections.Counter(row.name for row in self.rows).items() if times > 1]:
            raise ValueError(f"rows: got two of name {twice[0]!r}, want each name once")


def read(path: str | os.PathLike) -> Report:
    """Read a report.

    Args:
      path: of a JSON file that `write` wrote.

    Returns:
      the report as it was given to `write`, with sequences as tuples.

    Raises:
      OSError: the file cannot be read.
      ValueError: it is not a report of this schema; the message names the file, the number of the row, and the field.

    Example:
      >>> [row.name for row in read("benchmarks/results/cpu.json").rows]
    """
    text = pathlib.Path(path).read_bytes()
    try:
        return _report(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{os.fspath(path)}: {error or type(error).__name__}") from error


def write(path: str | os.PathLike, report: Report) -> None:
    """Write the report to a file, whole or not at all, and make its folder.

    Args:
      path: the file, which is replaced if it exists.
      report: what to write; results keep six digits, and NaN and infinite errors become the texts "nan" and "inf".

    Raises:
      OSError: it cannot be written.
      ValueError: `read` would refuse it.

    Example:
      >>> write("gpu.json", report)
    """
    text = _text(report)
    _report(text)
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():  # /dev/null is not to be replaced
        path.write_text(text)
        return
    written = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        written.write_text(text)
        written.replace(path)
    finally:
        written.unlink(missing_ok=True)


def data(report: Report) -> dict[str, Any]:
    """The content of a report's file."""
    return plain({"schema": SCHEMA, **msgspec.to_builtins(report, enc_hook=float)})  # numpy's floats are no floats to msgspec


def _text(report: Report) -> str:
    """The file's text: what all rows share is its first line, and each row one of those that follow."""
    head = data(report)
    rows = ",\n".join(json.dumps({**row, "results": _rounded(row.get("results", {}))}) for row in head.pop("rows", []))
    return f'{json.dumps(head)[:-1]}, "rows": [\n{rows}\n]}}\n'


def _rounded(value: Any) -> Any:
    """Return JSON's value with six digits of each float, of which a measurement has no more."""
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def ours(rows: Iterable[Measured] = ()) -> tuple[str, ...]:
    """The implementations, and "jaxext" (a mixture of them, taken if none is named); then other libraries in the rows."""
    found = dict.fromkeys((*names_of_implementations(), "jaxext", *(library for row in rows for library in row.results)))
    return tuple(library for library in found if library not in THEIRS)


def libraries(rows: Iterable[Measured] = ()) -> tuple[str, ...]:
    """All libraries of the rows, in the order of output."""
    return ("lax", *ours(rows), "cublas")


def _known(field: str, names, known) -> None:
    if unknown := sorted(set(names) - set(known)):
        raise ValueError(f"{field}: got {', '.join(map(repr, unknown))}, want of {', '.join(known)}")


def _report(text: str | bytes) -> Report:
    fields = msgspec.json.decode(text)
    if not isinstance(fields, dict) or fields.pop("schema", None) != SCHEMA:
        raise ValueError(f"schema: this is not a report of schema {SCHEMA!r}")
    return msgspec.convert(fields, Report, dec_hook=lambda _, results: Results.of(results))
