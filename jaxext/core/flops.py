"""Rules for `jax.experimental.roofline`, with the same counts as for lax's products, but from the labels.

    operations = 2 · Π (sizes of the labels except the window's and `chosen`) · Π (pairs of an output and a tap that meet, per spatial axis)

The rules are registered after the user has imported roofline.  jaxext does not import it: that is slow, and needs absl on some versions.
"""

from __future__ import annotations

import functools
import math
import sys

from jaxext.core.window import meetings

_MODULE = "jax.experimental.roofline"

_registered = set()  # the primitives that have a rule


def register(products) -> None:
    """Register rules for these primitives, each with its form and open slot, if roofline is imported."""
    if _MODULE not in sys.modules or products.keys() <= _registered:
        return
    from jax.experimental import roofline

    for primitive in products.keys() - _registered:
        roofline.register_roofline(primitive)(functools.partial(_count, *products[primitive]))
        _registered.add(primitive)


def operations(form, sizes, window) -> int:
    """Multiplications and additions of a form with these sizes of its axes, without those with a zero of padding or dilation."""
    chosen = {f"{label}0" for label in form.chosen}
    flops = 2 * math.prod(n for axis, n in sizes.items() if axis not in form.window and axis not in chosen)
    return flops if window is None else flops * math.prod(meetings(window, axis) for axis in range(window.rank))


def _count(form, open, ctx, *operands, static, **_):
    from jax.experimental.roofline import RooflineResult, RooflineShape

    first, *others = operands
    window, ranks, sizes = static.window, static.ranks, {}
    for slot, operand in zip(form.operands(open), operands, strict=True):
        sizes |= zip(form.axes(slot, ranks), operand.shape, strict=True)
    flops = operations(form, sizes, window)
    result = RooflineShape.total_bytes(ctx.avals_out)
    if window is not None:  # lax's rule for convolutions does not count fused programs, nor on-chip memory
        return RooflineResult(unfused_flops=flops, unfused_hbm_bytes=sum(x.bytes for x in operands) + result)
    moved = (0 if ctx.pin_lhs_in_vmem else first.bytes + result) + (0 if ctx.pin_rhs_in_vmem else sum(x.bytes for x in others))
    return RooflineResult(flops=flops, unfused_flops=flops, hbm_bytes=moved, unfused_hbm_bytes=moved)
