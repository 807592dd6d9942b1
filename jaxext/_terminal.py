"""What a command takes from the command line, and how it tells what it found: as tables, or as one JSON document.

It must not know any command.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import json
import math
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from jaxext._target import use_target

DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "bfloat16", "float32", "float64"),
    *("float8_e4m3fn", "float8_e5m2", "complex64", "complex128"),
)

SHORT = 16  # characters of a cell that is not folded while there is room for the others


class UsageError(Exception):
    """What was asked for is not there: a sentence."""


def says_json(command: argparse._ActionsContainer) -> None:
    command.add_argument(
        "--json",
        nargs="?",
        const="-",
        type=json_path,
        metavar="PATH",
        help='say it in JSON: instead of tables ("-", or no PATH), or into a file beside them',
    )


def json_path(text: str) -> str:
    if text != "-" and not text.endswith(".json"):  # an argument behind a bare --json would be taken for its path
        raise argparse.ArgumentTypeError(f'{text!r} is no path that ends in .json, nor "-" (write a bare --json last)')
    return text


def takes_function(command: argparse.ArgumentParser, **more) -> None:
    command.add_argument("function", metavar="module:function", help="as Python would import it from here", **more)
    command.add_argument("shapes", nargs="*", type=shape, metavar="SHAPE", help="of each argument, such as f32[8,32,32,3] or bf16[128]")


def shape(text: str) -> jax.ShapeDtypeStruct:
    match = re.fullmatch(r"(\w+)\[((?:\d+,)*\d+)?\]", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no shape, want one such as f32[8,32,32,3], or f32[] for a scalar")
    dtype = {_short(name): name for name in DTYPES}.get(match[1], match[1])
    if dtype not in DTYPES:
        raise argparse.ArgumentTypeError(f"{text!r}: no dtype {match[1]!r}, want one of {', '.join(map(_short, DTYPES))}")
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise argparse.ArgumentTypeError(f"{text!r}: jax has {dtype} where JAX_ENABLE_X64=1 is set")
    return jax.ShapeDtypeStruct([int(n) for n in (match[2] or "").split(",") if n], dtype)


def _short(dtype: str) -> str:
    """As jax abbreviates it."""
    return dtype.replace("float", "f").replace("uint", "u").replace("int", "i").replace("complex", "c")


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def arch(text: str) -> str:
    try:
        use_target(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def function(name: str, arguments: Iterable) -> Callable:
    """What `module:function` names, which must take these arguments."""
    module, _, attributes = name.partition(":")
    if not all(part.isidentifier() for part in [*module.split("."), *attributes.split(".")]):
        raise UsageError(f"{name!r} is no module:function, want such as examples.digits:loss")
    if not {"", os.getcwd()} & {*sys.path}:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not error.name or not f"{module}.".startswith(f"{error.name}."):
            raise  # it is there, and imports what is not
        raise UsageError(f"no module {error.name!r}, neither installed nor in {os.getcwd()}") from None
    for attribute in attributes.split("."):
        if not hasattr(found, attribute):
            raise UsageError(f"{module} has no {attributes!r}")
        found = getattr(found, attribute)
    if not callable(found):
        raise UsageError(f"{name} is of type {type(found).__name__}, want a function")
    try:
        inspect.signature(found).bind(*arguments)
    except TypeError as error:
        raise UsageError(f"{name}: {error}; give a SHAPE for each argument") from None
    return found


@dataclasses.dataclass(frozen=True)
class Table:
    title: str
    columns: tuple[str, ...]
    rows: list[tuple]


def make_folders(options) -> None:
    """Those of the files that the options name, now: not after hours of work."""
    for option in ("json", "plot", "markdown"):
        path = getattr(options, option, None)
        if path in (None, "-"):
            continue
        folder = pathlib.Path(path).parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--{option}: {error}") from None
        if not os.access(folder, os.W_OK) or pathlib.Path(path).is_dir():
            raise UsageError(f"--{option}: {path} cannot be written")


def tell(options, document: dict, *tables: Table) -> None:
    text = json.dumps(plain(document), indent=1) + "\n"
    if options.json == "-":
        sys.stdout.write(text)
        return
    if options.json:
        pathlib.Path(options.json).write_text(text)
    show(*tables)


def plain(data: Any) -> Any:
    """As JSON has it: a number that it has not, such as NaN, is a text."""
    if isinstance(data, Mapping):
        return {str(name): plain(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [plain(value) for value in data]
    if isinstance(data, float) and not math.isfinite(data) or isinstance(data, os.PathLike):
        return str(data)
    return data


def show(*tables: Table) -> None:
    """On a terminal cells are folded to fit, long ones first; elsewhere a row is a line, however long."""
    import rich.box
    import rich.console
    import rich.table

    terminal = sys.stdout.isatty()
    console = rich.console.Console(width=None if terminal else 100_000, markup=False, emoji=False, highlight=False)
    for table in tables:
        shown = rich.table.Table(box=rich.box.SIMPLE_HEAD if terminal else None, pad_edge=False)
        widths = [max(len(str(cell)) for cell in cells) for cells in zip(table.columns, *table.rows, strict=True)]
        roomy = sum(width + 2 for width in widths if width <= SHORT) <= console.width * 2 / 3
        for column, width in zip(table.columns, widths, strict=True):
            shown.add_column(column, overflow="fold", no_wrap=roomy and width <= SHORT)
        for row in table.rows:
            shown.add_row(*map(str, row))
        with console.capture() as captured:
            console.print(table.title, style="bold")
            if table.columns:
                console.print(shown)
        print("\n".join(line.rstrip() for line in captured.get().splitlines()), end="\n\n" if table is not tables[-1] else "\n")
