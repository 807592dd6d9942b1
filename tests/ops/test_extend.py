"""Users' implementations and forms: what is declared has every rule, what is registered is chosen, named, refused and measured as ours."""

import doctest
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import registrations
from bilinear import integers, same
from collectives import collectives
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxext
from jaxext import extend
from jaxext.core import implementation
from jaxext.core.family import families
from jaxext.core.form import owner
from jaxext.extend import callables
from jaxext.tables import active


@pytest.fixture(autouse=True, scope="module")
def no_program_is_compiled_yet():
    """Programs of earlier test files would not contain what is registered here."""
    jax.clear_caches()


class Einsum(extend.Implementation):
    """Computes three times what is asked in float32, so that one sees who did it."""

    def __init__(self, name, **attributes):
        self.name = name
        vars(self).update(attributes)

    def refuses(self, call):
        return None if call.dtype == np.float32 else f"the result is {call.dtype}, want float32"

    def run(self, call, config, operands):
        letters = {slot: "".join(labels).lower() for slot, labels in call.labels.items()}
        equation = f"{','.join(letters[slot] for slot in operands)}->{letters[call.open]}"
        return 3 * jnp.einsum(equation, *call.flatten(operands).values()).reshape(call.shape)


A, B = integers((3, 5)), integers((5, 7), 1)


def chosen(f, *args):
    return [(row.op, row.chosen) for row in jaxext.explain(f)(*args).rows]


# --- an implementation of jaxext's own operations


def test_an_implementation_of_matmul_by_name():
    """The keyword and the context name it, in gradients too; an unnamed call takes it only if it is preferred."""
    extend.register("matmul", Einsum("thrice", not_preferred=lambda call: "it is wrong"))
    f = functools.partial(jaxext.matmul, implementation="thrice")
    same(f(A, B), 3 * (A @ B))
    same(jaxext.matmul(A, B), A @ B)
    with jaxext.use_implementation("thrice"):
        same(jaxext.matmul(A, B), 3 * (A @ B))
        same(jax.jit(jax.vmap(jaxext.matmul, (None, 0)))(A, np.stack([B, -B])), np.stack([3 * (A @ B), -3 * (A @ B)]))
    total = lambda a: f(a, B).sum()
    assert chosen(jax.grad(total), A) == [("matmul_nn", "thrice"), ("matmul_nt", "thrice")]
    same(jax.grad(total)(A), 3 * np.ones_like(A @ B) @ B.T)
    (row,) = jaxext.explain(jaxext.matmul)(A, B).rows
    assert (row.chosen, row.refused["thrice"]) == ("xla", "it is wrong")
    with pytest.raises(NotImplementedError, match="matmul_nn: implementation 'thrice' does not support this call: the result is float64"):
        f(A.astype(np.float64), B.astype(np.float64))
    extend.register("matmul", Einsum("eager"))
    assert chosen(jaxext.matmul, A, B) == [("matmul_nn", "eager")]
    same(jaxext.matmul(A[:2], B), 3 * (A[:2] @ B))
    same(jaxext.matmul(A, B), 3 * (A @ B))  # not by the program that was compiled before


def test_an_implementation_of_convolutions():
    """One for all numbers of spatial axes: it sees the geometry, and refuses what it does not compute."""

    class Pointwise(Einsum):
        def refuses(self, call):
            trivial = set((*call.window.filter, *call.window.stride)) == {1} and not any(map(any, call.window.padding))
            return super().refuses(call) if trivial else f"the filter is {call.window.filter}, want 1 in each axis"

        def run(self, call, config, operands):
            letters = {slot: "".join(labels).translate(str.maketrans("PQ", "HW")) for slot, labels in call.labels.items()}
            equation = f"{','.join(letters[slot] for slot in operands)}->{letters[call.open]}"
            if call.open == "w":  # of whose own axes, of size 1, no operand knows
                equation = equation.replace("R", "").replace("S", "")
            return 3 * jnp.einsum(equation, *call.flatten(operands).values()).reshape(call.shape)

    extend.register("conv", Pointwise("pointwise", not_preferred=lambda call: "it is wrong"))
    conv = functools.partial(jaxext.conv, window_strides=(1, 1), padding="VALID", implementation="pointwise")
    x, w = jnp.asarray(integers((2, 3, 4, 5))), jnp.asarray(integers((6, 3, 1, 1), 1))
    same(conv(x, w), 3 * jax.lax.conv(x, w, (1, 1), "VALID"))
    assert {op for op, name in chosen(jax.grad(lambda x, w: conv(x, w).sum(), (0, 1)), x, w) if name == "pointwise"} == {
        "conv2d_fprop",
        "conv2d_dgrad",
        "conv2d_wgrad",
    }
    with pytest.raises(NotImplementedError, match=r"conv2d_fprop: .*'pointwise' does not support this call: the filter is \(2, 1\)"):
        conv(x, jnp.ones((6, 3, 2, 1), np.float32))


# --- a form of one's own


def FORM() -> Any:
    """Declare a form whose result has an order of its own."""
    return extend.define("toy_sum", u="Z I J P", v="Z J K P", t="P Z K I")


U, V = integers((2, 3, 4, 5)), integers((2, 4, 6, 5), 1)


def truth(u, v):
    return jnp.einsum("zijp,zjkp->pzki", u, v)


def test_a_form_is_its_definition():
    """Values, gradients and vmap of an einsum, for every subset of the operands mapped; no axis that a label need not have."""
    assert repr(FORM()) == "toy_sum: u[Z I J P], v[Z J K P] -> t[P Z K I]"
    total = lambda f, u, v: jnp.sum(f(u, v) ** 2)
    both = lambda f: jax.jit(jax.value_and_grad(functools.partial(total, f), (0, 1)))
    same(FORM()(U, V), truth(U, V))
    same(both(FORM())(U, V), both(truth)(U, V))
    twice = lambda f: jax.jit(lambda u, v: jax.jvp(jax.grad(functools.partial(total, f), (0, 1)), (u, v), (1 - u, v))[1])
    same(twice(FORM())(U, V), twice(truth)(U, V))
    for axes in ((3, None), (None, 1), (3, 1)):
        u, v = (x if axis is None else np.stack([x, 1 - x], axis) for x, axis in zip((U, V), axes, strict=True))
        same(jax.jit(jax.vmap(FORM(), axes, 2))(u, v), jax.jit(jax.vmap(truth, axes, 2))(u, v))
    same(FORM()(U[0, :, 0], V[0, 0, 0], Z=0, J=0, K=0), (U[0, :, 0] * V[0, 0, 0]).T)
    same(FORM()(U[None], V[None], Z=2), truth(U, V)[:, None])
    assert chosen(FORM(), U, V) == [("toy_sum_t", "xla")]


def test_dtypes_and_precision_are_those_of_lax():
    half = jnp.asarray(U, jnp.bfloat16), jnp.asarray(V, jnp.bfloat16)
    assert FORM()(*half).dtype == jnp.bfloat16
    assert FORM()(*half, preferred_element_type=np.float32).dtype == np.float32
    (eqn,) = jax.make_jaxpr(functools.partial(FORM(), precision="highest"))(U, V).eqns
    assert eqn.params["static"].precision == (jax.lax.Precision.HIGHEST,) * 2
    with jax.numpy_dtype_promotion("standard"):
        assert FORM()(half[0], V).dtype == np.float32
    with pytest.raises(ValueError, match="no available implicit dtype promotion"):
        FORM()(half[0], V)
    same(FORM()(U > 0, V > 0), truth(U > 0, V > 0))
    wide = functools.partial(FORM(), preferred_element_type=np.float32)  # then lax takes two dtypes as they are
    eqn: Any
    (eqn,) = jax.make_jaxpr(wide)(half[0], V).eqns
    assert [x.aval.dtype for x in eqn.invars] == [jnp.bfloat16, np.float32]
    y, pullback = jax.vjp(wide, half[0], V)
    same(y, truth(U, V))
    assert [g.dtype for g in pullback(y)] == [jnp.bfloat16, np.float32]


def test_a_form_over_eight_devices():
    """A split batch and a split sum: the result lies as the operands do, one all-reduce where the sum is split."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    place = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
    u, v = place(U, "data", None, "model"), place(V, "data", "model")
    compiled = jax.jit(FORM()).lower(u, v).compile()
    got = compiled(u, v)
    same(got, truth(U, V))
    assert got.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "data")), 4)
    assert collectives(compiled) == {"all-reduce": 1}


def test_explicit_meshes():
    """Shardings in types follow from the labels; where a split sum leaves the result's open, `out_sharding` says it."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        u, v = jax.device_put(U, P(None, None, "data")), jax.device_put(V, P(None, "data"))
        with pytest.raises(Exception, match="is ambiguous, want `out_sharding`"):
            FORM()(u, v)
        for out_sharding in (P(), NamedSharding(mesh, P(None, None))):
            y = jax.jit(functools.partial(FORM(), out_sharding=out_sharding))(u, v)
            same(y, truth(U, V))
            assert jax.typeof(y).sharding.spec == P(None, None, None, None)
    with pytest.raises(ValueError, match="toy_sum: out_sharding is .*, want one for 4 axes, on a mesh with explicit axes"):
        FORM()(U, V, out_sharding=P())


def test_declared_again_alike_it_is_the_same():
    form = extend.define("toy_again", x="B N K", w="B K M", y="B N M")
    extend.register(form, Einsum("mine"))
    again: Any = extend.define("toy_again", x="B N K", w="B K M", y="B N M")
    assert again == form != FORM()
    with jaxext.use_implementation("mine"):
        same(again(A, B, B=np.int64(0)), 3 * (A @ B))
    assert "@jit_toy_again" in jax.jit(again).lower(A[None], B[None]).as_text()


def test_a_stored_program_is_known_by_the_version():
    """XLA hides the implementation in a program that it splits: without its version in the text, jax's cache would take an old program."""
    form = extend.define("toy_stored", x="B N K", w="B K M", y="B N M")
    extend.register(form, Einsum("mine", version="seventh"))
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    x, w = (jax.device_put(a, NamedSharding(mesh, P())) for a in (integers((4, 5)), B))
    assert "seventh" in jax.jit(functools.partial(form, B=0)).lower(x, w).as_text()


# --- measured


def test_a_users_implementation_is_measured_with_its_version(tmp_path):
    """Measurements with other code of it do not hold, and the rest of the row does."""
    form = extend.define("toy_measured", x="B N K", w="B K M", y="B N M")
    extend.register(form, Once("right", version="1", not_preferred=lambda call: "not yet known"))
    extend.register(form, Stacked("stacked", version="1", not_preferred=lambda call: "not yet known"))
    tuned = jaxext.tune(functools.partial(form, B=0), backward=False, table=str(tmp_path / "table.json"))(A, B)
    (row,) = tuned.rows
    assert {c.implementation for c in row.candidates if c.ms is not None} >= {"right", "xla"}
    (stacked,) = (c for c in row.candidates if c.implementation == "stacked")
    assert stacked.left_out == "TypeError: toy_measured_y: implementation 'stacked' returned float32[1, 3, 7], want float32[3, 7]"
    f = functools.partial(form, B=0)
    with jaxext.use_table(str(tmp_path / "table.json")):
        (explained,) = jaxext.explain(f)(A, B).rows
        assert explained.why.startswith("measured")
    active.add_code("right", lambda platform: "2")
    with pytest.warns(UserWarning, match="other code of right"), jaxext.use_table(str(tmp_path / "table.json")):
        (explained,) = jaxext.explain(f)(A, B).rows
        assert (explained.chosen, explained.refused["right"]) == ("xla", "it was not measured")


class Once(Einsum):
    """Computes what is asked."""

    def run(self, call, config, operands):
        return super().run(call, config, operands) / 3


def test_nothing_is_left_for_other_tests(request):
    """Tables of measurements were out of date in the worker's next file after one that registered an implementation."""
    assert "nothing_outlives_the_module" in request.fixturenames

    def state():
        product = np.asarray(jax.jit(jaxext.matmul)(A, B)).tolist()
        return active.context("cpu"), set(families), set(owner), families["matmul"].names_of_implementations, product

    before = state()
    with registrations.undone():
        jax.clear_caches()
        extend.register(extend.define("toy_left", x="B N K", w="B K M", y="B N M"), Einsum("left"))
        extend.register("matmul", Einsum("left", run=lambda call, config, operands: jnp.zeros(call.shape, call.dtype)))
        assert all(now != then for now, then in zip(state(), before, strict=True))
    assert state() == before


class Stacked(Once):
    """Computes what is asked, with an axis too many."""

    def run(self, call, config, operands):
        return super().run(call, config, operands)[None]


def test_the_examples_in_docstrings():
    with jax.enable_x64(False):
        names = vars(extend) | dict(jaxext=jaxext, jnp=jnp, np=np)
        assert doctest.testmod(extend, extraglobs=names) == doctest.TestResults(failed=0, attempted=5)
        assert doctest.testmod(callables, extraglobs=names) == doctest.TestResults(failed=0, attempted=2)
        assert doctest.testmod(implementation, extraglobs=names) == doctest.TestResults(failed=0, attempted=3)
