"""The table of planted defects (mutations.py) is alive: each can still be planted, and the tests that it names are there."""

import re

import pytest
from mutations import ROOT, defects

DEFECTS = defects()


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: f"{defect.file}: {defect.name}")
def test_a_defect_can_be_planted(defect):
    text = (ROOT / defect.file).read_text()
    assert text.count(defect.old) == 1 and defect.new != defect.old
    if defect.file.endswith(".py"):
        compile(text.replace(defect.old, defect.new), defect.file, "exec")
    assert defect.tests
    for test in defect.tests:
        file, name = test.partition("[")[0].split("::")
        assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE), f"there is no {test}"


def test_defects_are_many_and_told_apart():
    assert len(DEFECTS) >= 32 and len({defect.name for defect in DEFECTS}) == len(DEFECTS)
    assert len({defect.file for defect in DEFECTS}) >= 32
