"""Gaps of made-up reports, in their order; a real one, of the smallest trial of the harness, is run again."""

import jax
from test_report import report, result, row

from benchmarks import gaps
from jaxext.bench.bench_report import read
from jaxext.cli import command

ROWS = (
    row("a", lax=1.0, xla=result(2.0, roofline=0.5)),
    row("b", xla=result(2.0, roofline=0.25), triton=result(9.0, roofline=0.1, error=1.0)),  # which is wrong
    row("c", xla=1.0),
)


def test_the_largest_comes_first():
    found = gaps.gaps(report(*ROWS))
    assert [(gap.row.problem, gap.library, gap.factor) for gap in found] == [("b", "xla", 4), ("a", "xla", 2)]
    assert str(found[0]) == "xla takes 2 ms for b fprop float32, 4.00 times the 0.5 ms of the roofline"


def test_rows_can_be_listed_and_run_again(tmp_path, capsys):
    path = tmp_path / "report.json"
    with jax.enable_x64(False):
        measure = ["bench", "--quick", "--only", "mamba k=4, 8x2048x5376 as 2x64x336 fprop", "--implementation", "xla", "--json", str(path)]
        assert command.main(measure) == 0
        capsys.readouterr()
        (measured,) = read(path).rows
        line = f"xla takes {measured.timed['xla'].ms[1]:.3g} ms for {measured.name}"
        assert gaps.main([str(path)]) == 0 and f"1. {line}" in capsys.readouterr().out
        assert gaps.main([str(path), "--run", "1"]) == 0 and line in capsys.readouterr().out
        assert gaps.main([str(path), "--run", "2"]) == 2 and "--run: got 2, want one of the 1 gaps" in capsys.readouterr().err
    assert gaps.main([str(tmp_path / "none.json")]) == 2 and "none.json" in capsys.readouterr().err
