"""The report of `check_op`: a row for each check, the rule that a failure points to, and the reason why a check was left out."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend.core import Jaxpr

NO_SPLITS = "no splits are declared"  # and fn names none
# Why a check is left out that another machine could make, and how to have it.
ONE_DEVICE = "one device only"
NO_FLATBUFFERS = "the package flatbuffers, which JAX needs for export, is not installed"
NARROW = "on CPUs XLA aborts the process if a shard_map over some axes sums 16-bit floats"
FIXES = {
    ONE_DEVICE: "XLA_FLAGS=--xla_force_host_platform_device_count=8 simulates 8 on a CPU, if it is set before jax starts",
    NO_FLATBUFFERS: "pip install flatbuffers",
    NARROW: "on a GPU, or in float32",
}
HINTS = FIXES | {NO_SPLITS: "pass `splits=`, or an operation of jaxext.extend as fn"}
WIDTH = 48  # of the longest name of a check


@dataclasses.dataclass(frozen=True)
class Row:
    """The outcome of a check: "passed", "failed" or "skipped", with the reason and the rule to fix.

    `complete` is False if the check applies but was left out, wholly or in part, and was not named in `skip`.
    """

    check: str
    outcome: str
    detail: str = ""
    rule: str = ""
    complete: bool = True

    def __str__(self) -> str:
        rule = f"\n{'':{WIDTH}}  -> {self.rule}" if self.rule else ""
        return f"{self.check:{WIDTH}}  {self.outcome:7}  {self.detail}".rstrip() + rule


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of `check_op`.  `str` formats it as a table, with a summary as its last line."""

    rows: tuple[Row, ...]

    @property
    def failures(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.outcome == "failed")

    @property
    def passed(self) -> bool:
        """Return whether at least one check passed and none failed.  Skipped checks do not count: see `complete`."""
        return not self.failures and any(row.outcome == "passed" for row in self.rows)

    @property
    def complete(self) -> bool:
        """Return whether it passed and no check that applies was left out, not even for some splits.

        Checks are left out if they need more devices, sizes that the mesh divides, the package flatbuffers, a platform for 16-bit floats,
        or a check that `skip` names.  The checks that `skip` names themselves do not count, nor do those that do not apply, such as
        derivatives of integers.
        """
        return self.passed and all(row.complete for row in self.rows)

    @property
    def summary(self) -> str:
        """The numbers of checks that passed, failed and were skipped, with the reasons, in one line."""
        outcomes = collections.Counter(row.outcome for row in self.rows)
        reasons = collections.Counter(row.detail for row in self.rows if row.outcome == "skipped")
        why = "; ".join(f"{n}: {reason}{f' ({HINTS[reason]})' if reason in HINTS else ''}" for reason, n in reasons.most_common())
        partly = [row for row in self.rows if row.outcome == "passed" and row.detail]
        notes = "".join(f"; partly: {note}" for note in dict.fromkeys(row.detail for row in partly))
        counts = f"{outcomes['passed']} passed, {outcomes['failed']} failed, {outcomes['skipped']} skipped"
        return f"check_op: {counts}{f' ({why})' if why else ''}{notes}"

    def __getitem__(self, check: str) -> Row:
        return {row.check: row for row in self.rows}[check]

    def __str__(self) -> str:
        return "\n".join([*map(str, self.rows), self.summary])

    def raise_if_failed(self, *, complete: bool = False) -> None:
        """Raise AssertionError with the failed rows, or with all rows if no check passed.  If `complete` is set, also raise if not
        `complete`.
        """
        if not self.passed or complete and not self.complete:
            missing = [row for row in self.rows if complete and not row.complete]
            raise AssertionError("\n".join(["check_op:", *map(str, self.failures or missing or self.rows), self.summary]))


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
    (r"(\w+): implementation '(\w+)' returned", "`run` of implementation '{1}' must return `call.shape` and `call.dtype` for {0}"),
    (r"`(\w+)` of implementation '(\w+)' returned", "`{0}` of implementation '{1}' must return what the message wants"),
    (r"couples the elements of (\w+)", "devices must not split {0}: name it in `unsharded` of extend.operation"),
    (r"maximum recursion depth", "a rule calls itself: an eager rule is xla.apply_primitive, not jit of p.bind"),
)  # fmt: skip


def missing(error: str) -> str | None:
    """The rule that an error message says is missing, if it is a known one."""
    return next((rule.format(*match.groups()) for pattern, rule in MISSING if (match := re.search(pattern, error))), None)


def wrong_implementation(function: Callable[[Any], Any], case: Any) -> str | None:
    """Return the implementations that the program computes wrong, if a primitive in it can tell: `primitive.blame(program, *arrays)`."""
    try:
        program = jax.make_jaxpr(function)(case)
        locate = next((found for primitive in _primitives(program.jaxpr) if (found := getattr(primitive, "blame", None))), None)
        return locate and locate(program, *jax.tree.leaves(case))
    except Exception:  # the program fails, too; its own rule is reported instead
        return None


def _primitives(jaxpr) -> Iterator:
    """Yield the primitives of a program and of those inside of it."""
    for eqn in jaxpr.eqns:
        yield eqn.primitive
        for param in jax.tree.leaves(tuple(eqn.params.values())):
            if isinstance(inside := getattr(param, "jaxpr", param), Jaxpr):
                yield from _primitives(inside)
