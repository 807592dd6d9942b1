"""The depthwise kernel on tensor cores, on a CPU, as test_simt.py runs the others, with a stand-in for the products of a warp."""

import dataclasses

import numpy as np
import pytest
from cuda_cases import INVALID
from simt_families import DEPTHWISE
from test_depthwise import of_role, operands_of, problem, shape_of

from jaxext.ops.conv import cuda_depthwise
from jaxext.ops.conv.cuda_depthwise import DepthwiseConfig

pytestmark = pytest.mark.cuda

ROLES = ("fprop", "dgrad", "wgrad")
CASES = {
    "7x7": problem((9, 11), (7, 7), G=24, N=3, low=3, high=3),
    "7x7 without padding": problem((9, 12), (7, 7), G=8),
    "5x5, batched filters": problem((5, 9), (5, 5), G=16, N=2, B=2, low=2, high=2),
    "6x9, of odd padding": problem((8, 13), (6, 9), G=8, low=(3, 1), high=(2, 5)),
    "7x2, cropped": problem((13, 11), (7, 2), G=24, low=(-3, 2), high=(2, -5)),
    "1x1": problem((3, 4), (1, 1), G=8, N=17),
    "far padding": problem((2, 3), (4, 4), G=8, low=9, high=5),
    "more images than lines in step": problem((4, 5), (7, 7), G=8, N=19, low=3, high=3),
    "planes": problem((3, 5, 4), (1, 3, 3), G=8, N=2, low=(0, 1, 1), high=(0, 1, 1)),
}
WITHOUT_OUTPUTS = [problem((3, 9), (7, 3), G=8, N=2), problem((9, 3), (3, 7), G=8), problem((4, 5), (3, 3), G=8, N=0)]

SMALL = problem((7, 9), (7, 7), G=8, N=2, low=3, high=3)


def uses_tensor_cores(lines, splits=1):
    return DepthwiseConfig(lanes=1, strip=4, lines=lines, splits=splits)


def kernel_of(case):
    rows = case.filter[1]
    return ("WgradMma", 3 if rows <= 3 else 5 if rows <= 5 else 7) if case.role == "wgrad" else ("GatherMma", 5 if rows <= 5 else 7)


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("role", ROLES)
def test_geometry(simulator, role, dtype):
    """Parts of one line, of a few with a shorter last one, and of whole images; sums of one block, and of several, some of them empty."""
    cases = [of_role(case, role, dtype) for case in CASES.values()]
    splits = 1 if role != "wgrad" else 4
    launches = [(case, uses_tensor_cores(lines, splits)) for case in cases for lines in ((1, 32) if case.N > 16 else (3,))]
    if role == "wgrad":
        launches = [(dataclasses.replace(case, dtypes=(*case.dtypes[:2], "fp32")), config) for case, config in launches]
        launches.append((cases[0], uses_tensor_cores(3)))
    simulator.check(DEPTHWISE, launches)
    for (case, config), reply in zip(launches, simulator.run(DEPTHWISE, [(*launch, None) for launch in launches]), strict=True):
        assert reply.kernel == kernel_of(case) and reply.grid == cuda_depthwise.grid(case, config)


def test_a_walk_that_fills_its_steps(simulator):
    """Steps are a multiple of 7 with 7 filter rows, of which the last has no lines: 14 for 7 lines of targets, 21 for 8."""
    case = of_role(problem((15, 17), (7, 7), G=8, N=17, low=3, high=3), "wgrad", "bf16")
    simulator.check(DEPTHWISE, [(case, uses_tensor_cores(lines)) for lines in (7, 8)])


def test_sums_of_nothing_are_zeros(simulator):
    for case in WITHOUT_OUTPUTS:
        simulator.check(DEPTHWISE, [(of_role(case, "wgrad", "bf16"), uses_tensor_cores(2))])


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_rounding(simulator, dtype):
    """The result is the float32 sum, rounded once."""
    simulator.check(DEPTHWISE, [(of_role(SMALL, "fprop", dtype), uses_tensor_cores(5))], integers=False)


@pytest.mark.parametrize("role", ROLES[:2])
def test_what_is_not_finite_reaches_only_targets_that_meet_it(simulator, role):
    """The band's zeros multiply it too.  All others keep their sums, and those that meet it have what the definition has."""
    case = of_role(SMALL, role, "bf16")
    operands = operands_of(case)
    source = operands["x" if role == "fprop" else "y"]
    source[0, 0, 0, 3, 6, 3] = np.inf
    source[0, 0, 0, 0, 0, 1] = -np.inf
    source[0, 1, 0, -1, -1, 7] = np.nan
    (got,) = simulator.launch(DEPTHWISE, case, uses_tensor_cores(4), operands).results
    with np.errstate(invalid="ignore"):
        want = _summed(case, operands)
    np.testing.assert_array_equal(got.astype(np.float64), want)
    assert 30 < np.count_nonzero(~np.isfinite(want)) < want.size / 4


def _summed(case, operands):
    """The definition, in which a target meets nothing but its own sources."""
    source, filter = (operands[slot].astype(np.float64) for slot in (("x", "w") if case.role == "fprop" else ("y", "w")))
    source, filter = source.reshape(source.shape[:-1])[0, :, 0] if source.ndim == 7 else source[0, :, 0], filter.reshape(case.G, 7, 7)
    filter = filter if case.role == "fprop" else filter[:, ::-1, ::-1]
    result = np.zeros(source.shape)
    N, H, W, _ = source.shape
    for p in range(H):
        for q in range(W):
            for r in range(7):
                for s in range(7):
                    if 0 <= p + r - 3 < H and 0 <= q + s - 3 < W:
                        result[:, p, q] += source[:, p + r - 3, q + s - 3] * filter[:, r, s]
    return result.reshape(shape_of(case, "y" if case.role == "fprop" else "x"))


def test_what_is_not_finite_reaches_only_the_taps_that_it_has(simulator):
    """A target beyond the image is a zero that meets it too; a sum that it is part of is the definition's."""
    case = of_role(SMALL, "wgrad", "bf16")
    operands = operands_of(case)
    operands["y"][...] = np.abs(operands["y"]) + 1
    operands["x"][0, 0, 0, 0, 0, 1] = np.inf
    operands["x"][0, 1, 0, -1, -1, 7] = np.nan
    (got,) = simulator.launch(DEPTHWISE, case, uses_tensor_cores(4), operands).results
    x, y = (operands[slot].astype(np.float64).reshape(2, 7, 9, 8) for slot in "xy")
    x = np.pad(x, [(0, 0), (3, 3), (3, 3), (0, 0)])
    want = np.stack([np.stack([(x[:, u : u + 7, v : v + 9] * y) for v in range(7)]) for u in range(7)]).sum(axis=(2, 3, 4))
    assert np.count_nonzero(~np.isfinite(want)) == 2 * 4 * 4
    np.testing.assert_array_equal(got.astype(np.float64).reshape(8, 7, 7).transpose(1, 2, 0), want)


def test_an_infinite_tap_meets_no_padding(simulator):
    case = of_role(SMALL, "fprop", "bf16")
    operands = operands_of(case)
    operands["w"][...] = 1
    operands["w"][0, 5, 0, 0, 0, 0] = np.inf
    operands["x"][...] = 1
    (got,) = simulator.launch(DEPTHWISE, case, uses_tensor_cores(32), operands).results
    finite = np.isfinite(got.astype(np.float32)[0, :, 0, :, :, :, 0])
    assert finite[..., [c for c in range(8) if c != 5]].all()
    assert finite[:, :3, :, 5].all() and finite[:, :, :3, 5].all() and not finite[:, 3:, 3:, 5].any()


def test_large_sums_round_to_infinity(simulator):
    """They are computed anew, which changes nothing."""
    case = of_role(CASES["7x7 without padding"], "fprop", "fp16")
    operands = {slot: np.full_like(x, 300) for slot, x in operands_of(case).items()}
    (got,) = simulator.launch(DEPTHWISE, case, uses_tensor_cores(3), operands).results
    assert (got == np.inf).all()


REFUSED = [
    ({"dtypes": ("fp32",) * 3}, 4, "fprop: lines is 4, want 0: tensor cores take 16 bits, not float32"),
    ({"G": 12}, 4, "tensor cores take a multiple of 8 groups of one output, not 12 of 1"),
    ({"K": 2}, 4, "tensor cores take a multiple of 8 groups of one output, not 24 of 2"),
    ({"filter": (2, 7, 7)}, 4, "tensor cores take two axes, not three"),
    ({"low": (1, 3, 3), "output": (2, 9, 11)}, 4, "tensor cores take two axes, not three"),
    ({"stride": (1, 2, 1)}, 4, "tensor cores take no strides and dilations"),
    ({"input_dilation": (1, 1, 2)}, 4, "tensor cores take no strides and dilations"),
    ({"filter_dilation": (1, 1, 2)}, 4, "tensor cores take no strides and dilations"),
    ({"filter": (1, 8, 7)}, 4, "tensor cores take 1x1 to 7x9 taps, not 8x7"),
    ({"filter": (1, 7, 10)}, 4, "tensor cores take 1x1 to 7x9 taps, not 7x10"),
    ({}, 33, "lines is 33, want 0 to 32"),
    ({}, -1, "lines is -1, want 0 to 32"),
    ({"role": "wgrad", "N": 1 << 24}, 4, "wgrad: lines is 4, want 0: tensor cores take arrays of 2^34 elements at most"),
]


@pytest.mark.parametrize("changes, lines, message", REFUSED)
def test_refused_configs(simulator, changes, lines, message):
    case = dataclasses.replace(of_role(CASES["7x7"], changes.get("role", "fprop"), "bf16"), **changes)
    reply = simulator.plan(DEPTHWISE, case, uses_tensor_cores(lines))
    assert reply.code == INVALID and reply.message.startswith("depthwise ") and message in reply.message


def test_what_python_offers_is_taken_and_nothing_else_is(simulator):
    """`uses_tensor_cores` says what the launcher says."""
    changes = [{}, *(changes for changes, lines, _ in REFUSED if 0 < lines <= 32), {"filter_dilation": (2, 1, 1)}]
    cases = [dataclasses.replace(of_role(CASES["7x7"], change.get("role", "fprop"), "bf16"), **change) for change in changes]
    replies = simulator.run(DEPTHWISE, [(case, uses_tensor_cores(4), None) for case in cases])
    assert [reply.code == 0 for reply in replies] == [cuda_depthwise.uses_tensor_cores(case) for case in cases]


def test_the_model_prefers_tensor_cores_for_large_filters():
    """Other kernels are bound by memory as well if taps are few; a kernel of float32, or with strides, has no choice."""
    convnext = of_role(problem((56, 56), (7, 7), G=96, N=64, low=3, high=3), "fprop", "bf16")
    for arch in (80, 90, 100):
        for role in ROLES:
            found = cuda_depthwise.candidates(dataclasses.replace(of_role(convnext, role, "bf16"), arch=arch))
            assert found[0].lines > 0 and any(config.lines == 0 for config in found)
            assert all(config.lines <= cuda_depthwise.MMA_MOST_LINES for config in found)
            few = cuda_depthwise.candidates(dataclasses.replace(of_role(convnext, role, "bf16"), arch=arch, N=1))
            assert {config.lines for config in few} == {config.lines for config in found}
            if role != "wgrad":
                assert {*few} == {*found}, "a batch may have the config of a part of it"
    others = [
        of_role(convnext, "fprop", "fp32"),
        of_role(problem((56, 56), (3, 3), G=96, N=64, low=1, high=1), "fprop", "bf16"),
        of_role(problem((4096,), (4,), G=96, N=64, low=3), "wgrad", "bf16"),
        of_role(problem((56, 56), (7, 7), G=96, N=64, stride=2, low=3, high=3), "fprop", "bf16"),
    ]
    assert all(config.lines == 0 for case in others for config in cuda_depthwise.candidates(case))
