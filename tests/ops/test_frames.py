"""Tracebacks and the source lines of programs show the user's code, not ours; where jax shows its own frames, ours are there too."""

import inspect
import traceback

import jax
import jax.numpy as jnp
import pytest

import jaxext
import jaxext.ops.conv
import jaxext.ops.matmul
from jaxext import extend
from jaxext.lax import dispatch

OURS = jaxext.__path__[0]
X = jnp.ones((2, 3), "float32")
NHWC = ("NHWC", "HWIO", "NHWC")


def product(x):
    return jaxext.matmul(x, x)


def convolution(x, w):
    return jaxext.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC)


def frames(info):
    """File and line of each frame that the error shows."""
    return [(frame.filename, frame.lineno) for frame in traceback.extract_tb(info.value.__traceback__)]


def first_line(function):
    return __file__, inspect.getsourcelines(function)[1] + 1


@pytest.fixture
def unfiltered():
    before = jax.config.values["jax_traceback_filtering"]
    jax.config.update("jax_traceback_filtering", "off")
    yield
    jax.config.update("jax_traceback_filtering", before)


TRANSFORMED = {
    "jit": jax.jit(product),
    "grad": jax.grad(lambda x: product(x).sum()),
    "vmap": jax.vmap(product),
    "explain": lambda x: jaxext.explain(product)(x),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_a_traceback_shows_the_user(name):
    with pytest.raises(TypeError, match="contracting dimensions") as info:
        TRANSFORMED[name](X[None] if name == "vmap" else X)
    shown = frames(info)
    at = shown.index(first_line(product))
    assert not [file for file, _ in shown[at:] if file.startswith(OURS)]


def test_without_filtering_all_is_shown(unfiltered):
    with pytest.raises(TypeError, match="contracting dimensions") as info:
        TRANSFORMED["jit"](X)
    assert {dispatch.__file__, jaxext.ops.matmul.__file__} <= {file for file, _ in frames(info)}


class Raises(extend.Implementation):
    """A user's implementation with a fault."""

    name = "raises"

    def refuses(self, call):
        return None

    def run(self, call, config, operands):
        raise ZeroDivisionError("in the user's code")


def test_an_error_in_the_code_of_a_user_is_not_hidden():
    """Their frame is the last, also where our code called theirs."""
    operation = extend.define("of_frames", x="B M K C", w="B K N C", y="B M N C")
    extend.register(operation, Raises())
    x, w = jnp.ones((2, 3)), jnp.ones((3, 4))
    with pytest.raises(ZeroDivisionError) as info:
        jax.jit(lambda x, w: operation(x, w, B=0, C=0, implementation="raises"))(x, w)
    shown = frames(info)
    assert shown[-1] == (__file__, inspect.getsourcelines(Raises.run)[1] + 1)
    assert not [file for file, _ in shown if file.startswith(OURS)]


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("function", [product, convolution])
def test_programs_name_the_lines_of_the_user(function, devices):
    """Lowered and compiled, on one device and split over several, gradients too."""
    x, *w = (jnp.ones((8, 8)),) if function is product else (jnp.ones((4, 6, 6, 2)), jnp.ones((3, 3, 2, 2)))
    mesh = jax.make_mesh((devices,), ("x",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:devices])
    x = jax.device_put(x, jax.NamedSharding(mesh, jax.P("x")))
    lowered = jax.jit(jax.grad(lambda *args: function(*args).sum())).lower(x, *w)
    file, line = first_line(function)
    assert f'loc("{file}":{line}:' in lowered.as_text(debug_info=True)
    compiled = str(lowered.compile().as_text())
    assert f'"{file}"' in compiled
    assert OURS not in lowered.as_text(debug_info=True) + compiled
