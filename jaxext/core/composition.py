"""The definition of an operation that is not bilinear: its composition of forms and jnp, computed on one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxext import _compat
from jaxext.core.call import Call
from jaxext.core.choose import chosen
from jaxext.core.implementation import Algorithm, Definition
from jaxext.core.static import Static


def composed(call: Call, operands: Mapping[str, jax.Array], named: str | None, summed: Callable | None = None) -> Any:
    """The result of a call, or a tuple of several, by the composition, on one device.

    Its products are computed by the implementation that is `named`, and their partial sums are added over devices by `summed`.
    """
    static, narrow = _parameters(call, summed)
    return _results(call, call.operation.composition(call.operation, _product(call, named, summed), operands, static, narrow=narrow))


class Composition(Definition):
    """The definition of an operation with a product inside.  It supports every call."""

    name, version = "xla", "of its call"

    def candidates(self, call: Call) -> Sequence[Algorithm]:
        return (Algorithm("composition"),)

    def run(self, call: Call, config: Algorithm, operands: Mapping[str, jax.Array]):
        static, narrow = _parameters(call, None)
        product = _product(call, self.name if static.implementation == self.name else None, None)
        return _results(call, call.operation.composition(call.operation, product, operands, static, narrow=narrow))


def _parameters(call: Call, summed: Callable | None) -> tuple[Static, bool]:
    """Return the parameters of the composition, and whether its products are no wider than the result: XLA writes a product to memory
    before what follows it, which takes the time on GPUs."""
    assert call.parameters is not None
    dtypes = tuple(call.results.get(name, call.dtype) for name in call.operation.results)
    return call.parameters.replace(dtypes=dtypes, precision=call.precision, out_sharding=None), call.platform != "cpu" and summed is None


def _product(call: Call, named: str | None, summed: Callable | None) -> Callable[..., jax.Array]:
    """The product of a form on this device, by the implementation that is `named`."""
    all_axes = {axis for axes in call.axes.values() for axis in axes}
    device = dict(platform=call.platform, arch=call.arch, partitioner=call.partitioner)

    def product(form, open, operands, static: Static):
        names = form.operands(open)
        operands = dict(zip(names, _compat.align_varying(*(operands[name] for name in names)), strict=True))
        inner = form.call(open, list(operands.values()), static=static, **device)
        choice = chosen(inner, form.family.implementations, named)
        y = choice.checked(choice.compute(operands))
        if summed is None:
            return y
        contracted = {axis for name in names for axis in inner.axes[name]} - {*inner.axes[open]}
        return summed(y, all_axes - contracted)

    return product


def _results(call: Call, results: Mapping[str, jax.Array]) -> Any:
    return tuple(results[name] for name in call.results) if call.further else results[call.open]
