"""Convolution and matmul for JAX as primitives that compose with every transformation: import the operations from here."""

from jaxext import _compat  # noqa: I001 (first: it checks jax's version)
from jaxext import checkpoint_policies, extend, parallel
from jaxext._dispatch import in_place_of_lax, use_implementation
from jaxext._explain import Explanation, explain
from jaxext._export import export_disabled_checks, register_cuda_kernels
from jaxext._target import lower_for, use_target
from jaxext._tune import Tuned, tune
from jaxext._tuned import use_table
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
