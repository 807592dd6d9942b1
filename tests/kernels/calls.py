"""Calls of the kernels, with their operands and their results by definition, and the tests that every kernel has.

A kernel's own file has a subclass of each: of `Call`, which the tests of its PTX run too, and of `Suite`, with the rows of the tests.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Self

import epilogues
import harness
import numpy as np
import pytest
from cases import random

from jaxext.backends.triton.interpreter import DTYPES


def factors(problem: Any, open_slot: str, integers: bool = True) -> dict[str, np.ndarray]:
    """Random arrays for all slots but the one of the result."""
    slots = [slot for slot in problem.shapes if slot != open_slot][:2]
    return {slot: random(problem.shapes[slot], DTYPES[problem.dtypes[i]], i, integers) for i, slot in enumerate(slots)}


def absolute(operands: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {slot: np.abs(values.astype(np.float64)) for slot, values in operands.items()}


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """A kernel's problem with one of its configurations, or with the smallest tiles, of which small problems have many."""

    problem: Any
    config: Any = None

    kernel: ClassVar[str]
    open: ClassVar[Mapping[str, str]]  # role -> slot of the result
    kinds: ClassVar = (True, False)  # of operands: small integers, and others

    @property
    def module(self) -> Any:
        return importlib.import_module(f"jaxext.kernels.{self.kernel}")

    def small(self) -> Any:
        """Return the configuration with the smallest tiles."""
        raise NotImplementedError

    @classmethod
    def smallest(cls, problem: Any, **changes) -> Self:
        """Return the call with the smallest tiles, or with changes of them."""
        return cls(problem, dataclasses.replace(cls(problem).small(), **changes))

    @classmethod
    def picked(cls, problem: Any, **changes) -> Self:
        """Return the call with the configuration that the kernel picks, or with changes of it."""
        return cls(problem, dataclasses.replace(cls(problem).module.candidates(problem)[0], **changes))

    def with_problem(self, **changes) -> Self:
        return dataclasses.replace(self, problem=dataclasses.replace(self.problem, **changes))

    @functools.cached_property
    def launch(self) -> harness.Launch:
        return self.module.launch(self.problem, self.config or self.small())

    def operands(self, integers: bool = True) -> dict[str, np.ndarray]:
        if self.problem.epilogue:
            return epilogues.some_operands(self.problem, integers)
        return factors(self.problem, self.open[self.problem.role], integers)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the results."""
        return epilogues.results(self.problem) if self.problem.epilogue else (self.problem.shapes[self.open[self.problem.role]],)

    def sums(self, operands: Mapping[str, np.ndarray]) -> np.ndarray:
        """The result without an epilogue, in float64."""
        raise NotImplementedError

    def results(self, operands) -> list[np.ndarray]:
        """All results, in float64."""
        sums = self.sums(operands)
        return epilogues.true(self.problem, sums, operands) if self.problem.epilogue else [sums]

    def scales(self, operands, product_error: float = 1) -> list[np.ndarray]:
        """The magnitudes to which rounding errors are proportional; a product of factors is as many times less exact."""
        magnitudes = product_error * self.sums(absolute(operands))
        return epilogues.scales(self.problem, magnitudes, operands) if self.problem.epilogue else [magnitudes]

    def compute(self, operands) -> list[np.ndarray]:
        harness.skip_what_is_overwritten(self.module, self.problem)
        return harness.run(self.launch, operands, self.shapes, self.problem.dtypes[2])

    def judge(self, got, operands, exact: bool, product_error: float = 1) -> None:
        """Results are exact, or as near to the truth as rounding allows."""
        scales = [None] * len(got) if exact else self.scales(operands, product_error)
        for values, want, scale in zip(got, self.results(operands), scales, strict=True):
            harness.check(values, want, scale)

    def check(self, exact: bool = True, operands=None) -> None:
        operands = operands or self.operands(integers=exact)
        self.judge(self.compute(operands), operands, exact)


def each(build: Callable[..., Any], *axes: Iterable, slow: Callable[..., bool] = lambda *_: False) -> list:
    """Return a row for each combination of the axes: what `build` returns for it, if that is not None."""
    label = lambda choice: "_".join(map(str, choice)) if isinstance(choice, tuple) else str(choice)
    return [
        pytest.param(
            *(row if isinstance(row, tuple) else (row,)), id="-".join(map(label, choice)), marks=pytest.mark.slow if slow(*choice) else ()
        )
        for choice in itertools.product(*axes)
        if (row := build(*choice)) is not None
    ]


def changed(call: Call, *rows: tuple[dict[str, Any], str]) -> list[tuple[Call, str]]:
    """Return the rows with the call itself in place of the changes of its problem."""
    return [(call.with_problem(**change), reason) for change, reason in rows]


class Suite:
    """The tests of a kernel.  Each has the rows of the attribute of its name, and there is none without."""

    call: type[Call]
    most = least = 1  # candidates of a problem

    def __init_subclass__(cls):
        for name, rows in vars(cls).items():
            assert not isinstance(rows, list) or (rows and hasattr(cls, f"test_{name}")), f"{cls.__name__}.{name}"
        for name in [name for name in dir(Suite) if name.startswith("test_")]:
            if not hasattr(cls, name.removeprefix("test_")):
                setattr(cls, name, None)

    def pytest_generate_tests(self, metafunc):
        if (rows := getattr(self, metafunc.function.__name__.removeprefix("test_"), None)) is not None:
            metafunc.parametrize([*inspect.signature(metafunc.function).parameters][1:], rows)

    @pytest.mark.sampled(20, "3d-plain")
    def test_geometry(self, call):
        call.check()

    @pytest.mark.sampled(16)
    def test_dtypes(self, call):
        call.check()

    @pytest.mark.sampled(12)
    def test_configs(self, call):
        """Splits of the sum, groups in a tile, and the configuration that is picked."""
        call.check()

    @pytest.mark.sampled(8)
    def test_rounding(self, call):
        call.check(exact=False)

    @pytest.mark.sampled(8, "silu")
    def test_activations(self, call):
        call.check(exact=False)

    @pytest.mark.sampled(2)
    def test_same_bits(self, call):
        operands = call.operands(integers=False)
        for once, again in zip(*(call.compute(operands) for _ in range(2)), strict=True):
            assert once.tobytes() == again.tobytes()

    def test_refused_problems(self, call, reason):
        found = call.module.refuses(call.problem) or ""
        assert re.search(reason, found), found
        with pytest.raises(ValueError, match=re.escape(f"{call.problem.name}: {found}")):
            _ = call.launch

    def test_refused_configs(self, call, reason):
        with pytest.raises(ValueError, match=f"^{call.problem.name}: .*{reason}"):
            _ = call.launch

    def test_tensor_memory(self, call):
        """Triton would make an empty kernel of sums of parts that exceed it."""
        with pytest.raises(ValueError, match=f"^{call.problem.name}: .* needs (784|1552) columns of tensor memory, .* 10.0 has 512"):
            _ = call.launch
        assert call.with_problem(precision="tf32").launch

    def test_long_sums_of_integers(self, problem, products):
        """Tensor cores saturate (mma's satfinite) where a sum leaves int32; sums of shorter parts are added up by XLA, and wrap."""
        configs = self.call(problem).module.candidates(problem)
        assert all(-(-products // config.splits) < 2**17 for config in configs)
        with pytest.raises(ValueError, match=f"adds up {products} products of int8, tensor cores may saturate"):
            _ = self.call.picked(problem, splits=1).launch

    def test_wrong_launches(self, call, change: Any, message):
        """The checks find a launch for other numbers than the problem's, or with another grid or depth."""
        operands = call.operands()
        with pytest.raises(AssertionError, match=message):
            launch: Any = change(call.launch) if callable(change) else call.with_problem(**change).launch
            call.judge(harness.run(launch, operands, call.shapes, call.problem.dtypes[2]), operands, exact=True)

    @pytest.mark.sampled(12)
    def test_candidates(self, problems):
        """All are different, the same every time, and can be launched."""
        for problem in problems:
            module = self.call(problem).module
            if reason := module.refuses(problem):
                assert problem.arch < 89 and "8-bit floats" in reason or "overwrites factors" in reason, reason
                continue
            configs = module.candidates(problem)
            assert configs == module.candidates(problem) and self.least <= len(configs) == len(set(configs)) <= self.most
            for config in configs:
                launch = module.launch(problem, config)
                assert launch.grid == module.grid(problem, config) and launch.splits == config.splits
                self.check_candidate(problem, config, launch)

    def check_candidate(self, problem, config, launch) -> None:
        """Check what is to hold for the candidates of this kernel."""
