"""Host logic of the dense convolutions for Hopper: what they refuse, which tile is picked, and TMA's boxes.

csrc/conv_plan.cc is compiled by a C++ compiler (host_code.py) and asked for its parts and boxes; gathering by these as TMA does must give
what the definition gives, bit for bit on small integers.  Needs g++, and for one test the compiled module; no GPU.
"""

import dataclasses
import random

import host_code
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from host_code import Part, plan
from lowered import NHWC, custom_calls, struct

import jaxext
from jaxext.backends.cuda import cuda_binding, cuda_conv
from jaxext.backends.cuda.cuda_binding import GEOMETRY
from jaxext.backends.cuda.cuda_conv import ConvConfig, candidates, pick
from jaxext.kernels._geometry import ConvProblem

ROLES = ("fprop", "dgrad", "wgrad")
SLOTS = {"x": "BNDHWGC", "w": "BGKTRSC", "y": "BNOPQGK"}
OPEN = {"fprop": "y", "dgrad": "x", "wgrad": "w"}


def refuses(problem: ConvProblem) -> str | None:
    return host_code.refuses(problem, cuda_conv)


Sizes = int | tuple[int, ...]


def problem(
    role: str,
    input: tuple[int, ...],
    filter: tuple[int, ...],
    *,
    B: int = 1,
    N: int = 1,
    G: int = 1,
    C: int = 8,
    K: int = 8,
    stride: Sizes = 1,
    low: Sizes = 0,
    high: Sizes = 0,
    dilation: Sizes = 1,
    **others,
) -> ConvProblem:
    rank = len(input)

    def three(value: Sizes, missing: int) -> tuple[int, ...]:
        return (missing,) * (3 - rank) + (value if isinstance(value, tuple) else (value,) * rank)

    inputs, filters, lows, highs = three(input, 1), three(filter, 1), three(low, 0), three(high, 0)
    strides, dilations = three(stride, 1), three(dilation, 1)
    outputs = tuple(
        max(0, (lo + i + hi - (r - 1) * d - 1) // s + 1)
        for i, r, lo, hi, s, d in zip(inputs, filters, lows, highs, strides, dilations, strict=True)
    )
    fields = dict(
        name=f"conv{rank}d_{role}",
        role=role,
        B=B,
        N=N,
        G=G,
        C=C,
        K=K,
        input=inputs,
        filter=filters,
        output=outputs,
        stride=strides,
        low=lows,
        filter_dilation=dilations,
        dtypes=("bf16",) * 3,
        precision="tf32",
        arch=90,
    )
    return ConvProblem(**{**fields, **others})  # type: ignore[arg-type]


def random_problem(rng: random.Random) -> ConvProblem:
    role, rank = rng.choice(ROLES), rng.choice((1, 2, 3))

    def draw(*choices):
        return tuple(rng.choice(choices) for _ in range(rank))

    return problem(
        role,
        draw(1, 3, 5, 6, 9),
        draw(1, 1, 2, 3, 4),
        B=rng.choice((1, 1, 2)),
        N=rng.choice((1, 2, 5)),
        G=rng.choice((1, 1, 2)),
        K=rng.choice((8, 16)),
        stride=draw(1, 1, 2, 3),
        low=draw(-2, -1, 0, 0, 1, 3),
        high=draw(-2, -1, 0, 0, 1, 3),
        dilation=draw(1, 1, 2, 3),
    )


def shape_of(problem: ConvProblem, slot: str) -> tuple[int, ...]:
    p = problem
    return {
        "x": (p.B, p.N, *p.input, p.G, p.C),
        "w": (p.B, p.G, p.K, *p.filter, p.C),
        "y": (p.B, p.N, *p.output, p.G, p.K),
    }[slot]


def truth(problem: ConvProblem, operands) -> np.ndarray:
    def incidence(axis):
        i, r, p = np.ogrid[: problem.input[axis], : problem.filter[axis], : problem.output[axis]]
        meets = problem.stride[axis] * p + problem.filter_dilation[axis] * r == i + problem.low[axis]
        return meets.astype(np.float64)

    terms = ",".join([*(SLOTS[slot] for slot in operands), "DTO", "HRP", "WSQ"])
    return np.einsum(f"{terms}->{SLOTS[OPEN[problem.role]]}", *operands.values(), *map(incidence, range(3)), optimize=True)


def gathered(problem: ConvProblem, parts: list[Part], splits: int, operands) -> np.ndarray:
    """What the kernels compute of the parts: a matrix product of what TMA reads through the boxes, stored as a matrix."""
    role, p = problem.role, problem
    result = np.full((splits * np.prod(shape_of(p, OPEN[role])),), np.nan)
    arrays = {slot: array.ravel() for slot, array in operands.items()}

    def store(matrix, rows):
        places = rows[:, None] + np.arange(matrix.shape[1])
        assert np.isnan(result[places]).all(), "stored twice"
        result[places] = matrix

    def pixels(first, images, sizes, steps, whole, channels):
        """Offsets of the pixels of a view."""
        n, d, h, w = np.ix_(range(images), *(range(0, step * size, step) for size, step in zip(sizes, steps, strict=True)))
        return (first + (((n * whole[0] + d) * whole[1] + h) * whole[2] + w) * p.G * channels).ravel()

    def box(slot, part, channels):
        """(pixels, taps, channels) read of `slot`, and zeros outside its view."""
        whole = p.output if slot == "y" else p.input
        targets = [b.input if slot == "y" else b.output for b in part.boxes]
        sources = [b.output if slot == "y" else b.input for b in part.boxes]
        strides = (1, 1, 1) if slot == "y" else p.stride
        at = []
        for b, size, count, stride in zip(part.boxes, sources, targets, strides, strict=True):
            assert (size + b.upper - b.lower - 1) // stride + 1 == count, "TMA walks through another number of pixels"
            at.append(b.lower + b.first_offset + stride * np.arange(count)[:, None] + b.tap_stride * np.arange(b.filter))
        d, h, w = (
            at[0][:, None, None, :, None, None],
            at[1][None, :, None, None, :, None],
            at[2][None, None, :, None, None, :],
        )
        inside = (d >= 0) & (d < sources[0]) & (h >= 0) & (h < sources[1]) & (w >= 0) & (w < sources[2])
        pixel = np.where(inside, (d * whole[1] + h) * whole[2] + w, 0)
        image = np.arange(part.N)[:, None, None, None, None, None, None] * int(np.prod(whole))
        places = getattr(part, slot) + (image + pixel)[..., None] * p.G * channels + np.arange(channels)
        return (arrays[slot][places] * inside[..., None]).reshape(part.N * int(np.prod(targets)), -1, channels)

    for part in parts:
        y = pixels(part.y, part.N, [b.output for b in part.boxes], (1, 1, 1), p.output, p.K)
        x = pixels(part.x, part.N, [b.input for b in part.boxes], [b.pixel for b in part.boxes], p.input, p.C)
        k, t, r, s, c = np.ix_(range(p.K), *(range(0, b.tap * b.filter, b.tap) for b in part.boxes), range(p.C))
        w = (part.w + (((k * p.filter[0] + t) * p.filter[1] + r) * p.filter[2] + s) * p.C + c).reshape(p.K, -1, p.C)
        if role == "wgrad":
            of_y = arrays["y"][y[:, None] + np.arange(p.K)]
            store(np.einsum("mk,mtc->ktc", of_y, box("x", part, p.C)).reshape(p.K, -1), w[:, 0, 0])
        elif role == "fprop":
            store(np.einsum("mtc,ktc->mk", box("x", part, p.C), arrays["w"][w]), y)
        elif w.size == 0:
            store(np.zeros((len(x), p.C)), x)
        else:
            store(np.einsum("mtk,ktc->mc", box("y", part, p.K), arrays["w"][w]), x)
    return result.reshape((splits, *shape_of(p, OPEN[role]))).sum(0)


CASES = {
    "causal": problem("fprop", (13,), (4,), N=2, low=3),
    "strided, padded unevenly": problem("fprop", (8, 7), (3, 2), N=2, stride=(2, 3), low=(1, 0), high=(0, 2)),
    "rows that no stride reaches": problem("fprop", (8, 8), (1, 1), stride=3),
    "crop": problem("fprop", (9, 9), (3, 3), low=(-2, 1), high=(-3, -1)),
    "groups and batched filters": problem("fprop", (5, 4), (3, 3), B=2, N=2, G=3, K=16, low=1, high=1),
    "3-D, dilated": problem("fprop", (5, 6, 4), (2, 3, 2), low=(1, 2, 0), high=(0, 1, 1), dilation=(2, 2, 1)),
    "dgrad": problem("dgrad", (6, 7), (3, 2), N=2, low=(1, 0), high=(1, 1)),
    "dgrad, output cropped at its end": problem("dgrad", (9,), (2,), high=-3),
    "dgrad, dilated, groups": problem("dgrad", (6, 5, 4), (2, 2, 3), G=2, low=(1, 2, 3), high=(1, 0, 1), dilation=(1, 2, 2)),
    "dgrad of a crop": problem("dgrad", (9, 8), (3, 2), N=2, low=(-2, 1), high=(-3, -1)),
    "dgrad, strided": problem("dgrad", (9, 8), (3, 3), N=2, stride=2, low=1, high=(1, 0)),
    "dgrad, strided, 1x1": problem("dgrad", (7, 6), (1, 1), N=2, stride=2),
    "dgrad, strided along one axis": problem("dgrad", (13,), (4,), N=2, stride=3, low=1, high=2),
    "dgrad, strided, dilated, groups": problem("dgrad", (5, 6, 7), (2, 3, 3), G=2, stride=(1, 2, 4), low=(1, 2, 0), dilation=(2, 1, 2)),
    "wgrad": problem("wgrad", (6, 7), (3, 3), N=3, K=16, low=1, high=1),
    "wgrad, strided, groups": problem("wgrad", (9, 7), (3, 3), B=2, N=2, G=2, stride=2, low=(0, 1), high=1),
    "wgrad of one long image": problem("wgrad", (37,), (5,), low=4, dilation=2),
    "wgrad, 3-D": problem("wgrad", (4, 3, 6), (2, 3, 2), N=2, low=(1, 1, 0), high=(0, 1, 1), dilation=(1, 1, 2)),
    "wgrad of a crop": problem("wgrad", (9, 8), (2, 2), N=2, low=(-1, 1), high=-2),
}


def exact(problem: ConvProblem, config: ConvConfig) -> None:
    rng = np.random.default_rng(0)
    slots = [slot for slot in SLOTS if slot != OPEN[problem.role]]
    operands = {slot: rng.integers(-3, 4, shape_of(problem, slot)).astype(np.float64) for slot in slots}
    parts = plan(problem, config)
    assert not isinstance(parts, str), parts
    np.testing.assert_array_equal(gathered(problem, parts, config.splits, operands), truth(problem, operands))


@pytest.mark.parametrize("name", CASES)
def test_boxes_gather_what_the_definition_asks_for(name):
    case = CASES[name]
    assert refuses(case) is None
    for splits in sorted({config.splits for config in candidates(case)}):
        exact(case, ConvConfig(tile_m=128, tile_n=64, cluster=2, splits=splits))


def test_boxes_of_random_problems():
    rng = random.Random(0)
    taken = 0
    for _ in range(400):
        case = random_problem(rng)
        if 0 in case.output:
            continue
        configs = candidates(case)
        if reason := refuses(case):
            assert plan(case, configs[0]) == f"conv: {reason}"
            continue
        taken += 1
        exact(case, rng.choice(configs))
        for config in configs:
            assert not isinstance(plan(case, config), str), (case, config)
    assert taken > 200


REFUSED = {
    "input dilation": (problem("fprop", (8, 8), (3, 3), input_dilation=(1, 2, 1)), "input dilation of 2"),
    "many phases": (problem("dgrad", (8, 8), (3, 3), stride=8, G=9), "64 phases of the strides in each of 9 groups"),
    "long stride": (problem("fprop", (32, 32), (16, 16), stride=16), "stride of 16"),
    "input channels": (problem("fprop", (8, 8), (3, 3), C=12), "12 channels"),
    "output channels": (problem("wgrad", (8, 8), (3, 3), K=4), "4 channels"),
    "many groups": (problem("fprop", (8, 8), (3, 3), G=13, B=5), "65 groups"),
    "3-D, wide filter": (problem("fprop", (40, 4, 4), (33, 1, 1), low=(16, 0, 0), high=(16, 0, 0)), "dilated filter of 33 on axis D"),
    "3-D, far taps without padding": (problem("fprop", (40, 4, 4), (18, 1, 1)), "corners 0 and -17"),
    "2-D, far padding": (problem("fprop", (8, 8), (200, 1), low=(199, 0)), "corners -199"),
    "1-D, far dilation": (problem("fprop", (70000,), (2,), low=0, dilation=65535), "dilated filter of 65536"),
    "only padding": (problem("fprop", (4,), (2,), low=9, high=-6), "lies in the padding"),
    "pixels": (problem("fprop", (1 << 15, 1 << 15), (1, 1), N=2), "pixels"),
    "elements": (problem("fprop", (1 << 15, 1 << 10), (1, 1), C=1 << 16), "elements"),
    "blocks": (problem("wgrad", (200, 200), (100, 100), C=448), "70000 blocks"),
    "outputs": (problem("fprop", (4,), (1,), K=1 << 23), "131072 blocks"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_why(name):
    case, reason = REFUSED[name]
    said = refuses(case)
    assert reason in (said or "")
    assert plan(case, ConvConfig(tile_m=128, tile_n=64, cluster=2)) == f"conv: {said}"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"arch": 80}, "compute capability is 8.0"),
        ({"arch": 100}, "compute capability is 10.0"),
        ({"dtypes": ("fp32", "fp32", "fp32")}, "the operands are fp32"),
        ({"dtypes": ("bf16", "fp16", "bf16")}, "the operands are bf16 and fp16"),
        ({"dtypes": ("bf16", "bf16", "fp16")}, "the result is fp16"),
        ({"name": "conv4d_fprop"}, "4 spatial axes"),
        ({"dtypes": ("fp16", "fp16", "fp32")}, None),
        ({"N": 0}, None),
        ({"C": 2**31}, "2^31"),
    ],
)
def test_what_the_call_may_be(changes, reason):
    got = refuses(dataclasses.replace(CASES["causal"], **changes))
    assert got is None if reason is None else reason in (got or "")


@pytest.mark.parametrize(
    ("changes", "splits", "words"),
    [
        ({}, 0, "splits=0"),
        ({}, 65, "splits=65"),
        ({"N": 2}, 5, "splits is 5"),
        ({"N": 1}, 7, "splits is 7"),
        ({"role": "fprop"}, 2, "splits is 2"),
        ({"G": 40}, 2, "G=40 splits=2"),
    ],
)
def test_splits_that_cannot_be(changes, splits, words):
    case = dataclasses.replace(problem("wgrad", (6, 6), (1, 1)), **changes)
    reason = plan(case, ConvConfig(tile_m=128, tile_n=64, cluster=2, splits=splits))
    assert isinstance(reason, str) and words in reason


def test_sizes_that_no_array_has_are_refused():
    config = ConvConfig(tile_m=128, tile_n=64, cluster=2)
    case = CASES["causal"]
    huge = 2**62
    for name in ("B", "N", "G", "C", "K"):
        for size in (-8, 2**31, huge):
            assert isinstance(plan(dataclasses.replace(case, **{name: size}), config), str)
    for name in GEOMETRY:
        for size in (-huge, 2**31, huge):
            assert isinstance(plan(dataclasses.replace(case, **{name: (1, 1, size)}), config), str), (name, size)


def test_arrays_beyond_counting_are_refused():
    config = ConvConfig(tile_m=128, tile_n=64, cluster=2)
    size = 2**30
    case = dataclasses.replace(CASES["causal"], N=size, C=size, K=size, input=(1, 1, size), output=(1, 1, size), filter=(1, 1, size))
    assert "2^39" in str(plan(case, config))


def test_an_empty_result_has_no_parts():
    config = ConvConfig(tile_m=128, tile_n=64, cluster=2)
    assert plan(dataclasses.replace(CASES["causal"], N=0), config) == []
    assert isinstance(plan(dataclasses.replace(CASES["causal"], C=0), config), str)
    assert pick(dataclasses.replace(CASES["wgrad"], N=0)).splits == 1


EMPTY = {  # shapes of x and w, and padding
    "nothing": ((2, 5, 5, 8), (3, 3, 8, 8), 1),
    "no image": ((0, 5, 5, 8), (3, 3, 8, 8), 1),
    "no output": ((2, 2, 5, 8), (3, 3, 8, 8), 0),
    "no input": ((2, 0, 5, 8), (3, 3, 8, 8), 2),
    "no channel": ((2, 5, 5, 0), (3, 3, 0, 8), 1),
    "no tap": ((2, 5, 5, 8), (0, 3, 8, 8), 1),
}


@pytest.mark.skipif(cuda_binding.missing() is not None, reason=f"no CUDA kernels: {cuda_binding.missing()}")
@pytest.mark.parametrize("name", EMPTY)
def test_where_an_array_is_empty_nothing_is_called(name):
    """XLA fails when it captures a call that launches nothing into a CUDA graph; and a sum of nothing is zeros, which no kernel writes."""
    x, w, padding = EMPTY[name]

    def total(x, w):
        y = jaxext.conv_general_dilated(x, w, (1, 1), ((padding, padding),) * 2, dimension_numbers=NHWC, implementation="cuda")
        return jnp.sum(y, dtype=jnp.float32)

    calls = custom_calls(jaxext.lower_for(jax.value_and_grad(total, (0, 1)), struct(*x), struct(*w), arch="sm_90a"))
    assert calls.total() == (3 if name == "nothing" else 0)


@pytest.mark.skipif(cuda_binding.missing() is not None, reason=f"no CUDA kernels: {cuda_binding.missing()}")
def test_a_network_with_strides_trains_with_cuda_named_for_all_of_it():
    """It was refused in the backward pass."""

    def loss(filters, x):
        stem, shortcut, crop, up = filters
        conv = lambda x, w, stride, padding, **given: jaxext.conv_general_dilated(
            x, w, stride, padding, dimension_numbers=NHWC, implementation="cuda", **given
        )
        y = jnp.tanh(conv(x, stem, (2, 2), "SAME"))
        y = conv(y, shortcut, (2, 2), "VALID", feature_group_count=2)
        y = conv(y, crop, (3, 1), ((-1, 1), (0, -2)), rhs_dilation=(1, 2))
        return jnp.sum(conv(y, up, (1, 1), "SAME"), dtype=jnp.float32)

    filters = [struct(3, 3, 8, 32), struct(1, 1, 16, 64), struct(2, 3, 64, 16), struct(3, 3, 16, 8)]
    lowered = jaxext.lower_for(jax.value_and_grad(loss, (0, 1)), filters, struct(2, 64, 48, 8), arch="sm_90a")
    assert custom_calls(lowered) == {f"jaxext_conv2d_{role}_v1": calls for role, calls in dict(fprop=4, dgrad=4, wgrad=4).items()}
    assert "stablehlo.convolution" not in lowered.as_text()


def test_phases_cost_no_more_than_the_strides_save():
    """The taps of all phases together are those of the filter, so a stride of 2 costs a quarter of none."""
    image = {"N": 64, "C": 256, "K": 256, "low": 1}
    dense, strided = (problem("dgrad", (56, 56), (3, 3), stride=stride, high=1, **image) for stride in (1, 2))
    config = pick(dense)
    assert cuda_conv.clocks(strided, config) < cuda_conv.clocks(dense, config) / 3


def test_the_narrow_tile_is_for_few_channels():
    image = {"N": 64, "low": 1, "high": 1}
    assert pick(problem("fprop", (56, 56), (3, 3), C=64, K=64, **image)).tile_n == 64
    assert pick(problem("dgrad", (56, 56), (3, 3), C=64, K=256, **image)).tile_n == 64
    assert pick(problem("fprop", (28, 28), (3, 3), C=256, K=256, **image)).tile_n == 128
    assert pick(problem("wgrad", (28, 28), (3, 3), C=256, K=256, **image)).tile_n == 128


def test_the_large_tile_is_for_many_tiles():
    few, many = (problem("fprop", (28, 28), (3, 3), C=128, K=128, N=N, low=1, high=1) for N in (4, 256))
    assert (pick(few).tile_m, pick(many).tile_m) == (128, 256)
    sequence = problem("fprop", (8192,), (3,), C=256, K=256, N=8, low=2)
    assert (pick(sequence).tile_m, pick(sequence).tile_n) == (128, 256)
    half_empty = problem("fprop", (56, 56), (3, 3), C=64, K=64, N=64, low=1, high=1)
    assert pick(half_empty).tile_n == 64


def test_few_tiles_are_split_until_the_device_is_full():
    few = pick(problem("wgrad", (56, 56), (3, 3), N=64, C=64, K=64, low=1, high=1))
    assert 132 - 10 < 10 * few.splits <= 132  # nine taps by pairs
    many = pick(problem("wgrad", (14, 14), (3, 3), N=64, C=2048, K=2048, low=1, high=1))
    assert many.splits == 1
    sequence = pick(problem("wgrad", (1 << 16,), (3,), N=1, C=256, K=256, low=2))
    assert sequence.splits > 1


def test_others_than_wgrad_do_not_split():
    assert all(config.splits == 1 for name in CASES if "wgrad" not in name for config in candidates(CASES[name]))
