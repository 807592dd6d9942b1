"""The problems for which Triton kernels are compiled: the suite's, and those of kernels that have no row in the suite."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from jaxext.kernels.causal.problem import CausalProblem
from jaxext.kernels.epilogue import Epilogue

from .case import NUMBERS
from .kinds import NN, NT, TN
from .problems import PRODUCTS

if TYPE_CHECKING:
    from jaxext.kernels import gram, scaled


@dataclasses.dataclass(frozen=True, kw_only=True)
class Causal:
    """A causal convolution with bias and SiLU, of `benchmarks.causal`, which has roles of its own."""

    name: str
    B: int
    T: int
    C: int
    J: int = 4
    state: bool = False
    idx: bool = False
    tags: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ("bf16", "fp32")
    kernel: str = "causal"
    products: tuple[str, ...] = ("forward", "backward")

    def problem(self, role: str, numbers: str, arch: int) -> CausalProblem:
        return CausalProblem(
            name=f"causal_conv1d{'_backward' if role == 'backward' else ''}",
            role=role,
            **{label: getattr(self, label) for label in "BTCJ"},
            dtypes=(numbers,) * 3,
            epilogue=Epilogue(activation="silu", bias=numbers),
            state=numbers if self.state else None,
            idx=self.idx,
            arch=arch,
        )


@dataclasses.dataclass(frozen=True)
class Format:
    """The dtypes of x, w and y, which slots have scales, and how many rows, of x, a scale of theirs is for; likewise of the depth, and of
    w's columns.  None is all."""

    dtypes: tuple[str, str, str]
    scaled: tuple[str, ...]
    blocks: tuple[int | None, int | None, int | None]
    packed: bool = False


# Of `benchmarks.quantized`; 8-bit floats in squares are those of DeepSeek-V3.
FORMATS = {
    "fp8 rows": Format(("fp8e4nv", "fp8e4nv", "bf16"), ("x", "w"), (1, None, 1)),
    "fp8 squares": Format(("fp8e4nv", "fp8e4nv", "bf16"), ("x", "w"), (1, 128, 128)),
    "int8 both": Format(("i8", "i8", "bf16"), ("x", "w"), (1, None, 1)),
    "int8": Format(("bf16", "i8", "bf16"), ("w",), (None, None, 1)),
    "int4": Format(("bf16", "i8", "bf16"), ("w",), (None, 128, 1), packed=True),
    "int4 fine": Format(("bf16", "i8", "bf16"), ("w",), (None, 16, 1), packed=True),
    "fp32 int8": Format(("fp32", "i8", "fp32"), ("w",), (None, 128, 1)),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaled:
    """A product of scaled numbers, x[M,K] w[K,N]."""

    name: str
    M: int
    K: int
    N: int
    tags: tuple[str, ...] = ()
    numbers: tuple[str, ...]
    kernel: str = "scaled"
    products: tuple[str, ...] = (NN, NT)

    def problem(self, role: str, numbers: str, arch: int) -> scaled.Problem:
        from jaxext.kernels import scaled  # needs Triton, as the compiler does; the command line lists the kernels without it

        format = FORMATS[numbers]
        x, w, y = format.dtypes
        counts = (size // (size if block is None else block) for size, block in zip((self.M, self.K, self.N), format.blocks, strict=True))
        return scaled.Problem(
            name=f"scaled_dot_{''.join(format.scaled)}_{role}",
            role=role,
            B=1,
            **{label: getattr(self, label) for label in "MKN"},
            **dict(zip("ISJ", counts, strict=True)),
            dtypes={NN: (x, w, y), NT: (w, y, y), TN: (x, y, y)}[role],
            scaled=format.scaled,
            packed=format.packed,
            precision="tf32",
            arch=arch,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gram:
    """scale x xᵀ + of_addend addend, of x[rows,depth]; `addend` says that there is one."""

    name: str
    rows: int
    depth: int
    addend: bool = False
    tags: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ("bf16", "tf32")
    kernel: str = "gram"
    products: tuple[str, ...] = (NT,)

    def problem(self, role: str, numbers: str, arch: int) -> gram.Problem:
        from jaxext.kernels import gram

        dtypes, precision = NUMBERS[numbers]
        added: dict[str, Any] = dict(addend=dtypes[2], of_addend=-4.775, scale=2.0315) if self.addend else {}
        sizes = dict(B=1, M=self.rows, K=self.rows, N=self.depth)
        return gram.Problem(name="gram", role=role, **sizes, dtypes=dtypes, precision=precision, arch=arch, **added)


COMPILED = (
    *PRODUCTS,
    Causal(name="causal k=4, 8x2048x5376", B=8, T=2048, C=5376, tags=("sweep",)),
    Causal(name="causal k=4, 1x16384x12288", B=1, T=16384, C=12288),
    Causal(name="causal k=4 with a state", B=8, T=2048, C=5376, state=True),
    Causal(name="causal k=4, packed", B=1, T=16384, C=5376, idx=True),
    Causal(name="causal k=2, 4x1024x2048", B=4, T=1024, C=2048, J=2),
    Causal(name="causal k=8, 4x1024x2048", B=4, T=1024, C=2048, J=8),
    Scaled(name="scaled 4096 cubed", M=4096, K=4096, N=4096, tags=("sweep",), numbers=("fp8 rows", "fp8 squares", "int4")),
    Scaled(name="scaled 4096 cubed in fp8, for w", M=4096, K=4096, N=4096, numbers=("fp8 rows", "fp8 squares"), products=(TN,)),
    Scaled(name="scaled 4096 cubed by other means", M=4096, K=4096, N=4096, numbers=("int8 both", "int8", "int4 fine", "fp32 int8")),
    Scaled(name="scaled llama 8B up, 16 rows", M=16, K=4096, N=14336, numbers=("int8", "int4", "fp8 rows"), products=(NN,)),
    Scaled(name="scaled odd sizes", M=4095, K=4096, N=510, numbers=("fp8 rows", "int8", "int4")),
    Gram(name="gram 4096x4096", rows=4096, depth=4096, tags=("sweep",)),
    Gram(name="gram 4096x4096 with an addend", rows=4096, depth=4096, addend=True, tags=("sweep",)),
    Gram(name="gram 1024x4096", rows=1024, depth=4096),
    Gram(name="gram 4096x4096 in parts", rows=4096, depth=4096, numbers=("tf32x3", "bf16x6", "ieee")),
    Gram(name="gram of odd sizes", rows=4095, depth=511),
)
KERNELS = tuple(dict.fromkeys(case.kernel for case in COMPILED))
