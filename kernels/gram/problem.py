"""The problem that kernels of a product with its own transpose solve."""

import dataclasses

from ..matmul.problem import Problem as MatmulTiles


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem(MatmulTiles):
    """The role nt of a product, whose two operands are the slot c."""

    addend: str | None = None  # its dtype
    scale: float = 1.0
    of_addend: float = 0.0

    @property
    def plain(self) -> bool:
        """Return whether nothing follows the sum, so that the depth can be split."""
        return self.addend is None and self.scale == 1
