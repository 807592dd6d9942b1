"""The problem that the kernels of causal convolutions solve."""

import dataclasses

from ..epilogue import Epilogue


@dataclasses.dataclass(frozen=True, kw_only=True)
class CausalProblem:
    name: str
    role: str  # "forward" or "backward"
    B: int
    T: int
    C: int
    J: int  # taps
    dtypes: tuple[str, str, str]  # of x, w and y
    epilogue: Epilogue  # its activation and its bias
    state: str | None = None  # its dtype, [B,J-1,C]
    idx: bool = False  # whether there are numbers of sequences, [B,T]
    idx_of_states: bool = False  # and those of the state, [B,J-1]
    arch: int
    device: str = dataclasses.field(default="", repr=False)

    @property
    def reads_z(self) -> bool:
        """Return whether z is computed.  The derivative of the identity does not need it."""
        return self.role == "forward" or self.epilogue.activation is not None

    @property
    def earlier(self) -> int:
        """The number of inputs before a strip that its results and cotangents read."""
        return self.J - 1

    @property
    def later(self) -> int:
        """The number of cotangents after a strip that its inputs' cotangents read."""
        return self.J - 1 if self.role == "backward" else 0
