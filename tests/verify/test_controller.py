"""The controller, with workers that do what the name of a case says, and a clock that the tests move."""

import contextlib
import json
import sys
import time
import types

import pytest

from jaxext.verify import controller as controlled
from jaxext.verify import events
from jaxext.verify.controller import Controller, Limits, NoWorker, Task
from jaxext.verify.events import Log, read

WORKER = """
import json, os, pathlib, sys, time

def tell(event, **more):
    print(json.dumps({"event": event, **more}), flush=True)

tell("ready")
for line in sys.stdin:
    case = json.loads(line)["case"]
    tell("launched")
    if "hangs" in case:
        time.sleep(3600)
    if "once" in case:
        seen = pathlib.Path(sys.argv[1]) / case
        if not seen.exists():
            seen.touch()
            os.abort()
    if "dies" in case:
        sys.stderr.write("last words")
        sys.stderr.flush()
        os.abort()
    if "raises" in case:
        tell("raised", type="ValueError", reason="mine", frames=["a.py:1 f"], lost="lost" in case)
    elif "wrong" in case:
        tell("wrong", check="bits", reason="first at (1,)")
    else:
        tell("right", errors={"norm": 0.0, "worst": 0.0})
"""


@pytest.fixture
def clock(monkeypatch):
    """Time goes on by itself, and jumps ahead where a test says so."""
    ahead = types.SimpleNamespace(seconds=0.0)
    now = types.SimpleNamespace(monotonic=lambda: time.monotonic() + ahead.seconds, sleep=lambda seconds: None)
    monkeypatch.setattr(controlled, "time", now)
    monkeypatch.setattr(events, "time", now)
    return ahead


def tasks(*names, kind="kind"):
    return [Task(name, "contact", kind) for name in names]


@pytest.fixture
def of(tmp_path):
    """Makes a controller, whose log is closed at the end."""
    with contextlib.ExitStack() as ends:

        def make(workers=2, program=WORKER, **limits):
            log = Log(tmp_path / "events.jsonl")
            ends.callback(log.close)
            command = [sys.executable, "-c", program, str(tmp_path)]
            seconds = {"total": 1e6, "first": 1e5, "each": 1e5, "start": 1e5} | limits
            return Controller(log, command, workers=workers, limits=Limits(**seconds))

        yield make


def written(tmp_path):
    return [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]


def names(tmp_path, event):
    return [each.get("case") for each in written(tmp_path) if each["event"] == event]


def test_every_outcome_is_written(tmp_path, clock, of):
    controller = of()

    def progress(controller):
        if [task.case for task in controller.running] == ["hangs"] and not controller.waiting:
            clock.seconds += 1e5

    controller.progress = progress
    controller.run(tasks("a", "hangs", "wrong", "dies", "raises", "b"))
    found = read(tmp_path / "events.jsonl").verdicts
    assert {name: verdict.outcome for name, verdict in found.items()} == {
        **dict.fromkeys("ab", "right"),
        **dict(hangs="hung", dies="died", raises="raised", wrong="wrong"),
    }
    assert found == controller.log.verdicts
    assert found["hangs"].event["reproducible"] is found["dies"].event["reproducible"] is True
    assert found["dies"].reason == "the process ended with SIGABRT\n  last words (alone, too)"
    assert found["raises"].reason == "ValueError: mine\n  a.py:1 f"
    assert {*names(tmp_path, "begun")} == {*names(tmp_path, "launched")} == {*found}
    assert controller.running == []


def test_the_first_case_of_a_worker_may_take_longer(tmp_path, clock, of, monkeypatch):
    """It is 45 s, and 20 s for others."""
    monkeypatch.setattr(controlled, "TICK_S", 0.001)
    controller = of(workers=1, first=Limits.first, each=Limits.each)

    def progress(controller):
        clock.seconds += any("hangs" in task.case for task in controller.running)

    controller.progress = progress
    controller.run(tasks("hangs first", "right", "hangs later"))
    first, later = (controller.log.verdicts[f"hangs {when}"].event["seconds"] for when in ("first", "later"))
    assert 45 <= first and 20 <= later < 45


def test_what_dies_once_is_right_alone(tmp_path, of):
    controller = of()
    controller.run(tasks("once", "a", "b"))
    (verdict,) = [verdict for verdict in controller.log.verdicts.values() if verdict.outcome == "died"]
    assert verdict.event["reproducible"] is False and "(not alone)" in verdict.reason
    assert written(tmp_path)[-1]["outcome"] == "right"


def test_a_kind_that_kills_twice_goes_last(tmp_path, of):
    of(workers=1).run([*tasks("dies 1", "dies 2", "a"), *tasks("b", kind="other")])
    assert names(tmp_path, "begun")[:4] == ["dies 1", "dies 2", "b", "a"]


@pytest.mark.parametrize(("case", "workers"), [("raises", 1), ("raises, device lost", 2)])
def test_a_worker_whose_device_is_lost_is_replaced(case, workers, tmp_path, of):
    of(workers=1).run(tasks(case, "a", "wrong", "b"))
    assert len([event for event in written(tmp_path) if event["event"] == "started"]) == workers


def test_the_time_is_up(tmp_path, clock, of):
    controller = of(workers=1, total=1000)

    def progress(controller):
        if [task.case for task in controller.running] == ["hangs"]:
            clock.seconds += 1000

    controller.progress = progress
    controller.run(tasks("a", "hangs", "b"))
    assert {name: verdict.outcome for name, verdict in controller.log.verdicts.items()} == {"a": "right"}
    assert names(tmp_path, "stopped") == ["hangs"] and "b" not in names(tmp_path, "begun")
    assert controller.running == []


def test_workers_beyond_those_that_start_are_not_tried_for_ever(tmp_path, of):
    """Memory for two, say: the others fail, and these two do all."""
    two = f"""
import pathlib, sys
for slot in '01':
    try:
        open(pathlib.Path(sys.argv[1], slot), 'x').close()
        break
    except FileExistsError:
        pass
else:
    sys.exit('no memory')
{WORKER}"""
    controller = of(workers=8, program=two)
    controller.run(tasks(*"abcdefgh"))
    assert {verdict.outcome for verdict in controller.log.verdicts.values()} == {"right"} and len(controller.log.verdicts) == 8
    assert len([event for event in written(tmp_path) if event["event"] == "died"]) < 8 + controlled.STARTS


def test_no_worker_starts(tmp_path, of):
    with pytest.raises(NoWorker, match="no device"):
        of(workers=1, program="import sys; sys.exit('no device')").run(tasks("a"))
    assert len([event for event in written(tmp_path) if event["event"] == "died"]) == controlled.STARTS


def test_workers_end_when_the_run_is_interrupted(tmp_path, of):
    controller = of()

    def progress(controller):
        if len(controller.running) == 2:
            raise KeyboardInterrupt

    controller.progress = progress
    with pytest.raises(KeyboardInterrupt):
        controller.run(tasks("hangs 1", "hangs 2"))
    assert controller.running == [] and sorted(names(tmp_path, "stopped")) == ["hangs 1", "hangs 2"]


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    path = tmp_path / "events.jsonl"
    log = Log(path)
    log.write("environment", device="first")
    log.write("right", case="a")
    log.write("wrong", case="b", check="bits", reason="first at 0")
    log.close()
    path.write_text(path.read_text() + '{"event": "right", "ca')
    past = read(path)
    assert past.environment["device"] == "first" and {*past.verdicts} == {"a", "b"}
    path.write_text("nonsense\n" + path.read_text())
    with pytest.raises(ValueError, match="no file of events"):
        read(path)


def test_later_runs_of_a_file_count(tmp_path):
    for outcome in ("wrong", "right"):
        log = Log(tmp_path / "events.jsonl")
        log.write("environment", device=outcome)
        log.write(outcome, case="a")
        log.write("right", case=f"after {outcome}")
        log.close()
    past = read(tmp_path / "events.jsonl")
    assert past.environment["device"] == past.verdicts["a"].outcome == "right"
    assert {*past.verdicts} == {"a", "after wrong", "after right"}
    assert {*past.alike} == {"a", "after right"}  # what ran on another device is no evidence


def test_where_there_is_no_terminal_a_line_comes_every_15_seconds(monkeypatch, capsys, of):
    from jaxext.cli import verify

    ahead = [0]
    monkeypatch.setattr(verify, "time", types.SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0]))
    with verify._progress(7) as progress:
        controller = of()
        for ahead[0] in (1, 2, 40, 41, 42, 90):
            progress(controller)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all(line.endswith("0 of 7, starting") for line in lines)
