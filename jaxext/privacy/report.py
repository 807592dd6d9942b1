"""`explain_norms`: how the norm of each parameter's gradient is computed, from the same walk that computes it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxext._messages import aligned
from jaxext.privacy.per_example import Function


@dataclasses.dataclass(frozen=True)
class Parameter:
    """The method that computes the norm of one parameter's gradient.

    Attributes:
      name: its path in the arguments.
      shape, dtype: those of the parameter.
      ops: the operations that combine it with the example.
      sources: the source lines of these operations.
      how: the method, in words.  "kept" means that `clipped_grad` keeps the per-example gradients, which are no larger than the arrays
        that they are computed from.
      stored: whether per-example gradients are written to memory: the size of the parameter times the number of examples.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    ops: tuple[str, ...]
    sources: tuple[str, ...]
    how: str
    stored: bool


@dataclasses.dataclass(frozen=True)
class Report:
    """The report of `explain_norms`.  `str` formats it as a table."""

    parameters: tuple[Parameter, ...]

    @property
    def stored(self) -> tuple[Parameter, ...]:
        """The parameters whose per-example gradients are written to memory."""
        return tuple(each for each in self.parameters if each.stored)

    def __str__(self) -> str:
        head = ("parameter", "type", "meets the example in", "norm by")
        body = [
            (each.name, f"{each.dtype}{[*each.shape]}", ", ".join(dict.fromkeys(each.ops)) or "nothing", each.how)
            for each in self.parameters
        ]
        numbers = sum(math.prod(each.shape) for each in self.stored)
        small = "no gradient is written that is larger than what it is made of"
        return "\n".join([*aligned([head, *body]), f"gradients written for each example: {numbers:,} numbers" if numbers else small])


def explain_norms(
    fun: Callable,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    batch_argnums: int | Sequence[int] = 1,
    keep_batch_dim: bool = True,
    prng_argnum: int | None = None,
) -> Callable[..., Report]:
    """Return a function of the arguments of `fun` that reports how `per_example_norms` and `clipped_grad` compute norms.  Nothing is run.

    Args:
      fun, argnums, has_aux, batch_argnums, keep_batch_dim, prng_argnum: as in `clipped_grad`.

    Returns:
      a function of arrays, or of `jax.ShapeDtypeStruct`s in their place, that returns a `Report`: print it, or read its `parameters`.

    Raises:
      TypeError, ValueError: as `clipped_grad`.
    """
    function = Function("explain_norms", fun, argnums, has_aux, batch_argnums, keep_batch_dim, prng_argnum)

    @functools.wraps(fun)
    def explained(*args: Any) -> Report:
        found = []

        def trace(args):
            found.append(function.batched(args)[1].traced())
            found[0].probed  # noqa: B018 (while its arrays may be used)
            return ()

        jax.eval_shape(trace, args)
        (traced,) = found
        parameters = []
        leaves = [(i, path, leaf) for i in function.parameters for path, leaf in jax.tree_util.tree_leaves_with_path(args[i])]
        for root, (i, path, leaf) in enumerate(leaves):
            name = f"{f'argument {i}' if len(function.parameters) > 1 else ''}{jax.tree_util.keystr(path)}" or f"argument {i}"
            uses, stored = [use for use in traced.probed.uses if use.root == root], root in traced.often
            how = f"{uses[0].way}{', kept' if root in traced.kept else ''}" if uses else "its gradient is 0"
            if stored:
                how = f"gradients of all examples: it is used {'in each step of a scan' if len(uses) == 1 else f'{len(uses)} times'}"
            ops, sources = tuple(use.op for use in uses), tuple(use.source for use in uses if use.source)
            parameters.append(Parameter(name, leaf.shape, str(leaf.dtype), ops, sources, how, stored))
        return Report(tuple(parameters))

    return explained
