"""Policies for `jax.checkpoint` that see our products.

jax's own policies know lax's primitives by identity, so under `jax.checkpoint_policies.dots_saveable` our products would silently be
computed again.  `seeing_products(policy)` shows each of ours to a policy as lax's; the policies below are jax's, so wrapped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
from jax import lax

from jaxext._form import dimension_numbers, owner

__all__ = [
    "checkpoint_dots",
    "checkpoint_dots_with_no_batch_dims",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "offload_dot_with_no_batch_dims",
    "seeing_products",
]


def seeing_products(policy: Callable) -> Callable:
    """`policy`, a function for `jax.checkpoint(..., policy=)`, that is told of our matmuls and convolutions as if they were lax's.

    A matmul is shown with its `dimension_numbers`, precision and dtype as `lax.dot_general_p`, a convolution as
    `lax.conv_general_dilated_p`.
    """

    @functools.wraps(policy)
    def saveable(primitive, *avals, **params):
        if primitive not in owner:
            return policy(primitive, *avals, **params)
        form, open = owner[primitive]
        shown = dict(precision=params["precision"], preferred_element_type=params["dtype"], out_sharding=params["out_sharding"])
        if form.twin is lax.dot_general_p:
            lhs, rhs, result = (form.axes(slot, params["ranks"]) for slot in (*form.operands(open), open))
            shown["dimension_numbers"] = dimension_numbers(lhs, rhs, result)
        return policy(form.twin, *avals, **shown)

    return saveable


dots_saveable = checkpoint_dots = seeing_products(jax.checkpoint_policies.dots_saveable)
dots_with_no_batch_dims_saveable = checkpoint_dots_with_no_batch_dims = seeing_products(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable
)


def offload_dot_with_no_batch_dims(offload_src: str, offload_dst: str) -> Callable:
    """`jax.checkpoint_policies.offload_dot_with_no_batch_dims` that sees our products."""
    return seeing_products(jax.checkpoint_policies.offload_dot_with_no_batch_dims(offload_src, offload_dst))
