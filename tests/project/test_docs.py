"""The code of the README and of every page in docs/ runs and prints what the pages say, and the faults of lax that they name are real.

A page is a script: its Python blocks run in order, in one namespace.  A `text` block right after one is what it prints, where `...` stands
for anything.  In lax-hazards.md each fault is a section, whose line "Shows on jax ..." names the versions; there its block holds, and on
the other versions that are tested it does not.
"""

import contextlib
import doctest
import importlib.util
import io
import pathlib
import re
import subprocess
import sys

import jax
import pytest
import registrations

ROOT = pathlib.Path(__file__).parents[2]
HAZARDS = ROOT / "docs" / "lax-hazards.md"
TESTED = ("0.10.2", "0.11.2", "0.12.0.1")
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
ALL = {ROOT / "README.md", *(ROOT / "docs").rglob("*.md")} - {HAZARDS}
PAGES = sorted(page for page in ALL if BLOCK.search(page.read_text()))


@pytest.fixture(autouse=True)
def as_users_run_it():
    """Run with JAX's defaults.  What a page registers ends with it."""
    with registrations.undone(), jax.enable_x64(False), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def run(text, source):
    """Yield what each block prints, and what the page says that it prints.  A block may need a missing library."""
    namespace = {"__name__": "page"}
    for block in BLOCK.finditer(text):
        if not all(map(importlib.util.find_spec, re.findall(r"^import (haiku|keras)\b", block[1], re.MULTILINE))):
            continue
        line = text[: block.start()].count("\n") + 1  # of the opening fence: tracebacks name lines of the page
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * line + block[1], source, "exec"), namespace)
        yield printed.getvalue(), block[2]


def printed_as_said(got, want):
    return doctest.OutputChecker().check_output(want, got, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_of(page):
    for got, want in run(page.read_text(), str(page)):
        assert want is None or printed_as_said(got, want), f"{page.name} says\n{want}\nand it is\n{got}"


def test_the_pages_are_found():
    assert ROOT / "README.md" in PAGES and len(PAGES) >= 8 and len(SECTIONS) >= 8


def test_another_output_is_noticed():
    ((got, want),) = run("```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n", "page")
    assert (got, want) == ("2\n", "3\n") and not printed_as_said(got, want)
    assert printed_as_said("a 1 b\n", "a ... b\n")


SECTIONS = {match[1]: match[2] for match in re.finditer(r"^### (.*?)\n(.*?)(?=^##|\Z)", HAZARDS.read_text(), re.MULTILINE | re.DOTALL)}
SHOWS = re.compile(r"^Shows on jax ([\d., and]+)\.", re.MULTILINE)
PREAMBLE = next(BLOCK.finditer(HAZARDS.read_text()))[1]


@pytest.mark.skipif(jax.__version__ not in TESTED, reason="the page says nothing of this version of jax")
@pytest.mark.parametrize("title", SECTIONS)
def test_hazard(title):
    text = SECTIONS[title]
    versions = re.findall(r"\d[\d.]*\d", SHOWS.findall(text)[0])
    assert set(versions) <= set(TESTED)
    code = PREAMBLE + next(BLOCK.finditer(text))[1]
    if "ends the process" in text:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        shows = done.returncode < 0
        assert shows or done.returncode == 0, done.stderr
    else:
        try:
            exec(compile(code, title, "exec"), {})
            shows = True
        except AssertionError:
            shows = False
    assert shows == (jax.__version__ in versions)
