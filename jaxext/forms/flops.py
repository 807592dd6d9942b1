"""How `jax.experimental.roofline` counts a product: as it counts lax's, but from the labels.

    operations = 2 · Π (sizes of the labels but the window's) · Π (pairs of an output and a tap that meet an input, for each spatial axis)

Rules are registered once the user has imported it: we do not, since that takes long and on some versions needs absl.
"""

from __future__ import annotations

import functools
import math
import sys

from jaxext.forms.window import meetings

_MODULE = "jax.experimental.roofline"

_told = set()  # the primitives that have a rule


def tell(products) -> None:
    """Register the rules of these primitives, each with its form and open slot, if roofline is there."""
    if _MODULE not in sys.modules or len(_told) == len(products):
        return
    from jax.experimental import roofline

    for primitive in products.keys() - _told:
        roofline.register_roofline(primitive)(functools.partial(_count, *products[primitive]))
        _told.add(primitive)


def _count(form, open, ctx, *operands, **params):
    from jax.experimental.roofline import RooflineResult, RooflineShape

    first, *others = operands
    window, ranks, sizes = params["window"], params["ranks"], {}
    for slot, operand in zip(form.operands(open), operands, strict=True):
        sizes |= zip(form.axes(slot, ranks), operand.shape, strict=True)
    flops = 2 * math.prod(n for axis, n in sizes.items() if axis not in form.window)
    result = RooflineShape.total_bytes(ctx.avals_out)
    if window is not None:  # lax's rule of convolutions says nothing of fused programs, nor of memory on the chip
        flops *= math.prod(meetings(window, axis) for axis in range(window.rank))
        return RooflineResult(unfused_flops=flops, unfused_hbm_bytes=sum(x.bytes for x in operands) + result)
    moved = (0 if ctx.pin_lhs_in_vmem else first.bytes + result) + (0 if ctx.pin_rhs_in_vmem else sum(x.bytes for x in others))
    return RooflineResult(flops=flops, unfused_flops=flops, hbm_bytes=moved, unfused_hbm_bytes=moved)
