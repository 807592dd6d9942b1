"""The way of a call that docs/architecture.md tells, hop by hop, is the one that it takes."""

import functools
import os
import pathlib
import re
import traceback

import jax
import jax.numpy as jnp
import pytest

import jaxext
from jaxext.backends.triton import triton_call
from jaxext.core.form import Form

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = os.path.dirname(jaxext.__file__)
MOST_HOPS = 15


def hops():
    """File and function of each frame of the package's own, the outermost first."""
    frames = [(os.path.relpath(frame.filename, PACKAGE), frame.name) for frame in traceback.extract_stack()]
    return [frame for frame in frames if not frame[0].startswith("..") and frame[0] != "export.py"]


def test_the_way_of_a_call(monkeypatch):
    if reason := triton_call.missing(interpreted=False):
        pytest.skip(reason)
    seen: dict[str, list] = {}

    def watched(where, name):
        original = getattr(where, name)

        def watch(*args, **kwargs):
            seen.setdefault(name, [*hops(), (os.path.relpath(original.__code__.co_filename, PACKAGE), name)])
            return original(*args, **kwargs)

        monkeypatch.setattr(where, name, watch)

    watched(Form, "bind")
    watched(triton_call, "called")
    x, w = jax.ShapeDtypeStruct((8, 16, 16, 64), jnp.bfloat16), jax.ShapeDtypeStruct((3, 3, 64, 64), jnp.bfloat16)
    conv = functools.partial(jaxext.conv_general_dilated, dimension_numbers=("NHWC", "HWIO", "NHWC"), implementation="triton")
    jaxext.export.lower_for(lambda x, w: conv(x, w, (1, 1), "SAME"), arch="sm_90a")(x, w)
    text = (ROOT / "docs/architecture.md").read_text()
    told = re.findall(r"^\| \d+ \| `(.*?)` \| `(.*?)` \|", text, re.MULTILINE)
    assert told == [*seen["bind"], *seen["called"]]
    assert len(told) <= MOST_HOPS
