"""The pages fit the site's column: no line of code is longer, and each column of a table has a head."""

import pathlib
import re

import pytest
from test_docs_pages import of_docs, tables

notebooks = of_docs("notebooks")
ROOT = pathlib.Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^( *)```[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
RULE = re.compile(r"^\|[-:| ]+\|$")


def code(text: str) -> list[str]:
    """The lines of blocks of code, those in lists with their indent."""
    blocks = [line for block in BLOCK.finditer(text) for line in block[2].splitlines()]
    return blocks + [line[4:] for line in BLOCK.sub("", text).splitlines() if line.startswith("    ")]


def unheaded(text: str) -> list[str]:
    lines = text.splitlines()
    heads = (head for head, rule in zip(lines, lines[1:], strict=False) if RULE.match(rule) and head.startswith("|"))
    return [head for head in heads if not all(cell.strip() for cell in head.strip("|").split("|"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_fits_the_column(page):
    text = tables.expanded(page.read_text(), str(page.parent.relative_to(ROOT)).removeprefix("docs").strip("/."))
    assert [line for line in code(text) if len(line) > notebooks.WIDTH] == []
    assert unheaded(text) == []


def test_what_does_not_fit_is_noticed():
    long, table = "x" * (notebooks.WIDTH + 1), "| a | {} |\n|---|--:|\n| 1 | |\n"
    for text in (f"```python\n{long}\n```", f"```\na\n{long}\n```", f"- a\n\n  ```bash\n  {long[2:]}\n  ```", f"a\n\n    {long}\n"):
        assert len(code(f"{long}\n\n{text}\n")[-1]) == notebooks.WIDTH + 1
    assert unheaded(table.format("")) == ["| a |  |"] and not unheaded(table.format("b"))


def tabs(text: str) -> dict[str, list[str]]:
    """The pages of each tab of the site."""
    sections = re.split(r"^  - ", text.partition("\nnav:")[2], flags=re.MULTILINE)[1:]
    return {section.partition(":")[0]: re.findall(r"\S+\.md", section) for section in sections}


def test_no_sidebar_is_long_and_all_pages_are_found():
    found = tabs((ROOT / "mkdocs.yml").read_text())
    pages = [page for tab in found.values() for page in tab]
    assert max(map(len, found.values())) <= 20 and len(found) <= 10 and len(pages) == len({*pages})
    docs = ROOT / "docs"
    files = {path.relative_to(docs).as_posix() for path in {*docs.rglob("*.md")} - {*docs.glob("upstream/xla-*.md")}}  # less reports
    generated = {"index.md", "changes.md", "citing.md", *(f"notebooks/{path.stem}.md" for path in notebooks.FOLDER.glob("*.ipynb"))}
    assert {*pages} == files | generated
    assert tabs("a: b\nnav: # c\n  - A: a.md\n  - B:\n      - b.md\n      - C: c/d.md\n") == {"A": ["a.md"], "B": ["b.md", "c/d.md"]}
