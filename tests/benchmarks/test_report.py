"""Reports are read as they were written, or refused in words; what follows from them is checked on made-up numbers."""

import json
import math
import os
import re
import xml.etree.ElementTree
from typing import Any

import pytest
from msgspec import structs
from rich.console import Console

from benchmarks import pictures
from jaxext.bench import bench_tables as tables
from jaxext.bench import findings
from jaxext.bench.bench_report import KINDS, Default, Failure, Measured, Refusal, Report, Result, Results, read, write

ENVIRONMENT = {"device": "Some CPU", "date": "2026-11-21T22:00:00+00:00", "versions": {"jax": "0.12.0", "jaxext": "0.1.0"}, "commit": "abc"}
REFUSAL = Refusal("the platform is 'cpu'")


def result(ms, spread=0.02, **fields):
    """`spread`: of the quartiles, relative to the median."""
    times = (ms * (1 - spread / 2), ms, ms * (1 + spread / 2))
    given: dict[str, Any] = dict(
        tflops=1 / ms, gbps=1.0, error=1e-6, worst=1e-5, hlo={"transpose": 0, "copy": 2, "pad": 1}, trace_ms=3.0, compile_ms=70.0
    )
    return Result(ms=times, **given | fields)


def row(name="a", role="fprop", *, default=("xla",), dtype="float32", numbers=None, tags=("depthwise", "net"), targets=None, **results):
    """A time stands for a result that takes it."""
    results = {library: result(it) if isinstance(it, int | float) else it for library, it in results.items()}
    return Measured(
        name=f"{name} {role} {numbers or dtype}",
        problem=name,
        tags=tags,
        role=role,
        dtype=dtype,
        shapes=((8, 56), (7, 7)),
        flops=1e9,
        bytes=1e8,
        floor_ms=0.5,
        default=tuple(Default(implementation, "as it is") for implementation in default),
        targets=targets or {},
        results=Results(results),
    )


def report(*rows, **fields):
    given: dict[str, Any] = dict(environment=ENVIRONMENT, timer="wall time", not_cupti="the platform is cpu", reduced=True)
    given |= dict(ceilings={"copy": 2e10, "float32": 1e11}, rows=rows)
    return Report(**given | fields)


WHOLE = report(
    row("a, 8x56", lax=2.0, xla=result(1.0, roofline=0.5, warm_ms=(0.5, 0.6, 0.7), kernels_ms={"fusion": 1.0}), triton=REFUSAL),
    row("a, 8x56", "dgrad", lax=1.0, xla=2.0, cuda=Failure("out of memory"), targets={"xla": {"lax": 1.5}}),
    left_out=("b",),
    interrupted=True,
)


def test_a_report_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "made" / "bench.json"
    write(path, report())
    write(path, WHOLE)
    assert read(path) == WHOLE
    assert [file.name for file in path.parent.iterdir()] == ["bench.json"]


def test_errors_that_are_no_numbers_are_kept(tmp_path):
    wrong = row(lax=result(1.0, error="no truth: memory"), xla=result(1.0, error=math.nan, worst=math.inf))
    write(tmp_path / "a.json", report(wrong))
    assert not re.search(r"\b(NaN|Infinity)\b", (tmp_path / "a.json").read_text())
    again = read(tmp_path / "a.json").rows[0].timed
    assert again["lax"].error == "no truth: memory"
    assert isinstance(again["xla"].error, float) and math.isnan(again["xla"].error) and again["xla"].worst == math.inf


def without(data, name):
    del data[name]


# What is done to the data of WHOLE, and what is said about it.
WRONGS = {
    "another schema": (lambda d: d.update(schema="jaxext bench 2"), "schema: this is not a report of schema 'jaxext bench 1'"),
    "a field is missing": (lambda d: without(d, "timer"), "required field `timer`"),
    "a result's is": (
        lambda d: without(d["rows"][0]["results"]["xla"], "ms"),
        "xla: Object missing required field `ms` - at `$.rows[0].results`",
    ),
    "a field is unknown": (lambda d: d["rows"][0].update(speed=1), "unknown field `speed` - at `$.rows[0]`"),
    "their order": (lambda d: d["rows"][0]["results"]["lax"].update(ms=[3, 2, 1]), "ms: got [3.0, 2.0, 1.0], want 0 < first quartile"),
    "a dtype": (lambda d: d["rows"][0].update(dtype="float31"), "dtype: got 'float31', want of bool, int8"),
    "a name twice": (lambda d: d["rows"].append(d["rows"][0]), "rows: got two of name 'a, 8x56 fprop float32'"),
}


@pytest.mark.parametrize("break_it, said", WRONGS.values(), ids=WRONGS)
def test_what_is_wrong_is_said(break_it, said, tmp_path):
    path = tmp_path / "a.json"
    write(path, WHOLE)
    data = json.loads(path.read_text())
    break_it(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=re.escape(said)) as raised:
        read(path)
    assert str(raised.value).startswith(f"{path}: ")


def test_the_kind_of_a_row_is_its_most_special_tag():
    assert row(tags=("dense", "three-axes", "unet")).kind == "three-axes"
    assert row(tags=("unet",)).kind == "other"
    assert row(tags=("dense",), numbers="ieee").kind == "precision"
    assert len(set(KINDS)) == len(KINDS)


def test_what_is_taken_by_itself():
    assert row(lax=1.0, xla=1.0).ours == "xla"
    assert row(default=("cuda", "cuda"), lax=1.0, xla=1.0, cuda=1.0).ours == "cuda"
    assert row(default=("cuda",), lax=1.0, xla=1.0, cuda=REFUSAL).ours is None
    assert row(default=("cuda", "xla"), lax=1.0, xla=1.0, cuda=1.0, jaxext=1.0).ours == "jaxext"
    assert row(default=(), lax=1.0, xla=1.0).ours is None


def test_ratios():
    both = row(default=("cuda",), lax=4.0, xla=3.0, cuda=2.0, triton=REFUSAL)
    assert {other: findings.ratio(both, "cuda", other) for other in ("lax", "xla", "best")} == {"lax": 2, "xla": 1.5, "best": 1.5}
    assert findings.ratio(both, "xla", "best") == pytest.approx(4 / 3)
    assert findings.ratio(both, "default", "lax") == 2
    assert findings.ratio(both, "triton", "lax") is findings.ratio(both, "cuda", "cublas") is None
    assert findings.ratio(row(xla=3.0, cuda=2.0), "cuda", "best") == 1.5
    assert findings.ratio(row(cuda=2.0), "cuda", "best") is None


@pytest.mark.parametrize("error", [1.0, math.nan])
def test_what_is_wrong_is_never_faster(error):
    found = row(lax=4.0, xla=result(1.0, error=error), targets={"xla": {"lax": 2, "tflops": 0}})
    assert findings.ratio(found, "xla", "lax") is findings.standing(found, "default", "lax") is None
    assert findings.missed(found) == ["xla lax - of 2 MISSED", "xla tflops - of 0 MISSED"] and findings.summary([found]) == []


def test_targets():
    targets = {"cuda": {"best": 1.5, "copy": 0.8, "tflops": 600}, "triton": {"lax": 1.0}, "xla": {"lax": 2}}
    found = row(lax=4.0, xla=3.0, cuda=result(2.0, copy=0.7, tflops=700.0), triton=REFUSAL, targets=targets)
    reached = {(verdict.ours, verdict.kind): verdict.reached for verdict in findings.verdicts(found)}
    expected = {("cuda", "best"): True, ("cuda", "copy"): False, ("cuda", "tflops"): True, ("triton", "lax"): False, ("xla", "lax"): False}
    assert reached == expected
    assert findings.missed(found) == ["cuda copy 0.7 of 0.8 MISSED", "triton lax - of 1 MISSED", "xla lax 1.33 of 2 MISSED"]


@pytest.mark.parametrize("error, dtype, wrong", [
    (1e-3, "float32", False),
    (3e-3, "float32", True),
    (3e-3, "bfloat16", False),
    (1e-3, "float64", True),
    (0.0, "int8", False),
    (1e-9, "int8", True),
    (math.nan, "float32", True),
    (math.inf, "float32", True),
    ("no truth: memory", "float32", False),
])  # fmt: skip
def test_results_that_are_wrong(error, dtype, wrong):
    found = findings.faults(row(dtype=dtype, lax=1.0, cuda=result(1.0, error=error)))
    assert bool(found) == wrong
    assert all(fault.startswith("cuda is wrong: relative error ") for fault in found)


def test_failures_are_faults_where_lax_has_none():
    failure = Failure("out of memory")
    assert findings.faults(row(lax=1.0, xla=failure, triton=REFUSAL)) == ["xla failed: out of memory"]
    assert findings.faults(row(lax=REFUSAL, xla=failure)) == ["xla failed: out of memory"]
    assert findings.faults(row(lax=failure, xla=failure)) == []
    assert findings.faults(row(lax=failure, xla=1.0, cublas=failure)) == []


def test_means():
    rows = [row("a", lax=2.0, xla=1.0, cuda=0.5), row("b", lax=4.0, xla=8.0), row("c", lax=1.0, xla=1.01), row("d", "step", xla=1.0)]
    xla, cuda = findings.summary(rows)
    assert (xla.group, xla.ours, xla.other, xla.rows, xla.losers) == (("depthwise", "fprop"), "xla", "lax", 3, 1)
    assert xla.geometric_mean == pytest.approx((2 * 0.5 / 1.01) ** (1 / 3)) and (xla.least, xla.least_row) == (0.5, "b fprop float32")
    assert (cuda.ours, cuda.other, cuda.rows, cuda.geometric_mean, cuda.losers) == ("cuda", "best", 1, pytest.approx(2), 0)
    assert [mean.group for mean in findings.summary(rows, by=lambda row: row.dtype)] == ["float32", "float32"]


@pytest.mark.parametrize("before, after, verdict", [
    ((0.99, 1, 1.01), (1.01, 1.04, 1.05), "within the noise"),  # too little
    ((0.99, 1, 1.01), (1.08, 1.1, 1.12), "slower"),
    ((1.08, 1.1, 1.12), (0.99, 1, 1.01), "faster"),
    ((0.8, 1, 1.2), (1.1, 1.5, 1.9), "within the noise"),  # the quartiles overlap
    ((0.2, 1, 1.01), (1.02, 1.1, 2.1), "within the noise"),  # the spreads are more than the difference
])  # fmt: skip
def test_noise(before, after, verdict):
    assert findings.compared(before, after) == verdict


def test_comparison():
    before = report(row("a", lax=1.0, xla=1.0, cuda=1.0), row("b", lax=1.0), row("c", lax=1.0), row("d", lax=1.0, xla=1.0))
    old_shapes = structs.replace(before.rows[2], shapes=((1,),))
    before = structs.replace(before, rows=(*before.rows[:2], old_shapes, before.rows[3]))
    after = report(row("a", lax=2.0, xla=1.2, cuda=Failure("memory")), row("c", lax=9.0), row("d", lax=0.5, xla=1.01), row("e", lax=1.0))
    found = findings.compare(before, after)
    assert [(change.name[0], change.library, change.verdict, change.why) for change in found.changes] == [
        ("a", "lax", "slower", ""),
        ("a", "xla", "slower", ""),
        ("a", "cuda", "missing", "failed: memory"),
        ("b", "lax", "missing", "no such row"),
        ("d", "lax", "faster", ""),
        ("d", "xla", "within the noise", ""),
        ("e", "lax", "new", "no such row"),
    ]
    assert [(change.name, change.library) for change in found.regressions] == [("a fprop float32", "xla")]
    assert found.warnings == ("the shapes differ, so that it is not compared: c fprop float32",)
    assert findings.compare(after, after).regressions == ()


def test_what_else_changed_is_said():
    before = report(row(lax=1.0))
    elsewhere = ENVIRONMENT | {"device": "Another", "versions": {"jax": "0.13.0", "cuDNN": "9"}}
    after = report(row(lax=1.2), environment=elsewhere, timer="CUPTI", reduced=False, interrupted=True)
    assert findings.compare(before, after).warnings == (
        "device: Some CPU, then Another",
        "timer: wall time, then CUPTI",
        "version of cuDNN: none, then 9",
        "version of jax: 0.12.0, then 0.13.0",
        "version of jaxext: 0.1.0, then none",
        "only the first is of reduced problems",
        "the second was interrupted",
        "lax itself takes 1.20 times as long as before, in the geometric mean",
    )


def printed(show, *arguments):
    console = Console(width=200, record=True, file=open(os.devnull, "w"))
    with console.file:
        show(*arguments, console)
    return console.export_text()


def test_findings_are_printed():
    more = row("[b]", "step", lax=2.0, xla=1.0), row("[c]", lax=2.0, xla=result(1.0, error=math.nan))
    text = printed(tables.print_findings, structs.replace(WHOLE, rows=WHOLE.rows + more))
    assert re.search(r"depthwise +│ step +│ xla +│ lax +│ 1 +│ 2.00x +│ 2.00x +│ 0 +│ \[b\] step float32", text)
    for said in ("0.50x", "triton refused: the platform is 'cpu'", "left out, for want of time: b"):
        assert said in text
    assert "xla lax 0.5 of 1.5 MISSED [a, 8x56 dgrad float32]" in text
    assert "WRONG: cuda failed: out of memory [a, 8x56 dgrad float32]" in text
    assert "WRONG: xla is wrong: relative error nan, want at most 0.002 [[c] fprop float32]" in text


@pytest.mark.parametrize("width", [80, 120, 240])
@pytest.mark.parametrize("shown", [["lax", "xla"], ["lax", "xla", "triton", "cuda", "cublas"]], ids=len)
def test_a_row_fits_the_terminal(shown, width):
    """Its name has a line of its own where there is no room beside it; then the last columns are left out, if they must be."""
    results: dict = dict.fromkeys(shown, 1.0) | {"xla": result(0.5, hlo={"copy": 5, "pad": 1})}
    long = row("name " * 20, **results)
    head, text = (draw.plain for draw in (tables.head(shown, width), tables.line(long, shown, width)))
    name, *numbers = text.splitlines()
    assert max(map(len, [head, name, *numbers])) <= width and name.startswith("name name")
    assert text.endswith("5 copy 1 pad") == head.endswith("XLA adds") == (width > 80 and (width == 240 or len(shown) == 2))
    assert head.split().count("ms") == len(shown) and re.search(r"ms +lax/jaxext", head) and "xla 2.00x" in text
    assert len(numbers) == (width < 240) and len((numbers or [name])[-1]) == len(head)


def test_a_comparison_is_printed():
    before = report(row("a", lax=1.0, xla=1.0), row("b", lax=1.0), row("[c]", lax=1.0))
    text = printed(tables.print_comparison, findings.compare(before, report(row("a", lax=1.0, xla=1.5), row("[c]", lax=1.0))))
    assert re.search(r"a fprop float32 +│ xla +│ 1.00 ±1% +│ 1.50 ±1% +│ 1.50x +│ slower", text)
    assert "missing: b fprop float32" in text and "[c]" not in text
    assert text.endswith("within the noise: 2; slower: 1; missing: 1\n")
    assert printed(tables.print_comparison, findings.compare(report(), report())) == "neither has a time\n"


def texts(path):
    return [text for element in xml.etree.ElementTree.parse(path).iter() if (text := (element.text or "").strip())]


def test_picture_of_ratios(tmp_path):
    rows = (*WHOLE.rows, row("c", "step", lax=1.0, xla=1.01), row("m", "nn", tags=("matmul",), lax=30.0, xla=1.0), row("n", xla=1.0))
    pictures.ratios(report(*rows), tmp_path / "made" / "a.svg")
    shown = texts(tmp_path / "made" / "a.svg")
    wanted = ["How many times faster than lax (4 measured, 1 slower)", "Some CPU, 2026-11-21, jax 0.12.0 jaxext 0.1.0, reduced sizes"]
    wanted += ["depthwise", "1.00×", "1 of 3", "matmul", "30.0×", "0 of 1", "faster than lax", "slower than lax", "within the noise"]
    assert set(wanted) <= set(shown) and "gradient in the weights" not in shown
