"""Links of the documentation lead somewhere: files and anchors that are linked to exist, and so do the repository's paths in backticks."""

import ast
import pathlib
import re
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
NAMED = re.compile(r"`((?:tests|docs|examples|benchmarks|csrc|jaxext|kernels|\.ci)/[\w./-]+)`")


def anchors(text):
    """Return the anchors of the headings, as GitHub and MkDocs make them; each numbers a repeated heading in its own way."""
    titles = re.findall(r"^#+ +(.*?) *$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[ -]+", "-", re.sub(r"[^\w\- ]", "", LINK.sub(r"\1", title)).strip().lower()) for title in titles}


def broken(page: pathlib.Path, text: str) -> list[str]:
    prose = FENCE.sub("", text)
    found = [path for path in NAMED.findall(prose) if not (ROOT / path).exists()]
    for _, link in LINK.findall(prose):
        if re.match(r"https?://|mailto:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or not target.resolve().is_relative_to(ROOT):
            found.append(link)
        elif anchor and (target.suffix != ".md" or anchor not in anchors(text if target == page else target.read_text())):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of(page):
    assert broken(page, page.read_text()) == []


def test_what_is_broken_is_noticed():
    page = ROOT / "docs" / "benchmarks.md"
    good = "# A *new* `one`, here\n[a](#a-new-one-here) [b](../README.md) [c](scaling.md#layers) ![d](cpu.svg) `tests/conftest.py` [e](https://x.y)"
    assert broken(page, good) == []
    bad = ["#nowhere", "none.md", "scaling.md#nowhere", "../none.md", "tests/none.py"]
    text = "# Title\n" + " ".join(f"[a]({link})" for link in bad[:-1]) + " `tests/none.py`\n"
    assert sorted(broken(page, text)) == sorted(bad)
    assert broken(page, "```\n[a](none.md)\n```\n") == []


def messages(code: str) -> list[str]:
    """The texts of a module, without docstrings."""
    tree = ast.parse(code)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in prose)
    return [node.value for node in texts if isinstance(node.value, str)]


def test_no_message_names_a_file_that_an_installed_package_lacks():
    """The doctor said "See docs/doctor.md"; it says the address now."""
    home = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"] + "/blob/main/"
    path, found, addresses = re.compile(r"\b(?:docs|tests|examples|csrc)/"), [], []
    for file in (file for room in ("jaxext", "kernels", "benchmarks") for file in (ROOT / room).rglob("*.py")):
        if path.search(code := file.read_text()):
            texts = messages(code)
            addresses += [text for text in texts if text.startswith(home)]
            found += [(file.name, text) for text in texts if path.search(re.sub(rf"{home}\S*", "", text))]
    assert found == [] and addresses and all((ROOT / text.removeprefix(home)).exists() for text in addresses)
