"""Looks for splits of a function over devices with which XLA computes something else, aborts, or communicates without need.

    python -m jaxext.testing.shardings --sample 4 --seed 1 "dense conv"

A split assigns mesh axes to the axes of each operand and of the result.  Mesh axes of one size are exchangeable: equivalent splits count
once.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import importlib
import itertools
import json
import math
import pathlib
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

from jaxext._messages import format_value, refuse_traced
from jaxext.testing.conformance import is_float
from jaxext.testing.sharding_worker import (
    AUTOMATIC,
    HALF,
    MANUAL,
    PARTS,
    TOGETHER,
    UNFIT,
    WAYS,
    Facts,
    Function,
    Layout,
    Workers,
    drawn,
    manual_axis,
)

MESHES = ((2, 2), (4, 2))
SUBJECTS = "benchmarks.sharding_subjects"  # of the command: a module with SUBJECTS, a sequence of Function
KINDS = (*PARTS, "abort", "hang", "error", "communication")


@dataclasses.dataclass(frozen=True)
class Finding:
    """A split with a fault.  `kind` is one of KINDS; `program` shows the smallest split like it, if one was looked for."""

    name: str
    layout: Layout
    kind: str
    detail: str
    program: str = ""

    def __str__(self) -> str:
        program = f"\n{self.program}\n" if self.program else ""
        return f"{self.name}, {self.layout}\n  {self.kind}: {self.detail}{program}"


@dataclasses.dataclass(frozen=True)
class Splits:
    """The result of `check_shardings`: the findings, and the numbers of splits tried and refused, by function and way."""

    findings: tuple[Finding, ...]
    tried: dict[tuple[str, str], int]
    refused: dict[tuple[str, str], int]
    seed: int

    @property
    def passed(self) -> bool:
        return not self.findings and any(n > self.refused.get(key, 0) for key, n in self.tried.items())

    def counts(self, name: str) -> collections.Counter[str]:
        """Return the number of wrong splits of a function, by kind."""
        return collections.Counter(finding.kind for finding in self.findings if finding.name == name)

    def splits(self, name: str) -> int:
        """Return the number of splits of a function that were tried and not refused."""
        return sum(n for (of, _), n in self.tried.items() if of == name) - sum(n for (of, _), n in self.refused.items() if of == name)

    def __str__(self) -> str:
        lines = [str(finding) for finding in self.findings if finding.program]
        for name in dict.fromkeys(name for name, _ in self.tried):
            found = ", ".join(f"{n} {kind}" for kind, n in self.counts(name).items()) or "none wrong"
            refused = sum(n for (of, _), n in self.refused.items() if of == name)
            lines.append(f"{name}: {self.splits(name)} splits: {found}" + (f"; {refused} refused" if refused else ""))
        return "\n".join([*lines, f"check_shardings: {sum(self.tried.values())} splits, {len(self.findings)} wrong; seed {self.seed}"])

    def raise_if_failed(self) -> None:
        """Raise AssertionError with the findings, or if nothing was checked."""
        if not self.passed:
            raise AssertionError(str(self))


def check_shardings(
    fn: Callable | str,
    args: Sequence[ArrayLike],
    *,
    reference: Callable | str | None = None,
    meshes: Sequence[tuple[int, ...]] = MESHES,
    ways: Sequence[str] = WAYS,
    sample: int | None = None,
    seed: int = 0,
    tolerance: float | None = None,
    order: int = 2,
    workers: int = 2,
    limit: float = 120,
) -> Splits:
    """Check a function with its operands and its result split over simulated devices in every way, against one device in float64.

    It compares the values, every gradient, and a second derivative (the jvp of the gradients).  If all sharded axes of operands and result
    belong together, and none is summed over, any collective but an all-reduce (of gradients) is also a finding.  Programs run in processes
    of their own, so an abort of XLA is a finding too, and a script must call this under `if __name__ == "__main__":`.  For one finding of
    each kind, the smallest split and the smallest sizes that still show it are searched for and printed as a program.

    Args:
      fn: a function of arrays that returns one array.  Workers import it, so it must be a function of a module, a `functools.partial` of
        one, or a string: the Python source of a function over the names jax, jnp, lax, np and jaxext, with which the printed programs are
        self-contained.
      args: example arrays.  Small integers in float32 have exact sums.
      reference: the same function, for the expected values.  Defaults to fn.
      meshes: shapes of meshes, of one or two axes of 2, 4 or 8 devices.
      ways: some of `WAYS`: automatic axes, explicit axes, an exported program, `shard_map` over all axes, and `shard_map` over one axis
        with the other automatic.  `shard_map` splits only axes along which fn is independent, as determined on one device.
      sample: the number of splits for each way, two thirds of them such that axes of operands and result belong together.  Defaults to
        all.
      seed: the seed of the sample.
      tolerance: as in `check_op`.
      order: the order of the highest derivative: 2, 1 or 0 (values only).
      workers: the number of processes.
      limit: seconds for one split.

    Returns:
      A `Splits`: `passed`, `findings`, and a table as its `str`.  Refused splits are those whose types jax calls ambiguous.

    Raises:
      TypeError, ValueError: an argument is invalid, or fn itself fails.
    """
    refuse_traced("check_shardings", args=args)
    if not isinstance(args, Sequence) or not args:
        raise TypeError(f"check_shardings: args is {format_value(args)}, want a sequence of arrays")
    for name, f in (("fn", fn), *([] if reference is None else [("reference", reference)])):
        if not callable(f) and not isinstance(f, str):
            raise TypeError(f"check_shardings: {name} is {format_value(f)}, want a function, or its source")
    name = fn if isinstance(fn, str) else getattr(fn, "__name__", None) or format_value(fn)
    function = Function(name, fn, tuple(map(np.asarray, args)), reference, tolerance, order)
    return verify([function], meshes=meshes, ways=ways, sample=sample, seed=seed, workers=workers, limit=limit)


def verify(
    functions: Sequence[Function],
    *,
    meshes=MESHES,
    ways=WAYS,
    sample: int | None,
    seed: int = 0,
    workers=2,
    limit: float = 120,
    minimise: bool = True,
    most: int | None = None,
) -> Splits:
    """Check several functions as `check_shardings` does.  Stop after `most` findings."""
    if unknown := set(ways) - set(WAYS):
        raise ValueError(f"check_shardings: ways has {format_value(sorted(unknown))}, want some of {WAYS}")
    bad = [mesh for mesh in meshes if not (1 <= len(mesh) <= 2 and {*mesh} <= {2, 4, 8})]
    if bad or not meshes:
        want = "want shapes of one or two axes of 2, 4 or 8 devices"
        raise ValueError(f"check_shardings: meshes has {format_value(bad or meshes)}, {want}")
    if workers < 1:
        raise ValueError(f"check_shardings: workers is {workers}, want 1 or more")
    if orders := [function.order for function in functions if function.order not in (0, 1, 2)]:
        raise ValueError(f"check_shardings: order is {format_value(orders[0])}, want 0, 1 or 2")
    findings: list[Finding] = []
    tried, refused = collections.Counter(), collections.Counter()
    pickled = {_pickled(function): function for function in functions}
    with Workers(workers, max(map(math.prod, meshes)), limit) as pool:
        facts: dict[bytes, Facts] = {}
        for (key, *_), found in pool.run([(key, None, None) for key in pickled]):
            if not isinstance(found, Facts):
                raise ValueError(f"check_shardings: {pickled[key].name} fails on one device: {found[1]}")
            facts[key] = found
        jobs = [(key, layout, _together_in(of, facts[key]))
            for key, of in pickled.items() for layout in layouts(of, facts[key], meshes, ways, sample, seed)]  # fmt: skip
        for (key, layout, _), (kind, detail) in pool.run(jobs):
            assert layout is not None
            name = pickled[key].name
            tried[name, layout.way] += 1
            if kind == "refused":
                refused[name, layout.way] += 1
            elif kind == UNFIT:
                raise ValueError(f"check_shardings: {name} fails on one device: {detail}")
            elif kind != "right":
                findings.append(Finding(name, layout, kind, detail))
            if len(findings) == most:
                break
        findings.sort(key=lambda finding: (finding.name, KINDS.index(finding.kind), WAYS.index(finding.layout.way), str(finding.layout)))
        first = {(finding.name, finding.kind): i for i, finding in reversed([*enumerate(findings)])}
        of = {function.name: function for function in functions}
        for i in first.values() if minimise else ():
            findings[i] = minimised(pool, of[findings[i].name], findings[i])
    return Splits(tuple(findings), dict(tried), dict(refused), seed)


def _together_in(function: Function, facts: Facts) -> str:
    """The parts that one program computes."""
    return TOGETHER[function.order if facts.is_float and any(map(is_float, function.args)) else 0]


def _pickled(function: Function) -> bytes:
    try:
        return pickle.dumps(function)
    except Exception as error:
        want = "want a function of a module, a functools.partial of one, or its source"
        raise TypeError(f"check_shardings: {function.name} cannot be sent to another process ({error}): {want}") from error


# Which splits there are.


def layouts(function: Function, facts: Facts, meshes, ways, sample: int | None, seed: int) -> Iterator[Layout]:
    """All layouts of a function, or a sample of each way that has every axis that belongs to others in turn."""
    for way in (way for way in ways if way in function.ways):
        taken: set[Layout] = set()
        for layout in _every(function, facts, way, meshes) if sample is None else _drawn(function, facts, way, meshes, sample, seed):
            if (layout := _canonical(layout, function, facts)) is not None and layout not in taken:
                taken.add(layout)
                yield layout
            if len(taken) == sample:
                break


def _every(function, facts, way, meshes) -> Iterator[Layout]:
    for mesh in meshes:
        for axes in itertools.product(*(_choices(function, facts, way, n) for n in mesh)):
            yield from (Layout(way, mesh, axes, flipped) for flipped in (False, True))


def _drawn(function, facts, way, meshes, sample, seed) -> Iterator[Layout]:
    """Layouts of three kinds in turn: axes that belong together, each of which has its turn; both mesh axes on the same; any axes."""
    of = random.Random(f"{seed} {function.name} {way}")
    cuts = {(*axes, r): (r, n) in facts.local for (r, n), axes in facts.cuts.items()}
    together = [axes for axes, local in cuts.items() if local or way != MANUAL] + [(*axes, None) for axes in facts.sums if way != MANUAL]
    of.shuffle(together := together or [_unused(function)])
    turns = itertools.cycle(together)
    first = of.randrange(3) if sample < 3 else 0  # so that small samples have all kinds too
    for attempt in range(first, first + 100 * sample):
        mesh = of.choice(meshes)
        axes = [next(turns)] * len(mesh) if attempt % 3 == 1 else [next(turns) for _ in mesh]
        if attempt % 3 == 2 and way != MANUAL:
            for i in range(len(mesh)) if way != HALF else (of.randrange(len(mesh)),):
                axes[i] = of.choice(_choices(function, facts, way, mesh[i]))
        yield Layout(way, mesh, tuple(axes), of.random() < 0.5)


def _unused(function) -> tuple:
    return (None,) * (len(function.args) + 1)


def _choices(function: Function, facts: Facts, way: str, n: int) -> list[tuple]:
    """All assignments of a mesh axis, its non-use included."""
    if way == MANUAL:
        return [_unused(function), *((*axes, r) for (r, parts), axes in facts.cuts.items() if parts == n and (r, parts) in facts.local)]
    shapes = [*(x.shape for x in function.args), facts.shape]
    return [*itertools.product(*([None, *(axis for axis, size in enumerate(shape) if size > 1)] for shape in shapes))]


def _key(layout: Layout) -> tuple:
    return [[-1 if at is None else at for at in axes] for axes in layout.axes], layout.flipped


def _canonical(layout: Layout, function: Function, facts: Facts) -> Layout | None:
    """The first of the equivalent layouts, in which mesh axes of one size are exchanged, if it splits something, and jax and the way take
    it."""
    both = [layout]
    if len({*layout.mesh}) < len(layout.mesh):
        both.append(dataclasses.replace(layout, axes=layout.axes[::-1], flipped=not layout.flipped))
    shared = len(layout.axes) == 2 and any(a is not None and a == b for a, b in zip(*layout.axes, strict=True))
    layout = min((dataclasses.replace(each, flipped=each.flipped and shared) for each in both), key=_key)
    even = layout.even([*function.args, np.empty(facts.shape)])
    fits = any(at is not None for axes in layout.axes for at in axes) and (even or layout.way == AUTOMATIC)
    if layout.way == MANUAL:
        fits &= facts.agree(layout, facts.local)
    if layout.way == HALF:
        one = manual_axis(layout)
        alone = dataclasses.replace(layout, axes=tuple(axes if i == one else _unused(function) for i, axes in enumerate(layout.axes)))
        fits &= len(layout.mesh) == 2 and facts.agree(alone, facts.local) and any(at is not None for at in layout.axes[one])
    return dataclasses.replace(layout, uneven=not even) if fits else None


# The smallest.


def minimised(pool: Workers, function: Function, finding: Finding) -> Finding:
    """The finding with a program of the fewest split axes and the smallest sizes that still show it."""
    layout, part, detail = finding.layout, finding.kind, finding.detail

    def shows(function, layout, part) -> bool:
        nonlocal detail
        kind, found = pool.one((_pickled(function), layout, part))
        if kind == finding.kind:
            detail = found
        return kind == finding.kind

    def tried(**changes) -> bool:
        nonlocal layout
        smaller = dataclasses.replace(layout, **changes)
        if smaller == layout or not shows(function, smaller, part):
            return False
        layout = smaller
        return True

    facts = pool.one((_pickled(function), None, None))
    together = _together_in(function, facts)
    parts = (part,) if part in PARTS else PARTS[: TOGETHER.index(together) + 1]
    part = next((one for one in parts if shows(function, layout, one)), together)  # it may need the other parts beside it
    if len(layout.mesh) == 2:
        if not any(tried(mesh=(2,), axes=layout.axes[i : i + 1], flipped=False) for i in (0, 1)):
            tried(mesh=(2, 2))
    tried(flipped=False)
    for i in range(len(layout.mesh)):
        for k in range(len(function.args) + 1):
            axes = [list(each) for each in layout.axes]
            axes[i][k] = None
            tried(axes=tuple(map(tuple, axes)))
    function = _shrunk(function, facts, lambda smaller: shows(smaller, layout, part))
    program = pool.one((_pickled(function), layout, (part, finding.kind)))[1]
    return dataclasses.replace(finding, layout=layout, detail=detail, program=program)


def _shrunk(function: Function, facts: Facts, shows: Callable[[Function], bool]) -> Function:
    """The function of the smallest arrays that show it: axes that belong together are shrunk together."""
    groups: list[set[tuple[int, int]]] = []
    cuts = [axes for (_, parts), axes in facts.cuts.items() if parts == 2]
    for axes in (*cuts, *facts.sums, *((None,) * k + (axis,) for k, x in enumerate(function.args) for axis in range(x.ndim))):
        group = {(k, axis) for k, axis in enumerate(axes) if axis is not None}
        joined = [other for other in groups if other & group]
        groups = [*(other for other in groups if other not in joined), group.union(*joined)]
    for group in groups:
        for size in (1, 2, 3, 4, 6):
            smaller = _resized(function, sorted(group), size)
            if smaller is not None and shows(smaller):
                function = smaller
                break
    return function


def _resized(function: Function, group: Sequence[tuple[int, int]], size: int) -> Function | None:
    k, axis = group[0]
    before = function.args[k].shape[axis]
    if size >= before or any(function.args[k].shape[axis] * size % before for k, axis in group):
        return None
    args = list(function.args)
    for k, axis in group:
        shape = list(args[k].shape)
        shape[axis] = shape[axis] * size // before
        was_drawn = np.array_equal(args[k], drawn(args[k].shape, k).astype(args[k].dtype))
        part = args[k][(slice(None),) * axis + (slice(shape[axis]),)]
        args[k] = drawn(tuple(shape), k).astype(part.dtype) if was_drawn else part
    return dataclasses.replace(function, args=tuple(args))


# The command.


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m jaxext.testing.shardings", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="parts of names of subjects; all, if none is given")
    parser.add_argument("--subjects", default=SUBJECTS, help="a module with SUBJECTS, a sequence of Function (default: %(default)s)")
    parser.add_argument("--sample", type=int, help="splits of each subject for each way; all, if not given")
    parser.add_argument("--seed", type=int, default=int(f"{datetime.date.today():%Y%m%d}"), help="of the sample (default: the date)")
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--meshes", nargs="+", default=["2x2", "4x2"])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--quickly", action="store_true", help="look for no smallest splits")
    parser.add_argument("--counts", metavar="FILE", help="write there, as JSON, how many splits are wrong")
    options = parser.parse_args(arguments)
    try:
        subjects = importlib.import_module(options.subjects).SUBJECTS
    except ModuleNotFoundError as error:  # jaxext's own are in the repository
        parser.error(f"--subjects: {error}")
    chosen = [of for of in subjects if not options.names or any(name in of.name for name in options.names)]
    if not chosen:
        parser.error(f"no subject has {' or '.join(options.names)} in its name: {', '.join(of.name for of in subjects)}")
    meshes = [tuple(map(int, mesh.split("x"))) for mesh in options.meshes]
    how: dict[str, Any] = dict(meshes=meshes, ways=options.ways, sample=options.sample, seed=options.seed)
    report = verify(chosen, **how, workers=options.workers, minimise=not options.quickly)
    print(report)
    if options.counts:
        rows = [{"name": of.name, "splits": report.splits(of.name), **report.counts(of.name)} for of in chosen]
        header = dict(command=f"{parser.prog} --sample {options.sample} --seed {options.seed}", jax=jax.__version__)
        pathlib.Path(options.counts).write_text(json.dumps({**header, **how, "rows": rows}, indent=1) + "\n")
    return not report.passed


if __name__ == "__main__":
    from jaxext.testing import shardings  # as workers know it

    sys.exit(shardings.main())
