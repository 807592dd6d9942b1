"""What the models expect of the suite: never more than the machine has; and quotients of made-up reports."""

import dataclasses

import pytest
from test_report import report, row

pytest.importorskip("triton")

from jaxext.benchmarks import predictions
from jaxext.benchmarks.problems import PRODUCTS
from jaxext.benchmarks.report import write
from jaxext.kernels._launch import BITS
from jaxext.kernels._roofline import machine

CUBE = "4096 cubed, 4096x4096x4096"


def test_nobody_is_expected_to_be_faster_than_the_machine():
    cases = {case.name: (problem, case) for problem in PRODUCTS for case in problem.cases(problem.products)}
    told = list(predictions.predictions())
    assert [name for name, _, _ in told] == list(cases)
    for name, family, expected in told:
        problem, case = cases[name]
        asked, gpu = problem.problem(case.role, case.numbers, predictions.ARCH), machine(predictions.ARCH)
        bits = max(BITS[dtype] for dtype in asked.dtypes[:2])
        products = gpu.rate(bits, asked.precision) * gpu.multiprocessors * predictions.HERTZ
        assert expected and family == problem.kernel
        if family != "depthwise":  # their model has no products
            assert all(us * 1e-6 * products > 0.99 * case.flops / 2 for us in expected.values()), (name, expected)


def test_slower_machines_are_expected_to_take_longer(monkeypatch):
    (_, _, before), *_ = predictions.predictions("target")
    monkeypatch.setattr(predictions, "HERTZ", predictions.HERTZ / 2)
    (_, _, after), *_ = predictions.predictions("target")
    assert after == pytest.approx({library: 2 * us for library, us in before.items()})


def test_moving_the_arrays_is_the_least(monkeypatch):
    gpu = dataclasses.replace(machine(90), memory=1)
    monkeypatch.setattr(predictions, "machine", lambda arch: gpu)
    expected = {name: us["triton"] for name, _, us in predictions.predictions("target")}
    assert expected[f"{CUBE} nn bfloat16"] == pytest.approx(3 * 2 * 4096**2 / 132 / predictions.HERTZ * 1e6)


def test_quotients_of_a_report(tmp_path, capsys):
    expected = {name: us["triton"] for name, _, us in predictions.predictions("target")}
    names = [f"{CUBE} nn bfloat16", f"{CUBE} nt bfloat16", f"{CUBE} tn bfloat16"]
    rows = [
        row(CUBE, name.split()[-2], dtype="bfloat16", triton=k * expected[name] / 1e3) for k, name in zip((1, 2, 4), names, strict=True)
    ]
    write(tmp_path / "gpu.json", report(*rows))
    assert predictions.main([str(tmp_path / "gpu.json")]) == 0
    *lines, quotient = capsys.readouterr().out.splitlines()
    assert quotient == "triton matmul: took 2.00 times what was expected, quartiles 1.00 and 4.00, 3 rows"
    assert len(lines) == 2 + 3 and lines[3].startswith(f"| {names[1]} | {expected[names[1]]:.3g}, took {2 * expected[names[1]]:.3g} |")


def test_no_report_is_said(tmp_path, capsys):
    assert predictions.main([str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err
