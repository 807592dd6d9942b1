"""The named calls of ragged products of scaled numbers (`core/contact.py`)."""

import functools
from collections.abc import Iterator

import jax

from jaxext.core.contact import BF16, E4M3, E5M2, FP16, FP32, INT8, Contact, typed
from jaxext.ops.ragged_scaled import ragged_scaled_dot


def _dot(x, w, sizes, x_scale, w_scale=None, *, result: str | None = None, turned: bool = False) -> jax.Array:
    scales = {"rhs_scale": x_scale} if w_scale is None else {"lhs_scale": x_scale, "rhs_scale": w_scale}
    return ragged_scaled_dot(x, w, sizes, **scales, preferred_element_type=result, transpose_rhs=turned)


def _gradients(x, w, sizes, x_scale, w_scale, y) -> tuple[jax.Array, ...]:
    return jax.vjp(functools.partial(_dot, result=BF16), x, w, sizes, x_scale, w_scale)[1](y)[:2]


def _with_gradient(x, w, sizes, w_scale, y) -> tuple[jax.Array, jax.Array]:
    result, pullback = jax.vjp(lambda x: _dot(x, w, sizes, w_scale), x)
    return result, *pullback(y)


def _operands(rows: int, groups: int, depth: int, columns: int, dtypes, blocks: int | None, *, turned: bool = False):
    """Rows and matrices of these dtypes.  `blocks`: the size of those of a scale; None: a scale for each row and column.  Wide rows have no
    scale."""
    s, j = (1, columns) if blocks is None else (depth // blocks, columns // blocks)
    w, w_scale = (groups, depth, columns), (groups, s, j)
    if turned:
        w, w_scale = ((shape[0], shape[2], shape[1]) for shape in (w, w_scale))
    x, second = dtypes
    of_rows = () if x in (BF16, FP16, FP32) else (((rows, s), FP32),)
    return typed(((rows, depth), x), (w, second), ((groups,), "int32"), *of_rows, (w_scale, FP32))


def contacts() -> Iterator[Contact]:
    M, G, K, N = 525, 8, 384, 272
    for kept, x, blocks in ((INT8, BF16, 16), (INT8, FP16, 16), (INT8, FP32, 16), ("int4", BF16, 128)):
        of = functools.partial(_operands, M, G, K)
        if x == BF16:
            operands = *of(N, (x, kept), None), *typed(((M, N), x))
            yield Contact(f"ragged scaled {kept}, {x} rows, columns, with the gradient of rows", _with_gradient, operands)
        else:
            yield Contact(f"ragged scaled {kept}, {x} rows, columns", _dot, of(N, (x, kept), None))
        yield Contact(f"ragged scaled {kept}, {x} rows, blocks of {blocks}", _dot, of(256, (x, kept), blocks))
    for turned in (False, True):
        for blocks, columns in ((None, N), (128, 256)):
            where = f"{'rows and columns' if blocks is None else 'blocks'}{' turned' * turned}"
            function = functools.partial(_dot, result=BF16, turned=turned)
            operands = _operands(M, G, K, columns, (E4M3, E4M3), blocks, turned=turned)
            yield Contact(f"ragged scaled fp8, {where}", function, operands)
    yield Contact("ragged scaled int8 by int8", functools.partial(_dot, result=BF16), _operands(M, G, K, N, (INT8, INT8), None))
    operands = *_operands(M, G, K, 256, (E5M2, E4M3), 128), *typed(((M, 256), BF16))
    yield Contact("ragged scaled fp8, gradients", _gradients, operands)


PAGES = {
    "ragged_scaled_dot": [
        Contact(name, functools.partial(_dot, turned=turned), _operands(16384, 8, 1024, 2048, dtypes, blocks, turned=turned))
        for name, dtypes, blocks, turned in (
            ("int8 experts, a scale for each column, bfloat16 rows", (BF16, INT8), None, False),
            ("int4 experts, blocks of 128, bfloat16 rows", (BF16, "int4"), 128, False),
            ("e4m3 by e4m3, blocks of 128", (E4M3, E4M3), 128, False),
            ("e4m3 by e4m3, blocks of 128, transpose_rhs", (E4M3, E4M3), 128, True),
        )
    ]
}
