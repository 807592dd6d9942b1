"""Support for exported programs: allows the custom calls of kernels in jax, and registers them with XLA."""

from __future__ import annotations

from jax.export import DisabledSafetyCheck

from jaxext.backends.cuda import cuda_binding
from jaxext.core.family import families


def export_disabled_checks() -> list[DisabledSafetyCheck]:
    """The `disabled_checks` for `jax.export.export`: the custom calls of all kernels, for which jax does not guarantee compatibility.

    Kernels of users' implementations are included.  To run an exported program with Triton kernels, use jax's CUDA plugin of the version
    that exported it, or a newer one.  To run one with CUDA kernels, install jaxext and call `register_cuda_kernels`; the names of these
    calls carry a version.
    """
    calls = (name for family in families.values() for each in family.implementations for name in each.custom_calls)
    return [DisabledSafetyCheck.custom_call(name) for name in dict.fromkeys(calls)]


def register_cuda_kernels() -> None:
    """Register the CUDA kernels with XLA, to run an exported program in a process that has not lowered one.

    Raises:
      RuntimeError: there are no CUDA kernels here; the message gives the reason.
    """
    cuda_binding.register()
