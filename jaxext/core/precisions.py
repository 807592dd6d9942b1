"""The number of bits in which the factors of float32 products are multiplied, in words.

A float32 number has 24 significant bits.  Tensor cores take fewer: 11 in TF32, 8 in bfloat16.  Some precisions split a number into two or
three of those and add up several products.  Sums are float32 unless the words say otherwise.
"""

from __future__ import annotations

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxext.core.call import Call

# As kernels name them; what is not here keeps all bits.
WORDS = {
    "tf32": "TF32: 11 bits",
    "tf32x3": "3 products of TF32: 22 bits",
    "bf16": "BF16: 8 bits",
    "bf16x3": "3 products of BF16: 16 bits",
    "bf16x6": "6 products of BF16: 24 bits",
    "bf16x9": "9 products of BF16: 24 bits",
    "f16": "FP16: 11 bits",
}
_PRESET = re.compile(r"(TF32|BF16|F16)_\1_(\w+?)(?:_X(\d))?")
_LEVELS = (lax.Precision.DEFAULT, lax.Precision.HIGH, lax.Precision.HIGHEST)
_ON_TPUS = ("bf16", "bf16x3", "bf16x6")


def xla_bits(call: Call) -> str:
    """Return how XLA multiplies float32 numbers, if that is known and not in float32; "allowed" where it may choose.

    The levels of `lax.Precision` are told by its documentation.  Of two levels the higher holds.
    """
    factors = {call.dtypes[slot] for slot in call.factors}
    if not factors & {np.dtype(np.float32), np.dtype(np.complex64)}:
        return ""
    level = _level(call.precision)
    if level is None:
        return _of_preset(call)
    if call.platform == "cuda" and (call.arch is None or call.arch >= 80) and level != lax.Precision.HIGHEST:
        return WORDS["tf32"].replace(":", " allowed:")
    return WORDS[_ON_TPUS[_LEVELS.index(level)]] if call.platform == "tpu" else ""


def _level(precision: Any) -> lax.Precision | None:
    """Return the precision as a level of `lax.Precision`, or None for a preset."""
    if precision is None or precision == lax.DotAlgorithmPreset.DEFAULT:
        return lax.Precision.DEFAULT
    return max(precision, key=_LEVELS.index) if isinstance(precision, tuple) else None


def _of_preset(call: Call) -> str:
    """Return the words for a preset, by its name; on CPUs XLA multiplies bfloat16's presets in float32."""
    found = _PRESET.fullmatch(call.precision.name)
    if found is None or call.platform == "cpu" and found[1] == "BF16":
        return ""
    kind, sums, times = found.groups()
    words = WORDS[f"{kind.lower()}x{times}" if times else kind.lower()]
    return words if sums == "F32" else f"{words}, sums of {jnp.finfo({'BF16': jnp.bfloat16, 'F16': jnp.float16}[sums]).nmant + 1} bits"
