"""The problem that kernels of ragged products of scaled numbers solve: that of ragged products (`ragged/problem.py`), with factors as those
of products of scaled numbers (`scaled/problem.py`).

    role  result              left                right
    nn    y[B,P,R,M,JN]       x_scale x           w_scale[g,s,j] w[g,sk,jn]
    nt    x[B,P,R,M,SK]       y_scale y           (w_scale w)ᵀ
    tn    w[B,G,SK,JN]        (x_scale x)ᵀ        y_scale y                    over the rows of g

x_scale[B,P,R,M,S], y_scale[B,P,R,M,J] and w_scale[B,G,S,J] have an element for each row or group, and each block of S K or J N columns.
The result is multiplied by the scale of its slot, if that has one.
"""

import dataclasses

from ..ragged.problem import RaggedProblem
from ..scaled.problem import Problem as ScaledProblem


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem(RaggedProblem, ScaledProblem):
    """I is M if rows have scales, and else 1.  In tn these scale factors in registers: the depth is that of rows."""

    @property
    def scales_steps(self) -> bool:
        return self.role != "tn" and super().scales_steps

    @property
    def fine(self) -> bool:
        return (self.has_left or self.has_right) if self.role == "tn" else super().fine

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Slot -> shape."""
        rows = (self.B, self.P, self.R, self.M)
        scales = {"x_scale": (*rows, self.S), "w_scale": (self.B, self.G, self.S, self.J), "y_scale": (*rows, self.J)}
        return super().shapes | {f"{slot}_scale": scales[f"{slot}_scale"] for slot in self.scaled}
