"""A Griffe extension: the examples of docstrings, broken into the lines of the site's column."""

import subprocess
import sys

import griffe
import notebooks

FORMAT = ["format.docstring-code-format=true", f"format.docstring-code-line-length={notebooks.WIDTH - len('>>> ')}"]


class Doctests(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_) -> None:
        if obj.docstring and any(len(line) > notebooks.WIDTH and line.lstrip().startswith((">>>", "...")) for line in obj.docstring.lines):
            command = [sys.executable, "-m", "ruff", "format", "--isolated", *(word for one in FORMAT for word in ("--config", one)), "-"]
            text = f'r"""\n{obj.docstring.value}\n"""\n'
            done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
            obj.docstring.value = done.stdout.removeprefix('r"""').strip().removesuffix('"""')
