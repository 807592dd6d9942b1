"""The named calls of ragged products (`core/contact.py`)."""

import functools
from collections.abc import Iterator

import jax

from jaxext.core.contact import BF16, FP16, FP32, Contact, arrays, both, step, typed
from jaxext.ops.ragged import ragged_dot, ragged_gated_linear_unit, ragged_linear


def _groups(*shapes: tuple[int, ...], dtype: str = BF16) -> tuple[jax.ShapeDtypeStruct, ...]:
    first, second, *more = arrays(*shapes, dtype=dtype)
    return first, second, jax.ShapeDtypeStruct((shapes[1][0],), "int32"), *more


LINEAR, UNIT = functools.partial(ragged_linear, activation="gelu"), functools.partial(ragged_gated_linear_unit, activation="silu")


def contacts() -> Iterator[Contact]:
    rows, weights = (645, 264), (8, 264, 272)
    for dtype in (BF16, FP16, FP32):
        yield step(f"ragged {dtype}", ragged_dot, *_groups(rows, weights, dtype=dtype))
    for dtype in (BF16, FP16, FP32):
        yield from both(f"ragged_linear gelu {dtype}", LINEAR, *_groups(rows, weights, (8, 272), dtype=dtype))
        yield from both(f"ragged_gated silu {dtype}", UNIT, *_groups(rows, (8, 264, 2, 136), dtype=dtype))
    operands = *_groups(rows, weights, (8, 272)), *typed((rows[:1], FP32))
    yield step("ragged_linear relu and scale", lambda x, w, n, b, s: ragged_linear(x, w, n, b, activation="relu", row_scale=s), *operands)
    yield step("ragged, 40 groups", ragged_dot, *_groups((269, 264), (40, 264, 272)))
    for dtype in (BF16, FP16, FP32):  # the gradient of few small matrices, in chunks of rows
        yield step(f"ragged, 2 long groups {dtype}", ragged_dot, *_groups((8201, 136), (2, 136, 144), dtype=dtype))


ROWS, WEIGHTS = (16384, 1024), (8, 1024, 2048)

PAGES = {
    "ragged": [
        step("ragged_dot, 8 groups, bfloat16", ragged_dot, *_groups(ROWS, WEIGHTS)),
        step("ragged_dot, 8 groups, float32", ragged_dot, *_groups(ROWS, WEIGHTS, dtype=FP32)),
        Contact("ragged_linear, bias and gelu, bfloat16", LINEAR, _groups(ROWS, WEIGHTS, (8, 2048))),
        Contact("ragged_gated_linear_unit, silu, bfloat16", UNIT, _groups(ROWS, (8, 1024, 2, 2048))),
    ]
}
