"""The problems that kernels are compiled for: named, real, and written as their users would write them.

`Matmul` and `Conv` say what is asked, by sizes; `problem` says it again as the kernel's own `Problem`, for one role, kind of numbers and
architecture.  It must not know JAX, devices or clocks.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

FPROP, DGRAD, WGRAD = CONV_ROLES = ("fprop", "dgrad", "wgrad")
NN, NT, TN = MATMUL_ROLES = ("nn", "nt", "tn")

# Kind of numbers -> the dtypes of both operands and the result, and how products of float32 are made.
NUMBERS = {
    "bf16": (("bf16", "bf16", "bf16"), "tf32"),
    "fp16": (("fp16", "fp16", "fp16"), "tf32"),
    "tf32": (("fp32", "fp32", "fp32"), "tf32"),
    "tf32x3": (("fp32", "fp32", "fp32"), "tf32x3"),
    "bf16x3": (("fp32", "fp32", "fp32"), "bf16x3"),
    "bf16x6": (("fp32", "fp32", "fp32"), "bf16x6"),
    "ieee": (("fp32", "fp32", "fp32"), "ieee"),
    "fp8": (("fp8e4nv", "fp8e4nv", "bf16"), "tf32"),
    "fp8 both": (("fp8e4nv", "fp8e5", "fp32"), "tf32"),
    "int8": (("i8", "i8", "i32"), "tf32"),
    "fp32bf16": (("fp32", "bf16", "fp32"), "tf32"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Matmul:
    """c[B,M,N] = a[B,M,K] b[B,K,N], and its gradients."""

    name: str
    M: int
    N: int
    K: int
    B: int = 1
    roles: tuple[str, ...] = MATMUL_ROLES
    numbers: tuple[str, ...] = ("bf16",)
    tags: frozenset[str] = frozenset()

    kernel = "matmul"

    def problem(self, role: str, numbers: str, arch: int) -> Any:
        dtypes, precision = NUMBERS[numbers]
        return importlib.import_module("jaxext.kernels.matmul").Problem(
            name=f"matmul_{role}",
            role=role,
            B=self.B,
            M=self.M,
            N=self.N,
            K=self.K,
            dtypes=dtypes,
            precision=precision,
            arch=arch,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conv:
    """A convolution of x (N, *space, C) with w (*filter, C/groups, K), and its gradients; `batch` of them where the filters differ too.

    `padding` is (low, high) per axis, or None for lax's SAME; stride and dilations are the same on all axes.
    """

    name: str
    x: tuple[int, ...]
    w: tuple[int, ...]
    stride: int = 1
    padding: tuple[tuple[int, int], ...] | None = None
    dilation: int = 1
    input_dilation: int = 1
    groups: int = 1
    batch: int = 1
    roles: tuple[str, ...] = CONV_ROLES
    numbers: tuple[str, ...] = ("bf16",)
    tags: frozenset[str] = frozenset()

    @property
    def rank(self) -> int:
        return len(self.x) - 2

    @property
    def kernel(self) -> str:
        return "depthwise" if self.w[-2] == 1 and self.groups > 1 else "conv"

    @property
    def pads(self) -> tuple[tuple[int, int], ...]:
        return self.padding or tuple(self._same(n, r) for n, r in zip(self.x[1:-1], self.w[:-2], strict=True))

    def _same(self, size: int, taps: int) -> tuple[int, int]:
        total = max(0, (-(-size // self.stride) - 1) * self.stride + (taps - 1) * self.dilation + 1 - size)
        return total // 2, total - total // 2

    @property
    def output(self) -> tuple[int, ...]:
        return tuple(
            (low + (n - 1) * self.input_dilation + 1 + high - ((r - 1) * self.dilation + 1)) // self.stride + 1
            for n, r, (low, high) in zip(self.x[1:-1], self.w[:-2], self.pads, strict=True)
        )

    def problem(self, role: str, numbers: str, arch: int) -> Any:
        dtypes, precision = NUMBERS[numbers]

        def three(values, missing: int) -> Any:
            return (missing,) * (3 - self.rank) + tuple(values)

        return importlib.import_module("jaxext.kernels._geometry").ConvProblem(
            name=f"conv{self.rank}d_{role}",
            role=role,
            B=self.batch,
            N=self.x[0],
            G=self.groups,
            C=self.w[-2],
            K=self.w[-1] // self.groups,
            input=three(self.x[1:-1], 1),
            filter=three(self.w[:-2], 1),
            output=three(self.output, 1),
            stride=three((self.stride,) * self.rank, 1),
            low=three((low for low, _ in self.pads), 0),
            input_dilation=three((self.input_dilation,) * self.rank, 1),
            filter_dilation=three((self.dilation,) * self.rank, 1),
            dtypes=dtypes,
            precision=precision,
            arch=arch,
        )


SWEEP = frozenset({"sweep"})  # compiled with every candidate configuration, not only with the one that `pick` takes

PROBLEMS: tuple[Matmul | Conv, ...] = (
    Matmul(name="4096 cubed", M=4096, N=4096, K=4096, tags=SWEEP),
    Matmul(name="4096 cubed, forward", M=4096, N=4096, K=4096, roles=(NN,), numbers=("tf32", "ieee", "bf16x6", "fp8", "int8"), tags=SWEEP),
    Matmul(name="8192 cubed", M=8192, N=8192, K=8192, numbers=("bf16", "fp16", "tf32", "tf32x3", "bf16x3")),
    Matmul(name="70B feed-forward", M=8192, N=28672, K=8192, numbers=("bf16", "fp8")),
    Matmul(name="decode 16", M=16, N=8192, K=8192),
    Matmul(name="decode 1", M=1, N=4096, K=14336, roles=(NN, NT), numbers=("bf16", "tf32")),
    Matmul(name="long and narrow", M=65536, N=64, K=64, numbers=("bf16", "tf32")),
    Matmul(name="odd sizes", M=4095, N=511, K=257, numbers=("bf16", "tf32", "ieee", "int8")),
    Matmul(name="batch of 64", B=64, M=512, N=512, K=64, numbers=("bf16", "fp32bf16", "fp8 both")),
    Conv(name="resnet 3x3", x=(32, 56, 56, 64), w=(3, 3, 64, 64), tags=SWEEP),
    Conv(name="resnet 3x3, forward", x=(32, 56, 56, 64), w=(3, 3, 64, 64), roles=(FPROP,), numbers=("tf32", "bf16x6"), tags=SWEEP),
    Conv(name="resnet 3x3 256", x=(32, 14, 14, 256), w=(3, 3, 256, 256), numbers=("bf16", "fp16", "tf32", "ieee")),
    Conv(name="resnet 3x3 by 2", x=(32, 56, 56, 128), w=(3, 3, 128, 128), stride=2),
    Conv(name="resnet 1x1", x=(32, 56, 56, 64), w=(1, 1, 64, 256)),
    Conv(name="stem 7x7 by 2", x=(32, 224, 224, 3), w=(7, 7, 3, 64), stride=2, roles=(FPROP,), tags=SWEEP),
    Conv(name="stem 7x7 by 2, others", x=(32, 224, 224, 3), w=(7, 7, 3, 64), stride=2, numbers=("bf16", "tf32")),
    Conv(name="resnext 32 of 4", x=(32, 56, 56, 128), w=(3, 3, 4, 128), groups=32, numbers=("bf16", "tf32")),
    Conv(name="resnext 32 of 16", x=(32, 14, 14, 512), w=(3, 3, 16, 512), groups=32),
    Conv(name="transposed 4x4 by 2", x=(8, 32, 32, 256), w=(4, 4, 256, 128), input_dilation=2, padding=((2, 2), (2, 2))),
    Conv(name="strided 4x4 by 2", x=(8, 64, 64, 128), w=(4, 4, 128, 256), stride=2, padding=((1, 1), (1, 1)), numbers=("bf16", "tf32")),
    Conv(name="wavenet k=5 dilated", x=(8, 4096, 512), w=(5, 512, 512), dilation=16, padding=((64, 0),)),
    Conv(name="unet 3x3x3", x=(2, 32, 64, 64, 32), w=(3, 3, 3, 32, 64), numbers=("bf16", "tf32")),
    Conv(name="latents 3x3", x=(8, 64, 64, 320), w=(3, 3, 320, 320), numbers=("bf16", "fp8")),
    Conv(name="odd channels", x=(4, 27, 29, 33), w=(3, 5, 33, 65), numbers=("bf16", "tf32")),
    Conv(name="per-example", x=(1, 32, 32, 64), w=(3, 3, 64, 64), batch=16, roles=(WGRAD,), numbers=("bf16", "tf32", "fp32bf16")),
    Conv(name="batched filters", x=(4, 28, 28, 32), w=(3, 3, 32, 32), batch=16),
    Conv(name="convnext 7x7", x=(32, 56, 56, 96), w=(7, 7, 1, 96), groups=96, tags=SWEEP),
    Conv(name="convnext 7x7, fp32", x=(32, 56, 56, 96), w=(7, 7, 1, 96), groups=96, numbers=("tf32",)),
    Conv(name="mobilenet 3x3", x=(32, 112, 112, 96), w=(3, 3, 1, 96), groups=96),
    Conv(name="mobilenet 3x3 by 2", x=(32, 112, 112, 96), w=(3, 3, 1, 96), groups=96, stride=2),
    Conv(name="two outputs 5x5", x=(8, 28, 28, 60), w=(5, 5, 1, 120), groups=60),
    Conv(name="mamba k=4", x=(8, 2048, 5376), w=(4, 1, 5376), groups=5376, padding=((3, 0),), roles=(FPROP, WGRAD), tags=SWEEP),
    Conv(name="mamba k=4, others", x=(8, 2048, 5376), w=(4, 1, 5376), groups=5376, padding=((3, 0),), numbers=("bf16", "tf32")),
    Conv(name="hyena k=4", x=(1, 16384, 12288), w=(4, 1, 12288), groups=12288, padding=((3, 0),)),
    Conv(name="depthwise 3x3x3", x=(2, 16, 28, 28, 128), w=(3, 3, 3, 1, 128), groups=128),
    Conv(name="depthwise 15x15", x=(8, 32, 32, 64), w=(15, 15, 1, 64), groups=64),
)
