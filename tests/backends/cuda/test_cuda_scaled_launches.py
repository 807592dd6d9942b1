"""Scaled products by the compiled module: its handler, and that it refuses what its sources refuse.  Needs the module; no GPU."""

# ruff: noqa: F401, F811 - two fixtures are imported
import dataclasses
import re
from typing import Any

import host_code
import jax.numpy as jnp
import pytest
import test_scaled_dot
from test_cuda_handlers import INTERNAL, INVALID, SCALED, Buffer, Call, answer, device, library
from test_cuda_scaled import CUTS, REASONS, product

from jaxext import _cuda_module
from jaxext.backends.cuda import cuda_binding, cuda_scaled

PAIRS = [tuple(row[name] for name in ("operands", "second")) for row in _cuda_module.kernels("scaled")[::2]]
(TARGET,) = SCALED


def right(pair=PAIRS[0], result="bfloat16", left=(1, 256, 4), right=(1, 3, 4), **changes: Any) -> Call:
    """A call that is right, but for changes of attributes, which its arrays agree with."""
    row = next(row for row in _cuda_module.kernels("scaled") if (row["operands"], row["second"]) == pair)
    config = {name: row[name] for name in ("tile_m", "tile_n", "tile_k", "cluster_m")} | {"splits": 1}
    attributes = dict(B=1, M=256, N=384, K=512, I=256, J=3, S=4) | config | changes
    B, M, N, K = (attributes[name] for name in "BMNK")
    operands = Buffer(pair[0], (B, M, K)), Buffer(pair[1], (B, N, K)), Buffer("float32", left), Buffer("float32", right)
    parts = (attributes["splits"],) if attributes["splits"] > 1 else ()
    return Call(TARGET, operands, (Buffer(result, (*parts, B, M, N)),), attributes)


@pytest.mark.skipif(device(), reason="there is a GPU, which would run them")
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_right_calls_get_as_far_as_cuda(answer, pair):
    calls = [right(pair), right(pair, "float32", splits=4)]
    calls += [right(pair, right=(1, 4, 384), J=384), right(pair, left=(1, 1, 1), right=(1, 1, 1)), right(pair, right=(1, 1, 384), J=384)]
    for call in calls:
        code, message = answer(call)
        assert code == INTERNAL and "CUDA" in message, (call, message)


@pytest.mark.skipif(device(), reason="there is a GPU, which would run them")
@pytest.mark.parametrize("role", test_scaled_dot.ROLES)
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_arrays_of_every_role_are_taken(answer, role, cuts):
    problem = product(role, cuts=cuts, B=2)
    given = {name: jnp.asarray(x) for name, x in test_scaled_dot.some_operands(problem).items()}
    made = cuda_scaled.arrays(problem, {name: given[name] for name in cuda_scaled.slots(problem)})
    operands = tuple(Buffer(x.dtype.name, x.shape) for x in made.values())
    config = cuda_scaled.pick(problem, cuda_binding.compiled("scaled"))
    result = Buffer("bfloat16", (2, problem.rows, problem.cols))
    code, message = answer(Call(TARGET, operands, (result,), cuda_scaled.fields(problem) | dataclasses.asdict(config)))
    assert code == INTERNAL and "CUDA" in message


WRONG = {
    "an attribute too few": (lambda call: call.without("S"), "attribute [A-Z] is missing"),
    "no scales": (lambda call: dataclasses.replace(call, operands=call.operands[:2]), "left is missing"),
    "scales in bfloat16": (lambda call: call.buffer(2, dtype="bfloat16"), "left is bfloat16, want float32"),
    "scales of other rows": (lambda call: call.buffer(2, sizes=(1, 128, 4)), r"left has the shape \(1, 128, 4\), want \(1, 256, 4\)"),
    "scales of other squares": (lambda call: call.buffer(3, sizes=(1, 4, 3)), r"right has the shape \(1, 4, 3\), want \(1, 3, 4\)"),
    "two axes": (lambda call: call.buffer(3, sizes=(3, 4)), r"right has the shape \(3, 4\), want \(1, 3, 4\)"),
    "scales of columns in lines": (lambda call: call.attribute(J=384).buffer(3, sizes=(1, 384, 4)), r"want \(1, 4, 384\)"),
    "one scale, said to be each column's": (lambda call: call.attribute(J=384).buffer(3, sizes=(1, 4, 1)), "want them beside each other"),
    "another factor": (lambda call: call.buffer(1, sizes=(1, 512, 384)), r"b has the shape \(1, 512, 384\), want \(1, 384, 512\)"),
    "wide factors": (lambda call: call.buffer(0, dtype="bfloat16"), "bf16 times fp8e4nv into bf16, want fp8e4nv times fp8e4nv or fp8e5"),
    "another result": (lambda call: call.buffer(4, dtype="float16"), "into fp16, want"),
    "an address": (lambda call: call.buffer(1, address=(1 << 20) + 8), "does not begin at a multiple of 16 bytes"),
    "the address of scales": (lambda call: call.buffer(3, address=(1 << 20) + 4), "does not begin at a multiple of 16 bytes"),
    "parts in bfloat16": (lambda call: call.attribute(splits=2).buffer(4, sizes=(2, 1, 256, 384)), "parts are bfloat16, want float32"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_faults(answer, fault):
    change, pattern = WRONG[fault]
    code, message = answer(change(right()))
    assert code == INVALID and re.search(pattern, message), message


def test_configs_without_a_kernel(answer):
    for name in ("tile_m", "tile_n", "tile_k", "cluster_m"):
        assert "no kernel has" in answer(right().attribute(**{name: 96}))[1]
    for splits in (0, -1, 33, 2**40):
        assert "want 1 to 32" in answer(right(result="float32", splits=splits))[1]


def test_nothing_is_launched_without_work(answer):
    for name in "BMNK":
        changes: dict[str, Any] = {name: 0}
        assert re.search(f"{name}=0.*, want 1 or more", answer(right(left=(1, 1, 1), right=(1, 1, 1), **changes))[1])


def test_refusals_are_those_of_the_sources():
    problems = [product(**changes) for name, (changes, _) in REASONS.items() if name != "many tiles"]  # the table there has one tile
    assert [cuda_scaled.refused(problem) for problem in problems] == [host_code.refuses(p, cuda_scaled) for p in problems]
    assert cuda_scaled.refused(product(B=10**30))
    both = product("nt", cuts=(16, 1, 3), slots="xy")
    assert cuda_scaled.refused(both) == "the result has scales of rows and columns at once"
