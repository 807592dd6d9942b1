"""The problem that matmul kernels solve, one role of a product:  result[row, col] = Σ_depth left[row, depth] right[depth, col].

role  result    left     right    row  column  contracted
nn    c[M,N]    a[M,K]   b[K,N]   m    n       k
nt    a[M,K]    c[M,N]   bᵀ[N,K]  m    k       n
tn    b[K,N]    aᵀ[K,M]  c[M,N]   k    n       m
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from ..epilogue import Epilogue

SLOTS = {"nn": ("a", "b"), "nt": ("c", "b"), "tn": ("a", "c")}  # left, right


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulProblem:
    """A role of a[B,M,K] b[B,K,N] = c[B,M,N] on one device."""

    name: str  # of the primitive, such as "matmul_nn"
    role: str  # nn, nt or tn
    B: int
    M: int
    N: int
    K: int
    dtypes: tuple[str, str, str]  # of the operands in the order of slots (a, b, c without the open one), and of the result
    precision: str  # of float32 products: tf32, tf32x3, bf16x3, bf16x6 or ieee
    arch: int  # compute capability times 10, such as 90
    device: str = dataclasses.field(default="", repr=False)  # its name, such as "NVIDIA H200", if it is known
    epilogue: Epilogue | None = None  # of the role nn
    ragged: ClassVar[bool] = False

    @property
    def gated(self) -> bool:
        return self.epilogue is not None and self.epilogue.gated

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Slot -> shape."""
        columns = (2, self.N) if self.gated else (self.N,)
        return {"a": (self.B, self.M, self.K), "b": (self.B, self.K, *columns), "c": (self.B, self.M, self.N)}

    @property
    def rows(self) -> int:
        return self.K if self.role == "tn" else self.M

    @property
    def cols(self) -> int:
        """Columns of the product; a gated result has half as many."""
        return self.K if self.role == "nt" else self.N * (2 if self.gated else 1)

    @property
    def depth(self) -> int:
        return {"nn": self.K, "nt": self.N, "tn": self.M}[self.role]

    @property
    def lhs_strides(self) -> tuple[int, int]:
        """Strides of a row and of a step in depth."""
        return (1, self.rows) if self.role == "tn" else (self.depth, 1)

    @property
    def rhs_strides(self) -> tuple[int, int]:
        """Strides of a step in depth and of a column."""
        return (1, self.depth) if self.role == "nt" else (self.cols, 1)

    @property
    def operand_dtypes(self) -> tuple[str, str]:
        """Left, right."""
        first, second, _ = self.dtypes
        return (second, first) if self.role == "nt" else (first, second)
