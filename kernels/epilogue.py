"""The epilogue of a kernel: what it computes of a finished sum before storing it.

z = sum + bias             (kept in float32)
y = activation(z) + residual, rounded once to the result's dtype
gated:  y = activation(z of the first half of the columns) z of the second
scale:  y times a number for each row
"""

import dataclasses

# By the names of jax.nn; "gelu" is exact (erf), "gelu_tanh" its approximation, "leaky_relu" has jax.nn's slope of 0.01, and "squared_relu"
# is relu(z)².
ACTIVATIONS = ("relu", "relu6", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh", "leaky_relu", "squared_relu")

FLOATS = ("fp32", "bf16", "fp16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Epilogue:
    """The epilogue of a product.  dtypes have the short names of `BITS`."""

    activation: str | None = None  # one of ACTIVATIONS
    bias: str | None = None  # its dtype; it has an element for each column of the result (for each batch element and group)
    scale: str | None = None  # of ragged products alone: its dtype; it has an element for each row of the result
    residual: str | None = None  # its dtype; it has the shape of the result
    gated: bool = False  # of matrix products alone: the right operand is b[B,K,2,N], gate and linear part
    saves: bool = False  # a second result: z, rounded to the result's dtype; b's columns, [B,M,2,N], if gated


def refused(epilogue: Epilogue | None, role: str, wanted: str, result: str, gates: bool = False, ragged: bool = False) -> str | None:
    """Return the reason if kernels do not support this epilogue, or None.

    Only one role has epilogues, only matrix products are gated, and only ragged products scale rows.
    """
    if epilogue is None:
        return None
    if role != wanted:
        return f"an epilogue of the role {role}, want {wanted}"
    if epilogue.activation not in (None, *ACTIVATIONS):
        return f"activation {epilogue.activation!r}, want one of {', '.join(ACTIVATIONS)}"
    if result not in (*FLOATS, "i32"):
        return f"an epilogue into {result}, want one of {', '.join((*FLOATS, 'i32'))}"
    if ragged and epilogue.residual:
        return "an epilogue with a residual, want one of other products"
    if epilogue.scale and not ragged:
        return "an epilogue with a scale for each row, want one of a ragged product"
    integers = result == "i32"
    if epilogue.gated and not gates:
        return "a gated epilogue, want one of a matrix product"
    if epilogue.gated and (epilogue.bias or epilogue.residual or integers):
        return f"a gated epilogue of {result} with bias {epilogue.bias} and residual {epilogue.residual}, want floats, and neither of them"
    if integers and epilogue.activation:
        return f"activation {epilogue.activation!r} of i32, want none"
    for name, dtype in (("bias", epilogue.bias), ("residual", epilogue.residual), ("scale", epilogue.scale)):
        if dtype not in (None, *(("i32",) if integers else FLOATS)):
            return f"{name} is {dtype}, want {'i32' if integers else 'one of ' + ', '.join(FLOATS)} beside a result of {result}"
    return None
