"""Forms whose companions tie the elements of a label to each other, as group sizes tie the rows of a ragged product.

Which rows are a group depends on the rows before.  A tied label has one axis, since no vmap joins it.  It may stand in one slot alone,
which the companions then choose from.  A device that has a part of a tied label computes with companions that are `cut` to its part.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax

from jaxext.core.form import Form

Cut = Callable[[dict[str, jax.Array], str, jax.Array, int], dict[str, jax.Array]]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TiedForm(Form):
    """A form with tied labels.

    Attributes:
      tied: the labels whose elements the companions tie to each other.
      cut: `cut(companions, label, first, size)` gives the companions of a device that has only the `size` elements of a tied label from
        `first` (an int32 scalar) on.  Companions themselves are not split along a tied label.
    """

    tied: tuple[str, ...]
    cut: Cut

    @functools.cached_property
    def chosen(self) -> tuple[str, ...]:
        return tuple(label for label in self.tied if sum(label in labels for labels in self.slots.values()) == 1)

    @property
    def unmapped(self) -> tuple[str, ...]:
        return self.tied

    @functools.cached_property
    def uncut(self) -> dict[str, str]:
        return {f"{label}0": f"{label}whole" for label in self.tied}

    @functools.cached_property
    def gathered(self) -> set[tuple[str, str]]:
        return {(name, axis) for name in self.companions for axis in self.uncut}

    def axes_to_split(self, name, axes):
        return tuple(self.uncut.get(axis, axis) for axis in axes) if name in self.companions else tuple(axes)

    def local_operands(self, operands, part, sizes):
        companions = {name: x for name, x in operands.items() if name in self.companions}
        for label in self.tied:
            if (has := part(f"{label}0", sizes[f"{label}0"])) is not None:
                companions = self.cut(companions, label, *has)
        return {**operands, **companions}
