"""The families of portable CUDA kernels for the simulation of tests/simt.py: their problems, configs and truth."""

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

import harness
import numpy as np
import simt_weight_only
import test_causal_kernel
import test_depthwise
from cuda_cases import LONG, Case, causal, conv, weight_only

from jaxext.backends.triton.interpreter import DTYPES
from jaxext.ops.causal import cuda as cuda_causal
from jaxext.ops.causal.cuda import CausalConfig
from jaxext.ops.conv import cuda_dense as cuda_conv
from jaxext.ops.conv import cuda_depthwise
from jaxext.ops.conv.cuda_depthwise import DepthwiseConfig
from jaxext.ops.scaled import cuda_weight_only


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    name: str
    module: types.ModuleType  # which picks configs
    case: Callable[[Any, Any], Case]  # of a problem and a config
    operands: Callable[..., dict[str, np.ndarray]]  # of a problem, and whether they are small integers
    results: Callable[[Any, dict[str, np.ndarray]], list[np.ndarray]]  # of a problem and of what a call gave: parts are added
    truth: Callable[[Any, dict[str, np.ndarray]], list[np.ndarray]]  # in float64
    near: Callable[[Any, list[np.ndarray], dict[str, np.ndarray]], None]  # check results of others than small integers
    configs: Callable[[Any], list]  # of a problem: strips shorter than a chunk, of several chunks, and what is picked
    is_kernel: Callable[[Any, Any, tuple], bool]  # of a problem and a config: whether this one should run

    def grid(self, problem, config) -> tuple[int, ...]:
        grid = self.module.grid(problem, config)
        return grid if isinstance(grid, tuple) else (grid, 1, 1)

    def check(self, problem, results, operands, integers=True) -> None:
        """Check the results of a problem: exact of small integers, otherwise within float32's rounding."""
        if not integers:
            return self.near(problem, results, operands)
        for got, want in zip(results, self.truth(problem, operands), strict=True):
            harness.check(got, want)

    def __str__(self) -> str:
        return self.name


def _depthwise_case(problem, config):
    row = dict(rank=cuda_conv.rank(problem), role=problem.role, operands=LONG[problem.dtypes[0]])
    return conv(row, problem, config, result=LONG[problem.dtypes[2]])


def _added(axes):
    """The one result of a call, of so many axes.  Parts are added in float32, and rounded once."""

    def results(problem, named):
        (got,) = named.values()
        return [(got if got.ndim == axes else got.sum(axis=0, dtype=np.float32)).astype(DTYPES[problem.dtypes[2]])]

    return results


def _near_depthwise(problem, results, operands):
    magnitudes = {slot: np.abs(x.astype(np.float64)) for slot, x in operands.items()}
    harness.check(results[0], test_depthwise.truth(problem, operands), test_depthwise.truth(problem, magnitudes))


def _depthwise_configs(problem):
    """Return configs; those of wgrad have pieces and splits of which some are empty."""
    parts = dict(pieces=4, splits=3) if problem.role == "wgrad" else {}
    found = [DepthwiseConfig(lanes=2, strip=3, **parts), DepthwiseConfig(lanes=1, strip=11), cuda_depthwise.candidates(problem)[0]]
    return list(dict.fromkeys(found))


def _causal_configs(problem):
    """Return configs; those of the backward pass have parts of which some are empty."""
    few, many = (3, 7) if problem.role == "backward" else (1, 1)
    found = [CausalConfig(lanes=2, strip=3, splits=few), CausalConfig(lanes=4, strip=11, splits=many), cuda_causal.candidates(problem)[0]]
    return list(dict.fromkeys(found))


DEPTHWISE = Family(
    name="depthwise",
    module=cuda_depthwise,
    case=_depthwise_case,
    operands=test_depthwise.operands_of,
    results=_added(7),
    truth=lambda problem, operands: [test_depthwise.truth(problem, operands)],
    near=_near_depthwise,
    configs=_depthwise_configs,
    is_kernel=lambda problem, config, kernel: (kernel[1] > 1) == cuda_depthwise.fills_vectors(problem),
)
CAUSAL = Family(
    name="causal",
    module=cuda_causal,
    case=causal,
    operands=test_causal_kernel.operands_of,
    results=test_causal_kernel.in_order,
    truth=test_causal_kernel.true,
    near=test_causal_kernel.near,
    configs=_causal_configs,
    is_kernel=lambda problem, config, kernel: kernel[1] == cuda_causal.vector(problem),
)
WEIGHT_ONLY = Family(
    name="weight_only",
    module=cuda_weight_only,
    case=weight_only,
    operands=simt_weight_only.operands_of,
    results=_added(3),
    truth=lambda problem, operands: [simt_weight_only.true(problem, operands)],
    near=functools.partial(simt_weight_only.check_parts, integers=False),
    configs=lambda problem: [cuda_weight_only.candidates(problem)[0]],
    is_kernel=lambda problem, config, kernel: kernel[1:] == (problem.bits_of_weight, config.tile_m // 8, config.tile_n // config.tile_m),
)
