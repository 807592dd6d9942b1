"""What the benchmarks share: problems, each a function of arrays made with lax's operation or with ours, and the record of where they ran.

Gradients are pullbacks with the cotangent as an argument, so that only the one role is timed.  It must not know clocks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import pathlib
import platform
import subprocess
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxext

LAYOUTS = {1: ("NHC", "HIO", "NHC"), 2: ("NHWC", "HWIO", "NHWC"), 3: ("NDHWC", "DHWIO", "NDHWC")}


@dataclasses.dataclass(frozen=True)
class Case:
    """One row: `build(library)` is the function to time, where the library is one of those of `operation`."""

    name: str
    build: Callable[[str], Callable]
    shapes: tuple[tuple[int, ...], ...]
    target: float | None = None
    traced: bool = False  # time tracing rather than running
    flops: float = 0  # products and additions; none with the zeros that a dilation inserts


def operation(library: str, name: str) -> Callable:
    """The operation of that name: that of "lax" (or jax.numpy), of "jaxext" as it comes, or jaxext's with the implementation so named."""
    if library == "lax":
        return getattr(jnp if name == "matmul" else lax, name)
    ours = getattr(jaxext, name)
    return ours if library == "jaxext" else functools.partial(ours, implementation=library)


def floats(shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def conv(name, x, w, role="fprop", *, stride=1, padding="SAME", dilation=1, input_dilation=1, groups=1, vmap=None, target=None):
    """x is (N, *space, C) and w is (*filter, C/groups, K), each without the axis of size `vmap` that is mapped in both."""
    rank = len(x) - 2
    static = dict(
        window_strides=(stride,) * rank,
        padding=padding,
        lhs_dilation=(input_dilation,) * rank,
        rhs_dilation=(dilation,) * rank,
        dimension_numbers=LAYOUTS[rank],
        feature_group_count=groups,
    )
    y = jax.eval_shape(functools.partial(lax.conv_general_dilated, **static), *map(floats, (x, w))).shape
    shapes = {"fprop": (x, w), "dgrad": (w, y), "wgrad": (x, y)}[role]

    def build(library):
        op = functools.partial(operation(library, "conv_general_dilated"), **static)
        f = {
            "fprop": op,
            "dgrad": lambda w, y: jax.vjp(lambda x: op(x, w), jnp.zeros(x, w.dtype))[1](y)[0],
            "wgrad": lambda x, y: jax.vjp(lambda w: op(x, w), jnp.zeros(w, x.dtype))[1](y)[0],
        }[role]
        return jax.vmap(f) if vmap else f

    if vmap:
        shapes = tuple((vmap, *shape) for shape in shapes)
    flops = 2 * (vmap or 1) * math.prod(y) * math.prod(w[:-1]) / input_dilation**rank
    return Case(f"{name} {role}", build, shapes, target, flops=flops)


def roles(name, x, w, targets, **static):
    return [conv(name, x, w, role, target=target, **static) for role, target in targets.items()]


def all_roles(target):
    return dict.fromkeys(("fprop", "dgrad", "wgrad"), target)


def matmul(name, m, k, n, *, target=None, **static):
    def build(library):
        return functools.partial(operation(library, "matmul"), **static)

    return Case(name, build, ((m, k), (k, n)), target, flops=2 * m * k * n)


def environment() -> dict:
    here = pathlib.Path(__file__).parent
    commit = subprocess.run(["git", "-C", here, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {
        "device": f"{jax.devices()[0].device_kind}, {processor()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), "jax": jax.__version__, "numpy": np.__version__, "jaxext": jaxext.__version__},
        "commit": commit or None,
        "command": " ".join(["python", *sys.argv]),
    }


def processor() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
