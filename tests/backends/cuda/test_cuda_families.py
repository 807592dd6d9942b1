"""Problems that the kernels of each family refuse and take, and the configs of a problem, before any launch: one suite over the families.

A family is a test file.  It has the module of jaxext (`FAMILY`), kernels as the compiled module lists them (`TABLE`), a small problem
(`SMALL`) and its sizes (`SIZES`), and problems: refused ones with their reasons (`REFUSED`), taken ones (`TAKEN`), those with the config
that is picked (`PICKS`), and of a depth the largest number of parts of a sum (`PARTS`).  A family of one target, whose blocks stay, may
have all that tests of calls and launches ask: `shapes` of its arrays, and cases, `right` ones, `some` large ones, one whose descriptors
are `described`, and `faults`.  Those of other families are in these tests.  Needs g++; no GPU.  The compiled module, where it is, answers
as its sources do.
"""

import dataclasses
import fnmatch
import importlib
import pathlib
from typing import Any

import cuda_cases
import host_code
import pytest

from jaxext.backends.cuda import cuda_binding
from jaxext.kernels.geometry import MOST_POSITIONS

FAMILIES: dict[str, Any] = {
    name: importlib.import_module(f"test_cuda_{name}")
    for name in sorted(cuda_cases.FAMILIES)
    if pathlib.Path(__file__).with_name(f"test_cuda_{name}.py").exists()
}
OWN = {name: family for name, family in FAMILIES.items() if hasattr(family, "shapes")}
PRODUCTS = {name: family for name, family in FAMILIES.items() if hasattr(family, "SIZES")}  # all but convolutions


def each_row(table):
    """A test of a family and what is in each row of this table, or in each element of a list."""
    cases = []
    for name, family in FAMILIES.items():
        rows = getattr(family, table, {})
        rows = rows.items() if isinstance(rows, dict) else enumerate((row,) for row in rows)
        cases += [pytest.param(family, *row, id=f"{name}-{key}") for key, row in rows]
    return pytest.mark.parametrize(["family", "problem", *([] if table == "TAKEN" else ["want"])], cases)


def answers(family, problem):
    """Return the answers of the sources and, if it is there, of the compiled module to a problem."""
    yield host_code.refuses(problem, family.FAMILY)
    if not cuda_binding.missing():
        yield family.FAMILY.refused(problem)


@each_row("REFUSED")
def test_refusals(family, problem, want):
    """A * stands for any words, such as names of dtypes of which host_code.py has no kernel."""
    for reason in answers(family, problem):
        assert fnmatch.fnmatchcase(str(reason), want)


@pytest.mark.parametrize("arch", [80, 100])
@pytest.mark.parametrize("name", FAMILIES)
def test_other_gpus_are_refused(name, arch):
    problem = dataclasses.replace(FAMILIES[name].SMALL, arch=arch)
    want = f"compute capability is {arch / 10}, the {name} kernels want 9.0"
    assert {*answers(FAMILIES[name], problem)} == {want}


@pytest.mark.parametrize("number", [2**63 - 1, -(2**63), 2**62, 2**31, -1, 0])
@pytest.mark.parametrize(("name", "label"), [(name, label) for name, family in PRODUCTS.items() for label in family.SIZES])
def test_every_number_may_be_asked_about(name, label, number, monkeypatch):
    """Nothing is launched if there is nothing to do.  The blocks of scales, I, J and S, divide the sizes."""
    family, ask = PRODUCTS[name], PRODUCTS[name].FAMILY.refusal
    monkeypatch.setattr(family.FAMILY, "refusal", lambda target, fields, *more: ask(target, fields | {label: number}, *more))
    for reason in answers(family, family.SMALL):
        if label in "IJS" or number == 0:
            assert (reason is None) == (label not in "IJS")
        else:
            assert reason == f"an axis has {number} elements, want {'0 or more' if number < 0 else f'{MOST_POSITIONS} at most'}"


@pytest.mark.skipif(cuda_binding.missing() is not None, reason=f"no CUDA kernels: {cuda_binding.missing()}")
@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 10**30])
@pytest.mark.parametrize("name", FAMILIES)
def test_numbers_beyond_64_bits_are_refused(name, number):
    family = FAMILIES[name]
    assert family.FAMILY.refused(dataclasses.replace(family.SMALL, B=number))


@each_row("TAKEN")
def test_what_is_taken(family, problem):
    """It has a config, but where there is nothing to do."""
    assert {*answers(family, problem)} == {None}
    if family in PRODUCTS.values() and min(problem.rows, problem.depth) > 0:
        assert family.FAMILY.candidates(problem, family.TABLE)


@each_row("PICKS")
def test_picks(family, problem, want):
    """A range is that of numbers of which any may be picked."""
    module, config = family.FAMILY, family.FAMILY.candidates(problem, family.TABLE)[0]
    for name, value in want.items():
        assert getattr(config, name) in (value if isinstance(value, range) else [value]), name
    clocks = [module.clocks(problem, other) for other in module.candidates(problem, family.TABLE)]
    assert family not in PRODUCTS.values() or clocks == sorted(clocks), "of convolutions tiles of which half is empty are last"


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if hasattr(family, "PARTS")])
def test_parts_are_equal_aligned_and_not_short(name):
    """Batches are not split."""
    family = FAMILIES[name]
    splits = lambda problem: {config.splits for config in family.FAMILY.candidates(problem, family.TABLE)}
    for depth, most in family.PARTS.items():
        assert splits(family.deep(depth)) == {1 << i for i in range(most.bit_length())}, depth
        assert splits(family.deep(depth, B=2)) == {1}
