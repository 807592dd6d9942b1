"""One function on CPUs and another elsewhere: under every transformation the program for CPUs is made of the one, others of the other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bilinear import close, integers, same
from jax import export, lax
from jax.extend.core import jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxext.parallel.by_platform import by_platform, choose, lowered_elsewhere, lowered_on_cpus


def here(x, y):
    return jnp.sin(x) * y, x * x


def elsewhere(x, y):
    return 3 * jnp.sin(x) * y, 5 * x * x


@pytest.fixture(params=["cpu", "others"])
def chosen(request):
    """The function of which this CPU's programs are made."""
    if request.param == "others":
        mlir.register_lowering(by_platform, lowered_elsewhere, platform="cpu")
    yield here if request.param == "cpu" else elsewhere
    mlir.register_lowering(by_platform, lowered_on_cpus, platform="cpu")


def scanned(f, x, y):
    return lax.scan(lambda c, y: (f(c, y)[0] + c, f(x, c)[1]), x, y[None] * jnp.ones((3, 1), y.dtype))


def loss(f, x, y):
    return sum(jnp.sum(each**2) for each in f(x, y))


TRANSFORMED = {
    "itself": lambda f: f,
    "gradients": lambda f: jax.grad(functools.partial(loss, f), (0, 1)),
    "of one result": lambda f: jax.grad(lambda x, y: jnp.sum(f(x, y)[1] ** 2)),
    "tangent of one operand": lambda f: lambda x, y: jax.jvp(lambda y: f(x, y), (y,), (x,)),
    "second derivatives": lambda f: jax.hessian(functools.partial(loss, f), (0, 1)),
    "third derivative": lambda f: jax.jacrev(jax.jacfwd(jax.grad(functools.partial(loss, f)))),
    "transposed": lambda f: lambda x, y: jax.linear_transpose(lambda y: f(x, y)[0], y)(x),
    "vmap": lambda f: lambda x, y: jax.vmap(f, (0, None), 1)(jnp.stack([x, -x]), y),
    "vmap of one operand": lambda f: lambda x, y: jax.vmap(f, (None, 0), (0, None))(x, jnp.stack([y, -y])),
    "per example": lambda f: lambda x, y: jax.vmap(jax.grad(functools.partial(loss, f)), (None, 0))(x, jnp.stack([y, -y])),
    "gradient of vmap": lambda f: lambda x, y: jax.grad(lambda x: loss(jax.vmap(f), x, jnp.stack([y, y])))(jnp.stack([x, -x])),
    "checkpoint": lambda f: jax.grad(functools.partial(loss, jax.checkpoint(f)), (0, 1)),
    "scan": lambda f: jax.grad(functools.partial(loss, functools.partial(scanned, f)), (0, 1)),
}


def test_transformations(chosen):
    x, y = jnp.asarray([0.5, -1.0, 2.0]), jnp.asarray([3.0, 0.25, -1.0])
    both = functools.partial(choose, here, elsewhere)
    got, want = (jax.jit(lambda x, y, f=f: {name: t(f)(x, y) for name, t in TRANSFORMED.items()})(x, y) for f in (both, chosen))
    for name in TRANSFORMED:
        close(got[name], want[name], rtol=1e-12)


def test_without_jit():
    """Operands that are there say where they lie; and vmap of unmapped operands computes once."""
    x, y = jnp.asarray([0.5, -1.0]), jnp.asarray([3.0, 0.25])
    both = functools.partial(choose, here, elsewhere)
    for f in (both, jax.vmap(both), jax.grad(functools.partial(loss, both))):
        with jax.disable_jit():
            got = f(x, y)
        close(got, f(x, y), rtol=1e-12)
    close(both(x, y), here(x, y), rtol=1e-12)


def test_collectives_inside(chosen):
    """Sums over an axis of a mesh, and over one that vmap names."""
    mesh = jax.make_mesh((4,), ("i",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    check_vma = chosen is elsewhere  # it decides about types, `chosen` about the lowering: two of the four pairs do

    def summed(f, x, y):
        return tuple(lax.psum(each, "i") * x for each in f(x, y))

    both = lambda x, y: choose(functools.partial(summed, here), functools.partial(summed, elsewhere), x, y)
    x, y = jnp.arange(4.0), jnp.arange(1.0, 5.0)
    for f in (lambda f: f, lambda f: lambda x, y: jax.grad(lambda x: sum(map(jnp.sum, f(x, y))))(x)):
        results = []
        for function in (both, functools.partial(summed, chosen)):
            split = jax.shard_map(f(function), mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=check_vma)
            results.append(jax.jit(lambda x, y, split=split, f=f, g=function: (split(x, y), jax.vmap(f(g), axis_name="i")(x, y)))(x, y))
        close(*results, rtol=1e-12)


def test_program_for_several_platforms():
    x, y = integers((3,)), integers((3,), 1)
    f = jax.jit(lambda x, y: choose(here, elsewhere, x, y)[1])
    exported = export.deserialize(export.export(f, platforms=("cuda", "cpu"))(x, y).serialize())
    same(np.asarray(exported.call(x, y)), x * x)
    for platform, words in (("cpu", 0), ("cuda", 1), ("tpu", 1)):
        assert f.trace(x, y).lower(lowering_platforms=(platform,)).as_text().count("dense<5.0") == words


@pytest.mark.parametrize("saved", [True, False])
def test_a_policy_that_saves_products(saved):
    """It saves only the result in which a product is; the other is computed once more."""

    def product(x, y):
        return jnp.tanh(x @ y), jnp.sin(x)

    policy = jax.checkpoint_policies.dots_saveable if saved else jax.checkpoint_policies.nothing_saveable
    f = jax.checkpoint(lambda x, y: jnp.sum(jnp.prod(jnp.asarray([jnp.sum(z**3) for z in choose(product, product, x, y)]))), policy=policy)
    x, y = jnp.eye(3), jnp.full((3, 3), 0.5)
    plain = lambda x, y: jnp.sum(jnp.prod(jnp.asarray([jnp.sum(z**3) for z in product(x, y)])))
    close(jax.jit(jax.grad(f, (0, 1)))(x, y), jax.jit(jax.grad(plain, (0, 1)))(x, y), rtol=1e-12)
    _, pullback = jax.vjp(f, x, y)
    kept = [leaf for leaf in jax.tree.leaves(pullback) if leaf.shape == (3, 3)]
    assert any(np.array_equal(leaf, product(x, y)[0]) for leaf in kept) == saved
    assert not any(np.array_equal(leaf, product(x, y)[1]) for leaf in kept)


def test_what_it_shows_is_the_program_for_cpus():
    """Readers of jaxprs see the program for CPUs."""
    x = jnp.ones(3)
    (eqn,) = jax.make_jaxpr(functools.partial(choose, here, elsewhere))(x, x).eqns
    same(jaxpr_as_fun(eqn.params["cpu"])(x, x), list(here(x, x)))


def test_a_result_that_varies_with_a_named_axis_alone():
    """It follows from no operand that is mapped."""
    f = lambda x, y: (x * y, lax.axis_index("i") * y)
    x, y = jnp.arange(4, dtype=jnp.int32), jnp.asarray(3, jnp.int32)
    same(jax.vmap(lambda x, y: choose(f, f, x, y), (0, None), axis_name="i")(x, y), (x * y, x * y))
