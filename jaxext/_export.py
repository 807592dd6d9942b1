"""What programs need that leave the process which traced them: the custom calls of kernels, which jax must allow and XLA must know."""

from __future__ import annotations

from jax.export import DisabledSafetyCheck

from jaxext.backends.cuda import cuda_binding
from jaxext.forms.family import families


def export_disabled_checks() -> list[DisabledSafetyCheck]:
    """For `jax.export.export(disabled_checks=...)`: the custom calls of all kernels, for which jax itself promises no compatibility.

    Those of users' implementations are among them.  An exported program with Triton kernels runs where jaxlib knows their call: with jax's
    CUDA plugin of the version that exported it, or a newer one.  One with CUDA kernels runs where jaxext is installed and
    `register_cuda_kernels` was called; their names carry a version.
    """
    calls = (name for family in families.values() for each in family.implementations for name in each.custom_calls)
    return [DisabledSafetyCheck.custom_call(name) for name in dict.fromkeys(calls)]


def register_cuda_kernels() -> None:
    """Make the CUDA kernels known to XLA, for an exported program that calls them in a process that has not lowered one.

    Raises:
      RuntimeError: there are none here, with the reason.
    """
    cuda_binding.register()
