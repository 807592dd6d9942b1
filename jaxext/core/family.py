"""The registry of families of forms and of their implementations, jaxext's own and users'.

A family is one form, or several of one kind (convolutions with any number of spatial axes), together with facts that do not follow from
their labels.  Dispatch, `explain`, `tune`, benchmarks and checkpoint policies look families up in `families`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
from jax.extend.core import Primitive

from jaxext.core.implementation import Implementation
from jaxext.tables import active

# All families, by name.
families: dict[str, Family] = {}

# The families of which jax may hold programs.
in_use: set[Family] = set()

# lax's primitive -> the function that turns its equations into jaxext's products.
readers: dict[Primitive, Callable[..., jax.Array]] = {}


@dataclasses.dataclass(frozen=True, eq=False)
class Family:
    """A family of forms.

    Attributes:
      name: the family's name for `jaxext.extend.register`.
      lax_primitive: lax's primitive for the same product, if there is one.  Policies of `jax.checkpoint` see this primitive.
      namesake: lax's primitive of the same name, if policies do not know it and see another one.  `bind` computes it.
      read: computes an equation of `lax_primitive` as a product of the family, from its operands, its parameters, the dtype of its result
        and the name of an implementation.  None if equations of `lax_primitive` are not replaced.
      bind: computes a call of `replaced` by its operands and parameters, inside `in_place_of_lax`.  None: as its jaxpr says, by `read`.
      lax_call: `lax_call(form, open, ranks)` gives the names of the operands of `lax_primitive`, and its parameters that tell which axes
        are what.  None: the factors, and `dimension_numbers`, by the labels.
      names: a pattern of the names of its forms, reserved for them.
      weights: the slot that all rows of a result share.  None: there is none, so `use_invariant` refuses the family.
      axis_names: slot -> label -> the letter in `explain`, if it differs from the label.
      groups: the labels that `read` splits off a neighbouring axis.
      implementations: in order of preference.  The last one plans every call, and is the definition.
    """

    name: str
    lax_primitive: Primitive | None
    names: str
    namesake: Primitive | None = None
    read: Callable[..., jax.Array] | None = None
    bind: Callable[..., jax.Array] | None = None
    lax_call: Callable[..., tuple[Sequence[str], Mapping]] | None = None
    weights: str | None = None
    axis_names: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    groups: str = ""
    implementations: list[Implementation] = dataclasses.field(default_factory=list)

    @property
    def replaced(self) -> Primitive | None:
        """lax's primitive whose calls become the family's inside `in_place_of_lax`."""
        return self.lax_primitive if self.read is not None else self.namesake

    @property
    def names_of_implementations(self) -> list[str]:
        return [each.name for each in self.implementations]


def declare(family: Family, *implementations: Implementation) -> Family:
    """Register a family with its implementations, in order of preference, and return it."""
    families[family.name] = family
    if family.read is not None and family.lax_primitive is not None:
        readers[family.lax_primitive] = family.read
    for implementation in reversed(implementations):
        register(family, implementation)
    return family


def is_replaced(primitive: Primitive) -> bool:
    """Return whether it is of lax, and a family computes it inside `in_place_of_lax`."""
    return any(primitive is family.replaced for family in families.values())


def register(family: Family, implementation: Implementation) -> None:
    """Add an implementation to a family, in front of those that it has, or in the place of the one of the same name.

    Then jax forgets all programs if it may hold one of the family, or a gradient by the reference of an operation whose backward it is.
    """
    names = family.names_of_implementations
    if implementation.name not in names:
        active.add_code(implementation.coded_as or implementation.name, implementation.code)
        family.implementations.insert(0, implementation)
    else:
        at = names.index(implementation.name)
        former, known = family.implementations[at], implementation.coded_as or implementation.name
        active.add_code(known, implementation.code, instead_of=former.code)
        family.implementations[at] = implementation
    if in_use & {family, families.get(family.name.removesuffix("_backward"))}:
        jax.clear_caches()
        in_use.clear()


def names_of_implementations() -> list[str]:
    """The names of all families' implementations in reverse order of preference: "xla" first, users' own last."""
    return list(dict.fromkeys(name for family in families.values() for name in reversed(family.names_of_implementations)))
