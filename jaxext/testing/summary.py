"""The result of `check_op`: its rows, and what was left out."""

from __future__ import annotations

import collections
import dataclasses

from jaxext.testing.advice import CURES, NO_SPLITS
from jaxext.testing.conformance import Row

_HINTS = {**CURES, NO_SPLITS: "`splits=`, or an operation of jaxext.extend itself, or in functools.partial, as fn"}


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
        """Return whether it passed, and no check was left out, wholly or for some splits, for want of devices, of sizes that the mesh
        divides, of the package flatbuffers, or of a platform for 16-bit floats, or because it needs one that `skip` names.

        Checks that `skip` names, and those that do not apply, such as derivatives of integers, may be missing.
        """
        return self.passed and all(row.complete for row in self.rows)

    @property
    def summary(self) -> str:
        """The numbers of checks that passed, failed and were skipped, and why these were, in a line."""
        outcomes = collections.Counter(row.outcome for row in self.rows)
        reasons = collections.Counter(row.detail for row in self.rows if row.outcome == "skipped")
        why = "; ".join(f"{n}: {reason}{f' ({_HINTS[reason]})' if reason in _HINTS else ''}" for reason, n in reasons.most_common())
        partly = [row for row in self.rows if row.outcome == "passed" and row.detail]
        notes = "".join(f"; partly: {note}" for note in dict.fromkeys(row.detail for row in partly))
        counts = f"{outcomes['passed']} passed, {outcomes['failed']} failed, {outcomes['skipped']} skipped"
        return f"check_op: {counts}{f' ({why})' if why else ''}{notes}"

    def __getitem__(self, check: str) -> Row:
        return {row.check: row for row in self.rows}[check]

    def __str__(self) -> str:
        return "\n".join([*map(str, self.rows), self.summary])

    def raise_if_failed(self, *, complete: bool = False) -> None:
        """Raise AssertionError with the failed rows, or with all rows if nothing was checked; also, if asked, if it is not `complete`."""
        if not self.passed or complete and not self.complete:
            missing = [row for row in self.rows if complete and not row.complete]
            raise AssertionError("\n".join(["check_op:", *map(str, self.failures or missing or self.rows), self.summary]))
