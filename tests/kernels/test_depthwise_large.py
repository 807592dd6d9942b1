"""The depthwise kernels where numbers of 32 bits end: the last programs of a launch on arrays of about 2^31 elements, nearly all zeros.

Only the last channels of the last images are drawn and compared.
"""

import dataclasses

import harness
import pytest
import test_depthwise
from test_depthwise import ROLES, of_role, problem, shape_of, truth

from jaxext.kernels import depthwise

CASES = {
    # a strip's row of sources starts beside the array, whose own offsets have 32 bits; its did not
    "just below 2^31 elements": problem((31,), (7,), G=2**31 // 248 * 8, low=3, high=3),
    "beyond 2^31 elements": problem((9,), (3,), G=2**28, low=2),
    "beyond 2^31 elements, by images": problem((37,), (3,), G=64, N=2**20, low=1, high=1),
    # the one that a GPU has memory for beside the others: the result is small, or the sources of a small one are
    "beyond 2^31 elements, mostly of one array": problem((32,), (3,), G=64, N=2**20 + 64, stride=6),
    "beyond 2^31 elements, with phases": problem((9,), (4,), G=2**28, stride=2, low=1, high=1, input_dilation=3),
    # the number of a filter, and that of an image, times channels was a product of 32 bits
    "beyond 2^31 filters": problem((1,), (1,), G=2**16, B=2**15 + 8),
    "beyond 2^31 images": problem((1,), (1,), G=2, B=2**16, N=2**15 + 64),
}


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("name", CASES)
def test_the_last_channels_and_images(name, role, tmp_path):
    case = of_role(CASES[name], role, "bf16")
    corner = dataclasses.replace(case, B=1, N=min(case.N, 2), G=min(case.G, 8))
    config = test_depthwise.small(case, pieces=1, strips=64)  # a tile takes the last images whole
    if role == "wgrad":
        config = dataclasses.replace(config, splits=max(1, depthwise.strips(case, config) // 64))  # so does a part of the sum
    launch = depthwise.launch(case, config)
    operands = test_depthwise.operands_of(corner)
    arrays = {slot: harness.Sparse(shape_of(case, slot), "bf16", harness.corner(values.shape), values) for slot, values in operands.items()}
    want = truth(corner, operands)
    result = harness.Sparse(shape_of(case, ROLES[role]), "bf16", harness.corner(want.shape))
    programs = range(launch.grid[0] - 1, -1, -1)
    if role == "wgrad":  # the last of each piece
        programs = programs[:: -(-case.G // config.tile_g)][: depthwise.filter_pieces(case, config)]
    else:  # the last of each phase
        phases = case.axes[2].period
        programs = programs[:: launch.grid[0] // (case.B * phases)][:phases]
    harness.check(harness.run_large(launch, arrays, result, tmp_path, programs), want)
