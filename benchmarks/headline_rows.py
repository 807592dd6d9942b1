"""The headline rows: the few that say most about the kernels, for a GPU that is there for minutes only, and their order."""

from __future__ import annotations

from collections.abc import Sequence

from jaxext.bench import problems
from jaxext.bench.case import Case
from jaxext.bench.own import Causal

PASSES = (("triton", "cuda"), ("lax",))
QUICK = 2e6  # operations of a problem in a trial of the harness
# Operations that slide a window.  On a GPU, XLA chooses an algorithm for minutes, and cuDNN has none in float64.
WINDOWS = ("conv_general_dilated", Causal.operation)


def _cases(problem: str, roles: str, numbers: str = "bfloat16") -> list[str]:
    return [f"{problem} {role} {numbers}" for role in roles.split()]


# Names of cases of the suite, the most important first.
HEADLINE: tuple[str, ...] = (
    *_cases("4096 cubed, 4096x4096x4096", "nn nt tn"),
    *_cases("resnet50 3x3, 64x56x56x64", "fprop dgrad wgrad"),
    *_cases("mamba k=4, 8x2048x5376", "fprop dgrad wgrad"),
    *_cases("causal k=4 silu, 8x2048x5376", "forward backward"),
    *_cases("convnext 7x7, 64x56x56x96", "fprop dgrad wgrad"),
    *_cases("deepseek experts up, 8 groups, 32768x7168x4096", "nn tn"),
    *_cases("gpt-oss experts up, 32 groups, 16384x2880x5760", "nn"),
    *_cases("deepseek experts up quantised, 8 groups, 32768x7168x4096", "forward", "fp8"),
    *_cases("mixtral experts up quantised, 8 groups, 16x4096x14336", "forward", "int8 weights"),
    *_cases("moe silu, 4 of 64 experts, 4096x2048x1024", "forward"),
    *_cases("moe silu, decoding, 4 of 64 experts, 16x2048x1024", "forward"),
    *_cases("linear gelu, 8192x4096x14336", "forward"),
    *_cases("gated silu, 8192x4096x14336", "forward"),
    *_cases("8192 cubed, 8192x8192x8192", "nn"),
    *_cases("short, 8192x256x8192", "nn"),
    *_cases("llama 70B attention out, 16x8192x8192", "nn"),
    *_cases("llama 70B attention out, 1x8192x8192", "nn"),
    *_cases("llama 8B up quantised, 16x4096x14336", "forward", "int8 weights"),
    *_cases("llama 8B up quantised by 128, 16x4096x14336", "forward", "int4 weights"),
    *_cases("8192 cubed, 8192x8192x8192", "nt", "fp8"),
    *_cases("gram, 4096x4096", "forward"),
    *_cases("4096 cubed by other means, 4096x4096x4096", "nn", "float32"),
    *_cases("4096 cubed in parts, 4096x4096x4096", "nn", "bf16x3"),
    *_cases("4096 cubed by other means, 4096x4096x4096", "nn", "bf16x6"),
    *_cases("linear gelu fp32, 8192x4096x14336", "forward", "float32"),
    *_cases("mobilenet 3x3, 64x56x56x144", "fprop wgrad"),
    *_cases("resnet50 3x3, 64x14x14x256", "fprop dgrad wgrad"),
    *_cases("unet 3x3, 1x64x64x320", "fprop"),
    *_cases("unet transposed 4x4 by 2, 16x32x32x256", "fprop wgrad"),
    *_cases("vae 3x3x3, 1x9x60x104x128", "fprop wgrad"),
    *_cases("whisper k=3, 16x1500x768", "fprop wgrad"),
    *_cases("resnext 32 of 4 by 2, 64x56x56x128", "dgrad"),
    *_cases("ensemble 3x3, 16 x 8x28x28x128", "fprop"),
    *_cases("mixtral experts up, decoding, 8 groups, 16x4096x14336", "nn"),
)
# Rows on which lax's autotuning is known to take minutes: windows of 28x28 and 32x32 in groups, and of 8,192 taps.
PATHOLOGICAL: tuple[str, ...] = (
    *_cases("ensemble 3x3, 16 x 8x28x28x128", "wgrad"),
    *_cases("wrn 3x3, 256 x 1x32x32x64", "wgrad"),
    *_cases("wavenet k=5 dilated by 4, 8x8192x256", "fprop wgrad"),
)


def cases(is_trial: bool) -> list[Case]:
    """The headline rows in order, or tiny problems of their kinds."""
    found = {case.name: (problem, case) for problem in problems.PROBLEMS for case in problem.cases()}
    chosen = [found[name] for name in (*HEADLINE, *PATHOLOGICAL)]
    if not is_trial:
        return [case for _, case in chosen]
    return [problems.reduced(problem, QUICK).case(case.role, case.numbers) for problem, case in chosen]


def steps(chosen: Sequence[Case]) -> list[tuple[int, str]]:
    """Return pairs of a case's index and a library in order of computation: all cases by ours, then by lax, which gets cheap rows first."""
    ours, theirs = PASSES
    cheap = sorted(range(len(chosen)), key=lambda at: (at >= len(HEADLINE), _dear(chosen[at])))
    return [(at, library) for at in range(len(chosen)) for library in ours] + [(at, library) for at in cheap for library in theirs]


def _dear(case: Case) -> int:
    """The order in which lax chooses an algorithm quickly: products are cheap, gradients in filters are dear."""
    return 0 if case.operation not in WINDOWS else 2 if case.role in ("wgrad", "backward") else 1
