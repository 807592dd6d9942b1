"""Policies for `jax.checkpoint` that recognise jaxext's operations.

jax's own policies recognise lax's primitives by identity.  Under `jax.checkpoint_policies.dots_saveable`, jaxext's matmuls are therefore
recomputed, with a warning.  `seeing_products(policy)` presents them to a policy as lax's.  The policies below are jax's, wrapped that way.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import jax

from jaxext import _compat
from jaxext._messages import depth_of_the_user, format_value
from jaxext.core.form import dimension_numbers, owner

__all__ = [
    "checkpoint_dots",
    "checkpoint_dots_with_no_batch_dims",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "offload_dot_with_no_batch_dims",
    "seeing_products",
]


def seeing_products(policy: Callable) -> Callable:
    """Wrap `policy`, a function for `jax.checkpoint(..., policy=)`, so that it sees jaxext's matmuls and convolutions as lax's.

    A matmul appears as `lax.dot_general_p` with its `dimension_numbers`, precision and dtype, a convolution as
    `lax.conv_general_dilated_p`, and a ragged matmul as lax's `ragged_dot_general` with its `ragged_dot_dimension_numbers`.  An operation
    with an epilogue appears as the matmul or convolution inside it.

    Raises:
      TypeError: `policy` is not callable.
    """
    if not callable(policy):
        raise TypeError(
            f"seeing_products: policy is {format_value(policy)}, want a function, such as jax.checkpoint_policies.dots_saveable"
        )

    @functools.wraps(policy)
    def saveable(primitive, *avals, **params):
        if primitive not in owner:
            return policy(primitive, *avals, **params)
        form, open = owner[primitive]
        if not form.factors(open):  # an operation without a product inside
            return policy(primitive, *avals, **params)
        static = params["static"]
        shown = dict(precision=static.precision, preferred_element_type=static.dtype, out_sharding=static.out_sharding)
        if form.family.lax_call is not None:
            operands = dict(zip(form.operands(open), avals, strict=True))
            names, params = form.family.lax_call(form, open, static.ranks)
            return policy(form.family.lax_primitive, *(operands[name] for name in names), **shown, **params)
        if not form.window:
            lhs, rhs, result = (form.axes(slot, static.ranks) for slot in (*form.factors(open), open))
            shown["dimension_numbers"] = dimension_numbers(lhs, rhs, result)
        return policy(form.family.lax_primitive, *avals[:2], **shown)

    return saveable


dots_saveable = checkpoint_dots = seeing_products(jax.checkpoint_policies.dots_saveable)
dots_with_no_batch_dims_saveable = checkpoint_dots_with_no_batch_dims = seeing_products(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable
)


def offload_dot_with_no_batch_dims(offload_src: str, offload_dst: str) -> Callable:
    """`jax.checkpoint_policies.offload_dot_with_no_batch_dims` for lax's and jaxext's matmuls."""
    return seeing_products(jax.checkpoint_policies.offload_dot_with_no_batch_dims(offload_src, offload_dst))


def _warn(policy: Callable | None, primitive, avals, params) -> None:
    """Warn if one of jax's own policies would save this product if it were lax's, but recomputes it because it is jaxext's."""
    if policy is None or getattr(policy, "__module__", None) != jax.checkpoint_policies.dots_saveable.__module__:
        return
    try:
        as_jaxext, as_lax = (answer(primitive, *avals, **params) for answer in (policy, seeing_products(policy)))
    except Exception:  # the user's part of a combined policy failed: jax will ask it next and report the error
        return
    if as_jaxext == as_lax:
        return
    known = ("dots_saveable", "dots_with_no_batch_dims_saveable")
    name = next((name for name in known if getattr(jax.checkpoint_policies, name) is policy), None)
    warnings.warn(
        f"jax.checkpoint: {f'jax.checkpoint_policies.{name}' if name else 'its policy'} recognises lax's primitives only, so jaxext's"
        f" matmuls and convolutions are recomputed where lax's would be saved: use"
        f" jaxext.checkpoint_policies.{name or 'seeing_products(policy)'}",
        stacklevel=depth_of_the_user(),
    )


_compat.policies_asked.listener = _warn


def __dir__() -> list[str]:
    return __all__
