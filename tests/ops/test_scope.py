"""`use_implementation`, `use_invariant`, `in_place_of_lax`, `use_table`, `use_target`: context managers and decorators alike."""

import functools
import inspect
import threading

import jax
import jax.numpy as jnp
import pytest
from cases import equations

import jaxext
from jaxext import _scope, _target
from jaxext.core import choose
from jaxext.lax import dispatch
from jaxext.tables import active, table_file

X = jnp.ones((2, 2), "float32")

# How each is made, what it makes true, and what is true outside.
SCOPES = {
    "use_implementation": (lambda: jaxext.use_implementation("xla"), lambda: dispatch._named.value, "xla", None),
    "in_place_of_lax": (jaxext.in_place_of_lax, lambda: choose.replacing_lax.value, True, False),
    "use_table": (lambda: jaxext.use_table(None), active.current, active._File("no table", ()), "default"),
    "use_target": (lambda: jaxext.use_target("sm_90a"), lambda: _target._named.value, 90, None),
}


@pytest.fixture(params=SCOPES)
def scope(request):
    make, *rest = SCOPES[request.param]
    return make(), *rest


def test_a_block(scope):
    """One object serves for blocks one after the other and within each other: jax's own would keep the value for ever."""
    entered, now, inside, outside = scope
    for _ in range(2):
        assert now() == outside
        with entered:
            with entered:
                assert now() == inside
            assert now() == inside
    assert now() == outside


def test_a_decorator(scope):
    """Every call runs in the scope, also calls within calls and those that raise; the function looks as it did."""
    decorate, now, inside, outside = scope

    def count(n: int, *, step: int = 1) -> int:
        """Count down to zero."""
        assert now() == inside
        if n < 0:
            raise ValueError(n)
        return n if n < step else count(n - step, step=step)

    plain, count = count, decorate(count)
    assert now() == outside
    assert count(5, step=2) == 1 and now() == outside
    assert inspect.signature(count) == inspect.signature(plain)
    assert (count.__name__, count.__doc__, count.__module__) == ("count", "Count down to zero.", __name__)
    with pytest.raises(ValueError, match="-1"):
        count(-1)
    assert now() == outside
    twice = decorate(functools.partial(plain, 4))  # the same scope again, on what is no plain function
    assert twice() == 0 and now() == outside


def test_methods():
    class Layer:
        @jaxext.use_implementation("xla")
        def __call__(self, x):
            return self, x, dispatch._named.value

    layer = Layer()
    assert layer(1) == (layer, 1, "xla")


def test_several_threads(scope):
    """Two threads are in one scope at once, and leave it in the order in which they came; a third is never in it."""
    entered, now, inside, outside = scope
    both, first_left, seen = threading.Barrier(3, timeout=60), threading.Event(), {}

    @entered
    def within(name):
        both.wait()
        if name == "second":
            first_left.wait(60)
        return now()

    def run(name):
        seen[name] = within(name), now()
        first_left.set()

    threads = [threading.Thread(target=run, args=(name,)) for name in ("first", "second")]
    for thread in threads:
        thread.start()
    both.wait()
    assert now() == outside
    for thread in threads:
        thread.join(60)
    assert seen == dict.fromkeys(("first", "second"), (inside, outside))


def test_the_scope_is_part_of_the_key_of_jit(scope):
    """A jitted function is traced once outside and once inside, however it is called there."""
    entered, now, inside, outside = scope
    traced = []
    jitted = jax.jit(lambda x: (traced.append(now()), x + 1)[1])
    decorated = entered(jitted)
    for _ in range(2):
        jitted(X)
        decorated(X)
        with entered:
            jitted(X)
    assert traced == [outside, inside]


def test_under_transformations():
    """A decorated function is one that jax transforms, and its products are those of the scope."""

    @jaxext.in_place_of_lax()
    @jaxext.use_implementation("xla")
    def net(x):
        return jnp.sum(jnp.tanh(x @ x))

    (product,) = (eqn for eqn in equations(net, X) if eqn.primitive.name == "matmul_nn")
    assert product.params["static"].implementation == "xla"
    assert not any(eqn.primitive.name == "dot_general" for eqn in equations(jax.jit(jax.vmap(jax.grad(net))), X[None]))


def generator():
    yield


async def coroutine(): ...


async def asynchronous_generator():
    yield


@pytest.mark.parametrize("fun", [generator, coroutine, asynchronous_generator, functools.partial(generator)])
def test_functions_whose_bodies_run_later_are_refused(scope, fun):
    with pytest.raises(TypeError, match=r"(generator|async) function, want a function whose body runs when it is called: decorate what it"):
        scope[0](fun)


@pytest.mark.parametrize("thing", [dict, classmethod(type), 3])
def test_what_is_no_function_is_refused(scope, thing):
    with pytest.raises(TypeError, match=r"^(use|in)_\w+: got .*, want a function to decorate"):
        scope[0](thing)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("use_implementation", ["name"]),
        ("use_invariant", []),
        ("slices_in_place", []),
        ("in_place_of_lax", []),
        ("use_table", ["table"]),
        ("use_target", ["arch"]),
    ],
)
def test_a_decorator_without_parentheses(name, parameters, tmp_path, monkeypatch):
    """The message has a call that works."""
    make = getattr(jaxext, name)
    assert [*inspect.signature(make).parameters] == parameters
    with pytest.raises(TypeError, match=rf"^{name}: got <function generator .*>, want parentheses: write @{name}\(") as error:
        make(generator)
    monkeypatch.chdir(tmp_path)
    table_file.write("tables.json", active.context("cpu"), {})
    assert isinstance(eval(f"jaxext.{str(error.value).rpartition('@')[2]}"), _scope.Scope)
