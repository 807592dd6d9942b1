"""The definition of a hazard: a fault or a weakness of lax's own products, and what the doctor says of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

from jaxext._compat import PLATFORMS
from jaxext.hazards.subjects import Equation, Planned

CPU, GPUS = ("cpu",), ("cuda", "rocm")
IN_PLACE = "jaxext's operation, or jaxext.in_place_of_lax() around the model"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hazard:
    """A fault or a weakness of lax's own products.

    Attributes:
      name: its name in reports.
      what: "wrong" numbers, a "crash" (an error or the end of the process), "slow", or a "note".
      of: the class of what it looks at.
      holds: whether a subject of that class has it.
      why: one or two sentences; by platform if they differ.
      cure: what to call instead.
      page: its section of the documentation, such as doctor.md#ragged-products.
      platforms: where it shows.
      fixed: the first version of jax that is free of it; None if there is none.  It shows from the oldest supported one on.
      seen: whether a test shows it; otherwise it was read about, or is on a GPU, of which the tests have none.
      cost: what it costs, if that is more than the product itself.
    """

    name: str
    what: Literal["wrong", "crash", "slow", "note"]
    of: type
    holds: Callable[[Any], bool]
    why: str | Mapping[str, str]
    cure: str = IN_PLACE
    page: str
    platforms: tuple[str, ...] = PLATFORMS
    fixed: tuple[int, ...] | None = None
    seen: bool = True
    cost: Callable[[Any], str] = lambda subject: ""

    def shows_on(self, version: tuple[int, ...]) -> bool:
        """Return whether this version of jax has it."""
        return self.fixed is None or version < self.fixed

    def found_in(self, subject: Equation | Planned, version: tuple[int, ...]) -> bool:
        return isinstance(subject, self.of) and subject.platform in self.platforms and self.shows_on(version) and self.holds(subject)

    def why_on(self, platform: str) -> str:
        return self.why if isinstance(self.why, str) else self.why[platform if platform in self.why else "cuda"]

    def since_on(self, platform: str) -> str:
        """Return on which versions it shows, in words."""
        versions = "every version tested" if self.fixed is None else f"jax before {'.'.join(map(str, self.fixed))}"
        return versions + (", as reported" if not self.seen else "" if platform == "cpu" else ", on CPUs")
