"""Errors of users' implementations and forms, which say what is wrong of whose."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_extend import FORM, A, B, Einsum, U, V

import jaxext
from jaxext import extend, testing
from jaxext.tables import active


def test_an_implementation_is_registered_once_and_well():
    register: Any = functools.partial(extend.register, "matmul")
    with pytest.raises(ValueError, match=r"register: the implementation's name is 'xla', want an identifier that is not one of \["):
        register(Einsum("xla"))
    with pytest.raises(ValueError, match="name is 'two words'"):
        register(Einsum("two words"))
    with pytest.raises(ValueError, match="name is 'triton'"):
        extend.register(FORM(), Einsum("triton"))
    with pytest.raises(TypeError, match="want an instance of a class derived from Implementation"):
        register(Einsum)
    operations: list[Any] = ["convolve", ["matmul"], jaxext.matmul]
    for operation in operations:
        with pytest.raises(ValueError, match=r"register: operation is .*, want one of \['matmul', 'conv'\]"):
            extend.register(operation, Einsum("mine"))
    with pytest.raises(ValueError, match="use_implementation: name is 'mine', want one of"):
        jaxext.use_implementation("mine")
    with pytest.raises(ValueError, match="version of mine is 2, want a printable str"):
        register(Einsum("mine", version=2))
    from_no_file = type("Typed", (Einsum,), {"__module__": "no_such_module"})
    with pytest.raises(ValueError, match="the class of mine is in no file, want a `version`"):
        register(from_no_file("mine"))


def test_attributes_of_an_implementation_are_checked():
    cases: list[tuple[Any, str]] = [
        (Einsum("mine", custom_calls="target"), "custom_calls of mine is 'target', want a sequence of str"),
        (Einsum("mine", custom_calls=[1]), r"custom_calls of mine is \[1\], want a sequence of str"),
        (Einsum("mine", rows_by_config="no"), "rows_by_config of mine is 'no', want a bool"),
    ]
    for implementation, message in cases:
        with pytest.raises(TypeError, match=f"register: {message}"):
            extend.register("matmul", implementation)


def times(factor, name="mine", **attributes):
    """An implementation that is seen in its result."""
    run = Einsum("").run
    return Einsum(name, run=lambda *args: factor / 3 * run(*args), **attributes)


def test_registered_again():
    """A cell of a notebook runs again: an error that says how, and then no program has the former kernel, compiled or staged."""
    form: Any = extend.define("toy_twice", x="B N K", w="B K M", y="B N M")
    product = functools.partial(form, B=0)
    jitted, gradient = jax.jit(product), jax.jit(jax.grad(lambda a: product(a, B).sum()))
    split = jax.jit(product, in_shardings=jax.NamedSharding(jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,)), jax.P()))
    extend.register(form, times(2, version="1"))
    extend.register(form, times(5, "first"))
    extend.register(form, times(5, "first", not_preferred=lambda call: "it is another"), replace=True)
    for factor, version in ((2, "1"), (7, "2")):
        if version == "2":
            with pytest.raises(
                ValueError, match="register: toy_twice has an implementation 'mine' already, want another name, or `replace=True`"
            ):
                extend.register(form, times(factor))
            extend.register(form, times(factor, version=version), replace=True)
        for f in (product, jitted, split):
            np.testing.assert_allclose(f(A, B), factor * (A @ B), rtol=1e-6)
        np.testing.assert_allclose(gradient(A), factor * (np.ones((3, 7), np.float32) @ B.T), rtol=1e-6)
        assert version in active.known_as("cpu", ["mine"])
    assert form._form.family.names_of_implementations == ["first", "mine", "xla"]
    assert active.known_as("cpu", ["mine"]).startswith("['2']")
    with pytest.raises(ValueError, match="the implementation's name is 'xla', want"):
        extend.register(form, times(1, "xla"), replace=True)
    for factor in (2, 7):  # of an operation whose programs jaxext keeps itself
        extend.register("matmul", times(factor, not_preferred=lambda call: "it is wrong"), replace=True)
        np.testing.assert_allclose(jaxext.matmul(A, B, implementation="mine"), factor * (A @ B), rtol=1e-6)


def test_registered_after_a_call():
    """The order is that of the tutorial: no program that was compiled or traced before is reused; and where there is none, all stay."""
    form: Any = extend.define("toy_late", x="B N K", w="B K M", y="B N M")
    other: Any = jax.jit(lambda a: a + 1)
    other(A)
    extend.register(form, times(5, "early"))
    assert other._cache_size() == 1
    product = functools.partial(form, B=0)
    calls = [product, jax.jit(product), lambda a, b: jax.vmap(product)(a[None], b[None])[0]]
    for factor in (5, 2):
        for f in calls:
            np.testing.assert_allclose(f(A, B), factor * (A @ B), rtol=1e-6)
        if factor == 5:
            extend.register(form, times(2, "late"))


def test_a_kernel_of_a_backward_registered_after_a_gradient():
    """The gradient was the reference's, so that no program has the primitive of the backward."""
    toy: Any = extend.operation("toy_late_gradient", lambda x: 2 * x, operands=dict(x="N"), results=dict(y="N"))
    x = np.linspace(0, 1, 4, dtype=np.float32)
    gradient = jax.jit(jax.grad(lambda x: toy(x).sum()))
    np.testing.assert_allclose(gradient(x), 2 + 0 * x)
    extend.register(toy.backward, Einsum("late", run=lambda call, config, operands: 7 * operands["d_y"]))
    np.testing.assert_allclose(gradient(x), 7 + 0 * x)


def test_an_operation_of_one_operand_is_explained():
    """There was an error where the reference computes it: it has no second factor."""
    one: Any = extend.operation("toy_one_operand", lambda x: 3 * x, operands=dict(x="N"), results=dict(y="N"))
    (row,) = jaxext.explain(one)(np.ones(4, np.float32)).rows
    assert (row.op, row.chosen, row.multiplies) == ("toy_one_operand", "xla", "")


@pytest.mark.parametrize("of", [tuple, list, lambda results: results[0]], ids=["tuple", "list", "array"])
def test_a_single_result(of):
    """A single result may be all that is wanted of several."""
    labels: Any = dict(operands=dict(x="N"), results=dict(y="N"), saved=dict(z="N"))
    toy: Any = extend.operation("toy_single_result", lambda x: (2 * x, x), **labels, replace=True)
    x = np.linspace(0, 1, 4, dtype=np.float32)
    extend.register(toy, Einsum("single", run=lambda call, config, operands: of([7 * operands["x"]])))
    np.testing.assert_array_equal(toy(x), 7 * x)


def test_declared_again():
    """The reference is another one: programs that were compiled before have the new one, and kernels are registered anew."""
    options: Any = dict(operands=dict(x="N"), results=dict(y="N"))
    x = np.linspace(0, 1, 4, dtype=np.float32)
    toy: list[Any] = [extend.operation("toy_redeclared", lambda x: 2 * x, **options)]
    f = jax.jit(lambda x: toy[0](x))
    np.testing.assert_allclose(f(x), 2 * x)
    with pytest.raises(ValueError, match="the name is 'toy_redeclared', .* is taken, want another name, or `replace=True`, which compiles"):
        extend.operation("toy_redeclared", lambda x: 3 * x, **options)
    toy[0] = extend.operation("toy_redeclared", lambda x: 3 * x, replace=True, **options)
    np.testing.assert_allclose(f(x), 3 * x)
    np.testing.assert_allclose(jax.grad(lambda x: toy[0](x).sum())(x), 3 + 0 * x)
    assert [row.op for row in jaxext.explain(toy[0])(x).rows] == ["toy_redeclared"]
    for name in ("toy_redeclared_backward", "conv2d", "toy_twice"):
        extend.define("toy_twice", x="B N K", w="B K M", y="B N M")
        with pytest.raises(ValueError, match=f"the name is '{name}', but '{name}' is taken, want another name$"):
            extend.operation(name, lambda x: x, replace=True, **options)


define: Any = extend.define  # of which what is no str is asked too


@dataclasses.dataclass(frozen=True)
class Fraction:
    block: float = 0.5


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (dict(run=lambda *_: np.ones((7, 2, 3), np.float32)), r"returned float32\[7, 2, 3\], want float32\[3, 7\]"),
        (dict(run=lambda *_: np.ones((3, 7), np.float16)), r"returned float16\[3, 7\], want float32\[3, 7\]"),
        (dict(run=lambda *_: None), "returned None, want float32"),
        (dict(run=lambda *_: [np.ones((3, 7), np.float32)] * 2), r"returned float32\[3, 7\], float32\[3, 7\], want float32\[3, 7\]"),
        (dict(refuses=lambda call: True), "^toy_checked_y: `refuses` of implementation 'bad' returned True, want a reason"),
        (dict(refuses=lambda call: False), "`refuses` of implementation 'bad' returned False, want a reason as a str, or None"),
        (dict(refuses=lambda call: ""), "`refuses` of implementation 'bad' returned '', want a reason as a str, or None"),
        (dict(not_preferred=lambda call: True), "`not_preferred` of implementation 'bad' returned True, want a reason as a str, or None"),
        (dict(plan=lambda call: True), "^toy_checked_y: `plan` of implementation 'bad' returned True, want a Plan, or a reason as a str"),
        (dict(plan=lambda call: None), "`plan` of implementation 'bad' returned None, want a Plan"),
        (dict(candidates=lambda call: []), r"^toy_checked_y: `candidates` of implementation 'bad' returned \[\], want one or more frozen"),
        (dict(candidates=lambda call: [{"block": 1}]), r"returned \[{'block': 1}\], want one or more frozen dataclasses of int"),
        (dict(candidates=lambda call: [Fraction()]), r"returned \[Fraction\(block=0.5\)\], want"),
        (dict(candidates=lambda call: None), "returned None, want one or more"),
    ],
)  # fmt: skip
def test_what_an_implementation_answers_is_checked(answer, message):
    form: Any = extend.define("toy_checked", x="B N K", w="B K M", y="B N M")
    form._form.family.implementations[:-1] = []  # those of the cases before
    extend.register(form, Einsum("bad", **answer))
    with pytest.raises(TypeError, match=message):
        jax.jit(functools.partial(form, B=0)).lower(A, B)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: FORM()(U, V[0]), TypeError, r"toy_sum: v has the shape \(4, 6, 5\), want 4 axes: Z J K P"),
        (lambda: FORM()(U, V, Z=2), TypeError, r"toy_sum: u has the shape \(2, 3, 4, 5\), want 5 axes: Z=2 I J P"),
        (lambda: FORM()(U, V[:, :3]), TypeError, "toy_sum: axis J of v is 3, want 4 as in u"),
        (lambda: FORM()(U[None], V[None, :1], Z=2), TypeError, "toy_sum: axis Z1 of v is 1, want 2 as in u"),
        (lambda: FORM()([1.0], V), TypeError, r"toy_sum: u is \[1.0\], want an array"),
        (lambda: FORM()(U, V, Q=2), ValueError, r"toy_sum: there is no label 'Q', want one of \['Z', 'I', 'J', 'P', 'K'\]"),
        (lambda: FORM()(U, V, Z=-1), ValueError, "toy_sum: label Z has the rank -1, want a number of axes"),
        (lambda: FORM()(U, V, Z=True), ValueError, "toy_sum: label Z has the rank True, want a number of axes"),
        (lambda: FORM()(U, V, out_sharding="a"), TypeError, "toy_sum: out_sharding is 'a', want a NamedSharding or a PartitionSpec"),
        (lambda: FORM()(U, V, implementation="fast"), ValueError, r"toy_sum: implementation is 'fast', want one of \['xla'\] or None"),
        (lambda: extend.define("bad", x="A B", y="A B"), ValueError, "bad has the slots .*, want three"),
        (lambda: extend.define("bad", x="B N", w="B M", v="B K", y="B N M K"), ValueError,
            "want three: two operands and the result; `extend.operation` declares an operation of another number of operands or results"),
        (lambda: extend.define("bad", x="A b", w="A", y="A"), ValueError, "x of bad is 'A b', want different words of letters"),
        (lambda: extend.define("bad", x="A A", w="A", y="A"), ValueError, "x of bad is 'A A', want different"),
        (lambda: extend.define("bad", x="A B", w="A", y="A"), ValueError, "label B of bad is in x only, want it in two slots"),
        (lambda: extend.define("bad", x="B N K", w="B K", y="B N"), ValueError, "bad has no label in exactly w, y, where vmap would"),
        (lambda: extend.define("conv2d", x="B N K", w="B K M", y="B N M"), ValueError, "the name is 'conv2d', but 'conv2d' is taken"),
        (lambda: extend.define("matmul_nn", x="B N K", w="B K M", y="B N M"), ValueError,
            "the name is 'matmul_nn', but 'matmul_nn' is taken"),
        (lambda: (FORM(), extend.define("toy", sum_u="B N K", w="B K M", y="B N M")), ValueError, "but 'toy_sum_u' is taken"),
        (lambda: define("bad", x=("B", "N"), w="B K M", y="B N M"), TypeError, r"define: x is \('B', 'N'\), want a str"),
        (lambda: define(3, x="B N K", w="B K M", y="B N M"), TypeError, "define: the name is 3, want a str"),
        (lambda: (FORM(), extend.define("toy_sum", u="Z I J", v="Z J K", t="Z I K")), ValueError,
            "the name is 'toy_sum', but 'toy_sum' is taken, want another name .or the labels of its first declaration, which last until"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_an_error_with_names(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("shapes", [((4, 4, 2), (4, 4, 2)), ((4, 2), (4, 2))])
def test_check_op_names_an_operand_with_other_axes(shapes):
    with pytest.raises(TypeError, match=rf"toy_sum: u has the shape {re.escape(str(shapes[0]))}, want"):
        testing.check_op(FORM(), lambda u, v: u + v, tuple(map(jnp.ones, shapes)), show=False)


def test_a_method_of_another_name_is_refused():
    """An implementation that has `gains` for `not_preferred` would be taken without a name."""

    class Old(extend.Implementation):
        name, version = "old_toy", "1"
        refuses = gains = lambda self, call: None
        run = lambda self, call, config, operands: jax.numpy.zeros(call.shape, call.dtype)

    with pytest.raises(TypeError, match="register: old_toy has a method `gains`, which jaxext does not call, want `not_preferred`"):
        extend.register("matmul", Old())


def test_the_operations_names_are_taken():
    rooms = ("jaxext.ops.conv", "jaxext.ops.matmul")
    operations = [name for name, value in vars(jaxext).items() if getattr(value, "__module__", None) in rooms]
    assert len(operations) == 6
    for name in operations:
        with pytest.raises(ValueError, match=f"define: the name is '{name}', but '{name}' is taken"):
            extend.define(name, x="B N K", w="B K M", y="B N M")
