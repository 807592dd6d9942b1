"""Predictions of the models for the suite: never faster than the machine; the page of docs/; and quotients of made-up reports."""

import dataclasses
import functools
import pathlib

import msgspec
import pytest
from test_report import report, row

pytest.importorskip("triton")

from jaxext.backends.cuda.cuda_binding import missing
from jaxext.benchmarks import predictions
from jaxext.benchmarks.problems import PRODUCTS
from jaxext.benchmarks.report import write
from jaxext.kernels.launch import BITS
from jaxext.kernels.machine import machine

CUBE = "4096 cubed, 4096x4096x4096"
PAGE = pathlib.Path(__file__).parents[2] / "docs/predictions.md"
expected = functools.cache(lambda arch: list(predictions.predictions(arch=arch)))


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_nobody_is_expected_to_be_faster_than_the_machine(arch):
    cases = {case.name: (problem, case) for problem in PRODUCTS for case in problem.cases(problem.products)}
    assert [name for name, _, _ in expected(arch)] == list(cases)
    for name, family, of in expected(arch):
        problem, case = cases[name]
        asked, gpu = problem.problem(case.role, case.numbers, arch), machine(arch)
        bits = max(BITS[dtype] for dtype in asked.dtypes[:2])
        products = gpu.rate(bits, asked.precision) * gpu.multiprocessors * gpu.hertz
        assert family == problem.kernel and (of or arch < 89 and bits == 8)
        if family != "depthwise":  # their model has no products
            assert all(us * 1e-6 * products > 0.99 * case.flops / 2 for us in of.values()), (name, of)


def test_moving_the_arrays_is_the_least(monkeypatch):
    gpu = dataclasses.replace(machine(90), memory=1)
    monkeypatch.setattr(predictions, "machine", lambda arch, device: gpu)
    (_, _, of), *_ = predictions.predictions("sweep")
    assert of["triton"] == pytest.approx(3 * 2 * 4096**2 / 132 / gpu.hertz * 1e6)


def test_a_slower_clock_takes_longer():
    gpu = dataclasses.replace(machine(90), hertz=machine(90).hertz / 2)
    assert gpu.seconds(1000) == 2 * machine(90).seconds(1000)


def without_cuda(page: str) -> list[str]:
    """Its lines, without the column and the families of kernels that only a compiled module tells."""
    at = 2 + predictions.COLUMNS.index((90, "cuda"))
    lines = [line.split("|") for line in page.splitlines() if not line.startswith("| cuda ")]
    return ["|".join([*cells[:at], "", *cells[at + 1 :]]) if len(cells) > 7 else "|".join(cells) for cells in lines]


def test_the_page_is_what_the_command_writes(tmp_path):
    report = str(PAGE.parent.parent / "benchmarks" / "results" / "h100.json")
    made = f"`python -m jaxext.benchmarks.predictions benchmarks/results/h100.json --out docs/predictions.md` makes {PAGE.name} anew"
    assert predictions.main([report, "--out", str(tmp_path / "page.md")]) == 0
    written = (tmp_path / "page.md").read_text()
    if missing():
        assert without_cuda(written) == without_cuda(PAGE.read_text()), made
    else:
        assert written == PAGE.read_text(), made


def test_a_report_fills_the_page(tmp_path, capsys):
    names = [f"{CUBE} nn bfloat16", f"{CUBE} nt bfloat16", f"{CUBE} tn bfloat16"]
    us = {name: of["triton"] for name, _, of in expected(90)}
    rows = [row(CUBE, name.split()[-2], dtype="bfloat16", triton=k * us[name] / 1e3) for k, name in zip((1, 2, 4), names, strict=True)]
    write(tmp_path / "gpu.json", report(*rows))
    assert predictions.main([str(tmp_path / "gpu.json"), "--tag", "sweep"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "| triton matmul | 3 | 1.00 | 2.00 | 4.00 |" in lines
    (told,) = (line for line in lines if line.startswith(f"| {names[1]} |"))
    assert told.endswith(f"| {2 * us[names[1]]:.3g} |  |") and f"| {us[names[1]]:.3g} |" in told


def test_a_report_of_another_gpu_is_compared_with_its_own_times(tmp_path, capsys):
    us = dict((name, of) for name, _, of in expected(80))[f"{CUBE} nn bfloat16"]["triton"]
    made = report(row(CUBE, "nn", dtype="bfloat16", triton=3 * us / 1e3))
    write(tmp_path / "gpu.json", msgspec.structs.replace(made, environment={**made.environment, "capability": 80}))
    assert predictions.main([str(tmp_path / "gpu.json"), "--tag", "sweep"]) == 0
    assert "| triton matmul | 1 | 3.00 | 3.00 | 3.00 |" in capsys.readouterr().out.splitlines()


def test_no_report_is_said(tmp_path, capsys):
    assert predictions.main([str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err
