"""`doctor`: reads a function's program, forwards and backwards, and names where lax's own products are wrong, crash or are slow.

Faults are looked for in the program as it is, and slowness in the same program inside `in_place_of_lax`: what is slow there is by
definition what jaxext would not compute as lax does, so the doctor and `explain` agree.  Of the program's own products of jaxext, those are
named that XLA's CPU compiler gets wrong as it does lax's.
"""

from __future__ import annotations

import collections
import dataclasses
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from jaxext._messages import PAGES, counted, format_value
from jaxext.core.choose import replacing_lax
from jaxext.core.form import Form, owner
from jaxext.hazards.compare import Measured, compare
from jaxext.hazards.fused_reduction import FusedReductions, fused_in_own
from jaxext.hazards.known_hazards import Hazard, found_in
from jaxext.hazards.lax_products import PRODUCTS, Equation, Place, Planned, place
from jaxext.hazards.origins import Origins
from jaxext.hazards.split_axes import ASKED, Splits, product_splits
from jaxext.lax.dispatch import in_place_of_lax
from jaxext.tuning.explain import WIDTH, Stored, chosen, known_platform
from jaxext.tuning.tool import Tool
from jaxext.tuning.tune import with_gradient
from jaxext.tuning.walk import Step, walk

ORDER = ("wrong", "crash", "slow", "note")
UNKNOWN = "XLA could not be asked how it splits arrays, so issues of several devices were not looked for."
ALIKE = 5  # notes of one kind that are listed
LISTED = 3  # constants that are named
NO_FLOATS = "no argument is a floating-point array"


@dataclasses.dataclass(frozen=True)
class Finding:
    """An issue at a place of the program.

    Attributes:
      issue: its name.
      what: "wrong", "crash", "slow" or "note".
      source: the line that made the operation: file, line and function.
      scope: the names of the model's modules around it, and of jax's transformations.
      where: "forward" or "backward".
      operation: operands with their shapes, and the mesh axes that split them, and the result.
      times: how often the program runs it.
      why: the reason, in a sentence or two.
      since: the versions of jax that have it, and whether that was tested.
      cost: what it costs, estimated.
      measured: milliseconds of lax's operation and of jaxext's on this machine, if they were asked for.
      fix: what to do about it.
      page: the address of its section of the documentation.
    """

    issue: str
    what: str
    source: str
    scope: str
    where: str
    operation: str
    times: int
    why: str
    since: str
    cost: str
    measured: Measured | None
    fix: str
    page: str


@dataclasses.dataclass(frozen=True)
class Report:
    """The report of what `doctor` found, the worst first.  `ok` says that nothing is wrong or crashes; `str` gives a text.

    `devices` says which mesh was assumed, and of how many arguments no sharding is known.
    `remarks` say how the function was read: which gradient, or why none, and which operands are constants of the program.
    `refusal` is the error of jaxext if the function cannot be traced inside `in_place_of_lax`; then slow operations are not known.
    """

    platform: str
    jax: str  # its version
    read: str  # "forward", "forward and backward", or "as it stands" if the function computes gradients itself
    operations: int  # of lax, in the program
    findings: tuple[Finding, ...]
    devices: str = "one device"  # or the mesh, with the sizes of its axes
    refusal: str | None = None
    remarks: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not any(finding.what in ("wrong", "crash") for finding in self.findings)

    def __str__(self) -> str:
        counts = collections.Counter(finding.what for finding in self.findings)
        found = ", ".join(f"{counts[what]} {what}" for what in ORDER if counts[what]) or "no issue"
        head = f"{counted(self.operations, 'operation')} of lax on {self.platform}, {self.devices}, {self.read}, jax {self.jax}: {found}"
        by_issue: dict[str, list[Finding]] = {}
        for finding in self.findings:
            by_issue.setdefault(finding.issue, []).append(finding)
        head += "".join(f"\n{textwrap.fill(remark, WIDTH, break_on_hyphens=False)}" for remark in self.remarks)
        head += f"\nslow operations are not known, because in_place_of_lax() fails with {self.refusal}" if self.refusal else ""
        return "\n\n".join([head, *("\n".join(_section(findings)) for findings in by_issue.values())])


def _section(findings: Sequence[Finding]) -> Iterator[str]:
    first = findings[0]
    yield f"{first.what.upper()}: {first.issue} ({first.since})"
    yield textwrap.fill(first.why, WIDTH, initial_indent="  ", subsequent_indent="  ")
    yield f"  Fix: {first.fix}."
    yield f"  See {first.page}"
    listed = findings if first.what != "note" else findings[:ALIKE]
    for each in listed:
        times = f", {each.times} times" if each.times > 1 else ""
        yield f"  - {each.source}, {each.where}{times}"
        yield f"      {each.operation}"
        more = [each.cost, str(each.measured or "")]
        if any(more):
            yield f"      {'; '.join(filter(None, more))}"
    if len(listed) < len(findings):
        yield f"  - and {len(findings) - len(listed)} more"


def doctor(fun: Callable, *, platform: str | None = None, gradients: bool | None = None, measure: bool = False) -> Callable[..., Report]:
    """Return a function of the arguments of `fun` that names the known faults of lax's own operations in it, each with a fix.

    A fault is an operation that is wrong, crashes or is slow.  Faults that jaxext's operations share with lax's on CPUs are named too,
    because XLA computes both.  The function is traced, not run.

    Args:
      fun: a function of arrays, or pytrees of them, of any shapes and dtypes.
      platform: "cpu", "cuda", "rocm" or "tpu".  None is the platform of the default backend.
      gradients: whether to read the gradient in all floating-point arguments too.  None: if the function returns one real number.
        Arrays that it closes over are constants, in which no gradient is read.  A training step that computes gradients itself is read
        as it stands.
      measure: whether to time lax's operation and jaxext's, alone or in a loop of their own, wherever lax's is slow on one device.

    Returns:
      a function that takes the arguments of `fun`, or `jax.ShapeDtypeStruct`s in place of arrays, with their shardings, and returns a
      `Report`: print it, read its `findings`, or assert that it is `ok`.  A sharding may be on a `jax.sharding.AbstractMesh`, of devices
      that need not be here.  Leaves of the arguments that are no arrays are static.  Times that are measured are in milliseconds.

    Examples:
      >>> loss = lambda w, x: jax.lax.conv(x, w, (1, 1), "SAME").sum()
      >>> doctor(loss, platform="cpu")(jnp.ones((4, 3, 3, 3)), jnp.ones((8, 3, 16, 16))).ok
      True

    Raises:
      TypeError: `fun` is not callable, or `gradients` is not True, False or None.
      ValueError: `platform` is unknown; the arguments are split over several meshes; or `measure` is set for another platform than the
        one here.
      Exception: any error that JAX raises if `fun` cannot be traced, or differentiated.
    """
    if not isinstance(gradients, bool | None):
        raise TypeError(
            f"doctor: gradients is {format_value(gradients)}, want True, False or None; True means in all floating-point arguments"
        )
    platform = known_platform("doctor", platform)
    if measure and platform != known_platform("doctor", None):
        raise ValueError(
            f"doctor: measure is set and platform is {format_value(platform)}, want {known_platform('doctor', None)!r}, as here"
        )

    def examined(fun, args, kwargs) -> Report:
        with replacing_lax(False):
            forward = jax.make_jaxpr(fun)(*args, **kwargs)
            backward = _no_loss(forward) is None if gradients is None else gradients
            read = "forward and backward" if backward else "as it stands" if _computes_gradients(forward) else "forward"
            read_function = with_gradient(fun) if backward else fun
            program = _traced_gradient(read_function, args, kwargs) if backward else forward
        leaves = jax.tree.leaves((args, kwargs))
        splits = product_splits(program, [getattr(array, "sharding", None) for array in (*program.consts, *leaves)])
        remarks = *_remarks(forward, backward, gradients), *(() if splits.products is not None else (UNKNOWN,))
        equations = [*_equations(program, splits, platform), *fused_in_own(program, platform)]
        in_evaluation = _fused_in_evaluation(forward, equations) if backward and platform == "cpu" else ()
        planned, refusal = _planned_in_place(read_function, args, kwargs, program, platform)
        found: dict[tuple, tuple[Finding, Equation | Planned]] = {}
        for product, step in (*equations, *in_evaluation, *planned):
            where = place(step)
            for hazard in found_in(product, jax.__version_info__):
                key = hazard.name, product.key, where.source, where.backward
                times = where.times + (found[key][0].times if key in found else 0)
                found[key] = _finding(hazard, product, where, times), product
        findings = [
            dataclasses.replace(finding, measured=compare(product)) if measure and finding.what == "slow" else finding
            for finding, product in sorted(found.values(), key=lambda pair: ORDER.index(pair[0].what))
        ]
        products = sum(equation.name in PRODUCTS for equation, _ in equations)
        mesh = _format_mesh(splits.mesh, leaves)
        return Report(platform, jax.__version__, read, products, tuple(findings), mesh, refusal, remarks)

    return Tool("doctor", fun, examined)


def _format_mesh(mesh: Mapping[str, int], leaves: Sequence[Any]) -> str:
    if not mesh:
        return "one device"
    bare = sum(not isinstance(getattr(leaf, "sharding", None), jax.NamedSharding) for leaf in leaves)
    replicated = f" ({bare} of {counted(len(leaves), 'argument')} without a sharding, taken as replicated)" if bare else ""
    return f"a mesh of {', '.join(f'{axis} {size}' for axis, size in mesh.items())}{replicated}"


def _traced_gradient(fun: Callable, args, kwargs) -> ClosedJaxpr:
    try:
        return jax.make_jaxpr(fun)(*args, **kwargs)
    except Exception as error:
        error.add_note("doctor: the gradient raised this; with gradients=False (--no-backward) the function alone is read")
        raise


def _equations(program: ClosedJaxpr, splits: Splits, platform: str) -> Iterator[tuple[Equation, Step]]:
    """lax's equations, with the mesh axes that split their operands."""
    known = iter(splits.products or ())
    fused = FusedReductions(program, origins := Origins(program))
    for step in walk(program.jaxpr):
        unknown = [None] * len(step.eqn.invars), None
        operands, result = next(known, unknown) if step.eqn.primitive.name in ASKED else unknown
        if not step.inside and step.eqn.primitive not in owner and not _in_kernel(step):
            in_loop = any(eqn.primitive.name in ("scan", "while") for eqn in step.within)
            reductions = dict(one_number_reduced=fused.has_one_number(step), narrow_reduced=fused.is_narrow(step))
            yield Equation(step.eqn, operands, _left(splits.mesh, step), platform, in_loop, result=result, **reductions), step
        origins.follow(step)


def _left(mesh: Mapping[str, int], step: Step) -> dict[str, int]:
    """The mesh axes over which XLA splits a step: without those of the `shard_map`s around it."""
    manual = {axis for eqn in step.within if eqn.primitive.name == "shard_map" for axis in eqn.params["newly_manual_axes"]}
    return {axis: size for axis, size in mesh.items() if axis not in manual}


def _fused_in_evaluation(alone: ClosedJaxpr, equations) -> Iterator[tuple[Equation, Step]]:
    """Products that are fused with their reduction in the function alone, but not beside its gradient, which reads them once more."""

    def key(equation: Equation, step: Step) -> tuple[str, str]:
        return dataclasses.replace(equation, splits=[None] * len(equation.splits)).key, place(step).source

    known = {key(equation, step) for equation, step in equations if equation.one_number_reduced}
    for equation, step in (*_equations(alone, Splits({}, []), "cpu"), *fused_in_own(alone, "cpu")):
        if equation.one_number_reduced and key(equation, step) not in known:
            yield equation, step


def _in_kernel(step: Step) -> bool:
    """Return whether a Pallas kernel has it, whose products are not XLA's."""
    return any(eqn.primitive.name == "pallas_call" for eqn in step.within)


def _planned_in_place(fun: Callable, args, kwargs, program: ClosedJaxpr, platform: str) -> tuple[list[tuple[Planned, Step]], str | None]:
    """The products as jaxext's, or why it refuses them: it does so where lax accepts a sharding and is wrong."""
    try:
        with in_place_of_lax():
            replaced = jax.make_jaxpr(fun)(*args, **kwargs)
    except Exception as error:  # of a form, or of code that interprets lax's products
        return [], f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return [*_planned(program, replaced, platform)], None


def _planned(program: ClosedJaxpr, replaced: ClosedJaxpr, platform: str) -> Iterator[tuple[Planned, Step]]:
    """The products that `in_place_of_lax` puts in lax's place: those that the program does not have without it."""
    own, stored = collections.Counter(_named(step) for step in _products(program)), Stored()
    for step in _products(replaced):
        name = _named(step)
        own[name] -= 1
        if own[name] < 0:
            call, _, choice = chosen(step.eqn, platform)
            yield Planned(step.eqn, call, choice, stored.types(step)), step


def _products(program: ClosedJaxpr):
    steps = (step for step in walk(program.jaxpr) if not step.left and not _in_kernel(step))
    return (step for step in steps if isinstance(owner.get(step.eqn.primitive, (None,))[0], Form))


def _named(step) -> tuple:
    where = place(step)
    return step.eqn.primitive, *(str(atom.aval) for atom in step.eqn.invars), where.source, where.scope


def _finding(hazard: Hazard, product: Equation | Planned, where: Place, times: int) -> Finding:
    planned = isinstance(product, Planned)
    flops = product.flops if planned else 0
    work = f"{flops / 1e9:,.2f} GFLOP" if flops >= 1e8 else f"{flops / 1e6:.3g} MFLOP"
    cost = [f"{work}, computed by {product.by} in jaxext" if planned else "", hazard.cost(product)]
    return Finding(
        issue=hazard.name,
        what=hazard.what,
        source=where.source,
        scope=where.scope,
        where="backward" if where.backward else "forward",
        operation=str(product),
        times=times,
        why=hazard.why_on(product.platform),
        since=hazard.since_on(product.platform),
        cost="; ".join(filter(None, cost)),
        measured=None,
        fix=hazard.fix,
        page=PAGES + hazard.page,
    )


def _no_loss(program: ClosedJaxpr) -> str | None:
    """Return the reason why the gradient is not read unless it is asked for, or None."""
    results: list[Any] = program.out_avals
    arguments: list[Any] = program.in_avals
    if len(results) != 1 or results[0].shape != () or not jnp.issubdtype(results[0].dtype, jnp.floating):
        return "the function does not return one real number"
    if not any(jnp.issubdtype(aval.dtype, jnp.inexact) for aval in arguments):
        return NO_FLOATS
    return None


def _remarks(program: ClosedJaxpr, backward: bool, gradients: bool | None) -> Iterator[str]:
    """Yield remarks on a function by its own program.  `backward`: whether its gradient is read too; `gradients`: whether it was asked."""
    own = _computes_gradients(program)
    if own and gradients:
        yield "The function computes gradients itself, and gradients=True (--backward) reads their gradient: second derivatives."
    elif own and backward:
        yield (
            "The function computes gradients itself and returns one real number, so its gradient is read too, like that of a loss. "
            "If it is a training step, gradients=False (--no-backward) reads it as it stands."
        )
    elif own:
        yield "The function computes gradients itself, as a training step does. It is read as it stands, and is not differentiated again."
    elif not backward and gradients is None:
        reason = _no_loss(program)
        forced = "" if reason == NO_FLOATS else " gradients=True (--backward) reads it in all floating-point arguments."
        yield f"No gradient is read, because {reason}.{forced}"
    if constants := [*_constants_in_products(program)]:
        types = sorted(frozenset().union(*constants))
        named = ", ".join(types[:LISTED]) + (f" and {len(types) - LISTED} more types" if len(types) > LISTED else "")
        operands = "1 operation has an operand" if len(constants) == 1 else f"{len(constants)} operations have operands"
        yield (
            f"{operands} made of arrays that the function closes over ({named}). These are constants of the program: XLA compiles them in "
            "and may precompute results of constants alone. "
            + ("" if own else "No gradient in them is read, so issues of such a gradient are not reported. ")
            + "If they are parameters, pass them as arguments."
        )


def _constants_in_products(program: ClosedJaxpr) -> Iterator[frozenset[str]]:
    """Yield, for each product with an operand that is a constant of the program, the types of the arrays that it is made of."""
    origins = Origins(program)
    for step in walk(program.jaxpr):
        if not step.inside and (step.eqn.primitive.name in PRODUCTS or step.eqn.primitive in owner):
            if arrays := [origin.arrays for origin in map(origins.of, step.eqn.invars[:2]) if origin.constant]:
                yield frozenset().union(*arrays)
        origins.follow(step)


def _computes_gradients(program: ClosedJaxpr) -> bool:
    return any("transpose(" in str(step.eqn.source_info.name_stack) for step in walk(program.jaxpr))
