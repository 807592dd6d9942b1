"""A conformance kit: checks that a function of arrays composes with every JAX transformation, and names the rule that is missing.

`import jaxext` does not import it: use `from jaxext import testing`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxext._messages import array_named, format_value, refuse_traced
from jaxext.testing.check_report import Report, Row
from jaxext.testing.conformance import Case, is_float, judge
from jaxext.testing.cuts import HALVES, cuts_of, linear_of
from jaxext.testing.derivatives import DERIVATIVES
from jaxext.testing.programs import PROGRAMS, VMAP
from jaxext.testing.sharded import SHARDED, Split, mesh_of, splits_along

__all__ = ["CHECKS", "WITH_CALLBACKS", "Report", "Row", "Split", "check_op"]

_ALL = (*PROGRAMS, *VMAP, *DERIVATIVES, *HALVES, *SHARDED)
CHECKS: tuple[str, ...] = tuple(check.name for check in _ALL)
# For `skip`: the checks that no function with Python callbacks passes, such as one of a simulated CUDA kernel.
WITH_CALLBACKS: dict[str, str] = {
    name: "XLA stores or splits the program, which has no callbacks then"
    for name in CHECKS
    if "export" in name or "automatic mesh" in name or "over one axis of two" in name
}


def check_op(
    fn: Callable,
    reference: Callable,
    args: Sequence[ArrayLike],
    *,
    tolerance: float | None = None,
    linear: Sequence[int] | None = None,
    splits: Sequence[Split] | None = None,
    examples: Callable[[int], Sequence[ArrayLike]] | None = None,
    skip: Mapping[str, str] | None = None,
    devices: Sequence | None = None,
    show: bool = True,
) -> Report:
    """Check that T(fn)(*args) equals T(reference)(*args) for every JAX transformation T, and name the rule that is missing if not.

    `CHECKS` lists the transformations: eager, jit, vmap over every subset of the arguments, both modes of differentiation in every order,
    control flow, remat, export, donation, pmap, shard_map, automatic and explicit meshes, with the collectives of the compiled programs.
    The expected values are T(reference) in float64 on one device, computed in the simplest way (vmap as a loop).  The expected shapes and
    dtypes are the reference's own.  A check is skipped if its prerequisite did not pass: `jit` and `disable_jit` need `eager`, all others
    need `jit`, derivatives need `jvp` in forward mode and `vjp` in reverse mode, and Jacobians and meshes need `vmap`.

    Args:
      fn: the function under test.  It takes as many arrays as `args` has, and returns an array or a pytree of arrays.  Bind other
        arguments with `functools.partial`.
      reference: the same function in `jax.numpy` or `jax.lax`, differentiable wherever `fn` should be.
      args: example arrays, small and of order one.  Floating-point arrays are differentiated; full Jacobians need at most 128 of their
        elements.  Small integers in float32 have exact sums and allow `tolerance=0`.
      tolerance: the largest allowed error, relative to the largest element of each array.  Defaults to eps^(2/3) of its dtype (2.4e-5 in
        float32, 0.04 in bfloat16).
      linear: positions of the arguments in which fn is linear, for `jax.linear_transpose`.  Defaults to both operands for an operation of
        `extend.define`, itself or in `functools.partial` or `jax.jit`, and to none for other functions.
      splits: a sequence of `Split`: how fn is split over devices, besides the axis that vmap adds.  Defaults to the axes that devices may
        split of an operation of `jaxext.extend`, itself or in `functools.partial` or `jax.jit`.  Along these axes, and those of a split
        without collectives, fn of two halves, concatenated, must equal fn of the whole, also on one device.
      examples: `examples(i)` returns further arguments for vmap, of the same shapes and dtypes.  By default the elements of each argument
        are rolled by i, so an integer array of one element does not change.
      skip: name of a check -> reason for skipping it.  Checks that need it are skipped too, and the report is not `complete` unless `skip`
        names these as well.
      devices: defaults to all devices of this process.  Checks that need several are skipped if there is one:
        `XLA_FLAGS=--xla_force_host_platform_device_count=8`, set before jax starts, simulates 8 on a CPU.
      show: whether to print each row as soon as it is known.  If XLA aborts the process, the check after the last printed row caused it.
        After `scan`, it may be any check that is compiled together with it (cond, vmap, derivatives).

    Returns:
      A `Report`: `passed`, `rows`, and a table as its `str`, whose last line says which checks were left out and why.  `complete` tells
      whether this machine could run all checks: those of export need the package flatbuffers, those of meshes several devices.

    Raises:
      TypeError, ValueError: an argument or a name is invalid, or the reference itself fails.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jaxext import testing
      >>> report = testing.check_op(jnp.dot, lambda x, y: (x * y).sum(), (jnp.arange(3.0), jnp.ones(3)), linear=(0, 1), show=False)
      >>> report.passed
      True
    """
    options = dict(tolerance=tolerance, linear=linear, splits=splits, examples=examples, skip=skip, devices=devices, show=show)
    refuse_traced("check_op", **options)
    case = _case(fn, reference, args, linear, splits, examples, _devices(devices))
    if not isinstance(skip, Mapping | None):
        raise TypeError(f"check_op: skip is {format_value(skip)}, want a mapping of checks to reasons")
    skip = dict(skip or {})
    if unknown := set(skip) - set(CHECKS):
        raise ValueError(f"check_op: skip names {sorted(unknown)}, want names of testing.CHECKS")
    if tolerance is not None and not (isinstance(tolerance, int | float | np.number | jax.Array) and np.ndim(tolerance) == 0):
        raise TypeError(f"check_op: tolerance is {format_value(tolerance)}, want None or a number")
    if tolerance is not None and not tolerance >= 0:
        raise ValueError(f"check_op: tolerance is {format_value(tolerance)}, want None or a number of at least 0")
    rows = []
    for row in judge(_ALL, case, reference, tolerance, skip):
        rows.append(row)
        if show:
            print(row, flush=True)
    report = Report(tuple(rows))
    if show:
        print(report.summary, flush=True)
    return report


def _case(fn, reference, args, linear, splits, examples, devices) -> Case:
    _check_sequence("args", args, object)
    _check_sequence("linear", () if linear is None else linear, SupportsIndex)
    _check_sequence("splits", () if splits is None else splits, Split)
    for name, function in (("fn", fn), ("reference", reference), *(() if examples is None else (("examples", examples),))):
        if not callable(function):
            raise TypeError(f"check_op: {name} is {format_value(function)}, want a function")
    args = tuple(array_named("check_op", f"args[{k}]", x) for k, x in enumerate(args))
    refuse_traced("check_op", **{f"args[{k}]": x for k, x in enumerate(args)})
    if not args:
        raise ValueError("check_op: args is empty, want one array or more")
    if keys := [k for k, x in enumerate(args) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]:
        raise TypeError(f"check_op: args has random keys at {keys}, want arrays of numbers: bind keys by functools.partial")
    linear = linear_of(fn, args) if linear is None else linear
    if bad := [k for k in linear if not (k in range(len(args)) and is_float(args[k]))]:
        raise ValueError(f"check_op: linear has {format_value(bad)}, want positions of floating-point arguments among {len(args)}")
    program, result = jax.make_jaxpr(reference, return_shape=True)(*args)
    for x in program.consts:
        refuse_traced("check_op", **{"a number that reference closes over": x})
    mesh = mesh_of(devices)
    own = cuts_of(fn, args, result)
    splits, unsplit = splits_along(own, result, mesh, args) if splits is None else (tuple(splits), "")
    for split in splits:
        split.fit(args, result, mesh)
    several = (*(cut for split in splits for cut in split.cuts(result)), *own)
    cuts = {(cut.args, cut.result): cut for cut in several}.values()
    uncut = [cut.name for cut in cuts if cut.size(args) < 2]
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
        splits=splits,
        devices=devices,
        cuts=tuple(cut for cut in cuts if cut.size(args) >= 2),
        uncut=f"not along {', '.join(uncut)}: want 2 elements or more" if uncut else "",
        unsplit=unsplit,
    )


def _devices(given) -> tuple:
    given = jax.local_devices() if given is None else given
    devices = tuple(given) if isinstance(given, Iterable) else None
    if devices is None or not all(isinstance(one, jax.Device) for one in devices):
        raise TypeError(f"check_op: devices is {format_value(given)}, want a sequence of jax.Device")
    if not devices:
        raise ValueError(f"check_op: devices is {format_value(given)}, want one device or more, or None for all of this process")
    return devices


def _check_sequence(name: str, given, kind: type) -> None:
    if not isinstance(given, Sequence) or not all(isinstance(one, kind) for one in given):
        of = "" if kind is object else f" of {kind.__name__}"
        raise TypeError(f"check_op: {name} is {format_value(given)}, want a sequence{of}")


def _stacked(args, examples, n) -> tuple:
    """Each argument stacked over n examples, the first of which is `args`."""
    several = [args]
    for i in range(1, n):
        example = (_rolled(args) if examples is None else examples)(i)
        if not isinstance(example, Iterable):
            raise TypeError(f"check_op: examples({i}) is {format_value(example)}, want a sequence of arrays, as args is")
        several.append(tuple(map(jnp.asarray, example)))
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


def __dir__() -> list[str]:
    return __all__
