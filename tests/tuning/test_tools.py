"""The tools are transformations: their options come before the function's arguments, and its keywords are its own."""

import doctest
import functools

import jax
import jax.numpy as jnp
import pytest
from jax.core import Tracer

import jaxext

X = jax.ShapeDtypeStruct((2, 3), jnp.float32)
OPTIONS = ("platform", "gradients", "measure", "backward", "candidates", "table", "progress", "arch")


def product(x, *, w, **scales):
    """Multiply x by w and by a number for each option of a tool."""
    return jaxext.matmul(x, w) * sum(scales[name] for name in OPTIONS)


def tools(folder):
    return {
        "explain": jaxext.explain,
        "tune": functools.partial(jaxext.tune, candidates=1, backward=False, table=folder / "table.json"),
        "doctor": jaxext.doctor,
        "lower_for": functools.partial(jaxext.export.lower_for, arch="sm_90a"),
    }


@pytest.mark.parametrize("name", ["explain", "tune", "doctor", "lower_for"])
def test_keywords_are_those_of_the_function(name, tmp_path):
    told = tools(tmp_path)[name](product)
    assert told.__name__ == "product" and told.__doc__ == product.__doc__
    result = told(X, w=jax.ShapeDtypeStruct((3, 4), jnp.float32), **dict.fromkeys(OPTIONS, 1.0))
    if name in ("explain", "tune"):
        assert len(result.rows) == 1
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'w'"):
        told(X)


@pytest.mark.parametrize("name", ["explain", "tune", "doctor"])
def test_arguments_without_an_array_are_static(name, tmp_path):
    """Strides, names and numbers; of a pytree with arrays the other leaves, such as a module's activation."""
    x, w = jax.ShapeDtypeStruct((1, 2, 8, 8), jnp.float32), jax.ShapeDtypeStruct((2, 2, 3, 3), jnp.float32)
    tool = tools(tmp_path)[name]
    assert tool(jaxext.conv)(x, w, (1, 1), "SAME")
    assert tool(jaxext.linear)(X, jax.ShapeDtypeStruct((3, 4), jnp.float32), activation="relu")
    seen = []

    def noted(tree, n, *, how):
        seen.append((tree["x"], n, how))
        assert tree["f"] is jnp.tanh and tree["y"] == 2.0
        return jaxext.matmul(tree["x"], tree["x"].T).sum()

    tool(noted)({"x": X, "y": 2.0, "f": jnp.tanh}, 3, how="a")
    tool(noted)(n=3, how="a", tree={"x": X, "y": 2.0, "f": jnp.tanh})
    assert seen and all(isinstance(x, Tracer) and (n, how) == (3, "a") for x, n, how in seen)
    assert repr(tool(jaxext.linear)).endswith("to be called with the arguments of that function")


@pytest.mark.parametrize("name", ["explain", "tune", "doctor", "lower_for"])
def test_arguments_among_the_options_are_refused(name, tmp_path):
    with pytest.raises(TypeError, match=rf"{name}\(\) takes 1 positional argument but 2"):
        tools(tmp_path)[name](product, X)
    with pytest.raises(TypeError, match=rf"{name}: fun is 3, want the function itself: {name}\(fun"):
        tools(tmp_path)[name](3)


@pytest.mark.parametrize("tool", [jaxext.explain, jaxext.doctor, jaxext.export.lower_for, jaxext.export.disabled_checks])
def test_the_examples_of_the_docstrings(tool):
    names = dict(functools=functools, jax=jax, jnp=jnp, jaxext=jaxext, **{tool.__name__: tool})
    test = doctest.DocTestParser().get_doctest(tool.__doc__ or "", names, tool.__name__, None, 0)
    with jax.enable_x64(False):
        assert test.examples and doctest.DocTestRunner().run(test).failed == 0
