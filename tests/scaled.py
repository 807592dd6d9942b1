"""A form with a companion, which no public operation has: a matrix product whose columns are scaled.

    y[b,n,m] = s[b,m] Σ_k x[b,n,k] w[b,k,m]

The definition is one einsum in every role, since the sum is linear in each of its operands.  The kernels (scaled_kernel.py) are Triton's.
"""

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxext.backends.fields import DTYPES
from jaxext.backends.triton.triton_binding import TritonKernels
from jaxext.core.call import Call
from jaxext.core.family import Family, declare
from jaxext.core.form import Companion, Form, define
from jaxext.core.implementation import Implementation
from jaxext.core.static import Static


class ScaledXla(Implementation):
    """The definition."""

    name, version = "xla", "1"

    def refuses(self, call: Call) -> str | None:
        return None

    def not_preferred(self, call: Call) -> str | None:
        return None

    def run(self, call, config, operands):
        letters = {slot: "".join(labels) for slot, labels in call.labels.items()}
        equation = f"{','.join(letters[slot] for slot in operands)}->{letters[call.open]}"
        y = jnp.einsum(equation, *call.flatten(operands).values(), precision=call.precision)
        return y.reshape(call.shape).astype(call.dtype)


class ScaledTriton(TritonKernels):
    """The kernel of scaled_kernel.py."""

    def problem(self, call: Call) -> Any:
        import scaled_kernel

        dtypes = {*call.dtypes.values(), call.dtype}
        if len(dtypes) > 1 or (name := dtypes.pop().name) not in DTYPES:
            return f"the dtypes are {sorted(map(str, call.dtypes.values()))}, want one, of {sorted(DTYPES)}"
        return scaled_kernel.Problem(open=call.open, dtype=DTYPES[name], **{label: call.sizes[label] for label in "BNMK"})

    def kernels(self, problem: Any) -> ModuleType:
        import scaled_kernel

        return scaled_kernel

    def slower(self, call: Call) -> str | None:
        return None


def tangent(form: Form, open: str, operands: dict[str, jax.Array], dot: jax.Array, static: Static) -> jax.Array:
    """The product with `dot` for the scale: a slot that has the scale's labels is multiplied by it, and the scale is one."""
    scaled = open if open != "x" else "y"
    axes = form.axes(scaled, static.ranks)
    at = [axes.index(axis) for axis in form.axes("s", static.ranks)]
    operands = operands | {"s": jnp.ones_like(operands["s"])}

    def times(array):
        return array * lax.broadcast_in_dim(dot, array.shape, at)

    if scaled != open:
        operands[scaled] = times(operands[scaled])
    y = form.bind(open, operands, static)
    return times(y) if scaled == open else y


def form(tangent=tangent) -> Form:
    """Declared in a context of `registrations.undone`, or for the rest of the process."""
    family = declare(Family("scaled", lax_primitive=lax.dot_general_p, names="scaled"), ScaledTriton(), ScaledXla())
    return define(
        Form(
            name="scaled",
            slots={"x": ("B", "N", "K"), "w": ("B", "K", "M"), "y": ("B", "N", "M")},
            roles={"y": "y", "x": "x", "w": "w"},
            window=(),
            family=family,
            companions={"s": Companion(("B", "M"), tangent)},
        )
    )


def product(form: Form, x, w, s, *, implementation=None, out_sharding=None) -> jax.Array:
    """Bind the product of x (N, K), w (K, M) and s (M,)."""
    static = Static(ranks=form.pack(dict(B=0)), dtypes=(x.dtype,), implementation=implementation, out_sharding=out_sharding)
    return form.bind("y", dict(x=x, w=w, s=s), static)
