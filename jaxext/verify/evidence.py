"""Makes the record of verified kernels of verdicts: a kind is right if its first case was and no other failed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from jaxext.tables.table_format import Verified
from jaxext.verify.cases import Case
from jaxext.verify.events import FAILED, Verdict


def verified(cases: Iterable[Case], verdicts: Mapping[str, Verdict]) -> dict[str, Verified]:
    """The entry of each kind in the record.

    `cases` are all that there are, also those that did not run, each kind's most important first.  A kind of which a case failed is wrong.
    One whose first case was not right is left out.  A case that did not come as far as its first launch in time says nothing, and neither
    does one that the harness could not check.
    """
    kinds: dict[str, list[Case]] = {}
    for case in cases:
        kinds.setdefault(case.key, []).append(case)
    found = {}
    for kind, members in kinds.items():
        each = [verdicts[case.name] for case in members if case.name in verdicts]
        failed = any(verdict.outcome in FAILED and not _says_nothing(verdict) for verdict in each)
        first = verdicts.get(members[0].name)
        if failed or first is not None and first.outcome == "right":
            errors = [_error(verdict) for verdict in each if failed or verdict.outcome == "right"]
            worst = None if None in errors else max(error for error in errors if error is not None)
            compiler = members[0].plan.implementation.compiler()  # type: ignore[attr-defined]
            found[kind] = Verified(right=not failed, error=worst, compiler=compiler)
    return found


def _says_nothing(verdict: Verdict) -> bool:
    return verdict.outcome == "hung" and not verdict.event.get("launched") or bool(verdict.event.get("harness"))


def _error(verdict: Verdict) -> float | None:
    """The error in the norm; None if there is no number."""
    error = float((verdict.event.get("errors") or {}).get("norm", "nan"))  # in words if it is no number in JSON
    return error if math.isfinite(error) else None
