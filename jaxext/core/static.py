"""The parameters of a primitive besides its operands, the same for forms and for operations."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from jax.sharding import NamedSharding

from jaxext._scope import user_context
from jaxext.core.window import Window

slices_in_place = user_context("slices_in_place", None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Static:
    """Hashable parameters.  No rule of JAX changes the window, the precision, the implementation or the options.

    Attributes:
      ranks: axes of each label, in the order of `Labelled.free`.
      dtypes: of the results, in their order; a form has one.
      window: the geometry, or None.
      precision: as lax canonicalises it.
      implementation: the name that the user asked for, or None; or `Invariant` of that.
      out_sharding: of the first result, on explicit meshes, if the user or a transpose sets it.
      options: what determines an operation besides its operands, such as its activation.
      in_place: True if kernels may take slices of larger arrays where they lie; else None (`jaxext.slices_in_place`).
    """

    ranks: tuple[int, ...]
    dtypes: tuple[np.dtype, ...]
    window: Window | None = None
    precision: Any = None
    implementation: Any = None
    out_sharding: NamedSharding | None = None
    options: Any = None
    in_place: bool | None = dataclasses.field(default_factory=lambda: slices_in_place.value)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the first result."""
        return self.dtypes[0]

    def __repr__(self) -> str:
        """Show the fields that are set.  XLA's partitioner identifies a call by this text, so it shows all of each."""
        given = {name: repr(value) for name, value in vars(self).items() if value is not None} | {"dtypes": " ".join(map(str, self.dtypes))}
        return f"Static({', '.join(f'{name}={value}' for name, value in given.items())})"

    def replace(self, **changes: Any) -> Static:
        return dataclasses.replace(self, **changes)
