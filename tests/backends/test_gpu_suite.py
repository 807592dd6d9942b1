"""The suite of problems on a GPU: every case of smaller problems, by each implementation that takes it, against float64 on the CPU."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import random, wide
from test_gpu import exact, near, on_cpu

from jaxext.bench.case import Case
from jaxext.bench.problems import PROBLEMS, reduced
from jaxext.tuning import random_operands, timing
from jaxext.verify.laws import STRAY, SUMS, TF32

OPERATIONS = 1e8  # per role: of many tiles, and soon done on a CPU

# What XLA does on a GPU is not ours to bound: parts of a sum may be added up in the result's dtype, and cuDNN may compute in Winograd's or
# Fourier's basis.
OTHER_BASIS = 2.0**-16
NETWORK = 2  # times the law of one product: each of its layers rounds


def cases(flops):
    """Each once; a step's products are those of the other roles, and operations of jaxext's own have files of their own."""
    found = {}
    for problem in PROBLEMS:
        for case in reduced(problem, flops).cases() if "own" not in problem.tags else ():
            if case.role != "step" or "mlp" in case.tags:
                found.setdefault((case.role, case.numbers, case.shapes, repr(case.static)), case)
    return list(found.values())


CASES = cases(OPERATIONS)
NAMES = [("cube, 256", "nn", "tf32"), ("odd sizes, 4095x257", "nt", "int8"), ("odd sizes, 4095x257", "tn", "bf16")]
NAMES += [("dense 1x1", "dgrad", "tf32"), ("mlp", "wgrad", "bf16")]
SOME = [next(c for c in CASES if c.name.startswith(name) and [c.role, c.numbers] == kind) for name, *kind in NAMES]
named = operator.attrgetter("name")


@functools.lru_cache(maxsize=1)  # of the case that several implementations compute, one after the other
def operands_and_truth(at):
    """Operands, what is right and, of a product, the sum of the magnitudes of its terms; of 8 bits they are small integers, to be exact."""
    case = CASES[at]
    integers = any(jnp.dtype(dtype).itemsize == 1 for dtype in case.dtypes)
    arrays = [random(shape, dtype, seed, integers) for seed, (shape, dtype) in enumerate(zip(case.shapes, case.dtypes, strict=True))]
    truth = jax.jit(case.truth)
    return arrays, *(jax.tree.leaves(on_cpu(truth, *operands)) for operands in (arrays, map(np.abs, arrays)))


def stray(case, implementation, dtype):
    """Return the largest error of a sum of products in results of this dtype, over the sum of their magnitudes."""
    of_kernels = TF32 if case.numbers == "fp32bf16" else STRAY.get(str(case.numbers), SUMS)
    if implementation != "xla" or jax.default_backend() == "cpu":
        return of_kernels
    return max(of_kernels, OTHER_BASIS, float(jnp.finfo(dtype).eps))


def verify(case, implementation):
    """The result is right, and a kernel's of the same bits when computed again; pytest's skip, with the reason, if there is a refusal."""
    arrays, truth, magnitudes = operands_and_truth(CASES.index(case))
    program = jax.jit(case.build(implementation))
    random_operands.poison(jax.eval_shape(program, *arrays))  # another implementation's result may be left there
    try:
        got = jax.tree.leaves(program(*arrays))
    except NotImplementedError as refusal:
        pytest.skip(str(refusal))
    if any(array.dtype.itemsize == 1 for array in arrays):
        exact(got, truth)
    elif "mlp" in case.tags:
        for y, right in zip(got, truth, strict=True):
            assert np.linalg.norm(wide(y) - right) <= NETWORK * timing.law(case.dtypes, case.numbers, "cuda") * np.linalg.norm(right)
    else:
        near(got, truth, magnitudes, stray(case, implementation, got[0].dtype))
    for once, again in zip(got, jax.tree.leaves(program(*arrays)), strict=True) if implementation != "xla" else ():
        assert np.asarray(once).tobytes() == np.asarray(again).tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["xla", "triton", "cuda"])
@pytest.mark.parametrize("case", CASES, ids=named)
def test_case(case, implementation):
    verify(case, implementation)


# The verification itself, where there is no GPU.


@pytest.mark.parametrize("case", SOME, ids=named)
def test_what_is_right_passes(case):
    verify(case, "xla")


@pytest.mark.parametrize("factor", [1.1, np.nan])
@pytest.mark.parametrize("case", [case for case in SOME if case.numbers != "int8"], ids=named)
def test_what_is_wrong_does_not(case, factor, monkeypatch):
    build = Case.build
    monkeypatch.setattr(Case, "build", lambda *args: lambda *arrays: jax.tree.map(lambda y: y * factor, build(*args)(*arrays)))
    with pytest.raises(AssertionError):
        verify(case, "xla")


def test_only_what_xla_does_on_a_gpu_may_stray_further(monkeypatch):
    case = SOME[2]
    assert stray(case, "xla", jnp.bfloat16) == SUMS
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert stray(case, "xla", jnp.bfloat16) == 2.0**-7 and stray(case, "triton", jnp.bfloat16) == SUMS
    assert stray(SOME[0], "xla", jnp.float32) == TF32


def test_results_are_not_left_for_the_next_implementation(monkeypatch):
    order, build = [], Case.build
    monkeypatch.setattr(random_operands, "poison", lambda results: order.append(results.shape))
    monkeypatch.setattr(Case, "build", lambda *args: lambda *arrays: order.append("traced") or build(*args)(*arrays))
    verify(SOME[0], "xla")
    assert order[:2] == ["traced", (SOME[0].shapes[0][0], SOME[0].shapes[1][1])]


def test_a_refusal_is_told():
    with pytest.raises(pytest.skip.Exception, match="implementation 'triton' does not support this call: .*platform is 'cpu'"):
        verify(SOME[0], "triton")
