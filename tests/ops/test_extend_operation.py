"""Operations declared by a reference and labels: every rule of JAX, with and without kernels for them and for their transposes.

A softmax cross entropy has a constant operand, a saved result and an axis that stays whole.  An rms norm has a parameter that all rows
share, whose gradient is a sum over rows.
"""

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import registrations
from cases import random
from collectives import collectives
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxext
from jaxext import extend

NAMES = itertools.count()  # each declaration has a name of its own
BOTH = pytest.mark.parametrize("case", ["reference", "kernels"], indirect=True)
KERNELS = pytest.mark.parametrize("case", ["kernels"], indirect=True)


class Kernel(extend.Implementation):
    """Computes `function(call, flat)`, where `flat` has one axis for each label, and records the names of the results."""

    name, version = "mine", "1"

    def __init__(self, function, reason=lambda call: None):
        self.function, self.reason_of, self.ran = function, reason, []

    def refuses(self, call):
        return self.reason_of(call)

    def run(self, call, config, operands):
        self.ran.append(tuple(call.results))
        results = self.function(call, call.flatten(operands))
        results = tuple(results[name].reshape(call.shape_of(name)).astype(dtype) for name, dtype in call.results.items())
        return results if call.further else results[0]


# --- a softmax cross entropy


def cross_entropy(logits, labels, *, smoothing=0.0):
    """The loss and the logarithm of the sum of exponentials."""
    lse = jax.nn.logsumexp(logits, -1)
    given = jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
    return lse - (1 - smoothing) * given - smoothing * jnp.mean(logits, -1), lse


def loss_alone(logits, labels, **static):
    return cross_entropy(logits, labels, **static)[0]


def loss_kernel(call, flat):
    loss, lse = cross_entropy(flat["logits"], flat["labels"], **call.keywords)
    return dict(loss=loss, lse=lse)


def loss_backward(call, flat):
    """Compute the gradient from the saved lse; no other result is read."""
    logits, smoothing = flat["logits"], call.keywords.get("smoothing", 0.0)
    wanted = (1 - smoothing) * jax.nn.one_hot(flat["labels"], logits.shape[-1], dtype=logits.dtype) + smoothing / logits.shape[-1]
    return dict(d_logits=(jnp.exp(logits - flat["lse"][:, None]) - wanted) * flat["d_loss"][:, None])


def declared_loss(forward=False, backward=False) -> Any:
    """The operation, and its kernels by role."""
    loss = extend.operation(
        f"toy_loss_{next(NAMES)}",
        cross_entropy,
        operands=dict(logits="N V", labels="N"),
        results=dict(loss="N"),
        saved=dict(lse="N"),
        constant="labels",
    )
    return loss, registered(loss, loss_kernel if forward else None, loss_backward if backward else None)


def registered(operation, forward, backward):
    kernels = {}
    if forward:
        extend.register(operation, kernels.setdefault("forward", Kernel(forward)))
    if backward:
        extend.register(operation.backward, kernels.setdefault("backward", Kernel(backward)))
    return kernels


# --- an rms norm


def rms_norm(x, g, *, epsilon=1e-3):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + epsilon) * g[None]


def norm_kernel(call, flat):
    return dict(y=rms_norm(flat["x"], flat["g"], **call.keywords))


def norm_backward(call, flat):
    x, g, d = flat["x"], flat["g"], flat["d_y"]
    r = jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + call.keywords["epsilon"])
    dg = d * g[None]
    return dict(d_x=r * dg - x * r**3 * jnp.mean(dg * x, -1, keepdims=True), d_g=jnp.sum(d * x * r, 0))


def declared_norm(forward=False, backward=False) -> Any:
    norm = extend.operation(f"toy_norm_{next(NAMES)}", rms_norm, operands=dict(x="N D", g="D"), results=dict(y="N D"), unsharded="D")
    return norm, registered(norm, norm_kernel if forward else None, norm_backward if backward else None)


# --- what they give


X, G = random((8, 4), np.float32), 1 + random((4,), np.float32, 1)
LOGITS, LABELS = random((8, 4), np.float32, 2), np.arange(8, dtype=np.int32) % 4


@pytest.fixture(scope="module")
def case(request):
    """Each operation with no kernel, or with both."""
    kernels = request.param == "kernels"
    with registrations.undone():
        yield declared_loss(kernels, kernels), declared_norm(kernels, kernels)


def close(ours, plain, *args):
    got, want = jax.jit(ours)(*args), jax.jit(plain)(*args)
    for one, true in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert one.shape == true.shape and one.dtype == true.dtype
        np.testing.assert_allclose(one, true, atol=2e-5 * max(1.0, np.abs(true).max()), rtol=0)


def scalar(f, *rest):
    """A scalar of the first arguments in which each element has a cotangent of its own."""

    def weighted(*args):
        y = f(*args, *rest)
        return jnp.sum(jnp.sin(y + jnp.arange(y.size, dtype=y.dtype).reshape(y.shape)))

    return weighted


def all_of(f, floats):
    """Values and derivatives of the first arguments."""

    def all(*args):
        s = scalar(f, *args[floats:])
        moved, which = args[:floats], tuple(range(floats))
        return (
            f(*args),
            jax.jvp(s, moved, tuple(jnp.cos(x) for x in moved)),
            jax.grad(s, which)(*moved),
            jax.hessian(s, which)(*moved),
        )

    return all


@BOTH
def test_values_and_derivatives(case):
    (loss, kernels), (norm, of_norm) = case
    close(all_of(loss, 1), all_of(loss_alone, 1), LOGITS[:2], LABELS[:2])
    close(all_of(norm, 2), all_of(rms_norm, 2), X[:2], G)
    assert all(kernel.ran for kernel in (*kernels.values(), *of_norm.values()))


@BOTH
def test_vmap_over_any_operand(case):
    (loss, _), (norm, _) = case

    def over(f, axes):
        """The values, and the derivative with respect to the first argument through the map and inside of it."""
        mapped = jax.vmap(f, axes)
        which = (0, 1) if f in (norm, rms_norm) else 0
        inside = jax.vmap(jax.grad(scalar(f), which), axes)
        return lambda a, b: (mapped(a, b), jax.grad(scalar(mapped), which)(a, b), inside(a, b))

    logits, labels = np.stack([LOGITS, 2 * LOGITS, -LOGITS], 1), np.stack([LABELS, LABELS[::-1], 0 * LABELS])
    for axes, args in {(1, 0): (logits, labels), (None, 0): (LOGITS, labels)}.items():
        close(over(loss, axes), over(loss_alone, axes), *args)
    x, g = np.stack([X, 2 * X, -X], 1), np.stack([G, -G, 2 * G], 1)
    for axes, args in {(1, None): (x, G), (None, 1): (X, g)}.items():
        close(over(norm, axes), over(rms_norm, axes), *args)


@KERNELS
def test_any_number_of_axes_and_static_keywords(case):
    (loss, _), (norm, _) = case
    both = lambda f, *args, **kw: (f(*args, **kw), jax.grad(lambda *a: jnp.sin(f(*a, **kw)).sum())(*args))

    def ours(logits, labels, x, g):
        return (
            both(loss, logits.reshape(2, 4, 4), labels.reshape(2, 4), ranks=dict(N=2), smoothing=0.25),
            both(loss, logits[0], labels[0], ranks=dict(N=0)),
            both(norm, x.reshape(2, 2, 2, 4), g, ranks=dict(N=3), epsilon=0.5),
            both(norm, x[0], g, ranks=dict(N=0)),
        )

    def plain(logits, labels, x, g):
        smoothed = lambda logits: loss_alone(logits.reshape(8, 4), labels, smoothing=0.25).reshape(2, 4)
        first = lambda logits: loss_alone(logits[None], labels[:1])[0]
        wide = lambda x: rms_norm(x.reshape(8, 4), g, epsilon=0.5).reshape(2, 2, 2, 4)
        one = lambda x: rms_norm(x[None], g)[0]
        return both(smoothed, logits.reshape(2, 4, 4)), both(first, logits[0]), both(wide, x.reshape(2, 2, 2, 4)), both(one, x[0])

    close(ours, plain, LOGITS, LABELS, X, G)


def test_a_backward_whose_kernel_refuses_sums_over_all_axes():
    """The gradient of the parameter is a sum over the rows, however many axes they have."""
    with registrations.undone():
        norm, _ = declared_norm()
        extend.register(norm.backward, Kernel(None, lambda call: "not today"))
        of = lambda f: jax.jit(lambda x, g: jax.jvp(jax.grad(scalar(f), (0, 1)), (x, g), (x, g)))
        close(
            of(functools.partial(norm, ranks=dict(N=3))),
            of(lambda x, g: rms_norm(x.reshape(8, 4), g).reshape(x.shape)),
            X.reshape(2, 2, 2, 4),
            G,
        )


def test_equal_keywords_of_other_types():
    """They are different, as for static arguments of `jax.jit`."""
    told = extend.operation("toy_told", lambda x, *, n: x * (1 if n is True or n == (1.0,) and type(n[0]) is int else 2),
        operands=dict(x="N"), results=dict(y="N"))  # fmt: skip
    x = jnp.ones(2)
    for f in (told, lambda x, n: jax.jit(lambda x: told(x, n=n))(x)):
        got = [float(f(x, n=n)[0]) for n in (1, True, 1.0, True, (1.0,), (1,))]
        assert got == [2, 1, 2, 1, 2, 1]
    signed = extend.operation("toy_signed", lambda x, *, n: x * math.copysign(1, n), operands=dict(x="N"), results=dict(y="N"))
    assert [float(signed(x, n=n)[0]) for n in (0.0, -0.0, 0.0)] == [1, -1, 1]


@KERNELS
def test_the_dtypes(case):
    """bfloat16, and an array without rows."""
    (loss, _), (norm, _) = case
    x, g = jnp.asarray(X, jnp.bfloat16), jnp.asarray(G, jnp.bfloat16)
    y, gradients = jax.value_and_grad(lambda x, g: norm(x, g, epsilon=0.5).sum(), (0, 1))(x, g)
    assert [a.dtype for a in (y, *gradients)] == [jnp.bfloat16] * 3
    assert loss(LOGITS[:0], LABELS[:0]).shape == (0,)
    assert jax.grad(scalar(loss))(LOGITS[:0], LABELS[:0]).shape == (0, 4)
    assert not np.any(jax.grad(scalar(norm), 1)(jnp.asarray(X[:0]), jnp.asarray(G)))


@pytest.mark.parametrize(
    ("case", "kind"),
    [("reference", AxisType.Auto), ("kernels", AxisType.Explicit)],
    ids=lambda of: getattr(of, "name", of),
    indirect=["case"],
)
def test_split_rows(case, kind):
    """No data moves for the rows.  The gradient of the shared parameter is added up over devices."""
    (loss, _), (norm, _) = case
    mesh = jax.make_mesh((8,), ("d",), axis_types=(kind,))

    def of(loss, norm):
        return (
            lambda logits, labels: jax.value_and_grad(scalar(loss))(logits, labels)[1],
            lambda x, g: jax.grad(scalar(norm), (0, 1))(x, g),
        )

    with jax.set_mesh(mesh):
        place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
        rows = [(place(LOGITS, P("d")), place(LABELS, P("d"))), (place(X, P("d")), place(G, P()))]
        truths = [f(*args) for f, args in zip(of(loss_alone, rms_norm), ((LOGITS, LABELS), (X, G)), strict=True)]
        for f, args, truth, sends in zip(of(loss, norm), rows, truths, ({}, {"all-reduce": 1}), strict=True):
            f = jax.jit(f)
            assert collectives(f.lower(*args).compile()) == sends
            got = f(*args)
            for one, true in zip(jax.tree.leaves(got), jax.tree.leaves(truth), strict=True):
                np.testing.assert_allclose(one, true, atol=1e-5)
            assert jax.tree.leaves(got)[0].sharding.spec[0] == "d"
    half = jax.make_mesh((2, 4), ("d", "v"), axis_types=(kind, kind))
    if kind is AxisType.Explicit:
        with jax.set_mesh(half), pytest.raises(Exception, match=r"axis D0 of x is sharded over 'v', want it unsharded"):
            norm(jax.device_put(X, NamedSharding(half, P("d", "v"))), G)
    else:
        got = jax.jit(norm)(jax.device_put(X, NamedSharding(half, P("d", "v"))), G)
        np.testing.assert_allclose(got, rms_norm(X, G), atol=1e-5)


@KERNELS
def test_shard_map(case):
    """The gradient of a replicated parameter is the sum over devices."""
    (loss, _), (norm, _) = case
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    over = lambda f, *specs: jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=P("d"))
    both = jax.grad(lambda x, g: jnp.sin(norm(x, g)).sum(), (0, 1))
    inside = jax.shard_map(both, mesh=mesh, in_specs=(P("d"), P()), out_specs=(P("d"), P()))
    close(inside, jax.grad(lambda x, g: jnp.sin(rms_norm(x, g)).sum(), (0, 1)), X, G)
    close(jax.grad(scalar(over(norm, P("d"), P())), (0, 1)), jax.grad(scalar(rms_norm), (0, 1)), X, G)
    close(jax.grad(scalar(over(loss, P("d"), P("d")))), jax.grad(scalar(loss_alone)), LOGITS, LABELS)


@KERNELS
def test_export(case):
    """A stored program gives the same, also one of any number of rows, in which no kernel can run that wants a number."""
    pytest.importorskip("flatbuffers")
    (loss, _), (norm, _) = case
    (n,) = jax.export.symbolic_shape("n")
    for f, plain, args in ((loss, loss_alone, (LOGITS, LABELS)), (norm, rms_norm, (X, G))):
        gradient = jax.jit(lambda *args, f=f: (f(*args), jax.grad(scalar(f))(*args)))
        shapes = [jax.ShapeDtypeStruct((n, *x.shape[1:]) if len(x) == 8 else x.shape, x.dtype) for x in args]
        for how in (args, shapes):
            stored = jax.export.deserialize(jax.export.export(gradient)(*how).serialize())
            close(stored.call, lambda *args, plain=plain: (plain(*args), jax.grad(scalar(plain))(*args)), *args)


# --- what runs


def test_saved_results_are_computed_only_where_a_derivative_needs_them():
    """A derivative needs them if a kernel computes the transpose, and it is called."""
    gradient = lambda loss: jax.jit(jax.grad(lambda x: loss(x, LABELS).sum()))(LOGITS)
    loss, kernels = declared_loss(forward=True)
    jax.jit(loss)(LOGITS, LABELS)
    gradient(loss)
    assert {*kernels["forward"].ran} <= {("loss",)}
    loss, kernels = declared_loss(forward=True, backward=True)
    jax.jit(loss)(LOGITS, LABELS)
    assert kernels["forward"].ran == [("loss",)] and not kernels["backward"].ran
    jax.jit(lambda x: jax.jvp(lambda x: loss(x, LABELS), (x,), (x,))[0])(LOGITS)
    assert {*kernels["forward"].ran} == {("loss",)} and not kernels["backward"].ran  # the tangent is not asked for
    gradient(loss)
    assert "lse" in kernels["forward"].ran[-1]
    assert kernels["backward"].ran == [("d_logits",)]


def test_a_derivative_uses_the_kernel_of_the_transpose():
    """Three times too large, so that one sees who did it; without it, the reference's own derivative is taken."""
    gradient = lambda norm: jax.jit(jax.grad(lambda x, g: norm(x, g).sum(), (0, 1)))(X, G)
    norm, _ = declared_norm()
    plain = gradient(norm)
    with registrations.undone():
        extend.register(norm.backward, Kernel(lambda *call: {name: 3 * y for name, y in norm_backward(*call).items()}))
        for one, true in zip(gradient(norm), plain, strict=True):
            np.testing.assert_allclose(one, 3 * true, atol=1e-4)
        norm_rows = jaxext.explain(jax.grad(lambda x: norm(x, G).sum()))(X).rows
        assert [(row.op, row.chosen) for row in norm_rows][-1] == (f"{norm.__name__}_backward", "mine")
    for one, true in zip(gradient(norm), plain, strict=True):
        np.testing.assert_allclose(one, true, atol=1e-6)


def test_a_constant_operand_of_floats():
    """It has no derivative, and needs none where nobody asks."""
    scale = extend.operation("toy_constant", jnp.multiply, operands=dict(x="N", s="N"), results=dict(y="N"), constant="s")
    x, s = X[:, 0], X[:, 1]
    np.testing.assert_allclose(jax.grad(lambda x: scale(x, s).sum())(x), s)
    np.testing.assert_allclose(jax.grad(lambda x: scale(x, jax.lax.stop_gradient(x)).sum())(x), x)
    with pytest.raises(TypeError, match="toy_constant: s is not differentiable, want it constant: jax.lax.stop_gradient"):
        jax.grad(lambda s: scale(x, s).sum())(s)
    assert repr(scale.backward) == "toy_constant_backward: x[N], s[N], y[N], d_y[N] -> d_x[N]"


def test_several_results():
    """A tuple.  A cotangent of one alone, and results of different labels and dtypes."""

    def moments(x):
        return jnp.mean(x, -1), jnp.mean(x * x, -1), jnp.argmax(x, -1)

    declared = extend.operation("toy_moments", moments, operands=dict(x="N D"), results=dict(m="N", s="N", i="N"), constant="i")
    assert repr(declared) == "toy_moments: x[N D] -> m[N], s[N], i[N]"
    assert repr(declared.backward) == "toy_moments_backward: x[N D], m[N], s[N], i[N], d_m[N], d_s[N] -> d_x[N D]"
    kernel = Kernel(lambda call, flat: dict(d_x=jax.vjp(lambda x: moments(x)[:2], flat["x"])[1]((flat["d_m"], flat["d_s"]))[0]))
    for _ in range(2):
        close(declared, moments, X)
        close(jax.grad(lambda x: jnp.sin(declared(x)[1]).sum()), jax.grad(lambda x: jnp.sin(moments(x)[1]).sum()), X)
        close(jax.hessian(lambda x: jnp.sin(declared(x)[0] * declared(x)[1]).sum()),
              jax.hessian(lambda x: jnp.sin(moments(x)[0] * moments(x)[1]).sum()), X[:2])  # fmt: skip
        if not kernel.ran:
            extend.register(declared.backward, kernel)
    assert kernel.ran


TRACED = {
    "grad": jax.grad,
    "jit of grad": lambda f: jax.jit(jax.grad(f)),
    "jit of jvp": lambda f: jax.jit(lambda s: jax.jvp(f, (s,), (s,))),
    "vmap": lambda f: lambda s: jax.vmap(f)(jnp.stack([s, 2 * s])),
    "jit of vmap of grad": lambda f: jax.jit(lambda s: jax.vmap(jax.grad(f))(jnp.stack([s, 2 * s]))),
    "scan": lambda f: lambda s: jax.lax.scan(lambda s, _: (s + 1, f(s)), s, length=2),
}


@pytest.mark.parametrize("how", TRACED)
def test_a_reference_that_closes_over_a_traced_value(how):
    """Its derivative is there, and it is mapped."""

    def of(declared, s):
        scaled = lambda x: (x * s, jnp.sin(x))
        names: Any = dict(operands=dict(x="N"), results=dict(y="N", k="N"), constant="k")
        y, k = extend.operation(f"toy_closed_{next(NAMES)}", scaled, **names)(X[:, 0]) if declared else scaled(X[:, 0])
        return jnp.sum(y * k)

    with registrations.undone():
        got, want = (TRACED[how](functools.partial(of, declared))(jnp.float32(2)) for declared in (True, False))
    for one, true in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, true, rtol=1e-5)


def test_kernels_have_no_traced_values():
    """A kernel closes over one itself, or computes a reference that does."""

    def call(s, kernel):
        scaled = extend.operation(f"toy_closed_{next(NAMES)}", lambda x: x * s, operands=dict(x="N"), results=dict(y="N"))
        extend.register(scaled, Kernel(kernel(s)))
        return scaled(X[0], implementation="mine").sum()

    with registrations.undone():
        with pytest.raises(TypeError, match=r"register: mine closes over float32\[\], a traced value, want it as an operand"):
            jax.grad(call)(jnp.float32(2), lambda s: functools.partial(lambda call, flat: dict(y=flat["x"] * s)))
        with pytest.raises(
            NotImplementedError, match=r"'mine' does not .*: the reference .* closes over float32\[\], a traced value, want"
        ):
            jax.jit(lambda s: call(s, lambda s: norm_kernel))(jnp.float32(2))


def test_a_named_implementation():
    """It holds for the derivative, too, and where it refuses, that is an error."""
    norm, _ = declared_norm()
    refuses = lambda call: None if call.sizes["N"] > 2 else f"N is {call.sizes['N']}, want more than 2"
    kernel, backward = (Kernel(function, refuses) for function in (norm_kernel, norm_backward))
    extend.register(norm, kernel)
    np.testing.assert_allclose(norm(X[:2], G), rms_norm(X[:2], G), atol=1e-6)
    assert not kernel.ran
    with pytest.raises(NotImplementedError, match=rf"{norm.__name__}: implementation 'mine' does not support this call: N is 2, want more"):
        norm(X[:2], G, implementation="mine")
    extend.register(norm.backward, backward)
    with jaxext.use_implementation("mine"):
        jax.grad(lambda x: norm(x, G).sum())(X)
    assert kernel.ran and backward.ran
    with pytest.raises(NotImplementedError, match=rf"{norm.__name__}: implementation 'mine' does not .*: vmap maps an operand or a result"):
        jax.vmap(lambda g: norm(X, g, implementation="mine"))(np.stack([G, G]))
    with pytest.raises(ValueError, match=rf"{norm.__name__}: implementation is 'fast', want one of \['mine', 'xla'\] or None"):
        norm(X, G, implementation="fast")
    loss, _ = declared_loss()
    extend.register(
        loss, Kernel(loss_kernel, lambda call: None if call.dtypes["labels"] == np.int32 else f"{call.dtypes['labels']} labels")
    )
    with pytest.raises(NotImplementedError, match=rf"{loss.__name__}: implementation 'mine' does not support this call: int64 labels"):
        loss(LOGITS, LABELS.astype(np.int64), implementation="mine")
    kernel.ran.clear()
    np.testing.assert_allclose(norm(X, G, implementation="xla"), rms_norm(X, G), atol=1e-6)
    assert not kernel.ran


def test_tune_leaves_declared_operations_out(tmp_path):
    """It would draw labels and saved results at random."""
    loss, kernels = declared_loss(True, True)
    rows = jaxext.tune(loss, table=tmp_path / "table.json")(LOGITS, LABELS).rows
    assert len(rows) == 3 and not any(row.winner for row in rows)  # the loss, the loss with what is saved, and the gradient
    assert {row.skipped for row in rows} == {
        "random operands need not be ones that the operation accepts, such as labels, or saved results that fit the others"
    }


def test_a_name_in_derivatives():
    """A tangent is the reference's; a cotangent is computed by the one of that name, or by the reference if there is none."""
    norm, kernels = declared_norm(True, True)
    named = lambda x: norm(x, G, implementation="mine")
    plain = lambda x: rms_norm(x, G)
    close(lambda x: jax.jvp(named, (x,), (x,)), lambda x: jax.jvp(plain, (x,), (x,)), X)
    assert not kernels["backward"].ran
    second = lambda f: lambda x: (jax.grad(scalar(f))(x), jax.jacfwd(jax.grad(scalar(f)))(x))
    close(second(named), second(plain), X[:2])
    assert kernels["backward"].ran
    norm, _ = declared_norm(True)
    other = Kernel(norm_backward)
    other.name = "other"
    extend.register(norm.backward, other)
    close(jax.grad(scalar(named)), jax.grad(scalar(plain)), X)
    assert not other.ran
    jax.grad(lambda x: norm(x, G).sum())(X)
    assert other.ran


def test_the_transpose_can_be_called():
    """It takes the arguments that a kernel of it gets; it has no transpose of its own."""
    loss, _ = declared_loss()
    y, lse = cross_entropy(LOGITS, LABELS)
    close(
        lambda x: loss.backward(x, LABELS, y, lse, y), jax.grad(lambda x: jnp.sum(jax.lax.stop_gradient(y) * loss_alone(x, LABELS))), LOGITS
    )
    with pytest.raises(AttributeError, match=rf"{loss.__name__}_backward has no backward: its derivative is its reference's"):
        _ = loss.backward.backward
    rounded = operation(f"toy_{next(NAMES)}", jnp.round, operands=dict(x="N"), results=dict(y="N"), constant="y")
    with pytest.raises(AttributeError, match="toy_[0-9]+ has no backward: all its operands or all its results are constant"):
        _ = rounded.backward
    assert not np.any(jax.grad(lambda x: rounded(x).sum())(X[:, 0]))


# --- what does not fit

EASY: Any = dict(operands=dict(x="N D"), results=dict(y="N D"))
operation: Any = extend.operation  # of which what is no str is asked too


@functools.cache
def TOY() -> Any:
    labels: dict[str, Any] = dict(operands=dict(x="N D", g="D"), results=dict(y="N D"), unsharded="D")
    return operation(f"toy_{next(NAMES)}", lambda x, g, **_: x * g[None], **labels)


@functools.cache
def SCALED() -> Any:
    return operation(f"toy_{next(NAMES)}", lambda x, scale, *, shift=0.0: x * scale + shift, **EASY)


@pytest.mark.parametrize(
    ("declare", "error", "message"),
    [
        (lambda: operation("bad", 3, **EASY), TypeError, "operation: the reference of bad is 3, want a function"),
        (lambda: operation("bad", abs, operands=dict(x="N d"), results=dict(y="N")), ValueError,
            "operation: x of bad is 'N d', want different words of letters that begin with a capital"),
        (lambda: operation("bad", abs, operands=dict(x="N N"), results=dict(y="N")), ValueError,
            "operation: x of bad is 'N N', want different"),
        (lambda: operation("bad", abs, operands=dict(x="N"), results=dict(y="N2")), ValueError, "operation: y of bad is 'N2', want"),
        (lambda: operation("bad", abs, operands=dict(x=("N",)), results=dict(y="N")), TypeError,
            r"operation: x of bad is \('N',\), want a str"),
        (lambda: operation("bad", abs, operands=dict(x="N"), results=dict(x="N")), ValueError,
            "operation: bad has two arrays of one name, want different names"),
        (lambda: operation("bad", abs, **EASY, saved=dict(y="N")), ValueError, "operation: bad has two arrays of one name"),
        (lambda: operation("bad", abs, operands=dict(x="N D", d_y="N D"), results=dict(y="N D")), ValueError,
            "operation: bad has y and d_y, the name of the cotangent of y in `backward`, want another name"),
        (lambda: operation("bad", abs, operands=dict(x="N D"), results=dict(d_x="N D")), ValueError, "operation: bad has x and d_x, the"),
        (lambda: operation("bad", lambda x, *, y: x, operands=dict(x="N", w="N"), results=dict(z="N")), ValueError,
            r"operation: the reference of bad takes \['x'\], want the operands \['x', 'w'\]"),
        (lambda: operation("bad", abs, **EASY, saved=dict(d_y="N")), ValueError, "operation: bad has y and d_y, the name"),
        (lambda: operation("bad", abs, operands={}, results=dict(y="N")), ValueError, "operation: bad has no operands, want at least one"),
        (lambda: operation("bad", abs, operands=dict(x="N"), results={}), ValueError, "operation: bad has no results, want at least one"),
        (lambda: operation("bad", abs, **EASY, unsharded="Q"), ValueError,
            r"operation: unsharded has 'Q', bad has the labels \['N', 'D'\]"),
        (lambda: operation("bad", abs, **EASY, constant="z"), ValueError,
            r"operation: constant has 'z', bad has the operands and results \['x', 'y'\]"),
        (lambda: operation("bad", abs, **EASY, unsharded="N D"), ValueError,
            "operation: bad has no label that all results have and that is not in `unsharded`, want one, for vmap"),
        (lambda: operation("bad", abs, operands=dict(x="N D"), results=dict(y="N", z="D")), ValueError,
            "operation: bad has no label that all"),
        (lambda: operation("bad", abs, operands=["x"], results=dict(y="N")), TypeError,
            r"operation: operands of bad is \['x'\], want a dict of names and labels"),
        (lambda: operation("bad", abs, operands=dict(x="N"), results="N"), TypeError, "operation: results of bad is 'N', want a dict"),
        (lambda: operation("bad", abs, **EASY, saved="N"), TypeError, "operation: saved of bad is 'N', want a dict"),
        (lambda: operation("bad", abs, **EASY, unsharded=["D"]), TypeError, r"operation: unsharded of bad is \['D'\], want a str"),
        (lambda: operation("bad", abs, **EASY, constant=None), TypeError, "operation: constant of bad is None, want a str"),
        (lambda: operation(3, abs, **EASY), TypeError, "operation: the name is 3, want a str"),
        (lambda: operation("two words", abs, **EASY), ValueError, "operation: the name is 'two words', want an identifier"),
        (lambda: operation("conv2d", abs, **EASY), ValueError,
            "operation: the name is 'conv2d', but 'conv2d' is taken, want another name"),
        (lambda: operation("linear", abs, **EASY), ValueError, "operation: the name is 'linear', but 'linear' is taken"),
        (lambda: operation(TOY().__name__, abs, **EASY), ValueError,
            "operation: the name is 'toy_.*', but 'toy_.*' is taken"),
        (lambda: extend.define(TOY().__name__, x="B N K", w="B K M", y="B N M"), ValueError, "define: the name is 'toy_"),
        (lambda: extend.define(f"{TOY().__name__}_backward", x="B N K", w="B K M", y="B N M"), ValueError, "define: the name is 'toy_"),
    ],
)  # fmt: skip
def test_a_declaration_that_does_not_fit(declare, error, message):
    with pytest.raises(error, match=message):
        declare()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: TOY()(X), TypeError, "toy_[0-9]+: got 1 arrays, want 2: x, g"),
        (lambda: TOY()(X, G, G), TypeError, "toy_[0-9]+: got 3 arrays, want 2: x, g"),
        (lambda: TOY()(X, X), TypeError, r"toy_[0-9]+: g has the shape \(8, 4\), want 1 axes: D"),
        (lambda: TOY()(X, G[:2]), TypeError, "toy_[0-9]+: axis D of g is 2, want 4 as in x"),
        (lambda: TOY()(X, G, ranks=dict(N=2)), TypeError, r"toy_[0-9]+: x has the shape \(8, 4\), want 3 axes: N=2 D"),
        (lambda: TOY()(X, G, ranks=dict(D=0)), ValueError, "toy_[0-9]+: label D has the rank 0, want 1, since the operation is not"),
        (lambda: TOY()(X, G, ranks=dict(Q=1)), ValueError, r"toy_[0-9]+: there is no label 'Q', want one of \['N', 'D'\]"),
        (lambda: TOY()(X, G, ranks=dict(N=-1)), ValueError, "toy_[0-9]+: label N has the rank -1, want a number of axes"),
        (lambda: TOY()(X, G, ranks=2), TypeError, "toy_[0-9]+: ranks is 2, want a dict of labels and numbers of axes"),
        (lambda: TOY()(X.tolist(), G), TypeError, "toy_[0-9]+: x is .*, want an array"),
        (lambda: TOY()(X, LABELS[:4]), TypeError,
            "toy_[0-9]+: g is int32, want floating-point numbers, or `constant='g'` in its declaration"),
        (lambda: SCALED()(X, scale=2.0, implementaton="xla"), TypeError,
            r"toy_[0-9]+: got an unexpected keyword argument 'implementaton', want what its reference takes: x, scale=, shift=$"),
        (lambda: SCALED()(X), TypeError,
            "toy_[0-9]+: missing a required argument: 'scale', want what its reference takes: x, scale=, shift="),
        (lambda: TOY()(X, G, factor=[1]), TypeError, r"toy_[0-9]+: keyword factor is \[1\], want a hashable value"),
        (lambda: TOY()(X, G, factor=jnp.ones(())), TypeError, "toy_[0-9]+: keyword factor is .*, want a hashable value"),
    ],
)  # fmt: skip
def test_a_call_that_does_not_fit(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        (lambda x: (x, x), r"returns arrays of the shapes \[\(8, 4\), \(8, 4\)\], want \[\(8, 4\)\] for \['y'\]"),
        (lambda x: x[0], r"returns arrays of the shapes \[\(4,\)\], want \[\(8, 4\)\] for \['y'\]"),
        (lambda x: None, r"returns arrays of the shapes \[None\], want"),
        (lambda x: {"y": x}, r"returns arrays of the shapes \[None\], want"),
        (lambda x: jnp.argsort(x), r"returns y in int64, want floating-point numbers, or `constant='y'` in its declaration"),
    ],
)  # fmt: skip
def test_a_reference_that_gives_something_else(reference, message):
    name = f"toy_{next(NAMES)}"
    with pytest.raises(TypeError, match=f"{name}: the reference {message}"):
        operation(name, reference, **EASY)(X)
