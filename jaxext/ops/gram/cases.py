"""The named calls of products of a matrix with its own transpose (`core/contact.py`)."""

import functools
from collections.abc import Iterator

from jaxext.core.contact import BF16, FP16, FP32, Contact, arrays, step
from jaxext.ops.gram import gram, newton_schulz


def contacts() -> Iterator[Contact]:
    for dtype in (BF16, FP16, FP32):
        yield step(f"gram {dtype}", gram, *arrays((1040, 528), dtype=dtype))
    yield Contact("gram into float32", functools.partial(gram, preferred_element_type=FP32), arrays((1040, 528)))
    iterate = functools.partial(newton_schulz, steps=1, coefficients=(2.0, 1.0, 1.0))
    for dtype in (BF16, FP16, FP32):
        yield Contact(f"gram with addend {dtype}", iterate, arrays((528, 784), dtype=dtype))


PAGES = {
    "gram": [
        step("gram of 4096x1024, bfloat16", gram, *arrays((4096, 1024))),
        step("gram of 512x512, float32", gram, *arrays((512, 512), dtype=FP32)),
        Contact("gram, complex64", gram, arrays((512, 512), dtype="complex64")),
        Contact("newton_schulz of 4096x4096, bfloat16", newton_schulz, arrays((4096, 4096))),
    ]
}
