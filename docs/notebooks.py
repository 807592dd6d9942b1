"""The best examples as notebooks with their outputs: docs/notebooks/*.ipynb, which the site shows.

    make notebooks
    python docs/notebooks.py [NAME ...]

A notebook is the example's own source, cut at its `# ---` lines, and the call of its `main`.  Notebooks are executed when they are made,
not when the site is built, which needs no jax; `tests/project/test_notebooks.py` compares them with the examples and runs them again.
"""

import ast
import base64
import json
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "notebooks"
WIDTH = 92  # characters of the column of the site, in a window of 1280 pixels
DRAWN = {name: f"{name}.png" for name in ("digits", "mamba", "muon", "dp_sgd", "mixture_of_experts")}


def markdown(text: str) -> dict:
    return {"cell_type": "markdown", "metadata": {}, "source": text}


def code(text: str) -> dict:
    return {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": [], "source": text}


def notebook(name: str) -> dict:
    """The example as a notebook without outputs.  Its last cell shows what it drew."""
    source = (ROOT / "examples" / f"{name}.py").read_text()
    tree = ast.parse(source)
    start = tree.body[0].end_lineno
    body = "\n".join(source.splitlines()[start:]).partition("\nif __name__ ==")[0]
    first, *titled = re.split(r"^# --- (.*)$", body, flags=re.MULTILINE)
    about = f"This is [examples/{name}.py](../../examples/{name}.py), cut into cells."
    cells = [markdown(f"# {name}\n\n{ast.get_docstring(tree)}\n\n{about}"), code(first.strip())]
    for title, text in zip(titled[::2], titled[1::2], strict=True):
        cells += [markdown(f"## {title[0].upper()}{title[1:]}"), code(text.strip())]
    cells += [
        markdown("## Run it"),
        code(f'assert main(["--plot", "{DRAWN[name]}"]) == 0'),
        code(f'from IPython.display import Image\n\nImage("{DRAWN[name]}")'),
    ]
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return {"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 4}


def executed(name: str) -> dict:
    """The notebook with what its cells print and draw."""
    import nbformat
    from nbclient import NotebookClient

    with tempfile.TemporaryDirectory() as folder:
        made = nbformat.from_dict(notebook(name))
        NotebookClient(made, timeout=600, resources={"metadata": {"path": folder}}, record_timing=False).execute()
    for cell in made.cells:
        if cell.cell_type == "code":
            cell.execution_count = None
            cell.outputs = shown(cell.outputs)
    return made


def shown(outputs: list[dict]) -> list[dict]:
    """Return the text that a cell prints, in one piece, and its pictures, without progress bars and warnings."""
    text = "".join("".join(output["text"]) for output in outputs if output.get("name") == "stdout")
    pictures = [output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    return [
        *([{"output_type": "stream", "name": "stdout", "text": text}] if text else []),
        *({"output_type": "display_data", "metadata": {}, "data": {"image/png": picture.strip()}} for picture in pictures),
    ]


def page(path: pathlib.Path) -> tuple[str, dict[str, bytes]]:
    """A stored notebook as Markdown, and its pictures by name.  Code is broken into the lines of the site's column."""
    parts, pictures = [], {}
    for cell in json.loads(path.read_text())["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{formatted(text)}\n```")
        for output in cell.get("outputs", []):
            if "text" in output:
                parts.append(f"```text\n{''.join(output['text']).strip(chr(10))}\n```")
            else:
                name = f"{path.stem}_{len(pictures)}.png"
                pictures[name] = base64.b64decode("".join(output["data"]["image/png"]))
                parts.append(f"![What the example draws]({name})")
    title, _, body = "\n\n".join(parts).partition("\n")
    return f'{title}\n\n<div class="notebook" markdown>\n{body}\n\n</div>\n', pictures


def formatted(text: str) -> str:
    command = [sys.executable, "-m", "ruff", "format", "--line-length", str(WIDTH), "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or DRAWN:
        (FOLDER / f"{name}.ipynb").write_text(json.dumps(executed(name), indent=1) + "\n")
        print(FOLDER / f"{name}.ipynb")
