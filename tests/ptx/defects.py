"""Defects planted in PTX, and what is said of them."""

import re

import pytest
from ptxsim import EARLY, LATE, Fault

WRONG = "is wrong|are wrong|never written"  # what `harness.check` says
TWICE = "each element is written once"


def rows(defects):
    """Return a test's rows, one for each place of a defect: "call", or "call #2" for one of several in the call's kernel."""
    found = []
    for name, (pattern, replacement, wanted, places) in defects.items():
        for place in places.split(", "):
            call, _, which = place.partition(" #")
            found.append(pytest.param(call, pattern, replacement, int(which) if which else None, wanted, id=f"{place}: {name}"))
    return found


def planted(ptx, name, pattern, replacement, which) -> str:
    """The PTX with the pattern replaced in that kernel, everywhere or in one place."""
    entry = re.search(rf"\.entry {name}\b", ptx)
    assert entry, f"no kernel is called {name}"
    begin = entry.start()
    following = ptx.find(".entry ", begin + 1)
    end = len(ptx) if following < 0 else following
    kernel = ptx[begin:end]
    places = list(re.finditer(pattern, kernel))
    assert places, f"{pattern} is not in {name}"
    for place in reversed(places if which is None else [places[which]]):
        kernel = kernel[: place.start()] + place.expand(replacement) + kernel[place.end() :]
    return ptx[:begin] + kernel + ptx[end:]


def said(run) -> str:
    """Return the error of a run, late or early; "" for none."""
    for when in (LATE, EARLY):
        try:
            run(when)
        except (Fault, AssertionError) as error:
            return str(error)
    return ""
