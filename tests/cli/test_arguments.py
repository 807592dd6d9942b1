"""The function and the arguments that a command is given: shapes, pytrees of them, and where a module is looked for."""

import argparse
import json
import sys
import types

import jax
import numpy as np
import pytest

from jaxext.cli import arguments, command
from jaxext.core.choose import replacing_lax


def struct(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, np.dtype(dtype))


@pytest.mark.parametrize(("text", "tree"), [
    ("f32[8,3]", struct(8, 3)),
    ("f32[8, 3]", struct(8, 3)),
    ("f32[]", struct()),
    ("{'w': f32[3,3,8,64], 'b': f32[64]}", {"w": struct(3, 3, 8, 64), "b": struct(64)}),
    ("{w: f32[3], b: f32[]}", {"w": struct(3), "b": struct()}),
    ('{"w": "f32[3]", "b": {"c": [null, "i32[]"]}}', {"w": struct(3), "b": {"c": [None, struct(dtype="int32")]}}),
    ("[f32[8], (f32[ ],)]", [struct(8), (struct(),)]),
    ("(f32[8], None)", (struct(8), None)),
    (" {0: f32[2], 1: f32[]} ", {0: struct(2), 1: struct()}),
    ("{'a[]': f32[]}", {"a[]": struct()}),
    ("(f32[8])", struct(8)),
    ("None", None),
    ("{}", {}),
    ("[]", []),
])  # fmt: skip
def test_arguments(text, tree):
    assert arguments.argument(text) == tree


@pytest.mark.parametrize(("text", "sentence"), [
    ("{'w': f32[3}", "\"{'w': f32[3}\" is not a pytree of shapes, want one such as"),
    ("[f32[3]", "'[f32[3]' is not a pytree of shapes"),
    ("{'w': 3}", "'3' is not a shape, want one such as f32[8,32,32,3], or f32[] for a scalar"),
    ("[f32[3], x]", "'x' is not a shape"),
    ("[f33[3]]", "'f33[3]': unknown dtype 'f33'"),
    ("[*f32[3]]", "'*f32[3]' is not a shape"),
    ("{**f32[3]}", "is not a dictionary key"),
    ("{'w': f32[3], w: f32[2]}", "has a key twice, or keys of two types"),
    ("{0: f32[3], w: f32[2]}", "has a key twice, or keys of two types"),
    ("{f32[3]}", "'{f32[3]}' is not a shape"),
    ("[" * 1000 + "]" * 1000, "is not a pytree of shapes"),
    ("3", "'3' is not a shape"),
    ("__import__('os')", "is not a shape"),
])  # fmt: skip
def test_what_is_no_argument(text, sentence):
    with pytest.raises(argparse.ArgumentTypeError) as error:
        arguments.argument(text)
    assert sentence in str(error.value)


MODULE = """
import jax.numpy as jnp, jaxext

def layer(params, x):
    return jaxext.matmul(x, params["w"]) + params["b"]

def of_lax(params, xs):
    return [x @ params["w"] for x in xs]
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of the user's in the current directory, which is not on the path."""
    (tmp_path / "users_layers.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    yield tmp_path
    sys.modules.pop("users_layers", None)


PARAMS = "{'w': f32[4,5], 'b': f32[1,5]}"


def operands(capsys, *arguments):
    assert command.main([*arguments, "--json"]) == 0
    return [row["operands"] for row in json.loads(capsys.readouterr().out)["rows"]]


def test_explain_a_function_of_pytrees(capsys, module):
    assert operands(capsys, "explain", "users_layers:layer", PARAMS, "f32[3,4]") == [["a:f32[3,4]", "b:f32[4,5]"]]
    assert len(operands(capsys, "explain", "users_layers:layer", PARAMS, "f32[3,4]", "--backward")) == 3


def test_explain_in_place_of_lax(capsys, module):
    arguments = "explain", "users_layers:of_lax", "{w: f32[4,5]}", "[f32[3,4], f32[2,4]]"
    assert operands(capsys, *arguments) == []
    assert operands(capsys, *arguments, "--in-place-of-lax") == [["a:f32[3,4]", "b:f32[4,5]"], ["a:f32[2,4]", "b:f32[4,5]"]]


def test_tune_takes_the_same(capsys, module, monkeypatch):
    asked = []
    monkeypatch.setattr("jaxext.tune", lambda fun, **_: lambda *arrays: asked.append((fun.__name__, arrays, replacing_lax.value)))
    command.main(["tune", "users_layers:layer", PARAMS, "f32[3,4]", "--table", "t.json"])
    command.main(["tune", "users_layers:of_lax", "[]", "None", "--in-place-of-lax", "--table", "t.json"])
    params = {"w": struct(4, 5), "b": struct(1, 5)}
    assert asked == [("layer", (params, struct(3, 4)), False), ("of_lax", ([], None), True)]
    with pytest.raises(SystemExit):
        command.main(["tune", "--tags", "mamba", "--in-place-of-lax"])
    assert "--in-place-of-lax needs a module:function" in capsys.readouterr().err


def test_a_safe_path_is_respected(capsys, module, monkeypatch):
    """`python -P` and PYTHONSAFEPATH keep the working directory off the path, where anyone's files may lie."""
    flags = {name: getattr(sys.flags, name) for name in dir(sys.flags) if name[0] != "_" and isinstance(getattr(sys.flags, name), int)}
    monkeypatch.setattr(sys, "flags", types.SimpleNamespace(**{**flags, "safe_path": True}))
    with pytest.raises(SystemExit) as end:
        command.main(["explain", "users_layers:layer", PARAMS, "f32[3,4]"])
    assert end.value.code == 2 and str(module) not in sys.path
    (line,) = capsys.readouterr().err.splitlines()
    assert "no module 'users_layers', not installed; " in line and line.endswith("add it to PYTHONPATH")
    monkeypatch.syspath_prepend(module)
    assert len(operands(capsys, "explain", "users_layers:layer", PARAMS, "f32[3,4]")) == 1
