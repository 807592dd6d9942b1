"""Lowering and exporting GPU programs on machines without the GPU, and running exported programs."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
from jax.export import DisabledSafetyCheck

from jaxext._messages import format_value
from jaxext._target import use_target
from jaxext.backends import launcher
from jaxext.backends.cuda import cuda_binding
from jaxext.core import entry_points
from jaxext.core.family import families

__all__ = ["disabled_checks", "lower_for", "register_cuda_kernels"]


def disabled_checks() -> list[DisabledSafetyCheck]:
    """Return the `disabled_checks` for `jax.export.export`: the custom calls of all kernels, whose compatibility jax does not guarantee.

    They include those of your own implementations and of `extend.cuda_kernel`.  To run an exported program with Triton kernels, use the
    version of jax's CUDA plugin that exported it, or a newer one.  To run one with CUDA kernels, install jaxext and call
    `register_cuda_kernels`; the names of these calls carry a version.

    Examples:
      >>> struct, export = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16), functools.partial(jax.export.export, platforms=["cuda"])
      >>> with jaxext.use_target("sm_90a"):
      ...     exported = export(jax.jit(jaxext.matmul), disabled_checks=disabled_checks())(struct, struct)
    """
    entry_points.load()
    calls = (name for family in families.values() for each in family.implementations for name in each.custom_calls)
    return [DisabledSafetyCheck.custom_call(name) for name in dict.fromkeys([*calls, launcher.TARGET])]


def register_cuda_kernels() -> None:
    """Register the CUDA kernels with XLA, to run an exported program in a process that has not lowered one.

    It also registers the launcher of `extend.cuda_kernel`, whose kernels are stored in the program.  Calling it again changes nothing.

    Examples:
      >>> register_cuda_kernels()
      >>> y = jax.export.deserialize(stored).call(x, w)

    Raises:
      RuntimeError: this machine has neither CUDA kernels nor the launcher; the message gives the reasons.
    """
    if (reason := cuda_binding.missing()) is None:
        cuda_binding.register()
    if (without := launcher.missing()) is None:
        launcher.register()
    if reason and without:
        raise RuntimeError(f"no CUDA kernels: {reason}; {without}")


def lower_for(fun: Callable, *, arch: str | None) -> Callable[..., jax.stages.Lowered]:
    """Return a function of the arguments of `fun` that lowers it for CUDA devices of the architecture `arch`, on any machine.

    It does what `jax.jit(fun).lower` does for the devices of this machine.  The program contains the compiled kernels; read it with
    `as_text()`.  Compiling and running it requires such a device.  To export for a GPU, call `jax.export.export(..., platforms=["cuda"],
    disabled_checks=jaxext.export.disabled_checks())` inside `use_target`.

    Args:
      fun: a function of arrays of any shapes and dtypes, jitted or not.
      arch: as in `use_target`.

    Returns:
      a function of the arguments of `fun`, or of `jax.ShapeDtypeStruct`s in place of arrays, that returns a `jax.stages.Lowered`.

    Examples:
      >>> x = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
      >>> lowered = lower_for(functools.partial(jaxext.matmul, implementation="xla"), arch="sm_90a")(x, x)
      >>> "stablehlo.dot_general" in lowered.as_text()
      True

    Raises:
      TypeError: `fun` is not callable.
      ValueError: `arch` is not the name of a compute capability, or no known GPU has it.
    """
    if not callable(fun):
        raise TypeError(f"lower_for: fun is {format_value(fun)}, want the function itself: lower_for(fun, arch=...)(*args)")
    jitted, target = fun if hasattr(fun, "trace") else jax.jit(fun), use_target(arch)

    @functools.wraps(fun)
    def lowered(*args, **kwargs) -> jax.stages.Lowered:
        with target:
            return jitted.trace(*args, **kwargs).lower(lowering_platforms=("cuda",))

    return lowered


def __dir__() -> list[str]:
    return __all__
