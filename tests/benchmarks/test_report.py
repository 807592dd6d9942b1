"""Reports are read as they were written, or refused in words; findings, pictures and gaps follow from made-up numbers."""

import json
import math
import re
import xml.etree.ElementTree
from typing import Any

import jax
import pytest
from msgspec import structs

from benchmarks import gaps, pictures
from jaxext.bench import bench_tables as tables
from jaxext.bench import findings
from jaxext.bench.bench_report import Default, Failure, Measured, Refusal, Report, Result, Results, read, write
from jaxext.cli import command

ENVIRONMENT = {"device": "Some CPU", "date": "2026-11-21T22:00:00+00:00", "versions": {"jax": "0.12.0", "jaxext": "0.1.0"}, "commit": "abc"}
REFUSAL = Refusal("the platform is 'cpu'")


def result(ms, **fields):
    return Result(ms=(0.99 * ms, ms, 1.01 * ms), **{"error": 1e-6, "hlo": {"copy": 2}, "tflops": 1 / ms} | fields)


def row(name="a", role="fprop", *, default=("xla",), dtype="float32", numbers=None, tags=("depthwise", "net"), targets=None, **results):
    """A time stands for a result that takes it."""
    return Measured(
        name=f"{name} {role} {numbers or dtype}",
        problem=name,
        tags=tags,
        role=role,
        dtype=dtype,
        shapes=((2, 3), (3, 4)),
        flops=1e9,
        bytes=1e6,
        default=tuple(Default(implementation, "by some reason") for implementation in default),
        targets=targets or {},
        results=Results({library: result(it) if isinstance(it, int | float) else it for library, it in results.items()}),
    )


def report(*rows, **fields):
    given: dict[str, Any] = dict(environment=ENVIRONMENT, timer="wall time", not_cupti="the platform is cpu", reduced=True)
    given |= dict(ceilings={"copy": 2e10, "float32": 1e11}, rows=rows)
    return Report(**given | fields)


WHOLE = report(
    row("a, 8x56", lax=2.0, xla=result(1.0, roofline=0.5, warm_ms=(0.5, 0.6, 0.7), kernels_ms={"fusion": 1.0}), triton=REFUSAL),
    row("a, 8x56", "dgrad", lax=1.0, xla=2.0, cuda=Failure("out of memory"), targets={"xla": {"lax": 1.5}}),
    row("[c]", lax=result(1.0, error="no truth: memory"), xla=result(1.0, error=math.nan, worst=math.inf)),
    left_out=("b",),
    interrupted=True,
)


def test_a_report_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "made" / "bench.json"
    for written in (report(), WHOLE):
        write(path, written)
    assert repr(read(path)) == repr(WHOLE) and not re.search(r"\b(NaN|Infinity)\b", path.read_text())
    assert [file.name for file in path.parent.iterdir()] == ["bench.json"]


# What is done to the data of WHOLE, and what is said about it.
WRONGS = {
    "another schema": (lambda d: d.update(schema="jaxext bench 2"), "schema: this is not a report of schema 'jaxext bench 1'"),
    "no time": (lambda d: d["rows"][0]["results"]["xla"].pop("ms"), "xla: Object missing required field `ms` - at `$.rows[0].results`"),
    "their order": (lambda d: d["rows"][0]["results"]["lax"].update(ms=[3, 2, 1]), "ms: got [3.0, 2.0, 1.0], want 0 < first quartile"),
    "a dtype": (lambda d: d["rows"][0].update(dtype="float31"), "dtype: got 'float31', want of bool, int8"),
}


@pytest.mark.parametrize("break_it, said", WRONGS.values(), ids=WRONGS)
def test_errors_of_a_file_are_named(break_it, said, tmp_path):
    path = tmp_path / "a.json"
    write(path, WHOLE)
    data = json.loads(path.read_text())
    break_it(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=re.escape(f"{path}: ") + ".*" + re.escape(said)):
        read(path)


def test_ratios_and_targets():
    targets = {"cuda": {"best": 1.5, "copy": 0.8, "tflops": 600}, "triton": {"lax": 1.0}, "xla": {"lax": 2}}
    found = row(default=("cuda",), lax=4.0, xla=3.0, cuda=result(2.0, copy=0.7, tflops=700.0), triton=REFUSAL, targets=targets)
    assert {other: findings.ratio(found, "cuda", other) for other in ("lax", "xla", "best")} == {"lax": 2, "xla": 1.5, "best": 1.5}
    assert findings.ratio(found, "xla", "best") == pytest.approx(4 / 3) and findings.ratio(found, "default", "lax") == 2
    assert findings.ratio(found, "triton", "lax") is findings.ratio(found, "cuda", "cublas") is None
    assert findings.missed(found) == ["cuda copy 0.7, target 0.8 MISSED", "triton lax -, target 1 MISSED", "xla lax 1.33, target 2 MISSED"]
    wrong = row(lax=4.0, xla=result(1.0, error=1.0), targets={"xla": {"lax": 2}})
    assert findings.ratio(wrong, "xla", "lax") is findings.standing(wrong, "default", "lax") is None and findings.summary([wrong]) == []
    mixed = {"default": ("cuda", "xla"), "lax": 1.0, "xla": 1.0, "cuda": 1.0}
    assert row(**mixed, jaxext=1.0).ours == "jaxext" and row(**mixed).ours is row(default=("cuda",), lax=1.0, cuda=REFUSAL).ours is None


def test_means():
    rows = [row("a", lax=2.0, xla=1.0, cuda=0.5), row("b", lax=4.0, xla=8.0), row("c", lax=1.0, xla=1.01), row("d", "step", xla=1.0)]
    xla, cuda = findings.summary(rows)
    assert (xla.group, xla.ours, xla.other, xla.rows, xla.losers) == (("depthwise", "fprop"), "xla", "lax", 3, 1)
    assert xla.geometric_mean == pytest.approx((2 * 0.5 / 1.01) ** (1 / 3)) and (xla.least, xla.least_row) == (0.5, "b fprop float32")
    assert (cuda.ours, cuda.other, cuda.rows, cuda.geometric_mean, cuda.losers) == ("cuda", "best", 1, pytest.approx(2), 0)


@pytest.mark.parametrize("error, dtype, wrong", [
    (1e-3, "float32", False),
    (3e-3, "float32", True),
    (3e-3, "bfloat16", False),
    (1e-9, "int8", True),
])  # fmt: skip
def test_wrong_results(error, dtype, wrong):
    assert bool(findings.faults(row(dtype=dtype, lax=1.0, cuda=result(1.0, error=error)))) == wrong


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
    other_shapes = structs.replace(row("c", lax=1.0), shapes=((1,),))
    before = report(row("a", lax=1.0, xla=1.0, cuda=1.0), row("b", lax=1.0), other_shapes, row("d", lax=1.0, xla=1.0))
    rows = row("a", lax=2.0, xla=1.2, cuda=Failure("memory")), row("c", lax=9.0), row("d", lax=0.5, xla=1.01), row("e", lax=1.0)
    found = findings.compare(before, report(*rows, environment=ENVIRONMENT | {"device": "Another"}))
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
    assert found.warnings == ("device: Some CPU, then Another", "the shapes differ, so it is not compared: c fprop float32")


@pytest.mark.parametrize("width", [80, 120, 240])
@pytest.mark.parametrize("shown", [["lax", "xla"], ["lax", "xla", "triton", "cuda", "cublas"]], ids=len)
def test_a_row_fits_the_terminal(shown, width):
    """Its name has a line of its own if there is no room beside it; then the last columns are left out, if they must be."""
    results: dict = dict.fromkeys(shown, 1.0) | {"xla": result(0.5)}
    long = row("name " * 20, **results)
    head, text = (draw.plain for draw in (tables.head(shown, width), tables.line(long, shown, width)))
    name, *numbers = text.splitlines()
    assert max(map(len, [head, name, *numbers])) <= width and name.startswith("name name") and "xla 2.00x" in text
    assert text.endswith("2 copy") == head.endswith("XLA adds") == (width > 80 and (width == 240 or len(shown) == 2))
    assert len(numbers) == (width < 240) and len((numbers or [name])[-1]) == len(head)


def test_columns_of_long_names():
    shown = ["lax", "an_implementation_of_mine"]
    mine = row(default=shown[1:], lax=100.0, an_implementation_of_mine=1.0)
    head, text = (draw.plain for draw in (tables.head(shown, 400), tables.line(mine, shown, 400)))
    assert head.split()[:4] == ["lax", "ms", shown[1], "ms"] and text.split()[6:9] == ["±1%", shown[1], "100.00x"]


def test_picture_of_ratios(tmp_path):
    pictures.ratios(report(*WHOLE.rows, row("m", "nn", tags=("matmul",), lax=30.0, xla=1.0)), tmp_path / "made" / "a.svg")
    shown = {(element.text or "").strip() for element in xml.etree.ElementTree.parse(tmp_path / "made" / "a.svg").iter()}
    assert {"On a CPU: how many times faster than lax (3 measured, 1 slower)", "depthwise", "1.00×", "1 of 2", "matmul", "30.0×"} <= shown
    text = (tmp_path / "made" / "a.svg").read_text()
    colours = {*re.findall(r"(?:fill|stroke): (#\w{6})", text.partition("</style>")[2])}
    assert "@media (prefers-color-scheme: dark)" in text and colours == {light.lower() for light in pictures.DARK_MODE}


def test_gaps_can_be_listed_and_run_again(tmp_path, capsys):
    rows = (
        row("a", lax=1.0, xla=result(2.0, roofline=0.5)),
        row("b", xla=result(2.0, roofline=0.2), cuda=result(9.0, roofline=0.1, error=1.0)),
    )
    assert [(gap.row.problem, gap.library, gap.factor) for gap in gaps.gaps(report(*rows))] == [("b", "xla", 5), ("a", "xla", 2)]
    path = tmp_path / "report.json"
    with jax.enable_x64(False):
        measure = ["bench", "--quick", "--only", "mamba k=4, 8x2048x5376 as 2x64x336 fprop", "--implementation", "xla", "--json", str(path)]
        assert command.main(measure) == 0
        (measured,) = read(path).rows
        line = f"xla takes {measured.timed['xla'].ms[1]:.3g} ms for {measured.name}"
        for arguments, status, said in (([], 0, f"1. {line}"), (["--run", "1"], 0, line), (["--run", "2"], 2, "want one of the 1 gaps")):
            assert gaps.main([str(path), *arguments]) == status and said in "".join(capsys.readouterr())
