"""Convolution and matmul for JAX as primitives that compose with every transformation: import the operations from here."""

import importlib.util
import pathlib
from typing import TYPE_CHECKING

if importlib.util.find_spec("jaxext.kernels") is None:  # installed packages have it; in the repository it is another folder
    raise ImportError(
        f"jaxext was imported from its sources in {pathlib.Path(__file__).parent}, which hide the installed package and cannot run"
        " themselves: start Python in another folder, or run `pip install --editable .` in the repository"
    )

# ruff: noqa: E402
from jaxext import _compat  # noqa: I001 (first: it checks jax's version)
from jaxext import extend
from jaxext import checkpoint_policies
from jaxext.lax.dispatch import in_place_of_lax, use_implementation, use_invariant
from jaxext._export import export_disabled_checks, register_cuda_kernels
from jaxext._target import lower_for, use_target
from jaxext.tables.in_force import use_table
from jaxext.ops.matmul import dot_general, matmul  # an operation comes after those of which it is made
from jaxext.ops.conv import conv, conv_general_dilated, conv_transpose, convolve
from jaxext.ops.fused import conv_bias_act, gated_linear_unit, linear
from jaxext.ops.ragged import ragged_dot, ragged_dot_general, ragged_gated_linear_unit, ragged_linear
from jaxext.ops.causal import causal_conv1d, causal_conv1d_update
from jaxext.ops.scaled import scaled_dot
from jaxext.ops.quantized import Quantized, fp8_matmul, pack_int4, quantize, quantized_matmul, unpack_int4
from jaxext.ops.gram import gram, newton_schulz

if TYPE_CHECKING:
    from jaxext import parallel, privacy
    from jaxext.hazards.doctor import Report, doctor
    from jaxext.tuning.explain import Explanation, explain
    from jaxext.tuning.tune import Tuned, tune

__version__ = "0.2.0"

_compat.hide_frames()

__all__ = [
    "Explanation",
    "Quantized",
    "Report",
    "Tuned",
    "causal_conv1d",
    "causal_conv1d_update",
    "checkpoint_policies",
    "conv",
    "conv_bias_act",
    "conv_general_dilated",
    "conv_transpose",
    "convolve",
    "doctor",
    "dot_general",
    "explain",
    "export_disabled_checks",
    "extend",
    "fp8_matmul",
    "gated_linear_unit",
    "gram",
    "in_place_of_lax",
    "linear",
    "lower_for",
    "matmul",
    "newton_schulz",
    "pack_int4",
    "parallel",
    "privacy",
    "quantize",
    "quantized_matmul",
    "ragged_dot",
    "ragged_dot_general",
    "ragged_gated_linear_unit",
    "ragged_linear",
    "register_cuda_kernels",
    "scaled_dot",
    "tune",
    "unpack_int4",
    "use_implementation",
    "use_invariant",
    "use_table",
    "use_target",
]

# Imported on first use, which saves a third of the time of importing everything.
_LATER = {
    "parallel": "jaxext.parallel",
    "privacy": "jaxext.privacy",
    **dict.fromkeys(("Report", "doctor"), "jaxext.hazards.doctor"),
    **dict.fromkeys(("Explanation", "explain"), "jaxext.tuning.explain"),
    **dict.fromkeys(("Tuned", "tune"), "jaxext.tuning.tune"),
}


def __getattr__(name: str):
    if name not in _LATER:
        raise AttributeError(f"module 'jaxext' has no attribute {name!r}")
    module = importlib.import_module(_LATER[name])
    globals()[name] = found = getattr(module, name, module)
    return found


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
