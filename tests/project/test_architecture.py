"""The ways of a call, by the frames of the stack: docs/architecture.md tells one of them hop by hop, and none is longer than it may be."""

import os
import pathlib
import re
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxext
from jaxext import _compat
from jaxext.backends.cuda import cuda_binding
from jaxext.backends.triton import triton_binding
from jaxext.core.form import Form
from jaxext.core.operation import Operation

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = os.path.dirname(jaxext.__file__)
IMAGE, FILTER = ((8, 16, 16, 64), (3, 3, 64, 64))


def conv(x, w, implementation):
    return jaxext.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), implementation=implementation)


def linear(x, w, implementation):
    return jaxext.linear(x, w, activation="gelu", implementation=implementation)


# Operation, its shapes, the implementation, the last function of the way and its module, and the most hops to it.
WAYS = {
    "conv to XLA": (conv, (IMAGE, FILTER), "xla", _compat, "conv_general_dilated", 12),
    "conv to a Triton launch": (conv, (IMAGE, FILTER), "triton", triton_binding, "called", 12),
    "linear to XLA": (linear, ((512, 1024), (1024, 512)), "xla", lax, "dot_general", 14),
    "linear to CUDA": (linear, ((512, 1024), (1024, 512)), "cuda", cuda_binding, "ffi_call", 14),
}


def hops(function):
    """File and name of each frame of the package's own, the outermost first, and of the function that is called, if it is too."""
    frames = [(os.path.relpath(frame.filename, PACKAGE), frame.name) for frame in traceback.extract_stack()]
    own = [frame for frame in frames if not frame[0].startswith("..")]
    code: Any = getattr(function, "__code__", None)  # a primitive's method has it elsewhere
    file = os.path.relpath(code.co_filename, PACKAGE) if code else ".."
    return own if file.startswith("..") else [*own, (file, code.co_name)]


def way(monkeypatch, function, shapes, implementation, module, last):
    """The hops to the primitive, when the function is traced, and those to `last`, when it is lowered for an H100."""
    if reason := {"triton": triton_binding.missing(interpreted=False), "cuda": cuda_binding.missing()}.get(implementation):
        pytest.skip(reason)
    seen: dict[str, list] = {}
    jax.clear_caches()

    def watched(where, name, event):
        original = getattr(where, name)

        def watch(*args, **kwargs):
            seen[event] = hops(original)  # of the last call: lax is asked for the dtype of a product before
            return original(*args, **kwargs)

        monkeypatch.setattr(where, name, watch)

    for kind in (Form, Operation):
        watched(kind, "bind", "traced")
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    with jaxext.use_target("sm_90a"):
        traced = jax.jit(lambda x, w: function(x, w, implementation)).trace(*arrays)
        watched(module, last, "lowered")
        traced.lower(lowering_platforms=("cuda",))
    return [*seen["traced"], *seen["lowered"]]


@pytest.mark.parametrize("name", WAYS)
def test_no_way_is_longer_than_it_may_be(name, monkeypatch):
    *of, most = WAYS[name]
    found = way(monkeypatch, *of)
    assert len(found) <= most, "\n".join(map(str, found))
    assert len({*found}) == len(found)  # each down


def test_the_way_that_the_documentation_tells(monkeypatch):
    *of, _ = WAYS["conv to a Triton launch"]
    table = re.findall(r"^\| \d+ \| `(.*?)` \| `(.*?)` \|", (ROOT / "docs/architecture.md").read_text(), re.MULTILINE)
    assert table == way(monkeypatch, *of)
