"""The problem that kernels of products of scaled numbers solve (kernel.py has the labels of each role)."""

import dataclasses
import math

from ..launch import BITS, EIGHTS
from ..matmul.problem import Problem as MatmulTiles

LEAST_STEP = 32  # of the depth, whose product is scaled: tensor cores take so many numbers of 8 bits at once
LEFT, RIGHT, OPEN = {"nn": "x", "nt": "y", "tn": "x"}, {"nn": "w", "nt": "w", "tn": "y"}, {"nn": "y", "nt": "x", "tn": "w"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem(MatmulTiles):
    """M, K and N are whole axes; I, S and J tell in how many blocks they lie.  A packed factor has the dtype i8."""

    I: int  # noqa: E741 (the letter of the label)
    S: int
    J: int
    scaled: tuple[str, ...]  # the slots that have scales, which are float32
    packed: bool = False  # w

    @property
    def blocks(self) -> tuple[int, int, int]:
        """The numbers of blocks of rows, of columns and of the depth."""
        return {"nn": (self.I, self.J, self.S), "nt": (self.I, self.S, self.J), "tn": (self.S, self.J, self.I)}[self.role]

    @property
    def step(self) -> int:
        """The largest power of two that divides a block of the depth."""
        block = self.depth // self.blocks[2]
        return block & -block

    @property
    def scales_steps(self) -> bool:
        """Return whether the product of each step is scaled."""
        return self.blocks[2] > 1 and self.step >= LEAST_STEP

    @property
    def fine(self) -> bool:
        """Return whether factors are scaled in registers."""
        return self.blocks[2] > 1 and self.step < LEAST_STEP

    @property
    def has_left(self) -> bool:
        return LEFT[self.role] in self.scaled

    @property
    def has_right(self) -> bool:
        return RIGHT[self.role] in self.scaled

    @property
    def has_result(self) -> bool:
        return OPEN[self.role] in self.scaled

    @property
    def left_strides(self) -> tuple[int, int]:
        """The strides of the left scale: of a block of rows, and of the depth."""
        rows, _, depth = self.blocks
        return (1, rows) if self.role == "tn" else (depth, 1)

    @property
    def right_strides(self) -> tuple[int, int]:
        """The strides of the right scale: of a block of the depth, and of columns."""
        _, cols, depth = self.blocks
        return (1, depth) if self.role == "nt" else (cols, 1)

    @property
    def pieces(self) -> tuple[int, int]:
        lhs, rhs = super().pieces
        return lhs, math.gcd(max(self.rhs_strides), 32) if self.packed else rhs

    @property
    def staged(self) -> tuple[int, int]:
        """A factor that is scaled in registers has a tile of scales beside its own, with as many elements."""
        lhs, rhs = super().staged
        return lhs + 4 * (self.fine and self.has_left), rhs + 4 * (self.fine and self.has_right)

    @property
    def aligned(self) -> bool:
        (lhs, rhs), (left, right) = self.pieces, (BITS[dtype] for dtype in self.operand_dtypes)
        return lhs * left == 128 and rhs * (4 if self.packed else right) == 128

    @property
    def whole_numbers(self) -> bool:
        """Return whether the factors are multiplied as integers."""
        return {*self.operand_dtypes} == {"i8"} and not self.fine

    @property
    def eights(self) -> bool:
        return self.bits == 8 and not self.whole_numbers

    @property
    def method(self) -> str:
        """The way in which float32 factors are multiplied: what is exact in TF32 only if it is not scaled before."""
        return self.precision if "fp32" in self.operand_dtypes or self.fine else "tf32"

    @property
    def common(self) -> str | None:
        dtypes = {*self.operand_dtypes}
        if self.fine and (self.dtypes[2] == "fp32" or "fp16" in dtypes):  # a scale may leave the range of float16
            return "fp32"
        if not self.fine and (len(dtypes) == 1 or dtypes <= EIGHTS):
            return None
        wide = dtypes - EIGHTS - {"i8"}
        return "bf16" if not wide else wide.pop() if len(wide) == 1 else "fp32"
