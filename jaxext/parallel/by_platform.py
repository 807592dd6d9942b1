"""Chooses between one function for CPUs and another for other platforms, at lowering.  All JAX transformations apply.

`lax.platform_dependent` chooses too, but its functions are branches of a `cond` with a runtime index.  A scan hoists that index out of its
body, and a GPU then waits for it in every step.  Derivatives of a `cond` trace both branches and keep the residuals of both.
`by_platform` has no runtime index, its derivatives keep only the operands, and the function for other platforms is traced only if it is
lowered.  Each rule transforms both functions alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from itertools import compress

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Primitive, Var, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

from jaxext import _compat

by_platform = Primitive("by_platform")
by_platform.multiple_results = True


def choose(cpu: Callable, others: Callable, *args: jax.Array) -> tuple[jax.Array, ...]:
    """`cpu(*args)` in a program for CPUs, `others(*args)` in a program for any other platform.

    Args:
      cpu, others: functions of arrays that return sequences of arrays, of the same shapes and dtypes.  `others` must be hashable.
    """
    return tuple(by_platform.bind(*args, cpu=_traced(cpu, args), others=others))


def _traced(fun, args) -> ClosedJaxpr:
    """The jaxpr of `fun`, without dead code such as a tangent's primal result or a ring of products."""
    closed = jax.make_jaxpr(lambda *args: tuple(fun(*args)))(*args)
    jaxpr, _ = pe.dce_jaxpr(closed.jaxpr, [True] * len(closed.out_avals), instantiate=True)
    return ClosedJaxpr(jaxpr, closed.consts)


@by_platform.def_effectful_abstract_eval
def _(*_, cpu: ClosedJaxpr, others):
    return cpu.out_avals, cpu.effects


@by_platform.def_impl
def _(*args, cpu: ClosedJaxpr, others):
    on_cpu = {device.platform for x in args if isinstance(x, jax.Array) for device in x.devices()} <= {"cpu"}
    return jaxpr_as_fun(cpu)(*args) if on_cpu else others(*args)


lowered_on_cpus = mlir.lower_fun(lambda *args, cpu, others: jaxpr_as_fun(cpu)(*args), multiple_results=True)
lowered_elsewhere = mlir.lower_fun(lambda *args, cpu, others: jaxpr_as_fun(_traced(others, args))(*args), multiple_results=True)
mlir.register_lowering(by_platform, lowered_on_cpus, platform="cpu")
mlir.register_lowering(by_platform, lowered_elsewhere)


@dataclasses.dataclass(frozen=True)
class Bound:
    """A function with its first arguments.  It equals another of the same function and arguments, as `functools.partial` does not."""

    fun: Callable
    first: tuple

    def __call__(self, *args):
        return self.fun(*self.first, *args)


def _choose_rule(rule: Callable, static: tuple, args: Sequence, cpu: ClosedJaxpr, others: Callable):
    """Choose between `rule(fun, *static, *args)` of the one function and of the other."""
    return choose(Bound(rule, (jaxpr_as_fun(cpu), *static)), Bound(rule, (others, *static)), *args)


def _tangent(fun: Callable, moving: tuple[bool, ...], *args):
    """The tangent of `fun`: a function of its operands, and of the tangents of the operands marked in `moving`."""
    fixed = [x for x, moves in zip(args, moving, strict=False) if not moves]
    return jax.jvp(lambda *xs: tuple(fun(*_merged(moving, xs, fixed))), (*compress(args, moving),), args[len(moving) :])[1]


def _jvp(primals, tangents, *, cpu, others):
    moving = tuple(not isinstance(t, ad.Zero) for t in tangents)
    results = by_platform.bind(*primals, cpu=cpu, others=others)
    return results, _choose_rule(_tangent, (moving,), (*primals, *compress(tangents, moving)), cpu, others)


ad.primitive_jvps[by_platform] = _jvp


def _transposed(fun: Callable, linear: tuple[bool, ...], avals: tuple, given: tuple[bool, ...], *args):
    """The transpose of `fun`, which is linear in the operands marked in `linear`.

    A function of the other operands, and of the cotangents that are not zero, which `given` marks.
    """
    n = linear.count(False)
    transpose = jax.linear_transpose(lambda *xs: [*compress(fun(*_merged(linear, xs, args[:n])), given)], *avals)
    return transpose(list(args[n:]))


def _transpose(cotangents, *args, cpu, others):
    linear = tuple(map(ad.is_undefined_primal, args))
    given = tuple(not isinstance(ct, ad.Zero) for ct in cotangents)
    known = [x for x in args if not ad.is_undefined_primal(x)]
    static = linear, tuple(x.aval for x in compress(args, linear)), given
    results = _choose_rule(_transposed, static, (*known, *compress(cotangents, given)), cpu, others)
    return _merged(linear, results, [None] * len(known))


ad.primitive_transposes[by_platform] = _transpose


def _merged(marks: Sequence[bool], marked: Sequence, unmarked: Sequence) -> list:
    ones, others = iter(marked), iter(unmarked)
    return [next(ones if mark else others) for mark in marks]


def _mapped(fun: Callable, axes: tuple, results: tuple, size: int, name, spmd_name, *args):
    mapped = jax.vmap(lambda *xs: tuple(fun(*xs)), axes, results, axis_size=size, axis_name=name, spmd_axis_name=spmd_name)
    return mapped(*args)


def _batch(axis, args, dims, *, cpu, others):
    named = any(getattr(effect, "name", None) == axis.name for effect in cpu.effects)
    results = tuple(0 if named or _depends(cpu.jaxpr, i, dims) else None for i in range(len(cpu.out_avals)))
    return _choose_rule(_mapped, (tuple(dims), results, axis.size, axis.name, axis.spmd_name), args, cpu, others), results


def _depends(jaxpr: Jaxpr, i: int, dims) -> bool:
    """Return whether result i depends on a mapped operand."""
    _, used = pe.dce_jaxpr(jaxpr, [i == j for j in range(len(jaxpr.outvars))])
    return any(is_used and dim is not None for is_used, dim in zip(used, dims, strict=True))


batching.fancy_primitive_batchers[by_platform] = _batch


def _under_a_policy(saveable, unknown, instantiated, eqn):
    """`jax.checkpoint` with a policy: a result is saved if it depends on a product that the policy saves, and only then.

    Returns, as `partial_eval_jaxpr_custom` wants: the equation of the forward pass, the equation of the backward pass, which results are
    unknown in the forward pass, which are instantiated in the backward pass, and the residuals.
    """
    n = len(eqn.outvars)
    operands = [v for v, there in zip(eqn.invars, instantiated, strict=True) if isinstance(v, Var) and not there]
    if any(unknown):
        return None, eqn, [True] * n, [True] * n, operands
    saved = _saved(saveable, eqn.params["cpu"].jaxpr)
    if all(saved):
        return eqn, None, [False] * n, [False] * n, []
    again = eqn.replace(outvars=[Var(v.aval) if is_saved else v for v, is_saved in zip(eqn.outvars, saved, strict=True)])
    return eqn, again, [False] * n, [not is_saved for is_saved in saved], operands


def _saved(saveable, jaxpr: Jaxpr) -> list[bool]:
    """Return for each result whether it depends on a value that the policy saves."""
    found: set[Var] = set()
    for eqn in jaxpr.eqns:
        inner = [p.jaxpr for p in eqn.params.values() if isinstance(p, ClosedJaxpr)]
        itself = not inner and saveable(eqn.primitive, *(v.aval for v in eqn.invars), **eqn.params) is True
        if itself or any(any(_saved(saveable, each)) for each in inner) or any(isinstance(v, Var) and v in found for v in eqn.invars):
            found |= set(eqn.outvars)
    return [isinstance(v, Var) and v in found for v in jaxpr.outvars]


pe.partial_eval_jaxpr_custom_rules[by_platform] = _under_a_policy


def _remat(policy, *args, cpu, others):
    """The same under `jax_remat3`."""
    results = by_platform.bind(*args, cpu=cpu, others=others)
    marks = _saved(policy, cpu.jaxpr) if policy else [False] * len(results)
    saved = [y if is_saved else None for y, is_saved in zip(results, marks, strict=True)]

    def again(saved, *args):
        computed = by_platform.bind(*args, cpu=cpu, others=others)
        return [y if kept is None else _compat.primal_left_tangent_right(kept, y) for kept, y in zip(saved, computed, strict=True)]

    return results, saved, again


_compat.register_remat(by_platform, _remat)
