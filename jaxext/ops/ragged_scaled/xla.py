"""The `xla` implementation of ragged products of scaled numbers: a ragged product of wide numbers.

A scale that changes neither along the sum nor from group to group multiplies the result; any other scale multiplies its operand.  On CPUs
the matrix of a group becomes wide in the loop that multiplies by it: a group without rows costs nothing.  On other platforms all matrices
become wide first, and the family of ragged products chooses the implementation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxext.backends.xla_products import XlaDefinition, convert, summed
from jaxext.core.call import Call
from jaxext.core.choose import chosen
from jaxext.core.implementation import Algorithm
from jaxext.core.static import Static
from jaxext.ops.ragged.form import FAMILY, RAGGED
from jaxext.ops.ragged.xla import ScaledFilters, Ways, XlaRagged, computed
from jaxext.ops.scaled.xla import multiplied_dtype, scale_along


class XlaRaggedScaled(XlaDefinition):
    def candidates(self, call: Call) -> Sequence[Ways | Algorithm]:
        return XlaRagged().candidates(_wide_call(call, call.dtype)) if call.platform == "cpu" else (Algorithm("composition"),)

    def describe(self, call: Call, config: Ways | Algorithm) -> str:
        if isinstance(config, Ways):
            return XlaRagged().describe(call, config)
        choice = _chosen(call, _wide_call(call, call.dtype))
        assert choice.plan is not None
        by = "" if choice.implementation == self.name else f"{choice.implementation} "
        return f"{config.algorithm} of {by}{choice.plan.describe(choice.config)}"

    def run(self, call: Call, config: Ways | Algorithm, operands: Mapping[str, jax.Array]) -> jax.Array:
        if call.empty:
            return jnp.zeros(call.shape, call.dtype)
        sums, kept = summed(*call.dtypes.values(), call.dtype), {*call.axes[call.open]}
        scales = {slot: f"{slot}_scale" for slot in (*call.factors, call.open) if f"{slot}_scale" in operands}
        after = [name for slot, name in scales.items() if slot == call.open or {*call.axes[name]} <= kept]
        wide = multiplied_dtype(call, before=len(after) < len(scales))
        inner = _wide_call(call, sums if after else call.dtype, wide)
        flat: dict[str, Any] = {name: operands[name] for name in RAGGED.companions}
        for slot in call.factors:
            x = operands[slot]
            scale = scale_along(call, scales[slot], operands, slot, sums) if slot in scales and scales[slot] not in after else None
            if slot == "w" and isinstance(config, Ways) and (scale is not None or x.dtype != wide):
                flat[slot] = _filters(call, x, jnp.ones((), sums) if scale is None else operands[scales[slot]].astype(sums), wide)
            else:
                flat[slot] = x.astype(wide) if scale is None else (x.astype(sums) * scale).astype(wide)
        flat = {name: x if isinstance(x, ScaledFilters) else x.reshape(inner.shape_of(name)) for name, x in flat.items()}
        y = computed(inner, config, flat) if isinstance(config, Ways) else _chosen(call, inner).compute(flat)
        y = y.reshape(call.shape)
        for name in after:
            y = y * scale_along(call, name, operands, call.open, sums)
        return convert(y, call.dtype)


def _wide_call(call: Call, result, factors=jnp.float32) -> Call:
    """The call of the ragged product, whose labels have an axis each."""
    sizes = {label: call.sizes[label] for label in "BPRMG"} | {
        "K": call.sizes["S"] * call.sizes["K"],
        "N": call.sizes["J"] * call.sizes["N"],
    }
    dtypes = {name: factors if name in call.factors else jnp.int32 for name in RAGGED.operands(call.open)}
    avals = [jax.ShapeDtypeStruct([sizes[label] for label in RAGGED.labels[name]], dtype) for name, dtype in dtypes.items()]
    static = Static(ranks=RAGGED.pack({}), dtypes=(jnp.dtype(result),), precision=call.precision, in_place=call.in_place)
    return RAGGED.call(call.open, avals, static=static, platform=call.platform, arch=call.arch, partitioner=call.partitioner)


def _chosen(call: Call, inner: Call):
    """The implementation of the ragged product: `xla` if the user named it."""
    return chosen(inner, FAMILY.implementations, "xla" if call.parameters.implementation == "xla" else None)


def _filters(call: Call, w: jax.Array, scale: jax.Array, dtype) -> ScaledFilters:
    """Matrices of scaled numbers with an axis for each label; the scale may be one for all."""
    B, G, S, J = (call.sizes[label] for label in "BGSJ")
    of_blocks = jnp.broadcast_to(scale, (B, G, 1, 1, 1, 1)) if scale.ndim == 0 else lax.reshape(scale, (B, G, S, 1, J, 1))
    return ScaledFilters(w.reshape([call.sizes[label] for label in call.labels["w"]]), of_blocks, dtype)
