"""Several processes on this computer: what two of them check of each other, and the example, to its end and with one process killed."""

import os
import re

import filelock
import multi_process
import process_checks
import processes
import pytest


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A folder with the names of the checks that passed, and what was printed, of each process.  pytest-xdist's workers share one run."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "process_checks"
    with filelock.FileLock(f"{folder}.lock"):
        if not folder.exists():
            folder.mkdir()
            for index, ended in enumerate(processes.run(process_checks.__file__, str(folder))):
                (folder / f"printed.{index}").write_text(f"{ended.stdout}\nended with status {ended.returncode}")
                (folder / f"passed.{index}").touch()  # if it did not come so far
    return folder


@pytest.mark.parametrize("check", [*process_checks.CHECKS, "tables"])
def test_two_processes(results, check):
    for index in range(2):
        passed, printed = ((results / f"{what}.{index}").read_text() for what in ("passed", "printed"))
        assert check in passed.splitlines(), f"process {index} did not pass it:\n{printed}"


def test_both_processes_end(results):
    for index in range(2):
        assert (results / f"printed.{index}").read_text().endswith("\nended with status 0")


def test_the_example(capsys):
    """Its processes have the same losses, which fall, and which one device alone finds too."""
    assert multi_process.main(["--timeout", "60"]) == 0  # by which the one may finish before the other, on a busy computer
    printed = capsys.readouterr().out
    losses = re.findall(r"^\[(\d)\] losses: (.*)$", printed, re.MULTILINE)
    assert sorted(index for index, _ in losses) == ["0", "1"]
    (same,) = {values for _, values in losses}
    first, *_, last = map(float, same.split())
    assert last < 0.7 * first
    assert printed.count("4 of 8 devices (cpu) belong to it") == 2
    assert printed.count("films: (64, 12, 12, 8) in all, (32, 12, 12, 8) in this process") == 2
    errors = re.findall(r"the other processes have the same; the losses of a single device differ by (\S+) at most", printed)
    assert len(errors) == 2 and all(float(error) < 1e-4 for error in errors)


def test_a_process_that_is_killed(capsys):
    """The other finds out when it has sent no heartbeat for a time: it ends, and does not wait."""
    assert multi_process.main(["--die", "1"]) == 1
    printed = capsys.readouterr().out
    assert "process 1 ended: killed by SIGKILL" in printed
    assert "process 0 ended: killed by SIGABRT" in printed
    assert "Terminating process because the JAX distributed service detected fatal errors" in printed
    assert re.search(r"stopped sending heartbeats\):\n\[0\] .*\b1\n", printed)
    assert "losses" not in printed


def test_what_the_example_does_with_a_process_that_stays(tmp_path, monkeypatch, capsys):
    """One fails, the other does not find out: it is stopped."""
    script = tmp_path / "script.py"
    script.write_text("import sys, time\nif '--process=1' in sys.argv: sys.exit('broken')\ntime.sleep(600)")
    monkeypatch.setattr(multi_process, "__file__", str(script))
    assert multi_process.launch([], processes=2, gpus=False, timeout=1) == 1
    assert capsys.readouterr().out.splitlines() == [
        "[1] broken",
        "process 1 ended: exit status 1",
        "process 0 was still running 2 seconds later, and was stopped",
    ]


def test_with_gpus_there_must_be_some(tmp_path, monkeypatch, capsys):
    """Each process is given one, and may not take CPUs instead."""
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nsys.exit(' '.join(os.environ[name] for name in ('JAX_PLATFORMS', 'JAX_LOCAL_DEVICE_IDS')))")
    monkeypatch.setattr(multi_process, "__file__", str(script))
    assert multi_process.main(["--gpus"]) == 1
    assert {"[0] cuda 0", "[1] cuda 1"} < set(capsys.readouterr().out.splitlines())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--processes 0", "--processes: it is 0, want at least 1"),
        ("--processes -1", "--processes: it is -1, want at least 1"),
        ("--die 2", "--die: it is 2, want one of the processes, from 0"),
        ("--die -1", "--die: it is -1, want one of the processes, from 0"),
        ("--timeout 0", "--timeout: it is 0, want at least 1 second"),
    ],
)
def test_arguments_that_are_refused(args, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        multi_process.main(args.split())
    assert message in capsys.readouterr().err


def test_an_interrupt_is_no_traceback(monkeypatch):
    def launch(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(multi_process, "launch", launch)
    assert multi_process.main([]) == 130


def test_no_process_outlives_its_limit(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys, time\nprint('process', sys.argv[3], flush=True)\nif sys.argv[3] == '1': time.sleep(600)")
    done, stopped = processes.run(str(script), limit=5)
    assert (done.returncode, done.stdout) == (0, "process 0\n")
    assert stopped.returncode == -9
