"""Rows times numbers: the kernel's problems, its configurations, and the launch."""

import dataclasses

from ..checks import check
from ..launch import MOST_PROGRAMS, Launch, cdiv, plain_launch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    name: str  # of the primitive
    B: int
    M: int
    N: int
    dtypes: tuple[str, ...]  # of x, scale and y
    arch: int
    device: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    block: int  # neighbours along N that a program computes, a power of two
    num_warps: int = 4
    splits: int = 1


def refuses(problem: Problem) -> str | None:
    """Return the reason if no config fits the problem, or None."""
    if problem.dtypes not in (("fp32", "fp32", "fp32"), ("bf16", "fp32", "bf16")):
        dtypes = ", ".join(problem.dtypes)
        return f"the dtypes are {dtypes}, want fp32 or bf16 for x and y, fp32 for scale"
    return (
        None
        if candidates(problem)
        else f"{problem.B * problem.M} rows are more than a grid has programs"
    )


def candidates(problem: Problem) -> list[Config]:
    """The blocks that fit a grid: the fewest idle lanes first, and of two the larger."""
    configs = [Config(block=block) for block in (1024, 512, 256, 128)]
    return sorted(
        (c for c in configs if programs(problem, c) <= MOST_PROGRAMS),
        key=lambda c: programs(problem, c) * c.block,
    )


def programs(problem: Problem, config: Config) -> int:
    return problem.B * problem.M * cdiv(problem.N, config.block)


def launch(problem: Problem, config: Config) -> Launch:
    """Return the launch; raises ValueError if the kernel does not support the problem."""
    from . import kernel

    check(problem, [refuses(problem)])
    return plain_launch(
        problem, config, kernel.rowscale, ("x", "scale"), (programs(problem, config),)
    )
