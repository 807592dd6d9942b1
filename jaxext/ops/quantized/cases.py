"""The named calls of products of quantised weights, and of training in 8-bit floats (`core/contact.py`)."""

from collections.abc import Iterator

from jaxext.core.contact import BF16, FP16, FP32, SQUARE, Contact, arrays, step, typed
from jaxext.ops.quantized import fp8_matmul, quantized_matmul
from jaxext.ops.quantized.quantization import Quantized


def _weight_only(name: str, kept: str, rows: int, K: int, N: int, group: int, dtype: str) -> Contact:
    operands = typed(((rows, K), dtype), ((K, N), kept), ((K // group, N), FP32))
    return Contact(name, lambda x, q, s: quantized_matmul(x, Quantized(q, s)), operands)


def contacts() -> Iterator[Contact]:
    def weights(kept: str, rows: int, group: int, dtype: str) -> Contact:
        return _weight_only(f"{kept} weights in groups of {group}, {rows} rows of {dtype}", kept, rows, 768, 544, group, dtype)

    yield step("fp8_matmul", fp8_matmul, *arrays((272, 768), (768, 528)))
    for kept in ("int8", "int4"):
        for rows in (16, 200, 1):
            for group in (128, 32, 768) if rows > 1 else (128,):
                yield weights(kept, rows, group, BF16)
        for rows, dtype in ((16, FP16), (200, FP16), (16, FP32)):
            yield weights(kept, rows, 128, dtype)


LARGE = 16384, 8192

PAGES = {
    "quantized_matmul": [
        _weight_only("16 rows, int8, a scale for each column", "int8", 16, *LARGE, LARGE[0], BF16),
        _weight_only("16 rows, int4, groups of 128", "int4", 16, *LARGE, 128, BF16),
        _weight_only("128 rows, int4, groups of 128", "int4", 128, *LARGE, 128, BF16),
        _weight_only("16 rows of float32, int8", "int8", 16, *LARGE, LARGE[0], FP32),
        _weight_only("16 rows, int4, groups of 16", "int4", 16, *LARGE, 16, BF16),
    ],
    "fp8_matmul": [
        step("bfloat16 operands", fp8_matmul, *arrays(*SQUARE)),
        step("1001 columns", fp8_matmul, *arrays((4096, 4096), (4096, 1001))),
    ],
}
