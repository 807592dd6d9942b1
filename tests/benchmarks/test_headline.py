"""The headline rows: in which order they are measured, and what is left when a library hangs, dies, fails or is mended."""

import functools
import math
import pickle
import re
import signal
import time
from unittest import mock

import jax
import pytest
from gpu_machine import serve
from msgspec import structs

from benchmarks import headline, headline_worker
from benchmarks.headline_rows import HEADLINE, PATHOLOGICAL, cases
from benchmarks.worker import Worker
from jaxext.bench import bench_report as report
from jaxext.bench import digests, problems
from jaxext.bench.bench_report import Failure, Refusal, Result, Results
from jaxext.tuning import timing

CHOSEN = cases(True)
HELLO = headline_worker.Hello("cpu", {"device": "a stand-in", "date": "2026-01-01", "versions": {}}, "made up", None, {})

ROWS = len(HEADLINE) + len(PATHOLOGICAL)


def row(at, library, result=None, chosen=CHOSEN):
    case = chosen[at]
    facts = {name: getattr(case, name) for name in ("name", "problem", "role", "dtype", "shapes", "flops")}
    results = Results({library: result or Result(ms=(1.0, 1.0, 1.0), error=0.0)})
    return report.Measured(**facts, tags=tuple(sorted(case.tags)), bytes=1, results=results)


def answered(kind, at=0, library="", *_, planted, chosen=CHOSEN):
    """The answer to a request; `planted`: (place of the row, library) -> a failure."""
    return planted.get((at, library)) or (1e12 if kind == "ceiling" else row(at, library, None, chosen))


def in_process(planted=(), chosen=CHOSEN):
    """A worker that answers at once."""
    answer = lambda request, seconds: answered(*request, planted=dict(planted), chosen=chosen)
    return mock.Mock(**{"start.return_value": HELLO, "ask.side_effect": answer})


def requested_steps(worker):
    """The steps that a worker was asked for, each with the next case that is another one."""
    return [tuple(call.args[0][1:4]) for call in worker.ask.call_args_list if call.args[0][0] == "row"]


def begin(hello, before=()):
    fields = {"environment": hello.environment, "timer": hello.timer, "not_cupti": None, "reduced": True}
    return report.Report(**fields, ceilings={}, interrupted=True, rows=tuple(before))


def run(worker, chosen, before=()):
    saved = []
    return headline.run(chosen, worker, functools.partial(begin, before=before), saved.append, math.inf, print), saved


def count(complete):
    return sum(len(each.results) for each in complete.rows)


def test_each_family_of_kernels_has_rows():
    families = {digests.family(case.tags, case.numbers) for problem in problems.PROBLEMS for case in problem.cases()}
    assert {digests.family(case.tags, case.numbers) for case in cases(False)} == families >= {"matmul", "pieces", "depthwise"}


def test_a_row_is_written_after_each_library():
    worker = in_process()
    complete, saved = run(worker, CHOSEN[:3])
    assert [count(each) for each in saved] == [0, 0, 0, 0, *range(1, 10), 9] and all(each.interrupted for each in saved[:-1])
    assert saved[-1] is complete and not complete.interrupted and not complete.left_out and worker.stop.called
    ours, lax = [(at, library) for at in range(3) for library in ("triton", "cuda")], [(at, "lax") for at in range(3)]
    assert requested_steps(worker) == [(*step, after) for step, after in zip(ours + lax, [1, 1, 2, 2, 0, 0, 1, 2, None], strict=True)]


def test_a_run_goes_on_with_each_result_whose_code_is_the_same(monkeypatch):
    """A mended kernel is measured again, and lax beside it is not; a library that failed is tried again, last."""
    few = CHOSEN[2:4]  # a product and a convolution
    first, _ = run(in_process({(0, "cuda"): Failure("no")}, few), few[:1])
    second, _ = run(again := in_process(chosen=few), few, first.rows)
    assert [step[:2] for step in requested_steps(again)] == [(1, "triton"), (1, "cuda"), (1, "lax"), (0, "cuda")] and count(second) == 6
    known = digests._digest
    monkeypatch.setattr(digests, "_digest", lambda family, *of: known(family, *of) + "mended" * ((family, of[0]) == ("conv", "triton")))
    third, _ = run(mended := in_process(chosen=few), few, second.rows)
    assert [step[:2] for step in requested_steps(mended)] == [(1, "triton")] and count(third) == 6
    assert third.rows[1].digests["triton"].endswith("mended") and third.rows[0] == second.rows[0]


def test_a_library_that_hangs_dies_or_fails_leaves_the_row_what_it_has(monkeypatch, tmp_path):
    """A process in which a library hangs or dies is replaced; one in which a library fails is not."""
    monkeypatch.setattr(headline, "LIMIT_S", 1)
    failure, refusal = Failure("ValueError: planted"), Refusal("not this one")
    pickled = lambda answer: pickle.dumps((answer, False))
    answers = {(at, library): pickled(row(at, library)) for at in (0, 1) for library in ("triton", "lax")} | {(): pickled(1e12)}
    answers |= {(0, "cuda"): signal.SIGSEGV, (1, "triton"): pickled(failure), (1, "cuda"): pickled(row(1, "cuda", refusal)), (0, "lax"): 60}
    worker = Worker(serve, pickled(HELLO), answers)
    with mock.patch.object(worker, "start", side_effect=worker.start) as start:
        complete = headline.run(CHOSEN[:2], worker, begin, functools.partial(report.write, tmp_path / "gpu.json"), math.inf, print)
    first, second = (of.results for of in complete.rows)
    assert report.read(tmp_path / "gpu.json") == complete and start.call_count == 3 and not complete.left_out
    assert isinstance(first["triton"], Result) and first["cuda"] == Failure("the process died: SIGSEGV")
    assert second["triton"] == failure and second["cuda"] == refusal
    assert first["lax"] == Failure("no time in 1 s") and isinstance(second["lax"], Result)


def test_a_process_is_waited_for_no_longer_than_the_run_may_take():
    worker = Worker(serve, b"", {})
    assert worker.start(time.monotonic() - 1) == Failure("no time in 0 s")
    assert worker.ask(("row", 0, "triton"), 1) == Failure("no time in 0 s")


def test_the_process_that_measures(monkeypatch):
    """A product and a convolution, whose operands and truth a thread computes, against float64; a kernel refuses without a GPU."""
    monkeypatch.setattr(headline_worker.signal, "signal", lambda *_: None)
    rows = [("row", 0, "lax", 3, {"copy": 1e9}), ("row", 3, "lax", None, {}), ("row", 3, "cuda", None, {}), ("row",)]
    pipe = mock.Mock(**{"recv.side_effect": [("ceiling", "copy"), *rows, EOFError]})
    headline_worker.serve(pipe, True)
    hello, rate, first, second, refused, failure = (call.args[0][0] for call in pipe.send.call_args_list)
    assert hello.platform == "cpu" and hello.environment["versions"] and rate > 0 and isinstance(failure, Failure)
    assert (first.name, second.name) == (CHOSEN[0].name, CHOSEN[3].name)
    assert all(of.results["lax"].error < timing.law(["bfloat16"], None, "cuda") for of in (first, second))
    assert "platform is 'cpu'" in refused.results["cuda"].refused and refused.digests["cuda"]


def test_the_summary_is_short_and_its_table_last(tmp_path, capsys):
    """Reasons may be long.  The summary is printed again from the file, without a device."""
    rows = []
    for at, case in enumerate(cases(False)):
        triton = Result(ms=(1.0, 1.0, 1.0), error=0.5 if at % 2 else 1e-6, roofline=0.5)
        failed = {"triton": triton, "cuda": Failure("RuntimeError: " + "x" * 490), "lax": Failure("no time in 25 s")}
        rows.append(structs.replace(row(at, "lax"), name=case.name, results=Results(failed)))
    report.write(tmp_path / "gpu.json", begin(HELLO, rows))
    assert headline.main(["--read", str(tmp_path / "gpu.json")]) == 0
    lines = (text := capsys.readouterr().out).splitlines()
    assert (
        8_000 < len(text) <= headline.MOST
        and f"triton: {-(-ROWS // 2)} right, {ROWS // 2} wrong" in lines
        and f"cuda: {ROWS} failed" in lines
    )
    assert all(line.startswith(name[:40]) for line, name in zip(lines[-ROWS:], (*HEADLINE, *PATHOLOGICAL), strict=True))
    assert re.search(r"1 +FAILED +FAILED +- +50% +1.0e-06$", lines[-ROWS]) and re.search(r"1! +FAILED +FAILED +- +- +-$", lines[1 - ROWS])


def test_the_command_leaves_the_device_to_the_process_that_measures(monkeypatch, tmp_path, capsys):
    """`--resume` goes on with a report of the same device alone."""
    monkeypatch.setattr(jax, "devices", lambda *_: pytest.fail("it asks for the device"))
    monkeypatch.setattr(headline, "Worker", lambda serve, is_trial: in_process())
    monkeypatch.setattr(headline, "cases", lambda quick: CHOSEN[:2])
    path = tmp_path / "gpu.json"
    assert headline.main(["--quick", "--json", str(path)]) == 0 and count(report.read(path)) == 6
    assert headline.main(["--quick", "--json", str(path), "--resume"]) == 0
    monkeypatch.setitem(HELLO.environment, "device", "another")
    with pytest.raises(SystemExit):
        headline.main(["--quick", "--json", str(path), "--resume"])
    assert "was measured with another device" in capsys.readouterr().err
