"""The words of a report: for a failure, the rule that is missing or the kernel that is wrong; for a check that was left out, the cure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend.core import Jaxpr

NO_SPLITS = "no splits are declared"  # and fn names none
# Why a check is left out that another machine could make, and how to have it.
ONE_DEVICE = "one device only"
NO_FLATBUFFERS = "the package flatbuffers, by which JAX writes programs, is not installed"
NARROW = "on CPUs XLA ends the process where a shard_map over some axes adds up 16-bit floats"
CURES = {
    ONE_DEVICE: "XLA_FLAGS=--xla_force_host_platform_device_count=8 simulates 8 on a CPU, if it is set before jax starts",
    NO_FLATBUFFERS: "pip install flatbuffers",
    NARROW: "on a GPU, or in float32",
}

# JAX's error messages for missing rules, and how to add the rule.
MISSING = (
    (r"Evaluation rule for '(.+?)' not", "no eager rule for {0}: p.def_impl(functools.partial(jax.interpreters.xla.apply_primitive, p))"),
    (r"Abstract evaluation for '(.+?)' not", "no shape and dtype rule for {0}: p.def_abstract_eval"),
    (r"translation rule for primitive '(.+?)' not found", "no lowering of {0} for this platform: mlir.register_lowering"),
    (r"Batching rule for '(.+?)' not", "no batching rule for {0}: batching.primitive_batchers[p], or jax.custom_batching.custom_vmap"),
    (r"vmap is only supported for the (\w+_callback)", "no batching rule for {0}: its argument vmap_method"),
    (r"Differentiation rule for '(.+?)' not", "no JVP of {0}: ad.primitive_jvps[p] (ad.defbilinear, ad.deflinear2), or jax.custom_jvp"),
    (r"allbacks do not support JVP", "no JVP of a callback: jax.custom_jvp around it"),
    (r"forward-mode autodiff .* custom_vjp", "jax.custom_vjp has no forward mode: jax.custom_jvp, or a primitive with JVP and transpose"),
    (r"Transpose rule .* for '(.+?)' not", "no transpose rule for {0}: ad.primitive_transposes[p] (ad.defbilinear, ad.deflinear2)"),
    (r"Custom VJP bwd rule must .* same type", "give its arguments the same varying axes: lax.pcast(x, axes, to='varying')"),
    (r"carry input and carry output must have equal types", "the carry starts without varying axes: lax.pcast(init, axes, to='varying')"),
    (r"out_sharding", "an operation inside needs out_sharding, or jax.sharding.auto_axes around it"),
    (r"[Ll]eaked trac|unexpected tracer", "a tracer outlives its trace: keep no traced value in a global, a closure or a cache"),
    (r"Abstract tracer value|__array__\(\) was called on traced", "Python reads a traced value: use jnp or lax there, or make it static"),
    (r"callbacks are only supported in spmd", "XLA does not split callbacks: jax.shard_map over all axes of the mesh"),
    (r"serialization of host_callbacks", "a Python callback cannot be exported: an FFI call, or skip this check"),
    (r"implementation '(\w+)' does not support this call: (.{,200})", "implementation '{0}' was named, and refuses: {1}"),
    (r"(\w+): implementation '(\w+)' gave", "`run` of implementation '{1}' must give `call.shape` and `call.dtype`, where call.op is {0}"),
    (r"`(\w+)` of implementation '(\w+)' gave", "`{0}` of implementation '{1}' must give what the message wants"),
    (r"couples the elements of (\w+)", "devices must not split {0}: name it in `unsharded` of extend.operation"),
    (r"maximum recursion depth", "a rule calls itself: an eager rule is xla.apply_primitive, not jit of p.bind"),
)  # fmt: skip


def missing(error: str) -> str | None:
    """The rule that an error message says is missing, if it is a known one."""
    return next((rule.format(*match.groups()) for pattern, rule in MISSING if (match := re.search(pattern, error))), None)


def blamed(function: Callable[[Any], Any], case: Any) -> str | None:
    """Return what a primitive of the program that failed says of the kernels in it, if it knows: by its attribute
    `blame(program, *arrays)`."""
    try:
        program = jax.make_jaxpr(function)(case)
        asked = next((of for primitive in _primitives(program.jaxpr) if (of := getattr(primitive, "blame", None))), None)
        return asked and asked(program, *jax.tree.leaves(case))
    except Exception:  # the program fails, too; its own rule is said instead
        return None


def _primitives(jaxpr) -> Iterator:
    """Yield the primitives of a program and of those inside of it."""
    for eqn in jaxpr.eqns:
        yield eqn.primitive
        for param in jax.tree.leaves(tuple(eqn.params.values())):
            if isinstance(inside := getattr(param, "jaxpr", param), Jaxpr):
                yield from _primitives(inside)
