"""The conformance kit: does a function of arrays compose with every transformation of JAX, and if not, which rule is missing.

Not imported by `import jaxext`: `from jaxext import testing`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxext._conformance import Case, Row, is_float, judge
from jaxext._conformance_derivatives import DERIVATIVES
from jaxext._conformance_layouts import Split, mesh_of
from jaxext._conformance_programs import PROGRAMS
from jaxext._conformance_sharded import SHARDED
from jaxext._conformance_vmap import VMAP

__all__ = ["CHECKS", "Report", "Row", "Split", "check_op"]

_ALL = (*PROGRAMS, *VMAP, *DERIVATIVES, *SHARDED)
CHECKS: tuple[str, ...] = tuple(check.name for check in _ALL)
_WIDTH = max(map(len, CHECKS))


@dataclasses.dataclass(frozen=True)
class Report:
    """What `check_op` found; `str` of it is a table in plain text."""

    rows: tuple[Row, ...]

    @property
    def failures(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.outcome == "failed")

    @property
    def passed(self) -> bool:
        """Nothing failed; what was skipped says so in its row."""
        return not self.failures

    def __getitem__(self, check: str) -> Row:
        return next(row for row in self.rows if row.check == check)

    def __str__(self) -> str:
        return "\n".join(map(_line, self.rows))

    def raise_if_failed(self) -> None:
        """AssertionError with the rows that failed."""
        if self.failures:
            raise AssertionError("\n".join(["check_op:", *map(_line, self.failures)]))


def _line(row: Row) -> str:
    rule = f"\n{'':{_WIDTH}}  -> {row.rule}" if row.rule else ""
    return f"{row.check:{_WIDTH}}  {row.outcome:7}  {row.detail}".rstrip() + rule


def check_op(
    fn: Callable,
    reference: Callable,
    args: Sequence[ArrayLike],
    *,
    tolerance: float | None = None,
    linear: Sequence[int] = (),
    splits: Sequence[Split] = (),
    examples: Callable[[int], Sequence[ArrayLike]] | None = None,
    skip: Mapping[str, str] | None = None,
    devices: Sequence | None = None,
    show: bool = True,
) -> Report:
    """Check that T(fn)(*args) is T(reference)(*args) for every transformation T of JAX, and name the rule that is missing where it is not.

    T is each name in `CHECKS`: eager, jit, vmap over every subset of the arguments, both modes of differentiation in every order, control
    flow, remat, export, donation, pmap, shard_map, automatic and explicit meshes, with the collectives that the compiled programs hold.
    The truth is T(reference) in float64 on one device, each check in the plainest way (vmap as a loop); shapes and dtypes are the
    reference's own.  A check whose prerequisite (say, `vmap` of `jacfwd`) did not pass is skipped.

    Args:
      fn: the function under test, of as many arrays as `args` has; returns an array or a tree of arrays.  Bind all else by
        `functools.partial`.
      reference: the same function in `jax.numpy` or `jax.lax`, differentiable wherever `fn` should be.
      args: example arrays, small and of order one.  Floating-point ones are differentiated; full Jacobians need at most 128 of their
        elements.  Small integers in float32, of which all sums are exact, allow `tolerance=0`.
      tolerance: the largest error allowed, relative to the largest element of each array; by default eps^(2/3) of its dtype (2.4e-5 in
        float32, 0.04 in bfloat16).
      linear: the positions of arguments in each of which fn is linear, for `jax.linear_transpose`.
      splits: how fn is split over devices, beside the axis that vmap adds (`Split`).
      examples: `examples(i)` gives other arguments for vmap, of the same shapes and dtypes; by default the elements of each rolled by i.
      skip: the name of a check -> why it is not made.
      devices: by default all of this process; with one only, the checks of several are skipped.
      show: print each row as soon as it is known; so that, where XLA ends the process, the check after the last row did it.

    Returns:
      A `Report`: `passed`, `rows`, and a table as its `str`.

    Raises:
      TypeError, ValueError: arguments or names that do not fit, or a reference that fails itself.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxext import testing
      >>> report = testing.check_op(jnp.dot, lambda x, y: (x * y).sum(), (jnp.arange(3.0), jnp.ones(3)), linear=(0, 1), show=False)
      >>> report.passed
      True
    """
    case = _case(fn, reference, args, linear, splits, examples, tuple(devices or jax.local_devices()))
    skip = dict(skip or {})
    if unknown := set(skip) - set(CHECKS):
        raise ValueError(f"check_op: skip names {sorted(unknown)}, want names of testing.CHECKS")
    rows = []
    for row in judge(_ALL, case, reference, tolerance, skip):
        rows.append(row)
        if show:
            print(_line(row), flush=True)
    return Report(tuple(rows))


def _case(fn, reference, args, linear, splits, examples, devices) -> Case:
    args = tuple(map(jnp.asarray, args))
    if not args:
        raise ValueError("check_op: args is empty, want one array or more")
    for split in splits:
        if len(split.args) != len(args):
            raise ValueError(f"check_op: a split has {len(split.args)} specs in `args`, want {len(args)}, one for each argument")
    if bad := [k for k in linear if not (k in range(len(args)) and is_float(args[k]))]:
        raise ValueError(f"check_op: linear has {bad}, want positions of floating-point arguments among {len(args)}")
    results = jax.tree.leaves(jax.eval_shape(reference, *args))
    random = np.random.default_rng(0)

    def direction(x):
        return jnp.asarray(random.integers(-2, 3, x.shape)).astype(x.dtype)

    n = max(4, mesh_of(devices).size)
    return Case(
        fn=fn,
        args=args,
        examples=_stacked(args, examples, n),
        tangents=tuple(map(direction, args)),
        cotangents=tuple(map(direction, results)),
        linear=tuple(linear),
        splits=tuple(splits),
        devices=devices,
    )


def _stacked(args, examples, n) -> tuple:
    """Each argument of n examples; the first are `args`."""
    several = [args, *(tuple(map(jnp.asarray, (examples or _rolled(args))(i))) for i in range(1, n))]
    kinds = {tuple((x.shape, x.dtype) for x in example) for example in several}
    if len(kinds) > 1:
        raise ValueError(f"check_op: examples are of several shapes or dtypes: {kinds}, want those of args")
    return tuple(map(jnp.stack, zip(*several, strict=True)))


def _rolled(args) -> Callable:
    """The same elements elsewhere, so in the same domain; of which there is but one, a smaller one."""

    def example(i):
        return [
            jnp.roll(x.reshape(-1), i).reshape(x.shape) if x.size != 1 or not is_float(x) else (x * (1 - i / 16)).astype(x.dtype)
            for x in args
        ]

    return example
