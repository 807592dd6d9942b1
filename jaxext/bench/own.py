"""The problems of operations that are jaxext's own, and those operations as users of lax and jnp write them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import lax

import jaxext
from jaxext.bench.case import COMPOSITIONS, NUMBERS, OF_ARRAYS, Problem
from jaxext.bench.kinds import NT, by, halved, smaller
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
        return smaller(self, **self.least[stage])


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
        return smaller(self, M=16, N=16, K=self.group or 16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaledExperts(Own):
    """A ragged product of (M, K) with matrices of G groups of equal size: int8 with a scale for each column, or (G, N, K) in 8-bit floats
    with scales of squares of 128, and of 128 neighbours of a row."""

    G: int
    M: int
    K: int
    N: int

    operation: ClassVar = "ragged_scaled_dot"
    stages: ClassVar = ("matrices",)
    least: ClassVar = {"matrices": {"M": 16, "K": 128, "N": 128}}

    @property
    def size(self) -> str:
        return f"{self.G} groups, {super().size}"

    def flops(self, role: str) -> float:
        return 2.0 * self.M * self.N * self.K

    def shapes(self, role: str) -> tuple[tuple[int, ...], ...]:
        if self.numbers == ("fp8",):
            return (self.M, self.K), (self.G, self.N, self.K), (self.M, self.K // 128), (self.G, self.N // 128, self.K // 128)
        return (self.M, self.K), (self.G, self.K, self.N), (self.G, 1, self.N)

    def _writable(self, role: str, numbers: str) -> bool:
        return numbers in self.numbers

    def _how(self, numbers: str) -> Mapping[str, Any]:
        return {}

    def halved(self, stage: str) -> Self:
        """Blocks stay whole."""
        M, K, N = halved((self.M, self.K // 128, self.N // 128), (16, 1, 1))
        return dataclasses.replace(self, M=M, K=128 * K, N=128 * N)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moe(Own):
    """A layer of E experts with gates, of width F, of which each of T rows of width D goes to k."""

    E: int
    k: int
    T: int
    D: int
    F: int

    operation: ClassVar = "moe"
    stages: ClassVar = ("rows", "widths")
    least: ClassVar = {"rows": {"T": 16}, "widths": {"D": 16, "F": 16}}

    @property
    def size(self) -> str:
        return f"{self.k} of {self.E} experts, {super().size}"

    def flops(self, role: str) -> float:
        return 6.0 * self.T * self.k * self.D * self.F

    def shapes(self, role: str) -> tuple[tuple[int, ...], ...]:
        up = self.E, self.D, self.F
        return (self.T, self.D), (self.T, self.E), up, up, (self.E, self.F, self.D)

    def _function(self, role: str) -> tuple[str, Any, Any]:
        return self.operation, {"k": self.k}, lambda op: op


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


def _equal_groups(x, w) -> jax.Array:
    """The sizes, which the compiler must not know."""
    return lax.optimization_barrier(jnp.full(w.shape[0], x.shape[0] // w.shape[0], jnp.int32))


def _experts_made_wide(x, w, *scales) -> jax.Array:
    dtype = scales[0].dtype
    *rows, squares = (
        functools.reduce(lambda s, axis: jnp.repeat(s, of.shape[axis] // s.shape[axis], axis), range(s.ndim), s)
        for of, s in zip((x, w)[2 - len(scales) :], scales, strict=True)
    )
    x, w = x.astype(dtype) * rows[0] if rows else x.astype(dtype), w.astype(dtype) * squares
    return lax.ragged_dot(x, w.mT if rows else w, _equal_groups(x, w))


def _scaled_experts(x, w, *scales, **how) -> jax.Array:
    named = dict(zip(("lhs_scale", "rhs_scale")[2 - len(scales) :], scales, strict=True))
    more = dict(preferred_element_type=scales[0].dtype, transpose_rhs=len(scales) == 2)
    return jaxext.ragged_scaled_dot(x, w, _equal_groups(x, w), **named, **more, **how)


def _moe_by_lax(x, scores, gate, up, down, *, k: int, precision=None) -> jax.Array:
    weights, indices = lax.top_k(jax.nn.softmax(scores), k)
    order = jnp.argsort(indices.ravel())
    sizes = jnp.bincount(indices.ravel(), length=up.shape[0]).astype(jnp.int32)
    dot = functools.partial(lax.ragged_dot, group_sizes=sizes, precision=precision)
    rows = x[order // k]
    y = dot(jax.nn.silu(dot(rows, gate)) * dot(rows, up), down) * weights.ravel()[order][:, None]
    return jnp.zeros_like(x).at[order // k].add(y)


def _moe(x, scores, *matrices, k: int, **how) -> jax.Array:
    weights, indices = lax.top_k(jax.nn.softmax(scores), k)
    return jaxext.moe(x, indices, weights, *matrices, **how)


COMPOSITIONS.update({Causal.operation: causal_by_lax, Gram.operation: gram_by_jnp, Quantised.operation: _made_wide})
COMPOSITIONS.update({ScaledExperts.operation: _experts_made_wide, Moe.operation: _moe_by_lax})
OF_ARRAYS.update({Quantised.operation: _quantized, ScaledExperts.operation: _scaled_experts, Moe.operation: _moe})

LAYER: Any = dict(M=16, K=4096, N=14336)  # of Llama 3 8B at 16 tokens, in the two formats in which weights are commonly published
SUITE: tuple[tuple[Own, str], ...] = (  # with tags
    # the layer before each scan of Mamba-2 2.7B, as its own package computes it
    (Causal(name="causal k=4 silu", N=8, T=2048, C=5376), "mamba"),
    (Quantised(name="llama 8B up quantised", **LAYER, numbers=("int8 weights",)), "llama"),
    (Quantised(name="llama 8B up quantised by 128", **LAYER, group=128, numbers=("int4 weights",)), "llama"),
    (ScaledExperts(name="deepseek experts up quantised", G=8, M=32768, K=7168, N=4096, numbers=("fp8",)), "deepseek"),
    (ScaledExperts(name="mixtral experts up quantised", G=8, M=16, K=4096, N=14336, numbers=("int8 weights",)), "mixtral"),
    *((Moe(name=name, E=64, k=4, T=T, D=2048, F=1024), "") for name, T in (("moe silu", 4096), ("moe silu, decoding", 16))),
    (Gram(name="gram", M=4096, K=4096), ""),  # a weight matrix of Muon's iteration
)
