"""The Triton kernels of causal convolutions."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxext.backends.kernel import KernelCall
from jaxext.backends.triton.triton_binding import TritonKernels
from jaxext.core.call import Call
from jaxext.kernels import causal
from jaxext.ops.causal.problem import CausalKernels


class TritonCausal(CausalKernels, TritonKernels):
    module = causal

    def launch(self, call, problem, config):
        plain = super().launch(call, problem, config)
        if problem.role == "forward":
            return plain
        return dataclasses.replace(plain, splits=1, call=functools.partial(_cotangents, plain, call))


def _cotangents(plain: KernelCall, call: Call, _: Any, *operands: jax.Array) -> Any:
    """Call the backward kernel; the partial sums of the cotangents of w and bias are added here."""
    of = {f"d_{name}": name for name in ("x", "w", "bias", "initial_states") if name in call.dtypes}
    added = () if plain.splits == 1 else ("d_w", "d_bias")
    results = []
    for name, operand in of.items():
        shape = tuple(call.sizes[label] for label in call.labels[operand])
        partial = jax.ShapeDtypeStruct((plain.splits, *shape), jnp.float32)
        results.append(partial if name in added else jax.ShapeDtypeStruct(shape, call.dtypes[operand]))
    arrays = dict(zip(of, plain.call(tuple(results), *operands), strict=True))
    for name in arrays.keys() & added:
        arrays[name] = jnp.sum(arrays[name], axis=0).astype(call.dtypes[of[name]])
    return tuple(arrays[name] for name in call.results) if call.further else arrays[call.open]
