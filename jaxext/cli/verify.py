"""The command `verify`: checks every kernel on the GPU of this machine, and stores which kinds are right."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import importlib
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import jax

from jaxext._messages import counted
from jaxext._target import compute_capability
from jaxext.cli.terminal import Failure, Grid, UsageError, as_lines, count, show
from jaxext.tables import active, environment, table_file
from jaxext.tables.table_format import Entry
from jaxext.verify import results
from jaxext.verify.cases import IMPLEMENTATIONS, Case, listed
from jaxext.verify.controller import Controller, Limits, NoWorker, Task, command
from jaxext.verify.events import FAILED, Log, Past, Verdict, counts, is_alike, read

MOST_WORKERS = 14
WORKER_BYTES = 3 << 30  # of a GPU's memory, with jax's context and libraries
LINE_S = 15  # between two lines of progress where there is no terminal
CLOSING_S = 10  # of the minutes, to end the workers, and for the table and the record
ROOM = 10_500  # characters of the failures and the table
TRIAL = Limits(start=300, first=300, each=300, total=600)  # a busy machine is no fault
# No autotuning of what XLA compiles beside a kernel, and memory for all workers.
ENVIRONMENT = {"JAX_PLATFORMS": "cuda,cpu", "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_ENABLE_COMPILATION_CACHE": "false"}
TRIAL_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "TRITON_INTERPRET": "1"}


def add_arguments(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--family", nargs="+", metavar="NAME", help="check only kernels of these families, named as in the table")
    add("--implementation", choices=IMPLEMENTATIONS, help="check only kernels of this implementation")
    add("--only", nargs="+", metavar="TEXT", help="check only cases whose name contains one of these")
    add("--again", metavar="FILE", help="check only cases that were not right in this file of events (of --json)")
    add("--minutes", type=float, default=3, metavar="M", help="time limit for everything, in minutes (default: %(default)s)")
    add("--json", metavar="FILE", help="append each event to this file at once, as a line of JSON (default: verify.jsonl in the cache)")
    add("--share", nargs="?", const="verified.json", metavar="FILE", help="also write the record to this file, for a pull request")
    add("--workers", type=count, metavar="N", help=f"worker processes (default: the cores of this machine less 2, at most {MOST_WORKERS})")
    add("--list", action="store_true", help="list the cases, and run none")
    add("--trial", action="store_true", help="try the command on a CPU, with Triton's interpreter and stand-ins for kernels that fail")


def verify(options) -> int:
    """Check each kind of kernel on the GPU of this machine against float64, and store which kinds are right.

    Calls that name no implementation use only verified kernels.  Kernels run in worker processes, so a hang or a crash is reported like a
    wrong result.  The exit status is 1 if a kernel failed, and 2 if there is no GPU.

    examples:
      python -m jaxext verify
      python -m jaxext verify --family conv depthwise --json events.jsonl
      python -m jaxext verify --again events.jsonl --json events.jsonl
      python -m jaxext verify --trial
    """
    start = time.monotonic()
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # this process asks what the GPU is, and its workers want the memory
    if options.trial:
        os.environ.update(TRIAL_ENVIRONMENT)  # before Triton is imported
    elif reason := _no_gpu():
        print(f"python -m jaxext: verify: {reason}; --trial tries the command on a CPU", file=sys.stderr)
        return 2
    module = importlib.import_module(f"jaxext.verify.{'stand_ins' if options.trial else 'cases'}")
    try:
        past = read(options.again) if options.again else Past({}, {}, {})
    except (OSError, ValueError) as error:
        raise UsageError(f"--again: {error}") from None
    events = options.json
    if not options.trial and not options.list:
        _check_writable()
        events = events or _events(options)
    try:
        log = Log(events, start)
    except OSError as error:
        raise UsageError(f"--json: {error}") from None
    controller = _controller(options, log, module)
    try:
        if not options.list:
            log.write("environment", **environment.report())
            controller.start()  # workers start while the cases are listed
        implementations = [name for name in module.IMPLEMENTATIONS if options.implementation in (None, name)]
        cases, refusals = listed(module.contacts(), module.PLATFORM, implementations)
        chosen = _chosen(options, cases, past)
        if options.list:
            show(Grid(counted(len(chosen), "case"), ("case", "kind"), [(case.name, case.kind) for case in chosen]))
            show(*(f"{each.implementation} does not support {each.op} of {each.contact}: {each.reason}" for each in refusals))
            return 0
        for refusal in refusals:
            log.write("refused", **dataclasses.asdict(refusal))
        return _run(options, log, controller, module, cases, chosen, past)
    finally:
        controller.close()
        log.close()


def _run(options, log: Log, controller: Controller, module: ModuleType, cases: list[Case], chosen: list[Case], past: Past) -> int:
    """Check the chosen cases, store what is known, and return the exit status."""
    if not chosen and not past.verdicts:
        raise UsageError("no case was chosen: see --list")
    log.write("listed", cases=len(chosen), nvidia_smi=None if options.trial else _nvidia_smi())
    status = 0
    try:
        with _progress(len(chosen)) as controller.progress:
            limits = getattr(module, "LIMITS", {})
            controller.run([Task(case.name, case.contact, case.key, limits.get(case.implementation)) for case in chosen])
    except KeyboardInterrupt:
        status = 130
    except NoWorker as error:
        reason = f"verify: no worker starts: {str(error).strip() or 'it gave no reason'}"
        if not log.verdicts:
            raise Failure(reason) from None
        print(reason, file=sys.stderr)
        status = 1
    verdicts = log.verdicts
    _tell(chosen, verdicts, time.monotonic() - log.start)
    if options.trial:
        wrong = module.failures(verdicts, {case.name: case.implementation for case in cases})
        print("\n".join(["Every stand-in was reported as expected."] if not wrong else wrong))
        return status or (1 if wrong else 0)
    _store(options, results.verified(cases, {**(past.alike if _is_of_here(past) else {}), **verdicts}))
    return status or (1 if any(verdict.outcome in FAILED for verdict in verdicts.values()) else 0)


def _controller(options, log: Log, module: ModuleType) -> Controller:
    env = {**ENVIRONMENT, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip()}
    if options.trial:
        env |= TRIAL_ENVIRONMENT
    else:
        env["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    limits = TRIAL if options.trial else Limits(total=max(1.0, options.minutes * 60 - CLOSING_S))
    workers = options.workers
    if not workers:
        stats = {} if options.trial else jax.local_devices(backend="cuda")[0].memory_stats() or {}
        fitting = stats.get("bytes_limit", MOST_WORKERS * WORKER_BYTES) // WORKER_BYTES  # for which the GPU has memory
        workers = max(1, min(MOST_WORKERS, environment.cores() - 2, fitting))
    return Controller(log, command(module.__name__), workers=max(2, workers) if options.trial else workers, env=env, limits=limits)


def _no_gpu() -> str | None:
    """Return the reason why nothing can be verified here, or None."""
    try:
        environment.capability("cuda")
    except RuntimeError as error:
        return f"jax finds no GPU here ({str(error).strip().partition(chr(10))[0]})"
    return None if compute_capability("cuda") else "the GPUs here have several compute capabilities: set CUDA_VISIBLE_DEVICES to one"


def _chosen(options, cases: list[Case], past: Past) -> list[Case]:
    """The cases that the options name and the past does not call right; of other code or another device, all cases of their kinds."""
    left = [case for case in cases if case.name not in past.verdicts or past.verdicts[case.name].outcome != "right"]
    if past.verdicts and not _is_of_here(past):
        kinds = {case.key for case in left}
        left = [case for case in cases if case.key in kinds]
    families, texts = options.family or {case.family for case in left}, options.only or [""]
    return [case for case in left if case.family in families and any(text in case.name for text in texts)]


def _check_writable() -> None:
    """Raise before three minutes are spent what writing the record would raise."""
    try:
        table_file.check_writable(table_file.record_path())
    except (OSError, ValueError) as error:
        raise Failure(f"verify: the record cannot be written: {error}") from None


def _events(options) -> pathlib.Path:
    """The file of events of the last run, beside the record: with `--again`, a run that was killed goes on from it."""
    path = table_file.record_path().with_name("verify.jsonl")
    if not (options.again and path.exists() and path.samefile(options.again)):
        path.unlink(missing_ok=True)
    return path


def _is_of_here(past: Past) -> bool:
    return is_alike(past.environment, environment.report())


def _store(options, verified: Mapping[str, Any]) -> None:
    """Add to the user's own record, and to the file that is shared, with digests of the code of what was right."""
    if not verified:
        print("Nothing was stored: no kind of kernels had a right first case.")
        return
    entry = Entry.of(active.context("cuda"), datetime.datetime.now(datetime.UTC).date(), {}, verified=verified)
    right = sum(each.right for each in verified.values())
    try:
        table_file.merge(table_file.record_path(), [entry])
        print(f"{counted(right, 'kind')} of kernels right and {len(verified) - right} wrong: {table_file.record_path()}")
        if options.share:
            from jaxext.bench.shipping import shipped

            table_file.merge(options.share, [shipped(entry)])
            print(f"also with digests of the code that ran: {options.share}")
    except (OSError, ValueError) as error:
        raise Failure(f"verify: the record cannot be written: {error}") from None


def _tell(cases: list[Case], verdicts: Mapping[str, Verdict], seconds: float) -> None:
    """The first failures and the table, in at most `ROOM` characters where that is no terminal."""
    columns, rows = results.table(cases, verdicts)
    title = f"{counted(len(cases), 'case')} in {seconds:.0f} s: {counts(verdicts.values()) or 'none finished'}"
    tables = Grid(title, columns, rows), results.LEGEND, *results.graphs(verdicts.values())
    room = ROOM - sum(len(as_lines(table)) + 2 for table in tables)
    for line in results.failures(cases, verdicts, max(1000, room)):
        print(line)
    show(*tables)


def _nvidia_smi() -> str:
    """The driver and the clocks of the GPUs, or why they are not known."""
    query = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu"
    try:
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown: {type(error).__name__}: {error}"


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[Controller], object]]:
    """A bar on a terminal, otherwise a line from time to time."""
    if not sys.stderr.isatty():
        last = time.monotonic()

        def print_line(controller: Controller) -> None:
            nonlocal last
            if (now := time.monotonic()) - last >= LINE_S:
                last = now
                found = f"{len(controller.log.verdicts)} of {total}, {_words(controller)}"
                print(f"{now - controller.log.start:.0f} s: {found}", file=sys.stderr, flush=True)

        yield print_line
        return
    import rich.console
    import rich.progress

    bar = rich.progress.Progress(console=rich.console.Console(stderr=True), transient=True)
    with bar:
        task = bar.add_task("verify", total=total)
        yield lambda controller: bar.update(task, completed=len(controller.log.verdicts), description=_words(controller))


def _words(controller: Controller) -> str:
    return counts(controller.log.verdicts.values()) or "starting"
