"""Matrix multiplication: its labels, its roles and its implementations.

    c[b,m,n] = Σ_k a[b,m,k] b[b,k,n].  Leave c open: the NN product; a open: c bᵀ, the NT product; b open: aᵀ c, the TN product.

So `lax.dot_general` in any layout is one of three roles of one form.  It must not know the public signatures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxext._cuda import CudaMatmul
from jaxext._form import Form, define, dimension_numbers
from jaxext._implementation import Algorithm, Call
from jaxext._triton import TritonMatmul


class XlaMatmul:
    """The definition: `lax.dot_general`.  It supports every call."""

    name = "xla"

    def supports(self, call: Call) -> str | None:
        return None

    def gains(self, call: Call) -> str | None:
        return None

    def candidates(self, call: Call) -> Sequence[Algorithm]:
        return (Algorithm("dot_general"),)

    def describe(self, call: Call, config: Algorithm) -> str:
        return config.algorithm

    def run(self, call: Call, config: Algorithm, operands: Mapping[str, jax.Array]) -> jax.Array:
        # The operand that owns the first free label of the result is the left one; dot_general then gives the result's order.
        first = call.labels[call.open][1]
        lhs, rhs = sorted(operands, key=lambda slot: first not in call.labels[slot])
        dims = dimension_numbers(call.axes[lhs], call.axes[rhs], call.axes[call.open])
        return product(operands[lhs], operands[rhs], dims, call.precision, call.dtype)


def product(lhs, rhs, dims, precision, dtype) -> jax.Array:
    """`lax.dot_general` with a result of any dtype: one that lax cannot give, narrower or real, is made of its own at the end."""

    def dot(preferred, lhs, rhs):
        return lax.dot_general(lhs, rhs, dims, precision=precision, preferred_element_type=preferred)

    natural = jax.eval_shape(lambda a, b: dot(None, a, b), lhs, rhs).dtype
    lax_can = dtype.itemsize >= natural.itemsize and is_complex(natural) <= is_complex(dtype)
    return convert(dot(dtype if lax_can else natural, lhs, rhs), dtype)


def convert(y: jax.Array, dtype) -> jax.Array:
    """A change of dtype under which the gradient of a real operand keeps the real part of a complex product."""
    return (lax.real(y) if is_complex(y.dtype) and not is_complex(dtype) else y).astype(dtype)


def is_complex(dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.complexfloating)


MATMUL = define(
    Form(
        name="matmul",
        slots={"a": ("B", "M", "K"), "b": ("B", "K", "N"), "c": ("B", "M", "N")},
        roles={"c": "nn", "a": "nt", "b": "tn"},
        window=(),
        implementations=(CudaMatmul(), TritonMatmul(), XlaMatmul()),
        twin=lax.dot_general_p,
    )
)
