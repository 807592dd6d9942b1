"""Processes in place of the one that measures headline rows: they answer at once, hang, die, refuse or raise."""

import os
import signal
import time

from msgspec import structs

from benchmarks.headline_rows import cases
from benchmarks.headline_worker import Hello
from jaxext.bench.bench_report import Failure, Measured, Refusal, Result, Results

ENVIRONMENT = {"device": "a stand-in", "date": "2026-01-01", "versions": {}}
HELLO = Hello("cpu", ENVIRONMENT, "made up", None, {})


CHOSEN = cases(True)


def row(at, library, ms=1.0, chosen=CHOSEN):
    case = chosen[at]
    facts = {name: getattr(case, name) for name in ("name", "problem", "role", "dtype", "shapes", "flops")}
    result = Result(ms=(ms, ms, ms), tflops=1, gbps=1, error=0.0, worst=0.0, trace_ms=1, compile_ms=1)
    return Measured(**facts, tags=tuple(sorted(case.tags)), bytes=1, results=Results({library: result}))


def answer(kind, *request):
    return 1e12 if kind == "ceiling" else row(*request[:2])


def serve(pipe, planted):
    """`planted`: (place of the row, library) -> what happens there."""
    pipe.send((HELLO, False))
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            return
        fault = planted.get(tuple(request[1:3]))
        if fault == "hangs":
            time.sleep(60)
        elif fault == "dies":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif fault == "raises":
            pipe.send((Failure("ValueError: planted"), False))
        elif fault == "refuses":
            pipe.send((structs.replace(row(*request[1:3]), results=Results({request[2]: Refusal("not this one")})), False))
        else:
            pipe.send((answer(*request), False))
