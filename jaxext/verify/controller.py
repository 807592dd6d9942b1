"""Hands out cases to worker processes, one at a time each, and survives whatever they do.

A worker that gives no result in time is killed, and so is one whose device may be spoilt by an exception; another takes its place.  What
hung or died runs once more at the end, alone.  Every event is written when it happens.  It must not import jax.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO, Any

from jaxext.verify.events import FINAL, Log, shortened

TICK_S = 0.2  # at most, between two looks at the clock
STARTS = 3  # workers in a row that fail to start, after which none takes their place
KILLS = 2  # of one kind, after which its other cases go last
ANSWER_S = 0.2  # for a worker that hangs to say where
WAIT_S = 5  # for a killed worker to end
STDERR = 1500  # characters of a dead worker's last words


@dataclasses.dataclass(frozen=True)
class Task:
    """A case to be checked, without its plan."""

    case: str
    contact: str
    kind: str
    limit: float | None = None  # seconds for this case, in place of the common limit


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Seconds."""

    start: float = 60  # for a worker to start
    first: float = 45  # for its first case
    each: float = 20  # for each other case
    total: float = 180  # since the start of the log


class NoWorker(Exception):
    """No worker starts.  The message is the last words of one."""


class _Worker:
    """A process, whose events a thread puts into `events`, with the worker; None is its end."""

    def __init__(self, number: int, command: Sequence[str], env: dict[str, str], limit: float, events: queue.SimpleQueue):
        self.number = number
        self.stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (it ends with the worker)
        pipe = subprocess.PIPE
        self.process: Any = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self.stderr, env=env)
        self.ready, self.fresh, self.launched = False, True, False
        self.begun, self.words, self.deadline = 0.0, 0, time.monotonic() + limit
        self.task: Task | None = None
        threading.Thread(target=self._read, args=(events,), daemon=True).start()

    def _read(self, events: queue.SimpleQueue) -> None:
        try:
            with self.process.stdout as lines:
                for line in lines:
                    if line.endswith(b"\n"):  # the last one may be cut off
                        events.put((self, json.loads(line)))
        finally:
            events.put((self, None))

    def begin(self, task: Task, limits: Limits) -> None:
        self.task, self.launched, self.begun = task, False, time.monotonic()
        self.words = os.fstat(self.stderr.fileno()).st_size
        self.deadline = self.begun + (task.limit or (limits.first if self.fresh else limits.each))
        self.fresh = False
        with contextlib.suppress(BrokenPipeError):  # then it died, which its stdout tells
            self.process.stdin.write(json.dumps({"case": task.case, "contact": task.contact}).encode() + b"\n")
            self.process.stdin.flush()

    def last_words(self) -> str:
        """The beginning and the end of what it wrote to stderr since its case began."""
        size = os.fstat(self.stderr.fileno()).st_size - self.words
        return shortened(os.pread(self.stderr.fileno(), size, self.words).decode(errors="replace").strip(), STDERR)

    def where(self) -> str:
        """The place of its Python code now, if it says so."""
        if hasattr(signal, "SIGUSR1"):
            self.process.send_signal(signal.SIGUSR1)
            time.sleep(ANSWER_S)
        return self.last_words()

    def kill(self, seconds: float = WAIT_S) -> str:
        """End it, and return how it ended."""
        self.process.kill()
        try:
            code = self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:  # a driver holds it
            return "no end after SIGKILL"
        for file in (self.process.stdin, self.stderr):
            with contextlib.suppress(BrokenPipeError):
                file.close()
        return f"status {code}" if code >= 0 else signal.Signals(-code).name


class Controller:
    """Runs tasks by workers.  `waiting`, `running` and `log.verdicts` say how far it is; `progress` is called after each step."""

    def __init__(self, log: Log, command: Sequence[str], *, workers: int, env: dict[str, str] | None = None, limits: Limits | None = None):
        self.waiting: collections.deque[Task] = collections.deque()
        self.suspects: collections.deque[Task] = collections.deque()  # what hung or died
        self.log, self.limits = log, limits or Limits()
        self._command, self._env, self._number = command, {**os.environ, **(env or {})}, workers
        self.progress: Callable[[Controller], object] = lambda controller: None
        self._workers: dict[int, _Worker] = {}  # number -> worker
        self._kills: collections.Counter[str] = collections.Counter()
        self._failed_starts, self._alone = 0, False
        self._events: queue.SimpleQueue[tuple[_Worker, dict[str, Any] | None]] = queue.SimpleQueue()

    @property
    def running(self) -> list[Task]:
        return [worker.task for worker in self._workers.values() if worker.task is not None]

    def start(self) -> None:
        """Start the workers, before it is known what they will do."""
        while len(self._workers) < min(self._number, len(self.waiting) + len(self.running) or self._number):
            self._spawn()

    def run(self, tasks: Sequence[Task]) -> None:
        """Run all tasks, until they are done or the time is up.  No worker is left, whatever happens.

        Raises:
          NoWorker: several workers in a row ended before they were ready.
        """
        self.waiting.extend(tasks)
        try:
            while (self.waiting or self.suspects or self.running) and self._time_left() > 0:
                self._step()
                self.progress(self)
        finally:
            self.close()

    def close(self) -> None:
        for worker in self._workers.values():
            worker.process.kill()
        until = time.monotonic() + WAIT_S
        for worker in [*self._workers.values()]:
            if worker.task is not None:
                self.log.write("stopped", case=worker.task.case, worker=worker.number)
            self._end(worker, max(0.1, until - time.monotonic()))

    def _time_left(self) -> float:
        return self.log.start + self.limits.total - time.monotonic()

    def _step(self) -> None:
        if not self.waiting and not self.running:
            self._alone = True
        if self._alone:
            if not self._workers:
                self._spawn()
        else:
            self.start()
        for worker in [*self._workers.values()]:
            tasks = self.suspects if self._alone and not self.running else self.waiting
            if worker.ready and worker.task is None and tasks:
                task, alone = tasks.popleft(), {"alone": True} if self._alone else {}
                self.log.write("begun", case=task.case, kind=task.kind, worker=worker.number, **alone)
                worker.begin(task, self.limits)
        deadlines = [worker.deadline for worker in self._workers.values() if not worker.ready or worker.task is not None]
        wait = min([TICK_S, self._time_left(), *(deadline - time.monotonic() for deadline in deadlines)])
        with contextlib.suppress(queue.Empty):
            self._heard(*self._events.get(timeout=max(0.0, wait)))
            while True:
                self._heard(*self._events.get_nowait())
        for worker in [*self._workers.values()]:
            if (not worker.ready or worker.task is not None) and time.monotonic() >= worker.deadline:
                self._late(worker)

    def _spawn(self) -> None:
        number = next(number for number in itertools.count() if number not in self._workers)
        worker = self._workers[number] = _Worker(number, self._command, self._env, self.limits.start, self._events)
        self.log.write("started", worker=number, pid=worker.process.pid)

    def _heard(self, worker: _Worker, event: dict[str, Any] | None) -> None:
        if self._workers.get(worker.number) is not worker:
            return
        if event is None:
            self._died(worker)
            return
        name = event.pop("event")
        if name == "ready":
            worker.ready, self._failed_starts = True, 0
        elif name == "launched":
            worker.launched = True
            self.log.write(name, case=worker.task and worker.task.case, worker=worker.number)
        else:
            self._done(worker, name, event)
            if event.get("lost"):
                self._end(worker)  # a kernel that failed spoilt the device for the process

    def _late(self, worker: _Worker) -> None:
        if worker.task is None:
            self._failed(worker, f"a worker was not ready after {self.limits.start:g} s")
            return
        seconds = round(time.monotonic() - worker.begun, 1)
        self._done(worker, "hung", {"seconds": seconds, "launched": worker.launched, "stderr": worker.where()})
        self._end(worker)

    def _died(self, worker: _Worker) -> None:
        words = worker.last_words()
        if worker.task is None:
            self._failed(worker, words)
        else:
            self._done(worker, "died", {"exit": self._end(worker), "stderr": words, "launched": worker.launched})

    def _failed(self, worker: _Worker, words: str) -> None:
        """A worker ended without a case."""
        self._failed_starts += 1
        self.log.write("died", worker=worker.number, exit=self._end(worker), stderr=words)
        if self._failed_starts >= STARTS:
            self._number = len(self._workers)  # the device has no memory for more, say
        if self._number == 0:
            raise NoWorker(words)

    def _done(self, worker: _Worker, outcome: str, event: dict[str, Any]) -> None:
        task, worker.task = worker.task, None
        assert task is not None and outcome in FINAL
        killed = outcome in ("hung", "died")
        if self._alone:
            event |= {"outcome": outcome, "reproducible": killed}
            self.log.write("again", case=task.case, worker=worker.number, **event)
            return
        self.log.write(outcome, case=task.case, kind=task.kind, worker=worker.number, **event)
        if killed:
            self.suspects.append(task)
            self._kills[task.kind] += 1
            if self._kills[task.kind] == KILLS:
                last = [each for each in self.waiting if each.kind == task.kind]
                self.waiting = collections.deque([each for each in self.waiting if each.kind != task.kind] + last)

    def _end(self, worker: _Worker, seconds: float = WAIT_S) -> str:
        del self._workers[worker.number]
        return worker.kill(seconds)


def command(module: str) -> list[str]:
    return [sys.executable, "-P", "-m", "jaxext.verify.worker", module]
