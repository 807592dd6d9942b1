"""The problems for which Triton kernels are compiled: those of the suite, and some that only kernels have."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

from jaxext.bench.kinds import NN, NT, TN
from jaxext.bench.own import Causal, Gram
from jaxext.bench.problems import PRODUCTS


@dataclasses.dataclass(frozen=True)
class Format:
    """The dtypes of x, w and y, which slots have scales, and how many rows, of x, a scale of theirs is for; likewise of the depth, and of
    w's columns.  None is all."""

    dtypes: tuple[str, str, str]
    scaled: tuple[str, ...]
    blocks: tuple[int | None, int | None, int | None]
    packed: bool = False


# Those of benchmarks/quantized.py; 8-bit floats in squares are those of DeepSeek-V3.
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
    """A product of scaled numbers, x[M,K] w[K,N], or a ragged one, of the M rows of so many groups and w[groups,K,N]."""

    name: str
    M: int
    K: int
    N: int
    groups: int | None = None
    tags: tuple[str, ...] = ()
    numbers: tuple[str, ...]
    products: tuple[str, ...] = (NN, NT)

    @property
    def kernel(self) -> str:
        return "ragged_scaled" if self.groups else "scaled"

    def problem(self, role: str, numbers: str, arch: int) -> Any:
        # needs Triton, as the compiler does; the command line lists the kernels without it
        module = importlib.import_module(f"jaxext.kernels.{self.kernel}")
        format = FORMATS[numbers]
        x, w, y = format.dtypes
        counts = (size // (size if block is None else block) for size, block in zip((self.M, self.K, self.N), format.blocks, strict=True))
        operation = "ragged_scaled" if self.groups else "scaled_dot"
        return module.Problem(
            name=f"{operation}_{''.join(format.scaled)}_{role}",
            role=role,
            B=1,
            **dict[str, Any](P=1, R=1, G=self.groups) if self.groups else {},
            **{label: getattr(self, label) for label in "MKN"},
            **dict[str, Any](zip("ISJ", counts, strict=True)),
            dtypes={NN: (x, w, y), NT: (w, y, y), TN: (x, y, y)}[role],
            scaled=format.scaled,
            packed=format.packed,
            precision="tf32",
            arch=arch,
        )


BOTH: Any = dict(numbers=("bf16", "fp32"))
PLAIN: Any = dict(numbers=("bf16", "tf32"))
OWN = (
    Causal(name="causal k=4, 8x2048x5376", N=8, T=2048, C=5376, tags=frozenset({"sweep"}), **BOTH),
    Causal(name="causal k=4, 1x16384x12288", N=1, T=16384, C=12288, **BOTH),
    Causal(name="causal k=4 with a state", N=8, T=2048, C=5376, state=True, **BOTH),
    Causal(name="causal k=4, packed", N=1, T=16384, C=5376, idx=True, **BOTH),
    Causal(name="causal k=2, 4x1024x2048", N=4, T=1024, C=2048, k=2, **BOTH),
    Causal(name="causal k=8, 4x1024x2048", N=4, T=1024, C=2048, k=8, **BOTH),
    Scaled(name="scaled 4096 cubed", M=4096, K=4096, N=4096, tags=("sweep",), numbers=("fp8 rows", "fp8 squares", "int4")),
    Scaled(name="scaled 4096 cubed in fp8, for w", M=4096, K=4096, N=4096, numbers=("fp8 rows", "fp8 squares"), products=(TN,)),
    Scaled(name="scaled 4096 cubed by other means", M=4096, K=4096, N=4096, numbers=("int8 both", "int8", "int4 fine", "fp32 int8")),
    Scaled(name="scaled llama 8B up, 16 rows", M=16, K=4096, N=14336, numbers=("int8", "int4", "fp8 rows"), products=(NN,)),
    Scaled(name="scaled odd sizes", M=4095, K=4096, N=510, numbers=("fp8 rows", "int8", "int4")),
    Scaled(name="scaled experts", M=8192, K=2048, N=7168, groups=256, tags=("sweep",), numbers=("fp8 squares", "int4")),
    Scaled(name="scaled experts in fp8, for w", M=8192, K=2048, N=7168, groups=256, numbers=("fp8 rows", "fp8 squares"), products=(TN,)),
    Scaled(name="scaled experts otherwise", M=16384, K=4096, N=14336, groups=8, numbers=("int8 both", "int8", "int4 fine", "fp8 rows")),
    Scaled(name="scaled experts, decoding", M=16, K=4096, N=14336, groups=8, numbers=("int8", "int4", "fp8 squares"), products=(NN,)),
    Gram(name="gram 4096x4096", M=4096, K=4096, tags=frozenset({"sweep"}), **PLAIN),
    Gram(name="gram 4096x4096 with an addend", M=4096, K=4096, addend=True, tags=frozenset({"sweep"}), **PLAIN),
    Gram(name="gram 1024x4096", M=1024, K=4096, **PLAIN),
    Gram(name="gram 4096x4096 in parts", M=4096, K=4096, numbers=("tf32x3", "bf16x6", "ieee")),
    Gram(name="gram of odd sizes", M=4095, K=511, **PLAIN),
)
COMPILED: tuple[Any, ...] = (*PRODUCTS, *OWN)
KERNELS = tuple(dict.fromkeys(case.kernel for case in COMPILED))
