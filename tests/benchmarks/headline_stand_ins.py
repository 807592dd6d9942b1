"""Processes in place of the one that measures headline rows: they answer at once, hang, die, refuse or fail."""

import os
import signal
import time

from benchmarks.headline_rows import cases
from benchmarks.headline_worker import Hello
from jaxext.bench.bench_report import Failure, Measured, Refusal, Result, Results

HELLO = Hello("cpu", {"device": "a stand-in", "date": "2026-01-01", "versions": {}}, "made up", None, {})
CHOSEN = cases(True)


def row(at, library, result=None, chosen=CHOSEN):
    case = chosen[at]
    facts = {name: getattr(case, name) for name in ("name", "problem", "role", "dtype", "shapes", "flops")}
    result = result or Result(ms=(1.0, 1.0, 1.0), error=0.0)
    return Measured(**facts, tags=tuple(sorted(case.tags)), bytes=1, results=Results({library: result}))


def serve(pipe, planted):
    """`planted`: (place of the row, library) -> what happens there: a signal or a time to sleep, an answer or a result."""
    pipe.send((HELLO, False))
    while True:
        try:
            kind, *request = pipe.recv()
        except EOFError:
            return
        fault = planted.get(tuple(request[:2]))
        if isinstance(fault, signal.Signals):
            os.kill(os.getpid(), fault)
        elif isinstance(fault, int):
            time.sleep(fault)
        elif isinstance(fault, Failure):
            pipe.send((fault, False))
        else:
            refused = fault and Refusal(fault)
            pipe.send((1e12 if kind == "ceiling" else row(*request[:2], refused), False))
