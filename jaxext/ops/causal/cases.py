"""The named calls of causal convolutions (`core/contact.py`): plain, packed, and with a state before the first step."""

import functools
from collections.abc import Iterator

from jaxext.core.contact import BF16, FP16, FP32, Contact, arrays, step, typed
from jaxext.ops.causal import causal_conv1d

SILU = functools.partial(causal_conv1d, activation="silu")


def contacts() -> Iterator[Contact]:
    shapes = (3, 1037, 264), (4, 264), (264,)
    operands = arrays(*shapes)
    yield step("causal", causal_conv1d, *operands)
    for dtype in (BF16, FP16, FP32):
        yield step(f"causal silu {dtype}", SILU, *arrays(*shapes, dtype=dtype))
    numbers, state = typed((shapes[0][:2], "int32")), arrays((3, 3, 264))
    yield step("causal packed silu", lambda x, w, b, idx: SILU(x, w, b, seq_idx=idx), *operands, *numbers)
    yield step("causal silu after a state", lambda x, w, b, s: SILU(x, w, b, initial_states=s), *operands, *state)


PAGES = {
    "causal_conv1d": [
        step("4 taps, silu, bfloat16", SILU, *arrays((8, 4096, 2048), (4, 2048), (2048,))),
        step("16 taps, float32", causal_conv1d, *arrays((8, 4096, 2048), (16, 2048), (2048,), dtype=FP32)),
        step("32 taps, bfloat16", causal_conv1d, *arrays((8, 4096, 2048), (32, 2048), (2048,))),
        Contact("float64", causal_conv1d, arrays((8, 4096, 2048), (4, 2048), dtype="float64")),
    ]
}
