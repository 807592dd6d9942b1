"""Products by CUTLASS's own collectives on the interpreter, of dtypes that our kernels do not have: cuda/cutlass_products.cu."""

import ctypes
import itertools
import json

import numpy as np
import pytest
from cuda_kernels import compiled, launch
from ptxsim import EARLY, LATE, Input, Output

pytestmark = pytest.mark.cuda

ADDRESSES = [i << 44 for i in (1, 2, 3)]


def check_product(library, modules, name, dtype, most, sizes, late):
    rows, columns, depth = sizes
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-most, most + 1, shape).astype(dtype) for shape in ((rows, depth), (columns, depth)))
    result = Output(np.zeros((rows, columns), {np.int8: np.int32}.get(dtype, dtype)), ADDRESSES[2])

    library.Begin(0, b"")
    status = getattr(library, name)(rows, columns, depth, *map(ctypes.c_void_p, ADDRESSES))
    answer = ctypes.create_string_buffer(1 << 20)
    library.Told(answer, ctypes.c_int64(len(answer)))
    assert status == 0
    launch(json.loads(answer.value), modules, [Input(a, ADDRESSES[0]), Input(b, ADDRESSES[1]), result], late)

    np.testing.assert_array_equal(result.values, a.astype(np.int64) @ b.T.astype(np.int64))
    assert (result.written == 1).all()


@pytest.mark.slow
def test_products():
    """One test, because what it runs takes most of a minute to compile."""
    library, modules = compiled("cutlass_products.cu")
    for sizes, late in itertools.product([(16, 16, 32), (300, 100, 560)], [LATE, EARLY]):
        check_product(library, modules, "ProductS8", np.int8, 127, sizes, late)
        check_product(library, modules, "ProductTf32", np.float32, 30, sizes, late)
