"""The kinds of problems that are operations of jaxext's own: a causal convolution, a matrix times its transpose, and quantised weights.

Each role is one program, with lax's users' way to write it beside it (case.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import jax

from .case import Problem
from .kinds import _by, _halved


@dataclasses.dataclass(frozen=True, kw_only=True)
class Own(Problem):
    """The base class: no kernel of the compile sweeps is chosen by these."""

    roles: tuple[str, ...] = ("forward",)

    @property
    def products(self) -> tuple[str, ...]:
        return ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Causal(Own):
    """A causal depthwise convolution of x (N, T, C) with w (k, C), with bias and SiLU, and all of its gradients ("backward")."""

    N: int
    T: int
    C: int
    k: int
    roles: tuple[str, ...] = ("forward", "backward")

    stages: ClassVar = ("batch", "space", "channels")

    @property
    def size(self) -> str:
        return _by((self.N, self.T, self.C))

    def flops(self, role: str) -> float:
        """The operations of the convolution alone.  The backward pass computes it again, and two gradients."""
        return 2.0 * self.N * self.T * self.C * self.k * (3 if role == "backward" else 1)

    def shapes(self, role: str) -> tuple[tuple[int, ...], ...]:
        x = (self.N, self.T, self.C)
        return (x, (self.k, self.C), (self.C,)) + (x,) * (role == "backward")

    def _how(self, numbers: str) -> Mapping[str, Any]:
        return {}

    def _function(self, role: str) -> tuple[str, Any, Any]:
        return "causal_conv1d", {"activation": "silu"}, _backward if role == "backward" else lambda op: op

    def halved(self, stage: str) -> Self:
        least = {"batch": 2, "space": 64, "channels": 4}[stage]
        field = {"batch": "N", "space": "T", "channels": "C"}[stage]
        (size,) = _halved((getattr(self, field),), (least,))
        return dataclasses.replace(self, **{field: size})


def _backward(op: Callable) -> Callable:
    return lambda *operands: jax.vjp(op, *operands[:-1])[1](operands[-1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gram(Own):
    """The product of a matrix (M, K) with its own transpose."""

    M: int
    K: int

    stages: ClassVar = ("matrices",)

    @property
    def size(self) -> str:
        return _by((self.M, self.K))

    def flops(self, role: str) -> float:
        return 2.0 * self.M * self.M * self.K  # of the whole product: half of them need not be done

    def shapes(self, role: str) -> tuple[tuple[int, ...], ...]:
        return ((self.M, self.K),)

    def _function(self, role: str) -> tuple[str, Any, Any]:
        return "gram", {}, lambda op: op

    def halved(self, stage: str) -> Self:
        M, K = _halved((self.M, self.K), (16, 16))
        return dataclasses.replace(self, M=M, K=K)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantised(Own):
    """A product of (M, K) with quantised weights (K, N): one scale for each column, or for each `group` of its rows."""

    M: int
    K: int
    N: int
    group: int | None = None

    stages: ClassVar = ("matrices",)

    @property
    def size(self) -> str:
        return _by((self.M, self.K, self.N))

    def flops(self, role: str) -> float:
        return 2.0 * self.M * self.N * self.K

    def shapes(self, role: str) -> tuple[tuple[int, ...], ...]:
        blocks = self.K // (self.group or self.K)
        return (self.M, self.K), (self.K, self.N), (blocks, self.N)

    def _writable(self, role: str, numbers: str) -> bool:
        return True

    def _how(self, numbers: str) -> Mapping[str, Any]:
        return {}

    def _function(self, role: str) -> tuple[str, Any, Any]:
        return "quantized_matmul", {}, lambda op: op

    def halved(self, stage: str) -> Self:
        M, N, K = _halved((self.M, self.N, self.K), (16, 16, self.group or 16))
        return dataclasses.replace(self, M=M, N=N, K=K)
