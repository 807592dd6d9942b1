"""Triton's compiler without a GPU: the PTX of a launch."""

from __future__ import annotations

import importlib.util
import os
from typing import Any
from unittest import mock

from jaxext.backends.triton.repairs import repaired

SLOTS = "abcxwy"  # of all forms, in their order
RANGES = ("begin", "end", "visits", "row")  # of ragged products: whole numbers, read one by one
SCALES = {"x_scale": "S", "w_scale": "J", "y_scale": "J"}  # of products of scaled numbers, with how many there are in a row


def missing() -> str | None:
    """Return the reason if nothing can be compiled here, or None."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install 'jaxext[triton]'"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET is 1: a process of Triton's interpreter cannot compile"
    return None


def compile_launch(launch, problem) -> Any:
    """Compile as `triton_call` does, up to PTX: pointers are aligned to 16 bytes, everything else is constant.

    Fences are added to what Triton returns, so that its cache, which does not know of them, serves no PTX without them.
    """
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget

    names = launch.kernel.arg_names
    pointers = [f"*{dtype}" for dtype in dtypes_of(problem, launch)]
    signature = dict(zip(names, pointers, strict=False))
    source = triton.compiler.ASTSource(
        launch.kernel,
        signature | dict.fromkeys(launch.constants, "constexpr"),
        constexprs={(names.index(name),): value for name, value in launch.constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in range(len(pointers))},
    )
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, "enable_fp_fusion": True}
    with mock.patch.object(knobs.runtime, "add_stages_inspection_hook", without_cubin):
        compiled = triton.compile(source, target=GPUTarget("cuda", problem.arch, 32), options=options)
    compiled.asm["ptx"] = repaired(str(compiled.asm["ptx"]))
    return compiled


def without_cubin(backend=None, stages=None, *_) -> tuple[str, str]:
    """Triton asks for a key to its cache, or to look over the stages of a compilation.

    Its assembler is left out: jaxlib runs its own, without Triton's option --regAllocOptLevel, which spills here and there.
    """
    if stages is not None:
        stages["cubin"] = lambda ptx, metadata: b""
    return "without cubin", "without cubin"


def dtypes_of(problem, launch) -> list[str]:
    """The dtypes of the kernel's pointers: of operands and results."""
    if hasattr(problem, "T"):
        return _of_causal(problem, launch)
    if not hasattr(problem, "role"):
        return [*problem.dtypes]
    factors = sorted((slot for slot in launch.operands[:2] if slot in SLOTS), key=SLOTS.index)
    of_slot = (
        dict.fromkeys(RANGES, "i32")
        | {"partial": "fp32"}
        | dict.fromkeys(SCALES, "fp32")
        | {"addend": getattr(problem, "addend", None) or ""}
        | dict(zip(factors, problem.dtypes, strict=False))
    )
    if problem.epilogue is not None:
        of_slot |= {slot: getattr(problem.epilogue, slot) for slot in ("bias", "residual", "scale")}
    partial = "i32" if problem.dtypes[2] == "i32" else "fp32"
    results = [partial if launch.splits > 1 or launch.then else problem.dtypes[2]] * launch.results
    return [*(of_slot[slot] for slot in launch.operands), *results]


def _of_causal(problem, launch) -> list[str]:
    x, w, y = problem.dtypes
    of_slot = {"x": x, "w": w, "bias": problem.epilogue.bias, "initial_states": problem.state, "d_y": y}
    of_slot |= {"seq_idx": "i32", "idx_of_states": "i32"}
    results = [y] if problem.role == "forward" else [x, w, *filter(None, (problem.epilogue.bias, problem.state))]
    partial = launch.splits > 1
    return [
        *(of_slot[slot] for slot in launch.operands),
        *("fp32" if partial and i not in launch.whole else dtype for i, dtype in enumerate(results)),
    ]
