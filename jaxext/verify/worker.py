"""A worker: takes the names of cases from stdin, one line each, checks each, and writes events to stdout, one line of JSON each.

    python -P -m jaxext.verify.worker MODULE

MODULE has `contacts()`, `PLATFORM` and `IMPLEMENTATIONS`: the cases that there are.  The process ends with its parent, whatever it does.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import IO, Any

FRAMES = 4  # of a traceback, the last ones
REASON = 500  # characters of an exception
_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Run the worker until stdin ends."""
    _end_with_parent()
    faulthandler.enable(all_threads=False)
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, all_threads=False)  # by which the parent asks where a case hangs
    out = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # kernels and compilers print to stdout
    lines = _lines_of(sys.stdin)

    import jax
    import jax.numpy as jnp

    from jaxext.verify import cases

    module = importlib.import_module(sys.argv[1])
    contacts = {contact.name: contact for contact in module.contacts()}
    # The device is found now, so that the first case does not wait for it.
    jax.block_until_ready(jnp.zeros(1, device=jax.local_devices(backend=module.PLATFORM)[0]))

    def tell(event: str, **more: Any) -> None:
        out.write(json.dumps({"event": event, **more}) + "\n")

    tell("ready")
    while (line := lines.get()) is not None:
        task = json.loads(line)
        report = _checked(
            lambda task=task: cases.named(contacts[task["contact"]], task["case"], module.PLATFORM, module.IMPLEMENTATIONS),
            lambda: tell("launched"),
        )
        tell(**report)
    return 0


def _checked(case: Callable[[], Any], launched: Callable[[], object]) -> dict[str, Any]:
    """The last event of a case."""
    from jaxext.verify.check import Unchecked, Wrong, check
    from jaxext.verify.events import shortened

    start = time.perf_counter()

    def event(name: str, **more: Any) -> dict[str, Any]:
        return {"event": name, "seconds": round(time.perf_counter() - start, 2), **more}

    try:
        right = check(case(), launched)
        return event("right", errors={"norm": right.norm, "worst": right.worst}, graph=right.graph)
    except Wrong as wrong:
        errors = {} if wrong.norm is None else {"norm": str(wrong.norm), "worst": str(wrong.worst)}  # NaN is no JSON
        return event("wrong", check=wrong.check, reason=wrong.reason, errors=errors)
    except NotImplementedError as refusal:
        return event("refused", reason=str(refusal))
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[-FRAMES:]
        places = [f"{frame.filename.rpartition('site-packages/')[2]}:{frame.lineno} {frame.name}" for frame in frames]
        reason = shortened(" ".join(str(error).split()), REASON)
        is_harness = isinstance(error, Unchecked) or "out of memory" in reason.lower()  # which other workers may have taken
        return event("raised", type=type(error).__name__, reason=reason, frames=places, lost=_is_lost(), harness=is_harness)


def _is_lost() -> bool:
    """Return whether the device is of no use to this process any more, as after an illegal access."""
    import jax.numpy as jnp
    import numpy as np

    try:
        return np.asarray(jnp.arange(2) + 1).tolist() != [1, 2]
    except Exception:
        return True


def _lines_of(file: IO[str]) -> queue.SimpleQueue:
    """Lines as they come, then None.  The end of the file ends the process, even while a case hangs."""
    lines: queue.SimpleQueue = queue.SimpleQueue()

    def read() -> None:
        for line in file:
            lines.put(line)
        lines.put(None)
        time.sleep(1)  # for the main thread to end by itself
        os._exit(1)

    threading.Thread(target=read, daemon=True).start()
    return lines


def _end_with_parent() -> None:
    """Linux kills this process when its parent ends, even one that holds the interpreter's lock."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the parent, too, which ends its workers


if __name__ == "__main__":
    sys.exit(main())
