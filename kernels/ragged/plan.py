"""The tiles of ragged products: those of matrix products, with a program for each visit or, in tn, for each group."""

import dataclasses
from collections.abc import Iterator

from ..checks import check, lacking, wrong_field
from ..launch import BITS, MOST_PROGRAMS, Launch, cdiv, plain_launch
from ..machine import LAUNCH, machine
from ..matmul import plan as matmul
from .problem import SLOTS, Problem, RaggedProblem, most_visits

LISTING = 3 * LAUNCH  # clocks of the kernels of XLA that list the visits
FINDING = 500  # clocks in which a program finds its own: a scan and three sums over the groups
MOST_FOUND = 2048  # groups among which a program finds its visit: it holds all ranges in registers, and more would spill
LARGEST = 4  # one of so many parts of all rows is thought to be those of the largest group, if there are as many groups
MOST_CHUNKED = 4  # candidates in chunks
ADDED = 512  # elements of a result that a program adds up, by 4 warps: 16 bytes of each partial sum for a thread


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(matmul.Config):
    """A tile of a matrix product; `finds_visit` says that each program of nn or nt finds its visit, which else is listed before.

    `chunk`: the rows of a visit of tn, if its programs compute those; 0, if each goes through all rows of a group.
    """

    finds_visit: bool = False
    chunk: int = 0


def refuses(problem: Problem) -> str | None:
    """Return the reason if no config fits the problem, or None."""
    if problem.integers:
        return "integers, want floats"
    if problem.gathered and problem.role == "nt":
        return "the rows of x are the result, and are not gathered"
    if problem.gathered and (reason := many_groups(problem)):
        return reason
    if reason := matmul.refuses(problem):
        return reason
    if not candidates(problem):
        return f"{problem.batches} results of {problem.rows} by {problem.cols} have more tiles than a grid has programs, {MOST_PROGRAMS}"
    return None


def candidates(problem: Problem) -> list[Config]:
    """The tiles of matrix products, without splits, the one that is expected to be fastest first."""
    tiles = {dataclasses.replace(config, splits=1) for config in matmul.candidates(problem)}
    if problem.arch < 90 and (problem.role == "nt" or problem.epilogue):
        # Beside 128 sums, a thread has no registers for what tells rows of a group from others.
        tiles = {config for config in tiles if config.tile_m * config.tile_n < 128 * 32 * config.num_warps}
    configs = [Config(**dataclasses.asdict(config), finds_visit=found) for config in tiles for found in _finds_visit(problem)]
    configs += _chunked(problem, configs)
    fit = [config for config in configs if grid(problem, config)[0] <= MOST_PROGRAMS]
    return sorted(fit, key=lambda config: order(problem, config))


def order(problem: RaggedProblem, config: matmul.Config) -> tuple:
    """The key of a config in sorting, least for the one that is expected to be fastest: clocks, by a rough model.

    Where reading the matrices takes longer than all else, as for few rows of each group, many take as long: then the rows of a tile.
    """
    return clocks(problem, config), config.tile_m, -config.tile_n, dataclasses.astuple(config)


def _finds_visit(problem: Problem) -> tuple[bool, ...]:
    """The values that `Config.finds_visit` may have."""
    return (False,) if problem.role == "tn" or many_groups(problem) else (True,) if problem.gathered else (False, True)


def many_groups(problem: RaggedProblem) -> str | None:
    """Return the reason why no program finds its visit among the groups, or None."""
    return f"{problem.G} groups, want at most {MOST_FOUND}, among which each program finds its own" if problem.G > MOST_FOUND else None


def _chunked(problem: Problem, configs: list[Config]) -> list[Config]:
    """The configs in chunks that the model takes for faster than all others.  Programs fill the multiprocessors, about once or twice."""
    if problem.role != "tn" or not problem.batches or not configs or many_groups(problem):
        return []
    fastest, multiprocessors = min(clocks(problem, config) for config in configs), machine(problem.arch, problem.device).multiprocessors
    chunked = []
    for config in configs:
        tiles = problem.B * problem.P * problem.tiles_down(config.tile_m) * cdiv(problem.cols, config.tile_n)
        filling = 1 << max(1, problem.M * tiles // multiprocessors).bit_length() - 1
        least = max(filling, matmul.LEAST_STEPS * config.tile_k)
        chunked += [dataclasses.replace(config, chunk=chunk) for chunk in (least, 2 * least)]
    faster = [config for config in chunked if clocks(problem, config) < fastest]
    return sorted(faster, key=lambda config: clocks(problem, config))[:MOST_CHUNKED]


def clocks(problem: RaggedProblem, config: matmul.Config) -> float:
    """The time of one multiprocessor's programs if half of the groups end within a tile of rows, or that of reading the matrices.

    In tn, of all groups if they are alike, or of a larger one alone.
    """
    gpu = machine(problem.arch, problem.device)
    programs = problem.batches * problem.expected_tiles_down(config.tile_m) * cdiv(problem.cols, config.tile_n)
    if chunk := getattr(config, "chunk", 0):
        visits = problem.B * problem.P * (cdiv(problem.M, chunk) + min(problem.G, problem.M) // 2)
        programs = visits * problem.tiles_down(config.tile_m) * cdiv(problem.cols, config.tile_n)
        computed = matmul.clocks_of_programs(problem, config, programs, problem.R * chunk // config.tile_k)
        return computed + FINDING * gpu.rounds(programs) + gpu.adding(4 * visits * problem.K * problem.N)
    computed = matmul.clocks_of_programs(problem, config, programs, cdiv(problem.expected_depth, config.tile_k))
    if problem.role == "tn":
        steps = problem.P * problem.R * (problem.M // LARGEST // config.tile_k)
        alone = matmul.clocks_of_programs(problem, config, programs // max(1, problem.G), steps)
        return max(computed, alone)
    matrices = problem.B * min(problem.G, problem.P * problem.M) * problem.depth * problem.cols
    read = gpu.moving(matrices * BITS[problem.operand_dtypes[1]] / 8)
    if getattr(config, "finds_visit", True):
        return max(computed + FINDING * gpu.rounds(programs), read)
    return max(computed, read) + LISTING


def grid(problem: Problem, config: Config) -> tuple[int]:
    chunk = getattr(config, "chunk", 0)
    batches = problem.B * problem.P * most_visits(problem.M, problem.G, chunk) if chunk else problem.batches
    return (batches * problem.tiles_down(config.tile_m) * cdiv(problem.cols, config.tile_n),)


def launch(problem: Problem, config: Config) -> Launch:
    """Return the launch; raises ValueError if the device or the kernel does not support the config."""
    from . import kernel

    check(problem, _refusals(problem, config))
    first, second = SLOTS[problem.role]
    tiles = problem.tiles_down(config.tile_m), cdiv(problem.cols, config.tile_n), cdiv(problem.depth, config.tile_k)
    epilogue, row = problem.epilogue, "row" if problem.gathered else first  # an operand that is absent is the first one again
    bias, scale = "bias" if epilogue and epilogue.bias else first, "scale" if epilogue and epilogue.scale else first
    absent = {} if epilogue and epilogue.saves else {"saved_ptr": None}
    if config.chunk:
        return _in_chunks(problem, config, (first, second, "begin", "end", row), tiles[:2])
    if problem.role == "tn":
        jitted, operands = (
            (kernel.ragged_sum_gathered, (first, second, "begin", "end", row))
            if problem.gathered
            else (kernel.ragged_sum, (first, second, "begin", "end"))
        )
        absent = {}
    elif config.finds_visit:
        jitted, operands = kernel.ragged_rows_found, (first, second, bias, scale, "begin", "end", row)
    elif epilogue:
        jitted, operands = kernel.ragged_rows_fused, (first, second, bias, scale, "visits")
    else:
        jitted, operands, absent = kernel.ragged_rows, (first, second, "visits"), {}
    plain = plain_launch(problem, config, jitted, operands, grid(problem, config), TILES=tiles, **absent)
    return dataclasses.replace(plain, results=2) if epilogue and epilogue.saves else plain


def _in_chunks(problem: Problem, config: Config, operands: tuple[str, ...], tiles: tuple[int, int]) -> Launch:
    """The launch that computes the partial sums of all visits, and the one that adds them up."""
    from . import kernel

    visits = most_visits(problem.M, problem.G, config.chunk)
    plain = plain_launch(problem, config, kernel.ragged_chunks, operands, grid(problem, config), TILES=(*tiles, visits))
    sums = plain_launch(
        problem, config, kernel.ragged_chunks_sum, ("partial", "begin", "end"), (_blocks(problem),), VISITS=visits, BLOCK=ADDED
    )
    shape = (problem.B, problem.P, visits, problem.K, problem.N)
    return dataclasses.replace(plain, partial=shape, then=dataclasses.replace(sums, num_warps=4))


def _blocks(problem: Problem) -> int:
    """The programs that add up partial sums."""
    return problem.batches * cdiv(problem.K * problem.N, ADDED)


def _refusals(problem: Problem, config: Config) -> Iterator[str | None]:
    yield refuses(problem)
    yield matmul.wrong_tile(problem, config)
    if config.splits != 1:
        yield f"splits is {config.splits}, want 1"
    if config.finds_visit not in (wanted := _finds_visit(problem)):
        yield f"finds_visit is {config.finds_visit}, want {wanted[0]}"
    if config.chunk and problem.role != "tn":
        yield f"chunk is {config.chunk}, want 0"
    if config.chunk:
        yield wrong_field(config, {"chunk": config.tile_k}, ())
        yield lacking(config, problem.arch, _blocks(problem))
    yield matmul.lacking_device(problem, config, grid(problem, config)[0])
