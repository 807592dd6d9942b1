"""The record of a verification while it runs: a line of JSON for each event, written at once.

    {"event": "environment", ...}       the first line of a run: versions, device, commit
    {"event": "refused", "contact": ..., "implementation": ..., "op": ..., "reason": ...}   of a product that is no case
    {"event": "listed", "cases": ..., "nvidia_smi": ...}
    {"event": "started", "worker": 3, "pid": 4711}
    {"event": "begun", "case": ..., "worker": 3, "at": 12.3}
    {"event": "launched", ...}          it was compiled, and its first launch comes next
    {"event": "right", "errors": {"norm": ..., "worst": ...}, "graph": ..., "seconds": ...}
    {"event": "wrong", "check": ..., "reason": ..., "errors": ...}
    {"event": "refused", "reason": ...} {"event": "raised", "type": ..., "reason": ..., "frames": [...]}
    {"event": "hung", "seconds": ..., "stderr": ...}   {"event": "died", "exit": ..., "stderr": ...}
    {"event": "stopped"}                the time was up while it ran
    {"event": "again", "reproducible": ...}     what hung or died, alone once more

It must not import jax: the parent reads and writes it beside workers that fail.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import time
from collections.abc import Iterable, Mapping
from typing import Any

FINAL = ("right", "wrong", "refused", "raised", "hung", "died")
FAILED = ("wrong", "raised", "hung", "died")


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The last word about a case: one of `FINAL`, and the event that says more."""

    outcome: str
    event: Mapping[str, Any]

    @property
    def reason(self) -> str:
        """The reason in words, in a line or several."""
        event = self.event
        reasons = {
            "wrong": f"{event.get('check')}: {event.get('reason')}",
            "refused": event.get("reason"),
            "raised": "\n  ".join([f"{event.get('type')}: {event.get('reason')}", *event.get("frames", [])]),
            "hung": "\n  ".join(filter(None, [f"no result after {event.get('seconds')} s", event.get("stderr")])),
            "died": "\n  ".join(filter(None, [f"the process ended with {event.get('exit')}", event.get("stderr")])),
        }
        again = {None: "", True: " (alone, too)", False: " (not alone)"}[event.get("reproducible")]
        return str(reasons.get(self.outcome, "")) + again


class Log:
    """Appends events to a file, if there is one, and keeps the verdict on each case."""

    def __init__(self, path: str | os.PathLike | None = None, start: float | None = None):
        self.start = time.monotonic() if start is None else start
        self.verdicts: dict[str, Verdict] = {}
        self._file = None if path is None else open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed by `close`)

    def write(self, event: str, **more: Any) -> None:
        line = {"event": event, **more, "at": round(time.monotonic() - self.start, 2)}
        if self._file is not None:
            print(json.dumps(line), file=self._file, flush=True)
        _take(self.verdicts, line)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


@dataclasses.dataclass(frozen=True)
class Past:
    """A file of events: the environment of its last run, all verdicts, and those of runs of the same code and device as the last."""

    environment: Mapping[str, Any]
    verdicts: Mapping[str, Verdict]
    alike: Mapping[str, Verdict]


def is_alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two environments are of the same code and device."""
    return all(one.get(name) == other.get(name) for name in ("device", "capability", "versions", "sources"))


def read(path: str | os.PathLike) -> Past:
    """Read a file of events.  A last line that was cut off is left out.

    Raises:
      OSError: it cannot be read.
      ValueError: it is no such file.
    """
    environment: Mapping[str, Any] = {}
    verdicts: dict[str, Verdict] = {}
    alike: dict[str, Verdict] = {}
    *lines, last = pathlib.Path(path).read_text(encoding="utf-8").split("\n")
    for line in lines if not last else [*lines, last]:
        try:
            event = json.loads(line)
            if event["event"] == "environment":
                alike = alike if is_alike(event, environment) else {}
                environment = event
        except (ValueError, TypeError, KeyError):
            if line is last:
                continue
            raise ValueError(f"{path} is no file of events: {line[:80]!r}") from None
        _take(verdicts, event)
        _take(alike, event)
    return Past(environment, verdicts, alike)


def _take(verdicts: dict[str, Verdict], event: Mapping[str, Any]) -> None:
    name, outcome = event.get("case"), event["event"]
    if name is None:
        return
    if outcome == "again" and name in verdicts:
        before = verdicts[name]
        verdicts[name] = Verdict(before.outcome, {**before.event, "reproducible": event["reproducible"]})
    elif outcome in FINAL:
        verdicts[name] = Verdict(outcome, event)


def shortened(text: str, most: int) -> str:
    """A text of at most about so many characters: its beginning and its end."""
    return text if len(text) <= most else f"{text[: most * 2 // 3]} ... {text[-most // 3 :]}"


def counts(verdicts: Iterable[Verdict]) -> str:
    """The number of each outcome that occurs, such as "3 right, 1 died"."""
    outcomes = [verdict.outcome for verdict in verdicts]
    return ", ".join(f"{number} {outcome}" for outcome in FINAL if (number := outcomes.count(outcome)))
