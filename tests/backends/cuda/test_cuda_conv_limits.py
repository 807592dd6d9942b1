"""Where the dense convolutions for Hopper end: each limit of TMA's boxes, of CUTLASS and of a launch has a problem on either side.

What is not refused (conv_plan.cc) has parts in every candidate of jaxext/backends/cuda/cuda_conv.py.  Needs g++; no GPU and no CUDA.
"""

import random

import pytest
from cuda_convs import ROLES, candidates, problem, refuses
from host_code import plan

from jaxext.backends.cuda.cuda_conv import ConvConfig
from jaxext.kernels.geometry import ConvProblem

# Of each limit: the last problem within and the first beyond it.
LIMITS = {
    "1-D, lower corner": (problem("fprop", (9,), (2,), low=1 << 15), problem("fprop", (9,), (2,), low=(1 << 15) + 1)),
    "1-D, upper corner": (problem("fprop", (9,), (1,), high=(1 << 15) - 1), problem("fprop", (9,), (1,), high=1 << 15)),
    "1-D, taps without padding": (problem("wgrad", (33000,), (32769,)), problem("wgrad", (33000,), (32770,))),
    "1-D, taps": (
        problem("fprop", (40000,), (2,), high=32766, dilation=65534),
        problem("fprop", (40000,), (2,), high=32767, dilation=65535),
    ),
    "1-D, padding": (
        problem("dgrad", (9,), (2,), low=65536, high=-15000, dilation=50000),
        problem("dgrad", (9,), (2,), low=65537, high=-15000, dilation=50000),
    ),
    "2-D, lower corner": (problem("wgrad", (9, 9), (2, 2), low=(128, 0)), problem("wgrad", (9, 9), (2, 2), low=(129, 0))),
    "2-D, upper corner": (problem("fprop", (9, 9), (1, 1), high=(0, 127)), problem("fprop", (9, 9), (1, 1), high=(0, 128))),
    "2-D, upper corner in dgrad": (problem("dgrad", (9, 200), (1, 1), high=(0, -127)), problem("dgrad", (9, 200), (1, 1), high=(0, -128))),
    "2-D, taps without padding": (problem("fprop", (9, 140), (1, 129)), problem("fprop", (9, 140), (1, 130))),
    "2-D, taps": (problem("fprop", (300, 9), (255, 1), high=(127, 0)), problem("fprop", (300, 9), (256, 1), high=(127, 0))),
    "2-D, padding": (
        problem("dgrad", (9, 60), (3, 1), low=(256, 0), high=(-100, 0), dilation=(80, 1)),
        problem("dgrad", (9, 60), (3, 1), low=(257, 0), high=(-100, 0), dilation=(80, 1)),
    ),
    "3-D, lower corner": (problem("fprop", (5, 5, 5), (1, 1, 1), low=(0, 16, 0)), problem("fprop", (5, 5, 5), (1, 1, 1), low=(0, 17, 0))),
    "3-D, upper corner": (problem("wgrad", (5, 5, 5), (1, 1, 1), high=(0, 0, 15)), problem("wgrad", (5, 5, 5), (1, 1, 1), high=(0, 0, 16))),
    "3-D, taps": (
        problem("fprop", (40, 5, 5), (31, 1, 1), high=(14, 0, 0)),
        problem("fprop", (40, 5, 5), (32, 1, 1), high=(15, 0, 0)),
    ),
    "3-D, padding": (
        problem("dgrad", (9, 5, 5), (3, 1, 1), low=(16, 0, 0), high=(-5, 0, 0), dilation=(5, 1, 1)),
        problem("dgrad", (9, 5, 5), (3, 1, 1), low=(17, 0, 0), high=(-5, 0, 0), dilation=(5, 1, 1)),
    ),
    "strides": (problem("fprop", (40, 40), (3, 3), stride=8), problem("fprop", (40, 40), (3, 3), stride=9)),
    "parts": (problem("fprop", (8,), (3,), B=2, G=32), problem("fprop", (8,), (3,), B=5, G=13)),
    "phases": (problem("dgrad", (8, 8), (3, 3), stride=8, G=8), problem("dgrad", (8, 8), (3, 3), stride=8, G=9)),
    "2-D, crop in dgrad": (problem("dgrad", (400, 9), (1, 1), low=(-128, 0)), problem("dgrad", (400, 9), (1, 1), low=(-129, 0))),
    "2-D, taps in strided dgrad": (
        problem("dgrad", (600, 9), (258, 1), stride=(2, 1)),
        problem("dgrad", (600, 9), (259, 1), stride=(2, 1)),
    ),
    "pixels": (problem("fprop", (65535, 32767), (1, 1)), problem("fprop", (65536, 32767), (1, 1))),
    "elements": (problem("fprop", ((1 << 19) - 1,), (1,), C=1 << 20), problem("fprop", (1 << 19,), (1,), C=1 << 20)),
    "channels": (problem("fprop", (1,), (1,), C=(1 << 31) - 8), problem("fprop", (1,), (1,), C=1 << 31)),
    "blocks": (problem("dgrad", (8,), (1,), C=65535 * 64), problem("dgrad", (8,), (1,), C=65535 * 64 + 8)),
    "blocks of taps": (problem("wgrad", (65535,), (21844,), C=192, low=30000), problem("wgrad", (65535,), (21845,), C=192, low=30000)),
}


@pytest.mark.parametrize("name", LIMITS)
def test_limits_are_where_they_are(name):
    within, beyond = LIMITS[name]
    config = ConvConfig(tile_m=128, tile_n=64, cluster=2)
    assert refuses(within) is None and not isinstance(plan(within, config), str)
    assert refuses(beyond) is not None and plan(beyond, config) == f"conv: {refuses(beyond)}"


def near_limits(rng: random.Random) -> ConvProblem | None:
    role, rank = rng.choice(ROLES), rng.choice((1, 2, 3))
    corner = 1 << (16 // rank - 1)

    def draw(*choices):
        """One of them for each axis; those that are not small, give or take a little."""
        return tuple(size if (size := rng.choice(choices)) < 4 else size + rng.randint(-1, 1) for _ in range(rank))

    case = problem(
        role,
        draw(1, 3, corner, 2 * corner, 4 * corner),
        draw(1, 1, 2, 3, corner // 4 + 3, corner, 2 * corner) if rank == 1 else draw(1, 2, 3, corner // 4 + 2),
        B=rng.choice((1, 8)),
        N=rng.choice((1, 3, 64)),
        G=rng.choice((1, 8, 9)),
        K=rng.choice((8, 8 << 16)),
        stride=draw(1, 2, 8),
        low=draw(0, 1, -1, corner, 2 * corner),
        high=draw(0, 1, -2, corner, 2 * corner),
        dilation=draw(1, 1, 2, corner // 2, corner),
    )
    return None if 0 in case.output else case


def test_what_is_taken_near_the_limits_has_parts_in_every_candidate():
    """Every view of which begins at 16 bytes."""
    rng, taken, refused = random.Random(0), 0, 0
    for _ in range(1500):
        if (case := near_limits(rng)) is None:
            continue
        if refuses(case):
            refused += 1
            continue
        taken += 1
        for config in candidates(case):
            parts = plan(case, config)
            assert not isinstance(parts, str), (case, config, parts)
            assert all(at % 8 == 0 for part in parts for at in (part.x, part.w, part.y))
    assert taken > 100 and refused > 100
