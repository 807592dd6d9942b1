"""The headline rows: which they are, in which order they are measured, and what is left when a library hangs, dies, raises or is mended."""

import functools
import math
import re
import time

import headline_stand_ins
import jax
import pytest
from headline_stand_ins import HELLO, answer, row
from msgspec import structs

from benchmarks import headline, headline_worker
from benchmarks.headline_rows import HEADLINE, PATHOLOGICAL, cases, steps
from benchmarks.worker import Worker
from jaxext.bench import bench_report as report
from jaxext.bench import digests, problems
from jaxext.bench.bench_report import Failure, Refusal, Result
from jaxext.tuning import timing

CHOSEN = cases(True)


def test_the_list_is_complete_and_in_order():
    whole = cases(False)
    assert [case.name for case in whole] == [*HEADLINE, *PATHOLOGICAL] and len({*HEADLINE, *PATHOLOGICAL}) == 49 == len(HEADLINE) + 4
    assert [(case.problem.split(",")[0], case.role) for case in whole[:10]] == [
        *(("4096 cubed", role) for role in ("nn", "nt", "tn")),
        *(("resnet50 3x3", role) for role in ("fprop", "dgrad", "wgrad")),
        *(("mamba k=4", role) for role in ("fprop", "dgrad", "wgrad")),
        ("causal k=4 silu", "forward"),
    ]
    assert {case.numbers for case in whole} == {"bf16", "tf32", "bf16x3", "bf16x6", "fp8", "int8 weights", "int4 weights"}
    families = {digests.family(case.tags, case.numbers) for problem in problems.PROBLEMS for case in problem.cases()}
    assert {digests.family(case.tags, case.numbers) for case in whole} == families >= {"matmul", "pieces", "depthwise"}
    twins = cases(True)
    assert len({case.name for case in twins}) == 49 and all(case.name.startswith(of.problem) for case, of in zip(twins, whole, strict=True))


class InProcess:
    """A worker whose answers are given by a function; it keeps what was asked."""

    def __init__(self, answer=answer):
        self.answer, self.asked, self.stopped = answer, [], 0

    def start(self, until):
        return HELLO

    def ask(self, request, seconds):
        self.asked.append(request)
        return self.answer(*request)

    def stop(self):
        self.stopped += 1


def begin(before=()):
    def begun(hello):
        fields = {"environment": hello.environment, "timer": hello.timer, "not_cupti": None, "reduced": True}
        return report.Report(**fields, ceilings={}, interrupted=True, rows=tuple(before))

    return begun


def run(worker, chosen=CHOSEN[:3], before=(), until=math.inf):
    saved, said = [], []
    return headline.run(chosen, worker, begin(before), saved.append, until, said.append), saved, said


def results(whole):
    return {(at.name, library) for at in whole.rows for library in at.results}


def test_a_row_is_written_after_each_library():
    worker = InProcess()
    whole, saved, said = run(worker)
    measured = [len(results(each)) for each in saved]
    assert measured == [0, 0, 0, 0, *range(1, 10), 9] and all(each.interrupted for each in saved[:-1])
    assert saved[-1] is whole and not whole.interrupted and not whole.left_out and worker.stopped == 1
    assert whole.ceilings == dict.fromkeys(headline.CEILINGS, 1e12) and said[3] == f"{CHOSEN[0].name}: triton 1"
    assert [request[1:3] for request in worker.asked[3:]] == steps(CHOSEN[:3])
    following = [request[3] for request in worker.asked[3:]]
    assert following == [1, 1, 2, 2, 0, 0, 1, 2, None]  # the next case that is another one
    assert all(set(of.digests) == set(of.results) for of in whole.rows)


def test_a_run_goes_on_with_each_result_whose_code_is_the_same(monkeypatch):
    """A mended kernel is measured again, and lax beside it is not; a library that failed is tried again, last."""
    few = CHOSEN[2:4]  # a product and a convolution
    first, *_ = run(InProcess(lambda *asked: Failure("no") if asked[1:3] == (0, "cuda") else row_of(few, *asked)), few[:1])
    worker = InProcess(functools.partial(row_of, few))
    second, *_ = run(worker, few, first.rows)
    assert [asked[1:3] for asked in worker.asked[3:]] == [(1, "triton"), (1, "cuda"), (1, "lax"), (0, "cuda")]
    assert len(results(second)) == 6

    known = digests._digest
    monkeypatch.setattr(digests, "_digest", lambda family, *of: known(family, *of) + "mended" * ((family, of[0]) == ("conv", "triton")))
    worker = InProcess(functools.partial(row_of, few))
    third, *_ = run(worker, few, second.rows)
    assert [asked[1:3] for asked in worker.asked[3:]] == [(1, "triton")] and results(third) == results(second)
    assert third.rows[1].digests["triton"].endswith("mended") and third.rows[0] == second.rows[0]


def row_of(chosen, kind, *request):
    return 1e12 if kind == "ceiling" else row(*request[:2], chosen=chosen)


def test_a_library_that_hangs_dies_or_raises_leaves_the_row_what_it_has(monkeypatch, tmp_path):
    """A process in which a library hangs or dies is replaced; one in which a library raises is not."""
    monkeypatch.setattr(headline, "LIMIT_S", 1)
    planted = {(0, "cuda"): "dies", (1, "triton"): "raises", (1, "cuda"): "refuses", (0, "lax"): "hangs"}
    worker, started, path = Worker(headline_stand_ins.serve, planted), [], tmp_path / "gpu.json"
    start = worker.start
    monkeypatch.setattr(worker, "start", lambda until: started.append(1) or start(until))
    whole = headline.run(CHOSEN[:2], worker, begin(), functools.partial(report.write, path), math.inf, print)
    first, second = (of.results for of in whole.rows)
    assert report.read(path) == whole and len(started) == 3 and not whole.left_out
    assert isinstance(first["triton"], Result) and first["cuda"] == Failure("the process died: SIGSEGV")
    assert second["triton"] == Failure("ValueError: planted") and second["cuda"] == Refusal("not this one")
    assert first["lax"] == Failure("no time in 1 s") and isinstance(second["lax"], Result)


def test_a_process_is_waited_for_no_longer_than_the_run_may_take():
    worker = Worker(headline_stand_ins.serve, {(0, "cuda"): "hangs"})
    assert worker.start(time.monotonic() - 1) == Failure("no time in 0 s")
    assert worker.ask(("row", 0, "triton"), 1) == Failure("no time in 0 s")


class Pipe:
    """The pipe of a process, with all requests in it already; it keeps the answers."""

    def __init__(self, *requests):
        self.requests, self.answers = [*requests], []

    def recv(self):
        if not self.requests:
            raise EOFError
        return self.requests.pop(0)

    def send(self, answer):
        self.answers.append(answer)


def test_what_the_process_measures(monkeypatch):
    """A product and a convolution, whose operands and truth a thread computes, against float64; a kernel refuses without a GPU."""
    monkeypatch.setattr(headline_worker.signal, "signal", lambda *_: None)
    pipe = Pipe(
        ("ceiling", "copy"), ("row", 0, "lax", 3, {"copy": 1e9}), ("row", 3, "lax", None, {}), ("row", 3, "cuda", None, {}), ("row",)
    )
    headline_worker.serve(pipe, True)
    (hello, _), (rate, _), (first, _), (second, _), (refused, _), (failure, is_lost) = pipe.answers
    assert hello.platform == "cpu" and hello.environment["versions"] and rate > 0
    assert (first.name, second.name) == (CHOSEN[0].name, CHOSEN[3].name)
    assert all(of.results["lax"].error < timing.law(["bfloat16"], None, "cuda") for of in (first, second))
    assert first.results["lax"].copy > 0 and second.results["lax"].copy is None
    assert "platform is 'cpu'" in refused.results["cuda"].refused and refused.digests["cuda"]
    assert isinstance(failure, Failure) and not is_lost


def planted_report():
    rows = []
    for at, case in enumerate(cases(False)):
        ours = {
            "triton": row(at, "triton").results["triton"],
            "cuda": Failure("RuntimeError: " + "x" * 490),
            "lax": Failure("no time in 25 s"),
        }
        ours["triton"] = structs.replace(ours["triton"], error=0.5 if at % 2 else 1e-6, roofline=0.5)
        rows.append(
            structs.replace(row(at, "lax"), name=case.name, results=report.Results(ours if at else ours | row(0, "lax", 2.0).results))
        )
    return begin(rows)(HELLO)


def test_the_summary_is_short_and_its_table_last(tmp_path, capsys):
    """Reasons may be long.  The summary is printed again from the file, without a device."""
    text = headline.summary(planted_report())
    lines = text.splitlines()
    assert 8_000 < len(text) <= headline.MOST and len(lines) > 49
    assert all(line.startswith(name[:40]) for line, name in zip(lines[-49:], (*HEADLINE, *PATHOLOGICAL), strict=True))
    assert re.search(r"1 +FAILED +2 +2.00 +50% +1.0e-06$", lines[-49]) and re.search(r"1! +FAILED +FAILED +- +- +-$", lines[-48])
    assert "triton: 25 right, 24 wrong" in lines and "cuda: 49 failed" in lines and "lax: 48 failed, 1 right" in lines
    report.write(tmp_path / "gpu.json", planted_report())
    assert headline.main(["--read", str(tmp_path / "gpu.json")]) == 0
    assert capsys.readouterr().out == text + "\n"


def test_the_command_leaves_the_device_to_the_process_that_measures(monkeypatch, tmp_path, capsys):
    """`--resume` goes on with a report of the same device alone."""
    monkeypatch.setattr(jax, "devices", lambda *_: pytest.fail("it asks for the device"))
    monkeypatch.setattr(headline, "Worker", lambda serve, is_trial: InProcess())
    path, asked = tmp_path / "gpu.json", ["--quick", "--json", str(tmp_path / "gpu.json")]
    assert headline.main(asked) == 0 and len(results(report.read(path))) == 3 * 49
    assert headline.summary(report.read(path)) in capsys.readouterr().out
    assert headline.main([*asked, "--resume"]) == 0
    monkeypatch.setitem(headline_stand_ins.ENVIRONMENT, "device", "another")
    with pytest.raises(SystemExit):
        headline.main([*asked, "--resume"])
    assert "is of another device" in capsys.readouterr().err
    assert headline.main(["--list"]) == 0
    assert capsys.readouterr().out.splitlines() == [*HEADLINE, *PATHOLOGICAL]
