"""The launch of the CUDA kernels of a causal convolution (csrc/causal/causal.h): the config for each problem.

They move bytes and, backward, compute nearly as long.  A thread has one vector of channels and walks along a strip of steps; `lanes` such
vectors lie side by side in a block, and strips fill the rest of its threads.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxext.backends.cuda.cuda_binding import Cuda, ffi_call, fields_named, not_compiled_for, number_of, refusal
from jaxext.backends.kernel import KernelCall
from jaxext.core.call import Call
from jaxext.kernels.causal.problem import CausalProblem
from jaxext.kernels.launch import BITS, cdiv, largest_block
from jaxext.kernels.machine import ACCESS, ACTIVATED, START, machine
from jaxext.ops.causal.problem import CausalKernels

THREADS = 128  # of a block
VECTOR_BITS = 128
TAPS = 4  # of the kernels that keep all of them in registers
MANY_VECTOR = 4  # channels of a thread of the backward kernels for other numbers of taps, and for packed sequences
LANES = (1, 2, 4, 8, 16)  # 16 vectors are 256 neighbouring bytes
STRIPS = {"forward": (8, 16, 32, 64), "backward": (16, 32, 64, 128, 256)}
ROUNDS = 2  # of blocks backward: more would only write more partial sums
MOST_SPLITS = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class CausalConfig:
    lanes: int  # vectors of channels side by side in a block, a power of two
    strip: int  # steps of a sequence that a thread walks along
    splits: int = 1  # backward: partial sums of the cotangents of w and bias


def fields(problem: CausalProblem) -> dict[str, int]:
    """Return the fields of jaxext::CausalProblem."""
    return fields_named(problem, "BTCJ")


def refused(problem: CausalProblem) -> str | None:
    """Return the reason why the kernels do not take it, or None."""
    target = "causal_conv1d" + ("_backward" if problem.role == "backward" else "")
    return refusal(target, fields(problem), (*problem.dtypes, problem.epilogue.bias), problem.arch)


def candidates(problem: CausalProblem) -> list[CausalConfig]:
    """Strips of several lengths; the rest follows.

    The lanes are the most that leave at most an eighth of the threads without channels.  Backward, strips are shared out to as many blocks
    as fill all multiprocessors twice.  The config that takes the fewest clocks is first, among equals the longest.
    """
    widths = (*LANES, 32) if vector(problem) == 1 else LANES
    lanes = largest_block(widths, max(1, cdiv(problem.C, vector(problem))), idle=1 / 8)
    configs = []
    for strip in dict.fromkeys(min(strip, max(1, problem.T)) for strip in STRIPS[problem.role]):
        config = CausalConfig(lanes=lanes, strip=strip)
        if problem.role == "backward":
            gpu = machine(problem.arch, problem.device)
            wanted = ROUNDS * resident(problem) * gpu.multiprocessors // max(1, _channel_blocks(problem, config))
            config = dataclasses.replace(config, splits=max(1, min(wanted, _tiles(problem, config), MOST_SPLITS)))
        configs.append(config)
    return sorted(configs, key=lambda config: (clocks(problem, config), -config.strip))


def exact(problem: CausalProblem) -> bool:
    """Return whether the kernels for exactly this number of taps take it, if there are vectors."""
    return problem.J == TAPS and not problem.idx


def vector(problem: CausalProblem) -> int:
    """Channels of an access, as csrc/causal/causal_plan.cc has them of arrays that are aligned."""
    widest = VECTOR_BITS // BITS[problem.dtypes[0]]
    if problem.C % widest:
        return 1
    return widest if problem.role == "forward" or exact(problem) else MANY_VECTOR


def resident(problem: CausalProblem) -> int:
    """Blocks on a multiprocessor, which their registers allow."""
    if problem.role == "backward":
        return 2 if problem.J > TAPS else 3
    return 4 if exact(problem) else 3


def clocks(problem: CausalProblem, config: CausalConfig) -> float:
    """Expected time, in clocks: the larger of two times of a multiprocessor, to move its vectors to and from the L2 cache and to compute.

    While a block loads its taps, the others on its multiprocessor work.  Partial sums are written and read again.
    """
    gpu, taps, strip, channels = machine(problem.arch, problem.device), problem.J, config.strip, vector(problem)
    halo, activated = taps - 1, ACTIVATED if problem.epilogue.activation else 1
    if problem.role == "backward":
        moved = 3 * strip + 3 * halo
        computed = 2 * taps * strip + (strip + halo) * ((taps + activated) if problem.reads_z else 1)
        times = cdiv(_tiles(problem, config), config.splits)
    else:
        moved, computed, times = 2 * strip + halo, strip * (taps + activated), 1
    computed += ACCESS * moved / channels
    elements, blocks = THREADS * channels, resident(problem)
    of_block = START / blocks**2 + times * elements * max(moved * BITS[problem.dtypes[0]] / 8 / gpu.l2, computed / gpu.fma)
    return gpu.rounds(grid(problem, config), blocks) * blocks * of_block + gpu.moving(2 * partial_bytes(problem, config))


def partial_bytes(problem: CausalProblem, config: CausalConfig) -> int:
    rows = problem.J + (problem.epilogue.bias is not None)
    return 4 * config.splits * rows * problem.C if problem.role == "backward" else 0


def grid(problem: CausalProblem, config: CausalConfig) -> int:
    """Blocks, as csrc/causal/causal_plan.cc counts them."""
    return _channel_blocks(problem, config) * (config.splits if problem.role == "backward" else _tiles(problem, config))


def _channel_blocks(problem: CausalProblem, config: CausalConfig) -> int:
    return cdiv(problem.C, config.lanes * vector(problem))


def _tiles(problem: CausalProblem, config: CausalConfig) -> int:
    """Return the number of tiles, each of as many strips as a block has rows of threads for."""
    return cdiv(problem.B * cdiv(max(1, problem.T), config.strip), THREADS // config.lanes)


_CAUSAL_ADDED = ("bias", "initial_states", "seq_idx", "idx_of_states")  # beside x and w


class CudaCausal(CausalKernels, Cuda):
    custom_calls = ("jaxext_causal_conv1d_v1", "jaxext_causal_conv1d_backward_v1")
    kernel_family = "causal"

    def refuses_problem(self, problem):
        return refused(problem) or not_compiled_for(problem.arch)

    def yields(self, call):
        return True

    def configs(self, problem):
        return candidates(problem)

    def launch(self, call, problem, config):
        added = [name for name in _CAUSAL_ADDED if name in call.dtypes]
        backward = problem.role == "backward"
        attributes = fields(problem) | dataclasses.asdict(config) | {name: int(name in added) for name in _CAUSAL_ADDED}
        attributes["activation"] = number_of(problem.epilogue.activation)
        return KernelCall(
            describe="causal",
            slots=("x", "w", *added, *(["d_y"] if backward else [])),
            splits=1,
            call=functools.partial(_causal_backward if backward else _causal_forward, call, attributes),
        )


def _causal_forward(call: Call, attributes: Mapping[str, Any], result, *operands) -> Any:
    return _called_causal("jaxext_causal_conv1d_v1", attributes, [result], operands)[0]


def _causal_backward(call: Call, attributes: Mapping[str, Any], _, *operands) -> Any:
    """All cotangents.  Those of w and bias are partial sums, the bias's the last row of each, which are added here in their order."""
    x, w = operands[:2]
    taps = attributes["J"]
    sums = jax.ShapeDtypeStruct((attributes["splits"], taps + attributes["bias"], attributes["C"]), jnp.float32)
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype), sums]
    if attributes["initial_states"]:
        results.append(jax.ShapeDtypeStruct(operands[2 + attributes["bias"]].shape, x.dtype))
    d_x, sums, *d_state = _called_causal("jaxext_causal_conv1d_backward_v1", attributes, results, operands)
    total = jnp.sum(sums, axis=0)
    arrays = {"d_x": d_x, "d_w": total[:taps], "d_bias": total[taps:].reshape(-1), "d_initial_states": next(iter(d_state), None)}
    made = {name: arrays[name].astype(dtype) for name, dtype in call.results.items()}
    return tuple(made.values()) if call.further else made[call.open]


def _called_causal(target: str, attributes: Mapping[str, Any], results: Sequence[Any], operands: Sequence[jax.Array]) -> Any:
    """The call of a handler.  The state is rounded to the dtype of x, as the definition has it."""
    given = list(operands)
    if attributes["initial_states"]:
        at = 2 + attributes["bias"]
        given[at] = given[at].astype(given[0].dtype)
    return ffi_call(target, results, given, attributes)
