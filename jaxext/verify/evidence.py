"""From verdicts to the record of verified kernels: a kind counts as right only if all of its cases were."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from jaxext.tables.table_format import Verified
from jaxext.verify.cases import Case
from jaxext.verify.events import FAILED, Verdict


def verified(cases: Iterable[Case], verdicts: Mapping[str, Verdict]) -> dict[str, Verified]:
    """The entry of each kind in the record.

    `cases` are all that there are, also those that did not run.  A kind of which a case failed is wrong; one of which a case did not run,
    or was refused, is left out.
    """
    kinds: dict[str, list[Case]] = {}
    for case in cases:
        kinds.setdefault(case.key, []).append(case)
    found = {}
    for kind, members in kinds.items():
        each = [verdicts.get(case.name) for case in members]
        failed = any(verdict is not None and verdict.outcome in FAILED for verdict in each)
        if failed or all(verdict is not None and verdict.outcome == "right" for verdict in each):
            errors = [_error(verdict) for verdict in each if verdict is not None]
            worst = None if None in errors else max(error for error in errors if error is not None)
            compiler = members[0].plan.implementation.compiler()  # type: ignore[attr-defined]
            found[kind] = Verified(right=not failed, error=worst, compiler=compiler)
    return found


def _error(verdict: Verdict) -> float | None:
    """In the norm; None if there is no number."""
    error = float((verdict.event.get("errors") or {}).get("norm", "nan"))  # in words if it is no number in JSON
    return error if math.isfinite(error) else None
