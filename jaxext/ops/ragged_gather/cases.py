"""The named calls of ragged products of gathered rows (`core/contact.py`)."""

import functools
from collections.abc import Iterator

from jaxext.core.contact import BF16, FP16, FP32, Contact, both, step, typed
from jaxext.ops.ragged_gather import ragged_gather_linear

SILU = functools.partial(ragged_gather_linear, activation="silu")
# Twice as many places as rows, less one.
INDICES = typed(((8,), "int32"), ((645,), "int32"), ((323, 2), "int32"))


PAGES: dict[str, list[Contact]] = {}  # it is no public operation


def contacts() -> Iterator[Contact]:
    for dtype in (BF16, FP16, FP32):
        yield step(f"ragged_gather {dtype}", ragged_gather_linear, *typed(((323, 264), dtype), ((8, 264, 272), dtype)), *INDICES)
        for what, matrices in (("linear", (8, 264, 272)), ("gated", (8, 264, 2, 136))):
            yield from both(f"ragged_gather {what} silu {dtype}", SILU, *typed(((323, 264), dtype), (matrices, dtype)), *INDICES)
