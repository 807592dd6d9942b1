"""The definition of an operation that is not bilinear: its composition of forms and jnp, computed on one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxext import _compat
from jaxext.core.call import Call
from jaxext.core.choose import choose, chosen, replacing_lax
from jaxext.core.form import Form
from jaxext.core.implementation import Algorithm, Definition
from jaxext.core.static import Static
from jaxext.tables import active


def composed(call: Call, operands: Mapping[str, jax.Array], named: str | None, summed: Callable | None = None) -> Any:
    """The result of a call, or a tuple of several, by the composition, on one device.

    Its products are computed by the implementation that is `named`, and their partial sums are added over devices by `summed`.  On GPUs
    they are no wider than the result: XLA writes a product to memory before what follows it, which takes the time there.
    """
    all_axes = {axis for axes in call.axes.values() for axis in axes}

    def product(form: Form, open: str, operands: Mapping[str, jax.Array], static: Static) -> jax.Array:
        names = form.operands(open)
        operands = dict(zip(names, _compat.align_varying(*(operands[name] for name in names)), strict=True))
        inner = _inner_call(call, form, open, operands, static)
        choice = chosen(inner, form.family.implementations, named)
        y = inner.checked(choice.implementation, choice.compute(operands))
        if summed is None:
            return y
        contracted = {axis for name in names for axis in inner.axes[name]} - {*inner.axes[open]}
        return summed(y, all_axes - contracted)

    narrow = call.platform != "cpu" and summed is None
    results = call.operation.composition(call.operation, product, operands, _static(call), narrow=narrow)
    return tuple(results[name] for name in call.results) if call.further else results[call.open]


class Composition(Definition):
    """The definition of an operation with a product inside.  It supports every call."""

    name, version = "xla", "of its call"

    def candidates(self, call: Call) -> Sequence[Algorithm]:
        return (Algorithm("composition"),)

    def describe(self, call: Call, config: Algorithm) -> str:
        """The algorithm with those of the products inside, such as "composition of dot_general"; another implementation has its name."""
        parts: list[str] = []

        def product(form: Form, open: str, operands: Mapping[str, jax.Array], static: Static) -> jax.Array:
            inner = _inner_call(call, form, open, operands, static)
            choice = choose(inner, form.family.implementations, self._named(call), active.measured(inner))
            assert choice.plan is not None
            by = "" if choice.implementation == self.name else f"{choice.implementation} "
            parts.append(by + choice.plan.describe(choice.config))
            return jnp.zeros(inner.shape, inner.dtype)

        operands = {name: jax.ShapeDtypeStruct(call.shape_of(name), dtype) for name, dtype in call.dtypes.items()}
        with replacing_lax(False):
            narrow = call.platform != "cpu"
            jax.eval_shape(lambda xs: call.operation.composition(call.operation, product, xs, _static(call), narrow=narrow), operands)
        return f"{config.algorithm} of {', '.join(dict.fromkeys(parts))}"

    def run(self, call: Call, config: Algorithm, operands: Mapping[str, jax.Array]):
        return composed(call, operands, self._named(call))

    def _named(self, call: Call) -> str | None:
        """The implementation of the products inside: this one if it was named for the operation."""
        return self.name if call.parameters.implementation == self.name else None


def _inner_call(call: Call, form: Form, open: str, operands: Mapping[str, jax.Array], static: Static) -> Call:
    avals = [operands[name] for name in form.operands(open)]
    return form.call(open, avals, static=static, platform=call.platform, arch=call.arch, partitioner=call.partitioner)


def _static(call: Call) -> Static:
    """The parameters of the composition, which has all results."""
    dtypes = tuple(call.results.get(name, call.dtype) for name in call.operation.results)
    return call.parameters.replace(dtypes=dtypes, precision=call.precision, out_sharding=None)
