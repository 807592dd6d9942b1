"""Programs around the operations: control flow, custom derivatives, rematerialisation and export."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bilinear import (
    CONV2D,
    DEPTHWISE,
    DOT,
    GROUPED,
    LAX,
    NHWC,
    OURS,
    Problem,
    close,
    conv,
    integers,
    same,
    truth,
)
from jax import export, lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from public_operations import OF_ONE_MATRIX
from test_sharding import MESH, place

import jaxext
from jaxext import checkpoint_policies
from jaxext.core import primitive
from jaxext.core.form import owner


def step(ops, x, w):
    """A layer that keeps x's shape and small integers: a depthwise convolution, then a matmul over the channels."""
    y = ops.conv(x, w["d"], (1, 1), "SAME", dimension_numbers=NHWC, feature_group_count=x.shape[-1])
    return ops.dot(y, w["m"], (((3,), (0,)), ((), ()))) % 3


X = integers((2, 4, 3, 4))
W = {"d": integers((3, 3, 1, 4), 1), "m": integers((4, 4), 2)}


def remat_in_scan(ops, x, w):
    body = jax.checkpoint(functools.partial(step, ops), policy=checkpoint_policies.dots_saveable)
    return lax.scan(lambda x, _: (body(x, w), None), x, length=2)[0]


def mapped(ops, x, w):
    return lax.map(lambda x: step(ops, x[None], w)[0], x)


@pytest.mark.parametrize("program", [remat_in_scan, mapped])
def test_control_flow(program):
    """Values, gradients, tangents and examples of a batch go through as they do with lax."""

    def everything(ops):
        f = functools.partial(program, ops)
        loss = lambda x, w: jnp.sum(f(x, w) * X)

        def run(x, w):
            batch = jnp.stack([x, x + 1])
            tangent = jax.jvp(f, (x, w), (x, w))
            return tangent, jax.grad(loss, (0, 1))(x, w), jax.vmap(f, (0, None))(batch, w), jax.vmap(jax.grad(loss, 1), (0, None))(batch, w)

        return jax.jit(run)(X, W)

    same(everything(OURS), everything(LAX))


def test_while_loop():
    """The data decide the number of steps; values, tangents and vmap are compared (reverse mode has none, in jax)."""

    def program(ops, x, w):
        return lax.while_loop(lambda s: jnp.sum(s[0]) < 60, lambda s: (step(ops, s[0], w) + s[1], s[1] + 1), (x, jnp.ones((), x.dtype)))

    def run(ops):
        f = functools.partial(program, ops)
        return jax.jit(lambda x: (jax.jvp(lambda x: f(x, W), (x,), (x,)), jax.vmap(lambda x: f(x, W))(jnp.stack([x, x + 5]))))(X)

    got = run(OURS)
    assert 1 < got[0][0][1] < 50
    same(got, run(LAX))


def test_custom_derivatives_around_an_operation():
    """custom_jvp and custom_vjp whose rules use the operation, under grad, jvp, vmap and both orders."""
    problem = CONV2D

    def make(ops):
        call = functools.partial(problem.call, ops)

        @jax.custom_jvp
        def forward(x, w):
            return call(x, w)

        @forward.defjvp
        def _(primals, tangents):
            (x, w), (dx, dw) = primals, tangents
            return forward(x, w), call(dx, w) + 2 * call(x, dw)

        @jax.custom_vjp
        def reverse(x, w):
            return call(x, w)

        def bwd(residuals, ct):
            dx, dw = jax.vjp(call, *residuals)[1](ct)
            return 3 * dx, dw

        reverse.defvjp(lambda x, w: (call(x, w), (x, w)), bwd)
        return forward, reverse

    x, w = problem.operands("fprop")

    def run(ops):
        forward, reverse = make(ops)
        loss = lambda f: lambda x, w: jnp.sum(f(x, w) ** 2)
        hvp = jax.jvp(jax.grad(loss(forward), (0, 1)), (x, w), (x, w))
        batch = jax.vmap(jax.grad(loss(reverse), (0, 1)), (0, None))(jnp.stack([x, -x]), w)
        return hvp, jax.grad(loss(reverse), (0, 1))(x, w), batch

    same(jax.jit(functools.partial(run, OURS))(), jax.jit(functools.partial(run, LAX))())


# Rematerialisation.


def count(f, *args) -> int:
    """Products, ours and lax's, in a jaxpr and in those inside."""

    def inside(value):
        if isinstance(value, ClosedJaxpr | Jaxpr):
            jaxpr = value.jaxpr if isinstance(value, ClosedJaxpr) else value
            yield sum(eqn.primitive in {*owner, lax.dot_general_p, lax.conv_general_dilated_p} for eqn in jaxpr.eqns)
            for eqn in jaxpr.eqns:
                yield from inside(tuple(eqn.params.values()))
        elif isinstance(value, tuple | list):
            for v in value:
                yield from inside(v)

    return sum(inside(jax.make_jaxpr(f)(*args)))


def net(ops, w, x):
    """A convolution, a batched product (attention-like) and two plain ones: 2 + 2 products each with their gradients."""
    x = jnp.sin(CONV2D.call(ops, x, w["conv"]))
    x = x.reshape(8, -1, 16)
    x = jnp.sin(ops.dot(x, x, (((2,), (2,)), ((0,), (0,)))))
    x = jnp.sin(ops.dot(x, w["in"], (((2,), (0,)), ((), ()))))
    return jnp.sum(jnp.sin(ops.dot(x, w["out"], (((2,), (0,)), ((), ())))))


def net_operands():
    x, conv = CONV2D.operands("fprop")
    rows = CONV2D.y[1] * CONV2D.y[2]
    return {"conv": conv, "in": integers((rows, 4), 1), "out": integers((4, 4), 2)}, x


@pytest.mark.parametrize("name", ["dots_saveable", "dots_with_no_batch_dims_saveable", "offload_dot_with_no_batch_dims"])
def test_policies_save_what_they_save_of_lax(name):
    """jax's own know lax's primitives by identity: under them every product of ours would silently be computed twice."""
    theirs, ours = getattr(jax.checkpoint_policies, name), getattr(checkpoint_policies, name)
    if name.startswith("offload"):
        theirs, ours = theirs("device", "pinned_host"), ours("device", "pinned_host")
    w, x = net_operands()
    gradient = lambda ops, policy: jax.grad(jax.checkpoint(functools.partial(net, ops), policy=policy))
    got, want = count(gradient(OURS, ours), w, x), count(gradient(LAX, theirs), w, x)
    plain = count(jax.grad(functools.partial(net, OURS)), w, x)
    assert got == want
    assert got == plain if name == "dots_saveable" else plain < got < count(gradient(OURS, None), w, x)
    # The policies of jax themselves see none of ours, and a warning says so, where jax does not remember what they said.
    jax.clear_caches()
    with pytest.warns(UserWarning, match="use jaxext.checkpoint_policies"):
        assert count(gradient(OURS, theirs), w, x) == count(gradient(OURS, None), w, x) > plain


def test_a_saved_product_is_the_product():
    w, x = net_operands()
    want = jax.jit(jax.grad(functools.partial(net, OURS)))(w, x)
    got = jax.jit(jax.grad(jax.checkpoint(functools.partial(net, OURS), policy=checkpoint_policies.dots_saveable)))(w, x)
    close(got, want, rtol=1e-4)


def test_policies_of_the_user():
    """`seeing_products` shows a policy lax's primitive and its parameters, alone and combined with names."""
    seen = []

    def only_batched(primitive, *avals, **params):
        if primitive is lax.dot_general_p:
            seen.append(params["dimension_numbers"])
            return bool(params["dimension_numbers"][1][0])
        return False

    w, x = net_operands()
    gradient = lambda ops, policy: jax.grad(jax.checkpoint(functools.partial(net, ops), policy=policy))
    want = count(gradient(LAX, only_batched), w, x)
    shown, seen = list(seen), []
    assert count(gradient(OURS, checkpoint_policies.seeing_products(only_batched)), w, x) == want
    # Ours are told in the form's own order of axes; of how many axes of each kind is what lax says.
    kinds = lambda all: {tuple(len(axes) for pair in dims for axes in pair) for dims in all}
    assert kinds(seen) == kinds(shown)


def test_policies_combined():
    """`save_from_both_policies` with one that goes by names: neither a product nor a named value is computed again."""

    def named(ops, w, x):
        return net(ops, w, checkpoint_name(jnp.tan(x), "x"))

    w, x = net_operands()
    combine, names = jax.checkpoint_policies.save_from_both_policies, jax.checkpoint_policies.save_only_these_names("x")
    for ops, policy in ((OURS, checkpoint_policies.dots_saveable), (LAX, jax.checkpoint_policies.dots_saveable)):
        gradient = jax.grad(jax.checkpoint(functools.partial(named, ops), policy=combine(policy, names)))
        assert count(gradient, w, x) == count(jax.grad(functools.partial(net, ops)), w, x)
        assert str(jax.make_jaxpr(gradient)(w, x)).count(" tan ") == 1


# Export.


def total(problem, x, w):
    return jnp.sum(problem.call(OURS, x, w) ** 2)


def test_export_with_a_symbolic_batch():
    """Written, read and called again with two sizes of the batch: the product and its gradients."""
    problem = GROUPED
    x, w = problem.operands("fprop")
    (batch,) = export.symbolic_shape("n")
    f = jax.jit(lambda x, w: (problem.call(OURS, x, w), *jax.grad(functools.partial(total, problem), (0, 1))(x, w)))
    exported = export.export(f)(jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype), jax.ShapeDtypeStruct(w.shape, w.dtype))
    again = export.deserialize(exported.serialize())
    for n in (8, 3):
        y, dx, dw = jax.jit(again.call)(x[:n], w)
        same(np.asarray(y), truth(problem, "fprop", x, w)[:n])
        same((dx, dw), jax.jit(jax.grad(functools.partial(total, problem), (0, 1)))(x[:n], w))


@pytest.mark.parametrize(("problem", "axis"), [(DOT, "data"), (CONV2D, "model")], ids=str)
def test_export_of_a_sharded_program(problem, axis):
    """The program has eight devices: custom_partitioning cannot be written, so XLA's partitioner gets only what it does right (no grouped
    convolution).  One axis splits the batch, the other nothing or the filters."""
    x, w = problem.operands("fprop")
    f = jax.value_and_grad(functools.partial(total, problem), (0, 1))
    specs = P(axis), P(*(None,) * (w.ndim - 1), "model") if axis == "data" else P()
    exported = export.export(jax.jit(f, in_shardings=tuple(NamedSharding(MESH, spec) for spec in specs)))(x, w)
    again = export.deserialize(exported.serialize())
    assert again.nr_devices == 8
    assert "CustomSPMDPartitioning" not in str(again.mlir_module())
    same(jax.jit(again.call)(place(x, specs[0]), place(w, specs[1])), jax.jit(f)(x, w))


def test_export_for_one_device_called_on_several():
    """XLA's partitioner then splits what was exported: a grouped convolution in it gave a filter gradient multiplied by two or four, where
    the sizes were symbolic.
    """
    problem, axis = GROUPED, "data"
    x, w = problem.operands("fprop")
    f = jax.jit(jax.value_and_grad(functools.partial(total, problem), (0, 1)))
    (batch,) = export.symbolic_shape("n")
    for n in (batch, x.shape[0]):
        exported = export.export(f)(jax.ShapeDtypeStruct((n, *x.shape[1:]), x.dtype), jax.ShapeDtypeStruct(w.shape, w.dtype))
        again = export.deserialize(exported.serialize())
        same(jax.jit(again.call)(place(x, P(axis)), place(w, P())), f(x, w))


TRANSPOSED = Problem("transposed", (8, 4, 4, 8), (4, 4, 8, 8), CONV2D.axes, conv((1, 1), ((2, 2), (2, 2)), NHWC, lhs_dilation=(2, 2)))


@pytest.mark.parametrize("problem", [CONV2D, TRANSPOSED], ids=str)
def test_windows_of_an_exported_program_stay_whole(problem):
    """Rows over one mesh axis and filters over the other: XLA's partitioner multiplied results, and aborted on a transposed gradient."""
    x, w = integers((8, 8, 8, 8)), integers((3, 3, 8, 8), 1)
    if problem is TRANSPOSED:
        x, w = problem.operands("fprop")
    f = jax.jit(jax.value_and_grad(functools.partial(total, problem), (0, 1)))
    split = jax.jit(export.export(f)(x, w).call)
    same(split(place(x, P(None, "model")), place(w, P(None, None, None, "data"))), f(x, w))


@pytest.mark.parametrize("name", ["matmul", *OF_ONE_MATRIX])
def test_batches_of_an_exported_program_stay_with_their_sums(name):
    """XLA multiplied other matrices if one mesh axis split the batch, the other the sum, and the result was asked for otherwise."""
    x, w = integers((4, 4, 4)), integers((4, 4, 4), 1)
    fn = (lambda x, w: OF_ONE_MATRIX[name](x)) if name in OF_ONE_MATRIX else jaxext.matmul
    asked = lambda x, w: lax.with_sharding_constraint(fn(x, w), NamedSharding(MESH, P("model", "data")))
    split = place(x, P("data", None, "model")), place(w, P("data", "model"))
    exported = jax.jit(export.export(jax.jit(asked))(*split).call)
    same(exported(*split), fn(x, w))


@pytest.mark.parametrize("groups", ["batch_group_count", "feature_group_count"])
def test_the_channels_of_a_group_are_whole_in_an_exported_program(groups):
    """One mesh axis of four splits two groups and the channels of each: XLA of jax 0.12 aborted."""
    x, w = integers((4, 4, 4, 8)), integers((1, 1, 8 if groups == "batch_group_count" else 4, 16), 1)
    fn = functools.partial(jaxext.conv_general_dilated, window_strides=(1, 1), padding="SAME", dimension_numbers=NHWC, **{groups: 2})
    asked = lambda x, w: lax.with_sharding_constraint(fn(x, w), NamedSharding(MESH, P(None, "model", "data")))
    split = place(x, P(None, None, None, "data")), place(w, P(None, None, None, ("data", "model")))
    same(jax.jit(export.export(jax.jit(asked))(*split).call)(*split), fn(x, w))


@pytest.mark.parametrize("platforms", [("cpu", "cuda"), ("rocm", "cpu", "tpu")], ids="-".join)
def test_export_for_several_platforms(platforms, monkeypatch):
    """One program, on a machine without a GPU; it runs here, and each platform's part was lowered under its own name."""
    seen = []
    chosen = primitive.chosen
    monkeypatch.setattr(primitive, "chosen", lambda call, *args: (seen.append(call.platform), chosen(call, *args))[1])
    for problem in (DOT, DEPTHWISE):
        x, w = problem.operands("fprop")
        seen.clear()
        exported = export.export(jax.jit(jax.grad(functools.partial(total, problem), (0, 1))), platforms=platforms)(x, w)
        assert exported.platforms == platforms
        assert sorted(set(seen)) == sorted(platforms)
        got = jax.jit(export.deserialize(exported.serialize()).call)(x, w)
        same(got, jax.jit(jax.grad(functools.partial(total, problem), (0, 1)))(x, w))
