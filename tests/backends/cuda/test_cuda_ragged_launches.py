"""Ragged products by the compiled module: its handlers, and that it refuses what its sources refuse.  Needs the module; no GPU."""

# ruff: noqa: F401, F811 - two fixtures are imported
import dataclasses
import re

import host_code
import pytest
from test_cuda_handlers import INTERNAL, RAGGED, Buffer, Call, answer, device, library
from test_cuda_ragged import REASONS, SMALL

from jaxext import _cuda_module
from jaxext.backends.cuda import cuda_binding, cuda_ragged

SLOTS = {"nn": "xwy", "nt": "wyx", "tn": "xyw"}  # both operands and the result


def right(target, **changes):
    """A call that is right, but for changes of attributes, which its arrays agree with."""
    role = target.split("_")[2]
    row = next(row for row in _cuda_module.kernels("ragged") if (row["role"], row["operands"]) == (role, "bfloat16"))
    sizes = (
        dict(B=1, P=1, R=1, M=300, N=512, K=256, G=6) | {name: row[name] for name in ("tile_m", "tile_n", "tile_k", "cluster_n")} | changes
    )
    B, P, R, M, N, K, G, tile_m, *_ = sizes.values()
    shapes = {"x": (B, P, R, M, K), "w": (B, G, K, N), "y": (B, P, R, M, N)}
    first, second, result = (Buffer("bfloat16", shapes[slot]) for slot in SLOTS[role])
    places = (B, P, G, 2) if role == "tn" else (B, P, -(-M // tile_m) + G - 1, 5)
    return Call(target, (first, second, Buffer("int32", places)), (result,), sizes)


@pytest.mark.skipif(device(), reason="there is a GPU, which would run them")
@pytest.mark.parametrize("target", RAGGED)
def test_right_calls_get_as_far_as_cuda(answer, target):
    code, message = answer(right(target))
    assert code == INTERNAL and "CUDA" in message


WRONG = {
    "an attribute too few": (lambda call: call.without("G"), "attribute [A-Z] is missing"),
    "no places": (lambda call: dataclasses.replace(call, operands=call.operands[:2]), "(visits|ranges) is missing"),
    "places of 64 bits": (lambda call: call.buffer(2, dtype="int64"), "(visits|ranges) is of another dtype, want int32"),
    "another result": (lambda call: call.buffer(3, dtype="float32"), "bf16 times bf16 into fp32, want one dtype, bf16 or fp16"),
    "an address": (lambda call: call.buffer(1, address=(1 << 20) + 8), "does not begin at a multiple of 16 bytes"),
}


@pytest.mark.parametrize("fault", WRONG)
@pytest.mark.parametrize("target", RAGGED)
def test_faults(answer, target, fault):
    change, pattern = WRONG[fault]
    assert re.search(pattern, answer(change(right(target)))[1])


@pytest.mark.parametrize("target", RAGGED)
def test_configs_without_a_kernel(answer, target):
    for name in ("tile_m", "tile_n", "tile_k", "cluster_n"):
        assert "no kernel has" in answer(right(target, **{name: 96}))[1]


@pytest.mark.parametrize("target", RAGGED)
def test_nothing_is_launched_without_work(answer, target):
    for name in "BPRMNKG":
        assert re.search(f"{name}=0.*, want 1 or more", answer(right(target, **{name: 0}))[1])


def test_refusals_are_those_of_the_sources():
    problems = [dataclasses.replace(SMALL, **changes) for changes, _ in REASONS.values()]
    assert [cuda_ragged.refused(problem) for problem in problems] == [host_code.refuses(p, cuda_ragged) for p in problems]
    assert cuda_ragged.refused(dataclasses.replace(SMALL, P=10**30))
