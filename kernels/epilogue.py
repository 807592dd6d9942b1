"""The epilogue of a kernel: what it computes of a finished sum before storing it.

z = sum + bias             (kept in float32)
y = activation(z) + residual, rounded once to the result's dtype
gated:  y = activation(z of the first half of the columns) z of the second
scale:  y times a number for each row
"""

from __future__ import annotations

import dataclasses

# By the names of jax.nn; "gelu" is exact (erf), "gelu_tanh" its approximation, "leaky_relu" has jax.nn's slope of 0.01, and "squared_relu"
# is relu(z)².
ACTIVATIONS = ("relu", "relu6", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh", "leaky_relu", "squared_relu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Epilogue:
    """The epilogue of a product.  dtypes have the short names of `BITS`."""

    activation: str | None = None  # one of ACTIVATIONS
    bias: str | None = None  # its dtype; it has an element for each column of the result (for each batch element and group)
    scale: str | None = None  # of ragged products alone: its dtype; it has an element for each row of the result
    residual: str | None = None  # its dtype; it has the shape of the result
    gated: bool = False  # of matrix products alone: the right operand is b[B,K,2,N], gate and linear part
    saves: bool = False  # a second result: z, rounded to the result's dtype; b's columns, [B,M,2,N], if gated
