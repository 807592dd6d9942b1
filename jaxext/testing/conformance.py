"""Judges a function by a list of checks: the truth, the comparison, and the rule that a failure points to.

A check computes a transformed function in two ways:

    want(case)      a tree of arrays, by the simplest transformations
    traced(case)    the same by the transformation under test (default: `want`); all of these are one jitted program
    run(case)       the same by a program of its own, in place of `traced`

The truth is `want` of the reference, on one device, in float64.  The expected shapes and dtypes are those of the reference with the
arguments' own dtypes.  A check is skipped if its prerequisites did not pass, since a failure would not be due to its own rule.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxext.testing.check_report import FIXES, NARROW, NO_FLATBUFFERS, NO_SPLITS, ONE_DEVICE, Row, missing, wrong_implementation

Tree = Any
NEEDS = "needs"  # begins the reason of a check whose prerequisite did not pass

# Compilation dominates the cost: a program of many results runs once, so it is compiled without optimization.
QUICKLY: dict[str, Any] = {"xla_backend_optimization_level": 0}


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["args", "examples", "tangents", "cotangents"],
    meta_fields=["fn", "linear", "splits", "devices", "cuts", "uncut", "unsplit"],
)
@dataclasses.dataclass(frozen=True)
class Case:
    """A function and all arrays with which checks call it.  It is a pytree of these arrays, so that programs can take it as an argument.

    `examples` are stacked arguments, the first of which is `args`.  `tangents` belong to `args`, and `cotangents` to the arrays of the
    result, in the order of its leaves.  `cuts` are the axes along which fn is independent, and `splits` its splits over devices; `uncut`
    and `unsplit` say which are left out, and why.
    """

    fn: Callable
    args: tuple
    examples: tuple
    tangents: tuple
    cotangents: tuple
    linear: tuple[int, ...]
    splits: tuple
    devices: tuple
    cuts: tuple = ()
    uncut: str = ""
    unsplit: str = ""

    @property
    def floats(self) -> tuple[int, ...]:
        """The arguments that can be differentiated."""
        return tuple(k for k, x in enumerate(self.args) if is_float(x))

    def lacks(self, need: str) -> str | None:
        """Return the reason why the case lacks what a check needs, or None.  A need that is not listed is the name of another check."""
        absent, why = {
            "floats": (not self.floats or not any(map(is_float, self.cotangents)), "no floating-point argument or result"),
            "small": (sum(self.args[k].size for k in self.floats) > 128, "more than 128 floating-point elements in the arguments"),
            "linear": (not self.linear, "no argument is declared linear"),
            "splits": (not self.splits, self.unsplit or NO_SPLITS),
            "cuts": (not self.cuts, self.uncut or ("no split is without collectives and `part`" if self.splits else NO_SPLITS)),
            "wide": (self.devices[0].platform == "cpu" and any(self.args[k].dtype.itemsize < 4 for k in self.floats), NARROW),
            "devices": (len(self.devices) < 2, ONE_DEVICE),
            "flatbuffers": (find_spec("flatbuffers") is None, NO_FLATBUFFERS),
        }.get(need, (False, None))
        return why if absent else None


@dataclasses.dataclass(frozen=True)
class Check:
    """A check.  `rule` is the cause that a failure points to.  `needs` names facts of the case (`Case.lacks`) and checks that must pass."""

    name: str
    want: Callable[[Case], Tree]
    rule: str | Callable[[Case], str]
    needs: tuple[str, ...] = ()
    traced: Callable[[Case], Tree] | None = None
    run: Callable[[Case], Tree] | None = None
    wrong: str = ""  # the cause of a wrong result, if it is not `rule`
    partial: bool = False  # `run` leaves out some of the labels of `want`
    note: Callable[[Case], str] = lambda case: ""  # what it leaves out of a case


class Mismatch(Exception):
    """A result differs from the truth.  `rule` replaces the check's own rule."""

    def __init__(self, detail: str, rule: str | None = None):
        super().__init__(detail)
        self.rule = rule


def is_float(x) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)


def judge(checks: Sequence[Check], case: Case, reference: Callable, tolerance: float | None, skip: Mapping[str, str]) -> Iterator[Row]:
    """Yield a row for each check, in order."""
    skipped: dict[str, str] = {}  # check -> why
    unnamed = {name: f"{NEEDS} {name}, which was skipped" for name in skip}  # why those that need a check of `skip` are left out
    for check in checks:
        reasons = skip.get(check.name), *map(case.lacks, check.needs), *(unnamed.get(need) or skipped.get(need) for need in check.needs)
        if reason := next(filter(None, reasons), None):
            skipped[check.name] = reason
    possible = [check for check in checks if check.name not in skipped]
    applies = {*FIXES, *unnamed.values(), case.unsplit, case.uncut} - {""}  # reasons to leave out what another call could check
    truth, structs = _truth(possible, case, reference)
    got = None
    for check in checks:
        if reason := next(filter(None, map(skipped.get, (check.name, *check.needs))), None):
            skipped[check.name] = reason
            yield Row(check.name, "skipped", reason, complete=reason not in applies)
            continue
        if got is None and check.run is None:
            got = _together({check.name: check.traced or check.want for check in possible if check.run is None}, case)
        row = _verdict(check, case, (got or {}).get(check.name), truth[check.want], structs[check.want], tolerance)
        if row.outcome == "failed":
            skipped |= {other.name: f"{NEEDS} {check.name}, which failed" for other in possible if check.name in other.needs}
        yield row


def _verdict(check, case, got, want, structs, tolerance) -> Row:
    """`got` is the result of a traced check, or the exception that tracing it raised."""
    try:
        if isinstance(got, Exception):
            raise got
        got = check.run(case) if check.run else got
        if check.partial:
            if not got:
                return Row(check.name, "skipped", check.note(case) or "no layout is such", complete=not check.note(case))
            want, structs = ({label: tree[label] for label in got} for tree in (want, structs))
        compare(got, want, structs, tolerance)
    except Exception as error:
        where = "".join(f"{label}: " for label in _labels(error))
        own = check.rule if isinstance(check.rule, str) else check.rule(case)
        if isinstance(error, Mismatch):
            implementation = wrong_implementation(check.traced or check.want, case)
            return Row(check.name, "failed", where + str(error), implementation or error.rule or check.wrong or own)
        text = " ".join(str(error).split())
        return Row(check.name, "failed", f"{where}{type(error).__name__}: {text[:200]}", missing(text) or own)
    return Row(check.name, "passed", check.note(case), complete=not check.note(case))


def _labels(error: Exception) -> list[str]:
    """The labels that `each` added; jax's own notes have several lines."""
    return [note for note in getattr(error, "__notes__", ()) if "\n" not in note]


def _truth(checks, case, reference) -> tuple[dict, dict]:
    """Return for each `want` the values in float64, and the shapes and dtypes."""
    first = {check.want: check.name for check in reversed(checks)}
    wants = tuple((want, first[want]) for want in dict.fromkeys(check.want for check in checks))
    case = dataclasses.replace(case, fn=reference)
    everything = _everything(wants)
    fails, fix = "itself fails", "fix it"
    try:
        structs = jax.eval_shape(everything, case)
        fails, fix = "fails in float64", "its dtypes must follow those of its arguments"
        with jax.enable_x64(True):
            values = everything(jax.tree.map(_widen, case))
    except Exception as error:
        raise _unfit(fails, (_labels(error) or ["eager"])[-1], fix) from error
    for _, name in wants:
        if any(np.isnan(x).any() for x in jax.tree.leaves(values[name])):
            raise _unfit("gives NaN", name, "give `args` and `examples` in its domain")
    return {want: values[name] for want, name in wants}, {want: structs[name] for want, name in wants}


def _unfit(fails: str, name: str, fix: str) -> ValueError:
    return ValueError(f"check_op: `reference` {fails} in {name!r}: {fix}, or say why in skip={{{name!r}: ...}}")


@functools.cache
def _everything(wants: tuple[tuple[Callable, str], ...]) -> Callable:
    """Several functions as one jitted function, cached, so that a reference that is used several times is compiled once."""
    return jax.jit(lambda case: each({name: functools.partial(want, case) for want, name in wants}), compiler_options=QUICKLY)


def _widen(x) -> np.ndarray:
    x = np.asarray(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return x.astype(np.complex128)
    return x.astype(np.float64) if is_float(x) else x


def _together(functions: Mapping[str, Callable], case: Case) -> dict[str, Tree]:
    """The result of each function, or the exception that it raised.  They are one program, because compilation dominates the cost."""

    def jitted(functions):
        raised: dict[str, Exception] = {}

        def everything(case):
            results = {}
            for name, function in functions.items():
                try:
                    results[name] = function(case)
                except Exception as error:
                    raised[name] = error
            return results

        return jax.block_until_ready(jax.jit(everything, compiler_options=QUICKLY)(case)) | raised

    try:
        return jitted(functions)
    except Exception as error:  # lowering, compiling or running failed: run the functions one by one to find which
        if len(functions) <= 1:
            return dict.fromkeys(functions, error)
        return {name: result for key, f in functions.items() for name, result in _together({key: f}, case).items()}


def each(functions: Mapping[str, Callable[[], Tree]]) -> dict[str, Tree]:
    """The results by label.  An exception gets the label as a note."""
    results = {}
    for label, function in functions.items():
        try:
            results[label] = function()
        except Exception as error:
            error.add_note(label)
            raise
    return results


def compare(got: Tree, want: Tree, structs: Tree, tolerance: float | None) -> None:
    """Compare structure, shape, dtype, finiteness and values of each device's part.  Raises Mismatch.

    The allowed error is `tolerance` (default: eps^(2/3) of the dtype) times the largest element of the array.  If the truth of an array is
    zero up to rounding, the largest element of the tree is used instead.
    """
    if jax.tree.structure(got) != jax.tree.structure(want):
        raise Mismatch(f"the result is a {jax.tree.structure(got)}, want {jax.tree.structure(want)}")
    leaves = list(map(np.asarray, jax.tree.leaves(want)))
    largest = max((_largest(x) for x in leaves), default=0.0)
    for (path, g), w, struct in zip(jax.tree_util.tree_leaves_with_path(got), leaves, jax.tree.leaves(structs), strict=True):
        where = jax.tree_util.keystr(path)
        g = jnp.asarray(g) if isinstance(g, (bool, int, float, complex)) else g
        for what, has, wanted in (("shape", g.shape, struct.shape), ("dtype", g.dtype, struct.dtype)):
            if has != wanted:
                raise Mismatch(f"{where} has {what} {has}, want {wanted}", f"the {what} rule (p.def_abstract_eval), or the implementation")
        scale = _largest(w) if _largest(w) > 1e-10 * largest else largest
        for shard in g.addressable_shards if isinstance(g, jax.Array) else (None,):
            part, wanted = (g, w) if shard is None else (shard.data, w[shard.index])
            _compare_array(where, np.asarray(part), wanted, scale, tolerance)


def _compare_array(where, g, w, scale, tolerance) -> None:
    if not jnp.issubdtype(g.dtype, jnp.inexact):
        if not np.array_equal(g, w):
            raise Mismatch(f"{where} differs in {np.sum(g != w)} of {g.size} elements")
        return
    finite = np.isfinite(w)
    if not np.array_equal(g[~finite], w[~finite].astype(g.dtype), equal_nan=True) or not np.isfinite(g[finite]).all():
        raise Mismatch(f"{where} is not finite where the truth is, or the reverse", "the implementation gives NaN or infinity")
    eps, floor = float(jnp.finfo(g.dtype).eps), 0.0
    if tolerance is None:
        tolerance, floor = eps ** (2 / 3), 64 * eps  # elements that are zero in the truth have rounding errors too
    error = np.abs(g[finite].astype(w.dtype) - w[finite])
    if not error.max(initial=0) <= tolerance * scale + floor:
        raise Mismatch(f"{where} is off by {error.max():.3g} (allowed: {tolerance * scale:.3g}; largest element: {scale:.3g})")


def _largest(x: np.ndarray) -> float:
    return float(np.max(np.abs(x), where=np.isfinite(x), initial=0)) if x.dtype != bool else 1.0
