"""Products with an own transpose by the compiled module: its handler, and that it refuses what its sources refuse.  Needs the module."""

# ruff: noqa: F401, F811 - two fixtures are imported
import dataclasses
import re
from typing import Any

import host_code
import numpy as np
import pytest
from test_cuda_gram import REASONS, a_problem
from test_cuda_handlers import GRAM, INTERNAL, INVALID, Buffer, Call, answer, device, library

from jaxext import _cuda_module
from jaxext.backends.cuda import cuda_binding, cuda_gram

(TARGET,) = GRAM
ROWS = _cuda_module.kernels("gram")


def right(row=ROWS[0], result=None, addend=True, **changes: Any) -> Call:
    """A call that is right, but for changes of attributes, which its arrays agree with."""
    config = {name: row[name] for name in ("tile_m", "tile_n", "tile_k", "cluster_m")} | {"splits": 1}
    attributes: dict[str, Any] = dict(B=2, M=256, N=512, scale=np.float64(2), of_addend=np.float64(0.5)) | config | changes
    B, M, N = (attributes[name] for name in "BMN")
    parts = (attributes["splits"],) if attributes["splits"] > 1 else ()
    y = Buffer(result or row["operands"], (B, M, M))
    added = (y,) if addend else ()
    return Call(TARGET, (Buffer(row["operands"], (B, M, N)), *added), (dataclasses.replace(y, sizes=(*parts, *y.sizes)),), attributes)


@pytest.mark.skipif(device(), reason="there is a GPU, which would run them")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['operands']}-{row['tile_m']}-{row['tile_n']}")
def test_right_calls_get_as_far_as_cuda(answer, row):
    for call in (right(row), right(row, addend=False), right(row, "float32"), right(row, "float32", addend=False, splits=2)):
        code, message = answer(call)
        assert code == INTERNAL and "CUDA" in message, (call, message)


WRONG = {
    "an attribute too few": (lambda call: call.without("N"), "attribute [A-Z] is missing"),
    "an integer": (lambda call: call.attribute(scale=2), "attribute scale is missing or of another type, want a float64"),
    "no x": (lambda call: dataclasses.replace(call, operands=()), "x is missing"),
    "another x": (lambda call: call.buffer(0, sizes=(2, 512, 256)), r"x has the shape \(2, 512, 256\), want \(2, 256, 512\)"),
    "another addend": (lambda call: call.buffer(1, sizes=(2, 256, 128)), r"addend has the shape \(2, 256, 128\), want \(2, 256, 256\)"),
    "a wide addend": (lambda call: call.buffer(1, dtype="float32"), "addend is float32, want bfloat16"),
    "wide factors": (lambda call: call.buffer(0, dtype="float32"), "x is fp32, want bf16 or fp16"),
    "another result": (lambda call: call.buffer(2, dtype="float16").buffer(1, dtype="float16"), "the result is fp16, want bf16 or fp32"),
    "an address": (lambda call: call.buffer(0, address=(1 << 20) + 8), "does not begin at a multiple of 16 bytes"),
    "an addend's address": (lambda call: call.buffer(1, address=(1 << 20) + 8), "does not begin at a multiple of 16 bytes"),
    "the result's address": (lambda call: call.buffer(2, address=(1 << 20) + 8), "does not begin at a multiple of 16 bytes"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_faults(answer, fault):
    change, pattern = WRONG[fault]
    code, message = answer(change(right()))
    assert code == INVALID and re.search(pattern, message), message


def test_configs_without_a_kernel(answer):
    for name in ("tile_m", "tile_n", "tile_k", "cluster_m"):
        assert "no kernel has" in answer(right().attribute(**{name: 96}))[1]
    plain: dict[str, Any] = dict(result="float32", addend=False)
    for splits in (0, -1, 33, 2**40):
        assert "want 1 to 32" in answer(right(**plain, splits=splits))[1]
    assert "splits is 5, with 8 steps of the sum a part has none" in answer(right(**plain, splits=5))[1]
    assert "parts are bfloat16, want float32" in answer(right(addend=False, splits=2))[1]
    assert "splits is 2 with an addend, want 1" in answer(right(result="float32", splits=2))[1]


def test_nothing_is_launched_without_work(answer):
    for name in "BMN":
        changes: dict[str, Any] = {name: 0}
        assert re.search(f"{name}=0.*, want 1 or more", answer(right(**changes))[1])


def test_refusals_are_those_of_the_sources():
    problems = [a_problem(**changes) for changes, _ in REASONS.values()]
    assert [cuda_gram.refused(problem) for problem in problems] == [host_code.refuses(p, cuda_gram) for p in problems]
    assert cuda_gram.refused(a_problem(B=10**30))
