"""Rows times numbers:  y[b,m,n] = x[b,m,n] scale[m]."""

from __future__ import annotations

from typing import Any

import jax

from jaxext.core.checks import checked, refuse_shape
from jaxext.core.family import Family, declare
from jaxext.core.reference import Declaration, Keywords, Reference
from jaxext.core.static import Static
from jaxext.lax.dispatch import compiled
from jaxext.ops.rowscale.cuda import CudaRowscale
from jaxext.ops.rowscale.triton import TritonRowscale


def _reference(x, scale):
    return ((x.astype(scale.dtype) * scale[None, :, None]).astype(x.dtype),)


MATRICES = ("B", "M", "N")
FAMILY = declare(
    Family("rowscale", lax_primitive=None, names="rowscale"),
    CudaRowscale(),
    TritonRowscale(),
    Reference(),
)
OPERATION = Declaration(
    "rowscale", _reference, inputs={"x": MATRICES, "scale": ("M",)}, results={"y": MATRICES}
).operation


def rowscale(name: str, x: Any, scale: Any, *, implementation: str | None) -> jax.Array:
    x, scale = checked(name, {"x": x, "scale": scale}).values()
    if x.ndim < 2:
        raise TypeError(f"{name}: x has the shape {x.shape}, want (..., M, N)")
    refuse_shape(name, "scale", scale, x.shape[-2:-1], "a number for each row")
    return compiled(_bound, (), FAMILY, implementation, (x, scale), {}, name=name)


def _bound(x: jax.Array, scale: jax.Array, *, implementation) -> jax.Array:
    static = Static(
        ranks=OPERATION.pack({"B": x.ndim - 2}),
        dtypes=(x.dtype,),
        implementation=implementation,
        options=Keywords(()),
    )
    return OPERATION.bind({"x": x, "scale": scale}, static, wanted=("y",))["y"]
