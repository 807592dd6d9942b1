"""Parses a command's function, `module:function`, and its arguments, shapes or pytrees of shapes."""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import functools
import importlib
import inspect
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import jax

from jaxext._messages import DTYPES
from jaxext._target import use_target
from jaxext.cli.terminal import UsageError

_ARGUMENTS = """\"{'w': f32[3,3,8,64], 'b': f32[64]}\""""  # an example for messages


def takes_function(command: argparse.ArgumentParser, leaf: Callable[[str], Any] | None = None, **more) -> None:
    command.add_argument("function", metavar="module:function", help="function, as Python imports it from the working directory", **more)
    command.add_argument(
        "shapes",
        nargs="*",
        default=[],  # otherwise an error lists it as required
        type=functools.partial(argument, leaf=leaf),
        metavar="SHAPE",
        help=f"shape of each argument, such as f32[8,32,32,3] or bf16[128]; a pytree is a literal such as {_ARGUMENTS}",
    )
    command.add_argument(
        "--in-place-of-lax", action="store_true", help="replace lax's operations by jaxext's, as inside jaxext.in_place_of_lax()"
    )


def argument(text: str, leaf: Callable[[str], Any] | None = None) -> Any:
    """Parse a shape, or a pytree of shapes in Python or JSON syntax.  None (null) is an argument without arrays.

    Keys and shapes may be quoted or not.  `leaf` parses a shape, in place of `shape`.
    """
    leaf = leaf or shape
    if text.strip()[:1] not in ("{", "[", "(", "N", "n"):
        return leaf(text)
    # f32[] is not valid Python, so it is read as f32[()], except within quotes.
    source = re.sub(r"""('[^']*'|"[^"]*")|(\w)\[\s*\]""", lambda match: match[1] or f"{match[2]}[()]", text.strip())
    try:
        return _pytree(ast.parse(source, mode="eval").body, source, leaf)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a pytree of shapes, want one such as {_ARGUMENTS}, or [f32[8], f32[]]") from None


def _pytree(node: ast.expr | None, source: str, leaf: Callable[[str], Any]) -> Any:
    match node:
        case ast.List(elts=children):
            return [_pytree(child, source, leaf) for child in children]
        case ast.Tuple(elts=children):
            return tuple(_pytree(child, source, leaf) for child in children)
        case ast.Dict():
            keys = [_key(key, source) for key in node.keys]
            if len({*keys}) < len(keys) or len({*map(type, keys)}) > 1:
                raise argparse.ArgumentTypeError(f"{_text(node, source)!r} has a key twice, or keys of two types")
            return dict(zip(keys, (_pytree(value, source, leaf) for value in node.values), strict=True))
        case ast.Constant(value=None) | ast.Name(id="null"):
            return None
        case ast.Constant(value=str(text)):
            return leaf(text)
    return leaf(_text(node, source))


def _key(node: ast.expr | None, source: str) -> Any:
    match node:
        case ast.Name(id=key) | ast.Constant(value=str(key) | int(key)):
            return key
    raise argparse.ArgumentTypeError(f"{_text(node, source)!r} is not a dictionary key, want a name or a number")


def _text(node: ast.expr | None, source: str) -> str:
    return (node and ast.get_source_segment(source, node) or source).replace("[()]", "[]")


def shape(text: str) -> jax.ShapeDtypeStruct:
    match = re.fullmatch(r"(\w+)\[((?:\d+,)*\d+)?\]", re.sub(r"\s", "", text))
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape, want one such as f32[8,32,32,3], or f32[] for a scalar")
    dtype = {_short(name): name for name in DTYPES}.get(match[1], match[1])
    if dtype not in DTYPES:
        raise argparse.ArgumentTypeError(f"{text!r}: unknown dtype {match[1]!r}, want one of {', '.join(map(_short, DTYPES))}")
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise argparse.ArgumentTypeError(f"{text!r}: {dtype} needs JAX_ENABLE_X64=1")
    return jax.ShapeDtypeStruct([int(n) for n in (match[2] or "").split(",") if n], dtype)


def _short(dtype: str) -> str:
    """jax's abbreviation."""
    return dtype.replace("float", "f").replace("uint", "u").replace("int", "i").replace("complex", "c")


def arch(text: str) -> str:
    try:
        use_target(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def function(name: str, arguments: Iterable) -> Callable:
    """Import `module:function`, and check that it accepts these arguments."""
    where, _, attributes = name.partition(":")
    if not all(part.isidentifier() for part in [*where.split("."), *attributes.split(".")]):
        raise UsageError(f"{name!r} is not a module:function, want one such as {_from_path(where, attributes) or 'jaxext:matmul'}")
    try:
        found: Any = module(where)
    except UsageError as error:
        corrected = _from_path(where, attributes)
        raise UsageError(f"{error}; want a module, not its file: write {corrected}") if corrected else error from None
    for attribute in attributes.split("."):
        if not hasattr(found, attribute):
            raise UsageError(f"{where} has no {attributes!r}{_nearest(attribute, found)}")
        found = getattr(found, attribute)
    if not callable(found):
        raise UsageError(f"{name} is of type {type(found).__name__}, want a function")
    try:
        inspect.signature(found).bind(*arguments)
    except TypeError as error:
        raise UsageError(f"{name}: {error}; give a SHAPE for each argument") from None
    return found


def _from_path(where: str, attributes: str) -> str | None:
    """Return what to write in place of `folder/mynet.py:loss`, or None if it does not name a file."""
    path = pathlib.PurePath(where)
    parts = path.with_suffix("").parts
    return f"{'.'.join(parts)}:{attributes or 'function'}" if path.suffix == ".py" and all(map(str.isidentifier, parts)) else None


def _nearest(name: str, where: Any) -> str:
    """The function that was meant, for messages."""
    near = difflib.get_close_matches(name, dir(where))
    meant = next((each for each in near if callable(getattr(where, each, None))), None)
    return f", did you mean {meant!r}?" if meant else ""


def module(name: str) -> ModuleType:
    """Import a module that is installed or in the working directory."""
    here = None
    with contextlib.suppress(FileNotFoundError):
        here = os.getcwd()
    if here and not sys.flags.safe_path and not {"", here} & {*sys.path}:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not error.name or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module exists, but imports one that does not
        raise UsageError(f"no module {error.name!r}, {_where(here)}") from None


def _where(here: str | None) -> str:
    """Return where a module was looked for, for messages."""
    if here is None:
        return "not installed, and the working directory was deleted"
    if sys.flags.safe_path and not {"", here} & {*sys.path}:
        return f"not installed; Python runs with -P or PYTHONSAFEPATH, so {here} was not searched: add it to PYTHONPATH"
    return f"neither installed nor in {here}"
