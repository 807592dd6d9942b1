"""Families of forms, and the one door by which they and their implementations come in: jaxext's own and those of users.

A family is a form, or several of one kind such as convolutions with any number of spatial axes, with what is known of them beyond their
labels.  Whoever asks about a family (dispatch, `explain`, `tune`, benchmarks, checkpoint policies) finds it in `families`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import jax
from jax.extend.core import Primitive

from jaxext.forms.implementation import Implementation
from jaxext.tables import in_force

# The families that there are, by name.
families: dict[str, Family] = {}

# lax's primitive -> what makes a product of ours of its equations.
readers: dict[Primitive, Callable[..., jax.Array]] = {}


@dataclasses.dataclass(frozen=True, eq=False)
class Family:
    """What is known of a family.

    Attributes:
      name: by which `jaxext.extend.register` knows it.
      twin: lax's primitive for the same product, by which policies of `jax.checkpoint` know it.
      read: makes a product of the family of an equation of `twin`, from its operands, its parameters, the dtype of its result and the name
        of an implementation.  None if no equation becomes one.
      names: a pattern of the names of its forms, which no other may have.
      letters: how `explain` names a label of a slot, where not by itself.
      groups: the labels that `read` splits off a neighbouring axis.
      implementations: in order of preference; the last plans every call, and is the definition.
    """

    name: str
    twin: Primitive
    names: str
    read: Callable[..., jax.Array] | None = None
    letters: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    groups: str = ""
    implementations: list[Implementation] = dataclasses.field(default_factory=list)

    @property
    def names_of_implementations(self) -> list[str]:
        return [each.name for each in self.implementations]


def declare(family: Family, *implementations: Implementation) -> Family:
    """Let a family in, with its implementations in order of preference; returns it."""
    families[family.name] = family
    if family.read is not None:
        readers[family.twin] = family.read
    for implementation in reversed(implementations):
        register(family, implementation)
    return family


def register(family: Family, implementation: Implementation) -> None:
    """Put an implementation before those that the family has."""
    in_force.add_code(implementation.name, implementation.code)
    family.implementations.insert(0, implementation)


def names_of_implementations() -> list[str]:
    """Of all families, the most general first: "xla", then those of kernels in order of preference, then users' own."""
    return list(dict.fromkeys(name for family in families.values() for name in reversed(family.names_of_implementations)))
