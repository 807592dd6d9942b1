"""The named calls of products of scaled numbers (`core/contact.py`)."""

from collections.abc import Iterator

from jaxext.core.contact import BF16, E4M3, E5M2, FP16, FP32, INT8, SQUARE, Contact, arrays, typed
from jaxext.ops.scaled import scaled_dot


def _dot(result: str, turned: bool = False):
    dims = (((1,), (1 if turned else 0,)), ((), ()))
    return lambda x, w, s, t: scaled_dot(x, w, lhs_scale=s, rhs_scale=t, dimension_numbers=dims, preferred_element_type=result)


def contacts() -> Iterator[Contact]:
    M, K, N = 269, 768, 528

    def call(name: str, first: str, second: str, of_left: tuple[int, int], of_right: tuple[int, int], result=BF16, turned=False):
        right = [(K, of_right[1] * 128 if of_right[1] in (4,) else N), of_right]
        w, t = ((of[1], of[0]) if turned else of for of in right)
        return Contact(f"scaled {name}", _dot(result, turned), typed(((M, K), first), (w, second), (of_left, FP32), (t, FP32)))

    rows = (M, 1), (1, N)
    scales = {"tensor": ((1, 1), (1, 1)), "rows": rows, "blocks": ((M, 6), (6, 4)), "32": ((M, 24), (24, N))}
    for name, (left, right) in scales.items():
        for turned in (False, True):
            yield call(f"fp8, {name}{' turned' * turned}", E4M3, E4M3, left, right, turned=turned)
    for turned in (False, True):
        yield call(f"fp8 both, rows{' turned' * turned}", E5M2, E4M3, *rows, turned=turned)
    yield call("fp8 into float32", E4M3, E4M3, *rows, FP32)
    yield call("fp8 into float16", E4M3, E4M3, *rows, FP16)
    yield call("int8", INT8, INT8, *rows)
    yield call("e5m2 by e5m2", E5M2, E5M2, *rows)


def _shown(name: str, dtype: str, left: tuple[int, int], right: tuple[int, int], result: str = BF16) -> Contact:
    return Contact(name, _dot(result), (*arrays(*SQUARE, dtype=dtype), *arrays(left, right, dtype=FP32)))


PAGES = {
    "scaled_dot": [
        _shown("e4m3 by e4m3, scales of blocks of 128, into bfloat16", E4M3, (4096, 32), (32, 32)),
        _shown("e4m3 by e4m3, scales of blocks of 32, into bfloat16", E4M3, (4096, 128), (128, 4096)),
        _shown("e5m2 by e5m2", E5M2, (4096, 1), (1, 4096)),
        _shown("int8 by int8", INT8, (4096, 1), (1, 4096)),
        _shown("into float16", E4M3, (4096, 1), (1, 4096), FP16),
    ]
}
