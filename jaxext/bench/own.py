"""The problems of operations that are jaxext's own, and those operations as users of lax and jnp write them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import lax

import jaxext
from jaxext.bench.case import COMPOSITIONS, NUMBERS, OF_ARRAYS, Problem
from jaxext.bench.kinds import NT, by, halved
from jaxext.kernels.causal.problem import CausalProblem
from jaxext.kernels.epilogue import Epilogue


@dataclasses.dataclass(frozen=True, kw_only=True)
class Own(Problem):
    """The base class of operations of jaxext's own, beside which lax's users' way to write them is measured (`COMPOSITIONS`).

    Each role is one program.
    """

    roles: tuple[str, ...] = ("forward",)

    operation: ClassVar[str]
    compiled: ClassVar[tuple[str, ...]] = ()  # the roles of the compile sweeps
    least: ClassVar[Mapping[str, Mapping[str, int]]]  # stage -> the sizes that are halved together, and the smallest of each

    @property
    def products(self) -> tuple[str, ...]:
        return self.compiled

    @property
    def size(self) -> str:
        return by([getattr(self, name) for sizes in self.least.values() for name in sizes])

    def _function(self, role: str) -> tuple[str, Any, Any]:
        return self.operation, {}, lambda op: op

    def halved(self, stage: str) -> Self:
        least = self.least[stage]
        sizes = halved([getattr(self, name) for name in least], [*least.values()])
        return dataclasses.replace(self, **dict(zip(least, sizes, strict=True)))


def _gradients(op: Callable) -> Callable:
    return lambda *operands: jax.vjp(op, *operands[:-1])[1](operands[-1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Causal(Own):
    """A causal depthwise convolution of x (N, T, C) with w (k, C), with bias and SiLU, and all of its gradients ("backward")."""

    N: int
    T: int
    C: int
    k: int = 4
    state: bool = False
    idx: bool = False
    roles: tuple[str, ...] = ("forward", "backward")

    operation: ClassVar = "causal_conv1d"
    kernel: ClassVar = "causal"
    compiled: ClassVar = ("forward", "backward")
    stages: ClassVar = ("batch", "space", "channels")
    least: ClassVar = {"batch": {"N": 2}, "space": {"T": 64}, "channels": {"C": 4}}

    def problem(self, role: str, numbers: str, arch: int) -> CausalProblem:
        return CausalProblem(
            name=f"causal_conv1d{'_backward' if role == 'backward' else ''}",
            role=role,
            **dict[str, Any](B=self.N, T=self.T, C=self.C, J=self.k),
            dtypes=(numbers, numbers, numbers),
            epilogue=Epilogue(activation="silu", bias=numbers),
            state=numbers if self.state else None,
            idx=self.idx,
            arch=arch,
        )

    def flops(self, role: str) -> float:
        """The operations of the convolution alone.  The backward pass computes it again, and two gradients."""
        return 2.0 * self.N * self.T * self.C * self.k * (3 if role == "backward" else 1)

    def shapes(self, role: str) -> tuple[tuple[int, ...], ...]:
        x = (self.N, self.T, self.C)
        return (x, (self.k, self.C), (self.C,)) + (x,) * (role == "backward")

    def _how(self, numbers: str) -> Mapping[str, Any]:
        return {}

    def _function(self, role: str) -> tuple[str, Any, Any]:
        return self.operation, {"activation": "silu"}, _gradients if role == "backward" else lambda op: op


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gram(Own):
    """The product of a matrix (M, K) with its own transpose, and with `addend` a polynomial of two terms of it."""

    M: int
    K: int
    addend: bool = False

    operation: ClassVar = "gram"
    kernel: ClassVar = "gram"
    compiled: ClassVar = (NT,)
    stages: ClassVar = ("matrices",)
    least: ClassVar = {"matrices": {"M": 16, "K": 16}}

    def problem(self, role: str, numbers: str, arch: int) -> Any:
        from jaxext.kernels import gram  # needs Triton, as the compiler does; the command line lists the kernels without it

        dtypes, precision = NUMBERS[numbers]
        added: dict[str, Any] = dict(addend=dtypes[2], of_addend=-4.775, scale=2.0315) if self.addend else {}
        sizes = dict(B=1, M=self.M, K=self.M, N=self.K)
        return gram.Problem(name="gram", role=role, **sizes, dtypes=dtypes, precision=precision, arch=arch, **added)

    def flops(self, role: str) -> float:
        return 2.0 * self.M * self.M * self.K  # of the whole product: half of them need not be done

    def shapes(self, role: str) -> tuple[tuple[int, ...], ...]:
        return ((self.M, self.K),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantised(Own):
    """A product of (M, K) with quantised weights (K, N): one scale for each column, or for each `group` of its rows."""

    M: int
    K: int
    N: int
    group: int | None = None

    operation: ClassVar = "quantized_matmul"
    stages: ClassVar = ("matrices",)
    least: ClassVar = {"matrices": {"M": 16, "K": 16, "N": 16}}

    def flops(self, role: str) -> float:
        return 2.0 * self.M * self.N * self.K

    def shapes(self, role: str) -> tuple[tuple[int, ...], ...]:
        blocks = self.K // (self.group or self.K)
        return (self.M, self.K), (self.K, self.N), (blocks, self.N)

    def _writable(self, role: str, numbers: str) -> bool:
        return True

    def _how(self, numbers: str) -> Mapping[str, Any]:
        return {}

    def halved(self, stage: str) -> Self:
        M, N, K = halved((self.M, self.N, self.K), (16, 16, self.group or 16))
        return dataclasses.replace(self, M=M, N=N, K=K)


def causal_by_lax(x, w, b, *, activation: str = "silu") -> jax.Array:
    layout, pads = ("NWC", "WIO", "NWC"), ((len(w) - 1, 0),)
    z = lax.conv_general_dilated(x, w[:, None], (1,), pads, dimension_numbers=layout, feature_group_count=x.shape[-1])
    return jax.nn.silu(z + jnp.broadcast_to(b, z.shape))


def gram_by_jnp(x, *, precision=None) -> jax.Array:
    return jnp.matmul(x, x.mT, precision=precision)


def _made_wide(x, qvalue, scale) -> jax.Array:
    return jnp.matmul(x, jaxext.quantization.Quantized(qvalue, scale).dequantize().astype(x.dtype))


def _quantized(x, qvalue, scale, **how) -> jax.Array:
    return jaxext.quantized_matmul(x, jaxext.quantization.Quantized(qvalue, scale), **how)


COMPOSITIONS.update({Causal.operation: causal_by_lax, Gram.operation: gram_by_jnp, Quantised.operation: _made_wide})
OF_ARRAYS[Quantised.operation] = _quantized

LAYER: Any = dict(M=16, K=4096, N=14336)  # of Llama 3 8B at 16 tokens, in the two formats in which weights are commonly published
SUITE: tuple[tuple[Own, str], ...] = (  # with tags
    # the layer before each scan of Mamba-2 2.7B, as its own package computes it
    (Causal(name="causal k=4 silu", N=8, T=2048, C=5376), "mamba"),
    (Quantised(name="llama 8B up quantised", **LAYER, numbers=("int8 weights",)), "llama"),
    (Quantised(name="llama 8B up quantised by 128", **LAYER, group=128, numbers=("int4 weights",)), "llama"),
    (Gram(name="gram", M=4096, K=4096), ""),  # a weight matrix of Muon's iteration
)
