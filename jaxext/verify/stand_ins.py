"""The cases of `verify --trial`, for a CPU: a few Triton kernels in the interpreter, and stand-ins for kernels that fail.

Each stand-in computes a matrix product through a callback into Python, and fails there in its own way.
"""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

import jaxext
from jaxext import extend
from jaxext.core.contact import Contact, arrays
from jaxext.verify.events import Verdict

PLATFORM = "cpu"
UNSTEADY = 7  # each so many runs have other bits
HANG_S = 5  # after which the planted hang counts as one; the others may take as long as a busy machine needs
SIZES = (24, 16), (16, 40)


_runs = itertools.count(1)


def _wrong(y: np.ndarray) -> None:
    y[-1, -1] += 1


def _unwritten(y: np.ndarray) -> None:
    y[3, 5] = np.nan


def _unsteady(y: np.ndarray) -> None:
    if next(_runs) % UNSTEADY == 0:
        _wrong(y)


def _raises(y: np.ndarray) -> None:
    raise ArithmeticError("a planted exception")


# Name of a stand-in -> what it does to its result, the verdict on it, and the check that fails.
PLANTS: Mapping[str, tuple[Callable[[np.ndarray], object], str, str | None]] = {
    "planted_right": (lambda y: None, "right", None),
    "planted_wrong": (_wrong, "wrong", "integers"),
    "planted_unwritten": (_unwritten, "wrong", "integers"),
    "planted_unsteady": (_unsteady, "wrong", "bits"),
    "planted_exception": (_raises, "raised", None),
    "planted_crash": (lambda y: os.abort(), "died", None),
    "planted_hang": (lambda y: time.sleep(3600), "hung", None),
}
IMPLEMENTATIONS = ("triton", *PLANTS)
LIMITS = {"planted_hang": HANG_S}


class StandIn(extend.Implementation):
    """A matrix product of float32 numbers that fails."""

    version = "1"

    def __init__(self, name: str, plant: Callable[[np.ndarray], object]):
        self.name, self._plant = name, plant

    def refuses(self, call):
        small = call.op == "matmul_nn" and call.sizes["K"] == SIZES[0][1] and call.dtype == np.float32
        return None if small else "it is a stand-in for one product"

    def not_preferred(self, call):
        return "it is a stand-in"

    def run(self, call, config, operands):
        def computed(a, b):
            product = np.matmul(np.asarray(a, np.float64), np.asarray(b, np.float64)).astype(np.float32).reshape(call.shape)
            self._plant(product.reshape(call.shape[-2:]))  # a view
            return product

        return jax.pure_callback(computed, jax.ShapeDtypeStruct(call.shape, call.dtype), *operands.values())


def contacts() -> list[Contact]:
    """The calls of the trial, whose stand-ins are registered here."""
    for name, (plant, *_) in PLANTS.items():
        extend.register("matmul", StandIn(name, plant), replace=True)
    conv = functools.partial(jaxext.conv_general_dilated, window_strides=(1,), padding="SAME", dimension_numbers=("NHC", "HIO", "NHC"))
    linear = functools.partial(jaxext.linear, activation="gelu")
    return [
        Contact("planted", jaxext.matmul, arrays(*SIZES, dtype="float32")),
        Contact("conv 3", conv, arrays((1, 12, 8), (3, 8, 8), dtype="float16")),
        Contact("linear gelu", linear, arrays((20, 24), (24, 28), (28,), dtype="float16")),
    ]


def failures(verdicts: Mapping[str, Verdict], implementations: Mapping[str, str]) -> list[str]:
    """A sentence for each case that was not reported as what it is.  `implementations`: those of all cases."""
    found = []
    for case, implementation in implementations.items():
        _, outcome, check = PLANTS.get(implementation, (None, "right", None))
        verdict = verdicts.get(case)
        reported: Any = verdict and (verdict.outcome, verdict.event.get("check"), verdict.event.get("reproducible"))
        if reported != (want := (outcome, check, True if outcome in ("hung", "died") else None)):
            found.append(f"{case}: reported as {reported}, want {want}")
    return found + [f"no case of {name}" for name in PLANTS if name not in implementations.values()]
