"""A policy of jax's own under which products of ours are computed again, and lax's would not be, is warned of; no other is."""

import inspect
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxext

JAX, OURS = jax.checkpoint_policies, jaxext.checkpoint_policies
X = jnp.ones((4, 4), "float32")


def net(w, x):
    return jnp.sum(jnp.sin(jaxext.matmul(jnp.sin(jaxext.matmul(x, w)), w)))


def warned(policy, function=net, *args):
    """The messages while a gradient is traced, and where they point."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.make_jaxpr(jax.grad(jax.checkpoint(function, policy=policy)))(*(args or (X, X)))
    assert all(each.category is UserWarning for each in caught)
    return {str(each.message) for each in caught}, {(each.filename, each.lineno) for each in caught}


WARNED = {
    "dots_saveable": (JAX.dots_saveable, "jax.checkpoint_policies.dots_saveable knows", "use jaxext.checkpoint_policies.dots_saveable"),
    "dots_with_no_batch_dims_saveable": (
        JAX.dots_with_no_batch_dims_saveable,
        "jax.checkpoint_policies.dots_with_no_batch_dims_saveable knows",
        "use jaxext.checkpoint_policies.dots_with_no_batch_dims_saveable",
    ),
    "offload": (JAX.offload_dot_with_no_batch_dims("device", "pinned_host"), "its policy knows", "seeing_products(policy)"),
    "combined": (
        JAX.save_from_both_policies(JAX.dots_saveable, JAX.save_only_these_names("a")),
        "its policy knows",
        "seeing_products(policy)",
    ),
}


@pytest.mark.parametrize("name", WARNED)
def test_a_policy_of_jax_that_knows_lax_alone(name):
    """One message, which names what to use and points to the user's line."""
    policy, knows, use = WARNED[name]
    (message,), (place,) = warned(policy)
    assert message.startswith(f"jax.checkpoint: {knows} lax's products only") and message.endswith(use)
    lines, first = inspect.getsourcelines(warned)
    (line,) = (first + i for i, text in enumerate(lines) if "jax.grad(" in text)
    assert place == (__file__, line)


@pytest.mark.parametrize(
    "policy",
    [
        None,
        JAX.nothing_saveable,
        JAX.everything_saveable,
        JAX.save_only_these_names("a"),
        OURS.dots_saveable,
        OURS.seeing_products(JAX.dots_with_no_batch_dims_saveable),
        JAX.save_from_both_policies(OURS.dots_saveable, JAX.dots_saveable),
        lambda primitive, *_, **__: primitive is lax.dot_general_p,
        JAX.save_from_both_policies(JAX.save_only_these_names("a"), lambda prim, *_, **params: prim.name == "dot_general" and params["no"]),
    ],
)
def test_no_other_policy(policy):
    """None that saves ours, none that would not save lax's, and none of the user's."""
    assert warned(policy) == (set(), set())


def test_what_lax_would_compute_again_too():
    """Under a policy for products without batch axes: products with them, and convolutions."""
    batch, image = jnp.stack([X, X]), jnp.ones((1, 2, 5), "float32")
    policy = JAX.dots_with_no_batch_dims_saveable
    assert warned(policy, net, batch, batch) == (set(), set())
    convolve = lambda w, x: jnp.sum(jnp.sin(jaxext.conv(jnp.sin(jaxext.conv(x, w, (1,), "SAME")), w, (1,), "SAME")))
    filters = jnp.ones((2, 2, 3), "float32")
    assert warned(policy, convolve, filters, image) == (set(), set())
    assert warned(JAX.dots_saveable, convolve, filters, image)[0]


def test_products_that_nobody_wrote():
    """Within a scan, and where a context put ours in the place of lax's."""

    def loop(w, x):
        return jnp.sum(lax.scan(lambda c, _: (jnp.sin(c @ w), None), x, None, length=2)[0])

    assert warned(JAX.dots_saveable, loop) == (set(), set())
    with jaxext.in_place_of_lax():
        assert warned(JAX.dots_saveable, loop)[0]


def test_without_a_gradient():
    """Nothing is saved, so nothing is computed again."""
    jax.make_jaxpr(jax.checkpoint(net, policy=JAX.dots_saveable))(X, X)  # a warning would be an error
