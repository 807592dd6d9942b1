"""The stored notebooks are the examples of now, and their cells run and print what is stored."""

import json
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))
import notebooks  # noqa: E402

sys.path.pop(0)


def stored(name):
    return json.loads((notebooks.FOLDER / f"{name}.ipynb").read_text())


def printed(cells):
    return "".join("".join(output.get("text", "")) for cell in cells for output in cell.get("outputs", []))


def words(text):
    """Lines without what rounding may change, and without their padding."""
    return [" ".join(re.sub(r"\d[\d.]*(e[+-]\d+)?", "N", line).split()) for line in text.splitlines() if line.strip()]


def test_all_are_stored():
    assert {path.stem for path in notebooks.FOLDER.glob("*.ipynb")} == {*notebooks.DRAWN}


@pytest.mark.parametrize("name", notebooks.DRAWN)
def test_cells_are_those_of_the_example(name):
    made, kept = ([(cell["cell_type"], "".join(cell["source"])) for cell in of["cells"]] for of in (notebooks.notebook(name), stored(name)))
    assert kept == made, f"make notebooks NAMES={name}"
    *_, run, picture = stored(name)["cells"]
    assert printed([run]) and list(picture["outputs"][0]["data"]) == ["image/png"]
    assert not any("Traceback" in printed([cell]) for cell in stored(name)["cells"])


@pytest.mark.parametrize("name", notebooks.DRAWN)
def test_pages(name):
    text, pictures = notebooks.page(notebooks.FOLDER / f"{name}.ipynb")
    assert text.startswith(f"# {name}\n") and text.count("```python") >= 3 and "```text" in text
    assert list(pictures) == re.findall(r"\]\((\S+\.png)\)", text) and all(of.startswith(b"\x89PNG") for of in pictures.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", notebooks.DRAWN)
def test_cells_run_and_print_what_is_stored(name, tmp_path):
    cells = [cell for cell in stored(name)["cells"] if cell["cell_type"] == "code"]
    script = tmp_path / "cells.py"
    script.write_text("\n\n".join("".join(cell["source"]) for cell in cells[:-1]))  # the last one wants IPython
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / notebooks.DRAWN[name]).stat().st_size > 10_000
    lines = iter(words(done.stdout))
    assert [line for line in words(printed(cells)) if line not in lines] == []  # in this order
