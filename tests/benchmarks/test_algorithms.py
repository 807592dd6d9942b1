"""Random convolutions and every algorithm for each: the draws, the specification of one, and its measurement."""

import math

import jax
import jax.numpy as jnp
import pytest

from benchmarks import algorithms
from benchmarks.algorithms import Side
from benchmarks.draws import KINDS, LEAST_WORK, MOST_WORK, draw
from benchmarks.geometry import parse

SPEC = "wgrad float32 x=2,9,8,4 w=3,3,2,8 stride=2,1 padding=1:1,0:2 groups=2"


@pytest.fixture(scope="module")
def drawn():
    return [draw(7, number) for number in range(720)]


def test_every_kind_is_drawn_in_every_role_rank_and_size(drawn):
    roles = {kind: {geometry.role for name, geometry in drawn if name == kind} for kind in KINDS}
    assert roles == {kind: {"wgrad"} if kind == "per-example" else {"fprop", "dgrad", "wgrad"} for kind in KINDS}
    assert {geometry.rank for _, geometry in drawn} == {0, 1, 2, 3}
    assert {geometry.dtype for _, geometry in drawn} == {"float32", "bfloat16"}
    works = [geometry.work for _, geometry in drawn]
    assert all(LEAST_WORK <= work <= MOST_WORK for work in works)
    assert all(any(10**n <= work < 10 ** (n + 1) for work in works) for n in (5, 6, 7, 8))


def test_a_draw_is_a_function_of_seed_and_number(drawn):
    assert [draw(7, number) for number in (0, 31)] == [drawn[0], drawn[31]]
    assert draw(8, 0) != drawn[0]


def test_specs_round_trip(drawn):
    for _, geometry in drawn:
        assert parse(str(geometry)) == geometry
    assert str(parse(SPEC)) == SPEC
    assert parse("dgrad x=1,9,9,2 w=3,3,1,2 stride=2 padding=SAME groups=2").padding == ((1, 1), (1, 1))


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("", "w: is missing"),
        ("backward x=1,4,2 w=2,2,2", "role: got 'backward'"),
        ("fprop x=1,4,2 w=2,2,2 colour=3", "colour: is no field"),
        ("fprop x=1,4,2 w=2,2,2 stride=2,2", "stride: got \\(2, 2\\), want one for each of 1"),
        ("fprop x=1,4,2 w=2,2,2 groups=2", "groups: got 2"),
    ],
)
def test_a_wrong_spec_is_an_error_that_says_where(spec, says):
    with pytest.raises(ValueError, match=says):
        parse(spec)


@pytest.mark.parametrize(
    ("spec", "work"),
    [
        ("fprop x=3,5 w=5,7", 3 * 5 * 7),
        ("fprop x=1,4,2 w=3,2,2 padding=SAME", (2 + 3 + 3 + 2) * 2 * 2),  # taps on the padding multiply nothing
        ("dgrad x=1,4,1 w=2,1,1 input_dilation=2 padding=1:1", 4 * 2),  # nor do those on a dilation's zeros
        ("wgrad x=4,4,2 w=2,2,6 batch_groups=2", 2 * 3 * 2 * 2 * 6),
        ("wgrad x=2,4,2 w=2,1,6 groups=2 batch=5 mapped=x", 5 * 2 * 3 * 2 * 6),
        ("step x=1,4,2 w=1,2,2", 3 * 4 * 2 * 2),
    ],
)
def test_work_counts_products_without_zeros(spec, work):
    assert parse(spec).work == work


@pytest.mark.parametrize(
    "spec",
    [SPEC, "dgrad x=2,6 w=3,4 groups=2 batch=2 mapped=w", "step x=1,4,2 w=1,1,2 groups=2"],
    ids=lambda spec: spec.split()[0],
)
def test_both_libraries_are_asked_for_the_same(spec):
    geometry = parse(spec)
    arguments = [jnp.arange(math.prod(shape), dtype=jnp.float32).reshape(shape) / 8 for shape in geometry.shapes]
    ours, theirs = (jax.tree.leaves(jax.jit(geometry.build(library))(*arguments)) for library in ("jaxext", "lax"))
    assert len(ours) == len(theirs) and all(jnp.allclose(a, b, rtol=1e-5) for a, b in zip(ours, theirs, strict=True))


def test_every_algorithm_is_measured():
    sides = algorithms.alternatives(parse("fprop x=1,6,2 w=2,1,2 groups=2"), 3)
    assert {"(lax)", "shifts", "lax", "dots", "loop"} <= sides.keys()
    assert all(isinstance(side, Side) and side.bytes >= 4 * (12 + 4 + 10) and side.build_ms > 0 for side in sides.values())
    lines = algorithms.lines(sides)
    assert len(lines) == len(sides) and sum(line[0] == "P" for line in lines) == 1 and "time 1.00" not in lines[0]


def test_a_wrong_algorithm_is_not_timed(monkeypatch):
    monkeypatch.setattr(algorithms, "DIFFERENT", -1)
    sides = algorithms.alternatives(parse("fprop x=1,6,2 w=2,1,2 groups=2"), 1)
    assert isinstance(sides.pop("(lax)"), Side) and all("differs from lax by" in str(why) for why in sides.values())


def test_a_wrong_line_is_an_error(capsys):
    with pytest.raises(SystemExit):
        algorithms.main(["fprop x=1,2"])
    assert "w: is missing" in capsys.readouterr().err
