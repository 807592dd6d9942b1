"""Output of commands, as tables or as one JSON document, and their exceptions."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import shutil
import sys
import tempfile

from jaxext._messages import aligned, plain

SHORT = 16  # cells of at most this many characters are not folded while the others have room
# By colour, on a terminal.
WORDS = {
    "bold red": r"(?m)^(WRONG|CRASH)(?=:)|\b[1-9]\d* (wrong|crash|by nothing)\b",
    "yellow": r"(?m)^SLOW(?=:)|\b\d+ slow\b|\b(not available|refused)\b",
    "green": r"\bno issue\b|\bpreferred\b|\b[1-9]\d* (rewritten|right)\b",
}
LEAST_WIDTH = 40  # minimum columns, even if the terminal reports fewer


class UsageError(Exception):
    """The request names something that does not exist.  The message is a sentence."""


class Failure(Exception):
    """The request cannot be done on this machine.  The message is a sentence."""


def failed(sentence: str) -> int:
    """Print the reason for a failure, and return the exit status."""
    print(f"python -m jaxext: {sentence}", file=sys.stderr)
    return 1


def says_json(command: argparse._ActionsContainer) -> None:
    command.add_argument(
        "--json",
        nargs="?",
        const="-",
        type=json_path,
        metavar="PATH",
        help='write JSON to stdout instead of tables ("-", or no PATH), or to this file as well',
    )


def json_path(text: str) -> str:
    if text != "-" and not text.endswith(".json"):  # an argument after a bare --json would be parsed as its path
        raise argparse.ArgumentTypeError(f'{text!r} is not a path that ends in .json, nor "-" (put a bare --json last)')
    return text


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


@dataclasses.dataclass(frozen=True)
class Grid:
    title: str
    columns: tuple[str, ...]
    rows: list[tuple]


def make_folders(options) -> None:
    """Create the folder of the output file, and check that the file can be written, before hours of work."""
    if (path := getattr(options, "json", None)) in (None, "-"):
        return
    try:
        pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--json: {error}") from None
    if not _can_be_written(pathlib.Path(path)):
        raise UsageError(f"--json: {path} cannot be written")


def _can_be_written(path: pathlib.Path) -> bool:
    """Tests by creating a file beside it: permissions are not sufficient, for example in /proc."""
    if path.exists():
        return os.access(path, os.W_OK) and not path.is_dir()
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            return True
    except OSError:
        return False


def tell(options, document: dict, *tables: Grid | str) -> None:
    text = json.dumps(plain(document), indent=1) + "\n"
    if options.json == "-":
        sys.stdout.write(text)
        return
    if options.json:
        try:
            pathlib.Path(options.json).write_text(text)
        except OSError as error:
            raise Failure(f"--json: {error}") from None
    show(*tables)


def show(*tables: Grid | str) -> None:
    """Print tables and texts.  On a terminal cells are folded to fit, long ones first, and a few words have a colour (unless NO_COLOR is
    set); otherwise each row is one line of any length."""
    draw = _fitted if sys.stdout.isatty() else as_lines
    for table in tables:
        print(draw(table), end="\n\n" if table is not tables[-1] else "\n")


def as_lines(table: Grid | str) -> str:
    if isinstance(table, str):
        return table
    rows = [[" ".join(str(cell).splitlines()) for cell in cells] for cells in (table.columns, *table.rows)]
    return "\n".join([table.title, *(aligned(rows) if table.columns else [])])


def _coloured(text: str):
    import rich.text

    coloured = rich.text.Text(text)
    for colour, words in WORDS.items():
        coloured.highlight_regex(words, colour)
    return coloured


def _fitted(table: Grid | str) -> str:
    import rich.box
    import rich.console
    import rich.table

    columns = max(LEAST_WIDTH, shutil.get_terminal_size().columns)
    console = rich.console.Console(width=columns, markup=False, emoji=False, highlight=False)
    if isinstance(table, str):
        with console.capture() as captured:
            console.print(_coloured(table), soft_wrap=True, end="")
        return captured.get()
    shown = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    widths = [max(len(str(cell)) for cell in cells) for cells in zip(table.columns, *table.rows, strict=True)]
    roomy = sum(width + 2 for width in widths if width <= SHORT) <= console.width * 2 / 3
    for column, width in zip(table.columns, widths, strict=True):
        shown.add_column(column, overflow="fold", no_wrap=roomy and width <= SHORT)
    for row in table.rows:
        shown.add_row(*(_coloured(str(cell)) for cell in row))
    with console.capture() as captured:
        console.print(table.title, style="bold")
        if table.columns:
            console.print(shown)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())
