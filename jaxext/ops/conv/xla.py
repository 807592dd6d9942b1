"""The `xla` implementation of convolution: plain XLA ops, by the algorithm that is expected to be fastest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax

from jaxext.core.call import Call
from jaxext.core.implementation import Algorithm, Implementation, file_of, files_of, hash_of
from jaxext.core.window import Window
from jaxext.ops.conv import xla_algorithms as conv_algorithms
from jaxext.ops.conv import xla_plan as conv_plan


class XlaConv(Implementation):
    """It supports every call."""

    name = "xla"
    version = "of its files"

    def code(self, platform: str) -> str:
        return hash_of([*files_of(self), file_of(Window)])

    def refuses(self, call: Call) -> str | None:
        return None

    def not_preferred(self, call: Call) -> str | None:
        return None

    def candidates(self, call: Call) -> Sequence[Algorithm]:
        names = [plan.algorithm for plan in self._plans(call)]
        if call.in_loop and names[0] == "lax":
            names = ["loop", *names]  # which has the layout that is fast in a loop
        return [Algorithm(name) for name in names]

    def expected(self, call: Call) -> Sequence[str]:
        if call.platform != "cpu" or call.in_loop:
            return []
        return [f"{plan.algorithm} {plan.cost}" for plan in self._plans(call) if plan.cost]

    def _plans(self, call: Call) -> Sequence[conv_plan.Plan]:
        assert call.window is not None
        conv = conv_plan.conv_of(call.open, call.sizes, call.window, conv_algorithms.promote(*call.dtypes.values()))
        return conv_plan.plans(conv, splitter=call.splitter, platform=call.platform)

    def run(self, call: Call, config: Algorithm, operands: Mapping[str, jax.Array]) -> jax.Array:
        assert call.window is not None
        y = conv_algorithms.conv(
            call.open,
            call.flatten(operands),
            call.window,
            algorithm=config.algorithm,
            dtype=call.dtype,
            precision=call.precision,
            splitter=call.splitter,
            platform=call.platform,
        )
        return y.reshape(call.shape)
