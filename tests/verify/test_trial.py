"""`python -m jaxext verify` as a process: its trial, and what is left when it is killed."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import pytest

from jaxext.cli import command, verify
from jaxext.verify import cases, stand_ins
from jaxext.verify.events import Verdict, read

COMMAND = [sys.executable, "-P", "-m", "jaxext", "verify"]
PATIENCE_S = 300  # for a busy machine


def verified(*arguments, **more):
    """The process, with no flags of these tests."""
    env = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "TRITON_INTERPRET")}
    return subprocess.run([*COMMAND, *map(str, arguments)], env=env, capture_output=True, text=True, timeout=PATIENCE_S, **more)


def test_a_trial_without_a_plant_fails(tmp_path):
    done = verified("--trial", "--workers", "1", "--only", "planted_right", "--json", tmp_path / "events.jsonl")
    assert done.returncode == 1
    assert "planted_crash matmul_nn: planted, picked: reported as None, want ('died', None, True)" in done.stdout


def test_a_plant_that_is_reported_as_something_else_fails_the_trial():
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        found, _ = cases.listed(stand_ins.contacts()[:1], "cpu", list(stand_ins.PLANTS))
    of = {case.name: case.implementation for case in found}

    def verdict(outcome, check):
        return Verdict(outcome, {"check": check, **({"reproducible": True} if outcome in ("hung", "died") else {})})

    told = {name: verdict(*stand_ins.PLANTS[implementation][1:]) for name, implementation in of.items()}
    assert stand_ins.failures(told, of) == []
    for name, implementation in of.items():
        for outcome, check in (("right", None), ("wrong", "graph"), ("hung", None), ("raised", None)):
            wrong = stand_ins.failures({**told, name: verdict(outcome, check)}, of)
            assert len(wrong) == ((outcome, check) != stand_ins.PLANTS[implementation][1:])
    assert stand_ins.failures(told, {name: by for name, by in of.items() if by != "planted_hang"}) == ["no case of planted_hang"]


def test_nothing_is_lost_and_nobody_is_left_when_it_is_killed(tmp_path):
    path = tmp_path / "events.jsonl"
    arguments = ["--trial", "--only", "planted_right", "planted_hang", "--workers", "2", "--json", str(path)]
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    running = subprocess.Popen([*COMMAND, *arguments], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + PATIENCE_S

    def events():
        return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    while not any(event["event"] == "begun" for event in events()):
        assert running.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    running.send_signal(signal.SIGKILL)
    running.wait()
    workers = [event["pid"] for event in events() if event["event"] == "started"]
    assert len(workers) >= 2 and read(path).environment
    while any(map(alive, workers)):
        assert time.monotonic() < until, "a worker outlives its parent"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="it says what is where there is no GPU")
def test_without_a_gpu_it_says_so_in_a_sentence(tmp_path, capsys):
    assert command.main(["verify", "--json", str(tmp_path / "events.jsonl")]) == 2
    out, error = capsys.readouterr()
    assert out == "" and not (tmp_path / "events.jsonl").exists()
    assert error.count("\n") == 1 and "jax finds no GPU here" in error


def test_a_file_that_is_no_file_of_events_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(verify, "_no_gpu", lambda: None)
    (tmp_path / "other.txt").write_text("nonsense\nmore\n")
    with pytest.raises(SystemExit) as end:
        command.main(["verify", "--again", str(tmp_path / "other.txt")])
    assert end.value.code == 2 and "--again" in (error := capsys.readouterr().err) and "no file of events" in error
