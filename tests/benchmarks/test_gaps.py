"""Gaps of made-up reports, in their order; a real one, of the smallest trial of the harness, is run again."""

import jax
import pytest
from test_report import REFUSAL, report, result, row

from jaxext.benchmarks import gaps
from jaxext.benchmarks.report import read, write
from jaxext.cli import command

BEST = {"best": 1.5, "copy": 0.8}
FAR = row("far", lax=3.0, cuda=result(6.0, copy=0.4), targets={"cuda": BEST})  # best 0.5 of 1.5, copy 0.4 of 0.8
NEAR = row("near", lax=3.0, cuda=result(2.0, copy=0.4), triton=4.0, targets={"cuda": BEST, "triton": {"lax": 1.0}})
THERE = row("there", lax=3.0, cuda=result(1.0, copy=0.9), targets={"cuda": BEST})
NOT_TIMED = row("not timed", lax=3.0, cuda=REFUSAL, targets={"cuda": BEST})
WRONG = row("wrong", lax=3.0, cuda=result(9.0, error=1.0), targets={"cuda": BEST})


def test_the_largest_comes_first_and_each_library_once_a_row():
    found = gaps.gaps(report(NEAR, THERE, NOT_TIMED, WRONG, FAR))
    assert [(gap.row.problem, gap.library, gap.aim) for gap in found] == [
        ("far", "cuda", "best's time / 1.5"),
        ("near", "cuda", "80% of a copy's bandwidth"),
        ("near", "triton", "lax's time / 1"),
    ]
    assert [gap.factor for gap in found] == pytest.approx([3, 2, 4 / 3])
    assert str(found[0]) == "cuda takes 6 ms for far fprop float32, 3.00 times the 2 ms of best's time / 1.5"


def test_without_targets_the_roofline_is_aimed_at():
    rows = row("a", lax=1.0, xla=result(2.0, roofline=0.5)), row("b", xla=result(2.0, roofline=0.25)), row("c", xla=1.0)
    assert [(gap.row.problem, gap.factor) for gap in gaps.gaps(report(*rows))] == [("b", 4), ("a", 2)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--run", "4"], "--run: got 4, want one of the 3 gaps"), (["--most", "0"], "--most")],
)
def test_bad_arguments_are_named(arguments, said, tmp_path, capsys):
    write(tmp_path / "report.json", report(NEAR, FAR))
    try:
        status = gaps.main([str(tmp_path / "report.json"), *arguments])
    except SystemExit as exit:
        status = exit.code
    assert status == 2 and said in capsys.readouterr().err


def test_no_report_is_said(tmp_path, capsys):
    assert gaps.main([str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err


def test_what_was_measured_can_be_listed_and_run_again(tmp_path, capsys):
    path = tmp_path / "report.json"
    with jax.enable_x64(False):
        measure = ["bench", "--quick", "--only", "mamba k=4, 8x2048x5376 as 2x64x336 fprop", "--implementation", "xla", "--json", str(path)]
        assert command.main(measure) == 0
        capsys.readouterr()
        (measured,) = read(path).rows
        assert gaps.main([str(path)]) == 0
        assert f"1. xla takes {measured.timed['xla'].ms[1]:.3g} ms for {measured.name}" in capsys.readouterr().out
        assert gaps.main([str(path), "--run", "1"]) == 0
    whole = read(path)
    (gap,) = gaps.gaps(whole)
    again = gaps.again(gap, whole)
    assert (again.name, again.shapes) == (measured.name, measured.shapes)
