"""A process that answers requests, and is replaced when it hangs or dies."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import signal
import time
from collections.abc import Callable
from typing import Any

from jaxext.bench.bench_report import Failure

START_S = 90  # for a new process, until it has imported jax and found the device
END_S = 5  # for a killed process to end, which a driver may hold


class Worker:
    """A process that runs `serve(pipe, *arguments)`: it sends its first words, and then answers each request.

    Its messages are pairs: what it says, and whether the device is lost, so that another process must go on.  It is started when it is
    needed.
    """

    def __init__(self, serve: Callable, *arguments: Any):
        self._serve, self._arguments = serve, arguments
        self._process: Any = None
        self._pipe: Any = None
        self._until = math.inf

    def start(self, until: float = math.inf) -> Any:
        """Its first words, or a `Failure`.  It and those that replace it start no later than `until`, in seconds of time.monotonic()."""
        self._until = until
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self._process = context.Process(target=self._serve, args=(there, *self._arguments), daemon=True)
        self._process.start()
        there.close()  # so that the process's end is the pipe's
        return self._answer(max(0.0, min(START_S, until - time.monotonic())))

    def ask(self, request: Any, seconds: float) -> Any:
        """The answer, or a `Failure`: it took longer, or the process died, which is replaced then, or it could not be started."""
        if self._process is None and isinstance(hello := self.start(self._until), Failure):
            return hello
        with contextlib.suppress(BrokenPipeError):  # it is dead, as the answer will say
            self._pipe.send(request)
        return self._answer(seconds)

    def _answer(self, seconds: float) -> Any:
        if not self._pipe.poll(seconds):
            self.stop()
            return Failure(f"no time in {seconds:.0f} s")
        try:
            answer, is_lost = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(END_S)
            code = self._process.exitcode
            self.stop()
            return Failure(f"the process died: {signal.Signals(-code).name if code and code < 0 else f'exit status {code}'}")
        if is_lost:
            self.stop()
        return answer

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join(END_S)
            self._pipe.close()
            self._process = None
