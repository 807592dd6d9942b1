"""The named calls of rows times numbers (`core/contact.py`)."""

from collections.abc import Iterator

from jaxext.core.contact import BF16, FP32, Contact, step, typed
from jaxext.ops.rowscale import rowscale


def contacts() -> Iterator[Contact]:
    for dtype in (BF16, FP32):
        yield step(
            f"rowscale {dtype}", rowscale, *typed(((3, 1037, 1048), dtype), ((1037,), FP32))
        )


PAGES = {}  # it has no page yet
