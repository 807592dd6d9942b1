"""The geometry of split convolutions, tap by tap: which row of the image each output of each part meets."""

import itertools

import numpy as np
import pytest

from jaxext.core.window import Window, dilate, meetings
from jaxext.parallel.shards import Part, halo


def geometries(count):
    """Windows of one axis and a number of parts that divides input and output; few in a hundred random ones are such."""
    rng = np.random.default_rng(0)
    draw = lambda low, high: int(rng.integers(low, high))
    while count:
        parts = draw(1, 9)
        window = Window(
            input=(parts * draw(0, 7),),
            filter=(draw(1, 6),),
            stride=(draw(1, 4),),
            padding=((draw(-4, 8), draw(-4, 8)),),
            input_dilation=(draw(1, 4),),
            filter_dilation=(draw(1, 4),),
        )
        if window.output[0] % parts == 0:
            count -= 1
            yield window, parts


GEOMETRIES = list(geometries(600))


def row(window, p, r):
    """The row of the image that tap r of output p meets, or None for a zero."""
    j, rest = divmod(window.stride[0] * p + window.filter_dilation[0] * r - window.padding[0][0], window.input_dilation[0])
    return j if rest == 0 and 0 <= j < window.input[0] else None


def row_of_part(window, part, held, i, p, r):
    """The same for output p of part i, back through the steps in which `Part` says that it is computed."""
    t, rest = divmod(window.stride[0] * p + window.filter_dilation[0] * r - part.padding[0], part.input_dilation)
    if rest or not 0 <= t < part.rows:
        return None
    (low, high), (below, above) = part.halo, part.margin
    start = part.first + part.step * i
    surrounded = dilate(low + held + high, part.dilation)
    assert 0 <= start and start + part.rows <= below + surrounded + above, "dynamic_slice would move what lies outside"
    j, rest = divmod(start + t - below, part.dilation)
    j += held * i - low
    inside = rest == 0 and held * i - low <= j < held * (i + 1) + high
    return j if inside and 0 <= j < window.input[0] else None


def test_every_tap_of_every_part_meets_the_row_that_it_meets_in_the_whole():
    for window, parts in GEOMETRIES:
        part, held, each = Part.of(window, 0, parts), window.input[0] // parts, window.output[0] // parts
        span = dilate(window.filter[0], window.filter_dilation[0])
        assert max(0, sum(part.padding) + dilate(part.rows, part.input_dilation) - span + window.stride[0]) // window.stride[0] == each
        for i, p, r in itertools.product(range(parts), range(each), range(window.filter[0])):
            assert row_of_part(window, part, held, i, p, r) == row(window, i * each + p, r), (window, parts, i, p, r)


def test_the_halo_is_what_is_read_and_no_more():
    """Rows that a part reads but does not hold; between taps that leave some out, the whole stretch."""
    exact = 0
    for window, parts in GEOMETRIES:
        held, each = window.input[0] // parts, window.output[0] // parts
        low = high = 0
        for i in range(parts):
            taps = itertools.product(range(i * each, (i + 1) * each), range(window.filter[0]))
            read = [j for p, r in taps if (j := row(window, p, r)) is not None]
            low, high = max([low, *(held * i - j for j in read)]), max([high, *(j + 1 - held * (i + 1) for j in read)])
        got = halo(window, 0, parts)
        assert got[0] >= low and got[1] >= high, (window, parts)
        if window.input_dilation == window.filter_dilation == (1,) and window.filter >= window.stride:
            assert got == (low, high), (window, parts)
            exact += got != (0, 0)
    assert exact > 20


def test_pairs_that_meet_a_row_are_counted():
    for window, _ in GEOMETRIES:
        pairs = itertools.product(range(window.output[0]), range(window.filter[0]))
        assert meetings(window, 0) == sum(row(window, p, r) is not None for p, r in pairs), window


def test_the_sample_has_every_kind_of_part():
    """Parts start at the same row or not, and the zeros between rows are put there before or by the convolution."""
    kinds = {(part.step != 0, part.dilation > 1, part.input_dilation > 1) for part in (Part.of(w, 0, n) for w, n in GEOMETRIES)}
    assert kinds == {(False, False, False), (False, False, True), (True, False, False), (True, False, True), (True, True, False)}


@pytest.mark.parametrize(
    ("padding", "want"), [(((1, 1),), (1, 1)), (((2, 0),), (2, 0)), (((0, 2),), (0, 2))], ids=["same", "causal", "anticausal"]
)
def test_three_taps(padding, want):
    window = Window(input=(16,), filter=(3,), stride=(1,), padding=padding, input_dilation=(1,), filter_dilation=(1,))
    assert halo(window, 0, 8) == want
    assert halo(window, 0, 1) == (0, 0)
