"""The examples and the README's: each runs clean, and then with one planted error, of which ptxsim says what and where it is."""

import pathlib
import re

import cupy_block_sum
import pytest

README = pathlib.Path(__file__).parents[1] / "README.md"


@pytest.mark.skipif(cupy_block_sum.NVCC is None, reason="no nvcc here")
def test_a_block_sum_for_cupy(capsys):
    cupy_block_sum.main()
    sums, fault = capsys.readouterr().out.split("without the barrier of the loop: ")
    assert sums == "sums of blocks: [ 8128. 24512. 12210.]\n"
    assert fault.startswith("block_sum: race: reads shared memory at ")
    assert "of line 8 of the kernel's source\n  block (0, 0, 0), warp 0" in fault


def test_a_softmax_of_triton(capsys, monkeypatch, tmp_path):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton_softmax

    triton_softmax.main()
    error, fault = capsys.readouterr().out.split("without the mask: ")
    assert float(error.removeprefix("largest error:")) < 1e-6
    assert re.match(r"softmax: race: writes byte \d+ of an array, which a block of another cluster wrote", fault)
    assert "of the kernel's source\n  block (1, 0, 0), warp " in fault


def test_the_readme(capsys):
    (code, printed), *_ = re.findall(r"```python\n(.*?)```\n```text\n(.*?)```", README.read_text(), re.DOTALL)
    exec(code, {})
    assert capsys.readouterr().out == printed
