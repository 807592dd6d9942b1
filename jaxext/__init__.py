"""Convolution and matmul for JAX as primitives that compose with every transformation: import the operations from here."""

import importlib.util
import pathlib

if importlib.util.find_spec("jaxext.kernels") is None:  # installing puts it here: in the repository it is another folder
    raise ImportError(
        f"jaxext was imported from its sources in {pathlib.Path(__file__).parent}, which hide the installed package and cannot run"
        " themselves: start Python in another folder, or run `pip install --editable .` in the repository"
    )

# ruff: noqa: E402
from jaxext import _compat  # noqa: I001 (first: it checks jax's version)
from jaxext import checkpoint_policies, extend, parallel
from jaxext.families.dispatch import in_place_of_lax, use_implementation
from jaxext.tuning.explain import Explanation, explain
from jaxext._export import export_disabled_checks, register_cuda_kernels
from jaxext._target import lower_for, use_target
from jaxext.tuning.tune import Tuned, tune
from jaxext.tables.in_force import use_table
from jaxext.ops import (
    conv,
    conv_general_dilated,
    conv_transpose,
    convolve,
    dot_general,
    matmul,
)

__version__ = "0.1.0"

_compat.hide_frames()

__all__ = [
    "Explanation",
    "Tuned",
    "checkpoint_policies",
    "conv",
    "conv_general_dilated",
    "conv_transpose",
    "convolve",
    "dot_general",
    "explain",
    "export_disabled_checks",
    "extend",
    "in_place_of_lax",
    "lower_for",
    "matmul",
    "parallel",
    "register_cuda_kernels",
    "tune",
    "use_implementation",
    "use_table",
    "use_target",
]
