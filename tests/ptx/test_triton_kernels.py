"""The PTX that Triton makes of our kernels, in the configurations that they pick, on small problems that do not fit their tiles.

Results are compared with the definition in float64: small integers exactly, other numbers up to rounding.  Asynchronous copies and products
take effect as late as they may, and then at once: both must give the same bits.  No device is needed, only Triton's compiler.
"""

import dataclasses
import itertools

import pytest
from triton_kernels import Call, kernel_module, skip_without_compiler

from jaxext.benchmarks.kinds import Matmul
from jaxext.benchmarks.problems import PRODUCTS, reduced

ARCHS = (80, 90)
FLOPS = 2e5  # of a smaller problem
MOST_SPLITS = 3  # of its depth
# Numbers that are multiplied as others are; of their tests but one is slow.
ALIKE = {"fp16": "halves", "bf16": "halves", "tf32x3": "parts", "bf16x3": "parts", "bf16x6": "parts", "fp8 both": "fp8"}

skip_without_compiler()


# The suite's problems.


def smaller(case, config):
    """A problem of the kind that does not fit the tiles; or, if its own sizes make it what it is, its twin."""
    if isinstance(case, Matmul) and not any(size % 16 for size in (case.M, case.N, case.K)):
        sizes = dict(B=min(case.B, 2), M=config.tile_m + 24, N=config.tile_n // 2 + 40, K=2 * config.tile_k + 16)
        return Matmul(name=case.name, numbers=case.numbers, **sizes)
    return reduced(case, FLOPS)


def picks():
    """(suite's problem, role, numbers, arch, config): each config once; the first of each role, kind of numbers and arch is no slow test."""
    seen = set()
    for case in PRODUCTS:
        kernel = kernel_module(case.kernel)
        for role, numbers, arch in itertools.product(case.products, case.numbers, ARCHS):
            problem = case.problem(role, numbers, arch)
            if kernel.supports(problem) is not None:
                continue
            kind, config = (case.kernel, role, ALIKE.get(numbers, numbers), arch), kernel.pick(problem)
            if (kind, numbers, config) not in seen:
                marks = [pytest.mark.slow] if kind in seen else []
                seen |= {kind, (kind, numbers, config)}
                yield pytest.param(case, role, numbers, arch, config, marks=marks, id=f"{case.name}-{role}-{numbers}-sm_{arch}-{config}")


PICKS = list(picks())


@pytest.mark.parametrize(("case", "role", "numbers", "arch", "config"), PICKS)
def test_pick(case, role, numbers, arch, config):
    config = dataclasses.replace(config, splits=min(config.splits, MOST_SPLITS))
    Call(case.kernel, smaller(case, config).problem(role, numbers, arch), config).execute_and_check()
