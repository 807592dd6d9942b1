"""The command line, `python -m jaxext`: info, explain, doctor, bench, tune, verify and cache.

A command is a function of its options.  Its docstring is its help text.  It returns the exit status: 0 done, 1 found something wrong or
cannot run on this machine, 2 invalid request (of `verify`: no GPU), 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import inspect
import os
import pathlib
import re
import shutil
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence

import jax

import jaxext
from jaxext._compat import PLATFORMS
from jaxext._messages import counted
from jaxext.cli import bench, cache, diagnose, verify
from jaxext.cli.arguments import arch, function, takes_function
from jaxext.cli.info import check_device, facts
from jaxext.cli.terminal import LEAST_WIDTH, Failure, Grid, UsageError, count, failed, make_folders, says_json, tell
from jaxext.tables import environment, table_file
from jaxext.tuning.tune import NOTHING, with_gradient

INTERRUPTED = 130  # the shells' exit status for SIGINT
OUTPUT_ERRORS = {errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}  # error numbers of a failed write


def main(argv: list[str] | None = None) -> int:
    """Run `python -m jaxext` with these arguments (None: those of the process), and return the exit status."""
    if sys.stdout is None:
        return failed("stdout is closed: redirect it, for example to /dev/null")
    options, others = parser().parse_known_args(argv)
    if others:
        options.parser.error(f"unrecognized arguments: {' '.join(others)}")
    try:
        make_folders(options)
        if options.needs_device:
            check_device()
        status = options.run(options)
        sys.stdout.flush()
        return status
    except UsageError as error:
        return options.parser.exit(2, f"{options.parser.prog}: error: {error}\n")
    except Failure as error:
        return failed(str(error))
    except OSError as error:
        if error.filename is not None or error.errno not in OUTPUT_ERRORS:  # raised by the user's function
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # flushing the rest at exit must not fail again
        if error.errno == errno.EPIPE:  # the reader closed the pipe
            return 1
        return failed(f"cannot write: {error.strerror}")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m jaxext", description="Convolution and matmul primitives for JAX.")
    top.add_argument("--version", action="version", version=f"jaxext {jaxext.__version__}")
    width = max(shutil.get_terminal_size().columns, LEAST_WIDTH) - 2
    top.set_defaults(run=_help, parser=top, needs_device=False)
    commands = top.add_subparsers(metavar="COMMAND")
    for name, (run, add_arguments) in COMMANDS.items():
        paragraphs = [textwrap.fill(part, width) if part[:9] != "examples:" else part for part in (inspect.getdoc(run) or "").split("\n\n")]
        command = commands.add_parser(
            name,
            help=" ".join(paragraphs[0].partition(".")[0].split()),
            description="\n\n".join(paragraphs),
            formatter_class=argparse.RawDescriptionHelpFormatter,  # for the examples
        )
        command.set_defaults(run=run, parser=command, needs_device=name in ("info", "explain", "doctor", "tune", "bench"))
        add_arguments(command)
    return top


def _help(options) -> int:
    options.parser.print_help()
    return 0


def _info_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--arch", type=arch, help="the GPU to show, such as sm_80 (default: that of this machine, or sm_90a)")
    says_json(command)


def _info(options) -> int:
    """Show versions, devices, implementations, the active table, verified kernels, and how the CUDA kernels were built.

    Each implementation is asked about a small call of each operation: it is preferred without a table, available, or not available, with
    the reason.  On machines without a GPU this is also shown for a GPU.

    examples:
      python -m jaxext info
      python -m jaxext info --arch sm_100a
      python -m jaxext info --json
    """
    found = facts(options.arch)
    world, devices = found["environment"], [(f"devices: {d['platform']}", f"{d['count']} x {d['kind']}") for d in found["devices"]]
    here = world["versions"] | {name: world[name] for name in ("processor", "commit")}
    calls: dict[tuple, list[str]] = {}  # those for which an implementation has one state
    for row in found["implementations"]:
        calls.setdefault((row["platform"], row["implementation"], row["is"]), []).append(row["call"])
    alike: dict[tuple, list[str]] = {}  # the platforms on which it has that state for the same calls
    for (platform, name, state), each in calls.items():
        alike.setdefault((name, ", ".join(each), state), []).append(platform)
    columns = ("property", "value")
    implementations = sorted((", ".join(platforms), *same) for same, platforms in alike.items())
    tell(
        options,
        found,
        Grid("This machine", columns, [*_known(here), *devices]),
        Grid(
            "Implementations (of an absent GPU: in programs for it)", ("platform", "implementation", "operation", "state"), implementations
        ),
        *(
            [Grid("Kernels of other packages (entry points of jaxext.kernels)", columns, _known(theirs))]
            if (theirs := found["packages"])
            else []
        ),
        Grid("Table of measurements", columns, _known(found["table"])),
        Grid("Verified kernels", columns, _known(found["verified"])),
        Grid("CUDA kernels (NVRTC and the launcher are for kernels that are given as text)", columns, _known(found["build"])),
    )
    return 0


def _known(facts: dict) -> list[tuple]:
    return [(what, value) for what, value in facts.items() if value not in (None, "")]


def _explain_arguments(command: argparse.ArgumentParser) -> None:
    takes_function(command)
    command.add_argument("--platform", choices=PLATFORMS, help="default: that of --arch, or of this machine")
    command.add_argument("--arch", type=arch, help="choose for this GPU, such as sm_90a; no GPU is needed")
    command.add_argument("--backward", action="store_true", help="also list its gradient in all floating-point arguments")
    command.add_argument("--table", metavar="PATH", help='table of measurements to choose by, or "none" (default: the active table)')
    says_json(command)


def _explain(options) -> int:
    """List the operations of a function, the implementation of each, and why not the others.  The function is traced, not run.

    Without a SHAPE the function is called without arguments.

    examples:
      python -m jaxext explain jaxext:matmul f32[8,4] f32[4,2]
      python -m jaxext explain mynet:loss f32[1000] f32[64,32,32,3] --backward
      python -m jaxext explain mynet:loss "{w: f32[3,3,3,64], b: f32[64]}" f32[64,32,32,3] --in-place-of-lax
      python -m jaxext explain mynet:benchmark --arch sm_90a --table none --json
    """
    fun = function(options.function, options.shapes)
    if options.backward and not jax.tree.leaves(options.shapes):
        raise UsageError("--backward: there is no argument to differentiate by, give a SHAPE for each")
    platform = options.platform or ("cuda" if options.arch else None)
    with jaxext.use_target(options.arch), _products_of_lax(options), _table(options):
        explanation = jaxext.explain(with_gradient(fun) if options.backward else fun, platform=platform)(*options.shapes)
    tell(options, dataclasses.asdict(explanation), str(explanation))
    return 0


def _products_of_lax(options) -> contextlib.AbstractContextManager:
    return jaxext.in_place_of_lax() if options.in_place_of_lax else contextlib.nullcontext()


def _table(options) -> contextlib.AbstractContextManager:
    try:
        return jaxext.use_table(None if options.table == "none" else options.table) if options.table else contextlib.nullcontext()
    except FileNotFoundError as error:
        raise UsageError(f"--table: {error}") from None


def _bench(options) -> int:
    """Measure problems of the suite with lax, with jaxext's rewrites for XLA and with its kernels, side by side in one run.

    Without a GPU the problems are reduced to sizes for a CPU.  Ctrl-C keeps what was measured.

    examples:
      python -m jaxext bench --tags depthwise --json depthwise.json
      python -m jaxext bench --only resnet --implementation xla
      python -m jaxext bench --compare before.json after.json
    """
    return bench.run(options)


def _tune_arguments(command: argparse.ArgumentParser) -> None:
    takes_function(command, nargs="?")
    bench.add_selection(command)
    command.add_argument("--no-backward", dest="backward", action="store_false", help="do not measure the gradient of the function")
    command.add_argument("--candidates", type=count, default=8, metavar="N", help="configs per implementation (default: %(default)s)")
    command.add_argument("--tolerance", type=float, metavar="E", help="also measure 'fft', with this relative error at most")
    command.add_argument("--table", metavar="PATH", help="store the measurements in this table (default: the user's own)")
    says_json(command)


def _tune(options) -> int:
    """Measure the implementations of each operation of a function, or of problems of the suite, and store the times for later programs.

    A candidate with a wrong result is reported and never used, and the exit status is 1.  Ctrl-C keeps what was measured.

    examples:
      python -m jaxext tune mynet:loss f32[1000] f32[64,32,32,3]
      python -m jaxext tune --tags resnet50 --table resnet50.json
    """
    rows = []

    def progress(row, done: int, of: int) -> None:
        rows.append(row)
        if options.json != "-":
            print(f"{row}\n", flush=True)

    todo = list(_to_tune(options))
    path = pathlib.Path(options.table or table_file.default_path())
    try:
        table_file.check_writable(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"--table: {error}") from None
    status = 0
    try:
        with _products_of_lax(options), warnings.catch_warnings():
            warnings.filterwarnings("ignore", f"tune: {re.escape(NOTHING)}")  # reported below
            for i, (name, fun, arrays, backward) in enumerate(todo, 1):
                print(f"{i} of {len(todo)}: {name}", file=sys.stderr)
                jaxext.tune(
                    fun, backward=backward, candidates=options.candidates, tolerance=options.tolerance, table=path, progress=progress
                )(*arrays)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = INTERRUPTED
    world = environment.report()
    document = {"environment": world, "table": path, "interrupted": bool(status), "rows": [dataclasses.asdict(row) for row in rows]}
    tell(options, document, *([f"{counted(len(rows), 'operation')} on {world['device']}: {path}"] if rows else []))
    if not rows and not status:
        return failed(f"tune: {NOTHING}")
    return status or (1 if any(candidate.wrong for row in rows for candidate in row.candidates) else 0)


def _to_tune(options) -> Iterator[tuple[str, Callable, Sequence[jax.ShapeDtypeStruct], bool]]:
    """The name, function and arguments of each, and whether its gradient counts."""
    if options.function:
        for name in ("tags", "only", "roles", "dtype", "full", "reduced", "quick"):
            if getattr(options, name):
                raise UsageError(f"--{name} chooses from the suite, want it without a function")
        backward = options.backward and bool(jax.tree.leaves(options.shapes))
        yield options.function, function(options.function, options.shapes), options.shapes, backward
        return
    if options.in_place_of_lax:
        raise UsageError("--in-place-of-lax needs a module:function")
    if not options.tags and not options.only:
        raise UsageError("give a module:function, or --tags or --only to choose from the suite (all of it takes hours)")
    cases = bench.cases(options)
    with_step = {(case.problem, case.numbers) for case in cases if case.role == "step"}  # a step includes the other roles
    for case in cases:
        if case.role == "step" or (case.problem, case.numbers) not in with_step:
            arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(case.shapes, case.dtypes, strict=True)]
            yield case.name, case.build("jaxext"), arrays, False


COMMANDS = {
    "info": (_info, _info_arguments),
    "explain": (_explain, _explain_arguments),
    "doctor": (diagnose.doctor, diagnose.add_arguments),
    "bench": (_bench, bench.add_arguments),
    "tune": (_tune, _tune_arguments),
    "verify": (verify.verify, verify.add_arguments),
    "cache": (cache.cache, cache.add_arguments),
}
