"""Operands beyond the factors: a product whose columns are scaled (scaled.py) has every rule of JAX in each of its three operands."""

import functools
import re

import jax
import numpy as np
import pytest
import scaled
import scaled_kernel
from cases import other_checks, random
from jax import lax
from jax.sharding import PartitionSpec as P
from lowered import custom_calls, operations

import jaxext
from jaxext import testing
from jaxext._compat import ShardingTypeError
from jaxext.parallel import cost
from jaxext.tuning.timing import relative_error

X, W, S = (random(shape, np.float32, seed) for seed, shape in enumerate([(4, 6), (6, 8), (8,)]))


@pytest.fixture(scope="module")
def form():
    return scaled.form()


@pytest.fixture(scope="module")
def product(form):
    return functools.partial(scaled.product, form)


def reference(x, w, s):
    return x @ w * s[None]


CHECKED = ("eager", "jit", "vmap", "nested vmap", "jvp", "vjp", "linear_transpose", "jvp of grad", "grad of grad")
SHARDED = ("shard_map", "gradient inside shard_map", "splits, automatic mesh", "splits, explicit mesh")


def test_transformations_with_a_rule_for_the_scale(product):
    """The rules that the scale has of its own; test_conformance has the other transformations."""
    summed = ("all-reduce",), lambda x, w, s: lax.psum(product(x, w, s), "y")
    splits = [
        testing.Split((P("x"), P(None, "y"), P("y")), P("x", "y")),  # the scale is split with the columns
        testing.Split((P(None, "y"), P("y"), P()), P(), *summed),
    ]
    checks = {*CHECKED, *SHARDED, "gradient per example", "halves", *(f"gradient, {name}" for name in SHARDED[2:])}
    skip = other_checks(*checks)
    testing.check_op(product, reference, (X, W, S), linear=(0, 1), splits=splits, show=False, skip=skip).raise_if_failed(complete=True)


@pytest.mark.parametrize("mapped", [(0, None, None), (None, 1, None), (None, None, 0), (0, None, 0), (1, 0, 0)])
def test_the_label_that_a_mapped_axis_joins(form, product, mapped):
    """The one for which the fewest operands get copies.  A scale mapped alone joins M, so w gets a copy for each, and x does not."""
    args = [np.stack([x, 2 * x, 3 * x], d or 0) if d is not None else x for x, d in zip((X, W, S), mapped, strict=True)]
    got = jax.vmap(product, mapped)(*args)
    np.testing.assert_allclose(got, jax.vmap(reference, mapped)(*args), rtol=1e-5, atol=1e-5)
    (eqn,) = (e for e in jax.make_jaxpr(jax.vmap(product, mapped))(*args).eqns if e.primitive.name == "scaled_y")
    ranks = form.unpack(eqn.params["static"].ranks)
    x, w, s = (d is not None for d in mapped)
    label = {(True, False, False): "N", (True, False, True): "B", (True, True, True): "B"}.get((x, w, s), "M")
    assert ranks == {"B": 0, "N": 1, "M": 1, "K": 1} | {label: ranks[label]} and ranks[label] == (1 if label == "B" else 2)


def test_a_copy_lies_behind_the_batch(product):
    """A vmap of everything, in a vmap of one factor."""
    x, w, s = (np.stack([a, -a]) for a in (X, W, S))
    w = np.stack([w, 2 * w, 3 * w])
    of_batch = lambda f: jax.vmap(jax.vmap(f), (None, 0, None))
    np.testing.assert_allclose(of_batch(product)(x, w, s), of_batch(reference)(x, w, s), rtol=1e-5, atol=1e-5)


def test_gradients_are_products_of_the_same_form(product):
    """Each role takes the scale along; the scale's own gradient is a product and a sum."""
    jaxpr = str(jax.make_jaxpr(jax.grad(lambda *args: product(*args).sum(), (0, 1, 2)))(X, W, S))
    assert set(re.findall(r"scaled_\w", jaxpr)) == {"scaled_y", "scaled_x", "scaled_w"}
    assert "dot_general" not in jaxpr


def test_sharding_in_types(product):
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        x, w, s = (jax.device_put(a, jax.NamedSharding(mesh, p)) for a, p in ((X, P("y")), (W, P(None, "x")), (S, P("x"))))
        y = jax.jit(product)(x, w, s)
        assert jax.typeof(y).sharding.spec == P("y", "x")
        np.testing.assert_allclose(y, reference(X, W, S), rtol=1e-5, atol=1e-6)
        with pytest.raises(ShardingTypeError, match="scaled_y: axis M0 is sharded over 'x' and over 'y', want one sharding"):
            product(x, w, jax.device_put(S, jax.NamedSharding(mesh, P("y"))))


def test_a_companion_that_is_not_differentiable():
    form = scaled.form(tangent=None)
    product = functools.partial(scaled.product, form)
    np.testing.assert_allclose(jax.grad(lambda x: product(x, W, S).sum())(X), np.broadcast_to(W @ S, X.shape), rtol=1e-5)
    with pytest.raises(TypeError, match="scaled_y: s is not differentiable, want it constant"):
        jax.grad(lambda s: product(X, W, s).sum())(S)


def test_no_transpose_in_a_companion(product):
    with pytest.raises(TypeError, match="scaled_y: not linear in s"):
        jax.linear_transpose(lambda s: product(X, W, s), S)(product(X, W, S))


def test_the_tools_see_all_operands(product, tmp_path):
    (row,) = jaxext.explain(product)(X, W, S).rows
    assert row.operands == ("x:f32[4,6]", "w:f32[6,8]", "s:f32[8]") and row.chosen == "xla"
    assert row.problem == "scaled_y B=1 N=4 K=6 M=8 float32 float32 float32 -> float32 precision=default"
    (tuned,) = jaxext.tune(product, backward=False, table=tmp_path / "table.json")(X, W, S).rows
    assert tuned.winner is not None and tuned.problem == row.problem
    assert cost("scaled", {"M": 2}, sizes=dict(N=4, K=6, M=8))["y"].held == {"x": 4 * 24, "w": 4 * 24, "s": 4 * 4, "y": 4 * 16}
    error, _ = relative_error(product(X, W, S), reference(*(a.astype(np.float64) for a in (X, W, S))))
    assert error < 1e-6


def test_a_kernel_is_called_with_all_operands(product, monkeypatch):
    """Compiled for a GPU that need not be there; values are compared in the interpreter (tests/kernels)."""
    # A kernel's kind, by which it is looked up in the record, is made of them.
    monkeypatch.setattr(scaled_kernel.Problem, "name", "scaled", raising=False)
    monkeypatch.setattr(scaled_kernel.Problem, "dtypes", property(lambda problem: (problem.dtype,) * 3), raising=False)
    lowered = jaxext.export.lower_for(jax.grad(lambda *args: product(*args, implementation="triton").sum(), (0, 1)), arch="sm_90a")(X, W, S)
    (target,) = custom_calls(lowered)
    calls = [op for op in operations(lowered) if op.name == "stablehlo.custom_call"]
    assert target.startswith("triton_kernel_call") and [len(op.operands) for op in calls] == [3, 3]  # XLA drops the forward product
