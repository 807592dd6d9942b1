"""The check of one case on the device of this process: small integers, then normal numbers, against float64 on the CPU.

Results lie in memory that was filled with large numbers before.  The case runs once for integers and `REPEATS` times for normal numbers,
each time with the same bits, then inside a CUDA graph, with other arrays too.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxext.tuning import random_operands, timing, truth
from jaxext.verify import laws
from jaxext.verify.cases import Case

REPEATS = 20
REPLAYS = 3  # of a CUDA graph: it runs as it is, is recorded, and then replayed
# XLA records every call in command buffers, however few there are.
RECORDED: Any = {"xla_gpu_enable_command_buffer": "FUSION,CUSTOM_CALL", "xla_gpu_graph_min_graph_size": 1}


@dataclasses.dataclass(eq=False)
class Wrong(Exception):
    check: str  # integers, numbers, bits or graph
    reason: str
    norm: float | None = None
    worst: float | None = None


class Unchecked(Exception):
    """The truth cannot be computed here, which says nothing of the kernel."""


@dataclasses.dataclass(frozen=True)
class Right:
    """The errors of normal numbers, relative to the norm and to the largest element; and how many kernels a CUDA graph held."""

    norm: float
    worst: float
    graph: str


def check(case: Case, launched: Callable[[], object] = lambda: None) -> Right:
    """Run the case, and raise `Wrong` if a result is not right.  `launched` is called between compiling and the first launch.

    Raises:
      NotImplementedError: the implementation refuses.
      Unchecked: there is no truth.
      Exception: what compiling or running raises.
    """
    call, exact = case.call, is_exact(case)
    try:
        normal, integers = random_operands.of(call), random_operands.of(call, integers=True)
        right, magnitudes, integer_results = _truths(case, normal, [_size(x) for x in normal], integers)
    except Exception as error:
        raise Unchecked(f"no truth: {type(error).__name__}: {error}") from error
    lowered = jax.jit(truth.alone(case.plan, case.config)).lower(*normal)
    on_gpu = jax.default_backend() == "gpu"
    program = lowered.compile(timing.UNCAPTURED if on_gpu else None)
    launched()
    if exact:
        _compare("integers", _run(case, program, integers), [laws.exact] * len(integer_results), integer_results)
    near = [functools.partial(laws.near, magnitudes=size, **allowance(case)) for size in magnitudes]
    got = _run(case, program, normal)
    norm, worst = _compare("numbers", got, near, right)
    for number in range(1, REPEATS):
        _same("bits", f"run {number + 1} of {REPEATS}", _run(case, program, normal), got)
    if not on_gpu:
        return Right(norm, worst, "no GPU")
    with tempfile.TemporaryDirectory(prefix="jaxext-verify-") as folder:
        recorded = lowered.compile({**RECORDED, "xla_dump_to": folder})
        number, reason = held(pathlib.Path(folder))
    for number in range(REPLAYS):
        _same("graph", f"run {number + 1}", _run(case, recorded, normal), got)
    if exact:
        _compare("graph", _run(case, recorded, integers), [laws.exact] * len(integer_results), integer_results)
    return Right(norm, worst, reason or f"held {number}")


def held(folder: pathlib.Path) -> tuple[int, str | None]:
    """The number of custom calls in the command buffers of a program, which XLA dumped there, and the reason if they do not hold all.

    Which calls they hold is decided after the HLO, so the last step is read: a line for each, those of a command buffer indented below it.
    """
    dumped = [path.read_text() for path in folder.glob("*thunk_sequence_after_thunk_passes*")]
    lines = [line for text in dumped for line in text.splitlines() if "kCustomCall" in line]
    inside = [line for line in lines if line.startswith(" ")]
    if not any("kCommandBuffer" in text for text in dumped):
        return 0, "XLA made no command buffer"
    return len(inside), None if len(inside) == len(lines) else f"outside of it are {len(lines) - len(inside)} of {len(lines)} kernels"


def is_exact(case: Case) -> bool:
    """Return whether the results for small integers are the truth rounded once: sums of their products, which float32 holds."""
    problem = getattr(case.plan, "problem", None)
    epilogue = getattr(problem, "epilogue", None)
    plain = epilogue is None or epilogue.activation in (None, "relu") and not epilogue.gated
    return plain and all(float(getattr(problem, name, 0)).is_integer() for name in ("scale", "of_addend"))


def allowance(case: Case) -> dict[str, float]:
    """The largest error that is allowed for normal numbers, as arguments of `laws.near`."""
    problem: Any = getattr(case.plan, "problem", None)
    if problem is None:
        return {"stray": laws.SUMS}
    multiplied = case.plan.implementation.multiplied(problem)  # type: ignore[attr-defined]
    factors = problem.dtypes[:2]
    split_stray = laws.STRAY.get(multiplied, laws.SUMS) if "fp32" in factors else laws.SUMS
    eight_bits = all(name.startswith("fp8") for name in factors)
    stray = laws.IN_REGISTERS if multiplied == "bf16" else laws.EIGHT_BITS if eight_bits else split_stray
    epilogue = getattr(problem, "epilogue", None)
    if epilogue is None or epilogue.activation is None:
        return {"stray": stray}
    return {"stray": 4 * stray, "roundings": 2, "largest": laws.FUSED}


def _truths(case: Case, *sets: Sequence[jax.Array]) -> Iterator[list[np.ndarray]]:
    """The results for each set of operands in float64, on the CPU."""
    cpu = jax.devices("cpu")[0]
    call = dataclasses.replace(case.call, platform="cpu", arch=None)
    with jax.default_device(cpu), jax.enable_x64(True):
        placed = [[jax.device_put(x, cpu) for x in operands] for operands in sets]
        for results in truth.of(call, case.definition, *placed):
            yield [np.asarray(y) for y in results]


def _size(x: jax.Array) -> jax.Array:
    """The magnitudes, which jnp does not take of int4."""
    return jnp.abs(x.astype(jnp.int8)).astype(x.dtype) if x.dtype == jnp.int4 else jnp.abs(x)


def _run(case: Case, program: Callable[..., Any], operands: Sequence[jax.Array]) -> list[np.ndarray]:
    call = case.call
    random_operands.poison([jax.ShapeDtypeStruct(call.shape_of(name), dtype) for name, dtype in call.results.items()])
    return [np.asarray(y) for y in jax.tree.leaves(jax.block_until_ready(program(*operands)))]


def _compare(name: str, got: Sequence[np.ndarray], compare: Sequence[Callable[..., str | None]], right: Sequence[np.ndarray]):
    """The largest errors; `Wrong` if a result is none of these."""
    norm, worst = (max(of) for of in zip(*map(laws.errors, got, right), strict=True))
    for i, (law, y, of) in enumerate(zip(compare, got, right, strict=True)):
        if reason := law(y, of):
            raise Wrong(name, f"result {i}: {reason}" if len(got) > 1 else reason, norm, worst)
    return norm, worst


def _same(name: str, when: str, got: Sequence[np.ndarray], first: Sequence[np.ndarray]) -> None:
    for y, before in zip(got, first, strict=True):
        if y.tobytes() != before.tobytes():
            differs = np.frombuffer(y.tobytes(), np.uint8) != np.frombuffer(before.tobytes(), np.uint8)
            at = np.unravel_index(int(differs.argmax()) // y.itemsize, y.shape)
            raise Wrong(name, f"{when} differs in bits from the first, at {tuple(map(int, at))}: got {y[at]}, before {before[at]}")
