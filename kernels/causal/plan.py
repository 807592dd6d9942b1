"""The tiles of causal convolutions: which problems a kernel takes, the configs worth trying, a model of their time, and the launch."""

import dataclasses
from collections.abc import Iterator

from ..checks import check, lacking, refused_device, wrong_field
from ..epilogue import ACTIVATIONS, FLOATS
from ..launch import BITS, Launch, cdiv, largest_block, plain_launch
from ..machine import ACCESS, ACTIVATED, machine
from .problem import CausalProblem

Problem = CausalProblem

MOST_TAPS = {"forward": 31, "backward": 8}  # of more, the derivative does not fit the registers, and takes minutes to compile
VECTOR_BITS = (128, 64, 32)  # of a thread's channels
STRIPS = (16, 8, 4, 2)
NUM_WARPS = 4
REGISTERS = 168  # of a thread, by the count of `registers`: three programs then fit a multiprocessor
ADDRESSES = 16  # registers of a thread
PROGRAMS = 6  # of a multiprocessor that share the derivative's strips, two waves of three: more would only write more partial sums
IDLE = 1 / 8  # the most of the lanes
MOST_STEPS = 2**31 - 2**20  # kernels number them with 32 bits, and their tiles overhang
ROW = 128  # bytes of a row of a tile, at most: a line of the cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    tile_c: int  # channels of a tile, a power of two
    strips: int  # strips of a tile, a power of two
    strip: int  # steps of a strip
    splits: int = 1  # of the derivative: programs that share the strips
    num_warps: int


def refuses(problem: Problem) -> str | None:
    """Return the reason if no config fits the problem, or None."""
    if problem.J > (most := MOST_TAPS[problem.role]):
        return f"{problem.J} taps, its {problem.role} takes {most} at most"
    dtypes = (*problem.dtypes, problem.epilogue.bias, problem.state)
    for name, dtype in zip(("x", "w", "y", "bias", "state"), dtypes, strict=True):
        if dtype is not None and dtype not in FLOATS:
            return f"{name} is {dtype}, it takes {', '.join(FLOATS)}"
    if problem.epilogue.activation not in (None, *ACTIVATIONS):
        return f"activation {problem.epilogue.activation!r}, want one of {', '.join(ACTIVATIONS)}"
    if problem.B * (problem.T + 2 * problem.J) >= MOST_STEPS:
        return f"{problem.B} sequences of {problem.T} steps, it numbers fewer than 2^31 steps"
    return refused_device(problem.arch)


def candidates(problem: Problem) -> list[Config]:
    """Vectors and strips of several widths that fit the registers: the one with the fewest clocks first, among equals the widest.

    If none fits, as with many taps, the narrowest.  At most PROGRAMS per multiprocessor share the strips of the derivative.
    """
    configs = []
    widest = max(BITS[dtype] for dtype in problem.dtypes)
    for bits in VECTOR_BITS:
        vector = max(1, bits // widest)
        blocks = [vector << i for i in range(6) if (vector << i) * widest <= 8 * ROW]
        block = largest_block(blocks, max(1, problem.C), IDLE)
        rows = 32 * NUM_WARPS * vector // block
        for strip in STRIPS:
            config = Config(tile_c=block, strips=rows, strip=strip, num_warps=NUM_WARPS)
            if problem.role == "backward":
                wanted = PROGRAMS * machine(problem.arch, problem.device).multiprocessors // max(1, cdiv(problem.C, block))
                config = dataclasses.replace(config, splits=max(1, min(wanted, cdiv(strips(problem, config), rows))))
            if config not in configs:
                configs.append(config)
    few = [config for config in configs if registers(problem, config) <= REGISTERS] or [min(configs, key=lambda c: registers(problem, c))]
    return sorted(few, key=lambda config: (clocks(problem, config), -config.tile_c, -config.strip))


def strips(problem: Problem, config: Config) -> int:
    return problem.B * cdiv(problem.T, config.strip)


def registers(problem: Problem, config: Config) -> int:
    """The approximate number of registers of a thread.

    Taps, sums and cotangents are in float32, inputs in their own dtype; then come masks of the steps of one sequence, and addresses.  The
    derivative needs a third more, for values in flight.
    """
    vector = cdiv(config.strips * config.tile_c, 32 * config.num_warps)
    backward = problem.role == "backward"
    inputs = config.strip + problem.earlier + (problem.later if problem.reads_z else 0)
    sums = problem.J + 1 + config.strip + problem.later if backward else config.strip
    pairs = (inputs + problem.J * (config.strip + problem.later)) if problem.idx else 0
    needed = vector * (problem.J + sums) + cdiv(vector * BITS[problem.dtypes[0]], 32) * inputs + pairs + ADDRESSES
    return needed * 4 // 3 if backward else needed


def clocks(problem: Problem, config: Config) -> float:
    """The larger of two times of a multiprocessor: to move its vectors to and from the L2 cache, and to compute."""
    gpu, taps, strip = machine(problem.arch, problem.device), problem.J, config.strip
    if problem.role == "backward":
        moved = 3 * strip + 3 * (taps - 1)
        computed = 2 * taps * strip + (strip + taps - 1) * ((taps + ACTIVATED) if problem.reads_z else 1)
        programs, times = grid(problem, config)[0], cdiv(strips(problem, config), config.strips * config.splits)
    else:
        moved = 2 * strip + taps - 1
        computed = strip * (taps + (ACTIVATED if problem.epilogue.activation else 1))
        programs, times = grid(problem, config)[0], 1
    elements = config.strips * config.tile_c
    computed += ACCESS * moved * 32 * config.num_warps / elements
    bits = max(BITS[dtype] for dtype in problem.dtypes)
    return gpu.rounds(programs) * times * elements * max(moved * bits / 8 / gpu.l2, computed / gpu.fma)


def grid(problem: Problem, config: Config) -> tuple[int]:
    blocks = cdiv(problem.C, config.tile_c)
    return (blocks * (config.splits if problem.role == "backward" else cdiv(strips(problem, config), config.strips)),)


def launch(problem: Problem, config: Config) -> Launch:
    """Return the launch; raises ValueError if the device or the kernel does not support the config."""
    from . import kernel

    check(problem, _refusals(problem, config))
    # An absent operand is x again, through which nothing is read.
    given = {
        "bias": problem.epilogue.bias is not None,
        "initial_states": problem.state is not None,
        "seq_idx": problem.idx,
        "idx_of_states": problem.idx_of_states,
    }
    operands = ("x", "w", *(name if there else "x" for name, there in given.items()))
    backward = problem.role == "backward"
    further = given["bias"] + given["initial_states"]
    absent = {name: None for name in ("third_ptr", "fourth_ptr")[further:] if backward}
    jitted = kernel.causal_backward if backward else kernel.causal_forward
    plain = plain_launch(problem, config, jitted, (*operands, "d_y") if backward else operands, grid(problem, config), **absent)
    return dataclasses.replace(plain, results=2 + further if backward else 1, whole=(0, 2 + given["bias"]))


def _refusals(problem: Problem, config: Config) -> Iterator[str | None]:
    yield refuses(problem)
    yield wrong_field(config, {"tile_c": 1, "strips": 1}, ("strip", "splits"))
    if problem.role == "forward" and config.splits != 1:
        yield f"splits is {config.splits}, want 1 for the role forward"
    yield lacking(config, problem.arch, grid(problem, config)[0])
