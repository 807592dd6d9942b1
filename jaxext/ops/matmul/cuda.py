"""The launch of a matrix product on Hopper (csrc/matmul/matmul.h): which kernel is expected to be fastest.

`table` is the list of kernels that were compiled, which the module tells.  A tile is judged by the model of `cuda_tiles`.

Float32 is multiplied as TF32.  Its kernels want the contracted axis last in both factors, as in nt: XLA transposes other factors before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxext.backends.cuda import cuda_tiles
from jaxext.backends.cuda.cuda_binding import Cuda, compiled, config_of, fields_named, kernel_call, refusal, refused_epilogue, splits
from jaxext.backends.cuda.cuda_tiles import FEWEST_STEPS, GemmConfig
from jaxext.backends.fields import matmul_problem
from jaxext.kernels.geometry import MOST_POSITIONS
from jaxext.kernels.launch import BITS, cdiv
from jaxext.kernels.machine import LAUNCH, machine
from jaxext.kernels.matmul.problem import SLOTS, MatmulProblem
from jaxext.ops.matmul import cuda_pieces


def fields(problem: MatmulProblem) -> dict[str, int]:
    """Return the fields of jaxext::MatmulProblem."""
    return fields_named(problem, "BMNK")


def refused(problem: MatmulProblem) -> str | None:
    """Return the reason why the kernels do not take it, or None."""
    target = "linear" if problem.epilogue else f"matmul_{problem.role}"
    return refused_epilogue(problem) or _refused_precision(problem) or refusal(target, fields(problem), problem.dtypes, problem.arch)


def _refused_precision(problem: MatmulProblem) -> str | None:
    if not _float32(problem) or problem.precision == "tf32":
        return None
    if problem.epilogue is not None:
        return "with an epilogue float32 is multiplied as TF32 alone, want precision DEFAULT, HIGH or TF32_TF32_F32"
    wanted = "DEFAULT, HIGH, TF32_TF32_F32, BF16_BF16_F32_X3 or BF16_BF16_F32_X6"
    return f"float32 is multiplied as TF32 or in pieces alone, want precision {wanted}"


def candidates(problem: MatmulProblem, table: Sequence[Mapping[str, Any]]) -> list[GemmConfig]:
    """Every tile of the operands' dtype: that gives the result's, or float32 in parts that TMA can find.  With an epilogue, of those that
    fuse it, and in one part.

    The one that is expected to take the fewest clocks is first.
    """
    role = "nt" if _float32(problem) else problem.role
    kind, result = (role, problem.dtypes[0], problem.epilogue is not None), problem.dtypes[2]
    rows = [row for row in table if (row["role"], row["operands"], row["fused"]) == kind and _few_enough(problem, row)]

    def exists(row: Mapping[str, Any], parts: int) -> bool:
        if parts == 1:
            return row["result"] == result
        return not row["fused"] and row["result"] == "fp32" and _divides(problem, parts, row["tile_k"])

    configs = [config_of(GemmConfig, row, splits=parts) for row in rows for parts in splits(row) if exists(row, parts)]
    return sorted(configs, key=lambda config: clocks(problem, config))


def transposed(problem: MatmulProblem) -> dict[str, int]:
    """The factors whose matrices XLA transposes before, with their numbers of elements."""
    if not _float32(problem):
        return {}
    left, right = SLOTS[problem.role]
    sizes = {left: problem.rows * problem.depth} if problem.lhs_strides[1] != 1 else {}
    sizes |= {right: problem.depth * problem.cols} if problem.rhs_strides[0] != 1 else {}
    return {slot: problem.B * size for slot, size in sizes.items()}


def clocks(problem: MatmulProblem, config: GemmConfig) -> float:
    """Expected time of the product, in clocks, with that of what is transposed before."""
    gpu = machine(problem.arch, problem.device)
    return cuda_tiles.clocks(problem, config) + sum(gpu.moving(2 * 4 * size) + LAUNCH for size in transposed(problem).values())


def _few_enough(problem: MatmulProblem, row: Mapping[str, Any]) -> bool:
    """Return whether CUTLASS can number the tiles with 32 bits, in a grid that it rounds up to pairs of blocks and bands of eight."""
    down, across = cdiv(problem.rows, row["tile_m"]) + 15, cdiv(problem.cols, row["tile_n"]) + 15
    return down * across * problem.B * row["most_splits"] <= MOST_POSITIONS


def _divides(problem: MatmulProblem, splits: int, tile_k: int) -> bool:
    """Return whether parts are equal, begin at multiples of 16 bytes, and are long enough."""
    depth = problem.depth
    return problem.B == 1 and depth % (splits * 128 // BITS[problem.dtypes[0]]) == 0 and depth // splits >= FEWEST_STEPS * tile_k


class CudaMatmul(Cuda):
    """Products of 16 and 8 bits, and of float32 as TF32, or where a precision asks for it in pieces of bfloat16."""

    custom_calls = (
        *(f"jaxext_{kernel}_{role}_v1" for kernel in ("matmul", "pieces") for role in ("nn", "nt", "tn")),
        "jaxext_linear_v1",
        "jaxext_linear_nt_v1",
    )

    def problem(self, call):
        return matmul_problem(call, MatmulProblem, self.arch(call))

    def refuses_problem(self, problem):
        return cuda_pieces.refused(problem) if _in_pieces(problem) else refused(problem)

    def multiplied(self, problem):
        return problem.precision if _float32(problem) else "ieee"

    def family(self, problem, config):
        return "pieces" if _in_pieces(problem) else "matmul"

    def slower(self, call):
        return "XLA's matmuls (cuBLAS) are expected to be as fast"

    def configs(self, problem):
        if _in_pieces(problem):
            return cuda_pieces.candidates(problem, compiled("pieces"))
        return candidates(problem, compiled("matmul"))

    def launch(self, call, problem, config):
        if _in_pieces(problem):
            return kernel_call(call, problem, fields(problem), call.op.replace("matmul", "pieces"), config)
        if not _float32(problem):
            return kernel_call(call, problem, fields(problem), call.op, config)
        of_nt = dict(B=problem.B, M=problem.rows, N=cdiv(problem.depth, 4) * 4, K=problem.cols)
        target = "linear_nt" if problem.epilogue else "matmul_nt"
        return kernel_call(call, problem, of_nt, target, config, factors=SLOTS[problem.role][::-1], transposed=[*transposed(problem)])


def _float32(problem: MatmulProblem) -> bool:
    return problem.dtypes[:2] == ("fp32", "fp32")


def _in_pieces(problem: MatmulProblem) -> bool:
    """Return whether the kernels that split float32 into bfloat16 take the problem.  They fuse no epilogue."""
    return _float32(problem) and problem.precision in cuda_pieces.PIECES and problem.epilogue is None
