"""The contacts, by which kernels meet a GPU for the first time, and their cases: each a product, an implementation and a config.

The contacts are those of each operation's `cases.py`, in the order of jaxext's imports: what an operation is made of comes before it.
Every equation of a contact that is a product gives its `Call`, as for `explain`.  For each implementation that plans it there is a case
with the first config of each kind that the plan has.  Of cases that differ in sizes alone, the first counts.  The first of each kind has
one more with another tile, except in float16 and float32, whose kernels are those of bfloat16 with other instructions, unless it would run
small tiles alone.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib
import pkgutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any

import jax

from jaxext import ops
from jaxext.backends.kernel import KernelPlan
from jaxext.core.call import Call
from jaxext.core.contact import Contact
from jaxext.core.family import Family
from jaxext.core.form import owner
from jaxext.core.implementation import Implementation, Plan
from jaxext.tuning.explain import call_of
from jaxext.tuning.walk import walk

PLATFORM, IMPLEMENTATIONS = "cuda", ("triton", "cuda")  # where and by which kernels contacts are checked
_folders = [importlib.import_module(f"jaxext.ops.{module.name}").__name__ for module in pkgutil.iter_modules(ops.__path__)]
OPERATIONS = [name.rpartition(".")[2] for name in sys.modules if name in _folders]
ANOTHER = "another tile"
_BOTH_TILES = ("bf16", "i8", "i4", "fp8")  # dtypes of kinds with a second tile
_SMALL = 64 * 64  # elements of the largest tile that is small
_SAME_TILE = {"splits", "num_warps", "num_stages"}  # fields of a config that leave its tile


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A kernel that is to be right.  `name` is unique, and says everything else."""

    name: str
    contact: str  # the name of the contact that it comes from
    implementation: str
    kind: str  # family, role and dtypes
    plan: Plan
    config: Any
    definition: Implementation  # xla, by which the truth is computed

    @property
    def call(self) -> Call:
        return self.plan.call

    @property
    def family(self) -> str:
        return self.kind.partition(" ")[0]

    @property
    def key(self) -> str:
        """The kind with its implementation, as in the record."""
        return f"{self.implementation} {self.kind}"


@dataclasses.dataclass(frozen=True)
class Refusal:
    """An implementation that does not take a product of a contact."""

    contact: str
    implementation: str
    op: str
    reason: str


def cases_module(operation: str) -> ModuleType:
    return importlib.import_module(f"jaxext.ops.{operation}.cases")


def contacts(operations: Iterable[str] = OPERATIONS) -> list[Contact]:
    """The contacts of some operations, or of all, by name once each."""
    return [contact for operation in operations for contact in cases_module(operation).contacts()]


def calls_of(contact: Contact, platform: str) -> Iterator[tuple[Family, Call]]:
    """The products of a contact, each once."""
    seen = set()
    for at in walk(jax.make_jaxpr(contact.function)(*contact.operands).jaxpr):
        if at.eqn.primitive in owner and not at.left:
            call = call_of(at.eqn, platform)
            if call.problem not in seen:
                seen.add(call.problem)
                yield owner[at.eqn.primitive][0].family, call


def listed(contacts: Iterable[Contact], platform: str, implementations: Sequence[str]) -> tuple[list[Case], list[Refusal]]:
    """All cases, in the order in which they should run, and what the implementations refuse."""
    found: list[Case] = []
    first: dict[str, str] = {}  # a kind -> the contact of its first case, which alone has another tile if a plan has several kinds
    refusals: dict[tuple, Refusal] = {}
    seen = set()
    for contact in contacts:
        for case, sort in _all_of(contact, platform, implementations):
            if isinstance(case, Refusal):
                refusals.setdefault((case.implementation, case.op, case.reason), case)
            elif sort not in seen and (not str(sort[-1]).startswith(f"{ANOTHER} ") or first[case.key] == contact.name):
                seen.add(sort)
                first.setdefault(case.key, contact.name)
                found.append(case)
    return _round_robin(found), list(refusals.values())


def named(contact: Contact, name: str, platform: str, implementations: Sequence[str]) -> Case:
    return next(case for case, _ in _all_of(contact, platform, implementations) if isinstance(case, Case) and case.name == name)


def kind_of(plan: Plan, config: Any) -> str:
    """The kind of a kernel, by which it is verified: its family, its role and its dtypes."""
    if isinstance(plan, KernelPlan):
        return plan.kind(config)
    return " ".join([plan.call.op, plan.call.op, plan.call.dtype.name])


def _all_of(contact: Contact, platform: str, implementations: Sequence[str]) -> Iterator[tuple[Case | Refusal, Any]]:
    """The cases of a contact, each with what it is but for sizes; and the refusals."""
    for family, call in calls_of(contact, platform):
        for implementation in family.implementations:
            if implementation.name not in implementations:
                continue
            plan = implementation.planned(call)
            if isinstance(plan, str):
                yield Refusal(contact.name, implementation.name, call.op, plan), None
                continue
            for which, config in _configs(plan, contact.splits):
                name = f"{implementation.name} {call.op}: {contact.name}, {which}"
                case = Case(name, contact.name, implementation.name, kind_of(plan, config), plan, config, family.implementations[-1])
                parts, problem = which if contact.splits else "", getattr(plan, "problem", call.problem)
                sort = which if which.startswith(ANOTHER) else (parts, _signature(problem), _signature(config))
                yield case, (case.implementation, case.kind, sort)


def _configs(plan: Plan, splits: Sequence[int]) -> Iterator[tuple[str, Any]]:
    """The picked config and one with another tile, of each kind that the plan has; or those with so many parts of the sum."""
    if splits and any(getattr(config, "splits", 1) == splits[0] for config in plan.configs):
        for number in splits:
            yield f"{number} parts", next(config for config in plan.configs if config.splits == number)
        return
    of_kind: dict[str, list[Any]] = {}
    for config in plan.configs:
        of_kind.setdefault(kind_of(plan, config), []).append(config)
    for kind, (picked, *others) in sorted(of_kind.items()):
        by = "" if len(of_kind) == 1 else f" {kind.split()[0]}"
        yield f"picked{by}", picked
        another = max((config for config in others if _tile(config) != _tile(picked)), key=_size, default=None)
        dtypes = kind.rpartition(" ")[2]
        wanted = "fp32" not in dtypes.partition("->")[0].split("x")[:2] and any(name in dtypes for name in _BOTH_TILES)
        if another is not None and (wanted or _size(picked) <= _SMALL < _size(another)):
            yield f"{ANOTHER}{by}", another


def _tile(config: Any) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(config).items() if name not in _SAME_TILE}


def _size(config: Any) -> int:
    """The elements of the tile of a result; the first of several equal ones is taken."""
    fields = dataclasses.asdict(config)
    return fields.get("tile_m", 0) * fields.get("tile_n", 0)


def _signature(of: Any) -> Any:
    """A problem or a config without its sizes: numbers are none, one or several."""
    if dataclasses.is_dataclass(of):
        return type(of).__name__, tuple((field.name, _signature(getattr(of, field.name))) for field in dataclasses.fields(of))
    if isinstance(of, int) and not isinstance(of, bool):
        return max(-1, min(of, 2))
    if isinstance(of, tuple) and all(isinstance(x, int) for x in of):
        return max(map(_signature, of), default=0)
    return of


def _round_robin(cases: Sequence[Case]) -> list[Case]:
    """The first case of every kind before all others, and of both one of each family and implementation after the other."""
    first = {case.key: case for case in reversed(cases)}
    turns: collections.Counter[tuple] = collections.Counter()
    ranked = []
    for case in cases:
        queue = (case is not first[case.key], case.family, case.implementation)
        ranked.append(((queue[0], turns[queue]), case))
        turns[queue] += 1
    return [case for _, case in sorted(ranked, key=lambda of: of[0])]
