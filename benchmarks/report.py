"""The benchmark's report: what is measured, as dataclasses, and the JSON file that holds it.

The dataclasses are the schema: records.py checks a file against their fields and annotations, and each says in `__post_init__` what its
values have to be.  What follows from a report is in findings.py.  It must not know jax, nor how anything is measured.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from jaxext.cli import terminal
from jaxext.forms.family import names_of_implementations
from jaxext.tuning.timing import law

from . import records

SCHEMA = "jaxext bench 1"
THEIRS = ("lax", "cublas")  # the libraries that are none of jaxext's implementations
RATIOS = ("lax", "xla", "best")
TARGETS = (*RATIOS, "copy", "tflops")
# Tags, special before general: a row is of the first that is among its own.
KINDS = ("mlp", "per-example", "batched-filters", "transposed", "causal", "depthwise", "grouped", "three-axes", "one-axis", "stem")
KINDS += ("strided", "pointwise", "dense", "batched", "skinny", "matmul")
PRECISION, OTHER = "precision", "other"  # kinds of rows whose numbers are not those of one of DTYPES, and of rows without such a tag
DTYPES = ("bfloat16", "float16", "float32", "float64")
Quartiles = tuple[float, float, float]  # of milliseconds per call: first quartile, median, third quartile


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What a library takes for a row.

    Attributes:
      ms: on a GPU the time of all its kernels with a cold L2 cache, on a CPU wall time.
      warm_ms: on a GPU, the same with a warm L2.
      wall_ms: on a GPU, wall time in a captured loop.
      roofline: the share of the roofline, where the ceilings of the dtype are known.
      copy: the share of the bandwidth of a large copy.
      error, worst: of the result against float64, relative: in the norm, and of the worst element to the largest of the truth; NaN if the
        result is; a text says why there is no truth.
      hlo: how many instructions of a kind XLA put around the product: "transpose", "copy", "pad".
      kernels_ms: on a GPU, by kernel.
    """

    ms: Quartiles
    warm_ms: Quartiles | None = None
    wall_ms: Quartiles | None = None
    roofline: float | None = None
    copy: float | None = None
    tflops: float
    gbps: float
    error: float | str
    worst: float | str
    hlo: Mapping[str, int] = dataclasses.field(default_factory=dict)
    temporaries_bytes: int | None = None
    trace_ms: float
    compile_ms: float
    kernels_ms: Mapping[str, float] | None = None

    def __post_init__(self):
        for field in ("ms", "warm_ms", "wall_ms"):
            times = getattr(self, field)
            if times is not None and not 0 < times[0] <= times[1] <= times[2]:
                raise ValueError(f"{field}: got {list(times)}, want 0 < first quartile <= median <= third quartile")
        for field in ("roofline", "copy", "tflops", "gbps", "error", "worst", "temporaries_bytes", "trace_ms", "compile_ms"):
            value = getattr(self, field)
            if isinstance(value, int | float) and value < 0:
                raise ValueError(f"{field}: got {value}, want 0 or more")


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A library that does not take the row's problem here, and why."""

    refused: str


@dataclasses.dataclass(frozen=True)
class Failure:
    """A library that took the row's problem and broke down."""

    failed: str


@dataclasses.dataclass(frozen=True)
class Default:
    """What computes one product where nobody names an implementation."""

    implementation: str
    how: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One problem in one role and kind of numbers, by every library.

    Attributes:
      name: unique in the report: of the problem, the role and the kind of numbers, one after the other.
      problem: the name of the problem, which its rows of other roles and numbers share.
      dtype: of the first array.
      floor_ms: the least time that the ceilings allow, where those of the dtype are known.
      default: by product; none where jaxext refuses.
      targets: implementation -> kind -> least value; kinds are the ratios "lax", "xla" and "best", "copy" (a share) and "tflops".
      state: of the GPU, as nvidia-smi says.
      results: by library; "jaxext" is what is taken where nobody names an implementation, where that is none of the others.
    """

    name: str
    problem: str
    tags: tuple[str, ...]
    role: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    flops: float
    bytes: float
    floor_ms: float | None = None
    default: tuple[Default, ...] = ()
    targets: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    state: Mapping[str, str] = dataclasses.field(default_factory=dict)
    results: Mapping[str, Result | Refusal | Failure] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        _known("dtype", [self.dtype], terminal.DTYPES)
        _names("results", self.results)
        _names("targets", self.targets)
        for ours, targets in self.targets.items():
            _known(f"targets.{ours}", targets, TARGETS)
        if self.flops < 0 or self.bytes <= 0 or (self.floor_ms is not None and self.floor_ms <= 0):
            raise ValueError(f"flops, bytes, floor_ms: got {self.flops}, {self.bytes}, {self.floor_ms}, want flops >= 0, the others > 0")

    @property
    def kind(self) -> str:
        return next((kind for kind in KINDS if kind in self.tags), OTHER) if self.numbers in DTYPES else PRECISION

    @property
    def numbers(self) -> str:
        """The kind of numbers: a dtype, or more than that."""
        return self.name.removeprefix(f"{self.problem} {self.role} ")

    @property
    def law(self) -> float:
        """The largest error that is not wrong: a GPU's, of a result that is no finer than the first array, or float32."""
        return law([self.dtype], self.numbers, "cuda")

    @property
    def timed(self) -> dict[str, Result]:
        return {library: result for library, result in self.results.items() if isinstance(result, Result)}

    @property
    def ours(self) -> str | None:
        """The library that is what jaxext takes where nobody names one; None where that was not measured."""
        taken = {default.implementation for default in self.default}
        library = next(iter(taken)) if len(taken) == 1 else "jaxext"
        return library if library in self.timed else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """One run of the benchmark.

    Attributes:
      environment: of `jaxext.tables.environment.report()`; "device", "date" and "versions" are among it.
      timer, not_cupti: how time was taken, and why not by CUPTI.
      reduced: whether the problems are small twins of those in the suite.
      trial: whether the harness was tried, on tiny twins with one sample, so that times say nothing.
      ceilings: bytes per second of a large copy ("copy"), and operations per second of a large product, by dtype.
      state: of the GPU before the first row.
      interrupted: whether it did not come to its end: it was killed, or the device was lost.
      begun: names of the rows that were begun and not ended.
      left_out: names of the rows for which there was no time.
    """

    environment: Mapping[str, Any]
    timer: str
    not_cupti: str | None
    reduced: bool
    ceilings: Mapping[str, float]
    state: Mapping[str, str] = dataclasses.field(default_factory=dict)
    interrupted: bool = False
    begun: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    trial: bool = False
    rows: tuple[Row, ...] = ()

    def __post_init__(self):
        for field, kind in (("device", str), ("date", str), ("versions", dict)):
            if not isinstance(self.environment.get(field), kind):
                raise ValueError(f"environment.{field}: got {self.environment.get(field)!r}, want a {kind.__name__}")
        if wrong := {what: rate for what, rate in self.ceilings.items() if not rate > 0}:
            raise ValueError(f"ceilings: got {wrong}, want more than 0")
        if twice := [name for name, times in collections.Counter(row.name for row in self.rows).items() if times > 1]:
            raise ValueError(f"rows: got two of name {twice[0]!r}, want each name once")


def read(path: str | os.PathLike) -> Report:
    """The report in a file.

    Args:
      path: of a JSON file that `write` wrote.

    Returns:
      the report; it is as `write` was given it, sequences as tuples.

    Raises:
      OSError: the file cannot be read.
      ValueError: it is not a report of this schema; the text names the file, the row and the field.

    Example:
      >>> [row.name for row in read("benchmarks/results/cpu.json").rows]
    """
    text = pathlib.Path(path).read_bytes()
    try:
        return _report(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{os.fspath(path)}: {error or type(error).__name__}") from error


def write(path: str | os.PathLike, report: Report) -> None:
    """Puts the report in a file, whole or not at all, and makes its folder.

    Args:
      path: of the file; what is there is replaced.
      report: what to write; NaN and infinite errors become the texts "nan" and "inf".

    Raises:
      OSError: it cannot be written.
      ValueError: `read` would not take it.

    Example:
      >>> write("gpu.json", report)
    """
    text = json.dumps(data(report), indent=1) + "\n"
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
    """What the file of a report holds."""
    return terminal.plain({"schema": SCHEMA, **dataclasses.asdict(report)})


def ours(rows: Iterable[Row] = ()) -> tuple[str, ...]:
    """The implementations that there are, and "jaxext", which is what it takes where nobody names one; then what else is in the rows."""
    found = dict.fromkeys((*names_of_implementations(), "jaxext", *(library for row in rows for library in row.results)))
    return tuple(library for library in found if library not in THEIRS)


def libraries(rows: Iterable[Row] = ()) -> tuple[str, ...]:
    """All that a row may have, in the order in which they are told."""
    return ("lax", *ours(rows), "cublas")


def _names(field: str, found: Iterable[str]) -> None:
    if wrong := [name for name in found if not name.isidentifier()]:
        raise ValueError(f"{field}: got {wrong[0]!r}, want names of libraries")


def _known(field: str, names, known) -> None:
    if unknown := sorted(set(names) - set(known)):
        raise ValueError(f"{field}: got {', '.join(map(repr, unknown))}, want of {', '.join(known)}")


def _report(text: str | bytes) -> Report:
    fields = json.loads(text)
    if not isinstance(fields, dict) or fields.pop("schema", None) != SCHEMA:
        raise ValueError(f"schema: this is not a report of schema {SCHEMA!r}")
    return records.made(Report, fields)
