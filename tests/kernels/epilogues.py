"""Epilogues in float64, and operands for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from cases import random
from scipy import special

from jaxext.backends.triton.interpreter import DTYPES
from jaxext.kernels.epilogue import Epilogue

FUNCTIONS: dict[str | None, Callable[[np.ndarray], np.ndarray]] = {
    None: lambda z: z,
    "relu": lambda z: np.maximum(z, 0),
    "relu6": lambda z: np.clip(z, 0, 6),
    "gelu": lambda z: z * special.ndtr(z),
    "gelu_tanh": lambda z: z * special.expit(np.sqrt(8 / np.pi) * (z + 0.044715 * z**3)),  # (1 + tanh(u)) / 2 = expit(2u)
    "silu": lambda z: z * special.expit(z),
    "sigmoid": special.expit,
    "tanh": np.tanh,
    "leaky_relu": lambda z: np.where(z < 0, 0.01 * z, z),
    "squared_relu": lambda z: np.maximum(z, 0) ** 2,
}


def with_epilogue(problem: Any, **epilogue) -> Any:
    return dataclasses.replace(problem, epilogue=Epilogue(**epilogue))


def result_slot(problem: Any) -> str:
    return "c" if hasattr(problem, "M") else "y"


def shapes(problem: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all arrays of a problem with an epilogue, results included."""
    of = dict(problem.shapes)
    y = of[result_slot(problem)]
    z = (*y[:-1], 2, y[-1]) if problem.epilogue.gated else y
    of["bias"] = (problem.B, problem.N) if hasattr(problem, "M") else (problem.B, problem.G, problem.K)
    return of | {"residual": y, "y": y, "z": z}


def results(problem: Any) -> tuple[tuple[int, ...], ...]:
    of = shapes(problem)
    return (of["y"], of["z"]) if problem.epilogue.saves else (of["y"],)


def some_operands(problem: Any, integers: bool = False) -> dict[str, np.ndarray]:
    first, second = ("a", "b") if hasattr(problem, "M") else ("x", "w")
    epilogue = problem.epilogue
    dtypes = {first: problem.dtypes[0], second: problem.dtypes[1], "bias": epilogue.bias, "residual": epilogue.residual}
    of = shapes(problem)
    return {slot: random(of[slot], DTYPES[dtype], seed, integers) for seed, (slot, dtype) in enumerate(dtypes.items()) if dtype}


def beside_channels(problem: Any, bias: np.ndarray) -> np.ndarray:
    """A bias in the axes of the result."""
    return bias.reshape(bias.shape[0], *(1,) * (len(shapes(problem)["y"]) - bias.ndim), *bias.shape[1:])


def true(problem: Any, sums: np.ndarray, operands: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The results of these sums, which are those of the columns of b if it is gated: y, and z if it is saved."""
    epilogue, z = problem.epilogue, sums
    function = FUNCTIONS[epilogue.activation]
    if epilogue.bias:
        z = z + beside_channels(problem, operands["bias"].astype(np.float64))
    if epilogue.gated:
        y = function(z[..., 0, :]) * z[..., 1, :]
    else:
        y = function(z)
    if epilogue.residual:
        y = y + operands["residual"].astype(np.float64)
    return [y, z] if epilogue.saves else [y]


def scales(problem: Any, magnitudes: np.ndarray, operands: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Return the scales of errors in float32: sums of magnitudes, and what the activation makes of those."""
    epilogue, z = problem.epilogue, magnitudes
    if epilogue.bias:
        z = z + beside_channels(problem, np.abs(operands["bias"].astype(np.float64)))
    steepness = 2 * np.abs(z) if epilogue.activation == "squared_relu" else 1.2
    y = steepness * z + 1
    if epilogue.gated:
        y = y[..., 0, :] * (z[..., 1, :] + 1) * 2
    if epilogue.residual:
        y = y + np.abs(operands["residual"].astype(np.float64))
    return [y, z] if epilogue.saves else [y]
