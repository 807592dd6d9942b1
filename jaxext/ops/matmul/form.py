"""Matrix multiplication: labels, roles, implementations, and the translation of `lax.dot_general`.

    c[b,m,n] = Σ_k a[b,m,k] b[b,k,n].  With c open: the NN product; a open: c bᵀ, the NT product; b open: aᵀ c, the TN product.

`lax.dot_general` in any layout is one of these three roles.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax import lax

from jaxext.core.family import Family, declare
from jaxext.core.form import Form, define
from jaxext.core.static import Static
from jaxext.lax.substitute import transpose
from jaxext.ops.matmul.cuda import CudaMatmul
from jaxext.ops.matmul.triton import TritonMatmul
from jaxext.ops.matmul.xla import XlaMatmul


def read(lhs, rhs, *, dimension_numbers, precision, out_sharding, dtype, implementation, preferred_element_type):
    """lax's dot_general by the form.  With K contracted, (B M K) and (B K N) are its a and b, (B M K) and (B N K) its c and b, (B K M) and
    (B K N) its a and c.  Only (B K M) with (B N K), a product of two transposes, copies an operand.
    """
    del preferred_element_type  # it has become dtype
    (lc, rc), (lb, rb) = dimension_numbers
    batch, summed = len(lb), len(lc)
    lhs_free, rhs_free = lhs.ndim - batch - summed, rhs.ndim - batch - summed
    order = sorted(range(summed), key=lambda i: lc[i])  # the order of the contracted axes in lhs
    left, k_first = arrangement(lhs.ndim, lb, [lc[i] for i in order])
    right, n_last = arrangement(rhs.ndim, rb, [rc[i] for i in order])
    lhs, rhs, n_last = transpose(lhs, left), transpose(rhs, right), n_last or rhs_free == 0
    if k_first and not n_last:
        lhs, k_first = transpose(lhs, [*range(batch), *range(batch + summed, lhs.ndim), *range(batch, batch + summed)]), False
    if k_first:
        open, operands, ranks = "b", {"a": lhs, "c": rhs}, dict(M=summed, K=lhs_free, N=rhs_free)
    elif n_last:
        open, operands, ranks = "c", {"a": lhs, "b": rhs}, dict(M=lhs_free, K=summed, N=rhs_free)
    else:
        open, operands, ranks = "a", {"c": lhs, "b": rhs}, dict(M=lhs_free, N=summed, K=rhs_free)
    ranks = MATMUL.pack(dict(ranks, B=batch))
    static = Static(ranks=ranks, dtypes=(dtype,), precision=precision, implementation=implementation, out_sharding=out_sharding)
    return MATMUL.bind(open, operands, static)


def arrangement(ndim: int, batch: Sequence[int], contract: Sequence[int]) -> tuple[list[int], bool]:
    """The axes of an operand as (batch, contracted, free) if they lie so, else as (batch, free, contracted), and which it is."""
    free = [axis for axis in range(ndim) if axis not in batch and axis not in contract]
    if [*batch, *contract, *free] == list(range(ndim)) and free:
        return [*range(ndim)], True
    return [*batch, *free, *contract], False


FAMILY = declare(
    Family("matmul", lax_primitive=lax.dot_general_p, names="matmul", read=read, weights="b"),
    CudaMatmul(),
    TritonMatmul(),
    XlaMatmul(),
)

MATMUL = define(
    Form(
        name="matmul",
        slots={"a": ("B", "M", "K"), "b": ("B", "K", "N"), "c": ("B", "M", "N")},
        roles={"c": "nn", "a": "nt", "b": "tn"},
        window=(),
        family=FAMILY,
    )
)
