"""The table of compiled kernels, without a GPU: registers, spills, shared memory and the instructions that matter.

    python -m benchmarks.kernel_table --of triton --problem mamba --arch 90
    python -m benchmarks.kernel_table --of cuda --kernel depthwise
    python -m benchmarks.kernel_table --others none --check --json kernels.json

Triton kernels are compiled on this machine, for each config.  CUDA kernels are read from the module that was compiled at installation.
Lines end with the laws that a kernel breaks, if any.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import pathlib
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from jaxext.bench import triton_ptx
from jaxext.cli.terminal import UsageError, count, make_folders, says_json, tell
from jaxext.core.family import families
from jaxext.tables.environment import report

from . import compiled, compiled_cuda, device_code
from .kernel_problems import KERNELS

TABLES: dict[str, Any] = {"triton": compiled, "cuda": compiled_cuda}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 1 if no kernel could be read or, with --check, one breaks a law."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", choices=tuple(TABLES), help="only these (default: all that can be read here)")
    parser.add_argument("--kernel", metavar="FAMILY", help="only kernels whose names begin so")
    parser.add_argument("--arch", type=_archs, default=(), metavar="SM,SM", help="only for these GPUs, such as 80,90")
    parser.add_argument("--problem", metavar="SUBSTRING", help="Triton's: only problems whose names contain this")
    parser.add_argument("--others", choices=("none", "picks", "every"), help="Triton's: of problems not tagged sweep")
    parser.add_argument("--jobs", type=count, default=os.cpu_count(), metavar="N", help="Triton's: processes (default: %(default)s)")
    parser.add_argument("--module", type=pathlib.Path, metavar="PATH", help="CUDA's: the compiled module, if it is not jaxext's own")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a kernel breaks a law")
    parser.add_argument(
        "--digests", type=pathlib.Path, metavar="PATH", help="Triton's: write a hash of each kernel there, if none breaks a law"
    )
    says_json(parser)
    options = parser.parse_args(arguments)
    try:
        make_folders(options)
        return run(options)
    except UsageError as error:
        parser.error(str(error))


def run(options: argparse.Namespace) -> int:
    document: dict[str, Any] = {}
    bad = 0
    for name in _asked_for(options):
        table = TABLES[name]
        if reason := triton_ptx.missing() if name == "triton" else compiled_cuda.missing(options.module):
            print(f"{name}: {reason}", file=sys.stderr)
            continue
        facts, rows = _of_triton(options) if name == "triton" else _of_cuda(options)
        document[name] = facts | {"rows": _told(table, rows, quietly=options.json == "-")}
        bad += sum(bool(table.offences(row)) for row in document[name]["rows"])
    if options.digests and "triton" in document and not bad:
        table = document["triton"]
        hashes = dict(map(compiled.digests, table["rows"]))
        options.digests.write_text(json.dumps({"environment": report()} | table | {"rows": hashes}, indent=0) + "\n")
    tell(options, {"environment": report()} | document)
    return 1 if not document or options.check and bad else 0


def _asked_for(options) -> list[str]:
    """Return the kinds of kernels to report: an option that only one kind has selects that kind."""
    asked = {options.of} - {None}
    asked |= {"triton"} if (options.problem, options.others, options.digests) != (None, None, None) else set()
    asked |= {"cuda"} if options.module is not None or options.kernel not in (None, *KERNELS, *families) else set()
    if len(asked) > 1:
        raise UsageError(
            "--problem, --others, --digests and names of --kernel are of Triton or CUDA kernels, --module of CUDA kernels: "
            "ask for one of them"
        )
    return [*asked] or [*TABLES]


def _of_triton(options) -> tuple[dict, Iterable[dict]]:
    todo = list(compiled.programs(options.kernel or "", options.problem or "", options.arch, options.others or "picks"))
    if not todo:
        raise UsageError("no problem has such a name, kernel and GPU")
    facts = {"version": importlib.metadata.version("triton"), "device_code": device_code.digest()}
    return facts, compiled.compile_all(todo, options.jobs)


def _of_cuda(options) -> tuple[dict, Iterable[dict]]:
    path = options.module or compiled_cuda.own()
    assert path is not None, "compiled_cuda.missing would have said so"
    module = compiled_cuda.load(path)
    rows = [row for row in compiled_cuda.collect(path, module, options.arch) if row["kernel"].startswith(options.kernel or "")]
    if not rows and options.kernel not in (None, *KERNELS):
        raise UsageError(f"no kernel's name begins with {options.kernel!r}, or none is for such a GPU")
    return {"nvcc": module.cuda_version, "archs": module.archs}, rows


def _told(table, rows: Iterable[dict], quietly: bool) -> list[dict]:
    """The rows, each printed at once."""
    shown, bad = [], []
    if not quietly:
        print(table.HEADER)
    for row in rows:
        shown.append(row)
        if table.offences(row):
            bad.append(row)
        if not quietly:
            print(table.line(row), flush=True)
    if not quietly:
        print(f"{len(shown)} kernels, {len(bad)} bad")
        for row in bad:
            print(table.line(row))
    return shown


def _archs(text: str) -> tuple[int, ...]:
    found = [re.fullmatch(r"(?:sm_)?(\d{2,3})[af]?", part) for part in text.split(",")]
    if not all(found):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of GPUs, want such as 80,90 (compute capability times ten)")
    return tuple(int(match[1]) for match in found if match)


if __name__ == "__main__":
    sys.exit(main())
