"""The conformance kit: checks that a function of arrays composes with every JAX transformation, and names the rule that is missing.

Not imported by `import jaxext`: `from jaxext import testing`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxext.testing.conformance import Case, Row, is_float, judge
from jaxext.testing.derivatives import DERIVATIVES
from jaxext.testing.layouts import Split, mesh_of
from jaxext.testing.programs import PROGRAMS
from jaxext.testing.sharded import SHARDED
from jaxext.testing.vmapped import VMAP

__all__ = ["CHECKS", "Report", "Row", "Split", "check_op"]

_ALL = (*PROGRAMS, *VMAP, *DERIVATIVES, *SHARDED)
CHECKS: tuple[str, ...] = tuple(check.name for check in _ALL)
_WIDTH = max(map(len, CHECKS))


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of `check_op`.  `str` formats it as a table."""

    rows: tuple[Row, ...]

    @property
    def failures(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.outcome == "failed")

    @property
    def passed(self) -> bool:
        """Whether at least one check passed and none failed.  Skipped checks do not count."""
        return not self.failures and any(row.outcome == "passed" for row in self.rows)

    def __getitem__(self, check: str) -> Row:
        return {row.check: row for row in self.rows}[check]

    def __str__(self) -> str:
        return "\n".join(map(_line, self.rows))

    def raise_if_failed(self) -> None:
        """Raise AssertionError with the failed rows, or with all rows if nothing was checked."""
        if not self.passed:
            raise AssertionError("\n".join(["check_op:", *map(_line, self.failures or self.rows)]))


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
    """Check that T(fn)(*args) equals T(reference)(*args) for every JAX transformation T, and name the rule that is missing if not.

    `CHECKS` lists the transformations: eager, jit, vmap over every subset of the arguments, both modes of differentiation in every order,
    control flow, remat, export, donation, pmap, shard_map, automatic and explicit meshes, with the collectives of the compiled programs.
    The expected values are T(reference) in float64 on one device, computed in the simplest way (vmap as a loop).  The expected shapes and
    dtypes are the reference's own.  A check is skipped if its prerequisite (`jacfwd` for its `vmap`) did not pass.

    Args:
      fn: the function under test.  It takes as many arrays as `args` has, and returns an array or a pytree of arrays.  Bind other
        arguments with `functools.partial`.
      reference: the same function in `jax.numpy` or `jax.lax`, differentiable wherever `fn` should be.
      args: example arrays, small and of order one.  Floating-point arrays are differentiated; full Jacobians need at most 128 of their
        elements.  Small integers in float32 have exact sums and allow `tolerance=0`.
      tolerance: the largest allowed error, relative to the largest element of each array.  Defaults to eps^(2/3) of its dtype (2.4e-5 in
        float32, 0.04 in bfloat16).
      linear: positions of the arguments in which fn is linear, for `jax.linear_transpose`.
      splits: how fn is split over devices, besides the axis that vmap adds (`Split`).
      examples: `examples(i)` returns further arguments for vmap, of the same shapes and dtypes.  By default the elements of each argument
        are rolled by i, so an integer array of one element does not change.
      skip: name of a check -> reason for skipping it.
      devices: defaults to all devices of this process.  Checks that need several are skipped if there is one.
      show: print each row as soon as it is known.  If XLA aborts the process, the check after the last printed row caused it.  If that is
        `scan`, it may be any check that is compiled with it (cond, vmap, derivatives).

    Returns:
      A `Report`: `passed`, `rows`, and a table as its `str`.

    Raises:
      TypeError, ValueError: an argument or a name is invalid, or the reference itself fails.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jaxext import testing
      >>> report = testing.check_op(jnp.dot, lambda x, y: (x * y).sum(), (jnp.arange(3.0), jnp.ones(3)), linear=(0, 1), show=False)
      >>> report.passed
      True
    """
    case = _case(fn, reference, args, linear, splits, examples, tuple(jax.local_devices() if devices is None else devices))
    if not isinstance(skip or {}, Mapping):
        raise TypeError(f"check_op: skip is {skip!r}, want a mapping of checks to reasons")
    skip = dict(skip or {})
    if unknown := set(skip) - set(CHECKS):
        raise ValueError(f"check_op: skip names {sorted(unknown)}, want names of testing.CHECKS")
    if tolerance is not None and not tolerance >= 0:
        raise ValueError(f"check_op: tolerance is {tolerance}, want none or a number that is not negative")
    rows = []
    for row in judge(_ALL, case, reference, tolerance, skip):
        rows.append(row)
        if show:
            print(_line(row), flush=True)
    return Report(tuple(rows))


def _case(fn, reference, args, linear, splits, examples, devices) -> Case:
    _of_all("args", args, object)
    _of_all("linear", linear, SupportsIndex)
    _of_all("splits", splits, Split)
    args = tuple(map(jnp.asarray, args))
    if not args:
        raise ValueError("check_op: args is empty, want one array or more")
    if keys := [k for k, x in enumerate(args) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]:
        raise TypeError(f"check_op: args has random keys at {keys}, want arrays of numbers: bind keys by functools.partial")
    if bad := [k for k in linear if not (k in range(len(args)) and is_float(args[k]))]:
        raise ValueError(f"check_op: linear has {bad}, want positions of floating-point arguments among {len(args)}")
    result, mesh = jax.eval_shape(reference, *args), mesh_of(devices)
    for split in splits:
        split.fit(args, result, mesh)
    random = np.random.default_rng(0)

    def direction(x):
        return jnp.asarray(random.choice([-2, -1, 1, 2], x.shape)).astype(x.dtype)

    n = max(4, mesh.size)
    return Case(
        fn=fn,
        args=args,
        examples=_stacked(args, examples, n),
        tangents=tuple(map(direction, args)),
        cotangents=tuple(map(direction, jax.tree.leaves(result))),
        linear=tuple(linear),
        splits=tuple(splits),
        devices=devices,
    )


def _of_all(name: str, given, kind: type) -> None:
    if not isinstance(given, Sequence) or not all(isinstance(one, kind) for one in given):
        raise TypeError(f"check_op: {name} is {given!r}, want a sequence" + (f" of {kind.__name__}" if kind is not object else ""))


def _stacked(args, examples, n) -> tuple:
    """Each argument stacked over n examples, the first of which is `args`."""
    several = [args, *(tuple(map(jnp.asarray, (examples or _rolled(args))(i))) for i in range(1, n))]
    kinds = {tuple((x.shape, x.dtype) for x in example) for example in several}
    if len(kinds) > 1:
        raise ValueError(f"check_op: examples are of several shapes or dtypes: {kinds}, want those of args")
    return tuple(map(jnp.stack, zip(*several, strict=True)))


def _rolled(args) -> Callable:
    """Example i: the elements of each argument rolled by i, so within the same domain, or scaled down if rolling changes nothing."""

    def other(x, i):
        rolled = jnp.roll(x.reshape(-1), i).reshape(x.shape)
        return (x * (1 - i / 16)).astype(x.dtype) if is_float(x) and jnp.array_equal(rolled, x) else rolled

    return lambda i: [other(x, i) for x in args]
