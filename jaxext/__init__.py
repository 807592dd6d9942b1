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
# Each name that is imported "as" itself is public.
from jaxext import _compat  # noqa: I001 (first: it checks jax's version)
from jaxext._messages import PAGES as _PAGES
from jaxext import checkpoint_policies as checkpoint_policies, export as export, extend as extend
from jaxext.lax.dispatch import (
    in_place_of_lax as in_place_of_lax,
    slices_in_place as slices_in_place,
    use_implementation as use_implementation,
    use_invariant as use_invariant,
)
from jaxext.tables.active import use_table as use_table
from jaxext._target import use_target as use_target
from jaxext.ops.matmul import dot_general as dot_general, matmul as matmul  # an operation comes after those of which it is made
from jaxext.ops.conv import (
    conv as conv,
    conv_general_dilated as conv_general_dilated,
    conv_transpose as conv_transpose,
    convolve as convolve,
)
from jaxext.ops.fused import conv_bias_act as conv_bias_act, gated_linear_unit as gated_linear_unit, linear as linear
from jaxext.ops.ragged import (
    ragged_dot as ragged_dot,
    ragged_dot_general as ragged_dot_general,
    ragged_gated_linear_unit as ragged_gated_linear_unit,
    ragged_linear as ragged_linear,
)
from jaxext.ops.causal import causal_conv1d as causal_conv1d, causal_conv1d_update as causal_conv1d_update
from jaxext.ops.long_conv import long_conv as long_conv
from jaxext.ops.causal_conv import causal_conv as causal_conv
from jaxext.ops.scaled import scaled_dot as scaled_dot
from jaxext.ops.ragged_scaled import ragged_scaled_dot as ragged_scaled_dot
from jaxext.ops.quantized import fp8_matmul as fp8_matmul, quantized_matmul as quantized_matmul
from jaxext.ops.gram import gram as gram, newton_schulz as newton_schulz
from jaxext.mixture import moe as moe
from jaxext import quantization as quantization

if TYPE_CHECKING:  # these are imported on first use, which saves a third of the time of importing everything
    from jaxext import parallel as parallel, privacy as privacy, testing as testing  # noqa: I001
    from jaxext.hazards.doctor import doctor as doctor
    from jaxext.tuning.explain import explain as explain
    from jaxext.tuning.tune import tune as tune

__version__ = "0.2.0"

_compat.hide_frames()

_MODULES = ("checkpoint_policies", "export", "extend", "parallel", "privacy", "quantization", "testing")
_TOOLS = {"doctor": "jaxext.hazards.doctor", "explain": "jaxext.tuning.explain", "tune": "jaxext.tuning.tune"}

__all__ = sorted([*(name for name, value in globals().items() if callable(value) and name[0] != "_"), *_MODULES, *_TOOLS])  # pyright: ignore


def __getattr__(name: str):
    if name in _TOOLS:
        found = getattr(importlib.import_module(_TOOLS[name]), name)
    elif name in _MODULES:
        found = importlib.import_module(f"jaxext.{name}")
    else:
        raise AttributeError(
            f"module 'jaxext' has no attribute {name!r}: names of 0.1 that have changed are listed in {_PAGES}migration.md"
        )
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
