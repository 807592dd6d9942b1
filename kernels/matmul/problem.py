"""The problem that kernels of matrix products solve, one role of a product:  result[row, col] = Σ_depth left[row, depth] right[depth, col].

role  result    left     right    row  column  contracted
nn    c[M,N]    a[M,K]   b[K,N]   m    n       k
nt    a[M,K]    c[M,N]   bᵀ[N,K]  m    k       n
tn    b[K,N]    aᵀ[K,M]  c[M,N]   k    n       m
"""

import dataclasses
import math
from typing import ClassVar

from ..epilogue import Epilogue
from ..launch import BITS, EIGHTS, PRODUCTS_OF_PARTS

MOST_OVERHANG = 1 << 15  # the depth that splits cover beyond its end is less: a block of up to 128 for each, and they are up to 148

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem(MatmulProblem):
    """A product, with the facts that tiles depend on besides its sizes."""

    @property
    def pieces(self) -> tuple[int, int]:
        """The numbers of the left and of the right operand that can be copied at once from every row: 16 bytes at best."""
        lengths = max(self.lhs_strides), self.N if self.gated else max(self.rhs_strides)
        lhs, rhs = (math.gcd(length, 128 // BITS[dtype]) for length, dtype in zip(lengths, self.operand_dtypes, strict=True))
        return lhs, rhs

    @property
    def aligned(self) -> bool:
        """Return whether all copies are of 16 bytes."""
        return all(piece * BITS[dtype] == 128 for piece, dtype in zip(self.pieces, self.operand_dtypes, strict=True))

    @property
    def staged(self) -> tuple[int, int]:
        """The bytes in shared memory of an element of the left tile of a step and of the right one."""
        lhs, rhs = (BITS[dtype] // 8 for dtype in self.operand_dtypes)
        return lhs, rhs

    @property
    def common(self) -> str | None:
        """The dtype to which operands are converted exactly if they differ; None if the tensor cores take them unchanged."""
        dtypes = set(self.operand_dtypes)
        if len(dtypes) == 1 or dtypes <= EIGHTS:
            return None
        wide = dtypes - EIGHTS
        return wide.pop() if len(wide) == 1 else "fp32"

    @property
    def bits(self) -> int:
        """Bits of a factor as it is multiplied."""
        return BITS[self.common or self.operand_dtypes[0]]

    @property
    def integers(self) -> bool:
        return self.dtypes[2] == "i32"

    @property
    def eights(self) -> bool:
        """Return whether 8-bit floats are multiplied."""
        return self.bits == 8 and not self.integers

    @property
    def method(self) -> str:
        """The way in which float32 factors are multiplied; factors converted from 16 bits are exact in TF32."""
        return self.precision if "fp32" in self.operand_dtypes else "tf32"

    @property
    def fma(self) -> bool:
        """Return whether the products are float32's own, for which there are no tensor cores."""
        return self.bits == 32 and self.method == "ieee"

    @property
    def splits_factors(self) -> bool:
        """Return whether float32 numbers are split into parts for the tensor cores."""
        return self.bits == 32 and self.method in PRODUCTS_OF_PARTS

    @property
    def shared_factors(self) -> bool:
        """Return whether the tensor cores read tiles from shared memory (wgmma and tcgen05): data-centre devices from 9.0 on."""
        return 90 <= self.arch < 120 and not self.fma

    @property
    def tcgen05(self) -> bool:
        """Return whether the tensor cores have their own memory for sums and factors (tcgen05)."""
        return 100 <= self.arch < 120 and not self.fma

    @property
    def turned(self) -> tuple[bool, bool]:
        """Return whether the left and the right tile must be transposed on the way to the tensor cores.

        These read 32-bit tiles from shared memory only if depth is contiguous, and Triton would copy others there in pieces of 4 bytes.
        """
        tf32 = self.shared_factors and self.bits == 32 and self.method == "tf32"
        lhs, rhs = self.operand_dtypes
        return tf32 and lhs == "fp32" and self.lhs_strides[1] != 1, tf32 and rhs == "fp32" and self.rhs_strides[0] != 1

    @property
    def index(self) -> str:
        """The integer type for offsets in a matrix and for depths, including the depth that splits cover beyond the end."""
        sizes = self.rows * self.depth, self.depth * self.cols, self.rows * self.cols
        return "int32" if max(sizes) < 2**31 - MOST_OVERHANG else "int64"
