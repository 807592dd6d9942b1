"""Docstrings begin with a subject or a verb: they are sentences, not fragments that continue a name."""

import ast
import pathlib

ROOT = pathlib.Path(__file__).parents[2]
FOLDERS = ("jaxext", "kernels", "benchmarks", "tests", "docs", "examples")
FRAGMENTS = frozenset(
    "about above across after against along also although among and around as at because before behind below beneath beside besides "
    "between beyond but by despite down during even exactly except for from here how however if in inside into like near nor not of off "
    "on once onto or out outside over per said since so such than that then those though through throughout to toward towards under "
    "unless until up upon via what whatever when whenever where wherever whether which whichever while who whom whose why with within "
    "without yet".split()
)


def fragments(source: str) -> list[str]:
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef))
    first_lines = ((ast.get_docstring(node) or "").partition("\n")[0] for node in nodes)
    return [line for line in first_lines if line.partition(" ")[0].strip(",:.").lower() in FRAGMENTS]


def test_docstrings_begin_with_a_subject_or_a_verb():
    found = {path: fragments(path.read_text()) for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))}
    assert len(found) > 400 and not {path: lines for path, lines in found.items() if lines}


def test_a_fragment_is_found():
    function = 'def f():\n    """{}"""\n'
    assert fragments(function.format("Of rows.")) == ["Of rows."] and fragments('"""Whether, or not."""') == ["Whether, or not."]
    assert fragments(function.format("Return rows.")) == fragments(function.format("out[i] = x[i]")) == []
