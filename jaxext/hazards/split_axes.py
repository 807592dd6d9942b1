"""Follows the mesh axes that split each array of a program, from the shardings of its arguments on.

XLA decides this when it compiles, and `xla_splits` asks it.  Where it cannot be asked, only what follows forwards from operands to results
is known: through products, elementwise operations, transposes, reshapes and programs inside.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.sharding import AxisType, NamedSharding

from jaxext.tuning.walk import Step

Split = tuple[tuple[str, ...], ...]  # of each dimension: the mesh axes that split it

REDUCING = ("reduce", "argm", "squeeze", "unstack")  # beginnings of names of primitives that drop dimensions

REDUCERS = ("reduce", "scatter", "select_and", "sort")  # of those whose jaxpr takes and gives single elements


def of_sharding(sharding: Any, ndim: int) -> Split | None:
    """What a sharding says.  None if it names no axes."""
    if not isinstance(sharding, NamedSharding):
        return None
    entries = (*sharding.spec, *(None,) * ndim)[:ndim]
    return tuple(() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in map(_plain, entries))


def _plain(entry: Any) -> Any:
    return entry if entry is None or isinstance(entry, str | tuple) else None  # P.UNCONSTRAINED


class SplitAxes:
    """The split of each array so far.  `follow` is told every step of a walk, in order."""

    def __init__(self, jaxpr: Jaxpr, arguments: Sequence[Split | None]):
        self.mesh: dict[str, int] = {}  # axis -> size, of those that XLA or the types split by
        self._manual: list[frozenset[str]] = [frozenset()]
        self._known: dict[Any, Split | None] = dict(zip(jaxpr.invars, arguments, strict=True))

    def add_mesh(self, mesh: Any) -> None:
        self.mesh.update({axis: size for axis, size in mesh.shape.items() if size > 1})

    def add_constants(self, variables: Sequence[Any], shardings: Sequence[Any]) -> None:
        """Arrays that the function closes over."""
        self._known.update({var: of_sharding(sharding, var.aval.ndim) for var, sharding in zip(variables, shardings, strict=True)})

    @property
    def automatic(self) -> Mapping[str, int]:
        """The axes over which the program is still to be split here: in a `shard_map` those that it leaves."""
        return {axis: size for axis, size in self.mesh.items() if axis not in self._manual[-1]}

    def _count(self, axes: Sequence[str]) -> int:
        return math.prod(self.mesh.get(axis, 1) for axis in axes)

    def of(self, atom: Any) -> Split | None:
        if isinstance(atom, Literal):
            return of_sharding(getattr(atom.val, "sharding", None), np.ndim(atom.val))
        if AxisType.Explicit in (mesh := atom.aval.sharding.mesh).axis_types if hasattr(atom.aval, "sharding") else ():
            self.add_mesh(mesh)
            return of_sharding(atom.aval.sharding, atom.aval.ndim)
        return self._known.get(atom)

    def follow(self, step: Step) -> None:
        eqn: Any = step.eqn
        if step.inside and not eqn.primitive.name.startswith(REDUCERS):
            (self._leave if step.left else self._enter)(eqn, step.inside)
            return
        for var in eqn.outvars:
            shape = getattr(var.aval, "shape", None)
            self._known[var] = None if shape is None else self._result(eqn, shape)

    def _enter(self, eqn: Any, inside: Sequence[Any]) -> None:
        manual = self._manual[-1]
        if eqn.primitive.name == "shard_map":
            self.add_mesh(eqn.params["mesh"])
            manual |= frozenset(eqn.params["newly_manual_axes"])
        self._manual.append(manual)
        for closed in jax.tree.leaves([*eqn.params.values()], is_leaf=lambda value: isinstance(value, ClosedJaxpr)):
            if isinstance(closed, ClosedJaxpr):
                self.add_constants(closed.jaxpr.constvars, [getattr(constant, "sharding", None) for constant in closed.consts])
        for inner in inside:
            for var, split in zip(inner.invars, _aligned(self._operands(eqn, inner), len(inner.invars)), strict=True):
                known = split if _fits(split, var) else None
                self._known[var] = known and tuple(tuple(a for a in axes if a not in manual) for axes in known)

    def _operands(self, eqn: Any, inner: Any) -> list[Split | None]:
        splits, params, name = [self.of(atom) for atom in eqn.invars], eqn.params, eqn.primitive.name
        if name == "while":
            of_condition, of_body = params["cond_nconsts"], params["body_nconsts"]
            body = params["body_jaxpr"].jaxpr is inner
            return [*(splits[of_condition : of_condition + of_body] if body else splits[:of_condition]), *splits[of_condition + of_body :]]
        if name == "scan":  # inside, what it runs over lacks the first axis
            return [split and split[len(split) - var.aval.ndim :] for split, var in zip(splits, inner.invars, strict=True)]
        return splits

    def _leave(self, eqn: Any, inside: Sequence[Any]) -> None:
        self._manual.pop()
        ends = [eqn.params["body_jaxpr"].jaxpr] if eqn.primitive.name == "while" else inside  # each branch of a cond
        told: list[list[Split | None]] = [[] for _ in eqn.outvars]
        for inner in ends:
            for i, (var, split) in enumerate(
                zip(eqn.outvars, _aligned([self.of(x) for x in inner.outvars], len(eqn.outvars)), strict=True)
            ):
                if eqn.primitive.name == "scan" and split is not None:
                    split = ((),) * (var.aval.ndim - len(split)) + split
                told[i] += [split] if _fits(split, var) else []
        for i, var in enumerate(eqn.outvars):
            if eqn.primitive.name == "shard_map":
                told[i].append(of_sharding(NamedSharding(eqn.params["mesh"], eqn.params["out_specs"][i]), var.aval.ndim))
            self._known[var] = _union(told[i])

    def _result(self, eqn: Any, shape: Sequence[int]) -> Split | None:
        splits, params, name = [self.of(atom) for atom in eqn.invars], eqn.params, eqn.primitive.name
        if name in ("sharding_constraint", "reshard"):
            sharding = params["sharding"] if "sharding" in params else params["dst_sharding"]
            if isinstance(sharding, NamedSharding):
                self.add_mesh(sharding.mesh)
                return of_sharding(sharding, len(shape))
        if name in ("dot_general", "conv_general_dilated"):
            split = (_of_dot if name == "dot_general" else _of_conv)(splits, params, [atom.aval.ndim for atom in eqn.invars])
            return split and tuple(axes if n % self._count(axes) == 0 else () for n, axes in zip(shape, split, strict=True))
        if not splits or splits[0] is None and len(splits) == 1:
            return None
        first = splits[0]
        if name == "stack" and (whole := _union(splits)) is not None:
            return *whole[: params["axis"]], (), *whole[params["axis"] :]
        if first is not None and name == "transpose":
            return tuple(first[i] for i in params["permutation"])
        if first is not None and name == "broadcast_in_dim":
            sources = {to: i for i, to in enumerate(params["broadcast_dimensions"]) if eqn.invars[0].aval.shape[i] == shape[to]}
            return tuple(first[sources[i]] if i in sources else () for i in range(len(shape))) if sources else None
        if first is not None and name == "reshape":
            order = params.get("dimensions") or range(len(first))
            before = eqn.invars[0].aval.shape
            return _reshaped(tuple(first[i] for i in order), [before[i] for i in order], shape, self.mesh)
        if first is not None and name.startswith(REDUCING) and len(shape) < len(first):
            dropped = params["axes"] if "axes" in params else params["dimensions"] if "dimensions" in params else (params["axis"],)
            return tuple(axes for i, axes in enumerate(first) if i not in dropped)
        alike = [
            tuple(axes if size == n else () for axes, size, n in zip(split, atom.aval.shape, shape, strict=True))
            for atom, split in zip(eqn.invars, splits, strict=True)
            if split is not None and len(split) == len(shape)
        ]
        return _union(alike)


def _aligned(splits: list[Split | None], count: int) -> list[Split | None]:
    """As many splits, the last ones if there are more, and unknown ones first if there are fewer."""
    return [*(None,) * (count - len(splits)), *splits[max(len(splits) - count, 0) :]]


def _fits(split: Split | None, var: Any) -> bool:
    return split is None or len(split) == getattr(var.aval, "ndim", -1)


def _union(splits: Iterable[Split | None]) -> Split | None:
    """Each dimension by the first that splits it.  A mesh axis splits one dimension."""
    known, used = [split for split in splits if split is not None], set()
    result = []
    for choices in zip(*known, strict=True):
        axes = next((axes for axes in choices if axes and not used & {*axes}), ())
        used |= {*axes}
        result.append(axes)
    return tuple(result) if known else None


def _of_dot(splits, params, ndims) -> Split | None:
    (lc, rc), (lb, rb) = params["dimension_numbers"]
    lhs, rhs = (split or ((),) * ndim for split, ndim in zip(splits[:2], ndims[:2], strict=True))
    free = [[axes for i, axes in enumerate(split) if i not in (*c, *b)] for split, c, b in ((lhs, lc, lb), (rhs, rc, rb))]
    result = [*(lhs[i] or rhs[j] for i, j in zip(lb, rb, strict=True)), *free[0], *free[1]]
    return None if splits[0] is splits[1] is None else _union([tuple(result)])


def _of_conv(splits, params, ndims) -> Split | None:
    """The channels of the result take an axis before its space does."""
    numbers = params["dimension_numbers"]
    lhs, rhs = (split or ((),) * ndims[0] for split in splits[:2])
    outputs = joined(lhs[numbers.lhs_spec[1]], rhs[numbers.rhs_spec[0]]) if params["feature_group_count"] > 1 else rhs[numbers.rhs_spec[0]]
    result = _union([(lhs[numbers.lhs_spec[0]], outputs, *(lhs[i] for i in numbers.lhs_spec[2:]))])
    assert result is not None
    return None if splits[0] is splits[1] is None else tuple(result[numbers.out_spec.index(i)] for i in range(ndims[0]))


def joined(one: tuple[str, ...], other: tuple[str, ...]) -> tuple[str, ...]:
    """The axes of a dimension that two operands share: the longer, or none if they disagree."""
    shorter, longer = sorted((one, other), key=len)
    return longer if longer[: len(shorter)] == shorter else ()


def _reshaped(split: Split, before: Sequence[int], after: Sequence[int], mesh: Mapping[str, int]) -> Split:
    """Dimensions are merged and split in blocks of equal size, and axes go to the first of a block, then to the next if that is used up."""

    def count(axes: Sequence[str]) -> int:
        return math.prod(mesh.get(axis, 1) for axis in axes)

    result: list[tuple[str, ...]] = [()] * len(after)
    i = j = 0
    while i < len(before) and j < len(after):
        left, right, first, to = before[i], after[j], i, j
        while left != right:
            if left < right:
                i += 1
                left *= before[i] if i < len(before) else right
            else:
                j += 1
                right *= after[j] if j < len(after) else left
            if i >= len(before) or j >= len(after):
                return tuple(result)
        axes: tuple[str, ...] = ()
        for k in range(first, i + 1):
            axes += split[k]
            if count(split[k]) != before[k]:
                break
        for k in range(to, j + 1):
            result[k] = max((axes[:n] for n in range(len(axes) + 1) if after[k] % count(axes[:n]) == 0), key=len)
            axes = axes[len(result[k]) :]
            if count(result[k]) != after[k]:
                break
        i, j = i + 1, j + 1
    return tuple(result)
